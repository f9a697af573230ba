"""`Profile`: what was measured of a machine and one of its drives. Knows no model and measures nothing."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from flashllm.base.checks import check_from_zero, check_int, check_str
from flashllm.config import Backend
from flashllm.profile.costs import ReaderCosts
from flashllm.profile.rates import RateCurve

# A typical layer, for choosing a backend (OPT-6.7B's shape at half its size): rows read, the share of them that may be
# read while it computes, seconds of products.
_TYPICAL_READS, _TYPICAL_BESIDE, _TYPICAL_PRODUCTS_S = 400, 0.8, 6e-3
_UNSTEADY = 2.0  # a quiet drive's quartiles lie within a fifth of each other
_REMEMBERS = 1.5  # ratio of a first read's time to a second one's
_FRESH = timedelta(days=30)
LEAST_FILE = 1 << 30  # bytes: too much of a smaller one lies in caches we cannot see (the drive's, a host's)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRates:
    """Rates of the throughput engine on the CPU, with weights and cache of one dtype."""

    gemm: RateCurve  # flop/s of products over rows
    packed_gemm: RateCurve  # the same of packed weights, of a prompt
    decoded_gemm: RateCurve  # the same in decoding
    bmm: RateCurve  # flop/s of a prompt's attention over its tokens
    cpu_attention: RateCurve  # bytes/s of the cache that decode attention reads, over bytes of a call
    packed_attention: RateCurve  # the same of a packed cache, in bytes that it takes unpacked
    seal: RateCurve  # cache bytes/s that are packed
    elementwise: RateCurve  # bytes/s that norms, sums and activations read and write
    read_takes: float  # share of the products' rate that is lost while the drive is read at full rate
    read_loses: float  # share of the drive's rate that is lost while products run
    square_s: float  # of a batch in a layer: what neither products nor bytes explain

    def __post_init__(self) -> None:
        check_from_zero("square_s", self.square_s)
        for name in ("read_takes", "read_loses"):
            check_from_zero(name, getattr(self, name))
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} must be below 1, not {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRates:
    """A GPU's links and products."""

    ctog: RateCurve  # bytes/s from pinned memory, over bytes of one transfer
    gtoc: RateCurve
    gemm: RateCurve  # flop/s over rows
    bmm: RateCurve  # flop/s of batched products over the side of the score matrix
    device_bandwidth: RateCurve  # bytes/s of its own memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A drive as this machine sees it, and the machine's own rates. What was not measured is empty, or None."""

    readers: tuple[ReaderCosts, ...]
    sequential_bps: float  # bytes per second, all backends' best
    direct: bool  # False: the reads went through the page cache, and tell nothing about the drive
    dram_bps: float  # reading memory, all cores
    gemv_bps: Mapping[str, float]  # bytes of weights a second in a resident product of one token, by encoding
    sparse_bps: Mapping[str, float]  # the same of rows gathered from the neuron cache
    layer_overhead_s: float  # of a token, a layer: interpreter, waking threads, norms
    scatter: float  # of the times of one batch of reads, as `scatter_of`
    again: float  # first read of some places ÷ a second one right after it, in time
    threads: int  # compute threads measured with
    made: str  # ISO 8601
    blocks_wps: float = 4e9  # weights of a file's blocks that one thread puts into rows a second; typically so many
    system: str = ""  # processor and kernel, as `base.machine.system_name` has them
    file_nbytes: int = LEAST_FILE  # of what was read
    writes: RateCurve | None = None  # direct writes, bytes/s over bytes of one
    batches: Mapping[str, BatchRates] = field(default_factory=dict)  # by dtype
    gpu: GpuRates | None = None

    def __post_init__(self) -> None:
        if not self.readers:
            raise ValueError("readers must not be empty")
        for name in ("sequential_bps", "dram_bps", "layer_overhead_s", "scatter", "again", "blocks_wps"):
            check_from_zero(name, getattr(self, name))
        if self.blocks_wps == 0:
            raise ValueError("blocks_wps must be above 0: no block is free")
        for name in ("gemv_bps", "sparse_bps"):
            for dtype, rate in getattr(self, name).items():
                check_str(name, dtype, 80)
                check_from_zero(name, rate)
        if type(self.direct) is not bool:
            raise ValueError(f"direct must be true or false, not {str(self.direct)[:80]!r}")
        check_int("threads", self.threads, 1, 2**16)
        check_int("file_nbytes", self.file_nbytes, 0, 2**60)
        check_str("system", self.system, 1000)
        datetime.fromisoformat(check_str("made", self.made, 80))

    def is_fresh(self, system: str, file_nbytes: int) -> bool:
        """True where a run may plan by the drive's figures and need not measure them: for 30 days, on the processor and
        the kernel that they were measured with, where a file as large as the run's was read, or LEAST_FILE."""
        made = datetime.fromisoformat(self.made)
        age = datetime.now(UTC) - (made if made.tzinfo is not None else made.replace(tzinfo=UTC))
        large = self.file_nbytes >= min(file_nbytes, LEAST_FILE)
        return timedelta(0) <= age < _FRESH and self.system == system and large

    def resident_bps(self, encoding: str, dtype: str) -> float:
        """The rate of resident weights; that of the model's dtype, or of memory, where none was measured. Never above
        that of reading memory: what seems faster was measured in a faster moment."""
        return min(self.gemv_bps.get(encoding, self.gemv_bps.get(dtype, self.dram_bps)), self.dram_bps)

    def gathered_bps(self, encoding: str, dtype: str) -> float:
        """The rate of rows from the neuron cache; otherwise as `resident_bps`."""
        return min(self.sparse_bps.get(encoding, self.sparse_bps.get(dtype, self.dram_bps)), self.dram_bps)

    @property
    def steady(self) -> bool:
        """True where the drive kept its rate while it was measured."""
        return self.scatter <= _UNSTEADY

    @property
    def remembers(self) -> bool:
        """True where a cache between this machine and the drive keeps what was read: a host's, or a controller's."""
        return self.again >= _REMEMBERS

    def best(self, row_nbytes: int, backend: Backend | None = None) -> ReaderCosts:
        """The reader under which a typical layer with rows of `row_nbytes` takes least time: some reads during its
        products, the others after them. With `backend`: its best depth, where it was measured."""
        readers = [reader for reader in self.readers if reader.backend == backend] or list(self.readers)

        def layer(reader: ReaderCosts) -> float:
            landed = reader.beside_products(_TYPICAL_PRODUCTS_S, row_nbytes)
            beside = min(_TYPICAL_BESIDE * _TYPICAL_READS, landed)
            return beside * reader.lost(row_nbytes) + reader.batch(_TYPICAL_READS - beside, row_nbytes)

        return min(readers, key=layer)

    def of(self, backend: str, depth: int) -> ReaderCosts:
        """The measured backend nearest to the one asked for."""
        same = [reader for reader in self.readers if reader.backend == backend] or list(self.readers)
        return min(same, key=lambda reader: abs(math.log(reader.depth / depth)))


def fields_of(rates: BatchRates | GpuRates) -> dict[str, Any]:
    return {one.name: getattr(rates, one.name) for one in dataclasses.fields(rates)}
