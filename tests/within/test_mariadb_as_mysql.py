"""The statements that MySQL gets, on a MariaDB that is taken for one: it knows them all."""

from __future__ import annotations

import time

import pytest

from semel import InProgress
from tests.within.lab import Lab, Tx


async def _tx(lab: Lab) -> Tx:
    tx = await lab.tx()
    tx.target.server_version = "8.0.36"
    return tx


@pytest.mark.parametrize("few", ["pymysql"], indirect=True)
async def test_R27_a_claim_is_an_upsert_and_a_look_at_its_row(few: Lab) -> None:
    lab = few
    once, _ = await lab.ready()
    tx, other = await _tx(lab), await _tx(lab)
    await tx.run("SET SESSION innodb_lock_wait_timeout = 37")
    assert not once.within(other.target).execute("key", lab.work(other), "key").replayed
    began = time.monotonic()
    with pytest.raises(InProgress):
        once.within(tx.target).execute("key", int)
    assert 0.9 < time.monotonic() - began < 10  # it cannot wait for less than a second
    await other.commit()
    assert once.within(tx.target).execute("key", str).value == "made"
    lab.execute("UPDATE semel SET expires = UTC_TIMESTAMP(6) - INTERVAL 1 DAY")
    assert not once.within(tx.target).execute("key", lab.work(tx), "key").replayed
    assert await tx.run("SELECT @@SESSION.innodb_lock_wait_timeout") == [(37,)]
    await tx.commit()
    assert lab.orders("key") == 2
