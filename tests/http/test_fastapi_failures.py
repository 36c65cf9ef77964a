"""A decorated function that raises, where failures are kept: what was sent first is what every repetition gets (H11, H15)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel

from semel import AsyncSemel
from semel.http.fastapi import idempotent

KINDS: tuple[dict[str, Any], ...] = ({"profile": "stripe-v1"}, {"effects": "opaque"})


async def _never(_: Request, error: Exception) -> Response:
    raise RuntimeError("the handler fails too") from error


class Shop:
    """An application whose one route always raises."""

    def __init__(self, **options: Any) -> None:
        self.ran = self.asked = 0
        self.once = AsyncSemel("memory://")
        self.app = FastAPI()
        self.options = options

    def fail(self, **route: Any) -> None:
        @self.app.post("/pay", **route)
        @idempotent(once=self.once, principal=lambda _: "ada", **self.options)
        async def pay() -> None:
            self.ran += 1
            raise ValueError(f"attempt {self.ran}")

    async def answer(self, request: Request, error: Exception) -> Response:
        self.asked += 1
        return JSONResponse({"error": str(error), "number": self.asked}, 500, {"content-language": "en"})

    def post(self, times: int = 2, app: Any = None, path: str = "/pay") -> list[httpx.Response]:
        async def run() -> list[httpx.Response]:
            transport = httpx.ASGITransport(app or self.app, raise_app_exceptions=False)
            async with self.once, httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                return [await client.post(path, headers={"Idempotency-Key": "k"}) for _ in range(times)]

        return asyncio.run(run())


def same(first: httpx.Response, again: httpx.Response) -> bool:
    return (first.status_code, first.content, first.headers["content-type"]) == (
        again.status_code,
        again.content,
        again.headers["content-type"],
    )


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("name", [500, Exception])
def test_h11_the_applications_own_500_is_replayed(options: dict[str, Any], name: Any) -> None:
    shop = Shop(**options)
    shop.app.add_exception_handler(name, shop.answer)
    shop.fail()
    first, again = shop.post()
    assert first.json() == {"error": "attempt 1", "number": 1}
    assert same(first, again)
    assert again.headers["content-language"] == "en"
    marker = "idempotent-replayed" if "profile" in options else "idempotency-replayed"
    assert [answer.headers[marker] for answer in (first, again)] == ["false", "true"]
    assert (shop.ran, shop.asked) == (1, 1)


@pytest.mark.parametrize("options", KINDS)
def test_h15_without_a_handler_the_problem_is_sent_and_replayed(options: dict[str, Any]) -> None:
    shop = Shop(**options)
    shop.fail()
    first, again = shop.post()
    assert (same(first, again), first.status_code, shop.ran) == (True, 500, 1)
    assert first.headers["content-type"] == "application/problem+json"
    assert (first.json()["type"], first.json()["retryable"]) == ("urn:semel:problem:handler-failed", False)


def test_a_route_without_a_key_is_answered_as_before() -> None:
    shop = Shop(effects="opaque")
    shop.fail()

    @shop.app.post("/other")
    async def other() -> None:
        raise LookupError

    shop.post(1)  # from now on our handler stands in
    [plain] = shop.post(1, path="/other")
    assert (plain.status_code, plain.text) == (500, "Internal Server Error")


def test_h11_a_plain_function_may_be_the_handler() -> None:
    shop = Shop(profile="stripe-v1")
    shop.app.add_exception_handler(500, lambda _, error: PlainTextResponse(f"sorry: {error}", 500))
    shop.fail()
    first, again = shop.post()
    assert (same(first, again), first.text, shop.ran) == (True, "sorry: attempt 1", 1)


def test_h11_an_error_that_a_dependency_swallows_is_answered_alike() -> None:
    async def careless() -> AsyncIterator[None]:
        with suppress(ValueError):
            yield

    shop = Shop(profile="stripe-v1")
    shop.app.add_exception_handler(500, shop.answer)
    shop.fail(dependencies=[Depends(careless)])
    first, again = shop.post()
    assert (same(first, again), first.status_code, shop.ran, shop.asked) == (True, 500, 1, 1)


def test_h11_a_mounted_application_answers_for_itself() -> None:
    outer, shop = FastAPI(), Shop(profile="stripe-v1")
    outer.add_exception_handler(500, lambda *_: PlainTextResponse("not I", 500))
    outer.mount("/shop", shop.app)
    shop.app.add_exception_handler(500, shop.answer)
    shop.fail()
    first, again = shop.post(app=outer, path="/shop/pay")
    assert first.json()["number"] == 1
    assert (same(first, again), shop.ran) == (True, 1)


def test_h15_a_handler_that_fails_too_does_not_have_the_function_run_again() -> None:
    shop = Shop(profile="stripe-v1")
    shop.app.add_exception_handler(500, _never)
    shop.fail()
    first, again = shop.post()
    assert (first.status_code, again.status_code, shop.ran) == (500, 500, 1)


def test_h15_where_failures_are_not_kept_the_handler_is_asked_each_time() -> None:
    shop = Shop()
    shop.app.add_exception_handler(500, shop.answer)
    shop.fail()
    answers = shop.post()
    assert [answer.json()["number"] for answer in answers] == [1, 2]
    assert shop.ran == 2


class Receipt(BaseModel):
    number: int


def _unfit(shop: Shop, result: Any, **route: Any) -> None:
    @shop.app.post("/pay", **route)
    @idempotent(once=shop.once, principal=lambda _: "ada", **shop.options)
    async def pay() -> Any:
        shop.ran += 1
        return result


@pytest.mark.parametrize("effects", ["db", "steps", "opaque"])
@pytest.mark.parametrize(("result", "route"), [({"n": 1}, {"response_model": Receipt}), (object(), {})])
def test_h15_a_function_that_has_returned_is_not_run_again(
    effects: str, result: Any, route: dict[str, Any]
) -> None:
    shop = Shop(effects=effects)
    shop.app.add_exception_handler(500, shop.answer)
    _unfit(shop, result, **route)
    first, again = shop.post()
    assert (first.status_code, first.json()["number"]) == (500, 1), "the application answers for it"
    assert (again.status_code, again.json()["type"]) == (422, "urn:semel:problem:response-not-stored")
    assert (again.json()["outcome"], shop.ran) == ("done", 1)


@pytest.mark.parametrize("scope", ["function", "request"])
def test_h15_dependencies_commit_what_a_function_did_that_has_returned(scope: Any) -> None:
    ended: list[str] = []

    async def session() -> AsyncIterator[None]:
        try:
            yield
        except Exception:
            ended.append("rollback")
            raise
        ended.append("commit")

    shop = Shop()
    _unfit(shop, {"n": 1}, response_model=Receipt, dependencies=[Depends(session, scope=scope)])
    first, again = shop.post()
    assert (first.status_code, again.status_code, shop.ran) == (500, 422, 1)
    assert ended[0] == "commit", "the record says that it was done"


def test_h15_a_commit_that_fails_after_such_a_function_frees_the_key() -> None:
    async def session() -> AsyncIterator[None]:
        yield
        raise ConnectionError("the commit failed")

    shop = Shop()
    _unfit(shop, {"n": 1}, response_model=Receipt, dependencies=[Depends(session, scope="function")])
    first, again = shop.post()
    assert (first.status_code, again.status_code, shop.ran) == (500, 500, 2)


class Enveloped(APIRoute):
    """A route class that makes a response of its own out of every other one."""

    def get_route_handler(self) -> Any:
        handler = super().get_route_handler()

        async def enveloped(request: Request) -> Response:
            response = await handler(request)
            return JSONResponse({"data": bytes(response.body).decode()}, response.status_code)

        return enveloped


def _stored(status: int) -> bool:
    raise ArithmeticError(status)


@pytest.mark.parametrize(
    ("status", "headers", "options", "runs"),
    [
        (503, {}, {}, 2),
        (429, {}, {}, 2),
        (503, {"idempotency-control": "store"}, {}, 1),
        (503, {}, {"effects": "opaque"}, 1),
        (503, {}, {"stored": _stored}, 1),
        (200, {}, {}, 1),
    ],
)
def test_h14_h15_a_response_that_was_replaced_means_for_its_key_what_it_said(
    status: int, headers: dict[str, str], options: dict[str, Any], runs: int
) -> None:
    shop = Shop(**options)
    shop.app.router.route_class = Enveloped

    @shop.app.post("/pay")
    @idempotent(once=shop.once, principal=lambda _: "ada", **options)
    async def pay() -> Response:
        shop.ran += 1
        return PlainTextResponse("no", status, headers)

    first, again = shop.post()
    assert first.status_code == status
    assert (again.status_code, shop.ran) == (status if runs == 2 else 422, runs)
