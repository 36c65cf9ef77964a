"""What a person says about a key, or an owner about his failure, checked before anything is written."""

from __future__ import annotations

from typing import Any

import msgspec

from semel.errors import ConfigurationError
from semel.model import Kind

__all__ = ["Word", "checked_error", "word"]


class Word(msgspec.Struct, frozen=True):
    """What a person decided about a key."""

    kind: Kind
    value: Any = None
    error: BaseException | str | None = None
    correct: bool = False
    """It stands in place of an outcome that a person gave before."""


def word(
    value: Any, error: BaseException | str | None, *, has_value: bool, release: bool, correct: bool = False
) -> Word:
    """Exactly one of value, error, release (R13)."""
    if has_value + (error is not None) + bool(release) != 1:
        raise ConfigurationError("resolve takes exactly one of value=…, error=… and release=True")
    if release and correct:
        raise ConfigurationError(
            "correct=True replaces an outcome that was given before: say value=…, or error=…"
        )
    if release:
        return Word(Kind.RELEASED)
    if error is not None:
        return Word(Kind.FAILED, error=checked_error("resolve(error=…)", error), correct=correct)
    return Word(Kind.DONE, value=value, correct=correct)


def checked_error(what: str, error: Any) -> BaseException | str:
    """An exception, or a text that says something: it is all that later callers are told."""
    if isinstance(error, BaseException) or (isinstance(error, str) and error.strip()):
        return error
    raise ConfigurationError(
        f"{what} takes an exception, or a text that says what went wrong, not {error!r}: later callers are told nothing else"
    )
