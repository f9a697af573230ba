"""Quantised GGUF files keep their bits: every weight is the file's, and so are logits and tokens."""

import dataclasses
import itertools
import json

import gguf
import gguf_files
import numpy as np
import pytest
import torch
from arch_models import Variant, make_checkpoint, tokens
from arch_reference import ReferenceDecoder
from gguf_files import write_gguf
from offload_runs import DEVICE, DISK, MIXED, answers, policy
from planned import logits_of
from quantised_files import (
    ENCODED_AS,
    MIXTURES,
    NOT_KEPT,
    SHARING,
    WIDE,
    but_one_layer,
    experts_alone,
    make,
    mixed,
    name_of,
    of_codebooks,
    of_layers,
    of_matrices,
    of_plain_shared,
    of_tables,
    of_wide_shared,
    without_downs,
)
from safetensors.torch import load_file
from tiny_models import config_of
from weights_of_folders import try_to_open

from flashllm import _core
from flashllm.arch.registry import resident_shapes
from flashllm.base.codes.carried import PACKED_AS, PLANE_CODES
from flashllm.base.machine import process_nbytes
from flashllm.cli import main
from flashllm.config import RunConfig
from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.convert.kept import weights
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.errors import FormatError, UsageError
from flashllm.format import rows
from flashllm.format.manifest import MANIFEST, Manifest
from flashllm.format.model_files import FFN, RESIDENT
from flashllm.format.report.inspect import format_inspection, inspect
from flashllm.format.report.verify import verify
from flashllm.format.safetensors import read_header
from flashllm.offload.runtime.host_ops import HostOps
from flashllm.offload.runtime.tiers.scratch import Scratch, open_reader
from flashllm.offload.runtime.tiers.source import open_weights
from flashllm.offload.runtime.tiers.weight_plan import plan_weights
from flashllm.offload.runtime.tiers.weights import WeightStore
from flashllm.offload.shape import load_shape
from flashllm.offload.stages import Stage


@pytest.mark.parametrize("kind", [*ENCODED_AS, mixed, of_tables, of_layers, of_codebooks, *NOT_KEPT], ids=name_of)
def test_every_weight_and_every_logit_is_the_files(quantised, kind):
    (directory, kept), wide = quantised(kind).exact(), quantised(kind).wide()
    others = {mixed: "q4_k", of_tables: "q5_k", of_layers: "q6_k", of_codebooks: "iq3_s"}
    if kind in NOT_KEPT:
        assert (kept.rows.ups, kept.rows.downs) == NOT_KEPT[kind]
    else:
        assert kept.rows.encoding == (ENCODED_AS[kind] if isinstance(kind, str) else others[kind])
        ups = {of_layers: ("q5_k", "q4_k", "q6_k"), of_codebooks: ("iq2_s", "iq1_m", "iq3_s")}
        assert kept.rows.ups == ups.get(kind, ())
    assert kept.rows.has_plane == (kind is not without_downs)
    assert Manifest.load(directory) == kept
    with open_weights(directory) as found, open_weights(wide) as expected:
        for tensor, shape in expected.shapes.items():
            one, two = np.full(shape, np.nan, np.float32), np.empty(shape, np.float32)
            found.read({tensor: one})
            expected.read({tensor: two})
            np.testing.assert_array_equal(one, two, err_msg=tensor)
    np.testing.assert_array_equal(logits_of(directory, "dense"), logits_of(wide, "dense"))


def attend_queries(first, projected, out):
    """In the place of attention: what it gives are the queries."""
    out[:] = projected.queries[:, : out.shape[1]]


