"""Who computes next where several share a model. Bookkeeping alone: no tensors, no threads, no clock.

Whoever wants few tokens computed shares the next pass with all others who do. Prompts take turns, a slice of time each,
and after every slice a shared pass has its turn: so no answer stands still for longer than a slice, and prompts get all
of the rest; a pass of several has the slices of each. Where memory is missing for one of them, it waits until another
one leaves.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

# Of a prompt: who reads takes in about five tokens a second, so that an answer which keeps this pace beside a prompt
# costs nobody anything; and a slice is long beside what it takes to stop and to go on, some milliseconds.
SLICE_S = 0.2
# That a shared pass waits for those who had part in the one before and have not asked again: they choose a token, which
# takes about a millisecond, and are late where they do more than that. They come to the pass after it then.
PATIENCE_S = 0.02
# Of prompts that share a pass: where arithmetic takes the time and not reads, so many times the time that turns would
# take is the most that the shortest of them waits.
MOST_LONGER = 2
# Of a pass, that are done again where others come in them: who comes in the first asks in the second, as a slice holds
# the model's lock.
JOINED_SLICES = 2

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Turn(Generic[Key]):
    """The next computation: few tokens of several members, or a slice of one member's prompt."""

    members: tuple[Key, ...]
    is_slice: bool = False


class Turns(Generic[Key]):
    """Those who share a model, what they ask for, and whose turn it is."""

    def __init__(self) -> None:
        self._members: set[Key] = set()
        self._few: dict[Key, None] = {}  # who asks for few tokens, in their order
        self._prompts: deque[Key] = deque()  # who asks for many
        self._away: set[Key] = set()  # had part in the last shared pass and has not asked since
        self._blocked: dict[Key, None] = {}  # ask, and wait for memory
        self._sliced = True  # since the last shared pass

    def __len__(self) -> int:
        return len(self._members)

    @property
    def prompts(self) -> list[Key]:
        """Those who ask for many tokens, in their order, but for those who wait for memory."""
        return [member for member in self._prompts if member not in self._blocked]

    def join(self, member: Key) -> None:
        """From now on `member` may ask."""
        self._members.add(member)

    def leave(self, member: Key) -> None:
        """It asks for nothing any more: whoever waits for memory may try again."""
        self._members.discard(member)
        self.drop(member)
        self._away.discard(member)
        self._blocked.clear()

    def ask(self, member: Key, *, prompt: bool) -> None:
        """`member` wants tokens computed, many where they are a `prompt`'s."""
        self._away.discard(member)
        if prompt:
            self._prompts.append(member)
        else:
            self._few[member] = None

    def drop(self, member: Key) -> None:
        """It does not wait any more: it was given what it asked for, or nothing."""
        self._few.pop(member, None)
        if member in self._prompts:
            self._prompts.remove(member)
        self._blocked.pop(member, None)

    def block(self, member: Key) -> bool:
        """There is no memory for what it asks. False where nobody could give it any: all others wait too."""
        self._blocked[member] = None
        if len(self._blocked) < len(self._members):
            return True
        del self._blocked[member]
        return False

    def next(self, *, patient: bool) -> Turn[Key] | None:
        """Begin the next turn. None: no member asks, or `patient` waits for those that are about to ask."""
        few = tuple(member for member in self._few if member not in self._blocked)
        prompts = self.prompts
        if prompts and (not few or not self._sliced):
            self._prompts.remove(prompts[0])
            self._prompts.append(prompts[0])
            self._sliced = True
            return Turn((prompts[0],), is_slice=True)
        if not few or (patient and self._away and not prompts):
            return None
        self._sliced = False
        self._away = set(few)
        return Turn(few)

    @property
    def are_awaited(self) -> bool:
        """True where a patient turn would wait for members that are about to ask."""
        return bool(self._away) and any(member not in self._blocked for member in self._few)
