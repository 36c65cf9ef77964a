"""Private servers: they answer, they run unprivileged, they can be hurt, and they never outlive their launcher."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aio_pika
import nats
import psycopg
import pymysql
import pytest
import redis
import rstream.client
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.retry import Retry
from redis.sentinel import Sentinel

from semel import ConfigurationError
from semel.testing import services
from semel.testing.services import home, watchdog
from semel.testing.services.server import STOP_TIMEOUT, wait_until

pytestmark = pytest.mark.services


def client(server: services.RedisServer, *, timeout: float = 2.0) -> redis.Redis:
    return redis.Redis.from_url(
        server.url, decode_responses=True, retry=Retry(NoBackoff(), 0), socket_timeout=timeout
    )


def need_all() -> None:
    """Skip (or fail, see conftest) before a child process does it with a traceback."""
    for remedy in services.missing().values():
        raise services.ServerMissing(remedy)


def gone(pid: int) -> bool:
    return watchdog.started_at(pid) == ""


# -- they answer their real clients ---------------------------------------------------------------------------------
def test_redis_answers(redis_server: services.RedisServer) -> None:
    with client(redis_server.flush()) as connection:
        assert connection.set("a", "1") is True
        assert connection.get("a") == "1"


def test_valkey_answers_and_is_valkey(valkey_server: services.RedisServer) -> None:
    assert valkey_server.info("server")["server_name"] == "valkey"
    with client(valkey_server) as connection:
        assert connection.ping() is True


def test_postgres_gives_fresh_databases(postgres_server: services.PostgresServer) -> None:
    first, second = postgres_server.database(), postgres_server.database()
    assert first != second
    with psycopg.connect(first) as connection:
        connection.execute("CREATE TABLE only_here (x int)")
    with psycopg.connect(second) as connection:
        assert connection.execute("SELECT to_regclass('only_here')").fetchone() == (None,)
    assert postgres_server.database(driver="asyncpg").startswith("postgresql+asyncpg://")


def test_postgres_keeps_the_server_settings_it_was_given() -> None:
    with services.postgres(config={"max_prepared_transactions": 7}) as server:
        assert server.execute("SHOW max_prepared_transactions") == [("7",)]


def test_mariadb_gives_fresh_databases(mariadb_server: services.MariaServer) -> None:
    first, second = (urlsplit(mariadb_server.database()) for _ in range(2))
    assert first.path != second.path
    connection = pymysql.connect(
        host=first.hostname, port=first.port or 0, user="root", database=first.path[1:]
    )
    with connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE t (x int) ENGINE=InnoDB")
        cursor.execute("SHOW TABLES")
        assert cursor.fetchall() == (("t",),)


@pytest.fixture(scope="module")
def rabbit() -> Iterator[services.RabbitServer]:
    """Of these tests alone: one kills it. It takes seconds to start, so they share it."""
    with services.rabbitmq() as server:
        yield server
    assert not server.folder.exists()


@pytest.mark.services
@pytest.mark.xdist_group("rabbit")
def test_rabbitmq_has_queues_and_streams(rabbit: services.RabbitServer) -> None:
    async def use() -> tuple[object, bool]:
        async with await aio_pika.connect(rabbit.url) as connection:
            channel = await connection.channel()
            queue = await channel.declare_queue("here", durable=True)
            await channel.default_exchange.publish(aio_pika.Message(b"1"), "here")
            message = await queue.get(no_ack=True)
        client = rstream.client.Client(rabbit.host, rabbit.stream_port, frame_max=1 << 20, heartbeat=60)
        await client.start()
        await client.authenticate("/", rabbit.user, rabbit.password)
        await client.create_stream("there")
        there = await client.stream_exists("there")
        leader, _ = await client.query_leader_and_replicas("there")
        await client.close()
        assert (leader.host, leader.port) == (rabbit.host, rabbit.stream_port)
        return message.body, there

    assert asyncio.run(use()) == (b"1", True)


def test_nats_has_jetstream(nats_server: services.NatsServer) -> None:
    async def use() -> bytes | None:
        connection = await nats.connect(nats_server.url)
        js = connection.jetstream()
        await js.add_stream(name="here", subjects=["here.>"])
        await js.publish("here.a", b"1")
        found = (await js.get_last_msg("here", "here.a")).data
        await connection.close()
        return found

    assert nats_server.info()["jetstream"] is True
    assert asyncio.run(use()) == b"1"


def test_pgbouncer_shares_server_connections_by_transaction(
    postgres_server: services.PostgresServer, pgbouncer: services.PgBouncer
) -> None:
    url = pgbouncer.database()
    assert str(pgbouncer.port) in url
    with services.pgbouncer(postgres_server, config={"default_pool_size": 1}) as small:
        url = small.through(postgres_server.database())
        with psycopg.connect(url, autocommit=True) as one, psycopg.connect(url, autocommit=True) as two:
            backends = {link.execute("SELECT pg_backend_pid()").fetchone() for link in (one, two)}
    assert len(backends) == 1  # two clients, one server connection: transaction pooling


def test_cluster_serves_every_slot(redis_cluster: services.RedisCluster) -> None:
    host, port = redis_cluster.addresses[0]
    with RedisCluster(host=host, port=port) as connection:
        for number in range(50):
            connection.set(f"key-{number}", number)
        assert [connection.get(f"key-{number}") for number in range(50)] == [
            str(n).encode() for n in range(50)
        ]
    assert len(redis_cluster.masters()) == 3
    assert redis_cluster.master_of("key-1") in redis_cluster.masters()
    redis_cluster.flush()
    assert [node.command("DBSIZE") for node in redis_cluster.masters()] == [0, 0, 0]


def test_cluster_fails_over_when_a_master_is_killed() -> None:
    with services.redis_cluster() as cluster:
        victim = cluster.master_of("key")
        victim.kill()
        wait_until(lambda: len(cluster.masters()) == 3, timeout=60, what="a replica became master", step=0.05)
        cluster.wait_healthy()
        assert cluster.master_of("key") is not victim


@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
def test_a_group_that_is_patient_gives_up_nobody_who_is_silent_for_a_while(kind: str) -> None:
    group: Any = services.redis_cluster() if kind == "cluster" else services.redis_sentinel()
    with group.patient():
        master = group.master_of("key") if kind == "cluster" else group.master()
        with master.paused():
            time.sleep(2.5)  # two of them have failed over by then
        now = group.master_of("key") if kind == "cluster" else group.master()
        assert now is master
        assert master.info("replication")["role"] == "master"


def test_sentinel_names_the_master(redis_sentinel: services.RedisSentinel) -> None:
    sentinel: Any = Sentinel(redis_sentinel.addresses)  # type: ignore[no-untyped-call]  # redis-py has no types here
    master = redis_sentinel.master()
    assert sentinel.discover_master(redis_sentinel.service_name) == (master.host, master.port)
    with sentinel.master_for(redis_sentinel.service_name) as connection:
        assert connection.set("a", "1") is True


def test_sentinel_fails_over_when_the_master_is_killed() -> None:
    with services.redis_sentinel() as group:
        old = group.master()
        old.kill()
        new = group.wait_failed_over(old)
        assert new is not old
        new.command("SET", "a", "1")


# -- faults -----------------------------------------------------------------------------------------------------------
def test_restart_after_kill_keeps_acknowledged_writes_with_appendonly_always() -> None:
    with services.redis(appendonly="always") as server:
        server.command("SET", "a", "1")
        port = server.port
        server.kill()
        assert not server.running
        server.restart()
        assert server.port == port
        assert server.command("GET", "a") == "1"


def test_restart_without_appendonly_loses_the_data() -> None:
    with services.redis() as server:
        server.command("SET", "a", "1")
        server.kill()
        assert server.restart().command("GET", "a") is None


@pytest.mark.parametrize("start", [services.postgres, services.mariadb], ids=["postgres", "mariadb"])
def test_sql_servers_keep_committed_rows_across_kill(
    start: Callable[[], services.PostgresServer | services.MariaServer],
) -> None:
    with start() as server:
        name = urlsplit(server.database()).path[1:]
        server.execute("CREATE TABLE t (x int)", database=name)
        server.execute("INSERT INTO t VALUES (1)", database=name)
        server.kill()
        server.restart()
        assert list(server.execute("SELECT x FROM t", database=name)) == [(1,)]


def test_nats_keeps_streams_across_kill_and_asks_for_its_password() -> None:
    async def on(url: str, work: Callable[[Any], Any]) -> Any:
        connection = await nats.connect(url, allow_reconnect=False)
        try:
            return await work(connection.jetstream())
        finally:
            await connection.close()

    with services.nats(password="secret") as server:
        asyncio.run(on(server.url, lambda js: js.add_stream(name="s", subjects=["s"])))
        asyncio.run(on(server.url, lambda js: js.publish("s", b"1")))
        server.kill()
        server.restart()
        info = asyncio.run(on(server.url, lambda js: js.stream_info("s")))
        assert info.state.messages == 1
        server.password = "another"
        with pytest.raises(ConnectionError, match="uthorization"):
            server.info()


@pytest.mark.services
@pytest.mark.xdist_group("rabbit")
def test_rabbitmq_keeps_a_stream_that_was_declared_just_before_it_was_killed(
    rabbit: services.RabbitServer,
) -> None:
    async def declare(server: services.RabbitServer, *, passive: bool) -> int:
        async with await aio_pika.connect(server.url) as connection:
            channel = await connection.channel(publisher_confirms=True)
            kind: Any = {"x-queue-type": "stream"}
            queue = await channel.declare_queue("s", durable=True, arguments=kind, passive=passive)
            await channel.default_exchange.publish(aio_pika.Message(b"1"), "s")
            return queue.declaration_result.message_count or 0

    asyncio.run(declare(rabbit, passive=False))
    owner = Path(f"/proc/{rabbit.pid}").stat().st_uid
    assert owner == rabbit.folder.stat().st_uid != 0
    ports, family = (rabbit.port, rabbit.stream_port), set(watchdog.inhabitants(rabbit.folder))
    assert {"beam.smp", "epmd"} <= {Path(f"/proc/{pid}/comm").read_text().strip() for pid in family}
    rabbit.kill()
    assert not set(watchdog.inhabitants(rabbit.folder))
    rabbit.restart()
    assert (rabbit.port, rabbit.stream_port) == ports

    def back() -> bool:  # its leader is elected a moment after the node is up
        with contextlib.suppress(aio_pika.exceptions.AMQPError):
            asyncio.run(declare(rabbit, passive=True))
            return True
        return False

    wait_until(back, timeout=30, what="the stream is back")


def test_a_killed_postgres_leaves_no_shared_memory_behind() -> None:
    before = set(Path("/proc/sysvipc/shm").read_text("utf-8").splitlines())
    with services.postgres() as server:
        uid = str(Path(f"/proc/{server.pid}").stat().st_uid)
        ours = [
            line for line in Path("/proc/sysvipc/shm").read_text("utf-8").splitlines() if line not in before
        ]
        assert any(line.split()[7] == uid for line in ours)
        segments = {line.split()[1] for line in ours if line.split()[4] == str(server.pid)}
        assert segments
        server.kill()
    after = {line.split()[1] for line in Path("/proc/sysvipc/shm").read_text("utf-8").splitlines()[1:]}
    assert not segments & after


def test_a_paused_server_answers_after_resume() -> None:
    with services.redis() as server, client(server) as patient, client(server, timeout=0.2) as connection:
        patient.ping()
        with server.paused(), pytest.raises(redis.TimeoutError):
            connection.ping()
        assert patient.ping() is True


def test_a_paused_server_has_no_thread_that_still_answers() -> None:
    """One thread takes the signal and stops the others: on a busy machine they answer until it has had its turn."""
    with services.mariadb() as server:
        burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6)]
        try:
            for _ in range(20):
                with server.paused():
                    threads = Path(f"/proc/{server.pid}/task").glob("*/stat")
                    states = [thread.read_text().rpartition(")")[2].split()[0] for thread in threads]
                    assert set(states) == {"T"}, states
                server.ping()
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()


def test_a_connection_that_is_open_gets_no_answer_of_a_paused_postgres() -> None:
    """Each has a process of its own, which goes on when only the server's first one stands still."""
    with (
        services.postgres() as server,
        contextlib.closing(psycopg.connect(server.url, autocommit=True)) as connection,
    ):
        with server.paused():
            states = {
                Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in of(server)
            }
            assert states == {"T"}
            connection.pgconn.send_query(b"SELECT 2")
            assert select.select([connection], [], [], 0.2)[0] == []
        assert select.select([connection], [], [], 20)[0] == [connection]


