"""Private NATS with JetStream."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from semel.testing.services import home
from semel.testing.services.server import Server, find_program

Setting = str | int

REMEDY = "apt-get install nats-server"


def nats_program() -> str:
    """The NATS server's program."""
    return find_program("nats-server", remedy=REMEDY)


class NatsServer(Server):
    """One NATS server with JetStream on a folder of its own.

    Streams survive `kill()`: JetStream hands every message to the kernel before it acknowledges it. They may not survive
    the machine (`sync_interval` is two minutes by default). `password` asks for one, of the user `semel`. `config` takes
    settings of the JetStream section of nats-server.conf, such as ``{"max_file_store": "10MB"}``.
    """

    name = "nats"
    user = "semel"

    def __init__(self, *, password: str | None = None, config: Mapping[str, Setting] | None = None) -> None:
        self.program = nats_program()
        super().__init__()
        self.password = password
        self.config = dict(config or {})
        self._called = f"semel-{secrets.token_hex(4)}"

    @property
    def url(self) -> str:
        """`nats://127.0.0.1:PORT`, with user and password when there are some."""
        secret = f"{self.user}:{quote(self.password, safe='')}@" if self.password else ""
        return f"nats://{secret}{self.host}:{self.port}"

    def argv(self) -> list[str]:
        jetstream = {"store_dir": json.dumps(str(self.folder / "data")), **self.config}
        lines = [
            f"listen: {self.host}:{self.port}",
            f"server_name: {self._called}",
            "jetstream {",
            *(f"  {key}: {value}" for key, value in jetstream.items()),
            "}",
        ]
        if self.password:
            lines.append(f"authorization {{ user: {self.user}, password: {json.dumps(self.password)} }}")
        path = self.folder / "nats-server.conf"
        path.write_text("\n".join(lines) + "\n", "utf-8")
        home.give(self.folder)
        return [self.program, "-c", str(path)]

    def ping(self) -> None:
        # Its name tells our server from a stranger's that took the port.
        if self.info()["server_name"] != self._called:
            raise ConnectionError("another server answers on this port")

    def info(self) -> dict[str, Any]:
        """What the server says about itself to a client that logs in; needs no driver."""
        login: dict[str, object] = {"verbose": False, "pedantic": False}
        if self.password:
            login |= {"user": self.user, "pass": self.password}
        with socket.create_connection((self.host, self.port), 1) as link, link.makefile("rwb") as stream:
            greeting = stream.readline()
            stream.write(b"CONNECT %b\r\nPING\r\n" % json.dumps(login).encode())
            stream.flush()
            answer = stream.readline()
        if answer.strip() != b"PONG":
            raise ConnectionError(f"the server answered {answer!r}")
        facts: dict[str, Any] = json.loads(greeting.removeprefix(b"INFO "))
        return facts
