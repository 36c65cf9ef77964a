"""What waits in one part of a Redis outbox, for people: read in pages, without bodies, so that nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Final

from semel.messaging.pages import Waiting
from semel.messaging.redis.keys import LIST

if TYPE_CHECKING:
    from semel.messaging.redis.home import RedisHome

__all__ = ["waiting_in"]

_PAGE: Final = 200
_FIELDS: Final = 7


def waiting_in(home: RedisHome, part: int, limit: int, where: Mapping[str, str]) -> list[Waiting]:
    """Up to `limit` that may go now, and as many that are due later."""
    found: list[Waiting] = []
    for kind, first in (("ready", "-"), ("later", "0")):
        all_of_them = _listed(home, part, kind, first)
        chosen = (each for each in all_of_them if all(getattr(each, name) == where[name] for name in where))
        found += islice(chosen, limit)
    return found


def _listed(home: RedisHome, part: int, kind: str, at: str) -> Iterator[Waiting]:
    keys = (home.names.stream(part), home.names.due(part))
    while at:
        after, *fields = home.call(LIST, keys, (kind, at, _PAGE))
        for start in range(0, len(fields), _FIELDS):
            identity, tenant, topic, key, created, due, size = fields[start : start + _FIELDS]
            yield Waiting(
                identity.decode(),
                tenant.decode(),
                topic.decode(),
                key.decode() or None,
                float(created),
                float(due) / 1000 if due else None,
                int(size),
            )
        at = after.decode()
