"""Values to MessagePack and back, with an extension type for everything MessagePack does not have.

Extensions live in a type of their own, so no dict of a user can be mistaken for one. The *runtime* type of a value
decides how it is written, never its annotation: what is stored is what was there. Exact types only; a subclass
would come back as its base.
"""

from __future__ import annotations

import datetime as dt
import struct
import sys
import uuid
from collections.abc import Callable, Collection, Mapping
from decimal import Decimal
from gc import get_referents
from types import NoneType
from typing import Any, Final
from zoneinfo import ZoneInfo

import msgspec
from msgspec.msgpack import Ext

from semel.codec.paths import MAX_DEPTH, TOO_DEEP, Refused, key_step, type_name
from semel.codec.shapes import Shape, exactly
from semel.errors import CodecError

__all__ = ["BUILT_INS", "MAX_PARTS", "Tag", "Writer", "pack", "reader"]


class Tag:
    """Part of the stored format: numbers are never used again for something else."""

    TUPLE: Final = 1
    SET: Final = 2
    FROZENSET: Final = 3
    BYTEARRAY: Final = 4
    BIG_INTEGER: Final = 5
    DECIMAL: Final = 6
    DATETIME: Final = 7
    DATE: Final = 8
    TIME: Final = 9
    TIMEDELTA: Final = 10
    UUID: Final = 11
    COMPLEX: Final = 12
    MAP: Final = 13  # a dict with keys that are no MessagePack scalars
    SURROGATES: Final = 14  # text that is not valid UTF-8
    OBJECT: Final = 15  # [class name, state]
    UNSET: Final = 16
    PYDANTIC_ZONE: Final = 17  # a moment whose fixed offset is an instance of pydantic's class


pack: Final = msgspec.msgpack.Encoder().encode
_LEAVES: Final[frozenset[type]] = frozenset({str, int, float, bool, NoneType, bytes})
_only_leaves: Final = _LEAVES.issuperset
MAX_PARTS: Final = 1_000_000
_TOO_MANY: Final = f"has more than {MAX_PARTS:,} parts: return less, or a reference to it"
_COMPLEX: Final = struct.Struct(">dd")


def _spend(budget: list[int], parts: int) -> None:
    """Parts may be shared (YAML aliases): a small value can grow without bound when it is written out."""
    budget[0] -= parts
    if budget[0] < 0:
        raise Refused(_TOO_MANY)


def _parts(*nodes: Any) -> list[Any]:
    """What is in lists and dicts. From Python 3.13 on the collector does not tell what a dict holds that is still an
    object's own `__dict__`, so there every container is asked itself."""
    parts: list[Any] = []
    for node in nodes:
        parts += node
        if type(node) is dict:
            parts += node.values()
    return parts


_parts_of: Final[Callable[..., list[Any]]] = get_referents if sys.version_info < (3, 13) else _parts


def _is_plain(value: Any, room: int, budget: list[int]) -> bool:
    """Only leaves, lists and dicts of leaves: MessagePack keeps all of them exactly.

    Level by level, because `get_referents` (the parts of many containers at once; of a dict its values, and its keys
    unless all of them are exact strings) and `issuperset(map(type, …))` run in C: half of the time of a recursion.
    """
    kind = type(value)
    if kind is not dict and kind is not list:
        return kind in _LEAVES
    nodes = [value]
    left = budget[0] - len(value)
    while left >= 0:  # _spend, without the call: only what is within the budget is fetched
        parts = _parts_of(*nodes)
        if _only_leaves(map(type, parts)):
            budget[0] = left
            return True
        if room <= 0:
            return False
        room -= 1
        nodes = []
        for part in parts:
            kind = type(part)
            if kind is dict or kind is list:
                nodes.append(part)
                left -= len(part)
            elif kind not in _LEAVES:
                return False
    raise Refused(_TOO_MANY)


# --------------------------------------------------------------------------------------------- scalars


_MICROSECOND = dt.timedelta(microseconds=1)


