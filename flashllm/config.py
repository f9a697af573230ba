"""How a model is run, in one frozen value: what the command line, the Python interface and the benchmarks hand over.

Standard library only, and no environment variable: a caller passes every value. Fields left at None are
decided by `flashllm.plan.resolve` from the machine, the profile and the model; none of them changes a token,
except `mode`, `prompts` and `cache_bits`, which say what is computed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flashllm.errors import UsageError

Mode = Literal["sparse", "oracle", "dense"]
Backend = Literal["threads", "io_uring"]
CachePolicy = Literal["frequency", "window"]
Speculate = Literal["off", "lookup"]
Prompts = Literal["dense", "sparse"]

MODES: tuple[Mode, ...] = ("sparse", "oracle", "dense")
PROMPTS: tuple[Prompts, ...] = ("dense", "sparse")  # the first is the default
BACKENDS: tuple[Backend, ...] = ("threads", "io_uring")
CACHE_POLICIES: tuple[CachePolicy, ...] = ("frequency", "window")  # the first is the default
SPECULATIONS: tuple[Speculate, ...] = ("off", "lookup")  # the first is the default
CACHE_BITS = (8, 4)
DEFAULT_WINDOW = 5  # tokens (paper A, section 3.1)
MAX_THREADS = 1024
MAX_WINDOW = 2**20  # tokens
MOST_TOGETHER = 8  # tokens that go through an FFN together, of a draft or of requests: FfnTokens::kMost (csrc/ffn/)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How to run a model. UsageError, naming the command line's option or the field, for what cannot be."""

    memory: int | None = None  # bytes for everything the process holds; None: four fifths of what is free
    follows: bool = False  # the limit falls as memory gets scarce, and rises again up to where it began
    context: int | None = None  # tokens the KV cache can grow to; None: the model's own limit
    cache_bits: int | None = None  # of keys and values in full pages; None: they stay as they are computed
    cache_policy: CachePolicy = CACHE_POLICIES[0]  # the neurons that stay cached: most often active, or last used
    # Tokens of the window policy; under another one, of the prompt's end from which the cache is filled.
    window: int | None = None  # None: DEFAULT_WINDOW
    # Neurons computed: those predicted, those that fire (exact), all.
    mode: Mode | None = None  # None: sparse, or dense where no neuron is ever exactly zero
    # Prompts of more than K0 tokens: every neuron, in products of many tokens; or as the mode computes single tokens,
    # so that scores are those of the model that generates.
    prompts: Prompts = PROMPTS[0]
    threads: int | None = None  # of compute; None: the cores this process may use
    io_threads: int | None = None  # reads at a time; None: as the profile says, else 32
    io_backend: Backend | None = None  # None: as the profile says, else threads
    store: Path | None = None  # profiles; None: profiles.json in the user's cache directory
    # Who drafts tokens that are verified together: nobody, prompt lookup, or the model in this directory.
    speculate: Speculate | Path = SPECULATIONS[0]
    has_form: bool = False  # of answers: where it leaves but one text, its tokens are computed together
    serves: bool = False  # others send requests: memory is planned for what they may send at once
    direct: bool = True  # read past the page cache
    simd: str = "auto"  # which vector instructions compute, by the level's name; auto: the best there are

    def __post_init__(self) -> None:
        _check_whole("--memory", self.memory, "bytes")
        _check_whole("--context", self.context, "tokens")
        if self.cache_bits is not None and self.cache_bits not in CACHE_BITS:
            raise UsageError(f"--cache-bits must be one of {', '.join(map(str, CACHE_BITS))}, not {self.cache_bits!r}")
        _check_whole("window", self.window, "tokens", high=MAX_WINDOW)
        _check_whole("--threads", self.threads, high=MAX_THREADS)
        _check_whole("io_threads", self.io_threads, high=MAX_THREADS)
        if self.mode is not None:
            _check_choice("--mode", self.mode, MODES)
        _check_choice("prompts", self.prompts, PROMPTS)
        _check_choice("cache_policy", self.cache_policy, CACHE_POLICIES)
        if self.io_backend is not None:
            _check_choice("io_backend", self.io_backend, BACKENDS)
        if self.store is not None and not isinstance(self.store, Path):
            raise UsageError(f"--store must be a path, not {self.store!r}")
        if not isinstance(self.speculate, Path):
            _check_choice("--speculate", self.speculate, SPECULATIONS)
        for name in ("follows", "has_form", "serves", "direct"):
            if type(getattr(self, name)) is not bool:
                raise UsageError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if not isinstance(self.simd, str):
            raise UsageError(f"simd must be a level's name or auto, not {self.simd!r}")


def _check_whole(name: str, value: object, unit: str = "", *, high: int | None = None) -> None:
    if value is None:
        return
    if type(value) is not int:
        raise UsageError(f"{name} must be a whole number{f' of {unit}' if unit else ''}, not {value!r}")
    if value < 1:
        raise UsageError(f"{name} must be at least 1, not {value}")
    if high is not None and value > high:
        raise UsageError(f"{name} must be at most {high}, not {value}")


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name} must be one of {', '.join(known)}, not {str(value)[:80]!r}")
