"""What the functions of a route are given (R44): the message, or the row, as their parameter says; and what they may give back."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec
import pytest

from semel import ConfigurationError
from semel.messaging import Message, Outbox, Relay, Route, Row
from semel.messaging.events import Declined
from semel.messaging.routes import Router
from semel.messaging.shaping import asked, explained, transformed
from semel.messaging.sinks.handler import HandlerSink
from tests.messaging.books import Book
from tests.messaging.conftest import Home, RedisPlace, awaited

ROW = Row(7, "m1", "acme", "orders", "k", "placed", None, {"h": "1"}, b'{"n":4}', 12.5)


def is_large(message: Message) -> bool:
    return bool(message.body["n"] > 2)


def without_number(message: Message) -> Message:
    return replace(message, topic="x", body={"was": message.body["n"]}, id="another")


async def drained(place: Home | RedisPlace, route: Route, hooks: Any = ()) -> None:
    outbox = Outbox(place.url, table=place.table)
    outbox.create()
    with place.transaction() as target:
        for n in range(4):
            outbox.add(target, Message("orders", {"n": n}, key=f"k{n}", id=f"m{n}", headers={"h": str(n)}))
    async with Relay(outbox, {"orders": route}, hooks=hooks) as relay:
        await relay.drain()
    outbox.close()


@awaited
async def test_functions_of_a_message_get_its_decoded_body(place: Home | RedisPlace) -> None:
    book = Book()
    await drained(place, Route(book, when=is_large, transform=without_number))
    ((row),) = book.rows
    assert (row.id, row.topic, row.key, row.body, row.headers) == ("m3", "x", "k3", b'{"was":3}', {"h": "3"})


@awaited
async def test_a_function_that_says_nothing_gets_the_message(place: Home | RedisPlace) -> None:
    """A lambda, say: what people expect, and what a handler gets."""
    book = Book()
    route = Route(book, when=lambda m: m.body["n"] > 2, transform=lambda m: replace(m, body=[m.body["n"]]))
    await drained(place, route)
    ((row),) = book.rows
    assert (row.id, row.topic, row.key, row.body, row.headers) == ("m3", "orders", "k3", b"[3]", {"h": "3"})


@pytest.mark.parametrize(
    ("when", "told"),
    [
        (lambda row: row.body["n"] > 2, ("byte indices", "row.message().body")),
        (lambda m: m.seq > 2, ("no attribute 'seq'", "annotate its parameter as Row")),
        (lambda m: msgspec.structs.replace(m, topic="x"), ("Struct", "annotate its parameter as Row")),
        (lambda m: m.body.decode(), ("no attribute 'decode'", "decoded already")),
        (lambda row: row.body.get("n"), ("no attribute 'get'", "row.message().body")),
        (lambda m: json.loads(m.body), ("must be str, bytes", "annotate its parameter as Row")),
        (lambda m: msgspec.json.decode(m.body), ("bytes-like object", "`message.data`")),
        (lambda m: m.body + b"x", ("'dict' and 'bytes'", "decoded already")),
        (lambda m: hashlib.sha256(m.body), ("buffer API", "decoded already")),
    ],
)
@awaited
async def test_a_function_that_takes_one_for_the_other_is_told_so(
    sqlite_home: Home, when: Any, told: tuple[str, str]
) -> None:
    events: list[Any] = []
    await drained(sqlite_home, Route(Book(), when=when), [events.append])
    reasons = [event.reason for event in events if isinstance(event, Declined)]
    assert reasons
    assert all(words in reason for reason in reasons for words in told)


@pytest.mark.parametrize(
    "when",
    [
        lambda m: m.body["m"],
        lambda m: m.body.n > 2,
        lambda m: m.body["n"] > None,
        lambda m: len(m.body["n"]),
        lambda m: int("x"),
        lambda m: m.id.decode(),  # which is no bytes in a Row either
        lambda m: m.body.get("name").strip(),
        lambda m: m.body["n"].lower(),
        lambda m: io.BytesIO().write("text"),  # type: ignore[arg-type] # pyright: ignore[reportArgumentType] # wrong on purpose
        lambda m: hashlib.sha256("text"),  # type: ignore[arg-type] # pyright: ignore[reportArgumentType] # wrong on purpose
        lambda m: object().find(m.body),  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue] # wrong on purpose
        lambda m: m.boddy,
        lambda m: m.key + b"x",
        lambda row: row.boddy,
        lambda row: row.topic + b"x",
        lambda row: b"x".lowered(),  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue] # wrong on purpose
    ],
)
def test_other_mistakes_get_no_such_hint(when: Any) -> None:
    with pytest.raises((KeyError, AttributeError, TypeError, ValueError)) as caught:
        asked(when, ROW)
    assert explained(caught.value) == repr(caught.value)


@pytest.mark.parametrize("when", [lambda m: m.body["n"], lambda m: m.body.n, lambda m: "x" in m.body])
def test_a_message_that_has_bytes_is_not_called_decoded(when: Any) -> None:
    with pytest.raises((AttributeError, TypeError)) as caught:
        asked(when, msgspec.structs.replace(ROW, body=b"\x00", raw=True))
    assert explained(caught.value) == repr(caught.value)


@awaited
async def test_a_handler_that_takes_its_message_for_a_row_is_told_so(sqlite_home: Home) -> None:
    events: list[Any] = []

    async def handle(message: Message) -> None:
        json.loads(message.body)

    await drained(sqlite_home, Route(handle), [events.append])
    reasons = [event.reason for event in events if isinstance(event, Declined)]
    assert len(reasons) == 4
    assert all("not dict; it was given a Message" in reason for reason in reasons)


def test_a_row_is_what_is_asked_for_by_type_or_by_name() -> None:
    def silent(row: Row) -> Row:
        return msgspec.structs.replace(row, body=b"{}", id="another")

    def typed(it: Row) -> Row:
        return it

    def untold(it: TypedElsewhere) -> object:  # type: ignore[name-defined] # pyright: ignore[reportUndefinedVariable] # noqa: F821 - wrong on purpose
        return it

    def message_called_row(row: Message) -> object:
        return row

    assert transformed(silent, ROW) == msgspec.structs.replace(ROW, body=b"{}")
    assert asked(lambda row: row, ROW) is ROW
    assert asked(typed, ROW) is ROW
    assert isinstance(asked(untold, ROW), Message)
    assert isinstance(asked(message_called_row, ROW), Message)


def test_what_is_not_said_in_a_message_stays_the_rows() -> None:
    sent = transformed(lambda row: Message("raw", b"\x00", id="another"), ROW)
    assert (sent.seq, sent.id, sent.created, sent.attempts) == (7, "m1", 12.5, 0)
    assert (sent.tenant, sent.topic, sent.key, sent.type, sent.headers) == ("default", "raw", None, None, {})
    assert (sent.body, sent.raw) == (b"\x00", True)


def test_anything_else_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a Row or a Message, not NoneType"):
        transformed(lambda row: None, ROW)


@dataclass
class Over:
    """An object that cannot be hashed."""

    limit: int

    def __call__(self, message: Message) -> bool:
        return bool(message.body["n"] > self.limit)


class Asks:
    def of_message(self, message: Message) -> int:
        return int(message.body["n"])


def test_objects_and_methods_are_functions_too() -> None:
    assert asked(Over(3), ROW) is True
    assert asked(Asks().of_message, ROW) == 4
    assert asked(attrgetter("body"), ROW) == {"n": 4}
    assert asked(type, ROW) is Message  # one that says nothing of itself
    assert asked(partial(row_with, 5), ROW) == (5, ROW)
    assert asked(partial(message_with, 5), ROW) == 4


def row_with(limit: int, it: Row) -> tuple[int, Row]:
    return limit, it


def message_with(limit: int, row: Message) -> int:
    assert limit == 5
    return int(row.body["n"])


def test_a_condition_that_nobody_awaits_is_refused() -> None:
    async def late(message: Message) -> bool:
        return bool(message.body)

    when: Any = late
    with pytest.raises(ConfigurationError, match="coroutine function, whose answer nobody awaits"):
        Router({"orders": Route(HandlerSink(print), when=when)})
