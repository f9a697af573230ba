"""Parity with Hugging Face, and that nothing but the model and the tokens decides what is computed."""

import gc
import os
import shutil
from pathlib import Path

import pytest
import torch
from damage import flip
from generating import greedy, ids_of, reference_logits
from predictor_files import make_predictors

from flashllm.base.processes import beside_nbytes
from flashllm.config import RunConfig
from flashllm.errors import BudgetError, ChecksumError, UsageError
from flashllm.format.model_dir import ModelDir
from flashllm.format.safetensors import read_header
from flashllm.plan.memory import TORCH_GROWTH
from flashllm.plan.resolve import resolve

DTYPES = ("float32", "float16", "bfloat16")
# Largest difference of two logits, where the largest logit is about 2.5. Rounding of activations to the dtype differs
# between the two engines, so about eight steps of the dtype at 2.5.
TOLERANCE = {"float32": 1e-5, "float16": 1.6e-2, "bfloat16": 1.3e-1}
EXACT_MODES = (("dense", "bare"), ("oracle", "bare"), ("sparse", "all"), ("sparse", "exact"))
K0 = 8  # sparse_prefill_tokens of the manifest


def assert_close(ours, reference, dtype):
    assert ours.shape == reference.shape
    assert (ours.float() - reference.float()).abs().max() <= TOLERANCE[dtype]


# Parity (contract 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("mode", "predictors"), EXACT_MODES)
def test_logits_equal_hugging_face(tiny, shared, dtype, mode, predictors):
    ids = ids_of(40)
    expected = reference_logits(tiny(dtype), ids)
    flash = shared(predictors, dtype, mode=mode)
    # 1. A prompt at once, dense.
    assert_close(flash(ids).logits, expected, dtype)
    # 2. In turns over one KV cache: long, then at most K0 new ones, then token by token.
    cache = flash.new_cache()
    for start, end in ((0, 20), (20, 20 + K0), (20 + K0, 39), *((t, t + 1) for t in range(39, 40))):
        logits = flash(ids[:, start:end], past_key_values=cache, use_cache=True).logits
        assert_close(logits, expected[:, start:end], dtype)
    cache.crop(-30)
    for t in range(10, 40):
        logits = flash(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits
        assert_close(logits, expected[:, t : t + 1], dtype)


# What is predicted is what is computed; K0 (contract 2)


def masked_logits(model, kind, ids):
    """Hugging Face's logits when only neurons that our predictor names may fire."""
    handles = []
    for index, layer in enumerate(model.reference.model.decoder.layers):
        parts = make_predictors(kind, model.source, index)

        def keep_predicted(module, args, out, parts=parts):
            x = args[0].float()
            logits = (x @ parts["a"].float().T) @ parts["b"].float().T + parts["bias"]
            return torch.where(logits > parts["threshold"], out, torch.zeros_like(out))

        handles.append(layer.fc1.register_forward_hook(keep_predicted))
    try:
        return reference_logits(model, ids)
    finally:
        for handle in handles:
            handle.remove()


def test_up_to_k0_new_tokens_use_the_predictor_and_more_do_not(tiny, shared):
    model, ids = tiny(), ids_of(K0 + 1)
    sparse, dense = masked_logits(model, "random", ids), reference_logits(model, ids)
    assert (sparse - dense).abs().max() > 0.1  # the test would show nothing otherwise
    flash = shared("random")
    assert_close(flash(ids[:, :K0]).logits, sparse[:, :K0], "float32")
    assert_close(flash(ids).logits, dense, "float32")
    # The cache must not matter: after the dense pass it is full of other neurons.
    assert_close(flash(ids[:, :K0]).logits, sparse[:, :K0], "float32")


@pytest.mark.parametrize("predictors", ["random", "none"])
def test_each_row_of_a_batch_has_its_own_active_set(tiny, shared, predictors):
    ids = ids_of(4, rows=2)
    assert_close(shared(predictors)(ids).logits, masked_logits(tiny(), predictors, ids), "float32")


# Same tokens (contract 2)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 50},
        {"cache_policy": "window"},
        {"cache_policy": "window", "window": 1, "memory": "minimum"},
        {"io_threads": 1},
        {"io_threads": 32},
        {"threads": 2},
        {"direct": False},
        {"context": 60},
        {"memory": "minimum"},
    ],
    ids=str,
)
def test_same_bits_whatever_the_options(tiny, load, undisturbed, monkeypatch, options):
    if options.get("memory") == "minimum":
        options = options | {"memory": minimum(tiny("bfloat16").path("random"), monkeypatch)}
    flash = load(tiny("bfloat16").path("random"), **options)
    if "memory" in options:
        plan = flash.engine.plan.memory
        assert sum(plan.full_cache_rows) <= sum(plan.min_cache_rows) + 64  # without bypass rows
        assert 0 < max(plan.cache_rows) < 120  # fewer than are active at once: computed in parts
    tokens, logits = undisturbed
    assert [greedy(flash, ids_of(length)) for length in (30, 4)] == tokens
    assert torch.equal(flash(ids_of(6)).logits, logits)


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 1, "io_threads": 1}, {"cache_policy": "window", "threads": 2}, {"memory": "minimum"}],
    ids=str,
)
def test_same_bits_whatever_is_prefetched(tiny, load, undisturbed, monkeypatch, options):
    path = tiny("bfloat16").path("prefetch")
    if "memory" in options:
        options = {"memory": minimum(path, monkeypatch)}
    flash = load(path, **options)
    tokens, logits = undisturbed
    flash.engine.meter.restart()
    assert torch.equal(flash(ids_of(6)).logits, logits)
    # The few tokens first: a prompt's rows stay where all have room, and nothing is left to prefetch.
    assert [greedy(flash, ids_of(length)) for length in (4, 30)] == tokens[::-1]
    times = flash.engine.meter.take()
    assert times.prefetched >= times.prefetch_used
    assert times.prefetched > 0
    if "window" in options or "memory" in options:  # else nearly all that is named is cached: little is read
        assert times.prefetch_used > 0
    assert 0 < times.io_busy_ms <= times.total_ms


