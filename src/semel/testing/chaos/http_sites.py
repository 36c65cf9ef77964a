"""HTTP servers of the matrix: a uvicorn process and a gunicorn sync worker, each with the middleware around a small handler.

They are forked with a socket that listens already, so a client need not wait for them. What the handler does is the mode
in its path: an effect outside, two steps, a streamed response, or a row in the caller's own transaction. A server may serve
many schedules: each request says which one's ledger it belongs to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping
from functools import cache
from http import HTTPStatus
from importlib import import_module
from typing import Any

import msgspec

from semel import AsyncSemel, Semel, current_run, points
from semel.http import asgi, wsgi
from semel.http.keys import core_key
from semel.http.problem import ANSWERED, PROBLEM_TYPE, of_error
from semel.runtime import run_sync
from semel.testing.chaos import traps
from semel.testing.chaos.cells import Plan
from semel.testing.chaos.expectations import HEARD
from semel.testing.chaos.harness import EVERY
from semel.testing.chaos.ledger import Ledger
from semel.testing.chaos.signals import GO, HOLD
from semel.testing.chaos.transactions import Transaction, open_transaction, wait

__all__ = ["FOLDER", "SCHEDULE", "USER", "Order", "Site", "attempt", "prepare"]

USER = "ada"
"""Whose request meets the fault. Everybody else's effects are not of its key."""
FOLDER = "x-folder"
"""A header: where the schedule's ledger is."""
SCHEDULE = "x-schedule"
"""A header: which key that ledger is about."""
_EFFECTS = {
    "http-db": "db",
    "http-opaque": "opaque",
    "http-steps": "steps",
    "http-stream": "db",
    "http-tx": "db",
}


def attempt(plan: Plan) -> None:
    """In a forked worker: serve until killed."""
    site = Site(plan)
    site.begin()
    listener = socket.socket(fileno=plan.settings["listener"])
    (_gunicorn if plan.cell.colour == "sync" else _uvicorn)(site, listener)


def _uvicorn(site: Site, listener: socket.socket) -> None:
    uvicorn: Any = import_module("uvicorn")
    app = asgi.IdempotencyMiddleware(site.asgi, once=site.once, **site.rules)
    config = uvicorn.Config(app, loop="asyncio", http="httptools", ws="none", lifespan="off", log_config=None)
    uvicorn.Server(config).run(sockets=[listener])


def _gunicorn(site: Site, listener: socket.socket) -> None:
    """What gunicorn's arbiter does after its fork; ours is the driver."""
    config, log = _settings()
    application = _Loaded(wsgi.IdempotencyMiddleware(site.wsgi, once=site.once, **site.rules))
    worker: Any = import_module("gunicorn.workers.sync").SyncWorker
    worker(1, os.getppid(), [listener], application, 30, config, log).init_process()


@cache
def _settings() -> tuple[Any, Any]:
    config: Any = import_module("gunicorn.config").Config()
    return config, import_module("gunicorn.glogging").Logger(config)


def prepare(colour: str) -> None:
    """What forked servers need not make again."""
    if colour == "sync":
        _settings()


