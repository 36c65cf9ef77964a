"""R11: what a probe found is the outcome, whatever became of the record meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from semel import Found, InProgress, current_run
from semel.model import State

from .conftest import Lab
from .test_failure import _stop_heart
from .tools import enter, let_pass


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