def of(server: services.Server) -> list[int]:
    return list(watchdog.inhabitants(server.folder))


@pytest.mark.parametrize("name", ["redis", "postgres"])
def test_a_paused_server_can_be_stopped(name: str) -> None:
    with getattr(services, name)() as server:
        pid = server.pid
        server.pause()
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < STOP_TIMEOUT, "it was asked, and ended by itself"
    assert gone(pid)


def test_clients_are_cut_off_on_request() -> None:
    with services.postgres() as server, psycopg.connect(server.url, autocommit=True) as connection:
        assert server.terminate_connections() >= 1  # whoever asked whether it is up may not have left yet
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")


def test_mariadb_clients_are_cut_off_on_request(mariadb_server: services.MariaServer) -> None:
    connection = pymysql.connect(host=mariadb_server.host, port=mariadb_server.port, user="root")
    with connection.cursor() as cursor:
        assert mariadb_server.terminate_connections() == 1
        with pytest.raises(pymysql.OperationalError):
            cursor.execute("SELECT 1")


def test_a_password_is_required_when_one_is_set() -> None:
    with services.redis(password="s3cret") as server:
        assert ":s3cret@" in server.url
        stranger = redis.Redis(host=server.host, port=server.port, retry=Retry(NoBackoff(), 0))
        with stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


