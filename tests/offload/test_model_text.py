"""What a job knows of a model's text: also of folders that have no `tokenizer.json`."""

import shutil

import pytest
from old_tokenizers import as_published
from safetensors.numpy import load_file, save_file
from tiny_models import SENTENCES, make_tiny_opt

from flashllm.errors import UsageError
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
    assert ModelText.load(bare).encoder.tokenizer is None


def test_a_model_of_other_weights_is_another_one(modern, tmp_path):
    """Also where its name, its config and its sizes are the same."""
    name = modern.name
    same, other, template = (shutil.copytree(modern, tmp_path / kind / name) for kind in ("same", "other", "template"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.decoder.final_layer_norm.weight"] += 1
    save_file(tensors, other / "model.safetensors")
    (template / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    (same / "README.md").write_text("no part of the model")
    first, alike, *others = (ModelText.load(each).fingerprint for each in (modern, same, other, template))
    assert first == alike
    assert len({first, *others}) == 3


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(UsageError):
        ModelText.load(tmp_path)
