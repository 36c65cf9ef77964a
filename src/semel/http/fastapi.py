"""FastAPI: a decorator that claims after authentication, authorization and validation, and its OpenAPI.

@app.post("/orders", status_code=201)
@idempotent(once=once, principal="user.id")
async def create_order(order: Order, user: User = Depends(current_user)) -> OrderOut: ...

install(app)   # problem responses for semel's errors, and what the routes promise in /openapi.json
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Any, TypeVar

from semel.errors import ConfigurationError
from semel.http.asgi import _Capture, _Incoming, _looked_at
from semel.http.body import Body, TooLarge
from semel.http.config import Plan, configure
from semel.http.guard import Admitted, Guard, Keyed
from semel.http.intake import Asked, identify, keyed_of
from semel.http.openapi import describe
from semel.http.problem import ANSWERED, DEFAULT_BASE, Problem, of_error
from semel.http.reply import first_headers, problem_reply, replay_reply
from semel.http.snapshot import Snapshot
from semel.keys import field_path
from semel.run import Run, _current

try:
    from fastapi import FastAPI, Request, Response
    from fastapi.datastructures import DefaultPlaceholder
    from fastapi.routing import APIRoute, serialize_response
    from starlette.background import BackgroundTasks
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import StreamingResponse
    from starlette.types import Receive, Scope, Send
except ModuleNotFoundError as missing:
    raise ConfigurationError(
        f"semel.http.fastapi needs {missing.name!r}: pip install 'semel[fastapi]'"
    ) from missing

__all__ = ["idempotent", "install"]

F = TypeVar("F", bound=Callable[..., Any])
_REQUEST, _RESPONSE = "semel_request", "semel_response"
_WRITES = ("POST", "PATCH", "PUT", "DELETE")


def idempotent(*, once: Any, **options: Any) -> Callable[[F], F]:
    """Decorate a path operation, below `@app.post(...)`. Options as the ASGI middleware's.

    `principal` may also be a field path over the function's arguments, such as "user.id". The claim comes after
    FastAPI has authenticated, authorized and validated, on replays too, so neither `authorize` nor
    `authenticated_outside` is needed.
    """
    given = dict(options)
    given.setdefault("methods", _WRITES)
    path = given.get("principal")
    reads = field_path(path) if isinstance(path, str) else None
    if reads is not None:
        given["principal"] = _of_arguments  # asked with the arguments instead of the request
    plan = configure(once, "async", given, guarded=True)

    def decorate(fn: F) -> F:
        route = _Route(fn, plan, reads)
        update_wrapper(route.endpoint, fn)
        del route.endpoint.__wrapped__  # type: ignore[attr-defined]  # nobody may look through to a plain function
        route.endpoint.__signature__ = route.signature()  # type: ignore[attr-defined]
        route.endpoint.__semel__ = plan.fallback  # type: ignore[attr-defined]
        return typing.cast("F", route.endpoint)

    return decorate


def _of_arguments(request: Any) -> Any:
    return request.state._semel_principal  # noqa: SLF001 - put there by _Route


class _Route:
    """One decorated function."""

    def __init__(
        self, fn: Callable[..., Any], plan: Plan, principal: Callable[[Mapping[str, Any]], Any] | None
    ) -> None:
        self._fn = fn
        self._plan = plan
        self._principal = principal
        self._own = inspect.signature(fn)
        self._async = inspect.iscoroutinefunction(fn)
        self._request = self._declared(Request)
        self._response = self._declared(Response)
        self._tasks: set[asyncio.Task[Any]] = set()

        async def endpoint(**values: Any) -> Any:
            return await self._call(values)

        self.endpoint = endpoint

    def _declared(self, kind: type) -> str | None:
        return next((name for name, hint in self._hints().items() if hint is kind), None)

    def _hints(self) -> dict[str, Any]:
        try:
            return typing.get_type_hints(self._fn, include_extras=True)
        except NameError:  # a name that exists for type checkers only: FastAPI will say what it thinks of it
            return {name: parameter.annotation for name, parameter in self._own.parameters.items()}

    def signature(self) -> inspect.Signature:
        """The function's own, with its annotations read here, and what we need besides."""
        hints = self._hints()
        mine = [
            parameter.replace(
                annotation=hints.get(name, parameter.annotation), kind=inspect.Parameter.KEYWORD_ONLY
            )
            for name, parameter in self._own.parameters.items()
        ]
        for name, declared, kind in (
            (_REQUEST, self._request, Request),
            (_RESPONSE, self._response, Response),
        ):
            if declared is None:
                mine.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind))
        returned = hints.get("return", self._own.return_annotation)
        return inspect.Signature(mine, return_annotation=returned)

    async def _call(self, values: dict[str, Any]) -> Any:
        request: Request = values[self._request] if self._request else values.pop(_REQUEST)
        draft: Response = values[self._response] if self._response else values.pop(_RESPONSE)
        incoming = _FastIncoming(request)
        asked = identify(self._plan, incoming)
        if asked is None:
            return await self._run(values)
        if isinstance(asked, Problem):
            return _problem(self._plan.fallback, asked)
        if self._principal is not None:
            request.state._semel_principal = self._principal(values)  # noqa: SLF001
        known = await keyed_of(self._plan, asked, incoming, lambda: _body_of(asked.guard, request))
        if isinstance(known, Problem):
            return _problem(asked.guard, known)
        if isinstance(known, Body):
            known.close()
            return await self._run(values)
        keyed, body = known
        body.close()
        return await self._keyed(asked, keyed, request, draft, values)

    async def _keyed(
        self, asked: Asked, keyed: Keyed, request: Request, draft: Response, values: dict[str, Any]
    ) -> Any:
        guard = asked.guard
        admitted = await guard.admit(keyed)
        if isinstance(admitted, Admitted):
            return await self._detached(self._first(guard, admitted, request, draft, values))
        if admitted is None:  # fail_open
            return await self._run(values)
        if isinstance(admitted, Snapshot):
            headers, content = replay_reply(guard.rules, admitted)
            return _raw(admitted.status, headers, content)
        return _problem(guard, admitted)

    async def _run(self, values: dict[str, Any]) -> Any:
        if self._async:
            return await self._fn(**values)
        return await run_in_threadpool(self._fn, **values)

    async def _detached(self, running: Any) -> Any:
        task = asyncio.get_running_loop().create_task(running)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_looked_at)
            raise

    async def _first(
        self, guard: Guard, admitted: Admitted, request: Request, draft: Response, values: dict[str, Any]
    ) -> Response:
        run = guard.begin(admitted)
        token = _current.set(run)
        try:
            if (problem := await guard.resumed(run)) is not None:
                return _problem(guard, problem)
            try:
                response = await _rendered(await self._run(values), request, draft)
            except Exception as error:  # noqa: BLE001 - whatever it is, a handler of the application may answer it
                response = await _handled(error, request)  # raises it again when nobody handles it
            if isinstance(response, StreamingResponse) or not hasattr(response, "body"):
                return _Tee(response, guard, run)
            settled = await guard.settle(
                run, response.status_code, list(response.raw_headers), bytes(response.body)
            )
            if settled is not None:
                return _problem(guard, settled)
            response.raw_headers[:] = first_headers(
                guard.rules, response.status_code, list(response.raw_headers)
            )
            return response
        except Exception as error:
            await guard.fail(run, error)
            raise
        except BaseException as error:
            await guard.lose(run, error)
            raise
        finally:
            _current.reset(token)


