"""R16: who still holds an outcome that the store has not taken writes it before it claims that key again. Found by hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from semel import (
    AsyncSemel,
    InProgress,
    LeaseLost,
    NotRecorded,
    OutcomeUnknown,
    PreviousFailure,
    Semel,
    StoreUnavailable,
    current_run,
    points,
)
from semel.hooks import LeaseGone
from semel.layers import Layer
from semel.runtime import run_sync
from semel.stores.memory import MemoryStore
from semel.testing import services
from semel.testing.services.server import Server

from .conftest import SCHEMES, Lab
from .tools import enter, lapsed, let_pass, meanwhile, pause, until

START: dict[str, Callable[[], Any]] = {
    "redis": lambda: services.redis(appendonly="always"),
    "postgres": services.postgres,
    "mysql": services.mariadb,
}


class Mortal(Lab):
    """On a server of its own."""

    def __init__(self, colour: str, store: str, server: Any) -> None:
        scheme = SCHEMES.get((store, colour))
        super().__init__(
            colour, server.url if scheme is None else f"{scheme}://{server.url.partition('://')[2]}"
        )
        self.server: Server = server


@pytest.fixture(params=START)
def lab(request: pytest.FixtureRequest, colour: str) -> Iterator[Mortal]:
    with START[request.param]() as server:
        yield Mortal(colour, request.param, server)


@pytest.fixture(autouse=True)
def deaf_again() -> Iterator[None]:
    yield
    points.listen(None)


def _stand_still(once: Any) -> None:
    """Nothing is done in the background: it would be done soon, but it is not asked here."""
    engine = once._engine()
    engine.heart.stop()
    engine.debts._ticker.at = lambda due: None


async def test_R16_an_outcome_that_is_held_here_is_replayed_though_the_store_was_down_for_longer_than_the_lease(
    lab: Mortal,
) -> None:
    once = lab.face(lease=0.5, timeout=1, settle_timeout=0.2)
    await lab.do(once.execute("before", lab.fn(str)))
    _stand_still(once)

    def charge() -> str:
        lab.effects.append("charge")
        lab.server.kill()
        return "charged"

    with pytest.raises(NotRecorded, match="goes on in the background"):
        await lab.do(once.execute("k", lab.fn(charge)))
    await pause(lab, 2.5)  # an offer that is still under way when the server is back would be taken
    lab.server.restart()
    await lapsed(lab, once, "k")
    again = await lab.do(once.execute("k", lab.effect("charged twice"), wait=20))
    assert (again.value, again.replayed, again.attempt) == ("charged", True, 1)
    assert lab.effects == ["charge"]


class Away(Layer):
    """Takes no outcome while it is away, and renews no lease, and answers everything else."""

    away = False
    renews = False
    claims = 0

    def __init__(self) -> None:
        super().__init__(MemoryStore())

    async def claim(self, asks: Any) -> Any:
        self.claims += 1
        return await self.inner.claim(asks)

    async def renew(self, renewals: Any) -> Any:
        if self.away and not self.renews:
            raise StoreUnavailable("away")
        return await self.inner.renew(renewals)

    async def settle(self, ends: Any) -> Any:
        if self.away:
            raise StoreUnavailable("away")
        return await self.inner.settle(ends)


def _face(lab: Lab, store: Any, heard: list[object] | None = None, **settings: Any) -> Any:
    hooks = [] if heard is None else [heard.append]
    once = (Semel if lab.colour == "sync" else AsyncSemel)(store, lease=1, hooks=hooks, **settings)
    lab._faces.append(once)
    return once


def _charges(lab: Lab, store: Away, error: Exception | None = None) -> Any:
    def charge() -> str:
        lab.effects.append("charge")
        store.away = True
        if error is not None:
            raise error
        return "charged"

    return lab.fn(charge)


async def _owing(lab: Lab, store: Away, **settings: Any) -> Any:
    """A face that holds the outcome of k, when its lease is over."""
    once = _face(lab, store, settle_timeout=0.05, **settings)
    _stand_still(once)
    with pytest.raises(NotRecorded):
        await lab.do(once.execute("k", _charges(lab, store)))
    let_pass(once, 5)
    return once


async def _execute(lab: Lab, once: Any, **options: Any) -> Any:
    return (await lab.do(once.execute("k", lab.effect("twice"), wait=20, **options))).value


async def _consume(lab: Lab, once: Any) -> Any:
    ran = await lab.do(once.consume("k", lab.effect("twice"), wait=20))
    return "twice" if ran else "charged"


async def _claim(lab: Lab, once: Any, **options: Any) -> Any:
    claim = await enter(lab, once.claim("k", **options))
    return claim.value if claim.replayed else "twice"


async def _look(lab: Lab, once: Any) -> Any:
    return await _claim(lab, once, verdicts=True)


@pytest.mark.parametrize("ask", [_execute, _consume, _claim, _look])
async def test_R16_nothing_claims_a_key_whose_outcome_is_held_here_before_that_is_written(
    light_lab: Lab, ask: Any
) -> None:
    store = Away()
    once = await _owing(light_lab, store)
    before = store.claims
    with pytest.raises(StoreUnavailable, match="has ended here, and the store has not taken its outcome yet"):
        await ask(light_lab, once)
    assert store.claims == before
    with pytest.raises(NotRecorded):
        await light_lab.do(once.execute("another", light_lab.effect()))  # of other keys nothing is held up
    store.away = False
    assert await ask(light_lab, once) == "charged"
    assert light_lab.effects == ["charge", ()]
    unwritten = once._engine().debts.unwritten.values()
    assert [debt.end.scope.key for debts in unwritten for debt in debts] == ["another"]


async def test_R16_a_key_whose_outcome_is_held_here_is_busy_as_long_as_its_lease_is_renewed(
    light_lab: Lab,
) -> None:
    store = Away()
    once = await _owing(light_lab, store)
    store.renews = True
    with pytest.raises(InProgress):
        await light_lab.do(once.execute("k", light_lab.effect("twice")))
    waiting = meanwhile(light_lab, 0, lambda: _execute(light_lab, once))
    await until(light_lab, lambda: once._engine().bench._waiting)
    store.away = False
    assert (await waiting(), light_lab.effects) == ("charged", ["charge"])


async def test_R16_nor_does_one_who_waits_for_it(light_lab: Lab) -> None:
    """He sat down before its owner ended, and asks again when the lease is over."""
    store, waits, parked = Away(), list[Any](), list[str]()
    once = _face(light_lab, store, settle_timeout=0.05)
    _stand_still(once)
    points.listen(lambda name: parked.append(name) if name == "wait.parked" else None)

    async def charge() -> Any:
        waits.append(meanwhile(light_lab, 0, lambda: _execute(light_lab, once, poll=(5, 5))))
        await until(light_lab, lambda: parked)
        return await light_lab.do(_charges(light_lab, store)())

    with pytest.raises(NotRecorded):
        await light_lab.do(
            once.execute("k", charge if light_lab.colour == "async" else lambda: run_sync(charge()))
        )
    store.away = False
    assert await waits[0]() == "charged"
    assert light_lab.effects == ["charge"]


async def test_R16_nor_while_its_owner_still_offers_it(light_lab: Lab) -> None:
    store, heard = Away(), list[object]()
    once = _face(light_lab, store, heard, settle_timeout=30)
    _stand_still(once)
    owner = meanwhile(light_lab, 0, lambda: once.execute("k", _charges(light_lab, store)))
    await until(light_lab, lambda: bool(once._engine().debts.unwritten))
    let_pass(once, 5)
    with pytest.raises(StoreUnavailable, match="has ended here"):
        await _execute(light_lab, once)
    store.away = False
    assert await _execute(light_lab, once) == "charged"
    assert ((await owner()).value, light_lab.effects) == ("charged", ["charge"])
    assert not once._engine().debts.unwritten
    assert not any(isinstance(event, LeaseGone) for event in heard)


async def test_R16_a_release_that_is_held_here_is_written_first_and_its_owner_has_lost_nothing(
    light_lab: Lab,
) -> None:
    store, heard = Away(), list[object]()
    once = _face(light_lab, store, heard, settle_timeout=30)
    _stand_still(once)
    owner = meanwhile(
        light_lab, 0, lambda: once.execute("k", _charges(light_lab, store, ValueError("no money")))
    )
    await until(light_lab, lambda: bool(once._engine().debts.unwritten))
    let_pass(once, 5)
    store.away = False
    again = await light_lab.do(once.execute("k", light_lab.effect("again")))
    assert (again.value, len(light_lab.effects)) == ("again", 2)
    with pytest.raises(ValueError, match="no money") as caught:
        await owner()
    assert not hasattr(caught.value, "__notes__")
    assert not any(isinstance(event, LeaseGone) for event in heard)


async def test_R16_of_many_callers_at_once_all_are_given_the_outcome_that_was_held(light_lab: Lab) -> None:
    store = Away()
    once = await _owing(light_lab, store)
    store.away = False
    callers = [meanwhile(light_lab, 0, lambda: _execute(light_lab, once)) for _ in range(8)]
    assert [await caller() for caller in callers] == ["charged"] * 8
    assert light_lab.effects == ["charge"]


async def test_R17_what_is_held_here_of_a_key_that_another_one_has_taken_over_is_refused_and_told_once(
    light_lab: Lab,
) -> None:
    store, heard = Away(), list[object]()
    once = _face(light_lab, store, heard, settle_timeout=30)
    other = _face(light_lab, store)
    _stand_still(once)
    owner = meanwhile(light_lab, 0, lambda: once.execute("k", _charges(light_lab, store)))
    await until(light_lab, lambda: bool(once._engine().debts.unwritten))
    let_pass(once, 5)
    claim = await enter(light_lab, other.claim("k"))
    store.away = False
    await light_lab.do(claim.complete("theirs"))
    assert await _execute(light_lab, once) == "theirs"
    with pytest.raises(LeaseLost, match="was taken over by another owner"):
        await owner()
    assert len([event for event in heard if isinstance(event, LeaseGone)]) == 1


@pytest.mark.parametrize("last", ["owner", "zombie"])
async def test_R16_the_owner_counts_of_two_whose_outcomes_of_one_key_are_held_here(
    light_lab: Lab, last: str
) -> None:
    """The one that was overtaken, and the one that has overtaken it."""
    store, ends = Away(), {"zombie": threading.Event(), "owner": threading.Event()}
    once = _face(light_lab, store, settle_timeout=0.05)
    _stand_still(once)

    def running(name: str) -> Any:
        async def work() -> str:
            light_lab.effects.append(name)
            await until(light_lab, ends[name].is_set)
            return name

        fn = work if light_lab.colour == "async" else lambda: run_sync(work())
        return meanwhile(light_lab, 0, lambda: once.execute("k", fn))

    zombie = running("zombie")
    await until(light_lab, lambda: light_lab.effects == ["zombie"])
    let_pass(once, 5)
    await pause(light_lab, 1.1)  # who runs a key here is believed by this process's own clock
    runs = {"zombie": zombie, "owner": running("owner")}
    await until(light_lab, lambda: light_lab.effects == ["zombie", "owner"])
    store.away = True
    for name in sorted(runs, key=lambda name: name == last):
        ends[name].set()
        with pytest.raises(NotRecorded):
            await runs[name]()
    let_pass(once, 5)
    store.away = False
    assert await _execute(light_lab, once) == "owner"
    assert light_lab.effects == ["zombie", "owner"]
    assert not once._engine().debts.unwritten


class Silent(Layer):
    """Answers no settle in time while it is silent, and renewals or not, as it is told."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.silent = self.renews = False
        self.settles = 0
        self.asked = asyncio.Event()

    async def settle(self, ends: Any) -> Any:
        self.settles += 1
        if self.silent:
            self.asked.set()
            await asyncio.sleep(0.3)
            raise StoreUnavailable("no answer in time")
        return await self.inner.settle(ends)

    async def renew(self, renewals: Any) -> Any:
        if self.silent and not self.renews:
            raise StoreUnavailable("no answer in time")
        return await self.inner.renew(renewals)


