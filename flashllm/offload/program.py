"""The linear program of eq. 1 (paper B) for one (GPU batch, number of batches), relaxed and over whole tensors.

It knows the cost model only as affine forms; which pairs to try is the search's business.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from flashllm.offload.costs import CostModel
from flashllm.offload.linear import SIZE
from flashllm.offload.policy import Policy

TIERS = ("device", "cpu", "disk")
# Memory in the solvers is counted in GB, and limits keep this share free, so that no rounding of HiGHS (rows are
# feasible to 1e-7) ends over a limit.
_GB = 1e9
_MARGIN = 1e-6
_TIMES = 3  # Tpre, Tgen and the output head's time follow the nine fractions
# The integer program is stopped here; what it holds then is feasible and reported with the relaxed bound beside it.
_INTEGER_SECONDS = 5.0

Solution = tuple[float, NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What a user may add to the machine's memories."""

    latency_s: float | None = None  # of a whole block
    forbid: frozenset[str] = field(default_factory=frozenset)  # tiers that may home no tensor

    def __post_init__(self) -> None:
        if self.latency_s is not None and not self.latency_s > 0:
            raise ValueError(f"latency_s must be positive, not {self.latency_s!r}")
        if unknown := self.forbid - set(TIERS):
            raise ValueError(f"forbid: unknown tier {min(unknown)!r}; tiers are {', '.join(TIERS)}")


