"""Corners in which a message could be lost, doubled or overtaken; each was found once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from sqlalchemy import MetaData, create_engine, event, inspect, select, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from semel import ConfigurationError, StoreUnavailable
from semel.messaging import Fenced, Inbox, Message, Outbox, Rejected, Relay, Route, Row, care, owners
from semel.messaging.database import Database
from semel.messaging.events import Alarm, RelayEvent
from semel.messaging.failures import is_away
from semel.messaging.pages import Lane, State, Want
from semel.messaging.parts import Part, Shipment
from semel.messaging.tables import messaging_tables
from tests.messaging.books import Book, Post
from tests.messaging.conftest import Home, awaited


def add(home: Home, outbox: Outbox, *messages: Message) -> None:
    with Session(home.engine) as session, session.begin():
        outbox.add(session, *messages)


class Base(DeclarativeBase):
    pass


class Thing(Base):
    __tablename__ = "things"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.mark.parametrize("hook", ["before_flush", "after_flush", "before_commit"])
def test_a_message_added_by_a_hook_of_the_commit_is_written(sqlite_home: Home, hook: str) -> None:
    """Domain events are often collected while the session flushes: after our own look at it."""
    outbox = sqlite_home.outbox()
    Base.metadata.create_all(sqlite_home.engine)

    def publish(session: Session, *_: object) -> None:
        outbox.add(session, Message("t", 1, id=hook))

    with Session(sqlite_home.engine) as session:
        event.listen(session, hook, publish)
        session.add(Thing(id=1))
        session.commit()
    assert sqlite_home.count() == 1
    outbox.close()


@awaited
async def test_a_wake_up_that_fails_is_no_failed_commit(sqlite_home: Home) -> None:
    outbox = sqlite_home.outbox()

    def broken() -> None:
        raise RuntimeError("the loop is closed")

    waker = outbox.on_wake(broken)
    with pytest.warns(UserWarning, match="could not be woken"):
        add(sqlite_home, outbox, Message("t", 1))
    del waker
    assert sqlite_home.count() == 1
    outbox.close()


@awaited
async def test_names_of_routes_are_not_taken_for_each_other(sqlite_home: Home) -> None:
    outbox, first, second = sqlite_home.outbox(parts=1), Book(), Book()
    add(sqlite_home, outbox, Message("orders", 1, id="a"), Message("orders/eu", 2, id="b"))
    await Relay(outbox, {"orders": first, "orders/eu": second}).drain()
    assert (first.ids, second.ids) == (["a"], ["b"])
    outbox.close()


@awaited
async def test_messages_that_become_due_during_a_look_are_not_overtaken(postgres_home: Home) -> None:
    outbox = postgres_home.outbox(parts=1)
    add(postgres_home, outbox, *(Message("t", n, id=f"{n:04}", key="k", due=1000) for n in range(4000)))
    want = Want(parts=[0], each=500, total=500)
    ledger = outbox.home.ledger("relay")
    soon = text(
        f"UPDATE {postgres_home.table}_outbox SET due = extract(epoch from statement_timestamp()) + 0.3"
    )
    for _ in range(6):
        with postgres_home.engine.begin() as connection:
            connection.execute(soon)
        while not (chosen := await ledger.read(lambda page: page.choose(want))):
            pass
        assert [row.id for row in chosen[0]] == [f"{n:04}" for n in range(500)]
    outbox.close()


@awaited
async def test_what_backs_off_is_not_overtaken_by_what_comes_later(sqlite_home: Home) -> None:
    outbox, post = sqlite_home.outbox(parts=1), Post()
    add(sqlite_home, outbox, Message("t", 1, id="a", key="k"), Message("t", 2, id="b", key="k"))
    post.bad["a"] = "not now"
    relay = Relay(outbox, {"t": post}, backoff=(0.3, 0.3))
    await relay.drain()
    for n in range(5):
        add(sqlite_home, outbox, Message("t", n, id=f"x{n}", key=f"x{n}"))
        await relay.drain()
    post.bad.clear()
    await asyncio.sleep(0.35)
    add(sqlite_home, outbox, Message("t", 3, id="c", key="k"))
    await relay.drain()
    assert [i for i in post.ids if i in "abc"] == ["a", "b", "c"]
    outbox.close()


@awaited
async def test_a_hand_over_that_fails_sends_nothing_twice(
    sqlite_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, book = sqlite_home.outbox(parts=1), Book()
    add(sqlite_home, outbox, Message("t", 1, id="a"))
    relay = Relay(outbox, {"t": book})
    await relay._start()
    await relay._carrier.round(list(relay._carrier.parts.values()))
    assert book.ids == ["a"]
    (part,) = relay._carrier.parts.values()
    part.leaving = True
    monkeypatch.setattr(owners, "release", _deadlock)
    with pytest.raises(StoreUnavailable):
        await relay._membership.hand_over([part])
    monkeypatch.undo()
    assert relay.parts == []
    await relay._stop()
    await Relay(outbox, {"t": book}).drain()
    assert book.ids == ["a"]
    outbox.close()


def _deadlock(*_: object) -> None:
    raise OperationalError("release", {}, Exception("deadlock detected"))


@awaited
async def test_a_part_given_up_that_is_another_ones_by_the_draw_is_released(sqlite_home: Home) -> None:
    outbox, book = sqlite_home.outbox(parts=8), Book()
    relays = [Relay(outbox, {"t": book}, lease=5) for _ in range(2)]
    await relays[0]._start()
    for part in list(relays[0]._carrier.parts.values()):
        relays[0]._carrier.holdings.drop(part)  # as after an error
    await relays[1]._start()
    await relays[0]._membership.rebalance()
    await relays[1]._membership.rebalance()
    assert sorted(relays[0].parts + relays[1].parts) == list(range(8))
    for relay in relays:
        await relay._stop()
    outbox.close()


@awaited
async def test_two_tenants_with_one_id_in_a_batch(sqlite_home: Home) -> None:
    outbox = sqlite_home.outbox(parts=1)

    class Picky(Post):
        async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
            self.bad = {"X": "no"} if rows[0].tenant == "b" else {}
            assert len({row.id for row in rows}) == len(rows), "a sink could not tell them apart"
            return await super().publish(part, epoch, batch, rows)

    post = Picky()
    add(sqlite_home, outbox, Message("t", 1, id="X", tenant="a"), Message("t", 2, id="X", tenant="b"))
    relay = Relay(outbox, {"t": post}, max_attempts=1)
    report = await relay.drain()
    assert [row.tenant for row in post.rows] == ["a"]
    assert (report.pending, report.parked) == ({"t": 1}, 1)
    outbox.close()


@awaited
async def test_topics_that_share_a_sink_keep_their_keys_in_order_through_an_outage(sqlite_home: Home) -> None:
    outbox, away, shared = sqlite_home.outbox(parts=1), Book(), Book()
    away.away = True
    relay = Relay(outbox, {"t1": [Route(away, name="away"), Route(shared, name="s")], "t2": shared})
    add(sqlite_home, outbox, Message("t1", 0, id="warm", key="w"))
    await relay.drain()
    add(sqlite_home, outbox, Message("t1", 1, id="first", key="k"), Message("t2", 2, id="second", key="k"))
    await relay.drain()
    away.away = False
    report = await relay.drain()
    while report.pending:
        await asyncio.sleep(0.1)
        report = await relay.drain()
    assert [i for i in shared.ids if i != "warm"] == ["first", "second"]
    outbox.close()


@awaited
async def test_what_one_sink_refused_is_not_overtaken_there_while_another_one_is_away(
    sqlite_home: Home,
) -> None:
    """The first message is under way to the sink that is away, so it is not chosen again: what follows it must wait as well."""
    outbox, post, away = sqlite_home.outbox(parts=1), Post(), Book()
    post.bad["a"], away.away = "not now", True
    both = Route(away, name="away", when=lambda message: message.body == 1)
    relay = Relay(outbox, {"t": [Route(post, name="post"), both]}, backoff=(0.05, 0.05))
    add(sqlite_home, outbox, Message("t", 1, id="a", key="k"))
    await relay.drain()
    post.bad.clear()
    add(sqlite_home, outbox, Message("t", 2, id="b", key="k"), Message("t", 2, id="x", key="x"))
    await relay.drain()
    assert "b" not in post.ids
    away.away = False
    while (await relay.drain()).pending:
        await asyncio.sleep(0.1)
    assert [i for i in post.ids if i != "x"] == ["a", "b"]
    assert away.ids == ["a"]
    outbox.close()


@awaited
async def test_a_condition_that_fails_holds_what_follows(sqlite_home: Home) -> None:
    outbox, book = sqlite_home.outbox(parts=1), Book()

    def broken(row: Row) -> bool:
        if row.id == "a":
            raise ValueError
        return True

    add(sqlite_home, outbox, Message("t", 1, id="a", key="k"), Message("t", 2, id="b", key="k"))
    await Relay(outbox, {"t": Route(book, when=broken)}).drain()
    assert book.ids == []
    outbox.close()


@awaited
async def test_one_sink_object_serves_one_outbox(tmp_path: Any) -> None:
    book = Book()
    outboxes = [Outbox(f"sqlite:///{tmp_path}/{name}.db") for name in "ab"]
    await Relay(outboxes[0], {"t": book}).drain()
    with pytest.raises(ConfigurationError, match="used by another outbox"):
        await Relay(outboxes[1], {"t": book}).drain()
    for outbox in outboxes:
        outbox.close()


@awaited
async def test_one_sink_behind_two_patterns_gets_a_message_once(sqlite_home: Home) -> None:
    outbox, book = sqlite_home.outbox(parts=1), Book()
    add(sqlite_home, outbox, Message("orders", 1, id="a"))
    await Relay(outbox, {"orders": book, "*": book}, sink_safety=10).drain()
    assert book.ids == ["a"]
    outbox.close()


def test_tables_of_a_migration_get_an_identity(sqlite_home: Home) -> None:
    metadata = MetaData()
    messaging_tables(metadata, sqlite_home.table)
    metadata.create_all(sqlite_home.engine)
    outbox = Outbox(sqlite_home.url, table=sqlite_home.table)
    add(sqlite_home, outbox, Message("t", 1))
    assert len(outbox.database.identity) == 32
    assert sqlite_home.count() == 1
    outbox.close()


def test_the_number_of_parts_is_not_written_in_the_callers_transaction(sqlite_home: Home) -> None:
    Inbox(sqlite_home.url, consumer="c", table=sqlite_home.table).create()
    outbox = Outbox(sqlite_home.url, table=sqlite_home.table, parts=8)
    with Session(sqlite_home.engine) as session:
        session.begin()
        outbox.add(session, Message("t", 1))
        outbox._write(session.connection(), [])
        session.rollback()
    assert sqlite_home.scalar("SELECT value FROM {t}_messaging WHERE name = 'parts'") == "8"
    outbox.close()


@awaited
async def test_a_sqlite_engine_that_was_handed_in_is_fenced_too(sqlite_home: Home) -> None:
    engine = create_engine(sqlite_home.url)
    outbox, book = Outbox(engine, table=sqlite_home.table, parts=4), Book()
    await outbox.acreate()
    relays = [Relay(outbox, {"t": book}) for _ in range(2)]
    await asyncio.gather(*(relay._start() for relay in relays))
    owned = [part for relay in relays for part in relay.parts]
    epochs = {(p.number, p.epoch) for relay in relays for p in relay._carrier.parts.values()}
    assert len(owned) == len(set(owned)) == len(epochs)
    for relay in relays:
        await relay._stop()
    outbox.close()
    engine.dispose()


@awaited
async def test_kept_batches_are_sent_again_as_they_were_sent(sqlite_home: Home) -> None:
    import msgspec

    outbox, book = sqlite_home.outbox(parts=1), Book()

    def masked(row: Row) -> Row:
        return msgspec.structs.replace(row, body=b'"masked"')

    relay = Relay(outbox, {"t": Route(book, transform=masked)}, sink_safety=60, hooks=())
    add(sqlite_home, outbox, Message("t", "secret", id="a"))
    await relay.drain()
    book.rows, book.frontier[0] = [], 0
    add(sqlite_home, outbox, Message("t", "secret", id="b"))
    await relay.drain()
    assert {row.body for row in book.rows} == {b'"masked"'}
    assert book.ids == ["a", "b"]
    outbox.close()


@awaited
async def test_a_batch_that_may_be_sent_is_not_changed_by_a_transform_that_fails(sqlite_home: Home) -> None:
    outbox, book = sqlite_home.outbox(parts=1), Book()
    fails = False

    def transform(row: Row) -> Row:
        if fails and row.id == "b":
            raise ValueError
        return row

    class Unsure(Book):
        async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
            found = await book.publish(part, epoch, batch, rows)
            if self.calls == 0:
                self.calls = 1
                self.away = True
                return await super().publish(part, epoch, batch, rows)
            return found

    add(sqlite_home, outbox, Message("t", 1, id="a"), Message("t", 2, id="b"))
    relay = Relay(outbox, {"t": Route(Unsure(), transform=transform)})
    await relay._start()
    await relay._carrier.round(list(relay._carrier.parts.values()))
    fails = True
    relay._carrier.away.try_again()
    await relay._carrier.round(list(relay._carrier.parts.values()))
    fails = False
    relay._carrier.away.try_again()
    await relay._carrier.round(list(relay._carrier.parts.values()))
    await relay._stop()
    assert book.ids == ["a", "b"]
    outbox.close()


@awaited
async def test_a_database_set_back_behind_the_sinks_epoch_goes_on_with_an_alarm(sqlite_home: Home) -> None:
    outbox, book = sqlite_home.outbox(parts=1), Book()
    book.epochs[0] = 50
    told: list[RelayEvent] = []
    add(sqlite_home, outbox, Message("t", 1, id="a"))
    relay = Relay(outbox, {"t": book}, hooks=(told.append,))
    report = await relay.drain()
    for _ in range(10):
        if not report.pending:
            break
        report = await relay.drain()
    assert book.ids == ["a"]
    assert "sink-ahead" in {event.what for event in told if isinstance(event, Alarm)}
    outbox.close()


@awaited
async def test_reasons_that_no_database_takes(sqlite_home: Home) -> None:
    outbox, post = sqlite_home.outbox(parts=1), Post()
    add(sqlite_home, outbox, Message("t", 1, id="a"))
    post.bad["a"] = "no \ud800 \x00"
    relay = Relay(outbox, {"t": post}, max_attempts=1)
    await relay.drain()
    (line,) = await relay.parked()
    assert line.reason.startswith("no ?")
    outbox.close()


def test_a_violated_constraint_is_not_an_outage() -> None:
    assert not is_away(IntegrityError("x", {}, Exception("row (7, closed, null)")))
    assert is_away(OperationalError("x", {}, Exception("server closed the connection")))


def test_the_order_of_a_bodys_names_is_no_conflict(sqlite_home: Home) -> None:
    outbox = sqlite_home.outbox()
    for body in ({"a": 1, "b": 2}, {"b": 2, "a": 1}):
        add(sqlite_home, outbox, Message("t", body, id="m"))
    assert sqlite_home.count() == 1
    outbox.close()


@awaited
async def test_kept_batches_of_another_team_stay(sqlite_home: Home) -> None:
    outbox, book = sqlite_home.outbox(parts=1), Book()
    add(sqlite_home, outbox, Message("t", 1))
    await Relay(outbox, {"t": book}, sink_safety=60, name="kept").drain()
    database = outbox.database
    await database.run(care.clean, database.tables, "relay", 1000.0, 0.0)
    with sqlite_home.engine.connect() as connection:
        assert len(connection.execute(select(database.tables.sent.c.seq)).all()) == 1
    assert connection.closed
    outbox.close()


def test_fenced_tells_the_epoch() -> None:
    assert Fenced("no", epoch=7).epoch == 7


def test_two_lanes_that_reject_two_rows_of_a_key_do_not_reset_each_other() -> None:
    """Each row's attempts count on, and a key that one of them parked stays parked."""
    part = Part(0, 1, State(lanes={"a": Lane(), "b": Lane()}))
    rows = [Row(seq, f"m{seq}", "default", "t", "k", None, None, {}, b"1", 0.0) for seq in (5, 7)]

    def reject(lane: str, row: Row) -> list[str]:
        part.state.lanes[lane].open = [row.seq]
        part.rows[row.seq] = row
        shipment = Shipment(0, 1, lane, 1, [row], None)
        parked = part.rejected(shipment, Rejected({row.id: "no"}), attempts=3, backoff=(1, 1), keeps=False)
        return [line.id for line in parked]

    for _ in range(2):
        assert reject("a", rows[0]) == []
        assert reject("b", rows[1]) == []
        part.taken()
    assert reject("a", rows[0]) == ["m5"], "the other row's failures made it start anew"
    assert reject("b", rows[1]) == ["m7"]
    assert [after for _, after in part.taken().held] == [None, None]
    (line,) = part.lines.values()
    part.lines[line.name] = msgspec.structs.replace(line, attempts=0)  # an operator's replay
    assert reject("a", rows[0]) == []
    assert reject("b", rows[1]) == []


