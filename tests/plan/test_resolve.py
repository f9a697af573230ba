"""`resolve`: the one place where arguments, model and profile become a plan."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from activity_trace import Trace
from install_popularity import install_popularity
from profiles import profile_of, reader
from traces import write_trace

from flashllm.base.machine import num_cores
from flashllm.config import RunConfig
from flashllm.errors import BudgetError, UsageError
from flashllm.format.manifest_values import Calibration
from flashllm.format.model_dir import ModelDir
from flashllm.plan.resolve import resolve
from flashllm.profile.store import device_of, save_profile

MACHINE = {"available": 10**12, "process": 100_000_000}
PIECES = {"threads": 1, "io_threads": 4}


@pytest.fixture
def model(tiny):
    return ModelDir.open(tiny().path("random"))


@pytest.fixture
def prefetching(tiny):
    """A model with predictors to prefetch by."""
    return ModelDir.open(tiny().path("prefetch"))


def profile(*, direct=True, request_s=1e-5, lost_s=1e-6, depth=24, gap_nbytes=0.0):
    """A drive on which a read takes `request_s` alone, and 20 us beside products, which lose `lost_s` by it."""
    curves = {"request_s": (request_s,) * 2, "beside_s": (2e-5,) * 2, "lost_s": (lost_s,) * 2}
    costs = reader(depth=depth, sizes=(512, 1 << 20), gap_nbytes=gap_nbytes, **curves)
    rates = {"float32": 1e9}
    return profile_of(costs, direct=direct, gemv_bps=rates, sparse_bps=rates, layer_overhead_s=1e-5)


@pytest.fixture
def store_with(tmp_path):
    """Writes a profile of the drive a model is on; the store's path."""

    def write(model, costs):
        save_profile(tmp_path / "profiles.json", device_of(model.path), costs)
        return tmp_path / "profiles.json"

    return write


def test_a_model_whose_neurons_are_never_zero_runs_densely_and_says_so(variant_of):
    _, directory = variant_of("llama")
    plan = resolve(RunConfig(), ModelDir.open(directory), **MACHINE)
    assert plan.mode == "dense"
    (reason,) = plan.reasons
    assert "is ever exactly zero (silu)" in reason
    assert resolve(RunConfig(mode="dense"), ModelDir.open(directory), **MACHINE).reasons == plan.notices == ()
    # The mode that is chosen is planned as the one that is asked for: what fits of each layer stays.
    for limit in (None, 172_000_000):
        chosen, asked = (
            resolve(RunConfig(mode=mode, memory=limit), ModelDir.open(directory), **MACHINE) for mode in (None, "dense")
        )
        assert repr(chosen.memory) == repr(asked.memory)
    with pytest.raises(UsageError, match="use --mode dense"):
        resolve(RunConfig(mode="sparse"), ModelDir.open(directory), **MACHINE)


def test_without_a_profile_the_defaults_hold(model):
    plan = resolve(RunConfig(), model, **MACHINE)
    assert (plan.reader.backend, plan.reader.depth, plan.reader.max_gap) == ("threads", 32, 0)
    assert (plan.threads, plan.mode, plan.profile, plan.notices) == (num_cores(), "sparse", None, ())
    assert (plan.memory.context, plan.memory.window, plan.memory.cache_policy) == (96, 5, "frequency")
    assert plan.memory.limit_nbytes == (MACHINE["available"] + MACHINE["process"]) * 4 // 5


def test_what_was_asked_for_is_done(model):
    given = RunConfig(memory=10**9, context=50, cache_policy="window", window=3, **PIECES)
    plan = resolve(given, model, **MACHINE)
    assert (plan.memory.limit_nbytes, plan.memory.limit_is_given) == (10**9, True)
    assert (plan.memory.context, plan.memory.window, plan.memory.cache_policy) == (50, 3, "window")
    assert (plan.reader.depth, plan.reader.source, plan.threads) == (4, "argument", 1)


def test_the_profile_chooses_the_reader(model, store_with):
    store = store_with(model, profile(gap_nbytes=3000.0))
    plan = resolve(RunConfig(store=store), model, **MACHINE)
    assert (plan.reader.depth, plan.reader.source, plan.reader.max_gap) == (24, "calibration", 2560)
    assert plan.profile is not None
    assert plan.memory.staging > resolve(RunConfig(io_threads=24), model, **MACHINE).memory.staging  # the gaps' memory
    buffered = resolve(RunConfig(store=store, direct=False), model, **MACHINE)
    assert buffered.reader.source == "default"


