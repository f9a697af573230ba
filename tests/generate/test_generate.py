"""Sessions: typed records, turns over one KV cache, and whatever ends a stream early."""

import gc
import itertools
import weakref

import psutil
import pytest
import torch

from flashllm.engine.attention import ContextFull
from flashllm.errors import ChecksumError, FlashIOError, UsageError
from flashllm.generate.session import PrefillRecord, SamplingOptions, Session, TokenRecord

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
PROMPTS = ("One day a girl found", "It was")  # more and fewer new tokens than K0


@pytest.fixture
def session(tiny, load):
    """Makes sessions over one loaded bfloat16 model whose predictor is often wrong, or over the model given."""
    made = []

    def make(model=None, *, template=None, predictors="random", **options):
        tiny_model = tiny("bfloat16")
        model = load(tiny_model.path(predictors)) if model is None else model
        tokenizer = tiny_model.tokenizer
        tokenizer.chat_template = template
        made.append(Session(model, tokenizer, SamplingOptions(**{"max_new_tokens": 10, **options})))
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
    one.close()
    inputs = tiny("bfloat16").tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    out = one.model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert out.tolist() == ids
    assert one.tokenizer.decode(ids, skip_special_tokens=True) == text
    assert one.tokens == inputs["input_ids"][0].tolist() + ids


def test_sampling_repeats_with_a_seed_and_differs_without(session):
    first = session(temperature=1.5, seed=3)
    outputs = [run(first.stream(PROMPTS[0]))[0]]
    for seed in (3, 4, None, None):
        first.close()
        first = session(first.model, temperature=1.5, seed=seed)
        outputs.append(run(first.stream(PROMPTS[0]))[0])
    assert outputs[0] == outputs[1]
    assert len({tuple(output) for output in outputs}) == 4


def test_filters_narrow_the_choice_to_the_greedy_one(session):
    greedy = session()
    expected = run(greedy.stream(PROMPTS[0]))[0]
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-6}):
        greedy.close()
        greedy = session(greedy.model, **{"temperature": 1.0, "seed": 0, **options})
        assert run(greedy.stream(PROMPTS[0]))[0] == expected


def test_a_repetition_penalty_forbids_repetition(session):
    ids = run(session(repetition_penalty=1e6, max_new_tokens=30).stream(PROMPTS[1]))[0]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e-40},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"repetition_penalty": 0.0},
        {"stop": ("",)},
    ],
    ids=str,
)
def test_bad_options_are_named(bad):
    with pytest.raises(UsageError, match=f"--{next(iter(bad)).replace('_', '-')} cannot be"):
        SamplingOptions(**bad)


def test_a_stop_string_ends_the_answer_and_is_not_shown(session):
    free = session(temperature=1.0, seed=1, max_new_tokens=40, predictors="all")
    text = run(free.stream(PROMPTS[0]))[1]
    stop = next(a + b for a, b in itertools.pairwise(text) if (a + b).isascii() and a != b)
    free.close()
    stopped = session(free.model, temperature=1.0, seed=1, max_new_tokens=40, stop=("never", stop))
    ids, shown, _ = run(stopped.stream(PROMPTS[0]))
    assert (stopped.stopped, shown) == ("stop", text[: text.index(stop)])
    assert len(ids) < 40
    assert stopped.tokens[-len(ids) :] == ids  # the context keeps what was generated


def test_the_end_token_ends_the_answer(session):
    one = session()
    ids, _, _ = run(one.stream(PROMPTS[0]))
    assert one.stopped == "length"
    end = ids[3]
    for ends in (end, [end, 299]):
        one.reset()
        one.model.generation_config.eos_token_id = ends
        again = run(one.stream(PROMPTS[0]))[0]
        assert (again, one.stopped) == (ids[: ids.index(end) + 1], "eos")


# Records