class _FastIncoming(_Incoming):
    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        super().__init__(request.scope)
        self._request = request

    def request(self) -> Any:
        return self._request


class _Tee(Response):
    """A streamed response whose outcome is recorded while it is sent."""

    def __init__(self, inner: Response, guard: Guard, run: Run) -> None:
        super().__init__(status_code=inner.status_code)
        self._inner = inner
        self._guard = guard
        self._run = run
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        guard, run = self._guard, self._run
        with Body(0) as nothing:
            capture = _Capture(guard, run, send, nothing)
            self._inner.background = self._inner.background or self.background
            try:
                await self._inner(scope, capture.receive, capture.send)
                if not capture.settled:
                    raise RuntimeError("the response was not complete")
            except Exception as error:
                if not capture.settled:
                    await guard.fail(run, error)
                raise
            except BaseException as error:
                if not capture.settled:
                    await guard.lose(run, error)
                raise
            finally:
                capture.finish()


# ----------------------------------------------------------------------------------------------------- rendering


async def _rendered(result: Any, request: Request, draft: Response) -> Response:
    """What FastAPI would make of a path operation's result: its model, class, status and the headers of the draft."""
    if isinstance(result, Response):
        return result
    route: APIRoute = request.scope["route"]
    fast = route.response_field is not None and isinstance(route.response_class, DefaultPlaceholder)
    content = await serialize_response(
        field=route.response_field,
        response_content=result,
        include=route.response_model_include,
        exclude=route.response_model_exclude,
        by_alias=route.response_model_by_alias,
        exclude_unset=route.response_model_exclude_unset,
        exclude_defaults=route.response_model_exclude_defaults,
        exclude_none=route.response_model_exclude_none,
        dump_json=fast,
    )
    status = draft.status_code or route.status_code or 200
    if fast:
        response = Response(content, status_code=status, media_type="application/json")
    else:
        kind = route.response_class
        made = kind.value if isinstance(kind, DefaultPlaceholder) else kind
        response = made(content, status_code=status)
    if status < 200 or status in (204, 205, 304):
        response.body = b""
        response.raw_headers[:] = [pair for pair in response.raw_headers if pair[0] != b"content-length"]
    response.headers.raw.extend(draft.headers.raw)
    return response


