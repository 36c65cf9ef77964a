"""Ends the servers of a process that is gone, however it went.

Run as a program (`python -I -S watchdog.py ROOT PID START`) it waits for the launcher to end and then clears ROOT.
A pidfd is used, not a pipe and not PR_SET_PDEATHSIG: a forked child of the launcher keeps a pipe open, and the parent
death signal fires when the *thread* that started the server ends.

Servers are found by their working directory, which lies below ROOT for each of them and for their children. A pid file
would be written after the start, too late for a launcher killed in between, and a process title overwrites the
environment that a marker could be read from. This file imports the standard library only: it starts in 20 ms.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

GRACE = 0.5
"""Seconds between the request to end and SIGKILL. PostgreSQL needs it to give back its shared memory."""


def started_at(pid: int) -> str:
    """When the process started, in clock ticks since boot; empty when it has ended. With the pid it is unique."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in {"Z", "X"} else fields[18]


def inhabitants(root: Path) -> Iterator[int]:
    """The processes whose working directory is `root` or lies below it."""
    own, place = str(os.getpid()), os.fspath(root)
    for name in os.listdir("/proc"):  # noqa: PTH208  # hundreds of processes, and somebody waits
        if not name.isdigit() or name == own:
            continue
        try:
            cwd = os.readlink(f"/proc/{name}/cwd").removesuffix(" (deleted)")  # noqa: PTH115
        except OSError:  # it ended meanwhile, or belongs to somebody else
            continue
        if cwd == place or cwd.startswith(f"{place}/"):
            yield int(name)


def kill_all(root: Path) -> bool:
    """SIGKILL to every process below `root`; whether there was one."""
    return signal_all(root, signal.SIGKILL)


def signal_all(root: Path, *signals: int) -> bool:
    """These signals to every process below `root`; whether there was one."""
    found = False
    for pid in inhabitants(root):
        found = True
        for number in signals:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                break
    return found


def clear(root: Path, *, grace: float = GRACE) -> None:
    """End every process below `root` (asked first, killed after `grace` seconds), then remove the folder."""
    deadline = time.monotonic() + grace
    # SIGINT is the fast shutdown of PostgreSQL and Redis; a stopped process must run on to see it.
    alive = signal_all(root, signal.SIGINT, signal.SIGCONT)
    while alive and time.monotonic() < deadline:
        time.sleep(0.01)
        alive = any(True for _ in inhabitants(root))
    while kill_all(root):
        time.sleep(0.005)
    for disk in _mounted(root):
        subprocess.run(["umount", "-l", disk], check=False)
    shutil.rmtree(root, ignore_errors=True)


def _mounted(root: Path) -> list[str]:
    """Small disks below `root` that a test has mounted there."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [place for place in (line.split()[1] for line in lines) if place.startswith(f"{root}/")]


def watch(root: Path, pid: int, start: str) -> None:
    """Wait until process `pid` is gone, then clear `root`."""
    with contextlib.suppress(
        OSError
    ):  # it is gone already, or a sandbox has no pidfd: the loop below decides
        descriptor = os.pidfd_open(pid)
        if started_at(pid) == start:
            select.select([descriptor], [], [])
    while started_at(pid) == start:
        time.sleep(0.05)
    clear(root)


if __name__ == "__main__":
    watch(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
