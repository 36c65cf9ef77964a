"""`@once(operation=…, key=…, request=…)`: a function, method or handler class that runs once per key."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial, update_wrapper, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Protocol, Self, TypeVar, overload
from uuid import UUID

from semel.calls import refuse_generator
from semel.errors import ConfigurationError
from semel.keys import FieldPath, fingerprint
from semel.loop import is_async
from semel.run import Outcome
from semel.settings import checked_readable

if TYPE_CHECKING:
    from semel.once import AsyncSemel, Semel

__all__ = ["AsyncDecorator", "AsyncOnce", "Decorator", "Once", "decorate"]

P = ParamSpec("P")
Q = ParamSpec("Q")
C = TypeVar("C")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Picker = Callable[[inspect.BoundArguments], Any]


class Once(Protocol[P, T_co]):
    """A decorated function: called as before, and asked for its whole outcome."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...

    def outcome(self, *args: P.args, **kwargs: P.kwargs) -> Outcome[T_co]: ...

    # Bound to an object, a method loses its first argument.
    @overload
    def __get__(self, instance: None, owner: type, /) -> Self: ...
    @overload
    def __get__(
        self: Once[Concatenate[Any, Q], T], instance: object, owner: type | None = None, /
    ) -> Once[Q, T]: ...


class AsyncOnce(Protocol[P, T_co]):
    """The same for AsyncSemel: what was plain is awaited now."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T_co]: ...

    def outcome(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, Outcome[T_co]]: ...

    @overload
    def __get__(self, instance: None, owner: type, /) -> Self: ...
    @overload
    def __get__(
        self: AsyncOnce[Concatenate[Any, Q], T], instance: object, owner: type | None = None, /
    ) -> AsyncOnce[Q, T]: ...


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


_OF_A_CALL: Final = frozenset({"labels", "fields", "readable"})


def decorate(face: Semel | AsyncSemel, misplaced: tuple[object, ...], options: dict[str, Any]) -> Any:
    """The decorator itself. Bad options are refused here, not at the first call."""
    if misplaced:
        raise ConfigurationError(
            "write @once(...) with parentheses, and its options by name: @once(key='cmd.id')"
        )
    key, request = options.pop("key", None), options.pop("request", None)
    method = options.pop("method", None)
    if own := options.keys() & {"fingerprint", "kwargs"}:
        raise ConfigurationError(
            f"{min(own)}= belongs to one call, and @once decorates all of them: it calls the function with the arguments it "
            "gets, and takes what tells two requests apart from request= (a field path or a callable)"
        )
    if "readable" in options:
        checked_readable(options["readable"])
    face._options({name: value for name, value in options.items() if name not in _OF_A_CALL})  # noqa: SLF001 - our own face

    def wrap(target: Any) -> Any:
        if isinstance(target, type):
            name = method or "handle"
            handler = target.__dict__.get(name)
            if handler is None:
                raise ConfigurationError(
                    f"{target.__name__} has no method {name!r} of its own: pass method=…"
                )
            setattr(target, name, _wrapped(face, handler, options, key, request, is_method=True))
            return target
        return _wrapped(face, target, options, key, request, is_method=_is_method(target))

    return wrap


def _is_method(fn: Any) -> bool:
    """A function defined in a class body that takes its object or class first; a bound one has it already."""
    parent = getattr(fn, "__qualname__", "").rpartition(".")[0]
    if (
        isinstance(fn, staticmethod | classmethod)
        or inspect.ismethod(fn)
        or not parent
        or parent.endswith("<locals>")
    ):
        return False
    return next(iter(_signature(fn).parameters), "") in ("self", "cls")


def _signature(fn: Any) -> inspect.Signature:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{fn!r} has no signature to take a key from: decorate a Python function, or use once.execute(key, fn)"
        ) from error


def _wrapped(
    face: Semel | AsyncSemel,
    fn: Any,
    options: Mapping[str, Any],
    key: Any,
    request: Any,
    *,
    is_method: bool,
) -> Any:
    if isinstance(fn, staticmethod):
        return staticmethod(_wrapped(face, fn.__func__, options, key, request, is_method=False))
    if isinstance(fn, classmethod):
        return _OnceOfClass(face, fn.__func__, options, key, request, is_method=True)
    once = _Once(face, fn, options, key, request, is_method=is_method)
    if is_method:
        return once
    decorated: Any = _async_call(once, fn) if face._colour == "async" else _sync_call(once, fn)  # noqa: SLF001 - our own face
    decorated.outcome = once.outcome
    return decorated


def _async_call(once: _Once, fn: Callable[..., Any]) -> Any:
    @wraps(fn)
    async def call(*args: Any, **kwargs: Any) -> Any:
        return (await once.outcome(*args, **kwargs)).value

    return call


def _sync_call(once: _Once, fn: Callable[..., Any]) -> Any:
    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return once.outcome(*args, **kwargs).value

    return call


class _Once:
    """The decorated thing: binds arguments, picks key and request, calls the face."""

    def __init__(
        self,
        face: Semel | AsyncSemel,
        fn: Callable[..., Any],
        options: Mapping[str, Any],
        key: Any,
        request: Any,
        *,
        is_method: bool,
    ) -> None:
        refuse_generator(fn)
        update_wrapper(self, fn)
        self._face = face
        self._fn = fn
        self._is_method = is_method
        if face._colour == "sync" and is_async(fn):  # noqa: SLF001 - our own face
            raise ConfigurationError(f"{_title(fn)} is a coroutine function: decorate it with an AsyncSemel")
        signature = _signature(fn)
        self._of_class = is_method and next(iter(signature.parameters), "") == "cls"
        parameters = list(signature.parameters.values())[1 if is_method else 0 :]
        self._signature = signature.replace(parameters=parameters)
        self._options = {"operation": f"{fn.__module__}.{_title(fn)}"[:255], **options}
        self._key = _picker(key, self._signature, "key") if key is not None else _all_arguments
        self._request = None if request is None else _picker(request, self._signature, "request")
        if "operation" not in options and _is_nameless(fn):
            raise ConfigurationError(
                f"{fn!r} has no name of its own, and two such functions would share their keys: say operation='…'"
            )

    def outcome(self, *args: Any, **kwargs: Any) -> Any:
        """The Outcome instead of the value; await it in async code."""
        if self._of_class and not (args and isinstance(args[0], type)):
            # Since Python 3.13 a classmethod does not bind what it wraps, so the class did not come along.
            raise ConfigurationError(
                f"{_title(self._fn)}.outcome(...) does not know its class: put @once above @classmethod"
            )
        return self._outcome(*args, **kwargs)

    def _outcome(self, *args: Any, **kwargs: Any) -> Any:
        rest = args[1:] if self._is_method else args
        bound = self._signature.bind(*rest, **kwargs)
        bound.apply_defaults()
        options = dict(self._options)
        if self._request is not None:
            options["request"] = self._request(bound)
        options["kwargs"] = kwargs
        return self._face.execute(_text(self._key(bound)), self._fn, *args, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._face._colour == "async":  # noqa: SLF001 - our own face
            return self._value(*args, **kwargs)
        return self._outcome(*args, **kwargs).value

    async def _value(self, *args: Any, **kwargs: Any) -> Any:
        return (await self._outcome(*args, **kwargs)).value

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        bound: Any = partial(self, instance)
        if self._face._colour == "async":  # noqa: SLF001 - our own face
            bound = _awaited(self._value, instance, self._fn, self._signature)
        bound.outcome = partial(self._outcome, instance)
        return bound


def _awaited(
    value: Callable[..., Any], instance: Any, fn: Callable[..., Any], signature: inspect.Signature
) -> Any:
    """A bound method that frameworks know for a coroutine function."""

    @wraps(fn)
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await value(instance, *args, **kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


class _OnceOfClass(_Once):
    """`@once` above `@classmethod`: bound to the class, however it is reached."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return super().__get__(type(instance) if owner is None else owner, owner)


