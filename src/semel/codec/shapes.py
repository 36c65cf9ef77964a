"""The classes that can be stored: what an instance consists of, and how one is made again from that.

A shape restores *state*; it runs no `__init__`, no `__post_init__` and no validator, which could change the value
or have effects of their own. Where the library leaves no other way (msgspec structs), the shape is marked
`checked` and the writer makes the value again and compares before it accepts it. Fields that were added since the
value was stored get their default; fields that were removed are dropped. pydantic and protobuf are recognised by
what their classes carry and are never imported.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeGuard

import msgspec

from semel.codec.paths import Refused, type_name
from semel.errors import CodecError

__all__ = ["Shape", "exactly", "is_named_tuple", "is_protobuf", "is_pydantic", "shape_of"]


class Shape(NamedTuple):
    """How one class travels. `take` gives a dict of fields (still to be written) or a plain scalar."""

    name: str
    cls: type
    take: Callable[[Any], Any]
    make: Callable[[Any], Any]
    checked: bool = False
    second: Callable[[Any], Any] | None = None  # another state to try when the first one cannot be written


def is_pydantic(cls: type) -> bool:
    """A pydantic v2 model class."""
    return hasattr(cls, "__pydantic_core_schema__") and hasattr(cls, "model_fields")


def is_protobuf(cls: type) -> bool:
    """A generated message class, of any protobuf runtime."""
    return hasattr(cls, "DESCRIPTOR") and hasattr(cls, "SerializeToString") and hasattr(cls, "FromString")


def is_named_tuple(cls: type) -> bool:
    """Made by typing.NamedTuple or collections.namedtuple."""
    return issubclass(cls, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_field_defaults")


def shape_of(cls: type) -> Shape | None:
    """The shape of a class, or None when its instances cannot be restored without changing them."""
    return _shape_of(cls)


@functools.lru_cache(maxsize=1024)
def _shape_of(cls: type) -> Shape | None:
    if hasattr(cls, "__mapper__"):  # an ORM's instance is bound to its session; its fields alone are not it
        return None
    if issubclass(cls, enum.Enum):
        return _enum(cls)
    if issubclass(cls, msgspec.Struct):
        return _struct(cls)
    if is_named_tuple(cls):
        return _named_tuple(cls)
    if is_pydantic(cls):
        return _pydantic(cls)
    if is_protobuf(cls):
        return _protobuf(cls)
    if dataclasses.is_dataclass(cls):
        return _dataclass(cls)
    return None


# ------------------------------------------------------------------------------------------- enums


def _enum(cls: type[enum.Enum]) -> Shape:
    if issubclass(cls, enum.Flag):  # combinations have no name of their own
        return Shape(cls.__name__, cls, lambda member: member._value_, cls)
    members = cls.__members__

    def take(member: enum.Enum) -> str:
        name = member._name_
        if members.get(name) is not member:
            raise Refused(f"is a {type_name(cls)} that is not one of its members: return a declared member")
        return name

    def make(name: str) -> enum.Enum:
        if name not in members:
            raise CodecError(
                f"{type_name(cls)} has no member {name}: it was renamed or removed; put it back, an alias will do"
            )
        return members[name]

    return Shape(cls.__name__, cls, take, make)


# --------------------------------------------------------------------------------- structs and tuples


def _struct(cls: type[msgspec.Struct]) -> Shape:
    names = frozenset(cls.__struct_fields__)
    has_dict = cls.__dictoffset__ != 0

    def take(value: msgspec.Struct) -> dict[str, Any]:
        if has_dict and vars(value):
            raise Refused(f"has attributes that are no fields of {type_name(cls)}: {', '.join(vars(value))}")
        return msgspec.structs.asdict(value)

    def make(state: dict[str, Any]) -> Any:
        if state.keys() == names:
            return cls(**state)
        return cls(**{name: value for name, value in state.items() if name in names})

    return Shape(cls.__name__, cls, take, make, checked=hasattr(cls, "__post_init__"))


def _named_tuple(cls: type) -> Shape:
    names: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]  # a named tuple, which has them
    defaults: dict[str, Any] = cls._field_defaults  # type: ignore[attr-defined]  # a named tuple, which has them

    def take(value: Any) -> dict[str, Any]:
        if getattr(value, "__dict__", None):
            raise Refused(f"has attributes that are no fields of {type_name(cls)}: {', '.join(vars(value))}")
        return dict(zip(names, value, strict=True))

    def make(state: dict[str, Any]) -> Any:
        return tuple.__new__(cls, [state[n] if n in state else _default(cls, n, defaults) for n in names])

    return Shape(cls.__name__, cls, take, make)


def _default(cls: type, name: str, defaults: dict[str, Any]) -> Any:
    if name not in defaults:
        raise CodecError(f"{type_name(cls)} has a field {name!r} without default that the stored value lacks")
    return defaults[name]


# ---------------------------------------------------------------------------------------- dataclasses

# Names the attributes that are no fields, where there are any: what else is no field today was one, and is gone.
_MORE = "!more"


def _dataclass(cls: type) -> Shape | None:
    fields = dataclasses.fields(cls)
    names = frozenset(f.name for f in fields)
    slots = _slots(cls)
    if not slots <= names or not _bare(cls):
        return None
    has_dict = cls.__dictoffset__ != 0
    left_out = _derived(cls)

    def take(value: Any) -> dict[str, Any]:
        state = dict(vars(value)) if has_dict else {}  # a copy: see `_parts` in tagged.py
        if state.keys() == names:
            return state
        kept = {k: v for k, v in state.items() if k not in left_out}
        if more := sorted(kept.keys() - names):
            if _MORE in more:
                raise Refused(f"has an attribute {_MORE!r}, a name that is taken: give it another one")
            kept[_MORE] = more
        return kept | {f.name: _attribute(value, f.name) for f in fields if f.name not in kept}

    def make(state: dict[str, Any]) -> Any:
        value: Any = object.__new__(cls)
        if state.keys() != names:
            state = of_today(state)
        if has_dict and not slots:
            value.__dict__.update(state)
            return value
        for name in state if has_dict else slots:
            object.__setattr__(value, name, state[name])  # frozen classes guard their own
        return value

    def of_today(state: dict[str, Any]) -> dict[str, Any]:
        """The fields of the class as it is now, and the attributes that were none when it was stored."""
        more = state.pop(_MORE, ())
        today = {f.name: state[f.name] if f.name in state else _dataclass_default(cls, f) for f in fields}
        return today | {name: state[name] for name in more} if has_dict else today

    return Shape(cls.__name__, cls, take, make)


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name)
    except AttributeError:
        raise Refused(f"has no value in its field {name!r}") from None


def _dataclass_default(cls: type, field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    known = {} if field.default is dataclasses.MISSING else {field.name: field.default}
    return _default(cls, field.name, known)


def _slots(cls: type) -> frozenset[str]:
    named: set[str] = set()
    for base in cls.__mro__:
        own = base.__dict__.get("__slots__", ())
        named.update((own,) if isinstance(own, str) else own)
    return frozenset(named - {"__dict__", "__weakref__"})


def _bare(cls: type) -> bool:
    """No hidden state of a built-in base (dict, Exception, …) that fields would not carry."""
    try:
        object.__new__(cls)
    except TypeError:
        return False
    return True


def _derived(cls: type) -> frozenset[str]:
    """Attributes that are computed again on demand, and typing's own mark on generic instances."""
    cached = {
        name
        for base in cls.__mro__
        for name, member in vars(base).items()
        if isinstance(member, functools.cached_property)
    }
    return frozenset(cached | {"__orig_class__"})


