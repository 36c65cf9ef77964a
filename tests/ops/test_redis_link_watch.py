"""Wake-ups over Redis pub/sub: prompt, one connection, nothing missed for good."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.credentials import CredentialProvider

from semel.errors import StoreUnavailable
from semel.stores.redis.link import Link, open_link
from semel.stores.redis.loops import LoopLink
from semel.stores.redis.threads import ThreadLink
from semel.stores.redis.watch import Deaf, Feed, Watcher
from semel.testing import services
from semel.testing.proxy import Proxy
from semel.testing.services.redis import redis_program
from tests.ops.redis_link_lab import COLOURS, FACES, PUBLISH, Face, fresh, open_face, proxied, run, url_of


class Bell:
    """Counts its rings and can be waited for in either colour without a fixed sleep."""

    def __init__(self, face: Face) -> None:
        self.face: Face = face
        self.rings = 0

    def __call__(self) -> None:
        self.rings += 1

    async def until(self, rings: int, timeout: float = 10.0) -> None:
        await eventually(self.face, lambda: self.rings >= rings, timeout)


async def eventually(face: Face, ready: Callable[[], Any], timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not ready():
        assert time.monotonic() < end, "not in time"
        if face == "sync":
            time.sleep(0.001)
        else:
            await asyncio.sleep(0.001)


@pytest.fixture
def proxy(redis_server: services.RedisServer) -> Iterator[Proxy]:
    with proxied(redis_server) as made:
        yield made


async def ring(link: Link, channel: bytes) -> int:
    listeners: int = await link.call(PUBLISH, [channel])
    return listeners


@pytest.mark.parametrize("face", FACES)
def test_a_message_wakes_everybody_who_watches_its_channel_and_nobody_else(
    redis_server: services.RedisServer, face: Face
) -> None:
    ours, other = fresh("channel"), fresh("channel")

    async def body() -> None:
        link = open_face(redis_server.url, face)
        first, second, stranger = Bell(face), Bell(face), Bell(face)
        ends = [
            await link.watch(ours, first),
            await link.watch(ours, second),
            await link.watch(other, stranger),
        ]
        assert await ring(link, ours) == 1, "one subscription, however many watch"
        await first.until(1)
        await second.until(1)
        await ends[0]()
        await ends[0]()
        assert await ring(link, ours) == 1
        await second.until(2)
        assert (first.rings, stranger.rings) == (1, 0)
        await ends[1]()
        await eventually(face, lambda: redis_server.command("PUBSUB", "SHARDNUMSUB", ours)[1] == 0)
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_many_channels_share_one_subscriber_connection(
    redis_server: services.RedisServer, face: Face
) -> None:
    channels = [fresh("channel") for _ in range(200)]

    async def body() -> None:
        link = open_face(redis_server.url, face)
        bells = [Bell(face) for _ in channels]
        for channel, bell in zip(channels, bells, strict=True):
            await link.watch(channel, bell)
        clients = (await link.command("CLIENT", "LIST", "TYPE", "pubsub")).decode().splitlines()
        assert len([line for line in clients if f"ssub={len(channels)}" in line]) == 1
        for channel in channels:
            await ring(link, channel)
        for bell in bells:
            await bell.until(1)
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_the_subscription_stands_when_watch_returns(redis_server: services.RedisServer, face: Face) -> None:
    async def body() -> None:
        link = open_face(redis_server.url, face)
        for _ in range(50):
            channel, bell = fresh("channel"), Bell(face)
            end = await link.watch(channel, bell)
            assert await ring(link, channel) == 1
            await end()
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_ending_and_watching_again_at_once_leaves_the_channel_watched(
    redis_server: services.RedisServer, face: Face
) -> None:
    channel = fresh("channel")

    async def body() -> None:
        link = open_face(redis_server.url, face)
        for turn in range(30):
            bell = Bell(face)
            end = await link.watch(channel, bell)
            assert await ring(link, channel) == 1, turn
            await bell.until(1)
            await end()
        await link.aclose()

    run(face, body())


def test_a_message_that_was_on_its_way_when_nobody_watched_any_more_wakes_nobody(
    redis_server: services.RedisServer, proxy: Proxy
) -> None:
    gone, kept, third = fresh("channel"), fresh("channel"), fresh("channel")

    async def body() -> None:
        link = open_link(url_of(proxy), colour="async", timeout=30)
        late, bell = Bell("async"), Bell("async")
        end = await link.watch(gone, late)
        await link.watch(kept, bell)
        held = proxy.stall(match=lambda request: b"SSUBSCRIBE" in request)
        asked = asyncio.create_task(link.watch(third, lambda: None))
        await eventually("async", held.fired.is_set)
        assert redis_server.command("SPUBLISH", gone, b"x") == 1
        await end()
        await eventually("async", lambda: redis_server.command("PUBSUB", "SHARDNUMSUB", gone)[1] == 0)
        proxy.release()
        await asked
        assert redis_server.command("SPUBLISH", kept, b"x") == 1
        await bell.until(1)  # it came on the same connection, after the other one
        assert late.rings == 0
        await link.aclose()

    asyncio.run(body())


@pytest.mark.parametrize("face", FACES)
def test_after_a_cut_the_subscription_comes_back_and_everybody_is_woken(proxy: Proxy, face: Face) -> None:
    channel = fresh("channel")

    async def body() -> None:
        link = open_face(url_of(proxy), face)
        bell = Bell(face)
        await link.watch(channel, bell)
        proxy.cut()
        await bell.until(1)  # a message may have been missed
        assert await ring(link, channel) == 1
        await bell.until(2)
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_subscriber_connection_that_falls_silent_is_noticed_and_replaced(proxy: Proxy, face: Face) -> None:
    channel = fresh("channel")

    async def body() -> None:
        link = open_face(url_of(proxy), face, timeout=1, ping_every=0.1)
        bell = Bell(face)
        await link.watch(channel, bell)
        rule = proxy.blackhole(match=lambda request: b"PING" in request)
        await bell.until(1, timeout=20)
        assert rule.fired.is_set()
        assert await ring(link, channel) == 2, "the server still believes in the dead one"
        await bell.until(2)
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_restarted_server_is_subscribed_to_again(face: Face) -> None:
    with services.redis() as server:
        channel = fresh("channel")

        async def body() -> None:
            link = open_face(server.url, face, timeout=30)
            bell = Bell(face)
            await link.watch(channel, bell)
            server.kill()
            late = threading.Timer(0.3, server.start)
            late.start()
            await bell.until(1)
            late.join()
            assert await ring(link, channel) == 1
            await bell.until(2)
            await link.aclose()

        run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_watching_an_unreachable_server_is_told_and_does_not_hang(face: Face) -> None:
    with services.redis() as server:
        dead = server.url

    async def body() -> None:
        link = open_face(dead, face, timeout=60)
        start = time.monotonic()
        with pytest.raises(StoreUnavailable, match="is the server running"):
            await link.watch(fresh("channel"), Bell(face))
        assert time.monotonic() - start < 20
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_subscription_that_is_not_confirmed_ends_on_time(proxy: Proxy, face: Face) -> None:
    async def body() -> None:
        link = open_face(url_of(proxy), face, timeout=0.3)
        await link.command("PING", timeout=20)
        for number in range(1, 9):  # whichever connection it is asked for on
            proxy.stall(at=number, match=lambda request: b"SUBSCRIBE" in request)
        start = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"subscription within 0\.3 s"):
            await link.watch(fresh("channel"), Bell(face))
        assert time.monotonic() - start < 20
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_subscription_that_is_not_answered_is_asked_for_on_another_connection(
    proxy: Proxy, face: Face
) -> None:
    channel = fresh("channel")

    async def body() -> None:
        link = open_face(url_of(proxy), face, timeout=6)
        await link.command("PING", timeout=20)
        stalled = proxy.stall(match=lambda request: b"SUBSCRIBE" in request)
        bell = Bell(face)
        await link.watch(channel, bell)  # within its timeout
        assert stalled.fired.is_set()
        assert await ring(link, channel) >= 1
        await bell.until(1)
        await link.aclose()

    run(face, body())


def test_a_callback_that_raises_does_not_end_the_subscriptions(
    redis_server: services.RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    channel = fresh("channel")

    async def body() -> None:
        link = open_link(redis_server.url, colour="async")
        bell = Bell("async")

        def bad() -> None:
            raise RuntimeError("a stranger's bug")

        await link.watch(channel, bad)
        await link.watch(channel, bell)
        await ring(link, channel)
        await ring(link, channel)
        await bell.until(2)
        await link.aclose()

    asyncio.run(body())
    assert "a wake-up callback failed" in caplog.text


class OldServer(services.RedisServer):
    """Redis 6 is not at hand: a server that hides SSUBSCRIBE answers as it does."""

    def argv(self) -> list[str]:
        return [*super().argv(), "--rename-command", "SSUBSCRIBE", "hidden"]


def test_a_server_without_sharded_channels_gets_plain_ones() -> None:
    with OldServer(program=redis_program()).open() as server:
        channel = fresh("channel")

        async def body() -> None:
            link = open_link(server.url, colour="async")
            bell = Bell("async")
            end = await link.watch(channel, bell)
            assert await link.command("PUBLISH", channel, "x") == 1
            await bell.until(1)
            await end()
            await eventually("async", lambda: server.command("PUBSUB", "NUMSUB", channel)[1] == 0)
            await link.aclose()

        asyncio.run(body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_forbidden_subscription_is_told_until_the_right_is_given(face: Face) -> None:
    with services.redis() as server:
        server.command("ACL", "SETUSER", "deaf", "on", ">pw", "~*", "+@all", "resetchannels")
        channel = fresh("channel")

        async def body() -> None:
            link = open_face(f"redis://deaf:pw@127.0.0.1:{server.port}/0", face)
            for _ in range(2):
                with pytest.raises(Deaf, match="refused the subscription: NOPERM"):
                    await link.watch(channel, Bell(face))
            server.command("ACL", "SETUSER", "deaf", "&*")
            bell = Bell(face)
            await link.watch(channel, bell)
            assert await ring(link, channel) == 1
            await bell.until(1)
            server.command("ACL", "SETUSER", "deaf", "resetchannels")  # the server ends the connection
            await bell.until(2)  # from now on nobody else will tell
            await link.aclose()

        run(face, body())


# ------------------------------------------------------------------------------------- what nobody expects


class Tokens(CredentialProvider):
    """A token service that fails for the next few who ask."""

    def __init__(self) -> None:
        self.failures = 0

    def get_credentials(self) -> tuple[str, str]:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the token service is down")
        return "default", "any"


def client_of(server: services.RedisServer, face: Face, tokens: Tokens) -> Any:
    kind: Any = redis.Redis if face == "sync" else redis.asyncio.Redis
    return kind(host=server.host, port=server.port, credential_provider=tokens)


def watcher_of(link: Any) -> Watcher:
    found = link._watcher if isinstance(link, ThreadLink) else link._home.watcher
    assert isinstance(found, Watcher)
    return found


@pytest.mark.parametrize("face", FACES)
def test_credentials_that_cannot_be_had_for_a_moment_cost_no_subscription(
    redis_server: services.RedisServer, face: Face
) -> None:
    tokens, channel = Tokens(), fresh("channel")

    async def body() -> None:
        link = open_face(client_of(redis_server, face, tokens), face)
        await link.command("PING")
        tokens.failures = 2
        bell = Bell(face)
        await link.watch(channel, bell)
        assert not tokens.failures
        assert await ring(link, channel) == 1
        await bell.until(1)
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_credentials_that_cannot_be_had_are_told_as_any_connection_that_cannot_be_made(
    redis_server: services.RedisServer, face: Face
) -> None:
    tokens = Tokens()

    async def body() -> None:
        link = open_face(client_of(redis_server, face, tokens), face)
        tokens.failures = 1
        with pytest.raises(StoreUnavailable, match="the token service is down"):
            await link.command("PING")
        tokens.failures = 1
        with pytest.raises(StoreUnavailable, match="the token service is down") as told:
            await link.watch(fresh("channel"), Bell(face))
        assert isinstance(told.value.__cause__, RuntimeError)
        await link.command("PING")
        await link.watch(fresh("channel"), Bell(face))
        await link.aclose()
        link = open_face(client_of(redis_server, face, tokens), face)
        link._topology.proven = True  # type: ignore[attr-defined]  # it has answered before, on another connection
        tokens.failures = 2
        assert await link.command("PING") == b"PONG"  # worth another try, and no more than that
        assert not tokens.failures
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_credentials_that_cannot_be_had_for_a_moment_cost_no_map_of_the_cluster(
    redis_cluster: services.RedisCluster, face: Face
) -> None:
    tokens, channel = Tokens(), fresh("channel")
    node = redis_cluster.masters()[0]

    async def body() -> None:
        kind: Any = redis.RedisCluster if face == "sync" else redis.asyncio.RedisCluster
        theirs = kind(host=node.host, port=node.port, credential_provider=tokens)
        link = open_face(theirs, face)
        link._topology.proven = True  # type: ignore[attr-defined]  # worth another try
        tokens.failures = 2
        assert (await link.command("GET", channel, key=channel)) is None
        assert not tokens.failures
        await link.aclose()
        await theirs.aclose() if face == "async" else theirs.close()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_mapping_of_addresses_that_raises_does_not_end_the_wake_ups(
    redis_cluster: services.RedisCluster, face: Face
) -> None:
    channel = fresh("channel")
    failures: list[int] = []

    def remap(address: tuple[str, int]) -> tuple[str, int]:
        if failures:
            failures.pop()
            raise LookupError("the mapping is being written")
        return address

    async def body() -> None:
        kind: Any = redis.RedisCluster if face == "sync" else redis.asyncio.RedisCluster
        first = redis_cluster.masters()[0]
        theirs = kind(host=first.host, port=first.port, address_remap=remap)
        link = open_face(theirs, face)
        failures.extend([1, 2])
        bell = Bell(face)
        await link.watch(channel, bell)
        assert not failures
        assert await ring(link, channel) == 1
        await bell.until(1)
        await link.aclose()
        await theirs.aclose() if face == "async" else theirs.close()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_mistake_in_one_turn_is_logged_and_the_next_one_goes_on(
    redis_server: services.RedisServer,
    face: Face,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    really, mistakes = Watcher._drop, [1]

    def drop(self: Watcher, *topic: Any) -> None:
        if mistakes:
            mistakes.pop()
            raise ZeroDivisionError
        really(self, *topic)

    async def body() -> None:
        link = open_face(redis_server.url, face)
        monkeypatch.setattr(Watcher, "_drop", drop)
        channel, bell = fresh("channel"), Bell(face)
        await (await link.watch(fresh("channel"), Bell(face)))()
        await link.watch(channel, bell)
        await eventually(face, lambda: not mistakes)
        assert await ring(link, channel) == 1
        await bell.until(1)
        await link.aclose()

    run(face, body())
    assert "the subscriptions could not be kept" in caplog.text


async def end(watcher: Any, face: Face) -> None:
    """As no mistake of the watcher's own can: by taking away what it stands on."""
    if face == "sync":
        watcher._selector.close()
        watcher._nudge()
    else:
        watcher._task.cancel()  # as whoever cancels all tasks of a loop
    await eventually(face, lambda: watcher.ended)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("face", COLOURS)
