"""How a conversion stores each matrix: the row layout, the resident file's tensors and their encodings.

Decides only; reads headers, and matrices that 12 bits may not hold.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from flashllm.arch.registry import Claim, bundle_names, resident_shapes
from flashllm.arch.spec import Architecture
from flashllm.arch.tensors import TOKEN_TABLE, Shape
from flashllm.base.dtypes import WeightDtype
from flashllm.convert.checkpoint.escapes import held_by_bf12
from flashllm.convert.checkpoint.source import Checkpoint, Lying
from flashllm.convert.choices import Choices
from flashllm.convert.kept.in_place import choose_in_place, lies_plain
from flashllm.convert.kept.weights import KeptWeights, keep_weights, most_common
from flashllm.errors import UsageError
from flashllm.format.in_place import InPlace, checksum_counts
from flashllm.format.model_files import TABLE_CHECKSUMS, checksums_tensor, gate_tensor, is_coded_matrix, plane_tensors
from flashllm.format.model_files import resident_encoding as stored_as
from flashllm.format.rows import RowEncoding, RowLayout, TableLayout, checksum_rows, longest_up, packed, widest_down

_CACHE_LINE_NBYTES = 64
TABLES = ("embedding.weight", "head.weight", TOKEN_TABLE)  # matrices of the vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentEntry:
    """A tensor of the resident file: one of the checkpoint's, or (`layer` set) a layer's checksums or scales."""

    name: str  # canonical
    code: str
    shape: Shape
    itemsize: int
    source: str = ""  # its tensor's name in the checkpoint
    encoding: RowEncoding | None = None  # of weights
    layer: int | None = None
    plane: bool = False  # of the layer: scales of its down columns

    @property
    def nbytes(self) -> int:
        """Bytes in the resident file."""
        return math.prod(self.shape) * self.itemsize


class Sources(NamedTuple):
    """The tensors of a checkpoint."""

    checkpoint: Checkpoint
    names: dict[str, str]  # state_dict name -> name in the checkpoint
    claims: dict[str, Claim]  # by canonical name


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How each matrix is stored."""

    layout: RowLayout
    resident_encoding: str | None  # of the resident matrices, where they are coded
    other_encodings: Mapping[str, str]  # by name, of those that are stored otherwise
    kept: KeptWeights | None  # the codes that the checkpoint has
    resident: tuple[ResidentEntry, ...] = ()  # of the resident file, in its order
    table: TableLayout | None = None  # of per-layer embeddings
    in_place: InPlace | None = None  # experts that stay where they are
    not_in_place: str | None = None  # why none do, though they were to


