"""Which codec a function's results need is asked at every call: known functions are not looked at again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import msgspec
import pytest

from semel.errors import CodecError
from semel.results import codec_for, known_codec


class Apple(msgspec.Struct):
    weight: int


class Pear(msgspec.Struct):
    weight: int


def picked(weight: int) -> Callable[[], Any]:
    async def pick() -> Apple:
        return Apple(weight)

    return pick


def test_a_function_that_is_made_anew_for_each_call_is_known_by_what_it_is_made_of() -> None:
    codec = codec_for(picked(1))
    assert known_codec(picked(2)) is codec
    assert codec.result_type is Apple


def test_a_function_without_an_annotation_is_known_too() -> None:
    def made(value: int):  # type: ignore[no-untyped-def]  # without annotations on purpose
        def plain():  # type: ignore[no-untyped-def]  # without annotations on purpose
            return value

        return plain

    assert codec_for(made(1)) is known_codec(made(2))
    assert not codec_for(made(3)).typed


def test_two_functions_of_one_text_that_mean_two_classes_by_it_are_told_apart() -> None:
    def named(fruit: type) -> Any:
        def pick() -> fruit:  # type: ignore[valid-type]  # what the closure holds
            return fruit(1)  # type: ignore[no-any-return]  # a class by its variable

        return pick

    def annotated(fruit: type) -> Any:
        def pick() -> None: ...

        pick.__annotations__ = {"return": fruit}  # as it is where annotations are not postponed
        return pick

    for make in (named, annotated):
        apple, pear = make(Apple), make(Pear)
        assert codec_for(apple).result_type is Apple
        assert known_codec(pear) is None
        assert codec_for(pear).result_type is Pear
        assert known_codec(make(Apple)) is None or codec_for(make(Apple)).result_type is Apple


def test_one_text_in_two_modules_means_what_each_of_them_says() -> None:
    pick: Any = picked(1)
    assert codec_for(pick).result_type is Apple
    elsewhere = FunctionType(pick.__code__, {"Apple": Pear}, pick.__name__, None, pick.__closure__)
    elsewhere.__qualname__, elsewhere.__annotations__ = pick.__qualname__, pick.__annotations__
    assert known_codec(elsewhere) is None


def test_wrappers_of_one_text_are_what_they_wrap() -> None:
    def wrapped(fn: Callable[[], Any]) -> Any:
        @functools.wraps(fn)
        def call() -> Any:
            return fn()

        return call

    def pear() -> Pear:
        return Pear(1)

    assert codec_for(wrapped(picked(1))).result_type is Apple
    assert known_codec(wrapped(pear)) is None
    assert codec_for(wrapped(pear)).result_type is Pear


def test_what_was_refused_once_is_refused_again() -> None:
    def made() -> Any:
        def bad() -> Callable[[], int]:
            raise AssertionError

        def lazy() -> Any:
            yield 1

        return bad, lazy

    for _ in range(2):
        for fn in made():
            assert known_codec(fn) is None
            with pytest.raises(CodecError):
                codec_for(fn)
