"""Checks of single values of a request, each a `BadRequest` that names the field. Knows no request as a whole."""

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flashllm.base.checks import short
from flashllm.base.files import parse_json
from flashllm.errors import FormatError

MAX_DEPTH = 32  # of objects and lists in a request


class BadRequest(Exception):
    """A request that cannot be meant; the message says why. `param` is the field at fault, where there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@contextmanager
def naming_fields(names: Mapping[str, str]) -> Iterator[None]:
    """A BadRequest within names the field that the client sent: `names` gives it for each of OpenAI's names."""
    try:
        yield
    except BadRequest as error:
        ours = error.param or ""
        if ours not in names:
            raise
        raise BadRequest(str(error).replace(ours, names[ours], 1), param=names[ours]) from None


def text(name: str, value: Any) -> str:
    param = name.replace(": ", ".")
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be a text, not {short(value)}", param=param)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{name} holds half a character (a lone surrogate)", param=param) from None
    return value


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object, not {short(value)}", param=name)
    return value


def objects(name: str, value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, list):
        raise BadRequest(f"{name} must be a list, not {short(value)}", param=name)
    return [mapping(f"{name}[{place}]", each) for place, each in enumerate(value)]


def integer(body: Mapping[str, Any], name: str, low: int, high: int = 2**63 - 1) -> int:
    """The field `name` as a whole number; true and 1.0 are none."""
    value = body[name]
    if type(value) is not int or not low <= value <= high:
        bounds = f"from {low} to {high}" if high < 2**62 else f"of at least {low}"
        raise BadRequest(f"{name} must be an integer {bounds}, not {short(value)}", param=name)
    return value


def number(body: Mapping[str, Any], name: str) -> float:
    value = body[name]
    if type(value) not in (int, float) or not -1e9 <= value <= 1e9:
        raise BadRequest(f"{name} must be a number, not {short(value)}", param=name)
    return float(value)


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """The field `name` as true or false; `default` where there is none."""
    if name not in body:
        return default
    if not isinstance(body[name], bool):
        raise BadRequest(f"{name} must be true or false, not {short(body[name])}", param=name)
    return bool(body[name])


def check_names(body: Mapping[str, Any], known: Container[str]) -> None:
    """That `body` has no field but the `known` ones."""
    for name in body:
        if name not in known:
            raise BadRequest(f"the field {name[:80]!r} is unknown", param=name[:80])


def json_object(raw: bytes, what: str) -> dict[str, Any]:
    """The JSON object `raw`, which messages call `what`."""
    try:
        value = parse_json(raw, what)
    except FormatError as error:
        raise BadRequest(str(error)) from None
    if depth(value) > MAX_DEPTH:
        raise BadRequest(f"{what} is nested more than {MAX_DEPTH} deep")
    if not isinstance(value, dict):
        raise BadRequest(f"{what} must be a JSON object, not {type(value).__name__}")
    return value


def depth(value: Any) -> int:
    """How deep objects and lists are nested, or a number beyond MAX_DEPTH; a bare value has depth 0."""
    found, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        found += 1
        if found > MAX_DEPTH:
            break
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return found