async def _handled(error: Exception, request: Request) -> Response:
    """The response that the application's own exception handler gives; without one the error goes on its way."""
    by_class, by_status = request.scope.get("starlette.exception_handlers", ({}, {}))
    handler = by_status.get(getattr(error, "status_code", None))
    for cls in type(error).__mro__:
        handler = handler or (by_class.get(cls) if cls is not Exception else None)
    if handler is None:
        raise error
    if inspect.iscoroutinefunction(handler):
        response: Response = await handler(request, error)
    else:
        response = await run_in_threadpool(handler, request, error)
    response.background = (
        response.background or BackgroundTasks()
    )  # FastAPI runs no tasks after an error either
    return response


async def _body_of(guard: Guard, request: Request) -> Body | Problem:
    """The body that FastAPI has read by now; a form in the order of its fields, files by their content."""
    body = Body(guard.rules.max_body)
    try:
        form = getattr(request, "_form", None)
        if form is not None and not hasattr(request, "_body"):
            for name, value in form.multi_items():
                await _feed(body, name, value)
        else:
            body.feed(await request.body())
    except TooLarge:
        return Problem.of("body-too-large", limit=guard.rules.max_body)
    return body


async def _feed(body: Body, name: str, value: Any) -> None:
    parts = (
        [name, value] if isinstance(value, str) else [name, value.filename or "", value.content_type or ""]
    )
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        body.feed(b"%d:" % len(raw) + raw)
    if not isinstance(value, str):
        await value.seek(0)
        while chunk := await value.read(1 << 16):
            body.feed(chunk)
        await value.seek(0)


def _raw(status: int, headers: list[tuple[bytes, bytes]], content: bytes) -> Response:
    response = Response(
        content, status_code=status, background=BackgroundTasks()
    )  # none, also none of dependencies
    response.raw_headers[:] = headers
    return response


def _problem(guard: Guard | None, problem: Problem) -> Response:
    assert guard is not None  # noqa: S101 - a decorated route has one
    return _raw(problem.status, *problem_reply(guard.rules.problem_base, problem))


# ----------------------------------------------------------------------------------------------------------- app


def install(app: FastAPI) -> None:
    """Answer semel's own errors as problems, and describe the decorated routes in the app's OpenAPI."""

    async def answer(request: Request, error: Exception) -> Response:
        del request
        problem = of_error(error)
        if problem is None:
            raise error
        return _raw(problem.status, *problem_reply(DEFAULT_BASE, problem))

    for kind in ANSWERED:
        app.add_exception_handler(kind, answer)
    inner = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = inner()
            describe(
                schema,
                [(route.path, route.methods or set(), guard.rules) for route, guard in _decorated(app)],
            )
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI documents this very way


def _decorated(app: FastAPI) -> list[tuple[APIRoute, Guard]]:
    found = []
    for route in app.routes:
        guard = getattr(getattr(route, "endpoint", None), "__semel__", None)
        if isinstance(route, APIRoute) and guard is not None:
            found.append((route, guard))
    return found
