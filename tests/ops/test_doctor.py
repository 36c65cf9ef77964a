"""`semel doctor` reads real servers, strong and weak, says the same as once.guarantee(), and changes nothing."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from semel import ConfigurationError, Semel, StoreUnavailable
from semel.doctor import examine, judge
from semel.doctor.advice import advice_for
from semel.store import Facts, Settings
from semel.stores.mysql.server import facts_of
from semel.testing import services
from tests.ops.doctor_lab import agree, doctor, doctor_data, told


# -------------------------------------------------------------------------------------------------- SQLite
@pytest.fixture
def file(tmp_path: Path) -> Path:
    with Semel(f"sqlite:///{tmp_path / 'semel.db'}") as once:
        once.execute("k", lambda: 1)
    return tmp_path / "semel.db"


def test_a_file_is_exactly_once_and_the_command_says_so(file: Path) -> None:
    checkup = agree(f"sqlite:///{file}")
    on_disk = checkup.guarantee.settings["file_system"] not in ("tmpfs", "ramfs")
    assert checkup.exactly_once is checkup.durable is on_disk
    assert checkup.schema.state == "present"
    page = doctor(f"sqlite:///{file}", "--require", "exactly-once", code=0 if on_disk else 1)
    assert "not here: 2pc: comes with streams" in page
    assert "keyed: exactly once while the service remembers the key" in page
    assert "probe: exactly once if the probe is authoritative" in page
    assert "schema version 1" in page
    assert "none needs attention" in page


def test_the_doctor_leaves_a_foreign_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE orders (id)")
    db.close()
    before = path.read_bytes()
    checkup = examine(f"sqlite:///{path}")
    assert checkup.schema.state == "missing"
    assert judge(checkup).code == 0, "tables are made at the first use"
    assert any("journal_mode of the file is delete: semel switches it" in note for note in checkup.advice)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["shop.db"]
    with Semel(f"sqlite:///{path}") as once:
        assert once.guarantee() == checkup.guarantee, (
            "the doctor says before the first use what a face says after it"
        )
    assert not any("journal_mode" in note for note in examine(f"sqlite:///{path}").advice)


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    page = doctor(f"sqlite:///{tmp_path / 'none.db'}", code=2)
    assert "there is no file" in page
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_a_folder_that_is_not_there_is_told_as_the_program_hears_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'nope' / 'semel.db'}"
    page = doctor(url, code=2)
    assert "makes it" not in page
    with pytest.raises(ConfigurationError) as heard, Semel(url) as once:
        once.execute("k", lambda: 1)
    assert page == f"semel: {heard.value}\n"


def test_something_that_is_no_database_cannot_be_told(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but long enough to be looked at " * 100)
    assert "semel: " in doctor(f"sqlite:///{path}", code=2)


@pytest.mark.parametrize("version, state", [(99, "newer"), (0, "older")])
def test_tables_of_another_version_stop_semel(file: Path, version: int, state: str) -> None:
    with sqlite3.connect(file) as db:
        db.execute("UPDATE semel_schema SET version = ?", (version,))
    db.close()
    checkup = examine(f"sqlite:///{file}")
    assert (checkup.schema.state, checkup.schema.version) == (state, version)
    assert not checkup.attention.read
    assert judge(checkup).code == 2
    assert "stops semel" in told(checkup)


def leave_behind(file: Path, key: str) -> None:
    """A process claims the key for 50 ms and dies, as under SIGKILL; returns when the lease is over."""
    program = f"""
import os
from semel import Semel
Semel("sqlite:///{file}", lease=0.05).claim("{key}").__enter__()
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    until = time.monotonic() + 10
    while not examine(f"sqlite:///{file}").attention.abandoned:
        assert time.monotonic() < until, "the lease does not end"


def test_records_that_need_attention_are_counted(file: Path) -> None:
    def fail() -> None:
        raise ValueError("no")

    leave_behind(file, "gone")
    with Semel(f"sqlite:///{file}") as once:
        with pytest.raises(ValueError):
            once.execute("failed", fail, on_error="replay")
        with pytest.raises(ValueError):
            once.execute("held", fail, on_error="hold")
        with once.claim("busy", lease=60) as claim:
            checkup = examine(f"sqlite:///{file}")
            claim.complete(1)
    found = checkup.attention
    assert (found.unknown, found.failed, found.abandoned, found.running) == (1, 1, 1, 1)
    assert "3 need attention (1 unknown, 1 failed, 1 abandoned), 1 running" in told(checkup)


