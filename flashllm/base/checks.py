"""Checks of single JSON values, each a ValueError that names the field and the value; dataclasses as JSON. Knows no
format."""

import dataclasses
import sys
import typing
from collections.abc import Mapping
from typing import Any

_MOST_ITEMS = 2**16  # of a list


def check_keys(value: Any, names: tuple[str, ...], where: str) -> dict[str, Any]:
    """`value` as an object with exactly the keys `names`."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, not {type(value).__name__}")
    for name in names:
        if name not in value:
            raise ValueError(f"{where}: the key {name!r} is missing")
    for name in value:
        if name not in names:
            raise ValueError(f"{where}: the key {name[:80]!r} is unknown")
    return dict(value)


def check_list(value: Any, where: str) -> list[Any]:
    """`value` as a list of at most `_MOST_ITEMS` items."""
    if not isinstance(value, list) or len(value) > _MOST_ITEMS:
        raise ValueError(f"{where} must be a list of at most {_MOST_ITEMS} items")
    return value


def to_json(value: Any) -> Any:
    """The JSON that `from_json` reads: an object with a key a field, or what a value has a `to_plain` for."""
    if hasattr(value, "to_plain"):
        return value.to_plain()
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: to_json(each) for name, each in value.items()}
    return [to_json(each) for each in value] if isinstance(value, tuple) else value


def from_json(kind: Any, value: Any, where: str) -> Any:
    """The value of type `kind`, by whose fields' types JSON is read. A key whose field has a default may be missing.

    ValueError names the place, and what is missing, unknown, no list or object, or refused by a dataclass: plain values
    are the dataclass's own to check.
    """
    options = [each for each in typing.get_args(kind) if each is not type(None)]
    if type(None) in typing.get_args(kind):
        return None if value is None else from_json(options[0], value, where)
    if typing.get_origin(kind) is tuple:
        return tuple(from_json(options[0], each, where) for each in check_list(value, where))
    if typing.get_origin(kind) is Mapping:
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be an object")
        return {name: from_json(options[1], each, f"{where} {name[:80]!r}") for name, each in value.items()}
    if not dataclasses.is_dataclass(kind):
        return value
    if hasattr(kind, "from_plain"):
        return _made(where, kind.from_plain, value)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    absent = () if not isinstance(value, dict) else (name for name in fields if name not in value)
    optional = {name for name in absent if _has_default(fields[name])}
    found = check_keys(value, tuple(name for name in fields if name not in optional), where)
    return _made(where, kind, **{name: from_json(fields[name].type, each, name) for name, each in found.items()})


def _made(where: str, make: Any, *values: Any, **fields: Any) -> Any:
    try:
        return make(*values, **fields)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def check_int(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an integer from `low` to `high`; true and 1.0 are refused."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, not {short(value)}")
    return value


def is_number(value: Any) -> bool:
    """True for an integer or a float that is finite and not beyond what a float can be; true is none."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def check_from_zero(name: str, value: Any) -> None:
    """A number from 0."""
    if not is_number(value) or value < 0:
        raise ValueError(f"{name} must be a number from 0, not {short(value)}")


def check_str(name: str, value: Any, max_length: int) -> str:
    """`value` as a text of at most `max_length` characters."""
    if type(value) is not str or len(value) > max_length or not _is_unicode(value):
        raise ValueError(f"{name} must be a text of at most {max_length} characters, not {short(value)}")
    return value


def check_file_name(name: Any) -> None:
    """The name of a file directly in a directory: no separator, no `..`, nothing a file system cannot hold."""
    plain = type(name) is str and _is_unicode(name) and 0 < len(name.encode()) <= 255 and name not in (".", "..")
    if not plain or any(character in name for character in "/\\\0"):
        raise ValueError(f"{short(name)} is not the name of a file directly in the directory")


def _is_unicode(text: str) -> bool:
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in text)  # JSON can spell lone surrogates


def short(value: Any) -> str:
    """`value` as it is shown in a message: at most 80 ASCII characters."""
    text = ascii(value) if not isinstance(value, int) or abs(value) < 2**64 else "a huge integer"
    return text if len(text) <= 80 else text[:77] + "..."
