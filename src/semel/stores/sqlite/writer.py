"""Group commit: everything that the threads and loops of this process want written now goes into one transaction.

A thread that finds nobody else writing commits its own job at once, because a thread hop costs more than the
statements. Everybody else queues, and the writer thread takes all that is queued. Nothing is answered before its
commit is on disk; a job whose caller has left is written all the same.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import sqlite3
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from semel.stores.sqlite.bulk import is_part, parts
from semel.stores.sqlite.errors import explained, is_busy, overdue

__all__ = ["Connections", "Job", "Writer", "patiently", "roll_back", "taken"]

T = TypeVar("T")

GROUP: Final = 256
"""Items after which a commit takes no more jobs."""
_log = logging.getLogger("semel.stores.sqlite")


class Job:
    """What one caller wants written: `step(connection, item)` for each item, answers in order.

    An item that fails fails alone (its exception stands among the answers); `error` is what befell the whole job.
    `together(connection, items)` may do several at once, with None for an answer where `step` is to do it; `alike`
    says that it will nearly always do all of them. `after` is called when the job is committed, before its caller
    goes on.
    """

    __slots__ = (
        "after", "alike", "answers", "deadline", "done", "error", "items", "reply", "step", "together",
    )  # fmt: skip

    def __init__(
        self,
        step: Callable[[sqlite3.Connection, Any], Any],
        items: Sequence[Any],
        deadline: float,
        after: Callable[[], None] | None = None,
        together: Callable[[sqlite3.Connection, Sequence[Any]], Sequence[Any]] | None = None,
        *,
        alike: bool = False,
    ) -> None:
        self.step = step
        self.together = together
        self.alike = alike
        self.items = items
        self.deadline = deadline
        self.after = after
        self.answers: list[Any] = []
        self.error: BaseException | None = None
        self.done: threading.Lock | None = None
        self.reply: tuple[asyncio.AbstractEventLoop, Callable[[Job], None]] | None = None

    def answer_in(self, loop: asyncio.AbstractEventLoop, reply: Callable[[Job], None]) -> None:
        """When it is written or has failed, `reply(job)` is called in the loop."""
        self.reply = loop, reply

    def result(self) -> list[Any]:
        if self.error is not None:
            raise self.error
        return self.answers


class Connections(Protocol):
    """What a writer needs of the file it writes to; all of it under the writer's lock."""

    path: str

    def connected(self, deadline: float) -> sqlite3.Connection:
        """The connection for writing, or a SemelError or sqlite3.Error."""
        ...

    def stored(self) -> None:
        """After a commit: StoreUnavailable if it went to a log that is no longer there."""
        ...

    @property
    def untidy(self) -> bool:
        """Whether `tidy` would do something, as far as can be told without the lock."""
        ...

    def tidy(self) -> None:
        """After the answers, if it is `untidy`: whatever need not delay them."""
        ...

    def drop(self) -> None:
        """The connection is not to be trusted any more."""
        ...


