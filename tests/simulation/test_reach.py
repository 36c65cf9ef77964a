"""A window counts as hit when its fault struck something, not when it was tried: else a simulator that strikes nothing is valid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from semel.testing.simulation import Fault, Op, Plan, World
from semel.testing.simulation import invariants as checks
from semel.testing.simulation.loop import SimLoop
from semel.testing.simulation.reach import is_struck, shortcomings
from semel.testing.simulation.runner import check, explore
from semel.testing.simulation.stores import Server

BEFORE, DURING, AFTERWARDS = 0.5, 1.5, 6.0


def struck(*faults: Fault) -> dict[str, int]:
    """What faults reach in a world whose only call begins at 1 and works for a second."""
    broken, world = check(Plan(1, "retry", 2.0, 0.001, ((Op("k0", 1.0, 1.0, 0.0),),), faults))
    assert not broken
    assert sum(" fault " in line for line in world.trace) == len(faults), "they were all tried"
    hit = {name: count for name, count in world.reached.items() if name.partition("@")[0] in FAULTS}
    assert is_struck(world) == bool(hit)
    return hit


FAULTS = {
    "kill",
    "pause",
    "cancel",
    "worker-clock",
    "failover",
    "clock",
    "store-down",
    "cancel-at-await",
    "kill-at-point",
}


@pytest.mark.parametrize("kind", ["kill", "pause", "cancel", "worker-clock"])
def test_a_worker_is_struck_while_a_call_is_under_way_and_not_before_or_afterwards(kind: str) -> None:
    assert struck(Fault(kind, at=BEFORE, span=0.1)) == {}
    assert struck(Fault(kind, at=DURING, span=0.1)) == {kind: 1}
    assert struck(Fault(kind, at=AFTERWARDS, span=0.1)) == {}


def test_a_clock_strikes_where_the_server_knows_something() -> None:
    assert struck(Fault("clock", at=BEFORE, span=0.1)) == {}
    assert struck(Fault("clock", at=DURING, span=0.1)) == {"clock": 1}


def test_a_failover_strikes_when_it_loses_a_write() -> None:
    assert struck(Fault("failover", at=BEFORE, span=1.0)) == {}
    assert struck(Fault("failover", at=1.3, span=0.1)) == {}
    assert struck(Fault("failover", at=1.3, span=1.0)) == {"failover": 1}


def test_a_store_is_down_for_who_asks_it_meanwhile() -> None:
    assert struck(Fault("store-down", at=BEFORE, span=0.3)) == {}
    assert struck(Fault("store-down", at=BEFORE, span=0.6)) == {"store-down": 1}


def test_who_is_dead_or_stands_still_is_not_struck_again() -> None:
    dead = Fault("kill", at=DURING)
    assert struck(dead, Fault("kill", at=DURING + 0.1)) == {"kill": 1}
    assert struck(dead, Fault("pause", at=DURING + 0.1, span=0.1)) == {"kill": 1}
    assert struck(dead, Fault("cancel", at=DURING + 0.1)) == {"kill": 1}
    still = Fault("pause", at=DURING, span=1.0)
    assert struck(still, Fault("pause", at=DURING + 0.1, span=0.1)) == {"pause": 1}


def test_a_cancellation_at_an_await_strikes_a_call_that_has_begun() -> None:
    assert struck(Fault("cancel-at-await", nth=1)) == {}
    assert struck(Fault("cancel-at-await", nth=2)) == {"cancel-at-await": 1}


def test_a_point_is_a_window_of_who_passes_it_alive() -> None:
    assert struck(Fault("kill-at-point", point="run.started")) == {"kill-at-point@run.started": 1}
    both = (Fault("kill-at-point", point="claim.won"), Fault("kill-at-point", point="claim.won"))
    assert struck(*both) == {"kill-at-point@claim.won": 1}


@pytest.mark.parametrize(
    ("owner", "method", "does", "workload", "count", "missed"),
    [
        (World, "_kill", lambda *_: None, "stragglers", 60, "kill"),
        (SimLoop, "kill", lambda *_: None, "stragglers", 60, "kill"),
        (World, "_pause", lambda *_: None, "beats", 30, "pause"),
        (SimLoop, "pause", lambda *_: None, "beats", 30, "pause"),
        (World, "_cancel", lambda *_: None, "cancels", 100, "cancel-at-await"),
        (World, "_kill", lambda *_: None, "core", 300, "kill-at-point@claim.sent"),
        (Server, "fail_over", lambda *_: None, "core", 100, "failover"),
    ],
)
def test_a_fault_that_strikes_nothing_makes_a_run_invalid(
    owner: Any,
    method: str,
    does: Callable[..., Any],
    workload: str,
    count: int,
    missed: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sound = explore(0, count, workload=workload)
    assert sound.reached[missed]
    monkeypatch.setattr(owner, method, does)
    report = explore(0, count, workload=workload)
    kind = missed.partition("-at-")[0]
    assert not [name for name in report.reached if name.startswith(kind)]
    assert f" {missed}" in shortcomings(report, workload)[0]


def test_a_run_that_asks_for_no_history_is_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shortcomings(explore(0, 60, workload="stragglers"), "stragglers") == []
    monkeypatch.setattr(checks, "inexplicable", lambda _: ([], 0, 0))
    told = shortcomings(explore(0, 60, workload="stragglers"), "stragglers")
    assert told == ["no history was searched for an order of decisions"]


def test_many_schedules_are_quiet_and_the_report_says_how_many() -> None:
    """As docs/reference/simulation.md says: about one in seven has no fault, in about one of two no fault strikes anything."""
    report = explore(0, 600)
    assert 0.10 < report.faultless / report.schedules < 0.19
    assert 0.40 < report.untouched / report.schedules < 0.60
