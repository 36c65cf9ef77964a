"""The Redis link against servers that talk nonsense, at its limits, and where it is closed from odd places."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from redis import exceptions as driver

from semel.errors import ConfigurationError, StoreUnavailable
from semel.stores.places import Place
from semel.stores.redis.errors import Overdue, ServerError
from semel.stores.redis.link import Call, Script, open_link
from semel.stores.redis.threads import _Socket
from semel.stores.redis.watch import Feed
from semel.testing import services
from semel.testing.services.server import wait_until
from tests.ops.redis_link_lab import (
    COLOURS,
    COUNT,
    ECHO,
    PUBLISH,
    Face,
    Scripted,
    drive,
    fresh,
    is_script,
    open_face,
    proxied,
    run,
    url_of,
)
from tests.ops.test_redis_link_watch import Bell


# -------------------------------------------------------------------------------------------- nonsense
@pytest.mark.parametrize(
    "face,answer",
    [
        ("sync", b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        ("async", b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        ("sync", b"+one\r\n+two\r\n"),
    ],
)
def test_a_server_that_does_not_keep_the_protocol_is_given_up(face: Face, answer: bytes) -> None:
    with Scripted(lambda _: answer) as server:

        async def body() -> None:
            link = open_face(f"redis://127.0.0.1:{server.port}/0", face, timeout=60)
            start = time.monotonic()
            with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{server.port}") as told:
                await link.call(ECHO, [b"k"], [1])
            assert time.monotonic() - start < 20
            assert told.value.__cause__ is not None
            await link.aclose()

        run(face, body())


class Dripping:
    """A socket on which a byte always arrives before the wait for it is over."""

    def __init__(self, reply: bytes) -> None:
        self._reply = iter(reply)

    def settimeout(self, span: float) -> None:
        assert span > 0

    def sendall(self, data: bytes) -> None:
        """To nobody."""

    def recv_into(self, buffer: bytearray) -> int:
        time.sleep(0.0005)
        buffer[0] = next(self._reply)
        return 1


def test_the_time_of_a_call_is_that_of_its_whole_reply_not_of_each_byte() -> None:
    dripping = _Socket(SimpleNamespace(_sock=Dripping(b"$20000\r\n" + b"x" * 20000 + b"\r\n")), Place())
    start = time.monotonic()
    with pytest.raises(Overdue, match="within the caller's time"):
        dripping.exchange(b"PING", 1, 1.0, start + 0.3)
    assert time.monotonic() - start < 8  # all of it would take 10 s


def test_a_stray_reply_ends_the_shared_connection() -> None:
    answers = iter([b"+one\r\n+stray\r\n", *[b"+fine\r\n"] * 9])
    with Scripted(lambda _: next(answers)) as server:

        async def body() -> None:
            link = open_link(f"redis://127.0.0.1:{server.port}/0", colour="async")
            assert await link.call(ECHO, [b"k"], [1]) == b"one"
            assert await link.call(ECHO, [b"k"], [2]) == b"fine", "not the stray one"
            await link.aclose()

        asyncio.run(body())


@pytest.mark.parametrize("face", COLOURS)
def test_two_cluster_nodes_that_point_at_each_other_are_not_a_hang(face: Face) -> None:
    def answer(command: bytes) -> bytes:
        if b"SLOTS" in command:
            node = f"*3\r\n$9\r\n127.0.0.1\r\n:{server.port}\r\n$2\r\nid\r\n"
            return f"*1\r\n*3\r\n:0\r\n:16383\r\n{node}".encode()
        return f"-MOVED 1 127.0.0.1:{server.port}\r\n".encode()

    with Scripted(answer) as server:

        async def body() -> None:
            link = open_face(f"redis+cluster://127.0.0.1:{server.port}", face, timeout=5)
            with pytest.raises(StoreUnavailable, match="keeps redirecting"):
                await link.call(ECHO, [b"k"], [1])
            await link.aclose()

        run(face, body())


@pytest.mark.parametrize("face", COLOURS)
@pytest.mark.parametrize(
    "scheme", ["redis+cluster://127.0.0.1:{port}", "redis+sentinel://127.0.0.1:{port}/main/0"]
)
@pytest.mark.parametrize("answer", [b"-ERR not today\r\n", b""])
def test_a_map_that_cannot_be_had_is_told(face: Face, scheme: str, answer: bytes) -> None:
    with Scripted(lambda _: answer) as server:

        async def body() -> None:
            link = open_face(scheme.format(port=server.port), face, timeout=0.3)
            start = time.monotonic()
            with pytest.raises((StoreUnavailable, ConfigurationError), match=f"127.0.0.1:{server.port}"):
                await link.call(ECHO, [b"k"], [1])
            with pytest.raises((StoreUnavailable, ConfigurationError), match=f"127.0.0.1:{server.port}"):
                await link.command_everywhere("PING")
            with pytest.raises((StoreUnavailable, ConfigurationError)):
                await link.watch(b"channel", lambda: None)
            assert time.monotonic() - start < 20
            await link.aclose()

        run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_subscriber_that_hears_nonsense_starts_over(face: Face) -> None:
    confirmed = b"*3\r\n$10\r\nssubscribe\r\n$1\r\nc\r\n:1\r\n"
    answers = iter([b"!nonsense\r\n", b"-TRYAGAIN later\r\n", confirmed])
    with Scripted(lambda _: next(answers)) as server:

        async def body() -> None:
            link = open_face(f"redis://127.0.0.1:{server.port}/0", face, timeout=5)
            bell = Bell(face)
            await link.watch(b"c", bell)
            await bell.until(1)
            await link.aclose()

        run(face, body())


def test_the_feed_refuses_an_error_that_answers_nothing() -> None:
    with pytest.raises(driver.InvalidResponse):
        Feed().receive(b"-ERR what\r\n")
    feed = Feed()
    feed.unsubscribe(b"c", sharded=False)
    assert feed.receive(b"-ERR what\r\n") == []


# ---------------------------------------------------------------------------------------------- limits
@pytest.mark.parametrize("face", COLOURS)
def test_a_database_that_does_not_exist_is_a_configuration_error(
    redis_server: services.RedisServer, face: Face
) -> None:
    async def body() -> None:
        link = open_face(redis_server.url.replace("/0", "/9999"), face)
        with pytest.raises(ConfigurationError, match="database"):
            await link.call(ECHO, [b"k"], [1])
        await link.aclose()

    run(face, body())


def test_too_many_unwritten_bytes_are_refused_with_a_clear_message(
    redis_server: services.RedisServer,
) -> None:
    async def body() -> None:
        link = open_link(redis_server.url, colour="async", max_queued_bytes=1000)
        assert link.timeout == 2.0
        first = asyncio.create_task(link.call(ECHO, [b"k"], [b"x" * 2000]))
        await asyncio.sleep(0)
        second = asyncio.create_task(link.call_many([Call(ECHO, [b"k"], [b"second"])]))
        assert len((await first)[1]) == 2000
        assert await second == [[b"k", b"second"]], "it waited for room"
        await link.aclose()

    asyncio.run(body())


@pytest.mark.parametrize("face", COLOURS)
def test_acks_without_a_key_and_without_replicas_counts_nobody(
    redis_server: services.RedisServer, face: Face
) -> None:
    async def body() -> None:
        link = open_face(redis_server.url, face)
        assert await link.call(Script("seven", "return 7"), [], acks=1, ack_timeout=0.01) == [7, 0]
        assert await link.call(COUNT, [b"plain" + fresh()], acks=1, ack_timeout=0.01) == [1, 0]
        refused, _ = await link.call_many(
            [Call(Script("bad", "return redis.error_reply('NO way')"), [b"k"], acks=1, ack_timeout=0.01)] * 2
        )
        assert isinstance(refused, ServerError)
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_the_first_command_for_everywhere_finds_the_masters_itself(
    redis_cluster: services.RedisCluster, redis_sentinel: services.RedisSentinel, face: Face
) -> None:
    async def body() -> None:
        for source, masters in ((redis_cluster.url, 3), (redis_sentinel.url, 1)):
            link = open_face(source, face)
            assert list((await link.command_everywhere("PING")).values()) == [b"PONG"] * masters
            await link.aclose()

    run(face, body())


def _ordered(group: services.RedisSentinel) -> bool:
    """Whether the fail-over begins: on a busy machine a replica may not be known to be well yet."""
    try:
        return bool(group.sentinels[0].command("SENTINEL", "FAILOVER", group.service_name))
    except driver.ResponseError as error:
        if "NOGOODSLAVE" not in str(error):
            raise
        return False


@pytest.mark.slow
@pytest.mark.parametrize("face", COLOURS)
def test_a_master_demoted_by_sentinel_is_left_for_the_new_one(face: Face) -> None:
    with services.redis_sentinel() as group:
        old = group.master()
        key = fresh()

        async def body() -> None:
            link = open_face(group.url, face, timeout=60)
            await link.call(COUNT, [key])
            wait_until(
                lambda: _ordered(group), timeout=30, what="Sentinel finds a replica that it can promote"
            )
            new = group.wait_failed_over(old)
            old.command("REPLICAOF", new.host, new.port)  # Sentinel itself would take ten seconds to say so
            for _ in range(20):
                await link.call(COUNT, [key])
            (served,) = await link.command_everywhere("PING")
            assert served != f"127.0.0.1:{old.port}"
            await link.aclose()

        run(face, body())


def test_a_missing_driver_names_the_extra() -> None:
    program = "import sys; sys.modules[{name!r}] = None\nimport semel.stores.redis.link"
    for name in ("redis", "hiredis"):
        ended = subprocess.run(
            [sys.executable, "-c", program.format(name=name)], capture_output=True, text=True, check=False
        )
        assert f"Redis needs the package '{name}': pip install 'semel[redis]'" in ended.stderr


# ------------------------------------------------------------------------------------------ closing oddly
def test_an_async_link_is_closed_from_another_thread(redis_server: services.RedisServer) -> None:
    link = open_link(redis_server.url + "?client_name=elsewhere", colour="async")
    using, closed = threading.Event(), threading.Event()

    async def use() -> None:
        await link.call(ECHO, [b"k"], [1])
        using.set()
        while not closed.is_set():
            await asyncio.sleep(0.001)

    worker = threading.Thread(target=lambda: asyncio.run(use()))
    worker.start()
    assert using.wait(30)
    link.close()
    end = time.monotonic() + 20
    while "elsewhere" in str(redis_server.command("CLIENT", "LIST")):
        assert time.monotonic() < end
        time.sleep(0.01)
    closed.set()
    worker.join()


@pytest.mark.parametrize("how", ["close", "aclose"])
def test_an_async_link_on_a_resting_loop_is_closed_too(redis_server: services.RedisServer, how: str) -> None:
    link = open_link(redis_server.url + "?client_name=resting", colour="async")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(link.call(ECHO, [b"k"], [1]))
    if how == "close":
        link.close()
    else:
        loop.run_until_complete(link.aclose())
    assert "resting" not in str(redis_server.command("CLIENT", "LIST"))
    loop.close()


def test_a_call_that_is_never_sent_because_its_caller_left_costs_the_server_nothing(
    redis_server: services.RedisServer,
) -> None:
    with proxied(redis_server) as proxy:

        async def body() -> None:
            link = open_link(url_of(proxy), colour="async")
            await link.call(ECHO, [b"k"], [b"warm"])
            before = proxy.requests
            left: Any = asyncio.ensure_future(link.call(ECHO, [b"k"], [b"left"]))
            asyncio.get_running_loop().call_soon(left.cancel)
            with pytest.raises(asyncio.CancelledError):
                await left
            assert (await link.call(ECHO, [b"k"], [b"stays"]))[1] == b"stays"
            assert proxy.requests == before + 1
            await link.aclose()

        asyncio.run(body())


def test_unwatching_while_the_subscription_is_being_asked_for_is_fine(
    redis_server: services.RedisServer,
) -> None:
    with proxied(redis_server) as proxy:

        async def body() -> None:
            link = open_link(url_of(proxy), colour="async")
            channel = fresh("channel")
            proxy.stall(match=lambda request: b"SUBSCRIBE" in request and not is_script(request))
            asked = asyncio.create_task(link.watch(channel, lambda: None))
            await asyncio.sleep(0.05)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            proxy.release()
            bell = Bell("async")
            await link.watch(channel, bell)
            assert await link.call(PUBLISH, [channel]) == 1
            await bell.until(1)
            await link.aclose()

        asyncio.run(body())


def test_a_sync_link_closed_in_a_child_that_never_used_it_leaves_the_parent_alone(
    redis_server: services.RedisServer,
) -> None:
    from tests.ops.test_redis_link_life import in_child

    link = open_link(redis_server.url, colour="sync")
    mine = drive(link.command("CLIENT", "ID"))
    assert in_child(link.close) == 0
    assert drive(link.command("CLIENT", "ID")) == mine
    link.close()
