"""The MariaDB/MySQL store beyond the contract: what it sends, locks, limits, schema, facts, loops, forks, pools."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any

import pytest

from semel import AsyncSemel, Semel
from semel.errors import CodecError, ConfigurationError, OutcomeUnknown, StoreUnavailable
from semel.model import (
    Answer,
    Ask,
    Busy,
    Expired,
    Failure,
    Kind,
    Note,
    Policy,
    Replay,
    Settle,
    State,
    Unknown,
    Won,
    view,
)
from semel.runtime import run_sync
from semel.store import Query, Settings, open_store
from semel.stores import mysql
from semel.stores.mysql import MysqlStore
from semel.stores.mysql.errors import Locked
from semel.stores.mysql.rows import Statements, statements
from semel.stores.mysql.table import Table
from semel.testing import services
from semel.testing.proxy import Proxy
from tests.ops.mysql_lab import (
    COLOURS,
    DRIVER,
    Colour,
    ask,
    beat,
    drive,
    end,
    hurried,
    rival,
    scope,
    using,
    win,
)

pytestmark = pytest.mark.filterwarnings("error")
COUNTED = (
    "Com_select",
    "Com_insert",
    "Com_update",
    "Com_update_multi",
    "Com_delete",
    "Com_begin",
    "Com_commit",
)


@pytest.fixture(params=COLOURS)
def colour(request: pytest.FixtureRequest) -> Colour:
    return "sync" if request.param == "sync" else "async"


@pytest.fixture
def url(mariadb_server: services.MariaServer) -> str:
    return mariadb_server.database()


@pytest.fixture
def name(url: str) -> str:
    return url.rpartition("/")[2]


class Counter:
    """How many statements of each kind the server ran."""

    def __init__(self, server: services.MariaServer) -> None:
        self._server = server
        self._before = self._read()

    def _read(self) -> dict[str, int]:
        names = ", ".join(f"'{one}'" for one in COUNTED)
        rows = self._server.execute(f"SHOW GLOBAL STATUS WHERE Variable_name IN ({names})")
        return {key: int(value) for key, value in rows}

    def since(self) -> dict[str, int]:
        now = self._read()
        counted = {key: now[key] - self._before[key] for key in COUNTED if now[key] != self._before[key]}
        self._before = now
        return counted


# ---------------------------------------------------------------------------------------- what is sent


def test_a_first_run_is_a_read_an_insert_and_an_update_and_a_replay_is_one_read(
    colour: Colour, url: str, mariadb_server: services.MariaServer
) -> None:
    async def body(store: MysqlStore) -> None:
        await store.peek(scope("warm"))
        counter = Counter(mariadb_server)
        mine = await win(store)
        assert counter.since() == {"Com_select": 1, "Com_insert": 1}
        assert await store.settle([end(mine, result=b"1")]) == [Answer.OK]
        assert counter.since() == {"Com_update": 1}
        for _ in range(5):
            (verdict,) = await store.claim([ask()])
            assert isinstance(verdict, Replay)
        assert counter.since() == {"Com_select": 5}, "a replay must not write"
        assert await store.renew([beat(mine)]) == [Answer.OK]

    using(colour, url, body)


def test_a_batch_is_one_trip_and_one_commit_each_way(
    colour: Colour, url: str, mariadb_server: services.MariaServer
) -> None:
    async def body(store: MysqlStore) -> None:
        await store.peek(scope("warm"))
        asks = [ask(f"key-{n}") for n in range(64)]
        counter = Counter(mariadb_server)
        assert all(isinstance(verdict, Won) for verdict in await store.claim(asks))
        assert counter.since() == {"Com_select": 1, "Com_insert": 1}
        assert await store.renew([beat(mine) for mine in asks]) == [Answer.OK] * 64
        assert counter.since() == {"Com_update_multi": 1}
        assert await store.settle([end(mine, result=b"r") for mine in asks]) == [Answer.OK] * 64
        assert counter.since() == {"Com_begin": 1, "Com_update": 64, "Com_commit": 1}, (
            "one packet, one commit"
        )

    using(colour, url, body)


def test_a_batch_that_mixes_kinds_settles_each_as_the_model_says(colour: Colour, url: str) -> None:
    async def body(store: MysqlStore) -> None:
        asks = [await win(store, f"key-{n}") for n in range(5)]
        await store.note(Note(asks[3].scope, asks[3].nonce, b"step"))
        ends = [
            end(asks[0], result=b"big" * 50_000, ref="ref", tombstone=5.0),
            end(asks[1], Kind.FAILED, error=Failure("E", "c", "half a pair: \ud800")),
            end(asks[2], Kind.UNKNOWN, policy=Policy.HOLD),
            end(asks[3], Kind.RELEASED),
            end(asks[4], Kind.DONE, steps=b"", marker="m", retention=inf),
        ]
        assert await store.settle(ends) == [Answer.OK] * 5
        records = []
        for one in asks:
            record, _ = await store.peek(one.scope)
            assert record is not None
            records.append(record)
        done, failed, unknown, released, kept = records
        assert (done.result, done.ref) == (b"big" * 50_000, "ref")
        assert done.tombstone == pytest.approx(done.expires + 5)
        assert failed.error == Failure("E", "c", "half a pair: \\ud800")
        assert (unknown.state, unknown.policy, unknown.expires) == (State.UNKNOWN, Policy.HOLD, inf)
        assert released.expires == pytest.approx(released.noted + 60)
        assert (kept.expires, kept.steps, kept.marker) == (inf, b"", "m")

    using(colour, url, body)


def test_the_drivers_log_no_warnings(colour: Colour, url: str, caplog: pytest.LogCaptureFixture) -> None:
    async def body(store: MysqlStore) -> None:
        mine, other = await win(store), await win(store, "other", retention=1e15)
        await store.claim([ask(), ask("other"), ask("third")])
        await store.renew([beat(mine), beat(other)])
        await store.note(Note(mine.scope, mine.nonce, b"step"))
        await store.settle(
            [end(mine, retention=1e15, tombstone=1e15), end(other, retention=inf, tombstone=9.0)]
        )
        await store.settle([Settle(mine.scope, b"", Kind.FORGOTTEN, 60.0, actor="ada", reason="r")])
        await store.scan(Query())
        await store.scan(Query(history=mine.scope))
        await store.purge(10)
        await store.facts()

    with caplog.at_level(logging.WARNING):
        using(colour, url, body)
    assert caplog.records == []


def test_many_first_uses_at_once_log_no_warnings(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async def body(store: MysqlStore) -> None:
        await asyncio.gather(*(win(store, f"key-{n}") for n in range(10)))

    with caplog.at_level(logging.WARNING):
        using("async", url, body)
    assert caplog.records == []


def test_spans_that_the_column_cannot_hold_are_for_ever(colour: Colour, url: str) -> None:
    async def body(store: MysqlStore) -> None:
        long = await win(store, "long", lease=10.0, retention=1e15)
        assert await store.renew([beat(long)]) == [Answer.OK]
        await store.settle([end(long, retention=1.0, tombstone=1e15)])
        kept = await win(store, "kept")
        await store.settle([end(kept, retention=1e15, tombstone=7.0)])
        delayed = await win(store, "delayed")
        await store.settle([end(delayed, Kind.RELEASED, after=1e15)])
        store._skew = 1e9
        record, now = await store.peek(long.scope)
        assert record is not None
        assert (record.tombstone, view(record, now)) == (inf, State.EXPIRED)
        (verdict,) = await store.claim([ask("long")])
        assert isinstance(verdict, Expired)
        assert verdict.until == inf
        record, now = await store.peek(kept.scope)
        assert record is not None
        assert record.expires == inf
        (verdict,) = await store.claim([ask("delayed")])
        assert isinstance(verdict, Busy)
        assert verdict.delayed

    using(colour, url, body)


# ---------------------------------------------------------------------------------------- locks


def test_a_key_that_a_transaction_holds_is_busy_and_its_batch_goes_on(
    colour: Colour, url: str, mariadb_server: services.MariaServer
) -> None:
    async def body(store: MysqlStore) -> None:
        held = await win(store, "held row")
        await store.settle([end(held, Kind.RELEASED)])
        fresh = ask("held insert")
        with rival(mariadb_server, url) as execute:
            execute(
                "INSERT INTO semel (scope, tenant, operation, `key`, state, nonce, attempts, token, policy, created, "
                "updated, lease_until, fingerprint_version, resolved) SELECT %s, tenant, operation, `key`, state, nonce, "
                "attempts, token, policy, created, updated, lease_until, fingerprint_version, resolved FROM semel",
                (fresh.scope.hash,),
            )
            execute("SELECT * FROM semel WHERE scope = %s FOR UPDATE", (held.scope.hash,))
            start = time.monotonic()
            verdicts = await store.claim([fresh, ask("stranger"), ask("held row"), ask("other stranger")])
            assert time.monotonic() - start < 20
            assert [type(verdict) for verdict in verdicts] == [Busy, Won, Busy, Won]
            assert verdicts[0] == Busy(0.05, 0)
            (alone,) = await store.claim([ask("held row")])
            assert alone == Busy(0.05, 0)
        assert all(isinstance(one, Won) for one in await store.claim([fresh, ask("held row")]))

    using(colour, url, body, timeout=40)


def test_on_mysql_a_locked_key_is_busy_at_once_too(
    colour: Colour, url: str, mariadb_server: services.MariaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MySQL's way, played on MariaDB: there a lock cannot be waited for less than a second, but it can be probed."""
    monkeypatch.setattr("semel.stores.mysql.wires._is_mariadb", lambda _: False)

    async def body(store: MysqlStore) -> None:
        mine = await win(store)
        await store.settle([end(mine, Kind.RELEASED)])
        with rival(mariadb_server, url) as execute:
            execute("SELECT * FROM semel WHERE scope = %s FOR UPDATE", (mine.scope.hash,))
            took = []
            for other in ("other", "another", "a third"):
                start = time.monotonic()
                verdicts = await store.claim([ask(), ask(other)])
                took.append(time.monotonic() - start)
                assert [type(verdict) for verdict in verdicts] == [Busy, Won]
            assert min(took) < 0.9, "MySQL would have waited for a second"
        assert isinstance((await store.claim([ask()]))[0], Won)

    using(colour, url, body, timeout=5)


