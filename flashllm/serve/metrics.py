"""Counters of the server, for Prometheus. Numbers alone: nothing of any request's text."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from flashllm.generate.session import PrefillRecord
from flashllm.serve.worker import Began, Chosen, Event

_COUNTS = {
    "prompt_tokens": "prompt tokens computed",
    "cached_tokens": "prompt tokens taken from kept conversations",
    "generated_tokens": "tokens generated",
    "drafted_tokens": "tokens drafted and verified",
    "accepted_tokens": "drafted tokens that were right",
    "rejected_bytes": "bytes read for drafted tokens that were wrong",
    "read_bytes": "bytes read from flash",
    "behind_bytes": "bytes read from flash behind the tokens, of what none wanted yet",
    "cache_hits": "active neurons found in the cache",
    "cache_misses": "active neurons read from flash",
}
_TOKEN_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_PROMPT_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Counters of one server. `see` is called by one thread at a time."""

    def __init__(
        self, *, waiting: Callable[[], int], kept: Callable[[], int], memory: Callable[[], int], memory_limit: int
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "flashllm_requests", "answers, by path and status", ["path", "status"], registry=registry
        )
        self._counts = {name: Counter(f"flashllm_{name}", what, registry=registry) for name, what in _COUNTS.items()}
        self._prompt_s = Histogram("flashllm_prompt_seconds", "time of a prompt", buckets=_PROMPT_S, registry=registry)
        self._token_s = Histogram("flashllm_token_seconds", "time of a token", buckets=_TOKEN_S, registry=registry)
        gauges: tuple[tuple[str, str, Callable[[], int]], ...] = (
            ("flashllm_waiting_requests", "requests that have not begun", waiting),
            ("flashllm_kept_conversations", "conversations whose KV cache stays in memory", kept),
            ("flashllm_memory_bytes", "resident memory", memory),
            ("flashllm_memory_limit_bytes", "the limit it is planned for", lambda: memory_limit),
        )
        for name, meaning, value in gauges:
            Gauge(name, meaning, registry=registry).set_function(value)

    def answered(self, path: str, status: int) -> None:
        self._requests.labels(path, str(status)).inc()

    def see(self, event: Event) -> None:
        if not isinstance(event, Began | Chosen):
            return
        times = event.record.times
        found = {"read_bytes": times.bytes_read, "behind_bytes": times.behind_bytes}
        found |= {"cache_hits": times.hits, "cache_misses": times.misses}
        if isinstance(event.record, PrefillRecord):
            found |= {"prompt_tokens": event.record.tokens, "cached_tokens": event.record.reused_tokens}
            self._prompt_s.observe(times.total_ms / 1e3)
        else:
            drafted = event.record.pass_tokens
            # Without a pass of its own a token was foreseen; the first comes from the prompt's.
            found |= {"generated_tokens": 1, "accepted_tokens": drafted == 0 and not event.is_first}
            found |= {"drafted_tokens": max(0, drafted - 1), "rejected_bytes": times.rejected_bytes}
            self._token_s.observe(times.total_ms / 1e3)
        for name, count in found.items():
            self._counts[name].inc(count)

    def text(self) -> bytes:
        """All of it, in Prometheus's text format."""
        return generate_latest(self._registry)
