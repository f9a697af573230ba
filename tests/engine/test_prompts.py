"""Prompts: each layer is read once for as many tokens as memory is lent for. And `prompts="sparse"`: long ones are
computed as the mode computes single tokens, and everyone is told."""

import numpy as np
import pytest
from planned import ids_of, planned

from flashllm.config import RunConfig
from flashllm.engine import state
from flashllm.engine.model import Model
from flashllm.errors import Cancelled, UsageError
from flashllm.generate.session import PrefillRecord, Session
from flashllm.generate.tokenizer import Tokenizer
from flashllm.plan.memory_plan import LENT_SHARE


@pytest.fixture(scope="module")
def directory(variant_of):
    return variant_of("llama relu")[1]


def load(directory, **config):
    return Model.open(directory, RunConfig(threads=2, io_threads=4, **config))


def in_parts(directory, tokens=16, **memory):
    """The model in parts of so many tokens; `memory`: fields of its plan that are otherwise."""
    return planned(directory, RunConfig(threads=2, io_threads=4), prompt_tokens=tokens, **memory)


def read_by(model, *prompts):
    """(logits, bytes read) of a pass of new sequences."""
    model.meter.take()
    sequences = [model.new_sequence() for _ in prompts]
    logits = model.step(list(zip(sequences, prompts, strict=True)))
    return logits, model.meter.take().bytes_read


def test_every_layer_is_read_once_for_as_much_as_memory_is_lent_for(directory):
    prompts = [ids_of(100), ids_of(40, seed=1)]  # nine parts
    with load(directory) as model:
        expected = np.concatenate([model.step([(model.new_sequence(), ids)]) for ids in prompts])
        all_rows = model.manifest.rows.layer_nbytes * model.manifest.architecture.num_layers
    for lent, reads in ((1, 1), (10**12, 9)):
        with in_parts(directory, stretch_nbytes=lent) as model:
            rows = [cache.capacity for cache in model.parts.caches]
            logits, nbytes = read_by(model, *prompts)
            assert nbytes == reads * all_rows
            assert np.array_equal(logits, expected)
            assert [cache.capacity for cache in model.parts.caches] == rows
    # A third of the neuron caches and no more, where every page costs rows.
    with in_parts(directory) as model:
        memory = model.plan.memory
        levels = np.maximum(memory.levels[0] - np.arange(20)[:, None], 0).astype(np.int32)
    found = []
    for more in (0, 1):
        token = memory.neuron_cache // LENT_SHARE // (48 - 16) + more
        with in_parts(directory, levels=levels, level_pages=1, stretch_nbytes=token) as model:
            found.append(read_by(model, ids_of(48))[1])
    assert found == [all_rows, 2 * all_rows]


def test_what_a_prompt_freed_goes_back_before_the_caches_grow(directory, monkeypatch):
    with in_parts(directory) as model:
        levels = np.maximum(model.plan.memory.levels[0] - np.arange(20)[:, None], 0).astype(np.int32)
        nbytes = model.plan.memory.neuron_cache // LENT_SHARE // (48 - 16)
    with in_parts(directory, levels=levels, level_pages=1, stretch_nbytes=nbytes) as model:

        def rows():
            return sum(cache.capacity for cache in model.parts.caches)

        returned = []
        monkeypatch.setattr(state, "return_heaps", lambda: returned.append(rows()))
        read_by(model, ids_of(48))
        assert returned
        assert returned[0] < rows()


