"""Prometheus' metrics, by vLLM's names if it has one, so that dashboards and routers made for it can read them."""

from __future__ import annotations

import os
from collections.abc import Callable

# Where several processes add their numbers up in files. The numbers here are of one process; in files they would go on
# with those of an ended process of the same number, which a container's first process always is.
for _name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
    os.environ.pop(_name, None)

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest  # noqa: E402

from draftwood.version import __version__  # noqa: E402

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SHORT = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0)
_LONG = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
# Depths of a tree that have their own counter.
_DEEPEST = 16


class Metrics:
    """All metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ["model_name", "engine"]

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(name, what, labels, registry=self.registry)

        def counter(name: str, what: str, *more: str) -> Counter:
            return Counter(name, what, [*labels, *more], registry=self.registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, what, labels, buckets=buckets, registry=self.registry)

        Gauge("draftwood_info", "Version", ["version"], registry=self.registry).labels(__version__).set(1)
        self.running = gauge("vllm:num_requests_running", "Texts that are being decoded")
        self.waiting = gauge("vllm:num_requests_waiting", "Texts that wait for room")
        self.usage = gauge("vllm:kv_cache_usage_perc", "Share of the caches' budget that running texts need, 0 to 1")
        self.up = gauge("draftwood_engine_up", "Whether the engine's process is ready")
        self.restarts = counter("draftwood_engine_restarts", "Engine processes that were started again")
        self.rejections = counter("vllm:admission_rejections", "Requests that were refused", "reason")
        self.prompt = counter("vllm:prompt_tokens", "Tokens of prompts")
        self.asked = counter("vllm:prefix_cache_queries", "Tokens of prompts that were looked up among ended texts")
        self.cached = counter("vllm:prefix_cache_hits", "Tokens of prompts that were known from ended texts")
        self.generated = counter("vllm:generation_tokens", "Tokens that were generated")
        self.success = counter("vllm:request_success", "Texts that ended", "finished_reason")
        self.drafts = counter("vllm:spec_decode_num_drafts", "Steps that drafted")
        self.draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Tokens that were drafted")
        self.accepted = counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted")
        self.accepted_at = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafted tokens that were accepted, by depth", "position"
        )
        self.first = histogram("vllm:time_to_first_token_seconds", "From request to first token", _LONG)
        self.between = histogram("vllm:inter_token_latency_seconds", "A step's time by its tokens", _SHORT)
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From request to end", _LONG)
        self.queue = histogram("vllm:request_queue_time_seconds", "From request to admission", _LONG)

    def text(self) -> bytes:
        """The answer of ``/metrics``."""
        return generate_latest(self.registry)


class ModelMetrics:
    """The metrics of one model; the server has one engine for each."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        self._all, self._labels = metrics, (name, "0")
        prompts = (metrics.prompt, metrics.asked, metrics.cached)
        for counter in (*prompts, metrics.generated, metrics.drafts, metrics.draft_tokens, metrics.accepted):
            counter.labels(*self._labels)
        metrics.restarts.labels(*self._labels)

    def follow(self, running: Callable[[], int], waiting: Callable[[], int], usage: Callable[[], float]) -> None:
        """Gauges ask when they are read."""
        self._all.running.labels(*self._labels).set_function(running)
        self._all.waiting.labels(*self._labels).set_function(waiting)
        self._all.usage.labels(*self._labels).set_function(usage)

    def up(self, ready: bool) -> None:
        self._all.up.labels(*self._labels).set(ready)

    def restarted(self) -> None:
        self._all.restarts.labels(*self._labels).inc()

    def rejected(self, reason: str = "queue_full") -> None:
        self._all.rejections.labels(*self._labels, reason).inc()

    def began(self, waited_seconds: float, prompt_tokens: int, cached_tokens: int) -> None:
        """A text was admitted."""
        self._all.queue.labels(*self._labels).observe(waited_seconds)
        self._all.prompt.labels(*self._labels).inc(prompt_tokens)
        self._all.asked.labels(*self._labels).inc(prompt_tokens)
        self._all.cached.labels(*self._labels).inc(cached_tokens)

    def first_token(self, seconds: float) -> None:
        self._all.first.labels(*self._labels).observe(seconds)

    def inter_token(self, seconds: float, tokens: int) -> None:
        for _ in range(tokens):
            self._all.between.labels(*self._labels).observe(seconds)

    def drafted(self, nodes: int, accepted: int, tokens: int) -> None:
        """One step."""
        self._all.generated.labels(*self._labels).inc(tokens)
        if nodes:
            self._all.drafts.labels(*self._labels).inc()
            self._all.draft_tokens.labels(*self._labels).inc(nodes)
            self._all.accepted.labels(*self._labels).inc(accepted)
            for depth in range(min(accepted, _DEEPEST)):
                self._all.accepted_at.labels(*self._labels, str(depth)).inc()

    def ended(self, reason: str, seconds: float) -> None:
        self._all.success.labels(*self._labels, reason).inc()
        self._all.whole.labels(*self._labels).observe(seconds)
