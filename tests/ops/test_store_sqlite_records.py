"""Scans, purges and facts of the SQLite store: the same as the memory store's, and by index."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest

from semel.doctor.advice import advice_for
from semel.errors import ConfigurationError
from semel.model import Answer, Ask, Kind, Policy, Record, Settle, State
from semel.runtime import run_sync
from semel.store import Query
from semel.stores.memory import MemoryStore
from semel.stores.sqlite import SqliteStore
from semel.stores.sqlite import facts as sqlite_facts
from semel.stores.sqlite.conditions import BODIES, ENDED, LAPSED, condition
from tests.ops.sqlite_lab import ask, end, finish, opened, raw, scope, win


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "semel.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = opened(path, timeout=20)
    yield store
    run_sync(store.aclose())


class Pair:
    """The same life in the memory store, at the same times."""

    def __init__(self, store: SqliteStore) -> None:
        self.time = 1_700_000_000.0
        self.store = store
        self.memory = MemoryStore(capacity=10_000, clock=lambda: self.time)
        store._records._now = lambda: self.time  # type: ignore[method-assign]  # the clock of this test

    def claim(self, item: Ask) -> None:
        assert run_sync(self.store.claim([item])) == run_sync(self.memory.claim([item]))

    def settle(self, item: Settle) -> None:
        assert run_sync(self.store.settle([item])) == run_sync(self.memory.settle([item]))

    def scan(self, query: Query) -> None:
        ours, theirs = run_sync(self.store.scan(query)), run_sync(self.memory.scan(query))
        assert _sorted(ours.records) == _sorted(theirs.records), query
        assert (tuple(ours.events), ours.now) == (tuple(theirs.events), theirs.now)


def _sorted(records: Any) -> list[Record]:
    return sorted(records, key=lambda record: record.scope.hash)


def random_query(chance: random.Random) -> Query:
    return Query(
        tenant=chance.choice([None, "acme", "other"]),
        operation=chance.choice([None, "op", "refund"]),
        states=frozenset(chance.sample(list(State), chance.choice([0, 0, 1, 1, 2]))),
        abandoned=chance.random() < 0.2,
        ref=chance.choice([None, None, None, "r1", "r2"]),
        history=scope(f"key-{chance.randrange(20)}") if chance.random() < 0.1 else None,
        limit=1000,
    )


@pytest.mark.parametrize("seed", range(6))
def test_scans_and_purges_agree_with_the_memory_store_at_every_time(store: SqliteStore, seed: int) -> None:
    chance, pair = random.Random(seed), Pair(store)
    asks: list[Ask] = []
    for _ in range(150):
        match chance.randrange(5):
            case 0 | 1:
                made = ask(
                    f"key-{chance.randrange(20)}",
                    lease=chance.choice([1.0, 20.0]),
                    retention=chance.choice([5.0, 60.0, inf]),
                    policy=chance.choice(list(Policy)),
                )
                asks.append(made)
                pair.claim(made)
            case 2 | 3 if asks:
                word = chance.random() < 0.3
                kind = Kind.FORGOTTEN if word and chance.random() < 0.3 else chance.choice(list(Kind)[:4])
                more: dict[str, Any] = (
                    {"actor": "ada", "new_nonce": os.urandom(16), "nonce": b""} if word else {}
                )
                pair.settle(
                    end(
                        chance.choice(asks),
                        kind,
                        retention=chance.choice([5.0, 60.0, inf]),
                        tombstone=chance.choice([0.0, 30.0]),
                        ref=chance.choice([None, "r1", "r2"]),
                        **more,
                    )
                )
            case _:
                pair.time += chance.choice([0.5, 3.0, 25.0])
                if chance.random() < 0.3:
                    assert run_sync(store.purge(1000)) == run_sync(pair.memory.purge(1000))
        pair.scan(random_query(chance))


def test_a_scan_goes_on_where_its_cursor_stands(store: SqliteStore) -> None:
    asks = [run_sync(win(store, f"key-{n}")) for n in range(7)]
    seen: list[Record] = []
    cursor, pages = "", 0
    while pages == 0 or cursor:
        page = run_sync(store.scan(Query(limit=3, cursor=cursor)))
        seen += page.records
        cursor, pages = page.cursor, pages + 1
    assert [record.nonce for record in seen] == [ask.nonce for ask in asks]
    assert pages == 3
    with pytest.raises(ConfigurationError, match="not one of this store's"):
        run_sync(store.scan(Query(cursor="ff")))
    with pytest.raises(ConfigurationError, match="at least 1 record"):
        run_sync(store.scan(Query(limit=0)))


@pytest.mark.parametrize(
    "query, index",
    [
        (Query(), "semel_open"),
        (Query(states=frozenset({State.UNKNOWN})), "semel_open"),
        (Query(abandoned=True), "semel_open"),
        (Query(tenant="acme", states=frozenset({State.DONE})), "semel_places"),
        (Query(tenant="acme", operation="pay", states=frozenset({State.RELEASED})), "semel_places"),
        (Query(tenant="acme"), "semel_open"),
        (Query(ref="r"), "semel_ref"),
    ],
)
def test_a_scan_finds_its_rows_by_an_index(path: Path, store: SqliteStore, query: Query, index: str) -> None:
    run_sync(win(store))
    where, values = condition(query, 1.0)
    db = sqlite3.connect(path)
    plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN SELECT * FROM semel WHERE {where}", values)]
    db.close()
    ways = [line for line in plan if line.startswith(("SCAN", "SEARCH"))]
    assert ways, plan
    assert all(f"USING INDEX {index} " in line for line in ways), plan


def test_a_scan_of_runs_and_outcomes_of_a_tenant_goes_by_two_indexes(path: Path, store: SqliteStore) -> None:
    run_sync(win(store))
    where, values = condition(Query(tenant="acme", states=frozenset(State)), 1.0)
    db = sqlite3.connect(path)
    plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN SELECT * FROM semel WHERE {where}", values)]
    db.close()
    searches = [line for line in plan if line.startswith("SEARCH")]
    assert len(searches) == 2, plan
    assert "semel_places" in searches[0], plan
    assert "semel_open" in searches[1], plan


@pytest.mark.parametrize("where, index", [(ENDED, "expiry"), (LAPSED, "open"), (BODIES, "bodies")])
def test_a_purge_finds_its_rows_by_an_index(path: Path, store: SqliteStore, where: str, index: str) -> None:
    run_sync(win(store))
    db = sqlite3.connect(path)
    plan = [
        row[3] for row in db.execute(f"EXPLAIN QUERY PLAN SELECT * FROM semel WHERE {where}", {"now": 1.0})
    ]
    db.close()
    assert f"USING INDEX semel_{index} " in plan[0], plan


def test_a_purge_takes_what_has_ended_and_nothing_else(path: Path, store: SqliteStore) -> None:
    for key, kind in (("done", Kind.DONE), ("failed", Kind.FAILED), ("released", Kind.RELEASED)):
        run_sync(finish(store, run_sync(win(store, key)), kind=kind))
    run_sync(finish(store, run_sync(win(store, "unknown")), kind=Kind.UNKNOWN))
    run_sync(finish(store, run_sync(win(store, "kept")), retention=inf))
    run_sync(finish(store, run_sync(win(store, "buried")), tombstone=1e7, result=b"body", ref="r"))
    run_sync(win(store, "lapsed"))
    run_sync(win(store, "held", policy=Policy.HOLD))
    store._skew = 1e6
    run_sync(win(store, "alive"))
    assert run_sync(store.purge(2)) == 2
    assert run_sync(store.purge(100)) == 2
    assert run_sync(store.purge(100)) == 0
    left = raw(path, "SELECT key FROM semel ORDER BY key")
    assert left == [("alive",), ("buried",), ("held",), ("kept",), ("unknown",)]
    assert raw(path, "SELECT result, ref, state FROM semel WHERE key = 'buried'") == [(None, None, "done")]
    store._skew = 1e8
    assert run_sync(store.purge(100)) == 2


def test_a_large_purge_is_made_of_short_transactions(path: Path, store: SqliteStore) -> None:
    run_sync(store.claim([ask(f"key-{n}") for n in range(1300)]))
    store._skew = 1e6
    assert store._file._writing is not None
    commits: list[str] = []
    store._file._writing.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
    assert run_sync(store.purge(1200)) == 1200
    assert len(commits) == 3
    assert raw(path, "SELECT count(*) FROM semel") == [(100,)]


def test_an_audit_trail_lives_as_long_as_its_youngest_line(path: Path, store: SqliteStore) -> None:
    owner = run_sync(win(store))

    def word(kind: Kind, retention: float) -> None:
        said = end(
            owner, kind, nonce=b"", new_nonce=os.urandom(16), repair=True, actor="ada", retention=retention
        )
        assert run_sync(store.settle([said])) == [Answer.OK]

    def trail() -> int:
        return len(run_sync(store.scan(Query(history=scope()))).events)

    run_sync(finish(store, owner, kind=Kind.UNKNOWN))
    word(Kind.FAILED, 10.0)
    word(Kind.DONE, 1000.0)
    store._skew = 500.0
    run_sync(store.purge(10))
    assert trail() == 2
    store._skew = 2000.0
    assert trail() == 0
    run_sync(store.purge(10))
    assert raw(path, "SELECT count(*) FROM semel_audit") == [(0,)]
    owner = run_sync(win(store))
    run_sync(finish(store, owner, kind=Kind.UNKNOWN))
    word(Kind.FAILED, inf)
    word(Kind.DONE, 10.0)
    store._skew = 1e9
    run_sync(store.purge(10))
    assert trail() == 2


def test_a_word_and_its_audit_line_are_written_together_or_not_at_all(path: Path, store: SqliteStore) -> None:
    owners = [run_sync(win(store, f"key-{n}")) for n in range(2)]
    for owner in owners:
        run_sync(finish(store, owner, kind=Kind.UNKNOWN))
    raw(
        path,
        "CREATE TRIGGER no BEFORE INSERT ON semel_audit WHEN new.actor = 'eve' BEGIN SELECT RAISE(ABORT, 'no'); END",
    )
    words = [
        end(o, nonce=b"", new_nonce=os.urandom(16), actor=a)
        for o, a in zip(owners, ("eve", "ada"), strict=True)
    ]
    refused, accepted = run_sync(store.settle(words))
    assert isinstance(refused, sqlite3.IntegrityError)
    assert accepted is Answer.OK
    states = raw(path, "SELECT key, state FROM semel ORDER BY key")
    assert states == [("key-0", "unknown"), ("key-1", "done")]


# ------------------------------------------------------------------------------------------------------------- facts


def test_the_facts_are_read_from_the_live_file(path: Path) -> None:
    store = opened(path, "async")

    async def main() -> None:
        facts = await store.facts()
        assert (facts.store, facts.version) == ("sqlite", sqlite3.sqlite_version)
        assert facts.settings["journal_mode"] == "wal"
        assert facts.settings["synchronous"] == "FULL"
        assert (facts.survives_failover, facts.evicts) == (True, False)
        await store.aclose()

    asyncio.run(main())


def test_a_weaker_setting_is_named_with_its_remedy(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("PRAGMA synchronous = NORMAL")
    facts = sqlite_facts.read_facts(db, str(path))
    db.close()
    assert not facts.durable_writes
    assert any("set it to FULL" in warning for warning in facts.warnings)


MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/root rw
30 22 0:26 / /dev/shm rw,nosuid - tmpfs tmpfs rw
31 22 0:44 / /mnt/far\\040away rw - nfs4 host:/x rw
"""


