"""A record as an SQL row, and back."""

from __future__ import annotations

from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.keys import make_scope
from semel.model import Failure, Policy, Record, State
from semel.stores.rows import COLUMNS, TIMES, from_row, to_row

times = st.floats(min_value=1.0, max_value=1e10)
text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
names = st.text("abc' %ü🙂", min_size=1, max_size=20).filter(str.isprintable)
records = st.builds(
    Record,
    state=st.sampled_from(State),
    nonce=st.binary(min_size=16, max_size=16),
    attempts=st.integers(1, 1000),
    token=st.integers(1, 2**60),
    created=times,
    updated=times,
    lease_until=times,
    expires=times | st.just(inf),
    policy=st.sampled_from(Policy),
    fingerprint=st.sampled_from([b"", b"f" * 32]),
    fingerprint_version=st.integers(1, 3),
    settled=st.none() | times,
    tombstone=st.just(0.0) | times,
    not_before=st.just(0.0) | times,
    noted=st.just(0.0) | times,
    resolved=st.booleans(),
    marker=text,
    result=st.binary(max_size=50),
    ref=st.none() | text,
    error=st.none() | st.builds(Failure, type=text, code=st.none() | text, message=text),
    labels=st.none() | st.dictionaries(text, text, min_size=1, max_size=3),
    steps=st.binary(max_size=20),
    secret_id=text,
    scope=st.builds(lambda key: make_scope("semel", "acme", "pay", key), names),
)


@given(records)
def test_a_record_comes_back_from_its_row(record: Record) -> None:
    row = to_row(record)
    assert len(row) == len(COLUMNS)
    assert from_row(row) == record


@given(records)
def test_texts_that_a_connection_leaves_as_bytes_are_read(record: Record) -> None:
    row = [value.encode() if isinstance(value, str) else value for value in to_row(record)]
    assert from_row(row) == record


@given(records)
def test_rows_hold_plain_values_only(record: Record) -> None:
    for name, value in zip(COLUMNS, to_row(record), strict=True):
        assert value is None or type(value) in {bytes, str, int, float, bool}, name
        assert value not in {inf, -inf}, name
        if name in TIMES:
            assert value is None or type(value) is float, name


def test_drivers_may_give_other_types_of_bytes_and_truth() -> None:
    record = Record(
        State.DONE, b"n" * 16, 1, 1, 1.0, 1.0, 1.0, 2.0, result=b"r", resolved=True, scope=_scope()
    )
    row: list[Any] = [memoryview(v) if isinstance(v, bytes) else v for v in to_row(record)]
    row[COLUMNS.index("resolved")] = 1
    assert from_row(row) == record


def test_never_and_not_set_are_null() -> None:
    record = Record(State.UNKNOWN, b"n" * 16, 1, 1, 1.0, 1.0, 1.0, inf, scope=_scope())
    row = dict(zip(COLUMNS, to_row(record), strict=True))
    empty = {name for name, value in row.items() if value is None}
    assert empty == {
        "fingerprint", "expires", "settled", "tombstone", "not_before", "noted", "marker", "result", "ref",
        "error_type", "error_code", "error_message", "labels", "steps", "secret_id",
    }  # fmt: skip


def test_empty_labels_are_no_labels() -> None:
    record = Record(State.DONE, b"n" * 16, 1, 1, 1.0, 1.0, 1.0, 2.0, labels={}, scope=_scope())
    assert from_row(to_row(record)).labels is None


def test_a_record_without_its_scope_cannot_be_stored() -> None:
    with pytest.raises(ValueError, match="without its scope"):
        to_row(Record(State.DONE, b"n" * 16, 1, 1, 1.0, 1.0, 1.0, 2.0))


@pytest.mark.parametrize(
    "column, value",
    [("state", "asleep"), ("policy", "maybe"), ("labels", "{"), ("labels", '{"a": 1}')],
)
def test_a_row_that_was_never_written_here_is_refused(column: str, value: str) -> None:
    record = Record(State.DONE, b"n" * 16, 1, 1, 1.0, 1.0, 1.0, 2.0, scope=_scope())
    row = list(to_row(record))
    row[COLUMNS.index(column)] = value
    with pytest.raises((ValueError, msgspec.DecodeError)):
        from_row(row)


def test_every_column_is_named_once_and_times_are_columns() -> None:
    assert len(set(COLUMNS)) == len(COLUMNS)
    assert set(COLUMNS) >= TIMES


def _scope() -> Any:
    return make_scope("semel", "acme", "pay", "key")
