"""What cannot work is refused at start-up, by a message that names the option."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from semel import AsyncSemel, ConfigurationError, InvalidKey, Semel
from semel.grpc import (
    AsyncIdempotencyInterceptor,
    ClientIdempotencyInterceptor,
    IdempotencyInterceptor,
    Method,
    leg_key,
    service_config,
)
from tests.grpc.lab import SERVICE, shop, who


def made(**options: Any) -> IdempotencyInterceptor:
    return IdempotencyInterceptor(once=Semel("memory://"), **{"principal": who} | options)


def test_g04_an_interceptor_without_a_principal_does_not_start() -> None:
    with pytest.raises(ConfigurationError, match="principal="):
        IdempotencyInterceptor(once=Semel("memory://"))
    with pytest.raises(ConfigurationError, match="principal="):
        AsyncIdempotencyInterceptor(once=AsyncSemel("memory://"))
    with pytest.raises(ConfigurationError, match="anonymous"):
        made(anonymous=True)
    IdempotencyInterceptor(once=Semel("memory://"), anonymous=True)


def test_the_colours_are_not_mixed() -> None:
    with pytest.raises(ConfigurationError, match="AsyncIdempotencyInterceptor"):
        IdempotencyInterceptor(once=AsyncSemel("memory://"), principal=who)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ConfigurationError, match="takes IdempotencyInterceptor"):
        AsyncIdempotencyInterceptor(once=Semel("memory://"), principal=who)  # type: ignore[arg-type]  # wrong on purpose

    async def later(context: object) -> str:
        return "ann"

    with pytest.raises(ConfigurationError, match="coroutine function"):
        made(principal=later)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"methods": [f"{SERVICE}/Chat"]}, "both ways"),
        ({"methods": {f"{SERVICE}/Chat": Method(stream=True)}}, "both ways"),
        ({"methods": [f"{SERVICE}/Watch"]}, r"Method\(stream=True\)"),
        ({"methods": [f"{SERVICE}/Upload"]}, r"Method\(stream=True\)"),
        ({"methods": {f"{SERVICE}/*": Method(stream=True)}}, "method by method"),
        ({"methods": [f"{SERVICE}/Get"]}, "NO_SIDE_EFFECTS"),
        ({"methods": [f"{SERVICE}/Creat"]}, "no such method"),
        ({"exclude": [f"{SERVICE}/Creat"]}, "no such method"),
        ({"methods": ["Create"]}, "is no method"),
        ({"methods": f"{SERVICE}/Create"}, "as a list"),
        ({"methods": {f"{SERVICE}/Create": {}}}, r"Method\(...\)"),
        ({"effects": "none"}, "effects"),
        ({"wait": -1}, "wait"),
        ({"wait": float("inf")}, "wait"),
        ({"lease": 0}, "lease"),
        ({"tombstone": float("nan")}, "tombstone"),
        ({"max_response": "1M"}, "max_response"),
        ({"metadata": "Idempotency-Key"}, "lower-case"),
        ({"metadata": "grpc-key"}, "belong to gRPC"),
        ({"metadata": []}, "empty"),
        ({"replay_metadata": ["set-cookie"]}, "never replayed"),
        ({"retries": 3}, "unknown option 'retries'"),
    ],
)
def test_g03_options_that_cannot_work_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        made(**options)


def test_g03_descriptors_may_be_handed_in() -> None:
    service = shop.DESCRIPTOR.services_by_name["Shop"]
    with pytest.raises(ConfigurationError, match="both ways"):
        made(services=[service], methods=[f"{SERVICE}/Chat"])


def test_g06_the_service_config_lists_aborted_and_unavailable() -> None:
    config = json.loads(service_config([f"{SERVICE}/Create", "/other.S/*"], timeout=30))
    (method,) = config["methodConfig"]
    assert method["name"] == [
        {"service": "semel.tests.shop.Shop", "method": "Create"},
        {"service": "other.S"},
    ]
    assert method["retryPolicy"] == {
        "maxAttempts": 5,
        "initialBackoff": "0.1s",
        "maxBackoff": "5s",
        "backoffMultiplier": 2.0,
        "retryableStatusCodes": ["ABORTED", "UNAVAILABLE"],
    }
    assert method["timeout"] == "30s"


@pytest.mark.parametrize(
    "wrong",
    [
        {"methods": []},
        {"max_attempts": 6},
        {"max_attempts": 1},
        {"initial_backoff": 9},
        {"codes": ()},
        {"methods": "/a.B/C"},
    ],
)
def test_g17_a_service_config_for_everything_or_for_ever_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        service_config(**{"methods": ["/a.B/C"]} | wrong)


def test_g17_legs_are_keys() -> None:
    assert leg_key("order-7", 2) == "order-7/2"
    for wrong in (("order-7", 0), ("two words", 1), ("k" * 254, 1)):
        with pytest.raises(InvalidKey):
            leg_key(*wrong)


def test_the_client_takes_one_metadata_name() -> None:
    with pytest.raises(ConfigurationError, match="lower-case"):
        ClientIdempotencyInterceptor(metadata="X-Key")
    assert isinstance(ClientIdempotencyInterceptor(), grpc.UnaryUnaryClientInterceptor)