class PlacementProgram:
    """Least seconds of a block over the placements of one method: rows over (nine fractions, Tpre, Tgen, Thead)."""

    def __init__(self, model: CostModel, constraints: Constraints, *, unlimited: str | None = None) -> None:
        """`unlimited` leaves out one limit ("device", "cpu", "disk" or "latency"), to see what it would take."""
        self.model = model
        self.phases = (model.prefill_bounds(), model.decode_bounds(), model.head_bounds())
        layers, steps = model.shape.layers, model.workload.gen_len
        self.seconds = np.append(np.zeros(SIZE), [layers, layers * (steps - 1), steps])
        rows: list[NDArray[np.float64]] = []
        limits: list[float] = []
        for column, forms in enumerate(self.phases):
            for form in forms:  # form(x) <= T
                row = np.append(form.coef, np.zeros(_TIMES))
                row[SIZE + column] = -1
                rows.append(row)
                limits.append(-form.const)
        self._first_memory = len(rows)
        for resource, peak, limit in model.memory_limits():
            if resource != unlimited:
                rows.append(np.append(peak.coef / _GB, np.zeros(_TIMES)))
                limits.append((limit * (1 - _MARGIN) - peak.const) / _GB)
        self._last_memory = len(rows)
        if constraints.latency_s is not None and unlimited != "latency":
            rows.append(self.seconds)
            limits.append(constraints.latency_s * (1 - _MARGIN))
        self.rows, self.limits = np.array(rows), np.array(limits)
        self.upper = np.append(np.ones(SIZE), np.full(_TIMES, np.inf))
        for tier, name in enumerate(TIERS):
            if name in constraints.forbid:
                self.upper[[tier, 3 + tier, 6 + tier]] = 0
        self.sums = np.zeros((3, SIZE + _TIMES))
        for kind in range(3):
            self.sums[kind, 3 * kind : 3 * kind + 3] = 1

    def bound(self) -> float:
        """Seconds of a block, at least, without a solver; infinite where some memory cannot hold the least it must."""
        memory = slice(self._first_memory, self._last_memory)
        least = self.rows[memory, :SIZE].reshape(-1, 3, 3).min(axis=2).sum(axis=1)
        if (least > self.limits[memory]).any():
            return float("inf")
        times = [max(form.minimum for form in forms) for forms in self.phases]
        return float(self.seconds[SIZE:] @ times)

    def relaxed(self) -> Solution | None:
        """Least seconds and the nine fractions, or None where nothing is feasible."""
        found = self._solve(self.seconds, self.rows, self.limits)
        return None if found is None else (found[0], found[1][:SIZE])

    def least_need(self, resource: str) -> float | None:
        """Bytes (seconds for "latency") of `resource` without which nothing fits, whatever the time it takes."""
        if resource == "latency":
            found = self.relaxed()
            return None if found is None else found[0]
        peaks = [peak for name, peak, _ in self.model.memory_limits() if name == resource]
        rows = np.column_stack([self.rows, np.zeros(len(self.rows))])
        need = np.array([np.append(peak.coef / _GB, [0.0] * _TIMES + [-1.0]) for peak in peaks])  # peak(x) <= need
        limits = np.append(self.limits, [-peak.const / _GB for peak in peaks])
        objective = np.append(np.zeros(SIZE + _TIMES), 1.0)
        found = self._solve(objective, np.vstack([rows, need]), limits)
        return None if found is None else found[0] * _GB

    def least_shortfall(self) -> dict[str, float]:
        """Bytes missing of each memory, least in sum, when all three may grow together."""
        memory = range(self._first_memory, self._last_memory)
        owners = [name for name, _, _ in self.model.memory_limits()]
        grow = np.zeros((len(self.rows), len(TIERS)))
        for row, owner in zip(memory, owners, strict=True):
            grow[row, TIERS.index(owner)] = -1
        objective = np.append(np.zeros(SIZE + _TIMES), np.ones(len(TIERS)))
        found = self._solve(objective, np.column_stack([self.rows, grow]), self.limits)
        if found is None:
            return {}
        return {tier: float(more) * _GB for tier, more in zip(TIERS, found[1][-len(TIERS) :], strict=True) if more > 0}

    def _solve(
        self, objective: NDArray[np.float64], rows: NDArray[np.float64], limits: NDArray[np.float64]
    ) -> Solution | None:
        extra = len(objective) - len(self.upper)
        upper = [*self.upper.tolist(), *[np.inf] * extra]
        result: Any = linprog(
            objective,
            A_ub=rows,
            b_ub=limits,
            A_eq=np.column_stack([self.sums, np.zeros((3, extra))]),
            b_eq=np.ones(3),
            bounds=[(0.0, bound) for bound in upper],
            method="highs",
        )
        return (float(result.fun), result.x) if result.status == 0 and result.x is not None else None

    def whole_tensors(self) -> Solution | None:
        """As `relaxed`, over what tensors can do (section 4.2): a layer's matrices whole (layer granularity for
        weights), the cache cut between the heads of sequences and activations between sequences."""
        shape, method = self.model.shape, self.model.method
        share = np.array(shape.matrix_params) / shape.layer_params
        matrices, grains = len(share), (method.gpu_batch * shape.kv_heads, method.gpu_batch)
        # Integers: is matrix m on tier t; then grains of the cache and of the activations on each tier. Then the times.
        integers = 3 * matrices + 6
        fractions = np.zeros((SIZE + _TIMES, integers + _TIMES))
        for matrix in range(matrices):
            fractions[:3, 3 * matrix : 3 * matrix + 3] = np.eye(3) * share[matrix]
        fractions[3:SIZE, 3 * matrices : integers] = np.diag(np.repeat(1 / np.array(grains), 3))
        fractions[SIZE:, integers:] = np.eye(_TIMES)
        sums = np.zeros((matrices + 2, integers + _TIMES))
        for row in range(matrices + 2):
            sums[row, 3 * row : 3 * row + 3] = 1
        totals = np.append(np.ones(matrices), grains)
        upper = np.concatenate([np.tile(self.upper[:3], matrices), self.upper[3:SIZE] * np.repeat(grains, 3)])
        result = milp(
            self.seconds @ fractions,
            constraints=[
                LinearConstraint(self.rows @ fractions, -np.inf, self.limits),
                LinearConstraint(sums, totals, totals),
            ],
            bounds=Bounds(np.zeros(integers + _TIMES), np.append(upper, np.full(_TIMES, np.inf))),
            integrality=np.append(np.ones(integers), np.zeros(_TIMES)),
            options={"mip_rel_gap": 1e-6, "time_limit": _INTEGER_SECONDS},
        )
        if result.x is None:
            return None
        whole = np.append(np.round(result.x[:integers]), result.x[integers:])
        return float(result.fun), (fractions @ whole)[:SIZE]

    def policy(self, placement: NDArray[np.float64]) -> Policy:
        """The policy with these nine fractions; sums that miss 1 by a rounding are put right."""
        parts = np.clip(placement.reshape(3, 3), 0, 1)
        parts /= parts.sum(axis=1, keepdims=True)
        wg, wc, wd, cg, cc, cd, hg, hc, hd = (float(value) for value in parts.ravel())
        method = self.model.method
        return Policy(
            gpu_batch=method.gpu_batch,
            num_batches=method.num_batches,
            wg=wg,
            wc=wc,
            wd=wd,
            cg=cg,
            cc=cc,
            cd=cd,
            hg=hg,
            hc=hc,
            hd=hd,
            compress_weights=method.compress_weights,
            compress_cache=method.compress_cache,
            cpu_attention=method.cpu_attention,
            attention_sparsity=method.attention_sparsity,
            overlap=method.overlap,
        )
