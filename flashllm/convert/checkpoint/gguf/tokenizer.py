"""The tokenizer in a GGUF file's metadata, as the files a Hugging Face folder would have. Knows no tensors.

Byte-level BPE ("gpt2") cuts a text into words first by a rule that the file only names (words.py); one that is not in
the table is refused: another one would give other tokens without a word. SentencePiece's BPE has its merges ("gemma4"),
or they follow from the pieces' scores ("llama").
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from flashllm.base.files import read_bounded
from flashllm.convert.checkpoint.gguf.metadata import Metadata
from flashllm.convert.checkpoint.gguf.words import RULES
from flashllm.convert.tokenizer import MAX_NBYTES, MAX_TEMPLATE_NBYTES, TOKENIZER, parse_tokenizer
from flashllm.errors import FormatError, UnsupportedModelError
from flashllm.format.model_files import GENERATION_CONFIG

_KEY = "tokenizer.ggml."
_SPACE = "▁"  # SentencePiece's
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # types of tokens, besides 1: normal, 2: unknown, 5: unused
# Tokens that end an answer: files name one of several. Where there is one of _GO_ON, "<|end|>" ends a part of it.
_ENDS = frozenset(
    (
        *("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end|>"),
        *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<turn|>", "<|tool_response>"),
        *("[e~[", "[|endofturn|]", "<|endofturn|>", "<|role_end|>", "<|endofresponse|>", "</assistant>"),
    )
)
_GO_ON = ("<|return|>", "<|flush|>")
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
        GENERATION_CONFIG: _json(_generation(metadata, vocabulary)),
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


def _generation(metadata: Metadata, vocabulary: Sequence[str]) -> dict[str, Any]:
    """generation_config.json: every token that ends an answer."""
    size = len(vocabulary)
    result: dict[str, Any] = {
        name: each for name, each in special_ids(metadata, size).items() if name != "eos_token_id"
    }
    ends = {index for name in ("eos", "eot", "eom") if (index := _special(metadata, name, size)) is not None}
    types = _types(metadata, vocabulary)
    ends |= {at for at, token in enumerate(vocabulary) if token in _ENDS and types[at] in (_CONTROL, _USER_DEFINED)}
    if any(token in _GO_ON for token in vocabulary):
        ends = {at for at in ends if vocabulary[at] != "<|end|>"}
    if ends:
        result["eos_token_id"] = sorted(ends) if len(ends) > 1 else ends.pop()
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
    elif kind in ("llama", "gemma4"):
        backend = _sentencepiece(metadata, vocabulary)
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
    name = metadata.text(f"{_KEY}pre", "None")
    if name not in RULES:
        raise UnsupportedModelError(
            f"{path}: its tokenizer cuts words by the rule {name[:80]!r}, which is not known; put the model's "
            "tokenizer.json beside the file"
        )
    rule = RULES[name]
    backend = Tokenizer(models.BPE(_ids(vocabulary), _pairs(metadata), ignore_merges=rule.whole))
    if rule.form is not None:
        backend.normalizer = getattr(normalizers, rule.form)()
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in rule.cuts]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _pairs(metadata: Metadata) -> list[tuple[str, str]]:
    """The pairs that the file says are joined, the first ones first."""
    pairs = []
    for merge in metadata.texts(f"{_KEY}merges"):
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    return pairs


def _sentencepiece(metadata: Metadata, vocabulary: Sequence[str]) -> Tokenizer:
    types = _types(metadata, vocabulary)
    unknown = _special(metadata, "unknown", len(vocabulary))
    ids = _ids(vocabulary)
    given = metadata.text(f"{_KEY}model") != "llama"
    if given:
        pairs = _pairs(metadata)
    else:
        scores = metadata.numbers(f"{_KEY}scores", len(vocabulary))
        pairs = _merges({token: scores[index] for token, index in ids.items() if types[index] in (1, _USER_DEFINED)})
    backend = Tokenizer(
        models.BPE(
            ids,
            pairs,
            unk_token=vocabulary[0 if unknown is None else unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    prefix = metadata.flag(f"{_KEY}add_space_prefix", not given)
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
    rule = RULES.get(metadata.text(f"{_KEY}pre", "None"))
    kind = metadata.text(f"{_KEY}model")
    begins = kind == "llama" or (rule is not None and rule.begins)
    wanted = [
        name for name, default in (("bos", begins), ("eos", False)) if metadata.flag(f"{_KEY}add_{name}_token", default)
    ]
    if kind == "gemma4" and "bos" not in wanted:  # some of its files say the contrary
        wanted.insert(0, "bos")
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
