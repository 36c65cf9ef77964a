"""Mistakes are named at once, with the remedy, and nothing runs."""

from __future__ import annotations

from typing import Any

import pytest

from semel import ConfigurationError, InvalidKey, Semel, SemelError

from .conftest import Lab
from .tools import owned


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"threads": 0}, "threads"),
        ({"threads": "x"}, "threads"),
        ({"cache": -1}, "cache"),
        ({"capacity": 0}, "capacity"),
        ({"namespace": ""}, "empty"),
        ({"acks": 1}, "acks"),
        ({"index": {"ref"}}, "index"),
        ({"index": "ref"}, "index"),
        ({"hooks": print}, "hooks"),
        ({"hooks": [5]}, "hooks"),
        ({"encrypt": b"x" * 32}, "encrypt"),
        ({"readable": "some"}, "readable"),
        ({"tenant": ""}, "tenant"),
        ({"timeout": 0}, "timeout"),
        ({"retention": -1}, "retention"),
        ({"tombstone": float("inf")}, "tombstone"),
        ({"poll": 5}, "poll"),
        ({"poll": (2, 1)}, "poll"),
        ({"max_result": -1}, "max_result"),
        ({"on_unknown": "guess"}, "on_unknown"),
        ({"on_lease_lost": "panic"}, "on_lease_lost"),
        ({"secret": b""}, "secret"),
        ({"leese": 5}, "did you mean 'lease'"),
    ],
)
def test_a_face_refuses_what_it_cannot_do(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SemelError, match=said):
        Semel("memory://", **settings)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fields": ("a",)}, "no request"),
        ({"kwargs": [5]}, "kwargs"),
        ({"labels": {"a": 5}}, "labels"),
        ({"labels": [1]}, "labels"),
        ({"request": 1, "fingerprint": "0" * 64}, "not both"),
        ({"on_error": 5}, "on_error"),
        ({"wait": "long"}, "wait"),
    ],
)
async def test_a_call_refuses_what_it_cannot_do(light_lab: Lab, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        await light_lab.do(light_lab.face().execute("k", light_lab.effect(), **options))
    assert light_lab.effects == []


async def test_the_function_itself_is_passed_and_the_key_comes_first(light_lab: Lab) -> None:
    once, work = light_lab.face(), light_lab.effect()
    result = work()
    with pytest.raises(ConfigurationError, match="execute"):
        await light_lab.do(once.execute("k", result))
    with pytest.raises(InvalidKey, match="key comes first"):
        await light_lab.do(once.execute(work, "k"))
    assert await light_lab.do(once.peek("k")) is None


async def test_a_probe_that_answers_nonsense_is_a_mistake_not_an_answer(light_lab: Lab) -> None:
    once = light_lab.face()
    with pytest.raises(OSError, match="x"):
        await light_lab.do(once.execute("k", light_lab.raising(OSError("x")), on_unknown="hold"))
    with pytest.raises(ConfigurationError, match="Found"):
        await light_lab.do(once.execute("k", light_lab.effect(), on_unknown=light_lab.fn(lambda: True)))
    assert (await light_lab.do(once.peek("k"))).state == "unknown"


async def test_the_decorator_wants_parentheses(light_lab: Lab) -> None:
    with pytest.raises(ConfigurationError, match="parentheses"):
        light_lab.face()(light_lab.effect())


async def test_looking_at_a_key_takes_only_what_names_it(light_lab: Lab) -> None:
    with pytest.raises(ConfigurationError, match="wait"):
        await light_lab.do(light_lab.face().peek("k", wait=5))


async def test_a_closed_face_says_so(lab: Lab) -> None:
    once = lab.face()
    await lab.do(once.execute("k", lab.effect()))
    await lab.do(once.close())
    with pytest.raises(ConfigurationError, match="closed"):
        await lab.do(once.execute("k", lab.effect()))


async def test_a_claim_is_answered_once_and_in_its_own_colour(light_lab: Lab) -> None:
    once = light_lab.face()
    async with owned(light_lab, once, "k") as claim:
        await light_lab.do(claim.complete(1))
        with pytest.raises(ConfigurationError, match="already"):
            await light_lab.do(claim.complete(2))
    wrong = once.claim("other")
    with pytest.raises(ConfigurationError, match="colour"):
        if light_lab.colour == "sync":
            await wrong.__aenter__()
        else:
            wrong.__enter__()


def test_records_and_messages_do_not_show_keys_or_bytes() -> None:
    once = Semel("memory://")
    once.execute("customer-4711-secret", lambda: "x")
    assert "4711" not in repr(once.peek("customer-4711-secret"))
    assert "Semel on MemoryStore" in repr(once)
