"""The contract through every layer (R31): a layer is a store, and keeps a store's word."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from semel.layers.batch import Batch
from semel.layers.cache import Cache
from semel.layers.chaos import Chaos
from semel.layers.coalesce import Coalesce
from semel.layers.encrypt import Encrypt, Ring
from semel.layers.namespace import Namespace
from semel.layers.observe import Observe
from semel.layers.retry import Retry
from semel.loop import LoopRuntime
from semel.runtime import Runtime, ThreadRuntime
from semel.store import Store
from semel.stores.memory import MemoryStore
from semel.testing.contract import StoreContract

KEYS = {"2026-a": os.urandom(32), "2025-b": os.urandom(32)}


def _no_pool() -> ThreadPoolExecutor:
    raise AssertionError("a layer runs no user code")


class Layered(StoreContract):
    """A memory store under a layer; the layer's clock moves with the store's."""

    ahead = 0.0

    @pytest.fixture(autouse=True, params=["sync", "async"])
    def bind(self, request: pytest.FixtureRequest) -> None:
        self.colour = request.param

    def wrap(self, store: Store) -> Store:
        raise NotImplementedError

    def open(self) -> Store:
        return self.wrap(MemoryStore(clock=lambda: time.time() + self.ahead))

    def shift(self, store: Store, seconds: float) -> bool:
        self.ahead += seconds
        return True

    def runtime(self) -> Runtime:
        """The real runtime of the colour, with its clock moved along."""
        runtime: Runtime = ThreadRuntime()
        if self.colour == "async":
            runtime = LoopRuntime(asyncio.get_running_loop(), _no_pool)
        monotonic = runtime.now
        runtime.now = lambda: monotonic() + self.ahead  # type: ignore[method-assign]  # the clock of this test
        return runtime

    def test_R29_an_async_store_works_in_two_event_loops_in_a_row(self) -> None:
        pytest.skip("the faces make their layers anew for each loop")


class TestObserve(Layered):
    def wrap(self, store: Store) -> Store:
        return Observe(store, lambda event: None)


class TestCoalesce(Layered):
    def wrap(self, store: Store) -> Store:
        return Coalesce(store, self.runtime())


class TestCache(Layered):
    def wrap(self, store: Store) -> Store:
        return Cache(store, self.runtime())


class TestEncrypt(Layered):
    def wrap(self, store: Store) -> Store:
        return Encrypt(store, Ring(KEYS))


class TestRetry(Layered):
    def wrap(self, store: Store) -> Store:
        return Retry(store, time.monotonic, 2.0)


class TestNamespace(Layered):
    def wrap(self, store: Store) -> Store:
        return Namespace(store, "team-a")


class TestBatch(Layered):
    @pytest.fixture(autouse=True)
    def bind(self) -> None:
        self.colour = "async"

    def wrap(self, store: Store) -> Store:
        return Batch(store)


class TestChaosThatNeverStrikes(Layered):
    def wrap(self, store: Store) -> Store:
        return Chaos(store, seed=1, lose_request=0.0, lose_reply=0.0)


class TestAllInTheirOrder(Layered):
    """observe › coalesce › cache › encrypt › retry › namespace."""

    def wrap(self, store: Store) -> Store:
        runtime = self.runtime()
        store = Encrypt(Retry(Namespace(store, "team-a"), runtime.now, 2.0), Ring(KEYS))
        return Observe(Coalesce(Cache(store, runtime), runtime), lambda event: None)
