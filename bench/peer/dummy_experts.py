"""A GGUF file of a mixture of experts' shape with dummy weights, for `peer_llama.py`: norms and routers in fp32, the
rest in bf16, or as gpt-oss's files have it: experts in MXFP4, other matrices in Q8_0.

llama.cpp routes by its router, so the locality of its routing is built into the embedding. Row t is a walk, row t =
memory * row t-1 + noise, and beside it a vector that all rows share; what attention and experts add is small, so that
every layer's router sees about that. Fed with ids 0, 1, 2 ..., a token goes to as many of the last token's experts, and
as often to the most frequent ones, as in the traces of tools/make_synthetic_experts.py: 40 and 37 % for OLMoE's shape
(theirs: 40 and 36), 35 and 30 % for Qwen3's (36 and 31), by simulation; 39 and 37 % for gpt-oss-20b's, of which there
is no trace.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONTEXT = 4096
SMALL = 0.02  # of what attention and experts add
POOL = 1 << 24  # random numbers, used again and again
BLOCK_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a mixture of experts, and how its embedding makes tokens stay with their experts."""

    architecture: str  # llama.cpp's name
    layers: int
    hidden: int
    ffn: int  # neurons of an expert
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    chosen: int
    vocab: int
    norms_of_heads: bool  # each head is normalized, or all of them together
    shared: float = 0.3  # of the embedding's variance: the vector that all rows have
    memory: float
    is_gpt_oss: bool = False


SHAPES = {
    "olmoe": Shape(
        architecture="olmoe", layers=16, hidden=2048, ffn=1024, heads=16, kv_heads=16, head_dim=128, experts=64,
        chosen=8, vocab=50304, norms_of_heads=False, memory=0.4,
    ),
    "qwen3-30b-a3b": Shape(
        architecture="qwen3moe", layers=48, hidden=2048, ffn=768, heads=32, kv_heads=4, head_dim=128, experts=128,
        chosen=8, vocab=151936, norms_of_heads=True, memory=0.5,
    ),
    "gpt-oss-20b": Shape(
        architecture="gpt-oss", layers=24, hidden=2880, ffn=2880, heads=64, kv_heads=8, head_dim=64, experts=32,
        chosen=4, vocab=201088, norms_of_heads=False, memory=0.4, is_gpt_oss=True,
    ),
}  # fmt: skip


def tensors(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor, in the order of the file."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = (shape.head_dim, shape.head_dim) if shape.norms_of_heads else (query, key)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (shape.hidden,),
        "attn_q": (query, shape.hidden),
        "attn_k": (key, shape.hidden),
        "attn_v": (key, shape.hidden),
        "attn_q_norm": (norms[0],),
        "attn_k_norm": (norms[1],),
        "attn_output": (shape.hidden, query),
        "ffn_norm": (shape.hidden,),
        "ffn_gate_inp": (shape.experts, shape.hidden),
        "ffn_gate_exps": (shape.experts, shape.ffn, shape.hidden),
        "ffn_up_exps": (shape.experts, shape.ffn, shape.hidden),
        "ffn_down_exps": (shape.experts, shape.hidden, shape.ffn),
    }
    biases: dict[str, tuple[int, ...]] = {}
    if shape.is_gpt_oss:
        del layer["attn_q_norm"], layer["attn_k_norm"]
        layer["post_attention_norm"] = layer.pop("ffn_norm")
        layer["attn_sinks"] = (shape.heads,)
        biases = {name: layer[name][:-1] for name in layer if "norm" not in name and name != "attn_sinks"}
    named = {f"{name}.weight": size for name, size in layer.items()} | {f"{n}.bias": size for n, size in biases.items()}
    layers = [(f"blk.{i}.{name}", size) for i in range(shape.layers) for name, size in named.items()]
    ends = [("output_norm.weight", (shape.hidden,)), ("output.weight", (shape.vocab, shape.hidden))]
    return [("token_embd.weight", (shape.vocab, shape.hidden)), *layers, *ends]


def is_wide(name: str, size: tuple[int, ...]) -> bool:
    """Whether the file has the tensor in fp32."""
    return len(size) == 1 or "ffn_gate_inp" in name or name.endswith(".bias")


