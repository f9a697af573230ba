"""Models whose layers differ: dense layers among mixtures of experts, and layers of other widths."""

import numpy as np
import pytest
from arch_models import Variant, make_checkpoint, tokens
from safetensors.numpy import load_file

from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.format.install import install_files
from flashllm.format.manifest import Manifest
from flashllm.format.model_files import PREDICTORS
from flashllm.format.report.inspect import format_inspection, inspect
from flashllm.format.report.verify import verify
from flashllm.format.safetensors import read_header

PROCESS = 2 * 10**9  # the rest of the process is held to be of this size, so that limits mean the same in every test


def logits(directory, **config):
    """Those after a prompt and after each of some tokens, and the model's plan."""
    with Model.open(directory, RunConfig(context=64, threads=1, **config), process=PROCESS) as model:
        sequence = model.new_sequence()
        after = [model.step([(sequence, tokens(20, 0))])[0]]
        after += [model.step([(sequence, [token])])[0] for token in tokens(10, 1)]
        return np.array(after), model.plan.memory


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("qwen3_moe and dense layers", "sparse"),
        ("qwen2_moe and a dense layer", "sparse"),
        ("llama relu widths", "sparse"),
        ("llama relu widths", "oracle"),
        ("llama widths", "dense"),
    ],
)
def test_bits_do_not_depend_on_memory(variant_of, name, mode):
    """From the least that runs, where dense layers keep no row, to room for all; dense layers are served first."""
    _, directory = variant_of(name)
    widths = Manifest.load(directory).architecture.every_width
    expected, plan = logits(directory, mode=mode)
    assert all(held >= width for held, width in zip(plan.cache_rows, widths, strict=True))
    held = []
    for more in (0, 60_000, 120_000, 200_000):
        found, least = logits(directory, mode=mode, memory=plan.minimum_nbytes + more)
        assert np.array_equal(found, expected)
        held.append(sum(least.cache_rows))
        if not all(least.cache_rows[layer] for layer in least.dense_layers):
            assert least.cache_rows == tuple(
                least.cache_rows[layer] if layer in least.dense_layers else least.min_cache_rows[layer]
                for layer in range(len(widths))
            )
    assert held[0] < sum(widths)


def test_predictors_are_installed_in_their_own_layers(tmp_path):
    """Of a ReLU mixture behind a dense layer, which uses none: the logits are those with every predictor exact."""
    variant = Variant("qwen3_moe", {"hidden_act": "relu", "mlp_only_layers": [0], "intermediate_size": 384})
    source = make_checkpoint(tmp_path / "hf", variant)
    convert(source, tmp_path / "model", predictors=True)
    assert Manifest.load(tmp_path / "model").architecture.every_width == (384, 384, 384)  # a shift would go unnoticed
    expected, _ = logits(tmp_path / "model", mode="dense")
    tensors = load_file(tmp_path / "model" / PREDICTORS)
    named = {name: np.array([-np.inf], np.float32) for name in tensors if name.endswith("threshold")}
    named["layers.0.threshold"] = np.array([np.inf], np.float32)  # names nothing, where it would be used
    _replace_tensors(tmp_path / "model", {**tensors, **named})
    assert np.array_equal(logits(tmp_path / "model", mode="sparse")[0], expected)


def _replace_tensors(directory, tensors):
    """Predictors with other values under the same header."""
    path, data = directory / PREDICTORS, bytearray((directory / PREDICTORS).read_bytes())
    for name, info in read_header(path).tensors.items():
        data[info.offset : info.offset + info.nbytes] = np.ascontiguousarray(tensors[name]).tobytes()
    install_files(directory, {PREDICTORS: [bytes(data)]})


def test_what_is_said_of_such_models(variant_of, tmp_path):
    _, mixed = variant_of("qwen3_moe and dense layers")
    assert "8 experts of 48 neurons, 3 experts a token in all but 2 layers, which are dense" in format_inspection(
        inspect(mixed)
    )
    _, wide = variant_of("llama relu widths")
    assert "d_ff 40 to 160" in format_inspection(inspect(wide))
    for directory in (mixed, wide):
        assert verify(directory).ok
        manifest = Manifest.load(directory)
        manifest.save(tmp_path)
        assert Manifest.load(tmp_path, check_files=False) == manifest
