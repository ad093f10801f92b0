"""The server's metrics in Prometheus' form."""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from ragspec.engine.handle import RequestHandle
from ragspec.engine.scheduler import Scheduler
from ragspec.reports.generation import Generation

FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
EACH = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)  # seconds a token


class Metrics:
    """Metrics of the texts of an engine, in a separate registry."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.registry = CollectorRegistry()
        common: dict[str, Any] = {"namespace": "ragspec", "registry": self.registry}
        counter: Callable[..., Counter] = partial(Counter, **common)
        for name, what, value in (
            ("waiting", "Requests that wait for a slot.", lambda: scheduler.waiting),
            ("live", "Requests that have a slot.", lambda: scheduler.live),
            ("max_batch_size", "Texts decoded at once.", lambda: scheduler.max_batch_size),
            ("prefix_cache_bytes", "Bytes of earlier texts.", lambda: scheduler.prefix_cache.bytes),
        ):
            Gauge(name, what, **common).set_function(value)
        ProcessCollector(registry=self.registry)  # memory, processor time and open files, on Linux
        self.requests = counter("requests", "Requests answered.", ("route", "status"))
        self.texts = counter("texts", "Texts ended.", ("reason",))
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = counter("cached_tokens", "Of these, not read again.")
        self.tokens = counter("tokens", "Tokens written.")
        self.forwards = counter("forwards", "Forwards of the model.")
        self.drafted = counter("drafted_tokens", "Tokens drafted, by source.", ("source",))
        self.accepted = counter("accepted_tokens", "Drafts accepted, by source.", ("source",))
        self.first = Histogram("first_token_seconds", "To the first.", buckets=FIRST, **common)
        self.each = Histogram("token_seconds", "Of each after it.", buckets=EACH, **common)

    def ended(self, reference: weakref.ref[RequestHandle], future: Future[Generation]) -> None:
        """Count a text that has ended."""
        if future.exception() is not None:
            self.texts.labels("error").inc()
            return
        generation, handle = future.result(), reference()
        self.texts.labels(generation.finish_reason).inc()
        if handle is not None and handle.first:
            self.first.observe(handle.first - handle.submitted)
            if len(generation.tokens) > 1:
                self.each.observe((handle.finished - handle.first) / (len(generation.tokens) - 1))
        report = generation.report
        for name in ("prompt_tokens", "cached_tokens", "tokens", "forwards"):
            getattr(self, name).inc(getattr(report, name))
        for name in ("drafted", "accepted"):
            for source, count in getattr(report, f"{name}_by_source").items():
                getattr(self, name).labels(source).inc(count)
