"""What a URL or an engine alone shows to be wrong is refused before anything connects, in words that tell the remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from semel import AsyncSemel, ConfigurationError, Semel
from semel.doctor import examine
from semel.store import Settings, open_store, schema_sql
from semel.stores.memory import MemoryStore
from semel.stores.postgres.url import parse


@pytest.mark.parametrize(
    "url", ["postgresql://", "postgresql:///", "postgres:", "postgresql:shop", "postgresql+psycopg://?pool=2"]
)
@pytest.mark.parametrize("face", [Semel, AsyncSemel])
def test_a_postgres_url_that_names_nothing_is_refused_when_the_face_is_made(
    face: Callable[..., Any], url: str
) -> None:
    with pytest.raises(ConfigurationError, match=r"neither a host nor a database: write it as postgresql://"):
        face(url)


@pytest.mark.parametrize(
    "url, dsn",
    [
        ("postgresql://?host=/tmp&dbname=shop", "postgresql://?host=%2Ftmp&dbname=shop"),
        ("postgresql://?service=shop", "postgresql://?service=shop"),
        ("postgresql:///shop", "postgresql:///shop"),
        ("postgresql+psycopg://a:b@h:1/shop?pool=2", "postgresql://a:b@h:1/shop"),
    ],
)
def test_a_postgres_url_without_a_host_is_one_where_it_names_something_else(url: str, dsn: str) -> None:
    assert parse(url, "sync").dsn == dsn


@pytest.mark.parametrize(
    "url, says",
    [
        ("nonsense", "'nonsense' is not a store URL"),
        ("", "is not a store URL"),
        ("oracle://host/db", "no store answers to the URL scheme 'oracle'"),
        ("redis-cluster://host", r"known schemes: .* redis, redis\+cluster, redis\+sentinel, rediss"),
        ("redis://host/0", "a redis store has no tables"),
        ("memory://", "a memory store has no tables"),
    ],
)
def test_the_tables_of_what_has_none_are_refused_with_the_reason(url: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        schema_sql(url, Settings())


@pytest.mark.parametrize("where", ["memory://", "redis://127.0.0.1:1/0", "sqlite:///semel.db"])
@pytest.mark.parametrize("table", ["a; drop", "", "1st", "a b", "a.b.c"])
def test_a_name_that_no_table_can_have_is_refused_everywhere(where: str, table: str) -> None:
    with pytest.raises(ConfigurationError, match="table="):
        Semel(where, table=table)


def test_a_client_in_place_of_a_url_changes_nothing_about_that() -> None:
    with pytest.raises(ConfigurationError, match="table="):
        Semel(redis.Redis(port=1), table="a; drop")
    assert open_store("memory://", Settings(table="shop.semel"), "sync").colour == "both"


@pytest.mark.parametrize(
    ("setting", "where", "says"),
    [
        ({"acks": 1}, "postgresql://host/db", "acks is a number of replicas .* a postgresql store"),
        ({"index": {"ref"}}, "memory://", "index is .* on Redis; a memory store"),
    ],
)
def test_a_setting_that_a_store_would_ignore_is_refused(
    setting: dict[str, Any], where: str, says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Semel(where, **setting)


def test_so_it_is_with_clients_and_engines(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    tried: list[tuple[Any, dict[str, Any]]] = [
        (engine, {"index": {"ref"}}),
        (engine, {"acks": 1}),
    ]
    for source, setting in tried:
        with pytest.raises(ConfigurationError, match=f"does not know {next(iter(setting))}="):
            Semel(source, **setting)
    with Semel(engine, table="shop") as once:
        assert once.execute("k", lambda: 1).value == 1


@pytest.mark.parametrize("where", ["memory://", "sqlite:///semel.db", "redis://127.0.0.1:1/0"])
def test_one_configuration_serves_every_store(where: str) -> None:
    said: dict[str, Any] = {"acks": 0, "table": "shop", "create": True, "capacity": 500}
    Semel(where, **said).close()


@pytest.mark.parametrize(
    "url",
    [
        "MYSQL://host/db",
        "MariaDB+PyMySQL://host/db",
        "PostgreSQL+psycopg://host/db",
        "SQLITE:///semel.db",
        "Redis://host:1/0",
        "REDISS://host:1",
        "Redis+Cluster://host:1,other:2",
        "Memory://",
    ],
)
def test_a_scheme_may_be_written_in_capitals(url: str) -> None:
    scheme, _, rest = url.partition(":")
    opened, small = (open_store(one, Settings(), "sync") for one in (url, f"{scheme.lower()}:{rest}"))
    assert type(opened) is type(small)


def test_the_doctor_finds_the_file_of_such_a_url(tmp_path: Path) -> None:
    url = f"SQLITE:///{tmp_path / 'shop.db'}"
    with Semel(url) as once:
        once.execute("k", int)
    assert examine(url).schema.usable


def test_an_engine_works_with_the_face_of_its_colour_on_sqlite_too(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with pytest.raises(ConfigurationError, match="AsyncEngine works with AsyncSemel only"):
        Semel(create_async_engine(f"sqlite+aiosqlite:///{path}"))
    with pytest.raises(ConfigurationError, match="Engine works with Semel only"):
        AsyncSemel(create_engine(f"sqlite:///{path}"))
    with Semel(create_engine(f"sqlite:///{path}")) as once:
        assert once.execute("k", lambda: 1).value == 1


@pytest.mark.parametrize("face", [Semel, AsyncSemel])
def test_a_class_of_stores_is_none(face: Callable[..., Any]) -> None:
    for made in (MemoryStore, redis.Redis):
        with pytest.raises(ConfigurationError, match=f"{made.__name__} is a class: make one of it"):
            face(made)


@pytest.mark.parametrize("setting", [{"acks": 1}, {"index": {"ref"}}])
def test_what_a_store_that_is_open_was_not_told_is_not_dropped(setting: dict[str, Any]) -> None:
    """Who asks for acks= and gets a write that no replica has would learn it from a failover."""
    (name,) = setting
    for store in (MemoryStore(), open_store("redis://127.0.0.1:1/0", Settings(), "sync")):
        with pytest.raises(ConfigurationError, match=rf"{name} is .* say it where the store is made"):
            Semel(store, **setting)
        assert Semel(store, table="jobs", create=False, capacity=5).enabled, "may be said to every store"
