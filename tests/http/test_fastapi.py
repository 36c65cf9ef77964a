"""The decorator in FastAPI's corners: models, statuses, dependencies, errors, tasks, streams, files, OpenAPI (H13, H33, H42, R33)."""

from __future__ import annotations

import asyncio
import functools
import gzip
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field

from semel import AsyncSemel, ConfigurationError, InProgress, current_run
from semel.http.fastapi import idempotent, install

once = AsyncSemel("memory://")
calls: list[str] = []


class User(BaseModel):
    id: str


class Order(BaseModel):
    item: str = Field(min_length=1)
    amount: int = 1


class Made(BaseModel):
    number: int
    note: str | None = None


class OutOfStock(Exception):
    def __init__(self, item: str) -> None:
        self.item = item


async def current_user(x_user: Annotated[str | None, Header()] = None) -> User:
    calls.append("auth")
    if x_user is None:
        raise HTTPException(401, "who are you?")
    if x_user == "banned":
        raise HTTPException(403, "no")
    return User(id=x_user)


Someone = Annotated[User, Depends(current_user)]
guarded = idempotent(once=once, principal="user.id")


async def people_of(user: Someone) -> list[User]:
    return [user]


async def shop_of(x_shop: Annotated[str, Header()]) -> dict[str, str]:
    return {} if x_shop == "none" else {"name": x_shop}


People = Annotated[list[User], Depends(people_of)]
Shop = Annotated[dict[str, str], Depends(shop_of)]


