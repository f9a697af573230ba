"""A user's name for a model: the demo, a directory, a checkpoint here or the hub's, smollm2; and what is there of it.

Converts and downloads nothing, and imports nothing of what does: most runs find the directory there.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import flashllm
from flashllm.base.files import is_there
from flashllm.base.user_dirs import user_cache_dir
from flashllm.convert.checkpoint.source import companion_files
from flashllm.convert.hub import GGUF, HubModel, is_address, split_files
from flashllm.convert.known import KNOWN
from flashllm.errors import FlashError, UsageError
from flashllm.format.manifest import MANIFEST, Manifest
from flashllm.format.model_files import CONFIG

_WEIGHT_SUFFIXES = (GGUF, ".safetensors", ".bin", ".index.json")
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


def find_directory(model: str | None, *, cache: Path | None = None, in_place: bool = True) -> Path | None:
    """The model directory that `model` means; None where there is none yet. None means the demo.

    `cache` is by default the user's. `in_place`: also one whose experts lie in another file. UsageError where `model`
    is nothing we know.
    """
    if model is None:
        return demo_path()
    if not model:
        raise UsageError("MODEL is empty; give a directory or a hub id, or leave it out for the demo")
    source = Named.of(model)
    if source.path is not None and (source.path / MANIFEST).exists():
        return source.path
    cache = user_cache_dir() if cache is None else cache
    for target in (kept_as(source, cache), kept_as(source, cache, in_place=True)):
        if (target / MANIFEST).exists() and (in_place or Manifest.load(target).in_place is None):
            return target
    return None


def kept_as(source: "Named", cache: Path, *, in_place: bool = False) -> Path:
    """The directory that keeps a checkpoint's conversion on first use; `in_place`: the one without its experts, unless
    they could not be read there."""
    return cache / "models" / f"{source.directory_name}{'-in-place' if in_place else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The meaning of a user's name for a model: a path here, a model of the hub's, or (neither) a known model."""

    path: Path | None = None  # a directory or a GGUF file
    hub: HubModel | None = None
    known: str = ""

    @classmethod
    def of(cls, text: str) -> "Named":
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
        well_known = json.loads(resources.files(__package__).joinpath("models.json").read_text(encoding="utf-8"))
        if text.lower() in well_known:
            hub = well_known[text.lower()][0]
            raise UsageError(
                f"{text}: is a name for `plan` alone; the model comes from Hugging Face's hub: write {hub}"
            )
        raise UsageError(
            f"{text}: there is no such directory; give a model directory, a Hugging Face folder, a GGUF file, a hub id "
            f"(owner/name) or one of {', '.join(KNOWN)}; `flashllm models` lists more"
        )

    @property
    def directory_name(self) -> str:
        """A name for the conversion: changes when the source is another or its files change."""
        if self.path is not None:
            return source_key(self.path)
        return self.hub.directory_name if self.hub is not None else self.known


def _of_file(path: Path) -> Path:
    """The GGUF file `path`, or the folder of a file of weights."""
    if path.suffix.lower() == GGUF:
        return path
    if path.name.endswith(_WEIGHT_SUFFIXES) and (path.parent / CONFIG).exists():
        return path.parent
    raise UsageError(
        f"{path}: is a file, not a directory; give a model directory, a Hugging Face folder, a GGUF file or a hub id "
        "(owner/name)"
    )


def source_key(source: Path) -> str:
    """A name for the conversion of a folder or a GGUF file: changes when it is another or its files change."""
    source = source.resolve()
    digest = hashlib.sha256(os.fsencode(source))
    for path in _files_of(source):
        status = path.stat()
        digest.update(b"\0" + os.fsencode(path.name) + f"\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return f"{source.stem if source.suffix.lower() == GGUF else source.name}-{digest.hexdigest()[:16]}"


def _files_of(source: Path) -> list[Path]:
    if source.is_file():
        names = split_files(source.name, [path.name for path in source.parent.glob("*")])
        return [source.with_name(name) for name in names]
    weights = [path for pattern in ("*.safetensors", "*.bin", "*.index.json") for path in sorted(source.glob(pattern))]
    return [*companion_files(source), *weights]
