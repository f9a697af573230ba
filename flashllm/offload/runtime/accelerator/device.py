"""A torch device as the runtime uses it: streams, copies, pinned memory and a limit. It knows no model.

Each worker has a stream of its own, and what it does is done when its stream is: so a task that waits for another finds
its results on the device, and copies to it run beside the products. The same code runs on torch's "cpu", where it is
tested; on CUDA it has not been run yet.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flashllm.base.units import format_size
from flashllm.errors import BudgetError, UsageError

_cuda: Any = torch.cuda  # whose stubs are not typed throughout
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Tensor = torch.Tensor
HostArray = NDArray[Any]


class TorchDevice:
    """`name` is torch's, like "cuda" or "cpu". `limit` is of what torch may hold there, in bytes."""

    def __init__(self, name: str, dtype: str, *, limit: int | None = None) -> None:
        """`dtype` is the model's. UsageError where torch has no such device, BudgetError where it is too small."""
        try:
            self.device = torch.empty(1, device=name).device  # with its number, where there are several
        except (RuntimeError, AssertionError) as error:  # torch's
            why = str(error).strip().split("\n")[0]
            raise UsageError(f"torch cannot use the device {name!r}: {why}; use --device cpu") from error
        self.dtype, self.dtype_name = _DTYPES[dtype], dtype
        self.is_cuda = self.device.type == "cuda"
        self._streams = threading.local()
        self._pinned: list[int] = []  # addresses
        if self.is_cuda:
            free, total = torch.cuda.mem_get_info(self.device)
            free += torch.cuda.memory_reserved(self.device)  # by torch for this process
            self.limit: int | None = free if limit is None else limit
            if self.limit is not None and self.limit > free:
                raise BudgetError(
                    f"gpu_memory of {format_size(self.limit)} is more than is free on {self.describe()}: "
                    f"{format_size(free)} of {format_size(total)}"
                )
            torch.cuda.set_per_process_memory_fraction(min(1.0, (self.limit or free) / total), self.device)
        else:
            self.limit = limit

    def describe(self) -> str:
        return str(torch.cuda.get_device_name(self.device)) if self.is_cuda else str(self.device)

    @property
    def peak_nbytes(self) -> int | None:
        """Most bytes that tensors took since the start; None where torch does not count them."""
        return int(torch.cuda.max_memory_allocated(self.device)) if self.is_cuda else None

    @contextmanager
    def task(self) -> Iterator[None]:
        """Around a worker's task: on the worker's stream, and until the stream has done it.

        BudgetError where the device's memory is used up.
        """
        if not self.is_cuda:
            yield
            return
        if not hasattr(self._streams, "mine"):
            self._streams.mine = _cuda.Stream(self.device)
        stream: torch.cuda.Stream = self._streams.mine
        try:
            with torch.cuda.stream(stream):
                try:
                    yield
                finally:  # nothing of the task may be given back while the device still works on it
                    done = _cuda.Event(blocking=True)
                    done.record(stream)
                    done.synchronize()
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"the memory of {self.describe()} is used up ({format_size(self.limit or 0)} is the limit); give "
                "a larger gpu_memory, or the policy smaller batches or less on the device"
            ) from error

    # Copies --------------------------------------------------------------------------------------------------------

    def from_host(self, values: HostArray) -> Tensor:
        """A copy of numpy values on the device; those of the model's dtype keep it (bfloat16 comes as uint16)."""
        return host_tensor(values).to(self.device, non_blocking=True, copy=True)

    def to_host(self, x: Tensor, out: HostArray | None = None) -> HostArray:
        """A copy in memory, in `out` where it is given. Waits for the device."""
        there = torch.empty(x.shape, dtype=x.dtype, pin_memory=self.is_cuda) if out is None else host_tensor(out)
        there.copy_(x, non_blocking=True)
        self.wait()
        return host_array(there) if out is None else out

    def wait(self) -> None:
        """Until the worker's stream has done what it was given."""
        if self.is_cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def use(self, x: Tensor) -> Tensor:
        """x, whose memory torch then gives to no other stream before this worker's has done with it."""
        if self.is_cuda:
            x.record_stream(_cuda.current_stream(self.device))
        return x

    def bytes(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    # Pinned memory -------------------------------------------------------------------------------------------------

    def pin(self, memory: NDArray[np.uint8]) -> str | None:
        """Let the device copy from and to `memory` by itself, until `close`. Why not, where it cannot."""
        if not self.is_cuda or not memory.nbytes:
            return None
        address = memory.ctypes.data
        result = _cuda.cudart().cudaHostRegister(address, memory.nbytes, 0)
        if int(result) != 0:
            return f"{format_size(memory.nbytes)} of memory could not be pinned ({result}): copies are slower"
        self._pinned.append(address)
        return None

    def close(self) -> None:
        """Unpin memory, which must still be there, and give back what torch keeps of the device's."""
        while self._pinned:
            _cuda.cudart().cudaHostUnregister(self._pinned.pop())
        if self.is_cuda:
            torch.cuda.empty_cache()


def host_tensor(values: HostArray) -> Tensor:
    """A view of contiguous numpy values: uint16 as bfloat16, which numpy lacks."""
    if values.dtype == np.uint16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def host_array(tensor: Tensor) -> HostArray:
    """The other way round."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()
