"""The public API as an editor sees it: mypy --strict and pyright check this file, and a test runs it.

`assert_type` says what a user gets without a cast; an `ignore` is a mistake that the checkers must find (mypy reports one
that is not needed).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, assert_type

from semel import (
    NOT_FOUND,
    UNDECIDED,
    AsyncRun,
    AsyncSemel,
    Found,
    InProgress,
    NotRecorded,
    Outcome,
    OutcomeUnknown,
    PreviousFailure,
    PublicId,
    Release,
    Run,
    Semel,
    SemelError,
    current_async_run,
    current_run,
    fingerprint,
    parse_id,
)
from semel.claims import AsyncClaim, Claim
from semel.guarantees import Guarantee
from semel.hooks import Executed, log_events
from semel.layers import Chaos
from semel.model import Event, Record, State
from semel.reconciling import Reconciled
from semel.store import Store
from semel.stores.memory import MemoryStore


@dataclass
class Order:
    id: str
    cents: int


def make_order(item: str, cents: int) -> Order:
    return Order(item, cents)


async def make_order_async(item: str, cents: int) -> Order:
    return Order(item, cents)


def decide(error: Exception) -> Release:
    return Release(after=timedelta(seconds=1))


def probe(item: str, cents: int) -> object:
    return Found(Order(item, cents)) if item else UNDECIDED if cents else NOT_FOUND


def sync_calls() -> None:
    with Semel(
        "memory://", tenant="acme", lease=timedelta(seconds=10), retention=None, hooks=[log_events]
    ) as once:
        assert_type(once, Semel)
        outcome = once.execute("k", make_order, "book", 5, request={"cents": 5}, wait=1.0, on_error=decide)
        assert_type(outcome, Outcome[Order])
        assert_type(outcome.value, Order)
        assert_type(outcome.replayed, bool)
        assert_type(outcome.ref, str | None)
        assert_type(outcome.attempt, int)
        assert_type(once.execute("n", lambda: None).value, None)
        assert_type(once.execute("p", make_order, "book", 5, on_unknown=probe).value, Order)
        assert_type(once.consume("c", make_order, "book", 5), bool)
        keeping(once)
        by_hand(once)
        every_option(once)


def every_option(once: Semel) -> None:
    outcome = once.execute(
        "all", make_order, "book", operation="orders.create", tenant="acme", request={"cents": 5, "at": 1}, fields=["cents"],
        result_type=Order, lease=timedelta(seconds=5), retention=None, tombstone=60, wait=math.inf, poll=(0.01, timedelta(seconds=1)),
        on_error="hold", on_unknown="hold", on_lease_lost="warn", kwargs={"cents": 5}, labels={"source": "api"}, readable="masked",
        max_result=1_000, compress_over=None, max_waiters=5, fingerprints="required", ref_type="ord", inline=False,
    )  # fmt: skip
    assert_type(outcome.value, Order)
    settings: dict[str, Any] = {"wait": 1.0}  # options that a program has gathered
    assert_type(once.execute("gathered", make_order, "book", 5, **settings).value, Order)
    assert_type(once.peek("all", tenant="acme", operation="orders.create"), Record | None)
    once.recovery("orders.create", probe=lambda _: UNDECIDED, retention=timedelta(days=1), result_type=Order)


def keeping(once: Semel) -> None:
    record = once.peek("k")
    assert_type(record, Record | None)
    if record is not None:
        assert_type(record.state, State)
    assert_type(once.history("k"), list[Event])
    assert_type(once.purge(limit=10), int)
    assert_type(once.forget("absent", actor="ann"), bool)
    assert_type(once.guarantee(), Guarantee)
    assert_type(once.guarantee().exactly_once, bool)
    assert_type(once.reconcile(), Reconciled)
    assert_type(once.enabled, bool)


def by_hand(once: Semel) -> None:
    with once.claim("by-hand") as claim:
        assert_type(claim, Claim)
        assert_type(claim.won, bool)
        assert_type(claim.run, Run)
        assert_type(claim.run.step("price", make_order, "book", 5), Order)
        assert_type(claim.ref, str | None)
        claim.complete({"id": 1})
    with once.claim("by-hand-2") as claim:
        claim.fail("no")


async def async_calls() -> None:
    async with AsyncSemel("memory://") as once:
        assert_type(once, AsyncSemel)
        from_coroutine = await once.execute("a", make_order_async, "book", 5)
        assert_type(from_coroutine, Outcome[Order])
        from_thread = await once.execute("b", make_order, "book", 5)
        assert_type(from_thread.value, Order)
        assert_type(await once.consume("c", make_order_async, "book", 5), bool)
        assert_type(await once.peek("a"), Record | None)
        assert_type(await once.guarantee(), Guarantee)
        assert_type(await once.purge(), int)
        await by_hand_async(once)
        await inside_an_async_run(once)


async def by_hand_async(once: AsyncSemel) -> None:
    async with once.claim("d") as claim:
        assert_type(claim, AsyncClaim)
        assert_type(claim.run, AsyncRun)
        assert_type(await claim.run.step("price", make_order, "book", 5), Order)
        await assert_type(claim.complete(1), Coroutine[Any, Any, None])
    async with once.claim("e") as claim:
        await claim.fail(ValueError("no"))


async def inside_an_async_run(once: AsyncSemel) -> None:
    async def work() -> str:
        run = current_async_run()
        assert_type(run, AsyncRun)
        assert_type(run.key, str)
        assert_type(run.downstream_key("bank"), str)
        await assert_type(run.step("awaited", make_order_async, "book", 5), Coroutine[Any, Any, Order])
        assert_type(await run.step("awaited", make_order_async, "book", 5), Order)
        assert_type(await run.step("in a thread", make_order, "book", cents_by_name()), Order)
        assert_type(await run.step("lambda", lambda: 5, on_unknown="hold"), int)
        assert_type(await current_run().step("pinned", make_order_async, "book", 5), Order)
        minted = await run.new_id("ord")
        assert_type(minted, str)
        return minted

    assert_type((await once.execute("inside", work)).value, str)


def cents_by_name() -> int:
    return 5


def inside_a_run() -> None:
    def work() -> str:
        run = current_run()
        assert_type(run, Run)
        assert_type(run.key, str)
        assert_type(run.attempt, int)
        assert_type(run.lease_lost, bool)
        assert_type(run.downstream_key("bank"), str)
        assert_type(run.step("charge", make_order, "book", 5, result_type=Order), Order)
        assert_type(run.step("named", make_order, kwargs={"item": "book", "cents": 5}), Order)
        assert_type(run.step("lambda", lambda: 5), int)
        assert_type(run.new_id("ord"), Any)
        run.set_ref("ord_1")
        return run.key

    assert_type(Semel("memory://").execute("k", work).value, str)


def decorated() -> None:
    once = Semel("memory://")

    @once(operation="orders.create", key="item")
    def create(item: str, cents: int) -> Order:
        return Order(item, cents)

    assert_type(create("book", 5), Order)
    assert_type(create.outcome("book", cents=5), Outcome[Order])

    @once(operation="handler", key="cmd", method="run")
    class Handler:
        def run(self, cmd: str) -> str:
            return cmd

    assert_type(Handler(), Handler)

    class Shop:
        @once(operation="shop.sell", key="item")
        def sell(self, item: str, cents: int) -> Order:
            return Order(item, cents)

        @classmethod
        @once(operation="shop.opened", key="day")
        def opened(cls, day: str) -> int:
            return 1

        @once(operation="shop.closed", key="day")
        @classmethod
        def closed(cls, day: str) -> int:
            return 1

        @staticmethod
        @once(operation="shop.price", key="item")
        def price(item: str) -> int:
            return 1

    assert_type(Shop().sell("book", 5), Order)
    assert_type(Shop().sell.outcome("book", cents=5), Outcome[Order])
    assert_type(Shop.sell(Shop(), "pen", 5), Order)
    assert_type(Shop.opened("monday"), int)
    assert_type(Shop().opened("monday"), int)
    assert_type(Shop.closed("monday"), int)
    assert_type(Shop.closed.outcome("monday"), Outcome[int])
    assert_type(Shop().closed.outcome("monday"), Outcome[int])
    assert_type(Shop.price("book"), int)
    close: Callable[[str], int] = Shop.closed
    assert_type(close("friday"), int)
    assert_type([create.__name__, Shop.sell.__qualname__, Shop().sell.__name__], list[str])


async def async_decorated() -> None:
    once = AsyncSemel("memory://")

    @once(operation="orders.create", key="item")
    async def create(item: str, cents: int) -> Order:
        return Order(item, cents)

    assert_type(await create("book", 5), Order)
    assert_type(await create.outcome("book", cents=5), Outcome[Order])

    class Shop:
        @once(operation="shop.sell", key="item")
        async def sell(self, item: str, cents: int) -> Order:
            return Order(item, cents)

        @classmethod
        @once(operation="shop.opened", key="day")
        async def opened(cls, day: str) -> int:
            return 1

        @once(operation="shop.closed", key="day")
        @classmethod
        def closed(cls, day: str) -> int:
            return 1

    assert_type(await Shop().sell("book", 5), Order)
    assert_type(await Shop().sell.outcome("book", cents=5), Outcome[Order])
    assert_type(await Shop.sell(Shop(), "pen", 5), Order)
    assert_type(await Shop.opened("monday"), int)
    assert_type(await Shop.closed("monday"), int)
    assert_type(await Shop.closed.outcome("monday"), Outcome[int])
    assert_type(await Shop().closed("monday"), int)
    assert_type([create.__name__, Shop.closed.__name__], list[str])


def requests_and_ids() -> None:
    assert_type(fingerprint({"a": 1}), str)
    minted = Semel("memory://").execute("k", lambda: current_run().new_id("ord")).value
    assert_type(parse_id(minted, "ord"), PublicId)


def errors() -> None:
    try:
        Semel("memory://").execute("k", make_order, "book", 5)
    except InProgress as busy:
        assert_type(busy.retry_after, float)
    except PreviousFailure as failed:
        assert_type(failed.type_name, str)
        assert_type(failed.code, str | None)
    except OutcomeUnknown as unknown:
        assert_type(unknown.unreadable, bool)
    except NotRecorded as late:
        assert_type(late.value, Any)
    except SemelError as other:
        raise other from None


def stores_and_hooks() -> None:
    store: Store = MemoryStore()
    layered: Store = Chaos(store, seed=1, lose_request=0.0, lose_reply=0.0)
    seen: list[Executed] = []

    def hook(event: object) -> None:
        if isinstance(event, Executed):
            seen.append(event)

    Semel(layered, hooks=[hook]).execute("k", make_order, "book", 5)
    names: Sequence[str] = [event.scope.operation for event in seen]
    assert names == ["default"]


def mistakes(once: Semel, both: AsyncSemel) -> None:
    """Never called: each line is wrong, and the checkers say so."""
    once.execute(7, make_order, "book", 5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    once.execute("k")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    once.execute("k", 5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    both.execute("k", make_order_async, "book", 5)  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    with once.claim("k") as claim:
        claim.fail(5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with both.claim("k"):  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass
    current_run().step("charge", 5)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    current_async_run().new_id("ord")  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    once.execute("k", make_order, "book", 5, retension=60)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    once.execute("k", make_order, "book", 5, lease="10s")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    once.execute("k", make_order, "book", 5, on_error="retry")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    once.consume("k", make_order, "book", 5, on_unknown="guess")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    once.claim("k", method="run")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    once.once(key=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    once.once(kwargs={})  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    once.peek("k", lease=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    once.resolve("k", release=True, labels={})  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    once.recovery("orders", probe=probe, wait=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Semel("memory://", readable="half")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Semel("memory://", on_unknown="guess")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Semel("memory://", hooks=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Semel("memory://", "acme")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