def layers_of(directory, x, first=0):
    """What the throughput engine's layers make of states x, as a prompt and as tokens; the bytes of its matrices."""
    pool, found = _core.ThreadPool(2), []
    with open_weights(directory) as source:
        plan = plan_weights(source, policy())
        ops = HostOps(source.block, source.dtype.name, pool)
        with (
            Scratch(directory.parent, plan.scratch_nbytes) as scratch,
            WeightStore(source, plan, reader=open_reader(), pool=pool, scratch=scratch) as store,
        ):
            for layer, decoding in itertools.product(range(source.num_layers), (False, True)):
                states, positions = x.copy(), np.arange(first, first + len(x))
                ops.layer(layer, store.layer(layer, 0), states, positions, attend_queries, decoding=decoding)
                found.append(states)
    matrices = [one for bundle in plan.bundles[: source.num_layers] for one in bundle.tensors.values()]
    return np.array(found), sum(one.nbytes for one in matrices)


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [*((kind, "llama") for kind in ("Q8_0", "Q4_0", "Q5_1", "Q2_K", "Q3_K", "IQ4_XS", "TQ2_0", "NVFP4", mixed)),
     *((kind, "llama") for kind in ("IQ3_S", "IQ2_S", of_layers, of_matrices, but_one_layer)), ("Q4_K", "olmoe"),
     (mixed, "qwen2_moe"), (of_wide_shared, "qwen2_moe"), (experts_alone, "gpt_oss")],
)  # fmt: skip
def test_the_throughput_engine_multiplies_them_as_they_are(quantised, tmp_path, kind, model_type):
    made = quantised(kind, model_type)
    directory, _ = made.kept()
    x = np.random.default_rng(0).standard_normal((40, WIDE["hidden_size"]), np.float32)
    (kept, small), (wide, large) = (layers_of(each, x) for each in (directory, made.wide()))
    assert small < (0.5 if kind is but_one_layer else 0.3) * large
    planned = load_shape(str(directory))
    if kind is not but_one_layer:
        assert planned.layers * planned.layer_bytes == pytest.approx(small, rel=0.15)  # where layers' codes differ
        of_file = load_shape(str(made.path))
        assert dataclasses.replace(of_file, name=planned.name, dtype_bytes=planned.dtype_bytes) == planned
    changed = wide - x
    error = np.linalg.norm(kept - wide, axis=(1, 2)) / np.linalg.norm(changed, axis=(1, 2))
    assert error.max() < 0.02, error  # inputs in codes of 8 bits
    for first, count in ((0, 1), (7, 2)):  # whatever is computed beside them
        rows = slice(first, first + count)
        alone, _ = layers_of(directory, x[rows], first)
        np.testing.assert_array_equal(alone[1::2], kept[1::2, rows])
    ids = [list(range(4, 4 + count)) for count in (1, 7, 65)]
    told = [answers(directory, ids, tmp_path, policy(weights=place), new=5) for place in (DEVICE, DISK, MIXED)]
    assert told[0] == told[1] == told[2]
    with open_weights(directory) as all_of_it:
        last = all_of_it.num_layers - 1
        with open_weights(directory, Stage(first=last, end=last + 1, layers=last + 1)) as stage:
            assert stage.plane_nbytes(last) == sum(each.nbytes for each in stage.plane(last).values()) > 0
            for name, values in all_of_it.plane(last).items():
                np.testing.assert_array_equal(stage.plane(last)[name], values)


@pytest.mark.parametrize(
    ("kind", "down"),
    [
        *(("Q2_K", "codes2"), ("Q6_K", "codes6"), ("TQ2_0", "codes2"), ("NVFP4", "codes_fp4")),
        *(("IQ3_XXS", "codes_iq3_xxs"), ("IQ2_S", "codes_iq2"), ("IQ1_M", "codes_iq1")),
    ],
)
def test_a_prompt_in_codes_is_near_to_one_in_fp32(quantised, kind, down):
    """Of 2 bits the down columns keep 2; those with a minimum for 16 neurons are not multiplied as codes. Inputs of
    weights of 2 bits have 8, those of ternary ones with one scale a token."""
    found = []
    for directory, manifest in (quantised(kind).kept(), quantised(kind).exact()):
        assert manifest.rows.down == down
        with Model.open(directory, RunConfig(mode="dense", threads=2, io_threads=4)) as model:
            found.append(model.step([(model.new_sequence(), list(range(10, 60)))], all_logits=True))
    assert np.abs(found[0] - found[1]).max() < (2e-2 if kind in ("Q2_K", "TQ2_0") else 2e-3) * found[1].std()


