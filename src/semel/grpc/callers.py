"""Whose key it is, from what the resolvers said. Both colours ask them in their own way; the answers mean the same."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec

from semel.errors import InvalidKey
from semel.grpc.refusals import Refusal
from semel.keys import check_tenant

__all__ = ["Caller", "principal_of", "tenant_of"]


class Caller(msgspec.Struct, frozen=True):
    """Whose key it is. No tenant: the face's."""

    principal: str
    tenant: str | None


def principal_of(value: Any) -> str:
    """An id as text, as over HTTP; "" for what is none. An object's own text may be its address, another one at every call."""
    is_id = isinstance(value, str | int | UUID) and not isinstance(value, bool)
    return str(value) if is_id else ""


def tenant_of(value: object) -> str:
    """The tenant. Raises Refusal for what is none."""
    try:
        return check_tenant(principal_of(value))
    except InvalidKey as error:
        raise Refusal("NOT_AUTHENTICATED") from error
