"""Arguments as models write them, to JSON: Python's calls, values without quotes, texts by their declared types."""

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

_KEY = re.compile(r"(?<=[{,])\s*([\w.$-]+)\s*:")
_MOST = 2**63 - 1024  # of 64 bits, that is a double too, as llguidance wants it
_BOUNDS = {"minimum": -_MOST, "maximum": _MOST}
_VALUES = ("const", "enum", "default", "examples")  # of a schema, that are no schemas
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def load(text: str) -> Any:
    """The JSON value `text`. ValueError where it is none; NaN and what nests too deep are none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deep") from None


def is_object(text: str) -> bool:
    """True where `text` is a JSON object."""
    try:
        return isinstance(load(text), dict)
    except ValueError:
        return False


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments as an object; what is none, as its one field "arguments"."""
    return dict(load(text)) if is_object(text) else {"arguments": text}


def dump(value: Any) -> str:
    """`value` as JSON. ValueError for infinite numbers."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def from_bare(text: str, quote: str) -> str | None:
    """JSON of an object whose names have no quotes and whose strings stand between marks; None: it is none."""
    parts = text.split(quote)
    if len(parts) % 2 == 0:
        return None
    made = "".join(_KEY.sub(r'"\1":', part) if at % 2 == 0 else dump(part) for at, part in enumerate(parts))
    return made if is_object(made) else None


def from_python(text: str) -> list[tuple[str, str]] | None:
    """(name, JSON of the arguments) of calls with keywords, alone, in lines, or in a list; None: they are none."""
    try:
        with warnings.catch_warnings(action="ignore"):  # Python's, of odd literals
            body = ast.parse(text.strip()).body
        lines = [line.value if isinstance(line, ast.Expr) else line for line in body]
        calls = [each for line in lines for each in (line.elts if isinstance(line, ast.List) else [line])]
        return [_call(each) for each in calls] or None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _call(node: ast.AST) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with keywords")
    name = ast.unparse(node.func)
    if not re.fullmatch(r"[\w.]+", name):
        raise ValueError("no name")
    values = {each.arg: ast.literal_eval(each.value) for each in node.keywords}
    if None in values:
        raise ValueError("**values")
    return name, dump(values)


def types_of(schema: Any) -> frozenset[str]:
    """The types that a parameter's schema declares; none: any."""
    if not isinstance(schema, Mapping):
        return frozenset()
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    found = {each for each in names if isinstance(each, str)}
    for name in ("anyOf", "oneOf"):
        inner = schema.get(name)
        for each in inner if isinstance(inner, list) else ():
            found |= types_of(each)
    return frozenset(found)


def bounded(schema: Any) -> Any:
    """`schema`, with integers of 64 bits where it says nothing of their size: a small model may write digits without
    end, and few who read JSON take more."""
    if isinstance(schema, list):
        return [bounded(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {name: value if name in _VALUES else bounded(value) for name, value in schema.items()}
    kinds = made.get("type")
    if kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds and "number" not in kinds):
        bounds = {
            name: most for name, most in _BOUNDS.items() if not made.keys() & {name, f"exclusive{name.capitalize()}"}
        }
        given = [made[name] for name in made if name.lower().endswith(("minimum", "maximum"))]
        if all(isinstance(each, int | float) and abs(each) < _MOST for each in given):
            made |= bounds
    return made


def from_text(text: str, types: frozenset[str]) -> str:
    """JSON of an argument that is written without quotes: as it is declared, a text where it is nothing else."""
    plain = text.strip()
    if "string" not in types or ("null" in types and plain in ("null", "None")):
        if types & {"boolean", "null"} and plain.lower() in _WORDS:
            return dump(_WORDS[plain.lower()])
        try:
            load(plain)
        except ValueError:
            return dump(text)
        return plain
    return dump(text)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
