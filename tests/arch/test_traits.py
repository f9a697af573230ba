"""What models compute, each part of it otherwise in turn: the comparison with transformers sees it.

Signs, scales, norms and their groups, gates, rotations, routers, orders of heads and of taps: what went wrong
elsewhere, or could.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from arch_models import CONTEXT, VARIANTS, full_config, open_model, tokens
from arch_reference import ReferenceDecoder
from torch.nn.functional import rms_norm, silu

from flashllm.arch.mixers import Growth, Latent, Rotary
from flashllm.arch.registry import block_spec
from flashllm.errors import UnsupportedModelError

SHOWS = 2e-3  # of logits of the order of 1 to 10: ten times what test_contract.py allows
# The first of those that test_contract.py compares: what shows in them shows there.
IDS = tokens(CONTEXT)[:64]


def block(**values):
    return lambda decoder: setattr(decoder, "block", replace(decoder.block, **values))


def each_layer(change):
    """`change(number, layer)` gives what the layer is instead."""

    def sabotage(decoder):
        block(layers=tuple(change(number, layer) for number, layer in enumerate(decoder.block.layers)))(decoder)

    return sabotage


def layers(**values):
    return each_layer(lambda number, layer: replace(layer, **values))


def mixers(*kinds, **values):
    """Of the mixers of these kinds, wherever a layer has one; a value may be a function of its mixer."""

    def change(number, layer):
        for name in ("mixer", "second"):
            mixer = getattr(layer, name)
            if mixer is not None and mixer.kind in kinds:
                given = {key: value(mixer) if callable(value) else value for key, value in values.items()}
                layer = replace(layer, **{name: replace(mixer, **given)})
        return layer

    return each_layer(change)


def attention(**values):
    return mixers("attention", **values)


def state(**values):
    return mixers("state_space", "delta_rule", **values)


def router(**values):
    def change(number, layer):
        if layer.experts is None:
            return layer
        return replace(layer, experts=replace(layer.experts, router=replace(layer.experts.router, **values)))

    return each_layer(change)


def latent_epsilon(value):
    """Of the norms inside latent attention."""
    return attention(latent=lambda mixer: replace(mixer.latent, norm_epsilon=value))


def whole_head_turned(mixer):
    """The rotary of a head all of which turns: as many pairs as it has, at the first one's base."""
    pairs = mixer.head_dim // 2
    return replace(mixer.rotary, inverse_frequency=tuple(10_000 ** (-pair / pairs) for pair in range(pairs)))


def turning_as(layer):
    """Every layer is turned as this one."""
    return lambda decoder: attention(rotary=decoder.block.layers[layer].mixer.rotary)(decoder)


def style(name):
    return attention(rotary=lambda mixer: mixer.rotary and replace(mixer.rotary, style=name))


def tensors(end, change):
    def sabotage(decoder):
        found = [name for name in decoder.tensors if name.endswith(end)]
        assert found
        decoder.tensors |= {name: change(decoder.tensors[name]) for name in found}

    return sabotage


def hooks(**values):
    """What the decoder leaves open, and its methods."""
    return lambda decoder: vars(decoder).update(values)


def method(name, change):
    """A method of the decoder, by what `change` makes of it."""
    return lambda decoder: setattr(decoder, name, change(getattr(decoder, name)))


def normed(decoder):
    width = decoder.block.layers[0].recurrent.mixed_dim
    for layer in range(len(decoder.block.layers)):
        decoder.tensors[f"layers.{layer}.state.mixed_norm.weight"] = torch.ones(width)


def unnormed(decoder):
    for layer in range(len(decoder.block.layers)):
        del decoder.tensors[f"layers.{layer}.state.mixed_norm.weight"]


def exchanged(decoder):
    """Two of the three parts of a short convolution's projection."""
    names = [f"layers.0.state.{part}.weight" for part in ("query", "key")]
    decoder.tensors |= dict(zip(names, [decoder.tensors[name] for name in reversed(names)], strict=True))


def norms_of_heads(decoder):
    """Of each head with its own weights, where all heads together have one norm."""
    width = decoder.block.layers[0].mixer.head_dim
    attention(query_key_norm="heads")(decoder)
    for end in (".query_norm.weight", ".key_norm.weight"):
        tensors(end, lambda weight: weight.view(-1, width))(decoder)


def backwards(tensor):
    return tensor.flip(-1)


def other_rows(tensor):
    return tensor.flip(0)


def turned_by_share(mixer):
    """As if the pairs that turn were those of the first dimensions alone."""
    return replace(mixer.rotary, inverse_frequency=tuple(each for each in mixer.rotary.inverse_frequency if each))


