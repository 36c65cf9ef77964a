"""The process that imports everything once and forks the drivers. Started by the runner with a socket for each driver; where the
servers are it is told by a line on its standard input.

It has no threads and no connections, and neither have its drivers: what they fork begins clean.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
from contextlib import suppress
from functools import cache
from typing import NoReturn

import msgspec

from semel.testing.chaos.cells import PARTS, load, part_named
from semel.testing.chaos.driver import Job, run
from semel.testing.chaos.frames import receive, send
from semel.testing.chaos.places import Addresses, Places

__all__ = ["main"]

_DRIVERS = (
    "asyncio", "encodings.idna", "sqlite3", "redis", "redis.asyncio", "redis.asyncio.cluster", "hiredis", "psycopg", "asyncpg", "pymysql",
    "asyncmy", "sqlalchemy.ext.asyncio", "sqlalchemy.dialects.sqlite.aiosqlite", "aiosqlite",
    "semel.stores.sqlite", "semel.stores.redis", "semel.stores.postgres", "semel.stores.postgres.asyncpg",
    "semel.stores.postgres.psycopg", "semel.stores.mysql", "semel.within.drivers", "semel.within.alchemy",
    "semel.within.redis", "semel.stores.redis.loops", "semel.stores.redis.threads", "semel.stores.mysql.pools",
)  # fmt: skip


def main() -> None:
    PARTS[:] = msgspec.json.decode(sys.argv[1], type=list[str])
    chosen = msgspec.json.decode(sys.argv[3], type=list[str])
    numbers = [int(word) for word in sys.argv[4:]]
    load()
    if mutants := msgspec.json.decode(sys.argv[2], type=list[str]):
        importlib.import_module("semel.testing.chaos.planted").plant(mutants)
    for name in (*_DRIVERS, *(name for part in chosen for name in part_named(part).drivers)):
        with suppress(ImportError):  # a driver that is not installed has no cells that run
            importlib.import_module(name)
    _know_versions()
    if not (servers := sys.stdin.readline()):
        return  # they could not be started
    addresses = msgspec.json.decode(servers, type=Addresses)
    gc.collect()
    gc.disable()  # a collection would touch every page, and workers live for milliseconds
    gc.freeze()  # what is there now is not looked at again in each child: its pages stay shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner ends us by closing our sockets
    for number in numbers:
        if os.fork() == 0:
            for other in numbers:
                if other != number:
                    os.close(other)
            _drive(socket.socket(fileno=number), addresses)
    for number in numbers:
        os.close(number)
    for _ in numbers:
        os.wait()


def _know_versions() -> None:
    """redis-py reads its package's own metadata for each client, which takes longer than most of what is asked through it."""
    with suppress(ImportError, AttributeError):
        module = importlib.import_module("redis.utils")
        vars(module)["get_lib_version"] = cache(module.get_lib_version)


def _drive(line: socket.socket, addresses: Addresses) -> NoReturn:
    places = Places(addresses, line.fileno())
    try:
        while (text := receive(line)) is not None:
            send(line, msgspec.json.encode(run(msgspec.json.decode(text, type=list[Job]), places)))
            gc.collect()  # of this driver's own, which is little: what it keeps, every fork copies
    finally:
        places.close()
        os._exit(0)


if __name__ == "__main__":
    main()
