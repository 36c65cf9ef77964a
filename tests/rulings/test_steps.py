"""Corners of steps and ids: whose probe is asked, a step inside of itself, names, and results that were not kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from semel import (
    NOT_FOUND,
    UNDECIDED,
    CodecError,
    ConfigurationError,
    Found,
    InvalidKey,
    OutcomeUnknown,
    current_run,
)
from semel.runtime import run_sync

from .conftest import Lab
from .tools import meanwhile, owned, stepping, until


async def test_R26_the_probe_of_a_call_is_not_asked_about_its_steps(lab: Lab) -> None:
    asked: list[Any] = []

    def parcel_was_sent() -> object:
        asked.append(1)
        return NOT_FOUND  # no parcel: what does that say about the charge?

    once = lab.face(on_unknown=lab.fn(parcel_was_sent))
    with pytest.raises(SystemExit):
        await lab.do(once.execute("k", stepping(lab, "charge", lab.raising(SystemExit()))))
    lab.effects.clear()
    for times in (1, 2):
        with pytest.raises(OutcomeUnknown, match=r"step 'charge'.*resolve\(key, release=True\)"):
            await lab.do(once.execute("k", stepping(lab, "charge", lab.effect("again"))))
        assert len(asked) == times
    assert lab.effects == []
    await lab.do(once.resolve("k", release=True, actor="ann"))
    assert (await lab.do(once.execute("k", stepping(lab, "charge", lab.effect("paid"))))).value == "paid"


async def test_R9_a_run_that_a_person_released_is_again_under_the_policy_of_its_callers(lab: Lab) -> None:
    """A step that is not known to have happened holds its run. That is over when a person has decided."""
    once = lab.face()
    ends: list[Any] = [lab.raising(SystemExit()), lab.effect("never"), lab.raising(ConnectionError())]

    def plain() -> None:
        run = current_run()
        run.step("reserve", lab.effect("reserved"))
        run.step("charge", ends.pop(0), on_unknown="hold")

    async def coroutine() -> None:
        run: Any = current_run()
        await run.step("reserve", lab.effect("reserved"))
        await run.step("charge", ends.pop(0), on_unknown="hold")

    work = plain if lab.colour == "sync" else coroutine
    for error in (SystemExit, OutcomeUnknown):
        with pytest.raises(error):
            await lab.do(once.execute("k", work))
    await lab.do(once.resolve("k", release=True, actor="ann"))
    with pytest.raises(ConnectionError):
        await lab.do(once.execute("k", stepping(lab, "mail", ends.pop())))
    assert (await lab.do(once.peek("k"))).state == "released"
    assert (await lab.do(once.execute("k", lab.effect("sent")))).value == "sent"


async def test_R10_a_step_is_under_the_policy_of_its_run_not_of_its_last_caller(light_lab: Lab) -> None:
    """The first caller's probe is stored: a caller without one goes on under it, and so do his steps."""
    lab = light_lab
    once = lab.face()
    probed = {"on_unknown": lab.fn(lambda: NOT_FOUND)}
    with pytest.raises(LookupError):
        await lab.do(once.execute("k", _failing_after(lab, "reserve"), on_error="release", **probed))
    with pytest.raises(SystemExit):
        await lab.do(once.execute("k", stepping(lab, "charge", lab.raising(SystemExit()))))
    lab.effects.clear()
    with pytest.raises(OutcomeUnknown, match="step 'charge'"):
        await lab.do(once.execute("k", stepping(lab, "charge", lab.effect()), **probed))
    assert lab.effects == []


def _failing_after(lab: Lab, name: str) -> Callable[..., Any]:
    made = stepping(lab, name, lab.effect())

    def plain() -> None:
        made()
        raise LookupError

    async def coroutine() -> None:
        await made()
        raise LookupError

    return plain if lab.colour == "sync" else coroutine


