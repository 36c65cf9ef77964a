"""Rows on who is refused, what is read and what is counted before a handler runs; each was once passed by somebody."""

from __future__ import annotations

import asyncio
import io
import sys
import time
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from flask import Flask, Response
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from semel import AsyncSemel, ConfigurationError, Semel
from semel.http import intake
from semel.http.asgi import IdempotencyMiddleware
from semel.http.fastapi import idempotent as fastapi_idempotent
from semel.http.flask import idempotent as flask_idempotent
from semel.http.keys import read_key
from semel.http.problem import Problem
from semel.http.wsgi import IdempotencyMiddleware as Wsgi
from tests.http.conftest import Edge
from tests.http.frames import plain_user
from tests.http.test_corners import HEADERS, ask, django_site, marks, once
from tests.http.test_rows_keys import problem

__all__ = ["django_site", "once"]  # fixtures


def failing(edge: Edge, *args: Any, **given: Any) -> None:
    """A request that its caller is told to have configured wrongly."""
    try:
        assert edge.send(*args, **given).status_code == 500
    except ConfigurationError:
        assert edge.colour == "sync"


# ------------------------------------------------------------------------------------------------------------ resolvers


@pytest.mark.parametrize("answer", [PlainTextResponse("no", 403), "False", (False,), 1])
def test_r33_what_merely_counts_as_true_does_not_authorize(shop: Edge, answer: Any) -> None:
    shop.open(authorize=lambda _: answer)
    failing(shop, "/orders")
    assert shop.count("orders") == 0


@pytest.mark.parametrize("asked", ["authorize", "principal", "tenant", "key"])
def test_r33_a_resolver_that_raises_permission_error_refuses(shop: Edge, asked: str) -> None:
    def refuse(_: Any) -> Any:
        raise PermissionError

    given: dict[str, Any] = {asked: refuse}
    shop.open(**given)
    answer = shop.send("/orders")
    assert (answer.status_code, problem(answer), shop.count("orders")) == (403, "not-authorized", 0)


@pytest.mark.parametrize("said", ["1", "0", "1, 1", "0, 1", "yes"])
def test_h39_whatever_early_data_says_it_is_early(shop: Edge, said: str) -> None:
    shop.open()
    answer = shop.send("/orders", headers={"Early-Data": said})
    assert (answer.status_code, problem(answer), shop.count("orders")) == (425, "too-early", 0)


# ----------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (b'"a1";v=1', "a1"),
        (b'"a1" ; v', "a1"),
        (b'"a1";v=?1;w=token/x;x="two, words; \\"q\\"";y=:YQ==:;z=-1.5;*k', "a1"),
        (b'"a1";v=1,"b1"', None),
        (b'"a1";', None),
        (b'"a1";V=1', None),
        (b'"a1";v=', None),
        (b'"a1";v="open', None),
        (b'"a1" x', None),
    ],
)
def test_h02_only_parameters_may_follow_a_quoted_key(line: bytes, key: str | None) -> None:
    found = read_key([line])
    assert (None if isinstance(found, Problem) else found) == key


def minted(seconds_ago: float) -> str:
    made = int((time.time() - seconds_ago) * 1000)
    return str(uuid.UUID(int=(made << 80) | (7 << 76) | (0b10 << 62) | 5))


