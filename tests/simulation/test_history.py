"""The history checker accepts what some order explains, with lost answers, and refuses what none does."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from semel import model
from semel.keys import make_scope
from semel.model import Answer, Ask, Busy, Kind, Note, Record, Renewal, Replay, Settle, Verdict, Won
from semel.runtime import run_sync
from semel.steps import Step, encode
from semel.stores.memory import MemoryStore
from semel.testing.simulation.history import Call, Look, inexplicable, is_linearizable, judged
from semel.testing.simulation.recorded import Log, Recorded, read_logs

SCOPE = make_scope("semel", "t", "o", "k")


def ask(letter: str, lease: float = 10.0) -> Ask:
    return Ask(SCOPE, letter.encode() * 16, lease, 100.0)


def done(letter: str, result: bytes = b"1") -> Settle:
    return Settle(SCOPE, letter.encode() * 16, Kind.DONE, 100.0, result=result)


def won(letter: str, attempts: int = 1) -> Won:
    _, record = model.claim(None, ask(letter), 0.0)
    assert record is not None
    from msgspec.structs import replace

    return Won(replace(record, attempts=attempts))


def call(verb: str, item: Any, began: float, ended: float | None, answer: Any = None) -> Call:
    made = Call(verb, item, began)
    if ended is not None:
        made.returned(ended, answer)
    return made


BUSY = Busy(5.0, 1)


def test_one_after_the_other() -> None:
    history = [
        call("claim", ask("a"), 0, 1, won("a")),
        call("claim", ask("b"), 2, 3, BUSY),
        call("settle", done("a"), 4, 5, Answer.OK),
    ]
    assert is_linearizable(history)


def test_two_owners_within_a_lease_have_no_order() -> None:
    assert not is_linearizable(
        [call("claim", ask("a"), 0, 1, won("a")), call("claim", ask("b"), 0.5, 2, won("b"))]
    )


def test_a_claim_that_overlaps_the_settle_may_see_either_side() -> None:
    history = [call("claim", ask("a"), 0, 1, won("a")), call("settle", done("a"), 2, 6, Answer.OK)]
    assert is_linearizable([*history, call("claim", ask("b"), 3, 5, BUSY)])
    settled = model.settle(won("a").record, done("a"), 2.0)[1]
    assert settled is not None
    assert is_linearizable([*history, call("claim", ask("b"), 3, 5, model.Replay(settled))])
    assert not is_linearizable([*history, call("claim", ask("b"), 7, 8, BUSY)])


def test_a_lost_answer_may_have_taken_effect_or_not() -> None:
    lost = call("claim", ask("a"), 0, None)
    assert is_linearizable([lost, call("claim", ask("b"), 1, 2, BUSY)])
    assert is_linearizable([lost, call("claim", ask("b"), 1, 2, won("b"))])
    assert not is_linearizable([call("claim", ask("b"), 1, 2, BUSY), call("claim", ask("a"), 3, None)]), (
        "what was not yet sent explains nothing"
    )


def test_a_fenced_owner_that_was_told_ok_has_no_order() -> None:
    history = [
        call("claim", ask("a", lease=1), 0, 0.1, won("a")),
        call("claim", ask("b"), 5, 5.1, won("b", attempts=2)),
    ]
    assert is_linearizable([*history, call("settle", done("a"), 6, 6.1, Answer.LOST)])
    assert not is_linearizable([*history, call("settle", done("a"), 6, 6.1, Answer.OK)])


def _history(rng: Random, *, flaw: float) -> tuple[list[Call], bool]:
    """Random calls on one key, decided by the model; with `flaw`, some busy claims are granted all the same."""
    record: Record | None = None
    calls: list[Call] = []
    planted = False
    now = 0.0
    for _ in range(12):
        now += rng.expovariate(2)
        letter = rng.choice("abc")
        verb = rng.choice(("claim", "claim", "renew", "settle"))
        items: dict[str, Any] = {
            "claim": ask(letter, lease=2.0),
            "renew": Renewal(SCOPE, letter.encode() * 16, 2.0, 100.0),
            "settle": done(letter, letter.encode()),
        }
        item = items[verb]
        decided: Any = getattr(model, verb)(record, item, now)
        answer: Verdict | Answer = decided[0]
        if isinstance(answer, Busy) and rng.random() < flaw:
            answer, planted = won(letter), True
        record = record if decided[1] is None else decided[1]
        made = call(verb, item, now - rng.uniform(0, 0.2), now + rng.uniform(0, 0.2), answer)
        made.applied.append(now)
        if rng.random() < 0.15:
            lost = call(verb, item, made.invoked, None)
            lost.applied.append(now)
            made, planted = lost, planted and not isinstance(answer, Won)
        calls.append(made)
    return calls, planted


def test_histories_of_the_model_always_have_an_order() -> None:
    for seed in range(400):
        assert is_linearizable(_history(Random(seed), flaw=0.0)[0]), seed


def test_most_planted_double_grants_are_found() -> None:
    wrong = [calls for calls, planted in (_history(Random(seed), flaw=0.5) for seed in range(600)) if planted]
    found = sum(not is_linearizable(calls) for calls in wrong)
    print(f"\n{found} of {len(wrong)} planted double grants")
    assert len(wrong) > 100
    assert found / len(wrong) > 0.85


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_bug_of_the_product_does_not_reach_the_reference(seed: int) -> None:
    from semel.testing.mutants import planted

    with planted("settle-unfenced"):
        assert is_linearizable(_history_of_a_fence(seed, Answer.LOST))
        assert not is_linearizable(_history_of_a_fence(seed, Answer.OK))


def _history_of_a_fence(seed: int, answer: Answer) -> list[Call]:
    lease = 1.0 + seed
    return [
        call("claim", ask("a", lease=lease), 0, 0.1, won("a")),
        call("claim", ask("b"), lease + 1, lease + 1.1, won("b", attempts=2)),
        call("settle", done("a"), lease + 2, lease + 2.1, answer),
    ]


def test_a_search_that_is_given_up_is_told_and_is_no_verdict() -> None:
    # Nobody knows of the first claims: each may have been granted, or not.
    history = [call("claim", ask(letter), 0, None) for letter in "abcdefgh"]
    history += [call("claim", ask("x"), 1, 2, BUSY), call("settle", done("x"), 3, 4, Answer.OK)]
    assert judged(history) is False
    assert judged(history, most=3) is None
    assert inexplicable(history, most=3) == ([], 1, 1)


def test_what_the_server_never_noted_did_not_happen() -> None:
    lost = Call("claim", ask("a"), 0.0, witnessed=True)
    busy = call("claim", ask("b"), 1, 2, BUSY)
    assert not is_linearizable([lost, busy])
    lost.applied.append(0.5)
    assert is_linearizable([lost, busy])


@pytest.mark.parametrize(("arrived", "explained"), [(3.0, True), (None, False)])
def test_of_two_notes_the_one_that_nobody_heard_of_may_say_how_long_a_released_key_is_known(
    arrived: float | None, explained: bool
) -> None:
    note = Note(SCOPE, b"a" * 16, encode(Step("s", "done", 1.0, b"1", "")))
    silent = Call("note", note, 1.0, witnessed=True)
    if arrived is not None:
        silent.applied.append(arrived)
    history = [
        _at("claim", ask("a"), 0.5, won("a")),
        silent,
        _at("note", note, 2.0, Answer.OK),
        _at("settle", Settle(SCOPE, b"a" * 16, Kind.RELEASED, 10.0), 4.0, Answer.OK),
        # Known for 10 s after the last note: until 12 by the one that was answered, until 13 by the other one.
        _at("settle", Settle(SCOPE, b"b" * 16, Kind.RELEASED, 10.0), 12.5, Answer.LOST),
    ]
    assert is_linearizable(history) is explained


def _at(verb: str, item: Any, time: float, answer: Any) -> Call:
    made = Call(verb, item, time, witnessed=True)
    made.applied.append(time)
    made.returned(time, answer)
    return made


def test_a_settle_that_was_sent_twice_may_have_been_taken_the_first_time() -> None:
    released = Settle(SCOPE, b"a" * 16, Kind.RELEASED, 100.0)
    history = [
        call("claim", ask("a"), 0, 0.1, won("a")),
        call("settle", released, 1, 9, Answer.LOST),
        call("claim", ask("b"), 2, 2.1, won("b")),
    ]
    assert not is_linearizable(history)
    history[1].resent = True
    assert is_linearizable(history)


def renew(letter: str, lease: float = 10.0) -> Renewal:
    return Renewal(SCOPE, letter.encode() * 16, lease, 100.0)


def note(letter: str) -> Note:
    return Note(SCOPE, letter.encode() * 16, encode(Step("s", "done", 0.0, b"v")))


def replay(letter: str, result: bytes = b"1") -> Replay:
    record = model.settle(won(letter).record, done(letter, result), 0.0)[1]
    assert record is not None
    return Replay(record)


RELEASED_A = Settle(SCOPE, b"a" * 16, Kind.RELEASED, 100.0)
LOCKED = Busy(0.05, 0)
WON_A = ("claim", ask("a"), 0, 1, won("a"))
DONE_A = ("settle", done("a"), 2, 3, Answer.OK)
BRIEF_A = ("claim", ask("a", lease=1), 0, 0.1, won("a"))
LATE_A = ("claim", ask("a", lease=1), 0, None)
OVERTAKEN = (BRIEF_A, ("claim", ask("b"), 5, 5.1, won("b", attempts=2)))

# What no store may tell; and beside each the least change that makes it right.
WRONG: dict[str, tuple[list[Any], list[Any]]] = {
    "a replay of another value": (
        [WON_A, DONE_A, ("claim", ask("b"), 4, 5, replay("a", b"2"))],
        [WON_A, DONE_A, ("claim", ask("b"), 4, 5, replay("a", b"1"))],
    ),
    "an outcome that was stored and is gone": (
        [WON_A, DONE_A, ("claim", ask("b"), 4, 5, won("b"))],
        [WON_A, ("settle", RELEASED_A, 2, 3, Answer.OK), ("claim", ask("b"), 4, 5, won("b"))],
    ),
    "a replay of what was released": (
        [WON_A, ("settle", RELEASED_A, 2, 3, Answer.OK), ("claim", ask("b"), 4, 5, replay("a"))],
        [WON_A, DONE_A, ("claim", ask("b"), 4, 5, replay("a"))],
    ),
    "a takeover that counts as the first attempt": (
        [BRIEF_A, ("claim", ask("b"), 5, 5.1, won("b", attempts=1))],
        [*OVERTAKEN],
    ),
    "a heartbeat of who was overtaken is taken": (
        [*OVERTAKEN, ("renew", renew("a"), 6, 6.1, Answer.OK)],
        [*OVERTAKEN, ("renew", renew("b"), 6, 6.1, Answer.OK)],
    ),
    "a step of who was overtaken is taken": (
        [*OVERTAKEN, ("note", note("a"), 6, 6.1, Answer.OK)],
        [*OVERTAKEN, ("note", note("b"), 6, 6.1, Answer.OK)],
    ),
    "a step that was noted is gone": (
        [BRIEF_A, ("note", note("a"), 0.2, 0.3, Answer.OK), OVERTAKEN[1]],
        [BRIEF_A, ("note", note("a"), 5.2, 5.3, Answer.LOST), OVERTAKEN[1]],
    ),
    "busy though the lease is over and nobody renewed it": (
        [BRIEF_A, ("claim", ask("b"), 5, 6, BUSY)],
        [BRIEF_A, ("renew", renew("a"), 0.5, 0.6, Answer.OK), ("claim", ask("b"), 5, 6, BUSY)],
    ),
    "a look that shows what is over": (
        [WON_A, DONE_A, ("peek", Look(SCOPE), 4, 5, (won("a").record, 4.5))],
        [WON_A, DONE_A, ("peek", Look(SCOPE), 4, 5, (replay("a").record, 4.5))],
    ),
    "two looks in an order that no clock has": (
        [
            WON_A,
            ("settle", done("a"), 2, 9, Answer.OK),
            ("peek", Look(SCOPE), 3, 4, (replay("a").record, 3.5)),
            ("peek", Look(SCOPE), 5, 6, (won("a").record, 5.5)),
        ],
        [
            WON_A,
            ("settle", done("a"), 2, 9, Answer.OK),
            ("peek", Look(SCOPE), 3, 4, (won("a").record, 3.5)),
            ("peek", Look(SCOPE), 5, 6, (replay("a").record, 5.5)),
        ],
    ),
    "a lost settle does not excuse another result": (
        [WON_A, ("settle", done("a", b"1"), 2, None), ("claim", ask("b"), 4, 5, replay("a", b"2"))],
        [WON_A, ("settle", done("a", b"1"), 2, None), ("claim", ask("b"), 4, 5, replay("a", b"1"))],
    ),
    "a lost settle does not excuse one and its opposite": (
        [
            WON_A,
            ("settle", done("a"), 2, None),
            ("claim", ask("b"), 4, 5, replay("a")),
            ("claim", ask("c"), 6, 7, BUSY),
        ],
        [
            WON_A,
            ("settle", done("a"), 2, None),
            ("claim", ask("c"), 4, 5, BUSY),
            ("claim", ask("b"), 6, 7, replay("a")),
        ],
    ),
    "a lost heartbeat keeps no lease but its own": (
        [BRIEF_A, ("renew", renew("c"), 0.5, None), ("claim", ask("b"), 5, 6, BUSY)],
        [BRIEF_A, ("renew", renew("a"), 0.5, None), ("claim", ask("b"), 5, 6, BUSY)],
    ),
    "a lost claim that has arrived holds the key until its lease is over": (
        [
            LATE_A,
            ("claim", ask("b"), 3, 4, BUSY),
            ("claim", ask("c"), 4.5, 4.6, BUSY),
            ("claim", ask("d"), 4.7, 4.8, won("d")),
        ],
        [LATE_A, ("claim", ask("b"), 3, 4, BUSY), ("claim", ask("c"), 4.5, 4.6, BUSY)],
    ),
    "a row that nobody writes is not locked": (
        [BRIEF_A, ("settle", RELEASED_A, 5, 5.2, Answer.OK), ("claim", ask("b"), 6, 6.1, LOCKED)],
        # A late settle held the row for so long that the next claim was sent away, though the key was free before and after.
        [BRIEF_A, ("settle", RELEASED_A, 5, 5.2, Answer.OK), ("claim", ask("b"), 5.1, 5.15, LOCKED)],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_history_is_told_from_the_right_one_beside_it(name: str) -> None:
    wrong, right = WRONG[name]
    assert not is_linearizable([call(*each) for each in wrong])
    assert is_linearizable([call(*each) for each in right])


def granted(letter: str, at: float, attempts: int) -> Call:
    """A grant that says by itself when it was decided, as those of real stores do."""
    made = call("claim", ask(letter, lease=0.05), at - 0.01, at + 0.01, won(letter, attempts))
    made.applied.append(at)
    return made


def test_a_heartbeat_that_took_longer_than_its_lease_was_decided_somewhere_in_between() -> None:
    """On a busy machine: at 0.1 it set the lease until 0.15. So it was busy at 0.12, and free at 0.16."""
    first = granted("a", 0.0, 1)
    beat = call("renew", renew("a", lease=0.05), 0.01, 0.2, Answer.OK)
    busy = call("claim", ask("b", lease=0.05), 0.11, 0.12, BUSY)
    next_one = granted("c", 0.16, 2)
    assert is_linearizable([first, beat, busy, next_one])
    too_late = call("claim", ask("b", lease=0.05), 0.115, 0.125, BUSY)
    assert not is_linearizable([first, beat, too_late, granted("c", 0.155, 2), granted("d", 0.16, 3)])


def test_an_inexplicable_history_is_told_with_every_call_and_the_one_that_does_not_fit() -> None:
    history = [call(*each) for each in (WON_A, DONE_A, ("claim", ask("b"), 4, 5, BUSY))]
    ((text,), keys, undecided) = inexplicable(history, at_length=True)
    assert (keys, undecided) == (1, 0)
    head, *lines = text.splitlines()
    assert head.startswith("H1: no order of decisions explains 3 calls on ")
    assert [line[0] for line in lines] == [" ", " ", "!"]
    assert "616161 0.000…1000.000 claim lease 10 s → Won running of 616161, attempt 1" in lines[0]
    assert "settle done → <Answer.OK" in lines[1]
    assert inexplicable(history)[0] == [head]


def test_a_log_gives_back_what_was_asked_and_told_also_of_who_was_cut_short(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    store = Recorded(MemoryStore(), log)
    assert isinstance(run_sync(store.claim((ask("a"),)))[0], Won)
    assert isinstance(run_sync(store.claim((ask("b"),)))[0], Busy)
    assert run_sync(store.settle((done("a"),))) == [Answer.OK]
    record, _ = run_sync(store.peek(SCOPE))
    assert record is not None
    log.asked("claim", ask("c"))
    log.close()
    whole = (tmp_path / "log").read_bytes()
    (tmp_path / "log").write_bytes(whole + b"\x40\x00\x00\x00half a line")
    calls = read_logs([tmp_path / "log"])
    assert [each.verb for each in calls] == ["claim", "claim", "settle", "peek", "claim"]
    assert calls[-1].answer is None
    assert calls[3].answer[0] == record
    assert is_linearizable(calls)
    assert not any(each.resent for each in calls)
    assert all(
        each.resent for each in read_logs([tmp_path / "log"], broken_at=[each.invoked for each in calls])
    )
