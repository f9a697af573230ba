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
from flashllm.base.files import Progress, naming, open_for_reading, read_json_object
from flashllm.convert.checkpoint.source import companion_files
from flashllm.convert.checkpoint.text_part import text_config
from flashllm.convert.hub import Say
from flashllm.convert.locate import find_folder
from flashllm.convert.tokenizer import TOKENIZER, make_tokenizer
from flashllm.errors import UsageError
from flashllm.format.model_dir import Companions
from flashllm.format.model_files import CONFIG, PLACED, POPULARITY, PREDICTORS
from flashllm.generate.grammar import Grammars
from flashllm.generate.templates.chat_template import ChatTemplate
from flashllm.generate.tokenizer import TEXT_FILES, Tokenizer, end_ids_of
from flashllm.offload.shape import ModelShape, shape_in
from flashllm.replies.formats import find

_NOT_READ = (PREDICTORS, POPULARITY, PLACED)  # by this engine
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
    def load(cls, model: str | Path, *, say: Say = lambda line: None, progress: Progress | None = None) -> Self:
        """The model in a Hugging Face folder or a flashllm directory, or what `find_folder` makes of another name, with
        its `say` and `progress`.

        Without `tokenizer.json` one is made of the vocabulary files, by transformers, which takes seconds; a model
        without those takes token ids alone. UsageError where it is none of these, FormatError where it is damaged,
        UnsupportedModelError for other models, and where no tokenizer can be made of its files.
        """
        path = find_folder(str(model), say=say, progress=progress)
        if not (path / CONFIG).exists():
            raise UsageError(f"{path}: has no {CONFIG}; give a Hugging Face folder or a flashllm directory")
        config = complete_config(text_config(read_json_object(path / CONFIG), path))
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
                end_ids=end_ids_of(Companions.of(path)) or frozenset(),
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
    """A hash of what answers depend on: configs, tokenizer, template; of each file of weights its size and its ends."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.name in TEXT_FILES or (file.suffix in (".safetensors", ".bin") and file.name not in _NOT_READ):
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
