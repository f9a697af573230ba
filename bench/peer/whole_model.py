"""A GGUF file, run by both engines under enforced limits: a prompt, and tokens behind it.

    python bench/peer/dummy_gguf.py qwen3.6-35b-a3b FILE.gguf
    python bench/peer/whole_model.py FILE.gguf --memory 8GB 12GB 16GB --json OUT.json     # as root

flashllm uses a mixture's file where it lies: everything but the experts is converted once, into FILE.model beside it.
At each limit the engines take turns, each in a process of its own (bench/protocol_engine.py) in a memory
group of exactly that size, entered with a cold page cache: a prompt and tokens, cold, then the same again, warm. Ids
are 0, 1, 2 ... where the file has no vocabulary. llama.cpp takes its turn once for each setting of --peer: "repack" is
weights in another order, beside the file; what a setting does not name is as in PEER. At the end each limit's figures,
flashllm's for the best of llama.cpp's, with the setting that it had.

Roofs: *reads* are the bytes that a warm token read, at the drive's rate for requests of the engine's mean size (of
llama.cpp's, which the kernel makes: of 128 KiB); *products* are the bytes of every matrix that a token is multiplied
by, and of the keys, values and states that it reads at its position, at the memory's rate. Both are measured between
the runs. The last line is one JSON document.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from drive import answers
from engine_runs import add_simd
from protocol import Limit, text_ids
from tables import compared

from flashllm import _core
from flashllm.base.command_line import say
from flashllm.base.machine import num_cores, system_name
from flashllm.base.units import format_size, parse_size
from flashllm.commands.runtime import profile_drive
from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.errors import FlashError
from flashllm.format.manifest import MANIFEST
from flashllm.format.model_dir import ModelDir
from flashllm.profile.costs import ReaderChoice

ENGINES = ("flashllm", "llama.cpp")
PEER = {"repack": False, "micro_batch": 512, "flash_attention": "auto"}
ROOF_NBYTES = 512 << 20
PEER_READER = ReaderChoice(backend="threads", depth=8, max_gap=0, source="argument")
PEER_REQUEST = 128 << 10  # what the kernel reads ahead of a fault, at most


def touched_nbytes(file: Path) -> int:
    """Bytes of the matrices that one token is multiplied by: all but the embedding, and of experts those chosen."""
    import gguf

    reader = gguf.GGUFReader(file)
    fields = {name.partition(".")[2]: field for name, field in reader.fields.items()}
    chosen = int(fields["expert_used_count"].contents()) if "expert_used_count" in fields else 0
    is_apart = any(tensor.name == "output.weight" for tensor in reader.tensors)
    looked_up = {"per_layer_token_embd.weight", *(["token_embd.weight"] if is_apart else [])}
    total = 0
    for tensor in reader.tensors:
        if "_exps" in tensor.name:
            total += int(tensor.n_bytes) // int(tensor.shape[-1]) * chosen
        elif len(tensor.shape) > 1 and tensor.name not in looked_up:
            total += int(tensor.n_bytes)
    return total


def peer_setting(text: str) -> tuple[str, dict[str, Any]]:
    """A setting of llama.cpp and its options. ArgumentTypeError where it is none."""
    options: dict[str, Any] = dict(PEER)
    for part in text.split(","):
        name, _, value = part.partition("=")
        if part == "repack":
            options[name] = True
        elif name == "micro_batch" and value.isdecimal() and int(value) > 0:
            options[name] = int(value)
        elif name == "flash_attention" and value in ("auto", "disabled", "enabled"):
            options[name] = value
        else:
            known = "repack, micro_batch=TOKENS, flash_attention=auto, disabled or enabled"
            raise argparse.ArgumentTypeError(f"{part!r} is none of {known}; several have commas between them")
    return text, options


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every limit, every engine."""
    directory = args.directory or args.file.with_suffix(".model")
    if not (directory / MANIFEST).exists():
        convert(args.file, directory, in_place=True, predictors=False, keep=True, say=say)
    model = ModelDir.open(directory)
    ids = text_ids(directory, model.block.vocab_size, args.prompt + args.tokens)
    pool, matrices = _core.ThreadPool(args.threads), touched_nbytes(args.file)
    behind = range(args.prompt, args.prompt + args.tokens)
    states = round(statistics.fmean(model.block.mixers_read_nbytes(at + 1, model.dtype.itemsize) for at in behind))
    turns = [("flashllm", "", {"context": len(ids) + 1, "simd": args.simd})]
    turns += [("llama.cpp", setting, options) for setting, options in args.peer]
    runs: list[dict[str, Any]] = []
    for memory in args.memory:
        profile_drive(argparse.Namespace(no_profile=False), directory, RunConfig(memory=memory))
        for turn in range(args.rounds):
            for engine, setting, own in turns[:: 1 if turn % 2 == 0 else -1]:
                if engine not in args.engines:
                    continue
                say(f"{format_size(memory)}: {engine} {setting}")
                limit = Limit(memory)
                options = {"memory": memory, "threads": args.threads, **own}
                settings = {"engine": engine, "options": options, "prompt": args.prompt, "ids": ids}
                run = limit.run(
                    {**settings, "model": str((directory if engine == "flashllm" else args.file).absolute())}
                )
                run |= {"engine": engine, "memory": memory, "enforced": limit.enforced, "reason": limit.reason}
                if setting:
                    run["setting"] = setting
                if "error" not in run:
                    run["roofs"] = roofs(run, args.file, pool, matrices + states)
                runs.append(run)
                print(line(run), flush=True)
    return {
        "benchmark": "whole_model",
        "file": args.file.name,
        "file_bytes": args.file.stat().st_size,
        "model_type": model.architecture.model_type,
        "layers": model.architecture.num_layers,
        "rows": model.manifest.rows.encoding,
        "touched_bytes": matrices + states,
        "touched_states_bytes": states,
        "prompt": args.prompt,
        "tokens": args.tokens,
        "settings": dict(args.peer),
        "machine": {"system": system_name(), "cores": num_cores(), "simd": _core.best_simd_level(), "used": args.simd},
        "load_average": os.getloadavg()[0],
        "runs": runs,
    }


