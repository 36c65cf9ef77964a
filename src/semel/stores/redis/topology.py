"""Which server holds a key: always the same one, the master that Sentinel names, or the owner of a cluster slot.

Pure book-keeping plus one question to the servers (`refresh`), asked through whatever the link gives us, so that
both colours share it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from semel.errors import ConfigurationError
from semel.stores.redis.address import Endpoint, Target
from semel.stores.redis.errors import NotSent, ServerError

__all__ = ["Ask", "Look", "Share", "Topology"]

# One command on a connection of its own: (endpoint, sentinel?, command, seconds) -> reply. Raises NotSent or ServerError.
Ask = Callable[[Endpoint, bool, tuple[bytes, ...], float], Awaitable[Any]]
# How long the next one may take: (how many are still to be asked, with it; is it the first?) -> seconds; 0 is no time.
Share = Callable[[int, bool], float]
# What is to be asked of a master before its first use, and who judges the reply: raises when it is not fit.
Look = tuple[tuple[Any, ...], Callable[[Any], None]]

_NO_CLUSTER: Final = "this Redis server is not in cluster mode: write redis:// instead of redis+cluster://"


class Topology:
    """The current map. `proven` says that a server answered once: from then on trouble is worth waiting out.

    `strangers` are masters that must be looked at before they are used: `locate` does not tell of them.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.proven = False
        self.refreshing = 0.0  # since when somebody asks for the map; 0.0 (or False): nobody does
        self.refreshed_at = float("-inf")
        self.single: Endpoint | None = target.seeds[0] if target.kind == "standalone" else None
        self.strangers: dict[Endpoint, Look] = {}
        self._named: Endpoint | None = None  # what a Sentinel said last: `single` is dropped on suspicion
        self._slots: list[Endpoint | None] = []
        self._replicas: set[Endpoint] = set()
        self._teller: Endpoint | None = None  # who told something new the last time
        self._in_vain: dict[Endpoint, float] = {}  # how long each was waited for that did not answer since

    def locate(self, key: bytes | None) -> Endpoint | None:
        """The master for `key` as far as known; None asks for a refresh, or for a look at a stranger."""
        if self.single is not None:
            return self.single
        if not self._slots:
            return None
        if key is None:
            known = (node for node in self._slots if node is not None)
            return next((node for node in known if node not in self.strangers), None)
        node = self._slots[key_slot(key)]
        return None if self.strangers and node in self.strangers else node

    def stranger(self, key: bytes | None) -> Endpoint | None:
        """The stranger on the way of a `key` that `locate` finds no master for."""
        nodes = [self._slots[key_slot(key)]] if self._slots and key is not None else self.masters()
        return next((node for node in nodes if node in self.strangers), None)

    def masters(self) -> list[Endpoint]:
        if self.single is not None:
            return [self.single]
        return sorted({node for node in self._slots if node is not None})

    def suspect(self) -> bool:
        """The map may be wrong: says whether asking the servers can help."""
        if self.target.kind == "sentinel":
            self.single = None
        return self.target.kind != "standalone"

    def silent(self, node: Endpoint, seconds: float) -> None:
        """It did not answer for so long: when the map is asked for, it comes last."""
        self._in_vain[node] = seconds

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

    # ---------------------------------------------------------------------------- asking the servers
    def begin(self, patience: float) -> float:
        """The right to ask for the map, to be given to `end`; 0.0: somebody began less than `patience` seconds ago.

        Not for ever: the event loop of whoever asks may be held up, and the others need the map.
        """
        now = time.monotonic()  # not a loop's own clock: loops share this
        if self.refreshing and now - self.refreshing < patience:
            return 0.0
        self.refreshing = now
        return now

    def end(self, begun: float) -> None:
        if self.refreshing == begun:  # else somebody else took over
            self.refreshing = 0.0

    async def refresh(self, ask: Ask, share: Share) -> None:
        """Ask until one server knows; `NotSent` with the last cause when none does. Not for a standalone server."""
        sentinel = self.target.kind == "sentinel"
        question: tuple[bytes, ...] = (b"CLUSTER", b"SLOTS")
        if sentinel:
            question = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self.target.service.encode())
        cause: BaseException = TimeoutError("no time left to ask")
        unknown = 0
        nodes = self._to_ask()
        for at, node in enumerate(nodes):
            limit = share(len(nodes) - at, at == 0)
            if limit <= 0:
                break
            try:
                told = await ask(node, sentinel, question, limit)
            except (NotSent, ServerError) as error:
                cause = self._unable(error)
                self._in_vain[node] = limit
                continue
            self._in_vain.pop(node, None)
            if told:
                self._hear(node, told)
                return
            unknown += 1
        if unknown == len(nodes):
            raise self._nobody_knows()
        raise NotSent(cause)

    def _to_ask(self) -> list[Endpoint]:
        """Who told something new first, then who belongs to the cluster, then the seeds; who was silent at the end.

        Otherwise in any order: many processes that ask at once spread over the servers. Of the silent ones those that
        were waited for the shortest time come first: they may be slow and not dead.
        """
        known = {node for node in self._slots if node is not None} | self._replicas
        nodes = _shuffled(known) + _shuffled(set(self.target.seeds) - known)
        before = self._in_vain
        self._in_vain = waited = {
            node: before.get(node, 0.0) for node in nodes if node in before
        }  # and no others
        return sorted(nodes, key=lambda node: waited.get(node, -1.0 if node == self._teller else 0.0))

    def _unable(self, error: NotSent | ServerError) -> BaseException:
        if isinstance(error, NotSent):
            return error.cause
        if "cluster support disabled" in str(error):
            raise ConfigurationError(_NO_CLUSTER) from error
        return error

    def _nobody_knows(self) -> Exception:
        names = ", ".join(map(str, self.target.seeds))
        if self.target.kind == "sentinel":
            return ConfigurationError(
                f"no Sentinel of {names} knows the service {self.target.service!r}: check the URL"
            )
        return NotSent(ConnectionError("no node knows of any slot: is the cluster complete?"))

    def _hear(self, node: Endpoint, told: list[Any]) -> None:
        """Take the answer for the map."""
        if self.target.kind == "sentinel":
            named = self._remapped(told[0].decode(), int(told[1]))
            news = named != self._named
            self.single = self._named = named
        else:
            slots = self._read_slots(told, node)
            news = slots != self._slots
            self._slots = slots
        # Who only repeats what is in doubt may be cut off from the others: somebody else is asked the next time.
        self._teller = node if news else None

    def _read_slots(self, rows: list[Any], asked: Endpoint) -> list[Endpoint | None]:
        slots: list[Endpoint | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        replicas: set[Endpoint] = set()
        for first, last, *nodes in rows:
            master, *others = (self._read_node(node, asked) for node in nodes)
            slots[first : last + 1] = [master] * (last + 1 - first)
            replicas.update(others)
        self._replicas = replicas
        return slots

    def _read_node(self, node: list[Any], asked: Endpoint) -> Endpoint:
        host = (node[0] or b"").decode()
        return self._remapped(asked.host if host in {"", "?"} else host, int(node[1]))


def _shuffled(nodes: Iterable[Endpoint]) -> list[Endpoint]:
    found = list(nodes)
    return random.sample(found, len(found))
