"""Django: a middleware with settings, and a decorator for views, under WSGI and ASGI.

    MIDDLEWARE = [..., "semel.http.django.IdempotencyMiddleware"]           # after AuthenticationMiddleware
    SEMEL = {"once": "shop.semel.once", "principal": "semel.http.django.user_id", "authorize": "shop.semel.allowed"}

`once` is a Semel under WSGI; under ASGI give an AsyncSemel as `async_once`. A name with dots is imported.
"""

from __future__ import annotations

import asyncio
import hashlib
from asyncio import iscoroutinefunction
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from functools import partial, wraps
from typing import Any, Unpack

from semel.errors import ConfigurationError
from semel.http.body import Body, TooLarge, feed_parts
from semel.http.config import Plan, configure
from semel.http.guard import Admitted, Guard
from semel.http.intake import First, enter
from semel.http.options import DecoratorOptions
from semel.http.postponed import Postponed
from semel.http.problem import DEFAULT_BASE, Problem, of_error
from semel.http.reply import Reply, problem_reply
from semel.http.views import AsyncStream, Headers, Stream, first_view
from semel.http.wsgi import EnvironRequest
from semel.once import AsyncSemel, Semel
from semel.run import Run
from semel.runtime import run_sync

try:
    from asgiref.sync import markcoroutinefunction, sync_to_async
    from django.conf import settings
    from django.core.exceptions import BadRequest, PermissionDenied, RequestDataTooBig, SuspiciousOperation
    from django.core.handlers.exception import response_for_exception
    from django.db import connections
    from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
    from django.http.multipartparser import MultiPartParserError
    from django.http.response import HttpResponseBase
    from django.utils.module_loading import import_string
    from django.views.defaults import ERROR_PAGE_TEMPLATE
except ModuleNotFoundError as missing:
    raise ConfigurationError(
        f"semel.http.django needs {missing.name!r}: pip install 'semel[django]'"
    ) from missing

__all__ = ["IdempotencyMiddleware", "ProblemMiddleware", "idempotent", "user_id"]

_WRITES = ("POST", "PATCH", "PUT", "DELETE")
_PAGE = (ERROR_PAGE_TEMPLATE % {"title": "Server Error (500)", "details": ""}).encode()
_REFUSALS = (Http404, PermissionDenied, BadRequest, SuspiciousOperation, MultiPartParserError)
_IMPORTED = ("once", "async_once", "principal", "tenant", "authorize", "key", "stored")


def user_id(request: HttpRequest) -> str | None:
    """The id of the user that Django's authentication has verified; None when nobody is logged in."""
    user = getattr(request, "user", None)
    return str(user.pk) if user is not None and user.is_authenticated else None


async def _async_user_id(request: HttpRequest) -> str | None:
    """The same under ASGI, where looking at `request.user` would ask the database and block the loop."""
    asked = getattr(request, "auser", None)
    if asked is None:
        return user_id(request)
    user = await asked()
    return str(user.pk) if user.is_authenticated else None


class IdempotencyMiddleware:
    """Options come from `settings.SEMEL`, those of the ASGI middleware; resolvers get Django's request."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self.get_response = get_response
        self._is_async = iscoroutinefunction(get_response)
        given = getattr(settings, "SEMEL", None)
        if not isinstance(given, Mapping):
            raise ConfigurationError('SEMEL is missing in the settings: SEMEL = {"once": …, "principal": …}')
        self._plan = _plan(given, is_async=self._is_async, guarded=False)
        if self._is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        if self._is_async:
            return self._acall(request)

        async def view() -> Any:
            return self.get_response(request)

        return run_sync(_answered(self._plan, request, view, _RoutedLook(request)))

    async def _acall(self, request: HttpRequest) -> Any:
        async def view() -> Any:
            return await self.get_response(request)

        return await _answered(self._plan, request, view, _RoutedLook(request))


class ProblemMiddleware:
    """Answers semel's own errors as problems, for views that use the core themselves, as with `within`."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self._get_response = get_response
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        return self._get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        del request
        problem = of_error(error)
        return None if problem is None else _raw(problem_reply(DEFAULT_BASE, problem))


