"""The predictors' file: its codes, its order, and what its reader refuses."""

import numpy as np
import pytest
from safetensors.numpy import load_file
from training.stored import StoredPredictor, encode_predictors, stored_values

from flashllm.errors import FormatError
from flashllm.format.predictors import FACTOR_CODES, check_predictors_header
from flashllm.format.rows import RowLayout
from flashllm.format.safetensors import encode_header, read_header

D_MODEL, D_FF = 64, 256
LAYOUT = RowLayout(d_model=D_MODEL, d_ff=D_FF, matrices=("up", "down"), encoding="float16")
METADATA = {"format": "flashllm-predictors", "version": "1", "model_sha256": "s"}


def stored(layer, rank, *, prefetch=False, seed=0):
    rng = np.random.default_rng([seed, layer, prefetch])
    a, b = (
        rng.standard_normal((rank, D_MODEL)),
        rng.standard_normal((D_FF, rank)) * 10.0 ** rng.integers(-3, 3, (D_FF, 1)),
    )
    values = {
        "a": a.astype(np.float32),
        "b": b.astype(np.float32),
        "bias": rng.standard_normal(D_FF).astype(np.float32),
    }
    return StoredPredictor(layer=layer, threshold=0.5, prefetch=prefetch, **values)


def write(path, predictors, bits):
    path.write_bytes(b"".join(bytes(part) for part in encode_predictors(predictors, bits, "s", {})))
    return path


@pytest.mark.parametrize(("bits", "smallest"), [(4, -6), (8, -2), (16, -6)])
def test_coding_twice_gives_the_same_weights(bits, smallest):
    """What was calibrated is what is stored, where fp16 has all digits of a scale; a row of zeros too."""
    rng = np.random.default_rng(2)
    matrix = (rng.standard_normal((300, 72)) * np.logspace(smallest, 3, 300)[:, None]).astype(np.float32)
    matrix[7] = 0.0
    once = stored_values(matrix, bits)
    assert np.array_equal(stored_values(once, bits), once)
    assert not once[7].any()


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_file_holds_what_was_stored_and_any_reader_reads_it(tmp_path, bits):
    predictors = [stored(0, 3), stored(1, 5), stored(1, 7, prefetch=True)]  # odd ranks: alignment is not for free
    path = write(tmp_path / "p", predictors, bits)
    assert path.read_bytes() == write(tmp_path / "q", predictors, bits).read_bytes()
    assert check_predictors_header(read_header(path), [LAYOUT] * 2, "s") == [3, 5]
    tensors = load_file(path)
    for p in predictors:
        name = f"layers.{p.layer}.{'early_' if p.prefetch else ''}"
        for factor in "ab":
            values = tensors[name + factor]
            if bits < 16:
                values = FACTOR_CODES[bits].decode(values.view(np.uint8), getattr(p, factor).shape[1])
            assert np.array_equal(values.astype(np.float32), stored_values(getattr(p, factor), bits))
        assert np.array_equal(tensors[name + "bias"], p.bias)
        assert tensors[name + "threshold"] == [p.threshold]


def header(path, tensors):
    data = sum({"F32": 4, "F16": 2, "I8": 1}[dtype] * int(np.prod(shape)) for _, dtype, shape in tensors)
    path.write_bytes(encode_header(tensors, METADATA) + bytes(data))
    return read_header(path)


def entries(kind="", layer=0, dtype="I8", rank=4):
    name = f"layers.{layer}.{kind}"
    rest = [(f"{name}bias", "F32", (D_FF,)), (f"{name}threshold", "F32", (1,))]
    columns = [FACTOR_CODES[8].vector_nbytes(n) if dtype == "I8" else n for n in (D_MODEL, rank)]
    return [*rest, (f"{name}a", dtype, (rank, columns[0])), (f"{name}b", dtype, (D_FF, columns[1]))]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([t for t in entries() if t[0] != "layers.0.b"], "b is missing"),
        ([("layers.0.a_scale", "F16", (4,)), *entries()], "as an older flashllm did; convert the model again"),
        ([t if t[0] != "layers.0.b" else (t[0], "F16", t[2]) for t in entries()], "b is F16"),
        ([*entries(), *entries(kind="early_")], "belong to no predictor"),  # of layer 0: nothing comes before it
        ([*entries(), *entries(kind="early_", layer=1)], "layers.1.a must be"),
        (
            [*entries(), *entries(layer=1), *[t for t in entries(kind="early_", layer=1) if not t[0].endswith("bias")]],
            "early_bias is missing",
        ),
        ([*entries(), *entries(layer=1), ("layers.1.early_b", "I8", (D_FF, 34))], "belong to no predictor"),
        ([("layers.0.a", "I8", (3, 68)), ("layers.0.odd", "I8", (1,))], "missing"),
        ([("layers.0.odd", "I8", (1,)), *entries(), *entries(layer=1)], "no multiple of its element's size"),
    ],
)
def test_headers_that_are_not_predictors_are_refused(tmp_path, tensors, message):
    layers = 1 if "layers.1.a" not in [name for name, _, _ in tensors] and "layers.1.a must" not in message else 2
    with pytest.raises(FormatError, match=message):
        check_predictors_header(header(tmp_path / "p", tensors), [LAYOUT] * layers, "s")


def test_prefetch_predictors_may_be_of_another_rank_and_width(tmp_path):
    tensors = [*entries(), *entries(layer=1, dtype="F16", rank=2), *entries(kind="early_", layer=1, rank=9)]
    tensors.sort(key=lambda t: {"F32": 0, "F16": 1, "I8": 2}[t[1]])
    assert check_predictors_header(header(tmp_path / "p", tensors), [LAYOUT] * 2, "s") == [4, 2]
