"""How the throughput engine packs a layer's matrices: the encodings of base/group_codes.py, and where each is used.

Weights that share a scale lie along the inputs, but for a down projection, whose vectors are its inputs' columns, as a
few of its inputs are a hundred times the others. Fewer than WIDE_BITS cost most in some places, which therefore have
at least that many: a sequence's first token takes most of the attention of all others, so an error of its value goes
into every token; keys that several heads share go into the scores of each; what the last layers add to the states goes
into the logits as it is.
"""

from dataclasses import dataclass

from flashllm.base.group_codes import GROUP_CODES

PACKING = 3  # changes with these rules and with the encodings: a job's answers do
WIDE_BITS = 8
LATE_SHARE = 10  # layers to a late one, whose down projection is wide
_ENCODINGS = {4: "int4_64_min", 8: "int8_64"}
PACKED_BITS = tuple(_ENCODINGS)


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
        return count * GROUP_CODES[self.encoding].vector_nbytes(length)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPacking:
    """How the matrices of a model's layers are packed."""

    bits: int
    layers: int  # of the whole model
    shares_keys: bool  # whether several heads read the same keys

    def of(self, matrix: str, layer: int) -> Packing:
        """Packing of a matrix, by name, of a layer, counted in the whole model."""
        wide = matrix == "value" or (matrix == "key" and self.shares_keys)
        wide |= matrix == "down" and layer >= self.layers - late_layers(self.layers)
        return Packing(_ENCODINGS[max(self.bits, WIDE_BITS) if wide else self.bits], matrix == "down")


def late_layers(layers: int) -> int:
    """Layers at the end whose down projections are wide."""
    return -(-layers // LATE_SHARE)
