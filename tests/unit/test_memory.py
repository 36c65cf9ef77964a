"""What is special about the memory store: names, room, its own clock. The rest is in tests/contract."""

from __future__ import annotations

import threading
import time

import pytest

from semel.errors import ConfigurationError, StoreUnavailable
from semel.keys import Scope, make_scope
from semel.model import Answer, Ask, Busy, Kind, Settle, Won
from semel.runtime import run_sync
from semel.store import Query, Settings, open_store
from semel.stores.memory import MemoryStore, open_url


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def scope(key: str = "key") -> Scope:
    return make_scope("semel", "acme", "pay", key)


def ask(key: str = "key", nonce: bytes = b"1" * 16) -> Ask:
    return Ask(scope(key), nonce, 10.0, 100.0)


def done(key: str = "key", **more: object) -> Settle:
    return Settle(scope(key), b"1" * 16, Kind.DONE, 100.0, **more)  # type: ignore[arg-type]  # options by their names


def test_R8_a_name_is_shared_in_the_process_and_no_name_is_private() -> None:
    first = open_store("memory://shared-by-two", Settings(), "sync")
    second = open_store("memory://shared-by-two", Settings(), "async")
    assert first is second
    assert open_url("memory://", Settings(), "sync") is not open_url("memory://", Settings(), "sync")
    assert open_url("memory://other", Settings(), "sync") is not first
    assert first.colour == "both"


def test_room_is_reserved_at_claim_time_so_that_a_settle_never_fails_for_it() -> None:
    store = MemoryStore(capacity=2, clock=Clock())
    assert [type(verdict) for verdict in run_sync(store.claim([ask("a"), ask("b")]))] == [Won, Won]
    (refused,) = run_sync(store.claim([ask("c")]))
    assert isinstance(refused, StoreUnavailable)
    assert "capacity" in str(refused)
    assert run_sync(store.peek(scope("c")))[0] is None
    assert run_sync(store.settle([done("a", result=b"r" * 1000)])) == [Answer.OK]


def test_a_full_batch_refuses_only_what_does_not_fit() -> None:
    store = MemoryStore(capacity=2, clock=Clock())
    verdicts = run_sync(store.claim([ask("a"), ask("b"), ask("c"), ask("a")]))
    assert [type(verdict) for verdict in verdicts] == [Won, Won, StoreUnavailable, Won]


def test_a_full_store_makes_room_by_dropping_what_has_expired() -> None:
    clock = Clock()
    store = MemoryStore(capacity=1, clock=clock)
    run_sync(store.claim([ask("a")]))
    run_sync(store.settle([done("a")]))
    clock.now += 101
    assert isinstance(run_sync(store.claim([ask("b")]))[0], Won)
    assert run_sync(store.peek(scope("a")))[0] is None


def test_an_expired_key_takes_its_own_place_again() -> None:
    clock = Clock()
    store = MemoryStore(capacity=1, clock=clock)
    run_sync(store.claim([ask("a")]))
    clock.now += 1000
    assert isinstance(run_sync(store.claim([ask("a", b"2" * 16)]))[0], Won)


def test_purge_drops_an_audit_trail_that_has_ended() -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    run_sync(store.claim([ask()]))
    run_sync(store.settle([done()]))
    run_sync(store.settle([Settle(scope(), b"", Kind.FORGOTTEN, 50.0, actor="ada")]))
    assert run_sync(store.purge(10)) == 0
    assert len(run_sync(store.scan(Query(history=scope()))).events) == 1
    clock.now += 51
    assert run_sync(store.purge(10)) == 0
    assert store._audit == {}


def test_watchers_leave_nothing_behind() -> None:
    store = MemoryStore(clock=Clock())
    first, second = threading.Event(), threading.Event()
    unwatch_first = run_sync(store.watch(scope(), first.set))
    unwatch_second = run_sync(store.watch(scope(), second.set))
    for _ in range(2):
        run_sync(unwatch_first())  # type: ignore[arg-type]  # any awaitable will do
    run_sync(store.claim([ask()]))
    run_sync(store.settle([done()]))
    assert (first.is_set(), second.is_set()) == (False, True)
    run_sync(unwatch_second())  # type: ignore[arg-type]  # any awaitable will do
    assert not store._watchers


def test_it_says_that_nothing_is_kept() -> None:
    facts = run_sync(MemoryStore().facts())
    assert (facts.store, facts.durable_writes) == ("memory", False)
    assert "sqlite:///" in facts.warnings[0]


def test_closing_keeps_the_records_of_a_shared_name() -> None:
    store = open_url("memory://kept", Settings(), "sync")
    run_sync(store.claim([ask()]))
    run_sync(store.aclose())
    again = open_url("memory://kept", Settings(), "sync")
    assert isinstance(run_sync(again.claim([ask(nonce=b"2" * 16)]))[0], Busy)


def test_the_process_clock_is_the_default() -> None:
    store = MemoryStore()
    before = time.time()
    _, now = run_sync(store.peek(scope()))
    assert before <= now <= time.time()


@pytest.mark.parametrize("query", [Query(cursor="xyz"), Query(limit=0)])
def test_a_malformed_scan_is_refused(query: Query) -> None:
    with pytest.raises(ConfigurationError):
        run_sync(MemoryStore().scan(query))
