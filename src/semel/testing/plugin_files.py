"""Whose file it is: the user's own have windows and are told of; those of Python, of installed packages and of semel do not."""

from __future__ import annotations

import os
import sysconfig
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec

import semel

__all__ = ["SEMEL", "Places", "is_others", "real", "short_names"]

SEMEL = str(Path(semel.__file__).parent) + os.sep  # wherever it is: an editable one lies beside the user's
_OTHERS = (
    SEMEL,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
_INSTALLED = frozenset({"site-packages", "dist-packages"})


@cache
def real(file: str) -> str:
    """One name for a file, however a path (`..`, a link) or an import came to it."""
    return os.path.realpath(file)


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """The files whose lines are windows, by their `real` names."""

    named: frozenset[str]
    """The handler's own file and those of `also`: taken whole, whoever's they are."""
    without: frozenset[str] = frozenset()

    def has(self, file: str) -> bool:
        if self.leaves_out(file):
            return False
        return self.names(file) or not (file.startswith("<") or is_others(file))

    def names(self, file: str) -> bool:
        return real(file) in self.named

    def leaves_out(self, file: str) -> bool:
        return real(file) in self.without


@cache
def is_others(file: str) -> bool:
    return file.startswith((*_OTHERS, "<frozen ")) or not _INSTALLED.isdisjoint(Path(file).parts)


def short_names(files: Iterable[str]) -> dict[str, str]:
    """Each by its base name, or by as much of its path as tells it from the others."""
    parts = {file: Path(file).parts for file in files}
    names: dict[str, str] = {}
    for length in range(1, max(map(len, parts.values()), default=0) + 1):
        tails = Counter(each[-length:] for each in parts.values())
        for file, each in parts.items():
            if tails[each[-length:]] == 1:
                names.setdefault(file, "/".join(each[-length:]))
    return {file: names.get(file, file) for file in parts}
