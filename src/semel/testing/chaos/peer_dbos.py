"""One DBOS worker, in DBOS's own words: the workflow id is the idempotency key, effects are steps or transactions.

Run as a file by a Python that has the package dbos (and need not have semel): `peers` starts it, with its plan as JSON.
It meets its fault at a named place and writes what happened into the ledger's files, as semel's workers do.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

PLAN: dict[str, Any] = json.loads(sys.argv[1])
FOLDER = Path(PLAN["folder"])
ROLE: str = PLAN["role"]
made_here: list[str] = []
struck: list[str] = []


def note(name: str, **line: Any) -> None:
    """One write per line: a kill tears nothing."""
    handle = os.open(FOLDER / name, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
    os.write(handle, json.dumps({"by": ROLE, "at": time.monotonic(), **line}).encode() + b"\n")
    os.close(handle)


def reach(point: str) -> None:
    """The victim's fault waits at its point; everybody else passes."""
    if ROLE != "victim" or point != PLAN["point"] or struck:
        return
    struck.append(point)
    note("faults", error="fault")
    if PLAN["fault"] == "kill":
        signal.raise_signal(signal.SIGKILL)
    elif PLAN["fault"] == "zombie":
        signal.raise_signal(signal.SIGSTOP)
    else:  # from outside, while this worker waits
        with (FOLDER / "question").open("wb") as pipe:
            pipe.write(b"?")
        with (FOLDER / "reply").open("rb") as pipe:
            pipe.read()


def main() -> None:
    dbos: Any = importlib.import_module("dbos")
    text: Any = importlib.import_module("sqlalchemy").text
    DBOS = dbos.DBOS  # noqa: N806 - its name
    url = PLAN["url"].replace("postgresql://", "postgresql+psycopg://")
    DBOS(
        config={
            "name": "chaos",
            "system_database_url": url,
            "log_level": "CRITICAL",
            "application_version": "1",
        }
    )
    source = dbos.SQLAlchemyDatasource.create(url)

    @DBOS.step()  # type: ignore[untyped-decorator]  # DBOS has no types there
    def outside(key: str) -> str:
        reach("effect.before")
        made_here.append(key)
        if (
            key == PLAN["key"]
        ):  # another one would be a leftover of another schedule, taken up at this worker's start
            note("effects", what="effect", peer=key if PLAN["mode"] == "keyed" else "")
        reach("effect.made")
        return "keyed peer" if PLAN["mode"] == "keyed" else f"{ROLE} {os.getpid()}"

    @source.transaction  # type: ignore[untyped-decorator]  # DBOS has no types there
    def inside(key: str) -> str:
        session = source.sql_session()
        reach("effect.before")
        made_here.append(key)
        row = {"k": key, "by": ROLE, "at": time.monotonic()}
        session.execute(text("INSERT INTO chaos_effects (k, made_by, made_at) VALUES (:k, :by, :at)"), row)
        reach("effect.made")
        return f"{ROLE} {os.getpid()}"

    @DBOS.workflow()  # type: ignore[untyped-decorator]  # DBOS has no types there
    def action(key: str) -> str:
        value: str = inside(key) if PLAN["mode"] == "tx" else outside(key)
        reach("step.stored")
        return value

    DBOS.launch()
    try:
        with dbos.SetWorkflowID(PLAN["key"]):
            value = action(PLAN["key"])
        note("answers", value=value, replayed=not made_here)
        reach("acked")
    except Exception as error:  # noqa: BLE001 - whatever it is, the ledger has it
        note("answers", error=type(error).__name__, text=str(error)[:2000])
    finally:
        sys.stdout.flush()
        os._exit(0)  # its threads need not be waited for


if __name__ == "__main__":
    main()
