"""What is written for speed says the same as what it stands for: fingerprints, results, headers, bodies, names for people."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel import AsyncSemel
from semel.codec import encoder_for
from semel.codec.paths import MAX_DEPTH
from semel.codec.tagged import MAX_PARTS, _is_plain
from semel.http.asgi import IdempotencyMiddleware
from semel.http.body import SPOOL_OVER, Body
from semel.http.capture import _lines
from semel.http.fingerprints import digest_of, fingerprint
from semel.http.head import read_head
from semel.http.keys import BARE, read_key
from semel.http.problem import Problem
from semel.http.rules import Rules
from semel.keys import mask

_TYPES = st.sampled_from(
    [
        b"",
        b"application/json",
        b"APPLICATION/JSON; charset=utf-8",
        b"application/problem+json",
        b"text/plain",
        b"application/json, text/plain",
        b"multipart/form-data; boundary=x",
        b"caf\xe9/\xff",
    ]
)
_BODIES = st.sampled_from(
    [
        b"",
        b"{}",
        b'{"a":1,"b":[1,2]}',
        b'{ "b": [1, 2], "a": 1 }',
        b'{"a":1.0}',
        b'{"a":1,"a":2}',
        b'{"\\u0061":1}',
        b"[" * 40 + b"]" * 40,
        b"not json",
        b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--x--\r\n',
    ]
) | st.binary(max_size=64)


@given(
    method=st.sampled_from(["POST", "PATCH"]),
    path=st.text(max_size=300).filter(lambda text: text.isprintable()),
    query=st.binary(max_size=20),
    kind=_TYPES,
    body=_BODIES,
    exclude=st.sampled_from([(), ("a",)]),
)
def test_the_short_way_to_a_fingerprint_gives_the_same_one(
    method: str, path: str, query: bytes, kind: bytes, body: bytes, exclude: tuple[str, ...]
) -> None:
    whole, fed = Body(1 << 20, body, len(body)), Body(1 << 20)
    fed.feed(body)
    long = fingerprint(method, path, query, kind.decode("latin-1"), fed, exclude)
    assert digest_of(method, path, query, kind, whole, exclude).hex() == long


@given(st.binary(max_size=300))
def test_bytes_are_stored_as_the_writer_would_write_them(data: bytes) -> None:
    codec = encoder_for(bytes)
    assert _is_plain(data, MAX_DEPTH - 1, [MAX_PARTS])
    assert codec.encode(data)[1:] == codec._writer.write(data)
    assert codec.decode(codec.encode(data)) == data


@given(st.binary(min_size=1, max_size=300))
def test_a_key_that_is_taken_at_once_is_one_that_would_be_read_so(line: bytes) -> None:
    known = read_key([line])
    if BARE.fullmatch(line):
        assert known == line.decode()
    elif not isinstance(known, Problem):
        assert known != line.decode("latin-1")  # quoted, or with spaces around it


def test_a_masked_key_shows_at_most_a_third_and_four_letters_at_each_end() -> None:
    for size in range(300):
        key = "".join(chr(0x4E00 + at) for at in range(size))
        shown = min(4, size // 6)
        assert mask(key) == f"{key[:shown]}…{key[size - shown :]}"


@pytest.mark.parametrize("piece", [b"", b"abc"])
def test_a_body_that_came_whole_is_one_that_was_fed(piece: bytes) -> None:
    whole, fed = Body(SPOOL_OVER * 2, piece, len(piece)), Body(SPOOL_OVER * 2)
    fed.feed(piece)
    for more in (b"", b"def", b"x" * SPOOL_OVER):
        whole.feed(more)
        fed.feed(more)
        assert (whole.whole, whole.size, whole.digest) == (fed.whole, fed.size, fed.digest)
        assert (
            b"".join(whole.chunks()) == b"".join(fed.chunks()) == bytes(whole.view() if whole.size else b"")
        )
        assert whole.file().read() == fed.file().read()
    whole.close()
    fed.close()


def test_headers_of_a_response_become_pairs_of_bytes_of_our_own() -> None:
    usual: list[Any] = [(b"Location", b"/1"), (b"etag", b"x")]
    lines = _lines(usual)
    assert lines == usual
    assert lines is not usual
    odd: list[Any] = [[b"location", bytearray(b"/1")], (memoryview(b"etag"), b"x"), (b"vary", b"a")]
    lines = _lines(iter(odd))
    assert lines == [(b"location", b"/1"), (b"etag", b"x"), (b"vary", b"a")]
    assert {(type(pair), *map(type, pair)) for pair in lines} == {(tuple, bytes, bytes)}
    with pytest.raises(ValueError, match="unpack"):
        _lines([(b"a", b"b", b"c")])


def test_what_is_ours_is_not_sent_and_the_list_that_was_read_stays() -> None:
    ours = [(b"Idempotency-Control", b"no-store"), (b"ETag", b"x"), (b"idempotency-replayed", b"true")]
    given_list, plain = list(ours), [(b"ETag", b"x"), (b"date", b"now")]
    head = read_head(Rules(), 201, given_list)
    assert (head.sent, head.stored, head.word) == ([(b"ETag", b"x")], [(b"etag", b"x")], "release")
    assert given_list == ours
    assert read_head(Rules(), 201, plain).sent == plain


def test_an_eager_task_that_is_over_at_once_leaves_nothing_behind() -> None:
    asyncio.run(_asked_eagerly())


async def _asked_eagerly() -> None:
    """As `asyncio.eager_task_factory` of Python 3.12 begins a task: before whoever made it goes on."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "headers": [(b"idempotency-key", b"key-of-a-form-0001")],
    }
    async with AsyncSemel("memory://") as once:
        guarded = IdempotencyMiddleware(app, once=once, principal=lambda _: "ada", authenticated_outside=True)
        loop = asyncio.get_running_loop()
        make = loop.create_task

        class Over:
            """A task that has ended when it is made."""

        def eager(coroutine: Any, **options: Any) -> Any:
            if coroutine.__qualname__ != "IdempotencyMiddleware._first":
                return make(coroutine, **options)
            with pytest.raises(StopIteration):
                coroutine.send(None)
            return Over()

        loop.create_task = eager  # type: ignore[method-assign,assignment]
        try:
            await guarded(scope, receive, send)
        finally:
            loop.create_task = make  # type: ignore[method-assign]
    assert sent[-1]["body"] == b"done"
    assert not guarded._running


def test_a_body_does_not_show_what_is_in_it() -> None:
    """Whoever reports errors shows locals, too."""
    assert repr(Body(10, b"4111", 4)) == "<Body of 4 bytes>"


def test_a_content_type_of_another_kind_of_bytes_is_read() -> None:
    """Servers may give anything like bytes."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def ask() -> list[Any]:
        guarded = IdempotencyMiddleware(
            app, once=AsyncSemel("memory://"), anonymous=True, authenticated_outside=True
        )
        headers = [(b"idempotency-key", b"key-of-a-form-0001"), (b"content-type", bytearray(b"text/plain"))]
        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers}
        told: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"x"}

        async def send(message: Any) -> None:
            told.append(message)

        await guarded(scope, receive, send)
        return told

    assert asyncio.run(ask())[0]["status"] == 200
