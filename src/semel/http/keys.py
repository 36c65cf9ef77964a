"""The idempotency key of a request: its syntax, its identity, its age. Pure."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Sequence
from typing import Final

from semel.http.problem import Problem

__all__ = ["BARE", "MAX_KEY", "core_key", "minted_at", "operation_of", "read_key"]

MAX_KEY: Final = 255
# A structured-field string (RFC 8941) and what may follow it, which is ignored; a bare token for everybody else.
_STRING: Final = rb'"(?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*"'
_ITEM: Final = (
    rb"-?[0-9]{1,15}(?:\.[0-9]{1,3})?|%s|[A-Za-z*][A-Za-z0-9!#$%%&'*+.^_`|~:/-]*|:[A-Za-z0-9+/=]*:|\?[01]"
    % _STRING
)
_PARAMETER: Final = rb"[ ]*;[ ]*[a-z*][a-z0-9_.*-]*(?:=(?:%s))?" % _ITEM
_QUOTED: Final = re.compile(rb"(%s)(?:%s)*" % (_STRING, _PARAMETER))
_NOT_BARE: Final = re.compile(rb'[",;\\]')
BARE: Final = re.compile(rb"[!#-+\--:<-\[\]-~]{1,%d}" % MAX_KEY)
"""A key that needs no quotes, nearly every one: visible, and none of those."""
_VISIBLE: Final = re.compile(rb"[!-~]+")
_ESCAPED: Final = re.compile(rb'\\(["\\])')


def read_key(lines: Sequence[bytes], *, strict: bool = False, least: int = 1) -> str | Problem:
    """The key that these header lines say: `"k"` and `k` are the same one. `strict` takes the quoted form only (H02, H03).

    The length is looked at before anything else is done with it.
    """
    if len(lines) != 1:
        return Problem.of("key-malformed", reason="one key, in one header line")
    if not strict and least <= len(lines[0]) and BARE.fullmatch(lines[0]):
        return lines[0].decode()  # all that is asked below
    raw = lines[0].strip(b" \t")
    if len(raw) > 2 * MAX_KEY + 64:
        return Problem.of("key-too-long")
    if raw.startswith(b'"'):
        found = _QUOTED.fullmatch(raw)
        if found is None:
            return Problem.of(
                "key-malformed", reason="a quoted key is one string, and only parameters may follow it"
            )
        key = _ESCAPED.sub(rb"\1", found[1][1:-1])
    elif strict:
        return Problem.of("key-malformed", reason="the key must be a quoted string")
    else:
        key = raw
        if _NOT_BARE.search(raw):
            return Problem.of(
                "key-malformed", reason="quote a key that has quotes, commas, semicolons or backslashes"
            )
    if not _VISIBLE.fullmatch(key):
        return Problem.of("key-malformed", reason="visible ASCII characters only, at least one")
    if len(key) > MAX_KEY:
        return Problem.of("key-too-long")
    if len(key) < least:
        return Problem.of("key-too-short", min_length=least)
    return key.decode()


def core_key(key: str, principal: str) -> str:
    """The core's key for a client's key and the principal who sent it.

    A client's key has no spaces, so the first space tells the two apart; what the core would not take is hashed, and
    a hash has no space. HTTP and gRPC share it: a retry over the other carrier finds the same record.
    """
    whole = f"{key} {principal}"
    if len(whole) <= MAX_KEY and whole.isprintable():
        return whole
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()


def operation_of(own: str) -> str:
    """The operation of keyed requests over HTTP and gRPC alike: the Semel's own, and "http" where it has the default one.

    Two services with one store and a Semel each are told apart by it, as all other calls of theirs are.
    """
    return "http" if own == "default" else own


def minted_at(key: str) -> float | None:
    """When a UUIDv7 was made, in seconds since 1970; None for every other key."""
    if len(key) != 36 or key[14] != "7":
        return None
    try:
        return (uuid.UUID(key).int >> 80) / 1000
    except ValueError:
        return None
