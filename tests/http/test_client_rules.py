"""What an answer means for a keyed request: the pure rules, case by case."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from semel.http.clients.answers import Answer, Judgement, judge, read_problem, retry_after
from semel.http.problem import PROBLEMS, Problem

NOW = 1_792_000_000.0  # Wed, 14 Oct 2026 17:46:40 GMT


def judged(
    status: int, *, honoured: bool = False, trusted: bool = False, problem: Any = None, **headers: str
) -> Judgement:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    seen = None if problem is None else read_problem(json.dumps(problem).encode())
    return judge(Answer(status, named, seen), honoured=honoured, trusted=trusted, now=NOW)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize(
    "base", ["urn:semel:problem:", "https://pay.example/problems/", "https://x.example/docs#"]
)
def test_every_problem_type_is_obeyed_under_any_base(name: str, base: str) -> None:
    kind = PROBLEMS[name]
    seen = read_problem(Problem.of(name).body(base))
    assert seen is not None
    assert seen.name == name
    verdict = judge(Answer(kind.status, {}, seen), honoured=False, trusted=False, now=NOW)
    assert verdict.again == kind.retryable
    assert verdict.honoured
    assert verdict.done == (name in ("previous-failure", "response-not-stored"))


def test_h15_a_failure_that_is_kept_is_not_asked_again_and_decided_once_it_is_replayed() -> None:
    problem = {"type": "urn:semel:problem:handler-failed", "retryable": False}
    first = judged(500, trusted=True, problem=problem, idempotency_replayed="false")
    again = judged(500, trusted=True, problem=problem, idempotency_replayed="true")
    assert (first.again, first.done) == (False, False)
    assert (again.again, again.done) == (False, True)


def test_a_known_type_without_the_member_retryable_is_enough() -> None:
    assert judged(503, problem={"type": "urn:semel:problem:store-unavailable"}).again
    assert not judged(400, problem={"type": "urn:semel:problem:key-missing"}).again


def test_the_member_retryable_decides_for_types_of_others() -> None:
    assert judged(500, problem={"type": "https://x.example/overloaded", "retryable": True}).again
    assert not judged(503, trusted=True, problem={"type": "about:blank", "retryable": False}).again


def test_a_known_name_with_another_status_is_somebody_elses() -> None:
    verdict = judged(418, problem={"type": "https://x.example/in-progress"})
    assert not verdict.again
    assert not verdict.honoured


@pytest.mark.parametrize("name, status", [("key-reused", 400), ("key-expired", 412)])
def test_a_problem_of_the_key_leaves_its_action_open_under_every_profile(name: str, status: int) -> None:
    """stripe-v1 and oasis give them other statuses: the action was noted as done, and nobody knows what became of it."""
    verdict = judged(status, problem={"type": f"urn:semel:problem:{name}", "retryable": False})
    assert (verdict.again, verdict.done, verdict.honoured) == (False, False, True)


@pytest.mark.parametrize("status", [500, 502, 503, 504, 520])
def test_a_bare_5xx_is_repeated_only_where_the_key_counts(status: int) -> None:
    assert not judged(status).again
    assert not judged(status, Retry_After="1").again
    assert judged(status, trusted=True).again
    assert judged(status, honoured=True).again
    assert judged(status, idempotency_replayed="false").again
    assert not judged(status).done


@pytest.mark.parametrize("marker", ["idempotency-replayed", "idempotent-replayed"])
def test_a_replayed_failure_is_the_outcome(marker: str) -> None:
    verdict = judge(Answer(500, {marker: "true"}), honoured=True, trusted=True, now=NOW)
    assert not verdict.again
    assert verdict.done


@pytest.mark.parametrize("status", [408, 425, 429])
def test_what_was_not_run_is_repeated(status: int) -> None:
    assert judged(status).again


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 413, 501, 505])
def test_what_will_not_change_is_not_repeated(status: int) -> None:
    assert not judged(status, trusted=True, honoured=True).again


def test_422_is_never_repeated_whatever_else_it_says() -> None:
    problem = {"type": "about:blank", "retryable": True}
    assert not judged(422, trusted=True, problem=problem, stripe_should_retry="true").again


def test_a_409_that_a_handler_made_is_not_repeated() -> None:
    assert not judged(409).again
    assert judged(409, retry_after="1").again
    assert judged(409, trusted=True).again
    handlers = judged(409, trusted=True, retry_after="1", idempotency_replayed="false")
    assert not handlers.again
    assert handlers.done


def test_stripe_should_retry_is_obeyed_first() -> None:
    assert judged(500, stripe_should_retry="true").again
    assert not judged(409, trusted=True, retry_after="1", stripe_should_retry="false").again


@pytest.mark.parametrize(
    "status, done", [(200, True), (303, True), (307, False), (308, False), (404, True), (401, False)]
)
def test_an_action_is_done_when_its_answer_is_decided(status: int, done: bool) -> None:
    assert judged(status).done is done


@pytest.mark.parametrize(
    "headers, wait",
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": " 0 "}, 0.0),
        ({"retry-after": "Wed, 14 Oct 2026 17:47:00 GMT"}, 20.0),
        ({"retry-after": "Wed, 14 Oct 2026 17:47:00 GMT", "date": "Wed, 14 Oct 2026 17:46:57 GMT"}, 3.0),
        ({"retry-after": "Wed, 14 Oct 2026 17:00:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "²"}, None),
        ({}, None),
    ],
)
def test_retry_after_in_both_forms(headers: dict[str, str], wait: float | None) -> None:
    assert retry_after(headers, NOW) == wait


def test_a_problem_may_say_when_if_the_header_does_not() -> None:
    problem = {"type": "urn:semel:problem:in-progress", "retry_after": 3}
    assert judged(409, problem=problem).wait == 3.0
    assert judged(409, problem=problem, retry_after="9").wait == 9.0


@pytest.mark.parametrize(
    "body", [b"", b"no json", b"[1]", b"\xff", b'{"type": 7, "retryable": "yes", "retry_after": -1}']
)
def test_a_broken_problem_says_nothing(body: bytes) -> None:
    seen = read_problem(body)
    assert seen is None or (seen.name, seen.retryable, seen.retry_after) == (None, None, None)


@pytest.mark.parametrize(
    "text, seconds", [("60", 60.0), ("0", 0.0), ("", None), ("1.5", None), ("a day", None)]
)
def test_the_advertised_retention_is_whole_seconds(text: str, seconds: float | None) -> None:
    assert Answer(200, {"idempotency-retention": text}).retention == seconds


DATES = st.datetimes().map(lambda when: when.strftime("%a, %d %b %Y %H:%M:%S GMT"))
TEXTS = st.one_of(st.text(max_size=20), st.integers().map(str), DATES)
NAMES = ("retry-after", "date", "idempotency-retention", "idempotency-replayed", "stripe-should-retry")
PROBLEM_MEMBERS = ("type", "retryable", "retry_after", "status")
MEMBERS = st.dictionaries(
    st.sampled_from(PROBLEM_MEMBERS),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        TEXTS,
        st.sampled_from(list(PROBLEMS)),
    ),
)


@given(
    st.integers(100, 599),
    st.dictionaries(st.sampled_from(NAMES), TEXTS),
    st.one_of(MEMBERS.map(json.dumps), st.text()),
)
@example(503, {"retry-after": "9" * 400}, json.dumps({"retry_after": 10**400}))
@example(503, {"retry-after": "Mon, 01 Jan 0001 00:00:00 +2359"}, "[" * 100_000)
def test_whatever_a_server_says_there_is_a_judgement(status: int, headers: dict[str, str], body: str) -> None:
    answer = Answer(status, headers, read_problem(body.encode()))
    verdict = judge(answer, honoured=True, trusted=True, now=NOW)
    assert verdict.wait is None or verdict.wait >= 0
    assert not (verdict.again and verdict.done)
    assert not (verdict.again and (status < 400 or status == 422 or answer.replayed))
    assert answer.retention is None or answer.retention >= 0
