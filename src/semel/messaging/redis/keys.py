"""Names of an outbox's Redis keys, and the scripts that use them.

All keys of a part share a hash tag. On one server that is one tag for the whole outbox: ids are known to all parts, and
scripts may look at many parts at once. In a Cluster each part has a tag of its own, `{prefix:000}`, `{prefix:001}` …, those
of the records' shards, so that parts spread over the nodes and a record can commit with a message.
"""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files
from typing import Final

from redis.crc import key_slot

from semel.errors import ConfigurationError
from semel.stores.redis.calls import Script

__all__ = [
    "ADD", "ARRIVE", "BODIES", "CHOOSE", "CLEAN", "COMMIT", "COUNTS", "FETCH", "LINES", "LIST", "META", "PARTS", "PEEK", "RELAYS", "TAKE", "Names",
]  # fmt: skip

_PREFIX: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def _script(name: str) -> Script:
    return Script(name, files("semel.messaging").joinpath(f"lua/{name}.lua").read_text("utf-8"))


ADD: Final = _script("outbox_add")
ARRIVE: Final = _script("outbox_arrive")
BODIES: Final = _script("outbox_bodies")
CHOOSE: Final = _script("outbox_choose")
CLEAN: Final = _script("outbox_clean")
COMMIT: Final = _script("outbox_commit")
COUNTS: Final = _script("outbox_counts")
FETCH: Final = _script("outbox_fetch")
LINES: Final = _script("outbox_lines")
LIST: Final = _script("outbox_list")
META: Final = _script("outbox_meta")
PARTS: Final = _script("outbox_parts")
PEEK: Final = _script("outbox_peek")
RELAYS: Final = _script("outbox_relays")
TAKE: Final = _script("outbox_take")


class Names:
    """The keys of one outbox. The prefix is a setting and team a relay's name; no message's text is in a key."""

    def __init__(self, prefix: str, *, cluster: bool) -> None:
        if not _PREFIX.fullmatch(prefix):
            raise ConfigurationError(
                f"table={prefix!r} cannot begin a Redis key: use 1 to 64 letters, digits or any of _ . : -"
            )
        self.cluster = cluster
        self._prefix = prefix
        self._home = f"{{{prefix}:outbox}}"
        self._by_slot: dict[int, int] = {}

    def tag(self, part: int) -> str:
        """The hash tag of a part, with its braces."""
        return f"{{{self._prefix}:{part:03x}}}" if self.cluster else self._home

    def slot(self, part: int) -> int:
        slot: int = key_slot(self.tag(part).encode())
        return slot

    def part_in(self, slot: int, parts: int) -> int | None:
        """A part of a Cluster's outbox that is in this slot, if there is one."""
        if not self._by_slot:
            self._by_slot = {self.slot(part): part for part in reversed(range(parts))}
        return self._by_slot.get(slot)

    # ------------------------------------------------------------------------------------- of the outbox
    @property
    def home(self) -> bytes:
        return f"{self._home}:meta".encode()

    @property
    def home_seq(self) -> bytes:
        return f"{self._home}:seq".encode()

    def relays(self, team: str) -> bytes:
        return f"{self._home}:relays:{team}".encode()

    @property
    def teams(self) -> bytes:
        """The relays of all names."""
        return f"{self._home}:teams".encode()

    # ------------------------------------------------------------------------------------------ of a tag
    def meta(self, part: int) -> bytes:
        return f"{self.tag(part)}:meta".encode()

    def seq(self, part: int) -> bytes:
        return f"{self.tag(part)}:seq".encode()

    def counts(self, part: int) -> bytes:
        return f"{self.tag(part)}:waiting".encode()

    def id(self, part: int, tenant: str, identity: str) -> bytes:
        said = f"{len(tenant)}:{tenant}{identity}".encode()
        return f"{self.tag(part)}:id:{hashlib.blake2b(said, digest_size=16).hexdigest()}".encode()

    def body(self, part: int, digest: str) -> bytes:
        return f"{self.tag(part)}:body:{digest}".encode()

    def arrivals(self, part: int, sender: str) -> bytes:
        return f"{self.tag(part)}:arrivals:{sender}".encode()

    def bodies_over(self, part: int) -> bytes:
        return f"{self.tag(part)}:bodies-over".encode()

    # ----------------------------------------------------------------------------------------- of a part
    def stream(self, part: int) -> bytes:
        return f"{self.tag(part)}:messages:{part}".encode()

    def due(self, part: int) -> bytes:
        return f"{self.tag(part)}:due:{part}".encode()

    def tenants(self, part: int) -> bytes:
        return f"{self.tag(part)}:tenants:{part}".encode()

    def part(self, part: int, team: str) -> bytes:
        return f"{self.tag(part)}:part:{part}:{team}".encode()

    def lines(self, part: int, team: str) -> bytes:
        return f"{self.tag(part)}:lines:{part}:{team}".encode()

    def kept(self, part: int, team: str) -> bytes:
        return f"{self.tag(part)}:kept:{part}:{team}".encode()

    def kept_times(self, part: int, team: str) -> bytes:
        return f"{self.tag(part)}:kept-at:{part}:{team}".encode()
