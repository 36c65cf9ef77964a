"""The specification's rows about keys and identity: H01-H10, H23, H24, H35, H38, H39, H44."""

from __future__ import annotations

import time
import uuid
from typing import Any

import httpx
import pytest

from semel import ConfigurationError, Semel
from semel.http import wsgi
from tests.http.conftest import Edge


def problem(response: httpx.Response) -> str:
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["cache-control"] == "no-store"
    assert response.json()["status"] == response.status_code
    assert "idempotency-replayed" not in response.headers
    return str(response.json()["type"]).rpartition(":")[2]


def test_h01_a_required_key_is_asked_for_and_nothing_runs(shop: Edge) -> None:
    shop.open(required=True)
    answer = shop.send("/orders", None)
    assert (answer.status_code, problem(answer)) == (400, "key-missing")
    assert answer.headers["link"] == '<urn:semel:problem:key-missing>; rel="describedby"'
    assert shop.count("orders") == 0


def test_h01_an_optional_key_may_be_missing_and_no_marker_is_sent(shop: Edge) -> None:
    shop.open()
    answers = [shop.send("/orders", None) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert shop.count("orders") == 2
    assert "idempotency-replayed" not in answers[0].headers


@pytest.mark.parametrize(
    "key",
    [
        "",
        "   ",
        "two words",
        "a,b",
        "semi;colon",
        'half"quoted',
        '"unclosed',
        "back\\slash",
        '"sp ace"',
        '""',
        '"a"b',
    ],
)
def test_h02_a_malformed_key_is_refused(shop: Edge, key: str) -> None:
    shop.open()
    answer = shop.send("/orders", key)
    assert (answer.status_code, problem(answer)) == (400, "key-malformed")
    assert shop.count("orders") == 0


@pytest.mark.parametrize("raw", [b"caf\xc3\xa9", b"\xff", b"tab\tbed"])
def test_h02_only_visible_ascii_is_a_key(raw: bytes) -> None:
    edge = Edge("async", "memory://").open()
    answer = edge.send("/orders", None, headers={"Idempotency-Key": raw})
    assert (answer.status_code, problem(answer)) == (400, "key-malformed")
    edge.close()


def test_h02_two_lines_are_no_key() -> None:
    edge = Edge("async", "memory://").open()
    answer = edge.do(
        edge._client.post(
            "/orders", headers=[("Idempotency-Key", "a1"), ("Idempotency-Key", "a1"), ("X-User", "ada")]
        )
    )
    assert (answer.status_code, problem(answer)) == (400, "key-malformed")
    edge.close()


def test_h02_quoted_and_bare_are_the_same_key(edge: Edge) -> None:
    edge.open()
    first, second, third = (edge.send("/orders", key) for key in ("k-1", '"k-1"', '"k-1";v=2'))
    assert edge.count("orders") == 1
    assert first.content == second.content == third.content
    assert [answer.headers["idempotency-replayed"] for answer in (first, second, third)] == [
        "false",
        "true",
        "true",
    ]


def test_h02_strict_takes_the_quoted_form_only(shop: Edge) -> None:
    shop.open(strict=True)
    assert problem(shop.send("/orders", "bare")) == "key-malformed"
    assert shop.send("/orders", '"quoted"').status_code == 201


def test_h03_the_length_is_bounded(shop: Edge) -> None:
    shop.open()
    assert shop.send("/orders", "k" * 255).status_code == 201
    assert problem(shop.send("/orders", "k" * 256)) == "key-too-long"
    assert problem(shop.send("/orders", "k" * 100_000)) == "key-too-long"
    assert shop.count("orders") == 1


def test_h03_and_h08_an_anonymous_key_must_be_hard_to_guess(shop: Edge) -> None:
    shop.open(anonymous=True)
    assert problem(shop.send("/orders", "short")) == "key-too-short"
    assert shop.send("/orders", "k" * 16, user=None).status_code == 201


@pytest.mark.parametrize(
    ("path", "method"),
    [("/empty", "POST"), ("/orders/7", "POST"), ("/orders?x=1", "POST"), ("/orders", "PATCH")],
)
def test_h04_another_request_under_the_key_is_refused(shop: Edge, path: str, method: str) -> None:
    shop.open()
    shop.send("/orders")
    answer = shop.send(path, method=method)
    assert (answer.status_code, problem(answer)) == (422, "key-reused")
    assert len(shop.ledger.calls) == 1


def test_h04_with_scope_route_other_routes_are_independent(shop: Edge) -> None:
    shop.open(scope="route")
    assert [shop.send(path).status_code for path in ("/orders", "/empty", "/orders")] == [201, 204, 201]
    assert (shop.count("orders"), shop.count("empty")) == (1, 1)


def test_h05_another_body_is_refused_and_tells_nothing(edge: Edge) -> None:
    edge.open()
    first = edge.send("/orders", json={"amount": 1})
    answer = edge.send("/orders", json={"amount": 2})
    assert (answer.status_code, problem(answer)) == (422, "key-reused")
    assert "key-1" not in answer.text
    assert first.text not in answer.text
    assert edge.count("orders") == 1


def test_h05_another_body_is_refused_also_while_the_first_runs(edge: Edge) -> None:
    edge.open()
    slow, other = edge.together(
        {"path": "/slow", "json": {"a": 1}},
        {"path": "/slow", "json": {"a": 2}, "headers": {"Prefer": "wait=5"}},
    )
    assert sorted((slow.status_code, other.status_code)) == [200, 422]
    assert edge.count("slow") == 1


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (b'{"a":1,"b":[1,2]}', b' { "b": [1, 2], "a": 1.0 } ', True),
        (b'{"a":1,"b":[1,2]}', b'{"a":1,"b":[2,1]}', False),
        (b'{"a":null}', b"{}", False),
        (b'{"a":9007199254740993}', b'{"a":9007199254740992}', False),
        (b'{"a":1,"a":2}', b'{"a":2}', False),
        (b"not json", b"not json", True),
        (b"[" * 10_000, b"[" * 10_000, True),
        (b'{"a":"\\u00e9"}', '{"a":"é"}'.encode(), True),
        (b'{"a":1e400}', b'{"a":1e400}', True),
    ],
)
def test_h06_json_is_compared_by_meaning(shop: Edge, first: bytes, second: bytes, same: bool) -> None:
    shop.open()
    headers = {"Content-Type": "application/json"}
    assert shop.send("/orders", content=first, headers=headers).status_code == 201
    answer = shop.send("/orders", content=second, headers=headers)
    assert answer.status_code == (201 if same else 422)
    assert shop.count("orders") == 1


