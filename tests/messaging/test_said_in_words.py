"""What is wrong with a URL, a table's name or a session is said where it is given, with the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from redis import asyncio as aioredis
from sqlalchemy import MetaData, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from typer.testing import CliRunner

from semel import ConfigurationError, KeyMismatch
from semel.cli.commands import app
from semel.messaging import Inbox, Message, Outbox
from semel.messaging.events import Parked, SinkPaused, log_event
from semel.messaging.sameness import hash_as_written, hash_of
from semel.messaging.sinks import open_sink
from semel.messaging.sinks.options import REDIS_OPTIONS
from semel.messaging.sources import open_source
from semel.messaging.tables import messaging_tables
from tests.messaging.conftest import Home, awaited


# ----------------------------------------------------------------------------------------- options of URLs
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://h/0?strem=x", "redis:// sinks have no option 'strem'; they have .*stream"),
        ("rediss+cluster://h/0?retry=3", "no option 'retry'"),
        ("redis://h/0?stream=x&maxlen=many", "maxlen=many .* a number above 0"),
        ("redis://h/0?stream=x&timeout=soon", "timeout=soon .* a number above 0"),
        ("outbox+sqlite:///x.db?tabel=x", "no option 'tabel', nor has its driver; did you mean 'table'"),
        ("outbox+postgresql://h/d?tables=x", "no option 'tables'"),
        ("outbox+mysql://h/d?chrset=utf8", "did you mean 'charset'"),
        ("outbox+redis://h/0?tabel=x", "unknown option 'tabel'"),
        ("https://h/x?secret_evn=NAME", "'secret_evn' in a sink's URL is nearly 'secret_env'"),
        ("https://h/x?a=1&Secret-Env=NAME", "is nearly 'secret_env'"),
    ],
)
def test_an_option_that_nobody_knows_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        open_sink(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:p@h/0?stream=x&maxlen=100&timeout=2&socket_keepalive=yes",
        "rediss+cluster://h/0?ssl_cert_reqs=none",
        "outbox+sqlite:///x.db?table=x&timeout=5",
        "outbox+postgresql+psycopg://h/d?sslmode=require&table=x",
        "outbox+mariadb+pymysql://h/d?charset=utf8mb4&ssl_ca=ca.pem",
        "https://h/x?token=1&secret=2&secret_key=3",
    ],
)
def test_options_of_a_driver_or_of_an_endpoint_are_left_alone(url: str) -> None:
    open_sink(url)


def test_nor_does_a_source_in_redis_take_one() -> None:
    with pytest.raises(ConfigurationError, match="no option 'idel'"):
        open_source("redis://h/0?stream=x&idel=30", group="g")
    with pytest.raises(ConfigurationError, match="idle=soon"):
        open_source("redis://h/0?stream=x&idle=soon", group="g")
    open_source("redis+cluster://h/0?stream=x&idle=3&timeout=2&socket_keepalive=yes", group="g")


def test_every_option_of_redis_that_is_let_through_is_one_of_redis_py() -> None:
    values = {"ssl_cert_reqs": "none", "client_name": "x", "username": "x", "password": "x"}
    for name in REDIS_OPTIONS:
        scheme = "rediss" if name.startswith("ssl_") else "redis"
        client: Any = aioredis.Redis.from_url(f"{scheme}://h/0?{name}={values.get(name, '2')}")
        client.connection_pool.make_connection()


# ------------------------------------------------------------------------------------------- table's names
@pytest.mark.parametrize(
    "table", ["a b", 'x"; drop table semel_outbox; --', "", "1a", "a.b.c", "é", "a" * 41]
)
def test_a_table_that_cannot_be_one_is_refused(tmp_path: Path, table: str) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    with pytest.raises(ConfigurationError, match="cannot be a table name"):
        Outbox(url, table=table)
    with pytest.raises(ConfigurationError, match="cannot be a table name"):
        Inbox(url, consumer="c", table=table)


def test_the_longest_name_leaves_room_for_ours() -> None:
    tables = messaging_tables(MetaData(), "shop." + "a" * 40)
    names = [name for table in tables for name in (table.name, *(str(i.name) for i in table.indexes))]
    assert max(map(len, names)) <= 63
    assert tables.outbox.schema == "shop"


# ---------------------------------------------------------------------------------- a session of elsewhere
def test_a_session_of_another_database_is_refused_in_words(home: Home, tmp_path: Path) -> None:
    inbox = Inbox(home.url, consumer="c", table=home.table)
    inbox.create()
    message = Message("t", {"n": 1}, id="m1")
    called: list[object] = []
    elsewhere: Any = home.url if not home.url.startswith("sqlite") else f"sqlite:///{tmp_path}/other.db"
    engine = create_engine(elsewhere)
    if not home.url.startswith("sqlite"):  # there: the same server, and no such table in sight
        inbox._processing._table = "not_there"
    words = "no table .*_inbox .*, and the inbox knows .*another database or schema"
    with Session(engine) as session, session.begin():
        with pytest.raises(ConfigurationError, match=words):
            inbox.process(session, message, called.append)
        with pytest.raises(ConfigurationError, match=words):
            inbox.process_batch(session, [message], called.append)
        assert session.execute(text("SELECT 1")).scalar() == 1, "the transaction stays usable"
    with pytest.raises(ConfigurationError, match=words), Session(engine) as session, session.begin():
        inbox.process(session, message, called.append, own_transaction=True)
    assert not called
    engine.dispose()
    inbox.close()


@awaited
async def test_an_async_session_of_another_database_is_refused_in_words(tmp_path: Path) -> None:
    inbox = Inbox(f"sqlite:///{tmp_path}/a.db", consumer="c")
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/other.db")
    async with AsyncSession(engine) as session, session.begin():
        with pytest.raises(ConfigurationError, match="no table semel_inbox"):
            await inbox.process(session, Message("t", {}, id="m1"), lambda message: None)
    await engine.dispose()
    inbox.close()


# --------------------------------------------------------------------------------------- numbers by value
@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"a": 1}, {"a": 1.0}),
        (3, 3.0),
        ([0, {"b": [-0.0]}], [-0.0, {"b": [0]}]),
        ({"1.0": "v1.0", "q": 'a\\"2.0,', "n": 10.0}, {"n": 10, "q": 'a\\"2.0,', "1.0": "v1.0"}),
    ],
)
def test_numbers_of_a_body_count_by_value(one: Any, two: Any) -> None:
    assert hash_of(Message("t", one, id="m")) == hash_of(Message("t", two, id="m"))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"a": "1.0"}, {"a": "1"}),
        ({"a": 1.05}, {"a": 15}),
        ({"a": 1.5}, {"a": 1}),
        ({"a": 'q\\"1.0,'}, {"a": 'q\\"1,'}),
        ({"1.0": 1}, {"1": 1}),
        (b'{"a":1.0}', b'{"a":1}'),
    ],
)
def test_and_nothing_else_is_taken_for_the_same(one: Any, two: Any) -> None:
    assert hash_of(Message("t", one, id="m")) != hash_of(Message("t", two, id="m"))


def test_a_message_that_lost_its_point_on_the_way_is_the_same_message(home: Home) -> None:
    inbox = Inbox(home.url, consumer="c", table=home.table)
    inbox.create()
    for own in (False, True):
        first, again = Message("t", {"n": 2.0}, id=f"m{own}"), Message("t", {"n": 2}, id=f"m{own}")
        for message, expected in ((first, True), (again, False), (first, False)):
            with Session(home.engine) as session, session.begin():
                done = inbox.process(session, message, lambda message: None, own_transaction=own)
                assert done is expected
        with Session(home.engine) as session, session.begin(), pytest.raises(KeyMismatch):
            inbox.process(session, Message("t", {"n": 2.5}, id=f"m{own}"), print)
    inbox.close()


def test_an_admission_from_before_is_still_known(home: Home) -> None:
    """Rows that were written while numbers counted by their spelling."""
    inbox = Inbox(home.url, consumer="c", table=home.table)
    inbox.create()
    message = Message("t", {"n": 2.0}, id="m1")
    with Session(home.engine) as session, session.begin():
        assert inbox.process(session, message, lambda message: None)
        table = inbox.database.tables.inbox
        session.execute(table.update().values(hash=hash_as_written(message)))
    with Session(home.engine) as session, session.begin():
        assert inbox.process(session, message, print) is False
    inbox.close()


# ------------------------------------------------------------------------------------------ files of SQLite
def test_a_command_that_looks_leaves_no_file_behind(tmp_path: Path) -> None:
    file = tmp_path / "typo.db"
    for command in (["outbox", "stats"], ["inbox", "dead", "--consumer", "c"]):
        done = CliRunner().invoke(app, [*command[:2], f"sqlite:///{file}", *command[2:]])
        assert isinstance(done.exception, ConfigurationError)
        assert f"there is no file '{file}'" in str(done.exception)
        assert not file.exists()


@awaited
async def test_nor_does_an_outbox_that_may_not_create(tmp_path: Path) -> None:
    outbox = Outbox(f"sqlite:///{tmp_path}/typo.db", create=False)
    with pytest.raises(ConfigurationError, match="there is no file"):
        await outbox.waiting()
    assert not list(tmp_path.iterdir())
    outbox.close()


def test_an_event_is_logged_in_words_with_its_fields_and_without_its_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log_event(Parked("acme", "customer-4711", "orders", "m1", 10, "no such address"))
    log_event(SinkPaused("orders", 0.5, "it did not answer"))
    log_event(SinkPaused("orders", 0.5, "no \ud800\nERROR all is lost"))
    assert caplog.messages == [
        "Parked tenant=acme key=cu…11 topic=orders message=m1 attempts=10 reason=no such address",
        "SinkPaused name=orders seconds=0.5 reason=it did not answer",
        r"SinkPaused name=orders seconds=0.5 reason='no \ud800\nERROR all is lost'",
    ]
    told = caplog.records[0].__dict__
    assert (told["semel_message"], told["semel_key"]) == ("m1", "cu…11")
