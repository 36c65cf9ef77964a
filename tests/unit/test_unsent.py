"""A claim that a refused login ended is not released: it was never sent. One of which a copy may be on its way is (R16)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec
import pytest

from semel import AsyncSemel, ConfigurationError, NotRecorded, Semel
from semel.errors import StoreUnavailable
from semel.keys import make_scope
from semel.layers.batch import Batch
from semel.layers.encrypt import Encrypt
from semel.layers.layer import Layer
from semel.layers.retry import Retry
from semel.losses import Losses, NotConnected, is_unsent
from semel.model import Answer, Ask, Record, Settle, Verdict, Won
from semel.runtime import run_sync
from semel.stores.memory import MemoryStore


def refused() -> NotConnected:
    return NotConnected("the password is wrong")


def locked_out() -> StoreUnavailable:
    """As a server is told that has let us in before."""
    error = StoreUnavailable("the password is wrong by now")
    error.__cause__ = refused()
    return error


class Doorman(Layer):
    """A store with a door. `shut` is what is said there; `sent` claims get through once, and their answer does not come back."""

    def __init__(self, shut: Callable[[], Exception] | None = refused) -> None:
        super().__init__(MemoryStore())
        self.losses = Losses()
        self.shut = shut
        self.sent = False
        self.claims: list[int] = []
        self.settles: list[float] = []

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        self.claims.append(len(asks))
        if self.sent:
            await super().claim(asks)
            self.losses.tell()
        if self.shut is not None:
            raise self.shut()
        return await super().claim(asks)

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        self.settles.append(time.monotonic())
        if self.shut is not None:
            raise self.shut()
        return await super().settle(ends)


def ask(number: int = 1) -> Ask:
    scope = make_scope("semel", "default", "default", f"key-{number}", "full")
    return Ask(scope, number.to_bytes(16, "big"), 10.0, 60.0)


def test_what_was_not_sent_is_told_by_its_error_or_by_what_that_came_from() -> None:
    assert is_unsent(refused())
    assert is_unsent(locked_out())
    assert not is_unsent(ConfigurationError("wrong"))
    assert not is_unsent(StoreUnavailable("lost"))


@pytest.mark.parametrize("shut", [refused, locked_out])
def test_R16_a_refused_login_is_not_repeated_by_a_second_try_nor_by_a_release(
    shut: Callable[[], Exception],
) -> None:
    store = Doorman(shut)
    once = Semel(store)
    with pytest.raises((ConfigurationError, StoreUnavailable), match="password"):
        once.execute("k", lambda: 1)
    engine = once._engine()
    assert not engine.debts.owes
    assert not engine.heart.expected  # else it would be renewed
    once.close()
    assert (store.claims, store.settles) == ([1], [])


def test_R16_a_claim_that_may_have_arrived_before_the_refusal_is_released() -> None:
    store = Doorman()
    store.sent = True
    once = Semel(store)
    with pytest.raises(ConfigurationError):
        once.execute("k", lambda: 1)
    assert once._engine().debts.owes
    store.shut, store.sent = None, False
    once.close()  # offers it
    with Semel(store.inner) as other:
        assert not other.execute("k", lambda: 2).replayed


def test_R16_a_copy_of_an_earlier_claim_of_the_same_call_is_released() -> None:
    """It was sent twice, the second one answered Busy; the call waits, asks again, and is refused the login."""
    store = Doorman(None)
    once = Semel(store)
    engine = once._engine()
    asked = ask()
    engine.debts.suspect(asked)
    store.shut = refused
    with pytest.raises(NotConnected):
        run_sync(engine.asker.claim(asked))
    assert engine.debts.owes
    once.close()


def test_R16_a_release_that_refused_logins_stop_is_offered_seldom_and_not_only_at_the_end() -> None:
    store = Doorman()
    store.sent = True
    with Semel(store, lease=3, on_unknown="hold") as once:  # offered for 30 s
        with pytest.raises(ConfigurationError):
            once.execute("k", lambda: 1)
        _until(lambda: len(store.settles) == 2)
        assert store.settles[1] - store.settles[0] > 0.9
        store.shut, store.sent = None, False
        _until(lambda: len(store.settles) == 3)
        assert store.settles[2] - store.settles[1] > 1.9
        assert once.execute("k", lambda: 2).value == 2  # it is not unknown


def test_R16_the_last_offer_of_a_release_is_made_when_its_time_is_over() -> None:
    store = Doorman()
    store.sent = True
    with Semel(store, lease=0.6) as once:
        with pytest.raises(ConfigurationError):
            once.execute("k", lambda: 1)
        _until(lambda: not once._engine().debts.owes)
        assert len(store.settles) == 2  # soon, and at the end
        assert store.settles[1] - store.settles[0] > 0.5


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert true()


def test_R16_an_outcome_is_offered_whatever_the_login_is_worth() -> None:
    store = Doorman(None)

    def shut_the_door() -> int:
        store.shut = locked_out
        return 1

    with Semel(store, settle_timeout=0) as once:
        with pytest.raises(NotRecorded):
            once.execute("k", shut_the_door)
        deadline = time.monotonic() + 20
        while len(store.settles) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(store.settles) >= 4
        store.shut = None


class Partly(Doorman):
    """Says of each item by itself that the login was refused."""

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        self.claims.append(len(asks))
        return [locked_out() for _ in asks]


def test_a_second_try_leaves_out_what_was_refused_a_login() -> None:
    store = Partly()
    (answer,) = run_sync(Retry(store, time.monotonic, 2.0).claim((ask(),)))
    assert isinstance(answer, StoreUnavailable)
    assert store.claims == [1]


def test_a_second_try_of_reading_is_not_made_either() -> None:
    class Blind(Doorman):
        peeks = 0

        async def peek(self, scope: object) -> tuple[Record | None, float]:
            self.peeks += 1
            raise locked_out()

    store = Blind()
    with pytest.raises(StoreUnavailable):
        run_sync(Retry(store, time.monotonic, 2.0).peek(ask().scope))
    assert store.peeks == 1


def test_calls_that_travel_together_may_have_been_sent_in_part() -> None:
    async def main() -> None:
        store = Doorman()
        batch = Batch(store)
        mark = store.losses.mark
        found = await asyncio.gather(
            *(batch.claim((ask(number),)) for number in range(3)), return_exceptions=True
        )
        assert [type(each) for each in found] == [NotConnected] * 3
        assert store.losses.mark is not mark

    asyncio.run(main())


def test_R16_calls_that_are_refused_together_are_released_together() -> None:
    async def main() -> None:
        store = Doorman()
        store.inner.capabilities = msgspec.structs.replace(store.capabilities, batches=True)  # type: ignore[misc]  # of this one
        async with AsyncSemel(store) as once:
            calls = [once.execute(f"k{number}", lambda: 1) for number in range(9)]
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(each) for each in found] == [NotConnected] * 9
            await asyncio.sleep(0.3)
            assert len(store.settles) < 9  # in batches, and put off to the end of their leases

    asyncio.run(main())


def test_R15_a_grant_that_cannot_be_read_nor_given_back_is_told_as_a_loss() -> None:
    """A layer releases what it cannot open: if that is refused a login, the claim was granted all the same."""

    class Sealed(Doorman):
        async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
            (won,) = await self.inner.claim(asks)
            assert isinstance(won, Won)
            return [
                msgspec.structs.replace(won, record=msgspec.structs.replace(won.record, steps=b"\0\0\0\1x"))
            ]

    store = Sealed()
    mark = store.losses.mark
    with pytest.raises(NotConnected):
        run_sync(Encrypt(store, {"a": b"k" * 32}).claim((ask(),)))
    assert store.losses.mark is not mark
