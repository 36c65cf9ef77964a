"""What of a message travels as headers where a broker has such: one spelling for all of them.

The user's own headers keep their names. What identifies and orders a message has names with the prefix `semel-`, except
its id, for which every broker has a place of its own. Values are text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from urllib.parse import quote, unquote

from semel.messaging.sink import Row

__all__ = ["ID", "PREFIX", "filled", "from_line", "in_order", "shortened", "to_headers", "to_lines", "waves"]

PREFIX: Final = "semel-"
ID: Final = "semel-id"
_FIELDS: Final = ("topic", "tenant", "key", "type", "schema")
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PLACE: Final = re.compile(r"\{(topic|tenant|key)\}")
_PLAIN: Final = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


def to_headers(row: Row) -> dict[str, str]:
    """The headers of a message: the user's own, and topic, tenant, key, type and schema where it has them."""
    headers = {name: value for name, value in row.headers.items() if not name.lower().startswith(PREFIX)}
    for name in _FIELDS:
        value = getattr(row, name)
        if value is not None:
            headers[PREFIX + name] = value
    if row.raw:
        headers[PREFIX + "content"] = "raw"
    return headers


def filled(template: str, row: Row, *, escape: Callable[[str], str] = str) -> str:
    """`{topic}`, `{tenant}` and `{key}` in a name, filled in; `escape` makes a value fit for its place."""
    if "{" not in template:
        return template
    values: Mapping[str, str] = {"topic": row.topic, "tenant": row.tenant, "key": row.key or ""}
    return _PLACE.sub(
        lambda found: escape(values[found[1]]), template
    )  # once: a topic may be called "{tenant}"


def shortened(name: str, limit: int) -> str:
    """A name of at most `limit` bytes: a longer one ends in a hash of itself."""
    if len(name.encode()) <= limit:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:24]
    return name.encode()[: limit - len(digest)].decode(errors="ignore") + digest


def waves(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows cut into waves, no two rows of one key in the same one: what a wave delivers cannot be out of order.

    A row without a key is in no order with any other.
    """
    found: list[list[Row]] = []
    depth: dict[tuple[str, str], int] = {}
    for row in rows:
        turn = 0
        if row.key is not None:
            name = (row.tenant, row.key)
            turn = depth.get(name, 0)
            depth[name] = turn + 1
        if turn == len(found):
            found.append([])
        found[turn].append(row)
    return found


def in_order(rows: Sequence[Row], stopped: set[tuple[str, str]]) -> list[Row]:
    """The rows that nothing of their own key stands before."""
    return [row for row in rows if row.key is None or (row.tenant, row.key) not in stopped]


def to_lines(row: Row) -> dict[str, str] | str:
    """The headers where each is a line of ASCII (HTTP, NATS): other characters are percent-encoded, as CloudEvents does.

    A name that cannot be one is told as text.
    """
    lines: dict[str, str] = {}
    for name, value in to_headers(row).items():
        if not _NAME.fullmatch(name):
            return f"header name {name!r} is not a token of letters, digits and hyphens"
        line = quote(value, safe=_PLAIN)
        lines[name] = line if line == line.strip() else line.replace(" ", "%20")
    return lines


def from_line(line: str) -> str:
    """The value of a header that was written by `to_lines`."""
    return unquote(line)
