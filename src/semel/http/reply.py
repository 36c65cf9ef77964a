"""Headers and bodies of what the layer sends: first executions, replays, problems. Pure, and ready-made per route."""

from __future__ import annotations

import math
import uuid
from typing import Final

import msgspec

from semel.hooks import Emit
from semel.http.problem import FAILED, Answered, Problem
from semel.http.rules import RETENTION, Rules, Word
from semel.http.snapshot import Snapshot

__all__ = ["Replies", "Reply", "problem_reply"]

Headers = list[tuple[bytes, bytes]]
_RETENTION: Final = RETENTION.encode()
_BODILESS: Final = (204, 304)
# The request is known under its id, and what becomes of it is recorded; every other problem means that it was not taken.
_TRACKED: Final = frozenset(
    {"in-progress", "outcome-pending", "outcome-unknown", "previous-failure", "response-not-stored"}
)


class Reply(msgspec.Struct, frozen=True, gc=False):
    """An answer that is ready to be sent."""

    status: int
    headers: Headers
    body: bytes


class Replies:
    """What one route adds to responses; everything that is the same for all of them is made once."""

    __slots__ = ("_accepted", "_emit", "_first", "_kept", "_replayed", "_rules")

    def __init__(self, rules: Rules, emit: Emit | None = None) -> None:
        self._rules = rules
        self._emit = emit
        self._accepted: Headers = [(b"repeatability-result", b"accepted")] if rules.repeatability else []
        self._first: Headers = [(marker.encode(), b"false") for marker in rules.markers]
        self._kept: Headers = [*self._first, *_retention(rules.retention), *self._accepted]
        self._replayed: Headers = [
            *((marker.encode(), b"true") for marker in rules.markers),
            (b"cache-control", b"no-store"),
            *self._accepted,
        ]

    def first(self, word: Word, headers: Headers, retention: float | None = None) -> Headers:
        """The handler's own headers, and the word that its key was honoured (H12); what is not kept names no retention."""
        if word not in ("store", "replay"):
            return [*headers, *self._first, *self._accepted]
        if retention is None:
            return headers + self._kept
        return [*headers, *self._first, *_retention(retention), *self._accepted]

    def replay(self, snapshot: Snapshot) -> Reply:
        """The stored response with what belongs to this exchange: length, marker, no caching (H11, H40)."""
        status, body = snapshot.status, snapshot.body
        sent = [pair for pair in snapshot.headers if pair[0] != b"cache-control"]
        sent += self._replayed
        left = self._rules.retention if snapshot.left is None else snapshot.left
        if left != math.inf:
            sent.append((_RETENTION, b"%d" % left))
        if status < 200 or status in _BODILESS:
            return Reply(status, sent, b"")  # whatever the application gave the first time
        sent.append((b"content-length", b"%d" % len(body)))
        return Reply(status, sent, body)

    def failed(self) -> Reply:
        """What is said for a handler that raised and whose failure is kept. It is stored as it is, so its `instance` names the
        failure, not the answer (H11, H15); hooks are told of the failure itself."""
        return problem_reply(self._rules.problem_base, self._rules.problem(Problem.of(FAILED)))

    def problem(self, problem: Problem) -> Reply:
        instance = uuid.uuid4().urn
        reply = problem_reply(self._rules.problem_base, self._rules.problem(problem), instance)
        if self._emit is not None:
            self._emit(Answered(problem.kind.name, reply.status, instance))
        if self._rules.repeatability:
            said = b"accepted" if problem.kind.name in _TRACKED else b"rejected"
            reply.headers.append((b"repeatability-result", said))
        return reply


def _retention(seconds: float) -> Headers:
    return [] if seconds == math.inf else [(_RETENTION, b"%d" % seconds)]


def problem_reply(base: str, problem: Problem, instance: str | None = None) -> Reply:
    """A problem, with a name of its own: `instance` tells one occurrence from the next, and nothing about the request."""
    body = problem.body(base, instance=instance or uuid.uuid4().urn)
    headers = [*problem.headers(base), (b"content-length", b"%d" % len(body))]
    return Reply(problem.status, headers, body)
