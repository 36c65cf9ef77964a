"""Large bodies: kept elsewhere, checked when they come back, never removed while a message refers to them."""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel import ConfigurationError, KeyMismatch, StoreUnavailable
from semel.messaging import Inbox, Message, Outbox, Relay
from semel.messaging.bodies import HEADER, BodyDamaged, BodyMissing, BodyStore, Reference, open_bodies
from semel.messaging.bodies.files import FileBodies
from semel.messaging.bodies.s3 import S3Bodies
from semel.messaging.bodies.sql import SqlBodies
from semel.messaging.sinks.outbox import OutboxSink
from semel.testing import services
from tests.messaging.books import Book
from tests.messaging.conftest import Home, awaited

_numbers = itertools.count()


def large(word: str = "x") -> dict[str, str]:
    return {"text": word * 500, "of": "ä"}


def folder(path: Path) -> str:
    return f"file://{path}/bodies"


def opened(home: Home, claim_check: Any, **options: Any) -> Outbox:
    return home.outbox(claim_check=claim_check, claim_over=100, **options)


def add(outbox: Outbox, home: Home, *messages: Message) -> None:
    with Session(home.engine) as session, session.begin():
        outbox.add(session, *messages)


def names(store: BodyStore, outbox: Outbox) -> set[str]:
    return {body.name for body in store.stored(outbox.database.identity[:16])}


async def relayed(outbox: Outbox) -> list[Message]:
    book = Book()
    async with Relay(outbox, {"*": book}) as relay:
        await relay.drain()
    return [row.message() for row in book.rows]


async def forgotten(outbox: Outbox) -> None:
    """Delivered, and the retention past."""
    async with Relay(outbox, {"*": Book()}) as relay:
        await relay.drain()
        assert await relay._ledger.run(lambda page: page.clean(-1.0, 0.0)) > 0


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BodyStore:
    if request.param == "file":
        (tmp_path / "bodies").mkdir()
        return FileBodies(tmp_path / "bodies")
    server: services.S3Server = request.getfixturevalue("s3_server")
    return S3Bodies(server.client(), server.bucket, prefix=f"/t{uuid.uuid4().hex[:8]}/")


# ------------------------------------------------------------------------------------------------- stores
def test_a_store_keeps_what_it_is_given(store: BodyStore) -> None:
    name = Reference.to(b"body", home="a1", raw=True).name
    other = Reference.to(b"other", home="a1", raw=True).name
    with pytest.raises(BodyMissing, match=name):
        store.get(name)
    for _ in range(2):
        store.put(name, b"body")
    store.put(other, b"other")
    store.put(name.replace("a1", "b2"), b"body")
    assert (store.get(name), store.get(other)) == (b"body", b"other")
    found = {body.name: body.age for body in store.stored("a1")}
    assert found.keys() == {name, other}
    assert all(-2 < age < 60 for age in found.values())
    for _ in range(2):
        store.delete(name)
    with pytest.raises(BodyMissing):
        store.get(name)
    assert store.get(name.replace("a1", "b2")) == b"body"
    assert list(store.stored("nobody")) == []


def test_a_long_list_of_bodies_is_read_to_its_end(s3_server: services.S3Server) -> None:
    client = s3_server.client()

    class Pages:
        """Pages of two, as a real bucket has them of a thousand."""

        def __getattr__(self, verb: str) -> Any:
            return getattr(client, verb)

        def list_objects_v2(self, **said: Any) -> Any:
            return client.list_objects_v2(**said, MaxKeys=2)

    store = S3Bodies(Pages(), s3_server.bucket, prefix=f"p{uuid.uuid4().hex[:8]}")
    given = {Reference.to(bytes([n]), home="a1", raw=True).name for n in range(5)}
    for name in given:
        store.put(name, b"x")
    assert {body.name for body in store.stored("a1")} == given


def test_a_store_that_is_away_is_told_apart_from_a_body_that_is_not_there(tmp_path: Path) -> None:
    name = Reference.to(b"body", home="a1", raw=True).name
    gone = FileBodies(tmp_path / "not" / "mounted")
    with pytest.raises(StoreUnavailable):
        gone.get(name)
    with pytest.raises(StoreUnavailable):
        gone.put(name, b"body")
    with services.s3() as server:
        client = server.client()
        store = S3Bodies(client, server.bucket)
        server.kill()
        for call in (lambda: store.put(name, b"body"), lambda: store.get(name), lambda: store.delete(name)):
            with pytest.raises(StoreUnavailable, match="did not answer"):
                call()
        server.restart()
        with pytest.raises(StoreUnavailable, match="nowhere"):
            S3Bodies(client, "nowhere").put(name, b"body")
        with pytest.raises(BodyMissing):
            store.get(name)


