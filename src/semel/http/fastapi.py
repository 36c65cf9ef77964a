"""FastAPI: a decorator that claims after authentication, authorization and validation, and its OpenAPI.

@app.post("/orders", status_code=201)
@idempotent(once=once, principal="user.id")
async def create_order(order: Order, user: User = Depends(current_user)) -> OrderOut: ...

install(app)   # problem responses for semel's errors, and what the routes promise in /openapi.json
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import typing
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from contextvars import ContextVar
from functools import update_wrapper
from types import TracebackType
from typing import Any, TypeVar, Unpack

from semel.errors import ConfigurationError, InvalidKey
from semel.http.capture import Capture, looked_at
from semel.http.config import Plan, configure
from semel.http.guard import Admitted, Guard
from semel.http.intake import First, enter
from semel.http.openapi import describe
from semel.http.options import FastAPIOptions
from semel.http.order import check_order, guards
from semel.http.problem import ANSWERED, DEFAULT_BASE, Problem, of_error
from semel.http.reply import Reply, problem_reply
from semel.keys import FieldPath
from semel.once import AsyncSemel
from semel.run import Run, _current

try:
    from anyio import CancelScope
    from fastapi import FastAPI, Request, Response, routing
    from starlette.concurrency import run_in_threadpool
    from starlette.types import Receive, Scope, Send

    from semel.http.rendering import ANSWER, handled, raw, rendered, unhandled
    from semel.http.uploads import FastRequest
except ModuleNotFoundError as missing:
    raise ConfigurationError(
        f"semel.http.fastapi needs {missing.name!r}: pip install 'semel[fastapi]'"
    ) from missing

__all__ = ["idempotent", "install"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_REQUEST, _RESPONSE = "semel_request", "semel_response"
# What newer versions have: routes of an included router that are not copied.
_each_route: Callable[[Any], Any] = getattr(routing, "iter_route_contexts", iter)
_log = logging.getLogger("semel.http")
_arguments: ContextVar[Mapping[str, Any]] = ContextVar("semel_arguments")
_WRITES = ("POST", "PATCH", "PUT", "DELETE")


def idempotent(*, once: AsyncSemel, **options: Unpack[FastAPIOptions]) -> Callable[[F], F]:
    """Decorate a path operation, below `@app.post(...)`. Options as the ASGI middleware's.

    `principal` and `tenant` may also be field paths over the function's arguments, such as "user.id". The claim comes after
    FastAPI has authenticated, authorized and validated, on replays too, so neither `authorize` nor
    `authenticated_outside` is needed.
    """
    given: dict[str, Any] = {**options}
    given.setdefault("methods", _WRITES)
    paths = [_Path(name, given[name]) for name in ("principal", "tenant") if isinstance(given.get(name), str)]
    plan = configure(once, "async", given | {path.option: path for path in paths}, guarded=True)

    def decorate(fn: F) -> F:
        route = _Route(fn, plan)
        for path in paths:
            path.check(fn)
        update_wrapper(route.endpoint, fn)
        del route.endpoint.__wrapped__  # type: ignore[attr-defined]  # nobody may look through to a plain function
        route.endpoint.__signature__ = route.signature()  # type: ignore[attr-defined]  # functions take attributes
        route.endpoint.__semel__ = plan.fallback  # type: ignore[attr-defined]  # functions take attributes
        guards(route.endpoint, fn)
        return typing.cast("F", route.endpoint)

    return decorate


class _Path:
    """A resolver that looks at the function's arguments instead of the request."""

    def __init__(self, option: str, path: str) -> None:
        self.option = option
        self._read = FieldPath(path)

    def check(self, fn: Callable[..., Any]) -> None:
        name, known = self._read.root, inspect.signature(fn).parameters
        if name not in known:
            raise ConfigurationError(
                f"{self.option}={self._read.text!r} begins with {name!r}, and {fn.__qualname__} has no such parameter: it has "
                f"{', '.join(known) or 'none'}; or give a function of the request"
            )

    def __call__(self, request: Any) -> Any:
        """What the path leads to; None, and so nobody who is known, where it leads nowhere: that is no fault of the key's."""
        del request
        try:
            return self._read(_arguments.get())
        except InvalidKey as error:
            _log.warning("%s= of a request is not known: %s", self.option, error)
            return None