def _moment(tag: int, value: dt.datetime | dt.time) -> Ext:
    """ISO text; fold, a zone's key and a fixed offset's name follow when there are any."""
    zone = value.tzinfo
    key = name = None
    if type(zone) is ZoneInfo:
        key = getattr(zone, "key", None)  # None for ZoneInfo.from_file, which typeshed does not tell
        if key is None or ZoneInfo(key) is not zone:
            raise Refused("has a ZoneInfo that its key does not give again: use ZoneInfo(key), or UTC")
    elif type(zone) is dt.timezone:
        offset = zone.utcoffset(None)
        label = zone.tzname(None)
        # Python cannot read the offset back from ISO text when it has fractions of a second: named, it is kept apart.
        odd = offset.microseconds != 0
        name = None if label == dt.timezone(offset).tzname(None) and not odd else label
        if odd:
            parts = [value.replace(tzinfo=None).isoformat(), value.fold, None, name, offset // _MICROSECOND]
            return Ext(tag, pack(parts))
    elif zone is not None:
        if _is_pydantic_zone(zone):
            fixed = dt.timezone(zone.utcoffset(None) or dt.timedelta())
            return Ext(Tag.PYDANTIC_ZONE, pack(_moment(tag, value.replace(tzinfo=fixed))))
        raise Refused(
            f"has a time zone of class {type_name(type(zone))}, which cannot be stored: "
            "use datetime.timezone or zoneinfo.ZoneInfo"
        )
    text = value.isoformat()
    if key is None and name is None and not value.fold:
        return Ext(tag, pack(text))
    return Ext(tag, pack([text, value.fold, key, name]))


def _is_pydantic_zone(zone: dt.tzinfo) -> bool:
    """Of the class of fixed offsets that pydantic gives to what it parses."""
    cls = type(zone)
    return cls.__name__ == "TzInfo" and cls.__module__.partition(".")[0] == "pydantic_core"


def _in_pydantic_zone(moment: Any) -> Any:
    try:
        from pydantic_core import TzInfo
    except ImportError:
        raise CodecError(
            f"it holds {moment.isoformat()} in a time zone of pydantic's class: install pydantic here too"
        ) from None
    return moment.replace(tzinfo=TzInfo(moment.utcoffset().total_seconds()))


def _read_moment(kind: Any, parts: Any) -> Any:
    if type(parts) is str:
        return kind.fromisoformat(parts)
    text, fold, key, name, *micros = parts
    value = kind.fromisoformat(text)
    if micros:
        fixed = dt.timezone(dt.timedelta(microseconds=micros[0]))
        if name != fixed.tzname(None):
            fixed = dt.timezone(fixed.utcoffset(None), name)
        return value.replace(tzinfo=fixed, fold=fold)
    offset = value.utcoffset()
    zone = value.tzinfo
    if key is not None:
        zone = ZoneInfo(key)
    elif name is not None:
        zone = dt.timezone(offset, name)
    value = value.replace(tzinfo=zone, fold=fold)
    if value.utcoffset() != offset:
        raise CodecError(f"the rules of time zone {key} have changed since {text} was stored")
    return value


def _integer(value: int) -> Any:
    if -(1 << 63) <= value < (1 << 64):
        return value
    return Ext(Tag.BIG_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))


def _text(value: str) -> Any:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return Ext(Tag.SURROGATES, value.encode("utf-8", "surrogatepass"))
    return value


_SCALARS: Final[Mapping[type, Callable[[Any], Any]]] = {
    str: _text,
    int: _integer,
    bytearray: lambda v: Ext(Tag.BYTEARRAY, bytes(v)),
    Decimal: lambda v: Ext(Tag.DECIMAL, str(v).encode()),
    dt.datetime: lambda v: _moment(Tag.DATETIME, v),
    dt.date: lambda v: Ext(Tag.DATE, v.isoformat().encode()),
    dt.time: lambda v: _moment(Tag.TIME, v),
    dt.timedelta: lambda v: Ext(Tag.TIMEDELTA, pack([v.days, v.seconds, v.microseconds])),
    uuid.UUID: lambda v: Ext(Tag.UUID, v.bytes),
    complex: lambda v: Ext(Tag.COMPLEX, _COMPLEX.pack(v.real, v.imag)),
    msgspec.UnsetType: lambda _: Ext(Tag.UNSET, b""),
}
_GROUPS: Final[Mapping[type, int]] = {tuple: Tag.TUPLE, set: Tag.SET, frozenset: Tag.FROZENSET}
BUILT_INS: Final[frozenset[type]] = frozenset({*_LEAVES, *_SCALARS, *_GROUPS, list, dict})


# ---------------------------------------------------------------------------------------------- writing


