"""Steps that are still under way when their function has ended, or when whoever asked for them has gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from semel import (
    AsyncSemel,
    ConfigurationError,
    InProgress,
    OutcomeUnknown,
    PreviousFailure,
    SemelWarning,
    current_run,
)
from semel.awaited import current_async_run
from semel.hooks import Failed
from semel.model import State
from semel.runtime import run_sync
from semel.stores.memory import MemoryStore

from .conftest import Lab
from .tools import meanwhile, owned, renewed, until

only_async = pytest.mark.parametrize("colour", ["async"])


def _in_colour(lab: Lab, body: Callable[[], Any]) -> Callable[[], Any]:
    """A coroutine function as the lab's faces run it."""
    return (lambda: run_sync(body())) if lab.colour == "sync" else body


class Charge:
    """A step that has begun, and ends when it is told to."""

    def __init__(self, lab: Lab) -> None:
        self.made = 0
        self.began, self.end = threading.Event(), threading.Event()
        self.step = _in_colour(lab, self._make(lab))

    def _make(self, lab: Lab) -> Callable[[], Any]:
        async def charge() -> str:
            self.made += 1
            self.began.set()
            await until(lab, self.end.is_set)
            return "paid"

        return charge

    def in_thread(self) -> str:
        self.made += 1
        self.began.set()
        assert self.end.wait(60)
        return "paid"


class Work:
    """A function that leaves its step behind at the first time, and waits for it from then on."""

    def __init__(self, lab: Lab, ending: BaseException | None) -> None:
        self.charge = Charge(lab)
        self.runs: list[Any] = []
        self.left: list[Callable[[], Any]] = []
        self.fn = _in_colour(lab, self._make(lab, ending))

    def _make(self, lab: Lab, ending: BaseException | None) -> Callable[[], Any]:
        async def work() -> Any:
            run: Any = current_run()
            self.runs.append(run)
            if self.left:
                return await lab.do(run.step("charge", self.charge.step))
            self.left.append(meanwhile(lab, 0.0, lambda: run.step("charge", self.charge.step)))
            await until(lab, self.charge.began.is_set)
            if ending is not None:
                raise ending
            return "done"

        return work


@pytest.mark.parametrize(
    "ending", [ValueError("the mail was not sent"), SystemExit()], ids=["failed", "lost"]
)
async def test_R4_a_key_is_not_freed_under_a_step_that_still_runs(lab: Lab, ending: BaseException) -> None:
    once = lab.face(lease=3)
    work = Work(lab, ending)
    with pytest.raises(type(ending)):
        await lab.do(once.execute("k", work.fn))
    await renewed(lab, once, "k")
    with pytest.raises(InProgress):
        await lab.do(once.execute("k", work.fn))
    with pytest.raises(ConfigurationError, match="has ended"):
        await lab.do(work.runs[0].step("mail", lab.effect()))
    work.charge.end.set()
    assert await work.left[0]() == "paid"
    assert (await lab.do(once.execute("k", work.fn, wait=30))).value == "paid"
    assert (work.charge.made, lab.effects) == (1, [])


async def test_R9_a_failure_that_is_the_outcome_is_stored_at_once_whatever_step_still_runs(lab: Lab) -> None:
    """It frees nothing."""
    once = lab.face(lease=30, on_error="replay")
    work = Work(lab, ValueError("the mail was not sent"))
    with pytest.raises(ValueError, match="mail"):
        await lab.do(once.execute("k", work.fn))
    with pytest.raises(PreviousFailure, match="mail"):
        await lab.do(once.execute("k", work.fn))
    work.charge.end.set()
    with pytest.raises(ConfigurationError, match="'charge', which was made"):
        await work.left[0]()
    assert work.charge.made == 1


async def test_R9_hooks_hear_of_a_failure_before_its_last_step_has_ended(light_lab: Lab) -> None:
    lab = light_lab
    heard: list[str] = []
    once = lab.face(
        lease=30, hooks=[lambda event: heard.append(event.decision) if isinstance(event, Failed) else None]
    )
    work = Work(lab, ValueError("the mail was not sent"))
    with pytest.raises(ValueError, match="mail"):
        await lab.do(once.execute("k", work.fn))
    assert heard == ["release"]
    work.charge.end.set()
    assert await work.left[0]() == "paid"
    await lab.do(once.execute("k", work.fn, wait=30))
    assert heard == ["release"]


