"""`@once(operation=…, key=…, request=…)`: a function, method or handler class that runs once per key."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import WRAPPER_ASSIGNMENTS, partial, update_wrapper, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

from semel.calls import refuse_generator
from semel.codec import return_type
from semel.codec.annotations import Unresolved
from semel.errors import ConfigurationError
from semel.keys import check_fields, check_operation, check_tenant, fingerprint
from semel.loop import is_async
from semel.namesakes import Namesakes
from semel.options import OF_A_CALL, Options, unknown_option
from semel.picking import Picker, all_arguments, is_path, picker, text_of
from semel.settings import checked_labels, checked_readable

if TYPE_CHECKING:
    from semel.once import AsyncSemel, Semel

__all__ = ["decorate"]

_OF_A_CALL: Final = frozenset({"labels", "fields", "readable"})
_PICKED: Final = ("key", "request", "tenant")
_OF_ALL: Final = ("on_unknown", "result_type")  # what a face may say for every call
_OWN: Final = ("key", "request", "method")
_NULL: Final = fingerprint(None)
_OF_A_FUNCTION: Final = ("__annotations__", "__code__", "__defaults__", "__kwdefaults__")
_PLACED: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def decorate(face: Semel | AsyncSemel, misplaced: tuple[object, ...], given: Mapping[str, object]) -> Any:
    """The decorator itself. Bad options are refused here, not at the first call."""
    options: dict[str, Any] = dict(given)
    if misplaced:
        raise ConfigurationError(
            "write @once(...) with parentheses, and its options by name: @once(key='cmd.id')"
        )
    picked: dict[str, Any] = {name: options.pop(name) for name in _PICKED if name in options}
    picked = {name: chosen for name, chosen in picked.items() if chosen is not None or name == "tenant"}
    method = options.pop("method", None)
    if own := options.keys() & {"fingerprint", "kwargs"}:
        raise ConfigurationError(
            f"{min(own)}= belongs to one call, and @once decorates all of them: it calls the function with the arguments it "
            "gets, and takes what tells two requests apart from request= (a field path or a callable)"
        )
    for name in options:
        if name not in Options.__struct_fields__ and name not in OF_A_CALL:
            raise unknown_option(name, _OWN)
    _check_of_a_call(options, picked)
    face._options({name: value for name, value in options.items() if name not in _OF_A_CALL})  # noqa: SLF001 - our own face

    def wrap(target: Any) -> Any:
        if isinstance(target, type):
            name = method or "handle"
            handler = target.__dict__.get(name)
            if handler is None:
                raise _no_method(target, name)
            setattr(target, name, _wrapped(face, handler, options, picked, is_method=True))
            return target
        if method is not None:
            raise ConfigurationError(
                f"method={method!r} names a method of a handler class, and {_title(target)} is none: leave it out"
            )
        return _wrapped(face, target, options, picked, is_method=_is_method(target))

    return wrap


def _no_method(target: type, name: str) -> ConfigurationError:
    for parent in target.__mro__[1:]:
        if name in vars(parent):
            return ConfigurationError(
                f"{target.__name__} has no method {name!r} of its own, it inherits that of {parent.__name__}: decorate "
                f"{parent.__name__}, or define {name!r} here, so that what runs once has one name"
            )
    return ConfigurationError(f"{target.__name__} has no method {name!r} of its own: pass method=…")


def _check_of_a_call(options: dict[str, Any], picked: Mapping[str, Any]) -> None:
    if "readable" in options:
        checked_readable(options["readable"])
    if "operation" in options:
        check_operation(options["operation"])
    if options.get("labels") is not None:
        checked_labels(options["labels"])
    if options.get("fields") is None:
        return
    if "request" not in picked:
        raise ConfigurationError(
            "fields= chooses fields of request=, and there is no request=: say what the request is, as request='cmd'"
        )
    options["fields"] = check_fields(options["fields"])  # what can be read but once, too


def _is_method(fn: Any) -> bool | None:
    """A function defined in a class body that takes its object or class first; a bound one has it already. None: only its use tells."""
    parent = getattr(fn, "__qualname__", "").rpartition(".")[0]
    if (
        isinstance(fn, staticmethod | classmethod)
        or inspect.ismethod(fn)
        or not parent
        or parent.endswith("<locals>")
    ):
        return False
    parameters = _signature(fn).parameters.values()
    first = next(iter(parameters), None)
    if first is None or first.kind not in _PLACED:
        return False
    return True if first.name in ("self", "cls") else None


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
    picked: Mapping[str, Any],
    *,
    is_method: bool | None,
) -> Any:
    if isinstance(fn, staticmethod):
        return staticmethod(_wrapped(face, fn.__func__, options, picked, is_method=False))
    if isinstance(fn, classmethod):
        return _OnceOfClass(face, fn.__func__, options, picked, is_method=True)
    if is_method is None:
        return _as_used(face, fn, options, picked)
    once = _Once(face, fn, options, picked, is_method=is_method)
    if is_method:
        return once
    decorated: Any = _async_call(once, fn) if face._colour == "async" else _sync_call(once, fn)  # noqa: SLF001 - our own face
    decorated.outcome = once.outcome
    return decorated


def _as_used(face: Semel | AsyncSemel, fn: Any, options: Mapping[str, Any], picked: Mapping[str, Any]) -> Any:
    """A method, a plain function, or either: whatever its options make sense for."""
    try:
        plain = _wrapped(face, fn, options, picked, is_method=False)
    except ConfigurationError as error:
        try:
            return _wrapped(face, fn, options, picked, is_method=True)
        except ConfigurationError:
            raise error from None
    try:
        method = _wrapped(face, fn, options, picked, is_method=True)
    except ConfigurationError:
        return plain
    return _Either(plain, method)


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
    """The decorated thing: binds arguments, picks key, request and tenant, calls the face."""

    def __init__(
        self,
        face: Semel | AsyncSemel,
        fn: Callable[..., Any],
        options: Mapping[str, Any],
        picked: Mapping[str, Any],
        *,
        is_method: bool,
    ) -> None:
        refuse_generator(fn)
        # What a function carries is not to stand for what is ours: one that `@once` has decorated has an `outcome`.
        self.__dict__.update(
            {name: value for name, value in getattr(fn, "__dict__", {}).items() if not hasattr(_Once, name)}
        )
        update_wrapper(self, fn, updated=())  # last: of a `__wrapped__` that it carries, too
        self._face = face
        self._fn = fn
        self._is_method = is_method
        if face._colour == "sync" and is_async(fn):  # noqa: SLF001 - our own face
            raise ConfigurationError(f"{_title(fn)} is a coroutine function: decorate it with an AsyncSemel")
        self._whole = signature = _signature(fn)
        first = next(iter(signature.parameters), "") if is_method else ""
        self._of_class = first == "cls" or isinstance(self, _OnceOfClass)
        parameters = list(signature.parameters.values())[1 if is_method else 0 :]
        self._signature = signature.replace(parameters=parameters)
        named = {name: getattr(fn, name) for name in WRAPPER_ASSIGNMENTS if hasattr(fn, name)}
        own = getattr(fn, "__dict__", {})
        self._as_bound = {**own, **named, "__wrapped__": fn, "__signature__": self._signature}
        self._options = {"operation": f"{fn.__module__}.{_title(fn)}"[:255], **options}
        asked = face._options({name: options[name] for name in _OF_ALL if name in options})  # noqa: SLF001 - our own face
        self._probes = callable(asked.on_unknown)
        # As text, and so perhaps of another name: then what is found is what would have been.
        self._gives_self = (
            is_method and asked.result_type is None and "Self" in str(signature.return_annotation)
        )
        if is_method and "key" not in picked and not parameters and not self._of_class:
            raise ConfigurationError(
                f"{_title(fn)} takes nothing but {first}, which is no part of a key by itself: all objects would share one "
                f"record. Say what tells them apart, as key='{first}.id'"
            )
        choose = partial(picker, first=first, signature=self._signature)
        self._key = choose(picked["key"], "key") if "key" in picked else all_arguments
        self._request = choose(picked["request"], "request") if "request" in picked else None
        self._tenant: Picker | None = None
        if "tenant" in picked:
            self._choose_tenant(picked["tenant"], choose)
        if "operation" not in options and _is_nameless(fn):
            raise ConfigurationError(
                f"{fn!r} has no name of its own, and two such functions would share their keys: say operation='…'"
            )
        self._namesakes: Namesakes | None = None if "operation" in options else face._namesakes  # noqa: SLF001 - our own face
        if self._namesakes is not None:
            self._namesakes.add(self._options["operation"], self)

    def _choose_tenant(self, tenant: Any, choose: Callable[[Any, str], Picker]) -> None:
        """A text with a dot that begins with an argument is a path; any other one is the tenant itself."""
        if isinstance(tenant, str) and not is_path(tenant, self._whole):
            self._options["tenant"] = check_tenant(tenant)
        else:
            self._tenant = choose(tenant, "tenant")

    def outcome(self, /, *args: Any, **kwargs: Any) -> Any:
        """The Outcome instead of the value; await it in async code."""
        if self._of_class and not (args and isinstance(args[0], type)):
            # Since Python 3.13 a classmethod does not bind what it wraps, so the class did not come along.
            raise ConfigurationError(
                f"{_title(self._fn)}.outcome(...) does not know its class: put @once above @classmethod"
            )
        return self._outcome(*args, **kwargs)

    def _outcome(self, /, *args: Any, **kwargs: Any) -> Any:
        if (namesakes := self._namesakes) is not None:
            self._namesakes = None
            namesakes.look(self._options["operation"], self)
        owner, rest = None, args
        if self._is_method:
            if not args:
                self._whole.bind(**kwargs)  # which says what is missing
                first = next(iter(self._whole.parameters))
                raise TypeError(f"{_title(self._fn)}() missing 1 required positional argument: {first!r}")
            owner, rest = args[0], args[1:]
        bound = self._signature.bind(*rest, **kwargs)
        bound.apply_defaults()
        options = dict(self._options)
        if self._request is not None:
            options["request"] = request = self._request(owner, bound)
            if request is None and "fields" not in options:
                # It was asked for: another one under the same key is another request (R22).
                options["fingerprint"] = _NULL
        if self._tenant is not None:
            options["tenant"] = text_of(self._tenant(owner, bound))
        if self._gives_self and owner is not None:
            options["result_type"] = self._type_for(owner)
        if kwargs and self._probes:
            args, kwargs = self._in_place(args, kwargs, bound)
        options["kwargs"] = kwargs
        return self._face.execute(text_of(self._key(owner, bound)), self._fn, *args, **options)

    def _type_for(self, owner: Any) -> Any:
        """What is annotated with Self: it is called with its object or class among its arguments, which no annotation knows of."""
        meant = return_type(MethodType(self._fn, owner))
        return None if isinstance(meant, Unresolved) else meant

    def _in_place(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], bound: inspect.BoundArguments
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What was given by name at its place, where it has one: a probe gets what is positional, and no more than was given."""
        owners = 1 if self._is_method else 0
        places = [name for name, what in self._signature.parameters.items() if what.kind in _PLACED]
        named = max((at for at, name in enumerate(places, 1) if name in kwargs), default=0)
        return (*args[:owners], *bound.args[: max(len(args) - owners, named)]), bound.kwargs

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._face._colour == "async":  # noqa: SLF001 - our own face
            return self._value(*args, **kwargs)
        return self._outcome(*args, **kwargs).value

    async def _value(self, /, *args: Any, **kwargs: Any) -> Any:
        return (await self._outcome(*args, **kwargs)).value

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        bound: Any = partial(self, instance)
        bound.__dict__.update(self._as_bound)
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

    call.__signature__ = signature  # type: ignore[attr-defined]  # functions take attributes
    return call


class _OnceOfClass(_Once):
    """`@once` above `@classmethod`: bound to the class, however it is reached."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return super().__get__(type(instance) if owner is None else owner, owner)


class _Either:
    """Of a class body, with a first parameter of any name: bound to an object it is a method, and a plain function else.

    `@staticmethod` may stand above, and nothing but the look-up tells which of the two was meant. So it looks like the plain
    function, to frameworks that ask whether it is a coroutine function, too.
    """

    def __init__(self, plain: Any, method: _Once) -> None:
        update_wrapper(self, plain)
        self.__dict__.update({name: getattr(plain, name) for name in _OF_A_FUNCTION})
        self._plain, self._method = plain, method

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._plain(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self._plain if instance is None else self._method.__get__(instance, owner)


def _is_nameless(fn: Any) -> bool:
    return "<lambda>" in _title(fn) or not hasattr(fn, "__qualname__")


def _title(fn: Any) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))
