"""What must come of each cell of the core: the guarantee table, made exact by where the fault strikes.

The table promises a word per mode and kind of fault. A named point is an exact place, so the word becomes one verdict:
"at least once" is doubled when the point lies after the effect, and exactly once before it.
`permitted` says which verdicts a promise allows; a test holds every cell against it.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

import msgspec

from semel.guarantees import FAULTS, TABLE, Mode, Promise
from semel.testing.chaos.cells import Cell, Heir, Verdict

__all__ = [
    "AWAY",
    "HEARD",
    "LOSING",
    "filled",
    "killed",
    "kind_of",
    "not_applicable",
    "permitted",
    "stepped",
    "zombie",
]

# Where a point lies in the life of a call whose effect is outside.
_BEFORE: Final = {"claim.sent", "wait.parked"}
_CLAIMED: Final = {"claim.won", "run.started"}
_MADE: Final = {"effect.made", "run.returned", "settle.sent", "renew.sent"}
LOSING: Final = {
    "acked.everysec", "acked.lagging", "acked.asynchronous", "acked.unsynced", "acked.flush-2", "acked.flush-0",
    "acked.normal", "acked.off", "acked.timed-out", "acked.gone",
}  # fmt: skip
"""Settings under which a store loses what it had acknowledged."""
AWAY: Final = {"claim.sent": "StoreUnavailable", "settle.sent": "NotRecorded"}
"""Points from which victims of store-kill go on while their server is away, and what they must be told meanwhile."""
HEARD: Final = {"run.started", "step.stored#1"}
"""Between steps: a woken owner hears from its heartbeat that it was overtaken, and makes no step."""
_WIRE: Final = {"reset-before", "reset-after", "stall"}
# What another way to call, a mode of an edge or of messaging promises is what this mode of the core does.
_AS: Final = {
    "claim": "retry", "consume": "retry",
    "http-db": "retry", "http-opaque": "hold", "http-steps": "steps", "http-stream": "retry", "http-tx": "tx",
    "grpc-db": "retry", "grpc-opaque": "hold",
    "relay-redis": "tx", "relay-rabbit-stream": "tx", "relay-nats": "keyed", "relay-rabbit-queue": "retry",
    "relay-webhook": "retry", "relay-handler": "retry", "outbox": "tx", "inbox-redis": "tx", "inbox-rabbit-queue": "tx",
    "inbox-nats": "tx",
}  # fmt: skip

_Pair = tuple[Verdict, Heir]
_RAN: Final[_Pair] = (Verdict.ONCE, Heir.RAN)
_REPLAYED: Final[_Pair] = (Verdict.ONCE, Heir.REPLAYED)
_UNKNOWN: Final[_Pair] = (Verdict.UNKNOWN, Heir.UNKNOWN)
_TWICE: Final[_Pair] = (Verdict.DOUBLED, Heir.RAN)


def kind_of(cell: Cell) -> str:
    """Which column of the guarantee table a cell belongs to."""
    if cell.fault == "late-retry":
        return "loss"  # what is over is as gone as what was lost
    if cell.fault in {"zombie", "overlap", "overruled", "clock-forward", "redialled"}:
        return (
            "zombie"  # to the server, a live owner's lease that a clock has ended is one that nobody renewed
        )
    return "loss" if cell.point in LOSING else "crash"


def permitted(cell: Cell) -> set[Verdict]:
    """What the published table allows for this cell, whatever its point is."""
    if cell.point == "forgotten":  # every guarantee lasts as long as what remembers it: a keyed peer does
        return {Verdict.ONCE if cell.mode == "keyed" else Verdict.DOUBLED}
    promise = TABLE[Mode(_AS.get(cell.mode, cell.mode))][FAULTS.index(kind_of(cell))]
    return {
        Promise.EXACTLY_ONCE: {Verdict.ONCE},
        Promise.AT_LEAST_ONCE: {Verdict.ONCE, Verdict.DOUBLED},
        Promise.AT_MOST_ONCE: {Verdict.ONCE, Verdict.UNKNOWN},
        Promise.AS_STEPS: {Verdict.ONCE, Verdict.DOUBLED},  # its steps here are of mode retry
        Promise.MAY_BE_LOST: {Verdict.ONCE, Verdict.LOST},
        Promise.MAY_REPEAT: {Verdict.ONCE, Verdict.UNKNOWN, Verdict.DOUBLED},
        Promise.NOTHING: set(Verdict),
    }[promise]


def filled(cell: Cell) -> Cell:
    verdict, heir = _expected(cell)
    return msgspec.structs.replace(cell, expected=verdict, heir=heir)


def _expected(cell: Cell) -> _Pair:
    mode, fault, point = cell.mode, cell.fault, cell.point
    if point == "wait.parked":
        return _REPLAYED  # somebody else runs it; what happens to one who waits changes nothing
    if mode == "tx":
        return _tx(cell)
    if fault == "stall" and point == "claim.sent" and cell.store != "sqlite":
        return (
            Verdict.ONCE,
            Heir.ANY,
        )  # its caller may be told StoreUnavailable: then nothing ran and the key is free
    if point == "claim.sent" and (fault == "store-kill" or (fault, cell.store) == ("stall", "sqlite")):
        return _RAN  # its caller was told StoreUnavailable: nothing ran
    if fault in _WIRE or fault in {"store-kill", "slow"}:
        return _REPLAYED  # the worker lives: it repeats the request with the same nonce, unseen by its caller
    if mode == "steps":
        return stepped(fault, point)
    match fault:
        case "kill" | "thread-death":
            return killed(mode, point)
        case "zombie" | "overlap":
            return zombie(mode, point)
        case "overruled":
            return _UNKNOWN
    return _stopped(mode, fault, point)


def killed(mode: str, point: str) -> _Pair:
    if point in _BEFORE:
        return _RAN
    if point == "settle.stored":
        return _REPLAYED
    if mode == "hold":
        return _UNKNOWN
    if point in _CLAIMED or mode == "keyed":
        return _RAN
    return _REPLAYED if mode == "probe" else _TWICE


def zombie(mode: str, point: str) -> _Pair:
    """It wakes when its heir is done. What it had not done it then does."""
    if point in _CLAIMED and mode == "probe":
        return _TWICE
    if point in _CLAIMED and mode == "retry":
        return _TWICE
    return killed(mode, point)


def _stopped(mode: str, fault: str, point: str) -> _Pair:
    """Cancelled or interrupted: the worker itself says that the outcome is lost, and what is recorded stays so."""
    if point in {"run.returned", "settle.sent", "settle.stored"}:
        return _REPLAYED  # the record is written on a path that the caller cannot cancel
    if fault == "interrupt" and point == "claim.won":
        return _RAN  # given back before the function was reached; a cancellation strikes at the next wait, in the function
    return killed(mode, point)


def stepped(fault: str, point: str) -> _Pair:
    name = point.partition("#")[0]
    if point == "settle.stored":
        return _REPLAYED
    if fault in {"cancel", "interrupt"} and point in {"run.returned", "settle.sent"}:
        return _REPLAYED
    if fault == "cancel" and point == "step.stored#2":
        return _REPLAYED  # there is nothing more to wait for, until the record is written
    if name == "step.returned":  # a note, too, is written on a path that the caller cannot cancel
        return _RAN if fault in {"cancel", "interrupt"} else _TWICE
    if (
        fault in {"zombie", "overlap"}
        and point not in HEARD
        and (point in _CLAIMED or name == "step.started")
    ):
        return _TWICE  # it wakes and makes the next step's effect, whose note is then refused
    return _RAN


def _tx(cell: Cell) -> _Pair:
    """Exactly once, always. A zombie holds its row lock: the heir is refused until it wakes, except in Redis."""
    redis = cell.store in {"redis", "cluster"}
    point, fault = cell.point, cell.fault
    stored = {"commit.done"} | ({"settle.stored"} if redis else set())
    if point in stored:
        return _REPLAYED
    if fault == "zombie" and point != "claim.sent" and not redis:
        return Verdict.ONCE, Heir.BUSY
    if fault in _WIRE:
        return _tx_wire(cell, redis=redis)
    if fault == "cancel" and point in {"run.returned", "settle.sent", "settle.stored", "commit.sent"}:
        return (
            Verdict.ONCE,
            Heir.ANY,
        )  # it strikes at the next wait, which may be the commit itself: done, or not
    if fault == "interrupt" and redis and point == "settle.sent":
        return Verdict.ONCE, Heir.ANY
    return (Verdict.ONCE, Heir.ANY) if fault == "store-kill" and redis else _RAN


def _tx_wire(cell: Cell, *, redis: bool) -> _Pair:
    if redis or cell.point == "claim.sent":
        return Verdict.ONCE, Heir.ANY
    if cell.point == "commit.sent":
        return _REPLAYED if cell.fault == "reset-after" else _RAN
    return _RAN


def _nobody_inside(mode: str, fault: str, point: str, *, redis: bool) -> str:
    """Why no second owner can be there while the first one wakes; empty when it can."""
    if fault == "overruled" and mode != "hold":
        return "a person is asked under hold only: elsewhere the next caller takes over (zombie, overlap)"
    if point == "claim.sent":
        return "it has not claimed yet: it wakes as one who waits (wait.parked)"
    if point in {"settle.stored", "commit.done"}:
        return "its outcome is recorded: nobody takes over"
    if point == "wait.parked":
        return "one who waits owns nothing that could be taken over"
    if mode == "tx" and not redis:
        return "an SQL transaction holds its row lock: nobody is inside meanwhile (zombie)"
    if mode == "keyed" and fault == "overlap":
        return "its record and its fence are those of mode retry (overlap), what its peer makes of the key is shown by zombie"
    if fault == "overruled" and point not in {"claim.won", "run.returned", "renew.sent"}:
        return "before its effect, after it, and in its heartbeat: other points lie between these"
    if mode == "hold" and fault == "overlap":
        return "nobody takes a held key over: a person does (overruled)"
    if mode == "probe" and point not in _CLAIMED:
        return "the probe finds the effect, so that nobody goes inside again (zombie)"
    return ""


_NO_AIOSQLITE: Final = "the async colour of a SQLite transaction needs the package aiosqlite"


def not_applicable(store: str, colour: str, mode: str, fault: str, point: str) -> str:
    """Why a cell cannot be; empty when it can."""
    redis = store in {"redis", "cluster"}
    reasons = (
        _beside(mode, point, redis=redis),
        _neutral(mode, fault, point),
        _nobody_inside(mode, fault, point, redis=redis) if fault in {"overlap", "overruled"} else "",
        _not_stopped(colour, mode, fault, point, redis=redis),
        _no_transaction(store, colour, fault, point, redis=redis) if mode == "tx" else "",
        _not_cut(store, mode, fault, point) if fault in _WIRE else "",
        _not_killed(store, mode, point) if fault == "store-kill" else "",
        _not_slow(mode) if fault == "slow" else "",
    )
    return next(filter(None, reasons), "")


_BESIDE: Final = {"renew.sent", "wait.parked"}
"""A heartbeat, and one who waits: beside the call that is under way."""


def _beside(mode: str, point: str, *, redis: bool) -> str:
    """Why a heartbeat or one who waits is no matter of this mode."""
    if mode == "steps" and point in _BESIDE:
        return "a heartbeat and one who waits know nothing of steps: as in mode retry"
    if mode == "tx" and point == "renew.sent":
        return (
            "a pipeline's run is renewed by the same heartbeat: as in mode retry"
            if redis
            else "an SQL transaction has no lease, and no heartbeat"
        )
    return ""


def _not_cut(store: str, mode: str, fault: str, point: str) -> str:
    """Why no connection is broken there, and no file locked."""
    if store == "sqlite" and fault != "stall":
        return "SQLite has no network"
    if store == "sqlite" and point == "wait.parked":
        return "one who waits only reads, and a reader waits for nobody who has SQLite's write lock"
    if point in _BESIDE and mode != "retry":
        return "a heartbeat and one who waits meet a broken connection or a locked file alike whatever the mode: as in mode retry"
    if point in _BESIDE and store == "cluster":
        return "each node is a redis: a heartbeat's connection and a waiter's are broken there"
    return (
        "its note is written as that of the first step: step.returned#1" if point == "step.returned#2" else ""
    )


def _neutral(mode: str, fault: str, point: str) -> str:
    """Why a mode makes no difference there; empty where it does."""
    if mode not in {"keyed", "probe"}:
        return ""
    if point in {"claim.sent", "wait.parked", "settle.stored"}:
        return "nothing is decided there yet, or everything is, whatever the mode: as in mode retry"
    if mode == "keyed" and point in _CLAIMED and fault not in {"zombie", "overlap"}:
        return "its peer was not called: as in mode retry"
    return ""


_NO_SERVER: Final = "SQLite has no server process: its death is the worker's (kill)"


def _not_killed(store: str, mode: str, point: str) -> str:
    """Why a server's death makes no difference there, or cannot be."""
    if store == "sqlite":
        return _NO_SERVER
    if point in AWAY and mode == "tx":
        return "its connection has ended, and that is told by its own driver: run.returned"
    if point in AWAY and mode != "retry":
        return "a server that is away takes no claim and no outcome, whatever the mode: as in mode retry"
    if point in _BESIDE:
        return (
            "it meets a connection that was reset, and then a server that is away: reset-before, reset-after there, "
            "and store-kill at claim.sent"
        )
    return (
        "its note is offered as that of the first step: step.returned#1" if point == "step.returned#2" else ""
    )


