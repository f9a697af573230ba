"""Models whose layers differ: dense layers among mixtures of experts, and layers of other widths."""

import numpy as np
import pytest
import torch
from arch_models import make_model

from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.format.manifest import Manifest
from flashllm.format.report.inspect import format_inspection, inspect
from flashllm.format.report.verify import verify

PROCESS = 10**9  # the rest of the process is held to be of this size, so that limits mean the same in every test


def ids(count, seed):
    return torch.randint(4, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits(directory, **config):
    """Those after a prompt and after each of some tokens, and the model's plan."""
    with Model.open(directory, RunConfig(context=64, threads=1, **config), process=PROCESS) as model:
        sequence = model.new_sequence()
        after = [model.step([(sequence, ids(20, 0))])[0]]
        after += [model.step([(sequence, [token])])[0] for token in ids(10, 1)]
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
def test_bits_do_not_depend_on_memory(tmp_path, name, mode):
    """From the least that runs, where dense layers keep no row, to room for all; dense layers are served first."""
    _, directory = make_model(tmp_path, name)
    widths = Manifest.load(directory).architecture.every_width
    expected, plan = logits(directory, mode=mode)
    assert all(held >= width for held, width in zip(plan.cache_rows, widths, strict=True))
    for more in (0, 60_000, 120_000, 200_000):
        found, least = logits(directory, mode=mode, memory=plan.minimum_nbytes + more)
        assert np.array_equal(found, expected)
        if not all(least.cache_rows[layer] for layer in least.dense_layers):
            assert least.cache_rows == tuple(
                least.cache_rows[layer] if layer in least.dense_layers else least.min_cache_rows[layer]
                for layer in range(len(widths))
            )
    assert sum(logits(directory, mode=mode, memory=plan.minimum_nbytes)[1].cache_rows) < sum(widths)


def test_what_is_said_of_such_models(tmp_path):
    _, mixed = make_model(tmp_path / "mixed", "qwen3_moe and dense layers")
    assert "8 experts of 48 neurons, 3 experts a token in all but 2 layers, which are dense" in format_inspection(
        inspect(mixed)
    )
    _, wide = make_model(tmp_path / "wide", "llama relu widths")
    assert "d_ff 40 to 160" in format_inspection(inspect(wide))
    for directory in (mixed, wide):
        assert verify(directory).ok
        manifest = Manifest.load(directory)
        manifest.save(tmp_path)
        assert Manifest.load(tmp_path, check_files=False) == manifest
