"""`flashllm calibrate [PATH]`: measures a drive and this machine for both engines, and keeps that as its profile."""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from flashllm.base.command_line import print_json, say
from flashllm.base.text import inert
from flashllm.base.units import format_size
from flashllm.commands.options import add_json, add_store

if TYPE_CHECKING:
    from flashllm.profile.costs import ReaderCosts
    from flashllm.profile.machine import Profile

_ROWS = (4 << 10, 16 << 10, 64 << 10)  # bytes of a neuron: of small, middling and large models
_BATCHES = (1, 16, 256)
_PROMPT = "Once upon a time there was a little dog who lived in a house by the sea."
_DEMO_TOKENS = 100
_SCRATCH_NBYTES = 2 << 30  # of the file written and removed again where PATH is no large model
_EVICTING_NBYTES = 64 << 20  # about what a large model's layer touches
_MOVED = 2.0  # ratio of a read's cost now to before that a drive hardly reaches by itself


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        type=Path,
        help="a model directory, or any folder of the drive (default: where converted models are kept)",
    )
    add_json(parser)
    add_store(parser)


def main(args: argparse.Namespace) -> int:
    """Measure, store, and show what was measured and chosen."""
    from flashllm.base.checks import to_json
    from flashllm.base.machine import num_cores
    from flashllm.base.progress import ProgressBar
    from flashllm.base.user_dirs import user_cache_dir
    from flashllm.convert.named import has_demo
    from flashllm.errors import UsageError
    from flashllm.format.rows import MEASURED_ENCODINGS
    from flashllm.offload.machine.measure import DTYPES, measure_batches, measure_gpu
    from flashllm.profile.calibrate import CalibrationOptions, measure
    from flashllm.profile.reads import file_to_read
    from flashllm.profile.store import device_of, find_profile, save_profile, store_path

    if args.path is None:
        path = user_cache_dir()
        path.mkdir(parents=True, exist_ok=True)
    else:
        path = args.path
    if not path.exists():
        raise UsageError(f"{path}: there is no such file or directory; name a model or a folder on the drive")
    store = args.store if args.store is not None else store_path()
    if store.is_dir():
        raise UsageError(f"--store {store}: is a folder; name a file in it")
    store.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=store.parent):
        pass  # where nothing can be stored, nothing needs to be measured
    key = device_of(path)
    threads = num_cores()
    if not has_demo():
        say("what a layer costs beside its weights is assumed: the demo, which measures it, is in the repository alone")
    with ProgressBar("calibrate", unit="steps") as bar:
        bar("preparing a file to read", 0, 1)
        with file_to_read(path, _SCRATCH_NBYTES) as file:
            profile = measure(
                file,
                threads=threads,
                encodings=MEASURED_ENCODINGS,
                options=CalibrationOptions(),
                layer_overhead=(lambda: _layer_overhead_s(threads)) if has_demo() else None,
                writes_in=path if path.is_dir() else path.parent,
                batches=lambda: measure_batches(DTYPES, file, threads=threads),
                gpu=measure_gpu,
                progress=bar,
            )
    if not profile.direct:
        say(f"direct I/O is not available on {key}: reads went through the page cache, and say little of it")
    if not profile.steady:
        say(
            f"{key} did not keep its rate: the upper quartile of a batch's times is {profile.scatter:.1f} times the "
            "lower one; calibrate again when nothing else uses the drive"
        )
    if profile.remembers:
        say(
            f"{key}: a second read of the same places was {profile.again:.2g} times as fast, so a cache outside this "
            "machine (a host's or a controller's) keeps them, and direct I/O cannot bypass it; bytes that were not "
            "read for long take longer than measured here"
        )
    change = _change(profile, find_profile(path, store)[0])
    if not 1 / _MOVED < change < _MOVED:
        say(
            f"a read of {format_size(_ROWS[1])} took {change:.2g} times what it took in the last calibration of "
            f"{key}; if other work slows the drive now, calibrate again later"
        )
    problem = save_profile(store, key, profile)
    if problem is not None:
        say(problem)
    if args.json:
        print_json({"key": str(key), "store": str(store), **to_json(profile)})
    else:
        print(inert("\n".join([str(key), *_lines(profile), f"stored in {store}"])))
    return 0