def idempotent(
    *, once: Semel | AsyncSemel, **options: Unpack[DecoratorOptions]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a view, below `login_required` and the like; a class-based one with `method_decorator`.

    A coroutine view needs an AsyncSemel, a plain one a Semel. What it raises for Django to answer (Http404,
    PermissionDenied, …; everything, where failures are kept too) is recorded as Django answers it. The view must not be in a transaction that ends later, as by
    ATOMIC_REQUESTS: the outcome would be recorded before it is one.
    """
    # Made once: `method_decorator` decorates anew for every request.
    is_async = isinstance(once, AsyncSemel)
    colour = "async_once" if is_async else "once"
    plan = _plan({"methods": _WRITES, **options, colour: once}, is_async=is_async, guarded=True)

    def decorate(view: Callable[..., Any]) -> Callable[..., Any]:
        if is_async:
            return _async_view(plan, view)
        if iscoroutinefunction(view):
            raise ConfigurationError(f"{_name(view)} is a coroutine function: give an AsyncSemel as once=")
        return _plain_view(plan, view)

    return decorate


def _async_view(plan: Plan, view: Callable[..., Any]) -> Callable[..., Any]:
    answered = _answered_errors(plan)

    @wraps(view)
    async def async_wrapper(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        # Asked now, not before: `method_decorator` tries its decorators with a plain function first.
        if not _returns_coroutine(view):
            raise ConfigurationError(f"{_name(view)} is no coroutine function: give a Semel as once=")

        async def arun() -> Any:
            try:
                return await view(request, *args, **kwargs)
            except answered as error:
                return await sync_to_async(response_for_exception)(request, error)

        return await _answered(plan, request, arun, _ASYNC_LOOK)

    return async_wrapper


def _plain_view(plan: Plan, view: Callable[..., Any]) -> Callable[..., Any]:
    answered = _answered_errors(plan)

    @wraps(view)
    def wrapper(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        _check_transaction(wrapper)
        if _returns_coroutine(view):
            raise ConfigurationError(f"{_name(view)} is asynchronous: give an AsyncSemel as once=")

        async def run() -> Any:
            try:
                return view(request, *args, **kwargs)
            except answered as error:
                return response_for_exception(request, error)

        return run_sync(_answered(plan, request, run, _LOOK))

    return wrapper


def _answered_errors(plan: Plan) -> tuple[type[Exception], ...]:
    """What Django answers inside of the record: where failures are kept, its 500 too, logged and told as always."""
    return (Exception,) if plan.fallback is not None and plan.fallback.keeps_failures else _REFUSALS


def _returns_coroutine(view: Callable[..., Any]) -> bool:
    """A coroutine function, or what an asynchronous class-based view has for `dispatch`."""
    if iscoroutinefunction(view):
        return True
    bound = view.func if isinstance(view, partial) else view  # as `method_decorator` gives it
    return bool(getattr(getattr(bound, "__self__", None), "view_is_async", False))


def _name(view: Callable[..., Any]) -> str:
    return getattr(view, "__qualname__", repr(view))


def _check_transaction(view: Callable[..., Any]) -> None:
    free = getattr(view, "_non_atomic_requests", ())
    if any(
        known.get("ATOMIC_REQUESTS") and alias not in free for alias, known in connections.settings.items()
    ):
        raise ConfigurationError(
            f"{_name(view)} runs in the transaction of ATOMIC_REQUESTS, which ends after this decorator has recorded "
            "the outcome: use semel.http.django.IdempotencyMiddleware, or put @transaction.non_atomic_requests on the view"
        )


def _plan(given: Mapping[str, Any], *, is_async: bool, guarded: bool) -> Plan:
    options = {
        name: import_string(value) if name in _IMPORTED and isinstance(value, str) and "." in value else value
        for name, value in given.items()
    }
    name = "async_once" if is_async else "once"
    once = options.get(name)
    if once is None:
        right = "an AsyncSemel" if is_async else "a Semel"
        how = "asynchronously (ASGI)" if is_async else "synchronously"
        raise ConfigurationError(f"this runs {how}: give {right} as {name!r} in SEMEL")
    rest = {known: value for known, value in options.items() if known not in ("once", "async_once")}
    if is_async and rest.get("principal") is user_id:
        rest["principal"] = _async_user_id
    return configure(once, "async" if is_async else "sync", rest, guarded=guarded)


async def _answered(
    plan: Plan, request: HttpRequest, view: Callable[[], Awaitable[Any]], look: _DjangoLook
) -> Any:
    entered = await enter(plan, _DjangoRequest(request))
    if isinstance(entered, Reply):
        return _raw(entered)
    if entered is None:
        return await view()
    if not isinstance(entered, First):
        return await _closing(view, entered)
    guard, body = entered.guard, entered.body
    shown = (lambda: _told(guard, view)) if guard.keeps_failures else view
    return await _attended(guard, entered.admitted, lambda: _closing(shown, body), look)


async def _told(guard: Guard, view: Callable[[], Awaitable[Any]]) -> Any:
    """Django's own 500 says nothing of keys, so the problem stands in its place; what a `handler500` or a 500.html made is left."""
    response = await view()
    is_page = response.status_code == 500 and isinstance(response, HttpResponse) and _is_rendered(response)
    return _raw(guard.replies.failed()) if is_page and response.content == _PAGE else response


async def _closing(view: Callable[[], Awaitable[Any]], body: Body) -> Any:
    """The view reads an upload from our file: it is closed when the response is over."""
    try:
        response: Any = await view()
        if not isinstance(response, HttpResponseBase):  # as Django says it, which sees it after us
            raise TypeError(
                f"the view didn't return an HttpResponse object: it returned {type(response).__name__}"
            )
    except BaseException:
        body.close()
        raise
    response._resource_closers.append(body.close)  # type: ignore[attr-defined]  # noqa: SLF001 - where Django closes uploads, too
    return response


async def _attended(
    guard: Guard, admitted: Admitted, view: Callable[[], Awaitable[Any]], look: _DjangoLook
) -> Any:
    """Django cancels the view of a client that has left: it goes on, and a stream that it returns is read to its end."""
    response: Any = None
    has_left = False

    async def running() -> Any:
        nonlocal response
        response = await first_view(guard, admitted, view, look)
        if has_left:
            response.close()
        return response

    try:
        return await admitted.engine.runtime.detach(running())
    except asyncio.CancelledError:
        has_left = True
        if response is not None:
            response.close()
        raise


class _DjangoRequest(EnvironRequest):
    """Django's META has the header names of a WSGI environment under both servers."""

    __slots__ = ("_request",)

    def __init__(self, request: HttpRequest) -> None:
        self._environ = request.META
        self.method = request.method or "GET"
        self.path = request.path
        self.routed = request.path_info
        self.query = request.META.get("QUERY_STRING", "").encode("utf-8", "surrogateescape")
        self._request = request

    def request(self) -> Any:
        return self._request

    async def read(self, limit: int) -> Body | Problem:
        return _body_of(limit, self._request)


def _body_of(limit: int, request: HttpRequest) -> Body | Problem:
    """Django keeps what is read here, or reads it again: the view sees the same request."""
    try:
        if request.content_type == "multipart/form-data":
            return _form_of(limit, request)
        body = Body(limit)
        body.feed(request.body)
    except TooLarge:
        return Problem.of("body-too-large", limit=limit)
    except RequestDataTooBig:
        return Problem.of("body-too-large", limit=settings.DATA_UPLOAD_MAX_MEMORY_SIZE)
    return _whole(request, body)


def _whole(request: HttpRequest, body: Body) -> Body | Problem:
    announced = str(request.META.get("CONTENT_LENGTH") or "0")
    if announced.isdecimal() and int(announced) > body.size:
        body.close()
        return Problem.of("body-incomplete")
    return body


def _form_of(limit: int, request: HttpRequest) -> Body | Problem:
    """An upload is spooled, and given to Django from there; one that somebody has looked at is known by its parts only."""
    body = Body(limit)
    state: Any = request
    if hasattr(state, "_body"):
        body.feed(state._body)  # noqa: SLF001 - it has been read already
        return _whole(request, body)
    if state._read_started:  # noqa: SLF001 - Django tells it nowhere else
        _feed_form(body, request)
        if not body.size and isinstance(state._upload_handlers, list):  # noqa: SLF001 - those of a form that was parsed are fixed
            raise ConfigurationError(
                "somebody has read the body with request.read(), which keeps nothing: what the key stands for cannot be "
                "compared. Read request.body, or request.POST and request.FILES"
            )
        return body
    while chunk := state._stream.read(1 << 16):  # noqa: SLF001 - `read` would say that it was read
        body.feed(chunk)
    state._stream = body.file()  # noqa: SLF001 - Django tells it nowhere else
    return _whole(request, body)


def _feed_form(body: Body, request: HttpRequest) -> None:
    for name, values in request.POST.lists():
        for value in values:
            feed_parts(body, name, str(value))
    for name, files in request.FILES.lists():
        for file in files:
            content = hashlib.sha256()
            for chunk in file.chunks():
                content.update(chunk)
            file.seek(0)
            feed_parts(body, name, file.name or "", file.content_type or "", content.hexdigest())


class _DjangoLook:
    def status(self, response: HttpResponseBase) -> int:
        return response.status_code

    def headers(self, response: HttpResponseBase) -> Headers:
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers.items()]

    def set_headers(self, response: HttpResponseBase, headers: Headers) -> None:
        for name in list(response.headers):
            del response.headers[name]
        for raw, value in headers:
            response.headers[raw.decode("latin-1").title()] = value.decode("latin-1")

    async def body(self, response: HttpResponseBase) -> bytes | None:
        return bytes(response.content) if isinstance(response, HttpResponse) else None

    def postponed(self, response: HttpResponseBase, guard: Guard, run: Run) -> bool:
        if _is_rendered(response):
            return False
        Postponed(guard, run, response, self)
        return True

    def passing(self, response: HttpResponseBase) -> bool:
        del response
        return False  # a decorated view has run

    def tee(self, response: HttpResponseBase, guard: Guard, run: Run, headers: Headers) -> None:
        assert isinstance(response, StreamingHttpResponse)  # noqa: S101 - there is no third kind
        pieces: Any = response.streaming_content
        if run.colour == "async" and not response.is_async:
            pieces = _from_thread(pieces)
        kind: Any = AsyncStream if hasattr(pieces, "__aiter__") else Stream
        # A file is closed when all of it has been read, which may be after Django has closed its response.
        closers: list[Any] = response._resource_closers  # type: ignore[attr-defined]  # noqa: SLF001 - Django tells it nowhere else
        then, closers[:] = tuple(closers), []
        response.streaming_content = kind(guard, run, response.status_code, headers, pieces, then)

    def problem(self, guard: Guard, problem: Problem) -> HttpResponse:
        return _raw(guard.replies.problem(problem))


