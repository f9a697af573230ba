"""One measured run of the throughput engine in a process of its own, for offload_run.py: settings in, results out."""

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flashllm import _core
from flashllm.base.dtypes import WEIGHT_DTYPES, cast
from flashllm.base.machine import num_cores
from flashllm.generate.sampling import SamplingOptions
from flashllm.offload.jobs.sequences import Sequence
from flashllm.offload.machine.measure_native import multiply
from flashllm.offload.planner.packing import Packing
from flashllm.offload.policy import Policy
from flashllm.offload.runtime.ops import ROWS_TOGETHER, Matrix
from flashllm.offload.runtime.run import Runner, RunOptions
from flashllm.offload.runtime.tiers.scratch import open_reader
from flashllm.offload.runtime.tiers.source import WeightSource, matrix_name, open_weights
from flashllm.offload.runtime.tiers.weight_plan import weight_packing
from flashllm.offload.runtime.tiers.weights import pack
from flashllm.profile.reads import batch_s

_ROUNDS = 3


def median_s(work: Callable[[], object]) -> float:
    """Median seconds of `_ROUNDS` calls after one that warms up."""
    work()
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def products_s(source: WeightSource, bits: int | None, rows: int, *, decoding: bool) -> tuple[float, float]:
    """Seconds of one layer's products, and of the head's, over `rows` rows; by our own products, weights in memory."""
    pool = _core.ThreadPool(num_cores())
    random = np.random.default_rng(0)
    storage = WEIGHT_DTYPES[source.dtype.name].storage

    def matrix(name: str, packing: Packing | None) -> Matrix:
        outputs, inputs = source.shapes[name]
        array = np.empty((outputs, inputs), storage)
        source.read({name: array})
        if packing is None:
            return Matrix(array, outputs, inputs, None, None)
        packed = _core.allocate(packing.nbytes(outputs, inputs))
        pack(array, source.dtype.name, packing, packed, pool)
        return Matrix(packed, outputs, inputs, packing, None)

    def seconds(one: Matrix) -> float:
        part = min(rows, ROWS_TOGETHER)
        values = random.standard_normal((part, one.columns), np.float32)
        x = np.ascontiguousarray(cast(values, WEIGHT_DTYPES["float32"], source.dtype))
        return median_s(lambda: multiply(one, x, source.dtype.name, pool, decoding=decoding)) * rows / part

    made = weight_packing(source, bits)
    packings = {name: made.of(name, 0, None) for name in source.matrices(0)}  # most layers' are so
    layer = sum(seconds(matrix(matrix_name(0, name), packing)) for name, packing in packings.items())
    head = "head.weight" if "head.weight" in source.shapes else "embedding.weight"
    return layer, seconds(matrix(head, None))


def read_rate(path: Path, nbytes: int = 1 << 30) -> dict[str, Any]:
    """Bytes a second of sequential reads of a file, many at once, and whether they were direct."""
    file, reader = _core.DirectFile(str(path)), open_reader()
    size = min(64 << 20, file.size // 4096 * 4096)
    memory, total = _core.allocate(size), min(nbytes, file.size) // size * size
    seconds = sum(batch_s(reader, file, np.array([offset]), size, memory) for offset in range(0, total, size))
    return {"read_bytes_per_s": total / seconds, "read_direct": file.direct}


def roofs(settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the run's products alone, and the drive's rate."""
    with open_weights(Path(settings["model"])) as source:
        count, prompt, new, batch = (settings[key] for key in ("sequences", "prompt", "new", "batch"))
        layers, bits = source.num_layers, settings["weight_bits"]
        prefill, _ = products_s(source, bits, min(batch * prompt, 4 * ROWS_TOGETHER), decoding=False)
        prefill *= batch * prompt / min(batch * prompt, 4 * ROWS_TOGETHER)
        decode, head = products_s(source, bits, batch, decoding=True)
        batches = count / batch
    largest = max(Path(settings["model"]).glob("*.safetensors"), key=lambda path: path.stat().st_size)
    return {
        "prefill_products_s": batches * (layers * prefill + head),
        "decode_products_s": batches * (new - 1) * (layers * decode + head),
        **read_rate(largest),
    }


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """The sequences, in blocks of the policy's size."""
    random = np.random.default_rng(1)
    greedy = SamplingOptions(max_new_tokens=settings["new"], ignore_eos=True)
    policy = Policy.from_json(settings["policy"])
    options = partial(
        RunOptions,
        weight_bits=settings["weight_bits"] or 4,
        cache_bits=settings["cache_bits"] or 4,
        accelerator=settings.get("accelerator"),
        gpu_memory=settings.get("gpu_memory"),
    )
    with (
        tempfile.TemporaryDirectory(dir=settings["scratch"]) as scratch,
        Runner(Path(settings["model"]), policy, options(scratch=Path(scratch))) as runner,
    ):
        prompts = random.integers(4, runner.block.vocab_size, (settings["sequences"], settings["prompt"])).tolist()
        sequences = [Sequence(prompt, greedy, decoder=None, end_ids=frozenset()) for prompt in prompts]
        size = policy.block_size
        blocks = [sequences[first : first + size] for first in range(0, len(sequences), size)]
        measures = [runner.run(block) for block in blocks]
        notices, peak_device = runner.notices, runner.peak_device_nbytes
    prefill_s, decode_s = (sum(getattr(one, name) for one in measures) for name in ("prefill_s", "decode_s"))
    new_tokens = sum(one.new_tokens for one in measures)
    return {
        "blocks": len(blocks),
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "throughput": new_tokens / (prefill_s + decode_s),
        "decode_throughput": (new_tokens - len(sequences)) / decode_s,
        "bytes_read": sum(one.bytes_read for one in measures),
        "bytes_written": sum(one.bytes_written for one in measures),
        "busy": {action: sum(one.busy[action] for one in measures) for action in measures[0].busy},
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_device_bytes": peak_device,
        "tiers": {tier: max(one.tiers[tier] for one in measures) for tier in measures[0].tiers},
        "answers": [list(sequence.output) for sequence in sequences] if settings.get("answers") else None,
        "notices": notices,
    }


def main() -> int:
    settings = json.loads(sys.argv[1])
    print(json.dumps({"roofs": roofs, "run": run}[settings["task"]](settings)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
