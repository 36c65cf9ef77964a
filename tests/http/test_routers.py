"""What a router says by itself uses no key up (H13); what a handler says is its outcome, whatever the status (H14)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from flask import Blueprint, Flask
from litestar import Litestar
from litestar import post as litestar_post
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Match, Mount, Route, Router
from werkzeug.exceptions import HTTPException

from semel import AsyncSemel, Semel
from semel.http.fastapi import idempotent
from semel.http.flask import Idempotency
from tests.http.conftest import Edge
from tests.http.test_corners import ask, marks

OWN = [307, 308, 404, 405]


class Says:
    """An ASGI application that has its effect, and says so with one status."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.runs = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.runs += 1
        await PlainTextResponse(f"run {self.runs}", self.status)(scope, receive, send)

    async def endpoint(self, request: Request) -> PlainTextResponse:
        self.runs += 1
        return PlainTextResponse(f"run {self.runs}", self.status)


class Anything(BaseRoute):
    """A route of one's own, which puts no endpoint into the scope."""

    def __init__(self, says: Says) -> None:
        self.says = says

    def matches(self, scope: Any) -> tuple[Match, Any]:
        return Match.FULL, {}

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        await self.says(scope, receive, send)


class Copies:
    """A middleware that shows the application another scope than its own."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(dict(scope), receive, send)


class Foreign(Says):
    """An application of another framework, which has `routes` too."""

    routes = ()


def _sub(says: Says) -> Any:
    inner = Starlette(
        routes=[Route("/pay", says.endpoint, methods=["POST"])], middleware=[Middleware(Copies)]
    )
    return Starlette(routes=[Mount("/sub", app=inner)])


def _sub_router(says: Says) -> Any:
    pay = Route("/pay", says.endpoint, methods=["POST"])
    return Starlette(routes=[Mount("/sub", app=Router([pay], middleware=[Middleware(Copies)]))])


MADE: dict[str, Callable[[Says], Any]] = {
    "route": lambda says: Starlette(routes=[Route("/sub/pay", says.endpoint, methods=["POST"])]),
    "mount": lambda says: Starlette(routes=[Mount("/sub", routes=[Route("/pay", says.endpoint, methods=["POST"])])]),
    "default": lambda says: Router(default=says),
    "a route of one's own": lambda says: Starlette(routes=[Anything(says)]),
    "a route of one's own in a mount": lambda says: Starlette(routes=[Mount("/sub", routes=[Anything(says)])]),
    "a sub-application behind a copy of the scope": _sub,
    "a router behind a copy of the scope": _sub_router,
    "a foreign sub-application": lambda says: Starlette(routes=[Mount("/sub", app=Foreign(says.status))]),
    "plain": lambda says: says,
}  # fmt: skip


@pytest.mark.parametrize("status", [201, *OWN])
@pytest.mark.parametrize("name", MADE)
def test_h14_what_has_run_is_stored_wherever_its_router_found_it(name: str, status: int) -> None:
    edge = Edge("async", "memory://").open(app=MADE[name](Says(status)))
    first, again = (edge.send("/sub/pay", follow_redirects=False) for _ in "ab")
    assert (first.status_code, again.status_code, again.text) == (status, status, first.text)
    assert marks([first, again]) == ["false", "true"]
    edge.close()


@pytest.mark.parametrize("status", OWN)
def test_h14_a_decorated_function_that_answers_like_a_router_has_run(status: int) -> None:
    app, says = FastAPI(), Says(status)
    guard = idempotent(once=AsyncSemel("memory://"), principal=lambda _: "ada")
    app.post("/")(guard(lambda: PlainTextResponse(f"run {says.runs}", says.status)))
    answers = ask(app, {"follow_redirects": False}, {"follow_redirects": False})
    assert marks(answers) == ["false", "true"]
    assert answers[1].status_code == status


def _fastapi() -> Any:
    app, router = FastAPI(), APIRouter()
    app.put("/pay")(lambda: "paid")
    app.post("/slash/")(lambda: "paid")
    router.put("/routed")(lambda: "paid")
    app.include_router(router, prefix="/in")
    return app


def _starlette() -> Any:
    async def pay(request: Request) -> PlainTextResponse:
        return PlainTextResponse("paid")

    inside = [Route("/routed", pay, methods=["PUT"])]
    return Starlette(
        routes=[
            Route("/pay", pay, methods=["PUT"]),
            Route("/slash/", pay, methods=["POST"]),
            Mount("/in", routes=inside),
        ]
    )


@pytest.mark.parametrize("made", [_starlette, _fastapi])
@pytest.mark.parametrize(
    ("path", "status"), [("/pay", 405), ("/in/routed", 405), ("/slash", 307), ("/no", 404), ("/in/no", 404)]
)
def test_h13_what_starlettes_router_says_uses_no_key_up(made: Any, path: str, status: int) -> None:
    edge = Edge("async", "memory://").open(app=made())
    answers = [edge.send(path, follow_redirects=False) for _ in "ab"]
    assert [answer.status_code for answer in answers] == [status] * 2
    assert marks(answers) == ["false", "false"]
    assert "idempotency-retention" not in answers[0].headers
    edge.close()


@pytest.mark.parametrize(("path", "status"), [("/no", 404), ("/pay", 405)])
def test_h13_what_litestars_router_says_uses_no_key_up(path: str, status: int) -> None:
    from litestar import put

    pay, made = put("/pay", sync_to_thread=False)(_paid), litestar_post("/made", sync_to_thread=False)(_paid)
    edge = Edge("async", "memory://").open(app=Litestar([pay, made]))
    answers = [edge.send(path) for _ in "ab"]
    assert [answer.status_code for answer in answers] == [status] * 2
    assert marks(answers) == ["false", "false"]
    assert marks([edge.send("/made") for _ in "ab"]) == ["false", "true"], "the key is free"
    edge.close()


@pytest.mark.parametrize("name", ["POST /pay", "/pay/"])
def test_a_slash_at_the_end_leads_around_no_guard(name: str) -> None:
    """Litestar runs both as one route: requests with the other spelling had no guard, though their key is required."""
    runs: list[int] = []

    def pay() -> str:
        runs.append(1)
        return "paid"

    edge = Edge("async", "memory://").open(
        app=Litestar([litestar_post("/pay", sync_to_thread=False)(pay)]), routes={name: {"required": True}}
    )
    for number, path in enumerate(("/pay", "/pay/", "/pay//")):
        assert edge.send(path, None).status_code == 400
        assert marks([edge.send(path, f"key-{number}") for _ in "ab"]) == ["false", "true"]
    assert len(runs) == 3
    edge.close()


def test_what_is_said_of_a_route_with_a_slash_counts_before_the_one_without() -> None:
    app = Litestar([litestar_post("/pay/{id:str}", sync_to_thread=False)(_paid)])
    edge = Edge("async", "memory://").open(app=app, routes={"/pay/{id}": {}, "/pay/{id}/": False})
    assert marks([edge.send("/pay/7") for _ in "ab"]) == ["false", "true"]
    assert marks([edge.send("/pay/7/") for _ in "ab"]) == [None, None]
    edge.close()


def _paid() -> str:
    return "paid"


@pytest.mark.parametrize(("path", "status"), [("/no", 404), ("/put", 405), ("/slash", 308)])
def test_h13_what_flasks_router_says_uses_no_key_up(path: str, status: int) -> None:
    app = Flask("routes")
    app.add_url_rule("/put", "put", _paid, methods=["PUT"])
    app.add_url_rule("/slash/", "slash", _paid, methods=["POST"])
    app.add_url_rule("/", "own", lambda: ("run", 404), methods=["POST"])
    with Semel("memory://") as once:
        Idempotency(app, once=once, principal=lambda _: "ada", authenticated_outside=True)
        answers = ask(app, *[{"url": path, "follow_redirects": False}] * 2)
        assert [answer.status_code for answer in answers] == [status] * 2
        assert marks(answers) == ["false", "false"]
        assert marks(ask(app, {}, {})) == ["false", "true"], "H14: a view's own 404"


class Own(Flask):
    """An application that may do anything where it finds no route."""


def _before(app: Flask, seen: Callable[..., Any]) -> None:
    app.before_request(seen)


def _before_in_a_blueprint(app: Flask, seen: Callable[..., Any]) -> None:
    blueprint = Blueprint("shop", "shop")
    blueprint.before_app_request(seen)
    app.register_blueprint(blueprint)


def _by_status(app: Flask, seen: Callable[..., Any]) -> None:
    app.register_error_handler(404, seen)


def _by_class(app: Flask, seen: Callable[..., Any]) -> None:
    app.register_error_handler(HTTPException, seen)


def _after(app: Flask, seen: Callable[..., Any]) -> None:
    app.after_request(lambda response: app.make_response(seen(response)))


@pytest.mark.parametrize("added", [_before, _before_in_a_blueprint, _by_status, _by_class, _after])
def test_h14_what_flask_runs_without_a_route_is_not_run_again(added: Any) -> None:
    calls: list[str] = []
    app = Flask("legacy")

    def seen(*_: Any) -> Any:
        calls.append("run")
        return "moved", 404

    added(app, seen)
    with Semel("memory://") as once:
        Idempotency(app, once=once, principal=lambda _: "ada", authenticated_outside=True)
        answers = ask(app, *[{"url": "/old"}] * 2)
    assert [answer.status_code for answer in answers] == [404, 404]
    assert (marks(answers), calls) == (["false", "true"], ["run"])


def test_h14_a_flask_of_ones_own_answers_as_a_handler() -> None:
    app = Own("own")
    with Semel("memory://") as once:
        Idempotency(app, once=once, principal=lambda _: "ada", authenticated_outside=True)
        assert marks(ask(app, {}, {})) == ["false", "true"]
