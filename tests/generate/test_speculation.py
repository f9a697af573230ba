"""Speculation changes when tokens come, never which: on tiny models of several kinds, and on a model of a few lines."""

from array import array
from pathlib import Path

import numpy as np
import pytest
from planned import ids_of
from test_session import TOKENIZER, PrefixModel, greedy, run

import flashllm
from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.errors import BudgetError, ContextFull, UsageError
from flashllm.generate.depth import DepthGate
from flashllm.generate.draft_model import DraftModel, opened_draft
from flashllm.generate.lookup import PromptLookup
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import PrefillRecord, Session, TokenRecord
from flashllm.generate.speculation import Speculation, speculation_of

MOST = 7


class Telling:
    """Drafts the answer it was told, wrong in every `wrong`-th token."""

    priors, prompt_s = (0.5,), 0.0

    def __init__(self, answer, wrong=10**9):
        self.answer, self.wrong, self.drafts = list(answer), wrong, 0

    def look(self, tokens, most):
        said = list(tokens)
        at = next((n for n in range(len(self.answer), 0, -1) if said[-n:] == self.answer[:n]), 0)
        self.rest = [
            token if (at + place) % self.wrong else (token + 1) % 290
            for place, token in enumerate(self.answer[at : at + most], 1)
        ]
        return 0, len(self.rest)

    def draft(self, tokens, count):
        self.drafts += 1
        return self.rest[:count]


class Always:
    """A gate that lets everything through."""

    def __init__(self, most=MOST):
        self.most = most

    def choose(self, kind, available):
        return available

    def passed(self, *_):
        pass

    def judged(self, *_):
        pass


def always(drafter, most=MOST):
    speculation = Speculation(drafter, most)
    speculation.gate = Always(most)
    return speculation


@pytest.fixture
def directory_of(variant_of):
    """The model directory of a variant."""
    return lambda name: variant_of(name)[1]


def answer_of(model, prompt, speculation, **options):
    options = SamplingOptions(**{"max_new_tokens": 30, "ignore_eos": True, **options})
    with Session(model, TOKENIZER, options, speculation=speculation) as session:
        records = list(session.stream_ids(prompt))
        return [each for each in records if isinstance(each, TokenRecord)], session.stopped, session.tokens


def ids_and_text(records):
    return [(record.token_id, record.text) for record in records]


SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "repetition_penalty": 1.1}
RUNS = [  # variant, mode, cache policy, bits of keys and values
    ("opt", "sparse", "window", 4),
    ("llama relu", "sparse", "frequency", None),
    ("opt", "oracle", "frequency", None),
    ("mistral window", "dense", "frequency", 8),
]


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("how", RUNS, ids=str)
def test_tokens_are_the_same(directory_of, how, sampling):
    name, mode, policy, bits = how
    config = RunConfig(mode=mode, cache_policy=policy, io_threads=2, threads=2, cache_bits=bits)
    with Model.open(directory_of(name), config) as model:
        for rows in (None, 9):  # all rows fit; fewer than one token's neurons
            if rows is not None and mode != "dense":
                for ffn in model.parts.ffns:
                    ffn.set_capacity(rows)
            prompt = ids_of(20 if bits is None else 50)  # drafts fill a page
            expected, _, _ = answer_of(model, prompt, None, **sampling)
            ids = [record.token_id for record in expected]
            for wrong in (10**9, 4) if rows is None else (4, 1):
                speculation = always(Telling(ids, wrong), model.most_drafted)
                got, stopped, _ = answer_of(model, prompt, speculation, **sampling)
                assert ids_and_text(got) == ids_and_text(expected)
                assert stopped == "length"
                assert speculation.stats.drafts > 0
                passes = sum(record.pass_tokens > 0 for record in got)
                assert {10**9: 4, 4: 8, 1: 29}[wrong] == passes
            looked, _, _ = answer_of(model, prompt, always(PromptLookup(), model.most_drafted), **sampling)
            assert ids_and_text(looked) == ids_and_text(expected)


