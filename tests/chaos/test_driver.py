"""When a schedule is played once more: never to make a worse verdict go away."""

from __future__ import annotations

from typing import Any

import pytest

from semel.testing.chaos import driver
from semel.testing.chaos.cells import Cell, Heir, Verdict, matrix
from semel.testing.chaos.driver import Job
from semel.testing.chaos.ledger import Answer
from semel.testing.chaos.verdicts import Result

CELLS = {cell.name: cell for cell in matrix()}
TWICE = CELLS["redis/sync/http-steps/zombie@http.admitted"]
ONCE = CELLS["redis/sync/outbox/kill@settle.sent"]


def _result(
    cell: Cell, verdict: Verdict, problem: str = "", *, bit: bool = True, heir: Heir = Heir.ANY
) -> Result:
    return Result(cell=cell.name, verdict=verdict, heir=heir, agrees=not problem, problem=problem, bit=bit)


BESIDE = "expected that the next caller runs it, found that it gets a replay"


@pytest.mark.parametrize(
    ("cell", "first", "plays"),
    [
        (TWICE, _result(TWICE, Verdict.DOUBLED), 1),
        (TWICE, _result(TWICE, Verdict.ONCE, "expected doubled, found exactly once"), 2),
        (TWICE, _result(TWICE, Verdict.ONCE, "the fault did not strike: nothing came", bit=False), 1),
        (TWICE, _result(TWICE, Verdict.LOST, "expected doubled, found lost"), 1),
        (ONCE, _result(ONCE, Verdict.ONCE), 1),
        (ONCE, _result(ONCE, Verdict.DOUBLED, "expected exactly once, found doubled"), 1),
        (ONCE, _result(ONCE, Verdict.LOST, "expected exactly once, found lost"), 1),
        (ONCE, _result(ONCE, Verdict.STUCK, "TimeoutError: the heir did not end"), 2),
        (ONCE, _result(ONCE, Verdict.DOUBLED, "TimeoutError: the judge did not end"), 1),
        (ONCE, _result(ONCE, Verdict.STUCK, f"{driver._STARVED}: expected exactly once, found stuck"), 2),
        (ONCE, _result(ONCE, Verdict.DOUBLED, f"{driver._STARVED}: expected exactly once, found doubled"), 1),
        (ONCE, _result(ONCE, Verdict.ONCE, BESIDE, heir=Heir.REPLAYED), 2),
        (ONCE, _result(ONCE, Verdict.ONCE, f"{BESIDE}; a late write was taken", heir=Heir.REPLAYED), 1),
        (
            ONCE,
            _result(ONCE, Verdict.ONCE, "expected that the next caller runs it, found …", heir=Heir.BUSY),
            1,
        ),
    ],
)
def test_only_what_has_no_verdict_or_a_better_one_is_played_once_more(
    cell: Cell, first: Result, plays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (TWICE.expected, ONCE.expected, ONCE.heir) == (Verdict.DOUBLED, Verdict.ONCE, Heir.RAN)
    results = iter([first, _result(cell, Verdict.TORN, "the second")])

    def played(_jobs: Any, _places: Any) -> list[Result]:
        return [next(results)]

    monkeypatch.setattr(driver, "_played", played)
    (found,) = driver.run([Job(cell=cell, number=0, lease=1.0)], None)  # type: ignore[arg-type]  # nobody is asked
    assert (found.again, found.problem) == ((True, "the second") if plays == 2 else (False, first.problem))


def test_in_a_batch_that_is_played_again_a_worse_verdict_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = _result(ONCE, Verdict.DOUBLED, "expected exactly once, found doubled")
    late = _result(ONCE, Verdict.STUCK, "TimeoutError: the heir did not end")
    fine = _result(ONCE, Verdict.ONCE)
    plays = iter([[wrong, late, fine], [_result(ONCE, Verdict.ONCE) for _ in range(3)]])

    def played(_jobs: Any, _places: Any) -> list[Result]:
        return next(plays)

    monkeypatch.setattr(driver, "_played", played)
    jobs = [Job(cell=ONCE, number=number, lease=1.0) for number in range(3)]
    found = driver.run(jobs, None)  # type: ignore[arg-type]  # nobody is asked
    assert [each.agrees for each in found] == [False, True, True]
    assert [each.again for each in found] == [False, True, True]
    assert found[1].first == "TimeoutError: the heir did not end"


@pytest.mark.parametrize(
    ("verdict", "told", "starved"),
    [
        (Verdict.STUCK, ("StoreUnavailable",), True),
        (Verdict.STUCK, ("InProgress",), False),
        (Verdict.LOST, ("StoreUnavailable",), True),  # by the judge's word alone
        (Verdict.LOST, ("StoreUnavailable", ""), False),  # a caller was told that it happened
        (Verdict.ONCE, ("StoreUnavailable", ""), True),
    ],
)
def test_a_store_that_was_away_excuses_no_loss_of_what_was_told(
    verdict: Verdict, told: tuple[str, ...], starved: bool
) -> None:
    answers = [Answer(by="heir", at=0.0, error=error) for error in told]
    assert driver._starved(verdict, [*answers, Answer(by="judge", at=1.0)]) is starved