def test_a_settle_of_a_locked_key_fails_alone_and_may_be_sent_again(
    colour: Colour, url: str, mariadb_server: services.MariaServer
) -> None:
    async def body(store: MysqlStore) -> None:
        asks = [await win(store, f"key-{n}") for n in range(3)]
        ends = [end(one) for one in asks]
        with rival(mariadb_server, url) as execute, hurried(store, 3):
            execute("SELECT * FROM semel WHERE scope = %s FOR UPDATE", (asks[1].scope.hash,))
            first, middle, last = await store.settle(ends)
            assert (first, last) == (Answer.OK, Answer.OK)
            assert isinstance(middle, StoreUnavailable)
            assert "locked" in str(middle)
            (beating,) = await store.renew([beat(asks[1])])
            assert isinstance(beating, StoreUnavailable)
            with pytest.raises(StoreUnavailable, match="locked"):
                await store.note(Note(asks[1].scope, asks[1].nonce, b"step"))
        assert await store.settle(ends) == [Answer.OK] * 3

    using(colour, url, body, timeout=20)


def test_purge_leaves_what_is_locked_or_was_claimed_meanwhile(
    colour: Colour, url: str, mariadb_server: services.MariaServer
) -> None:
    async def body(store: MysqlStore) -> None:
        asks = [await win(store, f"key-{n}") for n in range(5)]
        await store.settle([end(one, tombstone=100.0 if n == 4 else 0.0) for n, one in enumerate(asks)])
        store._skew += 70
        with rival(mariadb_server, url) as execute:
            execute("SELECT * FROM semel WHERE scope = %s FOR UPDATE", (asks[1].scope.hash,))
            assert await store.purge(100) == 3
        words = statements("semel")
        again = await win(store, "key-1")

        async def late(table: Any) -> int:
            # What a slow purge would send: the version it saw dead, which is another one by now.
            values = [{"scope": again.scope.hash, "nonce": asks[1].nonce, "version": 1}] * 2
            dropped: int = await table.session.write(*words.batch("purge", values))
            return dropped

        assert await store._run(late) == 0
        assert await store.settle([end(again)]) == [Answer.OK]
        assert await store.purge(100) == 0

    using(colour, url, body)


