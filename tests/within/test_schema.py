"""Tables of a newer semel are refused inside a caller's transaction too, and looking at them costs one question per face."""

from __future__ import annotations

from typing import Any

import pytest

from semel import ConfigurationError
from tests.within.lab import Lab, Tx, wait


async def test_tables_of_a_newer_semel_are_refused_before_the_function_runs(few: Lab) -> None:
    lab, ran = few, list[int]()
    table = f"newer_{lab.driver.replace('-', '_')}"
    await wait(lab.face(table=table).create())
    once, tx = lab.face(table=table), await lab.tx()
    await _set_version(tx, table, 99)
    for key in ("k1", "k2"):
        with pytest.raises(ConfigurationError, match="version 99"):
            await wait(once.within(tx.target).execute(key, lambda: ran.append(1)))
    assert not ran
    await _set_version(tx, table, 1)
    assert (await wait(once.within(tx.target).execute("k1", lambda: 7))).value == 7
    await tx.commit()


async def _set_version(tx: Tx, table: str, version: int) -> None:
    await tx.rollback()
    await tx.run(f"UPDATE {table}_schema SET version = {version}")
    await tx.commit()
    await tx.begin()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_the_tables_are_looked_at_once_per_face(make_coloured: Any, driver: str) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        looks: list[Any] = []
        peek = once._store.peek

        def counting(scope: Any) -> Any:
            looks.append(scope)
            return peek(scope)

        once._store.peek = counting
        for key in ("k1", "k2", "k3"):
            await wait(once.within(tx.target).execute(key, lambda: 7))
        assert len(looks) == 1
        await tx.rollback()

    await make_coloured(driver, body)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_face_that_cannot_reach_its_own_store_lets_the_callers_connection_decide(
    make_coloured: Any, driver: str
) -> None:
    async def body(lab: Lab) -> None:
        _, tx = await lab.ready()
        there, lab.place = lab.place, "postgresql://postgres@127.0.0.1:9/postgres"
        once = lab.face(timeout=0.2)
        lab.place = there
        assert (await wait(once.within(tx.target).execute("k", lambda: 7))).value == 7
        await tx.rollback()

    await make_coloured(driver, body)
