"""Which functions are coroutine functions, and the refusal of those where nothing is awaited."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import CO_COROUTINE, iscoroutinefunction
from types import CodeType, FunctionType
from typing import Any

from semel.errors import ConfigurationError

__all__ = ["is_async", "refuse_async"]


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling `fn` gives a coroutine, seen through partials, methods and callable objects."""
    if type(fn) is FunctionType:  # the common case first: this is asked at every call
        if fn.__code__.co_flags & CO_COROUTINE:
            return True
        if not fn.__dict__:  # nor is it marked as one
            return False
    while isinstance(fn, partial):
        fn = fn.func
    code = getattr(fn, "__code__", None)
    if not isinstance(code, CodeType):  # none, or what a proxy answers that has every attribute
        return iscoroutinefunction(type(fn).__call__)
    return code.co_flags & CO_COROUTINE != 0 or iscoroutinefunction(fn)


def refuse_async(what: str, fn: Callable[..., Any], remedy: str) -> None:
    """Raises ConfigurationError for a coroutine function: what it would do is never awaited."""
    if is_async(fn):
        raise ConfigurationError(
            f"{what} cannot be the coroutine function {getattr(fn, '__qualname__', repr(fn))}: {remedy}"
        )
