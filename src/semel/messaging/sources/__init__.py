"""Where a consumer reads from. Each module is imported when a URL asks for it, so that no driver is needed for nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final, Protocol

import msgspec

from semel.errors import ConfigurationError
from semel.hosts import split
from semel.messaging.message import Message
from semel.messaging.pages import told

__all__ = ["PROBLEM", "Delivery", "Source", "malformed", "message_of", "open_source"]


PROBLEM: Final = "semel-problem"


class Delivery(Protocol):
    """A message as a broker handed it out. It is handed out again unless `ack` is called."""

    message: Message

    async def ack(self) -> None:
        """Done: never again."""
        ...

    async def nack(self) -> None:
        """Not done: hand it out again, to whoever is there."""
        ...

    async def extend(self) -> None:
        """Still at it: do not hand it out to somebody else yet."""
        ...


class Source(Protocol):
    """A broker's queue or stream, read by a group of consumers."""

    extends_every: float
    """After how many seconds at most `extend` must be called for what is being handled."""

    async def receive(self, limit: int) -> Sequence[Delivery]:
        """Some messages, at most `limit`; waits a while for the first, and may come back with none."""
        ...

    async def aclose(self) -> None: ...


_SCHEMES: Final[dict[str, tuple[str, str]]] = {
    "redis": ("redis", "RedisStreamSource"),
    "rediss": ("redis", "RedisStreamSource"),
    "redis+cluster": ("redis", "RedisStreamSource"),
    "rediss+cluster": ("redis", "RedisStreamSource"),
    "amqp": ("rabbitmq", "RabbitSource"),
    "amqps": ("rabbitmq", "RabbitSource"),
    "nats": ("nats", "NatsSource"),
    "tls": ("nats", "NatsSource"),
}


def open_source(url: str, *, group: str) -> Source:
    """The source that a URL names, read as `group`. Nothing is connected yet."""
    scheme = split(url).scheme
    known = _SCHEMES.get(scheme)
    if known is None:
        raise ConfigurationError(
            f"no source answers to the URL scheme {scheme!r}; known are {', '.join(sorted(_SCHEMES))}"
        )
    module: Any = import_module(f"semel.messaging.sources.{known[0]}")
    source: Source = getattr(module, known[1]).from_url(url, group=group)
    return source


def malformed(data: bytes, *, topic: str, problem: Exception | str, entry: str = "") -> Message:
    """What a broker handed out and nobody can read as a message: for the dead letters, with the reason. It is one letter however
    often it is handed out: `entry` is what the broker calls it; where it has no name of its own, its content is."""
    name = hashlib.sha256(f"{topic}\0{entry}".encode() + (b"" if entry else data)).hexdigest()[:32]
    return Message(topic or "malformed", data, id=f"malformed-{name}", headers={PROBLEM: told(str(problem))})


def message_of(
    data: bytes,
    *,
    identity: str,
    topic: str,
    fields: Mapping[str, str],
    headers: Mapping[str, str],
    delivery: int,
) -> Message:
    """The message that a broker's entry says. JSON is decoded; what is not JSON stays bytes, for the handler to judge."""
    headers = {name: value for name, value in headers.items() if name.lower() != PROBLEM}  # ours to say
    body: Any = data
    if fields.get("content") != "raw":
        try:
            body = msgspec.json.decode(data)
        except (
            msgspec.MsgspecError,
            RecursionError,
        ):  # nested too deeply: it would end whoever reads it next, too
            body = data
    return Message(
        topic=topic,
        body=body,
        key=fields.get("key") or None,
        id=identity,
        type=fields.get("type"),
        schema=fields.get("schema"),
        headers=headers,
        tenant=fields.get("tenant") or "default",
        delivery=delivery,
    )
