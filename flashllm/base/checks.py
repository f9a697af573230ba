"""Checks of single JSON values, each a ValueError that names the field and the value. Knows no format."""

import sys
from typing import Any


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


def check_list(value: Any, where: str, max_length: int = 2**16) -> list[Any]:
    """`value` as a list of at most `max_length` items."""
    if not isinstance(value, list) or len(value) > max_length:
        raise ValueError(f"{where} must be a list of at most {max_length} items")
    return value


def check_int(name: str, value: Any, low: int, high: int) -> None:
    """An integer from `low` to `high`; true and 1.0 are refused."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, not {_short(value)}")


def is_number(value: Any) -> bool:
    """True for an integer or a float that is finite and not beyond what a float can be; true is none."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def check_str(name: str, value: Any, max_length: int) -> str:
    """`value` as a text of at most `max_length` characters."""
    if type(value) is not str or len(value) > max_length or not _is_unicode(value):
        raise ValueError(f"{name} must be a text of at most {max_length} characters, not {_short(value)}")
    return value


def check_file_name(name: Any) -> None:
    """The name of a file directly in a directory: no separator, no `..`, nothing a file system cannot hold."""
    plain = type(name) is str and _is_unicode(name) and 0 < len(name.encode()) <= 255 and name not in (".", "..")
    if not plain or any(character in name for character in "/\\\0"):
        raise ValueError(f"{_short(name)} is not the name of a file directly in the directory")


def _is_unicode(text: str) -> bool:
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in text)  # JSON can spell lone surrogates


def _short(value: Any) -> str:
    text = ascii(value) if not isinstance(value, int) or abs(value) < 2**64 else "a huge integer"
    return text if len(text) <= 80 else text[:77] + "..."
