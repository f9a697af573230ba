"""Sessions: typed records, turns over one KV cache, and whatever ends a stream early."""

import gc
import weakref

import numpy as np
import psutil
import pytest
from serving import TEMPLATE

from flashllm.errors import ChecksumError, FlashIOError, FormatError, UsageError
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import PrefillRecord, Session, TokenRecord
from flashllm.generate.templates.chat_template import ChatTemplate
from flashllm.generate.tokenizer import Tokenizer
from flashllm.hf.model import FlashModel

PROMPTS = ("One day a girl found", "It was")  # more and fewer new tokens than K0


@pytest.fixture
def session(tiny, opened):
    """Makes sessions over a loaded bfloat16 model whose predictor is often wrong, or over the model given."""
    made = []

    def make(model=None, *, template=None, predictors="random", **options):
        tiny_model = tiny("bfloat16")
        model = opened(tiny_model.path(predictors)) if model is None else model
        tokenizer = Tokenizer.load(tiny_model.path(predictors))
        rendered = None if template is None else ChatTemplate(template, "here")
        made.append(Session(model, tokenizer, SamplingOptions(**{"max_new_tokens": 10, **options}), template=rendered))
        return made[-1]

    yield make
    for one in made:
        one.close()


def run(stream):
    """(token ids, text, records) of a stream."""
    records = list(stream)
    tokens = [record for record in records if isinstance(record, TokenRecord)]
    return [token.token_id for token in tokens], "".join(token.text for token in tokens), records


# What is generated


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_equals_generate(session, tiny, prompt):
    one = session(max_new_tokens=20)
    ids, text, _ = run(one.stream(prompt))
    inputs = tiny("bfloat16").tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    out = FlashModel(one.model).generate(**inputs, max_new_tokens=20, do_sample=False)[0]
    assert out[inputs["input_ids"].shape[1] :].tolist() == ids
    assert one.tokenizer.decode(ids) == text
    assert one.tokens == inputs["input_ids"][0].tolist() + ids


# Records


