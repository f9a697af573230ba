"""Hugging Face's generate over the engine: every strategy, batches with padding, caches that are kept."""

import json
from threading import Thread

import pytest
import torch
from generating import greedy, ids_of, reference_logits
from transformers import AutoModelForCausalLM, TextIteratorStreamer, TextStreamer, pipeline

from flashllm.errors import ContextFull, UsageError

K0 = 8  # sparse_prefill_tokens of the manifest
TOLERANCE = 1e-5  # of fp32 logits, the largest of which are about 2.5


def padded(rows, *, left=True):
    """(ids, mask) of rows of ids of different lengths, pad token 1."""
    width = max(len(row) for row in rows)
    ids, mask = torch.ones((len(rows), width), dtype=torch.long), torch.zeros((len(rows), width), dtype=torch.long)
    for row, values in enumerate(rows):
        place = slice(width - len(values), None) if left else slice(len(values))
        ids[row, place], mask[row, place] = values, 1
    return ids, mask


# Strategies


class SomeIds:
    """Which ids may come next: for `prefix_allowed_tokens_fn`."""

    def __repr__(self):
        return "some ids"

    def __call__(self, row, ids):
        return range(5, 50)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.7},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": False, "use_cache": False},
        {"do_sample": False, "prefill_chunk_size": 5},
        {"do_sample": False, "num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
        {"do_sample": True, "num_beams": 3, "temperature": 2.0},
        {"do_sample": False, "num_beams": 2, "use_cache": False},
        {"do_sample": False, "prompt_lookup_num_tokens": 3},
        {"do_sample": False, "guidance_scale": 1.5},
        {"do_sample": False, "prefix_allowed_tokens_fn": SomeIds()},
    ],
    ids=str,
)
def test_every_strategy_gives_the_tokens_of_hugging_face(tiny, shared, kwargs):
    outputs = []
    for side in (shared(), tiny().reference):
        torch.manual_seed(7)
        outputs.append(side.generate(ids_of(12), attention_mask=torch.ones((1, 12)), max_new_tokens=10, **kwargs))
    assert torch.equal(*outputs)


def test_assisted_by_another_model(tiny, shared):
    model, ids = tiny(), ids_of(12)
    flash, assistant = shared(), shared("random")
    expected = greedy(flash, ids, 20)
    assert greedy(flash, ids, 20, assistant_model=assistant) == expected
    assert greedy(flash, ids, 20, assistant_model=model.reference) == expected
    assert greedy(model.reference, ids, 20, assistant_model=assistant) == expected


@pytest.mark.parametrize(
    ("mode", "predictors", "num_beams"),
    [("dense", "bare", 1), ("oracle", "bare", 1), ("sparse", "all", 3), ("sparse", "exact", 1)],
)
def test_a_padded_batch_gives_the_tokens_of_hugging_face(tiny, shared, mode, predictors, num_beams):
    ids, mask = padded([ids_of(14)[0], ids_of(5, seed=1)[0], ids_of(9, seed=2)[0]])
    kwargs = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "num_beams": num_beams}
    ours = shared(predictors, mode=mode).generate(ids, **kwargs)
    assert torch.equal(ours, tiny().reference.generate(ids, **kwargs))


@pytest.mark.parametrize("name", ["llama relu", "opt-350m", "olmoe", "qwen3_next"])
def test_other_architectures_in_a_padded_batch(variant_of, load, name):
    source, directory = variant_of(name)
    reference, flash = AutoModelForCausalLM.from_pretrained(source).eval(), load(directory, mode="dense")
    ids, mask = padded([ids_of(14)[0], ids_of(5, seed=1)[0], ids_of(9, seed=2)[0]])
    kwargs = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    for more in ({}, {"num_beams": 2}, {"repetition_penalty": 1.3}):
        assert torch.equal(flash.generate(ids, **kwargs, **more), reference.generate(ids, **kwargs, **more))
    assert type(flash).__name__ == type(reference).__name__
    for excluded in (False, True):
        count = reference.num_parameters(exclude_embeddings=excluded)
        assert flash.num_parameters(exclude_embeddings=excluded) == count


