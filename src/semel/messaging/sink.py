"""What a relay writes to: one method, `publish`, and a declared class of guarantee.

The relay numbers the batches of each part (and lane) 1, 2, 3 … without gaps and commits what a number contains before it
sends it. A sink that keeps the last number beside the messages, in one atomic step, is exact: a batch that is sent again
is found and left out, and a batch of a relay that was overtaken is refused by its epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from semel.errors import SemelError
from semel.messaging.message import Message

__all__ = ["Fenced", "Guarantee", "Rejected", "Row", "Sink", "SinkUnavailable"]

Guarantee = Literal["exact", "window", "at-least-once"]


class Row(msgspec.Struct, frozen=True, gc=False):
    """A message as it stands in the outbox, ready to travel."""

    seq: int
    id: str
    tenant: str
    topic: str
    key: str | None
    type: str | None
    schema: str | None
    headers: dict[str, str]
    body: bytes
    created: float
    attempts: int = 0
    raw: bool = False

    def message(self) -> Message:
        """The message for a consumer: JSON is decoded, bytes are bytes."""
        return Message(
            topic=self.topic,
            body=self.body if self.raw else msgspec.json.decode(self.body),
            key=self.key,
            id=self.id,
            type=self.type,
            schema=self.schema,
            headers=self.headers,
            tenant=self.tenant,
            delivery=self.attempts + 1,
        )


@runtime_checkable
class Sink(Protocol):
    """Where a relay delivers. `publish` is all that is needed.

    It returns the frontier that it *found*: the highest number that the sink held for this part before the call, None if
    it keeps none. `found >= batch` means that the batch was in already and nothing was written. `found < batch - 1` means
    that the sink lost its tail: nothing is written, and the relay sends what it kept. A higher epoch known at the sink
    raises Fenced; a sink that cannot be reached SinkUnavailable; messages that it will not have Rejected.

    Optional: `bind(source)` is told once who publishes (frontiers of two outboxes must not meet), `lane(row)` splits a
    part (rows of one lane share a frontier and travel in one call), `splits` says which of "topic", "tenant" and "key" the lanes
    are made of (then one endpoint can be away without the others, see SinkUnavailable), `numbered = False` that it makes nothing
    of numbers (then a batch that it could not take may be made anew), `attach(bodies)` is told where bodies are that travel as
    references (None: nowhere), for sinks that hand bodies over, `aclose()`.
    """

    guarantee: Guarantee

    async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None: ...


class Fenced(SemelError):
    """Another relay owns this part since: what the overtaken one sends is refused. It stops by itself.

    `epoch` is the one that the sink knows, if it says so.
    """

    def __init__(self, message: str, *, epoch: int | None = None) -> None:
        super().__init__(message)
        self.epoch = epoch


class SinkUnavailable(SemelError):
    """The sink did not answer. The relay pauses and tries again; no attempt is counted against a message.

    `seconds` is how long the sink asked to be left alone, if it did. `endpoint` names for people which place is away, if it
    is one of several that the sink's lanes lead to: the others go on.
    """

    def __init__(self, message: str, *, seconds: float | None = None, endpoint: str | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds
        self.endpoint = endpoint


class Rejected(SemelError):
    """The sink is there and will not have some messages: `reasons` by message id; `delivered` are those it took.

    A message in neither was not tried, for the sake of order. An attempt is counted against each rejected one;
    those in `final` are parked at once. Those in `later` are not to blame (the place that they go to is full): their keys wait, and
    no attempt is counted.
    """

    def __init__(
        self,
        reasons: Mapping[str, str],
        *,
        delivered: Collection[str] = (),
        final: Collection[str] = (),
        later: Collection[str] = (),
    ) -> None:
        first = next(iter(reasons.items()), ("", ""))
        super().__init__(f"{len(reasons)} message(s) rejected, first {first[0]}: {first[1]}")
        self.reasons = dict(reasons)
        self.delivered = frozenset(delivered)
        self.final = frozenset(final)
        self.later = frozenset(later)

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"delivered": self.delivered, "final": self.final, "later": self.later}
        return type(self), (self.reasons,), state
