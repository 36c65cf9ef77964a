"""Loops, threads, forks and the end: a link is built at import time and used from anywhere."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from semel.errors import ConfigurationError, StoreUnavailable
from semel.stores.redis.link import Call, Link, open_link
from semel.testing import services
from tests.ops.redis_link_lab import (
    COLOURS,
    COUNT,
    ECHO,
    FACES,
    ONCE,
    PUBLISH,
    Face,
    drive,
    fresh,
    is_script,
    once_keys,
    open_face,
    proxied,
    run,
    url_of,
)

Runner = Callable[[Coroutine[Any, Any, Any]], Any]


# ------------------------------------------------------------------------------------------------- loops
@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_two_loops_in_a_row_work_without_closing_and_without_warnings(
    redis_server: services.RedisServer, runner: Runner
) -> None:
    link = open_link(redis_server.url, colour="async")
    channel = fresh("channel")

    async def use() -> None:
        rung = asyncio.Event()
        await link.watch(channel, rung.set)
        await asyncio.gather(*(link.call(ECHO, [b"k"], [number]) for number in range(10)))
        await link.call(PUBLISH, [channel])
        await rung.wait()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            runner(use())
        gc.collect()
    assert [str(one.message) for one in said] == []
    assert redis_server.command("PUBSUB", "SHARDNUMSUB", channel)[1] == 0


def test_a_loop_that_ends_in_the_middle_of_calls_leaves_no_warning(
    redis_server: services.RedisServer,
) -> None:
    link = open_link(redis_server.url, colour="async")
    left: list[asyncio.Future[Any]] = []

    async def use() -> None:
        await link.call(ECHO, [b"k"], [b"warm"])
        left.extend(asyncio.ensure_future(link.call(ECHO, [b"k"], [b"left behind"])) for _ in range(50))
        await asyncio.sleep(0)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        asyncio.run(use())
        asyncio.run(use())
        gc.collect()
    assert [str(one.message) for one in said] == []


def test_a_link_dropped_without_closing_closes_its_connections_with_the_loop(
    redis_server: services.RedisServer,
) -> None:
    async def use() -> None:
        link = open_link(redis_server.url + "?client_name=dropped", colour="async")
        await link.call(ECHO, [b"k"], [1])
        assert "dropped" in redis_server.command("CLIENT", "LIST").__str__()
        del link
        gc.collect()
        await asyncio.sleep(0.01)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        asyncio.run(use())
        gc.collect()
    assert [str(one.message) for one in said] == []
    end = time.monotonic() + 20
    while "dropped" in str(redis_server.command("CLIENT", "LIST")):  # the server learns of it a moment later
        assert time.monotonic() < end, "a connection stayed open"
        time.sleep(0.01)


def test_loops_in_several_threads_share_a_link(redis_server: services.RedisServer) -> None:
    link = open_link(redis_server.url, colour="async")
    errors: list[BaseException] = []

    async def use(number: int) -> None:
        for turn in range(200):
            mine = f"{number}:{turn}".encode()
            assert await link.call(ECHO, [mine], [mine]) == [mine, mine]

    def work(number: int) -> None:
        try:
            asyncio.run(use(number))
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []
    link.close()


def test_a_link_whose_loop_has_ended_is_closed_in_another_one(redis_server: services.RedisServer) -> None:
    link = open_link(redis_server.url, colour="async")
    assert asyncio.run(_one_call(link)) == [b"k", b"1"]
    asyncio.run(link.aclose())
    with pytest.raises(StoreUnavailable, match="closed"):
        asyncio.run(_one_call(link))


async def _one_call(link: Link) -> Any:
    return await link.call(ECHO, [b"k"], [1])


def test_the_async_link_outside_of_a_loop_says_so() -> None:
    link = open_link("redis://127.0.0.1:1", colour="async")
    with pytest.raises(ConfigurationError, match="running asyncio"):
        link.call(ECHO, [b"k"]).send(None)


# ----------------------------------------------------------------------------------------------- threads
def test_a_thread_storm_gets_its_own_replies(redis_server: services.RedisServer) -> None:
    link = open_link(redis_server.url, colour="sync", timeout=30, max_connections=8)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(200):
                mine = f"{number}:{turn}".encode()
                assert drive(link.call(ECHO, [mine], [mine])) == [mine, mine]
                if turn % 20 == 0:
                    many = drive(link.call_many([Call(ECHO, [mine], [place]) for place in range(10)]))
                    assert [int(reply[1]) for reply in many] == list(range(10))
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(32)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []
    link.close()


def test_idle_connections_closed_by_the_server_are_not_used_again() -> None:
    with services.redis(config={"timeout": 1}) as server:
        link = open_link(server.url, colour="sync")
        key = fresh()
        drive(link.call(COUNT, [key], resend=False))
        end = time.monotonic() + 10
        while len(str(server.command("CLIENT", "LIST", "TYPE", "normal")).split("cmd=eval")) > 1:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert drive(link.call(COUNT, [key], resend=False)) == 2
        link.close()


GEVENT = """
from gevent import monkey
monkey.patch_all()
import threading, gevent
from tests.ops.redis_link_lab import ECHO, PUBLISH, drive, open_face
link = open_face({url!r}, "sync", max_connections=8)
rung = threading.Event()
drive(link.watch(b"channel", rung.set))
def work(number):
    for turn in range(50):
        mine = f"{{number}}:{{turn}}".encode()
        assert drive(link.call(ECHO, [mine], [mine], timeout=30)) == [mine, mine]
