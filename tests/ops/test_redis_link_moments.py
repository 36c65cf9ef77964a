"""The link in moments that seldom come: a server that loads, a connection that ends with its login, a place in a queue."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import redis.asyncio
from redis import exceptions as driver

from semel.errors import ConfigurationError, StoreUnavailable
from semel.stores.redis.errors import Overdue
from semel.stores.redis.link import open_link
from semel.stores.redis.loops import LoopLink
from semel.stores.redis.threads import ThreadLink
from semel.stores.redis.watch import _Topic
from semel.stores.redis.watch_threads import _ThreadLine
from semel.stores.redis.wire import forget, transport_of
from semel.testing import services
from tests.ops.redis_link_lab import (
    COLOURS,
    ECHO,
    ONCE,
    Face,
    Scripted,
    drive,
    fresh,
    is_script,
    once_keys,
    open_face,
    proxied,
    run,
    url_of,
)


@pytest.mark.parametrize("face", COLOURS)
def test_a_server_that_loads_its_data_is_waited_for_and_told(face: Face) -> None:
    with Scripted(lambda _: b"-LOADING Redis is loading the dataset in memory\r\n") as server:

        async def body() -> None:
            link = open_face(f"redis://127.0.0.1:{server.port}/1", face, timeout=0.3)
            start = time.monotonic()
            with pytest.raises(StoreUnavailable, match="still loading"):
                await link.call(ECHO, [b"k"], [1])
            assert time.monotonic() - start > 0.25  # it was worth waiting for
            await link.aclose()

        run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_connection_class_of_the_callers_own_is_kept(
    redis_server: services.RedisServer, face: Face
) -> None:
    made: list[object] = []
    package: Any = redis.connection if face == "sync" else redis.asyncio.connection

    class Counted(package.Connection):  # type: ignore[misc]  # a class of either colour
        def __init__(self, **settings: Any) -> None:
            made.append(self)
            super().__init__(**settings)

    faces: Any = redis if face == "sync" else redis.asyncio

    async def body() -> None:
        pool = faces.ConnectionPool(
            connection_class=Counted, host=redis_server.host, port=redis_server.port, db=3
        )
        link = open_face(faces.Redis(connection_pool=pool), face)
        assert await link.call(ECHO, [b"k"], [b"x"]) == [b"k", b"x"]
        assert b"db=3" in await link.command("CLIENT", "INFO")
        assert made
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_single_server_is_no_cluster_for_a_watcher_either(
    redis_server: services.RedisServer, face: Face
) -> None:
    async def body() -> None:
        link = open_face(f"redis+cluster://{redis_server.host}:{redis_server.port}", face, timeout=5)
        with pytest.raises(ConfigurationError, match="redis://"):
            await link.watch(b"channel", lambda: None)
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_one_moved_slot_is_reason_enough_to_ask_for_the_whole_map(
    redis_cluster: services.RedisCluster, face: Face
) -> None:
    async def body() -> None:
        link: Any = open_face(redis_cluster.url, face, timeout=10)
        key = fresh()
        assert (await link.call(ONCE, once_keys(key), [b"first"]))[0] == b"first"
        topology = link._topology
        home, *others = sorted(set(topology.masters()), key=lambda node: node != topology.locate(key))
        topology._slots = [others[0]] * len(topology._slots)  # as after a resharding
        topology.refreshed_at -= 60
        assert (await link.call(ONCE, once_keys(key), [b"second"]))[0] == b"second"
        assert set(topology.masters()) == {home, *others}
        await link.aclose()

    run(face, body())


def test_a_module_that_is_missing_for_another_reason_is_not_blamed_on_the_extra() -> None:
    program = (
        "import sys; sys.modules['semel.stores.redis.courier'] = None\n"
        "try:\n    import semel.stores.redis.link\n"
        "except ModuleNotFoundError as error:\n    print(error.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "semel.stores.redis.courier"


def test_a_link_closed_in_another_loop_ends_in_its_own(redis_server: services.RedisServer) -> None:
    link: Any = open_link(redis_server.url, colour="async")
    used, ended = threading.Event(), threading.Event()

    async def user() -> None:
        await link.call(ECHO, [b"k"], [1])
        home = link._home
        used.set()
        while not home.closed:
            await asyncio.sleep(0.005)
        ended.set()

    thread = threading.Thread(target=lambda: asyncio.run(user()))
    thread.start()
    assert used.wait(10)
    asyncio.run(link.aclose())
    assert ended.wait(10)
    thread.join()


def test_who_waits_for_a_connection_gets_the_place_of_one_that_broke(
    redis_server: services.RedisServer,
) -> None:
    with proxied(redis_server) as proxy:
        link = open_link(url_of(proxy), colour="sync", timeout=10, max_connections=1)
        assert isinstance(link, ThreadLink)
        drive(link.call(ECHO, [b"k"], [b"warm"]))
        blocked = proxy.blackhole(match=is_script)
        answers: list[Any] = []
        threads = [
            threading.Thread(target=lambda: answers.append(drive(link.call(ECHO, [b"k"], [b"x"]))))
            for _ in range(2)
        ]
        threads[0].start()
        assert blocked.fired.wait(5)
        threads[1].start()
        (stack,) = link._stacks.values()
        assert _comes_true(lambda: bool(stack._turns._line))
        proxy.cut()
        for thread in threads:
            thread.join(10)
        assert answers == [[b"k", b"x"]] * 2
        drive(link.aclose())


def test_without_time_no_connection_is_tried(redis_server: services.RedisServer) -> None:
    link: Any = open_link(redis_server.url, colour="sync")
    with pytest.raises(Overdue, match="no time left"):
        link._connect(link._target.seeds[0], 0.0)
    drive(link.aclose())


# ---- a connection that ends with its login
class Closing:
    """Dials, and closes the first connections under the hand that takes them."""

    def __init__(self, link: LoopLink, times: int) -> None:
        self._dial = link._dial
        self._times = times

    async def __call__(self, *where: Any, **how: Any) -> Any:
        made = await self._dial(*where, **how)
        self._times -= 1
        if self._times >= 0:
            transport_of(made).abort()
        return made


@pytest.mark.parametrize("watches", [False, True])
def test_a_connection_that_closes_right_after_its_login_is_replaced(
    redis_server: services.RedisServer, monkeypatch: pytest.MonkeyPatch, watches: bool
) -> None:
    async def body() -> None:
        link = open_link(redis_server.url, colour="async", timeout=10)
        assert isinstance(link, LoopLink)
        monkeypatch.setattr(link, "_dial", Closing(link, 1))
        if watches:
            unwatch = await link.watch(b"channel", lambda: None)
            await unwatch()
        else:
            assert await link.call(ECHO, [b"k"], [b"x"]) == [b"k", b"x"]
        await link.aclose()

    asyncio.run(body())


def test_a_redis_client_of_another_make_is_refused_by_name() -> None:
    with pytest.raises(driver.ConnectionError, match="this redis version is not supported"):
        transport_of(SimpleNamespace(_writer=None))


class Suspended:
    """Awaited, it never goes on."""

    def __await__(self) -> Any:
        yield


def test_a_client_that_takes_its_time_to_say_goodbye_is_not_waited_for() -> None:
    steps: list[str] = []

    class Slow:
        async def disconnect(self, *, nowait: bool) -> None:
            steps.append("asked")
            try:
                await Suspended()
            finally:
                steps.append("left")

    forget(Slow())
    assert steps == ["asked", "left"]


# ---- subscriptions
def test_a_channel_that_somebody_came_back_to_is_not_dropped(redis_server: services.RedisServer) -> None:
    link: Any = open_link(redis_server.url, colour="sync")
    unwatch = drive(link.watch(b"channel", lambda: None))
    watcher = link._watcher
    (topic,) = watcher._topics.values()
    assert isinstance(topic, _Topic)
    watcher._drop(b"channel", topic)
    assert watcher._topics == {b"channel": topic}
    drive(unwatch())
    drive(link.aclose())


def test_a_ping_that_is_out_is_waited_for_whatever_else_happens(redis_server: services.RedisServer) -> None:
    with proxied(redis_server) as proxy:
        link: Any = open_link(url_of(proxy), colour="sync", timeout=30, ping_every=0.05)
        drive(link.watch(b"one", lambda: None))
        (line,) = link._watcher._lines.values()
        pinged = proxy.stall(match=lambda request: b"PING" in request)
        assert pinged.fired.wait(10)
        turns = _counted(link._watcher)
        for number in range(3):
            link._watcher._nudge()
            assert _comes_true(lambda want=number: len(turns) > want)  # type: ignore[misc]  # mypy knows no lambda with a default
        proxy.release()
        drive(link.watch(b"two", lambda: None))
        assert list(link._watcher._lines.values()) == [line]
        drive(link.aclose())


def _counted(watcher: Any) -> list[float]:
    turns: list[float] = []
    turn = watcher._turn_now

    def counted() -> float:
        turns.append(turn())
        return turns[-1]

    watcher._turn_now = counted
    return turns


def _comes_true(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 20
    while not condition() and time.monotonic() < until:
        time.sleep(0.001)
    return condition()


def test_a_line_that_cannot_be_written_to_is_lost_and_replaced(redis_server: services.RedisServer) -> None:
    link: Any = open_link(redis_server.url, colour="sync", timeout=5)
    woken = threading.Event()
    drive(link.watch(b"one", woken.set))
    watcher = link._watcher
    (line,) = watcher._lines.values()

    def broken(data: bytes) -> None:
        raise BrokenPipeError("gone")

    line.write = broken
    drive(link.watch(b"two", lambda: None))  # written to the old line, lost, and asked for again on a new one
    assert list(watcher._lines.values()) != [line]
    drive(link.command("PUBLISH" if not watcher._sharded else "SPUBLISH", b"one", b"x"))
    assert woken.wait(5)
    drive(link.aclose())


def test_what_came_before_the_end_of_a_stream_is_heard_and_the_end_next_time() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(0)
        far.sendall(b"the last word")
        far.shutdown(socket.SHUT_WR)
        line: Any = SimpleNamespace(sock=near)
        assert _ThreadLine.drain(line) == b"the last word"
        with pytest.raises(ConnectionResetError, match="closed"):
            _ThreadLine.drain(line)


def test_who_is_woken_may_close_the_link_that_wakes_him(redis_server: services.RedisServer) -> None:
    link: Any = open_link(redis_server.url, colour="sync", timeout=5)
    closed = threading.Event()

    def close() -> None:
        drive(link.aclose())
        closed.set()

    drive(link.watch(b"one", close))
    thread = link._watcher._thread
    with redis.Redis(host=redis_server.host, port=redis_server.port) as stranger:
        stranger.execute_command("SPUBLISH" if link._watcher._sharded else "PUBLISH", b"one", b"x")
    assert closed.wait(5)
    thread.join(5)
    assert not thread.is_alive()


def test_a_channel_that_was_never_asked_for_is_dropped_without_a_word(
    redis_server: services.RedisServer,
) -> None:
    link: Any = open_link(redis_server.url, colour="sync")
    drive(link.watch(b"one", lambda: None))
    watcher, topic = link._watcher, _Topic()
    watcher._topics[b"two"] = topic
    watcher._drop(b"two", topic)
    assert list(watcher._topics) == [b"one"]
    drive(link.aclose())


def test_the_connections_of_a_loop_can_be_closed_twice(redis_server: services.RedisServer) -> None:
    async def body() -> None:
        link: Any = open_link(redis_server.url, colour="async")
        await link.watch(b"one", lambda: None)
        await link.call(ECHO, [b"k"], [1])
        home = link._home
        (line,) = home.watcher._lines.values()
        await asyncio.gather(home.aclose(), home.aclose())
        line.connection_lost(None)  # a second end of the same line is nobody's business
        await link.aclose()

    asyncio.run(body())


def test_a_watcher_of_threads_that_would_suspend_is_a_mistake_and_says_so(
    redis_server: services.RedisServer,
) -> None:
    link: Any = open_link(redis_server.url, colour="sync")
    drive(link.watch(b"one", lambda: None))

    async def suspends() -> float:
        await Suspended()
        return 0.0

    stand_in = SimpleNamespace(turn=suspends)
    with pytest.raises(AssertionError, match="must not suspend"):
        type(link._watcher)._turn_now(stand_in)
    drive(link.aclose())


# ---- no time, no room, no place
@pytest.mark.parametrize("face", COLOURS)
def test_whoever_meets_a_silent_node_of_a_cluster_has_time_for_the_next_and_no_more_than_his_own(
    face: Face,
) -> None:
    with Scripted(lambda _: b"") as silent, Scripted(lambda _: b"") as other:

        async def body() -> None:
            url = f"redis+cluster://127.0.0.1:{silent.port},127.0.0.1:{other.port}"
            link = open_face(url, face, timeout=0.5, connect_timeout=30)
            start = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await link.call(ECHO, [b"k"], [1])
            assert time.monotonic() - start < 15
            await link.aclose()

        run(face, body())
        assert [len(silent._open), len(other._open)] == [1, 1]


def test_a_post_needs_a_connection_and_room_on_it(redis_server: services.RedisServer) -> None:
    async def body() -> None:
        link: Any = open_link(redis_server.url, colour="async", max_queued_bytes=100)
        command = b"*2\r\n$4\r\nECHO\r\n$100\r\n" + b"x" * 100 + b"\r\n"
        assert link.post(b"k", command) is None, "nothing is connected yet"
        await link.call(ECHO, [b"k"], [1])
        first, second = link.post(b"k", command), link.post(b"k", command)
        assert first is not None
        assert second is None, "more bytes wait than may wait"
        assert await first == b"x" * 100
        third = link.post(b"k", command)
        assert third is not None, "they are written"
        assert await third == b"x" * 100
        await link.aclose()
        assert link.post(b"k", command) is None

    asyncio.run(body())


def test_a_post_to_a_cluster_whose_map_is_not_known_is_not_sent(redis_cluster: services.RedisCluster) -> None:
    link: Any = open_link(redis_cluster.url, colour="sync")
    assert link.post(b"k", b"") is None
    drive(link.aclose())


def _interrupt(when: Callable[[], bool]) -> None:
    assert _comes_true(when)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


class Rang(BaseException):
    """What a signal's handler raises."""


