"""Gates in 4 bits name nearly every neuron that fires; the exact gates in the rows decide."""

import numpy as np
import pytest
from arch_models import LAYERS
from ffn_rows import Ffn, random_input, write_ffn
from planned import memory_plan

from flashllm import _core
from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.convert.untrained.predictor import GATE_RECALL, coded_gate
from flashllm.convert.untrained.svd import normed_inputs
from flashllm.engine.model import Model
from flashllm.format.manifest import Manifest, predictor_ranks
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import PREDICTORS
from flashllm.format.predictors import GATE_CODE, margin_above
from flashllm.format.report.inspect import format_inspection, inspect
from flashllm.format.report.verify import verify
from flashllm.pack.gates import Gates
from flashllm.pack.score import Inputs

SIMD = _core.simd_levels()


@pytest.fixture(scope="module")
def directory_of(variant_of, tmp_path_factory):
    """The model directory of a variant with its gates in 4 bits, made once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("coded") / "model"
            convert(variant_of(name)[0], made[name], predictors=True, gate="4bit")
        return made[name]

    return get


def test_a_margin_is_stored_no_smaller():
    values = np.random.default_rng(0).random(200) * np.logspace(-6, 4, 200)
    stored = np.concatenate([margin_above(float(value)) for value in values]).astype(np.float64)
    assert (stored >= values).all()
    assert (stored <= values * 1.001 + 1e-7).all()


def test_the_expected_margin_finds_the_expected_share():
    random = np.random.default_rng(3)
    gate = random.standard_normal((400, 96)).astype(np.float32)
    weight, bias = 0.5 + random.random(96).astype(np.float32), random.standard_normal(400).astype(np.float32) - 8
    codes, margin = coded_gate(lambda: iter([gate[:250], gate[250:]]), bias, normed_inputs(weight, None, 96))
    x = random.standard_normal((2000, 96)).astype(np.float32) * weight
    firing = x @ gate.T + bias > 0
    named = x @ GATE_CODE.decode(codes, 96).T + bias > -margin
    assert (firing & named).sum() / firing.sum() == pytest.approx(GATE_RECALL, abs=0.003)
    assert named.sum() < 1.5 * firing.sum()


@pytest.mark.parametrize("name", ["llama relu", "llama biases", "fatrelu by layer", "bamboo"])
def test_gates_in_4_bits_name_nearly_all_that_fire(directory_of, name):
    ids = np.random.default_rng(1).integers(4, 300, 150).tolist()
    inputs = Inputs(LAYERS, 1)
    with Model.open(directory_of(name), RunConfig(threads=1, io_threads=4)) as model:
        model.step([(model.new_sequence(), ids)], observer=inputs)
        gates = Gates(model)
        found = firing = named = 0
        for layer, ffn in enumerate(model.parts.ffns):
            x = inputs.of(layer)
            values = gates.magnitudes(layer, gates.products(layer, x))
            for row, value in zip(np.ascontiguousarray(x), values, strict=True):
                active = ffn.predict(row.ctypes.data)
                found += np.count_nonzero(value[active])
                firing += np.count_nonzero(value)
                named += len(active)
    assert found >= 0.98 * firing  # inputs are not as Gaussian as the margin supposes
    assert named < 1.6 * firing


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize(("d_model", "cut"), [(64, 0.0), (77, 0.2)])
def test_every_level_names_what_the_codes_say(tmp_path, simd, d_model, cut):
    ffn = write_ffn(tmp_path / "f", num_neurons=90, d_model=d_model, gated=True)
    layer = Ffn(ffn, activation="silu" if cut else "relu", activation_cut=cut, simd=simd, threads=2)
    codes = GATE_CODE.encode(ffn.gate.float().numpy() / 8)
    layer.layer.set_predictor({"gate": codes, "margin": np.full(1, 0.05, np.float16)})
    above, low, high = _core.firing_range("silu" if cut else "relu", 0.0, cut)
    for seed in range(20):
        x = random_input(ffn, seed)
        products = GATE_CODE.decode(codes, d_model) @ x.numpy()
        named = products > above - 0.05
        if low < high:
            named |= (products > low - 0.05) & (products < high + 0.05)
        edges = np.abs(products[:, None] - [above - 0.05, low - 0.05, high + 0.05]).min(axis=1)
        found = np.zeros(90, bool)
        found[layer.layer.predict(x.data_ptr())] = True
        assert ((found == named) | (edges < 1e-4)).all()
        assert 0 < found.sum() < 90


@pytest.mark.parametrize("codes", [(90, 33), (89, 34), (90, 68)])
def test_codes_of_another_shape_are_refused(tmp_path, codes):
    ffn = write_ffn(tmp_path / "f", num_neurons=90, gated=True)
    with pytest.raises(ValueError, match="do not fit the layer"):
        Ffn(ffn).layer.set_predictor({"gate": np.zeros(codes, np.uint8), "margin": np.zeros(1, np.float16)})
    plain = write_ffn(tmp_path / "g", num_neurons=90)
    with pytest.raises(ValueError, match="needs the gate itself in the rows"):
        Ffn(plain).layer.set_predictor({"gate": np.zeros((90, 34), np.uint8), "margin": np.zeros(1, np.float16)})


def test_logits_are_nearly_the_oracles(directory_of):
    ids = np.random.default_rng(7).integers(4, 300, 40).tolist()
    logits = []
    for mode in ("sparse", "oracle"):
        with Model.open(directory_of("llama relu"), RunConfig(mode=mode, threads=2, io_threads=4)) as model:
            sequence = model.new_sequence()
            logits.append(np.stack([model.step([(sequence, [token])])[0] for token in ids]))
    exact = logits[1]
    assert np.abs(logits[0] - exact).mean() < 0.1 * exact.std()


def test_a_conversion_says_and_counts_them(directory_of):
    directory = directory_of("llama relu")
    manifest, model = Manifest.load(directory), ModelDir.open(directory)
    assert manifest.rows.matrices == ("up", "gate", "down")
    assert predictor_ranks(directory / PREDICTORS, manifest) == [0] * LAYERS
    assert verify(directory).ok
    plan = memory_plan(model, context=64)
    assert plan.predictors == manifest.files[PREDICTORS].nbytes
    assert "the gate in 4 bits" in format_inspection(inspect(directory))


@pytest.mark.parametrize(
    ("activation", "threshold", "cut"),
    [
        *((name, 0.0, 0.0) for name in ("relu", "drelu", "silu")),
        *((name, 0.0, 0.11) for name in ("relu", "squared_relu", "silu", "gelu", "gelu_tanh", "quick_gelu")),
        ("fatrelu", 0.3, 0.0),
        ("silu", 0.0, 0.3),  # above what the negative side reaches
    ],
)
def test_where_an_activation_is_not_zero(activation, threshold, cut):
    x = np.concatenate([np.linspace(-6, 6, 4001), [-40.0, 40.0]]).astype(np.float32)
    values = x.copy()
    _core.activate(values, activation, threshold)
    fires = (np.abs(values) >= cut) & ((values != 0) | (x == 0))
    above, low, high = _core.firing_range(activation, threshold, cut)
    said = (x > above) | ((x > low) & (x < high))
    edges = np.abs(x[:, None] - np.array([above, low, high])).min(axis=1)
    assert ((said == fires) | (edges < 1e-3) | (x == 0)).all()
    assert (low < high) == (activation not in ("relu", "drelu", "squared_relu", "fatrelu") and 0 < cut < 0.2)
