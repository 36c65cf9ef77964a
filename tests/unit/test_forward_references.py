"""A class that an annotation names by its text, inside of it: `list["Order"]`, `Optional["Order"]`. No postponed annotations here."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional, Union

import pytest

from semel import AsyncSemel, CodecError, Semel, current_run
from semel.codec import return_type


def maybe() -> Optional["Order"]:
    return Order(1)


def listed() -> list["Order"]:
    return [Order(1)]


def mapped() -> dict[str, "Order"]:
    return {"a": Order(1)}


def either() -> Union["Order", int]:
    return Order(1)


def several() -> tuple["Order", ...]:
    return (Order(1), Order(2))


def listed_or_not() -> list["Order"] | None:
    return [Order(1)]


def described() -> Annotated[list["Order"], "no name of a class"]:
    return [Order(1)]


def deep() -> dict[str, list[Optional["Order"]]]:
    return {"a": [Order(1), None]}


def promised() -> Awaitable[list["Order"]]:
    raise NotImplementedError


def word() -> list[Literal["Order", "order"]]:
    return ["Order"]


def unknown() -> list["NobodyKnows"]:  # type: ignore[name-defined]  # noqa: F821 - that is the case
    return [1]


@dataclass
class Order:
    number: int


class Shop:
    def listed(self) -> list["Order"]:
        return [Order(1)]

    def __call__(self) -> Optional["Order"]:
        return Order(1)


@pytest.mark.parametrize(
    "fn",
    [
        maybe,
        listed,
        mapped,
        either,
        several,
        listed_or_not,
        described,
        deep,
        word,
        unknown,
        Shop().listed,
        Shop(),
    ],
)
def test_a_class_that_is_named_by_text_inside_an_annotation_is_stored_and_replayed(
    fn: Callable[[], Any],
) -> None:
    once = Semel("memory://")
    assert once.execute("k", fn).value == fn()
    assert once.execute("k", fn).value == fn()


def test_a_coroutine_function_and_its_step_may_name_it_by_text_too() -> None:
    async def outer() -> list["Order"]:
        run: Any = current_run()
        found: list[Order] = await run.step("find", listed)
        return found

    async def main() -> None:
        async with AsyncSemel("memory://") as once:
            for _ in range(2):
                assert (await once.execute("k", outer)).value == [Order(1)]

    asyncio.run(main())


def test_a_step_is_stored_by_the_class_that_is_named_by_text() -> None:
    def outer() -> list["Order"]:
        run = current_run()
        found: list[Order] = run.step("find", listed)
        if run.attempt == 1:
            raise OSError("lost")
        return found

    once = Semel("memory://")
    with pytest.raises(OSError, match="lost"):
        once.execute("k", outer)
    assert once.execute("k", outer).value == [Order(1)]


def test_a_result_of_another_class_is_still_refused() -> None:
    def other() -> list["Order"]:
        return [Shop()]  # type: ignore[list-item]  # that is the case

    with pytest.raises(CodecError, match="Shop"):
        Semel("memory://").execute("k", other)


def test_the_awaited_result_is_what_counts() -> None:
    assert return_type(promised) == list[Order]


def test_functions_of_the_same_text_may_mean_different_classes_of_their_closures() -> None:
    def made(kind: Any) -> Any:
        def one() -> Optional["kind"]:
            return kind(1)

        def many() -> list["kind"]:
            return [kind(1)]

        return one, many

    @dataclass
    class Other:
        number: int

    once = Semel("memory://")
    for name, kind in (("order", Order), ("other", Other)):
        one, many = made(kind)
        for _ in range(2):
            assert once.execute(f"{name}-one", one).value == kind(1)
            assert once.execute(f"{name}-many", many).value == [kind(1)]


def test_functions_of_the_same_code_may_be_annotated_with_different_texts() -> None:
    def made(text: str) -> Any:
        def many() -> list[text]:  # type: ignore[valid-type]  # made anew for each text
            raise NotImplementedError

        return many

    assert [return_type(made(text)) for text in ("Order", "int", "Order")] == [
        list[Order],
        list[int],
        list[Order],
    ]


def test_an_annotation_is_evaluated_once_for_all_functions_of_the_same_text() -> None:
    def made() -> Any:
        def many() -> list["Order"]:
            raise NotImplementedError

        return many

    kept = sys.modules["semel.codec.annotations"]
    kept._known.clear()
    first = return_type(made())
    assert first == list[Order]
    assert return_type(made()) is first
    assert len(kept._known) == 1
