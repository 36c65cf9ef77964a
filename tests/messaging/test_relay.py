"""The relay: each message once, in order per key, whatever a sink does (R44; MW1, MW3-MW8, MW12, MW13)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from semel import ConfigurationError
from semel.messaging import Fenced, Message, Outbox, Relay, Route, Row
from semel.messaging.events import Alarm, Overtaken, Parked, RelayEvent, SinkBack, SinkPaused
from semel.messaging.mending import Mending
from tests.messaging.books import Book, Post, in_order
from tests.messaging.conftest import Home, RedisPlace, awaited

Place = Home | RedisPlace


@pytest.fixture
def home(place: Place) -> Place:
    """The relay is the same wherever the outbox lives."""
    return place


def fill(home: Place, outbox: Outbox, count: int, keys: int = 5, topic: str = "orders") -> list[str]:
    ids = []
    for start in range(0, count, 20):
        with home.transaction() as session:
            for n in range(start, min(start + 20, count)):
                message = Message(topic, {"n": n}, key=f"k{n % keys}")
                ids.append(message.id)
                outbox.add(session, message)
    return ids


@awaited
async def test_drain_sends_everything_once_in_order(home: Place) -> None:
    outbox, book = home.outbox(), Book()
    ids = fill(home, outbox, 100)
    relay = Relay(outbox, {"orders": book}, batch=7)
    report = await relay.drain()
    assert (report.sent, report.duplicates, report.parked, report.pending) == (100, 0, 0, {})
    assert sorted(book.ids) == sorted(ids)
    assert in_order(book.rows)
    assert home.count() == 0
    assert home.count("_outbox_ids") == 100, "delivered ids stay known"
    assert (await relay.drain()).sent == 0
    with home.transaction() as session:
        outbox.add(session, Message("orders", {"n": 0}, id=ids[0], key="k0"))
    assert home.count() == 0, "a delivered id was accepted again"
    outbox.close()


@awaited
async def test_run_wakes_after_a_commit_and_gives_its_parts_back(home: Place) -> None:
    """MW1: the poke is a hint, polling would find the message too."""
    outbox, book = home.outbox(parts=8), Book()
    relay = Relay(outbox, {"*": book}, lease=2)
    task = asyncio.create_task(relay.run())
    while len(relay.parts) < 8:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(fill, home, outbox, 30)
    async with asyncio.timeout(30):
        while len(book.rows) < 30:
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert home.count() == 0
    assert home.owned() == 0
    assert home.count("_outbox_relays") == 0
    outbox.close()


@awaited
async def test_two_relays_share_the_parts(home: Place) -> None:
    outbox, book = home.outbox(parts=16), Book()
    relays = [Relay(outbox, {"*": book}, lease=0.6) for _ in range(2)]
    tasks = [asyncio.create_task(relay.run()) for relay in relays]
    async with asyncio.timeout(30):
        while not all(relay.parts for relay in relays) or sum(len(r.parts) for r in relays) != 16:
            await asyncio.sleep(0.02)
    await asyncio.to_thread(fill, home, outbox, 60, 30)
    async with asyncio.timeout(30):
        while len(book.rows) < 60:
            await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(book.rows) == 60
    assert in_order(book.rows)
    outbox.close()


class Dies(BaseException):
    """As good as a kill: nothing after it runs."""


@pytest.mark.parametrize("point", ["before", "after"])
@awaited
async def test_a_relay_that_dies_around_the_publish(home: Place, point: str) -> None:
    """MW4, MW5: its heir sends the manifest again under the same number; the sink has it once."""
    outbox, book = home.outbox(parts=4), Book()
    fill(home, outbox, 40)

    class Deadly(Book):
        async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
            if point == "after":
                await book.publish(part, epoch, batch, rows)
            raise Dies

    first = Relay(outbox, {"orders": Deadly()}, lease=0.3, batch=5, loops=1)
    first._stop = _nothing  # type: ignore[method-assign]  # the dead do not tidy up
    with pytest.raises(Dies):
        await first.drain()
    heir = Relay(outbox, {"orders": book}, lease=0.3, batch=5)
    report = await heir.drain()
    assert len(book.ids) == len(set(book.ids)) == 40
    assert in_order(book.rows)
    assert report.pending == {}
    assert (report.duplicates > 0) == (point == "after")
    outbox.close()


async def _pausing(stopping: asyncio.Event) -> None:
    await stopping.wait()


async def _nothing() -> None:
    return None


@awaited
async def test_a_relay_that_was_overtaken_is_fenced_at_the_sink(home: Place) -> None:
    """MW6: it wakes in the middle of a publish, with an old epoch and a manifest that its heir has sent."""
    outbox, book = home.outbox(parts=2), Book()
    fill(home, outbox, 30)
    asleep, awake = asyncio.Event(), asyncio.Event()
    told: list[RelayEvent] = []

    class Sleeper(Book):
        async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
            asleep.set()
            await awake.wait()
            return await book.publish(part, epoch, batch, rows)

    zombie = Relay(outbox, {"orders": Sleeper()}, lease=0.2, batch=5, hooks=(told.append,))
    zombie._heartbeats = _pausing  # type: ignore[method-assign]  # stopped: nothing beats
    task = asyncio.create_task(zombie.drain())
    await asleep.wait()
    await asyncio.sleep(0.25)
    heir = Relay(outbox, {"orders": book}, lease=0.2, batch=5)
    await heir.drain()
    assert len(book.rows) == 30
    awake.set()
    report = await task
    assert len(book.rows) == 30, "the zombie wrote"
    assert report.sent == 0
    assert any(isinstance(event, Overtaken) for event in told)
    outbox.close()


@awaited
async def test_a_sink_that_lost_its_tail_gets_the_kept_batches_again(home: Place) -> None:
    """MW7: a failover took the last batches and the frontier together."""
    outbox, book = home.outbox(parts=1), Book()
    alarms: list[RelayEvent] = []
    relay = Relay(outbox, {"orders": book}, batch=10, sink_safety=60, hooks=(alarms.append,))
    first = fill(home, outbox, 30)
    await relay.drain()
    book.rows, book.frontier[0] = book.rows[:10], 1  # batches 2 and 3 are lost
    second = fill(home, outbox, 10)
    report = await relay.drain()
    assert sorted(book.ids) == sorted(first + second)
    assert in_order(book.rows)
    assert report.resent == 20
    assert [a.what for a in alarms if isinstance(a, Alarm)] == ["lost-tail"]
    outbox.close()


@awaited
async def test_a_tail_that_was_not_kept_is_told(home: Place) -> None:
    outbox, book = home.outbox(parts=1), Book()
    alarms: list[RelayEvent] = []
    relay = Relay(outbox, {"orders": book}, batch=10, hooks=(alarms.append,))
    fill(home, outbox, 20)
    await relay.drain()
    book.rows, book.frontier[0] = [], 0
    more = fill(home, outbox, 10)
    await relay.drain()
    assert book.ids == more
    (alarm,) = [a for a in alarms if isinstance(a, Alarm)]
    assert "gone for good" in alarm.message
    outbox.close()


@awaited
async def test_a_database_set_back_does_not_swallow_messages(home: Place) -> None:
    outbox, book = home.outbox(parts=1), Book()
    alarms: list[RelayEvent] = []
    book.frontier[0] = 50
    ids = fill(home, outbox, 5)
    await Relay(outbox, {"orders": book}, hooks=(alarms.append,)).drain()
    assert book.ids == ids
    assert [a.what for a in alarms if isinstance(a, Alarm)] == ["sink-ahead"]
    outbox.close()


@awaited
async def test_a_late_commit_with_a_low_number_is_sent(home: Place) -> None:
    """MW8: numbers are given before commits; a row may appear below what was sent already."""
    if "sqlite" in home.url or "redis" in home.url:
        pytest.skip("SQLite and Redis have one writer at a time: no row can appear below another")
    outbox, book = home.outbox(parts=1), Book()
    relay = Relay(outbox, {"orders": book})
    with Session(home.engine) as late:  # type: ignore[union-attr]  # not skipped: it is in SQL
        late.begin()
        outbox._write(late.connection(), [outbox._prepare(Message("orders", 0, id="late", key="k"))])
        with home.transaction() as session:
            outbox.add(session, Message("orders", 1, id="early", key="k2"))
        await relay.drain()
        assert book.ids == ["early"]
        late.commit()
    await relay.drain()
    assert book.ids == ["early", "late"]
    outbox.close()


@awaited
async def test_poison_parks_its_key_and_others_flow(home: Place) -> None:
    """MW12: the bad message and all that follow it under its key wait, in order; the rest is delivered."""
    outbox, post = home.outbox(parts=2), Post()
    told: list[RelayEvent] = []
    with home.transaction() as session:
        for n in range(12):
            outbox.add(session, Message("orders", {"n": n}, key=f"k{n % 3}", id=f"m{n}"))
    post.bad["m3"] = "malformed"
    relay = Relay(outbox, {"orders": post}, max_attempts=2, backoff=(0.01, 0.02), hooks=(told.append,))
    report = await relay.drain()
    while not report.parked:
        await asyncio.sleep(0.03)
        report = await relay.drain()
    k0 = ["m0", "m3", "m6", "m9"]
    assert [i for i in post.ids if i in k0] == ["m0"]
    assert sorted(set(post.ids)) == sorted({f"m{n}" for n in range(12)} - {"m3", "m6", "m9"})
    (line,) = await relay.parked()
    assert (line.key, line.id, line.attempts, line.reason) == ("k0", "m3", 2, "malformed")
    assert report.pending == {"orders": 3}
    (event,) = [e for e in told if isinstance(e, Parked)]
    assert (event.key, event.message) == ("k0", "m3")
    with home.transaction() as session:
        outbox.add(session, Message("orders", {"n": 12}, key="k0", id="m12"))
    assert (await relay.drain()).sent == 0, "a parked key let a later message pass"
    post.bad.clear()
    assert await relay.replay(key="k0") == 1
    await relay.drain()
    assert [i for i in post.ids if i in [*k0, "m12"]] == ["m0", "m3", "m6", "m9", "m12"]
    assert await relay.parked() == []
    assert home.count() == 0
    outbox.close()


@awaited
async def test_an_exact_sink_that_rejects_keeps_its_numbers(home: Place) -> None:
    outbox, book = home.outbox(parts=1), Book()
    with home.transaction() as session:
        for n in range(6):
            outbox.add(session, Message("orders", n, key=f"k{n % 2}", id=f"m{n}"))
    book.bad["m2"] = "too large"
    relay = Relay(outbox, {"orders": book}, max_attempts=1)
    report = await relay.drain()
    assert book.ids == ["m1", "m3", "m5"] or sorted(book.ids) == ["m0", "m1", "m3", "m5"]
    assert report.parked == 1
    book.bad.clear()
    await relay.replay()
    await relay.drain()
    assert sorted(book.ids) == [f"m{n}" for n in range(6)]
    assert in_order(book.rows)
    outbox.close()


@pytest.mark.parametrize("kind", [Post, Book])
@awaited
async def test_what_stands_before_a_poison_message_is_not_held_up_by_it(
    home: Place, kind: type[Post | Book]
) -> None:
    """A batch that an exact sink refuses is refused whole: what the key had before the bad one goes out without it."""
    outbox, sink = home.outbox(parts=1), kind()
    with home.transaction() as session:
        for n in range(6):
            outbox.add(session, Message("orders", n, key="k", id=f"m{n}"))
    sink.bad |= {"m2": "malformed", "m4": "malformed too"}
    relay = Relay(outbox, {"orders": sink}, max_attempts=1)
    report = await relay.drain()
    assert (sink.ids, report.parked) == (["m0", "m1"], 1)
    (line,) = await relay.parked()
    assert (line.id, line.attempts, line.reason) == ("m2", 1, "malformed")
    del sink.bad["m2"]
    await relay.replay()
    await relay.drain()
    assert sink.ids == ["m0", "m1", "m2", "m3"]
    assert [line.id for line in await relay.parked()] == ["m4"]
    outbox.close()


@awaited
async def test_a_sink_that_is_away_burns_no_attempts(home: Place) -> None:
    """MW13: a pause, not a failure of messages; and it does not stop what goes elsewhere."""
    outbox, away, here = home.outbox(parts=2), Book(), Book()
    told: list[RelayEvent] = []
    away.away = True
    fill(home, outbox, 10)
    fill(home, outbox, 10, topic="mails")
    relay = Relay(outbox, {"orders": away, "mails": here}, max_attempts=1, hooks=(told.append,))
    report = await relay.drain()
    assert len(here.rows) == 10
    assert (report.pending, report.parked, report.unavailable) == ({"orders": 10}, 0, ("orders",))
    assert home.count("_outbox_lines") == 0
    assert any(isinstance(event, SinkPaused) for event in told)
    fill(home, outbox, 10, topic="mails")
    away.away = False
    await relay.drain()  # which asks it again at once
    assert len(away.rows) == 10
    assert len(here.rows) == 20
    assert in_order(away.rows)
    assert any(isinstance(event, SinkBack) for event in told)
    outbox.close()


@awaited
async def test_a_batch_under_way_never_changes(home: Place) -> None:
    """A number that may have been seen by the sink stands for these rows for ever: later ones wait for the next."""
    outbox, book = home.outbox(parts=1), Book()
    fill(home, outbox, 3, keys=1)
    sizes: list[int] = []

    class Unsure(Book):
        async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
            sizes.append(len(rows))
            await book.publish(part, epoch, batch, rows)  # it arrives, but the answer is lost
            self.away = True
            return await super().publish(part, epoch, batch, rows)

    relay = Relay(outbox, {"orders": Unsure()})
    await relay.drain()
    fill(home, outbox, 3, keys=1)
    await relay.drain()
    assert set(sizes) == {3}
    await Relay(outbox, {"orders": book}).drain()
    assert len(book.ids) == len(set(book.ids)) == 6
    outbox.close()


@awaited
async def test_due_messages_wait_and_hold_nobody_up(home: Place) -> None:
    outbox, book = home.outbox(), Book()
    with home.transaction() as session:
        outbox.add(
            session, Message("t", 1, key="k", id="later", due=3600), Message("t", 2, key="k", id="now")
        )
    relay = Relay(outbox, {"t": book})
    report = await relay.drain()
    assert (book.ids, report.pending) == (["now"], {"t": 1})
    with home.transaction() as session:
        outbox.add(session, Message("t", 3, key="k", id="soon", due=0.1))
    async with asyncio.timeout(30):
        while "soon" not in book.ids:
            await asyncio.sleep(0.02)
            report = await relay.drain()
    assert (book.ids, report.pending) == (["now", "soon"], {"t": 1})
    outbox.close()


@awaited
async def test_routes_conditions_transforms_and_samples(home: Place) -> None:
    import msgspec

    outbox = home.outbox()
    every, big, changed, some = Book(), Book(), Book(), Book()

    def renamed(row: Row) -> Row:
        return msgspec.structs.replace(row, topic="x", id="no")

    with home.transaction() as session:
        for n in range(40):
            outbox.add(session, Message("orders.paid", {"n": n}, key=f"k{n}", id=f"m{n}"))
    relay = Relay(
        outbox,
        {
            "orders.*": [
                every,
                Route(big, name="big", when=lambda row: msgspec.json.decode(row.body)["n"] >= 30),
                Route(changed, name="changed", transform=renamed),
                Route(some, name="some", sample=0.5),
            ]
        },
    )
    report = await relay.drain()
    assert report.pending == {}
    assert len(every.rows) == 40
    assert sorted(big.ids) == sorted(f"m{n}" for n in range(30, 40))
    assert {row.topic for row in changed.rows} == {"x"}
    assert sorted(changed.ids) == sorted(f"m{n}" for n in range(40)), "a transform may not change the id"
    assert 5 < len(some.rows) < 35
    outbox.close()


@awaited
async def test_one_target_of_two_rejects_and_the_other_is_not_sent_to_twice(home: Place) -> None:
    outbox, good, bad = home.outbox(parts=1), Book(), Post()
    with home.transaction() as session:
        for n in range(4):
            outbox.add(session, Message("orders", n, key="k", id=f"m{n}"))
    bad.bad["m1"] = "no"
    relay = Relay(outbox, {"orders": [good, bad]}, backoff=(0.2, 0.2))
    await relay.drain()
    bad.bad.clear()
    report = await relay.drain()
    while report.pending:
        await asyncio.sleep(0.1)
        report = await relay.drain()
    assert good.ids == bad.ids == ["m0", "m1", "m2", "m3"]
    assert report.pending == {}
    outbox.close()


@awaited
async def test_unroutable_messages_wait_and_are_told(home: Place) -> None:
    outbox, book = home.outbox(), Book()
    told: list[RelayEvent] = []
    fill(home, outbox, 3, topic="nobody")
    fill(home, outbox, 3)
    report = await Relay(outbox, {"orders": book}, hooks=(told.append,)).drain()
    assert len(book.rows) == 3
    assert (report.pending, report.unroutable) == ({"nobody": 3}, ("nobody",))
    assert [e.what for e in told if isinstance(e, Alarm)] == ["unroutable"]
    await Relay(outbox, {"*": book}).drain()
    assert len(book.rows) == 6
    outbox.close()


@awaited
async def test_a_condition_that_fails_holds_its_message_back(home: Place) -> None:
    outbox, book = home.outbox(parts=1), Book()

    def broken(row: Row) -> bool:
        if row.id == "m1":
            raise ValueError("cannot tell")
        return True

    with home.transaction() as session:
        outbox.add(session, Message("t", 1, id="m1", key="a"), Message("t", 2, id="m2", key="b"))
    relay = Relay(outbox, {"t": Route(book, when=broken)})
    await relay.drain()
    assert book.ids == ["m2"]
    (line,) = await relay.backing_off()
    assert "cannot tell" in line.reason
    outbox.close()


@awaited
async def test_a_relay_limited_to_tenants_or_topics(home: Place) -> None:
    outbox, acme, rest = home.outbox(), Book(), Book()
    with home.transaction() as session:
        for tenant in ("acme", "other"):
            outbox.add(session, Message("t", 1, tenant=tenant, id=f"{tenant}-1"))
            outbox.add(session, Message("u", 1, tenant=tenant, id=f"{tenant}-2"))
    with pytest.raises(ConfigurationError, match="name="):
        Relay(outbox, {"*": acme}, tenants=["acme"])
    report = await Relay(outbox, {"*": acme}, tenants=["acme"], topics=["t"], name="acme").drain()
    assert (acme.ids, report.pending) == (["acme-1"], {"t": 1, "u": 2})
    await Relay(outbox, {"*": rest}).drain()
    assert sorted(rest.ids) == ["acme-2", "other-1", "other-2"]
    outbox.close()


@awaited
async def test_a_function_is_a_sink(sqlite_home: Home) -> None:
    outbox = sqlite_home.outbox()
    got: list[Any] = []
    fill(sqlite_home, outbox, 3)
    await Relay(outbox, {"orders": lambda message: got.append(message.body)}).drain()
    assert sorted(body["n"] for body in got) == [0, 1, 2]
    outbox.close()


@awaited
async def test_the_known_ids_are_forgotten_after_the_retention(home: Place) -> None:
    # Redis keeps to the retention that a message was added with; of a database one asks, and a drain that takes long would too.
    outbox, book = home.outbox(retention=0.2 if "redis" in home.url else 60), Book()
    fill(home, outbox, 3)
    await Relay(outbox, {"*": book}).drain()
    with home.transaction() as session:
        outbox.add(session, Message("orders", 1, due=3600))
    await asyncio.sleep(0.25)
    cleaned = await outbox.home.ledger("relay").run(lambda page: page.clean(0.2, 0.0))
    assert cleaned == 3 or "redis" in home.url, "Redis forgets by itself"
    assert home.count("_outbox_ids") == 1, "the id of a message that waits was forgotten"
    outbox.close()


@awaited
async def test_rounds_survive_a_database_that_goes_away(postgres_home: Home) -> None:
    """Connections cut in the middle: the relay gives its parts up, takes them anew, and nothing is sent twice."""
    outbox, book = postgres_home.outbox(parts=4), Book()
    relay = Relay(outbox, {"orders": book}, lease=0.6, batch=5)
    task = asyncio.create_task(relay.run())
    while not relay.parts:
        await asyncio.sleep(0.01)
    stop = time.monotonic() + 1.5
    count = 0
    while time.monotonic() < stop:
        count += len(await asyncio.to_thread(fill, postgres_home, outbox, 10))
        with postgres_home.engine.connect() as connection:
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE pid <> pg_backend_pid() AND query LIKE :mine"
                ),
                {"mine": f"%{postgres_home.table}%"},
            )
        postgres_home.engine.dispose()
    async with asyncio.timeout(30):
        while len(book.rows) < count:
            await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(book.ids) == len(set(book.ids)) == count
    outbox.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lease": 0.01}, "lease"),
        ({"batch": 0}, "batch"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"backoff": (5, 1)}, "backoff"),
        ({"poll": (0, 1)}, "poll"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Relay(Outbox(f"sqlite:///{tmp_path}/x.db"), {"t": Book()}, **options)


def test_wrong_routes_are_refused(tmp_path: Any) -> None:
    outbox = Outbox(f"sqlite:///{tmp_path}/x.db")
    with pytest.raises(ConfigurationError, match="needs routes"):
        Relay(outbox, {})
    with pytest.raises(ConfigurationError, match="scheme"):
        Relay(outbox, {"t": "ftp://nowhere"})
    with pytest.raises(ConfigurationError, match="not int"):
        Relay(outbox, {"t": 5})
    with pytest.raises(ConfigurationError, match="same name"):
        Relay(outbox, {"t": [Route(Book(), name="a"), Route(Book(), name="a")]})
    with pytest.raises(ConfigurationError, match="sample"):
        Relay(outbox, {"t": Route(Book(), sample=2)})
    with pytest.raises(ConfigurationError, match="guarantee"):
        Relay(outbox, {"t": type("S", (), {"publish": None})()})


def test_fenced_is_an_error_of_semel() -> None:
    from semel import SemelError

    assert issubclass(Fenced, SemelError)


@awaited
async def test_routes_to_one_sink_share_its_numbers(home: Place) -> None:
    """A sink with one frontier per part, behind two routes: a batch of one route must not hide one of the other."""
    outbox, book = home.outbox(parts=1), Book()
    alarms: list[RelayEvent] = []
    for topic in ("a", "b", "a", "b"):
        fill(home, outbox, 5, topic=topic)
        await Relay(outbox, {"a": book, "b": book}, hooks=(alarms.append,)).drain()
    assert len(book.ids) == len(set(book.ids)) == 20
    assert not any(isinstance(event, Alarm) for event in alarms)
    outbox.close()


@awaited
async def test_what_two_loops_find_at_a_sink_is_repaired_before_they_go_on(
    home: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that nobody sent is at the sink, in parts of both loops. While one is repaired, nobody may send it again and
    take what is there for its own."""
    original = Mending._ahead

    def slowly(self: Mending, *about: Any) -> None:
        time.sleep(0.05)
        original(self, *about)

    monkeypatch.setattr(Mending, "_ahead", slowly)
    outbox, book = home.outbox(parts=4), Book()
    book.frontier = dict.fromkeys(range(4), 1)
    ids = fill(home, outbox, 20, keys=20)
    await Relay(outbox, {"orders": book}, hooks=()).drain()
    assert sorted(book.ids) == sorted(ids)
    outbox.close()
