"""R27: a key has one record, in the table that the face means, whatever else the connection can see or is doing."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from semel import AsyncSemel, ConfigurationError, Found, InProgress, Semel, StoreUnavailable
from semel.layers import Layer
from semel.within import engine
from tests.within.lab import Lab, wait
from tests.within.test_decisions import coloured
from tests.within.test_many_claims import enter, leave

# ----------------------------------------------------------------------------------------------- SQLite's files


def faces(folder: Path, *names: str) -> list[Semel]:
    made = [Semel(f"sqlite:///{folder / name}") for name in names]
    for face in made:
        face.create()
    return made


@pytest.mark.parametrize("text", [str, bytes], ids=["str", "bytes"])
def test_R27_a_table_of_the_same_name_that_comes_first_is_refused(tmp_path: Path, text: Any) -> None:
    first, second = faces(tmp_path, "a.db", "b.db")
    connection = sqlite3.connect(tmp_path / "a.db")
    connection.text_factory = text
    connection.execute("ATTACH ? AS b", (str(tmp_path / "b.db"),))
    with pytest.raises(ConfigurationError, match=r"a\.db.*b\.db.*two records"):
        second.within(connection).execute("k1", int)
    assert first.within(connection).execute("k1", int).value == 0  # that of `main`
    connection.commit()
    assert first.peek("k1") is not None
    assert second.peek("k1") is None
    connection.close()


def test_R27_records_in_an_attached_file_are_used_if_nothing_comes_before_them(tmp_path: Path) -> None:
    (once,) = faces(tmp_path, "b.db")
    connection = sqlite3.connect(tmp_path / "a.db")
    connection.execute("CREATE TEMP TABLE mine (k)")
    connection.execute('ATTACH ? AS "it\'s ""b"""', (str(tmp_path / "b.db"),))
    assert once.within(connection).execute("k1", lambda: "made").value == "made"
    connection.commit()
    assert once.execute("k1", str).value == "made"
    connection.close()


def test_R27_a_temporary_table_of_the_same_name_is_refused(tmp_path: Path) -> None:
    (once,) = faces(tmp_path, "a.db")
    connection = sqlite3.connect(tmp_path / "a.db")
    connection.execute("CREATE TEMP TABLE Semel (k)")
    with pytest.raises(ConfigurationError, match=r":memory:.*two records"):
        once.within(connection).execute("k1", int)
    connection.close()


def test_R27_a_file_that_is_not_there_is_told_by_that_of_the_transaction(tmp_path: Path) -> None:
    (once,) = faces(tmp_path, "a.db")
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TEMP TABLE mine (k)")
    with pytest.raises(ConfigurationError, match=r"in the SQLite database ':memory:'.*a\.db"):
        once.within(connection).execute("k1", int)
    connection.close()


# ------------------------------------------------------------------------------- what this transaction has said


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "encrypted"])
async def test_R11_a_probes_word_is_seen_again_in_the_same_transaction(few: Lab, sealed: bool) -> None:
    lab = few
    once, tx = await lab.ready(**({"encrypt": {"k": b"0" * 32}} if sealed else {}))
    asked: list[int] = []

    async def lost() -> None:
        raise LookupError("no answer")

    def probe() -> Found:
        asked.append(1)
        return Found(7)

    with pytest.raises(LookupError):
        await wait(once.execute("k1", coloured(lab, lost), on_error="hold"))
    within = once.within(tx.target)
    for options in ({"on_unknown": probe}, {"on_unknown": probe}, {}):
        assert (await wait(within.execute("k1", coloured(lab, lost), **options))).value == 7
    await tx.commit()
    assert len(asked) == 1
    assert (await wait(once.execute("k1", coloured(lab, lost)))).value == 7


# -------------------------------------------------------------------------------------------- psycopg's pipelines


@pytest.mark.parametrize("begun", [False, True], ids=["first", "begun"])
@pytest.mark.parametrize("how", ["complete", "fail", "left"])
@pytest.mark.parametrize("driver", ["psycopg", "psycopg-async"])
async def test_R27_a_claim_that_ends_in_a_pipeline_is_refused(
    make_coloured: Any, driver: str, how: str, begun: bool
) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        if begun:
            await tx.insert("before")
        claim = await enter(lab, once.within(tx.target), "k1")
        pipeline = tx.target.pipeline()
        await wait(pipeline.__enter__() if lab.colour == "sync" else pipeline.__aenter__())
        await tx.insert("k1")
        with pytest.raises(ConfigurationError, match="pipeline mode") as caught:
            await wait(leave(lab, claim) if how == "left" else getattr(claim, how)("no"))
        if how == "complete":
            assert caught.value.__notes__ == [
                "semel: the savepoint could not be rolled back: roll the whole transaction back"
            ]
        out = (None, None, None)
        await wait(pipeline.__exit__(*out) if lab.colour == "sync" else pipeline.__aexit__(*out))
        await tx.rollback()
        assert (lab.orders("k1"), lab.records("k1")) == (0, [])

    await make_coloured(driver, body)


# --------------------------------------------------------------------------------------------- tables and schemas


@pytest.mark.parametrize("driver", ["sqlite3", "psycopg", "asyncpg", "pymysql"])
async def test_R27_faces_with_tables_of_their_own_run_the_same_key_inside_of_each_other(
    make_coloured: Any, driver: str
) -> None:
    async def body(lab: Lab) -> None:
        outer, inner = lab.face(table="semel_a"), lab.face(table="semel_b")
        for face in (outer, inner):
            await wait(face.create())
        tx = await lab.tx()

        async def nested() -> Any:
            with pytest.raises(InProgress, match="very transaction"):
                await wait(outer.within(tx.target).execute("k1", lab.work(tx), "k1"))
            return (await wait(inner.within(tx.target).execute("k1", lab.work(tx), "k1"))).value

        assert (await wait(outer.within(tx.target).execute("k1", coloured(lab, nested)))).value == "made"
        await tx.commit()
        for table in ("semel_a", "semel_b"):
            assert [row[0] for row in lab.execute(f"SELECT state FROM {table}")] == ["done"]
            lab.execute(f"DELETE FROM {table}")

    await make_coloured(driver, body)


