"""Which codec a function's results need: from `result_type`, or from its return annotation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from semel.codec import Codec, check_encodable, encoder_for, return_type

__all__ = ["codec_for"]

_MOST = 4096  # types made in a loop must not fill memory
_checked: dict[Any, Codec] = {}
_UNTYPED = encoder_for(None)


def codec_for(fn: Callable[..., Any] | None, result_type: Any = None) -> Codec:
    """Raises CodecError when the annotation tells that the result could never be stored: before any effect."""
    if result_type is None:
        annotations = getattr(fn, "__annotations__", None)
        if annotations is not None and "return" not in annotations and not hasattr(fn, "__wrapped__"):
            return _UNTYPED
        # Looked up on every call: two functions may share code and annotation text and yet mean two classes.
        result_type = return_type(fn) if fn is not None else None
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
