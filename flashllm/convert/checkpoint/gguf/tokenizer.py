"""The tokenizer in a GGUF file's metadata, as the files a Hugging Face folder would have. Knows no tensors.

Two kinds: byte-level BPE ("gpt2"), which cuts a text into words first by a rule that the file only names, and
SentencePiece's BPE ("llama"), whose merges follow from the pieces' scores. A rule that is not in the table is refused:
another one would give other tokens without a word.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from flashllm.base.files import read_bounded
from flashllm.convert.checkpoint.gguf.metadata import Metadata
from flashllm.convert.tokenizer import MAX_NBYTES, MAX_TEMPLATE_NBYTES, TOKENIZER, parse_tokenizer
from flashllm.errors import FormatError, UnsupportedModelError
from flashllm.format.model_files import GENERATION_CONFIG

_KEY = "tokenizer.ggml."
_SPACE = "▁"  # SentencePiece's
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # types of tokens, besides 1: normal, 2: unknown, 5: unused
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{0}}"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED.replace('{0}', '')}|\p{{N}}|{_CASED_REST}"
_GPT4O = rf"{_CASED.replace('{0}', _ENDINGS + '?')}|\p{{N}}{{1,3}}|{_CASED_REST}"

# The rules by the name in a file: the text is cut at each expression's matches, one expression after the other.
_DIGITS_THEN_GPT2 = (r"\p{N}", _GPT2)
WORDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "a.x-4.0", "mellum"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS_THEN_GPT2),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), (_QWEN2,)),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"}  # in the vocabulary are not merged
_COMPOSED = {"qwen2", "deepseek-r1-qwen", "megrez"}  # texts are brought into normal form C first
_BEGINS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"}  # begin texts with bos by default
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # our names of special tokens -> the file's


_NONE = "no_vocab"  # llama.cpp's word for none
_NO_ID = (-1, 2**32 - 1)  # what writers put where there is no such token
_MAX_TOKEN_LENGTH, _MAX_CHARACTERS = 1 << 10, 1 << 24  # of a token; of all. The longest known token has 256


def read_vocabulary(metadata: Metadata) -> list[str]:
    """The tokens in the order of their ids; none where the file has no tokenizer."""
    tokens = f"{_KEY}tokens"
    kind = metadata.text(f"{_KEY}model", None if tokens in metadata else _NONE)
    return [] if kind == _NONE else metadata.texts(tokens)


def special_ids(metadata: Metadata, size: int) -> dict[str, int]:
    """ "bos_token_id", "eos_token_id", "pad_token_id" as far as the file names them, of a vocabulary of `size`."""
    ids = {f"{ours}_token_id": _special(metadata, theirs, size) for ours, theirs in _NAMED.items()}
    return {name: value for name, value in ids.items() if value is not None and name != "unk_token_id"}


def _special(metadata: Metadata, name: str, size: int) -> int | None:
    """The id of a special token; None where the file names none.

    Padding is nothing that we need, and in files of other programs often none of the tokens: it is passed over.
    """
    key = f"{_KEY}{name}_token_id"
    if key not in metadata:
        return None
    if (value := metadata.integer(key, least=-1, most=_NO_ID[1])) in _NO_ID:
        return None
    if name == "padding" and value >= size:
        return None
    return metadata.integer(key, least=0, most=size - 1)


def tokenizer_files(metadata: Metadata, vocabulary: Sequence[str], path: Path) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja, as far as there are any.

    Nothing where the vocabulary is empty. UnsupportedModelError for a kind or a rule that is not known, unless a
    tokenizer.json lies beside the file `path`; FormatError for a vocabulary that makes no sense.
    """
    if not vocabulary:
        return {}
    special = {
        f"{ours}_token": vocabulary[index]
        for ours, theirs in _NAMED.items()
        if (index := _special(metadata, theirs, len(vocabulary))) is not None
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    files = {
        TOKENIZER: _made(metadata, vocabulary, path),
        "tokenizer_config.json": _json(config),
        GENERATION_CONFIG: _json(_generation(metadata, len(vocabulary))),
    }
    parse_tokenizer(files[TOKENIZER], path)
    if len(files[TOKENIZER]) > MAX_NBYTES:
        raise FormatError(
            f"{path}: makes a {TOKENIZER} of {len(files[TOKENIZER])} bytes; at most {MAX_NBYTES} are read"
        )
    template = metadata.text("tokenizer.chat_template", "").encode()
    if len(template) > MAX_TEMPLATE_NBYTES:
        raise FormatError(f"{path}: a chat template of {len(template)} bytes; at most {MAX_TEMPLATE_NBYTES} are read")
    if template:
        files["chat_template.jinja"] = template
    return files


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode()


def _generation(metadata: Metadata, size: int) -> dict[str, Any]:
    """generation_config.json: every token that ends an answer."""
    result: dict[str, Any] = {
        name: each for name, each in special_ids(metadata, size).items() if name != "eos_token_id"
    }
    ends = [_special(metadata, name, size) for name in ("eos", "eot", "eom")]
    ids = sorted({index for index in ends if index is not None})
    if ids:
        result["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    return result


def _made(metadata: Metadata, vocabulary: Sequence[str], path: Path) -> bytes:
    """tokenizer.json: the one in the file, the one it describes, or the one beside it."""
    if whole := metadata.text("tokenizer.huggingface.json", ""):
        return whole.encode()
    try:
        backend = _backend(metadata, vocabulary, path)
    except UnsupportedModelError:
        beside = path.with_name(TOKENIZER)
        if not beside.exists():
            raise
        return _beside(beside, vocabulary)
    except (FormatError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # of the tokenizers library, for merges that do not fit; panics are no Exceptions
        raise FormatError(f"{path}: damaged vocabulary: {error}; get the file again") from error
    return backend.to_str().encode()


def _beside(path: Path, vocabulary: Sequence[str]) -> bytes:
    """The file `path`, where it is this vocabulary's."""
    raw = read_bounded(path, MAX_NBYTES)
    backend = parse_tokenizer(raw, path)
    wrong = [index for index, token in enumerate(vocabulary) if backend.token_to_id(token) != index]
    if len(wrong) > len(vocabulary) // 100:  # padding of the vocabulary has other names
        raise FormatError(f"{path}: is another model's: token {wrong[0]} is not {vocabulary[wrong[0]]!r}")
    return raw


def _backend(metadata: Metadata, vocabulary: Sequence[str], path: Path) -> Tokenizer:
    kind = metadata.text(f"{_KEY}model")
    if max(map(len, vocabulary)) > _MAX_TOKEN_LENGTH or sum(map(len, vocabulary)) > _MAX_CHARACTERS:
        raise FormatError(
            f"{path}: damaged vocabulary: a token has {_MAX_TOKEN_LENGTH} characters at most, all together "
            f"{_MAX_CHARACTERS}; get the file again"
        )
    if len(set(vocabulary)) < len(vocabulary):
        raise UnsupportedModelError(
            f"{path}: {len(vocabulary) - len(set(vocabulary))} tokens of its vocabulary are there twice; "
            "put the model's tokenizer.json beside the file"
        )
    if kind == "gpt2":
        backend = _byte_level(metadata, vocabulary, path)
    elif kind == "llama":
        backend = _sentencepiece(metadata, vocabulary, path)
    else:
        raise UnsupportedModelError(
            f"{path}: its tokenizer is of kind {kind[:80]!r}, which is not known; put the model's tokenizer.json "
            "beside the file"
        )
    types = _types(metadata, vocabulary)
    # The library goes over all added tokens at each call.
    control = [token for token, kind_of in zip(vocabulary, types, strict=True) if kind_of == _CONTROL]
    own = [token for token, kind_of in zip(vocabulary, types, strict=True) if kind_of == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in own if _SPACE not in token])
    _add_ends(backend, metadata, vocabulary, path)
    return backend


def _byte_level(metadata: Metadata, vocabulary: Sequence[str], path: Path) -> Tokenizer:
    rule = metadata.text(f"{_KEY}pre", "None")
    if rule not in WORDS:
        raise UnsupportedModelError(
            f"{path}: its tokenizer cuts words by the rule {rule[:80]!r}, which is not known; put the model's "
            "tokenizer.json beside the file"
        )
    merges = []
    for merge in metadata.texts(f"{_KEY}merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    backend = Tokenizer(models.BPE(_ids(vocabulary), merges, ignore_merges=rule in _WHOLE_WORDS))
    if rule in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in WORDS[rule]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Metadata, vocabulary: Sequence[str], path: Path) -> Tokenizer:
    scores = metadata.numbers(f"{_KEY}scores", len(vocabulary))
    types = _types(metadata, vocabulary)
    unknown = _special(metadata, "unknown", len(vocabulary))
    ids = _ids(vocabulary)
    pieces = {token: scores[index] for token, index in ids.items() if types[index] in (1, _USER_DEFINED)}
    backend = Tokenizer(
        models.BPE(
            ids,
            _merges(pieces),
            unk_token=vocabulary[0 if unknown is None else unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    prefix = metadata.flag(f"{_KEY}add_space_prefix", True)
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """Pairs of pieces in the order in which SentencePiece joins them: the best score of the joined piece first."""
    found: list[tuple[float, int, str, str]] = []
    for piece, score in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                found.append((-score, len(found), left, right))
    found.sort()
    return [(left, right) for _, _, left, right in found]


def _add_ends(backend: Tokenizer, metadata: Metadata, vocabulary: Sequence[str], path: Path) -> None:
    """Let every text begin with bos, or end with eos, where the file says so."""
    begins = metadata.text(f"{_KEY}model") == "llama" or metadata.text(f"{_KEY}pre", "None") in _BEGINS
    wanted = [
        name for name, default in (("bos", begins), ("eos", False)) if metadata.flag(f"{_KEY}add_{name}_token", default)
    ]
    ids: dict[str, int] = {}
    for name in wanted:
        index = _special(metadata, name, len(vocabulary))
        if index is None:
            raise FormatError(f"{path}: texts get a {name} token, but the metadata names none")
        ids[name] = index
    if wanted:
        tokens = {name: vocabulary[ids[name]] for name in wanted}
        form = [tokens.get(name, "$A") for name in ("bos", "text", "eos") if name in (*wanted, "text")]
        second = [f"{'$B' if part == '$A' else part}:1" for part in form]
        backend.post_processor = processors.TemplateProcessing(
            single=form, pair=[*form, *second], special_tokens=[(tokens[name], ids[name]) for name in wanted]
        )


def _ids(vocabulary: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(vocabulary)}


def _types(metadata: Metadata, vocabulary: Sequence[str]) -> list[int]:
    """Types of the tokens; 1 where the file says none."""
    key = f"{_KEY}token_type"
    return metadata.integers(key, len(vocabulary)) if key in metadata else [1] * len(vocabulary)