def test_the_cache_learns_from_accepted_tokens_alone(directory_of):
    """After the same tokens the window ends at the same one, whatever was drafted beyond it (paper A, section 5.2)."""

    def cached_after(wrong):
        config = RunConfig(mode="sparse", cache_policy="window", window=3, io_threads=1, threads=1)
        with Model.open(directory_of("opt"), config) as model:
            prompt = ids_of(20)
            ids = [record.token_id for record in answer_of(model, prompt, None)[0]]
            with model.new_sequence() as sequence:
                model.step([(sequence, prompt)])
                drafted = [*ids[1:4], *((token + 1) % 290 for token in ids[4:7])] if wrong else ids[1:4]
                if wrong is None:
                    for token in ids[:4]:
                        model.step([(sequence, [token])])
                else:
                    model.step([(sequence, [ids[0], *drafted])], all_logits=True, drafted=len(drafted))
                    model.accept(sequence, 3)
                    sequence.keep(20 + 4)
                model.step([(sequence, ids[4:5])])
            return [set(ffn.cached()) for ffn in model.parts.ffns], model.meter.take()

    alone, _ = cached_after(None)
    right, times = cached_after(False)
    assert right == alone
    assert times.rejected_bytes == 0
    vain, times = cached_after(True)
    assert vain == alone
    assert times.rejected_bytes > 0
    assert times.hits + times.misses == times.active
    assert times.united < times.active


def test_drafted_tokens_belong_to_one_sequence_and_are_few(directory_of):
    with Model.open(directory_of("opt"), RunConfig(io_threads=1)) as model:
        assert model.most_drafted == MOST
        with model.new_sequence() as one, model.new_sequence() as two:
            with pytest.raises(UsageError, match="at most 7"):
                model.step([(one, ids_of(9))], drafted=8)
            with pytest.raises(UsageError, match="alone"):
                model.step([(one, [5, 6]), (two, [7])], drafted=1)
            model.step([(one, [5, 6])], drafted=1)
            model.step([(two, [5, 6, 7])], drafted=2)
            model.accept(one, 1)  # too late
            model.accept(two, 2)
            model.accept(two, 2)  # said already
            assert model.step([(one, [7])]).shape == (1, 300)


class Verifying(PrefixModel):
    """A model of a few lines that verifies drafts."""

    most_drafted = MOST

    def __init__(self, context=200):
        super().__init__(context)
        self.accepted = []

    def step(self, entries, *, all_logits=False, as_prompt=False, drafted=0):
        ((sequence, ids),) = entries
        if not all_logits:
            return super().step(entries)
        before = list(sequence.ids)
        super().step(entries)
        return np.stack([self.logits([*before, *ids[: n + 1]]) for n in range(len(ids))])

    @staticmethod
    def logits(ids):
        model = PrefixModel(10**6)
        sequence = model.new_sequence()
        return model.step([(sequence, list(ids))])[0]

    def accept(self, sequence, count):
        self.accepted.append(count)


def session_of(model, speculation, **options):
    return Session(model, TOKENIZER, SamplingOptions(**{"max_new_tokens": 20, **options}), speculation=speculation)


@pytest.mark.parametrize("room", range(9))
def test_the_context_ends_where_it_does_without(room):
    prompt = ids_of(20)
    expected = greedy(prompt, 20)
    model = Verifying(context=len(prompt) + room)
    with session_of(model, always(Telling(expected))) as session:
        assert run(session.stream_ids(prompt)) == expected[: room + 1]
        assert session.stopped == "context"
        assert session.computed == len(prompt) + room == model.sequences[0].length


@pytest.mark.parametrize("count", range(1, 12))
@pytest.mark.parametrize("wrong", [10**9, 3])
def test_a_stream_may_be_closed_after_any_token(count, wrong):
    """A client that goes away, ctrl-C: the session is as after the last record, and the next turn as without drafts."""
    prompt = ids_of(20)
    expected = greedy(prompt, 20)
    found = []
    for speculation in (None, always(Telling(expected, wrong))):
        model = Verifying()
        with session_of(model, speculation) as session:
            stream = session.stream_ids(prompt)
            got = [next(stream) for _ in range(count + 1)]
            stream.close()
            assert [record.token_id for record in got[1:]] == expected[:count]
            assert session.tokens == [*prompt, *expected[:count]]
            assert model.sequences[0].length == session.computed
            again = list(session.stream_ids([7, 8, 9]))
            assert isinstance(again[0], PrefillRecord)
            found.append((again[0].tokens, again[0].dense, [record.token_id for record in again[1:]]))
    assert found[0] == found[1]


