"""The matrix as data: names, reasons, expectations against the published table, and verdicts from made-up ledgers."""

from __future__ import annotations

import json
import math
import os
import re
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

import pytest

from semel import ConfigurationError, points
from semel.testing.chaos import Cell, Heir, Report, Result, Verdict, choose, core, matrix
from semel.testing.chaos.expectations import AWAY, LOSING, permitted
from semel.testing.chaos.goals import campaign, misfortunes
from semel.testing.chaos.ledger import Answer, Effect
from semel.testing.chaos.messaging_cells import WINDOWS
from semel.testing.chaos.messaging_sinks import SINKS
from semel.testing.chaos.page import write
from semel.testing.chaos.peers import CASES, Finding, Peer
from semel.testing.chaos.preloads import no_compiler
from semel.testing.chaos.report import digest, summarize
from semel.testing.chaos.verdicts import compare, heir_of, judge, quantile, settled

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
    return Cell(**{**facts, "expected": Verdict.DOUBLED, "heir": Heir.RAN, **changes})  # type: ignore[arg-type]  # any field by its name


def test_the_matrix_is_large_and_every_name_is_its_own() -> None:
    assert len(APPLICABLE) >= 400
    assert len({each.name for each in CELLS}) == len(CELLS)
    assert "redis/async/hold/kill@run.returned" in {each.name for each in APPLICABLE}


def test_every_cell_has_an_expected_verdict_or_a_reason_and_not_both() -> None:
    assert not [each.name for each in CELLS if (each.expected is None) != bool(each.reason)]


def test_no_cell_expects_what_the_guarantee_table_does_not_allow() -> None:
    assert not [each.name for each in APPLICABLE if each.expected not in permitted(each)]


def test_every_named_point_is_struck_by_a_kill_somewhere() -> None:
    struck = {each.point.partition("#")[0] for each in APPLICABLE if each.fault == "kill"}
    assert set(points.POINTS) <= struck


MODES = ["retry", "hold", "keyed", "probe", "steps", "tx"]
HTTP_MODES = ["http-db", "http-opaque", "http-steps", "http-stream", "http-tx"]
GRPC_MODES = ["grpc-db", "grpc-opaque"]
MESSAGING_MODES = [
    "outbox",
    *(f"relay-{kind}" for kind in SINKS),
    "inbox-redis",
    "inbox-rabbit-queue",
    "inbox-nats",
]


@pytest.mark.parametrize("mode", [*MODES, *HTTP_MODES, *GRPC_MODES, *MESSAGING_MODES])
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
            "http-db": {Verdict.ONCE, Verdict.DOUBLED},
            "http-opaque": {Verdict.ONCE, Verdict.UNKNOWN},
            "http-steps": {Verdict.ONCE, Verdict.DOUBLED},
            "http-stream": {Verdict.ONCE, Verdict.DOUBLED},
            "http-tx": {Verdict.ONCE},
            "grpc-db": {Verdict.ONCE, Verdict.DOUBLED},
            "grpc-opaque": {Verdict.ONCE, Verdict.UNKNOWN},
            "outbox": {Verdict.ONCE},
            "relay-redis": {Verdict.ONCE, Verdict.LOST},
            "relay-rabbit-stream": {Verdict.ONCE},
            "relay-nats": {Verdict.ONCE},
            "relay-rabbit-queue": {Verdict.ONCE, Verdict.DOUBLED},
            "relay-webhook": {Verdict.ONCE, Verdict.DOUBLED},
            "relay-handler": {Verdict.ONCE, Verdict.DOUBLED},
            "inbox-redis": {Verdict.ONCE, Verdict.DOUBLED},
            "inbox-rabbit-queue": {Verdict.ONCE},
            "inbox-nats": {Verdict.ONCE},
        }[mode]
    )


@pytest.mark.parametrize("window", WINDOWS)
def test_every_failure_window_of_messaging_has_cells(window: str) -> None:
    mine = [each for each in APPLICABLE if fnmatchcase(each.name, WINDOWS[window])]
    assert {each.part for each in mine} == {"messaging"}
    if window not in {
        "MW8",
        "MW13",
    }:  # SQLite has one writer; brokers that are killed are told apart by their own stores
        outboxes = (
            {"redis"} if not WINDOWS[window].startswith("*/inbox-") else set()
        )  # an inbox is in a database
        assert {each.store for each in mine} == {"postgres", "mariadb", "sqlite"} | outboxes