def test_a_name_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    store = FileBodies(tmp_path / "bodies")
    store.put("a1/" + "0" * 64, b"x")
    for name in ("../secret", "a1/../../secret", "a1", "/etc/passwd"):
        with pytest.raises(BodyMissing):
            store.get(name)


def test_urls_of_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_bodies(folder(tmp_path)), FileBodies)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    made = open_bodies("s3://shop/bodies?endpoint=http://127.0.0.1:1&region=us-east-1")
    assert isinstance(made, S3Bodies)
    assert made.bucket == "shop"
    for bad in ("file://bodies", "file:///", "ftp://x", "nonsense", "s3://", "s3://b?key=x", "s3://u:p@b/x"):
        with pytest.raises(ConfigurationError):
            open_bodies(bad)
    with pytest.raises(ConfigurationError, match="put, get, delete and stored"):
        open_bodies(5)
    with pytest.raises(ConfigurationError, match="list_objects_v2"):
        S3Bodies(object(), "bucket")
    with pytest.raises(ConfigurationError, match="absolute"):
        FileBodies("bodies")


# -------------------------------------------------------------------------------------------- there and back
@pytest.mark.parametrize("kind", ["file", "sql"])
@awaited
async def test_the_body_stays_behind_and_the_handler_gets_it(home: Home, tmp_path: Path, kind: str) -> None:
    given = folder(tmp_path) if kind == "file" else "sql"
    outbox = opened(home, given)
    messages = [
        Message("orders", large(), id="json", key="k", headers={"a": "b"}),
        Message("orders", b"\x00\xff" * 200, id="raw"),
        Message("orders", {"small": 1}, id="small"),
    ]
    add(outbox, home, *messages)
    there = {message.id: message for message in await relayed(outbox)}
    assert HEADER not in there["small"].headers
    assert len(there["json"].data) < 300
    assert len(there["raw"].data) < 300
    inbox = Inbox(home.url, consumer="c", table=home.table, claim_check=given)
    got: dict[str, Message] = {}

    def handle(message: Message) -> None:
        got[message.id] = message

    for message in there.values():
        with Session(home.engine) as session, session.begin():
            assert inbox.process(session, message, handle) is True
            assert inbox.process(session, message, handle) is False
    assert {name: message.body for name, message in got.items()} == {m.id: m.body for m in messages}
    assert got["json"].headers == {"a": "b"}
    inbox.close()
    outbox.close()


@awaited
async def test_bodies_in_s3(sqlite_home: Home, s3_server: services.S3Server) -> None:
    store = S3Bodies(s3_server.client(), s3_server.bucket, prefix=uuid.uuid4().hex[:8])
    outbox = opened(sqlite_home, store)
    add(outbox, sqlite_home, Message("orders", large(), id="m1"))
    (there,) = await relayed(outbox)
    inbox = Inbox(sqlite_home.url, consumer="c", table=sqlite_home.table, claim_check=store)
    got: list[Message] = []
    with Session(sqlite_home.engine) as session, session.begin():
        assert inbox.process_batch(session, [there, there], got.extend) == 1
    assert got[0].body == large()
    with Session(sqlite_home.engine) as session:
        session.begin()
        outbox.add(session, Message("orders", large("rolled back")))
        session.flush()
        outbox._write(session.connection(), [outbox._prepare(Message("orders", large("orphan")))])
        session.rollback()
    assert len(names(store, outbox)) == 2
    assert await outbox.sweep(grace=-5) == 1
    assert store.get(Reference.of(there).name)  # type: ignore[union-attr]  # its body is elsewhere
    inbox.close()
    outbox.close()


