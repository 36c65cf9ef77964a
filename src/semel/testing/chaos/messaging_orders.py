"""What happens in the messaging cells, and in which order.

Under `relay` an application writes rows with their messages, a relay carries them and is broken, or its broker, its database
or a connection is; another relay carries what is left. Under `outbox` it is the application that is broken, under `inbox` a
consumer. In the end somebody looks at the sink, the database and the outbox.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from semel.testing import services
from semel.testing.chaos.cells import Heir
from semel.testing.chaos.driver import PATIENCE, Stage, Worker
from semel.testing.chaos.harness import RELAYED, SLOW, STILL, WIRE
from semel.testing.chaos.messaging_scene import make_tables
from semel.testing.chaos.messaging_sinks import BROKERS, Endpoint
from semel.testing.chaos.messaging_verdicts import OVERTAKEN, PAUSED, ids_of
from semel.testing.chaos.places import Private, coloured
from semel.testing.chaos.signals import GO
from semel.testing.chaos.wires import ProxiedRabbit, Wire
from semel.testing.chaos.workers import Errand

__all__ = ["ORDERS"]

_STRUCK: Final = "a2"
"""The message that a consumer is broken over: the second one of its key."""
_TO_THE_DATABASE: Final = ("relay.chosen", "outbox.written", "settle.sent", "consumer.handled")
"""Points after which the next request goes to the database: its commit."""


class _Scene:
    """Where a schedule's messages are written and where they go."""

    def __init__(self, stage: Stage, *, url: str = "", server: Any = None) -> None:
        self.stage = stage
        self.cell = stage.cell
        self.mode, _, self.kind = self.cell.mode.partition("-")
        self.kind = self.kind or "redis"
        store = self.cell.store
        if url:
            stage.url = coloured(url, store, self.cell.colour)
        else:
            stage.url = stage.places.shared(store, self.cell.colour)
        if store in {"sqlite", "redis"}:
            stage.places.hold(f"tables of {stage.url}", lambda: _Made(stage.url))
        self.said: dict[str, Any] = dict(zip(("broker", "read"), self._broker(server), strict=True))

    def _broker(self, server: Any) -> tuple[str, str]:
        """For relays, and for those who look."""
        places, kind = self.stage.places, self.kind
        if kind == "handler":
            return "", ""
        if kind == "webhook":
            url = places.hold("endpoint", lambda: Endpoint(str(places.folder))).url
            return url, url
        name = BROKERS[kind]
        url = places.shared(name) if server is None else str(server.url)
        if kind != "rabbit-stream":
            return url, url
        return places.shared("rabbitmq-stream") if server is None else str(server.stream_url), url

    # ---- who takes part
    def start(self, role: str, *, said: dict[str, Any] | None = None, **changes: Any) -> Worker:
        return self.stage.start(role, settings={**self.said, **(said or {})}, **changes)

    def send(self, role: str, *, said: dict[str, Any] | None = None, **changes: Any) -> Worker | Errand:
        return self.stage.send(role, settings={**self.said, **(said or {})}, **changes)

    def stand(self, *, said: dict[str, Any] | None = None, **changes: Any) -> None:
        self.stage.stand(settings={**self.said, **self._victims, **(said or {})}, **changes)

    def victim(self, **changes: Any) -> Worker:
        return self.start("victim", said=self._victims, **changes)

    @property
    def _victims(self) -> dict[str, Any]:
        # One that wakes may find that the rest was handled by another.
        count = 2 if self.cell.fault == "zombie" else 3
        return {"messages": ids_of(keys="a", count=count), "struck": _STRUCK} if self.mode == "inbox" else {}

    def heir(self, messages: Sequence[str] = ()) -> Worker | Errand:
        wanted = list(messages) or ids_of(keys="a")[1:]
        return self.send("heir", said={"messages": wanted, "struck": _STRUCK} if self.mode == "inbox" else {})

    def handle_rest(self) -> None:
        """What neither of two consumers at a time came to: each waits only for what it is sure to get."""
        told = [each.value for each in self.stage.ledger.answers() if isinstance(each.value, list)]
        if rest := sorted({*ids_of(keys="a")} - {name for each in told for name in each}):
            self.send("third", said={"messages": rest}).wait()

    def write(self) -> None:
        if self.mode != "outbox":
            names = ids_of(keys="a") if self.mode == "inbox" else ids_of()
            self.send("writer", said={"messages": names}).wait()

    def judge(self) -> None:
        self.send("judge").wait()

    def has_paused(self) -> bool:
        return any(each.by == PAUSED for each in self.stage.ledger.answers())

    def lease(self) -> float:
        """A heartbeat that is stopped inside a write holds its locks: let none be due before the point. Redis has none."""
        setting = RELAYED if self.cell.store == "redis" else STILL
        return float(setting.options["lease"])


