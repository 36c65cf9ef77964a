"""The Prometheus hook on real runs: what happened is what a scrape says."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from semel import (
    AsyncSemel,
    ConfigurationError,
    InProgress,
    KeyMismatch,
    NotRecorded,
    Semel,
    StoreUnavailable,
)
from semel.http.asgi import IdempotencyMiddleware
from semel.layers.layer import Layer
from semel.model import Answer, Settle
from semel.store import Settings, open_store
from semel.telemetry.prometheus import PrometheusHook
from tests.telemetry.conftest import Figures, awaited, until


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/semel.db"


def test_executions_replays_failures_and_refusals_are_counted(figures: Figures, url: str) -> None:
    def broken() -> None:
        raise ValueError("no")

    with Semel(url, operation="charge", hooks=[figures.hook]) as once:
        once.execute("a", lambda: 1, request={"n": 1})
        once.execute("a", lambda: 1, request={"n": 1})
        once.execute("a", lambda: 1, request={"n": 1}, tenant="other")
        with pytest.raises(ValueError, match="no"):
            once.execute("b", broken)
        with pytest.raises(KeyMismatch):
            once.execute("a", lambda: 1, request={"n": 2})
    assert figures("semel_executions_total", operation="charge") == 2
    assert figures("semel_execution_seconds_count", operation="charge") == 2
    assert figures("semel_replays_total", operation="charge") == 1
    assert figures("semel_failures_total", operation="charge", decision="release") == 1
    assert figures("semel_refusals_total", operation="charge", reason="mismatch") == 1
    assert figures("semel_store_call_seconds_count", verb="claim", outcome="ok") == 5
    assert figures("semel_store_items_total", verb="settle") == 3
    assert 0 < figures("semel_store_call_seconds_sum", verb="claim", outcome="ok") < 10


@awaited
async def test_contention_and_what_is_in_flight_can_be_seen(figures: Figures, url: str) -> None:
    started, go = asyncio.Event(), asyncio.Event()

    async def slow() -> str:
        started.set()
        await go.wait()
        return "done"

    async with AsyncSemel(url, hooks=[figures.hook], coalesce=False) as once:
        figures.hook.watch(once)
        assert figures("semel_in_flight") == 0
        first = asyncio.create_task(once.execute("k", slow))
        await started.wait()
        assert figures("semel_in_flight") == 1
        with pytest.raises(InProgress):
            await once.execute("k", slow)
        waiter = asyncio.create_task(once.execute("k", slow, wait=10))
        await until(lambda: figures("semel_contended_total", operation="default", waits="yes") >= 1)
        go.set()
        await asyncio.gather(first, waiter)
        assert figures("semel_in_flight") == 0
    assert figures("semel_contended_total", operation="default", waits="no") == 1
    assert figures("semel_replays_total", operation="default") == 1


def test_a_take_over_and_the_lost_lease_are_counted(figures: Figures, url: str) -> None:
    """The first owner does not renew (its lease is over before its first heartbeat is due), the second takes over."""
    heir = Semel(url, hooks=[figures.hook])

    def overtaken() -> str:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                return str(heir.execute("k", lambda: "heir", wait=0).value)
            except InProgress:
                time.sleep(0.01)
        raise AssertionError("the lease never ended")

    with Semel(url, lease=0.1, hooks=[figures.hook]) as once:
        once._engine().heart.add = lambda run: None  # type: ignore[method-assign]  # this owner's heart stands still
        with pytest.raises(Exception, match="another"):
            once.execute("k", overtaken)
    heir.close()
    assert figures("semel_takeovers_total", operation="default") == 1
    assert figures("semel_leases_lost_total", operation="default") == 1
    assert figures("semel_executions_total", operation="default") == 1


class Deaf(Layer):
    """A store that takes claims and no settles."""

    async def settle(self, ends: list[Settle]) -> list[Answer | Exception]:  # type: ignore[override]  # a list will do here
        raise StoreUnavailable("no")


def test_an_effect_that_is_not_recorded_is_an_alarm_of_its_own(figures: Figures, url: str) -> None:
    store = Deaf(open_store(url, Settings(), "sync"))
    once = Semel(store, settle_timeout=0.1, hooks=[figures.hook])
    with pytest.raises(NotRecorded):
        once.execute("k", lambda: 1)
    assert figures("semel_unrecorded_total", operation="default") == 1
    assert figures("semel_store_call_seconds_count", verb="settle", outcome="error") >= 1
    once.close()


def test_what_runs_without_protection_is_counted(figures: Figures) -> None:
    with pytest.warns(UserWarning, match="enabled=False"):
        once = Semel("memory://", enabled=False, hooks=[figures.hook])
    once.execute("k", lambda: 1)
    assert figures("semel_unprotected_total", operation="default") == 1


def test_two_hooks_of_one_registry_count_together_and_labels_are_fixed_by_the_first() -> None:
    registry = CollectorRegistry()
    for _ in range(2):
        Semel("memory://", hooks=[PrometheusHook(registry)]).execute("k", lambda: 1)
    assert registry.get_sample_value("semel_executions_total", {"operation": "default"}) == 2
    with pytest.raises(ConfigurationError, match="tenant=False"):
        PrometheusHook(registry, tenant=True)
    with pytest.raises(ConfigurationError, match="at least 1"):
        PrometheusHook(CollectorRegistry(), most=0)


def test_a_tenant_is_a_label_only_where_it_was_asked_for() -> None:
    registry = CollectorRegistry()
    once = Semel("memory://", hooks=[PrometheusHook(registry, tenant=True)])
    once.execute("k", lambda: 1, tenant="acme")
    labels = {"operation": "default", "tenant": "acme"}
    assert registry.get_sample_value("semel_executions_total", labels) == 1


@awaited
async def test_problems_of_the_http_layer_are_counted(figures: Figures) -> None:
    async def pay(_: Request) -> JSONResponse:
        return JSONResponse({"paid": True})

    inner = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    async with AsyncSemel("memory://", hooks=[figures.hook]) as once:
        app = IdempotencyMiddleware(
            inner, once=once, required=True, anonymous=True, authenticated_outside=True
        )
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            assert (await client.post("/pay")).status_code == 400
            for _ in range(2):
                headers = {"Idempotency-Key": "k" * 20}
                assert (await client.post("/pay", headers=headers)).status_code == 200
    assert figures("semel_http_problems_total", problem="key-missing", status="400") == 1
    executed = [m for m in figures.registry.collect() if m.name == "semel_executions"]
    assert sum(sample.value for sample in executed[0].samples if sample.name.endswith("_total")) == 1
