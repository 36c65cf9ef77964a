"""An outbox in Redis or Valkey: messages that are queued on the caller's pipeline and committed by its EXEC.

`keys` names what is stored, `adding` queues messages and looks before the EXEC, `home` is the outbox's place, `ledger` what
relays read and write there; the scripts are in `semel/messaging/lua`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from semel.errors import ConfigurationError

if TYPE_CHECKING:
    from semel.messaging.redis.adding import Adder, Refused

__all__ = ["is_redis", "open_adder"]

_SCHEMES: Final = ("redis", "rediss", "valkey", "valkeys", "unix")


def is_redis(where: object) -> bool:
    """Whether it is a URL of Redis or Valkey, or a client or pool of redis-py."""
    if isinstance(where, str):
        return where.partition("://")[0].partition("+")[0] in _SCHEMES and "://" in where
    return type(where).__module__.partition(".")[0] == "redis"


def open_adder(
    where: Any,
    *,
    prefix: str,
    create: bool,
    parts: int | None,
    retention: float,
    wake: Callable[[], None],
    refused: Refused,
) -> Adder:
    """The outbox there, as what adds to it. Nothing connects before first use."""
    try:
        from semel.messaging.redis.adding import Adder
        from semel.messaging.redis.home import RedisHome
    except ModuleNotFoundError as missing:  # pragma: no cover - needs an environment without it
        raise ConfigurationError(
            'an outbox in Redis needs redis-py: pip install "semel[messaging,redis]" brings it'
        ) from missing
    return Adder(RedisHome(where, prefix=prefix, create=create, parts=parts), retention, wake, refused)
