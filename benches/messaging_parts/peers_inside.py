"""Runs in the peers' environment: the same backlog, from PostgreSQL to a Redis stream, by each package in turns.

A turn fills the queue through the package itself (not timed), then runs its worker in this process until every message is in
the stream. Time is from the worker's start to the time stamp that Redis gave the last entry. Each package has a database of
its own on one server. The settings are those that its documentation recommends for throughput; of the sizes that it leaves
open, those that were fastest here.
"""

# mypy: disable-error-code="import-not-found,no-any-return"
# The peers are installed in an environment of their own, not where mypy looks.

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import gc
import json
import logging
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
import redis.asyncio

from benches.core_parts.measure import Figure, Term, say
from benches.core_parts.page import versions
from benches.core_parts.peers import Result
from benches.messaging_parts.drain import BATCH, BODY, fill
from semel.messaging import Outbox, Relay

PACKAGES = (
    "semel", "faststream-outbox", "faststream", "pgqueuer", "procrastinate",
    "redis", "asyncpg", "psycopg", "sqlalchemy",
)  # fmt: skip
_PACK = 1000  # messages in one transaction of the filling
_STALLED = 60.0  # seconds without a new entry: the peer has stopped


class Peer(NamedTuple):
    """`fill(count)` adds messages; `work` is a context in which the worker runs."""

    fill: Callable[[int], Awaitable[None]]
    work: Callable[[], contextlib.AbstractAsyncContextManager[None]]


Opener = Callable[[str, str, str], contextlib.AbstractAsyncContextManager[Peer]]


class Contender(NamedTuple):
    name: str
    opener: Opener
    settings: str
    goal: float = 0.0