def _layer_overhead_s(threads: int) -> float:
    """Seconds of a token, a layer, that neither reads nor weights explain: those of the demo, whose weights are few.

    A large model's weights push code and activations out of the processor's caches at every layer. Here other memory
    does that, but only before each step, which is one native call: its first layer pays for cold code, all layers for
    cold data.
    """
    import statistics

    import numpy as np

    from flashllm.config import RunConfig
    from flashllm.convert.named import demo_path
    from flashllm.engine.model import Model
    from flashllm.generate.tokenizer import Tokenizer

    others, rest_s = np.zeros(_EVICTING_NBYTES, np.uint8), []
    ids = Tokenizer.load(demo_path()).encode(_PROMPT)
    with Model.open(demo_path(), RunConfig(threads=threads, io_threads=8)) as model, model.new_sequence() as sequence:
        for _ in range(_DEMO_TOKENS + 1):
            others += 1
            model.meter.restart()
            logits = model.step([(sequence, ids)])[0]
            times = model.meter.take()
            rest_s.append((times.total_ms - times.io_ms) / 1e3)
            ids = [int(logits.argmax())]
        # The first step is the prompt's.
        return max(0.0, statistics.median(rest_s[1:])) / model.manifest.architecture.num_layers


def _change(profile: "Profile", before: "Profile | None") -> float:
    """Time of a read in the new profile ÷ its time in the one `before`; 1 without that."""
    if before is None:
        return 1.0
    return profile.best(_ROWS[1]).request(_ROWS[1]) / before.best(_ROWS[1]).request(_ROWS[1])


def _lines(profile: "Profile") -> list[str]:
    def name(reader: "ReaderCosts") -> str:
        return f"{reader.depth} threads" if reader.backend == "threads" else f"io_uring {reader.depth}"

    header = "  request " + "".join(f"{name(reader):>13}" for reader in profile.readers)
    lines = [header]
    for nbytes in profile.readers[0].sizes:
        rates = "".join(f"{nbytes / reader.request(nbytes) / 1e6:>8.0f} MB/s" for reader in profile.readers)
        lines.append(f"  {format_size(nbytes):>7} {rates}")
    latencies = "".join(f"{reader.latency_s * 1e6:>10.0f} us" for reader in profile.readers)
    lines.append(f"  {'batch':>7} {latencies}")
    lines.append("  during products on all cores; what a read takes from them")
    for nbytes in _ROWS:
        rates = "".join(f"{nbytes / reader.beside(nbytes) / 1e6:>8.0f} MB/s" for reader in profile.readers)
        lost = "".join(f"{reader.lost(nbytes) * 1e6:>10.1f} us" for reader in profile.readers)
        lines += [f"  {format_size(nbytes):>7} {rates}", f"  {'':>7} {lost}"]
    lines.append(f"sequential reads {profile.sequential_bps / 1e9:.2f} GB/s, memory {profile.dram_bps / 1e9:.1f} GB/s")
    if profile.writes is not None:
        lines.append(f"writes up to {max(rate for _, rate in profile.writes.knots) / 1e9:.2f} GB/s")
    for what, by_dtype in (("resident products", profile.gemv_bps), ("products of cached neurons", profile.sparse_bps)):
        lines.append(f"{what}: " + ", ".join(f"{dtype} {rate / 1e9:.1f} GB/s" for dtype, rate in by_dtype.items()))
    for dtype, batch in profile.batches.items():
        products = ", ".join(f"{batch.gemm.at(rows) / 1e9:.0f} with {rows}" for rows in _BATCHES)
        lines.append(f"products of batches in {dtype}, Gflop/s: {products} rows")
    lines.append(f"blocks of a file into rows: {profile.blocks_wps / 1e9:.1f} billion weights a second and thread")
    lines.append(f"besides, {profile.layer_overhead_s * 1e3:.2f} ms a layer")
    for row in _ROWS:
        best = profile.best(row)
        gap = best.gap(row)
        through = f"gaps up to {format_size(gap)} are read through" if gap else "no gap is worth reading through"
        lines.append(f"neurons of {format_size(row)}: {name(best)}, {through}")
    return lines
