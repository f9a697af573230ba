"""Codes in groups that change a matrix's products least, not its weights: rounding with feedback of the error.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022,
section 3. A matrix is rounded an input at a time; what an input's weights lose is made up by the inputs that are not
rounded yet, as far as the calibration inputs go together. Groups lie along d_model. Of matrices that take d_model
inputs a group's scale is fitted when its first input comes up, to weights that carry the feedback by then. Of a down
projection a vector is a neuron's column, which is one input: it is fitted and rounded whole, and the columns of the
neurons behind it make up for what it loses.

Inputs go together in spans: `spans` says which, and feedback stays within one, so that a Hessian is never wider.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flashllm.base.group_codes import Bytes, Floats, Grid, GroupCode

TOGETHER = 128  # inputs whose feedback to the others is one product
_DAMPING = 0.01  # of the mean of the Hessian's diagonal
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
                grids.append(code.fit(ahead[: code.group].T))
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
            chosen = code.encode(ahead[:1])
            part[neurons[i]] = chosen[0]
            rounded: Floats = code.decode(chosen, vectors.shape[1])[0]
            return rounded

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


def compensate(work: Floats, factor: Floats, round_input: Callable[[int, Floats], Floats]) -> None:
    """Round `work` [inputs, outputs] in place, an input at a time; inputs behind it make up for what each one loses.

    `factor`: `inverse_factor`'s. round_input(input, rows ahead) is what the first of these rows becomes; they are that
    input's and those that follow it, as they are by then, up to the next multiple of TOGETHER inputs.
    """
    for first in range(0, len(work), TOGETHER):
        last = min(first + TOGETHER, len(work))
        block, inner = work[first:last], factor[first:last, first:last]
        errors = np.empty_like(block)
        for i, row in enumerate(block):
            rounded = round_input(first + i, block[i:])
            errors[i] = (row - rounded) / inner[i, i]
            block[i + 1 :] -= inner[i, i + 1 :, None] * errors[i]
            block[i] = rounded
        work[last:] -= factor[first:last, last:].T @ errors


def inverse_factor(hessian: NDArray[np.floating], *, sort: bool = True) -> tuple[Floats, NDArray[np.intp]]:
    """The upper Cholesky factor of the inverse, and the order of its inputs: with `sort` by falling weight in the
    Hessian, otherwise their own.

    An input that calibration never saw gets no feedback and gives none. ValueError for a Hessian that is not finite.
    """
    if not np.isfinite(hessian).all():
        raise ValueError("the calibration inputs are not finite")
    diagonal = np.diag(hessian)
    order = np.argsort(-diagonal, kind="stable") if sort else np.arange(len(diagonal))
    ordered = hessian[np.ix_(order, order)].astype(np.float64)
    mean = float(diagonal.mean()) or 1.0
    unseen = np.flatnonzero(np.diag(ordered) == 0)
    ordered[unseen, unseen] = mean
    damping = _DAMPING
    while True:
        ordered[np.diag_indices_from(ordered)] += damping * mean
        try:
            lower = np.linalg.cholesky(np.linalg.inv(ordered))
        except np.linalg.LinAlgError:
            damping *= 10  # rounding left it without an inverse; more damping means less feedback
            continue
        return np.ascontiguousarray(lower.T, np.float32), order
