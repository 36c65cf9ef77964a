"""Whatever a client sends: a key or a refusal, never anything else; equal requests and only those look equal."""

from __future__ import annotations

import re
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel import (
    CodecError,
    ConfigurationError,
    InProgress,
    KeyExpired,
    KeyMismatch,
    LeaseLost,
    NotRecorded,
    OutcomeUnknown,
    PreviousFailure,
    StoreUnavailable,
)
from semel.grpc.answers import Answer, recorded
from semel.grpc.refusals import REASONS, Refusal, of_error
from semel.grpc.requests import Fingerprint, Received, find_key
from semel.grpc.rules import Method, Rules, patience, words_for
from semel.http.snapshot import Snapshot
from tests.grpc.lab import shop

metadata = st.lists(
    st.tuples(st.sampled_from(["idempotency-key", "x-idem-key", "other"]), st.text() | st.binary()),
    max_size=4,
)


@given(metadata, st.text(), st.sampled_from(["", "request_id"]))
def test_g02_any_metadata_is_a_key_or_a_refusal(entries: list[Any], text: str, field: str) -> None:
    rules = Rules(names=("idempotency-key", "x-idem-key"))
    try:
        order = shop.Order(**({field: text} if field else {}))
    except UnicodeEncodeError:
        return  # no client can send that
    found = _found(rules, entries, order)
    if isinstance(found, Refusal):
        assert found.reason.startswith("KEY_")
        assert all(value for _, value in found.metadata())
    else:
        assert found is None or re.fullmatch(r"[!-~]{1,255}", found)


def _found(rules: Rules, entries: list[Any], order: Any) -> str | Refusal | None:
    try:
        return find_key(rules, entries, order, 1e9)
    except Refusal as refusal:
        return refusal


orders = st.builds(
    shop.Order,
    item=st.text(alphabet="ab", max_size=2),
    count=st.integers(-1, 1),
    labels=st.dictionaries(st.text(alphabet="ab", max_size=2), st.text(alphabet="a", max_size=1), max_size=3),
)


@given(st.lists(orders, max_size=3), st.lists(orders, max_size=3))
def test_g05_equal_requests_and_only_those_have_one_fingerprint(one: list[Any], two: list[Any]) -> None:
    def print_of(sent: list[Any]) -> str:
        made = Fingerprint(Rules(), "/a.B/C")
        for order in sent:
            made.add(Received(b"", shop.Order.FromString(order.SerializeToString())))
        return made.hex()

    assert (print_of(one) == print_of(two)) is (one == two)


@given(
    st.builds(
        Snapshot, st.integers(100, 599), st.just([(b"etag", b"1")]) | st.just([]), st.binary(max_size=9)
    )
)
def test_g18_an_answer_of_http_is_not_taken_for_one_of_ours(snapshot: Snapshot) -> None:
    with pytest.raises(CodecError):
        Answer.decode(snapshot.encode())


@given(st.binary(max_size=50))
def test_g18_bytes_that_are_no_answer_are_told(data: bytes) -> None:
    with pytest.raises(CodecError):
        Answer.decode(data)


def test_an_answer_comes_back_as_it_was() -> None:
    answer = Answer(5, "gone", [b"\0", b""], (("etag", "1"), ("raw-bin", b"\xff")), (("etag", "2"),))
    assert Answer.decode(answer.encode(Rules(replayed=frozenset({"etag", "raw-bin"})))) == answer
    assert Answer.decode(recorded(b"x", code=grpc.StatusCode.NOT_FOUND)).status is grpc.StatusCode.NOT_FOUND


@given(st.none() | st.floats(0, 1e9), st.floats(0, 60))
def test_g06_a_caller_never_waits_longer_than_nine_tenths_of_its_time(
    remaining: float | None, wait: float
) -> None:
    waits = patience(Rules(wait=wait), remaining)
    assert 0 <= waits <= wait
    if remaining is not None:
        assert waits <= remaining * 0.9


ERRORS = {
    "IN_PROGRESS": InProgress("", retry_after=9),
    "LEASE_LOST": LeaseLost(""),
    "KEY_REUSED": KeyMismatch(""),
    "KEY_EXPIRED": KeyExpired(""),
    "OUTCOME_UNKNOWN": OutcomeUnknown(""),
    "PREVIOUS_FAILURE": PreviousFailure("E", None, ""),
    "STORE_UNAVAILABLE": StoreUnavailable(""),
    "OUTCOME_PENDING": NotRecorded(""),
}


@pytest.mark.parametrize("reason", ERRORS)
def test_every_error_of_a_call_has_an_answer(reason: str) -> None:
    refusal = of_error(ERRORS[reason])
    assert refusal is not None
    assert (refusal.reason, refusal.code) == (reason, REASONS[reason])
    assert refusal.text
    retryable = refusal.code in (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE)
    assert dict(refusal.metadata())["grpc-retry-pushback-ms"] == ("1000" if retryable else "-1")


def test_a_mistake_in_the_program_is_no_answer() -> None:
    assert of_error(ConfigurationError("")) is None


def test_g10_a_word_that_is_none_is_refused_at_startup() -> None:
    with pytest.raises(ConfigurationError, match="on_status answered 'keep'"):
        words_for(Rules(on_status=lambda code: "keep"))  # type: ignore[arg-type,return-value]  # wrong on purpose


def test_what_a_method_says_comes_before_what_all_say() -> None:
    from datetime import timedelta

    rules = Rules(wait=5, required=True).but(Method(wait=timedelta(seconds=1), required=False))
    assert (rules.wait, rules.required, rules.effects) == (1.0, False, "db")
