"""What the tasks of one event loop want of the store in one tick: looked up by one statement, written by one job.

Each task has an answer of its own to wait for, so a job that is written in two commits answers the first half early,
and who waits is resumed by the very callback that brings the answers.

A task that has been alone is not gathered with anybody: what it wants is on its way before its tick ends, which spares it
two turns of the loop in a first execution.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from semel.model import Ask, Kind, Settle, Verdict
from semel.stores.posted import Posted, resume, tell_interrupted
from semel.stores.sqlite.errors import explained, is_busy, overdue
from semel.stores.sqlite.file import DatabaseFile
from semel.stores.sqlite.records import Records
from semel.stores.sqlite.writer import Job

__all__ = ["Desk"]

MOST: Final = 128
"""Items of one job at most: the writer never cuts a job in two."""
Waiting = list[Posted]


class Desk:
    """One per store and loop; used in the loop's thread only."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, file: DatabaseFile, records: Records, timeout: float
    ) -> None:
        self.loop = weakref.ref(loop)
        self._file = file
        self._records = records
        self._timeout = timeout
        self._asks: list[tuple[Ask, Posted]] = []
        self._ends: list[tuple[Settle, Posted]] = []
        self._alone = False
        """Whether what was last written for this loop was one item."""
        self._writing: set[Job] = set()
        """What the writer has not answered."""

    def claim(self, ask: Ask, loop: asyncio.AbstractEventLoop) -> Posted:
        """What is awaited for its verdict, or an exception as a value."""
        posted = Posted(loop)
        if self._alone and not (self._writing or self._asks or self._ends):
            self._look([ask], [posted], loop)
            return posted
        # If the first one has left, a signal's handler may have struck the end of their tick.
        if not self._asks or self._asks[0][1].over:
            loop.call_soon(self._look_gathered, loop)
        self._asks.append((ask, posted))
        return posted

    def settle(self, end: Settle, loop: asyncio.AbstractEventLoop) -> Posted:
        posted = Posted(loop)
        if self._alone and not (self._writing or self._asks or self._ends):
            self._settle([end], [posted], loop)
            return posted
        if not self._ends or self._ends[0][1].over:
            loop.call_soon(self._settle_gathered, loop)
        self._ends.append((end, posted))
        return posted

    # ------------------------------------------------------------------------------- at the end of the tick
    def _look_gathered(self, loop: asyncio.AbstractEventLoop) -> None:
        gathered, self._asks = self._asks, []
        try:
            if gathered:
                self._look([ask for ask, _ in gathered], [posted for _, posted in gathered], loop)
        except BaseException as error:
            tell_interrupted((posted for _, posted in gathered), error)
            raise

    def _settle_gathered(self, loop: asyncio.AbstractEventLoop) -> None:
        gathered, self._ends = self._ends, []
        try:
            self._settle([end for end, _ in gathered], [posted for _, posted in gathered], loop)
        except BaseException as error:
            tell_interrupted((posted for _, posted in gathered), error)
            raise

    # -------------------------------------------------------------------------------------- then, or at once
    def _look(self, asks: list[Ask], waiting: Waiting, loop: asyncio.AbstractEventLoop) -> None:
        deadline = time.monotonic() + self._timeout
        look = partial(self._records.look_all, asks=asks)
        try:
            verdicts = self._file.glance(look)
        except sqlite3.Error as error:
            if is_busy(error):
                later = loop.run_in_executor(None, self._file.read, look, deadline)
                later.add_done_callback(partial(self._looked_later, asks, waiting, deadline, loop))
            else:
                _fail(waiting, explained(error, self._file.path))
        except Exception as error:  # noqa: BLE001 - it is handed to those who wait
            _fail(waiting, error)
        else:
            self._looked(asks, waiting, deadline, loop, verdicts)

    def _looked_later(
        self,
        asks: list[Ask],
        waiting: Waiting,
        deadline: float,
        loop: asyncio.AbstractEventLoop,
        read: asyncio.Future[list[Verdict | None]],
    ) -> None:
        if read.cancelled():  # the loop ends
            _fail(waiting, overdue(self._file.path))
        elif (error := read.exception()) is not None:
            _fail(waiting, error)
        else:
            self._looked(asks, waiting, deadline, loop, read.result())

    def _looked(
        self,
        asks: list[Ask],
        waiting: Waiting,
        deadline: float,
        loop: asyncio.AbstractEventLoop,
        verdicts: Sequence[Verdict | None],
    ) -> None:
        """Answer what needs no write; the writer decides the rest, and begins with it meanwhile."""
        everybody = waiting
        if decided := any(verdicts):
            undecided = [at for at, verdict in enumerate(verdicts) if verdict is None]
            asks, waiting = [asks[at] for at in undecided], [waiting[at] for at in undecided]
        records = self._records
        self._write(
            asks,
            waiting,
            deadline,
            loop,
            lambda items: Job(records.claim, items, deadline, None, records.claim_all, alike=True),
        )
        if decided and everybody[0].wakeup is None:
            # It was looked for at once. In the next turn: replays one after the other must not keep the loop from
            # everything else.
            loop.call_soon(_answer, everybody, verdicts, loop)
        elif decided:
            _answer(everybody, verdicts, loop)

    def _settle(self, ends: list[Settle], waiting: Waiting, loop: asyncio.AbstractEventLoop) -> None:
        deadline = time.monotonic() + self._timeout
        records, file = self._records, self._file
        self._write(
            ends,
            waiting,
            deadline,
            loop,
            lambda items: Job(
                records.settle,
                items,
                deadline,
                partial(file.wake, items),
                records.settle_all,
                alike=all(end.kind is Kind.DONE for end in items),
            ),
        )

    def _write(
        self,
        items: list[Any],
        waiting: Waiting,
        deadline: float,
        loop: asyncio.AbstractEventLoop,
        made: Callable[[list[Any]], Job],
    ) -> None:
        if items:
            self._alone = len(items) == 1
        for at in range(0, len(items), MOST):
            job, those = made(items[at : at + MOST]), waiting[at : at + MOST]
            timer = loop.call_later(deadline - time.monotonic(), _give_up, those, self._file.path)
            job.answer_in(loop, partial(self._written, those, timer, loop))
            self._writing.add(job)
            try:
                self._file.writer.submit(job)
            except Exception as error:  # noqa: BLE001 - no thread could be started: those who wait must know
                self._writing.discard(job)
                timer.cancel()
                _fail(those, error)

    def _written(
        self, waiting: Waiting, timer: asyncio.TimerHandle, loop: asyncio.AbstractEventLoop, job: Job
    ) -> None:
        self._writing.discard(job)
        try:
            if job.error is not None:
                _fail(waiting, job.error)
            else:
                _answer(waiting, job.answers, loop)
        except BaseException as error:
            tell_interrupted(waiting, error)
            raise
        finally:
            timer.cancel()


def _answer(waiting: Waiting, answers: Sequence[Any], loop: asyncio.AbstractEventLoop) -> None:
    answered: deque[Posted] = deque()
    for posted, answer in zip(waiting, answers, strict=True):
        if answer is not None and not posted.over:
            posted.value, posted.over = answer, True
            answered.append(posted)
    resume(answered, loop)


def _fail(waiting: Waiting, error: BaseException) -> None:
    for posted in waiting:
        if not posted.over:
            posted.set_exception(error)


def _give_up(waiting: Waiting, path: str) -> None:
    _fail(waiting, overdue(path))
