"""Sums of a conversation's records: speed, time by kind, bytes, hits. Arithmetic only; prints nothing."""

from dataclasses import dataclass, field

from flashllm.base.units import format_size
from flashllm.generate.session import PrefillRecord, TokenRecord


@dataclass(slots=True)
class TurnStats:
    """The records of a turn. The first token's pass is the prefill, so rates are over the tokens after it."""

    prefill: PrefillRecord | None = None
    num_tokens: int = 0
    first_token_ms: float = 0.0  # from the end of the user's turn to the first token
    _later: list[TokenRecord] = field(default_factory=list)

    def add(self, record: PrefillRecord | TokenRecord) -> None:
        if isinstance(record, PrefillRecord):
            self.prefill = record
            self.first_token_ms = record.times.total_ms
            return
        self.num_tokens += 1
        if self.num_tokens == 1:
            self.first_token_ms += record.times.total_ms
        else:
            self._later.append(record)

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first token; None before there is a second one."""
        total_ms = self.mean_ms("total") * len(self._later)
        return len(self._later) * 1e3 / total_ms if total_ms > 0 else None

    @property
    def hit_rate(self) -> float | None:
        """Share of the active neurons found in the cache, after the first token; None where none was active."""
        hits = sum(record.times.hits for record in self._later)
        wanted = hits + sum(record.times.misses for record in self._later)
        return hits / wanted if wanted else None

    @property
    def nbytes_per_token(self) -> float:
        """Bytes read from flash, a token after the first."""
        return sum(record.times.bytes_read for record in self._later) / max(1, len(self._later))

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens that a pass yielded, after the first; None where none was drafted."""
        passes = sum(record.pass_tokens > 0 for record in self._later)
        return len(self._later) / passes if any(record.pass_tokens > 1 for record in self._later) else None

    @property
    def union_growth(self) -> float | None:
        """Neurons that the tokens of a pass with drafts wanted together, over those of one of them; None: no such pass.
        Paper A, appendix C.1: 2.4 for five tokens of OPT 6.7B."""
        wide = [record for record in self._later if record.pass_tokens > 1]
        one = sum(record.times.active / record.pass_tokens for record in wide)
        return sum(record.times.united for record in wide) / one if one else None

    def mean_ms(self, kind: str) -> float:
        """Milliseconds a token after the first: of "io", "memory", "compute", "other", which sum to "total"."""
        return sum(float(getattr(record.times, f"{kind}_ms")) for record in self._later) / max(1, len(self._later))

    def summary(self) -> str:
        """One line for a person."""
        parts = [f"{self.num_tokens} tokens"]
        if self.prefill is not None:
            parts.append(f"first after {self.first_token_ms:.0f} ms ({self.prefill.tokens} new prompt tokens)")
        if self.tokens_per_s is not None:
            parts.append(f"then {self.tokens_per_s:.1f} tokens/s")
        if self.tokens_per_pass is not None:
            parts.append(f"{self.tokens_per_pass:.2f} tokens a pass")
        if self.hit_rate is not None:
            parts.append(f"cache hits {self.hit_rate:.0%}")
        if self._later:
            parts.append(f"{format_size(self.nbytes_per_token)} read a token")
        return ", ".join(parts)

    def rows(self) -> list[tuple[str, str]]:
        """(name, value) of everything, for a table."""
        rows = []
        if self.prefill is not None:
            reused = f", {self.prefill.reused_tokens} reused" if self.prefill.reused_tokens else ""
            kind = "dense" if self.prefill.dense else "sparse"
            rows.append(("prompt", f"{self.prefill.tokens} new tokens ({kind}){reused}"))
            rows.append(("first token", f"{self.first_token_ms:.0f} ms"))
        rows.append(("answer", f"{self.num_tokens} tokens"))
        if self.tokens_per_s is not None:
            rows.append(("speed", f"{self.tokens_per_s:.1f} tokens/s"))
            kinds = ("io", "memory", "compute", "other")
            rows += [(f"{kind} a token", f"{self.mean_ms(kind):.2f} ms") for kind in kinds]
            rows.append(("read a token", format_size(self.nbytes_per_token)))
            if behind := sum(record.times.behind_bytes for record in self._later):
                rows.append(("read behind them", format_size(behind)))
        if self.hit_rate is not None:
            rows.append(("cache hits", f"{self.hit_rate:.1%}"))
        if self.tokens_per_pass is not None:
            drafted = sum(record.pass_tokens - 1 for record in self._later if record.pass_tokens > 0)
            right = sum(record.pass_tokens == 0 for record in self._later)
            rows.append(("drafted", f"{drafted} tokens, {right} of them right: {self.tokens_per_pass:.2f} a pass"))
            vain = sum(record.times.rejected_bytes for record in self._later)
            rows.append(("read for wrong ones", format_size(vain)))
            if self.union_growth is not None:
                rows.append(("neurons of a pass", f"{self.union_growth:.2f} times a token's, where it had drafts"))
        return rows
