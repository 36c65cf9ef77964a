"""Results to bytes and back: equal and of the same type, or refused with the place and the remedy."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import datetime as dt
import enum
import functools
import io
import math
import socket
import sys
import types
import typing
import uuid
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from decimal import Decimal
from numbers import Number
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, NewType, Optional, Protocol, TypedDict, TypeVar, Union
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from google.protobuf import struct_pb2, wrappers_pb2
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import TypeAliasType

from semel.codec import Codec, check_encodable, encoder_for, preview, return_type
from semel.codec.annotations import Unresolved
from semel.codec.shapes import exactly
from semel.errors import CodecError

T = TypeVar("T")
untyped = encoder_for(None)


def label(value: Any) -> str:
    """Names of test cases: the same in every process."""
    if isinstance(value, str):
        return ascii(value)[:40]
    return getattr(value, "__name__", None) or str(getattr(value, "__origin__", type(value).__name__))


def same(a: Any, b: Any) -> bool:
    """An own comparison, independent of the codec's: types all the way down, NaN is itself, zeros keep signs."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return msgspec.msgpack.encode(a) == msgspec.msgpack.encode(b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, Decimal):
        return str(a) == str(b)
    if isinstance(a, dt.datetime | dt.time):
        zones = type(a.tzinfo) is type(b.tzinfo) and (a.tzname(), a.utcoffset()) == (
            b.tzname(),
            b.utcoffset(),
        )
        return a.isoformat() == b.isoformat() and a.fold == b.fold and zones
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    return bool(a == b)


def round_trip(value: Any, result_type: Any = None, **options: Any) -> Any:
    codec = encoder_for(result_type)
    return codec.decode(codec.encode(value, **options))


# ------------------------------------------------------------------------------------ untyped values

OFFSETS = st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)).map(dt.timezone)
ZONES = st.none() | OFFSETS | st.sampled_from([dt.UTC, ZoneInfo("Europe/Rome"), ZoneInfo("America/New_York")])
HASHABLE = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**200), 2**200) | st.floats() | st.text() | st.binary()
    | st.decimals(allow_nan=False) | st.uuids() | st.dates() | st.timedeltas() | st.complex_numbers()
    | st.datetimes(timezones=ZONES) | st.times(timezones=st.none() | OFFSETS)
    | st.text(st.characters(categories=["Cs", "Ll"]))
)  # fmt: skip
SCALARS = HASHABLE | st.decimals() | st.binary().map(bytearray)  # a signalling NaN has no hash
KEYS = st.recursive(
    HASHABLE, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
    ),
    max_leaves=16,
)


@given(VALUES)
def test_R23_an_untyped_value_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    assert same(round_trip(value), value)


@given(VALUES)
def test_R23_a_compressed_value_comes_back_too(value: Any) -> None:
    assert same(round_trip(value, compress_over=0), value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -0.0,
        math.nan,
        -math.inf,
        2**63 - 1,
        2**64 - 1,
        2**64,
        -(2**63),
        -(2**63) - 1,
        "é\U0001f600",
        "\ud800 alone",
        b"",
        bytearray(b"x"),
        3 - 4j,
        Decimal("1.00"),
        Decimal("-0E+9"),
        Decimal("sNaN12"),
        dt.datetime(2024, 10, 27, 2, 30, fold=1),  # noqa: DTZ001 - naive on purpose
        dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Rome")),
        dt.datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Rome")),
        dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
        dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=2), "CEST")),
        dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(seconds=1, microseconds=5))),
        dt.time(1, 2, 3, 4, fold=1),
        dt.time(1, tzinfo=ZoneInfo("Europe/Rome")),
        dt.timedelta.min,
        (),
        set(),
        {"$type": "tuple", "__tag__": [1]},
        {"!class": "Order", "!state": {}},
        {1: "a", 2.5: "b", None: "c", b"k": "e"},
        {2**70: 1},
        {("a", 1): {uuid.UUID(int=1): {dt.date(2024, 1, 1)}}},
        {"a": [(1, [2, (3,)]), {"b": frozenset({(1,)})}]},
        [msgspec.msgpack.encode({"a": 1}), msgspec.UNSET],
    ],
    ids=label,
)
def test_R23_corner_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    assert same(round_trip(value), value)
    assert same(round_trip([{"part": value}]), [{"part": value}])


class Text(str):
    __slots__ = ()


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Word(enum.StrEnum):
    A = "a"


class Access(enum.Flag):
    READ = 1
    WRITE = 2
    FAR = 1 << 70


@dataclasses.dataclass
class Line:
    sku: str
    price: Decimal


class Zone(dt.tzinfo):
    def utcoffset(self, moment: dt.datetime | None) -> dt.timedelta:
        return dt.timedelta(hours=1)

    def dst(self, moment: dt.datetime | None) -> None: ...

    def tzname(self, moment: dt.datetime | None) -> None: ...


def nested(depth: int, wrap: Callable[[Any], Any] = lambda v: [v]) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


itself: list[Any] = []
itself.append(itself)
itself_by_key: dict[str, Any] = {}
itself_by_key["me"] = (itself_by_key,)

