"""A model directory written back as the Hugging Face folder that it could have come from. Knows no kernels.

flashllm convert smollm2 smol32 --bits 16 --dtype float32
python bench/quality/folders.py smol32 SMOLLM2_FP32
"""

import argparse
import shutil
from pathlib import Path

import numpy as np

from flashllm.arch.registry import claims
from flashllm.arch.tensors import Part
from flashllm.convert.checkpoint.source import companion_files
from flashllm.format.manifest import MANIFEST
from flashllm.format.safetensors import encode_header
from flashllm.offload.runtime.tiers.source import open_weights


def written_back(model: Path, out: Path) -> Path:
    """`out`, a new folder with the weights of the model directory `model` in its dtype.

    ValueError where the original had several matrices in a tensor, or transposed ones; else what `open_weights` raises.
    """
    out.mkdir()
    with open_weights(model) as source:
        wanted = {name: claim for name, claim in claims(source.config).items() if name in source.shapes}
        if any(claim.part != Part() for claim in wanted.values()):
            raise ValueError(f"{model}: its checkpoint's tensors are not one a matrix")
        tensors = [(claim.source, source.dtype.code, source.shapes[name]) for name, claim in wanted.items()]
        with (out / "model.safetensors").open("wb") as file:
            file.write(encode_header(tensors))
            for name in wanted:
                values = np.empty(source.shapes[name], source.dtype.storage)
                source.read({name: values})
                file.write(values.reshape(-1).view(np.uint8).data)
    for path in companion_files(model):
        if path.name != MANIFEST:
            shutil.copyfile(path, out / path.name)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path, help="a model directory")
    parser.add_argument("out", type=Path, help="the folder to make")
    args = parser.parse_args()
    print(written_back(args.model, args.out))


if __name__ == "__main__":
    main()
