"""R27: which savepoints a run sends, and that the one it leaves open to the caller's commit is nobody's concern."""

from __future__ import annotations

from typing import Any

import pytest

from semel import ConfigurationError, KeyMismatch, current_run
from tests.within.lab import Lab, wait
from tests.within.test_decisions import coloured

DRIVERS = ["psycopg", "psycopg-async", "asyncpg", "asyncpg-pool"]


def _words(said: list[str]) -> list[str]:
    return [text.split()[0].upper() for text in said]


async def test_R27_one_savepoint_per_transaction_is_left_to_its_commit(make_coloured: Any) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        said: list[str] = []
        for _ in range(2):
            await tx.begin()
            with tx.target.query_logger(lambda query: said.append(query.query)):
                await once.within(tx.target).execute("k1", lab.work(tx), "k1")
                await once.within(tx.target).execute("k2", lab.work(tx), "k2")
                await tx.target.fetch("select")  # loggers are called in the next tick
            await tx.rollback()
        one = ["SAVEPOINT", "INSERT", "UPDATE"]  # savepoint and claim travel in one message
        assert _words(said) == [*one, *one, "RELEASE", "SELECT"] * 2
        assert (lab.records("k1"), lab.records("k2")) == ([], [])

    await make_coloured("asyncpg", body)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_R27_the_callers_savepoints_work_around_the_one_left_open(
    make_coloured: Any, driver: str
) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        await tx.insert("before")
        await tx.run("SAVEPOINT mine")
        await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))
        await tx.run("SAVEPOINT yours")
        await wait(once.within(tx.target).execute("k2", lab.work(tx), "k2"))
        await tx.run("ROLLBACK TO SAVEPOINT yours")
        with pytest.raises(ValueError, match="no"):
            await wait(once.within(tx.target).execute("k3", lab.raising(tx, ValueError("no")), "k3"))
        await tx.insert("after")
        await tx.run("RELEASE SAVEPOINT mine")
        await tx.commit()
        assert [lab.orders(key) for key in ("before", "k1", "k2", "k3", "after")] == [1, 1, 0, 0, 1]
        assert [lab.records(key) for key in ("k1", "k2", "k3")] == [["done"], [], []]

    await make_coloured(driver, body)


@pytest.mark.parametrize("driver", [*DRIVERS, "session-asyncpg", "connection-psycopg"])
async def test_R27_a_function_that_commits_and_begins_another_transaction_is_told(
    make_coloured: Any, driver: str
) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()

        async def commits(key: str) -> str:
            await tx.run("COMMIT")
            await tx.run("BEGIN")
            await tx.insert(key)
            return "made"

        with pytest.raises(ConfigurationError, match="ended the transaction"):
            await wait(once.within(tx.target).execute("k1", coloured(lab, commits), "k1"))
        await tx.rollback()
        assert (lab.orders("k1"), lab.records("k1")) == (0, ["running"])

    await make_coloured(driver, body)


@pytest.mark.parametrize("strings", ["on", "off"])
@pytest.mark.parametrize("driver", ["psycopg", "psycopg-async", "asyncpg"])
async def test_R27_a_claim_that_travels_as_text_says_what_was_said(
    make_coloured: Any, driver: str, strings: str
) -> None:
    key, tenant = "o'brien\\'); DROP TABLE orders; --", 'größe "$1" %s ✓'

    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        await tx.run(f"SET LOCAL standard_conforming_strings = {strings}")
        await tx.run("SET LOCAL escape_string_warning = off")
        seen: list[int] = []

        async def insert(key: str) -> str:
            seen.append(current_run().token)
            await tx.insert(key)
            return "made"

        within = once.within(tx.target)
        options: dict[str, Any] = {"tenant": tenant, "labels": {"a'b": 'c"\\d'}, "request": {"n": 1}}
        assert (await wait(within.execute(key, coloured(lab, insert), "k1", **options))).value == "made"
        record = await wait(within.peek(key, tenant=tenant))
        assert (record.scope.key, record.scope.tenant) == (key, tenant)
        assert (record.labels, record.token) == ({"a'b": 'c"\\d'}, seen[0])
        assert (await wait(within.execute(key, coloured(lab, insert), "k1", **options))).replayed
        with pytest.raises(KeyMismatch):
            await wait(within.execute(key, coloured(lab, insert), tenant=tenant, request={"n": 2}))
        await tx.commit()
        assert lab.orders("k1") == 1

    await make_coloured(driver, body)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_R27_a_transaction_that_had_failed_is_left_as_it_is(make_coloured: Any, driver: str) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))
        for _ in range(2):  # the savepoint of k1 is still open: nobody may go back to it
            with pytest.raises(Exception, match=r"zero|aborted"):
                await tx.run("SELECT 1 / 0")
            with pytest.raises(Exception, match="aborted") as caught:
                await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))
            assert not hasattr(caught.value, "__notes__")
        await tx.rollback()
        assert (lab.orders("k1"), lab.records("k1")) == (0, [])

    await make_coloured(driver, body)


async def test_R27_a_psycopg_connection_in_pipeline_mode_is_refused(make_coloured: Any) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        await tx.insert("before")
        with (
            tx.target.pipeline(),
            pytest.raises(ConfigurationError, match="pipeline mode"),
        ):
            once.within(tx.target).execute("k1", lab.work(tx), "k1")
        once.within(tx.target).execute("k1", lab.work(tx), "k1")
        await tx.commit()
        assert (lab.orders("before"), lab.orders("k1"), lab.records("k1")) == (1, 1, ["done"])

    await make_coloured("psycopg", body)
