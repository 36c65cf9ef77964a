"""Messaging's rows of the matrix: outbox, relay, sinks, inbox. `WINDOWS` says which of them show which failure window.

| mode | what is broken | promises |
|---|---|---|
| relay-redis, relay-rabbit-stream | a relay to an exact sink | each message once, in order per key |
| relay-nats | to one that knows what it has for a while | the same, within its window |
| relay-rabbit-queue, relay-webhook, relay-handler | to one that keeps no numbers | at least once; an inbox handles it once |
| outbox | an application that writes record, row and message in one transaction | all of them once, or none |
| inbox-redis, inbox-rabbit-queue, inbox-nats | a consumer whose handler writes a row and sends a message | both once |
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Final

import msgspec

from semel.testing.chaos import core, expectations
from semel.testing.chaos.cells import Cell, Heir, Part, Verdict, register
from semel.testing.chaos.messaging_orders import ORDERS
from semel.testing.chaos.messaging_sinks import BROKERS, LOOSE, SINKS
from semel.testing.chaos.messaging_verdicts import OVERTAKEN, certain, judged, wanted
from semel.testing.chaos.messaging_work import attempt

__all__ = ["DATABASES", "REDIS", "WINDOWS", "messaging_cells"]

DATABASES: Final = ("postgres", "mariadb", "sqlite")
REDIS: Final = "redis"
"""An outbox may be in Redis, too; an inbox is in a database."""
WINDOWS: Final = {
    "MW1": "*/outbox/kill@commit.done",
    "MW2": "*/outbox/rollback@*",
    "MW3": "*/relay-*/kill@relay.chosen*",
    "MW4": "*/relay-*/kill@relay.planned*",
    "MW5": "*/relay-*/kill@relay.published*",
    "MW6": "*/relay-*/zombie@*",
    "MW7": "*/relay-redis/torn-log@acked.*",
    "MW8": "*/outbox/late-commit@outbox.written",
    "MW9": "*/inbox-*/kill@consumer.committed*",
    "MW10": "*/inbox-*/zombie@*",
    "MW11": "*/inbox-*/kill@consumer.handled*",
    "MW12": "*/relay-*/poison@head",
    "MW13": "*/relay-*/broker-kill@relay.planned",
    "MW18": "*/inbox-redis/late-copy@*",
    "torn log": "*/relay-redis/torn-log@cut.*",
}
"""Failure windows of messaging, and the names of the cells that stand in them."""

_FIRST: Final = ("relay.chosen", "relay.planned", "relay.published")
_SECOND: Final = tuple(f"{point}#2" for point in _FIRST)
_CONSUMER: Final = ("inbox.admitted#2", "consumer.handled#2", "consumer.committed#2")
_WRITER: Final = ("run.returned", "commit.sent", "outbox.written", "commit.done")
# Exact ones, and the plainest of the others, are broken on every database, the rest on one.
_EVERYWHERE: Final = ("redis", "rabbit-stream", "handler")
_THOROUGH: Final = ("redis", "handler")
_SOURCES: Final = ("redis", "rabbit-queue", "nats")

_Pair = tuple[Verdict, Heir]
_RAN: Final[_Pair] = (Verdict.ONCE, Heir.RAN)
_KNOWN: Final[_Pair] = (Verdict.ONCE, Heir.REPLAYED)
_ONCE: Final[_Pair] = (Verdict.ONCE, Heir.ANY)
_TWICE: Final[_Pair] = (Verdict.DOUBLED, Heir.RAN)

_ASYNC: Final = "a relay is async only; who writes its messages is broken in both colours (outbox)"
_ONE: Final = "a sink does the same with a batch whatever database it comes from: it is broken on postgres"
_SQL: Final = "an inbox keeps its admissions in an SQL database, in the transaction of its handler"
_MENDED: Final = "a database undoes a transaction that its log has half of: as in mode tx (power-loss)"
_PARTS: Final = (
    "every script is about one part, which is on one node: as on redis (tests/messaging run it on a cluster)"
)
_NEVER: Final = {
    "overlap": "a relay that wakes beside its heir is refused by the sink's own numbers, while it works or after: zombie",
    "cancel": "a relay that is cancelled ends its round and gives its parts back (tests/messaging)",
    "stall": "a sink that does not answer in time is one that is away: broker-kill",
    "power-loss": "what a database or a Redis forgets is shown by the core's modes, a sink's lost tail by torn-log",
    "failover": "to a relay it is a lost tail: torn-log",
    "disk-full": "to a relay it is a database or a broker that is away: store-kill, broker-kill",
    **dict.fromkeys(
        ("clock-forward", "clock-back"),
        "leases here are about who carries, not about what is carried: zombie, kill",
    ),
    "interrupt": "a relay runs in an event loop, which turns Ctrl-C into a cancellation (tests/messaging)",
}


def messaging_cells() -> Iterator[Cell]:
    for store in DATABASES:
        for kind in SINKS:
            yield from _relays(store, kind)
        for colour in core.COLOURS:
            yield from _writers(store, colour)
            for kind in _SOURCES:
                yield from _consumers(store, colour, kind)
    yield from _in_redis()
    for colour in core.COLOURS:
        for mode in (*(f"relay-{kind}" for kind in SINKS), "outbox"):
            yield _cell("cluster", colour, mode, "any", "any", None, _PARTS)
            yield _cell("memory", colour, mode, "any", "any", None, "a store in memory has no outbox")
        for store in (REDIS, "cluster", "memory"):
            for kind in _SOURCES:
                yield _cell(store, colour, f"inbox-{kind}", "any", "any", None, _SQL)


def _cell(
    store: str, colour: str, mode: str, fault: str, point: str, end: _Pair | None, reason: str = ""
) -> Cell:
    cell = Cell(
        part="messaging", store=store, colour=colour, mode=mode, fault=fault, point=point, reason=reason
    )
    kind = mode.partition("-")[2]
    reason = reason or _missing(store, colour, mode, kind)
    if reason or end is None:
        return msgspec.structs.replace(cell, reason=reason)
    broker = BROKERS.get(kind or "redis", "")
    lane = ""
    if fault == "torn-log" and (point.startswith("plan.") or mode == "outbox"):
        lane = f"{store} outbox {fault}"
    elif fault == "store-kill":
        lane = f"{store} messages {fault}"
    elif fault in {"broker-kill", "torn-log"}:
        lane = f"{broker} messages {fault}"
    elif kind == "rabbit-stream" and fault.startswith("reset-"):
        lane = f"{broker} messages wire"
    return msgspec.structs.replace(
        cell,
        expected=end[0],
        heir=end[1],
        lane=lane,
        needs=tuple(name for name in ("outbox", store, broker) if name),
        batch=fault in {"store-kill", "broker-kill"},
    )


def _missing(store: str, colour: str, mode: str, kind: str) -> str:
    packages = {"rabbit-stream": "rstream", "rabbit-queue": "aio_pika", "nats": "nats", "webhook": "httpx"}
    if kind in packages and find_spec(packages[kind]) is None:
        return f"needs the package {packages[kind]}"
    if store == "sqlite" and colour == "async" and not mode.startswith("relay"):
        return expectations.not_applicable(store, colour, "tx", "kill", "claim.sent")
    return ""


# ------------------------------------------------------------------------------------------------- relays


def _relays(store: str, kind: str) -> Iterator[Cell]:
    mode = f"relay-{kind}"
    yield _cell(store, "sync", mode, "any", "any", None, _ASYNC)
    if store != "postgres" and kind not in _EVERYWHERE:
        yield _cell(store, "async", mode, "any", "any", None, _ONE)
        return
    for fault, point, end, reason in _struck(store, kind):
        yield _cell(store, "async", mode, fault, point, end, reason)
    for fault, reason in _NEVER.items():
        yield _cell(store, "async", mode, fault, "any", None, reason)


_Row = tuple[str, str, _Pair | None, str]


def _struck(store: str, kind: str) -> Iterator[_Row]:
    loose = kind in LOOSE
    again = _TWICE if loose else _KNOWN
    for point in (*_FIRST, *(_SECOND if kind in _THOROUGH else ())):
        yield "kill", point, _after(point, again), ""
    yield "zombie", "relay.planned", _TWICE if loose else _RAN, ""
    yield "zombie", "relay.published", again, ""
    race = "whether it or its heir sends first when its locks are free is a race" if loose else ""
    yield "zombie", "relay.chosen", None if race else _ONCE, race
    yield from _cuts(store, kind)
    yield from _servers(store, kind)
    for point, end in {**dict.fromkeys(("cut.tail", "cut.half", "cut.batch"), _ONCE), **_TORN}.items():
        reason = (
            ""
            if kind == "redis"
            else "Redis keeps a log that can be torn; the others' tails are their own affair"
        )
        if not reason:
            yield "torn-log", point, end, ""
        elif point == "cut.tail":
            yield "torn-log", "any", None, reason
    shy = (
        ""
        if kind in _THOROUGH
        else "a refusal is the relay's own affair, the same for every sink: redis, handler"
    )
    yield "poison", "head", None if shy else _ONCE, shy
    yield _slow(kind)


def _slow(kind: str) -> _Row:
    """A relay's own heartbeat, while its sink takes its time."""
    if kind == "handler":
        return "slow", "relay.planned", _ONCE, ""
    return "slow", "any", None, "a relay's lease is renewed alike whatever its sink is: relay-handler"


