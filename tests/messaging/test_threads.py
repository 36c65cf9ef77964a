"""A relay's pages are written in threads while its loop goes on: what both know of is never looked at in the middle of a change.

Each test lets the other thread run at the worst moment: in the middle of a look.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from sqlalchemy import text

from semel.messaging import Message, Relay, Row
from semel.messaging.away import Away
from semel.messaging.events import Overtaken, RelayEvent
from semel.messaging.holdings import Holdings
from semel.messaging.pages import Lane, State
from semel.messaging.parts import Part, Shipment
from semel.messaging.planning import Limits, Planning
from semel.messaging.routes import Router
from semel.messaging.sending import Sending, Sent
from semel.messaging.tally import Tally
from tests.messaging.books import Book
from tests.messaging.conftest import Home, awaited
from tests.threads import in_another_thread


class Interrupted(list[Any]):
    """Whoever iterates over it is interrupted, once."""

    def __init__(self, items: Sequence[Any], meanwhile: Callable[[], object]) -> None:
        super().__init__(items)
        self._meanwhile: Callable[[], object] | None = meanwhile

    def __iter__(self) -> Iterator[Any]:
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            in_another_thread(meanwhile)
        return super().__iter__()


class Silent:
    """A sink that never answers."""

    guarantee = "exact"

    async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
        await asyncio.Event().wait()
        return None


def part_of(number: int, *lanes: str) -> Part:
    return Part(number, 1, State(lanes={lane: Lane(no=1, open=[1]) for lane in lanes}))


def sent_of(part: Part, router: Router, lane: str = "t") -> Sent:
    target = router.targets[0]
    return Sent(part, Shipment(part.number, 1, lane, 1, [], target), target)


class Relayed:
    """What a relay knows in memory, without a database."""

    def __init__(self, sink: Any) -> None:
        self.router = Router({"t": sink})
        self.told: list[RelayEvent] = []
        self.sending = Sending(None, self.router, lambda: None)  # type: ignore[arg-type]  # it reads kept batches only
        self.away = Away(self.told.append)
        self.holdings = Holdings(self.sending, self.away, Tally(self.told.append))

    def begin(self, *numbers: int) -> list[Part]:
        """Parts that are owned, each with a batch under way."""
        parts = [part_of(number, "t") for number in numbers]
        self.holdings.take(parts)
        for part in parts:
            self.sending.start(sent_of(part, self.router))
        return parts

    async def end(self) -> None:
        for part in self.holdings.held:
            self.holdings.drop(part)
        await asyncio.sleep(0)


# -- batches under way ------------------------------------------------------------------------------------------------
@awaited
async def test_a_part_that_is_overtaken_meanwhile_disturbs_no_look_at_what_is_under_way() -> None:
    relayed = Relayed(Silent())
    first, second, third = relayed.begin(1, 2, 3)
    looked = Interrupted([first, third], lambda: relayed.holdings.overtaken(second))
    assert [sent.part.number for sent in relayed.sending.of(looked)] == [1, 3]
    assert relayed.sending.places == {(1, "t"), (3, "t")}
    assert relayed.holdings.held == [first, third]
    await relayed.end()


@awaited
async def test_a_batch_that_is_given_up_meanwhile_has_not_landed() -> None:
    relayed = Relayed(Book())
    first, second = relayed.begin(1, 2)
    await relayed.sending.wait(relayed.sending.of([first, second]), None)
    looked = Interrupted([first, second], lambda: relayed.holdings.overtaken(second))
    landed = relayed.sending.landed(looked)
    assert [sent.part.number for sent in landed] == [1]
    assert relayed.sending.landed([first, second]) == []


@awaited
async def test_what_is_waited_for_may_be_given_up_meanwhile() -> None:
    relayed = Relayed(Silent())
    first, second = relayed.begin(1, 2)
    under_way = relayed.sending.of([first, second])
    looked = Interrupted(under_way, lambda: relayed.holdings.overtaken(second))
    waiting = asyncio.create_task(relayed.sending.wait(looked, None))
    await asyncio.sleep(0)
    relayed.holdings.drop(first)
    await asyncio.wait_for(waiting, 30)


# -- parts ------------------------------------------------------------------------------------------------------------
@awaited
async def test_two_threads_that_drop_a_part_drop_it_once() -> None:
    relayed = Relayed(Silent())
    (part,) = relayed.begin(1)
    other = part_of(1)

    class Parts(dict[int, Part]):
        """Another thread changes it between a look and what follows from it."""

        def get(self, number: int, default: Any = None) -> Any:
            found = super().get(number, default)
            self.clear()
            return found

    relayed.holdings.parts = Parts({1: part})
    relayed.holdings.drop(part)
    relayed.holdings.parts = {1: other}
    assert not relayed.holdings.drop(part)  # it was taken anew
    assert relayed.holdings.held == [other]
    await relayed.end()


def test_a_part_may_get_lanes_while_somebody_looks_where_it_leads() -> None:
    router = Router({"t": Book(), "u": Book()})
    part = part_of(1)

    class Name(str):
        """Of a lane: whoever looks at it is interrupted, once."""

        __slots__ = ()

        def partition(self, sep: str, /) -> tuple[str, str, str]:
            if not part.rows:
                part.rows[8] = row("x", 8)
                in_another_thread(lambda: part.accept([row("u", 7)], router))
            return super().partition(sep)

    part.state.lanes |= {Name("x"): Lane(no=1, open=[8]), "y": Lane(no=1, open=[9])}
    assert not part.leads_to("t", "")
    assert part.leads_to("u", "")


def row(topic: str, number: int) -> Row:
    return Row(number, f"m{number}", "default", topic, None, None, None, {}, b"1", 12.5)


# -- what is away -----------------------------------------------------------------------------------------------------
def test_a_sink_may_be_paused_while_somebody_looks_what_must_wait() -> None:
    sinks = [Book(), Book()]
    router, away = Router({"t": sinks[0], "u": sinks[1]}), Away(lambda event: None)
    first, second = (Shipment(0, 1, target.name, 1, [], target) for target in router.targets)
    away.pause(first, "away", None, None)
    known, targets = {"t": {"t"}, "u": {"u"}}, {target.way: target for target in router.targets}
    away.try_again()  # the pause is over: whether a batch leads there is asked of the parts
    looked = Interrupted([part_of(1, "t")], lambda: away.pause(second, "away too", None, None))
    assert away.shut(known, looked, targets) == []
    assert away.names == ["t", "u"]
    looked = Interrupted([part_of(1, "t")], lambda: away.ended(1))
    away.prune(looked)


def test_topics_may_be_learnt_while_somebody_looks_which_must_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    router, told = Router({"*": Book()}), list[RelayEvent]()
    relayed = Relayed(Book())
    limits = Limits(10, 10, (1, 2), 0.0, (), ())
    planning = Planning(router, limits, relayed.holdings, relayed.sending, relayed.away, Tally(told.append))

    class Page:
        """As much of a page as is asked."""

        def __init__(self, *topics: str) -> None:
            self._topics = set(topics)

        def hold(self, epochs: Any) -> set[int]:
            return set(epochs)

        def topics(self) -> set[str]:
            return self._topics

        def choose(self, want: Any) -> dict[int, list[Row]]:
            return {}

        def save(self, states: Any) -> None: ...

    interrupted = False

    class Ways(set[str]):
        """Of a topic: whoever compares them is interrupted, once."""

        def __and__(self, other: Any) -> set[str]:
            nonlocal interrupted
            if not interrupted:
                interrupted = True
                in_another_thread(lambda: planning.plan(Page("c"), []))  # type: ignore[arg-type]  # as much of a page as it asks
            return super().__and__(other)

    def ways(topic: str) -> set[str]:
        return Ways({"*"})

    monkeypatch.setattr(router, "ways", ways)
    relayed.away.pause(Shipment(0, 1, "*", 1, [], router.targets[0]), "away", 30.0, None)
    interrupted = True
    planning.plan(Page("a", "b"), [])  # type: ignore[arg-type]  # as much of a page as it asks
    interrupted = False
    assert {"a", "b"} <= set(planning.want([1]).topics)
    assert set(planning.want([1]).topics) == {"a", "b", "c"}


def test_topics_that_another_thread_learns_meanwhile_stay_known(monkeypatch: pytest.MonkeyPatch) -> None:
    router, relayed = Router({"*": Book()}), Relayed(Book())
    limits = Limits(10, 10, (1, 2), 0.0, (), ())
    planning = Planning(
        router, limits, relayed.holdings, relayed.sending, relayed.away, Tally(list[RelayEvent]().append)
    )

    def ways(topic: str) -> set[str]:
        if topic == "a":
            in_another_thread(lambda: planning._learn({"b"}))
        return {"*"}

    monkeypatch.setattr(router, "ways", ways)
    planning._learn({"a"})
    assert planning._topics.keys() == {"a", "b"}


# -- cancelled from the thread that writes ------------------------------------------------------------------------------
def cancels() -> list[int]:
    """The threads that cancelled a task of this loop: a task must be cancelled in its loop's own, or nobody may wake it."""
    threads: list[int] = []

    class Watched(asyncio.Task[Any]):
        def cancel(self, msg: Any = None) -> bool:
            threads.append(threading.get_ident())
            return super().cancel(msg)

    def factory(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        return Watched(work, loop=loop, **options)

    asyncio.get_running_loop().set_task_factory(factory)
    return threads


@awaited
async def test_a_batch_of_an_overtaken_part_is_cancelled_in_its_loop() -> None:
    threads, relayed = cancels(), Relayed(Silent())
    (part,) = relayed.begin(1)
    (sent,) = relayed.sending.of([part])
    waiting = asyncio.create_task(relayed.sending.wait([sent], None))
    await asyncio.sleep(0)
    await asyncio.to_thread(relayed.holdings.overtaken, part)
    await asyncio.wait_for(waiting, 30)
    assert relayed.told == [Overtaken(1, 1)]
    assert threads == [threading.get_ident()]


class Topics:
    """A sink with a lane for each topic, of which one never answers."""

    guarantee = "exact"
    splits = ("topic",)

    def __init__(self) -> None:
        self.begun, self.cancelled, self.epochs = asyncio.Event(), asyncio.Event(), set[int]()

    def lane(self, row: Row) -> str:
        return row.topic

    async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
        if rows[0].topic != "slow":
            self.epochs.add(epoch)
            return batch - 1
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return None


@awaited
async def test_a_relay_survives_that_a_page_finds_its_part_overtaken(sqlite_home: Home) -> None:
    threads, sink, told = cancels(), Topics(), list[RelayEvent]()
    with sqlite_home.outbox(parts=1) as outbox:

        def add(topic: str) -> None:
            with sqlite_home.transaction() as session:
                outbox.add(session, Message(topic, 1))

        def steal() -> None:
            with sqlite_home.engine.begin() as connection:
                table = f"{sqlite_home.table}_outbox_parts"
                connection.execute(text(f"UPDATE {table} SET epoch = epoch + 1, owner = 'other'"))

        loop, overtaken = asyncio.get_running_loop(), asyncio.Event()

        def hook(event: RelayEvent) -> None:
            told.append(event)
            if isinstance(event, Overtaken):
                loop.call_soon_threadsafe(overtaken.set)

        relay = Relay(outbox, {"*": sink}, hooks=(hook,), lease=30)
        running = asyncio.create_task(relay.run())
        await asyncio.to_thread(add, "slow")
        async with asyncio.timeout(60):
            await sink.begun.wait()
            await asyncio.to_thread(steal)
            await asyncio.to_thread(add, "other")  # something to write down, while that batch is under way
            await sink.cancelled.wait()
            await overtaken.wait()
            assert not running.done()
        assert [event for event in told if isinstance(event, Overtaken)] == [Overtaken(0, 1)]
        assert set(threads) == {threading.get_ident()}
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
