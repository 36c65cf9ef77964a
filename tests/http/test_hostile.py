"""Applications, clients and servers that do not behave: what is stored stays true, and keys stay secret."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest

from semel.http import asgi
from semel.http.problem import Answered
from semel.http.scope import ScopeRequest
from tests.http.conftest import Edge
from tests.http.test_rows_keys import problem


def plain(edge: Edge, status: str, headers: list[tuple[str, str]], *pieces: bytes) -> Any:
    """An application that says just this, in the edge's colour; no status: it does not start."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        edge.ledger.did("plain")
        if status:
            raw = [(name.lower().encode(), value.encode()) for name, value in headers]
            await send({"type": "http.response.start", "status": int(status[:3]), "headers": raw})
        for piece in pieces[:-1]:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": pieces[-1]})

    def wsgi(environ: Any, start_response: Any) -> Any:
        edge.ledger.did("plain")
        if status:
            start_response(status, headers)
        return list(pieces) if len(pieces) == 1 else iter(pieces)

    return app if edge.colour == "async" else wsgi


def test_a_204_with_a_body_is_replayed_without_one(shop: Edge) -> None:
    shop.open(app=plain(shop, "204 No Content", [], b"should not be here"))
    shop.send("/orders")
    again = shop.send("/orders")
    assert (again.status_code, again.content, again.headers["idempotency-replayed"]) == (204, b"", "true")
    assert "content-length" not in again.headers


def test_a_part_of_a_file_says_which_part_when_it_is_replayed(shop: Edge) -> None:
    part = [("Content-Range", "bytes 0-3/100"), ("Content-Type", "text/plain")]
    shop.open(app=plain(shop, "206 Partial Content", part, b"part"))
    first, again = shop.send("/orders"), shop.send("/orders", headers={"Range": "bytes=50-60"})
    assert first.headers["content-range"] == again.headers["content-range"] == "bytes 0-3/100"
    assert (again.status_code, again.content) == (206, b"part")


@pytest.mark.parametrize("pieces", [(b"whole",), (b"one", b"two", b"three")])
def test_an_application_that_never_starts_its_response_has_no_outcome(
    shop: Edge, pieces: tuple[bytes, ...]
) -> None:
    shop.open(app=plain(shop, "", [], *pieces))
    for _ in range(2):
        if shop.colour == "async":
            assert shop.send("/orders").status_code == 500
        else:
            with pytest.raises(RuntimeError, match="start_response"):
                list(_environ_call(shop))
    assert shop.count("plain") == 2, "the key is free"


def _environ_call(edge: Edge) -> Iterator[bytes]:
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/orders",
        "HTTP_IDEMPOTENCY_KEY": "key-1",
        "HTTP_X_USER": "ada",
        "wsgi.input": io.BytesIO(),
    }
    yield from edge._client._transport.app(environ, lambda *_: None)


def test_a_key_in_the_path_is_kept_masked(shop: Edge, caplog: pytest.LogCaptureFixture) -> None:
    routes = {"/orders/{key}": {"sources": ["path:key"]}}
    secret = "0123456789abcdef-secret"
    shop.open(routes=routes)
    shop.send(f"/orders/{secret}", None)
    assert shop.send(f"/orders/{secret}", None).headers["idempotency-replayed"] == "true"
    record = shop.do(shop.once.peek(f"{secret} ada", operation="http"))
    assert record.labels["route"] == "POST /orders/012…ret"
    assert secret not in repr(record.labels)
    down = Edge(shop.colour, "redis://127.0.0.1:1/0").open(routes=routes, semel={"timeout": 0.2})
    assert down.send(f"/orders/{secret}", None).status_code == 503
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("semel")]
    assert ours
    assert not any(secret in line for line in ours)
    down.close()


@pytest.mark.parametrize("scope", ["principal", "route"])
def test_a_key_in_the_path_keeps_routes_apart(shop: Edge, scope: str) -> None:
    shop.open(routes={"/orders/{key}": {"sources": ["path:key"]}}, scope=scope)
    one, two = shop.send("/orders/0123456789-a", None), shop.send("/orders/0123456789-b", None)
    assert [one.json()["n"], two.json()["n"]] == [1, 2]
    assert shop.send("/orders/0123456789-a", None).json()["n"] == 1


@pytest.mark.parametrize(
    ("root", "path", "whole", "routed"),
    [
        ("", "/orders", "/orders", "/orders"),
        ("/a", "/a/orders", "/a/orders", "/orders"),
        ("/a", "/orders", "/a/orders", "/orders"),  # the framework has taken the mount off
        ("/a/", "/a/orders", "/a/orders", "/orders"),
        ("/a", "/a", "/a", "/a"),
        ("/a", "/ab", "/a/ab", "/ab"),
    ],
)
def test_two_mounts_of_one_application_are_two_places(root: str, path: str, whole: str, routed: str) -> None:
    async def receive() -> Any:
        raise AssertionError

    scope = {"type": "http", "method": "POST", "path": path, "root_path": root, "headers": []}
    incoming = ScopeRequest(scope, receive)
    assert (incoming.path, incoming.routed) == (whole, routed)


def test_a_key_of_one_mount_is_another_request_at_the_other(shop: Edge) -> None:
    if shop.colour == "sync":
        shop.open()
        app = shop._client._transport.app

        def mounts(environ: Any, start_response: Any) -> Any:
            _, root, rest = environ["PATH_INFO"].split("/", 2)
            return app({**environ, "SCRIPT_NAME": f"/{root}", "PATH_INFO": f"/{rest}"}, start_response)

        shop._client._transport.app = mounts
    else:
        shop.open()
        inside = shop._client._transport.app
        assert isinstance(inside, asgi.IdempotencyMiddleware)

        async def stripped(scope: Any, receive: Any, send: Any) -> None:
            _, root, rest = scope["path"].split("/", 2)
            await inside({**scope, "root_path": f"/{root}", "path": f"/{rest}"}, receive, send)

        shop._client._transport.app = stripped
    assert shop.send("/a/empty").status_code == 204
    other = shop.send("/b/empty")
    assert (other.status_code, problem(other)) == (422, "key-reused")


def test_hooks_are_told_what_the_layer_answers_by_itself(shop: Edge) -> None:
    told: list[object] = []
    shop.open(required=True, semel={"hooks": [told.append]})
    answers = [shop.send("/orders", None), shop.send("/orders"), shop.send("/orders", json={"a": 1})]
    said = [event for event in told if isinstance(event, Answered)]
    assert [(event.problem, event.status) for event in said] == [("key-missing", 400), ("key-reused", 422)]
    assert [event.instance for event in said] == [
        answers[0].json()["instance"],
        answers[2].json()["instance"],
    ]