def test_what_changes_between_reading_and_writing_is_decided_again(
    colour: Colour, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Table.read

    async def body(store: MysqlStore) -> None:
        mine, other = await win(store), await win(store, "other")
        await store.settle([end(mine, Kind.UNKNOWN), end(other, Kind.RELEASED)])
        rivals = mysql.open_url(url, Settings(timeout=20), colour)
        meanwhile: list[Settle | Ask] = [
            end(mine, nonce=b"", new_nonce=b"r" * 16, actor="rival", reason="faster"),
            ask("other"),
        ]

        async def read_late(table: Table, scopes: Any) -> Any:
            answer = await read(table, scopes)
            if meanwhile and table.session.where == store._pool.where and scopes:
                monkeypatch.setattr(Table, "read", read)
                word = meanwhile.pop(0)
                await (rivals.settle([word]) if isinstance(word, Settle) else rivals.claim([word]))
            return answer

        monkeypatch.setattr(Table, "read", read_late)
        late = end(mine, nonce=b"", new_nonce=b"l" * 16, actor="late", reason="slower")
        assert await store.settle([late]) == [Answer.REFUSED]
        assert [event.actor for event in (await store.scan(Query(history=mine.scope))).events] == ["rival"]
        monkeypatch.setattr(Table, "read", read_late)
        assert isinstance((await store.claim([ask("other")]))[0], Busy)
        assert meanwhile == []
        await rivals.aclose()

    using(colour, url, body)


def test_a_server_that_stays_busy_is_unavailable(colour: Colour, url: str) -> None:
    async def body(store: MysqlStore) -> None:
        async def refused(table: Table) -> None:
            raise Locked("1205")

        with pytest.raises(StoreUnavailable, match="too busy"):
            await store._run(refused)

    using(colour, url, body)


# ---------------------------------------------------------------------------------------- values


def test_a_value_beyond_max_allowed_packet_fails_alone_by_the_settings_name(colour: Colour) -> None:
    async def body(store: MysqlStore) -> None:
        asks = [await win(store, f"key-{n}") for n in range(3)]
        ends = [end(asks[0]), end(asks[1], result=b"x" * (1 << 20)), end(asks[2])]
        first, middle, last = await store.settle(ends)
        assert (first, last) == (Answer.OK, Answer.OK)
        assert isinstance(middle, CodecError)
        assert "max_allowed_packet" in str(middle)
        assert await store.settle([end(asks[1], marker="too-large")]) == [Answer.OK]
        noting = await win(store, "noting")
        note = Note(noting.scope, noting.nonce, b"x" * 300_000)
        assert await store.note(note) is Answer.OK
        with pytest.raises(CodecError, match="max_allowed_packet"):
            for _ in range(4):
                assert await store.note(note) is Answer.OK
        record, _ = await store.peek(noting.scope)
        assert record is not None
        assert len(record.steps) % 300_000 == 0
        assert record.steps, "what was noted must not be lost"

    with services.mariadb(config={"max-allowed-packet": "1M"}) as server:
        using(colour, server.database(), body)


def test_a_text_that_its_column_cannot_hold_is_refused_not_cut(colour: Colour, url: str) -> None:
    async def body(store: MysqlStore) -> None:
        mine, other = await win(store), await win(store, "other")
        bad = end(mine, ref="r" * 1025)
        answers = await store.settle([bad, end(other)])
        assert isinstance(answers[0], CodecError)
        assert answers[1] is Answer.OK
        (verdict,) = await store.claim([ask("third", secret_id="s" * 256)])
        assert isinstance(verdict, CodecError)
        (answer,) = await store.settle(
            [end(mine, marker="m" * 300, actor="ada", new_nonce=b"n" * 16, repair=True)]
        )
        assert answer is Answer.REFUSED
        assert await store.settle([end(mine, ref="r" * 1024)]) == [Answer.OK]
        (verdict,) = await store.claim([ask("numbers", fingerprint_version=1 << 40)])
        assert isinstance(verdict, CodecError), "a number the column cannot hold"

    using(colour, url, body)


@pytest.mark.parametrize("column, value", [("state", "'zzz'"), ("labels", "'no json'"), ("policy", "'??'")])
def test_an_unreadable_record_is_unknown_until_it_is_repaired(
    colour: Colour, url: str, name: str, mariadb_server: services.MariaServer, column: str, value: str
) -> None:
    async def body(store: MysqlStore) -> None:
        mine = await win(store)
        await store.settle([end(mine, Kind.UNKNOWN)])
        mariadb_server.execute(f"UPDATE semel SET {column} = {value}", database=name)
        (verdict,) = await store.claim([ask()])
        assert verdict == Unknown(None, Policy.HOLD, unreadable=True)
        with pytest.raises(OutcomeUnknown, match="resolve") as caught:
            await store.peek(mine.scope)
        assert caught.value.unreadable
        (found,) = (await store.scan(Query())).records
        assert (found.scope, found.state) == (mine.scope, State.UNKNOWN)
        (beating,) = await store.renew([beat(mine)])
        assert isinstance(beating, OutcomeUnknown)
        with pytest.raises(OutcomeUnknown):
            await store.note(Note(mine.scope, mine.nonce, b"step"))
        assert await store.purge(10) == 0
        word = end(
            mine, result=b"looked up", nonce=b"", new_nonce=b"w" * 16, repair=True, actor="ada", reason="log"
        )
        assert await store.settle([word]) == [Answer.OK]
        (verdict,) = await store.claim([ask()])
        assert isinstance(verdict, Replay)
        assert verdict.record.result == b"looked up"
        assert [event.actor for event in (await store.scan(Query(history=mine.scope))).events] == ["ada"]

    using(colour, url, body)


def test_an_unreadable_record_can_be_forgotten(
    colour: Colour, url: str, name: str, mariadb_server: services.MariaServer
) -> None:
    async def body(store: MysqlStore) -> None:
        mine = await win(store)
        mariadb_server.execute("UPDATE semel SET state = 'zzz'", database=name)
        assert await store.settle([Settle(mine.scope, b"", Kind.FORGOTTEN, 60.0)]) == [Answer.OK]
        assert (await store.peek(mine.scope))[0] is None

    using(colour, url, body)


def test_no_sql_mode_and_no_time_zone_changes_what_is_stored(colour: Colour) -> None:
    config = {"sql-mode": "ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT", "default-time-zone": "+05:00"}

    async def body(store: MysqlStore) -> None:
        key = "\\' \" back\\slash `tick` %s 🙂"
        mine = await win(store, key, labels={"l": key})
        await store.settle([end(mine, Kind.FAILED, result=b"\\'\x00\"", error=Failure("E", None, key))])
        record, now = await store.peek(mine.scope)
        assert record is not None
        assert (record.result, record.labels) == (b"\\'\x00\"", {"l": key})
        assert record.error == Failure("E", None, key)
        assert record.scope is not None
        assert record.scope.key == key
        assert now == pytest.approx(time.time(), abs=60)
        assert record.expires == pytest.approx(now + 60, abs=5)

    with services.mariadb(config=config) as server:
        using(colour, server.database(), body)


# ---------------------------------------------------------------------------------------- schema


def test_many_creators_at_once_make_one_schema(
    url: str, name: str, mariadb_server: services.MariaServer
) -> None:
    gate = threading.Barrier(8)

    def create(number: int) -> None:
        async def body(store: MysqlStore) -> None:
            gate.wait(10)
            await win(store, f"key-{number}")

        using("sync", url, body)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(create, range(8)))
    tables = mariadb_server.execute("SHOW TABLES", database=name)
    assert sorted(tables) == [("semel",), ("semel_audit",), ("semel_schema",)]
    assert mariadb_server.execute("SELECT version FROM semel_schema", database=name) == ((1,),)