def test_h06_the_media_type_counts_and_its_parameters_do_not(shop: Edge) -> None:
    shop.open()
    shop.send("/orders", content=b"{}", headers={"Content-Type": "application/json"})
    again = shop.send("/orders", content=b"{}", headers={"Content-Type": "application/json; charset=utf-8"})
    other = shop.send("/orders", content=b"{}", headers={"Content-Type": "text/plain"})
    assert (again.status_code, other.status_code) == (201, 422)


def test_h06_excluded_fields_do_not_count(shop: Edge) -> None:
    shop.open(exclude=["trace.id", "sent_at"])
    shop.send("/orders", json={"a": 1, "trace": {"id": 1, "x": 1}, "sent_at": 1})
    assert shop.send("/orders", json={"a": 1, "trace": {"id": 2, "x": 1}, "sent_at": 2}).status_code == 201
    assert shop.send("/orders", json={"a": 1, "trace": {"id": 2, "x": 2}}).status_code == 422


def test_h07_two_principals_never_meet(edge: Edge) -> None:
    edge.open()
    ada, bob = edge.send("/orders", user="ada"), edge.send("/orders", user="bob")
    assert (ada.json()["n"], bob.json()["n"]) == (1, 2)
    assert edge.send("/orders", user="ada").json()["n"] == 1


@pytest.mark.parametrize(
    "one_and_other", [(("a b", "c"), ("a", "b c")), (("k", "x" * 300), ("k", "x" * 301))]
)
def test_h07_no_spelling_of_key_and_principal_meets_another(one_and_other: Any) -> None:
    from semel.http.rules import core_key

    (key, principal), (other_key, other_principal) = one_and_other
    assert core_key(key.replace(" ", ""), principal) != core_key(other_key, other_principal)


def test_h07_two_tenants_never_meet(edge: Edge) -> None:
    edge.open(tenant=lambda request: edge.tenant + request.headers["x-tenant"])
    answers = [edge.send("/orders", headers={"X-Tenant": tenant}).json()["n"] for tenant in ("a", "b", "a")]
    assert answers == [1, 2, 1]


