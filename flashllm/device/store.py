"""The device profiles: one JSON file for all drives, in the user's cache directory unless a run names another.

An entry belongs to a file system on a drive as one machine sees it, so that a model on another disk, or a home
directory shared between machines, never borrows numbers that are not its own. The format:

 1. a JSON object with `format_version` 3 and `devices`, a list of entries;
 2. an entry has exactly the keys of `DeviceKey` and `costs`, the object of `DeviceCosts.to_json`;
 3. at most one entry a key; the file is replaced atomically.
"""

import dataclasses
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flashllm.base.checks import check_keys, check_list, check_str
from flashllm.base.files import locked_directory, read_json_object, write_atomically
from flashllm.base.machine import num_cores
from flashllm.base.user_dirs import user_cache_dir
from flashllm.device.costs import DeviceCosts
from flashllm.errors import FormatError

_VERSION = 3


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class DeviceKey:
    """A file system on a drive, seen from a machine."""

    machine: str
    device: str  # as the system's list of mounts calls it
    filesystem: str

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_str(field.name, getattr(self, field.name), 4096)

    def __str__(self) -> str:
        return f"{self.device} ({self.filesystem}) on {self.machine}"


def device_of(path: Path) -> DeviceKey:
    """The file system on which `path`, or the nearest directory above it that exists, lies."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    number = os.stat(path).st_dev
    machine = f"{platform.node()}, {num_cores()} cores"
    # The last mount wins: an earlier one over the same directory is hidden by it.
    for mount in reversed(psutil.disk_partitions(all=True)):
        try:
            if os.stat(mount.mountpoint).st_dev == number:
                return DeviceKey(machine=machine, device=mount.device, filesystem=mount.fstype)
        except OSError:
            continue  # a mount that we may not look at is not where the path is
    return DeviceKey(machine=machine, device=f"{os.major(number)}:{os.minor(number)}", filesystem="unknown")


def load_costs(store: Path, key: DeviceKey) -> DeviceCosts | None:
    """The device profile of `key`; None without one. FormatError where the file is damaged, FlashIOError where it
    cannot be read."""
    return _load(store).get(key)


def save_costs(store: Path, key: DeviceKey, costs: DeviceCosts) -> str | None:
    """Store the device profile of `key` beside those of other drives. Returns a line for the user where a damaged file
    was replaced, else None. OSError and FlashIOError pass through."""
    store.parent.mkdir(parents=True, exist_ok=True)
    with locked_directory(store.parent, f"{store}: another process is writing it; try again"):
        problem = None
        try:
            entries = _load(store)
        except FormatError as error:
            entries, problem = {}, f"{error}; it was replaced"
        entries[key] = costs
        devices = [{**dataclasses.asdict(one), "costs": entries[one].to_json()} for one in sorted(entries)]
        document = {"format_version": _VERSION, "devices": devices}
        write_atomically(store, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
        return problem


def _load(store: Path) -> dict[DeviceKey, DeviceCosts]:
    if not store.exists():
        return {}
    try:
        document = check_keys(read_json_object(store), ("format_version", "devices"), "the store")
        if document["format_version"] != _VERSION:
            raise ValueError(f"format_version must be {_VERSION}, not {str(document['format_version'])[:80]!r}")
        return dict(_entry(value) for value in check_list(document["devices"], "devices"))
    except ValueError as error:
        raise FormatError(f"{store}: {error}; run `flashllm calibrate` again") from error


def _entry(value: Any) -> tuple[DeviceKey, DeviceCosts]:
    names = tuple(field.name for field in dataclasses.fields(DeviceKey))
    fields = check_keys(value, (*names, "costs"), "devices")
    return DeviceKey(**{name: fields[name] for name in names}), DeviceCosts.from_json(fields["costs"])


def device_store_path() -> Path:
    """Where device profiles are kept, unless a run names another file."""
    return user_cache_dir() / "devices.json"
