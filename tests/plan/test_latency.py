"""The expected token: its arithmetic on numbers small enough to do by hand, and the activity it rests on."""

import dataclasses

import numpy as np
import pytest
from planned import memory_plan, with_rows
from profiles import profile_of, reader

from flashllm.convert.run import convert
from flashllm.format.manifest_values import Calibration, Sparsity
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import PREDICTORS, RESIDENT
from flashllm.format.safetensors import read_header
from flashllm.plan.activity import ExpectedActivity, LayerActivity, assumed_shares, from_shares, merge, window_misses
from flashllm.plan.latency import dense_token, estimate_token, prefetch_pays, product_nbytes
from flashllm.profile.costs import ReaderChoice


@pytest.fixture(scope="module")
def model(tiny):
    opened = ModelDir.open(tiny("float16").path("random"))
    return opened, memory_plan(opened)


def one_cost(lost=5e-6):
    """Reads of any size: 10 us each alone, 20 us beside products."""
    curves = {"request_s": (1e-5, 1e-5), "beside_s": (2e-5, 2e-5), "lost_s": (lost, lost)}
    return reader(latency_s=1e-4, sizes=(512, 1 << 20), **curves)


def estimate(model, activity, *, max_gap=0, **changes):
    opened, plan = model
    costs = profile_of(one_cost(), **changes)
    choice = ReaderChoice(backend="threads", depth=32, max_gap=max_gap, source="default")
    return estimate_token(opened, plan, costs=costs, choice=choice, activity=activity)


def activity(active, misses, requests=0.0, rows_read=0.0, **prefetch):
    reads = {"requests": requests, "rows_read": rows_read, "prefetched": 0.0, "useful": 0.0, **prefetch}
    layer = LayerActivity(active=active, firing=active, misses=misses, **reads)
    return ExpectedActivity(layers=(layer,) * 3, source="")


# Arithmetic


def test_a_token_is_reads_bytes_and_overhead(model):
    opened, plan = model
    row = opened.manifest.rows.stride
    token = estimate(model, activity(40.0, 0.0))
    assert (token.io_s, token.requests, token.bytes_read) == (0, 0, 0)
    heads = opened.kv_nbytes_per_token * min(plan.context, 256)
    resident = product_nbytes(opened) + plan.predictors + heads
    assert token.bytes_touched == pytest.approx(3 * 40 * row + resident)
    tensors = read_header(opened.path / PREDICTORS).tensors.values()  # their products read no header
    products = resident - plan.predictors + sum(info.nbytes for info in tensors)
    assert token.compute_s == pytest.approx(3 * 40 * row / 16e9 + products / 20e9)
    assert token.overhead_s == pytest.approx(3 * 5e-4)
    assert token.total_s == pytest.approx(token.compute_s + token.overhead_s)


def test_coded_weights_have_rates_of_their_own(tiny, tmp_path):
    convert(tiny("float16").source, tmp_path / "model", encoding="int4_32", resident_encoding="int8_32")
    opened = ModelDir.open(tmp_path / "model")
    plan = memory_plan(opened)
    touched, resident = 3 * 40 * opened.manifest.rows.stride, product_nbytes(opened)
    cached = plan.predictors + opened.kv_nbytes_per_token * min(plan.context, 256)

    def compute_s(**rates):
        return estimate((opened, plan), activity(40.0, 0.0), **rates).compute_s

    # A profile from before they were measured: as the dtype's.
    assert compute_s() == pytest.approx(touched / 16e9 + (resident + cached) / 20e9)
    sparse = {"float16": 16e9, "int4_32": 4e9, "int8_32": 1e9}
    assert compute_s(sparse_bps=sparse) == pytest.approx(touched / 4e9 + (resident + cached) / 20e9)
    expected = touched / 16e9 + resident / 10e9 + cached / 20e9
    assert compute_s(gemv_bps={"float16": 20e9, "int8_32": 10e9}) == pytest.approx(expected)


def test_misses_wait_for_the_reader_beside_the_hits_products(model):
    row = model[0].manifest.rows.stride
    some = activity(40.0, 10.0, 8.0, 12.0)
    token, without = estimate(model, some), estimate(model, activity(40.0, 0.0))
    assert (token.active, token.misses, token.requests) == (120, 30, 24)
    assert token.bytes_read == 3 * 12 * row
    reading, hidden = 1e-4 + 8 * 1e-5, 30 * row / 2 / 16e9
    assert hidden < 1e-4  # over before the first read lands
    assert token.io_busy_s == pytest.approx(3 * reading)
    assert token.io_s == pytest.approx(3 * (reading - hidden))
    assert token.compute_s == pytest.approx(without.compute_s)


