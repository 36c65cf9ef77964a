"""The same shop under every framework: first run, replay, mismatch, 204, stream, exception, tasks, uploads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from semel import AsyncSemel, Semel
from semel.http.rules import core_key, recorded
from tests.http.frames import ASYNC, SYNC, DjangoApp
from tests.http.shop import PIECES, Ledger


class Frame:
    """A guarded shop and a client of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_async = name in ASYNC
        self.ledger = Ledger()
        self.runner = asyncio.Runner()
        self.once: Any = AsyncSemel("memory://") if self.is_async else Semel("memory://")
        self.app: Any = None
        self.client: Any = None

    def open(self, **options: Any) -> Frame:
        build = (ASYNC if self.is_async else SYNC)[self.name]
        self.app = build(self.once, self.ledger, options)
        app = self.app.app if isinstance(self.app, DjangoApp) else self.app
        if self.is_async:
            transport: Any = httpx.ASGITransport(app, raise_app_exceptions=False)
            self.client = httpx.AsyncClient(transport=transport, base_url="http://shop")
        else:
            self.client = httpx.Client(
                transport=httpx.WSGITransport(_latin(app), raise_app_exceptions=False), base_url="http://shop"
            )
        return self

    def post(
        self, path: str, key: str | None = "key-1", user: str | None = "ada", **given: Any
    ) -> httpx.Response:
        headers = {"Idempotency-Key": key, "X-User": user}
        sent = {name: value for name, value in headers.items() if value is not None}
        answer = self.client.post(path, headers=sent, **given)
        return self.runner.run(answer) if self.is_async else answer  # type: ignore[no-any-return]  # a client of either colour

    def count(self, what: str) -> int:
        return self.ledger.count(what)

    def close(self) -> None:
        if isinstance(self.app, DjangoApp):
            self.app.close()
        if self.is_async:
            self.runner.run(self.client.aclose())
            self.runner.run(self.once.aclose())
        else:
            self.client.close()
            self.once.close()
        self.runner.close()


def _latin(app: Any) -> Any:
    """httpx gives a WSGI application its path as text, where a server gives bytes as Latin-1."""

    def fixed(environ: dict[str, Any], start_response: Any) -> Any:
        environ["PATH_INFO"] = environ["PATH_INFO"].encode().decode("latin-1")
        return app(environ, start_response)

    return fixed


@pytest.fixture(params=[*ASYNC, *SYNC])
def frame(request: pytest.FixtureRequest) -> Iterator[Frame]:
    made = Frame(request.param)
    yield made
    made.close()


def problem(response: httpx.Response) -> str:
    assert response.headers["content-type"] == "application/problem+json", response.text
    return str(response.json()["type"]).rpartition(":")[2]


def test_h11_h12_the_first_run_and_its_replay(frame: Frame) -> None:
    frame.open()
    first, again = frame.post("/orders", content=b"abc"), frame.post("/orders", content=b"abc")
    assert (first.status_code, first.json()) == (201, {"n": 1, "size": 3})
    assert (again.status_code, again.content) == (201, first.content)
    assert [answer.headers["idempotency-replayed"] for answer in (first, again)] == ["false", "true"]
    assert again.headers["location"] == first.headers["location"] == "/orders/1"
    assert again.headers["content-type"] == first.headers["content-type"]
    assert ("a=b" in first.headers["set-cookie"], "set-cookie" in again.headers) == (True, False)
    assert frame.count("orders") == 1


def test_h33_what_comes_after_the_response_comes_once(frame: Frame) -> None:
    frame.open()
    for _ in range(3):
        frame.post("/orders")
    assert frame.ledger.after == ["mail"]


def test_h01_h44_without_a_key_everything_is_as_before(frame: Frame) -> None:
    frame.open()
    answers = [frame.post("/orders", None, content=b"abc") for _ in range(2)]
    assert [answer.json()["size"] for answer in answers] == [3, 3]
    assert "idempotency-replayed" not in answers[0].headers
    assert frame.count("orders") == 2


def test_h01_a_required_key(frame: Frame) -> None:
    frame.open(required=True)
    answer = frame.post("/orders", None)
    assert (answer.status_code, problem(answer)) == (400, "key-missing")
    assert frame.count("orders") == 0


def test_h01_h11_a_method_in_lower_case_is_no_way_around_the_key(frame: Frame) -> None:
    """`fetch(url, {method: "patch"})` sends just that. Some frameworks run it, others know no such method."""
    frame.open(required=True)

    def send(**headers: str) -> httpx.Response:
        request = frame.client.build_request("POST", "/orders", headers={"X-User": "ada", **headers})
        request.method = "post"
        answer = frame.client.send(request)
        return frame.runner.run(answer) if frame.is_async else answer  # type: ignore[no-any-return]  # of either colour

    keyed = [send(**{"Idempotency-Key": "key-1"}) for _ in range(3)]
    if keyed[0].status_code == 201:
        assert [answer.headers["idempotency-replayed"] for answer in keyed] == ["false", "true", "true"]
        assert frame.post("/orders").headers["idempotency-replayed"] == "true"
    assert send().status_code in (400, 405)
    assert frame.count("orders") <= 1


def test_h05_another_body_is_another_request(frame: Frame) -> None:
    frame.open()
    frame.post("/orders", json={"a": 1, "b": 2})
    assert frame.post("/orders", json={"b": 2, "a": 1}).headers["idempotency-replayed"] == "true"
    answer = frame.post("/orders", json={"a": 2})
    assert (answer.status_code, problem(answer)) == (422, "key-reused")
    answer = frame.post("/empty", json={"a": 1, "b": 2})
    assert (answer.status_code, problem(answer)) == (422, "key-reused")
    assert (frame.count("orders"), frame.count("empty")) == (1, 0)


