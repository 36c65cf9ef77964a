"""The Redis link when the network or the server fails: nothing hangs, nothing is mixed up, one loss is unseen."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator

import pytest
from redis import exceptions as driver

from semel.errors import StoreUnavailable
from semel.stores.redis.link import Call, Lane, Link, Script, open_link
from semel.testing import services
from semel.testing.proxy import Proxy
from tests.ops.redis_link_lab import (
    COLOURS,
    COUNT,
    ECHO,
    FACES,
    ONCE,
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


@pytest.fixture
def proxy(redis_server: services.RedisServer) -> Iterator[Proxy]:
    with proxied(redis_server) as made:
        yield made


async def warm(link: Link, *scripts: Script) -> None:
    for script in scripts:
        await link.call(script, once_keys(fresh("warm")), [b"warm"])


# ------------------------------------------------------------------------------------- one loss is unseen
@pytest.mark.parametrize("face", FACES)
def test_a_lost_reply_is_asked_for_again_and_the_nonce_makes_it_once(proxy: Proxy, face: Face) -> None:
    key = fresh()

    async def body() -> None:
        link = open_face(url_of(proxy), face)
        await warm(link, ONCE, COUNT)
        rule = proxy.swallow_reply(match=is_script)
        assert await link.call(ONCE, once_keys(key), [b"nonce"]) == [b"nonce", b"1"]
        assert rule.fired.is_set()
        counted = proxy.swallow_reply(match=is_script)
        assert await link.call(COUNT, [key]) == 2, (
            "the proof that it ran twice: this script is not idempotent"
        )
        assert counted.fired.is_set()
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", FACES)
def test_a_lost_request_is_sent_again_unseen(proxy: Proxy, face: Face) -> None:
    key = fresh()

    async def body() -> None:
        link = open_face(url_of(proxy), face)
        await warm(link, COUNT)
        rule = proxy.reset_before(match=is_script)
        assert await link.call(COUNT, [key]) == 1
        assert rule.fired.is_set()
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_call_that_must_not_run_twice_is_not_sent_twice(
    proxy: Proxy, face: Face, redis_server: services.RedisServer
) -> None:
    key = fresh()

    async def body() -> None:
        link = open_face(url_of(proxy), face)
        await warm(link, COUNT)
        proxy.swallow_reply(match=is_script)
        with pytest.raises(StoreUnavailable, match="may have run") as told:
            await link.call(COUNT, [key], resend=False)
        assert isinstance(told.value.__cause__, (driver.ConnectionError, OSError))
        assert redis_server.command("GET", key) == "1"
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_call_that_is_lost_again_and_again_is_told(proxy: Proxy, face: Face) -> None:
    key = fresh()

    async def body() -> None:
        link = open_face(url_of(proxy), face, timeout=60)
        await warm(link, ONCE)
        rules = [proxy.swallow_reply(at=turn, match=is_script) for turn in range(1, 7)]
        start = time.monotonic()
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{proxy.port}") as told:
            await link.call(ONCE, once_keys(key), [b"nonce"])
        assert told.value.__cause__ is not None
        assert [rule.fired.is_set() for rule in rules] == [True] * 5 + [False], (
            "bounded, long before the timeout"
        )
        assert time.monotonic() - start < 20
        proxy.clear()
        assert await link.call(ONCE, once_keys(key), [b"nonce"]) == [b"nonce", b"1"]
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_in_a_batch_every_lost_item_is_sent_again_once(proxy: Proxy, face: Face) -> None:
    keys = [fresh() for _ in range(20)]

    async def body() -> None:
        link = open_face(url_of(proxy), face)
        await warm(link, ONCE)
        rule = proxy.swallow_reply(at=10, match=is_script)
        replies = await link.call_many([Call(ONCE, once_keys(key), [key]) for key in keys])
        assert rule.fired.is_set()
        assert replies == [[key, b"1"] for key in keys]
        await link.aclose()

    run(face, body())


# -------------------------------------------------------------------------------------------- silence
@pytest.mark.parametrize("face", FACES)
def test_a_silent_connection_is_replaced_within_the_callers_time(proxy: Proxy, face: Face) -> None:
    key = fresh()

    async def body() -> None:
        link = open_face(url_of(proxy), face, timeout=3.0)
        await warm(link, ONCE)
        before = proxy.connections
        rule = proxy.blackhole(match=is_script)
        start = time.monotonic()
        assert await link.call(ONCE, once_keys(key), [b"nonce"]) == [b"nonce", b"1"]
        assert time.monotonic() - start > 0.4
        assert rule.fired.is_set()
        assert proxy.connections == before + 1
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", ["async", "uvloop"])
def test_every_call_on_a_stalled_connection_is_sent_again(proxy: Proxy, face: Face) -> None:
    keys = [fresh() for _ in range(64)]

    async def body() -> None:
        link = open_face(url_of(proxy), face, timeout=3.0)
        await warm(link, ONCE)
        proxy.stall(at=7, match=is_script)
        replies = await asyncio.gather(*(link.call(ONCE, once_keys(key), [key]) for key in keys))
        assert replies == [[key, b"1"] for key in keys]
        proxy.release()
        assert proxy.connections == 2
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", FACES)
def test_a_paused_server_ends_in_store_unavailable_on_time_and_recovers(face: Face) -> None:
    with services.redis() as server:

        async def body() -> None:
            link = open_face(server.url, face, timeout=60)
            await warm(link, ECHO)
            with server.paused():
                start = time.monotonic()
                with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{server.port}.*0.6 s") as told:
                    await link.call(ECHO, [b"k"], [1], timeout=0.6)
                assert 0.5 < time.monotonic() - start < 20
                assert told.value.__cause__ is not None
            assert await link.call(ECHO, [b"k"], [2]) == [b"k", b"2"]
            await link.aclose()

        run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_paused_server_with_a_password_does_not_hang_the_login(face: Face) -> None:
    with services.redis(password="pw") as server:

        async def body() -> None:
            link = open_face(server.url, face, timeout=60)
            with server.paused():
                start = time.monotonic()
                with pytest.raises(StoreUnavailable, match=r"d(oes|id) not answer"):
                    await link.call(ECHO, [b"k"], [1], timeout=0.6)
                assert time.monotonic() - start < 20
            assert await link.call(ECHO, [b"k"], [2]) == [b"k", b"2"]
            await link.aclose()

        run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_reply_that_drips_is_put_together_and_a_short_timeout_cuts_it(proxy: Proxy, face: Face) -> None:
    async def body() -> None:
        link = open_face(url_of(proxy), face, timeout=60)
        await warm(link, ECHO)
        proxy.drip(match=is_script)
        assert await link.call(ECHO, [b"k"], [b"x" * 50]) == [b"k", b"x" * 50]
        start = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await link.call(ECHO, [b"k"], [b"y" * 3000], timeout=0.3)
        assert time.monotonic() - start < 20, "the call's own time, not the link's"
        await link.aclose()

    run(face, body())


def test_a_timed_out_or_cancelled_call_keeps_its_slot_and_its_reply_is_thrown_away(proxy: Proxy) -> None:
    async def body() -> None:
        link = open_link(url_of(proxy), colour="async", timeout=10.0)
        await warm(link, ECHO)
        rule = proxy.stall(match=is_script)
        first = asyncio.create_task(link.call(ECHO, [b"k"], [b"first"]))
        given_up = asyncio.create_task(link.call(ECHO, [b"k"], [b"given up"]))
        last = asyncio.create_task(link.call(ECHO, [b"k"], [b"last"]))
        while not rule.fired.is_set():
            await asyncio.sleep(0.001)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        proxy.release()
        assert [(await task)[1] for task in (first, last)] == [b"first", b"last"]
        assert proxy.connections == 1
        await link.aclose()

    asyncio.run(body())


# ----------------------------------------------------------------------------------------- cancellation
@pytest.mark.parametrize("face", ["async", "uvloop"])
def test_a_cancellation_storm_never_hands_one_caller_anothers_reply(
    redis_server: services.RedisServer, face: Face
) -> None:
    answered = cancelled = 0

    async def body() -> None:
        nonlocal answered, cancelled
        link = open_face(redis_server.url, face, timeout=5)
        end = time.monotonic() + 100
        chance = random.Random(7)

        async def caller(number: int) -> None:
            nonlocal answered, cancelled
            turn = 0
            while answered < 20_000 and time.monotonic() < end:
                turn += 1
                mine = f"{number}:{turn}".encode()
                task = asyncio.ensure_future(link.call(ECHO, [mine], [mine]))
                for _ in range(chance.randrange(6)):
                    await asyncio.sleep(0)
                if chance.random() < 0.4:
                    task.cancel()
                try:
                    assert await task == [mine, mine]
                    answered += 1
                except asyncio.CancelledError:
                    cancelled += 1

        await asyncio.gather(*(caller(number) for number in range(64)))
        await link.aclose()

    run(face, body())
    assert answered >= 20_000
    assert cancelled > 1_000, "the storm must bite"


def test_a_cancelled_batch_leaves_the_connection_in_order(redis_server: services.RedisServer) -> None:
    async def body() -> None:
        link = open_link(redis_server.url, colour="async")
        await warm(link, ECHO)
        for _ in range(50):
            batch = asyncio.create_task(
                link.call_many([Call(ECHO, [b"k"], [number]) for number in range(20)])
            )
            await asyncio.sleep(0)
            batch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await batch
            assert await link.call(ECHO, [b"k"], [b"after"]) == [b"k", b"after"]
        await link.aclose()

    asyncio.run(body())


# ----------------------------------------------------------------------------- the server goes and comes
@pytest.mark.parametrize("face", FACES)
def test_a_server_killed_and_restarted_in_the_middle_is_survived(face: Face) -> None:
    with services.redis(appendonly="always") as server:
        key = fresh()

        done = 0

        def nemesis() -> None:
            for _ in range(3):
                seen = done
                while (
                    done < seen + 20
                ):  # a call may lose one reply: the next kill waits until it got over this one
                    time.sleep(0.001)
                server.kill()
                server.start()

        async def body() -> None:
            nonlocal done
            link = open_face(server.url, face, timeout=10)
            await warm(link, ONCE)
            killer = threading.Thread(target=nemesis)
            killer.start()
            while killer.is_alive():
                nonce = f"n{done}".encode()
                assert await link.call(ONCE, once_keys(key), [nonce]) == [nonce, str(done + 1).encode()]
                done += 1
            assert await link.command("GET", once_keys(key)[1]) == str(done).encode()
            assert done >= 60
            await link.aclose()

        run(face, body())


def test_a_storm_of_tasks_survives_restarts_without_a_wrong_reply() -> None:
    with services.redis(appendonly="always") as server:
        keys = [fresh() for _ in range(32)]

        async def body() -> None:
            link = open_link(server.url, colour="async", timeout=20)
            await warm(link, ONCE)
            over = asyncio.Event()
            progress = [0] * len(keys)

            async def caller(at: int, key: bytes) -> None:
                while not over.is_set():
                    nonce = key + str(progress[at]).encode()
                    try:
                        reply = await link.call(ONCE, once_keys(key), [nonce])
                    except StoreUnavailable:
                        continue  # two losses in a row: the same nonce again
                    progress[at] += 1
                    assert reply == [nonce, str(progress[at]).encode()]

            callers = [asyncio.create_task(caller(at, key)) for at, key in enumerate(keys)]
            for _ in range(3):
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
                seen = list(progress)
                while any(now < then + 5 for now, then in zip(progress, seen, strict=True)):
                    await asyncio.sleep(0.001)
            over.set()
            await asyncio.gather(*callers)
            kept = [await link.command("GET", once_keys(key)[1]) for key in keys]
            await link.aclose()
            assert kept == [str(count).encode() for count in progress]

        asyncio.run(body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_server_that_stays_away_is_told_at_the_end_of_the_time(face: Face) -> None:
    with services.redis() as server:

        async def body() -> None:
            link = open_face(server.url, face, timeout=60)
            await warm(link, ECHO)
            server.kill()
            start = time.monotonic()
            with pytest.raises(
                StoreUnavailable, match=f"cannot reach Redis at 127.0.0.1:{server.port}"
            ) as told:
                await link.call(ECHO, [b"k"], [1], timeout=0.5)
            assert 0.4 < time.monotonic() - start < 20
            assert told.value.__cause__ is not None
            server.start()
            assert await link.call(ECHO, [b"k"], [2]) == [b"k", b"2"]
            await link.aclose()

        run(face, body())


def test_a_blocked_redis_script_is_waited_out(redis_server: services.RedisServer) -> None:
    spin = Script(
        "spin", "local t = redis.call('TIME')[1] + 0 repeat until redis.call('TIME')[1] + 0 > t return 'done'"
    )

    async def body() -> None:
        link = open_link(redis_server.url, colour="async", timeout=5)
        await warm(link, ECHO)
        slow = asyncio.create_task(link.call(spin, [b"k"], lane=Lane.BLOCKING))
        assert await link.call(ECHO, [b"k"], [1]) == [b"k", b"1"]
        assert await slow == b"done"
        await link.aclose()

    asyncio.run(body())


def test_threads_share_the_link_through_cuts(proxy: Proxy) -> None:
    link = open_link(url_of(proxy), colour="sync", timeout=10)
    drive(warm(link, ONCE))
    errors: list[BaseException] = []
    key = fresh()
    over = threading.Event()
    done = [0] * 16

    def work(number: int) -> None:
        turn = 0
        try:
            while turn < 300:
                mine = f"{number}:{turn}".encode()
                try:
                    assert drive(link.call(ONCE, once_keys(key), [mine]))[0] == mine
                except StoreUnavailable:
                    continue  # two cuts in a row
                turn += 1
                done[number] = turn
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for worker in workers:
        worker.start()

    def cutter() -> None:
        seen = 0
        while not over.wait(0.05):
            if (
                sum(done) > seen
            ):  # a machine too slow for one call between two cuts would never come to an end
                proxy.cut()
                seen = sum(done)

    nemesis = threading.Thread(target=cutter)
    nemesis.start()
    for worker in workers:
        worker.join()
    over.set()
    nemesis.join()
    assert errors == []
    _, count = drive(link.call(ONCE, once_keys(key), [b"last"]))
    assert int(count) == 16 * 300 + 1
    link.close()