@pytest.mark.parametrize("kind", ["file", "sql"])
@awaited
async def test_async_sessions_and_connections(home: Home, tmp_path: Path, kind: str) -> None:
    given = folder(tmp_path) if kind == "file" else "sql"
    url = home.url
    for sync, other in {"psycopg": "asyncpg", "pymysql": "asyncmy", "sqlite": "sqlite+aiosqlite"}.items():
        url = url.replace(sync, other, 1)
    engine = create_async_engine(url)
    home.outbox().close()
    outbox = Outbox(engine, table=home.table, claim_check=given, claim_over=100)
    async with AsyncSession(engine) as session, session.begin():
        outbox.add(session, Message("orders", large("s"), id="session"))
    async with engine.begin() as connection:
        assert await outbox.insert(connection, Message("orders", large("c"), id="connection")) == 1
    inbox = Inbox(engine, consumer="c", table=home.table, claim_check=given)
    got: list[Any] = []

    async def handle(message: Message) -> None:
        got.append(message.body)

    for message in await relayed(outbox):
        assert HEADER in message.headers
        async with AsyncSession(engine) as session, session.begin():
            assert await inbox.process(session, message, handle) is True
    assert sorted(body["text"][0] for body in got) == ["c", "s"]
    if inbox.bodies is not None and isinstance(inbox.bodies, SqlBodies):
        inbox.bodies.close()
    await engine.dispose()
    inbox.close()
    outbox.close()


def test_the_same_id_with_another_large_body_is_a_conflict(home: Home, tmp_path: Path) -> None:
    outbox = opened(home, folder(tmp_path))
    store = outbox.bodies
    assert store is not None
    add(outbox, home, Message("orders", large(), id="one"))
    add(outbox, home, Message("orders", large(), id="one"))
    with pytest.raises(KeyMismatch):
        add(outbox, home, Message("orders", large("y"), id="one"))
    with pytest.raises(KeyMismatch):
        add(outbox, home, Message("orders", {"small": 1}, id="one"))
    assert (home.count(), home.count("_outbox_bodies"), len(names(store, outbox))) == (1, 1, 1)
    whole = home.outbox()  # one that keeps no bodies apart: the content is the same
    add(whole, home, Message("orders", large(), id="one"))
    assert home.count() == 1
    whole.close()
    outbox.close()


@awaited
async def test_functions_and_other_outboxes_get_the_body(home: Home, tmp_path: Path) -> None:
    outbox = opened(home, folder(tmp_path))
    add(outbox, home, Message("orders", large(), id="m1", key="k"))
    other = Outbox(f"sqlite:///{tmp_path}/other.db", claim_check="sql", claim_over=200)
    other.create()
    got: list[Message] = []
    async with Relay(outbox, {"orders": [got.append, OutboxSink(other)]}) as relay:
        assert (await relay.drain()).rejected == 0
    assert [(message.body, dict(message.headers)) for message in got] == [(large(), {})]
    again: list[Message] = []
    async with Relay(other, {"orders": again.append}) as relay:
        await relay.drain()
    assert [message.body for message in again] == [large()]
    other.close()
    outbox.close()


# ------------------------------------------------------------------------------------------ missing, damaged
@awaited
async def test_a_body_that_is_missing_or_damaged_never_reaches_a_handler(
    sqlite_home: Home, tmp_path: Path
) -> None:
    outbox = opened(sqlite_home, folder(tmp_path))
    add(outbox, sqlite_home, Message("orders", large(), id="m1"))
    (message,) = await relayed(outbox)
    reference = Reference.of(message)
    assert reference is not None
    path = tmp_path / "bodies" / reference.home / reference.sha256[:2] / reference.sha256
    whole = path.read_bytes()
    inbox = Inbox(
        sqlite_home.url, consumer="c", table=sqlite_home.table, claim_check=FileBodies(tmp_path / "bodies")
    )
    calls: list[Message] = []

    def tried(given: Message = message) -> bool:
        with Session(sqlite_home.engine) as session, session.begin():
            return bool(inbox.process(session, given, calls.append))

    for damaged in (whole[:-1], b"", whole.replace(b"x", b"y")):
        path.write_bytes(damaged)
        with pytest.raises(BodyDamaged, match=reference.sha256):
            tried()
    path.unlink()
    with pytest.raises(BodyMissing, match=reference.sha256):
        tried()
    with pytest.raises(BodyDamaged, match="no reference"):
        tried(Message("orders", {}, headers={HEADER: "../../etc/passwd"}))
    assert calls == []
    path.write_bytes(whole)
    assert tried() is True
    path.unlink()
    assert tried() is False, "a late copy of what was handled needs no body"
    bare = Inbox(sqlite_home.url, consumer="other", table=sqlite_home.table)
    with (
        pytest.raises(ConfigurationError, match="claim_check"),
        Session(sqlite_home.engine) as session,
        session.begin(),
    ):
        bare.process(session, message, calls.append)
    assert [message.body for message in calls] == [large()]
    for made in (bare, inbox, outbox):
        made.close()


