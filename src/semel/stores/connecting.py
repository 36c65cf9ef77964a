"""Connections that are made by somebody else's blocking code, within our own time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from semel.bell import Bell

__all__ = ["in_time"]

T = TypeVar("T")


def in_time(call: Callable[[], T], timeout: float, *, late: Callable[[T], object]) -> T:
    """Run a blocking call that has no usable timeout (name resolution, libpq's two-second steps, a pool of others) in a thread.

    When it is over time it is left to itself, and `late` clears up what it may still bring.
    """
    # Not a Future: a signal's handler that raises inside of one leaves its lock behind, for which the thread would wait.
    answered = Bell()
    ended: dict[str, _Ending[T]] = {}  # by whoever is first: the answer, or its caller's leaving

    def work() -> None:
        try:
            ending = _Ending([call()])
        except BaseException as error:  # noqa: BLE001 - carried over to the caller's thread
            ending = _Ending([], error)
        if ended.setdefault("so", ending) is ending:
            answered.ring()
        else:
            ending.clear_up(late)

    try:
        _start(threading.Thread(target=work, name="semel-connect", daemon=True))
        if not answered.heard(timeout):
            raise TimeoutError
        return ended["so"].value()
    except BaseException:  # over time, or a signal's handler that raised
        ended.setdefault("so", _Ending([])).clear_up(late)
        raise


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except KeyError as error:  # a signal's handler raised in it, and then what clears up after that
        raise error.__context__ or error from None


class _Ending(msgspec.Struct, Generic[T]):
    """How a call ended: with its one value, with an error, or with neither: nobody waits for it any more."""

    values: list[T]
    error: BaseException | None = None

    def value(self) -> T:
        error, self.error = self.error, None
        if error is None:
            return self.values[0]
        try:
            raise error
        finally:
            del error  # its traceback has this frame in it

    def clear_up(self, late: Callable[[T], object]) -> None:
        for value in self.values:
            late(value)
