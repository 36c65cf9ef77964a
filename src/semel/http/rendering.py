"""What FastAPI makes of results and errors: the very responses that it would have sent, so that they can be recorded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from fastapi import Request, Response, routing
from fastapi.datastructures import DefaultPlaceholder
from fastapi.routing import APIRoute, serialize_response
from starlette._utils import is_async_callable
from starlette.background import BackgroundTasks
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware

from semel.http.reply import Reply

__all__ = ["ANSWER", "handled", "raw", "rendered", "unhandled"]

ANSWER: Final = (
    "semel.answer"  # in a scope: an error (None: whichever comes) and the response that was recorded for it
)
# What newer versions have: routes of an included router that are not copied, and models written as JSON directly.
_included_as: Callable[[Any], Any] = getattr(routing, "_get_scope_effective_route_context", lambda _: None)
_WRITES_JSON: Final = "dump_json" in inspect.signature(serialize_response).parameters


async def rendered(result: Any, request: Request, draft: Response) -> Response:
    """What FastAPI would make of a path operation's result: its model, class, status and the headers of the draft."""
    if isinstance(result, Response):
        return result
    route: APIRoute = _included_as(request.scope) or request.scope["route"]
    is_default = isinstance(route.response_class, DefaultPlaceholder)
    fast = _WRITES_JSON and is_default and route.response_field is not None
    options: dict[str, Any] = {"dump_json": True} if fast else {}
    content = await serialize_response(
        field=route.response_field,
        response_content=result,
        include=route.response_model_include,
        exclude=route.response_model_exclude,
        by_alias=route.response_model_by_alias,
        exclude_unset=route.response_model_exclude_unset,
        exclude_defaults=route.response_model_exclude_defaults,
        exclude_none=route.response_model_exclude_none,
        **options,
    )
    status = draft.status_code or route.status_code
    given: dict[str, Any] = (
        {} if status is None else {"status_code": status}
    )  # some classes have a status of their own
    if fast:
        response = Response(content, media_type="application/json", **given)
    else:
        kind: Any = route.response_class
        response = (kind.value if isinstance(kind, DefaultPlaceholder) else kind)(content, **given)
    if response.status_code < 200 or response.status_code in (204, 205, 304):
        response.body = b""
        response.raw_headers[:] = [pair for pair in response.raw_headers if pair[0] != b"content-length"]
    response.headers.raw.extend(draft.headers.raw)
    return response


async def handled(error: Exception, request: Request, *, last: bool) -> Response | None:
    """The response that the application's own exception handler gives; None when nobody handles it.

    Starlette will ask that handler when the error has passed the dependencies: it must then get the same response,
    because that one is recorded, so the handler is told to look for it. `last`: also the one for errors that nobody
    else handles.
    """
    by_class, by_status = request.scope.get("starlette.exception_handlers", ({}, {}))
    handlers: dict[Any, Any] = by_class
    name: Any = next((cls for cls in type(error).__mro__ if cls in by_class), None)
    if isinstance(error, HTTPException) and error.status_code in by_status:
        handlers, name = by_status, error.status_code
    if name is None:
        return await unhandled(error, request) if last else None
    handler = handlers[name]
    if not isinstance(handler, _Handler):
        handler = handlers[name] = _Handler(handler)
    return await handler.asked(request, error)


async def unhandled(error: Exception, request: Request) -> Response | None:
    """What the application's handler of 500 or Exception makes of an error. None: it has none, and the answer is ours to make.

    It stands outside of everything, in Starlette's outermost middleware. While that one debugs, it asks nobody. Where there is
    none, what was recorded is to be sent all the same: a handler stands in that knows it, and is Starlette's own otherwise.
    """
    server: Any = getattr(request.scope.get("app"), "middleware_stack", None)
    if not isinstance(server, ServerErrorMiddleware) or server.debug:
        return None
    handler: Any = server.handler
    if handler is None or isinstance(handler, _Plain):
        vars(server)["handler"] = handler or _Plain(server.error_response)
        return None
    if not isinstance(handler, _Handler):
        handler = _Handler(handler)
        vars(server)["handler"] = handler
    response: Response | None = await handler.asked(request, error)
    return response


class _Handler:
    """An exception handler of the application, asked once for each error."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self._handler = handler

    async def __call__(self, request: Request, error: Exception) -> Response | None:
        known = request.scope.get(ANSWER)
        if known is not None and (known[0] is error or known[0] is None):
            answer: Response = known[1]
            return answer
        return await self.asked(request, error)

    async def asked(self, request: Request, error: Exception) -> Response | None:
        response: Response | None
        if is_async_callable(self._handler):
            response = await self._handler(request, error)
        else:
            response = await run_in_threadpool(self._handler, request, error)
        return response


class _Plain(_Handler):
    """In place of no handler at all."""

    async def asked(self, request: Request, error: Exception) -> Response | None:
        response: Response | None = self._handler(request, error)
        return response


def raw(reply: Reply) -> Response:
    """A response of ours. No background tasks, also none of dependencies."""
    response = Response(reply.body, status_code=reply.status, background=BackgroundTasks())
    response.raw_headers[:] = reply.headers
    return response
