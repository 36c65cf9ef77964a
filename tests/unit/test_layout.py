"""The shape of the repository: sizes, names, exports, words that must not appear, one version."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import types
from pathlib import Path
from typing import NamedTuple

import pytest

import semel

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src" / "semel").rglob("*.py"))
TEXTS = sorted(
    path
    for folder in ("src", "tests", "docs", "examples", "benches", "scripts", "requirements", ".ci", ".")
    for path in ((ROOT / folder).glob("*") if folder == "." else (ROOT / folder).rglob("*"))
    if path.is_file() and "__pycache__" not in path.parts and path.suffix not in {".png", ".pyc", ".lock"}
)

MODULE_LINES = 500
FUNCTION_LINES = 60
# What may be longer, how long, and why. Shorten the code before you lengthen this table.
LONGER_MODULES: dict[str, tuple[int, str]] = {}
LONGER_FUNCTIONS: dict[str, tuple[int, str]] = {
    "src/semel/face.py:__init__": (70, "half of it is the list of settings, one a line with its default"),
}

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "manager", "common", "base", "misc"}

FORBIDDEN_WORDS = {
    "an import of pickle": re.compile(
        r"^\s*(?:import|from)\s+(?:pickle|marshal|shelve|dill)\b", re.MULTILINE
    ),
    "a path of one machine": re.compile("/" r"(?:work|root|home/\w+)/"),
    "work left open": re.compile(r"\b(?:TO[D]O|FIX[M]E|XX[X])\b"),
    "the address of a package index": re.compile(r"(?:index-url|find-links)[ =]\S*://|\bpypi\.[a-z]{3}\b"),
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


class Read(NamedTuple):
    """What the tests ask about a module."""

    says: str | None
    functions: dict[str, int]
    exported: set[str] | None
    bound: set[str]
    defined: set[str]


@functools.cache
def read(path: Path) -> Read:
    """Each module is parsed and walked once; the trees of them all would fill the memory."""
    tree = ast.parse(path.read_text("utf-8"))
    functions, everything = {}, set[str]()
    for node in ast.walk(tree):
        everything |= bound(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions[f"{name_of(path)}:{node.name}"] = (node.end_lineno or node.lineno) - node.lineno + 1
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    defined = {node.name for node in tree.body if isinstance(node, kinds)}
    return Read(ast.get_docstring(tree), functions, exported(tree), everything, defined)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_module_is_short(path: Path) -> None:
    limit, _ = LONGER_MODULES.get(name_of(path), (MODULE_LINES, ""))
    assert len(path.read_text("utf-8").splitlines()) <= limit


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_function_is_short(path: Path) -> None:
    long = {
        name: lines
        for name, lines in read(path).functions.items()
        if lines > LONGER_FUNCTIONS.get(name, (FUNCTION_LINES, ""))[0]
    }
    assert not long


def test_the_tables_of_exceptions_hold_nothing_that_became_short() -> None:
    lengths = {name_of(path): len(path.read_text("utf-8").splitlines()) for path in SOURCES}
    for name in LONGER_FUNCTIONS:
        lengths |= read(ROOT / name.partition(":")[0]).functions
    limits = {
        **dict.fromkeys(LONGER_MODULES, MODULE_LINES),
        **dict.fromkeys(LONGER_FUNCTIONS, FUNCTION_LINES),
    }
    assert not [name for name, limit in limits.items() if lengths.get(name, 0) <= limit]


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert not [name_of(path) for path in SOURCES if FORBIDDEN_NAMES & {path.stem, path.parent.name}]


# -- exports ------------------------------------------------------------------------------------------------------------
def test_all_of_the_package_is_what_can_be_reached() -> None:
    reachable = {
        name
        for name, value in vars(semel).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
    }
    assert set(semel.__all__) - {"__version__"} == reachable
    assert len(semel.__all__) == len(set(semel.__all__))


def exported(tree: ast.Module) -> set[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        ):
            return set(ast.literal_eval(node.value))
    return None


def bound(node: ast.AST) -> set[str]:
    """The names that a statement binds."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Import() | ast.ImportFrom():
            return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        case ast.Assign():
            return {target.id for target in node.targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case _:
            return set()


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_all_of_a_module_is_exact(path: Path) -> None:
    names = read(path).exported
    if names is None:
        return
    assert not names - read(path).bound, "in __all__, but not there"
    public = {name for name in read(path).defined if not name.startswith("_")}
    assert not public - names - {"main"}, "public, but not in __all__ (export it, or begin its name with _)"


# -- words --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("what", FORBIDDEN_WORDS)
def test_no_file_contains(what: str) -> None:
    found = []
    for path in TEXTS:
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name_of(path)}: {match.group(0)!r}" for match in FORBIDDEN_WORDS[what].finditer(text)]
    assert not found


def test_the_locks_name_no_address() -> None:
    assert not [
        path.name for path in (ROOT / "requirements").glob("*.txt") if "://" in path.read_text("utf-8")
    ]


# -- one version --------------------------------------------------------------------------------------------------------
def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert versions[0] == semel.__version__ == importlib.metadata.version("semel")


def test_every_module_says_what_it_is_for() -> None:
    silent = [name_of(path) for path in SOURCES if not read(path).says]
    assert not [name for name in silent if not name.endswith("__init__.py")]
