"""The endpoints: from a request to a job for the worker, and from its events to the answer.

Answers are OpenAI's. Everything asked for is checked before the job waits, so that a stream begins only for a request
that can be answered.
"""

import asyncio
import dataclasses
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from flashllm.api.fields import BadRequest
from flashllm.api.prompts import PromptEncoder, Unanswerable
from flashllm.api.requests import Request as Wanted
from flashllm.generate.grammar import Matcher
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.tokenizer import Tokenizer
from flashllm.serve import http, page
from flashllm.serve.bodies import Asked, Kind, parse
from flashllm.serve.forms import Form, Memory
from flashllm.serve.http import RETRY_AFTER_S, ApiError, DocumentStream, EventStream
from flashllm.serve.metrics import Metrics
from flashllm.serve.worker import Began, Chosen, Ended, Event, Finished, Job, QueueFull, Stopping, Worker

Document = Mapping[str, Any]
COMPLETION_TOKENS = 16  # of a completion that does not say; a chat's answer may fill the context


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model as clients see it."""

    name: str
    encoder: PromptEncoder
    tokenizer: Tokenizer
    defaults: SamplingOptions  # of requests that do not say
    memory: Memory
    nbytes: int = 0  # of its files
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


class Api:
    """The endpoints of one model and its worker."""

    def __init__(self, served: Served, worker: Worker, metrics: Metrics) -> None:
        self.served, self._worker, self._metrics = served, worker, metrics
        self.bodies = http.Bodies(served.encoder.context)
        # A step at a time: a template is not shared. A long prompt takes many, which wait for each other, and pause.
        self._encoding = ThreadPoolExecutor(1, "flashllm-encode")
        self._long = asyncio.Lock()

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]

    async def health(self, request: Request) -> Response:
        """200 while requests are answered, else 503."""
        if not self._worker.alive:
            return JSONResponse({"status": "stopping"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Counters for Prometheus."""
        return PlainTextResponse(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """The list of models: the one there is."""
        # Codex reads `models`, a catalogue of its own with prompts and tools, and complains where there is none.
        name = self.served.name
        pages = {"has_more": False, "first_id": name, "last_id": name}  # of Anthropic's
        return JSONResponse({"object": "list", "data": [self._card()], **pages, "models": []})

    async def model(self, request: Request) -> Response:
        self.check_name(request.path_params["name"])
        return JSONResponse(self._card())

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, "chat")

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, "completion")

    def _card(self) -> dict[str, Any]:
        served, context = self.served, self.served.encoder.context
        card = {"id": served.name, "object": "model", "created": served.created, "owned_by": "flashllm"}
        anthropics = {"type": "model", "display_name": served.name, "created_at": rfc3339(served.created)}
        return {**card, **anthropics, **dict.fromkeys(("max_model_len", "context_length", "max_input_tokens"), context)}

    def check_name(self, name: str | None) -> None:
        """ApiError for another model's name. None: the one there is."""
        if name is not None and name != self.served.name:
            message = f"there is no model {name[:200]!r} here; the one there is is {self.served.name!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    async def _answer(self, request: Request, kind: Kind) -> Response:
        answer_id = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{secrets.token_hex(12)}"

        def understand(raw: bytes, defaults: SamplingOptions) -> Asked:
            return parse(raw, kind, custom_id=answer_id, defaults=defaults)

        answering = await self.begin(request, kind, understand)
        form = Form(
            answering.asked,
            answer_id=answer_id,
            model=self.served.name,
            prompts=[ids for _, ids in answering.prompts],
            decode=self.served.tokenizer.decode,
            token_text=self.served.tokenizer.token_text,
            memory=self.served.memory,
        )
        return await answering.respond(request, form, EventStream)

    async def begin(
        self, request: Request, kind: Kind, understand: Callable[[bytes, SamplingOptions], Asked]
    ) -> "Answering":
        """Read and check the request, and let its job wait. `understand` makes a checked body of bytes and defaults.

        Raises ApiError.
        """
        loop = asyncio.get_running_loop()
        async with self.bodies.read(request) as body:
            asked, prompts, matchers = await self._encoded(request, body, kind, understand)
            events: asyncio.Queue[Event] = asyncio.Queue()

            def deliver(event: Event) -> None:
                loop.call_soon_threadsafe(events.put_nowait, event)

            job = Job(
                prompts=prompts,
                deliver=deliver,
                scored=asked.echo and asked.requests[0].logprobs is not None,
                matchers=matchers,
                reading=self.served.encoder.reading(*prompts[0]),
            )
            try:
                self._worker.submit(job)
            except QueueFull as error:
                code = "queue_full"
                raise ApiError(429, str(error), code=code, headers={"Retry-After": str(RETRY_AFTER_S)}) from None
            except Stopping as error:
                raise _failure(Finished(str(error), 503)) from None

        def cancel() -> None:
            self._worker.cancel(job)
            self.bodies.let_go(body)

        return Answering(asked=asked, prompts=prompts, events=events, cancel=cancel, job=job)

    async def understood(
        self, request: Request, kind: Kind, understand: Callable[[bytes, SamplingOptions], Asked]
    ) -> "_Understood":
        """As `begin`, of a request that asks for no answer."""
        async with self.bodies.read(request) as body:
            understood = await self._encoded(request, body, kind, understand)
        self.bodies.let_go(body)
        return understood

    async def _encoded(
        self, request: Request, body: http.Body, kind: Kind, understand: Callable[[bytes, SamplingOptions], Asked]
    ) -> "_Understood":
        loop, left = asyncio.get_running_loop(), asyncio.Event()
        steps = self._understand(body, kind, understand)
        try:
            async with http.on_disconnect(request.receive, left.set):
                understood = await loop.run_in_executor(self._encoding, _step, steps)
                while understood is None:
                    async with self._long:
                        if left.is_set():
                            raise ClientDisconnect
                        began = loop.time()
                        understood = await loop.run_in_executor(self._encoding, _step, steps)
                        await asyncio.sleep(loop.time() - began)  # half the time is for what is computed
        except BadRequest as error:
            raise ApiError(400, str(error), param=error.param) from None
        except Unanswerable as error:
            param = "messages" if kind == "chat" else "prompt"
            raise ApiError(400, str(error), code=error.code, param=param) from None
        return understood

    def _understand(
        self, body: http.Body, kind: Kind, understand: Callable[[bytes, SamplingOptions], Asked]
    ) -> Generator[None, None, "_Understood"]:
        """The body checked, and each prompt's request with its token ids, and its matcher, in steps."""
        encoder = self.served.encoder
        tokens = encoder.context if kind == "chat" else COMPLETION_TOKENS
        asked = understand(body.raw, dataclasses.replace(self.served.defaults, max_new_tokens=tokens))
        body.raw = b""
        self.check_name(asked.model)
        prompts: list[tuple[Wanted, list[int]]] = []
        for given in asked.requests:
            if prompts:
                yield
            # Agents ask for as many tokens as large models give: a chat's answer ends where the context does.
            wanted = dataclasses.replace(given, max_new_given=given.max_new_given and kind != "chat")
            ids = yield from encoder.steps(wanted)
            options = dataclasses.replace(wanted.options, max_new_tokens=encoder.max_new_tokens(wanted, len(ids)))
            marks = yield from encoder.marks(wanted, ids)
            prompts.append((dataclasses.replace(wanted, options=options, marks=marks), ids))
        return asked, prompts, [encoder.matcher(*each) for each in prompts]


