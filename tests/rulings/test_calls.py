"""R1-R8: calls."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import math
import threading
import time
import warnings
import weakref
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from semel import (
    NOT_FOUND,
    UNDECIDED,
    AsyncSemel,
    ConfigurationError,
    Found,
    InProgress,
    KeyMismatch,
    LeaseLost,
    OutcomeUnknown,
    PreviousFailure,
    Semel,
    SemelWarning,
    current_run,
)
from semel.model import Busy, Mismatch, Replay, Unknown, Won

from .conftest import Lab
from .tools import enter, let_pass, meanwhile, owned, renewed


@dataclasses.dataclass
class Order:
    id: str
    total: Decimal


async def test_R1_positionals_and_kwargs_go_to_the_function(lab: Lab) -> None:
    once = lab.face()
    outcome = await lab.do(once.execute("k", lab.fn(lambda a, b, c=0: [a, b, c]), 1, 2, kwargs={"c": 3}))
    assert outcome.value == [1, 2, 3]


async def test_R1_an_unknown_option_is_refused_by_name(light_lab: Lab) -> None:
    once = light_lab.face()
    with pytest.raises(ConfigurationError, match="retension"):
        await light_lab.do(once.execute("k", light_lab.effect(), retension=5))
    assert light_lab.effects == []


async def test_R1_consume_takes_every_option_of_execute_and_raises_as_it_does(lab: Lab) -> None:
    once = lab.face()
    assert (
        await lab.do(once.consume("k", lab.effect(), request={"a": 1}, retention=60, labels={"scene": "mq"}))
        is True
    )
    assert await lab.do(once.consume("k", lab.effect(), request={"a": 1})) is False
    with pytest.raises(KeyMismatch):
        await lab.do(once.consume("k", lab.effect(), request={"a": 2}))
    with pytest.raises(ValueError, match="no"):
        await lab.do(once.consume("bad", lab.raising(ValueError("no")), on_error="replay"))
    with pytest.raises(PreviousFailure):
        await lab.do(once.consume("bad", lab.effect()))
    with pytest.raises(ValueError, match="maybe"):
        await lab.do(once.consume("held", lab.raising(ValueError("maybe")), on_unknown="hold"))
    with pytest.raises(OutcomeUnknown):
        await lab.do(once.consume("held", lab.effect(), on_unknown="hold"))


async def test_R2_the_first_caller_gets_its_own_object_and_a_replay_an_equal_fresh_one(lab: Lab) -> None:
    order = Order("o-1", Decimal("9.90"))

    def create() -> Order:
        return order

    first = await lab.do(lab.face().execute("k", lab.fn(create)))
    again = await lab.do(lab.face().execute("k", lab.fn(create)))
    assert first.value is order
    assert again.value == order
    assert type(again.value) is Order
    assert again.value is not order
    assert (first.replayed, again.replayed) == (False, True)


async def test_R2_the_functions_own_exception_reaches_its_caller_unwrapped(lab: Lab) -> None:
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        await lab.do(lab.face().execute("k", lab.raising(error)))
    assert caught.value is error


async def test_R3_wait_running_out_raises_in_progress_which_is_a_timeout_error(lab: Lab) -> None:
    once = lab.face()
    async with owned(lab, once, "k") as claim:
        with pytest.raises(InProgress) as caught:
            await lab.do(lab.face().execute("k", lab.effect(), wait=0.05))
        assert isinstance(caught.value, TimeoutError)
        assert 0 < caught.value.retry_after <= 10
        with pytest.raises(InProgress):
            await lab.do(lab.face().execute("k", lab.effect()))
        await lab.do(claim.complete(None))
    assert lab.effects == []


async def test_R3_infinite_wait_and_polling_are_options(lab: Lab) -> None:
    once, other = lab.face(), lab.face()
    async with owned(lab, once, "k") as claim:
        settling = meanwhile(lab, 0.1, lambda: claim.complete("late"))
        outcome = await lab.do(other.execute("k", lab.effect(), wait=math.inf, poll=(0.001, 0.01)))
        await settling()
    assert (outcome.value, outcome.replayed, lab.effects) == ("late", True, [])


def test_R4_a_coroutine_function_on_semel_is_refused() -> None:
    async def work() -> None: ...

    once = Semel("memory://")
    with pytest.raises(ConfigurationError, match="AsyncSemel"):
        once.execute("k", work)
    with pytest.raises(ConfigurationError, match="AsyncSemel"):
        once(key="x")(work)


def test_R4_a_plain_function_on_async_semel_runs_in_a_thread_and_outlives_its_cancelled_caller() -> None:
    started, finish = threading.Event(), threading.Event()
    threads = []

    def work() -> str:
        threads.append(threading.current_thread())
        started.set()
        assert finish.wait(30)
        return "finished"

    async def main() -> None:
        once = AsyncSemel("memory://", lease=3)
        task = asyncio.create_task(once.execute("k", work))
        await asyncio.to_thread(started.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # Beyond the lease: it must still be renewed, never released under the thread.
        await renewed(Lab("async", ""), once, "k", times=3)
        with pytest.raises(InProgress):
            await once.execute("k", work)
        finish.set()
        outcome = await once.execute("k", work, wait=30)
        assert (outcome.value, outcome.replayed) == ("finished", True)
        await once.aclose()

    asyncio.run(main())
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_R4_inline_opts_out_of_the_thread() -> None:
    async def main() -> Any:
        async with AsyncSemel("memory://") as once:
            return (await once.execute("k", threading.get_ident, inline=True)).value

    assert asyncio.run(main()) == threading.get_ident()


async def test_R4_a_plain_function_in_the_loop_is_not_done_without_a_step_that_it_could_not_wait_for() -> (
    None
):
    made: list[str] = []

    def forgets() -> str:
        current_run().step("charge", made.append, "charge")
        return "paid"

    def gives_back() -> Any:
        return current_run().step("charge", made.append, "charge")

    async with AsyncSemel("memory://") as once:
        with pytest.raises(ConfigurationError, match=r"forgets.*nothing of that has run.*async def"):
            await once.execute("k", forgets, inline=True)
        assert made == []
        await once.execute("k", gives_back, inline=True)
        await once.execute("other", forgets)
    assert made == ["charge", "charge"]


async def test_R5_the_decorator_works_on_functions_methods_and_handler_classes(lab: Lab) -> None:
    once = lab.face()
    seen: list[Any] = []

    def create(cmd: dict[str, Any]) -> str:
        seen.append(cmd)
        return "made"

    decorated = once(operation="orders.create", key="cmd.request_id", request="cmd")(lab.fn(create))
    cmd = {"request_id": "r1", "total": 3}
    assert await lab.do(decorated(cmd)) == "made"
    assert await lab.do(decorated(dict(cmd))) == "made"
    assert (await lab.do(decorated.outcome(cmd))).replayed
    with pytest.raises(KeyMismatch):
        await lab.do(decorated({**cmd, "total": 4}))
    assert len(seen) == 1


async def test_R5_self_is_not_part_of_the_request(lab: Lab) -> None:
    once = lab.face()
    calls: list[Any] = []
    if lab.colour == "sync":

        class Service:
            @once(operation="svc", key=lambda number: f"n-{number}", request="number")
            def add(self, number: int) -> int:
                calls.append(self)
                return number + 1

        @once(operation="handler", key="cmd.id", method="run")
        class Handler:
            def run(self, cmd: dict[str, Any]) -> str:
                calls.append(self)
                return str(cmd["id"])
    else:

        class Service:  # type: ignore[no-redef]  # of one colour or the other
            @once(operation="svc", key=lambda number: f"n-{number}", request="number")
            async def add(self, number: int) -> int:
                calls.append(self)
                return number + 1

        @once(operation="handler", key="cmd.id", method="run")
        class Handler:  # type: ignore[no-redef]  # of one colour or the other
            async def run(self, cmd: dict[str, Any]) -> str:
                calls.append(self)
                return str(cmd["id"])

    one, two = Service(), Service()
    assert await lab.do(one.add(1)) == 2
    assert await lab.do(two.add(number=1)) == 2
    assert (await lab.do(two.add.outcome(1))).replayed
    assert await lab.do(Handler().run({"id": "a"})) == "a"
    assert await lab.do(Handler().run({"id": "a"})) == "a"
    assert len(calls) == 2


@dataclasses.dataclass(frozen=True)
class Books:
    """Equal to any other of its kind, whatever it looks into."""

    name: str
    charges: dict[str, str] = dataclasses.field(compare=False)

    def __call__(self, *_: object) -> Any:
        return Found(self.charges["k"]) if "k" in self.charges else NOT_FOUND


async def test_R11_a_callers_own_probe_is_asked_though_it_equals_another_ones(light_lab: Lab) -> None:
    once = light_lab.face()
    here, there = Books("charges", {"k": "charged"}), Books("charges", {})
    assert here == there
    await light_lab.do(once.execute("other", light_lab.effect(), on_unknown=there))
    with pytest.raises(ValueError, match="lost"):
        await light_lab.do(once.execute("k", light_lab.raising(ValueError("lost")), on_unknown=here))
    found = await light_lab.do(once.execute("k", light_lab.effect("twice"), on_unknown=here))
    assert found.value == "charged"


async def test_R11_a_callers_own_probe_is_asked_though_it_equals_the_faces_own(light_lab: Lab) -> None:
    here, there = Books("charges", {"k": "charged"}), Books("charges", {})
    once = light_lab.face(on_unknown=there)
    await light_lab.do(once.execute("other", light_lab.effect(), on_unknown=there))
    with pytest.raises(ValueError, match="lost"):
        await light_lab.do(once.execute("k", light_lab.raising(ValueError("lost")), on_unknown=here))
    found = await light_lab.do(once.execute("k", light_lab.effect("twice"), on_unknown=here))
    assert found.value == "charged"


async def test_what_a_callers_function_holds_goes_with_its_call(light_lab: Lab) -> None:
    once = light_lab.face()

    class Session:
        pass

    async def call(number: int) -> weakref.ref[Session]:
        session = Session()
        decide = functools.partial(lambda _session, _error: "release", session)

        def probe(*_: Any, session: Session = session) -> Any:
            return UNDECIDED

        options: dict[str, Any] = {
            "on_error": decide,
            "on_unknown": probe if number else lambda *_: (session, UNDECIDED)[1],
        }
        await light_lab.do(once.execute(f"k{number}", light_lab.effect(), **options))
        await light_lab.do(once.execute(f"i{number}", light_lab.effect(), inline=True, **options))
        return weakref.ref(session)

    known = [await call(number) for number in range(3)]
    gc.collect()
    assert [session() for session in known] == [None] * 3


async def test_R5_an_argument_that_does_not_exist_is_refused_when_decorating(light_lab: Lab) -> None:
    with pytest.raises(ConfigurationError, match="order"):
        light_lab.face()(key="order.id")(light_lab.fn(lambda cmd: cmd))


async def test_R6_a_claim_by_hand_raises_as_execute_does_and_a_loser_may_not_complete(lab: Lab) -> None:
    once = lab.face()
    async with owned(lab, once, "k") as claim:
        assert claim.won
        assert not claim.replayed
        with pytest.raises(InProgress):
            await lab.do(enter(lab, lab.face().claim("k")))
        await lab.do(claim.complete({"id": 7}))
    async with owned(lab, lab.face(), "k") as again:
        assert again.replayed
        assert again.value == {"id": 7}
        with pytest.raises(ConfigurationError, match="owner"):
            await lab.do(again.complete(1))


async def test_R6_verdicts_returns_every_verdict(lab: Lab) -> None:
    once = lab.face(coalesce=False)
    async with owned(lab, once, "k", request=1) as claim:
        assert isinstance(claim.verdict, Won)
        async with owned(lab, once, "k", request=1, verdicts=True) as busy:
            assert isinstance(busy.verdict, Busy)
        async with owned(lab, once, "k", request=2, verdicts=True) as other:
            assert isinstance(other.verdict, Mismatch)
        await lab.do(claim.complete("x"))
    async with owned(lab, once, "k", verdicts=True) as settled:
        assert isinstance(settled.verdict, Replay)
        assert settled.value == "x"


async def test_R6_who_asks_for_verdicts_waits_as_any_caller_does(lab: Lab) -> None:
    once = lab.face(coalesce=False)
    async with owned(lab, once, "k", request=1) as claim:
        async with owned(lab, once, "k", wait=0.05, verdicts=True) as late:
            assert isinstance(late.verdict, Busy)
        finished = meanwhile(lab, 0.05, lambda: claim.complete("x"))
        async with owned(lab, once, "k", wait=20, verdicts=True) as settled:
            assert isinstance(settled.verdict, Replay)
            assert settled.value == "x"
        await finished()
        async with owned(lab, once, "k", request=2, wait=1, verdicts=True) as other:
            assert isinstance(other.verdict, Mismatch)


async def test_R6_who_asks_for_verdicts_is_told_the_last_one_of_a_wait(light_lab: Lab) -> None:
    once = light_lab.face(coalesce=False)
    async with owned(light_lab, once, "k", request=1) as claim:
        ended = meanwhile(light_lab, 0.05, lambda: claim.complete("x"))
        async with owned(light_lab, once, "k", wait=20, verdicts=True, ref_type="ord") as settled:
            assert isinstance(settled.verdict, Replay)
        await ended()


async def test_R6_the_last_verdict_of_a_wait_is_told_though_the_first_was_another_one(light_lab: Lab) -> None:
    once = light_lab.face(coalesce=False)
    async with owned(light_lab, once, "lost") as claim:
        ended = meanwhile(light_lab, 0.1, lambda: _lose(light_lab, once, "lost"))
        async with owned(light_lab, once, "lost", wait=20, verdicts=True, on_unknown="hold") as last:
            assert isinstance(last.verdict, Unknown)
        await ended()
        with contextlib.suppress(LeaseLost):
            await light_lab.do(claim.complete("late"))


async def _lose(lab: Lab, once: Any, key: str) -> None:
    """Its owner is gone, and the lease is over."""
    once._engine().heart.stop()
    let_pass(once, 60)


async def test_R6_what_a_probe_raises_is_no_verdict_on_the_key(light_lab: Lab) -> None:
    once = light_lab.face()

    def probe() -> Any:
        raise OutcomeUnknown("of another key")

    with pytest.raises(ValueError, match="lost"):
        await light_lab.do(once.execute("k", light_lab.raising(ValueError("lost")), on_unknown=probe))
    with pytest.raises(OutcomeUnknown, match="of another key"):
        await enter(light_lab, once.claim("k", verdicts=True, on_unknown=probe))


@pytest.mark.parametrize("answer", [Found("looked up"), NOT_FOUND, UNDECIDED])
async def test_R6_who_asks_for_verdicts_has_the_probe_asked(light_lab: Lab, answer: Any) -> None:
    once = light_lab.face()

    def probe() -> Any:
        return answer

    with pytest.raises(ValueError, match="lost"):
        await light_lab.do(once.execute("k", light_lab.raising(ValueError("lost")), on_unknown=probe))
    async with owned(light_lab, once, "k", verdicts=True, on_unknown=probe) as claim:
        if answer is UNDECIDED:
            assert isinstance(claim.verdict, Unknown)
        elif answer is NOT_FOUND:
            assert isinstance(claim.verdict, Won)
            await light_lab.do(claim.complete("again"))
        else:
            assert isinstance(claim.verdict, Replay)
            assert claim.value == "looked up"


async def test_R6_what_is_no_value_is_raised_by_who_asks_for_it(light_lab: Lab) -> None:
    once = light_lab.face()
    with pytest.raises(ValueError, match="declined"):
        await light_lab.do(
            once.execute("failed", light_lab.raising(ValueError("declined")), on_error="replay")
        )
    async with owned(light_lab, once, "failed", verdicts=True) as failed:
        assert isinstance(failed.verdict, Replay)
        assert (failed.won, failed.replayed, failed.attempt) == (False, False, 1)
        with pytest.raises(PreviousFailure, match="declined"):
            assert failed.value
    await light_lab.do(once.execute("order", light_lab.effect(Order("o", Decimal(1))), result_type=Order))
    async with owned(light_lab, once, "order", verdicts=True, result_type=int) as foreign:
        assert isinstance(foreign.verdict, Unknown)
        assert foreign.verdict.unreadable
        with pytest.raises(OutcomeUnknown):
            assert foreign.value


async def test_R8_there_is_no_run_after_blocks_that_ended_in_the_order_of_their_beginnings(
    light_lab: Lab,
) -> None:
    once = light_lab.face()
    first, second = owned(light_lab, once, "first"), owned(light_lab, once, "second")
    one = await first.__aenter__()
    two = await second.__aenter__()
    await light_lab.do(one.complete(1))
    await first.__aexit__(None, None, None)
    assert current_run().key == "second"
    await light_lab.do(two.complete(2))
    await second.__aexit__(None, None, None)
    assert current_run(None) is None


async def test_R6_leaving_by_an_exception_applies_on_error(lab: Lab) -> None:
    once = lab.face()
    with pytest.raises(ValueError, match="boom"):
        async with owned(lab, once, "k", on_error="replay"):
            raise ValueError("boom")
    with pytest.raises(PreviousFailure, match="boom"):
        await lab.do(once.execute("k", lab.effect()))


async def test_R6_leaving_without_an_answer_releases_and_warns(lab: Lab) -> None:
    once = lab.face()
    with pytest.warns(SemelWarning, match="without complete"):
        async with owned(lab, once, "k"):
            pass
    assert (await lab.do(once.execute("k", lab.effect()))).value == "done"


async def test_R6_fail_by_hand_is_the_outcome(lab: Lab) -> None:
    once = lab.face()
    async with owned(lab, once, "k") as claim:
        await lab.do(claim.fail("card declined"))
    with pytest.raises(PreviousFailure, match="card declined"):
        await lab.do(once.execute("k", lab.effect()))


async def test_R7_peek_forget_purge_and_history(lab: Lab) -> None:
    once = lab.face()
    assert await lab.do(once.peek("k")) is None
    assert await lab.do(once.forget("k")) is False

    def create() -> str:
        current_run().set_ref("ord_1")
        return "x"

    await lab.do(once.execute("k", lab.fn(create), labels={"scene": "api"}))
    record = await lab.do(once.peek("k"))
    assert (record.state, record.ref, record.attempts, record.error) == ("done", "ord_1", 1, None)
    assert record.labels == {"scene": "api"}
    assert record.created <= record.settled < record.expires
    assert await lab.do(once.forget("k", actor="ann", reason="test")) is True
    assert await lab.do(once.peek("k")) is None
    events = await lab.do(once.history("k"))
    assert [(event.actor, event.reason, event.kind) for event in events] == [("ann", "test", "forgotten")]


async def test_R45_create_makes_the_tables_before_the_first_call(lab: Lab) -> None:
    once = lab.face(table="made_early")
    await lab.do(once.create())
    await lab.do(once.create())
    late = lab.face(table="made_early", create=False)
    assert (await lab.do(late.execute("k", lab.effect()))).value == "done"


async def test_R7_forget_refuses_a_live_run(lab: Lab) -> None:
    once = lab.face()
    async with owned(lab, once, "k") as claim:
        with pytest.raises(InProgress):
            await lab.do(lab.face().forget("k"))
        await lab.do(claim.complete(None))


async def test_R7_purge_returns_the_count(lab: Lab) -> None:
    once = lab.face(retention=0.001, operation=lab.tenant)
    for number in range(5):
        await lab.do(once.execute(f"k{number}", lab.effect()))
    time.sleep(0.02)
    gone = await lab.do(once.purge())
    # Redis expires by itself: there may be nothing left to purge.
    assert gone == 5 or lab.url.startswith("redis") or gone > 5
    assert await lab.do(once.peek("k0")) is None


async def test_R7_close_may_be_called_twice(lab: Lab) -> None:
    once = lab.face()
    await lab.do(once.execute("k", lab.effect()))
    await lab.do(once.close())
    await lab.do(once.close())


def test_R8_current_run_outside_a_run_raises() -> None:
    with pytest.raises(ConfigurationError, match="inside"):
        current_run()


def test_R8_a_named_memory_store_is_shared_in_the_process_and_a_nameless_one_is_not() -> None:
    name = uuid4().hex
    assert Semel(f"memory://{name}").execute("k", lambda: 1).replayed is False
    assert Semel(f"memory://{name}").execute("k", lambda: 2).value == 1
    assert Semel("memory://").execute("k", lambda: 3).value == 3


async def test_R8_disabled_runs_unprotected_and_says_so_loudly(light_lab: Lab) -> None:
    events: list[Any] = []
    with pytest.warns(SemelWarning, match="switched off"):
        once = light_lab.face(enabled=False, hooks=[events.append])
    work = light_lab.effect()
    for _ in range(2):
        assert (await light_lab.do(once.execute("k", work))).replayed is False
    assert len(light_lab.effects) == 2
    assert [type(event).__name__ for event in events] == ["Unprotected", "Unprotected"]
    guarantee = await light_lab.do(once.guarantee())
    assert guarantee.rows["tx"]["crash"] == "nothing is promised"


def test_R29_semel_inside_a_running_loop_warns() -> None:
    async def main() -> None:
        with pytest.warns(SemelWarning, match="AsyncSemel"):
            Semel("memory://").execute("k", lambda: 1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(main())


def test_values_keep_their_type_on_replay() -> None:
    once = Semel("memory://")
    value = {"at": datetime.now(UTC), "id": uuid4(), "raw": b"\0\xff", "sum": Decimal("1.10"), "pair": (1, 2)}
    once.execute("k", lambda: value)
    assert once.execute("k", lambda: None).value == value


class _Proxy:
    """As of xmlrpc: every attribute is a further name to call."""

    def __getattr__(self, name: str) -> _Proxy:
        return self

    def __call__(self, *args: object) -> tuple[object, ...]:
        return args


def test_a_proxy_that_has_every_attribute_is_a_function() -> None:
    with Semel("memory://") as once:
        assert once.execute("k", _Proxy().charge, 5).value == (5,)


async def test_so_it_is_where_it_is_awaited() -> None:
    async with AsyncSemel("memory://") as awaited:
        assert (await awaited.execute("k", _Proxy().charge, 5)).value == (5,)
