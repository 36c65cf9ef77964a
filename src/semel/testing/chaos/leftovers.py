"""What a process that lives for many schedules has open when one of them is over.

It keeps some connections on purpose, always the same few. One that is added by each schedule is a leak, of the harness or of
what it tests: after an hour the server refuses everybody, and the schedules that are told so are not those that leak.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections import Counter

__all__ = ["MOST", "connections", "too_many"]

MOST = 60
"""Connections of one process to one address. The pools of a worker's faces have ten, with each lease more two; a server takes 200."""


def connections() -> Counter[tuple[str, int]]:
    """TCP connections of this process that are not closed, by the address of the other end."""
    found: Counter[tuple[str, int]] = Counter()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are all that is needed
        with contextlib.suppress(OSError):  # it is not connected, or another thread has just closed it
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as same:
                    if same.family == socket.AF_INET:
                        found[same.getpeername()] += 1
    return found


def too_many() -> str:
    """What is wrong with them; empty when nothing is."""
    (place, count), *_ = connections().most_common(1) or [(("", 0), 0)]
    if count <= MOST:
        return ""
    return f"{count} open connections to {place[0]}:{place[1]}: schedules before this one have left theirs behind"
