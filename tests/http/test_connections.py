"""What a connection does is not the handler's outcome: senders that fail, middlewares in between, stores that fail midway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Message

from semel import AsyncSemel, StoreUnavailable
from semel.http.asgi import IdempotencyMiddleware
from semel.http.fastapi import idempotent
from semel.http.guard import Guard
from tests.http.conftest import Edge
from tests.http.shop import Ledger, starlette_shop
from tests.http.test_rows_keys import problem

SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/stream",
    "query_string": b"",
    "headers": [(b"idempotency-key", b"k1"), (b"x-user", b"ada")],
}


async def _ask(app: Any, send: Any, scope: dict[str, Any] = SCOPE) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    await app(dict(scope), receive, send)


async def _fails_to_send(error: Exception) -> None:
    ledger = Ledger()
    async with AsyncSemel("memory://") as once:
        app = IdempotencyMiddleware(
            starlette_shop(ledger),
            once=once,
            principal=lambda r: r.headers["x-user"],
            authenticated_outside=True,
        )
        sent: list[Message] = []

        async def broken(message: Message) -> None:
            sent.append(message)
            if len(sent) > 1:
                raise error

        await _ask(app, broken)
        whole: list[bytes] = []

        async def fine(message: Message) -> None:
            whole.append(message.get("body", b""))

        await _ask(app, fine)
        assert ledger.count("stream") == 1
        assert b"".join(whole) == b"one,two,three"


@pytest.mark.parametrize("error", [RuntimeError("closed"), OSError("gone")])
def test_h18_a_sender_that_fails_does_not_release_the_key(error: Exception) -> None:
    asyncio.run(_fails_to_send(error))


def test_h17_a_stream_that_cannot_be_noted_is_not_begun_and_not_run_again(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def noted(*_: Any) -> None:
        raise StoreUnavailable("not now")

    edge.open()
    with monkeypatch.context() as patch:
        patch.setattr(Guard, "_noted", noted)
        answer = edge.send("/stream")
    assert (answer.status_code, problem(answer)) == (503, "outcome-pending")
    again = edge.send("/stream")
    assert (again.status_code, problem(again)) == (422, "response-not-stored")
    assert edge.count("stream") == 1


def test_h20_server_sent_events_need_an_event_log(colour: str) -> None:
    edge = Edge(colour, "memory://")
    if colour == "async":

        async def events(_: Any) -> Any:
            async def pieces() -> AsyncIterator[bytes]:
                yield b"data: 1\n\n"
                yield b"data: 2\n\n"

            return StreamingResponse(pieces(), media_type="text/event-stream")

        from starlette.applications import Starlette

        app: Any = Starlette(routes=[Route("/events", events, methods=["POST"])])
    else:
        from flask import Flask, Response

        app = Flask("events")
        app.post("/events")(
            lambda: Response(iter([b"data: 1\n\n", b"data: 2\n\n"]), mimetype="text/event-stream")
        )
    edge.open(app=app)
    try:
        assert edge.send("/events").status_code == 500
    except Exception as error:
        assert "events=" in str(error)  # noqa: PT017 - some servers raise it, others answer
    edge.close()


def test_h13_a_route_that_does_not_exist_uses_no_key_up() -> None:
    edge = Edge("async", "memory://").open()
    unmatched = edge.send("/nowhere")
    assert unmatched.status_code == 404
    assert "idempotency-retention" not in unmatched.headers, "what is not kept names no retention"
    assert edge.send("/orders").status_code == 201
    edge.close()


async def _behind_a_middleware() -> None:
    calls: list[int] = []
    async with AsyncSemel("memory://") as once:
        app = FastAPI()

        @app.post("/pay")
        @idempotent(once=once, principal=lambda request: request.headers["x-user"])
        async def pay() -> PlainTextResponse:
            calls.append(1)
            return PlainTextResponse("paid")

        @app.middleware("http")
        async def breaks(request: Request, call_next: Any) -> Any:
            response = await call_next(request)
            if "x-break" in request.headers:
                raise RuntimeError("the middleware broke")
            return response

        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            keyed = {"idempotency-key": "k1", "x-user": "ada"}
            async with asyncio.timeout(5):
                first = await client.post("/pay", headers={**keyed, "x-break": "1"})
                again = await client.post("/pay", headers=keyed)
    assert (first.status_code, again.status_code, again.text) == (500, 200, "paid")
    assert calls == [1]


def test_h18_a_middleware_that_breaks_after_the_handler_hangs_nobody() -> None:
    asyncio.run(_behind_a_middleware())
