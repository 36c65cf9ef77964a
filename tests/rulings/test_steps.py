"""Corners of steps and ids: whose probe is asked, a step inside of itself, names, and results that were not kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from semel import (
    NOT_FOUND,
    CodecError,
    ConfigurationError,
    Found,
    InvalidKey,
    OutcomeUnknown,
    current_run,
)

from .conftest import Lab
from .tools import owned


def _stepping(lab: Lab, name: str, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function that makes one step, in the lab's colour."""

    def plain() -> Any:
        return current_run().step(name, fn, **options)

    async def coroutine() -> Any:
        run: Any = current_run()
        return await run.step(name, fn, **options)

    return plain if lab.colour == "sync" else coroutine


async def test_R26_the_probe_of_a_call_is_not_asked_about_its_steps(lab: Lab) -> None:
    asked: list[Any] = []

    def parcel_was_sent() -> object:
        asked.append(1)
        return NOT_FOUND  # no parcel: what does that say about the charge?

    once = lab.face(on_unknown=lab.fn(parcel_was_sent))
    with pytest.raises(SystemExit):
        await lab.do(once.execute("k", _stepping(lab, "charge", lab.raising(SystemExit()))))
    lab.effects.clear()
    for times in (1, 2):
        with pytest.raises(OutcomeUnknown, match=r"step 'charge'.*resolve\(key, release=True\)"):
            await lab.do(once.execute("k", _stepping(lab, "charge", lab.effect("again"))))
        assert len(asked) == times
    assert lab.effects == []
    await lab.do(once.resolve("k", release=True, actor="ann"))
    assert (await lab.do(once.execute("k", _stepping(lab, "charge", lab.effect("paid"))))).value == "paid"


async def test_R26_a_steps_own_probe_is_asked_whatever_its_call_has(light_lab: Lab) -> None:
    lab = light_lab
    once = lab.face(on_unknown=lab.fn(lambda: NOT_FOUND))
    own = lab.fn(lambda: Found("found at the bank"))
    with pytest.raises(SystemExit):
        await lab.do(once.execute("k", _stepping(lab, "charge", lab.raising(SystemExit()), on_unknown=own)))
    outcome = await lab.do(once.execute("k", _stepping(lab, "charge", lab.effect(), on_unknown=own)))
    assert outcome.value == "found at the bank"


@pytest.mark.timeout(20)
async def test_R26_a_step_inside_of_itself_is_refused_instead_of_waiting_for_ever(light_lab: Lab) -> None:
    lab = light_lab
    once = lab.face()
    inner = _stepping(lab, "charge", lab.effect())
    for nested in (inner, _stepping(lab, "between", inner)):
        with pytest.raises(ConfigurationError, match=r"'charge'.*inside of itself.*another name"):
            await lab.do(once.execute("k", _stepping(lab, "charge", nested)))
    assert lab.effects == []
    # Another name, and the same name of another run, are not the step itself.
    elsewhere = _stepping(lab, "charge", lab.effect("other"))

    def plain() -> Any:
        return once.execute("other", elsewhere).value

    async def coroutine() -> Any:
        return (await once.execute("other", elsewhere)).value

    outer = _stepping(lab, "charge", plain if lab.colour == "sync" else coroutine)
    assert (await lab.do(once.execute("k", outer))).value == "other"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("colour", ["async"])
async def test_R26_a_step_inside_of_itself_is_refused_in_threads_too(light_lab: Lab) -> None:
    once = light_lab.face()

    def nested() -> Any:
        return current_run().step("charge", lambda: current_run().step("charge", int))

    with pytest.raises(ConfigurationError, match="inside of itself"):
        await once.execute("k", nested)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("colour", ["async"])
async def test_R26_a_task_that_outlives_its_step_may_use_the_name(light_lab: Lab) -> None:
    once = light_lab.face()

    async def work() -> Any:
        run: Any = current_run()
        over = asyncio.Event()

        async def later() -> Any:
            await over.wait()
            return await run.step("charge", light_lab.effect("again"))

        async def charge() -> str:
            tasks.append(asyncio.create_task(later()))
            return "paid"

        tasks: list[asyncio.Task[Any]] = []
        assert await run.step("charge", charge) == "paid"
        over.set()
        return await tasks[0]

    assert (await once.execute("k", work)).value == "paid"


@pytest.mark.parametrize(
    "name",
    ["", "half \ud800 a pair", "x" * 256, "two\nlines"],
    ids=["empty", "surrogate", "long", "control character"],
)
async def test_R25_the_name_of_an_id_is_checked_as_keys_are(light_lab: Lab, name: str) -> None:
    once = light_lab.face()
    async with owned(light_lab, once, "k") as claim:
        with pytest.raises(InvalidKey):
            await light_lab.do(claim.run.new_id("ord", name=name))
        first = await light_lab.do(claim.run.new_id("ord", name="first"))
        assert await light_lab.do(claim.run.new_id("ord", name="first")) == first
        assert await light_lab.do(claim.run.new_id("ord")) != first
        await light_lab.do(claim.complete(None))


@pytest.mark.parametrize(
    ("value", "why"),
    [("x" * (1 << 20), "too large: .* 1048576 bytes"), (object(), "cannot be encoded")],
    ids=["large", "unencodable"],
)
async def test_R26_a_step_whose_result_was_not_kept_says_why_and_what_to_do(
    lab: Lab, value: Any, why: str
) -> None:
    once = lab.face()
    with pytest.raises((ConfigurationError, CodecError)):
        await lab.do(once.execute("k", _stepping(lab, "export", lab.effect(value))))
    for _ in range(2):
        with pytest.raises(
            CodecError, match=f"is done and is not made again.*{why}.*look the result up.*ref"
        ):
            await lab.do(once.execute("k", _stepping(lab, "export", lab.effect("small"))))
    assert len(lab.effects) == 1
