"""The contract has teeth: each of these stores breaks one promise, and a named clause says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import pytest

from semel.keys import Scope
from semel.model import Answer, Ask, Busy, Kind, Replay, Settle, Verdict, Won
from semel.store import Page, Query, Store, Unwatch
from semel.stores.memory import MemoryStore
from semel.testing.contract import StoreContract

replace = msgspec.structs.replace


class Broken(MemoryStore):
    """Right in all but what a subclass breaks. `_skew` moves its clock, as in any store of ours."""

    def __init__(self) -> None:
        self._skew = 0.0
        super().__init__(clock=lambda: time.time() + self._skew)


class NoFence(Broken):
    """A late owner's outcome is taken whoever holds the key now."""

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        held = [(await self.peek(end.scope))[0] for end in ends]
        return await super().settle(
            [
                replace(end, nonce=record.nonce) if record and end.nonce else end
                for end, record in zip(ends, held, strict=True)
            ]
        )


class NotIdempotent(Broken):
    """A claim whose reply was lost is busy to its own sender."""

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        held = [(await self.peek(ask.scope))[0] for ask in asks]
        verdicts = await super().claim(asks)
        return [
            Busy(1.0, 1) if record and record.nonce == ask.nonce and isinstance(verdict, Won) else verdict
            for ask, record, verdict in zip(asks, held, verdicts, strict=True)
        ]


class NoLock(Broken):
    """Looks, then leaps: two callers may both win."""

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        from semel import model

        verdicts: list[Verdict | Exception] = []
        for ask in asks:
            record, now = await self.peek(ask.scope)
            time.sleep(0.002)
            verdict, changed = model.claim(record, ask, now)
            if changed is not None:
                self._records[ask.scope.hash] = changed
            verdicts.append(verdict)
        return verdicts


class PurgesUnknown(Broken):
    """Cleans up by age alone."""

    async def purge(self, limit: int) -> int:
        old = [key for key, record in self._records.items() if record.updated < self._clock() - 30]
        for key in old:
            del self._records[key]
        return len(old)


class EndlessPurge(Broken):
    """Drops everything at once."""

    async def purge(self, limit: int) -> int:
        return await super().purge(1_000_000)


class LeakyScan(Broken):
    """Shows every tenant's records."""

    async def scan(self, query: Query) -> Page:
        return await super().scan(replace(query, tenant=None))


class BackwardBatch(Broken):
    """Answers a batch in the order of its keys."""

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        return await super().claim(sorted(asks, key=lambda ask: ask.scope.hash))


class Sleepy(Broken):
    """Never wakes anybody."""

    async def watch(self, scope: Scope, wake: Callable[[], None]) -> Unwatch:
        return await super().watch(scope, lambda: None)


class WritesOnReplay(Broken):
    """Counts replays in the record."""

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        verdicts = await super().claim(asks)
        for ask, verdict in zip(asks, verdicts, strict=True):
            if isinstance(verdict, Replay):
                self._records[ask.scope.hash] = replace(verdict.record, updated=self._clock() + 1)
        return verdicts


class CutsResults(Broken):
    """Keeps 64 KiB."""

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        return await super().settle([replace(end, result=end.result[: 1 << 16]) for end in ends])


class ForgetsTrail(Broken):
    """The audit trail goes with the record."""

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        answers = await super().settle(ends)
        for end in ends:
            if end.kind is Kind.FORGOTTEN:
                self._audit.pop(end.scope.hash, None)
        return answers


class ForgetsAnything(Broken):
    """Takes a late copy of a forget for a new one."""

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        return await super().settle(
            [replace(end, nonce=b"") if end.kind is Kind.FORGOTTEN else end for end in ends]
        )


class AllOrNothing(Broken):
    """One bad item fails its whole batch."""

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        for ask in asks:
            "".join((ask.labels or {}).values()).encode()
        return await super().claim(asks)


BITES: list[tuple[type[Broken], str]] = [
    (NoFence, "test_nothing_that_an_overtaken_owner_writes_is_accepted"),
    (NotIdempotent, "test_a_claim_sent_again_wins_again_as_the_same_attempt"),
    (NoLock, "test_of_many_callers_exactly_one_wins"),
    (PurgesUnknown, "test_purge_never_drops_what_lives_or_is_unknown"),
    (EndlessPurge, "test_purge_is_bounded_and_tells_how_many_it_dropped"),
    (LeakyScan, "test_no_tenant_sees_anothers_record"),
    (BackwardBatch, "test_large_batches_are_answered_in_order"),
    (Sleepy, "test_every_end_of_a_run_wakes_its_watchers"),
    (WritesOnReplay, "test_a_done_key_is_replayed_without_a_write"),
    (CutsResults, "test_a_result_of_one_mebibyte_comes_back"),
    (ForgetsTrail, "test_R7_the_trail_outlives_forget_by_one_retention"),
    (ForgetsAnything, "test_R16_a_late_copy_of_a_forget_leaves_the_next_record"),
    (AllOrNothing, "test_one_bad_item_fails_alone"),
]


@pytest.mark.parametrize("broken, clause", BITES, ids=[broken.__name__ for broken, _ in BITES])
def test_a_broken_promise_is_found(
    broken: type[Broken], clause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.testing.contract.bench._WAKE_LIMIT", 0.2)

    class Suite(StoreContract):
        colour = "sync"

        def open(self) -> Store:
            return broken()

    with pytest.raises((AssertionError, UnicodeEncodeError)):
        getattr(Suite(), clause)()


def test_the_right_store_passes_the_same_clauses() -> None:
    class Suite(StoreContract):
        def open(self) -> Store:
            return Broken()

    for clause in dict(BITES).values():
        getattr(Suite(), clause)()