def test_an_interrupted_creation_is_finished_by_the_next_one(
    colour: Colour, url: str, name: str, mariadb_server: services.MariaServer
) -> None:
    records, _, schema = statements("semel").schema()
    for text in (records, schema):
        mariadb_server.execute(text, database=name)
    using(colour, url, win)
    assert mariadb_server.execute("SELECT version FROM semel_schema", database=name) == ((1,),)


def test_tables_of_a_newer_version_are_refused_by_both_numbers(
    colour: Colour, url: str, name: str, mariadb_server: services.MariaServer
) -> None:
    using(colour, url, win)
    mariadb_server.execute("INSERT INTO semel_schema VALUES (2, NOW())", database=name)
    with pytest.raises(ConfigurationError, match="version 2, this semel knows version 1: upgrade"):
        using(colour, url, win)


def test_without_create_the_tables_must_be_there_and_the_ddl_makes_them(
    colour: Colour, url: str, name: str, mariadb_server: services.MariaServer
) -> None:
    with pytest.raises(ConfigurationError, match="semel schema sql"):
        using(colour, url, win, create=False, table="mine")
    for text in mysql.schema_sql("mine").split(";\n\n"):
        mariadb_server.execute(text.removesuffix(";\n"), database=name)
    using(colour, url, win, create=False, table="mine")
    with pytest.raises(ConfigurationError, match="plain name"):
        mysql.open_url(url, Settings(table="x`; DROP TABLE y"), colour)


