"""Several processes on one store: one effect per key, whatever happens to their members."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from semel.testing import services

from .conftest import SCHEMES, Crew, Ledger, wait_for

pytestmark = pytest.mark.timeout(300)  # the waits in here are bounded, and add up on a busy machine
KEYS = [f"key-{number}" for number in range(20)]


def test_four_processes_racing_for_the_same_keys_make_one_effect_each(
    crew: Crew, colour: str, ledger: Ledger
) -> None:
    tenant = uuid.uuid4().hex
    for _ in range(4):
        crew.start(colour=colour, tenant=tenant, keys=KEYS, rounds=3, work=0.002)
    crew.finish()
    assert Counter(ledger.effects()) == Counter(KEYS)
    answers = ledger.answers()
    assert len(answers) == 4 * 3 * len(KEYS)
    assert not [answer for answer in answers if "error" in answer]
    by_key: dict[str, set[str]] = {}
    for answer in answers:
        by_key.setdefault(answer["key"], set()).add(str(answer["value"]))
    assert all(len(values) == 1 for values in by_key.values()), "all callers of a key get the same result"
    assert sum(not answer["replayed"] for answer in answers) == len(KEYS)


@pytest.mark.parametrize("point", ["claim.won", "run.started"])
def test_a_killed_owner_is_replaced_within_its_lease_and_its_effect_made_once(
    crew: Crew, colour: str, ledger: Ledger, point: str
) -> None:
    lease, waited = 1.0, []
    for turn in range(3):
        plan = {"colour": colour, "tenant": uuid.uuid4().hex, "keys": [f"k{turn}"], "lease": lease}
        assert crew.start(**plan, point=point, fault="kill").wait(60) == -signal.SIGKILL
        died = time.time()
        crew.start(**plan)
        crew.finish()
        *_, answer = ledger.answers()
        assert ledger.effects() == [f"k{number}" for number in range(turn + 1)]
        assert (answer["attempt"], answer["replayed"]) == (2, False)
        waited.append(answer["at"] - died)
        if waited[-1] < lease + 2.5:  # it includes the start of a Python process
            return
    pytest.fail(f"a machine that stands still makes it longer, but not each time: {waited}")


def test_a_result_that_was_stored_survives_its_owner(crew: Crew, colour: str, ledger: Ledger) -> None:
    tenant = uuid.uuid4().hex
    victim = crew.start(colour=colour, tenant=tenant, keys=["k"], point="settle.stored", fault="kill")
    assert victim.wait(60) == -signal.SIGKILL
    crew.start(colour=colour, tenant=tenant, keys=["k"])
    crew.finish()
    (answer,) = ledger.answers()
    assert (answer["replayed"], ledger.effects()) == (True, ["k"])


def test_a_zombie_is_told_that_it_lost_and_changes_nothing(crew: Crew, colour: str, ledger: Ledger) -> None:
    tenant, lease = uuid.uuid4().hex, 0.5
    zombie = crew.start(
        colour=colour, tenant=tenant, keys=["k"], lease=lease, point="run.returned", fault="stop"
    )
    wait_for(lambda: ledger.effects() and _stopped(zombie.pid))
    heir = crew.start(colour=colour, tenant=tenant, keys=["k"], lease=lease)
    heir.wait(60)
    os.kill(zombie.pid, signal.SIGCONT)
    crew.finish()
    first, second = ledger.answers()
    assert (first["attempt"], first["pid"]) == (2, heir.pid)
    assert (second["error"], second["pid"]) == ("LeaseLost", zombie.pid)
    assert ledger.effects() == ["k", "k"]  # an outside effect under `retry`: at least once, as the table says


@pytest.mark.parametrize("store", ["redis", "postgres", "mysql"])
def test_R16_a_store_restart_between_effect_and_settle_ends_with_one_execution(
    store: str, colour: str, ledger: Ledger
) -> None:
    server: Any
    with {"redis": _redis, "postgres": services.postgres, "mysql": services.mariadb}[store]() as server:
        url = (
            server.url
            if store == "redis"
            else SCHEMES[store, colour] + "://" + server.database().partition("://")[2]
        )
        crew = Crew(url, ledger)
        try:
            tenant = uuid.uuid4().hex
            # A lease that lasts however long the server takes to come back: nobody may overtake who is stopped.
            plan = {"tenant": tenant, "keys": ["k"], "lease": 60, "settings": {"settle_timeout": 30}}
            worker = crew.start(colour=colour, point="run.returned", fault="stop", **plan)
            wait_for(lambda: ledger.effects() and _stopped(worker.pid))
            server.kill()
            server.start()
            os.kill(worker.pid, signal.SIGCONT)
            crew.start(colour=colour, **plan)
            crew.finish(90)
        finally:
            crew.close()
    assert ledger.effects() == ["k"]
    assert sorted(answer["replayed"] for answer in ledger.answers()) == [False, True]


def _redis() -> Any:
    return services.redis(appendonly="always")


def _stopped(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat").read_text("ascii")
    return stat.rpartition(")")[2].split()[0] == "T"
