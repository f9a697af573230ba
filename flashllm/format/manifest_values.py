"""The values in a manifest besides the layout (format/manifest.py has the whole): each is checked where it is made, and
read from JSON. Knows no files.
"""

import re
from dataclasses import dataclass
from typing import Any

from flashllm.arch.spec import Architecture, check_number
from flashllm.base.checks import check_int, check_keys, check_list, check_str, is_number
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.config import MAX_WINDOW
from flashllm.format.rows import RowLayout, packed

EXPERT_KEYS = ("experts", "chosen_experts", "shared_neurons")  # of the architecture of a mixture of experts
LAYER_KEYS = ("widths", "dense_layers")  # of the architecture of a model whose layers differ
ROW_KEYS = ("encoding", "down_encoding", "downs", "ups", "matrices", "row_nbytes", "stride", "num_rows")
UNWRITTEN_ROW_KEYS: dict[str, Any] = {"down_encoding": None, "downs": [], "ups": []}  # written where other than these


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Size and SHA-256 (hexadecimal) of a file."""

    nbytes: int
    sha256: str

    def __post_init__(self) -> None:
        check_int("nbytes", self.nbytes, 0, 2**63 - 1)
        if type(self.sha256) is not str or re.fullmatch(r"[0-9a-f]{64}", self.sha256) is None:
            raise ValueError(f"sha256 must be 64 hexadecimal digits, not {str(self.sha256)[:80]!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Activity statistics of sample text: active neurons a token, and neurons needed for the window, by layer."""

    window: int
    mean_active: tuple[float, ...]
    req: tuple[int, ...]
    tokens: int
    text: str  # what the sample was

    def __post_init__(self) -> None:
        check_int("window", self.window, 1, MAX_WINDOW)
        check_int("tokens", self.tokens, 1, 2**63 - 1)
        check_str("text", self.text, 10_000)
        for value in self.mean_active:
            if not is_number(value) or value < 0:
                raise ValueError(f"mean_active must be numbers from 0, not {value!r}")
        for value in self.req:
            check_int("req", value, 0, 2**24)
        if len(self.req) != len(self.mean_active):
            raise ValueError(f"mean_active has {len(self.mean_active)} layers, req has {len(self.req)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsity:
    """Neurons whose gate's activation is of a smaller magnitude than their layer's cut count as zero (Lee et al., 2024:
    CATS), and what that cost on the text where it was measured."""

    share: float  # of zeros that was asked for
    cuts: tuple[float, ...]  # of each layer
    zeros: float  # share of neurons that were zero
    perplexity: float
    dense_perplexity: float  # without the cuts
    scored_tokens: int
    text: str

    def __post_init__(self) -> None:
        check_str("text", self.text, 10_000)
        check_int("scored_tokens", self.scored_tokens, 1, 2**63 - 1)
        for name in ("share", "zeros", "perplexity", "dense_perplexity"):
            check_number(name, getattr(self, name))
        for cut in self.cuts:
            if check_number("cuts", cut) < 0:
                raise ValueError(f"cuts must be numbers from 0, not {cut}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The cost of fewer bits: perplexity on a text, of the model and of what it was converted from."""

    perplexity: float
    source_perplexity: float
    scored_tokens: int
    text: str

    def __post_init__(self) -> None:
        check_str("text", self.text, 10_000)
        check_int("scored_tokens", self.scored_tokens, 1, 2**63 - 1)
        for name in ("perplexity", "source_perplexity"):
            if not check_number(name, getattr(self, name)) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The origin of the weights: a folder's or hub repository's name, and their dtype there."""

    name: str
    dtype: str

    def __post_init__(self) -> None:
        check_str("name", self.name, 1000)
        check_dtype("dtype", self.dtype)


def check_dtype(name: str, value: Any) -> None:
    """ValueError unless it is a dtype of weights."""
    if type(value) is not str or value not in WEIGHT_DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(WEIGHT_DTYPES)}, not {str(value)[:80]!r}")


def read_rows(value: Any, architecture: Architecture) -> RowLayout:
    """The layout, whose derived numbers must be those that are written."""
    if isinstance(value, dict):
        value = {**UNWRITTEN_ROW_KEYS, **value}
    rows = check_keys(value, ROW_KEYS, "rows")
    down = rows["down_encoding"]
    layout = RowLayout(
        encoding=check_str("rows.encoding", rows["encoding"], 64),
        d_model=architecture.d_model,
        d_ff=architecture.d_ff,
        matrices=tuple(check_list(rows["matrices"], "rows.matrices")),
        down_encoding=None if down is None else check_str("rows.down_encoding", down, 64),
        downs=_of_layers(rows, "downs"),
        ups=_of_layers(rows, "ups"),
    )
    if rows["stride"] != layout.stride:
        layout = packed(layout, architecture)
    for name in ("row_nbytes", "stride", "num_rows"):
        if type(rows[name]) is not int or rows[name] != getattr(layout, name):
            raise ValueError(f"rows.{name} must be {getattr(layout, name)}, not {str(rows[name])[:80]}")
    return layout


def _of_layers(rows: dict[str, Any], name: str) -> tuple[str, ...]:
    return tuple(check_str(f"rows.{name}", each, 64) for each in check_list(rows[name], f"rows.{name}"))
