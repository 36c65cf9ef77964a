"""What tells two requests apart: method, path, query, media type and body (H04-H06, H27). Pure but for the body's file.

JSON is compared by meaning: order of names, spaces and 1.0 against 1 do not matter, integers are exact, null is not
absent. JSON with a name twice, or that is none, is compared by its bytes; so is everything over 1 MiB.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final

import msgspec

from semel.canonical import canonical
from semel.errors import CodecError
from semel.http.body import Body

__all__ = ["digest_of", "fingerprint", "media_type", "parse_json"]

_DOMAIN: Final = b"semel/http/1\0"
_BOUNDARY: Final = re.compile(r';\s*boundary=(?:"([^"]+)"|([^\s;]+))', re.IGNORECASE)
_MAX_PARTS: Final = 10_000
_USUAL: Final = 256  # longer paths are not remembered: they come from requests


@lru_cache(maxsize=256)
def media_type(content_type: str) -> str:
    """Type and subtype; parameters (a charset, a boundary) do not make another request."""
    return content_type.partition(";")[0].strip().lower()


def fingerprint(
    method: str, path: str, query: bytes, content_type: str, body: Body, exclude: Sequence[str] = ()
) -> str:
    """64 hex digits. Two requests that have the same mean the same."""
    media = media_type(content_type)
    told = _told(method, path, query, media)
    return sha256(told + _body(media, content_type, body, exclude)).hexdigest()


def digest_of(
    method: str, path: str, query: bytes, content_type: bytes, body: Body, exclude: Sequence[str] = ()
) -> bytes:
    """The same in 32 bytes. `content_type` is the header's line."""
    # A form's boundary is another one each time: nothing to remember.
    usual = len(path) + len(query) + len(content_type) <= _USUAL and b"boundary" not in content_type
    head = _usual_head if usual else _head_of
    told, media = head(method, path, query, content_type)
    # Most bodies, as `_body` has them.
    whole = body.in_one
    if (
        whole is not None
        and media == "application/json"
        and not exclude
        and (text := _small_json(whole)) is not None
    ):
        return sha256(told + b"json" + sha256(text).digest()).digest()
    return sha256(told + _body(media, content_type.decode("latin-1"), body, exclude)).digest()


def _told(method: str, path: str, query: bytes, media: str) -> bytes:
    head = _DOMAIN
    for part in (
        method.encode(),
        path.encode("utf-8", "surrogateescape"),
        query,
        media.encode("utf-8", "surrogateescape"),
    ):
        head += len(part).to_bytes(8, "big") + part
    return head


def _head_of(method: str, path: str, query: bytes, content_type: bytes) -> tuple[bytes, str]:
    """What all of a request but its body adds to the fingerprint, and the media type of that."""
    media = media_type(content_type.decode("latin-1"))
    return _told(method, path, query, media), media


_usual_head: Final = lru_cache(maxsize=1024)(_head_of)


def _body(media: str, content_type: str, body: Body, exclude: Sequence[str]) -> bytes:
    if media == "application/json" or media.endswith("+json"):
        text = _canonical_json(body.whole, exclude)
        if text is not None:
            return b"json" + sha256(text).digest()
    elif media == "multipart/form-data" and not body.parsed:
        parts = _parts(content_type, body)
        if parts is not None:
            return b"form" + parts
    return b"raw " + body.digest


# --------------------------------------------------------------------------------------------------- JSON


class _Twice(ValueError):
    """A name is there twice: readers disagree about what that means."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Twice
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


_decode: Final = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_refuse).decode


def parse_json(raw: bytes | None) -> Any:
    """The value. Raises ValueError or RecursionError for anything that two readers might read differently."""
    if not raw:
        raise ValueError("empty")
    return _decode(raw.decode())


def _no_float(text: str) -> Any:
    raise ValueError(text)


_SMALL: Final = 4096  # no number in it is too long to be read, and nothing is nested deeper than _BRACKETS
_BRACKETS: Final = 32
_read_small: Final = msgspec.json.Decoder(float_hook=_no_float).decode
_write_small: Final = msgspec.json.Encoder(order="sorted").encode


def _small_json(raw: bytes) -> bytes | None:
    """The canonical form of most bodies, in a tenth of the time; None: look closer.

    A name that is there twice brings a colon that the value read does not have. Escapes could hide one, so there must be
    none; and there must be no floats, whose canonical form is not the encoder's.
    """
    if len(raw) > _SMALL or b"\\" in raw or raw.count(b"{") + raw.count(b"[") > _BRACKETS:
        return None
    try:
        text = _write_small(_read_small(raw))
    except (ValueError, msgspec.MsgspecError):
        return None
    return text if raw.count(b":") == text.count(b":") else None


def _canonical_json(raw: bytes | None, exclude: Sequence[str]) -> bytes | None:
    if raw and not exclude and (text := _small_json(raw)) is not None:
        return text
    try:
        value = parse_json(raw)
        for path in exclude:
            value = _without(value, path.split("."))
        return canonical(value)
    except (ValueError, RecursionError, CodecError):
        return None


def _without(value: Any, path: Sequence[str]) -> Any:
    if not isinstance(value, Mapping) or path[0] not in value:
        return value
    if len(path) == 1:
        return {name: part for name, part in value.items() if name != path[0]}
    return {**value, path[0]: _without(value[path[0]], path[1:])}


# ---------------------------------------------------------------------------------------------- multipart


def _parts(content_type: str, body: Body) -> bytes | None:
    """Name, file name, type and content of each part in order; the boundary, which is random, does not count."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        return None
    delimiter = b"--" + (found[1] or found[2]).encode("utf-8", "surrogateescape")
    view = body.view()
    digest = sha256()
    at, count = view.find(delimiter), 0
    while at >= 0 and count < _MAX_PARTS:
        start = at + len(delimiter)
        if view[start : start + 2] == b"--":
            return digest.digest()
        end = _next(view, delimiter, start)
        head_end = view.find(b"\r\n\r\n", start, end + 2 if end >= 0 else end)
        if end < 0 or head_end < 0:
            return None
        for part in (
            _head(view[start:head_end]),
            sha256(memoryview(view)[head_end + 4 : end]).digest(),
        ):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        at, count = end + 2, count + 1
    return None


def _next(view: Any, delimiter: bytes, start: int) -> int:
    """Where the next boundary begins: a line that only begins like one is content."""
    at = view.find(b"\r\n" + delimiter, start)
    while at >= 0:
        after = at + 2 + len(delimiter)
        if view[after : after + 2] in (b"\r\n", b"--") or view[after : after + 1] in (b" ", b"\t"):
            return int(at)
        at = view.find(b"\r\n" + delimiter, after)
    return -1


_WANTED: Final = (b"content-disposition", b"content-type")


def _head(raw: bytes) -> bytes:
    lines = []
    for line in raw.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() in _WANTED:
            lines.append(name.strip().lower() + b":" + value.strip())
    return b"\n".join(sorted(lines))