def turned_first(rows):
    """Of each head's query, the part that is turned lies before the other."""
    return rows.view(4, 20, -1).roll(-8, 1).reshape(rows.shape)


def values_first(decoder):
    """Of each head's rows that make keys and values of a latent row."""
    for layer in range(len(decoder.block.layers)):
        names = [f"layers.{layer}.{part}.weight" for part in ("key_up", "value")]
        keys, values = (decoder.tensors[name] for name in names)  # keys [heads, rank, plain]
        keys, values = keys.view(4, 32, -1).mT, values.view(4, -1, 32)
        values, keys = torch.cat((keys, values), 1).split((values.shape[1], keys.shape[1]), 1)
        made = keys.mT.reshape(decoder.tensors[names[0]].shape), values.reshape(decoder.tensors[names[1]].shape)
        decoder.tensors |= dict(zip(names, made, strict=True))


def with_norm_of_shared_key(rotate):
    """The part that is turned of the one key for all heads has a norm, too."""
    return lambda states, *turn: rotate(rms_norm(states, states.shape[-1:]) if states.shape[1] == 1 else states, *turn)


def factor_of_all(_, layer):
    """The routed experts' factor, and of the shared one, too."""
    if layer.experts is None:
        return layer
    router = layer.experts.router
    return replace(layer, ffn_scale=router.factor, experts=replace(layer.experts, router=replace(router, factor=1.0)))


def kept_above(cut):
    return lambda layer, gates: torch.where(cut(layer, gates) > 0, gates, 0.0)


def with_silu(convolved):
    return lambda *args: silu(convolved(*args))


def of_next_layer(rows_of):
    return lambda ids, h: rows_of(ids, h).roll(1, 1)


