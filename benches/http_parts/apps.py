"""The applications that `./bench http` measures, made by uvicorn's --factory from the environment.

SEMEL_BENCH_KIND: fastapi, starlette, or a name of `peers`. SEMEL_BENCH_STORE: the URL of a store, or empty for the bare
application. SEMEL_BENCH_FREEZE: the garbage collector is set as docs/howto/http.md says. SEMEL_BENCH_FLOOR: in semel's place
stands one of the floors of `floor`.
GET /runs tells how often the handler ran.
"""

from __future__ import annotations

import gc
import os
from typing import Any

from pydantic import BaseModel

__all__ = ["Accepted", "Order", "count", "fastapi", "guarded", "make", "starlette"]

RUNS = [0]


class Order(BaseModel):
    amount: int
    currency: str
    customer: str


class Accepted(BaseModel):
    id: str
    state: str
    amount: int
    currency: str


def count() -> None:
    RUNS[0] += 1


def make() -> Any:
    kind, url = os.environ["SEMEL_BENCH_KIND"], os.environ.get("SEMEL_BENCH_STORE", "")
    if kind not in ("fastapi", "starlette"):
        from benches.http_parts import peer_apps

        return peer_apps.APPS[kind](url)
    app = fastapi() if kind == "fastapi" else starlette()
    if level := os.environ.get("SEMEL_BENCH_FLOOR"):
        from benches.http_parts.floor import floored

        app = floored(app, url, level)
    elif url:
        app = guarded(app, url)
    if os.environ.get("SEMEL_BENCH_FREEZE"):
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000)
    return app


def guarded(app: Any, url: str) -> Any:
    from semel import AsyncSemel
    from semel.http.asgi import IdempotencyMiddleware

    def principal(request: Any) -> str:
        return str(request.headers["authorization"])

    return IdempotencyMiddleware(app, once=AsyncSemel(url), principal=principal, authenticated_outside=True)


def fastapi(*, without_route: bool = False) -> Any:
    from fastapi import FastAPI

    app = FastAPI()

    @app.get("/runs")
    async def runs() -> int:
        return RUNS[0]

    if without_route:
        return app

    @app.post("/orders", status_code=201)
    async def orders(order: Order) -> Accepted:
        count()
        return Accepted(id="ord_1", state="accepted", amount=order.amount, currency=order.currency)

    return app


def starlette() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    async def orders(request: Request) -> Response:
        count()
        order = await request.json()
        return JSONResponse({"id": "ord_1", "state": "accepted", "amount": order["amount"]}, 201)

    async def runs(_: Request) -> Response:
        return JSONResponse(RUNS[0])

    return Starlette(routes=[Route("/orders", orders, methods=["POST"]), Route("/runs", runs)])
