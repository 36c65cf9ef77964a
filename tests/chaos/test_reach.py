"""When a run counts and what its report says: made-up results, no server."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from semel import ConfigurationError
from semel.testing.chaos import Cell, Heir, Report, Result, Verdict, matrix
from semel.testing.chaos.expectations import permitted
from semel.testing.chaos.goals import campaign, hangs, misfortunes
from semel.testing.chaos.page import write
from semel.testing.chaos.peers import CASES, Finding, Peer
from semel.testing.chaos.verdicts import quantile

CELLS = matrix()
APPLICABLE = [cell for cell in CELLS if cell.applies]


def test_the_page_shows_what_disagrees_what_did_not_run_and_what_does_not_apply(tmp_path: Path) -> None:
    promised = next(cell for cell in APPLICABLE[2:] if permitted(cell) == {Verdict.ONCE})
    bad = Result(
        cell=promised.name,
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


def good(name: str, **changes: object) -> Result:
    facts = {"verdict": Verdict.ONCE, "heir": Heir.RAN, "agrees": True, "bit": True, "after": 2, "well": 2}
    return Result(cell=name, **{**facts, **changes})  # type: ignore[arg-type]  # any field by its name


def test_a_run_in_which_too_few_calls_end_well_is_invalid() -> None:
    name = APPLICABLE[0].name
    assert Report(results=[good(name)] * 10).valid
    lame = Report(results=[good(name)] * 8 + [good(name, well=0)] * 2)
    assert not lame.valid
    assert lame.reach == ["only 16 of 20 calls ended well after the faults were over: 90% must"]
    assert Report(results=[good(name)] * 9 + [good(name, well=0)]).valid


def test_a_run_that_did_not_hit_a_window_is_invalid() -> None:
    ran, other = "sqlite/sync/retry/kill@run.returned", "redis/sync/retry/zombie@claim.won"
    assert Report(results=[good(ran), good("redis/sync/hold/kill@run.returned", bit=False)]).reach == []
    missed = Report(results=[good(ran), good(other, bit=False)])
    assert not missed.valid
    assert missed.reach == ["no fault has hit zombie@claim.won"]
    assert Report(results=[good(ran)], missing=[other]).reach == ["no fault has hit zombie@claim.won"]


def test_one_misfortune_of_a_server_counts_once_though_it_strikes_many() -> None:
    batch = [good("redis/sync/tx/power-loss@acked.always", together=12)] * 12
    assert misfortunes([*batch, *batch, good("redis/sync/tx/kill@claim.won")]) == {"power-loss": 2, "kill": 1}


def test_a_misfortune_that_struck_nobody_is_not_counted() -> None:
    missed = good("redis/sync/tx/power-loss@acked.always", bit=False)
    assert misfortunes([missed, good("redis/sync/tx/kill@claim.won", bit=False)]) == {}


def test_too_many_schedules_without_a_verdict_at_the_first_try_make_a_run_invalid() -> None:
    name = APPLICABLE[0].name
    few = Report(results=[good(name, again=True)] * 24 + [good(name)] * 76)
    assert few.valid
    many = Report(results=[good(name, again=True)] * 41 + [good(name)] * 1959)
    assert many.reach == ["41 of 2000 schedules had no verdict at the first try: 2% may"]


def hung(cell: Cell, **changes: object) -> Result:
    return good(cell.name, again=True, hung=True, first="TimeoutError: the heir did not end", **changes)


def run_of(rounds: int, hung: list[Result]) -> Report:
    """So many rounds of 3,809 schedules each, which is what a run was when the limit was set."""
    name = APPLICABLE[0].name
    many = [good(name, number=number) for number in range(rounds) for _ in range(3_809)]
    return Report(results=[*hung, *many[len(hung) :]])


def test_three_hangs_in_a_run_are_the_machines_and_a_fourth_makes_it_invalid() -> None:
    assert run_of(1, [hung(each) for each in APPLICABLE[:3]]).valid
    assert Report(results=[hung(each) for each in APPLICABLE[:3]]).valid, "in a run of a few cells as well"
    many = run_of(1, [hung(each) for each in APPLICABLE[:4]])
    assert many.reach == ["4 times in 3809 schedules somebody did not end at the first try: 3 may be"]


def test_a_long_run_may_hang_as_often_for_each_of_its_rounds() -> None:
    some = [hung(each, number=at % 20) for at, each in enumerate(APPLICABLE[:61])]
    assert run_of(20, some[:60]).valid
    assert not run_of(20, some).valid


def test_a_batch_in_which_somebody_hung_is_played_again_whole_and_counts_once() -> None:
    batches = [hung(each, batch=f"redis {at % 2}") for at, each in enumerate(APPLICABLE[:24])]
    assert hangs(batches) == 2
    assert run_of(1, batches).valid
    rounds = [hung(APPLICABLE[0], batch="redis 0", number=number) for number in (0, 1)]
    assert hangs([*batches, *rounds]) == 3


def test_a_cell_that_hangs_twice_in_a_round_or_in_more_than_a_tenth_of_many_makes_a_run_invalid() -> None:
    first = APPLICABLE[0]
    twice = run_of(1, [hung(first), hung(first)])
    assert twice.reach == [f"somebody did not end more than once in {first.name}"]
    assert not run_of(20, [hung(first, number=3), hung(first, number=3)]).valid
    assert run_of(20, [hung(first, number=3), hung(first, number=4)]).valid
    assert not run_of(20, [hung(first, number=at) for at in (3, 4, 5)]).valid


def test_what_was_played_once_more_is_listed_by_cell_with_what_was_wrong_at_the_first_try(
    tmp_path: Path,
) -> None:
    name = APPLICABLE[0].name
    late = good(name, again=True, hung=True, first="TimeoutError: the <heir> did not end\nTraceback")
    mate = good(APPLICABLE[1].name, again=True)
    page = write(Report(results=[late, late, mate]), CELLS, tmp_path, "semel chaos").read_text("utf-8")
    text = (tmp_path / "matrix.md").read_text("utf-8")
    assert f"| {name} | 2 | TimeoutError: the <heir> did not end |" in text
    assert "TimeoutError: the &lt;heir&gt; did not end" in page
    assert "3: in 2 somebody did not end in time (2 times, batches counted once: 3 may be)" in page
    listed = json.loads((tmp_path / "chaos.json").read_text("utf-8"))["again"]
    assert [(each["cell"], each["times"]) for each in listed] == sorted([(name, 2), (mate.cell, 1)])
    assert "beside another one of its batch" in {each["first"] for each in listed}


def test_a_page_does_not_call_a_run_good_that_is_invalid(tmp_path: Path) -> None:
    lame = Report(results=[good(APPLICABLE[0].name, well=0)])
    page = write(lame, CELLS, tmp_path, "semel chaos").read_text("utf-8")
    assert "every cell agrees" not in page
    assert "only 0 of 2 calls ended well" in page
    assert "**invalid**: only 0 of 2 calls" in (tmp_path / "matrix.md").read_text("utf-8")


def test_recoveries_that_are_late_or_were_not_measured_make_a_run_invalid() -> None:
    name = APPLICABLE[0].name
    slow = Report(results=[good(name, recovery=2.0, lease=0.5)] * 9, timed=9)
    assert slow.reach == ["90% of the recoveries took up to 1.5 s beyond the lease: 1 s is the limit"]
    assert Report(results=[good(name)], timed=4).reach == ["only 0 of 4 recoveries were measured"]
    few = Report(results=[good(name, recovery=0.6, lease=0.5)], timed=2)
    assert few.reach == ["only 1 of 2 recoveries were measured"]
    assert Report(results=[good(name, recovery=0.6, lease=0.5)], timed=1).valid
    assert math.isnan(quantile([], 0.5))
    figures = {each.name: each for each in campaign([good(name)], [name], [])}
    assert not figures["seconds beyond the lease until recovery, p99"].met


def test_what_other_proofs_left_in_the_folder_is_shown(tmp_path: Path) -> None:
    rows = [{"name": "settle-unfenced", "caught": "I5", "seed": 7}]
    (tmp_path / "mutants.json").write_text(
        json.dumps({"command": "python -m semel.testing.mutants", "caught": rows})
    )
    (tmp_path / "simulation.json").write_text(json.dumps({"schedules": 40000, "hits": {"claim.won": 9}}))
    page = write(Report(results=[good(APPLICABLE[0].name)]), CELLS, tmp_path, "semel chaos").read_text(
        "utf-8"
    )
    text = (tmp_path / "matrix.md").read_text("utf-8")
    for shown in ("settle-unfenced", "40,000", "9 claim.won", "settle_timeout=20"):
        assert shown in page
        assert shown in text
    (tmp_path / "mutants.json").write_text("[]")
    with pytest.raises(ConfigurationError, match=r"mutants\.json"):
        write(Report(), CELLS, tmp_path, "semel chaos")


def test_a_campaign_counts_its_figures_and_says_which_are_not_reached() -> None:
    name = "redis/sync/retry/power-loss@acked.always"
    few = {each.name: each for each in campaign([good(name)] * 50, [name, "never/run"], [0.1] * 99 + [3.0])}
    assert (few["schedules"].value, few["schedules"].met) == (50, False)
    assert few["power-loss"].met
    assert few["schedules of each cell"].value == 0
    assert not few["seconds beyond the lease until recovery, p99"].met
    assert "NOT MET" in few["failover"].text
    assert set(few) >= {"store-kill", "power-loss", "failover", "zombie"}


def test_the_page_shows_a_peer_beside_our_own_cell(tmp_path: Path) -> None:
    case = CASES[1]
    finding = Finding(
        what=case.what, semel=case.semel, promised=case.promised, found=[Verdict.DOUBLED], seconds=2.5
    )
    peer = Peer(name="DBOS", version="3.3.0", findings=[finding])
    report = Report(results=[good(case.semel)])
    page = write(report, CELLS, tmp_path, "semel chaos", [peer]).read_text("utf-8")
    assert "Beside DBOS 3.3.0" in page
    assert case.what in page
    text = (tmp_path / "matrix.md").read_text("utf-8")
    assert f"| {case.what} | doubled | doubled | doubled |" in text
    assert "hold and probe" in text


def test_a_run_without_a_call_after_its_faults_or_without_a_driver_proves_nothing() -> None:
    name = APPLICABLE[0].name
    assert Report(results=[good(name, well=0, after=0)]).reach == [
        "only 0 of 0 calls ended well after the faults were over: 90% must"
    ]
    assert Report(results=[good(name)], lost=3).reach == ["a driver died, and 3 schedules have no result"]
