"""A batch's way through a layer over lent weights: its bits, and what is refused."""

import dataclasses

import numpy as np
import pytest
from native_arrays import DTYPES, LEVELS, narrow, random_values

from flashllm import _core
from flashllm.arch.mixers import Attention, DeltaRule, Rotary
from flashllm.arch.spec import BlockSpec, LayerSpec

D, NEURONS, ROWS = 32, 48, 11
ROTARY = Rotary(inverse_frequency=(1.0, 0.1))
MIXER = Attention(heads=2, kv_heads=1, head_dim=16, query_scale=0.25, rotary=ROTARY)
BLOCK = BlockSpec(
    d_model=D, embed_dim=D, vocab_size=40, context=64, norm="rms",
    norm_epsilon=1e-6, final_norm=True, activation="silu", gated=True, tied_head=False,
    layers=(LayerSpec(mixer=MIXER, neurons=NEURONS),),
)  # fmt: skip
SHAPES = {
    "query": (32, D), "key": (16, D), "value": (16, D), "out": (D, 32), "up": (NEURONS, D), "gate": (NEURONS, D),
    "down": (D, NEURONS),
}  # fmt: skip


def tensors(dtype):
    made = {
        f"{name}.weight": narrow(random_values(*shape, seed=i) / 6, dtype)
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    return made | {f"{name}.weight": np.ones(D, np.float32) for name in ("attention_norm", "ffn_norm")}


def states_after(dtype, level, *, rows_together=ROWS, threads=2, decoding=False):
    model = _core.BatchModel(
        block=BLOCK, dtype=dtype, pool=_core.ThreadPool(threads), rows_together=rows_together, simd=level
    )
    layer = model.lend_layer(0, tensors(dtype), {}, False)
    states, seen = narrow(random_values(ROWS, D, seed=9), dtype), []

    def attend(first, queries, keys, values, out):
        seen.append((first, len(queries)))
        out[:, :16] = values
        out[:, 16:] = queries[:, 16:]

    model.run(layer, states, np.arange(ROWS, dtype=np.int64), attend, decoding)
    assert seen == [(first, min(rows_together, ROWS - first)) for first in range(0, ROWS, rows_together)]
    return states


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("decoding", [False, True])
def test_a_row_does_not_depend_on_the_rows_with_it(dtype, level, decoding):
    whole = states_after(dtype, level, decoding=decoding)
    assert not np.array_equal(whole, narrow(random_values(ROWS, D, seed=9), dtype))
    for rows_together, threads in ((1, 1), (4, 3)):
        parts = states_after(dtype, level, rows_together=rows_together, threads=threads, decoding=decoding)
        assert np.array_equal(parts, whole)


def test_what_does_not_fit_is_refused():
    model = _core.BatchModel(block=BLOCK, dtype="float32", pool=_core.ThreadPool(1), rows_together=4)
    lent = tensors("float32")
    layer = model.lend_layer(0, lent, {}, False)
    attend = lambda first, queries, keys, values, out: None  # noqa: E731
    states, positions = np.zeros((3, D), np.float32), np.arange(3, dtype=np.int64)
    small = lent | {"up.weight": np.zeros((8, D), np.float32)}
    for call, arguments, said in (
        (model.lend_layer, (1, lent, {}, False), "beyond those there are"),
        (model.lend_layer, (0, small, {}, False), r"up\.weight does not fit"),
        (model.run, (layer, states.astype(np.float64), positions, attend), "must be of dtype float"),
        (model.run, (layer, states, positions[:2], attend), r"must be \[2, 32\]"),
        (model.run, (layer, states, positions - 1, attend), "negative"),
        (model.head, (model.lend_ends({}), states, np.empty((3, 40), np.float32)), "head is not there"),
    ):
        with pytest.raises(ValueError, match=said):
            call(*arguments)


def keeping(rows_together=4):
    """A model whose layer 1 keeps a state, and that layer's tensors."""
    mixer = DeltaRule(key_heads=1, value_heads=2, key_dim=16, value_dim=16, kernel=4)
    block = dataclasses.replace(BLOCK, layers=(*BLOCK.layers, LayerSpec(mixer=mixer, neurons=NEURONS)))
    model = _core.BatchModel(block=block, dtype="float32", pool=_core.ThreadPool(1), rows_together=rows_together)
    lent = tensors("float32") | {"conv.weight": np.zeros((64, 4), np.float32)}
    lent |= {"value.weight": np.zeros((32, D), np.float32), "out_gate.weight": np.zeros((32, D), np.float32)}
    lent |= {"query.weight": np.zeros((16, D), np.float32)}
    lent |= {f"{name}.weight": np.zeros((2, D), np.float32) for name in ("beta", "decay")}
    return model, lent | {name: np.zeros(2, np.float32) for name in ("decay_log", "decay_bias")}


@pytest.mark.parametrize("missing", ["conv.weight", "decay_log", "decay_bias"])
def test_a_vector_that_a_mixer_reads_must_be_there(missing):
    model, lent = keeping()
    model.lend_layer(1, lent, {}, False)
    del lent[missing]
    with pytest.raises(ValueError, match=f"{missing} is missing"):
        model.lend_layer(1, lent, {}, False)


def test_states_that_do_not_fit_are_refused():
    model, lent = keeping()
    layer, states = model.lend_layer(1, lent, {}, False), np.ones((5, D), np.float32)
    prompts, kept = np.array([0, 1, 2, 0, 1], np.int64), np.ones((3, 2 * 16 * 16 + 3 * 64), np.float32)

    def run(kept, *slots, positions=prompts, decoding=False):
        model.run(layer, states, positions, print, decoding, None, kept, np.array(slots, np.int32))

    for refused, said in (
        (lambda: model.run(layer, states, prompts, print), "keeps another recurrent state"),
        (lambda: run(kept[:, 1:].copy(), 2, 0), "keeps another recurrent state"),
        (lambda: run(kept, 2), "every sequence needs a recurrent state"),
        (lambda: run(kept, 2, 0, 1), "more recurrent states than sequences"),
        (lambda: run(kept, 2, 3), "beyond those there are"),
        (lambda: run(kept, 2, -1), "beyond those there are"),
        (lambda: run(kept, 2, positions=prompts + 1), "begins at position 0"),
        (lambda: run(kept, 2, 0, positions=prompts + 1, decoding=True), "every sequence needs a recurrent state"),
    ):
        with pytest.raises(ValueError, match=said):
            refused()
    run(kept, 2, 0)
    assert not kept[[0, 2], : 2 * 16 * 16].any()  # zeros where a sequence begins; no weight adds to them
    assert np.all(kept[1] == 1)


def test_what_attention_raises_ends_the_layer():
    model = _core.BatchModel(block=BLOCK, dtype="float32", pool=_core.ThreadPool(1), rows_together=4)
    layer = model.lend_layer(0, tensors("float32"), {}, False)

    def attend(*_):
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        model.run(layer, np.ones((3, D), np.float32), np.arange(3, dtype=np.int64), attend)
