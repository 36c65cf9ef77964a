"""The Redis link on one server: replies, errors, lanes, addresses, in both colours."""

from __future__ import annotations

import asyncio
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from semel.errors import ConfigurationError, StoreUnavailable
from semel.stores.redis.link import Call, Lane, Script, ServerError, open_link
from semel.testing import services
from semel.testing.proxy import CHUNKS, Proxy
from semel.testing.services.home import free_port
from tests.ops.redis_link_lab import (
    COLOURS,
    COUNT,
    ECHO,
    FACES,
    Face,
    drive,
    fresh,
    is_script,
    open_face,
    proxied,
    run,
    url_of,
)


@pytest.mark.parametrize("face", FACES)
def test_a_script_answers_every_kind_of_reply(redis_server: services.RedisServer, face: Face) -> None:
    kinds = Script(
        "kinds", "return {1, ARGV[1], false, {2, 'x'}, {ok = 'FINE'}, redis.error_reply('ODD one')}"
    )

    async def body() -> None:
        link = open_face(redis_server.url, face)
        *values, error = await link.call(kinds, [b"k"], [b"\x00\xff"])
        assert values == [1, b"\x00\xff", None, [2, b"x"], b"FINE"]
        assert isinstance(error, ServerError)
        assert error.code == "ODD"
        assert await link.call(Script("nil", "return false"), [], []) is None
        assert await link.command("PING") == b"PONG"
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_after_warm_up_a_call_is_exactly_one_server_command(
    redis_server: services.RedisServer, face: Face
) -> None:
    key = fresh()

    async def body() -> None:
        link = open_face(redis_server.url, face)
        await link.call(COUNT, [key])
        await link.command("CONFIG", "RESETSTAT")
        for _ in range(50):
            await link.call(COUNT, [key])
        await link.call_many([Call(COUNT, [key]) for _ in range(50)])
        told = (await link.command("INFO", "commandstats")).decode()
        counted = dict(re.findall(r"cmdstat_(\S+):calls=(\d+)", told))
        assert counted == {"evalsha": "100", "incr": "100", "config|resetstat": "1"}
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_flushed_script_cache_costs_one_more_trip_and_no_error(
    redis_server: services.RedisServer, face: Face
) -> None:
    key = fresh()

    async def body() -> None:
        link = open_face(redis_server.url, face)
        await link.call(COUNT, [key])
        redis_server.command("SCRIPT", "FLUSH")
        redis_server.command("CONFIG", "RESETSTAT")
        assert [await link.call(COUNT, [key]) for _ in range(3)] == [2, 3, 4]
        stats = redis_server.info("commandstats")
        assert stats["cmdstat_eval"]["calls"] == 1
        assert stats["cmdstat_evalsha"]["calls"] == 3
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_call_many_keeps_order_and_an_error_stays_with_its_item(
    redis_server: services.RedisServer, face: Face
) -> None:
    text, number = fresh(), fresh()
    redis_server.command("SET", text, "word")

    async def body() -> None:
        link = open_face(redis_server.url, face)
        calls = [Call(COUNT, [number]), Call(COUNT, [text]), Call(ECHO, [b"k"], [7]), Call(COUNT, [number])]
        one, wrong, echo, two = await link.call_many(calls)
        assert [one, echo, two] == [1, [b"k", b"7"], 2]
        assert isinstance(wrong, ServerError)
        assert "not an integer" in str(wrong)
        assert await link.call_many([]) == []
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_call_many_is_a_few_writes(redis_server: services.RedisServer, face: Face) -> None:
    with Proxy(redis_server.host, redis_server.port, framing=CHUNKS) as proxy:

        async def body() -> None:
            link = open_face(url_of(proxy), face)
            await link.call(ECHO, [b"k"], [b"warm"])
            before = proxy.requests
            replies = await link.call_many([Call(ECHO, [b"k"], [number]) for number in range(64)])
            assert [int(reply[1]) for reply in replies] == list(range(64))
            assert 1 <= proxy.requests - before <= 64 // 16 + 1
            await link.aclose()

        run(face, body())


