"""ASGI's words, and a request as its scope tells it: read once, from bytes, and no further than is asked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from semel.http.body import SPOOL_OVER, Body, TooLarge
from semel.http.problem import Problem

__all__ = [
    "App",
    "ClientLeft",
    "Headers",
    "Message",
    "PlainRequest",
    "Receive",
    "Scope",
    "ScopeRequest",
    "Send",
    "without_bypasses",
]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

# Ways around the body that we must see.
_BYPASSES: Final = frozenset(
    {"http.response.pathsend", "http.response.zerocopysend", "http.response.trailers"}
)


class ClientLeft(Exception):
    """Before the body was complete: there is nothing to do, and nobody to tell."""


class PlainRequest:
    """What resolvers get where Starlette is not installed: `scope`, `method`, `path` and `headers`."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


try:
    from starlette.requests import Request as _Request
except ModuleNotFoundError:
    _Request = PlainRequest  # type: ignore[assignment,misc]  # the same names without the framework


class ScopeRequest:
    """See `semel.http.intake.Incoming`."""

    __slots__ = ("_first", "_receive", "_scope", "method", "path", "query", "routed")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive
        self._first: dict[bytes, bytes] | None = None
        # Browsers send "patch" as it was written; Django and Quart run it as PATCH.
        self.method: str = scope["method"].upper()
        self.path: str = scope["path"]
        self.routed = self.path
        if root := scope.get("root_path"):
            root = root.rstrip("/")
            if root and self.path.startswith(f"{root}/"):
                self.routed = self.path[len(root) :]
            elif root and self.path != root:  # some frameworks take the place of a mount off
                self.path = root + self.path
        self.query: bytes = scope.get("query_string", b"")

    def lines(self, name: bytes) -> list[bytes]:
        known = self._first
        if known is None:
            known = self._first = dict(self._scope["headers"])
        if name not in known:
            return []
        headers = self._scope["headers"]
        if len(known) == len(headers):  # no name is there twice
            return [known[name]]
        return [value for other, value in headers if other == name]

    def has_any(self, names: frozenset[bytes]) -> bool:
        known = self._first
        if known is None:
            known = self._first = dict(self._scope["headers"])
        return not known.keys().isdisjoint(names)  # which looks for the few names, not for all headers

    def request(self) -> Any:
        return _Request(self._scope)

    async def read(self, limit: int) -> Body | Problem:
        known = self._first
        if known is None:
            known = self._first = dict(self._scope["headers"])
        announced = known.get(b"content-length", b"")
        if announced.isdigit() and (len(announced) > 18 or int(announced) > limit):
            return Problem.of(
                "body-too-large", limit=limit
            )  # before it is sent, if its client waits for our word
        message = await self._receive()
        if not message.get("more_body", False) and message["type"] == "http.request":  # nearly every body
            whole = message.get("body", b"")
            if type(whole) is bytes and len(whole) <= limit and len(whole) <= SPOOL_OVER:
                return Body(limit, whole, len(whole))
        body = Body(limit)
        while True:
            if message["type"] == "http.disconnect":
                body.close()
                raise ClientLeft
            try:
                body.feed(message.get("body", b""))
            except TooLarge:
                return Problem.of("body-too-large", limit=limit)
            if not message.get("more_body", False):
                return body
            message = await self._receive()


def without_bypasses(scope: Scope) -> Scope:
    """The scope for an application whose response must be seen."""
    extensions = scope.get("extensions")
    if not extensions or _BYPASSES.isdisjoint(extensions):
        return scope
    kept = {name: value for name, value in extensions.items() if name not in _BYPASSES}
    return {**scope, "extensions": kept}
