"""Rows that need more than a request and its repetition: digests (H22, H25), clocks (H36), profiles, CORS, streams."""

from __future__ import annotations

import base64
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from email.utils import formatdate
from typing import Any

import httpx
import pytest
from flask import Flask, Response
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from semel import AsyncSemel, ConfigurationError, Semel, current_run
from semel.http import rules
from semel.http.digests import told_sha256
from semel.http.flask import idempotent as flask_idempotent
from semel.http.openapi import describe
from tests.http.conftest import Edge
from tests.http.frames import DjangoApp
from tests.http.test_frameworks import Frame
from tests.http.test_frameworks import frame as frame  # a fixture
from tests.http.test_rows_keys import problem

BODY = b'{"amount": 5}'


def digest(body: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


# ------------------------------------------------------------------------------------------------- Content-Digest


@pytest.mark.parametrize(
    ("line", "is_told"),
    [
        (digest(BODY), True),
        (f"sha-512=:{'A' * 86}==:, {digest(BODY)}", True),
        (f"{digest(BODY)};q=1, other=:AA==:", True),
        ("sha-256=:AAAA:", False),
        ("sha-256=abc", False),
        (f"x{digest(BODY)}", False),
        (f"md5=:{digest(BODY)}:", False),
        ("", False),
    ],
)
def test_h25_a_content_digest_is_read(line: str, is_told: bool) -> None:
    assert told_sha256([line.encode()]) == (hashlib.sha256(BODY).digest() if is_told else None)


def test_h25_a_body_that_is_not_the_one_of_its_digest_is_refused(shop: Edge) -> None:
    shop.open()
    wrong = shop.send("/orders", content=BODY, headers={"Content-Digest": digest(b"another")})
    assert (wrong.status_code, problem(wrong)) == (400, "digest-mismatch")
    assert shop.count("orders") == 0
    right = shop.send("/orders", content=BODY, headers={"Content-Digest": digest(BODY)})
    assert (right.status_code, right.headers["idempotency-replayed"]) == (201, "false")
    plain = shop.send("/orders", content=BODY)
    assert plain.headers["idempotency-replayed"] == "true", "a digest does not make another request"


def uploads(edge: Edge, key: str, body_digest: str, **more: str) -> tuple[int, dict[str, str]] | None:
    """A request whose body must not be read: its status and headers; None when it was asked for."""
    headers = {
        "idempotency-key": key,
        "x-user": "ada",
        "expect": "100-continue",
        "content-length": "1000000",
        "content-type": "application/json",
        "content-digest": body_digest,
        **more,
    }
    app, started = edge._client._transport.app, []

    class Asked(Exception):
        pass

    def ask(*_: Any) -> Any:
        raise Asked

    def start(status: str, given: list[tuple[str, str]], exc_info: Any = None) -> None:
        started.append((int(status[:3]), {name.lower(): value for name, value in given}))

    async def receive() -> Any:
        raise Asked

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            given = {name.decode(): value.decode() for name, value in message["headers"]}
            started.append((message["status"], given))

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/orders", "query_string": b"", "headers": raw}
    fields = {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items()}
    environ = {
        **fields,
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/orders",
        "CONTENT_TYPE": headers["content-type"],
        "CONTENT_LENGTH": headers["content-length"],
        "wsgi.input": type("Input", (), {"read": ask})(),
    }
    try:
        if edge.colour == "async":
            edge.runner.run(app(scope, receive, send))
        else:
            b"".join(app(environ, start))
    except Asked:
        return None
    return started[0]


def test_h22_a_repetition_that_tells_its_digest_is_answered_before_its_upload(edge: Edge) -> None:
    edge.open()
    sent = {"Content-Digest": digest(BODY), "Content-Type": "application/json"}
    assert edge.send("/orders", content=BODY, headers=sent).status_code == 201
    answer = uploads(edge, "key-1", digest(BODY))
    assert answer is not None, "its body was asked for"
    assert (answer[0], answer[1]["idempotency-replayed"], answer[1]["location"]) == (201, "true", "/orders/1")
    assert edge.count("orders") == 1


@pytest.mark.parametrize(
    ("key", "body", "more"),
    [
        ("key-2", BODY, {}),
        ("key-1", b'{ "amount": 5 }', {}),
        ("key-1", BODY, {"x-user": "bob"}),
        ("key-1", BODY, {"content-type": "text/plain"}),
        ("undigested", BODY, {}),
    ],
)
def test_h22_everything_else_must_be_uploaded(
    shop: Edge, key: str, body: bytes, more: dict[str, str]
) -> None:
    shop.open()
    sent = {"Content-Digest": digest(BODY), "Content-Type": "application/json"}
    shop.send("/orders", content=BODY, headers=sent)
    shop.send("/orders", "undigested", content=BODY, headers={"Content-Type": "application/json"})
    assert uploads(shop, key, digest(body), **more) is None


def test_h22_what_is_too_large_is_refused_before_its_upload(shop: Edge) -> None:
    shop.open(max_body=1000)
    answer = uploads(shop, "key-1", digest(BODY))
    assert answer is not None
    assert answer[0] == 413


# --------------------------------------------------------------------------------------- one exchange, and the next

EXCHANGE = {
    "Age": "10",
    "Server-Timing": "db;dur=53",
    "RateLimit-Remaining": "7",
    "RateLimit-Limit": "100",
    "X-RateLimit-Reset": "3",
    "Traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "Access-Control-Allow-Origin": "https://first.example",
    "Proxy-Authenticate": "Basic",
    "Keep-Alive": "timeout=5",
    "Cache-Control": "public, max-age=3600",
}


def test_h29_what_belongs_to_the_first_exchange_is_not_replayed(shop: Edge) -> None:
    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        headers = [(name.lower().encode(), value.encode()) for name, value in EXCHANGE.items()]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": b"made"})

    def wsgi(environ: Any, start_response: Any) -> Any:
        start_response("201 Created", list(EXCHANGE.items()))
        return [b"made"]

    shop.open(app=asgi if shop.colour == "async" else wsgi)
    first, again = shop.send("/orders"), shop.send("/orders")
    assert first.content == again.content == b"made"
    for name, value in EXCHANGE.items():
        assert first.headers[name] == value
        assert again.headers.get(name) == ("no-store" if name == "Cache-Control" else None)


# --------------------------------------------------------------------------------------------------------- clocks


def uuid7(when: float) -> str:
    made = (int(when * 1000) << 80) | (0x7 << 76) | (0x8 << 60) | uuid.uuid4().int & ((1 << 60) - 1)
    return str(uuid.UUID(int=made & ((1 << 128) - 1)))


def test_h36_clients_clocks_are_forgiven_a_minute_and_extend_nothing(shop: Edge) -> None:
    shop.open(retention=1000)
    now = time.time()
    assert shop.send("/orders", uuid7(now - 1030)).status_code == 201
    assert problem(shop.send("/orders", uuid7(now - 1090))) == "key-expired"
    ahead = shop.send("/orders", uuid7(now + 5000))
    assert (ahead.status_code, ahead.headers["idempotency-retention"]) == (201, "1000")


@pytest.mark.parametrize("store_url", ["redis", "postgres"], indirect=True)  # those with a clock of their own
def test_h36_a_worker_with_a_wrong_clock_gives_no_key_away(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge.open(retention=1000)
    assert edge.send("/orders").status_code == 201
    real = time.time
    for wrong in (100_000.0, -100_000.0):
        monkeypatch.setattr(time, "time", lambda off=wrong: real() + off)
        assert edge.send("/orders").headers["idempotency-replayed"] == "true"
        assert edge.send("/orders", f"orphan-{wrong}").status_code == 201
    assert edge.count("orders") == 3


# -------------------------------------------------------------------------------------------------------- profiles


def test_profile_oasis_says_what_was_rejected(shop: Edge) -> None:
    shop.open(profile="oasis")
    now = formatdate(usegmt=True)

    def send(key: str, first_sent: str, **given: Any) -> httpx.Response:
        headers = {"Repeatability-Request-ID": key, "Repeatability-First-Sent": first_sent}
        return shop.send("/orders", None, headers=headers, **given)

    assert send("r-1", now, json={"a": 1}).headers["repeatability-result"] == "accepted"
    reused = send("r-1", now, json={"a": 2})
    assert (reused.status_code, reused.headers["repeatability-result"]) == (400, "rejected")
    old = send("r-2", formatdate(time.time() - 90_000, usegmt=True))
    assert (old.status_code, old.headers["repeatability-result"]) == (412, "rejected")
    assert send("r-3", "yesterday").headers["repeatability-result"] == "rejected"
    without = shop.send("/orders", None)
    assert "repeatability-result" not in without.headers


def test_profile_oasis_a_request_that_is_known_was_accepted(shop: Edge) -> None:
    shop.open(profile="oasis", max_response=1000)
    sent = {"Repeatability-Request-ID": "r-1", "Repeatability-First-Sent": formatdate(usegmt=True)}
    answers = [shop.send("/big", None, headers=sent) for _ in "ab"]
    assert [answer.status_code for answer in answers] == [201, 422]
    assert [answer.headers["repeatability-result"] for answer in answers] == ["accepted", "accepted"]


def test_h42_the_document_of_a_profile_says_what_it_does() -> None:
    document: dict[str, Any] = {
        "paths": {"/orders": {"post": {"responses": {"201": {"description": "made"}}}}}
    }
    oasis = rules.Rules(**rules.PROFILES["oasis"])
    describe(document, [("/orders", ["POST"], oasis)])
    operation = document["paths"]["/orders"]["post"]
    assert [one["name"] for one in operation["parameters"]] == [
        "Repeatability-Request-Id",
        "Repeatability-First-Sent",
    ]
    responses = operation["responses"]
    assert set(responses) == {"201", "400", "409", "412", "422", "503"}
    assert "key-reused" in responses["400"]["description"]
    assert responses["412"]["description"] == "Idempotency: key-expired"
    assert "key-expired" not in responses["422"]["description"]
    assert set(responses["201"]["headers"]) == {"Repeatability-Result", "Idempotency-Retention"}
    assert responses["412"]["headers"]["Repeatability-Result"]["schema"]["enum"] == ["accepted", "rejected"]


# ------------------------------------------------------------------------------------------------------------ CORS


@pytest.mark.parametrize("profile", sorted(rules.PROFILES))
def test_h43_a_page_may_send_the_key_and_read_the_answer(profile: str) -> None:
    once = AsyncSemel("memory://")
    edge = Edge("async", "memory://")

    async def orders(_: Request) -> JSONResponse:
        return JSONResponse({"id": 1}, 201, headers={"Location": "/orders/1"})

    app = Starlette(routes=[Route("/orders", orders, methods=["POST"])])
    guarded = rules.cors(profile=profile)
    edge.open(profile=profile, app=app)
    page = CORSMiddleware(
        edge._client._transport.app, allow_origins=["https://page.example"], allow_methods=["POST"], **guarded
    )
    named = rules.Rules(**rules.PROFILES[profile]).sources[0].removeprefix("header:")
    key = uuid7(time.time())

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(page), base_url="http://shop") as client:
            origin = {"Origin": "https://page.example"}
            preflight = {
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": f"{named}, prefer",
            }
            sent = {named: key, "X-User": "ada", "Repeatability-First-Sent": formatdate(usegmt=True)}
            asked = await client.options("/orders", headers=origin | preflight)
            return asked, await client.post("/orders", headers=origin | sent)

    asked, made = edge.runner.run(ask())
    assert (asked.status_code, made.status_code) == (200, 201)
    shown = made.headers["access-control-expose-headers"].lower().split(", ")
    told = {name for name in made.headers if name.startswith(("idempoten", "repeatability", "location"))}
    assert told <= set(shown)
    edge.runner.run(once.aclose())
    edge.close()


def test_h43_a_profile_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigurationError, match="stripe-v1"):
        rules.cors(profile="stripe")


