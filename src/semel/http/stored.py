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
from semel.results import codec_for

__all__ = ["CODEC", "not_kept", "stored"]

CODEC: Final = codec_for(None, bytes)
_log = logging.getLogger("semel.http")


def stored(call: Call, record: Record) -> Snapshot | Problem:
    """The response of a request that is over, without a body that was spilled; a problem where none can be had."""
    if not record.result:
        # Settled by hand, or too large even without its body: what happened is known, its response is not.
        outcome = "failed" if record.state is State.FAILED else "done"
        return Problem.of("response-not-stored", outcome=outcome)
    try:
        snapshot = Snapshot.decode(CODEC.decode(record.result))
    except CodecError as error:
        _log.error("the stored response of %r cannot be read: %s", call.scope, error)
        return Problem.of("outcome-unknown")
    if not snapshot.kept and snapshot.spilled is None:
        return not_kept(snapshot)
    # Decoded a moment ago, so nobody else has it: no copy for one field.
    msgspec.structs.force_setattr(snapshot, "left", max(0.0, record.expires - time.time()))
    return snapshot


def not_kept(snapshot: Snapshot) -> Problem:
    """What can be said of a response without its body (H26)."""
    extra: dict[str, Any] = {"original_status": snapshot.status} if snapshot.status else {"outcome": "done"}
    if (location := snapshot.header(b"location")) is not None:
        extra["location"] = location
    return Problem.of("response-not-stored", **extra)