@pytest.mark.parametrize("kind", ["Q5_0", "Q6_K", "TQ2_0", "NVFP4", "IQ3_XXS", "IQ1_M", mixed], ids=name_of)
def test_single_tokens_are_multiplied_in_8_bits_unless_asked_otherwise(quantised, kind):
    directory, manifest = quantised(kind).kept()
    assert manifest.activations == "int16"
    ids = tokens(12, seed=2)
    found = []
    for together in (1, 2, 3, 4, 6):
        with Model.open(directory, RunConfig(mode="dense", threads=together, io_threads=4)) as model:
            sequence = model.new_sequence()
            parts = [model.step([(sequence, ids[i : i + together])], all_logits=True) for i in range(0, 12, together)]
            found.append(np.concatenate(parts))
    for others in found[1:]:
        np.testing.assert_array_equal(found[0], others)
    expected = ReferenceDecoder(quantised(kind).wide()).logits(ids).numpy()
    assert 1e-4 * expected.std() < np.abs(found[0] - expected).max() < 0.2 * expected.std()


def test_activations_are_a_choice_for_codes_alone(quantised, tmp_path):
    made = quantised("Q5_K")
    for activations, recorded in (("float32", None), ("int8", "int8")):
        assert made.kept(activations=activations)[1].activations == recorded
    with pytest.raises(UsageError, match="activations are for weights in codes, which it has none of; give --bits"):
        convert(made.folder, tmp_path / "wide", activations="int8")
    assert not (tmp_path / "wide").exists()


@pytest.mark.parametrize("kind", ["Q5_0", mixed], ids=["Q5_0", "mixed"])
def test_sparse_passes_compute_the_same(quantised, kind):
    made = quantised(kind, "arcee")
    (kept, _), wide = made.exact(predictors=True), made.wide(predictors=True)
    for mode in ("oracle", "dense", "sparse"):
        expected = logits_of(wide, mode)
        np.testing.assert_array_equal(logits_of(kept, mode), expected, err_msg=mode)
    np.testing.assert_allclose(logits_of(kept, "sparse", simd="scalar"), expected, atol=3e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [  # every kind where experts are shared and where gates and ups alternate; every mixture with two kinds
        *itertools.product(("Q4_0", experts_alone, mixed, of_codebooks), ("qwen2_moe", "gpt_oss")),
        *itertools.product((of_layers, "NVFP4"), MIXTURES),
    ],
    ids=name_of,
)
def test_experts_keep_their_bits(quantised, kind, model_type):
    (directory, kept), wide = quantised(kind, model_type).exact(), quantised(kind, model_type).wide()
    others = {experts_alone: "mxfp4", mixed: "q4_k", of_layers: "q6_k", of_codebooks: "iq3_s"}
    assert kept.rows.encoding == (others[kind] if kind in others else ENCODED_AS[kind])
    assert bool(kept.rows.ups) == (kind in (of_layers, of_codebooks))
    assert kept.rows.has_plane
    assert verify(directory).ok
    for mode in ("dense", "sparse"):
        expected = logits_of(wide, mode)
        np.testing.assert_array_equal(logits_of(directory, mode), expected, err_msg=mode)
    small = logits_of(directory, "sparse", cache_policy="window", window=1)
    np.testing.assert_array_equal(small, expected)


