"""The device tier on an accelerator, by torch, where `HostTier` is not. What is off the device is in memory."""

from flashllm import _core
from flashllm.arch.spec import BlockSpec
from flashllm.errors import UsageError
from flashllm.offload.planner.host_peaks import SPARE
from flashllm.offload.policy import Policy
from flashllm.offload.runtime.accelerator.device import TorchDevice
from flashllm.offload.runtime.accelerator.kv import DeviceFormat, SplitKv
from flashllm.offload.runtime.accelerator.torch_ops import TorchOps, working_nbytes
from flashllm.offload.runtime.accelerator.weights import DeviceWeights
from flashllm.offload.runtime.device_tier import Need, Sizes, largest_batch, states_need, weights_on_disk
from flashllm.offload.runtime.ops import Ops
from flashllm.offload.runtime.tiers.arrangement import arrange
from flashllm.offload.runtime.tiers.kv import Attentions, KvCache
from flashllm.offload.runtime.tiers.scratch import Scratch, ScratchFile
from flashllm.offload.runtime.tiers.source import WeightSource
from flashllm.offload.runtime.tiers.weight_plan import WeightPlan
from flashllm.offload.runtime.tiers.weights import WeightStore
from flashllm.offload.shape import ModelShape


class AcceleratorTier:
    """As `HostTier`, on the torch device `name`."""

    def __init__(
        self, name: str, block: BlockSpec, shape: ModelShape, dtype: str, *, limit: int | None, cache_bits: int
    ) -> None:
        """`limit` is of its memory; a cache of 0 bits is plain. UsageError and BudgetError as `TorchDevice`,
        UnsupportedModelError as `TorchOps`."""
        self._device = TorchDevice(name, dtype, limit=limit)
        self.ops: Ops = TorchOps(block, self._device)
        self._shape, mixer = shape, block.layers[0].attention
        self._format = DeviceFormat(mixer=mixer, bits=cache_bits, itemsize=shape.dtype_bytes)

    @property
    def limit(self) -> int | None:
        return self._device.limit

    @property
    def peak_nbytes(self) -> int | None:
        return self._device.peak_nbytes

    def open_weights(
        self, source: WeightSource, plan: WeightPlan, *, pool: _core.ThreadPool, scratch: Scratch, reader: _core.Reader
    ) -> WeightStore:
        return DeviceWeights(source, plan, device=self._device, pool=pool, scratch=scratch, reader=reader)

    def open_cache(self, attention: Attentions, sizes: Sizes, policy: Policy, *, disk: ScratchFile | None) -> SplitKv:
        share = policy.attention_sparsity
        beside = KvCache(attention, arrange(sizes, policy, tiers_of="cd"), disk=disk, share=share)
        return SplitKv(self._format, self._device, arrange(sizes, policy), beside, layers=len(attention), share=share)

    def weights_need(self, plan: WeightPlan) -> tuple[Need, Need]:
        kept = Need(
            device=plan.device_nbytes + plan.staging_buffers * plan.buffer_nbytes,
            cpu=plan.cpu_nbytes + plan.staging_buffers * plan.read_nbytes + plan.gather_nbytes + SPARE,
            disk=weights_on_disk(plan),
            scratch=plan.scratch_nbytes,
        )
        return kept, Need(cpu=plan.start_nbytes + plan.arriving_nbytes)

    def block_need(self, attention: Attentions, sizes: Sizes, policy: Policy) -> Need:
        whole, beside = arrange(sizes, policy), arrange(sizes, policy, tiers_of="cd")
        rows, sequences = largest_batch(whole)
        others = max(sum(place.prompt for place in batch) for batch in beside.batches)
        positions = max(place.positions for batch in whole.batches for place in batch)
        packs = policy.compress_weights, policy.compress_cache
        sparse = policy.attention_sparsity < 1
        on_device = working_nbytes(self._shape, rows, sequences, positions, packs=packs, sparse=sparse)
        # On their way out: keys and values of a prompt, and its states.
        on_disk = KvCache.disk_nbytes(attention, beside)
        wide = self._shape.kv_token_bytes // self._shape.dtype_bytes * 4  # as the core takes them
        passing = others * (self._shape.kv_token_bytes + wide) + rows * self._shape.activation_token_bytes
        return states_need(whole, self._shape) + Need(
            device=SplitKv.nbytes(self._format, whole, layers=len(attention)) + on_device,
            cpu=KvCache.nbytes(attention, beside) + passing + sequences * self._shape.vocab * 4,
            disk=on_disk,
            scratch=on_disk,
        )


def check_policy(policy: Policy) -> None:
    """UsageError for what an accelerator would have to do and does not."""
    if policy.cg < 1 and not policy.cpu_attention:
        raise UsageError(
            "the policy keeps part of the cache off the device and wants the device to attend to it "
            "(cpu_attention is false), which this runtime does not do: set cpu_attention to true, or cg to 1"
        )
