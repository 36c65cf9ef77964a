"""Figures, spans and events for OpenTelemetry, with its API alone: which SDK listens, if any, is the application's choice."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from semel.errors import ConfigurationError
from semel.face import Face
from semel.hooks import Executed, HookEvent, StoreCalled
from semel.telemetry.series import IN_FLIGHT, SERIES, Book, Series, route_of
from semel.telemetry.watched import Watched

try:
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
except ModuleNotFoundError as missing:
    raise ConfigurationError(
        'semel.telemetry.opentelemetry needs opentelemetry-api: pip install "semel[telemetry]" brings it'
    ) from missing

if TYPE_CHECKING:
    from semel.messaging.consumer import Middleware
    from semel.messaging.message import Message

__all__ = ["OpenTelemetryHook", "processing", "traced"]

_NAME: Final = "semel"
_Attributes = Mapping[str, str | bool | int | float]


class OpenTelemetryHook:
    """Give it in `hooks=` of Semel, AsyncSemel, Outbox, Relay and Inbox.

    Every event is counted under the names that Prometheus gets, spelled `semel.executions`, `semel.relay.lag`. Of a call that
    ran and of a batch that was published there is a span; everything else is an event of the span that is current where it
    happens. `store_spans=True` adds a span for each call to the store. Without providers the global ones are taken.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        tenant: bool = False,
        most: int = 500,
        store_spans: bool = False,
    ) -> None:
        self._tracer = trace.get_tracer(_NAME, tracer_provider=tracer_provider)
        self._meter = metrics.get_meter(_NAME, meter_provider=meter_provider)
        self._book = Book(tenant=tenant, most=most)
        self._write = {one: self._writer(one) for one in SERIES if one is not IN_FLIGHT}
        self._store_spans = store_spans
        self.watched = Watched()
        self._meter.create_observable_gauge(
            _spelled(IN_FLIGHT), [self._in_flight], description=IN_FLIGHT.help
        )

    def __call__(self, event: object) -> None:
        """Count one event, and say it in the trace."""
        for series, value, labels in self._book.read(event):
            self._write[series](value, dict(zip(self._book.labels_of(series), labels, strict=True)))
        self._tell(event)

    def watch(self, once: Face) -> None:
        """Show in `semel.in_flight` how many functions run in `once` now, for as long as it lives."""
        self.watched.add(once)

    def _in_flight(self, _: CallbackOptions) -> Iterable[Observation]:
        return (Observation(self.watched.in_flight),)

    def _writer(self, series: Series) -> Callable[[float, dict[str, str]], None]:
        name, text = _spelled(series), series.help
        match series.kind:
            case "counter":
                return self._meter.create_counter(name, description=text).add
            case "gauge":
                return self._meter.create_gauge(name, description=text).set
            case "histogram":
                return self._meter.create_histogram(name, unit="s", description=text).record

    # --------------------------------------------------------------------------------------------- in the trace
    def _tell(self, event: Any) -> None:
        match event:
            case Executed():
                self._span(f"execute {event.scope.operation}", event.seconds, _attributes(event))
            case StoreCalled():
                if self._store_spans:
                    said = _attributes(event)
                    self._span(f"store {event.verb}", event.seconds, said, SpanKind.CLIENT, event.error)
            case _ if type(event).__name__ == "Delivered" and hasattr(event, "lane"):
                self._span(
                    f"publish {route_of(event.lane)}", event.seconds, _attributes(event), SpanKind.PRODUCER
                )
            case _:
                span = trace.get_current_span()
                if span.is_recording():
                    span.add_event(f"semel.{type(event).__name__}", _attributes(event))

    def _span(
        self,
        name: str,
        seconds: float,
        attributes: _Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
        error: BaseException | None = None,
    ) -> None:
        """A span of something that is over: an event says how long it took."""
        now = time.time_ns()
        span = self._tracer.start_span(
            name, kind=kind, attributes=attributes, start_time=now - int(seconds * 1e9)
        )
        if error is not None:
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        span.end(now)


# ------------------------------------------------------------------------------------------------------- messages
@contextmanager
def processing(
    message: Message, *, child: bool = False, tracer_provider: TracerProvider | None = None
) -> Iterator[Span]:
    """A span around the handling of a message, linked to the span in which it was added to the outbox.

    `child=True` makes it a child of that span instead: one trace from the request to the last consumer, however late.
    """
    sender = propagate.extract(message.headers)
    origin = trace.get_current_span(sender).get_span_context()
    with trace.get_tracer(_NAME, tracer_provider=tracer_provider).start_as_current_span(
        f"process {message.topic}",
        context=sender if child and origin.is_valid else None,
        kind=SpanKind.CONSUMER,
        links=[Link(origin)] if origin.is_valid and not child else [],
        attributes={
            "messaging.system": _NAME,
            "messaging.operation.type": "process",
            "messaging.destination.name": message.topic,
            "messaging.message.id": message.id,
        },
    ) as span:
        yield span


def traced(*, child: bool = False, tracer_provider: TracerProvider | None = None) -> Middleware:
    """`inbox.use(traced())`: every message is handled in a span of `processing`."""

    async def middleware(message: Message, call_next: Callable[[Message], Awaitable[bool]]) -> bool:
        with processing(message, child=child, tracer_provider=tracer_provider) as span:
            admitted = await call_next(message)
            span.set_attribute("semel.admitted", admitted)
            return admitted

    return middleware


# --------------------------------------------------------------------------------------------------------- words
def _spelled(series: Series) -> str:
    """`semel_relay_sent_total` is `semel.relay.sent` there; the unit and the kind are told apart from the name."""
    first, *rest = series.name.removesuffix("_total").removesuffix("_seconds").split("_")
    family = rest[0] if rest[0] in {"http", "grpc", "outbox", "relay", "inbox", "store"} else None
    tail = "_".join(rest[1:] if family else rest)
    return ".".join(part for part in (first, family, tail) if part)


def _attributes(event: object) -> _Attributes:
    """Its plain fields; of a scope what is not secret; of an error its class. Never a key."""
    said: dict[str, str | bool | int | float] = {}
    if isinstance(event, HookEvent):
        said["semel.operation"] = event.scope.operation
        said["semel.tenant"] = event.scope.tenant
    for name in getattr(event, "__dataclass_fields__", ()):
        value = getattr(event, name)
        if name != "key" and isinstance(value, str | bool | int | float):
            said[f"semel.{name}"] = value
        elif isinstance(value, BaseException):
            said[f"semel.{name}"] = type(value).__name__
    return said
