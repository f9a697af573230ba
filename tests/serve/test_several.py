"""Several requests at once: each has the answer that it would have alone, whoever comes, fails or leaves beside it."""

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
from planned import Watched, ids_of
from serving import running

from flashllm.config import MOST_TOGETHER, RunConfig
from flashllm.engine import shared as shared_module
from flashllm.engine.model import Model
from flashllm.engine.shared import SharedModel, ShareMeter
from flashllm.errors import BudgetError, ContextFull
from flashllm.generate.lookup import PromptLookup
from flashllm.generate.speculation import Speculation
from flashllm.parked.folder import ParkingFolder

BODIES = [
    {"prompt": "One day", "max_tokens": 20, "temperature": 0, "logprobs": 2},
    {"prompt": "A long prompt of many words, which is more than a few tokens. ", "max_tokens": 9, "seed": 3},
    {"prompt": "Two", "max_tokens": 24, "temperature": 1.2, "seed": 11},
    {"prompt": ["Three", "Four of them"], "max_tokens": 8, "temperature": 0.7, "seed": 5},
    {"prompt": "Five", "max_tokens": 20, "temperature": 0, "response_format": {"type": "regex", "regex": "[a-z ]{12}"}},
    {"prompt": "Six", "max_tokens": 30, "temperature": 0, "stop": ["e"]},
]


@pytest.fixture(scope="module")
def model(tiny):
    with Model.open(tiny().path(), RunConfig(threads=1, io_threads=4, memory=None)) as model:
        yield model


@contextmanager
def served(model, path, **options):
    """(client, worker)"""
    with running(model, path, **options) as (address, worker), httpx.Client(base_url=address, timeout=60) as http:
        yield http, worker


def answer(http, body):
    response = http.post("/v1/completions", json={"ignore_eos": True, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def test_answers_are_those_alone(tiny, model, monkeypatch):
    with served(model, tiny().path()) as (http, _):
        alone = [answer(http, body) for body in BODIES]
    steps, shared = model.step, []

    def counted(entries, **options):
        shared.append(len(entries))
        return steps(entries, **options)

    def leaving(http):
        with http.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 60, "stream": True}) as it:
            next(it.iter_lines())

    monkeypatch.setattr(model, "step", counted)
    with served(model, tiny().path(), parallel=4, keep=0) as (http, worker), ThreadPoolExecutor(12) as pool:
        gone = pool.submit(leaving, http)
        found = list(pool.map(lambda body: answer(http, body), BODIES * 3))
        gone.result()
        assert worker.alive
    assert found == alone * 3
    assert max(shared) > 1


def test_prompts_that_come_together_are_read_for_once(tiny, model, monkeypatch):
    """And nobody is harmed by a client that leaves while its prompt is computed with the others'."""
    bodies = [{"prompt": ids_of(count), "max_tokens": 1, "temperature": 0, "logprobs": 3} for count in (40, 50, 60)]
    with served(model, tiny().path(), keep=0) as (client, _):
        alone = [answer(client, body) for body in bodies]
    nbytes, begun, begins = [], [], model.begin
    come, leave, gone = threading.Event(), threading.Event(), threading.Event()

    def before(slices):
        if slices == 5:
            leave.set()
            assert gone.wait(60)

    def begin(entries, **options):
        begun.append(sorted(len(ids) for _, ids in entries))
        return Watched(begins(entries, **options), before)

    def leaving(host):
        connection = http.client.HTTPConnection(host)
        connection.request("POST", "/v1/completions", json.dumps(bodies[2]), {"Content-Type": "application/json"})
        assert leave.wait(60)
        connection.close()

    monkeypatch.setattr(ShareMeter, "add", lambda self, times, part, of: nbytes.append(times.bytes_read * (part == 0)))
    monkeypatch.setattr(shared_module, "SLICE_S", 0)
    monkeypatch.setattr(model, "begin", begin)
    with served(model, tiny().path(), parallel=3, keep=0) as (client, worker), ThreadPoolExecutor(3) as pool:
        turns, cancel = worker._shared._turns, worker.cancel
        going_on = turns.next

        def next_turn(*, patient):
            if len(turns._prompts) == 3:
                come.set()
            return going_on(patient=patient) if come.is_set() else None

        monkeypatch.setattr(turns, "next", next_turn)
        monkeypatch.setattr(worker, "cancel", lambda job: (cancel(job), gone.set()))
        left = pool.submit(leaving, client.base_url.netloc.decode())
        assert list(pool.map(lambda body: answer(client, body), bodies[:2])) == alone[:2]
        left.result()
    assert begun == [[40, 50, 60]]
    assert sum(nbytes) == model.manifest.rows.layer_nbytes * model.manifest.architecture.num_layers


