"""Where the Redis servers are and how to log in: read from a URL, or copied from a redis-py client or pool.

A client that is handed in is only read: our connections are our own, and the client is never used nor closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, urlencode

import redis
import redis.asyncio
import redis.asyncio.connection
import redis.asyncio.retry
import redis.connection
import redis.retry
from redis.backoff import NoBackoff

from semel.errors import ConfigurationError
from semel.hosts import ESCAPES, host_port, nodes_of, server_of, split

__all__ = ["Colour", "Endpoint", "Target", "connection", "read_target"]

Colour: TypeAlias = Literal["sync", "async"]
Kind: TypeAlias = Literal["standalone", "sentinel", "cluster"]

# What a redis-py connection may be told by its owner. Retries, protocol, decoding, parser and timeouts are
# decided by the link, because its correctness rests on them.
_KEPT: Final = frozenset(
    {"db", "username", "password", "credential_provider", "client_name", "driver_info", "encoding"}
    | {
        "encoding_errors",
        "socket_keepalive",
        "socket_keepalive_options",
        "socket_type",
        "socket_connect_timeout",
    }
)
_SCHEMES: Final = "redis://, rediss://, unix://, redis+sentinel://, redis+cluster:// (rediss+… for TLS)"

_EXAMPLES: Final = {
    "redis": "redis://localhost:6379/0",
    "rediss": "rediss://localhost:6379/0",
    "unix": "unix:///run/redis.sock?db=0",
    "sentinel": "redis+sentinel://host:26379/service/0",
    "cluster": "redis+cluster://host:6379,host:6380",
}


class Endpoint(NamedTuple):
    """One server's address: host and port, or the path of a Unix socket."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        return self.path or host_port(self.host, self.port)


@dataclass(frozen=True, slots=True)
class Target:
    """A standalone server, a Sentinel-guarded service, or a cluster, with the settings of its connections."""

    kind: Kind
    seeds: tuple[Endpoint, ...]
    settings: Mapping[str, Any] = field(repr=False)  # holds the password
    tls: bool = False
    service: str = ""
    sentinel_settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    sentinel_tls: bool = False
    custom: type[Any] | None = None  # a caller's own connection class
    remap: Callable[[tuple[str, int]], tuple[str, int]] | None = None


def read_target(source: Any, colour: Colour) -> Target:
    """The servers that `source` means; `ConfigurationError` says what is wrong with it."""
    target = _from_url(source) if isinstance(source, str) else _from_client(source, colour)
    if target.kind == "cluster" and int(target.settings.get("db", 0)):
        raise ConfigurationError("Redis Cluster has only database 0: remove the database from the URL")
    _probe_settings(target, colour)
    return target


def _probe_settings(target: Target, colour: Colour) -> None:
    try:  # builds the objects without connecting, so that a wrong option is told at construction
        connection(target, target.seeds[0], colour, connect_timeout=1.0)
        if target.kind == "sentinel":
            connection(target, target.seeds[0], colour, connect_timeout=1.0, sentinel=True)
    except (TypeError, ValueError, redis.RedisError) as error:
        raise ConfigurationError(f"the Redis connection options do not fit: {error}") from error


def connection(
    target: Target, endpoint: Endpoint, colour: Colour, *, connect_timeout: float, sentinel: bool = False
) -> Any:
    """A redis-py connection of the right class, not connected yet, that never retries by itself."""
    tls = target.sentinel_tls if sentinel else target.tls
    settings = dict(target.sentinel_settings if sentinel else target.settings)
    settings |= {
        "socket_timeout": connect_timeout,  # rules the handshake only; afterwards the link keeps the time
        "socket_connect_timeout": connect_timeout,
        "retry": _no_retry(colour),
        "protocol": 2,  # one reply shape on every server version, and no HELLO round trip
        "health_check_interval": 0,
        "decode_responses": False,
    }
    settings.setdefault(
        "driver_info", None
    )  # no CLIENT SETINFO: it is one more command that an ACL may refuse
    package: Any = redis.asyncio.connection if colour == "async" else redis.connection
    if endpoint.path:
        for unfit in ("socket_keepalive", "socket_keepalive_options", "socket_type"):
            settings.pop(unfit, None)
        return package.UnixDomainSocketConnection(path=endpoint.path, **settings)
    kind = package.SSLConnection if tls else package.Connection
    if target.custom is not None and not sentinel:
        kind = target.custom
    return kind(host=endpoint.host, port=endpoint.port, **settings)


