"""One engine's share of a latency breakdown, in a process of its own: `latency_breakdown.py` starts these.

    python bench/engine/breakdown_worker.py '{"task": "flashllm", "model": DIR, ...}'

Prints one JSON document: what was measured, token by token. Knows one engine at a time; compares nothing.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from dense_stream import BLOCK_NBYTES, MAX_REQUEST, READ_AHEAD, DenseStream
from traced import open_without

from flashllm import _core
from flashllm.base.machine import num_cores, peak_process_nbytes, process_nbytes
from flashllm.config import RunConfig
from flashllm.format.manifest import Manifest
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import FFN, RESIDENT
from flashllm.format.safetensors import read_header
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import PrefillRecord, Session
from flashllm.generate.tokenizer import Tokenizer

SLACK_NBYTES = 128 << 20  # what a dense engine's process grows by, beside its weights and staging
READS_AT_A_TIME = 32  # of dense engines
ROOF_NBYTES = 512 << 20
ROOF_READS_NBYTES = 64 << 20


def joules() -> float | None:
    """RAPL's counter, which rises with the energy used by all packages (paper A, appendix A.5.3); None where the system
    has none to read."""
    total = 0.0
    found = False
    for domain in sorted(Path("/sys/class/powercap").glob("*-rapl:?")):
        try:
            total += int((domain / "energy_uj").read_text()) / 1e6
            found = True
        except (OSError, ValueError):
            continue
    return total if found else None


def dense(settings: dict[str, Any]) -> dict[str, Any]:
    """`naive` or `hybrid`: `resident_share` of the weights in memory, as far as the limit allows."""
    directory = Path(settings["model"])
    manifest = Manifest.load(directory, check_files=False)
    total = sum(manifest.files[name].nbytes for name in (FFN, RESIDENT))
    share = settings["resident_share"]
    if settings["memory"] is not None:
        others = process_nbytes() + (READ_AHEAD + 1) * BLOCK_NBYTES + SLACK_NBYTES
        share = min(share, max(0.0, (settings["memory"] - others) / total))
    simd = settings.get("simd", "auto")
    stream = DenseStream(directory, share, threads=num_cores(), io_threads=READS_AT_A_TIME, simd=simd)
    tokens = []
    energy = joules()
    for _ in range(settings["tokens"]):
        tokens.append(dataclasses.asdict(stream.token()))
    return {
        "tokens": tokens,
        "energy_j": None if energy is None else joules() - energy,
        "direct_io": stream.direct_io,
        "resident_share": stream.resident_nbytes / total,
        "peak_rss_bytes": peak_process_nbytes(),
    }


def flash(settings: dict[str, Any]) -> dict[str, Any]:
    """The engine, generating after a prompt of random tokens (their text does not matter, their number does)."""
    directory = Path(settings["model"])
    tokenizer = Tokenizer.load(directory)
    config = RunConfig(
        memory=settings["memory"],
        context=settings["context"],
        io_threads=settings.get("io_threads"),
        io_backend=settings.get("io_backend"),
        **settings.get("options", {}),
    )
    sampling = SamplingOptions(max_new_tokens=settings["tokens"] + 1, ignore_eos=True, **settings.get("sampling", {}))
    without = settings.get("without", ())
    with open_without(without, directory, config) as model, Session(model, tokenizer, sampling) as session:
        prompt = np.random.default_rng(0).integers(10, model.vocab_size, settings["prompt_tokens"])
        records = iter(session.stream_ids(prompt.tolist()))
        prefill = next(records)
        assert isinstance(prefill, PrefillRecord)
        next(records)  # the first token comes out of the prefill's pass
        energy = joules()
        tokens = [dataclasses.asdict(record.times) for record in records]
        energy = None if energy is None else joules() - energy
        layout, plan = model.manifest.rows, model.plan.memory
        exact = model.manifest.architecture.experts or model.manifest.resident_gate  # nothing is named in vain
        shape = {
            "row_nbytes": layout.stride,
            "matrix_nbytes": layout.vector_nbytes("down"),
            "num_neurons": model.manifest.architecture.neurons,
            "cached_neurons": sum(plan.cache_rows),
            "resident_touched_nbytes": resident_touched(model.directory) + plan.predictors,
            "kv_nbytes_per_token": model.directory.kv_nbytes_per_token,
            "firing": 1 / 3 if "synthetic" in model.activity_source and not exact else 1.0,  # of what is named
        }
        return {
            "tokens": tokens,
            "prefill": dataclasses.asdict(prefill.times),
            "energy_j": energy,
            "direct_io": model.direct_io,
            "reader": dataclasses.asdict(model.reader),
            "activity": model.activity_source,
            "weights": model.manifest.source.name,
            "dtype": model.manifest.dtype,
            "notices": model.notices,
            "plan": plan.as_dict(),
            "shape": shape,
            "window_held": float(np.mean([ffn.current_window for ffn in model.parts.ffns] or [0])),
            "prefetch": model.plan.prefetch,
            "without": without,
            "text_ids": session.tokens[settings["prompt_tokens"] :][:20],
            "peak_rss_bytes": peak_process_nbytes(),
        }


def resident_touched(model: ModelDir) -> int:
    """Bytes of resident matrices that one token reads: every linear's, the head's too (which may be the embedding)."""
    looked_up = {"positions.weight", *(() if model.block.tied_head else ("embedding.weight",))}
    tensors = read_header(model.path / RESIDENT).tensors
    return sum(info.nbytes for name, info in tensors.items() if len(info.shape) == 2 and name not in looked_up)


def roof(settings: dict[str, Any]) -> dict[str, Any]:
    """What this machine can do now: reading memory, reading sequentially, and random reads by size of request.

    Reads by the faster of the threads and, where it is to be had, io_uring.
    """
    directory = Path(settings["model"])
    stride = Manifest.load(directory, check_files=False).rows.stride
    pool = _core.ThreadPool(num_cores())
    dram = sorted(_core.read_bandwidth(pool, ROOF_NBYTES, settings["seconds"]))
    file = _core.DirectFile(str(directory / FFN), direct=True)
    block = min(BLOCK_NBYTES, file.size // READ_AHEAD // 4096 * 4096)
    sequential = read_rate(file, settings, size=block, count=READ_AHEAD, max_request=MAX_REQUEST, choose=consecutive)
    sizes = [stride * rows for rows in (1, 2, 4, 8)]
    return {
        "dram_gbps": dram[len(dram) // 2] / 1e9,
        "sequential_gbps": sequential / 1e9,
        "reads": [
            {
                "size": size,
                "gbps": read_rate(
                    file,
                    settings,
                    size=size,
                    count=max(1, min(ROOF_READS_NBYTES, file.size // 2) // size),
                    max_request=max(size, 4096),
                    choose=scattered,
                )
                / 1e9,
            }
            for size in sizes
            if size * 4 < file.size
        ],
    }


Choose = Callable[[np.random.Generator, int, int, int], "np.ndarray[Any, Any]"]


def consecutive(random: np.random.Generator, places: int, count: int, done: int) -> "np.ndarray[Any, Any]":
    return (done * count + np.arange(count)) % places


def scattered(random: np.random.Generator, places: int, count: int, done: int) -> "np.ndarray[Any, Any]":
    return random.choice(places, min(count, places), replace=False)


def read_rate(
    file: _core.DirectFile, settings: dict[str, Any], *, size: int, count: int, max_request: int, choose: Choose
) -> float:
    """Bytes per second of `count` reads of `size` bytes a batch, the median over batches."""
    readers = {
        backend: _core.Reader(
            READS_AT_A_TIME, max_request=max_request, backend=backend, queue_depth=2 * READS_AT_A_TIME
        )
        for backend in ("threads", "auto")  # where there is no io_uring: the threads twice
    }
    buffer = _core.allocate(size * count).reshape(count, size)
    random, done = np.random.default_rng(0), 0
    rates: dict[str, list[float]] = {backend: [] for backend in readers}
    end = time.perf_counter() + settings["seconds"]
    while done < 3 * len(readers) or time.perf_counter() < end:
        for backend, reader in readers.items():
            batch = _core.ReadBatch(reader, file)
            places = choose(random, file.size // size, count, done).tolist()
            for place, destination in zip(places, buffer, strict=False):
                batch.add(place * size, destination)
            batch.submit()
            stats = batch.wait()
            rates[backend].append(stats["bytes"] / stats["wall_ns"] * 1e9)
            done += 1  # no backend reads what the other has just read
    return max(float(np.median(one)) for one in rates.values())


def read_through(settings: dict[str, Any]) -> dict[str, Any]:
    """Reads `files` of the model once in sequence: for a drive that forgets (bench/log). GB/s of each."""
    reader = _core.Reader(READS_AT_A_TIME, max_request=MAX_REQUEST)
    buffer = _core.allocate(READ_AHEAD * BLOCK_NBYTES)
    rates = {}
    for name in settings["files"]:
        file, start = _core.DirectFile(str(Path(settings["model"]) / name), direct=True), time.perf_counter()
        for offset in range(0, file.size, len(buffer)):
            batch = _core.ReadBatch(reader, file)
            batch.add(offset, buffer[: min(len(buffer), file.size - offset)])
            batch.submit()
            batch.wait()
        rates[name] = file.size / (time.perf_counter() - start) / 1e9
    return rates


def prompt_products(settings: dict[str, Any]) -> dict[str, Any]:
    """The products of `tokens` tokens alone: by torch over one layer's whole matrices, times the number of layers.

    In fp32 and, for a bf16 model, in bf16, whichever is faster here: torch emulates bf16 where a processor has none.
    """
    import torch  # here alone: an engine's memory is not torch's

    directory = Path(settings["model"])
    manifest = Manifest.load(directory, check_files=False)
    rows, architecture = manifest.rows, manifest.architecture
    resident = read_header(directory / RESIDENT).tensors
    shapes = [t.shape for name, t in resident.items() if name.startswith("layers.0.") and len(t.shape) > 1]
    shapes += [(rows.d_ff, rows.d_model)] * len(rows.matrices)  # all read [n, k]: down costs what up costs
    torch.set_num_threads(num_cores())

    def layer_s(dtype: torch.dtype) -> float:
        weights = [torch.randn(shape).to(dtype) for shape in shapes]
        inputs = {width: torch.randn(settings["tokens"], width).to(dtype) for width in {shape[1] for shape in shapes}}
        times = []
        for _ in range(6):
            started = time.perf_counter()
            for weight in weights:
                inputs[weight.shape[1]] @ weight.T
            times.append(time.perf_counter() - started)
        return float(np.median(times[1:]))

    dtypes = [torch.float32, torch.bfloat16] if manifest.dtype == "bfloat16" else [torch.float32]
    fastest = min(layer_s(dtype) for dtype in dtypes)
    return {"products_ms": fastest * architecture.num_layers * 1e3}


TASKS = {"roof": roof, "dense": dense, "flash": flash, "prompt_products": prompt_products, "read_through": read_through}


def main() -> int:
    settings = json.loads(sys.argv[1])
    print(json.dumps(TASKS[settings["task"]](settings)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
