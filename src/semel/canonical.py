"""The canonical form of a request, over which its fingerprint is taken. Pure.

For JSON data it is RFC 8785 (sorted names, shortest floats, no spaces) with two differences: integers are exact at
any size, also those that arrive as floats (1e21 is written in full), and names are sorted by code point. Values that
JSON does not have are written as `!kind…`; no JSON text contains an exclamation mark outside a string, so they can
meet nothing else. Two requests have the same form if and only if they say the same: numbers count by value, a
tuple is a list, a dataclass, model or struct is its fields, an enum member its value, an aware time its instant.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import hashlib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from decimal import Decimal
from types import NoneType
from typing import Any, Final

import msgspec

from semel.codec.paths import MAX_DEPTH, Refused, key_step, type_name
from semel.codec.shapes import is_protobuf, is_pydantic
from semel.errors import CodecError

__all__ = ["FINGERPRINT_VERSION", "MAX_BYTES", "MAX_NODES", "canonical"]

FINGERPRINT_VERSION: Final = 1  # stored beside a fingerprint, not in it (R22)
MAX_NODES: Final = 100_000
MAX_BYTES: Final = 16 << 20
_MAX_DIGITS: Final = 4300  # Python's own limit for turning integers into text

_write: Final = msgspec.json.Encoder(order="sorted").encode
_LEAVES: Final = frozenset({str, int, bool, NoneType})
_FIXED: Final = frozenset({int, bool, NoneType})  # leaves that are canonical as they are
_TEXT: Final = frozenset({str})
_AS_TEXT: Final = frozenset({"ipaddress", "pathlib", "fractions"})  # their str() says all of the value

_TOO_LARGE = f"has more than {MAX_NODES:,} parts: fingerprint fewer fields, or bytes"


def canonical(value: object) -> bytes:
    """The bytes to hash, or CodecError naming the part that has no canonical form."""
    budget = _Budget()
    try:
        text = budget.plain(value)
        if text is None:
            budget.left = MAX_NODES
            text = _write(budget.tree(value, MAX_DEPTH))
    except Refused as refused:
        raise CodecError(refused.explain("request")) from None
    except Exception as error:  # the value's own code ran: properties, mappings, serializers
        raise CodecError(f"the request has no fingerprint: {type(error).__name__}: {error}") from error
    if len(text) > MAX_BYTES:
        raise CodecError(
            f"the request has {len(text):,} bytes in canonical form, {MAX_BYTES:,} is the most: pass bytes"
        )
    return text


class _Budget:
    """One walk over a value, with the number of parts it may still have."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MAX_NODES

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise Refused(_TOO_LARGE)

    def plain(self, value: Any) -> bytes | None:
        """The form of JSON data without floats, which the encoder writes canonically by itself; else None."""
        try:
            return _write(value) if self.is_plain(value, MAX_DEPTH - 1) else None
        except UnicodeEncodeError:  # the slower walk finds its place
            return None

    def is_plain(self, value: Any, room: int) -> bool:
        kind = type(value)
        if kind is dict:
            if not _TEXT.issuperset(map(type, value)):
                return False
            parts: Iterable[Any] = value.values()
        elif kind is list:
            parts = value
        else:
            return kind in _LEAVES
        self.spend(len(value))
        if _LEAVES.issuperset(map(type, parts)):
            return True
        if room <= 0:
            return False
        for part in parts:  # noqa: SIM110 - all() with a generator takes twice as long
            if type(part) not in _LEAVES and not self.is_plain(part, room - 1):
                return False
        return True

    def tree(self, value: Any, room: int) -> Any:
        """The same value for the encoder: numbers in one form, everything JSON does not have as raw text."""
        kind = type(value)
        if kind is str:
            return _text(value)
        if kind in _LEAVES:
            return value
        if kind is float:
            return _number(value)
        if room <= 0:
            raise Refused(
                f"is nested more than {MAX_DEPTH} levels deep, or contains itself: fingerprint fewer fields"
            )
        if kind is dict:
            return self.mapping(value, room)
        if kind is list or kind is tuple:
            return self.items(value, room)
        return self.other(value, room)

    def items(self, value: Iterable[Any], room: int) -> list[Any]:
        written = list(value)
        self.spend(len(written))
        for at, part in enumerate(written):
            if type(part) not in _FIXED:
                try:
                    written[at] = self.tree(part, room - 1)
                except Refused as refused:
                    raise refused.at(f"[{at}]")  # noqa: B904 - the same one, on its way up
        return written

    def mapping(self, value: Mapping[Any, Any], room: int) -> Any:
        written = dict(value)
        if not _TEXT.issuperset(map(type, written)):
            return self.pairs(written, room)
        return self.fields(written, room, key_step)

    def pairs(self, value: Mapping[Any, Any], room: int) -> Any:
        """A mapping whose keys are not all plain text: {1: …} and {"1": …} are different requests."""
        self.spend(len(value))
        written = []
        for key, part in value.items():
            try:
                written.append((self.tree(key, room - 1), self.tree(part, room - 1)))
            except Refused as refused:
                raise refused.at(key_step(key))  # noqa: B904 - the same refusal, one step further out
        if all(type(key) is str for key, _ in written):  # subclasses of str, enum members
            named = dict(written)
            if len(named) < len(written):
                raise Refused("has two keys that say the same, an enum member and its value perhaps")
            return named
        return _raw(
            "map", b"{%s}" % b",".join(sorted(_write(key) + b":" + _write(part) for key, part in written))
        )

    def fields(self, written: dict[str, Any], room: int, step: Callable[[str], str]) -> dict[str, Any]:
        self.spend(len(written))
        for name, part in written.items():
            if not name.isascii():
                _text(name)
            if type(part) not in _FIXED:
                try:
                    written[name] = self.tree(part, room - 1)
                except Refused as refused:
                    raise refused.at(step(name))  # noqa: B904 - the same refusal, one step further out
        return written

    def other(self, value: Any, room: int) -> Any:
        match value:
            case enum.Enum():
                return self.tree(value.value, room - 1)
            case str():  # subclasses of the plain kinds count as those
                return _text(str.__str__(value))
            case int():
                return int.__int__(value)
            case float():
                return _number(float.__float__(value))
            case bytes() | bytearray() | memoryview():
                return _raw("bytes", hashlib.sha256(value).hexdigest())
            case Decimal():
                return _decimal(value)
            case dt.datetime() | dt.date() | dt.time() | dt.timedelta():
                return _time(value)
            case uuid.UUID():
                return _raw("uuid", value.hex)
            case Mapping():
                return self.mapping(value, room)
            case AbstractSet():
                return _raw("set", b"[%s]" % b",".join(sorted(map(_write, self.items(value, room)))))
            case Sequence():
                return self.items(value, room)
            case _:
                return self.instance(value, room)

    def instance(self, value: Any, room: int) -> Any:
        cls = type(value)
        if is_protobuf(cls):
            digest = hashlib.sha256(value.SerializeToString(deterministic=True)).hexdigest()
            return _raw("protobuf", f"{cls.DESCRIPTOR.full_name}:{digest}")
        fields = _fields(value, cls)
        if fields is not None:
            return self.fields(fields, room, ".{}".format)
        if cls.__module__.partition(".")[0] in _AS_TEXT:
            return _raw(cls.__name__.lower(), str(value))
        if hasattr(cls, "get_secret_value"):  # pydantic's secrets print as asterisks, the same for all
            return self.tree(value.get_secret_value(), room - 1)
        if cls.__module__.startswith("pydantic") and cls.__name__.endswith(("Url", "Dsn")):
            return _raw("url", str(value))
        raise Refused(
            f"is a {type_name(cls)}, which has no canonical form: pass plain data, a dataclass, a model or bytes, "
            "or choose the fields that count with fields="
        )


