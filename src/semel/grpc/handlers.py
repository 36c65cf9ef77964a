"""Method handlers around a handler: bytes and messages arrive together, answers may leave as bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import msgspec

from semel.grpc.requests import Received

__all__ = ["Wire", "behaviour_of", "handler_like"]


class Wire(msgspec.Struct, frozen=True):
    """A response that has been serialized."""

    data: bytes


def behaviour_of(handler: Any) -> Callable[[Any, Any], Any]:
    """The function of a handler that does not stream both ways."""
    behaviour: Callable[[Any, Any], Any] = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    return behaviour


def handler_like(handler: Any, behaviour: Callable[[Any, Any], Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same shape that gets `Received` and may return `Wire`.

    (De)serialization stays with gRPC, which has its own answers for what goes wrong there.
    """
    read, write = handler.request_deserializer, handler.response_serializer

    def received(raw: bytes) -> Received:
        return Received(raw, raw if read is None else read(raw))

    def sent(response: Any) -> Any:
        if type(response) is Wire:
            return response.data
        return response if write is None else write(response)

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    made: grpc.RpcMethodHandler[Any, Any] = make(behaviour, received, sent)
    return made
