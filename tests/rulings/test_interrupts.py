"""A signal's handler raises wherever Python looks for signals, one moment of a call after the other (R10, R16).

What was granted and not begun is given back at once; what the function returned is recorded all the same; nobody waits for a
lease, and closing waits for nobody.
"""

from __future__ import annotations

import _thread
import gc
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from semel import InProgress, Semel, StoreUnavailable, current_run
from semel.layers import Layer
from semel.model import Answer, Settle
from semel.stores.memory import MemoryStore
from tests.ops.strike_lab import Late, own_modules, strike_each_moment

from .conftest import url_of

LEASE, PATIENCE, PROMPT = 120.0, 60.0, 20.0  # a key that is left behind is waited for in vain

# A coroutine that was made, and struck before it was awaited, is Python's business; so is a connection, which it closes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


class Lab:
    """One key after the other on one face; what each of them did."""

    def __init__(self, url: str) -> None:
        self.prefix = f"interrupts-{time.time_ns()}"
        self.once = Semel(url, prefix=self.prefix, lease=LEASE, timeout=PROMPT, settle_timeout=PATIENCE)
        self.effects: Counter[str] = Counter()
        self.number = 0
        self.struck: list[str] = []
        self.made_twice: set[str] = set()
        self.once.execute("warm", str)
        self.modules = own_modules()

    @property
    def key(self) -> str:
        return f"key {self.number}"

    def effect(self) -> str:
        self.effects[self.key] += 1
        return self.key

    def execute(self) -> None:
        assert self.once.execute(self.key, self.effect, wait=PATIENCE).value == self.key

    def claim(self) -> None:
        with self.once.claim(self.key, wait=PATIENCE) as claim:
            claim.complete(self.effect())

    def once_and_at_once(self) -> None:
        """Whoever comes next is told, or runs it, without waiting for a lease."""
        self.execute()
        assert self.effects[self.key] == 1
        self.number += 1

    def execute_steps(self) -> None:
        def work() -> str:
            run = current_run()
            run.step("one", self.effect)
            run.new_id("ord")
            return self.key

        assert self.once.execute(self.key, work, wait=PATIENCE).value == self.key

    def steps_at_once(self) -> None:
        """The function is made again (R10), a step only where its value was not in hand yet."""
        self.execute_steps()
        if self.effects[self.key] > 1:
            self.made_twice.add(self.struck[-1])
        assert self.effects[self.key] <= 2
        self.number += 1

    def wait_in_vain(self) -> None:
        with suppress(InProgress):
            self.once.execute("held", self.effect, wait=0.002)

    def nobody_waits(self) -> None:
        engine = self.once._engine()
        assert not engine.bench._waiting
        assert not engine.heart.expected

    def fail(self) -> None:
        def work() -> None:
            raise KeyError

        with suppress(KeyError):
            self.once.execute(self.key, work)

    def at_once(self) -> None:
        """The same for a block: interrupted before complete() could begin, its outcome is lost, and made again (R10)."""
        self.execute()
        assert self.effects[self.key] <= 2
        self.number += 1

    def close(self) -> None:
        begun = time.perf_counter()
        self.once.close()
        assert time.perf_counter() - begun < PROMPT, "somebody was waited for who will never come"


@pytest.fixture(params=["memory", "sqlite", "redis", "postgres", "mysql"])
def calls(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lab]:
    made = Lab(url_of(request, request.param, "sync", tmp_path))
    gc.collect()
    gc.disable()  # what is collected in the middle may be struck as well, and nobody would know
    yield made
    gc.enable()
    made.once.close()


def test_R16_an_interrupt_at_any_moment_of_a_call_leaves_its_key_to_the_next_one_and_one_effect(
    calls: Lab,
) -> None:
    assert strike_each_moment(calls.modules, calls.execute, then=calls.once_and_at_once) > 60
    calls.close()


@pytest.mark.parametrize("calls", ["memory", "redis"], indirect=True)
def test_R10_an_interrupt_at_any_moment_of_a_block_leaves_its_key_to_the_next_one(calls: Lab) -> None:
    assert strike_each_moment(calls.modules, calls.claim, then=calls.at_once) > 60
    calls.close()


