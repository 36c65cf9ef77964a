"""The gRPC edge's rows of the matrix: keyed unary calls to real servers with the interceptor (sync: threads, async: grpc.aio).

| mode | the method | as the core's mode |
|---|---|---|
| grpc-db | `effects="db"`, and an effect outside all the same | retry |
| grpc-opaque | `effects="opaque"` | hold |
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Final

import msgspec

from semel.testing.chaos import core, expectations
from semel.testing.chaos.cells import Cell, Heir, Part, Plan, Verdict, register
from semel.testing.chaos.grpc_orders import ORDERS
from semel.testing.chaos.http_cells import CORE, NEVER

__all__ = ["POINTS", "STORES", "grpc_cells"]

STORES: Final[dict[str, tuple[str, ...]]] = {"grpc-db": ("sqlite", "redis"), "grpc-opaque": ("redis",)}
POINTS: Final = (
    "claim.sent", "claim.won", "run.started", "effect.made", "run.returned", "settle.sent", "settle.stored",
)  # fmt: skip
_OVERLAPPED: Final = ("run.started", "effect.made", "run.returned", "settle.sent")
_LEAVING: Final = ("claim.sent", "effect.made", "settle.sent")
_WIRE: Final = ("claim.sent", "settle.sent")
_NEVER: Final = {
    **NEVER,
    "cancel": "grpc.aio cancels a call whose client leaves, or has no more time, which is the same there: client-reset",
    "interrupt": "Ctrl-C ends a server and none of its calls: it waits for them (drain: tests/grpc), or they die with it (kill)",
}
_NOT_HERE: Final = (
    "the interceptor reaches a store through the core only, whose own modes are broken on each: this edge is broken on "
    "sqlite and redis"
)
_NOT_OPAQUE: Final = "what is held is held by the core, whichever its store is: it is broken on redis"
_ON_REDIS: Final = "who is overtaken or left by its client hears it from the core and from gRPC: on redis"
_AS_DB: Final = "it is the same whatever a lost outcome means: as in grpc-db"
_ELSEWHERE: Final = {
    "grpc-steps": "steps are taken by the core inside of the handler, the same for both edges: as in http-steps",
    "grpc-stream": "a stream is sent when it is recorded, as an answer of several messages (tests/grpc): as in grpc-db",
    "grpc-tx": "a transaction inside of the handler is the core's, the same for both edges: as in http-tx",
}


def grpc_cells() -> Iterator[Cell]:
    for colour in core.COLOURS:
        for mode, stores in STORES.items():
            for store in stores:
                yield from _cells(store, colour, mode)
            for store in (*core.STORES, "memory"):
                if store not in stores:
                    why = _NOT_OPAQUE if store in STORES["grpc-db"] else _NOT_HERE
                    yield _cell(store, colour, mode, "any", "any", why)
        for mode, why in _ELSEWHERE.items():
            for store in (*core.STORES, "memory"):
                yield _cell(store, colour, mode, "any", "any", why)


def _cells(store: str, colour: str, mode: str) -> Iterator[Cell]:
    held = mode == "grpc-opaque"
    elsewhere = _ON_REDIS if store != "redis" else ""
    for fault in ("kill", "zombie"):
        for point in POINTS:
            yield _cell(store, colour, mode, fault, point, elsewhere if fault == "zombie" else "")
        for point in ("renew.sent", "wait.parked"):
            yield _cell(store, colour, mode, fault, point, CORE)
    for point in _OVERLAPPED:
        why = "nobody takes a held key over: a person does, in the core (overruled)" if held else elsewhere
        yield _cell(store, colour, mode, "overlap", point, why)
    for point in _LEAVING:
        yield _cell(store, colour, mode, "client-reset", point, _AS_DB if held else elsewhere)
    for fault in ("reset-before", "reset-after"):
        for point in _WIRE:
            network = "SQLite has no network" if store == "sqlite" else ""
            yield _cell(store, colour, mode, fault, point, _AS_DB if held else network)
        for point in ("renew.sent", "wait.parked"):
            yield _cell(store, colour, mode, fault, point, CORE)
    for fault, reason in _NEVER.items():
        yield _cell(store, colour, mode, fault, "any", reason)


def _cell(store: str, colour: str, mode: str, fault: str, point: str, reason: str = "") -> Cell:
    cell = Cell(part="grpc", store=store, colour=colour, mode=mode, fault=fault, point=point)
    if reason := reason or _missing():
        return msgspec.structs.replace(cell, reason=reason)
    verdict, heir = _expected(cell)
    return msgspec.structs.replace(cell, expected=verdict, heir=heir)


def _missing() -> str:
    there = find_spec("grpc") is not None and find_spec("grpc_status") is not None
    return "" if there else "needs the packages grpcio and grpcio-status"


def _expected(cell: Cell) -> tuple[Verdict, Heir]:
    if cell.fault == "client-reset" and cell.point == "claim.sent":
        return Verdict.ONCE, Heir.ANY  # before its claim the retry may overtake it
    if cell.fault in {"client-reset", "reset-before", "reset-after"}:
        return Verdict.ONCE, Heir.REPLAYED
    mode = "hold" if cell.mode == "grpc-opaque" else "retry"
    struck = expectations.killed if cell.fault == "kill" else expectations.zombie
    return struck(mode, cell.point)


def _attempt(plan: Plan) -> None:
    import_module("semel.testing.chaos.grpc_sites").attempt(plan)  # needs an extra


_DRIVERS: Final = (
    "grpc.aio", "grpc._server", "grpc._interceptor", "grpc._utilities", "semel.testing.chaos.grpc_sites",
    "semel.testing.chaos.grpc_client",
)  # fmt: skip
register(Part(name="grpc", cells=grpc_cells, attempt=_attempt, drivers=_DRIVERS, schedules=dict(ORDERS)))