def storage_of(sources: Sources, architecture: Architecture, target: WeightDtype, choices: Choices) -> Storage:
    """The encodings that were chosen, or those of a quantised checkpoint; where bf12 cannot hold a matrix, none.

    `target`: the result's dtype. UsageError for 12 bits of another dtype than bfloat16.
    """
    checkpoint, names, claimed = sources
    rows, resident = choices.get("encoding"), choices.get("resident_encoding")
    tables = choices.get("table_encoding") or resident
    if "bf12" in (rows, resident, tables) and target.name != "bfloat16":
        raise UsageError(f"12 bits hold bfloat16 without loss; this model would be {target.name}: use 16, 8 or 4 bits")
    table = [TOKEN_TABLE] if TOKEN_TABLE in claimed else []
    matrices = [name for name in (*resident_shapes(checkpoint.config), *table) if is_coded_matrix(name)]
    others = {name: tables for name in TABLES if name in matrices and tables is not None and tables != resident}

    def fits(name: str) -> bool:
        return held_by_bf12(checkpoint, names, claimed[name])

    def of_rows(*parts: str) -> str:
        """How those matrices of every neuron are stored."""
        layers = range(architecture.num_layers if rows == "bf12" else 0)
        bundles = [bundle for layer in layers for bundle in bundle_names(architecture, layer)]
        held = all(fits(f"{bundle}{matrix}.weight") for matrix in parts for bundle in bundles)
        return rows if rows is not None and held else target.name

    up, down = of_rows(*architecture.matrices[:-1]), of_rows("down")
    ups: tuple[str, ...] = ()
    downs: tuple[str, ...] = ()
    kept = None
    if choices.get("keep"):
        apart = choices.get("gate") == "resident"
        of_neurons = {name: claim for name, claim in claimed.items() if resident is None or name not in matrices}
        kept = keep_weights(checkpoint, names, of_neurons, matrices, architecture, one_layout=apart)
    if kept is not None:
        if resident is None:
            resident = most_common(kept.resident.values())
            own = {name: kept.resident.get(name, target.name) for name in matrices}
            others = {name: encoding for name, encoding in own.items() if encoding != (resident or target.name)}
        ups, downs = (tuple(each or target.name for each in of) for of in (kept.ups, kept.downs))
        up, down = longest_up(ups, architecture.d_model), widest_down(downs)
        ups, downs = (of if len({*of}) > 1 else () for of in (ups, downs))
    others |= {name: target.name for name in matrices if others.get(name, resident) == "bf12" and not fits(name)}
    layout = RowLayout(
        encoding=up,
        d_model=architecture.d_model,
        d_ff=architecture.d_ff,
        matrices=("up", "down") if choices.get("gate") == "resident" else architecture.matrices,
        down_encoding=None if down == up else down,
        downs=downs,
        ups=ups,
    )
    layout = packed(layout, architecture)

    def lies(name: str) -> Lying | None:
        if kept is not None and kept.vectors(name) is not None:
            return kept.lies(name)
        _, layer, *_, matrix, _ = name.split(".")
        own = layout.of_layer(int(layer), layout.d_ff).encoding_of(matrix)
        plain = choices.get("coded") is None and own.name == target.name
        return lies_plain(checkpoint, names[claimed[name].source], claimed[name], target) if plain else None

    lying = choose_in_place(lies, kept, architecture, layout) if choices.get("in_place") else None
    in_place, reason = (None, lying) if isinstance(lying, str) else (lying, None)
    of_table = None
    if table:
        encoding = stored_as(TOKEN_TABLE, target.name, resident, None, others)
        ids, columns = claimed[TOKEN_TABLE].shape
        of_table = TableLayout(ids, columns, encoding)
    storage = Storage(
        layout=layout,
        resident_encoding=resident,
        other_encodings=others,
        kept=kept,
        table=of_table,
        in_place=in_place,
        not_in_place=reason,
    )
    return replace(storage, resident=_entries(sources, architecture, target, storage))


def _entries(
    sources: Sources, architecture: Architecture, target: WeightDtype, storage: Storage
) -> tuple[ResidentEntry, ...]:
    """The tensors of the resident file, in its order."""
    layers, layout, kept = range(architecture.num_layers), storage.layout, storage.kept
    layouts = [layout.of_layer(layer, width) for layer, width in enumerate(architecture.every_width)]
    stored = [*resident_shapes(sources.checkpoint.config)]
    if layout.matrices != architecture.matrices:
        stored += [gate_tensor(layer) for layer in layers]
    entries = []
    for claim in (sources.claims[name] for name in stored):
        encoding = stored_as(
            claim.name, target.name, storage.resident_encoding, layout.encoding, storage.other_encodings
        )
        entries.append(_resident_entry(claim, sources.names[claim.source], encoding))
    counts = checksum_counts(architecture, layout, storage.in_place, checksum_rows(layout, architecture))
    entries += [
        ResidentEntry(name=checksums_tensor(layer), code="U64", shape=(count,), itemsize=8, layer=layer)
        for layer, count in enumerate(counts)
    ]
    if storage.table is not None:
        entries.append(ResidentEntry(name=TABLE_CHECKSUMS, code="U64", shape=(storage.table.rows,), itemsize=8))
    for layer, form in enumerate(kept.down_scales if kept is not None else ()):
        entries += [
            ResidentEntry(
                name=name, code=code, shape=shape, itemsize=2 if code == "F16" else 1, layer=layer, plane=True
            )
            for name, (code, shape) in plane_tensors(layer, form, layouts[layer]).items()
        ]
    # Stable: whole cache lines first, so that they all start on one; then wide items, so that all are aligned.
    entries.sort(key=lambda entry: (entry.nbytes % _CACHE_LINE_NBYTES != 0, -entry.itemsize))
    return tuple(entries)


def _resident_entry(claim: Claim, source: str, encoding: RowEncoding) -> ResidentEntry:
    """A tensor of the checkpoint as it is stored."""
    shape = claim.shape
    return ResidentEntry(
        name=claim.name,
        code=encoding.safetensors_dtype,
        shape=(*shape[:-1], encoding.vector_items(shape[-1])),
        itemsize=int(encoding.storage.itemsize),
        source=source,
        encoding=encoding,
    )
