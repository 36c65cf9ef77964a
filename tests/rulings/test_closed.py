"""A closed face is of no more use, whatever was made of it before: claims, transactions, other loops."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from semel import AsyncSemel, ConfigurationError, InProgress, Semel

from .conftest import Lab, url_of
from .tools import enter


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


def test_what_runs_while_the_face_is_closed_in_another_loop_is_still_recorded(tmp_path: Path) -> None:
    once = AsyncSemel("memory://closed-late")

    async def main() -> None:
        began, goes_on = asyncio.Event(), asyncio.Event()

        async def work() -> str:
            began.set()
            await goes_on.wait()
            return "done"

        running = asyncio.create_task(once.execute("k", work))
        await began.wait()
        await asyncio.to_thread(asyncio.run, once.aclose())
        goes_on.set()
        assert (await running).value == "done"

    asyncio.run(main())
    assert Semel("memory://closed-late").execute("k", str).value == "done"


@pytest.mark.timeout(60)
def test_R17_a_refused_call_leaves_the_heartbeats_of_runs_that_are_still_ending() -> None:
    async def main() -> None:
        once, other = AsyncSemel("memory://closed-beats", lease=0.3), AsyncSemel("memory://closed-beats")
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
        await asyncio.sleep(0.9)
        with pytest.raises(InProgress):
            await other.execute("k", lambda: "twice")
        goes_on.set()
        assert (await running).value == "done"
        await closing

    asyncio.run(main())


@pytest.mark.timeout(60)
def test_R17_so_it_is_when_another_loop_has_closed_the_face() -> None:
    async def main() -> None:
        once, other = AsyncSemel("memory://closed-there", lease=0.3), AsyncSemel("memory://closed-there")
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
        await asyncio.sleep(0.9)
        with pytest.raises(InProgress):
            await other.execute("k", lambda: "twice")
        goes_on.set()
        assert (await running).value == "done"

    asyncio.run(main())


@pytest.mark.timeout(60)
def test_R17_and_of_two_first_calls_in_threads_the_refused_one_leaves_the_others_heartbeats() -> None:
    once, other = Semel("memory://closed-first", lease=0.3), Semel("memory://closed-first")
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
    time.sleep(0.9)
    with pytest.raises(InProgress):
        other.execute("k", lambda: "twice")
    goes_on.set()
    runner.join(20)
    closer.join(20)
    assert done == ["done"]
    other.close()
