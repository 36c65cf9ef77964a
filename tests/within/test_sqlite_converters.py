"""R27: the caller's sqlite3 connection converts columns by their declared types. Ours are read as they are stored."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from semel import Semel, current_run

CONVERTERS: dict[str, Any] = {
    "REAL": lambda stored: Decimal(stored.decode()),
    "INTEGER": lambda stored: Decimal(stored.decode()),
    "TEXT": bytearray,
    "BLOB": bytearray,
}


@pytest.fixture(name="connection")
def _connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    known: dict[str, Any] = vars(sqlite3)["converters"]  # register_converter cannot be taken back
    for name, convert in CONVERTERS.items():
        monkeypatch.setitem(known, name, convert)
    detect = sqlite3.PARSE_DECLTYPES | sqlite3.PARSE_COLNAMES
    with closing(sqlite3.connect(tmp_path / "shop.db", detect_types=detect)) as connection:
        yield connection


@pytest.fixture(name="once")
def _once(tmp_path: Path) -> Iterator[Semel]:
    with closing(Semel(f"sqlite:///{tmp_path / 'shop.db'}", timeout=20)) as once:
        yield once


def test_R27_converters_do_no_harm_to_a_run_that_is_taken_over(
    once: Semel, connection: sqlite3.Connection
) -> None:
    def stops_half_way() -> None:
        current_run().step("reserve", str, 1)
        raise ValueError("later")

    with pytest.raises(ValueError, match="later"):
        once.execute("k1", stops_half_way)
    assert once.within(connection).execute("k1", lambda: 5).attempt == 2
    connection.commit()
    assert once.execute("k1", stops_half_way).value == 5


def test_R27_converters_do_no_harm_to_a_replay_or_a_peek(once: Semel, connection: sqlite3.Connection) -> None:
    once.execute("k1", lambda: b"\0\xff", retention=float("inf"))
    bound = once.within(connection)
    assert bound.execute("k1", lambda: b"").value == b"\0\xff"
    assert bound.peek("k1") == once.peek("k1")
    assert bound.peek("k2") is None
