"""The models that conversions on first use have left in the user's cache. Loads none of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashllm.base.user_dirs import user_cache_dir
from flashllm.convert.locate import resolve_model
from flashllm.errors import FlashError, UsageError
from flashllm.format.manifest import MANIFEST, open_model_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModel:
    """One of them, whole or not."""

    name: str  # what MODEL may be for it
    path: Path
    nbytes: int
    what: str  # its architecture and dtype, or why it cannot be used


def kept_models() -> list[KeptModel]:
    """All of them, by name."""
    folder = user_cache_dir() / "models"
    if not folder.is_dir():
        return []
    return sorted((_kept(path) for path in folder.iterdir() if path.is_dir()), key=lambda each: each.name)


def find(name: str, models: list[KeptModel]) -> KeptModel:
    """The one that `name` means. UsageError where none is, or more than one."""
    found = [each for each in models if name in (each.name, each.path.name, str(each.path))]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{name} means several: give one of {', '.join(str(each.path) for each in found)}")
    known = f"it has {', '.join(each.name for each in models)}" if models else "it is empty"
    raise UsageError(f"{name}: is not in the cache of converted models ({known}); other folders are yours to delete")


def _kept(path: Path) -> KeptModel:
    nbytes = sum(file.lstat().st_size for file in _files(path))
    if not (path / MANIFEST).exists():
        what = "unfinished: the next use of the model goes on with it"
        return KeptModel(name=path.name, path=path, nbytes=nbytes, what=what)
    try:
        manifest = open_model_dir(path)
    except FlashError as error:
        return KeptModel(name=str(path), path=path, nbytes=nbytes, what=str(error))
    source, kind = manifest.source.name, manifest.architecture.model_type
    return KeptModel(
        name=source if _means(source, path) else str(path), path=path, nbytes=nbytes, what=f"{kind}, {manifest.dtype}"
    )


def _means(source: str, path: Path) -> bool:
    """True where `source`, given as MODEL, is the model in `path`."""
    try:
        return resolve_model(source, convert_on_first_use=False) == path
    except (FlashError, OSError):
        return False


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