class _Made:
    """The tables of a SQLite file, or an outbox in Redis, made once per driver."""

    def __init__(self, url: str) -> None:
        make_tables(url)

    def close(self) -> None:
        """They end with their file or server."""


def _killed(stage: Stage) -> None:
    scene = _Scene(stage)
    scene.write()
    status = scene.victim().wait()
    stage.bit = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    scene.heir().wait()
    scene.judge()


def _rose(stage: Stage) -> None:
    """SIGSTOP beyond the lease; another one takes over; SIGCONT. One that is stopped inside a transaction has its locks: the
    other one waits for them, and is known to be there before it wakes."""
    scene = _Scene(stage)
    scene.write()
    victim = scene.victim(lease=scene.lease())
    stage.bit = os.WIFSTOPPED(victim.wait(stopped=True))
    locks = stage.cell.point in _INSIDE and stage.cell.store != "redis"
    together = stage.cell.heir is Heir.BUSY or locks
    heir = scene.heir([_STRUCK] if together else ())
    if not together:
        heir.wait()
    elif scene.mode == "inbox":
        _until(lambda: _at_struck(stage))
    else:
        time.sleep(2 * scene.lease())  # its lease is over, and the other one is at its lock
    victim.wake()
    victim.wait()
    heir.wait()
    if together and scene.mode == "inbox":
        scene.handle_rest()
    scene.judge()


def _at_struck(stage: Stage) -> bool:
    """The heir has the message that the sleeper is at. Before that, the sleeper would handle it alone."""
    struck = _STRUCK.encode().hex()
    return any((each.by, each.nonce) == ("heir", struck) for each in stage.ledger.owners())


_INSIDE: Final = ("relay.chosen", "inbox.admitted#2", "consumer.handled#2")


def _until(condition: Callable[[], bool], *, seconds: float = PATIENCE) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"the scene was not set within {seconds:g} s")
        time.sleep(0.005)


# ------------------------------------------------------------------------------------------- connections


def _cut(stage: Stage) -> None:
    """A connection is reset before the next request, or after it was carried out: to the sink, or to the database."""
    if stage.cell.lane:
        _cut_stream(stage)
        return
    scene = _Scene(stage)
    to_database = stage.cell.point.partition("#")[0] in _TO_THE_DATABASE
    target = urlsplit(stage.url if to_database else scene.said["broker"])
    speaks = stage.cell.store if to_database else scene.kind
    wire: Wire = stage.places.hold(
        f"wire to {speaks}", lambda: Wire((str(target.hostname), target.port or 0), speaks=speaks)
    )
    through = target._replace(netloc=target.netloc.replace(f":{target.port}", f":{wire.ports[0]}")).geturl()
    _struck(scene, wire, **({"url": through} if to_database else {"said": {"broker": through}}))


def _cut_stream(stage: Stage) -> None:
    """A stream's clients go to the address that their broker names: this one names a proxy's. It is the batch that is struck."""
    server: ProxiedRabbit = stage.places.hold(stage.cell.lane, lambda: ProxiedRabbit().open())
    assert server.wire is not None
    _struck(_Scene(stage, server=server), server.wire)


def _struck(scene: _Scene, wire: Wire, **changes: Any) -> None:
    stage = scene.stage
    scene.write()
    scene.stand(lease=WIRE.options["lease"], **changes)
    if stage.bit:
        wire.arm(stage.cell.fault)
    stage.reply()
    stage.finish()
    stage.bit = wire.fired()
    if scene.mode != "inbox":  # a consumer goes on by itself, and is its own heir
        scene.heir().wait()
    scene.judge()


# ----------------------------------------------------------------------------------------------- servers


