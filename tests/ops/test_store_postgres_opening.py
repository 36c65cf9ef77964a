"""A PostgreSQL connection whose caller has left, or whose caller's time is over, while it was being made."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from semel.stores.postgres import asyncpg as asyncpg_links
from semel.stores.postgres.asyncpg import AsyncpgSource
from semel.stores.postgres.home import LoopWorld, Pool
from semel.stores.postgres.link import NotReached


async def _cancelled(source: AsyncpgSource, asked: asyncio.Event) -> None:
    opening = asyncio.ensure_future(source.open(5))
    await asked.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening


async def _too_late(source: AsyncpgSource, _: asyncio.Event) -> None:
    with pytest.raises(NotReached, match=r"no connection within 0\.01 s"):
        await source.open(0.01)


@pytest.mark.parametrize("leave", [_cancelled, _too_late])
def test_a_connection_that_fails_after_its_caller_has_left_is_nobodys_error(
    leave: Callable[[AsyncpgSource, asyncio.Event], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncpg_links, "_GRACE", 60.0)  # it is left on its way, not cancelled in the middle
    complaints: list[str] = []

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(str(told)))
        asked, left = asyncio.Event(), asyncio.Event()

        async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await left.wait()
            writer.close()

        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        source = AsyncpgSource(
            f"postgresql://u@127.0.0.1:{port}/d", "here", server_settings={}, prepares=None
        )
        await leave(source, asked)
        (alone,) = asyncpg_links._opening
        left.set()
        with pytest.raises(OSError):
            await alone
        server.close()
        await server.wait_closed()

    asyncio.run(body())
    assert complaints == []


class Silent:
    """A server that takes connections and never says a word."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hangs_up = asyncio.Event()
        self._talks = set[asyncio.Task[None]]()

    async def __aenter__(self) -> AsyncpgSource:
        self._server = await asyncio.start_server(self._came, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return AsyncpgSource(f"postgresql://u@127.0.0.1:{port}/d", "here", server_settings={}, prepares=None)

    def _came(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._talks.add(asyncio.ensure_future(self._talk(writer)))
        self.asked.set()

    async def _talk(self, writer: asyncio.StreamWriter) -> None:
        await self.hangs_up.wait()
        writer.close()

    async def __aexit__(self, *_: object) -> None:
        self.hangs_up.set()
        self._server.close()
        await self._server.wait_closed()
        await asyncio.gather(*self._talks)


@pytest.mark.parametrize("leave", [_cancelled, _too_late])
@pytest.mark.parametrize("ends", ["by itself", "never"])
def test_a_pool_that_is_closed_leaves_no_connection_on_its_way(
    leave: Callable[[AsyncpgSource, asyncio.Event], Awaitable[None]],
    ends: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loop that is closed by hand says of such a task that it was destroyed while it was pending."""
    monkeypatch.setattr(asyncpg_links, "_GRACE", 60.0)

    async def body() -> None:
        silent = Silent()
        async with silent as source:
            pool = Pool(source, LoopWorld(), 1)
            await leave(source, silent.asked)
            (alone,) = asyncpg_links._opening
            if ends == "by itself":
                asyncio.get_running_loop().call_soon(silent.hangs_up.set)
            else:
                monkeypatch.setattr(asyncpg_links, "_GRACE", 0.01)
            await pool.close()
            assert not asyncpg_links._opening
            assert alone.cancelled() is (ends == "never")

    asyncio.run(body())


def test_a_pool_that_is_closed_ends_nobody_elses_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncpg_links, "_GRACE", 0.01)

    async def body() -> None:
        silent = Silent()
        async with silent as source:
            waited_for = asyncio.ensure_future(source.open(30))
            await silent.asked.wait()
            await Pool(source, LoopWorld(), 1).close()
            assert not waited_for.done()
            waited_for.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waited_for
            (alone,) = asyncpg_links._opening
            await asyncio.to_thread(lambda: asyncio.run(source.rest()))  # on another loop: it is not theirs
            assert not alone.done()
            await source.rest()
            assert alone.cancelled()

    asyncio.run(body())
