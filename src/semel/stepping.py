"""Durable steps and ids of a run: done once, remembered, skipped when the run is resumed (R25, R26)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import isawaitable, iscoroutine
from typing import Any

import msgspec

from semel import ids, steps
from semel.calls import check_arguments, is_lazy, name_of, not_run, refuse_generator
from semel.codec import Codec
from semel.coroutines import refuse_async
from semel.debts import Debts
from semel.errors import (
    CodecError,
    ConfigurationError,
    KeyMismatch,
    LeaseLost,
    OutcomeUnknown,
    SemelError,
    StoreUnavailable,
)
from semel.keys import check_name, fingerprint
from semel.model import Answer, Note, Policy
from semel.options import NOT_FOUND, Found, check_probe, checked_policy, checked_type
from semel.points import reach
from semel.results import codec_for
from semel.run import Run
from semel.runtime import Runtime, in_spite_of
from semel.store import Store
from semel.turns import Turn, inside

__all__ = ["Stepper"]

_log = logging.getLogger("semel")

_TOO_LARGE, _REFUSED = "too large", "refused"
_NOT_KEPT = {
    _TOO_LARGE: f"too large: the steps of a run hold at most {steps.MAX_BYTES} bytes together",
    _REFUSED: "more than the store takes",
}
"""Why the result of a step was not kept, by its marker."""


@dataclass(slots=True)
class _Asked:
    """A step that is asked for, with everything checked."""

    run: Run
    turn: Turn
    name: str
    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    codec: Codec
    wanted: str
    policy: Any


@dataclass(slots=True)
class _Made:
    """What a thread has made of a step."""

    value: Any
    promised: bool = False
    """Whoever asked has to wait for it himself: a coroutine can be stopped, wherever it comes from."""
    error: BaseException | None = None


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
        check_name("the name of a step", name)
        if not callable(fn):
            raise ConfigurationError(
                f"step {name!r} needs a function, not {fn!r}: run.step(name, fn, *arguments)"
            )
        refuse_generator(fn)
        if self._runtime.colour == "sync":
            refuse_async(f"step {name!r}", fn, "use AsyncSemel to run it")
        if on_unknown is not None:
            checked_policy(on_unknown, plain=self._runtime.colour == "sync")
        if name.startswith("id:"):
            raise ConfigurationError(
                f"a step's name may not begin with 'id:', as {name!r} does: ids are kept there"
            )
        check_arguments(fn, kwargs)
        codec = codec_for(fn, checked_type(result_type))
        wanted = "" if request is None else fingerprint(request)
        turn = Turn(run, name)
        try:
            await turn.take(self._runtime)
            with inside(turn):
                known = run.steps.get(name)
                if known is not None and wanted and known.fingerprint and wanted != known.fingerprint:
                    raise KeyMismatch(
                        f"step {name!r} of {name_of(run.call)} was made with another request: give a step that asks for "
                        "something else a name of its own, or the request that it had"
                    )
                if known is not None and known.phase == "done":
                    if run in self._debts.bare:
                        await self._keep(run, known)  # it was made here, and the store has not heard of it
                    return self._remembered(run, known, codec)
                policy = _inherited(run) if on_unknown is None else on_unknown
                asked = _Asked(run, turn, name, fn, args, kwargs, codec, wanted, policy)
                return await self._make(asked, known)
        finally:
            try:
                turn.leave()
            except BaseException:
                turn.leave()  # cut off by a signal's handler: the run would wait for a step that is over, for good
                raise

    @staticmethod
    def _remembered(run: Run, known: steps.Step, codec: Codec) -> Any:
        if not known.value:
            why = _NOT_KEPT.get(known.marker, "one that cannot be encoded")
            raise CodecError(
                f"step {known.name!r} of {name_of(run.call)} is done and is not made again, but its result was not kept: it "
                f"was {why}. Catch this error and look the result up where the step has made it; let the step return a ref (an "
                "id, a path) instead of its data"
            )
        return codec.decode(known.value)

    async def _make(self, asked: _Asked, known: steps.Step | None) -> Any:
        run, name, policy = asked.run, asked.name, asked.policy
        if known is not None:
            found = await self._probe_step(asked, known)
            if found is not None:
                asked.codec.encode(found.value)  # one that cannot be is the probe's mistake: the mark stays
                return await self._kept(asked, found.value)
        self._check_number(run, name)
        self._check_room(run, name, 0)
        self._check_owner(run, name)
        if known is None and policy != "retry":
            marker = steps.PROBE if callable(policy) else steps.HOLD
            await self._note(run, steps.Step(name, "started", run.clock(), b"", asked.wanted, marker))
            await self._check_still_owner(asked)
        reach("step.started")
        if not self._runtime.detaches(asked.fn, run.call.options.inline):
            return await self._kept(asked, await self._called(asked))
        made = await self._runtime.detach(self._left_alone(asked))
        if made.error is not None:
            raise made.error
        return await self._kept(asked, await made.value) if made.promised else made.value

    def _called(self, asked: _Asked) -> Awaitable[Any]:
        if self._runtime.colour == "sync":
            return self._runtime.raw(asked.fn, asked.args, asked.kwargs)
        return self._runtime.call(asked.fn, asked.args, asked.kwargs, asked.run.call.options.inline)

    async def _left_alone(self, asked: _Asked) -> _Made:
        """A thread cannot be stopped. Its result is remembered, and its name taken, though whoever asked for it has gone."""
        turn = asked.turn
        turn.alone = True
        try:
            value = await self._runtime.raw(asked.fn, asked.args, asked.kwargs)
            if not isawaitable(value):
                return _Made(await self._kept(asked, value))
            if not turn.left:
                turn.alone = False
                return _Made(value, promised=True)
            if iscoroutine(value):
                value.close()
            return _Made(None)
        except (KeyboardInterrupt, SystemExit) as error:
            self._tell_nobody_asked(asked, error)
            return _Made(None, error=error)  # raised here it would end the loop, before the run is settled
        except Exception as error:
            self._tell_nobody_asked(asked, error)
            raise
        finally:
            if turn.alone:
                try:
                    turn.end()
                except BaseException:
                    turn.end()  # as in `step`
                    raise

    @staticmethod
    def _tell_nobody_asked(asked: _Asked, error: BaseException) -> None:
        if asked.turn.left:
            _log.error("%s failed when whoever asked for it had gone", asked.turn, exc_info=error)

    async def _kept(self, asked: _Asked, value: Any) -> Any:
        """The value of a step that has been made, remembered."""
        run = asked.run
        if is_lazy(value):
            # Its mark stays: what the function did before it returned has happened.
            raise not_run(run.call, value, self._runtime.colour)
        done: steps.Step | None = None
        try:
            reach("step.returned")
            done, problem = self._done(run, asked.name, value, asked.codec, asked.wanted)
            problem = await self._keep(run, done) or problem
        except Exception:
            raise
        except BaseException as error:
            # Cancelled in the middle of the write, or interrupted before it: the effect has happened. A note that is sent twice is
            # harmless. What is raised is the cancellation: an error of the store in its place might be handled, and the function
            # go on.
            with suppress(SemelError):
                done = done or self._done(run, asked.name, value, asked.codec, asked.wanted)[0]
                await in_spite_of(error, self._runtime, self._runtime.protect(self._keep(run, done)))
            raise
        reach("step.stored")
        if problem is not None:
            raise problem
        return value

    def _done(
        self, run: Run, name: str, value: Any, codec: Codec, wanted: str
    ) -> tuple[steps.Step, Exception | None]:
        """The effect has happened: what is remembered of it, at least that much, and why not its result."""
        data, marker = b"", ""
        problem: Exception | None = None
        try:
            data = codec.encode(value)
            self._check_room(run, name, len(data))
        except CodecError as error:
            problem = error
        except ConfigurationError as error:
            data, marker, problem = b"", _TOO_LARGE, error
        return steps.Step(name, "done", run.clock(), data, wanted, marker), problem

    async def _keep(self, run: Run, done: steps.Step) -> CodecError | None:
        """Offer the note of an effect until the store takes it, or `settle_timeout` is over.

        A result that the store refuses is left out, and the refusal returned: the effect is never made again. Nor is one whose
        note had no answer: the run knows of it, and its next note or its end brings it along.
        """
        until = self._runtime.now() + self._settle_timeout
        pause = 0.02
        refusal: CodecError | None = None
        while True:
            try:
                await self._note(run, done)
            except StoreUnavailable:
                if self._runtime.now() >= until:
                    steps.add(run.steps, done)
                    self._debts.bare.add(run)
                    raise
            except CodecError as error:
                if not done.value:
                    raise
                refusal, done = error, msgspec.structs.replace(done, value=b"", marker=_REFUSED)
                continue
            else:
                return refusal
            await self._runtime.sleep(min(pause, max(0.0, until - self._runtime.now())))
            pause = min(pause * 2, 0.5)

    async def _probe_step(self, asked: _Asked, known: steps.Step) -> Found | None:
        """A step was started by an attempt that was lost: Found, None to run it (again), or OutcomeUnknown.

        Of the policy it was started under and the one that is asked now the stricter wins (R10, R11).
        """
        run, policy = asked.run, asked.policy
        answer: Any = None
        if callable(policy):
            answer = await self._runtime.call(policy, asked.args, {}, run.call.options.inline)
            check_probe(answer)
        if isinstance(answer, Found):
            return answer
        # A mark of an earlier version names no policy: then the one that is asked now counts.
        if answer is NOT_FOUND and known.marker in (steps.PROBE, ""):
            return None
        run.stuck = True
        raise OutcomeUnknown(
            f"it is not known whether step {asked.name!r} of {name_of(run.call)} happened: look it up. If it did not, call "
            "resolve(key, release=True): the next caller makes it, and what is finished stays. If it did, end the run with "
            "resolve(key, value=…) or resolve(key, error=…)",
            attempt=run.attempt,
        )

    async def new_id(self, run: Run, kind: str, name: str) -> str:
        if name != kind:
            check_name("the name of an id", name)
        label = f"id:{name}"
        turn = Turn(run, label)
        try:
            await turn.take(self._runtime)
            known = run.steps.get(label)
            if known is None:
                text = self._minted(run, kind, label)
                self._check_number(run, label)
                self._check_room(run, label, len(text))
                await self._note(run, steps.Step(label, "id", run.clock(), text.encode()))
            else:
                text = ids.parse(known.value.decode(), kind).text
        finally:
            try:
                turn.end()
            except BaseException:
                turn.end()  # as in `step`
                raise
        if run.ref is None or run.inherits_ref:
            run.set_ref(text)
        return text

    def _minted(self, run: Run, kind: str, label: str) -> str:
        """The id that was made before, if its note had no answer: it may be stored, and a late one would count."""
        text = run.minted.get(label)
        if text is not None:
            return ids.parse(text, kind).text
        text = run.minted[label] = ids.mint(kind, int(run.clock() * 1000), self._runtime.entropy(10)).text
        return text

    async def _check_still_owner(self, asked: _Asked) -> None:
        """After its mark. Where the run has ended meanwhile nothing of the step runs, and the mark would say that it may have."""
        run, name = asked.run, asked.name
        try:
            self._check_owner(run, name)
        except ConfigurationError:
            with suppress(SemelError):  # then the mark stays, which is the careful answer
                await self._note(run, steps.taken_back(name, run.clock()))
            raise

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
    def _check_number(run: Run, name: str) -> None:
        """Before the mark, and with those that are under way: after it there is no way back."""
        known = run.steps
        if name not in known and len(known.keys() | run.in_flight.keys()) > steps.MAX_STEPS:
            raise ConfigurationError(
                f"a run has at most {steps.MAX_STEPS} steps, ids among them; {name!r} would be one more: make fewer and larger steps, "
                "or give each part a run of its own (execute with a key of its own)"
            )

    @staticmethod
    def _check_room(run: Run, name: str, size: int) -> None:
        kept = tuple(run.steps.values())  # a copy: steps of other threads are remembered meanwhile
        if sum(len(each.value) + len(each.name) + 32 for each in kept) + size > steps.MAX_BYTES:
            raise ConfigurationError(
                f"the steps of a run hold at most {steps.MAX_BYTES} bytes together; with {name!r} they would "
                "hold more: return a ref from the step instead of its data"
            )

    async def _note(self, run: Run, step: steps.Step) -> None:
        run.check_process()
        try:
            answer = await self._noted(run, step)
            if answer is Answer.GONE and await self._debts.reclaim(run):
                # The store lost the record, nobody took it over: the same nonce claims it again.
                answer = await self._noted(run, step)
        except StoreUnavailable as error:
            run.unheard = error
            raise
        if answer is Answer.REFUSED and step.phase == "done":
            raise ConfigurationError(
                f"{name_of(run.call)} has ended before its step {step.name!r}, which was made: its result is not kept. Wait for "
                "every step before the function returns"
            )
        if answer is Answer.REFUSED:
            raise ConfigurationError(f"{name_of(run.call)} has ended: it takes no more steps ({step.name!r})")
        if answer is not Answer.OK:
            run.lease_lost = True
            raise LeaseLost(f"{name_of(run.call)} was taken over; step {step.name!r} was not accepted")
        steps.add(run.steps, step)

    async def _noted(self, run: Run, step: steps.Step) -> Answer:
        """One note; before it those that a record which was claimed again has lost."""
        if run in self._debts.bare:
            for known in tuple(run.steps.values()):
                answer = await self._store.note(Note(run.scope, run.ask.nonce, steps.encode(known)))
                if answer is not Answer.OK:
                    return answer
            self._debts.bare.discard(run)
        return await self._store.note(Note(run.scope, run.ask.nonce, steps.encode(step)))


def _inherited(run: Run) -> str:
    """The policy of a step that names none: its run's, the stricter of what was stored and what this caller asks for (R10).

    The call's probe is about the call: what it says of a step is no answer.
    """
    return "retry" if run.policy is Policy.RETRY else "hold"