async def _from_thread(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    iterator = iter(pieces)

    def following() -> bytes | None:
        return next(iterator, None)

    while (piece := await sync_to_async(following)()) is not None:
        yield piece


def _is_rendered(response: HttpResponseBase) -> bool:
    return not hasattr(response, "render") or getattr(response, "is_rendered", True)


class _AsyncLook(_DjangoLook):
    """A client that leaves must not change what is recorded, so nothing is left to be done by Django."""

    def postponed(self, response: HttpResponseBase, guard: Guard, run: Run) -> bool:
        del response, guard, run
        return False

    async def body(self, response: HttpResponseBase) -> bytes | None:
        if not _is_rendered(response):
            # As Django does it: a template may ask the database, which is refused on the loop.
            await sync_to_async(response.render)()  # type: ignore[attr-defined]  # only a template response comes here
        return await super().body(response)


class _RoutedLook(_DjangoLook):
    """Of a middleware: everything is rendered by now, and Django may have found no view for this request."""

    def __init__(self, request: HttpRequest) -> None:
        self._request = request

    def postponed(self, response: HttpResponseBase, guard: Guard, run: Run) -> bool:
        del response, guard, run
        return False

    def passing(self, response: HttpResponseBase) -> bool:
        return response.status_code == 404 and self._request.resolver_match is None


_LOOK, _ASYNC_LOOK = _DjangoLook(), _AsyncLook()


def _raw(reply: Reply) -> HttpResponse:
    response = HttpResponse(reply.body, status=reply.status)
    _LOOK.set_headers(response, reply.headers)
    return response
