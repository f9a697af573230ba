"""What every endpoint needs of HTTP: bodies with a bound, error answers, event streams, and who may ask. No model."""

import asyncio
import contextlib
import hmac
import ipaddress
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from flashllm.serve.forms import error_object

MAX_BODY_NBYTES = 8 << 20
BODY_TIMEOUT_S = 30.0  # a body that has not come by then is given up
KEEP_ALIVE_S = 5.0  # a stream without an event sends a comment so often, or proxies and clients end it
_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code or _CODES.get(status), param, headers

    @property
    def document(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return error_object(str(self), kind=kind, code=self.code, param=self.param)

    def response(self) -> Response:
        """The answer."""
        return JSONResponse(self.document, self.status, headers=self.headers)


async def answer_api_error(request: Request, error: Exception) -> Response:
    """For Starlette: an `ApiError` that an endpoint raised."""
    assert isinstance(error, ApiError)
    return error.response()


async def answer_http_error(request: Request, error: Exception) -> Response:
    """For Starlette: what its router raises: no such path, no such method."""
    assert isinstance(error, HTTPException)
    what = {404: f"there is no {request.url.path[:200]!r} here", 405: f"{request.method} is not possible here"}
    message = what.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, headers=error.headers).response()


async def read_body(request: Request) -> bytes:
    """The JSON body, still as bytes. ApiError where it is too large, too slow, or says that it is something else."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the body must be JSON, with the header `Content-Type: application/json`")
    too_large = ApiError(413, f"the body is larger than {MAX_BODY_NBYTES} bytes", headers={"Connection": "close"})
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared[:20]) > MAX_BODY_NBYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_NBYTES:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:.0f} s") from None
    return bytes(body)


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
    waiting = ""  # what is sent where none comes for a while
    done = ""  # what is sent after the last

    def __init__(
        self, next_document: Callable[[], Awaitable[Mapping[str, Any] | None]], gone: Callable[[], None]
    ) -> None:
        """`next_document` gives None after the last; `gone` is called where the client goes away, or at the end."""
        self.status_code, self.background = 200, None
        self._next, self._gone = next_document, gone
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

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
                            await write(self.waiting)
                            continue
                        if (document := following.result()) is None:
                            break
                        await write(self.form.format(json.dumps(document, ensure_ascii=False)))
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
    waiting = ": still at work\n\n"
    done = "data: [DONE]\n\n"


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
        origin = headers.get("origin", "")
        shared = dict(self._shared(origin, scope["method"]))

        async def send_shared(message: Any) -> None:
            if shared and message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in shared.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        refusal = self._refusal(headers, scope["path"])
        if shared and scope["method"] == "OPTIONS":
            await Response(status_code=204)(scope, receive, send_shared)
        elif refusal is not None:
            await refusal.response()(scope, receive, send_shared)
        else:
            await self._app(scope, receive, send_shared)

    def _refusal(self, headers: Headers, path: str) -> ApiError | None:
        name = _host_name(headers.get("host", ""))
        if self._hosts is not None and name not in self._hosts and not _is_address(name):
            return ApiError(403, f"the server does not go by the name {name[:200]!r}; --allow-host adds it")
        if self._key is None or path in self._open:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._key):
            return None
        message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
        return ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})

    def _shared(self, origin: str, method: str) -> Iterator[tuple[str, str]]:
        """CORS headers, for an origin that may."""
        if origin not in self._origins and not ("*" in self._origins and origin):
            return
        yield "Access-Control-Allow-Origin", origin
        yield "Vary", "Origin"
        if method == "OPTIONS":
            yield "Access-Control-Allow-Methods", "GET, POST"
            yield "Access-Control-Allow-Headers", "Authorization, Content-Type"


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
                await ApiError(500, message, code="internal_error").response()(scope, receive, send)


def _host_name(host: str) -> str:
    """The name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