REFUSED: list[tuple[Any, str]] = [
    (object(), r"^result is a object, which cannot be stored"),
    ({"items": [1, 2, 3, {4j: socket}]}, r"^result\['items'\]\[3\]\[4j\] is a module"),
    ([(1, {"a": Text("x")})], r"^result\[0\]\[1\]\['a'\] is a .*\.Text, which cannot be stored"),
    ({"a": Colour.RED}, r"^result\['a'\] is a .*\.Colour, a class that no annotation"),
    (Word.A, r"annotate the function's return type with it, or pass result_type="),
    ([Line("a", Decimal(1))], r"^result\[0\] is a .*\.Line, a class that no annotation.*result_type="),
    ({Colour.RED: 1}, r"^result\[<Colour.RED: 'red'>\] is a"),
    ({"k" * 100: object()}, r"^result\['k{35}…\] is a object"),
    (collections.OrderedDict(a=1), "OrderedDict"),
    (collections.Counter("a"), "Counter"),
    ([range(3)], r"^result\[0\] is a range"),
    (iter([1]), "list_iterator"),
    ((n for n in [1]), "generator"),
    (lambda: 0, "function"),
    (memoryview(b"x"), "memoryview"),
    (Path("a"), "Path"),
    (ValueError("x"), "ValueError"),
    (dt.datetime(2024, 1, 1, tzinfo=Zone()), "time zone of class .*Zone, which cannot be stored"),
    (
        dt.datetime(2024, 1, 1, tzinfo=ZoneInfo.no_cache("Europe/Rome")),
        "ZoneInfo that its key does not give again",
    ),
    (nested(65), r"nested more than 64 levels deep"),
    (nested(65, lambda v: (v,)), r"nested more than 64 levels deep"),
    (nested(5000), r"nested more than 64 levels deep"),
    (itself, r"^result\[0\]\[0\].* … .*contains itself"),
    (itself_by_key, "contains itself"),
]


@pytest.mark.parametrize("value, says", REFUSED, ids=label)
def test_R23_what_would_not_come_back_is_refused_with_its_place_and_the_remedy(value: Any, says: str) -> None:
    with pytest.raises(CodecError, match=says) as caught:
        untyped.encode(value)
    assert len(str(caught.value)) < 400


def test_R23_a_zone_made_from_a_file_is_refused() -> None:
    data = Path("/usr/share/zoneinfo/Europe/Rome")
    if not data.exists():
        tzdata = pytest.importorskip("tzdata")
        data = Path(tzdata.__file__).parent / "zoneinfo" / "Europe" / "Rome"
    with data.open("rb") as file:
        zone = ZoneInfo.from_file(file)
    with pytest.raises(CodecError, match="its key does not give again"):
        untyped.encode(dt.datetime(2024, 1, 1, tzinfo=zone))


def test_R23_the_deepest_legal_value_comes_back() -> None:
    for wrap in (lambda v: [v], lambda v: (v,), lambda v: {"a": v}, lambda v: {2**70: v}):
        value = nested(64, wrap)
        assert same(round_trip(value), value)


@pytest.mark.parametrize("seed", [[1, 1], [1, (1,)]], ids=["plain", "tagged"])
def test_R23_shared_parts_that_would_grow_without_bound_are_refused(
    seed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.codec.tagged.MAX_PARTS", 10_000)  # the same sooner
    value: Any = seed
    for _ in range(60):
        value = [value, value]
    with pytest.raises(CodecError, match="has more than 1,000,000 parts"):
        untyped.encode(value)


def test_R23_the_first_caller_keeps_its_own_object_untouched() -> None:
    value = {"a": (1, [2]), "b": {3}}
    untyped.encode(value)
    assert value == {"a": (1, [2]), "b": {3}}


# ---------------------------------------------------------------------------------------- typed values


@dataclasses.dataclass
class Order:
    id: uuid.UUID
    at: dt.datetime
    lines: list[Line]
    colour: Colour = Colour.RED
    extra: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: int
    b: tuple[int, ...] = ()


@dataclasses.dataclass
class Counted:
    n: int
    doubled: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.n += 1
        self.doubled = self.n * 2
        self.note = "an attribute that is no field"

    @functools.cached_property
    def tripled(self) -> int:
        return self.n * 3


@dataclasses.dataclass
class Page(Generic[T]):
    items: list[T]


@dataclasses.dataclass(slots=True)
class Empty:
    pass


@dataclasses.dataclass
class Tree:
    left: Tree | None = None
    right: Tree | None = None


class Point(NamedTuple):
    x: int
    y: float = 0.0


class Struct(msgspec.Struct):
    a: int
    b: bytes | None = None


class Wide(msgspec.Struct, dict=True):
    a: int


class Normal(msgspec.Struct):
    name: str

    def __post_init__(self) -> None:
        self.name = self.name.strip()


class Growing(msgspec.Struct):
    n: float

    def __post_init__(self) -> None:
        self.n += 1


class Model(pydantic.BaseModel, arbitrary_types_allowed=True):
    a: int
    b: Decimal | None = None
    child: Struct | None = None

    @functools.cached_property
    def doubled(self) -> int:
        return self.a * 2


class Upper(pydantic.BaseModel):
    name: str
    _seen: int = pydantic.PrivateAttr(default=0)

    @pydantic.field_validator("name", mode="before")
    @classmethod
    def shout(cls, name: str) -> str:
        return name + "!"


class Unset(pydantic.BaseModel):
    a: int
    _later: int = pydantic.PrivateAttr()


class Open(pydantic.BaseModel, extra="allow"):
    a: int = 0


class Root(pydantic.RootModel[list[int]]):
    pass


class Linked(pydantic.BaseModel):
    url: pydantic.HttpUrl
    anything: Any = None


class Boxed(pydantic.BaseModel, Generic[T]):
    item: T


@pydantic.dataclasses.dataclass
class PydanticData:
    a: int


@dataclasses.dataclass
class Mixed:
    models: list[Model]
    by_name: dict[str, Frozen]
    message: wrappers_pb2.StringValue
    point: Point


class Typed(TypedDict, total=False):
    id: typing.Required[int]
    line: Line
    colour: typing.NotRequired[Colour]


UserId = NewType("UserId", uuid.UUID)
NOON = dt.datetime(2024, 6, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=2)))


