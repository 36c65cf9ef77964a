"""Responses that are too long for a record: their bodies go to a store of bodies, and come back for every replay (H26).

A body belongs to one attempt at one request, so nobody else refers to it, and its name tells for how long it is wanted:
whoever sweeps the store needs no records to know what is over.
"""

from __future__ import annotations

import hashlib
import logging
import math
from typing import Any, Final

import msgspec

from semel.bodies import BodyDamaged, BodyStore, open_bodies
from semel.closing import Closeable
from semel.errors import ConfigurationError
from semel.hosts import scheme_of
from semel.http.snapshot import Snapshot, Spilled
from semel.keys import Scope
from semel.options import Duration, seconds
from semel.run import Run
from semel.serverclock import SERVER_CLOCK

__all__ = ["Spill"]

HOME: Final = "http"
_ALSO: Final = ", or the URL of a SQL database"
_log = logging.getLogger("semel.http")


class Spill(Closeable):
    """Where long responses are kept: `Spill("file:///srv/responses")`, an `s3://` URL, a SQL database's, or a store of yours.

    `max_size` is the longest response that is kept, in bytes; it is held in memory until it is stored. Several routes,
    services and processes may share one store. Call `sweep()` now and then: nothing is removed by itself.
    """

    def __init__(self, where: str | BodyStore, *, max_size: int = 32 << 20, grace: Duration = 3600) -> None:
        self.store = _opened(where)
        self._owned = isinstance(where, str)
        given: Any = max_size
        if not isinstance(given, int) or isinstance(given, bool) or given < 0:
            raise ConfigurationError(f"max_size= must be a number of bytes, not {given!r}")
        self.max_size = max_size
        self._grace = seconds("grace", grace, least=0.0)

    @classmethod
    def of(cls, given: Any) -> Spill | None:
        """What `spill=` says: one of these, or what one is made of."""
        return given if given is None or isinstance(given, Spill) else cls(given)

    def close(self) -> None:
        """Close the connections that were opened for a URL; a store of yours stays open. It may be used again."""
        if self._owned and (close := getattr(self.store, "close", None)) is not None:
            close()

    async def aclose(self) -> None:
        """`close`, for async code."""
        self.close()

    def kept(self, run: Run, snapshot: Snapshot, body: bytes, retention: float, ring: Any) -> Snapshot:
        """The response with its body stored: durable when this returns. Where that fails, it is told without one.

        Whatever goes wrong, the effect has happened: a response that cannot be kept must not free its key.
        """
        scope = run.scope
        token = hashlib.blake2b(scope.hash + run.ask.nonce, digest_size=20).hexdigest()
        name = f"{HOME}/{token}t{0 if retention == math.inf else math.ceil(retention)}"
        try:
            self.store.put(name, body if ring is None else ring.seal(body, scope))
        except Exception as error:  # noqa: BLE001 - see above
            _log.error("the body of a response of %r could not be stored: %s", scope, error)
            return snapshot
        spilled = Spilled(name, hashlib.sha256(body).digest(), len(body))
        return msgspec.structs.replace(snapshot, spilled=spilled)

    def read(self, scope: Scope, spilled: Spilled, ring: Any) -> bytes:
        """The body, compared with its hash. BodyMissing, BodyDamaged, CodecError (encrypted otherwise), StoreUnavailable."""
        data = self.store.get(spilled.name)
        body: bytes = data if ring is None else ring.open(data, scope)
        if len(body) != spilled.size or hashlib.sha256(body).digest() != spilled.sha256:
            raise BodyDamaged(
                f"the store holds {len(body)} bytes under {spilled.name}, which are not the {spilled.size} that were sent"
            )
        return body

    def sweep(self) -> int:
        """Remove the bodies whose records are over, by the store's own clock. Returns how many. A plain call.

        A body is stored before its record is, so it is kept for `grace` more than its retention: a record that was
        written late, because its store was down, still finds it.
        """
        count = 0
        for body in self.store.stored(HOME):
            wanted = _wanted(body.name)
            if wanted is not None and body.age > wanted + self._grace:
                self.store.delete(body.name)
                count += 1
        return count


def _wanted(name: str) -> float | None:
    """For how many seconds a body is wanted; None: for ever, or it is none of ours."""
    _, mark, digits = name.rpartition("t")
    return float(digits) if mark and digits.isdecimal() and digits != "0" else None


def _opened(where: Any) -> BodyStore:
    if isinstance(where, str) and scheme_of(where).partition("+")[0] in SERVER_CLOCK:
        from semel.bodies.table import TableBodies

        return TableBodies(where)
    store = open_bodies(where, option="spill", also=_ALSO)
    if not getattr(store, "takes", True):
        raise ConfigurationError(
            f"spill= was given {type(store).__name__}, which only reads: write the URL of the database, or TableBodies(engine)"
        )
    return store
