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
    tenant, lease = uuid.uuid4().hex, 1.0
    victim = crew.start(colour=colour, tenant=tenant, keys=["k"], lease=lease, point=point, fault="kill")
    assert victim.wait(20) == -signal.SIGKILL
    died = time.time()
    crew.start(colour=colour, tenant=tenant, keys=["k"], lease=lease)
    crew.finish()
    (answer,) = ledger.answers()
    assert ledger.effects() == ["k"]
    assert (answer["attempt"], answer["replayed"]) == (2, False)
    assert answer["at"] - died < lease + 2.5  # it includes the start of a Python process


def test_a_result_that_was_stored_survives_its_owner(crew: Crew, colour: str, ledger: Ledger) -> None:
    tenant = uuid.uuid4().hex
    victim = crew.start(colour=colour, tenant=tenant, keys=["k"], point="settle.stored", fault="kill")
    assert victim.wait(20) == -signal.SIGKILL
    crew.start(colour=colour, tenant=tenant, keys=["k"])
    crew.finish()
    (answer,) = ledger.answers()
    assert (answer["replayed"], ledger.effects()) == (True, ["k"])


def test_a_zombie_is_told_that_it_lost_and_changes_nothing(crew: Crew, colour: str, ledger: Ledger) -> None:
    tenant, lease = uuid.uuid4().hex, 0.5
    zombie = crew.start(
        colour=colour, tenant=tenant, keys=["k"], lease=lease, point="run.returned", fault="stop"
    )
    wait_for(lambda: _stopped(zombie.pid))
    heir = crew.start(colour=colour, tenant=tenant, keys=["k"], lease=lease)
    heir.wait(20)
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
            plan = {"tenant": tenant, "keys": ["k"], "settings": {"settle_timeout": 30}}
            worker = crew.start(colour=colour, point="run.returned", fault="stop", **plan)
            wait_for(lambda: _stopped(worker.pid))
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
