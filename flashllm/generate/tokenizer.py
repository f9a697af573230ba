"""A model directory's tokenizer: text to ids and back, and the ids that end an answer. Knows no model.

Made of `tokenizer.json` by the tokenizers library, and of the facts beside it: named special tokens, chat templates
(which flashllm/generate/chat_template.py runs), end tokens. Loads neither torch nor transformers.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from flashllm.base.files import read_bounded, read_json_object
from flashllm.convert.tokenizer import TOKENIZER, read_tokenizer
from flashllm.errors import FormatError
from flashllm.format.model_files import CONFIG

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"  # beside an older tokenizer_config.json
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
_MAX_TEMPLATE_NBYTES = 4 * 2**20


class Tokenizer:
    """Text to token ids and back. `bos_id`, `eos_id`, `pad_id` are None where the model names no such token."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        end_ids: Iterable[int] | None = None,
        where: str = TOKENIZER,
    ) -> None:
        """Of a loaded `backend`. `special` names tokens ("bos_token": "<s>"), `chat_templates` templates ("default").

        `end_ids` end an answer; None: the "eos_token" does. `where` says in messages what this was loaded from.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special = dict(special or {})
        self.chat_templates = dict(chat_templates or {})
        self.bos_id, self.eos_id, self.pad_id = (
            backend.token_to_id(self.special[name]) if name in self.special else None
            for name in ("bos_token", "eos_token", "pad_token")
        )
        eos = frozenset(() if self.eos_id is None else (self.eos_id,))
        self.end_ids = eos if end_ids is None else frozenset(end_ids)
        self.where = where

    @classmethod
    def load(cls, directory: Path) -> Self:
        """The tokenizer of a model directory. FormatError where it is missing or damaged."""
        directory = Path(directory)
        if not (directory / TOKENIZER).exists():
            raise FormatError(
                f"{directory / TOKENIZER}: is missing, so the model can take no text; convert the model again, from a "
                "folder that has a tokenizer"
            )
        config = _read_facts(directory / TOKENIZER_CONFIG)
        return cls(
            read_tokenizer(directory / TOKENIZER),
            special=_special_tokens(directory, config),
            chat_templates=_chat_templates(directory, config),
            end_ids=_end_ids(directory),
            where=str(directory),
        )

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of `text`; with `add_special` the tokens that begin (or end) every text of this model, too."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, without special tokens. Bytes that are no whole character become U+FFFD."""
        text: str = self.backend.decode(ids, skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        """A token's own text, special tokens too. U+FFFD for a part of a character, "" for an unknown id."""
        text: str = self.backend.decode([token_id], skip_special_tokens=False)
        return text


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of the special tokens. An older config leaves them to a file of their own."""
    facts = dict(config)
    if "added_tokens_decoder" not in config:
        facts |= _read_facts(directory / SPECIAL_TOKENS)
    tokens = {}
    for name, value in facts.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> template. The file of its own goes first; a config has one, or a list of named ones."""
    path = directory / CHAT_TEMPLATE
    if path.exists():
        return {"default": _read_template(path)}
    given = config.get("chat_template")
    match given:
        case None:
            return {}
        case str():
            return {"default": given}
        case list() if all(isinstance(each, dict) and {"name", "template"} <= set(each) for each in given):
            return {str(each["name"]): str(each["template"]) for each in given}
    raise FormatError(f"{directory / TOKENIZER_CONFIG}: chat_template is neither a text nor a list of named texts")


def _end_ids(directory: Path) -> frozenset[int] | None:
    """The ids that end an answer, as the generation config names them, else the model's config; None: neither does."""
    for name in (GENERATION_CONFIG, CONFIG):
        value = _read_facts(directory / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if value is not None:
            if not all(type(one) is int for one in ids):
                raise FormatError(f"{directory / name}: eos_token_id must be an id or a list of ids, not {value!r:.80}")
            return frozenset(ids)
    return None


def _read_facts(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _read_template(path: Path) -> str:
    raw = read_bounded(path, _MAX_TEMPLATE_NBYTES)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: is not UTF-8 at byte {error.start}") from error
