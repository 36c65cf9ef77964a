"""What is kept and looked after: lists in pages, resolutions that come too late, records that nobody can read, reconciles."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from semel import (
    NOT_FOUND,
    AsyncSemel,
    ConfigurationError,
    Found,
    InProgress,
    OutcomeUnknown,
    Semel,
    StoreUnavailable,
    keeping,
    reconciling,
)
from semel.hooks import Unreconciled, log_events
from semel.layers.layer import Layer
from semel.model import Answer, Settle
from semel.stores.memory import MemoryStore


def nothing():  # type: ignore[no-untyped-def]  # without a type every result may be replayed
    """Never run."""


def lost() -> None:
    raise SystemExit


def lose(once: Semel, *keys: str, **options: Any) -> None:
    for key in keys:
        with pytest.raises(SystemExit):
            once.execute(key, lost, **options)


def test_a_list_is_read_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "_PAGE", 2)
    with Semel("memory://", on_unknown="hold") as once:
        lose(once, *"abcde")
        assert sorted(record.scope.key for record in once.find() if record.scope) == list("abcde")
        assert len(once.find(limit=3)) == 3


class Between(Layer):
    """Something happens between a look and a settle."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.act: Callable[[], object] = bool
        self.answer: Exception | None = None

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        act, self.act = self.act, bool
        act()
        return [self.answer] * len(ends) if self.answer else await super().settle(ends)


def test_R13_of_two_who_resolve_a_key_at_once_one_is_refused() -> None:
    store = Between()
    with Semel(store, on_unknown="hold") as once:
        lose(once, "k")
        store.act = lambda: once.resolve("k", value="first", actor="quick")
        with pytest.raises(ConfigurationError, match="in the meantime"):
            once.resolve("k", value="second", actor="slow")
        assert once.execute("k", nothing).value == "first"


def test_a_store_that_refuses_a_word_says_so() -> None:
    store = Between()
    with Semel(store, on_unknown="hold") as once:
        lose(once, "k")
        store.answer = StoreUnavailable("gone")
        with pytest.raises(StoreUnavailable, match="gone"):
            once.resolve("k", value=1)
        with pytest.raises(StoreUnavailable, match="gone"):
            once.forget("k")
        store.answer = None
        assert once.forget("k")


def test_R15_what_nobody_can_read_is_resolved_or_forgotten() -> None:
    store = MemoryStore()
    with (
        Semel(store, encrypt={"a": os.urandom(32)}) as first,
        Semel(store, encrypt={"b": os.urandom(32)}) as second,
    ):
        for key in ("resolved", "forgotten"):
            first.execute(key, lambda: "sealed")
            with pytest.raises(OutcomeUnknown):
                second.execute(key, int)
        second.resolve("resolved", value="looked up", actor="me")
        assert second.execute("resolved", nothing).value == "looked up"
        assert second.forget("forgotten")
        assert second.execute("forgotten", lambda: "again").value == "again"


class Old(msgspec.Struct):
    amount: int


class New(msgspec.Struct):
    amount: int


def test_R15_a_result_of_a_class_that_is_no_more_is_repaired_by_who_names_the_new_one() -> None:
    with Semel("memory://") as once:
        once.execute("k", Old, 5, result_type=Old)
        with pytest.raises(ConfigurationError, match="it is done"):
            once.resolve("k", value=5)  # whoever names no class sees that it can be read
        with pytest.raises(OutcomeUnknown):
            once.execute("k", New, 6, result_type=New)
        once.resolve("k", value=New(5), result_type=New)
        assert once.execute("k", New, 6, result_type=New).value == New(5)


def test_R7_a_purge_takes_no_more_than_it_is_told() -> None:
    now = [1_000.0]
    with Semel(MemoryStore(clock=lambda: now[0]), retention=1) as once:
        for number in range(7):
            once.execute(f"k{number}", int)
        now[0] += 10
        assert once.purge(limit=0) == 0
        assert once.purge(limit=4, batch=2) == 4
        assert once.purge(batch=2) == 3


def test_a_purge_in_the_background_that_fails_is_told_and_tried_again() -> None:
    class Failing(Layer):
        purged = 0

        async def purge(self, limit: int) -> int:
            self.purged += 1
            if self.purged == 1:
                raise StoreUnavailable("not now")
            again.set()
            return await super().purge(limit)

    told, again = list[Any](), threading.Event()
    with Semel(Failing(MemoryStore()), purge_every=0.01, hooks=[told.append]) as once:
        once.execute("k", int)
        assert again.wait(30)
    assert [str(each) for each in told if isinstance(each, StoreUnavailable)] == ["not now"]


