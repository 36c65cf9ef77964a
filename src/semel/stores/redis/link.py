"""The Redis transport: how calls get to Redis and their replies back, fast and in spite of trouble.

It knows nothing of semel's records. Start reading here, then: `redis_calls` (the surface), `redis_address` (URLs and
clients), `redis_courier` (what is tried again, and when not), `redis_topology` (which server), then one colour:
`redis_loops` with `redis_wire`, or `redis_threads`.
"""

from __future__ import annotations

from typing import Any

from semel.errors import ConfigurationError
from semel.stores.redis.calls import Arg, Call, Lane, Link, Script, Unwatch

try:
    from semel.stores.redis.address import Colour, read_target
    from semel.stores.redis.errors import ServerError
    from semel.stores.redis.loops import LoopLink
    from semel.stores.redis.threads import ThreadLink
except ModuleNotFoundError as missing:
    if missing.name not in {"redis", "hiredis"}:
        raise
    raise ConfigurationError(
        f"Redis needs the package {missing.name!r}: pip install 'semel[redis]'"
    ) from missing

__all__ = ["Arg", "Call", "Lane", "Link", "Script", "ServerError", "Unwatch", "open_link"]


def open_link(
    source: Any,
    *,
    colour: Colour,
    timeout: float = 2.0,
    connect_timeout: float | None = None,
    max_pending: int = 10_000,
    max_queued_bytes: int = 64 << 20,
    max_connections: int = 64,
    ping_every: float = 5.0,
) -> Link:
    """A link to the servers that `source` means: a URL, or a redis-py client or pool, which is only read.

    `timeout` bounds every call as a whole, tries and re-tries included; `connect_timeout` (half of it) one dialling.
    Async: at most `max_pending` unanswered calls and `max_queued_bytes` unwritten bytes per connection. Sync: at
    most `max_connections` connections per node. A caller beyond these waits within its timeout. A subscriber
    connection that is silent for `ping_every` seconds is asked whether it still lives.
    Nothing connects before the first call. Raises `ConfigurationError` for a URL or client that cannot work.
    """
    if not timeout > 0 or (connect_timeout is not None and not connect_timeout > 0):
        raise ConfigurationError(f"timeouts are seconds above 0, not timeout={timeout!r}, {connect_timeout=}")
    target = read_target(source, colour)
    dialling = connect_timeout or float(target.settings.get("socket_connect_timeout") or timeout / 2)
    if colour == "sync":
        return ThreadLink(
            target,
            timeout=timeout,
            connect_timeout=dialling,
            max_connections=max_connections,
            ping_every=ping_every,
        )
    return LoopLink(
        target,
        timeout=timeout,
        connect_timeout=dialling,
        cap=max_pending,
        max_queued_bytes=max_queued_bytes,
        ping_every=ping_every,
    )
