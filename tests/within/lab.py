"""One test body for every driver: a transaction of a caller, in either colour, with a business table beside semel's."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from semel import AsyncSemel, Semel
from semel.runtime import run_sync

TABLES = {
    "sqlite": "CREATE TABLE orders (id INTEGER PRIMARY KEY, k TEXT NOT NULL)",
    "postgresql": "CREATE TABLE orders (id serial PRIMARY KEY, k text NOT NULL)",
    "mysql": "CREATE TABLE orders (id INT AUTO_INCREMENT PRIMARY KEY, k VARCHAR(255) NOT NULL) ENGINE=InnoDB",
}
SYNC = (
    "sqlite3",
    "session-pysqlite",
    "connection-pysqlite",
    "psycopg",
    "session-psycopg",
    "connection-psycopg",
    "pymysql",
    "session-pymysql",
    "connection-pymysql",
    "django-sqlite",
    "django-postgresql",
    "django-mysql",
)
ASYNC = (
    "session-aiosqlite",
    "connection-aiosqlite",
    "asyncpg",
    "asyncpg-pool",
    "psycopg-async",
    "session-asyncpg",
    "connection-asyncpg",
    "session-psycopg-async",
    "asyncmy",
    "session-asyncmy",
    "connection-asyncmy",
)


async def wait(thing: Any) -> Any:
    return await thing if inspect.isawaitable(thing) else thing


class Tx:
    """A caller's transaction: `target` goes to within(), the rest is what his own code does."""

    target: Any

    async def run(self, sql: str) -> list[Any]:
        raise NotImplementedError

    async def insert(self, key: str) -> None:
        await self.run(f"INSERT INTO orders (k) VALUES ('{key}')")

    async def count(self, key: str) -> int:
        return int((await self.run(f"SELECT count(*) FROM orders WHERE k = '{key}'"))[0][0])

    async def begin(self) -> None:
        """Where a transaction does not begin by itself."""

    async def commit(self) -> None:
        await wait(self.target.commit())

    async def rollback(self) -> None:
        await wait(self.target.rollback())

    async def savepoint(self) -> None:
        await self.run("SAVEPOINT mine")

    async def back(self) -> None:
        await self.run("ROLLBACK TO SAVEPOINT mine")

    async def close(self) -> None:
        await wait(self.target.close())


class Sqlite3Tx(Tx):
    def __init__(self, lab: Lab) -> None:
        self.target = sqlite3.connect(lab.place, check_same_thread=False)

    async def run(self, sql: str) -> list[Any]:
        return list(self.target.execute(sql).fetchall())

    async def savepoint(self) -> None:
        if not self.target.in_transaction:
            self.target.execute("BEGIN IMMEDIATE")
        await super().savepoint()


class CursorTx(Tx):
    """psycopg and the MySQL drivers, both colours."""

    def __init__(self, target: Any) -> None:
        self.target = target

    async def run(self, sql: str) -> list[Any]:
        cursor = self.target.cursor()
        try:
            await wait(cursor.execute(sql))
            return list(await wait(cursor.fetchall())) if cursor.description else []
        finally:
            await wait(cursor.close())


class AsyncmyTx(CursorTx):
    async def run(self, sql: str) -> list[Any]:
        async with self.target.cursor() as cursor:
            await cursor.execute(sql)
            return list(await cursor.fetchall()) if cursor.description else []

    async def close(self) -> None:
        await self.target.ensure_closed()


class AsyncpgTx(Tx):
    def __init__(self, target: Any, pool: Any = None) -> None:
        self.target = target
        self._pool = pool

    async def begin(self) -> None:
        if not self.target.is_in_transaction():
            await self.target.execute("BEGIN")

    async def run(self, sql: str) -> list[Any]:
        await self.begin()
        return list(await self.target.fetch(sql))

    async def commit(self) -> None:
        if self.target.is_in_transaction():
            await self.target.execute("COMMIT")

    async def rollback(self) -> None:
        if self.target.is_in_transaction():
            await self.target.execute("ROLLBACK")

    async def close(self) -> None:
        await self.rollback()
        if self._pool is not None:
            await self._pool.release(self.target)
            await self._pool.close()
        else:
            await self.target.close()


