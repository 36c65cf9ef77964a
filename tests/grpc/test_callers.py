"""Who calls, and whether they may: what a resolver returns by mistake lets nobody in."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import grpc
import pytest

from semel.grpc import core_key
from tests.grpc.lab import Lab

Code = grpc.StatusCode


async def no(context: object) -> bool:
    return False


@pytest.mark.parametrize("option", ["principal", "tenant", "authorize"])
def test_g04_a_plain_function_that_returns_a_coroutine_lets_nobody_in(light: Lab, option: str) -> None:
    """It passes the check at start-up, and a coroutine is true; grpc.aio awaits it."""
    options: dict[str, Any] = {option: lambda context: no(context)}
    light.serve(**options)
    reply = light.call(key="k-1")
    if light.colour == "sync":
        assert reply.code is Code.UNKNOWN
        assert "is async, and a threaded server cannot await it" in reply.details
    else:
        assert reply.reason == ("NOT_AUTHORIZED" if option == "authorize" else "NOT_AUTHENTICATED")
    assert light.calls == []


class Refused:
    """Stands for a response of a framework, which is true whatever its status is."""


@pytest.mark.parametrize("answer", [1, "no", Refused(), Code.PERMISSION_DENIED])
def test_g04_what_counts_as_true_and_is_not_true_is_a_mistake(light: Lab, answer: object) -> None:
    light.serve(authorize=lambda context: answer)
    for _ in range(2):
        reply = light.call(key="k-1")
        assert reply.code is Code.UNKNOWN
        assert "return True or False, or raise PermissionError" in reply.details
    assert light.calls == []


def test_g04_an_id_may_be_a_uuid_and_is_the_same_one_as_its_text(light: Lab) -> None:
    ann = UUID(int=7)
    ids: list[Any] = [ann, str(ann)]
    light.serve(principal=lambda context: ids.pop(0))
    assert [light.call(key="k-1").replayed for _ in range(2)] == ["false", "true"]
    assert light.do(light.once.peek(core_key("k-1", str(ann)), operation="http")) is not None
    assert len(light.calls) == 1


@pytest.mark.parametrize("option", ["principal", "tenant"])
def test_g18_an_id_may_be_a_number_as_over_http(light: Lab, option: str) -> None:
    """Most tables have such ids; over gRPC they were nobody's."""
    options: dict[str, Any] = {option: lambda context: 7}
    light.serve(**options)
    assert [light.call(key="k-1").replayed for _ in range(2)] == ["false", "true"]
    who = {"principal": "ann", "tenant": None, option: "7"}
    key, tenant = core_key("k-1", who["principal"] or ""), {"tenant": who["tenant"]} if who["tenant"] else {}
    assert light.do(light.once.peek(key, operation="http", **tenant)) is not None
