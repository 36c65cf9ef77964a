"""Batches on their way to sinks. One that takes long does not hold up the others: it is looked after when it has arrived.

Nothing of a part is changed in here: a round may be writing it down at the same time, in a thread. It may find there that
the part is somebody else's and give its batches up (`forget`), while the loop looks at them: so every look is at a copy, made
in one step (`list`), and what is taken out is whose `pop` finds it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from semel.messaging.pages import Ledger
from semel.messaging.parts import Part, Shipment
from semel.messaging.routes import Router, Target
from semel.messaging.sink import Row, SinkUnavailable

__all__ = ["Sending", "Sent"]


@dataclass(slots=True, eq=False)
class Sent:
    """A batch that was sent, and what came of it; itself, not what it says, is what is under way."""

    part: Part
    shipment: Shipment
    target: Target
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
        self._tasks: dict[Sent, asyncio.Task[None]] = {}

    @property
    def places(self) -> set[tuple[int, str]]:
        """The parts and lanes that have a batch under way."""
        return {(sent.part.number, sent.shipment.lane) for sent in list(self._tasks)}

    def start(self, sent: Sent) -> None:
        """Send a batch; there is none of its part and lane under way."""
        self._tasks[sent] = asyncio.get_running_loop().create_task(self._send(sent))

    def of(self, parts: Collection[Part]) -> list[Sent]:
        """What these parts have under way."""
        return [sent for sent in list(self._tasks) if any(sent.part is part for part in parts)]

    async def wait(
        self, sending: Collection[Sent], seconds: float | None, *, all_of_them: bool = True
    ) -> None:
        """Until all of these have come to their end, or one of them, or the time is over."""
        tasks = [task for sent in sending if (task := self._tasks.get(sent)) is not None]
        if tasks:
            when = asyncio.ALL_COMPLETED if all_of_them else asyncio.FIRST_COMPLETED
            await asyncio.wait(tasks, timeout=seconds, return_when=when)
        for sent in sending:
            sent.late = True

    def landed(self, parts: Collection[Part]) -> list[Sent]:
        """What has come to its end, of these parts; it is not under way any more."""
        found = []
        for sent in self.of(parts):
            task = self._tasks.get(sent)
            if task is None or not task.done() or self._tasks.pop(sent, None) is None:
                continue
            if task.cancelled():
                sent.error = SinkUnavailable("the sink's own work was cancelled")
            found.append(sent)
        return found

    def forget(self, part: Part) -> None:
        """Somebody else has the part, or it is taken anew: what is under way is given up."""
        for sent in self.of((part,)):
            task = self._tasks.pop(sent, None)
            if task is not None:
                task.get_loop().call_soon_threadsafe(task.cancel)  # this may be the thread that writes a page

    async def _send(self, sent: Sent) -> None:
        part, shipment, start = sent.part, sent.shipment, time.monotonic()
        try:
            if sent.resend:
                await self._again(sent)
            sent.found = await sent.target.sink.publish(part.number, part.epoch, shipment.no, sent.rows)
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
        part, shipment, target = sent.part, sent.shipment, sent.target
        first = sent.resend[0] - 1
        kept = await self._ledger.read(lambda page: page.kept(part.number, shipment.lane, first))
        for number in sent.resend:
            rows = [self._router.shaped(target.way, row) for row in kept.get(number, ())]
            if rows:
                await target.sink.publish(part.number, part.epoch, number, rows)
                sent.resent += len(rows)
        sent.again = True
