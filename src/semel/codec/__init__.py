"""Results to bytes and back: what comes back is equal and of the same type, or it was refused when it was written.

    encoder_for(result_type).encode(value) -> bytes        .decode(data) -> value

The annotation does not decide how a value is written; it names the classes that may be made again when it is read.
So a value that differs from its annotation is stored as what it is, and no stored byte can name a class that the
program did not. No pickle. The first byte is the format: its version in the high half, flags in the low: zlib,
and a person's word, which is plain data that becomes what the annotation says.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from semel.codec.annotations import Unresolved, check_encodable, named_classes, return_type
from semel.codec.paths import Refused, type_name
from semel.codec.shapes import Shape, shape_of
from semel.codec.tagged import Writer, pack, reader
from semel.codec.told import as_told
from semel.errors import CodecError
from semel.seals import MARK, key_name

__all__ = ["FORMAT", "Codec", "check_encodable", "encoder_for", "preview", "return_type"]

FORMAT: Final = 1  # readers keep this version and the one before it
_PLAIN: Final = bytes([FORMAT << 4])
_PLAIN_BYTE: Final = FORMAT << 4
_ZLIB: Final = bytes([FORMAT << 4 | 1])
_TOLD: Final = bytes([FORMAT << 4 | 2])  # plain data from a person, who does not know the function's types
INFLATED_LIMIT: Final = 64 << 20
"""Bytes of a result that may be compressed; a larger one is stored as it is, if `max_result` allows."""


class Codec:
    """Writes and reads the results of one result type; made by `encoder_for`, safe to share between threads."""

    __slots__ = ("_by_name", "_read", "_writer", "result_type", "typed")

    def __init__(self, result_type: Any = None) -> None:
        self.result_type = result_type
        self.typed = result_type is not None and not isinstance(result_type, Unresolved)
        shapes = _named(named_classes(result_type))
        self._by_name: Mapping[str, Shape] = {shape.name: shape for shape in shapes.values()}
        self._writer = Writer(shapes, self._refuse)
        self._read = reader(self._make)

    def encode(self, value: Any, *, compress_over: int | None = None) -> bytes:
        """Bytes that decode to an equal value of the same type; CodecError naming the part that would not."""
        try:
            # Bytes, as every response of HTTP is stored, are written as they are: all that the writer would find out.
            body = pack(value) if type(value) is bytes else self._writer.write(value)
        except Refused as refused:
            raise CodecError(refused.explain("result")) from None
        except Exception as error:  # the value's own code ran: properties, comparisons, serializers
            _tell_strike(error, self._writer.write, value)
            raise CodecError(f"the result cannot be stored: {type(error).__name__}: {error}") from error
        if compress_over is not None and compress_over < len(body) <= INFLATED_LIMIT:
            small = zlib.compress(body, 1)
            if len(small) < len(body):
                return _ZLIB + small
        return _PLAIN + body

    def tell(self, value: Any) -> bytes:
        """As `encode`, for a person's word: who reads it makes of it what its own function would have given."""
        return _TOLD + self.encode(value)[1:]

    def decode(self, data: bytes | bytearray | memoryview, at: int = 0) -> Any:
        """The value that begins at `at`; CodecError when the bytes are damaged, of an unknown format, or name an unknown class."""
        if (
            len(data) > at and data[at] == _PLAIN_BYTE
        ):  # as `_decode` does it, with no call and no copy more than needed
            try:
                return self._read(data[at + 1 :])
            except Exception as error:  # noqa: BLE001 - told in our own words
                _tell_strike(error, self._read, data[at + 1 :])
                raise _unreadable(error) from (None if isinstance(error, CodecError) else error)
        value = _decode(data[at:], self._read)
        if self.typed and data[at : at + 1] == _TOLD:
            return as_told(value, self.result_type)
        return value

    def _make(self, name: str, state: Any) -> Any:
        shape = self._by_name.get(name)
        if shape is None:
            raise CodecError(f"it holds a {name}, {self._unnamed()}")
        return shape.make(state)

    def _refuse(self, cls: type) -> str:
        if shape_of(cls) is not None:
            return f"is a {type_name(cls)}, {self._unnamed()}"
        return (
            f"is a {type_name(cls)}, which cannot be stored so that it comes back equal and of the same type: "
            "return plain data, or annotate the function (or pass result_type=) with a dataclass, msgspec.Struct, "
            "pydantic model or protobuf message and return that"
        )

    def _unnamed(self) -> str:
        if isinstance(self.result_type, Unresolved):
            return (
                f"and the annotation {self.result_type.text!r} cannot be resolved at run time (imported under "
                "TYPE_CHECKING only?): import it, or pass result_type="
            )
        which = f"the annotation {self.result_type} does not name" if self.typed else "no annotation names"
        return f"a class that {which}: annotate the function's return type with it, or pass result_type="

    def __repr__(self) -> str:
        return f"Codec({self.result_type!r})"


