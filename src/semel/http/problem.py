"""The layer's own answers, as RFC 9457 problems: one type per cause, and four statuses with one meaning each.

400 correct the key · 409 in progress, ask again with the *same* key · 422 stop, never retry blindly · 503 cannot be
decided now, the same key later. (401, 403, 413, 425, 429 and 500 say what they always say.) No problem echoes a key or stored data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from semel.errors import (
    InProgress,
    InvalidKey,
    KeyExpired,
    KeyMismatch,
    NotRecorded,
    OutcomeUnknown,
    PreviousFailure,
    StoreUnavailable,
)

__all__ = [
    "ANSWERED",
    "DEFAULT_BASE",
    "FAILED",
    "PROBLEMS",
    "PROBLEM_TYPE",
    "Answered",
    "Problem",
    "ProblemType",
    "of_error",
]

PROBLEM_TYPE: Final = b"application/problem+json"
DEFAULT_BASE: Final = "urn:semel:problem:"
FAILED: Final = "handler-failed"


class ProblemType(msgspec.Struct, frozen=True):
    """What is the same in every problem of this type."""

    name: str
    status: int
    title: str
    detail: str
    retryable: bool = False


def _types(*types: ProblemType) -> Mapping[str, ProblemType]:
    return {one.name: one for one in types}


PROBLEMS: Final[Mapping[str, ProblemType]] = _types(
    ProblemType(
        "key-missing", 400, "Idempotency key missing", "This request needs an idempotency key. Send one and repeat it."
    ),
    ProblemType(
        "key-malformed",
        400,
        "Idempotency key malformed",
        "The idempotency key is no single token of visible ASCII characters, bare or as a quoted string.",
    ),
    ProblemType("key-too-short", 400, "Idempotency key too short", "The idempotency key is too short to be unique."),
    ProblemType("key-too-long", 400, "Idempotency key too long", "The idempotency key has more than 255 characters."),
    ProblemType(
        "not-authenticated",
        401,
        "Not authenticated",
        "A request with an idempotency key must say who sends it. Authenticate and repeat it.",
    ),
    ProblemType("not-authorized", 403, "Not authorized", "This request is not allowed. Nothing was run."),
    ProblemType(
        "key-reused",
        422,
        "Idempotency key used for another request",
        "This key was used for a different request. Repeat that request unchanged, or use a new key for a new one.",
    ),
    ProblemType(
        "key-expired",
        422,
        "Idempotency key expired",
        "This key was used and its result is no longer kept. Find out what happened before you act again with a new key.",
    ),
    ProblemType(
        "in-progress",
        409,
        "Request in progress",
        "A request with this key is being processed. Repeat it later with the same key to get its result.",
        retryable=True,
    ),
    ProblemType(
        "outcome-unknown",
        422,
        "Outcome unknown",
        "An earlier request with this key was interrupted and may or may not have had its effect. It is not run again "
        "before its outcome has been cleared up.",
    ),
    ProblemType(
        FAILED,
        500,
        "Request failed",
        "The request failed and may have had its effect. It is not run again before somebody has looked into it: a repetition "
        "with this key gets this answer.",
    ),
    ProblemType(
        "previous-failure",
        422,
        "Request failed before",
        "An earlier request with this key failed, and that is its outcome. It is not run again. Use a new key for a new attempt.",
    ),
    ProblemType(
        "response-not-stored",
        422,
        "Response not stored",
        "The request was processed, but its response was not kept. It is not run again.",
    ),
    ProblemType(
        "outcome-pending",
        503,
        "Outcome not recorded yet",
        "The request was processed, but its outcome is not recorded yet. Repeat it later with the same key.",
        retryable=True,
    ),
    ProblemType(
        "store-unavailable",
        503,
        "Idempotency store unavailable",
        "It cannot be decided now whether this request has been processed. Nothing was run. Repeat it later with the "
        "same key.",
        retryable=True,
    ),
    ProblemType(
        "body-incomplete", 400, "Request body incomplete", "The body ended before its announced length. Nothing was run."
    ),
    ProblemType(
        "digest-mismatch", 400, "Content-Digest does not match", "The body is not the one that Content-Digest tells. Nothing was run."
    ),
    ProblemType("body-too-large", 413, "Request body too large", "The body is larger than this route accepts."),
    ProblemType(
        "too-early",
        425,
        "Too early",
        "A request with an idempotency key is not accepted as TLS early data. Repeat it after the handshake.",
        retryable=True,
    ),
    ProblemType(
        "quota-exceeded",
        429,
        "Too many new idempotency keys",
        "Too many new keys were used in a short time. Repeat the request later with the same key.",
        retryable=True,
    ),
)  # fmt: skip


class Problem(msgspec.Struct, frozen=True):
    """One answer: its type, and what is special about this one."""

    kind: ProblemType
    retry_after: float | None = None
    extra: Mapping[str, Any] = {}
    other_status: int = 0
    """A profile may use another status for a type (Stripe says 400 where the draft says 422)."""

    @classmethod
    def of(cls, name: str, retry_after: float | None = None, **extra: Any) -> Problem:
        return cls(PROBLEMS[name], retry_after, extra)

    @property
    def status(self) -> int:
        return self.other_status or self.kind.status

    def body(self, base: str = DEFAULT_BASE, instance: str | None = None) -> bytes:
        members: dict[str, Any] = {
            "type": base + self.kind.name,
            "title": self.kind.title,
            "status": self.status,
            "detail": self.kind.detail,
            "retryable": self.kind.retryable,
        }
        if self.retry_after is not None:
            members["retry_after"] = self.seconds
        if instance is not None:
            members["instance"] = instance
        return msgspec.json.encode(members | dict(self.extra))

    @property
    def seconds(self) -> int:
        """Retry-After: whole seconds, at least one."""
        return max(1, math.ceil(self.retry_after or 0.0))

    def headers(self, base: str = DEFAULT_BASE) -> list[tuple[bytes, bytes]]:
        headers = [
            (b"content-type", PROBLEM_TYPE),
            (b"content-language", b"en"),
            (b"cache-control", b"no-store"),
        ]
        if self.retry_after is not None:
            headers.append((b"retry-after", b"%d" % self.seconds))
        headers.append((b"link", f'<{base}{self.kind.name}>; rel="describedby"'.encode()))
        location = self.extra.get("location")
        if location is not None:  # of a response that was not kept (H26)
            headers.append((b"location", location.encode("latin-1")))
        return headers


@dataclass(frozen=True, slots=True)
class Answered:
    """The event for `hooks=` of the Semel: the layer has answered by itself. `instance` is the one that its client was told."""

    problem: str
    status: int
    instance: str


_OF_ERRORS: Final[Mapping[type[Exception], str]] = {
    InProgress: "in-progress",
    KeyMismatch: "key-reused",
    KeyExpired: "key-expired",
    OutcomeUnknown: "outcome-unknown",
    PreviousFailure: "previous-failure",
    StoreUnavailable: "store-unavailable",
    NotRecorded: "outcome-pending",
    InvalidKey: "key-malformed",
}
ANSWERED: Final = tuple(_OF_ERRORS)


def of_error(error: Exception) -> Problem | None:
    """The problem that tells a client what one of the core's errors means; None for those that are no client's business."""
    name = next((name for kind, name in _OF_ERRORS.items() if isinstance(error, kind)), None)
    if name is None:
        return None
    retryable = PROBLEMS[name].retryable
    return Problem.of(name, retry_after=getattr(error, "retry_after", 1.0) if retryable else None)
