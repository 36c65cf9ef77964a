"""What a person wrote in place of a result, as the function that should have given it would have."""

from __future__ import annotations

from typing import Any

import msgspec

from semel.codec.paths import type_name
from semel.errors import CodecError

__all__ = ["as_told"]


def as_told(value: Any, result_type: Any) -> Any:
    """Plain data, as JSON has it, as the annotated type. CodecError for what cannot become one: never another type silently."""
    if result_type is type(None):
        return None  # the function gives nothing, whatever a person wrote
    try:
        return msgspec.convert(value, result_type, dec_hook=_foreign)
    except Exception as error:
        raise CodecError(
            f"a person resolved the key with {_brief(value)}, which is no {_named(result_type)}: {error}"
        ) from error


def _foreign(cls: type, value: Any) -> Any:
    """Classes that msgspec does not know: pydantic's and protobuf's."""
    if isinstance(value, cls):
        return value
    if (validate := getattr(cls, "model_validate", None)) is not None:
        return validate(value)
    if hasattr(cls, "DESCRIPTOR"):
        from google.protobuf.json_format import ParseDict

        return ParseDict(value, cls())
    raise TypeError(f"{type_name(cls)} cannot be made of plain data")


def _brief(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= 80 else said[:77] + "…"


def _named(result_type: Any) -> str:
    return type_name(result_type) if isinstance(result_type, type) else str(result_type)