@pytest.mark.parametrize("mode", ["sparse", "oracle", "dense"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_records_add_up(session, opened, tiny, mode, prompt):
    one = session(opened(tiny("bfloat16").path("random"), mode=mode))
    prefill, *tokens = run(one.stream(prompt))[2]
    assert isinstance(prefill, PrefillRecord)
    num_tokens = len(one.tokenizer.encode(prompt))
    assert (prefill.tokens, prefill.reused_tokens, prefill.dense) == (num_tokens, 0, num_tokens > 8)
    assert len(tokens) == 10
    layer_nbytes = one.model.manifest.rows.layer_nbytes
    for record in (prefill, *tokens):
        times = record.times
        parts = (times.io_ms, times.memory_ms, times.compute_ms, times.other_ms)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(times.total_ms, abs=1e-6)
        assert times.hits + times.misses == times.active
        assert times.retries == 0
    stride = one.model.manifest.rows.stride
    first, *later = [token.times for token in tokens]
    assert (first.bytes_read, first.active) == (0, 0)  # its pass was the prefill's
    if mode == "sparse":
        assert all(times.bytes_read == times.misses * stride for times in later)
        assert sum(times.hits for times in later) > 0
    elif mode == "oracle":
        assert all(times.bytes_read == 3 * layer_nbytes + times.misses * stride for times in later)
    else:  # without a limit every row fits, and was kept by the prompt's pass
        assert all(times.bytes_read == 0 for times in later)
        assert prefill.times.bytes_read == 3 * layer_nbytes
    assert all((times.active > 0) == (mode != "dense") for times in later)


def test_retries_are_counted_in_the_record_they_belong_to(session, opened, tiny):
    one = session(opened(tiny("bfloat16").path("random"), io_threads=1, cache_policy="window"))
    expected = run(one.stream(PROMPTS[0]))[0]
    one.reset()
    stream = one.stream(PROMPTS[0])
    records = [next(stream)]
    one.model.parts.file.inject("error", 0, count=2, argument=5)  # tried twice more
    records += list(stream)
    assert [record.token_id for record in records[1:]] == expected
    assert [record.times.retries for record in records] == [0, 0, 2, *[0] * 8]


# Turns


def test_a_chat_template_keeps_what_the_turns_share(session):
    one = session(template=TEMPLATE, predictors="all", temperature=1.0, seed=5, max_new_tokens=6)
    one.system = "be brief"
    _, answer, _ = run(one.stream_chat("hello"))
    assert one.messages == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": answer}]
    before = one.tokens
    records = run(one.stream_chat("who?"))[2]
    messages = [{"role": "system", "content": "be brief"}, *one.messages[:3]]
    rendered = one.tokenizer.encode(ChatTemplate(TEMPLATE, "here").render(messages), add_special=False)
    prompt_nbytes = records[0].reused_tokens + records[0].tokens
    assert one.tokens[:prompt_nbytes] == rendered
    shared = next(i for i, (a, b) in enumerate(zip(before, rendered, strict=False)) if a != b)
    assert records[0].reused_tokens == min(shared, len(before) - 1)
    assert shared > len(one.tokenizer.encode("be brief hello"))


def test_without_a_template_the_turns_are_lines_of_one_text(session):
    one = session(max_new_tokens=3)
    one.system = "Once"
    ids = run(one.stream_chat("upon"))[0]
    assert one.tokens == one.tokenizer.encode("Once\nupon") + ids
    more = run(one.stream_chat("a time"))[0]
    line = one.tokenizer.encode("\na time", add_special=False)
    assert one.tokens == one.tokenizer.encode("Once\nupon") + ids + line + more


def test_nothing_to_continue(session):
    one = session()
    with pytest.raises(UsageError, match="nothing to continue"):
        run(one.stream("", add_special=False))


# What ends a stream early


@pytest.mark.parametrize(("mode", "reads"), [("sparse", (0, 1, 2, 4, 7, 11, 14, 20, 30)), ("oracle", (4,))])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_an_interruption_in_a_pass_leaves_the_session_as_after_the_last_record(  # noqa: PLR0917 - fixtures
    session, opened, tiny, mode, reads, prompt
):
    """Ctrl-C while a read is under way: in any layer of the prompt's pass, and in later tokens' passes."""
    options = {"mode": mode, "cache_policy": "window", "window": 1}
    one = session(opened(tiny("bfloat16").path("random"), **options), max_new_tokens=6)
    first, answer = (run(one.stream(text, add_special=at == 0))[0] for at, text in enumerate((PROMPTS[1], prompt)))
    turn = one.tokenizer.encode(prompt, add_special=False)
    for read in reads:
        one.reset()
        one.options = SamplingOptions(max_new_tokens=6)
        assert run(one.stream(PROMPTS[1]))[0] == first
        before, told = one.tokens, []
        one.model.parts.file.inject("interrupt", read)
        with pytest.raises(KeyboardInterrupt):
            told.extend(one.stream(prompt, add_special=False))  # extend keeps what came before the interruption
        if not told:
            assert one.tokens == before
            assert run(one.stream(prompt, add_special=False))[0] == answer
        else:
            known = len(told) - 1
            assert one.tokens == before + turn + answer[:known]
            one.options = SamplingOptions(max_new_tokens=6 - known)
            assert run(one.stream("", add_special=False))[0] == answer[known:]  # goes on as if nothing had been


FAULTS = [
    ("error", FlashIOError, r"layer \d, neuron \d+: .*ffn\.safetensors"),
    ("flip", ChecksumError, r"layer \d, neuron"),
    ("end_of_file", FormatError, r"layer \d, neuron \d+: .*ffn\.safetensors ends at byte"),
]


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["plain", "template"])
def test_a_fault_ends_the_turn_and_nothing_else(session, template):
    one = session(template=template, max_new_tokens=5)
    turns = ("hello", "who is there, and what of the others?", "so")
    expected = [run(one.stream_chat(text))[0] for text in turns]
    for kind, error, where in FAULTS:
        one.reset()
        run(one.stream_chat(turns[0]))
        state = one.tokens, list(one.messages)
        for count in (30, 10**6):  # 30: more than the tries of all reads that fly at once
            one.model.parts.file.inject(kind, 0, count=count, argument=5)
            with pytest.raises(error, match=where):
                run(one.stream_chat(turns[1]))
            assert (one.tokens, one.messages) == state
        one.model.parts.file.inject("error", 2**60)
        assert [run(one.stream_chat(text))[0] for text in turns[1:]] == expected[1:]


# Closing


def test_a_forgotten_session_gives_its_memory_back(opened, tiny):
    model = opened(tiny("bfloat16").path("random"))
    forgotten = Session(model, Tokenizer.load(tiny("bfloat16").path()))
    stream = forgotten.stream(PROMPTS[0])
    next(stream)
    assert model._memory.pages == 1
    gone = weakref.ref(forgotten)
    del forgotten, stream
    gc.collect()
    assert gone() is None
    assert model._memory.pages == 0


def test_a_session_of_a_closed_model(session):
    one = session()
    run(one.stream(PROMPTS[1]))
    one.model.close()
    with pytest.raises(UsageError, match="the model is closed"):
        run(one.stream("x"))
    one.close()


def test_memory_does_not_grow_with_the_tokens(session, opened, tiny):
    one = session(opened(tiny("bfloat16").path("random"), io_threads=32), max_new_tokens=80)
    process, held = psutil.Process(), []
    gc.freeze()  # what other tests have left need not be looked through each time
    for _ in range(6):
        run(one.stream(PROMPTS[1]))
        one.reset()
        gc.collect()
        held.append(process.memory_info().rss)
    gc.unfreeze()
    grown = np.diff(held[1:])
    assert min(grown) < 250_000  # of 80 tokens: what grows with them grows each time, what else there is does not