@pytest.mark.parametrize("face", ["async", "uvloop"])
def test_calls_of_one_tick_leave_in_a_few_writes(redis_server: services.RedisServer, face: Face) -> None:
    with Proxy(redis_server.host, redis_server.port, framing=CHUNKS) as proxy:

        async def body() -> None:
            link = open_face(url_of(proxy), face)
            await link.call(ECHO, [b"k"], [b"warm"])
            before = proxy.requests
            replies = await asyncio.gather(*(link.call(ECHO, [b"k"], [number]) for number in range(64)))
            assert [int(reply[1]) for reply in replies] == list(range(64))
            assert 1 <= proxy.requests - before <= 64 // 16 + 1
            assert proxy.connections == 1
            await link.aclose()

        run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_refused_command_raises_the_servers_own_error(
    redis_server: services.RedisServer, face: Face
) -> None:
    async def body() -> None:
        link = open_face(redis_server.url, face)
        with pytest.raises(ServerError, match="unknown command"):
            await link.command("NONSENSE")
        with pytest.raises(ServerError, match="boom"):
            await link.call(Script("boom", "return redis.error_reply('MINE boom')"), [])
        assert await link.command("PING") == b"PONG"
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_nothing_connects_before_the_first_use(redis_server: services.RedisServer, face: Face) -> None:
    with proxied(redis_server) as proxy:
        before = set(threading.enumerate())
        link = open_face(url_of(proxy), face)
        assert proxy.connections == 0
        assert set(threading.enumerate()) <= before  # one of a test before may end meanwhile
        run(face, link.aclose())
        assert proxy.connections == 0


@pytest.mark.parametrize("face", COLOURS)
def test_every_node_answers_a_command_for_everywhere(redis_server: services.RedisServer, face: Face) -> None:
    async def body() -> None:
        link = open_face(redis_server.url, face)
        found = await link.command_everywhere("CONFIG", "GET", "maxmemory-policy")
        assert found == {f"127.0.0.1:{redis_server.port}": [b"maxmemory-policy", b"noeviction"]}
        await link.aclose()

    run(face, body())


# ------------------------------------------------------------------------------------------ lanes and limits
@pytest.mark.parametrize("face", ["async", "uvloop"])
def test_bulk_and_blocking_calls_do_not_hold_up_the_main_lane(
    redis_server: services.RedisServer, face: Face
) -> None:
    async def body() -> None:
        link = open_face(redis_server.url, face)
        await link.call(ECHO, [b"k"], [b"warm"])
        list_ = fresh()
        parked = asyncio.create_task(link.command("BLPOP", list_, 0, lane=Lane.BLOCKING, timeout=60))
        bulk = asyncio.create_task(link.call(ECHO, [b"k"], [b"x" * (8 << 20)], lane=Lane.BULK))
        await asyncio.sleep(0)
        for lane in (Lane.MAIN, Lane.RENEW):
            assert await link.call(ECHO, [b"k"], [b"small"], lane=lane, timeout=20) == [b"k", b"small"]
        assert not parked.done()
        assert len((await bulk)[1]) == 8 << 20
        await link.command("RPUSH", list_, "came")
        assert await parked == [list_, b"came"]
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_acks_counts_the_replicas_that_have_the_write(face: Face) -> None:
    at_once: dict[str, str | int] = {"repl-diskless-sync-delay": 0}
    with (
        services.redis(config=at_once) as master,
        services.redis(config=at_once | {"replicaof": f"{master.host} {master.port}"}) as replica,
    ):
        until(lambda: replica.info("replication")["master_link_status"] == "up")
        until(lambda: int(master.command("WAIT", 1, 100)) == 1)
        key = fresh()

        async def body() -> None:
            link = open_face(master.url, face)
            assert await link.call(COUNT, [key], acks=1, ack_timeout=20) == [1, 1]
            (both,) = await link.call_many([Call(COUNT, [key], acks=1, ack_timeout=20)])
            assert both == [2, 1]
            with replica.paused():
                assert await link.call(COUNT, [key], acks=1, ack_timeout=0.1) == [3, 0]
            await link.aclose()

        run(face, body())


@pytest.mark.parametrize("program", ["redis", "valkey"])
def test_a_repeat_that_writes_nothing_still_waits_for_the_first_ones_write(program: str) -> None:
    # After a lost reply the repeat is a no-op on a new connection: its WAIT must not claim what is not replicated.
    at_once: dict[str, str | int] = {"repl-diskless-sync-delay": 0}
    start = services.redis if program == "redis" else services.valkey
    with (
        start(config=at_once) as master,
        start(config=at_once | {"replicaof": f"{master.host} {master.port}"}) as replica,
    ):
        until(lambda: replica.info("replication")["master_link_status"] == "up")
        until(lambda: int(master.command("WAIT", 1, 100)) == 1)
        with replica.paused():
            first, second = (open_link(master.url, colour="sync") for _ in range(2))
            drive(first.call(COUNT, [b"k"]))
            assert drive(second.call(ECHO, [b"k"], ["no write"], acks=1, ack_timeout=0.1)) == [
                [b"k", b"no write"],
                0,
            ]
            first.close()
            second.close()


