"""Opens whatever a checkpoint is: a Hugging Face folder, or a GGUF file."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from flashllm.arch.llama.bitnet import MODEL_TYPE as BITNET
from flashllm.arch.registry import resolve
from flashllm.base.dtypes import WEIGHT_DTYPE_BY_CODE
from flashllm.convert.checkpoint.folder import open_folder
from flashllm.convert.checkpoint.fp8 import widened
from flashllm.convert.checkpoint.gguf.config import model_config
from flashllm.convert.checkpoint.gguf.file import SUFFIX, GgufContent, open_gguf
from flashllm.convert.checkpoint.gguf.tensors import assumed_line, model_of, named_tensors
from flashllm.convert.checkpoint.gguf.tokenizer import read_vocabulary, special_ids, tokenizer_files
from flashllm.convert.checkpoint.mixtures.gpt_oss import GPT_OSS, apart
from flashllm.convert.checkpoint.mixtures.stacked import unstacked
from flashllm.convert.checkpoint.source import Checkpoint
from flashllm.convert.checkpoint.ternary import ternary
from flashllm.convert.checkpoint.text_part import text_part
from flashllm.convert.kept.predictors import own_predictors
from flashllm.errors import FormatError, UnsupportedModelError, UsageError
from flashllm.format.model_files import CONFIG

_OF_CODES = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".SCB", ".quant_map")
_AROUND_ZERO = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # models trained so that their norms' weights are
QUANTISED_DTYPE = "float16"  # of a conversion of quantised weights


@contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """The checkpoint that `path` is, validated; errors as in `open_folder` and `open_gguf`.

    UsageError where it is nothing known, UnsupportedModelError for a folder whose weights are quantised.
    """
    path = Path(path)
    if path.is_dir():
        with open_folder(path) as folder:
            checkpoint = widened(folder)
            _check_whole(checkpoint)
            text = text_part(checkpoint)
            _check_norms(text)
            yield ternary(unstacked(apart(text)))
    elif path.is_file() and path.suffix.lower() == SUFFIX:
        with ExitStack() as stack:
            yield _gguf_checkpoint(open_gguf(path, stack))
    elif path.exists():
        raise UsageError(f"{path}: is neither a Hugging Face folder nor a GGUF file")
    else:
        raise UsageError(f"{path}: there is no such directory")


def identity(path: Path) -> list[list[object]]:
    """A list that another checkpoint, or one whose files change, has other values of. Errors as `open_checkpoint`."""
    with open_checkpoint(path) as checkpoint:
        return checkpoint.identity()


def _check_whole(checkpoint: Checkpoint) -> None:
    """UnsupportedModelError for a folder of codes: AWQ, GPTQ, bitsandbytes, other FP8. What the config does not say,
    the tensors do."""
    model_type = checkpoint.config.get("model_type")
    said = checkpoint.config.get("quantization_config") or checkpoint.config.get("compression_config")
    method = said.get("quant_method") if isinstance(said, dict) else said
    if (method, model_type) in (("mxfp4", GPT_OSS), ("bitnet", BITNET)):
        return
    what = None if method is None else str(method)[:80]
    if what is None and model_type != BITNET:
        what = next((name for name in checkpoint.tensors if name.endswith(_OF_CODES)), None)
    if what is None:
        what = next((info.dtype for info in checkpoint.tensors.values() if info.dtype.startswith("F8")), None)
    if what is not None:
        raise UnsupportedModelError(
            f"{checkpoint.path}: its weights are in codes ({what}), which are not read; give the model that it was "
            "made from, or a GGUF file of it, whose bits are kept"
        )


def _check_norms(checkpoint: Checkpoint) -> None:
    """UnsupportedModelError for one whose norms have 1 added, as MLX writes them: with another 1 it would speak
    nonsense."""
    if checkpoint.config.get("model_type") not in _AROUND_ZERO:
        return
    norms = [
        checkpoint.floats(name, 0, info.shape[0])
        for name, info in checkpoint.tensors.items()
        if name.endswith(".input_layernorm.weight") and info.dtype in WEIGHT_DTYPE_BY_CODE and len(info.shape) == 1
    ]
    if norms and np.median(np.concatenate(norms)) > 0.5:  # not the mean: a few weights may be large
        raise UnsupportedModelError(
            f"{checkpoint.path}: its norms' weights are around 1, where {checkpoint.config['model_type']} has them "
            "around 0: 1 was added to them, as MLX does; give the model that it was made from"
        )


def _gguf_checkpoint(content: GgufContent) -> Checkpoint:
    config = model_config(content)
    tokens = read_vocabulary(content.metadata)
    config |= special_ids(content.metadata, len(tokens) or config["vocab_size"])
    try:
        resolve(config)
    except (FormatError, UnsupportedModelError) as error:
        said = str(error).removeprefix("config.json: ")
        raise type(error)(f"{content.path}: what its metadata says makes no model: {said}") from error
    if len(tokens) > config["vocab_size"]:
        raise FormatError(
            f"{content.path}: damaged: {len(tokens)} tokens, but an embedding of {config['vocab_size']}; get it again"
        )
    files, left_out = named_tensors(content, config)
    text = {CONFIG: json.dumps(config, indent=1).encode(), **tokenizer_files(content.metadata, tokens, content.path)}
    return Checkpoint(
        path=content.path,
        config=config,
        tensors={name: tensor.info(name) for name, tensor in files.items()},
        made=text,
        preferred_dtype=_dtype(content),
        quantised={name: tensor for name, tensor in files.items() if tensor.is_quantised},
        predictors=own_predictors(content, config["num_hidden_layers"]) if content.sparse else None,
        assumed=left_out or assumed_line(content),
        _files=files,
    )


def _dtype(content: GgufContent) -> str:
    """The dtype that holds the file's matrices as they are; QUANTISED_DTYPE where none does."""
    kinds = {stored.kind for stored in content.tensors.values() if len(stored.shape) > 1} - {"F32"}
    whole = {(): "float32", ("F16",): "float16", ("BF16",): "bfloat16"}.get(tuple(kinds))
    return whole or model_of(content).dtype or QUANTISED_DTYPE