def counted() -> Counted:
    made = Counted(1)
    made.n = 7
    assert made.tripled == 21
    return made


def upper() -> Upper:
    made = Upper(name="a")
    made._seen = 5
    return made


def message() -> struct_pb2.Struct:
    made = struct_pb2.Struct()
    made.update({"a": [1, {"b": None}]})
    return made


TYPED: list[tuple[Any, Any]] = [
    (Order, Order(uuid.UUID(int=1), NOON, [Line("a", Decimal("1.50"))], Colour.GREEN, {"any": (1, b"x")})),
    (Order | None, None),
    (Frozen, Frozen(1, (2, 3))),
    (Frozen, Frozen(2**80, (2, 3))),
    (Page[Line], Page[Line]([Line("a", Decimal(1))])),
    (Page[Line], Page([Line("\ud800", Decimal(1))])),
    (Empty, Empty()),
    (Tree, Tree(Tree(), Tree(Tree()))),
    (Point, Point(1, 2.5)),
    (list[Point], [Point(1)]),
    (Struct, Struct(1, b"x")),
    (Struct, Struct(2**70)),
    (Wide, Wide(1)),
    (Normal, Normal(" a ")),
    (Model, Model(a=1)),
    (Model, Model(a=1, b=Decimal("1.50"), child=Struct(1))),
    (list[Model], [Model(a=1), Model(a=2, b=None)]),
    (Open, Open(a=1, more=(1, 2))),  # type: ignore[call-arg]  # it takes fields that it does not declare
    (Open, Open()),
    (Unset, Unset(a=1)),
    (Root, Root([1, 2])),
    (Linked, Linked(url="https://a.example/x")),  # type: ignore[arg-type]  # pydantic converts text
    (Linked, Linked(url="https://a.example/x", anything={1, 2})),  # type: ignore[arg-type]  # pydantic converts text
    (Boxed[Line], Boxed[Line](item=Line("a", Decimal(1)))),
    (PydanticData, PydanticData(a=1)),
    (
        Mixed,
        Mixed([Model(a=1)], {"k": Frozen(1)}, wrappers_pb2.StringValue(value="é"), Point(1)),
    ),
    (Typed, {"id": 1, "line": Line("a", Decimal(1)), "colour": Colour.RED}),
    (Colour, Colour.RED),
    (Word, Word.A),
    (Access, Access.READ | Access.WRITE),
    (Access, Access.READ | Access.FAR),
    (dict[Colour, int], {Colour.RED: 1}),
    (Literal[Colour.RED], Colour.RED),
    (set[Frozen], {Frozen(1), Frozen(2)}),
    (bytes, b"x"),
    (dt.datetime, NOON),
    (UserId, uuid.UUID(int=1)),
    (Decimal, Decimal("1.0")),
    (type(None), None),
    (Optional[Line], Line("a", Decimal(1))),  # noqa: UP045 - the old spelling must work
    (Union[int, Struct], Struct(1)),  # noqa: UP007 - the old spelling must work
    (int | Line | Struct, Line("a", Decimal(1))),
    (list[dict[str, tuple[Line, ...]]], [{"a": (Line("a", Decimal(1)),)}]),
    (typing.Annotated[Line, []], Line("a", Decimal(1))),
    (Mapping[str, Sequence[Line]], {"a": [Line("a", Decimal(1))]}),
    (struct_pb2.Struct, message()),
    (Any, (1, 2)),
    (object, (1, 2)),
]


@pytest.mark.parametrize("result_type, value", TYPED, ids=label)
def test_R2_a_typed_value_comes_back_equal_and_of_the_same_type(result_type: Any, value: Any) -> None:
    check_encodable(result_type)
    back = round_trip(value, result_type)
    assert back == value
    assert exactly(back, value)
    assert back is not value or isinstance(value, enum.Enum | bytes | None)


