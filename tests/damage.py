"""Damage to files of a model directory, which its manifest does not know of, or does."""

import hashlib
import json
from pathlib import Path


def flip(path: Path, offset: int, bits: int = 1) -> None:
    """Turn these bits of the byte at `offset` round; below 0: from the file's end on."""
    with path.open("r+b") as file:
        file.seek(offset, 2 if offset < 0 else 0)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ bits]))


def rehash(directory: Path, *names: str) -> None:
    """Make the manifest say what these files are now, or all: whoever makes a bad model directory does."""
    path = directory / "flashllm.json"
    manifest = json.loads(path.read_text())
    manifest.pop("sha256", None)
    for name in names or manifest["files"]:
        data = (directory / name).read_bytes()
        manifest["files"][name] = {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_text(json.dumps(manifest))
