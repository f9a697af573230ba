"""Rounding a matrix to the grid of packed weights so that its products change least, not its weights.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022,
section 3. The matrix is rounded an input at a time; what an input's weights lose is made up by the inputs that are not
rounded yet, as far as the calibration inputs go together. The groups are those of `_core.pack_weights`. Along the
outputs (FlexGen, section 5) a group is rounded whole, so its scale and minimum come from weights that already carry the
feedback; along the inputs they are chosen beforehand, from the weights as they were. Either way by least squares; the
smallest and the largest weight of a group keep the lowest and the highest code, so that packing finds the same scale
and minimum again. Plain numpy.
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


class Grids:
    """Scales and minimums (16 bits each) of groups of weights [..., GROUP], and their codes.

    They are those of least squares, found from min-max on in `_FITS` steps. The smallest and the largest weight of a
    group keep the lowest and the highest code.
    """

    def __init__(self, groups: Floats, *, bits: int) -> None:
        self._top = np.float32(2**bits - 1)
        self.smallest, self.largest = groups.argmin(axis=-1), groups.argmax(axis=-1)  # places in each group
        low, scale = groups.min(axis=-1), (groups.max(axis=-1) - groups.min(axis=-1)) / self._top
        self.low, self.scale, least = low, scale, np.full(low.shape, np.inf, np.float32)
        for _ in range(_FITS + 1):
            low, scale = _in_halves(low), _in_halves(scale)
            codes = self._codes(groups, low[..., None], scale[..., None])
            np.put_along_axis(codes, self.smallest[..., None], 0, axis=-1)
            np.put_along_axis(codes, self.largest[..., None], self._top, axis=-1)
            lost = np.square(codes * scale[..., None] + low[..., None] - groups).sum(axis=-1)
            wins = lost < least
            self.low, self.scale = np.where(wins, low, self.low), np.where(wins, scale, self.scale)
            least = np.minimum(lost, least)
            mean = codes.mean(axis=-1)
            apart = codes - mean[..., None]
            spread = np.square(apart).sum(axis=-1)
            scale = np.divide((apart * groups).sum(axis=-1), spread, out=np.zeros_like(spread), where=spread > 0)
            low = groups.mean(axis=-1) - scale * mean

    def _codes(self, values: Floats, low: Floats, scale: Floats) -> Floats:
        steps = np.divide(values - low, scale, out=np.zeros_like(values), where=scale > 0)
        codes: Floats = np.clip(np.rint(steps), 0, self._top)
        return codes

    def rounded(self, groups: Floats) -> Floats:
        """The weights on the grid."""
        codes = self._codes(groups, self.low[..., None], self.scale[..., None])
        np.put_along_axis(codes, self.smallest[..., None], 0, axis=-1)
        np.put_along_axis(codes, self.largest[..., None], self._top, axis=-1)
        grid: Floats = codes * self.scale[..., None] + self.low[..., None]
        return grid

    def of_place(self, values: Floats, group: int, place: int) -> Floats:
        """Weights [n] that stand at a place of a group of each of n rows, on the grid."""
        low, scale = self.low[:, group], self.scale[:, group]
        codes = self._codes(values, low, scale)
        codes[self.smallest[:, group] == place] = 0
        codes[self.largest[:, group] == place] = self._top
        grid: Floats = codes * scale + low
        return grid


def _in_halves(values: Floats) -> Floats:
    return np.clip(values, -65504, 65504).astype(np.float16).astype(np.float32)


def _grouped(weights: Floats) -> Floats:
    """[..., n] -> [..., groups, GROUP]; the last value again where it is short."""
    short = [(0, 0)] * (weights.ndim - 1) + [(0, -weights.shape[-1] % GROUP)]
    return np.pad(weights, short, mode="edge").reshape(*weights.shape[:-1], -1, GROUP)


def round_to_grid(values: Floats, bits: int) -> Floats:
    """values [outputs] on the grid of their groups, as packing and unpacking leave them."""
    groups = _grouped(values)
    return Grids(groups, bits=bits).rounded(groups).reshape(-1)[: len(values)]


def round_to_nearest(weights: Floats, *, bits: int, along: GroupsAlong = "outputs") -> Floats:
    """weights [outputs, inputs] on the grid of `bits`, each to the nearest."""
    weights = weights.astype(np.float32)
    if along == "outputs":
        return np.stack([round_to_grid(column, bits) for column in weights.T], axis=1)
    groups = _grouped(weights)
    return np.ascontiguousarray(
        Grids(groups, bits=bits).rounded(groups).reshape(len(weights), -1)[:, : weights.shape[1]]
    )


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
        grids = Grids(_grouped(weights.astype(np.float32)), bits=bits)
        compensate(work, factor, lambda i, ahead: grids.of_place(ahead[0], *divmod(int(order[i]), GROUP)))
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
