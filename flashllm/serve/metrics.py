"""Counters of the server, for Prometheus. Numbers alone: nothing of any request's text."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from flashllm.generate.session import PrefillRecord
from flashllm.serve.worker import Began, Chosen, Event

_TOKEN_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_PROMPT_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Counters of one server. `see` is called by one thread at a time."""

    def __init__(
        self,
        *,
        waiting: Callable[[], int],
        kept: Callable[[], int],
        memory: Callable[[], int],
        memory_limit: int,
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "flashllm_requests", "answers, by path and status", ["path", "status"], registry=registry
        )
        self._prompt = Counter("flashllm_prompt_tokens", "prompt tokens computed", registry=registry)
        self._cached = Counter(
            "flashllm_cached_tokens", "prompt tokens taken from kept conversations", registry=registry
        )
        self._new = Counter("flashllm_generated_tokens", "tokens generated", registry=registry)
        self._drafted = Counter("flashllm_drafted_tokens", "tokens drafted and verified", registry=registry)
        self._accepted = Counter("flashllm_accepted_tokens", "drafted tokens that were right", registry=registry)
        self._rejected = Counter(
            "flashllm_rejected_bytes", "bytes read for drafted tokens that were wrong", registry=registry
        )
        self._read = Counter("flashllm_read_bytes", "bytes read from flash", registry=registry)
        self._hits = Counter("flashllm_cache_hits", "active neurons found in the cache", registry=registry)
        self._misses = Counter("flashllm_cache_misses", "active neurons read from flash", registry=registry)
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
        """Count what a record says."""
        if not isinstance(event, Began | Chosen):
            return
        times = event.record.times
        if isinstance(event.record, PrefillRecord):
            self._prompt.inc(event.record.tokens)
            self._cached.inc(event.record.reused_tokens)
            self._prompt_s.observe(times.total_ms / 1e3)
        else:
            self._new.inc()
            self._token_s.observe(times.total_ms / 1e3)
            self._drafted.inc(max(0, event.record.pass_tokens - 1))
            # Without a pass of its own a token was foreseen; the first comes from the prompt's.
            self._accepted.inc(event.record.pass_tokens == 0 and not event.is_first)
            self._rejected.inc(times.rejected_bytes)
        self._read.inc(times.bytes_read)
        self._hits.inc(times.hits)
        self._misses.inc(times.misses)

    def text(self) -> bytes:
        """All of it, in Prometheus's text format."""
        return generate_latest(self._registry)
