"""Codes in groups that change a matrix's products least, not its weights: rounding with feedback of the error.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022,
section 3; the loop is that of flashllm/offload/quantise/feedback.py. Groups lie along d_model. Of matrices that take
d_model inputs a group's scale is fitted when its first input comes up, to weights that carry the feedback by then. Of a
down projection a vector is a neuron's column, which is one input: it is fitted and rounded whole, and the columns of
the neurons behind it make up for what it loses.

Inputs go together in spans: `spans` says which, and feedback stays within one, so that a Hessian is never wider.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flashllm.base.group_codes import Bytes, Floats, Grid, GroupCode
from flashllm.offload.quantise.feedback import TOGETHER, compensate, inverse_factor

Hessians = Sequence[NDArray[np.floating]]  # the sum of x xᵀ of each span's inputs x


def spanned(hessians: Hessians) -> list[slice]:
    """The inputs of each span."""
    ends = np.cumsum([len(each) for each in hessians])
    return [slice(end - len(each), end) for each, end in zip(hessians, ends.tolist(), strict=True)]


def code_rows(weights: Floats, hessians: Hessians, code: GroupCode) -> Bytes:
    """uint8 [outputs, vector_nbytes(inputs)] of weights [outputs, inputs].

    ValueError for Hessians that are not finite, or spans that cut a group; OverflowError as `GroupCode.fit`.
    """
    if any(span.start % TOGETHER for span in spanned(hessians)):
        raise ValueError(f"spans of inputs must begin at multiples of {TOGETHER}")
    codes = np.zeros((len(weights), code.groups(weights.shape[1]) * code.group), np.int16)
    grids: list[Grid] = []

    for span, hessian in zip(spanned(hessians), hessians, strict=True):
        factor, _ = inverse_factor(hessian, sort=False)
        of_span = codes[:, span]

        def round_input(i: int, ahead: Floats, of_span: NDArray[np.int16] = of_span) -> Floats:
            if i % code.group == 0:
                grids.append(code.fit(code.grouped(ahead[: code.group].T)))
            chosen = grids[-1].codes(ahead[0][:, None, None])
            of_span[:, i] = chosen[:, 0, 0]
            return grids[-1].weights(chosen)[:, 0, 0]

        compensate(np.ascontiguousarray(weights[:, span].T, np.float32), factor, round_input)
    return code.pack(codes.reshape(len(codes), -1, code.group).astype(np.float32), _joined(grids))


def code_columns(vectors: Floats, hessians: Hessians, code: GroupCode) -> Bytes:
    """uint8 [inputs, vector_nbytes(outputs)] of a down projection's columns [inputs, outputs]. Errors as `code_rows`.

    The inputs that matter most in a span are rounded first, while all others can make up for them.
    """
    coded = np.empty((len(vectors), code.vector_nbytes(vectors.shape[1])), np.uint8)
    for span, hessian in zip(spanned(hessians), hessians, strict=True):
        factor, order = inverse_factor(hessian)
        part, neurons = coded[span], order

        def round_input(i: int, ahead: Floats, part: Bytes = part, neurons: NDArray[np.intp] = neurons) -> Floats:
            grouped = code.grouped(ahead[:1])
            grid = code.fit(grouped)
            codes = grid.codes(grouped)
            part[neurons[i]] = code.pack(codes, grid)[0]
            return grid.weights(codes).reshape(-1)[: vectors.shape[1]]

        compensate(np.ascontiguousarray(vectors[span][order], np.float32), factor, round_input)
    return coded


def _joined(grids: Sequence[Grid]) -> Grid:
    """Grids of [n, 1, 1] as one of [n, groups, 1]."""
    first = grids[0]
    minimums = [grid.minimums for grid in grids if grid.minimums is not None]
    return Grid(
        lowest=first.lowest,
        highest=first.highest,
        zero=first.zero,
        scales=np.concatenate([grid.scales for grid in grids], axis=1),
        minimums=np.concatenate(minimums, axis=1) if minimums else None,
    )
