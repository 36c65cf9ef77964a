"""What long runs of the simulator found, each as the smallest plan that showed it: the product or the check was wrong."""

from __future__ import annotations

import pytest

from semel.debts import Debts
from semel.layers.coalesce import Coalesce
from semel.model import Won
from semel.run import Run
from semel.testing.mutants.plant import planted
from semel.testing.simulation import Op, Plan
from semel.testing.simulation.plans import Fault
from semel.testing.simulation.runner import check

FENCED = Plan(
    72491,
    "steps",
    2.0,
    0.05,
    (
        (Op("k0", 0.0, 0.0, 0.0),),
        (
            Op("k0", 6.4, 0.0, 2.0, kind="forget"),
            Op("k0", 0.0, 0.0, 20.0),
            Op("k0", 0.0, 0.0, 0.0),
        ),
        (Op("k0", 0.0, 0.0, 20.0),),
    ),
    (Fault("pause-at-point", span=6.3443438693726195, point="step.started"),),
)
"""Worker 0 sleeps in a step; another one takes over and ends. Awake, worker 0 is told that its lease is lost, and the key is
forgotten just before the note of its step arrives: that note finds no record."""

COPIED = Plan(
    77710,
    "tx",
    0.5,
    0.05,
    (
        (Op("k1", 0.21356533093893948, 0.0, 0.5),),
        (Op("k0", 0.0, 0.25, 5.0), Op("k1", 0.17692125069092998, 0.75, 0.0, fails=True)),
    ),
    (Fault("late", 1, nth=3), Fault("double", nth=6)),
    notifies=False,
    clocks=((-3199.349972380447, 1.0810567140711311), (-3004.83370460811, 0.8024932899327717)),
)
"""Worker 0 polls, and the network delivers its last poll twice: the first copy is refused, then the key is released, the
second copy is granted, and only then the first answer arrives, when the time to wait is over."""

UNANSWERED = Plan(
    45021663,
    "keyed",
    1.0,
    0.05,
    (
        (Op("k0", 0.0, 1.5, 1.0),),
        (),
        (
            Op("k0", 0.0, 0.0, 1.0),
            Op("k1", 0.0, 0.5, 1.0),
            Op("k0", 0.0, 0.0, 10.0, kind="history"),
        ),
    ),
    (Fault("late", 2, nth=5), Fault("pause-at-point", span=1.2, point="renew.sent")),
    tombstone=0.0,
)
"""A claim of worker 2, who waits, has no answer, and arrives when the owner's lease is over: it is granted, and released behind
his back. Before that is done he has asked twice more, and his time is over."""

NOTED_TWICE = Plan(
    85115,
    "steps",
    1.0,
    0.01,
    ((Op("k0", 2.4, 0.0, 10.0),), (Op("k0", 2.330450120457243, 0.0, 10.0),)),
    (Fault("lose-request"), Fault("cancel-at-point", 1, nth=2, point="step.started")),
    retention=0.5,
)
"""Worker 1 is cancelled while it notes a step and notes it again; the first note, which nobody hears of, arrives last and
decides when the released key is over (R14)."""


ASKED_BEFORE = Plan(
    16540,
    "tx",
    2.0,
    0.01,
    ((Op("k0", 0.0, 0.01, 2.0),), (), (Op("k0", 0.0, 0.0, 20.0), Op("k0", 0.0, 0.0, 2.0))),
    (),
)
"""Two callers of worker 2 wait for worker 0. One of them has subscribed, and asks once more; the other one's question is still on
its way, was decided before the key was done, and is answered: Busy."""


OUT_OF_TIME = Plan(
    9005560,
    "tx",
    0.5,
    0.01,
    (
        (Op("k0", 0.0, 0.0, 5.0, fails=True, on_error="callable"),),
        (Op("k1", 0.2, 0.75, 5.0), Op("k0", 0.31984448555662465, 0.0, 0.5)),
    ),
    (Fault("lose-reply", 1, nth=6),),
)
"""A waiter's claim is granted, and he never hears of it. When he gives it up and asks once more his time is over, and the claim
that he gave up is not released yet: it is his own that he is told of."""


UNBEGUN = Plan(
    20149055,
    "steps",
    1.0,
    0.01,
    (
        (
            Op("k0", 0.3, 0.5, 10.0),
            Op("k0", 0.006269247874491269, 0.0, 10.0),
            Op("k0", 0.014616966897236563, 0.0, 10.0),
        ),
        (Op("k0", 0.010386306705537885, 0.0, 10.0),),
    ),
    (
        Fault("kill", at=0.026002589956800493, nth=2),
        Fault("worker-clock", at=1.36696699300429, span=-0.6423922521926522),
    ),
    step="hold",
    clocks=((-2015.5452134652344, 0.8115739940823763), (1947.8918073405448, 0.9128106352129578)),
)
"""The first owner is killed before its step. The clock of the second one is set back while it works: its lease lapses, and a
third one begins."""

