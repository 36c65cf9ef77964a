"""Redis Streams, read by a consumer group: what a dead consumer had is claimed by the living."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self
from urllib.parse import urlencode, urlunsplit

import msgspec

from semel.errors import ConfigurationError, InvalidKey, StoreUnavailable
from semel.hosts import split
from semel.messaging.message import Message
from semel.messaging.sinks.address import Address
from semel.messaging.sinks.closing import Closing
from semel.messaging.sinks.options import REDIS_OPTIONS
from semel.messaging.sources import malformed, message_of

try:
    from redis.exceptions import ResponseError

    from semel.messaging.sinks.redis_servers import FAILURES, client_of, name_of, refused
except ModuleNotFoundError as missing:  # pragma: no cover - needs an environment without it
    raise ConfigurationError('Redis sources need redis-py: pip install "semel[redis]" brings it') from missing

__all__ = ["RedisStreamSource"]

_MOST: Final = 20_000  # twice the highest concurrency
_OWN: Final = frozenset({"stream", "group", "start", "idle", "block", "timeout"})


class _Entry:
    """One entry of the stream, pending for this consumer until it is acknowledged."""

    __slots__ = ("_id", "_source", "message")

    def __init__(self, source: RedisStreamSource, entry: bytes, message: Message) -> None:
        self._source = source
        self._id = entry
        self.message = message

    async def ack(self) -> None:
        await self._source._call("XACK", self._source.stream, self._source.group, self._id)  # noqa: SLF001 - ours

    async def nack(self) -> None:
        """Stays pending; whoever claims idle entries next gets it. Made idle now, so that it is not waited for."""
        await self._source._claim(self._id, idle=self._source.idle_ms)  # noqa: SLF001 - ours

    async def extend(self) -> None:
        await self._source._claim(self._id, idle=0)  # noqa: SLF001 - ours


class RedisStreamSource(Closing):
    """`redis://host:6379/0?stream=orders`, read as a group from its beginning (`start=$`: from now on).

    An entry that nobody acknowledged for `idle` seconds is claimed from its consumer: it is dead, or stuck.
    """

    def __init__(
        self,
        url: str,
        stream: str,
        *,
        group: str,
        start: str = "0",
        idle: float = 30.0,
        block: float = 1.0,
        timeout: float = 5.0,
    ) -> None:
        self.stream = stream
        self.group = group
        self.idle_ms = int(idle * 1000)
        self.extends_every = idle / 3
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._url = url
        self._start = start
        self._block = int(block * 1000)
        self._timeout = timeout
        self._client: Any = None
        self._made = False
        self._cursor = b"0-0"
        self._looked = float("-inf")

    @classmethod
    def from_url(cls, url: str, *, group: str) -> Self:
        """From `redis://…?stream=NAME&group=NAME&start=0&idle=30`."""
        address = Address.of(url, port=6379, options=_OWN | REDIS_OPTIONS)
        stream = address.text("stream", "")
        if not stream:
            raise ConfigurationError("a Redis source needs ?stream=NAME")
        others = {name: value for name, value in address.options.items() if name not in _OWN}
        return cls(
            urlunsplit(split(url)._replace(query=urlencode(others))),
            stream,
            group=address.text("group", group),
            start=address.text("start", "0"),
            idle=address.number("idle", 30.0),
            block=address.number("block", 1.0),
            timeout=address.number("timeout", 5.0),
        )

    async def receive(self, limit: int) -> Sequence[_Entry]:
        """Entries that others left behind first, then new ones."""
        try:
            await self._connected()
            loop = asyncio.get_running_loop()
            if loop.time() - self._looked > self.extends_every:
                claimed = await self._reclaim(limit)
                if claimed:
                    return claimed
                self._looked = loop.time()
            return await self._read(limit)
        except ResponseError as error:
            if "NOGROUP" in str(error):
                # The stream was deleted or lost. From its beginning, whatever `start` is: what came before we look again would
                # be left out, and what was handled before is found out as a duplicate.
                self._made, self._start = False, "0"
                return []
            raise StoreUnavailable(f"Redis refused to read stream {self.stream!r}: {error}") from error
        except FAILURES as error:
            raise StoreUnavailable(f"Redis did not answer for stream {self.stream!r}: {error}") from error

    async def _reclaim(self, limit: int) -> list[_Entry]:
        answer = await self._client.execute_command(
            "XAUTOCLAIM", self.stream, self.group, self.name, self.idle_ms, self._cursor, "COUNT", limit
        )
        self._cursor = answer[0]
        return await self._entries(answer[1], again=True)

    async def _read(self, limit: int) -> list[_Entry]:
        answer = await self._client.xreadgroup(
            self.group, self.name, {self.stream: ">"}, count=limit, block=self._block
        )
        found = answer.values() if isinstance(answer, dict) else [entries for _, entries in answer or ()]
        entries: list[_Entry] = []
        for some in found:
            flat = some[0] if some and isinstance(some[0], list) else some
            entries += await self._entries(flat, again=False)
        return entries

    async def _entries(self, raw: Any, *, again: bool) -> list[_Entry]:
        found = []
        for entry, fields in raw or ():
            if not fields:
                continue  # deleted since
            pairs = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
            delivery = await self._deliveries(entry) if again else 1
            try:
                message = _message(pairs, delivery, entry, self.stream)
            except (InvalidKey, ConfigurationError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                message = malformed(
                    pairs.get(b"data", b""), topic=self.stream, problem=error, entry=_text(entry)
                )
            found.append(_Entry(self, entry, message))
        return found

    async def _deliveries(self, entry: bytes) -> int:
        pending = await self._client.xpending_range(self.stream, self.group, entry, entry, 1)
        return int(pending[0]["times_delivered"]) if pending else 1

    async def _claim(self, entry: bytes, *, idle: int) -> None:
        try:
            await self._client.xclaim(self.stream, self.group, self.name, 0, [entry], idle=idle, justid=True)
        except FAILURES as error:
            raise StoreUnavailable(f"Redis did not answer XCLAIM: {error}") from error

    async def _call(self, *command: Any) -> Any:
        try:
            return await self._client.execute_command(*command)
        except FAILURES as error:
            raise StoreUnavailable(f"Redis did not answer {command[0]}: {error}") from error

    async def _connected(self) -> None:
        if self._client is None:
            self._loop = asyncio.get_running_loop()
            self._client = client_of(
                self._url, timeout=self._timeout + self._block / 1000, connect_timeout=self._timeout
            )
        if not self._made:
            try:
                await self._client.xgroup_create(self.stream, self.group, id=self._start, mkstream=True)
            except FAILURES as error:
                if (remedy := refused(error)) is not None:  # one that let us in before is waited for
                    raise ConfigurationError(f"Redis at {name_of(self._url)} {remedy}") from error
                if "BUSYGROUP" not in str(error):
                    raise
            self._made = True

    async def aclose(self) -> None:
        """Give back what is still pending here, leave the group if nothing is, and close the connection."""
        client, self._client = self._client, None
        if client is None:
            return
        try:
            pending = await client.xpending_range(self.stream, self.group, "-", "+", _MOST, self.name)
            if pending:  # read, and not begun: nobody is to wait until it has been idle
                ids = [each["message_id"] for each in pending]
                await client.xclaim(
                    self.stream, self.group, self.name, 0, ids, idle=self.idle_ms, justid=True
                )
            else:
                await client.execute_command("XGROUP", "DELCONSUMER", self.stream, self.group, self.name)
        except FAILURES:
            pass  # the group forgets nothing: what was pending is claimed by others
        finally:
            await client.aclose()


def _message(pairs: Mapping[Any, Any], delivery: int, entry: bytes, stream: str) -> Message:
    fields = {_text(name): value for name, value in pairs.items()}
    data = bytes(fields.pop("data", b""))
    said = {name: _text(value) for name, value in fields.items()}
    headers = msgspec.json.decode(said.pop("headers", "{}") or "{}", type=dict[str, str])
    return message_of(
        data,
        identity=said.pop("id", "") or _text(entry),
        topic=said.pop("topic", "") or stream,
        fields=said,
        headers=headers,
        delivery=delivery,
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
