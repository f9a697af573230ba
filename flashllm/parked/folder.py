"""Parked conversations of a server: a folder with a limit of bytes, and one of bytes written a day (drives wear out).

A file's name is a hash of the model and its tokens, so the same conversation is written once. What was used longest ago
goes first; files of other models count, and so do those that are being written. Whatever is torn or damaged is passed
over, and what cannot be written is said: everything here can be computed again.
"""

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashllm._core import PAGE_TOKENS
from flashllm.base.command_line import say
from flashllm.base.files import read_json_object, write_atomically
from flashllm.errors import ContextFull, FlashError, FlashIOError, FormatError
from flashllm.generate.session import Session
from flashllm.parked.file import Parked, read_header, read_parked, write_parked
from flashllm.parked.tokens import Tokens

MIN_TOKENS = 64  # of a conversation that is worth a file
_SUFFIX = ".kv"
_BEGUN = re.compile(r"\..+\.kv\.(\d+)\.tmp")  # of a file that is being written, by which process
_WRITTEN = "written.json"  # bytes written today


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A parked conversation of this model."""

    path: Path
    tokens: Tokens
    computed: int
    in_parts: bool  # its beginning can be taken up too: no window gave up what is behind it, no state
    pure: int  # `Session.prompted`
    after: bytes | None  # the same


class ParkingFolder:
    """The folder. One thread uses it; several servers may share the directory."""

    def __init__(
        self, folder: Path, model: str, *, max_nbytes: int, daily_nbytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        """`model`: as `flashllm.parked.file.identity`. FlashIOError where the folder cannot be made."""
        self._folder, self._model, self._clock = folder, model, clock
        self._max_nbytes, self._daily_nbytes = max_nbytes, daily_nbytes
        self._told = False  # that nothing can be written
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise FlashIOError(f"{folder}: cannot be made: {error.strerror}; choose another place") from error
        self.entries: list[Entry] = []
        for path in self._files():
            if (begun := _BEGUN.fullmatch(path.name)) is not None:
                if _left_behind(int(begun[1])):
                    with contextlib.suppress(OSError):
                        path.unlink()
                continue
            with contextlib.suppress(FlashError, ValueError):
                parked = read_header(path)
                if parked.model == model:
                    self.entries.append(_entry(parked))
        self._make_room(0)

    def park(self, session: Session, *, after: bytes | None) -> bool:
        """Write `session`, unless it is there, or what goes on from it, or it is short or more than may be written;
        whether it is there now."""
        if session.computed < MIN_TOKENS:
            return False
        kinds, tokens, pure = session.save(), Tokens.of(session.tokens), session.prompted
        path = self._folder / f"{self._name(tokens)}{_SUFFIX}"
        in_parts = _in_parts([len(pages) for pages in kinds], session.computed)
        entry = Entry(path=path, tokens=tokens, computed=session.computed, in_parts=in_parts, pure=pure, after=after)
        for known in self.entries:
            if (known.path == path and (known.pure, known.after) == (pure, after)) or _goes_on(known, entry):
                _touch(known.path, self._clock())
                return True
        nbytes = sum(page.nbytes for pages in kinds for page in pages) + 8 * len(tokens)
        if nbytes > self._max_nbytes or self._written() + nbytes > self._daily_nbytes:
            return False
        note = {"pure": pure, "after": None if after is None else after.hex()}
        try:
            self._make_room(nbytes)
            written = write_parked(path, session, self._model, note)
            _touch(path, self._clock())
            self._count(written)
        except (FlashError, OSError) as error:
            if not self._told:
                say(f"conversations are not parked for now: {error}")
            self._told = True
            return False
        self._told = False
        # What the new one continues is of no more use.
        for old in [each for each in self.entries if each.path == path or _goes_on(entry, each)]:
            self._drop(old, keep_file=old.path == path)
        self.entries.append(entry)
        return True

    def load(self, entry: Entry, session: Session) -> bool:
        """Make `session` what was parked. False where it cannot be read, or there is no memory: it is then empty."""
        try:
            parked = read_parked(entry.path, session, self._model, prompted=entry.pure)
            if parked.tokens != entry.tokens.ids:
                raise FormatError(f"{entry.path}: was replaced")
        except ContextFull:
            return False
        except (FlashError, OSError) as error:
            session.reset()
            self._drop(entry, keep_file=not isinstance(error, FormatError))  # a drive may answer another time
            return False
        _touch(entry.path, self._clock())
        return True

    def _name(self, tokens: Tokens) -> str:
        return hashlib.sha256(self._model.encode() + tokens.ids.tobytes()).hexdigest()

    def _drop(self, entry: Entry, *, keep_file: bool = False) -> None:
        self.entries.remove(entry)
        if not keep_file:
            with contextlib.suppress(OSError):
                entry.path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        """The files of all models, whole and begun. None where the drive does not say."""
        try:
            paths = sorted(self._folder.iterdir())
        except OSError:
            return []
        return [path for path in paths if path.suffix == _SUFFIX or _BEGUN.fullmatch(path.name)]

    def _make_room(self, nbytes: int) -> None:
        """Delete what was used longest ago until `nbytes` more fit."""
        files = []
        for path in self._files():
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, path, status.st_size))
        held = sum(size for _, _, size in files)
        for _, path, size in sorted(files):
            if held + nbytes <= self._max_nbytes:
                break
            held -= size
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            self.entries = [each for each in self.entries if each.path != path]

    def _today(self) -> str:
        return time.strftime("%Y-%m-%d", time.gmtime(self._clock()))

    def _written(self) -> int:
        """Bytes written today, also by a server before this one."""
        try:
            record = read_json_object(self._folder / _WRITTEN, 4096)
        except (FlashError, OSError):
            return 0
        nbytes = record.get("bytes")
        return nbytes if record.get("day") == self._today() and type(nbytes) is int else 0

    def _count(self, nbytes: int) -> None:
        text = f'{{"day": "{self._today()}", "bytes": {self._written() + nbytes}}}\n'
        with contextlib.suppress(OSError):
            write_atomically(self._folder / _WRITTEN, text.encode())


def _entry(parked: Parked) -> Entry:
    """ValueError where the note is not one of this module's."""
    pure, after = parked.note.get("pure"), parked.note.get("after")
    if type(pure) is not int or not 0 <= pure <= parked.computed or not isinstance(after, str | None):
        raise ValueError("no note of a server's")
    return Entry(
        path=parked.path,
        tokens=Tokens.of(parked.tokens),
        computed=parked.computed,
        in_parts=_in_parts(parked.pages, parked.computed),
        pure=pure,
        after=None if after is None else bytes.fromhex(after),
    )


def _left_behind(process: int) -> bool:
    """True where no process goes on writing the files that one began.

    This process has begun none yet, and in a container all that ever were have its id. What another container's is
    still writing may be taken for such a file: then it parks one conversation less.
    """
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's process; no process's number
        return False
    return process == os.getpid()


def _in_parts(pages: Sequence[int], computed: int) -> bool:
    return all(count == -(-computed // PAGE_TOKENS) for count in pages)


def _goes_on(new: Entry, old: Entry) -> bool:
    """True where whatever the old one gives the new one gives too, but for a conversation that is taken up again. Where
    windows have given up what is behind them, a beginning that others may share is a file of its own."""
    if not new.in_parts and old.pure == old.computed:
        return False
    whole = new.tokens.shared_with(old.tokens) == len(old.tokens) < len(new.tokens)
    return whole and old.pure <= new.pure


def _touch(path: Path, now: float) -> None:
    with contextlib.suppress(OSError):
        os.utime(path, (now, now))
