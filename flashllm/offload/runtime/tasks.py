"""From a schedule's steps to tasks: what each activity waits for, and which buffer it uses. Pure bookkeeping.

The six activities of algorithm 1 (paper B, section 4.2) run beside each other where their tasks allow it. A task waits
for those that make what it reads, and for the last that used the buffer it writes; every one of them comes earlier in
the schedule, so whoever works the tasks of an activity in order can never wait for ever.
"""

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


class _Dependencies:
    """The last task of each thing, while the schedule is walked."""

    def __init__(self) -> None:
        self.weight_loads = 0
        self.squares = 0
        self.weights_ready: int | None = None  # the last load of weights
        self.weights_of: int | None = None  # its layer
        self.weight_users: list[int | None] = []  # load -> the last computation that used it
        self.square_tasks: dict[int, list[int]] = {}  # square -> its tasks after the loads
        self.number_of: dict[tuple[int, int, int], int] = {}  # (batch, token, layer) -> square, while it is open
        self.cache_stored: dict[tuple[int, int], int] = {}  # (batch, layer) -> last store of its cache
        self.activation_stored: dict[int, int] = {}  # batch -> last store of its activations
        self.loaded: dict[int, list[int]] = {}  # square -> its loads

    def square_of(self, step: Step) -> int:
        key = (step.batch, step.token, step.layer)
        if key not in self.number_of:
            self.number_of[key] = self.squares
            self.squares += 1
        return self.number_of[key]


def tasks(steps: Iterable[Step], *, buffers: int = BUFFERS) -> Iterator[Task]:
    """The tasks of `steps`, in their order, with `buffers` buffers of each kind.

    Raises ValueError where a computation's weights are not the last loaded.
    """
    if buffers < 1:
        raise ValueError(f"buffers must be positive, not {buffers!r}")
    state = _Dependencies()
    for number, step in enumerate(steps):
        if step.action is Action.LOAD_WEIGHTS:
            needs = []
            state.weight_users.append(None)
            if state.weight_loads >= buffers:
                user = state.weight_users[state.weight_loads - buffers]
                needs = [] if user is None else [user]
                state.weight_users[state.weight_loads - buffers] = None
            state.weights_ready, state.weights_of = number, step.layer
            yield Task(number, step, tuple(needs), weights=state.weight_loads % buffers)
            state.weight_loads += 1
            continue
        yield _square_task(state, number, step, buffers)


def _square_task(state: _Dependencies, number: int, step: Step, buffers: int) -> Task:
    square = state.square_of(step)
    weights = (state.weight_loads - 1) % buffers
    needs: list[int | None] = []
    match step.action:
        case Action.LOAD_CACHE | Action.LOAD_ACTIVATION:
            # What was stored last, and the buffer: free when all of the square before in it is done.
            if step.action is Action.LOAD_CACHE:
                needs = [state.cache_stored.get((step.batch, step.layer))]
            else:
                needs = [state.activation_stored.get(step.batch)]
            needs += state.square_tasks.get(square - buffers, [])
            state.loaded.setdefault(square, []).append(number)
        case Action.COMPUTE:
            if state.weights_of != step.layer:
                raise ValueError(f"{step}: the weights loaded last are of layer {state.weights_of}")
            # A prompt has no cache to load, but its cache goes into the square's buffer all the same.
            needs = [state.weights_ready, *state.loaded.pop(square, []), *state.square_tasks.get(square - buffers, [])]
            needs.append(state.cache_stored.get((step.batch, step.layer)))
            state.weight_users[-1] = number
            state.square_tasks[square] = [number]
            state.square_tasks.pop(square - buffers, None)
        case Action.STORE_CACHE:
            needs = [state.square_tasks[square][0]]
            state.square_tasks[square].append(number)
            state.cache_stored[step.batch, step.layer] = number
        case Action.STORE_ACTIVATION:
            needs = [state.square_tasks[square][0]]
            state.square_tasks[square].append(number)
            state.activation_stored[step.batch] = number
            del state.number_of[step.batch, step.token, step.layer]
    known = sorted({need for need in needs if need is not None})
    return Task(number, step, tuple(known), weights=weights, square=square % buffers)
