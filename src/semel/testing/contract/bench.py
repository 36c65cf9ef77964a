"""What a clause of the contract works with: one store, unused names, a clock that can be moved, helpers that speak plainly.

A clause is written once, as a coroutine. `clause` turns it into an ordinary test method that runs it in the store's
colour: sync stores without an event loop, async ones in a loop of the test's own, stores of both colours twice.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, Literal, Protocol, TypeVar
from unittest import SkipTest

from semel.keys import Scope, make_scope
from semel.model import (
    Answer,
    Ask,
    Event,
    Failure,
    Kind,
    Note,
    Policy,
    Record,
    Renewal,
    Settle,
    State,
    Verdict,
    Won,
    view,
)
from semel.runtime import run_sync
from semel.store import Colour, Page, Query, Store

__all__ = ["LEASE", "RETENTION", "Bench", "SkipTest", "Suite", "clause", "in_colour", "step"]

T = TypeVar("T")
LEASE = 10.0
RETENTION = 40.0
_REAL_UNIT = 0.04  # where the clock cannot be moved the suite waits, so ten "seconds" are 0.4 of them
_WAKE_LIMIT = 10.0  # a wake-up that takes longer has not come
_START_LIMIT = 60.0  # for all callers to be there: nothing but a busy machine is waited for
_NEAR = 4.0  # no clause tells spans apart that differ by less than five


class Suite(Protocol):
    """What a test class tells the bench."""

    colour: Colour | None

    def open(self) -> Store: ...

    def shift(self, store: Store, seconds: float) -> bool: ...

    def spoil(self, store: Store, scope: Scope) -> bool: ...


class Bench:
    """All spans are in units: seconds where the clock can be moved, a fraction of one where it must be waited for."""

    def __init__(self, suite: Suite, colour: Literal["sync", "async"]) -> None:
        self._suite = suite
        self._stores: list[Store] = []
        self._shifted = 0.0
        self.colour = colour
        self.store = self.open()
        self.moves = suite.shift(self.store, 0.0)
        self.unit = 1.0 if self.moves else _REAL_UNIT
        self.tenant = f"tenant-{secrets.token_hex(6)}"

    def open(self) -> Store:
        """Another store on the same data (the same data only where it is `shared`), at the same time of day."""
        store = self._suite.open()
        self._stores.append(store)
        if self._shifted:
            self._suite.shift(store, self._shifted)
        return store

    async def aclose(self) -> None:
        for store in self._stores:
            await store.aclose()

    def needs(self, capability: str) -> None:
        """Skip the clause, visibly, when the store does not claim to do this."""
        if not getattr(self.store.capabilities, capability):
            raise SkipTest(f"{type(self.store).__name__} does not claim {capability!r}")

    def spoil(self, scope: Scope) -> None:
        """Make a stored record unreadable, or skip the clause where the suite does not know how."""
        if not self._suite.spoil(self.store, scope):
            raise SkipTest("spoil() is not given: nothing here can make a record unreadable")

    # ---------------------------------------------------------------------------------------- names and messages

    def scope(self, key: str = "key", *, operation: str = "op", tenant: str | None = None) -> Scope:
        return make_scope("contract", tenant or self.tenant, operation, key)

    def ask(
        self,
        scope: Scope | None = None,
        *,
        nonce: bytes | None = None,
        lease: float = LEASE,
        retention: float = RETENTION,
        policy: Policy = Policy.RETRY,
        fingerprint: bytes = b"",
        **more: Any,
    ) -> Ask:
        return Ask(
            scope=self.scope() if scope is None else scope,
            nonce=secrets.token_bytes(16) if nonce is None else nonce,
            lease=lease * self.unit,
            retention=retention * self.unit,
            policy=policy,
            fingerprint=fingerprint,
            **more,
        )

    def end(
        self,
        ask: Ask,
        kind: Kind = Kind.DONE,
        *,
        retention: float = RETENTION,
        tombstone: float = 0.0,
        after: float = 0.0,
        **more: Any,
    ) -> Settle:
        more.setdefault("nonce", ask.nonce)
        return Settle(
            scope=ask.scope,
            kind=kind,
            retention=retention * self.unit,
            tombstone=tombstone * self.unit,
            after=after * self.unit,
            **more,
        )

    def word(
        self, ask: Ask, kind: Kind, *, actor: str = "ada", reason: str = "looked", **more: Any
    ) -> Settle:
        """A person's decision about a key: a settle that changes the nonce."""
        more.setdefault("new_nonce", secrets.token_bytes(16))
        return self.end(ask, kind, actor=actor, reason=reason, **more)

    # ---------------------------------------------------------------------------------------- verbs, one at a time

    async def claim(self, ask: Ask) -> Verdict:
        (verdict,) = await self.store.claim([ask])
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    async def win(self, scope: Scope | None = None, **options: Any) -> Ask:
        """Claim and insist on winning."""
        ask = self.ask(scope, **options)
        verdict = await self.claim(ask)
        assert isinstance(verdict, Won), f"expected to win {ask.scope!r}, got {verdict}"
        return ask

    async def settle(self, end: Settle) -> Answer:
        (answer,) = await self.store.settle([end])
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def finish(self, ask: Ask, kind: Kind = Kind.DONE, **options: Any) -> None:
        """Settle and insist on being accepted."""
        answer = await self.settle(self.end(ask, kind, **options))
        assert answer is Answer.OK, f"{kind} was answered {answer}"

    async def settled(self, kind: Kind, scope: Scope | None = None, **options: Any) -> Ask:
        """A key that ran once and ended so."""
        ask = await self.win(scope)
        await self.finish(ask, kind, **options)
        return ask

    async def forget(self, scope: Scope, *, actor: str = "", reason: str = "", nonce: bytes = b"") -> Answer:
        end = Settle(scope, nonce, Kind.FORGOTTEN, RETENTION * self.unit, actor=actor, reason=reason)
        return await self.settle(end)

    async def renew(self, ask: Ask, *, lease: float = LEASE, retention: float = RETENTION) -> Answer:
        renewal = Renewal(ask.scope, ask.nonce, lease * self.unit, retention * self.unit)
        (answer,) = await self.store.renew([renewal])
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def note(self, ask: Ask, body: bytes) -> Answer:
        return await self.store.note(Note(ask.scope, ask.nonce, step(body)))

    async def peek(self, scope: Scope) -> Record | None:
        """The record as stored, None when it reads as never used."""
        record, now = await self.store.peek(scope)
        return None if view(record, now) is None else record

    async def record(self, scope: Scope) -> Record:
        record = await self.peek(scope)
        assert record is not None, f"there is no record of {scope!r}"
        return record

    async def state(self, scope: Scope) -> State | None:
        record, now = await self.store.peek(scope)
        return view(record, now)

    async def now(self) -> float:
        return (await self.store.peek(self.scope("clock")))[1]

    async def history(self, scope: Scope) -> Sequence[Event]:
        return (await self.store.scan(Query(history=scope))).events

    async def found(self, **query: Any) -> list[str]:
        """The keys that a scan of this bench's tenant finds, over all pages."""
        return [_key(record) for page in await self.pages(**query) for record in page.records]

    async def pages(self, **query: Any) -> list[Page]:
        query.setdefault("tenant", self.tenant)
        pages = [await self.store.scan(Query(**query))]
        while pages[-1].cursor:
            assert len(pages) < 1000, "the scan's cursor never ends"
            pages.append(await self.store.scan(Query(**query, cursor=pages[-1].cursor)))
        return pages

    # ---------------------------------------------------------------------------------------- time

    async def wait(self, units: float) -> None:
        """Let `units` pass on the store's clock."""
        seconds = units * self.unit
        if self.moves:
            self._shifted += seconds
            for store in self._stores:
                self._suite.shift(store, seconds)
        elif self.colour == "async":
            await asyncio.sleep(seconds)
        else:
            time.sleep(seconds)  # noqa: ASYNC251 - a sync store's coroutines never meet a loop

    def near(self, first: float | None, second: float) -> bool:
        """Equal times, as far as two calls after one another can be."""
        return first is not None and abs(first - second) <= max(_NEAR * self.unit, 0.5)

    # ---------------------------------------------------------------------------------------- several callers

    async def together(self, calls: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
        """Run all calls at once: threads for a sync store, tasks for an async one."""
        if self.colour == "async":
            return list(await asyncio.gather(*(call() for call in calls)))
        gate = threading.Barrier(len(calls))

        def run(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
            gate.wait(_START_LIMIT)
            return run_sync(call())

        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(run, calls))

    async def woken(self, event: threading.Event) -> bool:
        """Whether `event` is set soon, without stopping the loop that may set it."""
        if self.colour == "async":
            return await asyncio.to_thread(event.wait, _WAKE_LIMIT)
        return event.wait(_WAKE_LIMIT)


def step(body: bytes) -> bytes:
    """An entry as `semel.steps` writes them: with its length first, so that a layer can tell entries apart."""
    return len(body).to_bytes(4, "big") + body


def _key(record: Record) -> str:
    assert record.scope is not None, "a scanned record must carry its scope"
    return record.scope.key


def in_colour(colour: Literal["sync", "async"], main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine without a loop, or in one of its own."""
    return run_sync(main()) if colour == "sync" else asyncio.run(main())


def clause(body: Callable[[Any, Bench], Awaitable[None]]) -> Callable[[Any], None]:
    """Make a test method of a coroutine that takes a `Bench`."""

    @wraps(body)
    def test(self: Any) -> None:
        for colour in _colours(self):

            async def main(colour: Literal["sync", "async"] = colour) -> None:
                bench = Bench(self, colour)
                try:
                    await body(self, bench)
                finally:
                    await bench.aclose()

            in_colour(colour, main)

    # pytest would look through __wrapped__ and take `bench` for a fixture.
    del test.__wrapped__
    return test


def _colours(suite: Suite) -> tuple[Literal["sync", "async"], ...]:
    """The colour that the class names, else the store's own; a store of both is tested in both."""
    colour = suite.colour or suite.open().colour
    return ("sync", "async") if colour == "both" else (colour,)


FAILURE = Failure("PaymentDeclined", "card_declined", "the card was declined")
LABELS: Mapping[str, str] = {"scene": "checkout", "source": "web"}
