"""The applications of real server processes. Effects are lines of a file outside; the tests hold handlers at a gate.

SEMEL_URL, SEMEL_OPTIONS (of the face), SEMEL_RULES (of the middleware), SEMEL_FOLDER (ledger and gate).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("SEMEL_FOLDER", "."))
URL = os.environ.get("SEMEL_URL", "memory://")
FACE = json.loads(os.environ.get("SEMEL_OPTIONS", "{}"))
RULES = json.loads(os.environ.get("SEMEL_RULES", "{}"))
SECONDS = 30.0


def note(line: str) -> None:
    """One write of one line to a file opened for appending: whole, in order, and there whoever dies next."""
    handle = os.open(FOLDER / "ledger", os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
    os.write(handle, (line + "\n").encode())
    os.close(handle)


def is_open() -> bool:
    return (FOLDER / "gate").exists()


async def gate() -> None:
    end = time.monotonic() + SECONDS
    while not is_open() and time.monotonic() < end:
        await asyncio.sleep(0.005)


def user(request: Any) -> str | None:
    found: str | None = request.headers.get("x-user")
    return found


def die_once(key: str) -> None:
    """A worker that is killed in the middle of its handler, the first time."""
    marker = FOLDER / f"died-{key}"
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def asgi() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    from semel import AsyncSemel
    from semel.http.asgi import IdempotencyMiddleware

    once = AsyncSemel(URL, **FACE)

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        yield
        await once.aclose()
        note("closed")

    async def orders(request: Request) -> Response:
        digest, size = hashlib.sha256(), 0
        async for chunk in request.stream():
            digest.update(chunk)
            size += len(chunk)
        note(f"orders {request.headers.get('idempotency-key')}")
        return JSONResponse({"size": size, "sha256": digest.hexdigest()}, 201)

    async def slow(request: Request) -> Response:
        note("begun")
        await gate()
        note("slow")
        return PlainTextResponse("slow", 201)

    async def stream(request: Request) -> Response:
        note("stream")

        async def pieces() -> AsyncIterator[bytes]:
            yield b"first,"
            await gate()
            for number in range(100):
                yield b"%d," % number
            note("streamed")

        return StreamingResponse(pieces())

    async def kill(request: Request) -> Response:
        note("kill")
        die_once("handler")
        return PlainTextResponse("recovered", 201)

    handlers = (orders, slow, stream, kill)
    app = Starlette(routes=[Route(f"/{fn.__name__}", fn, methods=["POST"]) for fn in handlers], lifespan=life)
    return IdempotencyMiddleware(app, once=once, principal=user, authenticated_outside=True, **RULES)


def wsgi() -> Any:
    from flask import Flask, Response, request

    from semel import Semel
    from semel.http.flask import Idempotency

    app = Flask("shop")

    def held() -> None:
        asyncio.run(gate())

    @app.post("/orders")
    def orders() -> Any:
        body = request.get_data()
        note(f"orders {request.headers.get('idempotency-key')}")
        return {"size": len(body), "sha256": hashlib.sha256(body).hexdigest()}, 201

    @app.post("/slow")
    def slow() -> Any:
        note("begun")
        held()
        note("slow")
        return "slow", 201

    @app.post("/stream")
    def stream() -> Any:
        note("stream")

        def pieces() -> Iterator[bytes]:
            yield b"first,"
            yield b"second,"  # the middleware holds one piece back
            held()
            for number in range(100):
                yield b"%d," % number
            note("streamed")

        return Response(pieces())

    @app.post("/kill")
    def kill() -> Any:
        note("kill")
        die_once("handler")
        return "recovered", 201

    Idempotency(app, once=Semel(URL, **FACE), principal=user, authenticated_outside=True, **RULES)
    return app


def django() -> Any:
    """Django under an ASGI server, with the middleware in its settings."""
    import types

    from django.conf import settings
    from django.http import HttpResponse, StreamingHttpResponse
    from django.urls import path

    from semel import AsyncSemel

    async def slow(request: Any) -> Any:
        note("begun")
        await gate()
        note("slow")
        return HttpResponse("slow", status=201)

    async def stream(request: Any) -> Any:
        note("stream")

        async def pieces() -> AsyncIterator[bytes]:
            yield b"first,"
            yield b"second,"  # the middleware holds one piece back
            await gate()
            for number in range(100):
                yield b"%d," % number
            note("streamed")

        return StreamingHttpResponse(pieces())

    urls = types.ModuleType("urls")
    urls.urlpatterns = [path("slow", slow), path("stream", stream)]  # type: ignore[attr-defined]  # a module made here
    settings.configure(
        ROOT_URLCONF=urls,
        ALLOWED_HOSTS=["*"],
        MIDDLEWARE=["semel.http.django.IdempotencyMiddleware"],
        SEMEL={
            "async_once": AsyncSemel(URL, **FACE),
            "principal": user,
            "authenticated_outside": True,
            **RULES,
        },
    )
    from django.core.asgi import get_asgi_application

    return get_asgi_application()
