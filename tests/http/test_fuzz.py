"""Whatever a client sends: no 5xx of ours, one effect for one key, nobody else's bytes, no key echoed (H02, H05-H07, H41)."""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import re
import string
from typing import Any, NamedTuple
from uuid import UUID

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from semel import AsyncSemel, Semel
from semel.http import asgi, intake, keys, wsgi
from semel.http.keys import read_key
from semel.http.problem import PROBLEMS

# Small alphabets meet each other often; the rest is for the parsers.
GOOD = st.sampled_from(["k", "k2", '"k"', '"k";p=1', " k ", "K", "k" * 255])
TEXT = st.text(string.printable, max_size=20).map(lambda text: text.replace("\r", "").replace("\n", ""))
KEYS = st.one_of(
    GOOD.map(lambda key: [key.encode()]),
    TEXT.map(lambda key: [key.encode()]),
    st.binary(max_size=12).map(lambda raw: [raw.translate(None, b"\r\n\0")]),
    st.lists(GOOD.map(str.encode), max_size=3),
    st.just([b"x" * 300]),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FORM = b'--B\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--B--\r\n'
BODIES = st.one_of(
    st.sampled_from(
        [
            b"",
            b"{}",
            b'{"a":1}',
            b'{"a":1.0}',
            b'{"a":1,"a":2}',
            b"{" * 2000,
            b'{"id":"k"}',
            b'{"id":7}',
            FORM,
            FORM[:30],
        ]
    ),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=40),
)
TYPES = st.sampled_from(
    ["", "application/json", "application/json; charset=utf-8", "APPLICATION/JSON", "application/x+json", "text/plain", "é/\xff",
     "multipart/form-data; boundary=B", "multipart/form-data", 'multipart/form-data; boundary="', "multipart/form-data; boundary=" + "x" * 99]
)  # fmt: skip
QUERIES = st.sampled_from([b"", b"a=1", b"key=k", b"key=%FF&key=", b"%", b"&&=", b"key=" + b"x" * 300])


class Sent(NamedTuple):
    keys: list[bytes]
    user: str
    method: str
    path: bytes
    query: bytes
    kind: str
    body: bytes
    prefer: bytes


SENT = st.builds(
    Sent,
    KEYS,
    st.sampled_from(["ada", "ada", "ada", "bob", "ada k", "k ada", ""]),
    st.sampled_from(["POST", "POST", "PATCH", "PUT", "GET"]),
    st.sampled_from([b"/a", b"/a", b"/b", b"/\xe2\x82\xac", b"/\xff"]),
    QUERIES,
    TYPES,
    BODIES,
    st.sampled_from([b"", b"wait=0", b"wait=99999999999", b"wait=-1, respond-async", b"\xff"]),
)
USERS = st.sampled_from(["ada", "bob", "ada k", "k ada", ""])
SPELLINGS = {b"k": [b'"k"', b" k", b'"k";p=1', b"k"], b"k2": [b"k2", b'"k2"']}


@st.composite
def conversations(draw: st.DrawFn) -> list[Sent]:
    """A few requests, then the same ones again: from others, spelled otherwise, or changed in one place."""
    base = draw(st.lists(SENT, min_size=1, max_size=3))
    sent = list(base)
    for one in draw(st.lists(st.sampled_from(base), max_size=5)):
        changed = one._replace(user=draw(USERS)) if draw(st.booleans()) else one
        match draw(st.integers(0, 5)):
            case 0:
                spelled = [draw(st.sampled_from(SPELLINGS.get(key, [key]))) for key in one.keys]
                changed = changed._replace(keys=spelled)
            case 1:
                changed = changed._replace(body=draw(BODIES))
            case 2:
                changed = changed._replace(path=b"/b", method="PATCH")
            case _:
                pass
        sent.append(changed)
    return sent


RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "strict": {"required": True, "strict": True},
    "sources": {"sources": ["header:idempotency-key", "query:key", "body:id"], "scope": "route"},
    "small": {"max_body": 20, "exclude": ["a.b", "a"]},
    "adcp": {"profile": "adcp"},
}


class Shop:
    """The handler says who asked, and counts."""

    def __init__(self) -> None:
        self.effects: list[str] = []

    def handle(self, user: str) -> bytes:
        self.effects.append(user)
        return json.dumps({"of": user, "n": len(self.effects)}).encode()


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


async def ask_asgi(rules: dict[str, Any], requests: list[Sent]) -> tuple[list[Answer], Shop]:
    shop = Shop()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        user = dict(scope["headers"]).get(b"x-user", b"").decode()
        await send(
            {
                "type": "http.response.start",
                "status": 201,
                "headers": [(b"content-type", b"application/json")],
            }
        )
        await send({"type": "http.response.body", "body": shop.handle(user)})

    async with AsyncSemel("memory://") as once:
        principal = _principal
        guarded = asgi.IdempotencyMiddleware(
            app, once=once, principal=principal, authenticated_outside=True, **rules
        )
        return [await _one(guarded, sent) for sent in requests], shop


