"""NATS JetStream, a durable pull consumer: `nats://host:4222?stream=ORDERS&subject=orders.>`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Self

from semel.errors import ConfigurationError, InvalidKey, StoreUnavailable
from semel.messaging.message import Message
from semel.messaging.sinks.address import Address, needs
from semel.messaging.sinks.closing import Closing, shut
from semel.messaging.sinks.envelope import ID, PREFIX, from_line
from semel.messaging.sources import malformed, message_of

try:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.errors import Error
    from nats.errors import TimeoutError as NatsTimeout
    from nats.js.api import AckPolicy, ConsumerConfig
    from nats.js.errors import NotFoundError
except ModuleNotFoundError as missing:  # pragma: no cover - needs an environment without it
    raise needs("nats-py", "nats") from missing

__all__ = ["NatsSource"]

_LOOK: Final = 5.0  # seconds between two looks at a consumer that gives nothing


class _Taken:
    __slots__ = ("_raw", "message")

    def __init__(self, raw: Msg, message: Message) -> None:
        self._raw = raw
        self.message = message

    async def ack(self) -> None:
        """With the server's own confirmation: an acknowledgement that got lost would bring the message again."""
        await _told(self._raw.ack_sync(timeout=5))

    async def nack(self) -> None:
        await _told(self._raw.nak())

    async def extend(self) -> None:
        await _told(self._raw.in_progress())


async def _told(answer: Any) -> None:
    try:
        await answer
    except (Error, OSError, TimeoutError) as error:
        raise StoreUnavailable(f"NATS did not answer: {error!r}") from error


class NatsSource(Closing):
    """Reads a stream as the durable consumer `group`; a message that is not acknowledged in `idle` seconds comes again."""

    def __init__(
        self,
        url: str,
        stream: str,
        *,
        group: str,
        subject: str = ">",
        idle: float = 30.0,
        timeout: float = 10.0,
    ) -> None:
        self.extends_every = idle / 3
        self._address = Address.of(url, port=4222, options=())
        self._url = url
        self._stream = stream
        self._group = group
        self._subject = subject
        self._idle = idle
        self._timeout = timeout
        self._client: Client | None = None
        self._pull: Any = None
        self._looked = float("-inf")

    @classmethod
    def from_url(cls, url: str, *, group: str) -> Self:
        """From `nats://…?stream=NAME&subject=FILTER&group=NAME&idle=30`."""
        address = Address.of(url, port=4222, options=("stream", "subject", "group", "idle", "timeout"))
        stream = address.text("stream", "")
        if not stream:
            raise ConfigurationError("a NATS source needs ?stream=NAME")
        return cls(
            url.partition("?")[0],
            stream,
            group=address.text("group", group),
            subject=address.text("subject", ">"),
            idle=address.number("idle", 30.0),
            timeout=address.number("timeout", 10.0),
        )

    async def receive(self, limit: int) -> Sequence[_Taken]:
        """Some messages, after at most a second."""
        try:
            await self._connected()
        except (NatsTimeout, TimeoutError) as error:
            raise StoreUnavailable(f"NATS at {self._address.name} did not answer in time") from error
        except NotFoundError as error:
            raise StoreUnavailable(f"NATS has no stream {self._stream!r} yet") from error
        except (Error, OSError) as error:
            raise StoreUnavailable(f"NATS at {self._address.name} did not answer: {error!r}") from error
        try:
            found = await self._pull.fetch(limit, timeout=1)
        except (NatsTimeout, TimeoutError):
            await self._look()
            return []
        except NotFoundError as error:
            await self.aclose()
            raise StoreUnavailable(f"NATS has no stream {self._stream!r} yet") from error
        except (Error, OSError) as error:
            await self.aclose()
            raise StoreUnavailable(f"NATS at {self._address.name} did not answer: {error!r}") from error
        taken = []
        for raw in found:
            if raw.subject.startswith("semel.frontier."):
                await _told(raw.ack())  # a sink's bookkeeping, not a message
            else:
                taken.append(_Taken(raw, _message(raw)))
        return taken

    async def _look(self) -> None:
        """Now and then, while nothing comes: nobody tells who fetches that the durable consumer is gone, by itself or with its
        stream. It is made anew, and what was handled before is found out as a duplicate."""
        now = asyncio.get_running_loop().time()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        try:
            await self._pull.consumer_info()
        except (NatsTimeout, TimeoutError):
            return  # the next fetch shows whether it is away
        except NotFoundError as error:
            await self.aclose()
            raise StoreUnavailable(
                f"NATS has no consumer {self._group!r} of stream {self._stream!r} any more: it is made anew"
            ) from error
        except (Error, OSError) as error:
            await self.aclose()
            raise StoreUnavailable(f"NATS at {self._address.name} did not answer: {error!r}") from error

    async def _connected(self) -> None:
        if self._client is not None and self._client.is_connected:
            return
        await self.aclose()
        self._loop = asyncio.get_running_loop()
        client = Client()
        try:
            async with asyncio.timeout(self._timeout):
                await client.connect(
                    self._url, connect_timeout=5, allow_reconnect=False, error_cb=_quiet, closed_cb=_silent
                )
                config = ConsumerConfig(
                    ack_policy=AckPolicy.EXPLICIT, ack_wait=self._idle, max_ack_pending=10_000
                )
                self._pull = await client.jetstream().pull_subscribe(
                    self._subject if self._subject != ">" else "",
                    durable=self._group,
                    stream=self._stream,
                    config=config,
                )
        except BaseException:  # half open is not open: the next look begins anew
            await shut(client)
            raise
        self._client = client

    async def aclose(self) -> None:
        """Close the connection; the durable consumer stays, and what was not acknowledged comes again."""
        client, self._client = self._client, None
        if client is not None:
            await shut(client)


async def _quiet(error: Exception) -> None:
    """What matters of it is raised where it is asked for."""
    del error


async def _silent() -> None:
    """Likewise."""


def _message(raw: Msg) -> Message:
    given = {name: from_line(value) for name, value in (raw.headers or {}).items()}
    fields = {name.removeprefix(PREFIX): value for name, value in given.items() if name.startswith(PREFIX)}
    headers = {
        name: value
        for name, value in given.items()
        if not name.startswith(PREFIX) and not name.lower().startswith("nats-")
    }
    meta = raw.metadata
    identity = given.get(ID) or given.get("Nats-Msg-Id") or f"{meta.stream}:{meta.sequence.stream}"
    try:
        return message_of(
            raw.data,
            identity=identity,
            topic=fields.get("topic") or raw.subject,
            fields=fields,
            headers=headers,
            delivery=meta.num_delivered or 1,
        )
    except (InvalidKey, ConfigurationError) as error:
        return malformed(raw.data, topic=meta.stream, problem=error, entry=str(meta.sequence.stream))
