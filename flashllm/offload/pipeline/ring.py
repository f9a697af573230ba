"""A process's place in the ring of a pipeline: values to and from its neighbours, words around it, and failures.

Process i sends to i + 1, and the last to the first. Besides values between stages (`Neighbours` of runtime/run.py)
there are words, JSON objects from the last process, the driver, that every other passes on, and answers to them that
are collected on the way back to it. Whoever fails or loses a neighbour says so to the next, which passes it on: so the
whole ring ends, whichever process is gone, within the time-out.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flashllm.errors import FlashError, PeerLost
from flashllm.offload.pipeline.link import Kind, Message, Receiver, Sender, Wire, dist
from flashllm.offload.pipeline.place import LOOPBACK, Place
from flashllm.offload.runtime.executor import Stopped

TIMEOUT_S = 30.0  # in which a silent process is given up; one whose machine closes its connections is noticed at once
CONNECT_S = 60.0  # in which all processes must have started; one lost before is noticed then
_POLL_S = 0.1
_PATIENCE_S = 2.0  # for last words

Array = NDArray[Any]
Word = dict[str, Any]


class Ring:
    """The two links of a process. A context manager: leaving it with an error tells the others, without ends it."""

    def __init__(
        self,
        place: Place,
        store: Any,
        *,
        address: str = LOOPBACK,
        timeout_s: float = TIMEOUT_S,
        connect_s: float = CONNECT_S,
    ) -> None:
        """Connects with the neighbours, who must do the same: `store` is where they find each other.

        PeerLost where they do not come within `connect_s`.
        """
        self.place = place
        self.dtype: np.dtype[Any] = np.dtype(np.uint8)  # of hidden states
        self.width = 1
        self._moved = threading.Condition()
        self._error: FlashError | None = None
        self._ended = False
        self._on_failure: Callable[[FlashError], None] = lambda error: None
        self._values: dict[tuple[int, int], Message] = {}
        self._words: deque[Word] = deque()
        wires: dict[int, Wire] = {}
        for source in sorted({place.rank, place.previous}):  # everywhere in this order, so that none waits in vain
            end = 0 if source == place.rank else 1
            name = f"{source} to {(source + 1) % place.world}"
            wires[source] = Wire(store, name, end, address=address, connect_s=connect_s, timeout_s=timeout_s)
        self._sender = Sender(wires[place.rank], peer=place.next, timeout_s=timeout_s, lost=self._lose)
        self._receiver = Receiver(
            wires[place.previous], peer=place.previous, timeout_s=timeout_s, got=self._got, lost=self._lose
        )

    # Values: runtime/run.py's Neighbours ---------------------------------------------------------------------------

    def give(self, batch: int, token: int, active: Sequence[int], values: Array) -> None:
        if not len(active) and self.place.next == self.place.world - 1:
            return  # the last stage knows
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._sender.send(Message(Kind.VALUES, batch, token, np.array(active, np.int64), data))

    def take(self, batch: int, token: int, ending: Callable[[], bool]) -> tuple[list[int], Array]:
        with self._moved:
            while (batch, token) not in self._values:
                self._raise_failure()
                if ending():
                    raise Stopped("the run was stopped")
                self._moved.wait(_POLL_S)
            message = self._values.pop((batch, token))
        if self.place.rank == 0:
            return message.numbers.tolist(), message.data.view(np.int64)
        return message.numbers.tolist(), message.data.view(self.dtype).reshape(-1, self.width)

    # Words ---------------------------------------------------------------------------------------------------------

    def say(self, word: Word) -> None:
        self._sender.send(Message(Kind.WORD, data=np.frombuffer(json.dumps(word).encode(), np.uint8).copy()))

    def hear(self) -> Word | None:
        """The next word of the process before this; None after the end. PeerLost."""
        with self._moved:
            while not self._words:
                self._raise_failure()
                if self._ended:
                    return None
                self._moved.wait(_POLL_S)  # in parts, so that an interrupt is heard
            return self._words.popleft()

    def on_failure(self, call: Callable[[FlashError], None]) -> None:
        """Have `call` called from another thread when the ring fails, to end what does not listen."""
        self._on_failure = call

    # The end -------------------------------------------------------------------------------------------------------

    def close(self, error: BaseException | None = None) -> None:
        """End the ring: with an `error` of this process all others fail. Without, the driver's end goes around."""
        if error is not None and self._error is None:
            text = str(error) or type(error).__name__
            self._fail(PeerLost(text), rank=self.place.rank, message=text)
        elif self.place.is_last and self._error is None:
            self._sender.send(Message(Kind.END))
        self._sender.close(_PATIENCE_S)
        self._receiver.join(_PATIENCE_S)  # whoever is before this one ends too, which ends the connection

    @property
    def is_waiting(self) -> bool:
        """True where a link's thread still runs: after `close`, because a neighbour neither speaks nor goes."""
        return self._sender.is_alive or self._receiver.is_alive

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    # From the links' threads ---------------------------------------------------------------------------------------

    def _got(self, message: Message) -> None:
        if message.kind is Kind.FAILED:
            word = json.loads(message.data.tobytes())
            rank, text = int(word["rank"]), str(word["message"])
            self._fail(PeerLost(f"process {rank} of the pipeline failed: {text}"), rank=rank, message=text)
            return
        with self._moved:
            if message.kind is Kind.VALUES:
                self._values[message.batch, message.token] = message
            elif message.kind is Kind.WORD:
                self._words.append(json.loads(message.data.tobytes()))
            else:
                self._ended = True
                if not self.place.is_last:
                    self._sender.send(message)
            self._moved.notify_all()

    def _lose(self, error: PeerLost) -> None:
        self._fail(error, rank=self.place.rank, message=str(error))

    def _fail(self, error: FlashError, *, rank: int, message: str) -> None:
        """Note the first failure and pass it on, unless the next process is where it comes from."""
        with self._moved:
            if self._error is not None or self._ended:
                return
            self._error = error
            self._moved.notify_all()
        if self.place.next != rank:
            self._sender.drop()
            word = json.dumps({"rank": rank, "message": message}).encode()
            self._sender.send(Message(Kind.FAILED, data=np.frombuffer(word, np.uint8).copy()))
        self._on_failure(error)

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error


def meet(place: Place, *, connect_s: float = CONNECT_S, **options: Any) -> Ring:
    """The ring of the processes that torchrun started. `options` as of `Ring`, and PeerLost as it."""
    try:
        found = dist.rendezvous("env://", place.rank, place.world, timeout=timedelta(seconds=connect_s))
        store, _, _ = next(iter(found))
    except RuntimeError as error:  # torch's
        raise PeerLost(f"the other processes of the pipeline were not found within {connect_s:g} s: {error}") from error
    return Ring(place, store, connect_s=connect_s, **options)
