"""A caller over aiosqlite is cancelled at any moment: the file is free as soon as he has ended his transaction.

Every step of a statement goes to the connection's thread, and its caller is cancelled while one of them is under way. No
collection of cycles comes to help.
"""

from __future__ import annotations

import asyncio
import gc
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from itertools import count
from pathlib import Path
from typing import Any

import aiosqlite
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from semel import AsyncSemel

KINDS = ["session", "connection"]


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Strike:
    """Cancels a task while the n-th step that it asks of the connection's thread is under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
        self._real: Any = aiosqlite.Connection._execute
        self._times = times
        self._task: asyncio.Task[Any] | None = None
        self._left = 0
        self.own = False
        """Whether the step was one of the caller's own statements."""
        self.in_function = False
        monkeypatch.setattr(aiosqlite.Connection, "_execute", self._patched())

    def _patched(self) -> Any:
        def execute(connection: Any, *args: Any, **kwargs: Any) -> Any:  # no frame of its own keeps a cursor
            task = self._task
            if task is not None and task is asyncio.current_task():
                self._left -= 1
                if self._left == 0:
                    self.own = self.in_function
                    self._cancel(task, self._times)
            return self._real(connection, *args, **kwargs)

        return execute

    def _cancel(self, task: asyncio.Task[Any], times: int) -> None:
        task.cancel()
        if times > 1:
            asyncio.get_running_loop().call_soon(self._cancel, task, times - 1)

    async def at(self, moment: int, work: Any) -> bool:
        """Whether it was cancelled; otherwise it has ended before that moment."""
        self._left = moment
        self._task = asyncio.ensure_future(work)
        try:
            await self._task
        except asyncio.CancelledError:
            assert self._task.cancelled()
            return True
        finally:
            self._task = None
        assert self._left > 0, "the cancellation was swallowed"
        return False


@asynccontextmanager
async def opened(file: Path) -> AsyncIterator[tuple[AsyncSemel, AsyncEngine]]:
    engine = create_async_engine(f"sqlite+aiosqlite:///{file}")
    async with AsyncSemel(f"sqlite:///{file}") as once:
        await once.create()
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE orders (k TEXT)"))
        yield once, engine
    await engine.dispose()


async def begun(engine: AsyncEngine, kind: str) -> AsyncSession | AsyncConnection:
    """Connected, and no transaction of SQLite's yet."""
    if kind == "connection":
        connection: AsyncConnection = await engine.connect()
        return connection
    session = AsyncSession(engine)
    await session.execute(text("PRAGMA busy_timeout"))
    return session


async def soon_free(file: Path) -> bool:
    """What the step gave may be on its way from the thread still, when its caller has gone."""
    for _ in range(200):
        if is_free(file):
            return True
        await asyncio.sleep(0.01)
    return False


def is_free(file: Path) -> bool:
    with closing(sqlite3.connect(file, timeout=0)) as other:
        try:
            other.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        return True


def rows(file: Path, table: str, key: str) -> int:
    with closing(sqlite3.connect(file)) as other:
        return int(
            other.execute(
                f"SELECT count(*) FROM {table} WHERE {'k' if table == 'orders' else 'key'} = ?", (key,)
            ).fetchone()[0]
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("times", [1, 4])
async def test_R27_who_is_cancelled_in_a_statement_of_ours_keeps_his_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, times: int
) -> None:
    file = tmp_path / "semel.db"
    strike = Strike(monkeypatch, times)
    async with opened(file) as (once, engine):
        for moment in count(1):
            key, mine = f"k{moment}", f"mine{moment}"
            target = await begun(engine, kind)

            async def work(target: Any, key: str) -> str:
                strike.in_function = True
                await target.execute(text("INSERT INTO orders VALUES (:k)"), {"k": key})
                strike.in_function = False
                return key

            if moment % 2:  # otherwise it is the claim that begins
                await target.execute(text("INSERT INTO orders VALUES (:k)"), {"k": mine})
            if not await strike.at(moment, once.within(target).execute(key, work, target, key)):
                await target.close()
                assert moment > 20
                break
            if not strike.own:
                assert not target.in_nested_transaction()
                assert (await target.execute(text("PRAGMA busy_timeout"))).scalar_one() == 5000
                await target.execute(text("INSERT INTO orders VALUES (:k)"), {"k": mine})
                await target.commit()
                assert rows(file, "orders", mine) == 1 + moment % 2
                # Both or nothing: cancelled as the savepoint was released, what was done is his to commit or not.
                assert rows(file, "orders", key) == rows(file, "semel", key)
            else:
                await target.rollback()
            strike.in_function = False
            await target.close()
            assert await soon_free(file), f"locked after a cancellation at step {moment}"
            async with AsyncSession(engine) as session:
                again = await once.within(session).execute(key, work, session, key)
                assert again.value == key
                await session.commit()
            assert (rows(file, "orders", key), rows(file, "semel", key)) == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
async def test_R27_who_is_cancelled_in_a_statement_of_his_function_frees_the_file_as_he_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    file = tmp_path / "semel.db"
    strike = Strike(monkeypatch)
    own = 0
    async with opened(file) as (once, engine):
        for moment in count(1):
            target = await begun(engine, kind)

            async def work(target: Any, key: str) -> str:
                strike.in_function = True
                found = await target.execute(text("INSERT INTO orders VALUES (:k) RETURNING k"), {"k": key})
                strike.in_function = False
                return str(found.scalar_one())

            if not await strike.at(moment, once.within(target).execute(f"k{moment}", work, target, "k")):
                await target.close()
                break
            own += strike.own
            strike.in_function = False
            await target.rollback()
            await target.close()
            assert await soon_free(file), f"locked after a cancellation at step {moment}"
    assert own > 2


class Orm(DeclarativeBase):
    pass


class Order(Orm):
    __tablename__ = "orders"
    k: Mapped[str] = mapped_column(primary_key=True)
    at: Mapped[str] = mapped_column(server_default="now")  # read back by RETURNING


async def test_R27_who_is_cancelled_in_a_flush_frees_the_file_as_he_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "semel.db"
    strike = Strike(monkeypatch)
    async with opened(file) as (once, engine):
        async with engine.begin() as connection:
            await connection.execute(text("ALTER TABLE orders ADD COLUMN at TEXT DEFAULT 'now'"))
        for moment in count(1):
            target = AsyncSession(engine)
            await target.execute(text("PRAGMA busy_timeout"))

            async def work(target: AsyncSession, key: str) -> None:
                target.add(Order(k=key))

            target.add(Order(k="before"))
            if not await strike.at(moment, once.within(target).execute("k", work, target, "inside")):
                await target.close()
                break
            await target.rollback()
            await target.close()
            assert await soon_free(file), f"locked after a cancellation at step {moment}"
