"""Options that cannot mean what they say are refused by name, with the remedy, before anything runs."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic
import pytest

from semel import NOT_FOUND, AsyncSemel, ConfigurationError, InvalidKey, Semel, current_run

from .conftest import Lab


async def decide(error: Exception) -> str:
    return "replay"


async def probe(*args: Any) -> Any:
    return NOT_FOUND


async def listen(event: object) -> None:
    """Never awaited."""


class Deciding:
    async def __call__(self, error: Exception) -> str:
        return "replay"


# ------------------------------------------------------------------------------------- coroutine functions
@pytest.mark.parametrize(
    "on_error", [decide, functools.partial(decide), Deciding()], ids=["function", "partial", "object"]
)
async def test_a_coroutine_function_cannot_decide_about_an_error(light_lab: Lab, on_error: Any) -> None:
    once = light_lab.face()
    with pytest.raises(ConfigurationError, match=r"on_error cannot be the coroutine function .*plain def"):
        await light_lab.do(once.execute("k", light_lab.effect(), on_error=on_error))
    with pytest.raises(ConfigurationError, match="on_error cannot be"):
        light_lab.face(on_error=on_error)
    with pytest.raises(ConfigurationError, match="on_error cannot be"):
        once(key="x", on_error=on_error)(light_lab.effect())
    assert light_lab.effects == []


def test_plain_code_takes_no_probe_that_must_be_awaited() -> None:
    ran: list[int] = []
    once = Semel("memory://")
    said = "the probe of a Semel cannot be the coroutine function probe: .*AsyncSemel"
    with pytest.raises(ConfigurationError, match=said):
        once.execute("k", ran.append, 1, on_unknown=probe)
    with pytest.raises(ConfigurationError, match=said):
        Semel("memory://", on_unknown=probe)
    with pytest.raises(ConfigurationError, match=said):
        once.claim("k", on_unknown=probe)
    with pytest.raises(ConfigurationError, match=said):
        once.execute("k", lambda: current_run().step("s", ran.append, 1, on_unknown=probe))
    assert ran == []


async def test_async_code_takes_a_probe_of_either_kind() -> None:
    async with AsyncSemel("memory://", on_unknown=probe) as once:
        assert (await once.execute("k", lambda: 1)).value == 1
        assert (await once.execute("l", lambda: 1, on_unknown=lambda: NOT_FOUND)).value == 1


@pytest.mark.parametrize("face", [Semel, AsyncSemel])
def test_a_hook_is_called_and_not_awaited(face: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"a hook cannot be the coroutine function listen: .*plain def"
    ):
        face("memory://", hooks=[print, listen])


# ------------------------------------------------------------------------------------------ wrong kinds
class Order(msgspec.Struct):
    number: int


class Model(pydantic.BaseModel):
    number: int


@dataclass
class Line:
    number: int


class Row(typing.TypedDict):
    number: int


Number = typing.NewType("Number", int)
TYPES = [
    int, None, type(None), list, list[int], typing.Any, typing.List, typing.List[int], dict[str, Order], Order, Model, Line,  # noqa: UP006 - old spellings too
    Row, Number, int | None, typing.Optional[int], typing.Union[int, str], typing.Literal[1, 2], tuple[int, ...], object,  # noqa: UP007, UP045 - old spellings too
    typing.Annotated[int, msgspec.Meta(gt=0)], pydantic.PositiveInt, pydantic.conint(gt=0), Mapping[str, int], types.NoneType,
    typing.TypeVar("Free"),
]  # fmt: skip


@pytest.mark.parametrize("result_type", TYPES)
async def test_whatever_an_annotation_may_be_is_a_result_type(light_lab: Lab, result_type: Any) -> None:
    light_lab.face(result_type=result_type)
    await light_lab.do(light_lab.face().peek("k", result_type=result_type))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"result_type": 5}, "result_type must be a type.*not 5"),
        ({"result_type": "int"}, "result_type must be a type.*not 'int'.*not its text"),
        ({"result_type": list["Line"]}, r"result_type must be a type.*not list\['Line'\].*not its text"),
        ({"result_type": dict[str, Line] | list["Line"]}, "result_type must be a type"),
        ({"result_type": typing.Union["Line", int]}, "result_type must be a type"),
        ({"result_type": [int]}, "result_type must be a type"),
        ({"result_type": {"a": int}}, "result_type must be a type"),
        ({"result_type": (int, str)}, "result_type must be a type"),
        ({"result_type": Line(1)}, "result_type must be a type"),
        ({"ref_type": 5}, "ref_type must be .*not 5"),
        ({"ref_type": "ORD-"}, "ref_type must be"),
        ({"inline": "no"}, "inline must be True or False, not 'no'"),
        ({"inline": 1}, "inline must be True or False"),
    ],
    ids=repr,
)
async def test_an_option_of_the_wrong_kind_is_refused_by_its_name(
    light_lab: Lab, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        await light_lab.do(light_lab.face().execute("k", light_lab.effect(), **options))
    with pytest.raises(ConfigurationError, match=said):
        light_lab.face(**options)
    assert light_lab.effects == []


@pytest.mark.parametrize("name", ["enabled", "create", "coalesce"])
@pytest.mark.parametrize("value", ["no", 1, None])
def test_a_switch_is_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be True or False, not {value!r}"):
        Semel("memory://", **{name: value})


# ---------------------------------------------------------------------------------------- unknown words
@pytest.mark.parametrize(
    "settings, said",
    [
        ({"cach": 5}, r"unknown setting 'cach': did you mean 'cache'\? Semel\(\.\.\.\) takes tenant, operation, .*encrypt"),
        ({"timout": 5}, r"did you mean 'timeout'\?"),
        ({"enabeld": True}, r"did you mean 'enabled'\?"),
        ({"on_eror": "hold"}, r"did you mean 'on_error'\?"),
        ({"bogus": 1}, r"unknown setting 'bogus': Semel"),
        ({"request": 1}, r"'request' belongs to one call, not to Semel\(\.\.\.\): give it to execute"),
        ({"labels": {}}, "'labels' belongs to one call"),
    ],
    ids=repr,
)  # fmt: skip
def test_a_word_that_a_face_does_not_know_is_compared_with_its_own(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        Semel("memory://", **settings)
    assert "positionally" not in str(caught.value)


def test_a_bad_namespace_is_called_so() -> None:
    with pytest.raises(InvalidKey, match="namespace is empty"):
        Semel("memory://", namespace="")
