"""The files of a model directory by name, the tensors in them, and what their headers must say.

Reads no data. Whether the bytes are right is for `verify` and for the row checksums.
"""

from flashllm.bundle import RowLayout
from flashllm.errors import FormatError
from flashllm.safetensors_file import DATA_ALIGNMENT, SafetensorsHeader

FFN = "ffn.safetensors"
RESIDENT = "resident.safetensors"
PREDICTORS = "predictors.safetensors"
TRACE = "trace.safetensors"  # in models of dummy weights: activity that takes the place of the predictor's answer
CONFIG = "config.json"
MODEL_CARD = "README.md"  # for people: may be edited, so it is not hashed
PREDICTOR_METADATA = {"format": "flashllm-predictors", "version": "1"}


def ffn_tensor(layer: int) -> str:
    """Name of a layer's rows in `ffn.safetensors`."""
    return f"layers.{layer}.ffn"


def checksums_tensor(layer: int) -> str:
    """Name of a layer's row checksums in `resident.safetensors`."""
    return f"flashllm.layers.{layer}.checksums"


def check_ffn_header(header: SafetensorsHeader, layout: RowLayout, num_layers: int) -> None:
    """`ffn.safetensors` holds exactly the layers' rows, in order, at aligned offsets. FormatError otherwise."""
    names = [ffn_tensor(layer) for layer in range(num_layers)]
    if list(header.tensors) != names:
        raise FormatError(f"{header.path}: must hold {names[0]} to {names[-1]} in this order and nothing else")
    for name in names:
        _expect(header, name, layout.safetensors_dtype, layout.shape)
    _check_alignment(header)


def check_resident_header(header: SafetensorsHeader, layout: RowLayout, num_layers: int) -> None:
    """`resident.safetensors` holds the row checksums of every layer. FormatError otherwise."""
    for layer in range(num_layers):
        _expect(header, checksums_tensor(layer), "U64", (layout.num_rows,))
    _check_alignment(header)


def check_predictors_header(
    header: SafetensorsHeader, layout: RowLayout, num_layers: int, model_sha256: str
) -> list[int]:
    """The ranks by layer. FormatError for predictors of another model, or other tensors or shapes than theirs."""
    metadata = header.metadata
    if any(metadata.get(key) != value for key, value in PREDICTOR_METADATA.items()):
        raise FormatError(f"{header.path}: is not a predictor file of version {PREDICTOR_METADATA['version']}")
    if metadata.get("model_sha256") != model_sha256:
        raise FormatError(f"{header.path}: these predictors were trained for another model; train them for this one")
    ranks = []
    for layer in range(num_layers):
        first = header.tensors.get(f"layers.{layer}.a")
        rank = first.shape[0] if first is not None and len(first.shape) == 2 else 0
        if not 0 < rank <= layout.d_model:
            raise FormatError(f"{header.path}: layers.{layer}.a must be [rank, {layout.d_model}] with a rank from 1")
        _expect(header, f"layers.{layer}.a", "F16", (rank, layout.d_model))
        _expect(header, f"layers.{layer}.b", "F16", (layout.d_ff, rank))
        _expect(header, f"layers.{layer}.bias", "F32", (layout.d_ff,))
        _expect(header, f"layers.{layer}.threshold", "F32", (1,))
        ranks.append(rank)
    if len(header.tensors) != 4 * num_layers:
        raise FormatError(f"{header.path}: holds tensors that belong to no predictor of {num_layers} layers")
    return ranks


def _expect(header: SafetensorsHeader, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    info = header.tensors.get(name)
    if info is None:
        raise FormatError(f"{header.path}: tensor {name} is missing")
    if info.dtype != dtype or info.shape != shape:
        raise FormatError(f"{header.path}: {name} is {info.dtype} {list(info.shape)}, not {dtype} {list(shape)}")


def _check_alignment(header: SafetensorsHeader) -> None:
    if header.data_start % DATA_ALIGNMENT:
        raise FormatError(f"{header.path}: the data starts at {header.data_start}, no multiple of {DATA_ALIGNMENT}")