class _Source:
    """One message, handed out once."""

    extends_every = 60.0

    def __init__(self, message: Message) -> None:
        self.message = message
        self.acked = asyncio.Event()
        self._given = False

    async def receive(self, limit: int) -> list[_Source]:
        if self._given:
            await asyncio.Event().wait()
        self._given = True
        return [self]

    async def ack(self) -> None:
        self.acked.set()

    async def nack(self) -> None: ...

    async def extend(self) -> None: ...

    async def aclose(self) -> None: ...


@awaited
async def test_a_consumer_tries_again_and_then_buries_it_with_the_reason(
    sqlite_home: Home, tmp_path: Path
) -> None:
    outbox = opened(sqlite_home, folder(tmp_path))
    add(outbox, sqlite_home, Message("orders", large(), id="m1"))
    (message,) = await relayed(outbox)
    store = outbox.bodies
    reference = Reference.of(message)
    assert store is not None
    assert reference is not None
    data = store.get(reference.name)
    store.delete(reference.name)
    inbox = Inbox(sqlite_home.url, consumer="c", table=sqlite_home.table, claim_check=store)
    got: list[Message] = []
    inbox.handler("orders", max_attempts=2, backoff=(0.01, 0.01))(lambda message: got.append(message))
    source = _Source(message)
    task = asyncio.create_task(inbox.consuming(source).run())
    await asyncio.wait_for(source.acked.wait(), 30)
    (letter,) = await inbox.dead_letters()
    assert (letter.attempts, "BodyMissing" in letter.reason, got) == (2, True, [])
    store.put(reference.name, data)
    await inbox.replay(["m1"])
    async with asyncio.timeout(30):
        while not got:
            await asyncio.sleep(0.01)
    assert got[0].body == large()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    inbox.close()
    outbox.close()


def test_the_header_is_semels_own(sqlite_home: Home, tmp_path: Path) -> None:
    outbox = opened(sqlite_home, folder(tmp_path))
    with pytest.raises(ConfigurationError, match="claim-check"):
        add(outbox, sqlite_home, Message("orders", 1, headers={HEADER: "a/b"}))
    with pytest.raises(ConfigurationError, match="max_body"):
        add(opened(sqlite_home, "sql", max_body=200), sqlite_home, Message("orders", large()))
    with pytest.raises(ConfigurationError, match="claim_over"):
        Outbox(sqlite_home.url, claim_check="sql", claim_over=-1)
    with pytest.raises(ConfigurationError, match="claim_check="):
        asyncio.run(sqlite_home.outbox().sweep())
    outbox.close()


def test_a_store_that_is_away_fails_the_commit(home: Home, tmp_path: Path) -> None:
    outbox = opened(home, FileBodies(tmp_path / "not" / "mounted"))
    with pytest.raises(StoreUnavailable):
        add(outbox, home, Message("orders", large()))
    assert (home.count(), home.count("_outbox_ids"), home.count("_outbox_bodies")) == (0, 0, 0)
    outbox.close()


# --------------------------------------------------------------------------------------------------- sweep
@awaited
async def test_only_orphans_are_swept(home: Home, tmp_path: Path) -> None:
    outbox = opened(home, folder(tmp_path))
    store = outbox.bodies
    assert store is not None
    add(outbox, home, Message("orders", large(), id="kept"))
    neighbour = Outbox(f"sqlite:///{tmp_path}/other.db", claim_check=store, claim_over=100)
    neighbour.create()
    with neighbour.database.engine.begin() as connection:  # type: ignore[union-attr]  # a sync engine, of a URL
        neighbour.add(connection, Message("orders", large(), id="theirs"))
    with pytest.raises(RuntimeError), Session(home.engine) as session, session.begin():
        outbox._write(session.connection(), [outbox._prepare(Message("orders", large("o"), id="lost"))])
        raise RuntimeError
    assert len(names(store, outbox)) == 2
    assert await outbox.sweep(grace=60) == 0, "younger than the grace"
    assert await outbox.sweep(grace=-5) == 1
    assert len(names(store, outbox)) == 1
    assert len(names(store, neighbour)) == 1
    await relayed(outbox)
    assert await outbox.sweep(grace=-5) == 0, "delivered, and within its retention"
    assert len(names(store, outbox)) == 1
    neighbour.close()
    outbox.close()


