"""What kept conversations may give to a request: never another token than it would get alone, but where one goes on."""

import threading
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Whole

from flashllm.api.requests import Request
from flashllm.config import RunConfig
from flashllm.engine.meter import Meter
from flashllm.engine.model import Model
from flashllm.errors import ContextFull
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import Session
from flashllm.generate.tokenizer import Tokenizer
from flashllm.serve.conversations import Conversations, digest, turns_of
from flashllm.serve.worker import Began, Chosen, Ended, Finished, Job, Worker

FEW = 8
VOCAB = 40


class Letters:
    end_ids = frozenset()

    def decode(self, ids):
        return "".join(chr(65 + each) for each in ids)


class Places:
    """A sequence that knows of each token how it was computed."""

    def __init__(self, model):
        self.model, self.places = model, []

    @property
    def prompted(self):
        return next((at for at, (_, kind) in enumerate(self.places) if kind != "d"), len(self.places))

    @property
    def length(self):
        return len(self.places)

    def can_keep(self, length):
        return length

    def keep(self, length):
        assert 0 <= length <= len(self.places)
        del self.places[length:]
        return self.length

    def copy_from(self, other):
        self.places = list(other.places)

    def close(self):
        self.places = []
        self.model.sequences.remove(self)


class PlacesModel:
    """Its logits are a hash of all tokens so far and of how each was computed: densely ("d") or sparsely ("s")."""

    context, vocab_size = 120, VOCAB

    def __init__(self, room=10**6):
        self.meter = Meter()
        self.room, self.sequences = room, []

    def held(self):
        return sum(each.length for each in self.sequences)

    def new_sequence(self):
        self.sequences.append(Places(self))
        return self.sequences[-1]

    def cancel(self, on=True):
        pass

    def is_prompt(self, tokens):
        return tokens > FEW

    def begin(self, entries, **options):
        return Whole(lambda: self.step(entries, **options))

    def step(self, entries, *, as_prompt=False):
        ((sequence, ids),) = entries
        if self.held() + len(ids) > self.room:
            raise ContextFull("no memory")
        kind = "d" if as_prompt or self.is_prompt(len(ids)) else "s"
        sequence.places += [(int(token), kind) for token in ids]
        seed = zlib.crc32(str(sequence.places).encode())
        return np.random.default_rng(seed).standard_normal((1, VOCAB)).astype(np.float32)


def run(worker, prompts, *, kind="completion", messages=(), count=4, logprobs=None):
    """(token ids, reused tokens, log probabilities) of each prompt."""
    events, done = [], threading.Event()

    def deliver(event):
        events.append(event)
        if isinstance(event, Finished):
            done.set()

    options = SamplingOptions(max_new_tokens=count, ignore_eos=True)
    requests = [
        Request(
            custom_id="",
            kind=kind,
            prompt=tuple(messages) or tuple(ids),
            options=options,
            max_new_given=True,
            logprobs=logprobs,
        )
        for ids in prompts
    ]
    worker.submit(Job(prompts=list(zip(requests, prompts, strict=True)), deliver=deliver))
    assert done.wait(20)
    assert events[-1] == Finished()
    found = []
    for index in range(len(prompts)):
        mine = [event for event in events if not isinstance(event, Finished) and event.index == index]
        assert isinstance(mine[-1], Ended)
        tokens = [event.record for event in mine if isinstance(event, Chosen)]
        reused = next(event.record.reused_tokens for event in mine if isinstance(event, Began))
        found.append(([token.token_id for token in tokens], reused, [token.logprobs for token in tokens]))
    return found


def worker_of(model, *, keep=4, tokenizer=None):
    return Worker(model, tokenizer or Letters(), max_waiting=8, keep=keep, on_event=lambda event: None)


def alone(ids, count=4):
    with worker_of(PlacesModel(), keep=0) as worker:
        return run(worker, [ids], count=count)[0][0]


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(
    base=st.lists(prompts, min_size=1, max_size=3),
    cuts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), prompts), min_size=1, max_size=8),
    room=st.sampled_from([10**6, 90]),
)
def test_what_is_reused_changes_no_token(base, cuts, room):
    """Prompts that share beginnings of any length, in any order, with much memory and with little."""
    model = PlacesModel(room)
    with worker_of(model, keep=3) as worker:
        said = []
        for which, length, more in cuts:
            ids = [*base[which % len(base)][:length], *more]
            if any(len(ids) > len(whole) and ids[: len(whole)] == whole for whole in said):
                continue  # by chance the same conversation, going on: another rule
            ((found, _, _),) = run(worker, [ids])
            assert found == alone(ids)
            said.append([*ids, *found])
    assert model.held() == 0


