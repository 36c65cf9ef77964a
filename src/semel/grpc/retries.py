"""The service config that makes gRPC itself retry keyed calls: the statuses that mean "again, with the same key"."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

import grpc

from semel.errors import ConfigurationError
from semel.grpc.methods import split

__all__ = ["channel_options", "service_config"]

_RETRYABLE: Final = (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE)


def service_config(
    methods: Iterable[str],
    *,
    max_attempts: int = 5,
    initial_backoff: float = 0.1,
    max_backoff: float = 5.0,
    backoff_multiplier: float = 2.0,
    timeout: float | None = None,
    codes: Sequence[grpc.StatusCode] = _RETRYABLE,
) -> str:
    """The JSON of a service config with a retry policy for these methods ("/package.Service/Method" or "/…/*").

    Only for calls that carry a key: everything else would be repeated unprotected, so there is no "all methods".
    """
    names = [_name(method) for method in ([] if isinstance(methods, str) else methods)]
    if not names:
        raise ConfigurationError(
            'service_config needs a list of the methods to retry: ["/package.Service/Method"]'
        )
    if not 2 <= max_attempts <= 5:
        raise ConfigurationError(
            f"max_attempts must be 2 to 5 (gRPC makes no more than 5), not {max_attempts!r}"
        )
    if not 0 < initial_backoff <= max_backoff or backoff_multiplier <= 0:
        raise ConfigurationError("backoff must be positive, and initial_backoff no longer than max_backoff")
    if not codes:
        raise ConfigurationError("codes is empty: then there is nothing to retry")
    config: dict[str, Any] = {
        "name": names,
        "retryPolicy": {
            "maxAttempts": max_attempts,
            "initialBackoff": f"{initial_backoff:g}s",
            "maxBackoff": f"{max_backoff:g}s",
            "backoffMultiplier": backoff_multiplier,
            "retryableStatusCodes": [code.name for code in codes],
        },
    }
    if timeout is not None:
        config["timeout"] = f"{timeout:g}s"
    return json.dumps({"methodConfig": [config]})


def _name(method: str) -> dict[str, str]:
    service, name = split(method)
    return {"service": service} if name == "*" else {"service": service, "method": name}


def channel_options(config: str) -> list[tuple[str, Any]]:
    """Options for a channel that follows this config: `grpc.insecure_channel(target, options=channel_options(…))`."""
    return [("grpc.enable_retries", 1), ("grpc.service_config", config)]
