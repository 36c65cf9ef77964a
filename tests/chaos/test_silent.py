"""None is silent: where something befalls a mode, each store and colour has a cell for it, or a reason."""

from __future__ import annotations

from itertools import product

import pytest

from semel.testing.chaos import Verdict, matrix
from semel.testing.chaos.core import MODES

CELLS = matrix()
APPLICABLE = [cell for cell in CELLS if cell.applies]
COMMON = {
    "kill", "zombie", "cancel", "interrupt", "reset-before", "reset-after", "stall", "store-kill", "power-loss", "failover",
    "clock-forward", "clock-back", "disk-full", "slow",
}  # fmt: skip


def test_no_common_fault_is_silent_in_any_mode_on_any_store() -> None:
    """Each is a cell, or has a reason."""
    faults: dict[tuple[str, str, str], set[str]] = {}
    for each in CELLS:
        faults.setdefault((each.mode, each.store, each.colour), set()).add(each.fault)
    silent = {name: COMMON - found for name, found in faults.items() if "any" not in found and COMMON - found}
    assert not silent


def test_what_befalls_a_mode_on_one_store_in_one_colour_is_silent_on_no_other() -> None:
    """Each is a cell, or has a reason."""
    stores = ("sqlite", "redis", "postgres", "mariadb", "cluster", "memory")
    for mode in {each.mode for each in CELLS}:
        mine = [each for each in CELLS if each.mode == mode]
        everywhere = {each.fault for each in mine} - {"any"}
        for store, colour in product(stores, ("sync", "async")):
            here = {each.fault for each in mine if (each.store, each.colour) == (store, colour)}
            assert "any" in here or here >= everywhere, (mode, store, colour, everywhere - here)


def test_a_late_copy_comes_in_both_colours_to_every_database() -> None:
    met = {(each.store, each.colour, each.point) for each in APPLICABLE if each.fault == "late-copy"}
    points = ("kept", "refused", "forgotten")
    assert met == set(product(("sqlite", "postgres", "mariadb"), ("sync", "async"), points))


@pytest.mark.parametrize("mode", ["retry", "hold", "keyed", "probe", "steps"])
def test_a_locked_file_is_the_stall_of_sqlite_wherever_a_server_has_one(mode: str) -> None:
    def stalls(store: str) -> set[str]:
        names = [f"{store}/{colour}/{mode}/stall@" for colour in ("sync", "async")]
        return {each.point for each in APPLICABLE if each.name.startswith(tuple(names))}

    assert stalls("sqlite") == stalls("redis") - {"wait.parked"}


WIRE = {"reset-before", "reset-after", "stall"}
LEAVES = {"claim.sent", "settle.sent", "renew.sent", "wait.parked"}
"""Points of a call from which a request leaves; notes leave at step.returned, commits at commit.sent."""


@pytest.mark.parametrize("mode", MODES)
def test_no_request_of_a_call_is_silent_on_the_wire_or_when_its_server_dies(mode: str) -> None:
    """At each point from which one leaves each is a cell, or has a reason."""
    leaves = LEAVES | {"tx": {"commit.sent"}, "steps": {"step.returned#1", "step.returned#2"}}.get(
        mode, set()
    )
    stores = ("sqlite", "redis", "postgres", "mariadb", "cluster")
    for store, colour, fault in product(stores, ("sync", "async"), WIRE | {"store-kill"}):
        mine = {each.point for each in CELLS if each.name.startswith(f"{store}/{colour}/{mode}/{fault}@")}
        assert leaves - {"commit.sent" if fault == "store-kill" else ""} <= mine, (store, colour, fault)


@pytest.mark.parametrize("point", ["renew.sent", "wait.parked"])
def test_a_heartbeat_and_one_who_waits_are_broken_on_every_kind_of_wire(point: str) -> None:
    met = {
        (each.store, each.colour, each.fault): each.expected
        for each in APPLICABLE
        if each.point == point and each.fault in WIRE
    }
    locked = {("sqlite", colour, "stall") for colour in ("sync", "async")} if point == "renew.sent" else set()
    assert set(met) == set(product(("redis", "postgres", "mariadb"), ("sync", "async"), WIRE)) | locked
    assert set(met.values()) == {Verdict.ONCE}


def test_what_is_broken_in_no_mode_of_its_own_has_a_reason() -> None:
    listed = {(each.mode, each.store, each.colour) for each in CELLS if each.mode in {"failing", "expiry"}}
    stores = ("sqlite", "redis", "postgres", "mariadb", "cluster", "memory")
    assert listed == set(product(("failing", "expiry"), stores, ("sync", "async")))
    edge = {each.point for each in CELLS if (each.mode, each.fault) == ("http-tx", "reset-after")}
    assert edge >= {"commit.sent", "settle.sent#1", "claim.sent#2"}
