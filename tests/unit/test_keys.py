"""Scopes, readable forms, fingerprints, downstream keys and field paths."""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import enum
import hashlib
import hmac
import ipaddress
import json
import math
import unicodedata
import uuid
from collections import OrderedDict, UserDict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2, wrappers_pb2
from hypothesis import example, given
from hypothesis import strategies as st

from semel import keys
from semel.canonical import MAX_BYTES, canonical
from semel.errors import CodecError, ConfigurationError, InvalidKey
from semel.keys import (
    FINGERPRINT_VERSION,
    Scope,
    SecretRing,
    check_fingerprint,
    check_key,
    check_operation,
    check_tenant,
    downstream_key,
    field_path,
    fingerprint,
    make_scope,
    mask,
    scope_hash,
)

NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=255)
FOUR = st.tuples(NAMES, NAMES, NAMES, NAMES)


# --------------------------------------------------------------------------------------------- scopes


@given(FOUR, FOUR)
def test_R21_two_scopes_share_a_hash_only_when_all_their_parts_are_equal(a: Any, b: Any) -> None:
    assert (scope_hash(*a) == scope_hash(*b)) == (a == b)


def test_R21_moving_a_border_between_parts_gives_another_scope() -> None:
    hashes = {
        scope_hash("p", "ab", "c", "d"),
        scope_hash("p", "a", "bc", "d"),
        scope_hash("p", "a", "b", "cd"),
    }
    assert len(hashes) == 3


def test_the_scope_hash_does_not_change_between_versions() -> None:
    parts = b"".join(len(p).to_bytes(4, "big") + p for p in (b"semel", b"acme", b"orders", b"k-1"))
    assert scope_hash("semel", "acme", "orders", "k-1") == hashlib.sha256(b"semel/scope/1\0" + parts).digest()


@given(FOUR)
def test_make_scope_hashes_as_scope_hash_does_and_keeps_the_readable_parts(four: Any) -> None:
    for _ in range(2):  # the second one comes from the cached head
        scope = make_scope(*four)
        assert scope == Scope(scope_hash(*four), four[1], four[2], four[3])
        assert scope.hex == scope.hash.hex()
        assert len(scope.hash) == 32


def test_scopes_can_be_keys_of_a_dict() -> None:
    one, same = make_scope("p", "t", "o", "k"), make_scope("p", "t", "o", "k")
    assert {one: 1}[same] == 1
    assert one != make_scope("p", "t", "o", "K")


def test_R21_readable_decides_what_of_the_key_is_kept() -> None:
    key = "0191f7a2-7c2e-7b3a-9d5f-1234567890ab"
    full, masked, none = (
        make_scope("p", "t", "o", key, "full"),
        make_scope("p", "t", "o", key, "masked"),
        make_scope("p", "t", "o", key, "none"),
    )
    assert (full.key, masked.key, none.key) == (key, "0191…90ab", "")
    assert full.hash == masked.hash == none.hash
    with pytest.raises(ConfigurationError, match='"full", "masked" or "none"'):
        make_scope("p", "t", "o", key, "some")  # type: ignore[arg-type]  # wrong on purpose


@given(NAMES)
def test_a_mask_shows_at_most_a_third_of_the_key(key: str) -> None:
    shown = mask(key).replace("…", "") if "…" not in key else ""
    assert len(shown) <= len(key) / 3
    assert len(mask(key)) <= 9


def test_R21_the_repr_of_a_scope_does_not_tell_the_key() -> None:
    scope = make_scope("p", "acme", "orders.create", "customer-4711-secret-token")
    assert "4711" not in repr(scope)
    assert repr(scope).startswith("<Scope acme/orders.create/cust…oken ")


def test_the_cache_of_heads_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_MAX_HEADS", 8)
    keys._heads.clear()
    scopes = [make_scope("p", f"tenant-{n}", "o", "k") for n in range(30)]
    assert len(keys._heads) <= 8
    assert len({scope.hash for scope in scopes}) == 30


