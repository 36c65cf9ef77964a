"""The page can be read: no silent field, no empty column, no rounded seed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from semel.testing.chaos import Report, matrix
from semel.testing.chaos.page import write

CELLS = matrix()
SEED = 7_050_001


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("page")
    runs = [{"workload": "core", "first seed": SEED, "share": 0.5}]
    (found / "simulation.json").write_text(json.dumps({"schedules": SEED, "runs": runs}))
    write(Report(), CELLS, found, "semel chaos")
    return found


def section(folder: Path, mode: str) -> str:
    page = (folder / "index.html").read_text("utf-8")
    found = re.search(rf'<h2 id="mode-{mode}">.*?(?=<h2 )', page, re.DOTALL)
    assert found is not None
    return found[0]


def test_no_field_is_empty(folder: Path) -> None:
    assert "<td></td>" not in (folder / "index.html").read_text("utf-8")


def test_what_a_store_never_meets_is_said_at_each_point(folder: Path) -> None:
    row = re.search(r'@claim\.won\'">claim\.won</th>(.*?)</tr>', section(folder, "retry"))
    assert row is not None
    fields = re.findall(r">([^<]+)</td>", row[1])
    assert fields == ["not run"] * 10 + ["n/a"] * 2, "memory has no kill"


def test_a_store_without_a_cell_has_no_column_and_its_reason_below(folder: Path) -> None:
    shown = section(folder, "inbox-nats")
    assert re.findall(r'<th scope="colgroup" colspan="2">(\w+)</th>', shown) == ["postgres"]
    assert "<li>mariadb, sqlite: a broker hands out the same: it is broken on postgres</li>" in shown
    assert "<li>redis, cluster, memory: an inbox keeps its admissions" in shown


def test_a_seed_is_told_as_it_is(folder: Path) -> None:
    for name in ("index.html", "matrix.md"):
        text = (folder / name).read_text("utf-8")
        assert f"{SEED:,}" in text
        assert "e+06" not in text


def test_code_in_a_reason_is_code(folder: Path) -> None:
    page = (folder / "index.html").read_text("utf-8")
    assert "a thread cannot be cancelled: <code>interrupt</code> is its fault" in page