@pytest.mark.parametrize("handed", [False, True], ids=["while it waits", "when it has just been handed one"])
def test_a_thread_that_is_interrupted_in_the_queue_for_a_connection_takes_none_along(
    redis_server: services.RedisServer, handed: bool
) -> None:
    assert threading.current_thread() is threading.main_thread()
    with proxied(redis_server) as proxy:
        link: Any = open_link(url_of(proxy), colour="sync", timeout=10, max_connections=1)
        drive(link.call(ECHO, [b"k"], [b"warm"]))
        held = proxy.stall(match=is_script)
        answers: list[Any] = []
        holder = threading.Thread(target=lambda: answers.append(drive(link.call(ECHO, [b"k"], [b"x"]))))
        holder.start()
        assert held.fired.wait(5)
        (stack,) = link._stacks.values()

        def ring(*_: object) -> None:
            if handed:
                proxy.release()
                assert _comes_true(lambda: not stack._turns._line)
            raise Rang

        before = signal.signal(signal.SIGUSR1, ring)
        interrupter = threading.Thread(target=_interrupt, args=(lambda: bool(stack._turns._line),))
        interrupter.start()
        try:
            with pytest.raises(Rang):
                drive(link.call(ECHO, [b"k"], [b"y"]))
        finally:
            signal.signal(signal.SIGUSR1, before)
        proxy.release()
        holder.join(10)
        interrupter.join(10)
        assert answers == [[b"k", b"x"]]
        assert drive(link.call(ECHO, [b"k"], [b"z"])) == [b"k", b"z"], "its place is free"
        assert len(stack._places._taken) == 1
        drive(link.aclose())