@contextlib.asynccontextmanager
async def _running(work: Awaitable[Any]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _client(broker: str) -> Any:
    """For handlers that publish by themselves; they wait for a connection instead of failing for the want of one."""
    pool = redis.asyncio.BlockingConnectionPool.from_url(broker, max_connections=20, timeout=None)
    return redis.asyncio.Redis.from_pool(pool)


# ------------------------------------------------------------------------------------------------------- peers
@contextlib.asynccontextmanager
async def semel(database: str, broker: str, stream: str) -> AsyncIterator[Peer]:
    url = database.replace("postgresql:", "postgresql+psycopg:")
    outbox = Outbox(url, table="bench")
    outbox.create()

    @contextlib.asynccontextmanager
    async def work() -> AsyncIterator[None]:
        routes = {"orders": f"{broker}?stream={stream}"}
        async with Relay(outbox, routes, batch=BATCH) as relay, _running(relay.run()):
            yield

    yield Peer(lambda count: asyncio.to_thread(fill, url, outbox, count), work)
    outbox.close()


def faststream(flush: int) -> Opener:
    """`flush` is how many rows its worker deletes at once: it offers more than one to those who may see them again."""
    return lambda database, broker, stream: _faststream(database, broker, stream, flush)


@contextlib.asynccontextmanager
async def _faststream(database: str, broker: str, stream: str, flush: int) -> AsyncIterator[Peer]:
    from faststream.redis import RedisBroker
    from faststream_outbox import OutboxBroker, make_outbox_table, outbox_autovacuum_ddl
    from sqlalchemy import MetaData, text
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    engine = create_async_engine(database.replace("postgresql:", "postgresql+asyncpg:"), pool_size=20)
    metadata = MetaData()
    table = make_outbox_table(metadata, table_name="outbox")
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
        await connection.execute(text(outbox_autovacuum_ddl("outbox")))

    async def fill_it(count: int) -> None:
        outbox = OutboxBroker(engine, outbox_table=table)
        for start in range(0, count, _PACK):
            async with AsyncSession(engine) as session, session.begin():
                bodies = [BODY] * min(_PACK, count - start)
                await outbox.publish_batch(*bodies, queue="orders", session=session)

    @contextlib.asynccontextmanager
    async def work() -> AsyncIterator[None]:
        outbox = OutboxBroker(engine, outbox_table=table, logger=None)
        sink = RedisBroker(broker, logger=None)

        @sink.publisher(stream=stream)
        @outbox.subscriber(
            "orders", max_workers=8, fetch_batch_size=500, terminal_flush_batch_size=flush, min_fetch_interval=0.01,
            max_fetch_interval=1.0,
        )  # fmt: skip
        async def relay(body: dict[str, Any]) -> dict[str, Any]:
            return body

        await sink.connect()
        await outbox.start()
        try:
            yield
        finally:
            await outbox.stop()
            await sink.stop()

    yield Peer(fill_it, work)
    await engine.dispose()


@contextlib.asynccontextmanager
async def pgqueuer(database: str, broker: str, stream: str) -> AsyncIterator[Peer]:
    import asyncpg
    from pgqueuer import PgQueuer
    from pgqueuer.db import AsyncpgDriver
    from pgqueuer.queries import Queries

    payload = json.dumps(BODY).encode()
    connection = await asyncpg.connect(database)
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    await queries.optimize_autovacuum()

    async def fill_it(count: int) -> None:
        for start in range(0, count, _PACK):
            size = min(_PACK, count - start)
            await queries.enqueue(["orders"] * size, [payload] * size, [0] * size)

    @contextlib.asynccontextmanager
    async def work() -> AsyncIterator[None]:
        async with _client(broker) as client:
            direct = await asyncpg.connect(database)
            worker = PgQueuer(AsyncpgDriver(direct))

            @worker.entrypoint("orders")
            async def publish(job: Any) -> None:
                await client.xadd(stream, {"data": job.payload})

            running = asyncio.ensure_future(
                worker.qm.run(batch_size=100, dequeue_timeout=dt.timedelta(seconds=1))
            )
            try:
                yield
            finally:
                worker.shutdown.set()
                await running
                await direct.close()

    yield Peer(fill_it, work)
    await connection.close()


@contextlib.asynccontextmanager
async def procrastinate(database: str, broker: str, stream: str) -> AsyncIterator[Peer]:
    from procrastinate import App, PsycopgConnector

    app = App(connector=PsycopgConnector(conninfo=database, min_size=4, max_size=20))
    clients: list[Any] = []

    @app.task(name="publish")
    async def publish(data: str) -> None:
        await clients[-1].xadd(stream, {"data": data})

    async def fill_it(count: int) -> None:
        body = json.dumps(BODY)
        for start in range(0, count, _PACK):
            await publish.batch_defer_async(*({"data": body} for _ in range(min(_PACK, count - start))))

    @contextlib.asynccontextmanager
    async def work() -> AsyncIterator[None]:
        async with _client(broker) as client:
            clients.append(client)
            worker = app.run_worker_async(
                concurrency=16, delete_jobs="successful", install_signal_handlers=False
            )
            async with _running(worker):
                yield

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        yield Peer(fill_it, work)


_FASTSTREAM = "asyncpg, max_workers=8, fetch_batch_size=500, its autovacuum settings"
CONTENDERS = (
    Contender("semel", semel, f"Relay(batch={BATCH})"),
    Contender("faststream-outbox", faststream(1), _FASTSTREAM, 15),
    Contender(
        "faststream-outbox with batched deletes",
        faststream(100),
        f"{_FASTSTREAM}, terminal_flush_batch_size=100",
        15,
    ),
    Contender("pgqueuer", pgqueuer, "asyncpg, batch_size=100, its autovacuum settings"),
    Contender("procrastinate", procrastinate, 'concurrency=16, delete_jobs="successful"'),
)


# ---------------------------------------------------------------------------------------------------- the runs
async def turn(peer: Peer, client: Any, stream: str, count: int) -> tuple[float, float]:
    """Messages per second, and µs of this process's CPU for each."""
    await client.delete(stream)
    await peer.fill(count)
    gc.collect()
    cpu, start = time.process_time(), time.time()
    async with peer.work():
        await _until(client, stream, count)
        cpu = time.process_time() - cpu
    ((last, _),) = await client.xrevrange(stream, count=1)
    seconds = int(last.partition(b"-")[0]) / 1000 - start
    found = await client.xlen(stream)
    if found != count:
        raise RuntimeError(f"{found} entries of {count} messages")
    return count / seconds, cpu / count * 1e6


async def _until(client: Any, stream: str, count: int) -> None:
    seen, since = 0, time.monotonic()
    while (found := await client.xlen(stream)) < count:
        if found > seen:
            seen, since = found, time.monotonic()
        elif time.monotonic() - since > _STALLED:
            raise RuntimeError(f"stalled after {found} of {count} messages")
        await asyncio.sleep(0.02)


class Contest:
    """Turns of all contenders; one that breaks is left out, and the reason is told."""

    def __init__(self, databases: list[str], broker: str) -> None:
        self._places = dict(zip((one.name for one in CONTENDERS), databases, strict=True))
        self._broker = broker
        self._stack = contextlib.AsyncExitStack()
        self._peers: dict[str, Peer] = {}
        self.left_out: dict[str, str] = {}
        self.seen: dict[str, list[tuple[float, float]]] = {one.name: [] for one in CONTENDERS}

    async def run(self, count: int, rounds: int) -> None:
        async with self._stack:
            client = await self._stack.enter_async_context(redis.asyncio.Redis.from_url(self._broker))
            for number in range(rounds + 1):
                for one in (*CONTENDERS[number:], *CONTENDERS[:number]):
                    if one.name not in self.left_out:
                        await self._turn(one, client, count if number else count // 10, counts=number > 0)

    async def _turn(self, one: Contender, client: Any, count: int, *, counts: bool) -> None:
        stream = f"by-{one.name.replace(' ', '-')}"
        try:
            if one.name not in self._peers:
                opened = one.opener(self._places[one.name], self._broker, stream)
                self._peers[one.name] = await self._stack.enter_async_context(opened)
            rate, cpu = await turn(self._peers[one.name], client, stream, count)
        except Exception as error:
            if one.name == "semel":
                raise
            self.left_out[one.name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            return
        say(f"{one.name}: {rate:,.0f} /s, {cpu:.0f} µs")
        if counts:  # the first round warms up
            self.seen[one.name].append((rate, cpu))


def _figures(seen: dict[str, list[tuple[float, float]]], count: int) -> list[Figure]:
    rates = {name: statistics.median(rate for rate, _ in turns) for name, turns in seen.items() if turns}
    cpus = {name: statistics.median(cpu for _, cpu in turns) for name, turns in seen.items() if turns}
    return [
        Figure(
            f"{count:,} messages to a Redis stream, against {one.name}: messages/s",
            Term("semel", rates["semel"], "/s"),
            Term(one.name, rates[one.name], "/s"),
            "≥" if one.goal else "",
            one.goal,
            f"CPU {cpus['semel']:.0f} against {cpus[one.name]:.0f} µs a message; {one.settings}",
        )
        for one in CONTENDERS[1:]
        if one.name in rates
    ]


def main() -> None:
    broker, *databases, length = sys.argv[1:]
    logging.disable(logging.WARNING)
    count, rounds = (200, 1) if length == "quick" else (20_000, 3)
    contest = Contest(databases, broker)
    asyncio.run(contest.run(count, rounds))
    result = Result(_figures(contest.seen, count), contest.left_out, versions(*PACKAGES))
    sys.stdout.write("\n" + msgspec.json.encode(result).decode() + "\n")


if __name__ == "__main__":
    main()
