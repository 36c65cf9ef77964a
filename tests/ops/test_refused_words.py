"""What is said of a server that cannot be used names the cause and the remedy; and what may have been granted before it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import psycopg
import psycopg_pool
import pytest

from semel import AsyncSemel, ConfigurationError, Semel, StoreUnavailable
from semel.losses import NotConnected, is_unsent
from semel.model import Verdict, Won
from semel.runtime import run_sync
from semel.store import Settings
from semel.stores import redis as redis_store
from semel.stores.redis.calls import Lane
from semel.stores.redis.courier import Parcel
from semel.stores.redis.errors import ServerError, hung_up, refusal, unreachable
from semel.testing import services
from tests.ops.postgres_lab import IDS, KINDS, Lab, ask_for, lab
from tests.ops.test_redis_link import tls_server

__all__ = ["tls_server"]  # the fixture

Colour = Literal["sync", "async"]


def use(source: Any, colour: Colour, **settings: Any) -> Any:
    given = {"timeout": 20} | settings
    if colour == "sync":
        with Semel(source, **given) as once:
            return once.execute("k", lambda: 1).value

    async def main() -> Any:
        async with AsyncSemel(source, **given) as once:
            return (await once.execute("k", lambda: 1)).value

    return asyncio.run(main())


# -------------------------------------------------------------------------------------------- PostgreSQL
@pytest.fixture(params=KINDS, ids=IDS)
def here(request: pytest.FixtureRequest, postgres_server: services.PostgresServer) -> Iterator[Lab]:
    with lab(postgres_server, request.param) as found:
        yield found


def _plain(here: Lab) -> str:
    return f"postgresql://{here.url.partition('://')[2]}"


@pytest.mark.services
def test_tls_that_a_postgres_does_not_speak_is_told_by_the_option_that_asks_for_it(here: Lab) -> None:
    with pytest.raises(ConfigurationError, match=r"does not speak TLS.*sslmode="):
        use(f"{here.url}?sslmode=require", here.colour)


@pytest.mark.services
def test_another_programs_table_is_told_with_the_option_that_names_another(here: Lab) -> None:
    with psycopg.connect(_plain(here)) as connection:
        connection.execute("create table semel (id int)")
    with pytest.raises(ConfigurationError, match=r"something else made it.*table="):
        use(here.url, here.colour)
    assert use(here.url, here.colour, table="other") == 1


@pytest.mark.services
@pytest.mark.parametrize(("version", "told"), [(0, "too new for them"), (99, "upgrade semel")])
def test_tables_of_another_semel_are_told_by_which_one_is_older(here: Lab, version: int, told: str) -> None:
    use(here.url, here.colour)
    with psycopg.connect(_plain(here)) as connection:
        connection.execute(f"update semel_schema set version = {version}")
    with pytest.raises(ConfigurationError, match=f"schema version {version}, .*{told}"):
        use(here.url, here.colour)


@pytest.mark.services
def test_a_pool_that_is_not_open_is_to_be_opened_first(postgres_server: services.PostgresServer) -> None:
    url = postgres_server.database()
    with pytest.raises(ConfigurationError, match="open the pool first"):
        use(psycopg_pool.ConnectionPool(url, open=False), "sync")

    async def main() -> None:
        pool = psycopg_pool.AsyncConnectionPool(url, open=False)
        async with AsyncSemel(pool) as once:
            with pytest.raises(ConfigurationError, match="open the pool first"):
                await once.execute("k", lambda: 1)
            await pool.open()
            assert (await once.execute("k", lambda: 1)).value == 1
        await pool.close()

    asyncio.run(main())


@pytest.mark.services
def test_R16_a_batch_of_which_a_part_was_granted_before_a_refused_login_is_told_as_a_loss(
    here: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key is new and granted by the first statement, the other one lapsed: its take-over is a statement of its own."""
    store = here.open()
    old = ask_for("old", lease=10.0)
    assert isinstance(here.claim(store, old)[0], Won)
    store._skew = 60.0

    async def refused(*_: Any) -> Any:
        raise NotConnected("the password is wrong")

    monkeypatch.setattr(store, "_swap", refused)
    mark = store.losses.mark
    with pytest.raises(NotConnected):
        here.claim(store, ask_for("new"), ask_for("old"))
    assert store.losses.mark is not mark
    mark = store.losses.mark
    with pytest.raises(NotConnected):
        here.claim(store, ask_for("old"))
    assert store.losses.mark is mark  # it was alone: nothing was granted


