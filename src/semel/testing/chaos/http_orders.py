"""What happens in the cells of an edge, and in which order: a client sends a keyed request, its server is broken, another one
serves the retries. `EDGES` says how a server is started and a request sent, for HTTP here and for gRPC in `grpc_orders`.

The client of HTTP is the driver itself. Its answers are judged as those of a call are: every answer for one key has the same bytes,
somebody else's request with the same key gets none of them, and in the end there is an answer.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, Final, Protocol

import msgspec

from semel.testing.chaos.cells import Heir
from semel.testing.chaos.driver import PATIENCE, Stage, Worker, entered
from semel.testing.chaos.harness import PARKED, QUIETER, WIRE
from semel.testing.chaos.http_sites import FOLDER, SCHEDULE, USER, prepare
from semel.testing.chaos.signals import GO, HOLD, Line
from semel.testing.chaos.wires import Wire
from semel.testing.chaos.workers import Forked

__all__ = ["EDGES", "ORDERS", "Answered", "Edge", "Visit"]

_STRANGER: Final = "bob"
_PAUSE: Final = 0.02
_ABORT: Final = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset
# What a client may repeat: the layer's own refusals and a handler's failure. Anything else is an answer.
_AGAIN: Final = frozenset({409, 500, 503})
_AWAY: Final = "StoreUnavailable"


class Answered(msgspec.Struct, frozen=True):
    """One response, whole, in the words of HTTP. `problem` is the last word of its type; lost connections are problems, too."""

    status: int = 0
    body: str = ""
    replayed: bool = False
    problem: str = ""

    @property
    def error(self) -> str:
        """In the words of the core's errors; empty for an outcome."""
        if self.problem == "outcome-unknown":
            return "OutcomeUnknown"
        if self.status in _AGAIN:
            return _AWAY if self.problem == "store-unavailable" else "InProgress"
        return "" if self.status == 201 or self.problem == "response-not-stored" else self.problem


class Visit(Protocol):
    """One request, sent, on a connection of its own."""

    def read(self) -> Answered:
        """Wait for its answer."""
        ...

    def abort(self) -> None:
        """As a client that dies: its end of the connection is reset."""


class Edge(msgspec.Struct, frozen=True):
    """How a server is started (the function gets the settings that its worker needs) and where it then is; how a request is sent."""

    serve: Callable[[Stage, Callable[[dict[str, Any]], Worker]], tuple[int, Worker]]
    visit: Callable[..., Visit]


class _Visit:
    """Over HTTP."""

    def __init__(self, stage: Stage, port: int, *, path: str, key: str, user: str) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        headers = {"Connection": "close", "X-User": user, SCHEDULE: stage.key, FOLDER: str(stage.folder)}
        if key:
            headers["Idempotency-Key"] = key
        self._connection.request("POST", f"/{path}", b"tea", headers)

    def read(self) -> Answered:
        try:
            response = self._connection.getresponse()
            return _answered(response, response.read())
        except (HTTPException, ConnectionError) as error:
            return Answered(problem=type(error).__name__)
        finally:
            self._connection.close()

    def abort(self) -> None:
        line = self._connection.sock
        assert line is not None
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        self._connection.close()


def _answered(response: HTTPResponse, body: bytes) -> Answered:
    problem = ""
    if response.headers.get_content_type() == "application/problem+json":
        problem = json.loads(body)["type"].rpartition(":")[2]
    return Answered(
        status=response.status,
        body=body.decode(),
        replayed=response.headers.get("idempotency-replayed") == "true" or problem == "response-not-stored",
        problem=problem,
    )


