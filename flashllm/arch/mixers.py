"""The mixers of a layer: attention, or a recurrence over a state. Plain values, without tensors or files."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from flashllm.base.checks import check_int

MAX_DIMENSION = 2**20


def check_cap(name: str, cap: float | None) -> None:
    """`cap`, a finite number above 0 or none. ValueError otherwise."""
    if cap is not None and not (math.isfinite(cap) and cap > 0):
        raise ValueError(f"{name} must be a number above 0, not {cap}")


def check_size(name: str, value: Any, limit: int = MAX_DIMENSION) -> int:
    """`value`, an integer from 1 to `limit`. ValueError otherwise."""
    return check_int(name, value, 1, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """A rotary position embedding (Su et al., 2021)."""

    inverse_frequency: tuple[float, ...]  # radians a position of each pair of dimensions
    scaling: float = 1.0  # of cosines and sines
    style: Literal["half", "interleaved"] = "half"  # the partner of dimension j: j + dims / 2, or j + 1

    def __post_init__(self) -> None:
        if not all(math.isfinite(frequency) for frequency in self.inverse_frequency):
            raise ValueError("inverse_frequency must be finite numbers")

    @property
    def dims(self) -> int:
        """Dimensions turned of each head, from its first on."""
        return 2 * len(self.inverse_frequency)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alibi:
    """Distances that are added to scores, after their scale (Press et al., 2022): scale * slope * (key - query)."""

    slopes: tuple[float, ...]  # of each head
    scale: float = 1.0
    rounded: bool = False  # positions, and slope * position, to bf16, as Falcon-RW was trained

    def __post_init__(self) -> None:
        if not all(math.isfinite(number) for number in (*self.slopes, self.scale)):
            raise ValueError("slopes and their scale must be finite numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Queries that grow with their position: times 1 + rate * ln(1 + position // step) (Meta AI, 2025: Llama 4)."""

    rate: float
    step: int

    def __post_init__(self) -> None:
        check_size("step", self.step, 2**30)
        if not (math.isfinite(self.rate) and self.rate >= 0):
            raise ValueError(f"queries must grow by a finite number from 0, not {self.rate}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI, 2024: DeepSeek-V2): a position keeps one key for all heads, whose first
    `rank` numbers, after a norm, are its value too; the others are the part that is rotated.

    A head's query, [plain | rotated], is brought to that space by a matrix of its own, its output out of it by another:
    the absorbed form, which multiplies the same numbers as keys and values of every head. Or these matrices make each
    head's keys and values of every position: the expanded form, which prompts are computed in.
    """

    rank: int
    plain_dim: int  # of a head's query, what is not rotated
    value_dim: int  # of a head's output
    query_rank: int | None = None  # of the query's projection, which has a norm between its halves; None: it is one
    norm_epsilon: float  # of that norm, and of the keys'

    def __post_init__(self) -> None:
        for name in ("rank", "plain_dim", "value_dim"):
            check_size(name, getattr(self, name))
        if self.query_rank is not None:
            check_size("query_rank", self.query_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The mixer that attends to keys and values by a softmax (Vaswani et al., 2017)."""

    kind: ClassVar[str] = "attention"

    heads: int
    kv_heads: int  # divides heads
    head_dim: int
    query_scale: float  # of the queries, after their bias, norm and rotation
    # A norm of queries and keys before their rotation: of each head with one weight [head_dim] for all, of each head
    # with its own weight ("heads": [heads, head_dim]), or of all heads together ("projection"); or of each head behind
    # the rotation ("turned_head").
    query_key_norm: Literal["none", "head", "heads", "projection", "turned_head"] = "none"
    rotary: Rotary | None = None  # None: nothing is turned
    window: int | None = None  # positions a query sees, its own included; None: all before it
    softcap: float | None = None  # scores are cap * tanh(score / cap) (Gemma 2)
    alibi: Alibi | None = None
    # Of a product with what goes in, that what is mixed is multiplied by; "head_softplus": a number of each head.
    gate: Literal["none", "sigmoid", "softplus", "head_softplus"] = "none"
    growth: Growth | None = None  # of the queries, with their position
    out_scale: float = 1.0  # of the output
    # Of a value's head and its output's, where that is less than head_dim: the cache keeps head_dim, the rest zeros.
    value_dim: int | None = None
    value_scale: float = 1.0  # of the values
    latent: Latent | None = None  # a key is head_dim = rank and rotated dimensions wide, and there is one
    value_norm: bool = False  # each head's value is normalized, without a weight
    key_is_value: bool = False  # the key's projection is the value, too, before its norm and rotation
    shared: int | None = None  # the earlier layer whose keys and values it attends to; None: its own

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim"):
            check_size(name, getattr(self, name))
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} key-value heads do not divide {self.heads} heads")
        if self.rotary is not None and self.rotary.dims > self.head_dim:
            raise ValueError(f"{self.rotary.dims} rotary dimensions do not fit heads of {self.head_dim}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"a sliding window must be at least 1, not {self.window}")
        if self.alibi is not None and len(self.alibi.slopes) != self.heads:
            raise ValueError(f"{len(self.alibi.slopes)} slopes do not fit {self.heads} heads")
        check_cap("softcap", self.softcap)
        if self.value_norm and self.query_key_norm == "none":
            raise ValueError("values are normalized where queries and keys are")
        if self.shared is not None and self.shared < 0:
            raise ValueError(f"there is no layer {self.shared} to share keys and values with")
        if not 1 <= self.value_width <= self.head_dim:
            raise ValueError(f"values of {self.value_width} do not fit heads of {self.head_dim}")
        if (self.key_is_value or self.value_norm) and self.value_dim is not None:
            raise ValueError("values narrower than keys are projected by themselves, and not normalized")
        if self.latent is None:
            return
        if self.value_norm or self.key_is_value or self.shared is not None:
            raise ValueError("latent attention has keys of its own, whose first numbers are values")
        if self.value_dim is not None or self.value_scale != 1.0:
            raise ValueError("the values of latent attention are parts of its keys")
        if self.kv_heads != 1 or self.query_key_norm != "none" or self.latent.rank > self.head_dim:
            raise ValueError("latent attention has one key for all heads, at least as wide as its rank")
        if self.rotary is not None and self.rotary.dims != self.rotated_dim:
            raise ValueError(f"{self.rotary.dims} rotary dimensions are not those behind the rank")

    @property
    def query_dim(self) -> int:
        """Numbers of all heads' queries where they meet the keys, and of their outputs there."""
        return self.heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Numbers of a value's head as it is projected."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def kv_dim(self) -> int:
        """Outputs of the key projection, and numbers that the cache keeps of a value."""
        return self.kv_heads * self.head_dim

    @property
    def rows(self) -> Mapping[str, int]:
        """Outputs of each projection by its canonical name within a layer."""
        value = self.kv_heads * self.value_width if self.latent is None else self.mixed_dim
        rows = {"query": self.projected_dim, "key": self.kv_dim, "value": value, "out_gate": self.gate_dim}
        return rows | ({} if self.latent is None else {"query_down": self.latent.query_rank or 0})

    @property
    def kv_rows(self) -> int:
        """Rows of `kv_dim` that a position keeps: key and value, or a latent key."""
        return 2 if self.latent is None else 1

    @property
    def rotated_dim(self) -> int:
        """Dimensions of a latent key behind its rank."""
        return 0 if self.latent is None else self.head_dim - self.latent.rank

    @property
    def projected_dim(self) -> int:
        """Outputs of the query projection."""
        return self.query_dim if self.latent is None else self.heads * (self.latent.plain_dim + self.rotated_dim)

    @property
    def gate_dim(self) -> int:
        """Outputs of the gate's projection, where there is one."""
        return self.heads if self.gate == "head_softplus" else self.mixed_dim

    @property
    def mixed_dim(self) -> int:
        """Inputs of the output projection."""
        return self.heads * (self.value_width if self.latent is None else self.latent.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """A mixer that keeps a state in place of keys and values, part of which are the last inputs of a convolution along
    the tokens, each channel by itself."""

    kind: ClassVar[str]
    query_key_norm: ClassVar[str] = "none"
    rotary: ClassVar[None] = None
    window: ClassVar[None] = None
    latent: ClassVar[None] = None

    kernel: int  # tokens that the convolution sees, its own included


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution(Recurrent):
    """A convolution between two gates (Liquid AI, 2025: LFM2): query(x) * convolution(key(x) * value(x)), each `width`
    numbers."""

    kind: ClassVar[str] = "short_convolution"
    value_heads: ClassVar[int] = 0  # that keep a state of their own

    width: int

    def __post_init__(self) -> None:
        check_size("width", self.width)
        if check_size("kernel", self.kernel) == 1:
            raise ValueError("a convolution must see tokens before its own")

    @property
    def rows(self) -> Mapping[str, int]:
        return dict.fromkeys(("query", "key", "value"), self.width)

    @property
    def mixed_dim(self) -> int:
        return self.width

    @property
    def channels(self) -> int:
        return self.width

    @property
    def state_floats(self) -> int:
        """fp32 numbers of a sequence's state: the inputs that the next convolution sees."""
        return (self.kernel - 1) * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadStates(Recurrent):
    """A mixer whose heads each keep a state S [key_dim, value_dim].

    Queries, keys and values are projected, convolved, and passed through SiLU.
    """

    small: ClassVar[tuple[str, ...]] = ("decay",)  # projections to a number for each value head

    key_heads: int  # divide the value heads, of which as many share one
    value_heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "kernel"):
            check_size(name, getattr(self, name))
        if self.value_heads % self.key_heads:
            raise ValueError(f"{self.key_heads} key heads do not divide {self.value_heads} value heads")
        check_size("channels of a convolution", self.channels)

    @property
    def rows(self) -> Mapping[str, int]:
        key, value = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        of_heads = dict.fromkeys(self.small, self.value_heads)
        return {"query": key, "key": key, "value": value, "out_gate": value, **of_heads}

    @property
    def mixed_dim(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.mixed_dim

    @property
    def norm_dim(self) -> int:
        """Weights of the norm of what is mixed."""
        return self.mixed_dim

    @property
    def state_floats(self) -> int:
        """fp32 numbers of a sequence's state: every head's S, and the inputs that the next convolution sees."""
        return self.key_dim * self.mixed_dim + (self.kernel - 1) * self.channels


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule(HeadStates):
    """The gated delta rule (Yang et al., 2024). Queries and keys are of length 1. For a value head, of a token:

        S *= exp(-exp(decay_log) * softplus(decay(x) + decay_bias))
        S += key (sigmoid(beta(x)) * (value - key S));  mixed = query S / sqrt(key_dim)

    What goes on is rms_norm(mixed) * silu(out_gate(x)), the norm of each head with one weight for all.

    With a decay of each channel (Kimi Team, 2025) decay and decay_bias have a number for each of the keys', by which
    that row of S decays; decay and out_gate read decay_down(x) and gate_down(x), and the gate is a sigmoid.
    """

    kind: ClassVar[str] = "delta_rule"
    small: ClassVar[tuple[str, ...]] = ("beta", "decay")

    # The key head of value head i: i // r, where r value heads share one, or, of those that lie tiled, i % key_heads.
    tiled: bool = False
    channel_rank: int | None = None  # outputs of decay_down and gate_down; None: there are none, and a decay a head
    beta_scale: float = 1.0  # of sigmoid(beta): 2 where a state's eigenvalues may be negative (Grazzi et al., 2025)
    norm_epsilon: float | None = None  # of the norm of what is mixed; None: the model's

    def __post_init__(self) -> None:
        HeadStates.__post_init__(self)
        if self.channel_rank is not None and check_size("channel_rank", self.channel_rank) and self.tiled:
            raise ValueError("value heads with a decay of each channel have key heads of their own")
        if self.channel_rank is not None and self.key_heads != self.value_heads:
            raise ValueError(f"{self.key_heads} key heads are not {self.value_heads}, as a decay of each channel wants")

    @property
    def rows(self) -> Mapping[str, int]:
        """As of any, with those that others read."""
        rows: Mapping[str, int] = HeadStates.rows.__get__(self)
        if self.channel_rank is None:
            return rows
        return {**rows, "decay": rows["key"], "decay_down": self.channel_rank, "gate_down": self.channel_rank}

    @property
    def norm_dim(self) -> int:
        return self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace(HeadStates):
    """A state-space model's mixer (Mamba-2: Dao and Gu, 2024), whose C, B and x are query, key and value here, a key
    head one of its groups. For a value head, of a token:

        step = softplus(decay(x) + decay_bias);  S *= exp(-exp(decay_log) * step)
        S += key (step * value);                 mixed = query S + skip * value

    What goes on is rms_norm(mixed * silu(out_gate(x))), the norm over the heads of a key head together, or, where
    the gate is not first, rms_norm(mixed) * silu(out_gate(x)). A model may lack the norm.
    """

    kind: ClassVar[str] = "state_space"

    gate_first: bool = True
    # What the projections' outputs, but for the convolution's bias, are multiplied by.
    gate_scale: float = 1.0
    query_scale: float = 1.0
    key_scale: float = 1.0
    value_scale: float = 1.0
    decay_scale: float = 1.0
    out_scale: float = 1.0


Keeping = DeltaRule | StateSpace | ShortConvolution  # a state
Mixer = Attention | Keeping
