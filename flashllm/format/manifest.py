"""`flashllm.json`: what a model directory holds, in one checked value. The format:

 1. a JSON object with exactly the keys of `Manifest` (and of the values in it), but that `resident_encoding`,
    `other_encodings`, `activations`, `checksum_rows`, `sparsity`, `quality`, `in_place`, a row's `down_encoding`,
    `downs` and `ups` and what the architecture says of experts and of layers that differ are there only where the model
    has them (`down_scales` with down columns whose scales are resident); unknown keys are errors;
 2. `files` lists every file but the manifest, each directly in the directory, no symbolic link, with size and SHA-256;
 3. it is written last and replaced atomically: a directory without it is not a model;
 4. rows of a mixture of experts are those of its experts, in their order, then those of the shared neurons; as many
    rows share a checksum as `checksum_rows` says: the last of a layer may be fewer. Where experts are read from another
    file (format/in_place.py), `ffn.safetensors` holds the rows behind theirs alone, and checksums of pieces come first.
    With `shared_experts_beside` in config.json the shared neurons are no rows, but resident matrices;
 5. rows of a gated FFN hold up, gate and down; or up and down, and then the gate matrices are resident tensors;
 6. another `format_version` is refused: a higher one asks for a newer flashllm, a lower one for a new conversion.
    Version 2 named the resident tensors canonically (flashllm/arch/tensors.py);
 7. `sha256` is the hash of all that, as JSON with sorted keys and no spaces. Directories from before it have none.

Checks are cheap: sizes and headers, never the hash of a file (that is `verify`). Knows no weights.
"""

import dataclasses
import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from flashllm.arch.registry import block_spec, resident_shapes, resolve
from flashllm.arch.spec import Architecture, BlockSpec
from flashllm.arch.tensors import EMBEDDING, TOKEN_TABLE
from flashllm.base.checks import check_file_name, check_int, check_keys, check_str, from_json, to_json
from flashllm.base.codes.carried import PLANE_CODES, SCALE_FORMS
from flashllm.base.files import is_there, read_json_object, write_atomically
from flashllm.errors import FormatError, UsageError
from flashllm.format.in_place import InPlace, checksum_counts, lying_experts, read_in_place, slice_rows, stored_layouts
from flashllm.format.manifest_values import (
    EXPERT_KEYS,
    LAYER_KEYS,
    ROW_KEYS,
    UNWRITTEN_ROW_KEYS,
    Calibration,
    FileEntry,
    Quality,
    Source,
    Sparsity,
    check_dtype,
    read_rows,
)
from flashllm.format.model_files import (
    CONFIG,
    FFN,
    PLACED,
    PREDICTORS,
    RESIDENT,
    TABLE,
    check_ffn_header,
    check_resident_header,
    check_resident_tensors,
    check_table,
    gate_tensor,
    is_coded_matrix,
    plane_tensors,
    resident_encoding,
)
from flashllm.format.predictors import PREFETCH, check_predictors_header
from flashllm.format.rows import (
    CARRIED_ENCODINGS,
    CODED_ENCODINGS,
    PLANE_ENCODINGS,
    RowEncoding,
    RowLayout,
    TableLayout,
)
from flashllm.format.safetensors import read_header

