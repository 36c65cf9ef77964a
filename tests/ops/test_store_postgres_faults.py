"""The PostgreSQL store when things go wrong: servers, networks, rights, loops, forks."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import re
import socket
import ssl
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import psycopg
import pytest

from semel.errors import ConfigurationError, StoreUnavailable
from semel.model import Answer, Busy, Note, Replay, Won
from semel.runtime import run_sync
from semel.store import Settings
from semel.stores import postgres
from semel.stores.postgres.errors import refused, unreachable
from semel.testing import services
from semel.testing.proxy import Proxy
from tests.ops.postgres_lab import (
    IDS,
    KINDS,
    Lab,
    ask_for,
    claim_in_child,
    database_of,
    end_of,
    hurried,
    lab,
    rows,
    scope_of,
)

Kind = tuple[str, Literal["sync", "async"]]


@pytest.fixture(params=KINDS, ids=IDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def here(kind: Kind, postgres_server: services.PostgresServer) -> Iterator[Lab]:
    with lab(postgres_server, kind) as made:
        yield made


@pytest.fixture(scope="module")
def own_server() -> Iterator[services.PostgresServer]:
    """A server that may be killed and paused."""
    with services.postgres() as server:
        yield server


@pytest.fixture
def there(kind: Kind, own_server: services.PostgresServer) -> Iterator[Lab]:
    with lab(own_server.start(), kind) as made:
        yield made


def through(proxy: Proxy, url: str, port: int) -> str:
    return url.replace(f":{port}/", f":{proxy.port}/")


# ----------------------------------------------------------------------------------------------- connections


def test_terminated_connections_cost_the_next_caller_nothing(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    store = here.open()
    ask = here.begin(store, "k")
    for number in range(3):
        assert postgres_server.terminate_connections(database=database_of(here.url)) >= 1
        if number == 0:
            (verdict,) = here.claim(store, ask_for("k"))
            assert isinstance(verdict, Busy)
        elif number == 1:
            assert here.settle(store, end_of(ask)) == [Answer.OK]
        else:
            assert here.run(store.peek(ask.scope))[0] is not None


def test_a_restart_in_the_middle_is_waited_for(there: Lab, own_server: services.PostgresServer) -> None:
    store = there.open(Settings(timeout=10.0))
    ask = there.begin(store, "k")
    own_server.kill()
    restart = threading.Thread(target=own_server.restart)
    restart.start()
    try:
        assert there.settle(store, end_of(ask, result=b"r")) == [Answer.OK]
    finally:
        restart.join()
    (verdict,) = there.claim(store, ask_for("k"))
    assert isinstance(verdict, Replay)
    assert verdict.record.result == b"r"


def test_a_server_that_is_gone_is_unavailable_in_time(
    there: Lab, own_server: services.PostgresServer
) -> None:
    store = there.open(Settings(timeout=60))
    ask = there.begin(store, "k")
    own_server.kill()
    began = time.monotonic()
    with hurried(store, 0.5):
        with pytest.raises(StoreUnavailable, match="cannot reach PostgreSQL") as caught:
            there.settle(store, end_of(ask))
        assert caught.value.__cause__ is not None
        with pytest.raises(StoreUnavailable):
            there.run(store.note(Note(ask.scope, ask.nonce, b"x")))
        with pytest.raises(StoreUnavailable):
            there.claim(store, ask_for("a"), ask_for("b"))
    assert time.monotonic() - began < 20


def test_a_paused_server_is_unavailable_in_time_and_the_late_claim_is_our_own(
    there: Lab, own_server: services.PostgresServer
) -> None:
    store = there.open(Settings(timeout=60))
    there.finish(store, "warm")
    ask = ask_for("k")
    with own_server.paused():
        began = time.monotonic()
        with hurried(store, 0.4), pytest.raises(StoreUnavailable, match="no answer in time"):
            there.claim(store, ask)
        assert time.monotonic() - began < 20
    # the claim that was given up may have run: it is granted again to its own nonce
    (verdict,) = there.claim(store, ask)
    assert isinstance(verdict, Won)


def test_an_unanswered_connect_is_given_up_in_time(there: Lab, own_server: services.PostgresServer) -> None:
    store = there.open(Settings(timeout=0.3))
    with own_server.paused():
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="does not answer"):
            there.claim(store, ask_for("k"))
        assert time.monotonic() - began < 20
    (verdict,) = there.claim(there.open(Settings(timeout=20)), ask_for("k"))
    assert isinstance(verdict, Won)


@pytest.mark.parametrize("verb", ["claim", "settle", "note", "peek"])
@pytest.mark.parametrize("fault", ["reset_before", "swallow_reply"])
def test_one_lost_request_or_reply_is_not_seen(
    here: Lab, postgres_server: services.PostgresServer, verb: str, fault: str
) -> None:
    with Proxy("127.0.0.1", postgres_server.port) as proxy:
        store = here.open(Settings(timeout=30), url=through(proxy, here.url, postgres_server.port))
        ask = here.begin(store, "k")
        here.run(store.note(Note(ask.scope, ask.nonce, b"one")))
        warm = here.finish(store, "warm")
        here.run(store.peek(warm.scope))
        rule = getattr(proxy, fault)(at=1)
        if verb == "claim":
            (verdict,) = here.claim(store, ask)
            assert isinstance(verdict, Won)
        elif verb == "settle":
            assert here.settle(store, end_of(ask)) == [Answer.OK]
        elif verb == "note":
            assert here.run(store.note(Note(ask.scope, ask.nonce, b"two"))) is Answer.OK
            record, _ = here.run(store.peek(ask.scope))
            assert record is not None
            assert record.steps == b"onetwo"
        else:
            assert here.run(store.peek(ask.scope))[0] is not None
        assert rule.fired.is_set()


def test_a_network_that_swallows_everything_is_unavailable_in_time(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    with Proxy("127.0.0.1", postgres_server.port) as proxy:
        store = here.open(Settings(timeout=60), url=through(proxy, here.url, postgres_server.port))
        here.finish(store, "warm")
        rule = proxy.blackhole(at=1)
        began = time.monotonic()
        with hurried(store, 0.4), pytest.raises(StoreUnavailable):
            here.claim(store, ask_for("k"))
        assert time.monotonic() - began < 20
        assert rule.fired.is_set()
        (verdict,) = here.claim(store, ask_for("k"))
        assert isinstance(verdict, Won)


def test_a_statement_timeout_of_the_server_is_told(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    here.finish(here.open(), "k")
    postgres_server.execute(f"alter database {database_of(here.url)} set statement_timeout = '30ms'")
    store = here.open()
    ask = here.begin(store, "k2")
    with psycopg.connect(here.url.replace("+asyncpg", "").replace("+psycopg", "")) as session:
        session.execute("lock table semel in access exclusive mode")
        with pytest.raises(StoreUnavailable, match="statement_timeout"):
            here.run(store.peek(ask.scope))
        session.rollback()
    assert here.run(store.peek(ask.scope))[0] is not None


def test_a_pool_that_is_used_up_is_told(here: Lab) -> None:
    store = here.open(Settings(timeout=20), options="?pool=1")
    here.finish(store, "k")
    home = store._talk.homes.found() if here.colour == "sync" else here.run(store._talk.homes.here())
    assert home is not None

    async def hold() -> None:
        link = await home.pool.take(time.monotonic() + 20)
        try:
            with hurried(store, 0.4), pytest.raises(StoreUnavailable, match=r"\?pool="):
                await store.peek(scope_of("k"))
        finally:
            await home.pool.give(link)

    here.run(hold())
    assert here.run(store.peek(scope_of("k")))[0] is not None


# ------------------------------------------------------------------------------------------ refused at first use


def test_an_unreachable_server_is_told_at_once(kind: Kind) -> None:
    driver, colour = kind
    here = Lab(f"postgresql+{driver}://postgres@127.0.0.1:1/none", colour)
    try:
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"cannot reach PostgreSQL at 127\.0\.0\.1:1/none"):
            here.claim(here.open(Settings(timeout=60)), ask_for("k"))
        assert time.monotonic() - began < 20
        with pytest.raises(StoreUnavailable, match=r"resolve|reach"):
            here.claim(
                here.open(url=f"postgresql+{driver}://postgres@no-such-host.invalid/none"), ask_for("k")
            )
    finally:
        here.close()


def test_a_missing_database_is_a_configuration_error(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    url = postgres_server.url_of("nowhere", driver="psycopg" if "psycopg" in here.url else "asyncpg")
    with pytest.raises(ConfigurationError, match="createdb"):
        here.claim(here.open(url=url), ask_for("k"))


@pytest.fixture(scope="module")
def guarded_server() -> Iterator[services.PostgresServer]:
    """A server that asks strangers for a password."""
    with services.postgres() as server:
        server.execute("create role guest login password 'right'")
        path = server.execute("show hba_file")[0][0]
        text = "local all postgres trust\nhost all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
        Path(path).write_text(text, "utf-8")
        server.execute("select pg_reload_conf()")
        yield server


def test_a_wrong_password_is_a_configuration_error(
    kind: Kind, guarded_server: services.PostgresServer
) -> None:
    with lab(guarded_server, kind) as here:
        with pytest.raises(ConfigurationError, match="password") as caught:
            here.claim(here.open(url=here.url.replace("postgres@", "guest:wrong@")), ask_for("k"))
        assert caught.value.__cause__ is not None
        assert "wrong@" not in str(caught.value)
        with pytest.raises(ConfigurationError, match="semel schema sql"):
            here.claim(here.open(url=here.url.replace("postgres@", "guest:right@")), ask_for("k"))
        here.finish(here.open(), "k")  # the owner creates the tables
        with pytest.raises(ConfigurationError, match="SELECT, INSERT, UPDATE, DELETE"):
            here.claim(here.open(url=here.url.replace("postgres@", "guest:right@")), ask_for("k"))
        rows(
            guarded_server,
            here.url,
            "grant select, insert, update, delete on semel, semel_audit, semel_schema to guest",
        )
        here.finish(here.open(url=here.url.replace("postgres@", "guest:right@")), "k2")


def test_tables_are_not_created_unless_allowed(here: Lab) -> None:
    with pytest.raises(ConfigurationError, match="semel schema sql"):
        here.claim(here.open(Settings(create=False)), ask_for("k"))


def test_a_newer_schema_is_refused_naming_both_versions(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    here.finish(here.open(), "k")
    rows(postgres_server, here.url, "update semel_schema set version = 7")
    with pytest.raises(ConfigurationError, match=r"version 7.*version 1"):
        here.claim(here.open(), ask_for("k"))
    rows(postgres_server, here.url, "delete from semel_schema")
    with pytest.raises(ConfigurationError, match="no schema version"):
        here.claim(here.open(), ask_for("k"))


def test_a_table_that_vanished_is_a_configuration_error(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    store = here.open()
    here.finish(store, "k")
    rows(postgres_server, here.url, "drop table semel")
    with pytest.raises(ConfigurationError, match="missing"):
        here.claim(store, ask_for("k"))


def test_a_standby_is_unavailable_not_wrong(here: Lab, postgres_server: services.PostgresServer) -> None:
    here.finish(here.open(), "k")
    name = database_of(here.url)
    postgres_server.execute(f"alter database {name} set default_transaction_read_only = on")
    store = here.open()
    (verdict,) = here.claim(store, ask_for("k"))  # what is settled is still read
    assert isinstance(verdict, Replay)
    with pytest.raises(StoreUnavailable, match="read-only"):
        here.claim(store, ask_for("k2"))
    postgres_server.execute(f"alter database {name} reset default_transaction_read_only")
    here.begin(store, "k2")  # the link to the standby was not kept


def test_too_many_connections_is_told(kind: Kind) -> None:
    config = {"max_connections": 5, "superuser_reserved_connections": 0}
    with services.postgres(config=config) as server, lab(server, kind) as here:
        with ExitStack() as others:
            for _ in range(5):
                others.enter_context(_connected(server.url))
            with pytest.raises(StoreUnavailable, match="max_connections"):
                here.claim(here.open(Settings(timeout=1.0)), ask_for("k"))
        here.finish(here.open(), "k")


def _connected(url: str) -> psycopg.Connection[Any]:
    """The connection that looked whether the server is up may still be on its way out."""
    until = time.monotonic() + 10
    while True:
        try:
            return psycopg.connect(url)
        except psycopg.OperationalError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def test_many_processes_of_both_drivers_create_the_tables_at_once(
    postgres_server: services.PostgresServer,
) -> None:
    url = postgres_server.database(driver="asyncpg")
    ways = [(url, "async"), (url.replace("+asyncpg:", "+psycopg:"), "sync")]
    context = multiprocessing.get_context("spawn")
    with context.Pool(4) as pool:
        verdicts = pool.starmap(
            claim_in_child, [(*ways[number % 2], f"k{number}") for number in range(8)], chunksize=1
        )
        pool.close()  # and not terminated: one that is killed while coverage writes may hang
        pool.join()
    assert verdicts == ["Won"] * 8


# --------------------------------------------------------------------------------------------- loops and forks


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_two_loops_in_a_row_and_none_left_open(postgres_server: services.PostgresServer, driver: str) -> None:
    url = postgres_server.database(driver=driver)
    store = postgres.open_url(url, Settings(timeout=20), "async")

    async def once(key: str) -> None:
        ask = ask_for(key)
        (verdict,) = await store.claim([ask])
        assert isinstance(verdict, Won)
        unwatch = await store.watch(ask.scope, lambda: None)
        await store.settle([end_of(ask)])
        await unwatch()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for key in ("a", "b"):
            asyncio.run(once(key))
            gc.collect()
    sql = f"select count(*) from pg_stat_activity where datname = '{database_of(url)}'"
    deadline = time.monotonic() + 5
    while postgres_server.execute(sql) != [(0,)] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert postgres_server.execute(sql) == [(0,)]


def test_loops_in_two_threads_at_once(postgres_server: services.PostgresServer) -> None:
    store = postgres.open_url(postgres_server.database(driver="asyncpg"), Settings(timeout=20), "async")
    found: list[Any] = []

    async def work(name: str) -> None:
        for number in range(30):
            found.extend(await store.claim([ask_for(f"{name}{number}")]))

    threads = [threading.Thread(target=lambda name=name: asyncio.run(work(name))) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60
    assert all(isinstance(verdict, Won) for verdict in found)


def test_a_forgotten_sync_store_closes_its_connections(postgres_server: services.PostgresServer) -> None:
    url = postgres_server.database(driver="psycopg")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = postgres.open_url(url, Settings(timeout=20), "sync")
        run_sync(store.claim([ask_for("k")]))
        del store
        gc.collect()
    sql = f"select count(*) from pg_stat_activity where datname = '{database_of(url)}'"
    deadline = time.monotonic() + 5
    while postgres_server.execute(sql) != [(0,)] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert postgres_server.execute(sql) == [(0,)]


def test_close_may_be_called_twice_and_concurrently(here: Lab) -> None:
    store = here.open()
    here.finish(store, "k")

    async def close() -> None:
        if here.colour == "async":
            await asyncio.gather(store.aclose(), store.aclose())
        await store.aclose()

    here.run(close())
    (verdict,) = here.claim(store, ask_for("k"))  # a closed store opens again on use
    assert isinstance(verdict, Replay)


def test_a_forked_child_makes_its_own_connections(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    store = here.open()
    here.finish(store, "k")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # the child: nothing of the test runner may run in it
        status = 1
        try:
            colour = store.colour
            claim = store.claim([ask_for("k")])
            verdicts = run_sync(claim) if colour == "sync" else asyncio.run(_of(claim))
            os.write(writer, type(verdicts[0]).__name__.encode())
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as file:
        told = file.read()
    assert os.waitpid(pid, 0)[1] == 0
    assert told == "Replay"
    before = rows(
        postgres_server, here.url, "select count(*) from pg_stat_activity where application_name = 'semel'"
    )
    (verdict,) = here.claim(store, ask_for("k"))  # the parent's connection was not disturbed
    assert isinstance(verdict, Replay)
    after = rows(
        postgres_server, here.url, "select count(*) from pg_stat_activity where application_name = 'semel'"
    )
    assert before == after


async def _of(claim: Any) -> Any:
    return await claim


def test_a_cancelled_caller_leaves_a_working_pool(postgres_server: services.PostgresServer) -> None:
    for driver in ("asyncpg", "psycopg"):
        store = postgres.open_url(postgres_server.database(driver=driver), Settings(timeout=20), "async")

        async def cancel(store: Any = store) -> None:
            await store.claim([ask_for("warm")])
            for number in range(30):
                task = asyncio.create_task(store.claim([ask_for(f"k{number}")]))
                for _ in range(number % 7):
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            asks = [ask_for(f"n{number}") for number in range(30)]
            for ask in asks:
                (verdict,) = await store.claim([ask])
                assert isinstance(verdict, Won)
                record, _ = await store.peek(ask.scope)
                assert record.nonce == ask.nonce

        asyncio.run(cancel())


# ------------------------------------------------------------------------------------ synchronous replication


def cancel_the_wait(server: services.PostgresServer, stop: threading.Event) -> None:
    """What an impatient operator does, once."""
    sql = "select pg_cancel_backend(pid) from pg_stat_activity where wait_event = 'SyncRep'"
    while not stop.wait(0.01):
        if server.execute(sql):
            return


def test_a_commit_that_did_not_wait_for_its_standby_is_not_a_success(kind: Kind) -> None:
    config = {"synchronous_standby_names": "ghost", "synchronous_commit": "local"}
    with services.postgres(config=config) as server, lab(server, kind) as here:
        ask = here.begin(here.open(), "k")
        server.execute(f"alter database {database_of(here.url)} set synchronous_commit = 'on'")
        store = here.open(Settings(timeout=20))
        stop = threading.Event()
        operator = threading.Thread(target=cancel_the_wait, args=(server, stop))
        operator.start()
        try:
            with pytest.raises(StoreUnavailable, match="synchronous standby"):
                here.settle(store, end_of(ask, result=b"r"))
        finally:
            stop.set()
            operator.join()
        # asked again, it is not told as recorded while that is still unknown
        with hurried(store, 0.4), pytest.raises(StoreUnavailable):
            here.settle(store, end_of(ask, result=b"r"))
        server.execute(f"alter database {database_of(here.url)} set synchronous_commit = 'local'")
        assert here.settle(store, end_of(ask, result=b"r")) == [Answer.OK]
        (verdict,) = here.claim(store, ask_for("k"))
        assert isinstance(verdict, Replay)


# ---------------------------------------------------------------------------------------- errors without a server


class Told(Exception):
    def __init__(self, sqlstate: str, text: str = "text") -> None:
        super().__init__(text)
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    "state, kind, words",
    [
        ("53100", StoreUnavailable, "resource"),
        ("57014", StoreUnavailable, "statement_timeout"),
        ("XX001", StoreUnavailable, "log"),
        ("26000", ConfigurationError, "statement_cache_size=0, psycopg: prepare_threshold=None"),
        ("42P05", ConfigurationError, "statement_cache_size=0, psycopg: prepare_threshold=None"),
        ("42601", RuntimeError, "42601"),
    ],
)
def test_each_sqlstate_has_its_meaning(state: str, kind: type[Exception], words: str) -> None:
    told = refused(Told(state), "here")
    assert isinstance(told, kind)
    assert words in str(told)
    assert isinstance(told.__cause__, Told)


def test_a_login_refused_after_it_once_worked_may_work_again() -> None:
    told, pointless = unreachable(Told("28P01", "password authentication failed"), "here", proven=True)
    assert isinstance(told, StoreUnavailable)
    assert pointless


@pytest.mark.parametrize(
    "error, words, pointless",
    [
        (ssl.SSLError("wrong version"), "sslmode", True),
        (socket.gaierror("no such name"), "DNS", True),
        (TimeoutError(), "firewall", True),
        (ConnectionRefusedError("refused"), "is the server running", True),
        (Told("57P03", "the database system is starting up"), "starting up", False),
        (Told("53300", "sorry, too many clients already"), "max_connections", False),
    ],
)
def test_each_way_not_to_connect_has_its_remedy(error: Exception, words: str, pointless: bool) -> None:
    told, found = unreachable(error, "here", proven=False)
    assert isinstance(told, StoreUnavailable)
    assert words in str(told)
    assert told.__cause__ is error
    assert found is pointless


def test_the_rights_that_the_page_names_are_enough(
    here: Lab,
) -> None:
    """docs/howto/postgres.md: for one call, and for many at once."""
    store = here.open()
    here.finish(store, "made")
    role = f"app_{uuid.uuid4().hex[:8]}"
    functions = "semel_begin, semel_begin_all, semel_enter"
    page = (Path(__file__).parents[2] / "docs/howto/postgres.md").read_text("utf-8")
    assert all(f"`{function}`" in page for function in functions.split(", "))
    with psycopg.connect(here.url.replace("+asyncpg", "").replace("+psycopg", ""), autocommit=True) as admin:
        for sql in (
            f"create role {role} login",
            f"revoke execute on function {functions} from public",
            f"grant execute on function {functions} to {role}",
            f"grant select, insert, update, delete on semel, semel_audit to {role}",
            f"grant select on semel_schema to {role}",
        ):
            admin.execute(sql)
    limited = here.open(Settings(create=False), url=re.sub(r"//[^@]*@", f"//{role}@", here.url))
    for asks in (
        [ask_for("one")],
        [ask_for("a"), ask_for("b")],
        [ask_for("c", labels={"x": "y"}), ask_for("d")],
    ):
        assert all(isinstance(verdict, Won) for verdict in here.claim(limited, *asks))
        assert here.settle(limited, *map(end_of, asks)) == [Answer.OK] * len(asks)