def test_every_search_has_its_index(url: str, name: str, mariadb_server: services.MariaServer) -> None:
    async def body(store: MysqlStore) -> None:
        asks = [ask(f"key-{n}") for n in range(100)]
        for start in (0, 50):
            await store.claim(asks[start : start + 50])
        await store.settle([end(one, ref=f"ref-{n}") for n, one in enumerate(asks[:98])])

    using("sync", url, body)
    words = statements("semel")

    def index(sql: str) -> str:
        mariadb_server.execute("ANALYZE TABLE semel", database=name)
        row = mariadb_server.execute(f"EXPLAIN {sql}", database=name)[-1]
        return str(row[5])

    assert index(words["due"] % 100) == "expiry"
    page = {"after": "X''", "limit": 10}
    assert index(words.scan(["r.`ref` = %(ref)s"]) % {**page, "ref": "'ref-7'"}) == "ref"
    assert index("SELECT `key` FROM semel WHERE state = 'running' AND lease_until < NOW()") == "open_leases"
    assert (
        index("SELECT COUNT(*) FROM semel WHERE tenant = 'acme' AND operation = 'op' AND state = 'failed'")
        == "places"
    )


def test_a_blank_at_the_end_makes_another_ref(colour: Colour, url: str) -> None:
    """The server compares texts as if they were padded with blanks."""

    async def body(store: MysqlStore) -> None:
        await store.settle([end(await win(store), ref="ord_1 ")])
        assert (await store.scan(Query(ref="ord_1"))).records == ()
        assert len((await store.scan(Query(ref="ord_1 "))).records) == 1
        nothing = Query(ref="ord_1 ", states=frozenset({State.EXPIRED}))
        assert (await store.scan(nothing)).records == ()  # a tombstone has no ref

    using(colour, url, body)


# ---------------------------------------------------------------------------------------- facts


def test_facts_tell_what_a_power_loss_may_forget(colour: Colour, url: str) -> None:
    async def body(store: MysqlStore) -> None:
        facts = await store.facts()
        assert facts.store == "mariadb"
        assert facts.version.startswith("1")
        assert not facts.durable_writes, "the test server runs with innodb_flush_log_at_trx_commit=2"
        assert any("innodb_flush_log_at_trx_commit=2" in warning for warning in facts.warnings)
        assert facts.survives_failover

    using(colour, url, body)


