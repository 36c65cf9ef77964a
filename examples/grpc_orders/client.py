"""Places an order, loses the reply, and asks again: `python -m examples.grpc_orders.client HOST:PORT`."""

from __future__ import annotations

import sys
from typing import Any

import grpc

from examples.grpc_orders.stubs import orders, orders_grpc
from semel.grpc import ClientIdempotencyInterceptor, channel_options, idempotent_operation, service_config

USER = (("user", "ann"),)


def connect(target: str) -> grpc.Channel:
    """ABORTED (in progress) and UNAVAILABLE are retried by gRPC itself, below the interceptor that makes the key."""
    config = service_config(["/examples.orders.Orders/Place"], max_attempts=5)
    channel = grpc.insecure_channel(target, options=channel_options(config))
    grpc.channel_ready_future(channel).result(timeout=20)
    return grpc.intercept_channel(channel, ClientIdempotencyInterceptor())


def place(stub: Any, timeout: float) -> tuple[Any, str]:
    """The business action has a name, so a second try, of this process or the next one, is the same action."""
    with idempotent_operation("order-2026-11-15-0007"):
        request = orders.PlaceRequest(item="book", cents=500)
        order, call = stub.Place.with_call(request, metadata=USER, timeout=timeout)
    return order, str(dict(call.initial_metadata())["idempotency-replayed"])


def main() -> None:
    with connect(sys.argv[1]) as channel:
        stub = orders_grpc.OrdersStub(channel)
        try:
            place(stub, timeout=0.4)
        except grpc.RpcError as error:
            print("first try:", error.code().name)
        order, replayed = place(stub, timeout=20)
        print(f"second try: {order.item} for {order.cents} cents, replayed: {replayed}")
        books = stub.List(orders.ListRequest(), metadata=USER).orders
        print(f"{len(books)} order in the books")


if __name__ == "__main__":
    main()