async def test_R26_a_steps_own_probe_is_asked_whatever_its_call_has(light_lab: Lab) -> None:
    lab = light_lab
    once = lab.face(on_unknown=lab.fn(lambda: NOT_FOUND))
    own = lab.fn(lambda: Found("found at the bank"))
    with pytest.raises(SystemExit):
        await lab.do(once.execute("k", stepping(lab, "charge", lab.raising(SystemExit()), on_unknown=own)))
    outcome = await lab.do(once.execute("k", stepping(lab, "charge", lab.effect(), on_unknown=own)))
    assert outcome.value == "found at the bank"


_LAXER: dict[str, tuple[Any, Any]] = {
    "hold, then retry": ("hold", "retry"),
    "hold, then nothing": ("hold", None),
    "hold, then a probe that finds nothing": ("hold", NOT_FOUND),
    "probe, then retry": (UNDECIDED, "retry"),
    "probe, then nothing": (UNDECIDED, None),
}


@pytest.mark.parametrize(("before", "after"), _LAXER.values(), ids=_LAXER)
async def test_R10_of_the_policies_of_a_lost_step_the_stricter_wins(
    light_lab: Lab, before: Any, after: Any
) -> None:
    lab = light_lab
    once = lab.face()

    def policy(word: Any) -> Any:
        return word if word is None or isinstance(word, str) else lab.fn(lambda: word)

    with pytest.raises(SystemExit):
        await lab.do(
            once.execute("k", stepping(lab, "charge", lab.raising(SystemExit()), on_unknown=policy(before)))
        )
    lab.effects.clear()
    again = stepping(lab, "charge", lab.effect("again"), on_unknown=policy(after))
    with pytest.raises(OutcomeUnknown, match="step 'charge'"):
        await lab.do(once.execute("k", again))
    assert lab.effects == []
    await lab.do(once.resolve("k", release=True, actor="ann"))
    assert (await lab.do(once.execute("k", again))).value == "again"


async def test_R11_what_a_probe_finds_settles_a_step_that_was_held(light_lab: Lab) -> None:
    lab = light_lab
    once = lab.face()
    with pytest.raises(SystemExit):
        await lab.do(once.execute("k", stepping(lab, "charge", lab.raising(SystemExit()), on_unknown="hold")))
    found = lab.fn(lambda: Found("at the bank"))
    outcome = await lab.do(once.execute("k", stepping(lab, "charge", lab.effect(), on_unknown=found)))
    assert outcome.value == "at the bank"


async def test_R26_what_a_probe_of_a_step_finds_is_bounded_as_what_a_step_gives(light_lab: Lab) -> None:
    lab = light_lab
    once = lab.face()
    found = lab.fn(lambda: Found(b"x" * (2 << 20)))
    charge = stepping(lab, "charge", lab.raising(SystemExit()), on_unknown=found)
    for error in (SystemExit, ConfigurationError, CodecError):  # lost, found, and done without its result
        with pytest.raises(error):
            await lab.do(once.execute("k", charge))
    record = await lab.do(once.peek("k"))
    assert len(record.steps) < 1024
    assert (await lab.do(once.execute("k", stepping(lab, "mail", lab.effect("sent"))))).value == "sent"


async def test_R11_a_step_whose_probe_finds_what_cannot_be_stored_stays_unknown(light_lab: Lab) -> None:
    lab = light_lab
    once = lab.face()
    answers: list[Any] = [Found(object()), Found("at the bank")]
    charge = stepping(lab, "charge", lab.raising(SystemExit()), on_unknown=lab.fn(lambda: answers.pop(0)))
    for error in (SystemExit, CodecError):
        with pytest.raises(error):
            await lab.do(once.execute("k", charge))
    assert (await lab.do(once.execute("k", charge))).value == "at the bank"


