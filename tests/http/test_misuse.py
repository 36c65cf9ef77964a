"""What is configured or sent wrongly is refused, and never runs unprotected or for somebody else."""

from __future__ import annotations

import uuid
from typing import Any

import httpx
import pytest

from semel import ConfigurationError, Semel
from semel.http import asgi, wsgi
from semel.http.body import Body, feed_parts
from semel.http.fingerprints import fingerprint
from tests.http.conftest import Edge
from tests.http.test_rows_keys import problem


@pytest.mark.parametrize("answer", [None, False, 0, ""])
def test_authorize_must_say_yes(shop: Edge, answer: Any) -> None:
    shop.open(authorize=lambda _: answer)
    refused = shop.send("/orders")
    assert (refused.status_code, problem(refused)) == (403, "not-authorized")
    assert shop.count("orders") == 0


@pytest.mark.parametrize("who", [7, 0, uuid.UUID(int=5)])
def test_a_principal_may_be_an_id_of_several_kinds(shop: Edge, who: Any) -> None:
    shop.open(principal=lambda _: who)
    assert [shop.send("/orders").json()["n"] for _ in "ab"] == [1, 1]


@pytest.mark.parametrize("who", [object(), {"id": 1}, True])
def test_a_principal_that_is_an_object_is_refused(shop: Edge, who: Any) -> None:
    shop.open(principal=lambda _: who)
    if shop.colour == "async":
        assert shop.send("/orders").status_code == 500
    else:
        with pytest.raises(ConfigurationError, match="the sender's id"):
            wsgi.IdempotencyMiddleware.__call__(
                shop._client._transport.app,
                {**_environ("/orders"), "HTTP_IDEMPOTENCY_KEY": "k"},
                lambda *_: None,
            )
    assert shop.count("orders") == 0


def _environ(path: str) -> dict[str, Any]:
    return {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": path,
        "wsgi.input": httpx.ByteStream(b""),
        "CONTENT_LENGTH": "0",
    }


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"methods": "POST, PATCH"}, "no method"),
        ({"methods": ["GET"]}, "no effect"),
        ({"methods": []}, "methods= is empty"),
        ({"sources": []}, "is empty, so no key"),
        ({"header": ()}, "is empty, so no key"),
        ({"routes": {}}, "guards nothing"),
        ({"routes": {"POST,PUT /o": True}}, "no method"),
        ({"sources": ["path:id"]}, "names it"),
        ({"routes": {"/o": {"sources": ["path:id"]}}}, "names it"),
        ({"header": "Idem Key"}, "no name of a header"),
        ({"markers": ["a\r\nb"]}, "no name of a header"),
        ({"problem_base": 5}, "problem_base"),
        ({"problem_base": "a\r\nb: c"}, "problem_base"),
        ({"lease": 0}, "lease"),
        ({"min_length": 300}, "min_length= must be a whole number from 0 to 255, not 300"),
        ({"secret": True}, "contradict"),
        ({"authenticated_outside": "no"}, "authenticated_outside"),
        ({"profile": "nonsense"}, "profile"),
        ({"requierd": True}, "did you mean 'required'"),
        ({"effects": "magic"}, "effects"),
        ({"quota": 0}, "quota"),
        ({"stored": 5}, "stored"),
        ({"routes": {"orders": True}}, "is none"),
        ({"routes": {"POST /orders/{id:int}": True}}, "written otherwise here"),
        ({"routes": {"/files/{rest:path}": {"required": True}}}, "written otherwise here"),
        ({"routes": {"/orders/<int:id>": False}}, "written otherwise here"),
        ({"routes": {"/orders/{id}/lines/{id}": True}}, "each name once"),
        ({"routes": {"/orders/{1}": True}}, "is none"),
        ({"routes": {"/orders/:id": True}}, ":id are written otherwise"),
        ({"routes": {"POST /orders": {"methods": ["PUT"]}}}, "do not hold it"),
        ({"routes": {"/o": {"principal": len}}}, "unknown option"),
        ({"replay_headers": ["set-cookie"]}, "set-cookie"),
        ({"principal": len}, "contradict"),
        ({"tenant": "acme"}, "function"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(options: dict[str, Any], match: str) -> None:
    given = {"anonymous": True, "authenticated_outside": True, **options}
    with Semel("memory://") as once, pytest.raises(ConfigurationError, match=match):
        wsgi.IdempotencyMiddleware(lambda *_: [], once=once, **given)


def test_the_wrong_colour_is_refused() -> None:
    with Semel("memory://") as once, pytest.raises(ConfigurationError, match="AsyncSemel"):
        asgi.IdempotencyMiddleware(None, once=once, anonymous=True, authenticated_outside=True)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ConfigurationError, match="once="):
        wsgi.IdempotencyMiddleware(lambda *_: [], once="memory://")  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(
    "body", [b'{"k":"a","k":"a"}', b"\xef\xbb\xbf{}", '{"k":"a"}'.encode("utf-16"), b'{"k":'], ids=range(4)
)
def test_a_body_that_hides_its_key_is_refused(shop: Edge, body: bytes) -> None:
    shop.open(sources=["body:k"])
    answer = shop.send("/orders", None, content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, problem(answer)) == (400, "key-malformed")
    assert shop.count("orders") == 0


