"""Redis and Valkey Streams: exact. One script writes the rows and the number of the batch, or neither.

`redis://host:6379/0?stream=orders`; `{topic}` and `{tenant}` in the stream's name are filled in. The frontier is a small
hash in the stream's slot: in a Cluster each stream has its own. It must not be evicted, so an eviction policy that may take
keys without expiry is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Final, Self
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import msgspec

from semel.errors import ConfigurationError
from semel.messaging.sink import Fenced, Guarantee, Row, SinkUnavailable
from semel.messaging.sinks.closing import Closing

try:
    from redis import asyncio as aioredis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import (
        AuthenticationError,
        NoPermissionError,
        NoScriptError,
        RedisError,
        ResponseError,
    )
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import TimeoutError as RedisTimeoutError
except ModuleNotFoundError as missing:  # pragma: no cover - needs an environment without it
    raise ConfigurationError('Redis sinks need redis-py: pip install "semel[redis]" brings it') from missing

__all__ = ["RedisStreamSink"]

_SCRIPT: Final = files("semel.messaging.sinks").joinpath("lua/publish.lua").read_text()
_SHA: Final = hashlib.sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()
_ROWS: Final = 500  # in one script: about 2.5 ms of Redis; the relay sends no more than its batch
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
        self._checked = False
        self._frontiers: dict[tuple[int, str], str] = {}

    @classmethod
    def from_url(cls, url: str) -> Self:
        """From `redis://…?stream=NAME&maxlen=N`; redis+cluster:// for a cluster."""
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query))
        stream = options.pop("stream", "{topic}")
        maxlen = options.pop("maxlen", None)
        timeout = float(options.pop("timeout", 5.0))
        rest = urlunsplit(parts._replace(query=urlencode(options)))
        return cls(rest, stream, timeout=timeout, maxlen=int(maxlen) if maxlen else None)

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
        return self.stream.replace("{topic}", row.topic).replace("{tenant}", row.tenant)

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
        except (AuthenticationError, NoPermissionError) as error:
            raise ConfigurationError(
                f"Redis at {self._name()} refuses this user or password: {error}; give the right ones in the sink's URL"
            ) from error
        except (RedisConnectionError, RedisTimeoutError, OSError, TimeoutError) as error:
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
        client = await self._connected()
        async with asyncio.timeout(self._timeout):
            try:
                return await client.evalsha(_SHA, len(keys), *keys, *arguments)
            except NoScriptError:
                return await client.eval(_SCRIPT, len(keys), *keys, *arguments)

    # -------------------------------------------------------------------------------------- connection
    async def _connected(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._client is None or (self._owned and self._loop is not loop):
            self._client = self._open() if self._owned else self._where
            self._loop = loop
        if not self._checked:
            await self._check(self._client)
            self._checked = True
        return self._client

    def _open(self) -> Any:
        """Without retries of its own: a batch is sent again by the relay, under its number."""
        options: dict[str, Any] = {
            "socket_timeout": self._timeout,
            "socket_connect_timeout": min(self._timeout, 5.0),
            "retry": Retry(NoBackoff(), 0),
        }
        scheme, _, rest = str(self._where).partition("://")
        if scheme in {"redis+cluster", "rediss+cluster"}:
            url = f"{scheme.partition('+')[0]}://{rest}"
            return aioredis.RedisCluster.from_url(url, **options)
        return aioredis.Redis.from_url(self._where, **options)

    async def _check(self, client: Any) -> None:
        """A frontier that is evicted would let a batch in twice."""
        try:
            async with asyncio.timeout(self._timeout):
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
        if not self._owned:
            return "the client's address"
        parts = urlsplit(str(self._where))
        return f"{parts.hostname or 'localhost'}:{parts.port or 6379}"

    async def aclose(self) -> None:
        """Close the connection that was opened here."""
        client, self._client = self._client, None
        if client is not None and self._owned:
            await client.aclose()


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
