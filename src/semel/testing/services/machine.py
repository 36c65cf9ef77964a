"""What a machine has to offer to those who start many servers and connections on it."""

from __future__ import annotations

import contextlib
import os
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["FOLDER", "few_authorities", "in_memory", "on_disk", "under"]

FOLDER: Final = "SEMEL_SERVERS_FOLDER"
_MUCH_MEMORY: Final = 8 << 30


def in_memory() -> str:
    """Memory, where there is plenty of it, else nothing. A server begins as a thousand small files, and hundreds of servers come and
    go here: ext4 gives out no inode that was just deleted, and looks through all of those for each new file."""
    place = "/dev/shm"  # noqa: S108  # a folder of its own is made there
    try:
        state = os.statvfs(place)
        memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return ""
    room = min(state.f_bavail * state.f_frsize, memory)
    closed = state.f_flag & getattr(os, "ST_NOEXEC", 0)  # what is preloaded into servers lies there, too
    return "" if closed or room < _MUCH_MEMORY or not os.access(place, os.W_OK | os.X_OK) else place


@contextlib.contextmanager
def under(folder: str) -> Iterator[None]:
    """Servers that this process starts meanwhile, and the processes that it starts, keep their data below this folder."""
    before = os.environ.get(FOLDER)
    os.environ[FOLDER] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ[FOLDER]
        else:
            os.environ[FOLDER] = before


def on_disk() -> contextlib.AbstractContextManager[None]:
    """As `under`, for a server whose way with its disk is looked at: MariaDB, for one, maps its log where that is memory."""
    return under(tempfile.gettempdir())


def few_authorities(folder: Path) -> dict[str, str]:
    """An environment with one of the machine's certificate authorities instead of all: no private server has a certificate of
    theirs, but PyMySQL and httpx read them for each connection or client, 30 ms each time."""
    file = ssl.get_default_verify_paths().cafile
    text = Path(file).read_text("utf-8") if file else ""
    first, end, _ = text.partition("-----END CERTIFICATE-----")
    if not end:
        return {}
    kept = folder / "authority.pem"
    kept.write_text(f"{first}{end}\n", "utf-8")
    return {"SSL_CERT_FILE": str(kept), "SSL_CERT_DIR": str(folder / "none")}
