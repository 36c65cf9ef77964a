"""Tenants take turns: one with a long backlog does not hold up the others, and every key keeps its order."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from semel.messaging import Message, Outbox, Relay, Row
from semel.messaging.pages import Want
from semel.messaging.sharing import shared
from tests.messaging.books import Book
from tests.messaging.conftest import Home, awaited


def add(home: Home, outbox: Outbox, tenant: str, count: int, keys: int = 3) -> None:
    with Session(home.engine) as session, session.begin():
        messages = (
            Message("t", n, id=f"{tenant}-{n}", key=f"k{n % keys}", tenant=tenant) for n in range(count)
        )
        outbox.add(session, *messages)


def in_order(book: Book) -> bool:
    last: dict[tuple[str, str | None], int] = {}
    for row in book.rows:
        number = int(row.id.rpartition("-")[2])
        if last.get((row.tenant, row.key), -1) >= number:
            return False
        last[row.tenant, row.key] = number
    return True


@awaited
async def test_a_long_backlog_does_not_hold_up_the_others(fresh_home: Home) -> None:
    outbox = fresh_home.outbox(parts=1)
    add(fresh_home, outbox, "large", 5_000 if "postgres" in fresh_home.url else 1_000)
    add(fresh_home, outbox, "small", 10)
    add(fresh_home, outbox, "default", 10)
    book = Book()
    async with Relay(outbox, {"*": book}, batch=100, loops=1) as relay:
        await relay.drain()
    assert {row.tenant for row in book.rows[:100]} == {"large", "small", "default"}
    assert sum(row.tenant != "large" for row in book.rows[:100]) == 20, "not all in the first batch"
    assert len(book.ids) == len(set(book.ids))
    assert in_order(book)
    outbox.close()


@awaited
async def test_without_turns_the_others_wait(sqlite_home: Home) -> None:
    outbox = sqlite_home.outbox(parts=1)
    add(sqlite_home, outbox, "large", 300)
    add(sqlite_home, outbox, "small", 10)
    book = Book()
    async with Relay(outbox, {"*": book}, batch=100, loops=1, fair=False) as relay:
        await relay.drain()
    assert {row.tenant for row in book.rows[:300]} == {"large"}
    outbox.close()


@awaited
async def test_more_tenants_than_fit_have_their_turn(postgres_home: Home) -> None:
    """More of them than are looked up at a time, and than a batch has room for."""
    outbox = Outbox(postgres_home.url, table=f"{postgres_home.table}_many", parts=1)
    outbox.create()
    add(postgres_home, outbox, "a-large", 2_000)
    with Session(postgres_home.engine) as session, session.begin():
        for n in range(150):
            outbox.add(session, Message("t", n, id=f"{n}-0", key="k", tenant=f"t{n:03}"))
    book = Book()
    async with Relay(outbox, {"*": book}, batch=50, loops=1) as relay:
        await relay.drain()
    places = {row.tenant: place for place, row in enumerate(book.rows)}
    assert max(place for tenant, place in places.items() if tenant != "a-large") < 500
    assert len(set(book.ids)) == len(book.ids) == 2_150
    outbox.close()


@awaited
async def test_limits_and_keys_that_are_held_back_are_kept_to(sqlite_home: Home) -> None:
    outbox = sqlite_home.outbox(parts=1)
    for tenant in ("large", "other", "small"):
        add(sqlite_home, outbox, tenant, 500 if tenant == "large" else 20)
    book = Book()
    book.bad["small-0"] = "no"
    async with Relay(
        outbox, {"*": book}, batch=50, loops=1, tenants=["large", "small"], name="some", backoff=(60, 60)
    ) as relay:
        await relay.drain()
    assert {row.tenant for row in book.rows} == {"large", "small"}
    assert sum(row.tenant == "small" for row in book.rows) == 13, (
        "the key that is held back went, or others did not"
    )
    assert in_order(book)
    assert sqlite_home.count() == 20 + 7
    outbox.close()


@pytest.mark.parametrize("fair", [True, False])
@awaited
async def test_nothing_is_looked_up_while_all_of_a_part_fits(sqlite_home: Home, fair: bool) -> None:
    outbox = sqlite_home.outbox(parts=4)
    add(sqlite_home, outbox, "one", 50)
    add(sqlite_home, outbox, "two", 50)
    seen: list[str] = []
    event.listen(outbox.database.engine, "before_cursor_execute", lambda *args: seen.append(args[2]))
    book = Book()
    async with Relay(outbox, {"*": book}, batch=200, loops=1, fair=fair) as relay:
        await relay.drain()
    assert len(book.rows) == 100
    assert not [said for said in seen if "RECURSIVE" in said]
    outbox.close()


def _row(tenant: str, seq: int) -> Row:
    return Row(seq, f"{tenant}{seq}", tenant, "t", None, None, None, {}, b"", 0.0)


def test_shares() -> None:
    """A full page of one, two others behind it: each gets a third, in turns, its own first."""
    page = {0: [_row("a", n) for n in range(9)]}
    behind = {"b": [_row("b", n) for n in range(100, 105)], "c": [_row("c", 200)]}
    asked: list[tuple[int, str]] = []

    def fetch(wanted: Iterable[tuple[int, str]], most: int) -> dict[tuple[int, str], list[Row]]:
        asked.extend(wanted)
        return {(0, name): rows[:most] for name, rows in behind.items()}

    found = shared(page, Want([0], 9, 100), {0: ["a", "b", "c"]}, fetch)[0]
    assert asked == [(0, "b"), (0, "c")]
    assert [row.id for row in found] == ["a0", "b100", "c200", "a1", "b101", "a2", "b102", "a3", "a4"]
    alone = {0: [_row("a", n) for n in range(9)]}
    assert shared(alone, Want([0], 9, 100), {0: ["a"]}, fetch) == {0: [_row("a", n) for n in range(9)]}
