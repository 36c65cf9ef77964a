"""R11: what a probe found is the outcome, whatever became of the record meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from semel import Found, InProgress, StoreUnavailable, current_run
from semel.layers import Layer
from semel.model import State
from semel.store import Unwatch
from semel.stores.memory import MemoryStore

from .conftest import Lab
from .test_failure import _stop_heart
from .tools import enter, let_pass, until


async def _abandoned(lab: Lab, dead: Any, once: Any, key: str) -> None:
    """A run under retry whose owner is gone; its record lives on for a retention."""
    await enter(lab, dead.claim(key, lease=10, retention=60))
    _stop_heart(dead, lab)
    let_pass(once, 11)


async def test_R11_what_was_found_is_kept_although_the_record_ended_meanwhile(lab: Lab) -> None:
    dead, once = lab.face(), lab.face()
    await _abandoned(lab, dead, once, "k")

    def probe() -> Found:
        let_pass(once, 100)
        return Found(42, ref="ch_1")

    outcome = await lab.do(once.execute("k", lab.effect(), on_unknown=lab.fn(probe)))
    assert (outcome.value, outcome.ref, outcome.replayed) == (42, "ch_1", True)
    assert lab.effects == []
    record = await lab.do(once.peek("k"))
    assert (record.state, record.ref) == (State.DONE, "ch_1")
    assert (await lab.do(once.execute("k", lab.effect()))).value == 42


async def test_R11_a_claim_by_hand_keeps_what_was_found_too(light_lab: Lab) -> None:
    lab = light_lab
    dead, once = lab.face(), lab.face()
    await _abandoned(lab, dead, once, "k")

    def probe() -> Found:
        let_pass(once, 100)
        return Found(42)

    claim = await enter(lab, once.claim("k", on_unknown=lab.fn(probe)))
    assert (claim.won, claim.replayed, claim.value) == (False, True, 42)


async def test_R11_what_was_found_is_kept_when_another_one_freed_the_key_meanwhile(lab: Lab) -> None:
    dead, once, other = lab.face(), lab.face(), lab.face()
    await _abandoned(lab, dead, once, "k")

    def freed() -> Any:
        return other.execute("k", lab.raising(InProgress("no", retry_after=0)), lease=10)

    def plain() -> Found:
        let_pass(other, 11)
        with pytest.raises(InProgress):
            freed()
        return Found(42)

    async def coroutine() -> Found:
        let_pass(other, 11)
        assert current_run().key == "k"
        with pytest.raises(InProgress):
            await freed()
        return Found(42)

    probe = plain if lab.colour == "sync" else coroutine
    outcome = await lab.do(once.execute("k", lab.effect(), on_unknown=probe))
    assert (outcome.value, outcome.replayed) == (42, True)
    assert len(lab.effects) == 1, "the other one's"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("is_gone", [True, False], ids=["the record is gone", "the record is there"])
async def test_R11_what_was_found_is_told_although_nothing_is_kept_of_it(lab: Lab, is_gone: bool) -> None:
    dead, once = lab.face(), lab.face()
    await _abandoned(lab, dead, once, "k")
    asked: list[int] = []

    def probe() -> Found:
        asked.append(1)
        if is_gone:
            let_pass(once, 100)
        return Found(42, ref="ch_1")

    outcome = await lab.do(once.execute("k", lab.effect(), on_unknown=lab.fn(probe), retention=0))
    assert (outcome.value, outcome.ref, outcome.replayed) == (42, "ch_1", True)
    assert (lab.effects, asked) == ([], [1])


async def test_R11_what_was_found_and_is_not_recorded_yet_is_not_freed_by_its_caller(light_lab: Lab) -> None:
    lab = light_lab
    inner = MemoryStore()
    away: list[int] = []

    class Flaky(Layer):
        async def settle(self, ends: Sequence[Any]) -> Any:
            if away:
                raise StoreUnavailable("away")
            return await super().settle(ends)

        async def watch(self, scope: Any, wake: Any) -> Unwatch:
            unwatch = await super().watch(scope, wake)

            async def leave() -> None:
                await unwatch()
                raise StoreUnavailable("away")

            return leave

    kind = type(lab.face())
    dead, once = kind(inner), kind(Flaky(inner), settle_timeout=0)
    await enter(lab, dead.claim("k", lease=2))
    _stop_heart(dead, lab)

    def probe() -> Found:
        inner._records.clear()
        return Found(42)

    real = inner.claim

    async def claim(asks: Sequence[Any]) -> Any:
        verdicts = await real(asks)
        if not inner._records or all(record.attempts == 1 for record in inner._records.values()):
            away.extend([1] * (type(verdicts[0]).__name__ == "Won"))
        return verdicts

    inner.claim = claim  # type: ignore[method-assign]  # the store is away from the moment of the grant on
    with pytest.raises(StoreUnavailable):
        await lab.do(once.execute("k", lab.effect(), on_unknown=lab.fn(probe), wait=30))
    away.clear()

    async def is_done() -> bool:
        record = await lab.do(once.peek("k"))
        return record is not None and record.state is State.DONE

    await until(lab, is_done)
    assert (await lab.do(once.execute("k", lab.effect()))).value == 42
    assert lab.effects == []
    for face in (dead, once):
        await lab.do(face.close())
