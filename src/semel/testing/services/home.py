"""Where private servers live: one folder per launching process, cleared when that process is gone.

The folder is removed, and every server in it ended, by a watchdog process, also after SIGTERM or SIGKILL of the
launcher. Should the watchdog itself be killed, the next process that starts a server clears what is left.
"""

from __future__ import annotations

import atexit
import os
import pwd
import random
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from semel.testing.services import watchdog
from semel.testing.services.machine import FOLDER

UNPRIVILEGED = "nobody"
"""The account servers run as when the launcher is root. PostgreSQL and PgBouncer refuse root; no server needs it."""

_lock = threading.Lock()
# By process id, too: a forked child gets a home and a watchdog of its own.
_homes: dict[tuple[int, Path], Path] = {}
_watchdogs: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True, slots=True)
class Account:
    """Who runs a server: None means the current user."""

    uid: int | None = None
    gid: int | None = None


def account() -> Account:
    """The account for servers started by this process."""
    if os.geteuid() != 0:
        return Account()
    entry = pwd.getpwnam(UNPRIVILEGED)
    return Account(entry.pw_uid, entry.pw_gid)


def home() -> Path:
    """This process's folder, made on first use together with its watchdog; one for each place that servers are told to live in."""
    with _lock:
        pid, parent = os.getpid(), _parent()
        if (pid, parent) not in _homes:
            _reap_stale(parent)
            start = watchdog.started_at(pid)
            path = Path(tempfile.mkdtemp(prefix=f"semel-{os.geteuid()}.{pid}.{start}.", dir=parent))
            path.chmod(0o711)  # traversable for the unprivileged account, not listable
            _homes[pid, parent] = path
            _watchdogs.append(_start_watchdog(path, pid, start))
            # It outlives this process on purpose: Popen must not complain about that when the interpreter ends.
            atexit.register(_let_go)
        return _homes[pid, parent]


def _let_go() -> None:
    for dog in _watchdogs:
        dog.returncode = 0


def new_folder(name: str) -> Path:
    """A new empty folder, owned by the account that runs servers."""
    path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=home()))
    give(path)
    return path


def give(path: Path) -> None:
    """Hand `path`, with everything below it, to the account that runs servers."""
    owner = account()
    if owner.uid is None or owner.gid is None:
        return
    for folder, _, files in os.walk(path):
        os.chown(folder, owner.uid, owner.gid)
        for file in files:
            os.chown(Path(folder, file), owner.uid, owner.gid, follow_symlinks=False)


def copy(source: Path, target: Path) -> None:
    """Copy a folder and hand the copy to the account that runs servers."""
    target.mkdir(parents=True, exist_ok=True)
    # A thousand files: several times as fast as shutil.
    subprocess.run(["cp", "-a", f"{source}/.", str(target)], check=True, capture_output=True)
    give(target)


def spawn(
    argv: list[str], *, folder: Path, log: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a server process in `folder` as the unprivileged account, output to `log`.

    It gets a session of its own: Ctrl-C in the terminal reaches the launcher, which stops its servers in order.
    """
    owner = account()
    with log.open("ab") as output:
        return subprocess.Popen(
            argv,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_clean_environment(), "HOME": str(folder), **(env or {})},
            start_new_session=True,
            user=owner.uid,
            group=owner.gid,
            extra_groups=None if owner.uid is None else [],
        )


def free_port(*, bus: bool = False) -> int:
    """A TCP port of 127.0.0.1 that nobody listens on; with `bus` also the one 10,000 above it.

    The port lies below the range that the kernel gives to outgoing connections. Inside that range a client that keeps
    trying to reach a stopped server may be connected to itself, and then the server cannot come back to its port. For as long
    as this process lives no other launcher is given it: a server that is down for a while finds it free.
    """
    for _ in range(1000):
        port = random.randint(10_000, 21_999)  # noqa: S311  # spreads launchers, protects nothing
        if _is_free(port) and (not bus or _is_free(port + 10_000)) and _reserve(port):
            return port
    raise RuntimeError("no free TCP port between 10000 and 22000 on 127.0.0.1; end what listens there")


def _reserve(port: int) -> bool:
    """Whether the port is this process's from now on: a name that the kernel keeps for it, and forgets with it."""
    if sys.platform != "linux":
        return True  # such names are Linux's; elsewhere two launchers may meet
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0semel-port-{port}")
    except OSError:
        mark.close()
        return False
    mark.detach()  # open for as long as the process is
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _parent() -> Path:
    """The folder that SEMEL_SERVERS_FOLDER names, else the temporary one; /tmp when root's own one cannot be entered by the
    unprivileged account."""
    path = Path(os.environ.get(FOLDER) or tempfile.gettempdir()).resolve()
    reachable = all(folder.stat().st_mode & stat.S_IXOTH for folder in (path, *path.parents))
    return path if os.geteuid() != 0 or reachable else Path("/tmp")  # noqa: S108  # mkdtemp follows


def _reap_stale(parent: Path) -> None:
    # A server that was slow to die may have made its folders again, as the account that it ran as.
    owners = {os.geteuid(), account().uid}
    for path in parent.glob(f"semel-{os.geteuid()}.*.*.*"):
        _, pid, start, _ = path.name.split(".", 3)
        try:
            mine = path.lstat().st_uid in owners and not path.is_symlink()
        except FileNotFoundError:  # another launcher has just cleared it
            continue
        if mine and pid.isdigit() and watchdog.started_at(int(pid)) != start:
            watchdog.clear(path)


def _start_watchdog(path: Path, pid: int, start: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", watchdog.__file__, str(path), str(pid), start],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a signal to the launcher's group must not end it
    )


def _clean_environment() -> dict[str, str]:
    """Servers see a path and a locale, not the launcher's settings (PGDATA, MYSQL_HOME, LD_PRELOAD, …)."""
    return {
        "PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/usr/local/sbin",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
    }
