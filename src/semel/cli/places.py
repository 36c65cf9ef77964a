"""The key that a command is about, and the store in which it is looked for."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from semel import model
from semel.doctor import without_password
from semel.errors import ConfigurationError
from semel.hosts import scheme_of
from semel.keys import Scope, scope_hash
from semel.model import State
from semel.once import Semel
from semel.runtime import run_sync
from semel.settings import knows
from semel.store import Query
from semel.stores.sqlite.store import SqliteStore

__all__ = ["Place"]

_HASH: Final = 32
_LEAST: Final = 8  # digits, as messages have them
_DIGITS: Final = frozenset("0123456789abcdef")
_PAGE: Final = 500
_MOST: Final = 10_000  # records that are looked through where no index helps
_ATTENTION: Final[frozenset[State]] = frozenset()
_ALL: Final = frozenset(State)


@dataclass(frozen=True, slots=True)
class Place:
    """What the arguments of a command name; without a key, a store."""

    url: str
    table: str
    prefix: str
    key: str = ""
    by_scope: bool = False
    tenant: str | None = None
    operation: str | None = None

    def opened(self) -> Semel:
        """The store that is there; none is made."""
        if scheme_of(self.url) == "memory":
            raise ConfigurationError(
                f"{self.url} lives in the process of the program that opened it: nobody else can look into it; ask the "
                "program (once.find(), once.peek(key)), or give it another store"
            )
        if self.by_scope and (self.tenant is not None or self.operation is not None):
            raise ConfigurationError(
                "a scope has its own tenant and operation: leave --tenant and --operation out"
            )
        once = Semel(
            self.url,
            tenant=_or_default(self.tenant),
            operation=_or_default(self.operation),
            table=self.table,
            prefix=self.prefix,
            create=False,
            # Redis: what the program has indexed is found, and stays so when it is decided about. For a program
            # without index= a decision leaves a small key, which ends with its record.
            index={"ref"} if knows(self.url, "index") else (),
        )
        _see_to(once)
        return once

    def name(self, once: Semel) -> str | Scope:
        """What names the record: the key, or the scope that its digits stand for."""
        if not self.by_scope:
            return self.key
        digits = self.key.lower()
        if _LEAST <= len(digits) < 2 * _HASH and _DIGITS.issuperset(digits):
            return _beginning_with(once, digits)
        if len(digits) != 2 * _HASH or not _DIGITS.issuperset(digits):
            raise ConfigurationError(
                "a scope is 64 hexadecimal digits, as `semel ls --json` and semel_scope of a log line have it; the first "
                f"{_LEAST} are enough for a key that needs attention. It is not {self.key!r}"
            )
        unnamed = Scope(bytes.fromhex(digits), "–", "–", self.key)
        record = once.peek(unnamed)
        return unnamed if record is None or record.scope is None else record.scope

    def of(self, name: str | Scope) -> Place:
        """The same one with all digits of its scope: the first ones are found only as long as the key needs attention."""
        return replace(self, key=name.hex) if isinstance(name, Scope) else self

    def missing(self) -> str:
        """That it is not there, and where it was looked for; a scope says that by itself."""
        where = f" under tenant {_or_default(self.tenant)!r}, operation {_or_default(self.operation)!r}"
        return f"no record of {self.key!r}{'' if self.by_scope else where}"

    def elsewhere(self, once: Semel) -> list[str]:
        """Where else the key is: the tenant or the operation of a command are easily forgotten."""
        if self.by_scope:
            return []

        def is_ours(scope: Scope) -> bool:  # by its hash: the key that is kept may be masked
            return scope.hash == scope_hash(self.prefix, scope.tenant, scope.operation, self.key)

        lists_all = once._engine().store.capabilities.lists_all  # noqa: SLF001 - our own face
        found, whole = _look_through(once, _ALL if lists_all else _ATTENTION, is_ours)
        if found:
            return [
                f"the key is there under tenant {scope.tenant!r}, operation {scope.operation!r}"
                for scope in found
            ]
        given = self.tenant is not None and self.operation is not None
        return (
            [] if given or (lists_all and whole) else ["give --tenant and --operation, if its call has them"]
        )

    def command(self, verb: str, *more: str) -> str:
        """A command about this key that can be pasted; but a password is not shown."""
        names = ["--scope"] if self.by_scope else []
        for option, given, default in (
            ("--tenant", self.tenant, "default"),
            ("--operation", self.operation, "default"),
            ("--table", self.table, "semel"),
            ("--prefix", self.prefix, "semel"),
        ):
            names += [option, given] if given not in (None, default) else []
        url = without_password(self.url)
        if self.key.startswith("-"):
            return shlex.join(["semel", verb, url, *names, *more, "--", self.key])
        return shlex.join(["semel", verb, url, self.key, *names, *more])


def _or_default(name: str | None) -> str:
    return "default" if name is None else name


def _see_to(once: Semel) -> None:
    """A file that is not there is a mistyped name: no other --table would be found in it."""
    store = once._store  # noqa: SLF001 - our own face
    if isinstance(store, SqliteStore) and not Path(store.path).exists():
        once.close()
        raise ConfigurationError(
            f"there is no file {store.path!r}: correct the URL. The program that uses it makes it"
        )


def _beginning_with(once: Semel, digits: str) -> Scope:
    """The scope of the one record that begins so: of those that need attention, which have an index, or else of all."""

    def begins(scope: Scope) -> bool:  # of every program: whose the scope is, its digits say
        return scope.hex.startswith(digits)

    lists_all = once._engine().store.capabilities.lists_all  # noqa: SLF001 - our own face
    found, whole = _look_through(once, _ATTENTION, begins)
    if not found and lists_all:
        found, whole = _look_through(once, _ALL, begins)
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigurationError(f"{len(found)} scopes begin with {digits}: give more digits of it")
    if lists_all and whole:
        raise ConfigurationError(f"no record begins with {digits}")
    some = f"of the first {_MOST:,}" if lists_all else "that needs attention (running, unknown, failed)"
    raise ConfigurationError(
        f"no record {some} begins with {digits}: others are found by all 64 digits only, as semel_scope of a log line has "
        "them"
    )


def _look_through(
    once: Semel, states: frozenset[State], wanted: Callable[[Scope], bool]
) -> tuple[list[Scope], bool]:
    """The scopes that are wanted among the first records in these states, and whether those were all."""
    store, query = once._engine().store, Query(states=states, limit=_PAGE)  # noqa: SLF001 - our own face
    found: list[Scope] = []
    for _ in range(_MOST // _PAGE):
        page = run_sync(store.scan(query))
        live = (record.scope for record in page.records if model.view(record, page.now) is not None)
        found += [scope for scope in live if scope is not None and wanted(scope)]
        if not page.cursor:
            return found, True
        query = msgspec.structs.replace(query, cursor=page.cursor)
    return found, False
