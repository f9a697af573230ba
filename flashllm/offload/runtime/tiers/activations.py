"""The hidden states of a run's batches between two layers, each sequence's on its tier.

Those of the device stay where the layer left them. Those of the CPU tier, and on disk, are copied out after a square
and back before the next.
"""

from flashllm import _core
from flashllm.offload.runtime.ops import Array, HostArray, Ops
from flashllm.offload.runtime.tasks import BUFFERS
from flashllm.offload.runtime.tiers.arrangement import Arrangement
from flashllm.offload.runtime.tiers.scratch import ScratchFile, round_up


class Activations:
    """Hidden states [rows, width] of each batch; the rows are those of its sequences, one after the other."""

    def __init__(
        self, arrangement: Arrangement, ops: Ops, *, width: int, disk: ScratchFile | None, offset: int = 0
    ) -> None:
        """`disk` has room for `disk_nbytes` of the arrangement from `offset` on."""
        self._arrangement, self._ops, self._width, self._disk = arrangement, ops, width, disk
        self._dtype = dtype = ops.storage
        self._offsets: list[int] = []
        most = 0
        for batch in range(len(arrangement.batches)):
            region = self._region_nbytes(arrangement, batch, width, dtype.itemsize)
            self._offsets.append(offset)
            offset, most = offset + region, max(most, region)
        self._inbox = [_core.allocate(most) for _ in range(BUFFERS)]
        self._outbox = _core.allocate(most)
        self._device: dict[int, Array] = {}  # batch -> states of the device tier
        self._cpu: dict[int, HostArray] = {}
        self._loaded: dict[int, list[Array]] = {}  # buffer -> parts that have arrived

    @staticmethod
    def _region_nbytes(arrangement: Arrangement, batch: int, width: int, itemsize: int) -> int:
        rows = sum(place.prompt for place in arrangement.batches[batch] if place.hidden_tier == "d")
        return round_up(rows * width * itemsize)

    @classmethod
    def disk_nbytes(cls, arrangement: Arrangement, *, width: int, itemsize: int) -> int:
        """Bytes of the file that the prompts' states take, which later steps' are smaller than."""
        return sum(cls._region_nbytes(arrangement, batch, width, itemsize) for batch in range(len(arrangement.batches)))

    def put(self, batch: int, states: Array) -> None:
        """The result of a computation, before it is stored."""
        self._device[batch] = states

    def store(self, batch: int, rows: tuple[int, int, int]) -> None:
        """Move the states that do not live on the device. `rows` of the device, the CPU tier and the disk."""
        device, cpu, disk = rows
        states = self._ops.use(self._device[batch])
        if cpu:
            self._cpu[batch] = self._ops.to_host(states[device : device + cpu])
        if disk:
            nbytes = disk * self._width * self._dtype.itemsize
            run = self._outbox[: round_up(nbytes)]
            self._ops.to_host(states[device + cpu :], run[:nbytes].view(self._dtype).reshape(disk, self._width))
            self._file().write([(self._offsets[batch], run)])
        if cpu or disk:
            self._device[batch] = self._ops.copy(states[:device])

    def load(self, batch: int, buffer: int, rows: tuple[int, int, int]) -> None:
        """Bring what `store` moved back into the buffer."""
        _, cpu, disk = rows
        parts: list[Array] = []
        if cpu:
            parts.append(self._ops.from_host(self._cpu[batch]))
        if disk:
            nbytes = disk * self._width * self._dtype.itemsize
            run = self._inbox[buffer][: round_up(nbytes)]
            self._file().read([(self._offsets[batch], run)])
            parts.append(self._ops.from_host(run[:nbytes].view(self._dtype).reshape(disk, self._width)))
        self._loaded[buffer] = parts

    def take(self, batch: int, buffer: int) -> Array:
        """The batch's states [rows, width], to be computed with and changed."""
        parts = [self._ops.use(part) for part in self._loaded.pop(buffer, [])]
        states = self._ops.use(self._device.pop(batch))
        return self._ops.join([states, *parts]) if parts else states

    def _file(self) -> ScratchFile:
        if self._disk is None:
            raise ValueError("this arrangement has activations on disk, and there is no file for them")
        return self._disk
