"""Models in fewer bits: every architecture computes what its coded weights say, in every mode and at every length."""

import json

import numpy as np
import pytest
import torch
from arch_models import VARIANTS, make_checkpoint, tokens
from arch_reference import ReferenceDecoder
from planned import logits_of
from safetensors.torch import load_file, save_file

from flashllm.base.group_codes import GROUP_CODES
from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.errors import FormatError, UsageError
from flashllm.format.install import change_manifest
from flashllm.format.manifest import MANIFEST, Manifest
from flashllm.format.model_dir import ModelDir
from flashllm.format.report.inspect import format_inspection, inspect
from flashllm.format.report.verify import verify
from flashllm.offload.runtime.tiers.source import open_weights

TOLERANCE = 3e-4  # of fp32 logits, which are of the order of 1 to 10
PAIRS = [("int8_32", None), (None, "int4_64"), ("int4_32_min", "int8_64"), ("int4_32", "int4_64_min")]


def check_logits(directory, lengths):
    """Against the weights of the codes, with activations in fp32."""
    change_manifest(directory, activations=None)
    reference = ReferenceDecoder(directory)
    architecture = ModelDir.open(directory).architecture
    modes = {True: ("dense", "oracle"), False: ("dense",)}[architecture.sparse]
    for mode in ("dense", "sparse") if architecture.experts and not architecture.sparse else modes:
        with Model.open(directory, RunConfig(mode=mode, threads=1, io_threads=4)) as model:
            for length in lengths:
                ids = tokens(length, seed=length)
                sequence = model.new_sequence()
                logits = model.step([(sequence, ids)], all_logits=True)
                np.testing.assert_allclose(logits, reference.logits(ids).numpy(), atol=TOLERANCE, rtol=0)
                sequence.close()


FIRST_OF_ITS_TYPE = list({variant.model_type: name for name, variant in reversed(VARIANTS.items())}.values())


@pytest.mark.parametrize("name", FIRST_OF_ITS_TYPE)
def test_every_architecture_computes_what_its_codes_say(variant_of, tmp_path, name):
    source, _ = variant_of(name)
    convert(source, tmp_path / "model", encoding="int8_32", resident_encoding="int4_32", predictors=True)
    check_logits(tmp_path / "model", (5, 20))


@pytest.mark.parametrize("name", ["opt narrow embedding", "llama"])
@pytest.mark.parametrize(("encoding", "resident"), PAIRS)
def test_every_encoding_gives_the_logits_of_its_codes(variant_of, tmp_path, name, encoding, resident):
    source, _ = variant_of(name)
    convert(source, tmp_path / "model", encoding=encoding, resident_encoding=resident, predictors=True)
    check_logits(tmp_path / "model", (1, 8, 9, 70))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_codes_beside_16_bits(tmp_path, dtype):
    source = make_checkpoint(tmp_path / "hf", VARIANTS["opt"], dtype=dtype)
    convert(source, tmp_path / "wide", predictors=True)
    convert(source, tmp_path / "model", encoding="int8_32", resident_encoding="int8_32", predictors=True)
    found = []
    for path in (tmp_path / "wide", tmp_path / "model"):
        with Model.open(path, RunConfig(mode="oracle", threads=1, io_threads=4)) as model:
            sequence = model.new_sequence()
            logits = model.step([(sequence, tokens(40))], all_logits=True)
            found.append(np.concatenate([logits, model.step([(sequence, tokens(3))])]))
    assert np.abs(found[1] - found[0]).max() < 0.1 * found[0].std()


@pytest.mark.parametrize(("encoding", "resident"), [("int8_32", "int4_32"), ("int4_32_min", "int8_64")])
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_activations_in_16_and_8_bits(variant_of, tmp_path, name, encoding, resident):
    source, _ = variant_of(name)
    convert(source, tmp_path / "model", encoding=encoding, resident_encoding=resident, predictors=True)
    assert Manifest.load(tmp_path / "model").activations == "int16"
    ids = tokens(30)
    expected = ReferenceDecoder(tmp_path / "model").logits(ids).numpy()
    modes = ("dense", "oracle", "sparse") if name == "opt" else ("dense",)
    found = {}
    for mode in modes:
        for threads in (1, 3):
            with Model.open(tmp_path / "model", RunConfig(mode=mode, threads=threads, io_threads=4)) as model:
                sequence = model.new_sequence()
                parts = [model.step([(sequence, ids[i : i + 3])], all_logits=True) for i in range(0, 30, 3)]
                found[mode, threads] = np.concatenate(parts)
    for mode in modes:
        np.testing.assert_array_equal(found[mode, 1], found[mode, 3])
    for mode in modes[:2]:
        np.testing.assert_array_equal(found[mode, 1], found["dense", 1])
    difference = np.abs(found["dense", 1] - expected)
    assert 0 < difference.max() < 0.2 * expected.std()