def test_a_profile_lets_no_run_fail_that_fits_without_it(model, store_with):
    store = store_with(model, profile(depth=300, gap_nbytes=1e6))  # whose reader takes memory
    least = resolve(RunConfig(), model, **MACHINE).memory.minimum_nbytes
    assert resolve(RunConfig(store=store), model, **MACHINE).memory.minimum_nbytes > least
    plan = resolve(RunConfig(store=store, memory=least), model, **MACHINE)
    assert (plan.reader.depth, plan.reader.source) == (32, "default")
    with pytest.raises(BudgetError):
        resolve(RunConfig(store=store, memory=least - 1), model, **MACHINE)
    with pytest.raises(BudgetError):  # what was asked for is not changed
        resolve(RunConfig(io_threads=300, memory=least), model, **MACHINE)


def test_popularity_shares_the_rows_out(model, tmp_path):
    path = shutil.copytree(model.path, tmp_path / "popular")
    active = np.zeros((10, 3, 512), bool)
    active[:9, 0] = active[:1, 1:] = True
    with Trace(write_trace(tmp_path / "trace", active)) as trace:
        install_popularity(path, trace)
    limit = resolve(RunConfig(), model, **MACHINE).memory.minimum_nbytes + 300_000
    plan = resolve(RunConfig(memory=limit), ModelDir.open(path), **MACHINE)
    assert plan.memory.cache_rows[0] == 512 > plan.memory.cache_rows[1]
    np.testing.assert_allclose([shares[0] for shares in plan.popularity], [0.9, 0.1, 0.1])


# Modes


def test_mode_sparse_needs_predictors(tiny):
    bare = ModelDir.open(tiny().path("bare"))
    with pytest.raises(UsageError, match=r"has no predictors, which mode sparse needs; train them .*--mode dense"):
        resolve(RunConfig(), bare, **MACHINE)
    for mode in ("oracle", "dense"):
        assert resolve(RunConfig(mode=mode), bare, **MACHINE).mode == mode


# Prefetch


def test_without_a_profile_what_can_be_prefetched_is(prefetching, model):
    plan = resolve(RunConfig(), prefetching, **MACHINE)
    assert plan.prefetch
    assert plan.memory.prefetch_rows == 512 // 32
    for other, config in (
        (model, RunConfig()),
        (prefetching, RunConfig(mode="oracle")),
        (prefetching, RunConfig(mode="dense")),
    ):
        plan = resolve(config, other, **MACHINE)
        assert not plan.prefetch
        assert plan.memory.prefetch_rows == 0


def test_the_device_profile_decides_whether_prefetching_pays(prefetching, store_with):
    half = Calibration(window=5, mean_active=(256.0,) * 3, req=(512,) * 3, tokens=9, text="a test")
    prefetching = dataclasses.replace(prefetching, manifest=dataclasses.replace(prefetching.manifest, calibration=half))
    limit = resolve(RunConfig(io_threads=24), prefetching, **MACHINE).memory.minimum_nbytes + 10_000
    plans = {}
    for name, costs in {
        "hidden": profile(lost_s=1e-7),
        "costly": profile(lost_s=1.7e-5, request_s=1e-6),
        "buffered": profile(lost_s=1.7e-5, request_s=1e-6, direct=False),
    }.items():
        plans[name] = resolve(
            RunConfig(memory=limit, io_threads=24, store=store_with(prefetching, costs)), prefetching, **MACHINE
        )
    assert {name: plan.prefetch for name, plan in plans.items()} == {"hidden": True, "costly": False, "buffered": True}
    assert plans["costly"].memory.prefetch_rows == 0
    assert sum(plans["costly"].memory.cache_rows) > sum(plans["hidden"].memory.cache_rows)  # its memory caches neurons


# ModelDir


def test_a_model_directory_is_one_value(tiny):
    path = tiny().path("random")
    model = ModelDir.open(path)
    config = json.loads((path / "config.json").read_text())
    assert model.path == path
    assert model.architecture is model.manifest.architecture
    assert model.config.items() >= config.items()
    assert model.generation_config == json.loads((path / "generation_config.json").read_text())
    assert (model.block.d_model, model.block.context, model.dtype.name) == (64, 96, "float32")
    assert model.kv_nbytes_per_token == 2 * 3 * 64 * 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.path = path.parent
    with pytest.raises(TypeError):
        model.config["vocab_size"] = 3
    with pytest.raises(UsageError, match="no such directory"):
        ModelDir.open(path / "absent")


def test_a_generation_config_may_be_missing(tiny, tmp_path):
    path = shutil.copytree(tiny().path("random"), tmp_path / "model")
    manifest = json.loads((path / "flashllm.json").read_text())
    del manifest["files"]["generation_config.json"], manifest["sha256"]
    (path / "flashllm.json").write_text(json.dumps(manifest))
    (path / "generation_config.json").unlink()
    assert ModelDir.open(path).generation_config == {}
