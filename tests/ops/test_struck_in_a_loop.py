"""What a handler that raises in the middle of an event loop leaves of a wait, a connection, a tick and a session.

`tests/rulings/test_interrupts_async.py` strikes every moment; here are those that it found, one by one and without a tracer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from semel import AsyncSemel, Outcome, StoreUnavailable
from semel.layers import Batch, Layer
from semel.loop import LoopRuntime
from semel.model import Answer, Verdict, Won
from semel.runtime import ThreadRuntime, run_sync
from semel.store import Settings
from semel.stores import mysql
from semel.stores.memory import MemoryStore
from semel.stores.posted import Posted, tell_interrupted
from semel.stores.redis.errors import NotSent
from semel.stores.sqlite import desk as desks
from semel.testing import services
from tests.ops.loop_lab import in_loop
from tests.ops.sqlite_lab import ask, end
from tests.ops.strike_lab import Struck

PROMPT = 20.0


async def _seven() -> int:
    return 7


def _quiet() -> list[str]:
    """What the loop's handler of errors is told from now on, instead of the log."""
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
    return told


# --------------------------------------------------------------------------------------------- a posted call
async def _wait_for(posted: Posted) -> Any:
    return await posted


@in_loop
async def test_a_call_that_was_answered_and_not_resumed_can_be_cancelled() -> None:
    posted = Posted(asyncio.get_running_loop())
    task = asyncio.create_task(_wait_for(posted))
    await asyncio.sleep(0)
    posted.value, posted.over = 7, True  # and whoever was to resume it was struck
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, PROMPT)


@in_loop
async def test_whoever_waits_where_it_was_struck_is_told_or_resumed() -> None:
    loop = asyncio.get_running_loop()
    answered, forgotten = Posted(loop), Posted(loop)
    tasks = [asyncio.create_task(_wait_for(each)) for each in (answered, forgotten)]
    await asyncio.sleep(0)
    answered.value, answered.over = 7, True
    tell_interrupted((answered, forgotten), Struck())
    assert await asyncio.wait_for(tasks[0], PROMPT) == 7
    with pytest.raises(StoreUnavailable, match="Struck struck while this call was on its way"):
        await asyncio.wait_for(tasks[1], PROMPT)


@in_loop
async def test_a_call_that_is_ended_twice_is_resumed_once() -> None:
    posted = Posted(asyncio.get_running_loop())
    task = asyncio.create_task(_wait_for(posted))
    await asyncio.sleep(0)
    posted.set_result(7)
    posted.end()
    assert await asyncio.wait_for(task, PROMPT) == 7
    await asyncio.sleep(0)


# ---------------------------------------------------------------------------------------------------- Redis
class _StruckTransport:
    """Strikes the first write, before anything of it has left."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.struck = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def write(self, data: bytes) -> None:
        if not self.struck:
            self.struck = True
            raise Struck
        self._real.write(data)


class _StruckReader:
    """Strikes when the second reply is read."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.left = 2

    def feed(self, data: bytes) -> None:
        self._real.feed(data)

    def gets(self) -> Any:
        self.left -= 1
        if self.left == 0:
            raise Struck
        return self._real.gets()


def _wire(once: AsyncSemel) -> Any:
    store: Any = once._store
    (wire,) = store._link.home().wires[0].values()
    return wire


@pytest.mark.parametrize(
    ("part", "struck"), [("_transport", _StruckTransport), ("_reader", _StruckReader)], ids=["write", "read"]
)
@in_loop
async def test_a_redis_connection_that_was_struck_is_not_used_again(
    redis_server: services.RedisServer, part: str, struck: Callable[[Any], Any]
) -> None:
    told = _quiet()
    async with AsyncSemel(redis_server.url, prefix=f"struck-{part}", timeout=PROMPT) as once:
        await once.execute("warm", _seven)
        wire = _wire(once)
        setattr(wire, part, struck(getattr(wire, part)))
        outcomes = await asyncio.gather(*(once.execute(f"key {number}", _seven) for number in range(3)))
        assert [outcome.value for outcome in outcomes] == [7, 7, 7]
        assert wire.dead
        assert told


