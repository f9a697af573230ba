"""Compares the engines on a job: one prompt after the other against a block of many.

A block takes about as long for one prompt as for dozens, because its time is that of reading the weights; the latency
engine reads the few neurons that a token needs. So few prompts are its, and many are this engine's. Both sides are
estimates of their own planners; loads no weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flashllm.base.machine import available_nbytes, process_nbytes
from flashllm.config import RunConfig
from flashllm.errors import FlashError
from flashllm.format.manifest import MANIFEST
from flashllm.format.model_dir import ModelDir
from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.policy import Workload
from flashllm.plan.activity import from_shares
from flashllm.plan.latency import dense_token, estimate_token, product_nbytes
from flashllm.plan.resolve import Plan, resolve
from flashllm.profile.machine import Profile

_MOST_PROMPTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyEngine:
    """The times that `flashllm generate` is expected to take for one prompt of a job."""

    prompt_s: float
    token_s: float
    seconds: float  # of the prompt and all its new tokens


def latency_engine(
    path: Path, hardware: Hardware, workload: Workload, *, memory: int | None = None, store: Path | None = None
) -> LatencyEngine | None:
    """The latency engine's expected times for a model directory under `memory` bytes.

    None where they cannot be known: the folder is not converted, its drive has no profile (`flashllm
    calibrate`), or the engine cannot run the model there.
    """
    if not (path / MANIFEST).exists():
        return None
    try:
        model = ModelDir.open(path)
        mode = "sparse" if model.manifest.sparse else "dense"
        context = workload.full_context if workload.full_context < model.block.context else None
        config = RunConfig(memory=memory, mode=mode, context=context, store=store)  # type: ignore[arg-type]
        plan = resolve(config, model, available=available_nbytes(), process=process_nbytes())
    except FlashError:
        return None
    if plan.profile is None:
        return None
    neurons_nbytes = model.architecture.num_layers * model.manifest.rows.layer_nbytes
    params = (product_nbytes(model) + neurons_nbytes) / model.dtype.itemsize
    rate = hardware.gemm.at(min(workload.prompt_len, plan.memory.prompt_tokens))
    streamed_s = neurons_nbytes / plan.profile.sequential_bps
    # A prompt goes through the blocks in parts, each of which streams every neuron by while it computes.
    parts = -(-workload.prompt_len // plan.memory.prompt_tokens)
    prompt_s = max(parts * streamed_s, 2 * params * workload.prompt_len / rate)
    token_s = _token_s(model, plan, plan.profile)
    if token_s is None:
        return None
    return LatencyEngine(prompt_s=prompt_s, token_s=token_s, seconds=prompt_s + (workload.gen_len - 1) * token_s)


def _token_s(model: ModelDir, plan: Plan, costs: Profile) -> float | None:
    """A token in the plan's mode; None where it is not known."""
    resident_nbytes = product_nbytes(model)
    if plan.mode == "dense":
        return dense_token(model, plan.memory, costs=costs, resident_nbytes=resident_nbytes).total_s
    activity = from_shares(model.manifest, plan.memory, plan.popularity, plan.reader.max_gap)
    token = estimate_token(
        model, plan.memory, costs=costs, choice=plan.reader, activity=activity, resident_nbytes=resident_nbytes
    )
    return token.total_s


def better_below(other: LatencyEngine, block_s: Callable[[int], float], block_size: int) -> int:
    """The least number of prompts for which this engine is the faster: 1 where it always is.

    `block_s(n)` is its time for a block of n prompts; jobs larger than `block_size` take several blocks. A number of
    prompts beyond any job where the latency engine always is.
    """

    def faster(prompts: int) -> bool:
        full, rest = divmod(prompts, block_size)
        return full * block_s(block_size) + (block_s(rest) if rest else 0.0) <= prompts * other.seconds

    high = 1
    while not faster(high):
        if high >= max(block_size, 1):
            return _MOST_PROMPTS  # a full block does not pay, and more of them are no better
        high = min(2 * high, block_size)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if faster(middle) else (middle, high)
    return high
