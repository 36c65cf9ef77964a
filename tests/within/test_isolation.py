"""R27: isolation levels, errors that ask for a retry of the transaction, and cancellation."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from semel import AsyncSemel, InProgress, points
from semel.runtime import run_sync
from tests.within.lab import Lab, wait

RAISE_RETRYABLE = {
    "postgresql": "DO $$ BEGIN RAISE EXCEPTION 'chosen' USING ERRCODE = '{}'; END $$",
    "mysql": "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'chosen'",
}


@pytest.mark.parametrize("driver", ["pymysql", "session-pymysql", "asyncmy"])
@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
async def test_R27_mariadb_sees_the_latest_at_every_level(
    make_coloured: Any, driver: str, level: str
) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        other = await lab.tx()
        await tx.run(f"SET SESSION TRANSACTION ISOLATION LEVEL {level}")
        await tx.commit()
        await tx.count("k1")  # the caller's snapshot is from before
        await wait(once.within(other.target).execute("k1", lab.work(other, "first"), "k1"))
        await other.commit()
        outcome = await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))
        assert (outcome.value, outcome.replayed) == ("first", True)
        await tx.commit()
        assert lab.orders("k1") == 1

    await make_coloured(driver, body)


@pytest.mark.parametrize(
    "driver", ["psycopg", "session-psycopg", "asyncpg", "session-asyncpg", "django-postgresql"]
)
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_R27_serialization_failures_pass_and_the_retry_replays(
    make_coloured: Any, driver: str, level: str
) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        face, other = lab.face(), await Lab("psycopg", lab.place).tx()  # a sync caller beside it
        del face
        await tx.run(f"SET TRANSACTION ISOLATION LEVEL {level}")
        await tx.count("k1")
        sync = Lab("psycopg", lab.place).face()
        if lab.colour == "async":
            outcome = await asyncio.to_thread(
                lambda: sync.within(other.target).execute("k1", lambda: "first")
            )
        else:
            outcome = sync.within(other.target).execute("k1", lambda: "first")
        other.target.commit()
        other.target.close()
        sync.close()
        assert outcome.value == "first"
        with pytest.raises(Exception, match="could not serialize access") as caught:
            await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1", on_error="replay"))
        assert "semel" not in type(caught.value).__module__
        await tx.rollback()
        await tx.begin()
        again = await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))
        assert (again.value, again.replayed) == ("first", True)
        await tx.commit()

    await make_coloured(driver, body)


@pytest.mark.parametrize(
    "driver", ["psycopg", "session-asyncpg", "django-postgresql", "pymysql", "session-asyncmy"]
)
@pytest.mark.parametrize("state", ["40001", "40P01"])
async def test_R27_a_deadlock_in_the_function_is_never_its_outcome(
    make_coloured: Any, driver: str, state: str
) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()

        async def unlucky(key: str) -> None:
            await tx.insert(key)
            await tx.run(RAISE_RETRYABLE[lab.dialect].format(state))

        fn = (lambda key: run_sync(unlucky(key))) if lab.colour == "sync" else unlucky
        with pytest.raises(Exception, match="chosen") as caught:
            await wait(once.within(tx.target).execute("k1", fn, "k1", on_error="replay"))
        assert "semel" not in type(caught.value).__module__
        await tx.rollback()
        assert await wait(once.peek("k1")) is None
        await tx.begin()
        assert not (await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))).replayed
        await tx.commit()

    await make_coloured(driver, body)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "session-asyncpg"])
async def test_R27_a_real_deadlock_passes_as_the_drivers_error(make_coloured: Any, driver: str) -> None:
    async def body(lab: Lab) -> None:
        once, first = await lab.ready()
        second = await lab.tx()
        await second.insert("row")
        await second.commit()
        await second.begin()
        await second.run("UPDATE orders SET k = 'row' WHERE k = 'row'")  # second has the row …
        await wait(once.within(first.target).execute("k1", lab.work(first), "k1"))  # … and first the key

        async def wants_key() -> Any:
            return await wait(once.within(second.target).execute("k1", lab.work(second), "k1", wait=30))

        async def wants_row() -> Any:
            await first.run("UPDATE orders SET k = 'row' WHERE k = 'row'")

        errors = []
        for spawned in (lab.spawn(wants_key()), lab.spawn(wants_row())):
            try:
                await spawned.result()
            except Exception as error:
                errors.append(error)
                await (
                    second.rollback()
                    if len(errors) == 1 and not isinstance(error, InProgress)
                    else first.rollback()
                )
        assert len(errors) == 1
        assert "deadlock detected" in str(errors[0])
        assert "semel" not in type(errors[0]).__module__

    await make_coloured(driver, body)


@pytest.mark.parametrize(
    "driver", ["asyncpg", "session-asyncpg", "psycopg-async", "session-psycopg-async", "session-aiosqlite"]
)
async def test_R27_a_cancelled_function_is_undone(make_coloured: Any, driver: str) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        started = asyncio.Event()

        async def stuck(key: str) -> None:
            await tx.insert(key)
            started.set()
            await asyncio.Event().wait()

        task = asyncio.ensure_future(once.within(tx.target).execute("k1", stuck, "k1"))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await tx.insert("after")
        await tx.commit()
        assert (lab.orders("k1"), lab.records("k1"), lab.orders("after")) == (0, [], 1)

    await make_coloured(driver, body)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg-async", "asyncmy"])
async def test_R27_a_cancelled_waiter_leaves_its_transaction_usable(make_coloured: Any, driver: str) -> None:
    async def body(lab: Lab) -> None:
        once, first = await lab.ready()
        second = await lab.tx()
        await wait(once.within(first.target).execute("k1", lab.work(first), "k1"))
        sent = asyncio.Event()
        points.listen(lambda name: sent.set() if name == "claim.sent" else None)
        task = asyncio.ensure_future(
            once.within(second.target).execute("k1", lab.work(second), "k1", wait=30)
        )
        await sent.wait()
        points.listen(None)
        await asyncio.sleep(0.1)  # on its way into the lock: there is no signal from inside the server
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await second.insert("after")
        await second.commit()
        await first.commit()
        assert (lab.orders("k1"), lab.orders("after")) == (1, 1)

    await make_coloured(driver, body)


@pytest.mark.parametrize("begins", [False, True])
async def test_R27_a_cancelled_waiter_of_a_sqlite_session_hears_that_he_was_cancelled(
    tmp_path: Path, begins: bool
) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'semel.db'}"
    engine = create_async_engine(url)
    if begins:  # by SQLAlchemy's own recipe, without the lock: it is the claim that waits
        event.listen(engine.sync_engine, "connect", lambda raw, _: setattr(raw, "isolation_level", None))
        event.listen(engine.sync_engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))

    async def work() -> int:
        return 1

    async with AsyncSemel(f"sqlite:///{tmp_path / 'semel.db'}") as once:
        await once.create()
        async with AsyncSession(engine) as owner, AsyncSession(engine) as waiter:
            await once.within(owner).execute("k", work)
            # On a machine that stands still the waiter may be told before it is cancelled: then once more.
            end: Any = InProgress("")
            for _ in range(5):
                if isinstance(end, InProgress):
                    waiting = asyncio.create_task(once.within(waiter).execute("k", work, wait=0.5))
                    await asyncio.sleep(0.1)
                    waiting.cancel()
                    (end,) = await asyncio.gather(waiting, return_exceptions=True)
            # not what SQLAlchemy says of the connection that it gave up
            assert isinstance(end, asyncio.CancelledError)
            await owner.commit()
        assert (await once.execute("k", work)).replayed
    await engine.dispose()