def _named(classes: list[type]) -> dict[type, Shape]:
    """Shapes by class. Two classes of one name are told apart by module; else a class may move freely."""
    names = [cls.__name__ for cls in classes]
    whole = [type_name(cls) for cls in classes]
    if twice := next((name for name in whole if whole.count(name) > 1), None):
        raise CodecError(
            f"two different classes are named {twice}: one would come back as the other; rename one of them"
        )
    shapes: dict[type, Shape] = {}
    for cls in classes:
        shape = shape_of(cls)
        assert shape is not None  # noqa: S101 - named_classes gives no others
        unique = names.count(cls.__name__) == 1
        shapes[cls] = shape if unique else shape._replace(name=type_name(cls))
    return shapes


def _inflated(small: bytes | bytearray | memoryview) -> bytes:
    """Decompress, but never to more than was ever compressed: a few damaged or forged bytes could fill the memory."""
    inflate = zlib.decompressobj()
    body = inflate.decompress(small, INFLATED_LIMIT + 1)
    if len(body) > INFLATED_LIMIT:
        raise CodecError(f"decompressed it is larger than {INFLATED_LIMIT} bytes, which semel never writes")
    if not inflate.eof:
        raise CodecError("its end is missing")
    return body


def _tell_strike(error: Exception, work: Callable[..., object], *args: Any) -> None:
    """Raises what a signal's handler raised, such as the time limit of a task queue: done again, only the value's own error comes
    again. Taken for that, it would cost a good value its place."""
    try:
        work(*args)
    except Exception:  # noqa: BLE001 - the first one is told, by the caller
        return
    raise error


def _unreadable(error: Exception) -> CodecError:
    what = str(error) if isinstance(error, CodecError) else f"{type(error).__name__}: {error}"
    return CodecError(f"the stored result is unreadable: {what}")


def _decode(data: bytes | bytearray | memoryview, read: Any) -> Any:
    head = data[:1]
    try:
        if head == _PLAIN:
            return read(data[1:])
        if head == _ZLIB:
            return read(_inflated(data[1:]))
        if head == _TOLD:
            return read(data[1:])
    except Exception as error:  # noqa: BLE001 - told in our own words
        _tell_strike(error, lambda: read(_inflated(data[1:]) if head == _ZLIB else data[1:]))
        raise _unreadable(error) from (None if isinstance(error, CodecError) else error)
    if head == MARK:
        raise CodecError(
            f"the stored result is sealed with key {key_name(data)!r}, and here is no encrypt= to open it with"
        )
    raise CodecError(
        f"the stored result is unreadable: its format is 0x{bytes(head).hex() or '(empty)'}, this version of semel "
        f"reads 0x{_PLAIN.hex()} and 0x{_ZLIB.hex()}; it was damaged, or written by a newer version"
    )


def _shown(name: str, state: Any) -> Any:
    """An enum member as text, because it may be the key of a dict; other instances as class and state."""
    return f"{name}.{state}" if isinstance(state, str | int) else {"!class": name, "!state": state}


_read_preview: Final = reader(_shown, lambda moment: moment)


def preview(data: bytes | bytearray | memoryview) -> Any:
    """A stored result for people: instances appear as their class name and state, so that no class is needed."""
    return _decode(data, _read_preview)


_cached = functools.lru_cache(maxsize=1024)(Codec)


def encoder_for(result_type: Any = None) -> Codec:
    """The codec of a result type (None, Any and object: untyped), made once per type."""
    if result_type is Any or result_type is object:
        result_type = None
    try:
        return _cached(result_type)
    except TypeError:  # an annotation that cannot be hashed, such as Annotated[int, []]
        return Codec(result_type)
