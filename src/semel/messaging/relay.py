"""The relay: carries messages from the outbox to their sinks, each once where the sink allows it, in order per key.

    hold parts ──▶ delete what was delivered, choose rows, write the manifest ──▶ commit ──▶ publish ──▶ again
                    └ one transaction, under the part's epoch ┘                     └ under the batch's number and epoch

A relay that dies leaves a manifest; its heir sends it again under the same number, and the sink knows whether it has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from typing import Any, Final, Never

from sqlalchemy.exc import DBAPIError

from semel.closing import Closeable
from semel.errors import ConfigurationError, StoreUnavailable
from semel.messaging.arguments import emitter, pauses, refuse_unknown
from semel.messaging.carrier import Carrier
from semel.messaging.database import Database
from semel.messaging.desk import give_up
from semel.messaging.events import Alarm, Backlog, GivenUp, RelayEvent, log_event
from semel.messaging.hearing import hear
from semel.messaging.listening import Listener
from semel.messaging.membership import Membership
from semel.messaging.message import Message
from semel.messaging.outages import Outage
from semel.messaging.outbox import Outbox
from semel.messaging.pages import Ledger, Line, Page
from semel.messaging.parts import Part
from semel.messaging.pauses import waited
from semel.messaging.planning import Limits
from semel.messaging.rivals import Rivals
from semel.messaging.routes import Router
from semel.messaging.scopes import Scope
from semel.messaging.tally import Report
from semel.messaging.teams import bind, check, check_scope, team_of
from semel.messaging.tidying import Tidying, patiently

__all__ = ["Relay", "Report"]

_POLL: Final = (0.005, 0.25)
_TRIES: Final = 3  # of a sink that is away, before drain() gives it up
_PATIENCE: Final = 5.0


class Relay(Closeable):
    """`Relay(outbox, {"orders": "redis://…?stream=orders"})`, then `await relay.run()` or `await relay.drain()`.

    Routes map topic patterns to a sink, a sink's URL, a function, a Route, or a list of them. Any number of relays share the
    parts of an outbox: each part has one owner at a time, for as long as it says so within `lease` seconds. `batch` is how
    many rows travel in one publish, `max_attempts` after how many rejections a message parks its key, `backoff` the first and
    longest delay between them. `sink_safety` keeps delivered batches for so many seconds, to send them again if a sink turns
    out to have lost them. `listen` is a URL for `Outbox(notify=True)` to be heard at, if the outbox's own leads through a pooler
    that keeps no session. `fair` lets tenants take turns, so that one with a long backlog does not hold up the others. `topics` and `tenants` limit the relay to these; it then needs a `name`. Two names
    must not carry the same messages: a relay that finds another such one alive is refused when it starts.
    """

    def __init__(
        self,
        outbox: Outbox,
        routes: Mapping[str, Any],
        *,
        lease: float | timedelta = 10,
        batch: int = 500,
        max_attempts: int = 10,
        backoff: tuple[float, float] = (1, 300),
        sink_safety: float | timedelta = 0,
        topics: Collection[str] = (),
        tenants: Collection[str] = (),
        name: str | None = None,
        loops: int = 2,
        poll: tuple[float, float] = _POLL,
        listen: str | None = None,
        fair: bool = True,
        hooks: Collection[Callable[[RelayEvent], None]] = (log_event,),
        **unknown: Never,
    ) -> None:
        refuse_unknown(Relay, unknown)
        given: Any = outbox
        if not isinstance(given, Outbox):
            raise ConfigurationError(
                f'a relay carries the messages of an Outbox: Relay(Outbox("…"), …), not Relay({type(given).__name__}, …)'
            )
        self.lease = check(lease=lease, batch=batch, max_attempts=max_attempts, loops=loops)
        safety = check_scope(name, topics, tenants, sink_safety)
        self.outbox = outbox
        self.id = secrets.token_hex(8)
        self.team = name or team_of(topics, tenants)
        self._poll = pauses("poll", poll)
        self._listen = listen
        self._loops = loops
        self._emit = emitter(hooks)
        first = pauses("backoff", backoff)
        limits = Limits(batch, max_attempts, first, safety, tuple(topics), tuple(tenants), fair)
        self.router = Router(routes)
        self._ledger: Ledger = outbox.home.ledger(self.team)
        self._carrier = Carrier(self._ledger, self.router, limits, self._emit, self._wake_up)
        self._tidying = Tidying(outbox, self._ledger, self._carrier, self._emit)
        self._outage = Outage(self._emit, quiet=self.lease / 6)
        self._wakes: list[asyncio.Event] = []
        place = f"{socket.gethostname()}:{os.getpid()}"
        scope = Scope(place, self.router.patterns, tuple(topics), tuple(tenants))
        self._membership = Membership(
            outbox,
            self._ledger,
            self._carrier.holdings,
            relay=self.id,
            about=scope.told(),
            lease=self.lease,
            emit=self._emit,
        )
        self._rivals = Rivals(self._ledger, self.team, self.id, scope, self._emit)
        self._bound = False
        self._busy = False

    @property
    def report(self) -> Report:
        """Counts since the relay was made, or since `drain` began."""
        return self._carrier.tally.report

    @property
    def horizon(self) -> float:
        """How long after its first attempt a message may still be sent by itself, in seconds, if nothing is away: a sink that
        does not answer, and relays that do not run, are waited for without an end (`Windows.of(…, outage=)`)."""
        limits = self._carrier.limits
        first, most = limits.backoff
        delays = sum(min(most, first * 2 ** min(n, 40)) for n in range(limits.max_attempts - 1))
        return float(delays + limits.sink_safety + self.lease)

    @property
    def parts(self) -> list[int]:
        """The parts that this relay owns now."""
        return sorted(self._carrier.parts)

    @property
    def silence(self) -> float | None:
        """Seconds since the database last took a heartbeat; beyond the lease, others may have the parts. None: never."""
        return self._membership.silence

    @property
    def paused(self) -> list[str]:
        """The routes whose sink is away, with the endpoint if it is one of several; and those that something is under way to
        but that are not there any more."""
        return self._carrier.away.names + [
            f"{lane} (no such route)" for lane in sorted(self._carrier.stranded)
        ]

    # ---------------------------------------------------------------------------------------------- run
    async def run(self) -> None:
        """Carry until cancelled. Then what is under way is finished, and the parts are given back.

        A database that is away, at the start as well, is waited for. One that will not have us, or has no tables, is a
        ConfigurationError at once.
        """
        with self._alone():
            await self._run()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self._busy:
            raise ConfigurationError(
                "this relay runs already: it is one member of its team. Make another Relay for a second run() or drain()"
            )
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        stopping = asyncio.Event()
        self._wakes = [asyncio.Event() for _ in range(self._loops)]
        waker = self.outbox.on_wake(lambda: loop.call_soon_threadsafe(self._wake_up))
        tasks: list[asyncio.Task[None]] = []
        try:
            await patiently(self._start, self.outbox, self._emit)
            tasks = [loop.create_task(self._work(number, stopping)) for number in range(self._loops)]
            tasks += [
                loop.create_task(self._heartbeats(stopping)),
                loop.create_task(self._tidying.run(stopping)),
                loop.create_task(hear(self.outbox, self._wake_up, self._emit, stopping)),
            ]
            if self.outbox.channel is not None:
                tasks.append(loop.create_task(self._listening(self.outbox.channel, stopping)))
            # Not gather: that would cancel a worker in the middle of its round when this is cancelled.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            del waker
            stopping.set()
            self._wake_up()
            await asyncio.shield(self._finish(tasks))

    async def _listening(self, channel: str, stopping: asyncio.Event) -> None:
        """Be woken by commits of other processes; `listen` is another way to the server, around a pooler."""
        own = None if self._listen is None else Database(self._listen)
        try:
            await Listener(own or self.outbox.database, channel, self._wake_up, self._emit).run(stopping)
        finally:
            if own is not None:
                own.close()

    def _wake_up(self) -> None:
        for event in self._wakes:
            event.set()

    async def _finish(self, tasks: list[asyncio.Task[None]]) -> None:
        """What is under way ends by itself, what it writes included; then the parts go back."""
        if tasks:
            await asyncio.wait(tasks, timeout=self.lease)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stop()

    async def drain(self) -> Report:
        """Send what is due and return what was done. Parts of a relay that died are waited for, at most its lease.

        A sink that is away is tried a few times and then left; keys that back off are not waited for.
        """
        self._carrier.tally.report = Report()
        self._carrier.planning.unknown.clear()
        self._carrier.away.try_again()
        with self._alone():
            try:
                await self._start()
                await self._drain()
            finally:
                await asyncio.shield(self._stop())
            await self._tidying.once()
        report = self._carrier.tally.report
        report.pending = await self._ledger.read(lambda page: page.pending())
        report.parked = len(await self.parked())
        report.unroutable = tuple(sorted(self._carrier.planning.unknown))
        report.unavailable = tuple(self.paused)
        return report

    async def _drain(self) -> None:
        stopping = asyncio.Event()
        beat = asyncio.get_running_loop().create_task(self._heartbeats(stopping))
        try:
            patience = await self._membership.others_end()
            while True:
                emptied = set(self._carrier.holdings.held)  # a heartbeat may take more meanwhile
                await asyncio.gather(*(self._empty(number) for number in range(self._loops)))
                others = await self._others_have_something()
                over = time.monotonic() > patience  # then, and not before, it shows whether they live
                if others:
                    await self._membership.rebalance()
                if not emptied.issuperset(self._carrier.holdings.held):
                    continue
                if over or not others:  # they do: what they hold is theirs to send
                    return
                await asyncio.sleep(0.05)
        finally:
            stopping.set()
            await asyncio.gather(beat, return_exceptions=True)

    async def _empty(self, number: int) -> None:
        """Rounds until nothing moves, and no sink that is away is worth another try."""
        carrier = self._carrier
        while True:
            mine = self._mine(number)
            if await carrier.round(mine):
                continue
            if carrier.under_way(mine):
                await carrier.landing(mine, all_of_them=False)
                continue
            waiting = [pause for pause in carrier.away.pauses if pause.times < _TRIES]
            if not waiting or not carrier.parts:
                return
            left = min(pause.until for pause in waiting) - time.monotonic()
            if left > _PATIENCE:  # it asked to be left alone for longer than anybody waits for a drain
                return
            await asyncio.sleep(max(0.01, left))

    async def _others_have_something(self) -> bool:
        others = [part for part in range(self.outbox.parts) if part not in self._carrier.parts]
        want = self._carrier.planning.want(others)
        return await self._ledger.read(lambda page: page.waiting(want))

    # ---------------------------------------------------------------------------------- start and stop
    async def _start(self) -> None:
        self._membership.begin()
        await self._rivals.settle(self._membership.join)
        if not self._bound:
            for target in self.router.targets:
                bind(target, f"{self.outbox.home.identity[:16]}:{self.team}")
                if (attach := getattr(target.sink, "attach", None)) is not None:
                    attach(self.outbox.bodies)
            self._bound = True
        await self._membership.rebalance()

    async def _stop(self) -> None:
        carrier = self._carrier
        parts = [part for part in carrier.holdings.held if part.outcome or part.dirty]
        try:
            if parts:
                await self._ledger.run(carrier.holdings.settle, parts)
            await self._membership.leave()
        except (
            StoreUnavailable,
            DBAPIError,
        ) as error:  # the lease ends by itself, and the manifest is written
            self._emit(Alarm("database", f"the parts could not be given back: {error}"))
        for part in carrier.holdings.held:
            carrier.holdings.drop(part)

    async def aclose(self) -> None:
        """Close the sinks that were opened here."""
        await self.router.aclose()

    def close(self) -> None:
        """As `aclose`, as a plain call: not inside of a running event loop."""
        self.router.close()

    # ------------------------------------------------------------------------------------------ working
    async def _heartbeats(self, stopping: asyncio.Event) -> None:
        while not await waited(stopping, self.lease / 3):
            try:
                await self._membership.join()
                await self._rivals.check()
                await self._membership.rebalance()
                self._carrier.away.prune(self._carrier.holdings.held)
                self._outage.answered()
            except (StoreUnavailable, DBAPIError) as error:
                self._outage.missed(error)

    def _mine(self, number: int) -> list[Part]:
        return [part for part in self._carrier.holdings.held if part.number % self._loops == number]

    async def _work(self, number: int, stopping: asyncio.Event) -> None:
        idle, wake = self._poll[0], self._wakes[number]
        while not stopping.is_set():
            wake.clear()  # before the look: what is committed during it is not slept over
            try:
                mine = self._mine(number)
                leaving = [part for part in mine if part.leaving and not self._carrier.under_way([part])]
                await self._membership.hand_over(leaving)
                moved = await self._carrier.round(self._mine(number))
            except (StoreUnavailable, DBAPIError) as error:
                self._outage.missed(error)
                moved, idle = False, self._poll[1]
            if moved:
                idle = self._poll[0]
                continue
            idle = self._poll[0] if await waited(wake, idle) else min(self._poll[1], idle * 1.5)
        await self._carrier.landing(self._mine(number))

    # ------------------------------------------------------------------------------------ for operators
    async def backlog(self) -> Backlog:
        """What waits and what is held back, told to the hooks too. It counts the rows: ask now and then, not all the time."""
        parked, backing_off, pending, oldest = await self._ledger.run(_waiting)
        if lost := await self._ledger.read(lambda page: page.strays(self.outbox.parts)):
            self._emit(
                Alarm(
                    "parts",
                    f"{lost} messages are in parts that this outbox, which has {self.outbox.parts}, does not have: an Outbox of another "
                    f"database wrote them here. Set their part below {self.outbox.parts}, there and in {self.outbox.table}_outbox_ids, to send them",
                )
            )
        unroutable = tuple(sorted(self._carrier.planning.unknown & pending.keys()))
        found = Backlog(pending, oldest, parked, backing_off, unroutable, len(self._carrier.parts))
        self._emit(found)
        return found

    async def parked(self) -> list[Line]:
        """Keys that are parked, with the message at their head and the reason, oldest first."""
        return [line for line in await self._ledger.run(_lines) if line.until is None]

    async def backing_off(self) -> list[Line]:
        """Keys that wait for their next attempt."""
        return [line for line in await self._ledger.run(_lines) if line.until is not None]

    async def replay(
        self,
        *,
        key: str | None = None,
        tenant: str | None = None,
        id: str | None = None,  # noqa: A002 - the word that people use
    ) -> int:
        """Try parked keys again from their first message, in order: all, or those of a key, tenant or message id."""
        count = await self._ledger.run(lambda page: page.unpark(key=key, tenant=tenant, identity=id))
        self._wake_up()
        return count

    async def delete(self, ids: Collection[str]) -> list[Message]:
        """Give parked messages up for good, and have them: what follows them under their keys flows on. Only a message at
        the head of a parked key is taken out; the others are left alone, and are not in the answer."""
        done = await give_up(self._ledger, ids)
        for row in done.rows:
            self._emit(GivenUp(row.tenant, row.key, row.topic, row.id))
        self._wake_up()
        return [row.message() for row in done.rows]


def _waiting(page: Page) -> tuple[int, int, dict[str, int], float]:
    lines = page.lines()
    parked = sum(line.until is None for line in lines)
    return parked, len(lines) - parked, page.pending(), page.oldest()


def _lines(page: Page) -> list[Line]:
    return page.lines()