class Writer:
    """One per file. `lock` is held by whoever uses the writing connection."""

    def __init__(self, home: Connections) -> None:
        self.lock = threading.Lock()
        # The file owns the writer, not the other way round: a forgotten file can be collected and closes itself.
        self._home = weakref.ref(home)
        self._path = home.path
        self._gate = threading.RLock()
        self._queue = _new_queue()
        self._thread: threading.Thread | None = None

    # ---------------------------------------------------------------------------------- callers
    def commit(self, job: Job) -> list[Any]:
        """Write and wait for it, in the calling thread."""
        held: list[bool] = []
        try:
            if taken(self.lock.acquire, held, 0.0):
                self._commit([job])
                _answer([job])
                if (home := self._home()) is not None and home.untidy:
                    home.tidy()
        finally:
            if True in held:
                self.lock.release()
        if True in held:
            return job.result()
        job.done = threading.Lock()
        job.done.acquire()
        self.submit(job)
        if not job.done.acquire(timeout=max(0.0, job.deadline - time.monotonic())):
            raise overdue(self._path)
        return job.result()

    async def commit_async(self, job: Job) -> list[Any]:
        """Write and wait for it in the running loop. A caller that is cancelled leaves the write on its way."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        job.answer_in(loop, lambda _: None if future.done() else future.set_result(None))
        self.submit(job)
        timer = loop.call_later(job.deadline - time.monotonic(), _give_up, future, self._path)
        try:
            await future
        finally:
            timer.cancel()
        return job.result()

    def submit(self, job: Job) -> None:
        """Queue it for the writer thread."""
        with self._gate:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=_serve,
                    args=(self._home, self, self._queue),
                    name="semel-sqlite-writer",
                    daemon=True,
                )
                self._thread.start()
            self._queue.put(job)  # last: what its caller is told has failed must not be written later

    def stop(self, patience: float) -> None:
        """Finish what is queued and end the thread; the next job starts another one."""
        with self._gate:
            thread, self._thread = self._thread, None
            jobs, self._queue = self._queue, _new_queue()
        jobs.put(None)
        if thread is not None:
            thread.join(patience)

    def abandon(self) -> None:
        """End the thread without waiting or locking: for finalizers, which may run anywhere."""
        self._queue.put(None)

    # ------------------------------------------------------------------------------- the thread
    def commit_queued(self, first: Job, waiting: queue.SimpleQueue[Job | None]) -> bool:
        """One group; False when the end of the queue was in it."""
        with self.lock:
            jobs, items, more = [first], len(first.items), True
            try:
                while more and items < GROUP:
                    if (job := waiting.get_nowait()) is None:
                        more = False
                    else:
                        jobs.append(job)
                        items += len(job.items)
            except queue.Empty:
                pass
            self._commit(jobs)
        # Without the lock: who is answered looks at the next key before this thread has its turn again.
        _answer(jobs)
        home = self._home()
        if home is not None and home.untidy:
            with self.lock:
                home.tidy()
        return more

    def _commit(self, jobs: list[Job]) -> None:
        """Every job gets its answers or its error; nothing is raised. Under the lock."""
        home = self._home()
        now = time.monotonic()
        live = [job for job in jobs if job.deadline > now]
        for job in jobs:
            if job.deadline <= now:
                job.error = overdue(self._path)  # as its caller was told already
        if home is None or not live:
            return
        try:
            deadline = max(job.deadline for job in live)
            db = home.connected(deadline)
            if not self._at_once(home, db, live):
                patiently(db, "BEGIN IMMEDIATE", deadline)
                self._write(home, db, live)
        except BaseException as error:  # noqa: BLE001 - it is handed to those who wait
            self._fail(home, live, error)

    def _at_once(self, home: Connections, db: sqlite3.Connection, jobs: list[Job]) -> bool:
        """A job of one statement is a transaction by itself, and Python runs other threads until it is on disk.

        False: it takes the long way, which finds out what is in the way; what was written bears being repeated.
        """
        job = jobs[0]
        if len(jobs) > 1 or not job.alike or job.together is None or not is_part(job.items):
            return False
        try:
            answers = job.together(db, job.items)
        except sqlite3.Error:  # the long way meets it again, and tells
            return False
        if None in answers:
            return False
        job.answers = list(answers)
        home.stored()
        return True

    def _write(self, home: Connections, db: sqlite3.Connection, jobs: list[Job]) -> None:
        rows = sum(len(job.items) for job in jobs)
        try:
            for job in jobs:
                job.answers = self._answers(db, job)
            db.execute("COMMIT")
            home.stored()
        except BaseException as error:  # noqa: BLE001 - it is handed to those who wait
            roll_back(db)
            if isinstance(error, sqlite3.Error) and rows > 1:
                # Perhaps it was one item, such as a result too large for the disk: each one for itself, then.
                for job in jobs:
                    job.answers = [self._alone(db, job, item) for item in job.items]
            else:
                self._fail(home, jobs, error)

    def _answers(self, db: sqlite3.Connection, job: Job) -> list[Any]:
        if job.together is None or len(job.items) == 1:
            return [self._try(db, job, item) for item in job.items]
        answers: list[Any] = []
        for part in parts(job.items):
            done = [None] if len(part) == 1 else self._together(db, job.together, part)
            answers += [
                self._try(db, job, item) if answer is None else answer
                for item, answer in zip(part, done, strict=True)
            ]
        return answers

    @staticmethod
    def _together(
        db: sqlite3.Connection,
        do: Callable[[sqlite3.Connection, Sequence[Any]], Sequence[Any]],
        part: Sequence[Any],
    ) -> Sequence[Any]:
        try:
            return do(db, part)
        except Exception as error:
            if isinstance(error, sqlite3.OperationalError) or not db.in_transaction:
                raise  # everybody's trouble
            return [None] * len(part)  # somebody's: each one for itself will show whose

    def _try(self, db: sqlite3.Connection, job: Job, item: Any) -> Any:
        try:
            return job.step(db, item)
        except sqlite3.Error as error:
            # A statement that failed undid itself; trouble with the file, or a lost transaction, is everybody's.
            if isinstance(error, sqlite3.OperationalError) or not db.in_transaction:
                raise
            return explained(error, self._path)
        except Exception as error:  # noqa: BLE001 - one bad item fails alone
            return error

    def _alone(self, db: sqlite3.Connection, job: Job, item: Any) -> Any:
        if time.monotonic() >= job.deadline:
            return overdue(self._path)
        try:
            patiently(db, "BEGIN IMMEDIATE", job.deadline)
            answer = job.step(db, item)
            db.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - one bad item fails alone
            roll_back(db)
            return explained(error, self._path)
        return answer

    def _fail(self, home: Connections, jobs: Iterable[Job], error: BaseException) -> None:
        for job in jobs:
            job.error = explained(error, self._path)
        if not is_busy(error):
            home.drop()  # what the connection believes may be as wrong as what it met: begin afresh


def _new_queue() -> queue.SimpleQueue[Job | None]:
    # By its module's name: gevent replaces it there, and a greenlet that waits on the old one stops all of them.
    return queue.SimpleQueue()


def _serve(home: weakref.ref[Connections], writer: Writer, waiting: queue.SimpleQueue[Job | None]) -> None:
    """The writer thread. It keeps the file alive only while it works, so that a forgotten one can be collected."""
    while (job := waiting.get()) is not None:
        held = home()
        more = writer.commit_queued(job, waiting)
        del held, job
        if not more:
            return


def _answer(jobs: Iterable[Job]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, deque[Callable[[], None]]] = defaultdict(deque)
    for job in jobs:
        if job.after is not None and job.error is None:
            try:
                job.after()
            except Exception:  # noqa: BLE001 - a watcher's error must not end the writer
                _log.exception("semel: waking those who wait for a key failed; they find out by polling")
        if job.done is not None:
            job.done.release()
        elif job.reply is not None:
            loop, reply = job.reply
            by_loop[loop].append(partial(reply, job))
    for loop, replies in by_loop.items():
        try:
            loop.call_soon_threadsafe(_reply, replies, loop)
        except RuntimeError:  # the loop was closed meanwhile: nobody waits there any more
            continue


def _reply(replies: deque[Callable[[], None]], loop: asyncio.AbstractEventLoop) -> None:
    try:
        while replies:
            replies.popleft()()
    finally:
        if replies:  # somebody who was answered ends the program: the others are answered all the same
            loop.call_soon(_reply, replies, loop)


def _give_up(future: asyncio.Future[None], path: str) -> None:
    if not future.done():
        future.set_exception(overdue(path))


def taken(acquire: Callable[[bool, float], bool], held: list[bool], patience: float) -> bool:
    """Take a lock, waiting for it up to so many seconds, and note in `held` whether it was taken.

    Both in one call into C: a signal handler that raises does so before it or after it, and `held` tells which. Who took it
    releases it with no call in between (`if True in held: lock.release()`): a handler runs when a call has returned, too.
    """
    waits = patience > 0
    held.extend(map(acquire, (waits,), (patience if waits else -1.0,)))
    return held[-1]


def patiently(db: sqlite3.Connection, sql: str, deadline: float, *values: str) -> list[Any]:
    """Run a statement until the file is not busy. SQLite's own busy handler sleeps up to 100 ms and starves the unlucky."""
    pause = 0.0002
    while True:
        try:
            return db.execute(sql, values).fetchall()
        except sqlite3.OperationalError as error:
            left = deadline - time.monotonic()
            if not is_busy(error) or left <= 0:
                raise
            time.sleep(min(left, pause * (0.5 + random.random())))  # noqa: S311 - jitter
            pause = min(pause * 1.5, 0.001)


def roll_back(db: sqlite3.Connection) -> None:
    """End the transaction, unless SQLite has done so by itself, as it does in some kinds of trouble."""
    if db.in_transaction:
        db.execute("ROLLBACK")
