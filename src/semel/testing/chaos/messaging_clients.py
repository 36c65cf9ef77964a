"""The application that writes messages and the consumer that handles them, in both colours."""

from __future__ import annotations

import asyncio
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel import AsyncSemel, ConfigurationError, Semel, points
from semel.messaging import Inbox, Message, Outbox, Windows
from semel.messaging.events import Handled, RelayEvent
from semel.runtime import run_sync
from semel.testing.chaos import traps
from semel.testing.chaos.messaging_scene import INSERT, Scene, alchemy, sync
from semel.testing.chaos.messaging_sinks import nothing_left, source_url
from semel.testing.chaos.messaging_verdicts import FOLLOWED, GHOST
from semel.testing.chaos.places import TABLES
from semel.testing.chaos.transactions import wait

__all__ = ["consume", "order"]

_IDLE = 0.3
"""Seconds after which a broker hands out again what nobody has acknowledged."""
_PATIENCE = 120.0
_WINDOWS = Windows(retries=60, redelivery=60)


def order(scene: Scene) -> None:
    """Record, row and message commit together, or nothing does: `within` on a session, and `outbox.add`."""
    application = _Application(scene)
    if scene.cell.colour == "sync":
        run_sync(application.act())
    else:
        asyncio.run(application.act())


class _Application:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.url = scene.plan.url
        self.is_sync = scene.cell.colour == "sync"

    async def act(self) -> None:
        once: Any = (Semel if self.is_sync else AsyncSemel)(
            self.url, tenant="chaos", lease=self.scene.plan.lease
        )
        engine: Any = create_engine(self.url) if self.is_sync else create_async_engine(alchemy(self.url))
        session: Any = Session(engine) if self.is_sync else AsyncSession(engine)
        try:
            await self._order(once, session)
        finally:  # its process lives on
            await wait(session.close())
            await wait(engine.dispose())
            await wait(once.close())

    async def _order(self, once: Any, session: Any) -> None:
        with self.scene.outbox() as outbox:
            await wait(once.peek(self.scene.plan.key))  # what is looked up once is not part of the story
            outbox.database.run_now(lambda _: None)
            if self.scene.role == "victim":
                traps.arm(self.scene.plan, self.scene.ledger)
            rolled_back = self.scene.cell.fault == "rollback"
            try:
                await (
                    self._rolled_back(session, outbox) if rolled_back else self._within(once, session, outbox)
                )
            except Exception as error:  # noqa: BLE001 - a broken connection is the caller's own error
                self.scene.ledger.error(self.scene.role, type(error).__name__, str(error))
            finally:
                traps.disarm()

    async def _within(self, once: Any, session: Any, outbox: Outbox) -> None:
        scene = self.scene

        def work() -> str:
            session.execute(INSERT, scene.row("row a1"))
            outbox.add(session, scene.message("a1"))
            return scene.role

        async def work_async() -> str:
            await session.execute(INSERT, scene.row("row a1"))
            outbox.add(session, scene.message("a1"))
            return scene.role

        bound = once.within(session)
        outcome = await wait(
            bound.execute(scene.plan.key, work if self.is_sync else work_async, wait=scene.plan.wait)
        )
        points.reach("commit.sent")
        await wait(session.commit())
        points.reach("commit.done")
        scene.ledger.answer(scene.role, outcome.value, replayed=outcome.replayed)

    async def _rolled_back(self, session: Any, outbox: Outbox) -> None:
        """A savepoint is rolled back, or a whole transaction; then there is one that is not."""
        scene = self.scene
        await wait(session.execute(INSERT, scene.row("row a1")))
        if scene.cell.point == "savepoint":
            inner = await wait(session.begin_nested())
            outbox.add(session, scene.message(GHOST))
            await wait(session.execute(INSERT, scene.row(f"row {GHOST}")))
            await wait(inner.rollback())
        else:
            outbox.add(session, scene.message(GHOST))
            await wait(session.rollback())
            await wait(session.execute(INSERT, scene.row("row a1")))
        scene.ledger.struck(scene.role)
        outbox.add(session, scene.message("a1"))
        await wait(session.commit())
        scene.ledger.answer(scene.role, scene.role, replayed=False)


async def consume(scene: Scene) -> None:
    """Until the messages are handled that it is told to wait for; a victim until it is struck."""
    if scene.cell.fault == "late-copy":
        await _late_copy(scene)
    else:
        await _Consumer(scene).act()


