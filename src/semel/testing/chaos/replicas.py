"""A server and its replica, for cells in which the one dies and the other takes its place."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from semel.testing import services
from semel.testing.chaos.places import near, node_of, with_tables
from semel.testing.services.mariadb import MariaServer
from semel.testing.services.postgres import PostgresStandby
from semel.testing.services.redis import RedisServer, redis_program
from semel.testing.services.topology import QUICK

__all__ = ["Pair", "pair_of", "until"]

_PATIENCE = 20.0


class Pair(Protocol):
    """`url` is the primary's, until `fail_over` gives that of the replica in its place."""

    url: str

    def near(self, other: str, key: str) -> str:
        """A key like `key` whose record fails together with that of `other`."""
        ...

    def cut(self, key: str) -> None:
        """The replica hears nothing any more, not even what is on its way."""
        ...

    def held(self, key: str) -> AbstractContextManager[object]:
        """The replica stands still for the length of a block: what was sent to it meanwhile it has afterwards."""
        ...

    def link(self) -> str:
        """What the primary says of its replica now, for a verdict that nobody expected."""
        ...

    def fail_over(self, key: str) -> str: ...

    def close(self) -> None: ...


def pair_of(store: str, point: str) -> Pair:
    """Fresh servers. Unless its replica lags an SQL primary acknowledges a commit when it has it (Redis: its client asks)."""
    waits = point != "acked.lagging"
    match store:
        case "redis":
            return _Redis()
        case "cluster":
            return _Cluster()
        case "postgres":
            return _Postgres(waits=waits)
    # Then it goes on without: the default is ten seconds.
    return _Maria(waits=waits, patience=0.1 if point == "acked.timed-out" else 86_400.0)


class _Single:
    """All keys lie on one server."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def near(self, other: str, key: str) -> str:
        del other
        return key

    def close(self) -> None:
        self._stack.close()


class _Redis(_Single):
    def __init__(self) -> None:
        super().__init__()
        self.primary, self.replica = (
            self._stack.enter_context(RedisServer(program=redis_program(), config=QUICK).open())
            for _ in range(2)
        )
        self.replica.command("REPLICAOF", self.primary.host, self.primary.port)
        until(lambda: self.replica.info("replication").get("master_link_status") == "up")
        self.url = self.primary.url

    def cut(self, key: str) -> None:
        del key
        # A paused replica's socket would still hold what comes; this one has no socket.
        self.replica.command("REPLICAOF", "127.0.0.1", 1)

    def held(self, key: str) -> AbstractContextManager[object]:
        del key
        return self.replica.paused()

    def link(self) -> str:
        return str(self.primary.info("replication"))

    def fail_over(self, key: str) -> str:
        del key
        self.primary.kill()
        self.replica.command("REPLICAOF", "NO", "ONE")
        return self.replica.url


class _Cluster:
    """One of three masters dies; its replica takes its slots over."""

    def __init__(self) -> None:
        self.cluster = services.redis_cluster()
        self.url = self.cluster.url
        self._deaf: RedisServer | None = None
        self._still: RedisServer | None = None

    def near(self, other: str, key: str) -> str:
        return near(self.cluster, other, key)

    def cut(self, key: str) -> None:
        master: RedisServer = node_of(self.cluster, key)
        self._deaf = self.cluster.replica_of(master)
        self._deaf.pause()  # it must not come back; and what its socket holds is gone with its link
        master.command("CLIENT", "KILL", "TYPE", "replica")

    def held(self, key: str) -> AbstractContextManager[object]:
        self._still = self.cluster.replica_of(node_of(self.cluster, key))
        return self._still.paused()

    def link(self) -> str:
        asleep = (self._deaf, self._still)  # they would not answer
        return str([node.info("replication") for node in self.cluster.nodes if node not in asleep])

    def fail_over(self, key: str) -> str:
        master: RedisServer = node_of(self.cluster, key)
        replica = self._deaf or self.cluster.replica_of(master)
        master.kill()
        replica.resume()
        replica.command("CLUSTER", "FAILOVER", "TAKEOVER")
        until(lambda: replica.info("replication")["role"] == "master")
        self.cluster.wait_healthy()
        return self.url

    def close(self) -> None:
        self.cluster.close()


class _Postgres(_Single):
    def __init__(self, *, waits: bool) -> None:
        super().__init__()
        self.primary = self._stack.enter_context(services.postgres())
        self.url = with_tables("postgres", self.primary)
        self.standby = self._stack.enter_context(PostgresStandby(self.primary).open())
        self.standby.wait_linked()
        if waits:
            self.primary.wait_for_standby()

    def cut(self, key: str) -> None:
        del key
        self.standby.kill()

    @contextlib.contextmanager
    def held(self, key: str) -> Iterator[None]:
        del key
        # It is this process of the standby that tells the primary what it has; the one that was started is its parent.
        receivers = [pid for (pid,) in self.standby.execute("SELECT pid FROM pg_stat_wal_receiver")]
        assert receivers, "the standby receives nothing"
        for pid in receivers:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in receivers:
                os.kill(pid, signal.SIGCONT)

    def link(self) -> str:
        return str(
            self.primary.execute("SELECT state, sync_state, sent_lsn, flush_lsn FROM pg_stat_replication")
        )

    def fail_over(self, key: str) -> str:
        del key
        self.primary.kill()
        self.standby.start()
        self.standby.promote()
        return self.standby.url_of(self.url.rpartition("/")[2])


class _Maria(_Single):
    def __init__(self, *, waits: bool, patience: float) -> None:
        super().__init__()
        common: dict[str, Any] = {
            "log-bin": "binlog",
            "binlog-format": "ROW",
            "rpl-semi-sync-master-timeout": int(patience * 1000),
            # By default a commit can be seen before the replica has it: a settle that is repeated finds it recorded.
            "rpl-semi-sync-master-wait-point": "AFTER_SYNC",
        }
        self.primary, self.replica = (
            self._stack.enter_context(MariaServer(config={**common, "server-id": number}).open())
            for number in (1, 2)
        )
        self.url = with_tables("mariadb", self.primary)
        self.replica.follow(self.primary, semi_sync=waits)

    def cut(self, key: str) -> None:
        del key
        self.replica.execute("STOP SLAVE IO_THREAD")  # what it has received it applies

    def held(self, key: str) -> AbstractContextManager[object]:
        del key
        return self.replica.paused()

    def link(self) -> str:
        return str(dict(self.primary.execute("SHOW STATUS LIKE 'Rpl_semi_sync_master%'")))

    def fail_over(self, key: str) -> str:
        del key
        self.primary.kill()
        self.replica.promote()
        return self.replica.url_of(self.url.rpartition("/")[2])


def until(ready: Any) -> None:
    """Wait for a replica."""
    end = time.monotonic() + _PATIENCE
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"the replica was not ready within {_PATIENCE:g} s")
        time.sleep(0.01)
