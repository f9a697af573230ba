"""Sequences: how they end, what text they give, and that their answer is theirs alone."""

import numpy as np
import pytest
from fakes import ALPHABET, END, VOCAB, Letters
from hypothesis import given, settings
from hypothesis import strategies as st

from flashllm.errors import UsageError
from flashllm.generate.logprobs import MAX_LOGPROBS
from flashllm.generate.sampling import SamplingOptions
from flashllm.offload.jobs.sequences import Sequence


def sequence(*, prompt=(1, 2), logprobs=None, **options):
    return Sequence(prompt, SamplingOptions(**options), decoder=Letters(), end_ids=frozenset({END}), logprobs=logprobs)


def favour(token):
    logits = np.zeros(VOCAB, np.float32)
    logits[token] = 9
    return logits


def say(one, text):
    for letter in text:
        one.accept(favour(ALPHABET.index(letter)))


def test_ends_at_the_last_token_allowed():
    one = sequence(max_new_tokens=3)
    say(one, "ab")
    assert (one.finished, one.text, one.last_token, one.length) == (False, "ab", ALPHABET.index("b"), 4)
    say(one, "c")
    assert (one.finish_reason, one.text, list(one.output)) == ("length", "abc", [3, 4, 5])
    with pytest.raises(UsageError, match="finished"):
        say(one, "d")


def test_ends_as_any_answer():
    """See tests/generate/test_answer.py."""
    one = sequence(stop=("cd",))
    say(one, "abc")
    assert (one.finish_reason, one.text, len(one.output)) == (None, "ab", 3)  # the c may begin a stop string


def test_logits_that_are_not_finite_end_this_sequence_alone():
    one = sequence()
    say(one, "a")
    one.accept(np.full(VOCAB, np.nan, np.float32))
    assert one.finish_reason == "error"
    assert "no usable logits" in one.error
    assert one.text == "a"


def test_without_a_tokenizer_there_is_no_text():
    one = Sequence([1], SamplingOptions(max_new_tokens=1), decoder=None, end_ids=frozenset())
    one.accept(favour(3))
    assert (one.text, list(one.output), one.finish_reason) == ("", [3], "length")
    with pytest.raises(UsageError, match="stop strings"):
        Sequence([1], SamplingOptions(stop=("a",)), decoder=None, end_ids=frozenset())


def test_what_cannot_be():
    with pytest.raises(UsageError, match="no tokens"):
        sequence(prompt=())
    with pytest.raises(UsageError, match="logprobs"):
        sequence(logprobs=MAX_LOGPROBS + 1)


@given(st.integers(0, MAX_LOGPROBS), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_logprobs_are_those_of_a_softmax(count, seed):
    random = np.random.default_rng(seed)
    logits = random.normal(0, 4, VOCAB).round(1).astype(np.float32)  # with equal ones
    one = sequence(logprobs=count, temperature=0.7, seed=3)
    one.accept(logits)
    (token,) = one.logprobs
    expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert token.token_id == one.output[0]
    np.testing.assert_allclose(token.logprob, expected[token.token_id], atol=1e-9)
    order = sorted(range(VOCAB), key=lambda each: (-logits[each], each))[:count]
    assert [each for each, _ in token.top] == order
    np.testing.assert_allclose([value for _, value in token.top], expected[order], atol=1e-9)


@given(st.permutations(range(4)), st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_an_answer_does_not_depend_on_its_neighbours(order, seed):
    """Sequences that take turns in any order say what each says alone."""
    logits = np.random.default_rng(seed).normal(0, 1, (4, 6, VOCAB)).astype(np.float32)

    def make(key):
        return sequence(temperature=1.0, top_p=0.9, seed=key, max_new_tokens=6, ignore_eos=True, repetition_penalty=1.3)

    alone = []
    for key in range(4):
        one = make(key)
        for step in range(6):
            one.accept(logits[key, step])
        alone.append(list(one.output))
    together = [make(key) for key in range(4)]
    for step in range(6):
        for key in order:
            together[key].accept(logits[key, step])
    assert [list(one.output) for one in together] == alone
