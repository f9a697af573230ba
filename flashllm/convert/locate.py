"""From a user's name for a model to its directory: the demo, a directory, a checkpoint here or the hub's, smollm2.

Checkpoints are converted on first use into the user's cache directory and found there from then on. Loads no model.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import flashllm
from flashllm.base.files import Progress, is_there
from flashllm.base.user_dirs import user_cache_dir
from flashllm.convert.checkpoint.folder import what_lies_there
from flashllm.convert.checkpoint.gguf.file import SUFFIX
from flashllm.convert.checkpoint.source import companion_files
from flashllm.convert.hub import Hub, HubModel, Say, is_address, split_files
from flashllm.convert.known import KNOWN, fetch
from flashllm.convert.run import convert
from flashllm.errors import FlashError, FlashIOError, UsageError
from flashllm.format.manifest import MANIFEST, PARTIAL_SUFFIX
from flashllm.format.model_files import CONFIG, FFN, RESIDENT

_WEIGHT_SUFFIXES = (SUFFIX, ".safetensors", ".bin", ".index.json")
_DEMO = Path(flashllm.__file__).with_name("demo")
DEMO_NOTICE = "the demo model is so small that its memory saving proves nothing; it shows how the engine works"


def has_demo() -> bool:
    """True where the demo is in this installation; published wheels leave it out."""
    return (_DEMO / MANIFEST).exists()


def demo_path() -> Path:
    """The bundled demo model's directory. FlashError where this installation lacks it."""
    if not has_demo():
        raise FlashError(
            "the demo model is in flashllm's repository and not in this installation; name a model: smollm2 (93 MB, "
            "fetched once), a directory or a hub id"
        )
    return _DEMO


def is_demo(path: Path) -> bool:
    """True for the bundled demo."""
    return path.resolve() == _DEMO.resolve()


def resolve_model(
    model: str | None,
    *,
    convert_on_first_use: bool = True,
    progress: Progress | None = None,
    say: Say = lambda line: None,
    explain: Say = lambda line: None,
    cache: Path | None = None,
    hub: Hub | None = None,
) -> Path:
    """The model directory that `model` means; None means the demo.

    A directory with a manifest is returned as it is, whole or not: the caller opens it. `progress` follows a
    conversion, `say` gets a line for a download, `explain` those on how the model is converted.
    `cache` and `hub` are by default the user's and Hugging Face's.
    UsageError where `model` is nothing we know, or would have to be converted and may not; the errors of `convert` and
    `Hub.download` pass through.
    """
    if model is None:
        return demo_path()
    if not model:
        raise UsageError("MODEL is empty; give a directory or a hub id, or leave it out for the demo")
    source = _Named.of(model)
    if source.path is not None and source.path.is_dir() and not _is_checkpoint(source.path):
        _require_model(source.path)
        return source.path
    cache = user_cache_dir() if cache is None else cache
    models = cache / "models"
    target = models / source.directory_name
    if (target / MANIFEST).exists():
        return target
    if not convert_on_first_use:
        raise UsageError(f"{model}: is not converted yet; run `flashllm convert {model} DST`, then use DST")
    checkpoint, source_name = find_checkpoint(model, say=say, hub=hub, cache=cache)
    try:
        models.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"{models}: cannot be made: {error.strerror}; run `flashllm convert {model} DST`, then use DST"
        raise FlashIOError(message) from error
    explain(f"converting {model} once, into {target}")
    convert(checkpoint, target, source_name=source_name, predictors=True, keep=True, say=explain, progress=progress)
    return target


def find_checkpoint(
    source: str, *, say: Say = lambda line: None, hub: Hub | None = None, cache: Path | None = None
) -> tuple[Path, str | None]:
    """Find what `source` means to `convert` (a folder or a GGUF file), and the name to record where it has one.

    A known model or the hub's is downloaded. UsageError where `source` is nothing we know; the errors of
    `Hub.download` and `known.fetch` pass through.
    """
    named = _Named.of(source)
    if named.path is not None:
        return named.path, None
    if named.hub is not None:
        return (Hub() if hub is None else hub).download(named.hub, say), str(named.hub)
    return fetch(source, (user_cache_dir() if cache is None else cache) / "downloads", say), source


