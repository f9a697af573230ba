"""Tasks: what they wait for, against a plain model of who may touch what; and the executor under random delays."""

import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashllm.errors import FlashError
from flashllm.offload.planner.schedules import Action, Step, schedule
from flashllm.offload.runtime.executor import Executor, Stopped
from flashllm.offload.runtime.tasks import Task, tasks

BUFFERS = st.integers(1, 3)


def steps_of(batches, tokens, layers, group):
    return list(schedule(batches=batches, tokens=tokens, layers=layers, group=group))


def schedules():
    return st.builds(steps_of, *[st.integers(1, 4)] * 4)


class Machine:
    """A plain model of the tiers: buffers and stores hold what was last put there, and every reader checks."""

    def __init__(self, steps, buffers):
        self.steps, self.buffers = steps, buffers
        self.weights = [None] * buffers  # the layer in each buffer
        self.cache_in, self.activation_in = [None] * buffers, [None] * buffers
        self.out = [None] * buffers  # the square computed in each buffer, until both of its stores are done
        self.cache = {}  # (batch, layer) -> tokens stored
        self.activation = {}  # batch -> (token, layer) stored last
        self.computed = []
        self.lock = threading.Lock()

    def work(self, task: Task):
        step, buffer = task.step, task.square
        square = (step.batch, step.token, step.layer)
        with self.lock:
            match step.action:
                case Action.LOAD_WEIGHTS:
                    self.weights[task.weights] = step.layer
                case Action.LOAD_CACHE:
                    assert self.cache.get((step.batch, step.layer)) == step.token, "a cache not yet stored"
                    self.cache_in[buffer] = square
                case Action.LOAD_ACTIVATION:
                    before = self.activation.get(step.batch)
                    first = step.token == 0 and step.layer == 0
                    expected = (step.token, step.layer - 1) if step.layer else (step.token - 1, self.last_layer())
                    assert first or before == expected, "activations not yet stored"
                    self.activation_in[buffer] = square
                case Action.COMPUTE:
                    assert self.weights[task.weights] == step.layer, "another layer's weights"
                    assert self.activation_in[buffer] == square, "another square's activations"
                    assert step.token == 0 or self.cache_in[buffer] == square, "another square's cache"
                    assert self.out[buffer] is None, "a buffer whose results are not yet stored"
                    self.out[buffer] = [square, 2]
                    self.computed.append(square)
                case Action.STORE_CACHE | Action.STORE_ACTIVATION:
                    assert self.out[buffer][0] == square, "a result that is not there"
                    self.out[buffer][1] -= 1
                    if self.out[buffer][1] == 0:
                        self.out[buffer] = None
                    if step.action is Action.STORE_CACHE:
                        self.cache[step.batch, step.layer] = step.token + 1
                    else:
                        self.activation[step.batch] = (step.token, step.layer)

    def last_layer(self):
        return max(step.layer for step in self.steps)


@given(schedules(), BUFFERS, st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_any_order_that_keeps_the_needs_is_right(steps, buffers, rng):
    """Tasks are worked in a random order that only `needs` and the order within an activity restrict."""
    machine = Machine(steps, buffers)
    left = {action: [] for action in Action}
    for task in tasks(steps, buffers=buffers):
        left[task.step.action].append(task)
    done = set()
    while any(left.values()):
        ready = [queue for queue in left.values() if queue and set(queue[0].needs) <= done]
        task = rng.choice(ready).pop(0)
        machine.work(task)
        done.add(task.number)
    squares = [(step.batch, step.token, step.layer) for step in steps if step.action is Action.COMPUTE]
    assert machine.computed == squares


@given(schedules(), BUFFERS)
@settings(max_examples=60, deadline=None)
def test_needs_come_earlier(steps, buffers):
    for number, task in enumerate(tasks(steps, buffers=buffers)):
        assert task.number == number
        assert all(need < number for need in task.needs)


def test_without_its_needs_an_order_is_wrong():
    """The model above notices: dropping the needs of computations lets some order fail."""
    steps = steps_of(2, 2, 2, 2)
    machine = Machine(steps, 2)
    computations = [task for task in tasks(steps) if task.step.action is Action.COMPUTE]
    with pytest.raises(AssertionError):
        machine.work(computations[0])


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_executor_keeps_order_under_random_delays(overlap, seed):
    steps = steps_of(3, 3, 3, 2)
    machine, rng = Machine(steps, 2), random.Random(seed)

    def work(task):
        time.sleep(rng.choice((0, 0, 0, 0.001, 0.003)))
        machine.work(task)

    with Executor(work, overlap=overlap) as executor:
        executor.run(tasks(steps))
        assert sum(executor.busy_s.values()) > 0
    assert len(machine.computed) == 3 * 3 * 3


def test_executor_overlaps():
    """A load of weights runs while another task computes."""
    steps = steps_of(1, 1, 3, 1)
    loading = threading.Event()

    def work(task):
        if task.step == Step(Action.LOAD_WEIGHTS, 0, 0, 1):
            loading.set()
        if task.step == Step(Action.COMPUTE, 0, 0, 0):
            assert loading.wait(10), "the next layer's weights did not arrive during the computation"

    with Executor(work) as executor:
        executor.run(tasks(steps))


@pytest.mark.parametrize("overlap", [True, False])
def test_the_first_error_ends_the_run(overlap):
    steps = steps_of(2, 2, 2, 2)
    done = []

    def work(task):
        if task.step.action is Action.COMPUTE and task.step.token == 1:
            raise FlashError("the disk is gone")
        done.append(task.step)

    with Executor(work, overlap=overlap) as executor, pytest.raises(FlashError, match="the disk is gone"):
        executor.run(tasks(steps))
    assert Step(Action.COMPUTE, 0, 1, 1) not in done


@pytest.mark.parametrize("overlap", [True, False])
def test_stop_ends_the_run(overlap):
    steps = schedule(batches=1, tokens=10_000, layers=2, group=1)
    executor = Executor(lambda task: executor.stop() if task.step.token == 3 else None, overlap=overlap)
    with executor, pytest.raises(Stopped):
        executor.run(tasks(steps))


def test_wrong_weights_are_refused():
    with pytest.raises(ValueError, match="the weights loaded last are of layer 0"):
        list(tasks([Step(Action.LOAD_WEIGHTS, 0, 0, 0), Step(Action.COMPUTE, 0, 0, 1)]))
