"""Corners in which a key could be wedged, an effect doubled or an outcome lost. Each was once a bug."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import logging
import sys
import threading
import time
from typing import Any, cast

import pytest

from semel import (
    AsyncSemel,
    CodecError,
    ConfigurationError,
    InProgress,
    InvalidKey,
    LeaseLost,
    OutcomeUnknown,
    PreviousFailure,
    Release,
    Semel,
    current_async_run,
    current_run,
)
from semel.layers import Layer
from semel.runtime import run_sync
from semel.stores.memory import MemoryStore

from .conftest import Lab
from .test_failure import _over, _stop_heart
from .tools import owned, pause, renewed


class Broken(Exception):
    @property
    def code(self) -> str:
        raise ValueError("no code")

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    "decide",
    [
        lambda error: 1 / 0,
        lambda error: "nope",
        lambda error: Release(after=-1),
        lambda error: Release(float("inf")),
    ],
)
async def test_an_on_error_that_fails_holds_the_key_instead_of_wedging_it(
    light_lab: Lab, decide: Any
) -> None:
    once = light_lab.face()
    with pytest.raises(OSError, match="down") as caught:
        await light_lab.do(once.execute("k", light_lab.raising(OSError("down")), on_error=decide))
    assert "could not decide" in str(caught.value.__notes__)
    with pytest.raises(OutcomeUnknown):
        await light_lab.do(once.execute("k", light_lab.effect()))
    assert not once._engine().heart.busy


async def test_an_exception_without_text_is_still_a_failure(lab: Lab) -> None:
    once = lab.face()
    with pytest.raises(Broken):
        await lab.do(once.execute("k", lab.raising(Broken()), on_error="replay"))
    with pytest.raises(PreviousFailure, match="no readable text"):
        await lab.do(once.execute("k", lab.effect()))


def test_a_claim_left_in_another_context_is_settled() -> None:
    once = Semel("memory://")
    claim = once.claim("k")
    contextvars.copy_context().run(claim.__enter__)
    claim.complete("x")
    contextvars.copy_context().run(claim.__exit__, None, None, None)
    other = once.claim("other")
    contextvars.copy_context().run(other.__enter__)
    error = OSError("down")
    contextvars.copy_context().run(other.__exit__, OSError, error, None)
    assert once.execute("other", lambda: "free").value == "free"
    assert not once._engine().heart.busy


def test_R5_bound_methods_static_methods_and_class_methods_keep_their_arguments() -> None:
    once = Semel("memory://")

    class Shop:
        def charge(self, order: str) -> str:
            return order

        @staticmethod
        @once(operation="static", key="order")
        def static(order: str) -> str:
            return order

        @classmethod
        @once(operation="class", key="order")
        def of_class(cls, order: str) -> str:
            return order

    charge = once(operation="bound", key=lambda order: order)(Shop().charge)
    every: list[Any] = [charge, Shop.static, Shop().static, Shop.of_class]
    for fn in every:
        assert [fn("o1"), fn("o2"), fn("o1")] == ["o1", "o2", "o1"]


async def test_R5_once_stands_above_or_below_classmethod_and_staticmethod(light_lab: Lab) -> None:
    once = light_lab.face()

    class Shop:
        @once(operation="static", key="order")
        @staticmethod
        def static(order: str) -> str:
            return order

        @once(operation="class", key="order")
        @classmethod
        def of_class(cls, order: str) -> str:
            return f"{cls.__name__} {order}"

    class Branch(Shop):
        """Inherits both."""

    outcome = await light_lab.do(Branch.of_class.outcome("o1"))
    assert (outcome.value, outcome.replayed) == ("Branch o1", False)
    every: list[Any] = [Branch.of_class, Branch().of_class, Shop.of_class]
    assert [await light_lab.do(fn("o1")) for fn in every] == ["Branch o1"] * 3
    assert (await light_lab.do(Shop().of_class.outcome("o1"))).replayed
    assert await light_lab.do(Branch().static("o1")) == "o1"
    assert (await light_lab.do(Shop.static.outcome("o1"))).replayed


def test_R5_a_class_method_below_which_once_stands_has_an_outcome_or_says_where_once_belongs() -> None:
    once = Semel("memory://")

    class Shop:
        @classmethod
        @once(operation="class", key="order")
        def of_class(cls, order: str) -> str:
            return f"{cls.__name__} {order}"

    of_class: Any = Shop.of_class
    assert of_class("o1") == "Shop o1"
    unbound = vars(Shop)["of_class"].__func__.outcome
    with pytest.raises(ConfigurationError, match="put @once above @classmethod"):
        unbound("o1")
    assert unbound(Shop, "o1").replayed
    if sys.version_info < (3, 13):  # a classmethod still binds what it wraps
        assert of_class.outcome("o1").replayed
    else:
        with pytest.raises(ConfigurationError, match="put @once above @classmethod"):
            of_class.outcome("o1")


def test_what_cannot_be_decorated_is_refused_when_decorating() -> None:
    once = Semel("memory://")

    def numbers() -> Any:
        yield 1

    with pytest.raises(ConfigurationError, match="generator"):
        once(key="x")(numbers)
    with pytest.raises(ConfigurationError, match="generator"):
        once(key="x")(cast("Any", classmethod)(numbers))
    with pytest.raises(ConfigurationError, match="generator"):
        once.execute("k", numbers)
    assert once.peek("k") is None


async def test_a_stop_iteration_ends_the_call(light_lab: Lab) -> None:
    once = light_lab.face()

    async def ends() -> None:
        await light_lab.do(once.execute("k", next, iter(())))

    with pytest.raises(
        RuntimeError, match="StopIteration"
    ):  # no coroutine can raise it, neither ours nor this one
        await ends()
    assert (await light_lab.do(once.execute("k", light_lab.effect()))).value == "done"


async def test_a_ref_that_no_store_could_keep_is_refused_before_it_is_kept(light_lab: Lab) -> None:
    once = light_lab.face()
    for wrong in ("a\0b", "\ud800", "", "x" * 256, 5):
        with pytest.raises(InvalidKey, match="ref"):
            await light_lab.do(
                once.execute("k", light_lab.fn(lambda wrong=wrong: current_run().set_ref(wrong)))
            )


def test_R17_a_lost_lease_under_a_thread_is_told_as_lease_lost() -> None:
    async def main() -> None:
        store = MemoryStore()
        once = AsyncSemel(store, lease=0.2)
        started, stolen = threading.Event(), threading.Event()

        def work() -> str:
            started.set()
            assert stolen.wait(30)
            time.sleep(0.3)
            return "late"

        call = asyncio.create_task(once.execute("k", work))
        assert await asyncio.to_thread(started.wait, 30)
        import msgspec

        ((hashed, record),) = store._records.items()
        store._records[hashed] = msgspec.structs.replace(record, nonce=b"thief" + bytes(11))
        stolen.set()
        with pytest.raises(LeaseLost):
            await call
        await once.aclose()

    asyncio.run(main())


def test_R4_a_key_is_not_freed_under_the_thread_of_a_step() -> None:
    async def main() -> None:
        once, loop = AsyncSemel("memory://", lease=3), asyncio.get_running_loop()
        made: list[int] = []
        limits: list[asyncio.Timeout] = []
        end = threading.Event()

        def slow() -> str:
            made.append(1)
            loop.call_soon_threadsafe(lambda: limits[-1].reschedule(loop.time()))  # now that the thread runs
            assert end.wait(30)
            return "slow"

        async def work() -> Any:
            async with asyncio.timeout(None) as limit:
                limits.append(limit)
                return await current_async_run().step("s", slow)

        with pytest.raises(TimeoutError):
            await once.execute("k", work)
        await renewed(Lab("async", ""), once, "k", times=3)
        with pytest.raises(InProgress):
            await once.execute("k", work)
        later = asyncio.create_task(once.execute("k", work, wait=30))
        end.set()
        assert (await later).value == "slow"
        assert len(made) == 1
        await once.aclose()

    asyncio.run(main())


def test_R26_one_name_is_one_step_also_at_the_same_time() -> None:
    async def main() -> None:
        made: list[int] = []

        async def charge() -> int:
            made.append(1)
            await asyncio.sleep(0.05)
            return len(made)

        async def work() -> Any:
            run = current_async_run()
            steps = await asyncio.gather(run.step("charge", charge), run.step("charge", charge))
            ids = await asyncio.gather(run.new_id("ord"), run.new_id("ord"))
            return [*steps, len(set(ids))]

        async with AsyncSemel("memory://") as once:
            assert (await once.execute("k", work)).value == [1, 1, 1]

    asyncio.run(main())


async def test_R26_a_step_whose_result_cannot_be_kept_is_never_made_again(light_lab: Lab) -> None:
    once = light_lab.face()
    made: list[int] = []

    def bad() -> Any:
        made.append(1)
        return object()

    def plain() -> Any:
        return current_run().step("s", bad)

    async def coloured() -> Any:
        return await current_run().step("s", light_lab.fn(bad))

    for _ in range(3):
        with pytest.raises(CodecError):
            await light_lab.do(once.execute("k", plain if light_lab.colour == "sync" else coloured))
    assert made == [1]


async def test_R10_the_stored_policy_counts_when_the_caller_asks_for_less(light_lab: Lab) -> None:
    once = light_lab.face()
    async with owned(light_lab, once, "k", on_unknown="hold") as claim:
        await light_lab.do(claim.run.step("s", light_lab.fn(lambda: 1)))
        await light_lab.do(once._engine().release(claim.run))
        claim._answered = True
    claim = once.claim("k")
    await light_lab.do(claim.__enter__() if light_lab.colour == "sync" else claim.__aenter__())
    error = KeyboardInterrupt()
    if light_lab.colour == "sync":
        claim.__exit__(KeyboardInterrupt, error, None)
    else:
        await claim.__aexit__(KeyboardInterrupt, error, None)
    assert (await light_lab.do(once.peek("k"))).state == "unknown"


def test_R7_closing_lets_open_runs_end() -> None:
    once, other = Semel("memory://closing", lease=3, settle_timeout=60), Semel("memory://closing")
    started, end, outcomes = threading.Event(), threading.Event(), []

    def work() -> str:
        started.set()
        assert end.wait(30)
        return "ended"

    caller = threading.Thread(target=lambda: outcomes.append(once.execute("k", work)))
    caller.start()
    started.wait(30)
    closers = [threading.Thread(target=once.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    run_sync(renewed(Lab("sync", ""), other, "k", times=3))  # closing, and beyond its lease
    with pytest.raises(InProgress):
        other.execute("k", work)
    end.set()
    for thread in (caller, *closers):
        thread.join(30)
    other.close()
    assert outcomes[0].value == "ended"


async def test_a_hook_that_raises_under_strict_warnings_breaks_nothing(light_lab: Lab, caplog: Any) -> None:
    def broken(event: Any) -> None:
        raise ValueError("hook")

    once = light_lab.face(hooks=[broken], lease=0.3)
    with caplog.at_level(logging.ERROR, logger="semel"):
        async with owned(light_lab, once, "k") as claim:
            await pause(light_lab, 0.7)
            await light_lab.do(claim.complete("x"))
    assert "hook" in caplog.text


async def test_an_owed_outcome_survives_a_strange_error_of_the_store(light_lab: Lab) -> None:
    class Strange(Layer):
        broken = True

        async def settle(self, ends: Any) -> Any:
            if self.broken:
                raise RuntimeError("strange")
            return await self.inner.settle(ends)

    from semel import NotRecorded

    store = Strange(MemoryStore())
    once = _over(light_lab, store, settle_timeout=0.1)
    with pytest.raises(NotRecorded):
        await light_lab.do(once.execute("k", light_lab.effect("kept")))
    store.broken = False
    outcome = await light_lab.do(once.execute("k", light_lab.effect(), wait=10))
    assert outcome.replayed


async def test_R15_an_unreadable_run_is_given_back_to_those_who_can_read_it(light_lab: Lab) -> None:
    store = MemoryStore()
    mine = _over(light_lab, store, encrypt={"a": b"a" * 32}, lease=0.05)
    claim = mine.claim("k")
    await light_lab.do(claim.__enter__() if light_lab.colour == "sync" else claim.__aenter__())
    await light_lab.do(claim.run.step("s", light_lab.fn(lambda: 1)))
    _stop_heart(mine, light_lab)
    await pause(light_lab, 0.12)
    with pytest.raises(OutcomeUnknown):
        await light_lab.do(_over(light_lab, store, encrypt={"b": b"b" * 32}).execute("k", light_lab.effect()))
    heir = _over(light_lab, store, encrypt={"a": b"a" * 32})
    assert (await light_lab.do(heir.execute("k", light_lab.effect()))).value == "done"


async def test_R8_a_disabled_face_still_has_runs_steps_and_claims(light_lab: Lab) -> None:
    with pytest.warns(UserWarning, match="switched off"):
        once = light_lab.face(enabled=False)
    made: list[Any] = []

    def plain() -> Any:
        run = current_run()
        made.append(run.downstream_key("x"))
        return run.step("s", lambda: run.key)

    async def coloured() -> Any:
        run = current_run()
        made.append(run.downstream_key("x"))
        return await run.step("s", light_lab.fn(lambda: run.key))

    for _ in range(2):
        outcome = await light_lab.do(once.execute("k", plain if light_lab.colour == "sync" else coloured))
        assert (outcome.value, outcome.replayed) == ("k", False)
        async with owned(light_lab, once, "k") as claim:
            assert claim.won
            await light_lab.do(claim.complete(1))
    assert len(made) == 2
    assert made[0] == made[1]


def test_errors_can_be_taken_apart_and_put_together_as_task_queues_do() -> None:
    error = copy.copy(PreviousFailure("Declined", "no", "text", attempt=3))
    assert (error.type_name, error.code, error.message, error.attempt) == ("Declined", "no", "text", 3)
    assert str(error) == "Declined: text"
    told = PreviousFailure("Declined", "no", "", about="key o…1")
    assert str(copy.copy(told)) == str(told)
    assert str(told).startswith(
        "key o…1 failed before, and that stored outcome is replayed: Declined. Nothing ran"
    )
    busy = copy.copy(InProgress("x", retry_after=2.0))
    assert busy.retry_after == 2.0


async def test_R26_reconcile_works_in_a_namespace(light_lab: Lab) -> None:
    store = MemoryStore()
    dead = _over(light_lab, store, namespace="one", lease=0.05)
    claim = dead.claim("k", operation="jobs")
    await light_lab.do(claim.__enter__() if light_lab.colour == "sync" else claim.__aenter__())
    _stop_heart(dead, light_lab)
    await pause(light_lab, 0.12)
    once = _over(light_lab, store, namespace="one")
    once.recovery("jobs", resume=light_lab.fn(lambda record: "resumed"))
    assert (await light_lab.do(once.reconcile())).resumed == 1


def test_a_forgotten_face_keeps_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.runtime._IDLE", 0.05)
    before = threading.active_count()
    Semel("memory://", lease=0.15).execute("k", time.sleep, 0.1)
    end = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    "good,bad",
    [
        ({"wait": 1}, {"wait": True}),
        ({"max_result": 1}, {"max_result": 1.0}),
        ({"lease": 1.0}, {"lease": True}),
    ],
)
def test_R1_an_option_that_only_equals_a_good_one_is_refused_all_the_same(
    good: dict[str, Any], bad: dict[str, Any]
) -> None:
    with Semel("memory://") as once:
        once.execute("k1", lambda: None, **good)
        with pytest.raises(ConfigurationError, match=next(iter(bad))):
            once.execute("k2", lambda: None, **bad)
