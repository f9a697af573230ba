"""`flashllm doctor [FOLDER]`: what this machine has for running models, what it lacks, and what to do about it.

Reads and probes only: nothing is changed, but for one small file that is written to the folder and removed again.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from flashllm.commands.options import add_json, add_store

State = Literal["good", "note", "bad"]

_SMALL_MEMORY = 2 * 10**9
_SMALL_DISK = 20 * 10**9
_NEEDED_FOR = {  # package of an extra -> what it is for
    "starlette": "flashllm serve",
    "torch": "FlashModel, pickled weights and tokenizers without tokenizer.json",
    "datasets": "training predictors",
    "scipy": "planning large batches",
}
_MARKS: dict[State, str] = {"good": "ok  ", "note": "note", "bad": "BAD "}


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    state: State
    found: str
    advice: str = ""  # what to do, where the state is not good


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit status 1 where something is bad: where a model would run wrong or not at all."
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        type=Path,
        help="where models lie or will (default: where converted models are kept)",
    )
    add_json(parser)
    add_store(parser)


def main(args: argparse.Namespace) -> int:
    """Print a line a finding, and under it what to do."""
    from flashllm.base.command_line import print_json
    from flashllm.base.text import one_line
    from flashllm.base.user_dirs import user_cache_dir
    from flashllm.errors import UsageError
    from flashllm.profile.store import store_path

    if args.folder is not None and not args.folder.is_dir():
        raise UsageError(f"{args.folder}: there is no such folder")
    folder = user_cache_dir() if args.folder is None else args.folder
    store = store_path() if args.store is None else args.store
    findings = list(examine(folder, store))
    if args.json:
        print_json({"findings": [asdict(each) for each in findings]})
    else:
        width = max(len(each.what) for each in findings)
        for each in findings:
            print(f"{_MARKS[each.state]}  {each.what:<{width}}  {one_line(each.found)}")
            if each.advice:
                print(f"{'':{width + 8}}{one_line(each.advice)}")
    return int(any(each.state == "bad" for each in findings))


def examine(folder: Path, store: Path) -> Iterator[Finding]:
    """Everything, in the order in which it matters."""
    yield _version()
    yield _processor()
    yield from _memory()
    yield from _drive(folder)
    yield _io_uring()
    yield _profile(folder, store)
    yield from _packages()


def _version() -> Finding:
    import platform

    import flashllm

    system = f"{platform.system()} on {platform.machine()}"
    found = f"{flashllm.__version__}, Python {platform.python_version()}, {system}"
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        return Finding("flashllm", "good", found)
    return Finding("flashllm", "note", found, "only Linux on x86-64 is tested")


def _processor() -> Finding:
    from flashllm._core import best_simd_level
    from flashllm.base.machine import num_cores

    level, cores = best_simd_level(), num_cores()
    found = f"{cores} core{'s' * (cores != 1)}, vector instructions: {level}"
    if level == "scalar":
        return Finding("processor", "note", found, "without AVX2 products take several times as long")
    return Finding("processor", "good", found)


def _memory() -> Iterator[Finding]:
    import psutil

    from flashllm.base.machine import available_nbytes, cgroup_limit_nbytes
    from flashllm.base.units import format_size

    free, memory, limit = available_nbytes(), psutil.virtual_memory(), cgroup_limit_nbytes()
    found = f"{format_size(free)} free of {format_size(memory.total)}; a run without --memory takes four fifths of that"
    if free < _SMALL_MEMORY:
        yield Finding("memory", "note", found, "close other programs, or start with a small model")
    else:
        yield Finding("memory", "good", found)
    if limit is not None:
        yield Finding("memory limit", "good", f"{format_size(limit)} for this process's control group; runs keep to it")
    swap = psutil.swap_memory()
    if swap.used > memory.total / 10:
        advice = "something swaps: reads of models will be slow until it ends"
        yield Finding("swap", "note", f"{format_size(swap.used)} in use", advice)


def _drive(folder: Path) -> Iterator[Finding]:
    import shutil

    from flashllm.base.units import format_size
    from flashllm.profile.store import device_of

    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    key = device_of(place)
    free = shutil.disk_usage(place).free
    found = f"{place} on {key.device} ({key.filesystem}), {format_size(free)} free"
    if free < _SMALL_DISK:
        yield Finding("drive", "note", found, "a model of 7 billion parameters takes 14 GB, twice that to convert it")
    else:
        yield Finding("drive", "good", found)
    yield _direct_reads(place)


def _direct_reads(place: Path) -> Finding:
    import tempfile

    from flashllm._core import DirectFile

    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".flashllm-") as file:
            file.write(bytes(1 << 16))
            file.flush()
            opened = DirectFile(file.name)
            if opened.direct:
                found = f"yes, in units of {opened.offset_alignment} bytes"
                return Finding("direct I/O", "good", found)
            reason = opened.fallback_reason
    except OSError as error:
        return Finding("direct I/O", "bad", f"{place} cannot be written: {error.strerror}", "give another FOLDER")
    advice = "reads go through the page cache, whose memory no limit counts; keep models on ext4, xfs or btrfs"
    return Finding("direct I/O", "bad", f"no ({reason})", advice)


def _io_uring() -> Finding:
    from flashllm._core import Reader

    reader = Reader(1, backend="auto", queue_depth=1)
    if reader.backend != "io_uring":
        found = f"not available ({reader.backend_reason}); reads go through threads"
        return Finding("io_uring", "note", found, "containers often forbid it; threads cost processor time")
    return Finding("io_uring", "good", "available")


def _profile(folder: Path, store: Path) -> Finding:
    from flashllm.base.machine import system_name
    from flashllm.profile.machine import LEAST_FILE
    from flashllm.profile.store import find_profile

    profile, problem = find_profile(folder, store)
    again = f"`flashllm calibrate {folder}` takes two minutes; readers and plans then fit the drive"
    if problem is not None:
        return Finding("profile", "bad", problem, f"run `flashllm calibrate {folder}`")
    if profile is None:
        return Finding("profile", "note", "none for this drive; a run that reads takes a quick one", again)
    if not profile.is_fresh(system_name(), LEAST_FILE):
        found = f"of {profile.made[:10]}: older than a month, or of another system, or of a small file"
        return Finding("profile", "note", found, again)
    if not profile.steady or profile.remembers:
        why = "the drive did not keep its rate" if not profile.steady else "a cache outside this machine answered"
        return Finding("profile", "note", f"there is one, but {why}", "times may differ from those planned")
    return Finding("profile", "good", f"sequential reads {profile.sequential_bps / 1e9:.2f} GB/s")


def _packages() -> Iterator[Finding]:
    import importlib.util

    from flashllm.errors import EXTRA_OF

    missing = {EXTRA_OF[name]: use for name, use in _NEEDED_FOR.items() if importlib.util.find_spec(name) is None}
    if not missing:
        yield Finding("packages", "good", "all extras are installed")
    for extra, use in missing.items():
        yield Finding("packages", "note", f"{extra}: not installed", f"for {use}: pip install 'flashllm[{extra}]'")