def test_an_exact_sink_loses_only_what_was_delivered_and_not_kept() -> None:
    less = {
        each.point for each in APPLICABLE if each.mode == "relay-redis" and each.expected is not Verdict.ONCE
    }
    assert less == {"acked.gone"}
    assert {each.expected for each in APPLICABLE if each.point == "acked.kept"} == {Verdict.ONCE}


@pytest.mark.parametrize("mode", HTTP_MODES)
def test_the_http_edge_is_broken_in_every_mode_under_asgi_and_wsgi(mode: str) -> None:
    mine = [each for each in APPLICABLE if each.mode == mode]
    assert {each.colour for each in mine} == {"sync", "async"}
    assert {"kill", "zombie", "client-reset"} <= {each.fault for each in mine}
    assert {"http.admitted", "http.sent"} <= {each.point for each in mine}
    stores = {each.store for each in mine}
    assert stores == {"sqlite", "redis", "postgres"} or mode not in {"http-db", "http-tx"}


@pytest.mark.parametrize("mode", GRPC_MODES)
def test_the_grpc_edge_is_broken_at_every_point_of_a_call_under_both_kinds_of_server(mode: str) -> None:
    passed = {point for point in core.POINTS["retry"] if point not in {"renew.sent", "wait.parked"}}
    for colour, fault in product(("sync", "async"), ("kill", "zombie")):
        mine = {each.point for each in APPLICABLE if each.name.startswith(f"redis/{colour}/{mode}/{fault}@")}
        assert mine == passed
    faults = {each.fault for each in APPLICABLE if each.mode == mode}
    assert mode != "grpc-db" or faults >= {"overlap", "client-reset", "reset-before", "reset-after"}


def test_a_client_that_leaves_changes_no_outcome() -> None:
    left = {each.expected for each in APPLICABLE if each.fault == "client-reset"}
    assert left == {Verdict.ONCE}


def test_each_weak_setting_is_broken_and_its_strong_one_beside_it() -> None:
    lost = {
        store: {
            each.point
            for each in APPLICABLE
            if (each.store, each.fault, each.mode) == (store, "power-loss", "tx")
        }
        for store in ("sqlite", "redis", "postgres", "mariadb")
    }
    assert lost == {
        "sqlite": {"acked.full", "acked.normal", "acked.off"},
        "redis": {"acked.always", "acked.everysec"},
        "postgres": {"acked.synchronous", "acked.asynchronous", "acked.unsynced"},
        "mariadb": {"acked.flush-1", "acked.flush-2", "acked.flush-0"},
    }
    for each in APPLICABLE:
        if each.fault == "power-loss" and each.mode == "tx":
            assert (each.expected is Verdict.LOST) == (each.point in LOSING), each.name


def test_what_memory_can_outlive_is_broken_and_the_rest_has_a_reason() -> None:
    mine = [each for each in CELLS if each.store == "memory"]
    assert {each.fault for each in mine if each.applies} == {
        "thread-death", "zombie", "overlap", "overruled", "cancel", "interrupt",
    }  # fmt: skip
    assert {"kill", "power-loss", "store-kill", "reset-after"} <= {
        each.fault for each in mine if not each.applies
    }


@pytest.mark.parametrize("point", AWAY)
def test_every_server_is_met_while_it_is_away_in_both_colours(point: str) -> None:
    met = {
        (each.store, each.colour)
        for each in APPLICABLE
        if (each.fault, each.point) == ("store-kill", point) and each.part == "core"
    }
    assert met == set(product(("redis", "cluster", "postgres", "mariadb"), ("sync", "async")))


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


