"""`convert --calibrate`: codes chosen on a text, resumable, for folders and GGUF files."""

import numpy as np
import pytest
from arch_models import VARIANTS, make_checkpoint, scale
from gguf_files import write_gguf

from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.errors import UnsupportedModelError, UsageError
from flashllm.format.model_files import FFN
from flashllm.format.report.verify import verify
from flashllm.offload.runtime.tiers.source import open_weights
from flashllm.pack.calibrated import calibration_tokens, convert_calibrated

BITS = {"encoding": "int4_32", "resident_encoding": "int4_32_min", "table_encoding": "int8_32"}
SENTENCE = "The little dog ran to the big tree and looked up. She was happy because the sun was warm. "


class Interrupt(Exception):
    """Raised midway."""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "sample.txt"
    path.write_text("".join(SENTENCE[i % 40 :] for i in range(40)))
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama") / "hf", VARIANTS["llama"])


def logits(directory, sequences):
    with Model.open(directory, RunConfig(mode="dense", threads=1, io_threads=4)) as model:
        return np.concatenate([model.step([(model.new_sequence(), ids)], all_logits=True) for ids in sequences])


@pytest.mark.parametrize(
    ("name", "share"),  # of the others' error: experts of random routers flip, and what is small of a state stays plain
    [
        *((name, 0.7) for name in ("opt", "llama", "bloom", "youtu")),
        *((name, 0.8) for name in ("qwen3_5", "kimi_linear", "falcon_h1", "nemotron_h shared beside", "lfm2")),
    ],
)
def test_codes_chosen_on_a_text_lose_less_on_it(tmp_path, text, name, share):
    source = make_checkpoint(tmp_path / "hf", VARIANTS[name])
    manifest = convert_calibrated(source, tmp_path / "chosen", text, **BITS)
    convert(source, tmp_path / "nearest", **BITS)
    convert(source, tmp_path / "wide")
    assert verify(tmp_path / "chosen").ok
    assert (manifest.rows.encoding, manifest.resident_encoding) == ("int4_32", "int4_32_min")
    assert manifest.other_encodings == {"embedding.weight": "int8_32"} | (
        {} if manifest.architecture.model_type in ("opt", "bloom", "youtu", "lfm2") else {"head.weight": "int8_32"}
    )
    assert not (tmp_path / "chosen.codes").exists()
    sequences = [ids[:60] for ids in calibration_tokens(source, text.read_text())[:3]]
    chosen, nearest, wide = (logits(tmp_path / each, sequences) for each in ("chosen", "nearest", "wide"))
    assert np.square(chosen - wide).mean() < share * np.square(nearest - wide).mean()


def test_an_interrupted_calibration_goes_on(tmp_path, text, llama):
    def stop(what, done, total):
        raise Interrupt

    with pytest.raises(Interrupt):
        convert_calibrated(llama, tmp_path / "one", text, **BITS, calibrating=stop)
    assert (tmp_path / "one.codes").exists()
    with pytest.raises(UsageError, match="left from another calibration; remove it"):
        convert_calibrated(llama, tmp_path / "one", text, **{**BITS, "encoding": "int8_64"})
    steps = []
    one = convert_calibrated(llama, tmp_path / "one", text, **BITS, calibrating=lambda *step: steps.append(step))
    two = convert_calibrated(llama, tmp_path / "two", text, **BITS)
    assert [step[1] for step in steps] == list(range(1, one.architecture.num_layers + 1))
    assert one.files == two.files


def test_a_gguf_file_is_calibrated_as_its_folder(tmp_path, text, llama):
    file = write_gguf(llama, tmp_path / "model.gguf")
    folder = convert_calibrated(llama, tmp_path / "one", text, encoding="int4_64", dtype="float32")
    converted = convert_calibrated(file, tmp_path / "two", text, encoding="int4_64", dtype="float32")
    assert converted.files[FFN] == folder.files[FFN]


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ({"mlp.up_proj": 1e8}, "scale is outside the range"),
        ({"post_attention_layernorm": 1e20, "mlp.up_proj": 1e-20, "mlp.gate_proj": 1e-20}, "inputs are not finite"),
    ],
)
def test_what_no_codes_can_be_chosen_for_is_refused(tmp_path, text, by, message):
    source = make_checkpoint(tmp_path / "hf", VARIANTS["llama"])
    for name, factor in by.items():
        scale(source, f"model.layers.1.{name}.weight", factor)
    with pytest.raises(UnsupportedModelError, match=rf"layers\.1\.\w+\.weight: .*{message}.*; leave these weights at"):
        convert_calibrated(source, tmp_path / "model", text, **BITS)


def test_what_cannot_be_is_refused(tmp_path, text, llama):
    with pytest.raises(UsageError, match="codes of 8 or 4 bits"):
        convert_calibrated(llama, tmp_path / "model", text)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(UsageError, match="at least 64 are needed"):
        convert_calibrated(llama, tmp_path / "model", short, **BITS)
    (tmp_path / "model").mkdir()
    with pytest.raises(UsageError, match="exists; remove it"):
        convert_calibrated(llama, tmp_path / "model", text, **BITS)


def words(seed, count):
    """A text of words in random order: another seed's is held out and of the same kind."""
    known = sorted(
        {*SENTENCE.replace(".", "").split(), "cat", "sat", "under", "that", "old", "house", "until", "rained"}
    )
    return " ".join(np.random.default_rng(seed).choice(known, count).tolist())


@pytest.mark.parametrize("name", ["olmoe", "qwen2_moe and a dense layer"])
def test_codes_of_experts_are_chosen_by_the_tokens_routed_to_them(tmp_path, name, monkeypatch):
    source, text = make_checkpoint(tmp_path / "hf", VARIANTS[name]), tmp_path / "words.txt"
    text.write_text(words(0, 2000))
    manifest = convert_calibrated(source, tmp_path / "chosen", text, encoding="int4_32")
    assert verify(tmp_path / "chosen").ok
    convert(source, tmp_path / "nearest", encoding="int4_32")
    convert(source, tmp_path / "wide")
    sequences = [ids[:60] for ids in calibration_tokens(source, words(1, 500))]
    chosen, nearest, wide = (logits(tmp_path / each, sequences) for each in ("chosen", "nearest", "wide"))
    assert np.square(chosen - wide).mean() < 0.8 * np.square(nearest - wide).mean()
    monkeypatch.setattr("flashllm.pack.layers._SUMS_NBYTES", 1)  # an expert at a time
    again = convert_calibrated(source, tmp_path / "again", text, encoding="int4_32")
    assert again.files == manifest.files


def test_matrices_of_experts_that_see_few_tokens_are_rounded_to_the_nearest(tmp_path):
    source, few = make_checkpoint(tmp_path / "hf", VARIANTS["olmoe"]), tmp_path / "few.txt"
    few.write_text(words(0, 25))
    said, found = [], {}
    convert_calibrated(source, tmp_path / "chosen", few, encoding="int4_32", say=said.append)
    convert(source, tmp_path / "nearest", encoding="int4_32")
    for each in ("chosen", "nearest"):
        with open_weights(tmp_path / each) as weights:
            found[each] = {
                name: np.empty(weights.shapes[f"layers.1.{name}.weight"], np.float32) for name in ("up", "gate")
            }
            weights.read({f"layers.1.{name}.weight": array for name, array in found[each].items()})
    assert "24 of 24 experts see fewer tokens of few.txt" in said[0]
    assert all(np.array_equal(found["chosen"][name], found["nearest"][name]) for name in ("up", "gate"))
