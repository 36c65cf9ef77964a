"""A closed face is of no more use, whatever was made of it before: claims, transactions, other loops."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from semel import AsyncSemel, ConfigurationError, Semel

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
