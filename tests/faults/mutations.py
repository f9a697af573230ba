"""Mutated files and requests against the parsers that meet them first: accepted, or refused by one typed error within a
second that names the file; nothing dies, hangs, or takes memory for what a number in a small file says.

    python tests/faults/mutations.py --each 10000            so many of every kind, in one process
    python tests/faults/mutations.py --command 500           so many model directories through `flashllm inspect`

Mutations are of bytes, of JSON tokens (numbers to extremes, values to other types), and of lengths; those of a model
directory get the right hashes, as whoever makes one on purpose writes them. The last line is one JSON document.
"""

import argparse
import contextlib
import hashlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import gguf_files
import numpy as np
import predictor_files
from arch_models import Variant, make_checkpoint
from device_costs import device, reader
from tiny_models import make_tiny_opt
from traces import write_trace

from flashllm.api.fields import BadRequest
from flashllm.convert.checkpoint import gguf_file
from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.convert.plan import plan_conversion
from flashllm.convert.run import convert
from flashllm.device.store import device_of, load_costs, save_costs
from flashllm.errors import FlashError
from flashllm.format.manifest import Manifest
from flashllm.format.model_dir import ModelDir
from flashllm.format.predictors import check_predictors_header
from flashllm.format.safetensors import read_header
from flashllm.format.trace import Trace
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.tokenizer import Tokenizer
from flashllm.offload.jobs.requests import Defaults, parse_request
from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.machine.machines import MACHINES
from flashllm.offload.policy import Policy
from flashllm.serve.bodies import parse

SLOW_S = 1.0
MOST_MEMORY = 256 << 20  # bytes, more than before the first trial
HEADER = 6000  # bytes of a binary file in which nearly all mutations are
EXTREMES = [
    "-1", "0", "1", "2", "255", "65536", "2147483648", "4294967296", "9223372036854775807", "18446744073709551616",
    "1e400", "-0.0", "0.5", "1e-320", "NaN", "Infinity", "null", "true", "[]", "{}", '""', '"x"', '"\\ud800"',
    "[[[[]]]]",
    "9" * 400, '"' + "A" * 5000 + '"',
]  # fmt: skip
TOKEN = re.compile(rb'-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|"(?:[^"\\]|\\.)*"|true|false|null')


@dataclass(frozen=True)
class Kind:
    """Inputs of one kind. `use` has it parsed; what it raises is judged."""

    base: bytes
    use: Callable[[bytes], object]
    names: str  # what a refusal must say: a part of a file's name; empty for requests
    is_json: bool = True


class TooSlow(BaseException):
    """Raised by the alarm."""


