"""The layer's own answers: a status, an ErrorInfo with a reason, and whether to come again.

INVALID_ARGUMENT correct the key · ABORTED in progress, ask again with the *same* key · FAILED_PRECONDITION stop, never
retry blindly · UNAVAILABLE cannot be decided now, the same key later. No answer echoes a key or stored data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import (  # type: ignore[import-untyped] # ships no types
    BadRequest,
    ErrorInfo,
    ResourceInfo,
    RetryInfo,
)
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]  # googleapis has no types

from semel.errors import (
    InProgress,
    KeyExpired,
    KeyMismatch,
    LeaseLost,
    NotRecorded,
    OutcomeUnknown,
    PreviousFailure,
    SemelError,
    StoreUnavailable,
)
from semel.grpc.rules import DETAILS, PUSHBACK
from semel.http.problem import PROBLEMS, Problem

__all__ = ["DOMAIN", "REASONS", "Refusal", "of_error", "of_problem"]

DOMAIN: Final = "semel"
_SOON: Final = 1.0  # seconds; an owner's whole lease would be far too long to stay away
_AT_LEAST: Final = 0.05

_Code = grpc.StatusCode
# The problems of HTTP that there are here too: one vocabulary for both carriers. Texts are those of the problem.
REASONS: Final[Mapping[str, grpc.StatusCode]] = {
    "KEY_MISSING": _Code.INVALID_ARGUMENT,
    "KEY_MALFORMED": _Code.INVALID_ARGUMENT,
    "KEY_TOO_LONG": _Code.INVALID_ARGUMENT,
    "KEY_TOO_SHORT": _Code.INVALID_ARGUMENT,
    "IN_PROGRESS": _Code.ABORTED,
    "LEASE_LOST": _Code.ABORTED,
    "KEY_REUSED": _Code.FAILED_PRECONDITION,
    "KEY_EXPIRED": _Code.FAILED_PRECONDITION,
    "OUTCOME_UNKNOWN": _Code.FAILED_PRECONDITION,
    "RESPONSE_NOT_STORED": _Code.FAILED_PRECONDITION,
    "PREVIOUS_FAILURE": _Code.FAILED_PRECONDITION,
    "STORE_UNAVAILABLE": _Code.UNAVAILABLE,
    "OUTCOME_PENDING": _Code.UNAVAILABLE,
    "BODY_TOO_LARGE": _Code.RESOURCE_EXHAUSTED,
    "NOT_AUTHENTICATED": _Code.UNAUTHENTICATED,
    "NOT_AUTHORIZED": _Code.PERMISSION_DENIED,
    "STREAMING_NOT_SUPPORTED": _Code.UNIMPLEMENTED,
}
_TEXTS: Final[Mapping[str, str]] = {
    "LEASE_LOST": "Another worker has taken this call over. Repeat it with the same key to get its result.",
    "PREVIOUS_FAILURE": "This call failed for good. It is not run again under this key.",
}


class Refusal(Exception):
    """An answer instead of the handler's. `retry_after` None: do not come again (pushback -1)."""

    def __init__(
        self,
        reason: str,
        text: str = "",
        *,
        retry_after: float | None = None,
        field: str | None = None,
        resource: str | None = None,
    ) -> None:
        self.reason = reason
        self.code = REASONS[reason]
        self.text = text or _TEXTS.get(reason) or PROBLEMS[reason.lower().replace("_", "-")].detail
        self.retry_after = retry_after
        self.field = field
        self.resource = resource
        super().__init__(self.text)

    def metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """The trailing metadata: what went wrong, for programs, and when to come again, for gRPC's own retries."""
        wait = "-1" if self.retry_after is None else str(math.ceil(self.retry_after * 1000))
        return (DETAILS, self._status().SerializeToString()), (PUSHBACK, wait)

    def _status(self) -> Message:
        retryable = "false" if self.retry_after is None else "true"
        details: list[Message] = [
            ErrorInfo(reason=self.reason, domain=DOMAIN, metadata={"retryable": retryable})
        ]
        if self.retry_after is not None:
            delay = Duration()
            delay.FromMilliseconds(math.ceil(self.retry_after * 1000))
            details.append(RetryInfo(retry_delay=delay))
        if self.field is not None:
            violation = BadRequest.FieldViolation(field=self.field, description=self.text)
            details.append(BadRequest(field_violations=[violation]))
        if self.resource is not None:
            details.append(ResourceInfo(resource_name=self.resource, description=self.text))
        status: Message = Status(
            code=self.code.value[0], message=self.text, details=[_packed(one) for one in details]
        )
        return status


def _packed(message: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def of_problem(problem: Problem, field: str) -> Refusal:
    """A key that cannot be one, as the shared syntax found it."""
    text = problem.kind.detail
    if why := problem.extra.get("reason"):
        text = f"{text} ({why})"
    return Refusal(problem.kind.name.upper().replace("-", "_"), text, field=field)


def of_error(error: SemelError) -> Refusal | None:
    """The core's answer to a call, for its caller. None: a mistake in the program, which the caller cannot mend."""
    match error:
        case InProgress():
            return Refusal("IN_PROGRESS", retry_after=min(max(error.retry_after, _AT_LEAST), _SOON))
        case LeaseLost():
            return Refusal("LEASE_LOST", retry_after=_SOON)
        case KeyMismatch():
            return Refusal("KEY_REUSED")
        case KeyExpired():
            return Refusal("KEY_EXPIRED")
        case OutcomeUnknown():
            return Refusal("OUTCOME_UNKNOWN")
        case PreviousFailure():
            return Refusal("PREVIOUS_FAILURE")
        case StoreUnavailable():
            return Refusal("STORE_UNAVAILABLE", retry_after=_SOON)
        case NotRecorded():
            return Refusal("OUTCOME_PENDING", retry_after=_SOON)
        case _:
            return None
