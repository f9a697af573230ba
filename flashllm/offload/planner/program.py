"""The linear program of eq. 1 (paper B) for one (GPU batch, number of batches), relaxed and over whole tensors.

It knows the cost model only as affine forms; which pairs to try is the search's business.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from flashllm.offload.planner.costs import CostModel
from flashllm.offload.planner.linear import SIZE
from flashllm.offload.planner.peaks import memory_limits
from flashllm.offload.policy import Policy

TIERS = ("device", "cpu", "disk")
# Limits keep this share free, so that no rounding of HiGHS (rows are feasible to 1e-7) ends over one.
_MARGIN = 1e-6
_TIE = 1e-5  # placements whose times differ by this share are equally fast
_DISTANCE = (0.0, 0.1, 1.0)  # of the tiers, to choose among these
_PHASES = 3  # the seconds of prefill, decoding and the output head follow the nine fractions
# The integer program is stopped here; what it holds then is feasible and reported with the relaxed bound.
_INTEGER_SECONDS = 5.0

Matrix = NDArray[np.float64]  # of one or two dimensions
Solution = tuple[float, Matrix]  # least objective, nine fractions


class PlacementProgram:
    """Least seconds of a block over the placements of one method: rows over nine fractions and the times of
    prefill, decoding and the output head."""

    def __init__(self, model: CostModel, *, forbid: frozenset[str] = frozenset()) -> None:
        """`forbid`: tiers that home no tensor."""
        self.model = model
        layers, steps = model.shape.layers, model.workload.gen_len
        phases = (
            (layers, model.prefill_bounds()),
            (layers * (steps - 1), model.decode_bounds()),
            (steps, model.head_bounds()),
        )
        # Numbers near 1 keep the solver's absolute tolerances small for a toy and for 175B alike: times are counted in
        # the least the block can take, memory in a hundredth of the model.
        self.least_seconds = sum(times * max(form.minimum for form in forms) for times, forms in phases)
        self._second = self.least_seconds or 1.0
        self._byte = model.shape.model_bytes / 100
        rows: list[Matrix] = []
        limits: list[float] = []
        for phase, (times, forms) in enumerate(phases):
            for form in forms:  # times · form(x) <= seconds of the phase
                row = np.append(form.coef * (times / self._second), np.zeros(_PHASES))
                row[SIZE + phase] = -1
                rows.append(row)
                limits.append(-form.const * times / self._second)
        self._first_memory = len(rows)
        for _, peak, limit in memory_limits(model):
            rows.append(np.append(peak.coef / self._byte, np.zeros(_PHASES)))
            limits.append((limit * (1 - _MARGIN) - peak.const) / self._byte)
        self._block_time = np.append(np.zeros(SIZE), np.ones(_PHASES))
        self.rows, self.limits = np.array(rows), np.array(limits)
        self.upper = np.append(np.ones(SIZE), np.full(_PHASES, np.inf))
        for tier, name in enumerate(TIERS):
            if name in forbid:
                self.upper[[tier, 3 + tier, 6 + tier]] = 0
        self.sums = np.zeros((3, SIZE + _PHASES))
        for kind in range(3):
            self.sums[kind, 3 * kind : 3 * kind + 3] = 1

    def bound(self) -> float:
        """Seconds of a block, at least, without a solver; infinite where some memory cannot hold the least it must."""
        memory = slice(self._first_memory, None)
        least = self.rows[memory, :SIZE].reshape(-1, 3, 3).min(axis=2).sum(axis=1)
        if (least > self.limits[memory]).any():
            return float("inf")
        return self.least_seconds

    def relaxed(self) -> Solution | None:
        """Least seconds and the nine fractions, or None where nothing is feasible."""
        return self._timed(self.solve(self._block_time, self.rows, self.limits, whole=False))

    def whole_tensors(self) -> Solution | None:
        """As `relaxed`, over what tensors can do (section 4.2): a layer's matrices whole (layer granularity for
        weights), cache and activations cut between the sequences of a GPU batch."""
        return self._timed(self.solve(self._block_time, self.rows, self.limits, whole=True))

    def nearest(self, seconds: float) -> Matrix | None:
        """Whole tensors placed with least on slow tiers, among those that take `seconds` at most: where computing
        hides reading, a cost model cannot tell them apart, and a machine can."""
        rows = np.vstack([self.rows, self._block_time])
        limits = np.append(self.limits, seconds * (1 + _TIE) / self._second)
        found = self.solve(np.append(np.tile(_DISTANCE, 3), np.zeros(_PHASES)), rows, limits, whole=True)
        return None if found is None else found[1]

    def _timed(self, found: Solution | None) -> Solution | None:
        return None if found is None else (found[0] * self._second, found[1])

    def shortfall(self, grow: Sequence[str]) -> dict[str, float] | None:
        """Bytes missing of each of these memories, least in sum, whatever time whole tensors then take; None where no
        growth of them suffices."""
        memory = memory_limits(self.model)
        more = np.zeros((len(self.rows), len(grow)))
        for row, (owner, _, _) in enumerate(memory, self._first_memory):
            if owner in grow:
                more[row, grow.index(owner)] = -1
        objective = np.append(np.zeros(SIZE + _PHASES), np.ones(len(grow)))
        found = self.solve(objective, np.column_stack([self.rows, more]), self.limits, whole=True)
        if found is None:
            return None
        return {
            tier: max(0.0, *(peak.value(found[1]) - limit for name, peak, limit in memory if name == tier))
            for tier in grow
        }

    def _fractions(self, extra: int) -> tuple[Matrix, Matrix, Matrix, Matrix]:
        """Whole tensors as integers: is matrix m on tier t, then grains of cache and activations there.

        Returns the map from (integers, times, extra variables) to (fractions, times, extra), the sums that must hold
        with their totals, and the integers' upper limits.
        """
        shape, method = self.model.shape, self.model.method
        share = np.array(shape.matrix_params) / shape.layer_params
        matrices, grains = len(share), (method.gpu_batch, method.gpu_batch)
        integers = 3 * matrices + 6
        fractions = np.zeros((SIZE + _PHASES + extra, integers + _PHASES + extra))
        for matrix in range(matrices):
            fractions[:3, 3 * matrix : 3 * matrix + 3] = np.eye(3) * share[matrix]
        fractions[3:SIZE, 3 * matrices : integers] = np.diag(np.repeat(1 / np.array(grains), 3))
        fractions[SIZE:, integers:] = np.eye(_PHASES + extra)
        sums = np.zeros((matrices + 2, fractions.shape[1]))
        for row in range(matrices + 2):
            sums[row, 3 * row : 3 * row + 3] = 1
        upper = np.concatenate([np.tile(self.upper[:3], matrices), self.upper[3:SIZE] * np.repeat(grains, 3)])
        return fractions, sums, np.append(np.ones(matrices), grains), upper

    def solve(self, objective: Matrix, rows: Matrix, limits: Matrix, *, whole: bool) -> Solution | None:
        """Least objective and its nine fractions; columns after fractions and times are free non-negative variables."""
        extra = len(objective) - SIZE - _PHASES
        if not whole:
            result: Any = linprog(
                objective,
                A_ub=rows,
                b_ub=limits,
                A_eq=np.column_stack([self.sums, np.zeros((3, extra))]),
                b_eq=np.ones(3),
                bounds=[(0.0, bound) for bound in [*self.upper.tolist(), *[np.inf] * extra]],
                method="highs",
            )
            return (float(result.fun), result.x[:SIZE]) if result.status == 0 else None
        fractions, sums, totals, upper = self._fractions(extra)
        result = milp(
            objective @ fractions,
            constraints=[LinearConstraint(rows @ fractions, -np.inf, limits), LinearConstraint(sums, totals, totals)],
            bounds=Bounds(np.zeros(fractions.shape[1]), np.append(upper, np.full(_PHASES + extra, np.inf))),
            integrality=np.append(np.ones(len(upper)), np.zeros(_PHASES + extra)),
            options={"mip_rel_gap": 1e-6, "time_limit": _INTEGER_SECONDS},
        )
        if result.x is None:
            return None
        integers = np.append(np.round(result.x[: len(upper)]), result.x[len(upper) :])
        return float(result.fun), (fractions @ integers)[:SIZE]

    def policy(self, placement: Matrix) -> Policy:
        """The policy with these nine fractions; sums that miss 1 by a rounding are put right."""
        parts = np.clip(placement.reshape(3, 3), 0, 1)
        parts /= parts.sum(axis=1, keepdims=True)
        return Policy(**asdict(self.model.method) | dict(zip(Policy.PLACEMENT, parts.ravel().tolist(), strict=True)))
