"""Convert to 8 or 4 bits with codes chosen on a text: a layer at a time, each seeing what coded ones before it give.

Only the matrices of the layers are calibrated; embedding and head are rounded to the nearest codes. Memory: a layer,
the states of the calibrating tokens, and for sums x xᵀ and their inverse 28 bytes times SPAN squared.
"""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.registry import block_spec
from flashllm.base.dtypes import WEIGHT_DTYPE_BY_CODE, cast
from flashllm.base.files import Progress, read_bounded
from flashllm.base.group_codes import GROUP_CODES, Bytes, Floats, GroupCode
from flashllm.base.machine import num_cores
from flashllm.convert.checkpoint.opened import identity, open_checkpoint
from flashllm.convert.choices import Choices
from flashllm.convert.hub import Say
from flashllm.convert.run import check_destination, convert
from flashllm.convert.tokenizer import MAX_NBYTES, TOKENIZER, make_tokenizer, parse_tokenizer
from flashllm.errors import UsageError
from flashllm.format.manifest import Manifest
from flashllm.offload.runtime.tiers.source import WeightSource, matrix_name, open_weights
from flashllm.pack.codes import Codes, CodesFolder
from flashllm.pack.feedback import code_columns, code_rows
from flashllm.pack.layers import NEAREST, Calibration, Layer, Sums
from flashllm.pack.score import Windows, read_text, windows_of

WINDOW = 256  # tokens of a calibrating sequence
MAX_TOKENS = 12_288  # of the text that are used
SPAN = 4096  # inputs of a matrix whose errors make up for each other
_FFN = ("up", "gate", "down")
_FLOAT32 = WEIGHT_DTYPE_BY_CODE["F32"]


def convert_calibrated(
    src: Path,
    dst: Path,
    text: Path,
    *,
    source_name: str | None = None,
    threads: int | None = None,
    say: Say | None = None,
    progress: Progress | None = None,
    calibrating: Progress | None = None,
    **choices: Unpack[Choices],
) -> Manifest:
    """Convert `src` into the new model directory `dst` with codes chosen on `text`; otherwise as `convert`.

    Codes are kept in `dst`.codes until the model is whole: an interrupted run leaves them, and the next one goes on.
    UsageError where neither the rows nor the resident matrices are of 8 or 4 bits, or the text is too short.
    """
    dst = Path(os.path.abspath(dst))
    encodings = [choices.get("encoding"), choices.get("resident_encoding")]
    codes = {name: GROUP_CODES.get(chosen or "") for name, chosen in zip(("rows", "out"), encodings, strict=True)}
    if not any(codes.values()):
        raise UsageError("--calibrate chooses codes of 8 or 4 bits: give --bits or --resident-bits")
    check_destination(dst)
    sequences = calibration_tokens(src, read_text(text))
    record = {
        "source": identity(src),
        "tokens": hashlib.sha256(np.asarray(sequences, np.int64).tobytes()).hexdigest(),
        "encodings": encodings,
    }
    folder = CodesFolder(dst.with_name(dst.name + ".codes"), record)
    with open_weights(src) as source:
        calibration = Calibration(source, sequences, threads=threads or num_cores(), span=SPAN)
        plain = experts = 0
        for number in range(source.num_layers):
            layer = calibration.read(number)
            coded = folder.layer(number)
            if coded is None:
                coded = _code_layer(calibration, layer, number, codes)
                folder.write(number, coded)
            else:
                _apply(source, layer, number, coded, codes)
            plain += len(coded.get(_plain(number), ()))
            experts += len(layer.bundles) if number in source.architecture.mixtures else 0
            calibration.advance(layer)
            if calibrating is not None:
                calibrating(text.name, number + 1, source.num_layers)
        del calibration
    if plain and say is not None:
        say(f"{plain} of {experts} experts see fewer tokens of {text.name} than a matrix of theirs has inputs: rounded")
    wanted: Choices = {**choices, "coded": folder}
    manifest = convert(src, dst, source_name=source_name, say=say, progress=progress, **wanted)
    shutil.rmtree(folder.path)
    return manifest


def calibration_tokens(src: Path, text: str) -> Windows:
    """Windows of the text's tokens, by the tokenizer of the checkpoint `src`.

    UsageError for a model without a tokenizer, or a text of too few tokens.
    """
    with open_checkpoint(src) as checkpoint:
        raw, context = checkpoint.made.get(TOKENIZER), block_spec(checkpoint.config).context
        companions = tuple(checkpoint.companions)
        for path in companions:
            if path.name == TOKENIZER:
                raw = read_bounded(path, MAX_NBYTES)
        if raw is None:
            raw = make_tokenizer(checkpoint.path, companions)
    if raw is None:
        raise UsageError(f"{src}: has no tokenizer, so no text can calibrate it")
    ids = parse_tokenizer(raw, src).encode(text, add_special_tokens=False).ids[:MAX_TOKENS]
    return windows_of(ids, context, WINDOW)


def _code_layer(calibration: Calibration, layer: Layer, number: int, codes: dict[str, GroupCode | None]) -> Codes:
    """The layer's codes; its matrices become what they stand for."""
    coded: Codes = {}
    plain: set[str] = set()

    def rounder(name: str, values: Floats, sums: Sums | None) -> Floats:
        bundle, _, matrix = name.rpartition(".")
        code = codes["rows" if matrix in _FFN else "out"]
        if code is None:
            return values
        if sums is None:
            plain.add(bundle)
        coded[matrix_name(number, name)], rounded = code_matrix(matrix, values, sums, code)
        return rounded

    calibration.round(layer, rounder)
    if plain:
        coded[_plain(number)] = np.ones(len(plain), np.uint8)
    return coded


def _plain(layer: int) -> str:
    """The name of what says how many of a layer's experts saw too few tokens: a byte for each."""
    return f"layers.{layer}.plain"


def code_matrix(matrix: str, values: Floats, sums: Sums | None, code: GroupCode) -> tuple[Bytes, Floats]:
    """Codes of a matrix [outputs, inputs] that takes inputs of these sums, and the weights they stand for. Without sums
    the codes are the nearest."""
    if matrix == "down":
        columns = np.ascontiguousarray(values.T)
        stored = code.encode(columns) if sums is None else code_columns(columns, sums, code)
        return stored, code.decode(stored, len(values)).T
    stored = code.encode(values) if sums is None or matrix in NEAREST else code_rows(values, sums, code)
    return stored, code.decode(stored, values.shape[1])


def _apply(source: WeightSource, layer: Layer, number: int, coded: Codes, codes: dict[str, GroupCode | None]) -> None:
    """Put the weights that codes stand for into a layer that has been read."""
    for bundle, name, array in layer.parts():
        stored, code = coded.get(matrix_name(number, bundle + name)), codes["rows" if name in _FFN else "out"]
        if stored is None or code is None:
            continue
        weights: NDArray[Any] = code.decode(stored, array.shape[0] if name == "down" else array.shape[1])
        array[...] = cast(weights.T if name == "down" else weights, _FLOAT32, source.dtype)
