"""The disk, or the memory of a Redis, is full between an effect and its record."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Self

from semel.testing import services
from semel.testing.chaos.driver import PATIENCE, Stage
from semel.testing.chaos.harness import FULL
from semel.testing.chaos.places import coloured, sqlite_tables, with_tables
from semel.testing.services import home
from semel.testing.services.mariadb import MariaServer
from semel.testing.services.postgres import PostgresServer
from semel.testing.services.redis import RedisServer, redis_program
from semel.testing.services.server import Server, wait_until

__all__ = ["SmallDisk", "disk_full", "memory_full"]

_PAGE: Final = 4096

# A result that does not fit into room that a store has reserved before.
_RESULT: Final = {"redis": 1 << 16, "sqlite": 1 << 16, "postgres": 400_000, "mariadb": 400_000}

_DROP: Final = {"postgres": "DROP DATABASE {} WITH (FORCE)", "mariadb": "DROP DATABASE {}"}


@contextlib.contextmanager
def _unless_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


class SmallDisk:
    """A few megabytes of tmpfs, and a file that fills what is left of them."""

    def __init__(self, megabytes: int) -> None:
        self.folder = home.new_folder("disk")
        options = f"size={megabytes}m,mode=0777"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)], check=True)

    @property
    def left(self) -> int:
        """Bytes that anybody could still write."""
        facts = os.statvfs(self.folder)
        return facts.f_bavail * facts.f_frsize

    def fill(self) -> None:
        """Until the kernel says that it is full. What is asked for at once may be refused, as servers take room meanwhile: so it is
        half of what is left, again and again, and the rest page by page."""
        with (self.folder / "ballast").open("ab", buffering=0) as file:
            while half := self.left // 2 // _PAGE * _PAGE:
                with _unless_full():
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), half)
            with _unless_full():
                while True:
                    file.write(bytes(_PAGE))

    def fill_until(self, over: Callable[[], bool]) -> None:
        """What a server gives back meanwhile, old logs at a checkpoint, is taken again at once."""
        while not over():
            self.fill()
            time.sleep(0.005)

    def free(self) -> None:
        (self.folder / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True)
        self.folder.rmdir()


class _Filled(Server):
    """A server whose data is on a small disk. When there is room again it goes on by itself, or has ended and is started."""

    disk: SmallDisk
    _latest: str = ""

    def heal(self) -> None:
        self.disk.free()
        self.start()
        wait_until(self._answers, timeout=self.start_timeout, what=f"{self.name} again", log=self._why)
        self._write()

    def left_alone(self) -> bool:
        """Nobody's statement is under way. One that is would find the room that is made for the next caller."""
        if not self.running:
            return True
        with contextlib.suppress(
            Exception
        ):  # it starts again, or has no room to answer: then nobody knows yet
            return self._latest.rpartition("/")[2] not in self._used()
        return False

    def _used(self) -> set[str]:
        """Names of databases that somebody is connected to."""
        return set()

    def _write(self) -> None:
        """As much as a caller will: a server may take a while to notice that there is room."""

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
        self.disk = SmallDisk(3)
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
        self.disk = SmallDisk(150)
        # Nothing gives room back by itself while the disk is full: a checkpoint removes old logs, a vacuum cuts tables.
        super().__init__(config={"checkpoint_timeout": "1d", "autovacuum": "off"})
        self._data = self.disk.folder / "data"

    def _used(self) -> set[str]:
        return {name for (name,) in self.execute("SELECT datname FROM pg_stat_activity")}

    def _write(self) -> None:
        self.execute(f"CREATE TABLE room AS SELECT repeat('x', {_RESULT['postgres']}) AS text")
        self.execute("DROP TABLE room")


class _Maria(_Filled, MariaServer):
    def __init__(self) -> None:
        self.disk = SmallDisk(400)
        super().__init__()
        self._data = self.disk.folder / "data"

    def _used(self) -> set[str]:
        return {row[3] for row in self.execute("SHOW PROCESSLIST")}

    def _write(self) -> None:
        here = self._latest.rpartition("/")[2]
        self.execute(
            f"CREATE TABLE room ENGINE=InnoDB AS SELECT repeat('x', {_RESULT['mariadb']}) AS text",
            database=here,
        )
        self.execute("DROP TABLE room", database=here)


class _Sqlite:
    def __init__(self) -> None:
        self.disk = SmallDisk(3)
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

    def left_alone(self) -> bool:
        return True  # its writers have ended

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
    _give_up(stage, server)
    server.heal()
    stage.bit = _was_told(stage, "NotRecorded")
    stage.send("heir", last=True).wait()


def _was_told(stage: Stage, error: str) -> bool:
    told = [each.error for each in stage.ledger.answers() if each.by == "victim"]
    # A transaction's failure is its caller's, in the words of the driver.
    return bool(told and told[0]) if stage.cell.mode == "tx" else told == [error]


def _give_up(stage: Stage, server: Any) -> None:
    """The victim's end, and that of what it has asked for, on a disk that stays full until then."""
    assert stage.victim is not None
    victim, until = stage.victim, time.monotonic() + PATIENCE
    server.disk.fill_until(lambda: victim.ended() or time.monotonic() > until)
    stage.finish()
    server.disk.fill_until(lambda: server.left_alone() or time.monotonic() > until)


def memory_full(stages: Sequence[Stage]) -> None:
    """A Redis is at its maxmemory and may drop nothing, from before the outcomes are recorded until their workers have given up.
    Who claims meanwhile is told so, and has run nothing."""
    server: RedisServer = stages[0].places.hold(stages[0].cell.lane, services.redis)
    for stage in stages:
        stage.url = server.url
        stage.stand(**FULL.plan)
    server.command("CONFIG", "SET", "maxmemory", 1)
    try:
        for stage in stages:
            stage.reply()
        for stage in stages:
            stage.finish()
    finally:
        server.command("CONFIG", "SET", "maxmemory", 0)
    for stage in stages:
        error = "StoreUnavailable" if stage.cell.point == "claim.sent" else "NotRecorded"
        stage.bit = stage.bit and _was_told(stage, error)
        stage.send("heir", last=True).wait()