# ------------------------------------------------------------------------------------------------ reconcile
def test_R26_reconcile_goes_through_all_pages_and_stops_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciling, "_PAGE", 2)
    with Semel("memory://", on_unknown="hold") as once:
        lose(once, *"abcde", operation="pay")
        once.recovery("pay", probe=lambda record: Found("paid"))
        assert once.reconcile(limit=3).settled == 3
        assert once.reconcile().settled == 2
        assert once.reconcile().found == 0


def test_R26_a_reconcile_looks_at_no_more_than_a_hundred_times_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconciling, "_PAGE", 2)
    monkeypatch.setattr(reconciling, "_PATIENCE", 2)
    with Semel("memory://", on_unknown="hold") as once:
        lose(once, *"abcde")  # nothing is registered for them
        report = once.reconcile(limit=1)
        assert (report.found, len(report.left)) == (2, 1)


def test_R26_one_operation_that_fails_does_not_stop_the_others() -> None:
    told: list[Any] = []

    def broken(record: Any) -> None:
        raise ZeroDivisionError

    def busy(record: Any) -> None:
        raise InProgress("another one is at it")

    with Semel("memory://", on_unknown="hold", hooks=[told.append]) as once:
        for operation, probe in (("one", broken), ("two", busy), ("three", lambda record: Found("there"))):
            lose(once, "k", operation=operation)
            once.recovery(operation, probe=probe)
        report = once.reconcile()
        assert (report.found, report.failed, report.settled, report.left) == (3, 1, 1, ("k",))
        assert [(key, type(error)) for key, error in report.failures] == [
            ("k", ZeroDivisionError),
            ("k", InProgress),
        ]
    events = [each for each in told if isinstance(each, Unreconciled)]
    assert [(each.scope.operation, each.error) for each in events] == [
        ("one", report.failures[0][1]),
        ("two", report.failures[1][1]),
    ]