@pytest.mark.parametrize("kind", [mixed, but_one_layer], ids=name_of)
def test_neurons_keep_their_bits_where_the_rest_is_encoded_anew(quantised, tmp_path, kind):
    path, folder, told = quantised(kind).path, quantised(kind).folder, []
    found = convert(path, tmp_path / "found", keep=True, resident_encoding="int8_32", say=told.append)
    kept = convert(path, tmp_path / "kept", keep=True)
    wide = convert(folder, tmp_path / "wide", dtype="float16", resident_encoding="int8_32")
    assert found.files[FFN] == kept.files[FFN] != wide.files[FFN]
    assert (found.resident_encoding, found.other_encodings) == ("int8_32", {})
    ours, theirs = (load_file(tmp_path / each / RESIDENT) for each in ("found", "wide"))
    for name in resident_shapes(config_of(folder)):
        assert torch.equal(ours[name], theirs[name]), name
    (line,) = (line for line in told if "are kept" in line)
    assert "dequantised" not in line
    assert verify(tmp_path / "found").ok


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", NOT_KEPT, ids=name_of)
def test_what_is_not_kept_of_experts_is_their_layers_alone(quantised, kind, in_place):
    directory, kept = quantised(kind, "olmoe").exact(in_place=in_place)
    assert (kept.rows.ups, kept.rows.downs) == NOT_KEPT[kind]
    lying = {of_matrices: [1, 2], without_downs: []}.get(kind, [0, 2])  # of as many bits, of kinds that are kept
    assert [layer for layer in range(3) if kept.lying_experts(layer)] == (lying if in_place else [])
    assert verify(directory).ok
    expected = logits_of(quantised(kind, "olmoe").wide(), "sparse")
    for cache in ({}, {"cache_policy": "window", "window": 1}):
        np.testing.assert_array_equal(logits_of(directory, "sparse", **cache), expected)


def test_weights_in_nvfp4_are_what_its_numbers_mean(quantised):
    """Codes in E2M1, a number in E4M3 for sixteen, and one for a tensor or an expert; not what is for inputs."""
    path = quantised("NVFP4", "qwen2_moe").path
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with open_checkpoint(path) as checkpoint:
        for ours, theirs, expert in (
            ("model.layers.1.self_attn.o_proj.weight", "blk.1.attn_output", None),
            ("model.layers.1.mlp.experts.3.down_proj.weight", "blk.1.ffn_down_exps", 3),
        ):
            raw, scales = stored[f"{theirs}.weight"].data, stored[f"{theirs}.scale"].data
            assert len(scales) == (1 if expert is None else len(raw))
            raw, scale = (raw, scales[0]) if expert is None else (raw[expert], scales[expert])
            plain = gguf.dequantize(raw, gguf.GGMLQuantizationType.NVFP4).astype(np.float64) * float(scale)
            values = np.empty(plain.shape, np.float32)
            checkpoint.read(ours, 0, values)
            np.testing.assert_allclose(values, plain, rtol=2**-22, atol=0)
            assert np.abs(values).max() > 0


@pytest.mark.parametrize(("values", "message"), [([1.0, 2.0], "is of 2 tensors"), ([float("nan")], "is not finite")])
def test_scales_of_tensors_in_nvfp4_that_make_no_sense_are_named(tmp_path, monkeypatch, values, message):
    monkeypatch.setattr(gguf_files, "whole_scales", lambda weights: (np.array(values, np.float32), weights))
    source = make_checkpoint(tmp_path / "hf", Variant("llama", {**WIDE, "hidden_act": "silu"}))
    path = write_gguf(source, tmp_path / "model.gguf", lambda name: "NVFP4" if "attn_q" in name else "F32")
    with pytest.raises(FormatError, match=message):
        try_to_open(path)


