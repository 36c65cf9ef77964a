"""The disk is full between an effect and its record."""

from __future__ import annotations

import contextlib
import subprocess
from typing import Any

from semel.testing.chaos.driver import PATIENCE, Stage
from semel.testing.chaos.signals import Line
from semel.testing.services import home
from semel.testing.services.redis import RedisServer, redis_program

__all__ = ["disk_full"]


class _SmallDisk:
    """Three megabytes of tmpfs, and a file that fills what is left of them."""

    def __init__(self) -> None:
        self.folder = home.new_folder("disk")
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=3m,mode=0777", "tmpfs", str(self.folder)], check=True
        )

    def fill(self) -> None:
        with contextlib.suppress(OSError), (self.folder / "ballast").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        (self.folder / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True)
        self.folder.rmdir()


class _RedisOnDisk(RedisServer):
    def __init__(self, disk: _SmallDisk) -> None:
        super().__init__(program=redis_program(), appendonly="always", config={"dir": str(disk.folder)})
        self.disk = disk

    def heal(self) -> None:
        self.disk.free()
        self.kill()
        self.start()

    def close(self) -> None:
        super().close()
        self.disk.close()


class _SqliteOnDisk:
    def __init__(self, disk: _SmallDisk) -> None:
        self.disk = disk
        self.url = f"sqlite:///{disk.folder}/semel.db"

    def heal(self) -> None:
        self.disk.free()

    def close(self) -> None:
        self.disk.close()


def disk_full(stage: Stage) -> None:
    """The disk fills up between the effect and its record; the worker gives up (NotRecorded); room is made."""
    store = stage.cell.store
    server: Any = stage.places.hold(
        stage.cell.lane,
        lambda: _RedisOnDisk(_SmallDisk()).open() if store == "redis" else _SqliteOnDisk(_SmallDisk()),
    )
    stage.url = server.url
    line = Line.of(str(stage.folder)).make()
    victim = stage.start("victim", settings={"settle_timeout": 0.5, "timeout": 1.0}, padding=1 << 16)
    if line.asked(victim.pid, timeout=PATIENCE):
        server.disk.fill()
        line.reply()
    victim.wait()
    server.heal()
    told = [each.error for each in stage.ledger.answers() if each.by == "victim"]
    stage.bit = told == ["NotRecorded"]
    stage.start("heir", last=True).wait()
