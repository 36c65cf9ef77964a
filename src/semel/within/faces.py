"""`once.within(…)`: the names of a face (execute, consume, once, claim, peek), bound to a caller's transaction."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from semel import keeping
from semel.calls import Call, nothing_to_run
from semel.claims import AsyncClaim, Claim
from semel.decorator import decorate
from semel.errors import ConfigurationError
from semel.flow import Engine
from semel.loop import is_async
from semel.model import Record
from semel.options import Options
from semel.run import Outcome
from semel.runtime import run_sync
from semel.typed import AsyncDecorator, CallOptions, Decorator, DecoratorOptions, Place

if TYPE_CHECKING:
    from semel.once import AsyncSemel, Semel

__all__ = ["AsyncWithin", "Within"]

T = TypeVar("T")


class _Bound:
    _namesakes = None  # a function is decorated for one transaction, and many of them for as many

    def __init__(self, face: Any, engine: Engine, unguarded: Engine | None = None) -> None:
        self._face = face
        self._tx = engine
        self._unguarded = unguarded
        self._colour = face._colour  # noqa: SLF001 - our own face

    def __getattr__(self, name: str) -> Any:
        # Names of ours first: one that is not whole yet, as a copy in the making, has no face to ask.
        if name.startswith("_") or not hasattr(type(self._face), name):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )
        kind = type(self._face).__name__
        raise AttributeError(
            f"{name} belongs to the {kind} itself, not to what within() gives: it is not part of a caller's transaction. Call it on "
            f"the {kind}, outside of the transaction",
            name=name,
            obj=self,
        )

    def _options(self, given: Mapping[str, object]) -> Options:
        return self._face._options(given)  # type: ignore[no-any-return]  # noqa: SLF001 - our own face

    def _call(
        self,
        key: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        given: CallOptions,
        *,
        keep: bool = True,
    ) -> Call:
        # Inline: the session belongs to this thread or loop, so neither the function nor a probe may run in another thread.
        call: Call = self._face._call(key, fn, args, given, keep=keep, inline=True)  # noqa: SLF001 - our own face
        return call

    def _owner(self, call: Call) -> tuple[Engine, Call]:
        """Who claims by hand: this transaction, or nobody (R8)."""
        if self._face.enabled:
            return self._tx, call
        return self._unguarded or self._face._engine(), self._face._unprotected(call)  # noqa: SLF001 - our own face

    def _run(self, call: Call) -> Coroutine[Any, Any, Outcome[Any]]:
        self._tx.door.check()
        if self._face.enabled:
            return self._tx.execute(call)
        engine, owned = self._owner(call)
        return engine.execute(owned)


class Within(_Bound):
    """The sync face on a caller's transaction. The record commits, or rolls back, with the caller's rows."""

    if TYPE_CHECKING:
        _face: Semel

    def execute(
        self, key: str, fn: Callable[..., T], /, *args: Any, **options: Unpack[CallOptions]
    ) -> Outcome[T]:
        """Run `fn` once for this key in the caller's transaction, or give back what it gave. Commit is the caller's."""
        call = self._call(key, _plain(fn), args, options)
        return run_sync(self._run(call))

    def consume(
        self, key: str, fn: Callable[..., Any], /, *args: Any, **options: Unpack[CallOptions]
    ) -> bool:
        """As `execute`, without keeping the result: True if it ran here, False if it had run."""
        call = self._call(key, _plain(fn), args, options, keep=False)
        return not run_sync(self._run(call)).replayed

    def once(self, *misplaced: object, **options: Unpack[DecoratorOptions]) -> Decorator:
        """Decorate a function for the life of this transaction."""
        decorator: Decorator = decorate(self, misplaced, options)  # type: ignore[arg-type]  # a bound face decorates as a face does
        return decorator

    __call__ = once

    def claim(self, key: str, /, *, verdicts: bool = False, **options: Unpack[CallOptions]) -> Claim:
        """Own the key by hand; the block runs in the claim's savepoint."""
        return Claim(*self._owner(self._call(key, nothing_to_run, (), options)), verdicts=verdicts)

    def peek(self, key: str, /, **where: Unpack[Place]) -> Record | None:
        """The record as this transaction sees it, its own uncommitted one included."""
        return run_sync(keeping.peek(self._tx, self._face._about(key, where)))  # noqa: SLF001 - our own face


class AsyncWithin(_Bound):
    """The async face on a caller's transaction. Plain functions run in the loop itself, as the session belongs to it."""

    if TYPE_CHECKING:
        _face: AsyncSemel

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
        """Run `fn` once for this key in the caller's transaction, or give back what it gave. Commit is the caller's."""
        call = self._call(key, fn, args, options)
        return await self._run(call)

    async def consume(
        self, key: str, fn: Callable[..., Any], /, *args: Any, **options: Unpack[CallOptions]
    ) -> bool:
        """As `execute`, without keeping the result: True if it ran here, False if it had run."""
        call = self._call(key, fn, args, options, keep=False)
        return not (await self._run(call)).replayed

    def once(self, *misplaced: object, **options: Unpack[DecoratorOptions]) -> AsyncDecorator:
        """Decorate a function for the life of this transaction."""
        decorator: AsyncDecorator = decorate(self, misplaced, options)  # type: ignore[arg-type]  # a bound face decorates as a face does
        return decorator

    __call__ = once

    def claim(self, key: str, /, *, verdicts: bool = False, **options: Unpack[CallOptions]) -> AsyncClaim:
        """Own the key by hand; the block runs in the claim's savepoint."""
        return AsyncClaim(*self._owner(self._call(key, nothing_to_run, (), options)), verdicts=verdicts)

    async def peek(self, key: str, /, **where: Unpack[Place]) -> Record | None:
        """The record as this transaction sees it, its own uncommitted one included."""
        return await keeping.peek(self._tx, self._face._about(key, where))  # noqa: SLF001 - our own face


def _plain(fn: Callable[..., T]) -> Callable[..., T]:
    if is_async(fn):
        raise ConfigurationError(
            f"{getattr(fn, '__qualname__', fn)!r} is a coroutine function: use AsyncSemel and an async session to run it"
        )
    return fn
