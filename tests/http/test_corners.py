"""Corners of Flask, Django and Starlette: files, forms that were read, transactions, errors, compression, order of layers."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.db import connections
from django.http import FileResponse, HttpResponse, StreamingHttpResponse
from flask import Flask, Response, g, request, send_file
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from semel import AsyncSemel, ConfigurationError, InProgress, Semel
from semel.http.asgi import IdempotencyMiddleware
from semel.http.django import idempotent as django_idempotent
from semel.http.flask import idempotent as flask_idempotent
from semel.http.flask import install
from tests.http.frames import DjangoApp, plain_user

GUARD: Any = IdempotencyMiddleware
HEADERS = {"Idempotency-Key": "k1", "X-User": "ada"}


@pytest.fixture
def once() -> Iterator[Semel]:
    with Semel("memory://") as made:
        yield made


def ask(app: Any, *requests: dict[str, Any]) -> list[httpx.Response]:
    """POST each of them to a WSGI or ASGI application."""
    if isinstance(app, Flask) or (hasattr(app, "load_middleware") and type(app).__name__ == "WSGIHandler"):
        with httpx.Client(
            transport=httpx.WSGITransport(app, raise_app_exceptions=False), base_url="http://shop"
        ) as client:
            return [client.post(**{"url": "/", "headers": HEADERS, **given}) for given in requests]

    async def together() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return [await client.post(**{"url": "/", "headers": HEADERS, **given}) for given in requests]

    return asyncio.run(together())


def marks(answers: list[httpx.Response]) -> list[str | None]:
    return [answer.headers.get("idempotency-replayed") for answer in answers]


# ------------------------------------------------------------------------------------------------------------- Flask


def flask_app(view: Callable[[], Any], once: Semel, **options: Any) -> Flask:
    app = Flask("shop")
    app.post("/")(flask_idempotent(once=once, principal=plain_user, **options)(view))
    return app


def test_flask_a_file_is_sent_recorded_and_closed(once: Semel, tmp_path: Path) -> None:
    file = tmp_path / "report.csv"
    file.write_bytes(b"a,b\n" * 20_000)
    opened: list[Any] = []

    def view() -> Any:
        opened.append(file.open("rb"))
        return send_file(opened[-1], download_name="report.csv", as_attachment=True)

    answers = ask(flask_app(view, once), {}, {})
    assert [answer.content for answer in answers] == [file.read_bytes()] * 2
    assert answers[1].headers["content-disposition"] == answers[0].headers["content-disposition"]
    assert marks(answers) == ["false", "true"]
    assert [handle.closed for handle in opened] == [True]


def test_flask_a_form_that_was_read_before_still_counts(once: Semel) -> None:
    app = flask_app(lambda: request.form["a"], once)

    @app.before_request
    def read() -> None:
        g.form = dict(request.form)

    answers = ask(app, {"data": {"a": "1"}}, {"data": {"a": "1"}}, {"data": {"a": "2"}})
    assert [answer.status_code for answer in answers] == [200, 200, 422]


@pytest.mark.parametrize("read", [lambda: request.stream.read(), lambda: request.get_data(cache=False)])
def test_h05_flask_a_body_that_was_read_away_is_told(once: Semel, read: Callable[[], bytes]) -> None:
    """What is left of it is the same for every request: another one would get this one's response."""
    app = flask_app(lambda: "x", once)
    app.testing = True
    app.before_request(lambda: setattr(g, "raw", read()))
    with pytest.raises(ConfigurationError, match=r"request\.get_data\(\)"):
        app.test_client().post("/", data=b"pay 1", headers=HEADERS)


@pytest.mark.parametrize("is_late", [False, True])
def test_flask_decorators_in_the_wrong_order_are_refused(once: Semel, is_late: bool) -> None:
    app = Flask("shop")
    app.testing = True
    if is_late:
        install(app)

    @flask_idempotent(once=once, principal=plain_user)
    @app.post("/")
    def view() -> str:
        return "run"

    for _ in range(2):
        with pytest.raises(ConfigurationError, match="view is registered without its guard"):
            app.test_client().post("/") if is_late else install(app)
    if not is_late:
        app.post("/guarded", endpoint="guarded")(view)
        install(app)
        assert app.test_client().post("/").text == "run", "both forms are registered, which is meant so"


def test_flask_r33_authentication_comes_first_on_replays_too(once: Semel) -> None:
    calls: list[str] = []

    def view() -> str:
        calls.append("run")
        return "done"

    app = flask_app(view, once)

    @app.before_request
    def authenticate() -> Any:
        return None if request.headers.get("x-user") == "ada" else Response("who?", 401)

    other = {"headers": {**HEADERS, "X-User": "eve"}}
    assert [answer.status_code for answer in ask(app, other, {}, other, {})] == [401, 200, 401, 200]
    assert calls == ["run"]


