"""Private RabbitMQ with its stream plugin."""

from __future__ import annotations

import json
import secrets
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path

from semel.testing.services import home, template
from semel.testing.services.server import Server, ServerFailed, ServerMissing, find_program

Setting = str | int

REMEDY = "apt-get install rabbitmq-server"
_FIRST: dict[str, list[dict[str, object]]] = {
    "vhosts": [{"name": "/"}],
    "users": [{"name": "guest", "password": "guest", "tags": "administrator"}],
    "permissions": [{"user": "guest", "vhost": "/", "configure": ".*", "write": ".*", "read": ".*"}],
    "queues": [
        {
            "name": "semel-first",
            "vhost": "/",
            "durable": True,
            "auto_delete": False,
            "arguments": {"x-queue-type": "stream"},
        }
    ],
}
"""What every server begins with. That a node has streams at all is noted in a file that is flushed every three minutes only: a
node killed before that has none any more. So a first one is declared and removed, and the node stopped, ahead of the tests."""


def rabbitmq_program() -> str:
    """The start script inside the package: the one on the PATH insists on the system's user and folders."""
    folders = [str(path) for path in Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin")]
    for folder in folders:
        return find_program(f"{folder}/rabbitmq-server", remedy=REMEDY)
    raise ServerMissing(f"rabbitmq-server is not on this machine; remedy: {REMEDY}")


class RabbitServer(Server):
    """One RabbitMQ node, AMQP on `port` and streams on `stream_port`; user and password are `guest`.

    It takes two to four seconds to start, most of them Erlang's own (the first one on a machine takes twice as long, to make
    the data that others begin with), and keeps durable queues and streams across `kill()`. `config` takes any line of rabbitmq.conf, such as ``{"vm_memory_high_watermark.absolute": "1MB"}``.
    """

    name = "rabbitmq"
    user = "guest"
    password = "guest"  # noqa: S105  # RabbitMQ's own default, which it accepts from loopback addresses only
    start_timeout = 90.0

    stream_port: int

    def __init__(self, *, config: Mapping[str, Setting] | None = None) -> None:
        self.program = rabbitmq_program()
        self.config = dict(config or {})
        self._called = f"semel-{secrets.token_hex(4)}"
        self._definitions: Path | None = None
        super().__init__()

    def choose_ports(self) -> None:
        ports: set[int] = set()
        while len(ports) < 4:
            ports.add(home.free_port())
        self.port, self.stream_port, self._dist_port, self._epmd_port = ports

    @property
    def url(self) -> str:
        """`amqp://guest:guest@127.0.0.1:PORT/`."""
        return f"amqp://{self.user}:{self.password}@{self.host}:{self.port}/"

    @property
    def stream_url(self) -> str:
        """`rabbitmq+stream://guest:guest@127.0.0.1:PORT/`."""
        return f"rabbitmq+stream://{self.user}:{self.password}@{self.host}:{self.stream_port}/"

    def prepare(self) -> None:
        version = Path(self.program).parent.parent.name
        template.recall(self.folder / "data", "rabbitmq", (version, json.dumps(_FIRST)), self._first_start)

    def _first_start(self) -> None:
        self._definitions = self.folder / "definitions.json"
        self._definitions.write_text(json.dumps(_FIRST), "utf-8")
        self.start()
        self._definitions = None
        self.control("delete_queue", "semel-first")
        self.stop()

    def control(self, *words: str) -> None:
        """Run `rabbitmqctl` with these words: two seconds. Raises ServerFailed with what it printed."""
        log = self.folder / "rabbitmqctl.log"
        program = [f"{name}={value}" for name, value in self._environment().items()]
        program.append(str(Path(self.program).with_name("rabbitmqctl")))
        if home.spawn(["/usr/bin/env", *program, *words], folder=self.folder, log=log).wait() != 0:
            raise ServerFailed(f"rabbitmqctl {words[0]} failed:\n{log.read_text('utf-8', 'replace')}")

    def argv(self) -> list[str]:
        self._write_settings()
        environment = [f"{name}={value}" for name, value in self._environment().items()]
        epmd = f"{shlex.quote(find_program('epmd', remedy=REMEDY))} -port {self._epmd_port}"
        # Erlang's name server of our own, in this folder and session. Without it the node would start a daemon that
        # leaves for / and outlives everybody. The shell becomes the node, so that signals reach it.
        script = (
            f"{epmd} & until {epmd} -names >/dev/null 2>&1; do sleep 0.02; done;"
            f" exec {shlex.quote(self.program)} -noinput"
        )
        return ["/usr/bin/env", *environment, "/bin/sh", "-c", script]

    def _environment(self) -> dict[str, str]:
        folder = self.folder
        return {
            "HOME": str(folder),  # the Erlang cookie is made here
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": self.host,
            "RABBITMQ_NODENAME": "semel@localhost",  # alone with a name server of its own; the data contains it
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",  # the machine's own settings are none of our business
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "generated"),
            "RABBITMQ_MNESIA_BASE": "/proc/self/cwd/data",  # kept in the data, so that it must be the same for a copy
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            # The start script stays between us and the node unless it believes that somebody types.
            "RABBITMQ_ALLOW_INPUT": "1",
            # Two schedulers that sleep when idle: tests share the cores with the node.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none"
            " -kernel inet_dist_use_interface {127,0,0,1}",
        }

    def _write_settings(self) -> None:
        settings: dict[str, Setting] = {
            "listeners.tcp.1": f"{self.host}:{self.port}",
            "stream.listeners.tcp.1": f"{self.host}:{self.stream_port}",
            "stream.advertised_host": self.host,
            "stream.advertised_port": self.stream_port,
            "log.console.level": "warning",
            "cluster_name": self._called,
            **({"load_definitions": str(self._definitions)} if self._definitions else {}),
            **self.config,
        }
        text = "".join(f"{key} = {value}\n" for key, value in settings.items())
        (self.folder / "rabbitmq.conf").write_text(text, "utf-8")
        (self.folder / "enabled_plugins").write_text("[rabbitmq_stream].\n", "utf-8")
        home.give(self.folder)

    def ping(self) -> None:
        # AMQP is opened last, so that its greeting means that everything is ready. It contains the cluster's name, which
        # tells our server from a stranger's that took the port.
        with socket.create_connection((self.host, self.port), 1) as link:
            link.sendall(b"AMQP\x00\x00\x09\x01")
            greeting = link.recv(4096)
        if self._called.encode() not in greeting:
            raise ConnectionError("another server answers on this port")
        socket.create_connection((self.host, self.stream_port), 1).close()

    def close(self) -> None:
        self.kill()  # a graceful end takes a second, to save data that is removed next
        super().close()
