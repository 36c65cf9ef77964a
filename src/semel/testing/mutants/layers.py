"""Bugs in the layers around a store: retries, coalescing, cache, batches."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from semel.errors import StoreUnavailable
from semel.layers import batch, cache, coalesce
from semel.layers.batch import Batch
from semel.layers.cache import Cache
from semel.layers.coalesce import Coalesce
from semel.layers.retry import Retry
from semel.model import Answer, Ask, Record, Renewal, Settle
from semel.testing.mutants.plant import Patch, mutant

__all__: list[str] = []

replace = msgspec.structs.replace


@mutant("lease-sent-short", check="I1")
def _lease_sent_short() -> Sequence[Patch]:
    """Heartbeats extend the lease by a tenth of what was asked for."""

    async def renew(self: Retry, renewals: Sequence[Renewal]) -> Any:
        short = [replace(renewal, lease=renewal.lease / 10) for renewal in renewals]
        return await self._batch(self.inner.renew, short)

    return [(Retry, "renew", renew)]


@mutant("answers-of-a-beat-mixed", check="R17", workload="beats")
def _answers_of_a_beat_mixed() -> Sequence[Patch]:
    """The answers to heartbeats that travelled together are handed out in another order: the wrong run is stopped."""
    real = Retry.renew

    async def renew(self: Retry, renewals: Sequence[Renewal]) -> Any:
        return list(reversed(await real(self, renewals)))

    return [(Retry, "renew", renew)]


@mutant("resent-with-another-nonce", check="R16")
def _resent_with_another_nonce() -> Sequence[Patch]:
    """A claim is sent again under a new nonce: the first one, if granted, blocks it."""

    async def claim(self: Retry, asks: Sequence[Ask]) -> Any:
        start = self._now()
        try:
            return await self.inner.claim(asks)
        except StoreUnavailable:
            if self._now() - start > self._patience:
                raise
            fresh = [replace(ask, nonce=hashlib.sha256(ask.nonce).digest()[:16]) for ask in asks]
            return await self.inner.claim(fresh)

    return [(Retry, "claim", claim)]


@mutant("follower-of-another-request", check="I6")
def _follower_of_another_request() -> Sequence[Patch]:
    """A follower in the same process gets the leader's result without a look at its request."""
    return [(coalesce, "conflicts", lambda *_: False)]


@mutant("cache-kept", check="R31")
def _cache_kept() -> Sequence[Patch]:
    """A cached outcome is neither dropped nor does it age."""
    real = Cache.__init__

    def init(self: Cache, inner: Any, runtime: Any, **options: Any) -> None:
        real(self, inner, runtime, **options)
        self._ttl = 1_000.0

    return [
        (Cache, "__init__", init),
        (Cache, "_drop", lambda *_: None),
        (Cache, "_dropper", lambda *_: lambda: None),
    ]


@mutant("cache-blind-to-requests", check="I6")
def _cache_blind_to_requests() -> Sequence[Patch]:
    """A cached outcome is replayed to every request."""
    return [(cache, "conflicts", lambda *_: False)]


@mutant("wrong-answers-in-a-batch", check="I7")
def _wrong_answers_in_a_batch() -> Sequence[Patch]:
    """The verdicts of a batch are handed out in another order."""
    real = Batch.__init__

    def init(self: Batch, inner: Any, *args: Any) -> None:
        async def backwards(asks: Sequence[Ask]) -> Any:
            return list(reversed(await inner.claim(asks)))

        real(self, inner, *args)
        self._claims._verb = backwards

    return [(Batch, "__init__", init)]


@mutant("cancelled-leader-keeps-the-lead", check="I15")
def _cancelled_leader_keeps_the_lead() -> Sequence[Patch]:
    """A leader that is cancelled while its claim is under way wakes nobody: its followers wait for it for ever."""
    real = Coalesce._land

    def land(self: Coalesce, key: bytes, flight: Any, record: Record | None) -> None:
        if not isinstance(sys.exception(), asyncio.CancelledError):
            real(self, key, flight, record)

    return [(Coalesce, "_land", land)]


@mutant("follower-told-a-refused-result", check="I3")
def _follower_told_a_refused_result() -> Sequence[Patch]:
    """Followers are told what their leader wanted to store, also when the store has refused it."""
    real = Coalesce._settled

    def settled(self: Coalesce, flight: Any, end: Settle, answer: Answer) -> None:
        del answer
        real(self, flight, end, Answer.OK)

    return [(Coalesce, "_settled", settled)]


@mutant("cache-outlives-retention", check="I11")
def _cache_outlives_retention() -> Sequence[Patch]:
    """A cached outcome is replayed for its second, also when its retention ends before."""
    real = Cache._keep

    async def keep(self: Cache, ask: Ask, record: Record) -> None:
        await real(self, ask, replace(record, expires=float("inf")))

    return [(Cache, "_keep", keep)]


@mutant("batch-keeps-a-cancelled-place", check="I9")
def _batch_keeps_a_cancelled_place() -> Sequence[Patch]:
    """A caller that is cancelled while it carries its item itself never gives its place back."""
    real = batch._Queue._go_on

    def go_on(self: Any, *args: Any) -> None:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            self._flying += 1
        real(self, *args)

    return [(batch._Queue, "_go_on", go_on), (batch, "IN_FLIGHT", 1)]


@mutant("batch-cancelled-as-a-whole", check="R10")
def _batch_cancelled_as_a_whole() -> Sequence[Patch]:
    """One caller that leaves a batch cancels the others in it."""
    real = batch._Queue._fly

    async def fly(self: Any, flight: Any, *args: Any) -> None:
        futures = [waiter.future for waiter in flight.waiters]
        for future in futures:
            future.add_done_callback(
                lambda left: [each.cancel() for each in futures] if left.cancelled() else None
            )
        await real(self, flight, *args)

    return [(batch._Queue, "_fly", fly)]


@mutant("cancelled-leader-is-followed", check="R31", workload="leads")
def _cancelled_leader_is_followed() -> Sequence[Patch]:
    """A leader that was cancelled has released its key, and yet callers in its process go on following it."""
    real_settle = Coalesce.settle

    async def settle(self: Coalesce, ends: Sequence[Settle]) -> Any:
        if any(end.error is not None and end.error.type == "CancelledError" for end in ends):
            return await self.inner.settle(ends)
        return await real_settle(self, ends)

    return [(Coalesce, "settle", settle)]
