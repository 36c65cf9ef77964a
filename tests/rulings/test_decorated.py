"""R5: what a decorated function, method or handler class takes its key, request and tenant from."""

from __future__ import annotations

import functools
import inspect
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import pytest

from semel import (
    AsyncSemel,
    CodecError,
    ConfigurationError,
    Found,
    InvalidKey,
    KeyMismatch,
    Semel,
    SemelWarning,
)


def test_a_key_may_begin_with_self() -> None:
    with Semel("memory://") as once:

        class Parcel:
            def __init__(self, name: str) -> None:
                self.id = name

            @once(key="self.id")
            def ship(self) -> str:
                return self.id

            @once(key=lambda self, day: f"{self.id}-{day}")
            def weigh(self, day: int) -> str:
                return f"{self.id} on {day}"

            @once(key="day", request="self.id")
            def count(self, day: int) -> str:
                return self.id

            @once(key=lambda day: day, operation="own")
            def own(self, day: int) -> int:
                return day

        one, other = Parcel("a"), Parcel("b")
        assert [one.ship(), other.ship(), one.ship()] == ["a", "b", "a"]
        assert one.ship.outcome().replayed
        assert [one.weigh(1), other.weigh(1), one.weigh(1)] == ["a on 1", "b on 1", "a on 1"]
        assert one.count(1) == "a"
        with pytest.raises(KeyMismatch):
            other.count(1)
        assert one.own(3) == other.own(3) == 3
        unbound: Any = Parcel.ship
        with pytest.raises(TypeError, match="self"):
            unbound()


def test_a_key_may_begin_with_cls_and_with_what_a_handler_calls_its_object() -> None:
    with Semel("memory://") as once:

        class Base:
            name = "base"

            @once(key="cls.name")
            @classmethod
            def made(cls) -> str:
                return cls.name

            @once(key=attrgetter("id"))
            def read(self, thing: Any) -> Any:
                return thing.id

        class Derived(Base):
            name = "derived"

        base: Any = Base
        derived: Any = Derived
        assert [base.made(), derived.made()] == ["base", "derived"]
        assert Base().read(type("Thing", (), {"id": "t"})) == "t"

        @once(key="this.topic", method="run")
        class Handler:
            def __init__(this, topic: str) -> None:
                this.topic = topic

            def run(this) -> str:
                return this.topic

        assert [Handler("x").run(), Handler("y").run()] == ["x", "y"]
        unbound: Any = Handler.run
        for call in (unbound, unbound.outcome):
            with pytest.raises(TypeError, match="missing 1 required positional argument: 'this'"):
                call(this=Handler("x"))


def test_a_method_with_nothing_to_make_a_key_of_is_refused() -> None:
    with Semel("memory://") as once:

        class Parcel:
            def ship(self) -> int:
                return 1

            def handle(self) -> int:
                return 1

        with pytest.raises(ConfigurationError, match=r"nothing but self.*key='self.id'"):
            once()(Parcel.ship)
        with pytest.raises(ConfigurationError, match=r"nothing but self.*key='self.id'"):
            once()(Parcel)
        with pytest.raises(ConfigurationError, match="the arguments are: self"):
            once(key="order.id")(Parcel.ship)
        # A function without arguments is one action, and so is one of a class.
        assert once(operation="migrate")(lambda: 1)() == 1


def test_a_method_with_arguments_and_no_key_keeps_its_object_out_of_the_key() -> None:
    with Semel("memory://") as once:

        class Account:
            def __init__(self) -> None:
                self.taken = 0

            @once()
            def withdraw(self, amount: int) -> int:
                self.taken += amount
                return amount

        one, other = Account(), Account()
        one.withdraw(5)
        other.withdraw(5)
        assert (one.taken, other.taken) == (5, 0)


@pytest.mark.parametrize("settings", [{}, {"fingerprints": "required"}], ids=["optional", "required"])
def test_R22_a_request_that_is_none_is_another_one_than_any_other(settings: dict[str, Any]) -> None:
    with Semel("memory://", **settings) as once:

        @once(operation="pay", key="order", request="note")
        def pay(order: str, note: str | None = None) -> str:
            return f"{order}: {note}"

        assert [pay("1"), pay("2", "urgent"), pay("1"), pay("2", "urgent")] == ["1: None", "2: urgent"] * 2
        for order, note in (("1", "urgent"), ("2", None)):
            with pytest.raises(KeyMismatch):
                pay(order, note)