class DjangoTx(Tx):
    """`atomic()` as a context manager does not fit commit() and rollback(): it is entered and left by hand."""

    def __init__(self, alias: str) -> None:
        from django.db import connections

        self.target = connections[alias]
        self._atomics: list[Any] = []

    async def begin(self) -> None:
        if not self._atomics:
            await self.savepoint()

    async def run(self, sql: str) -> list[Any]:
        await self.begin()
        with self.target.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall()) if cursor.description else []

    async def savepoint(self) -> None:
        from django.db import transaction

        atomic = transaction.atomic(using=self.target.alias)
        atomic.__enter__()
        self._atomics.append(atomic)

    async def commit(self) -> None:
        while self._atomics:
            self._atomics.pop().__exit__(None, None, None)

    async def back(self) -> None:
        self._atomics.pop().__exit__(ValueError, ValueError(), None)

    async def rollback(self) -> None:
        while self._atomics:
            await self.back()

    async def close(self) -> None:
        await self.rollback()
        self.target.close()


class Promise:
    """Something to await that is no coroutine."""

    def __await__(self) -> Any:
        yield from ()


class Spawned:
    """Work that goes on beside the test: a thread for sync drivers, a task for async ones."""

    def __init__(self, work: Awaitable[Any], colour: str) -> None:
        self._colour = colour
        self._value: Any = None
        self._error: BaseException | None = None
        if colour == "sync":
            self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
            self._thread.start()
        else:
            self._task = asyncio.ensure_future(work)

    def _run(self, work: Any) -> None:
        try:
            self._value = run_sync(work)
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        return not self._thread.is_alive() if self._colour == "sync" else self._task.done()

    async def result(self, patience: float = 30) -> Any:
        if self._colour == "async":
            return await asyncio.wait_for(asyncio.shield(self._task), patience)
        self._thread.join(patience)
        assert not self._thread.is_alive(), f"still waiting after {patience} s"
        if self._error is not None:
            raise self._error
        return self._value


