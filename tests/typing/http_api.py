"""The HTTP edge as an editor sees it: options are checked by name and type, also through `add_middleware`.

mypy --strict and pyright check this file, and a test runs it; an `ignore` is a mistake that the checkers must find.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from fastapi import FastAPI
from flask import Flask
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

from semel import AsyncSemel, ConfigurationError, Semel
from semel.http import asgi, fastapi, flask, wsgi
from semel.http.rules import cors


def user(request: Request) -> str:
    return request.headers["x-user"]


def asgi_middleware(once: AsyncSemel) -> None:
    app = Starlette()
    app.add_middleware(
        asgi.IdempotencyMiddleware,
        once=once,
        principal=user,
        authenticated_outside=True,
        retention=timedelta(hours=2),
        routes={"POST /orders": {"required": True, "effects": "opaque"}, "/health": False},
    )
    app.add_middleware(CORSMiddleware, allow_origins=["https://page.example"], **cors())
    Starlette(middleware=[Middleware(asgi.IdempotencyMiddleware, once=once, anonymous=True)])
    FastAPI().add_middleware(asgi.IdempotencyMiddleware, once=once, wait=0, profile="acp")
    app.add_middleware(asgi.IdempotencyMiddleware, once=once, waits=3)  # type: ignore[call-arg]  # wrong on purpose
    app.add_middleware(asgi.IdempotencyMiddleware, once=once, effects="none")  # type: ignore[arg-type]  # wrong on purpose
    app.add_middleware(asgi.IdempotencyMiddleware)  # type: ignore[call-arg]  # wrong on purpose
    with pytest.raises(ConfigurationError, match="AsyncSemel"):
        asgi.IdempotencyMiddleware(app, once=Semel("memory://"), anonymous=True)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ConfigurationError, match="wiat"):
        asgi.IdempotencyMiddleware(app, once=once, wiat=0)  # type: ignore[call-arg]  # wrong on purpose


def decorators(once: AsyncSemel, plain: Semel) -> None:
    app = FastAPI()

    @app.post("/orders")
    @fastapi.idempotent(once=once, principal="customer", lease=5)
    async def orders(customer: str) -> dict[str, str]:
        return {"of": customer}

    fastapi.install(app)
    site = Flask("shop")

    @site.post("/orders")
    @flask.idempotent(once=plain, principal=lambda request: "ada", stored=lambda status: status < 500)
    def order() -> dict[str, str]:
        return {}

    flask.Idempotency(site, once=plain, anonymous=True, authenticated_outside=True)

    def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        return []

    wsgi.IdempotencyMiddleware(application, once=plain, anonymous=True, authenticated_outside=True)
    with pytest.raises(ConfigurationError, match="routes"):
        flask.idempotent(once=plain, anonymous=True, routes={})  # type: ignore[call-arg]  # wrong on purpose
