"""The experts of a GGUF file: tensors that hold all of a layer, [experts, rows, columns], cut into one for each.

Before April 2024 llama.cpp wrote a tensor for each expert. Knows no metadata; the architecture's table has the names.
"""

import dataclasses
import math
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
        for matrix, pattern in spec.matrices.items():
            names = [pattern.format(i=layer, e=expert) for expert in range(experts)]
            whole = left.pop(f"blk.{layer}.ffn_{matrix}_exps.weight", None)
            if whole is not None:
                found |= zip(names, _cut(whole, experts), strict=True)
                continue
            for expert, name in enumerate(names):
                if (single := left.pop(f"blk.{layer}.ffn_{matrix}.{expert}.weight", None)) is not None:
                    found[name] = single
        for matrix in ("up", "gate"):  # one vector of all neurons' biases
            bias = left.get(name := f"blk.{layer}.ffn_{matrix}_exps.bias")
            if bias is not None:
                left[name] = dataclasses.replace(bias, shape=(math.prod(bias.shape),))
        gate = left.get(name := f"blk.{layer}.ffn_gate_inp_shexp.weight")
        if gate is not None and len(gate.shape) == 1:  # a row, of which the file drops the dimension
            left[name] = dataclasses.replace(gate, shape=(1, *gate.shape))
    return found, left


def _cut(whole: StoredTensor, experts: int) -> list[StoredTensor]:
    if len(whole.shape) != 3 or whole.shape[0] != experts:
        raise FormatError(f"{whole.path}: a tensor of experts is {list(whole.shape)}, though there are {experts}")
    nbytes = whole.nbytes // experts
    return [
        dataclasses.replace(whole, shape=whole.shape[1:], offset=whole.offset + expert * nbytes, nbytes=nbytes)
        for expert in range(experts)
    ]
