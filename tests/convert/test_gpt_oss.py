"""gpt-oss's own layout: experts whose gate and up rows alternate, MXFP4 codes, and what is damaged of them."""

import json

import numpy as np
import pytest
import torch
from arch_models import VARIANTS, make_checkpoint, open_model
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import FP4_VALUES

from flashllm.config import RunConfig
from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.errors import FormatError, UnsupportedModelError
from flashllm.format.model_files import FFN, RESIDENT

LUT = torch.tensor(FP4_VALUES)
EXPERTS = "model.layers.0.mlp.experts."


def mxfp4(path, seed=0):
    """Makes the checkpoint's experts MXFP4 codes; their values by name, laid out as transformers has them in memory.

    Widths must be whole groups of 32.
    """
    random = torch.Generator().manual_seed(seed)
    state = load_file(path / "model.safetensors")
    values = {}
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        codes = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(121, 126, (experts, outputs, inputs // 32), generator=random, dtype=torch.uint8)
        state |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        pairs = torch.stack((LUT[(codes & 15).long()], LUT[(codes >> 4).long()]), -1).flatten(-2)
        wide = torch.ldexp(pairs, scales[..., None].int() - 127).reshape(experts, outputs, inputs)
        values[name] = wide.transpose(1, 2).contiguous()
    save_file(state, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
    (path / "config.json").write_text(json.dumps(config))
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
    config = json.loads((whole / "config.json").read_text())
    del config["quantization_config"]
    (whole / "config.json").write_text(json.dumps(config))
    exact = {name: tensor.bfloat16() for name, tensor in values.items()}
    assert all(torch.equal(exact[name].float(), tensor) for name, tensor in values.items())
    save_file(plain | exact, whole / "model.safetensors", {"format": "pt"})
    expected = convert(whole, tmp_path / "expected")
    assert found.dtype == "bfloat16"
    assert (found.files[FFN], found.files[RESIDENT]) == (expected.files[FFN], expected.files[RESIDENT])


@torch.no_grad()
def test_gates_and_ups_beyond_the_limit_are_clamped(tmp_path):
    """Weights so large that most products are."""
    source = make_checkpoint(tmp_path / "hf", VARIANTS["gpt_oss"])
    state = load_file(source / "model.safetensors")
    for name in state:
        if name.endswith("gate_up_proj"):
            state[name] *= 12
    save_file(state, source / "model.safetensors", {"format": "pt"})
    convert(source, tmp_path / "model")
    ids = list(range(4, 60))
    expected = open_model(source)(torch.tensor([ids])).logits[0].numpy()
    with Model.open(tmp_path / "model", RunConfig(mode="sparse", threads=1, io_threads=4)) as model:
        for part in (ids, ids[:5]):
            (found,) = model.step([(model.new_sequence(), part)], all_logits=True)
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
    state = load_file(whole / "model.safetensors")
    state[EXPERTS + name] = change(state[EXPERTS + name])
    save_file(state, whole / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match=message):
        convert(whole, tmp_path / "model")


def test_other_models_in_mxfp4_and_other_limits_are_refused(whole, tmp_path):
    config = json.loads((whole / "config.json").read_text())
    for change, message in (
        ({"swiglu_limit": 5.0}, r"swiglu_limit must be 7\.0"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"quantization_config": {"quant_method": "awq"}}, r"in codes \(awq\)"),
    ):
        (whole / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UnsupportedModelError, match=message), open_checkpoint(whole):
            convert(whole, tmp_path / "model")
