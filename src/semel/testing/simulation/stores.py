"""A store behind a network that delays, loses, doubles and reorders: the real model over virtual time."""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from semel import model
from semel.errors import StoreUnavailable
from semel.keys import Scope
from semel.model import Answer, Ask, Kind, Note, Record, Renewal, Settle, Verdict, Won
from semel.runtime import run_sync
from semel.store import Capabilities, Colour, Facts, Page, Query, Unwatch
from semel.stores.memory import MemoryStore
from semel.testing.simulation.auditor import Auditor, name_of
from semel.testing.simulation.history import Call, Look
from semel.testing.simulation.loop import SimLoop, worker_tag

__all__ = ["Link", "Server"]

_NOBODY = contextvars.Context()  # a message under way belongs to nobody


class Server(MemoryStore):
    """The one server of a world: atomic, with a clock of its own, and a past that it can fall back to."""

    def __init__(self, loop: Any, *, tx: bool, lossy: bool) -> None:
        self.skew = 0.0
        self.loop = loop
        super().__init__(capacity=100_000, clock=self._time)
        self.down = False
        self.turned_away = 0
        """Requests that have met a server that was down, since it went down."""
        self.tx = tx
        self.effects: list[tuple[str, bytes]] = []
        self.auditor = Auditor(lossy=lossy)
        self.history: list[Call] = []
        self._lossy = lossy
        self._past: list[tuple[float, Any]] = []
        self.granted_to_copies: dict[bytes, str] = {}
        """Nonces, with the name of the key, that only the network's own copy of a claim was granted: the claim itself had been
        refused, and its sender believes that answer. What we send again follows a lost answer, and is no such copy (R16)."""
        self.refused: set[bytes] = set()
        """Nonces of claims that were not granted."""
        self.granted_late: set[bytes] = set()
        """Those of them that were granted to a copy which arrived after its connection was reset: released soon, not at once."""
        self.spoken: Counter[str] = Counter()
        """Words of people that were taken, by the name of the key: what `history` must tell."""

    def _time(self) -> float:
        now: float = 1_000_000.0 + self.loop.now + self.skew
        return now

    def apply(self, verb: str, argument: Any) -> Any:
        """One request, atomically. Every answer is told to the auditor, item by item."""
        if verb in _READS:
            return _READS[verb](self, argument)
        answer: Any
        if verb == "note":
            answer = self._note(argument)
        elif verb == "purge":
            answer = self._purged(argument)
        else:
            answer = [_DECIDE[verb](self, item) for item in argument]
        if self._lossy:
            state = (dict(self._records), self.auditor.save(), list(self.effects))
            self._past.append((self.loop.now, state))
        return answer

    def _claimed(self, ask: Ask) -> Verdict | Exception:
        verdict = run_sync(MemoryStore.claim(self, (ask,)))[0]
        self.auditor.claimed(ask, verdict, self._time())
        if not isinstance(verdict, Won):
            self.refused.add(ask.nonce)
        return verdict

    def _settled(self, end: Settle) -> Answer | Exception:
        key = end.scope.hash
        before = self._records.get(key)
        answer = run_sync(MemoryStore.settle(self, (end,)))[0]
        took_effect = self.auditor.settled_by(end, answer, before, self._records.get(key), self._time())
        if self.tx and took_effect and end.kind is Kind.DONE and not end.new_nonce:
            self.effects.append((name_of(end.scope), end.result))
        if end.actor and (took_effect or (end.kind is Kind.FORGOTTEN and self._was_there(before, answer))):
            self.spoken[name_of(end.scope)] += 1
        return answer

    def _was_there(self, before: Record | None, answer: Answer | Exception) -> bool:
        return answer is Answer.OK and model.view(before, self._time()) is not None

    def _renewed(self, renewal: Renewal) -> Answer | Exception:
        key = renewal.scope.hash
        before = self._records.get(key)
        answer = run_sync(MemoryStore.renew(self, (renewal,)))[0]
        self.auditor.renewed(renewal, answer, self._records.get(key) is not before, self._time())
        return answer

    def _note(self, note: Note) -> Answer:
        before = self._records.get(note.scope.hash)
        answer = run_sync(MemoryStore.note(self, note))
        self.auditor.noted_down(note, self._records.get(note.scope.hash) is not before, self._time())
        return answer

    def _purged(self, limit: int) -> int:
        before = dict(self._records)
        count = run_sync(MemoryStore.purge(self, limit))
        gone = {key: record for key, record in before.items() if key not in self._records}
        self.auditor.purged(gone, self._records, self._time())
        return count

    def fail_over(self, lost: float) -> bool:
        """A replica takes over that lacks the last `lost` seconds of acknowledged writes; whether there were any."""
        horizon = self.loop.now - lost
        while self._past and self._past[-1][0] > horizon:
            self._past.pop()
        records, audit, effects = self._past[-1][1] if self._past else ({}, ({}, {}, {}, {}), [])
        differs: bool = records != self._records
        self._records, self.effects = dict(records), list(effects)
        self.auditor.restore(audit)
        return differs


