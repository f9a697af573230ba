"""`ModelDir`: a converted model, opened and checked, in one frozen value that everything above passes around.

Holds what the small files say and keeps nothing open. `Companions` reads those files (tokenizer, chat template,
configs) and checks them on the way. Of weights `read_plane` alone reads some.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.registry import block_spec, complete_config
from flashllm.arch.spec import Architecture, BlockSpec
from flashllm.base.codes.carried import SCALE_FORMS, Plane
from flashllm.base.dtypes import WEIGHT_DTYPE_BY_CODE, WEIGHT_DTYPES, WeightDtype, cast
from flashllm.base.files import is_there, parse_json_object, read_bounded
from flashllm.errors import ChecksumError
from flashllm.format.manifest import MANIFEST, Manifest, open_model_dir
from flashllm.format.manifest_values import FileEntry, Sparsity
from flashllm.format.model_files import CONFIG, FFN, GENERATION_CONFIG, RESIDENT, plane_tensors
from flashllm.format.rows import TableLayout
from flashllm.format.safetensors import open_safetensors

_MAX_JSON_NBYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Companions:
    """The small files of `directory`.

    In a model directory `listed`, the manifest's, says which there are and what each holds: one that is not listed does
    not exist. In a Hugging Face folder it is None, and there is nothing to compare with.
    """

    directory: Path
    listed: Mapping[str, FileEntry] | None

    @classmethod
    def of(cls, directory: Path) -> Self:
        """Those of a model directory or of a Hugging Face folder. FormatError where the manifest is damaged."""
        directory = Path(directory)
        if not is_there(directory / MANIFEST):
            return cls(directory, None)
        return cls(directory, Manifest.load(directory, check_files=False).files)

    def read(self, name: str, max_nbytes: int) -> bytes | None:
        """The file's bytes; None where there is no such file.

        ChecksumError where they are not those of the conversion, FormatError where there are more than `max_nbytes`,
        FlashIOError where they cannot be read.
        """
        path = self.directory / name
        if self.listed is None:
            return read_bounded(path, max_nbytes) if is_there(path) else None
        if name not in self.listed:
            return None
        raw = read_bounded(path, max_nbytes)
        check_hash(path, self.listed[name], hashlib.sha256(raw).hexdigest())
        return raw

    def read_json_object(self, name: str) -> dict[str, Any] | None:
        """The JSON object in the file; None where there is no such file. Errors as `read`, FormatError otherwise."""
        raw = self.read(name, _MAX_JSON_NBYTES)
        return None if raw is None else parse_json_object(raw, str(self.directory / name))


def check_hash(path: Path, entry: FileEntry, sha256: str) -> None:
    """ChecksumError unless `sha256` (hexadecimal) is what the manifest says of the file `path`."""
    if sha256 != entry.sha256:
        raise ChecksumError(
            f"{path}: its bytes are not those of the conversion; copy the file anew or convert the model again "
            f"(`flashllm verify {path.parent}` says more)"
        )


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
        """The model directory `path`, its files' sizes and headers compared with the manifest, and its configs' bytes.

        UsageError where `path` is something else, FormatError (ChecksumError for a config's bytes) for the first fault,
        UnsupportedModelError for a model that this version does not know. Each says what to do.
        """
        path = Path(path)
        manifest = open_model_dir(path)
        files = Companions(path, manifest.files)
        config = complete_config(files.read_json_object(CONFIG) or {})
        return cls(
            path=path,
            manifest=manifest,
            config=MappingProxyType(config),
            block=_with_cuts(block_spec(config), manifest),
            generation_config=MappingProxyType(files.read_json_object(GENERATION_CONFIG) or {}),
        )

    def with_sparsity(self, sparsity: Sparsity | None) -> Self:
        """The same directory as if its manifest said so."""
        manifest = dataclasses.replace(self.manifest, sparsity=sparsity)
        return dataclasses.replace(self, manifest=manifest, block=_with_cuts(block_spec(self.config), manifest))

    @property
    def rows_file(self) -> Path:
        """The file that neurons are read from: the largest part of the model, whose drive matters."""
        in_place = self.manifest.in_place
        return self.path / FFN if in_place is None else Path(in_place.files[0].path)

    @property
    def table(self) -> TableLayout | None:
        """Per-layer embeddings, which lie on flash; None where there are none."""
        return self.manifest.table_layout(self.block)

    @property
    def architecture(self) -> Architecture:
        return self.manifest.architecture

    @property
    def dtype(self) -> WeightDtype:
        """Type of the hidden states, the KV cache and what is resident and not coded."""
        return WEIGHT_DTYPES[self.manifest.dtype]

    @property
    def kv_nbytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return self.block.kv_nbytes_per_token(self.dtype.itemsize)


def read_plane(directory: Path, manifest: Manifest, layer: int) -> Plane | None:
    """The scales of a layer's down columns; None where the rows hold them. FormatError, FlashIOError."""
    form = manifest.down_scales[layer] if manifest.down_scales else ""
    if not form:
        return None
    arrays = {}
    with open_safetensors(directory / RESIDENT) as file:
        for name in plane_tensors(layer, form, manifest.layout(layer)):
            arrays[name.rpartition(".")[2]] = file.array(file.header.tensors[name])
    return Plane(form=SCALE_FORMS[form], arrays=arrays)


def read_resident(model: ModelDir, name: str) -> NDArray[np.float32] | None:
    """The resident tensor of a canonical name, one that is in no codes, in fp32; None where the model has none.
    FormatError, FlashIOError."""
    with open_safetensors(model.path / RESIDENT) as file:
        info = file.header.tensors.get(name)
        if info is None:
            return None
        return cast(file.array(info), WEIGHT_DTYPE_BY_CODE[info.dtype], WEIGHT_DTYPES["float32"])


def _with_cuts(block: BlockSpec, manifest: Manifest) -> BlockSpec:
    if manifest.sparsity is None:
        return block
    layers = [
        dataclasses.replace(layer, activation_cut=cut)
        for layer, cut in zip(block.layers, manifest.sparsity.cuts, strict=True)
    ]
    return dataclasses.replace(block, layers=tuple(layers))
