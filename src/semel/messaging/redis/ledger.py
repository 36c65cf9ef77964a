"""A relay's ledger in Redis: what is read on a page is asked for at once, what is written is one script per part.

A part has one owner, and a page is written under the owner's epoch: who was overtaken meanwhile writes nothing. So the
reading needs no lock: nobody but the owner changes what it read, apart from messages that are added and keys that an operator
lets go, which the next page sees.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

import msgspec

from semel.messaging.pages import Line, Member, Page, State, Superseded, Waiting, Want
from semel.messaging.redis.bodies import body_of
from semel.messaging.redis.keys import CHOOSE, CLEAN, COMMIT, COUNTS, FETCH, LINES, PARTS, PEEK, RELAYS, TAKE
from semel.messaging.redis.listing import waiting_in
from semel.messaging.redis.spelling import (
    Changes,
    batch_name,
    batch_of,
    holding,
    line_from,
    packed_filter,
    packed_line,
    row_of,
)
from semel.messaging.scopes import Neighbour
from semel.messaging.sharing import shared
from semel.messaging.sink import Row
from semel.stores.redis.calls import Call, Script

if TYPE_CHECKING:
    from semel.messaging.redis.home import RedisHome

__all__ = ["RedisLedger", "RedisPage"]

P = ParamSpec("P")
T = TypeVar("T")

_WAVE: Final = 8  # parts that are asked for rows in one write
_LOOKS: Final = 1000  # messages that one script looks at: about a millisecond of Redis
_TENANTS: Final = 64  # that are given their share of a part at a time
_BYTES: Final = 8 << 20  # of bodies in one answer
_rows: Final = msgspec.msgpack.Decoder(list[Row])


class RedisLedger:
    """See `Ledger`."""

    def __init__(self, home: RedisHome, team: str) -> None:
        self._home = home
        self._team = team

    async def run(self, fn: Callable[Concatenate[Page, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._home.aside(lambda: self._written(fn, *args, **kwargs))

    async def read(self, fn: Callable[Concatenate[Page, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.run(fn, *args, **kwargs)

    def _written(self, fn: Callable[Concatenate[Page, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        self._home.look()
        page = RedisPage(self._home, self._team)
        done = fn(page, *args, **kwargs)
        page.write()
        return done


class RedisPage:
    """See `Page`."""

    def __init__(self, home: RedisHome, team: str) -> None:
        self._home = home
        self._names = home.names
        self._team = team
        self._changes: dict[int, Changes] = {}

    # ---------------------------------------------------------------------------------------- writing
    def write(self) -> None:
        """Everything about a part in one script. Superseded names the parts that had another owner by then."""
        changed = [(part, changes) for part, changes in self._changes.items() if changes]
        replies = self._home.call_many([self._commit(part, changes) for part, changes in changed])
        lost = [part for (part, _), reply in zip(changed, replies, strict=True) if not reply]
        if lost:
            raise Superseded(lost)

    def _commit(self, part: int, changes: Changes) -> Call:
        names, team = self._names, self._team
        keys = [
            names.part(part, team), names.stream(part), names.lines(part, team), names.kept(part, team),
            names.kept_times(part, team), names.counts(part), names.tenants(part), names.bodies_over(part),
        ]  # fmt: skip
        keys += [names.id(part, row.tenant, row.id) for row in changes.removed]
        bodies = [body_of(row) if row.headers else "" for row in changes.removed]
        keys += [names.body(part, digest) for digest in bodies if digest]
        args: list[Any] = [os.urandom(16), changes.epoch, changes.state, changes.new_epoch or b""]
        args += (b"1" if changes.free else b"", len(changes.removed))
        for row, digest in zip(changes.removed, bodies, strict=True):
            args += (row.seq, row.topic, digest)
        args.append(len(changes.held))
        for line, after in changes.held.values():
            args += (line.name, packed_line(line), b"" if after is None else repr(after))
        args += (len(changes.flows), *changes.flows)
        for pairs in (changes.kept, changes.renumbered):
            args.append(len(pairs))
            for pair in pairs:
                args += pair
        return Call(COMMIT, keys, args)

    def _of(self, part: int, epoch: int | None = None) -> Changes:
        known = self._changes.get(part)
        if known is None:
            if epoch is None:
                raise RuntimeError(f"part {part} was not held")  # a mistake of ours
            known = self._changes[part] = Changes(epoch)
        return known

    # ------------------------------------------------------------------------------------- membership
    def join(self, relay: str, lease: float, about: str, parts: int) -> None:
        del parts  # a part is there when it is first taken
        self._tell(relay, int(lease * 1000), about)

    def leave(self, relay: str) -> None:
        self._ask(PARTS, self._all, self._part, relay)
        self._tell(relay, b"", b"")

    def _tell(self, relay: str, lease: int | bytes, about: str | bytes) -> None:
        """To its own team, and to those of other names."""
        places = ((self._names.relays(self._team), relay), (self._names.teams, f"{self._team}:{relay}"))
        self._home.call_many([Call(RELAYS, (key,), (name, lease, about)) for key, name in places])

    def alive(self) -> dict[str, tuple[float, float]]:
        return {name: (left, age) for name, left, age, _ in self._living(self._names.relays(self._team))}

    def everyone(self) -> list[Neighbour]:
        found: list[Neighbour] = []
        for name, left, age, about in self._living(self._names.teams):
            team, _, relay = name.rpartition(":")
            found.append(Neighbour(team, relay, left, -age, about))
        return found

    def _living(self, key: bytes) -> Iterator[tuple[str, float, float, str]]:
        """Name, seconds left, age, and what each said of itself."""
        found = self._home.call(RELAYS, (key,), (b"", b"", b""))
        for name, left, age, about in zip(*(found[n::4] for n in range(4)), strict=True):
            yield name.decode(), int(left) / 1000, int(age) / 1000, about.decode()

    def members(self) -> list[Member]:
        return [
            Member(part, int(epoch), owner.decode() or None) for part, epoch, owner in self._owners(self._all)
        ]

    def take(self, relay: str, free: Sequence[Member]) -> list[tuple[Member, State]]:
        calls = [
            Call(TAKE, (self._names.part(member.part, self._team),), (os.urandom(16), relay, member.epoch))
            for member in free
        ]
        replies = zip(free, self._home.call_many(calls), strict=True)
        return [(member, msgspec.json.decode(said[1], type=State)) for member, said in replies if said[0]]

    def release(self, part: int, epoch: int) -> None:
        self._of(part, epoch).free = True

    def hold(self, epochs: Mapping[int, int]) -> set[int]:
        held = {part for part, epoch, _ in self._owners(sorted(epochs)) if epochs[part] == int(epoch)}
        for part in held:
            self._of(part, epochs[part])
        return held

    def save(self, states: Mapping[tuple[int, int], State]) -> None:
        for (part, epoch), state in states.items():
            self._of(part, epoch).state = msgspec.json.encode(state).decode()

    def raise_epoch(self, part: int, epoch: int, beyond: int) -> None:
        self._of(part, epoch).new_epoch = max(epoch, beyond) + 1

    # ------------------------------------------------------------------------------------------- rows
    def choose(self, want: Want) -> dict[int, list[Row]]:
        chosen: dict[int, list[Row]] = {}
        left = want.total
        ready = [part for part, age in self._ages(want.parts) if age >= 0]
        for start in range(0, len(ready), _WAVE):
            if left <= 0:
                break
            found = self._rows_of(ready[start : start + _WAVE], want, min(want.each, left))
            for part, rows in found.items():
                if rows and left > 0:
                    chosen[part] = rows
                    left -= len(rows)
        full = [part for part, rows in chosen.items() if len(rows) >= want.each] if want.fair else []
        if not full:
            return chosen
        return shared(chosen, want, {part: self._tenants(part) for part in full}, self._sharing(want))

    def _tenants(self, part: int) -> list[str]:
        """Those whose messages may have waited longest; a bounded number."""
        key = self._names.tenants(part)
        return [name.decode() for name in self._home.command("ZRANGE", key, 0, _TENANTS - 1, key=key)]

    def _sharing(
        self, want: Want
    ) -> Callable[[Sequence[tuple[int, str]], int], dict[tuple[int, str], list[Row]]]:
        def fetch(wanted: Sequence[tuple[int, str]], most: int) -> dict[tuple[int, str], list[Row]]:
            calls = [
                Call(
                    CHOOSE,
                    self._choosing(part),
                    (
                        b"0",
                        most,
                        _LOOKS,
                        _BYTES,
                        packed_filter(want, part, self._changes.get(part), of=tenant),
                    ),
                )
                for part, tenant in wanted
            ]
            replies = zip(wanted, self._home.call_many(calls), strict=True)
            return {which: [row_of(entry) for entry in entries] for which, (entries, *_) in replies}

        return fetch

    def waiting(self, want: Want) -> bool:
        ready = [part for part, age in self._ages(want.parts) if age >= 0]
        waves = (ready[start : start + _WAVE] for start in range(0, len(ready), _WAVE))
        return any(any(self._rows_of(wave, want, 1).values()) for wave in waves)

    def _rows_of(self, parts: Sequence[int], want: Want, each: int) -> dict[int, list[Row]]:
        """Up to so many rows of each part: asked for in pages, so that no script takes long."""
        found: dict[int, list[Row]] = {part: [] for part in parts}
        after = dict.fromkeys(parts, b"0")
        filters = {part: packed_filter(want, part, self._changes.get(part)) for part in parts}
        while after:
            asked = list(after.items())
            calls = [
                Call(
                    CHOOSE,
                    self._choosing(part),
                    (last, each - len(found[part]), _LOOKS, _BYTES, filters[part]),
                )
                for part, last in asked
            ]
            for (part, _), (entries, last, held) in zip(asked, self._home.call_many(calls), strict=True):
                rows = found[part]
                rows += map(row_of, entries)
                full = len(rows) >= each or sum(len(row.body) for row in rows) >= _BYTES
                if full or not last:
                    del after[part]
                else:
                    after[part] = last
                    filters[part] = holding(filters[part], held)
        return found

    def _choosing(self, part: int) -> tuple[bytes, ...]:
        names = self._names
        lines, tenants = names.lines(part, self._team), names.tenants(part)
        return names.stream(part), names.due(part), names.seq(part), lines, tenants

    def fetch(self, part: int, seqs: Collection[int]) -> dict[int, Row]:
        if not seqs:
            return {}
        rows = map(row_of, self._home.call(FETCH, (self._names.stream(part),), sorted(seqs)))
        return {row.seq: row for row in rows}

    def remove(self, gone: Mapping[int, Sequence[Row]]) -> None:
        for part, rows in gone.items():
            self._of(part).removed += rows

    # ---------------------------------------------------------------------------------- kept batches
    def keep(self, part: int, lane: str, batch: int, rows: Sequence[Row]) -> None:
        self._of(part).kept.append((batch_name(lane, batch), msgspec.msgpack.encode(list(rows))))

    def kept(self, part: int, lane: str, after: int) -> dict[int, list[Row]]:
        key = self._names.kept(part, self._team)
        found: dict[int, list[Row]] = {}
        for batch in sorted(self._kept_numbers(key, lane)):
            if batch > after:
                rows = self._home.command("HGET", key, batch_name(lane, batch), key=key)
                if rows is not None:
                    found[batch] = _rows.decode(rows)
        changes = self._changes.get(part)
        for said, rows in changes.kept if changes is not None else ():  # on this page
            theirs, batch = batch_of(said)
            if theirs == lane and batch > after:
                found[batch] = _rows.decode(rows)
        return dict(sorted(found.items()))

    def _kept_numbers(self, key: bytes, lane: str) -> Iterator[int]:
        for said in self._home.command("HKEYS", key, key=key):
            theirs, batch = batch_of(said)
            if theirs == lane:
                yield batch

    def renumber(self, part: int, lane: str, old: int, new: int) -> None:
        self._of(part).renumbered.append((batch_name(lane, old), batch_name(lane, new)))

    # ------------------------------------------------------------------------------------------ lines
    def lines(self, parts: Collection[int] | None = None) -> list[Line]:
        asked = self._all if parts is None else sorted(parts)
        found: list[Line] = []
        for group, reply in self._ask(LINES, asked, self._line, b""):
            for part, said in zip(group, reply, strict=True):
                lines = {line.name: line for line in (line_from(part, each) for each in said)}
                if (changes := self._changes.get(part)) is not None:
                    changes.overlay(lines)
                found += lines.values()
        return sorted(found, key=lambda line: line.since)

    def hold_back(self, line: Line, after: float | None) -> None:
        changes = self._of(line.part)
        changes.held[line.name] = line, after
        changes.flows.discard(line.name)

    def let_go(self, part: int, names: Collection[str]) -> None:
        for name in names:
            changes = self._of(part)
            changes.flows.add(name)
            changes.held.pop(name, None)

    def unpark(self, *, key: str | None, tenant: str | None, identity: str | None) -> int:
        given = {"key": key, "tenant": tenant, "id": identity}
        said = msgspec.json.encode({name: value for name, value in given.items() if value is not None})
        return sum(int(count) for _, count in self._ask(LINES, self._all, self._line, said))

    # ------------------------------------------------------------------------------------ care, counts
    def pending(self) -> dict[str, int]:
        found: dict[str, int] = {}
        tags = self._all if self._names.cluster else [0]  # one count for each hash tag
        for _, replies in self._ask(COUNTS, tags, lambda part: (self._names.counts(part),)):
            for said in replies:
                for topic, count in zip(said[::2], said[1::2], strict=True):
                    found[topic.decode()] = found.get(topic.decode(), 0) + int(count)
        return found

    def topics(self) -> set[str]:
        return set(self.pending())

    def strays(self, parts: int) -> int:
        del parts
        return 0  # the script that adds compares how the outbox is divided

    def oldest(self) -> float:
        return max([age for _, age in self._ages(self._all, told=True)] + [0]) / 1000

    def listed(self, limit: int, where: Mapping[str, str]) -> list[Waiting]:
        found = [each for part in self._all for each in waiting_in(self._home, part, limit, where)]
        return sorted(found, key=lambda each: each.created)[:limit]

    def clean(self, retention: float, sink_safety: float) -> int:
        """Ids end by themselves, a retention after their message was delivered: with the retention that it was added with."""
        del retention
        names, team = self._names, self._team
        keys = {part: (names.kept(part, team), names.kept_times(part, team)) for part in self._all}
        return sum(int(n) for _, n in self._ask(CLEAN, self._all, lambda part: keys[part], repr(sink_safety)))

    # ------------------------------------------------------------------------------------------ asking
    @property
    def _all(self) -> list[int]:
        return list(range(self._home.parts))

    def _part(self, part: int) -> tuple[bytes, ...]:
        return (self._names.part(part, self._team),)

    def _line(self, part: int) -> tuple[bytes, ...]:
        return (self._names.lines(part, self._team),)

    def _owners(self, parts: Sequence[int]) -> Iterator[tuple[int, bytes, bytes]]:
        for group, reply in self._ask(PARTS, parts, self._part, b""):
            yield from zip(group, reply[::2], reply[1::2], strict=True)

    def _ages(self, parts: Sequence[int], *, told: bool = False) -> Iterator[tuple[int, int]]:
        """Milliseconds for which each part has had something that is due (0 unless `told`), or -1."""
        names, asked = self._names, b"1" if told else b""
        for group, reply in self._ask(PEEK, parts, lambda part: (names.stream(part), names.due(part)), asked):
            yield from zip(group, reply, strict=True)

    def _ask(
        self, script: Script, parts: Sequence[int], keys: Callable[[int], Iterable[bytes]], *args: bytes | str
    ) -> list[tuple[Sequence[int], Any]]:
        """One script for all parts; in a Cluster one for each, in one write per node."""
        groups: list[Sequence[int]] = (
            [[part] for part in parts] if self._names.cluster else [parts] * bool(parts)
        )
        calls = [Call(script, [key for part in group for key in keys(part)], args) for group in groups]
        return list(zip(groups, self._home.call_many(calls), strict=True)) if calls else []
