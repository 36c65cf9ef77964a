"""The clock of a SQL server, in Unix seconds: times that are compared with each other are all its own."""

from __future__ import annotations

from typing import Final

__all__ = ["SERVER_CLOCK"]

SERVER_CLOCK: Final = {
    "postgresql": "extract(epoch from clock_timestamp())::float8",
    "mysql": "unix_timestamp(now(6)) + 0e0",
    "mariadb": "unix_timestamp(now(6)) + 0e0",
    "sqlite": "((julianday('now') - 2440587.5) * 86400.0)",
}
