"""What the doctor says stops semel does stop it: a program hears the same words at its first call."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from semel import AsyncSemel, ConfigurationError, Semel, SemelWarning, StoreUnavailable
from semel.doctor import examine, judge
from semel.testing import services
from tests.ops.doctor_lab import doctor, doctor_data

pytestmark = pytest.mark.services


def wait_until(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def first_call(url: str, colour: str, **settings: Any) -> object:
    if colour == "sync":
        with Semel(url, **settings) as once:
            return once.execute("first", lambda: 1).value

    async def called() -> object:
        async with AsyncSemel(url, **settings) as once:
            return (await once.execute("first", lambda: 1)).value

    return asyncio.run(called())


@contextmanager
def replicated(replicas: int, *, read_only: str = "yes") -> Iterator[list[services.RedisServer]]:
    """A master and those who follow it."""
    config = {"replica-read-only": read_only}
    servers = [services.redis(appendonly="always", config=config) for _ in range(1 + replicas)]
    try:
        master = servers[0]
        for replica in servers[1:]:
            replica.command("REPLICAOF", master.host, master.port)
        for replica in servers[1:]:
            wait_until(
                lambda replica=replica: replica.info("replication").get("master_link_status") == "up",  # type: ignore[misc]  # mypy knows no lambda with a default
                "the replica follows",
            )
        wait_until(lambda: master.info("replication")["connected_slaves"] == replicas, "the master knows it")
        yield servers
    finally:
        for server in servers:
            server.close()


# --------------------------------------------------------------------------------------------------- Redis
@pytest.mark.parametrize("read_only", ["yes", "no"])
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_redis_replica_is_refused_at_the_first_call(colour: str, read_only: str) -> None:
    with replicated(1, read_only=read_only) as (_, replica):
        begun = time.monotonic()
        with pytest.raises(
            StoreUnavailable, match=r"this server is a replica .* point the URL to the master"
        ):
            first_call(replica.url, colour, settle_timeout=0.1)
        assert time.monotonic() - begun < 1.5, "it is told, not waited for"
        assert replica.command("DBSIZE") == 0
        problems = examine(replica.url).problems
        assert len(problems) == 1, "it is said once"
        replica.command("REPLICAOF", "NO", "ONE")
        assert first_call(replica.url, colour) == 1, "once it is a master, it is used"


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_url_that_leads_to_a_sentinel_is_told_how_to_name_its_master(
    redis_sentinel: services.RedisSentinel, colour: str
) -> None:
    host, port = redis_sentinel.addresses[0]
    with pytest.raises(ConfigurationError, match=r"is a Redis Sentinel.*redis\+sentinel://"):
        first_call(f"redis://{host}:{port}", colour)


def test_a_replica_that_a_failover_makes_the_master_is_used_by_the_next_call() -> None:
    with replicated(1) as (_, replica), Semel(replica.url) as once:
        with pytest.raises(StoreUnavailable, match="this server is a replica"):
            once.execute("k", lambda: 1)
        replica.command("REPLICAOF", "NO", "ONE")
        assert once.execute("k", lambda: 1).value == 1


def test_a_master_that_becomes_a_replica_under_a_program_is_a_trouble_that_passes() -> None:
    with replicated(1) as (master, replica), Semel(master.url, timeout=0.5) as once:
        once.execute("before", lambda: 1)
        replica.command("REPLICAOF", "NO", "ONE")
        master.command("REPLICAOF", replica.host, replica.port)
        with pytest.raises(StoreUnavailable, match=r"READONLY.*Point the URL to the master"):
            once.execute("meanwhile", lambda: 1)
        master.command("REPLICAOF", "NO", "ONE")
        assert once.execute("after", lambda: 1).value == 1


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_user_who_may_not_ask_about_eviction_is_warned(colour: str) -> None:
    with services.redis(config={"maxmemory": "50mb", "maxmemory-policy": "allkeys-lru"}) as server:
        server.command("ACL", "SETUSER", "blind", "on", ">pass", "~*", "&*", "+@all", "-info")
        url = server.url.replace("://", "://blind:pass@")
        with pytest.warns(SemelWarning, match=r"\+info"):
            assert first_call(url, colour) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert first_call(f"{url}?eviction=accept", colour) == 1, "who accepts it need not know"
            assert "cannot tell" in doctor(url, code=2), "the doctor says it in its own words"


def test_where_warnings_are_errors_the_first_call_says_it_and_the_next_one_works() -> None:
    with services.redis() as server:
        server.command("ACL", "SETUSER", "blind", "on", ">pass", "~*", "&*", "+@all", "-info")
        with warnings.catch_warnings(), Semel(server.url.replace("://", "://blind:pass@")) as once:
            warnings.simplefilter("error")
            with pytest.raises(SemelWarning, match=r"\+info"):
                once.execute("k", lambda: 1)
            assert once.execute("k", lambda: 1).value == 1


def test_a_policy_that_does_nothing_yet_is_a_note() -> None:
    with services.redis(appendonly="always", config={"maxmemory-policy": "allkeys-lru"}) as server:
        data = doctor_data(server.url, "--require", "exactly-once", code=0)
        assert data["guarantee"]["warnings"] == []
        assert any("harmless until somebody sets maxmemory" in note for note in data["advice"])


def test_more_acks_than_replicas_stop_semel_and_fewer_are_told_how_many() -> None:
    with replicated(2) as (master, *_):
        assert any("set acks=2" in text for text in examine(master.url).guarantee.warnings)
        assert not any("acks" in text for text in doctor_data(master.url, "--acks", "2", code=0)["problems"])
        page = doctor(master.url, "--acks", "3", code=2)
        assert "acks=3, but 2 replicas are connected: every call would fail" in page
        with (
            Semel(master.url, acks=3, timeout=4) as once,
            pytest.raises(StoreUnavailable, match="connect 3 replicas, or lower acks="),
        ):
            once.execute("k", lambda: 1)
    with services.redis(appendonly="always") as alone:
        assert "acks=1, but no replicas are connected" in doctor(alone.url, "--acks", "1", code=2)


def test_a_node_of_a_cluster_is_named_as_one(redis_cluster: services.RedisCluster) -> None:
    node = redis_cluster.url.replace("redis+cluster://", "redis://").split(",")[0].rstrip("/")
    page = doctor(node, code=2)
    assert "write redis+cluster:// in the URL" in page
    assert "CROSSSLOT" not in page


# ---------------------------------------------------------------------------------------------- PostgreSQL
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_unlogged_tables_are_refused_at_the_first_call(
    colour: str, postgres_server: services.PostgresServer
) -> None:
    url = postgres_server.database()
    name = urlsplit(url).path[1:]
    assert first_call(url, colour) == 1
    postgres_server.execute("ALTER TABLE semel SET UNLOGGED", database=name)
    with pytest.raises(ConfigurationError, match="UNLOGGED, a crash of the server empties them") as refused:
        first_call(url, colour)
    mend = "ALTER TABLE semel SET LOGGED"
    assert str(refused.value).endswith(mend)
    problems = examine(url).problems
    assert len(problems) == 1, "it is said once"
    postgres_server.execute(mend, database=name)
    assert first_call(url, colour) == 1


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_temporary_tables_are_refused_as_what_they_are(
    colour: str, postgres_server: services.PostgresServer
) -> None:
    url = postgres_server.database()
    joint = "&" if "?" in url else "?"
    with pytest.raises(ConfigurationError, match="are temporary, no other connection sees them") as refused:
        first_call(f"{url}{joint}search_path=pg_temp", colour)
    assert "UNLOGGED" not in str(refused.value)


def test_a_postgres_role_that_may_only_read_is_told_what_to_grant() -> None:
    with services.postgres(fsync=True) as server:
        url = server.database()
        name = urlsplit(url).path[1:]
        first_call(url, "sync")
        server.execute("CREATE ROLE reader LOGIN")
        server.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader", database=name)
        parts = urlsplit(url)
        reader = f"postgresql://reader@{parts.hostname}:{parts.port}{parts.path}"
        checkup = examine(reader)
        assert judge(checkup).code == 2
        remedy = checkup.problems[0].partition(": ")[2]
        assert remedy == "GRANT DELETE, INSERT, UPDATE ON semel, semel_audit TO reader"
        server.execute(remedy, database=name)
        assert judge(examine(reader)).code == 0
        assert first_call(reader, "sync") == 1


# ------------------------------------------------------------------------------------------------- MariaDB
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_tables_without_transactions_are_refused_at_the_first_call(
    colour: str, mariadb_server: services.MariaServer
) -> None:
    url = mariadb_server.database()
    name = urlsplit(url).path[1:]
    assert first_call(url, colour) == 1
    mariadb_server.execute("ALTER TABLE semel ENGINE=Aria", database=name)
    mend = "ALTER TABLE `semel` ENGINE=InnoDB"
    with pytest.raises(ConfigurationError, match=f"not InnoDB .semel=Aria.: {mend}"):
        first_call(url, colour)
    problems = examine(url).problems
    assert len(problems) == 1, "it is said once"
    mariadb_server.execute(mend, database=name)
    assert first_call(url, colour) == 1


def test_a_mariadb_user_who_may_only_read_is_told_what_to_grant(
    mariadb_server: services.MariaServer,
) -> None:
    url = mariadb_server.database()
    parts = urlsplit(url)
    name = parts.path[1:]
    first_call(url, "sync")
    mariadb_server.execute(f"CREATE USER reader_{name}@'%' IDENTIFIED BY 'pass'")
    mariadb_server.execute(f"GRANT SELECT ON {name}.* TO reader_{name}@'%'")
    reader = f"mysql://reader_{name}:pass@{parts.hostname}:{parts.port}/{name}"
    checkup = examine(reader)
    assert judge(checkup).code == 2
    assert "GRANT SELECT, INSERT, UPDATE, DELETE on semel's tables" in checkup.problems[0]
    mariadb_server.execute(f"GRANT INSERT, UPDATE, DELETE ON {name}.* TO reader_{name}@'%'")
    assert judge(examine(reader)).code == 0
    assert first_call(reader, "sync") == 1