def test_reads_beside_products_are_not_waited_for_but_slow_them(model):
    row = model[0].manifest.rows.stride
    some, nothing = activity(40.0, 10.0, 8.0, 12.0), activity(40.0, 0.0)
    # The hits' up products take as long as the latency and five reads' share: 20 us a read, of which 5 us are lost.
    rate = {"float16": 30 * row / 2 / (1e-4 + 5 * 15e-6)}
    token, without = (estimate(model, one, sparse_bps=rate) for one in (some, nothing))
    assert token.io_s == pytest.approx(3 * 3 * 1e-5)
    assert token.compute_s == pytest.approx(without.compute_s + 3 * 5 * 5e-6)
    assert token.io_busy_s == pytest.approx(3 * (1e-4 + 5 * 20e-6 + 3 * 1e-5))
    slow = {"float16": 1e6}  # products that hide all reads
    token, without = (estimate(model, one, sparse_bps=slow) for one in (some, nothing))
    assert token.io_s == 0
    assert token.compute_s == pytest.approx(without.compute_s + 3 * 8 * 5e-6)


def test_what_is_prefetched_is_not_waited_for(model):
    opened, plan = model
    prefetching = opened, dataclasses.replace(plan, prefetch_rows=30)
    some = activity(40.0, 10.0, 10.0, 10.0, prefetched=12.0, useful=9.0)
    slow = {"gemv_bps": {"float16": 1e8}}  # products that take longer than the reads
    plain, hidden = (estimate(one, some, **slow) for one in (model, prefetching))
    # In all layers but the first: 12 prefetched, 9 of them needed; one miss is left.
    row = opened.manifest.rows.stride
    assert hidden.bytes_read == pytest.approx((30 + 2 * 3) * row)
    assert hidden.io_s == pytest.approx(plain.io_s - 2 * 9 * 1e-5)
    assert hidden.compute_s == pytest.approx(plain.compute_s + 2 * 12 * 5e-6)  # lost to the reads beside them
    assert hidden.total_s < plain.total_s
    # A run prefetches where that is not clearly slower.
    choice = ReaderChoice(backend="threads", depth=32, max_gap=0, source="default")
    for lost, reads, pays in ((5e-6, some, True), (1e-3, some, False), (1e-3, activity(40.0, 0.0), True)):
        costs = profile_of(one_cost(lost=lost), **slow)
        options = {"costs": costs, "choice": choice, "activity": reads}
        assert prefetch_pays(*prefetching, **options) is pays


def test_a_token_that_outgrows_the_cache_waits_for_each_part(model):
    opened, plan = model
    small = with_rows(plan, (10, 10, 10), bypass_rows=6)
    whole, parts = (
        estimate((opened, one), activity(40.0, 10.0, 8.0, 10.0), sparse_bps={"float16": 1e15}) for one in (plan, small)
    )
    assert parts.io_s == pytest.approx(whole.io_s + 3 * 2 * 1e-4)


@pytest.mark.parametrize("max_gap_rows", [0, 1, 3])
def test_merging_agrees_with_a_count(max_gap_rows):
    random = np.random.default_rng(0)
    requests, rows_read = [], []
    for _ in range(300):
        rows = np.flatnonzero(random.random(4000) < 0.05)
        gaps = np.diff(rows) - 1
        requests.append(1 + np.count_nonzero(gaps > max_gap_rows))
        rows_read.append(len(rows) + gaps[gaps <= max_gap_rows].sum())
    expected = merge(200, 4000, 512, max_gap_rows * 512)
    assert expected[0] == pytest.approx(np.mean(requests), rel=0.02)
    assert expected[1] == pytest.approx(np.mean(rows_read), rel=0.02)


def test_a_dense_token_takes_the_longer_of_reads_and_products(model):
    opened, plan = model
    rows = opened.manifest.rows

    def token(kept, **changes):
        costs = profile_of(layer_overhead_s=0.0, **changes)
        return dense_token(opened, with_rows(plan, [kept, 0, 0]), costs=costs)

    slow = token(100, sequential_bps=1e6)
    assert slow.bytes_read == slow.ffn_nbytes - 100 * rows.stride
    assert slow.total_s == slow.read_s == slow.bytes_read / 1e6 > slow.products_s
    fast = token(100, sequential_bps=1e15)
    assert fast.total_s == fast.products_s == pytest.approx((product_nbytes(opened) + fast.ffn_nbytes) / 20e9)
    assert token(100, direct=False).total_s is None  # the page cache tells nothing about the drive


