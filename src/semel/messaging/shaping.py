"""What the functions of a route are given, and what they may give back."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Final

import msgspec

from semel.errors import ConfigurationError
from semel.messaging.handling import Quit
from semel.messaging.message import Message
from semel.messaging.sink import Row
from semel.shown import shown

__all__ = ["DECODED", "asked", "explained", "taken_for_a_row", "transformed"]

_ROW: Final = "row"  # a parameter of this name is given the Row, if no annotation says otherwise
# What Python and its libraries say to a body of type {} where bytes are wanted; what is said of another type is another's mistake.
_FOR_BYTES: Final = (
    "must be str, bytes or bytearray, not {}",  # json
    "bytes-like object is required, not '{}'",
    "'{}' and 'bytes'",
    'can only concatenate {} (not "bytes")',
)
DECODED: Final = (
    "it was given a Message, whose body is decoded already: use it as it is (`message.data` are its bytes)"
)
_HINTS: Final = {
    True: "it was given a Row, whose body is bytes, because its parameter is called `row` or annotated so: `row.message().body` is "
    "decoded, or annotate it as Message (`def when(message: Message) -> bool`) to be given that",
    False: f"{DECODED}; or annotate its parameter as Row (`def when(row: Row) -> bool`), or call it `row`, to be given the row with the "
    "body's bytes",
}


def asked(function: Callable[[Any], Any], row: Row) -> Any:
    """What the function says of the message, or of the row if that is what it takes."""
    wants_row = _takes_row(function)
    given: Any = row if wants_row else row.message()
    try:
        return function(given)
    except SystemExit as error:  # of this message: the relay, which has others, goes on
        raise Quit(row, error, "route's function") from error
    except (TypeError, AttributeError) as error:
        if _taken_for_a_message(error, row) if wants_row else taken_for_a_row(error, given):
            error.add_note(_HINTS[wants_row])
        raise


def taken_for_a_row(error: BaseException, message: Message) -> bool:
    """Whether a function that was given this message failed because it expected a Row, or the bytes of one's body. Those of a raw
    message are bytes in a Message too."""
    match error:
        case AttributeError():
            if error.obj is message:
                return hasattr(Row, error.name or "")
            return error.obj is message.body and not message.raw and hasattr(bytes, error.name or "")
        case TypeError():
            return "msgspec.Struct" in str(error) or (not message.raw and _wants_bytes(error, message.body))
        case _:
            return False


def _wants_bytes(error: TypeError, body: Any) -> bool:
    kind, said = type(body).__name__, str(error)
    hashing = "encoded before hashing" if isinstance(body, str) else "buffer API required"
    return hashing in said or any(words.format(kind) in said for words in _FOR_BYTES)


def _taken_for_a_message(error: TypeError | AttributeError, row: Row) -> bool:
    if isinstance(error, AttributeError):
        return error.obj is row.body or (error.obj is row and hasattr(Message, error.name or ""))
    return "byte indices must be" in str(error)


def transformed(function: Callable[[Any], Any], row: Row) -> Row:
    """The row that is sent instead: what the function made of it, a Row or a Message, under the same id."""
    made = asked(function, row)
    if isinstance(made, Message):
        return msgspec.structs.replace(
            row,
            tenant=made.tenant,
            topic=made.topic,
            key=made.key,
            type=made.type,
            schema=made.schema,
            headers=dict(made.headers),
            body=made.data,
            raw=made.raw,
        )
    if not isinstance(made, Row):
        raise ConfigurationError(
            f"a route's transform gives a Row or a Message, not {type(made).__name__}: change a copy "
            "(msgspec.structs.replace(row, …), dataclasses.replace(message, …)) and return it"
        )
    return made if made.id == row.id else msgspec.structs.replace(made, id=row.id)


def explained(error: Exception) -> str:
    """What went wrong in a route's function, with the hint where it seems to have taken a Row for a Message, or a Message for a Row."""
    return "; ".join([shown(error), *getattr(error, "__notes__", ())])


def _takes_row(function: Callable[[Any], Any]) -> bool:
    try:
        return _known(function)
    except TypeError:  # an object that cannot be hashed
        return _is_of_row(function)


def _is_of_row(function: Callable[[Any], Any]) -> bool:
    """Whether its first parameter is annotated as a Row; or else, not being annotated as a Message, is called `row`."""
    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except (TypeError, ValueError):
        return False
    if first is None:
        return False
    annotation = _annotation(function, first)
    return annotation is Row or (annotation is not Message and first.name == _ROW)


def _annotation(function: Callable[[Any], Any], parameter: inspect.Parameter) -> Any:
    """Row or Message, if it is one of them."""
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    while isinstance(function, partial):  # whose own __call__ has no annotations
        function = function.func
    told = getattr(function, "__call__", function) if not inspect.isroutine(function) else function  # noqa: B004 - it is read, not asked for
    try:
        return typing.get_type_hints(told).get(parameter.name)
    except Exception:  # noqa: BLE001 - names that only a type checker sees
        return {"Row": Row, "Message": Message}.get(parameter.annotation.rpartition(".")[2])


_known: Final = lru_cache(maxsize=1024)(_is_of_row)