def _large(store: Silent) -> Callable[[], Any]:
    """A function whose result is large, and whose store answers renewals only when it has ended."""

    async def work() -> str:
        store.silent = store.renews = True
        return "x" * 200_000

    return work


def test_R16_a_large_outcome_is_kept_though_many_ask_for_its_key_in_one_slow_moment() -> None:
    store = Silent()
    work = _large(store)

    async def main() -> None:
        async with AsyncSemel(store, lease=30, timeout=0.3, settle_timeout=0.05) as once:
            _stand_still(once)
            with pytest.raises(NotRecorded):
                await once.execute("k", work)
            store.settles = 0
            asking = [once.execute("k", work) for _ in range(20)]
            for answer in await asyncio.gather(*asking, return_exceptions=True):
                assert isinstance(answer, InProgress | StoreUnavailable)
            assert store.settles <= 3
            store.silent = False
            again = await once.execute("k", work)
            assert again.replayed
            assert len(again.value) == 200_000

    asyncio.run(main())


@pytest.mark.parametrize("ending", ["returns", "replay", "hold"])
@pytest.mark.parametrize(
    ("lease", "at_risk", "since"), [(0.3, False, 0.0), (30, True, 0.0), (30, False, 29.7)]
)
def test_R16_an_outcome_whose_first_answer_is_still_awaited_is_held_too(
    lease: float, at_risk: bool, since: float, ending: Any
) -> None:
    """Where the lease may be over before that answer comes: `since` its last renewal was answered."""
    store, ran = Silent(), list[str]()

    async def work() -> str:
        ran.append("charge")
        store.silent = True
        run = current_run()
        if at_risk:
            run._engine.heart._heard(run, StoreUnavailable("no answer in time"))
        run.due -= since
        if ending != "returns":
            raise ValueError("declined")
        return "charged"

    async def main() -> None:
        async with AsyncSemel(store, lease=lease, timeout=0.3, settle_timeout=5, coalesce=False) as once:
            on_error: Any = "release" if ending == "returns" else ending
            owner = asyncio.create_task(once.execute("k", work, on_error=on_error))
            await store.asked.wait()
            _stand_still(once)
            let_pass(once, 60)  # its lease is over
            store.silent = False
            told = await asyncio.gather(once.execute("k", work, wait=5), owner, return_exceptions=True)
            if ending == "returns":
                assert [outcome.value for outcome in told if not isinstance(outcome, BaseException)] == [
                    "charged"
                ] * 2
            else:
                assert isinstance(told[0], PreviousFailure if ending == "replay" else OutcomeUnknown)
                assert isinstance(told[1], ValueError)
            assert ran == ["charge"]
            assert not once._engine().debts.unwritten

    asyncio.run(main())


