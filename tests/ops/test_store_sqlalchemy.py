"""semel's tables in SQLAlchemy on every SQL database, and engines handed in as stores."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pymysql
import pytest
from sqlalchemy import (
    Column,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    func,
    make_url,
    select,
    text,
)
from sqlalchemy.engine import Engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool, StaticPool
from sqlalchemy.schema import CreateTable

from semel.errors import ConfigurationError, StoreUnavailable
from semel.model import Answer, Kind, Policy, Replay, Won
from semel.runtime import run_sync
from semel.store import Settings, Store, adopt, open_store
from semel.stores.sqlalchemy import Moment, RecordColumns, SemelRecord, metadata, tables
from semel.testing import services
from tests.ops.postgres_lab import ask_for, database_of, end_of


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """An engine for an empty database; the store reaches it by `url_of`."""
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres_server").database(driver="psycopg")
    elif request.param == "mariadb":
        url = request.getfixturevalue("mariadb_server").database(driver="pymysql")
    else:
        url = f"sqlite:///{tmp_path / 'semel.db'}"
    made = create_engine(url)
    yield made
    made.dispose()


def store_of(engine: Engine, settings: Settings | None = None) -> Store:
    return open_store(
        engine.url.render_as_string(hide_password=False), settings or Settings(timeout=20), "sync"
    )


def fill(store: Store) -> None:
    """One record done, one unknown and decided by hand, one running."""

    async def work() -> None:
        done = ask_for("done", labels={"scene": "x"})
        await store.claim([done, ask_for("running", lease=3600.0)])
        await store.settle([end_of(done, result=b"r", ref="ord_1")])
        held = ask_for("held", lease=0.0, policy=Policy.HOLD)
        await store.claim([held])
        decided = end_of(held, Kind.FAILED, nonce=b"", new_nonce=b"n" * 16, actor="ann", reason="looked")
        assert await store.settle([decided]) == [Answer.OK]
        await store.aclose()

    run_sync(work())


# ------------------------------------------------------------------------------------------------------ tables


def test_the_tables_are_read_with_python_types(engine: Engine) -> None:
    fill(store_of(engine))
    found = tables(MetaData())
    with engine.connect() as connection:
        row = connection.execute(select(found.records).where(found.records.c.ref == "ord_1")).one()
        (event,) = connection.execute(select(found.audit)).all()
        assert connection.execute(select(found.schema.c.version)).scalar_one() == 1
        now = datetime.now(UTC)
        soon = select(func.count()).select_from(found.records).where(found.records.c.lease_until > now)
        assert connection.execute(soon).scalar_one() == 1
    assert (row.state, row.key, row.result, row.labels, row.resolved) == (
        "done",
        "done",
        b"r",
        {"scene": "x"},
        False,
    )
    assert row.scope == ask_for("done").scope.hash
    assert abs(row.settled - now) < timedelta(minutes=1)
    assert row.expires - row.settled == pytest.approx(timedelta(seconds=100), abs=timedelta(milliseconds=1))
    assert row.tombstone is None
    assert (event.actor, event.reason, event.kind, event.state) == ("ann", "looked", "failed", "unknown")
    assert abs(event.at - now) < timedelta(minutes=1)


def test_the_mapped_class_is_queried_and_joined_with_rows_of_ones_own(engine: Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Order(Base):
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)
        public: Mapped[str] = mapped_column(String(64))

    fill(store_of(engine))
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add(Order(id=1, public="ord_1"))
        session.flush()
        order, record = session.execute(
            select(Order, SemelRecord).join(SemelRecord, SemelRecord.ref == Order.public)
        ).one()
        assert (order.id, record.state, record.labels) == (1, "done", {"scene": "x"})
        assert "done" in repr(record)
        running = session.scalars(select(SemelRecord).where(SemelRecord.state == "running")).all()
        assert [found.key for found in running] == ["running"]
        assert running[0].settled is None
        labelled = session.scalars(select(SemelRecord.key).where(SemelRecord.labels == {"scene": "x"})).all()
        assert labelled == ["done"]


def test_create_all_makes_them_as_the_store_would(engine: Engine) -> None:
    own = MetaData()
    Table("mine", own, Column("id", Integer, primary_key=True))
    found = tables(own)
    assert tables(own) == found  # declared once
    own.create_all(engine)
    own.create_all(engine)  # again: nothing to do
    store = store_of(engine, Settings(create=False))
    fill(store)
    with engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(found.records)).scalar_one() == 3
    own.drop_all(engine)


def test_create_all_through_an_async_engine(postgres_server: services.PostgresServer) -> None:
    url = postgres_server.database(driver="asyncpg")

    async def work() -> None:
        made = create_async_engine(url)
        async with made.begin() as connection:
            await connection.run_sync(metadata.create_all)
        store = adopt(made, Settings(create=False), "async")
        (verdict,) = await store.claim([ask_for("k")])
        assert isinstance(verdict, Won)
        await store.aclose()
        await made.dispose()

    asyncio.run(work())


def test_a_class_of_ones_own_in_ones_own_metadata(engine: Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Run(RecordColumns, Base):
        __table__ = tables(Base.metadata, "runs").records

    Base.metadata.create_all(engine)
    fill(store_of(engine, Settings(table="runs", create=False)))
    with Session(engine) as session:
        assert session.scalars(select(Run.key).order_by(Run.key)).all() == ["done", "held", "running"]


def test_tables_in_a_schema_of_their_own(postgres_server: services.PostgresServer) -> None:
    made = create_engine(postgres_server.database(driver="psycopg"))
    own = MetaData()
    found = tables(own, "app.once")
    assert tables(own, "app.once").records is found.records
    with made.begin() as connection:
        connection.execute(text("create schema app"))
        own.create_all(connection)
    fill(store_of(made, Settings(table="app.once", create=False)))
    with made.connect() as connection:
        assert len(connection.execute(select(found.records)).all()) == 3
    made.dispose()


def test_a_schema_of_the_metadata_counts_for_the_tables_too(postgres_server: services.PostgresServer) -> None:
    """`create_all` made them in the connection's own schema, and what was declared was not there."""
    made = create_engine(postgres_server.database(driver="psycopg"))
    own = MetaData(schema="app")
    found = tables(own)
    assert tables(own) == found == tables(own, "app.semel")
    with made.begin() as connection:
        connection.execute(text("create schema app"))
        own.create_all(connection)
    fill(store_of(made, Settings(table="app.semel", create=False)))
    with made.connect() as connection:
        assert connection.execute(select(func.count()).select_from(found.records)).scalar_one() == 3
    made.dispose()