def test_a_tenant_may_be_a_path_or_a_callable() -> None:
    with Semel("memory://") as once:

        @once(key="order", tenant="customer.tenant", operation="path")
        def path(customer: Any, order: str) -> str:
            return str(customer["tenant"])

        @once(key="order", tenant=lambda customer, order: customer["tenant"], operation="callable")
        def call(customer: Any, order: str) -> str:
            return str(customer["tenant"])

        @once(key="order", tenant="acme.com", operation="text")
        def text(customer: Any, order: str) -> str:
            return str(customer["tenant"])

        @once(key="order", tenant="customer", operation="name")
        def name(customer: Any, order: str) -> str:
            return str(customer["tenant"])

        @once(key="order", tenant="orders.eu", operation="dotted")
        def dotted(customer: Any, order: str) -> str:
            return str(customer["tenant"])

        for decorated in (path, call):
            assert decorated({"tenant": "a"}, "1") == "a"
            assert decorated({"tenant": 7}, "1") == "7"
            assert decorated.outcome({"tenant": "a"}, "1").replayed
            with pytest.raises(InvalidKey, match="tenant must be a str, not NoneType"):
                decorated({"tenant": None}, "1")
        assert once.peek("1", tenant="7", operation="path")
        assert [text({"tenant": "a"}, "1"), text({"tenant": "b"}, "1")] == ["a", "a"]
        assert once.peek("1", tenant="acme.com", operation="text")
        # A word alone is the tenant, whatever the arguments are called; so is what only looks like one of them.
        for decorated, tenant in ((name, "customer"), (dotted, "orders.eu")):
            assert decorated({"tenant": "a"}, "1") == "a"
            assert once.peek("1", tenant=tenant, operation=decorated.__wrapped__.__name__)  # type: ignore[attr-defined]  # of a decorated function


@pytest.mark.parametrize(
    ("tenant", "says"),
    [
        (5, "tenant= must be a field path"),
        (None, "tenant= must be a field path"),
    ],
)
def test_a_wrong_tenant_is_refused_when_decorating(tenant: Any, says: str) -> None:
    with Semel("memory://") as once, pytest.raises(ConfigurationError, match=says):
        once(key="order", tenant=tenant, operation="x")(lambda customer, order: 1)


def test_a_tenant_that_cannot_be_one_is_refused_when_decorating() -> None:
    with Semel("memory://") as once, pytest.raises(InvalidKey, match="tenant is empty"):
        once(key="order", tenant="", operation="x")(lambda order: 1)


def test_an_unknown_option_of_the_decorator_is_compared_with_its_own_too() -> None:
    with Semel("memory://") as once:
        with pytest.raises(ConfigurationError, match=r"did you mean 'key'\?.* key, request, method, "):
            once(keey="a")  # type: ignore[call-arg]  # that is the mistake
        with pytest.raises(ConfigurationError, match="method='handle' names a method of a handler class"):
            once(key="x", method="handle", operation="x")(lambda x: x)


def test_R5_a_class_that_inherits_its_method_is_told_where_to_decorate() -> None:
    class Handler:
        def handle(self, order: str) -> str:
            return order

    class Special(Handler): ...

    with Semel("memory://") as once:
        with pytest.raises(
            ConfigurationError, match=r"Special has no .* inherits that of Handler: decorate Handler, or"
        ):
            once(key="order")(Special)
        with pytest.raises(ConfigurationError, match="has no method 'run' of its own: pass method="):
            once(key="order", method="run")(Special)


def _lose(call: Any) -> None:
    with pytest.raises(SystemExit):
        call()


