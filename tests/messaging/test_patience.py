"""A database that is opened from its URL: one that was started anew is found well, one that has stopped is not waited for without an end."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from semel import ConfigurationError, StoreUnavailable
from semel.cli import main
from semel.messaging import Inbox, Outbox, Relay, patience
from semel.messaging.engines import engine_of
from semel.messaging.patience import connect_arguments
from tests.messaging.conftest import Home, awaited

SERVERS = pytest.mark.parametrize("home", ["postgres", "mariadb"], indirect=True)


@pytest.fixture
def server(home: Home, request: pytest.FixtureRequest) -> Any:
    name = "postgres_server" if home.engine.dialect.name == "postgresql" else "mariadb_server"
    return request.getfixturevalue(name)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (patience._LIBPQ, patience._PYMYSQL):
        for name in arguments.keys() & {"connect_timeout", "read_timeout"}:
            monkeypatch.setitem(arguments, name, 1)


def end_connections(home: Home) -> None:
    """As a restart does: all but this one."""
    with home.engine.connect() as connection:
        if home.engine.dialect.name == "postgresql":
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()"
                )
            )
            return
        for (number,) in connection.execute(
            text(
                "SELECT id FROM information_schema.processlist WHERE id <> connection_id() AND db = database()"
            )
        ).all():
            connection.exec_driver_sql(f"KILL {number}")


@SERVERS
@awaited
async def test_the_first_call_after_a_restart_works(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_RESTED", 0.0)
    outbox = home.outbox()
    inbox = Inbox(home.url, consumer="c", table=home.table)
    relay = Relay(outbox, {"*": print})
    calls = (relay.drain, outbox.waiting, relay.backlog, inbox.dead_letters)
    for call in calls:
        await call()
    for call in calls:
        end_connections(home)
        await call()
    outbox.close()
    inbox.close()


@SERVERS
def test_a_connection_in_use_is_not_asked(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = engine_of(home.url)
    pings: list[object] = []
    monkeypatch.setattr(engine.dialect, "do_ping", pings.append)
    for _ in range(3):
        with engine.connect():
            pass
    assert pings == []
    monkeypatch.setattr(patience, "_RESTED", 0.0)
    with engine.connect():
        pass
    assert len(pings) == 1
    engine.dispose()


@SERVERS
@pytest.mark.usefixtures("hurried")
def test_commands_end_when_the_server_has_stopped(
    home: Home, server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 3, as the commands about keys."""
    home.outbox().close()
    route = "t=redis://127.0.0.1:1/0?stream=x"
    said = (
        ["outbox", "stats", home.url],
        ["inbox", "dead", home.url, "--consumer", "c"],
        ["relay", home.url, "--drain", "--route", route],
    )
    with server.paused():
        for arguments in said:
            monkeypatch.setattr(sys, "argv", ["semel", *arguments, "--table", home.table])
            start = time.monotonic()
            with pytest.raises(SystemExit) as left:
                main()
            assert left.value.code == 3
            assert "did not answer" in capsys.readouterr().err
            assert time.monotonic() - start < 15


@SERVERS
@pytest.mark.usefixtures("hurried")
@awaited
async def test_a_server_that_stops_later_is_not_waited_for(home: Home, server: Any) -> None:
    outbox = home.outbox(timeout=0.5)
    await outbox.waiting()
    with server.paused():
        start = time.monotonic()
        with pytest.raises(StoreUnavailable, match="did not answer"):
            await outbox.waiting()
        assert time.monotonic() - start < 10
    assert await outbox.waiting() == []
    outbox.close()


@SERVERS
@awaited
async def test_without_a_timeout_a_statement_may_take_long(home: Home) -> None:
    """What bounds the greeting of the server bounds no statement."""
    engine: Any = engine_of(home.url + "?connect_timeout=2")
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert getattr(driver, "_read_timeout", None) is None
        assert "wait" not in vars(driver)
    engine.dispose()


def test_what_the_url_says_goes_first() -> None:
    url = make_url("postgresql+psycopg://h/db?connect_timeout=3")
    assert "connect_timeout" not in connect_arguments(url, "psycopg")
    assert connect_arguments(make_url("mysql+pymysql://h/db"), "pymysql")["read_timeout"] == 10
    assert connect_arguments(make_url("postgresql+pg8000://h/db"), "pg8000") == {}


def test_a_timeout_is_for_what_is_opened_here(sqlite_home: Home) -> None:
    for where in (sqlite_home.engine, "redis://localhost/0"):
        with pytest.raises(ConfigurationError, match="timeout="):
            Outbox(where, timeout=1)