def test_counting_ends(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.doctor.looks._MOST", 2)
    monkeypatch.setattr("semel.doctor.looks._PAGE", 1)
    with Semel(f"sqlite:///{file}") as once:
        for number in range(4):
            with pytest.raises(ZeroDivisionError):
                once.execute(f"held-{number}", lambda: 1 // 0, on_error="hold")
    found = examine(f"sqlite:///{file}").attention
    assert found.more
    assert found.unknown == 2


@pytest.mark.parametrize("typo", ["exactly_once", "Durable", ""])
def test_a_requirement_that_nobody_knows_is_not_judged(typo: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"'exactly-once' or 'durable', not {typo!r}"):
        judge(examine("memory://"), typo)


def test_a_directory_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="it is a directory; name a file in it"):
        examine(f"sqlite:///{tmp_path}")


def test_inside_an_event_loop_the_other_function_is_named() -> None:
    async def main() -> None:
        examine("memory://")

    with pytest.raises(ConfigurationError, match=r"await examine_async\(url\)"):
        asyncio.run(main())


def test_memory_is_weaker_than_required_and_shows_no_row_that_it_does_not_have() -> None:
    assert judge(examine("memory://")).code == 0
    page = told(examine("memory://"))
    assert "\n  tx " not in page
    assert "not here: tx: memory has no transaction that an effect could join" in page
    assert doctor_data("memory://", "--require", "durable", code=1)["durable"] is False


# --------------------------------------------------------------------------------------------------- Redis
@pytest.mark.services
def test_redis_with_every_write_on_disk_is_exactly_once() -> None:
    with services.redis(appendonly="always") as server:
        checkup = agree(server.url)
        assert checkup.exactly_once
        assert checkup.durable
        assert checkup.guarantee.warnings == ()
        assert "exactly-once holds" in doctor(server.url, "--require", "exactly-once", code=0)


@pytest.mark.services
@pytest.mark.parametrize("appendonly, remedy", [("no", "appendonly yes"), ("everysec", "appendfsync always")])
def test_redis_that_flushes_late_is_refused_with_the_setting_that_mends_it(
    appendonly: Any, remedy: str
) -> None:
    with services.redis(appendonly=appendonly) as server:
        checkup = agree(server.url)
        assert not checkup.exactly_once
        assert judge(checkup).code == 0, "informative unless something is required"
        page = doctor(server.url, "--require", "exactly-once", code=1)
        assert f"CONFIG SET {remedy} and CONFIG REWRITE" in page, (
            "a setting alone is lost at the next restart"
        )
        doctor(server.url, "--require", "durable", code=1)


@pytest.mark.services
def test_what_the_doctor_says_to_set_makes_it_content() -> None:
    with services.redis() as server:
        assert not examine(server.url).exactly_once
        server.command("CONFIG", "SET", "appendonly", "yes")
        server.command("CONFIG", "SET", "appendfsync", "always")
        until = time.monotonic() + 20
        while server.info("persistence")["aof_rewrite_in_progress"]:  # it cannot be stopped before
            assert time.monotonic() < until, "the first log is not written"
            time.sleep(0.02)
        assert examine(server.url).exactly_once


@pytest.mark.services
def test_redis_that_does_not_sync_while_it_rewrites_its_log_is_refused() -> None:
    with services.redis(appendonly="always", config={"no-appendfsync-on-rewrite": "yes"}) as server:
        page = doctor(server.url, "--require", "exactly-once", code=1)
        assert "CONFIG SET no-appendfsync-on-rewrite no and CONFIG REWRITE" in page
        server.command("CONFIG", "SET", "no-appendfsync-on-rewrite", "no")
        assert examine(server.url).exactly_once


@pytest.mark.services
def test_redis_that_drops_records_is_misconfigured() -> None:
    config = {"maxmemory": "50mb", "maxmemory-policy": "allkeys-lru"}
    with services.redis(appendonly="always", config=config) as server:
        data = doctor_data(server.url, code=2)
        assert "maxmemory-policy noeviction" in data["guarantee"]["warnings"][0]
        assert "stops semel" in doctor(server.url, code=2)
        doctor(server.url, "--require", "exactly-once", code=1)
        with pytest.raises(ConfigurationError, match="drops keys"):
            Semel(server.url).execute("k", lambda: 1)
        assert judge(examine(f"{server.url}?eviction=accept")).code == 0, "accepted in the URL, and told"
        tx = examine(f"{server.url}?eviction=accept").guarantee.rows["tx"]
        assert tx["loss"] == "an acknowledged effect may be lost, or doubled"


@pytest.mark.services
def test_a_replica_needs_acks() -> None:
    with (
        services.redis(appendonly="always") as server,
        services.redis() as replica,
        services.redis() as second,
    ):
        replica.command("REPLICAOF", server.host, server.port)
        until = time.monotonic() + 20
        while server.info("replication")["connected_slaves"] != 1:
            assert time.monotonic() < until, "the replica did not come"
            time.sleep(0.02)
        checkup = examine(server.url)
        assert not checkup.exactly_once
        assert checkup.durable, "power loss is another matter than failover"
        assert any("acks=1" in text for text in checkup.guarantee.warnings)
        assert any("min-replicas-to-write 1" in text for text in checkup.advice)
        assert examine(server.url, Settings(acks=1)).exactly_once
        doctor(server.url, "--require", "exactly-once", code=1)
        page = doctor(server.url, "--require", "exactly-once", "--acks", "1", code=0)
        assert "shown by the crash matrix" in page
        assert "Redis itself promises nothing" in page
        second.command("REPLICAOF", server.host, server.port)
        while server.info("replication")["connected_slaves"] != 2:
            assert time.monotonic() < until, "the second replica did not come"
            time.sleep(0.02)
        weak = examine(server.url, Settings(acks=1))
        assert not weak.exactly_once, "the other replica may be the one that takes over"
        assert any("acks=1 of 2 replicas" in text for text in weak.guarantee.warnings)
        assert examine(server.url, Settings(acks=2)).exactly_once


@pytest.mark.services
def test_a_user_who_may_not_read_the_settings_gets_no_promise() -> None:
    with services.redis(appendonly="always") as server:
        server.command("ACL", "SETUSER", "blind", "on", ">pass", "~*", "&*", "+@all", "-config", "-info")
        url = server.url.replace("://", "://blind:pass@")
        assert "cannot tell" in doctor(url, "--require", "exactly-once", code=2)
        server.command("ACL", "SETUSER", "blind", "+info")
        assert "+config|get" in doctor_data(url, code=2)["verdict"]["text"]


@pytest.mark.services
def test_a_cluster_is_read_and_its_slots_are_named(redis_cluster: services.RedisCluster) -> None:
    checkup = examine(redis_cluster.url)
    assert any("hash slot" in text for text in checkup.advice)
    assert not checkup.exactly_once


def test_a_server_that_is_not_there_cannot_be_told() -> None:
    assert "cannot reach" in doctor("redis://127.0.0.1:1/0", code=2)
    data = doctor_data("postgresql://app@127.0.0.1:1/app", code=2)
    assert data["verdict"]["code"] == 2
    with pytest.raises((StoreUnavailable, ConfigurationError)):
        examine("mysql://root@127.0.0.1:1/app")


@pytest.mark.parametrize(
    "scheme",
    ["mysql", "mariadb+asyncmy", "mysql+pymysql", "postgresql", "postgresql+psycopg", "redis"],
)
def test_a_server_that_takes_connections_and_says_nothing_is_given_up_in_time(scheme: str) -> None:
    database = "0" if scheme == "redis" else "app"
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        url = f"{scheme}://user:word@127.0.0.1:{silent.getsockname()[1]}/{database}"
        program = [sys.executable, "-m", "semel", "doctor", url]
        done = subprocess.run(
            [*program, "--timeout", "0.5"], check=False, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "semel: " in done.stderr


@pytest.mark.services
def test_the_password_is_not_printed() -> None:
    with services.redis(password="sesame") as server:
        assert "sesame" not in doctor(server.url, code=0)
        assert "sesame" not in doctor(server.url, "--json", code=0)


# ---------------------------------------------------------------------------------------------- PostgreSQL
@pytest.mark.services
@pytest.mark.parametrize("driver", ["", "asyncpg", "psycopg"])
def test_postgres_without_fsync_is_refused(postgres_server: services.PostgresServer, driver: str) -> None:
    url = postgres_server.database(driver=driver)
    checkup = examine(url)
    assert checkup.schema.state == "missing"
    name = urlsplit(url).path[1:]
    made = "SELECT count(*) FROM pg_class WHERE relname LIKE 'semel%'"
    assert postgres_server.execute(made, database=name) == [(0,)]
    assert not checkup.exactly_once
    assert {text.partition(":")[0] for text in checkup.guarantee.warnings} >= {
        "fsync = off",
        "full_page_writes = off",
    }
    assert "set fsync = on" in doctor(url, "--require", "exactly-once", code=1)


@pytest.mark.services
def test_postgres_with_fsync_is_exactly_once_and_its_commit_setting_counts() -> None:
    with services.postgres(fsync=True) as server:
        url = server.database()
        before = examine(url)
        checkup = agree(url)  # the faces make the tables
        assert (before.schema.state, checkup.schema.state) == ("missing", "present")
        assert before.guarantee == checkup.guarantee, "the promise is read the same way without tables"
        assert checkup.exactly_once
        assert any("max_prepared_transactions = 0" in text for text in checkup.advice)
        doctor(url, "--require", "exactly-once", code=0)

        server.execute("ALTER SYSTEM SET synchronous_commit = off")
        server.execute("SELECT pg_reload_conf()")
        until = time.monotonic() + 10
        while examine(url).exactly_once:
            assert time.monotonic() < until, "the setting was not read"
        assert "set synchronous_commit = on" in doctor(url, "--require", "durable", code=1)
        server.execute("ALTER SYSTEM RESET synchronous_commit")
        server.execute("SELECT pg_reload_conf()")

        name = url.rpartition("/")[2]
        server.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
        assert "ALTER DATABASE … RESET synchronous_commit" in doctor(url, "--require", "durable", code=1)
        server.execute(f"ALTER DATABASE {name} RESET synchronous_commit")
        until = time.monotonic() + 20
        while not examine(url).exactly_once:
            assert time.monotonic() < until, "the setting was not read"


@pytest.mark.services
def test_a_postgres_that_cannot_be_written_stops_semel() -> None:
    with services.postgres(fsync=True, config={"default_transaction_read_only": "on"}) as server:
        data = doctor_data(server.url_of("postgres"), code=2)
        assert "read-only" in data["problems"][0]


@pytest.mark.services
def test_postgres_tables_of_a_newer_semel_stop_this_one(postgres_server: services.PostgresServer) -> None:
    url = postgres_server.database(driver="psycopg")
    with Semel(url) as once:
        once.execute("k", lambda: 1)
    import psycopg

    with psycopg.connect(url.replace("+psycopg", "")) as db:
        db.execute("UPDATE semel_schema SET version = 99")
    checkup = examine(url)
    assert checkup.schema.state == "newer"
    assert judge(checkup).code == 2


# ------------------------------------------------------------------------------------------------- MariaDB
@pytest.mark.services
def test_mariadb_that_flushes_late_is_refused_and_a_strict_one_is_not() -> None:
    with services.mariadb() as server:
        url = server.database()
        weak = examine(url)
        assert weak.schema.state == "missing"
        assert server.execute("SELECT count(*) FROM information_schema.tables WHERE table_name = 'semel'")
        assert any("innodb_flush_log_at_trx_commit=2" in text for text in weak.guarantee.warnings)
        assert "set it to 1" in doctor(url, "--require", "exactly-once", code=1)
        server.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
        strong = agree(url)
        assert strong.exactly_once
        assert strong.schema.state == "present"
        doctor(server.url_of(url.rpartition("/")[2], driver="pymysql"), "--require", "exactly-once", code=0)


@pytest.mark.services
def test_mariadb_with_a_lazy_binary_log_is_refused() -> None:
    with services.mariadb(fsync=True, config={"log-bin": "bin", "sync-binlog": 0}) as server:
        assert "set sync_binlog=1" in doctor(server.database(), "--require", "durable", code=1)


# --------------------------------------------------------------------------------------------------- words
def test_a_wrong_url_is_told_as_such() -> None:
    assert "semel.db" in doctor("semel.db", code=2)
    assert "acks is" in doctor("postgresql://app@127.0.0.1/app", "--acks", "1", code=2)


def test_plain_lines_hold_what_the_table_holds(file: Path) -> None:
    page = told(examine(f"sqlite:///{file}"))
    assert "tx     crash: exactly once; zombie: exactly once; loss:" in page
    assert "settings: journal_mode=wal" in page
    assert "verdict: " in page


def test_the_program_leaves_with_the_code(file: Path) -> None:
    program = [str(Path(sys.executable).parent / "semel"), "doctor"]
    assert subprocess.run([*program, f"sqlite:///{file}"], capture_output=True, check=False).returncode == 0
    weak = [*program, "memory://", "--require", "exactly-once"]
    assert subprocess.run(weak, capture_output=True, check=False).returncode == 1


def test_three_flushes_of_mariadb_are_as_good_as_one_and_none_is_not() -> None:
    kept = {
        level: facts_of({"innodb_flush_log_at_trx_commit": level}, "mariadb").durable_writes
        for level in "0123"
    }
    assert kept == {"0": False, "1": True, "2": False, "3": True}


def test_a_standby_that_every_commit_waits_for_and_that_is_not_there_is_told() -> None:
    waiting = Facts("postgresql", settings={"synchronous_standby_names": "*", "standbys": "0"})
    assert any("no standby is connected" in text for text in advice_for(waiting))
    alone = Facts("postgresql", settings={"synchronous_standby_names": "", "standbys": "0"})
    assert not list(advice_for(alone))
