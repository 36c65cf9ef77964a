"""Getting a call answered in spite of lost replies, moved slots, restarts and failovers: one body, both colours.

The first try is the link's own fast path. What went wrong comes here, and is tried again until the caller's time
is over: freely while no byte of the call left us or the server said "not now", once more when a reply was lost
(a few times more when the new connection dies without a word, which is what a dying server's kernel offers).
"""

from __future__ import annotations

import abc
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import hiredis
from redis import exceptions as driver

from semel.errors import ConfigurationError, SemelError, StoreUnavailable
from semel.losses import Losses
from semel.stores.redis.absent import Absent
from semel.stores.redis.address import Endpoint, Target
from semel.stores.redis.calls import Arg, Call, Lane, Script
from semel.stores.redis.errors import (
    MOVING,
    TRANSIENT,
    Full,
    Lost,
    NotSent,
    Overdue,
    ServerError,
    hung_up,
    refusal,
    unreachable,
)
from semel.stores.redis.topology import Topology

__all__ = ["Courier", "Parcel", "Trouble", "pack"]

# hiredis types the argument as a 1-tuple; it takes any.
_pack: Final = cast("Callable[[tuple[Arg, ...]], bytes]", hiredis.pack_command)


def pack(words: tuple[Arg, ...]) -> bytes:
    """One command as it travels.

    Never a number for hiredis: it asks Python for the text of one, does not look whether a signal handler raised
    meanwhile, and takes the whole process down.
    """
    if int in map(type, words):
        words = tuple([b"%d" % word if isinstance(word, int) else word for word in words])
    return _pack(words)


_ASKING: Final = pack((b"ASKING",))
_PAUSES: Final = (0.0, 0.01, 0.025, 0.05, 0.1, 0.2)  # then the last one, again and again
_MAX_STILLBORN: Final = 3  # connections that died without a word, as those to a dying server do
_LEAST: Final = 0.1  # of a call's time: who is asked for the map in less may be well, and cannot show it
_MAX_DETOURS: Final = 16  # MOVED and ASK in a row: two nodes that point at each other must not be a hang

Trouble = ServerError | NotSent | Overdue


@dataclass(slots=True)
class Parcel:
    """One call on its way: what is sent, and what happened to it so far."""

    script: Script | None
    key: bytes | None
    keys: Sequence[bytes]
    args: Sequence[Arg]
    lane: Lane
    resend: bool
    timeout: float
    deadline: float
    acks: int = 0
    ack_timeout: float = 0.0
    whole: bool = False  # the server lacks the script: send its text
    detour: Endpoint | None = None  # ASK: this node, once
    pinned: Endpoint | None = None  # this very node, whatever the map says
    lost: int = 0
    stillborn: int = 0
    detours: int = 0
    tries: int = 0
    where: str = "?"
    told: SemelError | None = None  # the best explanation so far
    cause: BaseException | None = None

    def patience(self, now: float) -> float:
        """How long the server may be silent: half of the time, so that one more try fits; at last, all of it."""
        return (
            self.timeout / 2 + self.ack_timeout * bool(self.acks)
            if not (self.lost or self.stillborn)
            else self.deadline - now
        )

    def share(self, now: float, nodes: int, *, first: bool) -> float:
        """How long the next of `nodes` that are still to be asked may take, so that one that answers is reached in time.

        The first may take half of the time, and the last all of it: on a slow network nobody answers sooner.
        """
        left = self.deadline - now
        if nodes == 1:
            return left
        return min(left, max(left / 2 if first else left / (nodes + 1), self.timeout * _LEAST))

    def commands(self) -> list[bytes]:
        if self.script is None:
            main = pack(tuple(self.args))
        elif self.whole:
            main = pack((b"EVAL", self.script.source, len(self.keys), *self.keys, *self.args))
        else:
            main = pack((b"EVALSHA", self.script.sha1, len(self.keys), *self.keys, *self.args))
        asking = [_ASKING] if self.detour is not None else []
        if not self.acks:
            return [*asking, main]
        # WAIT counts from the connection's own last write, and a repeated call may write nothing: newer servers
        # would then confirm what no replica has. A write that vanishes at once makes the count honest.
        mark = pack((b"SET", _beside(self.key), b"", b"PX", 1))
        return [*asking, main, *asking, mark, pack((b"WAIT", self.acks, int(self.ack_timeout * 1000)))]

    def opened(self, replies: list[Any]) -> Any:
        """The caller's part of the replies; an error of the script outranks the count of replicas."""
        if not self.acks:
            return replies[-1]
        script = replies[1 if self.detour is not None else 0]
        failed = next((reply for reply in (script, *replies) if isinstance(reply, ServerError)), None)
        return failed if failed is not None else [script, replies[-1]]


