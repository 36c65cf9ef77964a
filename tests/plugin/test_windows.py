"""Which lines are windows: those of every file of the user's, wherever the handler is called from."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import semel
from semel import ConfigurationError
from semel.testing import plugin_windows
from semel.testing.plugin_files import Places, is_others, real, short_names
from semel.testing.plugin_windows import Window, chosen
from tests.plugin.book import Book, module_at

CARELESS = """
    def handle(book, key):
        if not book.count(f"{key}.done"):
            book.write(key)
            book.write(f"{key}.done")
"""
LINE = 'book.write(f"{key}.done")'


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


@pytest.fixture
def careless(tmp_path: Path) -> ModuleType:
    return module_at(tmp_path / "shop" / "careless.py", CARELESS)


def behind_a_lambda(book: Book, careless: ModuleType) -> Callable[[str], None]:
    return lambda key: careless.handle(book, key)


def test_a_wrong_handler_in_another_file_is_struck_inside(book: Book, careless: ModuleType) -> None:
    report = book.prove(behind_a_lambda(book, careless))
    assert report.verdict(LINE, "kill") == "doubled", str(report)
    assert "careless.py:5" in report.doubled


def test_a_module_that_stands_for_another_process_is_left_out(book: Book, careless: ModuleType) -> None:
    report = book.prove(behind_a_lambda(book, careless), without=[careless])
    assert not [each for each in report.tries if each.window.file == careless.__file__], str(report)


@pytest.mark.parametrize("path", ["../shop/careless.py", "../link.py"])
def test_a_file_is_the_same_by_whichever_path_it_is_named(
    book: Book, careless: ModuleType, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (book.folder / "link.py").symlink_to(str(careless.__file__))
    monkeypatch.chdir(book.folder / "shop")
    handler = behind_a_lambda(book, careless)
    without = book.prove(handler, without=[path])
    assert not [each for each in without.tries if each.window.file == careless.__file__], str(without)
    monkeypatch.setattr(plugin_windows, "_MOST", 0)
    also = book.prove(handler, also=[path])
    assert also.verdict(LINE, "kill") == "doubled", "it was taken whole"


def test_a_file_to_be_left_out_that_the_handler_never_comes_to_is_refused(
    book: Book, careless: ModuleType
) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"without= names \S+json/__init__.py, and the handler passed no line of it.*without=\[module\]",
    ):
        book.prove(behind_a_lambda(book, careless), without=[careless, json])


def test_lines_of_python_of_packages_and_of_semel_are_none(book: Book) -> None:
    def handle(key: str) -> None:
        json.loads(json.dumps({"key": key}))
        book.note(key)

    report = book.prove(handle)
    assert {each.window.file for each in report.tries} == {
        "",
        __file__,
        str(Path(__file__).with_name("book.py")),
    }


@pytest.mark.parametrize(
    ("file", "others"),
    [
        (json.__file__, True),
        (pytest.__file__, True),
        (semel.__file__, True),
        ("/usr/lib/python3/dist-packages/yaml/nodes.py", True),
        (f"{Path(semel.__file__).parent}_shop/orders.py", False),  # beside an editable semel
        (f"{sysconfig.get_path('stdlib')}-orders/shop.py", False),
        (__file__, False),
    ],
)
def test_a_file_is_others_by_its_folder_and_not_by_a_name_that_begins_alike(
    file: str, *, others: bool
) -> None:
    assert is_others(file) is others


def test_a_file_that_was_named_is_taken_whosever_it_is() -> None:
    places = Places(named=frozenset({json.__file__}), without=frozenset({__file__}))
    assert places.has(json.__file__)
    assert not places.has(__file__)
    assert not places.has("<string>"), "what dataclasses make"


def test_a_file_that_was_imported_through_a_link_is_known_by_its_own_name(tmp_path: Path) -> None:
    link = tmp_path / "linked.py"
    link.symlink_to(__file__)
    assert Places(named=frozenset(), without=frozenset({real(__file__)})).leaves_out(str(link))
    assert Places(named=frozenset({real(__file__)})).names(str(link))


def test_too_many_lines_of_other_files_are_left_out_with_a_word(
    book: Book, careless: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_windows, "_MOST", 3)
    report = book.prove(behind_a_lambda(book, careless))
    lines = {each.window.name for each in report.tries if each.window.file != __file__ and each.window.file}
    assert lines == {"careless.py:3", "careless.py:4", "careless.py:5"}, "the nearest to the handler"
    assert report.left_out == 3, "one of Book.count, which has passes, and two of Book.write"
    assert f"; {report.left_out} lines of other files were left out, or some of their passes" in repr(report)
    assert "also=[module] takes a file whole" in str(report)


def test_first_passes_come_before_later_ones_and_named_files_are_taken_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin_windows, "_MOST", 2)
    point, own = Window("claim.won"), Window("own.py:1", 1, file="/own.py")
    far, again, near = (
        Window("far.py:1", 1, file="/far.py"),
        Window("far.py:1", 2, file="/far.py"),
        Window("near.py:1", 1, file="/near.py"),
    )
    late = Window("own.py:1", 4, file="/own.py")
    places = Places(named=frozenset({"/own.py"}))
    taken = chosen([point, own, far, again, near, late], [0, 3, 9, 9, 4, 3], places)
    assert taken == ([point, own, far, near], 1)


def test_a_line_of_a_loop_is_left_out_once_and_not_with_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_windows, "_MOST", 0)
    loop = [Window(f"far.py:{line}", 1 + at, file="/far.py") for at in range(3) for line in (1, 2)]
    other = Window("far.py:1", 1, file="/another/far.py")
    assert chosen([*loop, other], [1] * 7, Places(named=frozenset())) == ([], 3)


def test_files_of_the_same_name_are_told_apart(book: Book) -> None:
    source = """
        def work(book, key):
            book.note(key)
    """
    modules = [module_at(book.folder / folder / "handlers.py", source) for folder in "abcd"]

    def handle(key: str) -> None:
        for module in modules:
            module.work(book, key)

    report = book.prove(handle, also=modules)
    for folder in "abcd":
        assert report.verdict(f"{folder}/handlers.py:3", "kill") == "once"
    assert not any("handlers.py:3 (pass" in each.window.title for each in report.tries)


def test_a_name_is_as_long_as_it_must_be() -> None:
    names = short_names(["/x/a/shop.py", "/x/b/shop.py", "/y/b/shop.py", "/x/a/orders.py"])
    assert [*names.values()] == ["a/shop.py", "x/b/shop.py", "y/b/shop.py", "orders.py"]
