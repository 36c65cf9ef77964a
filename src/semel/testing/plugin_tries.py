"""Trying one window with one fault: fork a victim, strike it, let clients call again until they succeed, count the effects.

Everything that is the user's runs in a child that was forked for it: the handler, `effects`, `reset`, the making of
arguments. The process that forks holds no connection of theirs, so each child begins as a fresh worker does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import Any, Literal, NoReturn

import msgspec

from semel.errors import OutcomeUnknown, PreviousFailure
from semel.testing.plugin_stories import story_of, text_of
from semel.testing.plugin_windows import CALLED, RETURNED, Fault, Watch, Window, shorter_leases, striker

__all__ = ["Case", "Child", "Discovery", "Misuse", "Try", "Words", "discover", "repeat", "try_window"]

_DIE_WITH_PARENT = 1


class Misuse(Exception):
    """What was given to `exactly_once` cannot be a handler, its arguments or a count: no finding about a handler."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What the user gave."""

    run: Callable[..., Any]
    arguments: Callable[[str], Sequence[Any]]
    effects: Callable[[str], int]
    reset: Callable[[], Any] | None
    files: frozenset[str]
    expected: int
    lease: float | None
    patience: float

    pace: float = 1.0
    """Seconds that one run takes here."""

    @property
    def sleep(self) -> float:
        """How long a zombie sleeps at most: until somebody took over, or as long as that would take."""
        return 2 * (10.0 if self.lease is None else self.lease) + max(0.4, 4 * self.pace)


class Words(msgspec.Struct):
    """What a child says before it ends."""

    ok: bool = False
    error: str = ""
    final: bool = False
    """Calling again changes nothing: the key is unknown or failed for good."""
    value: Any = None
    story: str = ""
    misuse: bool = False


class _Strike(msgspec.Struct, frozen=True):
    """A fault came to its window."""

    place: Window | None
    """Where it arrived: a cancel strikes at the next await. None: there was no await any more."""


class Try(msgspec.Struct, frozen=True, kw_only=True):
    """One window, one fault, and what came of it."""

    window: Window
    """Where the fault arrived, or was to arrive."""
    fault: str
    effects: int
    verdict: str
    """once, doubled, lost, unknown (semel says so), stuck (no client succeeded), missed (the fault was not met)"""
    error: str = ""
    overtaken: bool = True
    """A zombie was overtaken while it slept; False: whoever tried had to wait for it."""
    too_late: bool = False
    """Missed because no await came after the window: a cancel cannot strike there, whatever the handler does. No failure."""


class Discovery(msgspec.Struct, frozen=True):
    """A run without faults."""

    windows: tuple[Window, ...] = ()
    effects: int = 0
    error: str = ""
    story: str = ""
    seconds: float = 0.0
    left: tuple[str, ...] = ()
    """Threads and tasks that still ran when the handler returned."""
    misuse: bool = False


class Child:
    """A forked process that does one thing and says how it ended. What it says lies in a file: nobody has to read along."""

    def __init__(self, work: Callable[[Child], Any]) -> None:
        self._said = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by `end`
        self.ended = False
        self._status = 0
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: the test runner may have threads
            self.pid = os.fork()
        if self.pid == 0:
            self._live(work)

    def _live(self, work: Callable[[Child], Any]) -> NoReturn:
        words = Words()
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with contextlib.suppress(OSError, AttributeError):  # Linux only
                ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            words.value = work(self)
            words.ok = True
        except BaseException as error:  # noqa: BLE001 - it is the finding
            # Whatever it is: it is told to the parent, and a forked child must never return into the test runner.
            words.misuse = isinstance(error, Misuse)
            words.error = (
                text_of(error) if words.misuse else f"{type(error).__name__}: {text_of(error)}".rstrip(": ")
            )
            words.final = isinstance(error, OutcomeUnknown | PreviousFailure)
            words.story = story_of(error)
        finally:
            try:
                self._said.write(b"=" + _encoded(words))
                sys.stdout.flush()
            finally:
                os._exit(0)

    def say_struck(self, place: Window | None) -> None:
        self._said.write(b"!" + msgspec.json.encode(_Strike(place)) + b"\n")

    def wait(self, deadline: float = inf) -> Literal["ended", "stopped", "late"]:
        while not self.ended:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                return "stopped"
            self.ended, self._status = pid != 0, status
            if not self.ended:
                if time.monotonic() >= deadline:
                    return "late"
                time.sleep(0.003)
        return "ended"

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def words(self, deadline: float = inf) -> tuple[_Strike | None, Words]:
        """How it was struck, if it was, and its last words. A killed one has none; one that is late is killed."""
        if self.wait(deadline) == "late":
            self.end()
            return None, Words(error="it did not end: raise patience=, or find out what it waits for")
        text = os.pread(self._said.fileno(), 1 << 30, 0)
        self._said.close()
        strike = None
        if text.startswith(b"!"):
            told, _, text = text[1:].partition(b"\n")
            strike = msgspec.json.decode(told, type=_Strike)
        return strike, msgspec.json.decode(text[1:], type=Words) if text else Words(error=self._silence())

    def _silence(self) -> str:
        """Why it said nothing."""
        if os.WIFEXITED(self._status):
            code = os.WEXITSTATUS(self._status)
            return f"it ended its process itself (os._exit({code})): let it return, or raise an error"
        return f"killed by {signal.Signals(os.WTERMSIG(self._status)).name}"

    def end(self) -> None:
        if not self.ended:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.ended = True
        self._said.close()


