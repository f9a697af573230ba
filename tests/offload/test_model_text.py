"""What a job knows of a model's text: also of folders that have no `tokenizer.json`."""

import json
import shutil

import pytest
from arch_models import VARIANTS, make_checkpoint
from gguf_files import write_gguf
from old_tokenizers import as_published
from safetensors.numpy import load_file, save_file
from tiny_models import SENTENCES, make_tiny_opt

from flashllm import OffloadEngine
from flashllm.errors import UsageError
from flashllm.format.model_files import POPULARITY, PREDICTORS
from flashllm.offload.model_text import ModelText


@pytest.fixture(scope="module")
def modern(tmp_path_factory):
    return make_tiny_opt(tmp_path_factory.mktemp("modern") / "hf")


def test_vocabulary_files_are_enough(modern, tmp_path):
    published = as_published(modern, tmp_path / "published")
    before = sorted(published.iterdir())
    found, expected = ModelText.load(published), ModelText.load(modern)
    for text in SENTENCES:
        ids = expected.encoder.tokenizer.encode(text)
        assert found.encoder.tokenizer.encode(text) == ids
        assert found.encoder.tokenizer.decode(ids) == expected.encoder.tokenizer.decode(ids)
    assert found.token_text(2) == "</s>"
    assert sorted(published.iterdir()) == before, "the folder was written to"


def test_without_any_a_model_takes_token_ids(modern, tmp_path):
    bare = shutil.copytree(modern, tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    (bare / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    encoder = ModelText.load(bare).encoder
    assert encoder.tokenizer is None
    assert encoder.end_ids == {5, 7}


def test_a_model_of_other_weights_is_another_one(modern, tmp_path):
    """Also where its name, its config and its sizes are the same."""

    def copy(kind):
        return shutil.copytree(modern, tmp_path / kind / modern.name)

    same, other = copy("same"), copy("other")
    (same / "README.md").write_text("no part of the model")
    for name in (PREDICTORS, POPULARITY):
        (same / name).write_bytes(b"read by the other engine alone")
    tensors = load_file(other / "model.safetensors")
    tensors["model.decoder.final_layer_norm.weight"] += 1
    save_file(tensors, other / "model.safetensors")
    texts = {
        "chat_template.jinja": "{% for m in messages %}{{ m.content }}!{% endfor %}",
        "generation_config.json": '{"eos_token_id": 9}',
        "special_tokens_map.json": '{"eos_token": "</s>"}',
    }
    changed = [copy(name) for name in texts]
    for folder, (name, text) in zip(changed, texts.items(), strict=True):
        (folder / name).write_text(text)
    first, alike, *others = (ModelText.load(each).fingerprint for each in (modern, same, other, *changed))
    assert first == alike
    assert len({first, *others}) == 2 + len(texts)


def test_a_conversion_is_said_and_shown(tmp_path):
    """Of a file, which is converted first."""
    file = write_gguf(make_checkpoint(tmp_path / "hf", VARIANTS["llama"]), tmp_path / "tiny.gguf")
    said, shown = [], []
    model = ModelText.load(file, say=said.append, progress=lambda what, done, total: shown.append(what))
    assert said[0] == f"converting {file} once, into {model.path}"
    assert shown
    with OffloadEngine(file) as engine:
        assert engine.notices == []  # it is there


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(UsageError):
        ModelText.load(tmp_path)
