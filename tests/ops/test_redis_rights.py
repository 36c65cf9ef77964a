"""What a Redis user may do decides how a caller waits: woken, or looking again and again (R3)."""

from __future__ import annotations

import asyncio
import re
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semel import AsyncSemel, Semel
from semel.errors import SemelWarning
from semel.runtime import run_sync
from semel.stores.redis import store as redis_store
from semel.testing import services
from tests.ops.redis_store_lab import BOTH, Colour, drive, finish, opened, run, win

pytestmark = pytest.mark.services
GUIDE = Path(__file__).parents[2] / "docs" / "howto" / "redis.md"


def url_for(server: services.RedisServer, *rules: str) -> str:
    server.command("ACL", "SETUSER", "app", "reset", "on", ">pw", *rules)
    return f"redis://app:pw@{server.host}:{server.port}"


def eventually(ready: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.001)


class Held:
    """A key that another program runs, until `go`."""

    def __init__(self, owner: Semel, key: str) -> None:
        self.go = threading.Event()
        runs = threading.Event()

        def held() -> str:
            runs.set()
            assert self.go.wait(20)
            return "theirs"

        self._thread = threading.Thread(target=lambda: owner.execute(key, held))
        self._thread.start()
        assert runs.wait(20)

    def end_when(self, ready: Callable[[], Any]) -> threading.Thread:
        def end() -> None:
            eventually(ready)
            self.go.set()
            self._thread.join()

        ending = threading.Thread(target=end)
        ending.start()
        return ending


@BOTH
def test_R3_a_user_without_channels_polls_and_is_warned_once(colour: Colour) -> None:
    with services.redis() as server, Semel(server.url) as owner:
        url = url_for(server, "~*", "+@all")
        once: Any = Semel(url) if colour == "sync" else AsyncSemel(url)

        async def wait_for(number: int) -> None:
            held = Held(owner, f"key-{number}")
            ending = held.end_when(lambda: not once._store.capabilities.notifies)
            found = once.execute(f"key-{number}", lambda: "mine", wait=20, poll=(0.01, 0.05))
            outcome = await found if colour == "async" else found
            assert (outcome.value, outcome.replayed) == ("theirs", True)
            ending.join()

        async def main() -> None:
            for number in range(3):
                await wait_for(number)
            closing = once.aclose() if colour == "async" else once.close()
            if closing is not None:
                await closing

        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run(colour, main)
        told = [str(warning.message) for warning in seen if warning.category is SemelWarning]
        assert len(told) == 1
        assert "&{semel:* +ssubscribe" in told[0]


@BOTH
def test_a_user_who_may_not_subscribe_is_asked_again_later(
    colour: Colour, monkeypatch: pytest.MonkeyPatch
) -> None:
    with services.redis() as server:
        url = url_for(server, "~*", "&*", "+@all", "-ssubscribe")

        async def main() -> None:
            store, other = opened(url, colour, prefix="shop"), opened(server, colour, prefix="shop")
            first, local = threading.Event(), threading.Event()
            with pytest.warns(SemelWarning, match=r"ACL SETUSER … &\{shop:\* \+ssubscribe"):
                leave = await store.watch((await win(store, "a")).scope, first.set)
            assert not store.capabilities.notifies
            assert store.capabilities.durable
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # told once
                monkeypatch.setattr(store, "_deaf_until", time.monotonic())
                await (await store.watch((await win(store, "again")).scope, first.set))()
            server.command("ACL", "SETUSER", "app", "+ssubscribe")
            owner = await win(store, "b")
            leave_local = await store.watch(owner.scope, local.set)  # not asked again yet
            assert not store.capabilities.notifies
            await finish(store, owner)
            assert local.is_set()  # settles of this very store are heard all the same
            monkeypatch.setattr(store, "_deaf_until", time.monotonic())
            owner = await win(other, "c")
            woken = threading.Event()
            leave_other = await store.watch(owner.scope, woken.set)
            assert store.capabilities.notifies
            await finish(other, owner)
            assert await asyncio.to_thread(woken.wait, 20) if colour == "async" else woken.wait(20)
            for end in (leave, leave_local, leave_other):
                await end()
                await end()
            assert not store._watchers
            await store.aclose()
            await other.aclose()

        run(colour, main)


def test_a_warning_that_is_an_error_leaves_the_next_waiter_polling() -> None:
    with services.redis() as server:
        store = opened(url_for(server, "~*", "+@all"))
        owner = run_sync(win(store))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(SemelWarning):
                run_sync(store.watch(owner.scope, lambda: None))
            drive(run_sync(store.watch(owner.scope, lambda: None))())
        assert redis_store._DEAF_FOR > 1
        assert not store._watchers
        run_sync(store.aclose())


@BOTH
def test_the_rights_in_the_guide_are_enough(colour: Colour) -> None:
    (rules,) = re.findall(r"ACL SETUSER app on >secret (.*)", GUIDE.read_text("utf-8"))
    with services.redis() as server:
        url = url_for(server, *rules.split())

        async def main() -> None:
            store, other = opened(url, colour), opened(url, colour)
            owner, woken = await win(store), threading.Event()
            leave = await other.watch(owner.scope, woken.set)
            await finish(store, owner)
            assert await asyncio.to_thread(woken.wait, 20) if colour == "async" else woken.wait(20)
            await leave()
            assert other.capabilities.notifies
            facts = await store.facts()
            assert not any("may not" in warning for warning in facts.warnings)
            await store.aclose()
            await other.aclose()

        with warnings.catch_warnings():
            warnings.simplefilter("error", SemelWarning)
            run(colour, main)
