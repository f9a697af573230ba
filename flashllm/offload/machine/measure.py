"""Measures what the throughput engine computes with: on the CPU by the runtime's own work, on a GPU by torch's.

Paper B, section 4.3, last paragraph. Fits nothing but curves through medians; the drive is measured by
`flashllm.profile`.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from flashllm import _core
from flashllm.offload.accelerators import has_cuda
from flashllm.offload.machine.measure_native import NativeProbe
from flashllm.offload.runtime.tiers.scratch import ALIGNMENT, open_reader
from flashllm.profile.machine import BatchRates, GpuRates
from flashllm.profile.rates import Probe, Sample, curve_of, sample_rounds, seconds_of

KIB, MIB = 1 << 10, 1 << 20
DTYPES = ("bfloat16", "float16")  # that `flashllm calibrate` measures
_PACKED_BITS = 4  # the width that is measured; others take nearly the same time
_BUFFER_NBYTES = 16 * MIB  # at least, as the runtime's are: what lies in small pages arrives later
_COLUMNS = 1024  # of a matrix whose product with a vector reads memory


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Sizes at which each rate is sampled; they are the knots of its curve. Bytes, rows or tokens."""

    gemm_rows: tuple[int, ...] = (1, 4, 8, 16, 32, 64, 96, 128, 256, 512, 1024)
    bmm_tokens: tuple[int, ...] = (64, 128, 256, 512, 1024)
    attention: tuple[int, ...] = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    elementwise: tuple[int, ...] = (256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB)
    copy: tuple[int, ...] = (64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    gemm_inner: int = 2048
    gemm_outer: int = 8192
    heads: int = 16
    head_dim: int = 128
    context: int = 512
    read: int = 64 * MIB  # of one read while products run
    rounds: int = 3
    seconds: float = 8.0  # of a dtype's products, and of all else of it: no sample begins later
    beside_s: float = 0.3
    at_least_s: float = 0.1  # of one sample
    rotation: int = 256 * MIB  # operands together take this, more than the last-level caches in use


QUICK_SIZES = BatchSizes(
    gemm_rows=(1, 16, 128), bmm_tokens=(64, 256), attention=(1 * MIB, 8 * MIB), elementwise=(256 * KIB, 4 * MIB),
    gemm_inner=1024, gemm_outer=4096, read=16 * MIB, rounds=1, seconds=0.5, beside_s=0.05, at_least_s=0.01,
    rotation=64 * MIB,
)  # fmt: skip


def measure_batches(
    dtypes: Iterable[str], file: Path, *, threads: int, sizes: BatchSizes = BatchSizes()
) -> dict[str, BatchRates]:
    """The rates of the runtime's products, attention and packing, with weights and cache of each of `dtypes`; products
    also while `file` is read, with the first."""
    found: dict[str, BatchRates] = {}
    for dtype in dtypes:
        probe = NativeProbe(dtype, _core.ThreadPool(threads), sizes.at_least_s, sizes.rotation)
        beside = None
        if found:
            first = next(iter(found.values()))
            beside = first.read_takes, first.read_loses
        found[dtype] = _batches(probe, file, sizes, beside)
    return found


def _batches(probe: NativeProbe, file: Path, sizes: BatchSizes, beside: tuple[float, float] | None) -> BatchRates:
    shape: dict[str, Any] = {"heads": sizes.heads, "head_dim": sizes.head_dim}
    packed = shape | {"bits": _PACKED_BITS}
    products = partial(probe.products, inner=sizes.gemm_inner, outer=sizes.gemm_outer)
    decode = partial(probe.decode_attention, context=sizes.context)
    # Products in turn: policies are compared by both, so a machine that drifts must drift for both.
    groups: tuple[Mapping[str, tuple[Probe, tuple[int, ...]]], ...] = (
        {
            "gemm": (products, sizes.gemm_rows),
            "packed_gemm": (partial(products, bits=_PACKED_BITS), sizes.gemm_rows),
            "decoded_gemm": (partial(products, bits=_PACKED_BITS, decoding=True), sizes.gemm_rows),
        },
        {
            "bmm": (partial(probe.prompt_attention, **shape), sizes.bmm_tokens),
            "cpu_attention": (partial(decode, **shape), sizes.attention),
            "packed_attention": (partial(decode, **packed), sizes.attention),
            "seal": (partial(probe.seal, **packed), sizes.attention),
            "elementwise": (partial(probe.elementwise, width=sizes.gemm_inner), sizes.elementwise),
        },
    )
    samples: dict[str, list[Sample]] = {}
    for group in groups:
        samples |= sample_rounds(group, rounds=sizes.rounds, seconds=sizes.seconds)
    takes, loses = beside or probe.beside_reads(
        reading(file, sizes.read), seconds=sizes.beside_s, inner=sizes.gemm_inner, rounds=sizes.rounds
    )
    curves = {name: curve_of(each) for name, each in samples.items()}
    return BatchRates(read_takes=takes, read_loses=loses, square_s=probe.square_s(), **curves)


def reading(path: Path, nbytes: int) -> Callable[[], None]:
    """One read of a random part of a file, as the disk tier makes it: a batch that is split and waited for."""
    file, reader = _core.DirectFile(str(path)), open_reader()
    nbytes = min(nbytes, file.size // ALIGNMENT * ALIGNMENT)
    buffer = _core.allocate(max(nbytes, _BUFFER_NBYTES))[:nbytes]

    def read() -> None:
        start = random.randrange(0, file.size - nbytes + 1, ALIGNMENT)
        batch = _core.ReadBatch(reader, file)
        batch.add(start, buffer)
        batch.submit()
        batch.wait()

    return read


def measure_gpu(*, sizes: BatchSizes = BatchSizes(), device: str = "cuda") -> GpuRates | None:
    """The rates of torch's work on a GPU and of the links to it; None where torch sees none."""
    if device == "cuda" and not has_cuda():
        return None
    import torch

    on, host = torch.device(device), torch.device("cpu")
    pin = on.type == "cuda"

    def timed(size: int, units: float, work: Callable[[], object]) -> Sample:
        def synchronous() -> None:
            work()
            if pin:
                torch.cuda.synchronize(on)

        synchronous()  # first touch, choice of a kernel
        return Sample(size=size, units=units, seconds=seconds_of(synchronous, at_least_s=sizes.at_least_s))

    def operands(
        *shape: int, dtype: torch.dtype = torch.float16, where: torch.device = on
    ) -> Callable[[], torch.Tensor]:
        """A function giving the next of several tensors, which no cache holds together."""
        one = torch.rand(shape).to(dtype)
        several = [one.clone() for _ in range(max(2, -(-sizes.rotation // one.nbytes)))]
        turn = cycle([each.pin_memory() if pin and where == host else each.to(where) for each in several])
        return lambda: next(turn)

    def copy(nbytes: int, *, source: torch.device, target: torch.device) -> Sample:
        following = operands(nbytes, dtype=torch.uint8, where=source)
        out = torch.empty(nbytes, dtype=torch.uint8, device=target, pin_memory=pin and target == host)
        return timed(nbytes, nbytes, lambda: out.copy_(following(), non_blocking=pin))

    def gemm(rows: int) -> Sample:
        weight, x = operands(sizes.gemm_outer, sizes.gemm_inner), operands(rows, sizes.gemm_inner)()
        flop = 2 * rows * sizes.gemm_inner * sizes.gemm_outer
        return timed(rows, flop, lambda: torch.nn.functional.linear(x, weight()))

    def attention(tokens: int) -> Sample:
        keys, scores = operands(sizes.heads, tokens, sizes.head_dim), operands(sizes.heads, tokens, tokens)()
        flop = 4 * sizes.heads * tokens * tokens * sizes.head_dim
        return timed(tokens, flop, lambda: (keys() @ keys().transpose(1, 2), scores @ keys()))

    def own_memory(nbytes: int) -> Sample:
        matrix, x = operands(nbytes // (2 * _COLUMNS), _COLUMNS), operands(_COLUMNS)()
        return timed(nbytes, nbytes, lambda: matrix() @ x)

    probes: dict[str, tuple[Probe, tuple[int, ...]]] = {
        "ctog": (partial(copy, source=host, target=on), sizes.copy),
        "gtoc": (partial(copy, source=on, target=host), sizes.copy),
        "gemm": (gemm, sizes.gemm_rows),
        "bmm": (attention, sizes.bmm_tokens),
        "device_bandwidth": (own_memory, sizes.attention),
    }
    samples = sample_rounds(probes, rounds=sizes.rounds, seconds=sizes.seconds)
    return GpuRates(**{name: curve_of(each) for name, each in samples.items()})
