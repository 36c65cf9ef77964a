"""What the doctor must not be deceived by: replicas, standbys that nobody waits for, tables that keep nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import pytest

from semel import ConfigurationError, Semel
from semel.doctor import examine, judge
from semel.testing import services
from semel.testing.services.postgres import PostgresStandby
from tests.ops.doctor_lab import agree, doctor, doctor_data

pytestmark = pytest.mark.services


def wait_until(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.02)


# --------------------------------------------------------------------------------------------------- Redis
@pytest.mark.parametrize("read_only", ["yes", "no"])
def test_a_redis_replica_promises_nothing_whether_it_takes_writes_or_not(read_only: str) -> None:
    config = {"replica-read-only": read_only}
    with (
        services.redis(appendonly="always") as master,
        services.redis(appendonly="always", config=config) as replica,
    ):
        replica.command("REPLICAOF", master.host, master.port)
        wait_until(
            lambda: replica.info("replication").get("master_link_status") == "up", "the replica follows"
        )
        checkup = examine(replica.url)
        assert checkup.guarantee.settings["role"] == "slave"
        assert not checkup.exactly_once
        assert not checkup.durable
        assert "stops semel: this server is a replica" in doctor(replica.url, code=2)
        for requirement in ("exactly-once", "durable"):
            doctor(replica.url, "--require", requirement, code=1)
        with Semel(replica.url) as once:
            assert once.guarantee() == checkup.guarantee
            assert any("point the URL to the master" in text for text in once.guarantee().warnings)
        assert examine(master.url).guarantee.settings["role"] == "master"
        assert not examine(master.url).problems


def test_sentinel_and_cluster_name_masters_and_are_not_taken_for_replicas(
    redis_sentinel: services.RedisSentinel, redis_cluster: services.RedisCluster
) -> None:
    for url in (redis_sentinel.url, redis_cluster.url):
        checkup = examine(url)
        assert checkup.guarantee.settings["role"] == "master"
        assert not checkup.problems
        assert not any("replica:" in text for text in checkup.guarantee.warnings)


# ---------------------------------------------------------------------------------------------- PostgreSQL
@contextmanager
def two_standbys() -> Iterator[services.PostgresServer]:
    with (
        services.postgres(fsync=True) as server,
        PostgresStandby(server).open(),
        PostgresStandby(server).open(),
    ):
        yield server


def wait_for(server: services.PostgresServer, names: str, *states: str) -> None:
    """Set which standbys are waited for, and wait until the server sees them so."""
    server.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
    server.execute("SELECT pg_reload_conf()")
    asked = "SELECT sync_state FROM pg_stat_replication WHERE state = 'streaming' ORDER BY 1"
    wait_until(lambda: [state for (state,) in server.execute(asked)] == list(states), f"{names}: {states}")


def test_a_second_standby_that_no_commit_waits_for_is_told_with_the_setting_that_mends_it() -> None:
    with two_standbys() as server:
        url = server.database()
        wait_for(server, "*", "potential", "sync")
        checkup = examine(url)
        assert checkup.durable, "power loss is another matter than failover"
        assert not checkup.exactly_once
        page = doctor(url, "--require", "exactly-once", code=1)
        assert "1 of 2 standbys not waited for" in page
        assert "ALTER SYSTEM SET synchronous_standby_names = 'FIRST 2 (*)'" in page

        wait_for(server, "ANY 1 (*)", "quorum", "quorum")
        page = doctor(url, "--require", "exactly-once", code=1)
        assert "waits for 1 of 2 standbys" in page

        wait_for(server, "FIRST 2 (*)", "sync", "sync")
        assert agree(url).exactly_once, "what the doctor says to set makes it content"

        server.execute("CREATE ROLE plain LOGIN")
        parts = urlsplit(url)
        server.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO plain", database=parts.path[1:])
        plain = f"postgresql://plain@{parts.hostname}:{parts.port}{parts.path}"
        unseen = examine(plain)
        assert not unseen.exactly_once
        assert "GRANT pg_read_all_stats" in unseen.guarantee.warnings[0]
        assert "cannot tell: this user may not see" in doctor(plain, "--require", "exactly-once", code=2)
        server.execute("GRANT pg_read_all_stats TO plain")
        assert examine(plain).exactly_once


def test_a_logical_subscriber_is_no_standby() -> None:
    with services.postgres(fsync=True, config={"wal_level": "logical"}) as server:
        import psycopg

        server.execute("SELECT pg_create_logical_replication_slot('feed', 'pgoutput')")
        server.execute("CREATE PUBLICATION feed FOR ALL TABLES")
        url = server.url_of("postgres")
        with psycopg.Connection.connect(url, replication="database", autocommit=True) as wire:
            options = b"(proto_version '1', publication_names 'feed')"
            wire.pgconn.send_query(b"START_REPLICATION SLOT feed LOGICAL 0/0 " + options)
            seen = "SELECT count(*) FROM pg_stat_replication"
            wait_until(lambda: server.execute(seen) == [(1,)], "the subscriber came")
            checkup = examine(url)
            assert checkup.guarantee.settings["standbys"] == "0"
            assert checkup.exactly_once
            wire.pgconn.finish()


@pytest.mark.parametrize("table", ["semel", "app.semel"])
def test_unlogged_tables_of_postgres_are_no_tables_for_records(table: str) -> None:
    import psycopg

    with services.postgres(fsync=True) as server:
        url = server.database()
        with psycopg.connect(url, autocommit=True) as db:
            db.execute("CREATE SCHEMA app")
            with Semel(url, table=table) as once:
                once.execute("k", lambda: 1)
                assert once.guarantee().exactly_once
                db.execute(f"ALTER TABLE {table} SET UNLOGGED".encode())
                db.execute(f"ALTER TABLE {table}_audit SET UNLOGGED".encode())
                weak = once.guarantee()
            data = doctor_data(url, "--table", table, code=2)
            assert weak.rows["tx"]["crash"] == data["guarantee"]["rows"]["tx"]["crash"] == "at least once"
            assert data["guarantee"]["warnings"] == list(weak.warnings)
            with Semel(url, table=table) as late, pytest.raises(ConfigurationError, match="SET LOGGED"):
                late.guarantee()
            mend = f"ALTER TABLE {table} SET LOGGED; ALTER TABLE {table}_audit SET LOGGED"
            assert mend in data["problems"][0]
            assert mend in weak.warnings[0]
            for requirement in ("exactly-once", "durable"):
                doctor(url, "--table", table, "--require", requirement, code=1)
            db.execute(mend.encode())
            doctor(url, "--table", table, "--require", "exactly-once", code=0)


# ------------------------------------------------------------------------------------------------- MariaDB
@pytest.mark.parametrize(
    "engine, tables, driver",
    [
        ("Aria", ("semel", "semel_audit"), ""),
        ("MyISAM", ("semel_audit",), "pymysql"),
    ],  # MyISAM refuses the long keys
)
def test_mariadb_tables_of_another_engine_are_no_tables_for_records(
    engine: str, tables: tuple[str, ...], driver: str
) -> None:
    with services.mariadb(fsync=True) as server:
        name = urlsplit(server.database()).path[1:]
        url = server.url_of(name, driver=driver)
        assert examine(url).exactly_once
        with Semel(server.url_of(name)) as once:
            once.execute("k", lambda: 1)
            assert once.guarantee().exactly_once
            for table in tables:
                server.execute(f"ALTER TABLE {table} ENGINE={engine}", database=name)
            weak = once.guarantee()
        checkup = examine(url)
        assert checkup.guarantee == weak
        assert "tx" in weak.absent
        assert weak.rows["hold"]["crash"] == "may repeat"
        assert weak.rows["keyed"]["crash"] == "exactly once"
        assert judge(checkup).code == 2
        mend = "; ".join(f"ALTER TABLE `{table}` ENGINE=InnoDB" for table in tables)
        assert mend in weak.warnings[0]
        page = doctor(url, "--require", "durable", code=1)
        assert "stops semel: semel's tables are not InnoDB (semel" in page
        assert f"): {mend}" in page
        assert "not transactional" in doctor(url, "--require", "exactly-once", code=1)
        for statement in mend.split("; "):
            server.execute(statement, database=name)
        doctor(url, "--require", "exactly-once", code=0)


def test_mariadb_waits_for_one_of_two_replicas_and_the_other_may_take_over() -> None:
    config: dict[str, str | int] = {
        "log-bin": "binlog",
        "binlog-format": "ROW",
        "sync-binlog": 1,
        "log-slave-updates": 1,
        "rpl-semi-sync-master-timeout": 86_400_000,
        "rpl-semi-sync-master-wait-point": "AFTER_SYNC",
    }
    with ExitStack() as stack:
        primary, first, second = (
            stack.enter_context(services.mariadb(fsync=True, config={**config, "server-id": number}))
            for number in (1, 2, 3)
        )
        url = primary.database()
        once = stack.enter_context(Semel(url))
        once.execute("both", lambda: 1)
        first.follow(primary, semi_sync=True)
        assert agree(url).exactly_once
        second.follow(primary, semi_sync=True)
        weak = agree(url)
        assert not weak.exactly_once
        assert weak.durable, "power loss is another matter than failover"
        assert "loss" in weak.guarantee.exposed
        page = doctor(url, "--require", "exactly-once", code=1)
        assert (
            "2 replicas (or other readers of the binary log) follow, and a commit waits for 1 of them" in page
        )
        assert "let one replica follow this server and the others follow that one" in page

        second.execute("STOP SLAVE")
        once.execute("one", lambda: 1)  # it is so: this is acknowledged, and the second has never heard of it
        known = second.execute("SELECT `key` FROM semel", database=urlsplit(url).path[1:])
        assert known == (("both",),)

        second.follow(first)
        wait_until(lambda: examine(url).guarantee.settings["replicas"] == "1", "the second has left")
        assert agree(url).exactly_once, "what the doctor says to do makes it content"


def test_mariadb_that_has_given_its_replica_up_is_told() -> None:
    config: dict[str, str | int] = {
        "log-bin": "binlog",
        "sync-binlog": 1,
        "rpl-semi-sync-master-timeout": 100,
        "rpl-semi-sync-master-wait-point": "AFTER_SYNC",
    }
    with (
        services.mariadb(fsync=True, config={**config, "server-id": 1}) as primary,
        services.mariadb(config={**config, "server-id": 2}) as replica,
    ):
        url = primary.database()
        replica.follow(primary, semi_sync=True)
        primary.execute("SET GLOBAL rpl_semi_sync_master_timeout = 86400000")
        assert examine(url).exactly_once
        primary.execute("SET GLOBAL rpl_semi_sync_master_timeout = 100")
        replica.pause()
        primary.execute("CREATE TABLE t (i INT)", database=urlsplit(url).path[1:])
        primary.execute("SET GLOBAL rpl_semi_sync_master_timeout = 86400000")
        checkup = examine(url)
        replica.resume()
        assert not checkup.exactly_once
        assert "rpl_semi_sync_master_status=OFF" in checkup.guarantee.warnings[0]
        wait_until(lambda: examine(url).exactly_once, "the replica has caught up")