@pytest.mark.parametrize(
    ("probe", "says"),
    [(lambda record: True, "a probe answers Found"), (lambda: NOT_FOUND, "takes 0 positional arguments")],
    ids=["answer", "arguments"],
)
def test_R26_a_reconcile_tells_why_a_probe_did_not_settle(
    probe: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Semel("memory://", on_unknown="hold", hooks=[log_events]) as once:
        lose(once, "k", operation="pay")
        once.recovery("pay", probe=probe)
        with caplog.at_level(logging.WARNING, "semel"):
            report = once.reconcile()
        assert (report.failed, report.left) == (1, ())
        ((key, error),) = report.failures
        assert key == "k"
        assert says in str(error)
        assert once.peek("k", operation="pay").state == "unknown"  # type: ignore[union-attr]  # it is there
    (line,) = [each for each in caplog.records if "Unreconciled" in each.getMessage()]
    assert (line.levelname, line.semel_operation) == ("WARNING", "pay")  # type: ignore[attr-defined]  # an extra


def test_R26_what_is_wrong_with_the_store_reaches_whoever_reconciles() -> None:
    store = Between()
    with Semel(store, on_unknown="hold") as once:
        lose(once, "k", operation="pay")
        once.recovery("pay", probe=lambda record: Found("paid"))
        store.answer = StoreUnavailable("gone")
        with pytest.raises(StoreUnavailable):
            once.reconcile()

        def its_own(record: Any) -> Found:
            raise StoreUnavailable("of another store, which the probe asks")

        once.recovery("pay", probe=its_own)
        report = once.reconcile()
        assert (report.left, type(report.failures[0][1])) == (("k",), StoreUnavailable)


def test_R26_a_recovery_that_can_do_nothing_is_refused_at_once() -> None:
    def generator(record: Any) -> Iterator[int]:
        yield 1

    with Semel("memory://") as once:
        with pytest.raises(ConfigurationError, match=r"recovery\('pay'\) says nothing: give it probe=…"):
            once.recovery("pay")
        wrong: Any
        for name, wrong in (("probe", 5), ("resume", "run"), ("resume", generator)):
            with pytest.raises(ConfigurationError, match=r"must be a function|generator function"):
                once.recovery("pay", **{name: wrong})


def test_R26_probes_of_either_colour_are_heard() -> None:
    async def main() -> None:
        async with AsyncSemel("memory://", on_unknown="hold", lease=0.05) as once:
            for key in ("a", "b"):
                with pytest.raises(SystemExit):
                    await once.execute(key, _exits, operation=key)

            async def coroutine(record: Any) -> Found:
                return Found({"by": "coroutine"})

            once.recovery("a", probe=coroutine)
            once.recovery("b", probe=lambda record: coroutine(record))
            report = await once.reconcile()
            assert (report.settled, report.failures) == (2, ())

    asyncio.run(main())


async def _exits() -> None:
    raise SystemExit


def test_R26_what_a_probe_does_not_find_is_free_again_unless_it_is_held() -> None:
    with Semel("memory://") as once:
        lose(once, "probed", operation="pay", on_unknown=lambda: NOT_FOUND)
        lose(once, "held", operation="pay", on_unknown="hold")
        once.recovery("pay", probe=lambda record: NOT_FOUND)
        report = once.reconcile()
        assert (report.settled, report.left) == (1, ("held",))
        assert once.execute("probed", lambda: "ran", operation="pay").value == "ran"
        with pytest.raises(OutcomeUnknown):
            once.execute("held", int, operation="pay")


async def _later(answer: Any) -> Any:
    return answer


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("how", ["probe", "resume"])
@pytest.mark.parametrize(
    ("answer", "what"),
    [(lambda record: _later(Found(1)), "coroutine"), (lambda record: (each for each in "ab"), "generator")],
    ids=["coroutine", "generator"],
)
def test_R26_a_function_that_promises_in_place_of_answering_does_not_stop_the_others(
    how: str, answer: Any, what: str
) -> None:
    store = MemoryStore()
    with Semel(store) as once, Semel(store, lease=0.05) as dead:
        good: Any = (lambda record: Found("there")) if how == "probe" else (lambda record: "there")
        for operation, fn in (("a", good), ("b", answer), ("c", good)):
            dead.claim("k", operation=operation).__enter__()
            once.recovery(operation, **{how: fn})
        dead._engine().stop()
        time.sleep(0.1)
        report = once.reconcile()
        assert (report.found, report.settled + report.resumed, report.failed) == (3, 2, 1)
        ((key, error),) = report.failures
        assert key == "k"
        assert isinstance(error, ConfigurationError)
        assert f"the function returned a {what}, and nothing of that has run" in str(error)


def test_R26_async_code_awaits_what_a_plain_probe_gives_and_refuses_what_that_promises() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def main() -> None:
        async with AsyncSemel("memory://", on_unknown="hold") as once:
            for operation in "ab":
                with pytest.raises(asyncio.CancelledError):
                    await once.execute("k", cancelled, operation=operation)
            once.recovery("a", probe=lambda record: _later(_later(Found(1))))
            once.recovery("b", probe=lambda record: _later(Found(1)))
            report = await once.reconcile()
            assert (report.settled, report.failed) == (1, 1)

    asyncio.run(main())


def test_R26_a_store_that_goes_away_ends_a_reconcile_which_tells_what_it_has_done() -> None:
    store, asked = Between(), list[Any]()

    def probe(record: Any) -> Found:
        asked.append(record)
        if len(asked) == 2:
            store.answer = StoreUnavailable("gone")
        return Found("paid")

    with Semel(store, on_unknown="hold") as once:
        lose(once, "a", "b", "c", operation="pay")
        once.recovery("pay", probe=probe)
        report = once.reconcile()
        store.answer = None
        assert (report.settled, len(asked)) == (1, 2)
        ((key, error),) = report.failures
        assert (key, type(error)) == (asked[1].scope.key, StoreUnavailable)
        assert once.reconcile().settled == 2


def test_R26_what_is_wrong_with_the_set_up_is_raised_whatever_was_settled() -> None:
    store, asked = Between(), list[Any]()

    def probe(record: Any) -> Found:
        asked.append(record)
        if len(asked) == 2:
            store.answer = ConfigurationError("no tables")
        return Found("paid")

    with Semel(store, on_unknown="hold") as once:
        lose(once, "a", "b", operation="pay")
        once.recovery("pay", probe=probe)
        with pytest.raises(ConfigurationError, match="no tables"):
            once.reconcile()


def test_R13_of_two_who_correct_a_value_at_once_one_is_told() -> None:
    store = Between()
    with Semel(store, on_unknown="hold") as once:
        lose(once, "k")
        once.resolve("k", value=1, actor="ann")
        store.act = lambda: once.resolve("k", value=2, actor="bob", correct=True)
        with pytest.raises(ConfigurationError, match="it changed, or was resolved, in the meantime"):
            once.resolve("k", value=3, actor="ann", correct=True)
        assert once.execute("k", nothing).value == 2