@pytest.mark.parametrize("on_error", [None, "replay"])
async def test_R11_a_step_whose_probe_could_not_tell_stays_unknown(light_lab: Lab, on_error: Any) -> None:
    lab = light_lab
    once = lab.face(on_error=on_error)
    probe = lab.fn(lambda: UNDECIDED)
    with pytest.raises(SystemExit):
        await lab.do(once.execute("k", stepping(lab, "charge", lab.raising(SystemExit()), on_unknown=probe)))
    lab.effects.clear()
    work = stepping(lab, "charge", lab.effect("paid"), on_unknown=probe)
    for _ in range(2):
        with pytest.raises(OutcomeUnknown):
            await lab.do(once.execute("k", work))
    assert lab.effects == []
    await lab.do(once.resolve("k", release=True, actor="ann"))
    assert (await lab.do(once.execute("k", work))).value == "paid"


@pytest.mark.timeout(20)
async def test_R26_a_step_inside_of_itself_is_refused_instead_of_waiting_for_ever(light_lab: Lab) -> None:
    lab = light_lab
    once = lab.face()
    inner = stepping(lab, "charge", lab.effect())
    for nested in (inner, stepping(lab, "between", inner)):
        with pytest.raises(ConfigurationError, match=r"'charge'.*inside of itself.*another name"):
            await lab.do(once.execute("k", stepping(lab, "charge", nested)))
    assert lab.effects == []
    # Another name, and the same name of another run, are not the step itself.
    elsewhere = stepping(lab, "charge", lab.effect("other"))

    def plain() -> Any:
        return once.execute("other", elsewhere).value

    async def coroutine() -> Any:
        return (await once.execute("other", elsewhere)).value

    outer = stepping(lab, "charge", plain if lab.colour == "sync" else coroutine)
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
@pytest.mark.parametrize("runs", [1, 2])
async def test_R26_steps_that_wait_for_each_other_are_refused_instead_of_waiting_for_ever(
    lab: Lab, runs: int
) -> None:
    """Two tasks or threads, of one run or of two: each is in a step of its own, and asks for that of the other."""
    once = lab.face()
    async with owned(lab, once, "first") as first, owned(lab, once, "second") as second:
        one, other = first.run, second.run if runs == 2 else first.run
        inside = [False, False]

        def nested(place: int, run: Any, name: str) -> Any:
            async def both_inside() -> None:
                inside[place] = True
                await until(lab, lambda: all(inside))

            if lab.colour == "sync":
                run_sync(both_inside())
                return run.step(name, lab.effect())

            async def asked() -> Any:
                await both_inside()
                return await run.step(name, lab.effect())

            return asked()

        ends = [
            meanwhile(lab, 0.0, lambda: one.step("a", lab.fn(lambda: nested(0, other, "b")))),
            meanwhile(lab, 0.0, lambda: other.step("b", lab.fn(lambda: nested(1, one, "a")))),
        ]
        told = [await _raised(end) for end in ends]
        assert [each for each in told if each is not None]
        for each in told:
            assert each is None or (
                isinstance(each, ConfigurationError) and "neither would ever end" in str(each)
            )
        await lab.do(first.complete())
        await lab.do(second.complete())


async def _raised(end: Any) -> BaseException | None:
    try:
        await end()
    except Exception as error:
        return error
    return None


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
        await lab.do(once.execute("k", stepping(lab, "export", lab.effect(value))))
    for _ in range(2):
        with pytest.raises(
            CodecError, match=f"is done and is not made again.*{why}.*look the result up.*ref"
        ):
            await lab.do(once.execute("k", stepping(lab, "export", lab.effect("small"))))
    assert len(lab.effects) == 1


@pytest.mark.parametrize("colour", ["sync"])
async def test_R26_a_coroutine_function_is_refused_before_its_step_is_marked(lab: Lab) -> None:
    once = lab.face()

    async def charge() -> str:
        return "paid"

    with pytest.raises(ConfigurationError, match=r"'charge' cannot be the coroutine function.*AsyncSemel"):
        once.execute("k", stepping(lab, "charge", charge, on_unknown="hold"))
    assert once.execute("k", stepping(lab, "charge", lab.effect("paid"), on_unknown="hold")).value == "paid"


