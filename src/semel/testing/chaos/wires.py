"""The fault proxy in a process of its own: a driver may have no threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn, Self

from semel.testing.chaos.leftovers import too_many
from semel.testing.proxy import CHUNKS, RESP, STREAMS, Action, Framing, Proxy, Rule
from semel.testing.services.rabbitmq import RabbitServer
from semel.testing.services.redis import redis_program
from semel.testing.services.server import wait_until
from semel.testing.services.topology import RedisCluster

__all__ = ["ProxiedCluster", "ProxiedRabbit", "Wire"]

_FAULTS = ("reset-before", "reset-after", "stall")
_FRAMINGS = {"redis": RESP, "rabbit-stream": STREAMS}
_MANY = 64
_ACTIONS = {"reset-before": Action.RESET_BEFORE, "reset-after": Action.SWALLOW_REPLY, "stall": Action.STALL}


class Wire:
    """A proxy to each of these places; it breaks the first request that comes to any of them after `arm()`, all after `silence()`.

    `speaks` names what is there: a store, or a kind of sink.
    """

    def __init__(self, *targets: tuple[str, int], speaks: str) -> None:
        self._line, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._line.close()
            _serve(theirs, targets, _FRAMINGS.get(speaks, CHUNKS))
        theirs.close()
        self._line.settimeout(10)
        self.ports = [int.from_bytes(self._line.recv(2), "big") for _ in targets]

    def arm(self, fault: str) -> None:
        self._tell(b"a%d" % _FAULTS.index(fault))

    def silence(self) -> None:
        """From now on no request is answered, on whichever connection, until `speak()`."""
        self._tell(b"s%d" % _FAULTS.index("stall"))

    def cut(self) -> bool:
        """Every connection that is open is reset, now; whether there was one."""
        self._line.sendall(b"c0")
        return self._line.recv(1) == b"1"

    def speak(self) -> None:
        """What is asked from now on is answered. What was not stays so."""
        self._tell(b"e0")

    def _tell(self, word: bytes) -> None:
        self._line.sendall(word)
        self._line.recv(1)

    def struck(self) -> bool:
        """Whether it has so far; what it was told to do goes on."""
        self._line.sendall(b"w0")
        return self._line.recv(1) == b"1"

    def fired(self) -> bool:
        """Whether it has, and it is over. RuntimeError when more is open than the connections of one schedule."""
        self._line.sendall(b"f0")
        answer = self._line.recv(200).decode()
        if left := answer[1:]:
            raise RuntimeError(f"the proxy has {left}")
        return answer == "1"

    def close(self) -> None:
        self._line.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()


def _serve(line: socket.socket, targets: Sequence[tuple[str, int]], framing: Framing) -> NoReturn:
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        proxies = [Proxy(*target, framing=framing) for target in targets]
        for proxy in proxies:
            line.sendall(proxy.port.to_bytes(2, "big"))
        rules: list[Rule] = []
        while word := line.recv(2):
            if word == b"w0":
                line.sendall(b"%d" % any(rule.fired.is_set() for rule in rules))
                continue
            for proxy in proxies:
                proxy.clear()  # what has not struck must not strike the next one
            match word[:1]:
                case b"a" | b"s":
                    for proxy in proxies:
                        # Of earlier schedules, whose clients have left. Not before: an heir meets what a broken network leaves.
                        proxy.release()
                    action = _ACTIONS[_FAULTS[int(word[1:])]]
                    times = _MANY if word[:1] == b"s" else 1
                    rules = [proxy.rule(action) for proxy in proxies for _ in range(times)]
                    line.sendall(b"k")
                case b"c":
                    were_open = any(proxy.open_connections for proxy in proxies)
                    for proxy in proxies:
                        proxy.cut()
                    line.sendall(b"%d" % were_open)
                case b"e":
                    line.sendall(b"k")
                case _:
                    fired = any(rule.fired.is_set() for rule in rules)
                    line.sendall(f"{fired:d}{too_many()}".encode())
    finally:
        os._exit(0)


class ProxiedCluster:
    """A Redis Cluster without replicas whose nodes name a proxy's address as theirs: no client passes it by."""

    def __init__(self) -> None:
        self.cluster = RedisCluster(program=redis_program(), replicas=False).open().patient()
        self.wire = Wire(*self.cluster.addresses, speaks="redis")
        for node, port in zip(self.cluster.nodes, self.wire.ports, strict=True):
            node.command("CONFIG", "SET", "cluster-announce-port", port)
        wait_until(self._known, timeout=20, what="the nodes name their proxies", step=0.02)

    def _known(self) -> bool:
        ports = set(self.wire.ports)
        slots = [node.command("CLUSTER", "SLOTS") for node in self.cluster.nodes]
        return all({int(row[2][1]) for row in rows} == ports for rows in slots)

    @property
    def url(self) -> str:
        """By way of the proxies."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in self.wire.ports)

    def close(self) -> None:
        self.wire.close()
        self.cluster.close()


class ProxiedRabbit(RabbitServer):
    """A RabbitMQ that names a proxy's address as that of its streams: it sends its clients there, whichever one they came by."""

    wire: Wire | None = None

    def choose_ports(self) -> None:
        super().choose_ports()
        self._cut_off()
        self.wire = Wire((self.host, self.stream_port), speaks="rabbit-stream")
        self.config["stream.advertised_port"] = self.wire.ports[0]

    def _cut_off(self) -> None:
        if self.wire is not None:
            self.wire.close()
            self.wire = None

    def close(self) -> None:
        self._cut_off()
        super().close()
