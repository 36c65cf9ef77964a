"""Whose key it is, from what the resolvers said. Both colours ask them in their own way; the answers mean the same."""

from __future__ import annotations

from typing import Any

import msgspec

from semel.errors import InvalidKey
from semel.grpc.refusals import Refusal
from semel.http.resolving import id_text
from semel.keys import check_tenant

__all__ = ["Caller", "principal_of", "tenant_of"]


class Caller(msgspec.Struct, frozen=True):
    """Whose key it is. No tenant: the face's."""

    principal: str
    tenant: str | None


def principal_of(value: Any) -> str:
    """An id as text, as over HTTP; "" for what is none."""
    return id_text(value) or ""


def tenant_of(value: object) -> str:
    """The tenant. Raises Refusal for what is none."""
    try:
        return check_tenant(principal_of(value))
    except InvalidKey as error:
        raise Refusal("NOT_AUTHENTICATED") from error
