"""What cannot be proved is refused with its own cause."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from semel import ConfigurationError, Semel
from semel.testing.plugin import prove
from semel.testing.plugin_options import files_of
from semel.testing.plugin_report import Report
from semel.testing.plugin_tries import Try
from semel.testing.plugin_windows import Window
from tests.plugin.book import Book


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


def test_an_effect_that_is_left_to_a_thread_is_told_by_the_threads_name(book: Book) -> None:
    def late(key: str) -> None:
        time.sleep(60)
        book.write(key)

    def handle(key: str) -> None:
        threading.Thread(target=late, args=(key,)).start()

    with pytest.raises(
        ConfigurationError, match=r"returned while the thread 'Thread-\d+ \(late\)' still ran.*os\._exit"
    ):
        book.prove(handle)


def test_an_effect_that_is_left_to_a_task_is_told_by_the_tasks_name(book: Book) -> None:
    running = set()

    async def late(key: str) -> None:
        await asyncio.sleep(60)
        book.write(key)

    async def handle(key: str) -> None:
        running.add(asyncio.create_task(late(key)))

    with pytest.raises(ConfigurationError, match=r"while the task 'late' still ran.*await the task"):
        book.prove(handle)


def test_a_handler_without_an_effect_is_asked_for_one(book: Book) -> None:
    with pytest.raises(
        ConfigurationError, match=r"counts 0, expected=1. Did the handler make an effect"
    ) as raised:
        book.prove(lambda key: None)
    assert "still ran" not in str(raised.value)


def test_a_count_over_all_keys_is_told_as_such(book: Book) -> None:
    book.write("another")
    with pytest.raises(
        ConfigurationError, match=r"counts 2, expected=1. Does it count the effects of other keys"
    ):
        book.prove(book.write, effects=lambda key: book.total())


def test_a_count_over_all_keys_is_refused_although_there_was_nothing_before(book: Book) -> None:
    def handle(key: str) -> None:
        book.note(key)

    with pytest.raises(
        ConfigurationError, match=r"counts 1 for a key that was never used: it takes in other keys.*reset="
    ):
        book.prove(handle, effects=lambda key: book.total())


def test_a_count_that_takes_no_key_needs_a_reset(book: Book) -> None:
    with pytest.raises(ConfigurationError, match=r"total.* takes no key.*effects=lambda key: .*reset="):
        book.prove(book.note, effects=book.total)
    assert book.total() == 0, "at once"


def test_a_count_that_fails_for_a_key_without_effects_is_told_so(book: Book) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"(?s)effects\(\) of a key without any effect fails: FileNotFoundError.*test_misuse",
    ) as raised:
        book.prove(book.note, effects=lambda key: len((book.folder / key).read_text()))
    assert "plugin_" not in str(raised.value)


def test_a_generator_is_no_handler(book: Book) -> None:
    def generator(key: str) -> Iterator[int]:
        book.write(key)
        yield 1

    async def asynchronous(key: str) -> AsyncIterator[int]:
        book.write(key)
        yield 1

    for handler in (generator, asynchronous):
        with pytest.raises(
            ConfigurationError, match=f"{handler.__name__} is a generator, whose body does not run"
        ):
            book.prove(handler)


def test_effects_without_a_signature_are_refused_with_the_remedy(book: Book) -> None:
    with pytest.raises(
        ConfigurationError, match=r"<class 'int'> does not say whether it takes a key.*effects=lambda key"
    ):
        book.prove(book.write, effects=int)


def test_a_handler_that_ends_its_process_was_not_killed(book: Book) -> None:
    def leave(key: str) -> None:
        book.write(key)
        os._exit(3)

    with pytest.raises(
        RuntimeError,
        match=r"without any fault: it ended its process itself \(os\._exit\(3\)\): let it return",
    ):
        book.prove(leave)


def test_an_absent_store_is_told_with_its_remedy_and_the_handler_s_own_lines(tmp_path: Path) -> None:
    once = Semel("redis://127.0.0.1:1/0", timeout=0.2)

    def handle(key: str) -> None:
        once.execute(key, print, key)

    with pytest.raises(RuntimeError) as raised:
        prove(handle, arguments=lambda key: (key,), effects=lambda key: 0, faults=["kill"])
    told = str(raised.value).splitlines()
    assert told[0].startswith("the handler fails without any fault: StoreUnavailable: cannot reach Redis")
    assert "is the server running" in told[0]
    assert [line.split(", ")[-1] for line in told[1:] if "File" in line] == ["in handle"]
    assert told[2] == "    once.execute(key, print, key)"
    assert [line.partition(":")[0] for line in told[3:]] == ["because of ConnectionError"]


def test_a_cause_that_the_handler_s_own_lines_raised_is_told_too(book: Book) -> None:
    def price(key: str) -> int:
        return {"another": 1}[key]

    def handle(key: str) -> None:
        try:
            price(key)
        except KeyError as error:
            raise LookupError("no price") from error

    with pytest.raises(RuntimeError) as raised:
        book.prove(handle)
    told = str(raised.value)
    assert told.startswith("the handler fails without any fault: LookupError: no price\n")
    assert "because of KeyError: 'try-" in told
    assert told.endswith('return {"another": 1}[key]')
    assert "plugin" not in told.replace(__file__, "")


def test_every_error_of_a_group_is_told(book: Book) -> None:
    async def fail(word: str) -> None:
        raise ValueError(word)

    async def handle(key: str) -> None:
        async with asyncio.TaskGroup() as group:
            for word in ("one", "two"):
                group.create_task(fail(word))

    with pytest.raises(
        RuntimeError, match=r"(?s)ExceptionGroup: .*ValueError: one.*ValueError: two"
    ) as raised:
        book.prove(handle)
    assert "taskgroups.py" not in str(raised.value)


def test_a_handler_that_is_killed_by_somebody_else_is_told_by_what(book: Book) -> None:
    with pytest.raises(RuntimeError, match="without any fault: killed by SIGTERM"):
        book.prove(lambda key: os.kill(os.getpid(), signal.SIGTERM))


def test_errors_that_differ_in_their_key_are_one_line() -> None:
    errors = ["OutcomeUnknown: key a", "OutcomeUnknown: key b", "StoreUnavailable: away"]
    tries = tuple(
        Try(window=Window(f"w{at}"), fault="kill", effects=1, verdict="unknown", error=error)
        for at, error in enumerate(errors)
    )
    report = Report(handler="h", expected=1, tries=tries, faults=("kill",), seconds=0.0)
    told = [line for line in str(report).splitlines() if "error" in line]
    assert told == ["  error: OutcomeUnknown: key a (in 2 tries)", "  error: StoreUnavailable: away"]


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("caf\udce9 is closed"), r"without any fault: ValueError: caf\\udce9 is closed"),
        (OSError(2, "no such file", "caf\udce9"), r"FileNotFoundError: .*no such file: 'caf\\udce9'"),
        (Mute(), r"without any fault: Mute: \(its text could not be made\)"),
    ],
)
def test_an_error_whose_text_no_report_can_carry_is_spelled_out(
    error: Exception, told: str, book: Book
) -> None:
    def handle(key: str) -> None:
        raise error

    with pytest.raises(RuntimeError, match=told):
        book.prove(handle)


def test_what_effects_return_is_shown_if_it_is_no_number(book: Book) -> None:
    def effects(key: str) -> Any:
        return book if book.count(key) else 0

    told = r"^exactly_once: effects\(\) must return how many effects there are, a whole number, not '<.*Book object"
    with pytest.raises(ConfigurationError, match=told):
        book.prove(book.write, effects=effects)
    with pytest.raises(ConfigurationError, match="a whole number, not '1'"):
        book.prove(book.write, effects=lambda key: str(book.count(key)))


def test_one_fault_is_not_four_letters(book: Book) -> None:
    with pytest.raises(ConfigurationError, match=r"faults is a list: faults=\['kill'\]"):
        prove(book.write, arguments=lambda key: (key,), effects=book.count, faults="kill")  # type: ignore[arg-type] # the mistake


def test_what_a_reset_returns_does_not_matter(book: Book) -> None:
    resets = book.folder / "resets"

    def reset() -> object:
        book.write("resets")
        return book

    report = prove(book.write, arguments=lambda key: (key,), effects=book.count, reset=reset, faults=["kill"])
    assert report.failures
    assert resets.stat().st_size > 1


@pytest.mark.parametrize("also", ["shop", json])
def test_more_modules_are_a_list(book: Book, also: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"also is a list: also=\[.*(shop|json)"):
        prove(book.write, arguments=lambda key: (key,), effects=book.count, also=also)


@pytest.mark.parametrize("also", ["no_such_module", sys])
def test_a_module_without_lines_is_not_passed_over(book: Book, also: Any) -> None:
    with pytest.raises(ConfigurationError, match="has no lines that could be windows"):
        prove(book.write, arguments=lambda key: (key,), effects=book.count, also=[also])


def test_a_module_is_named_by_itself_its_name_or_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(json.__file__)
    monkeypatch.chdir(path.parent)
    named = [*files_of("also", [json, "json", str(path), path.name, f"../json/{path.name}"])]
    assert set(named) == {str(path)}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lease": 0}, "exactly_once: lease must be at least 0.05 seconds, not 0"),
        ({"lease": "1 s"}, "exactly_once: lease must be seconds or a timedelta, not '1 s'"),
        ({"patience": -1}, "exactly_once: patience must be at least 0.1 seconds, not -1"),
        ({"expected": 0}, "exactly_once: expected must be a whole number, 1 or more, not 0"),
        ({"lanes": 0}, "exactly_once: lanes must be a whole number, 1 or more, not 0"),
        ({"faults": None}, "exactly_once: faults are some of kill, zombie, interrupt, not None"),
        ({"also": None}, "exactly_once: also is a list of modules, also=[shop], not None"),
        ({"without": 7}, "exactly_once: without is a list of modules, without=[shop], not 7"),
        (
            {"reset": True},
            "exactly_once: reset must be a function without arguments that empties everything, not True",
        ),
        ({"reset": lambda key: None}, "exactly_once: reset must be a function without arguments"),
        ({"effects": lambda key, more: 1}, "exactly_once: effects is given the key, and nothing else"),
        ({"arguments": lambda: ()}, "exactly_once: arguments is given the key, and nothing else"),
        (
            {"arguments": {"order": 1}, "reset": dict},
            "exactly_once: arguments must be a tuple, not {'order': 1}",
        ),
        ({"arguments": lambda key: {"order": key}}, "exactly_once: arguments= gave {'order': 'try-"),
        ({"arguments": lambda key: {1}}, "exactly_once: arguments= gave {1}: give a tuple of arguments"),
    ],
    ids=lambda given: ",".join(given) if isinstance(given, dict) else "",
)
def test_options_that_cannot_be_are_refused_by_name(book: Book, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        book.prove(book.write, **given)
    assert book.total() == 0


def test_a_store_that_every_process_has_for_itself_is_among_the_reasons(book: Book) -> None:
    with Semel("memory://") as once:
        report = book.prove(lambda key: once.execute(key, book.write, key))
    assert report.verdict("called twice", "none") == "doubled"
    assert "memory://, which each process has for itself" in str(report)


def test_a_lease_may_be_a_timedelta(book: Book, tmp_path: Path) -> None:
    with Semel(f"sqlite:///{tmp_path / 'semel.db'}") as once:

        def handle(key: str) -> None:
            once.execute(key, book.write, f"{key}.effect")

        report = prove(
            handle,
            arguments=lambda key: (key,),
            effects=lambda key: book.count(f"{key}.effect"),
            faults=["kill"],
            lease=timedelta(seconds=0.2),
        )
    assert report.verdict("claim.won", "kill") == "once"


def test_arguments_that_fail_are_no_failure_of_the_handler(book: Book) -> None:
    def arguments(key: str) -> tuple[str]:
        raise LookupError("no customer")

    with pytest.raises(
        ConfigurationError,
        match=r"(?s)arguments= fails for the key 'try-.*LookupError: no customer.*in arguments",
    ) as raised:
        book.prove(book.write, arguments=arguments)
    assert "plugin_" not in str(raised.value)


def test_what_fails_without_a_line_of_its_own_is_told_without_those_of_the_plugin(book: Book) -> None:
    with pytest.raises(ConfigurationError, match=r"effects\(\) fails: TypeError") as raised:
        book.prove(book.write, effects=abs)
    assert "plugin_" not in str(raised.value)


def test_a_reset_that_fails_is_told_with_its_own_lines(book: Book) -> None:
    def reset() -> None:
        raise OSError("read-only")

    with pytest.raises(
        ConfigurationError, match=r"(?s)reset\(\) fails: OSError: read-only.*in reset"
    ) as raised:
        book.prove(book.write, reset=reset)
    assert "plugin_" not in str(raised.value)
