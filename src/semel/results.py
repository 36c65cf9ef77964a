"""Which codec a function's results need: from `result_type`, or from its return annotation."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from inspect import CO_ASYNC_GENERATOR, CO_GENERATOR
from types import FunctionType
from typing import Any

from semel.codec import Codec, check_encodable, encoder_for, return_type

__all__ = ["codec_for", "known_codec"]

_GENERATORS = CO_GENERATOR | CO_ASYNC_GENERATOR

_MOST = 4096  # types made in a loop must not fill memory
_checked: dict[Any, Codec] = {}
_UNTYPED = encoder_for(None)
# By the function's id; the weak reference tells whether the id still means that function. Two functions may share code
# and annotation text and yet mean two classes, so nothing less than the function itself will do.
_by_function: dict[int, tuple[weakref.ref[Any], Codec]] = {}


def codec_for(fn: Callable[..., Any] | None, result_type: Any = None) -> Codec:
    """Raises CodecError when the annotation tells that the result could never be stored: before any effect."""
    if result_type is not None:
        return _codec_of_type(result_type)
    known = _by_function.get(id(fn))
    if known is not None and known[0]() is fn:
        return known[1]
    annotations = getattr(fn, "__annotations__", None)
    if annotations is not None and "return" not in annotations and not hasattr(fn, "__wrapped__"):
        return _UNTYPED
    codec = _codec_of_type(return_type(fn) if fn is not None else None)
    # A bound method is a new object at every call; a generator function is refused by whoever is to run it.
    if type(fn) is FunctionType and not fn.__code__.co_flags & _GENERATORS:
        if len(_by_function) >= _MOST:
            _by_function.clear()
        _by_function[id(fn)] = (weakref.ref(fn), codec)
    return codec


def known_codec(fn: Callable[..., Any]) -> Codec | None:
    """The codec of a plain or coroutine function that was met before, whose annotation has been found good."""
    known = _by_function.get(id(fn))
    return known[1] if known is not None and known[0]() is fn else None


def _codec_of_type(result_type: Any) -> Codec:
    try:
        codec = _checked.get(result_type)
    except TypeError:  # an annotation that cannot be hashed
        check_encodable(result_type)
        return encoder_for(result_type)
    if codec is None:
        check_encodable(result_type)
        if len(_checked) >= _MOST:
            _checked.clear()
        codec = _checked[result_type] = encoder_for(result_type)
    return codec
