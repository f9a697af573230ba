"""`ModelDir`: a converted model, opened and checked, in one frozen value that everything above passes around.

Holds what the small files say; reads no weights and keeps nothing open.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from flashllm.arch.registry import block_spec, complete_config
from flashllm.arch.spec import Architecture, BlockSpec
from flashllm.base.dtypes import WEIGHT_DTYPES, WeightDtype
from flashllm.base.files import read_json_object
from flashllm.format.manifest import Manifest, open_model_dir
from flashllm.format.model_files import CONFIG, GENERATION_CONFIG


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDir:
    """A model directory: see `open`."""

    path: Path
    manifest: Manifest
    config: Mapping[str, Any]  # config.json, the architecture's defaults filled in
    block: BlockSpec
    generation_config: Mapping[str, Any]  # generation_config.json; empty where there is none

    @classmethod
    def open(cls, path: Path) -> Self:
        """The model directory `path`, its files' sizes and headers compared with the manifest.

        UsageError where `path` is something else, FormatError for the first fault, UnsupportedModelError for a model
        that this version does not know. Each says what to do.
        """
        path = Path(path)
        manifest = open_model_dir(path)
        config = complete_config(read_json_object(path / CONFIG))
        generation = path / GENERATION_CONFIG
        return cls(
            path=path,
            manifest=manifest,
            config=MappingProxyType(config),
            block=block_spec(config),
            generation_config=MappingProxyType(read_json_object(generation) if generation.exists() else {}),
        )

    @property
    def architecture(self) -> Architecture:
        """As the manifest records it."""
        return self.manifest.architecture

    @property
    def dtype(self) -> WeightDtype:
        """Of the resident weights, the KV cache and the hidden states."""
        return WEIGHT_DTYPES[self.manifest.dtype]

    @property
    def kv_nbytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return self.block.kv_nbytes_per_token(self.architecture.num_layers, self.dtype.itemsize)
