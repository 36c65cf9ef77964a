"""R9-R16: failure and loss."""

from __future__ import annotations

import asyncio
import enum
import math
import re
from typing import Any

import msgspec
import pytest

from semel import (
    NOT_FOUND,
    UNDECIDED,
    AsyncSemel,
    CodecError,
    ConfigurationError,
    Found,
    InProgress,
    KeyMismatch,
    NotRecorded,
    OutcomeUnknown,
    PreviousFailure,
    Release,
    Semel,
    StoreUnavailable,
    current_run,
)
from semel.layers import Chaos, Layer
from semel.model import Answer
from semel.stores.memory import MemoryStore

from .conftest import Lab
from .tools import lapsed, let_pass, owned, renewed, until


class Declined(Exception):
    code = "card_declined"


async def test_R9_release_frees_the_key_at_once(lab: Lab) -> None:
    once = lab.face()
    with pytest.raises(Declined):
        await lab.do(once.execute("k", lab.raising(Declined("no funds"))))
    record = await lab.do(once.peek("k"))
    assert record.state == "released"
    outcome = await lab.do(once.execute("k", lab.effect()))
    assert (outcome.value, outcome.attempt, outcome.replayed) == ("done", 1, False)


async def test_R9_replay_makes_the_failure_the_outcome(lab: Lab) -> None:
    once = lab.face()
    with pytest.raises(Declined):
        await lab.do(once.execute("k", lab.raising(Declined("no funds")), on_error="replay"))
    for _ in range(2):
        with pytest.raises(PreviousFailure) as caught:
            await lab.do(once.execute("k", lab.effect()))
        assert (caught.value.type_name, caught.value.code) == ("Declined", "card_declined")
        assert caught.value.message == "no funds"
        assert re.fullmatch(
            r"key … \[\w{8}\] of .*/default failed before, and that stored outcome is replayed: Declined: no funds\. "
            r"Nothing ran: use a new key for a new action, or resolve\(key, …\) if the failure was told by mistake",
            str(caught.value),
        )
    assert len(lab.effects) == 1


class Code(enum.Enum):
    UNAVAILABLE = (14, "unavailable")


