"""Fitted costs: made-up samples give back what made them, and the choices follow from the numbers."""

import json

import pytest
from profiles import profile_of, reader

from flashllm.base.checks import from_json, to_json
from flashllm.profile.costs import BatchSample, BesideSample, GapSample, fit_reader, scatter_of, worthwhile_gap
from flashllm.profile.machine import Profile

LATENCY = 90e-6


def true_request(nbytes):
    return 12e-6 + nbytes / 2e9


def samples(noise=(1.0,), latency=LATENCY):
    return [
        BatchSample(requests=requests, nbytes=nbytes, wall_s=factor * (latency + requests * true_request(nbytes)))
        for nbytes in (4096, 16384, 65536)
        for requests in (8, 64, 256)
        for factor in noise
    ]


def beside(noise=(1.0,), sizes=(4096, 16384, 65536)):
    return [
        BesideSample(requests=512, nbytes=nbytes, wall_s=factor * 512 * 30e-6, lost_s=factor * 512 * 5e-6)
        for nbytes in sizes
        for factor in noise
    ]


def fit(batches, beside_=None, depth=32):
    return fit_reader(batches, beside() if beside_ is None else beside_, [], backend="threads", depth=depth)


def test_scatter_is_that_of_batches_alike():
    assert scatter_of(samples(noise=(1.0, 1.0, 1.0))) == pytest.approx(1.0)
    assert scatter_of(samples(noise=(1.0, 2.0, 3.0))) == pytest.approx(2.5 / 1.5)


def test_the_fit_gives_back_what_made_the_samples():
    fitted = fit(samples())
    assert fitted.latency_s == pytest.approx(LATENCY)
    assert fitted.request_s == pytest.approx([true_request(size) for size in (4096, 16384, 65536)])
    assert fitted.batch(100, 16384) == pytest.approx(LATENCY + 100 * true_request(16384))
    assert fitted.beside_s == pytest.approx([30e-6] * 3)
    assert fitted.lost_s == pytest.approx([5e-6] * 3)


def test_one_batch_that_was_interrupted_changes_nothing():
    noise = (0.99, 1.0, 1.0, 1.01, 30.0)
    calm, noisy = fit(samples()), fit(samples(noise), beside(noise))
    assert noisy.request_s == pytest.approx(calm.request_s)
    assert (noisy.beside_s, noisy.lost_s) == (calm.beside_s, calm.lost_s)


def test_a_latency_is_never_negative_and_a_larger_request_never_cheaper():
    slow_small = [BatchSample(requests=n, nbytes=4096, wall_s=n * 30e-6) for n in (8, 64)]
    fast_large = [BatchSample(requests=n, nbytes=8192, wall_s=n * 20e-6 * n / 64) for n in (8, 64)]
    fitted = fit(slow_small + fast_large, beside(sizes=(4096, 8192)), depth=8)
    assert fitted.latency_s == 0
    assert fitted.request_s[0] <= fitted.request_s[1]


def test_too_few_batches_cannot_be_fitted():
    one_each = [sample for sample in samples() if sample.requests == 64]
    with pytest.raises(ValueError, match="cannot tell"):
        fit(one_each)
    with pytest.raises(ValueError, match="no sample during products"):
        fit(samples(), beside(sizes=(4096, 16384)))


def test_reads_that_took_nothing_from_products_cost_them_nothing():
    faster = [BesideSample(requests=8, nbytes=size, wall_s=1e-3, lost_s=-1e-4) for size in (4096, 16384, 65536)]
    assert fit(samples(), faster).lost_s == (0, 0, 0)


def test_a_request_outside_the_measured_sizes():
    one = reader()
    assert one.request(512) == one.request(4096) == 10e-6
    assert one.request((4096 + 65536) / 2) == pytest.approx(25e-6)
    assert one.request(4 * 65536) == pytest.approx(160e-6)
    assert one.batch(0, 4096) == 0


