"""The caller's transaction as a store: claim, settle and peek on his connection, each claim in a savepoint of its own.

It is a `Store` so that the layers about records (encrypt, namespace) work over it unchanged. A claim that is won leaves
its savepoint open: the function runs inside it, so that one ROLLBACK TO undoes the function and the record together.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final, NoReturn

from semel import model
from semel.calls import add_note
from semel.errors import ConfigurationError, InProgress
from semel.keys import Scope, mask
from semel.model import Answer, Ask, Busy, Kind, Note, Record, Renewal, Replay, Settle, Verdict, Won
from semel.runtime import Runtime
from semel.store import Capabilities, Colour, Facts, Page, Query, Store, Unwatch
from semel.within import places, records
from semel.within.failures import (
    is_failed_transaction,
    is_locked,
    is_missing_savepoint,
    is_missing_table,
    is_outside_transaction,
    is_retryable,
)
from semel.within.mysql import mysql_words
from semel.within.places import Place
from semel.within.ports import Port, Scripts, SqlSavepoint, not_open
from semel.within.postgres import postgres_words
from semel.within.records import Words
from semel.within.sqlite import patiently, sqlite_words

__all__ = ["Bound", "MissingTables", "astray", "ended"]

_LOCKED: Final = Busy(0.02, 0)
_WORDS: Final[dict[str, Callable[[str], Words]]] = {
    "postgresql": postgres_words,
    "mysql": mysql_words,
    "sqlite": sqlite_words,
}

# Which transaction, by its connection, has a savepoint of ours that was left open. What is out of date here costs a round
# trip or a level of nesting, nothing else, so it may be forgotten at any time.
_left_open: Final[dict[int, int]] = {}
_REMEMBERED: Final = 1024

# Every savepoint has a name of its own, not its key's: MariaDB deletes an older one of the same name, and that would be the
# run's, where a function peeks at its own key.
_numbers: Final = count(1)


def _a_name() -> str:
    return f"semel_n{next(_numbers)}"


class MissingTables(ConfigurationError):
    """The session's database does not hold semel's tables. The transaction is usable."""

    def __init__(self, port: Port, table: str) -> None:
        path = f" {_SCHEMAS}" if port.dialect == "postgresql" else ""
        super().__init__(
            f"the {port.dialect} database of this session or connection has no table {table!r} of semel (or not in its search "
            "path): records live beside your rows, so the tables must be there. Call create() or run what `semel schema sql "
            f"URL` prints, in that database; or bind a session of the database that the store's URL names.{path}"
        )


_SCHEMAS: Final = (
    'Where search_path differs from session to session, name the table with its schema: table="public.semel"'
)


class Bound:
    """One `within(...)`. Not for several tasks or threads at once, as the connection is not."""

    def __init__(self, port: Port, table: str, outer: Store, runtime: Runtime) -> None:
        self.port = port
        self.patience = 0.001
        self.table = table
        self._outer = outer
        self._runtime = runtime
        self._places: dict[bytes, Place] = {}
        self._words: Words | None = None

    @property
    def colour(self) -> Colour:
        return self.port.colour

    @property
    def capabilities(self) -> Capabilities:
        return self._outer.capabilities

    @property
    def words(self) -> Words:
        """Known once the port has looked at its connection."""
        if self._words is None:
            self._words = _WORDS[self.port.dialect](self.table)
        return self._words

    # ----------------------------------------------------------------------------------------- verbs
    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        return [await self.claim_one(ask) for ask in asks]

    def claim_one(self, ask: Ask) -> Coroutine[Any, Any, Verdict]:
        connection = id(self.port.connection)
        if places.is_open(connection, (ask.scope.hash, self.table)):
            raise InProgress(
                f"key {mask(ask.scope.key)} is run by this very transaction: a run cannot wait for itself. "
                "Give what runs inside of it a key or an operation of its own"
            )
        if (scripts := self.port.scripts) is not None:
            return self._claim_by_script(scripts, ask, connection)
        if self.port.dialect != "mysql" or not self.port.mariadb:
            return self._claim_by_steps(ask, connection)
        return self._claim_protected(ask, connection)

    async def _claim_protected(self, ask: Ask, connection: int) -> Verdict:
        # A MySQL driver that is cancelled in the middle of a statement takes its connection with it; these are short ones.
        try:
            return await self._runtime.protect(self._claim_by_steps(ask, connection))
        except BaseException:
            if ask.nonce in self._places:
                await self._runtime.protect(self.undo(ask.nonce))
            raise

    async def _claim_by_steps(self, ask: Ask, connection: int) -> Verdict:
        try:
            began = await self._begin()
        except Exception as error:
            if is_locked(error, self.port.dialect):
                return _LOCKED
            raise
        try:
            point = await self.port.savepoint(_a_name())
        except BaseException as error:
            if began:
                await self._unbegin()
            if is_outside_transaction(error, self.port.dialect):
                raise _no_transaction() from error
            raise
        claim = records.claim(self.words, self.port, ask, 0.0 if began else self.patience)
        return await self._decide(Place(point, began, connection, (ask.scope.hash, self.table)), ask, claim)

    async def _claim_by_script(self, scripts: Scripts, ask: Ask, connection: int) -> Verdict:
        """PostgreSQL: the savepoint and the claim of a new key in one round trip."""
        # Its name is the attempt's, not the key's: where SAVEPOINT itself was refused, no older one must answer to it.
        own = SqlSavepoint(scripts, f"semel_{ask.nonce[:8].hex()}")
        place, now = Place(own, False, connection, (ask.scope.hash, self.table)), time.time()
        words = self._words = postgres_words(self.table)
        try:
            if await scripts.script(words.opening(own.name, ask, now, self.patience)) == 1:
                self._won(place, ask.nonce)
                return model.claim(None, ask, now)[0]
        except BaseException as error:  # noqa: BLE001 - raised again, unless it says that the key is locked
            return await self._refused(place, error)
        return await self._decide(place, ask, records.claim(words, self.port, ask, self.patience, look=True))

    def _won(self, place: Place, nonce: bytes) -> None:
        self._places[nonce] = place
        places.enter(place)

    async def _decide(self, place: Place, ask: Ask, claim: Awaitable[Verdict]) -> Verdict:
        try:
            verdict = await claim
            if type(verdict) is Won:
                self._won(place, ask.nonce)
            elif type(verdict) is Replay and not place.began:
                await place.point.release()
            else:
                await self._leave(place)
        except BaseException as error:  # noqa: BLE001 - raised again, unless it says that the key is locked
            return await self._refused(place, error)
        return verdict

    async def _refused(self, place: Place, error: BaseException) -> Verdict:
        """A claim ended in an error: leave the caller's transaction as it was. Raises, unless the key is locked."""
        dialect = self.port.dialect
        if is_outside_transaction(error, dialect):
            raise _no_transaction() from error
        if is_failed_transaction(error, dialect):
            raise error  # the caller's, before us: the savepoint itself was refused
        left = await self._runtime.protect(self._leave_after(place, error))
        if is_missing_table(error, dialect):
            raise MissingTables(self.port, self.table) from error
        # InnoDB may end the whole transaction with a lock that it did not get (innodb_rollback_on_timeout): InProgress would
        # say that the caller's rows are still there, and a second try would run without them.
        if left and is_locked(error, dialect):
            return _LOCKED
        raise error

    async def _begin(self) -> bool:
        """SQLite: take the write lock before the savepoint. A savepoint alone would be a transaction of its own."""
        if self.port.dialect != "sqlite" or self.port.begun:
            return False
        try:
            await patiently(self.port, self.patience, "BEGIN IMMEDIATE")
        except BaseException:
            await self._unbegin()
            raise
        return True

    async def _unbegin(self) -> None:
        """Cancelled, or struck by a signal, when the lock was taken already: what was raised before is what tells."""
        with suppress(Exception):
            if self.port.begun:
                await self.port.run("ROLLBACK")

    async def _leave(self, place: Place, inside: Sequence[Place] = ()) -> None:
        """Undo everything since. Those `inside`, the latest first, are undone with it."""
        for each in inside:
            if each.is_counted:
                await each.point.rollback()
                each.gone = True
        await place.point.rollback()
        for each in inside:
            each.gone = True
            places.leave(each)
        if place.began:
            await self.port.run("ROLLBACK")

    async def _leave_after(self, place: Place, error: BaseException) -> bool:
        """After an error. False: the database has ended the whole transaction with it (a deadlock, a lost connection)."""
        try:
            await self._leave(place)
        except Exception as second:  # noqa: BLE001 - the first error is the one that tells
            if not is_retryable(error, self.port.dialect):
                add_note(
                    error,
                    f"the savepoint could not be rolled back either ({second}): roll the whole transaction back",
                )
            return False
        return True

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        return [await self.settle_one(end) for end in ends]

    async def settle_one(self, end: Settle) -> Answer:
        if not end.new_nonce:
            if end.kind is not Kind.DONE:
                if (
                    end.kind is not Kind.RELEASED
                ):  # a failure is kept by the store outside, after the rollback
                    _not_here(f"outcome {end.kind.value!r} of its own")
                await self.undo(end.nonce)  # by a layer that cannot read what was granted
                return Answer.OK
            transaction = await (self._words or self.words).finish(self.port, end)
            if transaction is None:
                return Answer.LOST
            self._places[end.nonce].transaction = transaction
            return Answer.OK
        # A probe's word, before any claim: it needs a savepoint of its own.
        await self._begin()
        place = Place(await self.port.savepoint(_a_name()), False)
        try:
            answer = await records.settle(self.words, self.port, end, self.patience)
        except BaseException as error:
            await self._runtime.protect(self._leave_after(place, error))
            raise
        await place.point.release()
        return answer

    async def peek(self, scope: Scope) -> tuple[Record | None, float]:
        await self.port.prepare()
        # An error ends a PostgreSQL transaction, unless there is a savepoint. SQLite needs none, and no lock to read.
        point = None if self.port.dialect == "sqlite" else await self.port.savepoint(_a_name())
        try:
            found = await records.peek(self.words, self.port, scope)
        except BaseException as error:
            if point is not None:
                await self._runtime.protect(self._leave_after(Place(point, False), error))
            if is_missing_table(error, self.port.dialect):
                raise MissingTables(self.port, self.table) from error
            raise
        if point is not None:
            await point.rollback()
        return found

    async def watch(self, scope: Scope, wake: Callable[[], None]) -> Unwatch:
        del scope, wake
        _not_here("watchers")

    # ------------------------------------------------------------------------------- the end of a run
    def flush(self, nonce: bytes) -> Awaitable[None] | None:
        """To be awaited, unless there is nothing to flush. Raises when the transaction is known to be over."""
        place = self._places[nonce]
        if place.gone:
            raise _undone()
        point = place.point
        if not point.alive:
            if (error := point.spoilt) is not None:
                raise _spoilt() from error
            raise ended()
        return point.flush() if point.buffers else None

    async def keep(self, nonce: bytes) -> None:
        """The run is settled: its savepoint becomes part of the caller's transaction."""
        try:
            await self._release(self._places[nonce])
        except Exception as error:
            if is_missing_savepoint(error, self.port.dialect):
                raise ended() from error
            raise
        self._forget(nonce)

    async def _release(self, place: Place) -> None:
        inside = places.inside(place)
        for each in inside:
            if each.is_counted:
                await each.point.release()
                each.merged = True
        if not place.merged:
            await place.point.release()
        for each in inside:
            each.merged = True

    def keeps_open(self, nonce: bytes) -> bool:
        """PostgreSQL: the caller's commit releases the savepoint as well as `keep` could, without a round trip. One per
        transaction: many would be nested in each other. That the transaction is the claim's has the settle seen."""
        place = self._places[nonce]
        if not self.port.lingers or not place.transaction or places.inside(place):
            return False
        connection = id(self.port.connection)
        if _left_open.get(connection) == place.transaction:
            return False
        if len(_left_open) >= _REMEMBERED:
            _left_open.clear()
        _left_open[connection] = place.transaction
        self._forget(nonce)
        return True

    def has(self, nonce: bytes) -> bool:
        """Whether a claim was won here and is not ended."""
        return nonce in self._places

    async def undo(self, nonce: bytes) -> None:
        """Take back the record and everything since. The caller's transaction is as before the claim."""
        place = self._places[nonce]
        inside = places.inside(place)
        self._forget(nonce)
        if place.merged and not place.gone:
            raise _merged()
        if not place.gone:
            await self._leave(place, inside)

    def _forget(self, nonce: bytes) -> None:
        places.leave(self._places.pop(nonce))

    @property
    def holds_everything(self) -> bool:
        """SQLite: as long as the caller's transaction is open nobody else can write. Never raises."""
        if self.port.dialect != "sqlite":
            return False
        try:
            return self.port.begun
        except Exception:  # noqa: BLE001 - closed, or given up by SQLAlchemy where its caller was cancelled
            # Its lock may go only with the error that is on its way now: a cursor in its traceback keeps the file open.
            return True

    # ----------------------------------------------------------------------------- not in a transaction
    async def renew(self, renewals: Sequence[Renewal]) -> list[Answer | Exception]:
        del renewals
        _not_here("a lease")

    async def note(self, note: Note) -> Answer:
        del note
        _not_here("steps")

    async def scan(self, query: Query) -> Page:
        return await self._outer.scan(query)

    async def purge(self, limit: int) -> int:
        return await self._outer.purge(limit)

    async def facts(self) -> Facts:
        return await self._outer.facts()

    async def aclose(self) -> None:
        """The connection is the caller's."""


