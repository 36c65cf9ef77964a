"""An async handler is cancelled where it waits: the report names that place, and says where a cancel cannot strike."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from semel.testing.plugin_report import Report, merged
from semel.testing.plugin_tries import Try
from semel.testing.plugin_windows import Window
from tests.plugin.book import Book


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


def places(report: Report, verdict: str) -> list[str]:
    """Lines of source at which a cancel arrived and which ended so."""
    return [
        each.window.text
        for each in report.tries
        if (each.fault, each.verdict) == ("interrupt", verdict) and ".py:" in each.window.name
    ]


def test_a_cancel_is_told_where_it_arrived_and_not_where_it_was_sent(book: Book) -> None:
    async def handle(key: str) -> None:
        if not book.count(key):
            await asyncio.sleep(0.001)
        book.write(key)
        await asyncio.sleep(0.002)

    report = book.prove(handle, "interrupt")
    assert places(report, "once") == ["await asyncio.sleep(0.001)"], str(report)
    assert places(report, "doubled") == ["await asyncio.sleep(0.002)"], str(report)
    assert report.windows("missed") == ("handler returned",)
    assert not report.missed
    assert len(report.tries) == 4, "and called twice: what arrived at one place is one try"


def test_a_cancel_that_finds_no_await_is_missed_and_not_once(book: Book) -> None:
    async def handle(key: str) -> None:
        (book.folder / key).write_text("x")

    report = book.prove(handle, "interrupt")
    assert {each.verdict for each in report.tries if each.fault == "interrupt"} == {"missed"}
    assert not any((report.holds, report.never_doubles, report.never_loses)), (
        "nothing struck is nothing shown"
    )
    assert "nothing was struck: this handler never awaits anything" in str(report)


def test_a_missed_cancel_is_no_failure_of_a_handler_that_other_faults_have_met(book: Book) -> None:
    async def handle(key: str) -> None:
        (book.folder / key).write_text("x")

    report = book.prove(handle, "kill", "interrupt")
    assert report.holds, str(report)
    assert report.verdict("handler called", "interrupt") == "missed"
    assert "missed: no await follows" in str(report)
    assert "make it deterministic" not in str(report)


def test_a_cancel_that_the_handler_swallows_has_struck(book: Book) -> None:
    async def handle(key: str) -> None:
        try:
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            book.write(key)
        book.write(key)

    report = book.prove(handle, "interrupt")
    assert places(report, "doubled") == ["await asyncio.sleep(0.001)"], str(report)


def test_a_cancel_of_tasks_that_are_waited_for_is_told_where_they_wait(book: Book) -> None:
    async def charge(key: str) -> None:
        book.write(key)
        await asyncio.sleep(0.003)

    async def handle(key: str) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(charge(key))

    report = book.prove(handle, "interrupt")
    assert "await asyncio.sleep(0.003)" in places(report, "doubled"), str(report)
    assert "book.write(key)" not in places(report, "doubled"), str(report)


def test_tries_that_arrive_at_one_place_are_one_and_the_worst_is_told() -> None:
    first, second = Window("first"), Window("second")
    found = [
        Try(window=second, fault="interrupt", effects=1, verdict="once"),
        Try(window=first, fault="interrupt", effects=1, verdict="missed", too_late=True),
        Try(window=first, fault="interrupt", effects=1, verdict="once"),
        Try(window=second, fault="kill", effects=1, verdict="once"),
        Try(window=first, fault="kill", effects=1, verdict="once"),
        Try(window=second, fault="interrupt", effects=2, verdict="doubled"),
        Try(window=Window("called twice"), fault="none", effects=1, verdict="once"),
    ]
    assert [(each.window.name, each.fault, each.verdict) for each in merged((first, second), found)] == [
        ("first", "kill", "once"),
        ("first", "interrupt", "once"),
        ("second", "kill", "once"),
        ("second", "interrupt", "doubled"),
        ("called twice", "none", "once"),
    ]