def test_bare_tables_that_a_migration_made_from_the_declarations_are_told(
    postgres_server: services.PostgresServer,
) -> None:
    """As Alembic's autogenerate writes them. "Version None: upgrade semel" was no help."""
    made = create_engine(postgres_server.database(driver="psycopg"))
    own = MetaData()
    tables(own)
    with made.begin() as connection:
        for table in own.sorted_tables:
            connection.execute(CreateTable(table))
    with pytest.raises(ConfigurationError, match=r"no schema version: .*semel schema sql"):
        fill(store_of(made))
    made.dispose()


def test_a_naive_time_is_refused() -> None:
    dialect = create_engine("sqlite://").dialect
    with pytest.raises(ValueError, match="aware"):
        Moment().process_bind_param(datetime(2026, 1, 1), dialect)  # noqa: DTZ001 - that is what is refused
    assert Moment().process_bind_param(None, dialect) is None


def test_create_all_on_a_database_that_semel_does_not_know() -> None:
    from semel.stores.sqlalchemy import _schema

    with pytest.raises(ConfigurationError, match="oracle"):
        _schema("oracle", "semel")


# ----------------------------------------------------------------------------------------------------- engines


async def use(store: Store) -> None:
    ask = ask_for("k")
    (verdict,) = await store.claim([ask])
    assert isinstance(verdict, Won)
    rung: list[int] = []
    unwatch = await store.watch(ask.scope, lambda: rung.append(1))
    assert await store.settle([end_of(ask, result=b"r")]) == [Answer.OK]
    assert rung
    await unwatch()
    (verdict,) = await store.claim([ask_for("k")])
    assert isinstance(verdict, Replay)