FORMAT_VERSION = 2
MANIFEST = "flashllm.json"
PARTIAL_SUFFIX = ".partial"  # of a directory under conversion
_MAX_FILES = 1000
_MATRIX_ENCODINGS = (*CODED_ENCODINGS, *CARRIED_ENCODINGS)
# Forms other than fp32 of what weights in groups are multiplied by. "int16": those of 8 bits; those of 4 bits by int8.
ACTIVATIONS = ("int16", "int8")
_UNWRITTEN: dict[str, Any] = {  # keys that are there only where the value is another
    **dict.fromkeys(("resident_encoding", "activations", "sparsity", "quality", "in_place")),
    "other_encodings": {},
    "down_scales": [],
    "checksum_rows": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest. `rows` is the layout; its derived numbers are written out and compared when read."""

    format_version: int = FORMAT_VERSION
    flashllm_version: str
    architecture: Architecture
    dtype: str  # of the hidden states, the KV cache and the resident weights that no `resident_encoding` is for
    resident_encoding: str | None = None  # of the resident matrices, where they are coded
    # By name, of resident matrices that differ from that.
    other_encodings: Mapping[str, str] = field(default_factory=dict)
    # Of each layer, where down columns have theirs in memory: of `SCALE_FORMS`, or "" where these do not.
    down_scales: tuple[str, ...] = ()
    activations: str | None = None  # one of ACTIVATIONS, a token at a time; else fp32
    checksum_rows: int = 1  # rows of mixtures that share a checksum; more than one only where experts are read whole
    rows: RowLayout
    files: Mapping[str, FileEntry]
    calibration: Calibration | None = None
    sparsity: Sparsity | None = None
    quality: Quality | None = None  # of fewer bits, where it was measured
    in_place: InPlace | None = None  # experts that lie in another file, and are read there
    sparse_prefill_tokens: int = 8  # prompts of at most this many new tokens use the predictor
    prefill_block_tokens: int = 256  # a longer prompt is computed in blocks of so many tokens
    stream_block_rows: int  # neurons of one dense FFN product
    source: Source

    def __post_init__(self) -> None:
        if type(self.format_version) is not int or self.format_version != FORMAT_VERSION:
            raise ValueError(f"format_version must be {FORMAT_VERSION}, not {str(self.format_version)[:80]!r}")
        check_str("flashllm_version", self.flashllm_version, 100)
        check_dtype("dtype", self.dtype)
        for encoding in (self.rows.encoding, *self.rows.ups, self.rows.down, *self.rows.downs):
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
        self._check_checksum_rows()
        self._check_in_place()
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
        layers = self.architecture.num_layers
        for name in ("downs", "ups"):
            if (count := len(getattr(self.rows, name))) not in (0, layers):
                raise ValueError(f"rows.{name} must name {layers} encodings, not {count}")
        downs = (self.rows.downs or (self.rows.down,) * layers) if self.rows.has_plane else ()
        if len(self.down_scales) != len(downs):
            raise ValueError(f"down_scales must name {len(downs)} forms with these rows, not {len(self.down_scales)}")
        if self.rows.ups and self.resident_gate:
            raise ValueError("rows.ups are of rows that hold the gates, too")
        for form, down in zip(self.down_scales, downs, strict=True):
            if form == "" and down not in PLANE_CODES:
                continue
            if type(form) is not str or form not in SCALE_FORMS:
                raise ValueError(f"down_scales: {str(form)[:80]!r} is not one of {', '.join(SCALE_FORMS)}")
            if down not in PLANE_CODES or SCALE_FORMS[form].table != PLANE_CODES[down].table:
                raise ValueError(f"down_scales: {form} is not for columns of {down}")

    def _check_checksum_rows(self) -> None:
        """Whatever is read begins and ends between checksums: units, and the stream's blocks of experts."""
        rows = self.checksum_rows
        check_int("checksum_rows", rows, 1, self.rows.d_ff)
        runs = [self.architecture.unit_rows, self.architecture.shared_neurons]
        blocks = [self.stream_block_rows] if max(runs) > self.stream_block_rows else []
        if rows != 1 and any(run % rows for run in (*runs, *blocks)):
            raise ValueError(f"checksum_rows must divide what is read together, {[*runs, *blocks]} rows, not be {rows}")

    def _check_in_place(self) -> None:
        if self.in_place is None:
            return
        size, layers = self.architecture.unit_rows, self.architecture.num_layers
        rows_of = slice_rows(self.architecture, self.rows)
        if size == 1 or self.stream_block_rows % size or len(self.in_place.layers) != layers:
            raise ValueError("in_place is of models whose experts are read whole, and says something of every layer")
        for layer, slices in enumerate(self.in_place.layers):
            if not slices:
                continue
            fits = layer in self.architecture.mixtures and len(slices) == len(self.rows.matrices)
            if not fits or any(each.nbytes % rows for each, rows in zip(slices, rows_of, strict=True)):
                raise ValueError(f"in_place does not fit the experts of layer {layer}")

    @property
    def stored_layouts(self) -> list[RowLayout | None]:
        """The layout of each layer's rows in `ffn.safetensors`; None where it holds no row."""
        return stored_layouts(self.architecture, self.rows, self.in_place)

    def lying_experts(self, layer: int) -> int:
        """Experts of this layer that lie in another file: all or none."""
        return lying_experts(self.architecture, self.in_place, layer)

    @property
    def num_rows(self) -> list[int]:
        """Rows of each layer, with those that fill up what is stored."""
        return [
            self.lying_experts(layer) * self.architecture.unit_rows + (0 if stored is None else stored.num_rows)
            for layer, stored in enumerate(self.stored_layouts)
        ]

    def encoding_of(self, name: str) -> RowEncoding:
        """How the resident tensor of this name is stored."""
        return resident_encoding(name, self.dtype, self.resident_encoding, self.rows.encoding, self.other_encodings)

    def table_layout(self, block: BlockSpec) -> TableLayout | None:
        """The layout of the table of per-layer embeddings; None for a model without them."""
        if block.per_layer is None:
            return None
        return TableLayout(block.per_layer.rows, block.token_row, self.encoding_of(TOKEN_TABLE))

    def embedding_layout(self, block: BlockSpec) -> TableLayout | None:
        """The layout of the embedding in `resident.safetensors`, where its rows can be read one by one; None where the
        head is the embedding too, the model has per-layer embeddings, or a row is too short for a checksum."""
        if block.tied_head or block.per_layer is not None or block.embed_dim != block.d_model or block.streams:
            return None
        layout = TableLayout(block.vocab_size, block.embed_dim, self.encoding_of(EMBEDDING), apart=False)
        return layout if layout.is_hashed else None

    def layout(self, layer: int) -> RowLayout:
        return self.rows.of_layer(layer, self.architecture.width(layer))

    @property
    def layouts(self) -> list[RowLayout]:
        return [self.layout(layer) for layer in range(self.architecture.num_layers)]

    def checksum_rows_of(self, layer: int) -> int:
        """Rows of a layer that share a checksum: `checksum_rows` of a mixture of experts, of others one."""
        return self.checksum_rows if layer in self.architecture.mixtures else 1

    @property
    def checksums(self) -> list[int]:
        together = [self.checksum_rows_of(layer) for layer in range(self.architecture.num_layers)]
        return checksum_counts(self.architecture, self.rows, self.in_place, together)

    @property
    def planes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of the resident tensors of scales of down columns; none where those have their own."""
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for layer, form in enumerate(self.down_scales):
            found |= plane_tensors(layer, form, self.layout(layer))
        return found

    @property
    def planes_nbytes(self) -> int:
        return sum((2 if dtype == "F16" else 1) * math.prod(shape) for dtype, shape in self.planes.values())

    @property
    def sparse(self) -> bool:
        """True where a token leaves most neurons out, so that mode sparse makes sense: they are exactly zero, or those
        of experts that the router does not choose."""
        return self.architecture.sparse or self.sparsity is not None or self.architecture.experts > 0

    @property
    def active_share(self) -> float | None:
        """Share of the neurons that a token names, where it was measured: by predictors, or by thresholds on gates."""
        if self.calibration is not None:
            return sum(self.calibration.mean_active) / self.architecture.neurons
        return None if self.sparsity is None else 1 - self.sparsity.zeros

    @property
    def resident_gate(self) -> bool:
        """True where the gate of a gated FFN is resident, and its product names the active neurons exactly."""
        return self.architecture.gated and "gate" not in self.rows.matrices

    @property
    def resident_gate_nbytes(self) -> int:
        """Bytes of the resident gates of all layers; 0 where the rows hold them."""
        if not self.resident_gate:
            return 0
        return self.architecture.neurons * self.rows.vector_nbytes("up")

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
            value = {**_UNWRITTEN, **value}
            value.pop("permutation", None)  # of earlier versions, as the copy of the neurons that it was about
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        fields = check_keys(value, tuple(kinds), "the manifest")
        rows, in_place = fields.pop("rows"), fields.pop("in_place")
        fields = {name: from_json(kinds[name], each, name) for name, each in fields.items()}
        fields["rows"] = read_rows(rows, fields["architecture"])
        fields["in_place"] = read_in_place(in_place, fields["architecture"].experts)
        fields["files"].pop(PLACED, None)
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        """The JSON object, in the order of the written file."""
        value: dict[str, Any] = to_json(self)
        value["architecture"] = {
            name: each
            for name, each in value["architecture"].items()
            if (name not in EXPERT_KEYS or self.architecture.experts) and (name not in LAYER_KEYS or each)
        }
        rows = {name: to_json(getattr(self.rows, name)) for name in ROW_KEYS}
        value["rows"] = {name: each for name, each in rows.items() if each or name not in UNWRITTEN_ROW_KEYS}
        value["files"] = {name: value["files"][name] for name in sorted(value["files"])}
        return {name: each for name, each in value.items() if name not in _UNWRITTEN or each != _UNWRITTEN[name]}

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
    if manifest.in_place is not None:
        manifest.in_place.check_files(directory)
    config = read_json_object(directory / CONFIG)
    if resolve(config) != manifest.architecture:
        raise FormatError(f"{directory / CONFIG}: describes {resolve(config)}, {MANIFEST} {manifest.architecture}")
    layouts = manifest.layouts
    check_ffn_header(read_header(directory / FFN), manifest.stored_layouts)
    resident = read_header(directory / RESIDENT)
    check_resident_header(resident, manifest.checksums)
    shapes = resident_shapes(config)
    if manifest.resident_gate:
        shapes |= {gate_tensor(layer): (each.d_ff, each.d_model) for layer, each in enumerate(layouts)}
    check_resident_tensors(resident, shapes, manifest.encoding_of, manifest.planes)
    if (table := manifest.table_layout(block_spec(config))) is not None:
        if TABLE not in manifest.files:
            raise FormatError(f"{directory / MANIFEST}: files does not list {TABLE}")
        check_table(read_header(directory / TABLE), resident, table)
    if PREDICTORS in manifest.files:
        predictor_ranks(directory / PREDICTORS, manifest)


def size_problem(path: Path, entry: FileEntry) -> str | None:
    """A fault of the file's existence, kind or size; None where there is none."""
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
    return check_predictors_header(header, manifest.layouts, manifest.files[FFN].sha256)


def has_prefetch_predictors(directory: Path, manifest: Manifest) -> bool:
    """True for a model with predictors to prefetch by."""
    if PREDICTORS not in manifest.files:
        return False
    return any(f".{PREFETCH}" in name for name in read_header(directory / PREDICTORS).tensors)


def _own_hash(value: dict[str, Any]) -> str:
    """Hash of the manifest's JSON object without its own `sha256`."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode(errors="surrogatepass")).hexdigest()
