"""Rates of what the runtime computes with on a CPU: its products, attention, packing and elementwise steps. Fits none.

Operands rotate over more memory than the caches hold, as a model's weights and cache do.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm._core import PAGE_TOKENS
from flashllm.arch.mixers import Attention, Rotary
from flashllm.arch.spec import BlockSpec, LayerSpec
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.base.dtypes import cast as cast_dtype
from flashllm.offload.planner.packing import WeightPacking
from flashllm.offload.runtime.host_ops import HostOps
from flashllm.offload.runtime.ops import Matrix, Projected, Tensors
from flashllm.offload.runtime.tiers.weights import pack
from flashllm.profile.rates import Sample, seconds_of

Array = NDArray[Any]
_DECODED_ROWS = 16  # of products during reads
_TINY = 64  # width of a layer whose products take next to no time


@dataclass(slots=True)
class NativeProbe:
    """Times the native core's work on arrays of one dtype. Operands of a probe are kept for its next call."""

    dtype: str
    pool: _core.ThreadPool
    at_least_s: float  # of one sample
    rotation_bytes: int  # operands of one probe together take at least this: more than the caches
    _operands: dict[tuple[object, ...], list[Any]] = field(default_factory=dict)

    def products(self, rows: int, *, inner: int, outer: int, bits: int | None = None, decoding: bool = False) -> Sample:
        """[rows, inner] by the transpose of [outer, inner], and back as a layer's products do; flop over rows."""
        turn = self._rotating(
            ("products", inner, outer, bits),
            lambda: (self._matrix(outer, inner, bits, "up"), self._matrix(inner, outer, bits, "down")),
        )
        x, y = self._random(rows, inner), self._random(rows, outer)

        def work() -> None:
            up, down = turn()
            multiply(up, x, self.dtype, self.pool, decoding=decoding)
            multiply(down, y, self.dtype, self.pool, decoding=decoding)

        return Sample(size=rows, units=4 * rows * inner * outer, seconds=self._seconds(work))

    def prompt_attention(self, tokens: int, *, heads: int, head_dim: int) -> Sample:
        """Causal attention of one prompt; 4 · tokens² · heads · head_dim flop, as if nothing were masked."""
        attention = self._attention(heads, head_dim, 0)
        pages = -(-tokens // PAGE_TOKENS)
        turn = self._rotating(("prompt", pages, heads, head_dim), lambda: self._arena(pages, attention.page_nbytes))
        q, out = self._states(tokens, heads * head_dim), np.empty((tokens, heads * head_dim), np.float32)
        seconds = self._seconds(lambda: attention.prompt(q, turn(), 0, 0, out))
        return Sample(size=tokens, units=4 * heads * tokens * tokens * head_dim, seconds=seconds)

    def decode_attention(self, nbytes: int, *, context: int, heads: int, head_dim: int, bits: int = 0) -> Sample:
        """One token of each of several sequences; bytes of plain keys and values over bytes of a call."""
        attention = self._attention(heads, head_dim, bits)
        pages = max(1, context // PAGE_TOKENS)
        each = pages * attention.page_nbytes
        sequences = max(1, nbytes // each)
        slots = sequences * pages
        turn = self._rotating(("decode", slots, heads, head_dim, bits), lambda: self._sealed(attention, slots, bits))
        q, out = self._states(sequences, heads * head_dim), np.empty((sequences, heads * head_dim), np.float32)
        table = np.stack([np.ones(slots, np.int32), np.arange(slots, dtype=np.int32)], axis=1)
        table[pages - 1 :: pages] = np.stack([np.zeros(sequences), np.arange(sequences)], axis=1)  # the open ones
        last = self._arena(sequences, attention.page_nbytes)
        offsets = np.arange(sequences + 1, dtype=np.int64) * pages
        lengths = np.full(sequences, pages * PAGE_TOKENS, np.int64)
        seconds = self._seconds(lambda: attention.decode(q, [last, turn()], table, offsets, lengths, out))
        return Sample(size=nbytes, units=sequences * each, seconds=seconds)

    def seal(self, nbytes: int, *, heads: int, head_dim: int, bits: int) -> Sample:
        """Packing full pages; bytes of plain keys and values over bytes of a call."""
        attention = self._attention(heads, head_dim, bits)
        slots = max(1, nbytes // attention.page_nbytes)
        turn = self._rotating(("seal", slots, heads, head_dim), lambda: self._arena(slots, attention.page_nbytes))
        out = _core.allocate(slots * attention.sealed_nbytes).reshape(slots, attention.sealed_nbytes)
        number = np.arange(slots, dtype=np.int32)
        seconds = self._seconds(lambda: attention.seal(turn(), number, out, number))
        return Sample(size=nbytes, units=slots * attention.page_nbytes, seconds=seconds)

    def elementwise(self, nbytes: int, *, width: int) -> Sample:
        """States before the first layer with a norm of them, which read and write five values for each of an array.

        Bytes over bytes of the array.
        """
        ops = HostOps(dataclasses.replace(_tiny_block(width), embedding_norm=True), self.dtype, self.pool)
        rows = max(1, nbytes // (width * ops.storage.itemsize))
        turn = self._rotating(("elementwise", rows, width), lambda: self._random(rows, width))
        ends = Tensors({}, {"embedding_norm.weight": np.ones(width, np.float32)})
        positions = np.zeros(rows, np.int64)
        seconds = self._seconds(lambda: ops.embed(ends, turn(), positions))
        return Sample(size=nbytes, units=5 * rows * width * ops.storage.itemsize, seconds=seconds)

    def square_s(self) -> float:
        """Seconds of a layer so small that only calls and Python are left."""
        ops = HostOps(_tiny_block(), self.dtype, self.pool)
        matrix = Matrix.of(self._random(_TINY, _TINY))
        norms = {f"{name}.weight": np.ones(_TINY, np.float32) for name in ("attention_norm", "ffn_norm")}
        weights = Tensors(dict.fromkeys(("query", "key", "value", "out", "up", "gate", "down"), matrix), norms)
        x, positions = self._random(1, _TINY), np.zeros(1, np.int64)

        def attend(_first: int, made: Projected, out: Array) -> None:
            out[:] = made.queries

        return self._seconds(lambda: ops.layer(0, weights, x.copy(), positions, attend))

    def beside_reads(
        self, read: Callable[[], None], *, seconds: float, inner: int, rounds: int = 1
    ) -> tuple[float, float]:
        """(share of the products' rate lost to reads, share of the reads' rate lost to products), while both run. Of
        few rows, as decoding has them, whose products and reads want the same memory. Medians of the rounds."""
        found = [self._beside_reads(read, seconds=seconds, inner=inner) for _ in range(rounds)]
        takes, loses = (sorted(shares)[rounds // 2] for shares in zip(*found, strict=True))
        return takes, loses

    def _beside_reads(self, read: Callable[[], None], *, seconds: float, inner: int) -> tuple[float, float]:
        turn = self._rotating(("beside", inner), lambda: (self._matrix(inner, inner, None, "up"),))
        x = self._random(_DECODED_ROWS, inner)

        def compute() -> None:
            multiply(turn()[0], x, self.dtype, self.pool)

        compute()
        alone = _rate(compute, seconds), _rate(read, seconds)
        ended = threading.Event()
        reads = [0.0]

        def keep_reading() -> None:
            count, started = 0, time.perf_counter()
            while not ended.is_set():
                read()
                count += 1
            reads[0] = count / (time.perf_counter() - started)

        reader = threading.Thread(target=keep_reading)
        reader.start()
        try:
            computed = _rate(compute, 2 * seconds)
        finally:
            ended.set()
            reader.join()
        lost = 1 - computed / alone[0], 1 - reads[0] / alone[1]
        return min(max(lost[0], 0.0), 0.95), min(max(lost[1], 0.0), 0.95)

    def _attention(self, heads: int, head_dim: int, bits: int) -> _core.BatchAttention:
        mixer = Attention(heads=heads, kv_heads=heads, head_dim=head_dim, query_scale=1.0)
        return _core.BatchAttention(mixer, self.dtype, self.pool, bits=bits)

    def _states(self, rows: int, columns: int) -> NDArray[np.float32]:
        """Values of the order that norms leave."""
        return np.random.default_rng(rows).standard_normal((rows, columns), np.float32)

    def _random(self, rows: int, columns: int) -> Array:
        """The same of the dtype."""
        values = self._states(rows, columns)
        return np.ascontiguousarray(cast_dtype(values, WEIGHT_DTYPES["float32"], WEIGHT_DTYPES[self.dtype]))

    def _matrix(self, rows: int, columns: int, bits: int | None, name: str) -> Matrix:
        array = np.repeat(self._random(1, columns), rows, axis=0)  # alike: making them takes longer than timing
        if bits is None:
            return Matrix.of(array)
        packing = WeightPacking(bits=bits, layers=1, shares_keys=False).made(name, -1, bits)
        packed = _core.allocate(packing.nbytes(rows, columns))
        pack(array, self.dtype, packing, packed, self.pool)
        return Matrix(packed, rows, columns, packing)

    def _arena(self, slots: int, nbytes: int) -> Array:
        """Plain pages with values that packing has to look at."""
        arena = _core.allocate(slots * nbytes)
        arena.view(WEIGHT_DTYPES[self.dtype].storage).reshape(-1, PAGE_TOKENS)[:] = self._random(1, PAGE_TOKENS)
        return arena.reshape(slots, nbytes)

    def _sealed(self, attention: _core.BatchAttention, slots: int, bits: int) -> Array:
        plain = self._arena(slots, attention.page_nbytes)
        if not bits:
            return plain
        out = _core.allocate(slots * attention.sealed_nbytes).reshape(slots, attention.sealed_nbytes)
        number = np.arange(slots, dtype=np.int32)
        attention.seal(plain, number, out, number)
        return out

    def _rotating(self, key: tuple[object, ...], make: Callable[[], Any]) -> Callable[[], Any]:
        """A function giving the next of several equal operands, arrays or tuples of matrices."""
        if key not in self._operands:
            while len(self._operands) > 1:  # two probes may take turns
                self._operands.pop(next(iter(self._operands)))
            first = make()
            arrays = [one.array for one in first] if isinstance(first, tuple) else [first]
            copies = max(2, -(-self.rotation_bytes // sum(array.nbytes for array in arrays)))
            self._operands[key] = [first, *(_copied(first) for _ in range(copies - 1))]
        following = cycle(self._operands[key])
        return lambda: next(following)

    def _seconds(self, work: Callable[[], object]) -> float:
        work()  # warm: first touch, threads awake
        return seconds_of(work, at_least_s=self.at_least_s)


def multiply(matrix: Matrix, x: Array, dtype: str, pool: _core.ThreadPool, *, decoding: bool = False) -> Array:
    """x [rows, columns] times the transpose of a matrix, by the product that a layer takes."""
    out, packing = np.empty((len(x), matrix.rows), x.dtype), matrix.packing
    if packing is None:
        _core.Linear(matrix.array, None, dtype, pool).forward(x, out, many=True)
        return out
    count, length = packing.vectors(matrix.rows, matrix.columns)
    codes = matrix.array.reshape(count, -1)
    native = _core.Linear(codes, None, dtype, pool, "auto", packing.encoding, length, "int16", packing.by_inputs)
    native.forward(x, out, many=not decoding)
    return out


def _copied(operand: Any) -> Any:
    """The same in other memory: what takes long to make is made once."""
    if isinstance(operand, tuple):
        return tuple(dataclasses.replace(one, array=_copied(one.array)) for one in operand)
    copy = _core.allocate(operand.nbytes).view(operand.dtype).reshape(operand.shape)
    copy[...] = operand
    return copy


def _rate(work: Callable[[], object], seconds: float) -> float:
    """Calls a second, over `seconds`."""
    count, started = 0, time.perf_counter()
    while (past := time.perf_counter() - started) < seconds or not count:
        work()
        count += 1
    return count / past


def _tiny_block(width: int = _TINY) -> BlockSpec:
    rotary = Rotary(inverse_frequency=(1.0,) * (width // 2))
    mixer = Attention(heads=1, kv_heads=1, head_dim=width, query_scale=0.5, rotary=rotary)
    return BlockSpec(
        d_model=width,
        embed_dim=width,
        vocab_size=1,
        context=PAGE_TOKENS,
        norm="rms",
        norm_epsilon=1e-6,
        final_norm=True,
        activation="silu",
        gated=True,
        tied_head=True,
        layers=(LayerSpec(mixer=mixer, neurons=width),),
    )