def test_merging_has_ends():
    assert merge(0, 100, 512, 0) == (0, 0)
    requests, rows_read = merge(100, 100, 1 << 18, 0)  # two rows fill a request
    assert requests == 50
    assert rows_read == pytest.approx(100)


def test_products_leave_the_embeddings_out_and_the_tied_head_in(model):
    opened, _ = model
    tensors = read_header(opened.path / RESIDENT).tensors
    positions = tensors["positions.weight"].nbytes
    matrices = sum(info.nbytes for info in tensors.values() if len(info.shape) == 2)
    assert product_nbytes(opened) == matrices - positions


# Activity


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_a_layer_may_be_dead_or_dense(model, mean):
    manifest, plan = model[0].manifest, with_rows(model[1], (512, 256, 64), cache_policy="frequency")
    calibration = Calibration(window=5, mean_active=(512 * mean,) * 3, req=(200, 100, 50), tokens=9, text="a test")
    layers = from_shares(dataclasses.replace(manifest, calibration=calibration), plan, None, 0).layers
    assert [layer.active for layer in layers] == [512 * mean] * 3
    assert [layer.misses for layer in layers] == [0, 256 * mean, 448 * mean]


def test_the_assumed_popularity_gives_the_papers_figures():
    shares = assumed_shares(0.1, 2000)
    assert shares.mean() == pytest.approx(0.1, rel=0.01)
    assert 1 - ((1 - shares) ** 5).mean() == pytest.approx(0.24, abs=0.02)
    assert window_misses(shares, 2000, 4) / 2000 == pytest.approx(0.024, abs=0.003)


def test_a_window_shrinks_to_the_rows_there_are():
    shares = np.full(100, 0.1, np.float32)
    assert window_misses(shares, 100, 2) == pytest.approx(8.1)
    assert window_misses(shares, 20, 2) == pytest.approx(8.1)  # two tokens hold 19 neurons
    assert window_misses(shares, 18, 2) == pytest.approx(9.0)
    assert window_misses(shares, 5, 2) == pytest.approx(10.0)


def test_what_is_known_best_is_used(model):
    manifest, plan = model[0].manifest, model[1]
    plan = with_rows(plan, (512, 256, 64), cache_policy="frequency")
    popularity = np.zeros((3, 512), np.float32)
    popularity[:, :128] = 0.5
    known = from_shares(manifest, plan, popularity, 0)
    assert [layer.active for layer in known.layers] == [64, 64, 64]
    assert [layer.misses for layer in known.layers] == [0, 0, 32]  # half of the popular ones have no row
    calibration = Calibration(window=5, mean_active=(51.2, 25.6, 5.12), req=(200, 100, 50), tokens=9, text="a test")
    means = from_shares(dataclasses.replace(manifest, calibration=calibration), plan, None, 0)
    assert [layer.active for layer in means.layers] == pytest.approx([51.2, 25.6, 5.12], rel=0.02)
    assert means.layers[0].misses == 0
    assert "a test" in means.source
    assumed = from_shares(manifest, plan, None, 0)
    assert assumed.layers[0].active == pytest.approx(51.2, rel=0.02)
    assert "assumed" in assumed.source


def test_thresholds_say_how_many_neurons_are_above_them(model):
    manifest, plan = model[0].manifest, with_rows(model[1], (512, 256, 64), cache_policy="frequency")
    architecture = dataclasses.replace(manifest.architecture, gated=True)
    rows = dataclasses.replace(manifest.rows, matrices=("up", "gate", "down"))
    sparsity = Sparsity(
        share=0.3,
        cuts=(0.1, 0.2, 0.3),
        zeros=0.28,
        perplexity=2.0,
        dense_perplexity=1.9,
        scored_tokens=9,
        text="a text",
    )
    cut = dataclasses.replace(manifest, architecture=architecture, rows=rows, sparsity=sparsity)
    expected = from_shares(cut, plan, None, 0)
    assert expected.source == "72% of the neurons above their layer's threshold on a text"
    assert [layer.active for layer in expected.layers] == pytest.approx([0.72 * 512] * 3, rel=0.02)
    assert (manifest.active_share, cut.active_share) == (None, pytest.approx(0.72))
    calibration = Calibration(window=5, mean_active=(51.2, 25.6, 5.12), req=(200, 100, 50), tokens=9, text="a test")
    assert dataclasses.replace(cut, calibration=calibration).active_share == pytest.approx(0.16 / 3)
