"""The crash matrix on real servers: every cell at least once; with SEMEL_TEST=long at least twenty times.

`semel chaos` runs the same with a report. A cell that disagrees is run alone by `semel chaos --cell NAME`.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from semel.testing import services
from semel.testing.chaos import Cell, Heir, Report, Verdict, explore, jobs_for, matrix, recovery_jobs
from semel.testing.chaos.goals import LONG_REPEAT, campaign
from semel.testing.chaos.report import summarize
from semel.testing.chaos.verdicts import quantile

MODE = os.environ.get("SEMEL_TEST", "full")
REPEAT = LONG_REPEAT if MODE == "long" else 1
CELLS = [cell for cell in matrix() if cell.applies]
GROUPS = sorted({(cell.store, cell.mode) for cell in CELLS})
PROGRAMS = {
    "redis": "redis",
    "cluster": "redis",
    **{name: name for name in ("postgres", "mariadb", "rabbitmq", "nats")},
}
pytestmark = [pytest.mark.services, pytest.mark.timeout(7200 if MODE == "long" else 900)]


def needed(servers: set[str]) -> set[str]:
    return {PROGRAMS[name] for name in servers if name in PROGRAMS}


@pytest.fixture(scope="module")
def report() -> Report:
    chosen = [cell for cell in CELLS if not needed({cell.store, *cell.needs}) & services.missing().keys()]
    made = explore(jobs_for(chosen, repeat=REPEAT) + recovery_jobs(chosen, repeat=REPEAT))
    print(f"\n{len(made.results)} schedules of {made.cells} cells in {made.seconds:.0f} s")
    return made


@pytest.mark.parametrize("store, mode", GROUPS)
def test_every_cell_agrees_with_the_guarantee_table_in_both_directions(
    report: Report, store: str, mode: str
) -> None:
    mine = [cell for cell in CELLS if (cell.store, cell.mode) == (store, mode)]
    missing = services.missing()
    for server in needed({store, *(name for cell in mine for name in cell.needs)}) & missing.keys():
        raise services.ServerMissing(missing[server])
    names = {cell.name for cell in mine}
    wrong = [each for each in report.disagreeing if each.cell in names]
    assert not wrong, "\n".join(
        f"{each.cell}: {each.problem}\n" + "\n".join(f"    {line}" for line in each.story) for each in wrong
    )
    assert not names & set(report.missing)
    assert names <= {each.cell for each in report.results}


def test_where_exactly_once_is_promised_nothing_is_lost_and_nothing_doubled(report: Report) -> None:
    exact = {cell.name for cell in CELLS if cell.expected is Verdict.ONCE}
    verdicts = Counter(each.verdict for each in report.results if each.cell in exact)
    assert set(verdicts) == {Verdict.ONCE}


def test_enough_real_crashes_were_played(report: Report) -> None:
    if services.missing():
        pytest.skip(f"SERVER MISSING: {', '.join(services.missing())}")
    # Of cells that promise it: others, however many, show nothing of the kind.
    assert summarize(report, CELLS, "semel chaos").promised_once >= 1_000
    if MODE == "long":
        figures = campaign(report.results, [cell.name for cell in CELLS], report.lateness)
        assert not [each.text for each in figures if not each.met]


def test_a_killed_workers_effect_is_made_by_another_soon_after_its_lease(report: Report) -> None:
    assert len(report.lateness) == report.timed
    # The last hundredth belongs to the long run: a machine that is busy with other things delays single ones.
    assert quantile(report.lateness, 0.99 if MODE == "long" else 0.9) <= 1.0


def test_every_window_was_hit_and_calls_end_well_after_the_faults(report: Report) -> None:
    assert report.reach == []


def test_the_matrix_can_tell_that_a_cell_is_wrong() -> None:
    """Teeth: cells with a false expectation must disagree."""
    import msgspec

    by_name: dict[str, Cell] = {cell.name: cell for cell in CELLS}
    true = by_name["sqlite/sync/retry/kill@run.returned"]
    lie = msgspec.structs.replace(true, expected=Verdict.ONCE)
    nowhere = msgspec.structs.replace(by_name["sqlite/async/keyed/kill@settle.sent"], point="never.reached")
    edge = msgspec.structs.replace(
        by_name["sqlite/async/http-db/kill@settle.sent"], expected=Verdict.ONCE, heir=Heir.REPLAYED
    )
    relay = msgspec.structs.replace(
        by_name["sqlite/async/relay-handler/kill@relay.published"], expected=Verdict.ONCE
    )
    other = msgspec.structs.replace(
        by_name["sqlite/async/relay-handler/kill@relay.planned"], expected=Verdict.DOUBLED
    )
    call = msgspec.structs.replace(
        by_name["sqlite/sync/grpc-db/kill@settle.sent"], expected=Verdict.ONCE, heir=Heir.REPLAYED
    )
    made = explore(jobs_for([lie, nowhere, edge, call, relay, other]), drivers=3)
    problems = {each.cell: each.problem for each in made.results}
    for each in (lie, edge, call, relay):
        assert problems[each.name].endswith("expected exactly once, found doubled")
    assert problems[other.name].endswith("expected doubled, found exactly once")
    assert "did not strike" in problems[nowhere.name]
