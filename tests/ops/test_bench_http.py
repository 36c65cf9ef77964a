"""The page of ./bench http: every package has a row, and what is not comparable says so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benches import http
from benches.core_parts.measure import Figure, Term
from benches.core_parts.page import Report, Section
from benches.http_parts import apps, peers, steps
from benches.http_parts.floor import FLOORS, floored
from benches.http_parts.load import BODY, Rate, Target
from benches.http_parts.peer_apps import APPS
from semel.testing import services

ROOT = Path(__file__).resolve().parents[2]


def figures() -> list[Figure]:
    made = []
    for name in APPS:
        for kind in peers.KINDS.values():
            wrong = "answers 422; " if (name, kind) == ("ichido", "replay") else ""
            rate, bare = Term("with it", 500.0, "/s"), Term("bare", 1000.0, "/s")
            if name != "bare":
                made.append(Figure(f"{kind}: {name}", rate, bare, note=f"{wrong}CPU 99 against 50 µs"))
    return made


def test_the_page_has_a_row_for_every_package(tmp_path: Path) -> None:
    section = Section("2026-01-01", "./bench http peers", "0.0", {"semel": "0"}, figures(), {"slow": "no"})
    http._write(Report({"peers": section}), tmp_path)
    text = (tmp_path / "http.md").read_text("utf-8")
    for name in APPS:
        assert (f"| {name} | 0.50 · 99 µs (1.98 ×)" in text) is (name != "bare")
    assert "answers 422: 0.50 · 99 µs (1.98 ×)" in text
    assert "left out: slow: no" in text
    assert "<svg" in (tmp_path / "http-peers.svg").read_text("utf-8")
    assert (
        msgspec.json.decode((tmp_path / "http.json").read_bytes(), type=Report).sections["peers"] == section
    )


def test_a_rate_that_did_other_work_is_noted() -> None:
    rate = Rate(1.0, 1.0, 1.0, 1.0, errors=0.0, ran=1.0)
    assert peers._note(Target("one", 0, 0, "fresh"), rate) == ""
    assert "runs the handler" in peers._note(Target("one", 0, 0, "replay"), rate)
    assert "only" in peers._note(Target("one", 0, 0, "none"), rate._replace(ran=0.2))


def test_every_package_is_locked() -> None:
    lock = (ROOT / "requirements" / "bench-http.txt").read_text("utf-8")
    for package in peers.PACKAGES:
        assert f"\n{package}==" in lock


@pytest.mark.parametrize("level", FLOORS)
def test_a_floor_runs_the_handler_once_and_repeats_its_response(level: str) -> None:
    """Else it would be no floor under the same work."""

    async def asked(app: Any) -> list[Any]:
        said: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": BODY.encode(), "more_body": False}

        async def send(message: Any) -> None:
            said.append(message)

        headers = [
            (b"authorization", b"user-1"),
            (b"idempotency-key", b"key-1"),
            (b"content-type", b"application/json"),
        ]
        scope = {"type": "http", "method": "POST", "path": "/orders", "query_string": b"", "headers": headers}
        await app(scope, receive, send)
        return said

    async def twice(url: str) -> tuple[list[Any], list[Any]]:
        floor = floored(apps.starlette(), url, level)
        try:
            return await asked(floor), await asked(floor)
        finally:
            await floor.aclose()

    before = apps.RUNS[0]
    with services.redis() as server:
        first, again = asyncio.run(twice(server.url))
    assert apps.RUNS[0] == before + 1
    assert (first[0]["status"], first[1]["body"]) == (again[0]["status"], again[1]["body"])
    assert first[0]["status"] == 201


def test_every_stretch_of_a_request_is_timed_and_what_redis_spends() -> None:
    found = steps.bench(quick=True)
    assert len(found) == 7 + 2
    assert all(figure.ours.value > 0 for figure in found)
