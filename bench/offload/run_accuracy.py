"""The throughput engine's planner against its runtime: predicted and measured times of policies that differ.

    python tools/make_dummy_checkpoint.py opt67-4 --shape opt-6.7b --layers 4 --tokenizer DIR
    python bench/offload/run_accuracy.py opt67-4 --rounds 2

First this machine's profile is measured, as `flashllm calibrate` does. Then each policy runs in a process
of its own, one after the other, in each round; the profile is measured again at the end, which says how far the machine
moved meanwhile. Policies differ in batch, blocks, tiers, widths and overlap. The aim is 15 %. Weights are dummies
(synthetic), which changes no time. The last line is one JSON document.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from offload_run import WORKER, finish, placement, run_settings, worker

from flashllm.base.machine import num_cores
from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.machine.here import hardware_of
from flashllm.offload.machine.measure import BatchSizes, measure_batches
from flashllm.offload.model_text import ModelText
from flashllm.offload.planner.predict import predict
from flashllm.offload.policy import Policy, Workload
from flashllm.offload.shape import ModelShape
from flashllm.profile.calibrate import CalibrationOptions, measure
from flashllm.profile.reads import file_to_read

LIMIT = 0.15
PACKED = {"compress_weights": True, "compress_cache": True}

# name -> the policy, prompt and new tokens
RUNS: dict[str, tuple[dict[str, Any], int, int]] = {
    "4 sequences, weights on disk": ({"gpu_batch": 4, "num_batches": 1, **placement("d")}, 128, 24),
    "64 sequences, weights on disk": ({"gpu_batch": 64, "num_batches": 1, **placement("d")}, 32, 12),
    "4 batches of 8, half the weights on disk": ({"gpu_batch": 8, "num_batches": 4, **placement("h")}, 64, 12),
    "16 sequences, all in memory": ({"gpu_batch": 16, "num_batches": 1, **placement("g")}, 64, 24),
    "16 sequences, no overlap": (
        {"gpu_batch": 16, "num_batches": 1, "overlap": False, **placement("d")}, 64, 12,
    ),
    "2 batches of 16, cache and activations on disk": (
        {"gpu_batch": 16, "num_batches": 2, **placement("d", "d", "d")}, 128, 12,
    ),
    "32 sequences, 4-bit weights and cache": (
        {"gpu_batch": 32, "num_batches": 1, **placement("d"), **PACKED}, 64, 16,
    ),
    "32 sequences, 4-bit weights in memory, 4-bit cache on disk": (
        {"gpu_batch": 32, "num_batches": 1, **placement("g", "d", "d"), **PACKED}, 128, 12,
    ),
}  # fmt: skip


def predicted(shape: ModelShape, hardware: Hardware, name: str) -> dict[str, float]:
    """Seconds of prefill and of decoding, by the cost model."""
    fields, prompt, new = RUNS[name]
    prediction = predict(shape, hardware, Workload(prompt_len=prompt, gen_len=new), Policy.from_json(fields))
    return {"prefill_s": prediction.prefill_s, "decode_s": prediction.decode_s}


def measured(model: Path, scratch: Path, name: str) -> dict[str, Any]:
    """What one run took."""
    fields, prompt, new = RUNS[name]
    found = worker(WORKER, run_settings(model, fields, prompt=prompt, new=new, scratch=str(scratch)), None)
    if "failed" in found:
        raise SystemExit(f"the run {name} ended with status {found['failed']}")
    return found


def profile(model: Path, dtype: str | None, rounds: int) -> Hardware:
    """What a calibration says of the drive and of batches."""
    dtype, threads = dtype or "float16", num_cores()
    with file_to_read(model, 2 << 30) as file:
        found = measure(
            file,
            threads=threads,
            encodings=(),
            options=CalibrationOptions(read_s=10.0),
            writes_in=model,
            batches=lambda: measure_batches((dtype,), file, threads=threads, sizes=BatchSizes(rounds=rounds)),
        )
    return hardware_of(found, model, dtype)


def errors(predictions: dict[str, float], runs: list[dict[str, Any]]) -> dict[str, float]:
    """Predicted over measured, less 1, of the median run."""
    found = {}
    for key in ("prefill_s", "decode_s"):
        found[key] = predictions[key] / median(run[key] for run in runs) - 1
    whole = median(run["prefill_s"] + run["decode_s"] for run in runs)
    return found | {"whole_s": sum(predictions.values()) / whole - 1}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path, help="Hugging Face folder with safetensors")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile-rounds", type=int, default=3)
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--scratch", type=Path, default=Path("/tmp"), help="folder for scratch files")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    shape = ModelText.load(args.model).shape
    before = profile(args.model, shape.dtype, args.profile_rounds)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in args.runs}
    for _ in range(args.rounds):
        for name in args.runs:
            runs[name].append(measured(args.model, args.scratch, name))
            print(f"{name}: {runs[name][-1]}", file=sys.stderr, flush=True)
    after = profile(args.model, shape.dtype, args.profile_rounds)
    rows = []
    for name in args.runs:
        first, last = (predicted(shape, hardware, name) for hardware in (before, after))
        row = {"run": name, "policy": RUNS[name][0], "prompt": RUNS[name][1], "new": RUNS[name][2]}
        row |= {"predicted": first, "predicted_after": last, "error": errors(first, runs[name])}
        row |= {"error_after": errors(last, runs[name]), "measured": runs[name]}
        rows.append(row)
        print(f"{name:60s} {row['error']['whole_s']:+6.1%} {row['error_after']['whole_s']:+6.1%}", file=sys.stderr)
    within = sum(abs(row["error"]["whole_s"]) <= LIMIT for row in rows)
    return finish(__file__, args, argv, within_limit=within, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
