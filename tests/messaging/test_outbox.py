"""The outbox: messages commit, or vanish, with the caller's rows (R43, R45)."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from semel import (
    AsyncSemel,
    CodecError,
    ConfigurationError,
    InvalidKey,
    KeyMismatch,
    Semel,
    StoreUnavailable,
    current_run,
)
from semel.messaging import Message, Outbox
from semel.messaging.bodies import open_bodies
from tests.messaging.conftest import Home, awaited, bare


def test_message_commits_with_the_transaction(home: Home) -> None:
    outbox = home.outbox()
    with Session(home.engine) as session, session.begin():
        outbox.add(session, Message("orders", {"id": 1}, key="cust-7", headers={"a": "b"}))
        assert home.count() == 0, "written before the commit"
    assert home.count() == 1
    assert home.count("_outbox_ids") == 1
    outbox.close()


def test_rollback_leaves_nothing(home: Home) -> None:
    outbox = home.outbox()
    with Session(home.engine) as session:
        session.begin()
        outbox.add(session, Message("orders", {"id": 1}))
        session.rollback()
        session.begin()
        outbox.add(session, Message("orders", {"id": 2}, id="two"))
        session.commit()
    assert home.scalar("SELECT id FROM {t}_outbox") == "two"
    outbox.close()


def test_a_savepoint_that_is_rolled_back_takes_its_messages(home: Home) -> None:
    outbox = home.outbox()
    with Session(home.engine) as session, session.begin():
        outbox.add(session, Message("orders", 1, id="kept"))
        with session.begin_nested():
            outbox.add(session, Message("orders", 2, id="released"))
        outer = session.begin_nested()
        with session.begin_nested():
            outbox.add(session, Message("orders", 3, id="inside"))
        outbox.add(session, Message("orders", 4, id="beside"))
        outer.rollback()
        outbox.add(session, Message("orders", 5, id="after"))
    with home.engine.connect() as connection:
        ids = set(connection.execute(text(f"SELECT id FROM {home.table}_outbox")).scalars())
    assert ids == {"kept", "released", "after"}
    outbox.close()


def test_a_connection_collects_as_a_session_does(home: Home) -> None:
    outbox = home.outbox()
    with home.engine.begin() as connection:
        outbox.add(connection, Message("orders", 1, id="kept"))
        outer = connection.begin_nested()
        with connection.begin_nested():
            outbox.add(connection, Message("orders", 2, id="inside"))
        outer.rollback()
        outbox.add(connection, Message("orders", 3, id="after"))
    with home.engine.connect() as connection:
        connection.begin()
        outbox.add(connection, Message("orders", 4, id="gone"))
        connection.rollback()
        ids = set(connection.execute(text(f"SELECT id FROM {home.table}_outbox")).scalars())
    assert ids == {"kept", "after"}
    outbox.close()


def test_refused_without_a_transaction(home: Home) -> None:
    outbox = home.outbox()
    with Session(home.engine) as session, pytest.raises(ConfigurationError, match="begin one"):
        outbox.add(session, Message("orders", 1))
    with home.engine.connect() as connection, pytest.raises(ConfigurationError, match="begin one"):
        outbox.add(connection, Message("orders", 1))
    engine = create_engine(home.url, isolation_level="AUTOCOMMIT")
    with Session(engine) as session, session.begin(), pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        outbox.add(session, Message("orders", 1))
    with (
        home.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection,
        connection.begin(),
        pytest.raises(ConfigurationError, match="AUTOCOMMIT"),
    ):
        outbox.add(connection, Message("orders", 1))
    assert home.count() == 0
    engine.dispose()
    outbox.close()


def test_same_id_is_one_message_and_another_body_a_conflict(home: Home) -> None:
    outbox = home.outbox()
    for _ in range(2):
        with Session(home.engine) as session, session.begin():
            outbox.add(session, Message("orders", {"n": 1}, id="one"), Message("orders", {"n": 1}, id="one"))
    assert home.count() == 1
    for other in (
        Message("orders", {"n": 2}, id="one"),
        Message("refunds", {"n": 1}, id="one"),
        Message("orders", {"n": 1}, id="one", type="OrderPaid"),
        Message("orders", {"n": 1}, id="one", schema="v2"),
    ):
        with pytest.raises(KeyMismatch, match="one"), Session(home.engine) as session, session.begin():
            outbox.add(session, other)
    with Session(home.engine) as session, session.begin():
        outbox.add(session, Message("orders", {"n": 9}, id="one", tenant="other"))
    assert home.count() == 2
    with pytest.raises(KeyMismatch), Session(home.engine) as session, session.begin():
        outbox.add(session, Message("orders", 1, id="x"), Message("orders", 2, id="x"))
    outbox.close()


def test_a_twin_waits_for_the_first(postgres_home: Home) -> None:
    """The second writer of an id waits: after a commit it is known, after a rollback it counts."""
    outbox = postgres_home.outbox()
    for commits in (True, False):
        message = Message("orders", {"n": 1}, id=f"twin-{commits}")
        done = threading.Event()

        def second(message: Message = message, done: threading.Event = done) -> None:
            with Session(postgres_home.engine) as session, session.begin():
                outbox.add(session, message)
            done.set()

        with Session(postgres_home.engine) as session:
            session.begin()
            outbox._write(session.connection(), [outbox._prepare(message)])
            thread = threading.Thread(target=second)
            thread.start()
            assert not done.wait(0.2), "did not wait for the first"
            (session.commit if commits else session.rollback)()
        thread.join(5)
        assert done.is_set()
    assert postgres_home.count() == 2
    outbox.close()


def test_tables_are_made_on_first_use(fresh_home: Home) -> None:
    outbox = Outbox(fresh_home.url, table=fresh_home.table)
    with Session(fresh_home.engine) as session, session.begin():
        outbox.add(session, Message("orders", 1))
    assert fresh_home.count() == 1
    outbox.close()


def test_create_false_names_the_remedy(fresh_home: Home) -> None:
    outbox = Outbox(fresh_home.url, table=fresh_home.table, create=False)
    with pytest.raises(ConfigurationError, match=r"create\(\).*semel schema sql"):  # noqa: SIM117 - the commit raises
        with Session(fresh_home.engine) as session, session.begin():
            outbox.add(session, Message("orders", 1))
    outbox.close()


def test_sqlite_lock_held_by_the_caller_names_create(sqlite_home: Home) -> None:
    """R45: where the tables cannot be had beside the caller's transaction, the error says what to do before it."""
    with sqlite_home.engine.begin() as connection:
        connection.execute(text("CREATE TABLE mine (a int)"))
    engine = create_engine(sqlite_home.url + "?timeout=0.2")
    outbox = Outbox(engine, table=sqlite_home.table)
    with pytest.raises(ConfigurationError, match=r"create\(\)"):  # noqa: SIM117 - the commit raises
        with Session(sqlite_home.engine) as session, session.begin():
            session.execute(text("INSERT INTO mine VALUES (1)"))
            outbox.add(session, Message("orders", 1))
    engine.dispose()
    outbox.close()


