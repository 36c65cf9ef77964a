"""What the live settings of an SQLite file mean for the guarantee, each weakness with its remedy."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, Final

from semel.store import Facts

__all__ = ["has_reset_bug", "read_facts"]

_FULL: Final = 2
_LEVELS: Final = ("OFF", "NORMAL", "FULL", "EXTRA")
_NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "fuse.sshfs", "fuse.glusterfs"}
)
_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
# https://sqlite.org/wal.html#walresetbug: fixed in 3.51.3, and in patch releases of two older lines.
_RESET_BUG_FIXED: Final = (3, 51, 3)
_PATCHED_LINES: Final = {(3, 44): 6, (3, 50): 7}


def read_facts(db: sqlite3.Connection, path: str) -> Facts:
    """Read them on a connection that is set up as the writing one is."""
    level = int(_pragma(db, "synchronous"))
    journal = str(_pragma(db, "journal_mode"))
    system = _file_system(path)
    warnings = []
    durable = level >= _FULL and system not in _MEMORY
    if level < _FULL:
        warnings.append(
            f"synchronous is {_LEVELS[level]}: a power loss may undo acknowledged writes; set it to FULL"
        )
    if system in _MEMORY:
        warnings.append(f"the file is on {system}, in memory: it ends with the machine; move it to a disk")
    if system in _NETWORK:
        warnings.append(
            f"the file is on {system}: SQLite's log needs a local disk, and its locks may not hold here; move it"
        )
    return Facts(
        store="sqlite",
        version=sqlite3.sqlite_version,
        settings={"journal_mode": journal, "synchronous": _LEVELS[level], "file_system": system or "unknown"},
        durable_writes=durable,
        coherent=system not in _NETWORK,  # locks that do not hold let two owners in
        warnings=tuple(warnings),
    )


def _pragma(db: sqlite3.Connection, name: str) -> Any:
    return db.execute(f"PRAGMA {name}").fetchall()[0][0]


def has_reset_bug(release: str) -> bool:
    """Whether a checkpoint beside a writer may lose pages in this release of SQLite."""
    version = tuple(map(int, release.split(".")))
    patch = _PATCHED_LINES.get((version[0], version[1]))
    return version < _RESET_BUG_FIXED and (patch is None or version[2] < patch)


def _file_system(path: str, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that holds the path; "" where the operating system does not tell (not Linux)."""
    try:
        lines = mounts.read_text("utf-8").splitlines()
    except OSError:
        return ""
    best, found = -1, ""
    for line in lines:
        # 36 35 98:0 /root /mount/point options … - type source
        left, _, right = line.partition(" - ")
        point = left.split(" ")[4].replace("\\040", " ").rstrip("/")
        if (path == point or path.startswith(f"{point}/")) and len(point) >= best:
            best, found = len(point), right.split(" ")[0]
    return found