_DECIDE: dict[str, Callable[[Server, Any], Any]] = {
    "claim": Server._claimed,
    "settle": Server._settled,
    "renew": Server._renewed,
}
_READS: dict[str, Callable[[Server, Any], Any]] = {
    "peek": lambda server, look: run_sync(MemoryStore.peek(server, look.scope)),
    "scan": lambda server, query: run_sync(MemoryStore.scan(server, query)),
    "watch": lambda server, wanted: run_sync(MemoryStore.watch(server, *wanted)),
}
_WRITTEN_DOWN = frozenset({"claim", "settle", "renew", "note", "peek"})
_SINGLE = frozenset({"note", "peek"})


class Link:
    """One worker's way to the server. A lost message is silence: StoreUnavailable after `timeout`, as in reality."""

    colour: Colour = "async"

    def __init__(
        self,
        server: Server,
        rng: Random,
        *,
        latency: float,
        timeout: float,
        incidents: dict[int, str],
        batches: bool,
        notifies: bool,
        reached: Counter[str],
        lost_wakes: frozenset[int] = frozenset(),
    ) -> None:
        self.capabilities = Capabilities(
            durable=True, shared=True, notifies=notifies, batches=batches, server_clock=True
        )
        self._server = server
        self._rng = rng
        self._latency = latency
        self._timeout = timeout
        self._incidents = incidents
        self._reached = reached
        self._lost_wakes = lost_wakes
        self.calls = 0
        self.wakes = 0
        self.troubled_until = 0.0
        self.told_lost: set[bytes] = set()
        """Nonces whose owner has been told, in an answer that arrived, that they are fenced."""

    def count_post(self, verb: str) -> None:
        self._reached[f"posted@{verb}"] += 1

    async def _send(self, verb: str, argument: Any) -> Any:
        loop: Any = asyncio.get_running_loop()
        if isinstance(loop, SimLoop) and loop.is_stopped(worker_tag.get()):
            # Killed or paused at a point of the very callback that brought us here: nothing leaves any more, or not yet.
            await asyncio.sleep(0)
        self.calls += 1
        incident = self._incidents.get(self.calls, "")
        out, back = self._rng.expovariate(1 / self._latency), self._rng.expovariate(1 / self._latency)
        again = self._rng.uniform(0, 4 * self._latency)
        if incident:
            self._reached[f"{incident}@{verb}"] += 1
            self.troubled_until = loop.now + 2 * self._timeout
        if incident == "late":
            # Too late for its caller, and yet it arrives (a paused server, a slow network).
            out = self._timeout * (1 + self._rng.random())
        elif incident == "reset-late":
            # Left in the server's hands by a connection that is gone: it has all the time in the world.
            again = 2 * self._timeout * self._rng.random()
        arrived: asyncio.Future[Any] = loop.create_future()
        calls = self._written_down(loop, verb, argument)
        message = _Message(self._server, loop, verb, argument, calls)
        message.travel(incident, out, again, back, arrived)
        gives_up = loop.call_later(self._timeout, _silence, arrived)
        try:
            answer = await arrived
        finally:
            gives_up.cancel()
        if isinstance(answer, StoreUnavailable):
            raise answer
        for call, each in zip(calls, (answer,) if verb in _SINGLE else answer if calls else (), strict=True):
            call.returned(loop.now, each)
            if each is Answer.LOST:
                self.told_lost.add(call.item.nonce)
        return answer

    def _written_down(self, loop: Any, verb: str, argument: Any) -> list[Call]:
        if verb not in _WRITTEN_DOWN:
            return []
        items = (argument,) if verb in _SINGLE else argument
        calls = [Call(verb, item, loop.now, witnessed=True) for item in items]
        self._server.history += calls
        return calls

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        answer: list[Verdict | Exception] = await self._send("claim", asks)
        return answer

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        answer: list[Answer | Exception] = await self._send("settle", ends)
        return answer

    async def renew(self, renewals: Sequence[Renewal]) -> list[Answer | Exception]:
        answer: list[Answer | Exception] = await self._send("renew", renewals)
        return answer

    async def note(self, note: Note) -> Answer:
        answer: Answer = await self._send("note", note)
        return answer

    async def peek(self, scope: Scope) -> tuple[Record | None, float]:
        answer: tuple[Record | None, float] = await self._send("peek", Look(scope))
        return answer

    async def watch(self, scope: Scope, wake: Callable[[], None]) -> Unwatch:
        """A subscription is a request like any other, and so is every wake-up on its way back; leaving is silent."""
        if not self.capabilities.notifies:
            return _nothing
        relay = _Relay(self, wake)
        leave: Unwatch = await self._send("watch", (scope, relay.ring))

        async def unwatch() -> None:
            relay.gone = True
            await leave()

        return unwatch

    async def scan(self, query: Query) -> Page:
        answer: Page = await self._send("scan", query)
        return answer

    async def purge(self, limit: int) -> int:
        answer: int = await self._send("purge", limit)
        return answer

    def is_lost_wake(self) -> bool:
        self.wakes += 1
        lost = self.wakes in self._lost_wakes
        if lost:
            self._reached["lose-wake"] += 1
            self.troubled_until = self._server.loop.now
        return lost

    def delay(self) -> float:
        return self._rng.expovariate(1 / self._latency)

    async def facts(self) -> Facts:
        return Facts("simulated")

    async def aclose(self) -> None:
        """Nothing is open."""


