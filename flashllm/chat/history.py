"""The inputs of earlier chats, for the arrow keys: a private file whose failure never ends a chat."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from flashllm.base.text import valid_unicode


class SafeHistory(FileHistory):
    """A history file that is private, and whose failure (a full disk) costs the history and not the chat."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        super().__init__(str(path))
        self._say = say
        self._failed = False

    def store_string(self, string: str) -> None:
        if self._failed:
            return
        try:
            super().store_string(valid_unicode(string))
        except OSError as error:
            self._failed = True
            self._say(f"the history is not saved from here on: {self.filename!s}: {error.strerror}")


def open_history(path: Path, say: Callable[[str], None]) -> History:
    """The inputs of earlier chats in the file `path`, made if need be; where that fails, said so and in memory only."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        try:
            regular = stat.S_ISREG(os.fstat(fd).st_mode)
        finally:
            os.close(fd)
    except OSError as error:
        say(f"the history is not saved: {path}: {error.strerror}")
        return InMemoryHistory()
    if not regular:  # a pipe or a device, whose reading may never end
        say(f"the history is not saved: {path}: is no regular file")
        return InMemoryHistory()
    return SafeHistory(path, say)
