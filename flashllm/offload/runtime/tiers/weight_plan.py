"""Which tier each weight lives on, and how many bytes that takes: known before anything is allocated or read.

Each matrix of a layer is whole on one tier, the same in all layers. Those of the disk lie in the model's own file where
its bytes are the matrix, else in a scratch file. Norms, biases, positions, scales that lie beside codes, narrow
embeddings' projections and what is small of a recurrent mixer are always the device's. The embedding and the head stay
in 16 bits: gathered rows and a few per cent of the bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod

from flashllm.errors import UsageError
from flashllm.offload.planner.packing import PACKED_BITS, Packing, WeightPacking
from flashllm.offload.policy import Policy
from flashllm.offload.runtime.tasks import BUFFERS
from flashllm.offload.runtime.tiers.scratch import ALIGNMENT, round_up
from flashllm.offload.runtime.tiers.source import Extent, WeightSource, matrix_name, of_either

DEVICE, CPU, DISK = "g", "c", "d"  # tiers, as policy.py names them
GATHERED_ROWS = 1024  # rows of the embedding read at a time


@dataclass(frozen=True, slots=True)
class TieredTensor:
    """A tensor that has a tier, and where it lies in that tier's memory or, of the disk, in a staging buffer."""

    name: str  # canonical
    home: str
    extent: Extent | None  # of a file that is read as it is
    rows: int
    columns: int
    nbytes: int
    start: int  # a multiple of ALIGNMENT
    staged_at: int  # of the CPU tier: place of its copy in a staging buffer
    packing: Packing | None = None  # None: as it is

    @property
    def skip(self) -> int:
        """Bytes from `start` to the tensor, which begins inside a block of its file."""
        return 0 if self.extent is None else self.extent.offset % ALIGNMENT

    @property
    def room(self) -> int:
        """Whole blocks from `start` on."""
        return round_up(self.skip + self.nbytes)


@dataclass(frozen=True, slots=True)
class Bundle:
    """Tensors that are used together: a layer's matrices; or the head, or the embedding."""

    tensors: Mapping[str, TieredTensor]  # by short name
    image: tuple[int, int]  # of a staging buffer: what is kept in the scratch file, as one run
    scratch_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """The place of every tensor, and the bytes of each tier: known before anything is allocated."""

    homes: Mapping[str, str]  # matrix of a layer, by its name of either kind of mixer -> tier, the same in all layers
    buffer_nbytes: int  # one staging buffer
    read_nbytes: int  # of it what comes from the disk, which lies first
    staging_buffers: int  # one where no layer arrives while another is computed with
    gather_nbytes: int  # where rows of an embedding on disk are read to
    small_nbytes: int  # norms, biases, positions, projections, scales that lie beside codes
    device_nbytes: int  # tensors at home on the device, with those
    cpu_nbytes: int
    scratch_nbytes: int
    start_nbytes: int  # memory needed while the weights are brought to their tiers, and no longer
    arriving_nbytes: int  # likewise, of weights on their way to an accelerator
    bundles: tuple[Bundle, ...] = field(repr=False)  # of the layers, then the head's and the embedding's

    @property
    def table(self) -> tuple[Bundle, TieredTensor]:
        """The embedding, which may be the head, and the bundle that it is in."""
        head, own = self.bundles[-2:]
        return (own, own.tensors["table"]) if own.tensors else (head, head.tensors["head"])


def assign(sizes: Mapping[str, int], fractions: tuple[float, float, float]) -> dict[str, str]:
    """The tier of each whole tensor with which the shares of bytes come closest to `fractions` of device, CPU, disk.

    Of equally close ones the first in the order of the tensors, device before CPU before disk.
    """
    total = sum(sizes.values())
    best: tuple[float, tuple[str, ...]] | None = None
    for tiers in product((DEVICE, CPU, DISK), repeat=len(sizes)):
        held = dict.fromkeys((DEVICE, CPU, DISK), 0)
        for tier, nbytes in zip(tiers, sizes.values(), strict=True):
            held[tier] += nbytes
        miss = sum(abs(held[tier] / total - want) for tier, want in zip(held, fractions, strict=True))
        if best is None or miss < best[0] - 1e-12:
            best = miss, tiers
    assert best is not None
    return dict(zip(sizes, best[1], strict=True))


def plan_weights(source: WeightSource, policy: Policy, *, bits: int | None = None) -> WeightPlan:
    """Give each tensor of the model a place under `policy`, its layers' matrices in `bits` bits.

    None: as they are, those in codes too.

    UsageError for widths that there are not.
    """
    if bits is not None and bits not in PACKED_BITS:
        raise UsageError(f"weights in {bits} bits: the widths are {', '.join(map(str, PACKED_BITS))}")
    sizes: dict[str, int] = {}
    for layer in source.stage.numbers:
        for name in source.matrices(layer):
            own = prod(source.shapes[matrix_name(layer, name)])
            sizes[of_either(name)] = sizes.get(of_either(name), 0) + own
    homes = assign(sizes, (policy.wg, policy.wc, policy.wd))
    tied = source.block.tied_head
    head, table = policy.head_tier, policy.embedding_tier(tied=tied and source.stage.is_last)
    layout = _Layout(source, bits)
    for layer in source.stage.numbers:
        tiered = {name: (matrix_name(layer, name), homes[of_either(name)]) for name in source.matrices(layer)}
        layout.add(tiered, layer=layer)
    stage = source.stage
    layout.add({"head": ("embedding.weight" if tied else "head.weight", head)} if stage.is_last else {})
    is_head = tied and stage.is_last
    layout.add({"table": ("embedding.weight", table)} if stage.is_first and not is_head else {})
    small = _small_nbytes(source) + layout.plane_nbytes
    return WeightPlan(
        homes=homes,
        buffer_nbytes=layout.buffer_nbytes,
        read_nbytes=layout.read_nbytes,
        staging_buffers=BUFFERS if policy.overlap else 1,
        gather_nbytes=GATHERED_ROWS * gather_stride(source) if table == DISK and source.stage.is_first else 0,
        small_nbytes=small,
        device_nbytes=layout.held[DEVICE] + small,
        cpu_nbytes=layout.held[CPU],
        scratch_nbytes=layout.scratch_nbytes,
        start_nbytes=layout.start_nbytes,
        arriving_nbytes=layout.arriving_nbytes,
        bundles=tuple(layout.bundles),
    )