def test_an_engine_is_used_and_never_disposed_of(engine: Engine) -> None:
    store = adopt(engine, Settings(timeout=20), "sync")
    run_sync(use(store))
    run_sync(store.aclose())
    with engine.connect() as connection:
        assert connection.execute(text("select 1")).scalar_one() == 1
        found = connection.execute(select(tables(MetaData()).records.c.state)).scalars().all()
        assert found == ["done"]


ASYNC = [("asyncpg", {}), ("psycopg", {}), ("asyncpg", {"poolclass": NullPool})]


@pytest.mark.parametrize("driver, options", ASYNC)
def test_an_async_engine_is_used_and_never_disposed_of(
    postgres_server: services.PostgresServer, driver: str, options: dict[str, Any]
) -> None:
    url = postgres_server.database(driver=driver)

    async def work() -> None:
        made = create_async_engine(url, **options)
        store = adopt(made, Settings(timeout=20), "async")
        await use(store)
        assert store.capabilities.notifies
        postgres_server.terminate_connections(database=database_of(url))
        (verdict,) = await store.claim([ask_for("k")])
        assert isinstance(verdict, Replay)
        await store.aclose()
        async with made.connect() as connection:
            assert (await connection.execute(text("select 1"))).scalar_one() == 1
        await made.dispose()

    asyncio.run(work())


def test_the_engines_own_way_to_connect_is_kept(postgres_server: services.PostgresServer) -> None:
    url = postgres_server.database(driver="psycopg")
    made = create_engine(url, connect_args={"application_name": "the engine's"}, pool_size=2)
    store = adopt(made, Settings(timeout=20), "sync")
    run_sync(use(store))
    postgres_server.terminate_connections(database=database_of(url))
    (verdict,) = run_sync(store.claim([ask_for("k")]))
    assert isinstance(verdict, Replay)
    names = postgres_server.execute(
        f"select distinct application_name from pg_stat_activity where datname = '{database_of(url)}'"
    )
    assert names == [("the engine's",)]
    run_sync(store.aclose())
    with made.begin() as connection:  # a transaction of the engine's user still is one
        connection.execute(text("create table t (x int)"))
        connection.rollback()
    made.dispose()


class _MariaEngine:
    """An engine of either colour on MariaDB, and what a store on it does."""

    def __init__(self, colour: Literal["sync", "async"], url: str, **options: Any) -> None:
        self.colour: Literal["sync", "async"] = colour
        scheme, _, rest = url.partition("://")
        driver = "pymysql" if colour == "sync" else "asyncmy"
        made = f"{scheme.partition('+')[0]}+{driver}://{rest}"
        maker: Any = create_engine if colour == "sync" else create_async_engine
        self.engine: Any = maker(made, **options)
        self.events: Any = self.engine if colour == "sync" else self.engine.sync_engine

    def run(self, *works: Any) -> None:
        """Each of them is given the store."""

        async def main() -> None:
            store = adopt(self.engine, Settings(timeout=20), self.colour)
            try:
                for work in works:
                    await work(store)
            finally:
                await store.aclose()

        run_sync(main()) if self.colour == "sync" else asyncio.run(main())


BOTH = pytest.mark.parametrize("colour", ["sync", "async"])


