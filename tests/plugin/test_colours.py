"""A handler is awaited if its call gives something to await, whatever it wraps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest

from semel import AsyncSemel
from tests.plugin.book import Book


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


def as_async(fn: Callable[[str], Any]) -> Callable[[str], Any]:
    @wraps(fn)
    async def call(key: str) -> None:
        await asyncio.sleep(0.001)
        fn(key)

    return call


def as_sync(fn: Callable[[str], Any]) -> Callable[[str], Any]:
    @wraps(fn)
    def call(key: str) -> None:
        asyncio.run(fn(key))

    return call


def test_an_async_wrapper_of_a_plain_function_is_awaited(book: Book) -> None:
    report = book.prove(as_async(book.note), "interrupt")
    assert report.holds, str(report)
    assert "handler returned" in report.windows("missed"), "it was cancelled, and that is too late there"


def test_a_plain_wrapper_of_an_async_function_has_its_own_loop(book: Book) -> None:
    async def note(key: str) -> None:
        await asyncio.sleep(0)
        book.note(key)

    report = book.prove(as_sync(note), "interrupt")
    assert report.holds, str(report)
    assert not report.windows("missed"), "it got KeyboardInterrupt"


def test_a_plain_function_under_the_decorator_of_an_async_face_is_awaited(book: Book) -> None:
    once = AsyncSemel(f"sqlite:///{book.folder / 'semel.db'}")

    @once(key="key")
    def note(key: str) -> None:
        book.note(key)

    class Handlers:
        @once(key="key")
        def note(self, key: str) -> None:
            book.note(key)

    for handler in (note, Handlers().note):
        report = book.prove(handler)
        assert report.holds, str(report)
        assert report.verdict("run.returned", "kill") == "once"


def test_what_a_call_gives_to_await_is_awaited_in_a_loop_and_cancelled_there(book: Book) -> None:
    async def handle(key: str) -> None:
        book.write(key)
        await asyncio.sleep(0.002)

    for handler in (lambda key: handle(key), partial(lambda do, key: do(key), handle)):
        report = book.prove(handler, "interrupt")
        assert report.verdict("await asyncio.sleep(0.002)", "interrupt") == "doubled", str(report)


def test_a_call_that_has_nothing_to_await_the_second_time_is_no_failure(book: Book) -> None:
    async def note(key: str) -> None:
        book.note(key)

    report = book.prove(lambda key: None if book.count(key) else note(key))
    assert report.holds, str(report)
