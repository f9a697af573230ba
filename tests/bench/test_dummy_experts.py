"""The peer's mixture of experts: a file of the right tensors, whose tokens stay with their experts."""

import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
for folder in ("bench/peer", "tools"):
    sys.path.insert(0, str(ROOT / folder))
from dummy_experts import SHAPES, embedding_walk, make, nbytes, tensors  # noqa: E402
from make_synthetic_experts import locality  # noqa: E402

from flashllm.config import RunConfig  # noqa: E402
from flashllm.convert.run import convert  # noqa: E402
from flashllm.engine.model import Model  # noqa: E402


@pytest.mark.parametrize("name", SHAPES)
def test_the_file_has_the_shape(tmp_path, name):
    shape = replace(SHAPES[name], layers=2, hidden=64, ffn=32, heads=2, kv_heads=1, head_dim=32, vocab=100)
    make(tmp_path / "m.gguf", shape)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    found = {tensor.name: tuple(reversed(tensor.shape.tolist())) for tensor in reader.tensors}
    assert found == dict(tensors(shape))
    assert sum(int(tensor.n_bytes) for tensor in reader.tensors) == nbytes(shape)
    assert 0 <= (tmp_path / "m.gguf").stat().st_size - nbytes(shape) < 8192


def test_what_llama_cpp_runs_converts_with_its_bits(tmp_path):
    """As a report beside llama.cpp wants it: without a vocabulary, too."""
    shape = replace(
        SHAPES["gpt-oss-20b"], layers=2, hidden=64, ffn=32, heads=2, kv_heads=1, head_dim=32, vocab=100, experts=6
    )
    make(tmp_path / "m.gguf", shape)
    manifest = convert(tmp_path / "m.gguf", tmp_path / "model", keep=True)
    assert (manifest.rows.encoding, manifest.rows.down, manifest.resident_encoding) == ("mxfp4", "codes_fp4", "int8_32")
    assert not any("tokenizer" in name for name in manifest.files)
    with Model.open(tmp_path / "model", RunConfig(threads=1, io_threads=4)) as model:
        assert np.isfinite(model.step([(model.new_sequence(), [1, 2, 3])])).all()


@pytest.mark.parametrize(
    ("name", "stays", "frequent"), [("olmoe", 0.40, 0.37), ("qwen3-30b-a3b", 0.35, 0.30), ("gpt-oss-20b", 0.39, 0.37)]
)
def test_tokens_stay_with_their_experts(name, stays, frequent):
    shape = replace(SHAPES[name], hidden=1024, vocab=300)
    random = np.random.default_rng(0)
    rows = np.concatenate(list(embedding_walk(shape, random)))
    routes = []
    for _ in range(6):
        router = random.standard_normal((shape.experts, shape.hidden), np.float32)
        routes.append(np.sort(np.argsort(-(rows @ router.T), axis=1)[:, : shape.chosen], axis=1))
    again, hottest = locality(routes, shape.experts)
    assert again == pytest.approx(stays, abs=0.05)
    assert hottest == pytest.approx(frequent, abs=0.07)