BAD_NAMES = [
    ("", "is empty"),
    ("k" * 256, "has 256 characters, 255 is the most"),
    ("ab\ncd", r"a control character \(U\+000A\) at position 2"),
    ("\x00", r"a control character \(U\+0000\) at position 0"),
    ("abc\x7f", r"a control character \(U\+007F\) at position 3"),
    ("a\x85b", r"a control character \(U\+0085\) at position 1"),
    ("a\ud800b", r"a lone surrogate \(U\+D800\) at position 1"),
    ("zero\u200bwidth", r"cannot be printed \(U\+200B\) at position 4"),
    ("line\u2028break", r"cannot be printed \(U\+2028\) at position 4"),
    (None, "must be a str, not NoneType: pass the text"),
    (b"key", "must be a str, not bytes"),
    (7, "must be a str, not int"),
    (uuid.UUID(int=1), "must be a str, not UUID: pass its text form"),
    (["k"], "must be a str, not list"),
]


@pytest.mark.parametrize("text, says", BAD_NAMES)
@pytest.mark.parametrize("part", ["key", "tenant", "operation", "prefix"])
def test_R21_a_bad_name_is_invalid_and_the_message_says_which_and_where(
    part: str, text: Any, says: str
) -> None:
    four = {"prefix": "p", "tenant": "t", "operation": "o", "key": "k", part: text}
    with pytest.raises(InvalidKey, match=f"^{part} .*{says}"):
        make_scope(**four)


@pytest.mark.parametrize(
    "check, part", [(check_key, "key"), (check_tenant, "tenant"), (check_operation, "operation")]
)
def test_R21_the_checks_return_good_names_and_name_the_bad_part(check: Any, part: str) -> None:
    assert check("Ünïcode 日本 OK") == "Ünïcode 日本 OK"
    assert check("k" * 255) == "k" * 255
    with pytest.raises(InvalidKey, match=f"^{part} is empty"):
        check("")


@given(st.text(max_size=300))
def test_R21_a_key_is_accepted_exactly_when_it_is_1_to_255_printable_characters(key: str) -> None:
    hidden = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}
    printable = all(c == " " or unicodedata.category(c) not in hidden for c in key)
    if printable and 1 <= len(key) <= 255:
        assert check_key(key) == key
    else:
        with pytest.raises(InvalidKey) as caught:
            check_key(key)
        assert len(key) < 8 or key not in str(caught.value)


class Colour(enum.StrEnum):
    RED = "red"


class OldStyle(str, enum.Enum):  # noqa: UP042 - its str() is "OldStyle.RED", unlike StrEnum's
    RED = "red"


@pytest.mark.parametrize("name", [Colour.RED, OldStyle.RED])
def test_a_subclass_of_str_counts_as_its_text(name: str) -> None:
    scope = make_scope("p", name, name, name)
    assert scope == make_scope("p", "red", "red", "red")
    assert {type(scope.tenant), type(scope.operation), type(scope.key)} == {str}


# --------------------------------------------------------------------------------------- fingerprints


@dataclasses.dataclass
class Order:
    item: str
    amount: int
    seen_at: float = dataclasses.field(default=0.0, compare=False)


class StructOrder(msgspec.Struct):
    item: str
    amount: int
    note: str | msgspec.UnsetType = msgspec.UNSET


class Cat(msgspec.Struct, tag=True):
    name: str


class Dog(msgspec.Struct, tag_field="kind", tag="dog"):
    name: str


class ModelOrder(pydantic.BaseModel):
    item: str
    amount: int


class OpenModel(pydantic.BaseModel, extra="allow"):
    a: int = 1


class Secretive(pydantic.BaseModel):
    token: pydantic.SecretStr
    site: pydantic.HttpUrl


class Level(enum.Enum):
    LOW = 1


class Money(int):
    pass


class Name(str):
    __slots__ = ()


class Rate(float):
    pass


