"""`ModelShape`: what the planner must know of a model, from a config.json or a built-in OPT name.

It counts bytes and operations of one transformer layer; it does not know weights, devices or times.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashllm.arch.registry import ARCHITECTURES
from flashllm.errors import FormatError, UnsupportedModelError, UsageError

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# The paper plans every model in 16 bit, whatever dtype its config was saved in (section 3).
_PLAN_DTYPE_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only model whose layers are alike: attention, then an FFN of two or three matrices."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int = 0  # rows of a learned position table, 0 for rotary models
    gated: bool = False
    tied: bool = True
    dtype_bytes: int = _PLAN_DTYPE_BYTES
    dtype: str | None = dataclasses.field(default=None, compare=False)  # of the weights; rates differ by it

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "dtype_bytes"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ValueError(f"{field} must be a positive integer, not {value!r}")
        if self.positions < 0:
            raise ValueError(f"positions must not be negative, not {self.positions!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")

    @property
    def query_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def matrix_params(self) -> tuple[int, ...]:
        """Parameters of a layer's matrices: query, key, value, output, (gate,) up, down."""
        attention = (self.hidden * self.query_dim, self.hidden * self.kv_dim, self.hidden * self.kv_dim)
        ffn = (self.hidden * self.ffn,) * (3 if self.gated else 2)
        return (*attention, self.query_dim * self.hidden, *ffn)

    @property
    def layer_params(self) -> int:
        """Matrix parameters of a layer, 4·h1² + 2·h1·h2 for OPT; biases and norms, under 0.1 %, are left out (A.3)."""
        return sum(self.matrix_params)

    @property
    def layer_bytes(self) -> int:
        return self.layer_params * self.dtype_bytes

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
        """Key and value of one token in one layer, uncompressed; 4·h1 for OPT."""
        return 2 * self.kv_dim * self.dtype_bytes

    @property
    def activation_token_bytes(self) -> int:
        return self.hidden * self.dtype_bytes


def _opt(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        ffn=4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=50272,
        positions=2050,
    )


BUILTIN = {
    shape.name: shape
    for shape in (
        _opt("opt-1.3b", 24, 2048, 32),
        _opt("opt-2.7b", 32, 2560, 32),
        _opt("opt-6.7b", 32, 4096, 32),
        _opt("opt-13b", 40, 5120, 40),
        _opt("opt-30b", 48, 7168, 56),
        _opt("opt-66b", 64, 9216, 72),
        _opt("opt-175b", 96, 12288, 96),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Where a config keeps what differs between families; the rest has the same key in all of them."""

    ffn_key: str
    gated: bool
    tied: bool = False  # what a config that does not say means


# Families without a file in flashllm/arch that this engine can plan for all the same.
_FAMILIES = {
    "mistral": _Family(ffn_key="intermediate_size", gated=True),
    "qwen2": _Family(ffn_key="intermediate_size", gated=True),
    "qwen3": _Family(ffn_key="intermediate_size", gated=True),
    "gemma": _Family(ffn_key="intermediate_size", gated=True, tied=True),
    "gemma2": _Family(ffn_key="intermediate_size", gated=True, tied=True),
}


def _family(model_type: object, *, name: str) -> _Family:
    if isinstance(model_type, str) and model_type in ARCHITECTURES:
        spec = ARCHITECTURES[model_type]
        tied = bool(spec.defaults.get("tie_word_embeddings", False))
        return _Family(ffn_key=spec.d_ff_key, gated="gate" in spec.matrices, tied=tied)
    if isinstance(model_type, str) and model_type in _FAMILIES:
        return _FAMILIES[model_type]
    known = ", ".join(sorted({*ARCHITECTURES, *_FAMILIES}))
    raise UnsupportedModelError(f"{name}: cannot plan for model_type {str(model_type)[:80]!r}; known: {known}")


def shape_from_config(config: dict[str, Any], *, name: str) -> ModelShape:
    """The shape a Hugging Face config describes.

    Raises UnsupportedModelError for a `model_type` outside the tables and FormatError for a config that lacks a size.
    """
    model_type = config.get("model_type")
    family = _family(model_type, name=name)
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        if config.get("word_embed_proj_dim", hidden) != hidden:
            raise UnsupportedModelError(f"{name}: a projected embedding (opt-350m) is not planned for")
        dtype = str(config.get("dtype", config.get("torch_dtype")))
        return ModelShape(
            name=name,
            layers=config["num_hidden_layers"],
            hidden=hidden,
            ffn=config[family.ffn_key],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab=config["vocab_size"],
            positions=config["max_position_embeddings"] + 2 if model_type == "opt" else 0,
            gated=family.gated,
            tied=bool(config.get("tie_word_embeddings", family.tied)),
            dtype_bytes=_DTYPE_BYTES.get(dtype, _PLAN_DTYPE_BYTES),
            dtype=dtype if dtype in _DTYPE_BYTES else None,
        )
    except KeyError as error:
        raise FormatError(f"{name}: config.json has no {error}; is it a whole Hugging Face config?") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise FormatError(f"{name}: config.json describes no possible model: {error}") from None


def load_shape(model: str) -> ModelShape:
    """The shape of `model`: a built-in name (opt-1.3b … opt-175b), a folder with a config.json, or that file.

    Raises UsageError when it is none of these, FormatError when the file is damaged.
    """
    if model.lower() in BUILTIN:
        return BUILTIN[model.lower()]
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        names = ", ".join(BUILTIN)
        raise UsageError(f"{model}: no such folder, config.json or built-in model ({names})") from None
    except ValueError as error:
        raise FormatError(f"{path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise FormatError(f"{path}: expected a JSON object")
    return shape_from_config(config, name=path.parent.name if path.name == "config.json" else path.stem)
