"""Real uvicorn and gunicorn processes: clients that leave, workers that die, stores that stop, bytes that lie (H16-H18, H22, H25, H34)."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from semel.testing import services
from tests.http.site import SECONDS, Site, read


def problem(response: httpx.Response) -> str:
    assert response.headers["content-type"] == "application/problem+json", response.text
    return str(response.json()["type"]).rpartition(":")[2]


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Site]]:
    with ExitStack() as stack:

        def start(kind: str, url: str | None = None, **options: Any) -> Site:
            url = url or f"sqlite:///{tmp_path}/semel.db"
            made = Site(kind, url, tmp_path, **options)
            stack.callback(made.stop)
            return made

        yield start


@pytest.mark.parametrize("kind", ["h11", "httptools", "django", "gunicorn"])
def test_h18_a_client_that_leaves_changes_nothing(site: Any, kind: str) -> None:
    server = site(kind)
    with server.send("/slow", "k1"):
        server.did("begun")
    server.open_gate()
    server.did("slow")
    again = server.post("/slow")
    assert (again.status_code, again.text, again.headers["idempotency-replayed"]) == (201, "slow", "true")
    assert server.lines().count("begun") == 1
    server.shut_gate()
    with server.send("/stream", "k2") as connection:
        while b"first," not in connection.recv(65536):
            pass
    server.open_gate()
    again = server.post("/stream", "k2")
    assert (again.status_code, again.headers["idempotency-replayed"]) == (200, "true")
    assert again.content.startswith(b"first,")
    assert again.content.endswith(b"98,99,")
    assert (server.lines().count("stream"), server.lines().count("streamed")) == (1, 1)


def test_h18_sigterm_lets_handlers_end(site: Any) -> None:
    server = site("httptools")
    with server.send("/slow", "stays") as stays:
        server.did("begun")
        with server.send("/slow", "leaves"):
            server.did("begun", 2)
        server.process.send_signal(signal.SIGTERM)
        server.open_gate()
        assert stays.recv(65536).startswith(b"HTTP/1.1 201")
    assert server.process.wait(SECONDS) is not None
    assert server.lines()[-3:] == ["slow", "slow", "closed"]
    server.start()
    for key in ("stays", "leaves"):
        assert server.post("/slow", key).headers["idempotency-replayed"] == "true"
    assert server.lines().count("begun") == 2


@pytest.mark.parametrize("kind", ["h11", "gunicorn"])
def test_h16_a_killed_worker_is_replaced_after_its_lease(site: Any, kind: str) -> None:
    """Two workers on one store; the one that dies in its handler is started again, or its sister takes over."""
    server = site(kind, workers=2, lease=1.5)
    with server.send("/kill", "k1") as connection:
        assert connection.recv(65536) == b""
    server.until(server.listens, "somebody listens")
    begun = time.monotonic()
    again = server.post("/kill")
    assert (again.status_code, again.text, again.headers["idempotency-replayed"]) == (
        201,
        "recovered",
        "false",
    )
    assert time.monotonic() - begun < 20
    assert server.post("/kill").headers["idempotency-replayed"] == "true"
    assert server.lines().count("kill") == 2


@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_two_workers_run_each_key_once(site: Any, request: pytest.FixtureRequest, store: str) -> None:
    url = request.getfixturevalue("redis_server").url if store == "redis" else None
    server = site("httptools", url, workers=2)
    keys = [f"key-{number}" for number in range(10)] * 3
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda key: server.post("/orders", key, json={"key": key}), keys))
    assert {answer.status_code for answer in answers} == {201}
    assert sorted(server.lines()) == sorted(f"orders {key}" for key in set(keys))
    for key in set(keys):
        assert len({answer.content for asked, answer in zip(keys, answers, strict=True) if asked == key}) == 1


@pytest.mark.parametrize("kind", ["h11", "gunicorn"])
def test_h17_a_store_that_dies_between_claim_and_record(site: Any, kind: str) -> None:
    with services.redis(appendonly="always") as store:
        server = site(kind, store.url, patience=2, lease=30)
        with server.send("/slow", "k1") as connection:
            server.did("begun")
            store.kill()
            server.open_gate()
            begun = time.monotonic()
            answer = b""
            while b"}" not in answer and (piece := connection.recv(65536)):  # head and body may come apart
                answer += piece
            assert answer.startswith(b"HTTP/1.1 503"), answer
            assert b"outcome-pending" in answer
            assert b"retry-after: 1" in answer.lower()
            assert time.monotonic() - begun < 20
        store.start()
        again = _patiently(lambda: server.post("/slow"))
        assert (again.status_code, again.text, again.headers["idempotency-replayed"]) == (201, "slow", "true")
        assert server.lines().count("begun") == 1


def _patiently(ask: Callable[[], httpx.Response]) -> httpx.Response:
    """As a client would: while the answer says retryable, again."""
    end = time.monotonic() + SECONDS
    while True:
        answer = ask()
        if answer.status_code not in (409, 503) or time.monotonic() > end:
            return answer
        assert answer.json()["retryable"] is True
        time.sleep(0.1)


@pytest.mark.parametrize("kind", ["h11", "gunicorn"])
def test_h34_a_store_that_stops_answering(site: Any, kind: str) -> None:
    with services.redis() as store:
        server = site(kind, store.url, patience=1)
        assert server.post("/orders", "k0").status_code == 201
        took = []
        with store.paused():
            for number in range(5):
                begun = time.monotonic()
                answer = server.post("/orders", f"k{number}")
                assert (answer.status_code, problem(answer)) == (503, "store-unavailable")
                assert answer.headers["retry-after"] == "1"
                took.append(time.monotonic() - begun)
        # The store has a second, and a busy machine some more; once the breaker is open nothing is waited for.
        assert max(took) < 15
        assert min(took[3:]) < 0.9
        assert server.lines() == ["orders k0"]
        assert _patiently(lambda: server.post("/orders", "k1")).status_code == 201
        assert _patiently(lambda: server.post("/orders", "k0")).headers["idempotency-replayed"] == "true"


# -------------------------------------------------------------------------------------------------- bytes that lie


def head(*lines: str, path: str = "/orders") -> bytes:
    return ("\r\n".join((f"POST {path} HTTP/1.1", "Host: shop", "X-User: ada", *lines)) + "\r\n\r\n").encode(
        "latin-1"
    )


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


KEY = "Idempotency-Key: {}"
LENGTH = "Content-Length: {}"
# name, request, whether the client closes after it, what the layer says (None: what the server says by itself, without us)
REQUESTS: list[tuple[str, bytes, bool, str | None]] = [
    ("plain", head(KEY.format("a"), LENGTH.format(3)) + b"abc", False, "run"),
    ("again, in chunks", head(KEY.format("a"), "Transfer-Encoding: chunked") + chunked(b"a", b"bc"), False, "replay"),
    ("quoted", head(KEY.format('"a"'), LENGTH.format(3)) + b"abc", False, "replay"),
    ("quoted, with parameters", head(KEY.format('"a";v=1'), LENGTH.format(3)) + b"abc", False, "replay"),
    ("header in capitals", head("IDEMPOTENCY-KEY: a", LENGTH.format(3)) + b"abc", False, "replay"),
    ("spaces around", head("Idempotency-Key:   a  ", LENGTH.format(3)) + b"abc", False, "replay"),
    ("another body", head(KEY.format("a"), LENGTH.format(3)) + b"abd", False, "key-reused"),
    ("two lines", head(KEY.format("b"), KEY.format("b"), LENGTH.format(0)), False, "key-malformed"),
    ("two keys", head(KEY.format("b"), KEY.format("c"), LENGTH.format(0)), False, "key-malformed"),
    ("a comma", head(KEY.format("b, c"), LENGTH.format(0)), False, "key-malformed"),
    ("empty", head("Idempotency-Key:", LENGTH.format(0)), False, "key-malformed"),
    ("a tab inside", head(KEY.format("b\tc"), LENGTH.format(0)), False, "key-malformed"),
    ("Latin-1", head(KEY.format("caf\xe9"), LENGTH.format(0)), False, "key-malformed"),
    ("255", head(KEY.format("x" * 255), LENGTH.format(0)), False, "run"),
    ("256", head(KEY.format("x" * 256), LENGTH.format(0)), False, "key-too-long"),
    ("5000", head(KEY.format("x" * 5000), LENGTH.format(0)), False, "key-too-long"),
    ("underscore", head("Idempotency_Key: u", LENGTH.format(0)), False, "unkeyed"),
    ("no length", head(KEY.format("n")), False, "run"),
    ("Content-Length too long", head(KEY.format("cut"), LENGTH.format(10)) + b"abc", True, None),
    ("chunks cut off", head(KEY.format("cut"), "Transfer-Encoding: chunked") + b"5\r\nab", True, None),
    ("chunk size is none", head(KEY.format("cut"), "Transfer-Encoding: chunked") + b"zz\r\nab\r\n0\r\n\r\n", True, None),
    ("two lengths", head(KEY.format("cut"), LENGTH.format(3), LENGTH.format(4)) + b"abcd", True, None),
    ("length is none", head(KEY.format("cut"), LENGTH.format("abc")) + b"abc", True, None),
    ("over the cap", head(KEY.format("cut"), LENGTH.format(3000)) + b"x" * 3000, False, "body-too-large"),
    ("over the cap in chunks", head(KEY.format("cut"), "Transfer-Encoding: chunked") + chunked(*[b"x" * 500] * 6), False, "body-too-large"),
    ("after all that", head(KEY.format("cut"), LENGTH.format(3)) + b"abc", False, "run"),
]  # fmt: skip


def decision(answer: bytes) -> str | None:
    top, _, body = answer.partition(b"\r\n\r\n")
    lowered = top.lower()
    if b"application/problem+json" in lowered:
        start = body.index(b"{")
        return str(json.loads(body[start : body.rindex(b"}") + 1])["type"]).rpartition(":")[2]
    if b"idempotency-replayed: true" in lowered:
        return "replay"
    if b"idempotency-replayed: false" in lowered:
        return "run"
    return "unkeyed" if top.startswith(b"HTTP/1.1 201") else None


@pytest.mark.parametrize("kind", ["h11", "httptools", "gunicorn"])
def test_h02_h25_every_parser_leads_to_the_same_decision(site: Any, kind: str) -> None:
    server = site(kind, max_body=2000)
    got = {}
    for name, data, then_close, _ in REQUESTS:
        try:
            got[name] = decision(server.raw(data, then_close=then_close))
        except ConnectionError:  # refused by closing
            got[name] = None
    wanted = {name: said for name, _, _, said in REQUESTS}
    if kind == "gunicorn":  # it drops names with underscores, and gives a cut-off body to the application
        assert got.pop("Content-Length too long") in (None, "body-incomplete")
        del wanted["Content-Length too long"]
    assert got == wanted
    done = [line for line in server.lines() if line.startswith("orders")]
    assert done == ["orders a", f"orders {'x' * 255}", "orders None", "orders n", "orders cut"]


@pytest.mark.parametrize("kind", ["h11", "httptools"])
def test_h22_a_refusal_comes_before_the_upload(site: Any, kind: str) -> None:
    server = site(kind)
    asks = ("Expect: 100-continue", LENGTH.format(1 << 20))
    with server.connect() as connection:
        connection.sendall(head(KEY.format("bad key"), *asks))
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")
    with server.connect() as connection:
        connection.sendall(head(KEY.format("good"), *asks))
        assert connection.recv(65536).startswith(b"HTTP/1.1 100")
        connection.sendall(b"x" * (1 << 20))
        assert decision(read(connection)) == "run"


@pytest.mark.parametrize("kind", ["httptools", "gunicorn"])
def test_h25_a_large_body_arrives_whole(site: Any, kind: str) -> None:
    server = site(kind)
    large = os.urandom(1 << 16) * 128  # 8 MiB: on disk, not in memory

    def pieces() -> Iterator[bytes]:
        yield from (large[at : at + 50_000] for at in range(0, len(large), 50_000))

    first = server.post("/orders", content=large)
    again = server.post("/orders", content=pieces())
    assert (first.status_code, first.json()["size"]) == (201, len(large))
    assert (again.content, again.headers["idempotency-replayed"]) == (first.content, "true")
    over = server.post("/orders", "k2", content=b"x" * (33 << 20))
    assert (over.status_code, problem(over)) == (413, "body-too-large")
    assert server.lines() == ["orders k1"]
