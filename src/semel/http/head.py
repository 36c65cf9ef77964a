"""The head of a handler's response, read once: what a replay gives again, what is sent now, and the handler's own word."""

from __future__ import annotations

from functools import cache

import msgspec

from semel.http.rules import CONTROL, RETENTION, Rules, Word, control_of, word_for

__all__ = ["Head", "read_head"]

Headers = list[tuple[bytes, bytes]]


class Head(msgspec.Struct, frozen=True, gc=False):
    """Status and headers of a response that has not been sent yet."""

    status: int
    stored: Headers
    """In lower case; several lines of one name stay several lines."""
    sent: Headers
    """All but the handler's word to us, and what an upstream service said of a key in our place. Perhaps the very list that was
    read: it is not changed."""
    word: Word
    retention: float | None
    """The handler's own, if it named one."""
    kind: bytes
    """The media type as it was written; empty when there is none, or more than one."""


@cache
def _ours(markers: tuple[str, ...]) -> frozenset[bytes]:
    """What a handler's response does not send: it would stand beside our own, and say the contrary."""
    return frozenset({CONTROL, RETENTION.encode(), *(marker.encode() for marker in markers)})


def read_head(rules: Rules, status: int, headers: Headers) -> Head:
    """What a response means for its key (H14, H15), and which of its headers are replayed (H28-H32)."""
    replayed = rules.replay_headers
    stored: Headers = []
    said: Headers = []
    is_whole = True  # all of them are sent: nearly every response says nothing that is ours
    kind: bytes | None = None
    ours = _ours(rules.markers)
    for pair in headers:
        name = pair[0].lower()
        if name in ours:
            is_whole = False
            if name == CONTROL:
                said.append(pair)
            continue
        if name == b"content-type":
            kind = pair[1] if kind is None else b""
        if name in replayed:
            stored.append(pair if pair[0] == name else (name, pair[1]))
    sent = headers if is_whole else [pair for pair in headers if pair[0].lower() not in ours]
    word, retention = control_of(said) if said else ("", None)
    return Head(status, stored, sent, word_for(rules, status, word), retention, kind or b"")