def until(ready: Any, timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not ready():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


def test_a_full_connection_refuses_with_a_clear_message_but_takes_renewals(
    redis_server: services.RedisServer,
) -> None:
    with proxied(redis_server) as proxy:

        async def body() -> None:
            link = open_link(url_of(proxy), colour="async", timeout=30, max_pending=10)
            await link.call(ECHO, [b"k"], [b"warm"])
            proxy.stall(match=is_script)
            waiting = [asyncio.create_task(link.call(ECHO, [b"k"], [number])) for number in range(10)]
            await asyncio.sleep(0)
            with pytest.raises(StoreUnavailable, match="10 calls already wait"):
                await link.call(ECHO, [b"k"], [b"one too many"], timeout=0.2)
            renewal = asyncio.create_task(link.call(ECHO, [b"k"], [b"renew"], lane=Lane.RENEW))
            late = asyncio.create_task(link.call(ECHO, [b"k"], [b"late"]))
            await asyncio.sleep(0)
            proxy.release()
            assert (await renewal)[1] == b"renew"
            assert (await late)[1] == b"late"
            assert [int(reply[1]) for reply in await asyncio.gather(*waiting)] == list(range(10))
            await link.aclose()

        asyncio.run(body())


def test_threads_beyond_the_connection_limit_wait_their_turn_or_are_told(
    redis_server: services.RedisServer,
) -> None:
    with proxied(redis_server) as proxy:
        link = open_link(url_of(proxy), colour="sync", timeout=30, max_connections=1)
        drive(link.call(ECHO, [b"k"], [b"warm"]))
        rule = proxy.stall(match=is_script)
        slow = threading.Thread(target=lambda: drive(link.call(ECHO, [b"k"], [b"slow"])))
        slow.start()
        assert rule.fired.wait(5)
        with pytest.raises(StoreUnavailable, match="max_connections"):
            drive(link.call(ECHO, [b"k"], [b"no"], timeout=0.2))
        threading.Timer(0.05, proxy.release).start()
        assert drive(link.call(ECHO, [b"k"], [b"yes"])) == [b"k", b"yes"]
        slow.join()
        assert proxy.connections == 1
        link.close()


# ---------------------------------------------------------------------------------------------- addresses
@pytest.fixture(scope="module")
def locked_server() -> Iterator[services.RedisServer]:
    with services.redis(password="s3cret-pa55") as server:
        yield server


@pytest.mark.parametrize("face", COLOURS)
def test_password_and_database_come_from_the_url(locked_server: services.RedisServer, face: Face) -> None:
    async def body() -> None:
        link = open_face(locked_server.url.replace("/0", "/3") + "?client_name=till", face)
        await link.command("SET", "where", "here")
        assert b"name=till" in await link.command("CLIENT", "INFO")
        assert b"db=3" in await link.command("CLIENT", "INFO")
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
@pytest.mark.parametrize("login", [":wr0ng-one@", "nobody:wr0ng-one@", ""])
def test_a_wrong_password_is_told_at_once_and_never_shown(
    locked_server: services.RedisServer, face: Face, login: str
) -> None:
    async def body() -> None:
        link = open_face(f"redis://{login}{locked_server.host}:{locked_server.port}/0", face, timeout=60)
        start = time.monotonic()
        with pytest.raises(ConfigurationError) as told:
            await link.call(ECHO, [b"k"], [1])
        assert time.monotonic() - start < 20
        assert f"127.0.0.1:{locked_server.port}" in str(told.value)
        assert "password" in str(told.value)
        assert "wr0ng" not in f"{told.value} {told.value.__cause__!r} {link!r}"
        assert told.value.__cause__ is not None
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
@pytest.mark.parametrize(
    "url,says",
    [
        ("redis://127.0.0.1:{port}/0", "127.0.0.1:{port}.*is the server running"),
        ("redis://no-such-host.invalid:6379/0", "no-such-host.invalid:6379.*cannot be resolved"),
        ("unix:///nowhere/redis.sock", "/nowhere/redis.sock.*is the server running"),
        ("redis+cluster://127.0.0.1:{port}", "127.0.0.1:{port}.*is the server running"),
        ("redis+sentinel://127.0.0.1:{port}/main/0", "127.0.0.1:{port}.*is the server running"),
    ],
)
def test_an_unreachable_server_is_named_with_the_remedy_and_without_delay(
    face: Face, url: str, says: str
) -> None:
    port = free_port()

    async def body() -> None:
        link = open_face(url.format(port=port), face, timeout=60)
        start = time.monotonic()
        with pytest.raises(StoreUnavailable, match=says.format(port=port)) as told:
            await link.call(ECHO, [b"k"], [1])
        assert time.monotonic() - start < 20
        assert told.value.__cause__ is not None
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_tls_against_a_plain_server_fails_with_a_tls_message(
    redis_server: services.RedisServer, face: Face
) -> None:
    async def body() -> None:
        link = open_face(f"rediss://{redis_server.host}:{redis_server.port}/0", face, timeout=0.5)
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{redis_server.port}"):
            await link.call(ECHO, [b"k"], [1])
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", FACES)
def test_a_unix_socket_works(face: Face, tmp_path: Path) -> None:
    with services.redis(config={"unixsocket": "redis.sock", "unixsocketperm": 777}) as server:
        path = server.folder / "redis.sock"

        async def body() -> None:
            link = open_face(f"unix://{path}?db=2", face)
            assert await link.call(ECHO, [b"k"], ["unix"]) == [b"k", b"unix"]
            assert b"db=2" in await link.command("CLIENT", "INFO")
            await link.aclose()

        run(face, body())


@pytest.fixture(scope="module")
def tls_server() -> Iterator[tuple[services.RedisServer, int, Path]]:
    # Not pytest's folder, which nobody else may enter: the server runs as somebody else.
    with tempfile.TemporaryDirectory(prefix="semel-tls-") as folder:
        yield from _tls_server(Path(folder))


def _tls_server(folder: Path) -> Iterator[tuple[services.RedisServer, int, Path]]:
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=localhost",
            ),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    for path in (folder, key, cert):
        path.chmod(0o755)
    port = free_port()
    config: dict[str, str | int] = {
        "tls-port": port,
        "tls-cert-file": str(key.with_name("cert.pem")),
        "tls-key-file": str(key),
        "tls-auth-clients": "no",
        "tls-ca-cert-file": str(cert),
    }
    with services.redis(config=config) as server:
        yield server, port, cert


