"""HTTP for every endpoint: bodies with a bound, error answers, event streams, and who may ask. No model."""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from flashllm.base.text import valid_unicode
from flashllm.plan.requests import BODIES, body_nbytes, body_values

RETRY_AFTER_S = 10
BODY_TIMEOUT_S = 30.0  # a body that has not come by then is given up
KEEP_ALIVE_S = 2.0  # a stream without an event sends a comment so often, or proxies and clients end it
_ANTHROPICS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
               429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip
_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(valid_unicode(message))
        self.status, self.code, self.headers = status, code or _CODES.get(status), headers
        self.param = None if param is None else valid_unicode(param)

    def document(self, path: str) -> dict[str, Any]:
        """The error object for who asked for `path`: Ollama's, Anthropic's or OpenAI's."""
        if path.startswith("/api/"):
            return {"error": str(self)}
        if path.startswith("/v1/messages"):
            kind = _ANTHROPICS.get(self.status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": str(self)}}
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str) -> Response:
        return JSONResponse(self.document(path), self.status, headers=self.headers)


async def answer_api_error(request: Request, error: Exception) -> Response:
    """For Starlette: an `ApiError` that an endpoint raised."""
    assert isinstance(error, ApiError)
    return error.response(request.url.path)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """For Starlette: what its router raises: no such path, no such method."""
    assert isinstance(error, HTTPException)
    what = {404: f"there is no {request.url.path[:200]!r} here", 405: f"{request.method} is not possible here"}
    message = what.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, headers=error.headers).response(request.url.path)


class Body:
    """A request's body, and what it takes of the memory for all of them until it is let go."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        """`refuse` ends the wait for the rest."""
        self.raw = b""
        self.nbytes = 0
        self.began = time.monotonic()
        self.refused = False
        self.refuse = refuse


class Bodies:
    """The bodies under way: each has a bound, and so have all. Where they exceed it, one that arrives is refused: of
    the large ones, one that has taken long."""

    def __init__(self, context: int) -> None:
        """For prompts of a model of this context."""
        self._each, self._values = body_nbytes(context), body_values(context)
        self._most, self._held = BODIES * self._each, 0
        self._arriving: set[Body] = set()

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Body]:
        """The whole JSON body, which is let go where the block raises; otherwise by `let_go`.

        ApiError where it is too large, too slow, says that it is something else, or there is no room.
        """
        self._check_headers(request.headers)
        timeout = asyncio.timeout(BODY_TIMEOUT_S)
        body, come = Body(lambda: timeout.reschedule(asyncio.get_running_loop().time())), bytearray()
        self._arriving.add(body)
        try:
            try:
                async with timeout:
                    async for part in request.stream():
                        if body.refused:
                            come.clear()
                            continue
                        come += part
                        if len(come) > self._each:
                            raise self._too_large()
                        self._grow(body, len(part))
                if body.refused:
                    raise TimeoutError
                text_nbytes = self._check_text(come)
                # As values and as a prompt, when nothing is left of the body.
                self._grow(body, max(0, 2 * text_nbytes - len(come)))
                body.raw = bytes(come)
            except TimeoutError:
                if body.refused:
                    raise self._no_room() from None
                raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:.0f} s") from None
            finally:
                self._arriving.discard(body)
                come.clear()
            yield body
        except BaseException:
            self.let_go(body)
            raise

    def let_go(self, body: Body) -> None:
        """Nothing of the body is held any more. Harmless where that was said before."""
        self._held -= body.nbytes
        body.nbytes, body.raw = 0, b""

    def _check_headers(self, headers: Headers) -> None:
        kind, *options = (part.strip().lower() for part in headers.get("content-type", "").split(";"))
        if kind != "application/json":
            raise ApiError(415, "the body must be JSON, with the header `Content-Type: application/json`")
        for option in options:
            name, _, value = option.partition("=")
            if name.strip() == "charset" and value.strip().strip('"') not in ("utf-8", "utf8", "us-ascii"):
                raise ApiError(415, "the body must be UTF-8, without another charset in its Content-Type")
        if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise ApiError(415, "the body must be sent as it is, without a Content-Encoding")
        declared = headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared[:20]) > self._each:
            raise self._too_large()

    def _check_text(self, raw: bytearray) -> int:
        """Bytes that the body's text takes in memory, at most."""
        if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > self._values:  # more than there are
            raise ApiError(400, f"the body holds more than {self._values} values; send fewer prompts at once")
        nbytes = _text_nbytes(raw)
        if nbytes > self._each:
            raise ApiError(413, f"the body's text takes more than {self._each} bytes, for its wide characters")
        return nbytes

    def _grow(self, body: Body, nbytes: int) -> None:
        """Let `body`, which arrives, hold so many bytes more."""
        body.nbytes += nbytes
        self._held += nbytes
        while self._held > self._most:
            now = time.monotonic()
            refused = max(self._arriving, key=lambda each: each.nbytes * (now - each.began))
            self._arriving.discard(refused)
            self.let_go(refused)
            if refused is body:
                raise self._no_room()
            refused.refused = True
            refused.refuse()

    def _too_large(self) -> ApiError:
        # The connection stays open: what still comes is read and dropped, so that the client hears this.
        return ApiError(413, f"the body is larger than {self._each} bytes")

    def _no_room(self) -> ApiError:
        message = "there is no room for this body with those of other requests; try again later"
        return ApiError(503, message, code="overloaded", headers={"Retry-After": str(RETRY_AFTER_S)})


