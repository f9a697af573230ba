"""The predictors' file, `predictors.safetensors`: its tensors, their bytes, and the check of its header.

 1. metadata: `format` flashllm-predictors, `version` 1, `model_sha256` of the `ffn.safetensors` it belongs to;
 2. layer N has factors `layers.N.a` [rank, d_model] and `layers.N.b` [d_ff, rank], `layers.N.bias` F32 [d_ff] and
    `layers.N.threshold` F32 [1]: neurons are active where b (a x) + bias > threshold, x being the FFN's input;
 3. the factors are F16; or I8 or U8, [rows, bytes of a row], rows coded as `FACTOR_CODES` says for 8 and 4 bits, and
    multiplied by inputs of 16 and 8 bits (csrc/kernels/row_codecs.h);
 4. a layer from 1 on may have a second predictor, `layers.N.early_a` and so on by the same rules: it names the active
    neurons of layer N from the FFN input of layer N - 1, so that their rows can be prefetched. Any layer may lack it;
 5. in the place of rule 2's tensors a layer of a gated FFN may have its gate in 4 bits: `layers.N.gate` U8 [d_ff, bytes
    of a row], coded as `GATE_CODE` says (flashllm/base/group_codes.py), and `layers.N.margin` F16 [1]. Named are the
    neurons that fire for some gate value within the margin of the coded product; the gate in the neuron's row decides;
 6. with metadata `rule` relu they are all PowerInfer's (Song et al., 2024): layer N has `layers.N.a` [rank, d_model],
    `layers.N.b` [d_ff, rank] and the threshold; neurons are active where b relu(a h) >= threshold, h being what the
    FFN's norm is applied to. Factors are F32, F16, or U8 rows of the encoding that metadata `encodings`, a JSON object,
    has for their name;
 7. tensors start at multiples of their element's size; there is nothing else.

Plain numpy; opens no files.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flashllm.base.codes.carried import PACKED_AS
from flashllm.base.group_codes import GROUP_CODES
from flashllm.errors import FormatError
from flashllm.format.model_files import PREDICTOR_METADATA
from flashllm.format.rows import RowLayout
from flashllm.format.safetensors import SafetensorsHeader, encode_header

BITS = (4, 8, 16)
_DTYPES = {4: "U8", 8: "I8", 16: "F16"}  # of the factors
PREFETCH = "early_"  # before the names of a second predictor's tensors: the format keeps the older word
RELU_RULE = {"rule": "relu"}  # in the metadata
GATE_CODE = GROUP_CODES["int4_64"]  # of gates in 4 bits
FACTOR_CODES = {4: GROUP_CODES["int4_32"], 8: GROUP_CODES["int8_32"]}  # of predictors' factors, by bits


def gate_entries(layer: int, d_model: int, d_ff: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of the margin and the codes of a layer's gate in 4 bits, in the order of a file."""
    start = f"layers.{layer}."
    return [(f"{start}margin", "F16", (1,)), (f"{start}gate", "U8", (d_ff, GATE_CODE.vector_nbytes(d_model)))]


def gates_header(widths: Sequence[int], d_model: int, model_sha256: str, metadata: Mapping[str, str]) -> bytes:
    """Header of a file of gates in 4 bits of layers of these widths; its length does not depend on `model_sha256`."""
    tensors = [entry for layer, d_ff in enumerate(widths) if d_ff for entry in gate_entries(layer, d_model, d_ff)]
    return encode_header(tensors, {**PREDICTOR_METADATA, "model_sha256": model_sha256, **metadata})


def relu_header(
    layers: int, factors: Iterable[tuple[str, str, tuple[int, ...]]], encodings: Mapping[str, str], model_sha256: str
) -> bytes:
    """Header of a file of rule 6: thresholds, then `factors`, (name, dtype, shape) of each."""
    thresholds = [(f"layers.{layer}.threshold", "F32", (1,)) for layer in range(layers)]
    metadata = {**PREDICTOR_METADATA, "model_sha256": model_sha256, **RELU_RULE, "encodings": json.dumps(encodings)}
    return encode_header([*thresholds, *factors], metadata)


def relu_encodings(header: SafetensorsHeader) -> dict[str, str] | None:
    """The encodings of factors by name, of a file of rule 6; None of any other file. FormatError where damaged."""
    if header.metadata.get("rule") != RELU_RULE["rule"]:
        return None
    try:
        value = json.loads(header.metadata.get("encodings", ""))
    except ValueError as error:
        raise FormatError(f"{header.path}: the encodings of its factors are damaged") from error
    if not isinstance(value, dict) or not all(encoding in PACKED_AS for encoding in value.values()):
        raise FormatError(f"{header.path}: the encodings of its factors are damaged")
    return value


