"""What is told when an attempt does not end as it began: overtaken, left by its client, its error changed on the way."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from functools import wraps
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI, HTTPException
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from semel import AsyncSemel
from semel.calls import nothing_to_run
from semel.canonical import canonical
from semel.errors import CodecError, LeaseLost, NotRecorded, StoreUnavailable
from semel.http.asgi import IdempotencyMiddleware
from semel.http.capture import _comes_from
from semel.http.fastapi import idempotent, install
from semel.http.fingerprints import _small_json, parse_json
from semel.http.keys import core_key
from semel.recording import Recorder
from semel.run import Run
from semel.typed import CallOptions

LEASE = 0.05
Handler = Callable[[], Any]


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **given: Any) -> None:
        asyncio.run(test(*args, **given))

    return run


def _middleware(once: AsyncSemel, handler: Handler) -> Any:
    async def orders(request: Request) -> Response:
        return JSONResponse(await handler())

    inner = Starlette(routes=[Route("/orders", orders, methods=["POST"])])
    return IdempotencyMiddleware(
        inner, once=once, principal=lambda _: "ada", authenticated_outside=True, lease=LEASE
    )


def _decorated(once: AsyncSemel, handler: Handler) -> Any:
    app = FastAPI()

    @app.post("/orders")
    @idempotent(once=once, principal=lambda _: "ada", lease=LEASE)
    async def orders() -> Any:
        return await handler()

    return app


def _installed_inside(once: AsyncSemel, handler: Handler) -> Any:
    """FastAPI's own handlers see the error first, and make another one of it."""
    app = FastAPI()
    app.post("/orders")(handler)
    install(app)
    return IdempotencyMiddleware(app, once=once, principal=lambda _: "ada", authenticated_outside=True)


async def _post(app: Any, key: str = "k1", *, raises: bool = False) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=raises)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        return await client.post("/orders", headers={"Idempotency-Key": key})


@pytest.mark.parametrize("made", [_middleware, _decorated])
@in_a_loop
async def test_h16_an_owner_who_was_overtaken_says_that_the_key_is_in_progress(made: Any) -> None:
    address = f"memory://{uuid.uuid4().hex}"
    cut_short: list[bool] = []

    async with AsyncSemel(address) as once, AsyncSemel(address) as another:

        async def handler() -> None:
            time.sleep(2 * LEASE)  # as a process that is stopped: no heartbeat
            where = CallOptions(operation="http", result_type=bytes)
            call = another._call(core_key("k1", "ada"), nothing_to_run, (), where)
            await another._engine().acquire(call)
            try:
                await asyncio.sleep(10)  # the next heartbeat learns of it
            except asyncio.CancelledError:
                cut_short.append(True)
                raise

        answer = await _post(made(once, handler))
    assert cut_short == [True]
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:semel:problem:in-progress")


@in_a_loop
async def test_h18_what_fails_after_its_client_has_left_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    began, may_end = asyncio.Event(), asyncio.Event()

    async def handler() -> None:
        began.set()
        await may_end.wait()
        raise RuntimeError("too late")

    async with AsyncSemel("memory://") as once:
        app = _middleware(once, handler)
        asked = asyncio.create_task(_post(app))
        await began.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        (running,) = app._running.values()
        with caplog.at_level(logging.ERROR, "semel.http"):
            may_end.set()
            await running
    assert not app._running
    assert "failed after its client had left" in caplog.text


class Sold(Exception):
    """What a handler raises."""


async def told_otherwise() -> AsyncIterator[None]:
    try:
        yield
    except Sold:
        raise HTTPException(409, "sold out") from None


async def swallowed() -> AsyncIterator[None]:
    with suppress(Sold):
        yield


@pytest.mark.parametrize(("dependency", "status", "runs"), [(told_otherwise, 409, 1), (swallowed, 500, 2)])
@in_a_loop
async def test_h14_an_error_that_a_dependency_changed_is_recorded_as_it_was_told(
    dependency: Any, status: int, runs: int
) -> None:
    ran: list[int] = []
    app = FastAPI()
    async with AsyncSemel("memory://") as once:

        @app.post("/orders", dependencies=[Depends(dependency)])
        @idempotent(once=once, principal=lambda _: "ada")
        async def orders() -> None:
            ran.append(1)
            raise Sold

        first, again = await _post(app), await _post(app)
    assert (first.status_code, again.status_code, len(ran)) == (status, status, runs)
    if status == 409:
        assert again.content == first.content == b'{"detail":"sold out"}'
        assert again.headers["idempotency-replayed"] == "true"


