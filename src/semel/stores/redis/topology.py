"""Which server holds a key: always the same one, the master that Sentinel names, or the owner of a cluster slot.

Pure book-keeping plus one question to the servers (`refresh`), asked through whatever the link gives us, so that
both colours share it.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from semel.errors import ConfigurationError
from semel.stores.redis.address import Endpoint, Target
from semel.stores.redis.errors import NotSent, ServerError

__all__ = ["Ask", "Topology"]

# One command on a connection of its own: (endpoint, sentinel?, command) -> reply. Raises NotSent or ServerError.
Ask = Callable[[Endpoint, bool, tuple[bytes, ...]], Awaitable[Any]]

_NO_CLUSTER: Final = "this Redis server is not in cluster mode: write redis:// instead of redis+cluster://"


class Topology:
    """The current map. `proven` says that a server answered once: from then on trouble is worth waiting out."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.proven = False
        self.refreshing = False
        self.refreshed_at = float("-inf")
        self.single: Endpoint | None = target.seeds[0] if target.kind == "standalone" else None
        self._slots: list[Endpoint | None] = []

    def locate(self, key: bytes | None) -> Endpoint | None:
        """The master for `key` as far as known; None asks for a refresh."""
        if self.single is not None:
            return self.single
        if self._slots:
            if key is None:
                return next((node for node in self._slots if node is not None), None)
            return self._slots[key_slot(key)]
        return None

    def masters(self) -> list[Endpoint]:
        if self.single is not None:
            return [self.single]
        return sorted({node for node in self._slots if node is not None})

    def suspect(self) -> bool:
        """The map may be wrong: says whether asking the servers can help."""
        if self.target.kind == "sentinel":
            self.single = None
        return self.target.kind != "standalone"

    def learn(self, text: str, asked: Endpoint) -> Endpoint:
        """Take `MOVED slot host:port` or `ASK slot host:port` at its word; MOVED also changes the map."""
        word, slot, address = text.split(" ")[:3]
        host, _, port = address.rpartition(":")
        node = self._remapped(host or asked.host, int(port))
        if word == "MOVED" and self._slots:
            self._slots[int(slot)] = node
        return node

    def _remapped(self, host: str, port: int) -> Endpoint:
        if self.target.remap is not None:
            host, port = self.target.remap((host, port))
        return Endpoint(host, port)

    async def refresh(self, ask: Ask) -> None:
        """Ask until one server knows; `NotSent` with the last cause when none does. Not for a standalone server."""
        if self.target.kind == "sentinel":
            await self._ask_sentinels(ask)
        else:
            await self._ask_nodes(ask)

    async def _ask_sentinels(self, ask: Ask) -> None:
        cause: BaseException = ConnectionError("no Sentinel was asked")
        question = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self.target.service.encode())
        unknown = 0
        for seed in random.sample(self.target.seeds, len(self.target.seeds)):
            try:
                found = await ask(seed, True, question)
            except (NotSent, ServerError) as error:
                cause = error.cause if isinstance(error, NotSent) else error
                continue
            if found is None:
                unknown += 1
                continue
            self.single = self._remapped(found[0].decode(), int(found[1]))
            return
        if unknown == len(self.target.seeds):
            names = ", ".join(map(str, self.target.seeds))
            raise ConfigurationError(
                f"no Sentinel of {names} knows the service {self.target.service!r}: check the URL"
            )
        raise NotSent(cause)

    async def _ask_nodes(self, ask: Ask) -> None:
        cause: BaseException = ConnectionError("no cluster node was asked")
        known = self.masters()
        nodes = random.sample(known, len(known))
        nodes += [seed for seed in self.target.seeds if seed not in nodes]
        for node in nodes:
            try:
                rows = await ask(node, False, (b"CLUSTER", b"SLOTS"))
            except NotSent as error:
                cause = error.cause
                continue
            except ServerError as error:
                if "cluster support disabled" in str(error):
                    raise ConfigurationError(_NO_CLUSTER) from error
                cause = error
                continue
            self._slots = self._read_slots(rows, node)
            return
        raise NotSent(cause)

    def _read_slots(self, rows: list[Any], asked: Endpoint) -> list[Endpoint | None]:
        slots: list[Endpoint | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, master, *_ in rows:
            host = (master[0] or b"").decode()
            node = self._remapped(asked.host if host in {"", "?"} else host, int(master[1]))
            slots[first : last + 1] = [node] * (last + 1 - first)
        return slots