_WIDEST, _WIDE = re.compile(rb"[\xf0-\xff]|\\u[dD][89abAB]"), re.compile(rb"[\xc4-\xff]|\\u")
_LATER_BYTES = bytes(range(0x80, 0xC0))  # of a character


def _text_nbytes(raw: bytearray) -> int:
    """Bytes that Python takes for the text in the JSON `raw`, at most: as many a character as the widest needs."""
    width = 4 if _WIDEST.search(raw) else 2 if _WIDE.search(raw) else 1
    escapes = max(0, raw.count(b"\\u") - raw.count(b"\\\\"))  # of six bytes; an escaped backslash begins none
    return width * (len(raw.translate(None, _LATER_BYTES)) - 5 * escapes)


@contextlib.asynccontextmanager
async def on_disconnect(receive: Receive, gone: Callable[[], None]) -> AsyncIterator[None]:
    """During the block, call `gone` once the client goes away. The request's body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class DocumentStream(Response):
    """Documents as they come, each a line of JSON."""

    media_type = "application/x-ndjson"
    form = "{}\n"  # of a document
    comment = ""  # sent where none comes for a while, and the dialect has no document for that
    done = ""  # what is sent after the last

    def __init__(
        self,
        next_document: Callable[[], Awaitable[Mapping[str, Any] | None]],
        gone: Callable[[], None],
        waiting: Callable[[], Mapping[str, Any] | None] = lambda: None,
    ) -> None:
        """`next_document` gives None after the last; `gone` is called where the client goes away, or at the end.
        `waiting` gives a document that says that there will be more."""
        self.status_code, self.background = 200, None
        self._next, self._gone, self._waiting = next_document, gone, waiting
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    def written(self, document: Mapping[str, Any]) -> str:
        return self.form.format(json.dumps(document, ensure_ascii=False))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(text: str, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        try:
            async with on_disconnect(receive, self._gone):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                following = asyncio.ensure_future(self._next())
                try:
                    while True:
                        finished, _ = await asyncio.wait([following], timeout=KEEP_ALIVE_S)
                        if not finished:
                            said = self._waiting()
                            await write(self.comment if said is None else self.written(said))
                            continue
                        if (document := following.result()) is None:
                            break
                        await write(self.written(document))
                        following = asyncio.ensure_future(self._next())
                finally:
                    following.cancel()
                await write(self.done, more=False)
        finally:
            self._gone()


class EventStream(DocumentStream):
    """Server-sent events, as OpenAI's interface has them: `data:` lines, comments in between, [DONE] at the end."""

    media_type = "text/event-stream"
    form = "data: {}\n\n"
    comment = ": still at work\n\n"
    done = "data: [DONE]\n\n"


class NamedEventStream(EventStream):
    """Server-sent events that are named by their documents' type, without a mark at the end."""

    done = ""

    def written(self, document: Mapping[str, Any]) -> str:
        return f"event: {document['type']}\n{super().written(document)}"


class Guard:
    """Middleware: who may ask. Outermost, so that nothing is read for those who may not.

    Pages of other sites must not use a server on this machine: a name that another site made to point here is refused
    (`hosts`), and no answer may be read from another origin unless it is in `origins`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: bytes | None,
        open_paths: frozenset[str],
        hosts: frozenset[str] | None,
        origins: frozenset[str],
    ) -> None:
        """`key`: None: anyone. `open_paths` need no key. `hosts`: names that the server goes by; None: any."""
        self._app, self._key, self._open, self._hosts, self._origins = app, key, open_paths, hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        shared = dict(self._shared(headers, scope["method"]))

        async def send_shared(message: Any) -> None:
            if shared and message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in shared.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        refusal = self._refusal(headers, scope["path"])
        if shared and scope["method"] == "OPTIONS":
            await Response(status_code=204)(scope, receive, send_shared)
        elif refusal is not None:
            await refusal.response(scope["path"])(scope, receive, send_shared)
        else:
            await self._app(scope, receive, send_shared)

    def _refusal(self, headers: Headers, path: str) -> ApiError | None:
        name = host_name(headers.get("host", ""))
        if self._hosts is not None and name not in self._hosts and not _is_address(name):
            return ApiError(
                403, f"the server does not go by the name {name[:200]!r}; --allow-origin http://NAME adds it"
            )
        if self._key is None or path in self._open:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given if scheme.lower() == "bearer" else headers.get("x-api-key", "")  # which Anthropic's clients send
        if hmac.compare_digest(given.strip().encode("latin-1"), self._key):
            return None
        message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
        return ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})

    def _shared(self, headers: Headers, method: str) -> Iterator[tuple[str, str]]:
        """CORS headers, for an origin that may: with whatever headers it likes, as clients send some of their own."""
        origin = headers.get("origin", "")
        if origin not in self._origins and not ("*" in self._origins and origin):
            return
        yield "Access-Control-Allow-Origin", origin
        yield "Vary", "Origin"
        if method == "OPTIONS":
            yield "Access-Control-Allow-Methods", "GET, POST"
            yield "Access-Control-Allow-Headers", headers.get("access-control-request-headers", "")


class ErrorsAreAnswers:
    """Middleware: whatever goes wrong unforeseen is answered by an error object, and given to `report`."""

    def __init__(self, app: ASGIApp, *, report: Callable[[BaseException], None]) -> None:
        self._app, self._report = app, report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Any) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            pass
        except Exception as error:
            self._report(error)
            if not started:
                message = f"the server failed ({type(error).__name__})"
                await ApiError(500, message, code="internal_error").response(scope["path"])(scope, receive, send)


def host_name(host: str) -> str:
    """The name in a Host header, or behind an origin's scheme, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