def test_h14_h35_a_handlers_longer_retention_counts_for_dated_keys_too(
    shop: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.open(retention=3600)
    key, longer = minted(7200), {"X-Control": "retention=86400"}
    with monkeypatch.context() as patch:
        patch.setattr(intake, "time", types.SimpleNamespace(time=lambda: time.time() - 7200))
        first = shop.send("/status/200", key, headers=longer)
    again = shop.send("/status/200", key, headers=longer)
    assert (first.status_code, again.status_code, again.text) == (200, 200, first.text)
    assert again.headers["idempotency-replayed"] == "true"
    assert problem(shop.send("/orders", key)) == "key-reused"
    assert problem(shop.send("/orders", minted(7200))) == "key-expired"
    assert shop.count("orders") == 0


def test_h38_only_new_keys_use_the_quota_up(shop: Edge) -> None:
    shop.open(quota=0.001, wait=0)
    shop.orphan("held", fingerprint=shop.print_of("/orders"), lease=60)
    for _ in range(6):
        assert problem(shop.send("/orders", "held")) == "in-progress"
    assert shop.send("/orders", "new").status_code == 201


# ------------------------------------------------------------------------------------------------- nothing of it has run


def test_h13_a_route_that_a_mount_does_not_have_uses_no_key_up() -> None:
    async def found(request: Request) -> PlainTextResponse:
        return PlainTextResponse("not there", 404)

    mount = Mount("/sub", routes=[Route("/a", found, methods=["POST"])])
    app = Starlette(
        routes=[mount, Mount("/app", app=Starlette(routes=[Route("/a", found, methods=["POST"])]))]
    )
    edge = Edge("async", "memory://").open(app=app)
    for path in ("/sub", "/app"):
        unmatched = [edge.send(f"{path}/nowhere", f"u{path}") for _ in "ab"]
        assert marks(unmatched) == ["false", "false"]
        assert "idempotency-retention" not in unmatched[0].headers
        assert marks([edge.send(f"{path}/a", f"m{path}") for _ in "ab"]) == ["false", "true"], (
            "H14: its own 404"
        )
    edge.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["wsgi", "asgi"])
def test_h13_a_url_that_django_does_not_resolve_uses_no_key_up(django_site: Any, is_async: bool) -> None:
    def view(request: Any) -> Any:
        from django.http import Http404

        raise Http404

    once: Any = AsyncSemel("memory://") if is_async else Semel("memory://")
    app = django_site(
        view,
        is_async=is_async,
        MIDDLEWARE=["semel.http.django.IdempotencyMiddleware"],
        SEMEL={
            "async_once" if is_async else "once": once,
            "principal": plain_user,
            "authenticated_outside": True,
        },
    )
    answers = ask(app, *[{"url": "/nowhere"}] * 2, *[{"headers": {**HEADERS, "Idempotency-Key": "k2"}}] * 2)
    assert [answer.status_code for answer in answers] == [404] * 4
    assert marks(answers) == ["false", "false", "false", "true"]


# --------------------------------------------------------------------------------------------------------------- bodies


class Long(io.RawIOBase):
    """A body of many pieces, which counts what was read of it."""

    def __init__(self) -> None:
        self.given = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), 10_000_000 - self.given)
        self.given += size
        return size


@pytest.mark.parametrize("announced", ["50000000", None])
def test_h25_flask_reads_no_more_than_the_limit(once: Semel, announced: str | None) -> None:
    app, body = Flask("shop"), Long()
    app.post("/")(flask_idempotent(once=once, principal=plain_user, max_body=1000)(lambda: "x"))
    environ = {
        "REQUEST_METHOD": "POST", "PATH_INFO": "/", "HTTP_IDEMPOTENCY_KEY": "k", "HTTP_X_USER": "ada", "SERVER_NAME": "shop",
        "SERVER_PORT": "80", "wsgi.url_scheme": "http", "CONTENT_TYPE": "application/json", "wsgi.input": body,
        "wsgi.input_terminated": True,
    }  # fmt: skip
    if announced is not None:
        environ["CONTENT_LENGTH"] = announced
    told: list[str] = []
    b"".join(app(environ, lambda status, *_: told.append(status)))  # type: ignore[arg-type]  # no `write` is returned, and none is used
    assert told == ["413 REQUEST ENTITY TOO LARGE"]
    assert body.given <= (1 << 17 if announced is None else 0)