@pytest.mark.parametrize("kind", ["file", "sql"])
@awaited
async def test_a_body_goes_with_the_last_of_its_messages(home: Home, tmp_path: Path, kind: str) -> None:
    given = folder(tmp_path) if kind == "file" else "sql"
    outbox = opened(home, given, claim_retention=0)
    late = opened(home, given, claim_retention=604_800)  # keeps bodies for a week behind the delivery
    add(outbox, home, Message("orders", large(), id="one"))
    await forgotten(outbox)
    add(outbox, home, Message("orders", large(), id="two"))
    assert home.count("_outbox_bodies") == 2
    assert await late.sweep() == 0
    assert await outbox.sweep() == 1
    inbox = Inbox(home.url, consumer="c", table=home.table, claim_check=given)
    (message,) = await relayed(outbox)
    with Session(home.engine) as session, session.begin():
        assert inbox.process(session, message, lambda _: None) is True
    await forgotten(outbox)
    assert await outbox.sweep() == 1
    assert home.count("_outbox_bodies") == 0
    assert not [path for path in (tmp_path / "bodies").rglob("*") if path.is_file()]
    inbox.close()
    late.close()
    outbox.close()


class _Slow:
    """A folder whose removals wait to be let through."""

    def __init__(self, inner: FileBodies) -> None:
        self._inner = inner
        self.removing = threading.Event()
        self.go = threading.Event()

    def put(self, name: str, data: bytes) -> None:
        self._inner.put(name, data)

    def get(self, name: str) -> bytes:
        return self._inner.get(name)

    def delete(self, name: str) -> None:
        self.removing.set()
        assert self.go.wait(30)
        self._inner.delete(name)

    def stored(self, home: str) -> Iterator[Any]:
        return self._inner.stored(home)


def _orphan(outbox: Outbox, home: Home) -> None:
    with Session(home.engine) as session:
        session.begin()
        outbox._write(session.connection(), [outbox._prepare(Message("orders", large(), id="first"))])
        session.rollback()


def test_content_that_is_added_again_while_it_is_swept_is_there_in_the_end(
    home: Home, tmp_path: Path
) -> None:
    """The sweep is in the middle of removing it: whoever adds it waits, and stores it again."""
    store = _Slow(FileBodies(tmp_path / "bodies"))
    outbox = opened(home, store)
    _orphan(outbox, home)
    removed: list[int] = []
    sweeper = threading.Thread(target=lambda: removed.append(asyncio.run(outbox.sweep(grace=-5))))
    sweeper.start()
    assert store.removing.wait(30)
    adder = threading.Thread(target=lambda: add(outbox, home, Message("orders", large(), id="second")))
    adder.start()
    adder.join(0.2)
    assert adder.is_alive(), "did not wait for the sweep"
    store.go.set()
    adder.join(10)
    sweeper.join(10)
    assert removed == [1]
    assert home.count() == 1
    assert len(names(store, outbox)) == 1, "the body of a committed message is gone"
    outbox.close()


def test_content_that_is_being_added_is_not_swept(home: Home, tmp_path: Path) -> None:
    """Whoever adds it has not committed yet: the sweep leaves it alone (SQLite: waits)."""
    outbox = opened(home, folder(tmp_path))
    store = outbox.bodies
    assert store is not None
    _orphan(outbox, home)
    removed: list[int] = []
    sweeper = threading.Thread(target=lambda: removed.append(asyncio.run(outbox.sweep(grace=-5))))
    with Session(home.engine) as session:
        session.begin()
        outbox._write(session.connection(), [outbox._prepare(Message("orders", large(), id="second"))])
        sweeper.start()
        sweeper.join(0.3 if "sqlite" in home.url else 10)
        session.commit()
    sweeper.join(10)
    assert removed == [0]
    assert home.count() == 1
    assert len(names(store, outbox)) == 1, "the body of a committed message is gone"
    outbox.close()


