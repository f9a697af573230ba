"""What mixers with a state compute, each part of it otherwise in turn: the comparison with transformers sees it.

The delta rule's (Qwen3-Next, Qwen3.5) and Mamba-2's (Nemotron-H, Granite 4, Falcon-H1, Bamba): signs, scales, norms and
their groups, orders of gates, of heads and of taps.
"""

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from arch_models import VARIANTS, make_config, open_model
from arch_reference import ReferenceDecoder

from flashllm.arch.mixers import Rotary
from flashllm.arch.registry import block_spec
from flashllm.errors import UnsupportedModelError

IDS = torch.randint(4, 300, (70,), generator=torch.Generator().manual_seed(7)).tolist()
NEXT, QWEN, NEMOTRON, GRANITE = "qwen3_next", "qwen3_5_moe", "nemotron_h", "granitemoehybrid"
FALCON, NORMED, BAMBA = "falcon_h1", "falcon_h1 gate first", "bamba"


def tensors(end, change):
    def sabotage(decoder):
        found = [name for name in decoder.tensors if name.endswith(end)]
        assert found
        decoder.tensors |= {name: change(decoder.tensors[name]) for name in found}

    return sabotage


def block(**values):
    return lambda decoder: setattr(decoder, "block", dataclasses.replace(decoder.block, **values))


def of_layers(change):
    return lambda decoder: block(layers=tuple(map(change, decoder.block.layers)))(decoder)


def state(**values):
    """Of the mixers with a state, wherever a layer has one."""

    def change(layer):
        for name in ("mixer", "second"):
            if getattr(layer, name) is not None and getattr(layer, name).kind in ("state_space", "delta_rule"):
                layer = dataclasses.replace(layer, **{name: dataclasses.replace(getattr(layer, name), **values)})
        return layer

    return of_layers(change)


def attention(**values):
    def change(layer):
        attends = layer.mixer is not None and layer.mixer.kind == "attention"
        return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **values)) if attends else layer

    return of_layers(change)


def router(**values):
    def change(layer):
        if layer.experts is None:
            return layer
        chosen = dataclasses.replace(layer.experts.router, **values)
        return dataclasses.replace(layer, experts=dataclasses.replace(layer.experts, router=chosen))

    return of_layers(change)


def whole(**values):
    return of_layers(lambda layer: dataclasses.replace(layer, **values))


def normed(decoder):
    width = decoder.block.layers[0].recurrent.mixed_dim
    for layer in range(len(decoder.block.layers)):
        decoder.tensors[f"layers.{layer}.state.mixed_norm.weight"] = torch.ones(width)
    state(normed=True)(decoder)


