"""The run as its function sees it: `current_run()` inside the function, and the outcome its caller gets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from collections.abc import Set as AbstractSet
from contextvars import ContextVar, Token
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol, TypeVar, overload
from weakref import ref

import msgspec

from semel import forks, steps
from semel.errors import CodecError, ConfigurationError
from semel.keys import check_ref
from semel.runtime import NO_INTERRUPT
from semel.shrinking import TOO_LARGE_FOR_STORE

if TYPE_CHECKING:
    from semel.calls import Call
    from semel.codec import Codec
    from semel.flow import Engine
    from semel.keys import Scope
    from semel.model import Ask, Record
    from semel.runtime import Interrupt
    from semel.store import Store
    from semel.turns import Turn

__all__ = [
    "CONSUMED",
    "AsyncRun",
    "MaskedRun",
    "Outcome",
    "Run",
    "current_run",
    "leave",
    "leave_block",
    "not_kept",
    "run_or_none",
]

T = TypeVar("T")
D = TypeVar("D")
T_co = TypeVar("T_co", covariant=True)
_NO_DEFAULT: Any = object()

# Weakly: an interruption may leave a context that nobody resets, and it must not keep the run, and its lease, alive.
_current: ContextVar[ref[Run] | None] = ContextVar("semel_run")


def leave(token: Token[ref[Run] | None]) -> None:
    """It is not the current one any more."""
    try:  # noqa: SIM105 - each call passes here
        _current.reset(token)
    except ValueError:
        pass  # in another context than it was entered in: the collector closes the coroutines that nobody waits for


def leave_block(run: Run) -> None:
    """As `leave`, of a claim by hand: such blocks need not end in the reverse order of their beginnings."""
    run.left = True
    known = _current.get(None)
    while known is not None and (current := known()) is not None and current.left:
        known = current.parent
        _current.set(known)


def run_or_none() -> Run | None:
    known = _current.get(None)
    run = None if known is None else known()
    while run is not None and run.left:  # its block ended in another run, which has put it back
        run = None if run.parent is None else run.parent()
    return run


@overload
def current_run() -> Run: ...


@overload
def current_run(default: D) -> Run | D: ...


def current_run(default: Any = _NO_DEFAULT) -> Any:
    """The run that this code belongs to. Outside of one there is nothing to return: `default`, or ConfigurationError without one."""
    run = run_or_none()
    if run is None:
        if default is not _NO_DEFAULT:
            return default
        raise ConfigurationError(
            "current_run() works only inside a function that semel runs (execute, consume, @once, a probe): elsewhere, as in a "
            "route that was called without a key, current_run(None) gives None"
        )
    return run


CONSUMED: Final = "it was consumed, and consume keeps none"
_REMEDIES: Final = {
    CONSUMED: "Use `execute` for this key from the first time on",
    TOO_LARGE_FOR_STORE: "The store refused it, or it took too long to arrive: raise what the server takes (max_allowed_packet on MariaDB "
    "and MySQL, proto-max-bulk-len on Redis) and `timeout`, or return less",
}


def not_kept(codec: Codec | None) -> str:
    """Why a record of a run that ended well holds nothing: `consume` made it. Who wants no result, or has none, misses none."""
    return "" if codec is None or codec.result_type is NoneType else CONSUMED


class Outcome(msgspec.Struct, Generic[T_co]):
    """What happened: the value, whether it was replayed, the ref, and the attempt that made it.

    A result over `max_result`, or of a key that was consumed, is known as done but was not kept: then `value` raises
    CodecError on a replay, and `ref` is what is left to find it by.
    """

    _value: T_co
    replayed: bool
    ref: str | None
    attempt: int
    marker: str = ""

    @property
    def value(self) -> T_co:
        if self.replayed and self.marker:
            remedy = _REMEDIES.get(self.marker, "Raise `max_result`")
            if self.ref is None:
                remedy += ", or let the function set a ref with run.set_ref(...)"
            raise CodecError(
                f"the effect happened and is not run again, but its result was not kept ({self.marker}); "
                f"ref={self.ref!r}. {remedy}",
                recorded=True,
            )
        return self._value

    def __repr__(self) -> str:
        value = f"<not kept: {self.marker}>" if self.replayed and self.marker else repr(self._value)
        return f"Outcome({value}, replayed={self.replayed}, ref={self.ref!r}, attempt={self.attempt})"


class Run:
    """One attempt at a scope, from its claim to its settle."""

    __slots__ = (
        "__weakref__",
        "_engine",
        "_known",
        "_labels",
        "_minted",
        "_raw_steps",
        "_started",
        "_threads",
        "ask",
        "attempt",
        "call",
        "detached",
        "due",
        "epoch",
        "in_flight",
        "inherits_ref",
        "interrupt",
        "lease_at_risk",
        "lease_lost",
        "left",
        "parent",
        "policy",
        "ref",
        "secret_id",
        "settling",
        "started",
        "stuck",
        "token",
        "unheard",
        "weak",
        "won_at",
    )

    def __init__(self, engine: Engine, call: Call, ask: Ask, record: Record, interrupt: Interrupt) -> None:
        self._engine = engine
        self.weak = ref(self)
        self.parent = _current.get(None)
        self.call = call
        self.ask = ask
        self.attempt = record.attempts
        self.token = record.token
        self.policy = record.policy  # the stricter of what was stored and what this caller asked for
        self.ref = record.ref
        self.inherits_ref = True
        """What an attempt that failed has left behind gives way to what this one makes."""
        self.secret_id = record.secret_id
        self.interrupt = interrupt
        self.lease_lost = False
        self.lease_at_risk = False
        self.settling = False
        self.left = False
        """Of a claim by hand: its block has ended."""
        self._threads: set[Any] | None = None
        self._minted: dict[str, str] | None = None
        self.in_flight: dict[str, Turn] = {}
        self.started = False
        """Whether its function was reached: until then an interrupted caller gives the key back."""
        self.detached = False
        """Its function runs on without its caller."""
        self.epoch = forks.epoch
        self.stuck = False
        self.unheard: Exception | None = None
        """The store did not answer a step or an id: this very error says nothing about the function."""
        self.due = 0.0
        self.won_at = engine.runtime.now()
        self._started = record.updated
        self._labels = record.labels
        self._raw_steps = record.steps
        self._known: dict[str, steps.Step] | None = None

    @property
    def scope(self) -> Scope:
        return self.ask.scope

    @property
    def threads(self) -> set[Any]:
        """Threads of steps that run on although whoever waited for them has given up; most runs have none."""
        if self._threads is None:
            self._threads = set()
        return self._threads

    @property
    def busy(self) -> bool:
        """Whether something of it is under way: a step, or a thread that was left by its caller."""
        return bool(self.in_flight or self._threads)

    def leave(self) -> None:
        """Its function has ended: it takes no more steps, and a lost lease cancels nobody, who does something else by now."""
        self.settling = True
        self.interrupt = NO_INTERRUPT

    @property
    def foreign(self) -> bool:
        """Whether this is a child that its function has forked. The parent runs on, and speaks for it alone (R29)."""
        return self.epoch != forks.epoch

    def check_process(self) -> None:
        if self.foreign:
            raise ConfigurationError(
                f"{self.scope!r} is run by the process that this one was forked from, which records its steps and its outcome: let a "
                "forked child, one of multiprocessing too, give that process what it has made; leave one of os.fork() with os._exit()"
            )

    @property
    def minted(self) -> dict[str, str]:
        """Ids that were made here, by name: one whose note had no answer may be stored, and is the one to be told."""
        if self._minted is None:
            self._minted = {}
        return self._minted

    def is_kept_by(self, scope: Scope, store: Store) -> bool:
        """Whether it runs this key there, as far as it knows, and cannot end while this code waits. Another task may."""
        if self.ask.scope.hash != scope.hash or self._engine.bench.store is not store:
            return False
        here = self.colour == "sync" or self.interrupt.is_here
        return here and not self.settling and not self.lease_lost

    @property
    def key(self) -> str:
        """Where a `reconcile` probes a record whose key is masked, as much as the record says of it: it has a "…"."""
        return self.call.key

    @property
    def tenant(self) -> str:
        return self.ask.scope.tenant

    @property
    def operation(self) -> str:
        return self.ask.scope.operation

    @property
    def colour(self) -> Literal["sync", "async"]:
        """Which face runs it."""
        return self._engine.runtime.colour

    @property
    def labels(self) -> Mapping[str, str]:
        """Those of the record, which its first caller gave: whoever goes on with a run need not know them."""
        return self._labels or self.ask.labels or {}

    @property
    def steps(self) -> dict[str, steps.Step]:
        """Steps and ids that are remembered, by name."""
        if self._known is None:
            self._known = steps.decode(self._raw_steps)
        return self._known

    @property
    def has_steps(self) -> bool:
        return bool(self._raw_steps) or bool(self._known)

    def summary(self) -> bytes | None:
        """What is kept of its steps when it is done. Those that cannot be read stay as they are: the effect has happened."""
        try:
            return steps.summarize(self.steps)
        except CodecError:
            return None

    def all_steps(self, left_out: AbstractSet[str] = frozenset()) -> bytes | None:
        """As a record of its own has them; None if they cannot be read."""
        try:
            known = tuple(self.steps.values())
        except CodecError:
            return None
        return b"".join(steps.encode(step) for step in known if step.name not in left_out)

    def clock(self) -> float:
        """The store's time, as far as this process can tell: its answer to the claim plus what passed since."""
        return self._started + (self._engine.runtime.now() - self.won_at)

    def set_ref(self, ref: str) -> None:
        """Keep a small stable pointer to the result; it is stored with the outcome, and refused after that."""
        if self.settling and not self.busy:  # a step that is under way may still say it
            raise ConfigurationError(f"{self.scope!r} has ended: it takes no ref any more ({ref!r})")
        self.ref = check_ref(ref)
        self.inherits_ref = False

    def downstream_key(self, name: str) -> str:
        """A key for an outside service: the same on every attempt of this scope, another one for another name.

        Raises ConfigurationError in a probe of a record whose key is masked (`recovery(…, masked=True)`): nobody knows it there.
        """
        return self._engine.secrets.derive(self.secret_id, self.tenant, self.operation, self.key, name)

    # A coroutine function is a step of a coroutine (elsewhere it is refused, or its value waited for).
    @overload
    def step(
        self,
        name: str,
        fn: Callable[..., Coroutine[Any, Any, T]],
        /,
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        request: Any = None,
        result_type: Any = None,
        on_unknown: Any = None,
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def step(
        self,
        name: str,
        fn: Callable[..., T],
        /,
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        request: Any = None,
        result_type: Any = None,
        on_unknown: Any = None,
    ) -> T: ...
    def step(
        self,
        name: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        request: Any = None,
        result_type: Any = None,
        on_unknown: Any = None,
        **unknown: Any,
    ) -> Any:
        """Run `fn` once for this scope, whatever happens to attempts; its result is remembered.

        Await it in a coroutine. `hold` and a probe as `on_unknown` leave a mark before `fn` starts. Without one a step is
        as its call, but a probe of the call knows nothing of its steps: under one they are held.
        """
        if unknown:
            raise ConfigurationError(
                f"unknown option {min(unknown)!r} of step {name!r}: the options of a step are kwargs, request, result_type, on_unknown; "
                "arguments for its function go in positionally or as kwargs={...}"
            )
        self.check_process()
        step = self._engine.stepper.step(
            self, name, fn, args, {} if kwargs is None else kwargs, request, result_type, on_unknown
        )
        return self._engine.runtime.drive(step)

    def new_id(self, kind: str, *, name: str | None = None) -> Any:
        """Mint a public id (a str) once per scope: the same after a takeover; durable when it returns.

        In a coroutine it is awaited, so its type is Any here; `current_async_run()` has the exact one.
        """
        self.check_process()
        minted = self._engine.stepper.new_id(self, kind, kind if name is None else name)
        return self._engine.runtime.drive(minted)

    def __repr__(self) -> str:
        return f"<Run {self.scope!r} attempt {self.attempt}>"


class MaskedRun(Run):
    """A lost run whose key is masked, as its probe sees it."""

    __slots__ = ()

    def downstream_key(self, name: str) -> str:
        raise ConfigurationError(
            f"the key of this record is masked ({self.key}), and downstream_key({name!r}) of a masked one would be another key than "
            "the run's: keep the downstream key with the record, as its ref (run.set_ref) or a label, and look for that"
        )


class AsyncRun(Protocol):
    """A `Run` as a coroutine sees it: the same object, typed for where `step` and `new_id` are awaited.

    A type only. One class serves both colours, because a run may be used in both: a coroutine's steps may be plain
    functions, which run in threads and see the same run there.
    """

    attempt: int
    ref: str | None
    lease_lost: bool
    lease_at_risk: bool

    @property
    def scope(self) -> Scope: ...
    @property
    def key(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def operation(self) -> str: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def steps(self) -> dict[str, steps.Step]: ...
    @property
    def has_steps(self) -> bool: ...
    def clock(self) -> float: ...
    def set_ref(self, ref: str) -> None: ...
    def downstream_key(self, name: str) -> str: ...
    @overload
    def step(
        self,
        name: str,
        fn: Callable[..., Awaitable[T]],
        /,
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        request: Any = None,
        result_type: Any = None,
        on_unknown: Any = None,
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def step(
        self,
        name: str,
        fn: Callable[..., T],
        /,
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        request: Any = None,
        result_type: Any = None,
        on_unknown: Any = None,
    ) -> Coroutine[Any, Any, T]: ...
    def new_id(self, kind: str, *, name: str | None = None) -> Coroutine[Any, Any, str]: ...
