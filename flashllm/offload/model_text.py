"""A model as a job must know it before its weights are read: sizes, tokenizer, chat template, name."""

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from flashllm.api.pieces import Pieces
from flashllm.api.prompts import PromptEncoder
from flashllm.arch.registry import block_spec, complete_config
from flashllm.base.files import naming, open_for_reading, parse_json_object, read_bounded
from flashllm.convert.checkpoint.source import companion_files
from flashllm.convert.checkpoint.text_part import text_config
from flashllm.convert.locate import find_folder
from flashllm.convert.tokenizer import TOKENIZER, make_tokenizer
from flashllm.errors import UsageError
from flashllm.format.model_files import CONFIG, PREDICTORS
from flashllm.generate.grammar import Grammars
from flashllm.generate.templates.chat_template import ChatTemplate
from flashllm.generate.tokenizer import CHAT_TEMPLATE, TOKENIZER_CONFIG, Tokenizer
from flashllm.offload.shape import ModelShape, shape_in
from flashllm.replies.formats import find

_MAX_CONFIG_NBYTES = 64 << 20
_TEXT_FILES = (CONFIG, TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE)
_END_NBYTES = 1 << 20  # of a file that is hashed; smaller ones are hashed whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """A model's folder, without its weights."""

    path: Path
    name: str
    fingerprint: str  # of its files, wherever they lie: answers of another model are told apart by it
    shape: ModelShape
    encoder: PromptEncoder

    @classmethod
    def load(cls, model: str | Path) -> Self:
        """The model in a Hugging Face folder or a flashllm directory, or what `find_folder` makes of another name.

        Without `tokenizer.json` one is made of the vocabulary files, by transformers, which takes seconds; a model
        without those takes token ids alone. UsageError where it is none of these, FormatError where it is damaged,
        UnsupportedModelError for other models, and where no tokenizer can be made of its files.
        """
        path = find_folder(str(model))
        if not (path / CONFIG).exists():
            raise UsageError(f"{path}: has no {CONFIG}; give a Hugging Face folder or a flashllm directory")
        raw = read_bounded(path / CONFIG, _MAX_CONFIG_NBYTES)
        config = complete_config(text_config(parse_json_object(raw, str(path / CONFIG)), path))
        block = block_spec(config)
        name = path.resolve().name
        tokenizer = _tokenizer(path)
        template = None if tokenizer is None else ChatTemplate.of(tokenizer)
        if template is not None:
            template.check()
        text: dict[str, Any] = {}
        if tokenizer is not None:
            grammars = Grammars(tokenizer.backend, tokenizer.end_ids, block.vocab_size)
            answers = find(tokenizer.says_of_answers)
            text = {"pieces": Pieces(tokenizer.backend), "answers": answers, "grammars": grammars}
        ends = config.get("eos_token_id")
        end_ids = frozenset(each for each in (ends if isinstance(ends, list) else [ends]) if isinstance(each, int))
        return cls(
            path=path,
            name=name,
            fingerprint=_fingerprint(path),
            shape=shape_in(path, config, name=name),
            encoder=PromptEncoder(
                tokenizer=tokenizer,
                template=template,
                context=block.context,
                vocab=block.vocab_size,
                end_ids=end_ids,
                **text,
            ),
        )

    def close(self) -> None:
        """End the process of the chat template; conversations are no prompts any more."""
        if self.encoder.template is not None:
            self.encoder.template.close()

    def token_text(self, token_id: int) -> str:
        """A token's own text, special tokens too. U+FFFD for a part of a character, "" for an unknown id."""
        tokenizer = self.encoder.tokenizer
        return "" if tokenizer is None else tokenizer.token_text(token_id)


def _fingerprint(path: Path) -> str:
    """A hash of what answers depend on: config, tokenizer, template; of each file of weights its size and its ends."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.name in _TEXT_FILES or (file.suffix in (".safetensors", ".bin") and file.name != PREDICTORS):
            with naming(file), open(open_for_reading(file), "rb") as opened:
                nbytes = os.fstat(opened.fileno()).st_size
                digest.update(f"{file.name} {nbytes}\0".encode() + opened.read(_END_NBYTES))
                opened.seek(max(0, nbytes - _END_NBYTES))
                digest.update(opened.read(_END_NBYTES))
    return digest.hexdigest()[:16]


def _tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of a folder, made where it has to be; None where there is nothing to make it of."""
    if (path / TOKENIZER).exists():
        return Tokenizer.load(path)
    made = make_tokenizer(path, companion_files(path))
    if made is None:
        return None
    with tempfile.TemporaryDirectory() as folder:  # the folder with what it lacks: the user's is not written to
        for each in path.iterdir():
            (Path(folder) / each.name).symlink_to(each.resolve())
        (Path(folder) / TOKENIZER).write_bytes(made)
        return Tokenizer.load(Path(folder))
