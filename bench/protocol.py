"""One protocol, to compare a model on a machine with others'; in minutes.

    python bench/protocol.py MODEL --memory 7GB
    python bench/protocol.py FILE.gguf --memory 7GB --beside llama.cpp

Prompts of 128 and of 2,048 tokens and 128 tokens behind each, from one text (the Apache licence), cold and warm, every
engine in a process of its own (`protocol_engine.py`), under a limit that the kernel enforces where --memory gives one
and control groups can be made; what the drive is, and what it does at that size of request. Prints Markdown to paste;
the last line is one JSON document.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from drive import answers, kind_of_drive
from memory_group import GroupError, drop_page_cache, run_capped
from protocol_engine import RUNS

import flashllm
from flashllm import _core
from flashllm.base.command_line import say
from flashllm.base.machine import num_cores, system_name
from flashllm.base.text import inert, one_line
from flashllm.base.units import format_size, parse_size
from flashllm.commands.asked import find_model
from flashllm.commands.runtime import profile_drive
from flashllm.config import RunConfig
from flashllm.errors import FlashError, FormatError, UsageError
from flashllm.format.model_dir import ModelDir
from flashllm.generate.tokenizer import Tokenizer
from flashllm.profile.costs import ReaderChoice
from flashllm.profile.reads import file_to_read
from flashllm.profile.store import device_of

PROMPTS, TOKENS = (128, 2048), 128
ENGINE = (sys.executable, str(Path(__file__).with_name("protocol_engine.py")))  # what runs one
_PARTS = ("total", "io", "memory", "compute", "other")  # of a step's times; llama.cpp's have the first alone
_SCRATCH_NBYTES = 4 << 30  # read at random where the model's own file is small
# Drives that the arithmetic is done for: bytes a second in sequence, and random reads of 4 KiB a second with many under
# way, as their makers state them.
_ELSEWHERE = (("SATA SSD", 0.53e9, 90e3), ("NVMe SSD, PCIe 3", 3.2e9, 400e3), ("NVMe SSD, PCIe 4", 6.5e9, 800e3))


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Run the protocol; the JSON document.

    UsageError where the peer cannot run beside; FlashError where an engine of ours fails.
    """
    peer = None if args.beside is None else _file_for_peer(args.model)
    path = find_model(args)
    model = ModelDir.open(path)
    profile_drive(args, path, RunConfig(memory=args.memory, threads=args.threads))
    options = {"memory": args.memory, "threads": args.threads}
    limit = Limit(args.memory)
    runs, ids = [], text_ids(path, model.block.vocab_size, max(PROMPTS) + TOKENS)
    for turn, prompt in enumerate(PROMPTS):
        if prompt + TOKENS > model.block.context:
            say(f"a prompt of {prompt} tokens is left out: the model's context is {model.block.context}")
            continue
        settings = {"prompt": prompt, "ids": ids[: prompt + TOKENS]}
        engines = [("flashllm", path), *([] if peer is None else [("llama.cpp", peer)])]
        for engine, file in engines[:: 1 if turn % 2 == 0 else -1]:  # no engine has the drive's better minutes
            say(f"{engine}: a prompt of {prompt} tokens")
            own = {**options, "context": prompt + TOKENS + 1} if engine == "flashllm" else options
            run = limit.run({**settings, "engine": engine, "model": str(file.absolute()), "options": own})
            runs.append({"engine": engine, "prompt": prompt, **run})
    if not runs:
        raise UsageError(f"{path}: the model's context of {model.block.context} tokens is too short for the protocol")
    ours = next(run for run in runs if run["engine"] == "flashllm" and "error" not in run)
    in_place = model.manifest.in_place
    lying = [] if in_place is None else [Path(one.path) for one in in_place.files]
    return {
        "benchmark": "report",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "flashllm": flashllm.__version__,
        "machine": {
            "system": system_name(),
            "cores": num_cores(),
            "simd": _core.best_simd_level(),
            "memory_bytes": psutil.virtual_memory().total,
            "load_average": psutil.getloadavg()[0],
        },
        "drive": _drive(model, ours),
        "model": {
            "name": path.absolute().name,
            "model_type": model.architecture.model_type,
            "dtype": model.manifest.dtype,
            "rows": model.manifest.rows.encoding,
            "bytes": sum(one.stat().st_size for one in (*path.iterdir(), *lying) if one.is_file()),
            "peer_file_bytes": None if peer is None else peer.stat().st_size,
        },
        "text": {"tokens": len(ids), "sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest()},
        "memory": args.memory,
        "enforced": limit.enforced,
        "not_enforced": limit.reason,
        "runs": runs,
        "elsewhere": elsewhere(ours),
    }


def _file_for_peer(model: str) -> Path:
    """The GGUF file that both engines run. UsageError where there is none, or no llama.cpp."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise UsageError(
            "--beside llama.cpp needs its Python package: pip install --no-binary llama-cpp-python llama-cpp-python"
        )
    file = Path(model)
    if not (file.is_file() and file.suffix.lower() == ".gguf"):
        raise UsageError("--beside llama.cpp runs the same file: MODEL must be a GGUF file here")
    return file


def text_ids(path: Path, vocab: int, count: int) -> list[int]:
    """The protocol's first `count` ids: of the licence's text, which begins again where it is too short; of a model
    that has no tokenizer 0, 1, 2 ..."""
    try:
        tokenizer = Tokenizer.load(path)
    except FormatError:
        return [index % vocab for index in range(count)]
    ids = tokenizer.encode((Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8"))
    return (ids * -(-count // len(ids)))[:count]


class Limit:
    """Runs engines in processes of their own: capped where a limit is given and can be enforced."""

    def __init__(self, memory: int | None) -> None:
        self._memory = memory
        self.enforced, self.reason = False, None if memory is not None else "no limit was given"

    def run(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The figures of `protocol_engine.py`. FlashError where flashllm fails; of a peer the reason is its result."""
        command = [*ENGINE, json.dumps(settings)]
        with tempfile.TemporaryFile() as output:
            found: dict[str, Any] = {}
            status = None
            if self._memory is not None and self.reason is None:
                try:
                    capped = run_capped(command, self._memory, stdout=output)
                    self.enforced, status = True, capped.returncode
                    found = {"group_peak_bytes": capped.peak_bytes, "kills": capped.kills, "page_cache_dropped": True}
                except GroupError as error:
                    self.reason = str(error)
            if status is None:
                found["page_cache_dropped"] = False
                with contextlib.suppress(GroupError):  # it takes root
                    drop_page_cache()
                    found["page_cache_dropped"] = True
                status = subprocess.run(command, stdout=output, check=False).returncode
            output.seek(0)
            said = output.read().decode()
        lines = said.splitlines()
        try:
            result = json.loads(lines[-1])
        except (IndexError, ValueError):  # it was ended, or ended itself with words of its own
            result = {"error": f"ended with status {status}"}
        if found.get("kills"):
            result = {"error": f"killed: it needs more than {format_size(self._memory or 0)}"}
        if "error" in result and settings["engine"] == "flashllm":
            raise FlashError(f"the measured process failed: {result['error']}")
        measured = result.pop("runs", [])  # none of a peer that failed
        result["runs"] = [{"name": name, **summary(one)} for name, one in zip(RUNS, measured, strict=False)]
        return {**result, **found}


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """A run's prompt, and its tokens: medians of times, means of parts and of what was read."""
    tokens = run["tokens"]
    totals = sorted(token["total_ms"] for token in tokens)
    parts = [part for part in _PARTS if f"{part}_ms" in tokens[0]]
    hits, misses = (sum(token.get(name, 0) for token in tokens) for name in ("hits", "misses"))
    return {
        "prompt": run["prompt"],
        "token_ms": statistics.median(totals),
        "token_ms_p95": totals[int(0.95 * len(totals))],
        "mean_ms": {part: statistics.fmean(token[f"{part}_ms"] for token in tokens) for part in parts},
        "bytes_read": statistics.fmean(token["bytes_read"] for token in tokens),
        "requests": statistics.fmean(token["requests"] for token in tokens) if "requests" in tokens[0] else None,
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "token_ms_each": [round(token["total_ms"], 3) for token in tokens],
    }


def _drive(model: ModelDir, ours: dict[str, Any]) -> dict[str, Any]:
    """The drive of the model's rows: what it is, and what it does at the engine's mean size of request."""
    file, reader = model.rows_file, ReaderChoice(**ours["reader"])
    reads = [one for one in ours["runs"] if one["requests"]]
    size = round(reads[0]["bytes_read"] / reads[0]["requests"]) if reads else model.manifest.rows.stride
    say("the drive is read; where the model is small, a file that is written for that")
    with file_to_read(file, _SCRATCH_NBYTES) as place:
        found = dataclasses.asdict(answers(place, reader, request_nbytes=size))
        found["written_just_before"] = place != file
        found["request_is"] = "the engine's mean" if reads else "a row"
    key = device_of(file)
    return {"kind": kind_of_drive(file), "device": key.device, "filesystem": key.filesystem, **found}


def elsewhere(ours: dict[str, Any]) -> list[dict[str, Any]]:
    """A warm token on other drives, by arithmetic: its reads at their rates, of which as much lies behind products as
    here. None where nothing was read."""
    run = ours["runs"][-1]
    if not run["requests"]:
        return []
    rest = run["mean_ms"]["total"] - run["mean_ms"]["io"]
    found = []
    for name, bps, iops in _ELSEWHERE:
        reads = 1e3 * max(run["bytes_read"] / bps, run["requests"] / iops)
        hidden = min(reads, run["mean_ms"]["compute"]) if ours["mode"] == "dense" else 0.0
        found.append({"drive": name, "token_ms": rest + reads - hidden})
    return found


def markdown(document: dict[str, Any]) -> str:
    """The document as a block to paste."""
    machine, drive, model = document["machine"], document["drive"], document["model"]
    ours = next(run for run in document["runs"] if run["engine"] == "flashllm")
    versions = {run["version"] for run in document["runs"] if "version" in run}
    beside = f"; llama-cpp-python {', '.join(versions)}" if versions else ""
    limit = "none given" if document["memory"] is None else format_size(document["memory"])
    if document["memory"] is not None:
        limit += ", enforced by the kernel" if document["enforced"] else f", NOT enforced: {document['not_enforced']}"
    peer = "" if model["peer_file_bytes"] is None else f"; GGUF file {format_size(model['peer_file_bytes'])}"
    rows = [
        ("engine", f"flashllm {document['flashllm']}, mode {ours['mode']}, {ours['threads']} threads{beside}"),
        (
            "machine",
            f"{machine['system']}; {machine['cores']} cores ({machine['simd']}), "
            f"{format_size(machine['memory_bytes'])} of memory, load {machine['load_average']:.1f} at the end",
        ),
        ("drive", _drive_line(drive)),
        ("model", f"{model['model_type']}, rows in {model['rows']}; {format_size(model['bytes'])} on the drive{peer}"),
        ("memory limit", limit),
        ("text", f"{document['text']['tokens']} ids, SHA-256 {document['text']['sha256'][:16]}"),
        *(("note", notice) for notice in ours["notices"]),
    ]
    heading = f"### {model['name']}, {document['made'][:10]}"
    lines = [
        one_line(heading),
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {one_line(what)} |" for name, what in rows),
        "",
    ]
    columns = ["engine", "prompt", "", "load, s", "prompt's pass, s", "ms a token", "95 % within", "stall", "compute"]
    columns += ["read a token", "hits", "peak memory"]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for run in document["runs"]:
        if "error" in run:
            lines.append(f"| {run['engine']} | {run['prompt']} | {one_line(run['error'])} |{' |' * (len(columns) - 3)}")
        for number, one in enumerate(run["runs"]):
            mean, peak = one["mean_ms"], run.get("group_peak_bytes", run["peak_bytes"])
            kept = one["name"] == "cold" and not run.get("page_cache_dropped", True)
            name = "cold, page cache kept" if kept else one["name"]
            cells = [run["engine"], str(run["prompt"]), name, f"{run['load_s']:.2f}" if number == 0 else ""]
            cells += [f"{one['prompt']['total_ms'] / 1e3:.2f}", f"{one['token_ms']:.1f}", f"{one['token_ms_p95']:.1f}"]
            cells += [f"{mean[part]:.1f}" if part in mean else "" for part in ("io", "compute")]
            cells += [format_size(one["bytes_read"]), "" if one["hit_rate"] is None else f"{one['hit_rate']:.1%}"]
            lines.append(f"| {' | '.join([*cells, format_size(peak)])} |")
    if document["elsewhere"]:
        expected = ", ".join(f"{each['drive']} {each['token_ms']:.0f} ms" for each in document["elsewhere"])
        lines += ["", f"By arithmetic, not measured: a warm token on a {expected}."]
    return "\n".join(lines)


def _drive_line(drive: dict[str, Any]) -> str:
    modes = drive["modes"]
    how = f"{modes[0][1] * 1e6:.0f} us" if len(modes) == 1 else " and ".join(
        f"{share:.0%} at {seconds * 1e6:.0f} us" for share, seconds in modes
    )  # fmt: skip
    parts = [
        f"{drive['kind']}, {drive['device']} ({drive['filesystem']}), "
        f"{'direct reads' if drive['direct'] else 'reads through the page cache'}",
        f"4 KiB one at a time over {format_size(drive['span_nbytes'])}: {how} "
        f"({'one mode' if len(modes) == 1 else 'two modes, as where a cache holds a part'}), 99 % within "
        f"{drive['p99_s'] * 1e6:.0f} us",
        f"the same places again {drive['again']:.2g} times as fast",
        f"requests of {format_size(drive['request_nbytes'])}, {drive['request_is']}: {drive['bps'] / 1e9:.2f} GB/s",
    ]
    if drive["written_just_before"]:
        parts.append("the file was written just before: a cache behind the drive may hold it")
    return "; ".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as of `flashllm bench`")
    parser.add_argument("--memory", type=parse_size, help="limit of everything an engine holds")
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--no-profile", action="store_true", help="do not measure the drive before the runs")
    parser.add_argument("--beside", choices=("llama.cpp",), help="the same for llama.cpp on the same GGUF file")
    parser.add_argument("--json", type=Path, help="write the document here too")
    parser.set_defaults(verbose=False)
    args = parser.parse_args(argv)
    try:
        document = report(args)
    except FlashError as error:
        print(f"protocol: {error}", file=sys.stderr)
        return error.exit_status
    print(inert(markdown(document)))
    text = json.dumps(document)
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