# --------------------------------------------------------------------------------------------------- SQLite
def _once(real: Callable[..., Any]) -> Callable[..., Any]:
    left = [Struck()]

    def struck(*args: Any, **kwargs: Any) -> Any:
        if left:
            raise left.pop()
        return real(*args, **kwargs)

    return struck


@pytest.mark.parametrize("place", ["look", "settle", "answer"])
@in_loop
async def test_calls_of_a_tick_that_was_struck_are_told_and_made_again(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = _quiet()
    async with AsyncSemel(f"sqlite:///{tmp_path / 'semel.db'}", timeout=PROMPT) as once:
        await asyncio.gather(*(once.execute(f"warm {number}", _seven) for number in range(2)))
        desk: Any = once._store._desk()[0]  # type: ignore[attr-defined]
        desk._alone = False
        if place == "answer":
            monkeypatch.setattr(desks, "_answer", _once(desks._answer))
        else:
            monkeypatch.setattr(desks.Desk, f"_{place}", _once(getattr(desks.Desk, f"_{place}")))
        calls = (once.execute(f"key {number}", _seven) for number in range(3))
        await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), PROMPT)
        for number in range(3):
            assert (await once.execute(f"key {number}", _seven, wait=PROMPT)).value == 7
        assert told


@in_loop
async def test_the_end_of_a_tick_that_never_came_is_not_waited_for_by_those_who_come_later(
    tmp_path: Path,
) -> None:
    async with AsyncSemel(f"sqlite:///{tmp_path / 'semel.db'}", timeout=PROMPT) as once:
        await asyncio.gather(*(once.execute(f"warm {number}", _seven) for number in range(2)))
        store: Any = once._store
        desk, loop = store._desk()
        for line in (desk._asks, desk._ends):  # left behind by a call whose tick was struck
            left = Posted(loop)
            left.cancel()
            line.append((ask("left") if line is desk._asks else end(ask("left")), left))
        assert (await asyncio.wait_for(once.execute("key", _seven), PROMPT)).value == 7
        desk._alone = False
        # It came, for whoever had left in the same tick: once more is no harm.
        desk.claim(ask("left"), loop).cancel()
        assert isinstance(await asyncio.wait_for(_wait_for(desk.claim(ask("another"), loop)), PROMPT), Won)


