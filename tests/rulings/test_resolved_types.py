"""R2: what a person resolves a key with, beside its type: plain data becomes one, and what cannot is refused before it is written."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, TypedDict

import msgspec
import pydantic
import pytest

from semel import CodecError, OutcomeUnknown, Semel
from semel.model import State
from tests.rulings.conftest import Lab


@dataclasses.dataclass
class Order:
    id: int


@dataclasses.dataclass
class Letter:
    to: str


class Row(msgspec.Struct):
    id: int


class Model(pydantic.BaseModel):
    id: int


class Size(enum.Enum):
    SMALL = "s"
    WIDE = (3, 1)


class Fields(TypedDict):
    id: int


class Unasked(Protocol):
    """isinstance() refuses it."""

    id: int


async def _resolved(lab: Lab, value: Any, result_type: Any) -> Any:
    once = lab.face(on_unknown="hold")
    with pytest.raises(SystemExit):
        await lab.do(once.execute("k", lab.raising(SystemExit()), result_type=result_type))
    await lab.do(once.resolve("k", value=value, result_type=result_type, actor="ann"))
    outcome = await lab.do(once.execute("k", lab.effect(), result_type=result_type))
    assert outcome.replayed
    return outcome.value


async def _told(lab: Lab, value: Any, result_type: Any) -> Any:
    """By a person who names no type; the function's own is that of its annotation."""
    once = lab.face(on_unknown="hold")
    with pytest.raises(SystemExit):
        await lab.do(once.execute("k", lab.raising(SystemExit())))
    await lab.do(once.resolve("k", value=value, actor="ann"))
    return (await lab.do(once.execute("k", lab.effect(), result_type=result_type))).value


@pytest.mark.parametrize(
    ("value", "result_type", "expected"),
    [
        ({"id": 5}, Order, Order(5)),
        ({"id": 5}, Row, Row(5)),
        ({"id": 5}, Model, Model(id=5)),
        ({"id": 5}, Order | None, Order(5)),
        ({"id": 5}, Fields, {"id": 5}),
        ([{"id": 5}], list[Order], [Order(5)]),
        ([Order(4), {"id": 5}], list[Order], [Order(4), Order(5)]),
        ({"a": {"id": 5}}, dict[str, Order], {"a": Order(5)}),
        ([1, "a"], tuple[int, str], (1, "a")),
        (1, float, 1.0),
        ({"to": "me"}, Order | Letter, Letter("me")),
        ({"id": 5}, Model | str, Model(id=5)),
        ({"id": 5}, Order | Letter | None, Order(5)),
        ([Order(5), {"to": "me"}], list[Order | Letter], [Order(5), Letter("me")]),
        ({"a": [{"to": "me"}, 1]}, dict[str, tuple[Order | Letter, int]], {"a": (Letter("me"), 1)}),
        ([{"id": 5}], Iterable[Order], [Order(5)]),
    ],
)
async def test_R2_plain_data_becomes_the_type_that_is_named(
    light_lab: Lab, value: Any, result_type: Any, expected: Any
) -> None:
    told = await _resolved(light_lab, value, result_type)
    assert (told, type(told)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("value", "result_type"),
    [
        (Order(5), Order),
        (Row(5), Row),
        (Model(id=5), Model),
        (None, Order | None),
        (Size.WIDE, Size),
        (Letter("me"), Order | Letter),
        (None, Order | Letter | None),
        ([Order(5), Letter("me")], list[Order | Letter]),
        ({"a": (Order(5), Letter("me"))}, dict[str, tuple[Order | Letter, ...]]),
        ((1, Size.WIDE), tuple[int, Size]),
        ((1, 2), Sequence[int]),
        ("small", Order | Letter | Literal["small"]),
        ({"any": [1]}, dict[str, Any]),
        ("by hand", Model | str),
        ([1], Iterable[int]),
        (None, Unasked | None),
    ],
)
async def test_R2_what_is_of_the_type_already_stays_as_it_is(
    light_lab: Lab, value: Any, result_type: Any
) -> None:
    told = await _resolved(light_lab, value, result_type)
    assert (told, type(told)) == (value, type(value))


@pytest.mark.parametrize(
    ("value", "result_type"),
    [
        ("no order at all", Order),
        ({"id": "five"}, Order),
        ({"id": "five"}, Model),
        (Letter("me"), Order),
        ({"id": 5}, list[Order]),
        ((1, 2, 3), tuple[int, int]),
        ("large", Literal["small"]),
        ({"id": 5}, Order | Row),  # which of them, nobody can tell
        (5, Order | Letter),
        ([Order(5), {"for": "me"}], list[Order | Letter]),
        ([{"id": 5}], tuple[Order | Letter, int]),
        ("SMALL", Literal[Size.SMALL]),
        ("ab", Sequence[str]),
        ({"id": 5}, Iterable[int]),
        (True, int),
        (1, Unasked),
    ],
)
async def test_R2_what_cannot_be_of_the_type_is_refused_before_it_is_written(
    light_lab: Lab, value: Any, result_type: Any
) -> None:
    with pytest.raises(
        CodecError, match=r"(?s)does not fit its result_type: .* is no .*Nothing was changed: give"
    ):
        await _resolved(light_lab, value, result_type)
    once = light_lab.face(on_unknown="hold")
    record = await light_lab.do(once.peek("k"))
    assert (record.state, record.resolved) == (State.UNKNOWN, False)
    with pytest.raises(OutcomeUnknown):
        await light_lab.do(once.execute("k", light_lab.effect()))


@pytest.mark.parametrize(
    ("value", "result_type", "expected"),
    [
        ("by hand", Model | str, "by hand"),
        (None, Order | Letter | None, None),
        ([1], Iterable[int], [1]),
        ({"to": "me"}, Order | Letter, Letter("me")),
        ([{"id": 5}, {"to": "me"}], list[Order | Letter], [Order(5), Letter("me")]),
        (1, Literal[True, 1], 1),
    ],
)
async def test_R2_a_word_without_a_type_becomes_what_the_function_says(
    light_lab: Lab, value: Any, result_type: Any, expected: Any
) -> None:
    told = await _told(light_lab, value, result_type)
    assert (told, type(told)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("value", "result_type", "why"),
    [
        ({"id": 5}, Order | Row, r"it could be .*Order as well as .*Row: give result_type= of the one"),
        ({"id": "5"}, Order | Letter, r"fits none of them \(.*Order: Expected `int`.*; .*Letter: .*`to`"),
        ("ab", Sequence[str], "Expected `array`"),
        (True, int, "Expected `int`, got `bool`"),
    ],
)
async def test_R15_a_word_that_nobody_can_tell_the_type_of_is_unreadable_and_says_why(
    light_lab: Lab, value: Any, result_type: Any, why: str
) -> None:
    with pytest.raises(OutcomeUnknown, match=why):
        await _told(light_lab, value, result_type)


def test_R2_so_it_is_with_the_type_that_the_face_names() -> None:
    def lost() -> Order:
        raise SystemExit

    with Semel("memory://", on_unknown="hold", result_type=Order) as once:
        with pytest.raises(SystemExit):
            once.execute("k", lost)
        with pytest.raises(CodecError, match=r"is no .*Order"):
            once.resolve("k", value="nothing of the kind")
        once.resolve("k", value={"id": 5})
        assert once.execute("k", lost).value == Order(5)