def test_newer_tables_are_refused(fresh_home: Home) -> None:
    fresh_home.outbox().close()
    with fresh_home.engine.begin() as connection:
        connection.execute(
            text(f"UPDATE {fresh_home.table}_messaging SET value = '99' WHERE name = 'version'")
        )
    outbox = Outbox(fresh_home.url, table=fresh_home.table)
    with pytest.raises(ConfigurationError, match="version 99"):  # noqa: SIM117 - the commit raises
        with Session(fresh_home.engine) as session, session.begin():
            outbox.add(session, Message("orders", 1))
    outbox.close()


@awaited
async def test_async_sessions(home: Home) -> None:
    drivers = {"psycopg": "asyncpg", "pymysql": "asyncmy", "sqlite": "sqlite+aiosqlite"}
    url = home.url
    for sync, other in drivers.items():
        url = url.replace(sync, other, 1)
    engine = create_async_engine(url)
    outbox = home.outbox()
    async with AsyncSession(engine) as session, session.begin():
        outbox.add(session, Message("orders", {"n": 1}))
        async with session.begin_nested() as nested:
            outbox.add(session, Message("orders", {"n": 2}))
            await nested.rollback()
    async with engine.begin() as connection:
        outbox.add(connection, Message("orders", b"raw"))
    assert home.count() == 2
    own = Outbox(engine, table=home.table)
    async with AsyncSession(engine) as session, session.begin():
        own.add(session, Message("orders", {"n": 1}))
    assert home.count() == 3
    await engine.dispose()
    own.close()
    outbox.close()


def test_plain_connections(home: Home) -> None:
    outbox = home.outbox()
    raw = home.engine.raw_connection()
    driver = raw.driver_connection
    outbox.add(driver, Message("orders", 1, id="kept"))
    driver.commit()  # type: ignore[union-attr]  # whatever the driver calls a connection
    assert asyncio.run(outbox.insert(driver, Message("orders", 1, id="kept"), Message("orders", 2))) == 1
    driver.rollback()  # type: ignore[union-attr]  # whatever the driver calls a connection
    assert home.count() == 1
    raw.close()
    outbox.close()


