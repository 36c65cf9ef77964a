"""Asking the doctor, as a command and as data."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from typer.testing import CliRunner

from semel import AsyncSemel, Semel
from semel.cli.commands import app
from semel.doctor import Checkup, examine, examine_async, judge
from semel.doctor.page import lines

__all__ = ["agree", "doctor", "doctor_data", "told"]


def doctor(*words: str, code: int) -> str:
    """What the command prints."""
    done = CliRunner().invoke(
        app, ["doctor", *words], env={"COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb"}
    )
    assert done.exit_code == code, done.output
    return done.output


def doctor_data(*words: str, code: int) -> Any:
    return json.loads(doctor(*words, "--json", code=code))


def told(checkup: Checkup) -> str:
    return "\n".join(lines(checkup, judge(checkup)))


def agree(url: str) -> Checkup:
    """The doctor, the sync and the async face say the same about one store."""
    checkup = examine(url)
    with Semel(url) as once:
        assert once.guarantee() == checkup.guarantee

    async def asked() -> None:
        async with AsyncSemel(url) as once:
            assert await once.guarantee() == checkup.guarantee
        assert (await examine_async(url)).guarantee == checkup.guarantee

    asyncio.run(asked())
    return examine(url)
