"""Everything about a conversion that is decided before the first byte is written: names, dtypes, layout, headers.

Checks the whole checkpoint against its config. Reads headers (and a tied head, to compare it); writes nothing.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Unpack

import numpy as np

import flashllm
from flashllm.arch.registry import Claim, block_spec, bundle_names, claims, resolve, shapes_of, spec_of
from flashllm.arch.spec import SHARED_BESIDE, Architecture, BlockSpec
from flashllm.arch.tensors import TOKEN_TABLE, ArchitectureSpec, Shape, is_wide
from flashllm.base.dtypes import WEIGHT_DTYPE_BY_CODE, WEIGHT_DTYPES, WeightDtype
from flashllm.base.files import CHUNK_NBYTES
from flashllm.base.group_codes import usual_activations
from flashllm.base.units import format_size
from flashllm.convert.checkpoint.coded import CodedWeights
from flashllm.convert.checkpoint.source import Checkpoint, OwnPredictors
from flashllm.convert.checkpoint.wrapped import what_wraps
from flashllm.convert.choices import Activations, Choices, GatePlace
from flashllm.convert.kept.weights import shared_differ
from flashllm.convert.storage import Sources, Storage, storage_of
from flashllm.convert.tokenizer import TOKENIZER, make_tokenizer
from flashllm.convert.untrained.predictor import coded_gates_nbytes, default_rank, untrained_nbytes
from flashllm.errors import FormatError, UnsupportedModelError, UsageError
from flashllm.format.in_place import lying_experts, stored_layouts
from flashllm.format.manifest import Manifest
from flashllm.format.manifest_values import FileEntry, Source
from flashllm.format.model_files import ffn_tensor
from flashllm.format.rows import RowLayout, checksum_rows
from flashllm.format.safetensors import encode_header

_METADATA = {"format": "pt"}  # transformers asks whose tensors these are


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionPlan(Storage):
    """The files to be written, byte for byte, and where they come from."""

    checkpoint: Checkpoint
    architecture: Architecture
    block: BlockSpec
    claims: dict[str, Claim]  # by canonical name
    names: dict[str, str]  # state_dict name -> name in the checkpoint
    source_dtype: WeightDtype
    dtype: WeightDtype
    activations: str | None  # what codes are multiplied by, a token at a time; None: fp32
    ffn_header: bytes
    resident_header: bytes
    table_header: bytes
    companions: tuple[Path, ...]  # files to copy
    made: Mapping[str, bytes]  # files to write, by name
    predictor_rank: int = 0  # 0: none are made
    coded_gates: bool = False  # are the predictors
    own_predictors: OwnPredictors | None = None  # of the checkpoint, which are the model's
    coded: CodedWeights | None = None  # what is written as it is: `kept`, where there are some

    @property
    def ffn_nbytes(self) -> int:
        return len(self.ffn_header) + sum(layout.layer_nbytes for layout in self.layouts if layout is not None)

    @property
    def lying_nbytes(self) -> int:
        """Bytes of experts that stay where they are."""
        return 0 if self.in_place is None else self.in_place.nbytes

    @property
    def stream_block_rows(self) -> int:
        """`RowLayout.stream_block_rows`, but whole experts where they are read from another file."""
        rows, size = self.layout.stream_block_rows, self.architecture.unit_rows
        return rows if self.in_place is None else max(1, rows // size) * size

    @property
    def resident_nbytes(self) -> int:
        return len(self.resident_header) + sum(entry.nbytes for entry in self.resident)

    @property
    def table_nbytes(self) -> int:
        """Size of `token_rows.safetensors`; 0 where there is none."""
        return 0 if self.table is None else len(self.table_header) + self.table.nbytes

    @property
    def total_nbytes(self) -> int:
        """Bytes of all files but the manifest."""
        predictors = untrained_nbytes(self.architecture, self.predictor_rank) if self.predictor_rank else 0
        predictors += coded_gates_nbytes(self.architecture) if self.coded_gates else 0
        predictors += self.own_predictors.nbytes if self.own_predictors is not None else 0
        companions = sum(path.stat().st_size for path in self.companions) + sum(map(len, self.made.values()))
        return self.ffn_nbytes + self.resident_nbytes + self.table_nbytes + companions + predictors

    @property
    def kept_line(self) -> str | None:
        """A line for the user on a quantised checkpoint whose bits are kept, or on what was to stay where it
        is; None of others."""
        name, rows, where = self.checkpoint.path.name, self.layout, ""
        if self.in_place is not None:
            where = f"{format_size(self.lying_nbytes)} of experts stay in it and are read there"
        elif self.not_in_place is not None:
            where = f"{'experts' if self.architecture.experts else 'rows'} are copied, as {self.not_in_place}"
        if self.kept is None:
            return f"{name}: {where}" if where else None
        nbytes = sum(entry.nbytes for entry in self.resident if entry.plane)
        scales = f"; scales of the down columns in memory, {format_size(nbytes)}" if nbytes else ""
        left = self.kept.left
        kinds, times = self.kept.coded_anew
        anew = f"; {' and '.join(kinds)} coded anew, without loss, in {times:.1f} times the bytes" if kinds else ""
        rest = f"; {len(left)} matrices, {left[0]} the first, dequantised to {self.dtype.name}" if left else ""
        shared = sum(entry.nbytes for entry in self.resident if ".beside_" in entry.name)
        if self.checkpoint.config.get(SHARED_BESIDE):
            rest += f"; shared experts, of other kinds, in memory, {format_size(shared)}"
        rest += f"; {where}" if where else ""
        return f"the bits of {name} are kept: neurons {rows.described}{anew}{scales}{rest}; --bits encodes anew"

    def identity(self) -> dict[str, Any]:
        """The identity that a partial directory must have to be resumed: the source, the options, the layout."""
        return {
            "version": flashllm.__version__,
            "source": self.checkpoint.identity(),
            "dtype": self.dtype.name,
            "headers": hashlib.sha256(self.ffn_header + self.resident_header).hexdigest(),
            "encodings": [self.layout.encoding, self.layout.down, self.resident_encoding],
            "other_encodings": dict(self.other_encodings),
            "predictor_rank": self.predictor_rank,
            "coded_gates": self.coded_gates,
            "coded": None if self.coded is None else self.coded.fingerprint(),
        }

    def manifest(self, files: Mapping[str, FileEntry], source_name: str) -> Manifest:
        return Manifest(
            flashllm_version=flashllm.__version__,
            architecture=self.architecture,
            dtype=self.dtype.name,
            rows=self.layout,
            resident_encoding=self.resident_encoding,
            other_encodings=self.other_encodings,
            down_scales=self.kept.down_scales if self.kept is not None else (),
            activations=self.activations,
            checksum_rows=max(checksum_rows(self.layout, self.architecture)),
            files=files,
            stream_block_rows=self.stream_block_rows,
            in_place=self.in_place,
            source=Source(name=source_name, dtype=self.source_dtype.name),
        )

    def lying_experts(self, layer: int) -> int:
        """Experts of a layer that stay where they are."""
        return lying_experts(self.architecture, self.in_place, layer)

    @property
    def layouts(self) -> list[RowLayout | None]:
        """The layout of every layer's rows that are written; None where none are."""
        return stored_layouts(self.architecture, self.layout, self.in_place)

    def bundles(self, layer: int) -> Iterator[dict[str, Claim]]:
        """Places of a layer's neurons that are written, in their order: the FFN's matrices, or those of each expert."""
        for name in bundle_names(self.architecture, layer)[self.lying_experts(layer) :]:
            yield {matrix: self.claims[f"{name}{matrix}.weight"] for matrix in self.architecture.matrices}

    def dtype_of(self, name: str) -> WeightDtype:
        return WEIGHT_DTYPE_BY_CODE[self.checkpoint.tensors[name].dtype]


