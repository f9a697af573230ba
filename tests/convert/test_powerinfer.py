"""PowerInfer's GGUF files become models with trained predictors: their weights, their answers, their neurons alone."""

from contextlib import ExitStack

import gguf
import numpy as np
import pytest
import torch
from arch_models import Variant, make_checkpoint, tokens
from arch_reference import ReferenceDecoder
from gguf_files import KINDS, write_gguf

from flashllm.cli import main
from flashllm.config import RunConfig
from flashllm.convert.checkpoint.gguf.file import open_gguf
from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.convert.kept.predictors import THRESHOLD
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.errors import FormatError, UnsupportedModelError
from flashllm.format.install import change_manifest
from flashllm.format.manifest import Manifest
from flashllm.format.report.verify import verify
from flashllm.offload.runtime.tiers.source import open_weights

RANK = 32
TYPES = {"llama": {"hidden_act": "relu"}, "bamboo": {}, "falcon": {"activation": "relu"}}


def make(root, model_type="llama", kind="Q4_0", threshold=None, **options):
    """(file, its predictors as they are dequantised: (fc1 [rank, d_model], fc2 [d_ff, rank]) of each layer)"""
    folder = make_checkpoint(root / "hf", Variant(model_type, TYPES[model_type]))
    with open_checkpoint(folder) as checkpoint:
        config = checkpoint.config
    d_model, layers = config["hidden_size"], config["num_hidden_layers"]
    d_ff = config.get("intermediate_size") or config["ffn_hidden_size"]
    random, tensors, exact = np.random.default_rng(0), {}, []
    for layer in range(layers):
        fc1 = random.standard_normal((RANK, d_model)).astype(np.float32)
        fc2 = random.standard_normal((d_ff, RANK)).astype(np.float32)
        tensors |= {f"blk.{layer}.fc1.weight": fc1, f"blk.{layer}.fc2.weight": fc2}
        exact.append(tuple(gguf.dequantize(gguf.quantize(each, KINDS[kind]), KINDS[kind]) for each in (fc1, fc2)))
    metadata = {} if threshold is None else {THRESHOLD: threshold}
    path = write_gguf(folder, root / "model.gguf", kind, predictors=tensors, metadata=metadata, **options)
    return path, exact


def named(factors, states, threshold):
    first, second = factors
    return np.maximum(states @ first.T, 0) @ second.T - threshold


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize(("kind", "threshold"), [("Q4_0", None), ("F16", 1.5)])
def test_predictors_answer_as_theirs(tmp_path, model_type, kind, threshold):
    path, exact = make(tmp_path, model_type, kind, threshold)
    lines = []
    manifest = convert(path, tmp_path / "model", dtype="float32", keep=True, predictors=True, say=lines.append)
    assert not any("assumed" in line for line in lines)  # they have ReLU
    assert manifest.architecture.sparse
    assert verify(tmp_path / "model").ok
    states = np.random.default_rng(1).standard_normal((8, manifest.architecture.d_model)).astype(np.float32)
    with Model.open(tmp_path / "model", RunConfig(mode="sparse", threads=2, io_threads=4)) as model:
        for layer, ffn in enumerate(model.parts.ffns):
            for state in states:
                margins = named(exact[layer], state, threshold or 0.0)
                found = np.zeros(len(margins), bool)
                found[ffn.predict(np.ascontiguousarray(state).ctypes.data)] = True
                clear = np.abs(margins) > 1e-4
                np.testing.assert_array_equal(found[clear], margins[clear] > 0)
                assert 0 < found.sum() < len(found)


def test_nothing_in_the_middle_names_all(tmp_path):
    path, _ = make(tmp_path)
    convert(path, tmp_path / "model", dtype="float32", keep=True, predictors=True)
    with Model.open(tmp_path / "model", RunConfig(mode="sparse", threads=1, io_threads=4)) as model:
        nothing = np.zeros(model.manifest.architecture.d_model, np.float32)
        assert len(model.parts.ffns[0].predict(nothing.ctypes.data)) == model.manifest.architecture.d_ff  # 0 >= 0


