"""Tokenizers from GGUF metadata: the ids and texts of transformers' own classes over the same vocabulary."""

import json

import numpy as np
import pytest
from tiny_models import SENTENCES, make_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer, GPT2Tokenizer, LlamaTokenizer, Qwen2Tokenizer

from flashllm.convert.checkpoint.gguf.metadata import Metadata
from flashllm.convert.checkpoint.gguf.tokenizer import WORDS, read_vocabulary, special_ids, tokenizer_files
from flashllm.convert.tokenizer import TEXTS, difference
from flashllm.errors import FormatError, UnsupportedModelError

SAMPLES = (*SENTENCES, *TEXTS, "In 2024, 123456 people's 7 cats can't   sleep.\n\n\tWE'LL see: x=10**3;  ok")


@pytest.fixture(scope="module")
def byte_level():
    """(vocabulary, merges) of a byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|endoftext|>", "<|im_end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLES * 3, trainer)
    return _parts(tokenizer)


@pytest.fixture(scope="module")
def pieces():
    """(vocabulary, merges) of a BPE over SentencePiece's pieces, with bytes to fall back on."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Replace("▁", " ")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        SENTENCES * 3, trainers.BpeTrainer(vocab_size=480, special_tokens=special, show_progress=False)
    )
    return _parts(tokenizer)


def _parts(tokenizer):
    content = json.loads(tokenizer.to_str())["model"]
    vocabulary = sorted(content["vocab"], key=content["vocab"].get)
    return vocabulary, [tuple(merge) for merge in content["merges"]]


def _byte_level_metadata(parts, rule, **changes):
    vocabulary, merges = parts
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(vocabulary) - 2)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 1,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def _pieces_metadata(parts, **changes):
    vocabulary, merges = parts
    ranks = {left + right: rank for rank, (left, right) in reversed(list(enumerate(merges)))}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.scores": [float(-ranks.get(token, 10**6)) for token in vocabulary],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(vocabulary) - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def _files(metadata, tmp_path):
    path = tmp_path / "model.gguf"
    metadata = Metadata({key: value for key, value in metadata.items() if value is not None}, path)
    return tokenizer_files(metadata, read_vocabulary(metadata), path)


def _made(metadata, tmp_path):
    return Tokenizer.from_str(_files(metadata, tmp_path)["tokenizer.json"].decode())


@pytest.mark.parametrize(("rule", "kind"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)])
def test_byte_level_bpe_is_transformers(byte_level, tmp_path, rule, kind):
    vocabulary, merges = byte_level
    reference = kind({token: index for index, token in enumerate(vocabulary)}, merges)
    made = _made(_byte_level_metadata(byte_level, rule), tmp_path)
    assert difference(made, reference) is None
    for text in SAMPLES:
        assert made.encode(text).ids == reference(text)["input_ids"], text


def _cut(rule, text, parts, tmp_path):
    made = _made(_byte_level_metadata(parts, rule), tmp_path)
    decode = decoders.ByteLevel().decode
    return [decode([word]) for word, _ in made.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("rule", "text", "words"),
    [
        ("smollm", "in 2024 don't", ["in", " ", "2", "0", "2", "4", " don", "'t"]),
        ("gpt-2", "in 2024 don't", ["in", " 2024", " don", "'t"]),
        ("qwen2", "in 2024 DON'T", ["in", " ", "2", "0", "2", "4", " DON", "'T"]),
        ("llama-bpe", "in 20245 DON'T", ["in", " ", "202", "45", " DON", "'T"]),
        ("falcon", "a 20245!!b", ["a", " ", "202", "45", "!!", "b"]),
        ("default", "a 20245!!b", ["a", " ", "202", "45", "!!", "b"]),
        ("tekken", "helloWorld 20's", ["hello", "World", " ", "2", "0", "'s"]),
        ("gpt-4o", "helloWorld's 2024", ["hello", "World's", " ", "202", "4"]),
    ],
)
def test_words_are_cut_by_the_named_rule(byte_level, tmp_path, rule, text, words):
    assert _cut(rule, text, byte_level, tmp_path) == words


