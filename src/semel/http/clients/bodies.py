"""A request's body, kept so that it can be sent again: bytes, or a stream that is spooled up to a limit."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator

from semel.http.body import Body

__all__ = ["Parcel", "Steps", "pack", "wrap"]


class Parcel:
    """What is sent. Over the limit (`repeatable` is False) the rest of the stream follows, once."""

    __slots__ = ("body", "over", "raw", "repeatable")

    def __init__(
        self, *, raw: bytes | None = None, body: Body | None = None, over: bytes | None = None
    ) -> None:
        self.raw = raw
        self.body = body
        self.over = over
        self.repeatable = over is None

    def chunks(self) -> Iterator[bytes]:
        """All that was kept, from the beginning; not the rest of a stream that was too long."""
        if self.raw is not None:
            yield self.raw
        if self.body is not None:
            yield from self.body.chunks()
        if self.over is not None:
            yield self.over

    @property
    def in_memory(self) -> bytes | None:
        """All of what was a stream, where it is short."""
        return self.body.whole if self.body is not None and self.repeatable else None

    def whole(self) -> Body:
        """To be compared with another one."""
        return wrap(self.raw or b"") if self.body is None else self.body

    def close(self) -> None:
        if self.body is not None:
            self.body.close()


class Steps:
    """A plain iterator in the clothes of an async one, for the one body of both colours; it never suspends."""

    __slots__ = ("_source",)

    def __init__(self, source: Iterator[bytes]) -> None:
        self._source = source

    def __iter__(self) -> Iterator[bytes]:
        return self._source

    def __aiter__(self) -> Steps:
        return self

    async def __anext__(self) -> bytes:
        try:
            return next(self._source)
        except StopIteration:
            raise StopAsyncIteration from None


def wrap(raw: bytes) -> Body:
    body = Body(sys.maxsize)
    body.feed(raw)
    return body


async def pack(source: AsyncIterator[bytes], most: int) -> Parcel:
    """Read `source` up to `most` bytes. What comes after that is left in it, for the caller to send behind the parcel."""
    body = Body(sys.maxsize)
    async for chunk in source:
        if body.size + len(chunk) > most:
            return Parcel(body=body, over=chunk)
        body.feed(chunk)
    return Parcel(body=body)
