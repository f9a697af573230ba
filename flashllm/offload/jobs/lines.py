"""A batch file, read whole before anything runs: every line is checked, and what is wrong is said with its number.

Of each line only an entry of a few dozen bytes stays in memory; its text is read again when its turn comes. Knows how
lines are found in the file and what makes them a job; what a line means is in `requests`.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from flashllm.api.fields import BadRequest
from flashllm.api.prompts import PromptEncoder, Unanswerable
from flashllm.api.requests import Request
from flashllm.base.files import Closing, file_status, naming, open_for_reading
from flashllm.errors import FlashIOError, FormatError
from flashllm.offload.jobs.blocks import Size
from flashllm.offload.jobs.requests import parse_request
from flashllm.offload.jobs.sequences import Sequence, sequence_of

MAX_LINE_NBYTES = 16 * 2**20
MAX_LINES = 1_000_000
_BOM = b"\xef\xbb\xbf"
_IDENTITY_CHARS = 24  # of a SHA-256 in hexadecimal: 96 bits
_SHOWN_PROBLEMS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the batch file that is not blank."""

    number: int  # from 1, blank lines counted
    offset: int  # in the file, bytes
    nbytes: int  # without the line end
    custom_id: str
    identity: str  # of the line's bytes and the job's settings: an answer under it answers this line and no other
    prompt_tokens: int  # 0 where the line has no prompt
    max_new_tokens: int
    is_batch: bool  # answered in the form of an OpenAI batch, not as a simple object
    problem: str | None = None  # why it will not be computed

    @property
    def size(self) -> Size:
        return self.prompt_tokens, self.prompt_tokens + self.max_new_tokens - 1