class _Message:
    """One request under way, with what the network does to it."""

    __slots__ = ("_argument", "_calls", "_loop", "_server", "_verb")

    def __init__(self, server: Server, loop: Any, verb: str, argument: Any, calls: list[Call]) -> None:
        self._server, self._loop, self._verb, self._argument = server, loop, verb, argument
        self._calls = calls

    def travel(
        self, incident: str, out: float, again: float, back: float, arrived: asyncio.Future[Any]
    ) -> None:
        arrive, silent = self._arrive, 0.0
        match incident:
            case "lose-request":
                return
            case "reset-request":
                self._later(out, _reset, arrived)
            case "lose-reply":
                self._later(out, arrive, None, silent)
            case "reset-reply":
                self._later(out, arrive, None, silent)
                self._later(out + back, _reset, arrived)
            case "reset-late":
                self._later(out, _reset, arrived)
                self._later(out + again, self._arrive_late)
            case "double":
                self._later(out, arrive, arrived, back)
                self._later(out + again, self._arrive_again)
            case _:
                self._later(out, arrive, arrived, back)

    def _later(self, delay: float, then: Callable[..., object], *args: Any) -> None:
        """Under way it belongs to nobody, and goes by nobody's clock."""
        _NOBODY.run(self._loop.call_later, delay, then, *args)

    def _arrive(self, arrived: asyncio.Future[Any] | None, back: float) -> None:
        """It arrives although its sender died. The reply dies with its reader."""
        server = self._server
        if server.down:
            server.turned_away += 1
            return
        answer = server.apply(self._verb, self._argument)
        if server.granted_to_copies and self._verb == "claim":
            for ask in self._argument:  # its sender asks on: now it must be told that the key is his
                server.granted_to_copies.pop(ask.nonce, None)
        now = server._time()
        for call in self._calls:
            call.applied.append(now)
        if arrived is not None:
            self._loop.call_later(back, _reply, arrived, answer)

    def _arrive_late(self) -> None:
        """Its sender knows the answer to another copy."""
        server = self._server
        self._arrive(None, 0.0)
        if self._verb == "claim":
            server.granted_late |= {ask.nonce for ask in self._argument if ask.nonce in server.refused}

    def _arrive_again(self) -> None:
        """The network's own copy: nobody hears its answer."""
        grants = self._server.auditor.grants
        asks = self._argument if self._verb == "claim" and self._calls[0].applied else ()
        refused = [
            ask for ask in asks if (grant := grants.get(ask.scope.hash)) is None or grant.nonce != ask.nonce
        ]
        self._arrive(None, 0.0)
        for ask in refused:
            if (grant := grants.get(ask.scope.hash)) is not None and grant.nonce == ask.nonce:
                self._server.granted_to_copies[ask.nonce] = name_of(ask.scope)


def _reply(arrived: asyncio.Future[Any], answer: Any) -> None:
    if not arrived.done():
        arrived.set_result(answer)


def _silence(arrived: asyncio.Future[Any]) -> None:
    if not arrived.done():
        arrived.set_result(StoreUnavailable("simulated: no answer"))


def _reset(arrived: asyncio.Future[Any]) -> None:
    if not arrived.done():
        arrived.set_result(StoreUnavailable("simulated: connection reset"))


async def _nothing() -> None:
    """Nobody was subscribed: this store wakes nobody across processes."""


class _Relay:
    """Carries wake-ups from the server to one waiter: late, sometimes never, and in the waiter's own worker."""

    __slots__ = ("_context", "_link", "_loop", "_wake", "gone")

    def __init__(self, link: Link, wake: Callable[[], None]) -> None:
        self._link, self._wake = link, wake
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self.gone = False

    def ring(self) -> None:
        if not self._link.is_lost_wake():
            self._loop.call_later(self._link.delay(), self._arrive, context=self._context)

    def _arrive(self) -> None:
        if not self.gone:
            self._wake()
