"""`ModelShape`: what the planner must know of a model, from a config or a name.

It counts bytes and operations of one transformer layer; it does not know weights, devices or times.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from flashllm.arch.mixers import Attention
from flashllm.arch.registry import block_spec, resident_shapes, resolve, spec_of
from flashllm.arch.spec import Architecture, BlockSpec, LayerSpec
from flashllm.arch.tensors import Shape
from flashllm.base.codes.carried import SCALE_FORMS, plane_shapes
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.base.files import is_there, read_json_object
from flashllm.convert.checkpoint.gguf.file import SUFFIX
from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.convert.checkpoint.text_part import text_config
from flashllm.convert.outline import find_well_known
from flashllm.convert.plan import plan_conversion
from flashllm.errors import FormatError, UnsupportedModelError, UsageError
from flashllm.format.manifest import MANIFEST, Manifest
from flashllm.format.model_files import CONFIG, resident_encoding
from flashllm.format.rows import RowEncoding, RowLayout
from flashllm.format.safetensors import ITEMSIZES
from flashllm.offload.planner.packing import CODES, WeightPacking

# The paper plans every model in 16 bit, whatever dtype its config was saved in (section 3).
_PLAN_DTYPE_BYTES = 2
_PLAIN = ("query", "key", "value", "out")  # matrices of most mixers
# Of all: of attention, and of a state beside it or in its place.
_MIXERS = (
    *("query_down", "query", "key", "key_up", "value", "out_gate", "out"),
    *(f"state.{name}" for name in (*_PLAIN, "out_gate")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only model: attention, then an FFN of two or three matrices, in each layer.

    Where layers differ, neurons are the average's, and `largest` has the others; heads are those of the layer that is
    widest in them, and matrices of a mixer those of the layer that has most of them.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    value_dim: int = 0  # of a head's value as it is projected; 0: head_dim
    positions: int = 0  # rows of a learned position table, 0 for rotary models
    active: int = 0  # neurons that a token uses in a mixture of experts; 0: all, of no mixture
    most_ffn: int = 0  # of the layer that has most; 0: of every layer
    most_active: int = 0  # of the layer of which a token uses most
    experts: int = 0  # of a layer
    beside: int = 0  # neurons of a layer beside its experts, which have no tier
    # Name, outputs, inputs of a mixer's matrices that have a tier, where they are not query, key, value and out; and
    # numbers of a token that it works with besides queries, keys, values and what is made of them.
    mixer: tuple[tuple[str, int, int], ...] = ()
    mixer_values: int = 0
    latent: bool = False  # a position keeps a key alone
    keeping: int = 0  # layers that keep keys and values; 0: all
    state_bytes: int = 0  # of a sequence's recurrent states, over all layers
    gated: bool = False
    assembled: bool = False  # matrices of the FFN are nowhere in the model's files as they are
    tied: bool = True
    stored: tuple[tuple[str, str], ...] = ()  # matrix, codes that it is in
    scale_bytes: int = 0  # of a layer, beside codes
    dtype_bytes: int = _PLAN_DTYPE_BYTES
    dtype: str | None = dataclasses.field(default=None, compare=False)  # of the weights; rates differ by it

    @property
    def query_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of a layer's matrices."""
        value = self.value_dim or self.head_dim
        outputs = {"query": self.query_dim, "key": self.kv_dim, "value": self.kv_heads * value}
        attention = {name: (rows, self.hidden) for name, rows in outputs.items()}
        attention |= {"out": (self.hidden, self.heads * value)}
        if self.mixer:
            attention = {name: (rows, columns) for name, rows, columns in self.mixer}
        ffn = dict.fromkeys(("gate", "up") if self.gated else ("up",), (self.ffn, self.hidden))
        return attention | ffn | {"down": (self.hidden, self.ffn)}

    @property
    def matrix_params(self) -> tuple[int, ...]:
        return tuple(rows * columns for rows, columns in self.matrices.values())

    @property
    def layer_params(self) -> int:
        """Matrix parameters of a layer, 4·h1² + 2·h1·h2 for OPT; biases and norms, under 0.1 %, are left out (A.3)."""
        return sum(self.matrix_params)

    @property
    def ffn_active(self) -> int:
        """Neurons of a layer that a token uses."""
        return self.active or self.ffn

    @property
    def largest(self) -> "ModelShape":
        """The same model with its largest layer as every layer."""
        if not self.most_ffn:
            return self
        return dataclasses.replace(self, ffn=self.most_ffn, active=self.most_active, most_ffn=0, most_active=0)

    @property
    def ffn_params(self) -> int:
        return self.hidden * self.ffn * (3 if self.gated else 2)

    def packed_bytes(self, bits: int | None, layer: int) -> tuple[int, int]:
        """Bytes of a layer's matrices where they are packed in `bits` bits (None: as the model has them); and of those
        that have to be rounded for it, in the model's dtype."""
        packing = WeightPacking(bits=bits, layers=self.layers, shares_keys=self.kv_heads < self.heads)
        stored, total, rounded = dict(self.stored), 0, 0
        for name, size in self.matrices.items():
            packed, wide = packing.of(name, layer, stored.get(name)), prod(size) * self.dtype_bytes
            total += wide if packed is None else packed.nbytes(*size)
            rounded += 0 if packed is None or packed.encoding == stored.get(name) else wide
        return total, rounded

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's matrices as the model has them."""
        return self.packed_bytes(None, 0)[0]

    @property
    def widened(self) -> "ModelShape":
        """As an accelerator has it, on which codes are widened."""
        return dataclasses.replace(self, stored=(), scale_bytes=0)

    @property
    def head_bytes(self) -> int:
        return self.vocab * self.hidden * self.dtype_bytes

    @property
    def embedding_bytes(self) -> int:
        """Token table, position table and, where it is not tied, the output head."""
        return self.head_bytes * (1 if self.tied else 2) + self.positions * self.hidden * self.dtype_bytes

    @property
    def model_bytes(self) -> int:
        return self.layers * self.layer_bytes + self.embedding_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's key and value in one layer, uncompressed; 4·h1 for OPT."""
        return (1 if self.latent else 2) * self.kv_dim * self.dtype_bytes

    @property
    def kept_layers(self) -> int:
        """Layers that keep keys and values."""
        return self.keeping or self.layers

    @property
    def activation_token_bytes(self) -> int:
        return self.hidden * self.dtype_bytes

    def share(self, stages: int) -> "ModelShape":
        """The shape of a pipeline's largest stage, as if all layers were alike."""
        layers, keeping, state = (-(-each // stages) for each in (self.layers, self.keeping, self.state_bytes))
        return dataclasses.replace(self, layers=layers, keeping=keeping, state_bytes=state)


def check_mixers(block: BlockSpec, name: str) -> None:
    """UnsupportedModelError where layers of the model of this name take more of a token than its states, or attend to
    another layer's keys and values."""
    if block.per_layer is not None:
        lacks = "has per-layer embeddings, which the throughput engine does not read"
    elif any(mixer.shared is not None for mixer in block.attentions):
        lacks = "layers attend to another's keys and values, which the throughput engine does not do"
    else:
        return
    raise UnsupportedModelError(
        f"{name}: {lacks}; use `flashllm generate`, `chat` or `serve`, and convert without --calibrate"
    )


def shape_of(
    architecture: Architecture,
    block: BlockSpec,
    shapes: Mapping[str, Shape],
    layers: range,
    *,
    name: str,
    dtype: str | None,
    assembled: bool,
) -> ModelShape:
    """The shape of some of a model's layers, with what lies before and behind them. `shapes`: of its tensors."""
    widths = [architecture.width(layer) for layer in layers]
    used = [architecture.cycle if layer in architecture.mixtures else architecture.width(layer) for layer in layers]
    average = [-(-sum(each) // len(layers)) for each in (widths, used)]
    check_mixers(block, name)
    own = [block.layers[layer] for layer in layers]
    attending = [each.mixer for each in own if isinstance(each.mixer, Attention)]
    # A stage of a pipeline may have none: then it keeps nothing of this width.
    mixer = max(attending or block.attentions, key=lambda each: each.query_dim + each.kv_dim)
    mixers = [mixer_matrices(shapes, layer) for layer in layers]
    largest = max(mixers, key=lambda each: sum(map(prod, each.values())))
    sizes = tuple((name, rows, columns) for name, (rows, columns) in largest.items())
    differ = len(set(widths)) + len(set(used)) > 2
    return ModelShape(
        name=name,
        layers=len(layers),
        hidden=block.d_model,
        ffn=average[0],
        active=average[1] if architecture.experts else 0,
        most_ffn=max(widths) if differ else 0,
        most_active=max(used) if differ and architecture.experts else 0,
        experts=architecture.experts,
        beside=-(-sum(block.layers[layer].beside for layer in layers) // len(layers)),
        heads=mixer.heads,
        kv_heads=mixer.kv_heads,
        head_dim=mixer.head_dim,
        value_dim=mixer.value_dim or 0,
        mixer=() if {*map(tuple, mixers)} == {_PLAIN} else sizes,
        mixer_values=max(_mixer_values(each) for each in own),
        latent=mixer.latent is not None,
        keeping=len(attending) if len(attending) < len(own) else 0,
        state_bytes=4 * sum(each.recurrent.state_floats for each in own if each.recurrent is not None),
        vocab=block.vocab_size,
        positions=block.context + block.position_offset if block.learned_positions else 0,
        gated=block.gated,
        assembled=assembled or architecture.experts > 0,
        tied=block.tied_head,
        dtype_bytes=_PLAN_DTYPE_BYTES if dtype is None else WEIGHT_DTYPES[dtype].itemsize,
        dtype=dtype,
    )


def mixer_matrices(shapes: Mapping[str, Shape], layer: int) -> dict[str, Shape]:
    """The matrices of a layer's mixers that have a tier, out of a model's tensors by canonical name."""
    names = {name: f"layers.{layer}.{name}.weight" for name in _MIXERS}
    return {name: shapes[full] for name, full in names.items() if full in shapes}


def _mixer_values(layer: LayerSpec) -> int:
    """As `ModelShape.mixer_values`, of a layer."""
    values = 0
    if isinstance(layer.mixer, Attention):
        rows, latent = layer.mixer.rows, layer.mixer.latent is not None
        values += sum(rows[name] for name in ("query_down", "query", "value")) if latent else 0
        values += 0 if layer.mixer.gate == "none" else layer.mixer.gate_dim
    if layer.recurrent is not None:
        of = layer.recurrent
        values += 2 * (of.channels + of.mixed_dim)
        values += sum(of.rows.get(name, 0) for name in ("beta", "decay", "decay_down", "gate_down"))
    return values


# The paper's largest model, whose weights nobody can download.
_OPT_175B = "opt-175b"
_OPT_175B_CONFIG = {
    "model_type": "opt", "hidden_size": 12288, "num_hidden_layers": 96, "ffn_dim": 49152, "num_attention_heads": 96,
    "word_embed_proj_dim": 12288, "vocab_size": 50272, "max_position_embeddings": 2048,
}  # fmt: skip
# Keys of sizes, under the names that families have for them: a config that lacks one is not planned by a default.
_SIZES = ("vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head")
_FFN_SIZES = ("intermediate_size", "moe_intermediate_size", "ffn_dim")


def shape_from_config(config: dict[str, Any], *, name: str, assembled: bool = False) -> ModelShape:
    """The shape a Hugging Face config describes.

    Raises UnsupportedModelError for a `model_type` outside flashllm/arch and FormatError for a config that lacks a
    size.
    """
    try:
        spec, block, architecture = spec_of(config), block_spec(config), resolve(config)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name}: cannot plan: {error}") from None
    except (FormatError, TypeError) as error:
        raise FormatError(f"{name}: {error}") from None
    if config.get("word_embed_proj_dim", block.d_model) != block.d_model:
        raise UnsupportedModelError(f"{name}: a projected embedding (opt-350m) is not planned for")
    dtype = str(config.get("dtype", config.get("torch_dtype")))
    layers, known = range(architecture.num_layers), dtype if dtype in WEIGHT_DTYPES else None
    shape = shape_of(architecture, block, resident_shapes(config), layers, name=name, dtype=known, assembled=assembled)
    dense = len(architecture.mixtures) < architecture.num_layers
    needed = [key for key in (*_SIZES, *_FFN_SIZES) if dense or key != "intermediate_size"]
    missing = next((key for key in needed if key in spec.defaults and key not in config), None)
    if missing is not None:
        raise FormatError(f"{name}: config.json has no {missing!r}; is it a whole Hugging Face config?")
    return shape


def load_shape(model: str) -> ModelShape:
    """The shape of `model`: a name (of `flashllm models`, or opt-175b), a folder with a config.json, that file, or a
    GGUF file.

    Raises UsageError when it is none of these, FormatError and FlashIOError when the file is damaged or cannot be read.
    """
    if model.lower() == _OPT_175B:
        return shape_from_config(_OPT_175B_CONFIG, name=_OPT_175B)
    known, path = find_well_known(model), Path(model)
    if known is not None:
        return shape_from_config(dict(known.config), name=known.name)
    if path.is_dir():
        path = path / CONFIG
    if not is_there(path):
        raise UsageError(
            f"{model}: no such folder, config.json, GGUF file or known model; known are {_OPT_175B} and the names of "
            "`flashllm models`"
        )
    if path.suffix.lower() == SUFFIX:
        with open_checkpoint(path) as checkpoint:
            plan = plan_conversion(checkpoint, keep=True)  # what `run` makes of it first
        shape = shape_from_config(dict(plan.checkpoint.config), name=path.stem, assembled=True)
        scales = plan.kept.down_scales if plan.kept is not None else ()
        stored = plan.dtype.name, plan.resident_encoding, plan.layout.encoding, plan.other_encodings
        return _as_stored(shape, plan.dtype.name, plan.layout, lambda name: resident_encoding(name, *stored), scales)
    name = path.parent.name if path.name == CONFIG else path.stem
    config = read_json_object(path)
    text = text_config(config, path.parent)
    if text != config:  # a whole's config leaves out what is usual
        text = {**spec_of(text).defaults, **text}
    return shape_in(path.parent, text, name=name)


def shape_in(folder: Path, config: dict[str, Any], *, name: str) -> ModelShape:
    """The shape of the model in a folder, with the dtype and the codes that a model directory has its matrices in."""
    assembled = is_assembled(folder)
    shape = shape_from_config(config, name=name, assembled=assembled)
    if not assembled:
        return shape
    of = Manifest.load(folder, check_files=False)
    return _as_stored(shape, of.dtype, of.rows, of.encoding_of, of.down_scales)


def _as_stored(
    shape: ModelShape, dtype: str, rows: RowLayout, resident: Callable[[str], RowEncoding], down_scales: Sequence[str]
) -> ModelShape:
    """With the model's dtype, the codes that the first layer's matrices are in, and the bytes of scales beside them."""
    stored = {
        matrix: rows.encoding_of(matrix)
        if matrix in (*rows.matrices, "gate")
        else resident(f"layers.0.{matrix}.weight")
        for matrix in shape.matrices
    }
    scales = 0
    if rows.has_plane:
        form = SCALE_FORMS[next(filter(None, down_scales))]
        parts = plane_shapes(form, shape.largest.ffn, shape.hidden).values()
        scales = sum(prod(size) * ITEMSIZES[kind] for kind, size in parts)
    codes = tuple((matrix, one.name) for matrix, one in stored.items() if one.name in CODES)
    return dataclasses.replace(
        shape, stored=codes, scale_bytes=scales, dtype=dtype, dtype_bytes=WEIGHT_DTYPES[dtype].itemsize
    )


def is_assembled(folder: Path) -> bool:
    """True for a model directory, which has an FFN's neurons as rows."""
    return (folder / MANIFEST).exists()
