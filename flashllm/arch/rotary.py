"""Rotary frequencies (Su et al., 2021) as a config.json means them, so that the native core knows no scaling rule; and
by how much queries grow with their position, which stands beside them.

Understands transformers' rope types default, linear, dynamic, yarn, longrope, llama3 and proportional, under
`rope_parameters` or, before transformers 5, `rope_scaling` and `rope_theta`. Types that change with the length
(dynamic, longrope) are computed as for lengths within the trained context, to which `trained_context` limits the model.
"""

import math
from collections.abc import Mapping
from typing import Any

from flashllm.arch.mixers import Growth, Rotary, check_size
from flashllm.arch.spec import MAX_CONTEXT, Config, check_number
from flashllm.errors import UnsupportedModelError

DEFAULT_THETA = 10_000.0
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


def rotary(config: Config, head_dim: int, *, theta: float = DEFAULT_THETA, share: float = 1.0) -> Rotary:
    """The rotary embedding of a complete config whose layers are all alike in it. `theta` and `share` (of the head's
    dimensions that are turned) are the model_type's defaults. UnsupportedModelError for another rope type; ValueError
    for values that cannot be."""
    return rotary_of(rope_parameters(config), config, head_dim, theta=theta, share=share)


def rotary_of(
    rope: dict[str, Any], config: Config, head_dim: int, *, theta: float = DEFAULT_THETA, share: float = 1.0
) -> Rotary:
    """The rotary embedding that the parameters `rope` describe; errors as `rotary`."""
    kind = _kind(rope, config)
    given = (rope.get("rope_theta"), config.get("rope_theta"), config.get("rotary_emb_base"))
    theta = check_number("rope_theta", _first(*given, theta))
    key = "partial_rotary_factor"
    share = check_number(key, _first(rope.get(key), config.get(key), config.get("rotary_pct"), share))
    if kind == "proportional":
        return _proportional(rope, head_dim, theta=theta, share=share)
    dims = int(head_dim * share)
    if kind == "dynamic" and rope.get("alpha") and dims > 2:  # Hunyuan's, which is the same at every length
        theta *= _positive(rope, "alpha") ** (dims / (dims - 2))
    if theta <= 0 or dims < 2 or dims % 2 or dims > head_dim:
        raise ValueError(
            f"rotary positions need rope_theta above 0 and an even number of dimensions, not {theta} and {dims}"
        )
    plain = [theta ** (-pair / dims) for pair in range(0, dims, 2)]
    match kind:
        case "linear":
            factor = _positive(rope, "factor")
            return Rotary(inverse_frequency=tuple(frequency / factor for frequency in plain))
        case "yarn":
            return _yarn(plain, rope, config, theta)
        case "longrope":
            return _longrope(plain, rope, config)
        case "llama3":
            return Rotary(inverse_frequency=tuple(_llama3(frequency, rope, config) for frequency in plain))
    return Rotary(inverse_frequency=tuple(plain))


def rotary_by_type(
    config: Config, head_dim: int, *, theta: float, share: float = 1.0, sliding: Mapping[str, Any] | None = None
) -> dict[str, Rotary]:
    """The rotary embedding of each type of layer: its own parameters where the config has some by the type's name;
    else the config's for layers that see everything, and `sliding` for those with a window. Errors as `rotary`."""
    rope = rope_parameters(config)
    own = {kind: rope[kind] for kind in ("full_attention", "sliding_attention") if isinstance(rope.get(kind), dict)}
    bare = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_parameters")}
    given = {
        "full_attention": own.get("full_attention", {} if own else rope),
        "sliding_attention": {**(sliding or {}), **own.get("sliding_attention", {})},
    }
    return {kind: rotary_of(each, bare, head_dim, theta=theta, share=share) for kind, each in given.items()}


def rope_parameters(config: Config) -> dict[str, Any]:
    """A config's rope parameters, in transformers' order of precedence; empty where it has none."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if rope:
            if not isinstance(rope, dict):
                raise ValueError(f"{key} must be an object, not {str(rope)[:80]!r}")
            return rope
    return {}


def growth(config: Config) -> Growth | None:
    """How queries grow with their position (`llama_4_scaling_beta`); None where the config does not say so."""
    rope = rope_parameters(config)
    if not rope.get("llama_4_scaling_beta"):
        return None
    step = check_size("original_max_position_embeddings", rope.get("original_max_position_embeddings"), MAX_CONTEXT)
    return Growth(rate=check_number("llama_4_scaling_beta", rope["llama_4_scaling_beta"]), step=step)


def trained_context(config: Config) -> int:
    """Positions for which the frequencies are right: the config's, or fewer where longer texts would change them."""
    rope, context = rope_parameters(config), said_context(config)
    return min(context, int(_trained(rope, config))) if _kind(rope, config) == "longrope" else context


def said_context(config: Config) -> int:
    """Positions that the config says it knows."""
    return check_size("max_position_embeddings", config["max_position_embeddings"], MAX_CONTEXT)


