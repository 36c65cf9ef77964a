"""R31: layers."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from semel import AsyncSemel, InProgress, KeyMismatch, OutcomeUnknown, Semel
from semel.calls import nothing_to_run
from semel.hooks import Contended
from semel.layers import Layer
from semel.layers.cache import Cache
from semel.layers.encrypt import Encrypt, Ring
from semel.model import Ask, Verdict
from semel.runtime import run_sync
from semel.stores.memory import MemoryStore

from .conftest import Lab
from .test_failure import _over
from .tools import meanwhile, owned, until

KEY_A, KEY_B = {"2026-a": b"a" * 32}, {"2026-b": b"b" * 32, "2026-a": b"a" * 32}


class Counting(Layer):
    """Counts what reaches the store."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        self.calls["claim"] += len(asks)
        return await self.inner.claim(asks)


def test_R31_64_callers_of_one_key_in_one_loop_cost_at_most_2_claims() -> None:
    async def main() -> None:
        class Remote(Counting):
            """A store that takes a moment, as every server does."""

            async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
                await asyncio.sleep(0.001)
                return await super().claim(asks)

        store = Remote(MemoryStore())
        once = AsyncSemel(store, timeout=30)  # a follower who is out of patience asks for itself
        ran = []

        async def work() -> str:
            ran.append(1)
            await asyncio.sleep(0.05)
            return "x"

        outcomes = await asyncio.gather(*(once.execute("k", work, wait=60) for _ in range(64)))
        assert [outcome.value for outcome in outcomes] == ["x"] * 64
        assert (len(ran), sum(outcome.replayed for outcome in outcomes)) == (1, 63)
        assert store.calls["claim"] <= 2
        store.calls.clear()
        await asyncio.gather(*(once.execute("k", work) for _ in range(64)))
        assert store.calls["claim"] <= 2  # replays asked for at the same time share one claim too
        layer: Any = once._engine().store
        assert layer._flights == {}
        await once.aclose()

    asyncio.run(main())