def test_the_usual_activations(variant_of, tmp_path):
    convert(variant_of("opt")[0], tmp_path / "model", encoding="int8_32", resident_encoding="int8_64")
    assert inspect(tmp_path / "model")["activations"] == "int16"
    assert "int16 at most" in format_inspection(inspect(tmp_path / "model"))
    change_manifest(tmp_path / "model", activations=None)
    assert inspect(tmp_path / "model")["activations"] == "float32"
    assert "at most" not in format_inspection(inspect(tmp_path / "model"))
    with pytest.raises(ValueError, match="activations must be int16, int8, not 'int4'"):
        change_manifest(tmp_path / "model", activations="int4")


@pytest.fixture
def converted(variant_of, tmp_path):
    convert(variant_of("opt")[0], tmp_path / "model", encoding="int4_32", resident_encoding="int8_32", predictors=True)
    return tmp_path / "model"


def test_sparse_passes_use_the_codes(converted):
    found = []
    for cache in ({}, {"cache_policy": "window", "window": 1}):
        config = RunConfig(mode="sparse", threads=2, io_threads=4, **cache)
        with Model.open(converted, config) as model:
            sequence = model.new_sequence()
            model.step([(sequence, tokens(20))])
            found.append([model.step([(sequence, [token])]) for token in tokens(6, seed=1)])
    np.testing.assert_array_equal(found[0], found[1])


def test_the_manifest_says_how_weights_are_stored(converted):
    manifest = Manifest.load(converted)
    assert (manifest.rows.encoding, manifest.resident_encoding, manifest.dtype) == ("int4_32", "int8_32", "float32")
    assert verify(converted).ok
    facts = inspect(converted)
    assert facts["resident_encoding"] == "int8_32"
    assert facts["rows"]["row_nbytes"] == 2 * GROUP_CODES["int4_32"].vector_nbytes(manifest.rows.d_model)
    assert "int4_32" in format_inspection(facts)


def test_parameters_are_counted_as_weights(variant_of, tmp_path, converted):
    convert(variant_of("opt")[0], tmp_path / "wide")
    assert inspect(converted)["parameters"] == inspect(tmp_path / "wide")["parameters"]


def test_an_edited_encoding_is_refused(converted):
    path = converted / MANIFEST
    written = json.loads(path.read_text())
    for key, value, message in (
        ("resident_encoding", "int3_32", "resident_encoding must be one of int8_32"),
        ("resident_encoding", "int4_32", "not U8"),
        ("resident_encoding", None, "embedding.weight is U8"),
    ):
        path.write_text(json.dumps({**written, key: value}))
        with pytest.raises(FormatError, match=message):
            Manifest.load(converted)
    path.write_text(json.dumps({**written, "rows": {**written["rows"], "encoding": "float16"}}))
    with pytest.raises(FormatError, match="rows"):
        Manifest.load(converted)


@pytest.mark.parametrize("variant", ["opt", "olmoe"])
def test_an_interrupted_conversion_goes_on_with_its_encodings_alone(variant_of, tmp_path, variant):
    source, _ = variant_of(variant)
    convert(source, tmp_path / "whole", encoding="int4_64_min")

    def stop(what, done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "model", encoding="int4_64_min", progress=stop)
    with pytest.raises(UsageError):
        convert(source, tmp_path / "model", encoding="int4_32")
    convert(source, tmp_path / "model", encoding="int4_64_min")
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "model" / file.name).read_bytes() == file.read_bytes(), file.name


def test_unknown_encodings_are_refused(variant_of, tmp_path):
    source, _ = variant_of("opt")
    for encoding in ({"encoding": "int5_32"}, {"resident_encoding": "float16"}):
        with pytest.raises(UsageError, match="is not one of int8_32"):
            convert(source, tmp_path / "model", **encoding)


