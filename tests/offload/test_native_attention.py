"""Attention of a batch over pages: bits of the latency engine's over plain pages, numpy elsewhere."""

import dataclasses
import math
from dataclasses import dataclass
from types import SimpleNamespace

import group_codec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_arrays import DTYPES, LEVELS, random_values, rounded

from flashllm import _core
from flashllm.arch.mixers import Attention

PAGE = 64
CASES = [(dtype, level) for dtype in DTYPES for level in LEVELS]
LENGTHS = st.lists(st.sampled_from([1, 2, 63, 64, 65, 127, 128, 130, 200]), min_size=1, max_size=5)
SHAPES = st.sampled_from([(4, 4, 8), (6, 2, 16), (2, 1, 33), (3, 3, 80), (8, 4, 64)])  # heads, kv_heads, head_dim


def sizes_of(shape):
    return dict(zip(("heads", "kv_heads", "head_dim"), shape, strict=True))


def settings_of(shape, dtype, level, threads):
    return {"dtype": dtype, "pool": _core.ThreadPool(threads), "simd": level}


def native_attention(shape, dtype, level, *, threads=2, **options):
    """Sizes that an `Attention` would refuse go to the core, too."""
    fields = dataclasses.asdict(Attention(heads=1, kv_heads=1, head_dim=8, query_scale=1.0))
    mixer = SimpleNamespace(**fields | sizes_of(shape))
    return _core.BatchAttention(mixer, **settings_of(shape, dtype, level, threads), **options)


def queries(n, heads, head_dim, seed):
    """Scaled as a layer has them."""
    return random_values(n, heads, head_dim, seed=seed) * np.float32(head_dim**-0.5)


def latency_attention(shape, dtype, level, keys, values):
    """The latency engine's, which has these keys and values."""
    attention = _core.KvAttention(context=len(keys), **sizes_of(shape), **settings_of(shape, dtype, level, 1))
    attention.append(keys, values)
    return attention


@dataclass
class Cached:
    """A batch's sequences, their pages in random order: the last of each in `plain`, the others in `sealed`."""

    keys: list  # float32 [length, kv_heads, head_dim] a sequence, exact in the dtype
    values: list
    arenas: list
    table: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray


