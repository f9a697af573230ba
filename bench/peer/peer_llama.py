"""Dummy models as GGUF files: Llama-2-7B's shape and mixtures of experts, for `flashllm bench --beside llama.cpp`.

    pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36 gguf   # built for this CPU
    python bench/peer/peer_llama.py make llama-7b-f16.gguf
    python bench/peer/peer_llama.py quantise llama-7b-f16.gguf llama-7b-q4_0.gguf
    python bench/peer/peer_llama.py make olmoe.gguf --shape olmoe
    python bench/peer/peer_llama.py quantise olmoe.gguf olmoe-q4_k_m.gguf --type q4_k_m
    flashllm bench olmoe-q4_k_m.gguf --memory 2.4GB --report olmoe.md --beside llama.cpp

The weights are dummies (13.5 GB; the text means nothing, so tokens go in as ids 0, 1, 2 ..., by which the router of the
mixtures moves as a real one's); sizes, reads and times are real.
"""

import argparse
import ctypes
import dataclasses
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import dummy_experts
import numpy as np

from flashllm.base.units import format_size

LAYERS, HIDDEN, FFN, HEADS, VOCAB, CONTEXT = 32, 4096, 11008, 32, 32000, 4096  # Llama-2-7B
SLACK_NBYTES = 1 << 30  # beside the weights: KV cache, buffers, interpreter


def tensors(layer_count: int) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor, in the order of the file. One-dimensional ones are fp32, the others fp16."""
    layer = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (HIDDEN, HIDDEN),
        "attn_v": (HIDDEN, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }
    layers = [(f"blk.{i}.{name}.weight", shape) for i in range(layer_count) for name, shape in layer.items()]
    ends = [("output_norm.weight", (HIDDEN,)), ("output.weight", (VOCAB, HIDDEN))]
    return [("token_embd.weight", (VOCAB, HIDDEN)), *layers, *ends]


def make_experts(path: Path, shape: dummy_experts.Shape) -> None:
    """Write a mixture of experts of this shape."""
    total = dummy_experts.nbytes(shape)
    if shutil.disk_usage(path.parent).free < total + SLACK_NBYTES:
        raise OSError(f"{path}: {format_size(total)} do not fit on this drive")
    dummy_experts.make(path, shape)


def make(path: Path, layers: int = LAYERS) -> None:
    """Write the model, a tensor in memory at a time; with fewer `layers` for measurements that are scaled."""
    import gguf

    def data(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return np.ones(shape, np.float32) if len(shape) == 1 else random[: shape[0] * shape[1]].reshape(shape)

    largest = max(np.prod(shape) for _, shape in tensors(layers))
    random = (np.random.default_rng(0).standard_normal(largest, dtype=np.float32) * HIDDEN**-0.5).astype(np.float16)
    total = sum(data(shape).nbytes for _, shape in tensors(layers))
    if shutil.disk_usage(path.parent).free < total + SLACK_NBYTES:
        raise OSError(f"{path}: {format_size(total)} do not fit on this drive")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for name, shape in tensors(layers):
        dtype = np.dtype(np.float32 if len(shape) == 1 else np.float16)
        writer.add_tensor_info(name, shape, dtype, data(shape).nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in tensors(layers):
        print(name, file=sys.stderr)
        writer.write_tensor_data(data(shape))
    writer.close()


def quantise(path: Path, out: Path, kind: str) -> None:
    """The model in fewer bits, by llama.cpp's own quantiser."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    if llama_cpp.llama_model_quantize(os.fsencode(path), os.fsencode(out), ctypes.byref(params)):
        raise OSError(f"{path}: llama.cpp cannot quantise it")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    maker = verbs.add_parser("make", help="write the dummy model")
    maker.add_argument("model", type=Path)
    maker.add_argument("--shape", choices=("llama-2-7b", *dummy_experts.SHAPES), default="llama-2-7b")
    maker.add_argument("--layers", type=int, help="fewer than the shape has")
    maker.add_argument("--vocab", type=int, help="of a mixture of experts: another than the shape has")
    quantiser = verbs.add_parser("quantise", help="write a model in fewer bits")
    quantiser.add_argument("model", type=Path)
    quantiser.add_argument("out", type=Path)
    quantiser.add_argument("--type", choices=("q4_0", "q4_k_m", "q8_0"), default="q4_0", help="default: q4_0")
    args = parser.parse_args(argv)
    try:
        if args.verb == "make":
            if args.shape == "llama-2-7b":
                make(args.model, args.layers or LAYERS)
                return 0
            shape = dummy_experts.SHAPES[args.shape]
            changed = {"layers": args.layers or shape.layers, "vocab": args.vocab or shape.vocab}
            make_experts(args.model, dataclasses.replace(shape, **changed))
            return 0
        quantise(args.model, args.out, args.type)
        return 0
    except ImportError as error:
        print(f"peer_llama: {error}; pip install llama-cpp-python==0.3.36 gguf", file=sys.stderr)
    except OSError as error:
        print(f"peer_llama: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
