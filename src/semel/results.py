"""Which codec a function's results need: from `result_type`, or from its return annotation."""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from typing import Any

from semel.codec import Codec, check_encodable, encoder_for, return_type

__all__ = ["codec_for"]

_MOST = 4096  # functions and types made in a loop must not fill memory

# Closures made anew for every call share their code object, so that is what an answer is remembered by, together
# with the annotation itself, which may differ between two closures of one code.
_known: dict[Any, Codec] = {}


def codec_for(fn: Callable[..., Any] | None, result_type: Any = None) -> Codec:
    """Raises CodecError when the annotation tells that the result could never be stored: before any effect."""
    hint = result_type
    if hint is None:
        if fn is not None and hasattr(
            fn, "__wrapped__"
        ):  # wrappers made by one decorator share their code, not what they wrap
            fn = unwrap(fn)
        annotations = getattr(fn, "__annotations__", None)
        hint = None if annotations is None else annotations.get("return")
        name: Any = (getattr(fn, "__code__", fn), hint)
    else:
        name = hint
    try:
        codec = _known.get(name)
    except TypeError:  # an annotation that cannot be hashed: looked at afresh every time
        return _made(fn, result_type)
    if codec is None:
        if len(_known) >= _MOST:
            _known.clear()
        codec = _known[name] = _made(fn, result_type)
    return codec


def _made(fn: Callable[..., Any] | None, result_type: Any) -> Codec:
    hint = return_type(fn) if result_type is None and fn is not None else result_type
    check_encodable(hint)
    return encoder_for(hint)