negative, zeros, ones = torch.neg, torch.zeros_like, torch.ones_like
LATENT = "deepseek_v2|deepseek_v3|glm4_moe_lite|mistral4|youtu|minicpm3"  # of whose heads 8 of 20 numbers turn
SHARED = [  # what is otherwise, how, and of which variants
    (
        "weights of experts as they are",
        router(normalized=False),
        "hunyuan_v1_moe|cohere2_moe sigmoid, summed|mistral4|deepseek_v3|glm4_moe|dots1|ernie4_5_moe|minimax_m2|"
        "kimi_linear|lfm2_moe|qwen3_next|nemotron_h",
    ),
    ("no multiplier of residuals", block(residual_scale=1.0), "granitemoe|minicpm3|granitemoehybrid"),
    (
        "no multiplier of the embedding",
        block(embedding_scale=1.0),
        "granitemoeshared|afmoe|minicpm3|granitemoehybrid|falcon_h1",
    ),
    (
        "one rotation",
        turning_as(0),
        "granitemoe_swa|mellum|exaone_moe|exaone4|cohere2|olmo3|afmoe|laguna|mimo_v2_flash",
    ),
    ("scores of each expert", router(score="sigmoid"), "flex_olmo|mistral4|deepseek_v2|ernie4_5_moe"),
    (
        "no factor of experts",
        router(factor=1.0),
        "solar_open|exaone_moe|afmoe|laguna|hy_v3|bailing_moe|mistral4 groups|deepseek_v2|deepseek_v3|"
        "glm4_moe_lite|dots1|kimi_linear|lfm2_moe|nemotron_h",
    ),
    (
        "scores are shares",
        router(score="softmax"),
        "solar_open|hy_v3|cohere2_moe|deepseek_v3|glm4_moe_lite|glm4_moe|dots1|minimax_m2|kimi_linear|lfm2_moe|"
        "nemotron_h",
    ),
    (
        "pairs of halves",
        style("half"),
        "cohere2|gptj|codegen|helium|ernie4_5|deepseek_v2|deepseek_v3|glm4_moe_lite|ernie4_5_moe|youtu",
    ),
    ("groups by their best expert", router(groups_by="one"), "bailing_moe|mistral4 groups|deepseek_v3"),
    (
        "no groups",
        router(groups=1, chosen_groups=1),
        "bailing_moe|deepseek_v2 groups|deepseek_v3|glm4_moe groups|kimi_linear groups",
    ),
    (
        "groups left out count as zero",
        hooks(left_out=0.0),
        "bailing_moe|deepseek_v3|dots1 window|glm4_moe groups|kimi_linear groups|nemotron_h neurons first",
    ),
    (
        "a factor of the shared expert, too",
        each_layer(factor_of_all),
        "afmoe|laguna|bailing_moe|deepseek_v2|deepseek_v3|glm4_moe_lite|hy_v3|kimi_linear|nemotron_h",
    ),
    (
        "interleaved pairs",
        style("interleaved"),
        "bailing_moe|glm4_moe|dots1|minimax_m2 half turned|minicpm3|qwen3_next|qwen3_5_moe",
    ),
    (
        "the whole head is turned",
        attention(rotary=whole_head_turned),
        "glm4_moe|minimax_m2 half turned|qwen3_next|qwen3_5_moe",
    ),
    (
        "heads are turned",
        attention(rotary=Rotary(inverse_frequency=(1.0, 0.5, 0.1, 0.02))),
        "nemotron_h|granitemoehybrid|kimi_linear",
    ),
    ("norms of weight + 1", block(norm_shift=1.0), "gemma4|gemma3n|kimi_linear"),
    ("norms of what layers read", layers(norms="input"), "olmo_hybrid|afmoe"),
    (
        "lengths with the epsilon of a mean",
        hooks(_unit=lambda states: rms_norm(states, states.shape[-1:], eps=1e-6) / states.shape[-1] ** 0.5),
        "qwen3_next|qwen3_5_moe",
    ),
    ("queries and keys of any length", hooks(_unit=lambda states: states), "qwen3_next|qwen3_5_moe|kimi_linear"),
    ("queries of a state are not scaled", hooks(delta_scale=1.0), "qwen3_next|qwen3_5_moe"),
    ("a sigmoid as the state's gate", hooks(delta_gate=torch.sigmoid), "qwen3_next|qwen3_5_moe"),
    ("the turned part of queries first", tensors(".query.weight", turned_first), LATENT),
    ("a norm of the shared key's turned part", method("_rotate", with_norm_of_shared_key), LATENT),
    ("values before keys", values_first, LATENT),
    ("norms of the weight alone", block(norm_shift=0.0), "vaultgemma|qwen3_next|qwen3_5_moe"),
    (
        "scores scaled by what the cache keeps",
        attention(query_scale=40**-0.5),
        "deepseek_v2|deepseek_v3|youtu|minicpm3",
    ),
    ("another epsilon of latent norms", latent_epsilon(0.03), "deepseek_v2|youtu|minicpm3"),
    (
        "no bias of the choice",
        tensors(".choice.bias", zeros),
        "deepseek_v3|glm4_moe_lite|glm4_moe|dots1|ernie4_5_moe|minimax_m2|nemotron_h",
    ),
    (
        "no norm of queries and keys",
        attention(query_key_norm="none"),
        "glm4_moe norms of heads, biases|dots1|bailing_moe|lfm2|lfm2_moe",
    ),
    ("nothing is turned", attention(rotary=None), "lfm2|lfm2_moe"),
    ("parts of the projection in another order", exchanged, "lfm2|lfm2_moe"),
    ("taps turned round", tensors("layers.0.state.conv.weight", backwards), "lfm2|lfm2_moe"),
    ("SiLU behind the convolution", method("_convolved", with_silu), "lfm2|lfm2_moe"),
    (
        "the decay's sign",
        tensors(".decay_log", negative),
        "qwen3_next|qwen3_5_moe|nemotron_h|granitemoehybrid|falcon_h1|bamba",
    ),
    ("values do not skip", tensors(".skip", zeros), "nemotron_h|granitemoehybrid|falcon_h1|bamba"),
    ("one group's norm", hooks(norm_groups=1), "nemotron_h|granitemoehybrid|falcon_h1 gate first|bamba"),
    ("the gate behind the norm", state(gate_first=False), "nemotron_h|granitemoehybrid|falcon_h1 gate first"),
]
OTHERWISE = {
    "phimoe": {"shares of all experts": router(score="softmax"), "RMS norms": block(norm="rms")},
    "phimoe much jitter": {"little jitter": router(jitter=0.01)},
    "hunyuan_v1_dense": {
        "norms before the turn": attention(query_key_norm="head"),
        "scores are not scaled": attention(query_scale=1.0),
    },
    "hunyuan_v1_moe": {"norms before the turn": attention(query_key_norm="head")},
    "granitemoe": {
        "shares of all experts": router(score="softmax"),
        "logits multiplied": block(logit_scale=2.0),
        "scores scaled by the head": attention(query_scale=0.25),
    },
    "granite_swa": {"one rotation": turning_as(2), "no window": attention(window=None)},
    "hyperclovax": {"another multiplier of logits": block(logit_scale=0.5)},
    "afmoe": {"another gate of attention": attention(gate="softplus")},
    "laguna": {"another gate of attention": attention(gate="sigmoid")},
    "laguna gate of every number": {
        "another gate of attention": attention(gate="sigmoid"),
        "a router without a cap": router(softcap=0.0),
    },
    "mimo_v2_flash": {"no multiplier of values": attention(value_scale=1.0)},
    "gpt_neo": {"scores are scaled": attention(query_scale=0.25), "a window one wider": attention(window=51)},
    "olmo": {"another epsilon of norms": block(norm_epsilon=0.01)},
    "cohere2_moe": {
        "the sum of routed and shared experts": layers(ffn_scale=1.0),
        "half of a dense layer, too": layers(ffn_scale=0.5),
        "one rotation": turning_as(2),
    },
    "ministral3": {
        "queries do not grow": attention(growth=None),
        "queries grow a token later": attention(growth=Growth(rate=0.5, step=41)),
    },
    "mistral4": {
        "queries do not grow": attention(growth=None),
        "scores scaled by the value's width": attention(query_scale=20**-0.5),
    },
    "deepseek_v2": {"weights of experts are normalized": router(normalized=True)},
    "deepseek_v2 groups": {"groups by the sum of two": router(groups_by="two")},
    "deepseek_v2 yarn rope": {"scores without the factor of YaRN": attention(query_scale=20**-0.5)},
    "glm4_moe_lite": {"the epsilon of transformers' latent norms": latent_epsilon(1e-6)},
    "glm4_moe norms of heads, biases": {
        "no bias of queries": tensors(".query.bias", zeros),
        "weights of experts are normalized": router(normalized=True),
    },
    "glm4_moe groups": {"by their best": router(groups_by="one")},
    "dots1 window": {"a window one wider": attention(window=lambda mixer: mixer.window and mixer.window + 1)},
    "ernie4_5_moe with a floor": {"no floor": router(least_sum=0.0)},
    "minimax_m2": {"norms of each head": norms_of_heads},
    "youtu yarn rope": {"scores without the factor of YaRN": attention(query_scale=20**-0.5)},
    "minicpm3": {"logits as they are": block(logit_scale=1.0)},
    "kimi_linear": {
        "SiLU as the state's gate": hooks(delta_gate=silu),
        "scores scaled by the rank": attention(query_scale=0.25),
        "the model's epsilon in latent norms": attention(
            latent=Latent(rank=32, plain_dim=12, value_dim=20, norm_epsilon=0.03)
        ),
        "another bias of the decay": tensors("layers.0.decay_bias", lambda bias: bias + 0.5),
        "the decay's sign": tensors("layers.0.decay_log", lambda log: -log.exp()),
        "decays of other channels": tensors("layers.0.decay.weight", other_rows),
        "taps turned round": tensors("layers.0.conv_key.weight", backwards),
        "twice the gate": tensors("layers.0.gate_down.weight", lambda rows: 2 * rows),
        "strengths of other heads": tensors("layers.0.beta.weight", other_rows),
    },
    "olmo_hybrid": {
        "strengths of at most 1": mixers("delta_rule", beta_scale=1.0),
        "another epsilon of the mixed norm": mixers("delta_rule", norm_epsilon=1e-3),
    },
    "gemma4": {
        "values are not normalized": attention(value_norm=False),
        "scores are scaled": attention(query_scale=lambda mixer: mixer.head_dim**-0.5),
        "a window one wider": attention(window=lambda mixer: mixer.window and mixer.window + 1),
        "pairs of a share of the head": attention(rotary=turned_by_share),
        "no scale of a layer": tensors(".scale", ones),
        "no soft cap": block(logit_softcap=None),
    },
    "gemma4 shared keys, rows of ids": {
        "keys and values of another layer": attention(shared=lambda mixer: mixer.shared and mixer.shared - 1),
        "no row's projection": tensors("per_layer_projection.weight", zeros),
        "no norm of a row's projection": tensors("per_layer_projection_norm.weight", ones),
        "rows of another layer": method("_token_rows", of_next_layer),
        "no gate's norm": tensors(".per_layer_norm.weight", ones),
    },
    "gemma4 experts": {
        "the router's input is not scaled": tensors(".router_scale", ones),
        "the router reads what the experts read": router(norm_epsilon=None),
        "the router's weights are no shares": router(normalized=False),
        "experts' weights are not scaled": tensors(".expert_scale", ones),
        "no dense part": tensors(".ffn_beside_output_norm.weight", zeros),
        "the dense part's norm is the experts'": tensors(".ffn_beside_norm.weight", ones),
        "no norm behind the experts": tensors(".ffn_experts_output_norm.weight", ones),
    },
    "gemma3n": {
        "gates are not cut": layers(gate_deviations=None),
        "gates are cut, and not made less": method("_cut", kept_above),
        "no map around the mixer": tensors(".laurel_norm.weight", zeros),
        "the mixer's input is not added": block(laurel=0),
        "what is predicted, the other way": tensors(
            ".stream_predict", lambda rows: rows.view(4, 4, 4).transpose(0, 1).reshape(rows.shape)
        ),
        "nothing is predicted": tensors(".stream_predict", zeros),
        "streams are corrected alike": tensors(".stream_correct", zeros),
        "a router's input as it is": tensors(".stream_router_norm.weight", lambda weight: 64 * weight),
        "a row's gate without its scale": tensors(".stream_scale", ones),
        "streams of any length": lambda decoder: setattr(
            decoder, "_as_long", lambda name, x, like: decoder._linear(name, x)
        ),
        "a stream goes out otherwise": tensors("streams.1.leave.weight", other_rows),
        "values as they are": attention(value_norm=False),
        "scores that are scaled": attention(query_scale=lambda mixer: mixer.head_dim**-0.5),
        "keys of another layer": attention(shared=lambda mixer: mixer.shared and mixer.shared - 1),
    },
    "qwen3_next": {
        "nothing decays": tensors(".decay_log", lambda log: log - 50),
        "no bias of the decay": tensors(".decay_bias", zeros),
        "taps turned round": tensors(".conv.weight", backwards),
        "the mixed norm of weight + 1": tensors(".mixed_norm.weight", lambda weight: weight + 1),
        "tiled heads": state(tiled=True),
        "no gate of attention": attention(gate="none"),
        "no gate of the shared expert": tensors(".shared_gate.weight", zeros),
    },
    "qwen3_5_moe": {
        "tiled heads": state(tiled=True),
        "gates as if of halves": tensors(".1.out_gate.weight", lambda rows: rows.roll(32, 0)),
    },
    "nemotron_h": {
        "no bias of the step": tensors(".decay_bias", zeros),
        "keys of another group": tensors(".state.key.weight", lambda rows: rows.roll(12, 0)),
        "taps turned round": tensors(".conv.weight", backwards),
        "no bias of the convolution": tensors(".conv.bias", zeros),
        "neurons are not squared": block(activation="relu"),
    },
    "granitemoehybrid": {
        "scores scaled by the head": attention(query_scale=0.25),
        "logits multiplied": block(logit_scale=2.0),
        "the router's scores are all's": router(score="softmax"),
    },
    "falcon_h1": {
        "a norm": normed,
        **{f"no multiplier of {name}": state(**{f"{name}_scale": 1.0}) for name in ("gate", "query", "key", "value")},
        "no multiplier of the step": state(decay_scale=1.0),
        "no multiplier of the mixer": state(out_scale=1.0),
        "no multiplier of attention": attention(out_scale=1.0),
        "no multiplier of keys": attention(query_scale=16**-0.5),
        "no multiplier of the FFN's gate": layers(activation_scale=1.0),
        "no multiplier of the FFN": layers(ffn_scale=1.0),
        "no multiplier of logits": block(logit_scale=1.0),
        "no attention": tensors(".1.out.weight", zeros),
    },
    "falcon_h1 gate first": {"no norm": unnormed},
    "bamba": {"heads are not turned": attention(rotary=None)},
}
CASES = {(variant, what): change for what, change, variants in SHARED for variant in variants.split("|")}
CASES |= {(variant, what): change for variant, changes in OTHERWISE.items() for what, change in changes.items()}


@pytest.fixture(scope="module")
def computed(variant_of):
    """transformers' logits, of a variant."""

    @cache
    def of(variant):
        with torch.no_grad():
            return open_model(variant_of(variant)[0])(torch.tensor([IDS])).logits[0].numpy()

    return of


@pytest.mark.parametrize(("variant", "what"), sorted(CASES))
def test_what_is_otherwise_shows(variant, what, variant_of, computed):
    decoder = ReferenceDecoder(variant_of(variant)[1])
    CASES[variant, what](decoder)
    assert np.abs(decoder.logits(IDS).numpy() - computed(variant)).max() > SHOWS


@pytest.mark.parametrize("limit", [[0.001, 0.1], [0.0, 0.1], [0.001, float("inf")]])
@pytest.mark.parametrize("variant", ["nemotron_h", "granitemoehybrid", "falcon_h1", "bamba"])
def test_limits_of_steps_are_refused(variant, limit):
    config = full_config(VARIANTS[variant])
    block_spec({**config, "time_step_limit": [0.0, float("inf")]})
    with pytest.raises(UnsupportedModelError, match="time_step_limit must be"):
        block_spec({**config, "time_step_limit": limit})
