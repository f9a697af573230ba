"""From a user's name for a model to its directory: the bundled demo, a directory, a Hugging Face folder, a hub id.

The last two are converted on first use into the user's cache directory and found there from then on. Loads no model.
"""

import hashlib
import os
from pathlib import Path

import flashllm
from flashllm.base.files import Progress
from flashllm.base.user_dirs import user_cache_dir
from flashllm.convert.checkpoint.source import companion_files
from flashllm.convert.hub import Hub, HubModel, Say
from flashllm.convert.run import convert
from flashllm.errors import FlashError, FlashIOError, UsageError
from flashllm.format.manifest import MANIFEST, PARTIAL_SUFFIX
from flashllm.format.model_files import CONFIG

DEMO_NOTICE = "the demo model is so small that its memory saving proves nothing; it shows how the engine works"


def demo_path() -> Path:
    """The bundled demo model's directory. FlashError where this installation lacks it."""
    path = Path(flashllm.__file__).with_name("demo")
    if not (path / MANIFEST).exists():
        raise FlashError(
            f"{path}: the demo model is not in this installation; name a model (a directory or a hub id), or install "
            "flashllm from its repository"
        )
    return path


def is_demo(path: Path) -> bool:
    """Whether `path` is the bundled demo."""
    return path.resolve() == Path(flashllm.__file__).with_name("demo").resolve()


def resolve_model(
    model: str | None,
    *,
    convert_on_first_use: bool = True,
    progress: Progress | None = None,
    say: Say = lambda line: None,
    cache: Path | None = None,
    hub: Hub | None = None,
) -> Path:
    """The model directory that `model` means; None means the demo.

    A directory with a manifest is returned as it is, whole or not: the caller opens it. `progress` follows a
    conversion, `say` gets a line for what takes long. `cache` and `hub` are by default the user's and Hugging Face's.
    UsageError where `model` is nothing we know, or would have to be converted and may not; the errors of `convert` and
    `Hub.download` pass through.
    """
    if model is None:
        return demo_path()
    if not model:
        raise UsageError("MODEL is empty; give a directory or a hub id, or leave it out for the demo")
    folder = Path(model)
    hub_model = None if folder.is_dir() else _parse_hub_model(model)
    if hub_model is None and not _is_checkpoint(folder):
        return folder
    models = (user_cache_dir() if cache is None else cache) / "models"
    target = models / (folder_key(folder) if hub_model is None else hub_model.directory_name)
    if (target / MANIFEST).exists():
        return target
    if not convert_on_first_use:
        raise UsageError(f"{model}: is not converted yet; run `flashllm convert {model} DST`, then use DST")
    checkpoint, source_name = find_checkpoint(model, say=say, hub=hub)
    try:
        models.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"{models}: cannot be made: {error.strerror}; run `flashllm convert {model} DST`, then use DST"
        raise FlashIOError(message) from error
    say(f"converting {model} once, into {target}")
    convert(checkpoint, target, source_name=source_name, predictors=True, progress=progress)
    return target


def find_checkpoint(source: str, *, say: Say = lambda line: None, hub: Hub | None = None) -> tuple[Path, str | None]:
    """The folder to convert that `source` (a folder or a hub id) means, and the name to record where it has one."""
    if Path(source).is_dir():
        return Path(source), None
    hub_model = _parse_hub_model(source)
    return (Hub() if hub is None else hub).download(hub_model, say), str(hub_model)


def _parse_hub_model(model: str) -> HubModel:
    hub_model = HubModel.parse(model)
    if hub_model is None:
        what = "is a file, not a directory" if Path(model).exists() else "there is no such directory"
        raise UsageError(f"{model}: {what}; give a model directory, a Hugging Face folder or a hub id (owner/name)")
    return hub_model


def _is_checkpoint(folder: Path) -> bool:
    """Whether a directory is a checkpoint to convert. What is wrong with others shows when they are opened."""
    return (folder / CONFIG).exists() and not (folder / MANIFEST).exists() and not folder.name.endswith(PARTIAL_SUFFIX)


def folder_key(folder: Path) -> str:
    """A name for the conversion of a Hugging Face folder: changes when the folder is another or its files change."""
    folder = folder.resolve()
    digest = hashlib.sha256(os.fsencode(folder))
    weights = [path for pattern in ("*.safetensors", "*.bin", "*.index.json") for path in sorted(folder.glob(pattern))]
    for path in [*companion_files(folder), *weights]:
        status = path.stat()
        digest.update(b"\0" + os.fsencode(path.name) + f"\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return f"{folder.name}-{digest.hexdigest()[:16]}"