def test_experts_in_nvfp4_are_not_read_where_they_lie(quantised, tmp_path):
    """Their scales are not in the blocks."""
    lines = []
    convert(quantised("NVFP4", "qwen3_moe").path, tmp_path / "model", keep=True, in_place=True, say=lines.append)
    assert any("scales that lie apart" in line for line in lines)


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [*((of_wide_shared, name) for name in SHARING), (of_plain_shared, "qwen2_moe"), (of_plain_shared, "nemotron_h")],
    ids=name_of,
)
def test_shared_experts_of_other_kinds_are_beside(quantised, kind, model_type):
    directory, manifest = quantised(kind, model_type).exact()
    architecture = manifest.architecture
    assert (manifest.rows.encoding, architecture.shared_neurons) == ("q4_k", 0)
    assert manifest.rows.has_plane
    names = {"up": "q5_k", "gate": "int8_32", "down": "q6_k"} if kind is of_wide_shared else {}
    shapes = resident_shapes(config_of(directory))
    for layer, matrix in itertools.product(architecture.mixtures, architecture.matrices):
        name = f"layers.{layer}.beside_{matrix}.weight"
        assert name in shapes
        assert manifest.encoding_of(name).name == names.get(matrix, "float32")
    assert verify(directory).ok
    for mode in ("dense", "sparse"):
        expected, found = (logits_of(each, mode) for each in (quantised(kind, model_type).wide(), directory))
        np.testing.assert_allclose(found, expected, atol=2e-5 * expected.std(), rtol=0, err_msg=mode)
    small = logits_of(directory, "sparse", cache_policy="window", window=1)
    np.testing.assert_array_equal(small, found)


def test_shared_experts_in_memory_are_said_and_in_the_plan(quantised, tmp_path):
    lines = []
    path = quantised(of_wide_shared, "qwen2_moe").path
    manifest = convert(path, tmp_path / "model", keep=True, say=lines.append)
    assert "; shared experts, of other kinds, in memory, " in lines[0]
    tensors = read_header(tmp_path / "model" / RESIDENT).tensors
    with Model.open(tmp_path / "model", RunConfig(threads=1, io_threads=1)) as model:
        memory = model.plan.memory
    beside = sum(info.nbytes for name, info in tensors.items() if ".beside_" in name)
    vectors = sum(PACKED_AS[name].vector_nbytes(256) for name in ("q5_k", "int8_32", "q6_k"))
    assert beside == manifest.architecture.num_layers * 256 * vectors
    others = [info.nbytes for name, info in tensors.items() if "flashllm." not in name and name not in manifest.planes]
    assert beside < sum(others) <= memory.resident < sum(others) + beside


def test_shared_experts_that_are_as_the_others_stay_in_rows(quantised):
    assert quantised(mixed, "qwen2_moe").exact()[1].architecture.shared_neurons == 256