def _not_here(what: str) -> NoReturn:
    raise ConfigurationError(
        f"a run inside a caller's transaction has no {what}: it commits or rolls back as a whole"
    )


def _no_transaction() -> ConfigurationError:
    return not_open("connection", "Begin a transaction first")


def ended(*, unless_moved: bool = False) -> ConfigurationError:
    """`unless_moved`: the record is not found, for which there is one more reason."""
    instead = f" {_MOVED}" if unless_moved else ""
    return ConfigurationError(
        "the function ended the transaction that within() was bound to (commit, rollback or close): the record and your "
        "rows are no longer one unit. If it committed, the key now reads as running, then as unknown: look the effect up and "
        f"call resolve(...). Let the caller of execute() commit.{instead}"
    )


def astray(table: str) -> ConfigurationError:
    """The table was there at the claim, and at the settle it is not."""
    return ConfigurationError(
        f"the table {table!r} of semel was found before the function ran, and is not there any more: no outcome is recorded. {_MOVED}"
    )


_MOVED: Final = (
    "Did the function change search_path, or the database (USE), so that the table's name means another one? Then set it back before "
    'it returns, or name the table with its schema, as table="public.semel"'
)


def _spoilt() -> ConfigurationError:
    return ConfigurationError(
        "a flush failed in the function, which caught the error and went on: SQLAlchemy has rolled back everything that the "
        "function did. Put what may fail into `with session.begin_nested():` and catch its error outside of that; or let it pass"
    )


def _undone() -> ConfigurationError:
    return ConfigurationError(
        "an older claim of this transaction was undone while this one was open (it failed, or was left without complete()), and "
        "everything since with it: the record of this claim and what it had written. Roll the transaction back and claim anew; "
        "end the claims of one transaction in the reverse order, the latest first"
    )


def _merged() -> ConfigurationError:
    return ConfigurationError(
        "an older claim of this transaction was completed while this one was open, so that what they wrote is one: this claim "
        "can be completed, and no longer undone alone. Roll the whole transaction back (if you commit, the key reads as "
        "running, then as unknown); end the claims of one transaction in the reverse order, the latest first"
    )