def test_shared_prompts_are_computed_once():
    with worker_of(PlacesModel()) as worker:
        first = list(range(20))
        second, third = [*range(15), 30, 31], [*range(15), 32]
        results = run(worker, [first, second, third, first])
        assert [reused for _, reused, _ in results] == [0, 15, 15, 19]
        assert [found for found, _, _ in results] == [alone(ids) for ids in (first, second, third, first)]


def test_a_conversation_goes_on_as_in_a_chat():
    """With all tokens of the prompt and the answer at the start, those are kept, however they were computed."""
    model = PlacesModel()
    with worker_of(model) as worker:
        first = list(range(20))
        ((answer, _, _),) = run(worker, [first])
        ((found, reused, _),) = run(worker, [[*first, *answer, 7, 8]])
    assert reused == 23  # the answer's last token was not computed
    chat = Session(PlacesModel(), Letters(), SamplingOptions(max_new_tokens=4, ignore_eos=True))
    list(chat.stream_ids(first))
    list(chat.stream_ids([7, 8]))
    assert found == chat.tokens[-4:]


def test_a_chat_goes_on_though_its_answer_is_tokens_of_other_lengths():
    """The messages are the same, so the conversation is; what the tokens share is kept."""
    messages = [{"role": "user", "content": "hello"}]
    with worker_of(PlacesModel()) as worker:
        ((answer, _, _),) = run(worker, [list(range(20))], kind="chat", messages=messages)
        said = Letters().decode(answer)
        longer = [*messages, {"role": "assistant", "content": f" {said}\n"}, {"role": "user", "content": "and"}]
        ids = [*range(20), *answer[:2], 39, 38, 37]
        ((_, reused, _),) = run(worker, [ids], kind="chat", messages=longer)
        assert reused == 22
        other = [*messages, {"role": "assistant", "content": "another answer"}, {"role": "user", "content": "and"}]
        ((found, reused, _),) = run(worker, [ids], kind="chat", messages=other)
        assert (found, reused) == (alone(ids), 20)


def test_what_follows_an_answer_is_not_another_conversations_beginning():
    with worker_of(PlacesModel()) as worker:
        first = list(range(12))
        ((answer, _, _),) = run(worker, [first])
        longer = [*first, *answer, *range(20, 32)]
        run(worker, [longer])
        ids = [*longer[:24], 39]
        ((found, reused, _),) = run(worker, [ids])
    assert reused == 12
    assert found == alone(ids)


def test_no_more_is_kept_than_may_be():
    model = PlacesModel()
    kept = Conversations(lambda: Session(model, Letters()), limit=3, max_tokens=50, is_prompt=model.is_prompt)
    for number in range(5):
        place = kept.take([number] * 20)
        place.session.choose_by(SamplingOptions(max_new_tokens=1))
        list(place.session.stream_prompt([number] * 20, keep=place.keep))
        kept.give_back(place)
        assert model.held() <= 50
    assert len(kept) == 2
    kept.close()
    assert model.held() == 0


def test_an_answer_never_lacks_memory_that_kept_conversations_hold():
    model = PlacesModel(room=64)
    with worker_of(model) as worker:
        for number in range(6):
            run(worker, [[number] * 10], count=40)
    assert model.held() == 0


def test_digests():
    one = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert turns_of(one) == [digest(one[:2])]
    assert digest(one) != digest([{**one[0], "content": "ab"}, {**one[1], "content": ""}, one[2]])
    assert turns_of(one[:1]) == []


def test_digests_of_calls():
    """An answer's arguments are a text, a request's the value that it stands for."""

    def called(arguments, **more):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return digest([{"role": "assistant", "content": "", "tool_calls": [call], **more}])

    assert called('{"a": [1], "b": 2}') == called({"b": 2, "a": [1]}, reasoning_content="so", content=None)
    assert called('{"a": 1}') != called('{"a": 2}')
    assert called('{"a": ') == called('{"a": ') != digest([{"role": "assistant", "content": ""}])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reuse_changes_no_bit_of_the_real_model(tiny, dtype):
    """The log probabilities after a prompt that is partly reused are those after the same prompt alone."""
    path = tiny(dtype).path()
    tokenizer = Tokenizer.load(path)
    random = np.random.default_rng(3)
    start = random.integers(5, 290, 40).tolist()
    asked = [[*start[:cut], *random.integers(5, 290, 9).tolist()] for cut in (40, 39, 33, 17, 40)]
    with Model.open(path, RunConfig(threads=1, io_threads=4)) as model:
        with worker_of(model, tokenizer=tokenizer) as worker:
            run(worker, [start])
            found = run(worker, asked, logprobs=5)
        with worker_of(model, tokenizer=tokenizer, keep=0) as worker:
            expected = run(worker, asked, logprobs=5)
    assert [reused for _, reused, _ in found] == [40, 39, 33, 17, 33]  # the first is forgotten: too many tokens
    assert [(ids, scores) for ids, _, scores in found] == [(ids, scores) for ids, _, scores in expected]
