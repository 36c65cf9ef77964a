"""Those who ask at once inside a process, and the quick way: who leads, who follows, and who is told what when it goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from semel.errors import StoreUnavailable
from semel.layers.coalesce import Coalesce
from semel.layers.retry import Retry
from semel.model import Answer, Ask, Busy, Kind, Renewal, Replay, Settle, Verdict, Won
from semel.posting import Brief, Poster
from semel.runtime import run_sync
from tests.unit.test_layers_in_trouble import Clock, Rough, Still, ask, done, end


class Moving(Still):
    """One in which it passes when a test says so."""

    at = 0.0

    def now(self) -> float:
        return self.at


# ------------------------------------------------------------------------------------------------ the quick way
class Post:
    """The plainest quick way: a claim or settle of `Rough` that is sent by a plain call. What fails is tried by nobody here."""

    def __init__(self, store: Rough) -> None:
        self._store = store
        self.left: list[bytes] = []

    def claim(self, ask: Ask, now: float) -> Any:
        del now
        return self._store.claim((ask,))

    def claimed(self, ask: Ask, reply: Any, *, whole: bool = True) -> Verdict | Brief | None:
        del ask
        if isinstance(reply, Exception):
            return None
        verdict: Verdict = reply[0]
        if not whole and isinstance(verdict, Replay):
            return Brief(verdict.record.attempts, verdict.record.expires, verdict.record.result, 0)
        return verdict

    async def reclaim(self, ask: Ask, reply: Any, asked: float) -> Verdict:
        del ask, asked
        raise reply

    def unclaimed(self, ask: Ask) -> None:
        self.left.append(ask.nonce)

    def settle(self, end: Settle, now: float) -> Any:
        del now
        return self._store.settle((end,))

    def settled(self, end: Settle, reply: Any, asked: float) -> Answer | None:
        del end, asked
        return None if isinstance(reply, Exception) else reply[0]

    async def resettle(self, end: Settle, reply: Any, asked: float) -> Answer:
        del end, asked
        raise reply


class Quick(Rough):
    def __init__(self) -> None:
        super().__init__()
        self.post = Post(self)

    def poster(self) -> Poster:
        return self.post


def claimed(post: Any, asked: Ask, *, whole: bool = True) -> Verdict | Brief:
    """As the flow does it."""
    try:
        reply: Any = run_sync(post.claim(asked, 0.0))
    except Exception as trouble:
        reply = trouble
    verdict: Verdict | Brief | None = post.claimed(asked, reply, whole=whole)
    return run_sync(post.reclaim(asked, reply, 0.0)) if verdict is None else verdict


def settled(post: Any, ended: Settle) -> Answer:
    try:
        reply: Any = run_sync(post.settle(ended, 0.0))
    except Exception as trouble:
        reply = trouble
    answer: Answer | None = post.settled(ended, reply, 0.0)
    return run_sync(post.resettle(ended, reply, 0.0)) if answer is None else answer


def test_R16_the_second_try_of_a_post_goes_the_long_way_in_time_only() -> None:
    store, clock = Quick(), Clock()
    retry = Retry(store, clock, 1.0)
    post, mark = retry.poster(), retry.losses.mark
    first = ask(1)
    store.fails = [StoreUnavailable("once")]
    assert isinstance(claimed(post, first), Won)
    assert retry.losses.mark is not mark
    store.fails = [StoreUnavailable("once")]
    assert settled(post, end(first)) is Answer.OK
    for fail in (claimed, settled):
        given: Any = ask(2) if fail is claimed else end(first)
        store.fails = [StoreUnavailable("once"), StoreUnavailable("twice")]
        with pytest.raises(StoreUnavailable, match="twice"):
            fail(post, given)
        store.fails, clock.at = [StoreUnavailable("late")], 2.0
        with pytest.raises(StoreUnavailable, match="late"):
            fail(post, given)
        clock.at = 0.0
    bad = Settle(first.scope, first.nonce, Kind.DONE, -1.0)
    store.fails = [StoreUnavailable("once")]
    store.answers = [ValueError("this end")]
    with pytest.raises(ValueError, match="this end"):
        settled(post, bad)
    store.fails = [StoreUnavailable("once")]
    store.answers = [ValueError("this ask")]
    with pytest.raises(ValueError, match="this ask"):
        claimed(post, ask(3))


def test_R31_a_store_without_a_quick_way_has_none_with_its_layers() -> None:
    store = Rough()
    assert Coalesce(Retry(store, Clock(), 1.0), Still()).poster() is None


# --------------------------------------------------------------------------------------------------- coalesce
def test_R31_a_leader_whose_claim_fails_leads_nobody() -> None:
    store = Rough()
    coalesce = Coalesce(store, Still())
    store.fails = [StoreUnavailable("gone")]
    with pytest.raises(StoreUnavailable):
        run_sync(coalesce.claim((ask(1),)))
    assert not coalesce._flights
    assert isinstance(run_sync(coalesce.claim((ask(1, nonce=2),)))[0], Won)


def test_R31_a_leader_who_asks_again_is_answered_by_the_store() -> None:
    store = Rough()
    coalesce = Coalesce(store, Still())
    for _ in range(2):
        assert isinstance(run_sync(coalesce.claim((ask(1),)))[0], Won)
    assert store.calls == 2
    assert isinstance(run_sync(coalesce.claim((ask(1, nonce=2),)))[0], Busy)
    assert store.calls == 2, "a follower is answered here"


def test_R31_a_lapsed_leader_or_a_probe_s_word_is_for_the_store_to_judge() -> None:
    store, runtime = Rough(), Moving()
    coalesce = Coalesce(store, runtime)
    first = ask(1)
    run_sync(coalesce.claim((first,)))
    cleared = msgspec.structs.replace(ask(1, nonce=2), takeover=first.nonce)
    assert isinstance(run_sync(coalesce.claim((cleared,)))[0], Busy)
    assert store.calls == 2
    runtime.at = first.lease + 1
    assert isinstance(run_sync(coalesce.claim((ask(1, nonce=3),)))[0], Busy)
    assert store.calls == 3


def test_R17_a_renewal_that_names_another_owner_ends_the_lead_and_one_that_is_accepted_prolongs_it() -> None:
    store, runtime = Rough(), Moving()
    coalesce = Coalesce(store, runtime)
    first, other = ask(1), ask(2)
    run_sync(coalesce.claim((first,)))
    runtime.at = 9.0
    beats = [Renewal(each.scope, each.nonce, 10.0, 60.0) for each in (first, other)]
    assert run_sync(coalesce.renew(beats)) == [Answer.OK, Answer.GONE]
    runtime.at = 15.0
    assert isinstance(run_sync(coalesce.claim((ask(1, nonce=3),)))[0], Busy)
    assert store.calls == 1, "still led"
    run_sync(store.inner.settle((end(first, Kind.RELEASED),)))
    run_sync(store.inner.claim((ask(1, nonce=4),)))
    assert run_sync(coalesce.renew(beats[:1])) == [Answer.LOST]
    assert not coalesce._flights


def test_R31_who_posts_leads_until_he_is_answered_leaves_or_settles() -> None:
    store = Quick()
    coalesce = Coalesce(store, Still())
    post: Any = coalesce.poster()
    first = ask(1)
    assert isinstance(claimed(post, first), Won)
    assert post.claim(ask(1, nonce=2), 0.0) is None, "a follower goes the long way"
    assert isinstance(run_sync(coalesce.claim((ask(1, nonce=2),)))[0], Busy)
    assert settled(post, end(first, result=b"one")) is Answer.OK
    assert not coalesce._flights
    assert isinstance(claimed(post, ask(1, nonce=3), whole=False), Brief)
    assert isinstance(claimed(post, ask(1, nonce=4)), Replay)
    assert not coalesce._flights, "a replay leads nobody"
    left = ask(5)
    posted = post.claim(left, 0.0)
    for _ in range(2):
        post.unclaimed(left)
    posted.close()
    assert not coalesce._flights


def test_R31_a_post_that_is_tried_again_tells_its_followers_what_it_learned() -> None:
    store = Quick()
    coalesce = Coalesce(Retry(store, Clock(), 1.0), Still())
    post: Any = coalesce.poster()
    first = ask(1)
    store.fails = [StoreUnavailable("once")]
    assert isinstance(claimed(post, first), Won)
    woken: list[int] = []
    unwatch: Any = run_sync(coalesce.watch(first.scope, lambda: woken.append(1)))
    store.fails = [StoreUnavailable("once")]
    assert settled(post, end(first, result=b"one")) is Answer.OK
    assert woken == [1]
    (verdict,) = run_sync(coalesce.claim((ask(1, nonce=2),)))
    assert isinstance(verdict, Replay)
    assert verdict.record.result == b"one"
    for _ in range(2):
        run_sync(unwatch())
    assert not coalesce._flights


class Chair:
    """Where a follower waits for its leader's answer: what happens `meanwhile` happens while it sits, or as it sits down."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self._meanwhile = meanwhile
        self.woken = False

    def wake(self) -> None:
        self.woken = True

    async def park(self, timeout: float | None) -> bool:
        del timeout
        self._meanwhile()
        assert self.woken, "nobody else would have woken it"
        return True


