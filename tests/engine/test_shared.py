"""Prompts of several members in one pass: what is read, whose bits, who comes, who leaves, and what fails."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from planned import Watched, ids_of, planned

from flashllm.config import RunConfig
from flashllm.engine import shared as shared_module
from flashllm.engine.shared import SharedModel
from flashllm.errors import Cancelled, ContextFull

PROMPTS = [ids_of(60), ids_of(70, seed=1), ids_of(90, seed=2)]
LONG = 60  # seconds that nothing here takes


def small(directory, **config):
    """The model with the least neuron caches, and prompts in parts of 16 tokens."""
    config = RunConfig(threads=1, io_threads=4, **config)
    with planned(directory, config) as model:
        memory = model.plan.memory
    levels = np.array([memory.min_cache_rows], np.int32)
    return planned(directory, config, prompt_tokens=16, levels=levels, level_pages=memory.max_pages)


@pytest.fixture
def model(variant_of):
    with small(variant_of("llama relu")[1]) as model:
        yield model


def alone(model, ids):
    """Logits after a prompt, and what it read."""
    model.meter.take()
    with model.new_sequence() as sequence:
        logits = model.step([(sequence, ids)], as_prompt=True)[0]
    return logits, model.meter.take().bytes_read


class Members:
    """Threads that share a model: in the test's hands is when they ask, and what happens before a slice."""

    def __init__(self, model, monkeypatch, *, together=1, make_room=lambda: False):
        """Nobody has a turn before `together` prompts wait."""
        self.shared = SharedModel(model, make_room)
        self.cancelled = [threading.Event() for _ in PROMPTS]
        self.begun = []  # tokens of each pass' prompts
        self.before = lambda number, slices: None
        turns, waited = self.shared._turns, []
        going_on, begins = turns.next, model.begin

        def next_turn(*, patient):
            if len(turns._prompts) >= together:
                waited.append(None)
            return going_on(patient=patient) if waited else None

        def begin(entries, **options):
            work, number = begins(entries, **options), len(self.begun)
            self.begun.append([len(ids) for _, ids in entries])
            return Watched(work, lambda slices: self.before(number, slices))

        monkeypatch.setattr(turns, "next", next_turn)
        monkeypatch.setattr(model, "begin", begin)
        monkeypatch.setattr(shared_module, "SLICE_S", 0)  # a slice is a step

    def wait(self, count):
        """Until so many prompts wait."""
        changed = self.shared._changed
        with changed:
            assert changed.wait_for(lambda: len(self.shared._turns._prompts) >= count, LONG)

    def cancel(self, number):
        self.cancelled[number].set()
        self.shared.wake()

    def ask(self, number, ids=None):
        """Logits after the prompt, or its error; bytes of its part of the passes."""
        with self.shared.new_sequence() as sequence, self.shared.member(self.cancelled[number]):
            ids = PROMPTS[number] if ids is None else ids
            try:
                found = self.shared.step([(sequence, ids)], as_prompt=True)[0]
            except Exception as error:
                found = error
            assert not sequence.in_pass
            assert sequence.length == (0 if isinstance(found, Exception) else len(ids))
            return found, self.shared.meter.take().bytes_read

    def ask_all(self, count):
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(self.ask, range(count)))


@pytest.mark.parametrize("name", ["llama relu", "olmoe", "mistral window", "deepseek_v2", "qwen3_next"])
def test_prompts_that_wait_together_are_read_for_once(variant_of, monkeypatch, name):
    with small(variant_of(name)[1]) as model:
        expected = [alone(model, ids) for ids in PROMPTS]
        members = Members(model, monkeypatch, together=3)
        found = members.ask_all(3)
        assert [sorted(each) for each in members.begun] == [[60, 70, 90]]
        for (logits, _), (same, _) in zip(found, expected, strict=True):
            assert np.array_equal(logits, same)
        read, apart = (sum(nbytes for _, nbytes in each) for each in (found, expected))
        whole = sum(layout.num_rows * layout.stride for layout in model.manifest.layouts)
        assert 0 < read <= whole
        assert apart > 2 * read
        if name == "llama relu":
            assert read == whole


@pytest.mark.parametrize(("slices", "begun"), [(0, [[60], [60, 70]]), (1, [[60], [60, 70]]), (2, [[60], [70]])])
def test_who_comes_in_the_first_slices_of_a_pass_shares_it(model, monkeypatch, slices, begun):
    """What it has done then is done again."""
    expected = [alone(model, ids)[0] for ids in PROMPTS[:2]]
    members, comes = Members(model, monkeypatch), threading.Event()

    def before(number, slice_):
        if (number, slice_) == (0, slices):
            comes.set()
            members.wait(2)

    members.before = before
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(members.ask, 0)
        assert comes.wait(LONG)
        second = pool.submit(members.ask, 1)
        found = [first.result()[0], second.result()[0]]
    assert members.begun == begun
    assert np.array_equal(found, expected)


