"""`prompts="sparse"`: long prompts are computed as the mode computes single tokens, and everyone is told."""

import numpy as np
import pytest

from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.errors import Cancelled, UsageError
from flashllm.generate.session import PrefillRecord, Session
from flashllm.generate.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def directory(variant_of):
    return variant_of("llama relu")[1]


def load(directory, **config):
    return Model.open(directory, RunConfig(threads=2, io_threads=4, **config))


def ids_of(count, seed=0):
    return np.random.default_rng(seed).integers(4, 300, count).tolist()


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
