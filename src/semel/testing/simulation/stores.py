"""A store behind a network that delays, loses, doubles and reorders: the real model over virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeVar

from semel.errors import StoreUnavailable
from semel.keys import Scope
from semel.model import Answer, Ask, Kind, Note, Record, Renewal, Settle, Verdict, Won
from semel.runtime import run_sync
from semel.store import Capabilities, Colour, Facts, Page, Query, Unwatch
from semel.stores.memory import MemoryStore
from semel.testing.simulation.loop import SimLoop, worker_tag

__all__ = ["Link", "Server"]

T = TypeVar("T")


class Server(MemoryStore):
    """The one server of a world: atomic, with a clock of its own, and a past that it can fall back to."""

    def __init__(self, loop: Any, *, tx: bool) -> None:
        self.skew = 0.0
        self._loop = loop
        super().__init__(capacity=100_000, clock=lambda: 1_000_000.0 + loop.time() + self.skew)
        self.down = False
        self.tx = tx
        self.effects: list[tuple[bytes, bytes]] = []
        self.grants: dict[bytes, bytes] = {}
        self.broken: list[str] = []
        self._past: list[tuple[float, Any]] = []

    def apply(self, verb: str, argument: Any) -> Any:
        """One request, atomically. Everything accepted is checked against who was granted the key last."""
        coroutine = getattr(MemoryStore, verb)(self, argument)
        before = dict(self._records)
        answer = run_sync(coroutine)
        self._check(verb, argument, answer, before)
        self._remember(before)
        return answer

    def _check(self, verb: str, argument: Any, answer: Any, before: dict[bytes, Record]) -> None:
        if verb == "claim":
            for ask, verdict in zip(argument, answer, strict=True):
                if type(verdict) is Won:
                    self.grants[ask.scope.hash] = ask.nonce
            return
        items = (argument,) if verb == "note" else argument
        answers = (answer,) if verb == "note" else answer
        for item, said in zip(items, answers, strict=True):
            key = item.scope.hash
            # Items of one batch may be about one key: what is refused has changed nothing.
            changed = said is Answer.OK and self._records.get(key) is not before.get(key)
            owner = self.grants.get(key)
            if changed and not getattr(item, "new_nonce", b"") and item.nonce and item.nonce != owner:
                self.broken.append(f"I5: a fenced owner changed the record by {verb}")
            if changed and verb == "settle" and item.new_nonce:
                self.grants[key] = item.new_nonce
            if self.tx and verb == "settle" and item.kind is Kind.DONE and changed:
                self.effects.append((key, item.nonce))

    def _remember(self, before: dict[bytes, Record]) -> None:
        if self._records != before:
            state = (dict(self._records), dict(self.grants), list(self.effects))
            self._past.append((self._loop.time(), state))

    def fail_over(self, lost: float) -> None:
        """A replica takes over that lacks the last `lost` seconds of acknowledged writes."""
        horizon = self._loop.time() - lost
        state: Any = ({}, {}, [])
        while self._past and self._past[-1][0] > horizon:
            self._past.pop()
        if self._past:
            state = self._past[-1][1]
        self._records, self.grants, self.effects = dict(state[0]), dict(state[1]), list(state[2])


class Link:
    """One worker's way to the server. A lost message is silence: StoreUnavailable after `timeout`, as in reality."""

    colour: Colour = "async"
    capabilities = Capabilities(durable=True, shared=True, notifies=True, server_clock=True)

    def __init__(
        self, server: Server, rng: Random, *, latency: float, timeout: float, incidents: dict[int, str]
    ) -> None:
        self._server = server
        self._rng = rng
        self._latency = latency
        self._timeout = timeout
        self._incidents = incidents
        self.calls = 0
        self.hit: list[str] = []

    async def _send(self, verb: str, argument: Any) -> Any:
        loop = asyncio.get_running_loop()
        if isinstance(loop, SimLoop) and loop.is_stopped(worker_tag.get()):
            # Killed or paused at a point of the very callback that brought us here: nothing leaves any more, or not yet.
            await asyncio.sleep(0)
        self.calls += 1
        incident = self._incidents.get(self.calls, "")
        out, back = self._rng.expovariate(1 / self._latency), self._rng.expovariate(1 / self._latency)
        again = self._rng.uniform(0, 4 * self._latency)
        if incident:
            self.hit.append(incident)
        if incident == "late":
            # Too late for its caller, and yet it arrives (a paused server, a slow network).
            out = self._timeout * (1 + self._rng.random())
        arrived: asyncio.Future[Any] = loop.create_future()
        if incident != "lose-request":
            self._deliver(loop, out, verb, argument, None if incident == "lose-reply" else arrived, back)
        if incident == "double":
            self._deliver(loop, out + again, verb, argument, None, 0)
        try:
            async with asyncio.timeout(self._timeout):
                return await arrived
        except TimeoutError:
            raise StoreUnavailable(f"simulated: {incident or 'no answer'}") from None

    def _deliver(
        self,
        loop: Any,
        delay: float,
        verb: str,
        argument: Any,
        arrived: asyncio.Future[Any] | None,
        back: float,
    ) -> None:
        server = self._server

        def apply() -> None:
            if server.down:
                return
            answer = server.apply(verb, argument)
            if arrived is not None:
                loop.call_later(back, reply, answer)

        def reply(answer: Any) -> None:
            if arrived is not None and not arrived.done():
                arrived.set_result(answer)

        # A message under way belongs to nobody: it arrives although its sender died. The reply dies with its reader.
        _untagged(loop.call_later, delay, apply)

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
        return self._server._records.get(scope.hash), self._server._clock()  # noqa: SLF001 - a look from above

    async def watch(self, scope: Scope, wake: Callable[[], None]) -> Unwatch:
        return await self._server.watch(scope, wake)

    async def scan(self, query: Query) -> Page:
        return await self._server.scan(query)

    async def purge(self, limit: int) -> int:
        return await self._server.purge(limit)

    async def facts(self) -> Facts:
        return Facts("simulated")

    async def aclose(self) -> None:
        """Nothing is open."""


def _untagged(call: Callable[..., T], *args: Any) -> T:
    import contextvars

    context = contextvars.copy_context()
    context.run(worker_tag.set, "")
    return call(*args, context=context)
