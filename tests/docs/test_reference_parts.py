"""The reference of messaging and of the HTTP clients is complete: every public name, option, field and default."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest
from sqlalchemy import MetaData

from docs import generate
from semel import messaging
from semel.http import client
from semel.http.clients.options import Settings
from semel.messaging.consumer import Consumer, Counts
from semel.messaging.events import Backlog, log_event
from semel.messaging.letters import Admitted
from semel.messaging.pages import Line, Waiting
from semel.messaging.sinks.handler import HandlerSink
from semel.stores import sqlalchemy
from tests.docs.markdown import ROOT, rows, section

REFERENCE = ROOT / "docs" / "reference"
MESSAGING = (REFERENCE / "messaging.md").read_text("utf-8")
CLIENTS = section((REFERENCE / "http.md").read_text("utf-8"), "Clients")
EMPTY = inspect.Parameter.empty


def spelled(default: Any) -> str:
    if default is EMPTY or default is dataclasses.MISSING:
        return ""
    return "`(log_event,)`" if default == (log_event,) else f"`{default!r}`"


def options(call: Callable[..., object], *leave: str) -> dict[str, str]:
    """The keyword options of a call and their defaults."""
    found = inspect.signature(call).parameters.values()
    return {
        one.name: spelled(one.default)
        for one in found
        if one.kind is one.KEYWORD_ONLY and one.name not in leave
    }


def fields(kind: Any) -> dict[str, str]:
    if dataclasses.is_dataclass(kind):
        return {
            one.name: spelled({} if one.default_factory is dict else one.default)
            for one in dataclasses.fields(kind)
        }
    return {one.name: "" for one in msgspec.structs.fields(kind)}


def missing(names: Iterable[str], text: str) -> list[str]:
    return [name for name in names if not re.search(rf"`[^`]*\b{name}\b[^`]*`", text)]


@pytest.mark.parametrize("module, text", [(messaging, MESSAGING), (client, CLIENTS)])
def test_every_public_name_is_documented(module: Any, text: str) -> None:
    assert missing(module.__all__, text) == []


@pytest.mark.parametrize(
    "title, call, leave",
    [
        ("Outbox", messaging.Outbox.__init__, ()),
        ("Relay", messaging.Relay.__init__, ()),
        ("Inbox", messaging.Inbox.__init__, ()),
        ("Consumer", Consumer.__init__, ("middlewares", "emit")),  # given by the inbox
    ],
)
def test_every_option_of_messaging_is_documented_with_its_default(
    title: str, call: Callable[..., object], leave: tuple[str, ...]
) -> None:
    documented = rows(section(MESSAGING, title).partition("| name |")[0].partition("option of `process`")[0])
    told = {name: cells[0] for name, cells in documented.items() if name in options(call)}
    assert told == options(call, *leave)


def test_every_option_of_processing_and_handlers_is_documented() -> None:
    documented = rows(section(MESSAGING, "Inbox").partition("| option of `process`")[2])
    wanted = options(messaging.Inbox.process) | options(messaging.Inbox.handler)
    assert {name: cells[0] for name, cells in documented.items()} == wanted


@pytest.mark.parametrize("kind", [messaging.Message, messaging.Route, messaging.Windows])
def test_every_field_of_what_a_user_makes_is_documented_with_its_default(kind: type) -> None:
    documented = rows(section(MESSAGING, kind.__name__).partition("| name |")[0])
    assert {name: cells[0] for name, cells in documented.items()} == fields(kind)


@pytest.mark.parametrize("kind", [messaging.Report, messaging.DeadLetter])
def test_every_field_of_what_a_user_gets_is_documented(kind: type) -> None:
    wanted = {name for name in dir(kind) if not name.startswith("_")}
    assert set(rows(section(MESSAGING, kind.__name__))) == wanted


@pytest.mark.parametrize(
    "title, kind",
    [("Outbox", Waiting), ("Relay", Line), ("Relay", Backlog), ("Inbox", Admitted), ("Consumer", Counts), ("Sinks", messaging.Row)],
)  # fmt: skip
def test_every_field_of_what_is_listed_is_named(title: str, kind: type) -> None:
    assert missing(fields(kind), section(MESSAGING, title)) == []


@pytest.mark.parametrize("kind", [messaging.Fenced, messaging.SinkUnavailable, messaging.Rejected])
def test_every_attribute_of_an_error_is_documented(kind: type) -> None:
    (told,) = rows(section(MESSAGING, "Sinks"))[kind.__name__]
    assert missing(options(kind), told) == []


@pytest.mark.parametrize("title, package", [("Sinks", "sinks"), ("Consumer", "sources")])
def test_every_option_of_a_sink_and_a_source_is_documented(title: str, package: str) -> None:
    kinds = [*generate.ways(f"semel.messaging.{package}"), *([HandlerSink] if package == "sinks" else [])]
    wanted = {name for kind in kinds for name in inspect.signature(kind).parameters}
    text = section(MESSAGING, title)
    assert wanted <= set(rows(text[text.index("| option | of | meaning |") :]))


# ------------------------------------------------------------------------------------------------- clients


def test_every_option_of_a_client_is_documented_with_its_default() -> None:
    documented = rows(section(CLIENTS, "Options of a client"))
    defaults = dict(zip(Settings.__struct_fields__, Settings.__struct_defaults__, strict=True))
    assert set(documented) == {*defaults, "keys"} == {*client.ClientOptions.__annotations__, "keys"}
    for name, default in defaults.items():
        told = documented[name][0]
        if isinstance(default, frozenset):
            assert told == ", ".join(f"`{method}`" for method in sorted(default))
        else:
            assert told == f"`{None if default == float('inf') else default!r}`", name


def test_every_option_of_one_request_is_documented() -> None:
    documented = rows(section(CLIENTS, "Options of one request"))
    assert set(documented) == set(client.RequestOptions.__annotations__)


def test_every_option_of_a_store_of_keys_is_documented_with_its_default() -> None:
    documented = rows(section(CLIENTS, "DurableKeys").partition("| name |")[0])
    assert {name: cells[0] for name, cells in documented.items()} == options(client.DurableKeys.__init__)


@pytest.mark.parametrize("kind", [client.Delivered, client.KeyState, client.Retrying])
def test_every_field_that_a_client_tells_is_documented(kind: type) -> None:
    (told,) = rows(section(CLIENTS, "Names"))[kind.__name__]
    assert missing([name for name in dir(kind) if not name.startswith("_")], told) == []


# ------------------------------------------------------------------------------------------ tables of SQLAlchemy


def test_every_name_and_column_for_sqlalchemy_is_documented() -> None:
    text = section((REFERENCE / "api.md").read_text("utf-8"), "SQLAlchemy tables")
    records, audit, _ = sqlalchemy.tables(MetaData())
    assert missing(sqlalchemy.__all__, text) == []
    assert missing(sqlalchemy.Tables._fields, text) == []
    assert missing([*records.columns.keys(), *audit.columns.keys()], text) == []
    assert set(records.columns.keys()) == set(sqlalchemy.RecordColumns.__annotations__)


def test_every_kind_of_client_that_is_taken_is_documented() -> None:
    text = section((REFERENCE / "stores.md").read_text("utf-8"), "Clients in place of a URL")
    assert (
        missing(["Redis", "asyncpg.Pool", "ConnectionPool", "asyncmy.Pool", "Engine", "AsyncEngine"], text)
        == []
    )


# ------------------------------------------------------------------------------------------ what is generated


@pytest.mark.parametrize("kind", generate._MEMBERS)
def test_every_member_says_what_it_does(kind: type) -> None:
    assert [line for line in generate.members(kind).values() if line.endswith("|  |")] == []


def test_a_missing_option_and_a_wrong_default_are_seen() -> None:
    def call(*, lease: float = 10, name: str | None = None) -> None: ...

    text = "| option | default | meaning |\n|---|---|---|\n| `lease` | `5` | … |\n"
    assert {name: cells[0] for name, cells in rows(text).items()} != options(call)
    assert missing(["lease", "name"], text) == ["name"]
