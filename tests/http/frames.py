"""One shop in every framework, guarded in every way that semel offers there: the same routes, the same ledger.

POST /orders   201 JSON, Location, a cookie, a task after the response
POST /empty    204
POST /stream   three pieces
POST /form     a field and a file
POST /fail     raises as long as the ledger says so
POST /refuse   the framework's own 404
"""

from __future__ import annotations

import types
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Annotated, Any

import django
from django.conf import settings
from django.test.utils import override_settings

from tests.http.shop import PIECES, Ledger

Guarded = Callable[[Any, Ledger, dict[str, Any]], Any]


def plain_user(request: Any) -> str | None:
    """Starlette, Werkzeug, Flask and Django have `headers` in common."""
    user: str | None = request.headers.get("x-user")
    return user


OUTSIDE: dict[str, Any] = {"principal": plain_user, "authenticated_outside": True}
INSIDE: dict[str, Any] = {"principal": plain_user}


# --------------------------------------------------------------------------------------------------------- Starlette


def _starlette_app(ledger: Ledger) -> Any:
    from starlette.applications import Starlette
    from starlette.background import BackgroundTask
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    async def orders(request: Request) -> Response:
        number = ledger.did("orders")
        size = len(await request.body())
        headers = {"location": "/orders/1", "set-cookie": "a=b"}
        return JSONResponse(
            {"n": number, "size": size},
            201,
            headers=headers,
            background=BackgroundTask(ledger.after.append, "mail"),
        )

    async def empty(request: Request) -> Response:
        ledger.did("empty")
        return Response(status_code=204)

    async def stream(request: Request) -> Response:
        ledger.did("stream")
        return StreamingResponse(_pieces(), media_type="text/csv")

    async def form(request: Request) -> Response:
        ledger.did("form")
        async with request.form() as given:
            file: Any = given["file"]
            return PlainTextResponse(f"{given['name']} {file.filename} {len(await file.read())}")

    async def fail(request: Request) -> Response:
        ledger.did("fail")
        _maybe_fail(ledger)
        return PlainTextResponse("recovered")

    async def refuse(request: Request) -> Response:
        ledger.did("refuse")
        raise HTTPException(404, "no such thing")

    handlers = (orders, empty, stream, form, fail, refuse)
    return Starlette(routes=[Route(f"/{fn.__name__}", fn, methods=["POST"]) for fn in handlers])


async def _pieces() -> AsyncIterator[bytes]:
    for piece in PIECES:
        yield piece


def _maybe_fail(ledger: Ledger) -> None:
    if ledger.count("fail") <= ledger.failing:
        raise RuntimeError("the handler failed")


def starlette(once: Any, ledger: Ledger, options: dict[str, Any]) -> Any:
    from semel.http.asgi import IdempotencyMiddleware

    app = _starlette_app(ledger)
    app.add_middleware(IdempotencyMiddleware, once=once, **OUTSIDE, **options)
    return app


# ----------------------------------------------------------------------------------------------------------- FastAPI


def _fastapi_app(ledger: Ledger, guard: Callable[[Any], Any]) -> Any:
    from fastapi import BackgroundTasks, FastAPI, Form, HTTPException, Request, Response, UploadFile
    from fastapi.responses import PlainTextResponse, StreamingResponse

    app = FastAPI()

    async def orders(request: Request, response: Response, tasks: BackgroundTasks) -> dict[str, int]:
        number = ledger.did("orders")
        tasks.add_task(ledger.after.append, "mail")
        response.headers["location"] = "/orders/1"
        response.set_cookie("a", "b")
        return {"n": number, "size": len(await request.body())}

    async def empty() -> None:
        ledger.did("empty")

    async def stream() -> StreamingResponse:
        ledger.did("stream")
        return StreamingResponse(_pieces(), media_type="text/csv")

    async def form(name: Annotated[str, Form()], file: UploadFile) -> str:
        ledger.did("form")
        return f"{name} {file.filename} {len(await file.read())}"

    def fail() -> str:  # a plain function, in a thread
        ledger.did("fail")
        _maybe_fail(ledger)
        return "recovered"

    async def refuse() -> None:
        ledger.did("refuse")
        raise HTTPException(404, "no such thing")

    local = {"Request": Request, "Response": Response, "BackgroundTasks": BackgroundTasks, "Form": Form,
             "UploadFile": UploadFile, "StreamingResponse": StreamingResponse, "Annotated": Annotated}  # fmt: skip
    for fn, status in ((orders, 201), (empty, 204), (stream, 200), (form, 200), (fail, 200), (refuse, 200)):
        fn.__annotations__ = {name: eval(hint, local) for name, hint in fn.__annotations__.items()}
        kind = {"response_class": PlainTextResponse} if fn in (form, fail) else {}
        app.post(f"/{fn.__name__}", status_code=status, **kind)(guard(fn))  # type: ignore[arg-type]  # options by their names
    return app


