"""R27: what a caller's transaction meets (leased runs, unknown and expired records) and what its function may do."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from typing import Any

import pytest

from semel import (
    NOT_FOUND,
    ConfigurationError,
    Found,
    InProgress,
    KeyExpired,
    OutcomeUnknown,
    PreviousFailure,
    SemelWarning,
    current_run,
)
from semel.calls import nothing_to_run
from semel.options import Release
from semel.runtime import run_sync
from tests.within.conftest import FEW
from tests.within.lab import Lab, Promise, wait


def coloured(lab: Lab, body: Any) -> Any:
    """An async body as a function of the lab's colour."""
    if lab.colour == "async":
        return body

    def plain(*args: Any) -> Any:
        return run_sync(body(*args))

    return plain


async def test_R27_a_leased_run_is_busy_and_then_replayed(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()
    claim = once.claim("k1")
    await (wait(claim.__enter__()) if lab.colour == "sync" else claim.__aenter__())
    with pytest.raises(InProgress) as caught:
        await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))
    assert caught.value.attempt == 1
    await tx.rollback()

    async def waiter() -> Any:
        other = await lab.tx()
        outcome = await wait(once.within(other.target).execute("k1", lab.work(other), "k1", wait=20))
        await other.commit()
        await lab.done_with(other)
        return outcome

    spawned = lab.spawn(waiter())
    await wait(claim.complete("leased"))
    if lab.colour == "sync":
        claim.__exit__(None, None, None)
    else:
        await claim.__aexit__(None, None, None)
    outcome = await spawned.result()
    assert (outcome.value, outcome.replayed) == ("leased", True)
    assert lab.orders("k1") == 0