# ------------------------------------------------------------------------------------------------- Redis
@pytest.mark.parametrize(
    ("url", "example"),
    [
        ("redis:/:s3cret@host/0", "redis://localhost:6379/0"),
        ("rediss:s3cret@host", "rediss://localhost:6379/0"),
        ("redis+sentinel:/me:s3cret@host/shop", "redis+sentinel://host:26379/service/0"),
        ("valkey:/:s3cret@host?a=://b", "redis://localhost:6379/0"),
    ],
)
def test_a_redis_url_without_its_slashes_is_told_without_its_password(url: str, example: str) -> None:
    with pytest.raises(ConfigurationError) as told:
        Semel(url)
    assert str(told.value) == f"the Redis URL has no :// behind its scheme: write it as {example}"


@pytest.mark.services
@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("login", ["", "app:secret@"])
def test_a_tls_port_without_tls_is_told_with_the_scheme_that_has_it(
    tls_server: tuple[services.RedisServer, int, Path], colour: Colour, login: str
) -> None:
    with pytest.raises(StoreUnavailable, match="if it speaks TLS on this port, write rediss://"):
        use(f"redis://{login}127.0.0.1:{tls_server[1]}", colour)


def test_only_a_server_that_hung_up_may_have_wanted_tls() -> None:
    assert "rediss://" in hung_up("host:6379", ConnectionResetError(104, "reset"))
    assert "rediss://" in hung_up("host:6379", ConnectionError("Connection closed by server."))
    assert not hung_up("host:6379", ConnectionRefusedError(111, "refused"))
    assert not hung_up("/run/redis.sock", ConnectionResetError(104, "reset"))
    told, _ = unreachable("host:6379", ConnectionResetError(104, "reset"), proven=True)
    assert "rediss://" not in str(told)


@pytest.mark.parametrize(("code", "unsent"), [("NOAUTH", True), ("WRONGPASS", True), ("NOPERM", False)])
def test_a_connection_that_is_not_logged_in_has_run_nothing(code: str, unsent: bool) -> None:
    told = refusal("host:6379", ServerError(f"{code} no"))
    assert isinstance(told, ConfigurationError)
    assert is_unsent(told) is unsent


@pytest.mark.services
@pytest.mark.parametrize("tries", [0, 1])
def test_R16_a_login_refused_after_an_answer_that_was_not_now_is_told_as_a_loss(tries: int) -> None:
    """With acks= a call is several commands, of which the first may have run."""
    with services.redis(password="right") as server:
        store = redis_store.open_url(server.url.replace("right", "wrong"), Settings(timeout=20), "sync")
        link: Any = store._link
        parcel: Parcel = link._plain((b"PING",), None, Lane.MAIN, None, resend=True)
        parcel.tries = tries
        mark = link.losses.mark
        with pytest.raises(ConfigurationError, match="refused the login"):
            run_sync(link._deliver(parcel))
        assert (link.losses.mark is not mark) is bool(tries)
        run_sync(store.aclose())


@pytest.mark.services
def test_R16_a_long_record_that_is_fetched_in_vain_may_have_been_granted(
    redis_server: services.RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = redis_store.open_url(redis_server.url, Settings(prefix="long", timeout=20), "sync")

    async def refused(*_: Any, **__: Any) -> Verdict:
        raise NotConnected("the password is wrong")

    monkeypatch.setattr(store._link, "call", refused)
    mark = store.losses.mark
    with pytest.raises(NotConnected):
        run_sync(store._claim_large(ask_for("k"), 0.0))
    assert store.losses.mark is not mark
    run_sync(store.aclose())
