"""A signal's handler raises wherever Python looks for signals, one moment after the other: the file stays of use to everybody."""

from __future__ import annotations

import gc
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from semel import Semel
from semel.runtime import run_sync
from semel.stores.sqlite import bulk, cells, errors, file, records, schema, store, writer
from tests.ops.sqlite_lab import opened, win
from tests.ops.strike_lab import Late, strike_each_moment

# A coroutine that was made, and struck before it was awaited, is Python's business; so is a connection, which it closes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning"),
]

STRUCK = (bulk, cells, errors, file, records, schema, store, writer)


class Lab:
    """Faces on files, and what must be possible on a file whatever happened to one of its users."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = count()
        self._keys = count()
        self._kept: list[Semel] = []  # or the end of one is struck in place of what the next one does

    def new_file(self) -> None:
        self.path = self._folder / f"{next(self._files)}.db"
        self.new_face()

    def new_face(self) -> None:
        self.face = Semel(f"sqlite:///{self.path}", timeout=20, lease=60)
        self._kept.append(self.face)

    def execute(self) -> None:
        assert self.face.execute(f"key {next(self._keys)}", str, 1).value == "1"

    def is_of_use(self) -> None:
        """To the same face and to a stranger, before it is closed."""
        self.execute()
        with closing(sqlite3.connect(self.path, timeout=20, isolation_level=None)) as stranger:
            stranger.execute("BEGIN IMMEDIATE")
            stranger.execute("ROLLBACK")
        self.face.close()  # and whatever goes on in its background has ended

    def is_of_use_again(self) -> None:
        self.is_of_use()
        self.new_face()
        self.execute()


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    hasty = tuple(pragma.replace("= FULL", "= OFF") for pragma in file._PRAGMAS)
    monkeypatch.setattr(file, "_PRAGMAS", hasty)  # hundreds of files need not survive a power loss
    made = Lab(tmp_path)
    made.new_file()
    gc.collect()
    gc.disable()  # what is collected in the middle may be struck as well, and nobody would know
    yield made
    gc.enable()
    made.face.close()


def test_strikes_in_the_first_use_of_a_file_leave_it_of_use(lab: Lab) -> None:
    def look() -> None:
        assert lab.face.peek("key") is None

    def then() -> None:
        lab.is_of_use()
        lab.new_file()

    assert strike_each_moment(STRUCK, look, then=then) > 80


def test_strikes_in_a_first_execution_leave_the_file_of_use(lab: Lab) -> None:
    lab.execute()
    assert strike_each_moment(STRUCK, lab.execute, then=lab.is_of_use_again) > 80


def test_strikes_in_a_replay_leave_the_file_of_use(lab: Lab) -> None:
    def replay() -> None:
        assert lab.face.execute("again", str, 1).value == "1"

    replay()
    assert strike_each_moment(STRUCK, replay, then=lab.is_of_use_again) > 20


def test_strikes_in_a_closing_leave_the_file_of_use(lab: Lab) -> None:
    def then() -> None:
        lab.new_face()
        lab.is_of_use()
        lab.new_file()
        lab.execute()

    lab.execute()
    assert strike_each_moment(STRUCK, lambda: lab.face.close(), then=then) > 10


def test_strikes_in_a_glance_that_meets_trouble_leave_no_lock_behind(tmp_path: Path) -> None:
    here = opened(tmp_path / "semel.db")
    run_sync(win(here))

    def look(db: sqlite3.Connection) -> Any:
        if db is here._file._writing:
            raise sqlite3.OperationalError("trouble")
        return db.execute("SELECT 1").fetchall()

    def then() -> None:
        assert not here._file.writer.lock.locked()

    assert strike_each_moment((file, writer), lambda: here._file.glance(look), then=then) > 10
    run_sync(here.aclose())


def test_a_time_limit_that_strikes_a_claim_is_told_to_its_caller(tmp_path: Path) -> None:
    """An Exception that is no error of SQLite is not tried again: its caller would run the function after all."""
    here = opened(tmp_path / "semel.db")
    keys, won = count(), []

    def claim() -> None:
        won.append(run_sync(win(here, f"key {next(keys)}")))

    def then() -> None:
        assert not won
        claim()
        won.clear()

    claim()
    won.clear()
    assert strike_each_moment((bulk, cells, records), claim, then=then, error=Late) > 3
    run_sync(here.aclose())