@pytest.mark.parametrize("name", ["opt", "opt narrow embedding", "llama relu", "llama", "gemma2", "gpt_neox"])
def test_12_bits_give_the_tokens_of_bfloat16(tmp_path, name):
    source = make_checkpoint(tmp_path / "hf", VARIANTS[name], dtype="bfloat16")
    convert(source, tmp_path / "wide", predictors=True)
    convert(source, tmp_path / "model", encoding="bf12", resident_encoding="bf12", predictors=True)
    sparse = ModelDir.open(tmp_path / "model").architecture.sparse
    for mode in ("sparse", "dense", "oracle") if sparse else ("dense",):
        wide, found = (logits_of(tmp_path / name, mode) for name in ("wide", "model"))
        np.testing.assert_array_equal(wide, found, err_msg=mode)


@pytest.mark.parametrize("matrix", ["fc1", "fc2", "q_proj", "embed_tokens"])
def test_a_matrix_of_rare_exponents_stays_bfloat16(tmp_path, matrix):
    source = make_checkpoint(tmp_path / "hf", VARIANTS["opt"], dtype="bfloat16")
    weights = load_file(source / "model.safetensors")
    name = next(name for name in sorted(weights, reverse=True) if name.endswith(f"{matrix}.weight"))
    spread = torch.exp2(torch.arange(weights[name].shape[0] * weights[name].shape[1]) % 40 - 40.0)
    weights[name] *= spread.reshape(weights[name].shape).to(torch.bfloat16)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "wide")
    manifest = convert(source, tmp_path / "model", encoding="bf12", resident_encoding="bf12")
    assert (manifest.rows.encoding, manifest.rows.down) == (
        "bfloat16" if matrix == "fc1" else "bf12",
        "bfloat16" if matrix == "fc2" else "bf12",
    )
    assert len(manifest.other_encodings) == (matrix in ("q_proj", "embed_tokens"))
    assert verify(tmp_path / "model").ok
    assert ("bfloat16" in format_inspection(inspect(tmp_path / "model")).split("row ")[1]) == (matrix in ("fc1", "fc2"))
    for mode in ("dense", "oracle"):
        wide, found = (logits_of(tmp_path / name, mode) for name in ("wide", "model"))
        np.testing.assert_array_equal(wide, found, err_msg=mode)
    with open_weights(tmp_path / "wide") as wide, open_weights(tmp_path / "model") as model:
        for tensor, shape in wide.shapes.items():
            one, two = (np.empty(shape, np.uint16) for _ in range(2))
            wide.read({tensor: one})
            model.read({tensor: two})
            np.testing.assert_array_equal(one, two, err_msg=tensor)


def test_what_a_manifest_says_of_single_matrices_is_checked(variant_of, tmp_path):
    source, _ = variant_of("opt")
    manifest = convert(source, tmp_path / "model", resident_encoding="int4_32", table_encoding="int8_32")
    assert manifest.other_encodings == {"embedding.weight": "int8_32"}
    check_logits(tmp_path / "model", (5, 20))
    path = tmp_path / "model" / MANIFEST
    written = json.loads(path.read_text())
    for change, message in (
        ({"other_encodings": {"embedding.weight": "int3"}}, "neither coded nor float32"),
        ({"other_encodings": {"final_norm.weight": "int8_32"}}, "no matrix that may be in codes"),
        ({"other_encodings": {"embedding.weight": "bf12"}}, "bf12 is for models in bfloat16"),
        ({"other_encodings": ["embedding.weight"]}, "must be an object"),
        ({"other_encodings": {}}, "embedding.weight is U8"),
        ({"rows": {**written["rows"], "down_encoding": "float32"}}, "only where it differs"),
        ({"rows": {**written["rows"], "down_encoding": "float16"}}, "row_nbytes must be 384"),
        ({"rows": {**written["rows"], "down_encoding": 4}}, "down_encoding"),
        ({"quality": {"perplexity": 0, "source_perplexity": 1.0, "scored_tokens": 5, "text": "x"}}, "above 0"),
    ):
        path.write_text(json.dumps({**written, **change}))
        with pytest.raises(FormatError, match=message):
            Manifest.load(tmp_path / "model")


def test_12_bits_are_for_bfloat16(tmp_path):
    source = make_checkpoint(tmp_path / "hf", VARIANTS["opt"], dtype="float16")
    for encoding in ({"encoding": "bf12"}, {"resident_encoding": "bf12"}):
        with pytest.raises(UsageError, match=r"12 bits hold bfloat16.*float16: use 16, 8 or 4 bits"):
            convert(source, tmp_path / "model", **encoding)
    convert(source, tmp_path / "model", dtype="bfloat16", encoding="bf12")
    assert verify(tmp_path / "model").ok
