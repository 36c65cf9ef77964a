"""The HTTP edge's rows of the matrix: keyed POSTs to real servers with the middleware (sync: WSGI, async: ASGI).

| mode | the handler | as the core's mode |
|---|---|---|
| http-db | `effects="db"`, and an effect outside all the same | retry |
| http-opaque | `effects="opaque"` | hold |
| http-steps | two steps, `effects="steps"` | steps |
| http-stream | `effects="db"`, its response in pieces | retry, until the response begins |
| http-tx | `effects="db"`, rows and a record of its own in one transaction | tx |
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Final

import msgspec

from semel.testing.chaos import core, expectations
from semel.testing.chaos.cells import Cell, Heir, Part, Verdict, register
from semel.testing.chaos.http_orders import ORDERS
from semel.testing.chaos.http_sites import attempt

__all__ = ["CORE", "NEVER", "POINTS", "STORES", "http_cells"]

# What the edge does with a store is the core's affair. All of them are broken where the store's own transaction takes part
# and where the layer's plainest promise is at stake, the rest on one or two.
STORES: Final[dict[str, tuple[str, ...]]] = {
    "http-db": ("sqlite", "redis", "postgres"),
    "http-opaque": ("sqlite", "redis"),
    "http-steps": ("redis",),
    "http-stream": ("sqlite",),
    "http-tx": ("sqlite", "redis", "postgres"),
}
_BEGIN: Final = ("claim.sent", "http.admitted", "run.started")
_END: Final = ("run.returned", "settle.sent", "settle.stored", "http.sent")
_STEPS: Final = tuple(
    f"{point}#{n}" for n in (1, 2) for point in ("step.started", "step.returned", "step.stored")
)
_STREAM: Final = ("step.started", "step.returned", "step.stored", "http.responding")
# The transaction's own call lies inside of the request's: where both pass a point, the number says whose it is.
_TX: Final = (
    "claim.sent#2", "claim.won#2", "run.started#2", "effect.made", "run.returned#1", "settle.sent#1", "settle.stored#1",
    "commit.sent", "commit.done",
)  # fmt: skip
POINTS: Final[dict[str, tuple[str, ...]]] = {
    "http-db": (*_BEGIN, "claim.won", "effect.made", *_END),
    "http-opaque": (*_BEGIN, "effect.made", *_END),
    "http-steps": (*_BEGIN, *_STEPS, *_END),
    "http-stream": (*_BEGIN, "effect.made", *_STREAM, *_END),
    "http-tx": (*_BEGIN, *_TX, "run.returned#2", "settle.sent#2", "settle.stored#2", "http.sent"),
}
_WIRE: Final = ("claim.sent", "settle.sent")
_WIRE_TX: Final = ("claim.sent#2", "settle.sent#1", "commit.sent")
# Where a server can be overtaken by one that goes inside of its handler.
_OVERLAPPED: Final[dict[str, tuple[str, ...]]] = {
    "http-db": ("run.started", "effect.made", "run.returned", "settle.sent"),
    "http-opaque": ("any",),
    # Elsewhere in its steps it is a race, in a thread, whether its heartbeat tells it before it goes on.
    "http-steps": ("step.returned#1", "step.returned#2", "run.returned", "settle.sent"),
    "http-stream": ("run.started", "effect.made", "step.returned"),
    "http-tx": ("run.started#2", "effect.made", "run.returned#1", "settle.sent#1", "run.returned#2"),
}
# Where a client's leaving could make a difference: before, while and after the handler has its effect.
_LEAVING: Final = (
    "claim.sent",
    "http.admitted",
    "effect.made",
    "step.returned#1",
    "http.responding",
    "settle.sent",
    "settle.sent#1",
    "settle.sent#2",
)

_RAN: Final = (Verdict.ONCE, Heir.RAN)
_REPLAYED: Final = (Verdict.ONCE, Heir.REPLAYED)
_ANY: Final = (Verdict.ONCE, Heir.ANY)
_BUSY: Final = (Verdict.ONCE, Heir.BUSY)
NEVER: Final = {
    "cancel": "a server does not cancel a handler whose client has left, nor would it change anything (client-reset)",
    "interrupt": "Ctrl-C ends a server, which drains its requests first (tests/http)",
    "slow": "a request's lease is renewed by the core's own heartbeat: as in mode retry",
    "stall": "the layer waits as its store's driver does: as in mode retry",
    **dict.fromkeys(
        ("store-kill", "power-loss", "failover", "clock-forward", "clock-back", "disk-full"),
        "what a store forgets or refuses it does to the core's record, whoever had asked for it: as in the core's modes",
    ),
}
_NOT_HERE: Final = (
    "the layer reaches a store through the core only: the edge is broken on sqlite, redis and postgres"
)
_AFTERWARDS: Final = "a WSGI server sends what it was given when nothing of the layer runs any more"
_BETWEEN: Final = (
    "nothing is waited for between http.admitted and run.started but a task's turn: as in http-db"
)
CORE: Final = "a heartbeat and one who waits are the core's own, the same for every caller: as in mode retry"
_HANDLERS: Final = "the transaction's connection is its handler's, and so is what it hears: as in mode tx at claim.sent, settle.sent, commit.sent"
_NO_COMMIT: Final = "a Redis pipeline has no commit of the caller's: semel sends the EXEC (settle.sent)"


def http_cells() -> Iterator[Cell]:
    for mode in POINTS:
        for colour in core.COLOURS:
            for store in STORES[mode]:
                yield from _cells(store, colour, mode)
            for store in (*core.STORES, "memory"):
                if store not in STORES[mode]:
                    yield _cell(store, colour, mode, "any", "any", _NOT_HERE)


def _cells(store: str, colour: str, mode: str) -> Iterator[Cell]:
    for fault in ("kill", "zombie"):
        for point in POINTS[mode]:
            yield _cell(store, colour, mode, fault, point, _reason(store, colour, mode, point))
        if "claim.won" not in POINTS[mode]:
            yield _cell(store, colour, mode, fault, "claim.won", _BETWEEN)
        for point in ("renew.sent", "wait.parked"):
            yield _cell(store, colour, mode, fault, point, CORE)
    for point in _OVERLAPPED[mode]:
        yield _cell(store, colour, mode, "overlap", point, _nobody_inside(store, mode, point))
    for point in (each for each in POINTS[mode] if each in _LEAVING):
        yield _cell(store, colour, mode, "client-reset", point, _reason(store, colour, mode, point))
    for fault in ("reset-before", "reset-after"):
        for point in _WIRE:
            yield _cell(store, colour, mode, fault, point, _reason_of_wire(store, mode))
        for point in ("renew.sent", "wait.parked"):
            yield _cell(store, colour, mode, fault, point, CORE)
        for point in _WIRE_TX if mode == "http-tx" else ():
            yield _cell(store, colour, mode, fault, point, _HANDLERS)
    for fault, reason in NEVER.items():
        yield _cell(store, colour, mode, fault, "any", reason)


def _cell(store: str, colour: str, mode: str, fault: str, point: str, reason: str) -> Cell:
    cell = Cell(part="http", store=store, colour=colour, mode=mode, fault=fault, point=point)
    if reason := reason or _missing(store, colour, mode):
        return msgspec.structs.replace(cell, reason=reason)
    verdict, heir = _expected(cell)
    return msgspec.structs.replace(cell, expected=verdict, heir=heir)


def _reason(store: str, colour: str, mode: str, point: str) -> str:
    if point == "http.sent" and colour == "sync" and mode != "http-stream":
        return _AFTERWARDS
    return _NO_COMMIT if store == "redis" and point.startswith("commit.") else ""


def _nobody_inside(store: str, mode: str, point: str) -> str:
    if mode == "http-opaque":
        return "nobody takes a held key over: a person does, in the core (overruled)"
    if mode == "http-tx" and store != "redis" and point != "run.returned#2":
        return "an SQL transaction holds its row lock: nobody is inside meanwhile (zombie)"
    return ""


def _reason_of_wire(store: str, mode: str) -> str:
    if store == "sqlite":
        return "SQLite has no network"
    return (
        ""
        if mode == "http-db"
        else "a request to the store is repeated with the same nonce whatever its handler does: as in http-db"
    )


def _missing(store: str, colour: str, mode: str) -> str:
    server = "gunicorn" if colour == "sync" else "uvicorn"
    if find_spec(server) is None or (colour == "async" and find_spec("httptools") is None):
        return f"needs the package {server}{' with httptools' if colour == 'async' else ''}"
    if (store, colour, mode) == ("sqlite", "async", "http-tx"):
        return expectations.not_applicable(store, colour, "tx", "kill", "claim.sent")
    return ""


# ------------------------------------------------------------------------------------------------- expectations


def _expected(cell: Cell) -> tuple[Verdict, Heir]:
    if cell.fault == "client-reset":
        return _ANY if cell.point == "claim.sent" else _REPLAYED  # before its claim the retry may overtake it
    if cell.fault not in {"kill", "zombie", "overlap"}:
        return _REPLAYED
    # In the core's words: the key is ours; the outcome is recorded.
    point = {"http.admitted": "claim.won", "http.sent": "settle.stored"}.get(cell.point, cell.point)
    match cell.mode:
        case "http-tx":
            return _tx(cell)
        case "http-steps":
            return expectations.stepped(cell.fault, point)
        case "http-stream":
            return _stream(cell, point)
    return _struck(cell.fault, "hold" if cell.mode == "http-opaque" else "retry", point)


def _struck(fault: str, mode: str, point: str) -> tuple[Verdict, Heir]:
    return expectations.killed(mode, point) if fault == "kill" else expectations.zombie(mode, point)


def _stream(cell: Cell, point: str) -> tuple[Verdict, Heir]:
    """Once it is noted that a response has begun, its effect is over: the next one is told that the response is lost."""
    if point in {"step.stored", "http.responding", "run.returned", "settle.sent"}:
        return _REPLAYED
    return _struck(cell.fault, "retry", "effect.made" if point.startswith("step.") else point)


def _tx(cell: Cell) -> tuple[Verdict, Heir]:
    """The next handler runs, and finds the record of its transaction there, or not. A zombie in it holds its row lock."""
    if cell.point in {"settle.stored#2", "http.sent"}:
        return _REPLAYED
    inside = cell.point in _TX and cell.point not in {"claim.sent#2", "commit.done"}
    return _BUSY if cell.fault == "zombie" and inside and cell.store != "redis" else _RAN


def _wanted(cell: Cell) -> tuple[str, ...]:
    return ("one", "two") if cell.mode == "http-steps" else ("effect",)


_DRIVERS: Final = (
    "uvicorn", "uvicorn.protocols.http.httptools_impl", "uvicorn.protocols.websockets.auto", "uvicorn.lifespan.off",
    "uvicorn.loops.asyncio", "gunicorn.config", "gunicorn.glogging", "gunicorn.workers.sync", "starlette.requests",
    "werkzeug.wrappers", "http.client",
)  # fmt: skip
register(
    Part(
        name="http",
        cells=http_cells,
        attempt=attempt,
        wanted=_wanted,
        drivers=_DRIVERS,
        schedules=dict(ORDERS),
    )
)
