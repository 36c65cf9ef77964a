"""What `within` needs from a caller's connection: run a statement, open a savepoint, tell errors apart. One port per family.

Every method that waits is a coroutine; those of a sync port never suspend. Drivers are not imported here: a port
is made from a connection that exists, so its driver is there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, Literal, Protocol

from semel.errors import ConfigurationError

__all__ = [
    "Dialect",
    "Port",
    "Row",
    "Savepoint",
    "Scripts",
    "SqlPort",
    "SqlSavepoint",
    "Style",
    "bound",
    "not_open",
]

Dialect = Literal["postgresql", "mysql", "sqlite"]
Style = Literal["dollar", "format", "qmark"]
Row = Sequence[Any]

_PARAMETER: Final = re.compile(r"\$(\d+)")


class Savepoint(Protocol):
    """A place to come back to. It is ended once, by `release` or by `rollback`."""

    buffers: bool
    """Whether there may be something to `flush`: an ORM is in between."""
    counted: bool
    """Whether a library keeps books about it: then those inside it must be ended before it."""

    @property
    def alive(self) -> bool:
        """False when it is known that somebody else ended it, or the transaction around it."""
        ...

    @property
    def spoilt(self) -> BaseException | None:
        """The error for which an ORM has given it up, if it is not alive for that reason."""
        ...

    async def flush(self) -> None:
        """Send what an ORM still keeps to itself, so that its errors show before the savepoint is released."""
        ...

    async def release(self) -> None: ...

    async def rollback(self) -> None:
        """Undo everything since, and end the savepoint."""
        ...


class Port(Protocol):
    colour: Literal["sync", "async"]
    dialect: Dialect
    style: Style
    mariadb: bool
    count: int
    """How many rows the last statement changed (MariaDB, MySQL: the others say so by RETURNING)."""
    lingers: bool
    """Whether a savepoint may be left to the end of the transaction: nobody but the database knows of it."""

    @property
    def scripts(self) -> Scripts | None:
        """Itself, where several statements travel in one message and savepoints are nobody's but the database's."""
        ...

    @property
    def foreseen(self) -> Dialect | None:
        """The dialect, where it is known before anything is connected."""
        ...

    @property
    def connection(self) -> object:
        """What identifies the caller's transaction: the same object for everything bound to it."""
        ...

    async def prepare(self) -> None:
        """Look at the transaction. ConfigurationError when there is none and none will begin by itself."""
        ...

    @property
    def begun(self) -> bool:
        """Whether the database has a transaction already (asked for SQLite only, where BEGIN takes the lock)."""
        ...

    async def run(self, sql: str, args: Sequence[Any] = ()) -> Sequence[Row]:
        """The rows of one statement written for `style`. The driver's own errors pass."""
        ...

    async def savepoint(self, name: str) -> Savepoint: ...

    def after_end(self, callback: Callable[[bool], None]) -> bool:
        """Call back once the caller has ended his transaction, and whether it is over then; False when this connection cannot
        tell."""
        ...


class SqlPort(Protocol):
    @property
    def scripts(self) -> Scripts | None: ...

    @property
    def inside(self) -> bool:
        """Whether the driver knows of an open transaction now."""
        ...

    async def run(self, sql: str, args: Sequence[Any] = ()) -> Sequence[Row]: ...


class Scripts(SqlPort, Protocol):
    async def script(self, sql: str) -> int:
        """Several statements without parameters in one message; how many rows the last one gave or changed."""
        ...


class SqlSavepoint:
    """A savepoint by name, in SQL."""

    __slots__ = ("_port", "name")
    buffers = False
    counted = False
    spoilt = None

    def __init__(self, port: SqlPort, name: str) -> None:
        self._port = port
        self.name = name

    @classmethod
    async def begin(cls, port: SqlPort, name: str) -> SqlSavepoint:
        await port.run(f"SAVEPOINT {name}")
        return cls(port, name)

    @property
    def alive(self) -> bool:
        # Whether a new transaction was begun meanwhile nobody can tell without asking: that shows at the release.
        return self._port.inside

    async def flush(self) -> None:
        """Nothing."""

    async def release(self) -> None:
        await self._port.run(f"RELEASE SAVEPOINT {self.name}")

    async def rollback(self) -> None:
        back, end = f"ROLLBACK TO SAVEPOINT {self.name}", f"RELEASE SAVEPOINT {self.name}"
        if (together := self._port.scripts) is not None:
            await together.script(f"{back};{end}")
        else:
            await self._port.run(back)
            await self._port.run(end)


def not_open(what: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(
        f"an open transaction is needed, and this {what} has none (autocommit): nothing could commit what semel writes and "
        f"your rows together. {remedy}"
    )


@cache
def bound(sql: str, style: Style) -> tuple[str, tuple[int, ...] | None]:
    """A statement written with $1, $2 … (each as often as needed) for a driver's style, and which arguments go where;
    None: all of them, as they are."""
    if style == "dollar":
        return sql, None
    order: list[int] = []

    def mark(found: re.Match[str]) -> str:
        order.append(int(found[1]) - 1)
        return "%s" if style == "format" else "?"

    text = sql.replace("%", "%%") if style == "format" else sql
    return _PARAMETER.sub(mark, text), tuple(order)
