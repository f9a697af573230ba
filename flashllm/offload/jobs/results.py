"""The output file: a JSON object a line, appended and synced a block at a time, and continued after any interruption.

What a line answers is in its "id": `batch_req_`, the identity of the input line, and a checksum of the answer. So a
file of other requests, or of another model or seed, is found out, and a line that was changed. The rules:

 1. a line is written whole, line end last, and blocks are synced before the next one begins;
 2. the last line may be torn (a kill, a full disk, a power cut): `--resume` cuts it off, if it can be the beginning of
    an answer of this job;
 3. anything else that this job would not have written is an error, and the file stays as it is;
 4. one process at a time holds the file's lock.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from flashllm.base.files import Closing, fsync_directory, naming, parse_json
from flashllm.base.units import format_size
from flashllm.errors import FlashIOError, FormatError, UsageError
from flashllm.offload.jobs.answers import ID_PREFIX
from flashllm.offload.jobs.lines import Line

_LINE_NBYTES = 400  # of an answer, its text left out
_TOKEN_NBYTES = 5  # of an answer's text, a token
_MAX_NBYTES = 256 * 2**20  # of an output line that is read again
_CHECKSUM_CHARS = 16  # of a SHA-256 in hexadecimal: 64 bits
_HEAD = f'{{"id": "{ID_PREFIX}'.encode()  # how every line of ours begins


class Results(Closing):
    """The open output file. `done` are the indices of lines that it answers already."""

    def __init__(self, path: Path, fd: int, *, created: bool) -> None:
        self.path, self._fd, self._created = path, fd, created
        self._nbytes = 0  # of whole lines
        self.done = array("q")
        self.cut_nbytes = 0  # of a torn last line
        self.num_answers = 0  # lines of the file
        self.num_failures = 0  # of them, those that say why there is no answer

    @classmethod
    def open(cls, path: Path, lines: Sequence[Line], *, source: Path, resume: bool) -> Self:
        """Creates the output file, or with `resume` continues one that is there.

        UsageError where `path` is the batch file `source` itself, or holds something and `resume` is not given.
        FormatError for a file that this job did not write, FlashIOError where it cannot be written or is in use.
        """
        check_output(path, source=source, resume=resume)
        created = not path.exists()
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_CREAT, 0o644)
        except OSError as error:
            raise FlashIOError(f"{path}: cannot be opened for writing: {error.strerror}") from error
        try:
            results = cls(path, fd, created=created)
            results._lock()
            with naming(path):
                if not resume and os.fstat(fd).st_size:  # made since `check_output` looked
                    raise UsageError(_exists(path))
                results._read(lines)
            fsync_directory(path.absolute().parent)
        except BaseException:
            os.close(fd)
            raise
        return results

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if self._created and self._nbytes == 0:  # nothing to go on from: the next start needs no --resume
            self.path.unlink(missing_ok=True)
        os.close(fd)

    def append(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Write these output objects and make them durable.

        FlashIOError where the disk is full or fails: what was written before stays, and `--resume` continues from it.
        """
        lines = ({**each, "id": f"{each['id']}_{_checksum(each)}"} for each in answers)
        data = b"".join(json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n" for line in lines)
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], self._nbytes + done)
            os.fsync(self._fd)
        except OSError as error:
            raise FlashIOError(self._failed(error, len(data))) from error
        self._nbytes += len(data)
        self.num_answers += len(answers)
        self.num_failures += sum(_is_failure(each) for each in answers)

    def _failed(self, error: OSError, nbytes: int) -> str:
        with contextlib.suppress(OSError):  # where the drive fails, --resume cuts the line off
            os.ftruncate(self._fd, self._nbytes)
        what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error.strerror)
        return (
            f"{self.path}: writing {format_size(nbytes)} of answers failed: {what}; the answers before them are safe "
            f"({format_size(self._nbytes)}): run the same command with --resume when there is room"
        )

    def _lock(self) -> None:
        if not os.path.isfile(self._fd):
            raise UsageError(f"{self.path}: is not a regular file")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FlashIOError(f"{self.path}: another flashllm is writing this file") from None
        except OSError as error:
            raise FlashIOError(f"{self.path}: this file system cannot lock: {error.strerror}") from error

    def _read(self, lines: Sequence[Line]) -> None:
        """Find out what is done, and cut a torn last line off."""
        places = {line.identity: index for index, line in enumerate(lines)}
        custom_ids = {line.custom_id for line in lines}
        seen: set[int] = set()
        torn = b""
        with os.fdopen(os.dup(self._fd), "rb") as file:
            number = 0
            while raw := file.readline(_MAX_NBYTES):
                number += 1
                if not raw.endswith(b"\n"):
                    torn = raw
                    break
                value = self._parse(raw, number)
                index = self._place(value, number, places, custom_ids)
                if index in seen:
                    name = lines[index].custom_id[:80]
                    raise FormatError(f"{self.path}: line {number} answers {name!r} a second time")
                seen.add(index)
                self.num_answers += 1
                self._nbytes += len(raw)
                self.num_failures += _is_failure(value)
        self.done = array("q", sorted(seen))
        if torn:
            if not _may_be_torn(torn, lines, seen):
                raise FormatError(f"{self.path}: its last line is not of this job; name another output file")
            self.cut_nbytes = os.fstat(self._fd).st_size - self._nbytes
            os.ftruncate(self._fd, self._nbytes)
            os.fsync(self._fd)

    def _parse(self, raw: bytes, number: int) -> dict[str, Any]:
        try:
            value = parse_json(raw, f"{self.path}: line {number}")
        except FormatError as error:
            raise FormatError(f"{error}; it is no output of `flashllm offload run`, or is damaged") from None
        identity = value.get("id") if isinstance(value, dict) else None
        if not isinstance(identity, str) or not identity.startswith(ID_PREFIX):
            raise FormatError(f"{self.path}: line {number} is no output of `flashllm offload run`; name another file")
        return dict(value)

    def _place(self, value: Mapping[str, Any], number: int, places: Mapping[str, int], custom_ids: set[str]) -> int:
        identity, _, checksum = value["id"].removeprefix(ID_PREFIX).partition("_")
        index = places.get(identity)
        if index is not None and checksum == _checksum(value):
            return index
        if index is not None:  # nothing is lost: the line may be of use to somebody, and its request is still there
            raise FormatError(
                f"{self.path}: line {number} is not as it was written: it was changed or is damaged, or is of another "
                "version of flashllm; take it out to have it answered again, or name another output file"
            )
        custom_id = str(value.get("custom_id"))
        reason = (
            "which was asked otherwise: the line has changed, or the model, --max-new-tokens or --compress has, or "
            "another version of flashllm began the file and packed weights otherwise"
            if custom_id in custom_ids
            else "which the input does not have"
        )
        raise FormatError(f"{self.path}: line {number} answers {custom_id[:80]!r}, {reason}; name another output file")