class BatchFile(Closing):
    """The checked lines of a batch file, which stays open. See `read`."""

    def __init__(self, path: Path, fd: int, encoder: PromptEncoder, max_new_tokens: int, settings: str) -> None:
        self.path, self._fd = path, fd
        self._encoder, self._max_new_tokens = encoder, max_new_tokens
        self._settings = settings.encode()
        self._stamp = self._state()
        self._text = path.suffix == ".txt"
        self.lines: list[Line] = []

    @classmethod
    def read(
        cls,
        path: Path,
        encoder: PromptEncoder,
        *,
        max_new_tokens: int,
        settings: str = "",
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Self:
        """Opens and checks the file `path`: plain prompts where it ends in .txt, else a JSON object a line.

        `settings` names what else the answers depend on, the model first. `progress` is called with bytes read and in
        all. FormatError that lists every malformed line (the first ten in full); well-formed requests that the model
        cannot answer become lines with a `problem`.
        """
        fd = open_for_reading(path)
        try:
            batch = cls(path, fd, encoder, max_new_tokens, settings)
            with naming(path):
                batch._check(progress)
        except BaseException:
            os.close(fd)
            raise
        return batch

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def request(self, index: int) -> Request:
        """The request in `lines[index]`, which has no problem. FlashIOError where the file has changed."""
        line = self.lines[index]
        with naming(self.path):
            raw = os.pread(self._fd, line.nbytes, line.offset)
        if self._state() != self._stamp or len(raw) != line.nbytes:
            raise FlashIOError(f"{self.path}: was changed while the job ran; start it again with --resume")
        if self._identity(line.custom_id, raw) != line.identity:  # by the drive, or with its old time
            raise FlashIOError(
                f"{self.path}: line {line.number} reads otherwise than when it was checked: it was changed, or the "
                "drive fails; start the job again with --resume"
            )
        return parse_request(raw, line.number, text=self._text, max_new_tokens=self._max_new_tokens)

    def sequence(self, index: int) -> Sequence:
        """The sequence of `lines[index]`, with `index` as its key."""
        request = self.request(index)
        return sequence_of(self._encoder, request, self._encoder.encode(request), index, marks=True)

    def _state(self) -> tuple[int, int]:
        status = file_status(self._fd, self.path)
        return status.st_size, status.st_mtime_ns

    def _check(self, progress: Callable[[int, int], None]) -> None:
        places: dict[str, int] = {}  # custom_id -> line number
        problems: list[str] = []
        num_problems = count = 0
        for count, (number, offset, raw) in enumerate(self._raw_lines(), 1):
            progress(offset, self._stamp[0])
            if count > MAX_LINES:
                raise FormatError(f"{self.path}: has more than {MAX_LINES} lines; split it")
            try:
                self.lines.append(self._line(number, offset, raw, places))
            except BadRequest as error:
                num_problems += 1
                if num_problems <= _SHOWN_PROBLEMS:
                    problems.append(f"line {number}: {error}")
        progress(self._stamp[0], self._stamp[0])
        if problems:
            more = f"; and {num_problems - len(problems)} more" if num_problems > len(problems) else ""
            raise FormatError(
                f"{self.path}: {num_problems} of {count} lines are malformed, and nothing was run: "
                f"{'; '.join(problems)}{more}"
            )
        if not self.lines:
            raise FormatError(f"{self.path}: has no requests")

    def _line(self, number: int, offset: int, raw: bytes | None, places: dict[str, int]) -> Line:
        """The entry of a line, whose custom_id is entered in `places`. BadRequest where it is malformed."""
        if raw is None:
            raise BadRequest(f"is longer than {MAX_LINE_NBYTES} bytes")
        request = parse_request(raw, number, text=self._text, max_new_tokens=self._max_new_tokens)
        custom_id, problem = request.custom_id, None
        if custom_id in places:
            raise BadRequest(f"custom_id {custom_id[:80]!r} is that of line {places[custom_id]}")
        places[custom_id] = number
        tokens = new = 0
        try:
            tokens = len(self._encoder.encode(request))
            new = self._encoder.max_new_tokens(request, tokens)
        except Unanswerable as error:
            problem = str(error)
        return Line(
            number=number,
            offset=offset,
            nbytes=len(raw),
            custom_id=custom_id,
            identity=self._identity(custom_id, raw),
            prompt_tokens=tokens,
            max_new_tokens=new,
            is_batch=request.kind != "prompt",
            problem=problem,
        )

    def _identity(self, custom_id: str, raw: bytes) -> str:
        digest = hashlib.sha256()
        for part in (self._settings, b"", custom_id.encode(), raw):  # the second told malformed lines apart
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()[:_IDENTITY_CHARS]

    def _raw_lines(self) -> Iterator[tuple[int, int, bytes | None]]:
        """(number, offset, bytes without the line end) of each line that is not blank; None for one too long."""
        with open(os.dup(self._fd), "rb") as file:
            number = offset = 0
            while raw := file.readline(MAX_LINE_NBYTES + 1):
                number, start = number + 1, offset
                offset += len(raw)
                whole = raw.endswith(b"\n") or len(raw) <= MAX_LINE_NBYTES
                while not raw.endswith(b"\n") and (rest := file.readline(MAX_LINE_NBYTES)):
                    offset += len(rest)
                    raw = rest
                if start == 0 and whole and raw.startswith(_BOM):
                    raw, start = raw[len(_BOM) :], len(_BOM)
                if not whole:
                    yield number, start, None
                elif raw.strip():
                    yield number, start, raw.rstrip(b"\r\n")


def rank(prompt_tokens: int, max_new_tokens: int) -> tuple[int, int, int]:
    """The key by which requests are sorted, falling, to fill blocks. A block is as long as its longest prompt and
    answer, so prompts of as many pages (64 tokens) lie together, and of those the same new tokens. The longest go
    first: a job too large for the machine fails at its start, and the time left is guessed too long, not too short."""
    return -(-prompt_tokens // 64), max_new_tokens, prompt_tokens


def ranked(lines: list[Line], todo: list[int]) -> list[int]:
    """The indices `todo` in the order in which they fill blocks."""
    return sorted(todo, key=lambda index: rank(lines[index].prompt_tokens, lines[index].max_new_tokens), reverse=True)