class Unit:
    """What a session does: commits at the end, unless there was an error."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def __call__(self) -> AsyncIterator[Unit]:
        try:
            yield self
        except BaseException as error:
            self.ended.append(f"rollback {type(error).__name__}")
            raise
        self.ended.append("commit")


unit = Unit()
failures: list[bool] = []


async def failing_session() -> AsyncIterator[None]:
    yield
    if failures.pop(0):
        raise RuntimeError("serialization failure")


Ended = Annotated[Unit, Depends(unit, scope="function")]
EndedLate = Annotated[Unit, Depends(unit)]
Failing = Annotated[None, Depends(failing_session, scope="function")]


class Client:
    """The app under test, called in a loop of its own."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.app = FastAPI()
        self.runner = runner
        self.key = uuid.uuid4().hex

    def post(
        self, path: str, *, key: str | None = "", user: str | None = "ada", **given: Any
    ) -> httpx.Response:
        headers = {
            "Idempotency-Key": self.key if key == "" else key,
            "X-User": user,
            **given.pop("headers", {}),
        }
        return self.runner.run(self._post(path, {n: v for n, v in headers.items() if v is not None}, given))

    async def _post(self, path: str, headers: dict[str, Any], given: dict[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return await client.post(path, headers=headers, **given)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made
        made.run(once.aclose())


@pytest.fixture
def client(runner: asyncio.Runner) -> Client:
    calls.clear()
    return Client(runner)


def twice(client: Client, path: str, **given: Any) -> tuple[httpx.Response, httpx.Response]:
    """The same request again gives the same answer, and says so."""
    first, again = client.post(path, **given), client.post(path, **given)
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert (first.headers["idempotency-replayed"], again.headers["idempotency-replayed"]) == ("false", "true")
    assert again.headers.get("content-type") == first.headers.get("content-type")
    return first, again


def test_model_status_and_response_parameter(client: Client) -> None:
    @client.app.post("/orders", status_code=201, response_model_exclude_none=True)
    @guarded
    async def create(order: Order, response: Response, user: Someone) -> Made:
        calls.append("run")
        response.headers["x-number"] = "7"
        response.headers["location"] = "/orders/7"
        response.set_cookie("seen", "1")
        return Made(number=7)

    first, again = twice(client, "/orders", json={"item": "tea"})
    assert (first.status_code, first.json()) == (201, {"number": 7})
    assert (first.headers["x-number"], first.headers["location"], again.headers["location"]) == (
        "7",
        "/orders/7",
        "/orders/7",
    )
    assert ("set-cookie" in first.headers, "set-cookie" in again.headers) == (True, False)
    assert calls.count("run") == 1


def test_the_answer_is_what_fastapi_makes_of_it(client: Client) -> None:
    """Byte for byte what the undecorated function gives, for every way to say it."""

    async def model(response: Response) -> Made:
        response.status_code = 202
        return Made(number=1)

    def plain() -> dict[str, Any]:
        return {"number": 1, "secret": "x", "note": "é"}

    async def none() -> None:
        return None

    async def own() -> Response:
        return JSONResponse({"a": 1}, 203, headers={"x-a": "b"})

    async def listed() -> list[Made]:
        return [Made(number=1), Made(number=2, note="n")]

    async def redirect() -> str:
        return "/elsewhere"

    given: list[tuple[Any, dict[str, Any]]] = [
        (model, {}), (plain, {"response_model": Made}), (plain, {"response_class": JSONResponse, "status_code": 207}),
        (none, {"status_code": 204}), (none, {}), (own, {}), (listed, {"response_model_exclude_unset": True}),
        (redirect, {"response_class": RedirectResponse}), (redirect, {"response_class": RedirectResponse, "status_code": 303}),
    ]  # fmt: skip
    guard = idempotent(once=once, principal=lambda request: request.headers["x-user"])
    for number, (fn, options) in enumerate(given):
        client.app.post(f"/bare/{number}", **options)(fn)
        client.app.post(f"/once/{number}", **options)(guard(fn))
        bare = client.post(f"/bare/{number}")
        client.key = uuid.uuid4().hex
        first, _ = twice(client, f"/once/{number}")
        assert (first.status_code, first.content) == (bare.status_code, bare.content), fn
        mine = {name: value for name, value in first.headers.items() if not name.startswith("idempotency-")}
        assert mine == dict(bare.headers), fn


def test_r33_authentication_and_validation_come_before_the_claim_on_replays_too(client: Client) -> None:
    @client.app.post("/orders", status_code=201)
    @guarded
    async def create(order: Order, user: Someone) -> dict[str, str]:
        calls.append("run")
        return {"of": user.id}

    assert client.post("/orders", user=None, json={"item": "tea"}).status_code == 401
    assert client.post("/orders", user="banned", json={"item": "tea"}).status_code == 403
    invalid = client.post("/orders", json={"item": ""})
    assert (invalid.status_code, invalid.headers["content-type"]) == (422, "application/json")
    assert "idempotency-replayed" not in invalid.headers
    # H13: none of them was stored or kept the key.
    assert client.post("/orders", json={"item": "tea"}).status_code == 201
    assert client.post("/orders", user=None, json={"item": "tea"}).status_code == 401
    assert client.post("/orders", user="bob", json={"item": "tea"}).json() == {"of": "bob"}
    assert client.post("/orders", json={"item": "tea"}).headers["idempotency-replayed"] == "true"
    assert (calls.count("run"), calls.count("auth")) == (2, 7)


def test_overridden_dependencies_are_the_ones_that_count(client: Client) -> None:
    @client.app.post("/orders")
    @guarded
    async def create(user: Someone) -> dict[str, str]:
        return {"of": user.id}

    client.app.dependency_overrides[current_user] = lambda: User(id="test")
    first, _ = twice(client, "/orders", user=None)
    assert first.json() == {"of": "test"}


async def create_or_not(how: str, user: Someone) -> str:
    calls.append(how)
    if how == "refused":
        raise HTTPException(409, "taken")
    if how == "handled":
        raise OutOfStock("tea")
    if how == "broken":
        raise RuntimeError("broken")
    return how


@pytest.mark.parametrize("scope", ["function", "request"])
def test_dependencies_with_yield_end_as_they_would(client: Client, scope: str) -> None:
    client.app.exception_handler(OutOfStock)(sold_out)

    async def create(how: str, user: Someone, db: Ended) -> str:
        return await create_or_not(how, user)

    async def create_late(how: str, user: Someone, db: EndedLate) -> str:
        return await create_or_not(how, user)

    client.app.post("/orders/{how}")(guarded(create if scope == "function" else create_late))
    for how, status, ended in (
        ("fine", 200, "commit"), ("refused", 409, "rollback HTTPException"), ("handled", 410, "rollback OutOfStock"),
    ):  # fmt: skip
        unit.ended.clear()
        client.key = uuid.uuid4().hex
        first, _ = twice(client, f"/orders/{how}")
        assert first.status_code == status
        assert unit.ended == [ended, "commit"]  # the second one belongs to the replay, which made nothing
        assert calls.count(how) == 1
    client.key = uuid.uuid4().hex
    assert [client.post("/orders/broken").status_code for _ in "ab"] == [500, 500]
    assert calls.count("broken") == 2


async def sold_out(request: Request, error: Exception) -> Response:
    calls.append("handler")
    assert isinstance(error, OutOfStock)
    number = calls.count("handler")  # another answer each time it is asked
    return JSONResponse({"sold out": error.item, "number": number}, 410, headers={"x-why": "stock"})


def test_a_failed_commit_is_not_an_outcome(client: Client) -> None:
    """R1: claim, effect, record, send. A session that ends before the response is sent is part of the effect."""
    failures[:] = [True, False]

    @client.app.post("/orders")
    @guarded
    async def create(user: Someone, db: Failing) -> str:
        calls.append("run")
        return "made"

    first, again = client.post("/orders"), client.post("/orders")
    assert (first.status_code, again.status_code, again.json()) == (500, 200, "made")
    assert again.headers["idempotency-replayed"] == "false"
    assert calls.count("run") == 2


def test_errors_are_stored_as_the_application_answers_them(client: Client) -> None:
    client.app.exception_handler(OutOfStock)(sold_out)

    @client.app.exception_handler(418)
    def teapot(request: Request, error: Exception) -> Response:
        return Response("I am a teapot", 418, media_type="text/plain")

    @client.app.post("/{how}")
    @guarded
    async def create(how: str, user: Someone, tasks: BackgroundTasks) -> None:
        calls.append(how)
        tasks.add_task(calls.append, "task")
        if how == "stock":
            raise OutOfStock("tea")
        raise HTTPException(int(how), "why", {"x-why": "because"})

    for how, status, body in (("404", 404, b'{"detail":"why"}'), ("418", 418, b"I am a teapot")):
        client.key = uuid.uuid4().hex
        first, _ = twice(client, f"/{how}")
        assert (first.status_code, first.content, calls.count(how)) == (status, body, 1)
    client.key = uuid.uuid4().hex
    first, _ = twice(client, "/stock")
    assert (first.status_code, first.json()) == (410, {"sold out": "tea", "number": 1})
    assert (first.headers["x-why"], calls.count("handler"), calls.count("task")) == ("stock", 1, 0)
    client.key = uuid.uuid4().hex
    assert [client.post("/403").headers["idempotency-replayed"] for _ in "ab"] == [
        "false",
        "false",
    ]  # H14: not stored
    assert client.post("/404", key=None).json() == {"detail": "why"}


def test_h33_tasks_run_once_after_the_first_response(client: Client) -> None:
    async def audited(tasks: BackgroundTasks) -> None:
        tasks.add_task(calls.append, "audit")

    @client.app.post("/orders", dependencies=[Depends(audited)])
    @guarded
    async def create(user: Someone, tasks: BackgroundTasks) -> str:
        tasks.add_task(calls.append, "mail")
        return "made"

    twice(client, "/orders")
    assert (calls.count("mail"), calls.count("audit")) == (1, 1)


def test_sync_endpoints_run_in_a_thread_and_know_their_run(client: Client) -> None:
    @client.app.post("/orders")
    @guarded
    def create(user: Someone, request: Request) -> dict[str, Any]:
        calls.append("run")
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return {"attempt": current_run().attempt, "path": request.url.path}

    first, _ = twice(client, "/orders")
    assert first.json() == {"attempt": 1, "path": "/orders"}


def test_h19_streams_and_files(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "report.csv"
    file.write_bytes(b"a,b\n" * 50_000)

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(5):
            yield b"%d," % number
        calls.append(f"attempt {current_run().attempt}")

    @client.app.post("/stream")
    @guarded
    async def stream(user: Someone, tasks: BackgroundTasks) -> StreamingResponse:
        calls.append("run")
        tasks.add_task(calls.append, "task")
        return StreamingResponse(pieces(), media_type="text/csv")

    @client.app.post("/file")
    @guarded
    async def report(user: Someone) -> FileResponse:
        calls.append("run")
        return FileResponse(file, filename="report.csv")

    first, _ = twice(client, "/stream")
    assert first.content == b"0,1,2,3,4,"
    assert calls.count("task") == calls.count("attempt 1") == 1
    client.key = uuid.uuid4().hex
    first, again = twice(client, "/file")
    assert again.content == file.read_bytes()
    assert again.headers["content-disposition"] == first.headers["content-disposition"]
    assert calls.count("run") == 2


def test_generators_are_refused_when_they_are_decorated() -> None:
    async def rows() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(ConfigurationError, match="StreamingResponse"):
        guarded(rows)


def test_routers_with_a_prefix_and_h42_openapi(client: Client) -> None:
    router = APIRouter(prefix="/v1", tags=["orders"])

    @router.post("/orders/{number:int}", status_code=201)
    @idempotent(once=once, principal="user.id", required=True, retention=3600)
    async def create(number: int, order: Order, user: Someone) -> Made:
        """Make an order."""
        return Made(number=number)

    @router.get("/orders/{number:int}")
    async def read(number: int) -> Made:
        return Made(number=number)

    client.app.include_router(router, prefix="/api")
    install(client.app)
    first, _ = twice(client, "/api/v1/orders/5", json={"item": "tea"})
    assert first.json() == {"number": 5, "note": None}
    document = client.app.openapi()
    assert document is client.app.openapi()
    operation = document["paths"]["/api/v1/orders/{number}"]["post"]
    header = next(given for given in operation["parameters"] if given["name"] == "Idempotency-Key")
    assert (header["in"], header["required"], header["schema"]["maxLength"]) == ("header", True, 255)
    assert {"400", "409", "422", "503"} <= operation["responses"].keys()
    assert "application/json" in operation["responses"]["422"]["content"]  # FastAPI's own stays
    reference = operation["responses"]["409"]["content"]["application/problem+json"]["schema"]["$ref"]
    assert reference.rpartition("/")[2] in document["components"]["schemas"]
    assert "Idempotency-Replayed" in operation["responses"]["201"]["headers"]
    assert operation["x-idempotency"] == {
        "ttl": 3600,
        "in_flight_max": 16,
        "required": True,
        "scope": "principal",
    }
    assert operation["description"] == "Make an order."
    names = [given["name"] for given in operation["parameters"]]
    assert not any("semel" in name for name in names)
    assert "x-idempotency" not in document["paths"]["/api/v1/orders/{number}"]["get"]


def test_h42_a_key_that_the_function_asks_for_too_is_told_once(client: Client) -> None:
    @client.app.post("/orders")
    @idempotent(once=once, principal="user.id", required=True)
    async def create(
        user: Someone, idempotency_key: Annotated[str | None, Header(description="The till's own.")] = None
    ) -> str | None:
        return idempotency_key

    install(client.app)
    told = client.app.openapi()["paths"]["/orders"]["post"]["parameters"]
    (key,) = [one for one in told if one["name"].lower() == "idempotency-key"]
    assert (key["description"], key["required"]) == ("The till's own.", True)
    assert key["schema"]["maxLength"] == 255


def test_h42_a_route_that_keeps_failures_says_so(client: Client) -> None:
    for path, options in {"/plain": {}, "/kept": {"effects": "opaque", "max_waiters": 3}}.items():

        @client.app.post(path)
        @idempotent(once=AsyncSemel("memory://"), principal=lambda _: "ada", **options)  # type: ignore[arg-type]  # options by their names
        async def act() -> None: ...

    install(client.app)
    plain, kept = (client.app.openapi()["paths"][path]["post"] for path in ("/plain", "/kept"))
    assert "500" not in plain["responses"]
    assert "handler-failed" in kept["responses"]["500"]["description"]
    assert kept["x-idempotency"]["in_flight_max"] == 3


def test_a_principal_path_that_begins_with_no_parameter_is_refused_when_decorating() -> None:
    with pytest.raises(ConfigurationError, match="has no such parameter: it has user"):

        @idempotent(once=once, principal="usr.id")
        async def act(user: str = "") -> None: ...


def test_h07_a_principal_path_that_leads_nowhere_is_nobody_who_is_known(client: Client) -> None:
    ran: list[str] = []

    @client.app.post("/act")
    @idempotent(once=once, principal="user.id.part")
    async def act(user: str = "ada") -> None:
        ran.append(user)

    install(client.app)
    answer = client.post("/act")
    assert (answer.status_code, ran) == (401, [])
    assert answer.json()["type"] == "urn:semel:problem:not-authenticated"


def test_h07_a_tenant_may_be_a_path_too(client: Client) -> None:
    ran: list[str] = []

    @client.app.post("/act")
    @idempotent(once=once, principal="people[0].id", tenant="shop.name")
    async def act(people: People, shop: Shop) -> int:
        ran.append(shop.get("name", ""))
        return len(ran)

    install(client.app)
    answers = [client.post("/act", headers={"X-Shop": name}) for name in ("a", "b", "a")]
    assert [answer.json() for answer in answers] == [1, 2, 1]
    assert [client.post("/act", headers={"X-Shop": name}).status_code for name in ("", "none")] == [401, 401]
    assert client.post("/act", key=None, headers={"X-Shop": "none"}).json() == 3, "it has no key: nobody asks"
    with pytest.raises(ConfigurationError, match="tenant='shop' begins with 'shop'"):

        @idempotent(once=once, principal="user", tenant="shop")
        async def other(user: str = "") -> None: ...


def swapped(app: FastAPI) -> Any:
    @idempotent(once=once, principal="user.id")
    @app.post("/act")
    async def act(user: Someone) -> None: ...

    return act


def test_decorators_in_the_wrong_order_are_refused(client: Client) -> None:
    act = swapped(client.app)
    with pytest.raises(ConfigurationError, match="act is registered without its guard"):
        install(client.app)
    client.app.post("/guarded")(act)
    install(client.app)  # both forms are registered, which is meant so


def test_decorators_in_the_wrong_order_are_refused_when_the_app_starts(client: Client) -> None:
    install(client.app)
    router = APIRouter()
    act = swapped(router)  # type: ignore[arg-type]  # wrong on purpose
    client.app.include_router(router)
    transport = httpx.ASGITransport(client.app)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as asking:
            await asking.post("/act")

    for _ in range(2):
        with pytest.raises(ConfigurationError, match="put it below"):
            client.runner.run(ask())
    assert act


def logged(fn: Any) -> Any:
    """A plain function around a coroutine function, as many decorators are: FastAPI awaits what it returns."""

    @functools.wraps(fn)
    def wrapper(**given: Any) -> Any:
        return fn(**given)

    return wrapper


class Create:
    async def __call__(self) -> str:
        calls.append("run")
        return "made"


@pytest.mark.parametrize("create", [logged(Create().__call__), Create()], ids=["wrapped", "object"])
def test_h11_whatever_fastapi_awaits_is_awaited(client: Client, create: Any) -> None:
    """Else it is recorded as done, and has never run."""
    client.app.post("/orders")(idempotent(once=once, principal=lambda request: "ada")(create))
    answers = [client.post("/orders", key=key) for key in ("", "", None)]
    assert [(answer.status_code, answer.json()) for answer in answers] == [(200, "made")] * 3
    assert calls.count("run") == 2, "once for the key, once without"


def test_annotations_behind_a_wrapper_of_another_module_are_read(client: Client) -> None:
    """As text, which they are here, they mean something in the function's own module only."""

    async def create(order: Order, user: Someone) -> str:
        return order.item

    elsewhere: dict[str, Any] = {"functools": functools}
    exec("def logged(fn): return functools.wraps(fn)(lambda **given: fn(**given))", elsewhere)
    client.app.post("/orders")(guarded(elsewhere["logged"](create)))
    answers = [client.post("/orders", json={"item": "book"}) for _ in range(2)]
    assert [(answer.status_code, answer.text) for answer in answers] == [(200, '"book"')] * 2


def test_a_guarded_function_that_is_called_without_a_request_says_what_to_call(
    runner: asyncio.Runner,
) -> None:
    @guarded
    async def pay(user: User, order: Order) -> str:
        return "never"

    given: dict[str, Any] = {"user": User(id="a"), "order": Order(item="x")}
    for args, named in ((tuple(given.values()), {}), ((), given)):
        with pytest.raises(ConfigurationError, match=r"pay is guarded .* called without one"):
            runner.run(pay(*args, **named))


def test_a_function_that_yields_is_refused_behind_a_wrapper_too() -> None:
    async def pieces(user: Someone) -> AsyncIterator[str]:
        yield "made"

    with pytest.raises(ConfigurationError, match="yields its response"):
        guarded(logged(pieces))


class Unpacked(Request):
    """As FastAPI's documentation has it, for a route class of one's own."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            self._body = gzip.decompress(await super().body())
        return self._body


class UnpackedRoute(APIRoute):
    def get_route_handler(self) -> Any:
        handler = super().get_route_handler()

        async def unpacked(request: Request) -> Response:
            return await handler(Unpacked(request.scope, request.receive))

        return unpacked


def test_h05_a_function_sees_the_body_of_its_own_route_class(client: Client) -> None:
    router = APIRouter(route_class=UnpackedRoute)

    @router.post("/orders")
    @guarded
    async def create(user: Someone, request: Request) -> str:
        return (await request.body()).decode()

    client.app.include_router(router)
    texts = [client.post("/orders", key=key, content=gzip.compress(b"book")).json() for key in (None, "", "")]
    assert texts == ["book"] * 3


async def counted(request: Request) -> int:
    return sum([len(piece) async for piece in request.stream()])


def test_h05_a_body_that_a_dependency_has_read_away_is_told_at_once(client: Client) -> None:
    """A server's receive() answers next when the client leaves: the request would hang until then."""

    @client.app.post("/orders")
    @guarded
    async def create(user: Someone, size: Annotated[int, Depends(counted)]) -> int:
        calls.append("run")
        return size

    pieces = [b"abc"]

    async def receive() -> Any:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(), "more_body": False}
        return await asyncio.Event().wait()

    async def ask() -> None:
        sent = {"idempotency-key": client.key, "x-user": "ada", "content-length": "3"}
        raw = [(name.encode(), value.encode()) for name, value in sent.items()]
        scope = {"type": "http", "method": "POST", "path": "/orders", "query_string": b"", "headers": raw}
        async with asyncio.timeout(10):
            await client.app(scope, receive, ignored)

    async def ignored(message: Any) -> None:
        del message

    with pytest.raises(ConfigurationError, match=r"await request\.body\(\)"):
        client.runner.run(ask())
    assert "run" not in calls


def test_install_answers_the_cores_errors_as_problems(client: Client) -> None:
    install(client.app)

    @client.app.post("/by-hand")
    async def by_hand() -> None:
        raise InProgress("somebody else runs it", retry_after=3)

    answer = client.post("/by-hand")
    assert (answer.status_code, answer.headers["retry-after"]) == (409, "3")
    assert answer.json()["type"].endswith("in-progress")


def test_a_cancelled_request_ends_like_any_other(client: Client) -> None:
    """H18 under servers and middlewares that cancel the request of a client that has left."""
    unit.ended.clear()
    begun = asyncio.Event()

    @client.app.post("/orders")
    @guarded
    async def create(user: Someone, db: Ended) -> str:
        calls.append("run")
        begun.set()
        await asyncio.sleep(0.05)
        return "made"

    async def leave() -> None:
        headers = {"Idempotency-Key": client.key, "X-User": "ada"}
        task = asyncio.create_task(client._post("/orders", headers, {}))
        await begun.wait()
        task.cancel()
        await asyncio.wait((task,))

    client.runner.run(leave())
    assert unit.ended == ["commit"]
    assert client.post("/orders").headers["idempotency-replayed"] == "true"
    assert calls.count("run") == 1