_Understood = tuple[Asked, list[tuple[Wanted, list[int]]], list[Matcher | None]]


def _step(steps: Generator[None, None, _Understood]) -> _Understood | None:
    """Take the next step: what it ends with, None where there are more."""
    try:
        next(steps)
    except StopIteration as end:
        understood: _Understood = end.value
        return understood
    return None


class Telling(Protocol):
    """An answer in the form of a dialect, `whole` or in a stream: `take` counts an event and makes its documents,
    `last` makes those at the end, and `waiting` one that says that there will be more."""

    def take(self, event: Began | Chosen | Ended) -> Document | Sequence[Document] | None: ...
    def waiting(self) -> Document | None: ...
    def last(self) -> Document | Sequence[Document] | None: ...
    def whole(self) -> Document: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """A job under way, as its connection sees it."""

    asked: Asked
    prompts: list[tuple[Wanted, list[int]]]
    events: "asyncio.Queue[Event]"
    cancel: Callable[[], None]
    job: Job

    async def respond(
        self,
        request: Request,
        form: Telling,
        stream: type[DocumentStream],
        *,
        failed: Callable[[ApiError], Document] | None = None,
    ) -> Response:
        """The answer, as a `stream` where one is asked for; its document of a failure is what `failed` makes, or the
        error's own. Cancels the job where the client goes away; ApiError where a whole answer fails."""
        if self.asked.stream:
            documents = self._documents(form, failed or (lambda error: error.document(request.url.path)))
            return stream(documents, self.cancel, lambda: self._waiting(form))
        try:
            async with http.on_disconnect(request.receive, self.cancel):
                while not isinstance(event := await self.events.get(), Finished):
                    form.take(event)
        finally:
            self.cancel()
        if event.error is not None:
            raise _failure(event)
        return JSONResponse(form.whole())

    def _documents(
        self, form: Telling, failed: Callable[[ApiError], Document]
    ) -> Callable[[], Awaitable[Document | None]]:
        """A source of a stream's documents, one a call, and None after the last."""
        rest: deque[Document | None] = deque()  # what is left to say

        async def following() -> Document | None:
            while not rest:
                event = await self.events.get()
                if isinstance(event, Finished):
                    said = form.last() if event.error is None else failed(_failure(event))
                else:
                    said = form.take(event)
                rest.extend(said if isinstance(said, Sequence) else () if said is None else (said,))
                if isinstance(event, Finished):
                    rest.append(None)
            return rest.popleft()

        return following

    def _waiting(self, form: Telling) -> Document | None:
        """A document that says that there will be more, with how far the prompt is."""
        document, progress = form.waiting(), self.job.progress
        if document is None or progress is None:
            return document
        return {**document, "prompt_progress": dataclasses.asdict(progress)}


