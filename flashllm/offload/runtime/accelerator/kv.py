"""The KV cache of a run whose device tier is an accelerator: the device's sequences there, the others' beside it.

A batch's first sequences are the device's. Their keys and values stay on the device, padded to the longest of the
batch, plain or packed as in csrc/attention/page_format.h: full pages of 64 positions packed, the last one plain. Their
attention is the device's; that of the others is the CPU's, where their cache is (paper B, section 4.3), at the same
time. The attention of a prompt is always the device's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from flashllm._core import PAGE_TOKENS
from flashllm.arch.mixers import Attention
from flashllm.offload.planner.packing import GROUP, codes_nbytes, in_units
from flashllm.offload.runtime.accelerator.codec import pack_codes, quantise, restore, unpack_codes
from flashllm.offload.runtime.accelerator.device import Tensor, TorchDevice, host_tensor
from flashllm.offload.runtime.ops import Projected
from flashllm.offload.runtime.tasks import Task
from flashllm.offload.runtime.tiers.arrangement import Arrangement, Place
from flashllm.offload.runtime.tiers.kv import KvCache


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFormat:
    """How the device holds keys and values."""

    mixer: Attention  # of every layer
    bits: int  # of a packed number; 0: plain
    itemsize: int  # of the model's dtype

    def nbytes(self, sequences: int, positions: int) -> int:
        """Bytes of a layer's cache of `sequences` of at most `positions`."""
        rows, width = sequences * self.mixer.kv_heads, self.mixer.head_dim
        if not self.bits:
            return 2 * rows * positions * width * self.itemsize
        pages, groups = positions // PAGE_TOKENS, -(-width // GROUP)
        by_position = 4 * PAGE_TOKENS * groups
        sealed = pages * (4 * width + by_position + 2 * PAGE_TOKENS * codes_nbytes(width, self.bits))
        return rows * (sealed + 2 * PAGE_TOKENS * width * self.itemsize)


class _Plain:
    """Keys or values of a batch in a layer: [sequences, heads, positions, head_dim]."""

    def __init__(self, made: DeviceFormat, device: TorchDevice, sequences: int, positions: int) -> None:
        shape = (sequences, made.mixer.kv_heads, positions, made.mixer.head_dim)
        self._values = torch.zeros(shape, dtype=device.dtype, device=device.device)

    def fill(self, row: int, values: Tensor) -> None:
        """The first values [heads, positions, head_dim] of a sequence."""
        self._values[row, :, : values.shape[1]] = values

    def add(self, rows: Tensor, positions: Tensor, values: Tensor) -> None:
        """Values [rows, heads, head_dim], one position each."""
        self._values[rows, :, positions] = values

    def seal(self, rows: Sequence[int], page: int) -> None:
        """Nothing: full pages stay plain."""

    def all(self, positions: int) -> Tensor:
        """[sequences, heads, positions or more, head_dim]."""
        return self._values[:, :, :positions]