def _after(point: str, again: _Pair) -> _Pair:
    """What a relay's heir finds when it was killed there."""
    return again if point in {"relay.published", "relay.published#2", "relay.chosen#2"} else _RAN


_TORN: Final[dict[str, _Pair]] = {
    "acked.kept": _ONCE,
    "acked.gone": (Verdict.LOST, Heir.ANY),
    OVERTAKEN: _ONCE,
}


def _cuts(store: str, kind: str) -> Iterator[_Row]:
    """On the wire to the sink (relay.planned#2), and to the database (relay.chosen)."""
    loose = kind in LOOSE
    for fault in ("reset-before", "reset-after"):
        if kind == "handler":
            yield fault, "relay.planned#2", None, "a function has no network"
        else:
            end = (Verdict.DOUBLED, Heir.ANY) if loose and fault == "reset-after" else _ONCE
            yield fault, "relay.planned#2", end, ""
        for point in ("relay.chosen", "relay.chosen#2"):
            if store == "sqlite":
                yield fault, point, None, "SQLite has no network"
            elif kind not in _THOROUGH:
                yield (
                    fault,
                    point,
                    None,
                    "what is written before or after sending is the same: redis, handler",
                )
            elif point == "relay.chosen#2" and fault == "reset-before":
                yield fault, point, _TWICE if loose else _KNOWN, ""
            else:
                yield fault, point, _RAN, ""


