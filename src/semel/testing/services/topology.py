"""Private Redis groups: Sentinel (one master, its replica, three sentinels) and Cluster (three masters, three replicas).

Both run the same server program with the same settings as a single server, so a Valkey program gives Valkey groups.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from semel.testing.services import home
from semel.testing.services.redis import Appendonly, RedisServer, Setting
from semel.testing.services.server import Server, wait_until

SLOTS = 16_384
# The replica is synchronised at once instead of after five seconds of waiting for others.
QUICK: dict[str, Setting] = {
    "repl-diskless-sync": "yes",
    "repl-diskless-sync-delay": 0,
    "repl-ping-replica-period": 1,
}


LONG = 120_000  # milliseconds: longer than any machine stands still


class Group:
    """Several servers that live and end together."""

    def __init__(self) -> None:
        self.members: list[Server] = []

    def close(self) -> None:
        """End every member and remove its data. May be called twice."""
        with contextlib.ExitStack() as stack:
            for member in self.members:
                stack.callback(member.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()


def _open_all(servers: list[Server]) -> None:
    with ThreadPoolExecutor(len(servers)) as threads:
        list(threads.map(Server.open, servers))


class RedisCluster(Group):
    """Three masters, each with one replica. `nodes[0:3]` begin as masters, `nodes[3:6]` as their replicas.

    With `replicas=False` there are the masters only.
    """

    def __init__(
        self,
        *,
        program: str,
        appendonly: Appendonly = "no",
        config: Mapping[str, Setting] | None = None,
        replicas: bool = True,
    ) -> None:
        super().__init__()
        settings = {
            **QUICK,
            "cluster-enabled": "yes",
            "cluster-config-file": "nodes.conf",
            "cluster-node-timeout": 1000,
            **(config or {}),
        }
        self.nodes = [
            RedisServer(program=program, appendonly=appendonly, config=settings, bus=True)
            for _ in range(6 if replicas else 3)
        ]
        self.members = list(self.nodes)

    @property
    def url(self) -> str:
        """`redis+cluster://` with the addresses of all nodes."""
        return "redis+cluster://" + ",".join(f"{node.host}:{node.port}" for node in self.nodes)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of each node."""
        return [(node.host, node.port) for node in self.nodes]

    def open(self) -> Self:
        """Start the nodes, join them and wait until each of them sees a working cluster."""
        try:
            _open_all(self.members)
            self._join()
        except BaseException:
            self.close()
            raise
        return self

    def patient(self) -> Self:
        """From now on no node is given up for being silent: for tests that kill none, on a machine that may stand still."""
        for node in self.nodes:
            node.command("CONFIG", "SET", "cluster-node-timeout", LONG)
        return self

    def masters(self) -> list[RedisServer]:
        """The nodes that are masters now, by asking each running one."""
        return [node for node in self.nodes if node.running and node.info("replication")["role"] == "master"]

    def master_of(self, key: str) -> RedisServer:
        """The node that serves `key` now."""
        asked = next(node for node in self.nodes if node.running)
        slot = int(asked.command("CLUSTER", "KEYSLOT", key))
        for row in asked.command("CLUSTER", "SLOTS"):
            first, last, owner, *_ = row
            if int(first) <= slot <= int(last):
                return next(node for node in self.nodes if node.port == int(owner[1]))
        raise LookupError(f"no node serves slot {slot}; the cluster is down")

    def replica_of(self, master: RedisServer) -> RedisServer:
        """The running node that follows `master` now."""
        for node in self.nodes:
            if node.running and node is not master:
                facts = node.info("replication")
                if facts["role"] == "slave" and int(facts["master_port"]) == master.port:
                    return node
        raise LookupError(f"no node follows {master!r}")

    def wait_healthy(self, *, timeout: float = 60.0) -> None:
        """Wait until every running node says that all slots are served, for example after a fail-over."""
        wait_until(self._healthy, timeout=timeout, what="every node says cluster_state:ok", step=0.05)

    def flush(self) -> Self:
        """Remove every key on every master."""
        for node in self.masters():
            node.flush()
        return self

    def _join(self) -> None:
        masters, replicas = self.nodes[:3], self.nodes[3:]
        for index, node in enumerate(masters):
            node.command("CLUSTER", "ADDSLOTSRANGE", SLOTS * index // 3, SLOTS * (index + 1) // 3 - 1)
            node.command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        self._introduce()
        wait_until(self._all_known, timeout=60, what="the nodes know each other", step=0.02)
        for master, replica in zip(masters, replicas, strict=bool(replicas)):
            replica.command("CLUSTER", "REPLICATE", master.command("CLUSTER", "MYID"))
        wait_until(self._replicas_linked, timeout=60, what="the replicas follow their masters", step=0.02)
        self.wait_healthy()

    def _introduce(self) -> None:
        self._introduced = time.monotonic()
        for node in self.nodes[1:]:
            self.nodes[0].command("CLUSTER", "MEET", node.host, node.port)

    def _all_known(self) -> bool:
        """A node that does not shake hands within its timeout, on a busy machine, is forgotten, and has to be met again."""
        if all(len(_known(node.command("CLUSTER", "NODES"))) == len(self.nodes) for node in self.nodes):
            return True
        if time.monotonic() > self._introduced + 3:
            self._introduce()
        return False

    def _replicas_linked(self) -> bool:
        return all(node.info("replication").get("master_link_status") == "up" for node in self.nodes[3:])

    def _healthy(self) -> bool:
        running = [node for node in self.nodes if node.running]
        return all(_cluster_info(node).get("cluster_state") == "ok" for node in running)


class RedisSentinel(Group):
    """One master, one replica and three sentinels that fail over after half a second without an answer."""

    service_name = "semel"

    def __init__(
        self, *, program: str, appendonly: Appendonly = "no", config: Mapping[str, Setting] | None = None
    ) -> None:
        super().__init__()
        settings = {**QUICK, **(config or {})}
        self.nodes = [RedisServer(program=program, appendonly=appendonly, config=settings) for _ in range(2)]
        self.sentinels = [_SentinelServer(program=program) for _ in range(3)]
        self.members = [*self.nodes, *self.sentinels]

    @property
    def url(self) -> str:
        """`redis+sentinel://HOST:PORT,HOST:PORT,HOST:PORT/SERVICE/0`."""
        hosts = ",".join(f"{host}:{port}" for host, port in self.addresses)
        return f"redis+sentinel://{hosts}/{self.service_name}/0"

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of each sentinel."""
        return [(sentinel.host, sentinel.port) for sentinel in self.sentinels]

    def open(self) -> Self:
        """Start all and wait until every sentinel knows the master, the replica and the other two."""
        try:
            _open_all(list(self.nodes))
            master, replica = self.nodes
            replica.command("REPLICAOF", master.host, master.port)
            for sentinel in self.sentinels:
                sentinel.watch(self.service_name, master)
            _open_all(list(self.sentinels))
            wait_until(self._linked, timeout=60, what="the sentinels know the whole group", step=0.02)
        except BaseException:
            self.close()
            raise
        return self

    def patient(self) -> Self:
        """From now on no master is given up for being silent: for tests that kill none, on a machine that may stand still."""
        for sentinel in self.sentinels:
            sentinel.command("SENTINEL", "SET", self.service_name, "down-after-milliseconds", LONG)
        return self

    def master(self) -> RedisServer:
        """The node that the first running sentinel calls master now."""
        sentinel = next(sentinel for sentinel in self.sentinels if sentinel.running)
        _, port = sentinel.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service_name)
        return next(node for node in self.nodes if node.port == int(port))

    def wait_failed_over(self, old: RedisServer, *, timeout: float = 60.0) -> RedisServer:
        """Wait until every sentinel names another master than `old` and that one accepts writes."""
        other = next(node for node in self.nodes if node is not old)
        wait_until(
            lambda: self._agree_on(other),
            timeout=timeout,
            what="the sentinels agree on a new master",
            step=0.05,
        )
        return other

    def flush(self) -> Self:
        """Remove every key."""
        self.master().flush()
        return self

    def _agree_on(self, node: RedisServer) -> bool:
        named = [
            int(sentinel.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service_name)[1])
            for sentinel in self.sentinels
        ]
        return set(named) == {node.port} and node.info("replication")["role"] == "master"

    def _linked(self) -> bool:
        if self.nodes[1].info("replication").get("master_link_status") != "up":
            return False
        return all(sentinel.sees(self.service_name, replicas=1, sentinels=2) for sentinel in self.sentinels)


class _SentinelServer(RedisServer):
    name = "sentinel"

    def __init__(self, *, program: str) -> None:
        super().__init__(program=program)
        self._file = self.folder / "sentinel.conf"

    def argv(self) -> list[str]:
        return [self.program, str(self._file), "--port", str(self.port), "--sentinel"]

    def watch(self, service: str, master: RedisServer) -> None:
        """Write the configuration; a sentinel keeps its state in this file."""
        lines = (
            f"bind {self.host}",
            f"dir {self.folder}",
            f"sentinel monitor {service} {master.host} {master.port} 2",
            f"sentinel down-after-milliseconds {service} 500",
            f"sentinel failover-timeout {service} 3000",
        )
        self._file.write_text("\n".join(lines) + "\n", "utf-8")
        home.give(self.folder)

    def sees(self, service: str, *, replicas: int, sentinels: int) -> bool:
        """Whether this sentinel has found so many replicas and other sentinels."""
        known: Any = self.command("SENTINEL", "MASTER", service)
        facts = known if isinstance(known, dict) else dict(zip(known[::2], known[1::2], strict=True))
        return int(facts["num-slaves"]) >= replicas and int(facts["num-other-sentinels"]) >= sentinels


def _known(answer: Any) -> list[Any]:
    """Those that have shaken hands: the name of any other is not its own yet."""
    nodes = list(answer.items()) if isinstance(answer, dict) else str(answer).strip().splitlines()
    return [node for node in nodes if "handshake" not in str(node)]


def _cluster_info(node: RedisServer) -> dict[str, str]:
    answer: Any = node.command("CLUSTER", "INFO")
    if isinstance(answer, dict):
        return answer
    return dict(line.split(":", 1) for line in str(answer).splitlines() if ":" in line)
