"""Dataclasses of rates as JSON: objects with a key a field, read back by the fields' types."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from flashllm.base.checks import check_keys, check_list
from flashllm.profile.rates import RateCurve


def to_json(value: Any) -> Any:
    """The JSON that `from_json` reads."""
    if isinstance(value, RateCurve):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: to_json(each) for name, each in value.items()}
    return [to_json(each) for each in value] if isinstance(value, tuple) else value


def from_json(kind: Any, value: Any, where: str) -> Any:
    """The value of a dataclass's field of type `kind`, from JSON. A key whose field has a default may be missing.

    ValueError names what is missing, unknown or no list or object. Plain values are the dataclass's own to check.
    """
    options = [each for each in typing.get_args(kind) if each is not type(None)]
    if type(None) in typing.get_args(kind):
        return None if value is None else from_json(options[0], value, where)
    if kind is RateCurve:
        try:
            return RateCurve.from_json(value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if typing.get_origin(kind) is tuple:
        return tuple(from_json(options[0], each, where) for each in check_list(value, where))
    if typing.get_origin(kind) is Mapping:
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be an object")
        return {name: from_json(options[1], each, where) for name, each in value.items()}
    if not dataclasses.is_dataclass(kind):
        return value
    fields = {field.name: field for field in dataclasses.fields(kind)}
    absent = () if not isinstance(value, dict) else (name for name in fields if name not in value)
    optional = {name for name in absent if _has_default(fields[name])}
    found = check_keys(value, tuple(name for name in fields if name not in optional), where)
    return typing.cast(Any, kind)(**{name: from_json(fields[name].type, each, name) for name, each in found.items()})


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
