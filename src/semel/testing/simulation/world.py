"""One world: the real flow of several workers over one simulated server, from a plan, with everything written down."""

from __future__ import annotations

import asyncio
import gc
import types
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from functools import partial
from random import Random
from typing import Any

from semel import points
from semel.errors import CodecError, SemelError
from semel.model import State
from semel.results import codec_for
from semel.run import Run
from semel.testing.simulation import faces
from semel.testing.simulation.auditor import name_of
from semel.testing.simulation.clients import policy_of, probe_record
from semel.testing.simulation.failures import Flaw
from semel.testing.simulation.loop import Clock, SimLoop, worker_tag
from semel.testing.simulation.plans import NETWORK, Fault, Op, Plan
from semel.testing.simulation.posts import QuickLink
from semel.testing.simulation.stores import Link, Server
from semel.testing.simulation.workloads import workload_of

__all__ = ["Answered", "Effect", "World"]

TIMEOUT = 0.4
SETTLE_TIMEOUT = 1.0
LONGEST = 150.0  # virtual seconds: by then every world has come to rest, or never will

# Under these a worker may not know yet that it has released a key.
_MUDDLED = NETWORK | {"pause", "pause-at-point", "store-down", "failover", "clock", "worker-clock"}

_call_tag: ContextVar[str] = ContextVar("semel_sim_call", default="")
_CODEC = codec_for(None, str)


class Effect:
    __slots__ = ("at", "name", "request", "value", "worker")

    def __init__(self, at: float, name: str, worker: str, value: str, request: int) -> None:
        self.at, self.name, self.worker, self.value, self.request = at, name, worker, value, request


class Answered:
    """What a client was told: a value, or the name of an error."""

    __slots__ = ("at", "began", "call", "error", "op", "ref", "replayed", "value", "worker")

    def __init__(self, op: Op, worker: str, began: float, call: str = "") -> None:
        self.op, self.worker, self.began, self.call = op, worker, began, call
        self.at = 0.0
        self.value: Any = None
        self.error = ""
        self.replayed = False
        self.ref: str | None = None


