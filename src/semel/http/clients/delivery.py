"""One logical request: one key, several attempts. Written once, for both colours and every HTTP library.

A `Wire` is a library's request with what it can do; `carry` decides. With a blocking wire its coroutine never suspends.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Final, Generic, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec

from semel.errors import ConfigurationError
from semel.http.clients.answers import Answer, Judgement, judge
from semel.http.clients.bodies import Parcel
from semel.http.clients.errors import BodyNotRepeatable, RetentionOver
from semel.http.clients.keys import Book
from semel.http.clients.options import Retrying, Settings, Wish, wish_for
from semel.http.fingerprints import fingerprint as request_fingerprint
from semel.keys import fingerprint, mask

__all__ = ["Delivered", "Delivery", "Loss", "Wire", "carry", "marked"]

_log = logging.getLogger("semel")
_LONGEST: Final = 1e9  # seconds: no system sleeps for ever
_ON_THE_WAY: Final = 5.0  # seconds that an attempt may need to arrive
R = TypeVar("R")
Loss = Literal["unsent", "lost"]
"""What an attempt without an answer means: nothing left this machine, or the server may have acted."""


class Delivered(msgspec.Struct, frozen=True):
    """How a response came: under which key, in how many attempts, and whether the server showed that the key counted."""

    key: str
    attempts: int
    replayed: bool
    honoured: bool
    action: str | None = None

    def __repr__(self) -> str:
        return (
            f"Delivered(key={mask(self.key)!r}, attempts={self.attempts}, replayed={self.replayed}, "
            f"honoured={self.honoured}, action={self.action and mask(self.action)!r})"
        )


@dataclass(slots=True)
class Delivery:
    """What is known about a logical request while it lasts; redirects and auth rounds share it."""

    key: str
    begun: float
    action: str | None = None
    age: float = 0.0  # of the key when this delivery began
    retention: float = inf
    attempts: int = 0
    honoured: bool = False


class Wire(Protocol[R]):
    """A library's request. `send` makes one attempt; what it raises is explained by `loss`."""

    @property
    def method(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def native(self) -> Any:
        """The library's own request, for a caller's `key=` function."""
        ...

    def header(self, name: str) -> str | None: ...

    def mark(self, name: str, value: str | None) -> None:
        """Set or remove a header of the caller's request."""
        ...

    def wishes(self) -> Mapping[str, Any]: ...

    def earlier(self, header: str) -> Delivery | None:
        """The delivery that this request goes on with: a redirect, an authentication round, a request sent again."""
        ...

    def remember(self, delivery: Delivery) -> None: ...

    async def pack(self, most: int) -> Parcel: ...

    async def pass_on(self) -> R:
        """Send it as it is, once."""
        ...

    async def send(self, parcel: Parcel, patience: float) -> R: ...

    async def look(self, response: R, most: int) -> tuple[R, Answer]:
        """What the response says. Reads it if it is small; the response to give to the caller comes back."""
        ...

    async def drop(self, response: R) -> None: ...

    def hand(self, response: R, delivered: Delivered) -> R:
        """Attach the report."""
        ...

    def loss(self, error: Exception) -> Loss | None: ...

    async def sleep(self, seconds: float) -> None: ...


def marked(headers: Any, name: str, value: str | None) -> None:
    """Set or remove a header of any library's mapping."""
    if value is None:
        headers.pop(name, None)
    else:
        headers[name] = value


async def carry(wire: Wire[R], settings: Settings, book: Book | None) -> R:
    """Send the request until its answer is final, or nothing more may be done. One key over all attempts."""
    settings, wish = wish_for(settings, wire.wishes())
    earlier = wire.earlier(settings.header)
    if not wish.enabled:
        return await wire.pass_on()
    if wire.method not in settings.methods and (earlier is not None or wire.header(settings.header) is None):
        if earlier is not None:
            wire.mark(settings.header, None)  # the GET that a redirect leads to is another request
        elif wish.direct:
            raise ConfigurationError(
                f"a key or an action was given for {wire.method}, which is not among methods=: add it there if the "
                "server takes keys for it"
            )
        return await wire.pass_on()
    parcel = await wire.pack(settings.max_body)
    try:
        if earlier is None:
            delivery = await _begin(wire, settings, wish, book, parcel)
        else:
            delivery = earlier
            delivery.honoured = False  # a redirect may lead to another server, which has shown nothing yet
        wire.remember(delivery)
        return await _Trip(wire, settings, book, parcel, delivery).run()
    finally:
        parcel.close()


async def _begin(
    wire: Wire[Any], settings: Settings, wish: Wish, book: Book | None, parcel: Parcel
) -> Delivery:
    own = wire.header(settings.header)
    if own is not None:
        if wish.direct:
            raise ConfigurationError(
                f"give the key by the header {settings.header} or by an option, not both"
            )
        return Delivery(own, time.monotonic(), retention=settings.retention)
    if wish.action is None:
        delivery = Delivery(
            wish.key or settings.minted(wire.native), time.monotonic(), retention=settings.retention
        )
    else:
        delivery = await _kept(wire, settings, wish, book, parcel)
    wire.mark(settings.header, settings.field(delivery.key))
    return delivery


async def _kept(
    wire: Wire[Any], settings: Settings, wish: Wish, book: Book | None, parcel: Parcel
) -> Delivery:
    action = wish.action or ""
    if book is None:
        raise ConfigurationError(
            'action= needs a store that keeps its key: keys="sqlite:///keys.db" (or DurableKeys) for the transport'
        )
    if not parcel.repeatable:
        raise BodyNotRepeatable(
            f"the body is longer than max_body={settings.max_body} bytes: an action must be able to be sent again; "
            "nothing was sent"
        )
    kept = await book.keep(action, _fingerprint(wire, wish, parcel), lambda: settings.minted(wire.native))
    retention = min(settings.retention, kept.retention)
    return Delivery(kept.key, time.monotonic(), action, kept.age, retention)


def _fingerprint(wire: Wire[Any], wish: Wish, parcel: Parcel) -> str:
    if wish.request is not None:
        return fingerprint(wish.request)
    parts = urlsplit(wire.url)
    # Libraries spell an address differently: with or without the usual port and the first slash.
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    place = f"{parts.scheme}://{parts.hostname}:{port}{parts.path or '/'}"
    content_type = wire.header("Content-Type") or ""
    return request_fingerprint(wire.method, place, parts.query.encode(), content_type, parcel.whole())


class _Trip(Generic[R]):
    """The attempts of one delivery over one wire."""

    def __init__(
        self, wire: Wire[R], settings: Settings, book: Book | None, parcel: Parcel, delivery: Delivery
    ) -> None:
        self.wire = wire
        self.settings = settings
        self.book = book
        self.parcel = parcel
        self.delivery = delivery
        self.tries = 0
        self.sent_at = delivery.begun  # the last attempt
        self.until = time.monotonic() + settings.deadline

    async def run(self) -> R:
        if self.delivery.age or self.delivery.attempts:  # what was never sent cannot be forgotten
            self._check_retention(0.0, None)
        while True:
            self.tries += 1
            self.delivery.attempts += 1
            try:
                response, answer = await self._attempt()
            except Exception as error:  # noqa: BLE001 - what is not a lost attempt is raised again
                await self.wire.sleep(self._after_loss(error))
                continue
            try:
                judgement = await self._judged(answer)
            except BaseException:
                await self.wire.drop(response)  # cancelled while the store was written
                raise
            pause = self._pause(judgement.wait) if judgement.again and self.parcel.repeatable else None
            if pause is None:
                return self.wire.hand(response, self._report(answer))
            await self.wire.drop(response)
            self._check_retention(pause, None, judgement.why)
            self._announce(judgement.why, pause, None)
            await self.wire.sleep(pause)

    async def _attempt(self) -> tuple[R, Answer]:
        self.sent_at = time.monotonic()
        response = await self.wire.send(self.parcel, self.until - time.monotonic())
        return await self.wire.look(response, self.settings.max_response)

    async def _judged(self, answer: Answer) -> Judgement:
        delivery, book, action = self.delivery, self.book, self.delivery.action
        judgement = judge(answer, honoured=delivery.honoured, trusted=self.settings.trusted, now=time.time())
        delivery.honoured = judgement.honoured
        said = self._retention(answer)
        if said is not None and said < delivery.retention:
            delivery.retention = said
            if action is not None and book is not None:
                await book.learn(action, said)
        if judgement.done and action is not None and book is not None:
            await book.finish(action, answer.status)
        return judgement

    def _retention(self, answer: Answer) -> float | None:
        """How long after the first attempt the key is forgotten, as the answer says; a replay says what is left of that.

        What is left counts from when it was asked for: the answer may have been on its way for long.
        """
        said = answer.retention
        if said is None or not answer.replayed:
            return said
        return said + self.delivery.age + self.sent_at - self.delivery.begun

    def _report(self, answer: Answer) -> Delivered:
        delivery = self.delivery
        return Delivered(delivery.key, delivery.attempts, answer.replayed, delivery.honoured, delivery.action)

    def _after_loss(self, error: Exception) -> float:
        """The pause before the next attempt; raises when there is none."""
        loss, settings, delivery = self.wire.loss(error), self.settings, self.delivery
        if loss is None:
            raise error
        may = loss == "unsent" or settings.retry_lost or settings.trusted or delivery.honoured
        if may and not self.parcel.repeatable:
            raise BodyNotRepeatable(
                f"the request failed ({type(error).__name__}: {error}) and cannot be sent again: its body is a stream "
                f"longer than max_body={settings.max_body} bytes; pass bytes, or raise max_body",
                key=delivery.key,
            ) from error
        pause = self._pause(None) if may else None
        if pause is None:
            outcome = "was not sent" if loss == "unsent" else "may have taken effect"
            error.add_note(
                f"semel: {self.tries} attempts under the idempotency key {mask(delivery.key)!r}; the request {outcome} "
                "in the last one. Sent again with the same key it is safe."
            )
            raise error
        self._check_retention(pause, error)
        self._announce(f"{loss}: {type(error).__name__}", pause, error)
        return pause

    def _pause(self, asked: float | None) -> float | None:
        """How long to wait before the next attempt; None when there must be none."""
        if self.tries >= self.settings.attempts:
            return None
        first, longest = self.settings.backoff
        # Full jitter: callers that failed together must not come back together.
        if asked is None:
            pause = random.uniform(0.0, min(longest, first * 2.0 ** min(self.tries - 1, 60)))  # noqa: S311 - no secret
        else:
            pause = min(asked, self.settings.max_wait) + random.uniform(0.0, first)  # noqa: S311 - only to spread retries
        return min(pause, _LONGEST) if time.monotonic() + pause < self.until else None

    def _check_retention(self, pause: float, error: Exception | None, why: str = "") -> None:
        delivery = self.delivery
        age = delivery.age + time.monotonic() - delivery.begun + pause
        # It must arrive before the key is forgotten, not only leave.
        if age + min(_ON_THE_WAY, 0.05 * delivery.retention) < delivery.retention:
            return
        last = why or (f"{type(error).__name__}: {error}" if error else "none by this process")
        raise RetentionOver(
            f"the server keeps a key for {delivery.retention:g} s, and the next attempt would come {age:.3g} s after the "
            f"first one: it could act twice, so it was not made (attempts: {delivery.attempts}; the last: {last})",
            key=delivery.key,
            attempts=delivery.attempts,
        ) from error

    def _announce(self, why: str, pause: float, error: Exception | None) -> None:
        host = urlsplit(self.wire.url).hostname or ""
        told = Retrying(self.wire.method, host, self.tries, why, pause, error)
        _log.info(
            "%s to %s is sent again in %.3f s with its key: %s (attempt %d of %d)",
            told.method,
            host,
            pause,
            why,
            self.tries,
            self.settings.attempts,
        )
        if self.settings.on_retry is not None:
            self.settings.on_retry(told)
