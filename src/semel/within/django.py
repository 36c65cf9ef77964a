"""The port on Django's connection wrapper, `django.db.connection` or `connections[alias]`, inside `atomic()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from semel.errors import ConfigurationError
from semel.within.ports import Dialect, Row, Scripts, Style, not_open

__all__ = ["DjangoPort"]

_VENDORS: Final[dict[str, Dialect]] = {"postgresql": "postgresql", "mysql": "mysql", "sqlite": "sqlite"}


class _Atomic:
    """A nested `atomic()`, so that Django's own bookkeeping (on_commit hooks, needs_rollback) stays right."""

    __slots__ = ("_atomic", "_ended", "_own", "_wrapper")
    alive = True
    buffers = False
    counted = True
    spoilt = None

    def __init__(self, atomic: Any, wrapper: Any) -> None:
        self._atomic = atomic
        self._wrapper = wrapper
        self._ended = False
        atomic.__enter__()
        self._own = wrapper.savepoint_ids[-1]

    async def flush(self) -> None:
        """Django's ORM writes at once."""

    async def release(self) -> None:
        self._atomic.__exit__(None, None, None)

    async def rollback(self) -> None:
        if not self._ended:  # a second end would be that of the caller's own block
            self._ended = True
            self._check_top()
            self._atomic.__exit__(_Undo, _Undo(), None)
        if self._wrapper.needs_rollback:
            # Django says nothing here, and rolls the caller's block back at its end, as silently.
            from django.db import DatabaseError

            raise DatabaseError("the database has no such savepoint any more")

    def _check_top(self) -> None:
        """Whoever leaves a block ends the latest savepoint, whosever it is: go back to the own one, or to none."""
        savepoints, blocks = self._wrapper.savepoint_ids, self._wrapper.atomic_blocks
        if savepoints and savepoints[-1] == self._own:
            return
        # Off Django's books, or the caller's outermost block would take its place for the end, and never end the transaction.
        if savepoints:
            at = savepoints.index(self._own) - len(savepoints) if self._own in savepoints else -1
            del savepoints[at]
            del blocks[at]
        raise ConfigurationError(
            "this claim was made in another `atomic()` block than it is undone in: Django goes back to the savepoint of the "
            "innermost block only, so nothing is undone. Roll the whole transaction back (if you commit, the key reads as running, "
            "then as unknown); end a claim in the block that it was made in"
        )


class _Undo(Exception):
    """Tells `atomic()` to roll back; it is never raised."""


class DjangoPort:
    colour: Literal["sync", "async"] = "sync"
    style: Style = "format"  # Django's own, on every database

    def __init__(self, connection: Any) -> None:
        from django.db import connections

        # `django.db.connection` is a proxy of the current thread's connection: take that one, once.
        self._wrapper: Any = connections[connection.alias]
        vendor = _VENDORS.get(self._wrapper.vendor)
        if vendor is None:
            raise ConfigurationError(
                f"within() knows PostgreSQL, MariaDB/MySQL and SQLite, not Django's {self._wrapper.vendor!r} database"
            )
        self.dialect: Dialect = vendor
        self.foreseen = vendor
        self.mariadb = False
        self.count = -1
        self.lingers = False  # Django counts its savepoints
        self.scripts: Scripts | None = None

    @property
    def connection(self) -> object:
        return self._wrapper

    @property
    def begun(self) -> bool:
        return bool(self._wrapper.connection.in_transaction)

    async def prepare(self) -> None:
        if not self._wrapper.in_atomic_block:
            raise not_open("Django connection", "Use `with transaction.atomic():` around it")
        if self.dialect == "mysql":
            self.mariadb = bool(self._wrapper.mysql_is_mariadb)

    async def run(self, sql: str, args: Sequence[Any] = ()) -> Sequence[Row]:
        with self._wrapper.cursor() as cursor:
            cursor.execute(sql, tuple(args) or None)
            self.count = cursor.rowcount
            rows: Sequence[Row] = cursor.fetchall() if cursor.description else ()
            return rows

    async def savepoint(self, name: str) -> _Atomic:
        del name  # Django numbers its own
        from django.db import transaction

        return _Atomic(transaction.atomic(using=self._wrapper.alias), self._wrapper)

    def after_end(self, callback: Callable[[bool], None]) -> bool:
        # Django tells of a commit only; a rollback would be missed.
        del callback
        return False