async def test_R27_a_leased_caller_waits_for_a_transaction(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready(timeout=10)
    await wait(once.within(tx.target).execute("k1", lab.work(tx, "tx"), "k1"))

    async def outside() -> Any:
        return await wait(once.execute("k1", coloured(lab, _nothing), wait=20))

    spawned = lab.spawn(outside())
    await tx.commit()
    outcome = await spawned.result()
    assert (outcome.value, outcome.replayed) == ("tx", True)


async def _nothing() -> str:
    return "ran outside"


async def test_R27_a_lapsed_run_is_taken_over(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()
    await _abandon(lab, once, lease=0.05)
    outcome = await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1", wait=10))
    assert (outcome.replayed, outcome.attempt) == (False, 2)
    await tx.rollback()
    assert lab.records("k1") == ["running"], "the takeover is rolled back with the rest"
    await tx.begin()
    await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1", wait=10))
    await tx.commit()
    assert (lab.orders("k1"), lab.records("k1")) == (1, ["done"])


async def test_R27_unknown_raises_and_leaves_the_transaction_usable(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()
    await _abandon(lab, once, lease=0.05, on_unknown="hold")
    with pytest.raises(OutcomeUnknown):
        await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1", wait=10))
    await tx.insert("after")
    await tx.commit()
    assert (lab.orders("k1"), lab.orders("after")) == (0, 1)


@pytest.mark.parametrize("found", [True, False])
async def test_R27_a_probe_decides_inside_the_transaction(few: Lab, found: bool) -> None:
    lab = few
    once, tx = await lab.ready()

    async def probe(key: str) -> Any:
        assert current_run().key == key
        return Found("looked up") if found else NOT_FOUND

    await _abandon(lab, once, lease=0.05, on_unknown=coloured(lab, probe))
    outcome = await wait(
        once.within(tx.target).execute("k1", lab.work(tx), "k1", wait=10, on_unknown=coloured(lab, probe))
    )
    assert (outcome.value, outcome.replayed) == (("looked up", True) if found else ("made", False))
    await tx.commit()
    assert (lab.orders("k1"), lab.records("k1")) == (0 if found else 1, ["done"])
    again = await wait(once.execute("k1", coloured(lab, _nothing)))
    assert again.replayed


async def test_R27_expired_records_run_anew_and_tombstones_are_refused(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()
    bound = once.within(tx.target)
    await wait(bound.execute("k1", lab.work(tx), "k1", retention=0.02))
    await wait(bound.execute("k2", lab.work(tx), "k2", retention=0.02, tombstone=60))
    await tx.commit()
    time.sleep(0.05)  # the server's clock must move: there is no signal for that
    await tx.begin()
    assert not (await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))).replayed
    with pytest.raises(KeyExpired):
        await wait(once.within(tx.target).execute("k2", lab.work(tx), "k2"))
    await tx.commit()
    assert (lab.orders("k1"), lab.orders("k2")) == (2, 1)


async def test_R27_retention_none_keeps_for_ever(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()
    await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1", retention=None))
    await tx.commit()
    record = await wait(once.peek("k1"))
    assert record.expires == math.inf


async def test_R27_current_run_has_key_attempt_ref_and_downstream_key(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()
    seen: dict[str, Any] = {}

    async def body(key: str) -> str:
        run = current_run()
        seen.update(key=run.key, attempt=run.attempt, down=run.downstream_key("bank"))
        run.set_ref("ord_1")
        await tx.insert(key)
        return "made"

    outcome = await wait(
        once.within(tx.target).execute("k1", coloured(lab, body), "k1", labels={"from": "shop"})
    )
    await tx.commit()
    assert outcome.ref == "ord_1"
    assert (seen["key"], seen["attempt"]) == ("k1", 1)
    record = await wait(once.peek("k1"))
    assert (record.ref, record.labels) == ("ord_1", {"from": "shop"})

    async def outside() -> str:
        return current_run().downstream_key("bank")

    await wait(once.forget("k1"))
    assert (await wait(once.execute("k1", coloured(lab, outside)))).value == seen["down"]


async def test_R27_step_and_new_id_raise(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()

    async def steps(key: str) -> None:
        await wait(current_run().step("a", coloured(lab, _nothing)))

    async def ids(key: str) -> None:
        await wait(current_run().new_id("ord"))

    for body in (steps, ids):
        with pytest.raises(ConfigurationError, match="within"):
            await wait(once.within(tx.target).execute("k1", coloured(lab, body), "k1"))
    await tx.insert("after")
    await tx.commit()
    assert (lab.orders("after"), lab.records("k1")) == (1, [])


async def test_R27_step_and_new_id_raise_in_a_plain_function_which_awaits_nothing(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()

    def steps() -> str:
        current_run().step("a", print)
        return "made"

    def ids() -> str:
        return f"made {current_run().new_id('ord')}"

    for body in (steps, ids):
        with pytest.raises(ConfigurationError, match="within"):
            await wait(once.within(tx.target).execute("k1", body))
    await tx.commit()
    assert lab.records("k1") == []


async def test_R27_consume_decorator_and_peek(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()
    bound = once.within(tx.target)
    assert await wait(bound.consume("k1", lab.work(tx), "k1")) is True
    assert await wait(bound.consume("k1", lab.work(tx), "k1")) is False
    assert (await wait(bound.peek("k1"))).state == "done"
    assert await wait(bound.peek("nothing")) is None
    make = bound.once(operation="orders.make", key="key")(lab.work(tx, {"n": 1}))
    assert await wait(make("k2")) == {"n": 1}
    assert (await wait(make.outcome("k2"))).replayed
    await tx.commit()
    assert (lab.orders("k1"), lab.orders("k2")) == (1, 1)


async def test_R27_a_claim_by_hand_is_part_of_the_transaction(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()
    bound = once.within(tx.target)

    async def enter(claim: Any) -> Any:
        return claim.__enter__() if lab.colour == "sync" else await claim.__aenter__()

    async def leave(claim: Any, error: Any = None) -> None:
        kind = None if error is None else type(error)
        await wait(
            claim.__exit__(kind, error, None) if lab.colour == "sync" else claim.__aexit__(kind, error, None)
        )

    claim = await enter(bound.claim("k1"))
    await tx.insert("k1")
    await wait(claim.complete("by hand"))
    await leave(claim)
    again = await enter(bound.claim("k1"))
    assert (again.replayed, again.value) == (True, "by hand")
    await leave(again)
    broken = await enter(bound.claim("k2"))
    await tx.insert("k2")
    await leave(broken, ValueError("no"))
    forgotten = await enter(bound.claim("k3"))
    await tx.insert("k3")
    with pytest.warns(SemelWarning, match="released"):
        await leave(forgotten)
    await tx.commit()
    assert [lab.orders(key) for key in ("k1", "k2", "k3")] == [1, 0, 0]
    assert [lab.records(key) for key in ("k1", "k2", "k3")] == [["done"], [], []]


async def test_R27_claim_fail_is_the_outcome_and_undoes_the_rows(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()
    claim = once.within(tx.target).claim("k1")
    await (wait(claim.__enter__()) if lab.colour == "sync" else claim.__aenter__())
    await tx.insert("k1")
    await wait(claim.fail("card refused"))
    await wait(
        claim.__exit__(None, None, None) if lab.colour == "sync" else claim.__aexit__(None, None, None)
    )
    await tx.commit()
    with pytest.raises(PreviousFailure, match="card refused"):
        await wait(once.execute("k1", coloured(lab, _nothing), wait=10))
    assert lab.orders("k1") == 0


@pytest.mark.parametrize("word, state", [("hold", "unknown"), (Release(after=60), "released")])
async def test_R27_hold_and_delayed_release_are_written_after_the_rollback(
    few: Lab, word: Any, state: str
) -> None:
    lab = few
    once, tx = await lab.ready()
    with pytest.raises(ValueError, match="no"):
        await wait(
            once.within(tx.target).execute("k1", lab.raising(tx, ValueError("no")), "k1", on_error=word)
        )
    await tx.rollback()
    await _recorded(lab, state)
    assert lab.orders("k1") == 0


async def test_R4_what_nobody_has_awaited_is_rolled_back_and_holds_its_key(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()

    async def work() -> Any:
        await tx.insert("k1")
        return Promise()

    with pytest.raises(ConfigurationError, match="returned a Promise that nobody has awaited"):
        await wait(once.within(tx.target).execute("k1", coloured(lab, work), on_error="release"))
    await tx.insert("after")
    await tx.commit()
    await _recorded(lab, "unknown")
    assert (lab.orders("k1"), lab.orders("after")) == (0, 1)
    with pytest.raises(OutcomeUnknown, match="resolve"):
        await wait(once.execute("k1", coloured(lab, _nothing)))


async def _recorded(lab: Lab, state: str) -> None:
    """A failure is written once the caller's transaction has ended."""
    until = time.monotonic() + 30
    while lab.records("k1") != [state]:
        assert time.monotonic() < until
        await (asyncio.sleep(0.01) if lab.colour == "async" else _pause())


async def _pause() -> None:
    time.sleep(0.01)


async def test_R27_results_are_encrypted_and_scopes_namespaced(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready(encrypt={"a": os.urandom(32)}, namespace="shop")
    other = lab.face(namespace="other")
    await wait(once.within(tx.target).execute("k1", lab.work(tx, "very secret"), "k1"))
    await tx.commit()
    (stored,) = lab.execute("SELECT result FROM semel")[0]
    assert b"secret" not in bytes(stored)
    assert (await wait(once.execute("k1", coloured(lab, _nothing)))).value == "very secret"
    assert await wait(other.peek("k1")) is None
    await tx.begin()
    assert (await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))).value == "very secret"
    assert (await wait(once.within(tx.target).peek("k1"))).state == "done"
    await tx.rollback()


@pytest.mark.parametrize(
    "few", [driver for driver in FEW if "django" not in driver], indirect=True
)  # it refuses itself
async def test_R27_a_function_that_commits_is_told_and_its_key_not_run_again(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()

    async def commits(key: str) -> str:
        await tx.insert(key)
        await tx.commit()
        return "made"

    with pytest.raises(ConfigurationError, match="ended the transaction"):
        await wait(once.within(tx.target).execute("k1", coloured(lab, commits), "k1", lease=0.05))
    await tx.rollback()
    assert (lab.orders("k1"), lab.records("k1")) == (1, ["running"])
    with pytest.raises(OutcomeUnknown):
        await wait(once.execute("k1", coloured(lab, _nothing), wait=10))


async def test_R27_a_result_that_cannot_be_stored_is_a_done_marker(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready(max_result=10)
    outcome = await wait(once.within(tx.target).execute("k1", lab.work(tx, "x" * 100), "k1"))
    assert outcome.value == "x" * 100
    await tx.commit()
    again = await wait(once.execute("k1", coloured(lab, _nothing)))
    assert (again.replayed, again.marker) == (True, "too large")
    assert lab.orders("k1") == 1


async def test_R27_two_threads_or_tasks_of_one_face_do_not_coalesce(few: Lab) -> None:
    """Each transaction has its own claim: a follower of another transaction's claim would see what may be rolled back."""
    lab = few
    once, tx = await lab.ready()
    await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))
    started = threading.Event()

    async def duplicate() -> Any:
        other = await lab.tx()
        started.set()
        outcome = await wait(
            once.within(other.target).execute("k1", lab.work(other, "second"), "k1", wait=20)
        )
        await other.commit()
        await lab.done_with(other)
        return outcome

    spawned = lab.spawn(duplicate())
    while not started.is_set():
        await (asyncio.sleep(0.005) if lab.colour == "async" else _pause())
    await tx.rollback()
    assert (await spawned.result()).value == "second"
    assert lab.orders("k1") == 1


async def _abandon(lab: Lab, once: Any, **options: Any) -> None:
    """A leased run whose owner is gone: claimed by a face that is closed before it could settle."""
    from semel.model import Ask

    call = once._call("k1", nothing_to_run, (), options)
    engine = once._engine()
    ask: Ask = engine._ask(call)
    verdict = (await engine.store.claim((ask,)))[0]
    assert type(verdict).__name__ == "Won"
    # Longer than the store says: those of the owner's process count from when they heard of the claim.
    heard = time.monotonic()
    until = heard + 30
    while (await wait(once.peek("k1"))).lease_until > time.time() or time.monotonic() < heard + ask.lease:
        assert time.monotonic() < until
        await (asyncio.sleep(0.01) if lab.colour == "async" else _pause())