def _is(kind: Callable[[Any], bool], fn: Callable[..., Any]) -> bool:
    """As FastAPI looks: through wrappers, and into objects that are called."""
    bare = inspect.unwrap(fn)
    return kind(bare) or kind(getattr(bare, "__call__", None))  # noqa: B004 - the method itself is looked at


class _Route:
    """One decorated function."""

    def __init__(self, fn: Callable[..., Any], plan: Plan) -> None:
        if _is(inspect.isgeneratorfunction, fn) or _is(inspect.isasyncgenfunction, fn):
            raise ConfigurationError(
                f"{fn.__qualname__} yields its response, and idempotent() needs to see one returned: give the generator "
                "to a StreamingResponse and return that, or use semel.http.asgi.IdempotencyMiddleware"
            )
        self._fn = fn
        self._plan = plan
        self._own = inspect.signature(fn)
        self._async = inspect.iscoroutinefunction(fn)
        self._request = self._declared(Request)
        self._response = self._declared(Response)

        async def endpoint(*args: Any, **values: Any) -> Any:
            if args or (self._request or _REQUEST) not in values:
                raise ConfigurationError(
                    f"{fn.__qualname__} is guarded by idempotent(), which reads the key from a request, and was called without one: "
                    "ask the application (a test client does), or give the plain function a name of its own and call that"
                )
            return await self._call(values)

        self.endpoint = endpoint

    def _declared(self, kind: type) -> str | None:
        return next((name for name, hint in self._hints().items() if hint is kind and name != "return"), None)

    def _hints(self) -> dict[str, Any]:
        known = {name: parameter.annotation for name, parameter in self._own.parameters.items()}
        known["return"] = self._own.return_annotation
        return {name: self._hint(name, hint) for name, hint in known.items()}

    def _hint(self, name: str, hint: Any) -> Any:
        """An annotation as FastAPI would read it; one that exists for type checkers only stays text."""
        holder = type("holder", (), {"__annotations__": {name: hint}})
        bare = inspect.unwrap(self._fn)  # the names around a wrapper are those of its own module
        try:
            known = typing.get_type_hints(holder, getattr(bare, "__globals__", {}), include_extras=True)[name]
        except (NameError, TypeError):
            return hint
        return None if known is type(None) else known

    def signature(self) -> inspect.Signature:
        """The function's own, with its annotations read here, and what we need besides."""
        hints = self._hints()
        mine = [
            parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in self._own.parameters.items()
        ]
        for name, declared, kind in (
            (_REQUEST, self._request, Request),
            (_RESPONSE, self._response, Response),
        ):
            if declared is None:
                mine.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind))
        return inspect.Signature(mine, return_annotation=hints["return"])

    async def _call(self, values: dict[str, Any]) -> Any:
        request: Request = values[self._request] if self._request else values.pop(_REQUEST)
        draft: Response = values[self._response] if self._response else values.pop(_RESPONSE)
        token = _arguments.set(values)
        try:
            entered = await enter(self._plan, FastRequest(request))
        finally:
            _arguments.reset(token)
        if isinstance(entered, Reply):
            return raw(entered)
        if entered is None:
            return await self._run(values)
        if not isinstance(entered, First):
            entered.close()
            return await self._run(values)
        entered.body.close()
        return await _uninterrupted(self._first(entered.guard, entered.admitted, request, draft, values))

    async def _run(self, values: dict[str, Any]) -> Any:
        if self._async:
            return await self._fn(**values)
        result = await run_in_threadpool(self._fn, **values)
        # A plain function around a coroutine function, or an object that is called: FastAPI awaits what it returns.
        return await result if inspect.isawaitable(result) else result

    async def _first(
        self, guard: Guard, admitted: Admitted, request: Request, draft: Response, values: dict[str, Any]
    ) -> Response:
        run = guard.begin(admitted)
        attempt = _Attempt(guard, run, request)
        token = _current.set(run.weak)
        try:
            if (problem := await guard.resumed(run)) is not None:
                attempt.settled = True
                return raw(guard.replies.problem(problem))
            result = await self._run(values)
            try:
                return _Recorded(await rendered(result, request, draft), attempt)
            except Exception as error:  # noqa: BLE001 - raised when the dependencies have ended: see `_Attempt`
                return _Unrendered(error, attempt)
        except asyncio.CancelledError as error:
            if not run.lease_lost:
                raise
            attempt.settled = True  # another owner has the key: that is an answer
            if (problem := await guard.lose(run, error)) is None:
                raise
            return raw(guard.replies.problem(problem))
        finally:
            _current.reset(token)


