"""Whose key it is, from what the resolvers said. Both colours ask them in their own way; the answers mean the same."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isawaitable
from typing import Any
from uuid import UUID

import msgspec

from semel.errors import ConfigurationError, InvalidKey
from semel.grpc.refusals import Refusal
from semel.keys import check_tenant

__all__ = ["Caller", "plain", "principal_of", "tenant_of"]


class Caller(msgspec.Struct, frozen=True):
    """Whose key it is. No tenant: the face's."""

    principal: str
    tenant: str | None


def plain(resolver: Callable[[Any], Any], context: Any) -> Any:
    """What a resolver of a threaded server says. Raises ConfigurationError for what would have to be awaited.

    A function that merely calls a coroutine function looks plain at start-up, and a coroutine is true for everybody.
    """
    value = resolver(context)
    if isawaitable(value):
        if (close := getattr(value, "close", None)) is not None:
            close()
        name = getattr(resolver, "__qualname__", resolver)
        raise ConfigurationError(
            f"{name} is async, and a threaded server cannot await it: give a plain function"
        )
    return value


def principal_of(value: Any) -> str:
    """An id as text; "" for what is none. An object's own text may be its address, another one at every call."""
    if isinstance(value, UUID):
        return str(value)
    return value if isinstance(value, str) else ""


def tenant_of(value: object) -> str:
    """The tenant. Raises Refusal for what is none."""
    try:
        return check_tenant(value)
    except InvalidKey as error:
        raise Refusal("NOT_AUTHENTICATED") from error
