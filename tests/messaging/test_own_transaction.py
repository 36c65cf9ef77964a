"""`process(…, own_transaction=True)`: what its handler leaves behind when it fails is undone, whoever catches the error and commits (R46)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import asyncmy
import asyncpg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from semel.errors import StoreUnavailable
from semel.messaging import Inbox, Message, standing
from tests.messaging.conftest import Home, awaited, bare

EFFECT = "INSERT INTO own_effects VALUES (1)"
MESSAGE = Message("t", 1, id="m1")


@pytest.fixture
def inbox(home: Home) -> Iterator[Inbox]:
    with Inbox(home.url, consumer="c", table=home.table) as made:
        made.create()
        with home.engine.begin() as connection:
            connection.execute(text("DROP TABLE IF EXISTS own_effects"))
            connection.execute(text("CREATE TABLE own_effects (n int)"))
        yield made


def is_open_again(home: Home, inbox: Inbox) -> bool:
    """Whether nothing is left, and the message can be handled."""
    with home.engine.connect() as connection:
        left = connection.execute(text("SELECT count(*) FROM own_effects")).scalar_one()
    with Session(home.engine) as session, session.begin():
        return not left and inbox.process(session, MESSAGE, lambda message: None)


def _server(url: URL) -> dict[str, Any]:
    return {"host": url.host, "port": url.port, "user": url.username, "database": url.database}


@contextmanager
def _swallowed(*errors: type[BaseException]) -> Iterator[None]:
    """As a caller does that goes on and commits."""
    with suppress(*errors):
        yield
        raise AssertionError("the handler's error was not raised")


def _raises(error: BaseException, run: Callable[[str], Any]) -> Callable[[Message], None]:
    def handler(message: Message) -> None:
        del message
        run(EFFECT)
        raise error

    return handler


def test_a_driver_s_own_connection_is_undone(home: Home, inbox: Inbox) -> None:
    connection = bare(home)
    cursor = connection.cursor()
    cursor.execute("SELECT 1" if home.engine.dialect.name != "sqlite" else "BEGIN")
    with _swallowed(ValueError):
        inbox.process(connection, MESSAGE, _raises(ValueError("no"), cursor.execute), own_transaction=True)
    connection.commit()
    cursor.close()
    connection.close()
    assert is_open_again(home, inbox)


@pytest.mark.parametrize("home", ["postgres", "mariadb"], indirect=True)
@pytest.mark.parametrize("error", [ValueError, TimeoutError])
@awaited
async def test_an_async_driver_s_own_connection_is_undone(
    home: Home, inbox: Inbox, error: type[Exception]
) -> None:
    url = make_url(home.url)
    connection: Any
    if url.get_backend_name() == "postgresql":
        connection = await asyncpg.connect(url.set(drivername="postgresql").render_as_string(False))
    else:
        connection = await asyncmy.connect(**_server(url))

    async def run(sql: str) -> None:
        if hasattr(connection, "fetch"):
            await connection.execute(sql)
            return
        async with connection.cursor() as cursor:
            await cursor.execute(sql)

    async def handler(message: Message) -> None:
        await run(EFFECT)
        if error is ValueError:
            raise ValueError(message.id)
        await asyncio.sleep(60)

    await run("BEGIN")
    with _swallowed(error):
        async with asyncio.timeout(0.3 if error is TimeoutError else None):
            await inbox.process(connection, MESSAGE, handler, own_transaction=True)
    await run("COMMIT")
    closed = connection.close()
    if closed is not None:
        await closed
    assert await asyncio.to_thread(is_open_again, home, inbox)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("registry", [False, True], ids=["session", "scoped_session"])
def test_a_session_is_undone_whatever_is_raised(
    home: Home, inbox: Inbox, error: BaseException, registry: bool
) -> None:
    engine = create_engine(home.url)
    session: Any = scoped_session(sessionmaker(engine)) if registry else Session(engine)
    handler = _raises(error, lambda sql: session.execute(text(sql)))
    with _swallowed(type(error)):
        inbox.process(session, MESSAGE, handler, own_transaction=True)
    session.commit()
    session.close()
    engine.dispose()
    assert is_open_again(home, inbox)


_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "mysql": "mysql+asyncmy"}


@pytest.mark.parametrize("cancels", [1, 2], ids=["a timeout", "and a second cancellation"])
@pytest.mark.parametrize("own", [True, False], ids=["own", "savepoint"])
@pytest.mark.parametrize("registry", [False, True], ids=["AsyncSession", "async_scoped_session"])
@awaited
async def test_an_async_session_is_undone_when_it_is_cancelled(
    home: Home, inbox: Inbox, cancels: int, own: bool, registry: bool
) -> None:
    url = make_url(home.url)
    engine = create_async_engine(url.set(drivername=_DRIVERS[url.get_backend_name()]))
    made = async_sessionmaker(engine)
    in_handler = asyncio.Event()

    async def work() -> None:
        session: Any = async_scoped_session(made, scopefunc=asyncio.current_task) if registry else made()

        async def handler(message: Message) -> None:
            del message
            await session.execute(text(EFFECT))
            in_handler.set()
            await asyncio.sleep(60)

        try:
            await inbox.process(session, MESSAGE, handler, own_transaction=own)
        except asyncio.CancelledError:
            await session.commit()
        await (session.remove() if registry else session.close())

    task = asyncio.create_task(work())
    await in_handler.wait()
    for _ in range(cancels):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(task, return_exceptions=True)
    await engine.dispose()
    assert await asyncio.to_thread(is_open_again, home, inbox)


@awaited
async def test_an_async_registry_of_sessions_is_undone(home: Home, inbox: Inbox) -> None:
    url = make_url(home.url)
    engine = create_async_engine(url.set(drivername=_DRIVERS[url.get_backend_name()]))
    session = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)

    async def handler(given: AsyncSession, message: Message) -> None:
        await given.execute(text(EFFECT))
        raise ValueError(message.id)

    with _swallowed(ValueError):
        await inbox.process(session, MESSAGE, handler, own_transaction=True)
    await session.commit()
    await session.remove()
    await engine.dispose()
    assert await asyncio.to_thread(is_open_again, home, inbox)


DJANGO = """
import logging, sys, django
from contextlib import suppress
from django.conf import settings
logging.disable()
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}})
django.setup()
from django.db import connection, transaction
from semel.errors import StoreUnavailable
from semel.messaging import Inbox, Message, standing