# ------------------------------------------------------------------------------------------ inside a child
def _encoded(words: Words) -> bytes:
    """As JSON, whatever is in it: an error's text may hold half a surrogate pair, `reset` may return a cursor."""
    try:
        return msgspec.json.encode(words)
    except Exception:  # noqa: BLE001 - what cannot be encoded is told as it looks
        return msgspec.json.encode(_plain(msgspec.structs.asdict(words)))


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | float():
            return value
        case int() if abs(value) < 1 << 63:
            return int(value)
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case list() | tuple():
            return [_plain(each) for each in value]
        case dict():
            return {_plain(str(name)): _plain(each) for name, each in value.items()}
    return _plain(_shown(value))


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - it is the user's class
        return f"a {type(value).__name__}"


def _perform(case: Case, key: str, watch: Watch | None, fault: Fault | None, child: Child) -> None:
    """Call the handler once, as a worker would."""
    shorter_leases(case.lease)
    arguments = _arguments(case, key)
    if inspect.iscoroutinefunction(inspect.unwrap(case.run)) or inspect.iscoroutinefunction(
        getattr(case.run, "__call__", None)  # noqa: B004 - an object whose call is a coroutine function
    ):
        asyncio.run(_perform_async(case, arguments, watch, fault, child))
        return
    with _watched(watch, fault, child, None):
        _finished(case.run(*arguments))


def _arguments(case: Case, key: str) -> tuple[Any, ...]:
    given: Any = case.arguments(key)
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        what = "the text " if isinstance(given, str | bytes) else ""
        raise Misuse(
            f"arguments= gave {what}{given!r}: give a tuple of arguments, arguments=lambda key: (key,)"
        )
    return tuple(given)


def _finished(value: Any) -> None:
    """A call that only promises to work has done nothing yet."""
    if inspect.isawaitable(value):
        raise Misuse("the handler returned something to await: make it an `async def`, or await it inside")
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise Misuse(
            f"the handler {value.__qualname__} is a generator, whose body does not run when it is called: take `yield` out, or "
            "give a function that goes through it, lambda key: list(handler(key))"
        )


async def _perform_async(
    case: Case, arguments: tuple[Any, ...], watch: Watch | None, fault: Fault | None, child: Child
) -> None:
    with _watched(watch, fault, child, asyncio.current_task()):
        await case.run(*arguments)


@contextlib.contextmanager
def _watched(
    watch: Watch | None, fault: Fault | None, child: Child, task: asyncio.Task[Any] | None
) -> Iterator[None]:
    if watch is None:
        yield
        return
    if fault is not None:
        watch.arm(striker(fault, watch, child.say_struck, task))
    before = set(threading.enumerate())
    with watch.watching():
        watch.reach(CALLED)
        yield
        watch.reach(RETURNED)
    watch.left = (*_threads_since(before), *(() if task is None else _tasks_beside(task)))


def _threads_since(before: set[threading.Thread]) -> Iterator[str]:
    for thread in threading.enumerate():
        # asyncio ends its own (`to_thread`) itself, when they have done their work.
        if thread not in before and not thread.name.startswith(("semel-", "asyncio_")):
            yield f"the thread {thread.name!r}"


def _tasks_beside(task: asyncio.Task[Any]) -> Iterator[str]:
    for other in asyncio.all_tasks() - {task}:
        frame = getattr(other.get_coro(), "cr_frame", None)
        if frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] != "semel":
            yield f"the task {frame.f_code.co_name!r}"


