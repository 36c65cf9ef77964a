"""The mark, where something else than pytest itself would run the test."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.slow

INSTALLED = any(each.value == "semel.testing.plugin" for each in entry_points(group="pytest11"))
PLUGIN = () if INSTALLED else ("-p", "semel.testing.plugin")
OTHERS = ("valkey", "cacheprovider", "schemathesis", "faker", "hypothesispytest", "xdist", "xdist.looponfail")

# Every handler here is doubled: a test that passes was not proved.
TESTS = """
    import unittest
    from pathlib import Path

    import pytest

    def count(key):
        return Path(key).stat().st_size if Path(key).exists() else 0

    def write(key):
        with Path(key).open("a") as book:
            book.write("x")

    @pytest.fixture
    def anyio_backend():
        return "asyncio"

    @pytest.mark.anyio
    @pytest.mark.exactly_once(effects=count, faults=["kill"])
    async def test_anyio(once_key):
        write(once_key)

    @pytest.mark.exactly_once(effects=count, faults=["kill"])
    async def test_in_a_loop(once_key):
        write(once_key)

    class TestNew:
        @pytest.mark.exactly_once(effects=count, faults=["kill"])
        def test_method(self, once_key):
            write(once_key)

    class TestOld(unittest.TestCase):
        @pytest.mark.exactly_once(effects=count, arguments=lambda key: (key,))
        def test_old(self):
            write("old")
"""
# As plugins do that run async tests in a loop of their own.
AROUND = """
    import asyncio, functools, pytest

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(item):
        test = item.obj

        @functools.wraps(test)
        def in_a_loop(**given):
            asyncio.run(test(**given))

        if item.name == "test_in_a_loop":
            item.obj = in_a_loop
        try:
            return (yield)
        finally:
            item.obj = test
"""


def test_a_marked_test_is_proved_whoever_else_would_run_it_and_refused_where_it_cannot_be(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(AROUND)
    pytester.makepyfile(TESTS)
    words = [*PLUGIN, *(f"-pno:{other}" for other in OTHERS), "-s"]
    result = pytester.run(sys.executable, "-m", "pytest", *words, timeout=100)
    result.assert_outcomes(failed=3, errors=1)
    result.stdout.fnmatch_lines_random(
        [
            "*test_anyio: doubled in *",
            "*test_in_a_loop: doubled in *",
            "*test_method: doubled in *",
            "*unittest runs the methods of a TestCase itself*def test_old(once_key)*",
        ]
    )
