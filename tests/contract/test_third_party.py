"""The suite as a third party uses it: a store whose clock nobody can move, tested by its own `open` and nothing else."""

from __future__ import annotations

import pytest

from semel.store import Store
from semel.stores.memory import MemoryStore
from semel.testing.contract import StoreContract


class Plain(StoreContract):
    def open(self) -> Store:
        return MemoryStore()


@pytest.mark.long
class TestByRealWaiting(Plain):
    """Two minutes of leases that really run out."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "clause",
    [
        "test_a_lapsed_run_under_retry_is_taken_over",
        "test_a_claim_sent_again_renews_the_lease",
        "test_R9_a_delayed_release_is_busy_until_its_time",
    ],
)
def test_a_store_that_cannot_be_moved_through_time_is_waited_for(
    clause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        getattr(Plain(), clause)()
    except AssertionError:
        # A lease of 0.4 s ends while the machine stands still: that says nothing. One of 6 s does not.
        monkeypatch.setattr("semel.testing.contract.bench._REAL_UNIT", 0.6)
        getattr(Plain(), clause)()


def test_a_suite_that_does_not_say_how_to_open_its_store_is_told() -> None:
    with pytest.raises(NotImplementedError, match=r"override open\(\)"):
        StoreContract().test_the_store_says_what_it_is()