@pytest.mark.parametrize("unknown", [None, ""])
def test_h07_an_unknown_tenant_is_refused(shop: Edge, unknown: str | None) -> None:
    """Under the face's own tenant two of them would meet."""
    shop.open(tenant=lambda request: {"a": "acme"}.get(request.headers["x-tenant"], unknown))
    answers = [shop.send("/orders", headers={"X-Tenant": tenant}) for tenant in ("umbrella", "initech", "a")]
    assert [answer.status_code for answer in answers] == [401, 401, 201]
    assert problem(answers[0]) == "not-authenticated"
    assert shop.count("orders") == 1


def test_h07_a_tenant_may_be_a_number(shop: Edge) -> None:
    shop.open(tenant=lambda request: int(request.headers["x-tenant"]))
    answers = [shop.send("/orders", headers={"X-Tenant": tenant}).json()["n"] for tenant in ("1", "2", "1")]
    assert answers == [1, 2, 1]


def test_h07_an_unknown_sender_is_refused(shop: Edge) -> None:
    shop.open()
    answer = shop.send("/orders", user=None)
    assert (answer.status_code, problem(answer)) == (401, "not-authenticated")
    assert shop.count("orders") == 0


def test_h07_without_a_principal_nothing_starts() -> None:
    with Semel("memory://") as once, pytest.raises(ConfigurationError, match="principal"):
        wsgi.IdempotencyMiddleware(lambda *_: [], once=once, authenticated_outside=True)


def test_r33_without_a_word_on_authorization_nothing_starts() -> None:
    with Semel("memory://") as once, pytest.raises(ConfigurationError, match="authorize"):
        wsgi.IdempotencyMiddleware(lambda *_: [], once=once, anonymous=True)


def test_r33_authorization_runs_before_every_replay(edge: Edge) -> None:
    allowed = {"ada": True}
    edge.open(authorize=lambda request: allowed[request.headers["x-user"]])
    assert edge.send("/orders").status_code == 201
    allowed["ada"] = False
    answer = edge.send("/orders")
    assert (answer.status_code, problem(answer)) == (403, "not-authorized")
    allowed["ada"] = True
    assert edge.send("/orders").headers["idempotency-replayed"] == "true"


def test_h09_in_progress_without_waiting_is_409(edge: Edge) -> None:
    edge.open(wait=0)
    answers = edge.together(*[{"path": "/slow"}] * 3)
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409]
    busy = next(answer for answer in answers if answer.status_code == 409)
    assert problem(busy) == "in-progress"
    assert 1 <= int(busy.headers["retry-after"]) <= 10
    assert busy.json()["retryable"] is True
    assert edge.count("slow") == 1


def test_h10_in_progress_with_waiting_is_answered_by_the_outcome(edge: Edge) -> None:
    edge.open()
    answers = edge.together(*[{"path": "/slow"}] * 4)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert sorted(answer.headers["idempotency-replayed"] for answer in answers) == [
        "false",
        "true",
        "true",
        "true",
    ]
    assert edge.count("slow") == 1


def test_h10_prefer_wait_is_obeyed_within_the_cap(shop: Edge) -> None:
    shop.open(wait=0, max_wait=3)
    now = {"path": "/slow", "headers": {"Prefer": "wait=0"}}
    later = {"path": "/slow", "headers": {"Prefer": "respond-async, wait=100"}}
    assert sorted(answer.status_code for answer in shop.together(now, now)) == [200, 409]
    shop.ledger.slow = 0.2
    assert [
        answer.status_code for answer in shop.together({**later, "key": "k2"}, {**later, "key": "k2"})
    ] == [200, 200]


def test_h10_waiters_are_bounded(shop: Edge) -> None:
    shop.open(max_waiters=1)
    answers = shop.together(*[{"path": "/slow"}] * 4)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 409, 409]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_h23_and_h24_other_methods_pass_untouched_unless_they_opt_in(shop: Edge, method: str) -> None:
    shop.open()
    for _ in range(2):
        assert "idempotency-replayed" not in shop.send("/orders", method=method).headers
    assert shop.count("orders") == 2
    if method != "GET":
        shop.open(methods=["POST", method])
        assert [shop.send("/empty", "k2", method=method).headers["idempotency-replayed"] for _ in "ab"] == [
            "false",
            "true",
        ]


