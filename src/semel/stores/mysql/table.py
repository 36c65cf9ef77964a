"""Semel's table, seen through one session: the reads and conditional writes that the verbs are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from semel.keys import Scope
from semel.model import Event, Record
from semel.stores.mysql.rows import Found, Statements, found_in, moment, row_of
from semel.stores.mysql.session import Parameters, Probe, Session

__all__ = ["Table", "Witness"]


class Witness:
    """An audit line that goes with a write, and until when it is kept."""

    __slots__ = ("event", "kept_until", "scope")

    def __init__(self, scope: Scope, event: Event, kept_until: float) -> None:
        self.scope = scope
        self.event = event
        self.kept_until = kept_until

    def parameters(self) -> dict[str, Any]:
        event = self.event
        kept_until = moment(self.kept_until)
        return {
            "scope": self.scope.hash,
            "at": moment(event.at),
            "kind": event.kind.value,
            "state": None if event.state is None else event.state.value,
            "actor": event.actor,
            "reason": event.reason,
            "attempt": event.attempt,
            "kept_until": kept_until,
        }


class Table:
    """Each write is one transaction and tells whether it held: the row was still the one that was read."""

    def __init__(self, session: Session, words: Statements) -> None:
        self.session = session
        self.words = words

    async def read(self, scopes: Sequence[bytes]) -> tuple[float, dict[bytes, Found]]:
        """The store's clock, and the rows that are there, by scope."""
        now, found = await self.find(self.words.of("read", len(scopes)), scopes)
        return now, {one.scope.hash: one for one in found}

    async def find(self, text: str, parameters: Parameters) -> tuple[float, list[Found]]:
        """What a statement with the packed row finds, and the store's clock (0 when it gave no row at all)."""
        rows = [found_in(row) for row in await self.session.query(text, parameters)]
        return (rows[0][0] if rows else 0.0), [found for _, found in rows if found is not None]

    async def insert(self, rows: Sequence[Sequence[Any]]) -> bool:
        """Add rows made by `row_of`, in scope order. `Duplicate` when one of them is there: then none was added."""
        values = [value for row in rows for value in row]
        await self.session.write(
            self.words.insert(len(rows)), values, probe=self._probe([row[0] for row in rows])
        )
        return True

    async def replace(self, found: Found, record: Record, witness: Witness | None = None) -> bool:
        parameters = [*row_of(record)[1:], found.scope.hash, found.nonce, found.version]
        return await self._write("replace", parameters, witness)

    async def delete(self, found: Found, witness: Witness | None = None) -> bool:
        return await self._write("delete", (found.scope.hash, found.nonce, found.version), witness)

    async def _write(self, name: str, parameters: Sequence[Any], witness: Witness | None) -> bool:
        text = self.words[name]
        if witness is None:
            return await self.session.write(text, parameters, probe=self._probe([parameters[-3]])) == 1
        same = dict(zip(("nonce", "version"), parameters[-2:], strict=True))
        parts: list[tuple[str, Sequence[Any] | Mapping[str, Any]]] = [
            (self.words["witness"], witness.parameters() | same),
            (text, parameters),
        ]
        return await self.session.transact(parts, probe=self._probe([parameters[-3]])) == [1, 1]

    async def change(self, name: str, values: Sequence[Mapping[str, Any]]) -> list[bool]:
        """Run a statement for each of `values`, as one transaction: which of them changed their row."""
        text, probe = self.words[name], self._probe([row["scope"] for row in values])
        if len(values) == 1:
            return [await self.session.write(text, values[0], probe=probe) == 1]
        counts = await self.session.transact([(text, row) for row in values], probe=probe)
        return [count == 1 for count in counts]

    async def join(self, name: str, values: Sequence[Mapping[str, Any]]) -> int:
        """Run a batch statement: how many rows it changed."""
        probe = self._probe([row["scope"] for row in values])
        return await self.session.write(*self.words.batch(name, values), probe=probe)

    def _probe(self, scopes: Sequence[bytes]) -> Probe | None:
        return None if self.session.wire.mariadb else (self.words.of("probe", len(scopes)), scopes)
