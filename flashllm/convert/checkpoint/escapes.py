"""Which matrices of a checkpoint bf12 can hold without loss: reads them once, before anything is written."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.registry import Claim
from flashllm.base.bf12 import BF12
from flashllm.base.dtypes import WEIGHT_DTYPE_BY_CODE, WEIGHT_DTYPES, cast
from flashllm.base.files import CHUNK_NBYTES
from flashllm.convert.checkpoint.pieces import read_rows
from flashllm.convert.checkpoint.source import Checkpoint


def held_by_bf12(checkpoint: Checkpoint, names: Mapping[str, str], claim: Claim) -> bool:
    """True where every vector of a canonical matrix fits; of a down projection these are the columns. `names`:
    state_dict name -> name in the checkpoint. A down projection is in memory whole. OverflowError for weights outside
    bfloat16's range."""
    blocks = _blocks(checkpoint, names[claim.source], claim)
    if claim.name.split(".")[-2] == "down":
        return BF12.holds(np.ascontiguousarray(np.concatenate(list(blocks)).T))
    return all(BF12.holds(block) for block in blocks)


def _blocks(checkpoint: Checkpoint, name: str, claim: Claim) -> Iterator[NDArray[Any]]:
    """The matrix's bfloat16 bits, some rows at a time."""
    dtype = WEIGHT_DTYPE_BY_CODE[checkpoint.tensors[name].dtype]
    width = claim.shape[-1]
    together = claim.rows if claim.part.transposed else max(1, CHUNK_NBYTES // (width * dtype.itemsize))
    for first in range(0, claim.rows, together):
        values = np.empty((min(together, claim.rows - first), width), dtype.storage)
        read_rows(checkpoint, name, claim, first, values)
        yield cast(values, dtype, WEIGHT_DTYPES["bfloat16"])
