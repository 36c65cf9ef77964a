"""Which codec a function's results need: from `result_type`, or from its return annotation."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from inspect import CO_ASYNC_GENERATOR, CO_GENERATOR
from types import CodeType, FunctionType, MethodType
from typing import Any

from semel.codec import Codec, check_encodable, encoder_for, return_type
from semel.codec.annotations import names_a_cell

__all__ = ["codec_for", "known_codec"]

_GENERATORS = CO_GENERATOR | CO_ASYNC_GENERATOR

_MOST = 4096  # types made in a loop must not fill memory
_checked: dict[Any, Codec] = {}
_UNTYPED = encoder_for(None)
# By the function's id; the weak reference tells whether the id still means that function. Two functions may share code
# and annotation text and yet mean two classes, so nothing less than the function itself will do.
_by_function: dict[int, tuple[weakref.ref[Any], Codec]] = {}
# A function that another one makes anew for each call, as for a transaction, is known by what it is made of. Its code is
# kept, so that the id stays its own; globals and annotation are compared, for they may differ where the code does not.
_by_code: dict[int, tuple[CodeType, dict[str, Any], Any, Codec]] = {}
_NOTHING = object()


def codec_for(fn: Callable[..., Any] | None, result_type: Any = None) -> Codec:
    """Raises CodecError when the annotation tells that the result could never be stored: before any effect."""
    if result_type is not None:
        return _codec_of_type(result_type)
    known = _by_function.get(id(fn))
    if known is not None and known[0]() is fn:
        return known[1]
    plain: Any = fn
    if type(plain) is MethodType:
        plain = plain.__func__
    if fn is None or (
        type(plain) is FunctionType  # the annotations of a class, or of an object's class, are its fields
        and "return" not in plain.__annotations__
        and "__wrapped__" not in plain.__dict__
    ):
        codec = _UNTYPED
    else:
        codec = _codec_of_type(return_type(fn))
    # A bound method is a new object at every call; a generator function is refused by whoever is to run it.
    if type(fn) is FunctionType and not fn.__code__.co_flags & _GENERATORS:
        _remember(fn, codec)
    return codec


def _remember(fn: FunctionType, codec: Codec) -> None:
    hint = fn.__annotations__.get("return", _NOTHING)
    if "<locals>" in fn.__qualname__ and not fn.__dict__ and not names_a_cell(fn, hint):
        if len(_by_code) >= _MOST:
            _by_code.clear()
        _by_code[id(fn.__code__)] = (fn.__code__, fn.__globals__, hint, codec)
        return
    if len(_by_function) >= _MOST:
        _by_function.clear()
    _by_function[id(fn)] = (weakref.ref(fn), codec)


def known_codec(fn: Callable[..., Any]) -> Codec | None:
    """The codec of a plain or coroutine function that was met before, whose annotation has been found good."""
    known = _by_function.get(id(fn))
    if known is not None and known[0]() is fn:
        return known[1]
    if type(fn) is not FunctionType:
        return None
    code = fn.__code__
    made = _by_code.get(id(code))
    if (
        made is None
        or made[0] is not code
        or made[1] is not fn.__globals__
        or made[2] is not fn.__annotations__.get("return", _NOTHING)
        or fn.__dict__
    ):
        return None
    return made[3]


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
