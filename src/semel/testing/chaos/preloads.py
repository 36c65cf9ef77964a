"""Servers on a disk that forgets, with a clock that jumps: small preloads, compiled when they are first needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from semel.testing.services import home
from semel.testing.services.postgres import PostgresServer
from semel.testing.services.redis import Appendonly, RedisServer, redis_program
from semel.testing.services.server import Server

__all__ = ["ClockedPostgres", "ClockedRedis", "ForgetfulRedis", "compiled", "no_compiler"]


def no_compiler() -> str:
    """Why nothing can be preloaded on this machine; empty when it can."""
    return "" if shutil.which("cc") else "needs a C compiler (apt-get install gcc libc6-dev)"


def compiled(name: str) -> Path:
    """The shared library of `name`.c, where servers may read it."""
    library = home.home() / f"{name}.so"
    if not library.exists():
        source = Path(__file__).with_name(f"{name}.c")
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)],
            check=True,
            capture_output=True,
        )
        library.chmod(0o755)
    return library


def _preloaded(argv: list[str], name: str, **environment: str) -> list[str]:
    words = [f"{key}={text}" for key, text in {"LD_PRELOAD": str(compiled(name)), **environment}.items()]
    return ["env", *words, *argv]  # env becomes the server: the process id stays


class ForgetfulRedis(RedisServer):
    """A Redis whose un-synced writes are gone after `lose_power()`."""

    def __init__(self, appendonly: Appendonly) -> None:
        super().__init__(program=redis_program(), appendonly=appendonly)
        self._log = self.folder / "synced"
        self._out = self.folder / "power-is-out"

    def argv(self) -> list[str]:
        return _preloaded(
            super().argv(), "power", SEMEL_POWER_LOG=str(self._log), SEMEL_POWER_OUT=str(self._out)
        )

    def sync(self) -> None:
        """Return when everything that was written so far is on the disk."""
        self.command("SET", "before-the-cut", time.monotonic_ns())
        files = list((self.folder / "appendonlydir").glob("*.incr.aof"))
        until = time.monotonic() + 10
        while any(self._synced().get(str(file), -1) < file.stat().st_size for file in files):
            if time.monotonic() > until:
                raise TimeoutError("Redis has not synced its log within 10 s")
            time.sleep(0.02)

    def cut(self) -> None:
        """From now on nothing reaches the disk, although the server goes on."""
        self._out.touch()

    def lose_power(self) -> int:
        """Kill the server, drop what was not synced, start it again; the number of bytes that are gone."""
        self.kill()
        gone = 0
        synced = self._synced()
        for file in (self.folder / "appendonlydir").glob("*.incr.aof"):
            kept = min(synced.get(str(file), 0), file.stat().st_size)
            gone += file.stat().st_size - kept
            os.truncate(file, kept)
        self._out.unlink(missing_ok=True)
        self.start()
        return gone

    def _synced(self) -> dict[str, int]:
        lines = self._log.read_text("utf-8").splitlines() if self._log.exists() else []
        return {path: int(size) for size, _, path in (line.partition(" ") for line in lines)}


class _Clock:
    """The seconds that a server's clock is wrong by."""

    def __init__(self, server: Server) -> None:
        self.path = server.folder / "clock"
        self.path.write_bytes(bytes(8))
        home.give(server.folder)

    def jump(self, seconds: int) -> None:
        with self.path.open("r+b") as file:
            file.write(seconds.to_bytes(8, "little", signed=True))


class ClockedRedis(RedisServer):
    """A Redis whose wall clock can be set: `server.clock.jump(60)`."""

    def __init__(self) -> None:
        super().__init__(program=redis_program())
        self.clock = _Clock(self)

    def argv(self) -> list[str]:
        return _preloaded(super().argv(), "clock", SEMEL_CLOCK=str(self.clock.path))


class ClockedPostgres(PostgresServer):
    """A PostgreSQL whose wall clock can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = _Clock(self)

    def argv(self) -> list[str]:
        return _preloaded(super().argv(), "clock", SEMEL_CLOCK=str(self.clock.path))
