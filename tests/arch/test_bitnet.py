"""BitNet b1.58 in the forms that its checkpoints have, against transformers' own layers (integrations/bitnet.py).

Inputs are rounded to 8 bits before every product, and where a sum in another order moves a value over a rounding's edge
the token goes another way by a 127th of its largest. So of many short sequences most agree as sums of fp32 do, and the
others by a rounding's step; without the rounding none would.
"""

import json
import warnings
from functools import cache

import gguf_files
import numpy as np
import pytest
import torch
from arch_models import VARIANTS, Variant, make_checkpoint
from arch_reference import ReferenceDecoder
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from tiny_models import change_config
from transformers import AutoConfig, BitNetForCausalLM, BitNetQuantConfig

from flashllm.arch.registry import claims
from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.errors import FormatError, UnsupportedModelError
from flashllm.format.install import change_manifest
from flashllm.format.model_dir import ModelDir
from flashllm.plan.latency import dense_token

with warnings.catch_warnings():  # of torch's own, about its own: it is made ready to compile
    warnings.simplefilter("ignore", DeprecationWarning)
    from transformers.integrations.bitnet import pack_weights, replace_with_bitnet_linear, unpack_weights

FORMS = {
    "master": {"linear_class": "autobitlinear", "quantization_mode": "online"},
    "scaled": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "divided": {"linear_class": "bitlinear"},
}
SEQUENCES, LENGTH = 16, 10  # longer than the few-token limit (8), so that a prompt's pass computes them
CLOSE = 2e-4  # of fp32 logits of the order of 1 to 10
STEP = 0.5  # the same, after a rounding that went the other way


