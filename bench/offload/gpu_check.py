"""Whether the throughput engine's device tier works on this machine's GPU, and how fast: one command, ten minutes.

    python bench/offload/gpu_check.py --out gpu               # needs CUDA and torch; --device cpu runs the same steps
    python bench/offload/gpu_check.py --out gpu --skip table2 # goes on where an earlier call stopped, without that step

The steps: `device` (what it is), `roofs` (copies, products, its memory), `correct` (tokens of every placement compared
with the native core's), `streams` (copies beside products), `pinned` (copies from pinned memory and not), `limit` (of
the GPU's memory), `breakdown` (where a run's time goes, beside the roofs), `table2` (policies of FlexGen's table 2
on a few layers of their shapes), `peers` (OPT-6.7B's shape from memory and from the disk, beside accelerate). Each is a
process of its own; what it found is kept in OUT/gpu_check.json at once, so that a later call does only what is missing
or failed. OUT/gpu_check.png shows it. Weights are dummies (synthetic), which changes no time. On the CPU models are
tiny, and only whether the steps work is shown. The last line is one JSON document.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import numpy as np
from make_dummy_checkpoint import write
from offload_run import placement, run_settings
from synthetic.opt_shapes import SHAPES
from workers.run import run

from flashllm.errors import BudgetError, FlashError
from flashllm.offload.policy import Policy

TINY = (3, 64, 4)  # layers, hidden, heads
FEW = {"opt-6.7b": 8, "opt-30b": 2, "opt-175b": 1}  # layers that are run of a shape; a run's time is scaled by them
MIB = 1 << 20
Found = dict[str, Any]


def placed(weights: str, cache: str = "g", **other: Any) -> Policy:
    """A policy with weights and cache on the device (g), in memory (c), on the disk (d), or on all three (m)."""
    return Policy(**{"gpu_batch": 4, "num_batches": 2, "cpu_attention": True, **placement(weights, cache), **other})


@dataclass(frozen=True)
class Check:
    """Where the steps run, and what they made before."""

    device: str
    out: Path

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def model(self, shape: str, dtype: str = "float16") -> Path:
        """A dummy checkpoint, made where it is not there; on the CPU a tiny one stands for every shape."""
        layers, hidden, heads = SHAPES.get(shape, (4, 512, 8))
        size = (FEW.get(shape, layers), hidden, heads) if self.on_gpu else TINY
        path = self.out / "models" / f"{shape}-{dtype}"
        if not (path / "config.json").exists():
            shutil.rmtree(path, ignore_errors=True)
            if shutil.disk_usage(self.out).free < 30 * size[0] * size[1] ** 2:
                raise BudgetError(f"{self.out}: there is no room for a model of {size[0]} layers of {shape}")
            write(path, size, dtype=dtype)
        return path

    def run(self, model: Path, policy: Policy, *, native: bool = False, **other: Any) -> Found:
        """One run, here: on the device, or (`native`) by the native core."""
        settings = {"prompt": 24, "new": 8, "scratch": str(self.out), "accelerator": None if native else self.device}
        return run(run_settings(model, policy, **settings | other))

    def found(self, step: str) -> Found:
        """What an earlier step found."""
        steps: dict[str, Found] = read(self.out)["steps"]
        return steps.get(step, {})


def device(check: Check) -> Found:
    import torch

    found: Found = {"torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count()}
    if check.on_gpu:
        facts = torch.cuda.get_device_properties(0)
        found |= {"name": facts.name, "memory_bytes": facts.total_memory, "capability": [facts.major, facts.minor]}
        found |= {"cuda": torch.version.cuda, "free_bytes": torch.cuda.mem_get_info()[0]}
    return found


def roofs(check: Check) -> Found:
    from flashllm.base.checks import to_json
    from flashllm.offload.machine.measure import QUICK_SIZES, BatchSizes, measure_gpu

    tiny = replace(QUICK_SIZES, copy=(MIB, 4 * MIB), rotation=8 * MIB)
    rates = measure_gpu(sizes=BatchSizes() if check.on_gpu else tiny, device=check.device)
    return {"rates": to_json(rates)}


def cases() -> list[tuple[str, Policy]]:
    """Policies whose answers are compared, by name."""
    found = [(f"weights {w}, cache {c}", placed(w, c)) for w in "gcdm" for c in "gcdm"]
    return [
        *found,
        ("no overlap", placed("m", "m", overlap=False)),
        ("packed weights", placed("m", compress_weights=True)),
        ("packed cache", placed("g", "m", compress_cache=True)),
        ("sparse attention", placed("g", "m", attention_sparsity=0.5)),
    ]


def correct(check: Check) -> Found:
    """In fp32 every token must be the native core's, whatever lies where. Of others three in four answers must be the
    same: fp16 rounds elsewhere, and the core multiplies packed weights by inputs in codes, which torch does not."""
    wrong, native = [], {}
    for dtype, new in (("float32", 8), ("float16", 1)):
        model = check.model("small", dtype)
        for name, policy in cases():
            what = (policy.compress_weights, policy.compress_cache, policy.attention_sparsity, dtype)
            bits = {"weight_bits": 4 if what[0] else None, "cache_bits": 4 if what[1] else None, "new": new}
            if what not in native:
                native[what] = check.run(model, policy, native=True, answers=True, **bits)["answers"]
            answers = check.run(model, policy, answers=True, **bits)["answers"]
            same = sum(one == other for one, other in zip(answers, native[what], strict=True))
            exact = what == (False, False, 1.0, "float32")
            if same < len(answers) * (1.0 if exact else 0.75):
                wrong.append(f"{dtype}, {name}: {same} of {len(answers)} answers are the native core's")
    return {"cases": 2 * len(cases()), "wrong": wrong, **({"failed": "; ".join(wrong)} if wrong else {})}


def _rate(work: Callable[[], object], units: float, at_least_s: float) -> float:
    """Units a second of repeated work that waits for its end."""
    work()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < at_least_s:
        work()
        count += 1
    return units * count / (time.perf_counter() - began)


def streams(check: Check) -> Found:
    """Two workers of the runtime's device at once, one that copies and one that multiplies: time over the longer
    alone. 1: each is as fast as alone; 2, for equal times: one after the other."""
    import torch

    from flashllm.offload.runtime.accelerator.device import TorchDevice

    on = TorchDevice(check.device, "float16" if check.on_gpu else "float32")
    nbytes, side = (256 * MIB, 4096) if check.on_gpu else (8 * MIB, 256)
    memory = np.zeros(nbytes, np.uint8)
    notice = on.pin(memory)
    target, matrix = on.bytes(nbytes), torch.rand(side, side, device=on.device).to(on.dtype)

    def copies(count: int) -> None:
        for _ in range(count):
            with on.task():
                target.copy_(torch.from_numpy(memory), non_blocking=True)

    def products(count: int) -> None:
        for _ in range(count):
            with on.task():
                matrix @ matrix

    def seconds(*works: Callable[[], None]) -> float:
        threads = [threading.Thread(target=work) for work in works]
        began = time.perf_counter()
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        return time.perf_counter() - began

    def often(work: Callable[[int], None]) -> Callable[[], None]:
        count = max(1, round(0.5 * _rate(lambda: work(1), 1, 0.2)))
        return lambda: work(count)

    many = [often(work) for work in (copies, products)]
    alone = [seconds(work) for work in many]
    both = seconds(*many)
    on.close()
    return {"alone_s": alone, "both_s": both, "over_longer": both / max(alone), "notice": notice}


def pinned(check: Check) -> Found:
    import torch

    from flashllm.offload.runtime.accelerator.device import TorchDevice

    on, nbytes = TorchDevice(check.device, "float32"), 256 * MIB if check.on_gpu else 8 * MIB
    target, rates, notice = on.bytes(nbytes), {}, None
    for name in ("pageable", "pinned"):
        memory = np.zeros(nbytes, np.uint8)
        if name == "pinned":
            notice = on.pin(memory)

        def copy(memory: Any = memory) -> None:
            with on.task():
                target.copy_(torch.from_numpy(memory), non_blocking=True)

        rates[name] = _rate(copy, nbytes, 0.5)
    on.close()
    failed = {"failed": notice} if notice else {}
    return {"bytes_per_s": rates, **failed}


def limit(check: Check) -> Found:
    """What a block needs is enough for it, and a byte less is refused before anything is computed."""
    model, policy = check.model("small", "float16"), placed("g", "g")
    need = check.run(model, policy)["tiers"]["device"]
    held = check.run(model, policy, gpu_memory=need)
    peak = held["peak_device_bytes"]
    found = {"need_bytes": need, "peak_bytes": peak}
    if peak is not None and peak > need:
        found["failed"] = f"{peak} bytes were taken of {need}"
    try:
        check.run(model, policy, gpu_memory=need - 1)
        found["failed"] = "a limit that is too small was not refused"
    except BudgetError as error:
        found["refused"] = str(error)
    return found


def breakdown(check: Check) -> Found:
    """Seconds of each activity, one at a time, and what the roofs say of two of them."""
    model, batch, prompt, new = check.model("opt-6.7b"), 16, 128 if check.on_gpu else 16, 8
    measured = check.run(model, placed("c", gpu_batch=batch, num_batches=1, overlap=False), prompt=prompt, new=new)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    layers, numbers = config["num_hidden_layers"], 12 * config["hidden_size"] ** 2
    found = {"busy_s": measured["busy"], "prefill_s": measured["prefill_s"], "decode_s": measured["decode_s"]}
    rates = check.found("roofs").get("rates")
    if rates:
        from flashllm.profile.rates import RateCurve

        copy, gemm = (RateCurve.from_plain(rates[name]) for name in ("ctog", "gemm"))
        flops = [2 * numbers * layers * rows for rows in (batch * prompt, batch)]
        products = flops[0] / gemm.at(batch * prompt) + (new - 1) * flops[1] / gemm.at(batch)
        found["roof_s"] = {"load weights": new * layers * 2 * numbers / copy.at(2 * numbers), "compute": products}
    return found


def table2(check: Check) -> Found:
    """Tokens a second of FlexGen's policies at its prompts of 512, where they fit; scaled to the shape's layers."""
    from offload_fit import GEN_LEN, POLICY_6B7, POLICY_30B, POLICY_175B

    rows = []
    for shape, policy in (("opt-6.7b", POLICY_6B7), ("opt-30b", POLICY_30B), ("opt-175b", POLICY_175B)):
        prompt, new = (512, GEN_LEN) if check.on_gpu else (16, 4)
        row: Found = {"shape": shape, "policy": policy.to_json(), "prompt": prompt, "new": new}
        try:
            model = check.model(shape)
            found = check.run(model, policy, prompt=prompt, new=new)
            share = (FEW[shape] / SHAPES[shape][0]) if check.on_gpu else 1.0
            row |= {"throughput": found["throughput"] * share, "measured": found["throughput"]}
            row |= {"peak_device_bytes": found["peak_device_bytes"]}
        except BudgetError as error:
            row["left_out"] = str(error)
        rows.append(row)
    return {"rows": rows}


def peers(check: Check) -> Found:
    """OPT-6.7B's shape with its weights in memory and on the disk: this engine and accelerate, the same batch."""
    model, batch, prompt, new = check.model("opt-6.7b"), 16, 128 if check.on_gpu else 16, 8
    rows = []
    for where in ("memory", "disk"):
        policy = placed("c" if where == "memory" else "d", gpu_batch=batch, num_batches=1)
        found = check.run(model, policy, prompt=prompt, new=new)
        rows.append({"engine": "flashllm", "weights": where, "throughput": found["throughput"]})
        if importlib.util.find_spec("accelerate") is None:
            continue
        from workers.peer import accelerate

        settings = {"model": str(model), "dtype": "float16" if check.on_gpu else "float32", "scratch": str(check.out)}
        times = accelerate(
            {**settings, "batch": batch, "prompt": prompt, "new": new, "weights": where, "device": check.device}
        )
        rate = batch * new / (times["prefill_s"] + times["decode_s"])
        rows.append({"engine": "accelerate", "weights": where, "throughput": rate})
    missing = {} if len(rows) == 4 else {"left_out_peer": "accelerate is not installed: pip install accelerate"}
    return {"batch": batch, "prompt": prompt, "new": new, "rows": rows, **missing}


