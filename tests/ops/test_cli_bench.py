"""`semel bench` on real stores: what it prints, what it leaves."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from semel import ConfigurationError, Semel
from semel.cli.commands import app

_SHORT = ["--calls", "20", "--callers", "4"]


@pytest.mark.parametrize("store", ["sqlite", "redis", "postgres", "mariadb"])
def test_a_store_is_timed(request: pytest.FixtureRequest, store: str, tmp_path: Path) -> None:
    if store == "sqlite":
        url = f"sqlite:///{tmp_path}/semel.db"
    else:
        server = request.getfixturevalue(f"{store}_server")
        url = server.url if store == "redis" else server.database()
    done = CliRunner().invoke(app, ["bench", url, *_SHORT, "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [(row["verb"], row["callers"]) for row in rows] == [
        (verb, callers) for callers in (1, 4) for verb in ("first", "replay", "read")
    ]
    assert all(
        row["calls"] == 20 and row["per_second"] > 0 and row["p50_ms"] <= row["p99_ms"] for row in rows
    )
    assert [row["times_a_read"] for row in rows if row["verb"] == "read"] == [1, 1]
    if store == "redis":  # it has no list of settled records
        return
    with Semel(url) as once:
        kept = once.find(states=["done"], operation="semel-bench")
    assert len(kept) == 2 * 20 + 1, "each key once, though it was asked for twice"


def test_people_get_a_page(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", f"sqlite:///{tmp_path}/semel.db", *_SHORT])
    assert done.exit_code == 0, done.output
    assert "× a read" in done.stdout
    assert "expire after 60 s" in done.stdout


def test_a_replay_that_is_none_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "semel.cli.bench._nothing", lambda: time.sleep(0.3)
    )  # five of them outlast the records
    asked = ["bench", f"sqlite:///{tmp_path}/semel.db", "--callers", "1", "--calls", "25", "--retention", "1"]
    done = CliRunner().invoke(app, asked)
    assert isinstance(done.exception, ConfigurationError)
    assert "longer --retention" in str(done.exception)


def test_memory_has_nothing_to_measure() -> None:
    done = CliRunner().invoke(app, ["bench", "memory://"])
    assert isinstance(done.exception, ConfigurationError)
    assert "round trip" in str(done.exception)
