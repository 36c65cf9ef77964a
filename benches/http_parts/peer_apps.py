"""The same FastAPI route behind each package, as its own documentation shows it, with its own defaults, on Redis.

Runs in the environment of `requirements/bench-http.txt`. Middlewares stand around the route; decorators get what they ask
for: the request as a parameter, or a plain dict to store.
"""

# mypy: disable-error-code="import-not-found,no-any-return"
# The packages are installed in an environment of their own, not where mypy looks.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Request, Response

from benches.http_parts.apps import Accepted, Order, count, fastapi, guarded

__all__ = ["APPS"]


def _accepted(order: Order) -> dict[str, Any]:
    count()
    return {"id": "ord_1", "state": "accepted", "amount": order.amount, "currency": order.currency}


def bare(_: str) -> Any:
    return fastapi()


# ------------------------------------------------------------------------------------------------------ middlewares
def semel(url: str) -> Any:
    return guarded(fastapi(), url)


def idemkit(url: str) -> Any:
    from idemkit import HttpConfig, IdempotencyMiddleware, RedisBackend

    app = fastapi()
    config = HttpConfig(scope=lambda request: request.headers.get("authorization", "anonymous"))
    app.add_middleware(IdempotencyMiddleware, backend=RedisBackend.from_url(url), config=config)
    return app


def ichido(url: str) -> Any:
    from ichido import IchidoConfig, IchidoMiddleware, RedisIdempotencyStore
    from redis.asyncio import from_url

    app = fastapi()
    store = RedisIdempotencyStore(redis_client=from_url(url, decode_responses=True), ttl=86_400)
    app.add_middleware(IchidoMiddleware, store=store, config=IchidoConfig(ttl_seconds=86_400))
    return app


def asgi_idempotency_header(url: str) -> Any:
    from idempotency_header_middleware import IdempotencyHeaderMiddleware
    from idempotency_header_middleware.backends import RedisBackend
    from redis.asyncio import from_url

    app = fastapi()
    app.add_middleware(IdempotencyHeaderMiddleware, backend=RedisBackend(redis=from_url(url)))
    return app


def fastapi_idempotency(_: str) -> Any:
    from fastapi_idempotency import IdempotencyMiddleware, MemoryStore

    app = fastapi()
    app.add_middleware(IdempotencyMiddleware, store=MemoryStore())
    return app


def fastapi_idempotency_key(url: str) -> Any:
    from fastapi_idempotency_key import IdempotencyMiddleware, RedisBackend

    app = fastapi()
    app.add_middleware(IdempotencyMiddleware, backend=RedisBackend(redis_url=url))
    return app


# ------------------------------------------------------------------------------------------------------- decorators
def semel_decorator(url: str) -> Any:
    from semel import AsyncSemel
    from semel.http.fastapi import idempotent, install

    app = fastapi(without_route=True)
    once = AsyncSemel(url)
    install(app)

    @app.post("/orders", status_code=201)
    @idempotent(once=once, principal=lambda request: request.headers["authorization"])
    async def orders(order: Order) -> Accepted:
        return Accepted(**_accepted(order))

    return app


def mobius(url: str) -> Any:
    from mobius_idempotence import IdempotencyConfig, IdempotencyManager, idempotent
    from mobius_idempotence.backends.redis import RedisBackend

    app = fastapi(without_route=True)
    manager = IdempotencyManager(RedisBackend(url), IdempotencyConfig(fail_open=False))

    @app.post("/orders", status_code=201)
    @idempotent(manager, status_code=201)
    async def orders(order: Order) -> Any:
        return _accepted(order)

    return app


def idempot(url: str) -> Any:
    import idempot as package
    from idempot.contrib.fastapi import idempotent

    package.configure(backend="redis", redis_url=url)
    app = fastapi(without_route=True)

    @app.post("/orders")
    @idempotent
    async def orders(request: Request, order: Order) -> Any:
        del request
        return _accepted(order)

    return app


def idemptx(url: str) -> Any:
    from fastapi.responses import JSONResponse
    from idemptx import idempotent
    from idemptx.backend import AsyncRedisBackend
    from redis.asyncio import from_url

    app = fastapi(without_route=True)

    @app.post("/orders", status_code=201)
    @idempotent(storage_backend=AsyncRedisBackend(from_url(url)))
    async def orders(request: Request, order: Order) -> Response:
        del request
        return JSONResponse(_accepted(order), 201)

    return app


def pyidempotent(url: str) -> Any:
    from pyidempotent import idempotent
    from pyidempotent.backends.redis import RedisBackend
    from redis.asyncio import from_url

    app = fastapi(without_route=True)

    @app.post("/orders", status_code=201)
    @idempotent(backend=RedisBackend(from_url(url)), ttl=86_400)
    async def orders(request: Request, order: Order) -> Any:
        del request
        return _accepted(order)

    return app


APPS: dict[str, Callable[[str], Any]] = {
    "bare": bare,
    "semel": semel,
    "semel (decorator)": semel_decorator,
    "idemkit": idemkit,
    "ichido": ichido,
    "asgi-idempotency-header": asgi_idempotency_header,
    "fastapi-idempotency (memory)": fastapi_idempotency,
    "fastapi-idempotency-key": fastapi_idempotency_key,
    "mobius (decorator)": mobius,
    "idempot (decorator)": idempot,
    "idemptx (decorator)": idemptx,
    "pyidempotent (decorator)": pyidempotent,
}
