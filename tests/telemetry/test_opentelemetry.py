"""The OpenTelemetry hook, read through a real SDK; and a trace that goes through outbox, broker and inbox."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from semel import KeyMismatch, Semel, StoreUnavailable
from semel.layers.layer import Layer
from semel.messaging import Inbox, Message, Outbox, Relay
from semel.model import Ask
from semel.store import Settings, open_store
from semel.telemetry.opentelemetry import OpenTelemetryHook, processing, traced
from semel.testing import services
from tests.telemetry.conftest import awaited, until


class Listener:
    """An SDK of the test's own: nothing global is touched."""

    def __init__(self, **options: Any) -> None:
        self._spans = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self._reader = InMemoryMetricReader()
        meters = MeterProvider([self._reader])
        self.hook = OpenTelemetryHook(tracer_provider=self.tracers, meter_provider=meters, **options)
        self.tracer = self.tracers.get_tracer("test")

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._spans.get_finished_spans()}

    @property
    def figures(self) -> dict[tuple[str, tuple[Any, ...]], Any]:
        data = self._reader.get_metrics_data()
        return {
            (metric.name, tuple((point.attributes or {}).values())): getattr(
                point, "value", getattr(point, "count", None)
            )
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        }


def test_calls_are_spans_and_everything_else_is_an_event_of_the_current_one() -> None:
    listener = Listener()
    once = Semel("memory://", operation="charge", hooks=[listener.hook])
    listener.hook.watch(once)
    with listener.tracer.start_as_current_span("request"):
        once.execute("secret-key", lambda: 1, request=1)
        once.execute("secret-key", lambda: 1, request=1)
        with pytest.raises(KeyMismatch):
            once.execute("secret-key", lambda: 1, request=2)
    spans = listener.spans
    request, call = spans["request"], spans["execute charge"]
    assert request.context is not None
    assert call.parent is not None
    assert call.parent.span_id == request.context.span_id
    assert (call.attributes or {})["semel.attempt"] == 1
    assert [event.name for event in request.events] == ["semel.Replayed", "semel.Refused"]
    assert (request.events[1].attributes or {})["semel.reason"] == "mismatch"
    assert "secret-key" not in repr([span.to_json() for span in spans.values()])
    assert listener.figures["semel.executions", ("charge",)] == 1
    assert listener.figures["semel.replays", ("charge",)] == 1
    assert listener.figures["semel.execution", ("charge",)] == 1
    assert listener.figures["semel.in_flight", ()] == 0
    assert not [name for name in spans if name.startswith("store")]


class Gone(Layer):
    async def claim(self, asks: list[Ask]) -> Any:  # type: ignore[override]  # a list will do here
        raise StoreUnavailable("gone")


def test_calls_to_the_store_are_spans_where_that_was_asked_for() -> None:
    listener = Listener(store_spans=True)
    Semel("memory://", hooks=[listener.hook]).execute("k", lambda: 1)
    with pytest.raises(StoreUnavailable):
        Semel(Gone(open_store("memory://", Settings(), "sync")), timeout=0.05, hooks=[listener.hook]).execute(
            "k", lambda: 1
        )
    assert listener.spans["store settle"].kind is SpanKind.CLIENT
    assert listener.spans["store claim"].status.status_code is StatusCode.ERROR


@awaited
async def test_a_message_carries_its_trace_to_the_consumer(
    tmp_path: Path, redis_server: services.RedisServer
) -> None:
    listener = Listener()
    url, sink = f"sqlite:///{tmp_path}/shop.db", f"{redis_server.url}?stream=t{uuid.uuid4().hex[:8]}"
    engine, outbox = create_engine(url), Outbox(url, hooks=[listener.hook])
    inbox = Inbox(url, consumer="shipping", hooks=[listener.hook])
    inbox.use(traced(tracer_provider=listener.tracers))
    seen: list[Message] = []

    @inbox.handler("orders")
    def ship(_: Session, message: Message) -> None:
        with listener.tracer.start_as_current_span("pack"):
            seen.append(message)

    outbox.create()
    with listener.tracer.start_as_current_span("request"), Session(engine) as session, session.begin():
        outbox.add(session, Message("orders", {"n": 1}))
    async with Relay(outbox, {"orders": sink}, hooks=[listener.hook]) as relay:
        await relay.drain()
    task = asyncio.create_task(inbox.run(sink))
    await until(lambda: "process orders" in listener.spans)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    spans = listener.spans
    request, process, pack = (spans[name].context for name in ("request", "process orders", "pack"))
    assert request is not None
    assert process is not None
    assert pack is not None
    assert [link.context.span_id for link in spans["process orders"].links] == [request.span_id]
    assert process.trace_id != request.trace_id, "linked, not continued"
    assert pack.trace_id == process.trace_id, "the handler's own spans are below it, in its thread too"
    assert spans["process orders"].kind is SpanKind.CONSUMER
    assert (spans["process orders"].attributes or {})["semel.admitted"] is True
    assert spans["publish orders"].kind is SpanKind.PRODUCER
    assert listener.figures["semel.relay.sent", ("orders",)] == 1
    assert listener.figures["semel.inbox.admitted", ("shipping", "orders")] == 1
    with processing(seen[0], child=True, tracer_provider=listener.tracers) as span:
        assert span.get_span_context().trace_id == request.trace_id, "a child goes on in the same trace"
    inbox.close()
    outbox.close()
    engine.dispose()


def test_a_message_without_a_trace_begins_one_and_a_failure_is_the_spans() -> None:
    listener = Listener()
    with (
        pytest.raises(ValueError, match="no"),
        processing(Message("orders", {}), child=True, tracer_provider=listener.tracers),
    ):
        raise ValueError("no")
    span = listener.spans["process orders"]
    assert span.links == ()
    assert span.parent is None
    assert span.status.status_code is StatusCode.ERROR
