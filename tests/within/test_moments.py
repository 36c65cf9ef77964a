"""R27: cancelled, cut off and refused in the middle of a claim or a settle; what has no place in a transaction."""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from semel import CodecError, ConfigurationError, Found, OutcomeUnknown, Semel, current_run
from semel.hooks import Failed, TakenOver
from semel.keys import make_scope
from semel.model import Ask, Kind, Note, Renewal, Settle, Won
from semel.runtime import run_sync
from semel.store import Query
from semel.within import bound as bound_module
from semel.within import places
from tests.within.lab import Lab, wait


@pytest.fixture
def on_sqlite(make: Any) -> Lab:
    lab: Lab = make("sqlite3")
    return lab


@pytest.fixture
def on_postgres(make: Any) -> Lab:
    lab: Lab = make("psycopg")
    return lab


@pytest.fixture
def on_mariadb(make: Any) -> Lab:
    lab: Lab = make("pymysql")
    return lab


async def _until(lab: Lab, sql: str) -> None:
    """Until the database says so."""
    async with asyncio.timeout(30):
        while not lab.execute(sql)[0][0]:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("driver", ["asyncmy", "asyncpg"])
async def test_R27_a_caller_who_is_cancelled_while_he_claims_owns_nothing(make: Any, driver: str) -> None:
    """MariaDB's drivers cannot be cancelled in a statement: there the claim is made, and taken back. (SQLAlchemy gives up
    its connection whenever it is cancelled: nothing can be said of that.)"""
    lab: Lab = make(driver)

    try:
        once, tx = await lab.ready()
        await tx.insert("before")
        bound = once.within(tx.target)
        tx_store = bound._tx.bound
        claim_one = tx_store.claim_one

        def cancelled(ask: Any) -> Any:
            waiting.cancel()  # comes when the claim's first statement is on its way
            return claim_one(ask)

        tx_store.claim_one = cancelled
        waiting = asyncio.create_task(bound.execute("k1", lab.work(tx), "k1"))
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await tx.insert("after")
        await tx.commit()
        assert [lab.orders(key) for key in ("before", "k1", "after")] == [1, 0, 1]
        assert lab.records("k1") == []
        await tx.begin()
        assert not (await once.within(tx.target).execute("k1", lab.work(tx), "k1")).replayed
        await tx.commit()
    finally:
        await lab.close()


