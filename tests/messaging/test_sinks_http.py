"""Webhooks against a real HTTP server, and functions in the process."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from semel import ConfigurationError
from semel.messaging import Message
from semel.messaging.sink import Rejected, Row, Sink, SinkUnavailable
from semel.messaging.sinks import open_sink
from semel.messaging.sinks.envelope import from_line
from semel.messaging.sinks.handler import HandlerSink
from semel.messaging.sinks.webhook import WebhookSink, sign
from semel.testing.services import home
from semel.testing.sinks import Arrived, SinkContract, rows
from tests.messaging.conftest import awaited

SECRET = "whsec_" + base64.b64encode(b"a key of some length").decode()
Answer = tuple[int, dict[str, str]]
FIELDS = ("topic", "key", "tenant", "type", "schema")


class Endpoint:
    """A server that keeps every request and answers as it is told."""

    def __init__(self, port: int = 0) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.answer: Callable[[str, dict[str, str], bytes], Answer] = lambda *_: (200, {})
        self._lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                status, more = endpoint.answer(self.path, headers, body)
                if 200 <= status < 300:
                    with endpoint._lock:
                        endpoint.requests.append((self.path, headers, body))
                self.send_response(status)
                for name, value in {"content-length": "0", **more}.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # its own name
                """Not to the terminal."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/hooks"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for _, headers, _ in self.requests]


@contextmanager
def serving(port: int = 0) -> Iterator[Endpoint]:
    endpoint = Endpoint(port)
    try:
        yield endpoint
    finally:
        endpoint.close()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as found:
        yield found