def test_h07_another_user_has_keys_of_his_own(frame: Frame) -> None:
    frame.open()
    assert [frame.post("/orders", user=user).json()["n"] for user in ("ada", "bob", "ada")] == [1, 2, 1]
    answer = frame.post("/orders", user=None)
    assert (answer.status_code, problem(answer)) == (401, "not-authenticated")


def test_a_204_is_an_outcome(frame: Frame) -> None:
    frame.open()
    answers = [frame.post("/empty") for _ in range(2)]
    assert [(answer.status_code, answer.content) for answer in answers] == [(204, b"")] * 2
    assert answers[1].headers["idempotency-replayed"] == "true"
    assert "content-length" not in answers[1].headers
    assert frame.count("empty") == 1


def test_h19_a_stream_is_recorded_and_replayed(frame: Frame) -> None:
    frame.open()
    answers = [frame.post("/stream") for _ in range(2)]
    assert [answer.content for answer in answers] == [b"".join(PIECES)] * 2
    assert [answer.headers["idempotency-replayed"] for answer in answers] == ["false", "true"]
    assert frame.count("stream") == 1


def test_h07_an_unknown_tenant_is_refused(frame: Frame) -> None:
    frame.open(tenant=lambda _: None)
    answer = frame.post("/orders", content=b"abc")
    assert (answer.status_code, problem(answer), frame.count("orders")) == (401, "not-authenticated", 0)


@pytest.mark.parametrize(
    "said, told",
    [
        (
            {"value": recorded(201, b"paid", {"Content-Type": "text/plain", "Location": "/o/7"})},
            (201, "paid"),
        ),
        ({"value": {"paid": 7}}, (200, '{"paid":7}')),
        ({"error": "it failed"}, (422, "previous-failure")),
    ],
    ids=["response", "json", "failure"],
)
def test_h16_what_a_person_decides_is_the_answer(
    frame: Frame, said: dict[str, Any], told: tuple[int, str]
) -> None:
    frame.open(effects="opaque")
    frame.ledger.failing = 9
    frame.post("/fail")
    resolved = frame.once.resolve(core_key("key-1", "ada"), operation="http", actor="op", **said)
    if frame.is_async:
        frame.runner.run(resolved)
    for _ in range(2):
        answer = frame.post("/fail")
        assert (answer.status_code, problem(answer) if "error" in said else answer.text) == told
        assert answer.headers.get("location") == ("/o/7" if told[0] == 201 else None)
        assert answer.headers.get("idempotency-replayed") == (None if "error" in said else "true")
    assert frame.count("fail") == 1


def test_h15_a_failed_handler_runs_again(frame: Frame) -> None:
    frame.open()
    frame.ledger.failing = 1
    first, again, third = (frame.post("/fail") for _ in range(3))
    assert (first.status_code, again.status_code, again.text) == (500, 200, "recovered")
    assert (third.text, third.headers["idempotency-replayed"]) == ("recovered", "true")
    assert frame.count("fail") == 2


def test_h15_a_failed_opaque_handler_does_not(frame: Frame) -> None:
    frame.open(effects="opaque")
    frame.ledger.failing = 9
    first, again = frame.post("/fail"), frame.post("/fail")
    assert first.status_code == 500
    assert again.status_code == 500 or problem(again) == "outcome-unknown"
    assert frame.count("fail") == 1


def test_h14_a_refusal_of_the_framework_is_an_outcome(frame: Frame) -> None:
    frame.open()
    first, again = frame.post("/refuse"), frame.post("/refuse")
    assert (first.status_code, again.status_code, again.content) == (404, 404, first.content)
    assert [answer.headers["idempotency-replayed"] for answer in (first, again)] == ["false", "true"]
    assert frame.count("refuse") == 1


def test_h27_an_upload_is_compared_by_its_parts(frame: Frame) -> None:
    frame.open()

    def send(name: str = "n", file: str = "a.txt", content: bytes = b"one") -> httpx.Response:
        return frame.post("/form", data={"name": name}, files={"file": (file, content, "text/plain")})

    first, again = send(), send()  # httpx makes another boundary each time
    assert (first.status_code, first.text) == (200, "n a.txt 3")
    assert (again.text, again.headers["idempotency-replayed"]) == ("n a.txt 3", "true")
    for other in (send(name="m"), send(file="b.txt"), send(content=b"two")):
        assert (other.status_code, problem(other)) == (422, "key-reused")
    assert frame.count("form") == 1


def test_h25_a_large_upload_reaches_the_handler(frame: Frame) -> None:
    frame.open()
    files = {"file": ("big.bin", b"x" * (3 << 20), "application/octet-stream")}
    answers = [frame.post("/form", data={"name": "n"}, files=files) for _ in range(2)]
    assert [answer.text for answer in answers] == [f"n big.bin {3 << 20}"] * 2
    assert frame.count("form") == 1


def test_the_query_and_the_path_may_hold_anything(frame: Frame) -> None:
    frame.open()
    answers = [frame.post("/orders?q=%E2%82%AC%FF&q=ü") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert frame.post("/orders?q=other").status_code == 422
    assert frame.post("/%E2%82%AC%C3%BC", "key-2").status_code == 404
