"""R27 on every driver: record and business rows are one unit, whatever happens."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from semel import InProgress, KeyMismatch, PreviousFailure, current_run, points
from tests.within.lab import Lab, wait

LONG = 4.0


async def test_R27_commit_keeps_record_and_row(lab: Lab) -> None:
    once, tx = await lab.ready()
    outcome = await wait(once.within(tx.target).execute("k1", lab.work(tx, {"id": 7}), "k1"))
    assert (outcome.value, outcome.replayed, outcome.attempt) == ({"id": 7}, False, 1)
    assert (lab.orders("k1"), lab.records("k1")) == (0, []), "nothing is there before the caller commits"
    await tx.commit()
    assert (lab.orders("k1"), lab.records("k1")) == (1, ["done"])


async def test_R27_rollback_keeps_neither(lab: Lab) -> None:
    once, tx = await lab.ready()
    await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))
    await tx.rollback()
    assert (lab.orders("k1"), lab.records("k1")) == (0, [])
    await tx.begin()
    outcome = await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))
    assert not outcome.replayed
    await tx.commit()
    assert (lab.orders("k1"), lab.records("k1")) == (1, ["done"])


async def test_R27_replays_after_and_before_the_commit(lab: Lab) -> None:
    once, tx = await lab.ready()
    bound = once.within(tx.target)
    await wait(bound.execute("k1", lab.work(tx, [1, 2]), "k1"))
    again = await wait(bound.execute("k1", lab.work(tx), "k1"))
    assert (again.value, again.replayed) == ([1, 2], True), "the transaction sees its own record"
    await tx.commit()
    await tx.begin()
    later = await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))
    assert (later.value, later.replayed) == ([1, 2], True)
    await tx.commit()
    assert lab.orders("k1") == 1


async def test_R27_consistent_with_execute_in_both_directions(lab: Lab) -> None:
    once, tx = await lab.ready()
    await wait(once.within(tx.target).execute("k1", lab.work(tx, "tx"), "k1"))
    await tx.commit()
    outside = await wait(once.execute("k1", lab.work(tx), "k1"))
    assert (outside.value, outside.replayed) == ("tx", True)

    def plain() -> str:
        return "leased"

    await wait(once.execute("k2", plain))
    await tx.begin()
    inside = await wait(once.within(tx.target).execute("k2", lab.work(tx), "k2"))
    assert (inside.value, inside.replayed) == ("leased", True)
    await tx.commit()


async def test_R27_concurrent_duplicate_waits_and_replays(lab: Lab) -> None:
    once, first = await lab.ready()
    await wait(once.within(first.target).execute("k1", lab.work(first, "first"), "k1"))
    sent = await _duplicate_is_sent()

    async def duplicate() -> Any:
        second = await lab.tx()
        outcome = await wait(
            once.within(second.target).execute("k1", lab.work(second, "second"), "k1", wait=20)
        )
        await second.commit()
        await lab.done_with(second)
        return outcome

    spawned = lab.spawn(duplicate())
    await _until(lab, sent.is_set)
    points.listen(None)
    assert not spawned.done(), "it waits for the first transaction"
    await first.commit()
    outcome = await spawned.result()
    assert (outcome.value, outcome.replayed) == ("first", True)
    assert (lab.orders("k1"), lab.records("k1")) == (1, ["done"])


async def test_R27_concurrent_duplicate_takes_over_after_rollback(lab: Lab) -> None:
    once, first = await lab.ready()
    await wait(once.within(first.target).execute("k1", lab.work(first, "first"), "k1"))
    sent = await _duplicate_is_sent()

    async def duplicate() -> Any:
        second = await lab.tx()
        outcome = await wait(
            once.within(second.target).execute("k1", lab.work(second, "second"), "k1", wait=math.inf)
        )
        await second.commit()
        await lab.done_with(second)
        return outcome

    spawned = lab.spawn(duplicate())
    await _until(lab, sent.is_set)
    points.listen(None)
    assert not spawned.done()
    await first.rollback()
    outcome = await spawned.result()
    assert (outcome.value, outcome.replayed) == ("second", False)
    assert (lab.orders("k1"), lab.records("k1")) == (1, ["done"])


async def test_R27_no_wait_is_in_progress_at_once_and_leaves_the_transaction_usable(lab: Lab) -> None:
    once, first = await lab.ready()
    await wait(once.within(first.target).execute("k1", lab.work(first), "k1"))

    async def duplicate() -> Any:
        second = await lab.tx()
        if lab.dialect != "sqlite":  # there the first transaction has the whole database
            await second.insert("other")
        errors: list[InProgress] = []

        async def refused(patience: float) -> float:
            start = time.monotonic()
            with pytest.raises(InProgress) as caught:
                await wait(once.within(second.target).execute("k1", lab.work(second), "k1", wait=patience))
            errors.append(caught.value)
            return time.monotonic() - start

        took, bounded = await _shortest(lambda: refused(0)), await _shortest(lambda: refused(0.2))
        await second.commit()
        await lab.done_with(second)
        return errors[0], took, bounded

    error, took, bounded = await lab.spawn(duplicate()).result()
    assert isinstance(error, TimeoutError)
    assert "attempt 0" not in str(error)
    assert took < LONG, "the shortest wait of a driver's own is five seconds"
    assert 0.19 < bounded < LONG, "wait bounds the row lock"
    await first.commit()
    assert lab.orders("k1") == 1
    assert lab.orders("other") == (0 if lab.dialect == "sqlite" else 1)


async def _shortest(attempt: Callable[[], Awaitable[float]]) -> float:
    """Of several: a machine that stands still makes one of them longer, but not each."""
    took = [await attempt()]
    while min(took) > LONG and len(took) < 3:
        took.append(await attempt())
    return min(took)


async def test_R27_a_mismatch_leaves_the_transaction_usable(lab: Lab) -> None:
    once, tx = await lab.ready()
    bound = once.within(tx.target)
    await wait(bound.execute("k1", lab.work(tx), "k1", request={"a": 1}))
    with pytest.raises(KeyMismatch):
        await wait(bound.execute("k1", lab.work(tx), "k1", request={"a": 2}))
    await tx.insert("after")
    await tx.commit()
    assert (lab.orders("k1"), lab.orders("after")) == (1, 1)


async def test_R27_the_functions_error_leaves_the_transaction_usable_and_no_record(lab: Lab) -> None:
    once, tx = await lab.ready()
    await tx.insert("before")
    error = ValueError("no stock")
    with pytest.raises(ValueError, match="no stock") as caught:
        await wait(once.within(tx.target).execute("k1", lab.raising(tx, error), "k1"))
    assert caught.value is error
    await tx.insert("after")
    await tx.commit()
    assert (lab.orders("before"), lab.orders("k1"), lab.orders("after")) == (1, 0, 1)
    assert lab.records("k1") == []


async def test_R27_an_error_of_the_database_inside_the_function_is_undone_too(lab: Lab) -> None:
    once, tx = await lab.ready()
    await tx.insert("before")

    async def broken(key: str) -> None:
        await tx.insert(key)
        await tx.run("INSERT INTO orders (k) VALUES (NULL)")

    fn = lab.work(tx)
    if lab.colour == "sync":
        from semel.runtime import run_sync

        def fn(key: str) -> None:
            run_sync(broken(key))
    else:
        fn = broken
    with pytest.raises(Exception, match=r"(?i)null"):
        await wait(once.within(tx.target).execute("k1", fn, "k1"))
    await tx.insert("after")
    await tx.commit()
    assert (lab.orders("before"), lab.orders("k1"), lab.orders("after")) == (1, 0, 1)
    assert lab.records("k1") == []


async def test_R27_the_callers_own_savepoint_takes_record_and_rows_with_it(lab: Lab) -> None:
    once, tx = await lab.ready()
    await tx.insert("before")
    await tx.savepoint()
    await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))
    await tx.back()
    await wait(once.within(tx.target).execute("k2", lab.work(tx), "k2"))
    await tx.commit()
    assert (lab.orders("before"), lab.orders("k1"), lab.orders("k2")) == (1, 0, 1)
    assert (lab.records("k1"), lab.records("k2")) == ([], ["done"])


async def test_R27_runs_nest(lab: Lab) -> None:
    once, tx = await lab.ready()
    bound = once.within(tx.target)
    seen: list[Any] = []

    async def outer(key: str) -> str:
        await tx.insert(key)
        await wait(bound.execute("inner", lab.work(tx), "inner"))
        with pytest.raises(ValueError, match="inner"):
            await wait(bound.execute("bad", lab.raising(tx, ValueError("inner")), "bad"))
        with pytest.raises(InProgress, match="itself"):
            await wait(bound.execute("outer", lab.work(tx), "outer", wait=math.inf))
        seen.append(current_run().key)
        return "both"

    def outer_sync(key: str) -> Any:
        from semel.runtime import run_sync

        return run_sync(outer(key))

    fn = outer_sync if lab.colour == "sync" else outer
    assert (await wait(bound.execute("outer", fn, "outer"))).value == "both"
    await tx.commit()
    assert seen == ["outer"]
    assert [lab.orders(key) for key in ("outer", "inner", "bad")] == [1, 1, 0]
    assert [lab.records(key) for key in ("outer", "inner", "bad")] == [["done"], ["done"], []]


async def test_R27_a_failure_record_is_written_on_a_second_connection(lab: Lab) -> None:
    once, tx = await lab.ready(settle_timeout=10)
    await tx.insert("before")
    with pytest.raises(ValueError, match="no stock") as caught:
        await wait(
            once.within(tx.target).execute(
                "k1", lab.raising(tx, ValueError("no stock")), "k1", on_error="replay"
            )
        )
    if lab.dialect == "sqlite" and not lab.driver.startswith("session"):
        assert "second connection" in caught.value.__notes__[0]
    await tx.commit()
    await _until(lab, lambda: lab.records("k1") == ["failed"])
    assert (lab.orders("before"), lab.orders("k1")) == (1, 0)
    await tx.begin()
    with pytest.raises(PreviousFailure, match="no stock"):
        await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1", wait=5))
    with pytest.raises(PreviousFailure, match="no stock"):
        await wait(once.execute("k1", lab.work(tx), "k1", wait=5))
    await tx.rollback()


async def _duplicate_is_sent() -> threading.Event:
    sent = threading.Event()

    def heard(name: str) -> None:
        if name == "claim.sent":
            sent.set()

    points.listen(heard)
    return sent


async def _until(lab: Lab, condition: Any) -> None:
    import asyncio

    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, "it never happened"
        if lab.colour == "async":
            await asyncio.sleep(0.005)
        else:
            time.sleep(0.005)
