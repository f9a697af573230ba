"""One end of a connection between two processes of a pipeline: messages one way, over torch.distributed.

A message is a header of HEADER int64 (kind, batch, token, count of numbers, bytes of data), the numbers (int64), the
data (bytes); empty parts are not sent. Sending never waits: a thread sends what is queued, and a pulse where there is
nothing to send. A receiver that gets neither for the time-out knows that the sender is gone. Another thread receives
whatever comes, so that two processes that both send cannot wait for each other.
"""

import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray

from flashllm.errors import PeerLost

HEADER = 5
_PULSES = 4  # in the time-out, at least
_PULSE_S = 1.0  # and one a second
_TAG = 0
_MAX_NBYTES = 1 << 40  # of a message: more is not one of ours

Array = NDArray[Any]
dist: Any = torch.distributed  # whose stubs lack most of what groups can do


class Kind(IntEnum):
    PULSE = 0
    VALUES = 1  # hidden states, or token ids, of a batch for a token; the numbers are the places that still run
    WORD = 2  # JSON between the stages: see ring.py
    FAILED = 3  # JSON: which process failed, and why
    END = 4


@dataclass(frozen=True, slots=True)
class Message:
    kind: Kind
    batch: int = 0
    token: int = 0
    numbers: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    data: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))


class Wire:
    """A group of the two ends of a link, this one being 0, which sends, or 1, which receives.

    All goes over gloo, from and to this machine's memory, which neither encrypts nor asks who connects.
    """

    def __init__(self, store: Any, name: str, end: int, *, address: str, connect_s: float, timeout_s: float) -> None:
        """Listens at `address`; `store` is torch's, by which the ends find each other.

        PeerLost where the other end does not come within `connect_s` seconds.
        """
        self._timeout, self._other = timedelta(seconds=timeout_s), 1 - end
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=connect_s)
        try:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            self._gloo = dist.ProcessGroupGloo(dist.PrefixStore(name, store), end, 2, options)
        except RuntimeError as error:
            raise PeerLost(
                f"link {name} of the pipeline could not be made at {address} within {connect_s:g} s: {_reason(error)}; "
                "see that all processes run and reach each other"
            ) from error

    def send(self, message: Message) -> None:
        """RuntimeError, torch's, where the other end is gone or takes nothing for the time-out."""
        numbers, data = np.ascontiguousarray(message.numbers), message.data
        header = np.array([message.kind, message.batch, message.token, len(numbers), data.nbytes], np.int64)
        for part in (header, numbers, data):
            if part.nbytes:
                self._gloo.send([torch.from_numpy(part)], self._other, _TAG).wait(self._timeout)

    def receive(self) -> Message:
        """RuntimeError as `send`; ValueError for what is no message."""
        header = np.zeros(HEADER, np.int64)
        self._fill(header)
        kind, batch, token, count, nbytes = header.tolist()
        if not (0 <= count <= _MAX_NBYTES // 8 and 0 <= nbytes <= _MAX_NBYTES):
            raise ValueError("a message that no process of this version sends")
        numbers, data = np.empty(count, np.int64), np.empty(nbytes, np.uint8)
        for part in (numbers, data):
            self._fill(part)
        return Message(Kind(kind), batch, token, numbers, data)

    def _fill(self, part: Array) -> None:
        if part.nbytes:
            self._gloo.recv([torch.from_numpy(part)], self._other, _TAG).wait(self._timeout)


def _reason(error: BaseException) -> str:
    """Torch's message without the place in its source, and without advice."""
    line = str(error).strip().split("\n")[0]
    return re.sub(r"^\[[^\]]*\] *", "", line).split(". ")[0]


class Sender:
    """The sending end. `lost` is called once, from its thread, where the other end is gone."""

    def __init__(self, wire: Wire, *, peer: int, timeout_s: float, lost: Callable[[PeerLost], None]) -> None:
        self._wire, self._peer, self._lost = wire, peer, lost
        self._pulse_s = min(_PULSE_S, timeout_s / _PULSES)
        self._queue: deque[Message] = deque()
        self._changed = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._serve, name=f"pipeline to {peer}", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queue a message. Its arrays must not change any more."""
        with self._changed:
            self._queue.append(message)
            self._changed.notify_all()

    def drop(self) -> None:
        with self._changed:
            self._queue.clear()

    def close(self, patience_s: float) -> None:
        """Send what is queued, for at most so long, and end."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join(patience_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _serve(self) -> None:
        try:
            while True:
                with self._changed:
                    if not self._queue and not self._ending:
                        self._changed.wait(self._pulse_s)
                    if not self._queue and self._ending:
                        return
                    message = self._queue.popleft() if self._queue else Message(Kind.PULSE)
                self._wire.send(message)
                if message.kind in (Kind.END, Kind.FAILED):  # after which nobody listens
                    return
        except RuntimeError as error:  # torch's
            why = _reason(error)
            self._lost(PeerLost(f"process {self._peer} of the pipeline ended, or cannot be reached: {why}"))


class Receiver:
    """The receiving end. From its thread `got` is called with each message but pulses, and `lost` once at a loss."""

    def __init__(
        self,
        wire: Wire,
        *,
        peer: int,
        timeout_s: float,
        got: Callable[[Message], None],
        lost: Callable[[PeerLost], None],
    ) -> None:
        self._wire, self._peer, self._got, self._lost = wire, peer, got, lost
        self._timeout_s = timeout_s
        self._thread = threading.Thread(target=self._serve, name=f"pipeline from {peer}", daemon=True)
        self._thread.start()

    def join(self, patience_s: float) -> None:
        self._thread.join(patience_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _serve(self) -> None:
        try:
            while True:
                message = self._wire.receive()
                if message.kind is not Kind.PULSE:
                    self._got(message)
                if message.kind in (Kind.END, Kind.FAILED):
                    return
        except (RuntimeError, ValueError, MemoryError) as error:  # RuntimeError is torch's
            heard = f"process {self._peer} of the pipeline ended, or was not heard for {self._timeout_s:g} s"
            self._lost(PeerLost(f"{heard}: {_reason(error)}"))
