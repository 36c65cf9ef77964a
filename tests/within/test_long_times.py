"""R27: times that the database cannot hold are "for ever" inside a transaction too, and no error after the effect."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from semel import Found
from tests.within.lab import Lab, wait

TIMES: list[dict[str, Any]] = [
    {"retention": 1e11, "tombstone": 2e11},
    {"retention": 2.4e11},
    {"retention": 1e15},
    {"retention": 1e300},
    {"retention": 1e15, "tombstone": 1e15},
    {"retention": 60.0, "tombstone": 1e12},
    {"retention": 60.0, "tombstone": 1e300},
    {"retention": 1.7e308, "tombstone": 1.7e308},
    {"retention": None, "tombstone": 1e300},
]


def _names(times: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in times.items())


def _told(record: Any, times: dict[str, Any]) -> None:
    retention = inf if times["retention"] is None else times["retention"]
    if retention == 60.0:
        assert abs(record.expires - record.settled - retention) < 1
        assert record.tombstone > record.expires + 1e11
    else:
        assert record.expires - record.settled > 0.99e11  # floats are coarse out there


@pytest.mark.parametrize("times", TIMES, ids=_names)
async def test_R27_an_outcome_may_be_kept_for_longer_than_its_database_can_count(
    few: Lab, times: dict[str, Any]
) -> None:
    lab = few
    once, tx = await lab.ready()
    bound = once.within(tx.target)
    assert not (await wait(bound.execute("k1", lab.work(tx), "k1", **times))).replayed
    _told(await wait(bound.peek("k1")), times)
    await tx.commit()
    assert (await wait(once.execute("k1", lab.work(tx), "k1"))).replayed
    _told(await wait(once.peek("k1")), times)
    assert lab.orders("k1") == 1


@pytest.mark.parametrize("times", TIMES, ids=_names)
async def test_R27_a_probes_word_may_be_kept_for_longer_than_its_database_can_count(
    few: Lab, times: dict[str, Any]
) -> None:
    lab = few
    once, tx = await lab.ready()
    with pytest.raises(ValueError, match="lost"):
        await wait(once.execute("k1", _lost, on_error="hold", on_unknown="hold"))
    bound = once.within(tx.target)
    outcome = await wait(bound.execute("k1", _lost, on_unknown=lambda: Found("there"), **times))
    assert outcome.value == "there"
    _told(await wait(bound.peek("k1")), times)
    await tx.commit()
    assert (await wait(once.execute("k1", _lost))).value == "there"
    _told(await wait(once.peek("k1")), times)


def _lost() -> None:
    raise ValueError("lost")
