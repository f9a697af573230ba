"""What the Gemmas compute that others do not, each taken away in turn: the comparison with transformers sees it."""

import dataclasses

import numpy as np
import pytest
import torch
from arch_models import VARIANTS, open_model
from arch_reference import ReferenceDecoder

IDS = torch.randint(4, 300, (70,), generator=torch.Generator().manual_seed(7)).tolist()
KEYS, ROWS, EXPERTS = "gemma4", "gemma4 shared keys, rows of ids", "gemma4 experts"
STREAMS = "gemma3n"


def of_layers(decoder, **traits):
    """The decoder with attention that differs in these traits, where it has them; `number` is the layer's."""
    layers = [
        dataclasses.replace(
            layer,
            mixer=dataclasses.replace(layer.mixer, **{name: change(layer.mixer) for name, change in traits.items()}),
        )
        for layer in decoder.block.layers
    ]
    decoder.block = dataclasses.replace(decoder.block, layers=tuple(layers))


def tensors(decoder, end, change):
    for name, tensor in decoder.tensors.items():
        if name.endswith(end):
            decoder.tensors[name] = change(tensor)


def turned_by_share(mixer):
    """As if the pairs that turn were those of the first dimensions alone."""
    kept = tuple(frequency for frequency in mixer.rotary.inverse_frequency if frequency)
    return dataclasses.replace(mixer.rotary, inverse_frequency=kept)


SABOTAGED = {
    "values are not normalized": (KEYS, lambda d: of_layers(d, value_norm=lambda mixer: False)),
    "scores are scaled": (KEYS, lambda d: of_layers(d, query_scale=lambda mixer: mixer.head_dim**-0.5)),
    "a window one wider": (KEYS, lambda d: of_layers(d, window=lambda mixer: mixer.window and mixer.window + 1)),
    "pairs of a share of the head": (KEYS, lambda d: of_layers(d, rotary=turned_by_share)),
    "no scale of a layer": (KEYS, lambda d: tensors(d, ".scale", torch.ones_like)),
    "norms of weight + 1": (KEYS, lambda d: setattr(d, "block", dataclasses.replace(d.block, norm_shift=1.0))),
    "no soft cap": (KEYS, lambda d: setattr(d, "block", dataclasses.replace(d.block, logit_softcap=None))),
    "keys and values of another layer": (ROWS, lambda d: of_layers(d, shared=lambda m: m.shared and m.shared - 1)),
    "no row's projection": (ROWS, lambda d: tensors(d, "per_layer_projection.weight", torch.zeros_like)),
    "no norm of a row's projection": (ROWS, lambda d: tensors(d, "per_layer_projection_norm.weight", torch.ones_like)),
    "rows of another layer": (ROWS, lambda d: setattr(d, "_token_rows", shifted(d._token_rows))),
    "the router's input is not scaled": (EXPERTS, lambda d: tensors(d, ".router_scale", torch.ones_like)),
    "the router reads what the experts read": (EXPERTS, lambda d: of_router(d, norm_epsilon=None)),
    "the router's weights are no shares": (EXPERTS, lambda d: of_router(d, normalized=False)),
    "experts' weights are not scaled": (EXPERTS, lambda d: tensors(d, ".expert_scale", torch.ones_like)),
    "no dense part": (EXPERTS, lambda d: tensors(d, ".ffn_beside_output_norm.weight", torch.zeros_like)),
    "the dense part's norm is the experts'": (
        EXPERTS,
        lambda d: tensors(d, ".ffn_beside_norm.weight", torch.ones_like),
    ),
    "no norm behind the experts": (EXPERTS, lambda d: tensors(d, ".ffn_experts_output_norm.weight", torch.ones_like)),
    "gates are not cut": (STREAMS, lambda d: of_all(d, gate_deviations=None)),
    "gates are cut, and not made less": (STREAMS, lambda d: setattr(d, "_cut", kept_above(d._cut))),
    "no map around the mixer": (STREAMS, lambda d: tensors(d, ".laurel_norm.weight", torch.zeros_like)),
    "the mixer's input is not added": (STREAMS, lambda d: setattr(d, "block", dataclasses.replace(d.block, laurel=0))),
    "what is predicted, the other way": (STREAMS, lambda d: tensors(d, ".stream_predict", turned)),
    "nothing is predicted": (STREAMS, lambda d: tensors(d, ".stream_predict", torch.zeros_like)),
    "streams are corrected alike": (STREAMS, lambda d: tensors(d, ".stream_correct", torch.zeros_like)),
    "a router's input as it is": (STREAMS, lambda d: tensors(d, ".stream_router_norm.weight", lambda t: 64 * t)),
    "a row's gate without its scale": (STREAMS, lambda d: tensors(d, ".stream_scale", torch.ones_like)),
    "streams of any length": (STREAMS, lambda d: setattr(d, "_as_long", lambda name, x, like: d._linear(name, x))),
    "a stream goes out otherwise": (STREAMS, lambda d: tensors(d, "streams.1.leave.weight", lambda t: t.flip(0))),
    "values as they are": (STREAMS, lambda d: of_layers(d, value_norm=lambda mixer: False)),
    "scores that are scaled": (STREAMS, lambda d: of_layers(d, query_scale=lambda mixer: mixer.head_dim**-0.5)),
    "norms with 1 added": (STREAMS, lambda d: setattr(d, "block", dataclasses.replace(d.block, norm_shift=1.0))),
    "keys of another layer": (STREAMS, lambda d: of_layers(d, shared=lambda m: m.shared and m.shared - 1)),
    "no gate's norm": (ROWS, lambda d: tensors(d, ".per_layer_norm.weight", torch.ones_like)),
}


def of_all(decoder, **traits):
    layers = tuple(dataclasses.replace(layer, **traits) for layer in decoder.block.layers)
    decoder.block = dataclasses.replace(decoder.block, layers=layers)


def kept_above(cut):
    return lambda layer, gates: torch.where(cut(layer, gates) > 0, gates, 0.0)


def turned(predict):
    return predict.view(4, 4, 4).transpose(0, 1).reshape(predict.shape)


def of_router(decoder, **traits):
    experts = decoder.block.experts
    experts = dataclasses.replace(experts, router=dataclasses.replace(experts.router, **traits))
    layers = (dataclasses.replace(layer, experts=experts) for layer in decoder.block.layers)
    decoder.block = dataclasses.replace(decoder.block, layers=tuple(layers))


def shifted(rows_of):
    return lambda ids, h: rows_of(ids, h).roll(1, 1)


@pytest.mark.parametrize("name", SABOTAGED)
def test_what_is_taken_away_shows(name, variant_of):
    variant, sabotage = SABOTAGED[name]
    source, directory = variant_of(variant)
    with torch.no_grad():
        expected = open_model(source)(torch.tensor([IDS])).logits[0].numpy()
    decoder = ReferenceDecoder(directory)
    assert np.abs(decoder.logits(IDS).numpy() - expected).max() < 2e-4
    decoder.kept.clear()
    sabotage(decoder)
    assert np.abs(decoder.logits(IDS).numpy() - expected).max() > 2e-2


def test_keys_that_are_values_are_so_before_their_norm(variant_of):
    """The reference takes the projection itself; so does transformers' class, whose own value projection is missing."""
    assert VARIANTS[KEYS].config["attention_k_eq_v"]
    source, _ = variant_of(KEYS)
    model = open_model(source)
    assert [layer.self_attn.v_proj is None for layer in model.model.layers] == [False, True, True]