class Led(Moving):
    """A world with one leader, whose answer comes when somebody waits for it."""

    def __init__(self, *, at_once: bool = False) -> None:
        super().__init__()
        self.meanwhile: Callable[[], object] = bool
        self._at_once = at_once

    def parker(self) -> Any:
        if not self._at_once:
            return Chair(self.meanwhile)
        self.meanwhile()
        return Chair(bool)


@pytest.mark.parametrize("at_once", [False, True], ids=["while-it-waits", "while-it-sits-down"])
def test_R31_who_follows_a_claim_under_way_is_told_as_soon_as_it_is_won(at_once: bool) -> None:
    store, runtime = Quick(), Led(at_once=at_once)
    coalesce = Coalesce(store, runtime)
    post: Any = coalesce.poster()
    first = ask(1)
    posted = post.claim(first, 0.0)
    runtime.meanwhile = lambda: post.claimed(first, run_sync(posted))
    assert isinstance(run_sync(coalesce.claim((ask(1, nonce=2),)))[0], Busy)
    assert store.calls == 1


def test_R31_when_a_leader_gives_up_its_follower_leads() -> None:
    store, runtime = Quick(), Led()
    coalesce = Coalesce(store, runtime)
    post: Any = coalesce.poster()
    first = ask(1)
    posted = post.claim(first, 0.0)
    runtime.meanwhile = lambda: post.unclaimed(first)
    heir = ask(1, nonce=2)
    assert isinstance(run_sync(coalesce.claim((heir,)))[0], Won)
    posted.close()
    assert coalesce._flights[heir.scope.hash].leader == heir.nonce