MISMATCHED: list[tuple[Any, Any]] = [
    (int, "text"),
    (float, 1),
    (int, True),
    (list[int], (1, 2)),
    (str, None),
    (Line, {"sku": "a"}),
    (Line, Line(7, [1.0])),  # type: ignore[arg-type]  # wrong on purpose
    (Frozen, Frozen(1.0, [1])),  # type: ignore[arg-type]  # wrong on purpose
    (Struct, Struct("text")),  # type: ignore[arg-type]  # wrong on purpose
    (Point, Point("a", 1)),  # type: ignore[arg-type]  # wrong on purpose
    (Model, Model.model_construct(a="text", b=1.5, child=(1, 2))),
]


@pytest.mark.parametrize("result_type, value", MISMATCHED, ids=label)
def test_R23_a_value_that_is_not_what_its_annotation_says_is_stored_as_it_is(
    result_type: Any, value: Any
) -> None:
    back = round_trip(value, result_type)
    assert exactly(back, value)


def test_R2_neither_init_nor_validators_run_on_replay() -> None:
    value = counted()
    back = round_trip(value, Counted)
    assert (back.n, back.doubled, back.note) == (7, 4, "an attribute that is no field")
    assert "tripled" not in vars(back)
    shouted = round_trip(upper(), Upper)
    assert (shouted.name, shouted._seen) == ("a!", 5)
    assert shouted == upper()


def test_R2_a_model_keeps_which_of_its_fields_were_set() -> None:
    assert round_trip(Model(a=1), Model).model_fields_set == {"a"}
    assert round_trip(Model(a=1, b=None, child=None), Model).model_fields_set == {"a", "b", "child"}
    assert round_trip(Open(z=1), Open).model_extra == {"z": 1}  # type: ignore[call-arg]  # it takes fields that it does not declare
    assert round_trip(Open(), Open).model_extra == {}
    again = round_trip(Upper(name="x"), Upper)
    assert again._seen == 0


def test_R2_cached_properties_of_a_model_are_left_out() -> None:
    model = Model(a=4)
    assert model.doubled == 8
    back = round_trip(model, Model)
    assert back == model
    assert "doubled" not in vars(back)


class Foreign:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


@dataclasses.dataclass
class Sub(Line):
    pass


@dataclasses.dataclass
class Mapped:
    __mapper__ = "as SQLAlchemy leaves it on mapped classes"
    a: int = 0


@dataclasses.dataclass
class DictLike(dict):
    a: int = 0


class HasSlot:
    __slots__ = "hidden"  # noqa: PLC0205 - one name, which __slots__ allows


@dataclasses.dataclass(slots=True)
class Slotted(HasSlot):
    a: int = 0


class Loose(Point):
    pass


def with_attribute(value: Any, more: Any = 1) -> Any:
    value.more = more
    return value


def half_built() -> Counted:
    made = Counted(1)
    del made.doubled
    return made


class Ghost(enum.Enum):
    A = 1

    @classmethod
    def _missing_(cls, value: object) -> Any:
        member: Any = object.__new__(cls)
        member._name_, member._value_ = "GHOST", value
        return member


TYPED_REFUSED: list[tuple[Any, Any, str]] = [
    (Line, Sub("a", Decimal(1)), r"^result is a .*\.Sub, a class that the annotation .*Line.* does not name"),
    (Line, Line("a", Foreign()), r"^result\.price is a .*\.Foreign"),  # type: ignore[arg-type]  # wrong on purpose
    (
        list[Order],
        [Order(uuid.UUID(int=1), NOON, [], extra={"x": Foreign()})],
        r"^result\[0\]\.extra\['x'\] is",
    ),
    (Line, with_attribute(Line("a", Decimal(1)), Foreign()), r"^result\.more is a .*\.Foreign"),
    (Model, Model.model_construct(a=Foreign()), r"^result\.a is a .*\.Foreign"),
    (Model, Model.model_construct(b=Decimal(1)), r"has no value in its field 'a'"),
    (Linked, Linked(url="https://a.example", anything=Word.A), r"^result\.anything is a"),  # type: ignore[arg-type]  # pydantic converts text
    (Wide, with_attribute(Wide(1)), "attributes that are no fields of .*Wide: more"),
    (Loose, with_attribute(Loose(1)), "attributes that are no fields of .*Loose: more"),
    (Growing, Growing(1), "that its own __post_init__ would change on replay"),
    (Counted, half_built(), "has no value in its field 'doubled'"),
    (Ghost, Ghost(7), "not one of its members"),
    (Slotted, Slotted(), "cannot be stored so that"),
    (Mapped, Mapped(), "cannot be stored so that"),
    (DictLike, DictLike(), "cannot be stored so that"),
]


@pytest.mark.parametrize("result_type, value, says", TYPED_REFUSED, ids=label)
def test_R23_an_instance_that_would_not_come_back_is_refused(result_type: Any, value: Any, says: str) -> None:
    with pytest.raises(CodecError, match=says):
        encoder_for(result_type).encode(value)