GIVEN_BACK = Plan(
    2,
    "retry",
    0.5,
    0.01,
    ((Op("k0", 0.0, 1.0, 0.0),), (Op("k0", 1.4, 0.0, 0.0), Op("k0", 2.4, 0.0, 0.0, request=1))),
    (Fault("kill", at=0.5), Fault("lose-reply", 1)),
    workload="stragglers",
)
"""An owner is killed; who takes over never hears of it, and gives up; then somebody has another request under the key."""


CANCELLED_IN_ITS_SETTLE = Plan(
    6691,
    "hold",
    2.0,
    0.05,
    ((), (Op("k0", 0.0, 0.0, 20.0),)),
    (Fault("cancel-at-point", 1, point="settle.sent"), Fault("reset-request", 1)),
)
"""A claim is sent again and won; its caller is cancelled while its settle is under way, which is written all the same."""


def test_I15_a_claim_that_was_sent_again_is_forgotten_when_its_run_was_cancelled_in_its_settle() -> None:
    assert check(CANCELLED_IN_ITS_SETTLE)[0] == []


def test_R16_who_has_waited_for_an_answer_is_not_told_to_wait_for_his_own_claim() -> None:
    broken, world = check(OUT_OF_TIME)
    assert not broken
    assert [each.error for each in world.answers if each.op.key == "k0"][1] == "StoreUnavailable"


def test_R30_who_waits_is_not_told_what_was_asked_before_he_was_subscribed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not check(ASKED_BEFORE)[0]
    shared = Coalesce._busy_too
    monkeypatch.setattr(
        Coalesce, "_busy_too", lambda self, flight, ask, began: shared(self, flight, ask, 0.0)
    )
    assert check(ASKED_BEFORE)[0] == [
        "R30: a caller of default/default/k0 slept on after the outcome was there"
    ]


def test_R17_who_was_told_that_he_lost_a_key_does_not_claim_it_again_when_it_vanished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken, world = check(FENCED)
    assert not broken
    assert [answer.error for answer in world.answers if answer.worker == "w0.1"] == ["LeaseLost"]

    async def reclaim(self: Debts, run: Run) -> bool:
        return isinstance((await self._store.claim((run.ask,)))[0], Won)

    monkeypatch.setattr(Debts, "reclaim", reclaim)
    broken, _ = check(FENCED)
    assert broken == ["I15: worker w0.1 has ended its calls and keeps 1 keys that nobody leads"]


def test_R16_a_copy_that_the_network_made_of_a_refused_claim_is_nobody_s_own() -> None:
    broken, world = check(COPIED)
    assert list(world.server.granted_to_copies.values()) == ["default/default/k1"]
    assert [answer.error for answer in world.answers if answer.worker == "w0.1"] == ["InProgress"]
    assert not broken


def test_R16_a_claim_of_his_own_is_told_apart_from_a_copy_of_the_network() -> None:
    """The reply to the first claim is lost, and the second one comes twice: copies excuse nobody who asks anew."""
    plan = Plan(
        1,
        "hold",
        2.0,
        0.01,
        ((Op("k0", 0.0, 0.0, 0.0),),),
        (Fault("reset-reply"), Fault("double", nth=2)),
    )
    assert not check(plan)[0]
    with planted("resent-with-another-nonce"):
        broken, _ = check(plan)
    assert "R16: a caller of default/default/k0 was told to wait for its own claim" in broken


def test_H1_a_note_that_nobody_heard_of_explains_how_long_a_released_key_was_known() -> None:
    broken, world = check(NOTED_TWICE)
    assert not broken
    assert world.histories == 1
    assert not world.undecided


def test_R10_a_step_that_nobody_has_begun_is_held_by_whoever_begins_it() -> None:
    """The world's own mistake: its next version asked for less, too, where nothing had been begun under hold, so that a step
    which two owners made in turn, one of them with a clock that was set back, was no broken promise."""
    broken, world = check(UNBEGUN)
    assert not broken
    assert len(world.effects) == 1


def test_R14_a_take_over_that_was_given_back_leaves_the_key_bound_to_its_request() -> None:
    """The owner before it was killed, perhaps after its effect: another request is another action."""
    broken, world = check(GIVEN_BACK)
    assert not broken
    errors = [each.error for each in world.answers if each.worker == "w1.1"]
    assert errors == ["StoreUnavailable", "KeyMismatch"]
    with planted("given-back-binds-nobody"):
        assert check(GIVEN_BACK)[0] == ["I6: granted to another request (default/default/k0)"]


def test_R16_who_asked_more_than_once_since_is_not_told_to_wait_for_his_own_claim() -> None:
    broken, world = check(UNANSWERED)
    assert not broken
    assert "StoreUnavailable" in [each.error for each in world.answers if each.worker == "w2.1"]
