"""Rate curves: interpolation, edges, JSON; and how they are sampled."""

import pytest

from flashllm.profile.rates import RateCurve, Sample, curve_of, sample_rounds, seconds_of


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
    assert RateCurve.from_plain(5) == RateCurve.flat(5.0)
    curve = RateCurve(((1.0, 2.0), (3.0, 4.0)))
    assert RateCurve.from_plain(curve.to_plain()) == curve
    for bad in (True, "fast", [1, 2], [[1]], None):
        with pytest.raises(ValueError):
            RateCurve.from_plain(bad)


def test_a_curve_goes_through_the_medians():
    samples = [Sample(size=size, units=seconds, seconds=1.0) for size in (8, 4) for seconds in (9.0, 1.0, 2.0)]
    assert curve_of(samples).knots == ((4, 2.0), (8, 2.0))


def test_rounds_go_over_all_probes_in_turn():
    seen = []

    def probe(name):
        def one(size):
            seen.append((name, size))
            return Sample(size=size, units=size, seconds=float(len(seen)))

        return one

    probes = {"a": (probe("a"), [10, 15, 20]), "b": (probe("b"), [5])}
    samples = sample_rounds(probes, rounds=2)
    assert seen == [("a", 10), ("b", 5), ("a", 20), ("a", 15)] * 2
    assert [(sample.size, sample.seconds) for sample in samples["b"]] == [(5, 2.0), (5, 6.0)]
    seen.clear()
    late = sample_rounds(probes, rounds=1, seconds=-1.0)
    assert seen == [("a", 10), ("b", 5), ("a", 20)]  # both ends of a curve, whatever the time
    assert [len(each) for each in late.values()] == [2, 1]


def test_seconds_of_is_not_moved_by_one_call_that_was_interrupted(monkeypatch):
    clock = iter([0, 9, 9, 10, 10, 12])
    monkeypatch.setattr("flashllm.profile.rates.time.perf_counter", lambda: next(clock))
    assert seconds_of(lambda: None, at_least_s=0) == 2
