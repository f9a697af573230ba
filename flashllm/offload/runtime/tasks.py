"""From a schedule's steps to tasks: what each activity waits for, and which buffer it uses. Pure bookkeeping.

The six activities of algorithm 1 (paper B, section 4.2) run beside each other where their tasks allow it. A task waits
for those that make what it reads, and for the last that used the buffer it writes; every one of them comes earlier in
the schedule, so whoever works the tasks of an activity in order can never wait for ever.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flashllm.offload.planner.schedules import Action, Step

BUFFERS = 2  # of each kind: what is computed with, and what arrives meanwhile


@dataclass(frozen=True, slots=True)
class Task:
    """One step, the tasks that must be done before it (by number), and the buffer of its kind that it fills or uses."""

    number: int
    step: Step
    needs: tuple[int, ...]
    weights: int = 0  # buffer of the layer's weights: of loads and computations
    square: int = 0  # buffer of the square's cache and activations


def tasks(steps: Iterable[Step], *, buffers: int = BUFFERS) -> Iterator[Task]:
    """The tasks of `steps`, in their order, with `buffers` buffers of each kind. Steps of a square follow each other.

    Raises ValueError where a computation's weights are not the last loaded.
    """
    if buffers < 1:
        raise ValueError(f"buffers must be positive, not {buffers!r}")
    loads, ready, loaded = 0, -1, -1  # of weights: how many, the last one's task and its layer
    users: deque[int | None] = deque(maxlen=buffers)  # of the latest loads: the last computation with each
    place, squares = (-1, -1, -1), 0
    arrived: list[int] = []  # loads of the square
    latest: deque[list[int]] = deque(maxlen=buffers + 1)  # of the latest squares, this one last: tasks after the loads
    cache_stored: dict[tuple[int, int], int] = {}  # (batch, layer) -> last store of its cache
    activation_stored: dict[int, int] = {}  # batch -> last store of its activations
    for number, step in enumerate(steps):
        needs: list[int | None]
        if step.action is Action.LOAD_WEIGHTS:
            needs = [users[0]] if len(users) == buffers else []
            users.append(None)
            loads, ready, loaded = loads + 1, number, step.layer
            yield Task(number, step, _known(needs), weights=(loads - 1) % buffers)
            continue
        if (step.batch, step.token, step.layer) != place:
            place, squares, arrived = (step.batch, step.token, step.layer), squares + 1, []
            latest.append([])
        mine, before = latest[-1], latest[0] if len(latest) > buffers else []  # the square that had the buffer
        match step.action:
            case Action.LOAD_CACHE:
                needs = [cache_stored.get((step.batch, step.layer)), *before]
                arrived.append(number)
            case Action.LOAD_ACTIVATION:
                needs = [activation_stored.get(step.batch), *before]
                arrived.append(number)
            case Action.COMPUTE:
                if loaded != step.layer:
                    raise ValueError(f"{step}: the weights loaded last are of layer {loaded}")
                # A prompt has no cache to load, but its cache goes into the square's buffer all the same.
                needs = [ready, *arrived, *before, cache_stored.get((step.batch, step.layer))]
                users[-1] = number
                mine.append(number)
            case Action.STORE_CACHE | Action.STORE_ACTIVATION:
                needs = [mine[0]]
                mine.append(number)
                if step.action is Action.STORE_CACHE:
                    cache_stored[step.batch, step.layer] = number
                else:
                    activation_stored[step.batch] = number
        yield Task(number, step, _known(needs), weights=(loads - 1) % buffers, square=(squares - 1) % buffers)


def _known(needs: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(sorted({need for need in needs if need is not None}))
