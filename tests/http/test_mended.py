"""Faults that were found by reading, each with the test that fails without its repair."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest
from flask import Flask, request

from semel import LeaseLost, Semel
from semel.http.flask import idempotent
from semel.http.guard import Guard
from semel.recording import Recorder
from semel.run import Run
from tests.http.conftest import Edge
from tests.http.test_rows_keys import problem


def test_h33_background_tasks_do_not_follow_a_response_that_was_overtaken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def overtaken(recorder: Recorder, run: Run, *_: Any) -> None:
        recorder._heart.remove(run)
        raise LeaseLost("somebody else owns the key")

    edge = Edge("async", "memory://").open()
    edge.send("/empty", "warm-up")
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "record", overtaken)
        answer = edge.send("/orders")
    assert (answer.status_code, problem(answer)) == (409, "in-progress")
    assert edge.ledger.after == []
    edge.close()


def test_a_flask_view_reads_the_stream_itself() -> None:
    app = Flask("streams")
    with Semel("memory://") as once:

        @app.post("/echo")
        @idempotent(once=once, principal=lambda _: "ada")
        def echo() -> bytes:
            return request.stream.read()

        answer = app.test_client().post("/echo", data=b"payload", headers={"Idempotency-Key": "k1"})
    assert answer.data == b"payload"


def test_h25_a_chunked_body_without_an_end_is_refused_under_wsgi() -> None:
    edge = Edge("sync", "memory://").open()
    told: list[str] = []
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/orders",
        "HTTP_IDEMPOTENCY_KEY": "k1",
        "HTTP_X_USER": "ada",
        "HTTP_TRANSFER_ENCODING": "chunked",
        "wsgi.input": io.BytesIO(b"5\r\nhello\r\n0\r\n\r\n"),
    }
    edge._client._transport.app(environ, lambda status, *_: told.append(status))
    assert told == ["400 Bad Request"]
    assert edge.count("orders") == 0
    edge.close()


_DJANGO = """
import asyncio, django
from django.conf import settings
settings.configure(SECRET_KEY="x")
django.setup()
from django.core.exceptions import SynchronousOnlyOperation
from semel import AsyncSemel
from semel.http.django import _plan, user_id

class User:
    pk, is_authenticated = 7, True

class Request:
    @property
    def user(self):
        raise SynchronousOnlyOperation("the database is asked for it")
    async def auser(self):
        return User()

async def main():
    async with AsyncSemel("memory://") as once:
        plan = _plan({"async_once": once, "principal": user_id}, is_async=True, guarded=True)
        print(await plan.principal(Request()))

asyncio.run(main())
"""


def test_django_under_asgi_asks_for_the_user_without_blocking() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _DJANGO], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.returncode) == ("7\n", 0), done.stderr


def test_h12_the_layers_own_retryable_answer_names_no_retention() -> None:
    edge = Edge("async", "memory://").open()
    guard: Guard = edge.plan.fallback
    body = b'{"type":"urn:semel:problem:in-progress","retryable":true}'
    assert guard.word(409, [(b"content-type", b"application/problem+json")], body) == "release"
    assert guard.word(409, [(b"content-type", b"application/json")], body) == "store"
    edge.close()
