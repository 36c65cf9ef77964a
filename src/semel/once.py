"""The two faces, `Semel` and `AsyncSemel`: the same names, the same body, with and without await."""

from __future__ import annotations

import asyncio
import threading
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

import msgspec

from semel import keeping, reconciling
from semel.calls import nothing_to_run
from semel.claims import AsyncClaim, Claim
from semel.decorator import decorate
from semel.errors import ConfigurationError, SemelWarning
from semel.face import FORGETS, PLACE, RESOLVES, Face
from semel.flow import Engine
from semel.guarantees import Guarantee
from semel.keys import Scope
from semel.loop import LoopRuntime, is_async, running_loop
from semel.model import Event, Record, State
from semel.run import Outcome
from semel.running import runs_here
from semel.runtime import ThreadRuntime, run_sync
from semel.store import Colour
from semel.typed import AsyncDecorator, CallOptions, Decorator, DecoratorOptions, Forgetting, Place, Resolving
from semel.within import AsyncWithin, Within, bind

__all__ = ["AsyncSemel", "Semel"]

T = TypeVar("T")


_UNSET: Any = msgspec.UNSET


class Semel(Face):
    """Runs functions once per key, in plain code: thread-safe, connects on first use, survives fork.

    `Semel("sqlite:///semel.db")`, or a URL of PostgreSQL, MariaDB/MySQL, Redis, Redis Cluster or Sentinel, or a client.
    `lease` is how long a dead owner's key stays locked, `retention` how long a result is replayed, `wait` how long a
    caller waits for another one; each can also be given per call. `timeout` bounds every question to the store,
    `settle_timeout` the writing of an outcome, tries and all (0: one try, its answer up to `timeout`).
    """

    _colour: Colour = "sync"

    def _reset(self) -> None:
        super()._reset()
        self._made: Engine | None = None
        # Not a plain lock: the handler of SIGTERM may close it while the main thread does.
        self._closing = threading.RLock()
        self._warned = False

    def _engine(self) -> Engine:
        if asyncio._get_running_loop() is not None and not self._warned:  # noqa: SLF001 - the cheap look
            self._warned = True
            warnings.warn(
                "Semel blocks the running event loop: use AsyncSemel in async code",
                SemelWarning,
                stacklevel=3,
            )
        return self._made or self._make_engine()

    def _make_engine(self) -> Engine:
        with self._lock:  # of two first callers one makes it
            engine = self._made
            made = engine is None
            if engine is None:
                self._door.check()
                engine = self._made = self._engine_for(ThreadRuntime())
        if self._door.closed:  # looked at last: whoever closes it from here on finds what was made
            if (
                made and not engine.heart.busy
            ):  # else it is another call's too, whose lease is renewed to its end
                self._made = None
                engine.stop()
                if self._owns_store:  # its purge may have opened it again
                    run_sync(self._store.aclose())
            self._door.check()
        return engine

    def execute(
        self, key: str, fn: Callable[..., T], /, *args: Any, **options: Unpack[CallOptions]
    ) -> Outcome[T]:
        """Run `fn(*args, **kwargs)` once for this key, or give back what it gave.

        Options (all by name): `operation`, `tenant`, `request` (or `fingerprint`, `fields`), `wait`, `lease`, `retention`,
        `tombstone`, `result_type`, `on_error`, `on_unknown`, `on_lease_lost`, `kwargs`, `labels`, `max_result`, `poll`.
        Raises what `fn` raises; InProgress when another caller runs the key (longer than `wait`), KeyMismatch for another
        request under the key, PreviousFailure when the stored outcome is a failure, OutcomeUnknown when it was lost and
        may not be re-run, KeyExpired, LeaseLost, StoreUnavailable before and NotRecorded after the effect.
        """
        call = self._call(key, _plain(fn), args, options)
        return run_sync(self._engine().execute(call if self.enabled else self._unprotected(call)))

    def consume(
        self, key: str, fn: Callable[..., Any], /, *args: Any, **options: Unpack[CallOptions]
    ) -> bool:
        """Run `fn` once for this key without keeping its result: True if it ran here, False if it had run."""
        call = self._call(key, _plain(fn), args, options, keep=False)
        return not run_sync(
            self._engine().execute(call if self.enabled else self._unprotected(call))
        ).replayed

    def once(self, *misplaced: object, **options: Unpack[DecoratorOptions]) -> Decorator:
        """Decorate a function, method or handler class (`method="handle"`) so that it runs once per key.

        `key=`, `request=` and `tenant=` are field paths over the arguments ("cmd.request_id", "self.id") or callables that get
        the same arguments (and the object first, if they call it self); a `tenant` without a dot, or that begins with no
        argument, is the tenant itself. Without `key` the same arguments are the same action, whatever the object. Other
        options as in `execute`. The decorated function returns the value; its `.outcome(...)` returns the Outcome.
        """
        decorator: Decorator = decorate(self, misplaced, options)
        return decorator

    __call__ = once

    def claim(self, key: str, /, *, verdicts: bool = False, **options: Unpack[CallOptions]) -> Claim:
        """Own the key by hand: `with once.claim(key) as claim:`.

        Inside: `claim.replayed` and `claim.value` when it has been done, else `claim.complete(value)` or `claim.fail(error)`.
        """
        call = self._call(key, nothing_to_run, (), options)
        return Claim(self._engine(), call if self.enabled else self._unprotected(call), verdicts=verdicts)

    def within(self, transaction: object) -> Within:
        """The same names, bound to a caller's transaction: a session, a connection or a Redis pipeline.

        Record and business rows commit or roll back together: effects inside are exactly once.
        """
        bound: Within = bind(self, transaction)
        return bound

    def create(self) -> None:
        """Make the tables now, on a connection of our own, instead of at the first call. Safe to repeat."""
        run_sync(keeping.create(self._engine(), self._about("create", {})))

    def peek(self, key: str | Scope, /, **where: Unpack[Place]) -> Record | None:
        """The key's record as it reads now, or None. Never changes anything. `where`: tenant=, operation=.

        As for resolve, forget and history, the `scope` of a record that was found names it too, though its key be masked.
        """
        return run_sync(keeping.peek(self._engine(), self._about(key, where, PLACE)))

    def find(
        self,
        *,
        states: Iterable[State | str] = (),
        tenant: str | None = None,
        operation: str | None = None,
        ref: str | None = None,
        abandoned: bool = False,
        limit: int = 100,
    ) -> list[Record]:
        """Records that need attention (running, unknown, failed), or those in the `states` that are named.

        Redis can list what is in its index: those three, and with index={"ref"} what has a ref. SQL and memory list all states.
        `abandoned=True`: only runs whose lease is over.
        """
        self._warn_if_off(3)
        query = keeping.query_for(states, tenant, operation, ref, limit, abandoned=abandoned)
        return run_sync(keeping.find(self._engine(), query, self._prefix))

    def resolve(
        self,
        key: str | Scope,
        /,
        *,
        value: Any = _UNSET,
        error: BaseException | str | None = None,
        release: bool = False,
        correct: bool = False,
        actor: str = "anonymous",
        reason: str = "",
        **where: Unpack[Resolving],
    ) -> None:
        """A person's word on an unknown or failed key, or a run whose lease is over: exactly one of value=, error=, release=True.

        Actor and reason are kept in the audit trail (`history`). Refused for a live run and for a second word.
        A release makes steps that were only started possible again; those that are finished stay. The outcome is kept for
        this face's own retention and tombstone, which need not be those of the call: say them, if so. A done record that its
        function cannot read is repaired by value= and the function's result_type=; correct=True replaces an outcome that
        a person gave before. `where`: tenant=, operation=, result_type=, retention=, tombstone=.
        """
        has_value = value is not _UNSET
        verdict = keeping.word(value, error, has_value=has_value, release=release, correct=correct)
        run_sync(keeping.resolve(self._engine(), self._about(key, where, RESOLVES), verdict, actor, reason))

    def forget(
        self, key: str | Scope, /, *, actor: str = "anonymous", reason: str = "", **where: Unpack[Forgetting]
    ) -> bool:
        """Remove the key's record and tombstone; True if there was one. Refuses a live run."""
        return run_sync(keeping.forget(self._engine(), self._about(key, where, FORGETS), actor, reason))

    def history(self, key: str | Scope, /, **where: Unpack[Place]) -> list[Event]:
        """Who changed this key by hand, when and why."""
        return run_sync(keeping.history(self._engine(), self._about(key, where, PLACE)))

    def purge(self, *, limit: int | None = None, batch: int = 1_000) -> int:
        """Remove what has expired, in batches; the count."""
        if not self.enabled:
            self._warn_if_off(3)
            return 0
        return run_sync(keeping.purge(self._engine(), limit, batch))

    def reconcile(self, *, limit: int = 1_000) -> reconciling.Reconciled:
        """Find abandoned and unknown runs, and settle what registered probes and functions can settle.

        What is settled is kept for this face's own retention and tombstone, unless `recovery` was told others.
        """
        return run_sync(reconciling.reconcile(self._engine(), self, limit))

    def guarantee(self) -> Guarantee:
        """What holds, read from the live store, as data."""
        return run_sync(keeping.guarantee(self._engine(), enabled=self.enabled))

    def close(self) -> None:
        """Stop heartbeats, finish background writes, close what was opened. May be called twice."""
        self._door.closed = True
        with self._closing:  # a second closer waits for the first
            engine, self._made = self._made, None
            if engine is not None:
                run_sync(engine.close())
            if self._owns_store:
                run_sync(self._store.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class AsyncSemel(Face):
    """Runs functions once per key, in asyncio code; plain functions run in a thread pool of its own.

    `AsyncSemel("sqlite:///semel.db")`, or a URL of PostgreSQL, MariaDB/MySQL, Redis, Redis Cluster or Sentinel, or a client.
    `lease` is how long a dead owner's key stays locked, `retention` how long a result is replayed, `wait` how long a
    caller waits for another one; each can also be given per call. `timeout` bounds every question to the store,
    `settle_timeout` the writing of an outcome, tries and all (0: one try, its answer up to `timeout`).
    """

    _colour: Colour = "async"

    def _reset(self) -> None:
        super()._reset()
        self._engines: dict[asyncio.AbstractEventLoop, Engine] = {}
        self._closings: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}
        self._last: tuple[weakref.ref[asyncio.AbstractEventLoop], Engine] | None = None

    def _engine(self) -> Engine:
        last = self._last
        if last is not None and (known := last[0]()) is not None and runs_here(known):
            return last[1]
        loop = running_loop()
        engine = self._engines.get(loop)
        made = engine is None
        if engine is None:
            engine = self._make_engine(loop)
        self._last = (weakref.ref(loop), engine)
        if self._door.closed:
            # Looked at last: whoever closes it from here on forgets what is remembered here.
            self._last = None
            if made:  # else runs that are still ending need its heartbeats
                self._engines.pop(loop, None)
                engine.stop()
            self._door.check()
        return engine

    def _make_engine(self, loop: asyncio.AbstractEventLoop) -> Engine:
        with self._lock:
            # Loops that close take theirs out without this lock.
            for other in [other for other in tuple(self._engines) if other.is_closed()]:
                self._engines.pop(other, None)
            self._door.check()
            engine = self._engines[loop] = self._engine_for(LoopRuntime(loop, self._threadpool))
        return engine

    def _threadpool(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="semel")
        return self._pool

    @overload
    async def execute(
        self, key: str, fn: Callable[..., Awaitable[T]], /, *args: Any, **options: Unpack[CallOptions]
    ) -> Outcome[T]: ...

    @overload
    async def execute(
        self, key: str, fn: Callable[..., T], /, *args: Any, **options: Unpack[CallOptions]
    ) -> Outcome[T]: ...

    async def execute(
        self, key: str, fn: Callable[..., Any], /, *args: Any, **options: Unpack[CallOptions]
    ) -> Outcome[Any]:
        """Run `fn(*args, **kwargs)` once for this key, or give back what it gave.

        Options (all by name): `operation`, `tenant`, `request` (or `fingerprint`, `fields`), `wait`, `lease`, `retention`,
        `tombstone`, `result_type`, `on_error`, `on_unknown`, `on_lease_lost`, `kwargs`, `labels`, `max_result`, `poll`.
        Raises what `fn` raises; InProgress when another caller runs the key (longer than `wait`), KeyMismatch for another
        request under the key, PreviousFailure when the stored outcome is a failure, OutcomeUnknown when it was lost and
        may not be re-run, KeyExpired, LeaseLost, StoreUnavailable before and NotRecorded after the effect.
        """
        call = self._call(key, fn, args, options)
        return await self._engine().execute(call if self.enabled else self._unprotected(call))

    async def consume(
        self, key: str, fn: Callable[..., Any], /, *args: Any, **options: Unpack[CallOptions]
    ) -> bool:
        """Run `fn` once for this key without keeping its result: True if it ran here, False if it had run."""
        call = self._call(key, fn, args, options, keep=False)
        return not (await self._engine().execute(call if self.enabled else self._unprotected(call))).replayed

    def once(self, *misplaced: object, **options: Unpack[DecoratorOptions]) -> AsyncDecorator:
        """Decorate a function, method or handler class (`method="handle"`) so that it runs once per key.

        `key=`, `request=` and `tenant=` are field paths over the arguments ("cmd.request_id", "self.id") or callables that get
        the same arguments (and the object first, if they call it self); a `tenant` without a dot, or that begins with no
        argument, is the tenant itself. Without `key` the same arguments are the same action, whatever the object. Other
        options as in `execute`. The decorated function returns the value; its `.outcome(...)` returns the Outcome.
        """
        decorator: AsyncDecorator = decorate(self, misplaced, options)
        return decorator

    __call__ = once

    def claim(self, key: str, /, *, verdicts: bool = False, **options: Unpack[CallOptions]) -> AsyncClaim:
        """Own the key by hand: `async with once.claim(key) as claim:`.

        Inside: `claim.replayed` and `claim.value` when it has been done, else `await claim.complete(value)` or `.fail(error)`.
        """
        call = self._call(key, nothing_to_run, (), options)
        return AsyncClaim(
            self._engine(), call if self.enabled else self._unprotected(call), verdicts=verdicts
        )

    def within(self, transaction: object) -> AsyncWithin:
        """The same names, bound to a caller's transaction: a session, a connection or a Redis pipeline.

        Record and business rows commit or roll back together: effects inside are exactly once.
        """
        bound: AsyncWithin = bind(self, transaction)
        return bound

    async def create(self) -> None:
        """Make the tables now, on a connection of our own, instead of at the first call. Safe to repeat."""
        await keeping.create(self._engine(), self._about("create", {}))

    async def peek(self, key: str | Scope, /, **where: Unpack[Place]) -> Record | None:
        """The key's record as it reads now, or None. Never changes anything. `where`: tenant=, operation=.

        As for resolve, forget and history, the `scope` of a record that was found names it too, though its key be masked.
        """
        return await keeping.peek(self._engine(), self._about(key, where, PLACE))

    async def find(
        self,
        *,
        states: Iterable[State | str] = (),
        tenant: str | None = None,
        operation: str | None = None,
        ref: str | None = None,
        abandoned: bool = False,
        limit: int = 100,
    ) -> list[Record]:
        """Records that need attention (running, unknown, failed), or those in the `states` that are named.

        Redis can list what is in its index: those three, and with index={"ref"} what has a ref. SQL and memory list all states.
        `abandoned=True`: only runs whose lease is over.
        """
        self._warn_if_off(3)
        query = keeping.query_for(states, tenant, operation, ref, limit, abandoned=abandoned)
        return await keeping.find(self._engine(), query, self._prefix)

    async def resolve(
        self,
        key: str | Scope,
        /,
        *,
        value: Any = _UNSET,
        error: BaseException | str | None = None,
        release: bool = False,
        correct: bool = False,
        actor: str = "anonymous",
        reason: str = "",
        **where: Unpack[Resolving],
    ) -> None:
        """A person's word on an unknown or failed key, or a run whose lease is over: exactly one of value=, error=, release=True.

        Actor and reason are kept in the audit trail (`history`). Refused for a live run and for a second word.
        A release makes steps that were only started possible again; those that are finished stay. The outcome is kept for
        this face's own retention and tombstone, which need not be those of the call: say them, if so. A done record that its
        function cannot read is repaired by value= and the function's result_type=; correct=True replaces an outcome that
        a person gave before. `where`: tenant=, operation=, result_type=, retention=, tombstone=.
        """
        has_value = value is not _UNSET
        verdict = keeping.word(value, error, has_value=has_value, release=release, correct=correct)
        await keeping.resolve(self._engine(), self._about(key, where, RESOLVES), verdict, actor, reason)

    async def forget(
        self, key: str | Scope, /, *, actor: str = "anonymous", reason: str = "", **where: Unpack[Forgetting]
    ) -> bool:
        """Remove the key's record and tombstone; True if there was one. Refuses a live run."""
        return await keeping.forget(self._engine(), self._about(key, where, FORGETS), actor, reason)

    async def history(self, key: str | Scope, /, **where: Unpack[Place]) -> list[Event]:
        """Who changed this key by hand, when and why."""
        return await keeping.history(self._engine(), self._about(key, where, PLACE))

    async def purge(self, *, limit: int | None = None, batch: int = 1_000) -> int:
        """Remove what has expired, in batches; the count."""
        if not self.enabled:
            self._warn_if_off(3)
            return 0
        return await keeping.purge(self._engine(), limit, batch)

    async def reconcile(self, *, limit: int = 1_000) -> reconciling.Reconciled:
        """Find abandoned and unknown runs, and settle what registered probes and functions can settle.

        What is settled is kept for this face's own retention and tombstone, unless `recovery` was told others.
        """
        return await reconciling.reconcile(self._engine(), self, limit)

    async def guarantee(self) -> Guarantee:
        """What holds, read from the live store, as data."""
        return await keeping.guarantee(self._engine(), enabled=self.enabled)

    async def aclose(self) -> None:
        """Stop heartbeats, finish background writes, close what was opened. May be called twice.

        From now on no call begins, in no loop. Runs of other loops go on to their end and are recorded: the store is
        closed by the last loop that closes the face, or with it.
        """
        self._door.closed = True
        self._last = None  # of whichever loop: from now on every call looks at the door
        loop = running_loop()
        closing = self._closings.get(loop)
        if closing is None:
            closing = self._closings[loop] = loop.create_task(self._close(loop))
            closing.add_done_callback(lambda _: self._closings.pop(loop, None))
        await asyncio.shield(closing)  # a second closer waits for the first

    async def _close(self, loop: asyncio.AbstractEventLoop) -> None:
        engine = self._engines.get(loop)
        if engine is not None:
            await engine.close()
        # Before the look: of loops that close at the same time the last one finds nobody.
        self._engines.pop(loop, None)
        others = [engine for other, engine in tuple(self._engines.items()) if not other.is_closed()]
        if any(engine.heart.busy or engine.debts.owes for engine in others):
            await self._leave_store()
            return
        if self._owns_store:
            await self._store.aclose()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)

    async def _leave_store(self) -> None:
        """Runs of other loops need it, and the threads: close what this loop opened, where a store has something for each."""
        leave = getattr(self._store, "leave", None)
        if self._owns_store and leave is not None:
            await leave()

    close = aclose

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()


def _plain(fn: Callable[..., T]) -> Callable[..., T]:
    if is_async(fn):
        raise ConfigurationError(
            f"{getattr(fn, '__qualname__', fn)!r} is a coroutine function: use AsyncSemel to run it"
        )
    return fn