class _Consumer:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.url = scene.plan.url
        self.is_sync = scene.cell.colour == "sync"
        self.entered: set[str] = set()
        self.handled: dict[str, bool] = {}
        self.came = asyncio.Event()
        self.over = asyncio.Event()

    async def act(self) -> None:
        scene = self.scene
        where: Any = self.url if self.is_sync else create_async_engine(alchemy(self.url))
        inbox = Inbox(where, consumer=scene.plan.key, table=TABLES, hooks=(self._told,))
        try:
            with scene.outbox() as outbox:
                self._register(inbox, outbox)
                await inbox.database.read(lambda _: None)  # whoever was stopped may hold SQLite's lock
                await outbox.database.read(lambda _: None)
                if scene.role == "victim":
                    traps.arm(scene.plan, scene.ledger)
                await self._run(inbox)
        finally:  # its process lives on
            traps.disarm()
            inbox.close()
            if not self.is_sync:
                await where.dispose()

    def _register(self, inbox: Inbox, outbox: Outbox) -> None:
        """A handler that writes a row and sends a message in its transaction."""
        scene = self.scene

        def handle(session: Any, message: Message) -> None:
            session.execute(INSERT, scene.row(str(message.id)))
            outbox.add(session, self._following(message))

        async def handle_async(session: Any, message: Message) -> None:
            await session.execute(INSERT, scene.row(str(message.id)))
            outbox.add(session, self._following(message))

        async def seen(message: Message, go_on: Any) -> bool:
            scene.ledger.entered(scene.role, str(message.id).encode(), message.delivery)
            self.entered.add(str(message.id))
            return bool(await go_on(message))

        inbox.handler("orders")(handle if self.is_sync else handle_async)
        inbox.use(seen)

    def _following(self, message: Message) -> Message:
        tenant = self.scene.plan.key
        return Message(
            "after", {"of": message.id}, key=message.key, id=FOLLOWED + str(message.id), tenant=tenant
        )

    def _told(self, event: RelayEvent) -> None:
        if isinstance(event, Handled):
            self.handled.setdefault(event.message, event.admitted)
            self.came.set()

    async def _run(self, inbox: Inbox) -> None:
        scene = self.scene
        wanted = set(scene.said["messages"])
        source = source_url(scene.kind, scene.said["broker"], scene.place, _IDLE)
        running = asyncio.create_task(inbox.run(source, concurrency=1, grace=5))
        looks = {asyncio.create_task(self._all_handled(wanted))}
        if (scene.kind, scene.role) == ("redis", "heir") and scene.cell.fault in {"kill", "zombie"}:
            looks.add(asyncio.create_task(self._nothing_left()))
        await asyncio.wait({running, *looks}, timeout=_PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        self.over.set()
        self.came.set()
        running.cancel()
        await asyncio.gather(running, *looks, return_exceptions=True)
        if missing := sorted(wanted - self.handled.keys()):
            scene.ledger.error(scene.role, "Unhandled", f"{' '.join(missing)} never came")
            return
        known = self.handled.get(scene.said.get("struck", ""), True)
        scene.ledger.answer(scene.role, sorted(self.handled), replayed=not known)

    async def _nothing_left(self) -> None:
        """What it waits for will not come any more. A zombie may have acknowledged what its heir is still at."""
        scene = self.scene
        await nothing_left(scene.said["broker"], scene.place, scene.plan.key, unless=self.over)
        await self._all_handled(self.entered)

    async def _all_handled(self, wanted: set[str]) -> None:
        while not (self.over.is_set() or wanted <= self.handled.keys()):
            self.came.clear()
            await self.came.wait()


async def _late_copy(scene: Scene) -> None:
    """A copy of a message comes when its admission may have been forgotten: it is kept, or it is not, or that is refused."""
    is_sync = scene.cell.colour == "sync"
    url = scene.plan.url
    engine: Any = create_engine(sync(url)) if is_sync else create_async_engine(alchemy(url))
    inbox = _forgetful(scene, url if is_sync else engine)

    def handle(session: Any, message: Message) -> None:
        session.execute(INSERT, scene.row(str(message.id)))

    async def handle_async(session: Any, message: Message) -> None:
        await session.execute(INSERT, scene.row(str(message.id)))

    for _ in ("the messages", "their copies"):
        for name in scene.said["messages"]:
            session: Any = Session(engine) if is_sync else AsyncSession(engine)
            await wait(inbox.process(session, scene.message(name), handle if is_sync else handle_async))
            await wait(session.commit())
            await wait(session.close())
        await asyncio.sleep(0.02)  # beyond the short retention
        await inbox.purge()
    if scene.cell.point != "refused":
        scene.ledger.struck(scene.role)
    inbox.close()
    await wait(engine.dispose())


def _forgetful(scene: Scene, where: Any) -> Inbox:
    """One that forgets at once, one that does not; and one that was to, and is refused because copies may come later than that."""
    options: dict[str, Any] = {"consumer": scene.plan.key, "table": TABLES}
    if scene.cell.point == "forgotten":
        return Inbox(where, retention=0.01, windows=Windows(retries=0, redelivery=0), **options)
    if scene.cell.point == "kept":
        return Inbox(where, retention=3600, **options)
    try:
        return Inbox(where, retention=0.01, windows=_WINDOWS, **options)
    except ConfigurationError:
        scene.ledger.struck(scene.role)
        return Inbox(where, windows=_WINDOWS, **options)
