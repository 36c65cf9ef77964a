"""Clauses for real stores that the shipped contract has no place for: they look at a driver or at raw keys."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from semel.errors import StoreUnavailable
from semel.keys import Scope, make_scope
from semel.model import Answer, Ask, Kind, Settle, Won
from semel.runtime import run_sync
from semel.store import Colour, Settings, Store, open_store
from semel.testing.contract import StoreContract

__all__ = ["Trials"]

_OWN_TRIES = 3
"""Connections that our own adapter may try for one call: the first, its one repetition, a look at who is there."""
_TRIES = 12


class Trials(StoreContract):
    """The contract suite on the store of a URL, and what follows."""

    colour: Colour | None = "sync"

    def __init__(self, url: str) -> None:
        self._url = url

    def open(self) -> Store:
        return open_store(self._url, Settings(timeout=15.0), "sync")  # a busy machine is no broken store

    def test_the_driver_never_tries_again_by_itself(self) -> None:
        """Client libraries must not retry (redis-py does, ten times): a repeated command is ours to repeat, by its nonce."""
        with _closes_every_door() as (port, tries):
            store = open_store(f"redis://:secret@127.0.0.1:{port}/0", Settings(timeout=5.0), "sync")
            try:
                run_sync(store.claim((_ask(_scope()),)))
            except StoreUnavailable:
                pass
            else:
                raise AssertionError("a server that closes every connection answered a claim")
            finally:
                run_sync(store.aclose())
        assert 1 <= len(tries) <= _OWN_TRIES, f"{len(tries)} connections for one claim"

    def test_a_claim_that_fails_half_way_leaves_no_record(self) -> None:
        """Lua is not rolled back: what can fail comes before the record, which is the grant."""
        import redis

        store, scope = self.open(), _scope()
        with closing(redis.Redis.from_url(self._url)) as client:
            client.flushdb()
            (index,) = _indexes(client, store, scope)
            client.delete(index)
            client.set(index, "somebody else's")
            left: list[bytes] = []
            refused = True
            for _ in range(_TRIES):  # one of sixteen claims sweeps the index before it writes anything
                refused = refused and _is_refused(store, _ask(scope))
                left += [key for key in client.scan_iter() if key.endswith(scope.hash)]
        run_sync(store.aclose())
        assert refused, "the index could not be written, and yet the key was granted"
        assert not left, f"refused, and yet there is a record: {left}"


def _is_refused(store: Store, ask: Ask) -> bool:
    try:
        return isinstance(run_sync(store.claim((ask,)))[0], Exception)
    except Exception:  # noqa: BLE001 - refused it must be; how it is told is another clause's affair
        return True


def _indexes(client: Any, store: Store, scope: Scope) -> list[bytes]:
    """The sorted sets that hold this scope while it runs."""
    ask = _ask(scope)
    assert isinstance(run_sync(store.claim((ask,)))[0], Won)
    found = [key for key in client.scan_iter() if client.type(key) == b"zset"]
    _settle(store, scope, ask.nonce, Kind.RELEASED)
    _settle(store, scope, b"", Kind.FORGOTTEN)
    return found


def _settle(store: Store, scope: Scope, nonce: bytes, kind: Kind) -> None:
    assert run_sync(store.settle((Settle(scope, nonce, kind, 60.0),)))[0] is Answer.OK


def _scope() -> Scope:
    return make_scope("semel", "trials", "default", "k")


def _ask(scope: Scope) -> Ask:
    return Ask(scope, b"n" * 16, 10.0, 60.0)


@contextmanager
def _closes_every_door() -> Iterator[tuple[int, list[int]]]:
    """A server that resets each connection at once; the list grows by one for each of them."""
    tries: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                found, _ = listener.accept()
            except OSError:
                return
            tries.append(1)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            found.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], tries
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)