def plan_conversion(checkpoint: Checkpoint, **choices: Unpack[Choices]) -> ConversionPlan:
    """Decide and check everything. UsageError for a model without the gates, or codes, that a choice is about.

    FormatError for missing tensors and wrong shapes; UnsupportedModelError for what the architecture's table entry
    does not know, for dtypes other than float32, float16 and bfloat16, and for mixed ones without a `dtype`. The
    errors of `make_tokenizer` pass through.
    """
    dtype = choices.get("dtype") or checkpoint.preferred_dtype
    gate = choices.get("gate", "rows")
    claimed = claims(checkpoint.config)
    names = checked_tensors(checkpoint, claimed)
    if choices.get("keep") and shared_differ(checkpoint, names, claimed, resolve(checkpoint.config)):
        checkpoint = checkpoint.configured({**checkpoint.config, SHARED_BESIDE: True})
        claimed = claims(checkpoint.config)
    architecture, block = resolve(checkpoint.config), block_spec(checkpoint.config)
    source_dtype = _source_dtype(checkpoint, names, claimed, mixed_allowed=dtype is not None)
    target = source_dtype if dtype is None else WEIGHT_DTYPES[dtype]
    _check_gate(checkpoint, architecture, gate)
    storage = storage_of(Sources(checkpoint, names, claimed), architecture, target, choices)
    layout, table = storage.layout, storage.table
    # Other gates than those in the rows name the active neurons themselves.
    wants_predictors = choices.get("predictors", False) and architecture.sparse and gate == "rows"
    own = checkpoint.predictors if wants_predictors else None
    companions, made = tuple(checkpoint.companions), dict(checkpoint.made)
    if companions and (tokenizer := make_tokenizer(checkpoint.path, companions)) is not None:
        made[TOKENIZER] = tokenizer
    ffn = [
        (ffn_tensor(layer), each.safetensors_dtype, each.shape)
        for layer, each in enumerate(stored_layouts(architecture, layout, storage.in_place))
        if each is not None
    ]
    return ConversionPlan(
        checkpoint=checkpoint,
        architecture=architecture,
        block=block,
        claims=claimed,
        names=names,
        source_dtype=source_dtype,
        dtype=target,
        **{each.name: getattr(storage, each.name) for each in fields(storage)},
        activations=_activations(checkpoint, storage, choices.get("activations")),
        ffn_header=encode_header(ffn, _METADATA),
        resident_header=encode_header([(entry.name, entry.code, entry.shape) for entry in storage.resident], _METADATA),
        table_header=b""
        if table is None
        else encode_header([(TOKEN_TABLE, "U8", (table.rows, table.stride))], _METADATA),
        companions=companions,
        made=made,
        predictor_rank=default_rank(architecture.d_model) if wants_predictors and own is None else 0,
        own_predictors=own,
        coded_gates=gate == "4bit",
        coded=choices.get("coded") if storage.kept is None else storage.kept,
    )