@pytest.mark.parametrize("there", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "session-psycopg"])
async def test_R27_a_function_that_changes_search_path_is_told_so(
    make_coloured: Any, driver: str, there: bool
) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        lab.execute("CREATE SCHEMA IF NOT EXISTS branch")
        if there:
            await wait(lab.face(table="branch.semel").create())
        else:
            lab.execute("DROP SCHEMA branch CASCADE")
        await tx.insert("before")

        async def moves() -> None:
            await tx.run("SET LOCAL search_path TO branch")

        with pytest.raises(ConfigurationError, match=r'change search_path.*table="public.semel"'):
            await wait(once.within(tx.target).execute("k1", coloured(lab, moves)))
        named = lab.face(table="public.semel")
        await wait(named.within(tx.target).execute("k1", coloured(lab, moves)))
        await tx.commit()
        assert (lab.orders("before"), lab.records("k1")) == (1, ["done"])
        lab.execute("DROP SCHEMA IF EXISTS branch CASCADE")

    await make_coloured(driver, body)


async def test_R27_search_path_is_not_blamed_where_there_is_none(make_coloured: Any) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()

        def forgets() -> None:
            tx.target.execute("DELETE FROM semel")

        with pytest.raises(ConfigurationError, match="ended the transaction") as caught:
            once.within(tx.target).execute("k1", forgets)
        assert "search_path" not in str(caught.value)
        await tx.rollback()

    await make_coloured("sqlite3", body)


@pytest.mark.parametrize(("driver", "told"), [("psycopg", True), ("pymysql", False)])
async def test_R27_a_missing_table_speaks_of_search_path_where_there_is_one(
    make_coloured: Any, driver: str, told: bool
) -> None:
    async def body(lab: Lab) -> None:
        once, tx = lab.face(table="nowhere", create=False), await lab.tx()
        with pytest.raises(ConfigurationError, match="nowhere") as caught:
            once.within(tx.target).peek("k1")
        assert ('table="public.semel"' in str(caught.value)) is told

    await make_coloured(driver, body)


async def test_R27_a_function_that_moves_to_another_database_is_told_so(make_coloured: Any) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()

        def moves() -> None:
            tx.target.select_db("mysql")

        with pytest.raises(ConfigurationError, match=r"or the database \(USE\)"):
            once.within(tx.target).execute("k1", moves)
        tx.target.select_db(lab.mysql_place()["database"])
        await tx.rollback()
        assert lab.records("k1") == []

    await make_coloured("pymysql", body)


# ------------------------------------------------------------------------------------------- two-phase commit


async def test_R27_a_key_that_somebody_once_waited_for_is_settled_without_a_notification(
    make_coloured: Any,
) -> None:
    """PREPARE TRANSACTION refuses a transaction that notifies, and the mark of an earlier run would make the settle do so."""

    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        with pytest.raises(ZeroDivisionError):
            once.execute("k1", lambda: 1 / 0)
        lab.execute("UPDATE semel SET waited = true WHERE key = 'k1'")
        await tx.run("LISTEN semel")
        await tx.commit()
        once.within(tx.target).execute("k1", lab.work(tx), "k1")
        await tx.commit()
        assert list(tx.target.notifies(timeout=0.2)) == []
        assert lab.records("k1") == ["done"]

    await make_coloured("psycopg", body)


# ------------------------------------------------------------------------------------- no connection of our own


class Exhausted(Layer):
    """A store whose connections are all in use."""

    looks = 0

    async def peek(self, scope: Any) -> Any:
        self.looks += 1
        raise StoreUnavailable(f"no connection for {scope}")


@pytest.mark.parametrize("driver", ["sqlite3", "pymysql", "asyncmy"])
async def test_R27_a_face_without_a_connection_of_its_own_does_not_wait_for_one_at_every_call(
    make_coloured: Any, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        within = once.within(tx.target)
        outer = within._tx.outer
        outer.store = exhausted = Exhausted(outer.store)
        for key in ("k1", "k2", "k2"):
            await wait(within.execute(key, lab.work(tx), key))
        assert exhausted.looks == 1
        with monkeypatch.context() as later:
            later.setitem(engine._unseen_until, outer, 0.0)
            await wait(within.execute("k1", lab.work(tx), "k1"))
        assert exhausted.looks == 2
        await tx.commit()
        assert (lab.orders("k1"), lab.orders("k2")) == (1, 1)

    await make_coloured(driver, body)


async def test_R27_a_pool_that_the_callers_transaction_exhausts_stalls_it_once(mariadb_server: Any) -> None:
    import asyncmy

    parts = urlsplit(mariadb_server.database())
    pool = await asyncmy.create_pool(
        minsize=1,
        maxsize=1,
        host=parts.hostname,
        port=parts.port,
        user=parts.username,
        database=parts.path[1:],
    )
    async with AsyncSemel(pool, timeout=1) as once:
        await once.create()
        async with pool.acquire() as connection:
            took = []
            for key in "abc":
                start = time.monotonic()
                await connection.begin()
                assert (
                    await asyncio.wait_for(once.within(connection).execute(key, lambda: 1), 30)
                ).value == 1
                await connection.commit()
                took.append(time.monotonic() - start)
    pool.close()
    await pool.wait_closed()
    assert min(took[1:]) < took[0] / 2, took
