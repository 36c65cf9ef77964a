"""Sinks of these tests' own, as a third party would write them."""

from __future__ import annotations

from collections.abc import Sequence

from semel.messaging import Fenced, Guarantee, Rejected, Row, SinkUnavailable


class Book:
    """An exact sink in memory: rows and frontier change together."""

    guarantee: Guarantee = "exact"

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.frontier: dict[int, int] = {}
        self.epochs: dict[int, int] = {}
        self.away = False
        self.calls = 0
        self.bad: dict[str, str] = {}

    async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
        self.calls += 1
        if self.away:
            raise SinkUnavailable("the book is closed")
        if self.epochs.get(part, 0) > epoch:
            raise Fenced(f"epoch {self.epochs[part]}")
        self.epochs[part] = epoch
        found = self.frontier.get(part, 0)
        if found >= batch or found < batch - 1:
            return found
        refused = {row.id: self.bad[row.id] for row in rows if row.id in self.bad}
        if refused:
            raise Rejected(refused)
        self.rows += rows
        self.frontier[part] = batch
        return found

    @property
    def ids(self) -> list[str]:
        return [row.id for row in self.rows]


class Post:
    """An at-least-once sink in memory that takes messages one by one, as a queue or a webhook does."""

    guarantee: Guarantee = "at-least-once"

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.bad: dict[str, str] = {}

    async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
        del part, epoch, batch
        delivered, reasons = set[str](), dict[str, str]()
        stopped: set[tuple[str, str | None]] = set()
        for row in rows:
            line = (row.tenant, row.key if row.key is not None else row.id)
            if line in stopped:
                continue
            if row.id in self.bad:
                reasons[row.id] = self.bad[row.id]
                stopped.add(line)
                continue
            self.rows.append(row)
            delivered.add(row.id)
        if reasons:
            raise Rejected(reasons, delivered=delivered)
        return None

    @property
    def ids(self) -> list[str]:
        return [row.id for row in self.rows]


def in_order(rows: Sequence[Row]) -> bool:
    last: dict[str | None, int] = {}
    for row in rows:
        if last.get(row.key, -1) >= row.seq:
            return False
        last[row.key] = row.seq
    return True
