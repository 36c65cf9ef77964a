"""The quick way to Redis (semel.posting): what it answers equals the store's verbs, and what breaks its wait strands nobody."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from semel import AsyncSemel, current_run
from semel.errors import NotRecorded, StoreUnavailable
from semel.model import Replay, Unknown
from semel.posting import Brief, poster_of
from semel.stores.posted import Posted
from semel.stores.redis.errors import NotSent, ServerError
from semel.stores.redis.record import short_verdict, verdict
from semel.testing import services
from tests.ops.loop_lab import in_loop
from tests.ops.redis_store_lab import ask, end, finish, hurried, opened, win


@pytest.fixture
def server(redis_server: services.RedisServer) -> services.RedisServer:
    redis_server.flush()
    return redis_server


@in_loop
async def test_a_store_that_was_not_looked_at_yet_has_no_quick_way(server: services.RedisServer) -> None:
    store = opened(server, "async")
    try:
        poster = poster_of(store)
        assert poster is not None
        owner = ask()
        assert poster.claim(owner, 0.0) is None
        assert poster.settle(end(owner), 0.0) is None
    finally:
        await store.aclose()


@in_loop
async def test_an_error_that_nobody_knows_is_told_as_the_server_said_it(server: services.RedisServer) -> None:
    store = opened(server, "async")
    try:
        said = store._refused(ServerError("ERR a word of tomorrow"))
        assert isinstance(said, StoreUnavailable)
        assert "ERR a word of tomorrow" in str(said)
    finally:
        await store.aclose()


async def _reply(
    server: services.RedisServer, claimed: dict[str, Any] | None = None, **more: Any
) -> tuple[Any, bytes]:
    """A question about a settled key, and the bytes of its answer."""
    store = opened(server, "async")
    try:
        owner = await win(store, **(claimed or {}))
        await finish(store, owner, result=b"\x10\xa3yes", **more)
        asked = ask()
        posted = store._post(*store.claim_command(asked))
        assert posted is not None
        return asked, await posted
    finally:
        await store.aclose()


# What every record of HTTP has, and what one may have besides.
_HTTP: Any = {"labels": {"route": "POST /orders"}, "fingerprint": b"f" * 32}


@pytest.mark.parametrize(
    "claimed", [{}, _HTTP, {**_HTTP, "secret_id": "k1"}], ids=["plain", "labels", "secret"]
)
@pytest.mark.parametrize("tombstone", [0.0, 60.0])
@in_loop
async def test_a_plain_replay_read_in_short_equals_the_whole_record(
    server: services.RedisServer, claimed: dict[str, Any], tombstone: float
) -> None:
    asked, reply = await _reply(server, claimed, tombstone=tombstone)
    short, whole = short_verdict(asked, reply), verdict(asked, reply)
    assert isinstance(short, Brief)
    assert isinstance(whole, Replay)
    record = whole.record
    assert (short.attempts, short.expires, short.result) == (record.attempts, record.expires, record.result)


@pytest.mark.parametrize("more", [{"ref": "ord_1"}, {"marker": "too large"}, {"steps": b"\x00"}])
@in_loop
async def test_a_replay_that_has_more_to_tell_is_read_whole(
    server: services.RedisServer, more: dict[str, Any]
) -> None:
    asked, reply = await _reply(server, **more)
    assert short_verdict(asked, reply) == verdict(asked, reply)
    assert isinstance(verdict(asked, reply), Replay)


@in_loop
async def test_a_reply_to_another_question_is_refused_in_short_too(server: services.RedisServer) -> None:
    _, reply = await _reply(server)
    with pytest.raises(StoreUnavailable, match="crossed reply"):
        short_verdict(ask(), reply)


@pytest.mark.parametrize("claimed", [{}, _HTTP])
@in_loop
async def test_a_damaged_record_is_no_short_replay(
    server: services.RedisServer, claimed: dict[str, Any]
) -> None:
    asked, reply = await _reply(server, claimed)
    for size in (25, 30, 60, 80):
        short = short_verdict(asked, reply[:size])
        assert short == verdict(asked, reply[:size])
        assert isinstance(short, Unknown | Replay)
    damaged = reply[:25] + b"\x00" + reply[26:]
    assert isinstance(short_verdict(asked, damaged), Unknown)


@in_loop
async def test_a_short_replay_tells_attempts_and_an_unreadable_result(server: services.RedisServer) -> None:
    async with AsyncSemel(server.url) as once:
        await once.execute("key", _seven)
        again = await once.execute("key", _seven)
        assert (again.value, again.replayed, again.attempt, again.ref) == (7, True, 1, None)


async def _seven() -> int:
    return 7


async def _named() -> int:
    current_run().set_ref("ord_1")
    return 7


@in_loop
async def test_a_ref_is_replayed_on_the_quick_way(server: services.RedisServer) -> None:
    async with AsyncSemel(server.url) as once:
        await once.execute("warm", _seven)
        await once.execute("key", _named)
        assert (await once.execute("key", _named)).ref == "ord_1"


@in_loop
async def test_a_cancelled_leader_of_a_posted_claim_leaves_the_key_to_a_follower(
    server: services.RedisServer,
) -> None:
    async with AsyncSemel(server.url) as once:
        await once.execute("warm", _seven)
        server.command("CLIENT", "PAUSE", 300, "ALL")
        leader = asyncio.create_task(once.execute("key", _seven))
        await asyncio.sleep(0)  # its claim is on its way
        follower = asyncio.create_task(once.execute("key", _seven, wait=5))
        await asyncio.sleep(0)
        leader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leader
        outcome = await follower
        assert outcome.value == 7
        assert not outcome.replayed


@in_loop
async def test_a_posted_claim_ends_within_the_timeout_of_a_silent_server(
    server: services.RedisServer,
) -> None:
    async with AsyncSemel(server.url, timeout=60) as once:
        await once.execute("warm", _seven)
        store: Any = once._store
        with server.paused(), hurried(store, 0.3):
            began = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await once.execute("key", _seven)
            assert time.monotonic() - began < 20


def test_a_task_that_ends_the_program_leaves_no_other_asleep(server: services.RedisServer) -> None:
    async def leaves() -> None:
        raise SystemExit(3)

    loop = asyncio.new_event_loop()
    try:
        once = AsyncSemel(server.url)
        loop.run_until_complete(once.execute("warm", _seven))

        async def begun() -> list[asyncio.Task[Any]]:
            fns = [leaves, _seven, _seven]
            tasks = [asyncio.create_task(once.execute(f"key-{at}", fn)) for at, fn in enumerate(fns)]
            await asyncio.sleep(0)  # all three are in one write, and their replies in one read
            return tasks

        tasks = loop.run_until_complete(begun())
        with pytest.raises(SystemExit):
            loop.run_until_complete(loop.create_future())
        assert isinstance(tasks[0].exception(), SystemExit)
        for task in tasks[1:]:
            assert loop.run_until_complete(asyncio.wait_for(task, 5)).value == 7
        loop.run_until_complete(once.aclose())
    finally:
        loop.close()


@in_loop
async def test_a_posted_reply_is_a_future_to_the_task_that_waits() -> None:
    loop = asyncio.get_running_loop()
    posted = Posted(loop)
    loop.call_soon(posted.set_result, b"reply")
    assert await posted == b"reply"
    assert await posted == b"reply"  # it is over: nobody has to wait
    assert not posted.cancel()
    broken = Posted(loop)
    loop.call_soon(broken.set_exception, StoreUnavailable("gone"))
    with pytest.raises(StoreUnavailable):
        await broken


@in_loop
async def test_a_cancelled_wait_for_a_posted_reply_is_cancelled_with_its_message() -> None:
    posted = Posted(asyncio.get_running_loop())

    async def wait() -> Any:
        return await posted

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel("enough")
    with pytest.raises(asyncio.CancelledError, match="enough"):
        await task
    assert posted.done()


async def _two_posted(store: Any) -> tuple[Any, Any]:
    """In one write, with two replies: who waits for the first has not begun to wait for the second."""
    await win(store, "warm")
    first, second = (store._post(*store.claim_command(ask(key))) for key in ("one", "two"))
    assert first is not None
    assert second is not None
    return first, second


@in_loop
async def test_a_reply_that_came_before_it_was_awaited_is_there_at_once(server: services.RedisServer) -> None:
    store = opened(server, "async", timeout=30)
    try:
        first, second = await _two_posted(store)
        await first
        while not second.done():
            await asyncio.sleep(0)
        assert type(await second) is bytes
    finally:
        await store.aclose()


@in_loop
async def test_a_connection_that_was_lost_before_its_reply_was_awaited_is_told(
    server: services.RedisServer,
) -> None:
    store = opened(server, "async", timeout=30)
    try:
        first, second = await _two_posted(store)
        server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        for posted in (first, second):
            with pytest.raises(NotSent):
                await posted
        assert second.done()
    finally:
        await store.aclose()


@in_loop
async def test_a_face_that_its_own_function_closes_says_that_nothing_was_recorded(
    server: services.RedisServer,
) -> None:
    once = AsyncSemel(server.url, settle_timeout=0.1)
    await once.execute("warm", _seven)

    async def closes() -> int:
        await once.aclose()
        return 7

    with pytest.raises(NotRecorded):
        await once.execute("key", closes)


@in_loop
async def test_long_results_share_a_connection_that_nothing_short_waits_for(
    server: services.RedisServer,
) -> None:
    store: Any = opened(server, "async", timeout=30)
    try:
        used = []
        for key in ("first", "second"):  # the second finds the connection of the first
            await finish(store, await win(store, key), result=b"\x10" + b"x" * 100_000)
            (wire,) = store._link.home().wires[1].values()
            used.append(wire)
        assert used[0] is used[1]
    finally:
        await store.aclose()


@in_loop
async def test_a_posted_settle_wakes_who_waits_at_another_face_of_the_same_store(
    server: services.RedisServer,
) -> None:
    store = opened(server, "async", timeout=30)
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow() -> int:
        begun.set()
        await go.wait()
        return 7

    async with AsyncSemel(store) as one, AsyncSemel(store) as other:
        await one.execute("warm", _seven)
        owner = asyncio.create_task(one.execute("key", slow))
        await begun.wait()
        waiter = asyncio.create_task(other.execute("key", _seven, wait=30))
        while not store._watchers:
            await asyncio.sleep(0.001)
        go.set()
        assert not (await owner).replayed
        assert (await waiter).replayed


@in_loop
async def test_a_posted_claim_and_settle_whose_connection_died_are_sent_again(
    server: services.RedisServer,
) -> None:
    def cut() -> None:
        server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    runs = 0

    async def work() -> int:
        nonlocal runs
        runs += 1
        cut()  # the loop has not noticed when the outcome is sent
        return 7

    async with AsyncSemel(server.url) as once:
        await once.execute("warm", _seven)
        cut()
        assert not (await once.execute("key", work)).replayed
        cut()
        assert (await once.execute("key", work)).replayed
        assert runs == 1


@in_loop
async def test_a_long_result_leaves_the_quick_way_and_comes_back_whole(server: services.RedisServer) -> None:
    async def long() -> str:
        return "x" * 100_000

    async with AsyncSemel(server.url) as once:
        await once.execute("warm", _seven)
        first, again = await once.execute("key", long), await once.execute("key", long)
        assert first.value == again.value == "x" * 100_000
        assert again.replayed


@in_loop
async def test_a_mistake_of_ours_is_not_taken_for_trouble_of_the_connection(
    server: services.RedisServer,
) -> None:
    store = opened(server, "async")
    try:
        poster = store.poster()
        assert poster is not None
        with pytest.raises(ZeroDivisionError):
            await poster.reclaim(ask(), ZeroDivisionError(), 0.0)
    finally:
        await store.aclose()


def test_with_acks_and_for_threads_there_is_no_quick_way(server: services.RedisServer) -> None:
    assert opened(server, "sync").poster() is None
    assert opened(server, "async", acks=1).poster() is None
