"""The windows in which a worker may be struck: semel's named points and the lines of the user's own files.

All of this happens in a forked child. A `Watch` sees each window as the handler passes it; armed with a fault, it strikes
at the n-th passing of one window.
"""

from __future__ import annotations

import asyncio
import linecache
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import msgspec

from semel import points
from semel.face import Face
from semel.testing.plugin_files import Places, real

__all__ = ["CALLED", "FAULTS", "RETURNED", "Fault", "Watch", "Window", "chosen", "shorter_leases", "striker"]

Fault = Literal["kill", "zombie", "interrupt"]
FAULTS: tuple[Fault, ...] = ("kill", "zombie", "interrupt")
CALLED = "handler called"
RETURNED = "handler returned"
_MEANING = {
    CALLED: "nothing has happened yet",
    RETURNED: "it is over, its caller does not know",
    "claim.sent": "before a claim leaves",
    "claim.won": "the key is ours, the function has not started",
    "run.started": "just before the function",
    "run.returned": "the effect happened, nothing is recorded",
    "settle.sent": "before the outcome leaves",
    "settle.stored": "it is written, nobody knows; within: uncommitted",
    "step.started": "before a step's function",
    "step.returned": "the step's effect happened, its note is not written",
    "step.stored": "the step's note is written",
    "wait.parked": "a waiter is about to sleep",
    "http.admitted": "a request's key is ours, its handler has not started",
    "http.responding": "it is noted that a streamed response begins, its first byte has not left",
    "http.sent": "the server has the whole response",
    "outbox.written": "messages are rows, uncommitted",
    "inbox.admitted": "the message is noted, uncommitted; its handler has not started",
    "consumer.handled": "the handler has returned, uncommitted",
    "consumer.committed": "it has committed, the broker does not know",
}
# Heartbeats come when they come: which line they meet is not the same twice.
_UNTIMELY = frozenset({"renew.sent"})
_PASSES = 3  # how often one and the same line of a loop is struck
_RECALLED = 100  # … and how many of its passes are remembered, for where a cancel arrived
_MOST = 100  # lines of files that nobody named, each pass by itself


class Window(msgspec.Struct, frozen=True):
    """A place in the handler's run. `passing` is the how-manieth time it is met."""

    name: str
    passing: int = 1
    text: str = ""
    file: str = ""
    """Of a line: the whole path. Two files may have the same name."""

    @property
    def title(self) -> str:
        again = f" (pass {self.passing})" if self.passing > 1 else ""
        return f"{self.name}{again}"


class Watch:
    """Sees the windows that the handler passes; `struck` is called at the one it is armed for."""

    def __init__(self, places: Places, target: Window | None = None) -> None:
        self.seen: list[Window] = []
        self.depths: list[int] = []
        """How deep in calls each of `seen` is."""
        self.left: tuple[str, ...] = ()
        """Threads and tasks that the handler had started and that still ran when it returned."""
        self.left_out: set[str] = set()
        """Files that it came to and whose lines are no windows because the user said so."""
        self.last = Window(CALLED)
        """Where the handler is: what it passed last."""
        self._places = places
        self._names: dict[str, str | None] = {}
        self._passes: dict[tuple[str, str], int] = {}
        self._target = target
        self._strike: Callable[[Window], None] | None = None

    def arm(self, strike: Callable[[Window], None]) -> None:
        self._strike = strike

    def reach(self, name: str) -> None:
        if name not in _UNTIMELY:
            self._pass(name, "", _MEANING.get(name, ""), None)

    def _pass(self, name: str, file: str, text: str, frame: FrameType | None) -> None:
        passing = self._passes[file, name] = self._passes.get((file, name), 0) + 1
        self.last = window = Window(name, passing, text, file)
        target, strike = self._target, self._strike
        if target is None and passing <= _RECALLED:
            self.seen.append(window)
            self.depths.append(_depth(frame))
        if strike and target and (target.file, target.name, target.passing) == (file, name, passing):
            self._strike = None  # one fault; what it leads to is the handler's own affair
            strike(window)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """From here on points and lines are seen, in every thread that starts inside."""
        before = sys.gettrace()
        points.listen(self.reach)
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)
            threading.settrace(before)
            points.listen(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        del event, argument
        file = frame.f_code.co_filename
        if file not in self._names:
            self._names[file] = Path(file).name if self._places.has(file) else None
            if self._places.leaves_out(file):
                self.left_out.add(real(file))
        return self._line if self._names[file] else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        if event == "line":
            file = frame.f_code.co_filename
            text = linecache.getline(file, frame.f_lineno).strip()
            self._pass(f"{self._names[file]}:{frame.f_lineno}", file, text, frame)
        return self._line


def _depth(frame: FrameType | None) -> int:
    depth = 0
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


def chosen(windows: Sequence[Window], depths: Sequence[int], places: Places) -> tuple[list[Window], int]:
    """Those to be struck, and how many lines are left out, at all or some of their passes: of files that nobody named, those farthest
    from the handler."""
    near = [at for at, window in enumerate(windows) if window.passing <= _PASSES]
    unnamed = [at for at in near if windows[at].file and not places.names(windows[at].file)]
    unnamed.sort(key=lambda at: (windows[at].passing, depths[at]))
    left = frozenset(unnamed[_MOST:])
    lines = {(windows[at].file, windows[at].name) for at in left}
    return [windows[at] for at in near if at not in left], len(lines)


def striker(
    fault: Fault, watch: Watch, told: Callable[[Window | None], None], task: asyncio.Task[Any] | None
) -> Callable[[Window], None]:
    """What happens at the window. `told` hears where the fault arrived, before it may be too late to say so."""

    def kill(window: Window) -> None:
        told(window)
        signal.raise_signal(signal.SIGKILL)

    def stop(window: Window) -> None:
        told(window)
        signal.raise_signal(signal.SIGSTOP)

    def interrupt(window: Window) -> None:
        told(window)
        if threading.current_thread() is not threading.main_thread():
            signal.raise_signal(signal.SIGINT)  # Ctrl-C strikes the main thread, wherever the window is
            return
        raise KeyboardInterrupt

    if fault == "interrupt" and task is not None:
        return _canceller(watch, told, task)
    return {"kill": kill, "zombie": stop, "interrupt": interrupt}[fault]


def _canceller(
    watch: Watch, told: Callable[[Window | None], None], task: asyncio.Task[Any]
) -> Callable[[Window], None]:
    """A client that hangs up: a task is cancelled where it waits. It runs on from the window until it comes to an await, so that is
    where it is struck; one that comes to none has ended, and is not struck at all."""

    def cancel() -> None:
        told(watch.last if task.cancel() else None)

    def strike(_: Window) -> None:
        try:
            task.get_loop().call_soon_threadsafe(cancel)
        except RuntimeError:  # closed: a thread that the handler left behind came here
            told(None)

    return strike


def shorter_leases(lease: float | None) -> None:
    """In this process no claim is leased for longer: a killed worker's key is to be free soon. For children only."""
    if lease is None:
        return
    original: Any = Face._call  # noqa: SLF001 - our own

    def call(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        options = msgspec.structs.replace(made.options, lease=min(lease, made.options.lease))
        return msgspec.structs.replace(made, options=options)

    Face._call = call  # type: ignore[method-assign]  # noqa: SLF001 - our own face
