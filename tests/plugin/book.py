"""Effects that tests of the plugin count, and handlers in files of their own."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from semel.testing.plugin import prove
from semel.testing.plugin_report import Report

OPTIONS: dict[str, Any] = {
    "arguments": lambda key: (key,),
    "reset": None,
    "expected": 1,
    "lease": 0.3,
    "also": (),
    "without": (),
    "patience": 30,
    "lanes": 4,
}
"""What `checked` wants of a case, but for handler and effects."""


class Book:
    """Effects of a key, one byte each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, key: str) -> None:
        with (self.folder / key).open("a") as page:
            page.write("x")

    def note(self, key: str) -> None:
        """The same again is no second effect."""
        (self.folder / key).write_text("x")

    def count(self, key: str) -> int:
        return (self.folder / key).stat().st_size if (self.folder / key).exists() else 0

    def total(self) -> int:
        return sum(page.stat().st_size for page in self.folder.iterdir())

    def prove(self, handler: Callable[[str], Any], *faults: Any, **options: Any) -> Report:
        given: dict[str, Any] = {
            "arguments": lambda key: (key,),
            "effects": self.count,
            "faults": faults or ["kill"],
        }
        return prove(handler, **given | options)


def module_at(path: Path, source: str) -> ModuleType:
    """A module of the user's own, in that file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    name = f"{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
