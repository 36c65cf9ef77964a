"""What a scan asks for, decided in one place for all stores."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from semel.errors import ConfigurationError
from semel.keys import make_scope
from semel.model import Policy, Record, State
from semel.store import Query
from semel.stores.queries import ATTENTION, matches, page_start, states_of

NOW = 100.0
SCOPE = make_scope("test", "acme", "pay", "k")


def record(
    state: State, *, lease_until: float = NOW + 1, expires: float = inf, tombstone: float = 0.0
) -> Record:
    return Record(
        state,
        b"n",
        1,
        1,
        0.0,
        0.0,
        lease_until,
        expires,
        Policy.HOLD,
        ref="r1",
        scope=SCOPE,
        tombstone=tombstone,
    )


def test_a_scan_finds_what_needs_attention_unless_it_names_states_or_a_ref() -> None:
    assert states_of(Query()) == ATTENTION
    assert states_of(Query(states=frozenset({State.DONE}))) == {State.DONE}
    assert states_of(Query(ref="r1")) == frozenset(State) - {State.EXPIRED}
    assert states_of(Query(ref="r1", states=frozenset({State.EXPIRED}))) == frozenset()


@pytest.mark.parametrize(
    "query,found",
    [
        (Query(), True),
        (Query(tenant="acme", operation="pay", ref="r1"), True),
        (Query(tenant="other"), False),
        (Query(operation="other"), False),
        (Query(ref="r2"), False),
        (Query(abandoned=True), False),
        (Query(states=frozenset({State.DONE})), False),
    ],
)
def test_a_running_record_is_found_by_all_that_the_query_names(query: Query, found: bool) -> None:
    assert matches(record(State.RUNNING), query, NOW) is found


def test_a_lapsed_run_is_abandoned_and_reads_as_unknown() -> None:
    lapsed = record(State.RUNNING, lease_until=NOW)
    assert matches(lapsed, Query(abandoned=True), NOW)
    assert matches(lapsed, Query(states=frozenset({State.UNKNOWN})), NOW)
    assert not matches(lapsed, Query(states=frozenset({State.RUNNING})), NOW)


def test_what_is_over_or_has_no_name_is_not_found() -> None:
    over = record(State.DONE, expires=NOW)
    buried = record(State.DONE, expires=NOW, tombstone=NOW + 1)
    every = Query(states=frozenset(State))
    assert not matches(over, every, NOW)
    assert matches(buried, every, NOW)
    assert not matches(buried, Query(ref="r1", states=frozenset(State)), NOW)
    assert not matches(msgspec.structs.replace(record(State.RUNNING), scope=None), every, NOW)


def test_a_page_begins_after_a_scope_hash_or_at_the_beginning() -> None:
    assert page_start(Query()) == b""
    assert page_start(Query(cursor=SCOPE.hash.hex())) == SCOPE.hash


@pytest.mark.parametrize("cursor", ["no cursor", "ab", "ab" * 33])
def test_a_foreign_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(ConfigurationError, match="not a cursor, or not one of this store's"):
        page_start(Query(cursor=cursor))


def test_a_page_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least 1 record, not 0"):
        page_start(Query(limit=0))
