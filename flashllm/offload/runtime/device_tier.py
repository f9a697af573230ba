"""The device tier, and what a run takes of each tier: the one place where bytes are counted before they are taken.

`HostTier` is the CPU under the memory's limit. On an accelerator it is `accelerator/tier.py`'s; the runtime uses both
in the same way. The planner's affine forms (planner/host_peaks.py) count the same things of blocks of one length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashllm import _core
from flashllm.arch.spec import BlockSpec
from flashllm.offload.planner.host_peaks import SPARE, working
from flashllm.offload.policy import Policy
from flashllm.offload.runtime.host_ops import HostOps
from flashllm.offload.runtime.ops import Ops
from flashllm.offload.runtime.tasks import BUFFERS
from flashllm.offload.runtime.tiers.activations import Activations
from flashllm.offload.runtime.tiers.arrangement import Arrangement, arrange
from flashllm.offload.runtime.tiers.kv import Attentions, KvCache
from flashllm.offload.runtime.tiers.scratch import Scratch, ScratchFile
from flashllm.offload.runtime.tiers.source import WeightSource
from flashllm.offload.runtime.tiers.weight_plan import DISK, WeightPlan
from flashllm.offload.runtime.tiers.weights import WeightStore
from flashllm.offload.shape import ModelShape

Sizes = Sequence[tuple[int, int]]  # of sequences: prompt tokens, cached positions at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes of each tier. Where the device is the CPU, its bytes are of the same memory.

    Of those on disk `scratch` is in files of our own; the rest is read in the model's.
    """

    device: int = 0
    cpu: int = 0
    disk: int = 0
    scratch: int = 0

    def __add__(self, other: "Need") -> "Need":
        return Need(
            device=self.device + other.device,
            cpu=self.cpu + other.cpu,
            disk=self.disk + other.disk,
            scratch=self.scratch + other.scratch,
        )

    def memory(self, *, accelerated: bool) -> int:
        """Bytes that count against the memory's limit."""
        return self.cpu if accelerated else self.cpu + self.device


class HostTier:
    """The native core's operations, in the memory that the other tier has too."""

    limit: int | None = None  # of the device's own memory; None where it has none of its own, or no limit
    peak_nbytes: int | None = None  # most bytes taken there so far; None where nobody counts

    def __init__(self, block: BlockSpec, shape: ModelShape, dtype: str, pool: _core.ThreadPool) -> None:
        self._shape = shape
        self.ops: Ops = HostOps(block, dtype, pool)

    def open_weights(
        self, source: WeightSource, plan: WeightPlan, *, pool: _core.ThreadPool, scratch: Scratch, reader: _core.Reader
    ) -> WeightStore:
        return WeightStore(source, plan, pool=pool, scratch=scratch, reader=reader)

    def open_cache(self, attention: Attentions, sizes: Sizes, policy: Policy, *, disk: ScratchFile | None) -> KvCache:
        return KvCache(attention, arrange(sizes, policy), disk=disk, share=policy.attention_sparsity)

    def weights_need(self, plan: WeightPlan) -> tuple[Need, Need]:
        """Needs while a run lasts; and what comes on top while the weights are brought to their tiers."""
        kept = Need(
            device=plan.device_nbytes,
            cpu=plan.cpu_nbytes + plan.staging_buffers * plan.buffer_nbytes + plan.gather_nbytes + SPARE,
            disk=weights_on_disk(plan),
            scratch=plan.scratch_nbytes,
        )
        return kept, Need(cpu=plan.start_nbytes)

    def block_need(self, attention: Attentions, sizes: Sizes, policy: Policy) -> Need:
        """Needs of a block of sequences: cache, hidden states, working memory."""
        whole, mine = arrange(sizes, policy), arrange(sizes, policy, tiers_of="g")
        cache, own = (KvCache.nbytes(attention, each) for each in (whole, mine))
        states = states_need(whole, self._shape)
        rows, sequences = largest_batch(whole)
        on_disk = KvCache.disk_nbytes(attention, whole)
        return states + Need(
            device=own + working(self._shape, rows, sequences), cpu=max(0, cache - own), disk=on_disk, scratch=on_disk
        )


def states_need(arrangement: Arrangement, shape: ModelShape) -> Need:
    """Hidden states of all batches between two layers, as `Activations` holds them, and of one that is computed."""
    row = shape.activation_token_bytes
    held = dict.fromkeys("gcd", 0)
    for place in (place for batch in arrangement.batches for place in batch):
        held[place.hidden_tier] += place.prompt * row

    def largest(measure: Callable[[str], bool]) -> int:
        return row * max(
            sum(place.prompt for place in batch if measure(place.hidden_tier)) for batch in arrangement.batches
        )

    moved = largest(lambda tier: tier != "g")
    buffers = (BUFFERS + 1) * largest(lambda tier: tier == "d")
    on_disk = Activations.disk_nbytes(arrangement, width=1, itemsize=row)
    return Need(device=held["g"] + 2 * moved, cpu=held["c"] + buffers, disk=on_disk, scratch=on_disk)


def largest_batch(arrangement: Arrangement) -> tuple[int, int]:
    """Prompt tokens of the batch that has most of them, and sequences of the one that has most."""
    rows = max(sum(place.prompt for place in batch) for batch in arrangement.batches)
    return rows, max(len(batch) for batch in arrangement.batches)


def weights_on_disk(plan: WeightPlan) -> int:
    """Bytes of the tensors that are read from the disk for each use, wherever they lie on it."""
    return sum(one.nbytes for bundle in plan.bundles for one in bundle.tensors.values() if one.home == DISK)
