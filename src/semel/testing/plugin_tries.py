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
_LONGEST_COUNT = 30.0  # seconds, or patience: what counts for longer waits for something that does not come
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
    counting: float = 1.0
    """Seconds that one count takes here."""
    awaited: bool = False
    """A call gives something to await: it is made in a loop."""

    @property
    def sleep(self) -> float:
        """How long a zombie sleeps at most: until somebody took over, or as long as that would take."""
        return 2 * (10.0 if self.lease is None else self.lease) + max(0.4, 4 * self.pace)

    @property
    def long_sleep(self) -> float:
        """… where it may hold a lock of the user's own, which has its own time limit. All of `patience` would be as long as the clients
        of other lanes go on calling, and the lock may be theirs too."""
        return max(self.sleep, self.patience / 2)


class Try(msgspec.Struct, frozen=True, kw_only=True):
    """One window, one fault, and what came of it."""

    window: Window
    """Where the fault arrived, or was to arrive."""
    fault: str
    effects: int
    verdict: str
    """once, doubled, lost, failed (for good), unknown (semel says so), stuck (no client succeeded, or the struck worker did
    not end), missed (the fault was not met)"""
    error: str = ""
    overtaken: bool = True
    """A zombie was overtaken while it slept; False: nobody could, or nobody could count, so that nothing is shown about a zombie."""
    blocked: bool = False
    """… because of a lock that may be another try's, which slept meanwhile, as well as its own."""
    too_late: bool = False
    """Missed because no await came after the window: a cancel cannot strike there, whatever the handler does. No failure."""


class Run(msgspec.Struct, frozen=True):
    """What was seen of a run without faults, in the child."""

    windows: tuple[Window, ...] = ()
    depths: tuple[int, ...] = ()
    left: tuple[str, ...] = ()
    """Threads and tasks that still ran when the handler returned."""
    awaited: bool = False
    left_out: frozenset[str] = frozenset()
    """The files of `without` that the handler came to."""


class Discovery(msgspec.Struct, frozen=True):
    """A run without faults."""

    run: Run = Run()
    effects: int = 0
    unused: int = 0
    """What `effects` says of a key that nobody used."""
    error: str = ""
    story: str = ""
    seconds: float = 0.0
    counting: float = 0.0
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
def _value(words: Words, what: str) -> Any:
    """What something of the user's gave that is not the handler; its failure is the test's mistake."""
    if not words.ok:
        raise Misuse(f"{what} fails: {words.error}\n{words.story}".rstrip())
    return words.value


def _ask(case: Case, key: str, within: float) -> Words:
    return Child(lambda _: case.effects(key)).words(time.monotonic() + within)[1]


def _number(words: Words, what: str = "effects()") -> int:
    value = _value(words, what)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Misuse(f"effects() must return how many effects there are, a whole number, not {value!r}")
    return value


def _count(case: Case, key: str) -> int:
    """Nobody of this try sleeps. Somebody of another lane may, with a lock on everything: it wakes up before patience ends."""
    until = time.monotonic() + case.patience
    while True:
        words = _ask(case, key, max(case.patience, _LONGEST_COUNT))
        if words.ok or time.monotonic() >= until:
            return _number(words)
        time.sleep(0.1)


def _new_key() -> str:
    return f"try-{os.urandom(6).hex()}"


def _fresh(case: Case) -> str:
    if case.reset is not None:
        reset = case.reset
        _value(Child(lambda _: reset()).words()[1], "reset()")
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
        run = Run(tuple(watch.seen), tuple(watch.depths), watch.left, awaited, frozenset(watch.left_out))
        return msgspec.to_builtins(run)

    started = time.monotonic()
    words = Child(work).words(started + case.patience)[1]
    took = time.monotonic() - started
    if not words.ok:
        return Discovery(error=words.error, story=words.story, misuse=words.misuse)
    started = time.monotonic()
    within = max(case.patience, _LONGEST_COUNT)
    effects, unused = _number(_ask(case, key, within)), 0
    counting = time.monotonic() - started
    # With a reset everything is the try's own, and the arguments may be fixed: there are no other keys.
    if case.reset is None and effects == case.expected:
        unused = _number(_ask(case, _new_key(), within), "effects() of a key without any effect")
    return Discovery(msgspec.convert(words.value, Run), effects, unused, seconds=took, counting=counting)


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
        count, late = _count(case, key), strike is not None
        return Try(
            window=window, fault=fault, effects=count, verdict="missed", error=words.error, too_late=late
        )
    found = _judged(case, key, strike.place, fault, last, end)
    if words.late and found.verdict == "once":
        found = msgspec.structs.replace(found, verdict="stuck", error=f"the struck worker: {words.error}")
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
    """The victim sleeps: others try until one has succeeded and was counted, then it wakes. Where none can, they wait for a lock that
    it holds, or are refused for half of their patience: a lock of the user's own may have a time limit."""
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
            counted = _ask(case, key, case.sleep + 4 * case.counting) if words.ok else None
            victim.wake()
            if counted is None:
                return "overtaken"
            if (
                not counted.ok
            ):  # it waits for the sleeper, as the effect may: what fails by itself fails again in the end
                return "blocked"
            lost.look(_number(counted), _TOLD_ASLEEP)
            return "overtaken"
        if slept >= (case.sleep if words.lock else case.long_sleep):
            blocked = words.lock == "store" or (not words.lock and _keeps_others_off(case))
            victim.wake()
            return "blocked" if blocked else "refused"
        time.sleep(0.02 if slept < case.sleep else 0.1)


def _keeps_others_off(case: Case) -> bool:
    """Whether another key is refused as well: then the lock is everybody's, and it may not be this sleeper who holds it."""
    if case.reset is not None:
        return False  # all keys are one, and no other try is under way
    return not _client(case, _new_key()).words(time.monotonic() + case.sleep)[1].ok


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
