"""The contract of a relay's sink, as a test suite that ships. It tells whether a sink of your own keeps its word::

    from semel.testing.sinks import Arrived, SinkContract

    class TestMySink(SinkContract):
        def open(self):
            return MySink("…", queue=self.place)

        async def arrived(self):
            return [Arrived(id=…, body=…, key=…, headers=…) for … in …]

        def unreachable(self):
            return MySink("…a port where nobody listens…")

That is all under pytest. The suite follows the class that the sink declares: what it does not claim is not asked for.
`self.place` is a name that no other test uses.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec
from unittest import SkipTest

from semel.messaging.sink import Fenced, Guarantee, Rejected, Row, Sink, SinkUnavailable

__all__ = ["Arrived", "SinkContract", "rows"]

P = ParamSpec("P")
_KEEPS: tuple[Guarantee, ...] = ("exact", "window")


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message as it was found behind the sink."""

    id: str
    body: bytes
    topic: str | None = None
    key: str | None = None
    tenant: str | None = None
    type: str | None = None
    schema: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def rows(
    count: int,
    *,
    start: int = 0,
    keys: int = 3,
    size: int = 16,
    body: bytes | None = None,
    topic: str = "orders",
) -> list[Row]:
    """Rows as a relay would send them: numbered from `start`, `keys` keys in turn."""
    return [
        Row(
            seq=number + 1,
            id=f"m-{number:06}",
            tenant="default",
            topic=topic,
            key=f"k-{number % keys}" if keys else None,
            type=None,
            schema=None,
            headers={},
            body=body if body is not None else b"%06d" % number + b"." * max(0, size - 6),
            created=1_700_000_000.0 + number,
            raw=True,
        )
        for number in range(start, start + count)
    ]


