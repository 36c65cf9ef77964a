"""What a record tells of an earlier request: the response that is kept, or why there is none."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

import msgspec

from semel.calls import Call
from semel.errors import CodecError
from semel.http.problem import Problem
from semel.http.snapshot import Snapshot
from semel.model import Record, State
from semel.posting import Brief
from semel.results import codec_for

__all__ = ["CODEC", "not_kept", "repeated", "stored"]

CODEC: Final = codec_for(None, bytes)
_TOLD: Final = codec_for(None, Any)  # a person may say anything, not only a response
_log = logging.getLogger("semel.http")


def stored(call: Call, record: Record) -> Snapshot | Problem:
    """The response of a request that is over, without a body that was spilled; a problem where none can be had."""
    if not record.result:
        if record.resolved and record.state is State.FAILED:
            return Problem.of("previous-failure")
        # Settled by hand, or too large even without its body: what happened is known, its response is not.
        outcome = "failed" if record.state is State.FAILED else "done"
        return Problem.of("response-not-stored", outcome=outcome)
    return _read(call, record.result, 0, record.expires, resolved=record.resolved)


def repeated(call: Call, brief: Brief) -> Snapshot | Problem:
    """As `stored`, of a replay that was read in short."""
    if len(brief.reply) == brief.at:
        return Problem.of("response-not-stored", outcome="done")
    return _read(call, brief.reply, brief.at, brief.expires)


def _read(
    call: Call, result: bytes, at: int, expires: float, *, resolved: bool = False
) -> Snapshot | Problem:
    """The response that begins at `at`. `resolved`: it is a person's word, and may be anything."""
    try:
        value = (_TOLD if resolved else CODEC).decode(result, at)
        snapshot = Snapshot.decode(value) if isinstance(value, bytes) else _by_hand(value)
    except CodecError as error:
        if resolved:  # it is over, as a person said, and he gave no response
            return Problem.of("response-not-stored", outcome="done")
        _log.error("the stored response of %r cannot be read: %s", call.scope, error)
        return Problem.of("outcome-unknown")
    if not snapshot.kept and snapshot.spilled is None:
        return not_kept(snapshot)
    # Decoded a moment ago, so nobody else has it: no copy for one field.
    msgspec.structs.force_setattr(snapshot, "left", max(0.0, expires - time.time()))
    return snapshot


def _by_hand(value: Any) -> Snapshot:
    """What a person said the outcome is, without making a response of it (`semel.http.rules.recorded`)."""
    if value is None:
        raise CodecError("there is nothing in it")
    try:
        return Snapshot(200, [(b"content-type", b"application/json")], msgspec.json.encode(value))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise CodecError(f"JSON cannot say it: {error}") from error


def not_kept(snapshot: Snapshot) -> Problem:
    """What can be said of a response without its body (H26)."""
    extra: dict[str, Any] = {"original_status": snapshot.status} if snapshot.status else {"outcome": "done"}
    if (location := snapshot.header(b"location")) is not None:
        extra["location"] = location
    return Problem.of("response-not-stored", **extra)
