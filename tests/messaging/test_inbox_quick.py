"""The short way of an admission (psycopg): the same rows and the same answers, in one round trip less."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator
from enum import Enum
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from semel import ConfigurationError, KeyMismatch
from semel.messaging import Inbox, Message
from semel.messaging.failures import is_away
from semel.messaging.quick import _prepared, connection_of
from semel.messaging.sameness import hash_of
from tests.messaging.conftest import Home


@pytest.fixture
def inbox(postgres_home: Home) -> Iterator[Inbox]:
    made = Inbox(postgres_home.url, consumer="c", table=postgres_home.table)
    made.create()
    with postgres_home.engine.begin() as connection:
        connection.execute(text("DROP TABLE IF EXISTS quick_effects"))
        connection.execute(text("CREATE TABLE quick_effects (id text primary key)"))
    yield made
    made.close()


def effect(session: Any, message: Message) -> None:
    session.execute(text("INSERT INTO quick_effects VALUES (:id)"), {"id": message.id})


def done(inbox: Inbox, engine: Engine, message: Message, handler: Any = effect) -> bool:
    with Session(engine) as session, session.begin():
        return bool(inbox.process(session, message, handler, own_transaction=True))


def prepared(engine: Engine) -> int:
    with engine.connect() as connection:
        said = "SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'semel_%'"
        return int(connection.execute(text(said)).scalar_one())


def count(home: Home) -> tuple[int, int]:
    with home.engine.connect() as connection:
        effects = int(connection.execute(text("SELECT count(*) FROM quick_effects")).scalar_one())
    return home.count("_inbox"), effects


@pytest.fixture
def one(postgres_home: Home) -> Iterator[Engine]:
    """An engine with one connection."""
    engine = create_engine(postgres_home.url, pool_size=1, max_overflow=0)
    yield engine
    engine.dispose()


def test_it_is_taken_and_admits_once(postgres_home: Home, inbox: Inbox, one: Engine) -> None:
    message = Message("t", {"n": 1}, id="m1")
    assert done(inbox, one, message) is True
    assert prepared(one) == 1, "the ordinary way was taken"
    for _ in range(2):
        assert done(inbox, one, message) is False
    for other in (Message("t", {"n": 2}, id="m1"), Message("u", {"n": 1}, id="m1")):
        with pytest.raises(KeyMismatch):
            done(inbox, one, other)
    assert done(inbox, one, Message("t", {"n": 2}, id="m1", tenant="other"), lambda message: None) is True
    with one.begin() as connection:  # a connection as well as a session
        assert inbox.process(connection, Message("t", 1, id="m2"), effect, own_transaction=True) is True
    assert count(postgres_home) == (3, 2)


def test_the_result_and_the_business_key_are_kept(postgres_home: Home, inbox: Inbox, one: Engine) -> None:
    with Session(one) as session, session.begin():
        said = inbox.process(
            session,
            Message("t", 1, id="m1"),
            lambda message: {"sum": 3},
            business_key="order-1",
            own_transaction=True,
        )
    assert said is True
    assert postgres_home.scalar("SELECT result FROM {t}_inbox WHERE business_key = 'order-1'") == '{"sum":3}'

    async def waits(message: Message) -> None: ...

    with pytest.raises(ConfigurationError, match="coroutine function"):
        done(inbox, one, Message("t", 1, id="m2"), waits)
    assert postgres_home.count("_inbox") == 1


def test_an_error_undoes_the_admission_and_the_next_attempt_counts(
    postgres_home: Home, inbox: Inbox, one: Engine
) -> None:
    def fails(session: Session, message: Message) -> None:
        effect(session, message)
        raise RuntimeError("no")

    message = Message("t", 1, id="m1")
    for _ in range(2):  # psycopg forgets its prepared statements with a rollback, and ours with them
        with pytest.raises(RuntimeError):
            done(inbox, one, message, fails)
        assert count(postgres_home) == (0, 0)
    assert done(inbox, one, message) is True
    assert count(postgres_home) == (1, 1)


def test_a_statement_that_somebody_deallocated_is_prepared_again(inbox: Inbox, one: Engine) -> None:
    assert done(inbox, one, Message("t", 1, id="m1")) is True
    with one.begin() as connection:
        connection.execute(text("DEALLOCATE ALL"))
    assert prepared(one) == 0
    assert done(inbox, one, Message("t", 1, id="m2")) is True
    assert prepared(one) == 1


def test_a_statement_that_another_client_of_a_pooler_has_prepared_is_used(inbox: Inbox, one: Engine) -> None:
    assert done(inbox, one, Message("t", 1, id="m1")) is True
    _prepared.clear()  # as a new client that is given this server connection
    assert done(inbox, one, Message("t", 1, id="m1")) is False
    assert done(inbox, one, Message("t", 1, id="m2")) is True
    assert prepared(one) == 1


HOSTILE = [
    "it's",
    "back\\slash",
    "\\'; DROP TABLE quick_effects; --",
    "E'x'",
    "ключ-鍵-🔑",
    "$1",
    "%s",
    '"q"',
    "a" * 255,
]


@pytest.mark.parametrize("conforming", ["on", "off"])
def test_what_is_written_is_what_was_said_whatever_it_looks_like(
    postgres_home: Home, inbox: Inbox, conforming: str
) -> None:
    quiet = {"options": f"-c standard_conforming_strings={conforming} -c escape_string_warning=off"}
    engine = create_engine(postgres_home.url, pool_size=1, max_overflow=0, connect_args=quiet)
    for text_ in HOSTILE:
        message = Message(text_, {"n": text_}, id=text_, tenant=text_)
        with Session(engine) as session, session.begin():
            assert inbox.process(session, message, effect, business_key=text_, own_transaction=True) is True
        with Session(engine) as session, session.begin():  # the ordinary way finds the same, its hash too
            session.execute(text("SELECT 1"))
            assert inbox.process(session, message, effect, own_transaction=True) is False
    assert prepared(engine) == 1, "the ordinary way was taken"
    said = text(f"SELECT message, tenant, topic, business_key FROM {postgres_home.table}_inbox")
    with engine.connect() as connection:
        assert sorted(connection.execute(said)) == sorted((each,) * 4 for each in HOSTILE)
    engine.dispose()


def test_a_text_that_postgresql_cannot_keep_is_told_in_the_ordinary_words(inbox: Inbox, one: Engine) -> None:
    with (
        pytest.raises(DBAPIError, match="NUL"),
        Session(one) as session,
        session.begin(),
    ):
        inbox.process(session, Message("t", 1), effect, business_key="a\0b", own_transaction=True)


@pytest.mark.parametrize("level", ["SERIALIZABLE", "REPEATABLE READ"])
def test_the_transaction_is_the_one_that_was_asked_for(postgres_home: Home, inbox: Inbox, level: str) -> None:
    engine = create_engine(postgres_home.url, isolation_level=level)
    seen: list[str] = []

    def handle(session: Session, message: Message) -> None:
        seen.append(session.execute(text("SHOW transaction_isolation")).scalar_one())
        effect(session, message)

    assert done(inbox, engine, Message("t", 1, id="m1"), handle) is True
    assert prepared(engine) == 1
    assert seen == [level.lower()]
    engine.dispose()


def test_where_it_is_not_open_the_ordinary_way_is_taken(
    postgres_home: Home, inbox: Inbox, one: Engine
) -> None:
    with Session(one) as session, session.begin():
        session.execute(text("SELECT 1"))
        assert connection_of(session) is None, "this is not the first statement"
        assert inbox.process(session, Message("t", 1, id="m1"), effect, own_transaction=True) is True
    pooled = create_engine(postgres_home.url, connect_args={"prepare_threshold": None})
    assert done(inbox, pooled, Message("t", 1, id="m2")) is True
    assert prepared(pooled) == 0
    pooled.dispose()
    with one.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        assert connection_of(connection) is None
    assert prepared(one) == 0
    assert count(postgres_home) == (2, 2)


def test_two_copies_at_once_are_one(postgres_home: Home, inbox: Inbox) -> None:
    """The second waits for the first: it is a duplicate after its commit, and counts after its rollback."""
    for commits in (True, False):
        message = Message("t", 1, id=f"twin-{commits}")
        inside, go = threading.Event(), threading.Event()
        answers: list[bool] = []

        def first(
            session: Session, message: Message, inside: Any = inside, go: Any = go, commits: Any = commits
        ) -> None:
            effect(session, message)
            inside.set()
            assert go.wait(30)
            if not commits:
                raise RuntimeError("no")

        def run(handler: Any, message: Message = message, answers: list[bool] = answers) -> None:
            try:
                answers.append(done(inbox, postgres_home.engine, message, handler))
            except RuntimeError:
                answers.append(False)

        threads = [threading.Thread(target=run, args=(first,)), threading.Thread(target=run, args=(effect,))]
        threads[0].start()
        assert inside.wait(30)
        threads[1].start()
        threads[1].join(0.2)
        assert threads[1].is_alive(), "did not wait for the first"
        go.set()
        for thread in threads:
            thread.join(10)
        assert sorted(answers) == [False, True]
        assert postgres_home.scalar(f"SELECT count(*) FROM {{t}}_inbox WHERE message = '{message.id}'") == 1


def test_what_goes_wrong_is_told_in_the_ordinary_words(
    postgres_home: Home, one: Engine, inbox: Inbox
) -> None:
    assert done(inbox, one, Message("t", 1, id="m1")) is True
    with one.connect() as connection:
        pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    with postgres_home.engine.connect() as connection:
        connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
    with pytest.raises(DBAPIError) as lost:
        done(inbox, one, Message("t", 1, id="m2"))
    assert is_away(lost.value)
    assert done(inbox, one, Message("t", 1, id="m2")) is True
    elsewhere = Inbox(postgres_home.url, consumer="c", table=postgres_home.table)
    elsewhere.create()
    elsewhere._processing._table = "not_there"
    with pytest.raises(ConfigurationError, match="no table not_there_inbox"):
        done(elsewhere, one, Message("t", 1, id="m3"))
    assert done(inbox, one, Message("t", 1, id="m3")) is True
    elsewhere.close()


def test_another_encoding_of_the_connection_is_no_way(postgres_home: Home, inbox: Inbox) -> None:
    """The short way speaks UTF-8; an id that is read in another encoding would be another id."""
    engine = create_engine(postgres_home.url, connect_args={"client_encoding": "LATIN1"})
    message = Message("t", {"n": 1}, id="müller")
    assert done(inbox, engine, message) is True
    assert prepared(engine) == 0
    with postgres_home.engine.connect() as connection:
        kept = connection.execute(text(f"SELECT message FROM {postgres_home.table}_inbox")).scalars().all()
    assert kept == ["müller"]
    assert done(inbox, engine, message) is False
    assert done(inbox, engine, Message("t", {"n": 1}, id="mueller")) is True
    assert prepared(engine) == 1, "ASCII is the same in every encoding"
    engine.dispose()


class Who(str, Enum):  # noqa: UP042 - a StrEnum would show itself as it is
    """Shows itself as something else than it is, with a quote in it."""

    SHIP = "shipping"
    ORDERS = "orders"
    ACME = "acme"

    def __str__(self) -> str:
        return f"the '{self.value}' one"

    def __format__(self, spec: str) -> str:
        return str(self)


def test_a_text_is_what_it_says_whatever_it_shows_itself_as(postgres_home: Home, one: Engine) -> None:
    message = Message(Who.ORDERS, {"n": 1}, id="m1", tenant=Who.ACME)
    with Inbox(postgres_home.url, consumer=Who.SHIP, table=postgres_home.table) as inbox:
        inbox.create()
        assert done(inbox, one, message, lambda message: None) is True
        assert prepared(one) == 1
        with Session(one) as session, session.begin():
            session.execute(text("SELECT 1"))  # not the first statement: the ordinary way
            assert inbox.process(session, message, lambda message: None) is False
    with one.connect() as connection:
        said = f"SELECT consumer, tenant, message, topic FROM {postgres_home.table}_inbox"
        assert connection.execute(text(said)).all() == [("shipping", "acme", "m1", "orders")]


@pytest.mark.parametrize("size", [0, 1, 200, 467, 468, 479, 480, 2000])
def test_a_content_has_one_hash_whichever_way_it_is_computed(size: int) -> None:
    """Admissions of other versions and other programs are recognised by it."""
    body = b"x" * size
    for topic, kind, schema in (("t", None, None), ("tópic", "order", "v1")):
        said = hashlib.sha256()
        for part in (topic.encode(), (kind or "").encode(), (schema or "").encode(), body):
            said.update(len(part).to_bytes(8, "big") + part)
        assert hash_of(Message(topic, body, type=kind, schema=schema)) == said.digest()


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
def test_each_message_is_logged_at_debug(
    inbox: Inbox, one: Engine, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(level, "semel.messaging"):
        for _ in range(2):
            done(inbox, one, Message("t", 1, id="m1"))
    said = [record.getMessage() for record in caplog.records if record.name == "semel.messaging"]
    assert ["admitted=True" in text for text in said] == ([True, False] if level == logging.DEBUG else [])


def test_a_connection_that_cannot_be_rolled_back_is_told_in_the_ordinary_words(
    inbox: Inbox, one: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert done(inbox, one, Message("t", 1, id="m1")) is True
    with one.begin() as connection:
        connection.execute(text("DEALLOCATE ALL"))

    def lost(self: object) -> None:
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    with monkeypatch.context() as patched, pytest.raises(DBAPIError) as told:
        patched.setattr(psycopg.Connection, "rollback", lost)
        done(inbox, one, Message("t", 1, id="m2"))
    assert is_away(told.value)
    assert done(inbox, one, Message("t", 1, id="m2")) is True
