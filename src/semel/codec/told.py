"""What a person wrote in place of a result, as the function that should have given it would have."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from semel.codec.annotations import arms_of, bare
from semel.codec.paths import type_name
from semel.errors import CodecError

__all__ = ["as_given", "as_told"]


def as_told(value: Any, result_type: Any) -> Any:
    """Plain data, as JSON has it, as the annotated type. CodecError for what cannot become one: never another type silently."""
    try:
        return _converted(value, result_type)
    except Exception as error:
        raise CodecError(
            f"a person resolved the key with {_brief(value)}, which is no {_named(result_type)}: {error}"
        ) from error


def as_given(value: Any, result_type: Any) -> Any:
    """What a person gives beside its type: one of that type stays as it is, plain data becomes one. CodecError for all else."""
    try:
        return value if _is_one(value, result_type) else _converted(value, result_type)
    except Exception as error:
        raise CodecError(f"{_brief(value)} is no {_named(result_type)}: {error}") from error


def _converted(value: Any, result_type: Any) -> Any:
    if result_type is type(None):
        return None  # the function gives nothing, whatever a person wrote
    return msgspec.convert(value, result_type, dec_hook=_foreign)


def _is_one(value: Any, hint: Any) -> bool:
    """Whether it is of the type already. msgspec would not do: it knows no union of two classes, and makes lists of tuples."""
    hint = bare(hint)
    if hint is Any:
        return True
    cls: Any = typing.get_origin(hint) or hint
    hints = typing.get_args(hint)
    if cls is typing.Literal:
        return value in hints
    if (arms := arms_of(hint)) is not None:
        return any(_is_one(value, arm) for arm in arms)
    fits = isinstance(cls, type) and not typing.is_typeddict(cls) and isinstance(value, cls)
    if not fits:
        return False
    if cls is tuple and hints and hints[-1] is not ...:
        return len(value) == len(hints) and all(map(_is_one, value, hints))
    return all(_is_one(part, of) for part, of in _parts(value, hints))


def _parts(value: Any, hints: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    """What is in a built-in collection, each with its own annotation."""
    match value, hints:
        case dict(), (of_keys, of_values):
            yield from ((key, of_keys) for key in value)
            yield from ((each, of_values) for each in value.values())
        case list() | tuple() | set() | frozenset(), (of_all, *_):
            yield from ((each, of_all) for each in value)


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