def kind_of(shape: Shape, name: str, size: tuple[int, ...]) -> str:
    """ggml's name of how the tensor is stored."""
    if is_wide(name, size):
        return "F32"
    if not shape.is_gpt_oss:
        return "BF16"
    return "MXFP4" if "_exps" in name else "Q8_0"


def stored_nbytes(shape: Shape, name: str, size: tuple[int, ...]) -> int:
    """Bytes of a tensor in the file."""
    block, each = {"F32": (1, 4), "BF16": (1, 2), "Q8_0": (32, 34), "MXFP4": (32, 17)}[kind_of(shape, name, size)]
    return int(np.prod(size)) // block * each


def nbytes(shape: Shape) -> int:
    """Bytes of all tensors."""
    return sum(stored_nbytes(shape, name, size) for name, size in tensors(shape))


def embedding_walk(shape: Shape, random: np.random.Generator) -> Iterator[NDArray[np.float32]]:
    """Rows of the embedding, a block after the other."""
    common = random.standard_normal(shape.hidden, np.float32) * np.float32(shape.shared**0.5)
    row = random.standard_normal(shape.hidden, np.float32)
    fresh = np.float32((1 - shape.memory**2) ** 0.5)
    for first in range(0, shape.vocab, BLOCK_ROWS):
        block = random.standard_normal((min(BLOCK_ROWS, shape.vocab - first), shape.hidden), np.float32) * fresh
        for i in range(len(block)):
            row = block[i] = block[i] + np.float32(shape.memory) * row
        yield common + np.float32((1 - shape.shared) ** 0.5) * block


def make(path: Path, shape: Shape) -> None:
    """Write the model, a tensor in memory at a time."""
    import gguf

    random = np.random.default_rng(0)
    pool = random.standard_normal(POOL, np.float32)
    codes = random.integers(0, 256, (1 << 21, 17), np.uint8) if shape.is_gpt_oss else np.zeros((2, 17), np.uint8)

    def narrow(values: NDArray[np.float32]) -> NDArray[np.uint16]:
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    def data(name: str, size: tuple[int, ...]) -> NDArray[Any]:
        if name.endswith(".bias") or "sinks" in name:
            return np.zeros(size, np.float32)
        if len(size) == 1:
            return np.ones(size, np.float32)
        kind = kind_of(shape, name, size)
        if name == "token_embd.weight":
            store = narrow if kind == "BF16" else lambda block: gguf.quantize(block, gguf.GGMLQuantizationType[kind])
            return np.concatenate([store(block) for block in embedding_walk(shape, random)])
        if is_wide(name, size):
            return random.standard_normal(size, np.float32) * np.float32(size[-1] ** -0.5)
        scale = size[-1] ** -0.5 * (SMALL if "output.weight" in name or "down" in name else 1.0)
        start = int(random.integers(POOL))
        if kind == "MXFP4":  # random codes, whose root mean square is 2.9
            blocks = codes[start % (len(codes) // 2) :][: int(np.prod(size)) // 32 % (len(codes) // 2)].copy()
            blocks[:, 0] = 127 + round(np.log2(scale / 2.9))
            return np.resize(blocks, (*size[:-1], size[-1] // 32 * 17))
        if kind == "Q8_0":
            rows = np.resize(np.roll(pool, start) * np.float32(scale), (min(size[0], 512), size[-1]))
            few = gguf.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
            return np.resize(few, (size[0], few.shape[1]))
        bits = narrow(np.roll(pool, start) * np.float32(scale))
        return np.resize(bits, size)

    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_block_count(shape.layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_expert_feed_forward_length(shape.ffn)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.chosen)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("no_vocab")
    if shape.is_gpt_oss:
        writer.add_sliding_window(128)
        writer.add_rope_freq_base(150000.0)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_MXFP4_MOE if shape.is_gpt_oss else gguf.LlamaFileType.MOSTLY_BF16)
    for name, size in tensors(shape):
        kind = gguf.GGMLQuantizationType[kind_of(shape, name, size)]
        count = stored_nbytes(shape, name, size)
        writer.add_tensor_info(name, size, np.dtype(np.float32), count, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, size in tensors(shape):
        writer.write_tensor_data(data(name, size))
    writer.close()
