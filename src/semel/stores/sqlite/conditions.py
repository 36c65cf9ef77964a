"""Which rows a scan or a purge looks at, as SQL that leads SQLite to an index."""

from __future__ import annotations

from typing import Any, Final

from semel.model import State
from semel.store import Query
from semel.stores.queries import ATTENTION, check_limit, not_a_cursor, states_of

__all__ = ["BODIES", "ENDED", "LAPSED", "condition"]

# What a purge looks at; each one holds the condition of an index word for word, or SQLite would not use it.
OPEN: Final = "(state = 'running' OR state = 'unknown' OR state = 'failed')"
SETTLED: Final = "state <> 'running'"
# Says nothing of the state, but each half of it leads to an index.
_EITHER: Final = f"(({SETTLED} AND tenant = :tenant) OR ({OPEN} AND state = 'running'))"
ENDED: Final = "expires IS NOT NULL AND state <> 'running' AND max(expires, coalesce(tombstone, 0)) <= :now"
LAPSED: Final = f"{OPEN} AND state = 'running' AND lease_until <= :now AND expires <= :now"
BODIES: Final = (
    "tombstone IS NOT NULL AND expires > 0 AND expires <= :now"  # a purge takes the time of expiry, too
)

# `model.view` restated, because a scan must not decode what it does not return; a test compares the two.
_SEEN_AS: Final = {
    State.RUNNING: (
        "(state = 'running' AND CASE policy WHEN 'retry' THEN expires IS NULL OR expires > :now "
        "ELSE lease_until > :now END)"
    ),
    State.UNKNOWN: "(state = 'unknown' OR state = 'running' AND policy <> 'retry' AND lease_until <= :now)",
    State.DONE: "(state = 'done' AND (expires IS NULL OR expires > :now))",
    State.FAILED: "(state = 'failed' AND (expires IS NULL OR expires > :now))",
    State.RELEASED: "(state = 'released' AND (expires IS NULL OR expires > :now))",
    State.EXPIRED: "(state IN ('done', 'failed') AND expires <= :now AND tombstone > :now)",
}
_RUNS: Final = frozenset({State.RUNNING, State.UNKNOWN})  # what a row that says "running" may read as


def condition(query: Query, now: float) -> tuple[str, dict[str, Any]]:
    """The WHERE clause of a scan, in the order of its cursor, and its parameters."""
    try:
        after = int(query.cursor or 0)
    except ValueError:
        raise not_a_cursor(query) from None
    check_limit(query)
    values: dict[str, Any] = {
        "now": now,
        "after": after,
        "ref": query.ref,
        "tenant": query.tenant,
        "operation": query.operation,
    }
    states = states_of(query)
    terms = [f"({' OR '.join(_SEEN_AS[state] for state in sorted(states)) or 'FALSE'})"]
    by_index = query.tenant is not None or query.ref is not None
    if query.abandoned:
        terms.append("state = 'running' AND lease_until <= :now")
    if query.abandoned or states <= ATTENTION:
        terms.append(OPEN)
        by_index = True
    elif query.tenant is not None:
        terms.append(SETTLED if states.isdisjoint(_RUNS) else _EITHER)
    terms += [f"{name} = :{name}" for name in ("ref", "tenant", "operation") if values[name] is not None]
    # The plus keeps SQLite from walking the whole table in id order where an index leads straight to the few rows.
    number = "+id" if by_index else "id"
    return f"{' AND '.join(terms)} AND {number} > :after ORDER BY {number}", values
