"""Being woken by Redis: who waits on which channel, over one subscriber connection per node.

`Feed` speaks the subscriber's side of the protocol without any I/O; `Watcher` keeps the subscriptions true (dial,
subscribe, follow a moved slot, notice a dead peer); the two colours at the bottom only move bytes.
Sharded channels (SSUBSCRIBE) are used where the server has them, plain ones on servers before 7.0.
"""

from __future__ import annotations

import abc
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import hiredis
from redis import exceptions as driver

from semel.errors import SemelError, StoreUnavailable
from semel.stores.redis.address import Endpoint
from semel.stores.redis.courier import pack
from semel.stores.redis.errors import NotSent, ServerError, unreachable
from semel.stores.redis.topology import Topology

__all__ = ["Deaf", "Event", "Feed", "Line", "Ticket", "Watcher"]

_log = logging.getLogger("semel.redis")
_MORE: Final = object()
_PING: Final = pack((b"PING",))
_BACKOFF: Final = (0.02, 0.1, 0.25, 0.5, 1.0)


class Deaf(StoreUnavailable):
    """The server forbids this user to subscribe: asking again will not help before its rights change."""


class Event(NamedTuple):
    """What a subscriber connection said. `error` is set when it refused to subscribe."""

    kind: str  # message, standing, refused, dropped
    channel: bytes
    error: ServerError | None = None


class Feed:
    """One subscriber connection's conversation: commands out, events in. Replies come in the order of commands."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader(replyError=ServerError, notEnoughData=_MORE)
        self._expected: deque[tuple[bytes, bytes]] = deque()

    def subscribe(self, channel: bytes, *, sharded: bool) -> bytes:
        self._expected.append((b"subscribe", channel))
        return pack((b"SSUBSCRIBE" if sharded else b"SUBSCRIBE", channel))

    def unsubscribe(self, channel: bytes, *, sharded: bool) -> bytes:
        self._expected.append((b"unsubscribe", channel))
        return pack((b"SUNSUBSCRIBE" if sharded else b"UNSUBSCRIBE", channel))

    def receive(self, data: bytes) -> list[Event]:
        self._reader.feed(data)
        events = []
        while (reply := self._reader.gets()) is not _MORE:
            event = self._understand(reply)
            if event is not None:
                events.append(event)
        return events

    def _understand(self, reply: Any) -> Event | None:
        if isinstance(reply, ServerError):
            if not self._expected:
                raise driver.InvalidResponse(f"an error that answers nothing: {reply}")
            verb, channel = self._expected.popleft()
            return Event("refused", channel, reply) if verb == b"subscribe" else None
        if not isinstance(reply, list):
            return None  # PONG, outside of any subscription
        word, channel = bytes(reply[0]), reply[1]
        if word in {b"message", b"smessage"}:
            return Event("message", channel)
        if word in {b"subscribe", b"ssubscribe"}:
            self._expected.popleft()
            return Event("standing", channel)
        if word in {b"unsubscribe", b"sunsubscribe"}:
            if self._expected and self._expected[0] == (b"unsubscribe", channel):
                self._expected.popleft()
                return None
            return Event(
                "dropped", channel
            )  # the slot moved away: the server ends the subscription by itself
        return None  # pong


class Ticket:
    """One caller's interest in a channel; `settle` tells its colour that the subscription stands, or failed."""

    def __init__(
        self, channel: bytes, wake: Callable[[], None], settle: Callable[[SemelError | None], None]
    ) -> None:
        self.channel = channel
        self.wake = wake
        self.settle = settle


