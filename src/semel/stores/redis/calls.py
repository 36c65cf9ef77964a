"""What travels over a Redis link: scripts, calls, lanes, and the one surface that both colours share."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from semel.losses import Losses

__all__ = ["Arg", "Call", "Lane", "Link", "Script", "Unwatch"]

Arg: TypeAlias = bytes | str | int
Unwatch: TypeAlias = Callable[[], Awaitable[None]]


class Lane(enum.IntEnum):
    """Which connection of a node carries a call. Members of one lane queue behind each other."""

    MAIN = 0  # small scripts, the default
    BULK = 1  # arguments or replies over 64 KiB: nothing small waits behind them
    RENEW = 2  # lease renewals: MAIN's connection (bulk is elsewhere), but never refused by its cap
    BLOCKING = 3  # WAIT and whatever else the server parks


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua text and the SHA-1 under which the server caches it."""

    name: str
    source: str
    sha1: bytes = field(init=False)

    def __post_init__(self) -> None:
        # SHA-1 is Redis's name for the script, not a protection.
        digest = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha1", digest.encode())


@dataclass(frozen=True, slots=True)
class Call:
    """One script call. `resend=False` marks a script that must not run twice when a reply is lost.

    `acks` > 0 sends WAIT right behind the script on the same connection (lane BLOCKING) and makes the
    reply a pair `[script's reply, replicas that acknowledged within ack_timeout]`.
    """

    script: Script
    keys: Sequence[bytes]
    args: Sequence[Arg] = ()
    lane: Lane = Lane.MAIN
    resend: bool = True
    acks: int = 0
    ack_timeout: float = 1.0


class Link(Protocol):
    """A way to Redis. The sync implementation never suspends: drive it with `coro.send(None)`.

    Every method raises `StoreUnavailable` within its timeout when the server does not answer, the driver's
    error being its cause; `ConfigurationError` when the server cannot be used as configured; and
    `ServerError` when the server refuses this very command. Nothing connects before first use.
    """

    @property
    def colour(self) -> Literal["sync", "async"]: ...

    @property
    def timeout(self) -> float: ...

    @property
    def losses(self) -> Losses: ...

    @property
    def topology(self) -> Literal["standalone", "sentinel", "cluster"]: ...

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
        """Run the script once, one server command after warm-up; a lost reply is asked for again once."""

    def post(self, key: bytes, packed: bytes, lane: Lane = Lane.MAIN) -> Awaitable[Any] | None:
        """The first try of a packed call, with no coroutine in between; await it at once. None: only `call` can do it.

        It ends in a reply, in a `ServerError` as a value, or raises NotSent or Overdue: then `rescue` goes on.
        """
        ...

    async def rescue(self, call: Call, trouble: Any, spent: float) -> Any:
        """What `call` would have answered, for a call that was posted `spent` seconds ago and ended in `trouble`."""

    async def call_many(self, calls: Sequence[Call], *, timeout: float | None = None) -> list[Any]:
        """Run all of them, one write per node. An item's error stands in its place and harms no other."""
        ...

    async def command(
        self,
        *args: Arg,
        key: bytes | None = None,
        lane: Lane = Lane.MAIN,
        timeout: float | None = None,
        resend: bool = True,
    ) -> Any:
        """One plain command, sent to the node of `key` (any node without one). Never blocking ones on MAIN."""

    async def command_everywhere(self, *args: Arg, timeout: float | None = None) -> dict[str, Any]:
        """The command on every master, `{"host:port": reply}`: INFO, CONFIG GET and the like; `Absent` of one that is down
        while others answer."""
        ...

    async def watch(self, channel: bytes, wake: Callable[[], None]) -> Unwatch:
        """Subscribe, and call `wake` on every message and whenever one may have been missed.

        On return the subscription stands. `wake` is called on the link's loop or, for the sync colour, on its
        background thread; it must be quick and must not raise. Await the result to end the subscription.
        """
        ...

    async def aclose(self) -> None:
        """Close every connection; waiting calls end in `StoreUnavailable`. Again, and concurrently, is fine."""

    def close(self) -> None:
        """The same for callers that cannot await."""
