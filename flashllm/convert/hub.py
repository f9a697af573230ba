"""Fetching a checkpoint from the Hugging Face hub: the config first, then only the files a conversion needs.

The files land in the hub library's own cache, so what was downloaded before is used again, also offline. Runs no code
from a repository, and knows nothing of model directories. The hub library shows its progress
itself, at a terminal; it is imported where something is fetched, as most runs fetch nothing and it holds 13 MB.
"""

import glob
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from flashllm.arch.registry import resolve
from flashllm.base.files import read_json_object
from flashllm.base.units import format_size
from flashllm.convert.checkpoint.source import ADAPTER, ADAPTER_HINT, COPIED_SUFFIXES
from flashllm.convert.checkpoint.text_part import text_config
from flashllm.errors import FlashError, FlashIOError, FormatError, UnsupportedModelError, UsageError
from flashllm.format.model_files import CONFIG

_SINGLE = "model.safetensors"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_PICKLED_SINGLE = "pytorch_model.bin"
_PICKLED_SHARD = re.compile(r"pytorch_model-\d+-of-\d+\.bin")

GGUF = ".gguf"
_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_ADDRESS = re.compile(r"hf://|(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/", re.IGNORECASE)
_PLAIN = r"(?P<plain>[\w./ -]+)"
_PAGE = r"(?:tree|blob|resolve|raw)/(?P<branch>refs/[\w.-]+/[\w.-]+|[\w.-]+)(?:/(?P<file>[\w./ -]+))?"
_REPOSITORY = re.compile(
    rf"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>refs/[\w.-]+/[\w.-]+|[\w.-]+))?"
    rf"(?:/(?:{_PAGE}|{_PLAIN}))?",
    re.ASCII,
)
_NO_MODELS = ("datasets/", "spaces/", "docs/", "blog/", "papers/", "collections/")  # other pages of the hub

Say = Callable[[str], None]  # shows the user a line