STEPS: dict[str, Callable[[Check], Found]] = {
    step.__name__: step for step in (device, roofs, correct, streams, pinned, limit, breakdown, table2, peers)
}


def read(out: Path) -> dict[str, Any]:
    """The document so far."""
    file = out / "gpu_check.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"benchmark": "gpu_check", "steps": {}}


def picture(document: dict[str, Any], file: Path) -> None:
    """Bars: seconds of activities beside their roofs; tokens a second of every run."""
    from matplotlib.figure import Figure

    steps = document["steps"]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    busy = steps.get("breakdown", {}).get("busy_s", {})
    roof = steps.get("breakdown", {}).get("roof_s", {})
    left.barh(list(busy), list(busy.values()), color="#4c72b0", label="measured, one at a time")
    left.barh(list(roof), list(roof.values()), color="#dd8452", height=0.3, label="roof")
    left.set(xlabel="seconds", title="OPT-6.7B's shape, weights in memory")
    runs = [(f"{row['shape']}, table 2", row) for row in steps.get("table2", {}).get("rows", ())]
    runs += [(f"{row['engine']}, from {row['weights']}", row) for row in steps.get("peers", {}).get("rows", ())]
    rates = {name: row["throughput"] for name, row in runs if "throughput" in row}
    right.barh(list(rates), list(rates.values()), color="#4c72b0")
    right.set(xlabel="tokens a second", title=steps.get("device", {}).get("name", "CPU: says nothing of speed"))
    left.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="folder of results (default: %(default)s)")
    parser.add_argument("--skip", nargs="*", default=[], choices=list(STEPS), metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--minutes", type=float, default=10.0, help="no step goes on for longer (default: 10)")
    parser.add_argument("--keep", action="store_true", help="keep the dummy models (gigabytes) for another call")
    parser.add_argument("--step", choices=list(STEPS), help=argparse.SUPPRESS)  # the process of one step
    args = parser.parse_args(argv)
    check = Check(args.device, args.out)
    if args.step:
        return _step(check, args.step)
    end = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    document = read(args.out)
    if document.setdefault("device", args.device) != args.device:
        parser.error(f"{args.out} has results of --device {document['device']}; give another --out")
    document["ran_on_a_gpu"] = check.on_gpu
    for name in STEPS:
        known = document["steps"].get(name)
        if name in args.skip or (known is not None and not {"failed", "left_out"} & known.keys()):
            continue
        print(f"gpu_check: {name}", file=sys.stderr, flush=True)
        began = time.monotonic()
        document["steps"][name] = _process(args, name, end - began) | {"seconds": time.monotonic() - began}
        (args.out / "gpu_check.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if not args.keep:
        shutil.rmtree(args.out / "models", ignore_errors=True)
    if importlib.util.find_spec("matplotlib") is not None:
        picture(document, args.out / "gpu_check.png")
    else:
        print("gpu_check: no picture without matplotlib", file=sys.stderr)
    for name, found in document["steps"].items():
        state = found.get("failed") or found.get("left_out") or "ok"
        print(f"{name:<10} {found['seconds']:6.1f} s  {state}")
    if not check.on_gpu:
        print("on a GPU: unrun")
    print(json.dumps(document))
    return int(any("failed" in found for found in document["steps"].values()))


def _process(args: argparse.Namespace, name: str, seconds: float) -> Found:
    """A step in a process of its own, for as long as there is time."""
    if seconds <= 0:
        return {"left_out": "no time was left; run it again"}
    command = [sys.executable, __file__, "--device", args.device, "--out", str(args.out), "--step", name]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"left_out": "it took longer than was left; run it again, with more --minutes"}
    try:
        found: Found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"failed": f"ended with status {done.returncode}"}
    return found


def _step(check: Check, name: str) -> int:
    try:
        found = STEPS[name](check)
    except (FlashError, RuntimeError) as error:  # torch's are RuntimeErrors
        found = {"failed": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
