"""Steps and a release that comes late: what is finished is never made again, what was only started may be (R14, R26)."""

from __future__ import annotations

from typing import Any

import pytest

from semel import NOT_FOUND, ConfigurationError, OutcomeUnknown, Release, current_run
from semel.steps import decode

from .conftest import Lab
from .tools import let_pass, owned

RETENTION, LATE = 60, 200
RING = {"2026-a": b"a" * 32}


class Away(ConnectionError):
    """The next service does not answer."""


async def _charge_and_fail(lab: Lab, once: Any, later: float = 0.0, **options: Any) -> None:
    """A run that makes a step, and fails some time after it."""
    with pytest.raises(Away):
        async with owned(lab, once, "k", **options) as claim:
            assert await lab.do(claim.run.step("charge", lab.effect("paid"), on_unknown="retry")) == "paid"
            let_pass(once, later)
            raise Away


async def _goes_on(lab: Lab, once: Any, **options: Any) -> None:
    """The next attempt finds the step made."""
    async with owned(lab, once, "k", **options) as claim:
        assert claim.run.attempt == 2
        assert await lab.do(claim.run.step("charge", lab.effect("twice"), on_unknown="retry")) == "paid"
        await lab.do(claim.complete("sent"))
    assert len(lab.effects) == 1


async def test_R26_a_run_that_fails_long_after_its_last_step_keeps_it(lab: Lab) -> None:
    once = lab.face(lease=10 * LATE, retention=RETENTION)
    await _charge_and_fail(lab, once, LATE)
    let_pass(once, RETENTION - 10)
    await _goes_on(lab, once)


async def test_R14_that_late_it_is_kept_for_one_retention_from_the_release(lab: Lab) -> None:
    once = lab.face(lease=10 * LATE, retention=RETENTION)
    await _charge_and_fail(lab, once, LATE)
    record = await lab.do(once.peek("k"))
    assert record.expires == pytest.approx(record.settled + RETENTION, abs=0.01)
    let_pass(once, RETENTION + 1)
    assert await lab.do(once.peek("k")) is None


async def test_R26_a_delay_beyond_retention_does_not_forget_the_steps(lab: Lab) -> None:
    once = lab.face(lease=10 * LATE, retention=RETENTION)
    await _charge_and_fail(lab, once, on_error=Release(after=LATE))
    let_pass(once, LATE + 1)
    await _goes_on(lab, once)


async def test_R26_steps_survive_a_person_who_releases_late(lab: Lab) -> None:
    once = lab.face(retention=RETENTION, on_unknown="hold")
    await _charge_and_fail(lab, once)
    let_pass(once, LATE)
    await lab.do(once.resolve("k", release=True, actor="ann", reason="monday morning"))
    await _goes_on(lab, once)


async def test_R26_steps_survive_a_probe_that_releases_late(lab: Lab) -> None:
    probe = lab.fn(lambda *_: NOT_FOUND)
    once = lab.face(retention=RETENTION, on_unknown=probe, operation="pay")
    await _charge_and_fail(lab, once)
    let_pass(once, LATE)
    once.recovery("pay", probe=probe, tenant=lab.tenant)
    assert (await lab.do(once.reconcile())).settled == 1
    assert (await lab.do(once.peek("k"))).state == "released"
    await _goes_on(lab, once)


async def _interrupted(lab: Lab, once: Any, **options: Any) -> None:
    """A run that is lost in its second step, which is held."""
    with pytest.raises(SystemExit):
        async with owned(lab, once, "k", **options) as claim:
            await lab.do(claim.run.step("reserve", lab.effect("reserved"), on_unknown="retry"))
            await lab.do(claim.run.step("charge", lab.raising(SystemExit()), on_unknown="hold"))


async def _place(lab: Lab, once: Any, **options: Any) -> Any:
    def plain() -> Any:
        run = current_run()
        first = run.step("reserve", lab.effect("reserved again"), on_unknown="retry")
        return first, run.step("charge", lab.effect("charged"), on_unknown="hold")

    async def coroutine() -> Any:
        run: Any = current_run()
        first = await run.step("reserve", lab.effect("reserved again"), on_unknown="retry")
        return first, await run.step("charge", lab.effect("charged"), on_unknown="hold")

    return await lab.do(once.execute("k", plain if lab.colour == "sync" else coroutine, **options))


@pytest.mark.parametrize("more", [{}, {"encrypt": RING}], ids=["plain", "sealed"])
@pytest.mark.parametrize("policy", ["hold", "retry"])
async def test_R26_a_held_step_is_made_when_a_person_has_released_it(
    lab: Lab, policy: str, more: dict[str, Any]
) -> None:
    once = lab.face(on_unknown=policy, **more)
    await _interrupted(lab, once)
    with pytest.raises(OutcomeUnknown, match="resolve") as told:
        await _place(lab, once)
    if policy == "retry":
        assert r"resolve(key, release=True)" in str(told.value)
    lab.effects.clear()
    await lab.do(once.resolve("k", release=True, actor="ann", reason="the bank has no charge"))
    assert set(decode((await lab.do(once.peek("k"))).steps)) == {"reserve"}
    outcome = await _place(lab, once)
    assert outcome.value == ("reserved", "charged")
    assert len(lab.effects) == 1  # of the charge only


async def test_R26_a_step_that_its_late_owner_finishes_meanwhile_is_not_lost(lab: Lab) -> None:
    once = lab.face(on_unknown="hold", lease=60)
    async with owned(lab, once, "k") as claim:
        with pytest.raises(Away):
            await lab.do(claim.run.step("charge", lab.raising(Away())))
        let_pass(once, 100)  # the lease is over: it reads as unknown
        store = once._engine().store
        real = store.settle

        async def settle(ends: Any) -> Any:
            store.settle = real
            await lab.do(claim.run.step("ship", lab.effect("sent")))
            return await real(ends)

        store.settle = settle
        with pytest.raises(ConfigurationError, match="in the meantime"):
            await lab.do(once.resolve("k", release=True, actor="ann"))
        assert set(decode((await lab.do(once.peek("k"))).steps)) == {"charge", "ship"}
        await lab.do(claim.complete("done"))
