"""8-bit floating point is read as what its codes and scales mean; what is no such thing is refused."""

import itertools
import re

import numpy as np
import pytest
import torch
from arch_models import VARIANTS, make_checkpoint
from safetensors.torch import load_file, save_file
from tiny_models import change_config, config_of
from weights_of_folders import digests, tensors_of, try_to_open

from flashllm.convert.checkpoint import fp8
from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.convert.run import convert
from flashllm.errors import FormatError, UnsupportedModelError

E4M3 = torch.float8_e4m3fn
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def coded(path, block, *, dtype=torch.float32, variant="deepseek_v3"):
    """(folder of a model whose matrices are so, folder of the same values whole)."""
    whole = make_checkpoint(path / "whole", VARIANTS[variant])
    make_checkpoint(path / "coded", VARIANTS[variant])
    state, codes = load_file(whole / "model.safetensors"), {}
    for name, tensor in list(state.items()):
        if not name.endswith("proj.weight"):
            continue
        rows, columns = block or tensor.shape
        down, across = -(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns)
        scales = torch.rand(down, across).add(0.5).div(100).to(dtype)
        each = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        each = each[: tensor.shape[0], : tensor.shape[1]]
        codes[name] = (tensor / each).to(E4M3)
        codes[f"{name}_scale_inv"] = scales if block else scales.reshape(())
        state[name] = codes[name].float() * each
        if not block:
            codes[name.removesuffix("weight") + "activation_scale"] = torch.tensor(2.0)
    save_file(state, whole / "model.safetensors", {"format": "pt"})
    save_file(state | codes, path / "coded" / "model.safetensors", {"format": "pt"})
    change_config(path / "coded", quantization_config=FP8 | {"weight_block_size": block and list(block)})
    return path / "coded", whole


def test_every_code_means_what_torch_says():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(E4M3).float().numpy()
    numbers = np.isfinite(expected)
    assert (fp8._VALUES[numbers] == expected[numbers]).all()
    assert ((codes.numpy() & 0x7F) == fp8._NO_NUMBER).tolist() == (~numbers).tolist()


@pytest.mark.parametrize(
    ("block", "dtype", "variant"),
    [
        ((16, 32), torch.float32, "deepseek_v3"),  # of widths that are no multiples
        ((128, 128), torch.bfloat16, "deepseek_v3"),
        ((32, 16), torch.bfloat16, "minimax_m2"),
        (None, torch.float32, "qwen3_moe"),
    ],
)
def test_a_model_in_codes_converts_to_the_weights_that_they_mean(tmp_path, block, dtype, variant):
    source, whole = coded(tmp_path, block, dtype=dtype, variant=variant)
    expected = convert(whole, tmp_path / "expected", dtype="float32")
    found = convert(source, tmp_path / "found", dtype="float32")
    assert digests(found) == digests(expected)
    assert "quantization_config" not in config_of(tmp_path / "found")


def in_bfloat16(source):
    """Makes what is in no codes bfloat16, but for scales."""
    with tensors_of(source) as state:
        for name, tensor in state.items():
            if tensor.dtype == torch.float32 and "scale" not in name:
                state[name] = tensor.bfloat16()


def test_the_dtype_is_that_of_what_is_whole(tmp_path):
    source, _ = coded(tmp_path, (16, 16))
    in_bfloat16(source)
    with open_checkpoint(source) as checkpoint:
        assert checkpoint.preferred_dtype == "bfloat16"


def _drop(state, name):
    del state[f"{name}_scale_inv"]


def _short(state, name):
    state[f"{name}_scale_inv"] = state[f"{name}_scale_inv"][:1].contiguous()


def _nan(state, name):
    state[name].view(torch.uint8)[3, 5] = 0xFF