class _Topic:
    """A channel somebody is interested in."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.line: Line | None = None  # the connection it was asked for on
        self.standing = False
        self.missed = False  # a message may have been lost: wake when it stands again


class Line(abc.ABC):
    """One subscriber connection; a colour says how bytes leave it and how it ends."""

    def __init__(self, node: Endpoint, now: float) -> None:
        self.node = node
        self.feed = Feed()
        self.heard = now
        self.asked: float | None = None
        """When it was last sent something that must be answered: a subscription or a ping; and `patience`, how long that may take."""
        self.patience = 0.0

    @abc.abstractmethod
    def write(self, data: bytes) -> None: ...

    @abc.abstractmethod
    def close(self) -> None: ...


class Watcher(abc.ABC):
    """Keeps subscriptions true. I/O happens on one thread or loop only; `add` and `remove` are called from anywhere."""

    def __init__(self, topology: Topology, *, timeout: float, ping_every: float) -> None:
        self._topology = topology
        self._timeout = timeout
        self._ping_every = ping_every
        self._lock = threading.Lock()
        self._topics: dict[bytes, _Topic] = {}
        self._lines: dict[Endpoint, Line] = {}
        self._resting: dict[
            Endpoint | None, tuple[int, float]
        ] = {}  # failed dials: how many, until when to rest
        self._sharded = True
        self.ended = False
        """Nobody keeps the subscriptions any more: whoever wants one needs another watcher."""

    # -------------------------------------------------------------------------- a colour's ports
    @abc.abstractmethod
    def _now(self) -> float: ...

    @abc.abstractmethod
    def _nudge(self) -> None:
        """Make the I/O side take a turn soon; callable from any thread."""

    @abc.abstractmethod
    async def _open(self, node: Endpoint) -> Line:
        """Dial. Raises NotSent."""

    @abc.abstractmethod
    async def _look_up(self) -> None:
        """Refresh the topology. Raises NotSent."""

    # ------------------------------------------------------------------------------ from callers
    def add(self, ticket: Ticket) -> None:
        with self._lock:
            topic = self._topics.setdefault(ticket.channel, _Topic())
            topic.tickets.append(ticket)
            standing, ended = topic.standing, self.ended
        if ended:
            self._fail(topic, _over())
        elif standing:
            ticket.settle(None)
        else:
            self._nudge()

    def remove(self, ticket: Ticket) -> None:
        with self._lock:
            topic = self._topics.get(ticket.channel)
            if topic is None or ticket not in topic.tickets:
                return
            topic.tickets.remove(ticket)
            if topic.tickets:
                return
        self._nudge()

    # ------------------------------------------------------------------------------ on the I/O side
    async def turn(self) -> float:
        """Do what is due; returns when the next turn is, at the latest."""
        try:
            return await self._take_turn()
        except Exception:  # noqa: BLE001 - one mistake must not end the wake-ups of all
            _log.exception("the subscriptions could not be kept: they are looked at again in a moment")
            return self._now() + _BACKOFF[-1]

    async def _take_turn(self) -> float:
        now = self._now()
        due = math.inf
        for channel, topic in self._copy():
            if not topic.tickets:
                self._drop(channel, topic)
            elif topic.line is None:
                due = min(due, await self._subscribe(channel, topic))
        for line in list(self._lines.values()):
            due = min(due, self._keep_alive(line, now))
        return due

    def _copy(self) -> list[tuple[bytes, _Topic]]:
        with self._lock:
            return list(self._topics.items())

    def _drop(self, channel: bytes, topic: _Topic) -> None:
        with self._lock:
            if topic.tickets:  # somebody came back meanwhile
                return
            del self._topics[channel]
        if topic.line is not None:
            self._write(topic.line, topic.line.feed.unsubscribe(channel, sharded=self._sharded))

    async def _subscribe(self, channel: bytes, topic: _Topic) -> float:
        node = self._topology.locate(channel)
        failures, until = self._resting.get(node, (0, 0.0))
        if until > self._now():
            return until
        try:
            if node is None:
                await self._look_up()
                if self._topology.locate(channel) is not None:
                    return self._now()
                # Nobody has the slot, or somebody else still looks.
                rest = self._now() + _BACKOFF[min(failures, len(_BACKOFF) - 1)]
                self._resting[None] = (failures + 1, rest)
                return rest
            self._resting.pop(None, None)
            line = self._lines.get(node)
            if line is None:
                line = self._lines[node] = await self._open(node)
            self._resting.pop(node, None)
        except SemelError as error:
            self._fail(topic, error)
            return self._now() + 1.0
        except Exception as error:  # noqa: BLE001 - a caller's mapping of addresses may raise anything
            rest = self._now() + _BACKOFF[min(failures, len(_BACKOFF) - 1)]
            self._resting[node] = (failures + 1, rest)
            self._refused(topic, node, error.cause if isinstance(error, NotSent) else error)
            return rest
        topic.line = line
        # Half of the time that its caller has: the other half is for another connection.
        self._ask(line, line.feed.subscribe(channel, sharded=self._sharded), self._timeout / 2)
        return math.inf

    def _refused(self, topic: _Topic, node: Endpoint | None, cause: BaseException) -> None:
        where = str(node or ", ".join(map(str, self._topology.target.seeds)))
        tls, proven = self._topology.target.tls, self._topology.proven
        told, final = unreachable(where, cause, proven=proven, tls=tls)
        told.__cause__ = cause
        self._topology.suspect()
        if final:
            self._fail(topic, told)

    def _fail(self, topic: _Topic, error: SemelError) -> None:
        with self._lock:
            tickets, topic.tickets = topic.tickets, []
        for ticket in tickets:
            ticket.settle(error)

    def _write(self, line: Line, data: bytes) -> None:
        try:
            line.write(data)
        except OSError as error:
            self.lost(line, error)

    def _ask(self, line: Line, question: bytes, patience: float) -> None:
        if line.asked is None or line.heard >= line.asked:
            line.asked, line.patience = self._now(), patience
        self._write(line, question)

    def _keep_alive(self, line: Line, now: float) -> float:
        if line.asked is not None and line.heard < line.asked:
            if now - line.asked >= line.patience:
                self.lost(line, driver.TimeoutError("the subscriber connection is silent"))
                return now
            return line.asked + line.patience
        due = line.heard + self._ping_every
        if due > now:
            return due
        self._ask(line, _PING, self._timeout)
        return now + self._timeout

    def received(self, line: Line, data: bytes) -> None:
        """Bytes came on a subscriber connection."""
        line.heard = self._now()
        try:
            for event in line.feed.receive(data):
                with self._lock:
                    topic = self._topics.get(event.channel)
                if topic is not None and topic.line is line:
                    self._happened(topic, event, line)
        except Exception as error:  # noqa: BLE001 - no Redis protocol, or a caller's mapping of addresses that raised
            self._resting[line.node] = (1, self._now() + _BACKOFF[1])
            self.lost(line, error)

    def _happened(self, topic: _Topic, event: Event, line: Line) -> None:
        if event.kind == "message":
            self._wake(topic)
        elif event.kind == "standing":
            with self._lock:
                topic.standing = True
                tickets, missed, topic.missed = list(topic.tickets), topic.missed, False
            for ticket in tickets:
                ticket.settle(None)
            if missed:
                self._wake(topic)
        else:
            topic.line, topic.standing, topic.missed = None, False, True
            if event.error is not None:
                self._learn(topic, event.error, line)
            self._nudge()

    def _learn(self, topic: _Topic, error: ServerError, line: Line) -> None:
        if error.code == "MOVED" and self._topology.target.kind == "cluster":
            self._topology.learn(str(error), line.node)
        elif "unknown command" in str(error).lower():
            self._sharded = False
        elif error.code in {"NOPERM", "NOAUTH"}:
            self._wake(topic)  # who was subscribed before must look for himself from now on
            kind = Deaf if error.code == "NOPERM" else StoreUnavailable
            self._fail(topic, kind(f"Redis at {line.node} refused the subscription: {error}"))
        else:
            self._resting[line.node] = (1, self._now() + _BACKOFF[1])

    def _wake(self, topic: _Topic) -> None:
        for ticket in tuple(topic.tickets):
            try:
                ticket.wake()
            except Exception:  # noqa: BLE001 - a stranger's callback must not end the subscriptions
                _log.exception("a wake-up callback failed")

    def lost(self, line: Line, cause: BaseException) -> None:
        """The connection is gone: subscribe again elsewhere, and wake everybody once that stands."""
        if self._lines.get(line.node) is line:
            del self._lines[line.node]
        line.close()
        _log.debug("the subscriber connection to %s was lost: %s", line.node, cause)
        self._topology.suspect()
        for _, topic in self._copy():
            if topic.line is line:
                topic.line, topic.standing, topic.missed = None, False, True
        self._nudge()

    def shut(self) -> None:
        """Close every connection; who still waits for a subscription hears of it, and whoever comes later."""
        with self._lock:
            self.ended = True
        lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            line.close()
        for _, topic in self._copy():
            if not topic.standing:
                self._fail(topic, _over())


def _over() -> StoreUnavailable:
    return StoreUnavailable("this Redis link was closed, or what keeps its subscriptions was ended")