@pytest.mark.parametrize("calls", ["memory"], indirect=True)
def test_R10_an_interrupt_at_any_moment_of_a_step_leaves_its_key_to_the_next_one(calls: Lab) -> None:
    act, then = calls.execute_steps, calls.steps_at_once
    assert strike_each_moment(calls.modules, act, then=then, places=calls.struck) > 150
    assert len(calls.made_twice) <= 4, (
        "what a step has returned is remembered, but for the moments in which nobody has it"
    )
    calls.close()


@pytest.mark.parametrize("calls", ["memory"], indirect=True)
def test_R16_an_interrupt_at_any_moment_of_waiting_leaves_no_seat_taken_and_no_claim_expected(
    calls: Lab,
) -> None:
    with Semel(calls.once._store, prefix=calls.prefix, lease=LEASE) as other, other.claim("held") as held:
        assert strike_each_moment(calls.modules, calls.wait_in_vain, then=calls.nobody_waits) > 150
        held.complete()
    calls.close()


def test_a_handler_may_close_a_face_that_the_main_thread_is_closing() -> None:
    once = Semel("memory://", settle_timeout=1.0)
    claim = once.claim("k")
    claim.__enter__()  # whoever closes waits for it

    def ring(*_: object) -> None:
        once.close()
        closed.append(True)

    closed: list[bool] = []
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        once.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert closed == [True]
    claim.complete()
    claim.__exit__(None, None, None)


@pytest.mark.parametrize("calls", ["memory"], indirect=True)
def test_R9_an_interrupt_at_any_moment_of_a_failure_leaves_its_key_to_the_next_one(calls: Lab) -> None:
    assert strike_each_moment(calls.modules, calls.fail, then=calls.at_once) > 100
    calls.close()


@pytest.mark.parametrize("calls", ["memory", "sqlite", "redis"], indirect=True)
def test_R16_a_time_limit_at_any_moment_of_a_call_leaves_its_key_to_the_next_one_and_one_effect(
    calls: Lab,
) -> None:
    assert strike_each_moment(calls.modules, calls.execute, then=calls.once_and_at_once, error=Late) > 60
    calls.close()


@pytest.mark.parametrize("calls", ["memory"], indirect=True)
def test_R23_a_time_limit_while_a_result_is_written_or_read_makes_it_neither_unfit_nor_unreadable(
    calls: Lab,
) -> None:
    value = {"at": datetime(2026, 1, 1, tzinfo=UTC), "what": [Decimal(1), uuid.UUID(int=7)]}
    codecs = [module for module in calls.modules if module.__name__.startswith("semel.codec")]
    once, known = calls.once, calls.once.execute("known", lambda: value).value

    def first() -> None:
        once.execute(calls.key, lambda: value)

    def is_kept() -> None:
        assert once.execute(calls.key, lambda: value).value == known
        calls.number += 1

    def replayed() -> None:
        assert once.execute("known", lambda: value).value == known

    assert strike_each_moment(codecs, first, then=is_kept, error=Late) > 20
    assert strike_each_moment(codecs, replayed, then=replayed, error=Late) > 10
    once.execute("squeezed", lambda: [value] * 3, compress_over=10)
    squeezed = lambda: once.execute("squeezed", lambda: value)  # noqa: E731 - as the others
    assert strike_each_moment(codecs, squeezed, then=squeezed, error=Late) > 10


class Away(Layer):
    """A store that takes no outcome for a while."""

    away = True

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        if self.away:
            raise StoreUnavailable("away")
        return await self.inner.settle(ends)


def test_R16_an_outcome_that_waits_for_its_store_is_written_on_though_its_caller_was_interrupted() -> None:
    store = Away(MemoryStore())
    effects: list[int] = []
    with Semel(store, lease=0.5, settle_timeout=PATIENCE) as once:
        timer = threading.Timer(0.3, _thread.interrupt_main)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            once.execute("k", effects.append, 1)
        timer.join()
        time.sleep(1.0)  # its lease is renewed meanwhile
        store.away = False
        assert once.execute("k", effects.append, 2, wait=PATIENCE).replayed
    assert effects == [1]
