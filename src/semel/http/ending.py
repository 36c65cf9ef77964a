"""The end of a keyed request as the store takes it: what a response means for its key, in the core's words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from semel import steps
from semel.errors import LeaseLost, NotRecorded
from semel.http.head import Head
from semel.http.problem import DEFAULT_BASE, PROBLEM_TYPE, Problem
from semel.http.rules import Rules, Word
from semel.http.snapshot import Snapshot
from semel.http.stored import CODEC
from semel.model import Failure, Kind, Policy, Settle
from semel.run import Run
from semel.shrinking import TOO_LARGE

__all__ = ["STARTED", "end_of", "has_begun", "is_passing", "keeps_failures", "unrecorded"]

STARTED: Final = "http.response"  # the step that says: the effect is over, its response was on its way
_KINDS: Final[Mapping[Word, Kind]] = {
    "store": Kind.DONE,
    "replay": Kind.FAILED,
    "release": Kind.RELEASED,
    "hold": Kind.UNKNOWN,
}


class _Said(msgspec.Struct, frozen=True):
    """What matters of a problem that a handler has answered."""

    type: str
    retryable: bool = False


_decode_problem: Final = msgspec.json.Decoder(_Said).decode


def end_of(
    run: Run, snapshot: Snapshot, word: Word, retention: float | None = None, failure: Failure | None = None
) -> Settle:
    """What is written for a response. One that does not even fit without its body leaves a marker, and is done."""
    options, ask = run.call.options, run.ask
    answered = word in ("store", "replay")
    encoded = CODEC.encode(snapshot.encode(), compress_over=options.compress_over) if answered else b""
    fits = len(encoded) <= options.max_result
    if failure is None and word in ("replay", "hold"):
        failure = Failure("HTTPStatus", str(snapshot.status), "")
    return Settle(
        ask.scope,
        ask.nonce,
        _KINDS[word],
        options.retention if retention is None else retention,
        options.tombstone if answered else 0.0,
        encoded if fits else b"",
        "" if fits else TOO_LARGE,
        run.ref,
        failure,
        policy=Policy.HOLD if word == "hold" else None,
        steps=_steps(run, answered=answered) if run.has_steps else None,
    )


def _steps(run: Run, *, answered: bool) -> bytes:
    """What stays of the steps: not that a response had begun, because whoever gets here knows how it ended."""
    kept = {name: step for name, step in run.steps.items() if name != STARTED}
    return steps.summarize(kept) if answered else b"".join(map(steps.encode, kept.values()))


def has_begun(run: Run) -> bool:
    """Whether an attempt at it, this one or an earlier one, had begun to answer."""
    try:
        return run.has_steps and STARTED in run.steps
    except msgspec.DecodeError:
        return False  # a newer version wrote them, perhaps; no reason to keep the key


def is_passing(rules: Rules, head: Head, body: bytes | None) -> bool:
    """A call of the core inside of the handler met a key in progress, say, and `install` answered so.

    That is true only for now: stored, it would be given again for as long as responses are kept.
    """
    if head.kind != PROBLEM_TYPE or not body or rules.effects == "opaque":
        return False
    try:
        said = _decode_problem(body)
    except msgspec.MsgspecError:
        return False
    return said.retryable and said.type.startswith((DEFAULT_BASE, rules.problem_base))


def keeps_failures(rules: Rules) -> bool:
    """A handler that raised is answered with 500, and so is every repetition (H15). Else its key is free, or held."""
    return rules.stored == "everything" or (
        rules.effects == "opaque" and rules.stored in ("final", "success")
    )


def unrecorded(error: NotRecorded | LeaseLost, word: Word) -> Problem | None:
    """What is said in place of a response whose outcome the store has not taken."""
    if isinstance(error, LeaseLost):
        # Somebody else owns the key now, and his outcome counts: this response must not be believed.
        return Problem.of("in-progress", retry_after=1.0)
    return Problem.of("outcome-pending", retry_after=1.0) if word in ("store", "replay") else None