@pytest.mark.parametrize("rule", WORDS)
def test_every_rule_keeps_every_character(byte_level, tmp_path, rule):
    made = _made(_byte_level_metadata(byte_level, rule), tmp_path)
    for text in SAMPLES:
        expected = made.normalizer.normalize_str(text) if made.normalizer else text
        assert made.decode(made.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == expected


def test_sentencepiece_is_llamas(pieces, tmp_path):
    vocabulary, merges = pieces
    reference = LlamaTokenizer({token: index for index, token in enumerate(vocabulary)}, merges, legacy=True)
    made = _made(_pieces_metadata(pieces), tmp_path)
    for text in SAMPLES:
        ids = made.encode(text).ids  # SentencePiece adds a space always, this class only where there is none
        assert ids == [1, *reference(f" {text}" if text else "", add_special_tokens=False)["input_ids"]], text
        assert made.decode(ids) == text


def test_sentencepiece_without_a_leading_space_is_gemmas(pieces, tmp_path):
    vocabulary, merges = pieces
    reference = GemmaTokenizer({token: index for index, token in enumerate(vocabulary)}, merges)
    made = _made(_pieces_metadata(pieces, add_space_prefix=False, add_bos_token=False), tmp_path)
    for text in SAMPLES:
        ids = made.encode(text).ids
        assert ids == reference(text, add_special_tokens=False)["input_ids"], text
        assert made.decode(ids) == text


def test_what_begins_and_ends_a_text(byte_level, pieces, tmp_path):
    plain = _made(_byte_level_metadata(byte_level, "gpt-2"), tmp_path).encode("a b").ids
    metadata = _byte_level_metadata(byte_level, "gpt-2", add_bos_token=True, add_eos_token=True)
    assert _made(metadata, tmp_path).encode("a b").ids == [1, *plain, 0]
    assert _made(_byte_level_metadata(byte_level, "llama-bpe"), tmp_path).encode("a").ids[0] == 1
    assert _made(_pieces_metadata(pieces), tmp_path).encode("a").ids[0] == 1
    with pytest.raises(FormatError, match="texts get a bos token, but"):
        _files(_byte_level_metadata(byte_level, "gpt-2", add_bos_token=True, bos_token_id=None), tmp_path)


def test_special_tokens_are_whole_and_leave_the_text(byte_level, tmp_path):
    metadata = _byte_level_metadata(byte_level, "gpt-2", token_type=[3, 4, *[1] * (len(byte_level[0]) - 2)])
    made = _made(metadata, tmp_path)
    ids = made.encode("a<|endoftext|>b<|im_end|>").ids
    assert {0, 1} <= set(ids)
    assert made.decode(ids) == "ab<|im_end|>"  # the second is the user's, and shown


def test_the_files_beside_say_what_the_metadata_says(byte_level, tmp_path):
    metadata = {**_byte_level_metadata(byte_level, "smollm"), "tokenizer.chat_template": "{{ x }}"}
    files = _files(metadata, tmp_path)
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<|im_end|>", "<|endoftext|>")
    assert json.loads(files["generation_config.json"]) == {"bos_token_id": 1, "eos_token_id": [0, 1]}
    assert files["chat_template.jinja"] == b"{{ x }}"
    assert special_ids(Metadata(metadata, tmp_path), 700) == {"bos_token_id": 1, "eos_token_id": 0}
    assert _files({}, tmp_path) == {}


def test_an_unknown_rule_or_kind_needs_a_tokenizer_beside(byte_level, tmp_path):
    for changes, message in (
        ({"pre": "new-rule"}, r"rule 'new-rule', which is not known; put the model's tokenizer\.json beside"),
        ({"model": "t5"}, r"kind 't5', which is not known; put the model's tokenizer\.json beside"),
    ):
        metadata = _byte_level_metadata(byte_level, "gpt-2", **changes)
        with pytest.raises(UnsupportedModelError, match=message):
            _files(metadata, tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(
        _files(_byte_level_metadata(byte_level, "gpt-2"), tmp_path)["tokenizer.json"]
    )
    assert _files(metadata, tmp_path)["tokenizer.json"] == (tmp_path / "tokenizer.json").read_bytes()
    make_tokenizer(300).save_pretrained(tmp_path)
    with pytest.raises(FormatError, match="is another model's: token 0"):
        _files(metadata, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(FormatError, match="is damaged"):
        _files(metadata, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": []}, "tokens must be a list of texts"),
        ({"tokens": [1, 2]}, "tokens must be a list of texts"),
        ({"merges": None}, r"lacks tokenizer\.ggml\.merges"),
        ({"merges": ["a b c d"]}, "damaged vocabulary"),
        ({"token_type": [1]}, r"token_type must have \d+ integers, not 1"),
    ],
)
def test_vocabularies_that_make_no_sense(byte_level, tmp_path, changes, message):
    with pytest.raises(FormatError, match=message):
        _files(_byte_level_metadata(byte_level, "gpt-2", **changes), tmp_path)


def test_a_token_that_is_there_twice_needs_a_tokenizer_beside(byte_level, tmp_path):
    vocabulary = [*byte_level[0][:-1], byte_level[0][-2]]
    with pytest.raises(UnsupportedModelError, match="1 tokens of its vocabulary are there twice"):
        _files(_byte_level_metadata(byte_level, "gpt-2", tokens=vocabulary), tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("types", [[3], [4], [3, 4]], ids=["control", "user-defined", "both"])
def test_large_vocabularies_of_any_type(byte_level, tmp_path, types):
    """Added one at a time they take many minutes."""
    count = 49_152
    vocabulary = [*byte_level[0], *(f"<{index}>" for index in range(count - len(byte_level[0])))]
    parts = vocabulary, byte_level[1]
    made = _made(_byte_level_metadata(parts, "gpt-2", token_type=types * (count // len(types))), tmp_path)
    assert made.encode("<48000><17>").ids == [vocabulary.index("<48000>"), vocabulary.index("<17>")]


@pytest.mark.parametrize("seed", range(3))
def test_types_in_any_order_mean_what_they_mean_one_at_a_time(byte_level, pieces, tmp_path, seed):
    for parts, metadata in (
        (byte_level, _byte_level_metadata(byte_level, "gpt-2")),
        (pieces, _pieces_metadata(pieces)),
    ):
        vocabulary = parts[0]
        types = np.random.default_rng(seed).choice([1, 3, 4, 5, 6], len(vocabulary), p=[0.6, 0.15, 0.15, 0.05, 0.05])
        plain = {"tokenizer.ggml.token_type": [1 if each in (3, 4) else int(each) for each in types]}
        made = _made(metadata | {"tokenizer.ggml.token_type": types.tolist()}, tmp_path)
        expected = _made(metadata | plain, tmp_path)
        for token, kind in zip(vocabulary, types.tolist(), strict=True):
            if kind == 3:
                expected.add_special_tokens([AddedToken(token, special=True, normalized=False)])
            elif kind == 4 and "▁" not in token:
                expected.add_tokens([AddedToken(token, special=False, normalized=False)])
        found = json.loads(made.to_str())
        assert found["added_tokens"] == json.loads(expected.to_str())["added_tokens"]
        if metadata["tokenizer.ggml.model"] == "gpt2":  # the pieces' merges are of what is normal
            for text in SAMPLES:
                assert made.encode(text).ids == expected.encode(text).ids


def test_tokens_longer_than_any(pieces, tmp_path):
    """SentencePiece's merges come of every cut of every piece."""
    vocabulary = [*pieces[0][:-1], "a" * 1025]
    with pytest.raises(FormatError, match="a token has 1024 characters at most"):
        _files(_pieces_metadata(pieces, tokens=vocabulary), tmp_path)


@pytest.mark.parametrize("value", [-1, 2**32 - 1])
def test_ids_that_name_no_token(byte_level, tmp_path, value):
    """As writers say that there is none; padding that is no token is passed over, too."""
    metadata = _byte_level_metadata(byte_level, "gpt-2", bos_token_id=value, padding_token_id=10**6)
    assert special_ids(Metadata(metadata, tmp_path), 700) == {"eos_token_id": 0}
    assert "bos_token" not in json.loads(_files(metadata, tmp_path)["tokenizer_config.json"])
    with pytest.raises(FormatError, match=r"eos_token_id must be an integer from 0 to 699, not 700"):
        special_ids(Metadata(metadata | {"tokenizer.ggml.eos_token_id": 700}, tmp_path), 700)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.huggingface.json": "{"}, "is damaged"),
        ({"tokenizer.huggingface.json": ["{}"]}, "must be a text"),
        ({"tokenizer.chat_template": "x" * (4 * 2**20 + 1)}, "a chat template of 4194305 bytes"),
        ({"tokenizer.chat_template": 7}, "must be a text"),
    ],
)
def test_what_a_model_directory_could_not_load(byte_level, tmp_path, changes, message):
    with pytest.raises(FormatError, match=message):
        _files(_byte_level_metadata(byte_level, "gpt-2") | changes, tmp_path)