def test_a_server_that_flushes_has_nothing_to_warn_of_and_one_with_a_lazy_binlog_has() -> None:
    async def body(store: MysqlStore) -> tuple[bool, tuple[str, ...]]:
        facts = await store.facts()
        return facts.durable_writes, facts.warnings

    with services.mariadb(fsync=True) as server:
        assert using("sync", server.database(), body) == (True, ())
        server.execute("SET GLOBAL read_only = ON")
        _, warned = using("sync", server.url_of("db1"), body)
        assert any("writer" in warning for warning in warned)
        server.execute("SET GLOBAL read_only = OFF")
    with services.mariadb(fsync=True, config={"log-bin": "binlog", "sync-binlog": 0}) as server:
        durable, warned = using("sync", server.database(), body)
        assert not durable
        assert any("sync_binlog=1" in warning for warning in warned)


def test_a_statement_binlog_is_refused_by_name() -> None:
    config = {"log-bin": "binlog", "binlog-format": "STATEMENT"}
    refused = pytest.raises(ConfigurationError, match="binlog_format=ROW")
    with services.mariadb(config=config) as server, refused:
        using("sync", server.database(), win)


# ---------------------------------------------------------------------------------------- loops, threads, forks


def clients(server: services.MariaServer, name: str) -> int:
    return int(
        server.execute(f"SELECT COUNT(*) FROM information_schema.processlist WHERE db = '{name}'")[0][0]
    )


def gone(server: services.MariaServer, name: str) -> bool:
    """Whether the server has seen all connections to the database end; it learns of it a moment later."""
    until = time.monotonic() + 5
    while clients(server, name):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_R29_two_loops_in_a_row_and_nothing_is_left_open(
    url: str, name: str, mariadb_server: services.MariaServer
) -> None:
    store = mysql.open_url(url, Settings(timeout=20), "async")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(2):
            asyncio.run(_wins(store, number))
            assert gone(mariadb_server, name), "a loop's connections end with it"
    asyncio.run(store.aclose())


async def _wins(store: MysqlStore, number: int) -> None:
    await asyncio.gather(*(win(store, f"key-{number}-{n}") for n in range(12)))


def test_R29_two_loops_at_once_have_their_own_connections(url: str) -> None:
    store = mysql.open_url(url, Settings(timeout=20), "async")

    def run(number: int) -> None:
        async def main() -> None:
            for n in range(20):
                await win(store, f"key-{number}-{n}")

        asyncio.run(main())

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(run, range(3)))


def test_closing_in_one_loop_ends_the_connections_of_another(
    url: str, name: str, mariadb_server: services.MariaServer
) -> None:
    store = mysql.open_url(url, Settings(timeout=20), "async")
    used, closed = threading.Event(), threading.Event()

    def other() -> None:
        async def main() -> None:
            await win(store)
            used.set()
            await asyncio.to_thread(closed.wait, 10)
            with pytest.raises(ConfigurationError, match="closed"):
                await win(store, "late")

        asyncio.run(main())

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(other)
        assert used.wait(10)
        asyncio.run(store.aclose())
        assert gone(mariadb_server, name)
        closed.set()
        running.result()


def test_a_closed_store_says_so(colour: Colour, url: str) -> None:
    async def body(store: MysqlStore) -> None:
        await win(store)
        await store.aclose()
        await store.aclose()
        with pytest.raises(ConfigurationError, match="closed"):
            await store.peek(scope())

    using(colour, url, body)


def test_closing_sends_waiters_away_and_ends_what_is_in_use_afterwards(
    url: str, name: str, mariadb_server: services.MariaServer
) -> None:
    async def body(store: MysqlStore) -> None:
        await store.peek(scope())
        held = await store._pool.take(time.monotonic() + 5, fresh=False)
        waiting = asyncio.create_task(store.peek(scope()))
        await asyncio.sleep(0)
        await asyncio.gather(store.aclose(), store.aclose())
        with pytest.raises(ConfigurationError, match="closed"):
            await waiting
        assert clients(mariadb_server, name) == 1
        await store._pool.give(held)
        assert await asyncio.to_thread(gone, mariadb_server, name)

    using("async", f"{url}?pool=1", body)


def test_more_threads_than_connections_take_turns(
    url: str, name: str, mariadb_server: services.MariaServer
) -> None:
    store = mysql.open_url(f"{url}?pool=3", Settings(timeout=10), "sync")
    with ThreadPoolExecutor(24) as threads:
        list(threads.map(lambda n: run_sync(win(store, f"key-{n}")), range(96)))
    assert clients(mariadb_server, name) <= 3
    run_sync(store.aclose())
    assert gone(mariadb_server, name)


def test_more_tasks_than_connections_take_turns(
    url: str, name: str, mariadb_server: services.MariaServer
) -> None:
    async def body(store: MysqlStore) -> None:
        await asyncio.gather(*(win(store, f"key-{n}") for n in range(96)))
        assert clients(mariadb_server, name) <= 3

    using("async", f"{url}?pool=3", body, timeout=10)