@pytest.mark.parametrize("face", FACES)
def test_tls_works_and_an_unknown_authority_is_refused(
    tls_server: tuple[services.RedisServer, int, Path], face: Face
) -> None:
    _, port, cert = tls_server

    async def body() -> None:
        link = open_face(f"rediss://127.0.0.1:{port}/1?ssl_ca_certs={cert}", face)
        replies = await link.call_many([Call(ECHO, [b"k"], [b"x" * 100_000]) for _ in range(20)])
        assert all(len(reply[1]) == 100_000 for reply in replies)
        await link.aclose()
        strange = open_face(f"rediss://127.0.0.1:{port}/1", face)
        with pytest.raises(StoreUnavailable, match=f"TLS.*127.0.0.1:{port}.*ssl_ca_certs"):
            await strange.call(ECHO, [b"k"], [1])
        await strange.aclose()

    run(face, body())


@pytest.mark.parametrize(
    "source,says",
    [
        ("http://127.0.0.1", "redis\\+cluster://"),
        ("redis+nonsense://127.0.0.1", "redis\\+cluster://"),
        ("redis://", "names no server: redis://"),
        ("redis://127.0.0.1/zero", "must be a number"),
        ("redis://127.0.0.1/0?nonsense=1", "'nonsense'"),
        ("redis://127.0.0.1/0?socket_timeout=1", "timeouts are arguments"),
        ("redis://127.0.0.1:port/0", "port in a redis:// URL is not a number"),
        ("redis+cluster://127.0.0.1:1,:2", "number 2 of the hosts in the URL has no host"),
        ("redis+cluster://127.0.0.1:x", "no host:port"),
        ("redis+cluster://127.0.0.1:1/4", "only database 0"),
        ("redis+sentinel://127.0.0.1:1", "names its service"),
        ("redis+sentinel://127.0.0.1:1/main/0?sentinel_nonsense=1", "options do not fit"),
        ("unix://", "names no server: unix://"),
        ("unix://?db=1", "needs the socket's path"),
        (42, "int is no Redis URL"),
    ],
)
def test_a_source_that_cannot_work_is_refused_at_construction(source: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        open_link(source, colour="async")


@pytest.mark.parametrize(
    "options", [{"timeout": 0}, {"timeout": -1}, {"connect_timeout": 0}, {"timeout": float("nan")}]
)
def test_senseless_timeouts_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="seconds above 0"):
        open_link("redis://127.0.0.1", colour="sync", **options)  # type: ignore[arg-type]  # options by their names


