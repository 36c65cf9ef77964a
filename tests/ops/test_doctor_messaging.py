"""The doctor looks at the tables of outbox and inbox as well, where they are."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from sqlalchemy import MetaData

from semel import Semel
from semel.doctor import Requirement, Verdict, _with_messaging, examine, judge
from semel.doctor.messaging import messaging_names, messaging_of
from semel.doctor.page import _findings
from semel.messaging import Outbox, tables
from semel.messaging_names import SUFFIXES
from semel.testing import services
from tests.ops.doctor_lab import agree, doctor, doctor_data

REQUIREMENTS: tuple[Requirement, ...] = ("exactly-once", "durable")


def test_the_doctor_knows_messaging_s_tables() -> None:
    declared = [tables.full_name(each) for each in tables.messaging_tables(MetaData(), "app.semel")]
    assert messaging_names("app.semel") == declared
    assert messaging_names("semel") == [f"semel{suffix}" for suffix in SUFFIXES]


def test_a_database_without_messaging_says_nothing_of_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'semel.db'}"
    with Semel(url) as once:
        once.execute("k", lambda: 1)
    assert examine(url).messaging.state == "none"
    assert "messaging" not in doctor(url, code=0)
    assert messaging_of("semel", {}, None).problems == ()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "semel.db"
    with Outbox(f"sqlite:///{found}") as outbox:
        outbox.create()
    return found


def change(file: Path, statement: str) -> str:
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute(statement)
    return f"sqlite:///{file}"


def test_tables_of_messaging_are_told_with_their_version(file: Path) -> None:
    url = f"sqlite:///{file}"
    assert "messaging: the messaging tables semel_outbox… are of version 1" in doctor(url, code=0)
    assert doctor_data(url, code=0)["messaging"]["state"] == "present"


def test_tables_that_are_missing_are_named_and_are_made_at_the_first_use(file: Path) -> None:
    url = change(file, "DROP TABLE semel_inbox_dead")
    assert examine(url).messaging.state == "incomplete"
    assert "there without semel_inbox_dead: semel makes what is missing" in doctor(url, code=0)
    with Outbox(url) as outbox:
        outbox.create()
    assert examine(url).messaging.state == "present"


@pytest.mark.parametrize(
    ("version", "state", "told"), [(2, "newer", "upgrade semel"), (0, "older", "migrate them")]
)
def test_tables_of_another_version_stop_messaging(file: Path, version: int, state: str, told: str) -> None:
    url = change(file, f"UPDATE semel_messaging SET value = '{version}' WHERE name = 'version'")
    checkup = examine(url)
    assert (checkup.messaging.state, checkup.messaging.version) == (state, version)
    page = doctor(url, code=2)
    assert page.count(f"are of version {version}") == 2, "as what stops semel, and as the verdict"
    assert told in page
    assert f"are of version {version}" in judge(checkup, "exactly-once").text


def test_a_version_that_is_not_written_is_no_problem(file: Path) -> None:
    url = change(file, "DELETE FROM semel_messaging WHERE name = 'version'")
    assert "their version is not written" in doctor(url, code=0)


@pytest.mark.services
@pytest.mark.parametrize("table", ["semel", "app.semel"])
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_unlogged_tables_of_postgres_are_no_tables_for_messages(table: str, driver: str) -> None:
    with services.postgres(fsync=True) as server:
        name = urlsplit(server.database()).path[1:]
        url = server.url_of(name, driver=driver)
        server.execute("CREATE SCHEMA app", database=name)
        with Outbox(server.url_of(name, driver="psycopg"), table=table) as outbox:
            outbox.create()
        doctor(url, "--table", table, "--require", "exactly-once", code=0)
        for each in (f"{table}_inbox", f"{table}_outbox"):
            server.execute(f"ALTER TABLE {each} SET UNLOGGED", database=name)
        data = doctor_data(url, "--table", table, code=2)
        mend = f"ALTER TABLE {table}_inbox SET LOGGED; ALTER TABLE {table}_outbox SET LOGGED"
        assert mend in data["problems"][0]
        assert (data["exactly_once"], data["durable"]) == (False, False)
        for requirement in ("exactly-once", "durable"):
            page = doctor(url, "--table", table, "--require", requirement, code=1)
            assert "refused: messaging's tables" in page
        for statement in mend.split("; "):
            server.execute(statement, database=name)
        doctor(url, "--table", table, "--require", "exactly-once", code=0)


@pytest.mark.services
def test_a_user_who_may_not_read_messaging_s_tables_is_no_trouble() -> None:
    with services.postgres(fsync=True) as server:
        url = server.database(driver="psycopg")
        with Outbox(url) as outbox:
            outbox.create()
        server.execute("CREATE ROLE plain LOGIN")
        parts = urlsplit(url)
        found = examine(f"postgresql://plain@{parts.hostname}:{parts.port}{parts.path}")
        assert found.messaging.state == "present"
        assert "may not be read" in found.messaging.text


@pytest.mark.services
@pytest.mark.parametrize(
    ("driver", "table", "engine"),
    [("pymysql", "semel_outbox", "Aria"), ("asyncmy", "semel_messaging", "MyISAM")],
)
def test_mariadb_tables_without_transactions_are_no_tables_for_messages(
    driver: str, table: str, engine: str
) -> None:
    with services.mariadb(fsync=True) as server:
        name = urlsplit(server.database()).path[1:]
        url = server.url_of(name, driver=driver)
        with Outbox(server.url_of(name, driver="pymysql")) as outbox:
            outbox.create()
        doctor(url, "--require", "exactly-once", code=0)
        server.execute(f"ALTER TABLE {table} ENGINE={engine}", database=name)
        if driver == "pymysql":
            agree(server.url_of(name))  # what holds of records is what it was
        told = f"messaging's tables have an engine without transactions ({table}={engine}): what is written there stays"
        mend = f"ALTER TABLE `{table}` ENGINE=InnoDB"
        (problem,) = examine(url).problems
        assert problem.startswith(told)
        assert problem.endswith(f"; {mend}")
        assert told in doctor(url, code=2)
        assert f"refused: {told}" in doctor(url, "--require", "exactly-once", code=1)
        server.execute(mend, database=name)
        doctor(url, "--require", "exactly-once", code=0)


def test_an_engine_with_transactions_that_is_not_innodb_is_a_doubt_and_no_problem(file: Path) -> None:
    names = messaging_names("semel")
    rows = [(names[0], "ROCKSDB", "YES"), *((name, "InnoDB", "YES") for name in names[1:])]
    found = messaging_of("semel", dict.fromkeys(names, ""), "1", rows)
    assert (found.state, found.problems) == ("present", ())
    (doubt,) = found.doubts
    assert doubt.startswith("messaging's tables semel_outbox=ROCKSDB: semel knows the settings of InnoDB")
    sound = examine(f"sqlite:///{file}")
    weak = _with_messaging(sound, found)
    assert (sound.exactly_once, weak.exactly_once, weak.durable, weak.problems) == (True, False, False, ())
    for requirement in REQUIREMENTS:
        assert judge(sound, requirement).code == 0
        assert judge(weak, requirement) == Verdict(1, f"refused: {doubt}")
    assert judge(weak).code == 0
    assert f"weakens: {doubt}" in "\n".join(_findings(weak, judge(weak)))


@pytest.mark.services
def test_a_view_in_the_place_of_a_mariadb_table_has_no_engine() -> None:
    with services.mariadb(fsync=True) as server:
        name = urlsplit(server.database()).path[1:]
        url = server.url_of(name, driver="pymysql")
        with Outbox(url) as outbox:
            outbox.create()
        server.execute("RENAME TABLE semel_inbox_dead TO hidden", database=name)
        server.execute("CREATE VIEW semel_inbox_dead AS SELECT * FROM hidden", database=name)
        assert examine(url).problems == ()
