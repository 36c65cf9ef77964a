"""The two faces, `Semel` and `AsyncSemel`: the same names, the same body, with and without await."""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from semel import keeping
from semel.claims import Claim
from semel.decorator import decorate
from semel.errors import ConfigurationError, SemelWarning
from semel.flow import Call, Engine, nothing_to_run
from semel.forks import survive_fork
from semel.guarantees import Guarantee
from semel.hooks import Unprotected, emitter
from semel.keys import SecretRing, check_fingerprint, fingerprint, make_scope
from semel.layers import Batch, Cache, Coalesce, Namespace, Observe, Retry
from semel.loop import LoopRuntime, is_async, running_loop
from semel.model import Event, Record
from semel.options import Duration, Options, resolve, seconds
from semel.results import codec_for
from semel.run import Outcome
from semel.runtime import Runtime, ThreadRuntime, run_sync
from semel.store import Colour, Settings, Store, adopt, open_store

__all__ = ["AsyncSemel", "Semel"]

T = TypeVar("T")
_UNSET: Any = object()
_MOST_OPTIONS = 256


class _Face:
    """What both colours share: settings, the store, the layers, and the making of calls."""

    _colour: Colour

    def __init__(
        self,
        store: str | Store | object,
        *,
        tenant: str = "default",
        operation: str = "default",
        lease: Duration = 10,
        retention: Duration | None = 86_400,
        tombstone: Duration = 0,
        wait: Duration = 0,
        prefix: str = "semel",
        timeout: Duration = 2,
        settle_timeout: Duration = 5,
        max_result: int = 1 << 20,
        secret: bytes | str | Mapping[str, bytes | str] | None = None,
        threads: int = 64,
        acks: int = 0,
        table: str = "semel",
        readable: str = "full",
        enabled: bool = True,
        create: bool = True,
        hooks: Iterable[Callable[[object], object]] = (),
        coalesce: bool = True,
        cache: int = 0,
        encrypt: Mapping[str, bytes] | None = None,
        namespace: str | None = None,
        index: Iterable[str] = (),
        capacity: int = 10_000,
        purge_every: Duration | None = None,
        **options: Any,
    ) -> None:
        given = dict(options, tenant=tenant, operation=operation, lease=lease, retention=retention)
        self._defaults = resolve(
            Options(), given | {"tombstone": tombstone, "wait": wait, "max_result": max_result}
        )
        make_scope(prefix, tenant, operation, "check", _readable(readable))
        self._prefix = prefix
        self._readable = _readable(readable)
        self._timeout = seconds("timeout", timeout, least=0.01)
        self._settle_timeout = seconds("settle_timeout", settle_timeout)
        self._secrets = SecretRing(secret)
        self._threads = threads
        self._emit = emitter(tuple(hooks))
        self._coalesce = coalesce
        self._cache = cache
        self._namespace = namespace
        self._ring = _ring(encrypt)
        self._purge_every = None if purge_every is None else seconds("purge_every", purge_every, least=0.01)
        self._settings = Settings(
            prefix, table, self._timeout, acks, readable, create, frozenset(index), capacity
        )
        self._store, self._owns_store = self._opened(store)
        self._known_options: dict[Any, Options] = {}
        self._recoveries: dict[str, keeping.Recovery] = {}
        self.enabled = enabled
        if not enabled:
            warnings.warn(
                "semel is switched off (enabled=False): every call runs, nothing is protected",
                SemelWarning,
                stacklevel=3,
            )
        self._reset()
        survive_fork(self, type(self)._reset)  # noqa: SLF001 - our own

    def _reset(self) -> None:
        """Also after a fork: engines, heartbeats and thread pools belong to the process that made them."""
        self._pool: ThreadPoolExecutor | None = None

    def _opened(self, store: str | Store | object) -> tuple[Store, bool]:
        if isinstance(store, str):
            return open_store(store, self._settings, self._colour), True
        if not isinstance(store, Store):
            return adopt(store, self._settings, self._colour), True
        if store.colour not in (self._colour, "both"):
            face = "AsyncSemel" if self._colour == "sync" else "Semel"
            raise ConfigurationError(
                f"{type(self).__name__} was given a store for {store.colour} code ({type(store).__name__}); use {face}, "
                f"or open the store for {self._colour} code"
            )
        return store, False

    def _engine_for(self, runtime: Runtime) -> Engine:
        store = self._store
        if runtime.colour == "async" and store.capabilities.batches:
            store = Batch(store)
        if self._namespace is not None:
            store = Namespace(store, self._namespace)
        store = Retry(store, runtime.now, self._timeout)
        if self._ring is not None:
            from semel.layers.encrypt import Encrypt

            store = Encrypt(store, self._ring)
        if self._cache:
            store = Cache(store, runtime, size=self._cache)
        if self._coalesce:
            store = Coalesce(store, runtime, timeout=self._timeout)
        if self._emit is not None:
            store = Observe(store, self._emit)
        engine = Engine(
            store, runtime, secrets=self._secrets, settle_timeout=self._settle_timeout, emit=self._emit
        )
        if self._purge_every is not None:
            keeping.purge_regularly(engine, self._purge_every)
        return engine

    def _options(self, given: dict[str, Any]) -> Options:
        if not given:
            return self._defaults
        # A call site passes the same few options every time: check them once.
        name = tuple(given.items())
        try:
            known = self._known_options.get(name)
        except TypeError:
            return resolve(self._defaults, given)
        if known is None:
            if len(self._known_options) >= _MOST_OPTIONS:
                self._known_options.clear()
            known = self._known_options[name] = resolve(self._defaults, given)
        return known

    def _call(
        self,
        key: str,
        fn: Callable[..., Any] | None,
        args: tuple[Any, ...],
        given: dict[str, Any],
        *,
        keep: bool = True,
    ) -> Call:
        kwargs = given.pop("kwargs", None)
        labels = given.pop("labels", None)
        print_ = self._fingerprint(
            given.pop("request", None), given.pop("fingerprint", None), given.pop("fields", None)
        )
        options = self._options(given)
        if not print_ and options.fingerprints == "required":
            raise ConfigurationError(
                'this call has no request= and no fingerprint=, and fingerprints="required"'
            )
        return Call(
            scope=make_scope(self._prefix, options.tenant, options.operation, key, self._readable),
            key=key,
            options=options,
            fn=fn or nothing_to_run,
            args=args,
            kwargs=kwargs or {},
            codec=codec_for(fn, options.result_type) if keep else None,
            fingerprint=print_,
            labels=_labels(labels),
        )

    @staticmethod
    def _fingerprint(request: Any, given: Any, fields: Any) -> bytes:
        if given is not None:
            if request is not None:
                raise ConfigurationError("give request= or fingerprint=, not both")
            return bytes.fromhex(check_fingerprint(given))
        if request is None:
            return b""
        return bytes.fromhex(fingerprint(request) if fields is None else fingerprint(request, fields=fields))

    def _unprotected(self, call: Call) -> None:
        if self._emit is not None:
            self._emit(Unprotected(call.scope))

    def recovery(
        self,
        operation: str,
        *,
        probe: Callable[..., Any] | None = None,
        resume: Callable[..., Any] | None = None,
        tenant: str | None = None,
    ) -> None:
        """Tell `reconcile` what to do about lost runs of an operation: look them up, or run them again."""
        self._recoveries[operation] = keeping.Recovery(probe, resume, tenant)

    def tag(self, key: str, *, tenant: str | None = None, operation: str | None = None) -> str:
        """The hash tag of a key's record, for business keys that must share its Redis Cluster slot (R28)."""
        tag = getattr(self._store, "tag", None)
        if tag is None:
            raise ConfigurationError("only a Redis store has hash tags")
        scope = make_scope(
            self._prefix,
            tenant or self._defaults.tenant,
            operation or self._defaults.operation,
            key,
            self._readable,
        )
        text: str = tag(scope)
        return text

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {type(self._store).__name__}>"