@awaited
async def test_asyncpg_connection(postgres_home: Home) -> None:
    import asyncpg

    outbox = postgres_home.outbox()
    connection = await asyncpg.connect(postgres_home.url.replace("+psycopg", ""))
    async with connection.transaction():
        assert await outbox.insert(connection, Message("orders", {"a": 1}, id="x", due=3)) == 1
    async with connection.transaction():
        assert await outbox.insert(connection, Message("orders", {"a": 1}, id="x")) == 0
    with pytest.raises(ConfigurationError):
        await outbox.insert(connection, Message("orders", 1))
    with pytest.raises(ConfigurationError, match=r"await outbox\.insert"):
        outbox.add(connection, Message("orders", 1))
    await connection.close()
    assert postgres_home.count() == 1
    outbox.close()


def test_autocommit_driver_connection_is_refused(postgres_home: Home) -> None:
    outbox = postgres_home.outbox()
    with (
        psycopg.connect(postgres_home.url.replace("+psycopg", ""), autocommit=True) as connection,
        pytest.raises(ConfigurationError),
    ):
        outbox.add(connection, Message("orders", 1))
    outbox.close()


def test_sqlite3_connection(sqlite_home: Home) -> None:
    outbox = sqlite_home.outbox()
    connection = sqlite3.connect(sqlite_home.url.removeprefix("sqlite:///"))
    outbox.add(connection, Message("orders", 1))
    connection.commit()
    connection.close()
    assert sqlite_home.count() == 1
    outbox.close()


def test_within_record_rows_and_messages_commit_together(fresh_home: Home) -> None:
    outbox = fresh_home.outbox()
    with fresh_home.engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE {fresh_home.table}_rows (n int)"))
    once = Semel(fresh_home.url.replace("mysql+pymysql", "mysql"), table=fresh_home.table)
    once.create()

    def work(session: Session) -> str:
        session.execute(text(f"INSERT INTO {fresh_home.table}_rows VALUES (1)"))
        outbox.add(current_run(), Message("orders", {"n": 1}))
        return "ok"

    for _ in range(2):
        with Session(fresh_home.engine) as session, session.begin():
            once.within(session).execute("k1", work, session)
    assert (fresh_home.count(), fresh_home.count("_rows")) == (1, 1)

    def fails(session: Session) -> None:
        work(session)
        raise RuntimeError("no")

    with Session(fresh_home.engine) as session, session.begin(), pytest.raises(RuntimeError):
        once.within(session).execute("k2", fails, session)
    assert (fresh_home.count(), fresh_home.count("_rows")) == (1, 1), "a ghost message"
    with pytest.raises(ConfigurationError, match="not inside within"):
        once.execute("k3", lambda: outbox.add(current_run(), Message("orders", 1)))
    once.close()
    outbox.close()


@awaited
async def test_within_async(postgres_home: Home) -> None:
    outbox = postgres_home.outbox()
    url = postgres_home.url.replace("psycopg", "asyncpg")
    engine = create_async_engine(url)
    async with AsyncSemel(url, table=postgres_home.table) as once:
        await once.create()

        async def work() -> None:
            outbox.add(current_run(), Message("orders", {"n": 1}))

        for _ in range(2):
            async with AsyncSession(engine) as session, session.begin():
                await once.within(session).execute("k1", work)
    assert postgres_home.count() == 1
    await engine.dispose()
    outbox.close()


@dataclass
class Paid:
    order: int


def test_bodies_and_their_bytes() -> None:
    assert Message("t", {"a": 1}).data == b'{"a":1}'
    assert Message("t", Paid(3)).data == b'{"order":3}'
    assert Message("t", b"\x00\xff").data == b"\x00\xff"
    assert Message("t", None).data == b"null"
    with pytest.raises(CodecError, match="cannot be written as JSON"):
        _ = Message("t", object()).data
    assert len(Message("t", 1).id) == 36
    assert Message("t", 1).id[14] == "7"


@pytest.mark.parametrize(
    "arguments", [{"topic": ""}, {"topic": "x" * 256}, {"key": "a\nb"}, {"id": ""}, {"tenant": "\x00"}]
)
def test_malformed_parts_are_refused(arguments: dict[str, str]) -> None:
    with pytest.raises(InvalidKey):
        Message(**{"topic": "t", "body": 1, **arguments})  # type: ignore[arg-type]  # wrong on purpose


