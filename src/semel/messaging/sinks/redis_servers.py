"""The client of redis-py behind the URL of a sink or a source: of one server, or of a Cluster, of which several nodes may be named.

    redis://host:6379/0        rediss+cluster://user:password@one:7000,two:7000

Without retries of its own: what was not answered is sent again by whoever asked, who knows how to tell.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlunsplit

from redis import asyncio as aioredis
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisClusterException, RedisError

from semel.hosts import host_port, nodes_of, split

__all__ = ["FAILURES", "client_of", "name_of", "refused"]

# What a client raises. That of a Cluster none of whose nodes answers is no RedisError.
FAILURES: Final = (RedisError, RedisClusterException, OSError, TimeoutError)
_PORT: Final = 6379


def client_of(url: str, *, timeout: float, connect_timeout: float, in_a_cluster: int | None = None) -> Any:
    """A client that is not connected yet. `in_a_cluster` is how many connections to each of its nodes there may be."""
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": connect_timeout,
        "retry": Retry(NoBackoff(), 0),
    }
    if "+" not in url.partition("://")[0]:
        return aioredis.Redis.from_url(url, **options)
    parts = split(url)
    login, at, hosts = parts.netloc.rpartition("@")
    # One of them by the URL, with the login; the others as nodes, which are given the same.
    first, *others = nodes_of(hosts, _PORT)
    if in_a_cluster is not None:
        options["max_connections"] = in_a_cluster
    plain = parts._replace(scheme=parts.scheme.partition("+")[0], netloc=f"{login}{at}{host_port(*first)}")
    nodes = [ClusterNode(host, port) for host, port in others]
    return aioredis.RedisCluster.from_url(urlunsplit(plain), startup_nodes=nodes, **options)


def name_of(url: str) -> str:
    """The servers for people; never with a password."""
    hosts = split(url).netloc.rpartition("@")[2]
    return ", ".join(host_port(host, port) for host, port in nodes_of(hosts, _PORT))


def refused(error: BaseException) -> str | None:
    """What the server has against us, and the remedy, if to wait for it would not help; of a Cluster's client it is somewhere below."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, AuthenticationError | NoPermissionError):
            return f"refuses this user or password: {below}; give the right ones in the URL"
        if "cluster support disabled" in str(below):
            return f"is no cluster: {below}; write redis:// or rediss:// in the URL"
        below = below.__cause__ or below.__context__
    return None
