"""What an operator sees and what runs beside the calls: events of every kind of call, the regular purge, the end of a face."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from semel import (
    AsyncSemel,
    CodecError,
    Found,
    InProgress,
    KeyExpired,
    KeyMismatch,
    LeaseLost,
    OutcomeUnknown,
    StoreUnavailable,
)
from semel.hooks import Contended, Executed, Failed, HookEvent, Refused, Replayed, TakenOver
from semel.layers import Layer
from semel.model import Busy
from semel.stores.memory import MemoryStore

from .conftest import Lab
from .test_failure import _died, _over, _stop_heart
from .tools import meanwhile, owned, pause, until


async def test_each_way_a_call_can_end_is_an_event(light_lab: Lab) -> None:
    lab, heard = light_lab, list[Any]()
    once = lab.face(hooks=[heard.append], retention=60, tombstone=60)
    await lab.do(once.execute("done", lab.effect(), request=1))
    await lab.do(once.execute("done", lab.effect(), request=1))
    with pytest.raises(KeyMismatch):
        await lab.do(once.execute("done", lab.effect(), request=2))
    with pytest.raises(OSError, match="away"):
        await lab.do(once.execute("failed", lab.raising(OSError("away"))))
    async with owned(lab, once, "busy") as claim:
        with pytest.raises(InProgress):
            await lab.do(once.execute("busy", lab.effect()))
        await lab.do(claim.complete(1))
    await lab.do(once.execute("short", lab.effect(), retention=0.01))
    await pause(lab, 0.02)
    with pytest.raises(KeyExpired):
        await lab.do(once.execute("short", lab.effect()))
    calls = [event for event in heard if isinstance(event, HookEvent)]
    assert [(type(event), event.scope.key) for event in calls] == [
        (Executed, "done"),
        (Replayed, "done"),
        (Refused, "done"),
        (Failed, "failed"),
        (Contended, "busy"),
        (Executed, "busy"),
        (Executed, "short"),
        (Refused, "short"),
    ]
    assert [event.reason for event in calls if isinstance(event, Refused)] == ["mismatch", "expired"]
    (failed,) = (event for event in calls if isinstance(event, Failed))
    assert (failed.decision, str(failed.error)) == ("release", "away")


async def test_a_takeover_and_a_lost_outcome_are_events(light_lab: Lab) -> None:
    lab, heard = light_lab, list[Any]()
    await _died(lab, "lost")
    await _died(lab, "held", on_unknown="hold")
    once = lab.face(hooks=[heard.append])
    await lab.do(once.execute("lost", lab.effect()))
    with pytest.raises(OutcomeUnknown):
        await lab.do(once.execute("held", lab.effect()))
    (taken,) = (event for event in heard if isinstance(event, TakenOver))
    assert (taken.scope.key, taken.attempt) == ("lost", 2)
    (refused,) = (event for event in heard if isinstance(event, Refused))
    assert (refused.scope.key, refused.reason) == ("held", "unknown")


async def test_R18_a_face_may_purge_regularly_until_it_is_closed(light_lab: Lab) -> None:
    lab, store = light_lab, MemoryStore()
    once = _over(lab, store, purge_every=0.02)
    await lab.do(once.execute("old", lab.effect(), retention=0.01))
    await until(lab, lambda: not store._records)
    await lab.do(once.close())
    later = _over(lab, store)
    await lab.do(later.execute("old", lab.effect(), retention=0.01))
    await pause(lab, 0.1)  # five times the period: nobody purges any more
    assert store._records


class Failing(Layer):
    """A store that answers one item with an error, as a batch does for an item that fails alone."""

    claims = 0
    settles = 0

    async def claim(self, asks: Any) -> Any:
        answers = await self.inner.claim(asks)
        self.claims -= 1
        return [StoreUnavailable("this one failed") for _ in asks] if self.claims >= 0 else answers

    async def settle(self, ends: Any) -> Any:
        self.settles -= 1
        return (
            [StoreUnavailable("this one failed") for _ in ends]
            if self.settles >= 0
            else await self.inner.settle(ends)
        )


async def test_R16_a_claim_that_failed_in_its_batch_is_released_in_the_background(light_lab: Lab) -> None:
    memory = MemoryStore()
    store = Failing(memory)
    once = _over(light_lab, store, lease=30, timeout=0.05, coalesce=False)
    store.claims = 1000
    with pytest.raises(StoreUnavailable, match="this one failed"):
        await light_lab.do(once.execute("k", light_lab.effect()))
    store.claims = 0
    await until(light_lab, lambda: all(record.state == "released" for record in memory._records.values()))
    assert (await light_lab.do(once.execute("k", light_lab.effect()))).value == "done"


async def test_R11_what_a_probe_found_and_cannot_be_stored_is_told(light_lab: Lab) -> None:
    lab, memory = light_lab, MemoryStore()
    store = Failing(memory)
    dead, once = _over(lab, store, lease=0.05), _over(lab, store, timeout=0.05)
    await lab.do(_vanish(lab, dead, on_unknown="hold"))
    await pause(lab, 0.1)
    with pytest.raises(CodecError):
        await lab.do(once.execute("k", lab.effect(), on_unknown=lab.fn(lambda: Found(object()))))
    store.settles = 1000
    with pytest.raises(StoreUnavailable, match="this one failed"):
        await lab.do(once.execute("k", lab.effect(), on_unknown=lab.fn(lambda: Found(7))))
    store.settles = 0
    outcome = await lab.do(once.execute("k", lab.effect(), on_unknown=lab.fn(lambda: Found(7))))
    assert (outcome.value, outcome.replayed, lab.effects) == (7, True, [])


async def test_R16_a_failure_that_cannot_be_recorded_reaches_its_caller_with_a_note(light_lab: Lab) -> None:
    store = Failing(MemoryStore())
    once = _over(light_lab, store, settle_timeout=0.05, timeout=0.05)
    store.settles = 1000
    with pytest.raises(OSError, match="away") as caught:
        await light_lab.do(once.execute("k", light_lab.raising(OSError("away"))))
    assert "semel: " in "".join(caught.value.__notes__)
    store.settles = 0


class Clinging(Layer):
    """Lets no watcher go that has got its answer."""

    answered = False

    async def claim(self, asks: Any) -> Any:
        verdicts = await self.inner.claim(asks)
        self.answered = not isinstance(verdicts[0], Busy)
        return verdicts

    async def watch(self, scope: Any, wake: Any) -> Any:
        leave = await self.inner.watch(scope, wake)

        async def unwatch() -> None:
            await leave()
            if self.answered:
                raise StoreUnavailable("it does not let go")

        return unwatch


async def test_a_waiter_that_cannot_leave_gives_back_what_it_won(light_lab: Lab) -> None:
    lab, memory = light_lab, MemoryStore()
    once, other = _over(lab, memory), _over(lab, Clinging(memory), lease=30)
    with pytest.raises(OSError, match="gone"):
        async with owned(lab, once, "k"):
            waiting = meanwhile(lab, 0, lambda: other.execute("k", lab.effect(), wait=20))
            await until(lab, lambda: bool(other._engine().bench._waiting))
            raise OSError("gone")
    with pytest.raises(StoreUnavailable, match="let go"):
        await waiting()
    assert lab.effects == []
    outcome = await lab.do(once.execute("k", lab.effect(), wait=10))
    assert (outcome.value, outcome.replayed) == ("done", False)


async def test_a_waiter_that_cannot_leave_takes_nothing_from_a_key_that_is_done(light_lab: Lab) -> None:
    lab, memory = light_lab, MemoryStore()
    once, other = _over(lab, memory), _over(lab, Clinging(memory))
    async with owned(lab, once, "k") as claim:
        waiting = meanwhile(lab, 0, lambda: other.execute("k", lab.effect(), wait=20))
        await until(lab, lambda: bool(other._engine().bench._waiting))
        await lab.do(claim.complete("kept"))
    with pytest.raises(StoreUnavailable, match="let go"):
        await waiting()
    assert (await lab.do(once.execute("k", lab.effect()))).value == "kept"


@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_R17_a_function_that_swallows_its_cancellation_is_told_all_the_same(ends: str) -> None:
    async def main() -> None:
        store = MemoryStore()
        async with AsyncSemel(store, lease=0.1) as once, AsyncSemel(store) as thief:

            async def work() -> str:
                await _steal(store, thief)
                try:
                    await asyncio.sleep(30)
                except asyncio.CancelledError:
                    if ends == "raises":
                        raise OSError("away") from None
                    await asyncio.sleep(0)  # it tidies up first
                return "too late"

            with pytest.raises((LeaseLost, OSError)) as caught:
                await once.execute("k", work)
            assert isinstance(caught.value, OSError if ends == "raises" else LeaseLost)
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0  # our own cancellation is taken back: the caller's task lives on
            assert (await once.execute("k", work)).value == "stolen"

    asyncio.run(main())


async def _steal(store: MemoryStore, thief: AsyncSemel) -> None:
    for hashed, record in list(store._records.items()):
        store._records[hashed] = msgspec.structs.replace(record, lease_until=0.0)

    async def stolen() -> str:
        return "stolen"

    await thief.execute("k", stolen)


async def _vanish(lab: Lab, once: Any, **options: Any) -> None:
    """An owner that claimed and is gone."""
    claim = once.claim("k", **options)
    await lab.do(claim.__enter__() if lab.colour == "sync" else claim.__aenter__())
    _stop_heart(once, lab)
