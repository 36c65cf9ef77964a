"""What a sink or a source opened is closed when the rest of its opening fails: no socket is left to the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest

from semel import ConfigurationError, StoreUnavailable
from semel.messaging.pauses import unless
from semel.messaging.sink import SinkUnavailable
from semel.messaging.sinks import open_sink
from semel.messaging.sources import open_source
from semel.testing import services
from semel.testing.sinks import rows
from tests.messaging.conftest import awaited


@contextmanager
def nothing_left() -> Iterator[None]:
    """No resource is freed by the garbage collector alone."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        yield
        gc.collect()
    assert [str(each.message) for each in caught if issubclass(each.category, ResourceWarning)] == []


class Hole:
    """A place where somebody takes the call and says nothing, or `first` and then hangs up."""

    def __init__(self, first: bytes | None) -> None:
        self._first = first
        self._open: list[asyncio.StreamWriter] = []
        self.calls = 0

    @asynccontextmanager
    async def at(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for writer in self._open:
                writer.close()
            await asyncio.gather(*(writer.wait_closed() for writer in self._open), return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.calls += 1
        if self._first is not None:
            writer.write(self._first)
            writer.close()
        self._open.append(writer)


WAYS = {
    "nats": "nats://127.0.0.1:{port}?stream=S&timeout=0.2",
    "streams": "rabbitmq+stream://127.0.0.1:{port}/?stream=s&timeout=0.2",
    "queues": "amqp://127.0.0.1:{port}/?timeout=0.2",
}


@pytest.mark.parametrize("first", [None, b"nonsense\r\n"], ids=["silent", "nonsense"])
@pytest.mark.parametrize("way", sorted(WAYS))
@awaited
async def test_a_sink_whose_broker_is_a_hole(way: str, first: bytes | None) -> None:
    hole = Hole(first)
    async with hole.at() as port:
        with nothing_left():
            sink: Any = open_sink(WAYS[way].format(port=port))
            for _ in range(2):
                with pytest.raises(SinkUnavailable):
                    await sink.publish(0, 1, 1, rows(1))
            await sink.aclose()
            del sink
    assert hole.calls >= 2


@pytest.mark.parametrize("first", [None, b"nonsense\r\n"], ids=["silent", "nonsense"])
@pytest.mark.parametrize("way", ["nats", "queues"])
@awaited
async def test_a_source_whose_broker_is_a_hole(way: str, first: bytes | None) -> None:
    hole = Hole(first)
    url = WAYS[way].replace("/?timeout", "/?queue=q&timeout")
    async with hole.at() as port:
        with nothing_left():
            source: Any = open_source(url.format(port=port), group="g")
            for _ in range(2):
                with pytest.raises(StoreUnavailable):
                    await source.receive(1)
            await source.aclose()
            del source
    assert hole.calls >= 2


@pytest.mark.parametrize("way", sorted(WAYS))
@awaited
async def test_a_sink_that_is_told_to_stop_while_it_connects(way: str) -> None:
    hole = Hole(None)
    async with hole.at() as port:
        with nothing_left():
            sink: Any = open_sink(WAYS[way].format(port=port).replace("0.2", "30"))
            task = asyncio.create_task(sink.publish(0, 1, 1, rows(1)))
            async with asyncio.timeout(30):
                while not hole.calls:
                    await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await sink.aclose()
            del sink, task


@awaited
async def test_a_source_whose_queue_is_missing_begins_anew(rabbitmq_server: services.RabbitServer) -> None:
    """Half open it looked open, and handed nothing out for ever."""
    with nothing_left():
        source: Any = open_source(f"{rabbitmq_server.url}?queue=never-made&create=no", group="g")
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="no queue 'never-made'"):
                await source.receive(1)
        await source.aclose()
        del source


@pytest.mark.parametrize("then", ["fails", "waits"])
@awaited
async def test_work_that_swallows_its_cancellation_ends_with_its_connection(then: str) -> None:
    """As nats-py does while it writes. Nothing is said about it by the loop, and nothing is left in it."""
    loop, said = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: said.append(context))
    gone = loop.create_future()

    async def deaf() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        if then == "fails":
            raise OSError("closed meanwhile")
        await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await unless(gone, deaf())
    await asyncio.sleep(0)
    gone.set_result(None)
    async with asyncio.timeout(30):
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.001)
    gc.collect()
    assert said == []