def test_flask_errors_are_recorded_as_the_application_answers_them(once: Semel) -> None:
    calls: list[str] = []

    def view() -> Any:
        calls.append("run")
        raise KeyError("stock")

    app = flask_app(view, once)

    @app.errorhandler(KeyError)
    def answer(error: Exception) -> Any:
        calls.append("handler")
        return f"sold out {len(calls)}", 410

    answers = ask(app, {}, {})
    assert [(answer.status_code, answer.text) for answer in answers] == [(410, "sold out 2")] * 2
    assert (calls, marks(answers)) == (["run", "handler"], ["false", "true"])


def test_flask_install_answers_the_cores_errors(once: Semel) -> None:
    app = Flask("shop")
    install(app)

    @app.post("/")
    def view() -> Any:
        raise InProgress("somebody else runs it", retry_after=2)

    answer = ask(app, {})[0]
    assert (answer.status_code, answer.headers["retry-after"]) == (409, "2")


# ------------------------------------------------------------------------------------------------------------ Django


@pytest.fixture
def django_site() -> Iterator[Callable[..., Any]]:
    made: list[DjangoApp] = []

    def build(view: Callable[..., Any], *, is_async: bool = False, **options: Any) -> Any:
        view.__name__ = ""  # the root
        made.append(DjangoApp([view], is_async=is_async, **options))
        return made[-1].app

    yield build
    for site in made:
        site.close()


def asynchronous(view: Callable[..., Any]) -> Callable[..., Any]:
    async def awaited(request: Any) -> Any:
        return view(request)

    return awaited


@pytest.mark.parametrize("is_async", [False, True], ids=["wsgi", "asgi"])
@pytest.mark.parametrize("how", ["decorator", "middleware"])
@pytest.mark.parametrize("kept", ["in the record", "spilled"])
def test_django_a_file_is_sent_recorded_and_closed(
    django_site: Any, tmp_path: Path, is_async: bool, how: str, kept: str
) -> None:
    responses = tmp_path / "responses"
    more: dict[str, Any] = {"max_response": 1000, "spill": f"file://{responses}"} if kept == "spilled" else {}
    file = tmp_path / "report.csv"
    file.write_bytes(b"a,b\n" * 20_000)
    opened: list[Any] = []

    def view(request: Any) -> Any:
        opened.append(file.open("rb"))
        return FileResponse(opened[-1], filename="report.csv", as_attachment=True)

    once: Any = AsyncSemel("memory://") if is_async else Semel("memory://")
    shown = asynchronous(view) if is_async else view
    if how == "decorator":
        around = django_idempotent(once=once, principal=plain_user, **more)
        app = django_site(around(shown), is_async=is_async)
    else:
        given = {
            ("async_once" if is_async else "once"): once,
            "principal": plain_user,
            "authenticated_outside": True,
            **more,
        }
        app = django_site(
            shown, is_async=is_async, SEMEL=given, MIDDLEWARE=["semel.http.django.IdempotencyMiddleware"]
        )
    answers = ask(app, {}, {})
    assert [answer.content for answer in answers] == [file.read_bytes()] * 2
    assert (marks(answers), [handle.closed for handle in opened]) == (["false", "true"], [True])
    assert responses.exists() == (kept == "spilled")


