"""What a caller is told whose key he cannot have: the errors of the flow's verdicts, with cause and remedy."""

from __future__ import annotations

from semel import ids
from semel.calls import Call, name_of
from semel.errors import CodecError, InvalidKey, KeyExpired, KeyMismatch, OutcomeUnknown
from semel.model import Expired, Mismatch, Unknown

__all__ = ["check_ref_type", "refused", "undecided", "unkept", "unreadable"]


def refused(call: Call, verdict: Mismatch | Expired) -> KeyMismatch | KeyExpired:
    if isinstance(verdict, Mismatch):
        return KeyMismatch(
            f"{name_of(call)} was used with another request; use a new key for a new request, or repeat the "
            "request that this key was made for"
        )
    return KeyExpired(
        f"{name_of(call)} was used and its result is no longer kept (retention is over); "
        "use a new key if this is a new action"
    )


def undecided(call: Call, unknown: Unknown, *, probed: bool) -> OutcomeUnknown:
    attempt = 0 if unknown.record is None else unknown.record.attempts
    remedy = "resolve(key, value=…), resolve(key, error=…) or resolve(key, release=True)"
    if unknown.reason:
        return OutcomeUnknown(
            f"it is not known whether {name_of(call)} happened: its record cannot be read: {unknown.reason}",
            attempt=attempt,
            unreadable=unknown.unreadable,
        )
    if unknown.unreadable:
        why = "its record cannot be read here. Read it with the version, or the encryption key, that wrote it"
        remedy += ", or forget(key)"
    else:
        why = f"attempt {attempt} ended without an outcome (policy {unknown.policy.value})"
        why += ", and the probe did not settle it" if probed else ""
    return OutcomeUnknown(
        f"it is not known whether {name_of(call)} happened: {why}. Look the effect up, then call {remedy}",
        attempt=attempt,
        unreadable=unknown.unreadable,
    )


def unreadable(call: Call, attempts: int, error: CodecError, *, sealed: bool) -> OutcomeUnknown:
    remedy = (
        "give this program the ring that wrote it (encrypt=), repair the key with resolve(key, …) in one that has a ring, or "
        "forget(key)"
        if sealed
        else "read it with the version or key that wrote it, or repair the key with resolve(key, value=…, result_type=…) or "
        "forget(key)"
    )
    return OutcomeUnknown(
        f"the stored result of {name_of(call)} cannot be read ({error}); it is kept as it is: {remedy}",
        attempt=attempts,
        unreadable=True,
    )


def unkept(call: Call, problem: CodecError, recorded: str) -> CodecError:
    """For who made the effect happen: its result cannot be stored."""
    told = CodecError(
        f"{name_of(call)} ran and {recorded}, and will not run again; its result was not kept: {problem}",
        recorded=True,
    )
    told.__cause__ = problem
    return told


def check_ref_type(call: Call, ref: str) -> None:
    """Raises KeyMismatch for a ref of another type than the caller asks for."""
    try:
        ids.parse(ref, call.options.ref_type)
    except InvalidKey as error:
        raise KeyMismatch(
            f"{name_of(call)} holds the ref {ref!r}, not one of type {call.options.ref_type!r}: this key made "
            "something else, so use another key, or the ref_type= that it was made with"
        ) from error
