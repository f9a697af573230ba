"""The rules by which byte-level BPE cuts a text into words, by the names that GGUF files have for them.

A file names its rule alone. Each is the models' own, as their tokenizer.json has it; where programs write a simpler one
for the same name (llama.cpp's src/llama-vocab.cpp holds the names), the model's own stands here.
"""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a text becomes words: it is cut at each expression's matches, one expression after the other."""

    cuts: tuple[str, ...]
    form: Literal["NFC", "NFKC"] | None = None  # the Unicode normal form that it is brought into first
    whole: bool = False  # a word that is a token is not merged
    begins: bool = False  # texts begin with bos, where the file does not say


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_THREE, _DIGIT = r"\p{N}{1,3}", r"\p{N}"


def _words(digits: str, letters: str = r"\p{L}", marks: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    return rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}|{marks}|{_SPACES}"


def _cased(digits: str, endings: str = "", but: str = "", behind: str = "/") -> str:
    """Words that a capital letter begins; `but` is taken from their letters, `behind` signs may follow."""
    upper, lower = (rf"[\p{{{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]" for case in (r"Lu}\p{Lt", "Ll"))
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{endings}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{endings}"
    return rf"{word}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{behind}]*|{_SPACES}"


_ENDED = _ENDINGS + "?"
_LLAMA3 = Rule(cuts=(_words(_THREE),))
_QWEN2 = Rule(cuts=(_words(_DIGIT),))
_DIGITS_THEN_GPT2 = Rule(cuts=(_DIGIT, _GPT2))
_GPT4O = Rule(cuts=(_cased(_THREE, _ENDED),))
_KANA_AND_HAN = r"[\u4e00-\u9fa5\u3040-\u30ff]+"
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK3 = Rule(cuts=(_THREE, _KANA_AND_HAN, _PUNCTUATED))
_LINE, _FAR_EAST = r"[\r\n]", r"[\u0800-\u9fa5\uac00-\ud7ff]+"
# Letters with cases, as Unicode 12 knew them, but for some blocks.
_CASED_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8f\u2d00-\u2d2f\ua790-\ua7ff\uab30-\uab6f"
    r"\x{10500}-\x{105ff}\x{10d40}-\x{10dff}\x{16e40}-\x{16fff}\x{1d400}-\x{1d7ff}\x{1df00}-\x{1dfff}]]"
)
_DEEPSEEK = Rule(
    cuts=(
        *(_LINE, rf"\s?{_CASED_LETTERS}+", r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
        *(r"\s+$", _FAR_EAST, _DIGIT),
    )
)
_YOUTU_SCRIPTS = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    rf"\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_KANA_AND_HAN}"
)
_AFMOE_SCRIPTS = (
    r"[\u4e00-\u9fff\u3040-\u30ff\u3400-\u4dbf\uf900-\ufaff\uff65-\uff9f\u2f00-\u2fdf]+|[\u0e00-\u0e7f]+"
    r"|[\u0e80-\u0eff]+|[\u1780-\u17ff]+|[\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff]+|[\uac00-\ud7af\u1100-\u11ff]+"
)
_NOT_HAN = r"&&[^\p{Han}]"

RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "a.x-4.0", "mellum", "gigachat", "trillion"),
        Rule(cuts=(_GPT2,)),
    ),
    "granite-docling": Rule(cuts=(_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS_THEN_GPT2),
    **dict.fromkeys(("minerva-7b", "mellum2"), _DIGITS_THEN_GPT2),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2"),
        replace(_LLAMA3, whole=True, begins=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("glm4", "chatglm-bpe"), replace(_LLAMA3, whole=True)),
    "falcon-h1": Rule(cuts=(_cased(_DIGIT, _ENDED),), whole=True, begins=True),
    "minicpm5": Rule(cuts=(_THREE, _words(r"\p{N}+")), whole=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan"), replace(_QWEN2, form="NFC")),
    **dict.fromkeys(("stablelm2", "solar-open", "grok-2"), _QWEN2),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _QWEN2),
    "qwen35": Rule(cuts=(_words(_DIGIT, r"[\p{L}\p{M}]", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),), form="NFC"),
    "seed-coder": Rule(cuts=(_words(_DIGIT, marks=r" ?[^\s\p{L}\p{N}\r\n]+"),), form="NFC"),
    "laguna": Rule(cuts=(r"(?:\r?\n)+(?:(?!\r?\n)[\s\S])*", *_QWEN2.cuts)),
    "exaone-moe": Rule(  # several words are one
        cuts=(_words(_DIGIT, r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)", r" ?[^\s\p{L}\p{N}]+[\r\n/]?"),), form="NFKC"
    ),
    "falcon": Rule(cuts=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "tekken": Rule(cuts=(_cased(_DIGIT),), whole=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
    "minimax-m2": replace(_GPT4O, form="NFC"),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), Rule(cuts=(r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O.cuts))),
    "kimi-k2": Rule(cuts=(rf"\p{{Han}}+|{_cased(_THREE, _ENDED, _NOT_HAN, '')}",), whole=True),
    "youtu": Rule(cuts=(_YOUTU_SCRIPTS, _cased(_DIGIT, _ENDED)), whole=True),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": Rule(cuts=(_LINE, r"\s?\p{L}+", r"\s?\p{P}+", _FAR_EAST, _DIGIT)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "afmoe": Rule(cuts=(r"\p{Nd}{1,3}(?=(?:\p{Nd}{3})*(?!\p{Nd}))", _AFMOE_SCRIPTS, _PUNCTUATED)),
    "default": Rule(cuts=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