class MaskedDecoder(ReferenceDecoder):
    """Neurons that the predictors do not name are left out, as PowerInfer's graph does (llm_build_ffn_sparse)."""

    def __init__(self, path, factors):
        super().__init__(path)
        self.factors, self.normed = factors, None

    def _norm(self, name, x):
        if name.endswith(self.block.layers[0].ffn_input_norm or "-"):
            self.normed = x
        return super()._norm(name, x)

    def _neurons(self, layer, x, weights=1.0):
        margins = named(self.factors[layer], self.normed.numpy(), 0.0)
        return super()._neurons(layer, x, torch.from_numpy((margins >= 0).astype(np.float32)))


@pytest.mark.parametrize("model_type", TYPES)
def test_sparse_passes_leave_out_what_they_do_not_name(tmp_path, model_type):
    path, exact = make(tmp_path, model_type)
    manifest = convert(path, tmp_path / "model", dtype="float32", keep=True, predictors=True)
    assert (manifest.rows.encoding, manifest.rows.down_encoding, manifest.down_scales) == ("int4_32", None, ())
    change_manifest(tmp_path / "model", activations=None)  # 8 bits would hide what is left out
    reference = MaskedDecoder(tmp_path / "model", exact)
    ids = tokens(14, seed=3)
    expected = reference.logits(ids).numpy()
    for prompts, width in (("sparse", 14), ("dense", 1)):
        config = RunConfig(mode="sparse", prompts=prompts, threads=2, io_threads=4)
        with Model.open(tmp_path / "model", config) as model:
            sequence = model.new_sequence()
            found = [model.step([(sequence, ids[at : at + width])], all_logits=True) for at in range(0, 14, width)]
        np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-3, rtol=0)
    assert np.abs(expected - ReferenceDecoder(tmp_path / "model").logits(ids).numpy()).max() > 0.1  # it matters


@pytest.mark.parametrize("kind", ["Q4_0", "F16"])
def test_columns_are_the_files_rows(tmp_path, kind):
    path, _ = make(tmp_path, kind=kind)
    convert(path, tmp_path / "model", dtype="float32", keep=True, predictors=True)
    with ExitStack() as stack, open_weights(tmp_path / "model") as weights:
        stored = open_gguf(path, stack).tensors
        for layer in range(2):
            for ours, theirs in (("up", "ffn_up"), ("gate", "ffn_gate"), ("down", "ffn_down_t")):
                tensor = stored[f"blk.{layer}.{theirs}.weight"]
                expected = tensor.rows(0, tensor.shape[0]).astype(np.float32)
                name = f"layers.{layer}.{ours}.weight"
                found = np.empty(weights.shapes[name], np.float32)
                weights.read({name: found})
                np.testing.assert_array_equal(found, expected.T if ours == "down" else expected, err_msg=name)


def test_the_command_makes_a_model_that_needs_no_training(tmp_path, capsys):
    path, _ = make(tmp_path)
    assert main(["convert", str(path), str(tmp_path / "model")]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "model")]) == 0
    assert f"rank {RANK}" in capsys.readouterr().out
    assert Manifest.load(tmp_path / "model").architecture.activation == "relu"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": "blk.1.fc2.weight"}, "no predictor .* of layer 1"),
        ({"threshold": "much"}, "sparse_threshold must be a finite number"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, options, message):
    path, _ = make(tmp_path, **options)
    with pytest.raises(FormatError, match=message):
        convert(path, tmp_path / "model", keep=True)


def test_other_architectures_of_theirs_are_refused(tmp_path):
    path, _ = make(tmp_path)
    raw = path.read_bytes().replace(b"llama", b"qwen2", 1)
    path.write_bytes(raw)
    with pytest.raises(UnsupportedModelError, match="supported: bamboo, falcon, llama"):
        convert(path, tmp_path / "model", keep=True)
