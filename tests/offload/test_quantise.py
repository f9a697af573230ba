"""Weights rounded with error feedback: on the packed grid, better than nearest rounding, resumable."""

import json
from pathlib import Path

import numpy as np
import pytest

from flashllm import _core
from flashllm.errors import UsageError
from flashllm.offload.quantise import folder
from flashllm.offload.quantise.feedback import round_to_grid, round_to_nearest, round_with_feedback
from flashllm.offload.runtime.tiers.source import matrix_name, open_weights

RANDOM = np.random.default_rng(0)


def test_feedback_keeps_products_better_than_rounding() -> None:
    inputs = (RANDOM.standard_normal((400, 8)) @ RANDOM.standard_normal((8, 96))).astype(np.float32)
    inputs += 0.1 * RANDOM.standard_normal(inputs.shape).astype(np.float32)
    weights = RANDOM.standard_normal((64, 96), np.float32)
    nearest = np.stack([round_to_grid(column, 4) for column in weights.T], axis=1)
    fed_back = round_with_feedback(weights, inputs.T @ inputs, bits=4)
    wanted = inputs @ weights.T
    lost = [float(np.square(inputs @ rounded.T - wanted).sum()) for rounded in (nearest, fed_back)]
    assert lost[1] < 0.3 * lost[0]
    again = np.stack([round_to_grid(column, 4) for column in fed_back.T], axis=1)
    np.testing.assert_allclose(again, fed_back, atol=1e-3)  # packing loses nothing more


def packed_and_back(weights: np.ndarray, bits: int, along: str, scales: str = "range") -> np.ndarray:
    pool, out = _core.ThreadPool(1), np.empty_like(weights)
    packed = np.empty(_core.packed_weight_nbytes(*weights.shape, bits, along), np.uint8)
    _core.pack_weights(np.ascontiguousarray(weights), "float32", bits, packed, pool, along=along, scales=scales)
    _core.unpack_weights(packed, *weights.shape, bits, out, pool, along=along)
    return out


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("along", ["inputs", "outputs"])
@pytest.mark.parametrize("shape", [(128, 40), (30, 200), (70, 64)])
def test_packing_what_was_rounded_loses_nothing_more(bits: int, along: str, shape: tuple[int, int]) -> None:
    weights = RANDOM.standard_normal(shape, np.float32)
    weights[3] = 0.5  # groups of equal weights
    x = RANDOM.standard_normal((300, shape[1]), np.float32)
    nearest = round_to_nearest(weights, bits=bits, along=along)
    fed_back = round_with_feedback(weights, x.T @ x, bits=bits, along=along)
    for rounded in (nearest, fed_back):
        for scales in ("range", "squares"):
            np.testing.assert_allclose(packed_and_back(rounded, bits, along, scales), rounded, atol=1e-6)
    # Least squares, either way: not further from the weights than min-max.
    packed = [packed_and_back(weights, bits, along, scales) for scales in ("range", "squares")]
    lost = [np.square(each - weights).sum() for each in (*packed, nearest)]
    assert max(lost[1:]) <= lost[0] * 1.001


def test_feedback_along_inputs_keeps_products_better_than_rounding() -> None:
    inputs = (RANDOM.standard_normal((400, 8)) @ RANDOM.standard_normal((8, 96))).astype(np.float32)
    inputs += 0.1 * RANDOM.standard_normal(inputs.shape).astype(np.float32)
    weights = RANDOM.standard_normal((64, 96), np.float32)
    wanted = inputs @ weights.T
    nearest = round_to_nearest(weights, bits=4, along="inputs")
    fed_back = round_with_feedback(weights, inputs.T @ inputs, bits=4, along="inputs")
    lost = [float(np.square(inputs @ rounded.T - wanted).sum()) for rounded in (nearest, fed_back)]
    assert lost[1] < 0.3 * lost[0]


def test_inputs_never_seen_and_inputs_not_finite() -> None:
    weights = RANDOM.standard_normal((64, 10), np.float32)
    sums = np.zeros((10, 10), np.float32)
    nearest = np.stack([round_to_grid(column, 4) for column in weights.T], axis=1)
    np.testing.assert_array_equal(round_with_feedback(weights, sums, bits=4), nearest)
    with pytest.raises(ValueError, match="not finite"):
        round_with_feedback(weights, np.full((10, 10), np.nan, np.float32), bits=4)


class Interrupt(Exception):
    """Raised midway."""


def test_folder_resumes_and_keeps_what_is_not_a_matrix(tmp_path: Path, tiny) -> None:
    tiny_folder = tiny("float32").source
    ids = [list(range(5, 25)), list(range(30, 50))]

    def stop(done: int, layers: int) -> None:
        raise Interrupt

    with pytest.raises(Interrupt):
        folder.quantise(tiny_folder, tmp_path / "one", ids, bits=4, threads=1, report=stop)
    assert not (tmp_path / "one").exists()
    with pytest.raises(UsageError, match="half of another run"):
        folder.quantise(tiny_folder, tmp_path / "one", ids, bits=8, threads=1)
    folder.quantise(tiny_folder, tmp_path / "one", ids, bits=4, threads=1)
    folder.quantise(tiny_folder, tmp_path / "two", ids, bits=4, threads=1)
    with pytest.raises(UsageError, match="exists"):
        folder.quantise(tiny_folder, tmp_path / "two", ids, bits=4, threads=1)
    assert json.loads((tmp_path / "one" / folder.RECORD).read_text())["bits"] == 4
    with (
        open_weights(tiny_folder) as source,
        open_weights(tmp_path / "one") as one,
        open_weights(tmp_path / "two") as two,
    ):
        matrices = {matrix_name(layer, name) for layer in range(source.num_layers) for name in source.matrices}
        for name, shape in source.shapes.items():
            before, first, second = (np.empty(shape, source.dtype.storage) for _ in range(3))
            for weights, array in ((source, before), (one, first), (two, second)):
                weights.read({name: array})
            np.testing.assert_array_equal(first, second)
            assert np.array_equal(before, first) == (name not in matrices), name
