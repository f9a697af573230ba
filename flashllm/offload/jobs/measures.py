"""Measures of a block, and of all blocks of a job. Seconds, tokens, bytes."""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class BlockMeasure:
    """Costs of a block; `busy` is each activity's own time, and activities overlap."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    busy: dict[str, float] = field(default_factory=dict)
    tiers: dict[str, int] = field(default_factory=dict)  # bytes that were taken of each, at most


@dataclass(slots=True, kw_only=True)
class Totals(BlockMeasure):
    """Sums over blocks; of tiers the most that one took."""

    blocks: int = 0
    requests: int = 0

    def add(self, measure: BlockMeasure, requests: int) -> None:
        self.blocks += 1
        self.requests += requests
        for name in ("prefill_s", "decode_s", "prompt_tokens", "new_tokens", "bytes_read", "bytes_written"):
            setattr(self, name, getattr(self, name) + getattr(measure, name))
        for activity, seconds in measure.busy.items():
            self.busy[activity] = self.busy.get(activity, 0.0) + seconds
        for tier, nbytes in measure.tiers.items():
            self.tiers[tier] = max(self.tiers.get(tier, 0), nbytes)

    @property
    def throughput(self) -> float:
        """New tokens a second of prefill and decoding together, the paper's metric; 0 before the first block."""
        seconds = self.prefill_s + self.decode_s
        return self.new_tokens / seconds if seconds > 0 else 0.0