def _fields(value: Any, cls: Any) -> dict[str, Any] | None:
    """What an instance says, by field name; fields that do not count in comparisons do not count here."""
    if issubclass(cls, msgspec.Struct):
        tag = cls.__struct_config__.tag
        parts = {
            name: part for name, part in msgspec.structs.asdict(value).items() if part is not msgspec.UNSET
        }
        return parts if tag is None else {cls.__struct_config__.tag_field or "type": tag, **parts}
    if is_pydantic(cls):
        return {name: value.__dict__[name] for name in cls.model_fields} | (value.__pydantic_extra__ or {})
    if dataclasses.is_dataclass(cls):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(cls) if f.compare}
    return None


def _raw(kind: str, content: str | bytes) -> msgspec.Raw:
    return msgspec.Raw(f"!{kind}".encode() + (content if isinstance(content, bytes) else _write(content)))


def _text(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Refused("is text with a lone surrogate, which is not valid Unicode: pass bytes") from None
    return value


def _number(value: float) -> Any:
    """ECMAScript's shortest form, as RFC 8785 wants it; integral values as the integers they are."""
    if value.is_integer():
        return int(value)
    text = repr(value)
    if "n" in text:
        raise Refused(f"is {text}, which is no number that can be compared: pass None or a text instead")
    digits, _, exponent = text.partition("e")
    if not exponent:
        return msgspec.Raw(text.encode())
    power = -int(exponent)  # integral values are gone, so it is small: below 1e-4
    if power > 6:
        return msgspec.Raw(f"{digits}e-{power}".encode())
    sign = "-" if value < 0 else ""
    return msgspec.Raw(f"{sign}0.{'0' * (power - 1)}{digits.lstrip('-').replace('.', '')}".encode())


def _decimal(value: Decimal) -> Any:
    if not value.is_finite():
        raise Refused(f"is Decimal({str(value)!r}), which is no number that can be compared")
    if value and abs(value.adjusted()) > _MAX_DIGITS:
        raise Refused(f"is a Decimal of more than {_MAX_DIGITS} digits")
    if value == value.to_integral_value():
        return int(value)
    as_float = float(value)
    if Decimal(as_float) == value:  # 0.5 is the same number in both; 0.1 is not
        return _number(as_float)
    sign, digits, exponent = value.as_tuple()
    text = "".join(map(str, digits)).lstrip("0")
    kept = text.rstrip("0")
    return _raw("decimal", f"{'-' * sign}{kept}e{int(exponent) + len(text) - len(kept)}")


def _time(value: dt.datetime | dt.date | dt.time | dt.timedelta) -> msgspec.Raw:
    match value:
        case dt.datetime():
            if value.utcoffset() is None:
                return _raw("local", value.replace(tzinfo=None).isoformat())
            return _raw("instant", value.astimezone(dt.UTC).isoformat())
        case dt.date():
            return _raw("date", value.isoformat())
        case dt.time():
            return _raw("time", value.isoformat())
        case _:
            return _raw("duration", str(value // dt.timedelta(microseconds=1)))
