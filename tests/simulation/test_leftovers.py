"""I15 sees what is left although something else is rightly left as well."""

from __future__ import annotations

from typing import Any

import pytest

from semel.debts import Debts
from semel.model import Answer
from semel.testing.mutants.plant import planted, recorded_seeds
from semel.testing.simulation.runner import check
from semel.testing.simulation.workloads import workload_of

OPEN = workload_of("resets").plan(18)
"""When its world ends, a copy of a claim of worker 0 may still arrive: it is given back for a lease more."""


def test_a_debt_that_is_still_open_is_no_leftover_and_hides_none() -> None:
    broken, world = check(OPEN)
    assert not broken
    (engine,) = world.faces["w0.1"]._engines.values()
    assert engine.debts.owes
    with planted("seats-kept"):
        assert "I15: worker w0.1 has ended its calls and keeps seats for 2 waiters" in check(OPEN)[0]


def test_an_outcome_that_the_store_has_had_for_long_is_not_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is offered again and again, so that it is never overdue."""
    plan = workload_of("core").plan(recorded_seeds()["debts-forgotten"])
    assert not check(plan)[0]
    real = Debts._is_paid

    async def is_paid(self: Debts, debt: Any, answer: Answer) -> bool:
        await real(self, debt, answer)
        return False

    monkeypatch.setattr(Debts, "_is_paid", is_paid)
    told = "I15: worker w{}.1 has ended its calls and keeps 1 debts that are paid, or nobody's any more"
    assert check(plan)[0] in ([told.format(number)] for number in range(len(plan.workers)))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("paid-debts-kept", "1 debts that are paid, or nobody's any more"),
        ("strays-kept", "1 claims that were sent again"),
        ("won-claims-expected-for-ever", "1 claims on their way"),
    ],
)
def test_what_is_kept_for_ever_is_told(name: str, what: str) -> None:
    with planted(name) as mutant:
        broken, _ = check(workload_of(mutant.workload).plan(recorded_seeds()[name]))
    assert f"has ended its calls and keeps {what}" in "\n".join(broken)