async def _one(guarded: Any, sent: Sent) -> Answer:
    headers = [(b"idempotency-key", key) for key in sent.keys] + [(b"x-user", sent.user.encode())]
    headers += [(b"content-type", sent.kind.encode("latin-1"))] if sent.kind else []
    headers += [(b"prefer", sent.prefer)] if sent.prefer else []
    scope = {
        "type": "http", "http_version": "1.1", "method": sent.method, "scheme": "http", "headers": headers,
        "path": sent.path.decode("utf-8", "surrogateescape"), "raw_path": sent.path, "query_string": sent.query,
    }  # fmt: skip
    pieces = [{"type": "http.request", "body": sent.body, "more_body": False}]
    got: list[Any] = []

    async def receive() -> Any:
        return pieces.pop(0) if pieces else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        got.append(message)

    await guarded(scope, receive, send)
    names = {name.decode(): value.decode("latin-1") for name, value in got[0]["headers"]}
    return Answer(got[0]["status"], names, b"".join(message.get("body", b"") for message in got[1:]))


def ask_wsgi(rules: dict[str, Any], requests: list[Sent]) -> tuple[list[Answer], Shop]:
    shop = Shop()

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("201 Created", [("Content-Type", "application/json")])
        return [shop.handle(environ.get("HTTP_X_USER", ""))]

    with Semel("memory://") as once:
        guarded = wsgi.IdempotencyMiddleware(
            app, once=once, principal=_principal, authenticated_outside=True, **rules
        )
        return [_one_wsgi(guarded, sent) for sent in requests], shop


def _one_wsgi(guarded: Any, sent: Sent) -> Answer:
    environ: dict[str, Any] = {
        "REQUEST_METHOD": sent.method, "PATH_INFO": sent.path.decode("latin-1"), "QUERY_STRING": sent.query.decode("latin-1"),
        "SERVER_NAME": "shop", "SERVER_PORT": "80", "wsgi.url_scheme": "http", "HTTP_X_USER": sent.user,
        "wsgi.input": io.BytesIO(sent.body), "CONTENT_LENGTH": str(len(sent.body)), "HTTP_PREFER": sent.prefer.decode("latin-1"),
    }  # fmt: skip
    if sent.keys:
        environ["HTTP_IDEMPOTENCY_KEY"] = b",".join(sent.keys).decode("latin-1")
    if sent.kind:
        environ["CONTENT_TYPE"] = sent.kind
    started: list[Any] = []

    def start_response(status: str, headers: Any, exc_info: Any = None) -> None:
        started[:] = [int(status[:3]), {name.lower(): value for name, value in headers}]

    result = guarded(environ, start_response)
    body = b"".join(result)
    if hasattr(result, "close"):
        result.close()
    return Answer(started[0], started[1], body)


def _principal(request: Any) -> str:
    return str(request.headers.get("x-user", ""))


# What the code says word by word: nothing is put into it.
REASONS = {
    text for module in (keys, intake) for text in re.findall(r'reason="([^"]+)"', inspect.getsource(module))
}


def _says_only_what_it_always_says(said: dict[str, Any]) -> None:
    """No key, no stored data, no difference between two requests."""
    kind = PROBLEMS[said.pop("type").rpartition(":")[2]]
    assert (said.pop("title"), said.pop("detail"), said.pop("retryable")) == (
        kind.title,
        kind.detail,
        kind.retryable,
    )
    assert said.pop("status") == kind.status
    assert UUID(said.pop("instance")).version == 4  # a name for this occurrence, made for it (H41)
    assert said.pop("reason", None) in {None, *REASONS}
    assert said.keys() <= {"retry_after", "min_length", "limit"}
    assert all(isinstance(value, int) for value in said.values())


def check(rules: dict[str, Any], requests: list[Sent], answers: list[Answer], shop: Shop) -> None:
    firsts: dict[tuple[str, ...], tuple[Sent, bytes]] = {}
    for sent, answer in zip(requests, answers, strict=True):
        marker = answer.headers.get("idempotency-replayed")
        assert answer.status in (201, 400, 401, 413, 422, 429), (sent, answer)
        if answer.status == 201:
            assert json.loads(answer.body)["of"] == sent.user, "somebody else's bytes"
        else:
            assert answer.headers["content-type"] == "application/problem+json"
            assert marker is None
            _says_only_what_it_always_says(json.loads(answer.body))
        if marker is None or len(sent.keys) != 1:
            continue
        key = read_key(sent.keys)
        assert isinstance(key, str)
        name = (
            (sent.user, key, sent.method, sent.path.hex())
            if rules.get("scope") == "route"
            else (sent.user, key)
        )
        if marker == "false":
            assert name not in firsts, "two effects for one key"
            firsts[name] = (sent, answer.body)
        else:
            first, body = firsts[name]
            assert answer.body == body
            assert (sent.method, sent.path, sent.query) == (first.method, first.path, first.query)
            assert sent.body == first.body or sent.kind.lower() != "text/plain"
    executed = [
        answer
        for answer in answers
        if answer.status == 201 and answer.headers.get("idempotency-replayed") != "true"
    ]
    assert len(shop.effects) == len(executed)


# A conversation takes longer to make up than to hold: each is held under all rules.
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=3 * settings().max_examples)
@given(requests=conversations())
def test_no_request_breaks_the_asgi_layer(requests: list[Sent]) -> None:
    async def ask() -> dict[str, tuple[list[Answer], Shop]]:
        return {name: await ask_asgi(rules, requests) for name, rules in RULES.items()}

    for name, (answers, shop) in asyncio.run(ask()).items():
        note(f"with the rules {name!r}")
        check(RULES[name], requests, answers, shop)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=3 * settings().max_examples)
@given(requests=conversations())
def test_no_request_breaks_the_wsgi_layer(requests: list[Sent]) -> None:
    for name, rules in RULES.items():
        note(f"with the rules {name!r}")
        check(rules, requests, *ask_wsgi(rules, requests))