def test_a_snapshot_from_before_does_not_make_a_reference_invisible(
    postgres_home: Home, tmp_path: Path
) -> None:
    """An engine with another isolation than ours: the sweep must see what was committed until it had its lock."""
    engine = postgres_home.engine.execution_options(isolation_level="REPEATABLE READ")
    outbox = Outbox(engine, table=postgres_home.table, claim_check=folder(tmp_path), claim_over=100)
    outbox.create()
    keeper = outbox._keeper
    assert keeper is not None
    _orphan(outbox, postgres_home)
    (sha,) = (name.partition("/")[2] for name in names(keeper.store, outbox))
    alone = keeper._alone

    def late(connection: Any, shas: Any) -> set[str]:
        connection.execute(text("SELECT 1"))  # a snapshot, if the isolation keeps one
        add(outbox, postgres_home, Message("orders", large(), id="second"))
        return alone(connection, shas)

    keeper._alone = late  # type: ignore[method-assign, assignment]  # to come in between
    assert asyncio.run(outbox.database.run(keeper._sweep, [sha])) == 0
    assert len(names(keeper.store, outbox)) == 1
    outbox.close()


@awaited
async def test_a_running_relay_removes_what_is_over(sqlite_home: Home, tmp_path: Path) -> None:
    outbox = opened(sqlite_home, folder(tmp_path), retention=0, claim_retention=0)
    store = outbox.bodies
    assert store is not None
    add(outbox, sqlite_home, Message("orders", large(), id="one"))
    await relayed(outbox)
    task = asyncio.create_task(Relay(outbox, {"*": Book()}).run())
    async with asyncio.timeout(30):
        while names(store, outbox):
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert sqlite_home.count("_outbox_bodies") == 0
    outbox.close()


def test_what_a_program_says_of_retention_holds_for_those_that_say_nothing(fresh_home: Home) -> None:
    first = Outbox(fresh_home.url, table=fresh_home.table, retention=3600, claim_retention=7200)
    first.create()
    silent = Outbox(fresh_home.url, table=fresh_home.table, claim_check="sql")
    silent.create()
    assert (silent.retention, silent._kept_on()) == (3600, 3600)
    other = Outbox(fresh_home.url, table=fresh_home.table, retention=60)
    with Session(fresh_home.engine) as session, session.begin():
        other.add(session, Message("orders", 1))
    late = Outbox(fresh_home.url, table=fresh_home.table)
    asyncio.run(late.database.read(lambda _: None))
    assert (other.retention, late.retention) == (60, 60)
    for outbox in (first, silent, other, late):
        outbox.close()


def test_a_damaged_file_is_repaired_by_whoever_has_the_right_bytes(tmp_path: Path) -> None:
    store = FileBodies(tmp_path / "bodies")
    data = b"x" * 1000
    name = f"home/{sha256(data).hexdigest()}"
    store.put(name, data)
    (path,) = [path for path in (tmp_path / "bodies").rglob("*") if path.is_file()]
    for damaged in (b"x" * 10, b"y" * 1000):
        path.write_bytes(damaged)
        store.put(name, data)
        assert store.get(name) == data


@awaited
async def test_a_late_copy_in_a_batch_needs_no_body(home: Home, tmp_path: Path) -> None:
    """What was handled is left out of the batch; what was not, and has no body any more, is an error of the whole batch."""
    outbox = opened(home, folder(tmp_path))
    add(outbox, home, *(Message("orders", large(word), id=f"m{word}") for word in "ab"))
    a, b = await relayed(outbox)
    inbox = Inbox(
        home.url, consumer="c", table=home.table, claim_check=FileBodies(tmp_path / "bodies"), hooks=()
    )
    inbox.create()
    got: list[Message] = []

    def tried(*messages: Message) -> int:
        with Session(home.engine) as session, session.begin():
            return int(inbox.process_batch(session, messages, got.extend))

    assert tried(a) == 1
    for path in (tmp_path / "bodies").rglob("*"):
        if path.is_file():
            path.unlink()
    small = Message("orders", {"n": 1}, id="small")
    assert tried(a, small, a) == 1
    assert [message.id for message in got] == [a.id, "small"]
    with pytest.raises(BodyMissing):
        tried(a, b, Message("orders", {"n": 2}, id="another"))
    assert (len(got), home.count("_inbox")) == (2, 2)
    inbox.close()
    outbox.close()
