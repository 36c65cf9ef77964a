"""Sinks by URL. Each module is imported when a URL asks for it, so that no driver is needed for nothing."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from semel.errors import ConfigurationError
from semel.hosts import split
from semel.messaging.sink import Sink

__all__ = ["open_sink"]

# scheme → (module, class); the class has `from_url`.
_SCHEMES: Final[dict[str, tuple[str, str]]] = {
    "redis": ("redis", "RedisStreamSink"),
    "rediss": ("redis", "RedisStreamSink"),
    "redis+cluster": ("redis", "RedisStreamSink"),
    "rediss+cluster": ("redis", "RedisStreamSink"),
    "rabbitmq+stream": ("rabbit_streams", "RabbitStreamSink"),
    "rabbitmq+streams": ("rabbit_streams", "RabbitStreamSink"),
    "amqp": ("rabbit_queues", "RabbitQueueSink"),
    "amqps": ("rabbit_queues", "RabbitQueueSink"),
    "nats": ("nats", "NatsSink"),
    "tls": ("nats", "NatsSink"),
    "kafka": ("kafka", "KafkaSink"),
    "kafkas": ("kafka", "KafkaSink"),
    "http": ("webhook", "WebhookSink"),
    "https": ("webhook", "WebhookSink"),
    "outbox+": ("outbox", "OutboxSink"),
}


def open_sink(url: str) -> Sink:
    """The sink that a URL names. Nothing is connected yet; what the URL alone shows to be wrong raises now."""
    scheme = split(url).scheme
    known = _SCHEMES.get("outbox+" if scheme.startswith("outbox+") else scheme)
    if known is None:
        raise ConfigurationError(
            f"no sink answers to the URL scheme {scheme!r}; known are {', '.join(sorted(_SCHEMES))}"
        )
    module: Any = import_module(f"semel.messaging.sinks.{known[0]}")
    sink: Sink = getattr(module, known[1]).from_url(url)
    return sink
