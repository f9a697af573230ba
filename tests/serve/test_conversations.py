"""What kept conversations may give to a request: never another token than it would get alone, but where one goes on."""

import dataclasses
import zlib

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Whole, answered, running
from talking import Letters

from flashllm.api.prompts import PromptEncoder
from flashllm.api.requests import parse_body
from flashllm.config import RunConfig
from flashllm.engine.meter import Meter
from flashllm.engine.model import Model
from flashllm.errors import ContextFull
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import Session
from flashllm.generate.templates.chat_template import ChatTemplate
from flashllm.generate.tokenizer import Tokenizer
from flashllm.serve.conversations import Conversations, turns_of
from flashllm.serve.worker import Worker

FEW = 8
VOCAB = 40
BYTES = 10**6  # of a token's state


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

    @property
    def nbytes_alone(self):
        others = {id(place) for other in self.model.sequences if other is not self for place in other.places}
        return BYTES * sum(id(place) not in others for place in self.places)

    def mark(self, positions):
        pass

    def copy_from(self, other):
        self.places = list(other.places)

    def close(self):
        self.places = []
        self.model.sequences.remove(self)


class PlacesModel:
    """Its logits are a hash of all tokens so far and of how each was computed: densely ("d") or sparsely ("s")."""

    context, vocab_size = 120, VOCAB
    reads_prompts = False

    def __init__(self, room=10**6):
        self.meter = Meter()
        self.room, self.sequences = room, []

    def held(self):
        return len({id(place) for each in self.sequences for place in each.places})  # shared ones count once

    @property
    def state_nbytes(self):
        return BYTES * self.held()

    def new_sequence(self):
        self.sequences.append(Places(self))
        return self.sequences[-1]

    def cancel(self, on=True):
        pass

    def watch(self, progress):
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


def worker_of(model, *, keep=200 * BYTES, tokenizer=None):
    return Worker(model, tokenizer or Letters(), max_waiting=8, keep=keep, on_event=lambda event: None)


def store(model, tokens):
    return Conversations(lambda: Session(model, Letters()), model, budget=(tokens + 1) * BYTES)


def ended(kept, ids, after=None, **options):
    """A request of one new token; how many tokens of its prompt were there."""
    place = kept.take(ids, **options)
    place.session.choose_by(SamplingOptions(max_new_tokens=1))
    list(place.session.stream_prompt(ids, keep=place.keep))
    kept.give_back(place, after)
    return place.keep


def alone(ids, count=4):
    with worker_of(PlacesModel(), keep=0) as worker:
        return answered(worker, [ids], count=count)[0][0]


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
    with worker_of(model, keep=120 * BYTES) as worker:
        said = []
        for which, length, more in cuts:
            ids = [*base[which % len(base)][:length], *more]
            if any(len(ids) > len(whole) and ids[: len(whole)] == whole for whole in said):
                continue  # by chance the same conversation, going on: another rule
            ((found, _, _),) = answered(worker, [ids])
            assert found == alone(ids)
            said.append([*ids, *found])
    assert model.held() == 0


def test_shared_prompts_are_computed_once():
    with worker_of(PlacesModel()) as worker:
        first = list(range(20))
        second, third = [*range(15), 30, 31], [*range(15), 32]
        results = answered(worker, [first, second, third, first])
        assert [reused for _, reused, _ in results] == [0, 15, 15, 19]
        assert [found for found, _, _ in results] == [alone(ids) for ids in (first, second, third, first)]


def test_a_conversation_goes_on_as_in_a_chat():
    """With all tokens of the prompt and the answer at the start, those are kept, however they were computed."""
    model = PlacesModel()
    with worker_of(model) as worker:
        first = list(range(20))
        ((answer, _, _),) = answered(worker, [first])
        ((found, reused, _),) = answered(worker, [[*first, *answer, 7, 8]])
    assert reused == 23  # the answer's last token was not computed
    chat = Session(PlacesModel(), Letters(), SamplingOptions(max_new_tokens=4, ignore_eos=True))
    list(chat.stream_ids(first))
    list(chat.stream_ids([7, 8]))
    assert found == chat.tokens[-4:]


def test_a_chat_goes_on_though_its_answer_is_tokens_of_other_lengths():
    """The messages are the same, so the conversation is; what the tokens share is kept."""
    messages = [{"role": "user", "content": "hello"}]
    with worker_of(PlacesModel()) as worker:
        ((answer, _, _),) = answered(worker, [list(range(20))], kind="chat", messages=messages)
        said = Letters().decode(answer)
        longer = [*messages, {"role": "assistant", "content": f" {said}\n"}, {"role": "user", "content": "and"}]
        ids = [*range(20), *answer[:2], 39, 38, 37]
        ((_, reused, _),) = answered(worker, [ids], kind="chat", messages=longer)
        assert reused == 22
        other = [*messages, {"role": "assistant", "content": "another answer"}, {"role": "user", "content": "and"}]
        ((found, reused, _),) = answered(worker, [ids], kind="chat", messages=other)
        assert (found, reused) == (alone(ids), 20)


