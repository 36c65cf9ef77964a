"""A pytest plugin: your own handler, killed, paused and interrupted in every window, on your own store.

    def test_an_order_is_charged_once(exactly_once):
        report = exactly_once(handle_order, arguments=lambda key: (key,), effects=lambda key: ledger.count(key))
        assert report.holds, report

The fixture `exactly_once` is `prove` below. Under `@pytest.mark.exactly_once(effects=…)` the test itself is the handler; it
gets its key from the fixture `once_key`. It needs `os.fork` (Linux, macOS).
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from datetime import timedelta
from functools import partial, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import TestCase

import msgspec
import pytest

from semel.errors import ConfigurationError

if TYPE_CHECKING:
    from semel.testing.plugin_report import Report
    from semel.testing.plugin_tries import Case, Discovery, Try
    from semel.testing.plugin_windows import Fault, Window

__all__ = [
    "exactly_once",
    "once_key",
    "prove",
    "pytest_configure",
    "pytest_pyfunc_call",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
]

# A failed assert shows both sides only in modules that were named before their import.
pytest.register_assert_rewrite("semel.testing.sinks")

# What is wrong stands in the message: pytest shows the lines of the test, and these only with --full-trace.
__tracebackhide__ = True

_AGAIN = 2  # how often a window that was missed is tried again, alone
_ENOUGH = 3  # how many windows that were stuck must be so alone for the rest to be believed
_MARK = "exactly_once(effects, **options): run this test as a handler through every crash window; see semel's docs"


def prove(
    run: Callable[..., Any],
    *,
    effects: Callable[..., int],
    arguments: Sequence[Any] | Callable[[str], Sequence[Any]] = (),
    reset: Callable[[], Any] | None = None,
    expected: int = 1,
    faults: Iterable[Fault] = ("kill", "zombie", "interrupt"),
    lease: float | timedelta | None = 0.3,
    also: Iterable[ModuleType | str] = (),
    without: Iterable[ModuleType | str] = (),
    patience: float | timedelta = 30.0,
    lanes: int = 4,
) -> Report:
    """Run the handler through every window and say where its effect is doubled or lost.

    `run` is called in forked children, so it opens its connections itself. `arguments` makes its arguments from a key that
    is new for every try; where they are fixed, `reset` must empty everything between tries. `effects` counts (given the key
    if it takes one) from a file, a database or a server: it runs in a process of its own. `lease` shortens the leases of
    the faces that the handler uses, in the children only; None leaves them. The lines of all files of the user's are windows:
    `also` names modules that do not count as such, `without` those that stand for another process.
    """
    from semel.testing.plugin_options import checked, checked_faults, name_of
    from semel.testing.plugin_report import Report, merged
    from semel.testing.plugin_windows import chosen

    started = time.monotonic()
    case = checked(
        run=run,
        effects=effects,
        arguments=arguments,
        reset=reset,
        expected=expected,
        lease=lease,
        also=also,
        without=without,
        patience=patience,
        lanes=lanes,
    )
    struck = checked_faults(faults)
    discovery = _discovered(case)
    seen = discovery.run
    case = msgspec.structs.replace(
        case, pace=discovery.seconds, counting=discovery.counting, awaited=seen.awaited
    )
    windows, left_out = chosen(seen.windows, seen.depths, case.places)
    plan: list[tuple[Window, Fault]] = [(window, fault) for window in windows for fault in struck]
    tries = _tried(case, plan, lanes=1 if reset else lanes)
    return Report(
        handler=name_of(run),
        expected=expected,
        tries=merged(seen.windows, tries),
        faults=struck,
        seconds=time.monotonic() - started,
        left_out=left_out,
    )


def _discovered(case: Case) -> Discovery:
    from semel.testing.plugin_tries import Discovery, discover

    (answer,) = _in_lanes([lambda: [msgspec.to_builtins(discover(case))]])
    found = msgspec.convert(answer, Discovery)
    if found.misuse:
        raise ConfigurationError(f"exactly_once: {found.error}")
    if found.error:
        raise RuntimeError(f"the handler fails without any fault: {found.error}\n{found.story}".rstrip())
    if found.effects != case.expected:
        raise ConfigurationError(
            f"exactly_once: after one run without any fault effects() counts {found.effects}, expected={case.expected}. "
            + _miscounted(case, found)
        )
    if found.unused:
        raise ConfigurationError(
            f"exactly_once: effects() counts {found.unused} for a key that was never used: it takes in other keys. Count those of the "
            "key that it is given, effects=lambda key: …, or give reset= a function that empties everything"
        )
    if unmet := sorted(case.places.without - found.run.left_out):
        raise ConfigurationError(
            f"exactly_once: without= names {', '.join(unmet)}, and the handler passed no line of it in a run without any fault, so that "
            "nothing would be left out. Is it another file than the one that runs? Give the module itself, without=[module]; or take "
            "it out of without="
        )
    return found


def _miscounted(case: Case, found: Discovery) -> str:
    """What is most likely wrong."""
    if found.effects > case.expected:
        return "Does it count the effects of other keys as well, effects=lambda key: …? Or does one run have more, expected=n?"
    if found.run.left:
        return (
            f"The handler returned while {' and '.join(found.run.left)} still ran. Its process ends when it returns (by os._exit), and "
            "with it what is left to the background: make the effect before it returns, join the thread, await the task"
        )
    return (
        "Did the handler make an effect for this key at all? And effects() must count from a file, a database or a server: the "
        "handler ran in another process"
    )


def _tried(case: Case, plan: list[tuple[Window, Fault]], *, lanes: int) -> list[Try]:
    from semel.testing.plugin_tries import Try, repeat, try_window

    def lane(numbers: Sequence[int]) -> list[Any]:
        return [msgspec.to_builtins((at, try_window(case, *plan[at]))) for at in numbers]

    def alone(numbers: Sequence[int]) -> list[Any]:
        found: list[Any] = []
        stuck = 0
        for at in numbers:
            # Each costs all of `patience`. After so many the handler is stuck by itself: the others are taken at their word.
            if tries[at].verdict == "stuck" and stuck >= _ENOUGH:
                continue
            again = try_window(case, *plan[at])
            stuck += again.verdict == "stuck"
            found.append(msgspec.to_builtins((at, again)))
        return found

    everything = range(len(plan))
    answers = _in_lanes([partial(lane, everything[number::lanes]) for number in range(lanes)])
    tries = dict(msgspec.convert(answers, list[tuple[int, Try]]))
    # A sleeping worker may hold a lock that keeps another try's worker from coming as far as its window, another zombie's heirs
    # from taking over, and clients from success: alone they will.
    crowded = [at for at in tries if lanes > 1 and (tries[at].blocked or tries[at].verdict == "stuck")]
    tries |= dict(msgspec.convert(_in_lanes([lambda: alone(crowded)]), list[tuple[int, Try]]))
    for _ in range(_AGAIN):
        again = [at for at, each in tries.items() if each.verdict == "missed" and not each.too_late]
        tries |= dict(msgspec.convert(_in_lanes([partial(lane, again)]), list[tuple[int, Try]]))
    (twice,) = _in_lanes([lambda: [msgspec.to_builtins(repeat(case))]])
    tries[len(plan)] = msgspec.convert(twice, Try)
    return [tries[at] for at in sorted(tries)]


def _in_lanes(works: Sequence[Callable[[], list[Any]]]) -> list[Any]:
    """Each in a process that does nothing but fork: this one, with the test runner's threads, is a bad parent."""
    from semel.testing.plugin_children import Child

    children = [Child(lambda _, work=work: work()) for work in works]  # type: ignore[misc]  # mypy knows no lambda with a default
    found: list[Any] = []
    try:
        for child in children:
            words = child.words()[1]
            if words.misuse:
                raise ConfigurationError(f"exactly_once: {words.error}")
            if not words.ok:
                raise RuntimeError(f"exactly_once could not go on: {words.error}\n{words.story}".rstrip())
            found += words.value
    finally:
        for child in children:
            child.end()
    return found