def test_a_struct_whose_post_init_keeps_its_fields_passes_with_nan() -> None:
    @dataclasses.dataclass
    class Unused:
        pass

    class Checked(msgspec.Struct):
        n: float
        parts: list[Any]

        def __post_init__(self) -> None:
            self.parts = self.parts

    value = Checked(math.nan, [{"a": (1, Colour.RED)}])
    back = round_trip(value, Union[Checked, Colour])  # noqa: UP007 - the old spelling must work
    assert exactly(back, value)
    assert not exactly(back, Checked(1.0, value.parts))
    assert not exactly(back, Checked(math.nan, [{"b": (1, Colour.RED)}]))
    assert not exactly(back, Checked(math.nan, []))
    assert not exactly(back, Unused())


class Loud:
    def __init__(self) -> None:
        self.a = 1


class Exploding(msgspec.Struct):
    a: int = 0

    def __post_init__(self) -> None:
        if self.a > 1:
            raise RuntimeError("boom")


def test_an_error_in_the_value_s_own_code_is_a_codec_error() -> None:
    value = Exploding(1)
    value.a = 2
    with pytest.raises(CodecError, match="the result cannot be stored: RuntimeError: boom"):
        encoder_for(Exploding).encode(value)


def test_a_codec_is_made_once_per_type() -> None:
    assert encoder_for(Line) is encoder_for(Line)
    assert encoder_for(None) is encoder_for(Any) is encoder_for(object) is encoder_for()
    assert encoder_for(Line).typed
    assert not encoder_for(Any).typed
    assert repr(encoder_for(int)) == "Codec(<class 'int'>)"


# ---------------------------------------------------------------------- classes that change and collide


def make_order(*fields: Any, **options: Any) -> type:
    return dataclasses.make_dataclass("Order", fields, **options)


@pytest.mark.parametrize("options", [{}, {"slots": True}, {"frozen": True}])
def test_R15_a_class_may_gain_fields_with_a_default_and_lose_fields(options: dict[str, Any]) -> None:
    old = make_order(("a", int), ("gone", int), **options)
    data = encoder_for(old).encode(old(1, 2))
    new = make_order(
        ("a", int),
        ("b", int, dataclasses.field(default=5)),
        ("c", list, dataclasses.field(default_factory=list)),
        **options,
    )
    back = encoder_for(new).decode(data)
    assert back == new(1, 5, [])
    assert not hasattr(back, "gone")
    required = make_order(("a", int), ("b", int), **options)
    with pytest.raises(CodecError, match=r"unreadable: .*field 'b' without default"):
        encoder_for(required).decode(data)


class WithDict:
    """A base without slots: its subclasses have a `__dict__` beside theirs."""


@pytest.mark.parametrize("bases", [(), (WithDict,)])
@pytest.mark.parametrize("options", [{}, {"slots": True}, {"frozen": True}])
def test_R15_attributes_that_are_no_fields_stay_where_a_field_is_removed(
    options: dict[str, Any], bases: tuple[type, ...]
) -> None:
    old = make_order(("a", int), ("gone", int), bases=bases, **options)
    value = old(1, 2)
    loose = hasattr(value, "__dict__")
    if loose:
        object.__setattr__(value, "note", "kept")
        object.__setattr__(value, "later", "a field")
    codec = encoder_for(old)
    assert exactly(codec.decode(codec.encode(value)), value)
    new = make_order(("a", int), ("later", str, ""), bases=bases, **options)
    back = encoder_for(new).decode(codec.encode(value))
    assert not hasattr(back, "gone")
    if loose:
        assert (back.note, back.later) == ("kept", "a field")
    assert exactly(round_trip(back, new), back)


def test_R15_an_attribute_of_a_name_that_is_taken_is_refused() -> None:
    value = Line("a", Decimal(1))
    vars(value)["!more"] = 1
    with pytest.raises(CodecError, match="has an attribute '!more', a name that is taken"):
        encoder_for(Line).encode(value)


def test_R15_structs_named_tuples_and_models_change_likewise() -> None:
    old_struct = msgspec.defstruct("S", [("a", int), ("gone", int)])
    new_struct = msgspec.defstruct("S", [("a", int), ("b", int, 5)])
    data = encoder_for(old_struct).encode(old_struct(1, 2))
    assert encoder_for(new_struct).decode(data) == new_struct(1, 5)
    with pytest.raises(CodecError, match="unreadable: TypeError"):
        encoder_for(msgspec.defstruct("S", [("z", int)])).decode(data)

    make_tuple: Any = collections.namedtuple  # noqa: PYI024 - the old factory must work
    old_tuple, new_tuple = make_tuple("P", "a gone"), make_tuple("P", "a b", defaults=[5])
    data = encoder_for(old_tuple).encode(old_tuple(1, 2))
    assert encoder_for(new_tuple).decode(data) == (1, 5)
    with pytest.raises(CodecError, match="field 'z' without default"):
        encoder_for(make_tuple("P", "a z")).decode(data)

    old_model = pydantic.create_model("M", a=(int, ...), gone=(int, 0))
    new_model = pydantic.create_model("M", a=(int, ...), b=(int, 5))
    data = encoder_for(old_model).encode(old_model(a=1, gone=2))
    assert encoder_for(new_model).decode(data).model_dump() == {"a": 1, "b": 5}
    with pytest.raises(CodecError, match="field 'z' without default"):
        encoder_for(pydantic.create_model("M", z=(int, ...))).decode(data)


