"""Servers on a disk that forgets, with a clock that jumps: small preloads, compiled when they are first needed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Protocol

from semel.testing.chaos.power import Disk, Loss
from semel.testing.services import home, machine
from semel.testing.services.mariadb import MariaServer
from semel.testing.services.postgres import PostgresServer
from semel.testing.services.redis import Appendonly, RedisServer, redis_program
from semel.testing.services.server import Server

__all__ = [
    "ClockedFile",
    "ClockedMaria",
    "ClockedPostgres",
    "ClockedRedis",
    "Forgetful",
    "ForgetfulFile",
    "ForgetfulMaria",
    "ForgetfulPostgres",
    "ForgetfulRedis",
    "attach_clock",
    "compiled",
    "no_compiler",
]


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


class Forgetful(Protocol):
    """A store on a disk that forgets."""

    disk: Disk

    @property
    def url(self) -> str: ...

    def settle(self) -> None:
        """Everything so far is on the disk."""
        ...

    def lose_power(self) -> Loss:
        """Everything dies, what was not synced is gone, and what has a server comes back."""
        ...

    def close(self) -> None: ...


class ForgetfulRedis(RedisServer):
    """A Redis whose un-synced writes are gone after `lose_power()`."""

    def __init__(self, appendonly: Appendonly) -> None:
        super().__init__(program=redis_program(), appendonly=appendonly)
        self.disk = Disk(self.folder / "appendonlydir", self.folder / "notes")

    def argv(self) -> list[str]:
        return _preloaded(super().argv(), "power", **self.disk.environment)

    def settle(self) -> None:
        self.disk.settle()

    def lose_power(self) -> Loss:
        return _lost(self, self.disk)


class ForgetfulPostgres(PostgresServer):
    """A PostgreSQL whose un-synced writes are gone after `lose_power()`."""

    def __init__(self, config: dict[str, str | int]) -> None:
        # A crash makes it sync every file of its folder; one call for all is a second faster.
        super().__init__(
            fsync=True, config={"recovery_init_sync_method": "syncfs", "autovacuum": "off", **config}
        )
        self.disk = Disk(self._data, self.folder / "notes")

    def argv(self) -> list[str]:
        return _preloaded(super().argv(), "power", **self.disk.environment)

    def settle(self) -> None:
        self.execute("CHECKPOINT")  # what is acknowledged may still be in its memory only
        self.disk.settle()

    def lose_power(self) -> Loss:
        return _lost(self, self.disk)


class ForgetfulMaria(MariaServer):
    """A MariaDB whose un-synced writes are gone after `lose_power()`."""

    def __init__(self, flush: int) -> None:
        # The kernel's asynchronous I/O passes by the C library, and with it the preload.
        config: dict[str, str | int] = {"innodb-flush-log-at-trx-commit": flush, "innodb-use-native-aio": 0}
        with machine.on_disk():
            super().__init__(fsync=True, config=config)
        self.disk = Disk(self._data, self.folder / "notes")

    def argv(self) -> list[str]:
        return _preloaded(super().argv(), "power", **self.disk.environment)

    def settle(self) -> None:
        self.disk.settle()

    def lose_power(self) -> Loss:
        return _lost(self, self.disk)


class ForgetfulFile:
    """A SQLite file: its workers are what writes, so they are what must be dead (and have the preload, see `runner`)."""

    def __init__(self) -> None:
        self.folder = home.new_folder("sqlite")
        (self.folder / "data").mkdir()
        self.disk = Disk(self.folder / "data", self.folder / "notes")
        self.file = self.folder / "data" / "semel.db"
        self.url = f"sqlite:///{self.file}"

    def settle(self) -> None:
        self.disk.settle()

    def lose_power(self) -> Loss:
        loss = self.disk.lose()
        self.file.with_name(f"{self.file.name}-shm").unlink(missing_ok=True)  # memory, by another name
        return loss

    def close(self) -> None:
        shutil.rmtree(self.folder)


def _lost(server: Server, disk: Disk) -> Loss:
    server.kill()
    loss = disk.lose()
    server.start()
    return loss


class _Clock:
    """The seconds that a server's clock is wrong by."""

    def __init__(self, server: Server | ClockedFile) -> None:
        self.path = server.folder / "clock"
        self.path.write_bytes(bytes(8))
        home.give(server.folder)

    def jump(self, seconds: int) -> None:
        with self.path.open("r+b") as file:
            file.write(seconds.to_bytes(8, "little", signed=True))


class ClockedFile:
    """A SQLite file: its clock is that of the machine, as its workers read it (`attach_clock`)."""

    def __init__(self) -> None:
        self.folder = home.new_folder("sqlite")
        self.clock = _Clock(self)
        self.url = f"sqlite:///{self.folder / 'semel.db'}"

    def open(self) -> ClockedFile:
        return self

    def close(self) -> None:
        shutil.rmtree(self.folder)


def attach_clock(path: str) -> None:
    """From now on this process, which has the preload, has the clock of that file."""
    if ctypes.CDLL(None).semel_clock_attach(path.encode()) != 0:
        raise RuntimeError(f"the clock {path} cannot be attached: is {compiled('clock')} preloaded?")


class ClockedMaria(MariaServer):
    """A MariaDB whose wall clock can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = _Clock(self)

    def argv(self) -> list[str]:
        return _preloaded(super().argv(), "clock", SEMEL_CLOCK=str(self.clock.path))


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
