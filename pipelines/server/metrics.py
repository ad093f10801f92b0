"""The server's metrics in Prometheus' form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ragspec.engine.handle import RequestHandle

if TYPE_CHECKING:
    from ragspec.engine.scheduler import Scheduler

FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
EACH = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)  # seconds a token


class Metrics:
    """Metrics of the texts of an engine, in a separate registry."""

    def __init__(self, scheduler: Scheduler) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        for name, what, value in (
            ("waiting", "Requests that wait for a slot.", lambda: scheduler.waiting),
            ("live", "Requests that have a slot.", lambda: scheduler.live),
            ("max_batch_size", "Texts that are decoded at once.", lambda: scheduler.max_batch_size),
            (
                "prefix_cache_bytes",
                "Keys and values of earlier texts.",
                lambda: scheduler.prefix_cache.bytes,
            ),
        ):
            Gauge(f"ragspec_{name}", what, registry=registry).set_function(value)
        self.requests = Counter(
            "ragspec_requests", "Requests answered.", ["route", "status"], registry=registry
        )
        self.texts = Counter("ragspec_texts", "Texts ended.", ["reason"], registry=registry)
        self.prompt_tokens = Counter(
            "ragspec_prompt_tokens", "Tokens of prompts.", registry=registry
        )
        self.cached = Counter(
            "ragspec_cached_tokens", "Of these, not read again.", registry=registry
        )
        self.tokens = Counter("ragspec_tokens", "Tokens written.", registry=registry)
        self.forwards = Counter("ragspec_forwards", "Forwards of the model.", registry=registry)
        self.drafted = Counter(
            "ragspec_drafted_tokens", "Tokens drafted, by source.", ["source"], registry=registry
        )
        self.accepted = Counter(
            "ragspec_accepted_tokens", "Drafts accepted, by source.", ["source"], registry=registry
        )
        self.first = Histogram(
            "ragspec_first_token_seconds",
            "From a request to its first token.",
            buckets=FIRST,
            registry=registry,
        )
        self.each = Histogram(
            "ragspec_token_seconds", "Of a token after the first.", buckets=EACH, registry=registry
        )

    def ended(self, handle: RequestHandle) -> None:
        """Count a text that has ended."""
        if handle.future.exception() is not None:
            self.texts.labels("error").inc()
            return
        generation = handle.future.result()
        self.texts.labels(generation.finish_reason).inc()
        if handle.first:
            self.first.observe(handle.first - handle.submitted)
        if handle.first and len(generation.tokens) > 1:
            self.each.observe((handle.finished - handle.first) / (len(generation.tokens) - 1))
        report = generation.report
        self.prompt_tokens.inc(report.prompt_tokens)
        self.cached.inc(report.cached_tokens)
        self.tokens.inc(report.tokens)
        self.forwards.inc(report.forwards)
        for source, count in report.drafted_by_source.items():
            self.drafted.labels(source).inc(count)
        for source, count in report.accepted_by_source.items():
            self.accepted.labels(source).inc(count)

    def page(self) -> bytes:
        """Return all metrics as text."""
        return bytes(generate_latest(self.registry))
