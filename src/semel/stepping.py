"""Durable steps and ids of a run: done once, remembered, skipped when the run is resumed (R25, R26)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from semel import ids, steps
from semel.calls import LAZY, name_of, not_run, refuse_generator
from semel.codec import Codec
from semel.debts import Debts
from semel.errors import (
    CodecError,
    ConfigurationError,
    KeyMismatch,
    LeaseLost,
    OutcomeUnknown,
    StoreUnavailable,
)
from semel.keys import check_key, fingerprint
from semel.model import Answer, Note
from semel.options import NOT_FOUND, Found, check_probe, checked_policy
from semel.points import reach
from semel.results import codec_for
from semel.run import Run
from semel.runtime import Parker, Runtime
from semel.store import Store

__all__ = ["Stepper"]

_TOO_LARGE = "too large"
_inside: ContextVar[tuple[list[Parker], ...]] = ContextVar("semel_steps", default=())
"""The steps that this code is a part of, each by the list of those who wait for it."""


class Stepper:
    def __init__(self, store: Store, runtime: Runtime, debts: Debts, *, settle_timeout: float) -> None:
        self._store = store
        self._runtime = runtime
        self._debts = debts
        self._settle_timeout = settle_timeout

    async def step(
        self,
        run: Run,
        name: str,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        request: Any,
        result_type: Any,
        on_unknown: Any,
    ) -> Any:
        check_key(name)
        if not callable(fn):
            raise ConfigurationError(
                f"step {name!r} needs a function, not {fn!r}: run.step(name, fn, *arguments)"
            )
        refuse_generator(fn)
        if on_unknown is not None:
            checked_policy(on_unknown, plain=self._runtime.colour == "sync")
        if name.startswith("id:"):
            raise ConfigurationError(
                f"a step's name may not begin with 'id:', as {name!r} does: ids are kept there"
            )
        codec = codec_for(fn, result_type)
        wanted = "" if request is None else fingerprint(request)
        mine = await self._alone(run, name)
        outer = _inside.set((*_inside.get(), mine))
        try:
            known = run.steps.get(name)
            if known is not None and wanted and known.fingerprint and wanted != known.fingerprint:
                raise KeyMismatch(f"step {name!r} of {name_of(run.call)} was made with another request")
            if known is not None and known.phase == "done":
                return self._remembered(run, known, codec)
            policy = _inherited(run) if on_unknown is None else on_unknown
            return await self._make(run, name, fn, args, kwargs, codec, wanted, policy, known)
        finally:
            _inside.reset(outer)
            self._next(run, name)

    async def _alone(self, run: Run, name: str) -> list[Parker]:
        """One name, one step, also for callers at the same time: the others wait for the first and get its result."""
        mine: list[Parker] = []
        while (waiting := run.in_flight.setdefault(name, mine)) is not mine:
            if any(waiting is each for each in _inside.get()):
                raise ConfigurationError(
                    f"step {name!r} of {name_of(run.call)} is used inside of itself, and cannot wait for its own end: give "
                    "the inner one another name"
                )
            parker = self._runtime.parker()
            waiting.append(parker)
            await parker.park(1.0)
        return mine

    @staticmethod
    def _next(run: Run, name: str) -> None:
        for parker in run.in_flight.pop(name, ()):
            parker.wake()

    @staticmethod
    def _remembered(run: Run, known: steps.Step, codec: Codec) -> Any:
        if not known.value:
            why = (
                f"too large: the steps of a run hold at most {steps.MAX_BYTES} bytes together"
                if known.marker == _TOO_LARGE
                else "one that cannot be encoded"
            )
            raise CodecError(
                f"step {known.name!r} of {name_of(run.call)} is done and is not made again, but its result was not kept: it "
                f"was {why}. Catch this error and look the result up where the step has made it; let the step return a ref (an "
                "id, a path) instead of its data"
            )
        return codec.decode(known.value)

    async def _make(
        self,
        run: Run,
        name: str,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        codec: Codec,
        wanted: str,
        policy: Any,
        known: steps.Step | None,
    ) -> Any:
        if known is not None:
            found = await self._probe_step(run, name, policy, args)
            if found is not None:
                await self._note(
                    run, steps.Step(name, "done", run.clock(), codec.encode(found.value), wanted)
                )
                return found.value
        elif policy != "retry":
            await self._note(run, steps.Step(name, "started", run.clock(), b"", wanted))
        self._check_room(run, name, 0)
        self._check_owner(run, name)
        reach("step.started")
        value = await self._runtime.call(fn, args, kwargs, run.call.options.inline)
        if value.__class__ in LAZY:
            raise not_run(run.call, value)
        reach("step.returned")
        problem: Exception | None = None
        marker = ""
        try:
            data = codec.encode(value)
            self._check_room(run, name, len(data))
        except (CodecError, ConfigurationError) as error:
            # The effect has happened: remember that much, so that it is never made again.
            data, problem = b"", error
            marker = _TOO_LARGE if isinstance(error, ConfigurationError) else ""
        done = steps.Step(name, "done", run.clock(), data, wanted, marker)
        try:
            await self._keep(run, done)
        except Exception:
            raise
        except BaseException:
            # Cancelled in the middle of the write: the effect has happened. A note that is sent twice is harmless.
            await self._runtime.protect(self._keep(run, done))
            raise
        reach("step.stored")
        if problem is not None:
            raise problem
        return value

    async def _keep(self, run: Run, done: steps.Step) -> None:
        """The step's effect has happened: offer its note until the store takes it, or `settle_timeout` is over."""
        until = self._runtime.now() + self._settle_timeout
        pause = 0.02
        while True:
            try:
                return await self._note(run, done)
            except StoreUnavailable:
                if self._runtime.now() >= until:
                    raise
            await self._runtime.sleep(min(pause, max(0.0, until - self._runtime.now())))
            pause = min(pause * 2, 0.5)

    async def _probe_step(self, run: Run, name: str, policy: Any, args: Sequence[Any]) -> Found | None:
        """A step was started by an attempt that was lost: Found, None to run it (again), or OutcomeUnknown."""
        if policy == "retry":
            return None
        answer = (
            await self._runtime.call(policy, args, {}, run.call.options.inline) if callable(policy) else None
        )
        if callable(policy):
            check_probe(answer)
        if isinstance(answer, Found):
            return answer
        if answer is NOT_FOUND:
            return None
        run.stuck = True
        raise OutcomeUnknown(
            f"it is not known whether step {name!r} of {name_of(run.call)} happened: look it up. If it did not, call "
            "resolve(key, release=True): the next caller makes it, and what is finished stays. If it did, end the run with "
            "resolve(key, value=…) or resolve(key, error=…)",
            attempt=run.attempt,
        )

    async def new_id(self, run: Run, kind: str, name: str) -> str:
        if name != kind:
            check_key(name)
        label = f"id:{name}"
        await self._alone(run, label)
        try:
            known = run.steps.get(label)
            if known is None:
                text = ids.mint(kind, int(run.clock() * 1000), self._runtime.entropy(10)).text
                self._check_room(run, label, len(text))
                await self._note(run, steps.Step(label, "id", run.clock(), text.encode()))
            else:
                text = ids.parse(known.value.decode(), kind).text
        finally:
            self._next(run, label)
        if run.ref is None:
            run.ref = text
        return text

    @staticmethod
    def _check_owner(run: Run, name: str) -> None:
        """Before the effect: whoever knows that the key is not his any more makes no step (R17)."""
        if run.lease_lost:
            raise LeaseLost(
                f"{name_of(run.call)} was taken over by another owner; step {name!r} was not made"
            )
        if run.settling:
            raise ConfigurationError(f"{name_of(run.call)} has ended: it takes no more steps ({name!r})")

    @staticmethod
    def _check_room(run: Run, name: str, size: int) -> None:
        known = run.steps
        if len(known) >= steps.MAX_STEPS and name not in known:
            raise ConfigurationError(f"a run has at most {steps.MAX_STEPS} steps; {name!r} would be one more")
        if sum(len(each.value) + len(each.name) + 32 for each in known.values()) + size > steps.MAX_BYTES:
            raise ConfigurationError(
                f"the steps of a run hold at most {steps.MAX_BYTES} bytes together; with {name!r} they would "
                "hold more: return a ref from the step instead of its data"
            )

    async def _note(self, run: Run, step: steps.Step) -> None:
        note = Note(run.scope, run.ask.nonce, steps.encode(step))
        try:
            answer = await self._store.note(note)
            if answer is Answer.GONE and await self._debts.reclaim(run):
                # The store lost the record, nobody took it over: the same nonce claims it again.
                answer = await self._store.note(note)
        except StoreUnavailable as error:
            run.unheard = error
            raise
        if answer is Answer.REFUSED:
            raise ConfigurationError(f"{name_of(run.call)} has ended: it takes no more steps ({step.name!r})")
        if answer is not Answer.OK:
            run.lease_lost = True
            raise LeaseLost(f"{name_of(run.call)} was taken over; step {step.name!r} was not accepted")
        run.steps[step.name] = step


def _inherited(run: Run) -> Any:
    """The policy of a step that names none. The call's probe is about the call: what it says of a step is no answer."""
    policy = run.call.options.on_unknown
    return "hold" if callable(policy) else policy
