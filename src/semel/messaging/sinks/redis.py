"""Redis and Valkey Streams: exact. One script writes the rows and the number of the batch, or neither.

`redis://host:6379/0?stream=orders`; `{topic}` and `{tenant}` in the stream's name are filled in. The frontier is a small
hash in the stream's slot: in a Cluster each stream has its own. It must not be evicted, so an eviction policy that may take
keys without expiry is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Final, Self
from urllib.parse import urlencode, urlunsplit

import msgspec

from semel.errors import ConfigurationError
from semel.hosts import split
from semel.messaging.sink import Fenced, Guarantee, Row, SinkUnavailable
from semel.messaging.sinks.address import Address
from semel.messaging.sinks.closing import Closing
from semel.messaging.sinks.options import REDIS_OPTIONS

try:
    from redis import asyncio as aioredis
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import (
        NoPermissionError,
        NoScriptError,
        RedisClusterException,
        RedisError,
        ResponseError,
    )
    from redis.exceptions import TimeoutError as RedisTimeoutError

    from semel.messaging.sinks.redis_servers import client_of, name_of, refused
except ModuleNotFoundError as missing:  # pragma: no cover - needs an environment without it
    raise ConfigurationError('Redis sinks need redis-py: pip install "semel[redis]" brings it') from missing

__all__ = ["RedisStreamSink"]

_SCRIPT: Final = files("semel.messaging.sinks").joinpath("lua/publish.lua").read_text()
_SHA: Final = hashlib.sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()
# Batches on their way at a time: a server runs one script after the other, and each one more would be a connection more; with fewer a
# distant server would idle between them. In a Cluster one that waits for a node must not keep the others from theirs.
_AT_ONCE: Final = 16
_AT_ONCE_IN_A_CLUSTER: Final = 256
_AT_ONCE_SHARED: Final = 4  # over a client that the application has as well, whose connections it needs
_PLACE: Final = re.compile(r"\{topic\}|\{tenant\}")
_OWN: Final = frozenset({"stream", "maxlen", "timeout"})
_EVICTS: Final = "allkeys-"
_encode: Final = msgspec.msgpack.Encoder().encode


class RedisStreamSink(Closing):
    """Appends to a stream. `where` is a URL or a redis.asyncio client (Redis or RedisCluster), which is never closed here."""

    guarantee: Guarantee = "exact"

    def __init__(
        self, where: Any, stream: str = "{topic}", *, timeout: float = 5.0, maxlen: int | None = None
    ) -> None:
        self.stream = stream
        self.splits = tuple(name for name in ("topic", "tenant") if f"{{{name}}}" in stream)
        self._where = where
        self._timeout = timeout
        self._maxlen = b"" if maxlen is None else str(maxlen).encode()
        self._source = "semel"
        self._client: Any = None
        self._owned = isinstance(where, str)
        if not self._owned:
            _refuse_retries(where)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._checking = asyncio.Lock()
        self._answered = -self._timeout  # when a batch last got through
        self._checked = False
        self._frontiers: dict[tuple[int, str], str] = {}

    @classmethod
    def from_url(cls, url: str) -> Self:
        """From `redis://…?stream=NAME&maxlen=N`; redis+cluster://host:port,host:port/?… for a cluster."""
        address = Address.of(url, port=6379, options=_OWN | REDIS_OPTIONS)
        others = {name: value for name, value in address.options.items() if name not in _OWN}
        rest = urlunsplit(split(url)._replace(query=urlencode(others)))
        maxlen = int(address.number("maxlen", 0)) or None
        return cls(
            rest, address.text("stream", "{topic}"), timeout=address.number("timeout", 5.0), maxlen=maxlen
        )

    def bind(self, source: str) -> None:
        """Who publishes: two outboxes that write to one stream have frontiers of their own."""
        self._source = source
        self._frontiers.clear()

    def lane(self, row: Row) -> str:
        """One frontier per stream, beside it."""
        return self._stream(row)

    def _stream(self, row: Row) -> str:
        if "{" not in self.stream:
            return self.stream
        names = {"{topic}": row.topic, "{tenant}": row.tenant}
        return _PLACE.sub(
            lambda found: names[found[0]], self.stream
        )  # once: a topic may be called "{tenant}"

    def _frontier(self, part: int, stream: str) -> str:
        known = self._frontiers.get((part, stream))
        if known is None:
            tag = stream if "{" in stream and "}" in stream.partition("{")[2] else f"{{{stream}}}"
            known = self._frontiers[part, stream] = f"{tag}:semel:frontier:{self._source}:{part}"
        return known

    async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
        """Append the rows under their number; the number that was there."""
        stream = self._stream(rows[0])
        keys = (stream.encode(), self._frontier(part, stream).encode())
        told = _encode([_fields(row) for row in rows])
        arguments = [b"%d" % epoch, b"%d" % batch, self._maxlen, told, *[row.body for row in rows]]
        try:
            found, last_epoch = await self._evaluate(keys, arguments)
        except (
            NoPermissionError,
            RedisConnectionError,
            RedisTimeoutError,
            RedisClusterException,
            OSError,
            TimeoutError,
        ) as error:
            if (remedy := refused(error)) is not None:
                raise ConfigurationError(f"Redis at {self._name()} {remedy}") from error
            raise SinkUnavailable(f"Redis at {self._name()} did not answer: {error}") from error
        except ResponseError as error:
            raise SinkUnavailable(
                f"Redis at {self._name()} refused the batch: {error}",
                endpoint=f"stream {stream}" if "WRONGTYPE" in str(error) else None,  # others may be well
            ) from error
        except RedisError as error:
            raise SinkUnavailable(f"Redis at {self._name()} failed: {error!r}") from error
        if found == -1:
            raise Fenced(
                f"part {part} of stream {stream!r} has epoch {last_epoch}, this relay {epoch}",
                epoch=int(last_epoch),
            )
        return int(found)

    async def _evaluate(self, keys: Sequence[bytes], arguments: Sequence[bytes]) -> Any:
        client = self._opened()
        turns = self._turns
        await self._turn(turns)
        try:
            async with asyncio.timeout(self._timeout):
                await self._check_once(client)
                try:
                    found = await client.evalsha(_SHA, len(keys), *keys, *arguments)
                except NoScriptError:
                    found = await client.eval(_SCRIPT, len(keys), *keys, *arguments)
            self._answered = time.monotonic()
            return found
        finally:
            turns.release()

    async def _turn(self, turns: asyncio.Semaphore) -> None:
        """Wait for as long as others get through: only a server that answers nobody for a timeout is away."""
        while True:
            try:
                async with asyncio.timeout(self._timeout):
                    await turns.acquire()
                    return
            except TimeoutError:
                if time.monotonic() - self._answered >= self._timeout:
                    raise

    # -------------------------------------------------------------------------------------- connection
    def _opened(self) -> Any:
        """The client, of this event loop."""
        loop = asyncio.get_running_loop()
        if self._client is None or (self._owned and self._loop is not loop):
            self._client = self._open() if self._owned else self._where
        if self._loop is not loop:
            self._turns = asyncio.Semaphore(_most(self._client, owned=self._owned))
            self._loop, self._checking = loop, asyncio.Lock()
        return self._client

    async def _check_once(self, client: Any) -> None:
        if not self._checked:
            async with self._checking:
                if not self._checked:
                    await self._check(client)
                    self._checked = True

    def _open(self) -> Any:
        """Without retries of its own: a batch is sent again by the relay, under its number."""
        return client_of(
            str(self._where),
            timeout=self._timeout,
            connect_timeout=min(self._timeout, 5.0),
            in_a_cluster=_AT_ONCE_IN_A_CLUSTER,
        )

    async def _check(self, client: Any) -> None:
        """A frontier that is evicted would let a batch in twice."""
        try:
            found = await client.config_get("maxmemory-policy")
            limit = await client.config_get("maxmemory")
        except ResponseError:
            return  # a managed server that does not tell
        policy = _text(found.get("maxmemory-policy", found.get(b"maxmemory-policy", "")))
        bound = _text(limit.get("maxmemory", limit.get(b"maxmemory", "0")))
        if policy.startswith(_EVICTS) and bound != "0":
            raise ConfigurationError(
                f"Redis at {self._name()} may evict any key (maxmemory-policy {policy}): it could drop messages and what "
                "tells them apart. Set `CONFIG SET maxmemory-policy noeviction` and `CONFIG REWRITE`"
            )

    def _name(self) -> str:
        return name_of(str(self._where)) if self._owned else "the client's address"

    async def aclose(self) -> None:
        """Close the connection that was opened here."""
        client, self._client = self._client, None
        if client is not None and self._owned:
            await client.aclose()


