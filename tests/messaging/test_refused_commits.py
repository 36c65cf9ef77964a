"""A transaction whose messages could not be written commits nothing, now or later, and what is abandoned is never sent."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import OperationalError, PendingRollbackError
from sqlalchemy.orm import Session

from semel import KeyMismatch, StoreUnavailable
from semel.messaging import Message, Outbox
from semel.messaging.bodies.files import FileBodies
from semel.testing import services
from tests.messaging.conftest import Home


@pytest.fixture
def rows(home: Home) -> Any:
    """A table of the caller's own: how many rows it has."""
    name = f"{home.table}_rows"
    with home.engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE {name} (id varchar(20))"))
    yield lambda: home.scalar(f"SELECT count(*) FROM {name}")
    with home.engine.begin() as connection:
        connection.execute(text(f"DROP TABLE {name}"))


def insert(home: Home, target: Any) -> None:
    target.execute(text(f"INSERT INTO {home.table}_rows VALUES ('x')"))


def known(home: Home, outbox: Outbox) -> Message:
    """A message whose id is known with another content."""
    with home.engine.begin() as connection:
        outbox.add(connection, Message("t", {"a": 1}, id="dup"))
    return Message("t", {"a": 2}, id="dup")


def plainly(home: Home, work: Callable[[Connection], None]) -> None:
    connection = home.engine.connect()
    try:
        work(connection)
        connection.commit()
    finally:
        connection.close()


def in_a_block(home: Home, work: Callable[[Connection], None]) -> None:
    with home.engine.begin() as connection:
        work(connection)


def by_hand(home: Home, work: Callable[[Connection], None]) -> None:
    with home.engine.connect() as connection:
        work(connection)
        connection.commit()


@pytest.mark.parametrize("style", [plainly, in_a_block, by_hand])
def test_a_connection_that_was_refused_takes_nothing_into_its_pool(
    home: Home, rows: Callable[[], int], style: Callable[..., None]
) -> None:
    with home.outbox() as outbox:
        conflict = known(home, outbox)

        def work(connection: Connection) -> None:
            insert(home, connection)
            outbox.add(connection, conflict)

        with pytest.raises(KeyMismatch):
            style(home, work)
        with home.engine.begin() as stranger:  # gets the same connection of the pool
            stranger.execute(text("SELECT 1"))
        assert rows() == 0


def test_a_session_that_was_refused_can_only_be_rolled_back(home: Home, rows: Callable[[], int]) -> None:
    with home.outbox() as outbox, Session(home.engine) as session:
        conflict = known(home, outbox)
        insert(home, session)
        outbox.add(session, Message("t", 1, id="other"), conflict)
        with pytest.raises(KeyMismatch):
            session.commit()
        with pytest.raises(PendingRollbackError, match=r"KeyMismatch.*roll it back"):
            session.commit()
        session.rollback()
        insert(home, session)
        outbox.add(session, Message("t", 1, id="other"))
        session.commit()
        assert (rows(), home.count()) == (1, 2)


def test_a_body_that_could_not_be_stored_is_not_promised_by_the_next_commit(
    home: Home, rows: Callable[[], int], tmp_path: Any
) -> None:
    class Away(FileBodies):
        misses = 1

        def put(self, name: str, data: bytes) -> None:
            if self.misses:
                self.misses -= 1
                raise StoreUnavailable("the folder is away")
            super().put(name, data)

    bodies = Away(tmp_path / "bodies")
    with home.outbox(claim_check=bodies, claim_over=10) as outbox, Session(home.engine) as session:
        for again in (False, True):
            insert(home, session)
            outbox.add(session, Message("t", "x" * 100, id="m"))
            if again:
                session.commit()
                break
            with pytest.raises(StoreUnavailable):
                session.commit()
            with pytest.raises(PendingRollbackError):
                session.commit()
            session.rollback()
        assert (rows(), home.count()) == (1, 1)
        assert len(list(bodies.stored(outbox.home.identity[:16]))) == 1


@pytest.mark.parametrize("verb", ["close", "reset", "invalidate"])
def test_what_a_session_abandons_is_not_sent_by_its_next_transaction(
    home: Home, rows: Callable[[], int], verb: str
) -> None:
    with home.outbox() as outbox, Session(home.engine) as session:
        insert(home, session)
        outbox.add(session, Message("t", "ghost"))
        getattr(session, verb)()
        session.execute(text("SELECT 1"))
        session.commit()
        assert (rows(), home.count()) == (0, 0)
        insert(home, session)
        outbox.add(session, Message("t", "real"))
        session.commit()
        assert (rows(), home.count()) == (1, 1)