def fastapi_middleware(once: Any, ledger: Ledger, options: dict[str, Any]) -> Any:
    from semel.http.asgi import IdempotencyMiddleware

    app = _fastapi_app(ledger, lambda fn: fn)
    app.add_middleware(IdempotencyMiddleware, once=once, **OUTSIDE, **options)
    return app


def fastapi_decorator(once: Any, ledger: Ledger, options: dict[str, Any]) -> Any:
    from semel.http.fastapi import idempotent, install

    app = _fastapi_app(ledger, idempotent(once=once, **INSIDE, **options))
    install(app)
    return app


# ---------------------------------------------------------------------------------------------------- Litestar, Quart


def _litestar_app(ledger: Ledger, middleware: list[Any]) -> Any:
    from litestar import Litestar, Request, Response, post
    from litestar.background_tasks import BackgroundTask
    from litestar.datastructures import Cookie
    from litestar.exceptions import NotFoundException
    from litestar.response import Stream

    async def orders(request: Request[Any, Any, Any]) -> Response[dict[str, int]]:
        number = ledger.did("orders")
        return Response(
            {"n": number, "size": len(await request.body())},
            status_code=201,
            headers={"location": "/orders/1"},
            cookies=[Cookie("a", value="b")],
            background=BackgroundTask(ledger.after.append, "mail"),
        )

    async def empty() -> None:
        ledger.did("empty")

    async def stream() -> Stream:
        ledger.did("stream")
        return Stream(_pieces(), media_type="text/csv")

    async def form(request: Request[Any, Any, Any]) -> str:
        ledger.did("form")
        given = await request.form()
        file = given["file"]
        return f"{given['name']} {file.filename} {len(await file.read())}"

    async def fail() -> str:
        ledger.did("fail")
        _maybe_fail(ledger)
        return "recovered"

    async def refuse() -> None:
        ledger.did("refuse")
        raise NotFoundException("no such thing")

    local = {"Request": Request, "Response": Response, "Stream": Stream, "Any": Any}
    handlers = []
    for fn, status in ((orders, 201), (empty, 204), (stream, 200), (form, 200), (fail, 200), (refuse, 204)):
        fn.__annotations__ = {name: eval(hint, local) for name, hint in fn.__annotations__.items()}
        handlers.append(
            post(
                f"/{fn.__name__}", status_code=status, media_type="text/plain" if fn in (form, fail) else None
            )(fn)
        )
    return Litestar(handlers, middleware=middleware)


def litestar_inside(once: Any, ledger: Ledger, options: dict[str, Any]) -> Any:
    from litestar.middleware import DefineMiddleware

    from semel.http.asgi import IdempotencyMiddleware

    kind: Any = IdempotencyMiddleware
    return _litestar_app(ledger, [DefineMiddleware(kind, once=once, **OUTSIDE, **options)])


def litestar_around(once: Any, ledger: Ledger, options: dict[str, Any]) -> Any:
    from semel.http.asgi import IdempotencyMiddleware

    return IdempotencyMiddleware(_litestar_app(ledger, []), once=once, **OUTSIDE, **options)