def test_a_key_that_one_row_parked_is_not_let_go_by_another() -> None:
    part = Part(0, 1, State(lanes={"a": Lane(open=[5]), "b": Lane(open=[7])}))
    rows = [Row(seq, f"m{seq}", "default", "t", "k", None, None, {}, b"1", 0.0) for seq in (5, 7)]
    part.rows = {row.seq: row for row in rows}
    for lane, row, final in (("a", rows[0], ["m5"]), ("b", rows[1], [])):
        error = Rejected({row.id: "no"}, final=final)
        part.rejected(Shipment(0, 1, lane, 1, [row], None), error, attempts=9, backoff=(1, 1), keeps=False)
    assert [(line.id, after) for line, after in part.taken().held] == [("m5", None)]


@awaited
async def test_a_parked_key_is_not_let_go_by_a_slower_sink_that_rejects_what_follows(
    sqlite_home: Home,
) -> None:
    outbox, asked = sqlite_home.outbox(parts=1), dict[str, int]()
    slow = asyncio.Event()

    def quick(message: Message) -> None:
        asked[message.id] = asked.get(message.id, 0) + 1
        raise ValueError

    async def late(_: Message) -> None:
        await slow.wait()
        raise ValueError

    routes = [
        Route(quick, name="quick", when=lambda message: message.body == 1),
        Route(late, name="late", when=lambda message: message.body == 2),
    ]
    relay = Relay(outbox, {"t": routes}, backoff=(0.05, 0.05), max_attempts=1)
    add(sqlite_home, outbox, Message("t", 1, id="a", key="k"), Message("t", 2, id="b", key="k"))
    running = asyncio.create_task(relay.run())
    while not await relay.parked():
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    slow.set()
    await asyncio.sleep(0.7)
    assert asked == {"a": 1}
    assert [line.id for line in await relay.parked()] == ["a"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    outbox.close()


def test_the_statements_that_are_printed_make_the_tables_that_create_makes(fresh_home: Home) -> None:
    """MySQL knows no `CREATE INDEX IF NOT EXISTS`, which MariaDB does: there the indexes are in the tables."""
    printed = Database(fresh_home.url, table=fresh_home.table).ddl()
    assert ("CREATE INDEX" in printed) is not fresh_home.url.startswith("mysql")
    for _ in range(2):
        with fresh_home.engine.begin() as connection:
            for statement in printed.split(";\n\n"):
                connection.execute(text(statement.removesuffix(";")))
    found = inspect(fresh_home.engine)
    for table in messaging_tables(MetaData(), fresh_home.table):
        names = {index["name"] for index in found.get_indexes(table.name)}
        assert names >= {index.name for index in table.indexes}, table.name
    with fresh_home.transaction() as session:
        assert Inbox(fresh_home.url, table=fresh_home.table, consumer="c").process(
            session, Message("t", 1), lambda message: None
        )
