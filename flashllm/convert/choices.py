"""The choices of a conversion: one list for everything that converts."""

from typing import Literal, TypedDict

from flashllm.base.bf12 import BF12
from flashllm.base.group_codes import code_of
from flashllm.convert.checkpoint.coded import CodedWeights

# Where the gates of a gated FFN go: into the neurons' rows, or into memory, where they name the active neurons.
# With "4bit" they go into the rows, and in 4 bits into memory as predictors.
GatePlace = Literal["rows", "resident", "4bit"]

Activations = Literal["float32", "int16", "int8"]


class Choices(TypedDict, total=False):
    """Choices of a conversion: the keyword arguments of `convert` and of all that is built on it."""

    dtype: str | None  # of the result: float32, float16, bfloat16; None: what the checkpoint prefers, or is stored in
    encoding: str | None  # of the neurons' rows, of CODED_ENCODINGS; None: the dtype
    resident_encoding: str | None  # of the resident matrices, likewise. Resident gates are stored as the rows are
    table_encoding: str | None  # of the embedding and the head; None: as `resident_encoding`
    activations: Activations | None  # what codes are multiplied by, a token at a time; None: as is usual for them
    predictors: bool  # make untrained ones, to use the model with before better ones are trained; none where no
    # activation is ever zero, and none where the gates name the neurons
    gate: GatePlace  # of a gated FFN; by default "rows"
    coded: CodedWeights | None  # weights that are written as they are, and not encoded
    in_place: bool  # without encodings and `coded`: experts stay where they lie, as far as they can be read there
    keep: (
        bool  # without `encoding` and `coded`: the weights of a quantised checkpoint keep their codes and scales, those
    )
    # of the resident matrices too where no encoding is given for them


def encoding_of(bits: int | None) -> str | None:
    """The encoding of weights of so many bits, 12, 8 or 4; None, the dtype, for 16 or none."""
    if bits in (None, 16):
        return None
    return BF12.name if bits == 12 else code_of(bits).name