gevent.joinall([gevent.spawn(work, number) for number in range(50)], raise_error=True)
assert drive(link.call(PUBLISH, [b"channel"])) == 1
assert rung.wait(5)
link.close()
print("done")
"""


def test_greenlets_share_the_sync_link_and_none_of_them_starves(redis_server: services.RedisServer) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", GEVENT.format(url=redis_server.url)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


# ------------------------------------------------------------------------------------------------- forks
def in_child(work: Callable[[], None]) -> int:
    """Run in a forked child and return its exit code: 0 when it worked."""
    pid = os.fork()
    if pid == 0:  # pragma: no cover - the child's own process
        code = 1
        try:
            signal.alarm(20)
            work()
            code = 0
        except BaseException as error:
            os.write(2, f"child: {error!r}\n".encode())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_makes_its_own_sync_connections(redis_server: services.RedisServer) -> None:
    with proxied(redis_server) as proxy:
        link = open_link(url_of(proxy), colour="sync")
        rung = threading.Event()
        channel = fresh("channel")
        drive(link.watch(channel, rung.set))
        assert drive(link.command("CLIENT", "ID")) == drive(link.command("CLIENT", "ID"))
        mine = drive(link.command("CLIENT", "ID"))
        requests = proxy.requests

        def child() -> None:
            assert drive(link.command("CLIENT", "ID")) != mine
            heard = threading.Event()
            drive(link.watch(channel, heard.set))
            assert drive(link.call(PUBLISH, [channel])) == 2
            assert heard.wait(5)
            link.close()

        assert in_child(child) == 0
        assert proxy.requests > requests
        assert drive(link.command("CLIENT", "ID")) == mine, "the parent's connection was left alone"
        assert rung.wait(5)
        link.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("closing", [True, False])
def test_a_forked_child_makes_its_own_async_connections(
    redis_server: services.RedisServer, closing: bool
) -> None:
    link = open_link(redis_server.url, colour="async")

    async def parent() -> None:
        mine = await link.command("CLIENT", "ID")

        async def child() -> None:
            assert await link.command("CLIENT", "ID") != mine
            assert await link.call(ECHO, [b"k"], [b"child"]) == [b"k", b"child"]
            if closing:
                await link.aclose()

        def run_child() -> None:
            asyncio._set_running_loop(None)
            asyncio.run(child())

        assert in_child(run_child) == 0
        assert await link.command("CLIENT", "ID") == mine, "the parent's connection was left alone"
        replies = await asyncio.gather(*(link.call(ECHO, [b"k"], [number]) for number in range(50)))
        assert [int(reply[1]) for reply in replies] == list(range(50))
        await link.aclose()

    asyncio.run(parent())


def _pool_worker(number: int) -> list[bytes]:
    async def use() -> list[bytes]:
        assert _link is not None
        reply: list[bytes] = await _link.call(ECHO, [b"k"], [number])
        return reply

    return asyncio.run(use())


_link: Link | None = None


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_preforked_pool_of_processes_works_with_a_link_used_before_the_fork(
    redis_server: services.RedisServer,
) -> None:
    global _link  # noqa: PLW0603 - as in a module that a prefork server imports
    _link = open_link(redis_server.url, colour="async")
    assert _pool_worker(0) == [b"k", b"0"]
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map(_pool_worker, range(30)) == [[b"k", str(number).encode()] for number in range(30)]
        pool.close()
        pool.join()  # an orderly end: terminate() would hit children in the middle of their own clean-up
    assert _pool_worker(1) == [b"k", b"1"]
    _link.close()
    _link = None


# ------------------------------------------------------------------------------------------------- the end
@pytest.mark.parametrize("face", FACES)
def test_closing_twice_is_fine_and_a_closed_link_says_so(
    redis_server: services.RedisServer, face: Face
) -> None:
    async def body() -> None:
        link = open_face(redis_server.url, face)
        await link.call(ECHO, [b"k"], [1])
        await link.watch(fresh("channel"), lambda: None)
        await link.aclose()
        await link.aclose()
        link.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            await link.call(ECHO, [b"k"], [1])
        with pytest.raises(StoreUnavailable, match="closed"):
            await link.watch(b"channel", lambda: None)

    run(face, body())


@pytest.mark.parametrize("face", ["async", "uvloop"])
def test_closing_concurrently_ends_waiting_calls(redis_server: services.RedisServer, face: Face) -> None:
    with proxied(redis_server) as proxy:

        async def body() -> None:
            link = open_face(url_of(proxy), face, timeout=60)
            await link.call(ECHO, [b"k"], [b"warm"])
            await link.watch(fresh("channel"), lambda: None)
            proxy.stall(match=is_script)
            waiting = [asyncio.create_task(link.call(ECHO, [b"k"], [number])) for number in range(20)]
            await asyncio.sleep(0.05)
            start = time.monotonic()
            await asyncio.gather(*(link.aclose() for _ in range(5)))
            ends = await asyncio.gather(*waiting, return_exceptions=True)
            assert time.monotonic() - start < 20
            assert {type(end) for end in ends} == {StoreUnavailable}

        run(face, body())


def test_closing_while_dialling_ends_waiting_calls() -> None:
    with services.redis(password="pw") as server, server.paused():

        async def body() -> None:
            link = open_link(server.url, colour="async", timeout=60)
            waiting = asyncio.create_task(link.call(ECHO, [b"k"], [1]))
            await asyncio.sleep(0.05)
            await link.aclose()
            with pytest.raises(StoreUnavailable):
                await asyncio.wait_for(waiting, 20)

        asyncio.run(body())


def test_threads_closing_concurrently_with_calls_leave_no_socket_open(
    redis_server: services.RedisServer,
) -> None:
    link = open_link(redis_server.url + "?client_name=closing", colour="sync")
    started = threading.Barrier(9)

    def call() -> None:
        started.wait()
        try:
            while True:
                drive(link.call(ECHO, [b"k"], [1]))
        except StoreUnavailable:
            return

    def close() -> None:
        started.wait()
        time.sleep(0.05)
        link.close()

    workers = [threading.Thread(target=call) for _ in range(6)] + [
        threading.Thread(target=close) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    end = time.monotonic() + 20
    while "closing" in str(redis_server.command("CLIENT", "LIST")):
        assert time.monotonic() < end, "a connection stayed open"
        time.sleep(0.01)


@pytest.mark.parametrize("face", COLOURS)
def test_a_process_that_never_closes_its_link_ends_silently(
    redis_server: services.RedisServer, face: Face
) -> None:
    program = f"""
import asyncio
from tests.ops.redis_link_lab import ECHO, drive, open_face
link = open_face({redis_server.url!r}, {face!r})
async def use():
    await link.call(ECHO, [b"k"], [1])
    await link.watch(b"channel", lambda: None)
async def main():
    # -X dev is asyncio's debug mode too, in which a busy machine is told of slow callbacks.
    asyncio.get_running_loop().slow_callback_duration = 60
    await use()
{"drive(use())" if face == "sync" else "asyncio.run(main())"}
"""
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "always", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("face", COLOURS)
def test_the_same_nonce_from_both_colours_counts_once(redis_server: services.RedisServer, face: Face) -> None:
    key = fresh()

    async def body() -> None:
        link = open_face(redis_server.url, face)
        replies = [await link.call(ONCE, once_keys(key), [b"n"]) for _ in range(3)]
        assert replies == [[b"n", b"1"]] * 3
        await link.aclose()

    run(face, body())