def test_a_pool_whose_connections_stay_busy_is_told_so(colour: Colour, url: str) -> None:
    async def body(store: MysqlStore) -> None:
        await store.peek(scope())
        held = await store._pool.take(time.monotonic() + 5, fresh=False)
        with hurried(store, 0.2), pytest.raises(StoreUnavailable):
            await store.peek(scope())
        await store._pool.give(held)
        await store.peek(scope())

    using(colour, url, win)
    using(colour, f"{url}?pool=1", body, timeout=20)


def test_a_cancelled_waiter_passes_its_turn_on(url: str) -> None:
    async def body(store: MysqlStore) -> None:
        await store.peek(scope())
        held = await store._pool.take(time.monotonic() + 5, fresh=False)
        waiting = [asyncio.create_task(store.peek(scope())) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await store._pool.give(held)
        waiting[0].cancel()
        assert await waiting[2] is not None
        await asyncio.gather(*waiting, return_exceptions=True)

    using("async", f"{url}?pool=1", body)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_R29_a_forked_child_makes_its_own_connections(colour: Colour, url: str) -> None:
    async def body(store: MysqlStore) -> None:
        mine = await win(store)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if colour == "async":
                    asyncio._set_running_loop(None)
                verdict = drive(colour, lambda: store.claim([ask()]))[0]
                code = 0 if isinstance(verdict, Busy) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert await store.settle([end(mine)]) == [Answer.OK], "the parent's connection is untouched"

    using(colour, url, body)


# ---------------------------------------------------------------------------------------- a pool handed in


@pytest.fixture
def pool_options(mariadb_server: services.MariaServer, name: str) -> dict[str, Any]:
    return {"host": mariadb_server.host, "port": mariadb_server.port, "user": "root", "database": name}


def test_R30_a_pool_is_used_as_it_is_and_not_closed(pool_options: dict[str, Any]) -> None:
    import asyncmy
    from asyncmy.cursors import DictCursor

    async def main() -> None:
        for autocommit in (False, True):
            options: dict[str, Any] = {
                **pool_options,
                "autocommit": autocommit,
                "cursor_cls": DictCursor,
                "init_command": "SET SESSION sql_mode = 'ANSI_QUOTES'",
            }
            async with asyncmy.create_pool(minsize=1, maxsize=1, **options) as pool:
                store = mysql.adopt(pool, Settings(timeout=20), "async")
                key = f"key'\"-{autocommit}"
                mine, other = await win(store, key), await win(store, key + "2")
                assert await store.renew([beat(mine), beat(other)]) == [Answer.OK] * 2
                await store.note(Note(mine.scope, mine.nonce, b"step"))
                assert await store.settle([end(mine, result=b"r"), end(other)]) == [Answer.OK] * 2
                forget = Settle(mine.scope, b"", Kind.FORGOTTEN, 60.0, actor="ada", reason="r")
                assert await store.settle([forget]) == [Answer.OK]
                assert len((await store.scan(Query(history=mine.scope))).events) == 1
                await store.aclose()
                async with pool.acquire() as connection, connection.cursor() as cursor:
                    assert connection.get_autocommit() is autocommit, "given back as it was"
                    await cursor.execute(
                        "SELECT @@autocommit AS a, @@innodb_lock_wait_timeout AS w, @@tx_isolation AS t"
                    )
                    settings = await cursor.fetchone()
                    assert settings == {"a": int(autocommit), "w": 50, "t": "REPEATABLE-READ"}

    asyncio.run(main())


def test_R30_in_a_pool_handed_in_a_locked_key_is_busy_too(
    pool_options: dict[str, Any], url: str, mariadb_server: services.MariaServer
) -> None:
    import asyncmy

    async def main() -> None:
        async with asyncmy.create_pool(minsize=1, maxsize=2, **pool_options) as pool:
            store = mysql.adopt(pool, Settings(timeout=20), "async")
            mine = await win(store)
            await store.settle([end(mine, Kind.RELEASED)])
            with rival(mariadb_server, url) as execute, hurried(store, 4):
                execute("SELECT * FROM semel WHERE scope = %s FOR UPDATE", (mine.scope.hash,))
                verdicts = await store.claim([ask(), ask("other")])
                assert [type(verdict) for verdict in verdicts] == [Busy, Won]
                forget = Settle(mine.scope, b"", Kind.FORGOTTEN, 60.0, actor="ada", reason="r")
                (answer,) = await store.settle([forget])
                assert isinstance(answer, StoreUnavailable)
            assert await store.settle([forget]) == [Answer.OK]

    asyncio.run(main())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"charset": "latin1"}, "utf8mb4"),
        ({"init_command": "SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES'"}, "NO_BACKSLASH_ESCAPES"),
        ({"password": "wrong"}, "password"),
        ({"port": 1}, "cannot reach"),
    ],
)
def test_a_pool_that_cannot_serve_is_refused(
    pool_options: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    import asyncmy

    async def main() -> None:
        async with asyncmy.create_pool(minsize=0, maxsize=1, **{**pool_options, **options}) as pool:
            store = mysql.adopt(pool, Settings(timeout=20), "async")
            for _ in range(2):
                with pytest.raises((ConfigurationError, StoreUnavailable), match=message):
                    await store.peek(scope())

    asyncio.run(main())


def test_a_pool_that_lost_its_connections_serves_on(
    pool_options: dict[str, Any], mariadb_server: services.MariaServer
) -> None:
    import asyncmy

    async def main() -> None:
        async with asyncmy.create_pool(minsize=2, maxsize=2, **pool_options) as pool:
            store = mysql.adopt(pool, Settings(timeout=20), "async")
            mine = await win(store)
            mariadb_server.terminate_connections()
            assert await store.settle([end(mine)]) == [Answer.OK]

    asyncio.run(main())


def test_a_pool_gets_no_connection_back_that_is_half_done(
    pool_options: dict[str, Any], mariadb_server: services.MariaServer
) -> None:
    import asyncmy

    async def main() -> None:
        with Proxy(mariadb_server.host, mariadb_server.port) as proxy:
            options = {**pool_options, "port": proxy.port, "autocommit": True}
            async with asyncmy.create_pool(minsize=1, maxsize=1, **options) as pool:
                store = mysql.adopt(pool, Settings(timeout=20), "async")
                mine = await win(store)
                for rule in (proxy.swallow_reply, proxy.blackhole):
                    struck = rule(match=lambda request: b"UPDATE" in request)
                    with hurried(store, 3):
                        assert await store.renew([beat(mine)]) == [Answer.OK]
                    assert struck.fired.is_set()

    asyncio.run(main())


def test_a_pool_is_refused_in_another_loop_and_after_a_fork(pool_options: dict[str, Any]) -> None:
    import asyncmy

    async def make() -> Any:
        return await asyncmy.create_pool(minsize=0, maxsize=1, **pool_options)

    pool = asyncio.run(make())
    store = mysql.adopt(pool, Settings(timeout=20), "async")
    with pytest.raises(ConfigurationError, match="event loop"):
        asyncio.run(store.peek(scope()))
    held: Any = store._pool
    held._pid -= 1
    with pytest.raises(ConfigurationError, match="fork"):
        asyncio.run(store.peek(scope()))


def test_what_is_no_pool_is_refused_with_the_way_to_do_it(pool_options: dict[str, Any]) -> None:
    import asyncmy
    import pymysql

    connection = pymysql.connect(**pool_options)
    with connection, pytest.raises(ConfigurationError, match="within"):
        mysql.adopt(connection, Settings(timeout=20), "sync")

    async def main() -> None:
        async with asyncmy.connect(**pool_options) as connection:
            with pytest.raises(ConfigurationError, match="hand in an asyncmy"):
                mysql.adopt(connection, Settings(timeout=20), "async")
        async with asyncmy.create_pool(minsize=0, **pool_options) as pool:
            with pytest.raises(ConfigurationError, match="AsyncSemel"):
                mysql.adopt(pool, Settings(timeout=20), "sync")

    asyncio.run(main())


# ---------------------------------------------------------------------------------------- watching, faces


def test_a_watcher_may_leave_twice(colour: Colour, url: str) -> None:
    async def body(store: MysqlStore) -> None:
        woken: list[int] = []
        first = await store.watch(scope(), lambda: woken.append(1))
        second = await store.watch(scope(), lambda: woken.append(2))
        await first()
        await first()
        await store.settle([end(await win(store))])
        assert woken == [2]
        await second()
        assert not store._watchers

    using(colour, url, body)


def test_the_faces_run_a_key_once(url: str) -> None:
    calls: list[int] = []

    def effect(number: int) -> int:
        calls.append(number)
        return number

    with Semel(url) as once:
        assert [once.execute("k", effect, 7).replayed for _ in range(3)] == [False, True, True]

    async def main() -> None:
        async with AsyncSemel(url) as both:
            outcomes = await asyncio.gather(*(both.execute("j", effect, 8, wait=5) for _ in range(20)))
            assert {outcome.value for outcome in outcomes} == {8}
            assert (await both.execute("k", effect, 9)).value == 7

    asyncio.run(main())
    assert calls == [7, 8]


def test_a_moved_clock_is_in_every_statement() -> None:
    words = Statements("semel", 12.5)
    assert "INTERVAL 12500000 MICROSECOND" in words["settle"]
    assert "UTC_TIMESTAMP" in words["clock"]
    assert open_store("mariadb://h/d", Settings(), "sync").colour == "sync"
    assert DRIVER
