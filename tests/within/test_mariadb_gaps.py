"""R27 on MariaDB at its default level, REPEATABLE READ: a transaction keeps its own keys and no other one."""

from __future__ import annotations

from typing import Any

import pytest

from semel import InProgress
from tests.within.lab import Lab, Tx, wait

DRIVERS = ("pymysql", "session-pymysql", "asyncmy")
ROUNDS, OTHERS = 15, 3


async def _refused(lab: Lab, once: Any, tx: Tx, key: str) -> int:
    """Of the claims of other keys, made in another transaction meanwhile."""
    refused = 0
    for number in range(OTHERS):
        try:
            await wait(once.within(tx.target).execute(f"{key} {number}", lab.work(tx), key))
        except InProgress:
            refused += 1
        await tx.rollback()
    return refused


@pytest.mark.parametrize("fresh_lab", DRIVERS, indirect=True)
async def test_R27_a_settled_run_of_an_open_transaction_is_in_nobody_elses_way(fresh_lab: Lab) -> None:
    """Nearly all were refused: by whim of the optimizer the outcome was written through the index of open leases."""
    lab = fresh_lab
    once, tx = await lab.ready()
    other = await lab.tx()
    refused = 0
    for number in range(ROUNDS):
        await wait(once.within(tx.target).execute(f"mine {number}", lab.work(tx), "mine"))
        refused += await _refused(lab, once, other, f"other {number}")
        await tx.rollback()  # few rows, and what is left of others, make the optimizer choose the other index
    assert refused == 0


@pytest.mark.parametrize("fresh_lab", DRIVERS, indirect=True)
async def test_R27_nor_is_one_that_took_an_expired_record_over(fresh_lab: Lab) -> None:
    lab = fresh_lab
    once, tx = await lab.ready()
    other = await lab.tx()
    for number in range(ROUNDS):
        await wait(once.execute(f"mine {number}", int))
    lab.execute("UPDATE semel SET expires = UTC_TIMESTAMP(6) - INTERVAL 1 DAY")
    refused = 0
    for number in range(ROUNDS):
        outcome = await wait(once.within(tx.target).execute(f"mine {number}", lab.work(tx), "mine"))
        assert not outcome.replayed
        refused += await _refused(lab, once, other, f"other {number}")
        await tx.rollback()
    assert refused == 0
