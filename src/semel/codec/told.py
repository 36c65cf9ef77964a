"""What a person wrote in place of a result, as the function that should have given it would have."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Sequence
from types import GenericAlias, NoneType
from typing import Any, Never

import msgspec

from semel.codec.annotations import arms_of, bare
from semel.codec.paths import type_name
from semel.errors import CodecError

__all__ = ["as_given", "as_told"]


def as_told(value: Any, result_type: Any) -> Any:
    """What a person wrote, as JSON has it, as the annotated type; one of it already stays as it is. CodecError for what cannot
    become one: never another type silently."""
    try:
        return _outcome(value, result_type)
    except Exception as error:
        raise CodecError(
            f"a person resolved the key with {_brief(value)}, which is no {_named(result_type)}: {error}"
        ) from error


def as_given(value: Any, result_type: Any) -> Any:
    """What a person gives beside its type: one of that type stays as it is, plain data becomes one. CodecError for all else."""
    try:
        return _outcome(value, result_type)
    except Exception as error:
        raise CodecError(f"{_brief(value)} is no {_named(result_type)}: {error}") from error


def _outcome(value: Any, result_type: Any) -> Any:
    # The function that gives nothing gives that, whatever a person wrote.
    return None if result_type is NoneType else _made(value, result_type)


def _made(value: Any, hint: Any) -> Any:
    return value if _is_one(value, hint) else _converted(value, hint)


def _is_one(value: Any, hint: Any) -> bool:
    """Whether it is of the type already. msgspec would not do: it knows no union of two classes, and makes lists of tuples."""
    hint = bare(hint)
    if hint is Any:
        return True
    cls: Any = typing.get_origin(hint) or hint
    hints = typing.get_args(hint)
    if cls is typing.Literal:
        return any(type(value) is type(word) and value == word for word in hints)
    if (arms := arms_of(hint)) is not None:
        return any(_is_one(value, arm) for arm in arms)
    if not _fits(value, cls):
        return False
    if cls is tuple and hints and hints[-1] is not ...:
        return len(value) == len(hints) and all(map(_is_one, value, hints))
    return all(_is_one(part, of) for part, of in _parts(value, hints))


def _fits(value: Any, cls: Any) -> bool:
    if not isinstance(cls, type) or typing.is_typeddict(cls):
        return False
    if cls is int and isinstance(value, bool):
        return False  # Python says yes; who writes `true` for a number does not mean 1
    try:
        return isinstance(value, cls)
    except TypeError:  # a protocol that cannot be asked
        return False


def _parts(value: Any, hints: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    """What is in a built-in collection, each with its own annotation. Text is none, though it is a sequence of its letters."""
    match value, hints:
        case dict(), (of_keys, of_values):
            yield from ((key, of_keys) for key in value)
            yield from ((each, of_values) for each in value.values())
        case dict() | list() | tuple() | set() | frozenset(), (of_all, *_):
            yield from ((each, of_all) for each in value)
        case str() | bytes(), (_, *_):
            yield value, Never


def _converted(value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(value, hint, dec_hook=_foreign)
    except TypeError:  # no fault of the value: it reads no such type, mostly a union of two classes
        hint = bare(hint)
        if typing.get_origin(hint) is typing.Literal:
            raise
        if (arms := arms_of(hint)) is not None:
            return _of_one_arm(value, arms)
        if (parts := _part_by_part(value, hint)) is None:
            raise
        return parts


def _of_one_arm(value: Any, arms: Sequence[Any]) -> Any:
    fit: list[tuple[str, Any]] = []
    why: list[str] = []
    for arm in arms:
        if arm is NoneType:
            continue  # None itself is one already
        try:
            fit.append((_named(arm), _converted(value, arm)))
        except Exception as error:  # noqa: BLE001 - validators of the user; told below
            why.append(f"{_named(arm)}: {error}")
    if len(fit) > 1:
        names = " as well as ".join(name for name, _ in fit)
        raise TypeError(f"it could be {names}: give result_type= of the one that is meant")
    if not fit:
        raise TypeError(f"it fits none of them ({'; '.join(why)})")
    return fit[0][1]


def _part_by_part(value: Any, hint: Any) -> Any:
    """A built-in collection of what msgspec does not read; None for anything else."""
    cls, hints = typing.get_origin(hint), typing.get_args(hint)
    if cls is dict and isinstance(value, dict):
        return {_made(key, hints[0]): _made(each, hints[1]) for key, each in value.items()}
    if cls not in (list, tuple, set, frozenset) or not isinstance(value, list | tuple):
        return None
    if cls is not tuple or hints[-1] is ...:
        return cls(_made(each, hints[0]) for each in value)
    return tuple(_made(each, of) for each, of in zip(value, hints, strict=True))


def _foreign(cls: Any, value: Any) -> Any:
    """Classes that msgspec does not know: pydantic's and protobuf's; and what is iterated over, which plain data has as a list."""
    if _is_one(value, cls):
        return value
    if typing.get_origin(cls) is Iterable:
        return _made(value, GenericAlias(list, typing.get_args(cls)))
    if (validate := getattr(cls, "model_validate", None)) is not None:
        return validate(value)
    if hasattr(cls, "DESCRIPTOR"):
        from google.protobuf.json_format import ParseDict

        return ParseDict(value, cls())
    raise TypeError(f"{_named(cls)} cannot be made of plain data")


def _brief(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= 80 else said[:77] + "…"


def _named(result_type: Any) -> str:
    return type_name(result_type) if isinstance(result_type, type) else str(result_type)
