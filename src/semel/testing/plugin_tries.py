"""Trying one window with one fault: fork a victim, strike it, let clients call again until they succeed, count the effects.

Everything that is the user's runs in a child that was forked for it: the handler, `effects`, `reset`, the making of
arguments. The process that forks holds no connection of theirs, so each child begins as a fresh worker does.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal

import msgspec

from semel.testing.plugin_children import Child, Misuse, Words
from semel.testing.plugin_files import Places
from semel.testing.plugin_stories import story_of, told
from semel.testing.plugin_windows import CALLED, RETURNED, Fault, Watch, Window, shorter_leases, striker

__all__ = ["Case", "Discovery", "Run", "Try", "discover", "repeat", "try_window"]

_End = Literal["overtaken", "blocked", "refused"]
_TOLD_ASLEEP = "a client was told that it succeeded while the worker slept, and the effect was not there"
_TOLD_STRUCK = "the struck worker itself told its client that it succeeded, and the effect was not there"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What the user gave."""

    run: Callable[..., Any]
    arguments: Callable[[str], Sequence[Any]]
    effects: Callable[[str], int]
    reset: Callable[[], Any] | None
    places: Places
    expected: int
    lease: float | None
    patience: float

    pace: float = 1.0
    """Seconds that one run takes here."""
    awaited: bool = False
    """A call gives something to await: it is made in a loop."""

    @property
    def sleep(self) -> float:
        """How long a zombie sleeps at most: until somebody took over, or as long as that would take."""
        return 2 * (10.0 if self.lease is None else self.lease) + max(0.4, 4 * self.pace)


class Try(msgspec.Struct, frozen=True, kw_only=True):
    """One window, one fault, and what came of it."""

    window: Window
    """Where the fault arrived, or was to arrive."""
    fault: str
    effects: int
    verdict: str
    """once, doubled, lost, failed (for good), unknown (semel says so), stuck (no client succeeded), missed (the fault was not met)"""
    error: str = ""
    overtaken: bool = True
    """A zombie was overtaken while it slept; False: nobody could, so that nothing is shown about a zombie."""
    blocked: bool = False
    """… because of a lock: its own, or that of another try that slept meanwhile."""
    too_late: bool = False
    """Missed because no await came after the window: a cancel cannot strike there, whatever the handler does. No failure."""


class Run(msgspec.Struct, frozen=True):
    """What was seen of a run without faults, in the child."""

    windows: tuple[Window, ...] = ()
    depths: tuple[int, ...] = ()
    left: tuple[str, ...] = ()
    """Threads and tasks that still ran when the handler returned."""
    awaited: bool = False


class Discovery(msgspec.Struct, frozen=True):
    """A run without faults."""

    run: Run = Run()
    effects: int = 0
    unused: int = 0
    """What `effects` says of a key that nobody used."""
    error: str = ""
    story: str = ""
    seconds: float = 0.0
    misuse: bool = False


# ------------------------------------------------------------------------------------------ inside a child
def _perform(case: Case, key: str, watch: Watch | None, fault: Fault | None, child: Child) -> bool:
    """Call the handler once, as a worker would. Whether it had to be awaited."""
    shorter_leases(case.lease)
    arguments = _arguments(case, key)
    if case.awaited or _is_async(case.run):
        asyncio.run(_perform_async(case, arguments, watch, fault, child))
        return True
    with _watched(watch, fault, child, None):
        value = case.run(*arguments)
        if awaited := inspect.isawaitable(value):  # the first run; those after it are begun in a loop
            asyncio.run(_await(value, watch))
        _refuse_generator(value)
    return awaited


def _is_async(run: Any) -> bool:
    """As it is called: what a wrapper wraps may have the other colour."""
    return inspect.iscoroutinefunction(run) or inspect.iscoroutinefunction(getattr(run, "__call__", None))  # noqa: B004 - an object's


def _arguments(case: Case, key: str) -> tuple[Any, ...]:
    given: Any
    try:
        given = case.arguments(key)
    except Exception as error:
        raise Misuse(f"arguments= fails for the key {key!r}: {told(error)}\n{story_of(error)}") from error
    if isinstance(given, str | bytes | Mapping | AbstractSet) or not isinstance(given, Iterable):
        what = "the text " if isinstance(given, str | bytes) else ""
        raise Misuse(
            f"arguments= gave {what}{given!r}: give a tuple of arguments, arguments=lambda key: (key,)"
        )
    return tuple(given)


def _refuse_generator(value: Any) -> None:
    """A call that only promises to work has done nothing yet."""
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise Misuse(
            f"the handler {value.__qualname__} is a generator, whose body does not run when it is called: take `yield` out, or "
            "give a function that goes through it, lambda key: list(handler(key))"
        )


async def _perform_async(
    case: Case, arguments: tuple[Any, ...], watch: Watch | None, fault: Fault | None, child: Child
) -> None:
    with _watched(watch, fault, child, asyncio.current_task()):
        await _await(case.run(*arguments), watch)


