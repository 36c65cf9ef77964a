"""The bench of a key's waiters: never more than `max_waiters`, and whoever leaves it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from semel.errors import InProgress
from semel.keys import make_scope
from semel.model import Busy
from semel.options import Options
from semel.runtime import Parker, ThreadRuntime, run_sync
from semel.stores.memory import MemoryStore
from semel.waiting import Bench, Seat

BUSY = Busy(1.0, 1)


def call(most: int) -> Any:
    """As far as a bench looks at it."""
    scope = make_scope("semel", "default", "default", "k")
    return SimpleNamespace(scope=scope, key="k", options=Options(wait=1.0, max_waiters=most))


class Between(ThreadRuntime):
    """Somebody else comes in between, while a seat is made."""

    def __init__(self) -> None:
        super().__init__()
        self.others = list[Callable[[], object]]()

    def parker(self) -> Parker:
        if self.others:
            self.others.pop()()
        return super().parker()


def bench(runtime: ThreadRuntime | None = None) -> Bench:
    return Bench(MemoryStore(), runtime or ThreadRuntime(), None)


def test_a_seat_that_is_left_while_another_is_taken_is_not_counted_for_good() -> None:
    row = bench(runtime := Between())
    first = run_sync(row.sit(call(9), BUSY))
    runtime.others.append(lambda: run_sync(first.leave()))
    second = run_sync(row.sit(call(9), BUSY))
    run_sync(second.leave())
    assert row._waiting == {}


def test_of_two_who_come_at_once_one_has_the_last_seat() -> None:
    row, seats = bench(runtime := Between()), list[Seat]()
    runtime.others.append(lambda: seats.append(run_sync(row.sit(call(1), BUSY))))
    with pytest.raises(InProgress, match="max_waiters"):
        run_sync(row.sit(call(1), BUSY))
    for seat in seats:
        run_sync(seat.leave())
    assert len(seats) == 1
    assert row._waiting == {}


def test_a_seat_that_is_refused_or_left_twice_takes_none_from_others() -> None:
    row = bench()
    first = run_sync(row.sit(call(1), BUSY))
    with pytest.raises(InProgress, match="max_waiters"):
        run_sync(row.sit(call(1), BUSY))
    second = run_sync(row.sit(call(2), BUSY))
    for _ in range(2):
        row.stand(first)
    with pytest.raises(InProgress, match="max_waiters"):
        run_sync(row.sit(call(1), BUSY))
    run_sync(second.leave())
    assert row._waiting == {}