@BOTH
def test_R30_what_an_engine_on_mariadb_was_made_with_holds(
    mariadb_server: services.MariaServer, colour: Literal["sync", "async"], tmp_path: Path
) -> None:
    """Once its URL was all that was looked at: an engine that insists on TLS was answered in plain text."""
    url = mariadb_server.database()
    wanted: Any = {"ca": None, "check_hostname": True} if colour == "sync" else ssl.create_default_context()
    strict = _MariaEngine(colour, url, connect_args={"ssl": wanted})
    with pytest.raises(ConfigurationError, match="TLS"):
        strict.run(use)
    mariadb_server.execute("create user if not exists engines@'%' identified by 'from a token'")
    mariadb_server.execute("grant all on *.* to engines@'%'")
    tokens = _MariaEngine(colour, url.replace("root@", "engines@"))

    @event.listens_for(tokens.events, "do_connect")
    def _(*parts: Any) -> None:
        parts[-1]["password"] = "from a token"

    tokens.run(use)


@BOTH
def test_connections_that_an_engine_makes_are_made_again_when_they_are_lost(
    mariadb_server: services.MariaServer, colour: Literal["sync", "async"]
) -> None:
    made = _MariaEngine(colour, mariadb_server.database(), poolclass=NullPool)

    async def lose(store: Store) -> None:
        mariadb_server.terminate_connections()
        (verdict,) = await store.claim([ask_for("k")])
        assert isinstance(verdict, Replay)

    made.run(use, lose)


def test_an_engine_whose_server_stands_still_is_unavailable_in_time() -> None:
    with services.mariadb() as server:
        made = create_engine(server.database(driver="pymysql"))
        made.connect().close()

        @event.listens_for(made, "checkout")
        def _(*_: object) -> None:
            server.pause()

        store = adopt(made, Settings(timeout=0.5), "sync")
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable):
            run_sync(store.claim([ask_for("k")]))
        assert time.monotonic() - begun < 10
        server.resume()
        run_sync(store.aclose())
        made.dispose()


def test_an_engine_with_a_way_to_connect_of_its_own_is_used(mariadb_server: services.MariaServer) -> None:
    at = make_url(mariadb_server.database())
    made = create_engine(
        "mysql+pymysql://",
        creator=lambda: pymysql.connect(
            host=at.host, port=at.port or 0, user=at.username, database=at.database
        ),
    )
    store = adopt(made, Settings(timeout=20), "sync")
    run_sync(use(store))
    run_sync(store.aclose())


@BOTH
def test_an_engine_whose_connections_cannot_be_used_is_told(
    mariadb_server: services.MariaServer, colour: Literal["sync", "async"]
) -> None:
    url = mariadb_server.database()
    with pytest.raises(ConfigurationError, match=r"speak latin1.*charset=utf8mb4"):
        _MariaEngine(colour, f"{url}?charset=latin1").run(use)
    cut = _MariaEngine(colour, url)

    @event.listens_for(cut.events, "checkout")
    def _(connection: Any, *_: Any) -> None:
        driver = getattr(connection, "driver_connection", connection)
        (driver._force_close if colour == "sync" else driver.close)()

    with pytest.raises(StoreUnavailable, match="cannot reach MariaDB"):
        cut.run(use)
    with pytest.raises(ConfigurationError, match="mariadbconnector"):
        made = create_engine(mariadb_server.database(driver="pymysql"))
        made.dialect = _Foreign("mysql", "mariadbconnector")  # type: ignore[assignment]  # a dialect that is not installed
        adopt(made, Settings(timeout=20), "sync")


