"""From a user's name for a model to its directory: a checkpoint, here or the hub's, is converted on first use.

It is kept in the user's cache directory and found there from then on. Loads no model.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from flashllm.arch.registry import resolve
from flashllm.base.files import Progress, locked_directory
from flashllm.base.units import format_size
from flashllm.base.user_dirs import user_cache_dir
from flashllm.convert.checkpoint.folder import what_lies_there
from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.convert.hub import Hub, Say
from flashllm.convert.known import fetch
from flashllm.convert.named import Named, demo_path, find_directory, kept_as
from flashllm.convert.run import convert_checkpoint, partial_path
from flashllm.errors import Busy, FlashError, FlashIOError, UsageError
from flashllm.format.manifest import MANIFEST, PARTIAL_SUFFIX, Manifest, open_model_dir
from flashllm.format.model_files import CONFIG, FFN, RESIDENT


def resolve_model(
    model: str | None,
    *,
    convert_on_first_use: bool = True,
    in_place: bool = True,
    progress: Progress | None = None,
    say: Say = lambda line: None,
    explain: Say = lambda line: None,
    converted: Callable[[Path], None] = lambda path: None,
    cache: Path | None = None,
    hub: Hub | None = None,
) -> Path:
    """The model directory that `model` means; None means the demo.

    A directory with a manifest is returned as it is, whole or not: the caller opens it. `progress` follows a
    conversion, `say` gets a line for a download, or another process that is waited for; `explain` those on how the
    model is converted; `converted` gets what a conversion made.
    With `in_place` a mixture's experts stay in their checkpoint, as far as they can be read there; `say` gets a line on
    that. A copy takes less processor time where few of them fit in memory, and minutes to make.
    `cache` and `hub` are by default the user's and Hugging Face's.
    UsageError where `model` is nothing we know, or would have to be converted and may not; the errors of `convert` and
    `Hub.download` pass through.
    """
    if model is None:
        return demo_path()
    cache = user_cache_dir() if cache is None else cache
    if (found := find_directory(model, cache=cache, in_place=in_place)) is not None:
        return found
    source = Named.of(model)
    if source.path is not None and source.path.is_dir() and not _is_checkpoint(source.path):
        _require_model(source.path)
        return source.path
    target = kept_as(source, cache)
    if not convert_on_first_use:
        raise UsageError(f"{model}: is not converted yet; run `flashllm convert {model} DST`, then use DST")
    checkpoint, source_name = find_checkpoint(model, say=say, hub=hub, cache=cache)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"{target.parent}: cannot be made: {error.strerror}; run `flashllm convert {model} DST`, then use DST"
        raise FlashIOError(message) from error
    with open_checkpoint(checkpoint) as opened:
        in_place = in_place and resolve(opened.config).experts > 0
        if in_place:
            target = kept_as(source, cache, in_place=True)
        explain(f"converting {model} once, into {target}")
        manifest = _converted_alone(
            partial(
                convert_checkpoint,
                opened,
                target,
                source_name=source_name or opened.path.name,
                predictors=True,
                keep=True,
                in_place=in_place,
                say=explain,
                progress=progress,
            ),
            target,
            lambda: say(f"another process converts {model}; waiting for it"),
        )
    if manifest is None:
        return target
    if manifest.in_place is not None:
        say(
            f"{format_size(manifest.in_place.nbytes)} of experts stay in {checkpoint} and are read there: it must stay "
            f"as it is; `flashllm convert {model} DST` copies them"
        )
    converted(target)
    return target


def _converted_alone(convert: Callable[[], Manifest], target: Path, waits: Callable[[], None]) -> Manifest | None:
    """Convert `target`; None if another process made it first.

    While another process converts it, this one waits. If that process ends without a result, this one goes on with the
    conversion. A conversion that fails because `target` has appeared meanwhile is no failure.
    """
    while True:
        try:
            return convert()
        except FlashError as error:
            busy = isinstance(error, Busy)
            if busy:
                begun = partial_path(target)
                with suppress(Busy, FileNotFoundError), locked_directory(begun, "", wait_s=math.inf, waits=waits):
                    pass
            if (target / MANIFEST).exists():
                return None
            if not busy:
                raise


def find_checkpoint(
    source: str, *, say: Say = lambda line: None, hub: Hub | None = None, cache: Path | None = None
) -> tuple[Path, str | None]:
    """Find what `source` means to `convert` (a folder or a GGUF file), and the name to record where it has one.

    A known model or the hub's is downloaded. UsageError where `source` is nothing we know; the errors of
    `Hub.download` and `known.fetch` pass through.
    """
    named = Named.of(source)
    if named.path is not None:
        return named.path, None
    if named.hub is not None:
        return (Hub() if hub is None else hub).download(named.hub, say), str(named.hub)
    return fetch(source, (user_cache_dir() if cache is None else cache) / "downloads", say), source


def find_folder(model: str, *, say: Say = lambda line: None, progress: Progress | None = None) -> Path:
    """A folder that the throughput engine reads as it is: `model`'s own, or the hub's; a GGUF file is converted first.
    `say`, `progress` and errors as in `resolve_model` and `find_checkpoint`."""
    if Path(model).is_dir():
        return Path(model)
    path, _ = find_checkpoint(model, say=say)
    return path if path.is_dir() else resolve_model(model, in_place=False, say=say, explain=say, progress=progress)


def _is_checkpoint(folder: Path) -> bool:
    """True for a directory that is a checkpoint to convert. What is wrong with others shows when they are opened."""
    return (folder / CONFIG).exists() and not (folder / MANIFEST).exists() and not folder.name.endswith(PARTIAL_SUFFIX)


def _require_model(folder: Path) -> None:
    """UsageError for a folder that is no whole model directory, with what there is in place of it."""
    if folder.name.endswith(PARTIAL_SUFFIX) or any((folder / name).exists() for name in (MANIFEST, FFN, RESIDENT)):
        open_model_dir(folder, check_files=False)
        return
    raise UsageError(
        f"{folder}: is no model directory (no {MANIFEST}) and no Hugging Face folder (no {CONFIG})"
        f"{what_lies_there(folder)}"
    )
