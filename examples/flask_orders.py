"""A Flask service with the middleware around it: a handler fails, its client retries, and the order is made once."""

from __future__ import annotations

import tempfile
from typing import Any

from flask import Flask, request

from semel import Semel
from semel.http.flask import Idempotency

TOKENS = {"token-of-ann": "ann"}


def service(made: list[dict[str, Any]]) -> Flask:
    app = Flask("shop")
    app.logger.disabled = True  # the failure below is meant
    tries: list[int] = []

    @app.post("/orders")
    def create() -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("the database was away")  # nothing was written: effects="db", the default
        made.append(request.get_json())
        return {"id": len(made)}, 201, {"Location": f"/orders/{len(made)}"}

    return app


def user(incoming: Any) -> str | None:
    return TOKENS.get(incoming.headers.get("Authorization", "").removeprefix("Bearer "))


def main() -> None:
    made: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, Semel(f"sqlite:///{folder}/semel.db") as once:
        app = service(made)
        Idempotency(app, once=once, principal=user, authorize=lambda incoming: user(incoming) is not None)
        client = app.test_client()
        headers = {"Idempotency-Key": "order-1", "Authorization": "Bearer token-of-ann"}
        for _ in range(3):
            answer = client.post("/orders", json={"item": "book"}, headers=headers)
            print(
                answer.status,
                answer.headers.get("Location"),
                "replayed:",
                answer.headers["Idempotency-Replayed"],
            )
        stranger = client.post("/orders", json={"item": "book"}, headers={"Idempotency-Key": "order-1"})
        print("without credentials:", stranger.status)
    print(f"4 requests, {len(made)} order made")


if __name__ == "__main__":
    main()
