"""Records in Redis or Valkey: standalone, Sentinel or Cluster, one packed string per record, one script per verb.

Start with `lua/claim.lua`, which restates `model.claim` where the data is; `lua/record.lua` tells the layout. This
file only packs questions and unpacks answers (`redis_record`), names keys (`redis_index`) and hands the calls to the
transport (`redis_link`), which re-sends a call whose reply was lost: every script is idempotent per nonce.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from struct import error as StructError  # noqa: N812 - struct spells its exception like a module
from time import monotonic
from typing import Any, Final, TypeVar
from warnings import warn

import msgspec

from semel.errors import ConfigurationError, SemelError, SemelWarning, StoreUnavailable
from semel.keys import Scope
from semel.model import Answer, Ask, Note, Record, Renewal, Settle, Verdict
from semel.store import Capabilities, Colour, Facts, Page, Query, Settings, Unwatch
from semel.stores.redis import facts as redis_facts
from semel.stores.redis import index as redis_index
from semel.stores.redis.errors import NotSent, Overdue, in_our_words
from semel.stores.redis.index import Names
from semel.stores.redis.link import Call, Lane, Link, ServerError, open_link
from semel.stores.redis.looking import Looks
from semel.stores.redis.loops import LoopLink
from semel.stores.redis.phrases import Phrase
from semel.stores.redis.poster import RedisPoster
from semel.stores.redis.record import (
    CLAIM,
    LARGE_SIZE,
    NOTE,
    PEEK,
    RENEW,
    SETTLE,
    TRAIL,
    Large,
    answer,
    ask_words,
    pack_ask,
    pack_end,
    pack_note,
    pack_peek,
    pack_renewal,
    pack_time,
    read_peek,
    read_trail,
    verdict,
)
from semel.stores.redis.urls import own_options
from semel.stores.redis.watch import Deaf
from semel.stores.watchers import Watchers

__all__ = ["RedisStore", "adopt", "open_url"]

T = TypeVar("T")
# The usual lengths of packed arguments, as they are written.
_SIZES: Final = {size: b"%d\r\n" % size for size in range(512)}
_INDEXES: Final = frozenset({"ref"})
_DEAF_FOR: Final = 30.0  # seconds until a server that forbids to subscribe is asked again: rights change


def open_url(url: str, settings: Settings, colour: Colour) -> RedisStore:
    """Open by URL: redis://, rediss://, unix://, valkey://, redis+sentinel://…/service, redis+cluster://host,host.

    `?eviction=accept` uses a server that may drop records when its memory is full.
    """
    address, accept_eviction = own_options(url)
    return RedisStore(address, settings, colour, accept_eviction=accept_eviction)


def adopt(client: object, settings: Settings, colour: Colour) -> RedisStore:
    """Use the servers and the login of a redis-py client or pool. It is only read: never used, never closed."""
    return RedisStore(client, settings, colour)


class RedisStore:
    """See `Store`. `_skew` moves the clock of the scripts, for tests."""

    # No `batches`: the link sends a tick's calls in one write anyway, so collecting them first only costs a task.
    capabilities = Capabilities(
        durable=True,
        shared=True,
        notifies=True,
        joins_transactions=True,
        resends=True,
        server_clock=True,
        lists_all=False,
    )

    def __init__(
        self, source: Any, settings: Settings, colour: Colour, *, accept_eviction: bool = False
    ) -> None:
        if unknown := settings.index - _INDEXES:
            raise ConfigurationError(
                f"index={sorted(unknown)} is not known to Redis: the only index to add is 'ref'"
            )
        if settings.acks < 0:
            raise ConfigurationError(f"acks={settings.acks}: it is a number of replicas, 0 or more")
        self._names = Names(settings.prefix)
        self._shards = self._names.shards
        self._link: Link = open_link(
            source, colour="sync" if colour == "sync" else "async", timeout=settings.timeout
        )
        self.losses = self._link.losses
        self._post = self._link.post  # a ready command, without a coroutine in between
        self._claiming = Phrase(CLAIM, self._shards, ("open", "counters"), 1)
        self._settling = Phrase(SETTLE, self._shards, ("open", "failed", "counters"), 2)
        self._settings = settings
        self._index_ref = "ref" in settings.index
        self._acks = settings.acks
        # WAIT may take part of the call's time, not all of it: the script and a second try need theirs.
        self._waiting: dict[str, Any] = (
            {"acks": settings.acks, "ack_timeout": settings.timeout * 0.4} if settings.acks else {}
        )
        self._accept_eviction = accept_eviction
        self._checked = False
        self._looks = Looks(self.colour, 2 * settings.timeout)
        self._skew = 0.0
        self._deaf_until = -math.inf
        self._told_deaf = False
        self._watchers = Watchers()

    @property
    def colour(self) -> Colour:
        return self._link.colour

    @property
    def acks(self) -> int:
        """How many replicas must confirm a write before it counts."""
        return self._acks

    # ----------------------------------------------------------------------------------------- hot verbs
    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        if not self._checked:
            await self._check()
        if len(asks) != 1 or self._acks:
            return await self._claim_many(asks)
        ask = asks[0]
        reply: Any = None
        begun = monotonic()
        posted = self._post(*self.claim_command(ask))
        try:
            reply = posted if posted is None else await posted
        except (NotSent, Overdue) as error:
            reply = error
        found = verdict(ask, reply) if reply.__class__ is bytes else None
        late = found is None or found.__class__ is Large
        return [await self.claim_late(ask, reply, monotonic() - begun) if late else found]  # type: ignore[list-item]  # what the script answers

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        if not self._checked:
            await self._check()
        answers: list[Answer | Exception]
        end = ends[0] if ends else None
        if end is None or len(ends) != 1 or self._acks:
            answers = await self._settle_many(ends)
        else:
            begun = monotonic()
            reply: Any = None
            if not end.actor:
                posted = self._post(*self.settle_command(end), _lane_of(end))
                try:
                    reply = posted if posted is None else await posted
                except (NotSent, Overdue) as error:
                    reply = error
            if reply.__class__ is bytes:
                answers = [self.settle_answer(end, reply)]
            else:
                answers = [await self.settle_late(end, reply, monotonic() - begun)]
        for end in ends:
            self._watchers.wake(end.scope.hash)
        return answers

    def claim_command(self, ask: Ask) -> tuple[bytes, bytes]:
        """A name in its slot, and the bytes to write."""
        hashed = ask.scope.hash
        head, nonce, names, key, end = ask_words(ask, self._skew)
        number = (hashed[0] & 3) << 8 | hashed[1]
        start, between, others, route = self._claiming.known.get(number) or self._claiming.of(hashed)
        return route, b"".join((start, hashed, between, hashed, others, head, nonce, names, key, end))

    def settle_command(self, end: Settle) -> tuple[bytes, bytes]:
        """The same for a settle without an actor."""
        hashed, result = end.scope.hash, end.result
        packed = pack_end(end, self._skew, index_ref=self._index_ref)
        number = (hashed[0] & 3) << 8 | hashed[1]
        start, between, others, route = self._settling.known.get(number) or self._settling.of(hashed)
        size = _SIZES.get(len(packed)) or b"%d\r\n" % len(packed)
        before = b"\r\n$%d\r\n" % len(result)
        return route, b"".join(
            (start, hashed, between, hashed, others, size, packed, before, result, b"\r\n")
        )

    async def claim_late(self, ask: Ask, reply: Any, spent: float) -> Verdict:
        """A claim whose first try, `spent` seconds ago, did not end in a plain reply but in `reply`."""
        begun = monotonic() - spent
        if reply.__class__ is not bytes:
            call = Call(CLAIM, self._claim_keys(ask.scope.hash), (pack_ask(ask, self._skew),))
            reply = await self._asked(call, reply, spent)
        found = verdict(ask, reply)
        return await self._claim_large(ask, begun) if isinstance(found, Large) else found

    async def settle_late(self, end: Settle, reply: Any, spent: float) -> Answer:
        """As `claim_late`."""
        call = Call(SETTLE, self.settle_keys(end), self.settle_args(end), _lane_of(end))
        return self.settle_answer(end, await self._asked(call, reply, spent))

    async def _asked(self, call: Call, trouble: Any, spent: float) -> bytes:
        """The reply, on the way that takes its time; `trouble` is what a posted call ended in, if it was sent at all."""
        try:
            if trouble is None:
                reply = await self._link.call(call.script, call.keys, call.args, lane=call.lane)
            else:
                reply = await self._link.rescue(call, trouble, spent)
        except ServerError as error:
            raise self._refused(error) from error
        return reply  # type: ignore[no-any-return]  # what the script answers

    def poster(self) -> RedisPoster | None:
        """The quick way, for the flow of one event loop; with acks= there is none, nor for threads."""
        link = self._link
        return RedisPoster(self, link) if isinstance(link, LoopLink) and not self._acks else None

    def _claim_keys(self, hashed: bytes) -> tuple[bytes, ...]:
        shard = self._shards[(hashed[0] & 3) << 8 | hashed[1]]
        return shard.record + hashed, shard.tombstone + hashed, shard.open, shard.counters

    def settle_keys(self, end: Settle) -> tuple[bytes, ...]:
        """KEYS of settle.lua; with `settle_args` and `settle_answer` for whoever puts a settle into a transaction."""
        hashed = end.scope.hash
        shard = self._shards[(hashed[0] & 3) << 8 | hashed[1]]
        keys = (shard.record + hashed, shard.tombstone + hashed, shard.open, shard.failed, shard.counters)
        return (*keys, shard.audit + hashed) if end.actor else keys

    def settle_args(self, end: Settle) -> tuple[bytes, bytes]:
        return pack_end(end, self._skew, index_ref=self._index_ref), end.result

    def settle_answer(self, end: Settle, reply: bytes) -> Answer:
        return answer(end.scope, end.new_nonce or end.nonce, reply)

    async def _claim_large(self, ask: Ask, begun: float) -> Verdict:
        """The record is long: fetch it where nothing small waits behind it. The same nonce, so the same verdict."""
        left = max(0.001, begun + self._settings.timeout - monotonic())
        keys, args = self._claim_keys(ask.scope.hash), (pack_ask(ask, self._skew, large=True),)
        try:
            reply = await self._told(self._link.call(CLAIM, keys, args, lane=Lane.BULK, timeout=left))
        except SemelError:
            self.losses.tell()  # whatever it says: the claim before it may have been granted
            raise
        found = verdict(ask, reply)
        assert not isinstance(found, Large)  # noqa: S101 - it was told that it may be large
        return found

    # ------------------------------------------------------------------------------------------- batches
    async def _claim_many(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        begun = monotonic()

        def call(ask: Ask) -> Call:
            packed = pack_ask(ask, self._skew, large=self._acks > 0)
            return Call(CLAIM, self._claim_keys(ask.scope.hash), (packed,), **self._waiting)

        answers = await self._many(asks, call, verdict)
        for at, found in enumerate(answers):
            if isinstance(found, Large):
                try:
                    answers[at] = await self._claim_large(asks[at], begun)
                except SemelError as error:
                    answers[at] = error
        return answers

    async def _settle_many(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        # Ends of one key keep their order only on one connection.
        large = {end.scope.hash for end in ends if len(end.result) > LARGE_SIZE}

        def call(end: Settle) -> Call:
            lane = Lane.BULK if end.scope.hash in large else Lane.MAIN
            return Call(SETTLE, self.settle_keys(end), self.settle_args(end), lane, **self._waiting)

        return await self._many(ends, call, self.settle_answer)

    async def _many(
        self, items: Sequence[Any], call: Callable[[Any], Call], read: Callable[[Any, bytes], Any]
    ) -> list[Any]:
        """All calls in one write per node. What is wrong with one item stands in its place and harms no other."""
        answers: list[Any] = [None] * len(items)
        calls: dict[int, Call] = {}
        for at, item in enumerate(items):
            try:
                calls[at] = call(item)
            except (ValueError, TypeError, OverflowError, StructError, msgspec.MsgspecError) as error:
                answers[at] = error
        replies = await self._link.call_many(list(calls.values())) if calls else []
        for at, reply in zip(calls, replies, strict=True):
            try:
                answers[at] = self._read(items[at], reply, read)
            except (SemelError, ValueError) as error:
                answers[at] = error
        return answers

    def _read(self, item: Any, reply: Any, read: Callable[[Any, bytes], Any]) -> Any:
        if isinstance(reply, ServerError):
            raise self._refused(reply) from reply
        if isinstance(reply, Exception):
            return reply
        if not isinstance(reply, list):
            return read(item, reply)
        said, replicas = reply
        if replicas < self._acks:
            raise StoreUnavailable(
                f"{replicas} of the {self._acks} replicas that acks= asks for confirmed the write in time: it may or may "
                f"not survive a failover; connect {self._acks} replicas, or lower acks="
            )
        return read(item, said)

    # --------------------------------------------------------------------------------------- other verbs
    async def renew(self, renewals: Sequence[Renewal]) -> list[Answer | Exception]:
        if not self._checked:
            await self._check()

        def call(renewal: Renewal) -> Call:
            hashed = renewal.scope.hash
            shard = self._names.of(hashed)
            keys = (shard.record + hashed, shard.tombstone + hashed, shard.open)
            # Never with acks: a heartbeat that waits for replicas keeps no lease alive, and guards nothing.
            return Call(RENEW, keys, (pack_renewal(renewal, self._skew),), Lane.RENEW)

        return await self._many(renewals, call, _renewed)

    async def note(self, note: Note) -> Answer:
        if not self._checked:
            await self._check()

        def call(note: Note) -> Call:
            hashed = note.scope.hash
            shard = self._names.of(hashed)
            lane = Lane.BULK if len(note.entry) > LARGE_SIZE else Lane.MAIN
            keys = (shard.record + hashed, shard.tombstone + hashed)
            return Call(NOTE, keys, (pack_note(note, self._skew), note.entry), lane, **self._waiting)

        (found,) = await self._many((note,), call, _renewed)
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]  # what the script answers

    async def peek(self, scope: Scope) -> tuple[Record | None, float]:
        if not self._checked:
            await self._check()
        hashed = scope.hash
        shard = self._names.of(hashed)
        keys = (shard.record + hashed, shard.tombstone + hashed)
        args = (pack_peek(self._skew, large=False),)
        seen = read_peek(scope, await self._told(self._link.call(PEEK, keys, args)))
        if isinstance(seen, Large):
            args = (pack_peek(self._skew, large=True),)
            seen = read_peek(scope, await self._told(self._link.call(PEEK, keys, args, lane=Lane.BULK)))
        assert not isinstance(seen, Large)  # noqa: S101 - as in _claim_large
        return seen

    async def watch(self, scope: Scope, wake: Callable[[], None]) -> Unwatch:
        """Woken by the server's pub/sub and, should that be cut, at least by settles of this very store."""
        hashed = scope.hash
        unsubscribe = await self._subscribe(hashed, wake)
        self._watchers.add(hashed, wake)

        async def unwatch() -> None:
            self._watchers.remove(hashed, wake)
            if unsubscribe is not None:
                await unsubscribe()

        return unwatch

    async def _subscribe(self, hashed: bytes, wake: Callable[[], None]) -> Unwatch | None:
        """None: the server forbids it. Then whoever waits polls (R3), as `capabilities` say from then on."""
        if monotonic() < self._deaf_until:
            return None
        try:
            unsubscribe = await self._link.watch(self._names.of(hashed).record + hashed, wake)
        except Deaf as error:
            self._deaf_until = monotonic() + _DEAF_FOR
            self.capabilities = msgspec.structs.replace(self.capabilities, notifies=False)
            told, self._told_deaf = self._told_deaf, True
            if not told:  # last, as in _check
                warn(
                    f"{error}. Who waits for a key looks again and again instead of being woken (poll=): give this Redis user the "
                    f"right to the channels, ACL SETUSER … &{{{self._settings.prefix}:* +ssubscribe +sunsubscribe +spublish",
                    SemelWarning,
                    stacklevel=2,
                )
            return None
        if not self.capabilities.notifies:
            self.capabilities = msgspec.structs.replace(self.capabilities, notifies=True)
        return unsubscribe

    # ---------------------------------------------------------------------------------------- for people
    async def scan(self, query: Query) -> Page:
        if not self._checked:
            await self._check()
        if query.ref is not None and not self._index_ref:
            raise ConfigurationError(
                "Redis finds records by ref only when they are indexed: open the store with index={'ref'} (records that "
                "are settled from then on are found), or ask by key"
            )
        if query.history is None:
            return await self._told(redis_index.scan(self._link, self._names, query, self._skew))
        hashed = query.history.hash
        keys = (self._names.of(hashed).audit + hashed,)
        trail = await self._told(self._link.call(TRAIL, keys, (pack_time(self._skew),)))
        events, now = read_trail(trail)
        return Page(events=events, now=now)

    async def purge(self, limit: int) -> int:
        """Redis drops records itself; this drops up to `limit` entries of ended records from the index."""
        if not self._checked:
            await self._check()
        return await self._told(redis_index.purge(self._link, self._names, limit))

    async def counters(self) -> dict[str, int]:
        """How often keys were taken_over, done, failed, released, unknown and forgotten, in all."""
        return await self._told(redis_index.count(self._link, self._names))

    async def facts(self) -> Facts:
        return await redis_facts.facts(self._link, acks=self._acks)

    def tag(self, scope: Scope) -> str:
        """The hash tag of a key: names that contain it live in the same slot as its record (R28)."""
        return self._names.of(scope.hash).tag.decode()

    async def leave(self) -> None:
        """Close what the running loop opened; see `semel.store`."""
        if isinstance(self._link, LoopLink):
            await self._link.leave()

    async def aclose(self) -> None:
        await self._link.aclose()

    # -------------------------------------------------------------------------------------------- inside
    async def _check(self) -> None:
        unseen = await self._looks.once(lambda: self._checked, self._look)
        if unseen:  # last: where warnings are errors, the next call works all the same
            warn(unseen, SemelWarning, stacklevel=2)

    async def _look(self) -> str:
        unseen = await redis_facts.check(self._link, accept_eviction=self._accept_eviction)
        self._checked = True
        return unseen

    async def _told(self, call: Awaitable[T]) -> T:
        """Await it; an error reply is told in our own words."""
        try:
            return await call
        except ServerError as error:
            raise self._refused(error) from error

    def _refused(self, error: ServerError) -> Exception:
        return in_our_words(error, self._settings.prefix)


def _lane_of(end: Settle) -> Lane:
    return Lane.MAIN if len(end.result) <= LARGE_SIZE else Lane.BULK


def _renewed(item: Renewal | Note, reply: bytes) -> Answer:
    return answer(item.scope, item.nonce, reply)
