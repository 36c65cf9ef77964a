"""Locks that are not of one key: a sleeper holds them against its heirs, against other tries and against the count."""

from __future__ import annotations

import fcntl
import os
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from semel.testing import plugin_tries
from semel.testing.plugin import _ENOUGH, _tried
from semel.testing.plugin_children import Child, Misuse
from semel.testing.plugin_options import checked
from semel.testing.plugin_tries import Case, Try, _count, _keeps_others_off, try_window
from semel.testing.plugin_windows import Fault, Window
from tests.plugin.book import OPTIONS, Book

pytestmark = pytest.mark.slow


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


def case_of(book: Book, **given: Any) -> Case:
    return checked(**{"run": book.note, "effects": book.count, **OPTIONS, **given})


# ------------------------------------------------------------------------------------------ other tries
def test_a_handler_with_one_lock_for_all_keys_is_not_stuck_because_tries_run_side_by_side(book: Book) -> None:
    def handle(key: str) -> None:
        with (book.folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (book.folder / key).write_text("x")
            time.sleep(0.005)

    report = book.prove(handle, "kill", "zombie", patience=2)
    assert report.holds, str(report)
    assert report.not_overtaken, str(report)


def test_a_zombie_sleeps_clearly_less_than_clients_go_on_calling(book: Book) -> None:
    assert case_of(book, patience=30).long_sleep == 15
    short = case_of(book, patience=0.1)
    assert short.long_sleep == short.sleep, "but until a lease is over"


@pytest.mark.parametrize("lanes, found", [(4, "once"), (1, "stuck")])
def test_what_is_stuck_beside_others_is_tried_again_alone(
    book: Book, monkeypatch: pytest.MonkeyPatch, lanes: int, found: str
) -> None:
    def tried(case: Case, window: Window, fault: Fault) -> Try:
        book.write("tries")
        verdict = "stuck" if book.count("tries") == 1 else "once"
        return Try(window=window, fault=fault, effects=1, verdict=verdict)

    monkeypatch.setattr(plugin_tries, "try_window", tried)
    assert _tried(case_of(book), [(Window("w"), "kill")], lanes=lanes)[0].verdict == found


def test_a_handler_that_is_stuck_by_itself_is_not_waited_for_in_every_window_again(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried(case: Case, window: Window, fault: Fault) -> Try:
        book.write("tries")
        return Try(window=window, fault=fault, effects=1, verdict="stuck")

    monkeypatch.setattr(plugin_tries, "try_window", tried)
    found = _tried(case_of(book), [(Window(f"w{at}"), "kill") for at in range(10)], lanes=2)
    assert [each.verdict for each in found[:10]] == ["stuck"] * 10
    assert book.count("tries") == 10 + _ENOUGH


def test_a_lock_that_refuses_another_key_too_may_be_another_trys(book: Book) -> None:
    def refuse(key: str) -> None:
        raise BlockingIOError("busy")

    assert _keeps_others_off(case_of(book, run=refuse))
    assert not _keeps_others_off(case_of(book))
    assert not _keeps_others_off(case_of(book, run=refuse, reset=lambda: None)), "there is no other try"


# -------------------------------------------------------------------------------------------- the count
def marked(book: Book, key: str) -> bool:
    mark = book.folder / f"{key}.mark"
    before = mark.exists()
    mark.touch()
    return before


def test_a_count_that_waits_for_the_sleeper_is_made_when_it_is_awake(book: Book) -> None:
    ledger = book.folder / "ledger"

    def handle(key: str) -> None:
        if not marked(book, key):
            with ledger.open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                (book.folder / key).write_text("x")

    def count(key: str) -> int:
        signal.alarm(
            20
        )  # a child of its own: what waits for ever ends it with SIGALRM, and the proof with it
        with ledger.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            return book.count(key)

    report = book.prove(handle, "zombie", effects=count, patience=3, lanes=1)
    held = '(book.folder / key).write_text("x")'
    assert report.verdict(held, "zombie") == "once", str(report)
    assert {each.window.text for each in report.tries if not each.overtaken} >= {held}
    assert report.verdict("fcntl.flock(lock, fcntl.LOCK_EX)", "zombie") == "lost", "it was counted there"


def test_a_count_that_the_sleeper_locks_out_is_no_misuse(book: Book) -> None:
    def opened() -> Any:
        return closing(sqlite3.connect(book.folder / "shop.db", timeout=0.1, isolation_level=None))

    def handle(key: str) -> None:
        if not marked(book, key):
            with opened() as db:
                db.execute("BEGIN EXCLUSIVE")
                db.execute("INSERT INTO orders VALUES (?)", (key,))
                db.execute("COMMIT")

    def count(key: str) -> int:
        with opened() as db:
            return int(db.execute("SELECT count(*) FROM orders WHERE id = ?", (key,)).fetchone()[0])

    with opened() as db:
        db.execute("CREATE TABLE orders (id TEXT)")
    report = book.prove(handle, "zombie", effects=count, patience=3)
    assert report.verdict('db.execute("COMMIT")', "zombie") == "once", str(report)
    assert report.not_overtaken


def test_a_count_is_made_again_while_another_lanes_sleeper_may_be_in_its_way(book: Book) -> None:
    def count(key: str) -> int:
        book.write("asked")
        if book.count("asked") < 3:
            raise BlockingIOError("busy")
        return 7

    assert _count(case_of(book, effects=count), "key") == 7
    assert book.count("asked") == 3


def test_a_count_that_goes_on_failing_is_misuse(book: Book) -> None:
    def count(key: str) -> int:
        raise LookupError("no such book")

    with pytest.raises(Misuse, match=r"effects\(\) fails: LookupError: no such book"):
        _count(case_of(book, effects=count, patience=0.2), "key")


def test_a_count_that_does_not_end_is_misuse(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_tries, "_LONGEST_COUNT", 0.2)
    with pytest.raises(Misuse, match=r"effects\(\) fails: it did not end"):
        _count(case_of(book, effects=lambda key: time.sleep(60), patience=0.2), "key")


# ------------------------------------------------------------------------------------- a worker that hangs
def test_a_child_that_hangs_was_struck_all_the_same(book: Book) -> None:
    def hang(child: Child) -> None:
        child.say_struck(Window("w"))
        book.note("struck")
        time.sleep(60)

    child = Child(hang)
    while not book.count("struck"):
        time.sleep(0.003)
    strike, words = child.words(time.monotonic())
    assert strike is not None
    assert strike.place == Window("w")
    assert words.late
    assert words.error.startswith("it did not end: raise patience=")


def test_a_child_that_stops_when_nobody_will_wake_it_is_not_left_behind() -> None:
    def stop(child: Child) -> None:
        child.say_struck(Window("w"))
        signal.raise_signal(signal.SIGSTOP)

    child = Child(stop)
    strike, words = child.words(time.monotonic() + 30)
    assert strike is not None
    assert words.late
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_a_zombie_that_hangs_when_it_wakes_is_stuck_and_not_missed(book: Book) -> None:
    def handle(key: str) -> None:
        known = book.count(key)
        if book.count(key) != known:  # overtaken
            time.sleep(60)
        book.note(key)

    report = book.prove(handle, "zombie", patience=1.5, lanes=1, without=["tests.plugin.book"])
    assert report.verdict("if book.count(key) != known:  # overtaken", "zombie") == "stuck", str(report)
    assert not report.missed
    assert "error: the struck worker: it did not end: raise patience=" in str(report)
    assert "or the struck worker did not end" in str(report)


def test_why_a_worker_did_not_come_to_its_window_is_told(book: Book) -> None:
    def refuse(key: str) -> None:
        raise BlockingIOError("busy")

    found = try_window(case_of(book, run=refuse, patience=0.2), Window("nowhere"), "kill")
    assert (found.verdict, found.error) == ("missed", "BlockingIOError: busy")