def test_R27_a_transaction_that_cannot_write_says_what_its_database_said(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with Semel(f"sqlite:///{path}") as once:
        once.create()
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            once.within(connection).execute("k", int)
        connection.close()
        assert once.peek("k") is None


async def test_R27_a_connection_that_is_closed_says_what_its_driver_says(on_mariadb: Lab) -> None:
    once, tx = await on_mariadb.ready()
    bound = once.within(tx.target)
    bound.peek("k")  # looked at while it was open
    tx.target.close()
    with pytest.raises(tx.target.Error):
        bound.execute("k", int)
    tx.target.connect()  # for whoever closes it


async def test_R27_a_server_that_cuts_the_connection_while_the_claim_waits_is_told_with_its_error(
    make: Any,
) -> None:
    lab: Lab = make("psycopg-async")
    try:
        once, tx = await lab.ready()
        other = await lab.tx()
        holding = once.within(other.target).claim("k1")
        await holding.__aenter__()
        waiting = asyncio.create_task(once.within(tx.target).execute("k1", lab.work(tx), "k1", wait=60))
        pid = tx.target.info.backend_pid
        await _until(lab, f"SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = {pid}")
        lab.execute(f"SELECT pg_terminate_backend({pid})")
        with pytest.raises(psycopg.OperationalError) as caught:
            await waiting
        assert "could not be rolled back either" in "".join(caught.value.__notes__)
        await other.rollback()
        assert (lab.orders("k1"), lab.records("k1")) == (0, [])
    finally:
        await lab.close()


async def test_R27_a_probes_word_that_cannot_be_written_leaves_the_transaction_usable(on_sqlite: Lab) -> None:
    lab = on_sqlite
    once, tx = await lab.ready()
    with pytest.raises(ValueError, match="lost"):
        once.execute("k1", _raising, on_error="hold", on_unknown="hold")
    lab.execute("CREATE TRIGGER no BEFORE UPDATE ON semel BEGIN SELECT RAISE(ABORT, 'not now'); END")
    await tx.insert("before")
    bound = once.within(tx.target)
    with pytest.raises(sqlite3.IntegrityError, match="not now"):
        bound.execute("k1", _raising, on_unknown=lambda: Found("there"))
    await tx.insert("after")
    await tx.commit()
    assert (lab.records("k1"), lab.orders("before"), lab.orders("after")) == (["unknown"], 1, 1)


def _raising() -> None:
    raise ValueError("lost")


def test_R27_a_failure_is_tried_again_until_the_callers_transaction_is_over(make: Any) -> None:
    lab: Lab = make("sqlite3")
    once, checks = lab.face(timeout=0.05, settle_timeout=60), lab.face()
    checks.peek("warm-up")
    connection, in_vain = sqlite3.connect(lab.place), threading.Event()
    connection.execute("INSERT INTO orders (k) VALUES ('before')")  # the caller keeps the write lock
    runtime: Any = once._engine().runtime
    sleep = runtime.sleep

    async def before_another_try(seconds: float) -> None:
        in_vain.set()
        await sleep(seconds)

    runtime.sleep = before_another_try
    with pytest.raises(ValueError, match="lost"):
        once.within(connection).execute("k1", _raising, on_error="replay")
    assert in_vain.wait(30)
    connection.commit()
    until = time.monotonic() + 60
    while (record := checks.peek("k1")) is None or record.state != "failed":
        assert time.monotonic() < until, "it never came"
        time.sleep(0.005)
    assert lab.orders("before") == 1
    connection.close()
    run_sync(lab.close())


async def test_R27_steps_that_cannot_be_read_are_given_back_as_they_were(few: Lab) -> None:
    lab = few
    mine, theirs = os.urandom(32), os.urandom(32)
    first, tx = await lab.ready(encrypt={"mine": mine})
    charged: list[int] = []

    def charge() -> str:
        charged.append(1)
        return "charged"

    async def steps() -> str:
        run: Any = current_run()
        await wait(run.step("charge", charge))
        if len(charged) == 1:
            charged.append(0)
            raise ValueError("half way")
        return "whole"

    fn = steps if lab.colour == "async" else lambda: run_sync(steps())
    with pytest.raises(ValueError, match="half way"):
        await wait(first.execute("k1", fn))
    other = lab.face(encrypt={"theirs": theirs})
    bound = other.within(tx.target)
    for _ in range(2):  # the second time, too: nothing of the first is left open
        with pytest.raises(OutcomeUnknown) as caught:
            await wait(bound.execute("k1", lab.work(tx), "k1"))
        assert caught.value.unreadable
    await tx.insert("after")
    await tx.commit()
    assert (lab.orders("k1"), lab.orders("after")) == (0, 1)
    outcome = await wait(first.execute("k1", fn))
    assert (outcome.value, charged) == ("whole", [1, 0]), "who has the key goes on after the step"


async def test_R27_a_value_that_cannot_be_stored_is_told_and_not_made_again(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()

    async def body(key: str) -> Any:
        await tx.insert(key)
        return object()

    fn = body if lab.colour == "async" else lambda key: run_sync(body(key))
    with pytest.raises(CodecError):
        await wait(once.within(tx.target).execute("k1", fn, "k1"))
    await tx.commit()
    await tx.begin()
    with pytest.raises(CodecError, match="not run again"):
        await wait(once.within(tx.target).execute("k1", fn, "k1"))
    await tx.commit()
    assert (lab.orders("k1"), lab.records("k1")) == (1, ["done"])


async def test_R27_a_function_that_gives_a_generator_has_not_run_and_is_undone(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()
    with pytest.raises(ConfigurationError, match="generator"):
        await wait(once.within(tx.target).execute("k1", lambda: (each for each in "abc")))
    await tx.insert("after")
    await tx.commit()
    assert (lab.records("k1"), lab.orders("after")) == ([], 1)


def test_R27_a_claim_by_hand_whose_transaction_was_ended_is_told(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    connection = sqlite3.connect(path)
    with Semel(f"sqlite:///{path}") as once:
        once.create()
        with (
            pytest.raises(ConfigurationError, match="ended the transaction"),
            once.within(connection).claim("k") as claim,
        ):
            connection.rollback()
            claim.complete(1)
        assert once.peek("k") is None
    connection.close()


async def test_R27_a_face_whose_own_store_is_gone_decides_on_the_callers_connection(on_mariadb: Lab) -> None:
    lab = on_mariadb
    once, tx = await lab.ready()
    gone = Semel("mysql+pymysql://nobody@127.0.0.1:1/nowhere", timeout=0.2)
    assert gone.within(tx.target).execute("k1", lab.work(tx), "k1").replayed is False
    await tx.commit()
    assert once.within(tx.target).execute("k1", lab.work(tx), "k1").replayed
    await tx.rollback()
    assert lab.orders("k1") == 1
    gone.close()


async def test_R27_a_first_use_with_layers_makes_the_tables_too(fresh_lab: Lab) -> None:
    lab = fresh_lab
    once = lab.face(encrypt={"a": os.urandom(32)}, namespace="shop")
    tx = await lab.tx()
    assert (await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))).replayed is False
    await tx.commit()
    assert lab.orders("k1") == 1


def test_R27_a_caller_who_is_interrupted_and_one_who_takes_over_are_told_to_the_hooks(tmp_path: Path) -> None:
    path, heard = tmp_path / "shop.db", list[Any]()
    connection = sqlite3.connect(path)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with Semel(f"sqlite:///{path}", hooks=[heard.append]) as once:
        once.create()
        with pytest.raises(KeyboardInterrupt):
            once.within(connection).execute("k", interrupted)
        assert [event.decision for event in heard if isinstance(event, Failed)] == ["lost"]
        connection.rollback()
        with pytest.raises(KeyboardInterrupt):
            once.execute("steps", _first_step)
        assert once.within(connection).execute("steps", int).value == 0
        connection.commit()
        assert [event.attempt for event in heard if isinstance(event, TakenOver)] == [2]
    connection.close()


def _first_step() -> None:
    current_run().step("one", int)
    raise KeyboardInterrupt


def test_what_is_remembered_of_open_runs_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_MANY_RUNS", 2)
    path = tmp_path / "shop.db"
    with Semel(f"sqlite:///{path}") as once:
        once.create()
        before = len(places._open_runs)
        for turn in range(4):
            connection = sqlite3.connect(path)
            once.within(connection).claim(f"k{turn}").__enter__()  # and then forgotten
            gc.collect()
            connection.close()
        assert len(places._open_runs) <= before + 2


async def test_what_is_remembered_of_open_savepoints_is_bounded(
    on_postgres: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bound_module, "_REMEMBERED", 1)
    lab = on_postgres
    once, tx = await lab.ready()
    for turn in range(3):
        once.within(tx.target).execute(f"k{turn}", lab.work(tx), f"k{turn}")
        await tx.commit()
        assert len(bound_module._left_open) <= 1
    assert [lab.orders(f"k{turn}") for turn in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("kind", [Kind.FAILED, Kind.UNKNOWN])
def test_R27_an_owner_in_a_transaction_settles_as_done_or_not_at_all(tmp_path: Path, kind: Kind) -> None:
    path, scope = tmp_path / "shop.db", make_scope("semel", "default", "default", "k")
    with Semel(f"sqlite:///{path}") as once, closing(sqlite3.connect(path)) as connection:
        once.create()
        engine: Any = once.within(connection)._tx
        bound = engine.bound
        run_sync(bound.port.prepare())
        (won,) = run_sync(bound.claim([Ask(scope, b"n" * 16, 10.0, 60.0)]))
        assert isinstance(won, Won)
        with pytest.raises(ConfigurationError, match=f"no outcome {kind.value!r}"):
            run_sync(bound.settle([Settle(scope, b"n" * 16, kind, 60.0)]))
        assert connection.execute("SELECT state FROM semel").fetchall() == [("running",)]
        run_sync(bound.undo(b"n" * 16))
        assert connection.execute("SELECT state FROM semel").fetchall() == []


def test_R27_what_has_no_place_in_a_transaction_is_refused_and_the_rest_is_the_stores(tmp_path: Path) -> None:
    path, scope = tmp_path / "shop.db", make_scope("semel", "default", "default", "k")
    connection = sqlite3.connect(path)
    with Semel(f"sqlite:///{path}") as once:
        with pytest.raises(ValueError, match="lost"):
            once.execute("k", _raising, on_error="hold")
        engine: Any = once.within(connection)._tx
        bound = engine.bound
        outer = once._engine().store
        for refused in (
            bound.renew([Renewal(scope, b"n" * 16, 1.0, 1.0)]),
            bound.note(Note(scope, b"n" * 16, b"")),
            bound.watch(scope, bool),
        ):
            with pytest.raises(ConfigurationError, match="commits or rolls back as a whole"):
                run_sync(refused)
        assert (bound.colour, bound.capabilities) == ("sync", outer.capabilities)
        assert [record.state for record in run_sync(bound.scan(Query())).records] == ["unknown"]
        assert run_sync(bound.facts()).store == run_sync(outer.facts()).store
        assert run_sync(bound.purge(10)) == 0
    connection.close()
