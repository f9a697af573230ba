"""`Prediction`: what a policy costs, in times, throughput, peaks and what binds. It evaluates `costs`, no more."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.planner.costs import STAGES, CostModel
from flashllm.offload.planner.host_costs import cost_model
from flashllm.offload.planner.peaks import memory_limits
from flashllm.offload.policy import Policy, Workload
from flashllm.offload.shape import ModelShape

STAGE_NAMES = {
    "ctog": "CPU to device",
    "gtoc": "device to CPU",
    "dtoc": "disk to CPU",
    "ctod": "CPU to disk",
    "comp": "compute",
}
# A peak within this share of its limit is said to be full: rounding to whole tensors leaves a gap.
_FULL = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One block from its first prompt token to its last new one. Seconds, bytes, tokens/s."""

    prefill_s: float
    decode_s: float
    throughput: float  # generated tokens / (prefill + decode), the paper's metric
    decode_throughput: float  # tokens after each sequence's first / decode, table 3's second metric
    peak_device: int
    peak_cpu: int
    peak_disk: int
    prefill_stages: dict[str, float]  # each stage's seconds over the block, as if alone
    decode_stages: dict[str, float]
    binding: dict[str, Any]
    over: dict[str, int]  # resource -> bytes by which its peak exceeds what the machine has; empty: the policy fits

    @property
    def latency_s(self) -> float:
        return self.prefill_s + self.decode_s


def predict(shape: ModelShape, hardware: Hardware, workload: Workload, policy: Policy, **settings: int) -> Prediction:
    """Prices `policy` by the cost model; a policy that does not fit is priced too, with `over` saying what is short.
    `settings`: as of `cost_model`."""
    return price(cost_model(shape, hardware, workload, policy, **settings), policy)


def price(model: CostModel, policy: Policy) -> Prediction:
    """As `predict`, for a cost model already made for the policy's method."""
    model = dataclasses.replace(model, method=policy)
    x, layers, block = policy.placement, model.shape.layers, policy.block_size
    n = model.workload.gen_len
    head = max(form.value(x) for form in model.head_bounds())
    prefill_s = layers * max(form.value(x) for form in model.prefill_bounds()) + head
    decode_s = (n - 1) * (layers * max(form.value(x) for form in model.decode_bounds()) + head)
    prefill_stages = {name: layers * model.prefill[name].value(x) + model.head_step[name].value(x) for name in STAGES}
    decode_stages = {
        name: (n - 1) * (layers * model.decode[name].value(x) + model.head_step[name].value(x)) for name in STAGES
    }
    peaks: dict[str, float] = {"device": 0.0, "cpu": 0.0, "disk": 0.0}
    limits: dict[str, int] = {}
    for resource, form, limit in memory_limits(model):
        peaks[resource] = max(peaks[resource], form.value(x))
        limits[resource] = limit
    # A byte of slack for the rounding of sums of 10^12.
    over = {name: int(peak - limits[name]) for name, peak in peaks.items() if peak > limits[name] * (1 + 1e-9) + 1}
    return Prediction(
        prefill_s=prefill_s,
        decode_s=decode_s,
        throughput=block * n / (prefill_s + decode_s),
        decode_throughput=block * (n - 1) / decode_s if n > 1 else 0.0,
        peak_device=round(peaks["device"]),
        peak_cpu=round(peaks["cpu"]),
        peak_disk=round(peaks["disk"]),
        prefill_stages=prefill_stages,
        decode_stages=decode_stages,
        binding=_binding((prefill_s, prefill_stages), (decode_s, decode_stages), peaks, limits),
        over=over,
    )


def _binding(
    prefill: tuple[float, dict[str, float]],
    decode: tuple[float, dict[str, float]],
    peaks: dict[str, float],
    limits: dict[str, int],
) -> dict[str, Any]:
    """The longest stage of the longer phase, and the memories that are full."""
    phase, (total, stages) = ("prefill", prefill) if prefill[0] > decode[0] else ("decode", decode)
    stage = max(stages, key=lambda name: stages[name])
    return {
        "phase": phase,
        "stage": stage,
        "what": f"{phase}: {STAGE_NAMES[stage]}",
        "share_of_phase": stages[stage] / total if total > 0 else 0.0,
        "full": [name for name, peak in peaks.items() if limits[name] > 0 and peak >= _FULL * limits[name]],
    }
