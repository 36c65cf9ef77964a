"""What editors and type checkers know: the options of each verb, so that a misspelt word is seen before the program runs, and what `@once` makes.

What an option means, and what it may be, is decided where it is read (`options.py`, `face.py`); a test compares the names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypedDict, TypeVar, overload

from semel.options import Duration, OnError
from semel.run import Outcome

__all__ = [
    "AsyncDecorator",
    "AsyncOnce",
    "AsyncOnceOfClass",
    "CallOptions",
    "Conduct",
    "Decorator",
    "DecoratorOptions",
    "Forgetting",
    "Once",
    "OnceOfClass",
    "Place",
    "Readable",
    "Recovering",
    "Resolving",
]

P = ParamSpec("P")
Q = ParamSpec("Q")
C = TypeVar("C")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Readable = Literal["full", "masked", "none"]


class Conduct(TypedDict, total=False):
    """What a face takes as the default of all its calls, besides what its signature names."""

    poll: tuple[Duration, Duration]
    on_error: OnError | None
    on_unknown: Literal["retry", "hold"] | Callable[..., Any]
    on_lease_lost: Literal["cancel", "warn"]
    result_type: Any
    ref_type: str | None
    compress_over: int | None
    max_waiters: int
    fingerprints: Literal["optional", "required"]
    inline: bool


class _Asked(Conduct, total=False):
    """Of a call and of a decorated function."""

    operation: str
    lease: Duration
    retention: Duration | None
    tombstone: Duration
    wait: Duration
    max_result: int
    fields: Iterable[str] | None
    labels: Mapping[str, str] | None
    readable: Readable


class CallOptions(_Asked, total=False):
    """Of `execute`, `consume` and `claim`."""

    tenant: str
    request: Any
    fingerprint: str | None
    kwargs: Mapping[str, Any] | None


class DecoratorOptions(_Asked, total=False):
    """Of `@once`: key, request and tenant are field paths over the arguments, or functions of them."""

    key: str | Callable[..., Any] | None
    request: str | Callable[..., Any] | None
    tenant: str | Callable[..., Any]
    method: str | None


class Place(TypedDict, total=False):
    """Which key is meant, besides its text."""

    tenant: str
    operation: str


class Forgetting(Place, total=False):
    retention: Duration | None


class Resolving(Forgetting, total=False):
    tombstone: Duration
    result_type: Any


class Recovering(TypedDict, total=False):
    """How what a `reconcile` settles is kept."""

    retention: Duration | None
    tombstone: Duration
    result_type: Any
    max_result: int
    compress_over: int | None
    lease: Duration
    on_error: OnError | None
    on_lease_lost: Literal["cancel", "warn"]


class Once(Protocol[P, T_co]):
    """A decorated function: called as before, and asked for its whole outcome."""

    __name__: str
    __qualname__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...

    def outcome(self, *args: P.args, **kwargs: P.kwargs) -> Outcome[T_co]: ...

    @overload
    def __get__(self, instance: None, owner: type, /) -> OnceOfClass[P, T_co]: ...
    # Bound to an object, a method loses its first argument.
    @overload
    def __get__(
        self: Once[Concatenate[Any, Q], T], instance: object, owner: type | None = None, /
    ) -> Once[Q, T]: ...


class OnceOfClass(Protocol[P, T_co]):
    """One that was reached through its class: with its object as the first argument, or a classmethod, which has its class."""

    __name__: str
    __qualname__: str

    # Not two types, chosen in `__get__`: mypy does not look at the first parameter there, and takes the first overload.
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...
    @overload
    def __call__(self: OnceOfClass[Concatenate[type[Any], Q], T], *args: Q.args, **kwargs: Q.kwargs) -> T: ...

    @overload
    def outcome(self, *args: P.args, **kwargs: P.kwargs) -> Outcome[T_co]: ...
    @overload
    def outcome(
        self: OnceOfClass[Concatenate[type[Any], Q], T], *args: Q.args, **kwargs: Q.kwargs
    ) -> Outcome[T]: ...


class AsyncOnce(Protocol[P, T_co]):
    """The same as `Once` for AsyncSemel: what was plain is awaited now."""

    __name__: str
    __qualname__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T_co]: ...

    def outcome(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, Outcome[T_co]]: ...

    @overload
    def __get__(self, instance: None, owner: type, /) -> AsyncOnceOfClass[P, T_co]: ...
    @overload
    def __get__(
        self: AsyncOnce[Concatenate[Any, Q], T], instance: object, owner: type | None = None, /
    ) -> AsyncOnce[Q, T]: ...


class AsyncOnceOfClass(Protocol[P, T_co]):
    """The same as `OnceOfClass` for AsyncSemel."""

    __name__: str
    __qualname__: str

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T_co]: ...
    @overload
    def __call__(
        self: AsyncOnceOfClass[Concatenate[type[Any], Q], T], *args: Q.args, **kwargs: Q.kwargs
    ) -> Coroutine[Any, Any, T]: ...

    @overload
    def outcome(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, Outcome[T_co]]: ...
    @overload
    def outcome(
        self: AsyncOnceOfClass[Concatenate[type[Any], Q], T], *args: Q.args, **kwargs: Q.kwargs
    ) -> Coroutine[Any, Any, Outcome[T]]: ...


class Decorator(Protocol):
    @overload
    def __call__(  # type: ignore[overload-overlap]  # a class is a callable too; it is meant first
        self,
        target: type[C],  # pyright: ignore[reportOverlappingOverload]
        /,
    ) -> type[C]: ...
    @overload
    def __call__(self, target: Callable[P, T], /) -> Once[P, T]: ...


class AsyncDecorator(Protocol):
    @overload
    def __call__(  # type: ignore[overload-overlap]  # a class is a callable too; it is meant first
        self,
        target: type[C],  # pyright: ignore[reportOverlappingOverload]
        /,
    ) -> type[C]: ...
    @overload
    def __call__(self, target: Callable[P, Awaitable[T]], /) -> AsyncOnce[P, T]: ...
    @overload
    def __call__(self, target: Callable[P, T], /) -> AsyncOnce[P, T]: ...