class Writer:
    """Writes built-in values, and instances of the classes it was given shapes for."""

    __slots__ = ("_shapes", "_unknown")

    def __init__(self, shapes: Mapping[type, Shape], unknown: Callable[[type], str]) -> None:
        self._shapes = shapes
        self._unknown = unknown  # the reason why a class is refused, with the remedy

    def write(self, value: Any) -> bytes:
        """MessagePack, or Refused with the path to the part that cannot be stored."""
        if _is_plain(value, MAX_DEPTH - 1, [MAX_PARTS]):
            try:
                return pack(value)
            except (OverflowError, UnicodeEncodeError):  # a big integer or odd text, which need tags
                pass
        return pack(self._wrap(value, MAX_DEPTH, [MAX_PARTS]))

    def _wrap(self, value: Any, room: int, budget: list[int]) -> Any:
        kind = type(value)
        scalar = _SCALARS.get(kind)
        if scalar is not None:
            return scalar(value)
        if kind in _LEAVES:
            return value
        if room <= 0:
            raise Refused(TOO_DEEP)
        if kind is list:
            return self._items(value, room, budget)
        if kind is dict:
            return self._dict(value, room, budget)
        tag = _GROUPS.get(kind)
        if tag is not None:
            return Ext(tag, pack(self._items(value, room, budget)))
        shape = self._shapes.get(kind)
        if shape is None:
            raise Refused(self._unknown(kind))
        return self._object(value, shape, room, budget)

    def _items(self, value: Collection[Any], room: int, budget: list[int]) -> list[Any]:
        _spend(budget, len(value))
        written = []
        for at, part in enumerate(value):
            try:
                written.append(self._wrap(part, room - 1, budget))
            except Refused as refused:
                raise refused.at(f"[{at}]")  # noqa: B904 - the same one, on its way up
        return written

    def _dict(self, value: dict[Any, Any], room: int, budget: list[int]) -> Any:
        _spend(budget, len(value))
        keys, parts = [], []
        for key, part in value.items():
            try:
                keys.append(self._wrap(key, room - 1, budget))
                parts.append(self._wrap(part, room - 1, budget))
            except Refused as refused:
                raise refused.at(key_step(key))  # noqa: B904 - the same refusal, one step further out
        if Ext in map(type, keys):
            return Ext(Tag.MAP, pack([keys, parts]))
        return dict(zip(keys, parts, strict=True))

    def _object(self, value: Any, shape: Shape, room: int, budget: list[int]) -> Ext:
        state = shape.take(value)
        if shape.checked and not exactly(shape.make(state), value):
            raise Refused(f"is a {type_name(shape.cls)} that its own __post_init__ would change on replay")
        try:
            return self._state(shape, state, room, budget)
        except Refused:
            state = shape.second(value) if shape.second is not None else None
            if state is None:
                raise
        return self._state(shape, state, room, budget)

    def _state(self, shape: Shape, state: Any, room: int, budget: list[int]) -> Ext:
        if _is_plain(state, room - 1, budget):
            try:
                return Ext(Tag.OBJECT, pack([shape.name, state]))
            except (OverflowError, UnicodeEncodeError):
                pass
        if type(state) is not dict:
            return Ext(Tag.OBJECT, pack([shape.name, self._wrap(state, room, budget)]))
        fields = {}
        for name, part in state.items():
            try:
                fields[name] = self._wrap(part, room - 1, budget)
            except Refused as refused:
                raise refused.at(f".{name}")  # noqa: B904 - the same refusal, one step further out
        return Ext(Tag.OBJECT, pack([shape.name, fields]))


# ---------------------------------------------------------------------------------------------- reading


def reader(
    make: Callable[[str, Any], Any], in_pydantic_zone: Callable[[Any], Any] = _in_pydantic_zone
) -> Callable[[Any], Any]:
    """A function from MessagePack to the value; `make(class name, state)` restores instances, `in_pydantic_zone(moment)` the
    zone that pydantic had parsed."""

    def extension(code: int, data: memoryview) -> Any:
        read = readers.get(code)
        if read is None:
            raise CodecError(f"it has a part of kind {code}, which this version of semel does not know")
        return read(data)

    def pairs(data: memoryview) -> dict[Any, Any]:
        keys, parts = load(data)
        return dict(zip(keys, parts, strict=True))

    load = msgspec.msgpack.Decoder(ext_hook=extension).decode
    readers: dict[int, Callable[[memoryview], Any]] = {
        Tag.TUPLE: lambda data: tuple(load(data)),
        Tag.SET: lambda data: set(load(data)),
        Tag.FROZENSET: lambda data: frozenset(load(data)),
        Tag.BYTEARRAY: bytearray,
        Tag.BIG_INTEGER: lambda data: int.from_bytes(data, "big", signed=True),
        Tag.DECIMAL: lambda data: Decimal(str(data, "ascii")),
        Tag.DATETIME: lambda data: _read_moment(dt.datetime, load(data)),
        Tag.DATE: lambda data: dt.date.fromisoformat(str(data, "ascii")),
        Tag.TIME: lambda data: _read_moment(dt.time, load(data)),
        Tag.TIMEDELTA: lambda data: dt.timedelta(*load(data)),
        Tag.UUID: lambda data: uuid.UUID(bytes=bytes(data)),
        Tag.COMPLEX: lambda data: complex(*_COMPLEX.unpack(data)),
        Tag.MAP: pairs,
        Tag.SURROGATES: lambda data: str(data, "utf-8", "surrogatepass"),
        Tag.OBJECT: lambda data: make(*load(data)),
        Tag.UNSET: lambda _: msgspec.UNSET,
        Tag.PYDANTIC_ZONE: lambda data: in_pydantic_zone(load(data)),
    }
    return load
