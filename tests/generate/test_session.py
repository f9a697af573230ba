"""Sessions over a model of a few lines: every way in which a stream can end, and several sessions at once."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_tokenizer

from flashllm.engine.meter import Meter
from flashllm.errors import ContextFull, FlashIOError, UsageError
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import Session, TokenRecord
from flashllm.generate.templates.chat_template import ChatTemplate
from flashllm.generate.tokenizer import Tokenizer

VOCAB = 300
TOKENIZER = Tokenizer(make_tokenizer(VOCAB).backend_tokenizer, end_ids=())
TURNS = ChatTemplate("{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:", "here")


@pytest.fixture(scope="module", autouse=True)
def _turns():
    yield
    TURNS.close()


class Sequence:
    def __init__(self):
        self.ids, self.closed = [], False

    @property
    def length(self):
        return len(self.ids)

    def can_keep(self, length):
        return length

    def keep(self, length):
        assert not self.closed
        assert length >= 0
        del self.ids[length:]
        return self.length

    def close(self):
        self.closed = True


class PrefixModel:
    """Its logits are a hash of all tokens so far: a token too many, too few or in another place changes everything."""

    def __init__(self, context=200):
        self.context, self.meter = context, Meter()
        self.sequences, self.computed = [], []  # computed: tokens of each step
        self.fault = None  # called with each step's tokens, before they are in the sequence and after

    def new_sequence(self):
        self.sequences.append(Sequence())
        return self.sequences[-1]

    def is_prompt(self, tokens):
        return tokens > 8

    def step(self, entries, *, as_prompt=False):
        ((sequence, ids),) = entries
        assert not sequence.closed
        assert ids
        if sequence.length + len(ids) > self.context:
            raise ContextFull("no room")
        before = sequence.length
        try:
            self._fault("before")
            sequence.ids += ids
            self._fault("after")
        except BaseException:
            del sequence.ids[before:]
            raise
        self.computed.append(len(ids))
        return logits_of(sequence.ids)[None]

    def _fault(self, where):
        if self.fault is not None:
            self.fault(where)


def logits_of(ids):
    return np.random.default_rng(zlib.crc32(bytes(str(ids), "ascii"))).standard_normal(VOCAB).astype(np.float32)


def greedy(ids, count):
    """What must be generated after `ids`."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(logits_of(ids).argmax()))
    return ids[len(ids) - count :]


def run(stream):
    return [record.token_id for record in stream if isinstance(record, TokenRecord)]


@pytest.fixture
def model():
    return PrefixModel()


def session_of(model, *, template=None, tokenizer=TOKENIZER, **options):
    return Session(model, tokenizer, SamplingOptions(**{"max_new_tokens": 6, **options}), template=template)


def test_turns_compute_only_what_is_new(model):
    one = session_of(model)
    ids = TOKENIZER.encode("One day a girl found")
    first = run(one.stream("One day a girl found"))
    assert first == greedy(ids, 6)
    line = TOKENIZER.encode(" and", add_special=False)
    assert run(one.stream(" and", add_special=False)) == greedy([*ids, *first, *line], 6)
    # The last token of an answer is computed with the next turn.
    assert model.computed == [len(ids), 1, 1, 1, 1, 1, 1 + len(line), 1, 1, 1, 1, 1]


def test_several_sessions_do_not_know_of_each_other(model):
    texts = ("One day", "The cat said:", "It was")
    streams = [session_of(model).stream(text) for text in texts]
    found = [[] for _ in texts]
    for _ in range(7):  # a prefill and six tokens, in turn
        for stream, ids in zip(streams, found, strict=True):
            record = next(stream)
            ids.extend([record.token_id] if isinstance(record, TokenRecord) else [])
    assert found == [greedy(TOKENIZER.encode(text), 6) for text in texts]


ERRORS = [KeyboardInterrupt, FlashIOError, MemoryError]