def test_naive_due_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="aware"):
        Message("t", 1, due=datetime(2030, 1, 1))  # noqa: DTZ001 - that is what is refused
    Message("t", 1, due=datetime(2030, 1, 1, tzinfo=UTC))


def test_due_is_by_the_servers_clock(home: Home) -> None:
    outbox, before = home.outbox(), time.time()
    with Session(home.engine) as session, session.begin():
        outbox.add(session, Message("t", 1, id="s", due=100), Message("t", 1, id="d", due=timedelta(hours=1)))
        outbox.add(session, Message("t", 1, id="a", due=datetime(2030, 1, 1, tzinfo=UTC)))
    with home.engine.connect() as connection:
        rows = {
            row.id: (row.due, row.due - row.created)
            for row in connection.execute(text(f"SELECT id, due, created FROM {home.table}_outbox"))
        }
    assert rows["s"][1] == pytest.approx(100, abs=0.01)
    assert rows["d"][1] == pytest.approx(3600, abs=0.01)
    assert rows["a"][0] == datetime(2030, 1, 1, tzinfo=UTC).timestamp()
    assert before - 0.01 <= rows["s"][0] - 100 <= time.time() + 0.01, "another clock than the server's"
    outbox.close()


def test_a_body_too_large_is_refused_where_it_is_added(sqlite_home: Home) -> None:
    outbox = sqlite_home.outbox(max_body=10)
    with Session(sqlite_home.engine) as session, session.begin():
        with pytest.raises(ConfigurationError, match="max_body=10"):
            outbox.add(session, Message("t", "x" * 20))
        outbox.add(session, Message("t", "x"))
    assert sqlite_home.count() == 1
    outbox.close()


def test_envelope_travels_as_headers() -> None:
    message = Message("t", 1, correlation="c", causation="b", aggregate="order-1", version=3)
    assert message.headers == {
        "correlation-id": "c", "causation-id": "b", "aggregate": "order-1", "schema-version": "3",
    }  # fmt: skip


def test_cloudevents_that_are_none_are_refused() -> None:
    event = {"id": "e1", "type": "paid", "data_base64": "/wA="}
    assert Message.from_cloudevent(event).body == b"\xff\x00"
    with pytest.raises(CodecError, match="not base64"):
        Message.from_cloudevent({**event, "data_base64": "~"})
    with pytest.raises(ConfigurationError, match="not both"):
        Message.from_cloudevent({**event, "data": 1})
    with pytest.raises(ConfigurationError, match="has id and type"):
        Message.from_cloudevent({"data": 1})


def test_an_envelope_that_says_two_things_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="correlation='a' and the header 'correlation-id'"):
        Message("t", 1, correlation="a", headers={"correlation-id": "b"})
    with pytest.raises(ConfigurationError, match="version is a number"):
        Message("t", 1, version="x\ny")  # type: ignore[arg-type]  # wrong on purpose
    message = Message("t", 1, correlation="a", version=2)
    assert dict(replace(message, tenant="x").headers) == {"correlation-id": "a", "schema-version": "2"}


def test_cloudevents_round_trip() -> None:
    message = Message("orders", {"n": 1}, key="k", type="OrderPaid", schema="https://s/1", correlation="c")
    event = message.cloudevent("https://shop")
    assert event["specversion"] == "1.0"
    assert (event["id"], event["type"], event["source"]) == (message.id, "OrderPaid", "https://shop")
    back = Message.from_cloudevent(event, topic="orders")
    assert (back.id, back.body, back.key, back.type, back.schema) == (
        message.id, {"n": 1}, "k", "OrderPaid", "https://s/1",
    )  # fmt: skip
    assert back.headers["correlation-id"] == "c"


def test_wrong_places_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="URL or an SQLAlchemy engine"):
        Outbox(5)
    with pytest.raises(ConfigurationError, match="no database URL"):
        Outbox("nonsense")
    with pytest.raises(ConfigurationError, match="lost with the process"):
        Outbox("sqlite://")
    with pytest.raises(ConfigurationError, match="oracle"):
        Outbox("oracle://x/y")
    with pytest.raises(ConfigurationError, match="not int"):
        Outbox("sqlite:///x.db").add(object(), 5)  # type: ignore[arg-type]  # wrong on purpose


