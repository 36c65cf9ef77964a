"""gRPC servers of the matrix: a threaded one and one of grpc.aio, each with the interceptor around the handler of the HTTP edge.

They choose their port themselves, and tell it when they serve. Requests and answers are plain bytes.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
import grpc.aio
import msgspec

from semel.grpc import AsyncIdempotencyInterceptor, IdempotencyInterceptor, Method
from semel.runtime import run_sync
from semel.testing.chaos.cells import Plan
from semel.testing.chaos.grpc_orders import SERVICE
from semel.testing.chaos.http_sites import Order, Site

__all__ = ["attempt"]

_METHODS: Final = {"grpc-db": Method(effects="db"), "grpc-opaque": Method(effects="opaque")}
_ANYWHERE: Final = "127.0.0.1:0"


def attempt(plan: Plan) -> None:
    """In a forked worker: serve until killed."""
    site = Site(plan)
    site.begin()
    if site.is_sync:
        _serve(site)
    else:
        asyncio.run(_serve_async(site))


def _serve(site: Site) -> None:
    interceptor = IdempotencyInterceptor(once=site.once, **_options(site))
    server = grpc.server(ThreadPoolExecutor(4), interceptors=[interceptor])
    server.add_generic_rpc_handlers((_handlers(site),))
    port = server.add_insecure_port(_ANYWHERE)
    server.start()
    _tell(site, port)
    server.wait_for_termination()


async def _serve_async(site: Site) -> None:
    interceptor = AsyncIdempotencyInterceptor(once=site.once, **_options(site))
    server = grpc.aio.server(interceptors=[interceptor])
    server.add_generic_rpc_handlers((_handlers(site),))
    port = server.add_insecure_port(_ANYWHERE)
    await server.start()
    _tell(site, port)
    await server.wait_for_termination()


def _tell(site: Site, port: int) -> None:
    os.write(site.plan.settings["line"], port.to_bytes(2, "big"))


def _options(site: Site) -> Any:
    return {
        "principal": lambda context: _said(context).get("x-user"),
        "methods": {f"/{SERVICE}/{mode}": method for mode, method in _METHODS.items()},
        "lease": site.plan.lease,
        "wait": site.plan.wait,
    }


def _said(context: Any) -> dict[str, str]:
    return {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}


def _handlers(site: Site) -> grpc.GenericRpcHandler:
    made = {mode: _handler(site, mode) for mode in (*_METHODS, "arm", "record")}
    handlers: grpc.GenericRpcHandler = grpc.method_handlers_generic_handler(SERVICE, made)
    return handlers


def _handler(site: Site, mode: str) -> Any:
    def handle(_: bytes, context: Any) -> bytes:
        return msgspec.json.encode(run_sync(site.outcome(Order.of(mode, _said(context)))))

    async def handle_async(_: bytes, context: Any) -> bytes:
        return msgspec.json.encode(await site.outcome(Order.of(mode, _said(context))))

    return grpc.unary_unary_rpc_method_handler(handle if site.is_sync else handle_async)
