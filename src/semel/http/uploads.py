"""The body of a FastAPI request: as its dependencies have left it, or read here and kept for the function."""

from __future__ import annotations

import hashlib
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from semel.errors import ConfigurationError
from semel.http.body import Body, TooLarge, feed_parts
from semel.http.problem import Problem
from semel.http.scope import ClientLeft, ScopeRequest

__all__ = ["FastRequest"]


class FastRequest(ScopeRequest):
    """See `semel.http.intake.Incoming`. Dependencies may have read the body by now."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        super().__init__(request.scope, request.receive)
        self._request = request

    def request(self) -> Any:
        return self._request

    async def read(self, limit: int) -> Body | Problem:
        given: Any = self._request
        if hasattr(given, "_body") or getattr(given, "_form", None) is not None:
            return await _body_of(limit, given)
        if type(given).body is not Request.body:  # a route class has its own, to unpack it, say
            return await _body_of(limit, given)
        if given._stream_consumed:  # noqa: SLF001 - it tells that nowhere else
            raise ConfigurationError(
                "a dependency has read the body with request.stream(), which keeps nothing: what the key stands for cannot be "
                "compared. Let it await request.body()"
            )
        # The function has no parameter for it, so nobody has read it: here it goes no further than to the limit (H25).
        try:
            body = await super().read(limit)
        except ClientLeft:
            raise ClientDisconnect from None
        if isinstance(body, Body):
            given._body = body.whole if body.whole is not None else bytes(body.view())  # noqa: SLF001 - as it does
        return body


async def _body_of(limit: int, request: Request) -> Body | Problem:
    """The body that FastAPI has read by now; a form in the order of its fields, files by their content."""
    body = Body(limit)
    try:
        form = getattr(request, "_form", None)
        if form is not None and not hasattr(request, "_body"):
            for name, value in form.multi_items():
                await _feed(body, name, value)
        else:
            body.feed(await request.body())  # which it keeps
    except TooLarge:
        return Problem.of("body-too-large", limit=limit)
    return body


async def _feed(body: Body, name: str, value: Any) -> None:
    if isinstance(value, str):
        feed_parts(body, name, value)
        return
    content = hashlib.sha256()
    await value.seek(0)
    while chunk := await value.read(1 << 16):
        content.update(chunk)
    await value.seek(0)
    feed_parts(body, name, value.filename or "", value.content_type or "", content.hexdigest())