def test_what_follows_an_answer_is_not_another_conversations_beginning():
    with worker_of(PlacesModel()) as worker:
        first = list(range(12))
        ((answer, _, _),) = answered(worker, [first])
        longer = [*first, *answer, *range(20, 32)]
        answered(worker, [longer])
        ids = [*longer[:15], 39]
        ((found, reused, _),) = answered(worker, [ids])
    assert reused == 12
    assert found == alone(ids)


def test_a_turn_may_be_asked_again():
    """With another question after the same answer, or the same one: as if the other had not been."""
    first, again = list(range(12)), []
    with worker_of(PlacesModel()) as worker:
        ((answer, _, _),) = answered(worker, [first])
        for more in (range(20, 32), range(25, 37), range(20, 32)):
            again.append(answered(worker, [[*first, *answer, *more]])[0])
    assert [reused for _, reused, _ in again] == [15, 15, 15]
    assert again[0][0] == again[2][0]
    chat = Session(PlacesModel(), Letters(), SamplingOptions(max_new_tokens=4, ignore_eos=True))
    list(chat.stream_ids(first))
    list(chat.stream_ids(list(range(25, 37))))
    assert chat.tokens[-4:] == again[1][0]


def test_no_more_is_kept_than_may_be():
    model = PlacesModel()
    kept = store(model, 50)
    for number in range(5):
        ended(kept, [number] * 20)
        assert model.held() <= 50
    assert len(kept) == 2
    kept.close()
    assert model.held() == 0


AGENT, SUB_AGENT, TITLE = ([kind] * length for kind, length in ((1, 256), (2, 192), (3, 64)))


def test_agents_do_not_evict_each_others_beginnings():
    """A long conversation, between short ones of sub-agents and titles that nobody goes on with."""
    model = PlacesModel()
    model.context = 1000
    kept = store(model, 256 + 192 + 64 + 300)
    main, reused = list(AGENT), []
    for turn in range(12):
        main += [10 + turn] * 9
        found = [
            ended(kept, main, bytes([turn + 1]), turns=[bytes([turn])], marks=[256]),
            ended(kept, [*SUB_AGENT, *[turn + 20] * 80], b"s" + bytes([turn]), marks=[192]),
        ]
        found += [
            ended(kept, [*TITLE, *[title] * 60], b"t" + bytes([turn, title]), marks=[64]) for title in range(20, 28)
        ]
        reused.append(found)
    assert reused[0][:3] == [0, 0, 0]
    assert [found[:3] for found in reused[1:]] == [[256 + 9 * turn, 192, 64] for turn in range(1, 12)]
    kept.close()
    assert model.held() == 0


def test_what_is_worth_least_goes_first():
    """Ends before the beginnings that they share, and of those the ones that were of less use."""
    model = PlacesModel()
    kept = store(model, 10_000)
    model.context = 1000
    for kind, uses in ((1, 3), (2, 1)):
        for number in range(uses + 1):
            ended(kept, [*[kind] * 130, *[10 + number] * 100], bytes([kind, number]), marks=[130])
    order = []
    while before := list(kept._kept):
        assert kept.make_room()
        (gone,) = [one for one in before if one not in kept._kept]
        order.append((gone.is_beginning, gone.tokens.ids[0]))
    assert not kept.make_room()
    assert [one for one, _ in order] == [False] * 6 + [True] * 2
    assert [kind for _, kind in order[6:]] == [2, 1]
    for kind, length in ((4, 500), (5, 70)):  # a short one is soon computed again
        ended(kept, [kind] * length, bytes([kind]))
    assert kept.make_room()
    assert [one.tokens.ids[0] for one in kept._kept] == [4]


def test_a_request_that_is_answered_lends_its_beginning():
    """To one that comes meanwhile; and its session stays its own."""
    model = PlacesModel()
    kept = store(model, 1000)
    prompts = [*range(70), 80], [*range(70), 90, 91]
    first = kept.take(prompts[0], marks=[70])
    first.session.choose_by(SamplingOptions(max_new_tokens=3))
    stream = first.session.stream_prompt(prompts[0], keep=first.keep)
    next(stream)
    assert kept.take(prompts[1]).keep == 0
    kept.lend(first)
    second = kept.take(prompts[1])
    assert second.session is not first.session
    assert second.keep == 64
    second.session.choose_by(SamplingOptions(max_new_tokens=1))
    list(second.session.stream_prompt(prompts[1], keep=second.keep))
    list(stream)
    for place in (second, first):
        kept.give_back(place)
    assert len(kept) == 3


def test_a_pass_that_fails_leaves_the_store_as_it_was():
    model = PlacesModel()
    kept = store(model, 1000)
    ended(kept, list(range(40)))
    before, model.room = (len(kept), model.held()), 100
    place = kept.take([*range(40), *range(70)])
    place.session.choose_by(SamplingOptions(max_new_tokens=1))
    with pytest.raises(ContextFull):
        list(place.session.stream_prompt([*range(40), *range(70)], keep=place.keep))
    kept.give_back(place)
    assert (len(kept), model.held()) == before
    assert kept.take([*range(40), *range(70)]).keep == 40


