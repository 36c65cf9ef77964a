"""One shop behind several frameworks: the same routes, the same counts. A row of the specification is tried on all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from flask import Flask, Response, jsonify, request
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.responses import Response as StarletteResponse
from starlette.routing import Route

from semel import current_run

BINARY = bytes(range(256))
PIECES = (b"one,", b"two,", b"three")


class Ledger:
    """What the handlers did, outside of everything that is tested."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.after: list[str] = []
        self.slow = 0.3
        self.failing = 0

    def did(self, what: str) -> int:
        self.calls.append(what)
        return len(self.calls)

    def count(self, what: str) -> int:
        return self.calls.count(what)


ORDER_HEADERS = {
    "Location": "/orders/1",
    "ETag": '"v1"',
    "Set-Cookie": "session=secret",
    "X-Request-Id": "r-1",
    "Link": "</orders/1>; rel=self",
}


def starlette_shop(ledger: Ledger) -> Any:  # noqa: C901 - a handler each
    async def orders(req: Request) -> StarletteResponse:
        number = ledger.did("orders")
        body = await req.body()
        task = BackgroundTask(ledger.after.append, "mail")
        return JSONResponse({"n": number, "size": len(body)}, 201, headers=ORDER_HEADERS, background=task)

    async def empty(_: Request) -> StarletteResponse:
        ledger.did("empty")
        return StarletteResponse(status_code=204)

    async def binary(_: Request) -> StarletteResponse:
        ledger.did("binary")
        return StarletteResponse(BINARY, media_type="application/octet-stream")

    async def stream(_: Request) -> StarletteResponse:
        ledger.did("stream")

        async def pieces() -> AsyncIterator[bytes]:
            for piece in PIECES:
                await asyncio.sleep(0.005)
                yield piece

        return StreamingResponse(pieces(), media_type="text/csv")

    async def broken(_: Request) -> StarletteResponse:
        ledger.did("broken")

        async def pieces() -> AsyncIterator[bytes]:
            yield b"one,"
            yield b"two,"
            raise RuntimeError("the stream broke")

        return StreamingResponse(pieces())

    async def big(_: Request) -> StarletteResponse:
        ledger.did("big")
        return StarletteResponse(b"x" * 3000, 201, headers={"location": "/big/1"})

    async def status(req: Request) -> StarletteResponse:
        ledger.did("status")
        code = int(req.path_params["code"])
        headers = {"idempotency-control": req.headers["x-control"]} if "x-control" in req.headers else {}
        return PlainTextResponse(f"answer {ledger.count('status')}", code, headers=headers)

    async def fail(_: Request) -> StarletteResponse:
        ledger.did("fail")
        if ledger.count("fail") <= ledger.failing:
            raise RuntimeError("the handler failed")
        return PlainTextResponse("recovered")

    async def slow(_: Request) -> StarletteResponse:
        ledger.did("slow")
        await asyncio.sleep(ledger.slow)
        return PlainTextResponse("slow")

    async def steps(_: Request) -> StarletteResponse:
        ledger.did("steps")

        async def charge() -> str:
            ledger.did("charge")
            return "paid"

        paid: str = await current_run().step("charge", charge)
        if ledger.count("steps") <= ledger.failing:
            raise RuntimeError("after the charge")
        return PlainTextResponse(paid)

    routes: dict[str, Callable[[Request], Any]] = {
        "/orders": orders, "/orders/{id}": orders, "/empty": empty, "/binary": binary, "/stream": stream,
        "/broken": broken, "/big": big, "/status/{code}": status, "/fail": fail, "/slow": slow, "/steps": steps,
    }  # fmt: skip
    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    return Starlette(routes=[Route(path, handler, methods=methods) for path, handler in routes.items()])


def flask_shop(ledger: Ledger) -> Any:  # noqa: C901 - a handler each
    app = Flask("shop")
    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]

    @app.route("/orders", methods=methods)
    @app.route("/orders/<number>", methods=methods)
    def orders(number: str = "") -> Any:
        del number
        count = ledger.did("orders")
        size = len(request.get_data())
        response = jsonify(n=count, size=size)
        response.call_on_close(lambda: ledger.after.append("mail"))
        return response, 201, ORDER_HEADERS

    @app.route("/empty", methods=methods)
    def empty() -> Any:
        ledger.did("empty")
        return Response(status=204)

    @app.route("/binary", methods=methods)
    def binary() -> Any:
        ledger.did("binary")
        return Response(BINARY, mimetype="application/octet-stream")

    @app.route("/stream", methods=methods)
    def stream() -> Any:
        ledger.did("stream")
        return Response(iter(PIECES), mimetype="text/csv")

    @app.route("/broken", methods=methods)
    def broken() -> Any:
        ledger.did("broken")

        def pieces() -> Iterator[bytes]:
            yield b"one,"
            yield b"two,"
            raise RuntimeError("the stream broke")

        return Response(pieces())

    @app.route("/big", methods=methods)
    def big() -> Any:
        ledger.did("big")
        return Response(b"x" * 3000, 201, {"Location": "/big/1"})

    @app.route("/status/<int:code>", methods=methods)
    def status(code: int) -> Any:
        ledger.did("status")
        control = request.headers.get("x-control")
        headers = {"Idempotency-Control": control} if control else {}
        return Response(f"answer {ledger.count('status')}", code, headers)

    @app.route("/fail", methods=methods)
    def fail() -> Any:
        ledger.did("fail")
        if ledger.count("fail") <= ledger.failing:
            raise RuntimeError("the handler failed")
        return "recovered"

    @app.route("/slow", methods=methods)
    def slow() -> Any:
        ledger.did("slow")
        time.sleep(ledger.slow)
        return "slow"

    @app.route("/steps", methods=methods)
    def steps() -> Any:
        ledger.did("steps")

        def charge() -> str:
            ledger.did("charge")
            return "paid"

        paid = current_run().step("charge", charge)
        if ledger.count("steps") <= ledger.failing:
            raise RuntimeError("after the charge")
        return paid

    return app
