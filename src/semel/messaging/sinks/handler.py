"""A function in this process, called with each message: at least once.

`Relay(outbox, {"orders": handle})` makes one by itself. Messages of one key are handed over in order, one after the other;
after a failed one the rest of its key waits. A crash between the call and the relay's own note of it calls again, so
a handler that must act once goes through an `Inbox`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from semel.errors import ConfigurationError, StoreUnavailable
from semel.messaging.bodies import HEADER, BodyStore, inlined
from semel.messaging.handling import Quit, is_cancelled
from semel.messaging.message import Message
from semel.messaging.shaping import DECODED, taken_for_a_row
from semel.messaging.sink import Guarantee, Rejected, Row, SinkUnavailable
from semel.messaging.sinks.envelope import in_order, waves
from semel.shown import said

__all__ = ["HandlerSink"]


class HandlerSink:
    """Calls `handler(message)`, which may be a coroutine function; a plain one runs in a thread.

    What it raises counts as an attempt of that message, SystemExit too; SinkUnavailable instead pauses without counting.
    `concurrency` messages of different keys are in the handler at a time.
    """

    guarantee: Guarantee = "at-least-once"

    def __init__(self, handler: Callable[[Message], Any], *, concurrency: int = 1) -> None:
        if not callable(handler):
            raise ConfigurationError(f"a handler is a function of one message, not {type(handler).__name__}")
        if concurrency < 1:
            raise ConfigurationError(f"concurrency must be at least 1, not {concurrency}")
        self._handler = handler
        self._waits = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004  # an object whose __call__ is a coroutine function
        )
        self._concurrency = concurrency
        self._bodies: BodyStore | None = None

    def attach(self, bodies: BodyStore | None) -> None:
        """Where bodies are that travel as references: the handler gets the body."""
        self._bodies = bodies

    async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
        """Hand the rows over. Rejected names those that the handler raised for."""
        del part, epoch, batch  # it keeps no numbers: what comes again is handed over again
        delivered: set[str] = set()
        reasons: dict[str, str] = {}
        stopped: set[tuple[str, str]] = set()
        for wave in waves(rows):
            todo = in_order(wave, stopped)
            for start in range(0, len(todo), self._concurrency):
                some = todo[start : start + self._concurrency]
                results = await asyncio.gather(*map(self._call, some), return_exceptions=True)
                away = self._note(some, results, delivered, reasons, stopped)
                if away is not None and not delivered and not reasons:
                    raise away
                if away is not None:  # what was handed over is told first; the next call meets the pause
                    raise Rejected(reasons, delivered=delivered)
        if reasons:
            raise Rejected(reasons, delivered=delivered)
        return None

    @staticmethod
    def _note(
        rows: Sequence[Row],
        results: Sequence[BaseException | None],
        delivered: set[str],
        reasons: dict[str, str],
        stopped: set[tuple[str, str]],
    ) -> SinkUnavailable | None:
        away = None
        for row, result in zip(rows, results, strict=True):
            if result is None:
                delivered.add(row.id)
                continue
            if not isinstance(result, Exception):
                raise result  # the process is being ended
            if isinstance(result, SinkUnavailable):
                away = result
                continue
            reasons[row.id] = f"{type(result).__name__}: {said(result)}"
            if DECODED in getattr(result, "__notes__", ()):
                reasons[row.id] += f"; {DECODED}"
            if row.key is not None:
                stopped.add((row.tenant, row.key))
        return away

    async def _call(self, row: Row) -> None:
        if HEADER in row.headers:
            try:
                row = await asyncio.to_thread(inlined, self._bodies, row)
            except StoreUnavailable as error:
                raise SinkUnavailable(str(error)) from error
        message = row.message()
        try:
            await self._handle(message)
        except (
            SystemExit
        ) as error:  # caught here: asyncio lets it end the process, and no attempt would be counted
            raise Quit(message, error) from error
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise Quit(message, error) from error
        except (TypeError, AttributeError) as error:
            if taken_for_a_row(error, message):
                error.add_note(DECODED)
            raise

    async def _handle(self, message: Message) -> None:
        if self._waits:
            await self._handler(message)
            return
        answer = await asyncio.to_thread(self._handler, message)
        if inspect.isawaitable(answer):  # a plain function that returns a coroutine
            await answer