def roofs(run: dict[str, Any], file: Path, pool: _core.ThreadPool, touched: int) -> dict[str, Any]:
    """Ms of a warm token's reads and products alone, and how many times the larger of them the token took."""
    warm = run["runs"][-1]
    if run["engine"] == "flashllm":
        size = round(warm["bytes_read"] / warm["requests"]) if warm["requests"] else PEER_REQUEST
        found = answers(file, ReaderChoice(**run["reader"]), request_nbytes=size, singles=100)
    else:
        found = answers(file, PEER_READER, request_nbytes=PEER_REQUEST, singles=100)
    memory_bps = statistics.median(_core.read_bandwidth(pool, ROOF_NBYTES, 0.5))
    reads, products = 1e3 * warm["bytes_read"] / found.bps, 1e3 * touched / memory_bps
    return {
        "drive": dataclasses.asdict(found),
        "memory_bps": memory_bps,
        "reads_ms": reads,
        "products_ms": products,
        "times_the_larger": warm["mean_ms"]["total"] / max(reads, products),
    }


HEAD = "limit | engine | prompt, s: cold, warm | read by it | ms a token: cold, warm (mean) | read a token | hits"
HEAD += " | reads, products (ms) | total ÷ larger | peak | finite"


def named(run: dict[str, Any]) -> str:
    return f"{run['engine']} {run.get('setting', '')}".strip()


def line(run: dict[str, Any]) -> str:
    """The run as a row of the table."""
    if "error" in run:
        return f"{format_size(run['memory'])} | {named(run)} | {run['error']}"
    cold, warm = run["runs"]
    cells = [
        format_size(run["memory"]) + ("" if run["enforced"] else f" NOT enforced: {run['reason']}"),
        named(run),
        ", ".join(f"{one['prompt']['total_ms'] / 1e3:.1f}" for one in (cold, warm)),
        ", ".join(format_size(one["prompt"]["bytes_read"]) for one in (cold, warm)),
        f"{cold['token_ms']:.0f}, {warm['token_ms']:.0f} ({warm['mean_ms']['total']:.0f})",
        format_size(warm["bytes_read"]),
        "" if warm["hit_rate"] is None else f"{warm['hit_rate']:.1%}",
        f"{run['roofs']['reads_ms']:.0f}, {run['roofs']['products_ms']:.0f}",
        f"{run['roofs']['times_the_larger']:.2f}",
        format_size(run.get("group_peak_bytes", run["peak_bytes"])),
        {True: "yes", False: "NO", None: ""}[run.get("finite")],
    ]
    return " | ".join(cells)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE.gguf")
    parser.add_argument("--memory", type=parse_size, nargs="+", required=True, help="limits, each enforced")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=24, help="behind the prompt (default: %(default)s)")
    parser.add_argument(
        "--peer",
        type=peer_setting,
        nargs="+",
        default=[peer_setting("micro_batch=512")],
        metavar="SETTING",
        help="llama.cpp's: micro_batch=2048 repack,flash_attention=disabled ... (default: micro_batch=512)",
    )
    add_simd(parser)
    parser.add_argument("--rounds", type=int, default=1, help="each other one in the other order")
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--directory", type=Path, help="of what is converted (default: FILE.model)")
    parser.add_argument("--json", type=Path, help="write the document here too")
    args = parser.parse_args(argv)
    print(HEAD)
    try:
        found = measure(args)
    except FlashError as error:
        print(f"whole_model: {error}", file=sys.stderr)
        return 1
    for memory in args.memory:
        prompt, token = compared([run for run in found["runs"] if run["memory"] == memory])
        print(f"{format_size(memory)}: the prompt, s: {prompt}; a token, ms: {token}")
    document = json.dumps(found)
    if args.json is not None:
        args.json.write_text(document + "\n", encoding="utf-8")
    print(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