def _no_retry(colour: Colour) -> Any:
    if colour == "async":
        return redis.asyncio.retry.Retry(NoBackoff(), 0)
    return redis.retry.Retry(NoBackoff(), 0)


# ------------------------------------------------------------------------------------------------ URLs
def _from_url(url: str) -> Target:
    scheme, _, rest = url.partition(":")
    base, _, family = scheme.partition("+")
    if base not in {"redis", "rediss", "unix"} or family not in {"", "sentinel", "cluster"}:
        raise ConfigurationError(f"this is no Redis URL (scheme {scheme!r}): use one of {_SCHEMES}")
    if not rest.startswith("//"):  # what there is instead may have a password in it
        raise ConfigurationError(
            f"the Redis URL has no :// behind its scheme: write it as {_EXAMPLES[family or base]}"
        )
    if rest == "//":
        raise ConfigurationError(f"the Redis URL names no server: {_EXAMPLES[family or base]}")
    if base == "unix":
        return _plain(url, tls=False)
    if not family:
        return _plain(url, tls=base == "rediss")
    return _family(base, family, url)


def _plain(url: str, *, tls: bool) -> Target:
    settings = _parse(url)
    path = settings.pop("path", "")
    host, port = settings.pop("host", "localhost"), settings.pop("port", 6379)
    endpoint = Endpoint("", 0, path) if url.startswith("unix") else Endpoint(host, port)
    if url.startswith("unix") and not path:
        raise ConfigurationError("a unix:// URL needs the socket's path: unix:///run/redis.sock?db=0")
    return Target("standalone", (endpoint,), settings, tls=tls)


def _family(base: str, family: str, url: str) -> Target:
    parts = split(url)
    login, _, hosts = parts.netloc.rpartition("@")
    nodes = nodes_of(hosts, 26379 if family == "sentinel" else 6379)
    seeds = tuple(Endpoint(host, port) for host, port in nodes)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    sentinel = {name[9:]: query.pop(name) for name in list(query) if name.startswith("sentinel_")}
    path = [piece for piece in parts.path.split("/") if piece]
    service = ""
    if family == "sentinel":
        if not path:
            raise ConfigurationError(
                "a Sentinel URL names its service: redis+sentinel://host:26379/service/0"
            )
        service = path.pop(0)
    prefix = f"{login}@" if login else ""
    settings = _parse(f"{base}://{prefix}localhost/{'/'.join(path)}?{urlencode(query)}")
    settings = {name: value for name, value in settings.items() if name not in {"host", "port"}}
    kind: Kind = "sentinel" if family == "sentinel" else "cluster"
    tls = base == "rediss"
    shared = {name: value for name, value in settings.items() if name.startswith("ssl_")}
    guarded = shared | _of_sentinels(base, sentinel)
    return Target(
        kind, seeds, settings, tls=tls, service=service, sentinel_settings=guarded, sentinel_tls=tls
    )


def _of_sentinels(base: str, options: Mapping[str, str]) -> dict[str, Any]:
    """What the URL says of the Sentinels themselves (`sentinel_…`), read as the options of a server are."""
    if "db" in options:
        raise ConfigurationError(
            "a Sentinel has no databases: remove sentinel_db from the Redis URL (the one of the servers stands behind the "
            f"service: {_EXAMPLES['sentinel']})"
        )
    for name in options:
        if not _is_option(name):
            raise ConfigurationError(
                f"the Redis connection options do not fit: remove 'sentinel_{name}' from the URL, which is unknown"
            )
    read = _parse(f"{base}://localhost/?{urlencode(options)}")
    # Text stays as it is: some versions of redis-py take its escapes away once more.
    return {
        name: text if isinstance(read[name], str) else read[name]
        for name, text in options.items()
        if name in read
    }


def _is_option(name: str) -> bool:
    return name in _KEPT or name.startswith("ssl_")