def _kind(rope: dict[str, Any], config: Config) -> str:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "su" or (kind == "yarn" and "short_factor" in rope):  # names that Phi-3's first configs have
        kind = "longrope"
    if kind == "mrope":  # positions in three dimensions, which in text are the same three times
        kind = "default"
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope type {str(kind)[:80]!r} is not supported for {config.get('model_type')}; supported: "
            f"{', '.join(ROPE_TYPES)}"
        )
    return str(kind)


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next(value for value in values if value is not None)


def _positive(rope: dict[str, Any], key: str) -> float:
    value = check_number(key, rope.get(key))
    if value <= 0:
        raise ValueError(f"{key} must be above 0, not {value}")
    return value


def _trained(rope: dict[str, Any], config: Config) -> float:
    """Positions of the training that the scaling starts from."""
    key = "original_max_position_embeddings"
    value = _first(config.get(key), rope.get(key), config["max_position_embeddings"])
    return _positive({key: value}, key)


def _stretched(rope: dict[str, Any], config: Config) -> tuple[float, float]:
    """(`_trained`, by how much it is stretched)"""
    trained, factor = _trained(rope, config), rope.get("factor")
    return trained, said_context(config) / trained if factor is None else _positive(rope, "factor")


def _llama3(frequency: float, rope: dict[str, Any], config: Config) -> float:
    """Llama 3.1's rule: waves longer than the trained context are stretched by `factor`, short ones kept, those
    between blended."""
    factor = _positive(rope, "factor")
    low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
    if high <= low:
        raise ValueError(f"high_freq_factor must be above low_freq_factor, not {high} and {low}")
    waves = _trained(rope, config) * frequency / (2 * math.pi)  # within the trained context
    if waves < low:
        return frequency / factor
    if waves > high:
        return frequency
    blend = (waves - low) / (high - low)
    return (1 - blend) * frequency / factor + blend * frequency


def _proportional(rope: dict[str, Any], head_dim: int, *, theta: float, share: float) -> Rotary:
    """Gemma 4's: pairs are those of the whole head, of which the first `share` turn, at the whole's frequencies."""
    turned = int(share * head_dim // 2)
    if theta <= 0 or head_dim % 2 or not 0 < turned <= head_dim // 2:
        raise ValueError(f"rotary positions need rope_theta above 0 and a share of up to 1, not {theta} and {share}")
    by = 1.0 if rope.get("factor") is None else _positive(rope, "factor")
    frequencies = [theta ** (-2 * pair / head_dim) / by for pair in range(turned)]
    return Rotary(inverse_frequency=(*frequencies, *[0.0] * (head_dim // 2 - turned)))


def _yarn(plain: list[float], rope: dict[str, Any], config: Config, theta: float) -> Rotary:
    """YaRN (Peng et al., 2023): slow pairs are interpolated, fast ones kept, with a ramp between; scores are scaled."""
    trained, factor = _stretched(rope, config)
    dims = 2 * len(plain)
    if theta == 1:
        raise ValueError("rope_theta 1 turns all pairs alike; yarn needs another")

    def pair_that_turns(times: float) -> float:
        """The pair that turns so many times within the trained context."""
        return dims * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_that_turns(_first(rope.get("beta_fast"), 32))
    high = pair_that_turns(_first(rope.get("beta_slow"), 1))
    if _first(rope.get("truncate"), True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low if high != low else 0.001
    ramps = [min(max((pair - low) / width, 0.0), 1.0) for pair in range(len(plain))]
    frequencies = (
        frequency / factor * ramp + frequency * (1 - ramp) for frequency, ramp in zip(plain, ramps, strict=True)
    )
    return Rotary(inverse_frequency=tuple(frequencies), scaling=_yarn_scaling(rope, factor))


def _yarn_scaling(rope: dict[str, Any], factor: float) -> float:
    def scale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return _positive(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(_positive(rope, "mscale")) / scale(_positive(rope, "mscale_all_dim"))
    return scale(1.0)


def _longrope(plain: list[float], rope: dict[str, Any], config: Config) -> Rotary:
    """LongRoPE (Ding et al., 2024), within the trained context: every pair has a factor of its own."""
    factors = rope.get("short_factor")
    if not isinstance(factors, list) or len(factors) != len(plain):
        raise ValueError(f"short_factor must be a list of {len(plain)} numbers")
    trained, factor = _stretched(rope, config)
    if rope.get("attention_factor") is not None:
        scaling = _positive(rope, "attention_factor")
    else:
        if factor > 1 >= trained:
            raise ValueError(f"original_max_position_embeddings must be above 1, not {trained}")
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    frequencies = (
        frequency / _positive({"short_factor": by}, "short_factor")
        for frequency, by in zip(plain, factors, strict=True)
    )
    return Rotary(inverse_frequency=tuple(frequencies), scaling=scaling)
