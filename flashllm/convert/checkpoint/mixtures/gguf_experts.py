"""The experts of a GGUF file: tensors that hold all of a layer, [experts, rows, columns], cut into one for each.

Before April 2024 llama.cpp wrote a tensor for each expert. Knows no metadata; the architecture's table has the names.
"""

import dataclasses
from collections.abc import Mapping

from flashllm.arch.tensors import ArchitectureSpec
from flashllm.convert.checkpoint.gguf.file import StoredTensor
from flashllm.errors import FormatError


def experts_apart(
    stored: Mapping[str, StoredTensor], spec: ArchitectureSpec, layers: int, experts: int
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """(state_dict name -> tensor of an expert's matrix, the file's other tensors by their names).

    FormatError for a tensor that does not hold as many experts.
    """
    left = dict(stored)
    found: dict[str, StoredTensor] = {}
    for layer in range(layers):
        fused = left.pop(f"blk.{layer}.ffn_gate_up_exps.weight", None)  # of each expert, gate first
        if fused is not None:
            halves = cut_apart(fused, experts, 2)
            for first, matrix in enumerate(("gate", "up")):
                names = [spec.matrices[matrix].format(i=layer, e=expert) for expert in range(experts)]
                found |= zip(names, halves[first::2], strict=True)
        for matrix, pattern in spec.matrices.items():
            names = [pattern.format(i=layer, e=expert) for expert in range(experts)]
            whole = left.pop(f"blk.{layer}.ffn_{matrix}_exps.weight", None)
            if whole is not None:
                found |= zip(names, cut_apart(whole, experts), strict=True)
                continue
            for expert, name in enumerate(names):
                if (single := left.pop(f"blk.{layer}.ffn_{matrix}.{expert}.weight", None)) is not None:
                    found[name] = single
    return found, left


def cut_apart(whole: StoredTensor, experts: int, parts: int = 1) -> list[StoredTensor]:
    """The matrices of a tensor that has of each expert so many, one behind the other."""
    if len(whole.shape) != 3 or whole.shape[0] != experts or whole.shape[1] % parts:
        raise FormatError(f"{whole.path}: a tensor of experts is {list(whole.shape)}, though there are {experts}")
    nbytes, shape = whole.nbytes // (experts * parts), (whole.shape[1] // parts, whole.shape[2])
    scales = whole.scales * experts if len(whole.scales) == 1 else whole.scales
    return [
        dataclasses.replace(
            whole, shape=shape, offset=whole.offset + at * nbytes, nbytes=nbytes, scales=(scales[at // parts],)
        )
        for at in range(experts * parts)
    ]