def _parse(url: str) -> dict[str, Any]:
    parts = split(url)
    server_of(parts, 6379)  # its errors show no piece of a password, redis-py's do
    database = parts.path.strip("/")
    if parts.scheme != "unix" and "@" in database:
        raise ConfigurationError(f"a {parts.scheme}:// URL has its @ behind a slash: {ESCAPES}")
    if database and parts.scheme != "unix" and not database.isdecimal():
        raise ConfigurationError(
            f"the database in the Redis URL is {database!r}: it must be a number, as in …/0"
        )
    try:
        found = dict(redis.connection.parse_url(url))  # type: ignore[no-untyped-call]  # redis-py has no types there
    except ValueError as error:
        raise ConfigurationError(f"the Redis URL cannot be read: {error}") from error
    found.pop("connection_class", None)
    for name in found:
        if not _is_option(name) and name not in {"host", "port", "path"}:
            raise ConfigurationError(
                f"unknown option {name!r} in the Redis URL: remove it (timeouts are arguments)"
            )
    return found


# ---------------------------------------------------------------------------------------------- clients
def _from_client(source: Any, colour: Colour) -> Target:
    if isinstance(source, (redis.RedisCluster, redis.asyncio.RedisCluster)):
        _same_colour(source, isinstance(source, redis.asyncio.RedisCluster), colour)
        return _from_cluster(source)
    pool = getattr(source, "connection_pool", source)
    if not isinstance(pool, (redis.ConnectionPool, redis.asyncio.ConnectionPool)):
        raise ConfigurationError(
            f"{type(source).__name__} is no Redis URL, redis-py client or connection pool: pass one of {_SCHEMES}"
        )
    _same_colour(source, isinstance(pool, redis.asyncio.ConnectionPool), colour)
    return _from_pool(pool)


def _same_colour(source: Any, is_async: bool, colour: Colour) -> None:
    if is_async == (colour == "async"):
        return
    given, wanted = ("an async", "a sync") if is_async else ("a sync", "an async")
    module = "redis" if is_async else "redis.asyncio"
    raise ConfigurationError(
        f"{type(source).__name__} is {given} client under {wanted} face: pass a client of `{module}`, or a URL"
    )


def _kept(settings: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in settings.items() if _is_option(name)}
    kept.pop("socket_connect_timeout", None)
    return kept


def _from_pool(pool: Any) -> Target:
    settings = dict(pool.connection_kwargs)
    kind = pool.connection_class
    tls = issubclass(kind, (redis.SSLConnection, redis.asyncio.SSLConnection))
    manager = getattr(pool, "sentinel_manager", None)
    if manager is not None:
        guards = [guard.connection_pool for guard in manager.sentinels]
        seeds = tuple(Endpoint(p.connection_kwargs["host"], int(p.connection_kwargs["port"])) for p in guards)
        guarded_tls = issubclass(
            guards[0].connection_class, (redis.SSLConnection, redis.asyncio.SSLConnection)
        )
        return Target(
            "sentinel",
            seeds,
            _kept(settings),
            tls=tls,
            service=str(pool.service_name),
            sentinel_settings=_kept(guards[0].connection_kwargs) | {"db": 0},
            sentinel_tls=guarded_tls,
        )
    path = settings.get("path", "")
    endpoint = (
        Endpoint("", 0, path)
        if path
        else Endpoint(settings.get("host", "localhost"), int(settings.get("port", 6379)))
    )
    known = kind.__module__.startswith("redis.")
    return Target("standalone", (endpoint,), _kept(settings), tls=tls, custom=None if known else kind)


def _from_cluster(client: Any) -> Target:
    manager = client.nodes_manager
    seeds = tuple(Endpoint(node.host, int(node.port)) for node in manager.startup_nodes.values())
    settings = dict(manager.connection_kwargs)
    tls = bool(settings.get("ssl"))
    if (kind := settings.get("connection_class")) is not None:
        tls = issubclass(kind, (redis.SSLConnection, redis.asyncio.SSLConnection))
    remap = getattr(manager, "address_remap", None)
    return Target("cluster", seeds, _kept(settings) | {"db": 0}, tls=tls, remap=remap)