def check_output(path: Path, *, source: Path, resume: bool) -> None:
    """UsageError where `path` cannot be the output of a job over `source`. Touches nothing."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: its directory does not exist")
    if not path.exists():
        return
    if source.exists() and os.path.samefile(path, source):
        raise UsageError(f"{path}: is the input itself; name another output file")
    if not path.is_file():
        raise UsageError(f"{path}: is not a regular file")
    if not resume and path.stat().st_size:
        raise UsageError(_exists(path))


def expected_nbytes(lines: Sequence[Line]) -> tuple[int, int]:
    """(least, most) bytes that the answers to `lines` take, roughly: without any text, and with every token allowed."""
    least = sum(_LINE_NBYTES + len(line.custom_id) for line in lines)
    return least, least + sum(_TOKEN_NBYTES * line.max_new_tokens for line in lines)


def _exists(path: Path) -> str:
    return f"{path}: exists; continue it with --resume, or name another output file"


def _is_failure(value: Mapping[str, Any]) -> bool:
    return value.get("error") is not None


def _checksum(answer: Mapping[str, Any]) -> str:
    """Checksum of an answer without its id and the second it was made in, so that equal answers have equal ids."""
    content = {name: value for name, value in answer.items() if name != "id"}
    response = content.get("response")
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        content["response"] = {**response, "body": {**response["body"], "created": None}}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:_CHECKSUM_CHARS]


def _may_be_torn(torn: bytes, lines: Sequence[Line], seen: set[int]) -> bool:
    """True where `torn` can be the beginning of a line that this job was writing.

    A power cut may leave zeros where data was about to be: a file's size can reach the drive before its bytes.
    """
    torn = torn.rstrip(b"\0")
    if len(torn) <= len(_HEAD):
        return _HEAD.startswith(torn)
    if not torn.startswith(_HEAD):
        return False
    begun = torn[len(_HEAD) :].split(b'"')[0].split(b"_")[0].decode("ascii", "replace")
    return any(line.identity.startswith(begun) for index, line in enumerate(lines) if index not in seen)