def test_stop_strings_and_ends_are_where_they_were():
    prompt = ids_of(20)
    expected = greedy(prompt, 20)
    text = TOKENIZER.decode(expected)
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    found = []
    for speculation in (None, always(Telling(expected))):
        with session_of(Verifying(), speculation, stop=(stop,)) as session:
            records = [each for each in session.stream_ids(prompt) if isinstance(each, TokenRecord)]
            found.append((ids_and_text(records), session.stopped, session.computed))
    assert found[0] == found[1]
    assert found[0][1] == "stop"


def test_a_turn_that_is_overtaken_leaves_the_new_one_alone():
    prompt = ids_of(20)
    model = Verifying()
    with session_of(model, always(Telling(greedy(prompt, 20)))) as session:
        old = session.stream_ids(prompt)
        for _ in range(4):
            next(old)
        session.reset()
        new = session.stream_ids(prompt)
        first = [next(new) for _ in range(3)]
        old.close()
        rest = [record.token_id for record in (*first[1:], *new)]
    assert rest == greedy(prompt, 20)


def test_where_other_sequences_have_the_memory_no_token_is_drafted():
    class Full(Verifying):
        def step(self, entries, *, all_logits=False, as_prompt=False, drafted=0):
            if drafted:
                raise ContextFull("no page left")
            return super().step(entries)

    prompt = ids_of(20)
    expected = greedy(prompt, 20)
    with session_of(Full(), always(Telling(expected))) as session:
        assert run(session.stream_ids(prompt)) == expected


def test_statistics_tell_places_apart():
    prompt = ids_of(20)
    speculation = always(Telling(greedy(prompt, 20), wrong=4), most=3)
    with session_of(Verifying(), speculation) as session:
        records = list(session.stream_ids(prompt))
    stats = speculation.stats
    assert stats.passes == sum(each.pass_tokens > 0 for each in records[1:])
    right, judged = stats.right_by_place, stats.judged_by_place
    assert judged[0] >= judged[-1] > 0
    assert all(each <= of for each, of in zip(right, judged, strict=True))


def look(ids, most=5):
    lookup, tokens = PromptLookup(), array("q", ids)
    kind, available = lookup.look(tokens, most)
    return kind, lookup.draft(tokens, available)


def test_lookup_continues_the_longest_match_and_of_equals_the_last():
    assert look([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]) == (1, [4, 5, 6, 7, 1])
    assert look([9, 1, 2, 5, 5, 3, 1, 2, 6, 6, 9, 1, 2])[1] == [5, 5, 3, 1, 2]
    assert look([8, 1, 2, 5, 5, 3, 1, 2, 6, 6, 9, 1, 2])[1][:2] == [6, 6]
    assert look([1, 2, 1, 2, 1, 2]) == (2, [1, 2, 1, 2, 1])  # a loop goes on round
    assert look([4, 4, 4]) == (0, [4, 4, 4, 4, 4])
    for nothing in ([], [1], [1, 1], [1, 2, 3], [1, 2, 3, 2]):
        assert look(nothing) == (0, [])


def drive(gate, *, right, slope, tokens, plain_s=1.0, kind=0, available=MOST, seed=0):
    """Time of so many tokens, beside decoding alone: a draft's token is right with probability `right`."""
    random, spent, made = np.random.default_rng(seed), 0.0, 0
    while made < tokens:
        depth = gate.choose(kind, available)
        seconds = plain_s * (1 + slope * depth) * random.uniform(0.98, 1.02)
        gate.passed(1 + depth, seconds)
        accepted = 0
        while accepted < depth and random.random() < right:
            accepted += 1
        if depth:
            gate.judged(kind, accepted, accepted < depth)
        spent, made = spent + seconds, made + accepted + 1
    return spent / (made * plain_s)


