"""A model directory's tokenizer: text to ids and back, and the ids that end an answer. Knows no model.

Made of `tokenizer.json` by the tokenizers library, and of the facts beside it: named special tokens, chat templates
(which flashllm/generate/templates/ runs), end tokens. Loads neither torch nor transformers.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from flashllm.base.text import valid_unicode
from flashllm.convert.tokenizer import MAX_NBYTES, MAX_TEMPLATE_NBYTES, TOKENIZER, parse_tokenizer
from flashllm.errors import FormatError
from flashllm.format.model_dir import Companions
from flashllm.format.model_files import CONFIG, GENERATION_CONFIG

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"  # beside an older tokenizer_config.json
CHAT_TEMPLATE = "chat_template.jinja"
_WITH_PICTURES = "chat_template.json"  # an older checkpoint's that takes pictures
# What a tokenizer is loaded from, if it is there.
TEXT_FILES = (
    TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, CHAT_TEMPLATE, _WITH_PICTURES, GENERATION_CONFIG, CONFIG
)  # fmt: skip


class Tokenizer:
    """Text to token ids and back."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        end_ids: Iterable[int] | None = None,
        response_template: str = "",
        where: str = TOKENIZER,
    ) -> None:
        """Wrap a loaded `backend`. `special` names tokens ("bos_token": "<s>"), `chat_templates` templates ("default").

        `end_ids` end an answer; None: the "eos_token" does. `response_template`, where the model has one, is JSON that
        says how its answers are written. `where` says in messages what this was loaded from.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special = dict(special or {})
        self.chat_templates = dict(chat_templates or {})
        eos = backend.token_to_id(self.special["eos_token"]) if "eos_token" in self.special else None
        self.end_ids = frozenset(end_ids if end_ids is not None else () if eos is None else (eos,))
        self.response_template, self.where = response_template, where

    def vocabulary(self) -> dict[str, int]:
        """Every token with its id, special ones included."""
        return self.backend.get_vocab(with_added_tokens=True)

    @property
    def says_of_answers(self) -> str:
        """All that the model's files say of the form of its answers."""
        return "\n".join((*self.chat_templates.values(), self.response_template))

    @classmethod
    def load(cls, directory: Path) -> Self:
        """The tokenizer of a model directory or of a Hugging Face folder.

        FormatError where it is missing or damaged, ChecksumError where a file is not as it was converted.
        """
        directory = Path(directory)
        files = Companions.of(directory)
        raw = files.read(TOKENIZER, MAX_NBYTES)
        if raw is None:
            raise FormatError(
                f"{directory / TOKENIZER}: is missing, so the model can take no text; convert the model again, from a "
                "folder that has a tokenizer"
            )
        config = files.read_json_object(TOKENIZER_CONFIG) or {}
        return cls(
            parse_tokenizer(raw, directory / TOKENIZER),
            special=_special_tokens(files, config),
            chat_templates=_chat_templates(files, config),
            end_ids=end_ids_of(files),
            response_template=json.dumps(config.get("response_template", ""), ensure_ascii=False),
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

    def showing(self, holds: Callable[[str], bool]) -> "_Showing":
        """A decoder that does as `decode`, but leaves the special tokens in the text that `holds` is true of."""
        added = self.backend.get_added_tokens_decoder()
        hidden = (index for index, token in added.items() if token.special and not holds(token.content))
        return _Showing(self.backend, frozenset(hidden))

    def token_text(self, token_id: int) -> str:
        """A token's own text, special tokens too. U+FFFD for a part of a character, "" for an unknown id."""
        text: str = self.backend.decode([token_id], skip_special_tokens=False)
        return text


class _Showing:
    """A tokenizer's decoder that leaves out some special tokens, and no other."""

    def __init__(self, backend: tokenizers.Tokenizer, hidden: frozenset[int]) -> None:
        self._backend, self._hidden = backend, hidden

    def decode(self, ids: Sequence[int]) -> str:
        shown = [index for index in ids if index not in self._hidden]
        text: str = self._backend.decode(shown, skip_special_tokens=False)
        return text


def _special_tokens(files: Companions, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of the special tokens. An older config leaves them to a file of their own."""
    facts = dict(config)
    if "added_tokens_decoder" not in config:
        facts |= files.read_json_object(SPECIAL_TOKENS) or {}
    tokens = {}
    for name, value in facts.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            if text != valid_unicode(text):  # JSON can spell half a character, of which no library makes a token
                raise FormatError(f"{files.directory / TOKENIZER_CONFIG}: {name} is no text: {text!a:.80}")
            tokens[name] = text
    return tokens


def _chat_templates(files: Companions, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> template. A file of its own goes first; a config has one, or a list of named ones."""
    own = files.read(CHAT_TEMPLATE, MAX_TEMPLATE_NBYTES)
    if own is not None:
        try:
            return {"default": own.decode("utf-8")}
        except UnicodeDecodeError as error:
            raise FormatError(f"{files.directory / CHAT_TEMPLATE}: is not UTF-8 at byte {error.start}") from error
    given = (files.read_json_object(_WITH_PICTURES) or config).get("chat_template")
    match given:
        case None:
            return {}
        case str():
            return {"default": given}
        case list() if all(isinstance(each, dict) and {"name", "template"} <= set(each) for each in given):
            return {str(each["name"]): str(each["template"]) for each in given}
    where = files.directory / TOKENIZER_CONFIG
    raise FormatError(f"{where}: chat_template is neither a text nor a list of named texts")


def end_ids_of(files: Companions) -> frozenset[int] | None:
    """The ids that end an answer, as the generation config names them, else the model's config; None: neither does."""
    for name in (GENERATION_CONFIG, CONFIG):
        value = (files.read_json_object(name) or {}).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if value is not None:
            if not all(type(one) is int for one in ids):
                where = files.directory / name
                raise FormatError(f"{where}: eos_token_id must be an id or a list of ids, not {value!r:.80}")
            return frozenset(ids)
    return None
