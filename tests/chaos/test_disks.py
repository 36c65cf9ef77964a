"""A disk that is full stays full: what servers take and give back meanwhile spares no victim."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator

import pytest

from semel.testing.chaos.disks import SmallDisk

MEGABYTE = 1 << 20
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None,
    reason="ROOT MISSING: a small disk can be mounted by root only",
)


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    found = SmallDisk(4)
    yield found
    found.close()


def take(disk: SmallDisk, name: str) -> None:
    """As a server's log does that grows."""
    (disk.folder / name).write_bytes(bytes(MEGABYTE))


def refused(disk: SmallDisk) -> bool:
    try:
        (disk.folder / "more").write_bytes(b"x")
    except OSError as error:
        return error.errno == errno.ENOSPC
    return False


def test_a_disk_is_full_though_a_server_takes_room_between_the_look_and_the_taking(
    disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = os.statvfs

    def then_taken(place: object) -> os.statvfs_result:
        found = look(disk.folder)
        if not (disk.folder / "log").exists():
            take(disk, "log")
        return found

    monkeypatch.setattr(os, "statvfs", then_taken)
    disk.fill()
    monkeypatch.undo()
    assert disk.left == 0
    assert refused(disk)


def test_room_that_a_server_gives_back_is_taken_until_the_victim_has_given_up(disk: SmallDisk) -> None:
    take(disk, "old log")
    disk.fill()
    looks = []

    def over() -> bool:
        looks.append(disk.left)
        if len(looks) == 2:
            (disk.folder / "old log").unlink()
            assert disk.left == MEGABYTE
        return len(looks) == 4

    disk.fill_until(over)
    assert looks == [0, 0, 0, 0]
    assert refused(disk)


def test_there_is_room_again_when_it_is_freed(disk: SmallDisk) -> None:
    disk.fill()
    disk.fill()
    disk.free()
    assert disk.left == 4 * MEGABYTE
    assert not refused(disk)


def test_what_is_no_full_disk_is_told(disk: SmallDisk) -> None:
    (disk.folder / "ballast").mkdir()
    with pytest.raises(IsADirectoryError):
        disk.fill()
