"""What somebody was told counts: a success that is none, a failure for good, and a zombie that nobody could take over from."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from semel import AsyncSemel, InProgress, Semel
from semel.testing import plugin_tries
from semel.testing.plugin import _tried
from semel.testing.plugin_children import _lock
from semel.testing.plugin_options import checked
from semel.testing.plugin_report import Report
from semel.testing.plugin_tries import Case, Try
from semel.testing.plugin_windows import Fault, Window
from tests.plugin.book import OPTIONS, Book

pytestmark = pytest.mark.slow


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


@pytest.fixture
def once(book: Book) -> Iterator[Semel]:
    with Semel(f"sqlite:///{book.folder / 'semel.db'}") as once:
        yield once


def test_a_struck_worker_that_says_ok_with_nothing_done_has_lost_the_effect(book: Book, once: Semel) -> None:
    def handle(key: str) -> str:
        with contextlib.suppress(BaseException):
            once.execute(key, book.note, key)
        return "ok"

    report = book.prove(handle, "interrupt")
    assert report.verdict("claim.won", "interrupt") == "lost", str(report)
    assert report.verdict("run.returned", "interrupt") == "once", str(report)
    assert "the struck worker itself told its client that it succeeded" in str(report)


def test_so_has_a_cancelled_one(book: Book) -> None:
    async def effect(key: str) -> None:
        await asyncio.sleep(0.001)
        book.note(key)

    async def handle(key: str) -> str:
        async with AsyncSemel(f"sqlite:///{book.folder / 'semel.db'}") as once:
            with contextlib.suppress(BaseException):
                await once.execute(key, effect, key)
        return "ok"

    report = book.prove(handle, "interrupt")
    assert report.verdict("await asyncio.sleep(0.001)", "interrupt") == "lost", str(report)


def test_a_worker_that_says_that_it_was_interrupted_has_lost_nothing(book: Book, once: Semel) -> None:
    report = book.prove(lambda key: once.execute(key, book.note, key), "interrupt")
    assert report.holds, str(report)


class Lease:
    """A lock as people make them at home: it has a time limit, and no fence."""

    def __init__(self, book: Book, limit: float) -> None:
        self.book, self.limit = book, limit

    def handle(self, key: str) -> None:
        if self.book.count(f"{key}.done"):
            return
        if not self.take(key):
            raise BlockingIOError("busy")
        self.book.write(key)
        self.book.note(f"{key}.done")

    def take(self, key: str) -> bool:
        lock = self.book.folder / f"{key}.lock"
        try:
            lock.touch(exist_ok=False)
        except FileExistsError:
            if time.time() - lock.stat().st_mtime < self.limit:
                return False
            lock.touch()
        return True


def test_a_zombie_sleeps_until_a_lock_of_the_handlers_own_is_over(book: Book) -> None:
    report = book.prove(Lease(book, 2.0).handle, "zombie")
    assert report.verdict("self.book.write(key)", "zombie") == "doubled", str(report)
    assert not report.not_overtaken, str(report)


def test_a_zombie_that_nobody_could_take_over_from_is_no_proof_and_the_summary_says_so(book: Book) -> None:
    report = book.prove(Lease(book, 600.0).handle, "zombie", patience=1.2)
    assert report.not_overtaken
    waited = [each for each in report.tries if not each.overtaken]
    zombies = [each for each in report.tries if each.fault == "zombie"]
    said = f"in {len(waited)} of {len(zombies)} zombie tries nobody could take over: they show nothing about a zombie"
    assert said in repr(report)
    assert "* nobody could take over while it slept" in str(report)


@pytest.mark.parametrize("lanes, found", [(4, "doubled"), (1, "once")])
def test_a_zombie_whose_heirs_met_a_lock_is_tried_again_where_it_may_have_been_another_trys(
    book: Book, monkeypatch: pytest.MonkeyPatch, lanes: int, found: str
) -> None:
    def tried(case: Case, window: Window, fault: Fault) -> Try:
        book.write("tries")
        crowded = book.count("tries") == 1
        verdict = "once" if crowded else "doubled"
        return Try(
            window=window, fault=fault, effects=1, verdict=verdict, overtaken=not crowded, blocked=crowded
        )

    monkeypatch.setattr(plugin_tries, "try_window", tried)
    case = checked(**OPTIONS, run=book.note, effects=book.count)
    assert _tried(case, [(Window("w"), "zombie")], lanes=lanes)[0].verdict == found


@pytest.mark.parametrize(
    "error, lock",
    [
        (InProgress("held by an open transaction"), "key"),
        (InProgress("leased", attempt=1, retry_after=0.2), ""),
        (BlockingIOError("busy"), ""),
    ],
)
def test_an_open_transaction_has_no_time_limit_that_a_zombie_could_outsleep(
    error: Exception, lock: str
) -> None:
    assert _lock(error) == lock
    behind = RuntimeError("no")
    behind.__context__ = error
    assert _lock(behind) == lock


def test_nor_has_the_writer_of_a_sqlite_file(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as writer:
        writer.execute("BEGIN IMMEDIATE")
        with contextlib.closing(sqlite3.connect(tmp_path / "shop.db", timeout=0)) as other:
            with pytest.raises(sqlite3.OperationalError) as raised:
                other.execute("BEGIN IMMEDIATE")
            assert _lock(raised.value) == "store"


def test_a_failure_for_good_over_an_effect_that_is_there_is_told_as_such(book: Book, once: Semel) -> None:
    def effect(key: str) -> None:
        if book.count(key):
            raise ValueError("there is such an order")
        book.write(key)

    report = book.prove(lambda key: once.execute(key, effect, key, on_error="replay"))
    assert report.verdict("run.returned", "kill") == "failed", str(report)
    assert report.verdict("claim.won", "kill") == "once"
    assert "1 FAILED" in str(report)
    assert "the effect is there and the next attempt recorded a failure" in str(report)
    assert "held for a person" not in str(report)
    assert report.never_doubles
    assert not report.never_loses


def test_a_report_without_such_zombies_has_no_reservation() -> None:
    tries = (Try(window=Window("w"), fault="zombie", effects=1, verdict="once"),)
    assert repr(Report(handler="h", expected=1, tries=tries, faults=("zombie",), seconds=0.0)) == (
        "<h: exactly once in all 1 tries (0.0 s)>"
    )