# --------------------------------------------------------------------------------- pydantic, protobuf

# Beside the fields, whose names are identifiers, a model's state has these entries where they are not the rule.
_SET, _EXTRA, _PRIVATE, _JSON = "!set", "!extra", "!private", "!json"


def _pydantic(cls: Any) -> Shape:
    names = frozenset(cls.model_fields)

    def take(model: Any) -> dict[str, Any]:
        pickled = model.__getstate__()
        values = pickled["__dict__"]
        if absent := names - values.keys():  # model_construct() leaves such models behind
            raise Refused(f"has no value in its field {min(absent)!r}")
        state = {name: values[name] for name in cls.model_fields}  # cached properties stay out
        fields_set = pickled["__pydantic_fields_set__"]
        if fields_set != names:
            state[_SET] = sorted(fields_set)
        if extra := pickled.get("__pydantic_extra__"):
            state[_EXTRA] = extra
        if private := pickled.get("__pydantic_private__"):
            state[_PRIVATE] = private
        return state

    def make(state: dict[str, Any]) -> Any:
        if _JSON not in state:
            return _restore_model(cls, names, state)
        model = cls.model_validate_json(state.pop(_JSON))
        return _restore_model(cls, names, take(model) | state) if state else model

    def second(model: Any) -> dict[str, Any] | None:
        """Field types of pydantic's own (URLs, …): its JSON, and beside it what that does not give again exactly."""
        try:
            text = model.model_dump_json(round_trip=True, exclude_unset=True)
            both = cls.model_validate_json(text), model
            given, wanted = ({_SET: sorted(names), **take(each)} for each in both)
            lost = {k: v for k, v in wanted.items() if k not in given or not exactly(given[k], v)}
        except Exception:  # noqa: BLE001 - validators and serializers of the user; the first refusal is the better text
            return None
        return {_JSON: text, **lost} if given.keys() <= wanted.keys() else None

    return Shape(cls.__name__, cls, take, make, second=second)