LOCAL_NOON = dt.datetime(2024, 6, 1, 12)  # noqa: DTZ001 - naive on purpose
UTC_NOON = dt.datetime(2024, 6, 1, 12, tzinfo=dt.UTC)
SAME = [
    (1, 1.0),
    (0, -0.0),
    (10**21, 1e21),
    (int(1e300), 1e300),
    (1, Decimal("1.00")),
    (0.5, Decimal("0.50")),
    (Decimal("1.10"), Decimal("1.1")),
    (Decimal("0.10e-3"), Decimal("0.0001")),
    (Decimal("1E+2"), 100),
    (Decimal("-0"), 0),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ([1, 2], (1, 2)),
    ([1, 2], deque([1, 2])),
    ({1, 2, 3}, frozenset({3, 2, 1})),
    ({1: "a", 2: "b"}, {2: "b", 1.0: "a"}),
    ({"a": 1}, OrderedDict(a=1)),
    ({"a": 1}, UserDict({"a": 1})),
    ({"red": 1}, {Colour.RED: 1}),
    ("red", Colour.RED),
    (1, Level.LOW),
    (7, Money(7)),
    ("red", Name("red")),
    ({"red": 1}, {Name("red"): 1}),
    (0.1, Rate(0.1)),
    (b"abc", bytearray(b"abc")),
    (b"abc", memoryview(b"abc")),
    ({"item": "x", "amount": 1}, Order("x", 1)),
    (Order("x", 1, seen_at=1.5), Order("x", 1, seen_at=2.5)),
    ({"item": "x", "amount": 1}, StructOrder("x", 1)),
    ({"item": "x", "amount": 1}, ModelOrder(item="x", amount=1)),
    ({"a": 1, "b": [2]}, OpenModel(b=[2])),  # type: ignore[call-arg]  # it takes fields that it does not declare
    ({"type": "Cat", "name": "Tom"}, Cat("Tom")),
    ({"kind": "dog", "name": "Tom"}, Dog("Tom")),
    (UTC_NOON, UTC_NOON.astimezone(ZoneInfo("Europe/Rome"))),
    (UTC_NOON, UTC_NOON.astimezone(dt.timezone(dt.timedelta(hours=-5)))),
    (dt.timedelta(days=1), dt.timedelta(hours=24)),
    (wrappers_pb2.StringValue(value="a"), wrappers_pb2.StringValue(value="a")),
]


@pytest.mark.parametrize("a, b", SAME)
def test_R22_values_that_say_the_same_have_the_same_fingerprint(a: Any, b: Any) -> None:
    assert fingerprint(a) == fingerprint(b)
    assert fingerprint({"nested": [a]}) == fingerprint({"nested": [b]})


def message(**values: Any) -> struct_pb2.Struct:
    made = struct_pb2.Struct()
    made.update(values)
    return made


DIFFERENT: list[Any] = [
    None, False, True, 0, 1, -1, 2**53, 2**53 + 1, 2**64, 10**30, 0.1, 1e-7, 1.5e-7, 1e-5, 1.25e-5, -1.25e-5, 5e-324,
    Decimal("0.1"), Decimal("0.2"), Decimal("-0.1"), Decimal("0.01"), Decimal(10) ** 40 + Decimal("0.5"),
    "", "1", "true", "null", "0.1", b"", b"1", b"true",
    [], {}, set(), [[]], [{}], {"": None}, {"a": None}, {"a": None, "b": None}, [None], [None, None],
    {"1": 1}, {1: 1}, {None: 1}, {b"1": 1}, {(1, 2): 1}, {"a": {"b": 1}}, {"a.b": 1}, {1}, {"1"}, [1], [1, 2], [2, 1],
    '!bytes"1"', {"!bytes": "1"}, {"!set": [1]},
    LOCAL_NOON, UTC_NOON, dt.date(2024, 6, 1), dt.time(12), dt.timedelta(hours=12),
    dt.timedelta(microseconds=1), "2024-06-01", UTC_NOON.isoformat(),
    uuid.UUID(int=1), str(uuid.UUID(int=1)), uuid.UUID(int=1).bytes,
    ipaddress.ip_address("10.0.0.1"), "10.0.0.1", PurePosixPath("a/b"), "a/b", Fraction(1, 3), "1/3",
    message(a=1), message(a=2), wrappers_pb2.StringValue(value="a"), wrappers_pb2.BytesValue(value=b"a"),
    Secretive(token="a", site="https://a.example"),  # type: ignore[arg-type]  # pydantic converts text
    Secretive(token="b", site="https://a.example"),  # type: ignore[arg-type]  # pydantic converts text
    Secretive(token="b", site="https://b.example"),  # type: ignore[arg-type]  # pydantic converts text
    Order("x", 1), Order("x", 2), StructOrder("x", 1, "note"), Cat("Tom"), Dog("Tom"),
]  # fmt: skip