def test_an_effect_that_was_told_and_gone_is_lost_though_it_was_made_again_and_doubled_when_made_twice() -> (
    None
):
    told = Answer("victim", 1.0, {"by": "x"})
    gone, kept = Answer("store", 2.0, attempt=0), Answer("store", 2.0, attempt=1)
    lost = cell(mode="tx", fault="power-loss", point="acked.everysec")
    assert judge(lost, [AGAIN], [told, TOLD, REPLAYED], ("effect",), survived=gone) is Verdict.LOST
    assert judge(lost, [AGAIN, AGAIN], [told, TOLD, REPLAYED], ("effect",), survived=gone) is Verdict.DOUBLED
    assert judge(lost, [MADE], [told, TOLD, REPLAYED], ("effect",), survived=kept) is Verdict.ONCE
    assert judge(lost, [AGAIN], [TOLD, REPLAYED], ("effect",), survived=gone) is Verdict.ONCE, (
        "nobody was told"
    )


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


# ---- reach: a run that proves nothing fails


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


def test_calls_count_after_the_fault_only() -> None:
    busy = Answer("heir", 1.0, error="InProgress")
    unknown = Answer("judge", 2.0, error="OutcomeUnknown")
    assert settled(cell(), [Answer("victim", 0.5, error="Crashed"), busy, unknown]) == (2, 1)
    assert settled(cell(heir=Heir.BUSY), [busy, REPLAYED]) == (1, 1)


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


def test_more_hangs_than_a_few_make_a_run_invalid_however_long_it_is() -> None:
    name, rest = APPLICABLE[0].name, 20_000
    hung = good(name, again=True, hung=True, first="TimeoutError: the heir did not end")
    assert Report(results=[hung] * 40 + [good(name)] * (rest - 40)).valid
    assert Report(results=[hung] * 24 + [good(name)] * 76).valid
    many = Report(results=[hung] * 41 + [good(name)] * (rest - 41))
    assert many.reach == ["in 41 of 20000 schedules somebody did not end at the first try: 0.2% may"]


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
    assert "3: in 2 somebody did not end in time" in page
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
    assert Report(results=[good(name)], timed=4).reach == ["no recovery was measured"]
    assert Report(results=[good(name, recovery=0.6, lease=0.5)], timed=1).valid
    assert math.isnan(quantile([], 0.5))
    figures = {each.name: each for each in campaign([good(name)], [name], [])}
    assert not figures["seconds beyond the lease until recovery, p99"].met


def test_every_lossy_replication_is_broken_beside_one_that_waits() -> None:
    for store in ("redis", "cluster", "postgres", "mariadb"):
        mine = {
            each.point: each.expected
            for each in APPLICABLE
            if each.name.startswith(f"{store}/sync/tx/failover@")
        }
        assert mine["acked.lagging"] is Verdict.LOST
        assert mine["acked.waited"] is mine["run.returned"] is Verdict.ONCE


def test_a_cell_that_could_be_and_is_not_is_counted_apart() -> None:
    unbuilt = [each for each in CELLS if each.unbuilt]
    summary = summarize(Report(), CELLS, "semel chaos")
    assert summary.not_built == len(unbuilt)
    assert summary.applicable + summary.not_applicable + summary.not_built == len(CELLS)


def test_every_cell_that_could_be_is_built() -> None:
    assert not [each.name for each in CELLS if each.unbuilt]


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


def test_every_case_of_a_peer_stands_beside_a_cell_that_applies() -> None:
    names = {each.name for each in APPLICABLE}
    assert not [case.semel for case in CASES if case.semel not in names]


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


def test_the_published_run_is_of_this_matrix_and_nothing_in_it_disagrees() -> None:
    """Made again by the command that stands in it, when cells have come or gone."""
    folder = Path(__file__).parents[2] / "docs" / "chaos"
    text = (folder / "matrix.md").read_text("utf-8")
    assert ": 0 disagree, 0 cells had none" in text
    assert "**0 lost, 0 doubled**" in text
    assert "## Beside DBOS" in text
    assert (folder / "index.html").stat().st_size < 450_000
    counted = re.search(
        r"^\* (\d+) cells that apply \(digest `(\w+)`\), (\d+) that do not, (\d+) not", text, re.MULTILINE
    )
    assert counted is not None
    assert int(counted[1]) + int(counted[3]) + int(counted[4]) == len(CELLS)
    if no_compiler() or os.geteuid() != 0:
        pytest.skip("COMPILER OR ROOT MISSING: some cells of the published run do not apply on this machine")
    assert counted[2] == digest(CELLS)