def test_by_default_as_many_requests_begin_as_the_plan_has_room_for(tiny, model):
    with running(model, tiny().path(), parallel=None) as (_, worker):
        assert worker._together == model.plan.memory.shared_tokens
        assert len(worker._threads) == MOST_TOGETHER
    with running(model, tiny().path(), parallel=2) as (_, worker):
        assert worker._together is None
        assert len(worker._threads) == 2


@pytest.mark.parametrize(("together", "most"), [(30, 1), (60, 2), (None, 4)])
def test_requests_begin_as_far_as_they_have_room(tiny, model, monkeypatch, together, most):
    body = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 20, "temperature": 0}
    long = {**body, "max_tokens": 60}  # more than there is room for, so that it is alone
    shared = []
    with served(model, tiny().path(), parallel=4) as (http, worker), ThreadPoolExecutor(9) as pool:
        monkeypatch.setattr(worker, "_together", together)
        answering = worker._answer
        monkeypatch.setattr(worker, "_answer", lambda job: (shared.append(len(worker._running)), answering(job)))
        found = list(pool.map(lambda body: answer(http, body), [body] * 6 + [long] + [body] * 2))
    assert [len(each) for each in found] == [1] * 9
    assert max(shared) == most


@pytest.mark.parametrize("drafts", [False, True])
def test_answers_beside_others_with_drafts_and_parking(tiny, model, tmp_path, monkeypatch, drafts):
    """What leaves memory is parked and taken up while others are answered; a draft is made only for who is alone."""
    begin = "One day the little dog ran to the big tree, and there was nobody. "
    bodies = [
        {"prompt": begin + each, "max_tokens": 24, "temperature": 0}
        for each in ("She", "He and she and he and she", "It", "They and they and they and")
    ]
    with served(model, tiny().path(), keep=0) as (http, _):
        alone = [answer(http, body) for body in bodies]
    speculation = Speculation(PromptLookup(), model.most_drafted) if drafts else None
    steps, drafted, parked = model.step, [], ParkingFolder(tmp_path, "tiny", max_nbytes=10**8, daily_nbytes=10**8)

    def step(entries, **options):
        drafted.append(options.get("drafted", 0))
        return steps(entries, **options)

    monkeypatch.setattr(model, "step", step)
    monkeypatch.setattr("flashllm.generate.depth.DepthGate.choose", lambda self, kind, available: available)
    options = {"keep": 1, "speculation": speculation, "parking": parked}
    with served(model, tiny().path(), parallel=3, **options) as (http, _), ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            assert list(pool.map(lambda body: answer(http, body), bodies)) == alone
        assert answer(http, bodies[1]) == alone[1]  # alone
    assert parked.entries
    assert any(drafted) == drafts