class TestWebhook(SinkContract):
    ordered = False
    endpoint: Endpoint

    @pytest.fixture(autouse=True)
    def _endpoint(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    def open(self) -> Sink:
        return open_sink(f"{self.endpoint.url}/{self.place}")

    def unreachable(self) -> Sink:
        return open_sink(f"http://127.0.0.1:{home.free_port()}/x")

    async def arrived(self) -> Sequence[Arrived]:
        found = []
        for path, headers, body in self.endpoint.requests:
            assert path.endswith(self.place)
            lines = {name: from_line(value) for name, value in headers.items()}
            named: dict[str, Any] = {name: lines.get(f"semel-{name}") for name in FIELDS}
            found.append(Arrived(id=lines["webhook-id"], body=body, headers=lines, **named))
        return found


class TestHandler(SinkContract):
    ordered = False
    places: ClassVar[dict[str, list[Message]]] = {}

    def open(self) -> Sink:
        async def handle(message: Message) -> None:
            self.places.setdefault(self.place, []).append(message)

        return HandlerSink(handle, concurrency=4)

    def unreachable(self) -> None:
        return None

    async def arrived(self) -> Sequence[Arrived]:
        return [
            Arrived(
                id=message.id,
                body=message.body if isinstance(message.body, bytes) else b'{"a":1}',
                topic=message.topic,
                key=message.key,
                tenant=message.tenant,
                type=message.type,
                schema=message.schema,
                headers=message.headers,
            )
            for message in self.places.get(self.place, [])
        ]


# -- the signature ------------------------------------------------------------------------------------------------------
def test_the_signature_is_the_one_of_the_standard() -> None:
    """The example in the specification's own test suite."""
    signature = sign(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        id="msg_p5jXN8AQM9LWM0D4loKWxJek",
        timestamp=1614265330,
        body=b'{"test": 2432232314}',
    )
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@awaited
async def test_a_request_is_signed_with_every_secret_and_names_its_message(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "whsec_" + base64.b64encode(b"the next key").decode()
    monkeypatch.setenv("HOOK_SECRET", f"{SECRET} {other}")
    before = int(time.time())
    async with WebhookSink.from_url(f"{endpoint.url}?token=7&secret_env=HOOK_SECRET") as sink:
        await sink.publish(0, 1, 1, rows(1))
    ((path, headers, body),) = endpoint.requests
    assert path == "/hooks?token=7"
    assert headers["idempotency-key"] == headers["webhook-id"] == "m-000000"
    at = int(headers["webhook-timestamp"])
    assert before <= at <= time.time()
    signatures = headers["webhook-signature"].split()
    for key, signature in zip((b"a key of some length", b"the next key"), signatures, strict=True):
        digest = hmac.digest(key, b"m-000000.%d.%b" % (at, body), hashlib.sha256)
        assert signature == "v1," + base64.b64encode(digest).decode()


@pytest.mark.parametrize("value", ["", "plain text", "whsec_not base64!"])
def test_a_bad_secret_is_refused_and_not_shown(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_SECRET", value)
    with pytest.raises(ConfigurationError) as caught:
        open_sink("https://example.invalid/hook?secret_env=HOOK_SECRET")
    assert not value or value not in str(caught.value)
    assert "whsec_" in str(caught.value)


# -- answers --------------------------------------------------------------------------------------------------------------
def refusing(*ids: str, status: int = 422) -> Callable[[str, dict[str, str], bytes], Answer]:
    return lambda _, headers, __: (status if headers["webhook-id"] in ids else 200, {})


@awaited
async def test_a_refused_message_holds_back_its_key_and_no_other(endpoint: Endpoint) -> None:
    endpoint.answer = refusing("m-000001")
    sent = rows(9)
    async with WebhookSink(endpoint.url) as sink:
        with pytest.raises(Rejected) as caught:
            await sink.publish(0, 1, 1, sent)
    assert set(caught.value.reasons) == {"m-000001"}
    assert "422" in caught.value.reasons["m-000001"]
    expected = {row.id for row in sent if row.key != "k-1"}
    assert set(endpoint.ids) == caught.value.delivered == expected


@pytest.mark.parametrize("status", [429, 502, 503, 504])
@awaited
async def test_an_endpoint_that_is_busy_is_left_alone_as_long_as_it_asks(
    endpoint: Endpoint, status: int
) -> None:
    endpoint.answer = lambda *_: (status, {"retry-after": "17"})
    async with WebhookSink(endpoint.url) as sink:
        with pytest.raises(SinkUnavailable) as caught:
            await sink.publish(0, 1, 1, rows(3))
    assert caught.value.seconds == 17


@awaited
async def test_retry_after_may_be_a_date_and_nonsense_is_ignored(endpoint: Endpoint) -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    answers = iter([later, "soon"])
    endpoint.answer = lambda *_: (503, {"retry-after": next(answers)})
    async with WebhookSink(endpoint.url) as sink:
        with pytest.raises(SinkUnavailable) as caught:
            await sink.publish(0, 1, 1, rows(1))
        assert 90 < (caught.value.seconds or 0) <= 100
        with pytest.raises(SinkUnavailable) as caught:
            await sink.publish(0, 1, 1, rows(1))
        assert caught.value.seconds is None


@awaited
async def test_what_was_delivered_before_an_outage_is_told(endpoint: Endpoint) -> None:
    endpoint.answer = refusing("m-000004", status=503)
    async with WebhookSink(endpoint.url, concurrency=1) as sink:
        with pytest.raises(Rejected) as caught:
            await sink.publish(0, 1, 1, rows(6, keys=0))
    assert caught.value.delivered == {"m-000000", "m-000001", "m-000002", "m-000003"}
    assert not caught.value.reasons


@awaited
async def test_an_endpoint_that_is_gone_is_disabled_until_it_is_enabled(endpoint: Endpoint) -> None:
    calls = []
    endpoint.answer = lambda *_: (calls.append(1), (410, {}))[1]  # type: ignore[func-returns-value]  # both in one expression
    async with WebhookSink(endpoint.url, concurrency=1) as sink:
        for _ in range(3):
            with pytest.raises(SinkUnavailable, match="410"):
                await sink.publish(0, 1, 1, rows(3))
        assert len(calls) == 1
        endpoint.answer = lambda *_: (200, {})
        sink.enable()
        await sink.publish(0, 1, 1, rows(3))
    assert len(endpoint.requests) == 3


@awaited
async def test_five_server_errors_in_a_row_open_the_circuit_of_that_endpoint_only(endpoint: Endpoint) -> None:
    endpoint.answer = lambda path, *_: (500 if path.endswith("orders") else 200, {})
    async with WebhookSink(f"{endpoint.url}/{{topic}}", concurrency=1) as sink:
        with pytest.raises(Rejected) as caught:
            await sink.publish(0, 1, 1, rows(20, keys=0))
        assert len(caught.value.reasons) == 5
        with pytest.raises(SinkUnavailable) as away:
            await sink.publish(0, 1, 2, rows(1))
        assert 0 < (away.value.seconds or 0) <= 30
        await sink.publish(0, 1, 1, rows(1, topic="bills"))
    assert [path for path, _, _ in endpoint.requests] == ["/hooks/bills"]


@awaited
async def test_one_poisonous_message_does_not_open_the_circuit(endpoint: Endpoint) -> None:
    endpoint.answer = refusing("m-000000", status=500)
    async with WebhookSink(endpoint.url, concurrency=1) as sink:
        for batch in range(1, 8):
            with pytest.raises(Rejected):
                await sink.publish(0, 1, batch, [*rows(1, keys=0), *rows(1, start=batch, keys=0)])
    assert len(endpoint.requests) == 7


@awaited
async def test_a_redirect_is_not_followed(endpoint: Endpoint) -> None:
    endpoint.answer = lambda path, *_: (302, {"location": "/elsewhere"}) if path == "/hooks" else (200, {})
    async with WebhookSink(endpoint.url) as sink:
        with pytest.raises(Rejected, match="302"):
            await sink.publish(0, 1, 1, rows(1))
    assert not endpoint.requests


@awaited
async def test_a_header_that_cannot_travel_rejects_its_message_alone(endpoint: Endpoint) -> None:
    first, second = rows(2, keys=0)
    bad = Row(
        **{**{name: getattr(first, name) for name in first.__struct_fields__}, "headers": {"no good": "x"}}
    )
    async with WebhookSink(endpoint.url) as sink:
        with pytest.raises(Rejected, match="no good"):
            await sink.publish(0, 1, 1, [bad, second])
    assert endpoint.ids == [second.id]


# -- functions --------------------------------------------------------------------------------------------------------------
@awaited
async def test_a_plain_function_runs_in_a_thread_and_gets_the_message() -> None:
    got: list[tuple[str, Any, bool]] = []

    def handle(message: Message) -> None:
        got.append((message.id, message.body, threading.current_thread() is threading.main_thread()))

    row = Row(1, "m-1", "default", "orders", "k", None, None, {}, b'{"a": [1, 2]}', 0.0)
    await HandlerSink(handle).publish(0, 1, 1, [row])
    assert got == [("m-1", {"a": [1, 2]}, False)]


@awaited
async def test_what_a_handler_raises_holds_back_that_key() -> None:
    seen: list[str] = []

    async def handle(message: Message) -> None:
        if message.id == "m-000001":
            raise ValueError("no such customer")
        seen.append(message.id)

    with pytest.raises(Rejected) as caught:
        await HandlerSink(handle).publish(0, 1, 1, rows(9))
    assert caught.value.reasons == {"m-000001": "ValueError: no such customer"}
    assert set(seen) == caught.value.delivered == {f"m-{n:06}" for n in (0, 2, 3, 5, 6, 8)}


@awaited
async def test_a_handler_may_ask_for_a_pause() -> None:
    async def handle(_: Message) -> None:
        raise SinkUnavailable("the printer is off", seconds=3)

    with pytest.raises(SinkUnavailable, match="printer"):
        await HandlerSink(handle).publish(0, 1, 1, rows(3))


@awaited
async def test_messages_of_different_keys_are_in_the_handler_together() -> None:
    inside, most = 0, 0
    together = asyncio.Event()

    async def handle(_: Message) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside == 3:
            together.set()
        await asyncio.wait_for(together.wait(), 30)
        inside -= 1

    await HandlerSink(handle, concurrency=3).publish(0, 1, 1, rows(3))
    assert most == 3


def test_a_handler_must_be_a_function() -> None:
    with pytest.raises(ConfigurationError, match="function"):
        HandlerSink("orders")  # type: ignore[arg-type]  # wrong on purpose


@awaited
async def test_credentials_of_whoever_made_a_message_stay_here(endpoint: Endpoint) -> None:
    """A message may carry copies of the headers of the request that made it."""
    sink = WebhookSink(endpoint.url)
    (row,) = rows(1)
    headers = {"Authorization": "Bearer x", "cookie": "session=1", "Proxy-Authorization": "y", "x-mine": "z"}
    await sink.publish(
        0, 1, 1, [Row(**{**{f: getattr(row, f) for f in row.__struct_fields__}, "headers": headers})]
    )
    ((_, sent, _),) = endpoint.requests
    assert sent["x-mine"] == "z"
    assert not {"authorization", "cookie", "proxy-authorization"} & sent.keys()
    await sink.aclose()


# -- endpoints that drip -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "says", [b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "]
)
@awaited
async def test_an_endpoint_that_drips_is_not_listened_to_without_an_end(says: bytes) -> None:
    """Each byte comes in time. Its status counts if it has come; the rest of the answer nobody needs."""

    gone = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(says)
        with suppress(ConnectionError):
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.05)
        writer.close()
        gone.set()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    sink = WebhookSink(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", timeout=0.3)
    async with asyncio.timeout(10):
        if says.endswith(b"\r\n\r\n"):
            assert await sink.publish(0, 1, 1, rows(1)) is None
        else:
            with pytest.raises(SinkUnavailable, match=r"within 0\.3 s"):
                await sink.publish(0, 1, 1, rows(1))
        await gone.wait()
    await sink.aclose()
    server.close()


@pytest.mark.parametrize("year", ["99999999999999999999", "10000", "0"])
@awaited
async def test_a_time_to_come_again_that_no_calendar_has_is_passed_over(
    endpoint: Endpoint, year: str
) -> None:
    """As a failure of the sink itself it would hold up the endpoints of others."""
    endpoint.answer = lambda *_: (503, {"retry-after": f"Wed, 21 Oct {year} 07:28:00 GMT"})
    sink = WebhookSink(endpoint.url)
    with pytest.raises(SinkUnavailable, match="503"):
        await sink.publish(0, 1, 1, rows(1))
    await sink.aclose()
