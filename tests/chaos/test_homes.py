"""In which order schedules are played: round by round, the lanes among them, each by one driver."""

from __future__ import annotations

from semel.testing.chaos.cells import matrix
from semel.testing.chaos.homes import Homes
from semel.testing.chaos.runner import jobs_for

CELLS = [cell for cell in matrix() if cell.applies and cell.store == "redis"]


def test_every_round_plays_its_lanes_before_the_next_round_begins_elsewhere() -> None:
    jobs = jobs_for(CELLS, repeat=3)
    homes = Homes(jobs)
    drivers = range(4)
    played: list[tuple[int, int, str]] = []
    idle: set[int] = set()
    while len(idle) < len(drivers):
        for driver in drivers:
            batch = homes.next(driver)
            if batch is None:
                idle.add(driver)
                continue
            assert len({job.cell.lane for job in batch}) == len({job.number for job in batch}) == 1
            played += [(driver, job.number, job.cell.lane) for job in batch]
    assert len(played) == len(jobs)
    for lane in {cell.lane for cell in CELLS if cell.lane}:
        assert len({driver for driver, _, its in played if its == lane}) == 1, f"{lane} has two drivers"
    for driver in drivers:
        rounds = [number for which, number, _ in played if which == driver]
        assert rounds == sorted(rounds)
        assert set(rounds) == {0, 1, 2}


def test_a_driver_whose_home_is_done_helps_where_most_is_left() -> None:
    homes = Homes(jobs_for([cell for cell in CELLS if not cell.lane]))
    first = homes.next("one")
    assert first is not None
    seen = {(job.cell.store, job.cell.part) for job in first}
    while batch := homes.next("one"):
        seen |= {(job.cell.store, job.cell.part) for job in batch}
    assert seen == {(cell.store, cell.part) for cell in CELLS if not cell.lane}
    assert homes.next("two") is None
