"""What an answer means for a request that carries a key: final, or again, and after which pause. Pure.

The rules, in their order (the first one that applies decides):
below 400 final · replayed: it is the recorded outcome, final · 422 never · `Stripe-Should-Retry` · a problem's `retryable`
or known type · 408, 425, 429 again: nothing was run · 409 again with Retry-After or from a trusted server, if no handler
made it · 5xx again only if the key was honoured, or the server is trusted · everything else is final.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, Final

import msgspec

from semel.http.problem import PROBLEMS
from semel.http.rules import PROFILES

__all__ = [
    "MAX_PROBLEM",
    "Answer",
    "Judgement",
    "ProblemSeen",
    "is_problem",
    "judge",
    "lower",
    "read_problem",
    "retry_after",
]

MAX_PROBLEM: Final = 1 << 16
_MARKERS: Final = ("idempotency-replayed", "idempotent-replayed", "idempotency-replay")
_NOT_RUN: Final = frozenset({408, 425, 429})
# What a server answers in front of the handler, and does not keep: the action has not been decided by it.
_IN_FRONT: Final = frozenset({401, 403, 407}) | _NOT_RUN
_MOVED: Final = frozenset({307, 308})
_AGES: Final = 10**9
_OUTCOMES: Final = frozenset({"previous-failure", "response-not-stored"})
_PERMANENT: Final = frozenset({501, 505, 511})
# Of each problem; some profiles of the server give it another one.
_STATUSES: Final = {
    name: {kind.status}
    | {profile.get("statuses", {}).get(name, kind.status) for profile in PROFILES.values()}
    for name, kind in PROBLEMS.items()
}


class ProblemSeen(msgspec.Struct, frozen=True):
    """The members of an RFC 9457 problem that matter here; what is missing or of a wrong type is None."""

    name: str | None = None
    retryable: bool | None = None
    retry_after: float | None = None


class Answer(msgspec.Struct, frozen=True):
    """A response without its body. Names of headers are lower-case."""

    status: int
    headers: Mapping[str, str]
    problem: ProblemSeen | None = None

    @property
    def replayed(self) -> bool:
        return any(self.headers.get(name, "").strip().lower() in ("true", "?1", "1") for name in _MARKERS)

    @property
    def marked(self) -> bool:
        """The server says that the key counted."""
        return any(name in self.headers for name in _MARKERS)

    @property
    def known(self) -> str | None:
        """The type of a problem that the idempotency layer itself answers with."""
        name = None if self.problem is None else self.problem.name
        return name if name is not None and self.status in _STATUSES.get(name, ()) else None

    @property
    def retention(self) -> float | None:
        """For how many seconds the server says that it keeps a key."""
        text = self.headers.get("idempotency-retention", "").strip()
        return float(text) if text.isascii() and text.isdecimal() else None


class Judgement(msgspec.Struct, frozen=True):
    """`again`: ask once more, after `wait` if the server said when. `honoured`: the key counts there, as this answer shows.
    `done`: the action is decided, for good."""

    again: bool
    why: str
    wait: float | None = None
    honoured: bool = False
    done: bool = False


def is_problem(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == "application/problem+json"


def read_problem(body: bytes) -> ProblemSeen | None:
    """What a problem document says; None when it is no JSON object."""
    try:
        members = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    if not isinstance(members, dict):
        return None
    retryable = members.get("retryable")
    return ProblemSeen(
        _name(members.get("type")),
        retryable if isinstance(retryable, bool) else None,
        _seconds(members.get("retry_after")),
    )


def _name(kind: object) -> str | None:
    """The base of the URI is the server's own; its last part is the name."""
    if not isinstance(kind, str):
        return None
    return kind.rstrip("/").replace(":", "/").replace("#", "/").rpartition("/")[2] or None


def _seconds(after: object) -> float | None:
    if isinstance(after, bool) or not isinstance(after, int | float) or after < 0:
        return None
    return float(min(after, _AGES))


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds from now, from either form of Retry-After; a date counts from the server's own Date. None if there is none."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdecimal():
        return float(text)
    when = _date(text)
    if when is None:
        return None
    return max(0.0, when - (_date(headers.get("date", "")) or now))


def _date(text: str) -> float | None:
    try:
        when = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return None
    return (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()


def judge(answer: Answer, *, honoured: bool, trusted: bool, now: float) -> Judgement:
    """`honoured`: an earlier attempt has shown that the key counts; `now` is the time of day, for dates in headers."""
    seen = honoured or answer.marked or answer.known is not None
    again, why = _verdict(answer, seen=seen, trusted=trusted)
    wait = None
    if again:
        wait = retry_after(answer.headers, now)
        if wait is None and answer.problem is not None:
            wait = answer.problem.retry_after
    return Judgement(again, f"{answer.status} {why}", wait, seen, done=not again and _done(answer))


def _verdict(answer: Answer, *, seen: bool, trusted: bool) -> tuple[bool, str]:
    status = answer.status
    if status < 400:
        return False, "final"
    if answer.replayed:
        return False, "the recorded outcome"
    if status == 422:
        return False, answer.known or "never repeated"
    hint = answer.headers.get("stripe-should-retry", "").strip().lower()
    if hint in ("true", "false"):
        return hint == "true", "as Stripe-Should-Retry says"
    problem = answer.problem
    if problem is not None and (word := _retryable(answer, problem)) is not None:
        return word, problem.name or "problem"
    return _by_status(answer, seen=seen, trusted=trusted)


def _retryable(answer: Answer, problem: ProblemSeen) -> bool | None:
    if problem.retryable is not None:
        return problem.retryable
    return None if answer.known is None else PROBLEMS[answer.known].retryable


def _by_status(answer: Answer, *, seen: bool, trusted: bool) -> tuple[bool, str]:
    status = answer.status
    if status in _NOT_RUN:
        return True, "not run"
    if status == 409:
        waiting = not answer.marked and (trusted or "retry-after" in answer.headers)
        return waiting, "in progress" if waiting else "a conflict"
    if status >= 500 and status not in _PERMANENT:
        if seen or trusted:
            return True, "and the key counts"
        return False, "from a server that did not show that it honours the key"
    return False, "final"


def _done(answer: Answer) -> bool:
    if answer.known is not None:
        # A failure that is given again is the recorded outcome; every other problem of the layer leaves it open.
        return answer.known in _OUTCOMES or answer.replayed
    if answer.status >= 500:
        return answer.replayed
    return answer.status not in _IN_FRONT and answer.status not in _MOVED


def lower(headers: Any) -> dict[str, str]:
    """Any library's headers by their lower-case names."""
    return {name.lower(): value for name, value in headers.items()}
