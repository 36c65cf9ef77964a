"""A client that is killed after its request was carried out, and finishes the action in its next life, under the same key."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

from semel.http.client import IdempotentTransport, delivered


class Shop(BaseHTTPRequestHandler):
    """Stands for a payment service that honours keys. Its first customer dies while it waits for the reply."""

    books: dict[str, str] = {}  # noqa: RUF012 - one shop
    requests = 0
    first_customer = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        key = self.headers["Idempotency-Key"]
        replayed = "true" if key in Shop.books else "false"
        reply = Shop.books.setdefault(key, f"charge {len(Shop.books) + 1}").encode()
        Shop.requests += 1
        if Shop.requests == 1:
            os.kill(Shop.first_customer, signal.SIGKILL)
            self.close_connection = True
            return
        self.send_response(201)
        self.send_header("Idempotency-Replayed", replayed)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None: ...


def customer(url: str, store: str) -> None:
    """The program: it knows what it wants to do, not whether it has tried before."""
    with httpx.Client(transport=IdempotentTransport(keys=store)) as client:
        response = client.post(url, json={"cents": 500}, extensions={"semel": {"action": "charge order 7"}})
    how = delivered(response)
    print(f"{response.text}, replayed={how is not None and how.replayed}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, ThreadingHTTPServer(("127.0.0.1", 0), Shop) as server:
        url, store = f"http://127.0.0.1:{server.server_port}/", f"sqlite:///{Path(folder) / 'keys.db'}"
        process = multiprocessing.get_context("fork").Process(target=customer, args=(url, store))
        process.start()
        Shop.first_customer = process.pid or 0
        threading.Thread(target=server.serve_forever, daemon=True).start()
        process.join()
        print(f"the first customer ended with {signal.Signals(-(process.exitcode or 0)).name}")
        customer(url, store)
        server.shutdown()
    print(
        f"killed once, sent {['never', 'once', 'twice'][Shop.requests]}, {len(Shop.books)} charge on the server's books"
    )


if __name__ == "__main__":
    main()
