"""Behind the tokens of a model that fits, what none of them wanted is read: soon nothing is missing. No bit changes."""

import shutil
import time

import numpy as np
import pytest
from arch_models import LAYERS
from damage import flip
from planned import planned

from flashllm import _core
from flashllm.config import RunConfig
from flashllm.errors import ChecksumError, FlashIOError
from flashllm.format.manifest import Manifest
from flashllm.format.model_files import FFN

COUNT, SIZE = 8, 48  # of arch_models' tiny mixtures
FOREVER = 2**60
BACKENDS = ["threads", "io_uring"][: 1 + (_core.Reader(1, backend="auto", queue_depth=1).backend == "io_uring")]


@pytest.fixture
def directory(variant_of):
    return variant_of("olmoe")[1]


def opened(directory, *, cache_rows=None, loads=True, **config):
    """The model; with `cache_rows`, every layer caches so many rows."""
    rows = {}
    if cache_rows is not None:
        rows = {"levels": np.full((1, LAYERS), cache_rows, np.int32), "level_pages": 10}
    return planned(directory, RunConfig(threads=2, io_threads=4, **config), loads=loads, **rows)


def begun(model):
    """A sequence of two tokens, behind which nothing is read, and the logits after the second."""
    sequence = model.new_sequence()
    return sequence, model.step([(sequence, [5, 7])])


def again(model, sequence):
    """The second token once more, which wants what is cached: its logits, and what it did."""
    sequence.keep(1)
    model.meter.take()
    logits = model.step([(sequence, [7])])
    return logits, model.meter.take()


def loaded(model, sequence, expected):
    """Tokens until nothing is read behind them: bytes that were."""
    total = rest = 0
    for _ in range(2000):
        logits, times = again(model, sequence)
        np.testing.assert_array_equal(logits, expected)
        assert (times.bytes_read, times.misses) == (0, 0)
        total += times.behind_bytes
        rest = 0 if times.behind_bytes else rest + 1
        if rest == 3 * LAYERS:
            return total
        time.sleep(0.001)
    raise AssertionError("there is no end of it")


def every_byte(directory):
    return LAYERS * COUNT * SIZE * Manifest.load(directory).rows.stride


def prompt(seed):
    return np.random.default_rng(seed).integers(4, 300, 150).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_soon_nothing_is_missing(directory, backend):
    with opened(directory, loads=False) as model:
        sequence, expected = begun(model)
        read = model.meter.take().bytes_read
        answer = model.step([(sequence, prompt(1))])
        assert loaded(model, sequence, expected) == 0
    with opened(directory, io_backend=backend) as model:
        sequence, logits = begun(model)
        np.testing.assert_array_equal(logits, expected)
        assert model.meter.take().bytes_read == read
        assert read + loaded(model, sequence, expected) == every_byte(directory)
        np.testing.assert_array_equal(model.step([(sequence, prompt(1))]), answer)
        assert model.meter.take().bytes_read == 0


@pytest.mark.parametrize("config", [{"cache_rows": (COUNT - 1) * SIZE}, {"cache_policy": "window"}])
def test_a_cache_that_forgets_is_not_loaded(directory, config):
    with opened(directory, **config) as model:
        sequence, expected = begun(model)
        held = [len(ffn.cached()) for ffn in model.parts.ffns]
        assert loaded(model, sequence, expected) == 0
        assert all(len(ffn.cached()) <= before for ffn, before in zip(model.parts.ffns, held, strict=True))


def test_first_tokens_read_what_they_want_alone(directory):
    with opened(directory) as model:
        for _ in range(3):
            with model.new_sequence() as sequence:
                model.step([(sequence, [5])])
        held = sum(len(ffn.cached()) for ffn in model.parts.ffns)
        times = model.meter.take()
        assert times.behind_bytes == 0
        assert times.bytes_read == held * Manifest.load(directory).rows.stride
        loaded(model, *begun(model))
        assert sum(len(ffn.cached()) for ffn in model.parts.ffns) == LAYERS * COUNT * SIZE


def test_prompts_between_tokens_change_no_bit(directory):
    with opened(directory, loads=False) as model:
        expected = [model.step([(model.new_sequence(), prompt(seed))]) for seed in range(4)]
    for seed in range(4):
        with opened(directory) as model:
            sequence, logits = begun(model)
            first = model.meter.take()
            read = again(model, sequence)[1]
            np.testing.assert_array_equal(model.step([(model.new_sequence(), prompt(seed))]), expected[seed])
            times = model.meter.take()
            rest = loaded(model, sequence, logits)
            total = sum(each.bytes_read + each.behind_bytes for each in (first, read, times))
            assert total + rest == every_byte(directory)


def test_a_drive_that_fails_behind_fails_no_token(directory):
    layout = Manifest.load(directory).rows
    with opened(directory, loads=False) as model:
        sequence, expected = begun(model)
        read = model.meter.take().bytes_read
        answer = model.step([(sequence, prompt(2))])
    with opened(directory) as model:
        sequence, _ = begun(model)
        model.parts.file.inject("error", 0, FOREVER, 5)
        loaded(model, sequence, expected)
        assert sum(len(ffn.cached()) for ffn in model.parts.ffns) * layout.stride == read
        with pytest.raises(FlashIOError, match="layer 0, neuron"):
            model.step([(sequence, prompt(2))])
        model.parts.file.inject("error", 0, 0)
        np.testing.assert_array_equal(model.step([(sequence, prompt(2))]), answer)


def test_a_wrong_byte_is_found_by_who_wants_it(directory, tmp_path):
    directory = shutil.copytree(directory, tmp_path / "model")
    with opened(directory, loads=False) as model:
        sequence, expected = begun(model)
        absent = sorted(set(range(COUNT)) - {neuron // SIZE for neuron in model.parts.ffns[1].cached()})[-1]
    layout = Manifest.load(directory).rows
    flip(directory / FFN, -2 * layout.layer_nbytes + absent * SIZE * layout.stride + 100)
    with opened(directory) as model:
        sequence, _ = begun(model)
        loaded(model, sequence, expected)
        held = [len(ffn.cached()) for ffn in model.parts.ffns]
        assert held[0] == held[2] == COUNT * SIZE > held[1]
        with pytest.raises(ChecksumError, match=f"layer 1, neuron {absent * SIZE}: "):
            model.step([(sequence, prompt(3))])


def test_memory_that_conversations_take_ends_it(directory):
    """A limit that falls takes units away, those that no token wanted first; then none are loaded."""
    with opened(directory) as model:
        sequence, expected = begun(model)
        wanted = [set(ffn.cached()) for ffn in model.parts.ffns]
        for ffn in model.parts.ffns:
            ffn.set_capacity((COUNT - 2) * SIZE)
        assert loaded(model, sequence, expected) == 0
        for ffn, used in zip(model.parts.ffns, wanted, strict=True):
            assert len(set(ffn.cached()) & used) >= 3 * SIZE
            assert len(ffn.cached()) <= (COUNT - 2) * SIZE


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_is_closed_while_it_loads(directory, backend):
    more = False
    for _ in range(20):
        with opened(directory, io_backend=backend) as model:
            sequence, _ = begun(model)
            held = sum(len(ffn.cached()) for ffn in model.parts.ffns)
            again(model, sequence)
            more = more or sum(len(ffn.cached()) for ffn in model.parts.ffns) > held
            began = time.monotonic()
        assert time.monotonic() - began < 10
    assert more
