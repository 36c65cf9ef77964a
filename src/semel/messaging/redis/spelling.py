"""How messages, lines, batches and filters are spelled for the scripts, and read back. No I/O in here."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from semel.messaging.pages import Line, Shut, Want
from semel.messaging.sink import Row

__all__ = [
    "Changes",
    "batch_name",
    "batch_of",
    "holding",
    "line_from",
    "packed_filter",
    "packed_line",
    "row_of",
]

_headers: Final = msgspec.json.Decoder(dict[str, str])


@dataclass(slots=True)
class Changes:
    """What is to be written about one part."""

    epoch: int
    state: str = ""
    new_epoch: int | None = None
    free: bool = False
    removed: list[Row] = field(default_factory=list)
    held: dict[str, tuple[Line, float | None]] = field(default_factory=dict)
    flows: set[str] = field(default_factory=set)
    kept: list[tuple[bytes, bytes]] = field(default_factory=list)
    renumbered: list[tuple[bytes, bytes]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(
            self.state or self.new_epoch or self.free or self.removed or self.held or self.flows or self.kept
        ) or bool(self.renumbered)

    def overlay(self, lines: dict[str, Line]) -> None:
        """The lines as they will be when this is written."""
        clock = time.time()
        for line, after in self.held.values():
            known = lines.get(line.name)
            until = None if after is None else clock + after
            lines[line.name] = msgspec.structs.replace(
                line, until=until, since=known.since if known else clock
            )
        for name in self.flows:
            lines.pop(name, None)


class _Stored(msgspec.Struct):
    """A line as it stands in Redis: Lua writes numbers as it likes and leaves out what is not there."""

    part: int
    tenant: str
    topic: str
    id: str
    seq: float
    attempts: float
    reason: str
    since: float
    key: str | None = None
    until: float | None = None

    def line(self) -> Line:
        return Line(
            self.part, self.tenant, self.key, self.topic, self.id, int(self.seq), int(self.attempts), self.until,
            self.reason, self.since,
        )  # fmt: skip


def line_from(part: int, said: bytes) -> Line:
    return msgspec.convert({**msgspec.json.decode(said), "part": part}, _Stored).line()


def packed_line(line: Line) -> bytes:
    said = {
        "tenant": line.tenant,
        "topic": line.topic,
        "id": line.id,
        "seq": line.seq,
        "attempts": line.attempts,
        "reason": line.reason,
    }
    return msgspec.json.encode(said if line.key is None else {**said, "key": line.key})


def _key(line: Line) -> str:
    """The name of a line as the script that chooses spells it."""
    if line.key is None:
        return f"s{line.seq}"
    return f"k{len(line.tenant.encode())}:{line.tenant}{line.key}"


def batch_name(lane: str, number: int) -> bytes:
    return msgspec.json.encode((lane, number))


def batch_of(batch: bytes) -> tuple[str, int]:
    return msgspec.json.decode(batch, type=tuple[str, int])


def packed_filter(want: Want, part: int, changes: Changes | None, *, of: str | None = None) -> bytes:
    """What to leave out: as it is written, and as this page is going to change it."""
    removed = changes.removed if changes is not None else ()
    named: dict[str, Collection[str]] = {
        "skip": want.topics,
        "only": want.only_topics,
        "tenants": want.tenants,
        "open": {str(seq) for seq in (*want.open.get(part, ()), *(row.seq for row in removed))},
        "shut": {name for shut in want.shut if shut.part in {None, part} for name in _shut(shut)},
        "free": changes.flows if changes is not None else (),
    }
    said: dict[str, Any] = {
        name: dict.fromkeys(sorted(given), True) for name, given in named.items() if given
    }
    if changes is not None and changes.held:
        said["held"] = {_key(line): line.seq for line, _ in changes.held.values()}
    if of is not None:
        said["of"] = of
    return msgspec.json.encode({**said, "lines": want.lines})


def holding(said: bytes, held: bytes) -> bytes:
    """The filter for the next page: what was held back on this one still is."""
    if not held:
        return said
    return msgspec.json.encode({**msgspec.json.decode(said), "held": msgspec.Raw(held)})


def _shut(shut: Shut) -> list[str]:
    """Names of what is left out as the script that chooses spells them: topic, then the tenant or the key, or both."""
    tenant = "" if shut.tenant is None else f"{len(shut.tenant.encode())}:{shut.tenant}"
    kind = ("" if shut.tenant is None else "t") + ("" if shut.key is None else "k")
    return [f"{kind}{len(topic.encode())}:{topic}{tenant}{shut.key or ''}" for topic in sorted(shut.topics)]


def row_of(entry: Any) -> Row:
    number, fields = entry
    identity, tenant, topic, key, type_, schema, headers, body, raw, created = fields[1:21:2]
    return Row(
        int(number.partition(b"-")[0]),
        identity.decode(),
        tenant.decode(),
        topic.decode(),
        key.decode() or None,
        type_.decode() or None,
        schema.decode() or None,
        {} if headers == b"{}" else _headers.decode(headers),
        body,
        float(created),
        0,
        raw == b"1",
    )
