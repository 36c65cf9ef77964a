"""A claim by hand: `with once.claim(key) as claim:`, for effects that are not one function.

One body, and a thin class for each colour, so that an editor knows what is awaited.
"""

from __future__ import annotations

import warnings
from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

from semel.calls import Call
from semel.errors import (
    ConfigurationError,
    InProgress,
    KeyExpired,
    KeyMismatch,
    OutcomeUnknown,
    SemelError,
    SemelWarning,
)
from semel.flow import Engine
from semel.model import Ask, Busy, Policy, Replay, Unknown, Verdict, Won
from semel.options import switch
from semel.run import AsyncRun, Outcome, Run, _current, leave_block
from semel.words import checked_error

__all__ = ["AsyncClaim", "Claim"]


class _Claim:
    _depth: int  # how many frames of ours are between a warning and the block it is about

    def __init__(self, engine: Engine, call: Call, *, verdicts: bool) -> None:
        self._engine = engine
        self._call = call
        self._verdicts = switch("verdicts", verdicts)
        self._run: Run | None = None
        self._answered = False
        self.verdict: Verdict | None = None
        self.replayed = False
        self._value: Any = None
        self._outcome: Outcome[Any] | None = None
        self._unread: SemelError | None = None
        """Why what is stored is no value to be had."""
        self.ref: str | None = None
        self.attempt = 0

    @property
    def won(self) -> bool:
        """Whether this block owns the key."""
        return self._run is not None

    @property
    def value(self) -> Any:
        """What was recorded, here or before. Raises CodecError for a result that was too large to be kept.

        With `verdicts=True` it raises what `execute` would have raised: PreviousFailure for a stored failure, say.
        """
        if self._unread is not None:
            raise self._unread
        return self._value if self._outcome is None else self._outcome.value

    async def _enter(self) -> Self:
        engine, call = self._engine, self._call
        if self.verdict is not None:
            raise ConfigurationError("a claim is entered once: call once.claim(...) again for another try")
        engine.door.check()
        ask, verdict = await (self._heard() if self._verdicts else engine.acquire(call))
        try:
            self.verdict = verdict
            if self._verdicts and not isinstance(verdict, Won):
                engine.debts.leave(ask, verdict)
            if isinstance(verdict, Replay):
                self._replay(verdict)
            elif isinstance(verdict, Won):
                self._run = engine.begin(call, ask, verdict.record)
                self.attempt = self._run.attempt
                _current.set(self._run.weak)
                self._run.started = True
        except BaseException:
            engine.disown(ask)
            raise
        return self

    async def _heard(self) -> tuple[Ask, Verdict]:
        """The last verdict, whatever it is, after waiting and probing as any call does."""
        engine, call = self._engine, self._call
        ask, verdict = await engine.ask_once(call)
        waits = isinstance(verdict, Busy) and call.options.wait > 0
        if not waits and not (isinstance(verdict, Unknown) and callable(call.options.on_unknown)):
            return ask, verdict
        heard: list[Verdict] = []
        try:
            return await engine._contend(call, ask, verdict, heard)  # noqa: SLF001 - as `acquire` does
        except (InProgress, KeyMismatch, KeyExpired, OutcomeUnknown):
            if not heard:
                engine.disown(ask)
                raise
            return ask, heard[-1]
        except BaseException:
            engine.disown(ask)
            raise

    def _replay(self, verdict: Replay) -> None:
        self.attempt = verdict.record.attempts
        try:
            outcome = self._engine.replay(self._call, verdict.record)
            self.replayed, self.ref = True, outcome.ref
            self._outcome = outcome
        except SemelError as error:
            if not self._verdicts:
                raise
            self._unread = error
            if isinstance(error, OutcomeUnknown):  # it cannot be read: as any other call would be told (R15)
                self.verdict = Unknown(verdict.record, Policy.HOLD, unreadable=True)

    async def _complete(self, value: Any) -> None:
        run = self._owned("complete")
        self._answered = True
        outcome = await self._engine.complete(run, value)
        self._value, self.ref = value, outcome.ref

    async def _fail(self, error: BaseException | str) -> None:
        run = self._owned("fail")
        checked_error("claim.fail(…)", error)
        self._answered = True
        await self._engine.fail_for_good(run, error)

    def _won(self) -> Run:
        if self._run is None:
            raise ConfigurationError("this claim was not won: look at claim.replayed or claim.verdict first")
        return self._run

    def _owned(self, verb: str) -> Run:
        if self._run is None:
            raise ConfigurationError(f"only the owner of a key may {verb} it: this claim was not won")
        if self._answered:
            raise ConfigurationError("this claim has been answered already")
        return self._run

    async def _exit(self, error: BaseException | None) -> None:
        run = self._run
        if run is None:
            return
        leave_block(run)
        goes_on = error is None or isinstance(error, Exception)
        # Else it was interrupted before its answer was on its way.
        if self._answered and (run.settling or goes_on):
            if run.interrupt.fired and goes_on:
                run.interrupt.absorb()  # the block has heard of it
            return
        self._answered = True
        if error is None:
            await self._engine.release(run)
            warnings.warn(
                f"the block around {run.scope!r} ended without complete() or fail(): the key was released",
                SemelWarning,
                stacklevel=self._depth,
            )
        elif isinstance(error, Exception):
            await self._engine.fail(run, error)
        else:
            await self._engine.lose(run, error)


class Claim(_Claim):
    """Entered, it is either ours to complete or fail, or already settled (`replayed`).

    With `verdicts=True` no verdict raises: look at `claim.verdict`. Leaving the block by an exception applies
    `on_error`; leaving it without an answer releases the key and warns.
    """

    _depth = 5

    @property
    def run(self) -> Run:
        """The run that this claim began. Raises for a claim that was not won."""
        return self._won()

    def complete(self, value: Any = None) -> None:
        """The effect happened and this is its result. Raises for a claim that was not won."""
        self._engine.runtime.drive(self._complete(value))

    def fail(self, error: BaseException | str) -> None:
        """The effect failed for good: `error` is the outcome from now on (PreviousFailure)."""
        self._engine.runtime.drive(self._fail(error))

    def __enter__(self) -> Self:
        entered: Self = self._engine.runtime.drive(self._enter())
        return entered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._engine.runtime.drive(self._exit(error))

    if not TYPE_CHECKING:

        async def __aenter__(self) -> NoReturn:
            raise _other_colour("with")

        async def __aexit__(self, *_: object) -> None: ...


class AsyncClaim(_Claim):
    """The same for AsyncSemel: `async with once.claim(key) as claim:`, and `complete` and `fail` are awaited."""

    _depth = 3

    @property
    def run(self) -> AsyncRun:
        """The run that this claim began. Raises for a claim that was not won."""
        return cast("AsyncRun", self._won())

    def complete(self, value: Any = None) -> Coroutine[Any, Any, None]:
        """The effect happened and this is its result. Raises for a claim that was not won."""
        driven: Coroutine[Any, Any, None] = self._engine.runtime.drive(self._complete(value))
        return driven

    def fail(self, error: BaseException | str) -> Coroutine[Any, Any, None]:
        """The effect failed for good: `error` is the outcome from now on (PreviousFailure)."""
        driven: Coroutine[Any, Any, None] = self._engine.runtime.drive(self._fail(error))
        return driven

    async def __aenter__(self) -> Self:
        return await self._enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._exit(error)

    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            raise _other_colour("async with")

        def __exit__(self, *_: object) -> None: ...


def _other_colour(instead: str) -> ConfigurationError:
    return ConfigurationError(f"this claim belongs to the other colour: write `{instead} once.claim(...)`")
