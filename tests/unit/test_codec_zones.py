"""Moments in the time zones that pydantic leaves behind, and models that are kept as pydantic's own JSON beside them."""

from __future__ import annotations

import dataclasses
import datetime as dt
import sys
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from pydantic_core import TzInfo

from semel import Semel
from semel.codec import encoder_for, preview
from semel.codec.shapes import exactly
from semel.errors import CodecError

ZURICH, PARIS = ZoneInfo("Europe/Zurich"), ZoneInfo("Europe/Paris")
HOUR = dt.timedelta(hours=1)
LINK: Any = "https://a.example/1"
untyped = encoder_for(None)


class Booking(pydantic.BaseModel):
    link: pydantic.HttpUrl
    at: Any


class Command(pydantic.BaseModel):
    order: str
    due: dt.datetime


class Hiding(pydantic.BaseModel):
    link: pydantic.HttpUrl
    secret: str = pydantic.Field(default="", exclude=True)
    cents: int = 0
    _seen: int = pydantic.PrivateAttr(default=0)

    @pydantic.field_validator("cents", mode="before")
    @classmethod
    def in_cents(cls, amount: float) -> int:
        return round(amount * 100)


class Seen(pydantic.BaseModel):
    link: pydantic.HttpUrl
    _seen: int = pydantic.PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        self._seen = 1


@dataclasses.dataclass
class Receipt:
    order: str
    due: dt.datetime


def noon(zone: dt.tzinfo | None = None, fold: int = 0) -> dt.datetime:
    return dt.datetime(2026, 10, 25, 12, tzinfo=zone, fold=fold)


def parsed(text: str = "2026-01-01T10:00:00+01:00") -> dt.datetime:
    due = Command.model_validate({"order": "o-1", "due": text}).due
    assert type(due.tzinfo) is TzInfo
    return due


def round_trip(value: Any, result_type: Any = None) -> Any:
    codec = encoder_for(result_type)
    return codec.decode(codec.encode(value))


def state_of(value: Any) -> Any:
    return preview(encoder_for(type(value)).encode(value))["!state"]


# -------------------------------------------------------------------------------------------- comparing


@pytest.mark.parametrize(
    "one, other",
    [
        (noon(ZURICH), noon(dt.timezone(HOUR))),
        (noon(ZURICH), noon(PARIS)),
        (noon(dt.timezone(HOUR)), noon(TzInfo(3600))),
        (noon(dt.UTC), noon(TzInfo(0))),
        (noon(dt.timezone(HOUR)), noon(dt.timezone(HOUR, "CET"))),
        (noon(), noon(fold=1)),
        (noon(ZURICH), noon(ZURICH, fold=1)),
        (dt.time(1, tzinfo=ZURICH), dt.time(1, tzinfo=PARIS)),
        (dt.time(1), dt.time(1, fold=1)),
        ({noon(dt.timezone(HOUR))}, {noon(TzInfo(3600))}),
        ({1, 2}, {1, 2.0}),
        ({1, 2}, {1, 3}),
        (frozenset({1}), frozenset({True})),
        ({1: "a"}, {1.0: "a"}),
        ({"a": 1}, {"b": 1}),
    ],
)
def test_R23_what_is_only_equal_is_not_exactly_the_same(one: Any, other: Any) -> None:
    assert not exactly(one, other)
    assert not exactly([{"a": one}], [{"a": other}])


@pytest.mark.parametrize(
    "one, other",
    [
        (noon(ZURICH, fold=1), noon(ZoneInfo("Europe/Zurich"), fold=1)),
        (noon(TzInfo(3600)), noon(TzInfo(3600))),
        (noon(dt.timezone(HOUR, "CET")), noon(dt.timezone(HOUR, "CET"))),
        (dt.time(1), dt.time(1)),
        ({(1, "a"): {1, 2}}, {(1, "a"): {2, 1}}),
    ],
)
def test_what_is_of_the_same_zone_and_types_is_exactly_the_same(one: Any, other: Any) -> None:
    assert exactly(one, other)


# ---------------------------------------------------------------------------- models as their own JSON


@pytest.mark.parametrize(
    "at",
    [
        noon(ZURICH),
        noon(dt.UTC),
        noon(dt.timezone(HOUR, "CET")),
        noon(fold=1),
        noon(TzInfo(3600), fold=1),
        dt.time(1, fold=1),
        {noon(ZURICH), noon(fold=1)},
        {noon(ZURICH): noon(dt.UTC)},
        {1: {"a": (1, 2)}},
    ],
    ids=repr,
)
def test_R23_what_the_json_of_a_model_would_change_is_kept_beside_it(at: Any) -> None:
    booking = Booking(link=LINK, at=at)
    back = round_trip(booking, Booking)
    assert back == booking
    assert exactly(back, booking)
    assert type(back.link) is pydantic.HttpUrl


