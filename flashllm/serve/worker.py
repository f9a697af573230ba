"""The threads that answer: jobs wait in a bounded queue, and some of them are answered at once, each by a thread of its
own; the model joins their passes (`flashllm.engine.shared`). Knows no HTTP.

A job's events go to its `deliver`, from its thread. A cancelled job ends before its next token.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from flashllm.api.answers import chat_message
from flashllm.api.prompts import Reading
from flashllm.api.requests import Request
from flashllm.base.command_line import say, say_bug
from flashllm.base.files import Closing
from flashllm.engine.model import Model
from flashllm.engine.shared import SharedModel
from flashllm.errors import Cancelled, ContextFull, FlashError, FormError
from flashllm.generate.answer import Stopped
from flashllm.generate.grammar import Matcher
from flashllm.generate.session import PrefillRecord, Session, TokenRecord
from flashllm.generate.speculation import Speculation
from flashllm.generate.tokenizer import Tokenizer
from flashllm.parked.folder import ParkingFolder
from flashllm.replies.parser import Event as Said
from flashllm.serve.conversations import Conversations, Place, turns_of

USUAL_ANSWER = 1024  # tokens


_STOPPING = "the server is stopping"


class QueueFull(Exception):
    """As many jobs wait as may."""


class Stopping(Exception):
    """No job is taken any more."""


@dataclass(frozen=True, slots=True)
class Began:
    """The prompt of choice `index` is computed."""

    index: int
    record: PrefillRecord


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token of choice `index`, and what is certain to be said by then."""

    index: int
    record: TokenRecord
    said: tuple[Said, ...] = ()
    is_first: bool = False  # of its answer


