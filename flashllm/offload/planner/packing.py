"""How the throughput engine packs a layer's matrices: the encodings of base/group_codes.py, and where each is used. A
matrix that the model has in codes stays as it is, but where fewer bits are asked for. And the sizes of packed keys and
values (csrc/kernels/group_codec.h).

Weights that share a scale lie along the inputs, but for a down projection, whose vectors are its inputs' columns, as a
few of its inputs are a hundred times the others. Fewer than WIDE_BITS cost most in some places, which therefore have
at least that many: a sequence's first token takes most of the attention of all others, so an error of its value goes
into every token; keys that several heads share go into the scores of each; what the last layers add to the states goes
into the logits as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from flashllm.base.codes.carried import CARRIED_CODES, PLANE_CODES, CarriedCode, PlaneCode
from flashllm.base.group_codes import GROUP_CODES, GroupCode

PACKING = 5  # changes with these rules and with the encodings: a job's answers do
WIDE_BITS = 8
LATE_SHARE = 10  # layers to a late one, whose down projection is wide
_ENCODINGS = {4: "int4_64_min", 8: "int8_64"}
# That matrices may stay in.
CODES: Mapping[str, GroupCode | CarriedCode | PlaneCode] = {**GROUP_CODES, **CARRIED_CODES, **PLANE_CODES}
PACKED_BITS = tuple(_ENCODINGS)
GROUP = 64  # values of a position that share a scale and a minimum
_UNIT = 16  # codes of keys or values that lie together, in 2 * bits bytes


@dataclass(frozen=True, slots=True)
class Packing:
    """How a packed matrix lies: vectors of an encoding, one an output, or one an input."""

    encoding: str
    by_inputs: bool = False

    def vectors(self, rows: int, columns: int) -> tuple[int, int]:
        """How many a matrix of `rows` outputs and `columns` inputs has, and the weights of each."""
        return (columns, rows) if self.by_inputs else (rows, columns)

    def nbytes(self, rows: int, columns: int) -> int:
        count, length = self.vectors(rows, columns)
        return count * CODES[self.encoding].vector_nbytes(length)

    @property
    def bits(self) -> int:
        return CODES[self.encoding].bits

    @property
    def has_plane(self) -> bool:
        """True where the scales of its codes lie beside the matrix."""
        return self.encoding in PLANE_CODES


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPacking:
    """How the matrices of a model's layers are packed."""

    bits: int | None  # None: what is in codes alone, as it is
    layers: int  # of the whole model
    shares_keys: bool  # whether several heads read the same keys

    def of(self, matrix: str, layer: int, stored: str | None) -> Packing | None:
        """Packing of a matrix, by name, of a layer, counted in the whole model; None: as it is, in the model's dtype.

        `stored`: the codes that the model has it in, which are kept where they are of as few bits.
        """
        kept = None if stored is None else Packing(stored, matrix == "down")
        if self.bits is None:
            return kept
        packing = self.made(matrix, layer, self.bits)
        return packing if kept is None or kept.bits > packing.bits else kept

    def made(self, matrix: str, layer: int, bits: int) -> Packing:
        wide = matrix == "value" or (matrix == "key" and self.shares_keys)
        wide |= matrix == "down" and layer >= self.layers - late_layers(self.layers)
        return Packing(_ENCODINGS[max(bits, WIDE_BITS) if wide else bits], matrix == "down")


def late_layers(layers: int) -> int:
    """Layers at the end whose down projections are wide."""
    return -(-layers // LATE_SHARE)


def in_units(columns: int) -> int:
    """`columns` keys or values of a position, up to whole units."""
    return -(-columns // _UNIT) * _UNIT


def codes_nbytes(columns: int, bits: int) -> int:
    """Bytes that so many keys or values of a position take, without their scale and minimum."""
    return in_units(columns) // _UNIT * 2 * bits