def _most(client: Any, *, owned: bool) -> int:
    """How many batches may be on their way at a time: of connections that are shared, no more than half."""
    if isinstance(client, aioredis.RedisCluster):
        most, room = _AT_ONCE_IN_A_CLUSTER, client.connection_kwargs.get("max_connections")  # to each node
    else:
        most = _AT_ONCE if owned else _AT_ONCE_SHARED
        room = getattr(getattr(client, "connection_pool", None), "max_connections", None)
    if room is None:
        return most
    return max(1, min(most, int(room) if owned else int(room) // 2))


def _refuse_retries(client: Any) -> None:
    """A batch that the client sends again by itself would be found at the sink, and taken for somebody else's."""
    pool = getattr(client, "connection_pool", None)
    retry = pool.connection_kwargs.get("retry") if pool is not None else getattr(client, "retry", None)
    if retry is not None and retry.get_retries() > 0:
        raise ConfigurationError(
            "this Redis client repeats commands by itself (redis-py's default): give the sink a URL, or a client made with "
            "retry=Retry(NoBackoff(), 0)"
        )


def _fields(row: Row) -> list[str]:
    headers = msgspec.json.encode(row.headers).decode() if row.headers else "{}"
    found = [row.id, row.topic, row.key or "", headers]
    if row.type is None and row.schema is None and row.tenant == "default" and not row.raw:
        return found
    for name, value in (  # what only some messages have
        ("type", row.type),
        ("schema", row.schema),
        ("tenant", row.tenant if row.tenant != "default" else None),
        ("content", "raw" if row.raw else None),
    ):
        if value is not None:
            found += (name, value)
    return found


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
