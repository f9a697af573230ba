"""The profiles of this user's machines: one JSON file in the cache directory, an entry for each drive and dtype.

1. a JSON object with `format_version` 1 and `profiles`, a list of entries;
2. an entry has exactly `machine`, `device`, `filesystem` (flashllm/device/store.py), and `hardware`: the constants;
3. at most one entry for each of these with a dtype; the file is replaced atomically.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from flashllm.base.checks import check_keys, check_list
from flashllm.base.files import locked_directory, read_json_object, write_atomically
from flashllm.base.user_dirs import user_cache_dir
from flashllm.device.store import DeviceKey, device_of
from flashllm.errors import FormatError
from flashllm.offload.machine.hardware import Hardware

_VERSION = 1
_KEY = tuple(field.name for field in dataclasses.fields(DeviceKey))

Profiles = dict[tuple[DeviceKey, str], Hardware]  # by drive and dtype


def store_path() -> Path:
    """Where profiles are kept, unless a run names another file."""
    return user_cache_dir() / "offload.json"


def find_profile(folder: Path, dtype: str, store: Path | None = None, *, device: str | None = None) -> Hardware | None:
    """The profile of the drive that `folder` lies on, measured with `dtype`, else with another; None without one.

    With `device` ("cpu" or "cuda") it is one of a machine whose device tier that is.

    FormatError where the store is damaged, FlashIOError where it cannot be read.
    """
    profiles = _load(store or store_path())
    drive = device_of(folder)
    found = {
        one[1]: profiles[one] for one in sorted(profiles) if one[0] == drive and device in (None, profiles[one].device)
    }
    return found.get(dtype, next(iter(found.values()), None))


def save_profile(folder: Path, hardware: Hardware, store: Path | None = None) -> None:
    """Keep the profile of the drive that `folder` lies on. OSError and FlashIOError pass through; a damaged store is
    replaced."""
    path = store or store_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked_directory(path.parent, f"{path}: another process is writing it; try again"):
        try:
            profiles = _load(path)
        except FormatError:
            profiles = {}
        profiles[device_of(folder), hardware.dtype or ""] = hardware
        entries = [
            {**dataclasses.asdict(key), "hardware": profiles[key, dtype].to_json()} for key, dtype in sorted(profiles)
        ]
        document = {"format_version": _VERSION, "profiles": entries}
        write_atomically(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())


def _load(path: Path) -> Profiles:
    if not path.exists():
        return {}
    try:
        document = check_keys(read_json_object(path), ("format_version", "profiles"), "the store")
        if document["format_version"] != _VERSION:
            raise ValueError(f"format_version must be {_VERSION}, not {str(document['format_version'])[:80]!r}")
        return dict(_entry(value, path) for value in check_list(document["profiles"], "profiles"))
    except ValueError as error:
        raise FormatError(f"{path}: {error}; run `flashllm offload plan --profile` again") from error


def _entry(value: Any, path: Path) -> tuple[tuple[DeviceKey, str], Hardware]:
    fields = check_keys(value, (*_KEY, "hardware"), "profiles")
    hardware = Hardware.from_json(fields["hardware"], where=str(path))
    return (DeviceKey(**{name: fields[name] for name in _KEY}), hardware.dtype or ""), hardware