def rfc3339(seconds: float) -> str:
    """A time since 1970, as Anthropic's and Ollama's clients read it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _failure(event: Finished) -> ApiError:
    code = {400: "context_length_exceeded", 503: "stopping"}.get(event.status, "generation_failed")
    return ApiError(event.status, event.error or "", code=code)


class _Counted:
    """Middleware: counts answers by path and status."""

    def __init__(self, app: Any, *, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.answered(path, message["status"])
            await send(message)

        await self._app(scope, receive, counted)


def make_app(
    routes: Sequence[Route],
    metrics: Metrics,
    *,
    key: bytes | None,
    hosts: frozenset[str] | None,
    origins: frozenset[str],
    report: Callable[[BaseException], None],
) -> Starlette:
    """The ASGI application that answers on `routes`, and with the page.

    `key`, `hosts`, `origins`: see `http.Guard`; `report`: `http.ErrorsAreAnswers`.
    """
    routes = [*routes, *page.routes()]
    paths = frozenset(route.path for route in routes)
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(_Counted, metrics=metrics, paths=paths),
            Middleware(http.Guard, key=key, open_paths=page.PATHS | {"/health"}, hosts=hosts, origins=origins),
            Middleware(http.ErrorsAreAnswers, report=report),
        ],
        exception_handlers={ApiError: http.answer_api_error, HTTPException: http.answer_http_error},
    )
    app.router.redirect_slashes = False
    return app