@given(
    st.sampled_from(ERRORS),
    st.sampled_from(["before", "after"]),
    st.integers(1, 7),
    st.sampled_from([None, TURNS]),
    st.sampled_from(["a girl", "so", "what of the others? " * 3]),
)
@settings(max_examples=150, deadline=None)
def test_whatever_ends_a_stream_the_session_goes_on_as_after_the_last_record(error, where, call, template, text):
    model = PrefixModel()
    one = session_of(model, template=template)
    run(one.stream_chat("The little dog"))
    before, messages = one.tokens, list(one.messages)
    calls = iter(range(1, 100))

    def fault(at):
        if at == where and next(calls) == call:
            raise error("stop")

    model.fault, told = fault, []
    try:
        told.extend(one.stream_chat(text))
    except error:
        model.fault = None
    told = [record.token_id for record in told if isinstance(record, TokenRecord)]
    if call == 1:
        assert (one.tokens, one.messages) == (before, messages)
    else:
        assert one.tokens[len(one.tokens) - len(told) :] == told
        assert told == greedy(one.tokens[: len(one.tokens) - len(told)], len(told))
    model.fault = None
    tokens = one.tokens
    line = TOKENIZER.encode(" and so", add_special=False)
    assert run(one.stream(" and so", add_special=False)) == greedy([*tokens, *line], 6)


def test_an_interrupt_beside_the_step_costs_time_alone(model, monkeypatch):
    """Between a step and the line that notes it an interrupt leaves more in the KV cache than is noted."""
    one = session_of(model, template=TURNS)
    run(one.stream_chat("hello"))
    tokens = one.tokens
    step = model.step

    def interrupted(entries, **options):
        step(entries, **options)
        raise KeyboardInterrupt  # the sequence has the tokens, the session does not know

    monkeypatch.setattr(model, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(one.stream_chat("who are you?"))
    monkeypatch.setattr(model, "step", step)
    assert one.tokens == tokens
    answer = run(one.stream_chat("who is there?"))
    assert answer == greedy(one.tokens[:-6], 6)
    assert model.sequences[0].ids == one.tokens[:-1]


def test_memory_that_is_full_before_the_context_is_ends_the_turn_alone(model):
    one = session_of(model, max_new_tokens=100)
    prompt = TOKENIZER.encode("One day")

    def fault(where):
        if model.sequences[0].length >= len(prompt) + 10:
            raise ContextFull("other conversations hold the memory")

    model.fault, told = fault, []
    with pytest.raises(ContextFull, match="other conversations"):
        told.extend(one.stream("One day"))
    assert len(told) == 1 + 10
    model.fault = None
    one.options = SamplingOptions(max_new_tokens=3)
    assert run(one.stream("", add_special=False)) == greedy([*prompt, *greedy(prompt, 10)], 3)


def test_the_context_limit_is_met_and_announced():
    model = PrefixModel(context=12)
    one = session_of(model, max_new_tokens=50)
    prompt = TOKENIZER.encode("It was")
    assert run(one.stream("It was")) == greedy(prompt, 12 - len(prompt) + 1)
    assert one.stopped == "context"
    tokens = one.tokens
    with pytest.raises(ContextFull, match="context limit of 12 tokens is reached: 12 are in use and this turn adds"):
        run(one.stream("x"))
    assert one.tokens == tokens


def test_end_tokens_end_an_answer_unless_they_are_ignored(model):
    prompt = TOKENIZER.encode("It was")
    expected = greedy(prompt, 6)
    ending = Tokenizer(TOKENIZER.backend, end_ids=[expected[2], 299])
    one = session_of(model, tokenizer=ending)
    assert run(one.stream("It was")) == expected[: expected.index(expected[2]) + 1]
    assert one.stopped == "eos"
    assert run(session_of(model, tokenizer=ending, ignore_eos=True).stream("It was")) == expected


def test_a_refused_conversation_changes_nothing(model):
    refusing = ChatTemplate("{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}x", "here")
    one = session_of(model, template=refusing)
    run(one.stream_chat("hello"))
    state = one.tokens, list(one.messages)
    with pytest.raises(UsageError, match="refuses this conversation: too many"):
        run(one.stream_chat("more"))
    assert (one.tokens, one.messages) == state


def test_reset_and_close_free_what_they_should(model):
    one = session_of(model)
    one.system = "Be brief."
    stream = one.stream_chat("hello")
    next(stream)
    one.reset()
    assert (one.tokens, one.messages, one.stopped, model.sequences[0].ids) == ([], [], None, [])
    assert one.system == "Be brief."
    with pytest.raises(UsageError, match="ended by a newer turn"):
        next(stream)
    with one:
        run(one.stream("hello"))
        tokens = one.tokens
    one.close()
    one.reset()
    assert model.sequences[0].closed
    assert tokens
    with pytest.raises(UsageError, match="the session is closed"):
        run(one.stream("hello"))
