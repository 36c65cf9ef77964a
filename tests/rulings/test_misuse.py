"""What a user does in good faith, or by mistake, must not run twice, be marked as run, or be changed. Each was once a bug."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import sqlite3
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from semel import NOT_FOUND, AsyncSemel, CodecError, ConfigurationError, Found, LeaseLost, Semel, current_run
from semel.errors import NotRecorded
from semel.hooks import log_events
from semel.model import State
from semel.runtime import _ThreadTicker
from semel.testing import services

from .conftest import Lab
from .tools import owned


@dataclasses.dataclass
class Parcel:
    weight: Decimal
    stops: tuple[int, ...]


class Gone:
    """An object whose call makes a generator."""

    def __call__(self) -> Iterator[int]:
        yield 1


def numbers() -> Iterator[int]:
    yield 1


async def test_R13_a_done_record_of_a_class_is_not_overwritten_by_somebody_who_does_not_name_it(
    lab: Lab,
) -> None:
    once = lab.face()

    def ship() -> Parcel:
        lab.effects.append(1)
        return Parcel(Decimal("1.10"), (1, 2))

    work = lab.fn(ship)
    await lab.do(once.execute("k", work))
    with pytest.raises(ConfigurationError, match="it is done"):
        await lab.do(once.resolve("k", release=True))
    outcome = await lab.do(once.execute("k", work))
    assert (outcome.value, outcome.replayed, lab.effects) == (Parcel(Decimal("1.10"), (1, 2)), True, [1])


async def test_R26_the_values_of_steps_go_when_somebody_else_ends_the_run(lab: Lab) -> None:
    once = lab.face(on_unknown="hold")

    async def work() -> None:
        await lab.do(current_run().step("charge", lab.fn(lambda: "x" * 1000)))
        raise SystemExit

    def plain() -> None:
        current_run().step("charge", lambda: "x" * 1000)
        raise SystemExit

    with pytest.raises(SystemExit):
        await lab.do(once.execute("k", plain if lab.colour == "sync" else work))
    assert len((await lab.do(once.peek("k"))).steps) > 1000
    await lab.do(once.resolve("k", value="found", actor="ada"))
    record = await lab.do(once.peek("k"))
    assert (record.state, len(record.steps) < 200, b"charge" in record.steps) == (State.DONE, True, True)


@pytest.mark.parametrize("fn", [functools.partial(numbers), Gone(), lambda: numbers()])
async def test_a_generator_is_not_marked_as_run(light_lab: Lab, fn: Any) -> None:
    once = light_lab.face()
    with pytest.raises(ConfigurationError, match="generator"):
        await light_lab.do(once.consume("k", fn))
    assert await light_lab.do(once.consume("k", light_lab.effect()))  # the key was not used up


def test_a_step_that_makes_a_generator_is_not_noted_as_made() -> None:
    with Semel("memory://") as once:

        def work(step: Any) -> Any:
            return current_run().step("s", step)

        with pytest.raises(ConfigurationError, match="generator"):
            once.execute("k", work, numbers)
        with pytest.raises(ConfigurationError, match="generator"):
            once.execute("k", work, lambda: numbers())
        with pytest.raises(ConfigurationError, match="needs a function"):
            once.execute("k", work, 7)
        assert once.execute("k", work, lambda: 3).value == 3


def test_R17_a_run_that_knows_of_its_loss_makes_no_further_step() -> None:
    made: list[str] = []
    with Semel("memory://", lease=10) as once:

        def work() -> None:
            run = current_run()
            run.lease_lost = True
            run.step("charge", made.append, "charged")

        with pytest.raises(LeaseLost, match="was not made"):
            once.execute("k", work)
        kept: list[Any] = []
        once.execute("k2", lambda: kept.append(current_run()))
        with pytest.raises(ConfigurationError, match="has ended"):
            kept[0].step("charge", made.append, "charged")
    assert made == []


def test_a_step_s_own_on_unknown_is_checked() -> None:
    with Semel("memory://") as once, pytest.raises(ConfigurationError, match="on_unknown must be"):
        once.execute("k", lambda: current_run().step("s", int, on_unknown="banana"))


async def test_fingerprints_required_asks_only_those_who_run_something(light_lab: Lab) -> None:
    once = light_lab.face(fingerprints="required")
    await light_lab.do(once.create())
    await light_lab.do(once.execute("k", light_lab.effect(), request={"a": 1}))
    assert (await light_lab.do(once.peek("k"))).state is State.DONE
    await light_lab.do(once.history("k"))
    assert (await light_lab.do(once.reconcile())).found == 0
    assert await light_lab.do(once.forget("k"))
    with pytest.raises(ConfigurationError, match="no request="):
        await light_lab.do(once.execute("k", light_lab.effect()))


class Echo:
    def __call__(self, n: int) -> int:
        return n


def second(_: int, n: int) -> int:
    return n


@pytest.mark.parametrize("fn", [lambda n: n, functools.partial(second, 1), Echo()])
def test_a_nameless_function_is_decorated_with_its_operation_said(fn: Any) -> None:
    with Semel("memory://") as once:
        with pytest.raises(ConfigurationError, match="operation="):
            once()(fn)
        assert once(operation="named")(fn)(2) == 2


def test_options_of_one_call_are_refused_by_the_decorator_with_the_remedy() -> None:
    with Semel("memory://") as once:
        options: list[dict[str, Any]] = [{"fingerprint": "0" * 64}, {"kwargs": {}}]
        for given in options:
            with pytest.raises(ConfigurationError, match=r"take.*request="):
                once(operation="o", **given)
        with pytest.raises(ConfigurationError, match="readable must be"):
            once(operation="o", readable="loud")  # type: ignore[arg-type]  # that is the mistake
        assert once(operation="o", readable="none")(second)(1, 7) == 7


async def test_a_decorated_async_method_is_known_as_a_coroutine_function() -> None:
    async with AsyncSemel("memory://") as once:

        class Shop:
            @once(operation="order")
            async def order(self, item: str) -> str:
                return item

        assert inspect.iscoroutinefunction(Shop().order)
        assert list(inspect.signature(Shop().order).parameters) == ["item"]
        assert await Shop().order("tea") == "tea"
        assert (await Shop().order.outcome("tea")).replayed


def test_a_decorated_method_is_named_as_the_plain_one() -> None:
    def marked(fn: Any) -> Any:
        fn.route = "/order"
        return fn

    with Semel("memory://") as once:

        class Shop:
            @once(operation="order")
            @marked
            def order(self, item: str) -> str:
                """Take an order."""
                return item

        order: Any = Shop().order
        assert (order.__name__, order.__qualname__) == ("order", Shop.order.__qualname__)
        assert (order.__doc__, order.__module__, order.route) == ("Take an order.", __name__, "/order")
        assert list(inspect.signature(order).parameters) == ["item"]
        assert order.__wrapped__(None, "tea") == "tea"
        assert order("tea") == "tea"
        assert order.outcome("tea").replayed


def test_R8_an_unprotected_face_never_refuses_a_call() -> None:
    with pytest.warns(match="nothing is protected"):
        once = Semel("memory://", enabled=False, on_unknown="hold")
    with once:
        for n in range(10_050):
            with pytest.raises(ZeroDivisionError):
                once.execute("k", lambda: 1 // 0)
            assert n < 10_050


async def test_a_claim_is_entered_once(light_lab: Lab) -> None:
    once = light_lab.face()
    claim = once.claim("k")
    by_hand = owned(light_lab, once, "k")
    by_hand._claim = claim
    with pytest.raises(OSError, match="broken"):
        async with by_hand:
            raise OSError("broken")
    with pytest.raises(ConfigurationError, match="entered once"):
        async with by_hand:
            pass
    assert (await light_lab.do(once.execute("k", light_lab.effect("x")))).value == "x"


async def test_R6_a_claim_of_a_result_that_was_too_large_tells_its_ref(light_lab: Lab) -> None:
    once = light_lab.face(max_result=10)

    def plain() -> str:
        current_run().set_ref("ord_1")
        return "x" * 100

    await light_lab.do(once.execute("k", light_lab.fn(plain)))
    async with owned(light_lab, once, "k") as claim:
        assert (claim.replayed, claim.ref) == (True, "ord_1")
        with pytest.raises(CodecError, match="not kept"):
            _ = claim.value


async def test_purge_refuses_a_batch_that_would_never_end(light_lab: Lab) -> None:
    once = light_lab.face()
    for wrong in ({"batch": 0}, {"batch": -1}, {"limit": -1}, {"limit": "x"}):
        with pytest.raises(ConfigurationError, match="whole number"):
            await light_lab.do(once.purge(**wrong))


async def test_what_a_person_says_is_text_and_is_cut(lab: Lab) -> None:
    once = lab.face(on_unknown="hold")
    with pytest.raises(SystemExit):
        await lab.do(once.execute("k", lab.raising(SystemExit())))
    with pytest.raises(ConfigurationError, match="actor must be text"):
        await lab.do(once.resolve("k", value=1, actor=5))
    await lab.do(once.resolve("k", value=1, actor="a" * 100_000, reason="r" * 100_000))
    told = (await lab.do(once.history("k")))[-1]
    assert (len(told.actor), len(told.reason)) == (1_000, 10_000)


def test_labels_are_few() -> None:
    with Semel("memory://") as once, pytest.raises(ConfigurationError, match="at most 64 labels"):
        once.execute("k", int, labels={str(n): "" for n in range(65)})


async def test_reconcile_goes_on_after_a_record_that_it_cannot_name(light_lab: Lab) -> None:
    once = light_lab.face(on_unknown="hold", readable="none")
    with pytest.raises(SystemExit):
        await light_lab.do(once.execute("k", light_lab.raising(SystemExit()), operation="pay"))
    once.recovery("pay", probe=light_lab.fn(lambda record: None))
    report = await light_lab.do(once.reconcile())
    assert (report.found, len(report.left)) == (1, 1)


def test_recoveries_of_two_tenants_do_not_replace_each_other() -> None:
    with Semel("memory://", on_unknown="hold", lease=0.05) as once:
        for tenant in ("t1", "t2"):
            with pytest.raises(SystemExit):
                once.execute("k", lambda: (_ for _ in ()).throw(SystemExit()), operation="pay", tenant=tenant)
        once.recovery("pay", probe=lambda record: Found("one"), tenant="t1")
        once.recovery("pay", probe=lambda record: NOT_FOUND, tenant="t2")
        once.reconcile()
        assert once.execute("k", lambda: "ran", operation="pay", tenant="t1").value == "one"

        async def resume(record: Any) -> None: ...

        with pytest.raises(ConfigurationError, match="coroutine function"):
            once.recovery("pay", resume=resume)


def test_a_lease_beyond_all_measure_is_refused_and_a_late_appointment_does_not_end_the_heart() -> None:
    with pytest.raises(ConfigurationError, match="30 days"):
        Semel("memory://", lease=timedelta.max)
    beats = threading.Event()

    async def tick() -> float | None:
        beats.set()
        return None

    ticker = _ThreadTicker(tick)
    ticker.at(time.monotonic() + 1e300)
    ticker.at(time.monotonic())
    assert beats.wait(30)
    ticker.stop()


def test_closing_with_all_the_time_in_the_world_waits_for_what_is_under_way() -> None:
    once, done = Semel("memory://", settle_timeout=math.inf), threading.Event()

    async def work() -> None:
        time.sleep(0.05)
        done.set()

    once._engine().runtime.background(work())
    once.close()
    assert done.is_set()


@pytest.mark.services
@pytest.mark.parametrize(
    ("timeout", "settle_timeout", "most"),
    [
        (
            2,
            3,
            5.5,
        ),  # the first try may take `timeout`, and all tries together settle_timeout: 6 s and more before
        (30, 0.5, 15),  # one try may take longer than all of them together
    ],
)
def test_R16_not_recorded_is_told_when_settle_timeout_is_over(
    timeout: float, settle_timeout: float, most: float
) -> None:
    waited = []
    for _ in range(3):  # a machine that stands still makes it longer, but not each time
        waited.append(_until_not_recorded({"timeout": timeout, "settle_timeout": settle_timeout}))
        if waited[-1] < most:
            return
    pytest.fail(f"{waited}, {most} s at most")


def _until_not_recorded(times: Any) -> float:
    with services.redis() as server, Semel(server.url, lease=1, **times) as once:
        once.execute("warm", int)

        def work() -> float:
            server.pause()
            return time.monotonic()

        with pytest.raises(NotRecorded) as told:
            once.execute("k", work)
        waited = time.monotonic() - float(told.value.value)
        server.resume()
    return waited


@pytest.mark.parametrize(
    "wrong",
    [
        {"fingerprints": []},
        {"table": 5},
        {"index": None},
        {"index": [5]},
        {"encrypt": {"a": "x" * 32}},
        {"encrypt": {5: b"x" * 32}},
        {"wait": 10**400},
        {"settle_timeout": 10**400},
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused_by_its_name(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong)).removesuffix("t")):
        Semel(f"sqlite:///{tmp_path / 'semel.db'}", **wrong)


def test_a_timeout_without_end_is_a_long_one(tmp_path: Path) -> None:
    with Semel(f"sqlite:///{tmp_path / 'semel.db'}", timeout=math.inf) as once:
        assert once.execute("k", int).value == 0


def test_two_classes_of_one_name_are_not_taken_for_each_other() -> None:
    def made() -> type:
        @dataclasses.dataclass
        class Same:
            x: int

        return Same

    one, other = made(), made()
    with Semel("memory://") as once, pytest.raises(CodecError, match="two different classes are named"):
        once.execute("k", int, result_type=one | other)


def test_an_error_in_the_background_is_logged_with_its_text(caplog: pytest.LogCaptureFixture) -> None:
    log_events(ValueError("the disk is full"))
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("ERROR", "ValueError the disk is full")
    ]


@pytest.mark.services
def test_R26_reconcile_offers_lost_settles_again() -> None:
    with services.redis() as server, Semel(server.url, timeout=5, settle_timeout=0.3, lease=30) as once:
        once.execute("warm", int)
        debts: Any = once._engine().debts
        debts._ticker.at = lambda due: None  # the background would do it soon, but it is not asked here
        with pytest.raises(NotRecorded):
            once.execute("k", server.pause)
        server.resume()
        assert once.reconcile().settled == 1
        assert once.execute("k", int).replayed


@pytest.mark.parametrize("readable", ["masked", "none"])
@pytest.mark.parametrize("asked", [False, True])
async def test_R26_a_masked_record_is_probed_where_that_was_said(
    light_lab: Lab, readable: str, asked: bool
) -> None:
    once = light_lab.face(on_unknown="hold", readable=readable)
    with pytest.raises(SystemExit):
        await light_lab.do(once.execute("a-secret-key", light_lab.raising(SystemExit()), operation="pay"))
    once.recovery("pay", probe=light_lab.fn(lambda record: Found("paid")), masked=asked)
    report = await light_lab.do(once.reconcile())
    assert (report.found, report.settled) == (1, int(asked))
    record = await light_lab.do(once.peek("a-secret-key", operation="pay"))
    assert record.state == ("done" if asked else "unknown")


class Registry(list[Any]):
    """Functions that are called together; none is registered yet, so that it is false."""

    def __call__(self) -> str:
        return "called"


async def test_R1_a_function_that_is_false_runs(light_lab: Lab) -> None:
    once, empty = light_lab.face(), Registry()
    assert not empty
    assert (await light_lab.do(once.execute("k", empty))).value == "called"
    assert (await light_lab.do(once.execute("k", empty))).value == "called"
    assert await light_lab.do(once.consume("c", empty)) is True


@pytest.mark.parametrize("verb", ["execute", "consume"])
async def test_R1_no_function_at_all_is_refused_and_nothing_is_recorded(light_lab: Lab, verb: str) -> None:
    once = light_lab.face()
    with pytest.raises(ConfigurationError, match="must be a function, not NoneType"):
        await light_lab.do(getattr(once, verb)("k", None))
    assert await light_lab.do(once.peek("k")) is None


async def test_R1_arguments_without_a_name_and_odd_labels_are_refused_before_the_claim(
    light_lab: Lab,
) -> None:
    once = light_lab.face()
    with pytest.raises(ConfigurationError, match="each by its name"):
        await light_lab.do(once.execute("k", light_lab.effect(), kwargs={1: 2}, on_unknown="hold"))
    odds: list[Any] = ["", 0, []]
    for odd in odds:
        with pytest.raises(ConfigurationError, match="labels must be a mapping"):
            await light_lab.do(once.execute("k", light_lab.effect(), labels=odd))
    assert await light_lab.do(once.peek("k")) is None


def test_R2_a_stop_iteration_of_a_plain_function_reaches_its_caller_and_on_error_as_it_is() -> None:
    asked: list[Exception] = []
    mine = StopIteration("mine")

    def work() -> None:
        raise mine

    def decide(error: Exception) -> str:
        asked.append(error)
        return "replay"

    with Semel("memory://") as once:
        with pytest.raises(StopIteration) as raised:
            once.execute("k", work, on_error=decide)
        assert raised.value is mine
        assert asked == [mine]
        record = once.peek("k")
    assert record is not None
    assert record.error is not None
    assert record.error.type == "StopIteration"


def test_R2_a_stop_iteration_keeps_its_cause_and_is_itself_under_within(tmp_path: Path) -> None:
    file = tmp_path / "semel.db"
    mine, cause = StopIteration("mine"), ValueError("why")
    asked: list[Exception] = []

    def work() -> None:
        raise mine from cause

    def decide(error: Exception) -> str:
        asked.append(error)
        return "replay"

    with Semel(f"sqlite:///{file}") as once:
        once.create()
        connection = sqlite3.connect(file)
        with pytest.raises(StopIteration):
            once.within(connection).execute("k", work, on_error=decide)
        connection.rollback()
        connection.close()
        record = once.peek("k")
    assert asked == [mine]
    assert mine.__cause__ is cause
    assert record is not None
    assert record.error is not None
    assert record.error.type == "StopIteration"