# ------------------------------------------------------------------------------------------------ clients
def test_a_sync_client_or_pool_is_read_and_never_closed(locked_server: services.RedisServer) -> None:
    client = redis.Redis.from_url(locked_server.url.replace("/0", "/4"), client_name="theirs")
    client.ping()
    for source in (client, client.connection_pool):
        link = open_link(source, colour="sync")
        told = drive(link.command("CLIENT", "INFO"))
        assert b"name=theirs" in told
        assert b"db=4" in told
        link.close()
    assert client.ping()
    client.close()


def test_an_async_client_or_pool_is_read_and_never_closed(locked_server: services.RedisServer) -> None:
    async def body() -> None:
        client = redis.asyncio.Redis.from_url(locked_server.url, client_name="theirs", decode_responses=True)
        await client.ping()
        for source in (client, client.connection_pool):
            link = open_link(source, colour="async")
            assert b"name=theirs" in await link.command("CLIENT", "INFO")
            await link.aclose()
        assert await client.ping()
        await client.aclose()

    asyncio.run(body())


def test_a_client_of_the_wrong_colour_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"redis\.asyncio"):
        open_link(redis.Redis(), colour="async")
    with pytest.raises(ConfigurationError, match="sync face"):
        open_link(redis.asyncio.Redis(), colour="sync")


def test_our_connections_never_retry_by_themselves(redis_server: services.RedisServer) -> None:
    from semel.stores.redis.address import connection, read_target

    eager = redis.Redis.from_url(redis_server.url)  # redis-py's default: ten retries
    for colour, source in (("sync", eager), ("sync", redis_server.url), ("async", redis_server.url)):
        target = read_target(source, colour)  # type: ignore[arg-type]  # a literal, in a tuple
        made = connection(target, target.seeds[0], colour, connect_timeout=1)  # type: ignore[arg-type]  # a literal, in a tuple
        assert made.retry.get_retries() == 0
    eager.close()


# ------------------------------------------------------------------------------------------ refused writes
@pytest.mark.parametrize("face", COLOURS)
def test_a_server_that_takes_no_writes_is_unavailable_with_the_remedy(face: Face) -> None:
    with services.redis(config={"maxmemory": "1kb"}) as server:

        async def body() -> None:
            link = open_face(server.url, face)
            with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{server.port}.*OOM.*maxmemory") as told:
                await link.command("SET", "k", "v")
            assert isinstance(told.value.__cause__, ServerError)
            server.command("CONFIG", "SET", "maxmemory", "0")
            server.command("CONFIG", "SET", "min-replicas-to-write", "1")
            (refused,) = await link.call_many([Call(COUNT, [b"k"])])
            assert isinstance(refused, StoreUnavailable)
            assert "min-replicas-to-write" in str(refused)
            await link.aclose()

        run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_user_without_the_right_is_a_configuration_error(face: Face) -> None:
    with services.redis() as server:
        server.command("ACL", "SETUSER", "poor", "on", ">pw", "~*", "+ping")

        async def body() -> None:
            link = open_face(f"redis://poor:pw@127.0.0.1:{server.port}/0", face)
            assert await link.command("PING") == b"PONG"
            with pytest.raises(ConfigurationError, match="ACL"):
                await link.call(ECHO, [b"k"], [1])
            await link.aclose()

        run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_demoted_master_is_waited_for_until_the_time_is_over(face: Face) -> None:
    with services.redis() as server:

        async def body() -> None:
            link = open_face(server.url, face, timeout=5)
            await link.command("SET", "k", "v")
            server.command("REPLICAOF", "127.0.0.1", free_port())
            with pytest.raises(StoreUnavailable, match="READONLY") as told:
                await link.command("SET", "k", "w", timeout=0.3)
            assert isinstance(told.value.__cause__, ServerError)
            back = threading.Timer(0.3, lambda: server.command("REPLICAOF", "NO", "ONE"))
            back.start()
            assert await link.command("SET", "k", "w") == b"OK"
            back.join()
            await link.aclose()

        run(face, body())