# ------------------------------------------------------------------------------------------------- pytest
_reports: pytest.StashKey[list[Report]] = pytest.StashKey()
_handler: pytest.StashKey[Callable[..., Any]] = pytest.StashKey()


@pytest.fixture
def exactly_once(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Run a handler through every crash window; see `prove`. A test that fails shows its reports."""
    kept: list[Report] = []
    request.node.stash[_reports] = kept

    @wraps(prove)
    def proved(*args: Any, **kwargs: Any) -> Report:
        if "effects" not in kwargs:
            raise ConfigurationError(
                "exactly_once needs effects=, a function that counts the effects of a key: exactly_once(handler, effects=count)"
            )
        if len(args) + ("run" in kwargs) != 1:
            raise ConfigurationError(
                "exactly_once needs one handler, and everything else by its name: exactly_once(handler, effects=count)"
            )
        _check_options(name for name in kwargs if name != "run")
        report = prove(*args, **kwargs)
        kept.append(report)
        return report

    return proved


def _check_options(given: Iterable[str]) -> None:
    known = [name for name in inspect.signature(prove).parameters if name != "run"]
    if unknown := [name for name in given if name not in known]:
        raise ConfigurationError(
            f"exactly_once has no option {', '.join(unknown)}; it has {', '.join(known)}"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """An assertion's message is cut; the tables of a failed test are not."""
    outcome = yield
    if call.when == "call" and outcome.failed:
        for report in item.stash.get(_reports, ()):
            if not report.holds:
                outcome.sections.append(("exactly once", str(report)))
    return outcome


@pytest.fixture
def once_key() -> str:
    """The key of this try, under `@pytest.mark.exactly_once`."""
    return f"key-{os.urandom(6).hex()}"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARK)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("exactly_once") is None or not isinstance(item, pytest.Function):
        return
    if item.cls is not None and issubclass(item.cls, TestCase):
        raise ConfigurationError(
            "@pytest.mark.exactly_once: unittest runs the methods of a TestCase itself, so that nothing would be proved: write the "
            f"test as a function, def {item.name}(once_key), or as a method of a plain class"
        )
    # A plugin for async tests may put something of its own around it, just before the call.
    item.stash[_handler] = item.obj