def _beside(key: bytes | None) -> bytes:
    """A key in the slot of `key`."""
    if key is None:
        return b"semel:ack"
    start = key.find(b"{")
    end = key.find(b"}", start + 1)
    tagged = start >= 0 and end > start + 1
    return b"{" + (key[start + 1 : end] if tagged else key) + b"}:ack"


class Courier(abc.ABC):
    """What a link adds to its transport. A colour supplies the five ports below."""

    def __init__(self, target: Target, *, timeout: float, connect_timeout: float) -> None:
        self._topology = Topology(target)
        self._target = target
        self.losses = Losses()
        self._timeout = timeout
        self._connect_timeout = connect_timeout

    @abc.abstractmethod
    def _now(self) -> float: ...

    @abc.abstractmethod
    async def _pause(self, seconds: float) -> None: ...

    @abc.abstractmethod
    async def _exchange(self, node: Endpoint, parcel: Parcel, packed: list[bytes]) -> list[Any]:
        """All replies in order (error replies as values); raises NotSent, Lost or Overdue."""

    @abc.abstractmethod
    async def _ask(self, node: Endpoint, command: tuple[bytes, ...], *, sentinel: bool, limit: float) -> Any:
        """One command on a connection of its own, within `limit` seconds; raises NotSent or ServerError."""

    @property
    def timeout(self) -> float:
        return self._timeout

    @property
    def topology(self) -> Any:
        return self._target.kind

    def _plain(
        self, args: Sequence[Arg], key: bytes | None, lane: Lane, timeout: float | None, *, resend: bool
    ) -> Parcel:
        span = self._timeout if timeout is None else timeout
        return Parcel(None, key, (), args, lane, resend, span, self._now() + span)

    def _parcel(self, call: Call, timeout: float, deadline: float) -> Parcel:
        key = call.keys[0] if call.keys else None
        lane = Lane.BLOCKING if call.acks else call.lane
        return Parcel(
            call.script,
            key,
            call.keys,
            call.args,
            lane,
            call.resend,
            timeout,
            deadline,
            call.acks,
            call.ack_timeout,
        )

    async def rescue(self, call: Call, trouble: Trouble, spent: float) -> Any:
        """See `Link`."""
        timeout = self._timeout
        parcel = self._parcel(call, timeout, self._now() + timeout - spent)
        parcel.where = str(self._topology.locate(parcel.key))
        return await self._deliver(parcel, trouble)

    # --------------------------------------------------------------------------------- the body
    async def _deliver(self, parcel: Parcel, trouble: Trouble | None = None) -> Any:
        """The reply, or the error for the caller. `trouble` is what the first try ended in, if there was one."""
        while True:
            if trouble is not None:
                await self._overcome(parcel, trouble)
                trouble = None
            self._in_time(parcel)
            node = parcel.detour or parcel.pinned or self._topology.locate(parcel.key)
            if node is None:
                trouble = await self._find(parcel)
                continue
            parcel.where = str(node)
            try:
                replies = await self._exchange(node, parcel, parcel.commands())
            except (NotSent, Overdue) as error:
                trouble = error
                parcel.detour = None
                continue
            reply = parcel.opened(replies)
            parcel.detour = None
            self._topology.proven = True
            if reply.__class__ is not ServerError:
                return reply
            trouble = reply

    async def _overcome(self, parcel: Parcel, trouble: Trouble) -> None:
        """Get ready for the next try, or raise what the caller is to see."""
        if isinstance(trouble, ServerError):
            await self._answered(parcel, trouble)
        elif isinstance(trouble, Overdue):
            raise self._given_up(parcel) from (parcel.cause or trouble)
        else:
            await self._unanswered(parcel, trouble)

    async def _answered(self, parcel: Parcel, error: ServerError) -> None:
        self._topology.proven = True
        if error.code == "NOSCRIPT" and parcel.script is not None and not parcel.whole:
            parcel.whole = True  # EVAL runs it and leaves it in the cache for the next EVALSHA
            return
        if error.code in {"MOVED", "ASK"} or (error.code == "CROSSSLOT" and self._target.kind != "cluster"):
            await self._redirected(parcel, error)
            return
        if error.code not in TRANSIENT:
            raise refusal(parcel.where, error)
        parcel.cause = error
        replica = error.code == "READONLY" and self._target.kind == "standalone"
        parcel.told = StoreUnavailable(
            f"Redis at {parcel.where} answered {error.code} for {parcel.timeout:g} s: {error}"
            f"{' Point the URL to the master' if replica else ''}"
        )
        if error.code in MOVING and self._topology.suspect():
            await self._refresh(parcel)
        await self._rest(parcel)

    async def _redirected(self, parcel: Parcel, error: ServerError) -> None:
        if self._target.kind != "cluster":
            raise ConfigurationError(
                f"Redis at {parcel.where} is a node of a cluster: write redis+cluster:// in the URL"
            ) from error
        parcel.detours += 1
        if parcel.detours > _MAX_DETOURS:
            raise StoreUnavailable(
                f"Redis Cluster keeps redirecting ({error}): is a resharding stuck?"
            ) from error
        asked = parcel.detour or self._topology.locate(parcel.key) or self._target.seeds[0]
        node = self._topology.learn(str(error), asked)
        if error.code == "ASK":
            parcel.detour = node
        elif self._now() - self._topology.refreshed_at > 1.0:
            await self._refresh(parcel)  # one slot moved: most likely others did too

    async def _unanswered(self, parcel: Parcel, trouble: NotSent) -> None:
        parcel.cause = trouble.cause
        if isinstance(trouble, Full):
            parcel.told = StoreUnavailable(f"{trouble.cause}: slow down, or give Redis more room")
        elif isinstance(trouble, Lost):
            self.losses.tell()
            if trouble.stillborn and parcel.stillborn < _MAX_STILLBORN:
                parcel.stillborn += 1
            else:
                parcel.lost += 1
            if parcel.lost > 1 or not parcel.resend:
                plain = trouble.stillborn and not self._target.tls
                raise StoreUnavailable(
                    f"the connection to Redis at {parcel.where} was lost before it answered ({trouble.cause}); "
                    f"the call may have run{hung_up(parcel.where, trouble.cause) if plain else ''}"
                ) from trouble.cause
        else:
            tls, proven = self._target.tls, self._topology.proven
            told, final = unreachable(parcel.where, trouble.cause, proven=proven, tls=tls)
            parcel.told = told
            if final:
                if parcel.tries:  # what the server answered "not now" to may have been a part only
                    self.losses.tell()
                raise told from told.__cause__ or trouble.cause
        if not isinstance(trouble, Full) and self._topology.suspect():
            node = parcel.pinned or self._topology.locate(parcel.key)
            if node is not None and isinstance(trouble.cause, (TimeoutError, driver.TimeoutError)):
                self._topology.silent(node, parcel.timeout / 2)
            await self._refresh(parcel)
        await self._rest(parcel)

    # ---------------------------------------------------------------------------------- every master
    async def command_everywhere(self, *args: Arg, timeout: float | None = None) -> dict[str, Any]:
        """See `Link`. Where others answer, one that does not has an `Absent` in its place; raises where none does."""
        parcel = self._plain(args, None, Lane.MAIN, timeout, resend=True)
        parcel.where = self._seeds()
        while not (masters := self._topology.masters()):
            trouble = await self._refresh(parcel)
            if trouble is not None:
                await self._overcome(parcel, trouble)  # raises when the time is over: never an empty answer
        if len(masters) > 1:
            brief = parcel.timeout / min(len(masters), 1 / _LEAST)
            replies = {str(node): await self._glance(node, args, brief, timeout) for node in masters}
            absent = [node for node in masters if isinstance(replies[str(node)], Absent)]
            if len(absent) < len(masters):
                for node in absent:  # once more, in what is left of the time: it may only be slow
                    brief = max(0.0, parcel.deadline - self._now()) / len(absent)
                    replies[str(node)] = await self._glance(node, args, brief, timeout)
                return replies
        until = max(parcel.deadline, self._now() + parcel.timeout / 2)
        return {str(node): await self._patiently(node, args, timeout, until) for node in masters}

    async def _patiently(
        self, node: Endpoint, args: Sequence[Arg], timeout: float | None, until: float = math.inf
    ) -> Any:
        """The reply of this very node."""
        parcel = self._plain(args, None, Lane.MAIN, timeout, resend=True)
        parcel.deadline = min(parcel.deadline, until)
        parcel.pinned = node
        return await self._deliver(parcel)

    async def _glance(self, node: Endpoint, args: Sequence[Arg], brief: float, timeout: float | None) -> Any:
        """The same by one try, within `brief` seconds; or its `Absent`."""
        question = self._plain(args, None, Lane.MAIN, timeout, resend=True)
        question.deadline = self._now() + brief  # the connection, which others use, is as patient as ever
        reply = await self._once(node, question)
        if isinstance(reply, (NotSent, ServerError)):

            def later(judge: Callable[[Any], None]) -> None:
                self._topology.strangers[node] = (tuple(args), judge)

            return Absent(lambda: self._patiently(node, args, timeout), later)
        return reply

    async def _once(self, node: Endpoint, parcel: Parcel) -> Any:
        """One try, of a question that changes nothing: `NotSent` or "not now" as a value, or the reply; raises a refusal."""
        try:
            (reply,) = await self._exchange(node, parcel, parcel.commands())
        except (NotSent, Overdue) as error:
            return NotSent(error.cause if isinstance(error, NotSent) else TimeoutError(str(error)))
        if isinstance(reply, ServerError) and reply.code not in TRANSIENT:
            raise refusal(str(node), reply)
        return reply

    async def _find(self, parcel: Parcel) -> Trouble | None:
        """Get to know who serves the call: by the map, or by the look that was due at a master on its way."""
        stranger = self._topology.stranger(parcel.key)
        if stranger is not None:
            return await self._meet(stranger, parcel)
        parcel.where = self._seeds()
        return await self._refresh(parcel)

    async def _meet(self, stranger: Endpoint, parcel: Parcel) -> Trouble | None:
        """Look at it, and use it from now on. Raises what its judge does."""
        parcel.where = str(stranger)
        look = self._topology.strangers.get(stranger)
        if look is None:
            return None  # somebody did it meanwhile
        args, judge = look
        question = self._plain(args, None, Lane.MAIN, parcel.timeout, resend=True)
        question.deadline = parcel.deadline
        reply = await self._once(stranger, question)
        if isinstance(reply, (NotSent, ServerError)):
            return reply
        judge(reply)
        self._topology.strangers.pop(stranger, None)
        return None

    # ------------------------------------------------------------------------------------- time
    async def _rest(self, parcel: Parcel) -> None:
        pause = _PAUSES[min(parcel.tries, len(_PAUSES) - 1)] * random.uniform(0.75, 1.25)  # noqa: S311 - spreads callers
        parcel.tries += 1
        if pause:
            await self._pause(max(0.0, min(pause, parcel.deadline - self._now())))
        self._in_time(parcel)

    def _in_time(self, parcel: Parcel) -> None:
        if self._now() >= parcel.deadline:
            raise self._given_up(parcel) from parcel.cause

    def _given_up(self, parcel: Parcel) -> SemelError:
        if parcel.told is not None:
            return parcel.told
        return StoreUnavailable(
            f"Redis at {parcel.where} did not answer within {parcel.timeout:g} s: is it overloaded, stopped or cut off?"
        )

    async def _look_up(self) -> None:
        """Refresh the map for the watcher, strangers included. Raises `NotSent` when no server knows it."""
        parcel = self._plain((), None, Lane.MAIN, None, resend=True)
        troubles = [await self._refresh(parcel)]
        strangers = [node for node in self._topology.masters() if node in self._topology.strangers]
        troubles += [await self._meet(node, parcel) for node in strangers]
        for trouble in troubles:
            if trouble is not None:
                raise trouble if isinstance(trouble, NotSent) else NotSent(trouble)

    def _seeds(self) -> str:
        return ", ".join(map(str, self._target.seeds))

    async def _refresh(self, parcel: Parcel) -> Trouble | None:
        """Ask for the current map, one asker at a time. Not knowing is a trouble like an unreachable server."""
        topology = self._topology
        begun = topology.begin(min(self._connect_timeout, parcel.timeout / 2))
        if not begun:
            await self._rest(parcel)
            return None

        async def ask(node: Endpoint, sentinel: bool, command: tuple[bytes, ...], limit: float) -> Any:
            return await self._ask(node, command, sentinel=sentinel, limit=limit)

        def share(nodes: int, first: bool) -> float:
            return min(self._connect_timeout, parcel.share(self._now(), nodes, first=first))

        try:
            await topology.refresh(ask, share)
            topology.refreshed_at = self._now()
        except NotSent as error:
            parcel.where = self._seeds()
            return error
        finally:
            topology.end(begun)
        return None