class _Loaded:
    """What a gunicorn worker asks for its application."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def wsgi(self) -> Any:
        return self._app


class Order(msgspec.Struct, frozen=True):
    """A request as its handler sees it."""

    mode: str
    user: str
    key: str
    schedule: str
    ledger: Ledger

    @classmethod
    def of(cls, path: str, headers: Mapping[str, str]) -> Order:
        name = headers.get("idempotency-key", "")
        ledger = Ledger(headers[FOLDER])
        return cls(path.strip("/"), headers["x-user"], name, headers[SCHEDULE], ledger)

    @property
    def is_ours(self) -> bool:
        """Of the schedule's own key: neither a stranger's nor one without a key."""
        return self.user == USER and self.key == self.schedule

    def effect(self, what: str, by: str) -> None:
        self.ledger.effect(what if self.is_ours else "another's", by)


class Site:
    """One server's application: what a request does, in both colours."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.is_sync = plan.cell.colour == "sync"
        face: Any = Semel if self.is_sync else AsyncSemel
        options = {**EVERY.plan["settings"], **plan.settings.get("face", {})}
        self.once = face(plan.url, tenant="chaos", lease=plan.lease, **options)
        self.rules: dict[str, Any] = {
            "principal": lambda request: request.headers.get("x-user"),
            "authenticated_outside": True,
            "lease": plan.lease,
            "wait": plan.wait,
            "store_timeout": EVERY.options["timeout"],  # a busy machine is not a fault
            "routes": {f"POST /{mode}": {"effects": effects} for mode, effects in _EFFECTS.items()},
        }

    def arm(self) -> None:
        traps.arm(self.plan, Ledger(self.plan.folder))

    def begin(self) -> None:
        """Before it serves."""
        if self.plan.role == "victim" and not self.plan.settings.get("armed_later"):
            self.arm()
        logging.disable(logging.CRITICAL)  # what the servers would say about the faults

    # ---- the handler
    async def answer(self, order: Order) -> tuple[int, str, bytes]:
        """Status, type and body. The core's errors inside of a handler are answered as the frameworks' `install` does."""
        try:
            return 201, "application/json", msgspec.json.encode(await self.outcome(order))
        except ANSWERED as error:
            problem = of_error(error)
            assert problem is not None
            return problem.status, PROBLEM_TYPE.decode(), problem.body()

    async def outcome(self, order: Order) -> dict[str, str]:
        """One body for both colours. An effect outside is made before anything is waited for."""
        match order.mode:
            case "arm":
                self.arm()
                return {}
            case "look":
                return await self._look(order)
            case "record":
                return await self._record(order)
        await self._enter(order)
        if order.mode == "http-steps":
            return await self._steps(order)
        if order.mode == "http-tx":
            return await self._within(order)
        order.effect("effect", self.plan.role)
        points.reach("effect.made")
        return self._value(order)

    async def _enter(self, order: Order) -> None:
        """Who owns the key now is told. An heir then waits, where the schedule says so, for the one that it has overtaken."""
        if order.is_ours:
            run = current_run()
            order.ledger.place(run.scope)
            order.ledger.entered(self.plan.role, run.ask.nonce, run.attempt)
        if self.plan.role != "heir" or not (order.ledger.folder / HOLD).exists():
            return
        while not (order.ledger.folder / GO).exists():
            if self.is_sync:
                _rest()
            else:
                await asyncio.sleep(0.004)

    def _value(self, order: Order) -> dict[str, str]:
        return {"user": order.user, "by": f"{self.plan.role} {os.getpid()}"}

    async def _steps(self, order: Order) -> dict[str, str]:
        run = current_run()
        step: Any = self._step if self.is_sync else self._step_async
        made = {}
        for name in ("one", "two"):
            await self._hear(run)
            made[name] = await wait(run.step(name, step, name, order))
        return {"user": order.user, **made}

    async def _hear(self, run: Any) -> None:
        """As the core's: who has woken between two steps hears from its heartbeat before it goes on."""
        cell, until = self.plan.cell, time.monotonic() + 20 * self.plan.lease
        if self.plan.role != "victim" or cell.fault != "zombie" or cell.point not in HEARD:
            return
        while traps.woken.is_set() and not run.lease_lost and time.monotonic() < until:
            if self.is_sync:
                _rest()
            else:
                await asyncio.sleep(0.004)

    def _step(self, name: str, order: Order) -> str:
        order.effect(name, self.plan.role)
        return f"{name} by {os.getpid()}"

    async def _step_async(self, name: str, order: Order) -> str:
        return self._step(name, order)

    async def _within(self, order: Order) -> dict[str, str]:
        """The recipe of docs/howto/http-within.md, behind the middleware: rows and record commit together."""
        inner = core_key(order.key, order.user)
        opened = await self._open(inner)
        try:
            insert = self._row if self.is_sync else self._row_async
            bound = self.once.within(opened.target)
            patience = self.plan.settings.get("row_wait", self.plan.wait)
            outcome = await wait(bound.execute(inner, insert, opened, order, wait=patience))
            points.reach("commit.sent")
            await opened.commit()
            points.reach("commit.done")
            found: dict[str, str] = outcome.value
            return found
        finally:
            await opened.close()

    async def _open(self, inner: str) -> Transaction:
        tag = str(self.once.tag(inner)) if self.plan.url.startswith("redis") else ""
        return await open_transaction(self.plan.url, self.plan.cell.colour, tag)

    def _row(self, opened: Transaction, order: Order) -> dict[str, str]:
        return run_sync(self._row_async(opened, order))

    async def _row_async(self, opened: Transaction, order: Order) -> dict[str, str]:
        await opened.insert(f"{order.user} {order.key}", self.plan.role)
        points.reach("effect.made")
        return self._value(order)

    async def _look(self, order: Order) -> dict[str, str]:
        """What is committed goes into the ledger, as it is in the end."""
        opened = await self._open(core_key(order.schedule, USER))
        try:
            for row in await opened.rows(f"{USER} {order.schedule}"):
                order.ledger.effect(row.what, row.by)
        finally:
            await opened.close()
        return {}

    async def _record(self, order: Order) -> dict[str, str]:
        """The record of the edge's own key goes into the ledger, as it is in the end."""
        scope = order.ledger.scope()
        record = None if scope is None else await wait(self.once.peek(scope))
        if record is not None:
            order.ledger.keep(record.state.value, record.nonce, record.attempts)
        return {}

    # ---- the same under ASGI and WSGI
    async def asgi(self, scope: Any, receive: Any, send: Any) -> None:
        del receive
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        order = Order.of(scope["path"], headers)
        status, kind, body = await self.answer(order)
        lines = [(b"content-type", kind.encode())]
        await send({"type": "http.response.start", "status": status, "headers": lines})
        pieces = _pieces(order, body)
        for piece in pieces[:-1]:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": pieces[-1]})

    def wsgi(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        headers = {
            name[5:].replace("_", "-").lower(): text
            for name, text in environ.items()
            if name.startswith("HTTP_")
        }
        order = Order.of(environ["PATH_INFO"], headers)
        status, kind, body = run_sync(self.answer(order))
        start_response(f"{status} {HTTPStatus(status).phrase}", [("Content-Type", kind)])
        pieces = _pieces(order, body)
        return pieces if len(pieces) == 1 else iter(pieces)


def _rest() -> None:
    time.sleep(0.004)


def _pieces(order: Order, body: bytes) -> list[bytes]:
    return [body[:5], body[5:9], body[9:]] if order.mode == "http-stream" else [body]
