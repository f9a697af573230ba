"""A prompt's pass that waits, between a part and the next, while others pass: bits, reads, memory, and what is left of
it where it ends early."""

import contextlib
import itertools

import numpy as np
import pytest
from planned import ids_of, planned

from flashllm.config import RunConfig
from flashllm.errors import ContextFull, UsageError

PART = 16


def in_parts(directory, *, plan_fields=None, **config):
    """The model with prompts in parts of PART tokens."""
    return planned(directory, RunConfig(threads=2, io_threads=4, **config), prompt_tokens=PART, **(plan_fields or {}))


def alone(model, *pieces):
    """Logits of a new sequence's pieces, a pass each."""
    with model.new_sequence() as sequence:
        return [model.step([(sequence, ids)])[0] for ids in pieces]


def advance_to_end(one, between):
    """The logits of a pass that waits at every step, where `between` is called; and how often it waited."""
    waits = 0
    while (logits := one.advance(0)) is None:
        waits += 1
        between()
    return logits, waits


# Sparse and dense neurons, a norm between them, parallel blocks, windows and packed pages, experts in one piece and in
# several, layers of both kinds; latent attention, plain and packed.
VARIANTS = {
    "llama relu": {},
    "llama": {"mode": "dense"},
    "bitnet": {},
    "gpt_neox": {},
    "mistral window": {"cache_bits": 4},
    "olmoe": {},
    "qwen2_moe and a dense layer": {},
    "deepseek_v2": {},
    "youtu": {"mode": "dense", "cache_bits": 8},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_pass_that_waits_has_the_bits_of_one_alone(variant_of, name):
    """With tokens of another sequence at every step; and with another prompt that waits too, and one that fails."""
    long, short, token = ids_of(70), ids_of(40, seed=1), ids_of(1, seed=2)
    with in_parts(variant_of(name)[1], **VARIANTS[name]) as model, contextlib.ExitStack() as stack:
        new = lambda: stack.enter_context(model.new_sequence())  # noqa: E731
        expected = alone(model, long, token, short)
        answer = ids_of(100, seed=3)
        answered = alone(model, short, *([each] for each in answer))[1:]

        def answering():
            """A token of an answer, again and again."""
            while True:
                other = new()
                model.step([(other, short)])
                for each, logits in zip(answer, answered, strict=True):
                    yield other
                    assert np.array_equal(model.step([(other, [each])])[0], logits)

        others = answering()
        sequence = new()
        with model.begin([(sequence, long)]) as one:
            logits, waits = advance_to_end(one, lambda: next(others))
        assert waits >= 2 * 5 * model.manifest.architecture.num_layers  # attention and sums of five parts
        assert np.array_equal(logits[0], expected[0])
        assert np.array_equal(model.step([(sequence, token)])[0], expected[1])
        assert sequence.prompted == len(long)
        # Two prompts in turn, one of them beside a token, and one that never ends.
        third, fourth, other = new(), new(), next(answering())
        with model.begin([(sequence, short)]) as one, model.begin([(third, long), (other, answer[:1])]) as two:
            found = []

            def between():
                if not found and (mixed := two.advance(0)) is not None:
                    found.append(mixed)
                with model.begin([(fourth, short)]) as three:
                    three.advance(0)

            assert np.array_equal(advance_to_end(one, between)[0][0], expected[2])
            rows = found[0] if found else two.advance()
            assert np.array_equal(rows, [expected[0], answered[0]])
            assert (third.length, fourth.length) == (len(long), 0)


@pytest.mark.parametrize("name", ["llama relu", "olmoe"])
def test_what_a_waiting_pass_reads_is_read_once(variant_of, name):
    """Also where every token of another sequence takes what it has read for the rows of its own."""
    with in_parts(variant_of(name)[1]) as model, model.new_sequence() as other:
        model.step([(other, ids_of(20, seed=1))])
        nbytes = 0
        with model.new_sequence() as sequence, model.begin([(sequence, ids_of(70))]) as one:
            model.meter.take()

            def between():
                nonlocal nbytes
                nbytes += model.meter.take().bytes_read
                model.step([(other, [7])])
                model.meter.take()

            advance_to_end(one, between)
            nbytes += model.meter.take().bytes_read
        rows = model.manifest.rows
        whole = sum(layout.num_rows for layout in model.manifest.layouts) * rows.stride
        assert nbytes <= whole
        if name == "llama relu":
            assert nbytes == whole


def test_memory_changes_under_a_waiting_pass(variant_of):
    """Kept rows go and come back with the limit."""
    with in_parts(variant_of("llama")[1], mode="dense") as model:
        expected = alone(model, ids_of(70))[0]
        most = model.memory_limit
        least = model.plan.memory.least_limit_nbytes(20)
        limits = itertools.cycle([least, most])
        with model.new_sequence() as sequence, model.begin([(sequence, ids_of(70))]) as one:
            logits, _ = advance_to_end(one, lambda: model.keep_to(next(limits)))
        assert np.array_equal(logits[0], expected)


def test_what_a_waiting_pass_borrows_is_its_own(variant_of):
    """The neuron caches give it from its beginning to its end, whatever passes in between; nobody is given it twice."""
    directory = variant_of("llama relu")[1]
    with in_parts(directory) as model:
        memory = model.plan.memory
        levels = np.maximum(memory.levels[0] - np.arange(20)[:, None], 0).astype(np.int32)
        page = memory.page_nbytes
    fields = {"levels": levels, "level_pages": 1, "stretch_nbytes": page}
    with in_parts(directory, plan_fields=fields) as model, model.new_sequence() as other:
        rows = lambda: [cache.capacity for cache in model.parts.caches]  # noqa: E731
        model.step([(other, [5])])
        before = rows()
        with model.new_sequence() as sequence:
            # A part's own bytes are in the workspace; of a second pass they are lent.
            with model.begin([(sequence, ids_of(12))]):
                assert model._memory.pages == 2
                with model.new_sequence() as third:
                    with model.begin([(third, ids_of(10, seed=1))]) as second:
                        assert model._memory.pages == 3 + 10
                        assert sum(rows()) < sum(before)
                        assert second.advance(0) is None
                        assert model._memory.pages == 3 + 10  # what it took is not counted twice
                        with model.new_sequence() as fourth, pytest.raises(ContextFull):
                            model.begin([(fourth, ids_of(10, seed=2))])
                    assert model._memory.pages == 2
            assert model._memory.pages == 1
            assert rows() == before


def test_a_pass_that_is_closed_has_changed_nothing(variant_of):
    with in_parts(variant_of("mistral window")[1], cache_bits=4) as model, model.new_sequence() as sequence:
        expected = alone(model, ids_of(90), ids_of(70, seed=1))
        assert np.array_equal(model.step([(sequence, ids_of(90))])[0], expected[0])
        held = model._memory.pool.nbytes
        for waits in (0, 1, 5, 20, 10**6):
            with model.begin([(sequence, ids_of(70, seed=1))]) as one:
                for _ in range(waits):
                    if one.advance(0) is not None:
                        break
                else:
                    with pytest.raises(UsageError, match="under way"):
                        model.step([(sequence, [5])])
                    with pytest.raises(UsageError, match="under way"):
                        sequence.keep(3)
            if waits < 10**6:
                assert (sequence.length, sequence.prompted) == (90, 90)
                assert model._memory.pool.nbytes == held
        assert sequence.length == 160
        with pytest.raises(UsageError, match="over"):
            one.advance()
        sequence.keep(90)
        assert np.array_equal(model.step([(sequence, ids_of(70, seed=1))])[0], expected[1])


def test_a_closed_pass_takes_back_the_tokens_of_those_that_had_ended(variant_of):
    """A token goes through before the prompt of the same pass."""
    with in_parts(variant_of("llama relu")[1]) as model, model.new_sequence() as few, model.new_sequence() as many:
        model.step([(few, ids_of(20))])
        with model.begin([(few, [5]), (many, ids_of(70))]) as one:
            while few.length == 20:
                assert one.advance(0) is None
        assert (few.length, many.length) == (20, 0)


def test_a_closed_model_ends_a_waiting_pass(variant_of):
    model = in_parts(variant_of("llama relu")[1])
    sequence = model.new_sequence()
    one = model.begin([(sequence, ids_of(70))])
    assert one.advance(0) is None
    model.close()
    with pytest.raises(UsageError, match="closed"):
        one.advance()
    sequence.close()
