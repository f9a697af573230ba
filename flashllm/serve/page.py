"""The page at `/`: static files of this package, under a policy that lets them run nothing but themselves."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).with_name("static")
_FILES = {  # path -> file, its type
    "/": ("index.html", "text/html; charset=utf-8"),
    "/static/style.css": ("style.css", "text/css; charset=utf-8"),
    "/static/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/static/events.js": ("events.js", "text/javascript; charset=utf-8"),
    "/static/chart.js": ("chart.js", "text/javascript; charset=utf-8"),
}
PATHS = frozenset(_FILES)  # they hold nothing secret, so they need no key
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes() -> list[Route]:
    return [Route(path, _file) for path in _FILES]


async def _file(request: Request) -> Response:
    name, kind = _FILES[request.url.path]
    return Response((_FOLDER / name).read_bytes(), headers={**_HEADERS, "Content-Type": kind})
