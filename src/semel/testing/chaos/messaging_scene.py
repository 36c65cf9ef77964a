"""What the processes of the messaging cells have in common: messages, rows, and a relay for them.

One outbox per database serves all schedules: a schedule's messages have a tenant of their own, and its relays are limited to
that tenant, under a name of their own. Everything else is told by the plan's settings:

| setting | meaning |
|---|---|
| `broker`, `read` | the sink's server for the relay (it may be a proxy), and for those who look |
| `messages` | the ids that a writer writes, or that a consumer waits for: `a1` is the first one of key `a` |
| `also` | those that are written before a relay begins |
| `struck` | the message that a consumer is broken over |
| `safety`, `poison` | the relay's sink_safety; the id of a message that its sink refuses |
| `insists`, `stands` | a relay that sends until its sink has answered; one that stands still when it has sent kept batches again |
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from sqlalchemy import Engine, create_engine, text

from semel.messaging import Inbox, Message, Outbox, Relay, Report, Route, carrier
from semel.messaging.events import Alarm, Overtaken, RelayEvent, SinkPaused
from semel.messaging.message import part_of
from semel.messaging.sinks import open_sink
from semel.messaging.tables import tables_named
from semel.testing.chaos.cells import Plan
from semel.testing.chaos.harness import NOTED
from semel.testing.chaos.ledger import Ledger
from semel.testing.chaos.messaging_sinks import ARRIVED, LOOSE, Insisting, OnTheWire, Standing, sink_url
from semel.testing.chaos.messaging_verdicts import PAUSED
from semel.testing.chaos.places import PARTS, TABLES
from semel.testing.chaos.signals import GO
from semel.testing.chaos.transactions import TABLE

__all__ = ["INSERT", "Scene", "alchemy", "make_tables", "sync"]

INSERT: Final = text(f"INSERT INTO {TABLE} (k, made_by, made_at) VALUES (:k, :by, :at)")
_BATCH: Final = 2
tables_named(TABLES)  # before the fork, not in each of a thousand processes


@cache
def _outbox(url: str) -> Outbox:
    return Outbox(url, table=TABLES)


@cache
def _inbox(engine: Engine) -> Inbox:
    return Inbox(engine, consumer="judge", table=TABLES)


@cache
def _engine(url: str) -> Engine:
    return create_engine(url)


def make_tables(url: str) -> None:
    """Messaging's tables, as the schedules expect them."""
    with Outbox(url, table=TABLES, parts=PARTS) as outbox:
        outbox.create()


