"""The disk is full between an effect and its record."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from typing import Any, Final, Self

from semel.testing.chaos.driver import Stage
from semel.testing.chaos.harness import FULL
from semel.testing.chaos.places import coloured, sqlite_tables, with_tables
from semel.testing.services import home
from semel.testing.services.mariadb import MariaServer
from semel.testing.services.postgres import PostgresServer
from semel.testing.services.redis import RedisServer, redis_program
from semel.testing.services.server import Server, wait_until

__all__ = ["disk_full"]

# A result that does not fit into room that a store has reserved before.
_RESULT: Final = {"redis": 1 << 16, "sqlite": 1 << 16, "postgres": 400_000, "mariadb": 400_000}

_DROP: Final = {"postgres": "DROP DATABASE {} WITH (FORCE)", "mariadb": "DROP DATABASE {}"}


class _SmallDisk:
    """A few megabytes of tmpfs, and a file that fills what is left of them."""

    def __init__(self, megabytes: int) -> None:
        self.folder = home.new_folder("disk")
        options = f"size={megabytes}m,mode=0777"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)], check=True)

    def fill(self) -> None:
        facts = os.statvfs(self.folder)
        with (self.folder / "ballast").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(1, (facts.f_bavail - 8) * facts.f_frsize))
            file.seek(0, os.SEEK_END)
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        (self.folder / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True)
        self.folder.rmdir()


class _Filled(Server):
    """A server whose data is on a small disk. When there is room again it goes on by itself, or has ended and is started."""

    disk: _SmallDisk
    _latest: str = ""

    def heal(self) -> None:
        self.disk.free()
        self.start()
        wait_until(self._answers, timeout=self.start_timeout, what=f"{self.name} again", log=self._why)

    def renew(self, store: str) -> str:
        """New tables, without room from before; the last schedule's give theirs back."""
        if store in _DROP and self._latest:
            server: Any = self
            server.execute(_DROP[store].format(self._latest.rpartition("/")[2]))
        self._latest = with_tables(store, self)
        return self._latest

    def close(self) -> None:
        super().close()
        self.disk.close()


class _Redis(_Filled, RedisServer):
    def __init__(self) -> None:
        self.disk = _SmallDisk(3)
        super().__init__(program=redis_program(), appendonly="always", config={"dir": str(self.disk.folder)})

    def heal(self) -> None:
        self.kill()  # it may live on and refuse
        super().heal()

    def renew(self, store: str) -> str:
        """An empty database, and a log that has forgotten what was before."""
        self.flush().command("BGREWRITEAOF")
        wait_until(self._rewritten, timeout=self.start_timeout, what="a new log", log=self._why)
        return super().renew(store)

    def _rewritten(self) -> bool:
        facts = self.info("persistence")
        return not (facts["aof_rewrite_in_progress"] or facts["aof_rewrite_scheduled"])


class _Postgres(_Filled, PostgresServer):
    def __init__(self) -> None:
        self.disk = _SmallDisk(150)
        super().__init__()
        self._data = self.disk.folder / "data"


class _Maria(_Filled, MariaServer):
    def __init__(self) -> None:
        self.disk = _SmallDisk(400)
        super().__init__()
        self._data = self.disk.folder / "data"


class _Sqlite:
    def __init__(self) -> None:
        self.disk = _SmallDisk(3)
        self.url = ""

    def open(self) -> Self:
        return self

    def renew(self, _: str) -> str:
        """Another file, whose log has no room from before."""
        for old in self.disk.folder.glob("*.db*"):
            old.unlink()
        self.url = sqlite_tables(self.disk.folder / f"{time.monotonic_ns()}.db")
        return self.url

    def heal(self) -> None:
        self.disk.free()

    def close(self) -> None:
        self.disk.close()


_KINDS: Final[dict[str, Any]] = {
    "redis": _Redis,
    "sqlite": _Sqlite,
    "postgres": _Postgres,
    "mariadb": _Maria,
}


def disk_full(stage: Stage) -> None:
    """The disk fills up between the effect and its record; the worker gives up (NotRecorded); room is made."""
    store = stage.cell.store
    server: Any = stage.places.hold(stage.cell.lane, lambda: _KINDS[store]().open())
    stage.url = coloured(server.renew(store), store, stage.cell.colour)
    stage.stand(**FULL.plan, padding=_RESULT[store])
    server.disk.fill()
    stage.reply()
    stage.finish()
    server.heal()
    told = [each.error for each in stage.ledger.answers() if each.by == "victim"]
    # A transaction's failure is its caller's, in the words of the driver.
    stage.bit = bool(told and told[0]) if stage.cell.mode == "tx" else told == ["NotRecorded"]
    stage.send("heir", last=True).wait()
