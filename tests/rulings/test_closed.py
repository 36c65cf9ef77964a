"""A closed face is of no more use, whatever was made of it before: claims, transactions, other loops."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from semel import AsyncSemel, ConfigurationError, InProgress, Semel, current_run
from semel.hooks import AtRisk, LeaseGone, Unrecorded
from semel.keys import make_scope
from semel.runtime import run_sync
from semel.store import Settings, open_store
from semel.testing.proxy import Proxy

from .conftest import Lab, url_of
from .test_late_copies import _moved, _port
from .tools import enter, renewed

LEASE = 0.6


@pytest.mark.parametrize("verdicts", [False, True])
async def test_a_claim_that_was_made_before_the_face_was_closed_cannot_be_entered(
    lab: Lab, verdicts: bool
) -> None:
    once = lab.face()
    await lab.do(once.execute("a", lab.effect()))
    claim = once.claim("k", verdicts=verdicts)
    await lab.do(once.close())
    with pytest.raises(ConfigurationError, match="is closed: make a new one"):
        await enter(lab, claim)
    assert not claim.won
    assert await lab.do(lab.face().peek("k")) is None


@pytest.mark.parametrize("store", ["memory", "sqlite", "redis", "postgres", "mysql"])
def test_a_face_that_is_closed_in_one_loop_is_closed_in_all(
    request: pytest.FixtureRequest, tmp_path: Path, store: str
) -> None:
    once = AsyncSemel(url_of(request, store, "async", tmp_path), timeout=20)
    used, closed, told = threading.Event(), threading.Event(), list[BaseException]()

    async def other() -> None:
        await once.execute("b", lambda: 1, retention=0)
        claim = once.claim("c")
        used.set()
        await asyncio.to_thread(closed.wait, 30)
        for work in (once.execute("c", lambda: 1), claim.__aenter__()):
            try:
                await work
            except ConfigurationError as error:
                told.append(error)
        await once.aclose()

    async def main() -> None:
        await once.execute("a", lambda: 1, retention=0)
        thread = threading.Thread(target=asyncio.run, args=(other(),))
        thread.start()
        await asyncio.to_thread(used.wait, 30)
        await once.aclose()
        closed.set()
        await asyncio.to_thread(thread.join, 30)

    asyncio.run(main())
    assert [str(each) for each in told] == [
        "this AsyncSemel is closed: make a new one, or close it later"
    ] * 2


def test_a_transaction_that_was_bound_before_the_face_was_closed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "semel.db"
    once, connection = Semel(f"sqlite:///{file}"), sqlite3.connect(file)
    once.create()
    bound = once.within(connection)
    claim: Any = bound.claim("k2")
    once.close()
    with pytest.raises(ConfigurationError, match="is closed"):
        bound.execute("k", lambda: 1)
    with pytest.raises(ConfigurationError, match="is closed"), claim:
        """Never run."""
    connection.close()


class Busy:
    """A run that goes on in one loop while the face is closed in another one."""

    def __init__(self, url: str) -> None:
        self.troubles: list[object] = []
        self.once = AsyncSemel(
            url, timeout=20, lease=LEASE, tenant=uuid.uuid4().hex, hooks=[self._heard], on_unknown="hold"
        )
        self.began, self.closed = threading.Event(), threading.Event()
        self.value: Any = None

    def _heard(self, event: object) -> None:
        if isinstance(event, AtRisk | LeaseGone | Unrecorded):
            self.troubles.append(event)

    async def run(self, *, closes: bool) -> None:
        async def work() -> str:
            self.began.set()
            await asyncio.to_thread(self.closed.wait, 30)
            await asyncio.sleep(2 * LEASE)  # renewed from here on, or overtaken
            run: Any = current_run()
            return f"{await run.step('in a thread', lambda: 'done')}"

        self.value = (await self.once.execute("k", work)).value
        if closes:
            await self.once.aclose()

    async def close(self) -> None:
        await self.once.execute("mine", lambda: 1)  # this loop has connections, too
        await asyncio.to_thread(self.began.wait, 30)
        await self.once.aclose()
        await self.once.aclose()
        self.closed.set()


@pytest.mark.timeout(90)
@pytest.mark.parametrize("closes", [True, False], ids=["closed-twice", "closed-once"])
@pytest.mark.parametrize("closer", ["main", "thread"])
@pytest.mark.parametrize("store", ["memory", "sqlite", "redis", "postgres", "mysql"])
def test_what_runs_while_the_face_is_closed_in_another_loop_goes_on_and_is_recorded(
    request: pytest.FixtureRequest, tmp_path: Path, store: str, closer: str, closes: bool
) -> None:
    direct = url_of(request, store, "async", tmp_path)
    with contextlib.ExitStack() as stack:
        proxy = None
        if store in ("redis", "postgres", "mysql"):
            proxy = stack.enter_context(Proxy("127.0.0.1", int(_port(direct))))
        busy = Busy(_moved(direct, proxy.port) if proxy else direct)
        here, there = busy.close(), busy.run(closes=closes)
        if closer == "thread":
            here, there = there, here
        thread = threading.Thread(target=asyncio.run, args=(there,))
        thread.start()
        asyncio.run(here)
        thread.join(60)
        assert busy.value == "done"
        assert busy.troubles == []
        assert busy.once._pool is None or not closes
        until = time.monotonic() + 20
        while proxy and proxy.open_connections:
            assert time.monotonic() < until, "a connection stayed open"
            time.sleep(0.01)
    if store == "sqlite":
        assert {file.name for file in tmp_path.iterdir()} == {
            "semel.db"
        }  # the log is gone with the last user
    other = Semel(url_of(request, store, "sync", tmp_path), tenant=busy.once._defaults.tenant, timeout=20)
    if store != "memory":  # which is another one for each name
        assert other.execute("k", str).value == "done"
    other.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("store", ["redis", "postgres", "mysql"])
def test_what_a_loop_opened_is_closed_with_the_face_although_another_loop_still_runs(
    request: pytest.FixtureRequest, tmp_path: Path, store: str
) -> None:
    direct = url_of(request, store, "async", tmp_path)
    with Proxy("127.0.0.1", int(_port(direct))) as proxy:
        busy = Busy(_moved(direct, proxy.port))
        thread = threading.Thread(target=asyncio.run, args=(busy.run(closes=True),))

        async def main() -> None:
            thread.start()
            await asyncio.to_thread(busy.began.wait, 30)
            theirs = proxy.open_connections
            await busy.once.execute("mine", lambda: 1)
            assert proxy.open_connections > theirs
            await busy.once.aclose()
            async with asyncio.timeout(20):
                while proxy.open_connections > theirs:
                    await asyncio.sleep(0.01)
            busy.closed.set()
            await asyncio.to_thread(thread.join, 30)

        asyncio.run(main())
        assert busy.value == "done"
        assert busy.troubles == []


@pytest.mark.parametrize("store", ["redis", "mysql"])
def test_a_store_for_threads_has_nothing_that_belongs_to_a_loop(
    request: pytest.FixtureRequest, tmp_path: Path, store: str
) -> None:
    opened: Any = open_store(url_of(request, store, "sync", tmp_path), Settings(timeout=20), "sync")
    scope = make_scope("semel", uuid.uuid4().hex, "op", "k")
    for _ in range(2):
        assert run_sync(opened.peek(scope))[0] is None
        run_sync(opened.leave())
    run_sync(opened.aclose())


@pytest.mark.timeout(60)
def test_R17_a_refused_call_leaves_the_heartbeats_of_runs_that_are_still_ending() -> None:
    async def main() -> None:
        once, other = (
            AsyncSemel("memory://closed-beats", lease=3, settle_timeout=60),
            AsyncSemel("memory://closed-beats"),
        )
        began, goes_on = asyncio.Event(), asyncio.Event()

        async def work() -> str:
            began.set()
            await goes_on.wait()
            return "done"

        running = asyncio.create_task(once.execute("k", work))
        await began.wait()
        closing = asyncio.create_task(once.aclose())
        refused = asyncio.create_task(once.execute("late", work))  # between aclose() and the closing itself
        with pytest.raises(ConfigurationError, match="is closed"):
            await refused
        await renewed(Lab("async", ""), other, "k")  # its heart goes on
        with pytest.raises(InProgress):
            await other.execute("k", lambda: "twice")
        goes_on.set()
        assert (await running).value == "done"
        await closing

    asyncio.run(main())


@pytest.mark.timeout(60)
def test_R17_so_it_is_when_another_loop_has_closed_the_face() -> None:
    async def main() -> None:
        once, other = (
            AsyncSemel("memory://closed-there", lease=3, settle_timeout=60),
            AsyncSemel("memory://closed-there"),
        )
        began, goes_on = asyncio.Event(), asyncio.Event()

        async def work() -> str:
            began.set()
            await goes_on.wait()
            return "done"

        running = asyncio.create_task(once.execute("k", work))
        await began.wait()
        await asyncio.to_thread(asyncio.run, once.aclose())
        with pytest.raises(ConfigurationError, match="is closed"):
            await once.execute("late", work)
        await renewed(Lab("async", ""), other, "k")  # its heart goes on
        with pytest.raises(InProgress):
            await other.execute("k", lambda: "twice")
        goes_on.set()
        assert (await running).value == "done"

    asyncio.run(main())


@pytest.mark.timeout(60)
def test_R17_and_of_two_first_calls_in_threads_the_refused_one_leaves_the_others_heartbeats() -> None:
    once, other = Semel("memory://closed-first", lease=3, settle_timeout=60), Semel("memory://closed-first")
    began, goes_on = threading.Event(), threading.Event()
    done: list[Any] = []

    class Moment:
        """The lock under which the engine is made: when it is left, another thread runs a call, and the face is closed."""

        def __init__(self, lock: Any) -> None:
            self.lock = lock

        def __enter__(self) -> None:
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()
            once._lock = self.lock
            runner.start()
            began.wait(20)
            closer.start()
            while not once._door.closed:
                time.sleep(0.001)

    def work() -> str:
        began.set()
        goes_on.wait(20)
        return "done"

    runner = threading.Thread(target=lambda: done.append(once.execute("k", work).value))
    closer = threading.Thread(target=once.close)
    once._lock = Moment(once._lock)  # type: ignore[assignment]  # the moment between
    with pytest.raises(ConfigurationError, match="is closed"):
        once.execute("late", work)
    run_sync(renewed(Lab("sync", ""), other, "k"))
    with pytest.raises(InProgress):
        other.execute("k", lambda: "twice")
    goes_on.set()
    runner.join(20)
    closer.join(20)
    assert done == ["done"]
    other.close()
