"""gpt-oss's own layout: experts whose gate and up rows alternate, MXFP4 codes, and what is damaged of them."""

import json

import numpy as np
import pytest
import torch
from arch_models import VARIANTS, make_checkpoint, open_model
from planned import logits_of
from safetensors.torch import load_file, save_file
from tiny_models import change_config
from transformers.integrations.mxfp4 import FP4_VALUES
from weights_of_folders import digests, tensors_of

from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.errors import FormatError, UnsupportedModelError
from flashllm.format.manifest import Manifest
from flashllm.format.model_dir import read_plane
from flashllm.format.model_files import FFN, ffn_tensor
from flashllm.format.report.verify import verify
from flashllm.format.rows import widened_rows
from flashllm.format.safetensors import open_safetensors

LUT = torch.tensor(FP4_VALUES)
EXPERTS = "model.layers.0.mlp.experts."


def mxfp4(path, seed=0):
    """Makes the checkpoint's experts MXFP4 codes; their values by name, laid out as transformers has them in memory.

    Widths must be whole groups of 32.
    """
    random = torch.Generator().manual_seed(seed)
    values = {}
    with tensors_of(path) as state:
        for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = state.pop(name).shape
            codes = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=random, dtype=torch.uint8)
            scales = torch.randint(121, 126, (experts, outputs, inputs // 32), generator=random, dtype=torch.uint8)
            state |= {f"{name}_blocks": codes, f"{name}_scales": scales}
            pairs = torch.stack((LUT[(codes & 15).long()], LUT[(codes >> 4).long()]), -1).flatten(-2)
            wide = torch.ldexp(pairs, scales[..., None].int() - 127).reshape(experts, outputs, inputs)
            values[name] = wide.transpose(1, 2).contiguous()
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
    change_config(path, quantization_config=said)
    return values


@pytest.fixture
def whole(tmp_path):
    """A checkpoint whose experts are 64 wide."""
    variant = VARIANTS["gpt_oss"]
    return make_checkpoint(
        tmp_path / "hf", type(variant)("gpt_oss", {**variant.config, "intermediate_size": 64}), dtype="bfloat16"
    )


def test_mxfp4_converts_to_what_its_values_do(whole, tmp_path):
    plain = load_file(whole / "model.safetensors")
    values = mxfp4(whole)
    found = convert(whole, tmp_path / "found")
    change_config(whole, quantization_config=None)
    exact = {name: tensor.bfloat16() for name, tensor in values.items()}
    assert all(torch.equal(exact[name].float(), tensor) for name, tensor in values.items())
    save_file(plain | exact, whole / "model.safetensors", {"format": "pt"})
    expected = convert(whole, tmp_path / "expected")
    assert found.dtype == "bfloat16"
    assert digests(found) == digests(expected)


def test_mxfp4_is_kept(whole, tmp_path):
    """Rows of 17 bytes for 32 weights, scales of down columns in memory; by activations in fp32 every logit is that of
    the widened weights."""
    mxfp4(whole)
    wide = convert(whole, tmp_path / "wide", dtype="float32")
    lines = []
    exact = {"dtype": "float32", "activations": "float32"}
    kept = convert(whole, tmp_path / "kept", **exact, keep=True, say=lines.append)
    assert (kept.rows.encoding, kept.rows.down, set(kept.down_scales)) == ("mxfp4", "codes_fp4", {"power_32"})
    assert kept.rows.row_nbytes == 64 // 32 * (17 + 17 + 16)
    assert kept.planes_nbytes == wide.architecture.num_layers * wide.architecture.d_ff // 32 * 64
    assert "are kept: neurons mxfp4, down codes_fp4; scales of the down columns in memory" in lines[0]
    assert verify(tmp_path / "kept").ok
    for mode in ("dense", "sparse"):
        for simd in ("auto", "scalar"):
            wide, kept = (logits_of(tmp_path / name, mode, simd=simd) for name in ("wide", "kept"))
            np.testing.assert_array_equal(wide, kept, err_msg=mode)


def test_weights_of_an_expert_read_again_are_the_files(whole, tmp_path):
    """What another engine, or a quantiser, reads of kept weights."""
    values = mxfp4(whole)
    convert(whole, tmp_path / "kept", dtype="float32", keep=True)
    down = values["model.layers.1.mlp.experts.down_proj"]  # [experts, size, d_model]
    gate_up = values["model.layers.1.mlp.experts.gate_up_proj"]  # [experts, d_model, 2 * size]
    manifest = Manifest.load(tmp_path / "kept")
    layout = manifest.rows
    with open_safetensors(tmp_path / "kept" / FFN) as file:
        info = file.header.tensors[ffn_tensor(1)]
        rows = np.empty((layout.num_rows, layout.stride), np.uint8)
        file.read_into(info, 0, rows.reshape(-1).data)
    found = widened_rows(layout, rows[: layout.d_ff], read_plane(tmp_path / "kept", manifest, 1))
    np.testing.assert_array_equal(found["down"], down.flatten(0, 1).numpy())
    np.testing.assert_array_equal(found["gate"], gate_up[..., ::2].transpose(1, 2).flatten(0, 1).numpy())
    np.testing.assert_array_equal(found["up"], gate_up[..., 1::2].transpose(1, 2).flatten(0, 1).numpy())


def test_scales_at_the_ends_of_their_range(whole, tmp_path):
    """Groups of zeros may have any scale; other scales that fp32 cannot hold whole are refused."""
    mxfp4(whole)
    with tensors_of(whole) as state:
        state[EXPERTS + "down_proj_blocks"][:, :, 0] = 0x80  # 0 and -0
        state[EXPERTS + "down_proj_scales"][:, :, 0] = 0
    convert(whole, tmp_path / "kept", keep=True)
    for scale in (1, 253):
        with tensors_of(whole) as state:
            state[EXPERTS + "down_proj_scales"][:, :, 1] = scale
        with pytest.raises(FormatError, match=r"experts.*a scale is no number, or as small or large"):
            convert(whole, tmp_path / str(scale), keep=True)


@torch.no_grad()
def test_gates_and_ups_beyond_the_limit_are_clamped(tmp_path):
    """Weights so large that most products are."""
    source = make_checkpoint(tmp_path / "hf", VARIANTS["gpt_oss"])
    with tensors_of(source) as state:
        for name in state:
            if name.endswith("gate_up_proj"):
                state[name] *= 12
    convert(source, tmp_path / "model")
    ids = list(range(4, 60))
    expected = open_model(source)(torch.tensor([ids])).logits[0].numpy()
    with Model.open(tmp_path / "model", RunConfig(mode="sparse", threads=1, io_threads=4)) as model:
        for part in (ids, ids[:5]):
            found = model.step([(model.new_sequence(), part)], all_logits=True)
            np.testing.assert_allclose(found, expected[: len(part)], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gate_up_proj_scales", lambda tensor: tensor[:, :, :1].clone(), "are no experts"),
        ("down_proj_scales", lambda tensor: torch.full_like(tensor, 255), "expert 0 has scales that are no numbers"),
        ("down_proj_blocks", lambda tensor: tensor[..., :8].clone(), "are no experts"),
        ("gate_up_proj_bias", lambda tensor: tensor[:, 1:].clone(), "are no biases of experts"),
    ],
)
def test_damaged_experts_are_said(whole, tmp_path, name, change, message):
    mxfp4(whole)
    with tensors_of(whole) as state:
        state[EXPERTS + name] = change(state[EXPERTS + name])
    with pytest.raises(FormatError, match=message):
        convert(whole, tmp_path / "model")


def test_other_models_in_mxfp4_and_other_limits_are_refused(whole, tmp_path):
    config = json.loads((whole / "config.json").read_text())
    for change, message in (
        ({"swiglu_limit": 5.0}, r"swiglu_limit 5\.0 is not supported; 7\.0 is"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; 'silu' is"),
        ({"quantization_config": {"quant_method": "awq"}}, r"in codes \(awq\)"),
    ):
        (whole / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UnsupportedModelError, match=message):
            convert(whole, tmp_path / "model")