def test_h35_an_expired_key_is_refused_and_not_run(edge: Edge) -> None:
    edge.open(retention=0.2, grace=0.0)
    edge.send("/orders")
    time.sleep(0.3)
    answer = edge.send("/orders")
    assert (answer.status_code, problem(answer)) == (422, "key-expired")
    assert edge.count("orders") == 1


def test_h35_with_expired_new_it_runs_again(shop: Edge) -> None:
    shop.open(retention=0.1, tombstone=0, expired="new")
    shop.send("/orders")
    time.sleep(0.15)
    assert shop.send("/orders").status_code == 201
    assert shop.count("orders") == 2


def test_h35_an_old_uuid7_is_refused_without_a_record(shop: Edge) -> None:
    shop.open(retention=3600)
    old = (int((time.time() - 2 * 3600) * 1000) << 80) | (7 << 76) | (2 << 62) | 12345
    fresh = (int(time.time() * 1000) << 80) | (7 << 76) | (2 << 62) | 12345
    assert problem(shop.send("/orders", str(uuid.UUID(int=old)))) == "key-expired"
    assert shop.send("/orders", str(uuid.UUID(int=fresh))).status_code == 201


def test_h38_new_keys_are_counted_per_principal_and_replays_are_not(shop: Edge) -> None:
    shop.open(quota=2)
    answers = [shop.send("/orders", f"k{number}") for number in range(4)]
    assert [answer.status_code for answer in answers] == [201, 201, 429, 429]
    assert problem(answers[2]) == "quota-exceeded"
    assert shop.send("/orders", "k0").status_code == 201
    assert shop.send("/orders", "k9", user="bob").status_code == 201


def test_h39_early_data_is_refused(shop: Edge) -> None:
    shop.open()
    answer = shop.send("/orders", headers={"Early-Data": "1"})
    assert (answer.status_code, problem(answer)) == (425, "too-early")
    assert shop.count("orders") == 0


def test_h44_a_route_that_did_not_opt_in_ignores_keys(shop: Edge) -> None:
    shop.open(routes={"POST /orders": True, "/status/*": {"required": True}})
    assert [shop.send("/empty").status_code for _ in "ab"] == [204, 204]
    assert shop.count("empty") == 2
    assert [shop.send("/orders", "k2").headers["idempotency-replayed"] for _ in "ab"] == ["false", "true"]
    assert problem(shop.send("/status/200", None)) == "key-missing"


def test_a_key_may_come_from_query_path_or_body(shop: Edge) -> None:
    shop.open(sources=["query:key"])
    assert [shop.send("/orders?key=q1", None).json()["n"] for _ in "ab"] == [1, 1]
    shop.open(sources=["body:meta.key"])
    assert [shop.send("/orders", None, json={"meta": {"key": "b1"}}).json()["n"] for _ in "ab"] == [2, 2]
    assert shop.send("/orders", None, json={}).json()["n"] == 3
    shop.open(routes={"/orders/{id}": {"sources": ["path:id"]}})
    assert [shop.send("/orders/p1", None).json()["n"] for _ in "ab"] == [4, 4]


def test_a_key_may_come_from_a_resolver_and_another_header(shop: Edge) -> None:
    shop.open(key=lambda request: request.headers.get("x-command"))
    assert [shop.send("/orders", None, headers={"X-Command": "c1"}).json()["n"] for _ in "ab"] == [1, 1]
    shop.open(header=["X-Idem-Key", "Idempotency-Key"])
    assert [shop.send("/orders", None, headers={"X-Idem-Key": "c2"}).json()["n"] for _ in "ab"] == [2, 2]
    assert shop.send("/orders", "c2").json()["n"] == 2


@pytest.mark.parametrize("scope", ["principal", "route"])
def test_h05_services_with_operations_of_their_own_share_no_key(shop: Edge, scope: str) -> None:
    shop.url = f"memory://{uuid.uuid4().hex}"
    for operation in ("billing", "shipping", "default"):
        shop.open(semel={"operation": operation}, scope=scope)
        answers = [shop.send("/orders") for _ in "ab"]
        assert [answer.headers["idempotency-replayed"] for answer in answers] == ["false", "true"], operation
        where = ("http" if operation == "default" else operation) + (
            " POST /orders" if scope == "route" else ""
        )
        assert shop.do(shop.once.peek("key-1 ada", operation=where)) is not None
    assert shop.count("orders") == 3
