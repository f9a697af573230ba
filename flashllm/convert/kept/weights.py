"""Which weights of a quantised checkpoint a model directory holds as they are, and their bytes.

Rows that a token is multiplied by (up, gate, attention, embedding, head) keep codes and scales in one vector. A down
column's codes go into the neuron's row, and its scales, which the checkpoint has for groups of neurons, into the
layer's plane of scales. Up and gate have one encoding in a layer, columns codes of one width: of its matrices, the
widest. Their scales have one form, and a plane's too. Shared experts of other kinds than the routed ones are resident,
so that each of their matrices has its own. Matrices that cannot be kept are dequantised: in a layer, all ups and gates,
or all downs.

Knows kinds of codes by `blocks.KINDS`, and encodings by their names, no file format.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.registry import Claim, bundle_names
from flashllm.arch.spec import Architecture
from flashllm.base.codes.carried import (
    PACKED_AS,
    PLANE_CODES,
    SCALE_FORMS,
    UNIT,
    CarriedCode,
    PlaneCode,
    Quantised,
    pack_codes,
    plane_code_of,
)
from flashllm.convert.checkpoint.coded import Vectors
from flashllm.convert.checkpoint.pieces import runs
from flashllm.convert.checkpoint.source import Checkpoint, Lying, QuantisedTensor
from flashllm.convert.kept.blocks import KINDS, Kind
from flashllm.errors import FormatError
from flashllm.format.model_files import is_coded_matrix

_ROWS_TOGETHER = 256  # taken apart at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWeights:
    """The codes that are kept, a `CodedWeights`."""

    ups: tuple[str | None, ...]  # encoding of each layer's up and gate; None: they are not kept
    # Of each layer's down columns: of `PLANE_ENCODINGS`, or with scales of their own; None: they are not kept.
    downs: tuple[str | None, ...]
    down_scales: tuple[str, ...]  # of each layer, where those lie apart; "" where they do not
    resident: Mapping[str, str]  # encoding by canonical name
    left: tuple[str, ...]  # canonical names of quantised matrices that are not kept
    _claims: Mapping[str, Claim]
    _tensors: Mapping[str, QuantisedTensor]  # by canonical name
    _where: Callable[[str], str]  # the same, for messages
    _bundles: Sequence[Sequence[str]]  # of each layer, `bundle_names`
    _columns: dict[str, NDArray[np.uint8]] = field(default_factory=dict)  # of the layer at hand

    def fingerprint(self) -> Any:
        """As of `CodedWeights`; the source's own fingerprint says the rest."""
        return ["kept", list(self.ups), list(self.downs), list(self.down_scales), dict(self.resident)]

    @property
    def has_scales_apart(self) -> bool:
        """True where matrices of neurons have a scale for all their weights."""
        of_rows = [PACKED_AS[up].form for up in self.ups if up is not None]
        return any(form.is_e4m3 for form in (*of_rows, *(SCALE_FORMS[name] for name in self.down_scales if name)))

    @property
    def coded_anew(self) -> tuple[tuple[str, ...], float]:
        """(kinds that are codebooks, how many times their bytes the codes of their weights take)"""
        stored, coded = Counter[str](), 0
        for name, tensor in self._tensors.items():
            if (kind := KINDS.get(tensor.kind)) is not None and kind.of_codebook:
                blocks = math.prod(self._claims[name].shape) // kind.weights
                stored[kind.name] += blocks * kind.nbytes
                coded += blocks * kind.packed_as.vector_nbytes(kind.weights)
        return tuple(sorted(stored)), coded / max(1, stored.total())

    def vectors(self, name: str) -> Vectors | None:
        if name.endswith(".down.weight"):
            if (down := self._down(name)) is None:
                return None
            if (own := PACKED_AS.get(down)) is not None:  # the file has the columns as rows
                code = own
                return lambda first, count: self._packed(name, code, first, count)
            return lambda first, count: self._columns_of(name, PLANE_CODES[down])[first : first + count]
        encoding = self.resident.get(name) or (self._up(name) if name in self._tensors else None)
        if encoding is None:
            return None
        code, claim = PACKED_AS[encoding], self._claims[name]

        def read(first: int, count: int) -> NDArray[np.uint8]:
            parts = [self._packed(name, code, start, length) for start, length in runs(claim, first, count)]
            return np.concatenate(parts)

        return read

    def plane(self, layer: int) -> dict[str, NDArray[Any]]:
        """The arrays of a layer's plane by the names of its tensors."""
        parts: dict[str, list[NDArray[Any]]] = {}
        for bundle in self._bundles[layer]:
            for part, values in self._scales(f"{bundle}down.weight").items():
                parts.setdefault(part, []).append(values)
        return {f"layers.{layer}.down.{part}": np.concatenate(values) for part, values in parts.items()}

    def lies(self, name: str) -> Lying | None:
        """The place of a matrix whose codes are kept; None if it is not in one piece, or up's or gate's codes are kept
        in more bits."""
        tensor, claim = self._tensors[name], self._claims[name]
        if not name.endswith(".down.weight") and _encoding(tensor) != self._up(name):
            return None
        return tensor.place() if runs(claim, 0, claim.rows) == [(0, claim.rows)] else None

    def check_scales(self, layer: int, expert: int) -> None:
        """FormatError where an expert's gate or up has a scale that no weights have."""
        for matrix in ("gate", "up"):
            name = f"{self._bundles[layer][expert]}{matrix}.weight"
            self._taken(name, self._kind(name), 0, self._claims[name].rows)

    def _scales(self, name: str) -> dict[str, NDArray[Any]]:
        """The scales [groups of neurons, d_model] of a down projection by their names."""
        claim = self._claims[name]
        parts: dict[str, list[NDArray[Any]]] = {}
        for first in range(0, claim.rows, _ROWS_TOGETHER):
            quantised = self._quantised(name, claim, first, min(_ROWS_TOGETHER, claim.rows - first))
            for part, values in quantised.scales.items():
                parts.setdefault(part, []).append(values)
        form = self._kind(name).form
        if form.is_e4m3:  # one for all of the tensor, which each group of neurons has
            parts["scales"] = [np.repeat(parts["scales"][0][:1], claim.shape[1] // form.group, axis=1)]
        return {part: np.concatenate(values).T for part, values in parts.items()}

    def _columns_of(self, name: str, code: PlaneCode) -> NDArray[np.uint8]:
        """Every column's codes, [d_ff, bytes]; of one layer, or expert, at a time."""
        if name not in self._columns:
            self._columns.clear()
            kind, claim = self._kind(name), self._claims[name]
            d_model, d_ff = claim.shape
            packed = np.empty((d_ff, code.vector_nbytes(d_model)), np.uint8)
            unit_nbytes = code.vector_nbytes(UNIT)
            for first in range(0, d_model, _ROWS_TOGETHER):
                count = min(_ROWS_TOGETHER, d_model - first)
                codes = np.ascontiguousarray(self._quantised(name, claim, first, count).codes.T)
                at = first // UNIT * unit_nbytes
                part = pack_codes(codes, code.bits, unsigned=kind.form.unsigned)
                packed[:, at : at + part.shape[1]] = part
            self._columns[name] = packed
        return self._columns[name]

    def _up(self, name: str) -> str | None:
        return self.ups[int(name.split(".")[1])]

    def _down(self, name: str) -> str | None:
        """The encoding of its columns."""
        return self.downs[int(name.split(".")[1])]

    def _kind(self, name: str) -> Kind:
        return KINDS[self._tensors[name].kind]

    def _packed(self, name: str, code: CarriedCode, start: int, length: int) -> NDArray[np.uint8]:
        """Stored rows of a tensor as vectors."""
        if self._tensors[name].kind == code.name:  # read as they are
            return self._tensors[name].raw(start, length)
        return code.pack(self._taken(name, self._kind(name), start, length))

    def _quantised(self, name: str, claim: Claim, first: int, count: int) -> Quantised:
        """Rows of a down projection that are one run of stored rows."""
        ((start, length),) = runs(claim, first, count)
        return self._taken(name, self._kind(name), start, length)

    def _taken(self, name: str, kind: Kind, start: int, length: int) -> Quantised:
        try:
            return kind.quantised(self._tensors[name].raw(start, length), self._tensors[name].scale)
        except OverflowError as error:
            raise FormatError(f"{self._where(name)}: {error}: damaged; get the file again") from error


def keep_weights(
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    claimed: Mapping[str, Claim],
    residents: Iterable[str],
    architecture: Architecture,
    *,
    one_layout: bool = False,
) -> KeptWeights | None:
    """The codes of a checkpoint that are kept; None where it has none that can be.

    `names`: state_dict name -> name in the checkpoint; `claimed`: by canonical name. `one_layout`: up and gate must be
    in the same codes in all layers.
    """
    found = {
        name: checkpoint.quantised[names[claim.source]]
        for name, claim in claimed.items()
        if names.get(claim.source) in checkpoint.quantised
    }
    usable = {
        name: tensor
        for name, tensor in found.items()
        if _encoding(tensor) is not None and not (claimed[name].part.transposed or claimed[name].part.turned)
    }
    encodings = {name: _encoding(tensor) for name, tensor in usable.items()}
    resident = {name: code for name in residents if is_coded_matrix(name) and (code := encodings.get(name)) is not None}
    bundles = [bundle_names(architecture, layer) for layer in range(architecture.num_layers)]
    below = [[f"{bundle}down.weight" for bundle in layer] for layer in bundles]
    down = _kept_down(usable, claimed, bundles, architecture.d_model)
    above = [
        [f"{bundle}{matrix}.weight" for bundle in layer for matrix in architecture.matrices[:-1]] for layer in bundles
    ]
    ups = _kept_ups([[encodings.get(name) for name in layer] for layer in above])
    if len({*ups}) > 1 and one_layout:
        ups = (None,) * len(ups)
    of_rows = zip((*above, *below), (*ups, *down.encodings), strict=True)
    kept = {*resident, *(name for layer, encoding in of_rows if encoding is not None for name in layer)}
    if not kept:
        return None
    return KeptWeights(
        ups=ups,
        downs=down.encodings,
        down_scales=down.scales,
        resident=resident,
        left=tuple(name for name in found if name not in kept),
        _claims={name: claimed[name] for name in kept},
        _tensors={name: usable[name] for name in kept},
        _where=lambda name: checkpoint.where(names[claimed[name].source]),
        _bundles=bundles,
    )


def _kept_ups(layers: Sequence[Sequence[str | None]]) -> tuple[str | None, ...]:
    """The encoding of each layer's up and gate, from those of its matrices: of one form, that of the most bits; None
    where forms differ, or one cannot be kept. Layers without neurons have the others' usual one."""
    found = []
    for layer in layers:
        codes = [PACKED_AS[each] for each in layer if each is not None]
        of_one = len(codes) == len(layer) and len({code.form.name for code in codes}) == 1
        found.append(max(codes, key=lambda code: code.bits).name if of_one else None)
    usual = most_common(up for up in found if up is not None)
    return tuple(up if layer else usual for up, layer in zip(found, layers, strict=True))


def shared_differ(
    checkpoint: Checkpoint, names: Mapping[str, str], claimed: Mapping[str, Claim], architecture: Architecture
) -> bool:
    """True for a mixture, read by whole experts, of which a shared one is of other kinds than those of the layer that a
    router chooses, and these in codes that can be kept."""
    if not architecture.shared_neurons or architecture.unit_rows == 1:
        return False

    def encoding(name: str) -> str | None:
        tensor = checkpoint.quantised.get(names[claimed[name].source])
        return None if tensor is None else _encoding(tensor)

    for layer in architecture.mixtures:
        bundles = bundle_names(architecture, layer)
        for matrix in architecture.matrices:
            routed, shared = (encoding(f"{bundle}{matrix}.weight") for bundle in (bundles[0], bundles[-1]))
            if routed is not None and routed != shared:
                return True
    return False


class _Down(NamedTuple):
    """How down columns are kept."""

    encodings: tuple[str | None, ...]  # of each layer; None: not at all
    scales: tuple[str, ...] = ()  # forms of those that lie apart, of each layer; "" where none do


def _kept_down(
    usable: Mapping[str, QuantisedTensor], claimed: Mapping[str, Claim], bundles: Sequence[Sequence[str]], d_model: int
) -> _Down:
    """Down columns of a layer are kept where all are quantised, and in one form."""
    layers = [[f"{bundle}down.weight" for bundle in layer] for layer in bundles]
    names = [name for layer in layers for name in layer]
    can_be = {name for name in names if name in usable and claimed[name].part.repeats == 1}
    none = _Down((None,) * len(layers))
    if any(usable[name].transposed for name in can_be):  # the file has the columns as rows, with their own scales
        own = {_encoding(usable[name]) if name in can_be and usable[name].transposed else None for name in names}
        return _Down((own.pop(),) * len(layers)) if len(own) == 1 else none
    encodings: list[str | None] = []
    scales: list[str] = []
    for layer in layers:
        kinds = [KINDS[usable[name].kind] for name in layer if name in can_be]
        code = plane_code_of([(kind.bits, kind.form) for kind in kinds]) if len(kinds) == len(layer) > 0 else None
        of_one = code is not None and len({kind.form.name for kind in kinds}) == 1
        encodings.append(code.name if code is not None and of_one else None)
        scales.append(kinds[0].form.name if of_one else "")
    usual = next((at for at, encoding in enumerate(encodings) if encoding is not None), None)
    if usual is None or d_model % UNIT:
        return none
    for at in (at for at, layer in enumerate(layers) if not layer):  # without neurons
        encodings[at], scales[at] = encodings[usual], scales[usual]
    return _Down(tuple(encodings), tuple(scales))


def most_common(encodings: Iterable[str]) -> str | None:
    """The encoding that most matrices have; None of none."""
    counted = Counter(encodings).most_common(1)
    return counted[0][0] if counted else None


def _encoding(tensor: QuantisedTensor) -> str | None:
    """How its vectors are stored; None where they cannot be."""
    if tensor.kind in PACKED_AS:
        return tensor.kind
    return None if (kind := KINDS.get(tensor.kind)) is None else kind.packed_as.name
