"""gRPC calls that are safe to retry: interceptors for servers and clients, threaded and grpc.aio."""

from __future__ import annotations

try:
    import google.rpc.error_details_pb2 as _details  # type: ignore[import-untyped] # noqa: F401 - missing, it is told at once
    import grpc as _grpc  # noqa: F401 - missing, it is told at once
except ModuleNotFoundError as missing:
    from semel.errors import ConfigurationError

    raise ConfigurationError('semel.grpc needs the extra "grpc": pip install "semel[grpc]"') from missing

# servers
from semel.grpc.aio import AsyncIdempotencyInterceptor
from semel.grpc.answers import recorded

# clients
from semel.grpc.client import (
    AsyncClientIdempotencyInterceptor,
    ClientIdempotencyInterceptor,
    idempotent_operation,
    leg_key,
)
from semel.grpc.policy import UnkeyedRetry
from semel.grpc.retries import channel_options, service_config
from semel.grpc.rules import Method
from semel.grpc.server import IdempotencyInterceptor
from semel.http.keys import core_key

__all__ = [
    "AsyncClientIdempotencyInterceptor",
    "AsyncIdempotencyInterceptor",
    "ClientIdempotencyInterceptor",
    "IdempotencyInterceptor",
    "Method",
    "UnkeyedRetry",
    "channel_options",
    "core_key",
    "idempotent_operation",
    "leg_key",
    "recorded",
    "service_config",
]