@dataclass(frozen=True, slots=True)
class Ended:
    """Choice `index` is complete, with what it says last."""

    index: int
    reason: Stopped
    said: tuple[Said, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The job's last event. `error` says why it has no (whole) answer: one line that may be shown to the client."""

    error: str | None = None
    status: int = 200  # as HTTP would say it


Event = Began | Chosen | Ended | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a prompt is computed, by llama-server's names: of `total` tokens, of which `cache` were there before."""

    total: int
    cache: int
    processed: int  # those of the cache included: layers that are done, as tokens
    time_ms: int  # since it began


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """Work to be computed: prompts in turn, each with its request."""

    prompts: Sequence[tuple[Request, list[int]]]  # options with the final max_new_tokens, token ids
    deliver: Callable[[Event], None]
    scored: bool = False  # the prompts' own log probabilities are wanted
    reading: Reading | None = None  # how a conversation's answer is read; None: it is plain text
    matchers: Sequence[Matcher | None] = ()  # of the form that each prompt's answer must have; none: any
    cancelled: threading.Event = field(default_factory=threading.Event)
    progress: Progress | None = None  # of the prompt that is computed

    @property
    def tokens(self) -> int:
        """Tokens that it holds at once, of an answer USUAL_ANSWER at most: few say how long theirs will be."""
        return max(len(ids) + min(request.options.max_new_tokens, USUAL_ANSWER) for request, ids in self.prompts)


class Worker(Closing):
    """Runs jobs until it is closed; a context manager. `submit`, `cancel_all` and the properties: from any thread."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        max_waiting: int,
        keep: int,
        on_event: Callable[[Event], None],
        parallel: int = 1,
        together: int | None = None,
        speculation: Speculation | None = None,
        parking: ParkingFolder | None = None,
    ) -> None:
        """`max_waiting` jobs wait behind the ones that run: `parallel` at most, and of several no more than have
        `together` tokens. `keep` bytes of what they leave behind stay in memory.

        `on_event` sees all jobs' events, one at a time. Conversations that leave memory go to `parking`.
        """
        self._max_waiting, self._on_event, self._tokenizer = max_waiting, on_event, tokenizer
        self._together = together
        self._model = model
        self._shared = SharedModel(model, self.make_room)
        self._speculation = speculation
        self._keeping = threading.Lock()  # of the conversations
        self._conversations = Conversations(self._new_session, model, budget=keep, parking=parking)
        self._telling = threading.Lock()
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: set[Job] = set()
        self._closing = False
        self._threads = [threading.Thread(target=self._run, name=f"flashllm-worker-{n}") for n in range(parallel)]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads) and not self._closing

    @property
    def kept(self) -> int:
        """Ends and beginnings of conversations in memory."""
        return len(self._conversations)

    def submit(self, job: Job) -> None:
        """Let `job` wait for its turn. Raises QueueFull, Stopping."""
        with self._changed:
            if self._closing:
                raise Stopping(_STOPPING)
            if len(self._waiting) >= self._max_waiting:
                raise QueueFull(f"{len(self._waiting)} requests are waiting already; try again later")
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """End `job` before its next token, also in the midst of its prompt. Harmless where it has ended."""
        with self._changed:
            job.cancelled.set()
            waited = job in self._waiting
            if waited:
                self._waiting.remove(job)
                self._changed.notify_all()  # the next one may have room
        self._shared.wake()
        if waited:
            self._tell(job, Finished())

    def cancel_all(self) -> None:
        """End what runs and what waits; nothing is taken any more."""
        with self._changed:
            self._closing = True
            for job in (*self._waiting, *self._running):
                job.cancelled.set()
        self._shared.wake()

    def close(self) -> None:
        """As `cancel_all`; returns when the threads have ended and the conversations are freed."""
        self.cancel_all()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._conversations.close()

    def _new_session(self) -> Session:
        return Session(cast(Model, self._shared), self._tokenizer, speculation=self._speculation)

    def make_room(self) -> bool:
        """As that of the conversations, from any thread."""
        with self._keeping:
            return self._conversations.make_room()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            finished = Finished()
            try:
                with contextlib.suppress(Cancelled), self._shared.member(job.cancelled):
                    self._answer(job)
                if self._closing and job.cancelled.is_set():
                    finished = Finished(_STOPPING, 503)
            except ContextFull as error:
                finished = Finished(str(error), 400)
            except FormError as error:
                finished = Finished(str(error), 500)
            except FlashError as error:
                say(str(error))
                finished = Finished(f"the model failed ({type(error).__name__}); the server's output says more", 500)
            except Exception as error:  # the next request is answered whatever happened to this one
                say_bug(error)
                finished = Finished(f"the server failed ({type(error).__name__})", 500)
            with self._changed:
                self._running.discard(job)
                self._changed.notify_all()
            self._tell(job, finished)

    def _next(self) -> Job | None:
        with self._changed:
            while not self._may_begin():
                if self._closing:
                    return None
                self._changed.wait()
            job = self._waiting.popleft()
            self._running.add(job)
            return job

    def _may_begin(self) -> bool:
        """True where the job that waits longest has room beside those that run."""
        if not self._waiting or not self._running or self._closing or self._together is None:
            return bool(self._waiting)
        return sum(job.tokens for job in (self._waiting[0], *self._running)) <= self._together

    def _tell(self, job: Job, event: Event) -> None:
        with self._telling:
            self._on_event(event)
        # Where the connection's loop has ended nobody is left to hear.
        with contextlib.suppress(RuntimeError):
            job.deliver(event)

    def _answer(self, job: Job) -> None:
        for index, (request, ids) in enumerate(job.prompts):
            if job.cancelled.is_set():
                return
            messages = [each for each in request.prompt if isinstance(each, dict)] if request.kind == "chat" else []
            if job.scored:  # every token's logits are wanted, so nothing can be reused
                with self._new_session() as session:
                    self._generate(job, index, Place(session=session, keep=0), [])
                continue
            turns = turns_of(messages)
            with self._keeping:
                place = self._conversations.take(ids, turns, request.marks)
            said: list[Said] = []
            try:
                self._generate(job, index, place, said)
            finally:
                after = turns_of([*messages, chat_message(said)])[-1] if messages and said else None
                with self._keeping:
                    self._conversations.give_back(place, after)

    def _generate(self, job: Job, index: int, place: Place, said: list[Said]) -> None:
        """Choice `index` of `job`, at `place`. What it says goes to `said` as it comes."""
        session, (request, ids), reading = place.session, job.prompts[index], job.reading
        decoder = None if reading is None else reading.decoder
        matcher = job.matchers[index] if job.matchers else None
        session.choose_by(request.options, logprobs=request.logprobs, decoder=decoder, matcher=matcher)
        self._shared.watch(None if job.scored else _noted(job, len(ids), place.keep))
        stream = session.stream_prompt(ids, keep=place.keep, scored=job.scored)
        is_first = True
        with contextlib.closing(stream):
            for record in stream:
                if job.cancelled.is_set():
                    return
                if isinstance(record, PrefillRecord):
                    job.progress = None
                    with self._keeping:
                        self._conversations.lend(place)
                    self._tell(job, Began(index, record))
                else:
                    text = record.text
                    new = [Said("text", text)] if reading is None else reading.parser.feed(text)
                    said += new
                    self._tell(job, Chosen(index, record, tuple(new), is_first))
                    is_first = False
                    if reading is not None and reading.parser.done:
                        self._tell(job, Ended(index, "stop"))
                        return
        reason = session.stopped or "length"
        last = [] if reading is None else reading.parser.finish(cut=reason in ("length", "context"))
        said += last
        self._tell(job, Ended(index, reason, tuple(last)))


def _noted(job: Job, total: int, cache: int) -> Callable[[int, int], None]:
    """For `Model.watch`: the job's progress."""
    began = time.monotonic()

    def noted(done: int, parts: int) -> None:
        processed, time_ms = cache + (total - cache) * done // parts, round(1e3 * (time.monotonic() - began))
        job.progress = Progress(total=total, cache=cache, processed=processed, time_ms=time_ms)

    return noted