def test_R11_a_probe_gets_what_was_given_by_name_at_its_place() -> None:
    asked: list[Any] = []

    def look(*args: Any) -> Found:
        asked.append(args)
        return Found("found")

    with Semel("memory://", on_unknown=look) as once:

        @once(key="order", operation="f")
        def create(order: str, sum_: int = 1, note: str = "", *, trace: str = "t", **_more: Any) -> str:
            raise SystemExit

        class Shop:
            @once(key="order", operation="m", on_unknown=look)
            def create(self, order: str, sum_: int = 1) -> str:
                raise SystemExit

        shop = Shop()
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            (lambda: create("a"), ("a",)),
            (lambda: create(order="b"), ("b",)),
            (lambda: create(note="n", order="c"), ("c", 1, "n")),
            (lambda: create("d", trace="u", more=1), ("d",)),
            (lambda: shop.create(order="e"), (shop, "e")),
            (lambda: shop.create("f", sum_=2), (shop, "f", 2)),
        ]
        for call, given in calls:
            _lose(call)
            assert call() == "found"
            assert asked.pop() == given
            assert not asked


def test_arguments_that_make_no_key_name_the_option() -> None:
    with Semel("memory://") as once:
        decorated = once(operation="x")(lambda thing: thing)
        with pytest.raises(CodecError, match=r"without key= .* Say key='…'"):
            decorated(object())


NAMES: dict[str, Any] = dict.fromkeys(
    (
        "self",
        "args",
        "kwargs",
        "fn",
        "key",
        "call",
        "once",
        "instance",
        "owner",
        "value",
        "options",
        "cls",
        "inline",
    ),
    1,
)


def test_an_argument_may_have_any_name_and_be_given_by_it() -> None:
    with Semel("memory://") as once:

        @once(key="href")
        def link(href: str, self: str = "", **more: Any) -> Any:
            return href, self, more

        class Page:
            @once(key="href")
            def again(self, href: str) -> str:
                return href

        more = {name: each for name, each in NAMES.items() if name != "self"}
        assert link("a", self="http://x", **more) == ("a", "http://x", more)
        assert link.outcome("a", self="http://x").replayed
        assert link.outcome(href="b", self="http://y").value == ("b", "http://y", {})
        page: Any = Page
        assert page().again(href="a") == "a"
        for called in (page.again, page.again.outcome):
            with pytest.raises(TypeError, match="missing 1 required positional argument: 'self'"):
                called(self=page(), href="a")


def test_a_handler_class_takes_such_names_too() -> None:
    with Semel("memory://") as once:

        @once(key="href")
        class Handler:
            def handle(this, href: str, **more: Any) -> Any:
                return href, more

        handler: Any = Handler()
        assert handler.handle("a", **NAMES) == ("a", NAMES)
        assert handler.handle.outcome("a", **NAMES).replayed


async def test_so_it_is_where_it_is_awaited() -> None:
    async with AsyncSemel("memory://") as once:

        @once(key="href")
        async def link(href: str, **more: Any) -> Any:
            return href, more

        @once(key="href")
        class Handler:
            async def handle(this, href: str, **more: Any) -> Any:
                return href, more

        handler: Any = Handler()
        for called in (link, handler.handle):
            assert await called("a", **NAMES) == ("a", NAMES)
            assert (await called.outcome("a", **NAMES)).replayed


# ----------------------------------------------------------------------------------------------- one above the other
def _between(fn: Any) -> Any:
    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        return fn(*args)

    return call


@pytest.mark.parametrize("between", [lambda fn: fn, _between])
def test_of_two_decorators_both_protect(between: Any) -> None:
    ran: list[tuple[str, str]] = []
    with Semel("memory://") as inner, Semel("memory://") as outer:

        @outer(operation="of a customer", key="customer")
        @between
        @inner(operation="of an order", key="order")
        def charge(customer: str, order: str) -> str:
            ran.append((customer, order))
            return order

        assert [charge("c1", "o1"), charge("c1", "o2"), charge("c2", "o1")] == ["o1", "o1", "o1"]
        assert ran == [("c1", "o1")]
        assert charge.outcome("c2", "o1").replayed
        assert outer.peek("c2", operation="of a customer") is not None


async def test_of_two_awaited_decorators_both_protect() -> None:
    ran: list[str] = []
    async with AsyncSemel("memory://") as inner, AsyncSemel("memory://") as outer:

        @outer(operation="of a customer", key="customer")
        @inner(operation="of an order", key="order")
        async def charge(customer: str, order: str) -> str:
            ran.append(order)
            return order

        assert [await charge("c1", "o1"), await charge("c1", "o2")] == ["o1", "o1"]
    assert ran == ["o1"]


