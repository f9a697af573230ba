"""Conversations that a user saved by name, one file each. Knows no chat: what a conversation says is its note."""

import re
from pathlib import Path
from typing import Any

from flashllm.base.files import is_there
from flashllm.errors import FlashIOError, UsageError
from flashllm.generate.session import Session
from flashllm.parked.file import read_parked, write_parked

_NAME = re.compile(r"[\w][\w. -]{0,99}")
_SUFFIX = ".kv"


class Shelf:
    """A folder of named conversations with one model, made when the first is saved."""

    def __init__(self, folder: Path, model: str) -> None:
        """`model`: as `flashllm.parked.file.identity`."""
        self._folder, self._model = folder, model

    def save(self, name: str, session: Session, note: dict[str, Any]) -> int:
        """Keep `session` under a new name; bytes written. UsageError where there is one, or nothing to keep."""
        path = self._path(name)
        if session.computed == 0:
            raise UsageError("nothing has been said yet")
        if is_there(path):
            raise UsageError(f"{name} exists; choose another name, or delete {path}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FlashIOError(f"{self._folder}: cannot be made: {error.strerror}") from error
        return write_parked(path, session, self._model, note)

    def load(self, name: str, session: Session) -> dict[str, Any]:
        """Make `session` what was saved; its note.

        Raises UsageError where there is no such name; FormatError, FlashIOError, ContextFull: `session` is then empty.
        """
        path = self._path(name)
        if not is_there(path):
            names = ", ".join(sorted(each.stem for each in self._folder.glob(f"*{_SUFFIX}"))[:20])
            raise UsageError(f"there is no {name}; saved are: {names or 'none'}")
        return read_parked(path, session, self._model).note

    def _path(self, name: str) -> Path:
        if _NAME.fullmatch(name) is None:
            raise UsageError("a name has up to 100 letters, digits, spaces, dots and dashes, and begins with a letter")
        return self._folder / f"{name}{_SUFFIX}"
