"""Counts and durations for `/metrics`, in Prometheus' text form."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_LATENCIES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 60)
_RTFS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10)


class Metrics:
    """What a server counts. Each has its own registry."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, busy: Callable[[], int], waiting: Callable[[], int], rows: int) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "warble_requests", "HTTP requests by path and status", ("path", "status"),
            registry=registry,
        )  # fmt: skip
        self.failures = Counter(
            "warble_failures", "Speech requests that failed, by reason", ("reason",),
            registry=registry,
        )  # fmt: skip
        self.speech_seconds = Counter(
            "warble_speech_seconds", "Seconds of speech made", registry=registry
        )
        self.first_audio = Histogram(
            "warble_first_audio_seconds", "From the request to its first samples",
            buckets=_LATENCIES, registry=registry,
        )  # fmt: skip
        self.queue_wait = Histogram(
            "warble_queue_wait_seconds", "From the request to its row", buckets=_LATENCIES,
            registry=registry,
        )  # fmt: skip
        self.rtf = Histogram(
            "warble_rtf", "Time a request took on its row over the length of its speech",
            buckets=_RTFS, registry=registry,
        )  # fmt: skip
        Gauge("warble_rows_busy", "Rows in use", registry=registry).set_function(busy)
        Gauge("warble_queue_length", "Requests without a row", registry=registry).set_function(
            waiting
        )
        Gauge("warble_rows", "Rows there are", registry=registry).set(rows)
        self._started = time.monotonic()
        Gauge("warble_uptime_seconds", "Since the start", registry=registry).set_function(
            lambda: time.monotonic() - self._started
        )

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)