inbox, message = Inbox(f"sqlite:///{sys.argv[1]}", consumer="c"), Message("t", 1, id="m1")
inbox.create()
with connection.cursor() as cursor:
    cursor.execute("CREATE TABLE own_effects (n int)")

def handler(message):
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO own_effects VALUES (1)")
    raise ValueError(message.id)

with transaction.atomic(), suppress(ValueError):
    inbox.process(connection, message, handler, own_transaction=True)
with connection.cursor() as cursor:
    cursor.execute("SELECT count(*) FROM own_effects")
    print(cursor.fetchone()[0])
with transaction.atomic():
    print(inbox.process(connection, message, lambda message: None))
inbox.close()
"""


def test_django_s_connection_is_undone(tmp_path: Path) -> None:
    """In a process of its own: Django's settings are for the whole of one."""
    done = subprocess.run(
        [sys.executable, "-c", DJANGO, str(tmp_path / "django.db")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["0", "True"], done.stderr


@awaited
async def test_what_undoes_is_waited_for_and_a_cancellation_is_not_swallowed_when_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def torn() -> None:
        await asyncio.sleep(0.2)
        raise OSError("the connection is torn")

    async def handled(back: Callable[[], Any]) -> None:
        try:
            await asyncio.sleep(60)
        except BaseException:
            await standing.to_its_end(back())
            raise

    task = asyncio.create_task(handled(torn))
    for _ in range(2):
        await asyncio.sleep(0.05)
        task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()

    monkeypatch.setattr(standing, "_PATIENCE", 0.2)
    with pytest.raises(StoreUnavailable, match="did not roll back"):
        await standing.to_its_end(asyncio.sleep(60))