def weight_packing(source: WeightSource, bits: int | None) -> WeightPacking:
    shared = any(mixer.kv_heads < mixer.heads for mixer in source.block.attentions)
    return WeightPacking(bits=bits, layers=source.stage.layers, shares_keys=shared)


class _Layout:
    """Places tensors one behind the other, bundle by bundle."""

    def __init__(self, source: WeightSource, bits: int | None) -> None:
        self._source = source
        self._packing = weight_packing(source, bits)
        self.held = {DEVICE: 0, CPU: 0}
        self.start_nbytes = self.plane_nbytes = 0
        self.buffer_nbytes = self.read_nbytes = self.arriving_nbytes = self.scratch_nbytes = 0
        self.bundles: list[Bundle] = []

    def add(self, wanted: Mapping[str, tuple[str, str]], *, layer: int | None = None) -> None:
        """Tensors by short name: (canonical name, tier). Those of a layer of the stage are packed as the plan says."""
        packings: dict[str, Packing] = {}
        if layer is not None:
            widened = 0
            for short, (name, _) in wanted.items():
                stored = self._source.encoding(name)
                packing = self._packing.of(short, layer, stored)
                if packing is not None:
                    packings[short] = packing
                    widened += 0 if packing.encoding == stored else prod(self._source.shapes[name])
            self.start_nbytes = max(self.start_nbytes, widened * self._source.dtype.itemsize)
            if "down" in packings and packings["down"].has_plane:
                self.plane_nbytes += self._source.plane_nbytes(layer)
        extents = {
            short: None if short in packings else self._source.extent(name) for short, (name, _) in wanted.items()
        }
        tensors: dict[str, TieredTensor] = {}
        end = read = 0  # of the staging buffer
        held = self.held[DEVICE]
        # Read as they are, then from the scratch file as one run, then copied from the CPU tier.
        order = sorted(wanted, key=lambda short: (wanted[short][1] == CPU, extents[short] is None))
        for short in order:
            name, home = wanted[short]
            rows, columns = self._source.shapes[name]
            packing = packings.get(short)
            plain_nbytes = rows * columns * self._source.dtype.itemsize
            nbytes = packing.nbytes(rows, columns) if packing else plain_nbytes
            extent = extents[short]
            start = self.held.get(home, end)
            tensor = TieredTensor(name, home, extent, rows, columns, nbytes, start, end, packing)
            if home != DISK:
                self.held[home] += tensor.room
            if home in (CPU, DISK) and short != "table":  # rows of that pass no staging buffer
                end += tensor.room
                read = end if home == DISK else read
            tensors[short] = tensor
        scratched = [one for one in tensors.values() if one.home == DISK and one.extent is None]
        image = (0, 0)
        if scratched:
            image = (min(one.start for one in scratched), max(one.start + one.room for one in scratched))
        self.bundles.append(Bundle(tensors, image, self.scratch_nbytes))
        self.scratch_nbytes += image[1] - image[0]
        self.buffer_nbytes = max(self.buffer_nbytes, end)
        self.read_nbytes = max(self.read_nbytes, read)
        self.arriving_nbytes = max(self.arriving_nbytes, self.held[DEVICE] - held)


def _small_nbytes(source: WeightSource) -> int:
    """Norms and biases in fp32; positions, projections and routers in their dtype."""
    nbytes = 0
    for name in small_tensors(source):
        shape = source.shapes[name]
        nbytes += prod(shape) * (4 if is_vector(name) else source.read_dtype(name).itemsize)
    return nbytes


def is_vector(name: str) -> bool:
    """True for the canonical name of a norm's weight, a bias, sinks, a scale, or of a recurrent mixer's taps and what
    it has of each head: kept in fp32."""
    return name.endswith(("_norm.weight", "bias", "sinks", "scale", ".decay_log", ".skip")) or ".conv" in name


def is_outer_matrix(name: str) -> bool:
    """True for the canonical name of a small matrix of no layer: positions, a narrow embedding's."""
    return not is_vector(name) and not name.startswith("layers.")


def small_tensors(source: WeightSource) -> list[str]:
    """Names of the tensors that have no tier: they stay on the device."""
    tiered = {matrix_name(layer, name) for layer in source.stage.numbers for name in source.matrices(layer)}
    tiered |= {"embedding.weight", "head.weight"}
    return [name for name in source.shapes if name not in tiered]


def gather_stride(source: WeightSource) -> int:
    """Bytes of the blocks in which a row of the embedding lies, at most."""
    return round_up(source.block.embed_dim * source.dtype.itemsize) + ALIGNMENT
