"""A face is closed while handlers run: it waits for them, and each of them ends as it would have otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from semel import AsyncSemel, current_run
from semel.http.asgi import IdempotencyMiddleware
from semel.model import State
from semel.steps import decode

ASKED = {
    "type": "http",
    "http_version": "1.1",
    "scheme": "http",
    "method": "POST",
    "path": "/charge",
    "raw_path": b"/charge",
    "query_string": b"",
    "headers": [(b"idempotency-key", b"abcdefgh12345678"), (b"content-type", b"application/json")],
    "server": ("localhost", 80),
    "client": ("localhost", 1),
}
App = Callable[[Any, Any, Any], Awaitable[None]]


async def _answer(send: Any, status: int, *pieces: bytes) -> None:
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _asked(app: App, once: AsyncSemel, **rules: Any) -> list[Any]:
    """What one keyed request is answered."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    middleware = IdempotencyMiddleware(app, once=once, authenticated_outside=True, anonymous=True, **rules)
    await middleware(dict(ASKED), receive, send)
    return sent


async def _closed_meanwhile(once: AsyncSemel, app: App, **rules: Any) -> list[Any]:
    """As `_asked`, by somebody whose face is closed while the handler runs."""
    began, goes_on = asyncio.Event(), asyncio.Event()

    async def handler(scope: Any, receive: Any, send: Any) -> None:
        began.set()
        await goes_on.wait()
        await app(scope, receive, send)

    asked = asyncio.create_task(_asked(handler, once, **rules))
    waiting = asyncio.create_task(began.wait())
    await asyncio.wait((asked, waiting), return_when=asyncio.FIRST_COMPLETED)
    assert not asked.done(), asked
    closing = asyncio.create_task(once.aclose())
    await asyncio.sleep(0.05)
    assert not closing.done()
    goes_on.set()
    try:
        return await asked
    finally:
        await closing


async def _record(url: str) -> Any:
    async with AsyncSemel(url) as other:
        (record,) = await other.find(states=[state.value for state in State])
        return record


@pytest.mark.parametrize(
    ("effects", "state"), [("db", State.RELEASED), ("opaque", State.FAILED)], ids=["freed", "kept"]
)
def test_h15_a_handler_that_raises_while_its_face_is_closed_ends_as_ever(effects: str, state: State) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("the card was refused")

    async def main() -> None:
        url = f"memory://closing-{effects}"
        with pytest.raises(ValueError, match="card"):
            await _closed_meanwhile(AsyncSemel(url), app, effects=effects)
        assert (await _record(url)).state is state

    asyncio.run(main())


def test_h17_a_stream_that_begins_while_its_face_is_closed_is_sent_and_recorded() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await _answer(send, 200, b"one", b"two")

    async def main() -> None:
        sent = await _closed_meanwhile(AsyncSemel("memory://closing-stream"), app)
        assert sent[0]["status"] == 200
        assert b"".join(each.get("body", b"") for each in sent) == b"onetwo"
        assert (await _record("memory://closing-stream")).state is State.DONE

    asyncio.run(main())


def test_R26_a_request_that_is_given_back_keeps_a_step_that_ended_after_its_response() -> None:
    made: list[str] = []
    end = asyncio.Event()
    left: list[asyncio.Task[Any]] = []

    async def order() -> None:
        made.append("order")

    async def charge() -> None:
        await end.wait()
        made.append("charge")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        run: Any = current_run()
        await run.step("order", order)
        left.append(asyncio.create_task(run.step("charge", charge)))
        await asyncio.sleep(0)
        await _answer(send, 503)

    async def main() -> None:
        async with AsyncSemel("memory://closing-left") as once:
            sent = await _asked(app, once)
            assert sent[0]["status"] == 503
            assert (await _record("memory://closing-left")).state is State.RUNNING
            end.set()
            await left[0]
        record = await _record("memory://closing-left")
        assert record.state is State.RELEASED
        assert {name: step.phase for name, step in decode(record.steps).items()} == {
            "order": "done",
            "charge": "done",
        }

    asyncio.run(main())
