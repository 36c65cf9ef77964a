"""R15, R27: a transaction meets a run whose steps cannot be read, and whose outcome a probe finds too late."""

from __future__ import annotations

from typing import Any

import pytest

from semel import Found, OutcomeUnknown, current_run
from semel.model import State
from semel.runtime import run_sync
from tests.within.lab import Lab, wait

RING = {"2026-a": b"a" * 32}


async def test_R27_steps_that_cannot_be_read_leave_the_transaction_as_it_was(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()
    keyed = lab.face(encrypt=RING)

    async def first() -> None:
        step: Any = current_run().step("reserve", lambda: 1)
        await wait(step)
        raise ValueError("later")

    with pytest.raises(ValueError, match="later"):
        await wait(keyed.execute("k1", first if lab.colour == "async" else lambda: run_sync(first())))
    await tx.insert("before")
    for _ in range(2):
        with pytest.raises(OutcomeUnknown, match="cannot be read") as caught:
            await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))
        assert caught.value.unreadable
    await tx.insert("after")
    await tx.commit()
    assert [await tx.count(each) for each in ("before", "k1", "after")] == [1, 0, 1]
    record = await wait(once.peek("k1"))
    assert record.state is State.RELEASED
    await tx.rollback()
    await tx.begin()
    outcome = await wait(
        keyed.within(tx.target).execute("k1", lab.work(tx), "k1")
    )  # whoever has the keys goes on
    await tx.commit()
    assert (outcome.replayed, await tx.count("k1")) == (False, 1)


async def test_R11_what_a_probe_found_is_kept_although_the_record_was_freed_meanwhile(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()
    with pytest.raises(SystemExit):
        await wait(
            once.execute(
                "k1",
                _lost if lab.colour == "sync" else _lost_async,
                on_unknown=_nothing if lab.colour == "sync" else _nothing_async,
            )
        )

    async def probe(*_: Any) -> Found:
        await wait(once.forget("k1"))
        return Found("looked up")

    given = probe if lab.colour == "async" else lambda *args: run_sync(probe(*args))
    outcome = await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1", on_unknown=given))
    await tx.commit()
    assert (outcome.value, outcome.replayed, await tx.count("k1")) == ("looked up", True, 0)
    assert (await wait(once.peek("k1"))).state is State.DONE


def _lost(*_: Any) -> None:
    raise SystemExit


def _nothing(*_: Any) -> None:
    """Never asked."""


async def _lost_async(*_: Any) -> None:
    raise SystemExit


async def _nothing_async(*_: Any) -> None:
    """Never asked."""