class _Databases(Private):
    """A database with the tables of an outbox, for its driver alone."""

    def __init__(self, store: str) -> None:
        super().__init__(store)
        make_tables(coloured(self.url, store, "sync"))


def _store_killed(stages: Sequence[Stage]) -> None:
    """The database is killed and comes back while relays and consumers stand at their points."""
    cell = stages[0].cell
    server: _Databases = stages[0].places.hold(cell.lane, lambda: _Databases(cell.store))
    scenes = _set([_Scene(stage, url=server.url) for stage in stages])
    server.kill(stages[0].key)
    server.start()
    for stage in stages:
        stage.reply()
    _ended(scenes)


def _broker_killed(stages: Sequence[Stage]) -> None:
    """The broker is killed, and is away while relays and consumers go on; then it comes back."""
    cell = stages[0].cell
    name = BROKERS[cell.mode.partition("-")[2]]
    server: Any = stages[0].places.hold(cell.lane, _BROKER[name])
    scenes = _set([_Scene(stage, server=server) for stage in stages])
    server.kill()
    for stage in stages:
        stage.reply()
    for scene in scenes:
        if scene.mode == "relay":  # a consumer waits for its broker
            _until(scene.has_paused, seconds=2 * PATIENCE)  # all of them at once
    server.start()
    _ended(scenes)


_BROKER: Final[dict[str, Callable[[], Any]]] = {
    "redis": lambda: services.redis(appendonly="always"),
    "rabbitmq": services.rabbitmq,
    "nats": services.nats,
}


def _set(scenes: list[_Scene]) -> list[_Scene]:
    """Everybody stands at the point; those who write come first, so that nobody stands there for long."""
    for scene in scenes:
        scene.write()
    for scene in scenes:
        scene.stand(lease=RELAYED.options["lease"])
    return scenes


def _ended(scenes: Sequence[_Scene]) -> None:
    for scene in scenes:
        scene.stage.finish()
        if scene.mode == "relay":  # a consumer goes on by itself, and is its own heir
            scene.heir().wait()
        scene.judge()


def _torn(stage: Stage) -> None:
    """Redis dies in the middle of writing its log, and has less than it had confirmed when it comes back.

    `cut.…`: of a batch that its relay did not live to note as delivered. `acked.…`: of delivered ones, which were kept
    (sink_safety) or were not; or were kept, and a relay that has slept meanwhile goes on.
    """
    server: Any = stage.places.hold(stage.cell.lane, lambda: services.redis(appendonly="always"))
    if stage.cell.mode == "outbox" or stage.cell.point.startswith("plan."):
        _torn_outbox(stage, server)
        return
    if stage.cell.point == OVERTAKEN:
        _torn_meanwhile(stage, server)
        return
    scene = _Scene(stage, server=server)
    scene.write()
    (log,) = server.folder.glob("**/*.incr.aof")
    before = len(log.read_bytes())
    acked = stage.cell.point.startswith("acked.")
    said = {"safety": 60 if stage.cell.point == "acked.kept" else 0}
    killed = msgspec.structs.replace(stage.cell, fault="kill", point="relay.published")
    scene.start("relay" if acked else "victim", said=said, cell=killed).wait()
    server.kill()
    whole = log.read_bytes()
    cut = {"cut.tail": 3, "cut.half": (len(whole) - before) // 2}.get(
        stage.cell.point, len(whole) - before - 20
    )
    log.write_bytes(whole[:-cut])
    server.start()
    stage.bit = len(whole) > before
    more = {"also": ["a4", "b4"]} if acked else {}
    scene.send("heir", said={**said, **more}).wait()
    scene.judge()


