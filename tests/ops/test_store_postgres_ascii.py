"""A database of the encoding SQL_ASCII, as `initdb` makes it under the locale C: psycopg gives its texts as bytes."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
from psycopg_pool import ConnectionPool

from semel import AsyncSemel, ConfigurationError, PreviousFailure, Semel
from semel.testing import services


@pytest.fixture
def url(postgres_server: services.PostgresServer) -> str:
    made = postgres_server.database()
    name = f"{made.rpartition('/')[2]}_ascii"
    postgres_server.execute(
        f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    )
    return postgres_server.url_of(name)


def test_records_are_read_by_every_way_to_the_database(url: str) -> None:
    """A replay was OutcomeUnknown: the record "cannot be read"."""
    with Semel(url, timeout=20) as once:
        for replayed in (False, True):
            outcome = once.execute("ü", lambda: "é", labels={"a": "ö"})
            assert (outcome.value, outcome.replayed) == ("é", replayed)
        with pytest.raises(ZeroDivisionError):
            once.execute("failed", lambda: 1 / 0, on_error="replay")
        with psycopg.connect(url) as connection:
            assert connection.info.parameter_status("client_encoding") == "SQL_ASCII"
            within = once.within(connection)
            assert within.execute("ü", lambda: "no").value == "é"
            record = within.peek("ü")
            assert record is not None
            assert record.labels == {"a": "ö"}
            with pytest.raises(PreviousFailure, match="division"):
                within.execute("failed", lambda: "no")
            connection.commit()
            for replayed in (False, True):
                assert within.execute("new", lambda: "made", tenant="é").replayed is replayed
            connection.commit()

    async def loop() -> str:
        async with AsyncSemel(url.replace("postgresql", "postgresql+asyncpg"), timeout=20) as face:
            value: str = (await face.execute("new", lambda: "no", tenant="é")).value
            return value

    assert asyncio.run(loop()) == "made"


def test_a_pool_that_gives_texts_as_bytes_is_refused_and_one_that_does_not_is_used(url: str) -> None:
    with (
        ConnectionPool(url, min_size=1, max_size=1, open=True) as pool,
        Semel(pool, timeout=20) as once,
        pytest.raises(ConfigurationError, match='client_encoding="UTF8"'),
    ):
        once.execute("k", lambda: 1)
    utf8 = {"client_encoding": "UTF8"}
    with (
        ConnectionPool(url, min_size=1, max_size=2, open=True, kwargs=utf8) as pool,
        Semel(pool, timeout=20) as once,
    ):
        assert [once.execute("ü", lambda: "é").replayed for _ in range(2)] == [False, True]
