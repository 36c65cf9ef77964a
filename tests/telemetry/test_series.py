"""The table of series: every event is in it, names and labels follow the conventions."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

from semel import hooks
from semel.grpc.policy import UnkeyedRetry
from semel.http.problem import Answered
from semel.keys import Scope, make_scope
from semel.messaging import events
from semel.telemetry import series
from semel.telemetry.series import READERS, SERIES, Book

ROOTS = {hooks.HookEvent, events.RelayEvent}


def all_events() -> Iterator[type]:
    for module in (hooks, events):
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if dataclasses.is_dataclass(kind) and kind not in ROOTS and kind is not Scope:
                yield kind
    yield from (Answered, UnkeyedRetry)


def example(kind: type[Any]) -> Any:
    """An event with something in every field."""
    hints = get_type_hints(kind)
    given: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if hint is Scope:
            given[field.name] = make_scope("semel", "acme", "charge", "k", "full")
        elif hint in (str, int, float, bool):
            given[field.name] = hint(1)
        elif hint is BaseException or isinstance(hint, types.UnionType):
            given[field.name] = ValueError("x") if "BaseException" in str(hint) else "k"
        elif field.name == "pending":
            given[field.name] = {"orders": 3, "lost": 2}
        elif field.name == "unroutable":
            given[field.name] = ("lost",)
    return kind(**given)


@pytest.mark.parametrize("kind", list(all_events()), ids=lambda kind: kind.__name__)
def test_every_event_has_a_series(kind: type) -> None:
    book = Book(tenant=True, most=10)
    found = list(book.read(example(kind)))
    assert found, f"{kind.__module__}.{kind.__qualname__} is counted nowhere"
    for one, value, labels in found:
        assert one in SERIES
        assert len(labels) == len(book.labels_of(one))
        assert all(type(label) is str for label in labels)
        assert value >= 0


def test_every_reader_reads_an_event_that_exists() -> None:
    assert set(READERS) == {f"{kind.__module__}.{kind.__qualname__}" for kind in all_events()}


@pytest.mark.parametrize("one", SERIES, ids=lambda one: one.name)
def test_a_name_follows_the_conventions_of_prometheus(one: series.Series) -> None:
    assert re.fullmatch(r"semel(_[a-z]+)+", one.name)
    assert one.name.endswith("_total") == (one.kind == "counter")
    assert one.name.endswith("_seconds") == (one.kind == "histogram" or one is series.LAG)
    assert one.help.endswith(".")
    assert not {"key", "id", "message", "tenant"} & set(one.labels)


def test_a_label_with_too_many_values_ends_in_other() -> None:
    book = Book(tenant=False, most=2)
    read = [
        next(iter(book.read(events.Parked("t", None, topic, "m", 1, "r")))).labels
        for topic in ("a", "b", "c", "d", "a")
    ]
    assert read == [("a",), ("b",), ("other",), ("other",), ("a",)]


def test_what_is_not_told_any_more_is_zero() -> None:
    book = Book(tenant=False, most=10)
    first = {(one.name, labels): value for one, value, labels in book.read(events.Backlog({"a": 3, "b": 1}))}
    then = {(one.name, labels): value for one, value, labels in book.read(events.Backlog({"b": 2}))}
    assert first["semel_relay_backlog", ("a",)] == 3
    assert then["semel_relay_backlog", ("a",)] == 0
    assert then["semel_relay_backlog", ("b",)] == 2


def test_an_error_of_a_purge_is_counted_and_a_stranger_is_not() -> None:
    book = Book(tenant=False, most=10)
    assert [(one.name, labels) for one, _, labels in book.read(OSError("x"))] == [
        ("semel_background_errors_total", ("OSError",))
    ]
    assert list(book.read(object())) == []


@pytest.mark.parametrize(
    "module, library",
    [
        ("prometheus", "prometheus_client"),
        ("server", "prometheus_client"),
        ("opentelemetry", "opentelemetry"),
        ("relays", "sqlalchemy"),
    ],
)
def test_without_its_library_a_hook_says_which_extra_to_install(module: str, library: str) -> None:
    code = (
        f"import sys; sys.modules['{library}'] = None\n"
        "from semel import ConfigurationError\n"
        f"try:\n    import semel.telemetry.{module}\n"
        "except ConfigurationError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.search(r'pip install "semel\[(messaging,)?telemetry\]"', done.stdout)


def test_the_hooks_need_no_library_of_messaging_http_or_grpc() -> None:
    code = (
        "import sys\n"
        "for name in ('sqlalchemy', 'grpc', 'redis', 'httpx'): sys.modules[name] = None\n"
        "from semel import Semel\n"
        "from semel.telemetry.prometheus import PrometheusHook\n"
        "from semel.telemetry.opentelemetry import OpenTelemetryHook, traced\n"
        "hook = PrometheusHook()\n"
        "Semel('memory://', hooks=[hook, OpenTelemetryHook()]).execute('k', lambda: 1)\n"
        "print(hook.registry.get_sample_value('semel_executions_total', {'operation': 'default'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "1.0\n", done.stderr


def test_gauges_beyond_the_limit_are_told_together_and_end() -> None:
    book = Book(tenant=False, most=3)

    def read(pending: dict[str, int]) -> dict[tuple[str, ...], float]:
        event = events.Backlog(pending)
        return {r.labels: r.value for r in book.read(event) if r.series is series.BACKLOG}

    assert read({f"t{n}": 100 for n in range(10)}) == {
        ("t0",): 100,
        ("t1",): 100,
        ("t2",): 100,
        ("other",): 700,
    }
    assert read({"t1": 5}) == {("t1",): 5, ("t0",): 0, ("t2",): 0, ("other",): 0}
