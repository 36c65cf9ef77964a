"""URLs of stores that name several servers, some of them in brackets, on the strictest Python; and what is wrong with a URL is said
without its password."""

from __future__ import annotations

import secrets

import pytest

from semel import ConfigurationError, Semel, doctor, hosts
from semel.store import Settings, open_store
from semel.stores.postgres.url import parse as parse_postgres
from semel.stores.redis.address import read_target
from semel.testing import services
from semel.testing.services import home
from tests.pythons import strict_urlsplit

LISTS = [
    ("[::1]:7000,[::1]:7001", [("::1", 7000), ("::1", 7001)]),
    ("one:7000,[::1]", [("one", 7000), ("::1", None)]),
    ("[::1],two:7001", [("::1", None), ("two", 7001)]),
    ("[fe80::1]:7000, [::2]:7001,three", [("fe80::1", 7000), ("::2", 7001), ("three", None)]),
]


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "urlsplit", strict_urlsplit)
    monkeypatch.setattr("redis.connection.urlparse", strict_urlsplit)


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(("named", "nodes"), LISTS)
@pytest.mark.parametrize(
    ("scheme", "end", "port"),
    [
        ("redis+cluster", "", 6379),
        ("rediss+cluster", "/0", 6379),
        ("redis+sentinel", "/main/2", 26379),
        ("rediss+sentinel", "/main", 26379),
    ],
)
def test_several_servers_are_named_in_any_order_and_in_brackets(
    named: str, nodes: list[tuple[str, int | None]], scheme: str, end: str, port: int
) -> None:
    target = read_target(f"{scheme}://me:s%40t@{named}{end}?client_name=x", "sync")
    assert [(seed.host, seed.port) for seed in target.seeds] == [(host, each or port) for host, each in nodes]
    assert (target.settings["username"], target.settings["password"]) == ("me", "s@t")
    assert target.settings["client_name"] == "x"
    assert target.service == ("main" if "sentinel" in scheme else "")
    assert target.settings.get("db", 0) == (2 if end.endswith("2") else 0)
    open_store(f"{scheme}://{named}{end}", Settings(), "sync")


@pytest.mark.usefixtures("strict")
def test_the_servers_of_a_postgresql_are_left_to_its_driver() -> None:
    url = "postgresql+psycopg://me:s%40t@one:5432,[::1]:5433/shop?target_session_attrs=read-write"
    assert parse_postgres(url, "sync").dsn == url.replace("+psycopg", "")
    assert parse_postgres(url, "sync").where == "one:5432,[::1]:5433/shop"
    open_store(url, Settings(), "sync")


@pytest.mark.usefixtures("strict")
def test_a_cluster_is_found_and_examined_by_a_node_in_brackets(redis_cluster: services.RedisCluster) -> None:
    host, port = redis_cluster.addresses[0]
    url = f"redis+cluster://{host}:{home.free_port()},[::ffff:{host}]:{port}"
    with Semel(url) as once:
        key = secrets.token_hex(4)
        assert once.execute(key, int, "7").value == 7
        assert once.execute(key, int, "7").replayed
    assert doctor.examine(url).guarantee.store in {"redis", "valkey"}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis+cluster://one:1,[::1/0", "number 2 of the hosts in the URL is no host:port"),
        ("redis+cluster://me:[geheim@one:1,two:2", r"\[ as %5B"),
        ("redis://me:[geheim]@one:1", r"\[ as %5B"),
        ("redis://me:geheim/x@one:1", "/ as %2F"),
        ("redis://:1/geheim@one", "/ as %2F"),
        ("postgresql://me:geheim/x@one/shop", "/ as %2F"),
        ("mysql://me:geheim/x@one/shop", "/ as %2F"),
        ("mysql://me:[geheim]@one/shop", r"\[ as %5B"),
    ],
)
def test_what_cannot_be_meant_is_refused_without_a_word_of_the_password(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        open_store(url, Settings(), "sync")
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("redis+cluster://one:1,[::1]:2/0", "redis+cluster"),
        ("SQLite:///a.db", "sqlite"),
        ("memory:", "memory"),
        ("semel.db", ""),
        ("folder//semel.db", ""),
        ("", ""),
    ],
)
def test_a_scheme_is_found_whatever_follows_it(url: str, scheme: str) -> None:
    assert hosts.scheme_of(url) == scheme
