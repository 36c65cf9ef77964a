"""Headers and bodies of what the layer sends: first executions, replays, problems. Pure."""

from __future__ import annotations

from semel.http.problem import Problem
from semel.http.rules import CONTROL, RETENTION, Rules, Word, control_of
from semel.http.snapshot import Snapshot

__all__ = ["first_headers", "problem_reply", "replay_reply"]

Headers = list[tuple[bytes, bytes]]


def first_headers(rules: Rules, word: Word, headers: Headers) -> Headers:
    """The handler's own headers, and the word that its key was honoured (H12); what is not kept names no retention."""
    sent = [(name, value) for name, value in headers if name.lower() != CONTROL]
    sent += [(marker.encode(), b"false") for marker in rules.markers]
    if word in ("store", "replay"):
        retention = control_of(headers)[1]
        sent += _retention(rules.retention if retention is None else retention)
    if rules.repeatability:
        sent.append((b"repeatability-result", b"accepted"))
    return sent


def replay_reply(rules: Rules, snapshot: Snapshot) -> tuple[Headers, bytes]:
    """The stored response with what belongs to this exchange: length, marker, no caching (H11, H40)."""
    sent = [(name, value) for name, value in snapshot.headers if name != b"cache-control"]
    sent += [(marker.encode(), b"true") for marker in rules.markers]
    sent += _retention(rules.retention if snapshot.left is None else snapshot.left)
    sent.append((b"cache-control", b"no-store"))
    if rules.repeatability:
        sent.append((b"repeatability-result", b"accepted"))
    if _has_body(snapshot.status):
        sent.append((b"content-length", b"%d" % len(snapshot.body)))
    return sent, snapshot.body


def _retention(seconds: float) -> Headers:
    return [] if seconds == float("inf") else [(RETENTION.encode(), b"%d" % seconds)]


def _has_body(status: int) -> bool:
    return status >= 200 and status not in (204, 304)


def problem_reply(base: str, problem: Problem) -> tuple[Headers, bytes]:
    body = problem.body(base)
    return [*problem.headers(base), (b"content-length", b"%d" % len(body))], body