async def _await(value: Any, watch: Watch | None) -> None:
    _refuse_generator(await value if inspect.isawaitable(value) else value)
    task = asyncio.current_task()
    if watch is not None and task is not None:
        watch.left = (*_tasks_beside(task),)


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
    watch.left = (*_threads_since(before), *watch.left)


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
def _said_by(work: Callable[[], Any], what: str) -> Any:
    """Run something of the user's in a child and give its value; its failure is the test's mistake."""
    words = Child(lambda _: work()).words()[1]
    if not words.ok:
        raise Misuse(f"{what} fails: {words.error}\n{words.story}".rstrip())
    return words.value


def _count(case: Case, key: str, what: str = "effects()") -> int:
    value = _said_by(lambda: case.effects(key), what)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Misuse(f"effects() must return how many effects there are, a whole number, not {value!r}")
    return value


def _new_key() -> str:
    return f"try-{os.urandom(6).hex()}"


def _fresh(case: Case) -> str:
    if case.reset is not None:
        _said_by(case.reset, "reset()")
    return _new_key()


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
    watch = Watch(case.places)

    def work(child: Child) -> Any:
        awaited = _perform(case, key, watch, None, child)
        return msgspec.to_builtins(Run(tuple(watch.seen), tuple(watch.depths), watch.left, awaited))

    started = time.monotonic()
    words = Child(work).words(started + case.patience)[1]
    took = time.monotonic() - started
    if not words.ok:
        return Discovery(error=words.error, story=words.story, misuse=words.misuse)
    effects, unused = _count(case, key), 0
    # With a reset everything is the try's own, and the arguments may be fixed: there are no other keys.
    if case.reset is None and effects == case.expected:
        unused = _count(case, _new_key(), "effects() of a key without any effect")
    return Discovery(msgspec.convert(words.value, Run), effects, unused, seconds=took)


def repeat(case: Case) -> Try:
    """No fault at all: the client just asks twice."""
    key = _fresh(case)
    _call_until_success(case, key)
    last = _call_until_success(case, key)
    return _judged(case, key, Window("called twice", 1, "no fault: the client asks again"), "none", last)


def try_window(case: Case, window: Window, fault: Fault) -> Try:
    key = _fresh(case)
    watch = Watch(case.places, window)
    victim = Child(lambda child: _perform(case, key, watch, fault, child))
    end: _End = "overtaken"
    lost = _Lost(case.expected)
    if victim.wait(time.monotonic() + case.patience) == "stopped":
        end = _overtake(case, key, victim, lost)
    strike, words = victim.words(time.monotonic() + case.patience)
    if words.ok and strike is not None and strike.place is not None:
        lost.look(_count(case, key), _TOLD_STRUCK)
    last = _call_until_success(case, key)
    if strike is None or strike.place is None:
        count = _count(case, key)
        return Try(window=window, fault=fault, effects=count, verdict="missed", too_late=strike is not None)
    found = _judged(case, key, strike.place, fault, last, end)
    # What was missing came in the end, because the sleeper woke up or the client asked again: it need not have.
    if lost.error and found.verdict != "doubled":
        return msgspec.structs.replace(found, verdict="lost", effects=lost.seen, error=lost.error)
    return found


class _Lost:
    """Whether somebody was told that it succeeded when the effect was not there."""

    def __init__(self, expected: int) -> None:
        self.seen = expected
        self.error = ""

    def look(self, effects: int, told: str) -> None:
        if effects < self.seen:
            self.seen, self.error = effects, told


def _overtake(case: Case, key: str, victim: Child, lost: _Lost) -> _End:
    """The victim sleeps: others try until one has succeeded, then it wakes. Where none can, they wait for a lock that it holds, or are
    refused for as long as their patience lasts: a lock of the user's own may have a time limit."""
    started = time.monotonic()
    while True:
        heir = _client(case, key)
        if heir.wait(time.monotonic() + case.sleep) == "late":
            victim.wake()
            heir.words(time.monotonic() + case.patience)
            return "blocked"
        words = heir.words()[1]
        slept = time.monotonic() - started
        if words.ok or words.final:
            if words.ok:
                lost.look(_count(case, key), _TOLD_ASLEEP)
            victim.wake()
            return "overtaken"
        if slept >= (case.sleep if words.lock else max(case.sleep, case.patience)):
            victim.wake()
            return "blocked" if words.lock == "store" else "refused"
        time.sleep(0.02 if slept < case.sleep else 0.1)


def _judged(case: Case, key: str, window: Window, fault: str, words: Words, end: _End = "overtaken") -> Try:
    count = _count(case, key)
    if count > case.expected:
        verdict = "doubled"
    elif not words.ok:
        verdict = words.final or "stuck"
    else:
        verdict = "once" if count == case.expected else "lost"
    return Try(
        window=window,
        fault=fault,
        effects=count,
        verdict=verdict,
        error=words.error,
        overtaken=end == "overtaken",
        blocked=end == "blocked",
    )
