"""The disk that forgets: what is synced stays, and everything else is as it was before."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from semel.testing.chaos.power import Disk, Loss
from semel.testing.chaos.preloads import compiled, no_compiler

pytestmark = pytest.mark.skipif(bool(no_compiler()), reason=f"COMPILER MISSING: {no_compiler()}")


class Lab:
    """A folder, and small programs that write to it."""

    def __init__(self, folder: Path) -> None:
        (folder / "data").mkdir()
        self.data = folder / "data"
        self.disk = Disk(self.data, folder / "notes")

    def run(self, program: str) -> None:
        environment = {**os.environ, **self.disk.environment, "LD_PRELOAD": str(compiled("power"))}
        head = "import os\nW = os.O_RDWR | os.O_CREAT\n"
        subprocess.run([sys.executable, "-c", head + program], cwd=self.data, env=environment, check=True)

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(self.data.iterdir())}


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    made = Lab(tmp_path)
    (made.data / "old").write_bytes(b"0123456789")
    return made


@pytest.mark.parametrize(
    "change",
    [
        "os.pwrite(f, b'abc', 4)",
        "os.write(f, b'a much longer text than there was')",
        "os.pwritev(f, [b'ab', b'cd'], 8)",
        "os.writev(f, [b'ab', b'cd'])",
        "os.ftruncate(f, 3)",
        "os.ftruncate(f, 300)",
        "os.posix_fallocate(f, 0, 4096)",
        "os.close(os.open('old', os.O_WRONLY | os.O_TRUNC))",
        "os.truncate('old', 2)",
        "os.unlink('old')",
        "os.rename('old', 'new')",
        "os.close(os.open('new', W)); os.rename('new', 'old')",
        "os.pwrite(f, b'x', 0); os.pwrite(f, b'y', 0); os.ftruncate(f, 1); os.pwrite(f, b'zz', 1); os.rename('old', 'new')",
    ],
)
def test_what_was_not_synced_is_as_it_was(lab: Lab, change: str) -> None:
    lab.run(f"f = os.open('old', W); {change}")
    assert lab.files() != {"old": b"0123456789"}, "the program changed nothing"
    assert lab.disk.lose().undone > 0
    assert lab.files() == {"old": b"0123456789"}


@pytest.mark.parametrize("sync", ["os.fsync(f)", "os.fdatasync(f)"])
def test_what_was_synced_stays_and_what_came_after_does_not(lab: Lab, sync: str) -> None:
    lab.run(
        f"f = os.open('old', W); os.pwrite(f, b'ab', 0); {sync}; os.pwrite(f, b'XY', 4); os.pwrite(f, b'Z', 10)"
    )
    assert lab.files() == {"old": b"ab23XY6789Z"}
    assert lab.disk.lose() == Loss(undone=2, syncs=1)
    assert lab.files() == {"old": b"ab23456789"}


def test_a_synced_file_keeps_its_name_and_an_unsynced_one_was_never_there(lab: Lab) -> None:
    lab.run(
        "f = os.open('kept', W); os.write(f, b'k'); os.fsync(f); g = os.open('gone', W); os.write(g, b'g')"
    )
    lab.disk.lose()
    assert lab.files() == {"kept": b"k", "old": b"0123456789"}


def test_a_rename_is_kept_by_a_sync_of_its_folder_and_its_content_is_not(lab: Lab) -> None:
    lab.run(
        "f = os.open('new', W); os.write(f, b'never synced'); os.rename('new', 'old'); d = os.open('.', os.O_RDONLY); os.fsync(d)"
    )
    lab.disk.lose()
    assert lab.files() == {"old": b""}, "the classical mistake: rename before fsync"


def test_a_removal_is_kept_by_a_sync_of_its_folder(lab: Lab) -> None:
    lab.run("os.unlink('old'); os.fsync(os.open('.', os.O_RDONLY))")
    lab.disk.lose()
    assert lab.files() == {}


def test_after_the_cut_a_sync_keeps_nothing(lab: Lab) -> None:
    lab.disk.cut()
    lab.run("f = os.open('old', W); os.pwrite(f, b'ab', 0); os.fsync(f)")
    assert lab.disk.lose() == Loss(undone=1, syncs=0)
    assert lab.files() == {"old": b"0123456789"}


def test_what_was_settled_stays_and_power_comes_back_with_the_loss(lab: Lab) -> None:
    lab.run("f = os.open('old', W); os.pwrite(f, b'ab', 0)")
    lab.disk.settle()
    lab.disk.cut()
    lab.disk.lose()
    lab.run("f = os.open('old', W); os.pwrite(f, b'cd', 2); os.fsync(f)")
    lab.disk.lose()
    assert lab.files() == {"old": b"abcd456789"}


def test_a_file_opened_for_direct_writing_is_restored_as_well(lab: Lab) -> None:
    (lab.data / "old").write_bytes(bytes(8192))
    lab.run(
        "import mmap\nm = mmap.mmap(-1, 4096); m.write(b'x' * 4096)\n"
        "f = os.open('old', os.O_WRONLY | os.O_DIRECT); os.pwrite(f, m, 4096)"
    )
    assert lab.files()["old"][4096:] == b"x" * 4096
    lab.disk.lose()
    assert lab.files() == {"old": bytes(8192)}


def test_without_its_words_the_preload_changes_nothing(tmp_path: Path) -> None:
    program = "import os; f = os.open('file', os.O_RDWR | os.O_CREAT); os.write(f, b'x'); os.fsync(f)"
    environment = {**os.environ, "LD_PRELOAD": str(compiled("power"))}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_that_a_sync_was_asked_for_is_known_whether_it_came_in_time_or_too_late(lab: Lab) -> None:
    before = time.monotonic()
    lab.run("f = os.open('old', W); os.pwrite(f, b'ab', 0); os.fsync(f)")
    between = time.monotonic()
    lab.disk.cut()
    lab.run("f = os.open('old', W); os.pwrite(f, b'cd', 2); os.fdatasync(f); os.pwrite(f, b'ef', 4)")
    first, second = lab.disk.syncs()
    assert before < first < between < second < time.monotonic()
    assert lab.disk.lose().syncs == 1
    assert lab.disk.syncs() == []


def test_a_note_whose_writer_died_in_the_middle_is_no_change(lab: Lab) -> None:
    lab.run("f = os.open('old', W); os.pwrite(f, b'ab', 0)")
    notes = lab.data.parent / "notes"
    notes.write_bytes(notes.read_bytes() + notes.read_bytes()[:-1])
    assert lab.disk.lose() == Loss(undone=1, syncs=0)
    assert lab.files() == {"old": b"0123456789"}
