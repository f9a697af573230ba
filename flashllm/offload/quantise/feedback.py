"""Rounding a matrix to the grid of packed weights so that its products change least, not its weights.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022,
section 3. The matrix is rounded an input at a time; what an input's weights lose is made up by the inputs that are not
rounded yet, as far as the calibration inputs go together. The groups are those of `_core.pack_weights`. Along the
outputs (FlexGen, section 5) a group is rounded whole, so its scale and minimum come from weights that already carry the
feedback. Along the inputs they are chosen beforehand, by least squares, from the weights as they were; the smallest and
the largest weight of a group keep the lowest and the highest code, so that packing finds the same scale and minimum.
Plain numpy.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flashllm.offload.runtime.ops import GroupsAlong

Floats = NDArray[np.float32]

GROUP = 64  # weights that share a scale and a minimum, as in csrc/offload/group_codec.h
TOGETHER = 128  # inputs whose feedback to the others is one product
_DAMPING = 0.01  # of the mean of the Hessian's diagonal
_FITS = 4  # least squares of a group's scale and minimum, each with the codes that the last one gave


def round_to_grid(values: Floats, bits: int) -> Floats:
    """values [outputs] as they are after packing and unpacking: a scale and a minimum in 16 bits for each group."""
    padded = np.concatenate([values, np.full(-len(values) % GROUP, values[-1], np.float32)]).reshape(-1, GROUP)
    low = padded.min(axis=1, keepdims=True)
    top = 2**bits - 1
    scale = ((padded.max(axis=1, keepdims=True) - low) / np.float32(top)).astype(np.float16).astype(np.float32)
    low = low.astype(np.float16).astype(np.float32)
    steps = np.divide(padded - low, scale, out=np.zeros_like(padded), where=scale > 0)
    rounded: Floats = np.clip(np.rint(steps), 0, top) * scale + low
    return rounded.reshape(-1)[: len(values)]


class InputGrids:
    """Scales and minimums of weights [outputs, inputs] whose groups lie along the inputs, and their codes."""

    def __init__(self, weights: Floats, *, bits: int) -> None:
        inputs = weights.shape[1]
        padded = np.pad(weights, ((0, 0), (0, -inputs % GROUP)), mode="edge").reshape(len(weights), -1, GROUP)
        self._top = np.float32(2**bits - 1)
        self._smallest, self._largest = padded.argmin(axis=2), padded.argmax(axis=2)  # [outputs, groups]
        self._low, self._scale = self._fitted(padded)

    def _fitted(self, values: Floats) -> tuple[Floats, Floats]:
        """Minimums and scales [outputs, groups]: of min-max, or of least squares from there where they lose less."""
        low = values.min(axis=2)
        scale = (values.max(axis=2) - low) / self._top
        best, least = (low, scale), np.full(low.shape, np.inf, np.float32)
        for _ in range(_FITS + 1):
            low, scale = _in_halves(low), _in_halves(scale)
            codes = self._codes(values, low[..., None], scale[..., None])
            np.put_along_axis(codes, self._smallest[..., None], 0, axis=2)
            np.put_along_axis(codes, self._largest[..., None], self._top, axis=2)
            lost = np.square(codes * scale[..., None] + low[..., None] - values).sum(axis=2)
            wins = lost < least
            best = np.where(wins, low, best[0]), np.where(wins, scale, best[1])
            least = np.minimum(lost, least)
            mean, middle = codes.mean(axis=2), values.mean(axis=2)
            spread = np.square(codes - mean[..., None]).sum(axis=2)
            together = ((codes - mean[..., None]) * values).sum(axis=2)
            scale = np.divide(together, spread, out=np.zeros_like(spread), where=spread > 0)
            low = middle - scale * mean
        return best

    def _codes(self, values: Floats, low: Floats, scale: Floats) -> Floats:
        steps = np.divide(values - low, scale, out=np.zeros_like(values), where=scale > 0)
        codes: Floats = np.clip(np.rint(steps), 0, self._top)
        return codes

    def rounded(self, values: Floats, number: int) -> Floats:
        """Weights [outputs] of the input `number` on the grid."""
        group, place = divmod(number, GROUP)
        low, scale = self._low[:, group], self._scale[:, group]
        codes = self._codes(values, low, scale)
        codes[self._smallest[:, group] == place] = 0
        codes[self._largest[:, group] == place] = self._top
        grid: Floats = codes * scale + low
        return grid


def _in_halves(values: Floats) -> Floats:
    return np.clip(values, -65504, 65504).astype(np.float16).astype(np.float32)


def round_to_nearest(weights: Floats, *, bits: int, along: GroupsAlong = "outputs") -> Floats:
    """weights [outputs, inputs] on the grid of `bits`, each to the nearest."""
    weights = weights.astype(np.float32)
    if along == "outputs":
        return np.stack([round_to_grid(column, bits) for column in weights.T], axis=1)
    grids = InputGrids(weights, bits=bits)
    return np.stack([grids.rounded(column, number) for number, column in enumerate(weights.T)], axis=1)


def round_with_feedback(
    weights: Floats, hessian: NDArray[np.floating], *, bits: int, along: GroupsAlong = "outputs"
) -> Floats:
    """weights [outputs, inputs] on the grid of `bits`. `hessian` [inputs, inputs]: the sum of x xᵀ over inputs x.

    ValueError for a Hessian that is not finite.
    """
    factor, order = inverse_factor(hessian)
    work = np.ascontiguousarray(weights.T[order], np.float32)  # an input a row
    if along == "outputs":
        compensate(work, factor, lambda _, ahead: round_to_grid(ahead[0], bits))
    else:
        grids = InputGrids(weights.astype(np.float32), bits=bits)
        compensate(work, factor, lambda i, ahead: grids.rounded(ahead[0], int(order[i])))
    result = np.empty_like(weights, np.float32)
    result[:, order] = work.T
    return result


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
