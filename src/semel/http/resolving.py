"""What resolvers said of a request, whoever asked them: HTTP and gRPC, in both colours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from semel.errors import ConfigurationError, InvalidKey
from semel.keys import check_tenant

__all__ = ["id_text", "plain", "principal_of", "tenant_of"]


def plain(resolver: Callable[[Any], Any], value: Any, *, where: str) -> Any:
    """A value that nobody has to await. Raises ConfigurationError for any other one.

    A function that merely calls a coroutine function looks plain at start-up, and a coroutine is true for everybody.
    """
    if hasattr(value, "__await__"):
        if (close := getattr(value, "close", None)) is not None:
            close()
        name = getattr(resolver, "__qualname__", resolver)
        raise ConfigurationError(f"{name} is async, and {where}: give a plain function")
    return value


def id_text(value: Any) -> str | None:
    """An id as text; None for what is none. An object's own text may be its address, which is another one at every request."""
    is_id = isinstance(value, str | int | UUID) and not isinstance(value, bool)
    return str(value) if is_id else None


def principal_of(value: Any) -> str:
    """The sender's id; "" where nobody is known."""
    return _id_of("principal", value, "the sender's id")


def _id_of(option: str, value: Any, what: str) -> str:
    if value is None:
        return ""
    told = id_text(value)
    if told is None:
        raise ConfigurationError(
            f"{option}= returned a {type(value).__name__}: return {what}, a str, int or UUID"
        )
    return told


def tenant_of(value: Any) -> str:
    """The tenant; "" where none is known, which is nobody's: those of two unknown tenants must not meet under the face's own."""
    tenant = _id_of("tenant", value, "the tenant's id")
    try:
        return tenant and check_tenant(tenant)
    except InvalidKey as error:
        raise ConfigurationError(f"tenant= returned what is no tenant: {error}") from error
