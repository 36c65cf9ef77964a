"""A forked process that does one thing of the user's, and what it says of it before it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from math import inf
from typing import Any, Literal, NoReturn

import msgspec

from semel.errors import InProgress, OutcomeUnknown, PreviousFailure
from semel.testing.plugin_stories import story_of, text_of, told
from semel.testing.plugin_windows import Window

__all__ = ["Child", "Misuse", "Strike", "Words"]

_DIE_WITH_PARENT = 1
_LATE = "it did not end: raise patience=, or find out what it waits for"
_LOCKED = frozenset({"SQLITE_BUSY", "SQLITE_LOCKED", "55P03"})


class Misuse(Exception):
    """What was given to `exactly_once` cannot be a handler, its arguments or a count: no finding about a handler."""


class Words(msgspec.Struct):
    """What a child says before it ends."""

    ok: bool = False
    error: str = ""
    final: Literal["", "unknown", "failed"] = ""
    """Calling again changes nothing: the key is held for a person, or a failure is its outcome."""
    lock: Literal["", "key", "store"] = ""
    """An open transaction was in its way, of this key's or of anybody's: no lease, and no time after which somebody else may."""
    value: Any = None
    story: str = ""
    misuse: bool = False
    late: bool = False
    """It did not end in time."""


class Strike(msgspec.Struct, frozen=True):
    """A fault came to its window."""

    place: Window | None
    """Where it arrived: a cancel strikes at the next await. None: there was no await any more."""


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
            words.error = text_of(error) if words.misuse else told(error)
            words.final, words.lock = _finality(error), _lock(error)
            words.story = story_of(error)
        finally:
            try:
                self._said.write(b"=" + _encoded(words))
                sys.stdout.flush()
            finally:
                os._exit(0)

    def say_struck(self, place: Window | None) -> None:
        self._said.write(b"!" + msgspec.json.encode(Strike(place)) + b"\n")

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

    def words(self, deadline: float = inf) -> tuple[Strike | None, Words]:
        """How it was struck, if it was, and its last words. A killed one has none; one that is late (or stopped so late that nobody
        will wake it) is killed, and was struck all the same."""
        late = self.wait(deadline) != "ended"
        if late:
            self._kill()
        text = os.pread(self._said.fileno(), 1 << 30, 0)
        self._said.close()
        strike = None
        if text.startswith(b"!"):
            first, _, text = text[1:].partition(b"\n")
            strike = msgspec.json.decode(first, type=Strike)
        if late:
            return strike, Words(error=_LATE, late=True)
        return strike, msgspec.json.decode(text[1:], type=Words) if text else Words(error=self._silence())

    def _silence(self) -> str:
        """Why it said nothing."""
        if os.WIFEXITED(self._status):
            code = os.WEXITSTATUS(self._status)
            return f"it ended its process itself (os._exit({code})): let it return, or raise an error"
        return f"killed by {signal.Signals(os.WTERMSIG(self._status)).name}"

    def end(self) -> None:
        self._kill()
        self._said.close()

    def _kill(self) -> None:
        if not self.ended:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.ended = True


def _finality(error: BaseException) -> Literal["", "unknown", "failed"]:
    if isinstance(error, PreviousFailure):
        return "failed"
    return "unknown" if isinstance(error, OutcomeUnknown) else ""


def _lock(error: BaseException) -> Literal["", "key", "store"]:
    seen: list[BaseException | None] = [None]
    each: BaseException | None = error
    while each not in seen:
        seen.append(each)
        if isinstance(each, InProgress) and not each.attempt:  # semel found the record locked
            return "key"
        if not _LOCKED.isdisjoint((getattr(each, "sqlite_errorname", ""), getattr(each, "sqlstate", ""))):
            return "store"
        each = each and (each.__cause__ or each.__context__)
    return ""


def _encoded(words: Words) -> bytes:
    """As JSON, whatever is in it: an error's text may hold half a surrogate pair, `reset` may return a cursor."""
    try:
        return msgspec.json.encode(words)
    except Exception:  # noqa: BLE001 - what cannot be encoded is told as it looks
        return msgspec.json.encode(_spelled(msgspec.structs.asdict(words)))


def _spelled(value: Any) -> Any:
    match value:
        case None | bool() | float():
            return value
        case int() if abs(value) < 1 << 63:
            return int(value)
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case list() | tuple():
            return [_spelled(each) for each in value]
        case dict():
            return {_spelled(str(name)): _spelled(each) for name, each in value.items()}
    return _spelled(_shown(value))


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - it is the user's class
        return f"a {type(value).__name__}"
