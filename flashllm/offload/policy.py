"""`Policy`: one offloading strategy of paper B, section 4.3, as a frozen value. It knows neither model nor machine."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from flashllm.base.checks import check_int, from_json, is_number
from flashllm.base.files import read_json_object
from flashllm.errors import FormatError, UsageError

COMPRESSIBLE = ("weights", "cache")
_SUM_TOLERANCE = 1e-6


def compression(names: Collection[str]) -> dict[str, bool]:
    """Fields of a `Method` by which what is named, of COMPRESSIBLE, is compressed. UsageError for another name."""
    for unknown in sorted(set(names) - set(COMPRESSIBLE)):
        raise UsageError(f"--compress must be of {', '.join(COMPRESSIBLE)}, not {unknown!r}")
    return {f"compress_{name}": name in names for name in COMPRESSIBLE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts of one padded length, each continued by the same number of new tokens (paper B, section 6)."""

    prompt_len: int
    gen_len: int

    @property
    def mean_context(self) -> float:
        """Cached tokens an average decoding step reads: s + n/2 (A.3)."""
        return self.prompt_len + self.gen_len / 2

    @property
    def full_context(self) -> int:
        return self.prompt_len + self.gen_len

    @property
    def positions(self) -> int:
        """Those that go through the layers, and are cached: the last new token is chosen and not fed back."""
        return self.full_context - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """The part of a policy that is not placement: what the search enumerates and the user chooses."""

    gpu_batch: int  # sequences computed at once
    num_batches: int = 1  # GPU batches in a block, which share each load of a layer's weights
    compress_weights: bool = False
    compress_cache: bool = False
    cpu_attention: bool = False  # decode attention runs where the cache lives when that is not the device
    attention_sparsity: float = 1.0  # share of the value cache that is read; 0.1 in section 6.2, 1.0 reads all
    overlap: bool = True

    @property
    def block_size(self) -> int:
        """Sequences in a block (bls of A.3)."""
        return self.gpu_batch * self.num_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(Method):
    """A method, and the places of tensors: fractions that sum to 1 for each kind.

    Letters: w weights, c KV cache, h activations; g device ("GPU"), c CPU memory, d disk.
    """

    wg: float
    wc: float
    wd: float
    cg: float
    cc: float
    cd: float
    hg: float
    hc: float
    hd: float

    PLACEMENT: ClassVar[tuple[str, ...]] = ("wg", "wc", "wd", "cg", "cc", "cd", "hg", "hc", "hd")

    def __post_init__(self) -> None:
        for field in ("gpu_batch", "num_batches"):
            check_int(field, getattr(self, field), 1, 2**31)
        for field in ("compress_weights", "compress_cache", "cpu_attention", "overlap"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field} must be true or false, not {getattr(self, field)!r}")
        for field in self.PLACEMENT:
            value = getattr(self, field)
            if not is_number(value) or not 0 <= value <= 1:
                raise ValueError(f"{field} must be a fraction from 0 to 1, not {value!r}")
        for kind, what in (("w", "weights"), ("c", "cache"), ("h", "activations")):
            total = sum(getattr(self, kind + tier) for tier in "gcd")
            if abs(total - 1) > _SUM_TOLERANCE:
                raise ValueError(f"{kind}g + {kind}c + {kind}d must be 1 ({what}), not {total!r}")
        sparsity = self.attention_sparsity
        if not is_number(sparsity) or not 0 < sparsity <= 1:
            raise ValueError(f"attention_sparsity must be above 0 and at most 1, not {sparsity!r}")

    @property
    def placement(self) -> tuple[float, ...]:
        return tuple(float(getattr(self, field)) for field in self.PLACEMENT)

    @property
    def uses_cpu(self) -> bool:
        return any(getattr(self, kind + "c") > 0 for kind in "wch")

    @property
    def uses_disk(self) -> bool:
        return any(getattr(self, kind + "d") > 0 for kind in "wch")

    @property
    def head_tier(self) -> str:
        """Tier of the output head: the device where it has any weights, else where most of them are."""
        if self.wg > 0:
            return "g"
        return "c" if self.wc >= self.wd else "d"

    def embedding_tier(self, *, tied: bool) -> str:
        """Tier of the embedding: that of a head tied to it. By itself, the disk where that has any weights: a step
        gathers one row of it for each sequence, so no memory is well spent on it."""
        return "d" if not tied and self.wd > 0 else self.head_tier

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def shares(self, kind: str, digits: int = 0) -> list[str]:
        """The places of a kind, "w", "c" or "h", for people: like "40% device"; in per cent of so many digits."""
        tiers = (("g", "device"), ("c", "CPU"), ("d", "disk"))
        found = [(getattr(self, kind + tier), where) for tier, where in tiers]
        return [f"{share:.{digits}%} {where}" for share, where in found if share > 0]

    @classmethod
    def from_json(cls, data: Any, *, where: str = "policy") -> "Policy":
        """The policy an object of named fields describes; a whole plan (`{"policy": {...}}`) is taken too. Raises
        FormatError that names the field; unknown fields are errors."""
        if isinstance(data, dict) and isinstance(data.get("policy"), dict):
            data = data["policy"]
        try:
            return cast(Policy, from_json(cls, data, "the policy"))
        except ValueError as error:
            raise FormatError(f"{where}: {error}") from None

    @classmethod
    def load(cls, path: Path) -> "Policy":
        """The policy in the JSON file `path`. Raises FormatError, FlashIOError."""
        return cls.from_json(read_json_object(path), where=str(path))