def _clause(
    *claims: Guarantee,
) -> Callable[[Callable[P, Coroutine[Any, Any, None]]], Callable[P, None]]:
    """A test method from a coroutine; asked only of sinks that declare one of `claims` (of all, when there is none)."""

    def make(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
        @wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            suite: Any = args[0]
            asyncio.run(suite._run(test, claims, *args, **kwargs))  # noqa: SLF001  # its own

        return run

    return make


@contextmanager
def _raises(kind: type[Exception]) -> Iterator[list[Any]]:
    caught: list[Any] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    else:
        raise AssertionError(f"{kind.__name__} was to be raised")


class SinkContract:
    """Subclass it as `Test…` and say how the sink is opened and what arrived behind it."""

    patience: float = 15.0
    """Seconds within which a server that does not answer must be SinkUnavailable."""
    too_large: int | None = None
    """Bytes of a body that the sink's server will not have, if there is such a limit."""
    ordered = True
    """Whether `arrived` shows messages of different keys in the order of publication too, or only those of one key."""

    @property
    def place(self) -> str:
        """A name (of a stream, a queue, a path) that is this test's own."""
        if "_place" not in self.__dict__:
            self.__dict__["_place"] = f"t{secrets.token_hex(6)}"
        name: str = self.__dict__["_place"]
        return name

    def open(self) -> Sink:
        """A new sink object on the same place each time."""
        raise NotImplementedError("a contract test class says how to open its sink: override open()")

    async def arrived(self) -> Sequence[Arrived]:
        """Everything that arrived at `self.place`, in the order of arrival."""
        raise NotImplementedError("a contract test class says what arrived: override arrived()")

    def unreachable(self) -> Sink | None:
        """A sink whose server does not answer; None if it has no server."""
        raise NotImplementedError("override unreachable(), returning None for a sink without a server")

    async def prepare(self) -> None:
        """Make the place, if the sink does not."""

    async def lose_tail(self) -> bool:
        """Remove what is at the place, with everything that the sink keeps there; False when you cannot."""
        return False

    # ------------------------------------------------------------------------------------------ workings
    async def _run(
        self, test: Callable[..., Coroutine[Any, Any, None]], claims: Sequence[str], *args: Any
    ) -> None:
        async with AsyncExitStack() as stack:
            self.__dict__["_stack"] = stack
            await self.prepare()
            claim = self.sink().guarantee
            if claims and claim not in claims:
                raise SkipTest(f"not claimed by a sink that is {claim!r}")
            await test(*args)

    def sink(self, source: str = "outbox") -> Sink:
        """A new sink object, bound as a relay would, and closed when the test ends."""
        return self._kept(self.open(), source)

    def _kept(self, sink: Sink, source: str) -> Sink:
        bind = getattr(sink, "bind", None)
        if bind is not None:
            bind(source)
        close = getattr(sink, "aclose", None)
        if close is not None:
            self.__dict__["_stack"].push_async_callback(close)
        return sink

    async def _insist(self, sink: Sink, epoch: int, batch: int, some: Sequence[Row]) -> int | None:
        """Publish to part 0 as a relay does: an open connection may have to find out first that something changed."""
        deadline = time.monotonic() + self.patience
        while True:
            try:
                return await sink.publish(0, epoch, batch, some)
            except SinkUnavailable:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

    async def _ids(self) -> list[str]:
        return [message.id for message in await self.arrived()]

    def _expect(self, found: Sequence[str], *batches: Sequence[Row]) -> None:
        """All rows of the batches, each once, in order."""
        wanted = [row for batch in batches for row in batch]
        assert sorted(found) == sorted(row.id for row in wanted)
        if self.ordered:
            assert list(found) == [row.id for row in wanted]
            return
        for key in {row.key for row in wanted if row.key is not None}:
            mine = [row.id for row in wanted if row.key == key]
            assert [id for id in found if id in set(mine)] == mine  # noqa: A001 - the word that people use

    # ----------------------------------------------------------------------------------------- for all
    def test_it_declares_a_class_of_guarantee(self) -> None:
        assert self.open().guarantee in {"exact", "window", "at-least-once"}

    @_clause()
    async def test_messages_arrive_once_and_in_order(self) -> None:
        first, second = rows(5), rows(5, start=5)
        sink = self.sink()
        await sink.publish(0, 1, 1, first)
        await sink.publish(0, 1, 2, second)
        self._expect(await self._ids(), first, second)

    @_clause()
    async def test_bodies_headers_and_names_arrive_as_they_were_sent(self) -> None:
        everything = bytes(range(256))
        sent = [
            Row(
                seq=1, id="id/1 %41:ä", tenant="acme", topic="orders.created", key="Größe 7; a=b", type="order/created",
                schema="order", headers={"traceparent": "00-ab-cd-01", "plain": "two  words", "odd": "é\n%0A \u2603"},
                body=everything, created=1.5, raw=True,
            ),
            Row(
                seq=2, id="m-2", tenant="default", topic="orders.created", key=None, type=None, schema=None, headers={},
                body=b"", created=2.5, raw=True,
            ),
            Row(
                seq=3, id="m-3", tenant="default", topic="orders.created", key="k", type=None, schema=None, headers={},
                body=b'{"a":1}', created=2.5,
            ),
        ]  # fmt: skip
        await self.sink().publish(0, 1, 1, sent)
        found = {message.body: message for message in await self.arrived()}
        assert found.keys() == {everything, b"", b'{"a":1}'}
        rich = found[everything]
        assert rich.id == sent[0].id
        assert (rich.topic, rich.key, rich.tenant) == ("orders.created", "Größe 7; a=b", "acme")
        assert (rich.type, rich.schema) == ("order/created", "order")
        assert {name: rich.headers.get(name) for name in sent[0].headers} == sent[0].headers
        assert (found[b""].id, found[b""].key or None) == ("m-2", None)

    @_clause()
    async def test_a_big_batch_arrives_whole_and_in_order(self) -> None:
        many = rows(1000, keys=100, size=2048)
        await self.sink().publish(0, 1, 1, many)
        self._expect(await self._ids(), many)

    @_clause()
    async def test_parts_are_published_at_the_same_time(self) -> None:
        sink = self.sink()
        sent = {part: rows(20, start=part * 100, keys=1) for part in range(8)}
        for batch in (1, 2):
            await asyncio.gather(
                *(
                    sink.publish(part, 1, batch, some[(batch - 1) * 10 : batch * 10])
                    for part, some in sent.items()
                )
            )
        found = await self._ids()
        assert sorted(found) == sorted(row.id for some in sent.values() for row in some)
        for some in sent.values():
            mine = [row.id for row in some]
            assert [id for id in found if id in set(mine)] == mine  # noqa: A001 - the word that people use

    @_clause()
    async def test_a_server_that_is_not_there_is_unavailable_in_bounded_time(self) -> None:
        sink = self.unreachable()
        if sink is None:
            raise SkipTest("this sink has no server")
        sink = self._kept(sink, "outbox")
        for _ in range(2):  # also when it was found out before
            start = time.monotonic()
            with _raises(SinkUnavailable):
                await sink.publish(0, 1, 1, rows(1))
            assert time.monotonic() - start < self.patience

    @_clause()
    async def test_closing_twice_is_fine_and_another_object_goes_on(self) -> None:
        sink = self.sink()
        await sink.publish(0, 1, 1, rows(1))
        close = getattr(sink, "aclose", None)
        if close is not None:
            await close()
            await close()
        await self.sink().publish(0, 1, 2, rows(1, start=1))
        self._expect(await self._ids(), rows(2))

    def test_it_works_in_one_event_loop_after_another(self) -> None:
        sink = self.open()

        async def use(batch: int) -> None:
            if batch == 1:
                await self.prepare()
            await sink.publish(0, 1, batch, rows(1, start=batch))
            if (close := getattr(sink, "aclose", None)) is not None:
                await close()

        asyncio.run(use(1))
        asyncio.run(use(2))
        found = asyncio.run(self._look())
        assert [message.id for message in found] == ["m-000001", "m-000002"]

    async def _look(self) -> Sequence[Arrived]:
        async with AsyncExitStack() as stack:
            self.__dict__["_stack"] = stack
            return await self.arrived()

    @_clause()
    async def test_a_body_that_the_server_will_not_have_is_rejected_and_nothing_passes_it(self) -> None:
        if self.too_large is None:
            raise SkipTest("this sink's server has no such limit")
        small, behind = rows(1, keys=0), rows(1, start=2, keys=1)
        large = rows(1, start=1, keys=1, body=b"x" * self.too_large)
        sink = self.sink()
        with _raises(Rejected) as caught:
            await sink.publish(0, 1, 1, [*small, *large, *behind])
        error: Rejected = caught[0]
        assert set(error.reasons) == {large[0].id}
        found = await self._ids()
        assert set(found) == error.delivered
        assert behind[0].id not in found
        if sink.guarantee != "at-least-once":  # its number is free again
            assert not found
            await sink.publish(0, 1, 1, small)
            assert await self._ids() == [small[0].id]

    # -------------------------------------------------------------------------- for those that keep numbers
    @_clause(*_KEEPS)
    async def test_the_frontier_that_was_found_is_told(self) -> None:
        sink = self.sink()
        assert await sink.publish(0, 1, 1, rows(2)) == 0
        assert await sink.publish(0, 1, 2, rows(2, start=2)) == 1
        assert await sink.publish(0, 1, 2, rows(2, start=2)) == 2
        assert await self.sink().publish(0, 1, 3, rows(2, start=4)) == 2

    @_clause(*_KEEPS)
    async def test_a_batch_that_is_in_is_never_rejected(self) -> None:
        """Its answer got lost, and a limit was lowered: a rejection would give its number to others."""
        if self.too_large is None:
            raise SkipTest("this sink's server has no such limit")
        sink = self.sink()
        await sink.publish(0, 1, 1, rows(2))
        assert await sink.publish(0, 1, 1, rows(2, body=b"x" * self.too_large)) == 1
        assert await sink.publish(0, 1, 2, rows(2, start=2)) == 1

    @_clause(*_KEEPS)
    async def test_a_batch_that_comes_again_is_left_out(self) -> None:
        first, second = rows(4), rows(4, start=4)
        sink, other = self.sink(), self.sink()
        for batch, some in ((1, first), (2, second)):
            await sink.publish(0, 1, batch, some)
            await sink.publish(0, 1, batch, some)
            await other.publish(0, 1, batch, some)
        await other.publish(0, 2, 1, first)
        await other.publish(0, 2, 2, second)
        self._expect(await self._ids(), first, second)

    @_clause(*_KEEPS)
    async def test_two_relays_that_send_the_same_batch_at_once_deliver_it_once(self) -> None:
        sinks = [self.sink() for _ in range(3)]
        batches = [rows(40, start=40 * number) for number in range(5)]
        for number, some in enumerate(batches, start=1):
            answers = await asyncio.gather(
                *(sink.publish(0, 1, number, some) for sink in sinks), return_exceptions=True
            )
            for answer in answers:
                assert answer in {number - 1, number} or isinstance(answer, Fenced | SinkUnavailable)
            assert await sinks[0].publish(0, 1, number, some) == number
        self._expect(await self._ids(), *batches)

    @_clause(*_KEEPS)
    async def test_a_gap_means_a_lost_tail_and_nothing_is_written(self) -> None:
        sink = self.sink()
        await sink.publish(0, 1, 1, rows(2))
        assert await sink.publish(0, 1, 5, rows(2, start=8)) == 1
        assert await self.sink().publish(0, 1, 3, rows(2, start=4)) == 1
        self._expect(await self._ids(), rows(2))
        assert await sink.publish(0, 1, 2, rows(2, start=2)) == 1
        self._expect(await self._ids(), rows(2), rows(2, start=2))

    @_clause(*_KEEPS)
    async def test_a_sink_that_lost_everything_says_so(self) -> None:
        sink = self.sink()
        for batch in (1, 2, 3):
            await sink.publish(0, 7, batch, rows(2, start=2 * batch))
        if not await self.lose_tail():
            raise SkipTest("this suite cannot make its sink lose anything: override lose_tail()")
        assert await self._insist(sink, 7, 4, rows(2, start=8)) == 0
        for batch in (1, 2, 3, 4):
            assert await sink.publish(0, 7, batch, rows(2, start=2 * batch)) == batch - 1

    @_clause(*_KEEPS)
    async def test_a_relay_that_was_overtaken_is_fenced(self) -> None:
        old, new = self.sink(), self.sink()
        await old.publish(0, 1, 1, rows(2))
        assert await new.publish(0, 2, 2, rows(2, start=2)) == 1
        for sink in (old, self.sink()):
            with _raises(Fenced):
                await sink.publish(0, 1, 3, rows(2, start=50))
        assert await new.publish(0, 2, 3, rows(2, start=4)) == 2
        self._expect(await self._ids(), rows(6))

    @_clause(*_KEEPS)
    async def test_a_take_over_that_sends_the_last_batch_again_fences_too(self) -> None:
        old, new = self.sink(), self.sink()
        await old.publish(0, 1, 1, rows(2))
        assert await new.publish(0, 2, 1, rows(2)) == 1
        with _raises(Fenced):
            await old.publish(0, 1, 2, rows(2, start=50))
        self._expect(await self._ids(), rows(2))

    @_clause(*_KEEPS)
    async def test_each_part_of_each_outbox_has_numbers_of_its_own(self) -> None:
        sink, stranger = self.sink(), self.sink("another-outbox")
        batches = [rows(2, start=2 * number) for number in range(3)]
        assert await sink.publish(0, 5, 1, batches[0]) == 0
        assert await sink.publish(1, 1, 1, batches[1]) == 0
        assert await stranger.publish(0, 1, 1, batches[2]) == 0
        self._expect(await self._ids(), *batches)

    # ------------------------------------------------------------------------------- for those that do not
    @_clause("at-least-once")
    async def test_a_message_that_comes_again_carries_the_same_id(self) -> None:
        sink = self.sink()
        await sink.publish(0, 1, 1, rows(2))
        await sink.publish(0, 1, 1, rows(2))
        assert set(await self._ids()) == {"m-000000", "m-000001"}