class Semel(_Face):
    """The sync face: thread-safe, connects on first use, survives fork."""

    _colour: Colour = "sync"

    def _reset(self) -> None:
        super()._reset()
        self._made: Engine | None = None
        self._warned = False

    def _engine(self) -> Engine:
        if asyncio._get_running_loop() is not None and not self._warned:  # noqa: SLF001 - the cheap look
            self._warned = True
            warnings.warn(
                "Semel blocks the running event loop: use AsyncSemel in async code",
                SemelWarning,
                stacklevel=3,
            )
        engine = self._made
        if engine is None:
            engine = self._made = self._engine_for(ThreadRuntime())
        return engine

    def execute(self, key: str, fn: Callable[..., T], /, *args: Any, **options: Any) -> Outcome[T]:
        """Run `fn(*args, **kwargs)` once for this key, or give back what it gave. See docs/reference."""
        call = self._call(key, _plain(fn), args, options)
        if not self.enabled:
            self._unprotected(call)
            return Outcome(fn(*args, **call.kwargs), replayed=False, ref=None, attempt=1)
        return run_sync(self._engine().execute(call))

    def consume(self, key: str, fn: Callable[..., Any], /, *args: Any, **options: Any) -> bool:
        """Run `fn` once for this key without keeping its result: True if it ran here, False if it had run."""
        call = self._call(key, _plain(fn), args, options, keep=False)
        if not self.enabled:
            self._unprotected(call)
            fn(*args, **call.kwargs)
            return True
        return not run_sync(self._engine().execute(call)).replayed

    def once(self, **options: Any) -> Callable[[Any], Any]:
        """Decorate a function, method or handler class so that it runs once per key."""
        return decorate(self, options)

    __call__ = once

    def claim(self, key: str, /, *, verdicts: bool = False, **options: Any) -> Claim:
        """Own the key by hand: `with once.claim(key) as claim: …; claim.complete(value)`."""
        return Claim(self._engine(), self._call(key, None, (), options), verdicts=verdicts)

    def peek(self, key: str, /, **where: Any) -> Record | None:
        """The key's record as it reads now, or None. Never changes anything."""
        return run_sync(keeping.peek(self._engine(), self._call(key, None, (), where)))

    def resolve(
        self,
        key: str,
        /,
        *,
        value: Any = _UNSET,
        error: BaseException | str | None = None,
        release: bool = False,
        actor: str = "anonymous",
        reason: str = "",
        **where: Any,
    ) -> None:
        """A person's word on an unknown or failed key; kept in the audit trail."""
        verdict = keeping.word(value, error, has_value=value is not _UNSET, release=release)
        run_sync(keeping.resolve(self._engine(), self._call(key, None, (), where), verdict, actor, reason))

    def forget(self, key: str, /, *, actor: str = "anonymous", reason: str = "", **where: Any) -> bool:
        """Remove the key's record and tombstone; True if there was one. Refuses a live run."""
        return run_sync(keeping.forget(self._engine(), self._call(key, None, (), where), actor, reason))

    def history(self, key: str, /, **where: Any) -> list[Event]:
        """Who changed this key by hand, when and why."""
        return run_sync(keeping.history(self._engine(), self._call(key, None, (), where)))

    def purge(self, *, limit: int | None = None, batch: int = 1_000) -> int:
        """Remove what has expired, in batches; the count."""
        return run_sync(keeping.purge(self._engine(), limit, batch))

    def reconcile(self, *, limit: int = 1_000) -> keeping.Reconciled:
        """Find abandoned and unknown runs, and settle what registered probes and functions can settle."""
        return run_sync(keeping.reconcile(self._engine(), self, limit))

    def guarantee(self) -> Guarantee:
        """What holds, read from the live store, as data."""
        return run_sync(keeping.guarantee(self._engine(), enabled=self.enabled))

    def close(self) -> None:
        """Stop heartbeats, finish background writes, close what was opened. May be called twice."""
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