def quantised(path, form, dtype="float32", **config):
    """A checkpoint of the form in the folder `path`, from random weights; the folder."""
    make_checkpoint(path, Variant("bitnet", config), dtype=dtype)
    change_config(path, quantization_config={"quant_method": "bitnet", **FORMS[form]})
    if form == "master":
        return path
    tensors = {}
    for name, weight in load_file(path / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        mean = weight.abs().mean().half().float()  # as files have it
        tensors[name] = pack_weights((weight / mean).round().clamp(-1, 1))
        tensors[f"{name}_scale"] = (mean if form == "scaled" else 1 / mean).reshape(1)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def transformers_model(path, dtype=None):
    """transformers' model of the folder, its linear layers replaced as from_pretrained replaces them; in `dtype`, or in
    that of its embedding."""
    config = AutoConfig.from_pretrained(path)
    said = BitNetQuantConfig(**json.loads((path / "config.json").read_text())["quantization_config"])
    tensors = load_file(path / "model.safetensors")
    whole = tensors["model.embed_tokens.weight"].dtype if dtype is None else dtype
    model = BitNetForCausalLM(config).to(whole).eval()
    replace_with_bitnet_linear(model, ["lm_head"], said)
    offline = said.linear_class == "autobitlinear" and said.quantization_mode == "offline"
    for name, tensor in tensors.items():
        packed = tensor.dtype == torch.uint8
        tensors[name] = (
            tensor if packed and not offline else (unpack_weights if packed else torch.Tensor.to)(tensor, whole)
        )
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    model.load_state_dict(tensors, assign=True)
    return model


def prompts():
    generator = torch.Generator().manual_seed(7)
    return torch.randint(4, 300, (SEQUENCES, LENGTH), generator=generator)


@pytest.fixture(scope="module", autouse=True)
def no_compiler():
    """What transformers marks for compilation runs as it is written."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module", params=FORMS)
def made(request, tmp_path_factory):
    """(checkpoint, model directory, transformers' logits of the prompts) of a form."""
    root = tmp_path_factory.mktemp(request.param)
    source = quantised(root / "hf", request.param)
    convert(source, root / "model", predictors=True, keep=True)
    with torch.no_grad():
        return source, root / "model", transformers_model(source)(prompts()).logits.numpy()


def agree(found, expected):
    """That most sequences agree closely, and all by a rounding's step."""
    errors = np.abs(found - expected).max((1, 2))
    assert (errors < CLOSE).sum() >= 0.6 * len(errors), np.sort(errors)
    assert errors.max() < STEP, np.sort(errors)


def logits_of(directory, **choices):
    """[sequences, tokens, vocab]: a prompt and its last two tokens one by one."""
    with Model.open(directory, RunConfig(threads=1, io_threads=4, **choices)) as model:
        found = []
        for ids in prompts().tolist():
            sequence = model.new_sequence()
            many = model.step([(sequence, ids[:-1])], all_logits=True)
            last = model.step([(sequence, ids[-1:])], all_logits=True)
            found.append(np.concatenate([many, last]))
            sequence.close()
        return np.stack(found)


@pytest.mark.parametrize("choices", [{"mode": "dense"}, {"mode": "oracle"}, {"mode": "oracle", "prompts": "sparse"}])
def test_logits_are_those_of_transformers(made, choices):
    _, directory, expected = made
    assert expected.std() > 0.5
    agree(logits_of(directory, **choices), expected)


def test_they_are_not_without_the_rounding(made, tmp_path):
    """The same three values a weight, inputs as they are: no sequence agrees."""
    _, directory, expected = made
    source, whole = tmp_path / "hf", load_whole(directory)
    make_checkpoint(source, VARIANTS["bitnet"])
    save_file(whole, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "model", predictors=True)
    errors = np.abs(logits_of(tmp_path / "model", mode="dense") - expected).max((1, 2))
    assert errors.min() > 5 * CLOSE


def load_whole(directory):
    """The tensors of the checkpoint a directory was made from, matrices as they are multiplied by."""
    reference = ReferenceDecoder(directory)
    claimed = claims(reference.model.config)
    tensors = {claim.source: reference.tensors[name] for name, claim in claimed.items() if name in reference.tensors}
    for layer, matrices in enumerate(reference.ffn):
        for part, matrix in matrices.items():
            tensors[f"model.layers.{layer}.mlp.{part}_proj.weight"] = matrix.T if part == "down" else matrix
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def test_a_resident_gate_names_the_active_neurons_exactly(tmp_path):
    source = quantised(tmp_path / "hf", "scaled")
    convert(source, tmp_path / "model", predictors=True, gate="resident", keep=True)
    with torch.no_grad():
        expected = transformers_model(source)(prompts()).logits.numpy()
    agree(logits_of(tmp_path / "model", mode="sparse", prompts="sparse"), expected)
    agree(logits_of(tmp_path / "model", mode="sparse"), expected)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_as_close_as_transformers(tmp_path, form):
    """Of fp32's, inputs rounded: both compute in bf16, in another order."""
    source = quantised(tmp_path / "hf", form, "bfloat16")
    manifest = convert(source, tmp_path / "model", predictors=True, keep=True)
    assert (manifest.dtype, manifest.rows.encoding) == ("bfloat16", "ternary")
    with torch.no_grad():
        theirs = transformers_model(source)(prompts()).logits.float().numpy()
        exact = transformers_model(source, torch.float32)(prompts()).logits.numpy()
    own = np.abs(theirs - exact).mean()
    for choices in ({"mode": "dense"}, {"mode": "oracle", "prompts": "sparse"}):
        assert np.abs(logits_of(tmp_path / "model", **choices) - exact).mean() < 1.25 * own


@pytest.fixture(scope="module")
def of_files(tmp_path_factory):
    """By activation: the model directory of a checkpoint whose widths suit GGUF's blocks, a folder of the same weights
    as they are multiplied by, and transformers' logits."""

    @cache
    def get(activation):
        root = tmp_path_factory.mktemp("wide")
        wide = {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": True, "hidden_act": activation}
        source = quantised(root / "hf", "scaled", **wide)
        convert(source, root / "model", keep=True, predictors=True)
        whole = make_checkpoint(root / "whole", Variant("bitnet", wide))
        save_file(load_whole(root / "model"), whole / "model.safetensors", metadata={"format": "pt"})
        with torch.no_grad():
            return root / "model", whole, transformers_model(source)(prompts()).logits.numpy()

    return get


@pytest.mark.parametrize(
    ("kind", "architecture", "activation"),
    [("F16", "bitnet-b1.58", "relu2"), ("TQ2_0", "bitnet-b1.58", "relu2"), ("TQ1_0", "bitnet-25", "relu2"),
     ("TQ2_0", "bitnet", "silu")],
)  # fmt: skip
def test_a_gguf_file_is_the_model_of_its_folder(of_files, tmp_path, monkeypatch, *, kind, architecture, activation):
    """Its weights to the bit, its block with the rounding of inputs, and transformers' logits."""
    monkeypatch.delitem(gguf_files.HALVES, kind, raising=False)  # the gguf package codes these without loss
    model, whole, logits = of_files(activation)
    lines, matrices = [], lambda name: "F32" if "token_embd" in name else kind
    path = write_gguf(whole, tmp_path / "model.gguf", matrices, architecture=architecture)
    convert(path, tmp_path / "found", dtype="float32", keep=True, predictors=True, say=lines.append)
    found, expected = ModelDir.open(tmp_path / "found"), ModelDir.open(model)
    assert found.block == expected.block
    assert found.block.rounded_inputs
    assert found.manifest.rows.encoding == ("float32" if kind == "F16" else "ternary")
    assert any("SiLU is assumed" in line for line in lines) == (activation == "silu")
    weights = load_whole(model)
    for name, tensor in load_whole(tmp_path / "found").items():
        assert torch.equal(tensor, weights[name]), name
    change_manifest(tmp_path / "found", activations=None)  # which would round before the model does
    agree(logits_of(tmp_path / "found", mode="dense"), logits)


def test_matrices_have_three_values_in_two_bits(made):
    _, directory, _ = made
    manifest = ModelDir.open(directory).manifest
    assert (manifest.rows.encoding, manifest.rows.down, manifest.activations) == ("ternary", "ternary", "int16")
    assert set(manifest.other_encodings.values()) == {"float32"}  # the embedding and the head
    for name, tensor in load_whole(directory).items():
        if name.endswith("_proj.weight"):
            values = tensor.abs().unique()
            assert len(values) == 2, name
            assert values[0] == 0


def test_dense_streaming_reads_rows_twice(made):
    _, directory, _ = made
    model = ModelDir.open(directory)

    class Plan:
        cache_rows = (0,) * model.architecture.num_layers

    token = dense_token(model, Plan, costs=None)
    assert token.bytes_read == 2 * token.ffn_nbytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_scale"), "has no weight_scale of one number"),
        (lambda tensors, name: tensors[f"{name}_scale"].zero_(), "has a weight_scale of 0"),
        (lambda tensors, name: tensors[name].fill_(0xFF), "holds a value that is not -1, 0 or 1"),
        (lambda tensors, name: tensors.update({name: tensors[name].to(torch.int32)}), "I32.*is no matrix"),
    ],
)
def test_damaged_checkpoints_are_refused(tmp_path, change, message):
    path = quantised(tmp_path / "hf", "scaled")
    tensors = load_file(path / "model.safetensors")
    change(tensors, "model.layers.1.mlp.down_proj.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=rf"layers.1.mlp.down_proj.weight: .*{message}"):
        convert(path, tmp_path / "model")


def test_other_models_in_such_codes_are_refused(tmp_path):
    path = make_checkpoint(tmp_path / "hf", VARIANTS["llama relu"])
    change_config(path, quantization_config={"quant_method": "bitnet"})
    with pytest.raises(UnsupportedModelError, match=r"in codes \(bitnet\), which are not read"):
        convert(path, tmp_path / "model")