@pytest.mark.parametrize("mode", ["sparse", "oracle", "dense"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_records_add_up(session, load, tiny, mode, prompt):
    one = session(load(tiny("bfloat16").path("random"), mode=mode))
    prefill, *tokens = run(one.stream(prompt))[2]
    assert isinstance(prefill, PrefillRecord)
    num_tokens = len(one.tokenizer(prompt)["input_ids"])
    assert (prefill.tokens, prefill.reused_tokens, prefill.dense) == (num_tokens, 0, num_tokens > 8)
    assert len(tokens) == 10
    layer_nbytes = one.model.engine.manifest.rows.layer_nbytes
    for record in (prefill, *tokens):
        times = record.times
        parts = (times.io_ms, times.memory_ms, times.compute_ms, times.other_ms)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(times.total_ms, abs=1e-6)
        assert times.hits + times.misses == times.active
        assert times.retries == 0
    stride = one.model.engine.manifest.rows.stride
    first, *later = [token.times for token in tokens]
    assert (first.bytes_read, first.active) == (0, 0)  # its pass was the prefill's
    if mode == "sparse":
        assert all(times.bytes_read == times.misses * stride for times in later)
        assert sum(times.hits for times in later) > 0
    else:
        assert all(times.bytes_read == 3 * layer_nbytes + times.misses * stride for times in later)
    assert all((times.active > 0) == (mode != "dense") for times in later)


def test_retries_are_counted_in_the_record_they_belong_to(session, load, tiny):
    one = session(load(tiny("bfloat16").path("random"), io_threads=1, cache_policy="window"))
    expected = run(one.stream(PROMPTS[0]))[0]
    one.reset()
    stream = one.stream(PROMPTS[0])
    records = [next(stream)]
    one.model.engine._file.inject("error", 0, count=2, argument=5)  # tried twice more
    records += list(stream)
    assert [record.token_id for record in records[1:]] == expected
    assert [record.times.retries for record in records] == [0, 0, 2, *[0] * 8]


# Turns


@pytest.mark.parametrize("predictors", ["random", "all"])
def test_a_second_turn_equals_the_same_computation_at_once(session, tiny, predictors):
    """The same chunks of tokens give the same bits, however they came to be in the cache."""
    one = session(predictors=predictors)
    run(one.stream("It was"))
    second, _, records = run(one.stream(" home", add_special=False))
    assert records[0].reused_tokens == len(one.tokenizer("It was")["input_ids"]) + 9
    whole, chunks = one.tokens, []
    start = len(one.tokenizer("It was")["input_ids"])
    chunks += [whole[:start], *[[t] for t in whole[start : start + 9]]]
    turn = records[0].tokens
    chunks += [whole[start + 9 : start + 9 + turn], *[[t] for t in whole[start + 9 + turn : -1]]]
    one.close()
    cache, logits = one.model.new_cache(), []
    for chunk in chunks:
        out = one.model(torch.tensor([chunk]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits.append(int(out.logits[0, -1].argmax()))
    assert logits[-10:] == second


def test_turns_equal_hugging_face_over_the_whole_text(session, tiny):
    one = session(predictors="all")
    run(one.stream(PROMPTS[0]))
    run(one.stream(" and then she", add_special=False))
    with torch.no_grad():
        expected = tiny("bfloat16").reference(torch.tensor([one.tokens])).logits[0]
    one.close()
    ours = one.model(torch.tensor([one.tokens])).logits[0]
    assert (ours - expected).abs().max() < 0.13


def test_a_chat_template_keeps_what_the_turns_share(session):
    one = session(template=TEMPLATE, predictors="all", temperature=1.0, seed=5, max_new_tokens=6)
    one.system = "be brief"
    _, answer, _ = run(one.stream_chat("hello"))
    assert one.messages == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": answer}]
    before = one.tokens
    records = run(one.stream_chat("who?"))[2]
    rendered = one.tokenizer.apply_chat_template(
        [{"role": "system", "content": "be brief"}, *one.messages[:3]],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
    )["input_ids"]
    prompt_nbytes = records[0].reused_tokens + records[0].tokens
    assert one.tokens[:prompt_nbytes] == rendered
    shared = next(i for i, (a, b) in enumerate(zip(before, rendered, strict=False)) if a != b)
    assert records[0].reused_tokens == min(shared, len(before) - 1)
    assert shared > len(one.tokenizer("be brief hello")["input_ids"])


def test_without_a_template_the_turns_are_lines_of_one_text(session):
    one = session(max_new_tokens=3)
    one.system = "Once"
    ids = run(one.stream_chat("upon"))[0]
    assert one.tokens == one.tokenizer("Once\nupon")["input_ids"] + ids
    more = run(one.stream_chat("a time"))[0]
    line = one.tokenizer("\na time", add_special_tokens=False)["input_ids"]
    assert one.tokens == one.tokenizer("Once\nupon")["input_ids"] + ids + line + more


def test_reset_begins_anew(session):
    one = session()
    expected = run(one.stream(PROMPTS[0]))[0]
    assert run(one.stream(PROMPTS[0]))[0] != expected
    one.reset()
    assert one.tokens == []
    assert run(one.stream(PROMPTS[0]))[0] == expected


def test_nothing_to_continue(session):
    one = session()
    with pytest.raises(UsageError, match="nothing to continue"):
        run(one.stream("", add_special=False))


# The context's end


def test_the_context_limit_is_announced_before_anything_changes(session, load, tiny):
    model = load(tiny("bfloat16").path("random"), context=24)
    for template in (None, TEMPLATE):
        one = session(model, template=template, max_new_tokens=2)
        run(one.stream_chat("hello"))
        tokens, messages = one.tokens, list(one.messages)
        with pytest.raises(ContextFull, match=r"context limit of 24 tokens is reached: .* shorten the text"):
            run(one.stream_chat("much too long a text for this " * 2))
        assert (one.tokens, one.messages) == (tokens, messages)
        run(one.stream_chat("ok"))  # what is shorter goes on
        one.close()


def test_generation_that_meets_the_limit_stops_there(session, load, tiny):
    one = session(load(tiny("bfloat16").path("random"), context=16), max_new_tokens=50)
    prompt = len(one.tokenizer(PROMPTS[1])["input_ids"])
    ids, _, _ = run(one.stream(PROMPTS[1]))
    assert one.stopped == "context"
    assert len(ids) == 16 - prompt + 1  # the last one is known without being computed further
    with pytest.raises(ContextFull, match="16 are in use"):
        run(one.stream("x"))
    unlimited = session(max_new_tokens=len(ids))
    assert run(unlimited.stream(PROMPTS[1]))[0] == ids


# What ends a stream early


@pytest.mark.parametrize("after", [1, 2, 4], ids=["prefill", "first token", "third token"])
def test_a_closed_stream_leaves_what_was_told(session, after):
    one = session()
    whole = run(one.stream(PROMPTS[0]))[0]
    one.reset()
    stream = one.stream(PROMPTS[0])
    told = [next(stream) for _ in range(after)]
    stream.close()
    ids = [record.token_id for record in told[1:]]
    assert ids == whole[: after - 1]
    prompt = one.tokenizer(PROMPTS[0])["input_ids"]
    assert one.tokens == prompt + ids
    rest, _, records = run(one.stream(" and", add_special=False))
    assert len(rest) == 10
    assert records[0].reused_tokens == len(prompt) + max(0, after - 2)


def interrupt_at(model, layer, call):
    """A hook that raises KeyboardInterrupt in the given layer's `call`-th pass from now."""
    calls = iter(range(1, 10**6))

    def raise_then(*_):
        if next(calls) == call:
            raise KeyboardInterrupt

    return model.model.decoder.layers[layer].self_attn.out_proj.register_forward_hook(raise_then)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("call", [1, 2, 5], ids=["in the prefill", "in the second token", "later"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_an_interruption_in_a_pass_leaves_the_session_as_it_was(session, layer, call, prompt):
    one = session(max_new_tokens=6)
    plain = [run(one.stream(text, add_special=first))[0] for text, first in ((PROMPTS[1], True), (prompt, False))]
    one.reset()
    assert run(one.stream(PROMPTS[1]))[0] == plain[0]
    before = one.tokens
    handle, told = interrupt_at(one.model, layer, call), []
    with pytest.raises(KeyboardInterrupt):
        told.extend(one.stream(prompt, add_special=False))  # extend keeps what came before the interruption
    handle.remove()
    if call == 1:
        assert one.tokens == before
        assert run(one.stream(prompt, add_special=False))[0] == plain[1]
    else:
        turn = one.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert one.tokens == before + turn + plain[1][: call - 1]
        one.options = SamplingOptions(max_new_tokens=6 - (call - 1))
        assert run(one.stream("", add_special=False))[0] == plain[1][call - 1 :]  # goes on as if nothing had been


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["plain", "template"])
@pytest.mark.parametrize(
    ("kind", "error", "where"),
    [
        ("error", FlashIOError, r"layer \d, neuron \d+: .*ffn\.safetensors"),
        ("flip", ChecksumError, r"layer \d, neuron"),
    ],
)
def test_a_fault_ends_the_turn_and_nothing_else(session, template, kind, error, where):
    one = session(template=template, max_new_tokens=5)
    expected = [run(one.stream_chat(text))[0] for text in ("hello", "who is there, and what of the others?", "so")]
    one.reset()
    run(one.stream_chat("hello"))
    state = one.tokens, list(one.messages)
    for count in (30, 10**6):  # 30: more than the tries of all reads that fly at once
        one.model.engine._file.inject(kind, 0, count=count, argument=5)
        with pytest.raises(error, match=where):
            run(one.stream_chat("who is there, and what of the others?"))
        assert (one.tokens, one.messages) == state
    one.model.engine._file.inject("error", 2**60)
    assert run(one.stream_chat("who is there, and what of the others?"))[0] == expected[1]
    assert run(one.stream_chat("so"))[0] == expected[2]


def test_a_fault_in_the_middle_of_an_answer(session):
    one = session(max_new_tokens=8)
    expected = run(one.stream(PROMPTS[0]))[0]
    one.close()
    one = session(max_new_tokens=8)
    stream = one.stream(PROMPTS[0])
    told = list(itertools.islice(stream, 4))
    one.model.engine._file.inject("error", 0, count=10**6, argument=5)
    with pytest.raises(FlashIOError, match="layer"):
        told.extend(stream)
    one.model.engine._file.inject("error", 2**60)
    known = len(told) - 1
    one.options = SamplingOptions(max_new_tokens=8 - known)
    assert run(one.stream("", add_special=False))[0] == expected[known:]


def test_a_newer_turn_ends_the_older_stream(session):
    one = session()
    old = one.stream(PROMPTS[0])
    next(old), next(old)
    new = run(one.stream(" and", add_special=False))[0]
    tokens = one.tokens
    with pytest.raises(UsageError, match="ended by a newer turn"):
        next(old)
    assert one.tokens == tokens
    assert tokens[-len(new) :] == new


# Closing


def test_one_session_at_a_time_and_the_error_says_so(session):
    first = session()
    run(first.stream(PROMPTS[1]))
    with pytest.raises(UsageError, match="in use by another conversation; close that session"):
        session(first.model)
    with pytest.raises(UsageError, match="in use by another conversation"):
        first.model.generate(torch.tensor([[5, 6]]), max_new_tokens=1)
    with first:
        pass
    first.close()
    second = session(first.model)
    run(second.stream(PROMPTS[1]))
    with pytest.raises(UsageError, match="session is closed"):
        run(first.stream("x"))
    first.reset()  # touches nothing of the second one's
    assert second._cache.get_seq_length() == len(second.tokens) - 1


def test_a_forgotten_session_frees_the_cache(session, load, tiny):
    model = load(tiny("bfloat16").path("random"))
    forgotten = Session(model, tiny("bfloat16").tokenizer)
    stream = forgotten.stream(PROMPTS[0])
    next(stream)
    gone = weakref.ref(forgotten)
    del forgotten, stream
    gc.collect()
    assert gone() is None
    run(session(model).stream(PROMPTS[0]))


def test_a_session_of_a_closed_model(session):
    one = session()
    run(one.stream(PROMPTS[1]))
    one.model.engine.close()
    with pytest.raises(UsageError, match="the model is closed"):
        run(one.stream("x"))
    one.close()


def test_memory_does_not_grow_with_the_tokens(session, load, tiny):
    one = session(load(tiny("bfloat16").path("random"), io_threads=32), max_new_tokens=80)
    process = psutil.Process()
    for _ in range(2):
        run(one.stream(PROMPTS[1]))
        one.reset()
    gc.collect()
    before = process.memory_info().rss
    for _ in range(4):
        run(one.stream(PROMPTS[1]))
        one.reset()
    gc.collect()
    assert process.memory_info().rss - before < 1_000_000  # 320 tokens