def test_R15_a_class_that_the_reader_does_not_name_is_unreadable_and_says_so() -> None:
    data = encoder_for(Line).encode(Line("a", Decimal(1)))
    with pytest.raises(CodecError, match="unreadable: it holds a Line, a class that no annotation"):
        untyped.decode(data)
    with pytest.raises(CodecError, match=r"a class that the annotation .*Struct.* does not name: annotate"):
        encoder_for(Struct).decode(data)
    make_enum: Any = enum.Enum
    bluer = make_enum("Colour", "BLUE")
    with pytest.raises(
        CodecError, match=r"unreadable: .*Colour has no member BLUE: it was renamed or removed; put"
    ):
        encoder_for(Colour).decode(encoder_for(bluer).encode(bluer.BLUE))


def test_R23_a_class_that_is_not_annotated_is_refused_in_a_whole_sentence() -> None:
    class Paid(pydantic.BaseModel):
        cents: int

    with pytest.raises(CodecError) as refused:
        untyped.encode(Paid(cents=1))
    remedy = "annotate the function's return type with it, or pass result_type="
    assert str(refused.value).endswith(f".Paid, a class that no annotation names: {remedy}")


def test_two_classes_of_one_name_are_told_apart() -> None:
    first, second = make_order(("a", int)), make_order(("a", int))
    first.__module__, second.__module__ = "one", "two"
    codec = encoder_for(Union[first, second])  # noqa: UP007 - the old spelling must work
    for value in (first(1), second(1)):
        assert type(codec.decode(codec.encode(value))) is type(value)


def test_R23_a_preview_needs_no_classes() -> None:
    value = {"order": Line("a", Decimal(1)), "by": {Colour.RED: (1, 2)}}
    data = encoder_for(dict[str, Line | Colour]).encode(value)
    assert preview(data) == {
        "order": {"!class": "Line", "!state": {"sku": "a", "price": Decimal(1)}},
        "by": {"Colour.RED": (1, 2)},
    }


# ------------------------------------------------------------------------------------------- the format


def test_R15_the_stored_format_does_not_change_between_versions() -> None:
    assert untyped.encode({"a": 1}).hex() == "1081a16101"
    assert untyped.encode((1, 2)).hex() == "10c70301920102"
    assert untyped.encode(2**64).hex() == "10c70905010000000000000000"
    assert encoder_for(Frozen).encode(Frozen(1)).hex() == ("10c7110f92a646726f7a656e82a16101a162d40190")


@given(st.binary(max_size=40))
def test_R15_arbitrary_bytes_are_read_or_refused_never_something_else(data: bytes) -> None:
    for codec in (untyped, encoder_for(Mixed)):
        with contextlib.suppress(CodecError):
            codec.decode(data)
        with contextlib.suppress(CodecError):
            codec.decode(b"\x10" + data)
        with contextlib.suppress(CodecError):
            codec.decode(b"\x11" + zlib.compress(data))


@pytest.mark.parametrize(
    "data, says",
    [
        (b"", r"unreadable: its format is 0x\(empty\)"),
        (b"\x20\x01", "unreadable: its format is 0x20, this version of semel reads 0x10 and 0x11"),
        (b"\x00\x01", "unreadable: its format is 0x00"),
        (b"\x10", "unreadable: DecodeError"),
        (b"\x10\x01\x01", "unreadable: DecodeError"),
        (b"\x10\xc7\x00\x7f", "unreadable: it has a part of kind 127"),
        (b"\x10\xc7\x01\x0b\x00", "unreadable: ValueError"),
        (b"\x10" + b"\x91" * 100_000, "unreadable: RecursionError"),
        (b"\x11not zlib", "unreadable: error"),
        (b"\x10\xc7\x02\x02\x91\x90", "unreadable: TypeError"),
    ],
)
def test_R15_damaged_and_unknown_data_is_unreadable(data: bytes, says: str) -> None:
    with pytest.raises(CodecError, match=says):
        untyped.decode(data)
    with pytest.raises(CodecError, match=says):
        preview(memoryview(data))


def test_R15_a_time_in_a_zone_whose_rules_changed_is_unreadable_not_shifted() -> None:
    data = untyped.encode(dt.datetime(2024, 7, 1, 12, tzinfo=ZoneInfo("Europe/Rome")))
    changed = data.replace(b"+02:00", b"+03:00")
    assert changed != data
    with pytest.raises(CodecError, match="the rules of time zone Europe/Rome have changed"):
        untyped.decode(changed)


