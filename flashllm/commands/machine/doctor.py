"""`flashllm doctor [FOLDER]`: what this machine has for running models, what it lacks, and what to do about it.

Reads and probes only: nothing is changed, but for one small file that is written to the folder and removed again.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flashllm.commands.options import add_json, add_store

_SMALL_MEMORY = 2 * 10**9
_SMALL_DISK = 20 * 10**9
_NEEDED_FOR = {  # package of an extra -> what it is for
    "torch": "FlashModel, pickled weights and tokenizers without tokenizer.json",
    "transformers": "FlashModel and tokenizers without tokenizer.json",
    "starlette": "flashllm serve",
    "datasets": "training predictors",
    "scipy": "planning large batches",
}


class Finding(NamedTuple):
    what: str
    found: str
    advice: str  # what to do, where the state is not good
    state: str  # good, note or bad


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit status 1 where something is bad: where a model would run wrong or not at all."
    where = "where models lie or will (default: where converted models are kept)"
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, help=where)
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
    findings = list(examine(args.folder or user_cache_dir(), args.store or store_path()))
    if args.json:
        print_json({"findings": [each._asdict() for each in findings]})
    else:
        for each in findings:
            print(f"{each.state:<4}  {each.what:<12}  {one_line(each.found)}")
            if each.advice:
                print(f"{'':20}{one_line(each.advice)}")
    return int(any(each.state == "bad" for each in findings))


def examine(folder: Path, store: Path) -> Iterator[Finding]:
    """Everything, in the order in which it matters."""
    import platform
    import shutil
    from importlib.metadata import PackageNotFoundError, version

    import psutil

    import flashllm
    from flashllm._core import Reader, best_simd_level
    from flashllm.base.machine import available_nbytes, cgroup_limit_nbytes, num_cores, system_name
    from flashllm.base.units import format_size
    from flashllm.errors import EXTRA_OF
    from flashllm.profile.machine import LEAST_FILE
    from flashllm.profile.store import device_of, find_profile

    def finding(what: str, found: str, lacks: bool, advice: str, state: str = "note") -> Finding:
        return Finding(what, found, advice, state) if lacks else Finding(what, found, "", "good")

    system = f"{platform.system()} on {platform.machine()}"
    found = f"{flashllm.__version__}, Python {platform.python_version()}, {system}"
    yield finding("flashllm", found, system != "Linux on x86_64", "only Linux on x86-64 is tested")
    level = best_simd_level()
    found = f"cores: {num_cores()}, vector instructions: {level}"
    yield finding("processor", found, level == "scalar", "without AVX2 products take several times as long")
    free, limit = available_nbytes(), cgroup_limit_nbytes()
    found = f"{format_size(free)} free of {format_size(psutil.virtual_memory().total)}"
    found += "" if limit is None else f", {format_size(limit)} for this process's control group"
    found += "; a run without --memory takes four fifths of what is free"
    yield finding("memory", found, free < _SMALL_MEMORY, "close other programs, or start with a small model")
    reader = Reader(1, backend="auto", queue_depth=1)
    found = reader.backend + (f": {reader.backend_reason}" if reader.backend_reason else "")
    advice = "containers often forbid io_uring; threads cost processor time"
    yield finding("reader", found, reader.backend != "io_uring", advice)

    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    key, free = device_of(place), shutil.disk_usage(place).free
    found = f"{place} on {key.device} ({key.filesystem}), {format_size(free)} free"
    advice = "a model of 7 billion parameters takes 14 GB, twice that to convert it"
    yield finding("drive", found, free < _SMALL_DISK, advice)
    yield finding("direct I/O", *_direct_reads(place), "bad")
    profile, problem = find_profile(folder, store)
    again = f"`flashllm calibrate {folder}` takes two minutes; readers and plans then fit the drive"
    if profile is None:
        found = problem or "none for this drive; a run that reads takes a quick one"
        yield finding("profile", found, True, again, "note" if problem is None else "bad")
    else:
        found = f"of {profile.made[:10]}, sequential reads {profile.sequential_bps / 1e9:.2f} GB/s"
        usual = profile.steady and not profile.remembers
        found += "" if usual else "; the drive did not keep its rate, or a cache outside this machine answered"
        yield finding("profile", found, not (usual and profile.is_fresh(system_name(), LEAST_FILE)), again)

    for name, use in _NEEDED_FOR.items():
        try:
            yield finding(name, version(name), False, "")
        except PackageNotFoundError:
            yield finding(name, "not installed", True, f"for {use}: pip install 'flashllm[{EXTRA_OF[name]}]'")


def _direct_reads(place: Path) -> tuple[str, bool, str]:
    """The finding, whether direct reads lack there, and what to do then."""
    import tempfile

    from flashllm._core import DirectFile

    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".flashllm-") as file:
            file.write(bytes(1 << 16))
            file.flush()
            opened = DirectFile(file.name)
    except OSError as error:
        return f"{place} cannot be written: {error.strerror}", True, "give another FOLDER"
    found = f"in units of {opened.offset_alignment} bytes" if opened.direct else f"no: {opened.fallback_reason}"
    advice = "reads go through the page cache, whose memory no limit counts; keep models on ext4, xfs or btrfs"
    return found, not opened.direct, advice
