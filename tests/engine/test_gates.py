"""A resident gate names the active neurons exactly: bit for bit what the oracle finds by reading every row."""

import dataclasses
import re
import shutil

import numpy as np
import pytest
import torch
from arch_models import LAYERS, make_model
from arch_reference import ReferenceDecoder
from ffn_rows import Ffn, random_input, write_ffn
from planned import memory_plan

from flashllm.cli import main
from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.errors import FormatError, UsageError
from flashllm.format.manifest import Manifest
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import PREDICTORS, RESIDENT
from flashllm.format.report.inspect import format_inspection, inspect
from flashllm.format.report.verify import verify
from flashllm.offload.runtime.tiers.source import open_weights

GATED = ("llama relu", "llama biases", "fatrelu by layer", "bamboo", "llama squared relu")
GATE_NBYTES = LAYERS * 96 * 64 * 4


@pytest.fixture(scope="module")
def models(variant_of, tmp_path_factory):
    """(model directory with gates in the rows, the same with resident gates) of a variant, made once."""
    made = {}

    def get(name, dtype="float32"):
        if (name, dtype) not in made:
            root, coded = tmp_path_factory.mktemp("gates"), dtype if dtype.startswith("int") else None
            source, rows = variant_of(name) if dtype == "float32" else make_model(root, name, dtype="bfloat16")
            if coded:
                convert(source, rows := root / "rows", predictors=True, encoding=coded)
            convert(source, root / "resident", predictors=True, gate="resident", encoding=coded)
            made[name, dtype] = rows, root / "resident"
        return made[name, dtype]

    return get


def logits(directory, mode, *, tokens=12, prompt=20, **config):
    """[tokens, vocab]: after a long prompt, and of greedy tokens one by one; with the neurons that were active."""
    ids = np.random.default_rng(5).integers(4, 300, prompt).tolist()
    with Model.open(directory, RunConfig(mode=mode, threads=2, io_threads=4, **config)) as model:
        sequence = model.new_sequence()
        rows = [model.step([(sequence, ids)])[0]]
        model.meter.take()
        for _ in range(tokens - 1):
            rows.append(model.step([(sequence, [int(rows[-1].argmax())])])[0])
        return np.stack(rows), model.meter.take().active


