"""A progress bar on standard error for long work: convert, verify, a prompt that is read in.

At a terminal a bar with rate and remaining time, one line that adapts to the width. Elsewhere silence and a final line.
Knows nothing of the work: it is called with (what, done, total).
"""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TextIO

from flashllm.base.text import inert, is_terminal
from flashllm.base.units import format_size

if TYPE_CHECKING:  # most processes draw no bar, and rich takes a tenth of a second and more to import
    from rich.progress import Progress, TaskID, TextColumn

_INTERVAL = 0.1  # seconds between two drawings


class ProgressBar:
    """A context manager whose instance is the callback: `with ProgressBar("verify") as bar: verify(path, bar)`.

    `unit` is "bytes", or the plural noun of what is counted. Nothing is drawn before the first call. An exception
    leaves the bar where it stood, without the final line. Without a terminal it draws nothing: no thread, no cursor.
    """

    def __init__(self, label: str, *, unit: str = "bytes", file: TextIO | None = None) -> None:
        self._label = label
        self._unit = unit
        self._file = sys.stderr if file is None else file
        self._progress: Progress | None = None
        self._task: TaskID
        self._drawn_s = 0.0
        self._started_s: float | None = None
        self._done = 0

    def __enter__(self) -> Self:
        return self

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` units are done, and the work is at `what` (a file name)."""
        now = time.monotonic()
        first = self._started_s is None
        if first:
            self._started_s = now
            if is_terminal(self._file):
                self._progress = self._start(total)
        self._done = done
        if self._progress is None or (not first and done < total and now - self._drawn_s < _INTERVAL):
            return
        self._drawn_s = now
        amount = f"{self._amount(done)} of {self._amount(total)}"
        # A total of nothing is complete, not pulsing.
        self._progress.update(
            self._task, completed=done, total=max(total, done, 1), what=inert(what).replace("\n", " "), amount=amount
        )
        self._progress.refresh()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        if self._progress is not None:
            self._progress.stop()
        if kind is None and self._started_s is not None:
            seconds = time.monotonic() - self._started_s
            rate = f", {self._amount(int(self._done / seconds))}/s" if seconds >= 1e-3 else ""
            print(f"{self._label}: {self._amount(self._done)} in {seconds:.1f} s{rate}", file=self._file, flush=True)
        return False

    def _start(self, total: int) -> "Progress":
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        def cell(text: str, *, ratio: int | None = None) -> "TextColumn":
            return TextColumn(text, markup=False, table_column=Column(no_wrap=True, ratio=ratio, overflow="ellipsis"))

        progress = Progress(
            cell(self._label),
            BarColumn(bar_width=20),
            cell("{task.percentage:>3.0f}%"),
            cell("{task.fields[amount]}"),
            TimeRemainingColumn(compact=True),
            cell("{task.fields[what]}"),
            console=Console(file=self._file),
            auto_refresh=False,  # drawn by the calls: no thread runs for it
            transient=True,  # the final line says what remains to be said
        )
        self._task = progress.add_task(self._label, total=max(total, 1), what="", amount="")
        progress.start()
        return progress

    def _amount(self, count: int) -> str:
        return format_size(count) if self._unit == "bytes" else f"{count} {self._unit}"
