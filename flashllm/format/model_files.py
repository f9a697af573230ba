"""The files of a model directory by name, the tensors in them, and what their headers must say.

Reads no data. Whether the bytes are right is for `verify` and for the row checksums.
"""

from collections.abc import Callable, Mapping, Sequence

from flashllm.arch.tensors import TOKEN_TABLE, is_wide
from flashllm.base.codes.carried import SCALE_FORMS, plane_shapes
from flashllm.errors import FormatError
from flashllm.format.rows import ROW_ENCODINGS, RowEncoding, RowLayout, TableLayout
from flashllm.format.safetensors import DATA_ALIGNMENT, SafetensorsHeader

FFN = "ffn.safetensors"
RESIDENT = "resident.safetensors"
TABLE = "token_rows.safetensors"  # per-layer embeddings, of models that have them
PREDICTORS = "predictors.safetensors"
PLACED = "placed.safetensors"  # of earlier versions: the neurons again, in another order; not read any more
POPULARITY = "popularity.safetensors"  # how often each neuron is active; see flashllm/format/popularity.py
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
MODEL_CARD = "README.md"  # for people: may be edited, so it is not hashed
_OWN_PREFIX = "flashllm."  # of tensors that are no weights
_CODED = frozenset(
    (
        *("embedding", "head", "project_in", "project_out", "query_down", "query", "key", "key_up", "value", "out"),
        *("out_gate", "beside_up", "beside_gate", "beside_down", "enter", "leave", "laurel_in", "laurel_out"),
        *("per_layer_embedding", "per_layer_projection", "per_layer_gate", "per_layer_out"),
    )
)
TABLE_CHECKSUMS = f"{_OWN_PREFIX}token_rows.checksums"  # of each row, in `resident.safetensors`
PREDICTOR_METADATA = {"format": "flashllm-predictors", "version": "1"}


def ffn_tensor(layer: int) -> str:
    """Name of a layer's rows in `ffn.safetensors`."""
    return f"layers.{layer}.ffn"


def checksums_tensor(layer: int) -> str:
    """Name of the checksums of a layer's rows in `resident.safetensors`."""
    return f"{_OWN_PREFIX}layers.{layer}.checksums"


def gate_tensor(layer: int) -> str:
    """Name of a layer's gate matrix in `resident.safetensors`, of models whose rows hold none."""
    return f"layers.{layer}.gate.weight"


def plane_tensors(layer: int, form: str, layout: RowLayout) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name in `resident.safetensors` -> (dtype, shape) of what a layer's scales of down columns are, in this form; none
    where it has no neurons, or "" is the form: columns have their own."""
    if not (layout.d_ff and form):
        return {}
    shapes = plane_shapes(SCALE_FORMS[form], layout.d_ff, layout.d_model)
    return {f"layers.{layer}.down.{part}": described for part, described in shapes.items()}


def is_coded_matrix(name: str) -> bool:
    """True for a resident tensor that may be in codes: a matrix that tokens are multiplied by, or the embedding."""
    owner, _, part = name.rpartition(".")
    return part == "weight" and owner.rpartition(".")[2] in _CODED


def resident_encoding(
    name: str, dtype: str, matrices: str | None, rows: str | None, others: Mapping[str, str]
) -> RowEncoding:
    """How a resident tensor is stored: matrices that tokens are multiplied by, and the embedding, as `matrices` says.

    `dtype`: the model's, of everything else; of the matrices too where `matrices` is None. `rows`: of resident gates,
    which are stored as the neurons' rows are. `others`: by name, of matrices that are stored otherwise. What `is_wide`
    is in fp32.
    """
    if is_wide(name):
        return ROW_ENCODINGS["float32"]
    if name in others:
        return ROW_ENCODINGS[others[name]]
    owner, _, part = name.rpartition(".")
    matrix = owner.rpartition(".")[2] if part == "weight" else ""
    if matrix == "gate" and rows is not None:
        return ROW_ENCODINGS[rows]
    return ROW_ENCODINGS[matrices if matrices is not None and is_coded_matrix(name) else dtype]


def check_ffn_header(header: SafetensorsHeader, layouts: Sequence[RowLayout | None]) -> None:
    """`ffn.safetensors` holds exactly the layers' rows, in order, at aligned offsets; of a layer without a layout none.
    FormatError otherwise."""
    held = {ffn_tensor(layer): layout for layer, layout in enumerate(layouts) if layout is not None}
    if list(header.tensors) != list(held):
        names = " to ".join(sorted({*list(held)[:1], *list(held)[-1:]})) or "no tensor"
        raise FormatError(f"{header.path}: must hold {names} in this order and nothing else")
    for name, layout in held.items():
        header.expect(name, layout.safetensors_dtype, layout.shape)
    _check_alignment(header)


def check_table(table: SafetensorsHeader, resident: SafetensorsHeader, layout: TableLayout) -> None:
    """`token_rows.safetensors` holds the rows and nothing else, `resident.safetensors` their checksums. FormatError
    otherwise."""
    if list(table.tensors) != [TOKEN_TABLE]:
        raise FormatError(f"{table.path}: must hold {TOKEN_TABLE} and nothing else")
    table.expect(TOKEN_TABLE, "U8", (layout.rows, layout.stride))
    _check_alignment(table)
    resident.expect(TABLE_CHECKSUMS, "U64", (layout.rows,))


def check_resident_header(header: SafetensorsHeader, checksums: Sequence[int]) -> None:
    """`resident.safetensors` holds as many checksums of rows for each layer. FormatError otherwise."""
    for layer, count in enumerate(checksums):
        header.expect(checksums_tensor(layer), "U64", (count,))
    _check_alignment(header)


def check_resident_tensors(
    header: SafetensorsHeader,
    shapes: Mapping[str, tuple[int, ...]],
    encoding_of: Callable[[str], RowEncoding],
    planes: Mapping[str, tuple[str, tuple[int, ...]]],
) -> None:
    """Check that `resident.safetensors` holds exactly these weights, stored as `encoding_of` says of their names, and
    the `planes` of scales as they are described. FormatError otherwise."""
    for name, shape in shapes.items():
        encoding = encoding_of(name)
        header.expect(name, encoding.safetensors_dtype, (*shape[:-1], encoding.vector_items(shape[-1])))
    for name, (stored, described) in planes.items():
        header.expect(name, stored, described)
    known = {*shapes, *planes}
    unknown = sorted(name for name in header.tensors if name not in known and not name.startswith(_OWN_PREFIX))
    if unknown:
        raise FormatError(f"{header.path}: tensor {unknown[0]} is no part of the model that {CONFIG} describes")


def _check_alignment(header: SafetensorsHeader) -> None:
    if header.data_start % DATA_ALIGNMENT:
        raise FormatError(f"{header.path}: the data starts at {header.data_start}, no multiple of {DATA_ALIGNMENT}")
