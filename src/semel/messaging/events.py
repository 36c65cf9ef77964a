"""What an outbox, a relay or a consumer tells: one frozen dataclass per event, given to every callable in `hooks=`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields

from semel.errors import SemelWarning
from semel.keys import mask
from semel.shown import shown

__all__ = [
    "Alarm",
    "Backlog",
    "DatabaseBack",
    "DeadLettered",
    "Declined",
    "Delivered",
    "Emit",
    "GivenUp",
    "Handled",
    "HandlerFailed",
    "NotAdded",
    "Overtaken",
    "Parked",
    "RelayEvent",
    "SinkBack",
    "SinkPaused",
    "Unserved",
    "is_logged",
    "log_event",
    "teller",
]

_log = logging.getLogger("semel.messaging")


@dataclass(frozen=True, slots=True)
class RelayEvent:
    """The root of what is told."""


@dataclass(frozen=True, slots=True)
class NotAdded(RelayEvent):
    """An outbox refused a message, and its caller was told: `what` is too-large, malformed, conflict, configuration
    (no transaction, say) or database."""

    topic: str
    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class Delivered(RelayEvent):
    """A batch is at its sink; `duplicate` says that it had been there already."""

    lane: str
    part: int
    batch: int
    rows: int
    seconds: float
    duplicate: bool


@dataclass(frozen=True, slots=True)
class SinkPaused(RelayEvent):
    """A sink does not answer, or one `endpoint` of it: nothing is sent there for `seconds`. No attempt is counted against a
    message."""

    name: str
    seconds: float
    reason: str
    endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class SinkBack(RelayEvent):
    """A sink answers again, or one `endpoint` of it; `left` are its endpoints that are still away."""

    name: str
    away: float
    endpoint: str | None = None
    left: int = 0


@dataclass(frozen=True, slots=True)
class Declined(RelayEvent):
    """A sink does not take a message: its key waits until it is tried again, or is parked."""

    lane: str
    topic: str
    message: str
    reason: str


@dataclass(frozen=True, slots=True)
class Parked(RelayEvent):
    """A message was rejected too often: its key is held back, in order, until somebody replays it."""

    tenant: str
    key: str | None
    topic: str
    message: str
    attempts: int
    reason: str


@dataclass(frozen=True, slots=True)
class GivenUp(RelayEvent):
    """An operator took a parked message out of the outbox, undelivered: what follows it under its key flows on."""

    tenant: str
    key: str | None
    topic: str
    message: str


@dataclass(frozen=True, slots=True)
class Overtaken(RelayEvent):
    """Another relay owns a part that this one thought its own; what it had under way is refused."""

    part: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Backlog(RelayEvent):
    """What a relay found when it looked: messages that wait, by topic, the age of the oldest one that is due, keys that are
    held back, topics that no route knows, and the parts that it owns."""

    pending: Mapping[str, int] = field(default_factory=dict)
    oldest: float = 0.0
    parked: int = 0
    backing_off: int = 0
    unroutable: tuple[str, ...] = ()
    parts: int = 0


@dataclass(frozen=True, slots=True)
class DatabaseBack(RelayEvent):
    """The outbox's database answers its relay again, after `away` seconds."""

    away: float


@dataclass(frozen=True, slots=True)
class Unserved(RelayEvent):
    """A relay that has nothing to do found another outbox in its schema, `other`, where messages have waited for `oldest` seconds and
    no relay lives: is it told the right `table=`? Once for each; nothing fails."""

    other: str
    oldest: float
    message: str


@dataclass(frozen=True, slots=True)
class Alarm(RelayEvent):
    """Something that a person should look at: `what` is lost-tail, sink-ahead, route, rows-gone, unroutable,
    overlap, routes, parts, configuration, database, listener, bodies, source, consumer or error."""

    what: str
    message: str


@dataclass(frozen=True, slots=True)
class Handled(RelayEvent):
    """A consumer dealt with a message; `admitted` is False for a duplicate."""

    consumer: str
    topic: str
    message: str
    admitted: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class HandlerFailed(RelayEvent):
    """A handler raised: the message is tried again, or becomes a dead letter. `error` is the exception's class."""

    consumer: str
    topic: str
    message: str
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class DeadLettered(RelayEvent):
    """A handler failed too often: the message waits among the dead letters. `what` is the class of its exception, or
    unhandled (no handler knows its topic, or it cannot be read)."""

    consumer: str
    topic: str
    message: str
    attempts: int
    reason: str
    what: str = ""


Emit = Callable[[RelayEvent], None]
_LEVELS = {
    Delivered: logging.DEBUG,
    Handled: logging.DEBUG,
    Backlog: logging.DEBUG,
    NotAdded: logging.INFO,  # its caller has the exception
    SinkBack: logging.INFO,
    DatabaseBack: logging.INFO,
    Overtaken: logging.INFO,
}


def log_event(event: RelayEvent) -> None:
    """The hook that writes to `logging.getLogger("semel.messaging")`, with an event's fields in `extra`. A key is masked, as
    everywhere in logs: a message is found by its id."""
    level = _LEVELS.get(type(event), logging.ERROR if isinstance(event, Alarm) else logging.WARNING)
    if not _log.isEnabledFor(level):
        return
    said = {each.name: getattr(event, each.name) for each in fields(event)}
    if said.get("key"):
        said["key"] = mask(said["key"])
    text = " ".join(f"{name}={_shown(value)}" for name, value in said.items() if value is not None)
    extra = {f"semel_{name}": value for name, value in said.items()}
    _log.log(level, "%s %s", type(event).__name__, text, extra=extra)


def is_logged(kind: type[RelayEvent]) -> bool:
    """Whether `log_event` would write such an event: most are not, and one for each message need not be made then."""
    return _log.isEnabledFor(_LEVELS[kind])


def _shown(value: object) -> object:
    """One line, which every handler can write: a reason may be another program's text."""
    return value if not isinstance(value, str) or value.isprintable() else repr(value)


def teller(hooks: Collection[Emit]) -> Emit:
    """One callable for all hooks. One that raises is told of once and does not stop the others."""
    failed: set[int] = set()

    def tell(event: RelayEvent) -> None:
        for hook in hooks:
            try:
                hook(event)
            except Exception as error:  # noqa: BLE001 - a hook must not stop a message
                if id(hook) not in failed:
                    failed.add(id(hook))
                    warnings.warn(f"a messaging hook failed: {shown(error)}", SemelWarning, stacklevel=2)

    return tell
