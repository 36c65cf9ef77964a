"""Whose error it is: a program's own functions raise what they like, and that says nothing about the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import isawaitable, iscoroutine
from typing import Any

from semel.calls import is_lazy
from semel.coroutines import is_async
from semel.errors import ConfigurationError

__all__ = ["Witness"]

Check = Callable[[Any], None]


def _anything(_: object) -> None: ...


class Witness:
    """Notes what functions raise that go through `heard`, of either colour."""

    __slots__ = ("_awaits", "_raised")

    def __init__(self, *, awaits: bool) -> None:
        self._awaits = awaits
        self._raised: list[Exception] = []

    def saw(self, error: Exception) -> bool:
        """Whether one of them raised it."""
        return any(error is each for each in self._raised)

    def heard(self, fn: Callable[..., Any], check: Check = _anything) -> Callable[..., Any]:
        """The same function. `check` raises for an answer that it must not give: then that is its error.

        So it is with a promise to run in place of an answer, and in plain code with whatever must be awaited.
        """

        @wraps(fn)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await self._answered(fn(*args, **kwargs), check)

        @wraps(fn)
        def plain(*args: Any, **kwargs: Any) -> Any:
            with self._listening():
                answer = fn(*args, **kwargs)
                if self._awaits and isawaitable(answer):
                    return self._answered(answer, check)
                return _checked(answer, check)

        return coroutine if is_async(fn) else plain

    async def _answered(self, coming: Awaitable[Any], check: Check) -> Any:
        with self._listening():
            return _checked(await coming, check)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._raised.append(error)
            raise


def _checked(answer: Any, check: Check) -> Any:
    _refuse_promise(answer)
    check(answer)
    return answer


def _refuse_promise(answer: Any) -> None:
    if not is_lazy(answer):
        return
    if iscoroutine(answer):
        answer.close()  # or Python warns that nobody awaited it
    raise ConfigurationError(
        f"the function returned a {type(answer).__name__}, and nothing of that has run: return what it gives, or use "
        "AsyncSemel for what must be awaited"
    )