async def test_R25_a_step_that_its_function_left_behind_still_has_ids_and_a_ref(light_lab: Lab) -> None:
    lab = light_lab
    once = lab.face(lease=30)
    began, end, ids = threading.Event(), threading.Event(), list[str]()
    left: list[Callable[[], Any]] = []

    async def work() -> Any:
        run: Any = current_run()

        async def order() -> str:
            began.set()
            await until(lab, end.is_set)
            return str(await lab.do(run.new_id("ord")))

        step = _in_colour(lab, order)
        if left:
            return await lab.do(run.step("order", step))
        left.append(meanwhile(lab, 0.0, lambda: run.step("order", step)))
        await until(lab, began.is_set)
        raise ValueError("the mail was not sent")

    fn = _in_colour(lab, work)
    with pytest.raises(ValueError, match="mail"):
        await lab.do(once.execute("k", fn))
    end.set()
    ids.append(await left[0]())
    outcome = await lab.do(once.execute("k", fn, wait=30))
    assert [outcome.value, outcome.ref] == ids * 2


async def test_R4_a_held_key_is_not_unknown_before_its_last_step_has_ended(light_lab: Lab) -> None:
    lab = light_lab
    once = lab.face(lease=30, on_unknown="hold")
    work = Work(lab, ValueError("the mail was not sent"))
    with pytest.raises(ValueError, match="mail"):
        await lab.do(once.execute("k", work.fn))
    assert (await lab.do(once.peek("k"))).state is State.RUNNING
    work.charge.end.set()
    assert await work.left[0]() == "paid"

    async def held() -> bool:
        return (await lab.do(once.peek("k"))).state is State.UNKNOWN

    await until(lab, held)
    with pytest.raises(OutcomeUnknown):
        await lab.do(once.execute("k", work.fn))


async def test_R4_a_claim_that_is_left_without_an_answer_is_not_freed_under_its_step(lab: Lab) -> None:
    once = lab.face(lease=30)
    charge = Charge(lab)
    block = owned(lab, once, "k")
    run = (await block.__aenter__()).run
    left = meanwhile(lab, 0.0, lambda: run.step("charge", charge.step))
    await until(lab, charge.began.is_set)
    with pytest.warns(SemelWarning, match="without complete"):
        await block.__aexit__(None, None, None)
    with pytest.raises(InProgress):
        await lab.do(once.execute("k", lab.effect()))
    charge.end.set()
    assert await left() == "paid"

    async def again() -> Any:
        return await lab.do(current_run().step("charge", charge.step))

    assert (await lab.do(once.execute("k", _in_colour(lab, again), wait=30))).value == "paid"
    assert charge.made == 1


async def test_R26_a_step_that_its_function_forgot_is_not_kept_and_not_made_again(lab: Lab) -> None:
    """The function has returned: that is the outcome, for everybody, whatever became of the step."""
    once = lab.face(lease=30)
    work = Work(lab, None)
    assert (await lab.do(once.execute("k", work.fn))).value == "done"
    assert (await lab.do(once.execute("k", work.fn))).replayed
    work.charge.end.set()
    with pytest.raises(ConfigurationError, match=r"'charge', which was made.*Wait for every step"):
        await work.left[0]()
    assert (await lab.do(once.execute("k", work.fn))).value == "done"
    assert work.charge.made == 1