@pytest.mark.parametrize(("right", "slope"), [(0.0, 0.1), (0.0, 1.2), (0.2, 0.6), (0.5, 0.6), (0.9, 1.3)])
def test_drafts_that_do_not_pay_cost_little(right, slope):
    for tokens, seeds in ((60, 5), (300, 5), (3000, 1)):
        worst = 1.02 + 2.0 / tokens  # a trial or two, however short the answer is
        for seed in range(seeds):
            assert drive(DepthGate(MOST, (0.5,)), right=right, slope=slope, tokens=tokens, seed=seed) < worst


@pytest.mark.parametrize(
    ("right", "slope", "least"), [(0.9, 0.1, 0.4), (0.8, 0.3, 0.75), (0.98, 0.05, 0.25), (0.6, 0.1, 0.65)]
)
def test_drafts_that_pay_are_made(right, slope, least):
    assert drive(DepthGate(MOST, (0.5,)), right=right, slope=slope, tokens=3000) < least


def test_deep_drafts_are_made_soon_where_all_are_right():
    assert drive(DepthGate(MOST, (0.5,)), right=1.0, slope=0.45, tokens=200) < 0.6


def test_a_gate_learns_that_text_has_changed():
    gate = DepthGate(MOST, (0.5,))
    assert drive(gate, right=0.95, slope=0.1, tokens=500) < 0.5
    assert drive(gate, right=0.0, slope=0.6, tokens=1000) < 1.03
    assert drive(gate, right=0.95, slope=0.1, tokens=2000) < 0.6


def test_off_is_off(directory_of):
    with Model.open(directory_of("opt"), RunConfig(io_threads=1)) as model:
        assert speculation_of(RunConfig(), model) is None
        assert speculation_of(RunConfig(speculate="lookup"), model) is not None


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_model_drafts(directory_of, sampling):
    """The model itself is the best drafter; another one of its vocabulary is a bad one. Neither changes a token."""
    path = directory_of("llama relu")
    config = RunConfig(io_threads=2, threads=1)
    prompt = ids_of(40)
    with Model.open(path, config) as model:
        expected, _, _ = answer_of(model, prompt, None, **sampling)
    for draft_path in (path, directory_of("opt")):
        config = RunConfig(io_threads=2, threads=1, speculate=draft_path)
        with opened_draft(path, config) as draft, Model.open(path, config, process=draft.process_nbytes) as model:
            assert model.plan.memory.process >= draft.process_nbytes
            speculation = always(draft.drafter)
            for _ in range(2):  # the second conversation begins as the first one did
                got, _, _ = answer_of(model, prompt, speculation, **sampling)
                assert ids_and_text(got) == ids_and_text(expected)
            if draft_path == path and not sampling:
                assert speculation.stats.right_by_place == speculation.stats.judged_by_place
                assert sum(record.pass_tokens > 0 for record in got) == 4
            gated = speculation_of(config, model, draft.drafter)
            assert ids_and_text(answer_of(model, prompt, gated, **sampling)[0]) == ids_and_text(expected)


def test_a_draft_model_ends_with_its_context(directory_of):
    path = directory_of("opt")
    with Model.open(path, RunConfig(io_threads=1, context=24)) as small, Model.open(path, RunConfig()) as model:
        drafter = DraftModel(small)
        prompt = ids_of(20)
        expected = answer_of(model, prompt, None)[0]
        speculation = always(drafter)
        assert ids_and_text(answer_of(model, prompt, speculation)[0]) == ids_and_text(expected)
        assert speculation.stats.drafts > 0
        assert drafter.look(array("q", ids_of(24)), 5) == (0, 0)


def test_a_draft_model_of_another_vocabulary_is_refused(directory_of):
    demo = Path(flashllm.__file__).parent / "demo"
    draft = opened_draft(directory_of("opt"), RunConfig(speculate=demo))
    with pytest.raises(UsageError, match="its vocabulary is another"), draft:
        pass


def test_a_draft_model_that_does_not_fit_is_refused(directory_of):
    path = directory_of("opt")
    with Model.open(path, RunConfig()) as model:
        least = model.plan.memory.minimum_nbytes
    draft = opened_draft(path, RunConfig(speculate=path, memory=least + 4096))
    with pytest.raises((UsageError, BudgetError), match=r"does not fit|cannot hold"), draft:
        pass
