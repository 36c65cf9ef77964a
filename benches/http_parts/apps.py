"""The applications that `./bench http` measures, made by uvicorn's --factory from the environment.

SEMEL_BENCH_KIND: fastapi or starlette. SEMEL_BENCH_STORE: the URL of a store, or empty for the bare application.
"""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel


class Order(BaseModel):
    amount: int
    currency: str
    customer: str


class Accepted(BaseModel):
    id: str
    state: str
    amount: int
    currency: str


def make() -> Any:
    app = _fastapi() if os.environ["SEMEL_BENCH_KIND"] == "fastapi" else _starlette()
    url = os.environ.get("SEMEL_BENCH_STORE", "")
    if not url:
        return app
    from semel import AsyncSemel
    from semel.http.asgi import IdempotencyMiddleware

    def principal(request: Any) -> str:
        return str(request.headers["authorization"])

    return IdempotencyMiddleware(app, once=AsyncSemel(url), principal=principal, authenticated_outside=True)


def _fastapi() -> Any:
    from fastapi import FastAPI

    app = FastAPI()

    @app.post("/orders", status_code=201)
    async def orders(order: Order) -> Accepted:
        return Accepted(id="ord_1", state="accepted", amount=order.amount, currency=order.currency)

    return app


def _starlette() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    async def orders(request: Request) -> Response:
        order = await request.json()
        return JSONResponse({"id": "ord_1", "state": "accepted", "amount": order["amount"]}, 201)

    return Starlette(routes=[Route("/orders", orders, methods=["POST"])])