def test_what_a_function_carries_stands_for_nothing_of_ours() -> None:
    def double(number: int) -> int:
        return 2 * number

    names = {"outcome": 1, "_outcome": 2, "_value": 3, "_face": 4, "_in_place": 5, "route": "/double"}
    vars(double).update(names)
    with Semel("memory://") as once:
        decorated = once(operation="double")(double)
        assert decorated(2) == 4
        assert decorated.outcome(2).replayed
        assert decorated.route == "/double"  # type: ignore[attr-defined]  # of the function


def test_what_is_wrapped_is_what_was_decorated() -> None:
    def work(self: object, number: int) -> int:
        return number

    @functools.wraps(work)
    def between(self: object, number: int) -> int:
        return work(self, number) + 1

    with Semel("memory://") as once:

        class Desk:
            act = once(key="number", operation="act")(between)

        assert vars(Desk)["act"].__wrapped__ is between
        assert Desk().act(1) == 2


def test_R2_self_is_the_class_of_the_object_or_the_class_that_it_is_called_for() -> None:
    with Semel("memory://") as once:

        @dataclass
        class Order:
            number: int

            @once(key="by")
            def next(self, by: int) -> Self | None:
                return type(self)(self.number + by)

            @once(key=lambda cls, number: f"{cls.__name__}-{number}")
            @classmethod
            def make(cls, number: int) -> Self:
                return cls(number)

        class Special(Order):
            pass

        for cls, by in ((Order, 1), (Special, 2)):
            for _ in "twice":
                made: Any = cls.make
                found = cls(1).next(by), made(7)
                assert list(map(type, found)) == [cls, cls]
                assert found == (cls(1 + by), cls(7))


async def test_R2_self_of_a_coroutine_is_its_class_too() -> None:
    async with AsyncSemel("memory://") as once:

        @dataclass
        class Order:
            number: int

            @once(key="self.number")
            async def all(self) -> list[Self]:
                return [self]

        assert await Order(1).all() == await Order(1).all() == [Order(1)]


def test_R23_self_that_can_never_be_stored_is_refused_before_the_effect() -> None:
    with Semel("memory://") as once:

        class Builder:
            @once(key="number")
            def build(self, number: int) -> Self:
                raise AssertionError

        with pytest.raises(CodecError, match="cannot be stored and replayed"):
            Builder().build(1)


# ------------------------------------------------------------------------------------------- a key= that cannot be called
def _two(cmd: str, dry_run: bool = False) -> str:
    return cmd


def _named(cmd: str, *, dry_run: bool = False) -> str:
    return cmd


def _open(cmd: str, *rest: str, **more: str) -> str:
    return cmd


class Counter:
    def of(self, cmd: str) -> str:
        return cmd

    def count(self, cmd: str, day: int) -> str:
        return cmd


@pytest.mark.parametrize("what", ["key", "request", "tenant"])
@pytest.mark.parametrize(
    ("fn", "chosen", "remedy"),
    [
        (_two, lambda cmd: cmd, "lambda cmd, dry_run: "),
        (_two, lambda: "k", "lambda cmd, dry_run: "),
        (_two, lambda cmd, dry_run, more: cmd, "lambda cmd, dry_run: "),
        (_two, lambda cmd, *, dry_run: cmd, "lambda cmd, dry_run: "),
        (_two, Counter().of, "lambda cmd, dry_run: "),
        (_named, lambda cmd: cmd, r"lambda cmd, \*, dry_run: "),
        (_named, lambda cmd, dry: cmd, r"lambda cmd, \*, dry_run: "),
        (_open, lambda: "k", r"lambda cmd, \*rest, \*\*more: "),
        (Counter.count, lambda cmd: cmd, "lambda cmd, day: "),
        (Counter.count, lambda self: "k", "lambda self, cmd, day: "),
        (list, lambda iterable, more: "k", "lambda iterable, /: "),
    ],
)
def test_a_callable_that_cannot_take_the_arguments_is_refused_when_decorating(
    fn: Any, chosen: Any, remedy: str, what: str
) -> None:
    given: dict[str, Any] = {"key": lambda *_args, **_named: "k", what: chosen, "operation": "x"}
    if isinstance(fn, type):
        fn = functools.partial(fn)
    with Semel("memory://") as once, pytest.raises(ConfigurationError, match=f"^{what}= .*{what}={remedy}…"):
        once(**given)(fn)