def _activations(checkpoint: Checkpoint, storage: Storage, asked: Activations | None) -> str | None:
    """UsageError where there are no codes."""
    usual = usual_activations(
        (
            storage.layout.encoding,
            *storage.layout.ups,
            storage.layout.down,
            storage.resident_encoding,
            *storage.other_encodings.values(),
        )
    )
    if asked is None:
        return usual
    if usual is None:
        raise UsageError(
            f"{checkpoint.path}: activations are for weights in codes, which it has none of; give --bits 8 or 4, or "
            "--resident-bits"
        )
    return None if asked == "float32" else asked


def _check_gate(checkpoint: Checkpoint, architecture: Architecture, gate: GatePlace) -> None:
    """UsageError where the model has no gates, or experts, which need none named."""
    if gate != "rows" and not architecture.gated:
        raise UsageError(f"{checkpoint.path}: the FFN of this model has no gate, which --gate and --sparsify need")
    if architecture.experts and gate != "rows":
        raise UsageError(
            f"{checkpoint.path}: a mixture of experts, whose router names the neurons; --gate and --sparsify are for "
            "other models"
        )


def checked_tensors(checkpoint: Checkpoint, claimed: Mapping[str, Claim]) -> dict[str, str]:
    """State_dict name -> name in the checkpoint, whose model needs what is `claimed`.

    FormatError where one of those is missing or has another shape, UnsupportedModelError where the checkpoint has a
    tensor that its config says nothing of.
    """
    block, spec = block_spec(checkpoint.config), spec_of(checkpoint.config)
    names = spec.with_prefix(checkpoint.tensors)
    if block.tied_head and spec.head in names:
        names.setdefault(spec.embedding, names[spec.head])  # one tensor, stored under either name
    _check_tensors(checkpoint, spec, names, shapes_of(claimed), tied=block.tied_head)
    return names


