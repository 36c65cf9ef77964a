"""A FastAPI service whose POST is safe to retry: five clients send the same order at once, and again; one order is made."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Annotated

import httpx
from fastapi import Depends, FastAPI, Header, HTTPException
from pydantic import BaseModel

from semel import AsyncSemel
from semel.http.fastapi import idempotent, install

TOKENS = {"token-of-ann": "ann", "token-of-bob": "bob"}


class Order(BaseModel):
    item: str
    count: int


class Made(BaseModel):
    id: int
    item: str


async def user(authorization: Annotated[str, Header()]) -> str:
    try:
        return TOKENS[authorization.removeprefix("Bearer ")]
    except KeyError:
        raise HTTPException(401) from None


def service(once: AsyncSemel, made: list[Order]) -> FastAPI:
    app = FastAPI()

    @app.post("/orders", status_code=201)
    @idempotent(once=once, principal="buyer", required=True)
    async def create(order: Order, buyer: Annotated[str, Depends(user)]) -> Made:
        await asyncio.sleep(0.05)  # long enough for the others to come
        made.append(order)
        print(f"{buyer} orders {order.count} x {order.item}")
        return Made(id=len(made), item=order.item)

    install(app)
    return app


async def main() -> None:
    made: list[Order] = []
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncSemel(f"sqlite:///{folder}/semel.db") as once:
            transport = httpx.ASGITransport(service(once, made))
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:

                async def send(token: str, **order: object) -> httpx.Response:
                    headers = {"Idempotency-Key": "order-1", "Authorization": f"Bearer {token}"}
                    return await client.post("/orders", json=order, headers=headers)

                answers = await asyncio.gather(
                    *(send("token-of-ann", item="book", count=2) for _ in range(5))
                )
                again = await send("token-of-ann", item="book", count=2)
                print("five at once:", sorted(answer.headers["idempotency-replayed"] for answer in answers))
                print("all the same:", len({answer.content for answer in (*answers, again)}) == 1)
                print(
                    "bob has a key of the same name:",
                    (await send("token-of-bob", item="pen", count=1)).json(),
                )
                other = await send("token-of-ann", item="book", count=3)
                print("another order under the key:", other.status_code, other.json()["title"])
    print(f"8 requests, {len(made)} orders made")


if __name__ == "__main__":
    asyncio.run(main())