@pytest.mark.parametrize(
    ("fn", "chosen"),
    [
        (_two, lambda cmd, _dry_run: cmd),
        (_two, lambda cmd, *_: cmd),
        (_two, lambda cmd, dry_run=True, more=None: cmd),
        (_two, lambda *args: args[0]),
        (_two, functools.partial(lambda of, cmd, _: of + cmd, "")),
        (_two, Counter().count),
        (_named, lambda cmd, **_: cmd),
        (_named, lambda cmd, dry_run: cmd),
        (_open, lambda cmd: cmd),
        (_open, lambda cmd, *_args, **_more: cmd),
        (functools.partial(_two, dry_run=True), lambda cmd, dry_run: cmd),
        (lambda cmd: cmd, str),
        (lambda cmd: cmd, attrgetter("__class__.__name__")),
    ],
)
def test_a_callable_that_may_take_them_is_not(fn: Any, chosen: Any) -> None:
    with Semel("memory://") as once:
        decorated: Any = once(key=chosen, operation="x")(fn)
        assert decorated("a") == "a"
        assert decorated.outcome("a").replayed


# ------------------------------------------------------------------------------------- an object that is not called self
@dataclass
class Till:
    name: str
    ran: list[str]


@pytest.mark.parametrize("options", [{}, {"key": "order"}, {"key": lambda this, order: order}])
def test_R5_the_object_of_a_method_is_no_part_of_the_key_whatever_it_is_called(
    options: dict[str, Any],
) -> None:
    with Semel("memory://") as once:

        class Shop(Till):
            @once(**options)
            def pay(this, order: str) -> str:
                this.ran.append(this.name)
                return f"{order} by {this.name}"

        ran: list[str] = []
        one, other = Shop("a", ran), Shop("b", ran)
        assert [one.pay("o-1"), other.pay(order="o-1")] == ["o-1 by a"] * 2
        assert other.pay.outcome("o-1").replayed
        assert ran == ["a"]
        assert one.pay.__name__ == "pay"


def test_R5_of_a_class_body_what_stands_below_staticmethod_stays_a_function() -> None:
    with Semel("memory://") as once:

        class Shop:
            @staticmethod
            @once()
            def price(item: str, count: int) -> str:
                return f"{count} {item}"

            @once(key=lambda item, count: f"{item}-{count}")
            def weigh(item: str, count: int) -> str:
                return f"{count} {item}"

        shop: Any = Shop
        for fn in (shop.price, shop().price, shop.weigh):
            assert [fn("tea", 1), fn("tea", 2), fn(count=2, item="tea")] == ["1 tea", "2 tea", "2 tea"]
            assert fn.outcome("tea", 2).replayed
            assert list(inspect.signature(fn).parameters) == ["item", "count"]
        assert inspect.isfunction(shop.weigh)


async def test_R5_it_is_a_coroutine_function_either_way() -> None:
    async with AsyncSemel("memory://") as once:

        class Shop:
            @staticmethod
            @once()
            async def price(item: str) -> str:
                return item

            @once(key="order")
            async def pay(this, order: str) -> str:
                return order

        prices: Any = Shop.price
        for fn in (prices, Shop().price, Shop.pay, Shop().pay):
            assert inspect.iscoroutinefunction(fn)
        assert await prices("tea") == "tea"
        assert (await prices.outcome("tea")).replayed
        assert await Shop().pay("o-1") == await Shop.pay(Shop(), "o-1") == "o-1"
        assert (await Shop().pay.outcome("o-1")).replayed


def test_R5_options_that_suit_only_a_method_or_only_a_function_decide_which_one_it_is() -> None:
    with Semel("memory://") as once:

        class Shop:
            @once(key=lambda order: order)
            def pay(this, order: str) -> str:
                return order

            @once()
            def reset(counter: str) -> str:
                return counter

        assert Shop().pay("a") == "a"
        assert Shop().pay.outcome("a").replayed
        resets: Any = Shop.reset
        assert [resets("a"), resets("b")] == ["a", "b"]
        with pytest.raises(
            ConfigurationError, match="there is no argument 'ordr'; the arguments are: this, order"
        ):

            class Shut:
                @once(key="ordr")
                def pay(this, order: str) -> str:
                    return order