def test_a_failure_is_its_own(tiny, model, monkeypatch):
    """A pass that fails for one of several is computed again for each."""
    steps = model.step

    def failing(entries, **options):
        if any(list(ids) == [7] for _, ids in entries) or len(entries) > 1:
            raise MemoryError
        return steps(entries, **options)

    def status(prompt):
        body = {"prompt": prompt, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
        return http.post("/v1/completions", json=body).status_code

    monkeypatch.setattr(model, "step", failing)
    with served(model, tiny().path(), parallel=3) as (http, _), ThreadPoolExecutor(3) as pool:
        assert list(pool.map(status, ([5, 6], [7], [5, 9]))) == [200, 500, 200]


@pytest.mark.parametrize("error", [ContextFull, BudgetError])  # there is no more memory, or less than there was
def test_what_is_kept_makes_room(model, error, monkeypatch):
    room, least = [], 2
    steps = model.step

    def step(entries, **options):
        if len(room) < least:
            raise error("no memory")
        return steps(entries, **options)

    def make_room():
        room.append(None)
        return len(room) <= least

    shared = SharedModel(model, make_room)
    monkeypatch.setattr(model, "step", step)
    with model.new_sequence() as sequence, shared.member(threading.Event()):
        assert len(shared.step([(sequence, [5])])) == 1
        assert len(room) == least
        room.clear()
        least = 9
        monkeypatch.setattr(shared, "_make_room", lambda: False)
        with pytest.raises(error, match="no memory"):
            shared.step([(sequence, [6])])


def test_a_form_takes_memory_of_what_is_kept(tiny, model, monkeypatch):
    """Its tables are made for the first one; it is refused where nothing is left to go."""
    asked, is_full = [], False

    def keep_to(nbytes):
        asked.append(nbytes)
        if worker.kept or is_full:
            raise BudgetError("no memory")

    monkeypatch.setattr(model, "keep_to", keep_to)
    with served(model, tiny().path()) as (http, worker):
        answer(http, BODIES[1])
        assert worker.kept
        is_full = True
        response = http.post("/v1/completions", json=BODIES[4])
        assert (response.status_code, "no memory" in response.text, worker.kept) == (400, True, 0)
        answer(http, BODIES[1])
        is_full = False
        answer(http, BODIES[4])
    assert len(asked) >= 4
    assert len(set(asked)) == 1


def test_nobody_takes_its_logits_before_the_pass_is_over(model, monkeypatch):
    """A member that wakes while others are still given theirs waits: the pass has its entries until it ends."""
    shared, passes, steps = SharedModel(model, lambda: False), [], model.step

    class Rows:
        """A pass's logits, which are given out slowly, to members that are woken by then."""

        def __init__(self, rows):
            self.rows = rows

        def __getitem__(self, which):
            if which.start is None:
                with shared._changed:
                    shared._changed.notify_all()
                time.sleep(0.01)
                return self.rows[which]
            return Rows(self.rows[which])

    def step(entries, **options):
        until = time.monotonic() + 20
        while not passes and len(shared._turns._few) < 3 and time.monotonic() < until:
            time.sleep(0.001)  # so that the next pass is of several
        passes.append(len(entries))
        assert entries
        rows = steps(entries, **options)
        return rows if len(entries) == 1 else Rows(rows)

    monkeypatch.setattr(model, "step", step)

    def compute(number):
        with model.new_sequence() as sequence, shared.member(threading.Event()):
            logits = []
            for token in range(4 + number, 12 + number):
                logits += [shared.step([(sequence, [token])])]
                turn = shared._turn
                assert turn is None or shared._here.member not in turn.members
            return logits

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(compute, range(3)))
    assert max(passes) > 1
    assert sum(passes) == 24
    for number, logits in enumerate(found):
        with model.new_sequence() as sequence:
            for token, each in zip(range(4 + number, 12 + number), logits, strict=True):
                np.testing.assert_array_equal(each, steps([(sequence, [token])]))


def test_each_hears_how_far_its_own_prompt_is(model):
    shared, heard = SharedModel(model, lambda: False), {}

    def compute(number):
        with model.new_sequence() as sequence, shared.member(threading.Event()):
            shared.watch(lambda done, total: heard.setdefault(number, []).append((done, total)))
            shared.step([(sequence, [5 + number] * 60)])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compute, range(2)))
    layers = model.manifest.architecture.num_layers
    for told in heard.values():
        assert told == sorted(told)
        assert {total % layers for _, total in told} == {0}
    assert set(heard) == {0, 1}


@pytest.mark.parametrize("variant", ["qwen3_next", "glm4_moe_lite"])
def test_beginnings_of_models_with_a_state_or_latent_keys(variant_of, variant):
    """Prompts that begin alike go on from a page's end, with the logits that they have alone."""
    _, path = variant_of(variant)
    begin = [4 + number % 250 for number in range(100)]
    bodies = [
        {"prompt": ids, "max_tokens": 6, "temperature": 0, "logprobs": 3}
        for ids in (begin, [*begin, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [*begin[:70], *[30] * 30], begin)
    ]
    with Model.open(path, RunConfig(threads=1, io_threads=4)) as model:
        with served(model, path, keep=0) as (http, _):
            alone = [answer(http, body) for body in bodies[:3]]
        reused = []
        with served(model, path) as (http, _):
            for body, expected in zip(bodies, [*alone, alone[0]], strict=True):
                response = http.post("/v1/completions", json={"ignore_eos": True, **body}).json()
                reused.append(response["usage"]["prompt_tokens_details"]["cached_tokens"])
                assert response["choices"] == expected
    assert reused[0] == 0
    assert all(count >= 64 for count in reused[1:])