def _restore_model(cls: Any, names: frozenset[str], state: dict[str, Any]) -> Any:
    fields_set = set(state.pop(_SET, names))
    extra = state.pop(_EXTRA, {} if cls.model_config.get("extra") == "allow" else None)
    private = state.pop(_PRIVATE, None)
    if private is None and cls.__private_attributes__:
        private = {}
    values = {name: value for name, value in state.items() if name in names}
    for name in names - values.keys():
        field = cls.model_fields[name]
        known = {} if field.is_required() else {name: field.get_default(call_default_factory=True)}
        values[name] = _default(cls, name, known)
    model = cls.__new__(cls)
    model.__setstate__(
        {
            "__dict__": values,
            "__pydantic_fields_set__": fields_set,
            "__pydantic_extra__": extra,
            "__pydantic_private__": private,
        }
    )
    return model


def _protobuf(cls: Any) -> Shape:
    return Shape(
        cls.__name__, cls, lambda message: message.SerializeToString(deterministic=True), cls.FromString
    )


# ------------------------------------------------------------------------------------------ comparing


def exactly(a: Any, b: Any) -> TypeGuard[Any]:
    """Equal, and of the same types all the way down (1, 1.0 and True differ, and so do two zones of one offset)."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(exactly, a, b))
    if isinstance(a, dict):
        return _same_members(a, b) and all(exactly(value, b[key]) for key, value in a.items())
    if isinstance(a, set | frozenset):
        return _same_members(a, b)
    if isinstance(a, dt.datetime | dt.time):
        return a == b and a.fold == b.fold and _same_zone(a.tzinfo, b.tzinfo)
    shape = shape_of(type(a))
    if shape is not None and isinstance(state := shape.take(a), dict):
        return exactly(state, shape.take(b))
    return bool(a == b) or (a != a and b != b)  # noqa: PLR0124 - NaN is itself here


def _same_members(a: Collection[Any], b: Collection[Any]) -> bool:
    """Of sets, and of the keys of dicts: an equal member may be of another type."""
    found = {member: member for member in b}
    return len(a) == len(b) and all(member in found and exactly(member, found[member]) for member in a)


def _same_zone(a: Any, b: Any) -> bool:
    """A ZoneInfo is equal to itself alone; fixed offsets are equal whatever their names."""
    return a is b or (type(a) is type(b) and bool(a == b) and a.tzname(None) == b.tzname(None))
