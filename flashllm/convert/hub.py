"""Fetching a checkpoint from the Hugging Face hub: the config first, then only the files a conversion needs.

The files land in the hub library's own cache, so what was downloaded before is used again, also offline. Runs no code
from a repository, and knows nothing of model directories. The hub library shows its progress
itself, at a terminal; it is imported where something is fetched, as most runs fetch nothing and it holds 13 MB.
"""

import glob
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from flashllm.arch.registry import resolve
from flashllm.base.files import read_json_object
from flashllm.base.units import format_size
from flashllm.errors import FlashError, FlashIOError, FormatError, UnsupportedModelError, UsageError
from flashllm.format.model_files import CONFIG

_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_COMPANION_SUFFIXES = (".json", ".txt", ".model", ".jinja")
_SINGLE = "model.safetensors"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_PICKLED_SINGLE = "pytorch_model.bin"
_PICKLED_SHARD = re.compile(r"pytorch_model-\d+-of-\d+\.bin")

Say = Callable[[str], None]  # shows the user a line


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A repository `owner/name`, with the revision (branch, tag, commit, "refs/pr/1") after an "@"."""

    repo: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> "HubModel | None":
        """The model `text` names; None where it cannot be a hub id."""
        match = re.fullmatch(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?", text, re.ASCII)
        if match is None or ".." in text or "--" in match[1]:
            return None
        return cls(repo=match[1], revision=match[2])

    @property
    def directory_name(self) -> str:
        """A file name of its own for each model and revision."""
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{self.repo}{revision}".replace("/", "--")

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


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
    if not weights:
        raise UnsupportedModelError(
            "it has neither safetensors nor pytorch_model.bin weights; where its community page offers a branch that "
            "has, name the model as owner/name@refs/pr/NUMBER"
        )
    return [name for name in top if name.endswith(_COMPANION_SUFFIXES)] + weights


class Hub:
    """The hub at `endpoint` (None: huggingface.co), downloading into `cache` (None: the hub library's)."""

    def __init__(self, endpoint: str | None = None, cache: Path | None = None) -> None:
        self._endpoint = endpoint
        self._cache = cache

    def download(self, model: HubModel, say: Say) -> Path:
        """The folder with the files of `model`.

        UsageError where there is no such model or revision, UnsupportedModelError for an architecture or weights we
        cannot convert (before they are downloaded), FlashIOError where the hub cannot be reached and the files are not
        in the cache.
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
        if CONFIG not in sizes:
            raise FormatError(f"{model}: has no {CONFIG}, so it is no model that transformers could load")
        config = huggingface_hub.hf_hub_download(
            model.repo, CONFIG, revision=model.revision, cache_dir=self._cache, endpoint=self._endpoint
        )
        try:
            resolve(read_json_object(Path(config)))
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

    def _offline(self, model: HubModel, cause: Exception, say: Say) -> Path:
        """The folder of an earlier download, complete or not: the conversion finds what is missing."""
        import huggingface_hub

        try:
            folder = huggingface_hub.snapshot_download(
                model.repo,
                revision=model.revision,
                allow_patterns=[
                    "*.safetensors",
                    "pytorch_model*.bin",
                    *(f"*{suffix}" for suffix in _COMPANION_SUFFIXES),
                ],
                ignore_patterns=["*/*"],
                cache_dir=self._cache,
                local_files_only=True,
            )
        except Exception:
            raise FlashIOError(
                f"{model}: no such directory here, and the hub cannot be reached ({cause}); go online once, or "
                "download the model elsewhere and give its folder"
            ) from cause
        say(f"{model}: the hub cannot be reached ({cause}); using the files downloaded earlier")
        return Path(folder)
