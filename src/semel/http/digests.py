"""`Content-Digest` (RFC 9530): what a client says of its body before it sends it. Pure.

It is checked against what arrives (H25), and lets a repetition be answered before its upload (H22).
"""

from __future__ import annotations

import binascii
import hashlib
import re
from collections.abc import Sequence
from typing import Final

from semel.http.fingerprints import media_type

__all__ = ["outline", "told_sha256"]

_SHA256: Final = re.compile(r"(?:^|,)\s*sha-256\s*=\s*:([A-Za-z0-9+/]{43}=):\s*(?:;[^,]*)?(?=,|$)")
_DOMAIN: Final = b"semel/http/outline/1\0"


def told_sha256(lines: Sequence[bytes]) -> bytes | None:
    """The SHA-256 that these header lines tell; None when they tell none. Other algorithms are not looked at."""
    found = _SHA256.search(b",".join(lines).decode("latin-1")) if lines else None
    return None if found is None else binascii.a2b_base64(found[1])


def outline(method: str, path: str, query: bytes, content_type: str, sha256: bytes) -> str:
    """A request as far as it is known before its body comes: two with the same one are the same request.

    Not the other way round: the same JSON may be written differently, so another outline means nothing.
    """
    digest = hashlib.sha256(_DOMAIN)
    for part in (
        method.encode(),
        path.encode("utf-8", "surrogateescape"),
        query,
        media_type(content_type).encode("utf-8", "surrogateescape"),
        sha256,
    ):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()
