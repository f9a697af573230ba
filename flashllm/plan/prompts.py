"""How prompts may go through a model, and the memory each way takes that a few tokens do not. Plain arithmetic."""

from dataclasses import dataclass

from flashllm.arch.spec import BlockSpec
from flashllm.format.manifest import Manifest

_READ_AHEAD = 6  # streaming blocks in flight while one is used: they last through a layer's attention (bench/log)
# Where memory is short for neurons: fewer blocks in flight, then prompts in shorter parts, which take longer for each
# token: their weights are decoded more often (bench/log, "Forty megabytes more for neurons").
_LEAST_AHEAD, _SHORT_PART = 3, 128
_COLUMN_PADS = 32  # floats: two kColumnPad (csrc/kernels/matmul.h)


@dataclass(frozen=True, slots=True)
class PromptShape:
    """How a prompt goes through the model, and the bytes that takes and a few tokens do not."""

    tokens: int  # of a part
    ahead: int  # streaming blocks in flight
    staging: int
    workspace: int

    @property
    def nbytes(self) -> int:
        return self.staging + self.workspace


def prompt_shapes(manifest: Manifest, block: BlockSpec, context: int, *, dense: bool) -> list[PromptShape]:
    """Possible shapes, the fastest first. Where every token streams rows, reading ahead is worth its memory; a part
    of a prompt reads every expert that one of its tokens goes to."""
    longest = manifest.prefill_block_tokens
    choices = [(longest, _READ_AHEAD)]
    if not dense:
        choices.append((longest, _LEAST_AHEAD))
        if not manifest.architecture.experts and longest > _SHORT_PART:
            choices.append((_SHORT_PART, _LEAST_AHEAD))
    block_nbytes = manifest.stream_block_rows * manifest.rows.stride
    return [
        PromptShape(tokens, ahead, (1 + ahead) * block_nbytes, min(context, tokens) * _token_nbytes(manifest, block))
        for tokens, ahead in choices
    ]


def _token_nbytes(manifest: Manifest, block: BlockSpec) -> int:
    """Activations of one token of a prompt, and its products with a block of rows ("Scratch of a part" in
    csrc/model/model.h and block_attention.h; csrc/model/arithmetic.h; csrc/ffn/dense_ffn.cpp)."""
    # States, their norm, and what is added to them; queries and mixed values, keys and values; the inputs of
    # products, packed; conversions to the dtype and back.
    floats = (4 if block.parallel else 3) * block.d_model + 2 * (block.query_dim + block.kv_dim)
    floats += max(block.query_dim, block.embed_dim) + 2 * max(block.d_model, block.query_dim)
    floats += 2 * block.d_model + _COLUMN_PADS  # of the FFN: packed inputs, and sums
    floats += 2 * block.embed_dim if block.embed_dim != block.d_model else 0
    floats += (len(manifest.architecture.matrices) - 1) * manifest.stream_block_rows
    if manifest.architecture.experts:
        floats += 2 * block.d_model  # an expert's tokens, and their sums
    if block.sub_norms:  # every neuron's value, in a prompt's pass and in one of few tokens a sequence
        floats += 2 * max(manifest.architecture.every_width)
    return 4 * floats