def is_address(text: str) -> bool:
    """True where `text` begins as an address of the hub's does."""
    return _ADDRESS.match(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A repository `owner/name`; the revision (branch, tag, commit, "refs/pr/1") after an "@"; a GGUF file in it."""

    repo: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> "HubModel | None":
        """The model that an id (`owner/name`) or an address (`hf.co/owner/name`) names; None for anything else.

        An address may have `https://` or be `hf://owner/name`, and may go on to a branch or a file, as a browser shows
        it. A file that is not GGUF stands for its repository.
        """
        address = _ADDRESS.match(text)
        rest = unquote(text[address.end() :].partition("?")[0]).rstrip("/") if address else text
        match = _REPOSITORY.fullmatch(rest) if address else _ID.fullmatch(rest)
        if match is None or ".." in text or "--" in match["repo"] or match["repo"].startswith(_NO_MODELS):
            return None
        parts = match.groupdict()
        revision = parts["revision"] or parts.get("branch")
        file = parts.get("file") or parts.get("plain")
        return cls(
            repo=parts["repo"],
            revision=None if revision in (None, "main") and address else revision,
            file=file if file is not None and _is_gguf(file) else None,
        )

    @property
    def directory_name(self) -> str:
        """A file name of its own for each model, revision and file."""
        return str(self).replace("/", "--")

    def __str__(self) -> str:
        name = self.repo if self.revision is None else f"{self.repo}@{self.revision}"
        return name if self.file is None else f"{name}/{self.file}"


def needed_files(names: Iterable[str]) -> list[str]:
    """The files of a repository that a conversion reads: top-level config and tokenizer files, and weights.

    Safetensors are preferred to pickled weights, one file to shards. UnsupportedModelError where there are neither.
    """
    top = sorted(name for name in names if "/" not in name and not name.startswith("."))
    weights = (
        [name for name in top if name == _SINGLE]
        or [name for name in top if _SHARD.fullmatch(name)]
        or [name for name in top if name == _PICKLED_SINGLE]
        or [name for name in top if _PICKLED_SHARD.fullmatch(name)]
    )
    if not weights and ADAPTER in top:
        raise UnsupportedModelError(f"it has no weights of a model{ADAPTER_HINT}")
    if not weights:
        raise UnsupportedModelError(
            "it has neither safetensors nor pytorch_model.bin weights; where its community page offers a branch that "
            "has, name the model as owner/name@refs/pr/NUMBER"
        )
    return [name for name in top if name.endswith(COPIED_SUFFIXES)] + weights


class Hub:
    """The hub at `endpoint` (None: huggingface.co), downloading into `cache` (None: the hub library's)."""

    def __init__(self, endpoint: str | None = None, cache: Path | None = None) -> None:
        self._endpoint = endpoint
        self._cache = cache

    def download(self, model: HubModel, say: Say) -> Path:
        """The folder with the files of `model`, or its GGUF file where `model` names one.

        UsageError where there is no such model, revision or file, UnsupportedModelError for an architecture or weights
        we cannot convert (before they are downloaded), FlashIOError where the hub cannot be reached and the files are
        not in the cache.
        """
        from huggingface_hub import errors as hub_errors

        try:
            return self._download(model, say)
        except FlashError:
            raise
        except hub_errors.GatedRepoError as error:
            message = f"{model}: its owner asks for consent first: accept the terms on its page, then `hf auth login`"
            raise UsageError(message) from error
        except hub_errors.RevisionNotFoundError as error:
            raise UsageError(f"{model}: this model has no revision {model.revision}") from error
        except hub_errors.RepositoryNotFoundError as error:
            message = f"{model}: neither a directory here nor a model on the hub (a private one needs `hf auth login`)"
            raise UsageError(message) from error
        except hub_errors.HfHubHTTPError as error:
            raise FlashIOError(f"{model}: the hub refused: {error}") from error
        except Exception as error:  # of the HTTP library beneath, which differs between releases of the hub's
            return self._offline(model, error, say)

    def _download(self, model: HubModel, say: Say) -> Path:
        import huggingface_hub

        api = huggingface_hub.HfApi(endpoint=self._endpoint)
        info = api.model_info(model.repo, revision=model.revision, files_metadata=True, timeout=30)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        files = sorted(name for name in sizes if _is_gguf(name))
        if model.file is not None:
            return self._download_files(model, sizes, say)
        if files and not any(name.endswith((".safetensors", ".bin")) for name in sizes):
            raise UsageError(
                f"{model}: holds GGUF files; name one: {', '.join(f'hf.co/{model}/{name}' for name in files)}"
            )
        if CONFIG not in sizes:
            hint = ADAPTER_HINT if ADAPTER in sizes else ""
            raise FormatError(f"{model}: has no {CONFIG}, so it is no model that transformers could load{hint}")
        try:
            config = self._fetch(model, CONFIG)
            resolve(text_config(read_json_object(config), config.parent))
            names = needed_files(sizes)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{model}: {error}") from error
        say(f"downloading {model}: {len(names)} files, {format_size(sum(sizes[name] for name in names))}")
        patterns = [glob.escape(name) for name in names]
        folder = huggingface_hub.snapshot_download(
            model.repo,
            revision=model.revision,  # not info.sha: the library finds a branch offline only if asked for it online
            allow_patterns=patterns,
            cache_dir=self._cache,
            endpoint=self._endpoint,
        )
        return Path(folder)

    def _download_files(self, model: HubModel, sizes: Mapping[str, int], say: Say) -> Path:
        """The GGUF file that `model` names, with the others of a model that is split over several."""
        name = model.file or ""
        if name not in sizes:
            known = ", ".join(sorted(other for other in sizes if _is_gguf(other))) or "none"
            raise UsageError(f"{model}: there is no such file; GGUF files there: {known}")
        names = split_files(name, sizes)
        say(f"downloading {model}: {len(names)} file(s), {format_size(sum(sizes[each] for each in names))}")
        paths = [self._fetch(model, each) for each in names]
        return paths[0]

    def _fetch(self, model: HubModel, name: str, *, here: bool = False) -> Path:
        """A file of the repository, in the cache; `here`: that is there already."""
        from huggingface_hub import hf_hub_download

        where: dict[str, Any] = {"revision": model.revision, "cache_dir": self._cache, "endpoint": self._endpoint}
        return Path(hf_hub_download(model.repo, name, local_files_only=here, **where))

    def _offline(self, model: HubModel, cause: Exception, say: Say) -> Path:
        """The folder that an earlier download left, complete or not: the conversion finds what is missing."""
        import huggingface_hub

        try:
            if model.file is not None:
                path = self._fetch(model, model.file, here=True)
                say(f"{model}: the hub cannot be reached ({cause}); using the file downloaded earlier")
                return path
            folder = huggingface_hub.snapshot_download(
                model.repo,
                revision=model.revision,
                allow_patterns=["*.safetensors", "pytorch_model*.bin", *(f"*{suffix}" for suffix in COPIED_SUFFIXES)],
                ignore_patterns=["*/*"],
                cache_dir=self._cache,
                local_files_only=True,
            )
        except Exception:
            raise FlashIOError(
                f"{model}: no such directory here, and the hub cannot be reached ({cause}); {_bring(model)}"
            ) from cause
        say(f"{model}: the hub cannot be reached ({cause}); using the files downloaded earlier")
        return Path(folder)


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(GGUF)


def _bring(model: HubModel) -> str:
    """Advice for a machine without a network."""
    if model.file is not None:
        where = f"https://huggingface.co/{model.repo}"
        return f"go online once, or download {model.file} elsewhere, from {where}, and give its path"
    return (
        "go online once, or download config.json, the tokenizer's files and *.safetensors (else pytorch_model*.bin) "
        f"elsewhere, from https://huggingface.co/{model.repo}, into a folder, and give the folder"
    )


def split_files(name: str, names: Iterable[str]) -> list[str]:
    """The GGUF file `name`, and the others where it is the first of several ("-00001-of-00003")."""
    match = re.fullmatch(r"(.*)-00001-of-(\d{5})(\.gguf)", name, re.IGNORECASE)
    if match is None:
        return [name]
    start, end = re.escape(match[1]), re.escape(match[3])
    return sorted(each for each in names if re.fullmatch(rf"{start}-\d{{5}}-of-{match[2]}{end}", each))
