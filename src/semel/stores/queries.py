"""What a scan asks for, read the same way by every store: which states, which records, from where on."""

from __future__ import annotations

from typing import Final

from semel import model
from semel.errors import ConfigurationError
from semel.model import Record, State
from semel.store import Query

__all__ = ["ATTENTION", "check_limit", "matches", "not_a_cursor", "page_start", "states_of"]

ATTENTION: Final = frozenset({State.RUNNING, State.UNKNOWN, State.FAILED})
_ALL: Final = frozenset(State)
_HASH: Final = 32


def states_of(query: Query) -> frozenset[State]:
    """The states to find: what needs attention, unless states are named or the record is (by its ref).

    A ref is gone with the body it points to: a tombstone has none.
    """
    if query.ref is None:
        return query.states or ATTENTION
    return (query.states or _ALL) - {State.EXPIRED}


def matches(record: Record, query: Query, now: float) -> bool:
    """Whether a record, as it reads now, is what the query asks for."""
    scope, seen = record.scope, model.view(record, now)
    if seen is None or scope is None or query.ref not in (None, record.ref):
        return False
    if query.abandoned and not (record.state is State.RUNNING and now >= record.lease_until):
        return False
    return (
        seen in states_of(query)
        and query.tenant in (None, scope.tenant)
        and query.operation in (None, scope.operation)
    )


def page_start(query: Query) -> bytes:
    """The scope hash after which the page begins, where pages go by scope; a page of nothing is refused, too."""
    check_limit(query)
    try:
        after = bytes.fromhex(query.cursor)
    except ValueError:
        raise not_a_cursor(query) from None
    if len(after) not in (0, _HASH):
        raise not_a_cursor(query)
    return after


def check_limit(query: Query) -> None:
    if query.limit < 1:
        raise ConfigurationError(f"a page has at least 1 record, not {query.limit}")


def not_a_cursor(query: Query) -> ConfigurationError:
    return ConfigurationError(
        f"{query.cursor!r} is not a cursor, or not one of this store's: pass Page.cursor back as it came, to the same store"
    )