class Scene:
    """One process: an application, a relay, a consumer, or somebody who looks."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.cell = plan.cell
        self.role = plan.role
        self.said = plan.settings
        self.ledger = Ledger(plan.folder)
        self.mode, _, kind = self.cell.mode.partition("-")
        self.kind = kind or "redis"
        self.place = plan.folder.rpartition("/")[2] if kind == "webhook" else plan.key
        self.in_redis = self.cell.store == "redis"
        self.alarms: list[str] = []
        self.wire: OnTheWire | Standing | None = None

    @contextlib.contextmanager
    def outbox(self) -> Iterator[Outbox]:
        """A victim's own; others live on as a service's processes do, unless their database is to be killed."""
        if self.role == "victim" or self.cell.lane:
            with Outbox(self.plan.url, table=TABLES) as outbox:
                yield outbox
        else:
            yield _outbox(self.plan.url)

    @contextlib.contextmanager
    def engine(self) -> Iterator[Engine]:
        """As `outbox`, for rows."""
        if self.cell.lane:
            engine = create_engine(sync(self.plan.url))
            try:
                yield engine
            finally:
                engine.dispose()
        else:
            yield _engine(sync(self.plan.url))

    def inbox(self, engine: Engine) -> Inbox:
        """Of those who look."""
        return Inbox(engine, consumer="judge", table=TABLES) if self.cell.lane else _inbox(engine)

    def message(self, name: str) -> Message:
        """Keys are named so that those of `a` and `b` are in different parts."""
        key = next(
            each
            for each in (f"{name[0]}{number}" for number in range(1000))
            if part_of(self.plan.key, each, name, PARTS) == ord(name[0]) % PARTS
        )
        return Message("orders", {"n": int(name[1:])}, key=key, id=name, tenant=self.plan.key)

    def row(self, what: str) -> dict[str, Any]:
        """What INSERT takes."""
        return {"k": f"{self.plan.key} {what}", "by": self.role, "at": time.monotonic()}

    # ---- the relay
    def relay(self, outbox: Outbox) -> Relay:
        noted = self.role == "victim" and (self.cell.fault in _NOTED or "insists" in self.said)
        _wait_for_batches(NOTED.options["slow"] if noted else _SLOW)
        return Relay(
            outbox,
            {"*": self._route()},
            lease=self.plan.lease,
            batch=_BATCH,
            loops=1,
            max_attempts=2,
            backoff=(0.02, 0.02),
            sink_safety=self.said.get("safety", 0),
            tenants=(self.plan.key,),
            name=self.plan.key,
            hooks=(self.told,),
        )

    def _route(self) -> Any:
        poison = self.said.get("poison")

        def handle(message: Message) -> None:
            if message.id == poison:
                raise ValueError("it cannot be handled")
            self.ledger.effect(str(message.id), ARRIVED)
            while (
                self.role == "victim" and self.cell.fault == "slow" and not (self.ledger.folder / GO).exists()
            ):
                time.sleep(0.004)

        def transform(row: Any) -> Any:
            if row.id == poison:
                raise ValueError("it cannot be sent")
            return row

        if self.kind == "handler":
            return handle
        url = sink_url(self.kind, self.said["broker"], self.place)
        self.wire = self._odd(url)
        if self.wire is not None:
            return self.wire
        return Route(url, transform=transform) if poison else url

    def _odd(self, url: str) -> OnTheWire | Standing | None:
        """A sink whose relay sends when it should not, or not yet."""
        if self.said.get("insists"):
            return Insisting(open_sink(url), self.ledger, self.role)
        if self.said.get("stands"):
            return Standing(open_sink(url), self.ledger, self.role)
        loose = self.role == "victim" and self.cell.fault == "zombie" and self.kind in LOOSE
        return OnTheWire(open_sink(url)) if loose else None

    def told(self, event: RelayEvent) -> None:
        """What a relay says meanwhile."""
        match event:
            case Alarm(what=what):
                self.alarms.append(what)
            case SinkPaused():
                self.ledger.error(PAUSED, "SinkPaused")
            case Overtaken():
                self.ledger.warn(self.role)
            case _:
                pass

    def answer(self, report: Report) -> None:
        """What a relay says of itself in the end; `replayed` if the sink knew a batch."""
        facts = {
            "sent": report.sent,
            "resent": report.resent,
            "duplicates": report.duplicates,
            "parked": report.parked,
            "alarms": self.alarms,
        }
        self.ledger.answer(self.role, facts, replayed=report.duplicates > 0)


def _wait_for_batches(seconds: float) -> None:
    """How long a round waits for what it has sent is no option of a relay's: its batches are looked after later all the same."""
    carrier.__dict__["_SLOW"] = seconds


_SLOW: Final[float] = carrier.__dict__["_SLOW"]
_NOTED: Final = {"kill", "reset-before", "reset-after"}


def sync(url: str) -> str:
    """The same database, with the driver of the other colour."""
    scheme, _, rest = url.partition("://")
    other = {"postgresql+asyncpg": "postgresql+psycopg", "mysql+asyncmy": "mysql+pymysql"}.get(scheme, scheme)
    return f"{other}://{rest}"


def alchemy(url: str) -> str:
    """As SQLAlchemy's async engines want it."""
    return url.replace("sqlite:///", "sqlite+aiosqlite:///")