@pytest.mark.parametrize("returned", [None, {"paid": True}])
def test_django_a_view_that_returns_no_response_is_told_so(
    django_site: Any, once: Semel, returned: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """With a key it was an AttributeError about closers; without one Django tells it."""
    app = django_site(django_idempotent(once=once, principal=plain_user)(lambda request: returned))
    assert ask(app, {})[0].status_code == 500
    assert f"didn't return an HttpResponse object: it returned {type(returned).__name__}" in caplog.text


def test_django_a_form_that_was_read_before_still_counts(django_site: Any, once: Semel) -> None:
    """As the CSRF middleware does: it looks for its token in the form."""

    def view(request: Any) -> Any:
        return HttpResponse(request.POST["a"] + request.FILES["f"].read().decode())

    given = {"once": once, "principal": plain_user, "authenticated_outside": True}
    names = ["tests.http.test_corners.reads_the_form", "semel.http.django.IdempotencyMiddleware"]
    app = django_site(view, SEMEL=given, MIDDLEWARE=names)

    def form(a: str, content: bytes) -> dict[str, Any]:
        return {"data": {"a": a}, "files": {"f": ("x.txt", content)}}

    answers = ask(app, form("1", b"one"), form("1", b"one"), form("2", b"one"), form("1", b"two"))
    assert [answer.status_code for answer in answers] == [200, 200, 422, 422]
    assert answers[0].text == "1one"


@pytest.mark.parametrize(
    "also", [[], ["tests.http.test_corners.reads_the_form"]], ids=["read", "and looked at"]
)
def test_h05_django_a_form_that_was_read_away_is_told(
    django_site: Any, once: Semel, also: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Django's form is empty then, whatever was sent: another one would get this one's response."""
    app = django_site(
        lambda request: HttpResponse("x"),
        SEMEL={"once": once, "principal": plain_user, "authenticated_outside": True},
        MIDDLEWARE=[
            "tests.http.test_corners.reads_it_away",
            *also,
            "semel.http.django.IdempotencyMiddleware",
        ],
    )
    answers = ask(app, *({"data": {"a": value}, "files": {"f": ("x.txt", b"x")}} for value in "12"))
    assert [answer.status_code for answer in answers] == [500, 500]
    assert "Read request.body, or request.POST" in caplog.text


def reads_it_away(get_response: Any) -> Any:
    def middleware(request: Any) -> Any:
        request.read()
        return get_response(request)

    return middleware


def reads_the_form(get_response: Any) -> Any:
    def middleware(request: Any) -> Any:
        assert request.POST is not None
        return get_response(request)

    return middleware


def test_django_a_body_over_its_own_limit_is_413(django_site: Any, once: Semel) -> None:
    app = django_site(
        django_idempotent(once=once, principal=plain_user)(lambda request: HttpResponse("x")),
        DATA_UPLOAD_MAX_MEMORY_SIZE=100,
    )
    refused, taken = ask(app, {"content": b"x" * 101}, {"content": b"x" * 100})
    assert (refused.status_code, refused.json()["limit"]) == (413, 100)
    assert taken.status_code == 200


def test_django_a_decorated_view_in_atomic_requests_is_refused(
    django_site: Any, once: Semel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record would be written before the transaction of the view has ended."""
    view = django_idempotent(once=once, principal=plain_user)(lambda request: HttpResponse("x"))
    app = django_site(view)
    assert ask(app, {})[0].status_code == 200
    monkeypatch.setattr(connections, "settings", {"default": {"ATOMIC_REQUESTS": True}})
    with pytest.raises(ConfigurationError, match="non_atomic_requests"):
        view(None)
    view._non_atomic_requests = {"default"}  # type: ignore[attr-defined]  # what @transaction.non_atomic_requests does
    monkeypatch.undo()
    assert marks(ask(app, {})) == ["true"]


def test_django_an_async_view_that_is_cancelled_goes_on(django_site: Any) -> None:
    """Django cancels the view of a client that has left (H18)."""
    done: list[str] = []

    async def scenario() -> list[str | None]:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def view(request: Any) -> Any:
            begun.set()
            await go_on.wait()
            done.append("effect")
            return StreamingHttpResponse(_pieces())

        async with AsyncSemel("memory://") as once:
            app = django_site(django_idempotent(once=once, principal=plain_user)(view), is_async=True)
            messages = [{"type": "http.request", "body": b"", "more_body": False}]

            async def receive() -> Any:
                if messages:
                    return messages.pop()
                await begun.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                raise OSError("gone")

            raw = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            scope = {
                "type": "http",
                "method": "POST",
                "path": "/",
                "query_string": b"",
                "headers": raw,
                "http_version": "1.1",
            }
            await app(scope, receive, send)
            go_on.set()
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                answer = await client.post("/", headers=HEADERS)
            return [answer.headers["idempotency-replayed"], answer.text]

    assert asyncio.run(scenario()) == ["true", "one,two,"]
    assert done == ["effect"]


async def _pieces() -> AsyncIterator[bytes]:
    yield b"one,"
    yield b"two,"


# --------------------------------------------------------------------------------------------------------- Starlette


def test_h31_compression_outside_is_done_anew_for_every_reply() -> None:
    async def view(request: Request) -> PlainTextResponse:
        return PlainTextResponse("tea " * 1000)

    app = Starlette(routes=[Route("/", view, methods=["POST"])])
    app.add_middleware(GUARD, once=AsyncSemel("memory://"), principal=plain_user, authenticated_outside=True)
    app.add_middleware(GZipMiddleware)
    zipped, plain, again = ask(
        app,
        {"headers": {**HEADERS, "Accept-Encoding": "gzip"}},
        {"headers": {**HEADERS, "Accept-Encoding": "identity"}},
        {"headers": {**HEADERS, "Accept-Encoding": "gzip"}},
    )
    assert [answer.headers.get("content-encoding") for answer in (zipped, plain, again)] == [
        "gzip",
        None,
        "gzip",
    ]
    assert zipped.text == plain.text == again.text
    assert marks([zipped, plain, again]) == ["false", "true", "true"]


def test_h31_compression_inside_is_kept_as_it_is() -> None:
    async def view(request: Request) -> PlainTextResponse:
        return PlainTextResponse("tea " * 1000)

    app = Starlette(routes=[Route("/", view, methods=["POST"])])
    app.add_middleware(GZipMiddleware)
    app.add_middleware(GUARD, once=AsyncSemel("memory://"), principal=plain_user, authenticated_outside=True)
    answers = ask(app, *[{"headers": {**HEADERS, "Accept-Encoding": "gzip"}}] * 2)
    assert [answer.headers["content-encoding"] for answer in answers] == ["gzip", "gzip"]
    assert answers[1].text == "tea " * 1000


@pytest.mark.parametrize("outside", [True, False])
def test_a_function_middleware_may_stand_on_either_side(outside: bool) -> None:
    calls: list[str] = []

    async def view(request: Request) -> PlainTextResponse:
        calls.append("view")
        return PlainTextResponse(await request.body())

    async def timed(request: Request, call_next: Any) -> Any:
        response = await call_next(request)
        response.headers["x-timed"] = "yes"
        return response

    app = Starlette(routes=[Route("/", view, methods=["POST"])])
    layers: list[tuple[Any, dict[str, Any]]] = [
        (
            IdempotencyMiddleware,
            {"once": AsyncSemel("memory://"), "principal": plain_user, "authenticated_outside": True},
        ),
        (BaseHTTPMiddleware, {"dispatch": timed}),
    ]
    for layer, options in layers if outside else reversed(layers):
        app.add_middleware(layer, **options)
    answers = ask(app, {"content": b"x" * 100_000}, {"content": b"x" * 100_000})
    assert [answer.content for answer in answers] == [b"x" * 100_000] * 2
    assert (marks(answers), calls) == (["false", "true"], ["view"])
    assert answers[1].headers.get("x-timed") == ("yes" if outside else None)


def test_a_truncated_body_is_not_run_under_wsgi(once: Semel) -> None:
    calls: list[str] = []
    app = Flask("shop")

    @app.post("/")
    def view() -> str:
        calls.append("run")
        return "done"

    from semel.http.wsgi import IdempotencyMiddleware as Wsgi

    guarded = Wsgi(app, once=once, principal=plain_user, authenticated_outside=True)
    environ = {
        "REQUEST_METHOD": "POST", "PATH_INFO": "/", "HTTP_IDEMPOTENCY_KEY": "k", "HTTP_X_USER": "ada", "SERVER_NAME": "shop",
        "SERVER_PORT": "80", "wsgi.url_scheme": "http", "CONTENT_LENGTH": "10", "wsgi.input": io.BytesIO(b"abc"),
    }  # fmt: skip
    started: list[str] = []
    body = b"".join(guarded(environ, lambda status, headers: started.append(status)))
    assert (started, calls) == (["400 Bad Request"], [])
    assert b"body-incomplete" in body


def test_h21_websockets_pass_untouched() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    async def nothing(*_: Any) -> Any:
        return None

    async def scenario() -> None:
        async with AsyncSemel("memory://") as once:
            guarded = IdempotencyMiddleware(
                app, once=once, principal=plain_user, authenticated_outside=True, required=True
            )
            scope = {
                "type": "websocket",
                "path": "/",
                "headers": [(b"idempotency-key", b"k"), (b"x-user", b"ada")],
            }
            await guarded(scope, nothing, nothing)
            assert seen == [(scope, nothing, nothing)]

    asyncio.run(scenario())


def test_a_stream_under_wsgi_is_read_to_its_end_whoever_listens(once: Semel) -> None:
    """H18: a server closes the response of a client that has left in the middle of it."""
    calls: list[str] = []

    def pieces() -> Iterator[bytes]:
        for number in range(5):
            calls.append(f"piece {number}")
            yield b"%d," % number

    app = flask_app(lambda: Response(pieces()), once)
    environ = {
        "REQUEST_METHOD": "POST", "PATH_INFO": "/", "HTTP_IDEMPOTENCY_KEY": "k1", "HTTP_X_USER": "ada", "SERVER_NAME": "shop",
        "SERVER_PORT": "80", "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(), "wsgi.errors": io.StringIO(),
    }  # fmt: skip
    result: Any = app(environ, lambda status, headers, exc_info=None: lambda data: None)
    assert next(iter(result)) == b"0,"
    assert len(calls) < 5
    result.close()
    assert len(calls) == 5
    answer = ask(app, {})[0]
    assert (answer.text, marks([answer])) == ("0,1,2,3,4,", ["true"])
