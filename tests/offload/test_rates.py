"""Rate curves: interpolation, edges, JSON; and fitting them to samples."""

import pytest

from flashllm.offload.machine.curves import Sample, fit_curve, medians, sample_rounds, seconds_of
from flashllm.offload.machine.rates import RateCurve


def test_rate_runs_linearly_in_log_size_and_stays_at_the_ends():
    curve = RateCurve(((1e3, 10.0), (1e5, 30.0)))
    assert curve.at(1) == 10
    assert curve.at(1e3) == 10
    assert curve.at(1e4) == pytest.approx(20)
    assert curve.at(1e5) == 30
    assert curve.at(1e9) == 30


def test_flat_and_scaled():
    assert RateCurve.flat(7.0).at(123) == 7
    assert RateCurve(((1.0, 2.0), (4.0, 6.0))).scaled(0.5).at(2) == pytest.approx(2)


@pytest.mark.parametrize(
    "knots", [(), ((0, 1),), ((1, 0),), ((1, float("inf")),), ((2, 1), (1, 1)), ((1, 1), (1, 2)), ((float("nan"), 1),)]
)
def test_impossible_knots_are_refused(knots):
    with pytest.raises(ValueError):
        RateCurve(tuple((float(a), float(b)) for a, b in knots))


def test_json_takes_numbers_and_lists():
    assert RateCurve.from_json(5) == RateCurve.flat(5.0)
    curve = RateCurve(((1.0, 2.0), (3.0, 4.0)))
    assert RateCurve.from_json(curve.to_json()) == curve
    for bad in (True, "fast", [1, 2], [[1]], None):
        with pytest.raises(ValueError):
            RateCurve.from_json(bad)


def test_fit_recovers_a_curve_of_its_own_family():
    truth = RateCurve(((1.0, 10.0), (100.0, 50.0), (10000.0, 40.0)))
    samples = [Sample(size=n, units=n, seconds=n / truth.at(n)) for n in (1, 3, 10, 40, 100, 700, 2000, 10000)]
    fitted = fit_curve(samples, knots=[1, 100, 10000])
    for (_, rate), (_, expected) in zip(fitted.knots, truth.knots, strict=True):
        assert rate == pytest.approx(expected, rel=1e-9)


def test_fit_drops_knots_outside_the_samples_and_needs_enough_of_them():
    samples = [Sample(size=n, units=n, seconds=1.0) for n in (4, 8)]
    assert [size for size, _ in fit_curve(samples, knots=[1, 4, 8, 99]).knots] == [4, 8]
    with pytest.raises(ValueError, match="knots"):
        fit_curve(samples, knots=[4, 6, 8])
    with pytest.raises(ValueError, match="knots"):
        fit_curve(samples, knots=[1])


def test_rounds_interleave_sizes_and_medians_are_per_size():
    seen = []

    def probe(size):
        seen.append(size)
        return Sample(size=size, units=size, seconds=float(len(seen)))

    samples = sample_rounds(probe, [10, 20], rounds=3)
    assert seen == [10, 20, 10, 20, 10, 20]
    assert [(s.size, s.seconds) for s in medians(samples)] == [(10, 3.0), (20, 4.0)]


def test_seconds_of_calls_at_least_once():
    calls = []
    assert seconds_of(lambda: calls.append(1), at_least_s=0) >= 0
    assert len(calls) == 1