def _servers(store: str, kind: str) -> Iterator[_Row]:
    if store == "sqlite":
        yield "store-kill", "any", None, "SQLite has no server process: its death is the relay's (kill)"
    else:
        # A batch is sent, and that it was cannot be written down.
        yield "store-kill", "relay.chosen#2", _TWICE if kind in LOOSE else _KNOWN, ""
        race = (
            "whether its heartbeat or its next batch meets the dead connection first is a race"
            if kind in LOOSE
            else ""
        )
        yield "store-kill", "relay.planned", None if race else _ONCE, race
    if kind not in BROKERS:
        yield (
            "broker-kill",
            "any",
            None,
            "no broker of its own: an endpoint that is away is one whose answer is lost",
        )
        return
    for point in ("relay.planned", "relay.published"):
        yield "broker-kill", point, _RAN, ""


# ---------------------------------------------------------------------------------- writers and consumers

_AS_TX: Final = (
    "zombie", "cancel", "interrupt", "stall", "store-kill", "power-loss", "failover", "disk-full", "clock-forward", "clock-back",
    "slow",
)  # fmt: skip


def _writers(store: str, colour: str) -> Iterator[Cell]:
    for point in _WRITER:
        end = _KNOWN if point == "commit.done" else _RAN
        yield _cell(store, colour, "outbox", "kill", point, end)
    network = "SQLite has no network" if store == "sqlite" else ""
    yield _cell(store, colour, "outbox", "reset-before", "outbox.written", None if network else _RAN, network)
    yield _cell(
        store, colour, "outbox", "reset-after", "outbox.written", None if network else _KNOWN, network
    )
    for point in ("savepoint", "transaction"):
        yield _cell(store, colour, "outbox", "rollback", point, _ONCE)
    alone = "one transaction writes at a time: none can be late" if store == "sqlite" else ""
    yield _cell(store, colour, "outbox", "late-commit", "outbox.written", None if alone else _ONCE, alone)
    yield _cell(store, colour, "outbox", "torn-log", "any", None, _MENDED)
    for fault in _AS_TX:
        why = "its messages are rows of the transaction: as in mode tx"
        yield _cell(store, colour, "outbox", fault, "any", None, why)


