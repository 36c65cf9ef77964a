"""The places of a pool: so many at a time, none lost, and nobody who waits is passed over."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from semel.runtime import run_sync
from semel.stores import places as module
from semel.stores.places import Place, Places, ThreadTurns


class Between(list[Any]):
    """The seats of `Places`. Somebody else comes in between: who asks for his own number hears what it was before."""

    def __init__(self, others: list[Callable[[], object]]) -> None:
        super().__init__()
        self.others = others

    def index(self, *args: Any) -> int:
        found = super().index(*args)
        if found and self.others:
            self.others.pop()()
        return found


def test_a_place_that_is_given_while_somebody_looks_is_found() -> None:
    places, others = Places(1), list[Callable[[], object]]()
    places._taken = Between(others)
    held = places.take()
    assert held is not None
    others.append(lambda: places.give(held))
    assert places.take() is not None, "it was free before the answer"


def test_two_who_look_while_a_place_is_given_do_not_hide_it_from_each_other() -> None:
    places, others, found = Places(1), list[Callable[[], object]](), list[Place | None]()
    places._taken = Between(others)
    held = places.take()
    assert held is not None
    others += [
        lambda: places.give(held),
        lambda: found.append(places.take()),
    ]  # the last is the first to come in between
    assert places.take() is not None
    assert found == [None], "there is one only"


def test_a_thread_that_waits_is_handed_what_was_given_while_it_looked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LOOK", 600)  # it does not look by itself any more
    places, others, got = Places(1), list[Callable[[], object]](), list[Place | None]()

    def back(place: Place) -> None:
        places.give(place)
        turns.ring()

    turns = ThreadTurns(places.take, back)
    places._taken = Between(others)
    held = places.take()
    assert held is not None
    # Not in the first look, from which it goes on to its second by itself, but in that one.
    others += [lambda: back(held), lambda: None]
    waiter = threading.Thread(target=lambda: got.append(run_sync(turns.wait(600))), daemon=True)
    waiter.start()
    waiter.join(30)
    assert [type(one) for one in got] == [Place]


def test_who_finds_no_place_leaves_nothing_behind() -> None:
    """Neither a seat, nor an error in a weak reference's callback, which Python would only print."""
    told, hook = list[Any](), sys.unraisablehook
    places = Places(2)
    held = [places.take(), places.take()]
    sys.unraisablehook = told.append
    try:
        assert [places.take() for _ in range(5)] == [None] * 5
        assert len(places._taken) == 2
        held.pop()
        gc.collect()
        assert len(places._taken) == 1
    finally:
        sys.unraisablehook = hook
    assert told == []


def test_threads_that_take_and_give_never_have_more_than_there_are() -> None:
    places, inside, most = Places(2), list[object](), list[int]()
    before = sys.getswitchinterval()

    def work() -> None:
        for _ in range(400):
            if (place := places.take()) is not None:
                inside.append(place)
                most.append(len(inside))
                inside.remove(place)
                places.give(place)

    threads = [threading.Thread(target=work) for _ in range(4)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert max(most) <= 2
    assert places._taken == [], "nobody has one any more"
