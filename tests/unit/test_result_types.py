"""The type of a result, from whatever is called: objects, classes, bound methods, proxies, and names that nobody knows."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import sys
import types
import typing
import xmlrpc.client
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NotRequired, Required, Self, TypedDict, TypeVar
from unittest import mock

import msgspec
import pydantic
import pytest

from semel import AsyncSemel, CodecError, Semel, current_run, results
from semel.codec import check_encodable, encoder_for, return_type
from semel.codec.annotations import Unresolved
from semel.coroutines import is_async
from semel.results import codec_for

if TYPE_CHECKING:
    from nowhere import Hidden  # type: ignore[import-not-found]  # known to type checkers only, as it were

T = TypeVar("T")


@dataclass
class Order:
    number: int = 1

    def next(self) -> Self:
        return type(self)(self.number + 1)

    def many(self) -> list[Self | None] | None:
        return [self, None]

    async def later(self) -> Self:
        return self

    def promised(self) -> Awaitable[typing.Annotated[tuple[Self, ...], "both"]]:
        raise NotImplementedError

    def maybe(self) -> typing.Optional[Self]:  # noqa: UP045 - the old spelling must work
        return self

    @classmethod
    def make(cls) -> Self:
        return cls(7)


class Special(Order):
    pass


class Model(pydantic.BaseModel):
    x: int = 1


def replayed(fn: Callable[..., Any], *args: Any) -> Any:
    once = Semel("memory://")
    first, again = once.execute("k", fn, *args), once.execute("k", fn, *args)
    assert again.replayed
    assert type(again.value) is type(first.value)
    assert again.value == first.value
    return again.value


# ------------------------------------------------------------------------- callable objects and classes


class Annotated:
    api: str = "x"

    def __call__(self, number: int) -> Order:
        return Order(number)


@dataclass
class Charger:
    api: str = "x"

    def __call__(self, number: int) -> Order:
        return Order(number)


class Itself:
    api: str = "x"

    def __call__(self, number: int) -> Self:
        raise NotImplementedError


def test_R2_a_callable_object_may_have_annotated_fields_of_its_own() -> None:
    for fn in (Annotated(), Charger(), functools.partial(Charger()), Charger().__call__):
        assert replayed(fn, 5) == Order(5)
    assert replayed(types.MethodType(Charger(), 5)) == Order(5)


def test_R2_a_class_gives_instances_of_itself() -> None:
    assert replayed(Order, 5) == Order(5)
    assert replayed(Model) == Model()


def test_a_class_whose_instances_are_awaited_says_nothing_of_what_they_give() -> None:
    class Promise:
        def __await__(self) -> Iterator[None]:
            raise NotImplementedError

    assert return_type(Promise) is None


def test_R2_a_step_may_be_such_an_object_too() -> None:
    def outer() -> Order:
        run = current_run()
        found: Order = run.step("s", Charger(), 5)
        if run.attempt == 1:
            raise OSError("lost")
        return found

    once = Semel("memory://")
    with pytest.raises(OSError, match="lost"):
        once.execute("k", outer)
    assert once.execute("k", outer).value == Order(5)


def test_R2_an_async_face_takes_such_an_object_too() -> None:
    async def main() -> None:
        async with AsyncSemel("memory://") as once:
            for _ in range(2):
                assert (await once.execute("k", Charger(), 5)).value == Order(5)

    asyncio.run(main())


def test_R23_a_callable_object_whose_result_can_never_be_stored_is_refused_before_the_effect() -> None:
    class Opening:
        host: str = "x"

        def __call__(self) -> socket.socket:
            raise AssertionError("it ran")

    class Plain:
        host: str = "x"

        def __init__(self) -> None:
            raise AssertionError("it ran")

    for fn in (Opening(), Plain):
        with pytest.raises(CodecError, match="cannot be stored and replayed") as refused:
            Semel("memory://").execute("k", fn)
        assert not refused.value.recorded


def test_a_method_without_annotation_is_untyped() -> None:
    class Bare:
        def run(self):  # type: ignore[no-untyped-def]  # without annotations on purpose
            return 1

    assert codec_for(Bare().run) is codec_for(None)
    assert not codec_for(len).typed


def test_an_annotation_that_cannot_be_hashed_is_looked_at_each_time() -> None:
    def noted() -> typing.Annotated[Order, []]:
        raise NotImplementedError

    def bad() -> typing.Annotated[socket.socket, []]:
        raise NotImplementedError

    assert codec_for(noted).encode(Order(1)) == encoder_for(Order).encode(Order(1))
    with pytest.raises(CodecError, match="socket"):
        codec_for(bad)


def test_what_is_remembered_of_functions_and_types_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_MOST", 2)
    for name in ("_by_code", "_by_function", "_checked"):
        monkeypatch.setattr(results, name, {})
    kept = []
    for at in range(10):
        hint = types.GenericAlias(tuple, (int,) * at)
        for name in ("fn", "make.<locals>.fn"):
            fn = types.FunctionType(hidden.__code__.replace(), {})
            fn.__qualname__, fn.__annotations__ = name, {"return": hint}
            assert codec_for(fn).result_type == hint
            kept.append(fn)
        assert all(
            0 < len(known) <= 2 for known in (results._by_code, results._by_function, results._checked)
        )


# ------------------------------------------------------------------------------------------------- Self


def test_R2_self_is_the_class_that_a_method_is_bound_to() -> None:
    for cls in (Order, Special):
        assert replayed(cls(1).next) == cls(2)
        assert replayed(cls.make) == cls(7)
        assert replayed(functools.partial(cls(1).next)) == cls(2)
        assert replayed(cls(1).many) == [cls(1), None]
        assert return_type(cls(1).later) is cls
        assert return_type(cls(1).maybe) == cls | None
        assert return_type(cls(1).promised) == typing.Annotated[tuple[cls, ...], "both"]  # type: ignore[valid-type]  # a class by its variable


def test_R2_a_model_may_be_made_by_its_own_class_method() -> None:
    assert replayed(Model.model_validate, {"x": 5}) == Model(x=5)


def test_R23_self_of_a_class_that_can_never_be_stored_is_refused_before_the_effect() -> None:
    with pytest.raises(CodecError, match="Itself, which cannot be stored and replayed"):
        codec_for(Itself())


def test_self_of_nobody_stays_as_it_is() -> None:
    assert return_type(Order.next) is Self
    check_encodable(return_type(Order.next))


# --------------------------------------------------------------------------------------------- generics


@dataclass
class Page(Generic[T]):
    items: list[T]


@dataclass
class OrderPage(Page[Order]):
    n: int = 1


class LastPage(OrderPage):
    pass


class LatePage(Page["Late"]):
    pass


@dataclass
class Late:
    number: int


class Sheet(msgspec.Struct, Generic[T]):
    items: list[T]


class OrderSheet(Sheet[list[Order]]):
    pass


class Row(TypedDict, Generic[T]):
    item: T


class OrderRow(Row[Order]):
    pass


class Box(pydantic.BaseModel, Generic[T]):
    item: T


@pytest.mark.parametrize(
    "hint, value",
    [
        (OrderPage, OrderPage([Order()])),
        (LastPage, LastPage([Order()])),
        (LatePage, LatePage([Late(1)])),
        (OrderSheet, OrderSheet([[Order()]])),
        (OrderRow, {"item": Order()}),
        (Box[Model], Box(item=Model())),
        (Box[Model], Box[Model](item=Model())),
        (list[Box[Model] | None], [Box(item=Model()), None]),
    ],
    ids=lambda case: getattr(case, "__name__", "value"),
)
def test_R2_what_a_class_gave_to_its_generic_base_is_named_by_it(hint: Any, value: Any) -> None:
    codec = encoder_for(hint)
    back = codec.decode(codec.encode(value))
    assert back == value
    assert type(back) is type(value)


def test_R15_a_generic_base_of_the_same_name_does_not_change_how_its_subclass_is_written() -> None:
    @dataclass
    class Page(globals()["Page"][Order]):  # type: ignore[misc]  # as a class may be named after its base in another module
        pass

    data = encoder_for(Page).encode(Page([]))
    assert b"\xa4Page" in data


# ------------------------------------------------------------------------------- names that nobody knows


def hidden() -> Hidden:
    return Order(5)


def many_hidden() -> dict[str, Hidden]:
    return {"a": Order(5)}


def hidden_but_plain() -> Hidden:
    return {"number": 5}


def quoted() -> None: ...


quoted.__annotations__["return"] = list[
    typing.Optional["Hidden"]
]  # as it is where annotations are not postponed


@pytest.mark.parametrize(
    "fn, text", [(hidden, "Hidden"), (many_hidden, "dict[str, Hidden]"), (quoted, "Hidden")]
)
def test_R23_an_annotation_that_cannot_be_resolved_is_told_as_that(fn: Any, text: str) -> None:
    assert return_type(fn) == Unresolved(text)
    codec = codec_for(fn)
    assert not codec.typed
    remedy = rf"Order, and the annotation '{text}' cannot be resolved at run time \(.*\): import it, or pass result_type="
    with pytest.raises(CodecError, match=remedy.replace("[", r"\[")):
        codec.encode(Order(5))
    with pytest.raises(CodecError, match=remedy.replace("[", r"\[")):
        codec.decode(encoder_for(Order).encode(Order(5)))


def test_R2_a_function_of_such_an_annotation_goes_on_working_with_plain_data_and_with_result_type() -> None:
    assert replayed(hidden_but_plain) == {"number": 5}
    once = Semel("memory://")
    for _ in range(2):
        assert once.execute("k", hidden, result_type=Order).value == Order(5)
    with pytest.raises(CodecError, match=r"'Hidden' cannot be resolved") as refused:
        once.execute("other", hidden)
    assert refused.value.recorded


def test_an_awaitable_of_nobody_knows_what_is_untyped() -> None:
    def promise() -> typing.Awaitable:  # without its argument
        raise NotImplementedError

    assert return_type(promise) is None


# --------------------------------------------------------------------------- parts that need not be there


@dataclass
class Logged:
    log: ClassVar[logging.Logger] = logging.getLogger("orders")
    id: int = 1


class LoggedStruct(msgspec.Struct):
    log: ClassVar[logging.Logger] = logging.getLogger("orders")
    id: int = 1


class Maybe(TypedDict):
    id: int
    log: NotRequired[logging.Logger]


class Loose(TypedDict, total=False):
    log: logging.Logger


class Strict(TypedDict, total=False):
    log: Required[logging.Logger]


class Whole(TypedDict):
    log: logging.Logger


@dataclass
class HalfKnown:
    hidden: Hidden
    id: int = 1


HalfKnown.__annotations__["log"] = ClassVar[logging.Logger]  # as it is where annotations are not postponed


@pytest.mark.parametrize("hint", [Logged, LoggedStruct, Maybe, Loose, HalfKnown, list[Logged]])
def test_a_part_that_an_instance_need_not_have_is_no_reason_to_refuse_its_class(hint: Any) -> None:
    check_encodable(hint)


@pytest.mark.parametrize("hint", [Strict, Whole])
def test_R23_a_key_that_has_to_be_there_is_one(hint: Any) -> None:
    with pytest.raises(CodecError, match=r"result \(log\) is a logging.Logger"):
        check_encodable(hint)


def test_R2_a_class_with_such_a_class_variable_is_stored_and_replayed() -> None:
    def logged() -> Logged:
        return Logged(5)

    def struct() -> LoggedStruct:
        return LoggedStruct(5)

    assert replayed(logged) == Logged(5)
    assert replayed(struct) == LoggedStruct(5)


# ----------------------------------------------------------------------- proxies, wrappers without an end


class Answering:
    """As a proxy of remote calls: it has every attribute, a new one each time, and each can be called."""

    def __getattr__(self, name: str) -> Answering:
        return Answering()

    def __call__(self, *args: Any) -> int:
        raise AssertionError("called")

    def __and__(self, other: object) -> bool:
        return True

    __contains__: Any = __call__


class Remote(Answering):
    async def __call__(self, *args: Any) -> int:  # type: ignore[override]  # the other colour
        raise AssertionError("called")


def test_a_proxy_that_has_every_attribute_is_only_called_to_run_it() -> None:
    server = xmlrpc.client.ServerProxy("http://127.0.0.1:9")  # nobody listens there
    for fn in (
        Answering(),
        Answering().charge,
        server.charge,
        mock.call.charge,
        functools.partial(server.charge),
    ):
        assert not is_async(fn)
        assert return_type(fn) is None
        assert not codec_for(fn).typed
    assert is_async(Remote())


def test_mocks_are_what_they_stand_for() -> None:
    assert is_async(mock.AsyncMock())
    for fn in (mock.Mock(), mock.MagicMock(), mock.Mock(spec=hidden), mock.Mock(spec=Order().next)):
        assert not is_async(fn)
        assert not codec_for(fn).typed


def test_wrappers_that_lead_back_to_themselves_are_as_they_are_annotated() -> None:
    def one() -> Order:
        return Order(1)

    def other() -> Order:
        raise NotImplementedError

    one.__wrapped__ = one  # type: ignore[attr-defined]  # on purpose
    assert replayed(one) == Order(1)
    one.__wrapped__, other.__wrapped__ = other, one  # type: ignore[attr-defined]  # on purpose
    assert return_type(one) is Order


# ------------------------------------------------------------------------------------------------ colours


async def awaited() -> None: ...


def plain() -> None: ...


class AsyncObject:
    async def __call__(self) -> None: ...


class Service:
    async def fetch(self) -> None: ...

    def read(self) -> None: ...


def test_the_colour_of_a_function_is_seen_through_partials_methods_and_objects() -> None:
    for fn in (awaited, functools.partial(awaited), Service().fetch, Service.fetch, AsyncObject()):
        assert is_async(fn)
    for other in (plain, functools.partial(plain), Service().read, Service, len, "text".upper):
        assert not is_async(other)


def test_a_function_with_attributes_of_its_own_is_of_the_colour_that_it_is_marked_with() -> None:
    async def tagged() -> None: ...

    def marked() -> None: ...

    tagged.tag = marked.tag = 1  # type: ignore[attr-defined]  # any attribute
    assert is_async(tagged)
    assert not is_async(marked)
    if sys.version_info >= (3, 12):
        import inspect

        assert is_async(inspect.markcoroutinefunction(marked))
