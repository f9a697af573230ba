"""A canonical tensor's rows out of a checkpoint's tensor, which may hold several projections or be transposed.

Reads only the bytes of the rows that are asked for, but for transposed tensors. Knows no layout and no dtype of the
result.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.registry import Claim
from flashllm.convert.checkpoint.source import Checkpoint

_COLUMN_NBYTES = 32 << 20  # of a transposed tensor, read at a time


def read_rows(checkpoint: Checkpoint, name: str, claim: Claim, first: int, out: NDArray[Any]) -> None:
    """Fill contiguous `out` [n, ...] of the source's storage with rows first to first + n of the canonical tensor.

    `name` is the source tensor's name in the checkpoint.
    """
    if claim.part.transposed:
        _read_columns(checkpoint, name, claim, first, out)
        return
    if claim.part.turned:
        _read_turned(checkpoint, name, claim, first, out)
        return
    row_nbytes = out[:1].nbytes
    done = 0
    for start, count in runs(claim, first, len(out)):
        checkpoint.read(name, start * row_nbytes, out[done : done + count])
        done += count


def runs(claim: Claim, first: int, n: int) -> list[tuple[int, int]]:
    """(first row in the source, rows) of rows first to first + n of the canonical tensor; neighbours are one run."""
    part = claim.part
    length = claim.rows // part.repeats if part.count is None else part.count
    result: list[tuple[int, int]] = []
    while n > 0:
        run, within = divmod(first, length)
        start, count = part.first + run * part.step + within, min(n, length - within)
        if result and sum(result[-1]) == start:
            result[-1] = (result[-1][0], result[-1][1] + count)
        else:
            result.append((start, count))
        first, n = first + count, n - count
    return result


def _read_columns(checkpoint: Checkpoint, name: str, claim: Claim, first: int, out: NDArray[Any]) -> None:
    """The same of a transposed source [columns, rows]: its rows pass by, and what is wanted of each is kept."""
    columns, width = checkpoint.tensors[name].shape
    wanted = runs(claim, first, len(out))
    together = max(1, _COLUMN_NBYTES // (width * out.itemsize))
    for column in range(0, columns, together):
        block = np.empty((min(together, columns - column), width), out.dtype)
        checkpoint.read(name, column * width * out.itemsize, block)
        done = 0
        for start, count in wanted:
            out[done : done + count, column : column + len(block)] = block[:, start : start + count].T
            done += count


def _read_turned(checkpoint: Checkpoint, name: str, claim: Claim, first: int, out: NDArray[Any]) -> None:
    """The same where each run's columns are the rows; runs are read whole."""
    part, columns = claim.part, claim.rows // claim.part.repeats
    run = np.empty((claim.shape[1], columns), out.dtype)
    done = 0
    while done < len(out):
        index, within = divmod(first + done, columns)
        count = min(columns - within, len(out) - done)
        checkpoint.read(name, (part.first + index * part.step) * run[0].nbytes, run)
        out[done : done + count] = run[:, within : within + count].T
        done += count
