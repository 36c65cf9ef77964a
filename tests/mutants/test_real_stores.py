"""Bugs that are planted in every worker of a crash matrix, on real stores, are seen by it."""

from __future__ import annotations

import pytest

from semel.testing import services
from semel.testing.chaos import Report, explore, jobs_for, matrix
from semel.testing.chaos.planted import FENCES

pytestmark = [pytest.mark.services, pytest.mark.timeout(300)]

CELLS = {each.name: each for each in matrix()}
SETTLES = {
    store: [f"{store}/{colour}/retry/overlap@run.returned" for colour in ("sync", "async")]
    for store in FENCES
}
SETTLES["redis"] += [
    f"redis/{colour}/{mode}-db/overlap@run.returned"
    for mode in ("http", "grpc")
    for colour in ("sync", "async")
]
SETTLES["postgres"] += [f"postgres/{colour}/http-db/overlap@run.returned" for colour in ("sync", "async")]
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
    "postgres-within-beside-its-transaction": (
        "postgres/sync/tx/kill@commit.sent",
        "expected exactly once, found lost",
    ),
    "mariadb-within-commits-for-its-caller": (
        "mariadb/sync/tx/kill@commit.sent",
        "expected that the next caller runs it, found that it gets a replay",
    ),
    "redis-pipeline-unwatched": (
        "redis/sync/tx/overlap@settle.sent",
        "expected exactly once, found doubled",
    ),
    "cluster-pipeline-of-anybody": (
        "cluster/sync/tx/overlap@run.returned",
        "expected exactly once, found doubled",
    ),
    "redis-everysec-is-always": ("redis/sync/hold/power-loss@acked.everysec", "this setting is not weak"),
}
SILENCES = [
    f"{store}/{colour}/retry/stall@renew.sent"
    for store in ("sqlite", "redis", "postgres", "mariadb")
    for colour in ("sync", "async")
]
"""One heartbeat is not answered; SQLite's cannot be written, because its file is locked."""
NO_ACKS = ["redis-asks-for-no-acks", "sql-primary-waits-for-nobody"]
UNHEARD = [
    f"{each}/failover@acked.waited"
    for each in (
        "redis/sync/retry",
        "redis/async/tx",
        "cluster/async/hold",
        "postgres/sync/retry",
        "postgres/async/tx",
        "mariadb/sync/tx",
    )
]
ASTRAY = {
    "redis-pipeline-of-any-master": ("split@pipeline.behind", "expected exactly once, found lost"),
    "redis-pipeline-asks-the-store-only": ("split@store.overtaken", "expected exactly once, found doubled"),
    "redis-pipeline-lets-its-connection-go": (
        "redialled@settle.sent",
        "expected exactly once, found doubled",
    ),
}
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


# A run for all tests of a group, which stay together for its sake.
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


@pytest.fixture(scope="module")
def astray() -> Report:
    """Apart from another bug of pipelines, which would show wherever these do."""
    names = [f"redis/{colour}/tx/{window}" for colour in ("sync", "async") for window, _ in ASTRAY.values()]
    return planted(names, list(ASTRAY))


@pytest.fixture(scope="module")
def unheard() -> Report:
    return planted(UNHEARD, NO_ACKS)


def problem(report: Report, name: str) -> str:
    if why := lacking(name):
        raise services.ServerMissing(why)
    return next(each.problem for each in report.results if each.cell == name)


def is_seen(report: Report, name: str, mutants: list[str], *what: str) -> bool:
    """Seen is what counts. Where the machine stood still, somebody came too late to show it: then it is played alone, twice
    at most. A matrix that is blind sees it at no time."""
    for again in range(3):
        found = problem(planted([name], mutants) if again else report, name)
        if any(each in found for each in what):
            return True
    return False


@pytest.mark.xdist_group("unsettled")
@pytest.mark.parametrize("store", FENCES)
def test_a_settle_without_its_fence_is_seen_on_every_real_store_in_both_colours(
    unsettled: Report, store: str
) -> None:
    for name in SETTLES[store]:
        assert is_seen(unsettled, name, list(FENCES[store]), "torn: the victim was told"), name


@pytest.mark.xdist_group("others")
@pytest.mark.parametrize("mutant", OTHERS)
def test_other_planted_bugs_are_seen_on_real_stores_and_so_is_a_weak_setting_that_is_none(
    others: Report, mutant: str
) -> None:
    name, what = OTHERS[mutant]
    assert is_seen(others, name, list(OTHERS), what)


@pytest.mark.xdist_group("astray")
@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("mutant", ASTRAY)
def test_a_pipeline_that_trusts_its_connection_is_seen_in_both_colours(
    astray: Report, mutant: str, colour: str
) -> None:
    window, what = ASTRAY[mutant]
    assert is_seen(astray, f"redis/{colour}/tx/{window}", list(ASTRAY), what)


@pytest.mark.xdist_group("silenced")
@pytest.mark.parametrize("name", SILENCES)
def test_a_heart_that_gives_up_at_one_silence_is_seen_on_every_kind_of_wire_in_both_colours(
    silenced: Report, name: str
) -> None:
    assert is_seen(silenced, name, [GIVES_UP], "expected exactly once, found doubled"), name


@pytest.mark.xdist_group("unheard")
@pytest.mark.parametrize("name", UNHEARD)
def test_an_answer_that_waits_for_no_replica_is_seen_though_the_replica_may_have_it_in_the_end(
    unheard: Report, name: str
) -> None:
    # Where the primary dies soon enough, its replica has nothing in the end, either.
    what = ("while the replica stood still", "expected exactly once, found")
    assert is_seen(unheard, name, NO_ACKS, *what), name
