"""`semel resolve | release | forget` at records of a program with `encrypt=`: the command line has no keys."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel import ConfigurationError, PreviousFailure, Semel, current_run
from tests.ops.test_cli_keys import STORES, Desk

RING = {"2026-a": os.urandom(32)}
REMEDY = r"belongs to a program with encrypt=.*once\.resolve.*with the ring"


class Sealed:
    """A program that has the keys, and the command line at its store."""

    def __init__(self, desk: Desk) -> None:
        self.about = desk.about
        self.once = Semel(
            desk.url, tenant=desk.tenant, operation="pay", timeout=20, encrypt=RING, on_unknown="hold"
        )
        self.made: list[str] = []

    def lost(self, key: str, *, steps: bool = False, started: bool = False) -> None:
        """A run that ended without an outcome."""

        def work() -> None:
            if steps:
                current_run().step("reserve", lambda: self.made.append(key))
            if started:
                current_run().step("charge", _interrupted)
            raise SystemExit

        with pytest.raises(SystemExit):
            self.once.execute(key, work)


def _interrupted() -> None:
    raise SystemExit


@pytest.fixture(params=STORES)
def sealed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sealed]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/semel.db"
    else:
        server = request.getfixturevalue(f"{request.param}_server")
        url = server.url if request.param == "redis" else server.database()
    made = Sealed(Desk(url))
    yield made
    made.once.close()


@pytest.mark.parametrize("word", [["--value", "1"], ["--release"]], ids=["value", "release"])
def test_a_sealed_result_is_not_taken_for_damage(sealed: Sealed, word: list[str]) -> None:
    assert sealed.once.execute("paid", lambda: {"paid": 5}).value == {"paid": 5}
    with pytest.raises(ConfigurationError, match=REMEDY):
        sealed.about("resolve", "paid", *word)
    assert sealed.once.execute("paid", lambda: {"paid": 6}).value == {"paid": 5}


@pytest.mark.parametrize("steps", [False, True], ids=["bare", "steps"])
def test_a_value_without_a_seal_is_refused(sealed: Sealed, steps: bool) -> None:
    sealed.lost("k", steps=steps)
    with pytest.raises(ConfigurationError, match=REMEDY):
        sealed.about("resolve", "k", "--value", "1")
    sealed.once.resolve("k", value="looked up")
    assert sealed.once.execute("k", lambda: "again").value == "looked up"


def test_steps_that_cannot_be_read_are_not_released(sealed: Sealed) -> None:
    """One of them was only started: released as it is, it would hold the run for ever."""
    sealed.lost("k", steps=True, started=True)
    for command in ("release", "resolve"):
        with pytest.raises(ConfigurationError, match=REMEDY):
            sealed.about(command, "k", *(["--release"] if command == "resolve" else []))
    sealed.once.resolve("k", release=True)

    def work() -> Any:
        current_run().step("reserve", lambda: sealed.made.append("again"))
        return current_run().step("charge", lambda: "charged")

    assert sealed.once.execute("k", work).value == "charged"
    assert sealed.made == ["k"]


def test_what_needs_no_keys_is_done(sealed: Sealed) -> None:
    for key in ("free", "failed", "gone"):
        sealed.lost(key, steps=key != "free")
    assert "released" in sealed.about("release", "free")
    assert "failed" in sealed.about("resolve", "failed", "--error", "declined")
    assert "forgotten" in sealed.about("forget", "gone")
    assert sealed.once.execute("free", lambda: "ran").value == "ran"
    with pytest.raises(PreviousFailure, match="declined"):
        sealed.once.execute("failed", lambda: "never")
    failed = sealed.once.peek("failed")
    assert failed is not None
    assert failed.labels is None
    assert sealed.once.execute("gone", lambda: "ran").value == "ran"
