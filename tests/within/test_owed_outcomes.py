"""R16 inside a transaction: an outcome that this process holds and the store has not taken is written before its key is claimed
there, too. Found by hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from semel import NotRecorded, StoreUnavailable
from semel.runtime import run_sync
from tests.within.conftest import make_lab
from tests.within.lab import Lab, wait

LOCK = {
    "postgresql": "SELECT 1 FROM semel WHERE key = 'k' FOR UPDATE",
    "mysql": "SELECT 1 FROM semel WHERE `key` = 'k' FOR UPDATE",
    "sqlite": "INSERT INTO orders (k) VALUES ('the write lock')",
}


async def _owing(lab: Lab, ran: list[str]) -> Any:
    """A face that holds the outcome of k, which it could not write, and whose lease is over."""
    once = lab.face(lease=0.3, timeout=1, settle_timeout=0.2)
    await wait(once.peek("warm-up"))
    engine = once._engine()
    engine.heart.stop()  # nothing is done in the background: it would be done soon, but it is not asked here
    engine.debts._ticker.at = lambda due: None
    blocker = await lab.tx()

    async def charge() -> str:
        ran.append("charge")
        await blocker.run(LOCK[lab.dialect])
        return "charged"

    fn = charge if lab.colour == "async" else lambda: run_sync(charge())
    with pytest.raises(NotRecorded, match="goes on in the background"):
        await wait(once.execute("k", fn))
    time.sleep(1.5)  # an offer that is still under way when the row is free would be taken
    await blocker.rollback()
    return once


def _again(lab: Lab, ran: list[str]) -> Any:
    def plain() -> str:
        ran.append("again")
        return "twice"

    async def coloured() -> str:
        return plain()

    return coloured if lab.colour == "async" else plain


@pytest.fixture(params=("sqlite3", "psycopg", "asyncpg", "session-asyncpg", "pymysql"))
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Lab:
    return make_lab(request, request.param, tmp_path)


async def test_R16_what_is_held_here_is_replayed_inside_a_transaction(lab: Lab) -> None:
    ran: list[str] = []
    once = await _owing(lab, ran)
    tx = await lab.tx()
    again = await wait(once.within(tx.target).execute("k", _again(lab, ran), wait=5))
    assert (again.value, again.replayed, ran) == ("charged", True, ["charge"])
    await tx.insert("k")
    await tx.commit()
    assert (await wait(once.peek("k"))).state == "done"


@pytest.mark.parametrize("lab", ["sqlite3", "session-aiosqlite"], indirect=True)
async def test_R16_who_keeps_it_from_being_written_by_his_own_transaction_runs_nothing(lab: Lab) -> None:
    """SQLite has one lock for all rows."""
    ran: list[str] = []
    once = await _owing(lab, ran)
    tx = await lab.tx()
    await tx.insert("before")
    with pytest.raises(StoreUnavailable, match="has ended here, and the store has not taken its outcome yet"):
        await wait(once.within(tx.target).execute("k", _again(lab, ran)))
    await tx.commit()
    tx = await lab.tx()
    again = await wait(once.within(tx.target).execute("k", _again(lab, ran)))
    assert (again.value, again.replayed, ran) == ("charged", True, ["charge"])
    assert await tx.count("before") == 1
