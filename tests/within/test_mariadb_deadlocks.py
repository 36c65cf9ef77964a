"""R27 on MariaDB: who waits for a key is seen by InnoDB, so that a deadlock is one, and is in no other waiter's way."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from semel import InProgress
from semel.within.drivers import PymysqlPort
from tests.within.lab import Lab, Tx, wait

DRIVERS = ("pymysql", "session-pymysql", "asyncmy")
LONG = 20.0
"""Seconds to wait for a key that is free after one or two."""


def _code(error: BaseException) -> Any:
    return getattr(error, "orig", error).args[0]


async def _ended(lab: Lab, once: Any, tx: Tx, key: str, waiting: float = LONG) -> Any:
    """A whole transaction with one more key: its outcome, or its error."""
    try:
        outcome = await wait(once.within(tx.target).execute(key, lab.work(tx), key, wait=waiting))
    except Exception as error:
        await tx.rollback()
        return error
    await tx.commit()
    return outcome


def _assert_one_was_ended(told: list[Any], began: float) -> None:
    (error,) = [each for each in told if isinstance(each, Exception)]
    assert _code(error) == 1213
    assert not hasattr(error, "__notes__")  # the whole transaction is to be repeated: nothing more to say
    assert time.monotonic() - began < LONG / 2


@pytest.mark.parametrize("few", DRIVERS, indirect=True)
async def test_R27_two_transactions_that_want_each_others_key_are_a_deadlock(few: Lab) -> None:
    """Both waited to the end of their time, and both were told InProgress."""
    lab = few
    once, one = await lab.ready()
    other = await lab.tx()
    for tx, key in ((one, "a"), (other, "b")):
        await wait(once.within(tx.target).execute(key, lab.work(tx), key))
    began = time.monotonic()
    both = [lab.spawn(_ended(lab, once, tx, key)) for tx, key in ((one, "b"), (other, "a"))]
    told = [await each.result(60) for each in both]
    _assert_one_was_ended(told, began)
    assert [lab.orders(key) for key in "ab"] == [1, 1]


@pytest.mark.parametrize("few", DRIVERS, indirect=True)
async def test_R27_a_row_and_a_key_are_a_deadlock_too(few: Lab) -> None:
    """Both stood still for the whole `wait`."""
    lab = few
    lab.execute("INSERT INTO orders (id, k) VALUES (1, 'row')")
    once, one = await lab.ready()
    other = await lab.tx()
    change = "UPDATE orders SET k = 'changed' WHERE id = 1"
    await one.run(change)
    await wait(once.within(other.target).execute("key", lab.work(other), "key"))

    async def changed() -> Any:
        try:
            await other.run(change)
        except Exception as error:
            await other.rollback()
            return error
        await other.commit()
        return None

    began = time.monotonic()
    both = [lab.spawn(_ended(lab, once, one, "key")), lab.spawn(changed())]
    _assert_one_was_ended([await each.result(60) for each in both], began)
    assert lab.records("key") == ["done"]


@pytest.mark.parametrize("few", DRIVERS, indirect=True)
@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_R27_many_that_wait_for_one_key_are_no_deadlock(few: Lab, end: str) -> None:
    """If all of them waited in InnoDB: when the insertion is rolled back, all but one of them are ended as deadlocked."""
    lab = few
    once, holder = await lab.ready()
    await wait(once.within(holder.target).execute("key", lab.work(holder), "key"))
    waiters = [lab.spawn(_ended(lab, once, await lab.tx(), "key")) for _ in range(4)]
    await _pause(lab, 1.5)
    await wait(getattr(holder, end)())
    told = [await each.result(60) for each in waiters]
    assert [each for each in told if isinstance(each, Exception)] == []
    assert [each.replayed for each in told].count(False) == (1 if end == "rollback" else 0)
    assert lab.orders("key") == 1


@pytest.mark.parametrize("few", DRIVERS, indirect=True)
async def test_R27_who_has_waited_leaves_no_lock_and_no_setting_behind(few: Lab) -> None:
    lab = few
    once, holder = await lab.ready()
    tx = await lab.tx()
    await wait(once.within(holder.target).execute("key", lab.work(holder), "key"))
    await tx.run("SET SESSION innodb_lock_wait_timeout = 37")
    await tx.insert("before")
    began = time.monotonic()
    with pytest.raises(InProgress):
        await wait(once.within(tx.target).execute("key", int, wait=1.8))
    assert 1.7 < time.monotonic() - began < 10
    await _assert_clean(tx)

    async def win() -> Any:
        return await wait(once.within(tx.target).execute("key", lab.work(tx), "key", wait=LONG))

    won = lab.spawn(win())
    await _pause(lab, 1.0)
    await holder.rollback()
    assert not (await won.result(60)).replayed
    await _assert_clean(tx)
    await tx.commit()
    assert (lab.orders("before"), lab.orders("key")) == (1, 1)


@pytest.mark.parametrize("few", ["pymysql"], indirect=True)
async def test_R27_a_server_without_locks_by_name_is_asked_again_and_again(
    few: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Galera has none."""
    lab, plain, refused = few, PymysqlPort.run, []

    async def run(self: PymysqlPort, sql: str, args: Any = ()) -> Any:
        if "GET_LOCK" in sql:
            refused.append(sql)
            raise NotImplementedError
        return await plain(self, sql, args)

    monkeypatch.setattr(PymysqlPort, "run", run)
    once, holder = await lab.ready()
    tx = await lab.tx()
    once.within(holder.target).execute("key", lab.work(holder), "key")
    await tx.insert("before")
    with pytest.raises(InProgress):
        once.within(tx.target).execute("key", int, wait=1.8)
    assert refused
    await holder.commit()
    assert once.within(tx.target).execute("key", int, wait=LONG).value == "made"
    await tx.commit()
    assert lab.orders("before") == 1


async def _assert_clean(tx: Tx) -> None:
    assert [int(row[0]) for row in await tx.run("SELECT @@SESSION.innodb_lock_wait_timeout")] == [37]
    assert [int(row[0]) for row in await tx.run("SELECT RELEASE_ALL_LOCKS()")] == [0]


async def _pause(lab: Lab, seconds: float) -> None:
    if lab.colour == "async":
        await asyncio.sleep(seconds)
    else:
        time.sleep(seconds)