def test_progress_is_told_while_a_prompt_is_computed(directory):
    """Parts over layers, never less than before; an error of whoever hears it ends the pass, and changes nothing."""
    with in_parts(directory) as model, model.new_sequence() as sequence:
        heard, ids = [], ids_of(100)
        model.watch(lambda done, total: heard.append((done, total)))
        expected = read_by(model, ids)[0]
        assert heard == sorted(heard)
        assert {total for _, total in heard} == {7 * model.manifest.architecture.num_layers}
        assert heard[0][0] < heard[0][1]
        model.watch(lambda done, total: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.step([(sequence, ids)])
        model.watch(None)
        assert sequence.length == 0
        assert np.array_equal(model.step([(sequence, ids)]), expected)


class Canceller:
    """Ends the pass that it observes, at the second layer."""

    def __init__(self, model):
        self.model = model

    def input(self, layer, x):
        if layer == 1:
            self.model.cancel()

    def activations(self, layer, first, h):
        pass


def test_a_long_prompt_can_be_ended_in_its_middle(directory):
    """As if by another thread; then nothing has changed, and it can be computed again."""
    with in_parts(directory) as model, model.new_sequence() as sequence:
        expected = read_by(model, ids_of(100))[0]
        held = model._memory.pool.nbytes
        for observer in (Canceller(model), None):  # it stays ended
            with pytest.raises(Cancelled):
                model.step([(sequence, ids_of(100))], observer=observer)
            assert sequence.length == 0
            assert model._memory.pool.nbytes == held
        model.cancel(False)
        assert np.array_equal(model.step([(sequence, ids_of(100))]), expected)


@pytest.mark.parametrize("mode", ["sparse", "oracle"])
@pytest.mark.parametrize("count", [9, 140])
def test_a_prompt_has_the_bits_of_its_tokens_one_by_one(directory, mode, count):
    ids = ids_of(count)
    with load(directory, mode=mode, prompts="sparse") as model:
        together = model.step([(model.new_sequence(), ids)], all_logits=True)
        assert model.meter.take().active > 0
        sequence = model.new_sequence()
        alone = [model.step([(sequence, [token])])[0] for token in ids]
        assert np.array_equal(together, alone)
        # However it is asked for: as a prompt, in pieces, beside others.
        pieces = model.new_sequence()
        model.step([(pieces, ids[:5]), (model.new_sequence(), ids_of(30, seed=2))], as_prompt=True)
        assert np.array_equal(model.step([(pieces, ids[5:])], as_prompt=True)[0], together[-1])
    with load(directory, mode=mode) as model:
        dense = model.step([(model.new_sequence(), ids)], all_logits=True)
        assert not np.array_equal(dense, together)


def test_predictors_are_seen_by_scoring(directory):
    """What untrained predictors leave out is missing from a prompt's logits."""
    ids = ids_of(60)

    def score(**config):
        with load(directory, **config) as model:
            return model.step([(model.new_sequence(), ids)], all_logits=True)

    exact, dense, sparse = score(mode="oracle", prompts="sparse"), score(), score(prompts="sparse")
    np.testing.assert_allclose(exact, dense, atol=2e-4, rtol=0)
    assert np.abs(sparse - dense).max() > 1e-3


def test_it_is_said_and_recorded(directory):
    with load(directory, prompts="sparse") as model:
        assert any("prompts are computed as mode sparse" in notice for notice in model.notices)
        with Session(model, Tokenizer.load(directory)) as session:
            record = next(iter(session.stream_prompt(ids_of(20))))
    assert isinstance(record, PrefillRecord)
    assert not record.dense
    with load(directory) as model, Session(model, Tokenizer.load(directory)) as session:
        assert next(iter(session.stream_prompt(ids_of(20)))).dense


def test_a_scored_prompt_is_sparse_in_every_piece(directory, monkeypatch):
    monkeypatch.setattr("flashllm.generate.session._SCORED_NBYTES", 4 * 300 * 7)  # logits of seven tokens
    ids = ids_of(40)
    with load(directory, prompts="sparse") as model:
        logits = model.step([(model.new_sequence(), ids)], all_logits=True)
        with Session(model, Tokenizer.load(directory)) as session:
            record = next(iter(session.stream_prompt(ids, scored=True)))
    assert record.logprobs is not None
    values = logits.astype(np.float64)
    expected = values[np.arange(39), ids[1:]] - np.log(np.exp(values[:-1]).sum(axis=1))
    np.testing.assert_allclose([one.logprob for one in record.logprobs], expected, atol=1e-4)


def test_a_long_sparse_prompt_can_be_ended(directory):
    with load(directory, prompts="sparse") as model:
        model.cancel()
        with pytest.raises(Cancelled):
            model.step([(model.new_sequence(), ids_of(40))])
        model.cancel(False)
        model.step([(model.new_sequence(), ids_of(40))])


@pytest.mark.parametrize("mode", ["dense", None])
def test_a_dense_run_has_no_sparse_prompts(variant_of, mode):
    with pytest.raises(UsageError, match="sparse prompts need mode sparse or oracle"):
        load(variant_of("llama")[1], mode=mode, prompts="sparse")
