"""R27: a MariaDB that ends the whole transaction with a lock that it did not get (innodb_rollback_on_timeout)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from semel.runtime import run_sync
from semel.testing import services
from tests.within.lab import Lab, wait


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    with services.mariadb(config={"innodb_rollback_on_timeout": "ON"}) as server:
        lab = Lab("pymysql", server.database())
        lab.create()
        yield lab.place


@pytest.mark.parametrize("waiting", [0, 0.3])
@pytest.mark.parametrize("driver", ["pymysql", "session-pymysql", "django-mysql", "asyncmy"])
def test_R27_a_transaction_that_the_database_ended_is_not_told_as_in_progress(
    place: str, driver: str, waiting: float
) -> None:
    """It was: the rows from before the claim were gone, and whoever waited ran and committed without them."""
    lab, rival = Lab(driver, place), Lab("pymysql", place)
    key = f"{driver}-{waiting}"
    other = run_sync(rival.tx())
    rival.face().within(other.target).execute(key, rival.work(other), key)

    async def body() -> None:
        once, tx = await lab.ready(wait=waiting)
        await tx.insert(f"{key}-before")
        with pytest.raises(Exception, match="1205") as told:
            await wait(once.within(tx.target).execute(key, lab.work(tx), key))
        assert any("roll the whole transaction back" in note for note in told.value.__notes__)
        await tx.rollback()
        await lab.close()

    try:
        (run_sync if lab.colour == "sync" else asyncio.run)(body())
        assert lab.orders(f"{key}-before") == 0
    finally:
        run_sync(rival.close())
