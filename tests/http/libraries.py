"""The three clients behind one call, so that a test says once what all of them must do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import requests

from semel.http.client import (
    AsyncIdempotentTransport,
    Delivered,
    IdempotentAdapter,
    IdempotentTransport,
    delivered,
    sending,
)

Library = Literal["httpx", "httpx-async", "requests"]
LIBRARIES: tuple[Library, ...] = ("httpx", "httpx-async", "requests")
TRANSPORT_ERRORS = (httpx.TransportError, requests.RequestException)


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes
    headers: Mapping[str, str]
    how: Delivered | None

    @property
    def report(self) -> Delivered:
        assert self.how is not None
        return self.how


class Caller:
    """One client of a library; options are those of the transport, `wishes` those of one request."""

    def __init__(self, library: Library, *, certificates: bool = False, **options: Any) -> None:
        self.library = library
        self.verify = certificates  # reading them takes longer than most tests
        self.options = {"backoff": (0.0, 0.01), **options}

    def post(self, url: str, *, wishes: Mapping[str, Any] | None = None, **more: Any) -> Reply:
        return self.request("POST", url, wishes=wishes, **more)

    def request(
        self, method: str, url: str, *, wishes: Mapping[str, Any] | None = None, **more: Any
    ) -> Reply:
        if self.library == "requests":
            return self._requests(method, url, wishes or {}, more)
        if wishes is not None:
            more["extensions"] = {"semel": wishes}
        if self.library == "httpx":
            with httpx.Client(
                transport=IdempotentTransport(httpx.HTTPTransport(verify=self.verify), **self.options)
            ) as client:
                return _reply(client.request(method, url, **more))
        return asyncio.run(self._httpx_async(method, url, more))

    async def _httpx_async(self, method: str, url: str, more: dict[str, Any]) -> Reply:
        transport = AsyncIdempotentTransport(httpx.AsyncHTTPTransport(verify=self.verify), **self.options)
        async with httpx.AsyncClient(transport=transport) as client:
            if isinstance(more.get("content"), Iterator):
                more["content"] = _async(more["content"])
            return _reply(await client.request(method, url, **more))

    def _requests(self, method: str, url: str, wishes: Mapping[str, Any], more: dict[str, Any]) -> Reply:
        more.setdefault("timeout", 5)
        more.setdefault("allow_redirects", more.pop("follow_redirects", False))
        if "content" in more:
            more["data"] = more.pop("content")
        with requests.Session() as session, sending(**wishes):
            adapter = IdempotentAdapter(**self.options)
            session.mount("http://", adapter)
            session.mount("https://", adapter)
            return _reply(session.request(method, url, **more))


async def _async(source: Iterator[bytes]) -> Any:
    for chunk in source:
        yield chunk


def _reply(response: Any) -> Reply:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Reply(response.status_code, response.content, headers, delivered(response))