def test_stop_strings_and_streamers(tiny, shared):
    model, flash = tiny(), shared()
    inputs = model.tokenizer("She was happy", return_tensors="pt", return_token_type_ids=False)
    whole = flash.generate(**inputs, max_new_tokens=20, do_sample=False)
    text = model.tokenizer.decode(whole[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "N" in text
    for stop, length in (("N", len("OOOOOON")), ("ON", len("OOOOOON")), ("x", 20)):
        kwargs = {"max_new_tokens": 20, "stop_strings": [stop], "tokenizer": model.tokenizer}
        ours = flash.generate(**inputs, do_sample=False, **kwargs)
        assert torch.equal(ours, model.reference.generate(**inputs, do_sample=False, **kwargs))
        assert ours.shape[1] == inputs["input_ids"].shape[1] + length

    shown = []

    class Collect(TextStreamer):
        def on_finalized_text(self, text, stream_end=False):
            shown.append(text)

    flash.generate(**inputs, max_new_tokens=20, do_sample=False, streamer=Collect(model.tokenizer, skip_prompt=True))
    assert "".join(shown) == text
    for _ in range(3):  # the next may begin while the thread before it still ends
        streamer = TextIteratorStreamer(model.tokenizer, skip_prompt=True)
        kwargs = dict(**inputs, max_new_tokens=20, do_sample=False, streamer=streamer)
        thread = Thread(target=flash.generate, kwargs=kwargs)
        thread.start()
        assert "".join(streamer) == text
        assert torch.equal(flash.generate(**inputs, max_new_tokens=20, do_sample=False), whole)
        thread.join()


def test_threads_generate_at_once(shared):
    flash, got = shared("random", "bfloat16"), {}
    prompts = {seed: ids_of(5 + 6 * seed, seed=seed) for seed in range(4)}
    expected = {seed: greedy(flash, ids) for seed, ids in prompts.items()}

    def run(seed):
        got[seed] = greedy(flash, prompts[seed])

    threads = [Thread(target=run, args=[seed]) for seed in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == expected


def test_a_pipeline_knows_the_model(tiny, shared, caplog):
    model = tiny()
    generator = pipeline("text-generation", model=shared(), tokenizer=model.tokenizer, device="cpu")
    theirs = pipeline("text-generation", model=model.reference, tokenizer=model.tokenizer, device="cpu")
    texts, kwargs = ["She was happy", "The cat said"], {"max_new_tokens": 8, "do_sample": False, "batch_size": 2}
    assert generator(texts, **kwargs) == theirs(texts, **kwargs)
    assert "not supported" not in caplog.text


def test_a_harness_scores_batches_padded_on_the_right(tiny, shared):
    """As lm-eval does: rows of different lengths, no attention mask, pad tokens computed as tokens, which are last."""
    flash = shared()
    flash.tie_weights()
    ids, _ = padded([ids_of(14)[0], ids_of(5, seed=1)[0]], left=False)
    logits = flash(ids.to(flash.device)).logits
    assert (logits - reference_logits(tiny(), ids)).abs().max() <= TOLERANCE
    assert flash.config.model_type == "opt"


# The same bits alone and together


@pytest.mark.parametrize("lengths", [(3, 8, 5), (3, K0, K0 + 1, 40), (1, 2, 70)], ids=str)
def test_a_padded_batch_gets_the_bits_of_each_row_alone(shared, lengths):
    """Some rows have more than K0 new tokens, others have not."""
    flash = shared("random", "bfloat16")
    rows = [ids_of(length, seed=length)[0] for length in lengths]
    ids, mask = padded(rows)
    together = flash(ids, attention_mask=mask).logits
    for row, values in enumerate(rows):
        alone = flash(values[None]).logits[0]
        assert torch.equal(together[row, -len(values) :], alone)
        assert not together[row, : -len(values)].any()
    out = flash.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    for row, values in enumerate(rows):
        assert out[row, ids.shape[1] - len(values) :].tolist() == greedy(flash, values[None], 6)


def test_padding_on_the_right_of_a_forward_pass(shared):
    flash = shared("random", "bfloat16")
    rows = [ids_of(14)[0], ids_of(5, seed=1)[0]]
    ids, mask = padded(rows, left=False)
    logits = flash(ids, attention_mask=mask).logits
    for row, values in enumerate(rows):
        assert torch.equal(logits[row, : len(values)], flash(values[None]).logits[0])
        assert not logits[row, len(values) :].any()
    with pytest.raises(UsageError, match=r"ends in padding.*pad on the left"):
        flash.generate(ids, attention_mask=mask, max_new_tokens=3)


# Limits


def test_beyond_the_context(tiny, load):
    flash = load(tiny().path("bare"), mode="dense", context=16)
    ids = ids_of(12)
    with pytest.raises(ContextFull, match=r"its limit of 16; start a new conversation"):
        greedy(flash, ids, 10)
    assert len(greedy(flash, ids, 4)) == 16
    with pytest.raises(ContextFull, match="17 more exceed its limit of 16"):
        flash(ids_of(17))


def test_a_batch_beyond_the_memory(tiny, load, monkeypatch):
    path = tiny().path("bare")
    monkeypatch.setattr("flashllm.engine.model.process_nbytes", lambda: 400_000_000)
    least = load(path, mode="dense").engine.plan.memory.minimum_nbytes
    flash = load(path, mode="dense", memory=least)
    expected = greedy(flash, ids_of(90), 4)
    most = flash.engine.plan.memory.max_pages
    with pytest.raises(ContextFull, match=r"the memory is full: .* use fewer or shorter sequences"):
        flash.generate(ids_of(4, rows=most + 1), max_new_tokens=2)
    assert flash.generate(ids_of(4, rows=most), max_new_tokens=2).shape == (most, 6)
    assert greedy(flash, ids_of(90), 4) == expected


# Caches that are kept


def test_outputs_may_be_kept_and_generate_called_again(tiny, shared):
    flash, ids = shared(), ids_of(6)
    kwargs = {"attention_mask": torch.ones((1, 6)), "max_new_tokens": 4, "do_sample": False}
    first = flash.generate(ids, return_dict_in_generate=True, output_scores=True, output_logits=True, **kwargs)
    second = flash.generate(ids_of(9, seed=3), max_new_tokens=4, return_dict_in_generate=True)
    assert second.past_key_values is not first.past_key_values
    logits = reference_logits(tiny(), first.sequences)[:, 5:-1]
    assert (torch.stack(first.logits, 1) - logits).abs().max() <= TOLERANCE
    longer = flash.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=5, do_sample=False)
    assert longer[0].tolist() == greedy(flash, ids, 9)  # never the second one's keys


def test_generate_can_go_on_from_a_cache_of_ones_own(tiny, shared):
    flash, ids = shared("bare", mode="dense"), ids_of(12)
    cache = flash.new_cache()
    kwargs = {"do_sample": False, "past_key_values": cache}
    first = flash.generate(ids, attention_mask=torch.ones((1, 12)), max_new_tokens=3, **kwargs)
    assert cache.get_seq_length() == 14
    assert len(greedy(flash, ids, 3)) == 15  # another one meanwhile
    second = flash.generate(first, attention_mask=torch.ones((1, 15)), max_new_tokens=3, **kwargs)
    assert second[0].tolist() == greedy(tiny().reference, ids, 6)


def test_a_padded_conversation_goes_on(tiny, shared):
    flash = shared()
    ids, mask = padded([ids_of(9)[0], ids_of(4, seed=1)[0]])
    cache = flash.new_cache()
    first = flash.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=3, do_sample=False)
    more = torch.cat([first, ids_of(5, rows=2, seed=2)], dim=1)
    mask = torch.cat([mask, torch.ones((2, 8), dtype=torch.long)], dim=1)
    kwargs = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    ours = flash.generate(more, past_key_values=cache, **kwargs)
    assert torch.equal(ours, tiny().reference.generate(more, **kwargs))


@pytest.mark.parametrize("strategy", [{}, {"num_beams": 2, "do_sample": True}])
def test_answers_are_held_to_a_schema(tiny, shared, strategy):
    schema = {"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 1, "maxItems": 2}
    model, tokenizer = shared("exact"), tiny().tokenizer
    torch.manual_seed(0)
    ids, mask = padded([ids_of(5)[0], ids_of(8)[0]])
    written = model.generate(ids, attention_mask=mask, max_new_tokens=40, schema=schema, **strategy)
    for row in written[:, ids.shape[1] :]:
        assert set(json.loads(tokenizer.decode(row, skip_special_tokens=True))) <= {"yes", "no"}
