"""The expected token: its arithmetic on numbers small enough to do by hand, and the activity it rests on."""

import dataclasses
import json

import numpy as np
import pytest
from test_device_costs import device, reader

from flashllm.budget import plan_memory
from flashllm.device_costs import ReaderChoice
from flashllm.expected_activity import ExpectedActivity, from_manifest, from_trace, new_share, window_that_fits
from flashllm.latency import estimate_token, merge, product_nbytes
from flashllm.manifest import Calibration, open_model_dir
from flashllm.model_files import RESIDENT
from flashllm.safetensors_file import read_header
from flashllm.trace import Trace, TraceInfo, TraceWriter, pack_bits


@pytest.fixture(scope="module")
def model(tiny):
    path = tiny("float16").path("random")
    manifest, config = open_model_dir(path), json.loads((path / "config.json").read_text())
    plan = plan_memory(manifest, config, limit=None, available=10**12, process=10**8)
    return path, manifest, config, plan


def estimate(model, activity, *, max_gap=0, **changes):
    _, manifest, config, plan = model
    costs = device(reader(latency_s=1e-4, sizes=(512, 1 << 20), request_s=(1e-5, 1e-5)), **changes)
    choice = ReaderChoice(backend="threads", depth=32, max_gap=max_gap, source="default")
    return estimate_token(
        manifest, config, plan, costs=costs, choice=choice, activity=activity, resident_nbytes=1_000_000
    )


def activity(active, misses, layers=3):
    return ExpectedActivity(active=(active,) * layers, misses=(misses,) * layers, firing=(active,) * layers, source="")


# Arithmetic


def test_a_token_is_reads_bytes_and_overhead(model):
    _, manifest, _, plan = model
    row = manifest.rows.stride
    token = estimate(model, activity(40.0, 0.0))
    assert (token.io_s, token.requests, token.bytes_read) == (0, 0, 0)
    heads = plan.kv_cache / plan.context * min(plan.context, 256)
    touched = 3 * 40 * row + 1_000_000 + plan.predictors + heads
    assert token.bytes_touched == pytest.approx(touched)
    assert token.compute_s == pytest.approx(touched / 20e9)
    assert token.overhead_s == pytest.approx(3 * 5e-4)
    assert token.total_s == pytest.approx(token.compute_s + token.overhead_s)


def test_misses_wait_for_the_reader_beside_the_hits_products(model):
    row = model[1].rows.stride
    token = estimate(model, activity(40.0, 10.0))
    requests, nbytes = merge(10, 512, row, 0)
    assert token.requests == pytest.approx(3 * requests)
    assert token.bytes_read == pytest.approx(3 * nbytes)
    assert token.io_busy_s == pytest.approx(3 * (1e-4 + requests * 1e-5))
    assert token.io_s == pytest.approx(token.io_busy_s - 3 * 30 * row / 2 / 20e9)
    assert estimate(model, activity(40.0, 10.0), gemv_bps={"float16": 1e6}).io_s == 0  # slow products hide the reads


def test_a_token_that_outgrows_the_cache_waits_for_each_part(model):
    path, manifest, config, plan = model
    small = dataclasses.replace(plan, cache_rows=(16, 16, 16))
    whole, parts = (
        estimate((path, manifest, config, one), activity(40.0, 10.0), gemv_bps={"float16": 1e15})
        for one in (plan, small)
    )
    assert parts.io_s == pytest.approx(whole.io_s + 3 * 2 * 1e-4)


@pytest.mark.parametrize("max_gap_rows", [0, 1, 3])
def test_merging_agrees_with_a_count(max_gap_rows):
    random = np.random.default_rng(0)
    requests, nbytes = [], []
    for _ in range(300):
        rows = np.flatnonzero(random.random(4000) < 0.05)
        gaps = np.diff(rows) - 1
        requests.append(1 + np.count_nonzero(gaps > max_gap_rows))
        nbytes.append((len(rows) + gaps[gaps <= max_gap_rows].sum()) * 512)
    expected = merge(200, 4000, 512, max_gap_rows * 512)
    assert expected[0] == pytest.approx(np.mean(requests), rel=0.02)
    assert expected[1] == pytest.approx(np.mean(nbytes), rel=0.02)


def test_merging_has_ends():
    assert merge(0, 100, 512, 0) == (0, 0)
    requests, nbytes = merge(100, 100, 1 << 18, 0)  # two rows fill a request
    assert requests == 50
    assert nbytes == pytest.approx(100 << 18)


def test_products_leave_the_embeddings_out_and_the_tied_head_in(model):
    path, _, config, _ = model
    tensors = read_header(path / RESIDENT).tensors
    positions = tensors["model.decoder.embed_positions.weight"].nbytes
    matrices = sum(info.nbytes for info in tensors.values() if len(info.shape) == 2)
    assert product_nbytes(path, config) == matrices - positions


# Activity


def test_the_assumed_popularity_gives_the_papers_figures():
    assert sum(new_share(0.1, window) for window in range(5)) == pytest.approx(0.24, abs=0.02)
    assert new_share(0.1, 4) == pytest.approx(0.024, abs=0.003)
    assert new_share(0.1, 0) == 0.1


def test_a_window_fits_its_rows():
    held = sum(new_share(0.1, window) for window in range(5))
    assert window_that_fits(0.1, held + 1e-9) == 5
    assert window_that_fits(0.1, held - 1e-9) == 4
    assert window_that_fits(0.1, 0.05) == 0
    assert window_that_fits(0.001, 1.0) > 100


def test_the_manifests_means_are_used_where_there_are_any(model):
    _, manifest, _, plan = model
    calibration = Calibration(window=5, mean_active=(51.2, 25.6, 5.12), req=(200, 100, 50), tokens=9, text="a test")
    known = from_manifest(dataclasses.replace(manifest, calibration=calibration), plan)
    assert known.active == calibration.mean_active
    assert known.misses[0] == pytest.approx(512 * new_share(0.1, 5))
    assert "a test" in known.source
    unknown = from_manifest(manifest, plan)
    assert unknown.active == (51.2,) * 3
    assert "no calibration" in unknown.source


def write_trace(path, masks, **changes):
    info = TraceInfo(
        num_tokens=len(masks), num_layers=3, num_neurons=512, synthetic=True, description="a test", **changes
    )
    with TraceWriter(path, info) as writer:
        for token in masks:
            writer.append(pack_bits(token))
        writer.finish()
    return Trace(path)


def test_a_replay_counts_what_the_window_misses(model, tmp_path):
    masks = np.zeros((20, 3, 3, 512), bool)
    for token in range(20):
        masks[token, :, 0, [token % 7, 100, 200]] = True  # one neuron comes again after 7 tokens
        masks[token, 0, 1, 100] = True
    plan = dataclasses.replace(model[3], cache_rows=(512, 9, 4), window=7)
    with write_trace(tmp_path / "t", masks) as trace:
        seen = from_trace(trace, plan)
    assert seen.active == (3, 3, 3)
    assert seen.firing == (1, 0, 0)
    assert seen.misses == (0, 0, 1)  # four rows hold two tokens' neurons, so the seventh before is gone
    with write_trace(tmp_path / "u", masks, sequence_starts=tuple(range(20))) as trace:
        assert from_trace(trace, plan).misses == (3, 3, 3)  # a new text finds nothing in the cache
