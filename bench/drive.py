"""Describes a drive: its kind as the system names it, the times of single reads, and its rate at one size of request.
The times have two modes where a cache holds a part of what is read, and answers sooner.

Reads at random over a whole file, directly. How large it must be for no cache to hold it nobody inside the machine can
know, so the span is a part of the answer.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.profile.choice import open_reader
from flashllm.profile.costs import ReaderChoice
from flashllm.profile.reads import batch_s

_PAGE = 4096  # bytes of a single read
_SINGLE = ReaderChoice(backend="threads", depth=1, max_gap=0, source="argument")
_BATCH_NBYTES = 16 << 20
_APART = 3.0  # the slower mode's median is so many times the faster one's, at least
_SEPARATE = 2.0  # and the medians differ by so many of the modes' standard deviations, in logarithms
_LEAST_SHARE = 0.03  # of the reads, that the rarer mode has
_KINDS = {"nvme": "NVMe", "vd": "virtual disk (virtio)", "xvd": "virtual disk (Xen)", "mmcblk": "SD card or eMMC"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveAnswers:
    """Single reads of 4 KiB, and batches as an engine issues them."""

    span_nbytes: int  # that the places were drawn from
    direct: bool
    median_s: float  # of a single read
    p99_s: float
    modes: tuple[tuple[float, float], ...]  # (share of the reads, median seconds): one, or the faster and the slower
    again: float  # median of first reads ÷ median of second reads of the same places
    request_nbytes: int
    bps: float  # at that size, by the reader given


def kind_of_drive(path: Path) -> str:
    """The kind of the drive on which `path` lies, as far as the system tells, and its model where it has one."""
    number = os.stat(path).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        return "unknown (no block device)"
    device = device.resolve()
    if (device / "partition").exists():
        device = device.parent
    below = sorted((device / "slaves").iterdir()) if (device / "slaves").is_dir() else []
    if below:  # encrypted, or several: the first one's kind stands for all
        device = below[0].resolve()
    kind = next((kind for prefix, kind in _KINDS.items() if device.name.startswith(prefix)), "")
    if not kind:
        bus = "USB" if "/usb" in str(device) else "SATA or SAS"
        kind = f"{bus} {'hard disk' if _text(device / 'queue/rotational') == '1' else 'SSD'}"
    return f"{kind} {_text(device / 'device/model')}".strip()


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def answers(file: Path, choice: ReaderChoice, *, request_nbytes: int, singles: int = 1500) -> DriveAnswers:
    """Measure the drive of `file` by reads all over it; a second or two on an SSD.

    Args:
        choice: the reader of the batches, each of requests of `request_nbytes`, rounded up to whole blocks.
        singles: reads of 4 KiB, one at a time.
    """
    opened = _core.DirectFile(str(file))
    random, size = np.random.default_rng(), -(-request_nbytes // _PAGE) * _PAGE
    size = min(size, opened.size // _PAGE * _PAGE)
    memory = _core.allocate(max(_BATCH_NBYTES, size))
    places = random.choice(opened.size // _PAGE, min(singles, opened.size // _PAGE), replace=False) * _PAGE
    one = open_reader(_SINGLE, max_request=_PAGE)
    first, second = (
        np.array([batch_s(one, opened, place, _PAGE, memory) for place in places[:, None]]) for _ in range(2)
    )
    many, rates = open_reader(choice, max_request=max(size, _PAGE)), []
    count = max(1, min(_BATCH_NBYTES, opened.size) // size)
    for _ in range(12):
        batch = random.choice(opened.size // size, count, replace=False) * size
        rates.append(count * size / batch_s(many, opened, batch, size, memory))
    return DriveAnswers(
        span_nbytes=opened.size,
        direct=opened.direct,
        median_s=float(np.median(first)),
        p99_s=float(np.quantile(first, 0.99)),
        modes=modes_of(first),
        again=float(np.median(first) / np.median(second)),
        request_nbytes=size,
        bps=float(np.median(rates)),
    )


def modes_of(seconds: NDArray[np.float64]) -> tuple[tuple[float, float], ...]:
    """(share, median) of each mode of the times of single reads: one mode, or two that lie clearly apart.

    The cut is the one of least variance within the two parts, of the logarithms (Otsu's).
    """
    logs = np.sort(np.log(seconds))
    count = np.arange(1, len(logs))
    sums, squares = np.cumsum(logs)[:-1], np.cumsum(logs**2)[:-1]
    within = squares - sums**2 / count
    rest, rest_squares = logs.sum() - sums, (logs**2).sum() - squares
    within += rest_squares - rest**2 / (len(logs) - count)
    least = max(2, int(_LEAST_SHARE * len(logs)))
    whole = ((1.0, float(np.exp(np.median(logs)))),)
    if len(logs) < 4 * least:
        return whole
    cut = least + int(np.argmin(within[least - 1 : len(logs) - least]))
    low, high = logs[:cut], logs[cut:]
    gap, spread = float(np.median(high) - np.median(low)), float(np.sqrt((low.var() + high.var()) / 2))
    if gap < np.log(_APART) or gap < 2 * _SEPARATE * spread:
        return whole
    parts = ((len(part) / len(logs), float(np.exp(np.median(part)))) for part in (low, high))
    return tuple(parts)