def test_a_key_in_a_large_body_is_found(shop: Edge) -> None:
    shop.open(sources=["body:k"])
    large = {"k": "a", "fill": "x" * (2 << 20)}
    assert [shop.send("/orders", None, json=large).json()["n"] for _ in "ab"] == [1, 1]


def test_an_unkeyed_request_is_not_asked_who_it_is(shop: Edge) -> None:
    shop.open(key=lambda request: request.headers.get("x-command"))
    assert shop.send("/orders", None, user=None).status_code == 201
    shop.open(sources=["body:k"])
    assert shop.send("/orders", None, user=None, json={}).status_code == 201
    assert problem(shop.send("/orders", None, user=None, json={"k": "a"})) == "not-authenticated"


def test_early_data_is_refused_wherever_the_key_is(shop: Edge) -> None:
    shop.open(sources=["body:k"])
    assert problem(shop.send("/orders", None, json={"k": "a"}, headers={"Early-Data": "1"})) == "too-early"


def test_a_line_break_in_a_path_does_not_leave_its_route(shop: Edge) -> None:
    shop.open(routes={"/orders/*": {"required": True}})
    assert problem(shop.send("/orders/a%0Ab", None)) == "key-missing"


def test_stripe_stores_also_what_a_handler_raises(shop: Edge) -> None:
    shop.ledger.failing = 9
    shop.open(profile="stripe-v1")
    answers = [shop.send("/fail") for _ in "ab"]
    assert [answer.status_code for answer in answers] == [500, 500]
    assert shop.count("fail") == 1


def test_callers_at_the_same_time_share_no_quota(shop: Edge) -> None:
    shop.open(quota=1)
    answers = shop.together(*[{"path": "/slow", "key": f"k{number}"} for number in range(6)])
    assert sorted(answer.status_code for answer in answers) == [200, 429, 429, 429, 429, 429]


def test_expired_new_needs_no_other_word(shop: Edge) -> None:
    import time

    shop.open(retention=0.1, expired="new")
    shop.send("/orders")
    time.sleep(0.15)
    assert shop.send("/orders").json()["n"] == 2


@pytest.mark.parametrize(
    "options",
    [
        {"expired": "new", "tombstone": 100},
        {"profile": "acp", "tombstone": 100},
        {"profile": "acp", "routes": {"/orders": {"tombstone": 1}}},
    ],
)
def test_expired_new_and_a_tombstone_contradict_each_other(shop: Edge, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="contradict each other"):
        shop.open(**options)


def test_a_mounted_application_is_guarded_by_the_routes_of_its_own() -> None:
    edge = Edge("sync", "memory://")
    edge.open(routes={"POST /orders": {"required": True}})
    app = edge._client._transport.app
    told: list[str] = []
    environ = {**_environ("/orders"), "SCRIPT_NAME": "/api", "HTTP_X_USER": "ada"}
    app(environ, lambda status, *_: told.append(status))
    assert told == ["400 Bad Request"]
    edge.close()


def test_forms_that_differ_have_different_fingerprints() -> None:
    def of(*parts: str) -> str:
        body = Body(1 << 20)
        feed_parts(body, *parts)
        return fingerprint("POST", "/", b"", "multipart/form-data; boundary=B", body)

    assert of("a", "--B--", "1") != of("a", "--B--", "2")
    assert of("f", "name", "type") != of("f", "name") != of("ftype", "name")

    def raw(text: bytes) -> str:
        body = Body(1 << 20)
        body.feed(b'--B\r\nContent-Disposition: form-data; name="x"\r\n\r\n' + text + b"\r\n--B--\r\n")
        return fingerprint("POST", "/", b"", "multipart/form-data; boundary=B", body)

    assert raw(b"1\r\n--Bonus: 1") != raw(b"1\r\n--Bonus: 2")