def _infinite(state, name):
    state[f"{name}_scale_inv"][0, 0] = torch.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, r"o_proj.weight: wants a scale for each 16 x 16, \[4, 5\] numbers, and lacks it; download"),
        (_short, r"wants a scale for each 16 x 16, \[4, 5\] numbers, and has F32 \[1, 5\]"),
        (_nan, "o_proj.weight: holds what is no number"),
        (_infinite, "o_proj.weight: holds what is no number"),
    ],
)
def test_codes_and_scales_that_cannot_be(tmp_path, change, message):
    source, _ = coded(tmp_path, (16, 16))
    with tensors_of(source) as state:
        change(state, next(name for name in state if name.endswith("o_proj.weight")))
    with pytest.raises(FormatError, match=message):
        convert(source, tmp_path / "found")


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"fmt": "e5m2"}, UnsupportedModelError, "fp8 in the form 'e5m2' is not read, e4m3 is; give the model"),
        ({"weight_block_size": [128]}, FormatError, "weight_block_size must be two sizes, not '[128]'"),
        ({"weight_block_size": [16, 0]}, FormatError, "weight_block_size must be two sizes, not '[16, 0]'"),
    ],
)
def test_other_kinds_are_refused(tmp_path, said, error, message):
    source, _ = coded(tmp_path, (16, 16))
    change_config(source, quantization_config=FP8 | said)
    with pytest.raises(error, match=re.escape(message)):
        try_to_open(source)


def together(source, *, gates=True):
    """Puts a layer's experts into one tensor for gates and ups, and one for downs, as transformers 5 has them."""
    state = load_file(source / "model.safetensors")
    experts = sorted({name.split(".experts.")[0] for name in state if ".experts." in name})
    stacks = {"down_proj": ("down",)} | ({"gate_up_proj": ("gate", "up")} if gates else {})
    for (stack, parts), owner in itertools.product(stacks.items(), experts):
        for ending, new in ((".weight", ""), (".weight_scale_inv", "_scale_inv")):
            each = []
            for expert in itertools.count():
                names = [f"{owner}.experts.{expert}.{part}_proj{ending}" for part in parts]
                if names[0] not in state:
                    break
                found = [state.pop(name) for name in names]
                raw = [
                    one.view(torch.uint8) if one.dtype == E4M3 else one.reshape(-1, *one.shape[1:] or (1,))
                    for one in found
                ]
                each.append(torch.cat(raw))
            whole = torch.stack(each)
            state[f"{owner}.experts.{stack}{new}"] = whole.view(E4M3) if whole.dtype == torch.uint8 else whole
    state = {name: tensor for name, tensor in state.items() if ".experts." not in name or "activation" not in name}
    save_file(state, source / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("block", "gates", "variant"),
    [((24, 32), True, "deepseek_v3"), ((16, 48), True, "qwen3_moe"), (None, False, "qwen3_moe")],
)
def test_experts_together_are_those_apart(tmp_path, block, gates, variant):
    """Blocks begin anew with each expert; its last may be shorter."""
    source, whole = coded(tmp_path, block, variant=variant)
    together(source, gates=gates)
    expected = convert(whole, tmp_path / "expected", dtype="float32")
    found = convert(source, tmp_path / "found", dtype="float32")
    assert digests(found) == digests(expected)


def test_stacks_of_other_shapes_are_refused(tmp_path):
    source, _ = coded(tmp_path, (16, 16))
    name = "model.layers.1.mlp.experts.x"
    with tensors_of(source) as state:
        state[name] = torch.zeros(2, 2, 4, 4).to(E4M3)
    message = r"\[2, 2, 4, 4\] in 8-bit floating point is no matrix and no stack"
    with pytest.raises(UnsupportedModelError, match=message):
        convert(source, tmp_path / "found")
    with tensors_of(source) as state:
        state |= {name: torch.zeros(2, 4, 4).to(E4M3), f"{name}_scale_inv": torch.ones(1, 1, 1)}
    message = r"wants a scale for each 16 x 16, \[2, 1, 1\] numbers, and has F32 \[1, 1, 1\]"
    with pytest.raises(FormatError, match=message):
        convert(source, tmp_path / "found")


def test_an_embedding_in_another_form_is_refused(tmp_path):
    source, _ = coded(tmp_path, (16, 16), variant="minimax_m2")
    with tensors_of(source) as state:
        state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"].to(torch.float8_e5m2)
    with pytest.raises(UnsupportedModelError, match=r"in codes \(F8_E5M2\), which are not read"):
        convert(source, tmp_path / "found")