def test_what_a_later_hook_adds_is_still_written(home: Home) -> None:
    with home.outbox() as outbox, Session(home.engine) as session:

        @event.listens_for(session, "before_commit")
        def late(_: Session) -> None:
            outbox.add(session, Message("t", "late"))

        session.execute(text("SELECT 1"))
        session.commit()
        assert home.count() == 1


def test_commits_of_many_threads_do_not_meet(postgres_home: Home) -> None:
    """Each commit is true or an error: sessions come and go in all threads while connections commit."""
    outbox = postgres_home.outbox()
    engine = create_engine(postgres_home.url, pool_size=6)
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for n in range(60):
                session = Session(engine)
                session.execute(text("SELECT 1"))
                outbox.add(session, Message("t", n, id=f"{thread}-{n}"))
                session.commit()
                session.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert postgres_home.count() == 360
    engine.dispose()
    outbox.close()


def test_two_outboxes_for_one_table_keep_the_order_of_adding(home: Home) -> None:
    with home.outbox() as first, home.outbox() as second:
        with home.transaction() as session:
            for n in range(6):
                (first, second)[n % 2].add(session, Message("t", n, key="k", id=f"m{n}"))
        with home.engine.connect() as connection:
            found = connection.execute(text(f"SELECT id FROM {home.table}_outbox ORDER BY seq")).scalars()
            assert list(found) == [f"m{n}" for n in range(6)]


def test_an_outbox_leaves_the_callers_message_as_it_is(home: Home) -> None:
    """One message for two tenants, through an outbox of each."""
    message = Message("t", 1, id="m1")
    before = replace(message)
    with (
        home.outbox(tenant="acme", trace=lambda: {"traceparent": "00-a"}) as acme,
        home.outbox(tenant="globex") as globex,
    ):
        with home.transaction() as session:
            acme.add(session, message)
            globex.add(session, message)
        with home.engine.connect() as connection:
            found = connection.execute(text(f"SELECT tenant FROM {home.table}_outbox ORDER BY tenant"))
            assert list(found.scalars()) == ["acme", "globex"]
    assert message == before


def test_a_deadlock_that_is_swallowed_takes_the_messages_with_it(
    mariadb_server: services.MariaServer,
) -> None:
    """MariaDB rolls the whole transaction back, not the statement: what was added before belongs to what is gone."""
    url = mariadb_server.url.replace("mysql://", "mysql+pymysql://")
    table = f"d{secrets.token_hex(4)}"
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE {table}_rows (id int PRIMARY KEY, v int)"))
        connection.execute(text(f"INSERT INTO {table}_rows VALUES (1, 0), (2, 0)"))
        connection.execute(text(f"CREATE TABLE {table}_many (k int)"))
    outbox = Outbox(url, table=table)
    outbox.create()
    for style in ("session", "connection"):
        with pytest.raises((PendingRollbackError, OperationalError)):
            _swallowing(engine, table, outbox, style)
        with engine.connect() as connection:
            assert connection.execute(text(f"SELECT count(*) FROM {table}_outbox")).scalar() == 0
            assert connection.execute(text(f"SELECT sum(v) FROM {table}_rows")).scalar() == 0
    with Session(engine) as session, session.begin():  # the next one is well
        outbox.add(session, Message("orders", 2))
    with engine.connect() as connection:
        assert connection.execute(text(f"SELECT count(*) FROM {table}_outbox")).scalar() == 1
    outbox.close()
    engine.dispose()


def _swallowing(engine: Engine, table: str, outbox: Outbox, style: str) -> None:
    """An order, its message, a deadlock whose victim this is, and a commit all the same."""
    change = f"UPDATE {table}_rows SET v = v + 1 WHERE id = "
    with Session(engine) if style == "session" else engine.connect() as target:
        target.execute(text(change + "1"))
        outbox.add(target, Message("orders", 1))
        with engine.connect() as heavier:
            heavier.execute(text(f"INSERT INTO {table}_many VALUES {', '.join(['(1)'] * 200)}"))
            heavier.execute(text(change + "2"))
            blocked = threading.Thread(target=heavier.execute, args=(text(change + "1"),))
            blocked.start()
            with engine.connect() as watching:
                waits = text(
                    "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
                )
                while not watching.execute(waits).scalar():
                    watching.rollback()
            with pytest.raises(OperationalError, match="1213"):
                target.execute(text(change + "2"))
            blocked.join()
            heavier.rollback()
        target.commit()
