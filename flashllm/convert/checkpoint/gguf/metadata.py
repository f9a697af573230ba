"""A GGUF file's metadata, each value read as what it must be: a writer may have put anything there.

FormatError names the file and the key where one is missing or is something else. Knows no key.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flashllm.errors import FormatError, UnsupportedModelError

_MAX_INTEGER = 2**31 - 1


class Metadata:
    """The values by key. `default` is what a missing one is; without it a value must be there."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self._values, self._path = values, path

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = _MAX_INTEGER) -> int:
        """An integer from `least` to `most`, for all layers."""
        value = self._for_all_layers(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(key, f"an integer from {least} to {most}", value)
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = False) -> float:
        """A number that fp32 has, as short as it allows, for all layers."""
        value = self._for_all_layers(key, default)
        short = _shortest(value) if type(value) in (int, float) else math.nan
        if not math.isfinite(short) or (positive and short <= 0):
            raise self._wrong(key, "a finite number" + (" above 0" if positive else ""), value)
        return short

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._for_all_layers(key, default)
        if type(value) is not bool:
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text", value)
        return value

    def texts(self, key: str) -> list[str]:
        return self._list(key, "texts", None, lambda each: isinstance(each, str))

    def integers(self, key: str, count: int) -> list[int]:
        return self._list(key, "integers", count, lambda each: type(each) is int)

    def integers_of_layers(self, key: str, count: int, *, least: int = 1) -> list[int]:
        """An integer from `least` on for each of `count` layers: a list, or one for all."""
        values = self._value(key)
        values = self.integers(key, count) if isinstance(values, list) else [values] * count
        if any(type(each) is not int or not least <= each <= _MAX_INTEGER for each in values):
            raise self._wrong(key, f"integers from {least} to {_MAX_INTEGER}", values)
        return values

    def flags(self, key: str, count: int) -> list[bool]:
        """True or false for each of `count` layers: some files have 1 and 0."""
        values = self._list(key, "true and false", count, lambda each: type(each) in (bool, int) and each in (0, 1))
        return list(map(bool, values))

    def numbers(self, key: str, count: int) -> list[float]:
        return self._list(key, "finite numbers", count, lambda each: type(each) in (int, float) and math.isfinite(each))

    def deviations(self, key: str, count: int) -> list[float]:
        """So many numbers, of which some may be minus infinity."""
        return self._list(key, "numbers", count, lambda each: type(each) in (int, float) and each < math.inf)

    def _value(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key, default)
        if value is None:
            raise FormatError(f"{self._path}: the metadata lacks {key}")
        return value

    def _for_all_layers(self, key: str, default: Any) -> Any:
        """The value; of a list, which has one for each layer, that of all but those with 0, which have no such part."""
        value = self._value(key, default)
        if not isinstance(value, list):
            return value
        given = [each for each in value if each is False or each != 0] or value
        if not given or any(each != given[0] for each in given):
            raise UnsupportedModelError(f"{self._path}: layers that differ ({key}) are not supported")
        return given[0]

    def _list(self, key: str, what: str, count: int | None, fits: Callable[[Any], bool]) -> list[Any]:
        value = self._value(key)
        if not isinstance(value, list) or not value or not all(map(fits, value)):
            raise self._wrong(key, f"a list of {what}", value)
        if count is not None and len(value) != count:
            raise FormatError(f"{self._path}: {key} must have {count} {what}, not {len(value)}; get the file again")
        return value

    def _wrong(self, key: str, what: str, value: Any) -> FormatError:
        return FormatError(f"{self._path}: {key} must be {what}, not {value!r:.80}")


def _shortest(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))
