"""The profiles: one JSON file for all drives, in the user's cache directory unless a run names another.

An entry belongs to a file system on a drive as one machine sees it, so that a model on another disk, or a home
directory shared between machines, never borrows numbers that are not its own. The format:

 1. a JSON object with `format_version` 4 and `devices`, a list of entries;
 2. an entry has exactly the keys of `DeviceKey` and `costs`, the object of a `Profile`;
 3. at most one entry a key; the file is replaced atomically.
"""

import dataclasses
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flashllm.base.checks import check_keys, check_list, check_str, from_json, to_json
from flashllm.base.files import is_there, locked_directory, read_json_object, write_atomically
from flashllm.base.machine import num_cores
from flashllm.base.user_dirs import user_cache_dir
from flashllm.errors import FlashError, FormatError
from flashllm.profile.machine import Profile

_VERSION = 4
_WAIT_S = 10.0  # for another process that measures, or writes


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


def find_profile(path: Path, store: Path | None = None) -> tuple[Profile | None, str | None]:
    """The profile of the drive on which `path` lies (None without one), and what is wrong with the store."""
    try:
        return load_profile(store or store_path(), device_of(path)), None
    except FlashError as error:
        return None, f"the profiles cannot be used: {error}"


def load_profile(store: Path, key: DeviceKey) -> Profile | None:
    """The profile of `key`; None without one. FormatError where the file is damaged, FlashIOError where it cannot be
    read."""
    return _load(store).get(key)


def save_profile(store: Path, key: DeviceKey, profile: Profile) -> str | None:
    """Store the profile of `key` with those of other drives. Returns a line for the user where a damaged file was
    replaced, else None. OSError and FlashIOError pass through."""
    return update_profile(store, key, lambda known: profile, wait_s=_WAIT_S)


def update_profile(
    store: Path, key: DeviceKey, make: Callable[[Profile | None], Profile], *, wait_s: float = 0.0
) -> str | None:
    """As `save_profile` of what `make` makes of the profile that is there. No other process is in here meanwhile;
    FlashIOError where one is for longer than `wait_s`."""
    store.parent.mkdir(parents=True, exist_ok=True)
    with locked_directory(store.parent, f"{store}: another process is writing it; try again", wait_s=wait_s):
        problem = None
        try:
            entries = _load(store)
        except FormatError as error:
            entries, problem = {}, f"{error}; it was replaced"
        entries[key] = make(entries.get(key))
        devices = [{**dataclasses.asdict(one), "costs": to_json(entries[one])} for one in sorted(entries)]
        document = {"format_version": _VERSION, "devices": devices}
        write_atomically(store, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
        return problem


def _load(store: Path) -> dict[DeviceKey, Profile]:
    if not is_there(store):
        return {}
    try:
        document = check_keys(read_json_object(store), ("format_version", "devices"), "the store")
        if document["format_version"] != _VERSION:
            raise ValueError(f"format_version must be {_VERSION}, not {str(document['format_version'])[:80]!r}")
        return dict(_entry(value) for value in check_list(document["devices"], "devices"))
    except ValueError as error:
        raise FormatError(f"{store}: {error}; run `flashllm calibrate` again") from error


def _entry(value: Any) -> tuple[DeviceKey, Profile]:
    names = tuple(field.name for field in dataclasses.fields(DeviceKey))
    fields = check_keys(value, (*names, "costs"), "devices")
    return DeviceKey(**{name: fields[name] for name in names}), from_json(
        Profile, fields["costs"], "the device's entry"
    )


def store_path() -> Path:
    """The file of profiles, unless a run names another one."""
    return user_cache_dir() / "profiles.json"
