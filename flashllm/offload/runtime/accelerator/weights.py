"""Weights of which the device tier is on an accelerator: a `WeightStore` whose matrices are tensors there.

Device matrices are brought there once. Those of the CPU tier lie in pinned memory and those of the disk are read into
a pinned buffer; a load copies both into one of the device's own staging buffers, while the layer before is computed.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flashllm import _core
from flashllm.offload.runtime.accelerator.device import Tensor, TorchDevice
from flashllm.offload.runtime.ops import Matrix
from flashllm.offload.runtime.tiers.scratch import Scratch
from flashllm.offload.runtime.tiers.source import WeightSource
from flashllm.offload.runtime.tiers.weight_plan import CPU, DEVICE, DISK, Bundle, TieredTensor, WeightPlan
from flashllm.offload.runtime.tiers.weights import Bytes, WeightStore, loaded_tensors


class DeviceWeights(WeightStore):
    """A model's weights, each on its tier. Calls must be tasks of the device (`TorchDevice.task`)."""

    def __init__(
        self,
        source: WeightSource,
        plan: WeightPlan,
        *,
        device: TorchDevice,
        pool: _core.ThreadPool,
        scratch: Scratch,
        reader: _core.Reader,
    ) -> None:
        """As `WeightStore`; BudgetError where the device has no room."""
        self._device = device
        self._staging: list[Tensor] = []
        self._arriving: Bytes = np.empty(0, np.uint8)
        with device.task():
            super().__init__(source, plan, pool=pool, scratch=scratch, reader=reader)
            self._small = {name: device.from_host(array) for name, array in self._small.items()}
        for memory in (self._memory[CPU], *self._buffers):
            if notice := device.pin(memory):
                self.notices.append(notice)

    def close(self) -> None:
        self._staging.clear()
        self._home_tensor = self._device.bytes(0)
        self._small.clear()
        self._device.close()
        super().close()

    def _reserve(self) -> None:
        self._memory[CPU] = _core.allocate(self.plan.cpu_nbytes)
        self._buffers = [_core.allocate(self.plan.read_nbytes) for _ in range(self.plan.staging_buffers)]
        self._home_tensor = self._device.bytes(self.plan.device_nbytes - self.plan.small_nbytes)
        self._staging = [self._device.bytes(self.plan.buffer_nbytes) for _ in range(self.plan.staging_buffers)]

    def _home(self, bundle: Bundle, tier: str) -> tuple[Bytes, int]:
        if tier != DEVICE:
            return super()._home(bundle, tier)
        mine = [one for one in bundle.tensors.values() if one.home == DEVICE]
        if not mine:
            return np.empty(0, np.uint8), 0
        first = min(one.start for one in mine)
        self._arriving = _core.allocate(max(one.start + one.room for one in mine) - first)
        return self._arriving, first

    def _settle(self, bundle: Bundle) -> None:
        mine = [one for one in bundle.tensors.values() if one.home == DEVICE]
        if not mine:
            return
        first = min(one.start for one in mine)
        for one in mine:
            begin = one.start - first + one.skip
            self._copy(self._arriving[begin : begin + one.nbytes], self._home_tensor, one.start)
        self._device.wait()
        self._arriving = np.empty(0, np.uint8)

    def load(self, layer: int, buffer: int) -> None:
        bundle, memory, staging = self.plan.bundles[layer], self._buffers[buffer], self._staging[buffer]
        reads = self._start_reads(bundle, memory)
        tensors = loaded_tensors(bundle)
        for one in tensors:
            if one.home == CPU:
                begin = one.start + one.skip
                self._copy(self._memory[CPU][begin : begin + one.nbytes], staging, one.staged_at)
        self._wait(reads)
        for one in tensors:
            if one.home == DISK:
                begin = one.start + one.skip
                self._copy(memory[begin : begin + one.nbytes], staging, one.start)

    def _copy(self, values: Bytes, to: Tensor, start: int) -> None:
        to[start : start + values.nbytes].copy_(torch.from_numpy(values), non_blocking=True)

    def _matrix(self, one: TieredTensor, buffer: int, bias: Any) -> Matrix:
        if one.home == DEVICE:
            data = self._home_tensor[one.start : one.start + one.nbytes]
        else:
            start = one.staged_at if one.home == CPU else one.start
            data = self._staging[buffer][start : start + one.nbytes]
        array = data if one.packing else data.view(self._device.dtype).view(one.rows, one.columns)
        return Matrix(array, one.rows, one.columns, one.packing, bias)

    def embedding_rows(self, ids: NDArray[np.integer[Any]]) -> Tensor:
        _, table = self.plan.table
        if table.home == DEVICE:
            rows: Tensor = self._matrix(table, 0, None).array
            return rows[self._device.from_host(np.asarray(ids, np.int64))]
        return self._device.from_host(super().embedding_rows(ids))