@pytest.mark.parametrize("name", GATED)
def test_a_resident_gate_gives_the_oracles_bits(models, name):
    rows, resident = models(name)
    exact, firing = logits(rows, "oracle")
    for mode in ("sparse", "oracle"):
        found, active = logits(resident, mode)
        assert found.tobytes() == exact.tobytes()
        assert active == firing
    dense, _ = logits(rows, "dense")
    assert logits(resident, "dense")[0].tobytes() == dense.tobytes()
    assert exact.argmax(1).tolist() == dense.argmax(1).tolist()
    np.testing.assert_allclose(exact, dense, atol=2e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8_32", "int4_64_min"])
def test_in_fewer_bits_too(models, dtype):
    rows, resident = models("llama relu", dtype)
    assert Manifest.load(resident).rows.encoding == dtype
    assert logits(resident, "sparse")[0].tobytes() == logits(rows, "oracle")[0].tobytes()


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_bits_do_not_depend_on_the_cache(tmp_path, activation):
    ffn = write_ffn(tmp_path / "f", num_neurons=90, d_model=100)
    gate = np.random.default_rng(3).standard_normal((90, 100)).astype(np.float32)
    gate_bias = np.random.default_rng(4).standard_normal(90).astype(np.float32)
    layers = [
        Ffn(ffn, capacity=capacity, threads=threads, activation=activation, activation_cut=0.15, gate=(gate, gate_bias))
        for capacity, threads in ((90, 1), (7, 3), (1, 2))
    ]
    x = torch.stack([random_input(ffn, seed) for seed in range(8)]).contiguous()
    outputs = [layer.predicted(x) for layer in layers]
    assert all(torch.equal(y, outputs[0]) for y in outputs)
    # What the gate names is what fires; given active sets are multiplied with the gate anew, to the same bits.
    for row, y in zip(x, outputs[0], strict=True):
        value = row.numpy() @ gate.T + gate_bias
        value = np.abs(np.maximum(value, 0) if activation == "relu" else value / (1 + np.exp(-value)))
        named = layers[0].layer.predict(row.data_ptr())
        clear = np.abs(value - 0.15) > 1e-4
        assert sorted(np.flatnonzero((value >= 0.15) & clear)) == [n for n in named if clear[n]]
        assert torch.equal(layers[0](row, named), y)
        assert torch.equal(layers[1](row, range(90)), y)


def test_a_resident_gate_needs_no_predictors_and_no_gate_in_the_rows(models):
    rows, resident = models("llama relu")
    manifest = Manifest.load(resident)
    assert manifest.rows.matrices == ("up", "down")
    assert manifest.resident_gate
    assert PREDICTORS not in manifest.files
    assert PREDICTORS in Manifest.load(rows).files
    assert manifest.rows.stride < Manifest.load(rows).rows.stride
    assert verify(resident).ok
    ids = list(range(5, 25))
    np.testing.assert_array_equal(ReferenceDecoder(resident).logits(ids), ReferenceDecoder(rows).logits(ids))


def _plan(model, limit):
    return memory_plan(model, memory=limit, available=2**34, process=60_000_000, context=64)


def test_the_memory_plan_counts_the_gates(models):
    rows, resident = (ModelDir.open(directory) for directory in models("llama relu"))
    plan = _plan(resident, None)
    assert plan.gates == GATE_NBYTES == resident.manifest.resident_gate_nbytes
    assert plan.gates + plan.resident + plan.checksums == resident.manifest.files[RESIDENT].nbytes
    assert ("gates", GATE_NBYTES, GATE_NBYTES) in plan.rows()
    assert sum(start for _, start, _ in plan.rows()) <= plan.limit_nbytes
    assert _plan(rows, None).gates == 0
    assert "gates" not in {name: n for name, n, _ in _plan(rows, None).rows()}


def test_inspect_names_what_names_the_active_neurons(models):
    rows, resident = models("llama relu")
    facts = inspect(resident)
    assert facts["resident_gate_nbytes"] == GATE_NBYTES
    assert facts["modes"] == ["sparse", "oracle", "dense"]
    assert "the gate itself, resident: exact, 73.7 kB" in format_inspection(facts)
    assert inspect(rows)["resident_gate_nbytes"] == 0


def test_the_throughput_engine_finds_resident_gates(models):
    tensors = []
    for directory in models("llama relu"):
        with open_weights(directory) as source:
            gate = np.empty(source.shapes["layers.1.gate.weight"], source.dtype.storage)
            source.read({"layers.1.gate.weight": gate})
            tensors.append(gate)
    np.testing.assert_array_equal(*tensors)


def test_a_model_without_gates_has_none_to_keep(variant_of, tmp_path):
    with pytest.raises(UsageError, match="has no gate, which --gate and --sparsify need"):
        convert(variant_of("opt")[0], tmp_path / "model", gate="resident")


def test_a_resident_file_without_gates_is_refused(models, tmp_path):
    rows, resident = models("llama relu")
    whole, manifest = Manifest.load(rows), Manifest.load(resident)
    for name in manifest.files:
        shutil.copy((rows if name == RESIDENT else resident) / name, tmp_path / name)
    dataclasses.replace(manifest, files={**manifest.files, RESIDENT: whole.files[RESIDENT]}).save(tmp_path)
    with pytest.raises(FormatError, match=r"tensor layers\.0\.gate\.weight is missing"):
        ModelDir.open(tmp_path)


def test_plan_says_which_gate_fits(models, capsys):
    for directory, here in zip(models("llama relu"), ("predictors of", "the resident gate"), strict=True):
        assert main(["plan", str(directory)]) == 0
        printed = capsys.readouterr().out
        assert "resident      73.7 kB  exact; fits" in printed
        assert re.search(r"4bit +9\.\d+ kB  nearly all, some in vain; fits", printed)
        assert f"here: {here}" in printed
