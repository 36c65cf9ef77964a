"""What an annotation tells: which classes a value may consist of, and whether it can be stored at all."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import re
import sys
import types
import typing
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from semel.codec.paths import type_name
from semel.codec.shapes import is_protobuf, is_pydantic, shape_of
from semel.codec.tagged import BUILT_INS
from semel.errors import CodecError

__all__ = [
    "Unresolved",
    "arms_of",
    "bare",
    "check_encodable",
    "named_classes",
    "names_a_cell",
    "return_type",
    "texts_of",
]

_WRAPPERS = (typing.Annotated, typing.Required, typing.NotRequired, typing.Final, typing.ClassVar)
_AWAITABLES = (abc.Awaitable, abc.Coroutine)
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_WRITTEN = (str, types.GenericAlias, types.UnionType)
_MAX_CACHED = 4096
_MOST_WRAPPERS = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Unresolved:
    """Stands for an annotation whose text names what nobody knows at run time: results are plain data, or refused."""

    text: str


# ------------------------------------------------------------------------------------- reading a type


def bare(hint: Any) -> Any:
    """Without the layers that say nothing about the value: Annotated, NewType, `type X = …`, Required."""
    while True:
        if typing.get_origin(hint) in _WRAPPERS:
            hint = typing.get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":  # Python 3.12
            hint = hint.__value__
        else:
            return hint


def arms_of(hint: Any) -> tuple[Any, ...] | None:
    """The alternatives of a union, the bounds of a type variable, the types of literals; None for others."""
    origin = typing.get_origin(hint)
    if origin is typing.Union or origin is types.UnionType:
        return typing.get_args(hint)
    if origin is typing.Literal:
        return tuple({type(value): None for value in typing.get_args(hint)})
    if isinstance(hint, typing.TypeVar):
        return hint.__constraints__ or ((hint.__bound__,) if hint.__bound__ is not None else (Any,))
    return None


def _fields(cls: type) -> Mapping[str, Any]:
    """The annotated parts of a class; those that cannot be resolved here count as Any."""
    if is_pydantic(cls):
        return {name: field.annotation for name, field in cls.model_fields.items()}  # type: ignore[attr-defined]  # a pydantic class, which has them
    if is_protobuf(cls) or issubclass(cls, enum.Enum):
        return {}
    if shape_of(cls) is None and not typing.is_typeddict(cls):
        return {}
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except Exception:  # noqa: BLE001 - a name known to type checkers only; user code is evaluated here
        hints = {}
        for base in reversed(cls.__mro__):
            for name, hint in vars(base).get("__annotations__", {}).items():
                hints[name] = _resolved(hint, _names_around(base), vars(base))
        return hints


def _names_around(cls: type) -> Mapping[str, Any]:
    return getattr(sys.modules.get(cls.__module__), "__dict__", {})


def _resolved(hint: Any, names: Mapping[str, Any], local: Mapping[str, Any], otherwise: Any = Any) -> Any:
    holder = types.SimpleNamespace(__annotations__={"it": hint})
    try:
        return typing.get_type_hints(holder, dict(names), dict(local), include_extras=True)["it"]
    except Exception:  # noqa: BLE001 - see above
        return otherwise


def _generics(cls: type) -> Iterator[Any]:
    """What a class gave to its generic bases: `Order` of `class Orders(Page[Order])`. pydantic's `Page[Order]` is a class of its
    own, whose values may be of `Page` as well."""
    if is_pydantic(cls):
        yield getattr(cls, "__pydantic_generic_metadata__", {}).get("origin")
        return
    for base in cls.__mro__:
        for generic in vars(base).get("__orig_bases__", ()):
            yield from typing.get_args(_resolved(generic, _names_around(base), vars(base)))


def named_classes(hint: Any) -> list[type]:
    """Every storable class that the annotation names, directly, as an argument or through a field."""
    found: dict[type, None] = {}
    seen: set[Any] = set()
    waiting = [hint]
    while waiting:
        here = bare(waiting.pop())
        arms = arms_of(here)
        if arms is not None:
            waiting += arms
            continue
        waiting += typing.get_args(here)
        cls = typing.get_origin(here) or here
        if not isinstance(cls, type) or cls in seen or cls in BUILT_INS:
            continue
        seen.add(cls)
        if shape_of(cls) is not None:
            found[cls] = None
        waiting += _fields(cls).values()
        waiting += _generics(cls)
    return list(found)


# ------------------------------------------------------------------------------------ refusing a type


def check_encodable(hint: Any) -> None:
    """Raise CodecError when a value of this annotation can never be stored, so that the effect never starts.

    What may be stored passes: `Any`, abstract types that built-in values satisfy, names that cannot be resolved.
    """
    for path, cls in _refusals(hint, "", set(), optional=False):
        where = f" ({path[1:]})" if path else ""
        raise CodecError(
            f"the annotated result{where} is a {type_name(cls)}, which cannot be stored and replayed: return plain "
            "data, a dataclass, a msgspec.Struct, a pydantic model or a protobuf message, and name it in the "
            "annotation or in result_type="
        )


def _refusals(hint: Any, path: str, seen: set[type], *, optional: bool) -> Iterator[tuple[str, type]]:
    hint = bare(hint)
    arms = arms_of(hint)
    if arms is not None:
        # Inside a class an absent part may be the rule (`client: Client | None = None`); as a result it is not.
        kept = [arm for arm in arms if optional or arm is not types.NoneType]
        refused = [list(_refusals(arm, path, seen, optional=optional)) for arm in kept]
        if refused and all(refused):
            yield refused[0][0]
        return
    cls = typing.get_origin(hint) or hint
    if cls is Any or not isinstance(cls, type) or cls in seen:
        return
    if not _storable(cls):
        yield path, cls
        return
    if cls not in BUILT_INS:
        seen.add(cls)
        # A model may still be stored as pydantic's own JSON, whatever its fields are.
        for name, field in () if is_pydantic(cls) else _fields(cls).items():
            if not _may_lack(cls, name, field):
                yield from _refusals(field, f"{path}.{name}", seen, optional=True)
    for at, argument in enumerate(typing.get_args(hint)):
        yield from _refusals(argument, f"{path}.{cls.__name__}[{at}]", seen, optional=optional)


def _may_lack(cls: type, name: str, field: Any) -> bool:
    """Whether a value may be without that part: a ClassVar, or a key of a TypedDict that may be absent."""
    wrapper = typing.get_origin(field)
    if wrapper in (typing.ClassVar, typing.NotRequired, typing.Required):
        return wrapper is not typing.Required
    return typing.is_typeddict(cls) and name not in cls.__required_keys__  # type: ignore[attr-defined]  # a TypedDict, which has them


def _storable(cls: type) -> bool:
    if cls in BUILT_INS or typing.is_typeddict(cls) or shape_of(cls) is not None:
        return True
    try:  # an abstract type is fine as long as some built-in value satisfies it: Mapping, Iterable, Number, object
        return any(issubclass(known, cls) for known in BUILT_INS)
    except TypeError:  # a protocol that cannot be asked
        return True


# ---------------------------------------------------------------------------------- functions' results


_known: dict[int, tuple[types.CodeType, Any, Any, Any, bool]] = {}


def return_type(fn: Callable[..., Any]) -> Any:
    """The type a function's result is annotated with; None when there is none, Unresolved when it cannot be resolved.

    Sees through functools.partial, wrappers, methods and callable objects; a class makes instances of itself, and Self is
    the class that a method is bound to; an awaitable counts as what it gives. `-> None` is NoneType.
    """
    bound = None
    if type(fn) is not types.FunctionType or "__wrapped__" in fn.__dict__:
        fn, bound = _innermost(fn)
    if isinstance(fn, type):
        return None if hasattr(fn, "__await__") else fn  # to await an instance gives what no class says
    annotations = getattr(fn, "__annotations__", None)
    hint: Any = annotations.get("return", Any) if isinstance(annotations, dict) else Any
    if type(fn) is types.FunctionType:
        if fn.__code__.co_flags & _GENERATORS:  # whatever the annotation says, nothing of this can be stored
            return types.GeneratorType
        if hint is not None and not isinstance(hint, type):
            hint = _evaluated(fn, hint, bound)
    if hint is None:
        return types.NoneType
    if isinstance(hint, type):
        return None if hint is Any else hint
    while typing.get_origin(hint) in _AWAITABLES:
        hint = (typing.get_args(hint) or (Any,))[-1]
    return None if hint is Any or isinstance(hint, str) else hint


def _innermost(fn: Any) -> tuple[Any, Any]:
    """What is called in the end, and the object or class that it is bound to. Not without end: a wrapper may lead back to itself, and a
    proxy that has every attribute gives another `__wrapped__` each time."""
    bound = None
    for _ in range(_MOST_WRAPPERS):
        if type(fn) is types.FunctionType and "__wrapped__" not in fn.__dict__:
            break
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif type(fn) is types.MethodType:
            fn, bound = fn.__func__, fn.__self__
        elif (wrapped := getattr(fn, "__wrapped__", None)) is not None:
            fn = wrapped
        elif isinstance(fn, type) or not hasattr(type(fn).__call__, "__annotations__"):
            break
        else:
            fn, bound = type(fn).__call__, fn
    return fn, bound


def names_a_cell(fn: types.FunctionType, hint: Any) -> bool:
    """Whether what is text in an annotation names what the function's closure holds: another function of the same text may
    mean another class by it."""
    held = fn.__code__.co_freevars
    return bool(held) and any(not set(re.findall(r"\w+", text)).isdisjoint(held) for text in texts_of(hint))


def texts_of(hint: Any) -> Iterator[str]:
    """What of an annotation is text: the whole of it (postponed), or the forward references in it (`list["Order"]`)."""
    if isinstance(hint, str):
        yield hint
    elif isinstance(hint, typing.ForwardRef):
        yield hint.__forward_arg__
    elif (origin := typing.get_origin(hint)) is not None and origin is not typing.Literal:
        arguments = typing.get_args(hint)
        for argument in arguments[:1] if origin is typing.Annotated else arguments:
            yield from texts_of(argument)


def _evaluated(fn: types.FunctionType, hint: Any, bound: Any) -> Any:
    """An annotation without text in it, and without Self. Evaluating costs 5 µs, so it is kept per code object, unless it names
    what a closure holds; functions of the same code may still be annotated with something else."""
    code = fn.__code__
    known = _known.get(id(code))
    if known is None or known[0] is not code or known[1] is not fn.__globals__ or not _same(known[2], hint):
        meant = hint
        if text := ", ".join(texts_of(hint)):
            meant = _resolved(hint, fn.__globals__, _held(fn), Unresolved(text))
        known = (code, fn.__globals__, hint, meant, _names_self(meant))
        if not names_a_cell(fn, hint):
            if len(_known) >= _MAX_CACHED:
                _known.clear()
            _known[id(code)] = known
    _, _, _, meant, of_self = known
    if not of_self or bound is None:
        return meant
    return _with_self(meant, bound if isinstance(bound, type) else type(bound))


def _names_self(hint: Any) -> bool:
    return hint is typing.Self or any(map(_names_self, typing.get_args(hint)))


def _with_self(hint: Any, owner: type) -> Any:
    """The class where an annotation says Self: `Self | None`, `list[Self]`."""
    if not _names_self(hint):
        return hint
    if hint is typing.Self:
        return owner
    origin: Any = typing.get_origin(hint)
    arguments = tuple(_with_self(argument, owner) for argument in typing.get_args(hint))
    return typing.Union[arguments] if origin is types.UnionType else origin[arguments]  # noqa: UP007 - made of a tuple


def _same(one: Any, other: Any) -> bool:
    """Also what is written anew whenever a function is made in a function: text, `list["Order"]`, `list["Order"] | None`."""
    return one is other or (isinstance(one, _WRITTEN) and type(one) is type(other) and bool(one == other))


def _held(fn: types.FunctionType) -> dict[str, Any]:
    """What the function's closure holds by now, by name."""
    held = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return held
