"""R17-R20: leases and time; and waiting, which depends on both."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Literal

import pytest

from semel import ConfigurationError, InProgress, KeyExpired, LeaseLost, StoreUnavailable, current_run
from semel.layers import Layer
from semel.stores.memory import MemoryStore

from .conftest import Lab
from .test_failure import _over, _stop_heart
from .tools import lapsed, let_pass, meanwhile, owned, pause, renewed, until


async def test_R17_a_renewed_lease_outlives_itself(lab: Lab) -> None:
    once, other = lab.face(lease=3), lab.face()
    async with owned(lab, once, "k") as claim:
        await renewed(lab, other, "k", times=3)
        with pytest.raises(InProgress):
            await lab.do(other.execute("k", lab.effect()))
        await lab.do(claim.complete("mine"))
    assert (await lab.do(other.execute("k", lab.effect()))).value == "mine"


async def test_R17_an_overtaken_owner_writes_nothing_and_its_caller_is_told(lab: Lab) -> None:
    zombie, successor = lab.face(lease=0.05), lab.face()
    with pytest.raises(LeaseLost):
        async with owned(lab, zombie, "k") as claim:
            _stop_heart(zombie, lab)
            await lapsed(lab, successor, "k")
            outcome = await lab.do(successor.execute("k", lab.effect("second")))
            assert outcome.attempt == 2
            await lab.do(claim.complete("zombie"))
    assert (await lab.do(successor.execute("k", lab.effect()))).value == "second"


def test_R17_a_block_that_goes_on_after_its_cancellation_leaves_no_trace_of_it_in_its_task() -> None:
    from semel import AsyncSemel

    async def main() -> int:
        store = MemoryStore()
        once, thief = AsyncSemel(store, lease=0.2), AsyncSemel(store)
        with pytest.raises(LeaseLost):
            async with once.claim("k") as claim:
                await _steal(store, thief, "k")
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.sleep(30)
                await claim.complete("too late")
        await once.aclose()
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert asyncio.run(main()) == 0


def test_R17_a_lost_lease_cancels_the_coroutine_unless_told_to_warn(tmp_path: Any) -> None:
    from semel import AsyncSemel

    async def main() -> None:
        store = MemoryStore()
        once, thief = AsyncSemel(store, lease=0.2), AsyncSemel(store)
        flags: list[bool] = []

        async def work(patient: bool) -> str:
            run = current_run()
            await _steal(store, thief, run.key)
            try:
                if patient:
                    await until(Lab("async", ""), lambda: run.lease_lost)
                else:
                    await asyncio.sleep(30)
            finally:
                flags.append(run.lease_lost)
            return "too late"

        modes: list[tuple[str, bool, Literal["cancel", "warn"]]] = [
            ("c", False, "cancel"),
            ("w", True, "warn"),
        ]
        for key, patient, mode in modes:
            with pytest.raises(LeaseLost):
                await once.execute(key, work, patient, on_lease_lost=mode)
        assert flags == [True, True]
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]  # inside of a task
        await once.aclose()

    asyncio.run(main())


def test_R17_a_lost_lease_cancels_the_coroutine_that_a_plain_function_gave() -> None:
    from semel import AsyncSemel

    async def main() -> None:
        store = MemoryStore()
        once, thief = AsyncSemel(store, lease=0.2), AsyncSemel(store)
        lab, loop, ended = Lab("async", ""), asyncio.get_running_loop(), list[str]()

        async def work(stolen_before: bool) -> str:
            run = current_run()
            if not stolen_before:
                await _steal(store, thief, run.key)
            try:
                await asyncio.sleep(30)
            finally:
                ended.append(run.key)
            return "too late"

        def slow() -> Any:
            """Its lease is lost while it is still in its thread."""
            run = current_run()
            asyncio.run_coroutine_threadsafe(_steal(store, thief, run.key), loop).result()
            asyncio.run_coroutine_threadsafe(until(lab, lambda: run.lease_lost), loop).result()
            return work(True)

        with pytest.raises(LeaseLost):
            await once.execute("given", lambda: work(False))
        with pytest.raises(LeaseLost):
            await once.execute("given late", slow)
        assert ended == ["given", "given late"]
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]  # inside of a task
        await once.aclose()

    asyncio.run(main())


async def _steal(store: MemoryStore, thief: Any, key: str) -> None:
    """Let the lease lapse in the store's eyes and take the key over."""
    import msgspec

    for hashed, record in list(store._records.items()):
        if record.scope is not None and record.scope.key == key:
            store._records[hashed] = msgspec.structs.replace(record, lease_until=0.0)

    async def stolen() -> str:
        return "stolen"

    await thief.execute(key, stolen)


async def test_R17_a_renewal_without_an_answer_is_a_risk_not_a_loss(light_lab: Lab) -> None:
    class Silent(Layer):
        silent = True

        async def renew(self, renewals: Any) -> Any:
            if self.silent:
                raise StoreUnavailable("no answer")
            return await self.inner.renew(renewals)

    events: list[Any] = []
    store = Silent(MemoryStore())
    once = _over(light_lab, store, lease=0.3, hooks=[events.append])
    async with owned(light_lab, once, "k") as claim:
        await until(light_lab, lambda: claim.run.lease_at_risk)
        assert not claim.run.lease_lost
        store.silent = False
        await until(light_lab, lambda: not claim.run.lease_at_risk)
        await light_lab.do(claim.complete("kept"))
    assert "AtRisk" in [type(event).__name__ for event in events]