def test_redis_takes_any_setting() -> None:
    with services.redis(config={"maxmemory": "10mb", "maxmemory-policy": "allkeys-lru"}) as server:
        assert server.command("CONFIG", "GET", "maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}


def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(services.ServerFailed, match="no-such-setting"):
        services.redis(config={"no-such-setting": 1})


def test_a_taken_port_is_exchanged_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = iter([taken.getsockname()[1], home.free_port()])
        monkeypatch.setattr(home, "free_port", lambda *, bus=False: next(ports))
        with services.redis() as server:
            assert server.command("PING") is True


def test_s3_keeps_what_it_confirmed_through_a_kill(s3_server: services.S3Server) -> None:
    with services.s3() as server:
        server.client().put_object(Bucket=server.bucket, Key="a/b", Body=b"kept")
        server.kill()
        server.restart()
        answer = server.client().get_object(Bucket=server.bucket, Key="a/b")
        assert answer["Body"].read() == b"kept"
        answer["Body"].close()
    assert s3_server.running


def test_a_missing_program_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(services.ServerMissing, match="apt-get install postgresql"):
        services.postgres()
    absent = services.missing()
    assert {"postgres", "mariadb", "pgbouncer", "nats", "s3"} <= set(absent)
    assert "redis" not in absent  # the Valkey in the wheel stands in for it


def test_redis_is_served_by_the_valkey_wheel_when_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with services.redis() as server:
        assert server.info("server")["server_name"] == "valkey"


# -- who runs them ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "start",
    [services.redis, services.valkey, services.postgres, services.mariadb, services.nats, services.s3],
    ids=["redis", "valkey", "postgres", "mariadb", "nats", "s3"],
)
def test_servers_never_run_as_root(start: Callable[[], services.Server]) -> None:
    with start() as server:
        owner = Path(f"/proc/{server.pid}").stat().st_uid
        folder = server.folder
        assert owner != 0
        assert folder.stat().st_uid == owner
    assert not folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_an_ordinary_user_can_start_every_server() -> None:
    program = """
        from semel.testing import services
        with services.redis() as r, services.valkey() as v, services.postgres() as p, services.mariadb() as m:
            with services.pgbouncer(p) as b:
                print(r.command("PING"), v.command("PING"), p.execute("SELECT 1"), m.execute("SELECT 1"), b.running)
    """
    need_all()
    done = _as_nobody("-c", textwrap.dedent(program))
    assert done.stdout.strip() == "True True [(1,)] ((1,),) True", done.stderr


