"""The look at a Redis server before first use: one for all who come at once, never remembered when it failed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from semel import forks
from semel.errors import ConfigurationError, StoreUnavailable
from semel.model import Won
from semel.runtime import run_sync
from semel.stores.redis import RedisStore, looking
from semel.stores.redis import facts as redis_facts
from semel.stores.redis.looking import Look
from semel.testing import services
from semel.testing.proxy import Proxy
from tests.ops.redis_link_lab import proxied, url_of
from tests.ops.redis_store_lab import BOTH, Colour, ask, opened, sync_store, win
from tests.ops.strike_lab import strike_each_moment

pytestmark = pytest.mark.services
MANY = 20


def unseen(server: services.RedisServer) -> None:
    server.command("CONFIG", "RESETSTAT")


def looks(server: services.RedisServer) -> int:
    found = server.info("commandstats").get("cmdstat_info", {})
    return int(found.get("calls", 0))


def waiting(store: RedisStore) -> int:
    """How many wait for what another one finds."""
    return sum(len(look._wakes) for look in tuple(store._looks.values()))


def eventually(ready: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.001)


def first_calls(
    store: RedisStore, proxy: Proxy, colour: Colour, then: Callable[[], object] = lambda: None
) -> list[Any]:
    """What many callers are told who come while the first one's look is under way. After `then`, one more is served."""
    stalled = proxy.stall(match=lambda request: b"INFO" in request)

    def release() -> None:
        eventually(stalled.fired.is_set)
        eventually(lambda: waiting(store) == MANY - 1)
        proxy.release()

    async def call(number: int) -> Any:
        try:
            return (await store.claim([ask(f"key-{number}")]))[0]
        except Exception as error:
            return error

    releasing = threading.Thread(target=release)
    releasing.start()
    told: list[Any] = []
    if colour == "async":

        async def main() -> None:
            told.extend(await asyncio.gather(*map(call, range(MANY))))
            then()
            await win(store, "one more")
            await store.aclose()

        asyncio.run(main())
    else:
        callers = [threading.Thread(target=lambda n=n: told.append(run_sync(call(n)))) for n in range(MANY)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        then()
        run_sync(win(store, "one more"))
        run_sync(store.aclose())
    releasing.join()
    return told


@BOTH
def test_however_many_come_at_first_the_server_is_looked_at_once(colour: Colour) -> None:
    with services.redis() as server, proxied(server) as proxy:
        store = opened(url_of(proxy), colour)
        unseen(server)
        told = first_calls(store, proxy, colour)
        assert [type(found) for found in told] == [Won] * MANY
        assert looks(server) == 1
        assert not store._looks


@BOTH
def test_what_is_wrong_is_told_to_all_who_waited_and_the_next_caller_looks_again(colour: Colour) -> None:
    with (
        services.redis(config={"maxmemory": "100mb", "maxmemory-policy": "volatile-lru"}) as server,
        proxied(server) as proxy,
    ):
        store = opened(url_of(proxy), colour)
        unseen(server)
        told = first_calls(
            store,
            proxy,
            colour,
            lambda: server.command("CONFIG", "SET", "maxmemory-policy", "noeviction"),
        )
        assert [type(found) for found in told] == [ConfigurationError] * MANY
        assert (
            2 <= looks(server) <= 3
        )  # theirs, one more for who came meanwhile if the first was quick, and the last one's


def test_a_cancelled_first_caller_leaves_the_look_to_the_next_one() -> None:
    with services.redis() as server, proxied(server) as proxy:

        async def main() -> None:
            store = opened(url_of(proxy), "async")
            unseen(server)
            stalled = proxy.stall(match=lambda request: b"INFO" in request)
            first = asyncio.create_task(win(store, "first"))
            await asyncio.to_thread(stalled.fired.wait, 20)
            others = [asyncio.create_task(win(store, f"key-{n}")) for n in range(MANY)]
            while waiting(store) < MANY:
                await asyncio.sleep(0.001)
            others.pop().cancel()  # one who waits disturbs nobody either
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            proxy.release()
            await asyncio.gather(*others)
            assert looks(server) <= 2
            await store.aclose()

        asyncio.run(main())


def test_a_first_caller_that_is_struck_leaves_the_look_to_the_next_one(
    redis_server: services.RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, looking, struck = redis_facts.check, threading.Event(), threading.Event()

    async def check(*args: Any, **options: Any) -> str:
        if not looking.is_set():
            looking.set()
            struck.wait(20)
            raise KeyboardInterrupt
        return await really(*args, **options)

    monkeypatch.setattr(redis_facts, "check", check)
    with sync_store(redis_server.flush()) as store:
        told: list[BaseException] = []

        def lead() -> None:
            try:
                run_sync(win(store, "first"))
            except BaseException as error:
                told.append(error)

        leader = threading.Thread(target=lead)
        leader.start()
        assert looking.wait(20)
        follower = threading.Thread(target=lambda: run_sync(win(store, "second")))
        follower.start()
        eventually(lambda: waiting(store) == 1)
        struck.set()
        leader.join()
        follower.join(20)
        assert not follower.is_alive()
        assert store._checked
        assert [type(error) for error in told] == [KeyboardInterrupt]


def test_who_comes_as_the_look_ends_does_not_wait_for_it() -> None:
    over = Look()
    over.end()
    assert run_sync(over.heard("sync", 20))


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_look_that_is_struck_at_any_moment_keeps_nobody_waiting(redis_server: services.RedisServer) -> None:
    """Another thread waits for it no longer than a look may take, and looks itself."""
    store = opened(redis_server.url, "sync", timeout=0.1)

    def first() -> None:
        store._checked = False
        run_sync(store._check())

    def then() -> None:
        other = threading.Thread(target=lambda: run_sync(store._check()), daemon=True)
        other.start()
        other.join(20)
        assert not other.is_alive()
        assert store._checked

    assert strike_each_moment((looking,), first, then=then) > 8
    run_sync(store.aclose())


def test_a_look_that_went_wrong_before_this_call_came_is_not_the_last_word(
    redis_server: services.RedisServer,
) -> None:
    """That of a background write, say, which saw a replica just before it became the master."""

    async def body() -> None:
        store = opened(redis_server.url, "async", timeout=20)
        place = (forks.epoch, asyncio.get_running_loop())
        store._looks[place] = old = Look()
        calling = asyncio.create_task(store._check())
        await asyncio.sleep(0)
        del store._looks[place]
        old.failed(StoreUnavailable("a replica"))
        old.end()
        await calling
        assert store._checked
        await store.aclose()

    asyncio.run(body())


def test_a_second_look_that_is_broken_off_is_made_by_the_next_one(redis_server: services.RedisServer) -> None:
    """Those who heard of the first one's failure wait for one second look together, and its leader may be cancelled."""

    async def body() -> None:
        store = opened(redis_server.url, "async", timeout=20)
        place = (forks.epoch, asyncio.get_running_loop())
        store._looks[place] = old = Look()
        calling = [asyncio.create_task(store._check()) for _ in range(3)]
        await asyncio.sleep(0)
        del store._looks[place]
        old.failed(StoreUnavailable("a replica"))
        old.end()
        await asyncio.sleep(0)
        assert old.then is store._looks[place]
        calling[0].cancel()
        await asyncio.wait_for(asyncio.gather(*calling[1:]), 20)
        assert store._checked
        await store.aclose()

    asyncio.run(body())


def test_a_look_that_never_ends_is_waited_for_no_longer_than_one_may_take(
    redis_server: services.RedisServer,
) -> None:
    async def body() -> None:
        store = opened(redis_server.url, "async", timeout=0.1)
        store._looks[forks.epoch, asyncio.get_running_loop()] = Look()
        await asyncio.wait_for(store._check(), 20)
        assert store._checked
        await store.aclose()

    asyncio.run(body())


def test_a_signals_handler_in_the_thread_that_looks_does_not_wait_for_itself(
    redis_server: services.RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = redis_facts.check
    handled: list[Any] = []

    def handler(*_: object) -> None:
        handled.append(run_sync(win(store, "in the handler")))

    async def check(*args: Any, **options: Any) -> str:
        monkeypatch.setattr(redis_facts, "check", really)  # the handler's own look is struck by nobody
        signal.raise_signal(signal.SIGUSR2)
        return await really(*args, **options)

    before = signal.signal(signal.SIGUSR2, handler)
    monkeypatch.setattr(redis_facts, "check", check)
    try:
        with sync_store(redis_server.flush()) as store:
            run_sync(win(store))
            assert len(handled) == 1
            assert not store._looks
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_R29_a_child_that_is_forked_while_the_parent_looks_looks_for_itself() -> None:
    with services.redis() as server, proxied(server) as proxy, sync_store(url_of(proxy)) as store:
        stalled = proxy.stall(match=lambda request: b"INFO" in request)
        leader = threading.Thread(target=lambda: run_sync(win(store, "parent")))
        leader.start()
        assert stalled.fired.wait(20)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run_sync(win(store, "child"))
                status = 0
            finally:
                os._exit(status)
        watch = threading.Timer(30, os.kill, (child, signal.SIGKILL))
        watch.start()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        watch.cancel()
        proxy.release()
        leader.join()
        assert store._checked