def test_R2_a_replayed_booking_is_in_its_own_time_zone() -> None:
    def book() -> Booking:
        return Booking(link=LINK, at=noon(ZURICH))

    once = Semel("memory://")
    once.execute("k", book)
    replayed = once.execute("k", book)
    assert replayed.replayed
    assert replayed.value.at.tzinfo is ZURICH


def test_R2_fields_that_are_hidden_changed_or_private_come_back_beside_the_json_too() -> None:
    model = Hiding(link=LINK, secret="s", cents=3)
    model._seen = 5
    back = round_trip(model, Hiding)
    assert (back.secret, back.cents, back._seen) == ("s", 300, 5)
    assert exactly(back, model)


def test_R23_a_model_that_its_json_gives_more_than_it_has_is_refused() -> None:
    model = Seen(link=LINK)
    assert exactly(round_trip(model, Seen), model)
    del model._seen
    with pytest.raises(CodecError, match=r"^result\.link is a"):
        encoder_for(Seen).encode(model)


def test_R15_a_model_is_kept_as_its_json_only_where_its_fields_cannot_be_written() -> None:
    assert state_of(Booking(link=LINK, at="x")) == {"!json": '{"link":"https://a.example/1","at":"x"}'}
    command = Command(order="o-1", due=parsed())
    assert "!json" not in state_of(command)
    assert exactly(round_trip(command, Command), command)


def test_R15_a_parsed_moment_that_was_kept_as_json_is_read() -> None:
    text = b'{"order":"o-1","due":"2026-01-01T10:00:00+01:00"}'
    held = b"\x10\xc7C\x0f\x92\xa7Command\x81\xa5!json\xd91" + text
    assert exactly(encoder_for(Command).decode(held), Command(order="o-1", due=parsed()))


# ------------------------------------------------------------------------------ what pydantic has parsed


@pytest.mark.parametrize(
    "value",
    [
        parsed(),
        parsed("2026-01-01T10:00:00Z"),
        parsed("2026-01-01T10:00:00.000005-23:59"),
        parsed().replace(fold=1),
        dt.time(1, 2, tzinfo=TzInfo(-3600), fold=1),
        {"due": parsed(), "then": [noon(ZURICH), noon(dt.UTC), noon(), dt.time(1)]},
        {parsed(): {parsed()}},
    ],
    ids=repr,
)
def test_R23_what_pydantic_parsed_comes_back_in_the_zone_class_of_pydantic(value: Any) -> None:
    assert exactly(round_trip(value), value)


def test_R2_a_result_of_what_pydantic_parsed_is_stored_and_replayed() -> None:
    command = Command(order="o-1", due=parsed())

    def receipt() -> Receipt:
        return Receipt(command.order, command.due)

    def both() -> dict[str, Receipt | Command]:
        return {"receipt": receipt(), "command": command}

    for fn in (receipt, both):
        once = Semel("memory://")
        assert exactly(once.execute("k", fn).value, fn())
        again = once.execute("k", fn)
        assert again.replayed
        assert exactly(again.value, fn())


def test_R15_a_parsed_moment_has_a_tag_of_its_own_which_older_readers_refuse() -> None:
    data = untyped.encode(parsed("2026-01-01T10:00:00Z"))
    assert data.hex() == "10c71d11c71a07b9323032362d30312d30315431303a30303a30302b30303a3030"
    with pytest.raises(CodecError, match="it has a part of kind 18"):
        untyped.decode(data.replace(b"\x11", b"\x12", 1))


def test_R15_where_pydantic_is_not_installed_the_reader_says_so_and_a_preview_needs_it_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = untyped.encode({"due": parsed()})
    monkeypatch.setitem(sys.modules, "pydantic_core", None)
    with pytest.raises(
        CodecError, match=r"holds 2026-01-01T10:00:00\+01:00 in .*: install pydantic here too"
    ):
        untyped.decode(data)
    assert preview(data) == {"due": parsed()}


def test_R23_what_else_cannot_be_stored_beside_a_parsed_moment_is_refused_with_its_place() -> None:
    with pytest.raises(CodecError, match=r"^result\[1\] is a object, which cannot be stored"):
        untyped.encode([parsed(), object()])


def test_R23_a_zone_class_of_another_library_is_refused_whatever_its_name() -> None:
    class Other(dt.tzinfo):
        def utcoffset(self, moment: dt.datetime | None) -> dt.timedelta:
            return HOUR

        def dst(self, moment: dt.datetime | None) -> None: ...

        def tzname(self, moment: dt.datetime | None) -> None: ...

    Other.__name__ = Other.__qualname__ = "TzInfo"
    with pytest.raises(CodecError, match=r"time zone of class .*TzInfo, which cannot be stored"):
        untyped.encode(noon(Other()))


def test_a_struct_that_checks_itself_may_hold_a_zoned_moment() -> None:
    class Checked(msgspec.Struct):
        at: dt.datetime

        def __post_init__(self) -> None:
            self.at = self.at.replace(microsecond=0)

    value = Checked(noon(ZURICH, fold=1))
    assert exactly(round_trip(value, Checked), value)
