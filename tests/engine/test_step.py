"""One pass over many sequences: what each gets depends on its own tokens alone; a pass that fails leaves no trace."""

import gc
import shutil

import numpy as np
import pytest
from arch_models import CONTEXT, make_model
from damage import rehash
from planned import ids_of

from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.errors import ContextFull, FormatError, NonFiniteError, UsageError
from flashllm.format.model_files import FFN, RESIDENT
from flashllm.format.safetensors import read_header

NAMES = ("opt", "llama relu")
K0 = 8  # sparse_prefill_tokens of the manifest


@pytest.fixture
def directory_of(variant_of):
    """The model directory of a variant."""
    return lambda name: variant_of(name)[1]


@pytest.fixture
def load(directory_of, opened):
    """Loads a variant, closed after the test."""
    return lambda name="opt", **options: opened(directory_of(name), **options)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["layers.1.ffn.down_bias", "layers.1.ffn_norm.weight"])
def test_numbers_that_are_not_finite_name_their_layer(directory_of, tmp_path, name, value):
    """Of few tokens and of a prompt. Damage that no hash sees: it was there at conversion."""
    path = shutil.copytree(directory_of("opt"), tmp_path / "model")
    info = read_header(path / RESIDENT).tensors[name]
    raw = bytearray((path / RESIDENT).read_bytes())
    raw[info.offset : info.offset + 4] = np.float32(value).tobytes()
    (path / RESIDENT).write_bytes(raw)
    rehash(path, RESIDENT)
    with Model.open(path, RunConfig(io_threads=2)) as model, model.new_sequence() as sequence:
        for count in (1, 30, 1, 30):  # the model lives on
            with pytest.raises(NonFiniteError, match=r"layer 1 computed a number that is not finite.*float32"):
                model.step([(sequence, ids_of(count))])
            assert sequence.length == 0


def alone(model, prompt, following=()):
    """Logits [1 + following, vocab] of a sequence that has the model to itself."""
    with model.new_sequence() as sequence:
        logits = [model.step([(sequence, prompt)])]
        logits += [model.step([(sequence, [token])]) for token in following]
        return np.concatenate(logits)


@pytest.mark.parametrize("mode", ["sparse", "oracle", "dense"])
@pytest.mark.parametrize("name", NAMES)
def test_sequences_decoding_together_get_what_each_gets_alone(load, name, mode):
    model = load(name, mode=mode, threads=2)
    prompts = [ids_of(3 + seed % 5, seed) for seed in range(K0 + 1)]
    following = [ids_of(4, 100 + seed) for seed in range(K0 + 1)]
    expected = [alone(model, prompt, then) for prompt, then in zip(prompts, following, strict=True)]
    for count in (2, K0 + 1):
        sequences = [model.new_sequence() for _ in range(count)]
        together = [model.step(list(zip(sequences, prompts[:count], strict=True)))]
        for column in zip(*following[:count], strict=True):
            together.append(model.step([(seq, [token]) for seq, token in zip(sequences, column, strict=True)]))
        for index in range(count):
            assert np.array_equal(np.stack([logits[index] for logits in together]), expected[index])


def test_all_logits_end_with_the_last(load):
    model, prompts = load(), [ids_of(30), ids_of(3, 1), ids_of(12, 2)]
    every = model.step([(model.new_sequence(), prompt) for prompt in prompts], all_logits=True)
    last = model.step([(model.new_sequence(), prompt) for prompt in prompts])
    assert every.shape == (30 + 3 + 12, model.vocab_size)
    assert np.array_equal(every[[29, 32, 44]], last)


def test_a_sequence_knows_what_was_computed_as_a_prompt(load):
    model = load()
    sequence, other = model.new_sequence(), model.new_sequence()
    model.step([(sequence, ids_of(30)), (other, ids_of(3))])
    model.step([(sequence, [5])], as_prompt=True)
    assert (sequence.prompted, other.prompted) == (31, 0)
    model.step([(sequence, [6])])
    model.step([(sequence, ids_of(20))])  # after a token that was not
    model.step([(other, ids_of(20))])
    assert (sequence.prompted, other.prompted) == (31, 0)
    other.copy_from(sequence)
    assert [other.keep(length) and other.prompted for length in (40, 12)] == [31, 12]
    with pytest.raises(UsageError, match="vocabulary"):
        model.step([(other, [*ids_of(20), model.vocab_size])])
    model.step([(other, ids_of(20))])
    assert other.prompted == 32


# What cannot be


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "needs a new token"),
        ([300], "token id 300 is not in the model's vocabulary of 300"),
        ([5, -1], "-1 is not"),
    ],
)
def test_ids_that_cannot_be(load, ids, message):
    model = load()
    with model.new_sequence() as sequence:
        model.step([(sequence, [5])])
        with pytest.raises(UsageError, match=message):
            model.step([(sequence, ids)])
        assert sequence.length == 1