@only_async
@pytest.mark.parametrize(
    ("policy", "end"), [("retry", State.RELEASED), ("hold", State.UNKNOWN)], ids=["retry", "hold"]
)
async def test_R4_a_cancelled_claim_is_renewed_and_settled_when_the_thread_of_its_step_ends(
    lab: Lab, policy: str, end: State
) -> None:
    once = lab.face(lease=3)
    charge = Charge(lab)

    async def block() -> None:
        async with once.claim("k", on_unknown=policy) as claim:
            await claim.complete(await claim.run.step("charge", charge.in_thread))

    task = asyncio.create_task(block())
    await until(lab, charge.began.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await renewed(lab, once, "k")
    charge.end.set()

    async def settled() -> bool:
        return bool((await once.peek("k")).state is end)

    await until(lab, settled)
    assert "charge" in (await _steps(once, "k"))


async def _steps(once: Any, key: str) -> set[str]:
    from semel.steps import decode

    record = await once.peek(key)
    return {name for name, step in decode(record.steps).items() if step.phase == "done"}


@only_async
async def test_R26_a_thread_that_ends_after_its_caller_has_gone_has_made_its_step(lab: Lab) -> None:
    once = lab.face(lease=30)
    charge = Charge(lab)

    async def work() -> Any:
        return await current_async_run().step("charge", charge.in_thread)

    task = asyncio.create_task(once.execute("k", work))
    await until(lab, charge.began.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    charge.end.set()
    assert (await once.execute("k", work, wait=30)).value == "paid"
    assert charge.made == 1


@only_async
async def test_R26_the_error_of_a_thread_whose_caller_has_gone_is_logged(
    light_lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    once = light_lab.face(lease=30)
    charge = Charge(light_lab)

    def refused() -> None:
        charge.in_thread()
        raise ValueError("the card was refused")

    async def work() -> Any:
        return await current_async_run().step("charge", refused)

    task = asyncio.create_task(once.execute("k", work))
    await until(light_lab, charge.began.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert caplog.text == ""
    charge.end.set()
    await until(light_lab, lambda: "step 'charge' of key" in caplog.text)
    assert "ValueError: the card was refused" in caplog.text


@only_async
async def test_R26_a_step_that_timed_out_is_the_same_step_when_it_is_asked_for_again(light_lab: Lab) -> None:
    once = light_lab.face()
    charge = Charge(light_lab)

    async def work() -> Any:
        run = current_async_run()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as limit:
                asyncio.get_running_loop().run_in_executor(None, charge.began.wait).add_done_callback(
                    lambda _: limit.reschedule(0)
                )
                await run.step("charge", charge.in_thread)
        asyncio.get_running_loop().call_later(0.05, charge.end.set)
        return await run.step("charge", charge.in_thread)

    assert (await once.execute("k", work)).value == "paid"
    assert charge.made == 1


@only_async
async def test_R26_a_coroutine_that_a_plain_step_returns_is_cancelled_with_its_caller(light_lab: Lab) -> None:
    once = light_lab.face()
    told: list[str] = []
    began = asyncio.Event()

    async def endless() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.append("cancelled")
            raise

    async def work() -> Any:
        return await current_async_run().step("charge", lambda: endless())

    task = asyncio.create_task(once.execute("k", work))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert told == ["cancelled"]
    assert (await once.peek("k")).state is State.RELEASED


@only_async
async def test_R10_an_exit_in_the_thread_of_a_step_is_a_lost_outcome_decided_at_once(light_lab: Lab) -> None:
    once = light_lab.face(on_unknown="hold")

    def leaves() -> None:
        raise SystemExit(3)

    async def work() -> Any:
        return await current_async_run().step("charge", leaves)

    with pytest.raises(SystemExit):
        await once.execute("k", work)
    assert (await once.peek("k")).state is State.UNKNOWN


def test_R17_a_lease_that_is_lost_when_the_caller_has_gone_cancels_nothing_else() -> None:
    async def main() -> None:
        store = MemoryStore()
        lab = Lab("async", "")
        charge = Charge(lab)
        async with AsyncSemel(store, lease=0.3) as once:

            async def work() -> Any:
                return await current_async_run().step("charge", charge.in_thread)

            with pytest.raises(TimeoutError):
                async with asyncio.timeout(None) as limit:
                    asyncio.get_running_loop().run_in_executor(None, charge.began.wait).add_done_callback(
                        lambda _: limit.reschedule(0)
                    )
                    await once.execute("k", work)
            run = next(iter(once._engine().heart._alive()))
            ((hashed, record),) = store._records.items()
            store._records[hashed] = msgspec.structs.replace(record, nonce=b"thief" + bytes(11))
            await until(lab, lambda: run.lease_lost)  # other work of the same task
            charge.end.set()
        current = asyncio.current_task()
        assert current is not None
        assert current.cancelling() == 0

    asyncio.run(main())