def mutated(base: bytes, rng: random.Random, *, is_json: bool) -> bytes:
    """One to four changes of `base`."""
    raw = bytearray(base)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        end = max(1, len(raw) if is_json else min(len(raw), HEADER))
        at = rng.randrange(end)
        tokens = list(TOKEN.finditer(bytes(raw[:HEADER]))) if rng.random() < (0.6 if is_json else 0.3) else []
        if tokens:
            token = rng.choice(tokens)
            raw[token.start() : token.end()] = rng.choice(EXTREMES).encode()
            continue
        match rng.randrange(7):
            case 0:
                raw[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                raw[at : at + 8] = rng.choice((0, 1, 2**31, 2**32, 2**63, 2**64 - 1)).to_bytes(8, "little")
            case 2:
                del raw[at : at + rng.randrange(1, 40)]
            case 3:
                raw[at:at] = bytes(rng.choices(b'0123456789{}[]",:- x\xff\0', k=rng.randrange(1, 20)))
            case 4:
                raw[at:at] = raw[at : at + rng.randrange(1, 200)]
            case 5:
                del raw[rng.randrange(len(raw) + 1) :]
            case _:
                raw[at] ^= 1 << rng.randrange(8)
        if not raw:
            raw = bytearray(b"\0")
    return bytes(raw)


def at_file(path: Path, use: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A `Kind.use` that writes the bytes to `path` and has that read."""

    def call(raw: bytes) -> object:
        path.write_bytes(raw)
        return use(path)

    return call


def rehash(directory: Path, name: str, raw: bytes) -> None:
    """Put `raw` in the place of a model directory's file, and its hash into the manifest."""
    (directory / name).write_bytes(raw)
    manifest = json.loads((directory / "flashllm.json").read_text())
    manifest.pop("sha256", None)
    manifest["files"][name] = {"nbytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (directory / "flashllm.json").write_text(json.dumps(manifest))


def make_kinds(root: Path) -> dict[str, Kind]:
    """Every kind, of tiny files under `root`."""
    hf, model = make_tiny_opt(root / "hf"), root / "model"
    convert(hf, model)
    predictor_files.install("exact", hf, model, root)
    manifest = Manifest.load(model)
    kinds: dict[str, Kind] = {}

    def open_all(directory: Path) -> None:
        opened = ModelDir.open(directory)
        Tokenizer.load(directory).encode("The little dog")
        header = read_header(directory / "predictors.safetensors")
        check_predictors_header(header, opened.manifest.rows, opened.manifest.architecture.num_layers, header_sha)

    header_sha = manifest.files["ffn.safetensors"].sha256
    # 1. The manifest, without its own hash: else that is all that would be looked at.
    copy = Path(shutil.copytree(model, root / "of manifest"))
    raw = json.loads((model / "flashllm.json").read_text())
    raw.pop("sha256")
    base = json.dumps(raw).encode()
    kinds["manifest"] = Kind(base, at_file(copy / "flashllm.json", lambda path: open_all(path.parent)), str(copy))
    # 2. Every other file of a model directory, its hash right.
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
                 "resident.safetensors", "ffn.safetensors", "predictors.safetensors"):  # fmt: skip
        copy = Path(shutil.copytree(model, root / f"of {name}"))

        def use(raw: bytes, copy: Path = copy, name: str = name) -> None:
            rehash(copy, name, raw)
            open_all(copy)

        kinds[f"model directory: {name}"] = Kind(
            (model / name).read_bytes(), use, "config.json|" + str(copy), name.endswith(".json")
        )

    # 3. A Hugging Face folder.
    def plan(path: Path) -> None:
        with open_checkpoint(path) as checkpoint:
            plan_conversion(checkpoint, None)

    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        folder = Path(shutil.copytree(hf, root / f"hf {name}"))
        kinds[f"checkpoint: {name}"] = Kind(
            (hf / name).read_bytes(),
            at_file(folder / name, lambda path: plan(path.parent)),
            "config.json|" + str(folder),
            name.endswith(".json"),
        )
    # 4. A GGUF file, its header read here and not in a child.
    gguf_file.ask_child = lambda function, *args: function(*args)
    llama = make_checkpoint(root / "llama", Variant("llama", {"hidden_act": "silu"}))
    source = gguf_files.write_gguf(llama, root / "tiny.gguf")
    mutant = root / "mutant.gguf"

    kinds["GGUF"] = Kind(source.read_bytes(), at_file(mutant, plan), str(mutant), False)
    # 5. Traces, profiles, policies.
    trace = write_trace(root / "trace", np.random.default_rng(0).random((4, 2, 256)) < 0.2)

    def read_trace(path: Path) -> None:
        with Trace(path) as opened:
            opened.check_model(2, 256)

    kinds["trace"] = Kind(trace.read_bytes(), at_file(root / "t.trace", read_trace), "t.trace", False)
    store, key = root / "devices.json", device_of(root)
    save_costs(store, key, device(reader()))
    kinds["device profile"] = Kind(
        store.read_bytes(), at_file(root / "d.json", lambda path: load_costs(path, key)), "d.json"
    )
    hardware = json.dumps(next(iter(MACHINES.values())).to_json()).encode()
    kinds["machine profile"] = Kind(hardware, at_file(root / "m.json", Hardware.load), "m.json")
    policy = Policy(gpu_batch=4, num_batches=2, wg=0.2, wc=0.3, wd=0.5, cg=0.0, cc=1.0, cd=0.0, hg=0.0, hc=1.0, hd=0.0)
    kinds["policy"] = Kind(json.dumps(policy.to_json()).encode(), at_file(root / "p.json", Policy.load), "p.json")
    # 6. Lines of batch files, bodies of requests.
    said = [{"role": "system", "content": "short"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    body = {
        "model": "tiny", "messages": said, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["a"],
        "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2, "n": 1,
    }  # fmt: skip
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
            "body": {name: value for name, value in body.items() if not name.startswith("stream")}}  # fmt: skip
    kinds["batch line"] = Kind(
        json.dumps(line).encode(), lambda raw: parse_request(raw, 7, text=False, defaults=Defaults()), ""
    )
    options = SamplingOptions()
    kinds["chat request"] = Kind(
        json.dumps(body).encode(), lambda raw: parse(raw, "chat", custom_id="a", defaults=options), ""
    )
    completion = {**body, "prompt": ["hello", "there"], "logprobs": 2, "echo": False}
    for name in ("messages", "top_logprobs"):
        completion.pop(name)
    kinds["completion request"] = Kind(
        json.dumps(completion).encode(), lambda raw: parse(raw, "completion", custom_id="a", defaults=options), ""
    )
    return kinds


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """TooSlow after so long, where Python looks at signals."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def verdict(kind: Kind, raw: bytes) -> tuple[str, str]:
    """What comes of one input, and the message."""
    began = time.monotonic()
    try:
        with alarm(5 * SLOW_S):
            kind.use(raw)
        result, said = "accepted", ""
    except (FlashError, BadRequest) as error:
        said = str(error)
        named = not kind.names or any(part in said for part in kind.names.split("|"))
        result = "refused" if named and "bug in flashllm" not in said else "unnamed"
    except TooSlow:
        result, said = "hangs", ""
    except BaseException as error:  # a panic of a library is none of Exception
        result, said = "untyped", f"{type(error).__name__}: {error}"
    if result != "hangs" and time.monotonic() - began > SLOW_S:
        result = "slow"
    return result, said[:300]


def memory_nbytes(name: str) -> int:
    """What this process holds ("VmRSS"), or the most since `forget_peak` ("VmHWM")."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def forget_peak() -> None:
    """VmHWM begins anew."""
    Path("/proc/self/clear_refs").write_text("5")


GOOD = ("accepted", "refused")


def sweep(kinds: dict[str, Kind], each: int, seed: int, keep: Path | None) -> dict[str, Any]:
    """`each` mutations of every kind: counts, and the first bad ones."""
    table, problems = [], []
    for name, kind in kinds.items():
        for _ in range(2):  # what is imported on first use is not the input's
            assert verdict(kind, kind.base)[0] in ("accepted", "slow"), (name, verdict(kind, kind.base))
        forget_peak()
        before, counts = memory_nbytes("VmRSS"), Counter[str]()
        for number in range(each):
            raw = mutated(kind.base, random.Random(f"{seed} {name} {number}"), is_json=kind.is_json)
            result, said = verdict(kind, raw)
            counts[result] += 1
            if result not in GOOD and counts[result] <= 3:
                problems.append({"kind": name, "number": number, "result": result, "said": said})
                if keep is not None:
                    (keep / f"{name.replace('/', '_')} {number}").write_bytes(raw)
        grown = max(0, memory_nbytes("VmHWM") - before)
        if grown > MOST_MEMORY:
            problems.append({"kind": name, "result": "memory", "said": f"{grown} bytes more than before"})
        good = sum(counts[key] for key in GOOD) if grown <= MOST_MEMORY else 0
        table.append({"fault": f"mutated {name}", "tried": each, "survived": good, **counts, "grown": grown})
        print(json.dumps(table[-1]), file=sys.stderr, flush=True)
    return {"bad": sum(row["tried"] - row["survived"] for row in table), "table": table, "problems": problems}


def through_the_command(kinds: dict[str, Kind], root: Path, count: int, seed: int) -> dict[str, Any]:
    """Mutated model directories through `flashllm inspect`, and checkpoints through `convert`, each in its process."""
    problems: list[dict[str, Any]] = []
    names = [name for name in kinds if name.startswith(("manifest", "model directory", "checkpoint", "GGUF"))]
    for number in range(count):
        rng = random.Random(f"{seed} command {number}")
        name = rng.choice(names)
        kind = kinds[name]
        with contextlib.suppress(Exception):
            kind.use(mutated(kind.base, rng, is_json=kind.is_json))
        directory = root / {
            "manifest": "of manifest", "GGUF": "mutant.gguf",
        }.get(name, name.replace("model directory:", "of").replace("checkpoint:", "hf"))  # fmt: skip
        shutil.rmtree(root / "out", ignore_errors=True)
        shutil.rmtree(root / "out.partial", ignore_errors=True)
        verb = ["inspect", directory] if name[0] == "m" else ["convert", directory, root / "out"]
        done = subprocess.run(
            [sys.executable, "-m", "flashllm", *map(str, verb)], capture_output=True, text=True, timeout=60, check=False
        )
        lines = done.stderr.splitlines()
        good = done.returncode == 0 or (done.returncode in (1, 2) and lines[-1].startswith("flashllm: error: "))
        if not good or "bug in flashllm" in done.stderr or "Traceback" in done.stderr:
            problems.append({"kind": name, "number": number, "status": done.returncode, "said": done.stderr[-300:]})
    row = {"fault": "mutated, through the command", "tried": count, "survived": count - len(problems)}
    return {"bad": len(problems), "table": [row], "problems": problems}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--each", type=int, default=0, help="mutations of every kind")
    parser.add_argument("--command", type=int, default=0, help="mutations that go through the command")
    parser.add_argument("--only", nargs="*", help="parts of kinds' names")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for inputs that ended badly")
    args = parser.parse_args(argv)
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        kinds = make_kinds(Path(folder))
        chosen = {
            name: kind for name, kind in kinds.items() if not args.only or any(part in name for part in args.only)
        }
        if args.each:
            results.append(sweep(chosen, args.each, args.seed, args.keep))
        if args.command:
            results.append(through_the_command(chosen, Path(folder), args.command, args.seed))
    merged: dict[str, Any] = {
        "bad": sum(each["bad"] for each in results),
        "table": [row for each in results for row in each["table"]],
        "problems": [problem for each in results for problem in each["problems"]],
    }
    print(json.dumps(merged))
    return 1 if merged["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
