"""`tokenizer.json` for a model directory: the source's own, or one made of the vocabulary files the source has instead.

Making one needs transformers, which knows how each family reads its files (published OPTs have `vocab.json` and
`merges.txt` alone). It runs in a process of its own, so that neither its memory nor torch's stays with the caller. What
it makes is compared with the source's tokenizer before a byte of the model is written. Knows no weights.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from flashllm.base.files import read_bounded
from flashllm.convert.checkpoint.child import ChildFailed, ask_child
from flashllm.errors import FormatError, UnsupportedModelError, needing

TOKENIZER = "tokenizer.json"
MAX_NBYTES = 256 * 2**20  # of tokenizer.json; the largest published ones have 35 MB
MAX_TEMPLATE_NBYTES = 4 * 2**20  # of a chat template
_VOCABULARIES = ("vocab.json", "vocab.txt", "tekken.json")  # or anything that ends in .model
# Where tokenizers differ: spaces, line ends, case, digits, code, scripts, marks that combine, emoji of several parts.
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces,\ta tab,\nline\r\nends \n\n and   more  ",
    "it's we'll I'd THEY'VE don't",
    "0 12 345 6789 3.14159 1,000,000 1e-9 ½ ²",
    "def f(x):\n    return {'a': x[0] ** 2, \"b\": None}  # comment\n",
    "<div class='x'>&amp;</div> https://example.com/a?b=c&d=%20 user@example.com",
    "naïve café Ångström ﬁn ß İ",
    "日本語のテキスト。中文字符，한국어 텍스트",
    "Привет, мир! שלום עולם مرحبا بالعالم नमस्ते",
    "e\u0301 a\u030a \u200b\u00a0\u2028 \ufeff \ufffd",
    "🙂 👩‍👩‍👧‍👦 🇩🇪 👍🏽",
    "",
)


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer in the file `path`. FormatError where it is damaged, FlashIOError where it cannot be read."""
    return parse_tokenizer(read_bounded(path, MAX_NBYTES), path)


def parse_tokenizer(raw: bytes, path: Path) -> tokenizers.Tokenizer:
    """The tokenizer in `raw`, the bytes of the file `path`. FormatError where they are damaged."""
    try:
        return tokenizers.Tokenizer.from_buffer(raw)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library raises plain Exceptions, and panics that are not even those
        raise FormatError(f"{path}: is damaged: {error}; get the file again, and convert the model again") from error


def make_tokenizer(directory: Path, companions: Iterable[Path]) -> bytes | None:
    """The text of `tokenizer.json` where the checkpoint folder lacks it; None where it is among the `companions`.

    None too where the folder has no tokenizer at all: such a model takes token ids alone.
    FormatError where the folder's file is damaged; UnsupportedModelError where none can be made that does the same as
    the folder's tokenizer.
    """
    names = {path.name: path for path in companions}
    if TOKENIZER in names:
        read_tokenizer(names[TOKENIZER])
        return None
    if not any(name in _VOCABULARIES or name.endswith(".model") for name in names):
        return None
    made: str | None = None
    try:
        made, reason = ask_child(_build, str(directory))
    except ChildFailed as error:
        reason = str(error)
    if made is not None:
        return made.encode()
    raise UnsupportedModelError(
        f"{directory}: no {TOKENIZER} can be made of its tokenizer files: {reason}; put one made for this model into "
        "the folder, or take the tokenizer files out to convert without a tokenizer"
    )


def _build(directory: str) -> tuple[str | None, str]:
    """The text of `tokenizer.json`; None, and why, where none can be made. Runs in the child."""
    with needing(f"{directory}: a tokenizer without {TOKENIZER}"):
        from transformers import AutoTokenizer

    try:
        # A folder that is here; the hub is not asked.
        source = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)  # nosec B615
        backend = getattr(source, "backend_tokenizer", None)
        if backend is None:
            return None, "transformers has it in Python alone"
        text: str = backend.to_str()
        problem = difference(tokenizers.Tokenizer.from_str(text), source)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return (text, "") if problem is None else (None, problem)


def difference(made: tokenizers.Tokenizer, source: Any) -> str | None:
    """The first of TEXTS, and of texts with special tokens, that `made` and transformers' `source` see differently.

    None where ids (with and without the tokens around a text) and the text they decode to are the same for all.
    """
    special = [f"{token}before {token} between{token}\n{token}" for token in source.all_special_tokens]
    for text in (*TEXTS, *special):
        for add_special in (True, False):
            expected = source(text, add_special_tokens=add_special)["input_ids"]
            got = made.encode(text, add_special_tokens=add_special).ids
            if got != expected:
                return f"{text!r} becomes {got[:8]} instead of {list(expected[:8])}"
        decoded = source.decode(expected, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if made.decode(expected, skip_special_tokens=True) != decoded:
            return f"the ids of {text!r} become another text"
    return None
