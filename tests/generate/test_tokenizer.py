"""A model directory's tokenizer: the same ids and text as transformers', and the facts beside it, checked."""

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_tokenizer
from transformers import AutoTokenizer

from flashllm.errors import FormatError
from flashllm.generate.tokenizer import Tokenizer

THEIRS = make_tokenizer(300)
OURS = Tokenizer(THEIRS.backend_tokenizer, special=THEIRS.special_tokens_map)


@pytest.fixture
def directory(tmp_path):
    THEIRS.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def write(path, value):
    path.write_text(json.dumps(value))


@given(st.text(max_size=60))
@settings(max_examples=120, deadline=None)
def test_ids_and_text_are_those_of_transformers(text):
    for add_special in (True, False):
        ids = THEIRS(text, add_special_tokens=add_special)["input_ids"]
        assert OURS.encode(text, add_special=add_special) == ids
        assert OURS.decode(ids) == THEIRS.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 299), max_size=30))
@settings(max_examples=200, deadline=None)
def test_any_ids_have_a_text(ids):
    assert OURS.decode(ids) == THEIRS.decode(ids, skip_special_tokens=True)


def test_a_directorys_tokenizer(directory):
    tokenizer, theirs = Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)
    assert tokenizer.encode("The dog</s>") == theirs("The dog</s>")["input_ids"]
    assert tokenizer.special == theirs.special_tokens_map
    assert tokenizer.end_ids == {2}
    assert tokenizer.chat_templates == {}


def test_padding_and_truncation_of_the_file_are_not_ours(directory):
    whole = json.loads((directory / "tokenizer.json").read_text())
    whole["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    whole["padding"] = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1}
    whole["padding"] |= {"pad_type_id": 0, "pad_token": "<pad>"}
    write(directory / "tokenizer.json", whole)
    text = "One day a girl found a red ball"
    assert Tokenizer.load(directory).encode(text) == THEIRS(text)["input_ids"]


def test_special_tokens_in_all_their_spellings(directory):
    def special():
        return Tokenizer.load(directory).special

    write(directory / "tokenizer_config.json", {"eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None})
    assert special() == {"eos_token": "</s>"}
    write(directory / "special_tokens_map.json", {"bos_token": "<s>", "eos_token": {"content": "<unk>"}})
    assert special() == {"eos_token": "<unk>", "bos_token": "<s>"}
    write(directory / "tokenizer_config.json", {"eos_token": "</s>", "added_tokens_decoder": {}, "add_bos_token": True})
    assert special() == {"eos_token": "</s>"}  # a newer config is complete
    (directory / "tokenizer_config.json").unlink()
    (directory / "special_tokens_map.json").unlink()
    assert special() == {}
    assert Tokenizer.load(directory).end_ids == set()


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ({"eos_token_id": [5, 7]}, {"eos_token_id": 9}, {5, 7}),
        ({"eos_token_id": 5}, None, {5}),
        ({}, {"eos_token_id": 9}, {9}),
        (None, {"eos_token_id": None}, {2}),
        (None, None, {2}),
    ],
)
def test_end_ids_come_from_the_first_that_names_them(directory, generation, model, expected):
    for name, value in (("generation_config.json", generation), ("config.json", model)):
        if value is not None:
            write(directory / name, value)
    assert Tokenizer.load(directory).end_ids == expected


def test_the_form_of_answers_is_in_templates_or_in_a_response_template(directory):
    config = json.loads((directory / "tokenizer_config.json").read_text())
    given = {"chat_template": "a", "response_template": {"fields": {"tool_calls": {"open": "<|tool_call>"}}}}
    write(directory / "tokenizer_config.json", {**config, **given})
    said = Tokenizer.load(directory).says_of_answers
    assert said.startswith("a\n")
    assert "<|tool_call>" in said


def test_some_special_tokens_stay_in_the_text():
    ids = [0, *OURS.encode("The dog", add_special=False), 3, *OURS.encode(" é", add_special=False), 2]
    assert OURS.showing(lambda token: token == "<unk>").decode(ids) == "The dog<unk> é"
    assert OURS.showing(lambda token: False).decode(ids) == OURS.decode(ids) == "The dog é"


def test_where_a_chat_template_comes_from(directory):
    def templates():
        return Tokenizer.load(directory).chat_templates

    config = json.loads((directory / "tokenizer_config.json").read_text())
    write(directory / "tokenizer_config.json", {**config, "chat_template": "a"})
    assert templates() == {"default": "a"}
    named = [{"name": "default", "template": "b"}, {"name": "rag", "template": "c"}]
    write(directory / "tokenizer_config.json", {**config, "chat_template": named})
    assert templates() == {"default": "b", "rag": "c"}
    write(directory / "chat_template.json", {"chat_template": "d"})  # a processor's
    assert templates() == {"default": "d"}
    (directory / "chat_template.jinja").write_text("é")
    assert templates() == {"default": "é"}
    assert AutoTokenizer.from_pretrained(directory).chat_template == "é"


def break_missing(directory):
    (directory / "tokenizer.json").unlink()
    return "tokenizer.json: is missing, .*convert the model again"


def break_cut(directory):
    text = (directory / "tokenizer.json").read_text()
    (directory / "tokenizer.json").write_text(text[: len(text) // 2])
    return "tokenizer.json: is damaged"


def break_other(directory):
    write(directory / "tokenizer.json", {"model": {"type": "BPE"}})
    return "tokenizer.json: is damaged"


def break_bytes(directory):
    (directory / "tokenizer.json").write_bytes(b"\xff\x00" * 100)
    return "tokenizer.json: is damaged"


def break_config(directory):
    (directory / "tokenizer_config.json").write_text("[1]")
    return "tokenizer_config.json: must hold a JSON object"


def break_template(directory):
    write(directory / "tokenizer_config.json", {"chat_template": [{"name": "default"}]})
    return "tokenizer_config.json: chat_template is neither"


def break_template_file(directory):
    (directory / "chat_template.jinja").write_bytes(b"ab\xff")
    return "chat_template.jinja: is not UTF-8 at byte 2"


def break_end(directory):
    write(directory / "generation_config.json", {"eos_token_id": ["</s>"]})
    return "generation_config.json: eos_token_id must be an id or a list of ids"


BREAKAGES = [value for name, value in list(globals().items()) if name.startswith("break_")]


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.__name__)
def test_what_is_wrong_is_named(directory, breakage):
    message = breakage(directory)
    with pytest.raises(FormatError, match=message):
        Tokenizer.load(directory)


def test_nothing_beside_the_tokenizer_is_needed(directory, tmp_path):
    (tmp_path / "bare").mkdir()
    shutil.copy(directory / "tokenizer.json", tmp_path / "bare")
    assert Tokenizer.load(tmp_path / "bare").encode("The dog") == THEIRS("The dog")["input_ids"]
