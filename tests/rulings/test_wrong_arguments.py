"""What is wrong is refused before anything is marked or run; what nobody has awaited is no outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from enum import StrEnum
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest

from semel import (
    NOT_FOUND,
    UNDECIDED,
    ConfigurationError,
    InvalidKey,
    OutcomeUnknown,
    Semel,
    current_run,
)
from semel.runtime import run_sync

from .conftest import Lab
from .tools import stepping


class _Promise:
    """Something to await that is no coroutine, as clients of HTTP libraries return it."""

    def __await__(self) -> Generator[None, None, str]:
        yield from ()
        return "paid"


@pytest.mark.parametrize("verb", ["execute", "consume"])
async def test_R4_what_nobody_has_awaited_is_no_outcome_and_is_not_made_again(
    light_lab: Lab, verb: str
) -> None:
    """Neither done, as nobody knows whether it happens, nor free: what the function did before it returned has happened."""
    lab, once = light_lab, light_lab.face()

    def plain() -> Any:
        lab.effects.append("charged")
        return _Promise()

    async def forgets() -> Any:
        return plain()

    fn = plain if lab.colour == "sync" else forgets
    remedy = "use AsyncSemel, or return" if lab.colour == "sync" else "await it, and return"
    with pytest.raises(ConfigurationError, match=rf"returned a _Promise.*{remedy} what it gives.*resolve"):
        await lab.do(getattr(once, verb)("k", fn))
    for _ in range(2):
        with pytest.raises(OutcomeUnknown):
            await lab.do(getattr(once, verb)("k", fn))
    assert lab.effects == ["charged"]


async def test_R4_a_run_around_it_ends_as_its_own_on_error_says(light_lab: Lab) -> None:
    lab, once = light_lab, light_lab.face()

    async def inner() -> Any:
        return _Promise()

    async def around() -> Any:
        return (await lab.do(once.execute("inner", _Promise if lab.colour == "sync" else inner))).value

    with pytest.raises(ConfigurationError, match="nobody has awaited"):
        await lab.do(once.execute("outer", (lambda: run_sync(around())) if lab.colour == "sync" else around))
    assert (await lab.do(once.peek("inner"))).state == "unknown"
    assert (await lab.do(once.peek("outer"))).state == "released"


@pytest.mark.parametrize("colour", ["async"])
async def test_R4_what_a_plain_function_gives_to_await_is_awaited(light_lab: Lab) -> None:
    once = light_lab.face()
    assert (await once.execute("plain", _Promise)).value == "paid"
    assert (await once.execute("step", stepping(light_lab, "charge", _Promise))).value == "paid"


async def test_R26_a_step_whose_arguments_are_wrong_leaves_no_mark(light_lab: Lab) -> None:
    lab, once = light_lab, light_lab.face()
    wrong: list[tuple[str, Any]] = [
        ("kwargs", [1]),
        ("kwargs", []),
        ("kwargs", {1: 2}),
        ("result_type", "int"),
        ("result_type", 5),
    ]
    for name, value in wrong:
        work = stepping(lab, "charge", lab.effect(), on_unknown="hold", **{name: value})
        with pytest.raises(ConfigurationError, match=f"{name} must be"):
            await lab.do(once.execute("k", work))
    assert (
        await lab.do(once.execute("k", stepping(lab, "charge", lab.effect(), on_unknown="hold")))
    ).value == "done"
    assert len(lab.effects) == 1


class Name(StrEnum):
    PAY = "pay-1"


async def test_R21_a_key_of_a_class_of_texts_is_its_text_inside_of_the_run(light_lab: Lab) -> None:
    lab, once = light_lab, light_lab.face(secret=b"s" * 32)

    def look() -> dict[str, str]:
        run = current_run()
        return {"key": run.key, "downstream": run.downstream_key("stripe")}

    said = (await lab.do(once.execute(Name.PAY, lab.fn(look)))).value
    await lab.do(once.forget("pay-1"))
    assert said == (await lab.do(once.execute("pay-1", lab.fn(look)))).value
    assert said["key"] == "pay-1"


def test_a_probe_answers_from_another_process() -> None:
    for word in (NOT_FOUND, UNDECIDED):
        assert ForkingPickler.loads(ForkingPickler.dumps(word)) is word


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"operation": 5}, "operation must be a str"),
        ({"operation": ""}, "operation"),
        ({"labels": 5}, "labels must be a mapping"),
        ({"fields": ["id"]}, "there is no request="),
        ({"key": asyncio.sleep}, "key= cannot be the coroutine function"),
    ],
    ids=["operation", "empty", "labels", "fields", "async key"],
)
def test_R5_wrong_options_are_refused_when_decorating(options: dict[str, Any], said: str) -> None:
    with Semel("memory://") as once, pytest.raises((ConfigurationError, InvalidKey), match=said):
        once(**options)(lambda order: order)


async def test_names_that_are_none_are_refused_by_find_recovery_and_claim(light_lab: Lab) -> None:
    lab, once = light_lab, light_lab.face()
    for wrong, said in (
        ({"states": 5}, "states must be"),
        ({"tenant": 5}, "tenant must"),
        ({"ref": 5}, "ref must"),
    ):
        with pytest.raises((ConfigurationError, InvalidKey), match=said):
            await lab.do(once.find(**wrong))
    with pytest.raises(InvalidKey, match="operation must be a str"):
        once.recovery(5, probe=print)
    with pytest.raises(ConfigurationError, match="a claim runs none"):
        once.claim("k", kwargs={"a": 1})