class Lab:
    """A database with a business table, a face on it, and transactions by the driver under test."""

    def __init__(self, driver: str, place: str) -> None:
        """`place` is a file name for SQLite, else a URL without a driver."""
        self.driver = driver
        self.place = place
        self.colour = "sync" if driver in SYNC else "async"
        self.dialect = "sqlite" if "sqlite" in driver else "mysql" if "my" in driver else "postgresql"
        self._faces: list[Any] = []
        self._txs: list[Tx] = []

    # ------------------------------------------------------------------------------------------- faces
    @property
    def url(self) -> str:
        if self.dialect == "sqlite":
            return f"sqlite:///{self.place}"
        drivers = {
            ("postgresql", "sync"): "psycopg",
            ("postgresql", "async"): "asyncpg",
            ("mysql", "sync"): "pymysql",
            ("mysql", "async"): "asyncmy",
        }
        return f"{self.dialect}+{drivers[self.dialect, self.colour]}://{self.place.partition('://')[2]}"

    def face(self, **settings: Any) -> Any:
        given = {"timeout": 20} | settings  # a busy machine is no broken store
        face = (Semel if self.colour == "sync" else AsyncSemel)(self.url, **given)
        self._faces.append(face)
        return face

    async def ready(self, **settings: Any) -> tuple[Any, Tx]:
        """A face whose tables are there, and a transaction."""
        once = self.face(**settings)
        await wait(once.peek("warm-up"))
        return once, await self.tx()

    # ------------------------------------------------------------------------------------ transactions
    async def tx(self) -> Tx:
        tx = await self._open()
        self._txs.append(tx)
        await tx.begin()
        return tx

    async def done_with(self, tx: Tx) -> None:
        """Close it where it was made: Django's connections belong to their thread."""
        self._txs.remove(tx)
        await tx.close()

    async def _open(self) -> Tx:
        kind, _, name = self.driver.partition("-")
        if kind in ("session", "connection"):
            return await self._alchemy(kind, name)
        if kind == "django":
            return DjangoTx(self.django_alias())
        return await getattr(self, f"_open_{self.driver.replace('-', '_')}")()  # type: ignore[no-any-return]  # a method by its name

    async def _alchemy(self, kind: str, name: str) -> Tx:
        name = name.removesuffix("-async")
        rest = self.place.partition("://")[2] if "://" in self.place else f"/{self.place}"
        url = f"{self.dialect}+{name}://{rest}"
        # Here, because its import takes a second, and most processes that the tests start do not need it.
        from tests.within.alchemy_lab import open_alchemy

        return await open_alchemy(url, self.colour, kind)

    async def _open_sqlite3(self) -> Tx:
        return Sqlite3Tx(self)

    async def _open_psycopg(self) -> Tx:
        import psycopg

        return CursorTx(psycopg.connect(self.place))

    async def _open_psycopg_async(self) -> Tx:
        import psycopg

        return CursorTx(await psycopg.AsyncConnection.connect(self.place))

    async def _open_asyncpg(self) -> Tx:
        import asyncpg

        return AsyncpgTx(await asyncpg.connect(self.place))

    async def _open_asyncpg_pool(self) -> Tx:
        import asyncpg

        pool = await asyncpg.create_pool(self.place, min_size=1, max_size=1)
        return AsyncpgTx(await pool.acquire(), pool)

    def mysql_place(self) -> dict[str, Any]:
        parts = urlsplit(self.place)
        return {
            "host": parts.hostname,
            "port": parts.port,
            "user": parts.username,
            "database": parts.path[1:],
        }

    async def _open_pymysql(self) -> Tx:
        import pymysql

        return CursorTx(pymysql.connect(**self.mysql_place()))

    async def _open_asyncmy(self) -> Tx:
        import asyncmy

        return AsyncmyTx(await asyncmy.connect(**self.mysql_place()))

    # ------------------------------------------------------------------------------------------ Django
    def django_alias(self) -> str:
        """A database alias of its own for this place."""
        import django
        from django.conf import settings
        from django.db import connections

        if not settings.configured:
            settings.configure(DATABASES={}, USE_TZ=True)
            django.setup()
        alias = f"lab{abs(hash(self.place))}"
        if alias not in connections.settings:
            options = connections.configure_settings({alias: self._django_options(), "default": {}})
            connections.settings[alias] = options[alias]
        return alias

    def _django_options(self) -> dict[str, Any]:
        engine = "django.db.backends." + self.dialect.replace("sqlite", "sqlite3")
        if self.dialect == "sqlite":
            return {"ENGINE": engine, "NAME": self.place}
        if self.dialect == "mysql":
            import pymysql

            pymysql.install_as_MySQLdb()
        parts = urlsplit(self.place)
        return {
            "ENGINE": engine,
            "NAME": parts.path[1:],
            "HOST": parts.hostname,
            "PORT": parts.port,
            "USER": parts.username,
        }

    # -------------------------------------------------------------------------------------- the tests
    def create(self) -> None:
        """The business table, on a connection of its own."""
        if self.dialect == "sqlite":
            with sqlite3.connect(self.place) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(TABLES["sqlite"])
            connection.close()
            return
        self.execute(TABLES[self.dialect])

    def clean(self) -> None:
        """What earlier tests left."""
        self.execute("DELETE FROM orders")
        found = (
            "to_regclass('semel')"
            if self.dialect == "postgresql"
            else (
                "(SELECT max(table_name) FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = 'semel')"
            )
        )
        if self.execute(f"SELECT {found}")[0][0] is not None:
            self.execute("DELETE FROM semel")

    def execute(self, sql: str) -> list[Any]:
        """One statement on another connection, committed."""
        if self.dialect == "sqlite":
            file = sqlite3.connect(self.place)
            with file:
                rows = file.execute(sql).fetchall()
            file.close()
            return rows
        if self.dialect == "postgresql":
            import psycopg

            with psycopg.connect(self.place, autocommit=True) as connection:
                cursor = connection.execute(sql.encode())
                return cursor.fetchall() if cursor.description else []
        import pymysql

        with pymysql.connect(**self.mysql_place(), autocommit=True) as plain, plain.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())

    def orders(self, key: str) -> int:
        """Committed business rows of a key."""
        return int(self.execute(f"SELECT count(*) FROM orders WHERE k = '{key}'")[0][0])

    def records(self, key: str) -> list[str]:
        """The states of committed records of a key."""
        column = "`key`" if self.dialect == "mysql" else "key"
        return [row[0] for row in self.execute(f"SELECT state FROM semel WHERE {column} = '{key}'")]

    def work(self, tx: Tx, value: Any = "made") -> Callable[..., Any]:
        """The business function of this colour: one row, one value."""
        if self.colour == "sync":

            def make(key: str) -> Any:
                run_sync(tx.insert(key))
                return value

            return make

        async def make_async(key: str) -> Any:
            await tx.insert(key)
            return value

        return make_async

    def raising(self, tx: Tx, error: Exception) -> Callable[..., Any]:
        """Writes its row, then fails."""
        if self.colour == "sync":

            def make(key: str) -> Any:
                run_sync(tx.insert(key))
                raise error

            return make

        async def make_async(key: str) -> Any:
            await tx.insert(key)
            raise error

        return make_async

    async def do(self, thing: Any) -> Any:
        return await wait(thing)

    def spawn(self, work: Awaitable[Any]) -> Spawned:
        return Spawned(work, self.colour)

    async def close(self) -> None:
        for tx in self._txs:
            await tx.close()
        for face in self._faces:
            await wait(face.close())