def quart(once: Any, ledger: Ledger, options: dict[str, Any]) -> Any:
    from quart import Quart, Response, abort, request

    from semel.http.asgi import IdempotencyMiddleware

    app = Quart("shop")

    @app.post("/orders")
    async def orders() -> Any:
        number = ledger.did("orders")

        async def mail() -> None:
            ledger.after.append("mail")

        app.add_background_task(mail)
        size = len(await request.get_data())
        return {"n": number, "size": size}, 201, {"Location": "/orders/1", "Set-Cookie": "a=b"}

    @app.post("/empty")
    async def empty() -> Any:
        ledger.did("empty")
        return Response("", status=204)

    @app.post("/stream")
    async def stream() -> Any:
        ledger.did("stream")
        return Response(_pieces(), content_type="text/csv")

    @app.post("/form")
    async def form() -> Any:
        ledger.did("form")
        given, files = await request.form, await request.files
        return f"{given['name']} {files['file'].filename} {len(files['file'].read())}"

    @app.post("/fail")
    async def fail() -> Any:
        ledger.did("fail")
        _maybe_fail(ledger)
        return "recovered"

    @app.post("/refuse")
    async def refuse() -> Any:
        ledger.did("refuse")
        abort(404)

    inner: Any = app.asgi_app
    app.asgi_app = IdempotencyMiddleware(inner, once=once, **OUTSIDE, **options)  # type: ignore[assignment]  # as Quart's own pages say
    return app


# ----------------------------------------------------------------------------------------------------- Flask, Bottle


def _flask_app(ledger: Ledger, guard: Callable[[Any], Any]) -> Any:
    from flask import Flask, Response, abort, after_this_request, request

    app = Flask("shop")

    def orders() -> Any:
        number = ledger.did("orders")
        size = len(request.get_data())

        @after_this_request
        def mail(response: Response) -> Response:
            response.call_on_close(lambda: ledger.after.append("mail"))
            return response

        return {"n": number, "size": size}, 201, {"Location": "/orders/1", "Set-Cookie": "a=b"}

    def empty() -> Any:
        ledger.did("empty")
        return "", 204

    def stream() -> Any:
        ledger.did("stream")
        return Response(iter(PIECES), mimetype="text/csv")

    def form() -> Any:
        ledger.did("form")
        file = request.files["file"]
        return f"{request.form['name']} {file.filename} {len(file.read())}"

    def fail() -> Any:
        ledger.did("fail")
        _maybe_fail(ledger)
        return "recovered"

    def refuse() -> Any:
        ledger.did("refuse")
        abort(404)

    for fn in (orders, empty, stream, form, fail, refuse):
        app.post(f"/{fn.__name__}")(guard(fn))
    return app


def flask_extension(once: Any, ledger: Ledger, options: dict[str, Any]) -> Any:
    from semel.http.flask import Idempotency

    app = _flask_app(ledger, lambda fn: fn)
    Idempotency(once=once, **OUTSIDE, **options).init_app(app)
    return app


def flask_decorator(once: Any, ledger: Ledger, options: dict[str, Any]) -> Any:
    from semel.http.flask import idempotent

    return _flask_app(ledger, idempotent(once=once, **INSIDE, **options))


def bottle(once: Any, ledger: Ledger, options: dict[str, Any]) -> Any:
    from bottle import Bottle, HTTPResponse, abort, request  # type: ignore[import-untyped]  # ships no types

    from semel.http.wsgi import IdempotencyMiddleware

    app = Bottle()

    @app.post("/orders")
    def orders() -> Any:
        number = ledger.did("orders")
        size = len(request.body.read())
        ledger.after.append("mail")  # Bottle has no tasks after a response
        headers = {"Location": "/orders/1", "Set-Cookie": "a=b", "Content-Type": "application/json"}
        return HTTPResponse(f'{{"n": {number}, "size": {size}}}', 201, headers)

    @app.post("/empty")
    def empty() -> Any:
        ledger.did("empty")
        return HTTPResponse(status=204)

    @app.post("/stream")
    def stream() -> Iterator[bytes]:
        ledger.did("stream")
        yield from PIECES

    @app.post("/form")
    def form() -> Any:
        ledger.did("form")
        file = request.files["file"]
        return f"{request.forms['name']} {file.raw_filename} {len(file.file.read())}"

    @app.post("/fail")
    def fail() -> Any:
        ledger.did("fail")
        _maybe_fail(ledger)
        return "recovered"

    @app.post("/refuse")
    def refuse() -> Any:
        ledger.did("refuse")
        abort(404)

    return IdempotencyMiddleware(app, once=once, **OUTSIDE, **options)


