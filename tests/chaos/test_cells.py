"""The matrix as data: names, reasons, expectations against the published table, and verdicts from made-up ledgers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from semel import ConfigurationError
from semel.testing.chaos import Cell, Heir, Report, Result, Verdict, choose, matrix
from semel.testing.chaos.expectations import permitted
from semel.testing.chaos.ledger import Answer, Effect
from semel.testing.chaos.report import write
from semel.testing.chaos.verdicts import compare, heir_of, judge

CELLS = matrix()
APPLICABLE = [cell for cell in CELLS if cell.applies]


def cell(**changes: object) -> Cell:
    facts = {
        "part": "core",
        "store": "redis",
        "colour": "sync",
        "mode": "retry",
        "fault": "kill",
        "point": "run.returned",
    }
    return Cell(**{**facts, "expected": Verdict.DOUBLED, "heir": Heir.RAN, **changes})  # type: ignore[arg-type]


def test_the_matrix_is_large_and_every_name_is_its_own() -> None:
    assert len(APPLICABLE) >= 400
    assert len({each.name for each in CELLS}) == len(CELLS)
    assert "redis/async/hold/kill@run.returned" in {each.name for each in APPLICABLE}


def test_every_cell_has_an_expected_verdict_or_a_reason_and_not_both() -> None:
    assert not [each.name for each in CELLS if (each.expected is None) != bool(each.reason)]


def test_no_cell_expects_what_the_guarantee_table_does_not_allow() -> None:
    assert not [each.name for each in APPLICABLE if each.expected not in permitted(each)]


@pytest.mark.parametrize("mode", ["retry", "hold", "keyed", "probe", "steps", "tx"])
def test_what_a_mode_promises_less_than_exactly_once_is_shown_by_some_cell(mode: str) -> None:
    found = {each.expected for each in APPLICABLE if each.mode == mode}
    assert (
        found
        == {
            "retry": {Verdict.ONCE, Verdict.DOUBLED},
            "hold": {Verdict.ONCE, Verdict.UNKNOWN, Verdict.DOUBLED},
            "keyed": {Verdict.ONCE},
            "probe": {Verdict.ONCE, Verdict.DOUBLED},
            "steps": {Verdict.ONCE, Verdict.DOUBLED},
            "tx": {Verdict.ONCE, Verdict.LOST},
        }[mode]
    )


def test_a_name_that_no_cell_has_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="semel chaos --list"):
        choose(["redis/async/hold/kill@nowhere"])


# ---- verdicts
MADE = Effect("effect", "victim", 1.0)
AGAIN = Effect("effect", "heir", 2.0)
TOLD = Answer("heir", 3.0, {"by": "x"})
REPLAYED = Answer("judge", 4.0, {"by": "x"}, replayed=True)


@pytest.mark.parametrize(
    "effects, answers, verdict",
    [
        ([MADE], [TOLD, REPLAYED], Verdict.ONCE),
        ([MADE, AGAIN], [TOLD, REPLAYED], Verdict.DOUBLED),
        ([MADE, Effect("effect", "judge", 5.0)], [TOLD, REPLAYED], Verdict.DOUBLED),
        ([], [TOLD, REPLAYED], Verdict.LOST),
        ([MADE], [Answer("heir", 3.0, error="OutcomeUnknown")], Verdict.UNKNOWN),
        ([], [Answer("heir", 3.0, error="OutcomeUnknown")], Verdict.UNKNOWN),
        ([MADE], [TOLD, Answer("judge", 4.0, {"by": "y"}, replayed=True)], Verdict.TORN),
        ([MADE], [TOLD, Answer("judge", 4.0, error="InProgress")], Verdict.STUCK),
        ([], [], Verdict.STUCK),
    ],
)
def test_the_verdict_is_the_worst_that_the_ledger_says(
    effects: list[Effect], answers: list[Answer], verdict: Verdict
) -> None:
    assert judge(cell(), effects, answers, ("effect",)) is verdict


def test_a_keyed_peer_makes_one_effect_of_two_calls_with_the_same_key_and_two_of_different_ones() -> None:
    first = Effect("effect", "victim", 1.0, "a")
    keyed = cell(mode="keyed")
    assert (
        judge(keyed, [first, Effect("effect", "heir", 2.0, "a")], [TOLD, REPLAYED], ("effect",))
        is Verdict.ONCE
    )
    assert (
        judge(keyed, [first, Effect("effect", "heir", 2.0, "b")], [TOLD, REPLAYED], ("effect",))
        is Verdict.DOUBLED
    )


def test_both_directions_are_compared() -> None:
    assert compare(cell(), Verdict.DOUBLED, Heir.RAN, bit=True) == ""
    assert "expected doubled, found exactly once" in compare(cell(), Verdict.ONCE, Heir.RAN, bit=True)
    assert "did not strike" in compare(cell(), Verdict.DOUBLED, Heir.RAN, bit=False)
    assert "next caller" in compare(cell(), Verdict.DOUBLED, Heir.REPLAYED, bit=True)


def test_the_next_caller_is_the_one_after_the_fault() -> None:
    assert heir_of([Answer("victim", 1.0, {}), TOLD]) is Heir.RAN
    assert heir_of([Answer("heir", 1.0, {}, replayed=True)]) is Heir.REPLAYED
    assert heir_of([Answer("heir", 1.0, error="InProgress")]) is Heir.BUSY


def test_the_page_shows_what_disagrees_what_did_not_run_and_what_does_not_apply(tmp_path: Path) -> None:
    bad = Result(
        cell=APPLICABLE[0].name,
        verdict=Verdict.LOST,
        heir=Heir.RAN,
        agrees=False,
        problem="expected <this>",
        story=["0.0 s it broke"],
        recovery=0.4,
        lease=0.1,
        store="redis",
    )
    report = Report(results=[bad], seconds=1.0, cells=2, missing=[APPLICABLE[1].name])
    page = write(report, CELLS, tmp_path / "out", "semel chaos --report out").read_text("utf-8")
    for text in (
        "1 wrong",
        "expected &lt;this&gt;",
        "it broke",
        APPLICABLE[1].name,
        "SQLite has no network",
        "<svg",
        "not run",
    ):
        assert text in page
    assert "http://" not in page
    assert "https://" not in page
    summary = json.loads((tmp_path / "out" / "chaos.json").read_text("utf-8"))["summary"]
    assert (summary["lost"], summary["disagreeing"], summary["schedules"]) == (1, 1, 1)
