"""The async colour: per event loop, one shared connection per node and lane.

Connections belong to the loop that runs when they are first needed and are closed with it, so `asyncio.run` twice
in a row works. After a fork the child leaves the parent's connections untouched and makes its own.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

from redis import exceptions as driver

from semel.errors import ConfigurationError, StoreUnavailable
from semel.forks import survive_fork
from semel.running import clock_of, runs_here
from semel.stores.posted import Posted
from semel.stores.redis.address import Endpoint, Target, connection
from semel.stores.redis.calls import Arg, Call, Lane, Script, Unwatch
from semel.stores.redis.courier import Courier, Parcel, Trouble, pack
from semel.stores.redis.errors import NotSent, Overdue, ServerError
from semel.stores.redis.watch_loops import LoopWatcher
from semel.stores.redis.wire import Wire, forget

__all__ = ["Home", "LoopLink"]

_WIRE_OF: Final = (0, 1, 0, 2)  # by lane: RENEW rides on MAIN's wire
_UNTRIED: Final = object()
# What a forked child inherited. Kept alive on purpose: finalizing a transport would touch the epoll set and the
# socket that parent and child share.
_inherited: Final[list[object]] = []


class Home:
    """What a link has on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.now = clock_of(loop)
        self.wires: tuple[dict[Endpoint, Wire], ...] = ({}, {}, {})
        self.main: Wire | None = None  # the wire of the last post, and where it goes
        self.main_node: Endpoint | None = None
        self.watcher: LoopWatcher | None = None
        self.closed = False
        self._guard = self._until_the_loop_ends()
        self._ended = False
        self._closing: asyncio.Task[None] | None = None

    async def _until_the_loop_ends(self) -> AsyncGenerator[None]:
        # A loop closes its async generators before it closes itself: the one public hook for "closed with it".
        try:
            yield
        finally:
            await self._close_all()

    async def settle_in(self) -> None:
        await anext(self._guard)

    async def _close_all(self) -> None:
        self.closed = True
        watcher, self.watcher = self.watcher, None
        if watcher is not None:
            await watcher.aclose()
        wires = [wire for lane in self.wires for wire in lane.values()]
        for lane in self.wires:
            lane.clear()
        for wire in wires:
            await wire.aclose()

    async def aclose(self) -> None:
        await self._close_all()
        if not self._ended:  # of several closers one ends the generator
            self._ended = True
            await self._guard.aclose()

    def begin_closing(self) -> None:
        self._closing = self.loop.create_task(
            self.aclose()
        )  # kept: the loop itself keeps a weak reference only


