"""R27, R9: a failure that is kept is the outcome at once for this process, though it is written after the transaction."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from semel import NOT_FOUND, Found, InProgress, OutcomeUnknown, PreviousFailure, Release, forks
from semel.within import afterwards
from tests.within.lab import Lab, Tx, wait
from tests.within.test_decisions import coloured

SQLITE = ["sqlite3", "session-pysqlite", "connection-pysqlite", "django-sqlite", "session-aiosqlite"]
KEPT = {"replay": PreviousFailure, "hold": OutcomeUnknown}


class Charge:
    """An effect outside of every database, whose answer does not come."""

    def __init__(self, lab: Lab, tx: Tx) -> None:
        self.times = 0
        self._tx = tx
        self.run = coloured(lab, self._charge)

    async def _charge(self) -> None:
        self.times += 1
        raise TimeoutError(f"no answer {self.times}")


async def held(lab: Lab, once: Any, word: Any = "hold", **options: Any) -> tuple[Tx, Charge, Any]:
    """A transaction that has the write lock, and in it a run whose failure is to be kept."""
    tx = await lab.tx()
    await tx.insert("before")
    charge = Charge(lab, tx)
    within = once.within(tx.target)
    with pytest.raises(TimeoutError):
        await wait(within.execute("k1", charge.run, on_error=word, **options))
    return tx, charge, within


async def settled(lab: Lab, state: str) -> None:
    until = time.monotonic() + 20
    while lab.records("k1") != [state] and time.monotonic() < until:
        time.sleep(0.01)
    assert lab.records("k1") == [state]


def owed(once: Any) -> int:
    """How many failures of this face are still to be written, by its file."""
    return sum(place == (once._store.path, "semel", None) for place, _ in list(afterwards.OWED))


@pytest.mark.parametrize("word", ["replay", "hold"])
@pytest.mark.parametrize("driver", SQLITE)
async def test_R27_a_kept_failure_is_not_run_again_before_it_is_written(
    make_coloured: Any, driver: str, word: str
) -> None:
    async def body(lab: Lab) -> None:
        once = lab.face()
        await wait(once.create())
        tx, charge, within = await held(lab, once, word)
        for _ in range(2):
            with pytest.raises(KEPT[word]):
                await wait(within.execute("k1", charge.run, on_error=word))
        await tx.commit()
        other = await lab.tx()
        with pytest.raises(KEPT[word]):
            await wait(once.within(other.target).execute("k1", charge.run, on_error=word))
        assert (charge.times, lab.orders("before")) == (1, 1)
        await lab.done_with(other)

    await make_coloured(driver, body)


async def test_R27_a_kept_failure_of_a_bare_connection_is_told_to_the_next_one_and_then_written(
    make_coloured: Any,
) -> None:
    async def body(lab: Lab) -> None:
        once, other = await lab.ready()
        tx, charge, _ = await held(lab, once)
        time.sleep(0.6)  # its next try in the background is a while off
        await tx.commit()
        beside = lab.face()
        for face in (once, beside):
            with pytest.raises(OutcomeUnknown):
                face.within(other.target).execute("k1", charge.run)
        await other.rollback()
        await settled(lab, "unknown")
        until = time.monotonic() + 20
        while owed(once) and time.monotonic() < until:
            time.sleep(0.01)
        assert (charge.times, owed(once)) == (1, 0)
        once.resolve("k1", release=True)
        assert once.within(other.target).execute("k1", lambda: "free").value == "free", (
            "the record answers now"
        )

    await make_coloured("sqlite3", body)


@pytest.mark.parametrize("driver", ["pymysql", "asyncmy"])
async def test_R27_innodb_keeps_the_row_lock_of_a_run_that_was_undone_and_its_failure_is_told(
    make_coloured: Any, driver: str
) -> None:
    async def body(lab: Lab) -> None:
        once, _ = await lab.ready()
        with pytest.raises(TimeoutError):
            await wait(once.execute("k1", Charge(lab, Tx()).run))
        tx, charge, within = await held(lab, once)
        with pytest.raises(OutcomeUnknown):
            await wait(within.execute("k1", charge.run))
        await tx.commit()
        assert charge.times == 1

    await make_coloured(driver, body)


async def test_R27_what_is_told_is_that_keys_alone(make_coloured: Any) -> None:
    async def body(lab: Lab) -> None:
        once, _ = await lab.ready()
        elsewhere = [lab.face(table="elsewhere"), lab.face(namespace="elsewhere")]
        for face in elsewhere:
            face.create()
        tx, _, within = await held(lab, once)
        for face in elsewhere:
            assert face.within(tx.target).execute("k1", lambda: "free").value == "free"
        assert within.execute("k2", lambda: "free").value == "free"
        await tx.commit()

    await make_coloured("sqlite3", body)


async def test_R9_a_delay_that_is_not_written_yet_is_kept_and_then_over(make_coloured: Any) -> None:
    async def body(lab: Lab) -> None:
        once, _ = await lab.ready()
        tx, charge, within = await held(lab, once, lambda error: Release(after=1))
        with pytest.raises(InProgress):
            within.execute("k1", charge.run)
        assert within.execute("k1", lambda: "ran", wait=10).value == "ran"
        await tx.commit()
        assert (charge.times, lab.records("k1")) == (1, ["done"])

    await make_coloured("sqlite3", body)


async def test_R11_a_probe_decides_on_a_failure_that_is_not_written_yet(make_coloured: Any) -> None:
    async def body(lab: Lab) -> None:
        once, _ = await lab.ready()
        tx, charge, within = await held(lab, once)
        outcome = within.execute("k1", charge.run, on_unknown=lambda: Found("found"))
        assert (outcome.value, charge.times) == ("found", 1)
        await tx.commit()
        assert once.execute("k1", charge.run).value == "found"

    await make_coloured("sqlite3", body)


async def test_R11_what_was_done_since_counts_before_a_failure_that_is_not_written_yet(
    make_coloured: Any,
) -> None:
    async def body(lab: Lab) -> None:
        once, _ = await lab.ready()
        asking: dict[str, Any] = {"on_unknown": lambda: NOT_FOUND}
        tx, _, within = await held(lab, once, **asking)
        assert within.execute("k1", lambda: "ran", **asking).value == "ran"
        assert (
            within.execute("k1", lambda: "again", on_unknown="hold").value == "ran"
        )  # in the same transaction
        await tx.commit()
        await tx.begin()
        assert within.execute("k1", lambda: "again", on_unknown="hold").value == "ran"  # and right after it
        await tx.rollback()

    await make_coloured("sqlite3", body)


async def test_R11_of_two_failures_that_are_not_written_yet_the_later_one_is(make_coloured: Any) -> None:
    async def body(lab: Lab) -> None:
        once, _ = await lab.ready()
        asking: dict[str, Any] = {"on_unknown": lambda: NOT_FOUND}
        tx, charge, within = await held(lab, once, **asking)
        with pytest.raises(TimeoutError, match="no answer 2"):
            within.execute("k1", charge.run, on_error="replay", **asking)
        with pytest.raises(PreviousFailure, match="no answer 2"):
            within.execute("k1", charge.run, **asking)
        await tx.commit()
        await settled(lab, "failed")
        assert lab.execute("SELECT error_message FROM semel WHERE key = 'k1'") == [("no answer 2",)]

    await make_coloured("sqlite3", body)


async def test_R29_a_child_process_knows_of_no_failure_that_its_parent_is_going_to_write(
    make_coloured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(lab: Lab) -> None:
        once, _ = await lab.ready()
        tx, _, within = await held(lab, once)
        with monkeypatch.context() as child:
            child.setattr(forks, "epoch", forks.epoch + 1)
            assert within.execute("k1", lambda: "ran").value == "ran"
        await tx.rollback()

    await make_coloured("sqlite3", body)


async def test_R27_a_session_that_is_thrown_away_takes_its_failure_with_it(make_coloured: Any) -> None:
    async def body(lab: Lab) -> None:
        once, _ = await lab.ready()
        tx, _, _ = await held(lab, once)
        assert owed(once) == 1
        tx.target.close()
        lab._txs.remove(tx)
        del tx
        gc.collect()
        assert owed(once) == 0

    await make_coloured("session-pysqlite", body)


@pytest.mark.parametrize("mode", ["create_savepoint", "rollback_only"])
def test_R27_a_session_that_joined_a_connections_transaction_ends_without_waiting_for_that(
    make: Any, mode: Any
) -> None:
    lab = make("session-pysqlite")
    once = lab.face(settle_timeout=10)
    once.create()
    engine = create_engine(lab.url)

    def charge() -> None:
        raise TimeoutError("no answer")

    with engine.connect() as connection, connection.begin():
        connection.execute(text("INSERT INTO orders (k) VALUES ('before')"))
        session = Session(connection, join_transaction_mode=mode)
        with pytest.raises(TimeoutError):
            once.within(session).execute("k1", charge, on_error="replay")
        started = time.monotonic()
        session.commit()
        assert time.monotonic() - started < 5
        with pytest.raises(PreviousFailure):
            once.within(session).execute("k1", charge, on_error="replay")
        session.close()
    until = time.monotonic() + 20
    while lab.records("k1") != ["failed"] and time.monotonic() < until:
        time.sleep(0.01)
    assert (lab.records("k1"), lab.orders("before")) == (["failed"], 1)
    engine.dispose()


def lose(tx: Tx, driver: str) -> None:
    """What SQLAlchemy does where its caller is cancelled in the middle of a statement, and what becomes of a broken connection."""
    if driver.startswith("session"):
        tx.target.connection().invalidate()
    elif driver.startswith("connection"):
        tx.target.invalidate()
    else:
        tx.target.close()


@pytest.mark.parametrize("driver", ["sqlite3", "session-pysqlite", "connection-pysqlite", "django-sqlite"])
async def test_R27_a_kept_failure_is_written_though_the_connection_is_lost(
    make_coloured: Any, driver: str
) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        await tx.insert("before")

        def charge() -> None:
            lose(tx, driver)
            raise TimeoutError("no answer")

        with pytest.raises(TimeoutError):
            once.within(tx.target).execute("k1", charge, on_error="hold")
        with suppress(Exception):  # as every end of a lost transaction
            await tx.rollback()
        await settled(lab, "unknown")

    await make_coloured(driver, body)


# SQLAlchemy leaves the connection that it gave up to the collector, and Python 3.13 says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_R10_a_caller_cancelled_in_a_statement_hears_of_that_and_owes_an_unknown_outcome(
    make_coloured: Any,
) -> None:
    """SQLAlchemy gives the connection up, and asking that one whether it holds the lock raised in the place of all this."""

    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        started = asyncio.Event()

        async def charge() -> None:
            started.set()
            await tx.run(
                "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 2000000) SELECT max(x) FROM c"
            )

        running = asyncio.create_task(once.within(tx.target).execute("k1", charge, on_unknown="hold"))
        await started.wait()
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert owed(once) == 1
        other = await lab.tx()
        with pytest.raises(OutcomeUnknown):
            await once.within(other.target).execute("k1", charge, on_unknown="hold")

    await make_coloured("session-aiosqlite", body)
