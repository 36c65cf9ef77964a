"""What the checkers accept of messaging also works: the typed file runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from semel.messaging import Inbox
from tests.typing import messaging_api


def test_the_typed_messaging_runs(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/a.db")
    with Inbox(f"sqlite:///{tmp_path}/a.db", consumer="c") as inbox:
        inbox.create()
        messaging_api.sync_sessions(inbox, engine)

        async def in_a_loop() -> None:
            there = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/a.db")
            await messaging_api.async_sessions(inbox, there)
            await there.dispose()

        asyncio.run(in_a_loop())
    engine.dispose()
    messaging_api.routes()
