"""HTTP servers of the matrix: a uvicorn process and a gunicorn sync worker, each with the middleware around a small handler.

They are forked with a socket that listens already, so a client need not wait for them. What the handler does is the cell's
mode: an effect outside, two steps, a streamed response, or a row in the caller's own transaction.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

import msgspec

from semel import AsyncSemel, Semel, current_run, points
from semel.http import asgi, wsgi
from semel.http.keys import core_key
from semel.runtime import run_sync
from semel.testing.chaos import traps
from semel.testing.chaos.cells import Plan
from semel.testing.chaos.ledger import Ledger
from semel.testing.chaos.transactions import Transaction, open_transaction, wait

__all__ = ["USER", "attempt"]

USER = "ada"
"""Whose request meets the fault. Everybody else's effects are not of its key."""


def attempt(plan: Plan) -> None:
    """In a forked worker: serve until killed; or, as `look`, write down which rows were committed."""
    site = _Site(plan)
    if plan.role == "look":
        run_sync(site.look())
        return
    if plan.role == "victim" and not plan.settings.get("armed_later"):
        site.arm()
    logging.disable(logging.CRITICAL)  # what the servers would say about the faults
    listener = socket.socket(fileno=plan.settings["listener"])
    (_gunicorn if plan.cell.colour == "sync" else _uvicorn)(site, listener)


def _uvicorn(site: _Site, listener: socket.socket) -> None:
    uvicorn: Any = import_module("uvicorn")
    app = asgi.IdempotencyMiddleware(site.asgi, once=site.once, **site.rules)
    config = uvicorn.Config(app, loop="asyncio", http="httptools", lifespan="off", log_config=None)
    uvicorn.Server(config).run(sockets=[listener])


def _gunicorn(site: _Site, listener: socket.socket) -> None:
    """What gunicorn's arbiter does after its fork; ours is the driver."""
    config: Any = import_module("gunicorn.config").Config()
    log: Any = import_module("gunicorn.glogging").Logger(config)
    application = _Loaded(wsgi.IdempotencyMiddleware(site.wsgi, once=site.once, **site.rules))
    worker: Any = import_module("gunicorn.workers.sync").SyncWorker
    worker(1, os.getppid(), [listener], application, 30, config, log).init_process()


class _Loaded:
    """What a gunicorn worker asks for its application."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def wsgi(self) -> Any:
        return self._app


class _Site:
    """One server's application: what a request does, in both colours."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.mode = plan.cell.mode
        self.ledger = Ledger(plan.folder)
        face: Any = Semel if plan.cell.colour == "sync" else AsyncSemel
        options = {"timeout": 10.0, **plan.settings.get("face", {})}
        self.once = face(plan.url, tenant="chaos", lease=plan.lease, **options)
        self.rules: dict[str, Any] = {
            "principal": lambda request: request.headers.get("x-user"),
            "authenticated_outside": True,
            "effects": {"http-opaque": "opaque", "http-steps": "steps"}.get(self.mode, "db"),
            "lease": plan.lease,
            "wait": plan.wait,
        }

    def arm(self) -> None:
        traps.arm(self.plan, self.ledger)

    # ---- the handler
    async def answer(self, user: str, key: str) -> bytes:
        """One body for both colours. An effect outside is made before anything is waited for."""
        if self.mode == "http-steps":
            value = await self._steps(user, key)
        elif self.mode == "http-tx":
            value = await self._within(user, key)
        else:
            self._effect("effect", user, key)
            points.reach("effect.made")
            value = self._value(user)
        return msgspec.json.encode(value)

    def _value(self, user: str) -> dict[str, str]:
        return {"user": user, "by": f"{self.plan.role} {os.getpid()}"}

    def _effect(self, what: str, user: str, key: str) -> None:
        mine = user == USER and key == self.plan.key
        self.ledger.effect(what if mine else "another's", self.plan.role)

    async def _steps(self, user: str, key: str) -> dict[str, str]:
        run = current_run()
        step: Any = self._step if self.plan.cell.colour == "sync" else self._step_async
        return {"user": user} | {
            name: await wait(run.step(name, step, name, user, key)) for name in ("one", "two")
        }

    def _step(self, name: str, user: str, key: str) -> str:
        self._effect(name, user, key)
        return f"{name} by {os.getpid()}"

    async def _step_async(self, name: str, user: str, key: str) -> str:
        return self._step(name, user, key)

    async def _within(self, user: str, key: str) -> dict[str, str]:
        """The recipe of docs/howto/http-within.md, behind the middleware: rows and record commit together."""
        inner = core_key(key, user)
        opened = await self._open(inner)
        try:
            insert = self._row if self.plan.cell.colour == "sync" else self._row_async
            bound = self.once.within(opened.target)
            patience = self.plan.settings.get("row_wait", self.plan.wait)
            outcome = await wait(bound.execute(inner, insert, opened, user, key, wait=patience))
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

    def _row(self, opened: Transaction, user: str, key: str) -> dict[str, str]:
        return run_sync(self._row_async(opened, user, key))

    async def _row_async(self, opened: Transaction, user: str, key: str) -> dict[str, str]:
        await opened.insert(key if user == USER else f"{key}-{user}", self.plan.role)
        points.reach("effect.made")
        return self._value(user)

    async def look(self) -> None:
        """What is committed goes into the ledger, as it is in the end."""
        inner = core_key(self.plan.key, USER)
        tag = str(self.once.tag(inner)) if self.plan.url.startswith("redis") else ""
        opened = await open_transaction(self.plan.settings["sync_url"], "sync", tag)
        for row in await opened.rows(self.plan.key):
            self.ledger.effect(row.what, row.by)
        await opened.close()

    # ---- the same under ASGI and WSGI
    async def asgi(self, scope: Any, receive: Any, send: Any) -> None:
        del receive
        if scope["method"] == "GET":
            self.arm()
            body = b"armed"
        else:
            lines = dict(scope["headers"])
            body = await self.answer(lines[b"x-user"].decode(), lines[b"idempotency-key"].decode())
        await send(
            {
                "type": "http.response.start",
                "status": 201,
                "headers": [(b"content-type", b"application/json")],
            }
        )
        for piece in self._pieces(body):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"" if self.streams else body})

    def wsgi(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "GET":
            self.arm()
            body = b"armed"
        else:
            body = run_sync(self.answer(environ["HTTP_X_USER"], environ["HTTP_IDEMPOTENCY_KEY"]))
        start_response("201 Created", [("Content-Type", "application/json")])
        return self._pieces(body) if self.streams else [body]

    @property
    def streams(self) -> bool:
        return self.mode == "http-stream"

    def _pieces(self, body: bytes) -> Iterator[bytes]:
        if self.streams:
            yield from (body[:5], body[5:9], body[9:])
