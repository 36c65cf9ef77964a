"""R27: damaged records, hooks, peeks and failures that cannot be written."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from semel import ConfigurationError, InvalidKey, OutcomeUnknown, Semel, current_run
from semel.hooks import Contended, Executed, Failed, Replayed, TakenOver, Unrecorded
from semel.runtime import run_sync
from tests.within.lab import Lab, wait


def coloured(lab: Lab, body: Any) -> Any:
    return body if lab.colour == "async" else lambda *args: run_sync(body(*args))


async def _until(lab: Lab, condition: Any) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, "it never happened"
        if lab.colour == "async":
            await asyncio.sleep(0.005)
        else:
            time.sleep(0.005)


async def test_R27_an_unreadable_record_is_unknown_and_stays(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()
    await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))
    await tx.commit()
    lab.execute("UPDATE semel SET state = 'gibberish'")
    await tx.begin()
    with pytest.raises(OutcomeUnknown) as caught:
        await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))
    assert caught.value.unreadable
    with pytest.raises(OutcomeUnknown):
        await wait(once.within(tx.target).peek("k1"))
    await tx.insert("after")
    await tx.commit()
    assert (lab.orders("k1"), lab.orders("after"), lab.records("k1")) == (1, 1, ["gibberish"])


async def test_R27_a_peek_takes_no_lock_and_sees_what_is_committed(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()
    other = await lab.tx() if not lab.driver.startswith("django") else None  # one connection per thread there
    await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))
    assert (await wait(once.within(tx.target).peek("k1"))).state == "done"
    if other is not None:
        assert await wait(once.within(other.target).peek("k1")) is None
        await other.rollback()
    await tx.commit()
    assert (await wait(once.peek("k1"))).state == "done"


async def test_R27_a_peek_without_tables_is_told(fresh_lab: Lab) -> None:
    lab = fresh_lab
    once = lab.face(create=False)
    tx = await lab.tx()
    with pytest.raises(ConfigurationError, match="schema sql"):
        await wait(once.within(tx.target).peek("k1"))
    await tx.insert("after")
    await tx.commit()
    assert lab.orders("after") == 1


async def test_R27_hooks_hear_of_it(few: Lab) -> None:
    lab = few
    heard: list[Any] = []
    once, tx = await lab.ready(hooks=[heard.append])
    bound = once.within(tx.target)
    await wait(bound.execute("k1", lab.work(tx), "k1"))
    await wait(bound.execute("k1", lab.work(tx), "k1"))
    with pytest.raises(ValueError, match="no"):
        await wait(bound.execute("k2", lab.raising(tx, ValueError("no")), "k2"))
    await tx.rollback()
    kinds = [type(event) for event in heard]
    assert [kind for kind in kinds if kind in {Executed, Replayed, Failed, TakenOver, Contended}] == [
        Executed,
        Replayed,
        Failed,
    ]


async def test_R27_a_failure_that_somebody_else_decided_meanwhile_is_noted(few: Lab) -> None:
    """Between the rollback and the second connection another caller may run the key: his outcome counts."""
    lab = few
    once, tx = await lab.ready()

    class Unlucky(Exception):
        pass

    async def body(key: str) -> None:
        await tx.insert(key)
        raise Unlucky

    def decide(error: Exception) -> str:
        # on_error is asked after the rollback: exactly then the other caller comes.
        lab_two = Lab(_sync_twin(lab), lab.place)
        face = lab_two.face()

        def rival() -> None:
            face.execute("k1", lambda: "rival")
            face.close()

        import threading

        thread = threading.Thread(target=rival)
        thread.start()
        thread.join(20)
        return "replay"

    with pytest.raises(Unlucky) as caught:
        await wait(once.within(tx.target).execute("k1", coloured(lab, body), "k1", on_error=decide))
    assert any("another outcome" in note for note in caught.value.__notes__)
    await tx.commit()
    assert (await wait(once.peek("k1"))).state == "done"


def _sync_twin(lab: Lab) -> str:
    return {"sqlite": "sqlite3", "postgresql": "psycopg", "mysql": "pymysql"}[lab.dialect]


def test_R27_a_failure_that_can_never_be_written_is_told_to_the_hooks(make: Any) -> None:
    lab: Lab = make("sqlite3")
    heard: list[Any] = []
    once = lab.face(hooks=[heard.append], settle_timeout=0.1, timeout=1)
    once.peek("warm-up")
    connection = sqlite3.connect(lab.place)
    connection.execute("INSERT INTO orders (k) VALUES ('before')")  # the caller keeps the write lock

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        once.within(connection).execute("k1", fails, on_error="replay")
    assert "settle_timeout" in caught.value.__notes__[0]
    until = time.monotonic() + 20
    while not any(isinstance(event, Unrecorded) for event in heard):
        assert time.monotonic() < until
        time.sleep(0.005)
    connection.commit()
    assert once.peek("k1") is None
    connection.close()
    once.close()


async def test_R27_a_ref_that_cannot_be_stored_undoes_the_run(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()

    async def body(key: str) -> None:
        await tx.insert(key)
        current_run().set_ref("a\0b")

    with pytest.raises(InvalidKey, match="ref"):
        await wait(once.within(tx.target).execute("k1", coloured(lab, body), "k1"))
    await tx.insert("after")
    await tx.commit()
    assert (lab.orders("k1"), lab.records("k1"), lab.orders("after")) == (0, [], 1)


async def test_R27_a_cancelled_function_under_hold_is_unknown(make_coloured: Any) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        started = asyncio.Event()

        async def stuck(key: str) -> None:
            await tx.insert(key)
            started.set()
            await asyncio.Event().wait()

        task = asyncio.ensure_future(once.within(tx.target).execute("k1", stuck, "k1", on_unknown="hold"))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await tx.commit()
        assert (lab.orders("k1"), lab.records("k1")) == (0, ["unknown"])

    await make_coloured("asyncpg", body)


def test_R27_consume_switched_off(make: Any) -> None:
    lab: Lab = make("sqlite3")
    with pytest.warns(UserWarning, match="switched off"):
        once = Semel(lab.url, enabled=False)
    connection = sqlite3.connect(lab.place)
    ran: list[int] = []
    assert once.within(connection).consume("k1", ran.append, 1)
    assert once.within(connection).consume("k1", ran.append, 2)
    assert ran == [1, 2]
    connection.close()
    once.close()


def test_a_claim_that_was_left_without_an_end_does_not_hold_its_connection(tmp_path: Path) -> None:
    path = tmp_path / "left.db"
    with Semel(f"sqlite:///{path}") as once, sqlite3.connect(path, isolation_level=None) as connection:
        once.create()
        connection.execute("BEGIN")
        once.within(connection).claim("k").__enter__()  # and then forgotten
        gc.collect()
        connection.rollback()
        connection.execute("BEGIN")
        assert once.within(connection).execute("k", int).value == 0
        connection.commit()
    connection.close()


@pytest.mark.parametrize("charset", ["latin1", "ascii"])
@pytest.mark.parametrize("driver", ["pymysql", "asyncmy"])
async def test_R2_a_connection_of_another_character_set_reads_what_was_written(
    make_coloured: Any, driver: str, charset: str
) -> None:
    """MariaDB gave a question mark for every character that the caller's connection cannot say: in a replay's ref, too."""

    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        await tx.run(f"SET NAMES {charset}")

        async def work() -> str:
            current_run().set_ref("ord_я")
            return "я"

        fn = work if lab.colour == "async" else lambda: run_sync(work())
        for replayed in (False, True):
            outcome = await wait(once.within(tx.target).execute("kя", fn, labels={"a": "я"}))
            assert (outcome.value, outcome.ref, outcome.replayed) == ("я", "ord_я", replayed)
        record = await wait(once.within(tx.target).peek("kя"))
        assert (record.scope.key, record.labels) == ("kя", {"a": "я"})
        await tx.commit()

    await make_coloured(driver, body)
