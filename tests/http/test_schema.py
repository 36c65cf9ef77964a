"""An application attacked by its own OpenAPI document: what it answers is what it promises, and never a 5xx (H42)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
import schemathesis
from fastapi import Depends, FastAPI, Header, HTTPException
from hypothesis import HealthCheck, settings
from pydantic import BaseModel, Field
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from semel import AsyncSemel
from semel.http.fastapi import idempotent, install

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
effects: dict[tuple[str, str], int] = {}
once = AsyncSemel("memory://")
app = FastAPI()


class Order(BaseModel):
    item: str = Field(min_length=1, max_length=20)
    amount: int = Field(ge=1, le=1000)
    tags: list[str] = []


class Made(BaseModel):
    item: str
    price: int


# FastAPI answers a body that is no text by itself, and does not say so in its document.
UNREADABLE: dict[int | str, dict[str, Any]] = {
    400: {"description": "The body cannot be read", "model": dict[str, str]}
}


async def current_user(x_user: Annotated[str, Header(pattern="^[a-z]+$")]) -> str:
    return x_user


User = Annotated[str, Depends(current_user)]


def did(user: str, key: str | None) -> None:
    if key is not None:
        effects[user, key] = effects.get((user, key), 0) + 1


@app.post(
    "/orders",
    status_code=201,
    responses={**UNREADABLE, 404: {"description": "No such item", "model": dict[str, str]}},
)
@idempotent(once=once, principal="user")
async def create(
    order: Order, user: User, idempotency_key: Annotated[str | None, Header(include_in_schema=False)] = None
) -> Made:
    did(user, idempotency_key)
    if order.amount == 404:
        raise HTTPException(404, "no such item")
    return Made(item=order.item, price=order.amount * 3)


@app.patch("/orders/{number}", responses=UNREADABLE)
@idempotent(once=once, principal="user", required=True, retention=60)
def change(
    number: int,
    order: Order,
    user: User,
    idempotency_key: Annotated[str | None, Header(include_in_schema=False)] = None,
) -> Made:
    did(user, idempotency_key)
    return Made(item=order.item, price=number)


@app.delete("/orders/{number}", status_code=204)
@idempotent(once=once, principal="user", wait=0)
async def remove(number: int, user: User) -> None:
    return None


install(app)
schema = schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.fixture(scope="module", autouse=True)
def _closing() -> Iterator[None]:
    yield
    asyncio.run(once.aclose())


@schema.parametrize()
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_h42_the_document_is_kept(case: Any) -> None:
    response = case.call()
    case.validate_response(response, checks=CHECKS)
    assert all(count == 1 for count in effects.values()), "two effects for one key"
