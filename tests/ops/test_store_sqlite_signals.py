"""A signal handler that raises may do so between any two lines: the write lock is never left behind."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from semel.model import Won
from semel.runtime import run_sync
from semel.stores.sqlite import SqliteStore, file
from tests.ops.sqlite_lab import ask, opened, scope, win
from tests.ops.strike_lab import strike_each_moment


class HandlerRaised(BaseException):
    """What a signal handler of the user's raises, as Python's own does for Ctrl-C."""


@contextmanager
def raising_soon_after_the_lock_was_taken(store: SqliteStore, lines: int) -> Iterator[None]:
    """A tracer is asked at each line of Python, which is where a handler would be called."""
    lock, left, before = store._file.writer.lock, lines, sys.gettrace()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if "/stores/sqlite/" not in frame.f_code.co_filename:
            return None
        if event == "line" and lock.locked():
            left -= 1
            if left == 0:
                sys.settrace(before)
                raise HandlerRaised
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


USES: dict[str, Callable[[SqliteStore], Any]] = {
    "a write": lambda store: run_sync(store.claim([ask("again")])),
    "a look": lambda store: store._file.glance(lambda db: db.execute("SELECT 1").fetchall()),
    "an opening": lambda store: store._file.open(
        store, lambda *_: None, create=True, deadline=time.monotonic() + 9
    ),
    "a closing": lambda store: store._file.shut(),
}


@pytest.mark.parametrize("lines", [1, 2])
@pytest.mark.parametrize("use", USES)
def test_a_signal_handler_that_raises_leaves_no_lock_behind(tmp_path: Path, use: str, lines: int) -> None:
    store = opened(tmp_path / "semel.db")
    run_sync(win(store))
    raised = False
    with raising_soon_after_the_lock_was_taken(store, lines):
        try:
            USES[use](store)
        except HandlerRaised:
            raised = True
    assert raised
    assert not store._file.writer.lock.locked()
    assert isinstance(run_sync(store.claim([ask("another")]))[0], Won)
    run_sync(store.aclose())


def test_a_signal_handler_that_raises_before_a_fork_leaves_no_lock_behind(tmp_path: Path) -> None:
    store = opened(tmp_path / "semel.db")
    run_sync(win(store))
    with raising_soon_after_the_lock_was_taken(store, 1), pytest.raises(HandlerRaised):
        store._file.before_fork()
    store._file.after_fork_in_parent()
    assert not store._file.writer.lock.locked()
    assert run_sync(store.peek(scope()))[0] is not None
    run_sync(store.aclose())


def test_a_signal_handler_that_raises_after_a_fork_leaves_no_lock_behind(tmp_path: Path) -> None:
    store = opened(tmp_path / "semel.db")
    run_sync(win(store))
    here = store._file

    def fork() -> None:
        here.before_fork()
        here.after_fork_in_parent()

    def then() -> None:
        here.after_fork_in_parent()  # if the handler raised before it began
        assert not here.writer.lock.locked()
        assert not here._mutex._is_owned()  # type: ignore[attr-defined]  # nobody else would tell

    struck = strike_each_moment(
        (file,), fork, then=then, functions={"after_fork_in_parent", "writer", "_mutex"}
    )
    assert struck > 2
    assert run_sync(store.peek(scope()))[0] is not None
    run_sync(store.aclose())