def _torn_meanwhile(stage: Stage, server: Any) -> None:
    """A relay sleeps over a batch that it has written down, and Redis loses the one before it. The heir finds that out, sends
    the kept one again, and then the sleeper wakes: the number of its batch is the one that is due, and only its epoch says
    that it is not the heir who sends it. Who takes it sends the heir's own copy beyond it."""
    scene = _Scene(stage, server=server)
    scene.write()
    (log,) = server.folder.glob("**/*.incr.aof")
    before = len(log.read_bytes())
    kept = {"safety": 60}
    asleep = msgspec.structs.replace(stage.cell, fault="zombie", point="relay.planned#2")
    victim = scene.start("victim", said={**kept, "insists": True}, cell=asleep, lease=scene.lease())
    stopped = os.WIFSTOPPED(victim.wait(stopped=True))
    server.kill()
    whole = log.read_bytes()
    log.write_bytes(whole[:before])
    server.start()
    lasting = WIRE.options["lease"]  # it must not be overtaken in its turn
    heir = scene.send("heir", said={**kept, "also": ["a4", "b4"], "stands": True}, lease=lasting)
    _until(lambda: _answered(stage, "heir") == 2 or heir.ended())
    if stopped:
        victim.wake()
        victim.wait()
    # Two of its batches before it slept, and two when the heir stood still.
    stage.bit = stopped and _answered(stage, "victim") == 4 and not heir.ended()
    (stage.folder / GO).touch()
    heir.wait()
    scene.judge()


def _answered(stage: Stage, by: str) -> int:
    return sum(each.by == by for each in stage.ledger.owners())


_MULTI, _EXEC = b"\r\nMULTI\r\n", b"\r\nEXEC\r\n"


def _torn_outbox(stage: Stage, server: Any) -> None:
    """It is the outbox's own Redis that dies in the middle of its last transaction: an application's EXEC (`cut.…`), or a
    relay's note of what it has delivered and what comes next (`plan.…`). A heartbeat that was written after it is lost as well."""
    scene = _Scene(stage, url=str(server.url))
    scene.write()
    last = "commit.done" if scene.mode == "outbox" else "relay.planned#2"
    killed = msgspec.structs.replace(stage.cell, fault="kill", point=last)
    status = scene.start("victim", cell=killed, lease=RELAYED.options["lease"]).wait()
    server.kill()
    (log,) = server.folder.glob("**/*.incr.aof")
    whole = log.read_bytes()
    begins = whole.rindex(_MULTI)
    ends = whole.index(_EXEC, begins) + len(_EXEC)
    keep = ends - 3 if stage.cell.point.endswith(".tail") else (begins + ends) // 2
    log.write_bytes(whole[:keep])
    server.start()
    stage.bit = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    scene.heir().wait()
    scene.judge()


# -------------------------------------------------------------------------------------------- the rest


def _poisoned(stage: Stage) -> None:
    """The first message of a key is refused until its key is parked; the other key goes on. Then it is repaired."""
    scene = _Scene(stage)
    scene.write()
    scene.start("victim", said={"poison": "a1"}).wait()
    told = [each.value for each in stage.ledger.answers() if each.by == "victim"]
    stage.bit = bool(told) and told[0]["parked"] == 1
    stage.ledger.struck("victim")
    scene.send("person").wait()
    scene.judge()


def _lasted(stage: Stage) -> None:
    """A relay lives and its sink takes longer than its lease: only its heartbeats keep the next one from its parts."""
    scene = _Scene(stage)
    scene.write()
    victim = scene.victim(lease=SLOW.options["lease"])
    _until(lambda: bool(stage.ledger.effects()))
    scene.heir().wait()  # it waits for the lease of one that might be dead
    stage.bit = not victim.ended()
    (stage.folder / GO).touch()
    victim.wait()
    scene.judge()


def _committed_late(stage: Stage) -> None:
    """A message with a lower number is committed after one with a higher number was carried away."""
    scene = _Scene(stage)
    scene.stand(lease=WIRE.options["lease"])
    scene.send("writer", said={"messages": ["b1"]}).wait()
    scene.send("relay").wait()
    stage.reply()
    stage.finish()
    scene.judge()


def _played(stage: Stage) -> None:
    """One process does all of it."""
    scene = _Scene(stage)
    scene.start("victim", said={"messages": ids_of(keys="a")}).wait()
    stage.bit = bool(stage.ledger.faults())
    scene.judge()


ORDERS: Final[dict[str, Callable[..., None]]] = {
    "kill": _killed,
    "zombie": _rose,
    "reset-before": _cut,
    "reset-after": _cut,
    "store-kill": _store_killed,
    "broker-kill": _broker_killed,
    "torn-log": _torn,
    "poison": _poisoned,
    "late-commit": _committed_late,
    "rollback": _played,
    "late-copy": _played,
    "slow": _lasted,
}