@pytest.mark.parametrize(("late", "calls"), [(0.5, 1), (1.5, 2)], ids=["fresh", "stale"])
def test_R31_a_replay_is_shared_with_those_who_asked_meanwhile_unless_it_is_old(
    late: float, calls: int
) -> None:
    store, runtime = Quick(), Led()
    coalesce, again = Coalesce(store, runtime), done(store)
    post: Any = coalesce.poster()
    store.calls = 0
    posted = post.claim(again, 0.0)

    def answered() -> None:
        runtime.at = late  # since the store was asked
        post.claimed(again, run_sync(posted))

    runtime.meanwhile = answered
    (verdict,) = run_sync(coalesce.claim((ask(1, nonce=8),)))
    assert isinstance(verdict, Replay)
    assert store.calls == calls
    assert not coalesce._flights


def test_R31_a_posted_settle_wakes_those_who_watch_and_leaves_them_the_outcome() -> None:
    store = Quick()
    coalesce = Coalesce(store, Still())
    post: Any = coalesce.poster()
    first = ask(1)
    claimed(post, first)
    woken: list[int] = []
    unwatch: Any = run_sync(coalesce.watch(first.scope, lambda: woken.append(1)))
    store.calls = 0
    assert settled(post, end(first, result=b"one")) is Answer.OK
    assert isinstance(run_sync(coalesce.claim((ask(1, nonce=2),)))[0], Replay)
    assert (woken, store.calls) == ([1], 1)
    run_sync(unwatch())
    assert not coalesce._flights


class Looked(bytes):
    """A nonce: what happens `meanwhile` happens in another thread, when somebody compares it."""

    meanwhile: Callable[[], object] = bool

    def __eq__(self, other: object) -> bool:
        self.meanwhile()
        return bytes(self) == other

    __hash__ = bytes.__hash__


def test_R31_an_outcome_is_not_left_behind_where_the_last_who_watched_leaves_as_it_comes() -> None:
    coalesce = Coalesce(Quick(), Still())
    first = ask(1)
    run_sync(coalesce.claim((first,)))
    unwatch: Any = run_sync(coalesce.watch(first.scope, lambda: None))
    (flight,) = coalesce._flights.values()
    nonce = Looked(first.nonce)
    nonce.meanwhile = lambda: run_sync(unwatch())
    outcome = msgspec.structs.replace(end(first, result=b"one"), nonce=nonce)
    coalesce._ended(flight, outcome, Answer.OK, 0.0)
    assert not flight.watchers
    assert not coalesce._flights


def test_R31_a_settle_between_post_and_answer_leaves_the_answer_to_the_one_who_asked() -> None:
    store = Quick()
    coalesce = Coalesce(store, Still())
    post: Any = coalesce.poster()
    first = ask(1)
    posted = post.claim(first, 0.0)
    stranger = end(ask(1, nonce=9), Kind.FORGOTTEN)
    assert run_sync(coalesce.settle((stranger,))) == [Answer.OK]
    assert not coalesce._flights
    assert isinstance(post.claimed(first, run_sync(posted)), Won)
    store.fails = [StoreUnavailable("gone")]
    other = ask(2)
    with pytest.raises(StoreUnavailable):
        claimed(post, other)
    post.unclaimed(other)
    assert not coalesce._flights
