"""A call's answer as it is stored: status, the metadata that a replay gives again, and the very bytes of its messages."""

from __future__ import annotations

from typing import Any, Final, Literal

import grpc
import msgspec

from semel.errors import CodecError, ConfigurationError
from semel.grpc.rules import Rules, storable

__all__ = ["Answer", "Metadata", "code_of", "recorded", "say_trailing"]

Metadata = tuple[tuple[str, str | bytes], ...]
_FORMAT: Final = 1


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """A replay is a historical snapshot: never refreshed, identical bytes."""

    code: int
    details: str = ""
    messages: list[bytes] = []
    initial: tuple[tuple[str, Any], ...] = ()  # text or bytes: MessagePack keeps the two apart
    trailing: tuple[tuple[str, Any], ...] = ()
    format: int = _FORMAT
    carrier: Literal["grpc"] = "grpc"
    """The key may have been used over HTTP: that answer cannot be given here."""

    @property
    def status(self) -> grpc.StatusCode:
        return code_of(self.code)

    def encode(self, rules: Rules) -> bytes:
        """What is stored of it."""
        kept = msgspec.structs.replace(
            self, initial=storable(rules, self.initial), trailing=storable(rules, self.trailing)
        )
        return _encode(kept)

    @classmethod
    def decode(cls, data: object) -> Answer:
        """Raises CodecError for whatever is no answer: a person may have settled the call with any value."""
        if not isinstance(data, bytes):
            raise CodecError(f"the stored answer is a {type(data).__name__}, none of gRPC's")
        try:
            found = _decode(data)
        except msgspec.MsgspecError as error:
            raise CodecError(f"the stored answer is none of gRPC's: {error}") from error
        if found.format != _FORMAT:
            raise CodecError(f"the stored answer has format {found.format}; a newer version wrote it")
        return found


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Answer).decode
_CODES: Final[dict[object, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}


def code_of(number: object) -> grpc.StatusCode:
    """The code for its number; gRPC calls everything else UNKNOWN."""
    if isinstance(number, grpc.StatusCode):
        return number
    return _CODES.get(number, grpc.StatusCode.UNKNOWN)


def recorded(*messages: bytes, code: grpc.StatusCode = grpc.StatusCode.OK, details: str = "") -> bytes:
    """An answer in stored form, for `once.resolve(key, value=recorded(response.SerializeToString()), …)`.

    Raises ConfigurationError for what no caller could be given.
    """
    given: tuple[object, ...] = messages
    if wrong := [message for message in given if not isinstance(message, bytes)]:
        raise ConfigurationError(
            f"recorded() takes messages as bytes, not {type(wrong[0]).__name__}: pass response.SerializeToString()"
        )
    if not isinstance(code, grpc.StatusCode):
        raise ConfigurationError(f"code= must be a grpc.StatusCode, not {code!r}")
    return _encode(Answer(code.value[0], details, list(messages)))


def say_trailing(context: Any, metadata: Metadata) -> None:
    """Behind what was said already."""
    if metadata:
        context.set_trailing_metadata((*(context.trailing_metadata() or ()), *metadata))