# ------------------------------------------------------------------------------------------------------------ Django


def _django_views(ledger: Ledger, *, is_async: bool) -> list[Callable[..., Any]]:
    from django.http import Http404, HttpResponse, JsonResponse, StreamingHttpResponse

    def orders(request: Any) -> Any:
        number = ledger.did("orders")
        response = JsonResponse({"n": number, "size": len(request.body)}, status=201)
        response["Location"] = "/orders/1"
        response.set_cookie("a", "b")
        ledger.after.append("mail")  # Django has no tasks after a response
        return response

    def empty(request: Any) -> Any:
        ledger.did("empty")
        return HttpResponse(status=204)

    def stream(request: Any) -> Any:
        ledger.did("stream")
        return StreamingHttpResponse(_pieces() if is_async else iter(PIECES), content_type="text/csv")

    def form(request: Any) -> Any:
        ledger.did("form")
        file = request.FILES["file"]
        return HttpResponse(f"{request.POST['name']} {file.name} {len(file.read())}")

    def fail(request: Any) -> Any:
        ledger.did("fail")
        _maybe_fail(ledger)
        return HttpResponse("recovered")

    def refuse(request: Any) -> Any:
        ledger.did("refuse")
        raise Http404

    views: list[Callable[..., Any]] = [orders, empty, stream, form, fail, refuse]
    return [_awaited(view) for view in views] if is_async else views


def _awaited(view: Callable[..., Any]) -> Callable[..., Any]:
    async def awaited(request: Any) -> Any:
        return view(request)

    awaited.__name__ = view.__name__
    return awaited


class DjangoApp:
    """A Django application with settings of its own, in force while it is called."""

    def __init__(self, views: list[Callable[..., Any]], *, is_async: bool, **options: Any) -> None:
        from django.urls import path

        if not settings.configured:
            settings.configure(DATABASES={}, USE_TZ=True)
            django.setup()
        urls = types.ModuleType("shop_urls")
        urls.urlpatterns = [path(view.__name__, view) for view in views]  # type: ignore[attr-defined]  # a module made here
        given = {"ROOT_URLCONF": urls, "ALLOWED_HOSTS": ["*"], "MIDDLEWARE": [], "LOGGING_CONFIG": None}
        self._settings: AbstractContextManager[Any] = override_settings(**{**given, **options})
        self.stack = ExitStack()
        self.stack.enter_context(self._settings)
        from django.core.handlers.asgi import ASGIHandler
        from django.core.handlers.wsgi import WSGIHandler

        self.app: Any = ASGIHandler() if is_async else WSGIHandler()

    def close(self) -> None:
        self.stack.close()


def _django(is_async: bool, *, decorated: bool) -> Guarded:
    name = "async_once" if is_async else "once"

    def build(once: Any, ledger: Ledger, options: dict[str, Any]) -> Any:
        from semel.http.django import idempotent

        views = _django_views(ledger, is_async=is_async)
        if decorated:
            guard = idempotent(once=once, **INSIDE, **options)
            return DjangoApp([_named(guard(view), view) for view in views], is_async=is_async)
        return DjangoApp(
            views,
            is_async=is_async,
            MIDDLEWARE=["semel.http.django.IdempotencyMiddleware"],
            SEMEL={
                name: once,
                "principal": "tests.http.frames.plain_user",
                "authenticated_outside": True,
                **options,
            },
        )

    return build


def _named(guarded: Any, view: Any) -> Any:
    assert guarded.__name__ == view.__name__
    return guarded


ASYNC: dict[str, Guarded] = {
    "starlette": starlette,
    "fastapi-middleware": fastapi_middleware,
    "fastapi-decorator": fastapi_decorator,
    "litestar-inside": litestar_inside,
    "litestar-around": litestar_around,
    "quart": quart,
    "django-asgi-middleware": _django(True, decorated=False),
    "django-asgi-decorator": _django(True, decorated=True),
}
SYNC: dict[str, Guarded] = {
    "flask-extension": flask_extension,
    "flask-decorator": flask_decorator,
    "bottle": bottle,
    "django-wsgi-middleware": _django(False, decorated=False),
    "django-wsgi-decorator": _django(False, decorated=True),
}