@pytest.mark.parametrize("announced", [b"50000000", None])
def test_h25_fastapi_reads_no_more_than_the_limit(announced: bytes | None) -> None:
    app, given, told = FastAPI(), [0], []
    guard = fastapi_idempotent(once=AsyncSemel("memory://"), principal=plain_user, max_body=1000)

    @app.post("/")
    @guard
    async def no_parameter() -> None: ...

    async def receive() -> Any:
        given[0] += 1000
        return {"type": "http.request", "body": b"x" * 1000, "more_body": given[0] < 1_000_000}

    async def send(message: Any) -> None:
        told.append(message)

    headers = [(b"idempotency-key", b"k"), (b"x-user", b"ada")]
    if announced is not None:
        headers.append((b"content-length", announced))
    scope = {
        "type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers, "http_version": "1.1",
        "scheme": "http", "server": ("shop", 80), "client": ("ada", 1), "root_path": "",
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    assert told[0]["status"] == 413
    assert given[0] <= (2000 if announced is None else 0)


def test_h25_fastapi_a_body_without_a_parameter_still_tells_requests_apart() -> None:
    app = FastAPI()

    @app.post("/")
    @fastapi_idempotent(once=AsyncSemel("memory://"), principal=plain_user)
    async def echo(request: Request) -> int:
        return len(await request.body())

    answers = ask(app, {"content": b"one"}, {"content": b"one"}, {"content": b"other"})
    assert [answer.status_code for answer in answers] == [200, 200, 422]
    assert answers[0].text == "3"


# ------------------------------------------------------------------------------------------------------------ responses


def test_h12_what_an_upstream_said_of_a_key_is_not_sent_beside_our_own(shop: Edge) -> None:
    said = {"Idempotency-Replayed": "true", "Idempotency-Retention": "5"}

    async def forwards(_: Request) -> PlainTextResponse:
        return PlainTextResponse("x", headers=said)

    def plain(_: Any, start: Callable[..., Any]) -> list[bytes]:
        start("200 OK", list(said.items()))
        return [b"x"]

    app: Any = plain if shop.colour == "sync" else Starlette(routes=[Route("/", forwards, methods=["POST"])])
    answer = shop.open(app=app).send("/")
    assert answer.headers.get_list("idempotency-replayed") == ["false"]
    assert answer.headers.get_list("idempotency-retention") == ["86400"]


def test_h19_wsgi_a_start_response_after_the_first_byte_raises_its_error(once: Semel) -> None:
    """PEP 3333: an application that fails in the middle of its response must not be heard as if it had not."""
    calls: list[str] = []

    def app(_: Any, start: Callable[..., Any]) -> Iterator[bytes]:
        calls.append("run")
        start("200 OK", [("Content-Type", "text/plain")])
        yield b"one,"
        yield b"two,"
        yield b"three,"
        try:
            raise ValueError("no more")
        except ValueError:
            start("500 Internal Server Error", [("Content-Type", "text/html")], sys.exc_info())
        yield b"<h1>error</h1>"

    guarded = Wsgi(app, once=once, principal=plain_user, authenticated_outside=True)
    with httpx.Client(transport=httpx.WSGITransport(guarded), base_url="http://shop") as client:
        for _ in range(2):
            with pytest.raises(ValueError, match="no more"):
                client.post("/", headers=HEADERS)
    assert calls == ["run", "run"], "a broken stream is a failure (effects='db')"


# ------------------------------------------------------------------------------------------------------------ two guards


def test_a_route_that_is_guarded_twice_says_so_asgi() -> None:
    calls: list[str] = []
    once = AsyncSemel("memory://")
    app = FastAPI()

    @app.post("/")
    @fastapi_idempotent(once=once, principal=plain_user)
    async def view() -> None:
        calls.append("run")

    guarded: Any = IdempotencyMiddleware(app, once=once, principal=plain_user, authenticated_outside=True)
    answer = ask(guarded, {})[0]
    assert (answer.status_code, calls) == (500, []), "at once, and not 409 for ever"


def test_a_route_that_is_guarded_twice_says_so_wsgi(once: Semel) -> None:
    app = Flask("shop")
    app.testing = True
    app.post("/")(flask_idempotent(once=once, principal=plain_user)(lambda: Response("x")))
    app.wsgi_app = Wsgi(app.wsgi_app, once=once, principal=plain_user, authenticated_outside=True)  # type: ignore[method-assign]  # as Flask's own pages say
    with pytest.raises(ConfigurationError, match="POST / is guarded twice"):
        app.test_client().post("/", headers=HEADERS)