def test_the_number_of_parts_is_remembered(fresh_home: Home) -> None:
    first = Outbox(fresh_home.url, table=fresh_home.table, parts=8)
    with Session(fresh_home.engine) as session, session.begin():
        first.add(session, Message("t", 1))
    again = Outbox(fresh_home.url, table=fresh_home.table)
    again.create()
    assert again.parts == 8
    other = Outbox(fresh_home.url, table=fresh_home.table, parts=16)
    with pytest.raises(ConfigurationError, match="divided into 8 parts"):
        other.create()
    for outbox in (first, again, other):
        outbox.close()


@awaited
async def test_an_async_registry_of_sessions_is_a_target(sqlite_home: Home) -> None:
    """As scoped_session is (R43)."""
    outbox = sqlite_home.outbox()
    engine = create_async_engine(sqlite_home.url.replace("sqlite:", "sqlite+aiosqlite:"))
    session = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
    async with session.begin():
        outbox.add(session, Message("o", 1, id="m1"))
    await session.remove()
    async with session.begin() as kept:
        outbox.add(session, Message("o", 1, id="m2"))
        await kept.rollback()
    await session.remove()
    await engine.dispose()
    assert [each.id for each in await outbox.waiting()] == ["m1"]
    outbox.close()


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "not yet begun"])
def test_several_messages_on_a_driver_s_connection_are_added_all_or_none(home: Home, begun: bool) -> None:
    """Whoever catches what one of them is refused for, and commits, has sent none of them (R43)."""
    outbox = home.outbox()
    connection = bare(home)
    outbox.add(connection, Message("o", 1, id="m1"))
    connection.commit()
    cursor = connection.cursor()
    if begun:
        cursor.execute("BEGIN" if home.engine.dialect.name == "sqlite" else "SELECT 1")
    with pytest.raises(KeyMismatch):
        outbox.add(connection, Message("o", 5, id="good"), Message("o", 2, id="m1"))
    outbox.add(connection, Message("o", 6, id="m2"), Message("o", 7, id="m3"))
    assert home.count() == 1, "it is committed by whoever began it"
    connection.commit()
    connection.close()
    assert sorted(each.id for each in asyncio.run(outbox.waiting())) == ["m1", "m2", "m3"]
    outbox.close()


def test_R43_one_message_on_a_driver_s_connection_is_added_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "semel.db"
    with Outbox(f"sqlite:///{file}") as outbox:
        outbox.create()
        connection = sqlite3.connect(file)
        stop = "CREATE TRIGGER stop BEFORE INSERT ON semel_outbox BEGIN SELECT RAISE(ABORT, 'a lock'); END"
        connection.execute(stop)
        connection.commit()
        message = Message("t", {"a": 1}, id="one")
        with pytest.raises(sqlite3.Error, match="a lock"):
            outbox.add(connection, message)
        connection.commit()  # as one does who goes on
        connection.execute("DROP TRIGGER stop")
        outbox.add(connection, message)
        connection.commit()
        assert connection.execute("SELECT count(*) FROM semel_outbox").fetchone() == (1,)
        connection.close()


def test_R43_a_body_that_its_store_did_not_take_leaves_no_message_behind(tmp_path: Path) -> None:
    (tmp_path / "bodies").mkdir()
    bodies = open_bodies(f"file://{tmp_path / 'bodies'}")

    def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("the store of bodies is away")

    with Outbox(f"sqlite:///{tmp_path / 'semel.db'}", claim_check=bodies, claim_over=1000) as outbox:
        outbox.create()
        connection = sqlite3.connect(tmp_path / "semel.db")
        message, put = Message("t", b"x" * 5000, id="big"), bodies.put
        bodies.put = away  # type: ignore[method-assign]  # as long as it is away
        with pytest.raises(StoreUnavailable):
            outbox.add(connection, message)
        connection.commit()
        bodies.put = put  # type: ignore[method-assign]  # it is back
        outbox.add(connection, message)
        connection.commit()
        assert connection.execute("SELECT count(*) FROM semel_outbox").fetchone() == (1,)
        assert [path for path in (tmp_path / "bodies").rglob("*") if path.is_file()]
        connection.close()


def test_R27_an_error_after_which_there_is_no_savepoint_is_told_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deadlock(port: Any, *_: object) -> int:
        await port.run("ROLLBACK")  # as MariaDB does
        raise sqlite3.OperationalError("(1213) Deadlock found")

    with Outbox(f"sqlite:///{tmp_path / 'semel.db'}") as outbox:
        outbox.create()
        connection = sqlite3.connect(tmp_path / "semel.db")
        monkeypatch.setattr("semel.messaging.outbox.write", deadlock)
        with pytest.raises(sqlite3.OperationalError, match="1213"):
            outbox.add(connection, Message("t", 1), Message("t", 2))
        connection.close()
