"""A GGUF file whose metadata says anything: one sentence that names the file, or a model that loads and answers.

    python tests/faults/metadata.py            every key that is read, of every architecture here, at every value

The keys are those that a conversion asks for. The last line is one JSON document.
"""

import argparse
import contextlib
import io
import json
import math
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))

from arch_models import VARIANTS, Variant, make_checkpoint
from gguf_files import write_gguf
from operations import BUG

from flashllm.cli import main as main_of_flashllm
from flashllm.convert.checkpoint.gguf import file as gguf_file
from flashllm.convert.checkpoint.gguf.header import read_header
from flashllm.convert.checkpoint.gguf.metadata import Metadata
from flashllm.convert.run import convert
from flashllm.errors import FlashError

MISSING = object()
ODD = [
    0, 1, -1, 2**31, 2**32 - 1, 2**63, 0.5, -1.0, 1e-38, 1e300, math.nan, math.inf, "", "x", [], [1], [1, 2], ["x"],
    [math.nan], True, False, MISSING,
]  # fmt: skip
_PIECES = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [-float(rank) for rank in range(300)]}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
SOURCES: dict[str, tuple[Variant, dict[str, Any]]] = {
    "llama": (Variant("llama", {"hidden_act": "silu", "rope_parameters": _YARN}), {}),
    "pieces": (Variant("llama", {"hidden_act": "silu"}), _PIECES),
    "phi3": (VARIANTS["phi3 longrope"], {}),
    "gpt-oss": (Variant("gpt_oss"), {}),
    **{
        name: (Variant(name), {})
        for name in ("gemma2", "gemma3_text", "granite", "cohere", "falcon", "gpt_neox", "stablelm", "olmoe")
    },
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One key at one value."""

    path: Path
    key: str
    value: Any

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.path.stem}: {self.key} = {'missing' if self.value is MISSING else repr(self.value)[:60]}"


@contextlib.contextmanager
def saying(change: Callable[[dict[str, Any]], Any]) -> Iterator[None]:
    """Files' metadata is as `change` leaves it."""

    def changed(*arguments: Any) -> Any:
        header = read_header(*arguments)
        metadata = dict(header.metadata)
        change(metadata)
        return replace(header, metadata=metadata)

    with patch.object(gguf_file, "read_header", changed):
        yield


def keys_read(path: Path, out: Path) -> list[str]:
    """What a conversion of the file asks for."""
    keys = set()
    real_value, real_contains = Metadata._value, Metadata.__contains__

    def value(self: Metadata, key: str, *default: Any) -> Any:
        keys.add(key)
        return real_value(self, key, *default)

    def contains(self: Metadata, key: str) -> bool:
        keys.add(key)
        return real_contains(self, key)

    with patch.object(Metadata, "_value", value), patch.object(Metadata, "__contains__", contains):
        convert(path, out)
    shutil.rmtree(out)
    return sorted({*keys, "general.alignment"})


def trials(root: Path, names: list[str]) -> list[Trial]:
    """Every key of these files at every odd value."""
    result = []
    for name in names:
        variant, metadata = SOURCES[name]
        path = write_gguf(make_checkpoint(root / name, variant), root / f"{name}.gguf", metadata=metadata)
        result += [Trial(path, key, value) for key in keys_read(path, root / "out") for value in ODD]
    return result


def problem(trial: Trial, out: Path) -> str | None:
    """What is wrong with how the trial ends; None: nothing."""

    def change(metadata: dict[str, Any]) -> None:
        metadata.pop(trial.key, None)
        if trial.value is not MISSING:
            metadata[trial.key] = trial.value

    shutil.rmtree(out, ignore_errors=True)
    with saying(change):
        try:
            convert(trial.path, out)
        except FlashError as error:
            where = str(trial.path) in str(error)
            return None if where and not out.exists() else f"says {error}"
        except Exception as error:
            return f"ends in {type(error).__name__}: {error}"
    said = io.StringIO()
    words = ["generate", str(out), "--prompt", "The dog", "--max-new-tokens", "2", "--threads", "1"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        status = main_of_flashllm(words)
    # A context of one token is one; numbers that fp32 has may lead beyond it, which the model notices.
    if status == 0 or re.search("not finite|context limit of 1 token", said.getvalue()):
        return None
    return f"converts, and then: {BUG if BUG in said.getvalue() else said.getvalue()[-300:]}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--only", nargs="*", choices=list(SOURCES), default=list(SOURCES))
    parser.add_argument("--sample", type=int, help="so many, chosen at random, instead of all")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        chosen = trials(Path(folder), args.only)
        if args.sample is not None:
            chosen = random.Random(0).sample(chosen, args.sample)
        problems = []
        for trial in chosen:
            if (what := problem(trial, Path(folder) / "out")) is not None:
                problems.append({"trial": trial.name, "problem": what})
                print(json.dumps(problems[-1]), file=sys.stderr, flush=True)
    row = {"fault": "GGUF metadata of any value", "tried": len(chosen), "survived": len(chosen) - len(problems)}
    arguments = sys.argv[1:] if argv is None else argv
    print(json.dumps({"bad": len(problems), "table": [row], "problems": problems, "arguments": arguments}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