# ------------------------------------------------------------------------------------------- two functions of one name
def _refunder(once: Any, bank: str) -> Any:
    @once(key="order")
    def refund(order: str) -> str:
        return bank

    return refund


def test_two_live_functions_of_one_name_are_warned_of_once() -> None:
    with Semel("memory://") as once:
        one, other, third = (_refunder(once, bank) for bank in "abc")
        with pytest.warns(
            SemelWarning, match=r"'\S+_refunder\.<locals>\.refund'.*\(both were .*operation='…'"
        ):
            assert one("1") == "a"
        assert [other("2"), third("3")] == ["b", "c"]  # a warning is an error in this test
    with Semel("memory://") as once:
        handlers: list[Any] = []

        def handler(fn: Any) -> None:
            handlers.append(fn)

        @handler
        @once(key="order")
        def _(order: str) -> str:
            return "first"

        @handler
        @once(key="order")
        def _(order: str) -> str:
            return "second"

        first, second = handlers
        with pytest.warns(SemelWarning, match=r"test_decorated\.py:\d+ and .*test_decorated\.py:\d+") as told:
            assert second("1") == "second"
        assert (told[0].filename, first("2")) == (__file__, "first")


async def test_methods_of_classes_that_a_function_makes_are_warned_of_too() -> None:
    async with AsyncSemel("memory://") as once:

        def make() -> Any:
            class Shop:
                @once()
                async def pay(self, order: str) -> str:
                    return order

            return Shop

        one, other = make(), make()
        with pytest.warns(SemelWarning, match="share their keys"):
            assert await one().pay.outcome("1")
        assert await other().pay("1") == "1"


def test_a_function_that_is_gone_or_the_same_one_or_named_is_not() -> None:
    with Semel("memory://") as once:
        assert [_refunder(once, bank)(bank) for bank in "ab"] == ["a", "b"]  # one after the other

        def save(order: str) -> str:
            return order

        class Desk:
            def work(self, order: str) -> str:
                return order

        one, other = once(key="order")(save), once(key=lambda order: order)(save)
        assert [one("1"), other("1")] == ["1", "1"]
        one, other = once(key="order")(Desk().work), once(key="order")(Desk().work)
        assert [one("1"), other("1")] == ["1", "1"]
        named = [_refunder(functools.partial(once, operation="refund"), bank) for bank in "ab"]
        assert [fn("1") for fn in named] == ["a", "a"]
        with Semel("memory://") as another:
            kept = _refunder(once, "a"), _refunder(another, "b")
            assert [fn("3") for fn in kept] == ["a", "b"]


@pytest.mark.parametrize(
    ("before", "now"),
    [(("a.py", 0), ("a.py", 0)), (("<cell 1>", 0), ("<cell 2>", 5))],
    ids=["a reloaded module", "a cell that was run again"],
)
def test_a_definition_that_replaces_another_one_is_not(before: tuple[str, int], now: tuple[str, int]) -> None:
    with Semel("memory://") as once:
        module: dict[str, Any] = {"once": once, "__name__": "shop"}
        kept: list[Any] = []
        for file, lines in (before, now):
            source = "\n" * lines + "@once(key='order')\ndef pay(order): return order"
            exec(compile(source, file, "exec"), module)
            kept.append(module["pay"])  # as a registry does
            assert module["pay"]("1") == "1"


def test_a_definition_that_was_edited_in_its_place_is_not_if_nobody_keeps_the_old_one() -> None:
    with Semel("memory://") as once:
        module: dict[str, Any] = {"once": once, "__name__": "shop"}
        for lines in range(3):
            exec(compile("\n" * lines + "@once()\ndef pay(order): return order", "a.py", "exec"), module)
            assert module["pay"]("1") == "1"


def test_functions_of_one_transaction_each_are_not(tmp_path: Path) -> None:
    url = tmp_path / "semel.db"
    with Semel(f"sqlite:///{url}") as once:
        once.create()
        with closing(sqlite3.connect(url)) as connection:
            connection.execute("BEGIN")
            kept = [_refunder(once.within(connection), bank) for bank in "ab"]
            assert [fn("1") for fn in kept] == ["a", "a"]
            connection.commit()