@pytest.mark.parametrize(
    ("shares", "gap"),
    [
        ({4096: 0.75, 8192: 0.85, 16384: 1.05}, 8192 + 8192 * 0.1 / 0.2),
        ({4096: 0.96, 8192: 1.2}, 0),
        ({4096: 0.5, 8192: 0.6}, 8192),
        ({4096: 0.75, 8192: 1.2, 16384: 0.5}, 4096 + 4096 * 0.2 / 0.45),  # beyond the first loss nothing counts
        ({}, 0),
    ],
)
def test_the_gap_is_where_reading_through_stops_to_pay(shares, gap):
    gaps = [
        GapSample(gap_nbytes=nbytes, apart_s=scale, through_s=scale * share)
        for nbytes, share in shares.items()
        for scale in (1.0, 2.0, 5.0)
    ]
    assert worthwhile_gap(gaps) == pytest.approx(gap)


def test_gaps_are_whole_rows():
    assert reader().gap(4096) == 8192
    assert reader().gap(1024) == 9 * 1024
    assert reader().gap(16384) == 0


def test_reads_beside_products_are_slower_and_slow_them():
    one = reader()
    assert one.beside((4096 + 65536) / 2) == pytest.approx(40e-6)
    assert one.beside(2 * 65536) == pytest.approx(120e-6)
    assert one.lost(4096) == 5e-6
    # 3 ms of products take 4 ms beside 200 reads that land every 20 us and take 5 us each.
    assert one.beside_products(3e-3, 4096) == pytest.approx(200)
    # Whatever was measured, products go on.
    assert reader(lost_s=(30e-6, 70e-6)).lost(4096) == pytest.approx(18e-6)


def test_the_backend_that_makes_a_layer_shortest_is_chosen():
    threads = reader(depth=32)
    slow = reader(depth=8, request_s=(20e-6, 60e-6))
    lean = reader("io_uring", 64, lost_s=(4e-6, 30e-6))
    costs = profile_of(slow, threads, lean)
    assert costs.best(4096) == lean  # as fast, and takes less from products
    assert costs.best(65536) == threads
    # What does not land beside products is waited for.
    late = reader("io_uring", 64, beside_s=(40e-6, 120e-6), lost_s=(5e-6, 9e-6))
    assert profile_of(late, threads).best(4096) == threads
    assert profile_of(slow, lean).best(4096, "threads") == slow
    assert costs.of("threads", 6) == slow
    assert costs.of("threads", 64) == threads
    assert costs.of("io_uring", 500) == lean
    assert profile_of(slow, threads).of("io_uring", 32) == threads


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("dram_bps",), float("nan"), "dram_bps"),
        (("dram_bps",), "fast", "dram_bps"),
        (("direct",), 1, "direct"),
        (("threads",), 0, "threads"),
        (("readers",), [], "readers"),
        (("readers",), {}, "readers"),
        (("gemv_bps",), [], "gemv_bps"),
        (("gemv_bps", "float16"), -1, "gemv_bps"),
        (("sparse_bps", "float16"), -1, "sparse_bps"),
        (("blocks_wps",), 0, "blocks_wps must be above 0"),
        (("readers", 0, "backend"), "magic", "backend"),
        (("readers", 0, "depth"), 0, "depth"),
        (("readers", 0, "latency_s"), -1, "latency_s"),
        (("readers", 0, "sizes"), [65536, 4096], "sizes"),
        (("readers", 0, "request_s"), [1e-5], "request_s"),
        (("readers", 0, "beside_s"), [1e-5, None], "beside_s"),
        (("readers", 0, "beside_s"), [0, 1e-5], "beside_s"),
        (("readers", 0, "lost_s"), [1e-5, -1], "lost_s"),
        (("readers", 0, "gap_nbytes"), None, "gap_nbytes"),
        (("more",), 1, "more"),
    ],
)
def test_damaged_costs_are_refused(path, value, message):
    document = json.loads(json.dumps(to_json(profile_of())))
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        from_json(Profile, document, "the entry")


def test_no_product_reads_faster_than_memory():
    """What was measured in a faster moment than memory was."""
    costs = profile_of(reader(), gemv_bps={"float16": 20e9, "bf12": 60e9}, sparse_bps={"float16": 50e9})
    assert costs.dram_bps == 40e9
    assert [costs.resident_bps(name, "float16") for name in ("float16", "bf12", "int8_32")] == [20e9, 40e9, 20e9]
    assert costs.gathered_bps("bf12", "float16") == 40e9