@pytest.mark.parametrize(
    "place, system, durable, words",
    [
        ("/var/semel.db", "ext4", True, None),
        ("/dev/shm/semel.db", "tmpfs", False, "in memory"),
        ("/mnt/far away/semel.db", "nfs4", True, "local disk"),
    ],
)
def test_the_file_system_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, system: str, durable: bool, words: str | None
) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    assert sqlite_facts._file_system(place, tmp_path / "mounts") == system
    assert sqlite_facts._file_system(place, tmp_path / "nowhere") == ""
    monkeypatch.setattr(sqlite_facts, "_file_system", lambda path: system)
    db = sqlite3.connect(tmp_path / "semel.db")
    facts = sqlite_facts.read_facts(db, place)
    db.close()
    assert facts.durable_writes is durable
    assert words is None or any(words in warning for warning in facts.warnings)


@pytest.mark.parametrize(
    "version, bug",
    [("3.40.1", True), ("3.44.5", True), ("3.44.6", False), ("3.50.7", False), ("3.51.2", True), ("3.51.3", False), ("3.52.0", False)],
)  # fmt: skip
def test_versions_with_the_wal_reset_bug_are_known(
    path: Path, monkeypatch: pytest.MonkeyPatch, version: str, bug: bool
) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version", version)
    db = sqlite3.connect(path)
    facts = sqlite_facts.read_facts(db, str(path))
    db.close()
    assert any("WAL-reset" in note for note in advice_for(facts)) is bug
    assert not facts.warnings, "what counts is told as what counts, and this does not"
