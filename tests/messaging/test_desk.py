"""What operators do with an outbox: look at what waits, and give up what can never be sent."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from semel import ConfigurationError
from semel.cli.commands import app
from semel.messaging import Message, Outbox, Relay
from semel.messaging.events import GivenUp, RelayEvent
from tests.messaging.books import Book, Post, in_order
from tests.messaging.conftest import Home, RedisPlace, awaited

Place = Home | RedisPlace


async def _parked(place: Place, outbox: Outbox, sink: Any, *, hooks: Any = ()) -> Relay:
    """m0, m1 … under three keys; m0 cannot be sent and parks k0 before m3, m6 and m9."""
    with place.transaction() as session:
        for n in range(12):
            outbox.add(session, Message("orders", {"n": n}, key=f"k{n % 3}", id=f"m{n}"))
    sink.bad["m0"] = "malformed"
    relay = Relay(outbox, {"orders": sink}, max_attempts=1, hooks=hooks)
    report = await relay.drain()
    assert (report.parked, report.pending) == (1, {"orders": 4})
    return relay


@pytest.mark.parametrize("kind", [Post, Book])
@awaited
async def test_a_message_is_given_up_and_its_key_flows_on(place: Place, kind: type[Post | Book]) -> None:
    outbox, sink = place.outbox(parts=2), kind()
    told: list[RelayEvent] = []
    relay = await _parked(place, outbox, sink, hooks=(told.append,))
    (message,) = await relay.delete(["m0", "m6", "no-such"])
    assert (message.id, message.key, message.body) == ("m0", "k0", {"n": 0})
    assert [e for e in told if isinstance(e, GivenUp)] == [GivenUp("default", "k0", "orders", "m0")]
    report = await relay.drain()
    assert (report.pending, await relay.parked()) == ({}, [])
    assert sorted(sink.ids) == sorted(f"m{n}" for n in range(12) if n != 0), "each of the others once"
    assert in_order(sink.rows)
    with place.transaction() as session:  # its id is still known
        outbox.add(session, Message("orders", {"n": 0}, key="k0", id="m0"))
    assert (await relay.drain()).sent == 0
    outbox.close()


@awaited
async def test_a_running_relay_goes_on_after_a_message_was_given_up(place: Place) -> None:
    """The operator is another process: it takes the part out of the relay's hands, which has it in memory."""
    outbox, sink = place.outbox(parts=1), Book()
    await _parked(place, outbox, sink)
    running = Relay(outbox, {"orders": sink}, max_attempts=1, lease=0.5)
    task = asyncio.create_task(running.run())
    while not running.parts:
        await asyncio.sleep(0.01)
    other = place.outbox()
    assert [m.id for m in await Relay(other, {"orders": Book()}).delete(["m0"])] == ["m0"]
    with place.transaction() as session:
        outbox.add(session, Message("orders", {"n": 12}, key="k0", id="m12"))
    async with asyncio.timeout(30):
        while "m12" not in sink.ids:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert sorted(sink.ids) == sorted(f"m{n}" for n in range(13) if n != 0)
    assert in_order(sink.rows)
    other.close()
    outbox.close()


@awaited
async def test_what_waits_is_listed(place: Place) -> None:
    outbox = place.outbox(parts=4)
    with place.transaction() as session:
        outbox.add(
            session,
            Message("orders", "a", key="k", id="m1"),
            Message("orders", b"\xff\0", id="m2", tenant="x"),
        )
        outbox.add(
            session, Message("bills", "a", id="m3", due=3600), Message("bills", b"\xff", id="m4", due=7200)
        )
    found = {each.id: each for each in await outbox.waiting()}
    assert sorted(found) == ["m1", "m2", "m3", "m4"]
    assert (found["m1"].key, found["m1"].topic, found["m1"].due, found["m1"].size) == ("k", "orders", None, 3)
    assert (found["m2"].tenant, found["m2"].key, found["m2"].size) == ("x", None, 2)
    due = found["m3"].due
    assert due is not None
    assert 3590 < due - found["m3"].created < 3610

    async def ids(**where: Any) -> list[str]:
        return sorted(each.id for each in await outbox.waiting(**where))

    assert await ids(topic="bills") == ["m3", "m4"]
    assert (await ids(tenant="x"), await ids(key="k"), await ids(id="m4")) == (["m2"], ["m1"], ["m4"])
    assert await ids(topic="orders", id="m4") == []
    assert len(await outbox.waiting(limit=2)) == 2
    with pytest.raises(ConfigurationError, match="limit must be at least 1"):
        await outbox.waiting(limit=0)
    outbox.close()


def test_the_commands_list_and_delete(place: Place) -> None:
    def semel(*words: str) -> Any:
        return CliRunner().invoke(app, ["outbox", *words, "--table", place.table], catch_exceptions=False)

    outbox = place.outbox(parts=2)
    asyncio.run(_parked(place, outbox, Post()))
    listed = json.loads(semel("ls", place.url, "--json", "--key", "k0").output)
    assert [(row["message"], row["key"]) for row in listed] == [(f"m{n}", "k0") for n in (0, 3, 6, 9)]
    assert "nothing waits" in semel("ls", place.url, "--message", "m1").output
    done = semel("delete", place.url, "m0", "m9")
    assert done.exit_code == 1
    assert (json.loads(done.stdout)["id"], json.loads(done.stdout)["body"]) == ("m0", '{"n":0}')
    assert "m9 was left alone: no parked key has it at its head" in done.stderr
    assert semel("parked", place.url).output.strip() == "nothing is held back"
    outbox.close()


def test_tables_show_what_others_wrote_as_it_is(sqlite_home: Home) -> None:
    """Reasons are strangers' words: brackets are no markup, escapes move no cursor, and ids are not cut."""
    outbox, sink, name = sqlite_home.outbox(), Post(), "m" * 60
    with sqlite_home.transaction() as session:
        outbox.add(session, Message("orders", 1, key="[bold]k", id=name))
    sink.bad[name] = "no [/data] at [red]line 1\x1b[2J" + " and on" * 30
    asyncio.run(Relay(outbox, {"orders": sink}, max_attempts=1).drain())
    words = ["outbox", "parked", sqlite_home.url, "--table", sqlite_home.table]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert (name in done.output, "[bold]k" in done.output) == (True, True)
    assert r"no [/data] at [red]line 1\x1b[2J" in done.output
    outbox.close()


def test_a_drain_that_left_something_behind_says_so(sqlite_home: Home) -> None:
    outbox = sqlite_home.outbox()

    def drain(*more: str) -> int:
        words = ["relay", sqlite_home.url, "--drain", "--table", sqlite_home.table, *more]
        code: int = CliRunner().invoke(app, words, catch_exceptions=False).exit_code
        return code

    away = ("--route", "orders=redis://127.0.0.1:1/0?stream=x")
    assert drain(*away) == 0, "nothing was due"
    with sqlite_home.transaction() as session:
        outbox.add(session, Message("orders", 1, due=3600))
    assert drain(*away) == 0
    with sqlite_home.transaction() as session:
        outbox.add(session, Message("nowhere", 1))
    assert drain(*away) == 1
    outbox.close()