def test_results_are_compressed_only_above_the_threshold_and_only_when_it_helps() -> None:
    value = "x" * 5000
    plain, small = untyped.encode(value), untyped.encode(value, compress_over=2048)
    assert plain == untyped.encode(value, compress_over=10_000)
    assert len(small) < 100 < len(plain)
    assert (
        untyped.decode(small)
        == untyped.decode(memoryview(small))
        == untyped.decode(bytearray(plain))
        == value
    )
    noise = uuid.uuid5(uuid.NAMESPACE_URL, "x").bytes
    assert untyped.encode(noise, compress_over=0) == untyped.encode(noise)


def test_R15_what_would_fill_the_memory_is_unreadable_and_was_never_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("semel.codec.INFLATED_LIMIT", 10_000)
    room = 10_000 - len(untyped.encode(b"x" * 9_000)[1:]) + 9_000
    small = untyped.encode(b"x" * room, compress_over=0)
    assert len(small) < 200
    assert untyped.decode(small) == b"x" * room
    larger = untyped.encode(b"x" * (room + 1), compress_over=0)
    assert len(larger) > room
    assert untyped.decode(larger) == b"x" * (room + 1)
    with pytest.raises(CodecError, match="larger than 10000 bytes, which semel never writes"):
        untyped.decode(b"\x11" + zlib.compress(larger[1:]))
    with pytest.raises(CodecError, match="its end is missing"):
        untyped.decode(small[:-4])


# -------------------------------------------------------------------------------------- what types tell


class Abstract(Protocol):
    def run(self) -> int: ...


class Plain:
    pass


@dataclasses.dataclass
class Holding:
    name: str
    connection: socket.socket


@dataclasses.dataclass
class MaybeHolding:
    connection: socket.socket | None = None


Alias = TypeAliasType("Alias", list[Line])
AliasBad = TypeAliasType("AliasBad", list[Plain])
Bound = TypeVar("Bound", bound=Line)
BoundBad = TypeVar("BoundBad", bound=Plain)
Choice = TypeVar("Choice", Line, Struct)

NEVER = [
    (socket.socket, "the annotated result is a socket.socket, which cannot be stored"),
    (io.BytesIO, "BytesIO"),
    (typing.IO, "IO"),
    (Iterator[int], "Iterator"),
    (typing.Generator[int, None, None], "Generator"),
    (AsyncIterator[int], "AsyncIterator"),
    (Callable[[], int], "Callable"),
    (type[int], "is a type"),
    (Plain, "Plain"),
    (Text, "Text"),
    (collections.OrderedDict[str, int], "OrderedDict"),
    (Path, "Path"),
    (ValueError, "ValueError"),
    (socket.socket | None, "socket"),
    (Optional[Plain], "Plain"),  # noqa: UP045 - the old spelling must work
    (Plain | socket.socket, "Plain"),
    (list[Plain], r"result \(list\[0\]\) is a .*Plain"),
    (dict[str, list[Plain]], r"result \(dict\[1\]\.list\[0\]\) is a .*Plain"),
    (Holding, r"result \(connection\) is a socket.socket"),
    (list[Holding], r"result \(list\[0\]\.connection\)"),
    (AliasBad, "Plain"),
    (BoundBad, "Plain"),
    (typing.Annotated[Plain, "x"], "Plain"),
    (NewType("N", Plain), "Plain"),
    (Slotted, "Slotted"),
    (asyncio.Future, "Future"),
]


@pytest.mark.parametrize("hint, says", NEVER, ids=label)
def test_R23_an_annotation_that_can_never_be_stored_is_refused_before_the_effect(
    hint: Any, says: str
) -> None:
    with pytest.raises(CodecError, match=says) as caught:
        check_encodable(hint)
    assert "return plain data" in str(caught.value)


@pytest.mark.parametrize(
    "hint",
    [
        None, Any, object, int, str | None, Mapping[str, int], Sequence[Line], typing.Iterable[int], Number, Abstract,
        typing.Hashable, MaybeHolding, Alias, Bound, Choice, T, Page, "unresolved", typing.NoReturn, typing.Self,
        Plain | int, Literal["a", 1], tuple[int, ...], tuple[()], list, dict, Tree, Boxed[int], bytearray, complex,
        typing.LiteralString,
    ],
    ids=label,
)  # fmt: skip
def test_an_annotation_that_may_be_stored_passes(hint: Any) -> None:
    check_encodable(hint)
    encoder_for(hint)


def test_classes_behind_aliases_and_type_variables_are_known() -> None:
    line = Line("a", Decimal(1))
    for hint in (Alias, Bound, Choice, typing.Annotated[Line, "x"], NewType("N", Line)):
        assert round_trip(line, hint) == line


@dataclasses.dataclass
class HalfResolved:
    line: Line
    hidden: OnlyForCheckers  # type: ignore[name-defined]  # noqa: F821 - nobody knows it at run time


def test_a_field_whose_type_cannot_be_resolved_does_not_hide_the_others() -> None:
    check_encodable(HalfResolved)
    value = HalfResolved(Line("a", Decimal(1)), 5)
    assert round_trip(value, HalfResolved) == value