def test_a_watcher_that_has_ended_is_replaced(redis_server: services.RedisServer, face: Face) -> None:
    async def body() -> None:
        link = open_face(redis_server.url, face)
        await link.watch(fresh("channel"), Bell(face))
        dead: Any = watcher_of(link)
        await end(dead, face)
        with pytest.raises(StoreUnavailable, match="was ended"):  # at once: not when its time is over
            if isinstance(link, LoopLink):
                await dead.watch(fresh("channel"), Bell(face), 1000)
            else:
                dead.watch(fresh("channel"), Bell(face), 1000)
        channel, bell = fresh("channel"), Bell(face)
        await link.watch(channel, bell)
        assert watcher_of(link) is not dead
        assert await ring(link, channel) == 1
        await bell.until(1)
        await link.aclose()

    run(face, body())


def test_a_wake_up_takes_about_a_millisecond(redis_server: services.RedisServer) -> None:
    channel = fresh("channel")
    waits: list[float] = []
    trips: list[float] = []

    async def body() -> None:
        link, other = (open_link(redis_server.url, colour="async") for _ in range(2))
        rung = asyncio.Event()
        await link.watch(channel, rung.set)
        for _ in range(200):
            rung.clear()
            start = time.perf_counter()
            await ring(other, channel)
            await rung.wait()
            waits.append(time.perf_counter() - start)
            start = time.perf_counter()
            await other.command("PING")
            trips.append(time.perf_counter() - start)
        await link.aclose()
        await other.aclose()

    asyncio.run(body())
    # Ten times the goal, for this machine is shared; more where a mere round trip takes more.
    assert sorted(waits)[100] < max(0.015, 8 * sorted(trips)[100])


def test_the_feed_understands_a_subscription_that_the_server_ends() -> None:
    feed = Feed()
    feed.subscribe(b"c", sharded=True)
    assert [event.kind for event in feed.receive(b"*3\r\n$10\r\nssubscribe\r\n$1\r\nc\r\n:1\r\n")] == [
        "standing"
    ]
    moved = feed.receive(b"*3\r\n$12\r\nsunsubscribe\r\n$1\r\nc\r\n:0\r\n")
    assert [(event.kind, event.channel) for event in moved] == [("dropped", b"c")]
    feed.unsubscribe(b"c", sharded=True)
    assert feed.receive(b"*3\r\n$12\r\nsunsubscribe\r\n$1\r\nc\r\n:0\r\n") == []
    assert feed.receive(b"+PONG\r\n*2\r\n$4\r\npong\r\n$0\r\n\r\n") == []