# -------------------------------------------------------------------------------------- in a process that forks
def _told(work: Callable[[], Any], what: str) -> Any:
    """Run something of the user's in a child and give its value; its failure is the test's mistake."""
    child = Child(lambda _: work())
    words = child.words()[1]
    if not words.ok:
        raise RuntimeError(f"{what} failed: {words.error}\n{words.story}".rstrip())
    return words.value


def _count(case: Case, key: str) -> int:
    value = _told(lambda: case.effects(key), "effects()")
    if isinstance(value, bool) or not isinstance(value, int):
        raise Misuse(f"effects() must return how many effects there are, a whole number, not {value!r}")
    return value


def _fresh(case: Case) -> str:
    if case.reset is not None:
        _told(case.reset, "reset()")
    return f"try-{os.urandom(6).hex()}"


def _client(case: Case, key: str) -> Child:
    return Child(lambda child: _perform(case, key, None, None, child))


def _call_until_success(case: Case, key: str) -> Words:
    """As a client does: again, until there is an answer or its patience ends."""
    until = time.monotonic() + case.patience
    while True:
        words = _client(case, key).words(until)[1]
        if words.ok or words.final or time.monotonic() >= until:
            return words
        time.sleep(0.02)


def discover(case: Case) -> Discovery:
    """A run without a fault: which windows there are, in their order."""
    key = _fresh(case)
    watch = Watch(case.files)

    def work(child: Child) -> Any:
        _perform(case, key, watch, None, child)
        return msgspec.to_builtins((watch.seen, watch.left))

    started = time.monotonic()
    words = Child(work).words(started + case.patience)[1]
    took = time.monotonic() - started
    windows, left = msgspec.convert(words.value or ((), ()), tuple[tuple[Window, ...], tuple[str, ...]])
    effects = _count(case, key) if words.ok else 0
    return Discovery(windows, effects, words.error, words.story, took, left, words.misuse)


def repeat(case: Case) -> Try:
    """No fault at all: the client just asks twice."""
    key = _fresh(case)
    _call_until_success(case, key)
    last = _call_until_success(case, key)
    return _judged(case, key, Window("called twice", 1, "no fault: the client asks again"), "none", last)


def try_window(case: Case, window: Window, fault: Fault) -> Try:
    key = _fresh(case)
    watch = Watch(case.files, window)
    victim = Child(lambda child: _perform(case, key, watch, fault, child))
    overtaken, seen = True, case.expected
    if victim.wait(time.monotonic() + case.patience) == "stopped":
        overtaken, seen = _overtake(case, key, victim)
    strike, _ = victim.words(time.monotonic() + case.patience)
    last = _call_until_success(case, key)
    if strike is None or strike.place is None:
        count = _count(case, key)
        return Try(window=window, fault=fault, effects=count, verdict="missed", too_late=strike is not None)
    found = _judged(case, key, strike.place, fault, last, overtaken=overtaken)
    if seen < case.expected and found.verdict == "once":
        # It came in the end: because the sleeper woke up, not because anybody had made it.
        error = "a client was told that it succeeded while the worker slept, and the effect was not there"
        return msgspec.structs.replace(found, verdict="lost", effects=seen, error=error)
    return found


def _overtake(case: Case, key: str, victim: Child) -> tuple[bool, int]:
    """The victim sleeps: others try until one has succeeded, then it wakes. False: it was in everybody's way. And how many effects
    there were when one had succeeded."""
    until = time.monotonic() + case.sleep
    while True:
        heir = _client(case, key)
        if heir.wait(until) == "late":
            victim.wake()  # it holds a lock that the heir waits for
            heir.words(time.monotonic() + case.patience)
            return False, case.expected
        words = heir.words()[1]
        if words.ok or words.final or time.monotonic() >= until:
            seen = _count(case, key) if words.ok else case.expected
            victim.wake()
            return words.ok or words.final, seen
        time.sleep(0.02)


def _judged(case: Case, key: str, window: Window, fault: str, words: Words, *, overtaken: bool = True) -> Try:
    count = _count(case, key)
    if count > case.expected:
        verdict = "doubled"
    elif not words.ok:
        verdict = "unknown" if words.final else "stuck"
    else:
        verdict = "once" if count == case.expected else "lost"
    return Try(
        window=window, fault=fault, effects=count, verdict=verdict, error=words.error, overtaken=overtaken
    )