class _Kept:
    """A server that outlives its schedule: the other worker, which nobody breaks. One per driver, store and colour."""

    def __init__(self, stage: Stage) -> None:
        # Nothing happens to it: its own lease is none that could end on a busy machine.
        lease = PARKED.options["lease"]
        self.port, self._worker = EDGES[stage.cell.part].serve(
            stage, lambda words: Forked(stage.plan("heir", settings=words, lease=lease))
        )

    def rest(self) -> None:
        """Servers look up ten times a second: not while others are at work. One who could hold SQLite's lock may."""
        if self._worker.plan.cell.store != "sqlite":
            os.kill(self._worker.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        self._worker.wake()

    def close(self) -> None:
        self._worker.end()


def _served(stage: Stage, start: Callable[[dict[str, Any]], Worker]) -> tuple[int, Worker]:
    """A server's socket listens before it lives; the driver keeps none of it."""
    prepare(stage.cell.colour)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = start({"listener": listener.fileno()})
        return listener.getsockname()[1], worker


EDGES: Final[dict[str, Edge]] = {"http": Edge(_served, _Visit)}
"""By the name of their part."""


class _Scene:
    """The servers of one schedule and the client between them."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._edge = EDGES[stage.cell.part]
        name = f"{stage.cell.part} {stage.cell.store} {stage.cell.colour}"
        self._other: _Kept = stage.places.hold(name, lambda: _Kept(stage))
        self._other.go_on()
        self.port = 0

    def serve(self, role: str, settings: dict[str, Any] | None = None, **changes: Any) -> Worker:
        """A server for this schedule alone; the next visits are to it."""
        said = settings or {}
        self.port, worker = self._edge.serve(
            self.stage, lambda words: self.stage.start(role, settings={**words, **said}, **changes)
        )
        return worker

    def visit(self, suffix: str = "", user: str = USER) -> Visit:
        key = self.stage.key + suffix
        return self._edge.visit(self.stage, self.port, path=self.stage.cell.mode, key=key, user=user)

    def tell(self, path: str) -> None:
        """A request without a key, to the handler itself."""
        answered = self._edge.visit(self.stage, self.port, path=path, key="", user=USER).read()
        if answered.status != 201:
            raise RuntimeError(f"/{path} has answered {answered}")

    def told(self, by: str, answered: Answered) -> None:
        if answered.error:
            self.stage.ledger.error(by, answered.error, f"{answered.status} {answered.body}")
        else:
            value = answered.body if answered.status == 201 else answered.problem
            self.stage.ledger.answer(by, value, replayed=answered.replayed)

    def ask(self, by: str, *, patience: float = PATIENCE / 3) -> Answered:
        """A client's retries, until it has an answer."""
        until = time.monotonic() + patience
        while True:
            answered = self.visit().read()
            if answered.error not in {"InProgress", _AWAY} or time.monotonic() > until:
                self.told(by, answered)
                return answered
            time.sleep(_PAUSE)

    @property
    def other(self) -> int:
        """The port of the server that nobody breaks."""
        return self._other.port

    def after(self) -> Answered:
        """The next caller, on the other server."""
        self.port = self._other.port
        return self.ask("heir")

    def end(self) -> None:
        """When all is over: the same request gives what was given, somebody else's gives his own."""
        self.port = self._other.port
        last = self.ask("judge")
        if self.stage.cell.heir is Heir.BUSY and not last.error and not last.replayed:
            self.ask("judge")  # that was the one who could not be served before
        stranger = self.visit(user=_STRANGER).read()
        if stranger.status != 201 or stranger.replayed or f'"user":"{_STRANGER}"' not in stranger.body:
            self.stage.ledger.error("stranger", "Unexpected", f"an answer that is not his: {stranger}")
        if self.stage.cell.mode == "http-tx":
            self.tell("look")
        self.tell("record")
        self._other.rest()


def _killed(stage: Stage) -> None:
    """SIGKILL of the server at the point."""
    scene = _Scene(stage)
    victim = scene.serve("victim")
    visit = scene.visit()
    status = victim.wait()
    stage.bit = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    answered = visit.read()
    scene.told("victim", answered)
    if (answered.status == 201) != (stage.cell.point == "http.sent"):
        what = "its client has no answer" if answered.status != 201 else "its client has an answer too early"
        stage.ledger.error("victim", "Unexpected", f"{what}: {answered}")
    scene.after()
    scene.end()


def _rose(stage: Stage) -> None:
    """SIGSTOP at the point, beyond the lease; the retry is served by another; then the server goes on, and so does its client."""
    scene = _Scene(stage)
    # A heartbeat that is stopped inside a write holds SQLite's only lock: let none be due before the point.
    quiet = QUIETER.options["lease"]
    victim = scene.serve("victim", lease=quiet if stage.cell.store == "sqlite" else stage.job.lease)
    visit = scene.visit()
    stage.bit = os.WIFSTOPPED(victim.wait(stopped=True))
    if stage.cell.heir is Heir.BUSY:
        scene.serve("heir", {"face": {"timeout": 0.3}, "row_wait": 0.05}, wait=0.9)
        scene.ask("heir", patience=0.0)
    else:
        scene.after()
    victim.wake()
    scene.told("victim", visit.read())
    scene.end()


def _overlapped(stage: Stage) -> None:
    """As a zombie, but the server goes on while the retry is inside of the other one's handler, and answers before it ends."""
    scene = _Scene(stage)
    victim = scene.serve(
        "victim", lease=QUIETER.options["lease"] if stage.cell.store == "sqlite" else stage.job.lease
    )
    visit = scene.visit()
    stopped = os.WIFSTOPPED(victim.wait(stopped=True))
    (stage.folder / HOLD).touch()
    scene.port = scene.other
    retry = scene.visit()
    until = time.monotonic() + PATIENCE
    while not entered(stage, "heir") and time.monotonic() < until:
        time.sleep(0.004)
    stage.bit = stopped and entered(stage, "heir")
    victim.wake()
    scene.told("victim", visit.read())
    (stage.folder / GO).touch()
    scene.told("heir", retry.read())
    scene.end()


def _left(stage: Stage) -> None:
    """The client resets its connection while its server stands at the point, and sends the request again, to another one."""
    scene = _Scene(stage)
    line = Line.of(str(stage.folder)).make()
    victim = scene.serve("victim", lease=6.0)
    visit = scene.visit()
    if line.asked(victim.over(), timeout=PATIENCE):
        visit.abort()
        line.reply()
        stage.bit = True
    answered = scene.after()
    if answered.status != 201:
        stage.ledger.error("heir", "Unexpected", f"a client's leaving has changed the outcome: {answered}")
    scene.end()


def _cut(stage: Stage) -> None:
    """The connection to the store is reset: before the next request arrives there, or after it was carried out."""
    scene = _Scene(stage)
    line = Line.of(str(stage.folder)).make()
    name, address = stage.cell.store, stage.places.address(stage.cell)
    wire: Wire = stage.places.hold(f"wire to {name}", lambda: Wire(address, speaks=name))
    url = stage.places.through(stage.cell, wire.ports[0])
    victim = scene.serve(
        "victim",
        {"armed_later": True, "face": WIRE.plan["settings"]},
        url=url,
        lease=WIRE.options["lease"],
    )
    scene.visit("-warm").read()  # faults on the wire count from an open, used connection
    scene.tell("arm")
    visit = scene.visit()
    if line.asked(victim.over(), timeout=PATIENCE):
        wire.arm(stage.cell.fault)
        line.reply()
    scene.told("victim", visit.read())
    stage.bit = wire.fired()
    scene.after()
    scene.end()


ORDERS: Final[dict[str, Callable[[Stage], None]]] = {
    "kill": _killed,
    "zombie": _rose,
    "overlap": _overlapped,
    "client-reset": _left,
    "reset-before": _cut,
    "reset-after": _cut,
}
