"""Orders over gRPC, placed once for each key: `python -m examples.grpc_orders.server FOLDER` prints its port."""

from __future__ import annotations

import sqlite3
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc

from examples.grpc_orders.stubs import orders, orders_grpc
from semel import Semel, current_run
from semel.grpc import IdempotencyInterceptor


class Orders(orders_grpc.OrdersServicer):  # type: ignore[misc] # made at run time
    """The shop. It knows nothing about keys, but for the id that makes its row the same on every attempt."""

    def __init__(self, database: Path) -> None:
        self._database = database
        with closing(sqlite3.connect(database)) as db:
            db.execute("CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, item TEXT, cents INTEGER)")

    def Place(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - gRPC's names
        if request.cents <= 0:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an order costs something")
        # Killed between this commit and the record, the next attempt finds the row instead of making a second one.
        number = current_run().downstream_key("orders")
        with closing(sqlite3.connect(self._database)) as db, db:
            db.execute("INSERT OR IGNORE INTO orders VALUES (?, ?, ?)", (number, request.item, request.cents))
        time.sleep(0.8)  # the warehouse is slow: an impatient client is gone by now
        return orders.Order(id=number, item=request.item, cents=request.cents)

    def List(self, _request: Any, _context: grpc.ServicerContext) -> Any:  # noqa: N802 - gRPC's names
        with closing(sqlite3.connect(self._database)) as db:
            rows = db.execute("SELECT id, item, cents FROM orders ORDER BY rowid").fetchall()
        return orders.ListReply(orders=[orders.Order(id=i, item=item, cents=c) for i, item, c in rows])


def user_of(context: grpc.ServicerContext) -> str | None:
    """Stands for a verified token or a client certificate: never trust what a caller merely says."""
    return next((str(value) for name, value in context.invocation_metadata() if name == "user"), None)


def serve(folder: Path) -> tuple[grpc.Server, int, Semel]:
    """A server on a free port of this machine."""
    once = Semel(f"sqlite:///{folder / 'semel.db'}")
    interceptor = IdempotencyInterceptor(once=once, principal=user_of, required=True)
    server = grpc.server(ThreadPoolExecutor(16), interceptors=[interceptor])
    orders_grpc.add_OrdersServicer_to_server(Orders(folder / "shop.db"), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port, once


def main() -> None:
    server, port, once = serve(Path(sys.argv[1]))
    with once:
        print(port, flush=True)
        server.wait_for_termination()


if __name__ == "__main__":
    main()
