"""One connection for the length of a verb: binding, sending, and errors told apart. One body; each driver is a `Wire`.

Several statements travel in one packet, so that a guard, a transaction or an audit line costs no trip of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from semel.errors import CodecError
from semel.stores.mysql.errors import Lost, too_large, translate
from semel.stores.places import Place

__all__ = ["Answers", "Parameters", "Probe", "Session", "Wire"]

Row = Sequence[Any]
Answers = list[tuple[int, Sequence[Row]]]
Parameters = Sequence[Any] | Mapping[str, Any]
Probe = tuple[str, Sequence[bytes]]
_NO_WAIT: Final = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR "
_COMMITTED: Final = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED;\n"
# What our own connections are set to. In MariaDB a locked row is answered at once and asked for again; MySQL cannot
# wait less than a second.
_MARIADB_LOCKS: Final = "SESSION innodb_lock_wait_timeout = 0"
_MYSQL_LOCKS: Final = "SESSION innodb_lock_wait_timeout = 1"


class Wire(Protocol):
    """What a driver's connection does for a session."""

    mariadb: bool
    owned: bool
    """Made by us: its session settings are ours."""
    errors: tuple[type[Exception], ...]
    """What its driver raises."""

    def escape(self, value: Any) -> str:
        """A value as SQL text."""
        ...

    async def send(self, sql: bytes, patience: float) -> Answers:
        """Run what is in one packet; for each statement the rows it changed and the rows it gave."""
        ...

    @property
    def alive(self) -> bool:
        """False when the other side is known to be gone; asks nobody."""
        ...

    @property
    def in_transaction(self) -> bool: ...

    async def quit(self) -> None:
        """Say good-bye and close."""
        ...

    def cut(self) -> None:
        """Close without a word."""
        ...


class Session:
    """A wire that was taken from a pool, with the time its user may spend."""

    place: Place
    """In the pool of threads, which gives it; free again when nobody has the session any more."""

    def __init__(self, wire: Wire, where: str) -> None:
        self.wire = wire
        self.where = where
        self.limit = 0
        """The server's max_allowed_packet; 0 until it is known."""
        self.clean = True
        """No statement is half done: the wire may serve somebody else."""
        self.until = 0.0
        locks = _NO_WAIT if wire.mariadb else ""
        self._committed, self._no_wait = ("", "") if wire.owned else (_COMMITTED, locks)

    async def settle_in(self) -> None:
        """Make a new connection of ours independent of the server's defaults."""
        locks = _MARIADB_LOCKS if self.wire.mariadb else _MYSQL_LOCKS
        await self._send(
            f"SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', {locks};\n"
            "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
        )

    async def query(self, text: str, parameters: Parameters = ()) -> Sequence[Row]:
        """Read: the rows of one statement."""
        return (await self._send(self._bind(text, parameters)))[-1][1]

    async def write(self, text: str, parameters: Parameters = (), *, probe: Probe | None = None) -> int:
        """One statement that is a transaction of its own: how many rows it changed. `probe` goes ahead of it."""
        first = "" if probe is None else f"{self._committed}{self._bind(*probe)};\n"
        sql = f"{first}{self._committed}{self._no_wait}{self._bind(text, parameters)}"
        return (await self._send(sql))[-1][0]

    async def execute(self, text: str) -> None:
        """A statement without parameters that commits by itself (DDL)."""
        await self._send(text)

    async def transact(
        self, parts: Sequence[tuple[str, Parameters]], *, probe: Probe | None = None
    ) -> list[int]:
        """Several writes as one transaction in one packet: the rows that each changed. All or nothing."""
        bound = [self._no_wait + self._bind(text, parameters) for text, parameters in parts]
        first = () if probe is None else (self._bind(*probe),)
        packet = ";\n".join((f"{self._committed}START TRANSACTION", *first, *bound, "COMMIT"))
        try:
            answers = await self._send(packet)
        except Exception:
            if self.clean and self.wire.in_transaction:
                await self._send("ROLLBACK")
            raise
        return [changed for changed, _ in answers[-1 - len(parts) : -1]]

    def _bind(self, text: str, parameters: Parameters) -> str:
        if not parameters:
            return text
        literal = self._literal
        if isinstance(parameters, Mapping):
            return text % {name: literal(value) for name, value in parameters.items()}
        return text % tuple(map(literal, parameters))

    def _literal(self, value: Any) -> str:
        # Hexadecimal means the same in every sql_mode; asyncmy's own escapes do not (NO_BACKSLASH_ESCAPES).
        if isinstance(value, bytes):
            return f"X'{value.hex()}'"
        return "NULL" if value is None else self.wire.escape(value)

    async def _send(self, sql: str) -> Answers:
        try:
            packet = sql.encode()
        except UnicodeEncodeError as error:
            raise CodecError(
                f"a text holds half a surrogate pair and cannot be stored: {error.reason}"
            ) from error
        if self.limit and len(packet) >= self.limit:
            raise too_large(self.where, len(packet), self.limit)
        self.clean = False
        try:
            answers = await self.wire.send(packet, max(0.001, self.until - time.monotonic()))
        except self.wire.errors as error:
            told = translate(error, self.where)
            # Unless the connection is gone the server has answered, with a refusal: the conversation is in order.
            self.clean = not isinstance(told, Lost) and self.wire.alive
            raise told from error
        self.clean = True
        return answers