class LoopLink(Courier):
    """See `Link`. Safe to use from several loops in several threads; each has its own connections."""

    colour: Literal["async"] = "async"

    def __init__(
        self,
        target: Target,
        *,
        timeout: float,
        connect_timeout: float,
        cap: int,
        max_queued_bytes: int,
        ping_every: float,
    ) -> None:
        super().__init__(target, timeout=timeout, connect_timeout=connect_timeout)
        self._patience = timeout / 2  # of a first try: see Parcel.patience
        self._ping_every = ping_every
        self._cap = cap
        self._max_queued_bytes = max_queued_bytes
        self._homes: dict[int, Home] = {}
        self._home: Home | None = None
        self._closed = False
        survive_fork(self, LoopLink._leave_behind)

    # ------------------------------------------------------------------------------------ calls
    async def call(
        self,
        script: Script,
        keys: Sequence[bytes],
        args: Sequence[Arg] = (),
        *,
        lane: Lane = Lane.MAIN,
        timeout: float | None = None,
        resend: bool = True,
        acks: int = 0,
        ack_timeout: float = 1.0,
    ) -> Any:
        if timeout is None:
            timeout = self._timeout
        home = self._home
        if home is None or home.closed or home.loop is not asyncio.get_running_loop():
            home = await self._enter()
        now = home.loop.time()
        deadline = now + timeout
        trouble: Trouble | None = None
        node = self._topology.locate(keys[0] if keys else None)
        if node is not None and not acks:
            packed = pack((b"EVALSHA", script.sha1, len(keys), *keys, *args))
            wire = home.wires[_WIRE_OF[lane]].get(node)
            if wire is None or wire.dead:
                wire = self._wire(home, lane, node)
            try:
                reply = await wire.send(packed, now, timeout / 2, deadline, urgent=lane is Lane.RENEW)
            except (NotSent, Overdue) as error:
                trouble = error
            else:
                if reply.__class__ is not ServerError:
                    return reply
                trouble = reply
        parcel = self._parcel(Call(script, keys, args, lane, resend, acks, ack_timeout), timeout, deadline)
        parcel.where = str(node)
        return await self._deliver(parcel, trouble)

    def post(self, key: bytes, packed: bytes, lane: Lane = Lane.MAIN) -> Posted | None:
        """See `Link`. It ends as `Wire.send` says."""
        home = self._home
        if home is None or home.closed or not runs_here(home.loop):
            return None
        return self.post_from(home, home.now(), key, packed, lane)

    def post_from(
        self, home: Home, now: float, key: bytes, packed: bytes, lane: Lane = Lane.MAIN
    ) -> Posted | None:
        """The same for whoever knows this loop's home, and that it is open."""
        node = self._topology.single or self._topology.locate(key)
        wire = home.main
        if lane or wire is None or wire.dead or node is not home.main_node:
            wire = home.wires[_WIRE_OF[lane]].get(node)  # type: ignore[arg-type]  # None finds none
            if wire is None or wire.dead:
                return None
            if not lane:
                home.main, home.main_node = wire, node
        try:
            return wire.post(packed, now, self._patience, now + self._timeout)
        except NotSent:
            return None

    def home(self) -> Home | None:
        """What this link has on the running loop, if it has been used there. Closed, it is to be asked for anew."""
        loop = asyncio.get_running_loop()
        home = self._homes.get(id(loop))
        return home if home is not None and home.loop is loop and not home.closed else None

    def spent(self, since: float) -> float:
        """Seconds of the loop's clock."""
        return self._now() - since

    async def call_many(self, calls: Sequence[Call], *, timeout: float | None = None) -> list[Any]:
        home = await self._enter()
        span = self._timeout if timeout is None else timeout
        deadline = self._now() + span
        parcels = [self._parcel(call, span, deadline) for call in calls]
        firsts = [
            self._first_try(home, parcel) for parcel in parcels
        ]  # no await in between: one write per node
        try:
            results = [await _outcome(first) for first in firsts]
        finally:
            _abandon(firsts)
        troubled = [at for at, result in enumerate(results) if _is_trouble(result)]
        if troubled:
            late = await asyncio.gather(*(self._rescue(parcels[at], results[at]) for at in troubled))
            for at, result in zip(troubled, late, strict=True):
                results[at] = result
        return results

    async def command(
        self,
        *args: Arg,
        key: bytes | None = None,
        lane: Lane = Lane.MAIN,
        timeout: float | None = None,
        resend: bool = True,
    ) -> Any:
        await self._enter()
        return await self._deliver(self._plain(args, key, lane, timeout, resend=resend))

    async def watch(self, channel: bytes, wake: Callable[[], None]) -> Unwatch:
        home = await self._enter()
        if home.watcher is None or home.watcher.ended:
            home.watcher = LoopWatcher(
                self._topology,
                functools.partial(self._dial, limit=self._connect_timeout),
                self._look_up,
                timeout=self._timeout,
                ping_every=self._ping_every,
            )
        return await home.watcher.watch(channel, wake, self._timeout)

    # ---------------------------------------------------------------------------- Courier's ports
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _exchange(self, node: Endpoint, parcel: Parcel, packed: list[bytes]) -> list[Any]:
        futures = self._send(await self._enter(), node, parcel, packed)
        try:
            return [await future for future in futures]
        finally:
            _abandon(futures)

    async def _ask(self, node: Endpoint, command: tuple[bytes, ...], *, sentinel: bool, limit: float) -> Any:
        try:
            asked = await self._dial(node, limit=limit, sentinel=sentinel)
        except Exception as error:  # also of whoever gives the credentials, say
            raise NotSent(error) from error
        try:
            async with asyncio.timeout(limit):
                await asked.send_command(*command)
                return await asked.read_response()
        except driver.ResponseError as error:
            raise ServerError(str(error)) from error
        except Exception as error:
            raise NotSent(error) from error
        finally:
            forget(asked)

    # ---------------------------------------------------------------------------------- sending
    def _send(
        self, home: Home, node: Endpoint, parcel: Parcel, packed: list[bytes]
    ) -> list[asyncio.Future[Any]]:
        wire = self._wire(home, parcel.lane, node)
        now = home.loop.time()
        patience = parcel.patience(now)
        urgent = parcel.lane is Lane.RENEW
        futures = [wire.send(packed[0], now, patience, parcel.deadline, urgent=urgent)]
        # What belongs together is never torn apart by the cap.
        futures += [wire.send(piece, now, patience, parcel.deadline, urgent=True) for piece in packed[1:]]
        return futures

    def _first_try(self, home: Home, parcel: Parcel) -> Any:
        node = self._topology.locate(parcel.key)
        if node is None or parcel.acks:
            return _UNTRIED
        parcel.where = str(node)
        try:
            return self._send(home, node, parcel, parcel.commands())[0]
        except NotSent as error:
            return error

    async def _rescue(self, parcel: Parcel, trouble: Any) -> Any:
        try:
            return await self._deliver(parcel, None if trouble is _UNTRIED else trouble)
        except Exception as error:  # noqa: BLE001 - an item's error stands in its place
            return error

    def _wire(self, home: Home, lane: Lane, node: Endpoint) -> Wire:
        wires = home.wires[_WIRE_OF[lane]]
        wire = wires.get(node)
        if wire is None or wire.dead:
            dial = functools.partial(self._dial, node, limit=self._connect_timeout)
            wire = wires[node] = Wire(dial, cap=self._cap, max_queued_bytes=self._max_queued_bytes)
        return wire

    async def _dial(self, node: Endpoint, *, limit: float, sentinel: bool = False) -> Any:
        made = connection(self._target, node, "async", connect_timeout=limit, sentinel=sentinel)
        try:
            async with asyncio.timeout(limit):
                await made.connect()
        except BaseException:
            forget(made)
            raise
        if not sentinel:
            self._topology.proven = True
        return made

    # ------------------------------------------------------------------------- loops, forks, end
    async def _enter(self) -> Home:
        """This loop's connections; made on first use, and anew after a fork."""
        if self._closed:
            raise StoreUnavailable("this Redis link is closed: open a new one")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError as error:
            raise ConfigurationError(
                "the async Redis link needs a running asyncio (or uvloop) event loop"
            ) from error
        home = self._homes.get(id(loop))
        if home is None or home.loop is not loop or home.closed:
            for number, other in list(self._homes.items()):
                if other.closed or other.loop.is_closed():
                    self._homes.pop(number, None)  # another thread may have found it, too
            home = self._homes[id(loop)] = Home(loop)
            await home.settle_in()
        self._home = home
        return home

    def _leave_behind(self) -> None:
        """In a forked child: the connections are the parent's."""
        _inherited.append(self._homes)
        for home in self._homes.values():
            home.closed = True  # whoever still knows one must not write to it
        self._homes, self._home = {}, None
        self._topology.refreshing = False

    async def leave(self) -> None:
        """Close what belongs to the running loop; other loops go on."""
        home = self.home()
        if home is not None:
            del self._homes[id(home.loop)]
            await home.aclose()

    async def aclose(self) -> None:
        self._closed = True
        homes, self._homes, self._home = list(self._homes.values()), {}, None
        here = asyncio.get_running_loop()
        for home in homes:
            home.closed = True  # from now on nothing is sent there, whenever its own loop gets to closing it
            if home.loop is here:
                await home.aclose()
            elif not home.loop.is_closed():
                _close_elsewhere(home)

    def close(self) -> None:
        """Close from outside of a loop: connections of loops that still run are closed over there."""
        self._closed = True
        homes, self._homes, self._home = list(self._homes.values()), {}, None
        for home in homes:
            home.closed = True
            if not home.loop.is_closed():
                _close_elsewhere(home)


def _close_elsewhere(home: Home) -> None:
    if home.loop.is_running() or asyncio._get_running_loop() is not None:  # noqa: SLF001 - the one that raises nothing
        with suppress(RuntimeError):  # it closed in this very moment
            # One that stands still does it when it goes on: no other loop can be driven inside of this one.
            home.loop.call_soon_threadsafe(home.begin_closing)
    else:  # nobody drives it at the moment, so we may
        home.loop.run_until_complete(home.aclose())


def _is_trouble(result: Any) -> bool:
    return result is _UNTRIED or isinstance(result, (ServerError, NotSent, Overdue))


async def _outcome(first: Any) -> Any:
    if not isinstance(first, asyncio.Future):
        return first
    try:
        return await first
    except (NotSent, Overdue) as error:
        return error


def _abandon(futures: Sequence[Any]) -> None:
    """A cancelled caller leaves its slots behind, but no future whose error nobody would read."""
    for future in futures:
        if isinstance(future, asyncio.Future):
            if not future.done():
                future.cancel()
            elif not future.cancelled():
                future.exception()