class World:
    """Made from a plan, run once.

    A workload's calls may use `begin`, `happen`, `say`, `plain`, `check_owner`, `count`, `downstream`, `broken` and `server`.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.loop = SimLoop()
        self.server = Server(self.loop, tx=plan.mode == "tx", lossy=plan.lossy)
        self.effects: list[Effect] = []
        self.answers: list[Answered] = []
        self.trace: list[str] = []
        self.reached: Counter[str] = Counter()
        """Points that were passed, and faults that struck something: one aimed at who is dead or done is none."""
        self.broken: list[str] = []
        self.started: set[str] = set()
        self.ran: set[bytes] = set()
        self.executed: dict[str, bytes] = {}
        """By call: the nonce under which its function was begun last."""
        self.made: list[tuple[Op, bytes, str]] = []
        """Steps whose function has returned: of which call, under which nonce, their names."""
        self.faces: dict[str, Any] = {}
        """By worker: what its clients call."""
        self.downstream: dict[str, str] = {}
        self.done_outside: dict[str, str] = {}
        self.count = 0
        self.looks = 0
        self.finished_at: float | None = None
        self.asked_again = 0
        self.histories = 0
        self.undecided = 0
        self._calm_at = 0.0
        self._calls = workload_of(plan.workload).calls
        self._senders: dict[bytes, str] = {}
        self._passes: Counter[tuple[str, str]] = Counter()
        self._tasks: dict[int, list[asyncio.Task[None]]] = {}
        self._by_call: dict[str, asyncio.Task[None]] = {}
        self._under_way: dict[asyncio.Task[None] | None, str] = {}
        """Clients whose calls have begun and not ended, with their workers: what a fault can strike."""
        self._incarnation: Counter[int] = Counter()
        self._restarted: list[asyncio.Task[None]] = []
        self._returning = 0
        self._called = 0
        self._links: dict[str, Link] = {}
        self._cancelled: set[asyncio.Task[None] | None] = set()

    # ----------------------------------------------------------------------------------------------- running

    def run(self) -> World:
        points.listen(self._at_point)
        # When cycles are collected depends on everything that ran before, and a run that nobody holds any more (see
        # Heart) would end with them: a seed must mean the same alone and among others.
        collects = gc.isenabled()
        gc.disable()
        try:
            self.loop.run_until_complete(self._live())
        finally:
            points.listen(None)
            self.loop.graveyard.append(self)
            if collects:
                gc.enable()
        return self

    def say(self, text: str) -> None:
        self.trace.append(f"{self.loop.now:.6f} {worker_tag.get() or '-'} {text}")

    def begin(self, op: Op, run: Run) -> None:
        """A client's function begins."""
        self.started.add(op.name)
        self.ran.add(run.ask.nonce)
        self.executed[_call_tag.get()] = run.ask.nonce

    def happen(self, op: Op, value: str) -> None:
        """An effect on the world outside."""
        self.effects.append(Effect(self.loop.now, op.name, worker_tag.get(), value, op.request))
        self.done_outside.setdefault(op.name, value)
        self.say(f"effect {value}")

    def plain(self, fn: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Callable[..., Any]:
        """A coroutine function and its first arguments as what a face of this world's colour can run."""
        return partial(fn, *args) if self.plan.colour == "async" else partial(faces.plainly(), fn, *args)

    def check_owner(self, run: Run) -> None:
        """R17: who was told that the key is another's now is stopped where he stands."""
        lost = run.ask.nonce in self._links[worker_tag.get()].told_lost
        if lost and not self.plan.warns and self.plan.colour == "async":
            self.broken.append(f"R17: a run of {run.key} went on after it was told that its lease is lost")

    @staticmethod
    def decoded(result: bytes) -> str | None:
        try:
            value: str = _CODEC.decode(result)
        except CodecError:
            return None
        return value

    def _entropy_of(self, rng: Random) -> Callable[[int], bytes]:
        def entropy(size: int) -> bytes:
            drawn = rng.randbytes(size)
            self._senders[drawn] = _call_tag.get()
            return drawn

        return entropy

    async def _live(self) -> None:
        tasks = [self._start(number, ops) for number, ops in enumerate(self.plan.workers)]
        for fault in self.plan.faults:
            if fault.at:
                self.loop.call_later(fault.at, self._strike, fault)
        while True:
            everybody = (*tasks, *self._restarted)
            alive = [task for task in everybody if not task.done() and not self.loop.is_dead(task.get_name())]
            if not alive and not self._returning:
                break
            if self.loop.now > LONGEST:
                self.say("never at rest")
                return
            await asyncio.wait(alive, timeout=self.plan.lease) if alive else await asyncio.sleep(
                self.plan.lease
            )
        latest = max((fault.at + max(fault.span, 0) for fault in self.plan.faults), default=0.0)
        await asyncio.sleep(max(0.0, latest - self.loop.now) + 4 * self.plan.lease)
        await self._audit()
        self.finished_at = self.loop.now

    def _start(self, number: int, ops: tuple[Op, ...]) -> asyncio.Task[None]:
        self._incarnation[number] += 1
        tag = f"w{number}.{self._incarnation[number]}"
        if self.plan.clocks:
            self.loop.set_clock(tag, Clock(*self.plan.clocks[number]))
        token = worker_tag.set(tag)
        try:
            return self.loop.create_task(self._work(number, tag, ops), name=tag)
        finally:
            worker_tag.reset(token)

    async def _work(self, number: int, tag: str, ops: tuple[Op, ...]) -> None:
        face = self._face(number, tag)
        awaits = [
            fault.nth
            for fault in self.plan.faults
            if fault.kind == "cancel-at-await" and fault.worker == number and tag.endswith(".1")
        ]
        tasks: list[asyncio.Task[None]] = []
        for index, op in enumerate(ops):
            client = self._client(face, tag, op)
            if awaits and index == 0:
                client = _stopped(client, awaits[0], partial(self._cancel_at_await, tasks))
            tasks.append(self.loop.create_task(client))
        self._tasks[number] = tasks
        await asyncio.gather(*tasks, return_exceptions=True)

    def _face(self, number: int, tag: str) -> Any:
        plan = self.plan
        mine = [fault for fault in plan.faults if fault.worker == number and tag.endswith(".1")]
        incidents = {fault.nth: fault.kind for fault in mine if fault.kind in NETWORK}
        link = self._links[tag] = Link(
            self.server,
            Random(f"{plan.seed}/{tag}/net"),  # noqa: S311 - repeatable on purpose
            latency=plan.latency,
            timeout=TIMEOUT,
            incidents=incidents,
            batches=plan.batches,
            notifies=plan.notifies,
            reached=self.reached,
            lost_wakes=frozenset(fault.nth for fault in mine if fault.kind == "lose-wake"),
        )
        face = faces.face_of(
            plan.colour,
            QuickLink(link, self.loop.time, TIMEOUT) if plan.posts else link,
            self._entropy_of(Random(f"{plan.seed}/{tag}/nonce")),  # noqa: S311 - repeatable on purpose
            lease=plan.lease,
            timeout=TIMEOUT,
            settle_timeout=SETTLE_TIMEOUT,
            on_unknown=policy_of(self),
            on_lease_lost="warn" if plan.warns else "cancel",
            retention=plan.retention,
            tombstone=plan.tombstone,
            purge_every=plan.purge_every,
            cache=16 if plan.cache else 0,
        )
        self.faces[tag] = face
        if plan.mode == "probe":
            face.recovery("default", probe=self.plain(probe_record, self))
        return face

    @property
    def calm_at(self) -> float:
        """From then on nothing went wrong any more."""
        return max(self._calm_at, *(link.troubled_until for link in self._links.values()), 0.0)

    def _troubled(self, seconds: float = 0.0) -> None:
        self._calm_at = max(self._calm_at, self.loop.now + seconds)

    # ------------------------------------------------------------------------------------------------ clients

    async def _client(self, face: Any, tag: str, op: Op) -> None:
        self._called += 1
        name = f"{tag}/{self._called}"
        _call_tag.set(name)
        task = asyncio.current_task()
        if task is not None:
            self._by_call[name] = task
        await asyncio.sleep(op.after)
        answered = Answered(op, tag, self.loop.now, name)
        self._under_way[task] = tag
        self.say(f"call {op.kind} {op.name}")
        try:
            call = self._calls[op.kind](self, face, op, answered)
            await (call if self.plan.colour == "async" else faces.in_greenlet()(call))
        except (SemelError, Flaw) as error:
            answered.error = type(error).__name__
            if answered.error == "InProgress" and op.kind in ("execute", "consume", "claim"):
                self._check_blocked(name, op)
                self._check_followed(answered)
        except asyncio.CancelledError:
            answered.error = "CancelledError"
            if task not in self._cancelled:
                self.broken.append(f"R10: a caller of {op.name} was cancelled by nobody")
            raise
        finally:
            if not self.loop.is_dead(tag):
                self._under_way.pop(task, None)
                answered.at = self.loop.now
                self.answers.append(answered)
                self.say(f"told {op.kind} {op.name} {answered.value or answered.error}")

    def _check_blocked(self, call: str, op: Op) -> None:
        """R16: nobody waits for a claim of his own whose answer was lost. A copy that the network made is not his own.

        Nor is one that was granted after he was told, of another copy, that the key is somebody else's.
        """
        server = self.server
        copies = server.granted_late | server.granted_to_copies.keys()
        for record in server._records.values():
            mine = self._senders.get(record.nonce) == call and record.nonce not in copies
            if record.state is State.RUNNING and mine:
                self.broken.append(f"R16: a caller of {op.name} was told to wait for its own claim")

    def _check_followed(self, answered: Answered) -> None:
        """R31: who gave up leads nobody. A key that was free when he asked, and still is, is refused to nobody."""
        if self.plan.kinds & _MUDDLED:
            return
        asked_at = (
            1_000_000.0 + answered.began - 15 * self.plan.latency
        )  # the release's own answer takes its time
        for record in self.server._records.values():
            named = record.scope is not None and name_of(record.scope) == answered.op.name
            free_from = max(record.updated, record.not_before)
            if named and record.state is State.RELEASED and free_from < asked_at:
                self.broken.append(
                    f"R31: a caller of {answered.op.name} was told to wait for who had given up"
                )

    # ------------------------------------------------------------------------------------------------- faults

    def _strike(self, fault: Fault) -> None:
        tag = f"w{fault.worker}.{self._incarnation[fault.worker]}"
        self.say(f"fault {fault.kind} {tag}")
        self._troubled(fault.span if fault.kind == "store-down" else 0.0)
        if self._struck(fault, tag):
            self.reached[fault.kind] += 1

    def _struck(self, fault: Fault, tag: str) -> bool:
        """Whether it struck something. Of a store that is down this is known when it is up again."""
        match fault.kind:
            case "kill":
                return self._kill(fault.worker, tag)
            case "pause":
                return self._pause(tag, fault.span)
            case "cancel":
                tasks = self._tasks.get(fault.worker, [])
                chosen = tasks[(fault.nth - 1) % max(1, len(tasks)) :][:1]
                return any(self._cancel(task) for task in chosen)
            case "store-down":
                self.server.down = True
                self.loop.call_later(fault.span, self._up)
                return False
            case "failover":
                return self.server.fail_over(fault.span)
            case "worker-clock":
                self.loop.jump(tag, fault.span)
                return self._is_at_work(tag)
            case _:
                self.server.skew += fault.span
                return bool(self.server._records)

    def _is_at_work(self, tag: str) -> bool:
        return tag in self._under_way.values() and not self.loop.is_dead(tag)

    def _up(self) -> None:
        self.server.down = False
        if self.server.turned_away:
            self.reached["store-down"] += 1
            self.server.turned_away = 0

    def _kill(self, number: int, tag: str) -> bool:
        if self.loop.is_dead(tag):
            return False
        struck = self._is_at_work(tag)
        self.loop.kill(tag)
        answered = Counter(answer.op for answer in self.answers if answer.worker == tag)
        left: list[Op] = []
        for op in self.plan.workers[number]:
            if answered[op] > 0:
                answered[op] -= 1
            else:
                left.append(op)
        # The client of a killed worker asks again, with the same key, once it is back.
        self._returning += 1
        self._troubled(self.plan.lease / 4)
        self._from_outside(self.plan.lease / 4, self._restart, number, tuple(left))
        return struck and self.loop.is_dead(tag)

    def _from_outside(self, delay: float, then: Callable[..., object], *args: Any) -> None:
        token = worker_tag.set("")
        try:
            self.loop.call_later(delay, then, *args)
        finally:
            worker_tag.reset(token)

    def _restart(self, number: int, ops: tuple[Op, ...]) -> None:
        self._returning -= 1
        self._restarted.append(self._start(number, ops))

    def _pause(self, tag: str, span: float) -> bool:
        struck = self._is_at_work(tag) and not self.loop.is_stopped(tag)
        self.loop.pause(tag)
        self._troubled(span)
        self._from_outside(span, self.loop.resume, tag)
        return struck and self.loop.is_stopped(tag)

    def _cancel_at_await(self, tasks: list[asyncio.Task[None]]) -> None:
        self.say("fault cancel-at-await")
        self.loop.call_soon(self._cancel_awaiting, tasks[0])

    def _cancel_awaiting(self, task: asyncio.Task[None]) -> None:
        if self._cancel(task):
            self.reached["cancel-at-await"] += 1

    def _cancel(self, task: asyncio.Task[None]) -> bool:
        tag = self._under_way.get(task)
        self._cancelled.add(task)
        self._troubled()
        return task.cancel() and tag is not None and not self.loop.is_dead(tag)

    def _at_point(self, name: str) -> None:
        tag = worker_tag.get()
        self.reached[name] += 1
        self._passes[tag, name] += 1
        for fault in self.plan.faults:
            if fault.point != name or self._passes[tag, name] != fault.nth or tag != f"w{fault.worker}.1":
                continue
            self.say(f"fault {fault.kind} at {name}")
            if self._struck_at_point(fault, tag):
                self.reached[f"{fault.kind}@{name}"] += 1

    def _struck_at_point(self, fault: Fault, tag: str) -> bool:
        match fault.kind:
            case "kill-at-point":
                return self._kill(fault.worker, tag)
            case "pause-at-point":
                return self._pause(tag, fault.span)
            case _:
                return self._cancel(self._by_call[_call_tag.get()])

    # -------------------------------------------------------------------------------------------------- audit

    async def _audit(self) -> None:
        """After the faults: every key must be answered, or say that it is unknown, within a lease and a bit."""
        token = worker_tag.set("audit.1")
        wait = 3 * self.plan.lease + 4 * TIMEOUT + 20 * self.plan.latency
        try:
            face = self._face(99, "audit.1")
            scopes = {(op.tenant, op.operation, op.key) for ops in self.plan.workers for op in ops}
            for tenant, operation, key in sorted(scopes):
                op = Op(key, 0.0, 0.0, wait, tenant=tenant, operation=operation)
                for _ in range(5):
                    await self._client(face, "audit.1", op)
                    # A slow reply is not the flow's fault: a client asks again, as the error tells it to.
                    if self.answers[-1].error not in ("StoreUnavailable", "NotRecorded"):
                        break
                    self.answers.pop()
                    self.asked_again += 1
        finally:
            worker_tag.reset(token)


async def _stopped(coroutine: Coroutine[Any, Any, None], nth: int, strike: Callable[[], None]) -> None:
    await _driven(coroutine, nth, strike)


@types.coroutine
def _driven(
    coroutine: Coroutine[Any, Any, None], nth: int, strike: Callable[[], None]
) -> Generator[Any, Any, None]:
    """Drive a coroutine and strike when it is suspended for the nth time."""
    error: BaseException | None = None
    while True:
        try:
            waits_for = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration:
            return
        nth -= 1
        if nth == 0:
            strike()
        try:
            yield waits_for
            error = None
        except BaseException as raised:  # noqa: BLE001 - it belongs to the coroutine
            error = raised
