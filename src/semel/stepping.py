"""Durable steps and ids of a run: done once, remembered, skipped when the run is resumed (R25, R26)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from semel import ids, steps
from semel.calls import name_of
from semel.errors import ConfigurationError, KeyMismatch, LeaseLost, OutcomeUnknown, StoreUnavailable
from semel.keys import check_key, fingerprint
from semel.model import Answer, Note
from semel.options import NOT_FOUND, Found, check_probe
from semel.points import reach
from semel.results import codec_for
from semel.run import Run
from semel.runtime import Runtime
from semel.store import Store

__all__ = ["Stepper"]


class Stepper:
    def __init__(self, store: Store, runtime: Runtime, *, settle_timeout: float = 0.0) -> None:
        self._store = store
        self._runtime = runtime
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
        codec = codec_for(fn, result_type)
        wanted = "" if request is None else fingerprint(request)
        known = run.steps.get(name)
        if known is not None and wanted and known.fingerprint and wanted != known.fingerprint:
            raise KeyMismatch(f"step {name!r} of {name_of(run.call)} was made with another request")
        if known is not None and known.phase == "done":
            return codec.decode(known.value)
        policy = run.call.options.on_unknown if on_unknown is None else on_unknown
        if known is not None:
            found = await self._probe_step(run, name, policy, args)
            if found is not None:
                await self._note(
                    run, steps.Step(name, "done", run.clock(), codec.encode(found.value), wanted)
                )
                return found.value
        elif policy != "retry":
            await self._note(run, steps.Step(name, "started", run.clock(), b"", wanted))
        reach("step.started")
        value = await self._runtime.call(fn, args, kwargs, run.call.options.inline)
        reach("step.returned")
        done = steps.Step(name, "done", run.clock(), codec.encode(value), wanted)
        try:
            await self._keep(run, done)
        except Exception:
            raise
        except BaseException:
            # Cancelled in the middle of the write: the effect has happened. A note that is sent twice is harmless.
            await self._runtime.protect(self._keep(run, done))
            raise
        reach("step.stored")
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
            f"it is not known whether step {name!r} of {name_of(run.call)} happened: look it up, then resolve the key",
            attempt=run.attempt,
        )

    async def new_id(self, run: Run, kind: str, name: str) -> str:
        label = f"id:{name}"
        known = run.steps.get(label)
        if known is None:
            text = ids.mint(kind, int(run.clock() * 1000), self._runtime.entropy(10)).text
            await self._note(run, steps.Step(label, "id", run.clock(), text.encode()))
        else:
            text = ids.parse(known.value.decode(), kind).text
        if run.ref is None:
            run.ref = text
        return text

    async def _note(self, run: Run, step: steps.Step) -> None:
        entry = steps.encode(step)
        known = run.steps
        size = sum(len(each.value) + len(each.name) for each in known.values()) + len(entry)
        if len(known) >= steps.MAX_STEPS and step.name not in known:
            raise ConfigurationError(
                f"a run has at most {steps.MAX_STEPS} steps; {step.name!r} would be one more"
            )
        if size > steps.MAX_BYTES:
            raise ConfigurationError(
                f"the steps of a run hold at most {steps.MAX_BYTES} bytes together; with {step.name!r} they would "
                "hold more: return a ref from the step instead of its data"
            )
        note = Note(run.scope, run.ask.nonce, entry)
        answer = await self._store.note(note)
        if answer is not Answer.OK:
            run.lease_lost = True
            raise LeaseLost(f"{name_of(run.call)} was taken over; step {step.name!r} was not accepted")
        known[step.name] = step
