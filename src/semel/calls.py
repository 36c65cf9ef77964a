"""One call, with everything checked, and the words for it in messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from inspect import CO_ASYNC_GENERATOR, CO_GENERATOR, iscoroutine
from types import AsyncGeneratorType, CodeType, CoroutineType, GeneratorType, NoneType
from typing import Any, Literal

import msgspec

from semel.codec import Codec
from semel.errors import ConfigurationError, InProgress, PreviousFailure
from semel.keys import Scope, mask
from semel.model import Busy, Failure
from semel.options import Options

__all__ = [
    "Call",
    "Unawaited",
    "add_note",
    "check_arguments",
    "clean",
    "cut",
    "failure_of",
    "in_progress",
    "is_lazy",
    "name_of",
    "not_run",
    "nothing_to_run",
    "refuse_generator",
]


_GENERATORS = CO_GENERATOR | CO_ASYNC_GENERATOR
_LAZY = frozenset({GeneratorType, AsyncGeneratorType, CoroutineType})
_PLAIN = frozenset({NoneType, bool, bytes, dict, float, int, list, str, tuple})


def nothing_to_run() -> None:
    """The function of a call that has none: a claim by hand, a look at a record."""


class Call(msgspec.Struct, frozen=True):
    """One call, with everything checked: what must happen once, how to do it, and what to say meanwhile."""

    scope: Scope
    key: str
    options: Options
    fn: Callable[..., Any] = nothing_to_run
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    codec: Codec | None = None
    """None: the result is not kept (consume)."""
    fingerprint: bytes = b""
    labels: Mapping[str, str] | None = None


def refuse_generator(fn: Any) -> None:
    """A generator function runs nothing when it is called: its effects would come after its outcome."""
    code = getattr(fn, "__code__", None)
    if not isinstance(code, CodeType):  # a proxy may have any attribute
        while isinstance(fn, partial):
            fn = fn.func
        own, called = getattr(fn, "__code__", None), getattr(type(fn).__call__, "__code__", None)
        code = own if isinstance(own, CodeType) else called
    if code is not None and code.co_flags & _GENERATORS:
        raise ConfigurationError(
            f"{getattr(fn, '__qualname__', fn)} is a generator function: what it yields cannot be an outcome. "
            "Return a list, or call semel inside of it"
        )


def check_arguments(fn: Callable[..., Any], kwargs: Any) -> None:
    """Raises ConfigurationError for what cannot be the arguments by name of a function."""
    if fn is nothing_to_run:
        raise ConfigurationError("kwargs are arguments of a function, and a claim runs none: leave them out")
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ConfigurationError(
            f"kwargs must be a mapping of arguments for the function, each by its name, not {kwargs!r}"
        )


def is_lazy(value: Any) -> bool:
    """Whether a value is a promise to run, and no result: a generator, a coroutine, or anything else to await."""
    kind = value.__class__
    return kind not in _PLAIN and (kind in _LAZY or hasattr(kind, "__await__"))


class Unawaited(ConfigurationError):
    """A function gave back a task, or another thing to await, that may be at work: its key is held, whatever `on_error` says.

    Only its own: a run around it, through which this error passes, ends as its own `on_error` says.
    """

    scope: Scope


def not_run(call: Call, value: Any, colour: Literal["sync", "async"] = "async") -> ConfigurationError:
    """For a function that gave back what `is_lazy`."""
    if isinstance(value, CoroutineType):
        value.close()
        remedy = "await it, or return" if colour == "async" else "use AsyncSemel, or return"
        return ConfigurationError(
            f"{name_of(call)}: the function returned a coroutine, and nothing of that has run: {remedy} what it gives"
        )
    if hasattr(type(value), "__await__"):
        remedy = "await it, and return" if colour == "async" else "use AsyncSemel, or return"
        held = Unawaited(
            f"{name_of(call)}: the function returned a {type(value).__name__} that nobody has awaited, and whether it happens is "
            f"not known: {remedy} what it gives. Look the effect up, then resolve the key"
        )
        held.scope = call.scope
        return held
    return ConfigurationError(
        f"{name_of(call)}: the function returned a {type(value).__name__}, and nothing of that has run. Return what it "
        "gives instead of the thing itself"
    )


def name_of(call: Call) -> str:
    scope = call.scope
    return f"key {mask(call.key)} [{scope.hex[:8]}] of {scope.tenant}/{scope.operation}"


def in_progress(call: Call, busy: Busy, *, crowded: bool = False) -> InProgress:
    if busy.delayed:
        text = f"{name_of(call)} failed and may be tried again in {busy.retry_after:.3g} s"
    elif crowded:
        text = f"{name_of(call)} is in progress and {call.options.max_waiters} callers wait for it already (max_waiters): try again later"
    elif not busy.attempt:  # locked: nobody but the transaction that holds the record knows more
        text = (
            f"{name_of(call)} is in progress: a transaction that is still open holds its record; try again later, or "
            "pass wait=seconds to wait for its outcome"
        )
    else:
        text = (
            f"{name_of(call)} is in progress (attempt {busy.attempt}, lease for {busy.retry_after:.3g} s more); try "
            "again later, or pass wait=seconds to wait for its outcome"
        )
    return InProgress(text, retry_after=busy.retry_after, attempt=busy.attempt)


def add_note(error: BaseException, text: str) -> None:
    """Tell more of an error that its caller gets. One that takes no notes, as a frozen dataclass, is told without."""
    with suppress(Exception):
        error.add_note(f"semel: {text}")


def failure_of(error: BaseException | str) -> Failure:
    """An error as it is stored: cut so that no column overflows after the effect."""
    if isinstance(error, str):
        return Failure("Error", None, cut(error, 2000))
    if isinstance(error, PreviousFailure):
        return Failure(error.type_name, error.code, cut(error.message, 2000))
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ must not lose the failure
        message = "<the error has no readable text>"
    try:
        code = _code_of(error)
    except Exception:  # noqa: BLE001 - nor a broken property, or a method that wants arguments
        code = None
    return Failure(
        cut(type(error).__qualname__, 255), None if code is None else cut(code, 64), cut(message, 2000)
    )


def _code_of(error: BaseException) -> str | None:
    code = getattr(error, "code", None)
    if not callable(code):
        return None if code is None else str(code)
    code = code()  # gRPC's way
    if iscoroutine(code):
        code.close()
    if isinstance(code, Enum):
        return code.name
    return str(code) if isinstance(code, int | str) else None


def clean(text: str) -> str:
    """Text for people as every store can keep it: half a surrogate pair and NUL become a mark."""
    return text.encode("utf-8", "replace").decode().replace("\0", "�")


def cut(text: str, most: int) -> str:
    """The same, and no longer than that."""
    kept = clean(text)
    return kept if len(kept) <= most else kept[: most - 1] + "…"