def test_a_pass_that_began_again_does_so_once(model, monkeypatch):
    members, comes = Members(model, monkeypatch), [threading.Event(), threading.Event()]

    def before(number, slice_):
        if number < 2 and slice_ == 0:
            comes[number].set()
            members.wait(number + 2)

    members.before = before
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(members.ask, 0)]
        for number, event in enumerate(comes):
            assert event.wait(LONG)
            asked.append(pool.submit(members.ask, number + 1))
        for each in asked:
            each.result()
    assert members.begun == [[60], [60, 70], [90]]


def test_who_is_cancelled_leaves_the_others_as_they_are(model, monkeypatch):
    """In the first slices its tokens leave the pass, later it waits for the pass' end."""
    expected = [alone(model, ids)[0] for ids in PROMPTS]
    members = Members(model, monkeypatch, together=3)

    def before(number, slices):
        if (number, slices) == (0, 0):
            members.cancel(2)
        if (number, slices) == (1, 5):
            members.cancel(1)

    members.before = before
    found = [each for each, _ in members.ask_all(3)]
    assert [sorted(each) for each in members.begun] == [[60, 70, 90], [60, 70]]
    assert np.array_equal(found[0], expected[0])
    assert np.array_equal(found[1], expected[1])
    assert isinstance(found[2], Cancelled)


def test_a_pass_that_nobody_wants_ends(model, monkeypatch):
    held = model.state_nbytes
    members = Members(model, monkeypatch, together=2)
    done = []

    def before(number, slices):
        done.append(slices)
        if slices == 5:
            members.cancel(0)
            members.cancel(1)

    members.before = before
    found = [each for each, _ in members.ask_all(2)]
    assert [type(each) for each in found] == [Cancelled, Cancelled]
    assert [sorted(each) for each in members.begun] == [[60, 70]]
    assert max(done) == 5
    assert model.state_nbytes == held


def test_a_pass_that_fails_is_computed_again_for_each(model, monkeypatch):
    expected = [alone(model, ids)[0] for ids in PROMPTS[:2]]
    members = Members(model, monkeypatch, together=2)

    def before(number, slices):
        if (number, slices) == (0, 3):
            raise MemoryError

    members.before = before
    found = [each for each, _ in members.ask_all(2)]
    assert sorted(map(sorted, members.begun)) == [[60], [60, 70], [70]]
    assert np.array_equal(found, expected)


def test_as_many_share_a_pass_as_there_is_room_for(model, monkeypatch):
    """What is kept makes room first; whoever has none is apart, and what is wrong with a prompt is its own."""
    expected = [alone(model, ids)[0] for ids in PROMPTS]
    begins, asked, room = model.begin, [], [True, False]

    def begin(entries, **options):
        asked.append(len(entries))
        if len(entries) > 2:
            raise ContextFull("no memory")
        return begins(entries, **options)

    monkeypatch.setattr(model, "begin", begin)
    members = Members(model, monkeypatch, together=3, make_room=lambda: room.pop(0))
    found = [each for each, _ in members.ask_all(3)]
    assert asked == [3, 3, 2, 1]
    assert sorted(len(each) for each in members.begun) == [1, 2]
    assert np.array_equal(found, expected)


def test_a_wrong_prompt_fails_alone(model, monkeypatch):
    expected = alone(model, PROMPTS[0])[0]
    members = Members(model, monkeypatch, together=2)
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(members.ask, 0)
        bad = pool.submit(members.ask, 1, [10**6] * 50)
        assert "vocabulary" in str(bad.result()[0])
        assert np.array_equal(good.result()[0], expected)
    assert members.begun == [[60]]


def test_a_short_prompt_does_not_wait_for_a_long_one(model, monkeypatch):
    members = Members(model, monkeypatch, together=2)
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(members.ask, 0, ids_of(count)) for count in (100, 49)]:
            each.result()
    assert sorted(members.begun) == [[49], [100]]


def test_where_nothing_is_read_nothing_is_shared(variant_of, monkeypatch):
    with planned(variant_of("llama")[1], RunConfig(mode="dense", threads=1)) as model:
        members = Members(model, monkeypatch, together=2)
        members.ask_all(2)
        assert sorted(members.begun) == [[60], [70]]