@pytest.mark.parametrize("what", ["generator", "coroutine"])
async def test_R26_a_held_step_that_returns_a_promise_is_not_made_again(lab: Lab, what: str) -> None:
    """Nothing of the promise has run, but what the function did before it returned has happened."""
    once = lab.face()

    async def paid() -> str:
        return "paid"

    if what == "coroutine" and lab.colour == "async":
        return  # it is awaited there, and its result is that of the step

    def charge() -> Any:
        lab.effects.append("charged")
        return (each for each in "paid") if what == "generator" else paid()

    work = stepping(lab, "charge", charge, on_unknown="hold")
    with pytest.raises(ConfigurationError, match=f"returned a {what}, and nothing of that has run"):
        await lab.do(once.execute("k", work))
    for _ in range(2):
        with pytest.raises(OutcomeUnknown):
            await lab.do(once.execute("k", work))
    assert lab.effects == ["charged"]


@pytest.mark.parametrize("colour", ["async"])
async def test_R4_who_forgets_to_await_is_told_so(light_lab: Lab) -> None:
    once = light_lab.face()

    async def paid() -> str:
        return "paid"

    async def work() -> Any:
        return paid()

    with pytest.raises(
        ConfigurationError, match=r"returned a coroutine.*: await it, or return what it gives"
    ):
        await once.execute("k", work)
    with pytest.raises(
        ConfigurationError, match=r"returned a coroutine.*: await it, or return what it gives"
    ):
        await once.execute("k", stepping(light_lab, "charge", work))


async def test_R26_a_mark_is_not_taken_back_for_a_promise_that_was_made_further_inside(
    light_lab: Lab,
) -> None:
    lab = light_lab
    once = lab.face()

    async def both() -> Any:
        lab.effects.append("charged")
        inner: Any = current_run()
        return await lab.do(inner.step("inner", lambda: (each for each in "paid"), on_unknown="hold"))

    outer = (lambda: run_sync(both())) if lab.colour == "sync" else both
    with pytest.raises(ConfigurationError, match="nothing of that has run"):
        await lab.do(once.execute("k", stepping(lab, "charge", outer, on_unknown="hold")))
    with pytest.raises(OutcomeUnknown, match="step 'charge'"):
        await lab.do(once.execute("k", stepping(lab, "charge", outer, on_unknown="hold")))
    assert lab.effects == ["charged"]


@pytest.mark.parametrize("policy", ["retry", "hold"])
async def test_R26_a_run_has_at_most_256_steps_however_they_are_made(light_lab: Lab, policy: str) -> None:
    lab = light_lab
    once = lab.face()
    made: list[int] = []

    async def work() -> str:
        run: Any = current_run()
        for number in range(256):
            await lab.do(run.step(f"s{number}", lab.fn(lambda: made.append(1)), on_unknown=policy))
        with pytest.raises(ConfigurationError, match=r"at most 256 steps, .*fewer and larger steps"):
            await lab.do(run.step("one more", lab.fn(lambda: made.append(1)), on_unknown=policy))
        with pytest.raises(ConfigurationError, match="at most 256 steps"):
            await lab.do(run.new_id("ord"))
        assert await lab.do(run.step("s7", lab.fn(lambda: made.append(1)), on_unknown=policy)) is None
        return "done"

    await lab.do(once.execute("k", (lambda: run_sync(work())) if lab.colour == "sync" else work))
    assert len(made) == 256


@pytest.mark.parametrize("colour", ["async"])
@pytest.mark.parametrize("policy", ["retry", "hold"])
async def test_R26_steps_at_the_same_time_are_not_more_than_256_either(light_lab: Lab, policy: str) -> None:
    once = light_lab.face()
    made: list[int] = []

    async def one() -> None:
        made.append(1)
        await asyncio.sleep(0)

    async def work() -> int:
        run: Any = current_run()
        every = (run.step(f"s{number}", one, on_unknown=policy) for number in range(300))
        told = await asyncio.gather(*every, return_exceptions=True)
        assert all(each is None or isinstance(each, ConfigurationError) for each in told)
        return len(run.steps)

    assert (await once.execute("k", work)).value == len(made) <= 256
