"""A database where a backslash in a text is an escape (standard_conforming_strings = off)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import asyncpg
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import create_engine

from semel import AsyncSemel, Semel
from semel.model import Answer, Kind, Policy
from semel.testing import services
from tests.ops.postgres_lab import IDS, KINDS, Lab, ask_for, beat_of, end_of

TOLD = "back\\slash ' and \\\\x41"


@pytest.fixture
def url(postgres_server: services.PostgresServer) -> str:
    made = postgres_server.database()
    name = made.rpartition("/")[2]
    postgres_server.execute(f"ALTER DATABASE {name} SET standard_conforming_strings = off")
    return made


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_every_verb_that_takes_arrays_finds_its_rows(url: str, kind: Any) -> None:
    """psycopg doubled the backslash of bytes in an array: renewals found nothing, and live runs were taken over."""
    driver, colour = kind
    lab = Lab(url.replace("postgresql", f"postgresql+{driver}"), colour)
    try:
        store = lab.open()
        asks = [ask_for(f"{TOLD}{number}", labels={TOLD: TOLD}) for number in range(3)]
        lab.claim(store, *asks)
        assert lab.run(store.renew([beat_of(ask) for ask in asks])) == [Answer.OK] * 3
        assert lab.settle(store, *(end_of(ask, result=b"\\x\\\\") for ask in asks)) == [Answer.OK] * 3
        record, _ = lab.run(store.peek(asks[0].scope))
        assert record is not None
        assert (record.result, record.labels) == (b"\\x\\\\", {TOLD: TOLD})
        held = lab.begin(store, "held", policy=Policy.HOLD)
        assert lab.settle(store, end_of(held, Kind.UNKNOWN)) == [Answer.OK]
        release = end_of(held, Kind.RELEASED, new_nonce=b"n" * 16, actor=TOLD, reason=TOLD)
        assert lab.settle(store, release) == [Answer.OK]
        store._skew = 1000.0
        assert lab.run(store.purge(100)) == 4
    finally:
        lab.close()


def _sync(make: Callable[[str, ExitStack], Any]) -> Callable[[str], None]:
    def check(url: str) -> None:
        with ExitStack() as stack, Semel(make(url, stack), timeout=20) as once:
            assert once.execute("key", lambda: TOLD, labels={"told": TOLD}).value == TOLD
            with pytest.raises(ZeroDivisionError):
                once.execute("held", lambda: 1 / 0, on_unknown="hold", on_error="hold")
            once.resolve("held", value=TOLD, actor="a", reason=TOLD)
            assert [once.execute(key, str).value for key in ("key", "held")] == [TOLD, TOLD]
            assert once.purge() == 0

    return check


def _async(make: Callable[[str, AsyncExitStack], Awaitable[Any]]) -> Callable[[str], None]:
    async def body(url: str) -> None:
        async with AsyncExitStack() as stack, AsyncSemel(await make(url, stack), timeout=20) as once:
            assert (await once.execute("key", lambda: TOLD, labels={"told": TOLD})).value == TOLD
            with pytest.raises(ZeroDivisionError):
                await once.execute("held", lambda: 1 / 0, on_unknown="hold", on_error="hold")
            await once.resolve("held", value=TOLD, actor="a", reason=TOLD)
            assert [(await once.execute(key, str)).value for key in ("key", "held")] == [TOLD, TOLD]
            assert await once.purge() == 0

    return lambda url: asyncio.run(body(url))


def _engine(url: str, stack: ExitStack) -> Any:
    engine = create_engine(url.replace("postgresql", "postgresql+psycopg"))
    stack.callback(engine.dispose)
    return engine


async def _asyncpg_pool(url: str, stack: AsyncExitStack) -> Any:
    return await stack.enter_async_context(asyncpg.create_pool(url, min_size=1, max_size=2))


async def _psycopg_pool(url: str, stack: AsyncExitStack) -> Any:
    return await stack.enter_async_context(AsyncConnectionPool(url, min_size=1, max_size=2, open=False))


@pytest.mark.parametrize(
    "check",
    [
        _sync(lambda url, stack: stack.enter_context(ConnectionPool(url, min_size=1, max_size=2, open=True))),
        _sync(_engine),
        _async(_asyncpg_pool),
        _async(_psycopg_pool),
    ],
    ids=["psycopg pool", "engine", "asyncpg pool", "psycopg async pool"],
)
def test_a_pool_or_an_engine_that_is_handed_in_serves_as_well(url: str, check: Callable[[str], None]) -> None:
    """A person's word was answered as if the record were locked, and a purge by "invalid regular expression"."""
    check(url)
