"""The fence, asked apart from the effects: the rules on made-up stories, and planted bugs on real stores."""

from __future__ import annotations

from typing import Any

import pytest

from semel.testing import services
from semel.testing.chaos import Cell, Heir, Report, Verdict, explore, jobs_for, matrix
from semel.testing.chaos.fences import breach
from semel.testing.chaos.ledger import Answer, Effect, Kept, Owner, Story
from semel.testing.chaos.planted import FENCES

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


# ---- planted bugs, in every worker of a real run

CELLS = {each.name: each for each in matrix()}
SETTLES = {
    store: [f"{store}/{colour}/retry/overlap@run.returned" for colour in ("sync", "async")]
    for store in FENCES
}
OTHERS = {
    "redis-renewal-of-anybody": ("redis/sync/retry/overlap@renew.sent", "heartbeat"),
    "mariadb-note-of-anybody": ("mariadb/sync/steps/overlap@step.returned#1", "went on after"),
    "postgres-renewal-of-nothing": (
        "postgres/sync/retry/slow@renew.sent#4",
        "expected exactly once, found doubled",
    ),
    "sqlite-unsynced": ("sqlite/sync/retry/power-loss@acked.full", "expected exactly once, found doubled"),
    "inbox-acks-before-its-commit": (
        "sqlite/sync/inbox-redis/kill@consumer.handled#2",
        "expected exactly once, found lost",
    ),
    "redis-sink-without-its-epoch": (
        "redis/async/relay-redis/torn-log@acked.overtaken",
        "expected exactly once, found doubled",
    ),
    "webhook-sink-drops-a-message": ("postgres/async/relay-webhook/kill@relay.published", "lost: b3"),
    "waiter-gives-up-at-a-silence": (
        "postgres/sync/retry/stall@wait.parked",
        "had time left, was told StoreUnavailable",
    ),
    "redis-everysec-is-always": ("redis/sync/hold/power-loss@acked.everysec", "this setting is not weak"),
}
SILENCES = [
    f"{store}/{colour}/retry/stall@renew.sent"
    for store in ("sqlite", "redis", "postgres", "mariadb")
    for colour in ("sync", "async")
]
"""One heartbeat is not answered; SQLite's cannot be written, because its file is locked."""
GIVES_UP = "heart-stops-after-an-error"
NEEDS = {"redis": "redis", "cluster": "redis", "postgres": "postgres", "mariadb": "mariadb"}


def lacking(name: str) -> str:
    """Why a cell cannot be played here: a server that is not installed."""
    missing = services.missing()
    servers = (NEEDS.get(each) for each in (CELLS[name].store, *CELLS[name].needs))
    return next((missing[each] for each in servers if each in missing), "")


def planted(names: list[str], mutants: list[str]) -> Report:
    chosen = [CELLS[name] for name in names if not lacking(name)]
    return explore(jobs_for(chosen), drivers=8, mutants=mutants)


@pytest.fixture(scope="module")
def unsettled() -> Report:
    """All of them at once: each is seen on a store of its own."""
    names = [name for mine in SETTLES.values() for name in mine]
    return planted(names, [name for mine in FENCES.values() for name in mine])


@pytest.fixture(scope="module")
def others() -> Report:
    """Apart from those: what they do would be seen first."""
    return planted([name for name, _ in OTHERS.values()], list(OTHERS))


@pytest.fixture(scope="module")
def silenced() -> Report:
    """Apart from those, too: one of them renews nothing, with the same end."""
    return planted(SILENCES, [GIVES_UP])


def problem(report: Report, name: str) -> str:
    if why := lacking(name):
        raise services.ServerMissing(why)
    return next(each.problem for each in report.results if each.cell == name)


@pytest.mark.services
@pytest.mark.timeout(300)
@pytest.mark.parametrize("store", FENCES)
def test_a_settle_without_its_fence_is_seen_on_every_real_store_in_both_colours(
    unsettled: Report, store: str
) -> None:
    for name in SETTLES[store]:
        assert problem(unsettled, name).startswith("torn: the victim was told"), name


@pytest.mark.services
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", OTHERS)
def test_other_planted_bugs_are_seen_on_real_stores_and_so_is_a_weak_setting_that_is_none(
    others: Report, mutant: str
) -> None:
    name, what = OTHERS[mutant]
    assert what in problem(others, name)


@pytest.mark.services
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SILENCES)
def test_a_heart_that_gives_up_at_one_silence_is_seen_on_every_kind_of_wire_in_both_colours(
    silenced: Report, name: str
) -> None:
    # Seen is what counts: where the machine stood still, the silence was over before the heartbeat had failed.
    found = problem(silenced, name) or problem(planted([name], [GIVES_UP]), name)
    assert found.startswith("expected exactly once, found doubled"), name
