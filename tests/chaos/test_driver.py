"""When a schedule is played once more: never to make a worse verdict go away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from semel.testing.chaos import driver
from semel.testing.chaos.cells import Cell, Heir, Verdict, matrix
from semel.testing.chaos.driver import Job
from semel.testing.chaos.judging import STARVED, has_no_verdict, judged, starved
from semel.testing.chaos.ledger import Answer, Ledger
from semel.testing.chaos.verdicts import Result

CELLS = {cell.name: cell for cell in matrix()}
TWICE = CELLS["redis/sync/http-steps/zombie@http.admitted"]
QUEUE = CELLS["postgres/async/relay-rabbit-queue/broker-kill@relay.published"]
ONCE = CELLS["redis/sync/outbox/kill@settle.sent"]
PLAIN = CELLS["redis/sync/retry/kill@claim.sent"]
TX = CELLS["postgres/sync/tx/kill@commit.sent"]
FULL = CELLS["postgres/sync/retry/disk-full@run.returned"]
RELAY = CELLS["postgres/async/relay-redis/kill@relay.planned"]
HUNG = "TimeoutError: the judge did not end"
SPARED = "expected doubled, found exactly once"
MISSED = "the fault did not strike: nothing reached run.returned"


def _result(
    cell: Cell, verdict: Verdict, problem: str = "", *, bit: bool = True, heir: Heir = Heir.ANY
) -> Result:
    return Result(cell=cell.name, verdict=verdict, heir=heir, agrees=not problem, problem=problem, bit=bit)


BESIDE = "expected that the next caller runs it, found that it gets a replay"


@pytest.mark.parametrize(
    ("cell", "first", "plays"),
    [
        (TWICE, _result(TWICE, Verdict.DOUBLED), 1),
        (TWICE, _result(TWICE, Verdict.ONCE, SPARED), 2),
        (TWICE, _result(TWICE, Verdict.ONCE, f"{SPARED}; its heartbeat has not told the victim"), 1),
        (TWICE, _result(TWICE, Verdict.ONCE, "the fault did not strike: nothing came", bit=False), 1),
        (FULL, _result(FULL, Verdict.ONCE, MISSED, bit=False), 2),  # the server has made room
        (FULL, _result(FULL, Verdict.ONCE, f"{MISSED}; a late write was taken", bit=False), 1),
        (FULL, _result(FULL, Verdict.DOUBLED, MISSED, bit=False), 1),
        (TWICE, _result(TWICE, Verdict.LOST, "expected doubled, found lost"), 1),
        (ONCE, _result(ONCE, Verdict.ONCE), 1),
        (ONCE, _result(ONCE, Verdict.DOUBLED, "expected exactly once, found doubled"), 1),
        (ONCE, _result(ONCE, Verdict.LOST, "expected exactly once, found lost"), 1),
        (ONCE, _result(ONCE, Verdict.STUCK, "TimeoutError: the heir did not end"), 2),
        (ONCE, _result(ONCE, Verdict.DOUBLED, HUNG), 1),
        (PLAIN, _result(PLAIN, Verdict.LOST, HUNG), 1),  # its effect is written down when it is made
        (RELAY, _result(RELAY, Verdict.LOST, HUNG), 1),  # its messages are there before it begins
        (TX, _result(TX, Verdict.LOST, HUNG), 2),  # its rows are read in the end
        (ONCE, _result(ONCE, Verdict.LOST, f"{STARVED}: …"), 2),  # nobody was told that it is written
        (ONCE, _result(ONCE, Verdict.STUCK, f"{STARVED}: expected exactly once, found stuck"), 2),
        (ONCE, _result(ONCE, Verdict.DOUBLED, f"{STARVED}: expected exactly once, found doubled"), 1),
        (
            QUEUE,
            _result(QUEUE, Verdict.DOUBLED, "expected exactly once, found doubled", heir=Heir.RAN),
            2,
        ),  # it may
        (QUEUE, _result(QUEUE, Verdict.LOST, "expected exactly once, found lost", heir=Heir.RAN), 1),
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


FIRST, SECOND = b"n" * 8, b"m" * 8


def _overtaken(ledger: Ledger) -> None:
    """The heir has run it while the victim slept."""
    ledger.entered("victim", FIRST, 1)
    ledger.struck("victim")
    ledger.entered("heir", SECOND, 2)
    ledger.effect("effect", "heir")
    ledger.answer("heir", {"by": "heir"}, replayed=False, attempt=2)
    ledger.woke("victim")


def _looked(ledger: Ledger, nonce: bytes = SECOND) -> None:
    ledger.answer("judge", {"by": "heir"}, replayed=True, attempt=2)
    ledger.keep("done", nonce, 2)


def _fine(ledger: Ledger) -> None:
    _overtaken(ledger)
    ledger.error("victim", "LeaseLost")
    _looked(ledger)


def _two_owners(ledger: Ledger) -> None:
    _overtaken(ledger)
    ledger.answer("victim", {"by": "heir"}, replayed=False, attempt=2)
    _looked(ledger)


def _wrong_nonce(ledger: Ledger) -> None:
    _overtaken(ledger)
    ledger.error("victim", "LeaseLost")
    _looked(ledger, FIRST)


def _noted(ledger: Ledger) -> None:
    _overtaken(ledger)
    ledger.note("victim")
    ledger.error("victim", "LeaseLost")
    _looked(ledger)


def _away(ledger: Ledger) -> None:
    _overtaken(ledger)
    ledger.error("victim", "StoreUnavailable")
    _looked(ledger)


def _torn(ledger: Ledger) -> None:
    ledger.effect("effect", "victim")
    _overtaken(ledger)
    ledger.answer("victim", {"by": "victim"}, replayed=False, attempt=1)


def _told_nothing(ledger: Ledger) -> None:
    ledger.struck("victim")
    ledger.answer("heir", {"by": "heir"}, replayed=True, attempt=1)


BEFORE, AFTER = "redis/sync/retry/zombie@run.started", "redis/sync/retry/zombie@run.returned"


@pytest.mark.parametrize(
    ("name", "story", "hung", "breach", "again"),
    [
        (BEFORE, _fine, "", "", True),
        (BEFORE, _two_owners, "", "were told that they have run it", False),
        (BEFORE, _wrong_nonce, "", "another's nonce", False),
        (BEFORE, _noted, "", "its step's note was taken", False),
        (BEFORE, _wrong_nonce, HUNG, "another's nonce", False),
        (BEFORE, _away, "", "", True),  # a store that was away tells nobody LeaseLost
        (AFTER, _torn, HUNG, "torn: the heir was told", False),
        (AFTER, _overtaken, HUNG, "", True),
        (PLAIN.name, _told_nothing, HUNG, "", False),  # lost
    ],
)
def test_a_breach_is_in_the_result_whoever_hung_and_is_never_played_away(
    name: str, story: Callable[[Ledger], None], hung: str, breach: str, again: bool, tmp_path: Path
) -> None:
    ledger = Ledger(str(tmp_path))
    story(ledger)
    job = Job(cell=CELLS[name], number=0, lease=0.1)
    found = judged(job, ledger, bit=True, problem=hung, doubt="")
    assert not found.agrees
    assert found.problem.startswith(hung)
    assert ("found lost" in found.problem) == (found.verdict is Verdict.LOST)
    assert breach in found.problem
    assert breach in found.breach
    assert bool(found.breach) == bool(breach)
    assert has_no_verdict(job.cell, found) is again


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
    assert [each.hung for each in found] == [False, True, False]


@pytest.mark.parametrize(
    ("verdict", "told", "away"),
    [
        (Verdict.STUCK, ("StoreUnavailable",), True),
        (Verdict.STUCK, ("InProgress",), False),
        (Verdict.LOST, ("StoreUnavailable",), True),  # by the judge's word alone
        (Verdict.LOST, ("StoreUnavailable", ""), False),  # a caller was told that it happened
        (Verdict.ONCE, ("StoreUnavailable", ""), True),
    ],
)
def test_a_store_that_was_away_excuses_no_loss_of_what_was_told(
    verdict: Verdict, told: tuple[str, ...], away: bool
) -> None:
    answers = [Answer(by="heir", at=0.0, error=error) for error in told]
    assert starved(verdict, [*answers, Answer(by="judge", at=1.0)]) is away


def test_an_error_whose_text_json_cannot_carry_is_in_the_ledger_and_in_the_result(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path))
    ledger.error("victim", "Unexpected", "no file caf\udce9")
    (told,) = ledger.answers()
    assert told.text == r"no file caf\udce9"


def test_a_schedule_that_fails_with_such_a_text_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Nowhere:
        folder = str(tmp_path)

        def url(self, _: Cell) -> str:
            return ""

    def fails(_: object) -> None:
        raise OSError("no file caf\udce9")

    monkeypatch.setitem(driver.ORDERS, "kill", fails)
    (found,) = driver.run([Job(cell=PLAIN, number=0, lease=1.0)], Nowhere())  # type: ignore[arg-type]  # nobody is asked
    assert r"OSError: no file caf\udce9" in found.problem
    assert msgspec.json.encode(found)