class Remote(Exception):
    """As gRPC's: what it is must be asked."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def code(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (Code.UNAVAILABLE, "UNAVAILABLE"),
        (14, "14"),
        ("down", "down"),
        (None, None),
        ([], None),
        (ValueError(), None),
    ],
)
async def test_R9_a_code_that_is_a_method_is_asked_for(light_lab: Lab, answer: Any, code: str | None) -> None:
    once = light_lab.face(on_error="replay")
    with pytest.raises(Remote):
        await light_lab.do(once.execute("k", light_lab.raising(Remote(answer))))
    with pytest.raises(PreviousFailure) as caught:
        await light_lab.do(once.execute("k", light_lab.effect()))
    assert (caught.value.type_name, caught.value.code) == ("Remote", code)


async def test_R9_hold_says_that_the_effect_may_have_happened(lab: Lab) -> None:
    once = lab.face()
    with pytest.raises(Declined):
        await lab.do(once.execute("k", lab.raising(Declined("?")), on_error="hold"))
    with pytest.raises(OutcomeUnknown):
        await lab.do(once.execute("k", lab.effect()))
    assert (await lab.do(once.peek("k"))).state == "unknown"


async def test_R9_a_callable_decides_by_the_exception_and_release_may_delay(lab: Lab) -> None:
    once = lab.face()

    def decide(error: Exception) -> Any:
        return "replay" if isinstance(error, Declined) else Release(after=60)

    with pytest.raises(OSError, match="down"):
        await lab.do(once.execute("slow", lab.raising(OSError("down")), on_error=decide))
    with pytest.raises(InProgress) as caught:
        await lab.do(once.execute("slow", lab.effect()))
    assert 0 < caught.value.retry_after <= 60
    let_pass(once, 60 - 0.3)  # the rest is waited for
    assert (await lab.do(once.execute("slow", lab.effect(), wait=20))).value == "done"
    with pytest.raises(Declined):
        await lab.do(once.execute("bad", lab.raising(Declined("x")), on_error=decide))
    with pytest.raises(PreviousFailure):
        await lab.do(once.execute("bad", lab.effect()))


async def test_R9_a_decision_that_is_none_is_refused(light_lab: Lab) -> None:
    once = light_lab.face()
    with pytest.raises(ConfigurationError, match="on_error"):
        await light_lab.do(once.execute("k", light_lab.effect(), on_error="explode"))


async def test_R9_the_default_follows_on_unknown(lab: Lab) -> None:
    once = lab.face()
    for key, on_unknown in (("hold", "hold"), ("probe", lambda: UNDECIDED)):
        with pytest.raises(Declined):
            await lab.do(once.execute(key, lab.raising(Declined("x")), on_unknown=on_unknown))
        assert (await lab.do(once.peek(key))).state == "unknown"


async def test_R10_an_interrupt_inside_the_function_is_a_lost_outcome_decided_at_once(light_lab: Lab) -> None:
    once = light_lab.face()
    if light_lab.colour == "sync":
        with pytest.raises(KeyboardInterrupt):
            once.execute("k", light_lab.raising(KeyboardInterrupt()))
        with pytest.raises(SystemExit):
            once.execute("h", light_lab.raising(SystemExit(1)), on_unknown="hold")
    else:
        for key, on_unknown in (("k", "retry"), ("h", "hold")):
            started = asyncio.Event()

            async def stuck(started: asyncio.Event = started) -> None:
                started.set()
                await asyncio.sleep(30)

            task = asyncio.create_task(once.execute(key, stuck, on_unknown=on_unknown))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert (await light_lab.do(once.execute("k", light_lab.effect()))).value == "done"
    with pytest.raises(OutcomeUnknown):
        await light_lab.do(once.execute("h", light_lab.effect()))


async def test_R10_of_the_stored_and_the_callers_policy_the_stricter_wins(lab: Lab) -> None:
    dead = await _died(lab, "stored-hold", on_unknown="hold")
    with pytest.raises(OutcomeUnknown):
        await lab.do(dead.execute("stored-hold", lab.effect(), on_unknown="retry"))
    dead = await _died(lab, "stored-retry", on_unknown="retry")
    with pytest.raises(OutcomeUnknown):
        await lab.do(dead.execute("stored-retry", lab.effect(), on_unknown="hold"))
    assert (await lab.do(dead.execute("stored-retry", lab.effect()))).attempt == 2


async def test_R11_a_probe_gets_the_arguments_and_the_run(lab: Lab) -> None:
    once = await _died(lab, "k", on_unknown=lambda *_: UNDECIDED)
    seen: list[Any] = []

    def probe(amount: int) -> Any:
        seen.append((amount, current_run().key))
        return Found("charged")

    outcome = await lab.do(once.execute("k", lab.effect(), 5, on_unknown=lab.fn(probe)))
    assert (outcome.value, outcome.replayed, seen, lab.effects) == ("charged", True, [(5, "k")], [])
    assert (await lab.do(once.execute("k", lab.effect()))).value == "charged"


async def test_R11_not_found_runs_and_undecided_stays_unknown(lab: Lab) -> None:
    once = await _died(lab, "k", on_unknown=lambda: UNDECIDED)
    with pytest.raises(OutcomeUnknown):
        await lab.do(once.execute("k", lab.effect(), on_unknown=lab.fn(lambda: UNDECIDED)))
    with pytest.raises(OutcomeUnknown):
        await lab.do(once.execute("k", lab.effect()))  # a caller without a probe
    outcome = await lab.do(once.execute("k", lab.effect(), on_unknown=lab.fn(lambda: NOT_FOUND)))
    assert (outcome.value, outcome.attempt) == ("done", 2)


async def test_R11_a_callers_probe_on_a_stored_hold_may_find_but_not_run(lab: Lab) -> None:
    once = await _died(lab, "k", on_unknown="hold")
    with pytest.raises(OutcomeUnknown):
        await lab.do(once.execute("k", lab.effect(), on_unknown=lab.fn(lambda: NOT_FOUND)))
    assert lab.effects == []
    outcome = await lab.do(once.execute("k", lab.effect(), on_unknown=lab.fn(lambda: Found("there"))))
    assert outcome.value == "there"


async def test_R12_a_late_owner_may_settle_until_somebody_decided(lab: Lab) -> None:
    once = lab.face(lease=0.05)
    async with owned(lab, once, "late", on_unknown="hold") as claim:
        _stop_heart(once, lab)
        await lapsed(lab, once, "late")
        assert (await lab.do(once.peek("late"))).state == "unknown"
        await lab.do(claim.complete("after all"))
    assert (await lab.do(lab.face().execute("late", lab.effect()))).value == "after all"


async def test_R13_resolve_takes_exactly_one_word_and_only_once(lab: Lab) -> None:
    once = await _died(lab, "k", on_unknown="hold")
    for wrong in ({}, {"value": 1, "release": True}, {"value": None, "error": "x"}):
        with pytest.raises(ConfigurationError, match="exactly one"):
            await lab.do(_resolve(once, "k", **wrong))
    await lab.do(once.resolve("k", value={"id": 1}, actor="ann", reason="looked it up"))
    assert (await lab.do(once.execute("k", lab.effect()))).value == {"id": 1}
    with pytest.raises(ConfigurationError):
        await lab.do(once.resolve("k", value=2, actor="bob"))
    events = await lab.do(once.history("k"))
    assert [(event.actor, event.reason, event.state) for event in events] == [
        ("ann", "looked it up", "unknown")
    ]


async def test_R13_a_run_that_is_lost_to_callers_who_hold_is_resolved_though_it_was_claimed_with_retry(
    lab: Lab,
) -> None:
    once = lab.face(on_unknown="hold")
    words: dict[str, dict[str, Any]] = {
        "done": {"value": 1},
        "failed": {"error": "no"},
        "released": {"release": True},
    }
    for state, word in words.items():
        await _died(lab, state)
        with pytest.raises(OutcomeUnknown, match="resolve"):
            await lab.do(once.execute(state, lab.effect()))
        await lab.do(_resolve(once, state, actor="ann", **word))
        assert (await lab.do(once.peek(state))).state == state
    assert (await lab.do(once.execute("done", lab.effect()))).value == 1
    assert (await lab.do(once.execute("released", lab.effect()))).value == "done"
    assert len(lab.effects) == 1


async def test_R13_resolve_by_error_and_release(lab: Lab) -> None:
    once = await _died(lab, "e", on_unknown="hold")
    await lab.do(once.resolve("e", error="never arrived", actor="ann"))
    with pytest.raises(PreviousFailure, match="never arrived"):
        await lab.do(once.execute("e", lab.effect()))
    with pytest.raises(ConfigurationError):
        await lab.do(once.resolve("e", release=True, actor="bob"))
    once = await _died(lab, "r", on_unknown="hold")
    await lab.do(once.resolve("r", release=True, actor="ann"))
    assert (await lab.do(once.execute("r", lab.effect()))).value == "done"


async def test_R13_a_failure_that_a_person_told_by_mistake_is_corrected(lab: Lab) -> None:
    once = await _died(lab, "e", on_unknown="hold")
    with pytest.raises(ConfigurationError, match="nothing to correct, resolve it without"):
        await lab.do(once.resolve("e", value=1, correct=True, actor="ann"))
    await lab.do(once.resolve("e", error="never arrived", actor="ann"))
    with pytest.raises(ConfigurationError, match=r"resolved already.*correct=True"):
        await lab.do(once.resolve("e", value=1, actor="ann"))
    await lab.do(once.resolve("e", value=1, correct=True, actor="ann", reason="it had"))
    assert (await lab.do(once.execute("e", lab.effect()))).value == 1
    await lab.do(once.resolve("e", error="refunded", correct=True, actor="bob"))
    await lab.do(once.resolve("e", error="charged back", correct=True, actor="bob"))
    with pytest.raises(PreviousFailure, match="charged back"):
        await lab.do(once.execute("e", lab.effect()))
    await lab.do(once.execute("own", lab.effect()))
    with pytest.raises(ConfigurationError, match=r"nothing to correct$"):
        await lab.do(once.resolve("own", value=1, correct=True, actor="ann"))


async def test_R13_a_value_that_is_too_large_to_keep_is_refused_and_changes_nothing(lab: Lab) -> None:
    await _died(lab, "k", on_unknown="hold")
    once = lab.face(max_result=100)
    with pytest.raises(CodecError, match="max_result=100: nothing was changed"):
        await lab.do(once.resolve("k", value="x" * 200, actor="ann"))
    assert (await lab.do(once.peek("k"))).state == "unknown"
    await lab.do(once.resolve("k", value="x", actor="ann"))
    assert (await lab.do(once.execute("k", lab.effect()))).value == "x"


async def test_R13_resolve_never_touches_a_live_run_or_an_absent_key(lab: Lab) -> None:
    once = lab.face()
    with pytest.raises(ConfigurationError, match="no record"):
        await lab.do(once.resolve("absent", value=1))
    async with owned(lab, once, "k") as claim:
        with pytest.raises(InProgress):
            await lab.do(lab.face().resolve("k", value=1))
        await lab.do(claim.complete(2))


async def test_R14_a_released_failure_stays_visible_and_accepts_another_request(lab: Lab) -> None:
    once = lab.face()
    long = "ü" * 5000
    with pytest.raises(Declined):
        await lab.do(once.execute("k", lab.raising(Declined(long)), request={"a": 1}))
    record = await lab.do(once.peek("k"))
    assert (record.state, record.error.type, record.error.code) == ("released", "Declined", "card_declined")
    assert record.attempts == 1
    assert 100 < len(record.error.message) <= 2000
    outcome = await lab.do(once.execute("k", lab.effect(), request={"a": 2}))
    assert outcome.attempt == 1


async def test_R14_with_steps_a_released_record_keeps_its_fingerprint_and_counts_on(lab: Lab) -> None:
    once = lab.face()
    done: list[str] = []

    def step() -> str:
        done.append("charged")
        return "ch_1"

    def plain(fail: bool) -> Any:
        charge = current_run().step("charge", step)
        if fail:
            raise OSError("later")
        return charge

    async def coloured(fail: bool) -> Any:
        charge = await current_run().step("charge", lab.fn(step))
        if fail:
            raise OSError("later")
        return charge

    work = plain if lab.colour == "sync" else coloured
    with pytest.raises(OSError, match="later"):
        await lab.do(once.execute("k", work, True, request={"a": 1}))
    with pytest.raises(KeyMismatch):
        await lab.do(once.execute("k", work, False, request={"a": 2}))
    outcome = await lab.do(once.execute("k", work, False, request={"a": 1}))
    assert (outcome.value, outcome.attempt, done) == ("ch_1", 2, ["charged"])


async def test_R15_an_unreadable_result_is_unknown_never_rerun_and_repaired_by_resolve(
    light_lab: Lab,
) -> None:
    store = MemoryStore()
    once = _over(light_lab, store)
    await light_lab.do(once.execute("k", light_lab.effect({"a": 1})))
    (hashed, record), *_ = store._records.items()
    store._records[hashed] = msgspec.structs.replace(record, result=b"\x00garbage")
    with pytest.raises(OutcomeUnknown) as caught:
        await light_lab.do(once.execute("k", light_lab.effect()))
    assert caught.value.unreadable
    assert len(light_lab.effects) == 1
    await light_lab.do(once.resolve("k", value={"a": 1}, actor="ann"))
    assert (await light_lab.do(once.execute("k", light_lab.effect()))).value == {"a": 1}


async def test_R16_one_lost_request_or_reply_is_not_seen_by_the_caller(light_lab: Lab) -> None:
    struck = 0
    for seed in range(60):
        chaos = Chaos(MemoryStore(), seed=seed, lose_request=0.08, lose_reply=0.08)
        once = _over(light_lab, chaos, settle_timeout=5)
        light_lab.effects.clear()
        try:
            assert (await light_lab.do(once.execute("k", light_lab.effect()))).value == "done"
        except StoreUnavailable:
            assert light_lab.effects == []  # both tries of the claim were lost: nothing ran
        else:
            assert len(light_lab.effects) == 1
        struck += chaos.struck
        await light_lab.do(once.close())
    assert struck > 5


class Stuck(Layer):
    """Takes claims, but no settles until it is told to."""

    broken = True
    lost: float = math.inf
    """How many are lost; all of them unless it is said."""
    settles = 0

    async def settle(self, ends: Any) -> list[Answer | Exception]:
        self.settles += 1
        if self.broken and self.settles <= self.lost:
            raise StoreUnavailable("the settle was lost")
        return await self.inner.settle(ends)


async def test_R16_a_settle_that_cannot_be_stored_is_not_recorded_and_goes_on_in_the_background(
    light_lab: Lab,
) -> None:
    alarms: list[Any] = []
    store = Stuck(MemoryStore())
    once = _over(light_lab, store, settle_timeout=0.2, lease=3, hooks=[alarms.append])
    with pytest.raises(NotRecorded) as caught:
        await light_lab.do(once.execute("k", light_lab.effect({"id": 1})))
    assert caught.value.value == {"id": 1}
    assert "Unrecorded" in [type(event).__name__ for event in alarms]
    await renewed(light_lab, once, "k", times=3)  # beyond the lease: while the write goes on
    with pytest.raises(InProgress):
        await light_lab.do(once.execute("k", light_lab.effect()))
    store.broken = False

    async def recorded() -> bool:
        return bool((await light_lab.do(once.peek("k"))).state == "done")

    await until(light_lab, recorded)
    outcome = await light_lab.do(once.execute("k", light_lab.effect()))
    assert (outcome.value, outcome.replayed, len(light_lab.effects)) == ({"id": 1}, True, 1)


async def test_R16_a_settle_lost_for_a_moment_is_not_noticed(light_lab: Lab) -> None:
    store = Stuck(MemoryStore())
    store.lost = 3
    once = _over(light_lab, store, settle_timeout=30)
    assert (await light_lab.do(once.execute("k", light_lab.effect()))).value == "done"
    assert store.settles == 4


async def test_R16_a_claim_without_an_answer_is_released_in_the_background(light_lab: Lab) -> None:
    class Deaf(Layer):
        deaf = True

        async def claim(self, asks: Any) -> Any:
            verdicts = await self.inner.claim(asks)
            if self.deaf:
                raise StoreUnavailable("the reply was lost")
            return verdicts

    memory = MemoryStore()
    store = Deaf(memory)
    once = _over(light_lab, store, lease=30)
    with pytest.raises(StoreUnavailable):
        await light_lab.do(once.execute("k", light_lab.effect()))
    store.deaf = False
    await until(light_lab, lambda: all(record.state == "released" for record in memory._records.values()))
    assert (await light_lab.do(once.execute("k", light_lab.effect()))).value == "done"


def test_R16_a_cancelled_caller_still_stores_its_outcome() -> None:
    class Slow(Layer):
        settling = asyncio.Event()

        async def settle(self, ends: Any) -> Any:
            self.settling.set()
            await asyncio.sleep(0.1)
            return await self.inner.settle(ends)

    async def main() -> None:
        store = Slow(MemoryStore())
        once = AsyncSemel(store)

        async def work() -> str:
            return "effect"

        task = asyncio.create_task(once.execute("k", work))
        await store.settling.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await once.execute("k", work)).replayed
        await once.aclose()

    asyncio.run(main())


async def test_R23_an_unencodable_value_leaves_a_done_marker_and_is_never_rerun(lab: Lab) -> None:
    once = lab.face()
    with pytest.raises(CodecError):
        await lab.do(once.execute("k", lab.effect(object())))
    with pytest.raises(CodecError):
        await lab.do(once.execute("k", lab.effect()))
    assert await lab.do(once.consume("k", lab.effect())) is False
    assert len(lab.effects) == 1


# ------------------------------------------------------------------------------------------------ scenes


async def _died(lab: Lab, key: str, **options: Any) -> Any:
    """An owner claimed the key and is gone; its lease is over. Returns a face to look at what is left."""
    dead = lab.face(lease=0.05)
    await lab.do(_claim_and_vanish(lab, dead, key, options))
    _stop_heart(dead, lab)
    await lapsed(lab, dead, key)
    return lab.face(lease=0.05)


def _claim_and_vanish(lab: Lab, once: Any, key: str, options: dict[str, Any]) -> Any:
    claim = once.claim(key, **options)
    return claim.__enter__() if lab.colour == "sync" else claim.__aenter__()


def _stop_heart(once: Any, lab: Lab) -> None:
    engine = once._engine()
    engine.heart.stop()
    engine.heart._runs.clear()


def _resolve(once: Any, key: str, **words: Any) -> Any:
    return once.resolve(key, **words)


def _over(lab: Lab, store: Any, **settings: Any) -> Any:
    face = (Semel if lab.colour == "sync" else AsyncSemel)(store, **settings)
    lab._faces.append(face)
    return face