@in_a_loop
async def test_h41_every_problem_is_an_instance_of_its_own() -> None:
    async def handler() -> None: ...

    async with AsyncSemel("memory://") as once:
        app = _middleware(once, handler)
        said = [(await _post(app, "not,one,key")).json() for _ in "ab"]
    names = {uuid.UUID(one.pop("instance")) for one in said}
    assert len(names) == 2
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1,"a":1}', b'{"a" : 1, "a":2}', b'{"a:":1,"b":"x:y"}', b'{"a":{"b":[1,{"c":":"}]}}', b'{"a":"\\u003a","a":1}',
        b'{"a":1.0}', b'{"a":1e2}', b'[1,2', b'"\xff"', b"NaN", b'{"\xc3\xa9":"\xf0\x9f\x98\x80"}', b'"\x01"', b"-0",
        b"[" * 40 + b"]" * 40, b'{"n":123456789012345678901234567890}', b" \n[true,null,false] ", b"\xef\xbb\xbf{}", b"{}x",
    ],
)  # fmt: skip
def test_h06_the_short_way_gives_the_form_of_the_long_one(body: bytes) -> None:
    try:
        whole: bytes | None = canonical(parse_json(body))
    except (ValueError, RecursionError, CodecError):
        whole = None
    assert _small_json(body) in (None, whole)


def test_h06_the_short_way_is_taken() -> None:
    assert (
        _small_json(b'{"b": "x:y", "a": [1, null]}')
        == json.dumps({"a": [1, None], "b": "x:y"}, separators=(",", ":")).encode()
    )


@pytest.mark.parametrize("made", [_middleware, _decorated, _installed_inside])
@pytest.mark.parametrize(
    ("error", "status"), [(NotRecorded("the store is gone"), 503), (LeaseLost("another has it"), 409)]
)
@in_a_loop
async def test_h17_a_problem_in_place_of_the_response_is_all_that_leaves_the_application(
    made: Any, error: Exception, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unrecorded(recorder: Recorder, run: Run, *_: Any) -> None:
        recorder._heart.remove(run)
        raise error

    async def handler() -> str:
        return "paid"

    async with AsyncSemel("memory://") as once:
        app = made(once, handler)
        await _post(app, "warm-up")
        monkeypatch.setattr(Recorder, "record", unrecorded)
        if made is _decorated and status == 409:  # its dependencies hear of it, and may roll back
            with pytest.raises(StoreUnavailable, match="in-progress"):
                await _post(app, raises=True)
        else:
            answer = await _post(app, raises=True)
            assert answer.status_code == status


@pytest.mark.parametrize("result", ["paid", object()], ids=["a response", "no response"])
@pytest.mark.parametrize(
    ("error", "ended"),
    [(NotRecorded("the store is gone"), "commit"), (LeaseLost("another has it"), "rollback")],
)
@in_a_loop
async def test_h17_a_dependency_commits_what_will_be_recorded_and_rolls_back_what_was_overtaken(
    error: Exception, ended: str, result: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unrecorded(recorder: Recorder, run: Run, *_: Any) -> None:
        recorder._heart.remove(run)
        raise error

    told: list[str] = []

    async def session() -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            told.append("rollback")
            raise
        told.append("commit")

    app = FastAPI()
    async with AsyncSemel("memory://") as once:

        @app.post("/orders", dependencies=[Depends(session)])
        @idempotent(once=once, principal=lambda _: "ada")
        async def orders() -> Any:
            return result

        monkeypatch.setattr(Recorder, "record", unrecorded)
        await _post(app)
    assert told == [ended]


@pytest.mark.parametrize("fails", [False, True])
@in_a_loop
async def test_h17_what_fails_because_of_a_problem_in_its_place_is_logged(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def unrecorded(recorder: Recorder, run: Run, *_: Any) -> None:
        recorder._heart.remove(run)
        raise NotRecorded("the store is gone")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await JSONResponse("paid")(scope, receive, send)
        except StoreUnavailable:
            if fails:
                raise ZeroDivisionError("an error in its own handling")  # noqa: B904 - as it happens
            raise

    async with AsyncSemel("memory://") as once:
        guarded = IdempotencyMiddleware(app, once=once, principal=lambda _: "ada", authenticated_outside=True)
        monkeypatch.setattr(Recorder, "record", unrecorded)
        with caplog.at_level(logging.WARNING, "semel.http"):
            assert (await _post(guarded, raises=True)).status_code == 503
    assert ("ZeroDivisionError: an error in its own handling" in caplog.text) is fails
    assert ("its response was not sent" in caplog.text) is fails


@pytest.mark.timeout(10)
def test_h17_errors_that_are_each_others_cause_are_followed_once_and_by_both_links() -> None:
    said, first, second = StoreUnavailable("said"), ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    assert not _comes_from(said, first)
    second.__context__ = said
    assert _comes_from(said, first), "beside a cause"