def _check_relu(header: SafetensorsHeader, layouts: Sequence[RowLayout], encodings: Mapping[str, str]) -> list[int]:
    """As `check_predictors_header`, of rule 6."""
    ranks, known = [], set()
    for layer, layout in enumerate(layouts):
        start = f"layers.{layer}."
        first = header.tensors.get(f"{start}a")
        rank = first.shape[0] if first is not None and len(first.shape) == 2 else 0
        if rank <= 0:
            raise FormatError(f"{header.path}: {start}a must be [rank, {layout.d_model}] with a rank from 1")
        for name, rows, columns in ((f"{start}a", rank, layout.d_model), (f"{start}b", layout.d_ff, rank)):
            if name in encodings:
                header.expect(name, "U8", (rows, PACKED_AS[encodings[name]].vector_nbytes(columns)))
            else:
                info = header.tensors.get(name)
                wide = info is not None and info.dtype == "F32"
                header.expect(name, "F32" if wide else "F16", (rows, columns))
        header.expect(f"{start}threshold", "F32", (1,))
        known |= {f"{start}{part}" for part in ("a", "b", "threshold")}
        ranks.append(rank)
    _check_no_others(header, known, len(layouts))
    return ranks


def margin_above(value: float) -> NDArray[np.float16]:
    """[1]: the least margin a file can hold that is not below `value`."""
    stored = np.array([min(value, 65504.0)], np.float16)
    return np.where(stored.astype(np.float64) < value, np.nextafter(stored, np.float16(np.inf)), stored).astype("<f2")


def predictors_header(
    rank: int, widths: Sequence[int], d_model: int, model_sha256: str, metadata: Mapping[str, str]
) -> bytes:
    """Header of a 16-bit file with one predictor of this rank a layer, in our own writer's fixed order.

    Its length does not depend on `model_sha256`.
    """
    tensors = [
        entry
        for layer, d_ff in enumerate(widths)
        if d_ff
        for entry in predictor_entries(f"layers.{layer}.", rank, d_model, d_ff, 16)
    ]
    return encode_header(tensors, {**PREDICTOR_METADATA, "model_sha256": model_sha256, **metadata})


def predictor_bytes(
    a: NDArray[np.float32], b: NDArray[np.float32], bias: NDArray[np.float32], threshold: float
) -> Iterator[NDArray[np.uint8]]:
    """A layer's arrays as a 16-bit file stores them, in the order of `predictors_header`."""
    for array in (a.astype("<f2"), b.astype("<f2"), bias.astype("<f4"), np.array([threshold], "<f4")):
        yield array.reshape(-1).view(np.uint8)


def check_predictors_header(header: SafetensorsHeader, layouts: Sequence[RowLayout], model_sha256: str) -> list[int]:
    """The ranks by layer, 0 where it is the gate in 4 bits, or there are no neurons. FormatError for predictors of
    another model, or other tensors or shapes than theirs."""
    metadata = header.metadata
    if any(metadata.get(key) != value for key, value in PREDICTOR_METADATA.items()):
        raise FormatError(f"{header.path}: is not a predictor file of version {PREDICTOR_METADATA['version']}")
    if metadata.get("model_sha256") != model_sha256:
        raise FormatError(f"{header.path}: these predictors were trained for another model; train them for this one")
    if any(name.endswith(".a_scale") for name in header.tensors):
        raise FormatError(
            f"{header.path}: these predictors are stored as an older flashllm did; convert the model again and train "
            "new ones"
        )
    encodings = relu_encodings(header)
    if encodings is not None:
        return _check_relu(header, layouts, encodings)
    ranks = []
    known: set[str] = set()
    for layer, layout in enumerate(layouts):
        if not layout.d_ff:
            ranks.append(0)
            continue
        for kind in ("", PREFETCH):
            if not kind and f"layers.{layer}.gate" in header.tensors and "gate" in layout.matrices:
                for entry in gate_entries(layer, layout.d_model, layout.d_ff):
                    header.expect(*entry)
                    known.add(entry[0])
                ranks.append(0)
                continue
            start = f"layers.{layer}.{kind}"
            first = header.tensors.get(f"{start}a")
            if kind and (first is None or layer == 0):
                continue
            rank = first.shape[0] if first is not None and len(first.shape) == 2 else 0
            if not 0 < rank <= layout.d_model:
                raise FormatError(f"{header.path}: {start}a must be [rank, {layout.d_model}] with a rank from 1")
            bits = next((bits for bits, dtype in _DTYPES.items() if first is not None and first.dtype == dtype), 16)
            for entry in predictor_entries(start, rank, layout.d_model, layout.d_ff, bits):
                header.expect(*entry)
                known.add(entry[0])
            if not kind:
                ranks.append(rank)
    _check_no_others(header, known, len(layouts))
    return ranks


def predictor_entries(
    start: str, rank: int, d_model: int, d_ff: int, bits: int
) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of one predictor's tensors, whose names begin with `start`."""
    dtype, code = _DTYPES[bits], FACTOR_CODES.get(bits)
    columns = [code.vector_nbytes(n) if code else n for n in (d_model, rank)]
    return [
        (f"{start}a", dtype, (rank, columns[0])),
        (f"{start}b", dtype, (d_ff, columns[1])),
        (f"{start}bias", "F32", (d_ff,)),
        (f"{start}threshold", "F32", (1,)),
    ]


def _check_no_others(header: SafetensorsHeader, known: set[str], layers: int) -> None:
    """That nothing but the `known` tensors is there, and every element where its size divides its offset."""
    for info in header.tensors.values():
        if info.offset % info.itemsize:
            raise FormatError(f"{header.path}: {info.name} starts at {info.offset}, no multiple of its element's size")
    if set(header.tensors) != known:
        raise FormatError(f"{header.path}: holds tensors that belong to no predictor of {layers} layers")