async def test_R17_an_owner_whose_lease_lapsed_but_whom_nobody_overtook_may_settle(lab: Lab) -> None:
    once = lab.face(lease=0.05)
    async with owned(lab, once, "k") as claim:
        _stop_heart(once, lab)
        await lapsed(lab, once, "k")
        await lab.do(claim.complete("still mine"))
    assert (await lab.do(lab.face().execute("k", lab.effect()))).value == "still mine"


async def test_R17_a_record_that_vanished_is_claimed_again_and_settled(light_lab: Lab) -> None:
    store = MemoryStore()
    once = _over(light_lab, store)
    async with owned(light_lab, once, "k") as claim:
        store._records.clear()  # a failover that lost the claim
        await light_lab.do(claim.complete("kept"))
    assert (await light_lab.do(once.execute("k", light_lab.effect()))).value == "kept"


@pytest.mark.parametrize("in_a_step", [True, False])
def test_R17_who_was_told_that_he_lost_the_key_does_not_claim_it_again_when_it_vanished(
    in_a_step: bool,
) -> None:
    from semel import AsyncSemel

    async def main() -> None:
        store = MemoryStore()
        async with AsyncSemel(store, lease=0.2) as once, AsyncSemel(store) as thief:

            async def late() -> str:
                run = current_run()
                await _steal(store, thief, run.key)
                await until(Lab("async", ""), lambda: run.lease_lost)
                assert await thief.forget("k")
                return "too late"

            async def work() -> str:
                return await current_run().step("charge", late) if in_a_step else await late()

            with pytest.raises(LeaseLost):
                await once.execute("k", work, on_lease_lost="warn")
            assert await thief.peek("k") is None  # as whoever forgot it left it

    asyncio.run(main())


async def test_R18_retention_counts_from_the_settle(lab: Lab) -> None:
    once = lab.face(retention=100)

    def slow() -> str:
        let_pass(once, 150)
        return "slow"

    assert (await lab.do(once.execute("k", lab.fn(slow)))).value == "slow"
    assert (await lab.do(once.execute("k", lab.effect()))).replayed
    let_pass(once, 150)
    assert (await lab.do(once.execute("k", lab.effect("again")))).value == "again"


async def test_R18_retention_none_keeps_for_ever(lab: Lab) -> None:
    once = lab.face()
    await lab.do(once.execute("k", lab.effect(), retention=None))
    assert (await lab.do(once.peek("k"))).expires == math.inf
    assert (await lab.do(once.purge())) >= 0
    assert (await lab.do(once.execute("k", lab.effect()))).replayed


async def test_R19_a_tombstone_knows_the_key_as_used(lab: Lab) -> None:
    once = lab.face(retention=0.05, tombstone=60)
    await lab.do(once.execute("k", lab.effect()))
    await pause(lab, 0.1)
    with pytest.raises(KeyExpired):
        await lab.do(once.execute("k", lab.effect()))
    await lab.do(once.purge())
    record = await lab.do(once.peek("k"))
    assert (record.state, record.result) == ("expired", b"")
    with pytest.raises(KeyExpired):
        await lab.do(once.execute("k", lab.effect()))
    assert await lab.do(once.forget("k"))
    assert (await lab.do(once.execute("k", lab.effect("new")))).value == "new"


async def test_R20_a_lease_of_50_ms_is_legal_and_a_shorter_one_is_refused(light_lab: Lab) -> None:
    light_lab.face(lease=0.05)
    for wrong in (0.049, 0, -1, math.inf, math.nan, "10", True):
        with pytest.raises(ConfigurationError, match="lease"):
            light_lab.face(lease=wrong)


async def test_a_waiter_is_woken_by_the_settle(lab: Lab) -> None:
    once, other = lab.face(), lab.face()
    async with owned(lab, once, "k") as claim:
        waiting = meanwhile(lab, 0, lambda: other.execute("k", lab.effect(), wait=20))
        await pause(lab, 0.3)
        await lab.do(claim.complete("woken"))
    outcome = await waiting()
    assert (outcome.value, outcome.replayed, lab.effects) == ("woken", True, [])


async def test_a_waiter_takes_over_when_the_owner_fails(lab: Lab) -> None:
    once, other = lab.face(), lab.face()
    with pytest.raises(OSError, match="gone"):
        async with owned(lab, once, "k"):
            waiting = meanwhile(lab, 0, lambda: other.execute("k", lab.effect("second"), wait=20))
            await pause(lab, 0.2)
            raise OSError("gone")
    outcome = await waiting()
    assert (outcome.value, outcome.replayed) == ("second", False)


async def test_a_waiter_takes_over_when_the_owner_dies(lab: Lab) -> None:
    dead, other = lab.face(lease=0.3), lab.face()
    claim = dead.claim("k")
    await lab.do(claim.__enter__() if lab.colour == "sync" else claim.__aenter__())
    _stop_heart(dead, lab)
    outcome = await lab.do(other.execute("k", lab.effect("second"), wait=20))
    assert (outcome.value, outcome.attempt) == ("second", 2)


async def test_the_number_of_waiters_is_bounded(light_lab: Lab) -> None:
    once = light_lab.face()
    async with owned(light_lab, once, "k") as claim:
        first = meanwhile(light_lab, 0, lambda: once.execute("k", light_lab.effect(), wait=20, max_waiters=1))
        await until(light_lab, lambda: bool(once._engine().bench._waiting))
        with pytest.raises(InProgress, match="max_waiters"):
            await light_lab.do(once.execute("k", light_lab.effect(), wait=20, max_waiters=1))
        await light_lab.do(claim.complete("x"))
    assert (await first()).value == "x"
    assert once._engine().bench._waiting == {}