def _consumers(store: str, colour: str, kind: str) -> Iterator[Cell]:
    mode = f"inbox-{kind}"
    if store != "postgres" and kind != "redis":
        yield _cell(
            store, colour, mode, "any", "any", None, "a broker hands out the same: it is broken on postgres"
        )
        return
    for point in _CONSUMER:
        known = point.startswith("consumer.committed")
        yield _cell(store, colour, mode, "kill", point, _KNOWN if known else _RAN)
        held = (
            "a broker hands out again what a connection had that has ended, and a stopped process has its own"
        )
        locked = (
            "SQLite has one writer: nobody comes as far as its own admission meanwhile"
            if store == "sqlite"
            else ""
        )
        if kind == "rabbit-queue":
            yield _cell(store, colour, mode, "zombie", point, None, held)
        elif locked and not known:
            yield _cell(store, colour, mode, "zombie", point, None, locked)
        else:  # its row is there first, and is waited for
            yield _cell(store, colour, mode, "zombie", point, _KNOWN)
    served = "SQLite has no server process: its death is the consumer's (kill)" if store == "sqlite" else ""
    yield _cell(store, colour, mode, "store-kill", "consumer.handled#2", None if served else _ONCE, served)
    yield _cell(store, colour, mode, "broker-kill", "consumer.committed#2", _ONCE)
    for fault in ("reset-before", "reset-after"):  # of its commit
        why = "SQLite has no network" if store == "sqlite" else ""
        if not why and kind != "redis":
            why = "its commit is the database's, whichever broker the message came from: inbox-redis"
        yield _cell(store, colour, mode, fault, "consumer.handled#2", None if why else _ONCE, why)
    for point, end in (("kept", _ONCE), ("refused", _ONCE), ("forgotten", (Verdict.DOUBLED, Heir.ANY))):
        why = "" if kind == "redis" else "what an inbox forgets is no broker's affair: inbox-redis"
        yield _cell(store, colour, mode, "late-copy", point, None if why else end, why)
    for fault in (
        "cancel",
        "interrupt",
        "stall",
        "power-loss",
        "failover",
        "disk-full",
        "clock-forward",
        "clock-back",
        "slow",
    ):
        why = "the admission is a row of the transaction: as in mode tx"
        yield _cell(store, colour, mode, fault, "any", None, why)


# ----------------------------------------------------------------------------------- an outbox in Redis


def _in_redis() -> Iterator[Cell]:
    for kind in SINKS:
        mode = f"relay-{kind}"
        yield _cell(REDIS, "sync", mode, "any", "any", None, _ASYNC)
        if kind not in _THOROUGH:
            yield _cell(REDIS, "async", mode, "any", "any", None, _ONE)
            continue
        for fault, point, end, reason in _struck_in_redis(kind):
            yield _cell(REDIS, "async", mode, fault, point, end, reason)
        for fault, reason in _NEVER.items():
            yield _cell(REDIS, "async", mode, fault, "any", None, reason)
    for colour in core.COLOURS:
        yield from _pipelines(colour)