class AsyncSemel(_Face):
    """The async face: one engine per running loop; plain functions run in a thread pool of its own."""

    _colour: Colour = "async"

    def _reset(self) -> None:
        super()._reset()
        self._engines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Engine] = (
            weakref.WeakKeyDictionary()
        )
        self._last: tuple[weakref.ref[asyncio.AbstractEventLoop], Engine] | None = None

    def _engine(self) -> Engine:
        loop = running_loop()
        if self._last is not None and self._last[0]() is loop:
            return self._last[1]
        engine = self._engines.get(loop)
        if engine is None:
            engine = self._engines[loop] = self._engine_for(LoopRuntime(loop, self._threadpool))
        self._last = (weakref.ref(loop), engine)
        return engine

    def _threadpool(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="semel")
        return self._pool

    @overload
    async def execute(
        self, key: str, fn: Callable[..., Awaitable[T]], /, *args: Any, **options: Any
    ) -> Outcome[T]: ...

    @overload
    async def execute(self, key: str, fn: Callable[..., T], /, *args: Any, **options: Any) -> Outcome[T]: ...

    async def execute(self, key: str, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Outcome[Any]:
        """Run `fn(*args, **kwargs)` once for this key, or give back what it gave. See docs/reference."""
        call = self._call(key, fn, args, options)
        if not self.enabled:
            return Outcome(await self._bare(call), replayed=False, ref=None, attempt=1)
        return await self._engine().execute(call)

    async def consume(self, key: str, fn: Callable[..., Any], /, *args: Any, **options: Any) -> bool:
        """Run `fn` once for this key without keeping its result: True if it ran here, False if it had run."""
        call = self._call(key, fn, args, options, keep=False)
        if not self.enabled:
            await self._bare(call)
            return True
        return not (await self._engine().execute(call)).replayed

    async def _bare(self, call: Call) -> Any:
        self._unprotected(call)
        return await self._engine().runtime.call(call.fn, call.args, call.kwargs, call.options.inline)

    def once(self, **options: Any) -> Callable[[Any], Any]:
        """Decorate a function, method or handler class so that it runs once per key."""
        return decorate(self, options)

    __call__ = once

    def claim(self, key: str, /, *, verdicts: bool = False, **options: Any) -> Claim:
        """Own the key by hand: `async with once.claim(key) as claim: …; await claim.complete(value)`."""
        return Claim(self._engine(), self._call(key, None, (), options), verdicts=verdicts)

    async def peek(self, key: str, /, **where: Any) -> Record | None:
        """The key's record as it reads now, or None. Never changes anything."""
        return await keeping.peek(self._engine(), self._call(key, None, (), where))

    async def resolve(
        self,
        key: str,
        /,
        *,
        value: Any = _UNSET,
        error: BaseException | str | None = None,
        release: bool = False,
        actor: str = "anonymous",
        reason: str = "",
        **where: Any,
    ) -> None:
        """A person's word on an unknown or failed key; kept in the audit trail."""
        verdict = keeping.word(value, error, has_value=value is not _UNSET, release=release)
        await keeping.resolve(self._engine(), self._call(key, None, (), where), verdict, actor, reason)

    async def forget(self, key: str, /, *, actor: str = "anonymous", reason: str = "", **where: Any) -> bool:
        """Remove the key's record and tombstone; True if there was one. Refuses a live run."""
        return await keeping.forget(self._engine(), self._call(key, None, (), where), actor, reason)

    async def history(self, key: str, /, **where: Any) -> list[Event]:
        """Who changed this key by hand, when and why."""
        return await keeping.history(self._engine(), self._call(key, None, (), where))

    async def purge(self, *, limit: int | None = None, batch: int = 1_000) -> int:
        """Remove what has expired, in batches; the count."""
        return await keeping.purge(self._engine(), limit, batch)

    async def reconcile(self, *, limit: int = 1_000) -> keeping.Reconciled:
        """Find abandoned and unknown runs, and settle what registered probes and functions can settle."""
        return await keeping.reconcile(self._engine(), self, limit)

    async def guarantee(self) -> Guarantee:
        """What holds, read from the live store, as data."""
        return await keeping.guarantee(self._engine(), enabled=self.enabled)

    async def aclose(self) -> None:
        """Stop heartbeats, finish background writes, close what was opened. May be called twice."""
        engine = self._engines.pop(running_loop(), None)
        self._last = None
        if engine is not None:
            await engine.close()
        if self._owns_store:
            await self._store.aclose()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)

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


def _readable(word: str) -> Any:
    if word not in ("full", "masked", "none"):
        raise ConfigurationError(f'readable must be "full", "masked" or "none", not {word!r}')
    return word


def _labels(labels: Mapping[Any, Any] | None) -> Mapping[str, str] | None:
    if not labels:
        return None
    for name, text in labels.items():
        if not isinstance(name, str) or not isinstance(text, str) or len(name) > 64 or len(text) > 255:
            raise ConfigurationError(
                f"labels are short texts (64 and 255 characters at most), not {name!r}: {text!r}"
            )
    return dict(labels)


def _ring(keys: Mapping[str, bytes] | None) -> Any:
    if keys is None:
        return None
    from semel.layers.encrypt import Ring

    return Ring(keys)