# -------------------------------------------------------------------------------------------------- batches
class _Struck(Layer):
    """Strikes its first batch; makes a note of what it is asked."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.asked: deque[int] = deque()
        self.left = 1

    async def claim(self, asks: Any) -> list[Verdict | Exception]:
        self.asked.append(len(asks))
        if self.left:
            self.left -= 1
            await asyncio.sleep(0)
            raise Struck
        return await self.inner.claim(asks)


@pytest.mark.parametrize("crowd", [1, 3])
@in_loop
async def test_a_batch_that_was_struck_leaves_its_place_and_tells_those_in_it(crowd: int) -> None:
    _quiet()
    store = _Struck()
    async with AsyncSemel(Batch(store)) as once:
        first = await asyncio.gather(
            *(once.execute(f"key {number}", _seven) for number in range(crowd)), return_exceptions=True
        )
        # Those who travelled along with the one that was struck are asked for again, and notice nothing.
        assert [type(each) for each in first] == ([Struck] if crowd == 1 else [Outcome] * crowd)
        for _ in range(3):  # more than there are places
            again = [once.execute(f"key {number}", _seven, wait=PROMPT) for number in range(crowd)]
            assert [each.value for each in await asyncio.gather(*again)] == [7] * crowd


@in_loop
async def test_a_launch_that_never_came_is_not_waited_for_by_those_who_come_later() -> None:
    store = Batch(MemoryStore())
    queue: Any = store._claims
    queue._scheduled = True  # and what was scheduled was struck
    left = asyncio.create_task(store.claim([ask()]))
    queue._scheduled = True
    await asyncio.sleep(0)
    queue._scheduled = True
    left.cancel()
    answers = await asyncio.wait_for(store.claim([ask()]), PROMPT)
    assert not isinstance(answers[0], Exception)


# -------------------------------------------------------------------------------------------------- the rest
def test_a_session_that_comes_back_while_nobody_runs_its_loop_is_cut(
    mariadb_server: services.MariaServer,
) -> None:
    """As its coroutine does when it is closed by the collection of garbage."""
    loop = asyncio.new_event_loop()
    url = mariadb_server.url.replace("mysql://", "mysql+asyncmy://")
    pool: Any = mysql.open_url(url, Settings(timeout=PROMPT), "async")._pool
    session = loop.run_until_complete(pool.take(loop.time() + PROMPT, fresh=False))
    run_sync(pool.give(session))
    loop.run_until_complete(asyncio.sleep(0))
    assert not session.wire.alive
    loop.run_until_complete(pool.aclose())
    loop.close()


@pytest.mark.parametrize("struck", [True, False], ids=["struck", "busy"])
@in_loop
async def test_an_appointment_that_is_long_overdue_is_had_when_the_next_one_is_made(struck: bool) -> None:
    """A heartbeat whose timer was struck, or whose loop was busy, is not put off until that of a later run."""

    async def tick() -> None:
        ticked.set()

    ticked = asyncio.Event()
    runtime = LoopRuntime(asyncio.get_running_loop(), ThreadPoolExecutor)
    ticker: Any = runtime.ticker(tick)
    ticker.at(runtime.now())
    if struck:
        ticker._timer.cancel()
    time.sleep(1.01)  # the loop is busy
    ticker.at(runtime.now() + 60)
    ticker.at(runtime.now() + 60)
    await asyncio.wait_for(ticked.wait(), PROMPT)
    ticker.stop()


@in_loop
async def test_a_call_whose_caller_was_struck_gives_its_key_back_or_is_recorded() -> None:
    """The frame that awaits it has ended: it is closed, and cannot await any more."""

    class Slow(Layer):
        async def settle(self, ends: Any) -> list[Answer | Exception]:
            await asyncio.sleep(0.01)
            return await self.inner.settle(ends)

    async def stuck() -> None:
        await asyncio.Event().wait()

    async with AsyncSemel(Slow(MemoryStore())) as once:
        struck: Any = once.execute("lost", stuck)
        struck.send(None)
        struck.close()
        assert not (await asyncio.wait_for(once.execute("lost", _seven, wait=PROMPT), PROMPT)).replayed
        struck = once.execute("made", _seven)
        struck.send(None)
        struck.close()
        assert (await once.execute("made", _seven, wait=PROMPT)).replayed


@in_loop
async def test_calls_of_a_redis_connection_that_was_struck_as_it_was_given_up_are_told_all_the_same(
    redis_server: services.RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncSemel(redis_server.url, prefix="struck-lose", timeout=PROMPT) as once:
        await once.execute("warm", _seven)
        wire = _wire(once)
        calls = [asyncio.create_task(once.execute(f"key {number}", _seven)) for number in range(3)]
        await asyncio.sleep(0)
        monkeypatch.setattr("semel.stores.redis.wire.NotSent", _once(NotSent))
        with pytest.raises(Struck):
            wire.lose(ConnectionError("the server went away"))
        wire.connection_lost(None)
        assert [outcome.value for outcome in await asyncio.wait_for(asyncio.gather(*calls), PROMPT)] == [
            7,
            7,
            7,
        ]


@in_loop
async def test_what_is_protected_ends_though_its_caller_is_struck_in_the_middle() -> None:
    async def write() -> None:
        await asyncio.sleep(0.01)
        written.append(7)

    written: list[int] = []
    protected = LoopRuntime(asyncio.get_running_loop(), ThreadPoolExecutor).protect(write())
    protected.send(None)
    protected.throw(Struck())  # it waits on
    await asyncio.sleep(0.1)
    with pytest.raises(Struck):
        protected.send(None)
    assert written == [7]


def test_a_thread_that_never_came_up_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing() -> None: ...

    def start(_: threading.Thread) -> None:
        raise Struck

    runtime = ThreadRuntime()
    unheard = nothing()
    with monkeypatch.context() as patched, pytest.raises(Struck):
        patched.setattr(threading.Thread, "start", start)
        runtime.background(unheard)
    unheard.close()
    run_sync(runtime.drain(PROMPT))  # it would raise: a thread that was not started cannot be joined
