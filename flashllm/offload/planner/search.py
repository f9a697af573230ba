"""Policy search (paper B, section 4.3): the best policy over all pairs of GPU batch and number of batches.

Best first over three bounds of a pair: a closed form, the linear program, and the program over whole tensors. Each is
at most the next, so the first whole-tensor solution to come off the heap is the best there is, and most pairs never
meet a solver.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, product

import numpy as np
from numpy.typing import NDArray

from flashllm.base.units import format_size
from flashllm.errors import BudgetError
from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.planner.costs import CostModel
from flashllm.offload.planner.host_costs import cost_model
from flashllm.offload.planner.predict import Prediction, price
from flashllm.offload.planner.program import TIERS, PlacementProgram
from flashllm.offload.policy import Method, Policy, Workload
from flashllm.offload.shape import ModelShape

# Section 4.3: GPU batches in multiples of 4 (1 and 2 besides), at most 20 of them in a block.
GPU_BATCHES = (1, 2, *range(4, 64, 4), *range(64, 128, 16), *range(128, 257, 32), 384, 512)
NUM_BATCHES = tuple(range(1, 21))
_RESOURCES = {"device": "device memory", "cpu": "CPU memory", "disk": "disk space"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    gpu_batches: tuple[int, ...] = GPU_BATCHES
    num_batches: tuple[int, ...] = NUM_BATCHES
    cpu_attention: tuple[bool, ...] = (True, False)
    compress_weights: bool = False
    compress_cache: bool = False
    attention_sparsity: float = 1.0
    overlap: tuple[bool, ...] | None = None  # None: as is faster
    weight_bits: int = 4  # of compressed weights
    cache_bits: int = 4
    blocks_in_flight: int = 1  # of a pipeline: its stages
    sequences: int | None = None  # of the whole job: a block needs no batch that they would not reach
    forbid: frozenset[str] = frozenset()  # tiers that home no tensor

    def methods(self) -> Iterator[Method]:
        for gpu_batch in self.gpu_batches:
            for num_batches in self.num_batches:
                if self.sequences is not None and gpu_batch * (num_batches - 1) >= self.sequences:
                    break
                yield from self.methods_of(gpu_batch, num_batches)

    def filled(self, method: Method) -> int:
        """Sequences that a block answers: the job's, where there are no more."""
        return min(method.block_size, self.sequences or method.block_size)

    def methods_of(self, gpu_batch: int, num_batches: int) -> Iterator[Method]:
        for cpu_attention, overlap in product(self.cpu_attention, self.overlap or (True,)):
            yield Method(
                gpu_batch=gpu_batch,
                num_batches=num_batches,
                compress_weights=self.compress_weights,
                compress_cache=self.compress_cache,
                cpu_attention=cpu_attention,
                attention_sparsity=self.attention_sparsity,
                overlap=overlap,
            )

    def model(self, shape: ModelShape, hardware: Hardware, workload: Workload, method: Method) -> CostModel:
        return cost_model(
            shape,
            hardware,
            workload,
            method,
            blocks_in_flight=self.blocks_in_flight,
            weight_bits=self.weight_bits,
            cache_bits=self.cache_bits,
        )

    def on(self, hardware: Hardware) -> "SearchSpace":
        """The part of this space that a machine has. Without a GPU its memory is the device, and the CPU tier would be
        that again; attention is where the cache is; a layer that arrives beside another takes memory from the rest."""
        if hardware.device != "cpu":
            return self
        overlap = (True, False) if self.overlap is None else self.overlap
        return dataclasses.replace(self, cpu_attention=(True,), overlap=overlap, forbid=self.forbid | {"cpu"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The best policy over whole tensors, its price, and what the linear program alone promised."""

    policy: Policy
    prediction: Prediction
    relaxed_throughput: float  # tokens/s of the linear program's best over all pairs, before rounding
    pairs: int
    programs: int  # linear and integer programs solved


@dataclass(slots=True, order=True)
class _Candidate:
    """A pair on the heap: its best known bound in seconds a sequence, and how that bound was had."""

    bound: float
    ticket: int  # ties are settled by the order of enumeration, so a search gives one answer
    program: PlacementProgram = field(compare=False)
    is_relaxed: bool = field(compare=False, default=False)
    rounded: NDArray[np.float64] | None = field(compare=False, default=None)


def search(shape: ModelShape, hardware: Hardware, workload: Workload, space: SearchSpace | None = None) -> Plan:
    """The feasible policy of greatest throughput.

    Raises BudgetError that names the missing resource, and how much of it, when no policy is feasible.
    """
    space = (space or SearchSpace()).on(hardware)
    ticket = count()
    heap: list[_Candidate] = []
    programs = pairs = 0
    relaxed: float | None = None
    for method in space.methods():
        pairs += 1
        model = space.model(shape, hardware, workload, method)
        program = PlacementProgram(model, forbid=space.forbid)
        bound = program.bound() / space.filled(method)
        if math.isfinite(bound):
            heap.append(_Candidate(bound, next(ticket), program))
    heapq.heapify(heap)
    while heap:
        best = heapq.heappop(heap)
        block = space.filled(best.program.model.method)
        if best.rounded is not None:
            programs += 1
            nearest = best.program.nearest(best.bound * block)
            policy = best.program.policy(best.rounded if nearest is None else nearest)
            prediction = price(best.program.model, policy)
            if prediction.over:  # what its leaps take (HostCostModel) was not counted: once more with that
                if best.program.model.policy is None:
                    exact = dataclasses.replace(best.program.model, method=policy)
                    program = PlacementProgram(exact, forbid=space.forbid)
                    heapq.heappush(heap, _Candidate(best.bound, next(ticket), program))
                continue
            return Plan(
                policy=policy,
                prediction=prediction,
                relaxed_throughput=workload.gen_len / (relaxed or best.bound),
                pairs=pairs,
                programs=programs,
            )
        programs += 1
        if not best.is_relaxed:
            if found := best.program.relaxed():
                heapq.heappush(heap, _Candidate(found[0] / block, next(ticket), best.program, is_relaxed=True))
            continue
        relaxed = best.bound if relaxed is None else relaxed  # the first of its kind off the heap is the best
        if found := best.program.whole_tensors():
            bound = max(found[0] / block, best.bound)
            heapq.heappush(heap, _Candidate(bound, next(ticket), best.program, rounded=found[1]))
    raise BudgetError(explain_refusal(shape, hardware, workload, space))


def explain_refusal(shape: ModelShape, hardware: Hardware, workload: Workload, space: SearchSpace) -> str:
    """Say what one resource alone must be for the smallest block to fit, or, where none suffices, what all lack."""
    smallest = space.methods_of(min(space.gpu_batches), min(space.num_batches))
    programs = [
        PlacementProgram(space.model(shape, hardware, workload, method), forbid=space.forbid) for method in smallest
    ]
    has = {"device": hardware.device_memory, "cpu": hardware.cpu_memory, "disk": hardware.disk_capacity}
    usable = {"device": hardware.device_usable, "cpu": hardware.cpu_usable, "disk": hardware.disk_capacity}
    reserved = {"device": hardware.device_reserved, "cpu": hardware.cpu_reserved, "disk": 0}
    ways = []
    names = _RESOURCES | ({"device": "memory"} if hardware.device == "cpu" else {})
    for resource in TIERS:
        if resource == "cpu" and hardware.device == "cpu":
            continue
        if found := [short[resource] for program in programs if (short := program.shortfall([resource])) is not None]:
            need = usable[resource] + min(found) + reserved[resource]
            more = format_size(max(0.0, need - has[resource]))
            ways.append(f"{more} more {names[resource]} ({format_size(need)} in all)")
    if not ways:
        all_of_them = programs[0].shortfall(TIERS) or {}
        missing = [f"{format_size(more)} more {names[tier]}" for tier, more in all_of_them.items() if more > 0]
        ways.append(" and ".join(missing))
    size = format_size(programs[0].model.shape.model_bytes)
    what = f"{shape.name} ({size}) at {workload.prompt_len} + {workload.gen_len} tokens"
    return f"{what} does not fit the limits on {hardware.name}: it needs {', or '.join(ways)}"
