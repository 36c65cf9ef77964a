"""Batches on their way to sinks. One that takes long does not hold up the others: it is looked after when it has arrived.

Nothing of a part is changed in here: a round may be writing it down at the same time, in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from semel.messaging.pages import Ledger
from semel.messaging.parts import Part, Shipment
from semel.messaging.routes import Router
from semel.messaging.sink import Row, SinkUnavailable

__all__ = ["Sending", "Sent"]


@dataclass(slots=True)
class Sent:
    """A batch that was sent, and what came of it."""

    part: Part
    shipment: Shipment
    rows: list[Row] = field(default_factory=list)
    fresh: bool = False
    resend: Sequence[int] = ()
    found: int | None = None
    resent: int = 0
    again: bool = False  # whether what was to be sent again is there
    late: bool = False
    seconds: float = 0.0
    error: BaseException | None = None


class Sending:
    """What is under way. `arrived` is called in the loop when something has come to its end."""

    def __init__(self, ledger: Ledger, router: Router, arrived: Callable[[], None]) -> None:
        self._ledger = ledger
        self._router = router
        self._arrived = arrived
        self._tasks: dict[tuple[int, str], tuple[Sent, asyncio.Task[None]]] = {}

    def __contains__(self, place: tuple[int, str]) -> bool:
        return place in self._tasks

    def start(self, sent: Sent) -> None:
        """Send a batch; there is none of its part and lane under way."""
        task = asyncio.get_running_loop().create_task(self._send(sent))
        self._tasks[sent.part.number, sent.shipment.lane] = sent, task

    def of(self, parts: Collection[Part]) -> list[Sent]:
        """What these parts have under way."""
        if not self._tasks:
            return []
        return [sent for sent, _ in self._tasks.values() if any(sent.part is part for part in parts)]

    async def wait(
        self, sending: Collection[Sent], seconds: float | None, *, all_of_them: bool = True
    ) -> None:
        """Until all of these have come to their end, or one of them, or the time is over."""
        tasks = [task for sent, task in self._tasks.values() if any(sent is each for each in sending)]
        if tasks:
            when = asyncio.ALL_COMPLETED if all_of_them else asyncio.FIRST_COMPLETED
            await asyncio.wait(tasks, timeout=seconds, return_when=when)
        for sent in sending:
            sent.late = True

    def landed(self, parts: Collection[Part]) -> list[Sent]:
        """What has come to its end, of these parts; it is not under way any more."""
        places = [place for place, (_, task) in self._tasks.items() if task.done()]
        found = []
        for place in places:
            sent, task = self._tasks[place]
            if not any(sent.part is part for part in parts):
                continue
            del self._tasks[place]
            if task.cancelled():
                sent.error = SinkUnavailable("the sink's own work was cancelled")
            found.append(sent)
        return found

    def forget(self, part: Part) -> None:
        """Somebody else has the part, or it is taken anew: what is under way is given up."""
        for place, (sent, task) in list(self._tasks.items()):
            if sent.part is part:
                del self._tasks[place]
                task.cancel()

    async def _send(self, sent: Sent) -> None:
        part, shipment, start = sent.part, sent.shipment, time.monotonic()
        sink = shipment.target.sink  # type: ignore[union-attr]
        try:
            if sent.resend:
                await self._again(sent)
            sent.found = await sink.publish(part.number, part.epoch, shipment.no, sent.rows)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - sorted, or raised, where it is looked after
            sent.error = error
        finally:
            sent.seconds = time.monotonic() - start
            if sent.late:  # otherwise the round that began it is still there
                self._arrived()

    async def _again(self, sent: Sent) -> None:
        """Kept batches that the sink lost, first."""
        part, shipment = sent.part, sent.shipment
        first = sent.resend[0] - 1
        kept = await self._ledger.read(lambda page: page.kept(part.number, shipment.lane, first))
        target = shipment.target
        for number in sent.resend:
            rows = [self._router.shaped(target.way, row) for row in kept.get(number, ())]  # type: ignore[union-attr]
            if rows:
                await target.sink.publish(part.number, part.epoch, number, rows)  # type: ignore[union-attr]
                sent.resent += len(rows)
        sent.again = True