# ----------------------------------------------------------------------------------------------- runs and streams


def test_a_stream_under_wsgi_knows_its_run() -> None:
    edge = Edge("sync", "memory://")
    seen: list[str] = []

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        seen.append(current_run().key)  # nothing of a generator runs before it is iterated
        start_response("200 OK", [])
        for _ in range(3):
            yield current_run().downstream_key("bank").encode()

    edge.open(app=app)
    first, again = edge.send("/orders"), edge.send("/orders")
    assert first.content == again.content
    assert len(first.content) == 3 * len(first.content[: len(first.content) // 3])
    assert seen == ["key-1 ada"]
    with pytest.raises(Exception, match="current_run"):
        current_run()
    edge.close()


def test_a_stream_of_a_flask_view_knows_its_run() -> None:
    app = Flask("streams")
    with Semel("memory://") as once:

        @app.post("/pieces")
        @flask_idempotent(once=once, principal=lambda _: "ada")
        def pieces() -> Response:
            return Response(current_run().key for _ in range(3))

        client = app.test_client()
        answers = [client.post("/pieces", headers={"Idempotency-Key": "k1"}).data for _ in "ab"]
    assert answers == [b"k1 ada" * 3] * 2


@pytest.mark.parametrize("is_async", [True, False])
def test_a_stream_of_a_django_view_knows_its_run(is_async: bool) -> None:
    from django.http import HttpRequest, StreamingHttpResponse
    from django.test import RequestFactory

    from semel.http.django import idempotent

    edge = Edge("async" if is_async else "sync", "memory://").open()
    site = DjangoApp([], is_async=is_async)

    async def later() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield current_run().key.encode()

    def pieces(request: HttpRequest) -> StreamingHttpResponse:
        return StreamingHttpResponse(current_run().key.encode() for _ in range(3))

    async def async_pieces(request: HttpRequest) -> StreamingHttpResponse:
        return StreamingHttpResponse(later())

    view = idempotent(once=edge.once, principal=lambda _: "ada")(async_pieces if is_async else pieces)
    factory = RequestFactory(headers={"Idempotency-Key": "k1"})

    async def collect() -> bytes:
        response = await view(factory.post("/pieces"))
        return b"".join([piece async for piece in response])

    found = edge.runner.run(collect()) if is_async else b"".join(view(factory.post("/pieces")))
    assert found == b"k1 ada" * 3
    site.close()
    edge.close()


# ----------------------------------------------------------------------------------------------------------- forms


def form(boundary: str, *parts: tuple[str, str, bytes]) -> dict[str, Any]:
    made = b""
    for name, filename, content in parts:
        file = f'; filename="{filename}"\r\nContent-Type: text/plain' if filename else ""
        made += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode()
        made += content + b"\r\n"
    kind = f"multipart/form-data; boundary={boundary}"
    return {"content": made + f"--{boundary}--\r\n".encode(), "kind": kind}


def test_h27_the_order_of_a_forms_parts_counts_and_its_boundary_does_not(frame: Frame) -> None:
    frame.open()
    name, one, two, file = (
        ("name", "", b"ada"),
        ("tag", "", b"1"),
        ("tag", "", b"2"),
        ("file", "a.txt", b"abc"),
    )

    def send(boundary: str, *parts: tuple[str, str, bytes]) -> httpx.Response:
        sent = form(boundary, *parts)
        kind = sent.pop("kind")
        frame.client.headers["Content-Type"] = kind
        return frame.post("/form", **sent)

    first = send("AAA", name, one, file, two)
    assert (first.status_code, first.text) == (200, "ada a.txt 3")
    assert send("BBB", name, one, file, two).headers["idempotency-replayed"] == "true"
    for other in ((name, two, file, one), (name, one, two, file), (name, one, file), (one, name, file, two)):
        answer = send("AAA", *other)
        assert (answer.status_code, problem(answer)) == (422, "key-reused"), other
    assert frame.count("form") == 1
