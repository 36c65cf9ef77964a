"""What the EXEC of `within(pipeline)` may come to: how its run ends, and what its caller is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from semel.calls import failure_of, name_of
from semel.errors import ConfigurationError, LeaseLost, OutcomeUnknown, StoreUnavailable
from semel.model import Kind, Policy, Settle
from semel.run import Run

__all__ = [
    "MADE_UNKNOWN",
    "SHARDED",
    "UNREAD",
    "UNWRITABLE",
    "Ends",
    "another_server",
    "applied_but",
    "disagreed",
    "evaluated",
    "failed",
    "taken_over",
    "unanswered",
    "unread",
    "unreadable",
    "unsent",
    "unserved",
    "unsettled",
]

MADE_UNKNOWN: Final = "(the record is unknown now)"  # exec_end.lua says so
UNREAD: Final = "a command inside EXEC, or the settle of its record, was answered with an error, and nobody has read which one"
UNWRITABLE: Final = (
    "the server refuses what it takes to record the outcome, to the pipeline's user or to everybody: nothing was applied. Give that "
    "user the rules that the store's has, or look at the server"
)
SHARDED: Final = (
    "the record, or a key of a command, is on another node of the cluster than the pipeline's: nothing was applied. Make the pipeline "
    "from a RedisCluster client, and begin the names of business keys with once.tag(key)"
)


@dataclass(slots=True)
class Ends:
    """How a run may end, sealed, and what is known of its EXEC so far."""

    done: Settle
    failed: Settle
    well: bool = False
    """The record is unknown, because the server has counted an error; but all replies were seen, and none is one."""
    unread: Exception | None = None
    """It is done, and redis-py could not read the replies."""
    again: bool = False
    """Not the first try: the connection of the one before may be to a server that is no master any more."""
    sent: bool = False
    """An EXEC was sent, though it may never have arrived."""
    answered: bool = False
    """By a server; whether that is the store's master is to be seen."""


def failed(run: Run, end: Settle) -> Settle:
    """The end of a run of whose commands one was answered with an error, as the EXEC itself can tell it."""
    return Settle(
        scope=run.scope,
        nonce=run.ask.nonce,
        kind=Kind.UNKNOWN,
        retention=end.retention,
        error=failure_of(UNREAD),
        ref=run.ref,
        policy=Policy.HOLD,
    )


def evaluated(text: str, *keys: bytes, args: Sequence[Any] = ()) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A script as redis-py queues a command. Its text, not its hash: a server that has forgotten it would find that out inside EXEC."""
    return ("EVAL", text, len(keys), *keys, *args), {}


# ------------------------------------------------------------------------------------------------- what is said
def unreadable(run: Run) -> str:
    return (
        f"the commands queued for {name_of(run.call)} were applied and the key is recorded as done: only their replies could not "
        "be read. Call again with the same key for its outcome"
    )


def applied_but(failed: int, run: Run) -> str:
    """The settle is none of the commands that were queued."""
    if not failed:
        return f"the commands queued for {name_of(run.call)} were applied, and their outcome could not be recorded inside the EXEC"
    return (
        f"{failed} of the commands queued for {name_of(run.call)} failed inside EXEC, the others were applied"
    )


def unread(run: Run) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"{UNREAD}: all else that was queued for {name_of(run.call)} was applied, and the key is unknown now. "
        "Look at the data, then call resolve(...)",
        attempt=run.attempt,
    )


def unsettled(run: Run, patience: float) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"the commands queued for {name_of(run.call)} were applied, but a script among them has caught an error, and the record "
        f"could not be made done within {patience:g} s: the key is unknown. Call resolve(...) with its outcome",
        attempt=run.attempt,
    )


def another_server() -> ConfigurationError:
    return ConfigurationError(
        "the pipeline talks to another Redis server or database than the face's store: the record is not there. "
        "Make the pipeline from a client of the same server (after a failover: call again); nothing was applied"
    )


def taken_over(run: Run, *, sent: bool) -> LeaseLost:
    applied = (
        "its EXEC was not answered, and was applied only if the key was done and forgotten since"
        if sent
        else "none of its commands was applied"
    )
    return LeaseLost(
        f"{name_of(run.call)} was taken over by another owner while attempt {run.attempt} ran: {applied}. "
        "Read the key to see the outcome that counts"
    )


def disagreed(run: Run, patience: float, *, sent: bool) -> StoreUnavailable:
    applied = "The record of the one that stays says whether it is done" if sent else "Nothing was applied"
    return StoreUnavailable(
        f"the Redis server that the pipeline of {name_of(run.call)} talks to and the one of the store do not agree about the record, "
        f"and both were asked for {patience:g} s: after a failover one of them is no master any more (without one: are "
        f"they of the same Redis?). {applied}. Call again with the same key"
    )


def unanswered(run: Run, patience: float, failure: Exception | None) -> StoreUnavailable:
    why = "" if failure is None else f" ({failure})"
    return StoreUnavailable(
        f"Redis has not answered the EXEC of {name_of(run.call)} within {patience:g} s{why}: either all of it was "
        "applied, and the record says so, or nothing. Call again with the same key"
    )


def unsent(run: Run, patience: float, failure: Exception) -> StoreUnavailable:
    return StoreUnavailable(
        f"the EXEC of {name_of(run.call)} could not be sent within {patience:g} s ({failure}): nothing was applied. "
        "Call again with the same key"
    )


def unserved(run: Run, patience: float) -> StoreUnavailable:
    return StoreUnavailable(
        f"no node of the cluster has taken the EXEC of {name_of(run.call)} within {patience:g} s: its slot is being moved, or has no "
        "master. Nothing was applied. Call again with the same key"
    )
