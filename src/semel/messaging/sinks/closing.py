"""Both ways to close what a sink opened: awaited, or as a plain call from outside of its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from semel.closing import Closeable
from semel.errors import ConfigurationError

__all__ = ["Closing", "close_now", "parted", "shut"]

_PATIENCE: Final = 10.0
_GRACE: Final = 1.0


class Closing(Closeable):
    """`close()` and `with` for what has an `aclose()`. `_loop` is the event loop that its connections belong to."""

    _loop: asyncio.AbstractEventLoop | None = None

    async def aclose(self) -> None:
        """Close what was opened here."""

    def close(self) -> None:
        """As `aclose`, as a plain call: not inside of a running event loop."""
        close_now(self)


def close_now(sink: Any) -> None:
    """Close a sink from outside of the loop that it was used in: there if that still runs, in another thread or not at all. With
    a loop that was closed its connections are over."""
    if _is_running():
        raise ConfigurationError(
            "a plain close() would stop the event loop it is called in: `await …aclose()`, or `async with`"
        )
    close: Callable[[], Awaitable[None]] = sink.aclose
    loop: asyncio.AbstractEventLoop | None = getattr(sink, "_loop", None)
    if loop is None:
        asyncio.run(_awaited(close))
    elif loop.is_running():
        patience = getattr(sink, "patience", _PATIENCE)
        asyncio.run_coroutine_threadsafe(_awaited(close), loop).result(patience)
    elif not loop.is_closed():
        loop.run_until_complete(_awaited(close))


async def shut(client: Any) -> None:
    """Close a client of nats-py. One whose `connect` failed half-way keeps its socket, and so does one that the server left while
    it was closing by itself: its own `close` does nothing then."""
    transport = client._transport  # noqa: SLF001 - nats-py closes it nowhere else
    try:
        await parted(client.close(), getattr(transport, "_io_writer", None))
    finally:
        if transport is not None:
            transport.close()


async def parted(closing: Coroutine[Any, Any, Any], writer: asyncio.StreamWriter | None) -> None:
    """Close a connection politely, or, after a second, as it is: clients write out first what waits to be written, and a broker
    that has stopped takes nothing."""
    task = asyncio.ensure_future(closing)
    try:
        await asyncio.wait({task}, timeout=_GRACE)
    finally:
        if not task.done() and writer is not None:
            writer.transport.abort()
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    await task


async def _awaited(close: Callable[[], Awaitable[None]]) -> None:
    await close()


def _is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
