"""Callers' transactions for mode tx: the effect is a row, or a list entry, in the same store as the record."""

from __future__ import annotations

import abc
import inspect
import json
import sqlite3
import time
from typing import Any
from urllib.parse import urlsplit

from semel.testing.chaos.ledger import Effect

__all__ = ["TABLE", "SqlTransaction", "Transaction", "open_transaction", "wait"]

TABLE = "chaos_effects"


async def wait(thing: Any) -> Any:
    """One body for both colours: await what can be awaited."""
    return await thing if inspect.isawaitable(thing) else thing


class Transaction(abc.ABC):
    """`target` goes to within(); the effect is `insert`, and `rows` reads what was committed."""

    target: Any

    @abc.abstractmethod
    async def insert(self, key: str, by: str) -> None:
        """Make the effect."""

    @abc.abstractmethod
    async def rows(self, key: str) -> list[Effect]:
        """The effects that were made."""

    async def begin(self) -> None:  # noqa: B027 - most begin by themselves
        """Where a transaction does not begin by itself."""

    async def commit(self) -> None:
        await wait(self.target.commit())

    async def rollback(self) -> None:
        await wait(self.target.rollback())

    async def close(self) -> None:
        await wait(self.target.close())


class SqlTransaction(Transaction):
    """The effect is a row."""

    @abc.abstractmethod
    async def run(self, sql: str) -> list[Any]:
        """Execute it; the rows, if it has any."""

    async def insert(self, key: str, by: str) -> None:
        await self.run(
            f"INSERT INTO {TABLE} (k, made_by, made_at) VALUES ('{key}', '{by}', {time.monotonic()!r})"
        )

    async def rows(self, key: str) -> list[Effect]:
        found = await self.run(f"SELECT made_by, made_at FROM {TABLE} WHERE k = '{key}'")
        await self.rollback()
        return [Effect("effect", str(by), float(at)) for by, at in found]


class _Cursors(SqlTransaction):
    """sqlite3, psycopg, PyMySQL."""

    def __init__(self, target: Any) -> None:
        self.target = target

    async def run(self, sql: str) -> list[Any]:
        cursor = self.target.cursor()
        cursor.execute(sql)
        rows = list(cursor.fetchall()) if cursor.description else []
        cursor.close()
        return rows


class _Asyncmy(_Cursors):
    async def run(self, sql: str) -> list[Any]:
        async with self.target.cursor() as cursor:
            await cursor.execute(sql)
            return list(await cursor.fetchall()) if cursor.description else []

    async def close(self) -> None:
        self.target.close()


class _Asyncpg(SqlTransaction):
    def __init__(self, target: Any) -> None:
        self.target = target

    async def begin(self) -> None:
        await self.target.execute("BEGIN")

    async def run(self, sql: str) -> list[Any]:
        return [tuple(row) for row in await self.target.fetch(sql)]

    async def commit(self) -> None:
        await self.target.execute("COMMIT")

    async def rollback(self) -> None:
        if self.target.is_in_transaction():
            await self.target.execute("ROLLBACK")

    async def close(self) -> None:
        self.target.terminate()


class _Alchemy(SqlTransaction):
    """The async colour of SQLite: there is no bare driver in the standard library."""

    def __init__(self, target: Any, engine: Any) -> None:
        self.target = target
        self._engine = engine

    async def run(self, sql: str) -> list[Any]:
        from sqlalchemy import text

        result = await self.target.execute(text(sql))
        return [tuple(row) for row in result.fetchall()] if result.returns_rows else []

    async def close(self) -> None:
        await self.target.close()
        await self._engine.dispose()


class _Pipeline(Transaction):
    """Redis: the function queues, semel executes; an RPUSH would show a double."""

    def __init__(self, client: Any, tag: str) -> None:
        self._client = client
        self._tag = tag
        self.target = client.pipeline(transaction=True)

    def _name(self, key: str) -> str:
        return f"{TABLE}:{self._tag}:{key}"

    async def insert(self, key: str, by: str) -> None:
        self.target.rpush(
            self._name(key), json.dumps([by, time.monotonic()])
        )  # it queues: there is nothing to await

    async def rows(self, key: str) -> list[Effect]:
        lines = await wait(self._client.lrange(self._name(key), 0, -1))
        return [Effect("effect", *json.loads(line)) for line in lines]

    async def commit(self) -> None:
        """EXEC was sent by semel itself."""

    async def rollback(self) -> None:
        """Nothing is open."""

    async def close(self) -> None:
        await wait(self._client.aclose() if hasattr(self._client, "aclose") else self._client.close())


async def open_transaction(url: str, colour: str, tag: str, **options: Any) -> Transaction:
    """A connection of the caller's own to the database that `url` names, with the driver of this colour. `options` are redis-py's, and
    how many `retries` it makes by itself."""
    scheme = url.partition(":")[0].partition("+")[0]
    if scheme == "sqlite":
        return await _sqlite(url.removeprefix("sqlite:///"), colour)
    if url.startswith("redis"):
        client = _redis(url, colour, **options)
        if url.startswith("redis+cluster") and colour == "async":
            # redis-py queues on a cluster's pipeline in a thread with a loop of its own: there it must not connect.
            await client.initialize()
        return _Pipeline(client, tag)
    place = url.partition("://")[2]
    if scheme == "postgresql":
        return await _postgres(f"postgresql://{place}", colour)
    return await _mysql(url, colour)


async def _sqlite(file: str, colour: str) -> Transaction:
    if colour == "sync":
        return _Cursors(sqlite3.connect(file, timeout=2))
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    engine = create_async_engine(f"sqlite+aiosqlite:///{file}", connect_args={"timeout": 2})
    return _Alchemy(AsyncSession(engine), engine)


async def _postgres(url: str, colour: str) -> Transaction:
    if colour == "sync":
        import psycopg

        return _Cursors(psycopg.connect(url))
    import asyncpg

    opened = _Asyncpg(await asyncpg.connect(url))
    await opened.begin()
    return opened


async def _mysql(url: str, colour: str) -> Transaction:
    parts = urlsplit(url)
    place: dict[str, Any] = {
        "host": parts.hostname,
        "port": parts.port,
        "user": parts.username,
        "database": parts.path[1:],
    }
    if colour == "sync":
        import pymysql

        return _Cursors(pymysql.connect(**place))
    import asyncmy

    return _Asyncmy(await asyncmy.connect(**place))


def _redis(url: str, colour: str, *, retries: int = 0, **options: Any) -> Any:
    """The caller's own client, retries off: redis-py's would repeat an EXEC whose reply was lost."""
    import redis
    import redis.asyncio
    from redis.asyncio.retry import Retry as AsyncRetry
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    retry: Any = (Retry if colour == "sync" else AsyncRetry)(NoBackoff(), retries)
    if url.startswith("redis+cluster"):
        from redis.asyncio.cluster import ClusterNode as AsyncNode
        from redis.cluster import ClusterNode

        kind: Any = redis.RedisCluster if colour == "sync" else redis.asyncio.RedisCluster
        node: Any = ClusterNode if colour == "sync" else AsyncNode
        places = [
            place.partition(":") for place in url.partition("://")[2].split(",")
        ]  # one of them may be down
        return kind(startup_nodes=[node(host, int(port)) for host, _, port in places])
    kind = redis.Redis if colour == "sync" else redis.asyncio.Redis
    # With a driver_info it would read its own version from a file each time.
    return kind.from_url(url, retry=retry, driver_info=None, **options)
