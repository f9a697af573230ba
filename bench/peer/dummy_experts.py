"""A GGUF file of a mixture of experts' shape with dummy weights, for `peer_llama.py`: bf16, norms and routers in fp32.

llama.cpp routes by its router, so the locality of its routing is built into the embedding. Row t is a walk, row t =
memory * row t-1 + noise, and beside it a vector that all rows share; what attention and experts add is small, so that
every layer's router sees about that. Fed with ids 0, 1, 2 ..., a token goes to as many of the last token's experts, and
as often to the most frequent ones, as in the traces of tools/make_synthetic_experts.py: 40 and 37 % for OLMoE's shape
(theirs: 40 and 36), 35 and 30 % for Qwen3's (36 and 31), by simulation.
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


SHAPES = {
    "olmoe": Shape(
        architecture="olmoe", layers=16, hidden=2048, ffn=1024, heads=16, kv_heads=16, head_dim=128, experts=64,
        chosen=8, vocab=50304, norms_of_heads=False, memory=0.4,
    ),
    "qwen3-30b-a3b": Shape(
        architecture="qwen3moe", layers=48, hidden=2048, ffn=768, heads=32, kv_heads=4, head_dim=128, experts=128,
        chosen=8, vocab=151936, norms_of_heads=True, memory=0.5,
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
    layers = [(f"blk.{i}.{name}.weight", size) for i in range(shape.layers) for name, size in layer.items()]
    ends = [("output_norm.weight", (shape.hidden,)), ("output.weight", (shape.vocab, shape.hidden))]
    return [("token_embd.weight", (shape.vocab, shape.hidden)), *layers, *ends]


def is_wide(name: str, size: tuple[int, ...]) -> bool:
    """Whether the file has the tensor in fp32."""
    return len(size) == 1 or "ffn_gate_inp" in name


def nbytes(shape: Shape) -> int:
    """Bytes of all tensors."""
    return sum(int(np.prod(size)) * (4 if is_wide(name, size) else 2) for name, size in tensors(shape))


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

    def narrow(values: NDArray[np.float32]) -> NDArray[np.uint16]:
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    def data(name: str, size: tuple[int, ...]) -> NDArray[Any]:
        if len(size) == 1:
            return np.ones(size, np.float32)
        if name == "token_embd.weight":
            return np.concatenate([narrow(block) for block in embedding_walk(shape, random)])
        if is_wide(name, size):
            return random.standard_normal(size, np.float32) * np.float32(size[-1] ** -0.5)
        scale = size[-1] ** -0.5 * (SMALL if "output.weight" in name or "down" in name else 1.0)
        start = int(random.integers(POOL))
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
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, size in tensors(shape):
        wide = is_wide(name, size)
        kind = gguf.GGMLQuantizationType.F32 if wide else gguf.GGMLQuantizationType.BF16
        count = int(np.prod(size)) * (4 if wide else 2)
        writer.add_tensor_info(name, size, np.dtype(np.float32), count, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, size in tensors(shape):
        writer.write_tensor_data(data(name, size))
    writer.close()
