"""Power loss: what was written and not synced is undone, from the notes that the preload `power.c` made."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from semel.testing.services import home

__all__ = ["Disk", "Loss"]

_HEAD: Final = struct.Struct("=8q")


class Loss(NamedTuple):
    """What a power loss did: changes undone, and syncs that had kept others."""

    undone: int
    syncs: int


class _Note(NamedTuple):
    kind: str
    at: float
    inode: int
    offset: int
    length: int
    size: int
    path: str
    data: bytes


class Disk:
    """The files below `root`, as processes with `environment` change them."""

    def __init__(self, root: Path, log: Path) -> None:
        self.root, self._log = root, log
        self._out = log.with_name(f"{log.name}.out")
        self._graves = log.with_name(f"{log.name}.graves")
        self._graves.mkdir()
        home.give(self._graves)

    @property
    def environment(self) -> dict[str, str]:
        return {"SEMEL_POWER_LOG": str(self._log), "SEMEL_POWER_ROOT": str(self.root)}

    def settle(self) -> None:
        """Everything that was written so far is on the disk: the kernel had the time."""
        if self._log.exists():
            os.truncate(self._log, 0)
        for grave in self._graves.iterdir():
            grave.unlink()

    def cut(self) -> None:
        """From now on no sync reaches the disk, although the processes go on."""
        self._out.touch()

    def syncs(self) -> list[float]:
        """When syncs were asked for, in time or too late, on the monotonic clock: an answer waited for one of them, or for
        nothing. Since the last loss."""
        return [note.at for note in self._notes() if note.kind in "SAL"]

    def lose(self) -> Loss:
        """Undo what was not synced. The processes that wrote must be dead."""
        undo = _Undo(self.root, self._graves)
        for note in reversed(list(self._notes())):
            undo.look(note)
        self._out.unlink(missing_ok=True)
        self.settle()
        return Loss(undo.undone, undo.syncs)

    def _notes(self) -> Iterator[_Note]:
        text = self._log.read_bytes() if self._log.exists() else b""
        place = 0
        while place + _HEAD.size <= len(text):
            kind, at, inode, offset, length, size, path, data = _HEAD.unpack_from(text, place)
            place += _HEAD.size + path
            if place + data > len(text):
                return  # its writer died in the middle, or is not done: the change itself comes after its note
            name = os.fsdecode(text[place - path : place])
            yield _Note(chr(kind), at / 1e9, inode, offset, length, size, name, text[place : place + data])
            place += data


class _Undo:
    """Goes backwards through the notes; a sync that it has met protects what came before it."""

    def __init__(self, root: Path, graves: Path) -> None:
        self.undone = self.syncs = 0
        self._graves = graves
        self._synced: set[int] = set()
        self._folders: set[str] = set()
        self._all = False
        # By inode, not by name: a file that was renamed keeps its notes.
        self._files = {file.stat().st_ino: file for file in _walk(graves)}
        self._files |= {file.stat().st_ino: file for file in _walk(root)}

    def look(self, note: _Note) -> None:
        if note.kind == "L":
            return
        if note.kind in "SA":
            self.syncs += 1
            self._synced.add(note.inode)
            self._folders.add(note.path)
            self._all = self._all or note.kind == "A"
        elif not self._kept(note):
            self.undone += 1
            self._undo(note)

    def _kept(self, note: _Note) -> bool:
        name = os.fsdecode(note.data) if note.kind == "R" else note.path
        named = note.kind in "CRU" and str(Path(name).parent) in self._folders
        # As with ext4 and XFS, a file's own sync keeps its name as well; that it is gone is kept by its folder's only.
        return self._all or named or (note.kind != "U" and note.inode in self._synced)

    def _undo(self, note: _Note) -> None:
        file = self._files.get(note.inode)
        match note.kind:
            case "W" | "T" if file is not None:
                with file.open("r+b") as opened:
                    opened.seek(note.offset)
                    opened.write(note.data)
                    if note.kind == "T" or note.offset + note.length > note.size:
                        opened.truncate(note.size)
            case "C" if file is not None:
                file.unlink(missing_ok=True)
            case "R" if file is not None:
                target = Path(os.fsdecode(note.data))
                self._files[note.inode] = file.rename(note.path)
                if note.offset:
                    self._back(note.offset, target)
            case "U":
                self._back(note.offset, Path(note.path))

    def _back(self, grave: int, path: Path) -> None:
        if not path.exists():  # else a newer file's name was kept, and so was the loss of this one's
            os.link(self._graves / str(grave), path)
            self._files[path.stat().st_ino] = path


def _walk(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
