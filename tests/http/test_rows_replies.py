"""The specification's rows about responses: H11-H22, H25-H33, H37, H40, H41, H43."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from email.utils import formatdate
from typing import Any

import pytest

from semel import ConfigurationError
from semel.http import rules
from semel.http.client import new_key
from semel.http.guard import Keyed
from tests.http.conftest import Edge
from tests.http.shop import BINARY, PIECES
from tests.http.test_rows_keys import problem


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/orders", 201, None),
        ("/empty", 204, b""),
        ("/binary", 200, BINARY),
        ("/stream", 200, b"".join(PIECES)),
    ],
)
def test_h11_a_replay_is_the_same_status_and_the_same_bytes(
    edge: Edge, path: str, status: int, body: bytes | None
) -> None:
    edge.open()
    first, again = edge.send(path), edge.send(path)
    assert first.status_code == again.status_code == status
    assert first.content == again.content
    assert body is None or first.content == body
    assert first.headers.get("content-type") == again.headers.get("content-type")
    assert len(edge.ledger.calls) == 1


def test_h11_and_h12_the_marker_says_whether_it_was_replayed(edge: Edge) -> None:
    edge.open()
    answers = [edge.send("/orders") for _ in range(2)]
    assert [answer.headers["idempotency-replayed"] for answer in answers] == ["false", "true"]
    first, left = (int(answer.headers["idempotency-retention"]) for answer in answers)
    assert first == 86_400
    assert 86_300 < left <= 86_400, "a replay says how long it can still be had"


def test_h13_what_is_rejected_before_the_handler_leaves_no_claim(shop: Edge) -> None:
    shop.open()
    assert shop.send("/nowhere").status_code == 404
    assert shop.send("/orders", user=None).status_code == 401
    assert shop.send("/orders", "key-2").status_code == 201


@pytest.mark.parametrize("status", [200, 201, 303, 307, 308, 400, 404, 405, 409, 422])
def test_h14_final_responses_are_stored(edge: Edge, status: int) -> None:
    edge.open()
    first, again = (edge.send(f"/status/{status}", follow_redirects=False) for _ in "ab")
    assert (first.status_code, again.status_code) == (status, status)
    assert first.content == again.content
    assert edge.count("status") == 1


@pytest.mark.parametrize("status", [401, 403, 408, 425, 429])
def test_h14_passing_rejections_are_not_stored(shop: Edge, status: int) -> None:
    shop.open()
    first, again = shop.send(f"/status/{status}"), shop.send(f"/status/{status}")
    assert first.content != again.content
    assert "idempotency-retention" not in first.headers


def test_h14_a_handler_may_decide_for_one_response(shop: Edge) -> None:
    shop.open()
    first, again = (shop.send("/status/200", headers={"X-Control": "no-store"}) for _ in "ab")
    assert first.content != again.content
    assert "idempotency-control" not in first.headers
    kept = [shop.send("/status/429", "k2", headers={"X-Control": "store"}).content for _ in "ab"]
    assert kept[0] == kept[1]
    short = shop.send("/status/200", "k3", headers={"X-Control": "retention=7"})
    assert short.headers["idempotency-retention"] == "7"


@pytest.mark.parametrize("path", ["/fail", "/status/503"])
def test_h15_effects_db_a_failure_left_nothing_behind_and_is_run_again(edge: Edge, path: str) -> None:
    edge.open(effects="db")
    edge.ledger.failing = 1
    first, again = edge.send(path), edge.send(path)
    assert first.status_code >= 500
    assert len(edge.ledger.calls) == 2
    assert again.status_code == (200 if path == "/fail" else 503)


def test_h15_effects_steps_a_retry_resumes_after_the_last_step(edge: Edge) -> None:
    edge.open(effects="steps")
    edge.ledger.failing = 1
    first, again = edge.send("/steps"), edge.send("/steps")
    assert (first.status_code, again.status_code, again.text) == (500, 200, "paid")
    assert (edge.count("steps"), edge.count("charge")) == (2, 1)


def test_h15_effects_opaque_a_failure_is_never_run_again(edge: Edge) -> None:
    edge.open(effects="opaque")
    first, again = edge.send("/status/500"), edge.send("/status/500")
    assert first.content == again.content
    assert again.headers["idempotency-replayed"] == "true"
    edge.ledger.failing = 9
    edge.send("/fail", "k2")
    answer = edge.send("/fail", "k2")
    assert answer.status_code in (422, 500)
    assert edge.count("fail") == 1


@pytest.mark.parametrize(
    "options",
    [
        {"profile": "acp"},
        {"profile": "iceberg"},
        {"profile": "oasis"},
        {"stored": lambda status: status < 300},
    ],
    ids=["acp", "iceberg", "oasis", "function"],
)
@pytest.mark.parametrize("path", ["/status/502", "/fail"])
def test_h15_effects_opaque_a_failure_that_is_not_kept_is_an_unknown_outcome(
    shop: Edge, options: dict[str, Any], path: str
) -> None:
    shop.ledger.failing = 9
    shop.open(effects="opaque", **options)
    key = new_key()
    sent = {"Repeatability-Request-ID": key, "Repeatability-First-Sent": formatdate(usegmt=True)}
    first, again, third = (shop.send(path, key, headers=sent) for _ in "abc")
    assert first.status_code in (500, 502)
    assert "idempotency-retention" not in first.headers
    assert (again.status_code, problem(again), third.status_code) == (422, "outcome-unknown", 422)
    assert len(shop.ledger.calls) == 1


def test_h15_effects_opaque_a_failure_that_is_held_waits_for_a_person(edge: Edge) -> None:
    edge.open(effects="opaque", stored="success-and-4xx")
    edge.send("/status/500")
    assert problem(edge.send("/status/500")) == "outcome-unknown"
    said = rules.recorded(201, b"paid")
    edge.do(edge.once.resolve(rules.core_key("key-1", "ada"), operation="http", value=said, actor="eve"))
    answer = edge.send("/status/500")
    assert (answer.status_code, answer.content, edge.count("status")) == (201, b"paid", 1)


def test_h15_effects_opaque_an_operator_frees_a_failure(shop: Edge) -> None:
    shop.open(effects="opaque")
    shop.send("/status/500")
    resolved = shop.once.resolve(
        rules.core_key("key-1", "ada"),
        release=True,
        actor="op",
        reason="checked",
        operation="http",
        result_type=bytes,
    )
    shop.do(resolved)
    assert shop.send("/status/500").content == b"answer 2"


@pytest.mark.parametrize(
    "said, status, content",
    [
        ({"value": rules.recorded(201, b"paid", {"Content-Type": "text/plain"})}, 201, "paid"),
        ({"value": {"paid": 7}}, 200, '{"paid":7}'),
        ({"value": "paid"}, 200, '"paid"'),
        ({"value": None}, 422, "response-not-stored"),
        ({"value": b"no response at all"}, 422, "response-not-stored"),
        ({"value": 1 + 2j}, 422, "response-not-stored"),
        ({"error": "it failed"}, 422, "previous-failure"),
    ],
)
def test_h16_whatever_a_person_decides_is_an_answer(
    shop: Edge, said: dict[str, Any], status: int, content: str
) -> None:
    shop.open(effects="opaque")
    shop.ledger.failing = 9
    shop.send("/fail")
    key = rules.core_key("key-1", "ada")
    shop.do(shop.once.resolve(key, operation="http", actor="op", reason="checked", **said))
    answers = [shop.send("/fail") for _ in "ab"]
    assert [answer.status_code for answer in answers] == [status, status]
    told = answers[0].text if status < 400 else answers[0].json()["type"].rpartition(":")[2]
    assert told == content
    assert (shop.count("fail"), answers[0].headers["cache-control"]) == (1, "no-store")


@pytest.mark.parametrize(
    "given, match",
    [
        ((100,), "200 to 599"),
        (("201",), "200 to 599"),
        ((201, "text"), "body must be bytes"),
        ((201, b"", [("a", "b")]), "must be a mapping"),
        ((201, b"", {"Content-Length": "3"}), "never replayed"),
        ((201, b"", {"Set-Cookie": "a=b"}), "never replayed"),
        ((201, b"", {"a b": "c"}), "no header's name"),
        ((201, b"", {"a": "b\r\nset-cookie: c"}), "one line"),
    ],
)
def test_h16_a_response_that_could_not_be_sent_is_refused_before_it_is_recorded(
    given: tuple[Any, ...], match: str
) -> None:
    with pytest.raises(ConfigurationError, match=match):
        rules.recorded(*given)


def test_h16_a_dead_owner_is_replaced_after_its_lease(edge: Edge) -> None:
    edge.open()
    edge.orphan(lease=0.3)
    assert edge.send("/orders").status_code == 201
    assert edge.count("orders") == 1


def test_h16_an_opaque_crash_is_an_unknown_outcome(shop: Edge) -> None:
    shop.open(effects="opaque")
    shop.orphan(lease=0.1, on_unknown="hold")
    time.sleep(0.15)
    answer = shop.send("/orders")
    assert (answer.status_code, problem(answer)) == (422, "outcome-unknown")
    assert shop.count("orders") == 0


def test_h19_a_stream_that_died_with_its_process_is_not_run_again(edge: Edge) -> None:
    edge.open(lease=0.3)
    edge.send("/orders", "warm-up")  # tables exist now
    guard = next(iter(edge.plan.guard_for("POST", "/big") or ()))

    async def die() -> None:
        keyed = Keyed("key-1", "ada", None, bytes.fromhex(edge.print_of("/big")), 0.0, "POST /big")
        admitted = await guard.admit(keyed)
        run = guard.begin(admitted)
        await guard.started(run, 201, [(b"location", b"/big/1")])
        guard.engine.heart.remove(run)  # its process is killed: no heartbeat, no outcome

    edge.drive(die())
    answer = edge.send("/big", headers={"Prefer": "wait=20"})
    assert (answer.status_code, problem(answer)) == (422, "response-not-stored")
    assert (answer.json()["original_status"], answer.json()["location"]) == (201, "/big/1")
    assert edge.send("/big").status_code == 422
    assert edge.count("big") == 0


def test_h19_a_broken_stream_follows_the_failure_policy(edge: Edge) -> None:
    edge.open(effects="db")
    for _ in range(2):
        with suppress(RuntimeError):  # how a client sees a cut connection is its library's business
            edge.send("/broken")
    assert edge.count("broken") == 2


def test_h19_a_retry_while_the_stream_runs_waits_for_its_end(shop: Edge) -> None:
    shop.open()
    answers = shop.together({"path": "/stream"}, {"path": "/stream"})
    assert [answer.content for answer in answers] == [b"".join(PIECES)] * 2
    assert shop.count("stream") == 1


def test_h20_an_event_bus_that_does_not_exist_is_refused_at_the_start(shop: Edge) -> None:
    with pytest.raises(ConfigurationError, match="event bus"):
        shop.open(events=object())


def test_h25_a_large_body_is_spooled_and_hashed(edge: Edge) -> None:
    edge.open()
    large = os.urandom(3 << 20)
    first = edge.send("/orders", content=large)
    assert first.json()["size"] == len(large)
    assert edge.send("/orders", content=large).headers["idempotency-replayed"] == "true"
    assert edge.send("/orders", content=large[:-1] + bytes([large[-1] ^ 1])).status_code == 422


def test_h25_a_body_over_the_cap_is_refused(shop: Edge) -> None:
    shop.open(max_body=1000)
    answer = shop.send("/orders", content=b"x" * 1001)
    assert (answer.status_code, problem(answer)) == (413, "body-too-large")
    assert shop.send("/orders", content=b"x" * 1000).status_code == 201


def test_h26_a_response_over_the_cap_is_never_run_again(edge: Edge) -> None:
    edge.open(max_response=1000)
    first = edge.send("/big")
    assert (first.status_code, len(first.content)) == (201, 3000)
    answer = edge.send("/big")
    assert (answer.status_code, problem(answer)) == (422, "response-not-stored")
    assert (answer.json()["original_status"], answer.json()["location"]) == (201, "/big/1")
    assert answer.headers["location"] == "/big/1"
    assert edge.count("big") == 1


def test_h27_a_form_is_compared_by_its_parts(shop: Edge) -> None:
    shop.open()

    def form(name: str, content: bytes, boundary: str) -> dict[str, Any]:
        body = (
            (
                f'--{boundary}\r\nContent-Disposition: form-data; name="f"; filename="{name}"\r\n'
                "Content-Type: text/plain\r\n\r\n"
            ).encode()
            + content
            + f"\r\n--{boundary}--\r\n".encode()
        )
        return {"content": body, "headers": {"Content-Type": f"multipart/form-data; boundary={boundary}"}}

    assert shop.send("/orders", **form("a.txt", b"one", "AaB03x")).status_code == 201
    assert shop.send("/orders", **form("a.txt", b"one", "zzzzzz")).status_code == 201
    assert shop.send("/orders", **form("a.txt", b"two", "AaB03x")).status_code == 422
    assert shop.send("/orders", **form("b.txt", b"one", "AaB03x")).status_code == 422
    assert shop.count("orders") == 1


def test_h28_to_h30_and_h32_only_the_allow_list_is_replayed(edge: Edge) -> None:
    edge.open()
    first, again = edge.send("/orders"), edge.send("/orders")
    assert first.headers["set-cookie"] == "session=secret"
    assert {"set-cookie", "x-request-id"}.isdisjoint(again.headers)
    for name in ("location", "etag", "link", "content-type"):
        assert again.headers[name] == first.headers[name]
    assert again.headers["content-length"] == str(len(again.content))


def test_h32_the_allow_list_can_be_longer_but_not_by_cookies(shop: Edge) -> None:
    shop.open(replay_headers=["X-Request-Id"])
    assert [shop.send("/orders").headers["x-request-id"] for _ in "ab"] == ["r-1", "r-1"]
    with pytest.raises(ConfigurationError, match="set-cookie"):
        shop.open(replay_headers=["Set-Cookie"])


def test_h33_background_tasks_run_once(edge: Edge) -> None:
    edge.open()
    for _ in range(3):
        edge.send("/orders")
    assert edge.ledger.after == ["mail"]


def test_h37_secret_routes_need_encryption(shop: Edge) -> None:
    with pytest.raises(ConfigurationError, match="encrypt"):
        shop.open(secret=True)
    shop.open(secret=True, semel={"encrypt": {"k1": os.urandom(32)}})
    assert [shop.send("/orders").headers["idempotency-replayed"] for _ in "ab"] == ["false", "true"]


def test_h37_and_r32_keys_are_kept_masked(edge: Edge) -> None:
    edge.open()
    edge.send("/orders", "0123456789-secret-key")
    key = rules.core_key("0123456789-secret-key", "ada")
    record = edge.do(edge.once.peek(key, operation="http"))
    assert "secret" not in record.scope.key
    assert "…" in record.scope.key


def test_h40_replays_are_not_cached(shop: Edge) -> None:
    shop.open()
    assert [shop.send("/orders").headers.get("cache-control") for _ in "ab"] == [None, "no-store"]


def test_h41_problems_have_types_of_their_own(shop: Edge) -> None:
    shop.open(problem_base="https://api.example/problems/")
    answer = shop.send("/orders", "bad key")
    assert answer.json()["type"] == "https://api.example/problems/key-malformed"
    assert answer.headers["link"] == '<https://api.example/problems/key-malformed>; rel="describedby"'
    assert answer.headers["content-language"] == "en"
    assert answer.json()["retryable"] is False
    assert "bad key" not in answer.text


def test_h43_the_names_for_cors_are_there() -> None:
    assert "Idempotency-Key" in rules.CORS_ALLOW_HEADERS
    assert {"Idempotency-Replayed", "Retry-After", "Location"} <= set(rules.CORS_EXPOSE_HEADERS)


@pytest.mark.parametrize(
    ("profile", "status", "stored"),
    [
        ("ietf", 404, True), ("ietf", 500, False),
        ("success-only", 404, False), ("success-only", 201, True),
        ("stripe-v1", 500, True), ("stripe-v1", 402, True),
        ("acp", 500, False), ("acp", 404, True),
        ("adcp", 404, False), ("adcp", 200, True),
        ("iceberg", 419, False), ("iceberg", 404, True),
        ("oasis", 503, False), ("oasis", 409, True),
    ],
)  # fmt: skip
def test_profiles_store_what_they_say(profile: str, status: int, stored: bool) -> None:
    from semel.http.config import _rules

    given = _rules(rules.Rules(), {"profile": profile})
    assert (rules.word_for(given, status) == "store") is stored


def test_profile_oasis_uses_its_own_headers(shop: Edge) -> None:
    from email.utils import formatdate

    shop.open(profile="oasis")

    def send(first_sent: str) -> Any:
        headers = {"Repeatability-Request-ID": "r-1", "Repeatability-First-Sent": first_sent}
        return shop.send("/orders", None, headers=headers)

    now = formatdate(usegmt=True)
    assert [send(now).headers["repeatability-result"] for _ in "ab"] == ["accepted", "accepted"]
    assert shop.count("orders") == 1
    assert send(formatdate(time.time() - 90_000, usegmt=True)).status_code == 412
    for no_date in (
        "yesterday",
        "Fri, 31 Dec 99999999999999999999 23:59:59 GMT",
        now[:-3] + "+99999999999999",
    ):
        assert send(no_date).status_code == 400


def test_profile_stripe_says_400_for_another_request(shop: Edge) -> None:
    shop.open(profile="stripe-v1")
    shop.send("/orders", json={"a": 1})
    again = shop.send("/orders", json={"a": 1})
    assert again.headers["idempotent-replayed"] == "true"
    assert shop.send("/orders", json={"a": 2}).status_code == 400


def test_h34_a_store_that_is_down_refuses_before_the_handler(colour: str) -> None:
    edge = Edge(colour, "redis://127.0.0.1:1/0").open(semel={"timeout": 0.3})
    begun = time.monotonic()
    answers = [edge.send("/orders") for _ in range(5)]
    assert time.monotonic() - begun < 8, "not the store's own two seconds each"
    assert {answer.status_code for answer in answers} == {503}
    assert problem(answers[0]) == "store-unavailable"
    assert answers[0].headers["retry-after"] == "1"
    assert edge.count("orders") == 0
    edge.close()


def test_h34_fail_open_runs_without_a_marker(colour: str) -> None:
    edge = Edge(colour, "redis://127.0.0.1:1/0").open(semel={"timeout": 0.2}, fail_open=True)
    answer = edge.send("/orders", json={"a": 1})
    assert (answer.status_code, answer.json()["size"]) == (201, 7)
    assert "idempotency-replayed" not in answer.headers
    edge.close()


def test_parallel_first_requests_run_once(edge: Edge) -> None:
    edge.open()
    answers = edge.together(*[{"path": "/orders", "json": {"a": 1}}] * 12)
    assert {answer.status_code for answer in answers} == {201}
    assert edge.count("orders") == 1