async def _uninterrupted(running: Coroutine[Any, Any, T]) -> T:
    """A client that leaves changes nothing: not the handler, nor how its dependencies end, nor the record.

    A server or middleware that cancels the request of such a client is heard when the handler has ended by itself.
    """
    task = asyncio.get_running_loop().create_task(running)
    with CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait((task,))
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if current is not None:
                    current.uncancel()
    return task.result()  # raises CancelledError when the handler itself was cancelled: the process is ending


async def _sent(running: Coroutine[Any, Any, None], left: Callable[[], None]) -> None:
    """Send and record. Whoever is cancelled meanwhile stops sending (`left`) and leaves when the outcome is recorded."""
    task = asyncio.get_running_loop().create_task(running)
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        left()
        with CancelScope(shield=True):
            while not task.done():
                with suppress(asyncio.CancelledError):  # again: it is raised below, once
                    await asyncio.wait((task,))
        if not task.cancelled() and (error := task.exception()) is not None:
            looked_at(error)
        raise
    task.result()


class _Attempt:
    """A first execution from its claim to its record.

    FastAPI ends `Depends(..., scope="function")` between the function and its response, and shows an error to all
    dependencies, which may make another one of it. So the outcome is recorded when the response is about to be sent,
    and where it never is, this looks last of all at what became of the error: that is what the client is told.

    A function that has returned has had its effect, and is not run again. Where FastAPI can make no response of its result,
    dependencies end as after every success, so that nothing is rolled back that the record calls done; the error is raised
    when they have.
    """

    def __init__(self, guard: Guard, run: Run, request: Request) -> None:
        self.guard = guard
        self.run = run
        self.settled = False
        self.status = 200
        self.headers: list[tuple[bytes, bytes]] | None = None
        self.unrendered: Exception | None = None
        self._request = request
        self._raised: BaseException | None = None
        stack: AsyncExitStack = request.scope["fastapi_inner_astack"]
        dependencies = stack.pop_all()
        stack.push_async_exit(self._left)
        stack.push_async_exit(dependencies)
        stack.push(self._saw)

    def _saw(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        del kind, trace
        self._raised = error
        return False

    async def _left(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        del kind, trace
        if not self.settled:
            self.settled = True
            ending: Coroutine[Any, Any, object]
            if error is not None:
                ending = self._end(error)
            elif isinstance(self._raised, Exception):
                ending = self._swallowed(self._raised)
            else:
                # Somebody sent another response in place of ours: what was done is not done again.
                ending = self.guard.replaced(self.run, self.status, self.headers)
            await _uninterrupted(ending)
        elif self.unrendered is not None and error is None:
            raise self.unrendered
        return False

    async def _end(self, error: BaseException) -> None:
        if not isinstance(error, Exception):
            await self.guard.lose(self.run, error)
            return
        asked = handled(error, self._request, last=self.guard.keeps_failures)
        await self._failed(error, asked, error)

    async def _swallowed(self, error: Exception) -> None:
        """A dependency has swallowed it: FastAPI answers 500, for an error of its own that does not exist yet."""
        asked = unhandled(error, self._request) if self.guard.keeps_failures else None
        await self._failed(error, asked, None)

    async def _failed(
        self, error: Exception, asked: Awaitable[Response | None] | None, told: Exception | None
    ) -> None:
        """The function failed. `asked`: the application's own handler; it will be asked again, for `told`."""
        try:
            response = None if asked is None else await asked
        except Exception:
            await self.guard.fail(
                self.run, error
            )  # the handler fails too: what became of the function is known
            raise
        if response is not None:
            await self._answer(told, response)
        elif (reply := await self.guard.fail(self.run, error)) is not None:
            self._request.scope[ANSWER] = (told, raw(reply))

    async def _answer(self, error: Exception | None, response: Response) -> None:
        """Record what the application's own handler makes of the error, and have the very same sent."""
        guard, headers = self.guard, list(response.raw_headers)
        if hasattr(response, "body"):
            sent = await guard.settle(self.run, response.status_code, headers, bytes(response.body))
            if isinstance(sent, Problem):
                answer = raw(guard.replies.problem(sent))
            else:
                response.raw_headers[:] = sent
                answer = response
        else:
            self.settled = False
            answer = _Recorded(response, self)
        self._request.scope[ANSWER] = (error, answer)


class _Recorded(Response):
    """A response whose outcome is recorded before it is sent, or while it is if it is a stream."""

    def __init__(self, inner: Response, attempt: _Attempt) -> None:
        super().__init__(status_code=inner.status_code)
        # A route class may look at them, or add to them.
        self.raw_headers = inner.raw_headers
        self.body = getattr(inner, "body", b"")
        self._inner = inner
        self._attempt = attempt
        attempt.status, attempt.headers = inner.status_code, list(inner.raw_headers)
        self.background = None  # FastAPI puts the function's tasks here

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        self._attempt.settled = True  # by the capture from here on
        self._inner.background = self._inner.background or self.background
        capture = Capture(self._attempt.guard, self._attempt.run, scope, send, None, can_leave=True)
        await _sent(capture.around(self._inner), capture.leave)


class _Unrendered(Response):
    """In place of a response that cannot be made: what was done is recorded, and nothing is sent before the error is raised."""

    def __init__(self, error: Exception, attempt: _Attempt) -> None:
        super().__init__(status_code=500)
        self._error = error
        self._attempt = attempt
        attempt.status = 0  # nobody was told one

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive, send
        attempt = self._attempt
        attempt.settled, attempt.unrendered = True, self._error
        problem = await _uninterrupted(attempt.guard.replaced(attempt.run, 0))
        if problem is not None and problem.kind.name == "in-progress":
            raise self._error  # another owner has the key: dependencies roll back


# ----------------------------------------------------------------------------------------------------------- app


def install(app: FastAPI) -> None:
    """Answer semel's own errors as problems, and describe the decorated routes in the app's OpenAPI.

    Raises ConfigurationError for a route whose decorators are in the wrong order, now or, added later, when the app starts.
    """

    async def answer(request: Request, error: Exception) -> Response:
        del request
        problem = of_error(error)
        if problem is None:
            raise error
        return raw(problem_reply(DEFAULT_BASE, problem))

    for kind in ANSWERED:
        app.add_exception_handler(kind, answer)
    inner = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = inner()
            describe(
                schema,
                [
                    (route.path_format, route.methods or set(), guard.rules)
                    for route, guard in _decorated(app)
                ],
            )
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI documents this very way
    _check_routes(app)
    build = app.build_middleware_stack

    def checked() -> Any:
        _check_routes(app)
        return build()

    app.build_middleware_stack = checked  # type: ignore[method-assign]  # asked for once, when the app starts


def _check_routes(app: FastAPI) -> None:
    routes = _each_route(app.routes)
    check_order(route.endpoint for route in routes if getattr(route, "endpoint", None) is not None)


def _decorated(app: FastAPI) -> Iterator[tuple[Any, Guard]]:
    for route in _each_route(app.routes):
        guard = getattr(getattr(route, "endpoint", None), "__semel__", None)
        if guard is not None:
            yield route, guard