@pytest.hookimpl(wrapper=True)  # before every plugin that would call an async test by itself
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A marked test is a handler: to prove it takes the place of calling it."""
    marker = pyfuncitem.get_closest_marker("exactly_once")
    if marker is None:
        return (yield)
    before = pyfuncitem.obj
    pyfuncitem.obj = lambda **_: _prove_marked(pyfuncitem, marker)
    try:
        return (yield)
    finally:
        pyfuncitem.obj = before


def _prove_marked(item: pytest.Function, marker: pytest.Mark) -> None:
    if "effects" not in marker.kwargs:
        raise ConfigurationError(
            "@pytest.mark.exactly_once needs effects=, a function that counts the effects of a key: "
            "@pytest.mark.exactly_once(effects=count)"
        )
    _check_options(marker.kwargs)
    handler = item.stash[_handler]
    names = tuple(inspect.signature(handler).parameters)
    if "once_key" not in names and not {"arguments", "reset"} & marker.kwargs.keys():
        raise ConfigurationError(
            f"@pytest.mark.exactly_once: a marked test must take once_key itself, def {item.originalname}(once_key, …): it is another "
            "one in every try, which a fixture, made once, cannot know"
        )
    given = {name: item.funcargs[name] for name in names}
    report = prove(
        handler,
        **{
            "arguments": lambda key: tuple(key if name == "once_key" else given[name] for name in names),
            **marker.kwargs,
        },
    )
    if not report.holds:
        pytest.fail(str(report), pytrace=False)
