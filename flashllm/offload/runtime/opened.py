"""A model opened for a policy: what it takes of each tier is known to the byte, and nothing of it is loaded."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from flashllm import _core
from flashllm.arch.tensors import attentions
from flashllm.base.files import Closing
from flashllm.base.group_codes import GROUP_CODES
from flashllm.base.machine import num_cores
from flashllm.base.units import format_size
from flashllm.errors import BudgetError
from flashllm.offload.planner.packing import CODES
from flashllm.offload.policy import Policy
from flashllm.offload.runtime.device_tier import HostTier, Need, Sizes
from flashllm.offload.runtime.options import RunOptions
from flashllm.offload.runtime.tiers.source import open_weights
from flashllm.offload.runtime.tiers.states import RecurrentStates
from flashllm.offload.runtime.tiers.weight_plan import plan_weights
from flashllm.offload.stages import Stage

if TYPE_CHECKING:
    from flashllm.offload.runtime.accelerator.tier import AcceleratorTier


class OpenModel(Closing):
    """A context manager. Raises what `open_weights` raises, and what the device does."""

    def __init__(self, model: Path, policy: Policy, options: RunOptions, *, stage: Stage | None = None) -> None:
        self.policy, self.options = policy, options
        self.pool = _core.ThreadPool(options.threads or num_cores())
        with ExitStack() as parts:
            codes = CODES if options.accelerator is None else GROUP_CODES if policy.compress_weights else ()
            self.source = parts.enter_context(open_weights(model, stage, codes=codes))
            self.block = self.source.block
            dtype = self.source.dtype.name
            cache_bits = options.cache_bits if policy.compress_cache else 0
            self.tier = self._open_tier(dtype, cache_bits)
            self.layers = [self.block.layers[layer] for layer in self.source.stage.numbers]
            self.attention = [
                _core.BatchAttention(layer.mixer, dtype, self.pool, bits=cache_bits) if attentions(layer) else None
                for layer in self.layers
            ]
            bits = options.weight_bits if policy.compress_weights else None
            self.plan = plan_weights(self.source, policy, bits=bits)
            self.weights, self._starting = self.tier.weights_need(self.plan)
            self._parts = parts.pop_all()

    def need(self, sizes: Sizes) -> Need:
        """Bytes that a block of sequences takes of each tier, the weights included."""
        states = Need(device=RecurrentStates.nbytes(self.layers, len(sizes)))
        return self.weights + states + self.tier.block_need(self.attention, sizes, self.policy)

    def shortage(self, sizes: Sizes | None) -> tuple[int, int]:
        """Bytes by which memory, and an accelerator's own, are too small for a block, or for bringing the weights.

        Not positive where they suffice.
        """
        need = self.weights + self._starting if sizes is None else self.need(sizes)
        takes = (need.memory(accelerated=self.options.accelerator is not None), need.device)
        limits = zip(takes, self._limits, strict=True)
        memory, device = (0 if limit is None else took - limit for took, (_, limit) in limits)
        return memory, device

    @property
    def _limits(self) -> tuple[tuple[str, int | None], ...]:
        return ("memory", self.options.memory), ("the accelerator's memory", self.tier.limit)

    def fits(self, sizes: Sizes) -> bool:
        return max(self.shortage(sizes)) <= 0

    def check(self, sizes: Sizes | None) -> None:
        """BudgetError, with the numbers, where `sizes` do not fit; without, where the weights do not."""
        what = "the weights" if sizes is None else _block(sizes)
        for short, (of, limit) in zip(self.shortage(sizes), self._limits, strict=True):
            if short > 0 and limit is not None:
                raise BudgetError(
                    f"{what} need {format_size(limit + short)} of {of}, and {format_size(limit)} is the limit for the "
                    "runtime; give more memory, a smaller batch, or a policy that keeps more on disk"
                )

    def close(self) -> None:
        self._parts.close()

    def _open_tier(self, dtype: str, cache_bits: int) -> "HostTier | AcceleratorTier":
        options, shape = self.options, self.source.model_shape
        if options.accelerator is None:
            return HostTier(self.block, shape, dtype, self.pool)
        from flashllm.offload.runtime.accelerator.tier import AcceleratorTier, check_policy

        check_policy(self.policy)
        limit = options.gpu_memory
        return AcceleratorTier(options.accelerator, self.block, shape, dtype, limit=limit, cache_bits=cache_bits)


def _block(sizes: Sizes) -> str:
    longest = max(positions for _, positions in sizes) + 1
    return f"the weights and a block of {len(sizes)} sequences of up to {longest} tokens"