def _is_nameless(fn: Any) -> bool:
    return "<lambda>" in _title(fn) or not hasattr(fn, "__qualname__")


def _title(fn: Any) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))


def _picker(chosen: Any, signature: inspect.Signature, what: str) -> Picker:
    """A field path over the arguments, or a callable that gets them as the function does."""
    if isinstance(chosen, str):
        path = FieldPath(chosen)
        if path.root not in signature.parameters:
            names = ", ".join(signature.parameters) or "none"
            raise ConfigurationError(
                f"{what}={chosen!r}: there is no argument {path.root!r}; the arguments are: {names}"
            )
        return lambda bound: path(bound.arguments)
    if callable(chosen):
        return lambda bound: chosen(*bound.args, **bound.kwargs)
    raise ConfigurationError(
        f"{what}= must be a field path such as 'cmd.request_id' or a callable, not {chosen!r}"
    )


def _all_arguments(bound: inspect.BoundArguments) -> str:
    """No key= given: the same arguments are the same action."""
    return fingerprint(dict(bound.arguments))


def _text(key: Any) -> Any:
    """Ids are often numbers or UUIDs; everything else that is not text is refused as a key."""
    if isinstance(key, UUID) or (isinstance(key, int) and not isinstance(key, bool)):
        return str(key)
    return key
