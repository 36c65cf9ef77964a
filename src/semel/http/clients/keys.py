"""Keys that outlive the process: the same business action is sent under the same key, also after a crash.

The key is minted and *recorded before the first byte is sent*, as the result of an ordinary `execute` under the action's
name: a process killed at any time afterwards finds it again, and nothing is locked while the request is on its way. The
request's fingerprint is recorded with it. Once the server's retention is over the key is neither reused (the server could
act again) nor replaced (so could a new key): the action is refused until its tombstone ends or `forget` is called.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from inspect import isawaitable
from math import inf
from types import TracebackType
from typing import Any, Final, Literal, Self

import msgspec

from semel.errors import CodecError, ConfigurationError, KeyExpired, KeyMismatch, OutcomeUnknown, SemelError
from semel.http.clients.errors import RetentionOver
from semel.keys import mask
from semel.model import Record, State
from semel.once import AsyncSemel, Semel
from semel.options import Duration, seconds
from semel.results import codec_for
from semel.runtime import run_sync

__all__ = ["Book", "DurableKeys", "Kept", "KeyState", "opened"]

_log = logging.getLogger("semel")
_LEASE: Final = 1.0  # minting takes no time: a process killed right there must not hold the action up
_WAIT: Final = 5.0
Face = Semel | AsyncSemel


class KeyState(msgspec.Struct, frozen=True):
    """What is known about an action. `status` is that of its final response, None while there was none."""

    key: str
    first_sent: float
    status: int | None = None

    @property
    def done(self) -> bool:
        return self.status is not None

    def __repr__(self) -> str:
        return f"KeyState(key={mask(self.key)!r}, first_sent={self.first_sent!r}, status={self.status!r})"


class Kept(msgspec.Struct, frozen=True):
    """A key from the store, how long ago it was first used, and what the server said about its retention."""

    key: str
    age: float
    retention: float


class Book:
    """The keys as one colour writes them. Coroutines; with a Semel they never suspend."""

    def __init__(self, face: Face, operation: str, retention: float, tombstone: float) -> None:
        self._face = face
        self._operation = operation
        self._retention = retention
        self._times: dict[str, Any] = {
            "retention": None if retention == inf else retention,
            "tombstone": tombstone,
        }

    async def keep(self, action: str, fingerprint: str, mint: Callable[[], str]) -> Kept:
        """The action's key: a new one, durable when this returns, or the one it was first sent with.

        Raises KeyMismatch for another request under the action, RetentionOver when the key may not be used any more,
        StoreUnavailable when the store cannot say: nothing has been sent then.
        """

        def new() -> list[Any]:
            return [mint(), time.time()]

        try:
            outcome = await self._write("", action, new, fingerprint=fingerprint)
        except KeyMismatch as error:
            raise KeyMismatch(
                f"the action {mask(action)!r} was first sent as another request: send that one, or name another action"
            ) from error
        except KeyExpired as error:
            raise RetentionOver(
                f"the action {mask(action)!r} was first sent longer ago than keys are kept; whether it took place is not "
                "known here: ask the server, then forget(action) or name another action"
            ) from error
        key, at = outcome.value
        if not outcome.replayed:
            return Kept(key, 0.0, self._retention)
        said = await self._peek(".retention", action)
        known = self._retention if said is None else min(self._retention, float(said))
        # The longer of the two: another machine may have sent it first, and either one's clock may be wrong (R20).
        return Kept(key, max(0.0, time.time() - at, await self._age(action)), known)

    async def learn(self, action: str, retention: float) -> None:
        """The server keeps keys for so long: this must be known after a crash, too. The first word counts."""
        await self._note(".retention", action, retention)

    async def finish(self, action: str, status: int) -> None:
        """A final response came."""
        await self._note(".done", action, status)

    async def _note(self, part: str, action: str, value: float) -> None:
        """An answer is here: a store that is away now must not take it from the caller. The note is lost, loudly."""
        try:
            # One request for every value, because the first word counts; a face may ask for a fingerprint of each call.
            await self._write(part, action, lambda: value, request=part)
        except SemelError as error:
            _log.warning(
                "of the action %r it could not be noted that %s is %s: %s",
                mask(action),
                part[1:],
                value,
                error,
            )

    async def look(self, action: str) -> KeyState | None:
        kept = await self._peek("", action)
        if kept is None:
            return None
        return KeyState(kept[0], kept[1], await self._peek(".done", action))

    async def forget(self, action: str) -> bool:
        known = False
        for part in (".retention", ".done", ""):  # the key last: cut short, the action is still known
            known = await _done(self._face.forget(action, operation=self._operation + part)) or known
        return known

    async def _write(self, part: str, action: str, make: Callable[[], Any], **more: Any) -> Any:
        # Said in full: a face of the caller's may have other defaults, and a key that was never sent may be made anew.
        options: dict[str, Any] = {
            "operation": self._operation + part,
            "lease": _LEASE,
            "wait": _WAIT,
            "inline": True,
            "on_unknown": "retry",
            "on_error": "release",
        }
        return await _done(self._face.execute(action, make, **options, **self._times, **more))

    async def _age(self, action: str) -> float:
        """How long ago the action's key was made, by the store's clock."""
        face = self._face
        call = face._about(action, {"operation": self._operation})  # noqa: SLF001 - our own
        record, now = await face._engine().store.peek(call.scope)  # noqa: SLF001 - our own
        return 0.0 if record is None else now - record.created

    async def _peek(self, part: str, action: str) -> Any:
        record: Record | None = await _done(self._face.peek(action, operation=self._operation + part))
        if record is None or record.state is not State.DONE or not record.result:
            return None
        try:
            return codec_for(None).decode(record.result)
        except CodecError as error:
            raise OutcomeUnknown(
                f"what is stored about the action {mask(action)!r} cannot be read ({error}): repair it with "
                f"resolve(...) or forget(...) under the operation {self._operation + part!r}"
            ) from error


async def _done(result: Any) -> Any:
    return await result if isawaitable(result) else result


class DurableKeys:
    """A store of keys for `keys=`: `DurableKeys("sqlite:///keys.db")`, any other URL, or a Semel or AsyncSemel.

    `retention` is how long a key may be reused after it was first sent: not longer than the server keeps it (24 hours are
    usual). `tombstone` is how long afterwards the action is still refused. Thread-safe; one object serves both colours
    when it was given a URL. What it opened itself, `close` and `aclose` close.
    """

    def __init__(
        self,
        source: str | Semel | AsyncSemel,
        *,
        operation: str = "http.client",
        retention: Duration | None = 86_400,
        tombstone: Duration = 30 * 86_400,
    ) -> None:
        self._operation = operation
        self._retention = inf if retention is None else seconds("retention", retention)
        self._tombstone = seconds("tombstone", tombstone)
        if not isinstance(source, str | Semel | AsyncSemel):
            raise ConfigurationError(
                f"keys are kept in a store: give its URL, a Semel or an AsyncSemel, not {type(source).__name__}"
            )
        if isinstance(source, str) and source.startswith("memory:"):
            raise ConfigurationError(
                "memory:// is gone with the process, and these keys must not be: sqlite:///keys.db needs no server"
            )
        self._source = source
        self._opened: dict[str, Face] = {}
        self._lock = threading.Lock()
        self._check()

    def _check(self) -> None:
        """A wrong address is refused now; one that only one colour can use is right."""
        if not isinstance(self._source, str):
            self.book("sync" if isinstance(self._source, Semel) else "async")
            return
        try:
            self.book("sync")
        except ConfigurationError as error:
            try:
                self.book("async")
            except ConfigurationError:
                raise error from None

    def book(self, colour: Literal["sync", "async"]) -> Book:
        """The side for transports of one colour."""
        face = self._face(colour)
        if not face._store.capabilities.durable:  # noqa: SLF001 - our own
            raise ConfigurationError(
                f"{face!r} forgets at a restart: keep keys in a durable store, such as sqlite:///"
            )
        return Book(face, self._operation, self._retention, self._tombstone)

    def _face(self, colour: Literal["sync", "async"]) -> Face:
        wanted = Semel if colour == "sync" else AsyncSemel
        if isinstance(self._source, wanted):
            return self._source
        if not isinstance(self._source, str):
            raise ConfigurationError(
                f"these keys are kept by {type(self._source).__name__}, and this is {colour} code: give {wanted.__name__}, "
                "or the URL of the store"
            )
        with self._lock:
            if colour not in self._opened:
                self._opened[colour] = wanted(self._source)  # connects at the first use
            return self._opened[colour]

    def look(self, action: str) -> KeyState | None:
        """What is known about the action; None when it was never sent, or is forgotten."""
        return run_sync(self.book("sync").look(action))

    def forget(self, action: str) -> bool:
        """Give the action up: the next request under its name gets a new key. True if there was something to forget."""
        return run_sync(self.book("sync").forget(action))

    def purge(self) -> int:
        """Remove what has expired; the count."""
        face = self._face("sync")
        assert isinstance(face, Semel)  # noqa: S101 - `_face` has seen to it
        return face.purge()

    async def alook(self, action: str) -> KeyState | None:
        """`look`, for async code."""
        return await self.book("async").look(action)

    async def aforget(self, action: str) -> bool:
        """`forget`, for async code."""
        return await self.book("async").forget(action)

    def close(self) -> None:
        """Close what was opened here; a Semel that was handed in stays open."""
        if isinstance(face := self._opened.pop("sync", None), Semel):
            face.close()

    async def aclose(self) -> None:
        """`close`, for async code."""
        self.close()
        if isinstance(face := self._opened.pop("async", None), AsyncSemel):
            await face.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()


def opened(
    keys: DurableKeys | str | Face | None, colour: Literal["sync", "async"]
) -> tuple[DurableKeys | None, Book | None]:
    """What a client was given as `keys=`: those that are its own to close, and their side of its colour."""
    if keys is None:
        return None, None
    if isinstance(keys, DurableKeys):
        return None, keys.book(colour)
    owned = DurableKeys(keys)
    return owned, owned.book(colour)
