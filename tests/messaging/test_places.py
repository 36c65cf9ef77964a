"""An outbox or inbox that is told where it lives by a face or a store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from semel import AsyncSemel, ConfigurationError, Semel
from semel.layers.namespace import Namespace
from semel.messaging import Inbox, Message, Outbox
from semel.messaging.places import place_of
from semel.store import Settings, open_store
from semel.stores.memory import MemoryStore
from tests.messaging.conftest import Home


def opened(kind: str, url: str) -> Any:
    if kind == "layer":
        return Namespace(open_store(url, Settings(), "sync"), "n")
    if kind == "store":
        return open_store(url, Settings(), "sync")
    if kind == "engine":
        return Semel(create_engine(url))
    return {"Semel": Semel, "AsyncSemel": AsyncSemel}[kind](url)


@pytest.mark.parametrize("kind", ["Semel", "AsyncSemel", "store", "layer", "engine"])
def test_a_face_and_a_store_tell_where_they_live(tmp_path: Path, kind: str) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    given = opened(kind, url)
    engine = create_engine(url)
    with Outbox(given) as outbox, Inbox(given, consumer="c") as inbox:
        outbox.create()
        with Session(engine) as session, session.begin():
            outbox.add(session, Message("t", {"n": 1}, id="m1"))
        assert [each.id for each in asyncio.run(outbox.waiting())] == ["m1"]
        with Session(engine) as session, session.begin():
            assert inbox.process(session, Message("t", {"n": 1}, id="m1"), lambda message: None) is True
    engine.dispose()
    if kind == "engine":
        place_of(given).dispose()


@pytest.mark.parametrize("face", [Semel, AsyncSemel])
def test_the_names_are_those_of_whoever_knows_the_url_only(tmp_path: Path, face: Any) -> None:
    once = face(f"sqlite:///{tmp_path}/app.db", table="jobs", prefix="jobs")
    with Outbox(once) as outbox, Inbox(once, consumer="c") as inbox, Outbox(once, table="own") as other:
        assert (outbox.table, inbox.table, other.table) == ("semel", "semel", "own")


def test_postgres_by_its_face(postgres_home: Home) -> None:
    with Semel(postgres_home.url, timeout=10) as once, Outbox(once, table=postgres_home.table) as outbox:
        outbox.create()
        with postgres_home.engine.begin() as connection:
            outbox.add(connection, Message("t", {"n": 1}, id="m1"))
        assert [each.id for each in asyncio.run(outbox.waiting())] == ["m1"]


def test_a_store_of_ones_own_is_refused_in_words() -> None:
    with pytest.raises(ConfigurationError, match="give it the URL or the SQLAlchemy engine"):
        Outbox(MemoryStore())
    with pytest.raises(ConfigurationError, match=r"messaging has no 'memory' database"):
        Outbox(Semel("memory://"))


def test_what_cannot_be_headers_is_refused_in_words() -> None:
    wrong: Any = "x"
    with pytest.raises(ConfigurationError, match="headers are a dict of strings, not str"):
        Message("t", {}, headers=wrong)


@pytest.mark.anyio
async def test_an_async_engine_is_told_of_its_own_create(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/app.db")
    outbox = Outbox(engine)
    with pytest.raises(ConfigurationError, match=r"acreate\(\)"):
        outbox.create()
    await outbox.acreate()
    assert await outbox.waiting() == []
    await engine.dispose()
