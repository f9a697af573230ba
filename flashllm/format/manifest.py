"""`flashllm.json`: what a model directory holds, in one checked value. The format:

 1. a JSON object with exactly the keys of `Manifest` (and of the values in it), but that `resident_encoding`,
    `other_encodings`, `activations`, `sparsity`, `quality`, a row's `down_encoding` and what the architecture says of
    experts are there only where the model has them (`down_scales` with down columns whose scales are resident);
    unknown keys are errors;
 2. `files` lists every file but the manifest, each directly in the directory, no symbolic link, with size and SHA-256;
 3. it is written last and replaced atomically: a directory without it is not a model;
 4. rows of a mixture of experts are those of its experts, in their order, then those of the shared neurons;
 5. rows of a gated FFN hold up, gate and down; or up and down, and then the gate matrices are resident tensors;
 6. another `format_version` is refused: a higher one asks for a newer flashllm, a lower one for a new conversion.
    Version 2 named the resident tensors canonically (flashllm/arch/spec.py);
 7. `sha256` is the hash of all that, as JSON with sorted keys and no spaces. Directories from before it have none.

Checks are cheap: sizes and headers, never the hash of a file (that is `verify`). Knows no weights.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

from flashllm.arch.registry import resident_shapes, resolve
from flashllm.arch.spec import Architecture, check_number
from flashllm.base.checks import check_file_name, check_int, check_keys, check_list, check_str, is_number
from flashllm.base.codes.carried import SCALE_FORMS
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.base.files import (
    HashingWriter,
    fsync_directory,
    is_there,
    iterate_chunks,
    locked_directory,
    read_json_object,
    write_atomically,
)
from flashllm.config import MAX_WINDOW
from flashllm.errors import FormatError, UsageError
from flashllm.format.model_files import (
    CONFIG,
    FFN,
    PLACED,
    PREDICTORS,
    RESIDENT,
    check_ffn_header,
    check_placed_header,
    check_resident_header,
    check_resident_tensors,
    gate_tensor,
    is_coded_matrix,
    plane_tensors,
)
from flashllm.format.predictors import PREFETCH, check_predictors_header
from flashllm.format.rows import CARRIED_ENCODINGS, CODED_ENCODINGS, PLANE_ENCODINGS, RowLayout
from flashllm.format.safetensors import read_header

FORMAT_VERSION = 2
MANIFEST = "flashllm.json"
PARTIAL_SUFFIX = ".partial"  # of a directory under conversion
_MAX_FILES = 1000
_EXPERT_KEYS = ("experts", "chosen_experts", "shared_neurons")  # of the architecture of a mixture of experts
_MATRIX_ENCODINGS = (*CODED_ENCODINGS, *CARRIED_ENCODINGS)
# Forms other than fp32 of what weights in groups are multiplied by. "int16": those of 8 bits; those of 4 bits by int8.
ACTIVATIONS = ("int16", "int8")
_OPTIONAL_KEYS = ("resident_encoding", "activations", "sparsity", "quality")
_ROW_KEYS = ("encoding", "down_encoding", "matrices", "row_nbytes", "stride", "num_rows")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Size and SHA-256 (hexadecimal) of a file."""

    nbytes: int
    sha256: str

    def __post_init__(self) -> None:
        check_int("nbytes", self.nbytes, 0, 2**63 - 1)
        if type(self.sha256) is not str or re.fullmatch(r"[0-9a-f]{64}", self.sha256) is None:
            raise ValueError(f"sha256 must be 64 hexadecimal digits, not {str(self.sha256)[:80]!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Activity statistics of sample text: active neurons a token, and neurons needed for the window, by layer."""

    window: int
    mean_active: tuple[float, ...]
    req: tuple[int, ...]
    tokens: int
    text: str  # what the sample was

    def __post_init__(self) -> None:
        check_int("window", self.window, 1, MAX_WINDOW)
        check_int("tokens", self.tokens, 1, 2**63 - 1)
        check_str("text", self.text, 10_000)
        for value in self.mean_active:
            if not is_number(value) or value < 0:
                raise ValueError(f"mean_active must be numbers from 0, not {value!r}")
        for value in self.req:
            check_int("req", value, 0, 2**24)
        if len(self.req) != len(self.mean_active):
            raise ValueError(f"mean_active has {len(self.mean_active)} layers, req has {len(self.req)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation:
    """The neurons lie on flash a second time, in `placed.safetensors`, in an order learned from a trace."""

    learned_on: str  # the trace's description
    tokens: int

    def __post_init__(self) -> None:
        check_str("learned_on", self.learned_on, 10_000)
        check_int("tokens", self.tokens, 1, 2**63 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsity:
    """Neurons whose gate's activation is of a smaller magnitude than their layer's cut count as zero (Lee et al., 2024:
    CATS), and what that cost on the text where it was measured."""

    share: float  # of zeros that was asked for
    cuts: tuple[float, ...]  # of each layer
    zeros: float  # share of neurons that were zero
    perplexity: float
    dense_perplexity: float  # without the cuts
    scored_tokens: int
    text: str

    def __post_init__(self) -> None:
        check_str("text", self.text, 10_000)
        check_int("scored_tokens", self.scored_tokens, 1, 2**63 - 1)
        for name in ("share", "zeros", "perplexity", "dense_perplexity"):
            check_number(name, getattr(self, name))
        for cut in self.cuts:
            if check_number("cuts", cut) < 0:
                raise ValueError(f"cuts must be numbers from 0, not {cut}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What fewer bits cost: perplexity on a text, of the model and of what it was converted from."""

    perplexity: float
    source_perplexity: float
    scored_tokens: int
    text: str

    def __post_init__(self) -> None:
        check_str("text", self.text, 10_000)
        check_int("scored_tokens", self.scored_tokens, 1, 2**63 - 1)
        for name in ("perplexity", "source_perplexity"):
            if not check_number(name, getattr(self, name)) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the weights came from: a folder's or hub repository's name, and their dtype there."""

    name: str
    dtype: str

    def __post_init__(self) -> None:
        check_str("name", self.name, 1000)
        _check_dtype("dtype", self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest. `rows` is the layout; its derived numbers are written out and compared when read."""

    flashllm_version: str
    architecture: Architecture
    dtype: str  # of the hidden states, the KV cache and the resident weights that no `resident_encoding` is for
    rows: RowLayout
    files: Mapping[str, FileEntry]
    source: Source
    resident_encoding: str | None = None  # of the resident matrices, where they are coded
    other_encodings: Mapping[str, str] = field(
        default_factory=dict
    )  # by name, of resident matrices that differ from that
    down_scales: tuple[str, ...] = ()  # of each layer, where down columns have theirs in memory: of `SCALE_FORMS`
    activations: str | None = None  # one of ACTIVATIONS, a token at a time; else fp32
    permutation: Permutation | None = None
    calibration: Calibration | None = None
    sparsity: Sparsity | None = None
    quality: Quality | None = None  # of fewer bits, where it was measured
    sparse_prefill_tokens: int = 8  # prompts of at most this many new tokens use the predictor
    prefill_block_tokens: int = 256  # a longer prompt is computed in blocks of so many tokens
    stream_block_rows: int  # neurons of one dense FFN product
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if type(self.format_version) is not int or self.format_version != FORMAT_VERSION:
            raise ValueError(f"format_version must be {FORMAT_VERSION}, not {str(self.format_version)[:80]!r}")
        check_str("flashllm_version", self.flashllm_version, 100)
        _check_dtype("dtype", self.dtype)
        for encoding in (self.rows.encoding, self.rows.down):
            if encoding != self.dtype and encoding not in (*_MATRIX_ENCODINGS, *PLANE_ENCODINGS):
                raise ValueError(f"rows.encoding must be {self.dtype} or coded, not {encoding}")
        if self.resident_encoding is not None and self.resident_encoding not in _MATRIX_ENCODINGS:
            known = ", ".join(_MATRIX_ENCODINGS)
            raise ValueError(f"resident_encoding must be one of {known}, not {str(self.resident_encoding)[:80]!r}")
        if self.dtype != "bfloat16" and "bf12" in (self.rows.encoding, self.rows.down, self.resident_encoding):
            raise ValueError(f"bf12 is for models in bfloat16, not {self.dtype}")
        if self.activations not in (None, *ACTIVATIONS):
            raise ValueError(f"activations must be {', '.join(ACTIVATIONS)}, not {str(self.activations)[:80]!r}")
        self._check_other_encodings()
        self._check_down_scales()
        fits = (self.rows.d_model, self.rows.d_ff) == (self.architecture.d_model, self.architecture.d_ff)
        if not fits or (self.rows.matrices != self.architecture.matrices and not self.resident_gate):
            raise ValueError(f"rows of {self.rows} do not belong to the architecture {self.architecture}")
        if len(self.files) > _MAX_FILES:
            raise ValueError(f"files has {len(self.files)} entries; at most {_MAX_FILES} are allowed")
        for name in self.files:
            check_file_name(name)
            if name == MANIFEST:
                raise ValueError(f"files must not list {MANIFEST} itself")
        for name in (CONFIG, FFN, RESIDENT):
            if name not in self.files:
                raise ValueError(f"files does not list {name}")
        if (self.permutation is not None) != (PLACED in self.files):
            raise ValueError(f"permutation and {PLACED} belong together; one of them is missing")
        if self.calibration is not None and len(self.calibration.req) != self.architecture.num_layers:
            raise ValueError(f"calibration has {len(self.calibration.req)} layers, not {self.architecture.num_layers}")
        if self.sparsity is not None:
            if len(self.sparsity.cuts) != self.architecture.num_layers:
                raise ValueError(f"sparsity has {len(self.sparsity.cuts)} layers, not {self.architecture.num_layers}")
            if not self.architecture.gated:
                raise ValueError("sparsity is of gates, and this FFN has none")
        check_int("sparse_prefill_tokens", self.sparse_prefill_tokens, 0, 2**20)
        check_int("prefill_block_tokens", self.prefill_block_tokens, 1, 2**20)
        check_int("stream_block_rows", self.stream_block_rows, 1, self.rows.num_rows)
        object.__setattr__(self, "files", MappingProxyType(dict(self.files)))
        object.__setattr__(self, "other_encodings", MappingProxyType(dict(self.other_encodings)))

    def _check_other_encodings(self) -> None:
        for name, encoding in self.other_encodings.items():
            if type(name) is not str or not is_coded_matrix(name):
                raise ValueError(f"other_encodings: {str(name)[:80]!r} is no matrix that may be in codes")
            if encoding != self.dtype and encoding not in _MATRIX_ENCODINGS:
                raise ValueError(f"other_encodings: {str(encoding)[:80]!r} is neither coded nor {self.dtype}")
            if encoding == "bf12" and self.dtype != "bfloat16":
                raise ValueError(f"bf12 is for models in bfloat16, not {self.dtype}")

    def _check_down_scales(self) -> None:
        layers = self.architecture.num_layers if self.rows.has_plane else 0
        if len(self.down_scales) != layers:
            raise ValueError(f"down_scales must name {layers} forms with these rows, not {len(self.down_scales)}")
        for form in self.down_scales:
            if type(form) is not str or form not in SCALE_FORMS:
                raise ValueError(f"down_scales: {str(form)[:80]!r} is not one of {', '.join(SCALE_FORMS)}")
        if self.rows.has_plane and self.architecture.experts:
            raise ValueError("down_scales are not for a mixture of experts")

    @property
    def planes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of the resident tensors of scales of down columns; none where those have their own."""
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for layer, form in enumerate(self.down_scales):
            found |= plane_tensors(layer, form, self.rows)
        return found

    @property
    def planes_nbytes(self) -> int:
        """Bytes of `planes`."""
        return sum((2 if dtype == "F16" else 1) * math.prod(shape) for dtype, shape in self.planes.values())

    @property
    def sparse(self) -> bool:
        """Whether a token leaves most neurons out, so that mode sparse makes sense: they are exactly zero, or those
        of experts that the router does not choose."""
        return self.architecture.sparse or self.sparsity is not None or self.architecture.experts > 0

    @property
    def resident_gate(self) -> bool:
        """Whether the gate of a gated FFN is resident, and its product names the active neurons exactly."""
        return self.architecture.gated and "gate" not in self.rows.matrices

    @property
    def resident_gate_nbytes(self) -> int:
        """Bytes of the resident gates of all layers; 0 where the rows hold them."""
        if not self.resident_gate:
            return 0
        return self.architecture.num_layers * self.rows.d_ff * self.rows.vector_nbytes("up")

    @classmethod
    def load(cls, directory: Path, *, check_files: bool = True) -> Self:
        """The manifest of a model directory.

        With `check_files` the files' sizes, headers and config are compared with it. FormatError names what is wrong.
        """
        path = Path(directory) / MANIFEST
        value = read_json_object(path)
        recorded = value.pop("sha256", None)
        version = value.get("format_version")
        if type(version) is int and version > FORMAT_VERSION:
            raise FormatError(f"{path}: format version {version} is newer than this flashllm; upgrade flashllm")
        if type(version) is int and 0 < version < FORMAT_VERSION:
            raise FormatError(f"{path}: format version {version} is of an older flashllm; convert the model again")
        try:
            manifest = cls._from_json(value)
        except ValueError as error:
            raise FormatError(f"{path}: {error}") from error
        if check_files:
            check_directory(Path(directory), manifest)
        if recorded is not None and recorded != _own_hash(value):
            raise FormatError(
                f"{path}: was changed or damaged: it is not what its own hash says; copy it anew or convert the model "
                'again (whoever changes it by hand takes its "sha256" out)'
            )
        return manifest

    @classmethod
    def _from_json(cls, value: Any) -> Self:
        if isinstance(value, dict):
            # Written only where there is one:
            value = {**dict.fromkeys(_OPTIONAL_KEYS), "other_encodings": {}, "down_scales": [], **value}
        fields = _fields(cls, value, "the manifest")
        described = fields["architecture"]
        if isinstance(described, dict):
            described = {**dict.fromkeys(_EXPERT_KEYS, 0), **described}  # written only where there are experts
        architecture = _build(Architecture, described, "architecture")
        rows = fields["rows"]
        if isinstance(rows, dict):
            rows = {"down_encoding": None, **rows}
        rows = check_keys(rows, _ROW_KEYS, "rows")
        down = rows["down_encoding"]
        layout = RowLayout(
            encoding=check_str("rows.encoding", rows["encoding"], 64),
            d_model=architecture.d_model,
            d_ff=architecture.d_ff,
            matrices=tuple(check_list(rows["matrices"], "rows.matrices")),
            down_encoding=None if down is None else check_str("rows.down_encoding", down, 64),
        )
        for name in ("row_nbytes", "stride", "num_rows"):
            if type(rows[name]) is not int or rows[name] != getattr(layout, name):
                raise ValueError(f"rows.{name} must be {getattr(layout, name)}, not {str(rows[name])[:80]}")
        calibration = fields["calibration"]
        if calibration is not None:
            parts = _fields(Calibration, calibration, "calibration")
            lists = {name: tuple(check_list(parts[name], name)) for name in ("mean_active", "req")}
            calibration = Calibration(**{**parts, **lists})
        sparsity = fields["sparsity"]
        if sparsity is not None:
            parts = _fields(Sparsity, sparsity, "sparsity")
            sparsity = Sparsity(**{**parts, "cuts": tuple(check_list(parts["cuts"], "cuts"))})
        quality = fields["quality"]
        if quality is not None:
            quality = _build(Quality, quality, "quality")
        permutation = fields["permutation"]
        if permutation is not None:
            permutation = _build(Permutation, permutation, "permutation")
        if not isinstance(fields["other_encodings"], dict):
            raise ValueError("other_encodings must be an object")
        files = fields["files"]
        if not isinstance(files, dict):
            raise ValueError("files must be an object")
        entries = {name: _build(FileEntry, entry, f"files {name[:80]!r}") for name, entry in files.items()}
        source = _build(Source, fields["source"], "source")
        parsed = {"architecture": architecture, "rows": layout, "calibration": calibration, "files": entries}
        measured = {"sparsity": sparsity, "quality": quality}
        parsed["down_scales"] = tuple(check_list(fields["down_scales"], "down_scales"))
        return cls(**{**fields, **parsed, **measured, "permutation": permutation, "source": source})

    def to_json(self) -> dict[str, Any]:
        """The JSON object, in the order of the written file."""
        return {
            "format_version": self.format_version,
            "flashllm_version": self.flashllm_version,
            "architecture": {
                name: value
                for name, value in dataclasses.asdict(self.architecture).items()
                if name not in _EXPERT_KEYS or self.architecture.experts
            },
            "dtype": self.dtype,
            **({} if self.resident_encoding is None else {"resident_encoding": self.resident_encoding}),
            **({"other_encodings": dict(self.other_encodings)} if self.other_encodings else {}),
            **({"down_scales": list(self.down_scales)} if self.down_scales else {}),
            **({} if self.activations is None else {"activations": self.activations}),
            "rows": {
                name: list(self.rows.matrices) if name == "matrices" else getattr(self.rows, name)
                for name in _ROW_KEYS
                if name != "down_encoding" or self.rows.down_encoding is not None
            },
            "files": {name: dataclasses.asdict(self.files[name]) for name in sorted(self.files)},
            "permutation": None if self.permutation is None else dataclasses.asdict(self.permutation),
            "calibration": None if self.calibration is None else dataclasses.asdict(self.calibration),
            **({} if self.sparsity is None else {"sparsity": dataclasses.asdict(self.sparsity)}),
            **({} if self.quality is None else {"quality": dataclasses.asdict(self.quality)}),
            "sparse_prefill_tokens": self.sparse_prefill_tokens,
            "prefill_block_tokens": self.prefill_block_tokens,
            "stream_block_rows": self.stream_block_rows,
            "source": dataclasses.asdict(self.source),
        }

    def save(self, directory: Path) -> None:
        """Write `flashllm.json` into `directory`, atomically and durably."""
        value = self.to_json()
        text = json.dumps({**value, "sha256": _own_hash(value)}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        write_atomically(Path(directory) / MANIFEST, text.encode())


def open_model_dir(path: Path, *, check_files: bool = True) -> Manifest:
    """The manifest of the model directory `path`, checked as by `Manifest.load`.

    UsageError where `path` is something else, saying what to do.
    """
    path = Path(path)
    if not is_there(path) or not path.is_dir():
        raise UsageError(f"{path}: there is no such directory")
    if not is_there(path / MANIFEST):
        if path.name.endswith(PARTIAL_SUFFIX):
            raise UsageError(f"{path}: an unfinished conversion; run the same `flashllm convert` again to resume it")
        if is_there(path / CONFIG):
            raise UsageError(f"{path}: a Hugging Face folder; run `flashllm convert {path} DST` first, then use DST")
        raise UsageError(f"{path}: not a model directory: it has no {MANIFEST}")
    return Manifest.load(path, check_files=check_files)


def check_directory(directory: Path, manifest: Manifest) -> None:
    """Compare files' sizes and kinds, the headers and the config with the manifest. FormatError for the first fault."""
    for name, entry in manifest.files.items():
        problem = size_problem(directory / name, entry)
        if problem is not None:
            raise FormatError(problem)
    config = read_json_object(directory / CONFIG)
    if resolve(config) != manifest.architecture:
        raise FormatError(f"{directory / CONFIG}: describes {resolve(config)}, {MANIFEST} {manifest.architecture}")
    num_layers = manifest.architecture.num_layers
    check_ffn_header(read_header(directory / FFN), manifest.rows, num_layers)
    resident = read_header(directory / RESIDENT)
    check_resident_header(resident, manifest.rows, num_layers)
    shapes = resident_shapes(config)
    if manifest.resident_gate:
        shapes |= {gate_tensor(layer): (manifest.rows.d_ff, manifest.rows.d_model) for layer in range(num_layers)}
    check_resident_tensors(
        resident,
        shapes,
        manifest.dtype,
        manifest.resident_encoding,
        rows=manifest.rows.encoding,
        others=manifest.other_encodings,
        planes=manifest.planes,
    )
    if PLACED in manifest.files:
        check_placed_header(read_header(directory / PLACED), manifest.rows, num_layers)
    if PREDICTORS in manifest.files:
        predictor_ranks(directory / PREDICTORS, manifest)


def size_problem(path: Path, entry: FileEntry) -> str | None:
    """What is wrong with the file's existence, kind or size; None where nothing is."""
    try:
        status = os.lstat(path)
    except OSError as error:
        return f"{path}: listed in {MANIFEST}, but: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return f"{path}: must be a regular file, and no symbolic link"
    if status.st_size != entry.nbytes:
        return f"{path}: has {status.st_size} bytes, {MANIFEST} says {entry.nbytes}; convert the model again"
    return None


def predictor_ranks(path: Path, manifest: Manifest) -> list[int]:
    """The rank by layer of the predictor file `path`. FormatError unless it belongs to this very model."""
    header = read_header(path)
    return check_predictors_header(header, manifest.rows, manifest.architecture.num_layers, manifest.files[FFN].sha256)


def has_prefetch_predictors(directory: Path, manifest: Manifest) -> bool:
    """Whether the model has predictors to prefetch by."""
    if PREDICTORS not in manifest.files:
        return False
    return any(f".{PREFETCH}" in name for name in read_header(directory / PREDICTORS).tensors)


def install_predictors(directory: Path, path: Path, calibration: Calibration | None = None) -> Manifest:
    """Put a copy of the predictor file `path` into the model directory and its manifest; the new manifest.

    `calibration`: activity statistics under these predictors; those under older ones are dropped with them.
    FormatError where the predictors belong to another model.
    """
    path = Path(path)
    predictor_ranks(path, Manifest.load(Path(directory)))
    return install_file(directory, PREDICTORS, iterate_chunks(path), check=predictor_ranks, calibration=calibration)


def change_manifest(directory: Path, **changes: Any) -> Manifest:
    """Put `changes` into the manifest of a model directory; the new manifest."""
    with locked_directory(directory, f"{directory}: another process is changing this model; try again later"):
        manifest = dataclasses.replace(Manifest.load(directory), **changes)
        manifest.save(directory)
        return manifest


def install_file(
    directory: Path,
    name: str,
    chunks: Iterable[bytes],
    *,
    check: Callable[[Path, Manifest], object] | None = None,
    **changes: Any,
) -> Manifest:
    """Put a file of these bytes into the model directory, its entry and `changes` into the manifest; the new manifest.

    `check` is called with the finished file under a temporary name, and raises where it must not be installed. A crash
    leaves the old file or none, never a directory that does not load: the manifest forgets the old file first.
    """
    directory = Path(directory)
    with locked_directory(directory, f"{directory}: another process is changing this model; try again later"):
        manifest = Manifest.load(directory)
        # 1. The new file's bytes are safe under another name.
        temporary = directory / f".{name}.tmp"
        with HashingWriter(temporary) as writer:
            for chunk in chunks:
                writer.write(memoryview(chunk))
            entry = FileEntry(sha256=writer.finish(), nbytes=writer.position)
        if check is not None:
            check(temporary, manifest)
        # 2. The manifest forgets the old file, 3. the file is replaced, 4. the manifest lists the new one.
        files = {other: old for other, old in manifest.files.items() if other != name}
        dataclasses.replace(manifest, files=files).save(directory)
        os.rename(temporary, directory / name)
        fsync_directory(directory)
        manifest = dataclasses.replace(manifest, files={**files, name: entry}, **changes)
        manifest.save(directory)
        return manifest


def _own_hash(value: dict[str, Any]) -> str:
    """Of the manifest's JSON object, without its own `sha256`."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode(errors="surrogatepass")).hexdigest()


def _build(kind: type[T], value: Any, where: str) -> T:
    try:
        return kind(**_fields(kind, value, where))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _fields(kind: type[Any], value: Any, where: str) -> dict[str, Any]:
    return check_keys(value, tuple(field.name for field in dataclasses.fields(kind)), where)


def _check_dtype(name: str, value: Any) -> None:
    if type(value) is not str or value not in WEIGHT_DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(WEIGHT_DTYPES)}, not {str(value)[:80]!r}")
