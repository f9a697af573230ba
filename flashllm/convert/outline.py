"""The outline of a model directory: every file in its size, with its headers and without weights, from a config alone.

What plans by sizes (`flashllm plan`, `flashllm models`) opens it as it opens a converted model. The files have holes in
the place of weights, so that they take no room on the drive.
"""

import contextlib
import functools
import hashlib
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.registry import block_spec, source_shapes
from flashllm.arch.tensors import Shape
from flashllm.base.user_dirs import user_cache_dir
from flashllm.convert.checkpoint.source import Checkpoint
from flashllm.convert.choices import encoding_of
from flashllm.convert.plan import plan_conversion
from flashllm.convert.untrained.predictor import untrained_header, untrained_nbytes
from flashllm.format.manifest_values import FileEntry
from flashllm.format.model_files import CONFIG, FFN, PREDICTORS, RESIDENT, TABLE
from flashllm.format.safetensors import TensorInfo

# What neurons keep of a checkpoint that its config says is in codes: their kind, and a part of their tensors' names.
_KEPT = {"mxfp4": ("MXFP4", ".experts."), "bitnet": ("ternary", ".mlp.")}
_CONTEXT = 8192
_UNKNOWN = "0" * 64  # the hash of what is not there


@dataclass(frozen=True, kw_only=True)
class WellKnown:
    """A model that many know: its address, and what its config.json says of sizes."""

    name: str
    hub: str
    config: Mapping[str, Any]

    @property
    def published(self) -> str | None:
        """The codes of its original, as its config names them; None: 16 bits."""
        return published(self.config)

    @property
    def keeps_codes(self) -> bool:
        """True where neurons stay in those, which a conversion to other bits would not better; fp8 is widened."""
        return self.published in _KEPT

    @property
    def context(self) -> int:
        """Tokens that are planned for where the user gives none: a long context's cache would take the memory."""
        return min(_CONTEXT, block_spec(self.config).context)

    @functools.cached_property
    def shapes(self) -> dict[str, Shape]:
        """State_dict name -> shape of each of its tensors."""
        return source_shapes(self.config)

    @property
    def parameters(self) -> int:
        """Numbers in its tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())


@dataclass(frozen=True, slots=True)
class _Coded:
    """A `QuantisedTensor` that has a kind alone."""

    kind: str
    transposed: bool = False
    scale: float = 1.0

    def place(self) -> None:
        return None

    def raw(self, first: int, count: int) -> NDArray[np.uint8]:
        raise NotImplementedError("an outline has no weights")


def published(config: Mapping[str, Any]) -> str | None:
    """How a config.json says that weights are in codes."""
    said: str | None = config.get("quantization_config", {}).get("quant_method")
    return said


def well_known() -> list[WellKnown]:
    """Those of `models.json`, in its order."""
    text = resources.files("flashllm.convert").joinpath("models.json").read_text(encoding="utf-8")
    return [WellKnown(name=name, hub=hub, config=config) for name, (hub, config) in json.loads(text).items()]


def find_well_known(text: str | None) -> WellKnown | None:
    """The model of that name or hub id, in any case of letters; None where nobody knows it."""
    asked = (text or "").lower()
    return next((one for one in well_known() if asked in (one.name, one.hub.lower())), None)


@contextlib.contextmanager
def outlined(known: WellKnown, bits: int) -> Iterator[Path]:
    """An outline as `flashllm convert --bits --resident-bits` (16, its dtype, or 8 or 4; without --bits where neurons
    keep their codes) would make the model, beside the converted models, or where files may come and go if nothing can
    be written there; gone at the end."""
    folder = user_cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=folder, prefix=".outline-")
    except OSError:
        temporary = tempfile.TemporaryDirectory(prefix=".outline-")
    with temporary as directory:
        write_outline(known.config, known.shapes, Path(directory), bits=bits, source_name=known.hub)
        yield Path(directory)


def write_outline(
    config: Mapping[str, Any], shapes: Mapping[str, Shape], directory: Path, *, bits: int, source_name: str
) -> None:
    """Write the outline of the model that `config` describes, whose tensors have these `source_shapes`, into an empty
    directory; errors as `plan_conversion`."""
    encoding = encoding_of(bits)
    tensors = {name: TensorInfo.made(name, "BF16", shape) for name, shape in shapes.items()}
    kind, part = _KEPT.get(published(config) or "", (None, ""))
    quantised = {
        name: _Coded(kind, transposed=kind == "ternary" and ".down_proj." in name)
        for name, shape in shapes.items()
        if kind is not None and part in name and len(shape) == 2
    }
    checkpoint = Checkpoint(path=directory, config=config, tensors=tensors, quantised=quantised, _files={})
    of_rows = encoding if kind is None else None
    plan = plan_conversion(
        checkpoint, encoding=of_rows, resident_encoding=encoding, predictors=True, keep=kind is not None
    )
    content = json.dumps(dict(config)).encode()
    (directory / CONFIG).write_bytes(content)
    files = {CONFIG: FileEntry(sha256=hashlib.sha256(content).hexdigest(), nbytes=len(content))}
    parts = [(FFN, plan.ffn_header, plan.ffn_nbytes), (RESIDENT, plan.resident_header, plan.resident_nbytes)]
    if plan.table is not None:
        parts.append((TABLE, plan.table_header, plan.table_nbytes))
    if plan.predictor_rank:
        header = untrained_header(plan.architecture, plan.predictor_rank, _UNKNOWN)
        parts.append((PREDICTORS, header, untrained_nbytes(plan.architecture, plan.predictor_rank)))
    for name, header, nbytes in parts:
        with (directory / name).open("wb") as file:
            file.write(header)
            file.truncate(nbytes)
        files[name] = FileEntry(sha256=_UNKNOWN, nbytes=nbytes)
    plan.manifest(files, source_name).save(directory)
