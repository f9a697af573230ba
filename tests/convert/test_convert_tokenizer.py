"""`tokenizer.json` of a conversion: copied, or made of older files and the same as the source's own tokenizer."""

import json
import shutil

import pytest
import tokenizers
from old_tokenizers import as_published
from scripts import run_python
from tiny_models import make_tiny_opt
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoTokenizer

from flashllm.cli import main
from flashllm.convert import tokenizer
from flashllm.convert.checkpoint import child
from flashllm.convert.checkpoint.source import companion_files
from flashllm.convert.run import convert
from flashllm.convert.tokenizer import TEXTS, TOKENIZER, difference, make_tokenizer, read_tokenizer
from flashllm.errors import FormatError, UnsupportedModelError
from flashllm.format.report.verify import verify


@pytest.fixture(scope="module")
def modern(tmp_path_factory):
    """A folder with `tokenizer.json`."""
    return make_tiny_opt(tmp_path_factory.mktemp("modern") / "hf")


@pytest.fixture(scope="module")
def published(modern, tmp_path_factory):
    return as_published(modern, tmp_path_factory.mktemp("published") / "hf")


@pytest.fixture(scope="module")
def converted(published, tmp_path_factory):
    target = tmp_path_factory.mktemp("converted") / "model"
    manifest = convert(published, target)
    assert TOKENIZER in manifest.files
    return target


def byte_level_bpe(published):
    """What the vocabulary files mean, made by hand."""
    vocab = json.loads((published / "vocab.json").read_text())
    merges = [tuple(line.split(" ")) for line in (published / "merges.txt").read_text().splitlines()[1:]]
    made = tokenizers.Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["</s>", "<pad>"])
    made.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 2)])
    return made


def test_a_published_opt_gets_a_tokenizer_that_begins_every_text(converted, published):
    made, by_hand = read_tokenizer(converted / TOKENIZER), byte_level_bpe(published)
    theirs = AutoTokenizer.from_pretrained(published)
    for text in (*TEXTS, "a</s>b <pad> c", "One day a girl found a red ball."):
        ids = made.encode(text).ids
        assert ids[0] == 2
        assert ids == by_hand.encode(text).ids == theirs(text)["input_ids"]
        assert made.encode(text, add_special_tokens=False).ids == ids[1:]
    assert verify(converted).ok


def test_a_tokenizer_that_is_there_is_copied(modern, tmp_path):
    manifest = convert(modern, tmp_path / "model")
    assert (tmp_path / "model" / TOKENIZER).read_bytes() == (modern / TOKENIZER).read_bytes()
    assert TOKENIZER in manifest.files


def test_a_folder_without_a_tokenizer_is_converted_with_a_notice(modern, tmp_path, capsys):
    bare = tmp_path / "hf"
    shutil.copytree(modern, bare, ignore=lambda folder, names: [name for name in names if name.startswith("token")])
    assert main(["convert", str(bare), str(tmp_path / "model")]) == 0
    assert "has no tokenizer: the model takes token ids alone" in capsys.readouterr().err
    assert not (tmp_path / "model" / TOKENIZER).exists()
    assert verify(tmp_path / "model").ok


def test_a_damaged_tokenizer_stops_the_conversion_before_it_begins(modern, tmp_path):
    damaged = tmp_path / "hf"
    shutil.copytree(modern, damaged)
    (damaged / TOKENIZER).write_text("{}")
    with pytest.raises(FormatError, match=r"tokenizer\.json: is damaged"):
        convert(damaged, tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_files_that_make_no_tokenizer_stop_it_too(published, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "ask_child", lambda function, *arguments: function(*arguments))  # a child takes 5 s
    damaged = tmp_path / "hf"
    shutil.copytree(published, damaged)
    (damaged / "vocab.json").write_text("[")
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer\.json can be made of its .+; put one"):
        convert(damaged, tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_a_difference_names_the_text(published, converted):
    theirs = AutoTokenizer.from_pretrained(published)
    assert difference(read_tokenizer(converted / TOKENIZER), theirs) is None
    without_beginning = read_tokenizer(converted / TOKENIZER)
    without_beginning.post_processor = processors.ByteLevel(trim_offsets=False)
    found = difference(without_beginning, theirs)
    assert "'The quick brown fox jumps over the lazy dog.' becomes [" in found
    assert "instead of [2, " in found
    assert difference(byte_level_bpe(published), theirs).endswith("become another text")  # it has no decoder
    special = read_tokenizer(converted / TOKENIZER)
    special.add_special_tokens(["between"])
    assert "</s>before </s> between" in difference(special, theirs)


def test_the_same_source_gives_the_same_bytes_and_the_caller_neither_torch_nor_transformers(published, converted):
    code = (
        "import sys; from pathlib import Path; from flashllm.convert.checkpoint.source import companion_files;"
        "from flashllm.convert.tokenizer import make_tokenizer; folder = Path(sys.argv[1]);"
        "assert make_tokenizer(folder, companion_files(folder)) == Path(sys.argv[2]).read_bytes();"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    assert run_python("-c", code, published, converted / TOKENIZER).stdout.strip() == "[]"


def test_a_child_that_dies_says_how(published, monkeypatch):
    monkeypatch.setattr(child, "_CODE", "import sys; sys.exit('no memory')")
    with pytest.raises(UnsupportedModelError, match="no memory"):
        make_tokenizer(published, companion_files(published))
