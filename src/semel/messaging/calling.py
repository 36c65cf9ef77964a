"""How an inbox calls a handler: with the session if it wants it, awaited if it may be, and what it returned as text."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from inspect import CO_VARARGS
from types import FunctionType
from typing import Any, Final

import msgspec

from semel.errors import ConfigurationError

__all__ = ["Handler", "awaited", "call", "shown", "takes_two"]

Handler = Callable[..., Any]


async def call(handler: Handler, session: Any, what: Any, awaits: bool) -> Any:
    """What the handler returns, of a message or of a batch."""
    return await awaited(handler(session, what) if takes_two(handler) else handler(what), awaits=awaits)


async def awaited(result: Any, *, awaits: bool) -> Any:
    """The result itself. ConfigurationError for a coroutine where nothing can be awaited."""
    if inspect.isawaitable(result):
        if not awaits:
            if inspect.iscoroutine(result):
                result.close()
            raise ConfigurationError(
                "a coroutine function cannot run in a sync session: use an async session, or a plain function"
            )
        return await result
    return result


def takes_two(handler: Handler) -> bool:
    """Whether the handler wants the session too."""
    # Read off the code of a plain function: one may be made anew for each message, and `signature` costs more than an admission.
    if type(handler) is FunctionType and not handler.__dict__:  # neither wrapped nor given another signature
        code = handler.__code__
        return code.co_argcount - len(handler.__defaults__ or ()) >= 2 or bool(code.co_flags & CO_VARARGS)
    try:
        return _known(handler)
    except TypeError:  # an object that cannot be hashed
        return _signed_for_two(handler)


def _signed_for_two(handler: Handler) -> bool:
    try:
        parameters = inspect.signature(handler).parameters.values()
    except (TypeError, ValueError):
        return False
    places = [p for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    needed = [p for p in places if p.default is p.empty]
    return len(needed) >= 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


_known: Final = lru_cache(maxsize=1024)(_signed_for_two)


def shown(result: Any) -> str | None:
    """What the handler returned, for the consume log; what JSON cannot say is left out."""
    try:
        return msgspec.json.encode(result).decode()[:10_000]
    except (TypeError, ValueError, msgspec.MsgspecError):
        return None