def test_R16_offers_of_a_large_outcome_that_are_under_way_together_say_once_that_it_is_too_large() -> None:
    store = Silent()
    work = _large(store)

    async def main() -> None:
        async with AsyncSemel(store, lease=30, timeout=0.3, settle_timeout=0.05) as once:
            _stand_still(once)
            with pytest.raises(NotRecorded):
                await once.execute("k", work)
            debts = once._engine().debts
            (debt,) = next(iter(debts.unwritten.values()))
            before = debt.strikes
            await asyncio.gather(*(debts._pay_batch([debt]) for _ in range(5)))
            assert debt.strikes == before + 1
            store.silent = False

    asyncio.run(main())


def test_R16_of_several_outcomes_of_a_key_the_last_attempts_is_offered_first() -> None:
    class Store(Layer):
        def __init__(self) -> None:
            super().__init__(MemoryStore())

    async def main() -> None:
        async with AsyncSemel(Store()) as once:
            debts = once._engine().debts
            for attempt in (2, 0, 3, 1):
                run = SimpleNamespace(scope=SimpleNamespace(hash=b"k"), attempt=attempt)
                end = SimpleNamespace(nonce=bytes([attempt]), scope=run.scope)
                debts.hold(run, end)  # type: ignore[arg-type]  # as far as it looks at them
            held = debts.unwritten[b"k"]
            assert [debt.end.nonce[0] for debt in held] == [3, 2, 1, 0]
            again = debts.hold(held[1].run, held[1].end)  # type: ignore[arg-type]
            assert debts.unwritten[b"k"] == [held[0], again, held[2], held[3]]
            for debt in (held[3], again, held[0], held[2]):
                debts.strike_out(debt)
            assert not debts.unwritten

    asyncio.run(main())
