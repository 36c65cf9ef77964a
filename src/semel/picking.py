"""What a decorated call's key, request and tenant are taken from: a field path over its arguments, or a function of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from uuid import UUID

from semel.coroutines import refuse_async
from semel.errors import CodecError, ConfigurationError
from semel.keys import FieldPath, fingerprint

__all__ = ["Picker", "all_arguments", "is_path", "picker", "text_of"]

Picker = Callable[[Any, inspect.BoundArguments], Any]
"""Takes something from a call: from the object of a method (None for a function) and the other arguments."""


def is_path(text: str, signature: inspect.Signature) -> bool:
    root, dot, _ = text.partition(".")
    return bool(dot) and root in signature.parameters


def picker(chosen: Any, what: str, *, first: str, signature: inspect.Signature) -> Picker:
    """A field path over the arguments, or a callable that gets them as the function does.

    `first` is what a method calls its object or class: a path may begin with it. A callable gets it too if its own first
    parameter is called so, or self or cls.
    """
    if isinstance(chosen, str):
        path = FieldPath(chosen)
        if first and path.root == first:
            return lambda owner, _bound: path({first: owner})
        if path.root not in signature.parameters:
            names = ", ".join(filter(None, (first, *signature.parameters))) or "none"
            raise ConfigurationError(
                f"{what}={chosen!r}: there is no argument {path.root!r}; the arguments are: {names}"
            )
        return lambda _owner, bound: path(bound.arguments)
    if not callable(chosen):
        raise ConfigurationError(
            f"{what}= must be a field path such as 'cmd.request_id' or a callable, not {chosen!r}"
        )
    refuse_async(f"{what}=", chosen, "give a plain function of the arguments")
    try:
        takes = inspect.signature(chosen)
    except (TypeError, ValueError):  # of a builtin, such as str: it is believed
        return lambda _owner, bound: chosen(*bound.args, **bound.kwargs)
    if first and next(iter(takes.parameters), "") in ("self", "cls", first):
        _check_takes(takes, what, signature, first)
        return lambda owner, bound: chosen(owner, *bound.args, **bound.kwargs)
    _check_takes(takes, what, signature)
    return lambda _owner, bound: chosen(*bound.args, **bound.kwargs)


def _check_takes(
    takes: inspect.Signature, what: str, signature: inspect.Signature, first: str | None = None
) -> None:
    """Raises ConfigurationError for a callable that no call of the function suits: each would end before it began."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    places = kinds.count(inspect.Parameter.POSITIONAL_ONLY) + kinds.count(
        inspect.Parameter.POSITIONAL_OR_KEYWORD
    )
    by_name = [name for name, each in signature.parameters.items() if each.kind is each.KEYWORD_ONLY]
    # What has a default is given as well. How much stands for * and ** only a call tells: then what is missing may come.
    grows = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} & {*kinds}
    bind = takes.bind_partial if grows else takes.bind
    try:
        bind(*[None] * (places + (first is not None)), **dict.fromkeys(by_name))
    except TypeError as error:
        bare = [
            each.replace(default=each.empty, annotation=each.empty) for each in signature.parameters.values()
        ]
        given = ", ".join(filter(None, (first, str(inspect.Signature(bare))[1:-1])))
        raise ConfigurationError(
            f"{what}= is a function of all arguments of the decorated one, and cannot take them: {error}. Write "
            f"{what}={'lambda ' * bool(given)}{given or 'lambda'}: …, or the path of a field"
        ) from None


def all_arguments(_owner: Any, bound: inspect.BoundArguments) -> str:
    """No key= given: the same arguments are the same action. The object of a method is not one of them (R5)."""
    try:
        return fingerprint(dict(bound.arguments))
    except CodecError as error:
        raise CodecError(
            f"without key= the key is made of all arguments, and that cannot be: {error}. Say key='…', the path of what "
            "identifies the action, such as key='cmd.id'"
        ) from error


def text_of(key: Any) -> Any:
    """Ids are often numbers or UUIDs; everything else that is not text is refused as a key."""
    if isinstance(key, UUID) or (isinstance(key, int) and not isinstance(key, bool)):
        return str(key)
    return key
