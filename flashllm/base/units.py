"""Sizes as people write them: 7GB is 7·10⁹ bytes, 512MiB is 512·2²⁰ bytes."""

import re

from flashllm.errors import UsageError

_FACTORS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_FACTORS |= {"TIB": 2**40, "": 1}
_MOST = 2**62  # bytes, that the native core's sums stay within 64 bits


def parse_size(text: str) -> int:
    """Bytes meant by `text` ("7GB", "512MiB", "4096"). Raises UsageError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _FACTORS:
        raise UsageError(f"{text[:80]!r} is not a size; write it like 7GB, 512MiB or 4096")
    nbytes = float(match[1]) * _FACTORS[match[2].upper()]
    if nbytes > _MOST:
        raise UsageError(f"{text[:80]!r} is more than any machine has; write a size like 7GB, 512MiB or 4096")
    return int(nbytes)


def format_size(nbytes: float) -> str:
    """`nbytes` with three significant digits and a decimal unit: 1.23 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 999.5:  # more is 1000 in three digits
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