def find_folder(model: str, *, say: Say = lambda line: None) -> Path:
    """A folder that the throughput engine reads as it is: `model`'s own, or the hub's; a GGUF file is converted first.

    Errors as in `resolve_model` and `find_checkpoint`.
    """
    if Path(model).is_dir():
        return Path(model)
    path, _ = find_checkpoint(model, say=say)
    return path if path.is_dir() else resolve_model(model, say=say, explain=say)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """The meaning of a user's name for a model: a path here, a model of the hub's, or (neither) a known model."""

    path: Path | None = None  # a directory or a GGUF file
    hub: HubModel | None = None
    known: str = ""

    @classmethod
    def of(cls, text: str) -> "_Named":
        """A name's meaning: what exists here goes first; what looks like a path is nothing else. UsageError."""
        try:
            path = Path(text).expanduser()
        except RuntimeError as error:
            raise UsageError(f"{text}: there is no such user; write the folder's whole path") from error
        if is_there(path):
            return cls(path=path if path.is_dir() else _of_file(path))
        if text in KNOWN:
            return cls(known=text)
        if hub := HubModel.parse(text):
            owner = Path(text).parts[0]
            if text.startswith(hub.repo) and Path(owner).is_dir():  # a folder of that name: a path with a slip in it?
                raise UsageError(
                    f"{text}: there is no such directory, though {owner} is one; for the hub's model write hf.co/{text}"
                )
            if not text.lower().endswith(_WEIGHT_SUFFIXES) or hub.file is not None:
                return cls(hub=hub)
        if is_address(text) and not text.lower().endswith(_WEIGHT_SUFFIXES):
            raise UsageError(
                f"{text}: names no model of the hub's; write hf.co/owner/name, or hf.co/owner/name/FILE.gguf for a "
                "file of it"
            )
        if path.suffix.lower() in _WEIGHT_SUFFIXES:
            raise UsageError(f"{text}: there is no such file; for one of the hub's, write hf.co/owner/name/FILE.gguf")
        raise UsageError(
            f"{text}: there is no such directory; give a model directory, a Hugging Face folder, a GGUF file, a hub id "
            f"(owner/name) or one of {', '.join(KNOWN)}"
        )

    @property
    def directory_name(self) -> str:
        """A name for the conversion: changes when the source is another or its files change."""
        if self.path is not None:
            return source_key(self.path)
        return self.hub.directory_name if self.hub is not None else self.known


def _of_file(path: Path) -> Path:
    """The GGUF file `path`, or the folder of a file of weights."""
    if path.suffix.lower() == SUFFIX:
        return path
    if path.name.endswith(_WEIGHT_SUFFIXES) and (path.parent / CONFIG).exists():
        return path.parent
    raise UsageError(
        f"{path}: is a file, not a directory; give a model directory, a Hugging Face folder, a GGUF file or a hub id "
        "(owner/name)"
    )


def _is_checkpoint(folder: Path) -> bool:
    """True for a directory that is a checkpoint to convert. What is wrong with others shows when they are opened."""
    return (folder / CONFIG).exists() and not (folder / MANIFEST).exists() and not folder.name.endswith(PARTIAL_SUFFIX)


def _require_model(folder: Path) -> None:
    """UsageError for a folder that holds nothing of a model directory, with what there is in place of it."""
    if folder.name.endswith(PARTIAL_SUFFIX) or any((folder / name).exists() for name in (MANIFEST, FFN, RESIDENT)):
        return
    raise UsageError(
        f"{folder}: is no model directory (no {MANIFEST}) and no Hugging Face folder (no {CONFIG})"
        f"{what_lies_there(folder)}"
    )


def source_key(source: Path) -> str:
    """A name for the conversion of a folder or a GGUF file: changes when it is another or its files change."""
    source = source.resolve()
    digest = hashlib.sha256(os.fsencode(source))
    for path in _files_of(source):
        status = path.stat()
        digest.update(b"\0" + os.fsencode(path.name) + f"\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return f"{source.stem if source.suffix.lower() == SUFFIX else source.name}-{digest.hexdigest()[:16]}"


def _files_of(source: Path) -> list[Path]:
    if source.is_file():
        names = split_files(source.name, [path.name for path in source.parent.glob("*")])
        return [source.with_name(name) for name in names]
    weights = [path for pattern in ("*.safetensors", "*.bin", "*.index.json") for path in sorted(source.glob(pattern))]
    return [*companion_files(source), *weights]
