"""The verdicts of messaging from made-up ledgers. That its cells can be wrong is in test_matrix.py."""

from __future__ import annotations

from typing import Any

import pytest

from semel.testing.chaos import Cell, Heir, Verdict
from semel.testing.chaos.ledger import Answer, Effect, Story
from semel.testing.chaos.messaging_verdicts import certain, ids_of, judged, wanted

OVER = Answer("judge", 9.0, "all is over", replayed=True)
SENT = ids_of()
ROWS = [f"row {name}" for name in SENT]


def cell(**changes: Any) -> Cell:
    facts = {
        "part": "messaging",
        "store": "postgres",
        "colour": "async",
        "mode": "relay-redis",
        "fault": "kill",
    }
    return Cell(
        **{**facts, "point": "relay.published", "expected": Verdict.ONCE, "heir": Heir.REPLAYED, **changes}
    )


def story(arrived: list[str], **changes: Any) -> Story:
    rows = changes.pop("rows", [*(f"row {name}" for name in SENT), *dict.fromkeys(arrived)])
    effects = [Effect(name, "sink", 1.0) for name in arrived] + [
        Effect(name, "database", 2.0) for name in rows
    ]
    return Story(effects=effects, **{"answers": [OVER], **changes})


@pytest.mark.parametrize(
    "arrived, verdict",
    [
        (SENT, Verdict.ONCE),
        (["b1", "a1", "b2", "a2", "a3", "b3"], Verdict.ONCE),
        ([*SENT, "a3"], Verdict.DOUBLED),
        ([*SENT[1:], "a3"], Verdict.DOUBLED),  # what is expected to lose doubles nothing
        (SENT[1:], Verdict.LOST),
        ([], Verdict.LOST),
        (["a2", "a1", "a3", "b1", "b2", "b3"], Verdict.REORDERED),
    ],
)
def test_the_verdict_is_what_the_sink_has(arrived: list[str], verdict: Verdict) -> None:
    assert judged(cell(), story(arrived))[0] is verdict


def test_messages_that_are_left_over_are_no_end() -> None:
    left = Answer("judge", 9.0, error="Left", text="in the outbox: a1")
    assert judged(cell(), story(SENT, answers=[left]))[0] is Verdict.STUCK
    assert judged(cell(), story(SENT, answers=[]))[0] is Verdict.STUCK


@pytest.mark.parametrize(
    "changes, facts, what",
    [
        ({}, {"arrived": ["a2", "a1", "a2", "a3", "b1", "b2", "b3"]}, "reordered: a2 a1"),
        ({}, {"rows": [*(f"row {name}" for name in SENT), *SENT, "a1"]}, "the inbox has admitted a1"),
        ({}, {"rows": [*(f"row {name}" for name in SENT[1:]), *SENT]}, "the application's rows of a1"),
        ({}, {"arrived": [*SENT, "a9"]}, "what was rolled back"),
        ({"expected": Verdict.DOUBLED}, {"arrived": [*SENT[:-1], "a1"]}, "lost: b3"),
        ({"expected": Verdict.DOUBLED}, {"arrived": [*SENT, "a1"], "rows": ROWS}, "the inbox has admitted"),
        ({"fault": "zombie"}, {}, "the overtaken relay was not told"),
        ({"fault": "torn-log", "point": "acked.overtaken"}, {}, "the overtaken relay was not told"),
        ({"fault": "broker-kill"}, {}, "nobody has paused"),
        ({"fault": "torn-log", "point": "acked.gone"}, {}, "without an alarm"),
    ],
)
def test_what_must_hold_besides_has_teeth(changes: dict[str, Any], facts: dict[str, Any], what: str) -> None:
    arrived = facts.pop("arrived", SENT)
    if changes.get("point", "").startswith("acked."):
        arrived = ids_of(count=4)
        facts["rows"] = [*(f"row {name}" for name in arrived), *arrived]
    assert what in judged(cell(**changes), story(arrived, **facts))[1]


def test_only_where_a_loss_is_expected_may_a_message_be_missing() -> None:
    lost = cell(fault="torn-log", point="acked.gone", expected=Verdict.LOST)
    rows = [f"row {name}" for name in ids_of(count=4)]
    alarmed = Answer("heir", 5.0, {"alarms": ["lost-tail"]})
    made = story(SENT, rows=[*rows, *SENT], answers=[alarmed, OVER])
    assert judged(lost, made) == (Verdict.LOST, "")
    assert "lost: a4 b4" in judged(cell(fault="torn-log", point="acked.gone"), made)[1]


@pytest.mark.parametrize(
    "changes, facts, what",
    [
        ({}, {"answers": []}, ""),  # nobody has looked: what is missing may be on its way
        ({}, {"answers": [Answer("judge", 9.0, error="Left")]}, ""),
        ({}, {}, "lost: b3"),
        ({"mode": "outbox"}, {"arrived": [], "answers": [OVER]}, ""),  # nobody was told that it is written
        ({"mode": "outbox"}, {"arrived": [], "answers": [Answer("heir", 5.0, "heir"), OVER]}, "lost: a1"),
        ({}, {"arrived": [*SENT, "a9"], "answers": []}, "what was rolled back"),
        ({}, {"arrived": ["a2", "a1"], "answers": []}, "reordered: a2 a1"),
    ],
)
def test_what_is_certain_is_so_although_somebody_did_not_end(
    changes: dict[str, Any], facts: dict[str, Any], what: str
) -> None:
    said = certain(cell(**changes), story(facts.pop("arrived", SENT[:-1]), **facts))
    assert said.startswith(what)
    assert bool(said) == bool(what)


def test_a_copy_that_comes_later_is_doubled_and_not_reordered() -> None:
    verdict, problem = judged(cell(mode="relay-handler"), story([*SENT[:4], *SENT]))
    assert (verdict, problem) == (Verdict.DOUBLED, "")


def test_a_handlers_row_and_its_message_must_commit_together() -> None:
    mine = cell(mode="inbox-redis", point="consumer.handled#2")
    names = wanted(mine)
    effects = [Effect(name, "database", 1.0) for name in names]
    sent = [Effect(f"next-{name}", "outbox", 2.0) for name in names]
    assert judged(mine, Story(effects=effects + sent, answers=[OVER])) == (Verdict.ONCE, "")
    assert "a3 did not commit together" in judged(mine, Story(effects=effects + sent[:2], answers=[OVER]))[1]
    assert judged(mine, Story(effects=[*effects, effects[0], *sent], answers=[OVER]))[0] is Verdict.DOUBLED
