"""Figures for Prometheus: `hooks=[PrometheusHook()]`, and a small server for processes that have none."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Final

from semel.errors import ConfigurationError
from semel.face import Face
from semel.telemetry.series import IN_FLIGHT, SERIES, Book, Series
from semel.telemetry.watched import Watched

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError as missing:
    raise ConfigurationError(
        'semel.telemetry.prometheus needs prometheus-client: pip install "semel[telemetry]" brings it'
    ) from missing

__all__ = ["PrometheusHook"]

# From a store in the same process to one that is nearly given up; functions and publishing take longer.
_QUICK: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_SLOW: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BUCKETS: Final = {"semel_store_call_seconds": _QUICK}
# Weak on both sides: a registry holds its sheet, and the sheet's series know their registry.
_sheets: Final[weakref.WeakKeyDictionary[CollectorRegistry, weakref.ref[_Sheet]]] = (
    weakref.WeakKeyDictionary()
)


class PrometheusHook:
    """Give it in `hooks=` of Semel, AsyncSemel, Outbox, Relay and Inbox; hooks of one registry share their series.

    Labels are the operation, route, topic or consumer, never a key or an id. `tenant=True` adds the tenant to what is counted
    per call: only where tenants are few. At most `most` combinations of labels are kept for a series, the rest is `other`.
    """

    def __init__(
        self, registry: CollectorRegistry | None = None, *, tenant: bool = False, most: int = 500
    ) -> None:
        if most < 1:
            raise ConfigurationError(
                f"most is how many combinations of labels are kept, at least 1, not {most}"
            )
        self.registry = REGISTRY if registry is None else registry
        known = _sheets.get(self.registry)
        sheet = None if known is None else known()
        if sheet is None:
            sheet = _Sheet(self.registry, tenant=tenant, most=most)
            _sheets[self.registry] = weakref.ref(sheet)
        if sheet.book.tenant != tenant:
            raise ConfigurationError(
                f"a hook of this registry was made with tenant={not tenant}: labels are fixed by the first; make one hook "
                "and give it everywhere"
            )
        self._sheet = sheet

    def __call__(self, event: object) -> None:
        """Count one event."""
        self._sheet.take(event)

    def watch(self, once: Face) -> None:
        """Show in `semel_in_flight` how many functions run in `once` now, for as long as it lives."""
        self._sheet.watched.add(once)


class _Sheet(Collector):
    """The series of one registry."""

    def __init__(self, registry: CollectorRegistry, *, tenant: bool, most: int) -> None:
        self.book = Book(tenant=tenant, most=most)
        self.watched = Watched()
        self._metrics = {one: self._made(one, registry) for one in SERIES if one is not IN_FLIGHT}
        self._bound: dict[tuple[Series, tuple[str, ...]], Callable[[float], None]] = {}
        registry.register(self)

    def _made(self, series: Series, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
        name, labels = series.name, self.book.labels_of(series)
        match series.kind:
            case "counter":
                return Counter(name, series.help, labels, registry=registry)
            case "gauge":
                return Gauge(name, series.help, labels, registry=registry, multiprocess_mode="livemostrecent")
            case "histogram":
                return Histogram(
                    name, series.help, labels, registry=registry, buckets=_BUCKETS.get(name, _SLOW)
                )

    def take(self, event: object) -> None:
        for series, value, labels in self.book.read(event):
            write = self._bound.get((series, labels))
            if write is None:
                write = self._bound[series, labels] = self._writer(series, labels)
            write(value)

    def _writer(self, series: Series, labels: tuple[str, ...]) -> Callable[[float], None]:
        metric = self._metrics[series]
        child = metric.labels(*labels) if labels else metric
        match child:
            case Counter():
                return child.inc
            case Gauge():
                return child.set
            case _:
                return child.observe

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """What is read when somebody looks, rather than when it happens."""
        yield GaugeMetricFamily(IN_FLIGHT.name, IN_FLIGHT.help, value=self.watched.in_flight)
