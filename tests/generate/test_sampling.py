"""Sampling: transformers' processors keep the same tokens of the same logits, with the same scores; draws follow."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flashllm.errors import FlashError, UsageError
from flashllm.generate.sampling import Sampler, SamplingOptions, candidates


def process(logits, context, options):
    """The candidates as transformers has them: -inf for the others."""
    ids, scores = candidates(logits, context, options)
    assert (np.diff(ids) > 0).all()
    whole = np.full(len(logits), -np.inf, np.float32)
    whole[ids] = scores
    return whole


def expected_scores(logits, context, options):
    """transformers' scores; None where a probability is too near a limit for fp32 sums to decide."""
    processors = LogitsProcessorList()
    if options.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(options.repetition_penalty)))
    if options.temperature > 0:
        processors.append(TemperatureLogitsWarper(float(options.temperature)))
        if options.top_k:
            processors.append(TopKLogitsWarper(options.top_k))
        if options.top_p < 1:
            processors.append(TopPLogitsWarper(options.top_p))
        if options.min_p > 0:
            processors.append(MinPLogitsWarper(options.min_p))
    scores = torch.from_numpy(logits.copy())[None]
    for processor in processors:
        ordered = scores.double().sort().values.softmax(-1)
        if isinstance(processor, TopPLogitsWarper) and bool(
            ((ordered.cumsum(-1)[..., :-1] - (1 - options.top_p)).abs() < 1e-6).any()
        ):
            return None
        if isinstance(processor, MinPLogitsWarper) and bool(
            ((ordered - options.min_p * ordered.max()).abs() < 1e-6 * ordered.max()).any()
        ):
            return None
        scores = processor(torch.tensor([list(context)], dtype=torch.long), scores)
    return scores[0].numpy()


def check(logits, context, options, *, ties=False):
    before = logits.copy()
    expected = expected_scores(logits, context, options)
    got = process(logits, context, options)
    assert np.array_equal(logits, before)
    if expected is None:
        return False
    if ties:  # which of equal tokens stays depends on torch's sort; how many of which score does not
        got, expected = np.sort(got), np.sort(expected)
    assert np.array_equal(np.isneginf(got), np.isneginf(expected))
    kept = np.isfinite(expected)
    assert np.allclose(got[kept], expected[kept], rtol=1e-6, atol=0)
    return True


OPTIONS = st.builds(
    SamplingOptions,
    temperature=st.sampled_from((0.0, 0.3, 0.7, 1.0, 2.5)),
    top_k=st.sampled_from((0, 1, 2, 5, 40, 1000)),
    top_p=st.sampled_from((1.0, 0.95, 0.5, 0.1, 1e-6)),
    min_p=st.sampled_from((0.0, 0.02, 0.1, 0.5, 1.0)),
    repetition_penalty=st.sampled_from((1.0, 1.1, 2.0, 0.7)),
)


@given(OPTIONS, st.integers(0, 2**32), st.sampled_from((2, 7, 300)), st.sampled_from((0.5, 3.0, 20.0)))
@settings(max_examples=250, deadline=None)
def test_scores_are_those_of_transformers(options, seed, vocab, spread):
    random = np.random.default_rng(seed)
    logits = (random.standard_normal(vocab) * spread).astype(np.float32)
    context = random.integers(0, vocab, random.integers(0, 20)).tolist()
    check(logits, context, options)


@given(OPTIONS, st.lists(st.integers(-2, 2), min_size=2, max_size=40))
@settings(max_examples=250, deadline=None)
def test_equal_logits_are_kept_or_removed_as_by_transformers(options, logits):
    check(np.array(logits, np.float32), [0, 1, 1], options, ties=True)


def test_of_equal_tokens_top_p_keeps_the_later():
    scores = process(np.zeros(10, np.float32), [], SamplingOptions(temperature=1.0, top_p=0.25))
    assert np.flatnonzero(np.isfinite(scores)).tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, repetition_penalty=1.1),
        SamplingOptions(temperature=1.0, top_p=0.9),
    ],
    ids=["all", "top-p"],
)
def test_a_large_vocabulary(options):
    random = np.random.default_rng(0)
    compared = [
        check((random.standard_normal(50_272) * 4).astype(np.float32), random.integers(0, 50_272, 500), options)
        for _ in range(20)
    ]
    assert sum(compared) > 5


def test_at_least_the_likeliest_token_stays():
    logits = np.array([1.0, 3.0, 2.0], np.float32)
    for options in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert np.isfinite(process(logits, [], SamplingOptions(temperature=1.0, **options))).tolist() == [0, 1, 0]


def test_ids_that_the_model_cannot_say_are_no_matter():
    options = SamplingOptions(repetition_penalty=2.0)
    assert process(np.array([4.0, -4.0], np.float32), [0, 1, 2, 99], options).tolist() == [2.0, -8.0]


def test_greedy_takes_the_first_of_the_likeliest():
    assert Sampler().choose(np.array([0.0, 2.0, 2.0], np.float32), [], SamplingOptions()) == 1
    assert Sampler().choose(np.array([0.0, 2.0, 1.9], np.float32), [1], SamplingOptions(repetition_penalty=1.5)) == 2


def test_draws_follow_the_probabilities():
    logits = np.log(np.array([0.5, 0.0, 0.3, 0.2, 0.0], np.float32), where=[1, 0, 1, 1, 0], out=np.full(5, -1e9, "f4"))
    sampler, options = Sampler(seed=1), SamplingOptions(temperature=1.0)
    counts = np.bincount([sampler.choose(logits, [], options) for _ in range(20_000)], minlength=5)
    assert np.abs(counts / 20_000 - [0.5, 0, 0.3, 0.2, 0]).max() < 0.015
    assert counts[1] == counts[4] == 0


class Extreme:
    """A random generator whose draws are the ends of its interval."""

    def __init__(self, value):
        self.value = value

    def random(self):
        return self.value


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_no_draw_reaches_a_token_that_was_removed(draw):
    sampler = Sampler()
    sampler._random = Extreme(draw)
    random = np.random.default_rng(3)
    for _ in range(200):
        logits = random.standard_normal(100).astype(np.float32)
        order = np.argsort(logits)
        logits[[0, -1]] = logits.min() - 1
        chosen = sampler.choose(logits, [], SamplingOptions(temperature=1.0, top_k=5))
        assert chosen in set(order[-5:]) | set(np.argsort(logits)[-5:])


def test_a_seed_gives_the_same_tokens_everywhere():
    """Pinned: a seed in a bug report means the same on every machine."""
    logits = np.linspace(0, 3, 50, dtype=np.float32)
    sampler, options = Sampler(seed=7), SamplingOptions(temperature=1.0)
    assert [sampler.choose(logits, [], options) for _ in range(8)] == [42, 48, 46, 28, 32, 47, 1, 46]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(bad, temperature):
    logits = np.array([0.0, bad, 1.0], np.float32)
    with pytest.raises(FlashError, match="no usable logits"):
        Sampler().choose(logits, [], SamplingOptions(temperature=temperature))


@pytest.mark.parametrize(
    "bad",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e-40},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": float("nan")},
        {"repetition_penalty": 0.0},
        {"seed": -1},
        {"stop": ("",)},
    ],
    ids=str,
)
def test_bad_options_are_named(bad):
    with pytest.raises(UsageError, match=f"--{next(iter(bad)).replace('_', '-')} cannot be"):
        SamplingOptions(**bad)
