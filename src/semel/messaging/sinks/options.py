"""Options in the URLs of Redis, of databases and of webhooks, which are only partly ours: those that nobody knows are refused, since
a mistyped one would be dropped, sent along, or met again at run time."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection
from difflib import SequenceMatcher, get_close_matches
from typing import Final

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from semel.errors import ConfigurationError

__all__ = ["REDIS_OPTIONS", "check_database_options", "refuse_near_miss"]

# Those of redis-py that a URL can say and that leave a sink as exact as it is: no retries of its own, no decoding.
REDIS_OPTIONS: Final = frozenset(
    {
        "db", "username", "password", "client_name", "protocol", "max_connections", "health_check_interval",
        "socket_timeout", "socket_connect_timeout", "socket_keepalive", "ssl_keyfile", "ssl_certfile", "ssl_cert_reqs", "ssl_ca_certs",
        "ssl_ca_path", "ssl_ca_data", "ssl_check_hostname", "ssl_ciphers",
    }
)  # fmt: skip
# What SQLAlchemy takes off the URL by itself, beside the driver's own.
_SQLITE: Final = frozenset(
    {
        "uri", "mode", "cache", "vfs", "nolock", "immutable", "psow", "modeof",
        "timeout", "detect_types", "isolation_level", "check_same_thread", "cached_statements",
    }
)  # fmt: skip
_MYSQL: Final = frozenset({"ssl_capath", "ssl_cipher", "ssl_check_hostname"})
_NEAR: Final = 0.85


def check_database_options(text: str, own: Collection[str]) -> None:
    """ConfigurationError for an option that neither we (`own`) nor the URL's driver know. A driver that does not say what it knows is
    left to refuse by itself."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        return  # several hosts of a Redis; or no URL at all, and whoever opens it says so
    known = _driver_options(url.drivername)
    unknown = sorted(url.query.keys() - known) if known else []
    if unknown:
        near = get_close_matches(unknown[0], [*own, *known], n=1)
        raise ConfigurationError(
            f"an outbox+{url.drivername}:// sink has no option {unknown[0]!r}, nor has its driver"
            + (f"; did you mean {near[0]!r}?" if near else f": its own are {', '.join(sorted(own))}")
        )
    for name in url.query:
        for ours in own:
            refuse_near_miss(name, ours, "the database's driver would get it")


def refuse_near_miss(given: str, ours: str, otherwise: str) -> None:
    """ConfigurationError for a name that is nearly one of ours."""
    plain = given.lower().replace("-", "_")
    if given != ours and (plain == ours or SequenceMatcher(None, plain, ours).ratio() >= _NEAR):
        raise ConfigurationError(
            f"{given!r} in a sink's URL is nearly {ours!r}: write that ({otherwise}). If it is meant, make the sink in code and give it "
            "to the route in place of the URL"
        )


def _driver_options(name: str) -> frozenset[str]:
    """As the outbox opens it, on a sync driver. One that is not installed is told when it is opened."""
    backend, _, driver = name.partition("+")
    if backend == "sqlite" and driver in {"", "pysqlite", "aiosqlite"}:
        return _SQLITE
    with contextlib.suppress(ModuleNotFoundError):
        if backend in {"mysql", "mariadb"} and driver in {"", "pymysql", "asyncmy", "aiomysql"}:
            from pymysql.connections import Connection

            return _MYSQL | inspect.signature(Connection.__init__).parameters.keys() - {"self"}
        if backend in {"postgresql", "postgres"} and driver in {"", "psycopg", "asyncpg"}:
            from psycopg import pq

            return frozenset(each.keyword.decode() for each in pq.Conninfo.get_defaults())
    return frozenset()