def test_R31_64_threads_of_one_key_run_once() -> None:
    store, heard = Counting(MemoryStore()), list[Any]()
    once = Semel(store, hooks=[heard.append], timeout=30)
    ran, values = [], []
    gate = threading.Barrier(64)

    def work() -> str:
        ran.append(1)
        # Until the other 63 wait: who comes later than the outcome asks for itself.
        run_sync(until(Lab("sync", ""), lambda: sum(isinstance(event, Contended) for event in heard) == 63))
        return "x"

    def caller() -> None:
        gate.wait()
        values.append(once.execute("k", work, wait=60).value)

    threads = [threading.Thread(target=caller) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (values, len(ran)) == (["x"] * 64, 1)
    assert store.calls["claim"] <= 4
    once.close()


async def test_R31_followers_keep_their_own_fingerprint_wait_and_policy(light_lab: Lab) -> None:
    once = light_lab.face()
    async with owned(light_lab, once, "k", request=1) as claim:
        with pytest.raises(InProgress):
            await light_lab.do(once.execute("k", light_lab.effect(), request=1))
        with pytest.raises(KeyMismatch):
            await light_lab.do(once.execute("k", light_lab.effect(), request=2, wait=5))
        with pytest.raises(InProgress):
            await light_lab.do(once.execute("k", light_lab.effect(), wait=0.05))
        await light_lab.do(claim.complete("x"))
    assert (await light_lab.do(once.execute("k", light_lab.effect(), request=1))).value == "x"


def test_R31_a_cancelled_leader_promotes_a_follower() -> None:
    async def main() -> None:
        once = AsyncSemel(MemoryStore())
        started = asyncio.Event()

        async def slow() -> str:
            started.set()
            await asyncio.sleep(30)
            return "never"

        async def quick() -> str:
            return "promoted"

        leader = asyncio.create_task(once.execute("k", slow))
        await started.wait()
        followers = [asyncio.create_task(once.execute("k", quick, wait=10)) for _ in range(8)]
        await asyncio.sleep(0.05)
        leader.cancel()
        outcomes = await asyncio.gather(*followers)
        assert [outcome.value for outcome in outcomes] == ["promoted"] * 8
        assert sum(not outcome.replayed for outcome in outcomes) == 1
        await once.aclose()

    asyncio.run(main())


async def test_R31_a_failed_leader_promotes_a_follower(light_lab: Lab) -> None:
    once = light_lab.face()
    with pytest.raises(OSError, match="down"):
        async with owned(light_lab, once, "k"):
            waiting = [
                meanwhile(light_lab, 0, lambda: once.execute("k", light_lab.effect("second"), wait=10))
                for _ in range(4)
            ]
            await until(light_lab, lambda: sum(once._engine().bench._waiting.values()) == 4)
            raise OSError("down")
    outcomes = [await each() for each in waiting]
    assert [outcome.value for outcome in outcomes] == ["second"] * 4
    assert len(light_lab.effects) == 1


class Still:
    """A runtime whose clock stands still but for what has `passed`."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._start = runtime.now()
        self.passed = 0.0

    def now(self) -> float:
        return float(self._start + self.passed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


async def test_R31_the_cache_replays_done_outcomes_for_a_short_time_only(light_lab: Lab) -> None:
    store = Counting(MemoryStore())
    once = _over(light_lab, store, cache=2)
    cache = once._engine().store
    while not isinstance(cache, Cache):
        cache = cache.inner
    clock = Still(cache._runtime)
    cache._runtime = clock
    cache._ticker.stop()  # it goes by the real clock
    await light_lab.do(once.execute("k", light_lab.effect("v")))
    assert (await light_lab.do(once.execute("k", light_lab.effect()))).value == "v"
    store.calls.clear()
    for _ in range(5):
        assert (await light_lab.do(once.execute("k", light_lab.effect()))).value == "v"
    assert store.calls["claim"] == 0
    await light_lab.do(once.forget("k"))
    assert (await light_lab.do(once.execute("k", light_lab.effect("new")))).value == "new"
    await light_lab.do(once.execute("k", light_lab.effect()))
    clock.passed = 0.99
    store.calls.clear()
    await light_lab.do(once.execute("k", light_lab.effect()))
    assert store.calls["claim"] == 0
    clock.passed = 1.01
    await light_lab.do(once.execute("k", light_lab.effect()))
    assert store.calls["claim"] == 1


async def test_R31_the_cache_is_bounded_and_keeps_requests_apart(light_lab: Lab) -> None:
    once = _over(light_lab, MemoryStore(), cache=2)
    for key in "abcd":
        for _ in range(2):
            await light_lab.do(once.execute(key, light_lab.effect(key), request=key))
    with pytest.raises(KeyMismatch):
        await light_lab.do(once.execute("d", light_lab.effect(), request="other"))
    layer = once._engine().store
    while not hasattr(layer, "_entries"):
        layer = layer.inner
    assert len(layer._entries) <= 2


async def test_R31_encryption_seals_results_and_steps_and_survives_rotation(lab: Lab) -> None:
    secret = "4111 1111 1111 1111"
    await lab.do(lab.face(encrypt=KEY_A).execute("k", lab.effect(secret)))
    sealed = (await lab.do(lab.face()._store.peek(lab.face()._call("k", nothing_to_run, (), {}).scope)))[
        0
    ].result
    assert secret.encode() not in sealed
    assert (await lab.do(lab.face(encrypt=KEY_B).execute("k", lab.effect()))).value == secret
    with pytest.raises(OutcomeUnknown) as caught:
        await lab.do(lab.face(encrypt={"other": b"c" * 32}).execute("k", lab.effect()))
    assert caught.value.unreadable
    assert len(lab.effects) == 1


async def test_R31_a_sealed_result_is_bound_to_its_scope(light_lab: Lab) -> None:
    import msgspec

    store = MemoryStore()
    once = _over(light_lab, store, encrypt=KEY_A)
    await light_lab.do(once.execute("mine", light_lab.effect("mine")))
    await light_lab.do(once.execute("theirs", light_lab.effect("theirs")))
    (first, one), (second, two) = store._records.items()
    store._records[first] = msgspec.structs.replace(one, result=two.result)
    with pytest.raises(OutcomeUnknown):
        await light_lab.do(once.execute("mine", light_lab.effect()))
    assert second


async def test_R31_namespaces_keep_programs_apart(lab: Lab) -> None:
    assert (await lab.do(lab.face(namespace="a").execute("k", lab.effect(1)))).value == 1
    assert (await lab.do(lab.face(namespace="b").execute("k", lab.effect(2)))).value == 2
    assert (await lab.do(lab.face(namespace="a").execute("k", lab.effect(3)))).value == 1


async def test_R31_hooks_see_events_and_a_broken_hook_breaks_nothing(lab: Lab) -> None:
    from semel import SemelWarning

    events: list[Any] = []

    def broken(event: Any) -> None:
        if type(event).__name__ == "Replayed":
            raise ValueError("hook")

    once = lab.face(hooks=[broken, events.append])
    await lab.do(once.execute("k", lab.effect()))
    with pytest.warns(SemelWarning, match="hook"):
        await lab.do(once.execute("k", lab.effect()))
    names = [type(event).__name__ for event in events]
    assert {"Executed", "Replayed", "StoreCalled"} <= set(names)


def test_the_logging_hook_masks_keys(caplog: pytest.LogCaptureFixture) -> None:
    from semel.hooks import log_events

    once = Semel("memory://", hooks=[log_events])
    with caplog.at_level("DEBUG", logger="semel"):
        once.execute("customer-4711-secret-key", lambda: 1)
    assert "Executed" in caplog.text
    assert "4711" not in caplog.text


def test_the_logging_hook_says_which_key_and_what_kind_of_error(caplog: pytest.LogCaptureFixture) -> None:
    from semel.hooks import log_events

    def fails() -> None:
        raise TimeoutError

    once = Semel("memory://", operation="pay", hooks=[log_events])
    with caplog.at_level("WARNING", logger="semel"), pytest.raises(TimeoutError):
        once.execute("order-4711", fails, on_error="replay")
    record = once.peek("order-4711")
    assert record is not None
    assert record.scope is not None
    (line,) = caplog.records
    assert line.getMessage().startswith(f"Failed default/pay/o…1 [{record.scope.hex[:8]}] attempt=1 ")
    assert line.getMessage().endswith("error=TimeoutError")
    assert line.semel_scope == record.scope.hex  # type: ignore[attr-defined]  # an extra
    once.close()


def test_an_encryption_ring_must_have_good_keys() -> None:
    from semel import ConfigurationError

    for wrong in ({}, {"a": b"short"}, {"": b"a" * 32}):
        with pytest.raises(ConfigurationError):
            Encrypt(MemoryStore(), Ring(wrong))