def _check_tensors(
    checkpoint: Checkpoint, spec: ArchitectureSpec, names: dict[str, str], expected: dict[str, Shape], *, tied: bool
) -> None:
    """The checkpoint has the `expected` tensors (state_dict names), in these shapes, and no others that matter."""
    for name, shape in expected.items():
        if name not in names:
            hint = what_wraps(spec, names)
            raise FormatError(f"{checkpoint.path}: tensor {name} is missing from the checkpoint{hint}")
        found = checkpoint.tensors[names[name]].shape
        if found not in (shape, (1, *shape)):  # ERNIE's bias is a row
            raise FormatError(
                f"{checkpoint.where(names[name])}: has shape {list(found)}, the config says {list(shape)}"
            )
    unknown = sorted(set(names) - {*expected, spec.head})
    if unknown:
        where = checkpoint.where(names[unknown[0]])
        raise UnsupportedModelError(
            f"{where}: is no part of the {spec.model_type} model that {checkpoint.path} describes"
        )
    if tied and spec.head in names and not _same_bytes(checkpoint, names[spec.head], names[spec.embedding]):
        raise UnsupportedModelError(
            f"{checkpoint.where(names[spec.head])}: differs from the embedding, though the config ties them; "
            "set tie_word_embeddings to false in config.json to keep it, or remove the tensor"
        )


def _same_bytes(checkpoint: Checkpoint, first: str, second: str) -> bool:
    one, two = checkpoint.tensors[first], checkpoint.tensors[second]
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    for start in range(0, one.nbytes, CHUNK_NBYTES):
        chunks = [np.empty(min(CHUNK_NBYTES, one.nbytes - start), np.uint8) for _ in range(2)]
        checkpoint.read(first, start, chunks[0])
        checkpoint.read(second, start, chunks[1])
        if not np.array_equal(chunks[0], chunks[1]):
            return False
    return True


def _source_dtype(
    checkpoint: Checkpoint, names: Mapping[str, str], claimed: Mapping[str, Claim], *, mixed_allowed: bool
) -> WeightDtype:
    """That of all tensors but those that are in fp32 whatever the model's is."""
    wide = {names[claim.source] for claim in claimed.values() if is_wide(claim.name)}
    used = list(dict.fromkeys(names[claim.source] for claim in claimed.values()))
    first = checkpoint.tensors[used[0]].dtype
    for name in used:
        code = checkpoint.tensors[name].dtype
        if code not in WEIGHT_DTYPE_BY_CODE:
            known = ", ".join(WEIGHT_DTYPE_BY_CODE)
            raise UnsupportedModelError(f"{checkpoint.where(name)}: has dtype {code}; supported: {known}")
        if code != first and name not in wide and not mixed_allowed:
            message = (
                f"has dtype {code}, {used[0]} has {first}; say which one the result shall have: `flashllm convert "
                "--dtype bfloat16`, float16 or float32"
            )
            raise UnsupportedModelError(f"{checkpoint.where(name)}: {message}")
    return WEIGHT_DTYPE_BY_CODE[first]
