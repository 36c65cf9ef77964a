"""User and password in a PostgreSQL URL reach both drivers as they are meant, and no message shows a piece of them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from asyncpg import connect_utils
from psycopg.conninfo import conninfo_to_dict

from semel import AsyncSemel, ConfigurationError, Semel, StoreUnavailable
from semel.stores.postgres.url import parse
from semel.testing.services.home import free_port

LOGINS = [
    ("me:plain", "me", "plain"),
    ("me:first@second", "me", "first@second"),
    ("me:a@b@c", "me", "a@b@c"),
    ("me@shop:a@b", "me@shop", "a@b"),
    ("me:p%40ss@word", "me", "p@ss@word"),  # escaped here, and not there
    ("me:100%25@", "me", "100%@"),
    ("me:100%", "me", "100%"),
    ("me:a%zz", "me", "a%zz"),
    ("me:%2540", "me", "%40"),  # an escaped escape stays one
    ("me:a:b+c&d", "me", "a:b+c&d"),
    ("me:[a]", "me", "[a]"),
    ("me:gr%C3%BCn", "me", "grün"),
    ("me:grün", "me", "grün"),
]
HOSTS = [
    ("one", ["one"], [5432]),
    ("one:5433", ["one"], [5433]),
    ("[::1]:5433", ["::1"], [5433]),
    ("one:5432,[::1]:5433", ["one", "::1"], [5432, 5433]),
]
_of_asyncpg: Any = getattr(connect_utils, "_parse_connect_dsn_and_args")  # noqa: B009 - its stubs do not name it
_UNSAID = inspect.signature(_of_asyncpg).parameters.keys() - {"dsn"}


@pytest.mark.parametrize(("login", "user", "password"), LOGINS)
@pytest.mark.parametrize(("named", "hosts", "ports"), HOSTS)
def test_a_password_ends_at_the_last_at_sign_for_both_drivers(
    login: str, user: str, password: str, named: str, hosts: list[str], ports: list[int]
) -> None:
    address = parse(f"postgresql://{login}@{named}/shop", "async")
    libpq = conninfo_to_dict(address.dsn)
    assert (libpq["user"], libpq["password"], libpq["dbname"]) == (user, password, "shop")
    assert libpq["host"] == ",".join(hosts)
    addresses, found = _of_asyncpg(dsn=address.dsn, **dict.fromkeys(_UNSAID))
    assert (found.user, found.password, found.database) == (user, password, "shop")
    assert addresses == list(zip(hosts, ports, strict=True))
    assert login not in address.where


@pytest.mark.parametrize(
    "netloc", ["one", "me@one", "me:@one", ":secret@one", "@one", "me:s%40t@one:5432,[::1]:5433"]
)
def test_a_url_with_nothing_to_escape_is_left_as_it_is(netloc: str) -> None:
    assert parse(f"postgresql://{netloc}/shop", "sync").dsn == f"postgresql://{netloc}/shop"


@pytest.mark.parametrize("password", ["first@geheim", "geheim%zz", "geheim@", "[geheim"])
@pytest.mark.parametrize("face", [Semel, AsyncSemel])
def test_no_message_shows_a_piece_of_the_password(face: Callable[..., Any], password: str) -> None:
    url = f"postgresql://me:{password}@127.0.0.1:{free_port()}/shop"
    with pytest.raises(
        StoreUnavailable, match=r"127\.0\.0\.1:\d+/shop .*refused|Connect call failed"
    ) as told:
        asyncio.run(_used(face, url))
    assert "geheim" not in str(told.value)


async def _used(face: Callable[..., Any], url: str) -> None:
    if face is AsyncSemel:
        async with AsyncSemel(url, timeout=0.5) as once:
            await once.execute("k", int)
        return
    await asyncio.to_thread(_used_plainly, url)


def _used_plainly(url: str) -> None:
    with Semel(url, timeout=0.5) as once:
        once.execute("k", int)


@pytest.mark.parametrize(
    "url", ["postgresql://me:geheim%00@one/shop", "postgresql://one/shop?password=geheim%00"]
)
def test_a_zero_byte_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigurationError, match="leave %00 out") as told:
        parse(url, "sync")
    assert "geheim" not in str(told.value)


def test_a_password_that_is_no_text_keeps_its_bytes() -> None:
    assert parse("postgresql://me:%E9%FF@one/shop", "sync").dsn == "postgresql://me:%E9%FF@one/shop"