def _not_slow(mode: str) -> str:
    """Why it makes no difference there how long a function takes."""
    if mode == "tx":
        return "a transaction has no lease that could end under it"
    return "" if mode == "retry" else "a lease is renewed alike whatever the mode: as in mode retry"


def _not_stopped(colour: str, mode: str, fault: str, point: str, *, redis: bool) -> str:
    """Why nobody can be cancelled or interrupted there."""
    if fault == "cancel" and colour == "sync":
        return "a thread cannot be cancelled: `interrupt` is its fault"
    if fault == "interrupt" and colour == "async":
        return "an event loop turns Ctrl-C into a cancellation: `cancel` is its fault"
    if fault == "cancel" and point == "settle.stored" and (mode != "tx" or redis):
        return "nothing of the call waits any more: a cancellation strikes what its caller does next"
    if fault in {"cancel", "interrupt"} and point == "renew.sent":
        return "a heartbeat has no caller who could be cancelled"
    return ""


def _no_transaction(store: str, colour: str, fault: str, point: str, *, redis: bool) -> str:
    """Why a caller's transaction has no such place."""
    if redis and point.startswith("commit."):
        return "a Redis pipeline has no commit of the caller's: semel sends the EXEC (settle.sent)"
    if point == "wait.parked":
        return (
            "one who waits has no transaction yet: as in mode retry"
            if redis
            else "waits for a row lock, not on a seat"
        )
    if fault == "stall":
        return "the connection is the caller's, and so is its time limit"
    if store == "sqlite" and colour == "async" and find_spec("aiosqlite") is None:
        return _NO_AIOSQLITE
    return ""