def minimum(path: Path, monkeypatch) -> int:
    """The least limit the model runs under beside torch, the process's own size held still."""
    monkeypatch.setattr("flashllm.engine.model.process_nbytes", lambda: 400_000_000)
    process = 400_000_000 + TORCH_GROWTH + beside_nbytes()  # of what other tests have left open
    plan = resolve(RunConfig(io_threads=4), ModelDir.open(path), available=10**12, process=process)
    return plan.memory.minimum_nbytes


def load_and_close(path, **options):
    from flashllm import FlashModel

    FlashModel.from_pretrained(path, **options).engine.close()


def test_the_least_memory_is_the_one_that_is_named(tiny, monkeypatch):
    path = tiny().path("random")
    least = minimum(path, monkeypatch)
    load_and_close(path, memory=least, io_threads=4)
    with pytest.raises(BudgetError, match=rf"use --memory {least // 10**6 + 2}MB or more"):
        load_and_close(path, memory=least - 1, io_threads=4)


# Faults (contract 5)


def test_the_neuron_named_is_the_damaged_one(tiny, load, tmp_path):
    path = Path(shutil.copytree(tiny().path("all"), tmp_path / "damaged"))
    header, layer, neuron = read_header(path / "ffn.safetensors"), 2, 301
    info = header.tensors[f"layers.{layer}.ffn"]
    flip(path / "ffn.safetensors", info.offset + neuron * (info.nbytes // info.shape[0]) + 100)
    for mode, length in (("sparse", 3), ("sparse", 20), ("dense", 3), ("oracle", 3)):
        flash = load(path, mode=mode)
        with pytest.raises(ChecksumError, match=rf"layer {layer}, neuron {neuron}: "):
            flash(ids_of(length))


# Loading and closing


def num_threads():
    return len(os.listdir("/proc/self/task"))


def open_files():
    return sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd))


def _is_link(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc")
def test_close_frees_threads_and_files_and_can_be_repeated(tiny, load):
    path = tiny().path("random")
    load(path)(ids_of(20))  # torch's own threads exist now
    load_and_close(path)
    threads, files = num_threads(), [name for name in open_files() if "safetensors" in name]
    flash = load(path, threads=2, io_threads=8)
    greedy(flash, ids_of(20))
    assert num_threads() == threads + 1 + 8 + 8  # a second compute thread, readers of misses, readers of streams
    flash.engine.close()
    assert num_threads() == threads
    assert [name for name in open_files() if "safetensors" in name] == files
    flash.engine.close()
    for use in (lambda: flash(ids_of(3)), lambda: flash.generate(ids_of(3), max_new_tokens=2)):
        with pytest.raises(UsageError, match="the model is closed; load it again"):
            use()


def test_a_model_type_that_transformers_does_not_know_loads(tiny, load, monkeypatch):
    monkeypatch.setattr("flashllm.hf.model.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {})
    assert type(load(tiny("float32").path("all"))).__name__ == "FlashModel"


def test_a_failed_load_leaves_nothing_open(tiny):
    path = tiny().path("random")
    gc.collect()  # models of earlier tests whose tracebacks were kept
    threads = num_threads()
    with pytest.raises(UsageError, match="--mode must be one of sparse, oracle, dense, not 'fast'"):
        load_and_close(path, mode="fast")
    with pytest.raises(UsageError, match="has no predictors, which mode sparse needs; train them with"):
        load_and_close(tiny().path("bare"))
    with pytest.raises(UsageError, match="0"):
        load_and_close(path, context=10**6)
    gc.collect()
    assert num_threads() == threads
