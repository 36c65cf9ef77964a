"""The fence, asked apart from the effects: its rules on made-up stories. Planted bugs on real stores: tests/mutants."""

from __future__ import annotations

from typing import Any

import pytest

from semel.testing.chaos import Cell, Heir, Verdict
from semel.testing.chaos.fences import breach
from semel.testing.chaos.ledger import Answer, Effect, Kept, Owner, Story

VICTIM, HEIR = Owner("victim", 1.0, "aa", 1), Owner("heir", 3.0, "bb", 2)
LATE = Answer("victim", 5.0, error="LeaseLost")
RAN = Answer("heir", 6.0, {"by": "heir"}, attempt=2)
JUDGED = Answer("judge", 7.0, {"by": "heir"}, replayed=True, attempt=2)


def cell(**changes: Any) -> Cell:
    facts = {"part": "core", "store": "redis", "colour": "sync", "mode": "retry", "fault": "overlap"}
    return Cell(
        **{**facts, "point": "run.returned", "expected": Verdict.DOUBLED, "heir": Heir.RAN, **changes}
    )


def story(**changes: Any) -> Story:
    facts = {
        "effects": [Effect("effect", "victim", 1.5), Effect("effect", "heir", 5.5)],
        "answers": [LATE, RAN, JUDGED],
        "owners": [VICTIM, HEIR],
        "woken": [Answer("victim", 4.0)],
        "records": [Kept("done", "bb", 2)],
    }
    return Story(**{**facts, **changes})


def test_an_heir_whose_record_stands_and_a_late_owner_who_was_told_are_no_breach() -> None:
    assert breach(cell(), story(), Verdict.DOUBLED) == ""


@pytest.mark.parametrize(
    "changes, what",
    [
        ({"answers": [Answer("victim", 5.0, {"by": "victim"}, attempt=1), RAN, JUDGED]}, "torn"),
        (
            {"answers": [Answer("victim", 5.0, {"by": "heir"}), RAN, JUDGED]},
            "were told that they have run it",
        ),
        ({"answers": [Answer("victim", 5.0, error="NotRecorded"), RAN, JUDGED]}, "not LeaseLost"),
        ({"records": [Kept("done", "aa", 2)]}, "another's nonce"),
        ({"records": [Kept("done", "bb", 1)]}, "the record is of attempt 1"),
        ({"records": [Kept("running", "bb", 2)]}, "the record is running"),
        ({"owners": [VICTIM, Owner("heir", 3.0, "aa", 2)]}, "the same nonce"),
        ({"effects": [Effect("effect", "victim", 4.5), Effect("effect", "heir", 5.5)]}, "went on after"),
        ({"noted": [Answer("victim", 4.5)]}, "its step's note was taken"),
    ],
)
def test_each_rule_of_the_fence_has_teeth(changes: dict[str, Any], what: str) -> None:
    assert what in breach(cell(), story(**changes), Verdict.DOUBLED)


@pytest.mark.parametrize(("part", "mode"), [("http", "http-db"), ("grpc", "grpc-db")])
def test_the_client_of_an_edge_who_was_overtaken_is_told_that_its_key_is_in_progress(
    part: str, mode: str
) -> None:
    edge = cell(part=part, mode=mode)
    told = Answer("victim", 5.0, error="InProgress")
    assert breach(edge, story(answers=[told, RAN, JUDGED]), Verdict.DOUBLED) == ""
    wrong = Answer("victim", 5.0, error="previous-failure")
    assert "was overtaken and was told previous-failure" in breach(
        edge, story(answers=[wrong, RAN, JUDGED]), Verdict.DOUBLED
    )


def test_a_heartbeat_that_is_not_refused_is_a_breach() -> None:
    renewing = cell(point="renew.sent")
    assert "heartbeat" in breach(renewing, story(), Verdict.DOUBLED)
    assert breach(renewing, story(warned=[Answer("victim", 4.5)]), Verdict.DOUBLED) == ""


def test_unknown_hides_nothing() -> None:
    held = cell(mode="hold", fault="zombie")
    unknown = Answer("heir", 3.0, error="OutcomeUnknown")
    settled = Answer("victim", 5.0, {"by": "victim"}, attempt=1)
    kept = {"owners": [VICTIM], "records": [Kept("done", "aa", 1)]}
    replayed = Answer("judge", 7.0, {"by": "victim"}, replayed=True, attempt=1)
    fine = story(answers=[unknown, settled, replayed], **kept)
    assert breach(held, fine, Verdict.UNKNOWN) == ""
    stuck = story(answers=[unknown, settled, Answer("judge", 7.0, error="InProgress")], **kept)
    assert "the last caller was told InProgress" in breach(held, stuck, Verdict.UNKNOWN)
    ended = story(answers=[unknown, Answer("judge", 7.0, error="InProgress")], **kept)
    assert "unknown has become" in breach(held, ended, Verdict.UNKNOWN)


def test_a_store_that_forgets_its_records_is_asked_for_no_fence() -> None:
    lost = cell(fault="power-loss", point="acked.everysec")
    assert breach(lost, story(records=[Kept("done", "cc", 1)]), Verdict.DOUBLED) == ""