def test_an_engine_without_a_connection_to_spare_is_polled(postgres_server: services.PostgresServer) -> None:
    made = create_engine(postgres_server.database(driver="psycopg"), poolclass=StaticPool)
    store = adopt(made, Settings(timeout=20), "sync")
    run_sync(use(store))
    assert not store.capabilities.notifies
    run_sync(store.aclose())
    made.dispose()


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_an_engine_whose_pool_is_used_up_is_unavailable_in_time(
    postgres_server: services.PostgresServer, colour: Literal["sync", "async"]
) -> None:
    url = postgres_server.database(driver="psycopg")

    def check(store: Store, run: Any) -> None:
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            run(store.claim([ask_for("k")]))
        assert time.monotonic() - began < 20

    if colour == "sync":
        made = create_engine(url, pool_size=1, max_overflow=0)
        with made.connect():
            check(adopt(made, Settings(timeout=0.3), "sync"), run_sync)
        made.dispose()
        return
    with asyncio.Runner() as runner:
        loop_engine = create_async_engine(url, pool_size=1, max_overflow=0)
        held = runner.run(_of(loop_engine.connect()))
        check(adopt(loop_engine, Settings(timeout=0.3), "async"), runner.run)
        runner.run(_of(held.close()))
        runner.run(_of(loop_engine.dispose()))


def test_a_connection_that_comes_too_late_is_not_left_in_the_pool_of_an_engine_that_was_disposed_of(
    postgres_server: services.PostgresServer,
) -> None:
    made = create_engine(postgres_server.database(driver="psycopg"), pool_size=1, max_overflow=0)
    held = made.connect()
    late: Any = held.connection.driver_connection
    with pytest.raises(StoreUnavailable):
        run_sync(adopt(made, Settings(timeout=0.2), "sync").claim([ask_for("k")]))
    made.dispose()
    held.close()  # the only one who waits for it has given up
    until = time.monotonic() + 10
    while not late.closed and time.monotonic() < until:
        time.sleep(0.002)
    assert late.closed


async def _of(work: Any) -> Any:
    return await work


def test_what_cannot_be_a_store_is_refused(postgres_server: services.PostgresServer) -> None:
    made = create_engine(postgres_server.url_of("postgres", driver="psycopg"))
    with pytest.raises(ConfigurationError, match="works with Semel only"):
        adopt(made, Settings(timeout=20), "async")
    with pytest.raises(ConfigurationError, match="works with AsyncSemel only"):
        adopt(
            create_async_engine(postgres_server.url_of("postgres", driver="asyncpg")),
            Settings(timeout=20),
            "sync",
        )
    with made.connect() as connection, pytest.raises(ConfigurationError, match="pass an engine"):
        adopt(connection, Settings(timeout=20), "sync")
    with Session(made) as session, pytest.raises(ConfigurationError, match="pass an engine"):
        adopt(session, Settings(timeout=20), "sync")
    made.dispose()


class _Foreign:
    """An engine for what is not installed here, as far as `adopt` looks at it."""

    def __init__(self, name: str, driver: str) -> None:
        self.name, self.driver = name, driver


@pytest.mark.parametrize(
    "name, driver, words", [("oracle", "oracledb", "oracle"), ("postgresql", "psycopg2", "psycopg2")]
)
def test_an_engine_for_another_database_or_driver_is_refused(name: str, driver: str, words: str) -> None:
    made = create_engine("postgresql+psycopg://127.0.0.1:1/none")
    made.dialect = _Foreign(name, driver)  # type: ignore[assignment]  # a dialect that there is not
    with pytest.raises(ConfigurationError, match=words):
        adopt(made, Settings(timeout=20), "sync")


def test_an_engine_on_memory_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="memory"):
        adopt(create_engine("sqlite://"), Settings(timeout=20), "sync")


def test_an_engine_whose_sqlite_url_says_more_than_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="by its path"):
        adopt(create_engine(f"sqlite:///file:{tmp_path}/a.db?uri=true"), Settings(timeout=20), "sync")


@BOTH
def test_a_mariadb_url_may_name_the_one_charset_that_carries_every_key(
    colour: Literal["sync", "async"],
) -> None:
    url = "mysql://root@127.0.0.1:1/none?charset="
    assert open_store(f"{url}UTF8MB4", Settings(), colour).colour == colour
    with pytest.raises(ConfigurationError, match="charset=latin1"):
        open_store(f"{url}latin1", Settings(), colour)
