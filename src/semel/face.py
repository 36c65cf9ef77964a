"""What both faces share: settings, the store, its layers, and the making of calls from arguments."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from inspect import iscoroutine
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn, Self, Unpack, cast

import msgspec

from semel import keeping
from semel.calls import Call, check_arguments, nothing_to_run, refuse_generator
from semel.configuring import settings_from, settings_of_environment
from semel.door import Door
from semel.errors import ConfigurationError, InvalidKey, SemelWarning
from semel.flow import Engine
from semel.forks import survive_fork
from semel.hooks import Unprotected, emitter
from semel.keys import (
    Scope,
    SecretRing,
    check_fingerprint,
    check_key,
    check_namespace,
    check_operation,
    check_tenant,
    fingerprint,
    make_scope,
)
from semel.layers import Batch, Cache, Coalesce, Namespace, Observe, Retry
from semel.layers.sweep import Sweep
from semel.loop import is_async
from semel.namesakes import Namesakes
from semel.options import Duration, Options, checked_policy, count, resolve, seconds, switch
from semel.reconciling import Recovery
from semel.results import codec_for, known_codec
from semel.runtime import Runtime
from semel.settings import (
    check_words,
    checked_hooks,
    checked_index,
    checked_labels,
    checked_readable,
    checked_ring,
    checked_store_settings,
)
from semel.store import Colour, Settings, Store, adopt, open_store
from semel.stores.memory import MemoryStore
from semel.typed import CallOptions, Conduct, Readable, Recovering

__all__ = ["FORGETS", "PLACE", "RESOLVES", "Face"]

_MOST_OPTIONS = 256
_NO_KWARGS: Mapping[str, Any] = {}
_WHERE = frozenset({"tenant", "operation", "result_type", "retention", "tombstone"})
PLACE = frozenset({"tenant", "operation"})
FORGETS = PLACE | {"actor", "reason", "retention"}
RESOLVES = _WHERE | {"actor", "reason", "value", "error", "release", "correct"}
_RECOVERS = frozenset(
    {
        "retention",
        "tombstone",
        "result_type",
        "max_result",
        "compress_over",
        "lease",
        "on_error",
        "on_lease_lost",
    }
)
_NO_RECORDS = "semel is switched off (enabled=False): this face keeps no records and looks at none, whatever its store holds"
_SWITCHED_OFF = "semel is switched off (enabled=False): every call runs, nothing is protected"


_LONGEST = 86_400.0  # seconds: no driver knows for ever


class Face:
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
        readable: Readable = "full",
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
        **options: Unpack[Conduct],
    ) -> None:
        check_words(options, Face.__init__, type(self).__name__)
        given = {"tenant": tenant, "operation": operation, "lease": lease, "retention": retention, **options}
        self._defaults = self._resolved(
            Options(), given | {"tombstone": tombstone, "wait": wait, "max_result": max_result}
        )
        self._prefix, self._readable = prefix, checked_readable(readable)
        make_scope(prefix, tenant, operation, "any", self._readable)  # malformed names are refused now
        self._timeout = min(seconds("timeout", timeout, least=0.01), _LONGEST)
        self._settle_timeout = seconds("settle_timeout", settle_timeout)
        self._secrets = SecretRing(secret)
        self._threads = count("threads", threads, least=1)
        self._emit = emitter(checked_hooks(hooks))
        self._coalesce, self._cache = switch("coalesce", coalesce), count("cache", cache, least=0)
        self._namespace = None if namespace is None else check_namespace(namespace)
        self._ring = checked_ring(encrypt)
        self._purge_every = None if purge_every is None else seconds("purge_every", purge_every, least=0.01)
        settings = Settings(
            prefix,
            table,
            self._timeout,
            count("acks", acks, least=0),
            readable,
            switch("create", create),
            checked_index(index),
            count("capacity", capacity, least=1),
        )
        self._settings = checked_store_settings(settings, store)
        self._store, self._owns_store = self._opened(store)
        self._names = None if self._namespace is None else Namespace(self._store, self._namespace)
        self._known_options: dict[Any, Options] = {}
        self._known_inline: dict[int, tuple[Options, Options]] = {}
        self._recoveries: dict[tuple[str, str | None], Recovery] = {}
        self._namesakes = Namesakes()
        self._door = Door(type(self).__name__)
        self.enabled = switch("enabled", enabled)
        if not enabled:
            warnings.warn(_SWITCHED_OFF, SemelWarning, stacklevel=3)
        self._reset()
        survive_fork(self, type(self)._reset)  # noqa: SLF001 - our own

    @classmethod
    def from_env(
        cls, prefix: str = "SEMEL_", *, environ: Mapping[str, str] | None = None, **more: Any
    ) -> Self:
        """As `SEMEL_URL`, `SEMEL_LEASE=30s`, `SEMEL_RETENTION=7d` … say; `more` are settings of the program's own, which win."""
        said = settings_of_environment(os.environ if environ is None else environ, prefix, more)
        return cls._made_of(said, more)

    @classmethod
    def from_config(
        cls, source: Mapping[str, Any] | str | Path, *, section: str = "semel", **more: Any
    ) -> Self:
        """As a mapping says, or the section of a TOML or JSON file (`tool.semel` in a pyproject); `more` wins."""
        return cls._made_of(settings_from(source, section, more), more)

    @classmethod
    def _made_of(cls, said: dict[str, Any], more: dict[str, Any]) -> Self:
        if "store" in more:
            raise ConfigurationError(
                "the store is named by url=, here as in the configuration, not by store="
            )
        settings = {**said, **more}
        return cls(settings.pop("url"), **settings)

    def _reset(self) -> None:
        """Also after a fork: engines, heartbeats and thread pools belong to the process that made them."""
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

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
        if not self.enabled:
            # However many calls are under way at once, none is refused (R8).
            return Engine(
                Sweep(MemoryStore(capacity=1 << 62)),
                runtime,
                secrets=self._secrets,
                settle_timeout=self._settle_timeout,
                emit=None,
                door=self._door,
            )
        store = self._store
        if runtime.colour == "async" and store.capabilities.batches:
            store = Batch(store)
        if self._namespace is not None:
            store = Namespace(store, self._namespace)
        if not store.capabilities.resends:
            store = Retry(store, runtime.now, self._timeout)
        if self._ring is not None:
            from semel.layers.encrypt import Encrypt

            store = Encrypt(store, self._ring)
        cache = Cache(store, runtime, size=self._cache) if self._cache else None
        if cache is not None:
            store = cache
        if self._coalesce:
            store = Coalesce(store, runtime, timeout=self._timeout)
        if self._emit is not None:
            store = Observe(store, self._emit)
        engine = Engine(
            store,
            runtime,
            secrets=self._secrets,
            settle_timeout=self._settle_timeout,
            timeout=self._timeout,
            emit=self._emit,
            door=self._door,
        )
        engine.cache = cache
        if self._purge_every is not None:
            keeping.purge_regularly(engine, self._purge_every)
        return engine

    def _options(self, given: Mapping[str, object]) -> Options:
        # A call site passes the same few options every time: check them once.
        name = tuple([(word, value, value.__class__) for word, value in given.items()])  # True is not 1 here
        try:
            known = self._known_options.get(name)
        except TypeError:
            return self._resolved(self._defaults, given)
        if known is None:
            known = self._resolved(self._defaults, given)
            if _are_lasting(given.get("on_error"), given.get("on_unknown")):
                if len(self._known_options) >= _MOST_OPTIONS:
                    self._known_options.clear()
                self._known_options[name] = known
        return known

    def _resolved(self, defaults: Options, given: Mapping[str, Any]) -> Options:
        options = resolve(defaults, given)
        checked_policy(options.on_unknown, plain=self._colour == "sync")
        return options

    def _inlined(self, options: Options) -> Options:
        """The same for a function that may run nowhere but here; by identity, as the same options come again and again."""
        known = self._known_inline.get(id(options))
        if known is not None and known[0] is options:
            return known[1]
        inlined = msgspec.structs.replace(options, inline=True)
        if options is self._defaults or _are_lasting(options.on_error, options.on_unknown):
            if len(self._known_inline) >= _MOST_OPTIONS:
                self._known_inline.clear()
            self._known_inline[id(options)] = (options, inlined)
        return inlined

    def _call(
        self,
        key: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        given: CallOptions,
        *,
        keep: bool = True,
        claims: bool = True,
        inline: bool = False,
    ) -> Call:
        kwargs = labels = None
        print_ = b""
        readable = self._readable
        if type(key) is not str and callable(key):
            raise InvalidKey("the key comes first, then the function: execute(key, fn, *arguments)")
        codec = None
        runs = fn is not nothing_to_run
        if runs and (codec := known_codec(fn)) is None:
            if not callable(fn):  # None, too: a callback that somebody forgot is no effect that was made
                raise _not_a_function(fn)
            refuse_generator(fn)
        if given:
            kwargs, labels = given.pop("kwargs", None), given.pop("labels", None)
            if "readable" in given:
                readable = checked_readable(given.pop("readable"))
            print_ = self._fingerprint(
                given.pop("request", None), given.pop("fingerprint", None), given.pop("fields", None)
            )
            if kwargs is not None:
                check_arguments(fn, kwargs)
        options = self._options(given) if given else self._defaults
        if inline and not options.inline:
            options = self._inlined(options)
        if not print_ and options.fingerprints == "required" and claims:
            raise ConfigurationError(
                'this call has no request= and no fingerprint=, and fingerprints="required": pass request=, what the caller asked for'
            )
        if keep and (codec is None or options.result_type is not None):
            codec = codec_for(fn if runs else None, options.result_type)
        scope = make_scope(self._prefix, options.tenant, options.operation, key, readable)
        return Call(
            scope if self._names is None else self._names.shown(scope),
            key if key.__class__ is str else check_key(key),
            options,
            fn,
            args,
            kwargs or _NO_KWARGS,
            codec if keep else None,
            print_,
            (checked_labels(labels) or None) if labels is not None else None,
        )

    @staticmethod
    def _fingerprint(request: Any, given: Any, fields: Any) -> bytes:
        if given is not None:
            if request is not None:
                raise ConfigurationError("give request= or fingerprint=, not both")
            return bytes.fromhex(check_fingerprint(given))
        if request is None:
            if fields is not None:
                raise ConfigurationError("fields= chooses fields of request=, and there is no request=")
            return b""
        return bytes.fromhex(fingerprint(request) if fields is None else fingerprint(request, fields=fields))

    def _about(self, key: str | Scope, where: Mapping[str, object], used: frozenset[str] = _WHERE) -> Call:
        """A call that only names a key: peek, resolve, forget, history. A record's own scope names it too.

        `used` are the words that this verb does something with, for a message; it need not do so with all that are understood.
        """
        self._warn_if_off(4)
        if unknown := where.keys() - _WHERE:
            raise _unknown_word(min(unknown), used)
        if isinstance(key, Scope):
            if given := where.keys() & {"tenant", "operation"}:
                raise ConfigurationError(f"a scope has its own {' and '.join(sorted(given))}: leave them out")
            place = CallOptions(tenant=key.tenant, operation=key.operation)
            call = self._call(
                "any", nothing_to_run, (), cast("CallOptions", {**where, **place}), claims=False
            )
            return msgspec.structs.replace(call, scope=key, key=key.key)
        return self._call(key, nothing_to_run, (), cast("CallOptions", where), claims=False)

    def _warn_if_off(self, depth: int) -> None:
        """For who looks at records, or decides about them: there are none."""
        if not self.enabled:
            warnings.warn(_NO_RECORDS, SemelWarning, stacklevel=depth)

    def _unprotected(self, call: Call) -> Call:
        """The same call under a key that nobody else has, in a store that nobody else sees: it always runs."""
        if self._emit is not None:
            self._emit(Unprotected(call.scope))
        scope = msgspec.structs.replace(call.scope, hash=os.urandom(32))
        # And leaves nothing behind, whatever becomes of it.
        options = msgspec.structs.replace(
            call.options, retention=0.0, tombstone=0.0, on_unknown="retry", on_error="release"
        )
        return msgspec.structs.replace(call, scope=scope, options=options, codec=None)

    def recovery(
        self,
        operation: str,
        *,
        probe: Callable[..., Any] | None = None,
        resume: Callable[..., Any] | None = None,
        tenant: str | None = None,
        masked: bool = False,
        **options: Unpack[Recovering],
    ) -> None:
        """Tell `reconcile` what to do about lost runs of an operation; both functions get the record.

        `probe(record)` looks the effect up (Found, NOT_FOUND, UNDECIDED); `resume(record)` runs the function again.
        `masked=True` asks the probe about records whose key is masked too, as those of the HTTP and gRPC edges are. It cannot
        be told whose they are: say it where no program with another prefix= has this operation in the same table. Nor can a
        downstream key be derived there (`run.downstream_key` raises): keep it as the ref or a label of the record.

        A record does not say how long its caller wanted its outcome kept. What a reconcile settles is kept as this face
        keeps things, unless `retention=` and `tombstone=` say here what the calls of this operation say. So with
        `result_type`, `max_result`, `compress_over`, and for `resume` with `lease`, `on_error`, `on_lease_lost`.
        """
        if unknown := options.keys() - _RECOVERS:
            raise ConfigurationError(
                f"unknown option {min(unknown)!r}: a recovery takes {', '.join(sorted(_RECOVERS))}"
            )
        self._options(options)  # what is malformed is refused now
        if probe is None and resume is None:
            raise ConfigurationError(
                f"recovery({operation!r}) says nothing: give it probe=…, a function of the record that looks the effect up, or "
                "resume=…, one that runs it again"
            )
        for name, fn in (("probe", probe), ("resume", resume)):
            if fn is None:
                continue
            if not callable(fn):
                raise ConfigurationError(f"{name} must be a function of the record, not {fn!r}")
            refuse_generator(fn)
            if self._colour == "sync" and is_async(fn):
                raise ConfigurationError(
                    f"{getattr(fn, '__qualname__', fn)!r} is a coroutine function: use AsyncSemel to recover with it"
                )
        if tenant is not None:
            check_tenant(tenant)
        self._recoveries[check_operation(operation), tenant] = Recovery(probe, resume, masked, options)

    def tag(self, key: str, *, tenant: str | None = None, operation: str | None = None) -> str:
        """The hash tag of a key's record, for business keys that must share its Redis Cluster slot."""
        tag = getattr(self._store, "tag", None)
        if tag is None:
            raise ConfigurationError(
                "only a Redis store has hash tags: on this one no key needs to share a place, so leave tag() out"
            )
        scope = make_scope(
            self._prefix,
            tenant or self._defaults.tenant,
            operation or self._defaults.operation,
            key,
            self._readable,
        )
        text: str = tag(scope if self._names is None else self._names.moved(scope))
        return text

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """For copy and pickle, which would make a face of parts of another one."""
        raise TypeError(
            f"this {type(self).__name__} cannot be copied or pickled: it holds connections, locks and threads of this process. Make a "
            "face in each process, of the same URL and settings; in one process they may all use the same face"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {type(self._store).__name__}>"


def _are_lasting(*values: Any) -> bool:
    """Whether they may be remembered, and taken for others that are equal: not a probe or an `on_error` that holds something.

    Two objects may be equal and look into different books, and what a closure holds is to go with its call.
    """
    return all(not callable(value) or (type(value) is FunctionType and not _holds(value)) for value in values)


def _holds(fn: FunctionType) -> bool:
    return bool(fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__)


def _unknown_word(name: str, used: frozenset[str]) -> ConfigurationError:
    close = get_close_matches(name, sorted(used), 1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    named = f"{guess}A key is named by its text and operation, tenant"
    more = ", ".join(sorted(used - PLACE))
    return ConfigurationError(f"unknown option {name!r}: {named}{more and f'; the others here are {more}'}")


def _not_a_function(thing: Any) -> ConfigurationError:
    if iscoroutine(thing):
        thing.close()
        return ConfigurationError(
            "pass the function and its arguments, not the coroutine: execute(key, fn, 1), not fn(1)"
        )
    return ConfigurationError(
        f"the second argument must be a function, not {type(thing).__name__}: execute(key, fn, 1), not execute(key, fn(1))"
    )