def test_a_sequence_cannot_be_twice_in_a_pass_nor_used_once_closed(load):
    model = load()
    sequence = model.new_sequence()
    with pytest.raises(UsageError, match="cannot be cut to 1"):
        sequence.keep(1)
    with pytest.raises(UsageError, match="twice in a pass"):
        model.step([(sequence, [5]), (sequence, [6])])
    sequence.close()
    sequence.close()
    with pytest.raises(UsageError, match="closed"):
        model.step([(sequence, [5])])
    model.close()
    for call in (model.new_sequence, lambda: model.step([])):
        with pytest.raises(UsageError, match="the model is closed; load it again"):
            call()


def test_a_block_of_no_sequence_is_refused(load):
    model = load()
    states = np.zeros((1, model.manifest.architecture.d_model), np.float32)
    with pytest.raises(ValueError, match="needs a state"):
        model.parts.native.run_block(0, [(None, 1)], states)


@pytest.mark.parametrize("count", [1, K0, K0 + 1])
def test_a_full_context(load, count):
    model = load(context=50)
    with model.new_sequence() as sequence:
        model.step([(sequence, ids_of(50 - count + 1))])
        with pytest.raises(ContextFull, match="limit of 50; start a new conversation"):
            model.step([(sequence, ids_of(count))])
        assert sequence.length == 50 - count + 1


# Memory


def least_memory(directory):
    """A limit under which every layer is at its minimum with a full context."""
    with Model.open(directory, RunConfig(io_threads=4)) as model:
        return model.plan.memory.minimum_nbytes


def test_the_neuron_caches_give_way_to_the_context_and_get_it_back(load, directory_of, monkeypatch):
    monkeypatch.setattr("flashllm.engine.model.process_nbytes", lambda: 100_000_000)
    prompt = ids_of(CONTEXT - 4)
    expected = alone(load(), prompt, ids_of(4, 1))
    model = load(memory=least_memory(directory_of("opt")))
    plan = model.plan.memory
    assert plan.cache_rows != plan.full_cache_rows
    caches = model.parts.ffns
    for _ in range(2):
        with model.new_sequence() as sequence:
            model.step([(sequence, [5])])
            assert tuple(cache.capacity for cache in caches) == plan.cache_rows
            sequence.keep(0)
            got = [model.step([(sequence, prompt)])]
            assert tuple(cache.capacity for cache in caches) == plan.full_cache_rows
            got += [model.step([(sequence, [token])]) for token in ids_of(4, 1)]
            assert np.array_equal(np.concatenate(got), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_dense_run_keeps_what_fits_and_reads_the_rest(load, monkeypatch, name):
    monkeypatch.setattr("flashllm.engine.model.process_nbytes", lambda: 100_000_000)
    prompt, following = ids_of(CONTEXT - 20), ids_of(6, 1)
    whole = load(name, mode="dense")
    expected = alone(whole, prompt, following)
    assert not any("each token reads" in notice for notice in whole.notices)
    with whole.new_sequence() as sequence:
        whole.step([(sequence, [5])])
        whole.meter.take()
        whole.step([(sequence, [6])])
        assert whole.meter.take().bytes_read == 0
    plan = whole.plan.memory
    every = whole.manifest.rows.layer_nbytes * whole.manifest.architecture.num_layers
    assert sum(plan.cache_rows) * plan.row_nbytes == every
    for share in (0.0, 0.5):
        limit = plan.minimum_nbytes + int(share * every)
        model = load(name, mode="dense", memory=limit)
        assert np.array_equal(alone(model, prompt, following), expected)  # its context takes memory, and gives it back
        kept = sum(model.plan.memory.cache_rows) * plan.row_nbytes
        assert any("each token reads" in notice for notice in model.notices) == (kept < every)
        with model.new_sequence() as sequence:
            for _ in range(2):
                model.step([(sequence, [5])])
                model.meter.take()
            model.step([(sequence, [6])])
            assert model.meter.take().bytes_read == every - kept


def test_more_sequences_than_fit(load, directory_of, monkeypatch):
    monkeypatch.setattr("flashllm.engine.model.process_nbytes", lambda: 100_000_000)
    model = load(memory=least_memory(directory_of("opt")))
    expected = alone(model, [5, 6], [7])
    held = [model.new_sequence() for _ in range(model.plan.memory.max_pages)]
    model.step([(sequence, [5, 6]) for sequence in held])
    with pytest.raises(ContextFull, match="give --memory more"):
        model.step([(model.new_sequence(), [5])])
    assert np.array_equal(model.step([(held[3 % len(held)], [7])]), expected[1:])
    held.pop(0)  # forgotten, not closed
    gc.collect()
    assert np.array_equal(alone(model, [5, 6], [7]), expected)


# Passes that do not finish


def test_unreadable_rows_name_the_layer(tmp_path):
    _, directory = make_model(tmp_path, "opt")
    with Model.open(directory, RunConfig(io_threads=2, direct=False)) as model:
        nbytes = (directory / FFN).stat().st_size
        with open(directory / FFN, "r+b") as file:
            file.truncate(nbytes // 2)
        with pytest.raises(FormatError, match=r"layer 1, neuron 44: .*shrank or is truncated"):
            model.step([(model.new_sequence(), ids_of(30))])