negative, zeros, turned = torch.neg, torch.zeros_like, attention(rotary=Rotary(inverse_frequency=(1.0, 0.1)))
SABOTAGED = {
    NEXT: {
        "the decay's sign": tensors(".decay_log", negative),
        "nothing decays": tensors(".decay_log", lambda log: log - 50),
        "no bias of the decay": tensors(".decay_bias", zeros),
        "taps turned round": tensors(".conv.weight", lambda taps: taps.flip(-1)),
        "norms of the weight alone": block(norm_shift=0.0),
        "the mixed norm of weight + 1": tensors(".mixed_norm.weight", lambda weight: weight + 1),
        "tiled heads": state(tiled=True),
        "no gate of attention": attention(gate="none"),
        "no gate of the shared expert": tensors(".shared_gate.weight", zeros),
        "weights of experts as they are": router(normalized=False),
    },
    QWEN: {
        "the decay's sign": tensors(".decay_log", negative),
        "tiled heads": state(tiled=True),
        "gates as if of halves": tensors(".1.out_gate.weight", lambda rows: rows.roll(32, 0)),
        "norms of the weight alone": block(norm_shift=0.0),
    },
    NEMOTRON: {
        "the decay's sign": tensors(".decay_log", negative),
        "no bias of the step": tensors(".decay_bias", zeros),
        "values do not skip": tensors(".skip", zeros),
        "one group's norm": lambda decoder: setattr(decoder, "norm_groups", 1),
        "the gate behind the norm": state(gate_first=False),
        "keys of another group": tensors(".state.key.weight", lambda rows: rows.roll(12, 0)),
        "taps turned round": tensors(".conv.weight", lambda taps: taps.flip(-1)),
        "no bias of the convolution": tensors(".conv.bias", zeros),
        "the router's scores are shares": router(score="softmax"),
        "no factor of experts": router(factor=1.0),
        "weights of experts as they are": router(normalized=False),
        "no bias of the choice": tensors(".choice.bias", zeros),
        "heads are turned": turned,
        "neurons are not squared": block(activation="relu"),
    },
    GRANITE: {
        "the decay's sign": tensors(".decay_log", negative),
        "values do not skip": tensors(".skip", zeros),
        "one group's norm": lambda decoder: setattr(decoder, "norm_groups", 1),
        "the gate behind the norm": state(gate_first=False),
        "heads are turned": turned,
        "scores scaled by the head": attention(query_scale=0.25),
        "no multiplier of residuals": block(residual_scale=1.0),
        "no multiplier of the embedding": block(embedding_scale=1.0),
        "logits multiplied": block(logit_scale=2.0),
        "the router's scores are all's": router(score="softmax"),
    },
    FALCON: {
        "the decay's sign": tensors(".decay_log", negative),
        "values do not skip": tensors(".skip", zeros),
        "a norm": normed,
        **{f"no multiplier of {name}": state(**{f"{name}_scale": 1.0}) for name in ("gate", "query", "key", "value")},
        "no multiplier of the step": state(decay_scale=1.0),
        "no multiplier of the mixer": state(out_scale=1.0),
        "no multiplier of attention": attention(out_scale=1.0),
        "no multiplier of keys": attention(query_scale=16**-0.5),
        "no multiplier of the FFN's gate": whole(activation_scale=1.0),
        "no multiplier of the FFN": whole(ffn_scale=1.0),
        "no multiplier of the embedding": block(embedding_scale=1.0),
        "no multiplier of logits": block(logit_scale=1.0),
        "no attention": tensors(".1.out.weight", zeros),
    },
    NORMED: {
        "the gate behind the norm": state(gate_first=False),
        "one group's norm": lambda decoder: setattr(decoder, "norm_groups", 1),
        "no norm": state(normed=False),
    },
    BAMBA: {
        "the decay's sign": tensors(".decay_log", negative),
        "values do not skip": tensors(".skip", zeros),
        "one group's norm": lambda decoder: setattr(decoder, "norm_groups", 1),
        "heads are not turned": attention(rotary=None),
    },
}


@pytest.fixture(scope="module")
def computed(variant_of):
    """transformers' logits, of a variant."""

    @cache
    def of(variant):
        with torch.no_grad():
            return open_model(variant_of(variant)[0])(torch.tensor([IDS])).logits[0].numpy()

    return of


@pytest.mark.parametrize(("variant", "name"), [(each, name) for each in SABOTAGED for name in SABOTAGED[each]])
def test_what_is_otherwise_shows(variant, name, variant_of, computed):
    decoder = ReferenceDecoder(variant_of(variant)[1])
    SABOTAGED[variant][name](decoder)
    assert np.abs(decoder.logits(IDS).numpy() - computed(variant)).max() > 2e-3


@pytest.mark.parametrize("limit", [[0.001, 0.1], [0.0, 0.1], [0.001, float("inf")]])
@pytest.mark.parametrize("variant", [NEMOTRON, GRANITE, FALCON, BAMBA])
def test_limits_of_steps_are_refused(variant, limit):
    config = make_config(VARIANTS[variant]).to_dict()
    block_spec({**config, "time_step_limit": [0.0, float("inf")]})
    with pytest.raises(UnsupportedModelError, match="time_step_limit must be"):
        block_spec({**config, "time_step_limit": limit})
