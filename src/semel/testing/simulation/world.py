"""One world: the real flow of several workers over one simulated server, from a plan, with everything written down."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from random import Random
from typing import Any

from semel import points
from semel.errors import SemelError
from semel.flow import Engine
from semel.loop import LoopRuntime
from semel.once import AsyncSemel
from semel.options import NOT_FOUND, Found
from semel.run import current_run
from semel.testing.simulation.loop import SimLoop, worker_tag
from semel.testing.simulation.plans import NETWORK, Fault, Op, Plan
from semel.testing.simulation.stores import Link, Server

__all__ = ["Answered", "Effect", "World"]

TIMEOUT = 0.4
SETTLE_TIMEOUT = 1.0


class Flaw(Exception):
    """A known failure of the simulated function."""


class _Runtime(LoopRuntime):
    def __init__(self, loop: Any, rng: Random) -> None:
        super().__init__(loop, _no_pool)
        self._rng = rng

    def entropy(self, size: int) -> bytes:
        return self._rng.randbytes(size)


def _no_pool() -> Any:
    raise AssertionError("a simulated world has no threads")


class _Face(AsyncSemel):
    def __init__(self, link: Link, rng: Random, **settings: Any) -> None:
        super().__init__(link, **settings)
        self._rng = rng

    def _make_engine(self, loop: asyncio.AbstractEventLoop) -> Engine:
        engine = self._engines[loop] = self._engine_for(_Runtime(loop, self._rng))
        return engine


class Effect:
    __slots__ = ("at", "key", "request", "value", "worker")

    def __init__(self, at: float, key: str, worker: str, value: str, request: int) -> None:
        self.at, self.key, self.worker, self.value, self.request = at, key, worker, value, request


class Answered:
    """What a client was told: a value, or the name of an error."""

    __slots__ = ("at", "began", "error", "key", "kind", "replayed", "request", "value", "worker")

    def __init__(self, op: Op, worker: str, began: float) -> None:
        self.key, self.request, self.kind, self.worker, self.began = (
            op.key,
            op.request,
            op.kind,
            worker,
            began,
        )
        self.at = 0.0
        self.value: Any = None
        self.error = ""
        self.replayed = False


class World:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.loop = SimLoop()
        self.server = Server(self.loop, tx=plan.mode == "tx")
        self.effects: list[Effect] = []
        self.answers: list[Answered] = []
        self.trace: list[str] = []
        self.reached: Counter[str] = Counter()
        self.downstream: dict[str, str] = {}
        self.done_outside: dict[str, str] = {}
        self.finished_at: float | None = None
        self.quiet_at = 0.0
        self._passes: Counter[tuple[str, str]] = Counter()
        self._calls: dict[int, list[asyncio.Task[None]]] = {}
        self._incarnation: Counter[int] = Counter()
        self._restarted: list[asyncio.Task[None]] = []
        self._returning = 0
        self._number = 0

    # ----------------------------------------------------------------------------------------------- running

    def run(self) -> World:
        points.listen(self._at_point)
        try:
            self.loop.run_until_complete(self._live())
        finally:
            points.listen(None)
            self.loop.graveyard.append(self)
        return self

    def say(self, text: str) -> None:
        self.trace.append(f"{self.loop.time():.6f} {worker_tag.get() or '-'} {text}")

    async def _live(self) -> None:
        tasks = [self._start(number, ops) for number, ops in enumerate(self.plan.workers)]
        for fault in self.plan.faults:
            if fault.at or fault.kind in ("store-down", "failover", "clock"):
                self.loop.call_later(fault.at, self._strike, fault)
        while True:
            everybody = (*tasks, *self._restarted)
            alive = [task for task in everybody if not task.done() and not self.loop.is_dead(task.get_name())]
            if not alive and not self._returning:
                break
            await asyncio.wait(alive, timeout=self.plan.lease) if alive else await asyncio.sleep(
                self.plan.lease
            )
        latest = max((fault.at + max(fault.span, 0) for fault in self.plan.faults), default=0.0)
        await asyncio.sleep(max(0.0, latest - self.loop.time()) + 4 * self.plan.lease)
        self.quiet_at = self.loop.time()
        await self._audit()
        self.finished_at = self.loop.time()

    def _start(self, number: int, ops: tuple[Op, ...]) -> asyncio.Task[None]:
        self._incarnation[number] += 1
        tag = f"w{number}.{self._incarnation[number]}"
        token = worker_tag.set(tag)
        try:
            return self.loop.create_task(self._work(number, tag, ops), name=tag)
        finally:
            worker_tag.reset(token)

    async def _work(self, number: int, tag: str, ops: tuple[Op, ...]) -> None:
        face = self._face(number, tag)
        calls = [self.loop.create_task(self._client(face, tag, op, index)) for index, op in enumerate(ops)]
        self._calls[number] = calls
        await asyncio.gather(*calls, return_exceptions=True)

    def _face(self, number: int, tag: str) -> _Face:
        incidents = {
            fault.nth: fault.kind
            for fault in self.plan.faults
            if fault.kind in NETWORK and fault.worker == number and tag.endswith(".1")
        }
        rng = Random(f"{self.plan.seed}/{tag}/net")  # noqa: S311 - repeatable on purpose
        link = Link(self.server, rng, latency=self.plan.latency, timeout=TIMEOUT, incidents=incidents)
        face = _Face(
            link,
            Random(f"{self.plan.seed}/{tag}/nonce"),  # noqa: S311 - repeatable on purpose
            lease=self.plan.lease,
            timeout=TIMEOUT,
            settle_timeout=SETTLE_TIMEOUT,
            on_unknown=self._policy(),
            retention=None,
        )
        face.recovery("default", probe=self._probe_record if self.plan.mode == "probe" else None)
        return face

    # ------------------------------------------------------------------------------------------------ clients

    async def _client(self, face: _Face, tag: str, op: Op, index: int) -> None:
        await asyncio.sleep(op.after)
        answered = Answered(op, tag, self.loop.time())
        self.say(f"call {op.kind} {op.key}")
        try:
            await self._call(face, op, answered)
        except (SemelError, Flaw) as error:
            answered.error = type(error).__name__
        except asyncio.CancelledError:
            answered.error = "CancelledError"
            raise
        finally:
            if not self.loop.is_dead(tag):
                answered.at = self.loop.time()
                self.answers.append(answered)
                self.say(f"told {op.kind} {op.key} {answered.value or answered.error}")
        del index

    async def _call(self, face: _Face, op: Op, answered: Answered) -> None:
        match op.kind:
            case "execute":
                outcome = await face.execute(op.key, self._function(op), request=op.request, wait=op.wait)
                answered.value, answered.replayed = outcome.value, outcome.replayed
            case "consume":
                answered.replayed = not await face.consume(
                    op.key, self._function(op), request=op.request, wait=op.wait
                )
            case "claim":
                async with face.claim(op.key, request=op.request, wait=op.wait) as claim:
                    if claim.replayed:
                        answered.value, answered.replayed = claim.value, True
                    else:
                        value = await self._function(op)()
                        await claim.complete(value)
                        answered.value = value
            case "purge":
                await face.purge()
            case "reconcile":
                await face.reconcile()

    def _function(self, op: Op) -> Any:
        if self.plan.mode == "steps":
            return partial(self._in_steps, op)
        return partial(self._effect, op)

    async def _effect(self, op: Op) -> str:
        run = current_run()
        self._number += 1
        value = f"{op.key}#{self._number}"
        await asyncio.sleep(op.work / 2)
        if op.fails:
            raise Flaw
        if self.plan.mode == "keyed":
            # The peer remembers the key: a repeated call is answered with what the first one did.
            known = self.downstream.setdefault(run.downstream_key("peer"), value)
            value, fresh = known, known == value
        else:
            fresh = self.plan.mode != "tx"
        if fresh:
            self._happen(op, value)
        await asyncio.sleep(op.work / 2)
        return value

    async def _in_steps(self, op: Op) -> str:
        run = current_run()

        async def charge() -> str:
            key = run.downstream_key("charge")
            self._number += 1
            value = f"{op.key}#{self._number}"
            await asyncio.sleep(op.work / 2)
            known = self.downstream.setdefault(key, value)
            if known == value:
                self._happen(op, value)
            return known

        value: str = await run.step("charge", charge)
        await asyncio.sleep(op.work / 2)
        if op.fails:
            raise Flaw
        again: str = await run.step("ship", _same, value)
        return again

    def _happen(self, op: Op, value: str) -> None:
        self.effects.append(Effect(self.loop.time(), op.key, worker_tag.get(), value, op.request))
        self.done_outside.setdefault(op.key, value)
        self.say(f"effect {op.key} {value}")

    def _policy(self) -> Any:
        if self.plan.mode == "hold":
            return "hold"
        return self._probe if self.plan.mode == "probe" else "retry"

    async def _probe(self, *_: Any) -> Any:
        await asyncio.sleep(self.plan.latency)
        value = self.done_outside.get(current_run().key)
        return NOT_FOUND if value is None else Found(value)

    async def _probe_record(self, record: Any) -> Any:
        del record
        return await self._probe()

    # ------------------------------------------------------------------------------------------------- faults

    def _strike(self, fault: Fault) -> None:
        tag = f"w{fault.worker}.{self._incarnation[fault.worker]}"
        self.reached[fault.kind] += 1
        self.say(f"fault {fault.kind} {tag}")
        match fault.kind:
            case "kill":
                self._kill(fault.worker, tag)
            case "pause":
                self._pause(tag, fault.span)
            case "cancel":
                for call in self._calls.get(fault.worker, ())[:1]:
                    call.cancel()
            case "store-down":
                self.server.down = True
                self.loop.call_later(fault.span, self._up)
            case "failover":
                self.server.fail_over(fault.span)
            case "clock":
                self.server.skew += fault.span

    def _up(self) -> None:
        self.server.down = False

    def _kill(self, number: int, tag: str) -> None:
        if self.loop.is_dead(tag):
            return
        self.loop.kill(tag)
        answered = Counter((answer.key, answer.kind) for answer in self.answers if answer.worker == tag)
        left: list[Op] = []
        for op in self.plan.workers[number]:
            if answered[op.key, op.kind] > 0:
                answered[op.key, op.kind] -= 1
            else:
                left.append(op)
        # The client of a killed worker asks again, with the same key, once it is back.
        self._returning += 1
        token = worker_tag.set("")
        try:
            self.loop.call_later(self.plan.lease / 4, self._restart, number, tuple(left))
        finally:
            worker_tag.reset(token)

    def _restart(self, number: int, ops: tuple[Op, ...]) -> None:
        self._returning -= 1
        self._restarted.append(self._start(number, ops))

    def _pause(self, tag: str, span: float) -> None:
        self.loop.pause(tag)
        token = worker_tag.set("")
        try:
            self.loop.call_later(span, self.loop.resume, tag)
        finally:
            worker_tag.reset(token)

    def _at_point(self, name: str) -> None:
        tag = worker_tag.get()
        self.reached[name] += 1
        self._passes[tag, name] += 1
        for fault in self.plan.faults:
            due = fault.point == name and self._passes[tag, name] == fault.nth
            if due and tag == f"w{fault.worker}.1":
                self.reached[f"{fault.kind}@{name}"] += 1
                self.say(f"fault {fault.kind} at {name}")
                if fault.kind == "kill-at-point":
                    self._kill(fault.worker, tag)
                else:
                    self._pause(tag, fault.span)

    # -------------------------------------------------------------------------------------------------- audit

    async def _audit(self) -> None:
        """After the faults: every key must be answered, or say that it is unknown, within a lease and a bit."""
        token = worker_tag.set("audit.1")
        try:
            face = self._face(99, "audit.1")
            for key in sorted({op.key for ops in self.plan.workers for op in ops}):
                op = Op(key, 0.0, 0.0, 3 * self.plan.lease + 4 * TIMEOUT + 20 * self.plan.latency)
                for _ in range(5):
                    await self._client(face, "audit.1", op, 0)
                    # A slow reply is not the flow's fault: a client asks again, as the error tells it to.
                    if self.answers[-1].error not in ("StoreUnavailable", "NotRecorded"):
                        break
                    self.answers.pop()
        finally:
            worker_tag.reset(token)


async def _same(value: str) -> str:
    return value
