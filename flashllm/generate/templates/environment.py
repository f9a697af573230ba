"""Jinja's sandbox with the names that transformers gives to chat templates, and the loop of the process it runs in.

`renderer.py` starts that process. It takes its limits before it reads a template, and ends with its standard input, a
socket. Imports Jinja, and of this package the form of frames alone.
"""

import datetime
import functools
import json
import os
import resource
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from flashllm.generate.templates.frames import LENGTH_NBYTES, MEMORY_STATUS, Kind

_MAX_MESSAGE = 1000  # characters
_MAX_WIDTH = 1_000_000  # that a filter or a method pads, cuts or rounds to
_WIDE_FILTERS = ("batch", "center", "indent", "round", "slice", "tojson", "wordwrap")
_WIDE_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})


class Refused(jinja2.TemplateError):
    """The template itself says that it cannot render this conversation (`raise_exception`)."""


class _Compiler(CodeGenerator):
    """Jinja's, without computing what does not change: a template computes when it renders, or compiling had no end."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class Environment(ImmutableSandboxedEnvironment):
    """The sandbox with transformers' names, without text of no use in a conversation.

    Lists may grow, as in templates for Kimi: what there is to change is a copy, of this conversation. `fromjson`, of
    llama.cpp, is in those for Step.
    """

    code_generator_class = _Compiler

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols])
        self.filters["tojson"], self.filters["fromjson"] = _to_json, json.loads
        self.filters |= {name: _sized(self.filters[name]) for name in _WIDE_FILTERS}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (isinstance(obj, list) and attr == "append") or super().is_safe_attribute(obj, attr, value)

    def call(self, context: jinja2.runtime.Context, function: Any, /, *args: Any, **values: Any) -> Any:
        if getattr(function, "__name__", None) in _WIDE_METHODS:
            _check_widths(*args, *values.values())
        return super().call(context, function, *args, **values)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks answers for training: what is inside is rendered."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """Jinja's `namespace`, without names that Python uses for itself."""

    def __init__(*args: Any, **values: Any) -> None:  # any keyword is a name, "self" too
        self, *given = args
        for name in dict(*given, **values):
            _check_name(name)
        Namespace.__init__(self, *given, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _sized(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses huge widths. Its first argument is what it filters, or Jinja's own."""

    @functools.wraps(function)  # with Jinja's marks
    def checked(first: Any, /, *args: Any, **values: Any) -> Any:
        _check_widths(*args, *values.values())
        return function(first, *args, **values)

    return checked


def _check_widths(*values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MAX_WIDTH:
            raise jinja2.TemplateRuntimeError(f"a width or a number of parts is larger than {_MAX_WIDTH}")


def _raise_exception(message: str) -> None:
    raise Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class _Dict:
    """`dict`, without what a type has beside."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def main(growth_nbytes: int) -> None:
    """Answer requests until standard input ends. `growth_nbytes`: of address space, more than is in use now."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process, whatever it computes
    space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + growth_nbytes
    for limit, value in ((resource.RLIMIT_AS, space), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(limit, (value, value))
    environment = Environment()
    compiled = functools.lru_cache(maxsize=2)(environment.from_string)  # with tools, and without
    _write(Kind.READY, b"")
    try:
        while _answer(compiled):
            pass
    except MemoryError:
        os._exit(MEMORY_STATUS)


def _answer(compiled: Callable[[str], jinja2.Template]) -> bool:
    """Answer the next request. False: there is none."""
    if (raw := _read()) is None:
        return False
    request = json.loads(raw)
    del raw
    kind, text = _render(compiled, request)
    data = text.encode("utf-8", "surrogatepass")
    if len(data) > request["max_nbytes"]:
        kind, data = Kind.FAILED, f"its text is longer than {request['max_nbytes']} bytes".encode()
    _write(kind, data)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return True


def _render(compiled: Callable[[str], jinja2.Template], request: Mapping[str, Any]) -> tuple[Kind, str]:
    """The conversation's text, or why there is none. Without messages nothing is rendered."""
    signal.setitimer(signal.ITIMER_REAL, request["compile_s"])
    try:
        template = compiled(request["source"])
    except MemoryError:
        raise
    except Exception as error:
        return Kind.INVALID, _message(error)
    if request["messages"] is None:
        return Kind.TEXT, ""
    signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
    try:
        return Kind.TEXT, template.render(request["values"], messages=request["messages"])
    except MemoryError:
        raise
    except Refused as error:
        return Kind.REFUSED, _message(error)
    except Exception as error:  # the template can raise anything that Python can
        return Kind.FAILED, _message(error)


def _message(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:_MAX_MESSAGE]


def _read() -> bytearray | None:
    """A frame's bytes; None at the end."""
    length = _read_bytes(LENGTH_NBYTES)
    return None if length is None else _read_bytes(int.from_bytes(length, "little"))


def _read_bytes(count: int) -> bytearray | None:
    data, at = bytearray(count), 0
    while at < count:
        if not (got := os.readv(0, [memoryview(data)[at:]])):
            return None
        at += got
    return data


def _write(kind: Kind, data: bytes) -> None:
    for part in ((len(data) + 1).to_bytes(LENGTH_NBYTES, "little") + kind.encode(), data):
        at = 0
        while at < len(part):
            at += os.write(0, memoryview(part)[at:])