def test_what_is_kept_is_told_and_counted(quantised, tmp_path, capsys):
    path = quantised(mixed).path
    assert main(["convert", str(path), str(tmp_path / "model")]) == 0
    kept = "the bits of model.gguf are kept: neurons q4_k, down codes4 or codes6; scales of the down columns in memory"
    assert kept in capsys.readouterr().err
    manifest = Manifest.load(tmp_path / "model")
    assert manifest.down_scales == ("shared_16", *["shared_32_min"] * (manifest.architecture.num_layers - 1))
    assert manifest.resident_encoding == "q4_k"
    assert manifest.other_encodings["embedding.weight"] == "int8_32"
    assert verify(tmp_path / "model").ok
    facts = inspect(tmp_path / "model")
    assert facts["down_scales_nbytes"] == manifest.planes_nbytes > 0
    assert "down codes4 or codes6" in format_inspection(facts)
    assert main(["plan", str(tmp_path / "model"), "--memory", "6GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["down_scale_bytes"] == manifest.planes_nbytes
    assert main(["convert", str(path), str(tmp_path / "anew"), "--bits", "4"]) == 0
    assert Manifest.load(tmp_path / "anew").rows.encoding == "int4_32"


@pytest.mark.parametrize(
    ("model_type", "widths", "in_place"),
    [("llama", (1536, 64), False), ("olmoe", (768, 192), False), ("olmoe", (768, 192), True)],
)
def test_each_layer_has_down_columns_of_its_own_width(tmp_path, monkeypatch, model_type, widths, in_place):
    """The bits of earlier versions, which had all layers' in the widest, in fewer bytes."""
    path, _ = make(tmp_path, mixed, model_type, hidden_size=widths[0], head_dim=widths[1])
    monkeypatch.setattr(rows, "STREAM_BLOCK_NBYTES", 1 << 18)  # a layer is several blocks
    options = {"dtype": "float32", "activations": "float32", "keep": True, "in_place": in_place}
    own = convert(path, tmp_path / "own", **options)
    monkeypatch.setattr(weights, "plane_code_of", lambda codes: PLANE_CODES["codes6"])
    wide = convert(path, tmp_path / "wide", **options)
    assert own.rows.downs == ("codes6", *["codes4"] * (own.architecture.num_layers - 1))
    assert (wide.rows.down, wide.rows.downs) == ("codes6", ())
    assert own.layout(0) == wide.layout(0)
    assert own.layout(1).stride < wide.layout(1).stride
    assert all(verify(tmp_path / name).ok for name in ("own", "wide"))
    process, found = process_nbytes() + 100_000_000, {}
    for name, layouts in (("own", own.layouts), ("wide", wide.layouts)):
        with Model.open(tmp_path / name, RunConfig(threads=2, io_threads=4), process=process) as model:
            plan = model.plan.memory
        limits = None, plan.minimum_nbytes + plan.neuron_cache // 3
        found[name] = [logits_of(tmp_path / name, None, process, memory=limit) for limit in limits]
        assert plan.rows_nbytes(plan.cache_rows) == sum(layout.layer_nbytes for layout in layouts)
    for one, two in zip(found["own"], found["wide"], strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(("model_type", "in_place"), [("llama", False), ("olmoe", False), ("olmoe", True)])
def test_each_layer_has_a_row_of_its_own(tmp_path, model_type, in_place):
    path, _ = make(tmp_path, of_layers, model_type, hidden_size=768, head_dim=192)
    exact = {"dtype": "float32", "activations": "float32"}
    manifest = convert(path, tmp_path / "model", **exact, keep=True, in_place=in_place)
    layouts = manifest.layouts
    assert [each.described for each in layouts] == ["q5_k, down codes6", "q4_k, down codes4", "q6_k, down codes4"]
    assert {each.ups + each.downs for each in layouts} == {()}
    assert layouts[1].stride < min(layouts[0].stride, layouts[2].stride) <= manifest.rows.stride
    assert Manifest.load(tmp_path / "model") == manifest
    assert verify(tmp_path / "model").ok
    process = process_nbytes() + 100_000_000
    with Model.open(tmp_path / "model", RunConfig(threads=2, io_threads=4), process=process) as model:
        plan = model.plan.memory
    assert plan.rows_nbytes(plan.cache_rows) == sum(layout.layer_nbytes for layout in layouts)
    limits = None, plan.minimum_nbytes + plan.neuron_cache // 3
    whole, part = (logits_of(tmp_path / "model", None, process, memory=limit) for limit in limits)
    np.testing.assert_array_equal(whole, part)


def test_a_layer_whose_gates_and_ups_have_other_forms_is_dequantised_alone_and_said(tmp_path):
    path, _ = make(tmp_path, lambda name: "Q5_1" if name == "blk.0.ffn_up.weight" else "Q4_0")
    lines = []
    manifest = convert(path, tmp_path / "model", keep=True, say=lines.append)
    assert (manifest.rows.encoding, manifest.rows.down) == ("float16", "codes4")
    assert manifest.rows.ups == ("float16", "int4_32", "int4_32")
    assert "2 matrices, layers.0.up.weight the first, dequantised to float16" in lines[0]
    apart = convert(path, tmp_path / "apart", keep=True, gate="resident")  # all in one
    assert (apart.rows.encoding, apart.rows.ups) == ("float16", ())
    with Model.open(tmp_path / "model", RunConfig(mode="dense", threads=1, io_threads=4)) as model:
        sequence = model.new_sequence()
        logits = model.step([(sequence, [5, 9, 40])], all_logits=True)
    expected = ReferenceDecoder(tmp_path / "model").logits([5, 9, 40]).numpy()
    assert np.abs(logits - expected).max() < 0.1 * expected.std()


def test_what_a_manifest_says_of_scales_is_checked(quantised, tmp_path):
    convert(quantised("Q4_0").path, tmp_path / "model", keep=True)
    file = tmp_path / "model" / MANIFEST
    written = json.loads(file.read_text())
    del written["sha256"]
    of_scales = [
        ([], "down_scales must name"),
        (["half_64"] * len(written["down_scales"]), "not one of half_32"),
        ([{}] * len(written["down_scales"]), "not one of half_32"),
        (["half_32", "", "half_32"], "'' is not one of half_32"),
        (["half_32_min"] * len(written["down_scales"]), "minimums is missing"),
    ]
    of_rows = [
        ({"down_encoding": "codes3"}, "codes3"),
        ({"encoding": "codes4"}, "codes4"),
        ({"downs": ["codes4"] * 3}, "written only where they differ"),
        ({"downs": ["codes4", "codes6"]}, "down_encoding must be codes6, the widest"),
        ({"downs": ["codes2", "codes4"]}, "downs must name 3 encodings, not 2"),
        ({"downs": ["codes4", "codes_fp4", "codes4"]}, "codes_fp4"),
        ({"downs": ["codes4", "int8_32", "codes4"]}, "written only where they differ"),
        ({"downs": ["codes4", "float16", "codes4"]}, "down_encoding must be float16"),
        ({"ups": ["int4_32"] * 3}, "ups are written only where they differ"),
        ({"ups": ["int4_32", "q6_k", "q3"]}, "ups are written only where they differ"),
        ({"ups": ["int4_32", "q6_k", "q4_k"]}, "encoding must be q6_k, the longest"),
        ({"ups": ["int4_32", "q2_k"]}, "ups must name 3 encodings, not 2"),
        ({"ups": ["int4_32", "bfloat16", "q2_k"]}, "the longest of ups"),
    ]
    changes = [({"down_scales": scales}, message) for scales, message in of_scales]
    changes += [({"rows": {**written["rows"], **change}}, message) for change, message in of_rows]
    for change, message in changes:
        file.write_text(json.dumps({**written, **change}))
        with pytest.raises(FormatError, match=message):
            Manifest.load(tmp_path / "model")


def test_a_scale_that_is_no_number_is_named(tmp_path):
    path, _ = make(tmp_path, "Q4_0")
    with open_checkpoint(path) as checkpoint:
        at = checkpoint._files["model.layers.1.mlp.down_proj.weight"]._stored.offset
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(np.array([np.nan], "<f2").tobytes())
    with pytest.raises(FormatError, match=r"down_proj.*a scale is not finite: damaged"):
        convert(path, tmp_path / "model", keep=True)


def test_what_codebooks_become_is_said_with_its_bytes(quantised, tmp_path):
    lines = []
    convert(quantised(of_codebooks, "qwen3_moe").path, tmp_path / "model", keep=True, say=lines.append)
    one = dict.fromkeys(("IQ3_S", "IQ2_XS", "IQ1_M"), 2) | dict.fromkeys(("IQ3_XXS", "IQ2_S"), 1)  # matrices a layer
    stored = sum(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1] * each for kind, each in one.items())
    coded = sum(PACKED_AS[ENCODED_AS[kind]].vector_nbytes(256) * each for kind, each in one.items())
    assert (
        f"; IQ1_M and IQ2_S and IQ2_XS and IQ3_S and IQ3_XXS coded anew, without loss, in {coded / stored:.1f} "
        in (lines[0])
    )
    assert 1.2 < PACKED_AS["iq3_s"].vector_nbytes(2048) / (8 * 110) < 1.3
    convert(quantised("Q3_K").path, tmp_path / "same", keep=True, say=lines.append)
    assert "coded anew" not in lines[-1]


def test_codes_are_packed_and_unpacked():
    assert set(ENCODED_AS.values()) == set(PACKED_AS)
