"""How prompts may go through a model, and the memory each way takes that a few tokens do not. Plain arithmetic."""

from dataclasses import dataclass
from typing import Self

from flashllm.arch.mixers import Attention
from flashllm.arch.spec import BlockSpec
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.format.manifest import Manifest

_READ_AHEAD = 6  # streaming blocks in flight while one is used: they last through a layer's attention (bench/log)
# Where memory is short for neurons: fewer blocks in flight, then prompts in shorter parts, which take longer for each
# token: their weights are decoded more often (bench/log, "Forty megabytes more for neurons").
_LEAST_AHEAD, _SHORT_PART = 3, 128
COLUMN_PADS = 32  # floats: two kColumnPad (csrc/kernels/packed_tokens.h)


@dataclass(frozen=True, slots=True)
class PromptShape:
    """How a prompt goes through the model, and the bytes that takes and a few tokens do not."""

    tokens: int  # of a part
    ahead: int  # streaming blocks in flight
    staging: int
    workspace: int
    stretch_nbytes: int  # of a token: as much of a longer stretch comes out of the neuron caches while it is computed

    @property
    def nbytes(self) -> int:
        return self.staging + self.workspace


def prompt_shapes(manifest: Manifest, block: BlockSpec, context: int, *, dense: bool) -> list[PromptShape]:
    """Possible shapes, the fastest first. Where every token streams rows, reading ahead is worth its memory; a part
    of a prompt multiplies every expert that one of its tokens goes to."""
    longest = manifest.prefill_block_tokens
    choices = [(longest, _READ_AHEAD)]
    if not dense:
        choices.append((longest, _LEAST_AHEAD))
        if not manifest.architecture.experts and longest > _SHORT_PART:
            choices.append((_SHORT_PART, _LEAST_AHEAD))
    block_nbytes = manifest.stream_block_rows * manifest.rows.stride
    of_part, of_stretch = _part_nbytes(manifest, block), _stretch_nbytes(manifest, block)
    return [
        PromptShape(
            tokens,
            ahead,
            staging=(1 + ahead) * block_nbytes,
            workspace=min(context, tokens) * (of_part + of_stretch),
            stretch_nbytes=of_stretch,
        )
        for tokens, ahead in choices
    ]


def _part_nbytes(manifest: Manifest, block: BlockSpec) -> int:
    """Scratch for a token of a part, and its products with a block of rows (csrc/model/layer.h, block_attention.h,
    latent_attention.h, arithmetic.h; csrc/ffn/dense_ffn.h)."""
    # The states' norm, and what is added to them; queries and mixed values, keys and values; the inputs of products,
    # packed; conversions to the dtype and back.
    floats = 2 * block.d_model + 2 * (block.query_dim + block.kv_dim)
    floats += max(block.query_dim, block.embed_dim) + 2 * max(block.d_model, block.query_dim)
    floats += block.query_dim if any(mixer.gate != "none" for mixer in block.attentions) else 0
    # Of a state: what is convolved and what comes of it, gates, mixed values.
    rules = [2 * mixer.channels + 4 * mixer.mixed_dim + 2 * mixer.value_heads for mixer in block.recurrent]
    floats += max(rules, default=0)
    floats += block.d_model if any(layer.second is not None for layer in block.layers) else 0
    # Latent attention's queries as they are projected, with what lies between, and the heads' outputs.
    floats += max(map(_latent_floats, block.attentions), default=0)
    floats += block.token_row  # of per-layer embeddings, as they are projected
    floats += max(2 * layer.beside for layer in block.layers)
    floats += 2 * block.embed_dim if block.embed_dim != block.d_model else 0
    floats += (len(manifest.architecture.matrices) - 1) * manifest.stream_block_rows
    if manifest.planes:  # the values again as codes of 16 bits, 32 of which have a scale and a sum (TokenCodes)
        floats += -(-9 * manifest.stream_block_rows // 16)
    if manifest.architecture.experts:  # an expert's tokens, as they are gathered and packed, and their sums
        floats += 3 * block.d_model + COLUMN_PADS
    floats += block.waiting  # in a pass of few tokens a sequence
    if block.streams:  # what is added to each, and of the maps around the mixer
        floats += (block.streams + 1) * block.d_model + block.laurel
    return 4 * floats


def _latent_floats(mixer: Attention) -> int:
    if mixer.latent is None:
        return 0
    rank, plain, value = mixer.latent.rank, mixer.latent.plain_dim, mixer.latent.value_dim
    of_head = 2 * (rank + max(plain, value))  # a head's, with the packed
    # Of a position that is expanded: its row, its inputs, and what comes of them, in the dtype.
    expanded = mixer.head_dim + rank + mixer.heads * max(plain, value)
    return mixer.projected_dim + (mixer.latent.query_rank or 0) + mixer.mixed_dim + of_head + expanded


@dataclass(frozen=True, slots=True)
class Expansion:
    """Bytes of what prompts make of latent attention's rows (csrc/model/latent_attention.h), of the layer that has
    most; 0 where there is none."""

    heads: int = 0  # at most
    head_nbytes: int = 0  # of a head's key and value of a position
    fixed_nbytes: int = 0  # of the matrices that make keys

    @classmethod
    def of(cls, manifest: Manifest, block: BlockSpec) -> Self:
        """That of a model."""
        item = WEIGHT_DTYPES[manifest.dtype].itemsize
        made = [
            cls(
                mixer.heads,
                item * (mixer.latent.plain_dim + mixer.rotated_dim + mixer.latent.value_dim),
                item * mixer.heads * mixer.latent.plain_dim * mixer.latent.rank,
            )
            for mixer in block.attentions
            if mixer.latent is not None
        ]
        return max(made, key=lambda each: each.heads * each.head_nbytes, default=cls())


def _stretch_nbytes(manifest: Manifest, block: BlockSpec) -> int:
    """Bytes kept of a token while a stretch goes through the layers (csrc/model/model.h, csrc/ffn/dense_ffn.h,
    expert_ffn.h)."""
    experts = block.experts
    # Packed inputs of the FFN, and sums; where values wait for each other, these.
    dense = 2 * block.d_model + COLUMN_PADS + block.waiting
    # Inputs and sums of a mixture, and its experts' weights. Of experts whose rows come in several blocks, all tokens
    # that go to one wait for the last.
    mixture = 0
    if experts is not None:
        mixture = 2 * block.d_model + 4 * (experts.chosen + 1)
        if max(experts.size, experts.shared) > manifest.stream_block_rows:
            mixture += 2 * block.d_model + COLUMN_PADS
    floats = block.state_width + (block.d_model if any(layer.parallel for layer in block.layers) else 0)
    floats += block.token_row
    floats += sum(
        each.dims
        for each in {layer.mixer.rotary for layer in block.layers if layer.mixer is not None}
        if each is not None
    )
    return 4 * (floats + max(dense, mixture))