def _struck_in_redis(kind: str) -> Iterator[_Row]:
    """As `_struck`, without locks and with a connection that repeats what is known when it comes twice."""
    loose = kind in LOOSE
    again = _TWICE if loose else _KNOWN
    for point in (*_FIRST, *_SECOND):
        yield "kill", point, _after(point, again), ""
    yield "zombie", "relay.chosen", _RAN, ""
    yield "zombie", "relay.planned", _TWICE if loose else _RAN, ""
    yield "zombie", "relay.published", again, ""
    for fault in ("reset-before", "reset-after"):
        network = "a function has no network" if kind == "handler" else ""
        yield fault, "relay.planned#2", None if network else _ONCE, network
        for point in ("relay.chosen", "relay.chosen#2"):
            yield fault, point, _RAN, ""  # it is written the second time, and known if it was written before
    yield "store-kill", "relay.chosen#2", _RAN, ""
    yield "store-kill", "relay.planned", _RAN, ""
    yield "torn-log", "plan.tail", again, ""
    if kind == "redis":
        for point in ("relay.planned", "relay.published"):
            yield "broker-kill", point, _RAN, ""
        for point in ("cut.tail", "cut.half", "cut.batch"):
            yield "torn-log", point, _ONCE, ""
        for point, end in _TORN.items():
            yield "torn-log", point, end, ""
    else:
        yield "broker-kill", "any", None, "a function has no broker"
    yield "poison", "head", _ONCE, ""
    yield _slow(kind)


def _pipelines(colour: str) -> Iterator[Cell]:
    """An application's EXEC: record, entry and message."""

    def cell(fault: str, point: str, end: _Pair | None, reason: str = "") -> Cell:
        return _cell(REDIS, colour, "outbox", fault, point, end, reason)

    for point in ("run.returned", "settle.sent"):
        yield cell("kill", point, _RAN)
    for point in ("settle.stored", "commit.done"):
        yield cell("kill", point, _KNOWN)
    yield cell("kill", "outbox.written", None, "messages are written by the EXEC itself (settle.sent)")
    for fault in ("reset-before", "reset-after"):
        yield cell(fault, "settle.sent", _ONCE)
    yield cell("rollback", "transaction", _ONCE)
    yield cell("rollback", "savepoint", None, "a pipeline has no savepoints")
    yield cell("late-commit", "any", None, "numbers are given by the EXEC itself: none is late")
    same = "" if colour == "sync" else "the log is the server's, whoever wrote the EXEC: sync"
    for point in ("cut.tail", "cut.half"):
        yield cell("torn-log", point, None if same else _RAN, same)
    for fault in _AS_TX:
        yield cell(fault, "any", None, "its messages are commands of the EXEC: as in mode tx")


_DRIVERS: Final = (
    "sqlalchemy.dialects.postgresql.psycopg", "sqlalchemy.dialects.postgresql.asyncpg", "sqlalchemy.dialects.mysql.pymysql",
    "sqlalchemy.dialects.mysql.asyncmy", "sqlalchemy.dialects.sqlite.pysqlite", "aio_pika", "rstream", "nats", "nats.js.api",
    "httpx", "httpcore", "anyio._backends._asyncio", "h11", "semel.messaging.sinks.redis", "semel.messaging.sinks.handler",
    "semel.messaging.sinks.rabbit_streams", "semel.messaging.sinks.rabbit_queues", "semel.messaging.sinks.nats",
    "semel.messaging.sinks.webhook", "semel.messaging.sources.redis", "semel.messaging.sources.rabbitmq",
    "semel.messaging.sources.nats", "semel.messaging.redis.ledger", "semel.messaging.redis.adding", "semel.messaging.redis.arriving",
    "semel.messaging.redis.listing",
)  # fmt: skip
register(
    Part(
        name="messaging",
        drivers=_DRIVERS,
        cells=messaging_cells,
        attempt=attempt,
        wanted=wanted,
        helped=True,
        schedules=dict(ORDERS),
        judged=judged,
        certain=certain,
    )
)