class _Packed:
    """The same with full pages packed: codes [sequences, heads, pages, PAGE_TOKENS, bytes], and the open page."""

    def __init__(
        self, made: DeviceFormat, device: TorchDevice, sequences: int, positions: int, *, by_channel: bool
    ) -> None:
        heads, self._width = made.mixer.kv_heads, made.mixer.head_dim
        self._bits, self._by_channel, self._dtype = made.bits, by_channel, device.dtype
        pages = positions // PAGE_TOKENS
        first = (sequences, heads, pages)
        scales = (1, self._width) if by_channel else (PAGE_TOKENS, -(-self._width // GROUP))
        on = device.device
        self._codes = torch.zeros(
            (*first, PAGE_TOKENS, codes_nbytes(self._width, made.bits)), dtype=torch.uint8, device=on
        )
        self._scales = torch.zeros((*first, *scales), dtype=torch.float16, device=on)
        self._minimums = torch.zeros_like(self._scales)
        self._open = torch.zeros((sequences, heads, PAGE_TOKENS, self._width), dtype=device.dtype, device=on)
        self._column_group = torch.arange(self._width, device=on) // GROUP

    def fill(self, row: int, values: Tensor) -> None:
        full = values.shape[1] // PAGE_TOKENS
        if full:
            pages = values[:, : full * PAGE_TOKENS].reshape(len(values), full, PAGE_TOKENS, -1)
            self._pack(pages, (row, slice(None), slice(0, full)))
        tail = values[:, full * PAGE_TOKENS :]
        self._open[row, :, : tail.shape[1]] = tail

    def add(self, rows: Tensor, positions: Tensor, values: Tensor) -> None:
        self._open[rows, :, positions % PAGE_TOKENS] = values

    def seal(self, rows: Sequence[int], page: int) -> None:
        """Pack the open pages of sequences, which are full, as their pages number `page`."""
        for row in rows:
            self._pack(self._open[row], (row, slice(None), page))

    def all(self, positions: int) -> Tensor:
        """[sequences, heads, positions, head_dim]: full pages, those of longer sequences, then the open ones."""
        pages = (positions - 1) // PAGE_TOKENS
        if not pages:
            return self._open
        codes = unpack_codes(self._codes[:, :, :pages], self._bits)[..., : self._width]
        sealed = restore(codes, self._wide(self._scales[:, :, :pages]), self._wide(self._minimums[:, :, :pages]))
        return torch.cat([sealed.flatten(2, 3).to(self._dtype), self._open], dim=2)

    def _wide(self, scales: Tensor) -> Tensor:
        return scales if self._by_channel else scales[..., self._column_group]

    def _pack(self, values: Tensor, where: tuple[int, slice, slice | int]) -> None:
        wide = values.float()
        if self._by_channel:
            ends = wide.amin(-2, keepdim=True), wide.amax(-2, keepdim=True)
            codes, scales, minimums = quantise(wide, *ends, self._bits)
        else:
            groups = torch.split(wide, GROUP, dim=-1)
            ends = (
                torch.stack([group.amin(-1) for group in groups], -1),
                torch.stack([group.amax(-1) for group in groups], -1),
            )
            scales, minimums = quantise(ends[0], *ends, self._bits)[1:]
            codes = quantise(wide, self._wide(ends[0]), self._wide(ends[1]), self._bits)[0]
        room = in_units(self._width) - self._width
        self._codes[where] = pack_codes(functional.pad(codes, (0, room)), self._bits)
        self._scales[where], self._minimums[where] = scales, minimums


_Half = _Plain | _Packed


@dataclass(slots=True)
class _DeviceBatch:
    """A batch's sequences on the device: keys and values of each layer."""

    count: int
    capacity: int
    keys: list[_Half]
    values: list[_Half]


@dataclass(slots=True)
class _Step:
    """Places of a batch's sequences on the device in a decoding step."""

    rows: list[int]  # that take part
    positions: list[int]
    where: Tensor  # rows, on the device
    places: Tensor  # positions
    lengths: Tensor  # of all sequences [count]; of those that take no part 1
    lengths_here: NDArray[np.int64]  # the same beside the device


class SplitKv:
    """As `KvCache`, which it uses for the sequences that are not the device's."""

    def __init__(
        self,
        made: DeviceFormat,
        device: TorchDevice,
        arrangement: Arrangement,
        beside: KvCache,
        *,
        layers: int,
        share: float = 1.0,
    ) -> None:
        """`arrangement` is of all sequences; `beside` has the arrangement of those that are not on the device."""
        self._made, self._device, self._arrangement = made, device, arrangement
        self._beside, self._share = beside, share
        with device.task():
            self._batches = [self._reserve(places, layers) for places in arrangement.batches]
        self._steps: dict[tuple[int, int], _Step] = {}

    @staticmethod
    def nbytes(made: DeviceFormat, arrangement: Arrangement, *, layers: int) -> int:
        """Bytes of the device that a cache of this arrangement takes."""
        return sum(layers * made.nbytes(*_size(places)) for places in arrangement.batches)

    def prompt(self, task: Task, _first: int, made: Projected, out: Tensor, *, sinks: None = None) -> None:
        """As `KvCache.prompt`; the device attends for all sequences, and keeps what is its own. There are no windows:
        `torch_ops.lacking` refuses a model that has them."""
        places = self._arrangement.batches[task.step.batch]
        mine = self._batches[task.step.batch]
        first = 0
        for row, place in enumerate(places):
            rows = slice(first, first + place.prompt)
            first += place.prompt
            keys, values = (self._heads(x[rows]) for x in (made.keys, made.values))
            out[rows] = self._attend_prompt(made.queries[rows], keys, values)
            if row < mine.count:
                mine.keys[task.step.layer].fill(row, keys)
                mine.values[task.step.layer].fill(row, values)
        others = sum(place.prompt for place in places[: mine.count])
        if others < first:
            self._beside.keep_prompt(task, self._wide(made.keys[others:]), self._wide(made.values[others:]))

    def store_prompt(self, task: Task) -> None:
        self._beside.store_prompt(task)

    def begin_step(self, batch: int, token: int, rows: Sequence[int], positions: Sequence[int]) -> None:
        count = self._batches[batch].count
        pairs = list(zip(rows, positions, strict=True))
        others = [(row - count, position) for row, position in pairs if row >= count]
        self._beside.begin_step(batch, token, [row for row, _ in others], [position for _, position in others])
        for old in [key for key in self._steps if key[0] == batch]:
            del self._steps[old]
        mine = [pair for pair in pairs if pair[0] < count]
        lengths = np.ones(count, np.int64)
        for row, position in mine:
            lengths[row] = position + 1
        where, places = np.array(mine, np.int64).reshape(-1, 2).T
        on_device = [self._device.from_host(np.ascontiguousarray(x)) for x in (where, places, lengths)]
        self._steps[batch, token] = _Step(
            where.tolist(), places.tolist(), on_device[0], on_device[1], on_device[2], lengths
        )

    def load(self, task: Task, positions: Sequence[int | None]) -> None:
        self._beside.load(task, positions[self._batches[task.step.batch].count :])

    def decode(self, task: Task, _first: int, made: Projected, out: Tensor, *, sinks: None = None) -> None:
        step, mine = self._steps[task.step.batch, task.step.token], self._batches[task.step.batch]
        count = len(step.rows)
        others = None
        if count < len(out):
            others = Projected(*(self._wide(x[count:]) for x in made))
        if count:  # only begun here: the device works while the CPU attends to the others
            self._attend_step(step, mine, task.step.layer, Projected(*(x[:count] for x in made)), out[:count])
        if others is not None:
            attended = np.empty_like(others.queries)
            self._beside.decode(task, 0, others, attended)
            out[count:] = self._device.from_host(attended)

    def store_step(self, task: Task) -> None:
        self._beside.store_step(task)

    def _wide(self, x: Tensor) -> NDArray[np.float32]:
        """A copy beside the device, in fp32, as the core takes it."""
        wide: NDArray[np.float32] = host_tensor(self._device.to_host(x)).float().numpy()
        return wide

    # On the device -------------------------------------------------------------------------------------------------

    def _reserve(self, places: Sequence[Place], layers: int) -> _DeviceBatch:
        made, device = self._made, self._device
        count, capacity = _size(places)
        if not made.bits or not count:
            halves: list[list[_Half]] = [
                [_Plain(made, device, count, capacity) for _ in range(layers)] for _ in range(2)
            ]
        else:
            halves = [
                [_Packed(made, device, count, capacity, by_channel=by_channel) for _ in range(layers)]
                for by_channel in (True, False)
            ]
        return _DeviceBatch(count, capacity, *halves)

    def _heads(self, x: Tensor) -> Tensor:
        """[tokens, heads * head_dim] -> [heads, tokens, head_dim]."""
        return x.view(len(x), -1, self._made.mixer.head_dim).transpose(0, 1)

    def _attend_prompt(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        group = self._made.mixer.heads // self._made.mixer.kv_heads
        if group > 1:  # torch's kernels for grouped queries take up memory by the square of the length in fp32
            keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        attended = functional.scaled_dot_product_attention(
            self._heads(queries)[None], keys[None], values[None], is_causal=True, scale=1.0
        )
        return attended[0].transpose(0, 1).flatten(1)

    def _attend_step(self, step: _Step, batch: _DeviceBatch, layer: int, made: Projected, out: Tensor) -> None:
        """Keep a key and a value a sequence, and attend for all of them at once."""
        mixer, keys, values = self._made.mixer, batch.keys[layer], batch.values[layer]
        width, group = mixer.head_dim, mixer.heads // mixer.kv_heads
        keys.add(step.where, step.places, made.keys.view(-1, mixer.kv_heads, width))
        values.add(step.where, step.places, made.values.view(-1, mixer.kv_heads, width))
        longest = max(step.positions) + 1
        every_key, every_value = keys.all(longest), values.all(longest)
        valid = self._valid(step.lengths, longest, every_key.shape[2])
        queries = torch.zeros((batch.count, mixer.kv_heads, group, width), dtype=out.dtype, device=out.device)
        queries[step.where] = made.queries.view(-1, mixer.kv_heads, group, width)
        if self._share < 1.0:
            attended = self._attend_sparsely(queries, every_key, every_value, valid, step)
        else:
            mask = valid[:, None, None, :]
            attended = functional.scaled_dot_product_attention(queries, every_key, every_value, mask, scale=1.0)
        out.copy_(attended[step.where].flatten(1))
        for half in (keys, values):
            for row, position in zip(step.rows, step.positions, strict=True):
                if (position + 1) % PAGE_TOKENS == 0:
                    half.seal([row], position // PAGE_TOKENS)

    def _valid(self, lengths: Tensor, longest: int, columns: int) -> Tensor:
        """[sequences, columns]: which columns of `all` are positions of a sequence."""
        column = torch.arange(columns, device=lengths.device)
        if not self._made.bits:
            return column < lengths[:, None]
        last = lengths[:, None] - 1
        sealed = (longest - 1) // PAGE_TOKENS * PAGE_TOKENS  # columns of full pages; the open page follows
        is_sealed = column < sealed
        return (is_sealed & (column < last // PAGE_TOKENS * PAGE_TOKENS)) | (
            ~is_sealed & (column - sealed <= last % PAGE_TOKENS)
        )

    def _attend_sparsely(self, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor, step: _Step) -> Tensor:
        """As csrc/attention/attention.h: a softmax over all, values of the heaviest positions and of the last."""
        scores = torch.matmul(queries.float(), keys.float().transpose(-1, -2))
        weights = scores.masked_fill(~valid[:, None, None, :], -torch.inf).softmax(-1)
        kept = np.ceil(self._share * step.lengths_here).astype(np.int64)
        most = int(kept.max())
        heaviest = torch.sort(weights, dim=-1, descending=True, stable=True)
        rank = torch.arange(most, device=weights.device)
        taken = heaviest.values[..., :most] * (rank < self._device.from_host(kept)[:, None, None, None])
        places = heaviest.indices[..., :most]
        wide = values.float()
        rows = torch.arange(len(values), device=values.device)[:, None, None, None]
        heads = torch.arange(values.shape[1], device=values.device)[None, :, None, None]
        attended = (taken[..., None] * wide[rows, heads, places]).sum(-2)
        last = valid.shape[1] - 1 - valid.flip(1).int().argmax(1)  # [sequences]: columns of the newest positions
        in_taken = ((places == last[:, None, None, None]) & (taken > 0)).any(-1, keepdim=True)
        own = weights.gather(-1, last[:, None, None, None].expand(*weights.shape[:-1], 1))
        newest = wide[rows[..., 0], heads[..., 0], last[:, None, None]]
        attended += torch.where(in_taken, torch.zeros_like(own), own) * newest
        result: Tensor = attended.to(queries.dtype)
        return result


def _size(places: Sequence[Place]) -> tuple[int, int]:
    """Sequences of a batch on the device, and the positions of the longest."""
    mine = [place.positions for place in places if place.tier == "g"]
    return len(mine), max(mine, default=0)