# -------------------------------------------------------------------------------------- return types


def wraps_line(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def inner(*args: Any) -> Any:
        return fn(*args)

    return inner


class Service:
    def make(self) -> Line:
        raise NotImplementedError

    async def fetch(self) -> Line | None: ...

    @classmethod
    def build(cls) -> Line:
        raise NotImplementedError

    @staticmethod
    def plain() -> Line:
        raise NotImplementedError

    def __call__(self) -> Struct:
        raise NotImplementedError


def gives_line(n: OnlyForCheckers) -> Line:  # type: ignore[name-defined]  # noqa: F821 - nobody knows it at run time
    raise NotImplementedError


def gives_none() -> None: ...


def gives_nothing_known() -> OnlyForCheckers: ...  # type: ignore[name-defined]  # noqa: F821 - nobody knows it at run time


def gives_any() -> Any: ...


def gives_awaitable() -> Awaitable[Line]:
    raise NotImplementedError


def gives_awaitable_any() -> Awaitable[Any]:
    raise NotImplementedError


def gives_coroutine() -> Coroutine[Any, Any, list[Line]]:
    raise NotImplementedError


def yields():  # type: ignore[no-untyped-def]  # without annotations on purpose
    yield 1


async def streams() -> AsyncIterator[int]:
    yield 1


def evaluated() -> None: ...


evaluated.__annotations__["return"] = None


RETURNS: list[tuple[Any, Any]] = [
    (gives_line, Line),
    (functools.partial(gives_line, 1), Line),
    (functools.partial(functools.partial(gives_line), 1), Line),
    (wraps_line(gives_line), Line),
    (Service().make, Line),
    (Service.make, Line),
    (Service().fetch, Line | None),
    (Service.build, Line),
    (Service().plain, Line),
    (Service(), Struct),
    (functools.partial(Service().make), Line),
    (functools.lru_cache(gives_line), Line),
    (Line, Line),
    (gives_none, type(None)),
    (evaluated, type(None)),
    (gives_awaitable, Line),
    (gives_coroutine, list[Line]),
    (gives_awaitable_any, None),
    (gives_nothing_known, Unresolved("OnlyForCheckers")),
    (gives_any, None),
    (lambda: 1, None),
    (len, None),
    ("text".upper, None),
]


@pytest.mark.parametrize("fn, expected", RETURNS, ids=label)
def test_the_return_type_of_a_function_is_found_through_its_wrappers(fn: Any, expected: Any) -> None:
    for _ in range(2):  # the second answer is kept
        assert return_type(fn) == expected


@pytest.mark.parametrize("fn", [yields, streams], ids=["yields", "streams"])
def test_R23_a_generator_function_is_refused_before_it_runs(fn: Any) -> None:
    with pytest.raises(CodecError, match="generator"):
        check_encodable(return_type(fn))


def test_a_local_class_is_found_when_the_function_uses_it() -> None:
    @dataclasses.dataclass
    class Local:
        a: int

    def make() -> Local:
        return Local(1)

    def later() -> Local:
        return Local(unset)

    assert return_type(make) is Local
    assert return_type(later) is Local
    assert round_trip(make(), return_type(make)) == Local(1)
    unset = 1


def test_what_a_closure_holds_decides_an_annotation_that_names_it_and_no_other() -> None:
    def made(kind: Any, number: int) -> Any:
        def make() -> kind:
            return kind(number)

        def plain() -> Line:
            return Line("a", Decimal(number))

        return make, plain

    pairs = [made(Line, 1), made(Struct, 2)]
    assert [return_type(make) for make, _ in pairs] == [Line, Struct]
    kept = sys.modules["semel.codec.annotations"]
    kept._known.clear()
    assert [return_type(plain) for _, plain in pairs] == [Line, Line]
    assert len(kept._known) == 1, "evaluated once"


def test_an_annotation_that_stays_text_counts_as_none() -> None:
    class Compiled:  # a callable that is no Python function
        __annotations__ = {"return": "Line"}
        __call__ = len

    assert return_type(Compiled()) is None


def test_the_cache_of_return_types_is_bounded_and_minds_the_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = sys.modules["semel.codec.annotations"]
    kept._known.clear()
    monkeypatch.setattr(kept, "_MAX_CACHED", 2)
    for fn in (gives_line, gives_none, gives_any, gives_awaitable):
        return_type(fn)
    assert len(kept._known) <= 2
    other = types.FunctionType(gives_line.__code__, {"Line": Struct})
    other.__annotations__ = {"return": "Line"}
    assert return_type(gives_line) is Line
    assert return_type(other) is Struct


def test_a_codec_can_be_shared_between_threads() -> None:
    codec = Codec(list[Line])
    value = [Line("a", Decimal(n)) for n in range(50)]

    async def many() -> list[Any]:
        return await asyncio.gather(
            *(asyncio.to_thread(lambda: codec.decode(codec.encode(value))) for _ in range(50))
        )

    assert all(back == value for back in asyncio.run(many()))