def test_an_answer_never_lacks_memory_that_kept_conversations_hold():
    model = PlacesModel(room=64)
    with worker_of(model) as worker:
        for number in range(6):
            answered(worker, [[number] * 10], count=40)
    assert model.held() == 0


def test_digests():
    one = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert turns_of(one) == turns_of(one[:2])
    assert turns_of(one) != turns_of([{**one[0], "content": "ab"}, {**one[1], "content": ""}, one[2]])
    assert turns_of(one[:1]) == []
    assert turns_of([*one, *one]) == [*turns_of(one), turns_of([*one, *one[:2]])[-1]]


def test_digests_read_each_message_once(monkeypatch):
    """And nobody waits for them."""
    read = []

    class Message(dict):
        def get(self, *name):
            read.append(name)
            return super().get(*name)

    turns_of([Message(role=role, content="") for role in ("user", "assistant") * 50])
    assert len(read) == 2 * 100

    def unlocked(messages):
        assert not worker._keeping.locked()
        return turns_of(messages)

    monkeypatch.setattr("flashllm.serve.worker.turns_of", unlocked)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with worker_of(PlacesModel()) as worker:
        answered(worker, [list(range(20))], kind="chat", messages=messages)


def test_digests_of_calls():
    """An answer's arguments are a text, a request's the value that it stands for."""

    def called(arguments, **more):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return turns_of([{"role": "assistant", "content": "", "tool_calls": [call], **more}])

    assert called('{"a": [1], "b": 2}') == called({"b": 2, "a": [1]}, reasoning_content="so", content=None)
    assert called('{"a": 1}') != called('{"a": 2}')
    assert called('{"a": ') == called('{"a": ') != turns_of([{"role": "assistant", "content": ""}])


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
            answered(worker, [start])
            found = answered(worker, asked, logprobs=5)
        with worker_of(model, tokenizer=tokenizer, keep=0) as worker:
            expected = answered(worker, asked, logprobs=5)
    assert [reused for _, reused, _ in found] == [40, 39, 33, 17, 40]
    assert [(ids, scores) for ids, _, scores in found] == [(ids, scores) for ids, _, scores in expected]


QWENS = (  # of the kind that drops reasoning from earlier turns
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>"
    "{% if m.reasoning_content and loop.last %}({{ m.reasoning_content }}){% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_agents_over_http(tools_path):
    """Turns of two agents with system prompts of their own: only what is new is computed."""
    system = {name: f"You are {name}. " + "One day a little dog ran to the big tree. " * 8 for name in ("main", "sub")}
    said = {name: [{"role": "system", "content": text}] for name, text in system.items()}
    path = tools_path
    with (
        Model.open(path, RunConfig(mode="dense", threads=1, io_threads=4)) as model,
        running(model, path, template=QWENS) as (address, worker),
        httpx.Client(base_url=address, timeout=60) as http,
    ):
        cached = {"main": [], "sub": []}
        for turn in range(3):
            for name, messages in said.items():
                # Each time another task for the sub-agent; the main one goes on.
                asked = [*(messages if name == "main" else messages[:1]), {"role": "user", "content": f"Say {turn}"}]
                body = {"messages": asked, "max_tokens": 4, "temperature": 0}
                answer = http.post("/v1/chat/completions", json=body).json()
                assert "usage" in answer, answer
                usage = answer["usage"]
                cached[name].append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
                said[name] = [*asked, {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]
        assert worker.kept >= 2
    for name, turns in cached.items():
        assert turns[0][1] < 20
        assert all(total - known < 40 for total, known in turns[1:]), (name, turns)


def test_where_others_may_go_on(tiny):
    """The marks are where the first and the last question begin, whatever the tokens that stand across them."""
    tokenizer = Tokenizer.load(tiny().path())
    tokenizer.chat_templates, tokenizer.where = {"default": QWENS}, "here"
    with ChatTemplate.of(tokenizer) as template:
        encoder = PromptEncoder(tokenizer=tokenizer, template=template, context=2000, vocab=300)
        roles = ("system", "user", "assistant", "user")
        for texts in (("Be kind. " * 30, "Hello", "Hi", "and now"), ("x", "a" * 90, "b", "a"), ("", "b", "", "b")):
            messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
            request = parse_body({"messages": messages}, "chat", custom_id="", defaults=SamplingOptions())
            ids, marks = encoder.encode(request), []
            steps = encoder.marks(request, ids)
            try:
                while True:
                    next(steps)
            except StopIteration as end:
                marks = end.value
            with pytest.raises(StopIteration, match=r"^\(\)$"):  # nothing is kept for others
                next(dataclasses.replace(encoder, shares=False).marks(request, ids))
            text = template.render(messages)
            ends = [text.index("<user>") + 6, text.rindex("<user>") + 6]
            assert len(marks) == 2
            for mark, end in zip(marks, ends, strict=True):
                before = tokenizer.decode(ids[:mark])
                assert text.startswith(before)
                assert end - 12 <= len(before) <= end