def _as_nobody(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python of this version that everybody may run; this one may lie in root's home folder."""
    user = pwd.getpwnam("nobody")
    python = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if _open_to_all(Path(sys.executable).resolve()):
        python = sys.executable
    modules = [Path(services.__file__).parents[3], Path(redis.__file__).parents[1]]
    if not Path(python).exists() or not all(map(_open_to_all, modules)):
        pytest.skip("the interpreter or the checkout lies in a closed folder: an ordinary user cannot run it")
    return subprocess.run(
        [python, *arguments],
        user=user.pw_uid,
        group=user.pw_gid,
        extra_groups=[],
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PYTHONPATH": ":".join(map(str, modules))},
        capture_output=True,
        text=True,
        check=False,
    )


def _open_to_all(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents))


# -- they never outlive their launcher -----------------------------------------------------------------------------------
LAUNCHER = """
    import json, os, sys, time
    from semel.testing import services
    servers = [services.redis(), services.valkey(), services.nats()]
    if "sql" in sys.argv:
        servers += [services.mariadb(), services.postgres()]
        servers.append(services.pgbouncer(servers[-1]))
    if "rabbitmq" in sys.argv:
        servers.append(services.rabbitmq())
    servers[0].pause()
    if "fork" in sys.argv and os.fork() == 0:
        time.sleep(60)  # a child that outlives its parent and holds every descriptor
        os._exit(0)
    from semel.testing.services import home
    print(json.dumps({"pids": [s.pid for s in servers], "home": str(home.home())}), flush=True)
    if "exit" not in sys.argv:
        time.sleep(60)
"""


def test_servers_live_in_the_folder_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, apart: Path
) -> None:
    monkeypatch.setenv("SEMEL_SERVERS_FOLDER", str(apart))
    assert home._parent() == apart.resolve()
    monkeypatch.setenv("SEMEL_SERVERS_FOLDER", "")
    assert home._parent() != apart.resolve()