def test_R22_values_that_differ_have_different_fingerprints() -> None:
    seen: dict[str, Any] = {}
    for value in DIFFERENT:
        made = fingerprint(value)
        assert made not in seen, (value, seen[made])
        seen[made] = value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def rfc8785(value: Any) -> str:
    """A second, slower writing of the same rules, to compare with."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{rfc8785(k)}:{rfc8785(value[k])}" for k in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(rfc8785, value)) + "]"
    if isinstance(value, float):
        if value == int(value):
            return str(int(value))
        digits = Decimal(repr(value))
        if abs(digits) >= Decimal("1e-6"):
            return f"{digits:f}"
        sign, figures, exponent = digits.as_tuple()
        text = "".join(map(str, figures))
        point = f".{text[1:]}" if len(text) > 1 else ""
        return f"{'-' * sign}{text[0]}{point}e{int(exponent) + len(text) - 1}"
    return json.dumps(value, ensure_ascii=False)


@given(JSON)
@example([1e-7, 1.5e-7, 1e-6, 1e-5, 1.25e-5, -1.25e-5, 123456.789, 1e21, -0.0, 5e-324])
@example({"\ufb33": 1, "\U0001f600": 2, '\x01\b\f\n\r\t\x1f\x7f\u2028/"\\': "é"})
def test_R22_json_is_canonical_as_rfc8785_says_with_exact_integers(value: Any) -> None:
    if "\\ud" in json.dumps(value, ensure_ascii=True) and not _is_unicode(value):
        with pytest.raises(CodecError, match="surrogate"):
            canonical(value)
    else:
        assert canonical(value).decode() == rfc8785(value)
        assert fingerprint(value) == hashlib.sha256(rfc8785(value).encode()).hexdigest()


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@given(JSON)
def test_R22_a_fingerprint_is_64_lower_case_hex_digits_and_stable(value: Any) -> None:
    if _is_unicode(value):
        made = fingerprint(value)
        assert made == fingerprint(json.loads(json.dumps(value)))
        assert check_fingerprint(made.upper()) == made


def test_R22_fingerprints_do_not_change_between_versions() -> None:
    assert FINGERPRINT_VERSION == 1
    request = {
        "amount": 12.5, "n": 2**70, "at": UTC_NOON, "tags": {"b", "a"}, "raw": b"x", "price": Decimal("0.10"),
        "by": {1: None}, "id": uuid.UUID(int=7), "for": dt.timedelta(seconds=1),
    }  # fmt: skip
    assert canonical(request) == (
        b'{"amount":12.5,"at":!instant"2024-06-01T12:00:00+00:00","by":!map{1:null},"for":!duration"1000000",'
        b'"id":!uuid"00000000000000000000000000000007","n":1180591620717411303424,"price":!decimal"1e-1",'
        b'"raw":!bytes"2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881","tags":!set["a","b"]}'
    )


@dataclasses.dataclass
class Holder:
    part: Any


class Alien:
    pass


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


loop: list[Any] = []
loop.append(loop)

UNFIT = [
    (math.nan, "request is nan"),
    ({"a": [1, math.inf]}, r"request\['a'\]\[1\] is inf"),
    ([-math.inf], r"request\[0\] is -inf"),
    (Decimal("NaN"), r"is Decimal\('NaN'\)"),
    (Decimal("Infinity"), "no number that can be compared"),
    (Decimal("1E+5000"), "more than 4300 digits"),
    (Decimal("1E-5000"), "more than 4300 digits"),
    (Alien(), r"request is a .*Alien, which has no canonical form"),
    (Holder(Alien()), r"request\.part is a .*Alien"),
    ({"a": Holder([1, Alien()])}, r"request\['a'\]\.part\[1\] is a"),
    ({Alien(): 1}, r"request\[<.*\] is a .*Alien"),
    ({1: Alien()}, r"request\[1\] is a .*Alien"),
    (object, "which has no canonical form"),
    ("\ud800", "request is text with a lone surrogate"),
    (["é", {"x": "\udfff"}], r"request\[1\]\['x'\] is text with a lone surrogate"),
    ({"\ud800": 0.5}, "lone surrogate"),
    ({Colour.RED: 1, "red2": 2, OldStyle.RED.value + "2": 3, Level.LOW: 4, 1.5: 2, "x": Alien()}, "Alien"),
    (nested(65), r"request\[0\].* is nested more than 64 levels deep"),
    (loop, "more than 64 levels deep, or contains itself"),
    ([0] * 100_001, "more than 100,000 parts"),
    ([0.5] * 100_001, "more than 100,000 parts"),
    ([[0] * 50_000, [0.5] * 50_000], "more than 100,000 parts"),
    ([10**5000], "no fingerprint: ValueError"),
    (dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-5))), "no fingerprint: OverflowError"),
]


@pytest.mark.parametrize("value, says", UNFIT)
def test_R22_what_has_no_canonical_form_is_a_codec_error_that_names_the_place(value: Any, says: str) -> None:
    with pytest.raises(CodecError, match=says):
        fingerprint(value)


def test_R22_the_deepest_legal_request_has_a_fingerprint() -> None:
    assert len(fingerprint(nested(64))) == 64
    assert len(fingerprint([nested(63), 0.5])) == 64


class Twin(enum.Enum):
    A = "a"


def test_R22_two_keys_that_say_the_same_are_refused_instead_of_merged() -> None:
    with pytest.raises(CodecError, match="two keys that say the same"):
        fingerprint({Twin.A: 1, "a": 2})


def test_R22_shared_parts_cannot_be_used_to_blow_a_request_up() -> None:
    value: Any = [1, 1]
    for _ in range(60):
        value = [value, value]
    with pytest.raises(CodecError, match="100,000 parts"):
        fingerprint(value)


def test_R22_a_long_refusal_is_cut() -> None:
    with pytest.raises(CodecError) as caught:
        fingerprint({"k" * 500: [loop]})
    assert len(str(caught.value)) < 300


def test_R22_an_oversized_request_is_refused_but_bytes_of_any_size_pass() -> None:
    with pytest.raises(CodecError, match="is the most: pass bytes"):
        fingerprint("x" * (MAX_BYTES + 1))
    assert len(fingerprint(b"x" * (MAX_BYTES + 1))) == 64


def test_chosen_fields_count_and_others_do_not() -> None:
    request = {"a": 1, "b": {"c": 2, "d": 3}, "trace": "x"}
    chosen = fingerprint(request, fields=("a", "b.c"))
    assert chosen == fingerprint({**request, "trace": "y", "b": {"c": 2, "d": 4}}, fields=("a", "b.c"))
    assert chosen == fingerprint(request, fields=["b.c", "a"])
    assert chosen != fingerprint({**request, "a": 2}, fields=("a", "b.c"))
    assert chosen != fingerprint(request, fields=("a",))
    assert fingerprint(Order("x", 1), fields=("item",)) == fingerprint({"item": "x"}, fields=("item",))
    assert fingerprint({"lines": [{"sku": 1}]}, fields=("lines[0].sku",)) == fingerprint({"lines[0].sku": 1})


@pytest.mark.parametrize(
    "fields, part", [(("a", "z"), "'z'"), (("b.x",), "'x'"), (("a.y",), "'y'"), (("l[3]",), "'3'")]
)
def test_a_chosen_field_that_is_absent_is_an_error(fields: tuple[str, ...], part: str) -> None:
    with pytest.raises(CodecError, match=f"has no field .*{part} is absent"):
        fingerprint({"a": 1, "b": {"c": 2}, "l": [1]}, fields=fields)


def test_R22_fields_of_a_protobuf_struct_and_of_a_map_of_numbers() -> None:
    struct = struct_pb2.Struct()
    struct.update({"a": {"b": 1}, "trace": "x"})
    assert fingerprint(struct, fields=("a.b",)) == fingerprint({"a": {"b": 1}}, fields=("a.b",))
    with pytest.raises(CodecError, match="no field 'c'"):
        fingerprint(struct, fields=("c",))
    file = descriptor_pb2.FileDescriptorProto(name="numbered.proto", syntax="proto3")
    message = file.message_type.add(name="Numbered")
    entry = message.nested_type.add(name="NamesEntry", options=descriptor_pb2.MessageOptions(map_entry=True))
    entry.field.add(name="key", number=1, type="TYPE_INT32", label="LABEL_OPTIONAL")
    entry.field.add(name="value", number=2, type="TYPE_STRING", label="LABEL_OPTIONAL")
    message.field.add(
        name="names", number=1, type="TYPE_MESSAGE", label="LABEL_REPEATED", type_name=".Numbered.NamesEntry"
    )
    made = descriptor_pool.DescriptorPool().AddSerializedFile(file.SerializeToString())
    numbered = message_factory.GetMessageClass(made.message_types_by_name["Numbered"])(names={3: "c"})
    assert fingerprint(numbered, fields=("names[3]",)) == fingerprint({"names[3]": "c"})
    with pytest.raises(CodecError, match=r"no field 'names\.c'"):
        fingerprint(numbered, fields=("names.c",))


@pytest.mark.parametrize("fields", ["amount", (), [], ("",), ("a..b",), ("[",), (3,)])
def test_malformed_fields_are_a_configuration_error(fields: Any) -> None:
    with pytest.raises(ConfigurationError, match="fields="):
        fingerprint({"a": 1}, fields=fields)


@pytest.mark.parametrize(
    "text", ["", "0" * 63, "0" * 65, "g" * 64, "0" * 63 + "\n", "٠" * 64, None, b"0" * 64]
)
def test_R22_a_supplied_fingerprint_must_be_64_hex_digits(text: Any) -> None:
    with pytest.raises(ConfigurationError, match="64 hexadecimal digits"):
        check_fingerprint(text)


# ------------------------------------------------------------------------------------ downstream keys

SECRET = b"0123456789abcdef"
OTHER = b"fedcba9876543210"


@given(FOUR, FOUR, st.sampled_from([None, SECRET, OTHER]), st.sampled_from([None, SECRET, OTHER]))
def test_R24_a_downstream_key_depends_on_scope_name_and_secret_only(
    a: Any, b: Any, first: Any, second: Any
) -> None:
    one = downstream_key(*a, secret=first)
    assert one == downstream_key(*a, secret=first)
    assert len(one) <= 64
    assert set(one) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
    assert (one == downstream_key(*b, secret=second)) == ((a, first) == (b, second))


def test_R24_downstream_keys_do_not_change_between_versions() -> None:
    parts = b"".join(len(p).to_bytes(4, "big") + p for p in (b"acme", b"orders", b"k-1", b"stripe"))
    digest = hmac.digest(b"semel/no-secret", b"semel/downstream/1\0" + parts, "sha256")
    scope = ("acme", "orders", "k-1", "stripe")
    assert downstream_key(*scope) == base64.urlsafe_b64encode(digest).decode().rstrip("=")
    assert downstream_key(*scope, secret=SECRET) == downstream_key(*scope, secret=SECRET.decode())


def test_R24_the_name_of_a_downstream_key_is_checked() -> None:
    with pytest.raises(InvalidKey, match=r"^downstream name is empty"):
        downstream_key("t", "o", "k", "")


@pytest.mark.parametrize(
    "secret, says", [(b"", "empty"), ({"a": ""}, "empty"), (7, "not int"), ({"a": 7}, "not int")]
)
def test_R24_what_is_no_secret_is_refused(secret: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        SecretRing(secret)


def test_R24_a_short_secret_is_told_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    ring = SecretRing("short")
    assert "has 5 bytes" in caplog.text
    assert "short" not in caplog.text
    assert ring.current


def test_R24_an_empty_ring_or_a_bad_key_id_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="empty mapping"):
        SecretRing({})
    with pytest.raises(InvalidKey, match="secret id"):
        SecretRing({"a\n": SECRET})


def test_R24_rotation_never_changes_a_key_in_use() -> None:
    scope = ("acme", "orders", "k-1", "stripe")
    before = SecretRing({"2024": SECRET})
    after = SecretRing({"2025": OTHER, "2024": SECRET})
    assert (before.current, after.current) == ("2024", "2025")
    assert (
        before.derive("2024", *scope) == after.derive("2024", *scope) == downstream_key(*scope, secret=SECRET)
    )
    assert after.derive(after.current, *scope) == downstream_key(*scope, secret=OTHER)


def test_R24_a_bare_secret_is_found_again_after_it_moved_into_a_ring() -> None:
    scope = ("acme", "orders", "k-1", "stripe")
    bare = SecretRing(SECRET)
    ring = SecretRing({"new": OTHER, "old": SECRET.decode()})
    assert bare.current
    assert bare.derive(bare.current, *scope) == ring.derive(bare.current, *scope)
    assert SECRET.decode() not in repr(bare) + bare.current


def test_R24_a_key_claimed_without_a_secret_stays_after_one_is_introduced() -> None:
    scope = ("acme", "orders", "k-1", "stripe")
    assert SecretRing().current == ""
    assert SecretRing().derive("", *scope) == SecretRing(SECRET).derive("", *scope) == downstream_key(*scope)


def test_R24_a_secret_that_left_the_ring_is_named_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match=r"'2024'.*put it back"):
        SecretRing({"2025": OTHER}).derive("2024", "t", "o", "k", "n")


# ---------------------------------------------------------------------------------------- field paths

COMMAND = SimpleNamespace(
    request_id="r-1", lines=[{"sku": "a"}, {"sku": "b"}], by={"x.y": 1, 7: "seven"}, point=(3, 4), name="text"
)


@pytest.mark.parametrize(
    "path, value",
    [
        ("cmd", COMMAND),
        ("cmd.request_id", "r-1"),
        ("cmd.lines[1].sku", "b"),
        ("cmd.lines.1.sku", "b"),
        ("cmd.lines[-1].sku", "b"),
        ("cmd.by['x.y']", 1),
        ('cmd.by["x.y"]', 1),
        ("cmd.by[7]", "seven"),
        ("cmd.point.0", 3),
        ("n", 5),
    ],
)
def test_R5_a_field_path_follows_attributes_keys_and_indexes(path: str, value: Any) -> None:
    assert field_path(path)({"cmd": COMMAND, "n": 5}) == value


@pytest.mark.parametrize(
    "path, says",
    [
        ("cmd.nothing", r"cmd \(a SimpleNamespace\) has no 'nothing'"),
        ("cmd.lines[2]", r"cmd.lines \(a list\) has no '2'"),
        ("cmd.lines.sku", r"cmd.lines \(a list\) has no 'sku'"),
        ("cmd.by.z", r"cmd.by \(a dict\) has no 'z'"),
        ("cmd.by.8", r"cmd.by \(a dict\) has no '8'"),
        ("cmd.name.0", r"cmd.name \(a str\) has no '0'"),
        ("cmd.lines[0].sku.x", r"cmd.lines.0.sku \(a str\) has no 'x'"),
    ],
)
def test_R5_a_part_that_is_absent_in_the_data_is_an_invalid_key(path: str, says: str) -> None:
    with pytest.raises(InvalidKey, match=says):
        field_path(path)({"cmd": COMMAND})


@pytest.mark.parametrize("arguments, names", [({"a": 1, "b": 2}, "a, b"), ({}, "none")])
def test_R5_an_argument_that_does_not_exist_is_a_configuration_error(arguments: Any, names: str) -> None:
    with pytest.raises(ConfigurationError, match=f"no argument 'cmd'; the arguments are: {names}"):
        field_path("cmd.request_id")(arguments)


@pytest.mark.parametrize("path", ["", ".", "a.", ".a", "a..b", "a[", "a[]", "a[x]", "a]b", "a[0", None, 3])
def test_R5_a_malformed_path_is_refused_when_it_is_made(path: Any) -> None:
    with pytest.raises(ConfigurationError, match="field path"):
        field_path(path)


def test_R5_a_field_path_tells_its_argument_and_text() -> None:
    path = keys.FieldPath("cmd.request_id")
    assert (path.root, path.text, repr(path)) == ("cmd", "cmd.request_id", "field_path('cmd.request_id')")
