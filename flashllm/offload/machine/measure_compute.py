"""Rates of copies, memory reads, GEMM and attention on this machine's CPU or GPU, by torch. It fits nothing.

Operands rotate over more memory than the caches hold, as a model's weights and cache do.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle

import torch

from flashllm.profile.rates import Sample, seconds_of


@dataclass(slots=True)
class ComputeProbe:
    """Times work on `device`. Operands are kept between calls, for one probe at a time."""

    device: torch.device
    dtype: torch.dtype
    at_least_s: float  # of one sample
    rotation_bytes: int  # operands of one probe together take at least this: more than the caches
    _operands: dict[tuple[object, ...], list[torch.Tensor]] = field(default_factory=dict)

    def _rotating(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, pin: bool = False
    ) -> Callable[[], torch.Tensor]:
        """A function giving the next of several equal tensors, random so that no zero page is shared."""
        key = (shape, dtype, device.type, pin)
        if key not in self._operands:
            self._operands.clear()
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            copies = max(2, -(-self.rotation_bytes // nbytes))
            first = torch.rand(shape, dtype=torch.float32).to(dtype)
            tensors = [first.clone() for _ in range(copies)]
            self._operands[key] = [t.pin_memory() if pin else t.to(device) for t in tensors]
        following = cycle(self._operands[key])
        return lambda: next(following)

    def _seconds(self, work: Callable[[], object]) -> float:
        work()  # warm: first touch, thread start, kernel choice

        def synchronous() -> None:
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        return seconds_of(synchronous, at_least_s=self.at_least_s)

    def copy(self, nbytes: int, *, to_device: bool) -> Sample:
        """CPU to device or back: over the bus for a GPU (pinned memory), a plain copy where the device is the CPU."""
        host, pin = torch.device("cpu"), self.device.type == "cuda"
        source = self._rotating((nbytes,), torch.uint8, host if to_device else self.device, pin=pin and to_device)
        target = torch.empty(
            nbytes, dtype=torch.uint8, device=self.device if to_device else host, pin_memory=pin and not to_device
        )
        return Sample(
            size=nbytes, units=nbytes, seconds=self._seconds(lambda: target.copy_(source(), non_blocking=pin))
        )

    def memory_read(self, nbytes: int) -> Sample:
        """The device reading its own memory: a matrix-vector product, which decoding is made of."""
        columns = 1024
        rows = max(1, nbytes // (columns * self.dtype.itemsize))
        matrix = self._rotating((rows, columns), self.dtype, self.device)
        vector = torch.rand(columns, dtype=torch.float32).to(self.device, self.dtype)
        moved = rows * columns * self.dtype.itemsize
        return Sample(size=nbytes, units=moved, seconds=self._seconds(lambda: matrix() @ vector))

    def gemm(self, rows: int, *, inner: int, outer: int) -> Sample:
        """[rows, inner] by the transpose of [outer, inner], as a linear layer does it; flop over rows."""
        weight = self._rotating((outer, inner), self.dtype, self.device)
        tokens = torch.rand(rows, inner, dtype=torch.float32).to(self.device, self.dtype)
        seconds = self._seconds(lambda: torch.nn.functional.linear(tokens, weight()))
        return Sample(size=rows, units=2 * rows * inner * outer, seconds=seconds)

    def batched_gemm(self, tokens: int, *, heads: int, head_dim: int) -> Sample:
        """Scores and values of a prompt's attention, [heads, tokens, tokens]; flop over tokens."""
        key = self._rotating((heads, tokens, head_dim), self.dtype, self.device)
        scores = torch.rand(heads, tokens, tokens, dtype=torch.float32).to(self.device, self.dtype)

        def work() -> None:
            torch.bmm(key(), key().transpose(1, 2))
            torch.bmm(scores, key())

        return Sample(size=tokens, units=4 * heads * tokens * tokens * head_dim, seconds=self._seconds(work))

    def cpu_attention(self, nbytes: int, *, context: int, head_dim: int) -> Sample:
        """A decoding step's attention on the CPU; bytes of keys and values over bytes of a call."""
        cpu = torch.device("cpu")
        groups = max(1, nbytes // (2 * context * head_dim * self.dtype.itemsize))
        cache = self._rotating((groups, context, head_dim), self.dtype, cpu)
        query = torch.rand(groups, 1, head_dim, dtype=torch.float32).to(self.dtype)

        def work() -> None:
            scores = torch.bmm(query, cache().transpose(1, 2))
            torch.bmm(torch.softmax(scores, dim=-1), cache())

        moved = 2 * groups * context * head_dim * self.dtype.itemsize
        return Sample(size=nbytes, units=moved, seconds=self._seconds(work))