def cached(native, shape, dtype, lengths, seed=0):
    """Writes sequences, all positions at once in random order, and seals their pages but the last."""
    _, kv_heads, head_dim = shape
    random = np.random.default_rng(seed)
    pages = [-(-length // PAGE) for length in lengths]
    slots = random.permutation(sum(pages) + 3)[: sum(pages)].astype(np.int32)
    plain = np.full((sum(pages) + 3, native.page_nbytes), 0xFF, np.uint8)
    offsets = np.concatenate([[0], np.cumsum(pages)]).astype(np.int64)
    keys, values = (
        [rounded(random_values(n, kv_heads, head_dim, seed=seed + 9 * i + which), dtype) for i, n in enumerate(lengths)]
        for which in (1, 2)
    )
    order = random.permutation(sum(lengths))
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    rows = np.concatenate([offsets[i] + np.arange(n) // PAGE for i, n in enumerate(lengths)])
    native.write(
        np.concatenate(keys).reshape(-1, kv_heads * head_dim)[order],
        np.concatenate(values).reshape(-1, kv_heads * head_dim)[order],
        plain,
        slots[rows][order],
        positions[order],
    )
    full = np.concatenate([np.arange(-(-n // PAGE)) < (n - 1) // PAGE for n in lengths])
    sealed = np.full((len(slots) + 2, native.sealed_nbytes), 0xFF, np.uint8)
    out_slots = random.permutation(len(sealed))[: full.sum()].astype(np.int32)
    native.seal(plain, slots[full], sealed, out_slots)
    plain[slots[full]] = 0xFF
    table = np.stack([np.zeros_like(slots), slots], axis=1)
    table[full] = np.stack([np.ones_like(out_slots), out_slots], axis=1)
    return Cached(keys, values, [plain, sealed], table, offsets, np.array(lengths, np.int64))


def decode(native, batch, q, *, only=None, **options):
    """out [sequences, heads * head_dim]; `only`: of these sequences."""
    out = np.empty_like(q)
    offsets, lengths, table = batch.offsets, batch.lengths, batch.table
    if only is not None:
        pieces = [table[offsets[i] : offsets[i + 1]] for i in only]
        offsets = np.cumsum([0, *map(len, pieces)]).astype(np.int64)
        table, lengths = np.concatenate(pieces), lengths[list(only)]
    native.decode(q, batch.arenas, table, offsets, lengths, out, **options)
    return out


def cached_values(batch, shape, dtype, i):
    """Bytes of sequence i's values, a view [kv_heads, PAGE, bytes] of each page."""
    _, kv_heads, head_dim = shape
    row = head_dim * (4 if dtype == "float32" else 2)
    places = batch.table[batch.offsets[i] : batch.offsets[i + 1]]
    pages = [batch.arenas[arena][slot][: 2 * kv_heads * PAGE * row] for arena, slot in places]
    return [page.reshape(2, kv_heads, PAGE, row)[1] for page in pages]


def expected_rows(q, keys, values, share=1.0):
    """float64 [heads, head_dim] of one token, and the positions each head keeps."""
    heads, head_dim = q.shape
    length, kv_heads, _ = keys.shape
    out, kept = np.zeros((heads, head_dim)), []
    for h in range(heads):
        scores = keys[:, h * kv_heads // heads].astype(np.float64) @ q[h]
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        heaviest = set(np.argsort(-weights, kind="stable")[: math.ceil(share * length)].tolist()) | {length - 1}
        kept.append(heaviest)
        chosen = sorted(heaviest)
        out[h] = weights[chosen] @ values[chosen, h * kv_heads // heads]
    return out, kept


@pytest.mark.parametrize(("dtype", "level"), CASES)
@settings(max_examples=15, deadline=None)
@given(shape=SHAPES, lengths=LENGTHS)
def test_plain_pages_give_the_bits_of_the_latency_engine(dtype, level, shape, lengths):
    heads, _, head_dim = shape
    native = native_attention(shape, dtype, level)
    batch = cached(native, shape, dtype, lengths)
    q = rounded(queries(len(lengths), heads, head_dim, seed=3), dtype)
    out = decode(native, batch, q.reshape(len(q), -1))
    for i in range(len(lengths)):
        reference = latency_attention(shape, dtype, level, batch.keys[i], batch.values[i])
        wide = np.empty((1, heads, head_dim), np.float32)
        reference.attend_each(q[i : i + 1], wide)
        assert np.array_equal(out[i], wide.reshape(-1))


@pytest.mark.parametrize(("dtype", "level"), CASES)
@settings(max_examples=10, deadline=None)
@given(shape=SHAPES, first=st.sampled_from([0, 1, 63, 64, 70]), n=st.sampled_from([1, 5, 64, 130]))
def test_a_prompt_gives_the_bits_of_the_latency_engine(dtype, level, shape, first, n):
    heads, kv_heads, head_dim = shape
    native = native_attention(shape, dtype, level)
    keys, values = (rounded(random_values(first + n, kv_heads, head_dim, seed=seed), dtype) for seed in (1, 2))
    positions = np.arange(first + n, dtype=np.int32)
    arena = np.full((6, native.page_nbytes), 0xFF, np.uint8)
    native.write(keys.reshape(first + n, -1), values.reshape(first + n, -1), arena, 2 + positions // PAGE, positions)
    q = rounded(queries(n, heads, head_dim, seed=3), dtype)
    out = np.empty((n, heads * head_dim), np.float32)
    native.prompt(q.reshape(n, -1), arena, 2, first, out)
    reference = latency_attention(shape, dtype, level, keys, values)
    wide = np.empty(q.shape, np.float32)
    reference.attend_many(q, wide)
    assert np.array_equal(out, wide.reshape(n, -1))


@pytest.mark.parametrize(("dtype", "level"), CASES)
@settings(max_examples=15, deadline=None)
@given(shape=SHAPES, lengths=LENGTHS, share=st.sampled_from([0.01, 0.1, 0.5, 0.99]))
def test_sparse_attention_reads_the_heaviest_values(dtype, level, shape, lengths, share):
    heads, kv_heads, head_dim = shape
    native = native_attention(shape, dtype, level)
    batch = cached(native, shape, dtype, lengths, seed=5)
    q = rounded(queries(len(lengths), heads, head_dim, seed=4), dtype)
    group, rows = heads // kv_heads, [cached_values(batch, shape, dtype, i) for i in range(len(lengths))]
    expected = []
    for i in range(len(lengths)):
        made, kept = expected_rows(q[i], batch.keys[i], batch.values[i], share)
        expected.append(made)
        for h in range(kv_heads):  # what no head that shares it keeps must not be read
            read = set.union(*kept[h * group : (h + 1) * group])
            for position in set(range(lengths[i])) - read:
                rows[i][position // PAGE][h, position % PAGE] = 0xFF  # not a number
    out = decode(native, batch, q.reshape(len(q), -1), share=share)
    assert np.abs(out.reshape(q.shape) - expected).max() <= 1e-5


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("share", [1.0, 0.2])
def test_a_sequence_has_its_bits_whatever_the_batch_and_the_threads(level, share):
    shape, lengths = (6, 2, 16), [70, 1, 200, 64, 129, 3, 65]
    results = []
    for threads in (1, 3):
        native = native_attention(shape, "bfloat16", level, threads=threads)
        batch = cached(native, shape, "bfloat16", lengths)
        q = random_values(len(lengths), 96, seed=3)
        results.append(decode(native, batch, q, share=share))
        for only in ([2], [4, 0]):
            some = decode(native, batch, np.ascontiguousarray(q[only]), only=only, share=share)
            assert np.array_equal(some, results[0][only])
    assert np.array_equal(*results)


def sealed_bytes(keys, values, bits):
    """One page [64, kv_heads, head_dim] packed by numpy: its bytes, and the keys and values they stand for."""
    parts, back = [], (np.empty_like(keys), np.empty_like(values))
    for h in range(keys.shape[1]):
        for which, rows in enumerate((keys, values)):
            pack = group_codec.pack_rows if which else group_codec.pack_columns
            packed, back[which][:, h] = pack(np.ascontiguousarray(rows[:, h]), bits)
            parts.append(packed)
    joined = np.concatenate(parts)
    return np.pad(joined, (0, -len(joined) % 4096)), back


def unpacked(batch, bits):
    """The batch as plain fp32 pages of what its packed ones stand for, after comparing their bytes."""
    keys, values = ([rows.copy() for rows in each] for each in (batch.keys, batch.values))
    for i, length in enumerate(batch.lengths):
        for page in range((length - 1) // PAGE):
            place = slice(page * PAGE, (page + 1) * PAGE)
            arena, slot = batch.table[batch.offsets[i] + page]
            assert arena == 1
            expected, back = sealed_bytes(keys[i][place], values[i][place], bits)
            assert np.array_equal(batch.arenas[1][slot], expected)
            keys[i][place], values[i][place] = back
    return keys, values


@pytest.mark.parametrize(("dtype", "level"), CASES)
@settings(max_examples=12, deadline=None)
@given(shape=SHAPES, lengths=LENGTHS, packed=st.tuples(st.sampled_from([4, 8]), st.sampled_from([1.0, 0.1, 0.6])))
def test_packed_pages_give_the_bits_of_plain_ones_of_their_values(dtype, level, shape, lengths, packed):
    heads, kv_heads, head_dim = shape
    bits, share = packed
    native = native_attention(shape, dtype, level, bits=bits)
    batch = cached(native, shape, dtype, lengths, seed=7)
    keys, values = unpacked(batch, bits)
    plain = native_attention(shape, "float32", level)
    offsets, rows = batch.offsets, [np.concatenate(each).reshape(-1, kv_heads * head_dim) for each in (keys, values)]
    arena = np.full((offsets[-1], plain.page_nbytes), 0xFF, np.uint8)
    slots = np.concatenate([offsets[i] + np.arange(n) // PAGE for i, n in enumerate(lengths)]).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    plain.write(*rows, arena, slots, positions)
    q = rounded(queries(len(lengths), heads, head_dim, seed=3).reshape(len(lengths), -1), dtype)
    table = np.stack([np.zeros(offsets[-1]), np.arange(offsets[-1])], axis=1).astype(np.int32)
    expected = np.empty_like(q)
    plain.decode(q, [arena], table, offsets, batch.lengths, expected, share)
    assert np.array_equal(decode(native, batch, q, share=share), expected)


def test_sizes_of_pages():
    """A group of 64 has a scale and a minimum of 16 bits: half a bit a value."""
    shape, plain = (16, 16, 128), 16 * 2 * 64 * 128 * 2
    sizes = {bits: native_attention(shape, "bfloat16", "auto", bits=bits).sealed_nbytes for bits in (0, 4, 8)}
    assert sizes == {0: plain, 4: plain * 4.5 / 16, 8: plain * 8.5 / 16}
    assert native_attention((3, 1, 20), "float16", "auto", bits=4).sealed_nbytes % 4096 == 0


def test_pages_that_are_not_finite_are_not_packed():
    native = native_attention((1, 1, 20), "float32", "auto", bits=4)
    for index in (0, 64 * 20 - 1, 64 * 20, 2 * 64 * 20 - 1):
        arena = np.zeros((1, native.page_nbytes), np.uint8)
        arena.view(np.float32)[0, index] = np.nan
        slots, out = np.zeros(1, np.int32), np.zeros((1, native.sealed_nbytes), np.uint8)
        with pytest.raises(ValueError, match="not finite"):
            native.seal(arena, slots, out, slots)


def test_equal_weights_keep_the_earlier_positions_and_the_last():
    native = native_attention((1, 1, 8), "float32", "auto")
    batch = cached(native, (1, 1, 8), "float32", [100])
    out = decode(native, batch, np.zeros((1, 8), np.float32), share=0.05)
    chosen = [0, 1, 2, 3, 4, 99]
    assert np.allclose(out[0], batch.values[0][chosen, 0].sum(0) / 100, atol=1e-6)


def test_what_does_not_fit_is_refused():
    native = native_attention((4, 2, 8), "float16", "auto")
    arena = np.zeros((3, native.page_nbytes), np.uint8)
    rows, slots = np.zeros((2, 16), np.float32), np.array([0, 1], np.int32)
    q = np.zeros((1, 32), np.float32)
    table, offsets = np.array([[0, 0], [0, 1]], np.int32), np.array([0, 2], np.int64)
    lengths = np.array([65], np.int64)
    with pytest.raises(TypeError):
        native.write(rows.astype(np.float16), rows, arena, slots, slots)
    for method, arguments, said in (
        (native.write, (rows[:1], rows, arena, slots, slots), "keys must be"),
        (native.write, (rows, rows, arena, slots + 2, slots), "slot 3"),
        (native.seal, (arena, slots - 1, arena.copy(), slots), "slot -1"),
        (native.write, (rows, rows, arena[:, :-1].copy(), slots, slots), "plain pages must be"),
        (native.write, (rows, rows, arena, slots, slots - 1), "must not be negative"),
        (native.prompt, (q, arena, 2, 64, q.copy()), "beyond the arena"),
        (native.prompt, (q, arena, 2, 0, np.zeros((2, 32), np.float32)), "out must be"),
    ):
        with pytest.raises(ValueError, match=said):
            method(*arguments)

    def refused(match, **changes):
        whole = {"table": table, "offsets": offsets, "lengths": lengths, "arenas": [arena]}
        with pytest.raises(ValueError, match=match):
            native.decode(q, out=q.copy(), **(whole | changes))

    refused("no arena 1", table=table + 1)
    refused("slot 9", table=np.array([[0, 0], [0, 9]], np.int32))
    refused("offsets", offsets=np.array([0, 3], np.int64))
    refused("offsets", offsets=np.array([1, 0], np.int64))
    refused("one value a query", offsets=offsets[:1])
    refused("do not hold 129 positions", lengths=lengths + 64)
    refused("do not hold 0 positions", lengths=lengths - 65)
    packed = native_attention((4, 2, 8), "float16", "auto", bits=4)
    arenas = [arena, np.zeros((3, packed.sealed_nbytes), np.uint8)]
    for wrong in ([[0, 0], [0, 1]], [[1, 0], [1, 1]]):  # none sealed, and the last one too
        with pytest.raises(ValueError, match="sequence 0: all of its pages but the last must be sealed"):
            packed.decode(q, arenas, np.array(wrong, np.int32), offsets, lengths, q.copy())
    refused("share", share=0.0)
    refused("share", share=float("nan"))
    for heads, kv_heads, bits, said in (
        (3, 2, 0, "multiple of kv_heads"),
        (3, 0, 0, "at least one head"),
        (3, 3, 3, "4 or 8"),
    ):
        with pytest.raises(ValueError, match=said):
            native_attention((heads, kv_heads, 8), "float16", "auto", bits=bits)
