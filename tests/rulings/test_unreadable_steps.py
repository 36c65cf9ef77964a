"""R15: steps that cannot be read here are found out before the function runs, never after its effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from semel import ConfigurationError, Found, OutcomeUnknown, current_run
from semel.flow import done_of
from semel.model import Note, State
from semel.runtime import run_sync

from .conftest import Lab
from .tools import enter

RING = {"2026-a": b"a" * 32}
JUNK = b"\x00\x00\x00\x04junk"


def _stepping(lab: Lab, error: BaseException) -> Callable[..., Any]:
    """A function that makes a step, and fails."""

    def plain() -> None:
        current_run().step("reserve", lambda: 1)
        raise error

    async def coroutine() -> None:
        run: Any = current_run()
        await run.step("reserve", lambda: 1)
        raise error

    return plain if lab.colour == "sync" else coroutine


async def _damage(lab: Lab, once: Any, key: str) -> None:
    """A run whose record holds steps that nobody can read, and that failed."""

    async def work() -> None:
        run = current_run()
        await run._engine.store.note(Note(run.scope, run.ask.nonce, JUNK))
        raise ValueError("later")

    with pytest.raises(ValueError, match="later"):
        await lab.do(once.execute(key, (lambda: run_sync(work())) if lab.colour == "sync" else work))


async def test_R15_sealed_steps_stop_a_program_without_the_keys_before_its_effect(lab: Lab) -> None:
    keyed, once = lab.face(encrypt=RING), lab.face()
    with pytest.raises(ValueError, match="later"):
        await lab.do(keyed.execute("k", _stepping(lab, ValueError("later"))))
    for _ in range(2):
        with pytest.raises(OutcomeUnknown, match=r"cannot be read") as caught:
            await lab.do(once.execute("k", lab.effect()))
        assert caught.value.unreadable
        assert (await lab.do(once.peek("k"))).state is State.RELEASED, "given back"
    with pytest.raises(OutcomeUnknown, match=r"cannot be read"):
        await enter(lab, once.claim("k"))
    assert lab.effects == []
    assert (
        await lab.do(keyed.execute("k", lab.effect("made")))
    ).value == "made"  # whoever has the keys goes on


async def test_R15_a_probe_is_not_asked_about_a_run_whose_steps_cannot_be_read(lab: Lab) -> None:
    keyed, once = lab.face(encrypt=RING, on_unknown="hold"), lab.face()
    with pytest.raises(SystemExit):
        await lab.do(keyed.execute("k", _stepping(lab, SystemExit())))
    asked: list[Any] = []

    def probe() -> Found:
        asked.append(1)
        return Found("looked up")

    with pytest.raises(OutcomeUnknown, match=r"cannot be read") as caught:
        await lab.do(once.execute("k", lab.effect(), on_unknown=lab.fn(probe)))
    assert (caught.value.unreadable, asked, lab.effects) == (True, [], [])
    assert (await lab.do(once.peek("k"))).state is State.UNKNOWN


async def test_R15_damaged_steps_are_repaired_by_a_person(lab: Lab) -> None:
    once = lab.face()
    words: dict[str, dict[str, Any]] = {"value": {"value": "looked up"}, "release": {"release": True}}
    for key, word in words.items():
        await _damage(lab, once, key)
        with pytest.raises(OutcomeUnknown, match=r"resolve\(key, value=….*or forget\(key\)") as caught:
            await lab.do(once.execute(key, lab.effect()))
        assert caught.value.unreadable
        assert lab.effects == []
        await lab.do(once.resolve(key, actor="ann", **word))
    assert (await lab.do(once.execute("value", lab.effect("made")))).value == "looked up"
    assert (await lab.do(once.execute("release", lab.effect("made")))).value == "made"
    assert len(lab.effects) == 1
    await _damage(lab, once, "forgotten")
    assert await lab.do(once.forget("forgotten"))
    assert (await lab.do(once.execute("forgotten", lab.effect("made")))).value == "made"


async def test_R13_a_released_key_whose_steps_can_be_read_is_not_resolved(light_lab: Lab) -> None:
    lab = light_lab
    once = lab.face()
    with pytest.raises(ValueError, match="later"):
        await lab.do(once.execute("k", _stepping(lab, ValueError("later"))))
    with pytest.raises(ConfigurationError, match="it is released"):
        await lab.do(once.resolve("k", value="x", actor="ann"))


async def test_R15_an_effect_is_recorded_although_steps_cannot_be_read(light_lab: Lab) -> None:
    lab = light_lab
    once = lab.face()

    def work() -> str:
        run = current_run()
        run._raw_steps = JUNK  # whatever made them so after the claim
        assert done_of(run, b"", "").steps is None
        return "made"

    assert (await lab.do(once.execute("k", lab.fn(work)))).value == "made"
    assert (await lab.do(once.peek("k"))).state is State.DONE
