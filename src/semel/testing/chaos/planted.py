"""Bugs planted in the workers of a run: a matrix that does not see a removed fence on a real store proves nothing.

`explore(jobs, mutants=[NAME])` plants them in every worker, and must find a disagreement. They are those of
`semel.testing.mutants`, and some here that the contract suite need not tell from the right ones: two owners at the same time do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from semel.testing.mutants import MUTANTS
from semel.testing.mutants.plant import Patch

__all__ = ["FENCES", "plant"]


def _broken(text: str, predicate: str, instead: str) -> str:
    found, count = re.subn(predicate, instead, text)
    if not count:
        raise LookupError(f"the predicate to be left out is not there any more: {predicate}")
    return found


def _postgres(statements: str) -> Sequence[Patch]:
    from semel.stores.postgres import sql

    real = vars(sql)["_text"]
    sql.statements.cache_clear()

    def text(*args: Any) -> str:
        parts = re.split(r"(?m)^(?=-- name: )", real(*args))
        mine = [at for at, part in enumerate(parts) if part.startswith(f"-- name: {statements}")]
        for at in mine:
            # The parameter stays: a server refuses a statement that does not use one it was given.
            parts[at] = _broken(parts[at], r"r\.nonce = (\$\d+::bytea|\w+\.nonce)", r"\1 is not null")
        return "".join(parts)

    return [(sql, "_text", text)]


def _mysql(statement: str) -> Sequence[Patch]:
    from semel.stores.mysql import rows

    real = rows.Statements.__getitem__

    def broken(self: Any, name: str) -> str:
        text = real(self, name)
        return _broken(text, r"r\.`nonce` = (%\(nonce\)s)", r"\1 IS NOT NULL") if name == statement else text

    return [(rows.Statements, "__getitem__", broken)]


def _renewing() -> Sequence[Patch]:
    from semel.stores.redis import record, store
    from semel.stores.redis.calls import Script

    real = record.RENEW
    broken = Script(real.name, _broken(real.source, re.escape("if nonce ~= mine then"), "if false then"))
    return [(module, "RENEW", broken) for module in (record, store) if "RENEW" in vars(module)]


_OWN: Final[dict[str, Callable[[], Sequence[Patch]]]] = {
    "postgres-settle-of-anybody": lambda: _postgres("settle"),
    "mariadb-settle-of-anybody": lambda: _mysql("settle"),
    "mariadb-note-of-anybody": lambda: _mysql("note"),
    "redis-renewal-of-anybody": _renewing,
}
_REDIS: Final = tuple(
    name for name in ("redis-settle-unfenced", "redis-quick-settle-unfenced") if name in MUTANTS
)
FENCES: Final[dict[str, tuple[str, ...]]] = {
    "redis": _REDIS,
    "cluster": _REDIS,
    "postgres": ("postgres-settle-of-anybody",),
    "mariadb": ("mariadb-settle-of-anybody",),
    "sqlite": ("sqlite-settle-unfenced",),
}
"""By real store: the mutants of which each way to settle compares no nonce."""


def plant(names: Sequence[str]) -> None:
    """Into this process and whatever it forks, for good."""
    for name in dict.fromkeys(names):
        patches = _OWN[name] if name in _OWN else MUTANTS[name].patches
        for owner, attribute, value in patches():
            setattr(owner, attribute, value)
