"""Tokenizers from GGUF metadata: the ids and texts of transformers' own classes over the same vocabulary."""

import json

import numpy as np
import pytest
from tiny_models import SENTENCES, make_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer, GPT2Tokenizer, LlamaTokenizer, Qwen2Tokenizer

from flashllm.convert.checkpoint.gguf.metadata import Metadata
from flashllm.convert.checkpoint.gguf.tokenizer import read_vocabulary, special_ids, tokenizer_files
from flashllm.convert.checkpoint.gguf.words import RULES
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


# As the models' tokenizer.json have them, one step after the other: words isolated, where no behaviour is said.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CL100K = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN = _CL100K.replace("{1,3}", "")
_DEEPSEEK = (
    "\\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
    " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
_LETTERS = (  # of the first DeepSeek
    r"\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    r"\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    r"\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    r"\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    r"\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    r"\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    r"\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    r"\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    r"\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}"
    r"\x{118a0}-\x{118df}\x{1e900}-\x{1e943}]+"
)
_FAR_EAST = "[一-龥ࠀ-一가-퟿]+"
REFERENCES = {
    "qwen35": (
        _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "chatglm-bpe": (_CL100K,),
    "hunyuan": (_QWEN,),
    "lfm2": (_CL100K,),
    "deepseek-v3": _DEEPSEEK,
    "hunyuan-dense": _DEEPSEEK,
    "deepseek-llm": ("[\r\n]", _LETTERS, "\\s?[!-/:-~！-／：-～‘-‟　-。]+", "\\s+$", _FAR_EAST, r"\p{N}"),
    "deepseek-coder": ("[\r\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", _FAR_EAST, r"\p{N}"),
    "kimi-k2": (
        r"[\p{Han}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "minimax-m2": (_O200K,),
    "gpt-4o": (_O200K,),
    "falcon-h1": (_O200K.replace("{1,3}", ""),),
    "tekken": (_O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", ""),),
    "laguna": ((r"(?:\r?\n)+(?!\r?\n)", "merged_with_next"), _QWEN),
    "bailingmoe2": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
        r"\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "exaone-moe": (
        _ENDINGS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|"
        r"\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "youtu": ("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+", _O200K.replace("{1,3}", "")),
    "seed-coder": (_QWEN.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+"),),
    "minicpm5": (r"\p{N}{1,3}", _CL100K.replace("{1,3}", "+")),
    "cohere2moe": (r"\d{1,3}(?=(?:\d{3})*\b)", _O200K),
    "afmoe": (
        r"\p{Nd}{1,510}(?=(?>\p{Nd}{510})*(?:\P{Nd}|$))|\G\p{Nd}{510}",
        r"\A\p{Nd}{1,2}(?=\p{Nd}{3}+\z)",
        r"\A\p{Nd}{3}|\G\p{Nd}{3}",
        r"(?:[\u4E00-\u9FFF\u3040-\u309F\u30A0-\u30FF\u3400-\u4DBF\uf900-\uFAFF\uFF65-\uFF9F\u2F00-\u2FDF]+|"
        r"[\u0E00-\u0E7F]+|[\u0E80-\u0EFF]+|[\u1780-\u17FF]+|[\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF]+|"
        r"[\uAC00-\uD7AF\u1100-\u11FF]+)",
        _DEEPSEEK[2],
    ),
}
PAGE = """The QUICK brown-Fox's tail isn't 3.14159 m; WE'LL pay $1,234,567.89 (or 7 €) by 2026-11-25T07:15:30Z.

\tdef parse(self, x: int=0) -> List[str]:\r\n        return [f"{x!r}/{i:03d}" for i in range(10**6)]  # TODO://\r\n
    // C++: std::vector<uint8_t>&& p = a->b["key"]; i += 0xFF;   \n\n\n   if (!ok) { goto end; }   \t \n
Zażółć gęślą jaźń · naïve café e\u0301te\u0301 · Ελληνικά ΑΘΗΝΑ · Русский ЯЗЫК'S · Հայերեն հայ · ქართული · ᲥᲐᲠᲗᲣᲚᲘ
עברית שָׁלוֹם · العَرَبِيَّة ١٢٣٤٥٦٧ · हिन्दी नमस्ते १२३४ · বাংলা · ภาษาไทย สวัสดี ๑๒๓ · ລາວ · ខ្មែរ · မြန်မာ
中文测试，今天是2026年11月25日。“引号”——真的吗？日本語のテキスト、ひらがなカタカナﾊﾝｶｸ！ 한국어 문장 ㄱㄴ ㄅㄆ 𠮷野家 々
Ⅻ ½ x² H₂O ① １２３ ＡＢＣ ﬁn Ångström İstanbul ǅ ʼn Ꭰꭰ 𝐀𝑏 👩‍👩‍👧‍👦🏳️‍🌈👍🏽 ☃️ …!!! ??!? <|im_start|> </think>
a\u00a0b\u2003c\u3000d\u200be\ufefff\x0bg\x0ch\x85i\u2028j\x00k 1 12 123 1234 12345 123456 1234567 12345678
iPhone15ProMAX XMLHttpRequest'D don't I'M you'Ve they'RE he'lL 'tis rock 'n' roll''s ''' """
PAGE += "9" * 1600 + " " + "8" * 511 + "\r\r\n\n \n" + " " * 40 + "x\n" + "\t" * 9 + "  \n  "


def _pieces_of(pre_tokenizer, text):
    """Where the words begin and end: bytes, as the alphabet has them."""
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("rule", REFERENCES)
def test_a_page_is_cut_as_the_models_own_tokenizer_cuts_it(byte_level, tmp_path, rule):
    steps = [(step, "isolated") if isinstance(step, str) else step for step in REFERENCES[rule]]
    steps = [pre_tokenizers.Split(Regex(expression), how) for expression, how in steps]
    reference = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made = _made(_byte_level_metadata(byte_level, rule), tmp_path)
    pages = [PAGE, *PAGE.splitlines(keepends=True), *SAMPLES]
    for text in pages:
        assert _pieces_of(made.pre_tokenizer, text) == _pieces_of(reference, text)
    assert len(_pieces_of(made.pre_tokenizer, PAGE)) > 300


@pytest.mark.parametrize("rule", RULES)
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


def test_pieces_with_merges_of_their_own_are_gemmas(pieces, tmp_path):
    """Gemma 4's: texts begin with bos, whatever the file says."""
    vocabulary, merges = pieces
    reference = GemmaTokenizer({token: index for index, token in enumerate(vocabulary)}, merges)
    given = {"model": "gemma4", "scores": None, "merges": [" ".join(merge) for merge in merges]}
    for begins in (None, False):
        made = _made(_pieces_metadata(pieces, **given, add_bos_token=begins), tmp_path)
        for text in (*SAMPLES, PAGE):
            ids = made.encode(text).ids
            assert ids == [1, *reference(text, add_special_tokens=False)["input_ids"]], text
            assert made.decode(ids) == text


@pytest.mark.parametrize(
    ("tokens", "kinds", "ends"),
    [
        ({3: "<|im_end|>", 5: "<|call|>"}, 3, [0, 3, 5]),
        ({3: "<turn|>", 5: "<|tool_response>"}, 4, [0, 3, 5]),
        ({3: "<turn|>", 5: "<|im_end|>"}, 1, 0),  # plain words
        ({3: "<|endofturn|>", 5: "<|role_end|>"}, 3, [0, 3, 5]),
        ({3: "<|end|>", 5: "<|user|>"}, 3, [0, 3]),
        ({3: "<|end|>", 5: "<|return|>"}, 3, [0, 5]),  # of a part of the answer
    ],
)
def test_every_token_that_ends_a_turn_ends_an_answer(byte_level, tmp_path, tokens, kinds, ends):
    vocabulary, types = list(byte_level[0]), [1] * len(byte_level[0])
    vocabulary[1] = "<|begin|>"
    for at, token in tokens.items():
        vocabulary[at], types[at] = token, kinds
    metadata = _byte_level_metadata((vocabulary, byte_level[1][:1]), "gpt-2", token_type=types, eot_token_id=None)
    if "<|return|>" in tokens.values():
        metadata["tokenizer.ggml.eot_token_id"] = 3
    assert json.loads(_files(metadata, tmp_path)["generation_config.json"])["eos_token_id"] == ends


@pytest.mark.parametrize(
    ("rule", "form"), [("qwen35", "ﬁÅ"), ("hunyuan", "ﬁÅ"), ("exaone-moe", "fiÅ"), ("deepseek-v3", "ﬁA\u030a")]
)
def test_normal_forms(byte_level, tmp_path, rule, form):
    made = _made(_byte_level_metadata(byte_level, rule), tmp_path)
    assert made.decode(made.encode("ﬁA\u030a").ids) == form


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