@pytest.fixture
def apart() -> Iterator[Path]:
    """A temporary folder of their own: any other process that starts servers would clear what is stale."""
    with tempfile.TemporaryDirectory(prefix="apart-") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@pytest.fixture
def launcher(apart: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], list[int], Path]]]:
    started: list[subprocess.Popen[str]] = []
    need_all()

    def start(*arguments: str) -> tuple[subprocess.Popen[str], list[int], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(LAUNCHER), *arguments],
            env={**os.environ, "TMPDIR": str(apart), "SEMEL_SERVERS_FOLDER": ""},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], 60)
        assert readable, "the launcher did not start its servers in a minute"
        facts = json.loads(process.stdout.readline())
        return process, facts["pids"], Path(facts["home"])

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_server_outlives_a_launcher_ended_by(
    how: signal.Signals, launcher: Callable[..., tuple[subprocess.Popen[str], list[int], Path]]
) -> None:
    every_kind = ["sql", "rabbitmq"] if how == signal.SIGKILL else []  # they are slow: once is enough
    process, pids, folder = launcher(*every_kind)
    assert not any(map(gone, pids))
    process.send_signal(how)
    process.wait(60)
    wait_until(
        lambda: all(map(gone, pids)) and not folder.exists(), timeout=60, what="servers and data are gone"
    )


def test_no_server_outlives_a_launcher_that_forgot_to_close(
    launcher: Callable[..., tuple[subprocess.Popen[str], list[int], Path]],
) -> None:
    process, pids, folder = launcher("exit", "sql")
    process.wait(60)
    wait_until(
        lambda: all(map(gone, pids)) and not folder.exists(), timeout=60, what="servers and data are gone"
    )


def test_a_forked_child_of_the_launcher_does_not_keep_servers_alive(
    launcher: Callable[..., tuple[subprocess.Popen[str], list[int], Path]],
) -> None:
    process, pids, folder = launcher("fork")
    process.kill()
    process.wait(60)
    wait_until(
        lambda: all(map(gone, pids)) and not folder.exists(), timeout=60, what="servers and data are gone"
    )


def test_the_next_start_clears_what_a_killed_watchdog_left(
    launcher: Callable[..., tuple[subprocess.Popen[str], list[int], Path]],
) -> None:
    process, pids, folder = launcher()
    guards = _watchdogs_of(folder)
    assert len(guards) == 1
    os.kill(guards[0], signal.SIGKILL)
    process.kill()
    process.wait(60)
    time.sleep(0.2)  # long enough for a watchdog, had it lived
    assert not any(map(gone, pids))
    next_one, _, _ = launcher("exit")
    next_one.wait(60)
    assert all(map(gone, pids))
    assert not folder.exists()


def _watchdogs_of(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            words = path.read_bytes()
            if folder.as_posix().encode() in words and b"watchdog.py" in words:
                found.append(int(path.parent.name))
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts disks")
def test_a_disk_that_was_mounted_in_the_folder_goes_with_it(tmp_path: Path) -> None:
    root = tmp_path / "home"
    disk = root / "disk-1"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    (disk / "data").write_text("left by a run that was killed")
    watchdog.clear(root)
    assert not root.exists()
    assert str(disk) not in Path("/proc/self/mounts").read_text()


def test_a_server_survives_the_thread_that_started_it() -> None:
    servers: list[AbstractContextManager[object]] = []
    thread = threading.Thread(target=lambda: servers.append(services.redis()))
    thread.start()
    thread.join()
    (server,) = servers
    assert isinstance(server, services.RedisServer)
    with server:
        assert server.command("PING") is True


def test_a_folder_that_a_dying_server_made_again_is_removed(tmp_path: Path) -> None:
    """It belongs to the account that the server ran as, not to who started it."""
    left = tmp_path / f"semel-{os.geteuid()}.999999999.1.left"
    (left / "data").mkdir(parents=True)
    home.give(left)
    home._reap_stale(tmp_path)
    assert not left.exists()


@pytest.mark.parametrize(
    ("start", "driver", "extra"),
    [
        (services.redis, "redis", "redis"),
        (services.postgres, "psycopg", "postgres"),
        (services.mariadb, "pymysql", "mysql"),
    ],
)
def test_a_server_without_its_driver_names_the_extra(
    start: Callable[[], services.Server], driver: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, driver, None)
    with pytest.raises(ConfigurationError, match=rf'pip install "semel\[{extra}\]"'):
        start()
