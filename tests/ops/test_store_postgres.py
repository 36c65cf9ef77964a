"""The PostgreSQL store beyond the contract: statements, batches, locks, purge, scans, unreadable rows, facts."""

from __future__ import annotations

import asyncio
import math
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from semel.errors import CodecError, ConfigurationError, OutcomeUnknown, StoreUnavailable
from semel.model import (
    Answer,
    Busy,
    Expired,
    Failure,
    Kind,
    Mismatch,
    Note,
    Policy,
    Renewal,
    Replay,
    State,
    Unknown,
    Won,
)
from semel.store import Query, Settings, open_store
from semel.stores import postgres
from semel.stores.postgres.facts import facts_of
from semel.stores.postgres.sql import claim_words, statements
from semel.testing import services
from tests.ops.postgres_lab import (
    IDS,
    KINDS,
    Lab,
    ask_for,
    beat_of,
    database_of,
    end_of,
    hurried,
    lab,
    rows,
    scope_of,
)


@pytest.fixture(params=KINDS, ids=IDS)
def here(request: pytest.FixtureRequest, postgres_server: services.PostgresServer) -> Iterator[Lab]:
    with lab(postgres_server, request.param) as made:
        yield made


def plain(url: str) -> str:
    return url.replace("+asyncpg", "").replace("+psycopg", "")


def stranger(url: str) -> psycopg.Connection[Any]:
    """A foreign session, in a transaction."""
    return psycopg.connect(plain(url))


# ----------------------------------------------------------------------------------------------- statements


@pytest.mark.parametrize("labels", [None, {"scene": "x"}])
def test_a_replay_writes_nothing(here: Lab, labels: dict[str, str] | None) -> None:
    store = here.open()
    here.finish(store, "k", result=b"r")
    name, args = claim_words(ask_for("k", labels=labels), 0.0)
    assert name == ("claim_one" if labels else "claim_plain")
    sql = statements("semel")[name]
    with psycopg.connect(plain(here.url), autocommit=True) as session:
        cursor = psycopg.RawCursor(session)
        explain = b"explain (analyze, wal, format json) " + sql.encode()
        cursor.execute(explain, args)  # the first may still set hint bits
        plan = cursor.execute(explain, args).fetchall()[0][0][0]["Plan"]
        assert (plan["WAL Records"], plan["WAL Bytes"], plan["Actual Rows"]) == (0, 0, 1)
        # Processes of the server's own (a checkpoint, autovacuum) write now and then: not beside each of three turns.
        written = [_written_by_fifty_replays(here, store, session, labels) for _ in range(3)]
    assert min(written) < 50 * 8, written


def _written_by_fifty_replays(here: Lab, store: Any, session: Any, labels: dict[str, str] | None) -> int:
    """Bytes of the log. The server may have added a record of the transactions that run."""
    (before,) = session.execute("select pg_current_wal_insert_lsn()").fetchone()
    for _ in range(50):
        (verdict,) = here.claim(store, ask_for("k", labels=labels))
        assert isinstance(verdict, Replay)
    (lost,) = session.execute(
        "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s::pg_lsn)", (before,)
    ).fetchone()
    return int(lost)


def test_the_inserted_row_equals_the_record_that_was_won(here: Lab) -> None:
    store = here.open()
    ask = ask_for(
        "k", fingerprint=b"f" * 32, labels={"scene": "x", "\0": "é"}, secret_id="s1", policy=Policy.PROBE
    )
    (verdict,) = here.claim(store, ask)
    record, _ = here.run(store.peek(ask.scope))
    assert isinstance(verdict, Won)
    assert record is not None
    for name in type(record).__struct_fields__:
        told, kept = getattr(verdict.record, name), getattr(record, name)
        if isinstance(kept, float) and math.isfinite(kept):
            assert told == pytest.approx(kept, abs=2e-6), name
        else:
            assert told == kept, name


def test_for_ever_is_kept_as_null_and_infinity_comes_back(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    store = here.open()
    ask = here.begin(store, "k", retention=math.inf)
    here.settle(store, end_of(ask, retention=math.inf, tombstone=5.0))
    assert rows(postgres_server, here.url, "select expires, tombstone from semel") == [(None, None)]
    record, _ = here.run(store.peek(ask.scope))
    assert record is not None
    assert record.expires == math.inf


def test_spans_of_millennia_are_for_ever_not_an_error(here: Lab) -> None:
    store = here.open()
    ask = here.begin(store, "k", retention=1e13, lease=1e13)
    assert here.run(store.renew([Renewal(ask.scope, ask.nonce, 1e13, 1e13)])) == [Answer.OK]
    assert isinstance(here.claim(store, ask)[0], Won)  # by the model this time
    assert here.settle(store, end_of(ask, Kind.RELEASED, retention=1e13, after=1e13)) == [Answer.OK]
    done = here.begin(store, "done")
    assert here.settle(store, end_of(done, retention=5.0, tombstone=1e13)) == [Answer.OK]
    store._skew = 100.0
    (verdict,) = here.claim(store, ask_for("done"))
    assert isinstance(verdict, Expired)
    record, _ = here.run(store.peek(ask.scope))
    assert record is not None
    assert record.expires == math.inf


def test_two_stores_with_other_tables_share_a_database(here: Lab) -> None:
    first, second = here.open(), here.open(Settings(table="other"))
    here.finish(first, "k")
    (verdict,) = here.claim(second, ask_for("k"))
    assert isinstance(verdict, Won)


def test_a_table_in_a_schema_of_its_own(here: Lab, postgres_server: services.PostgresServer) -> None:
    rows(postgres_server, here.url, "create schema app")
    store = here.open(Settings(table="app.once"))
    here.finish(store, "k", ref="r")
    assert rows(postgres_server, here.url, "select ref from app.once") == [("r",)]
    assert here.run(store.scan(Query(ref="r"))).records


# -------------------------------------------------------------------------------------------------- batches


def test_a_batch_with_one_scope_twice_is_decided_in_order(here: Lab) -> None:
    store = here.open()
    first, second, other = ask_for("a"), ask_for("a"), ask_for("b")
    verdicts = here.claim(store, first, other, second)
    assert [type(verdict) for verdict in verdicts] == [Won, Won, Busy]
    answers = here.settle(store, end_of(first), end_of(second), end_of(first), end_of(first, Kind.FAILED))
    assert answers == [Answer.OK, Answer.LOST, Answer.OK, Answer.REFUSED]


def test_a_batch_of_every_case_at_once(here: Lab) -> None:
    store = here.open()
    done = here.finish(store, "done", result=b"r")
    here.begin(store, "busy")
    lapsed = here.begin(store, "lapsed", lease=0.0)
    here.begin(store, "held", lease=0.0, policy=Policy.HOLD)
    released = here.begin(store, "released")
    here.settle(store, end_of(released, Kind.RELEASED))
    here.begin(store, "expired", lease=0.0, retention=0.0)
    same = here.begin(store, "same")
    printed = here.begin(store, "printed", fingerprint=b"1" * 32)
    asks = [
        ask_for("done"),
        ask_for("busy"),
        ask_for("lapsed"),
        ask_for("held"),
        ask_for("released"),
        ask_for("expired"),
        same,
        ask_for("printed", fingerprint=b"2" * 32),
        ask_for("fresh"),
    ]
    verdicts = here.claim(store, *asks)
    kinds = [type(verdict) for verdict in verdicts]
    assert kinds == [Replay, Busy, Won, Unknown, Won, Won, Won, Mismatch, Won]
    attempts = [verdict.record.attempts for verdict in verdicts if isinstance(verdict, Won)]
    assert attempts == [2, 1, 1, 1, 1]
    assert here.settle(store, end_of(lapsed), end_of(done), end_of(printed)) == [
        Answer.LOST,
        Answer.OK,
        Answer.OK,
    ]


def test_one_bad_item_fails_alone(here: Lab) -> None:
    store = here.open()
    asks = [ask_for(f"k{number}") for number in range(4)]
    here.claim(store, *asks)
    ends = [end_of(ask, ref="x\0y" if number == 2 else f"r{number}") for number, ask in enumerate(asks)]
    answers = here.settle(store, *ends)
    assert [answers[0], answers[1], answers[3]] == [Answer.OK] * 3
    assert isinstance(answers[2], CodecError)
    (alone,) = here.settle(store, ends[2])
    assert isinstance(alone, CodecError)
    unfit = ask_for("k9", fingerprint_version=1 << 40)
    verdicts = here.claim(store, ask_for("k8"), unfit)
    assert isinstance(verdicts[0], Won)
    assert isinstance(verdicts[1], CodecError)
    (alone_too,) = here.claim(store, unfit)
    assert isinstance(alone_too, CodecError)


def test_an_error_text_that_postgresql_cannot_hold_is_escaped_not_lost(here: Lab) -> None:
    store = here.open()
    ask = here.begin(store, "k")
    error = Failure("Odd\0Type", "c\udc80", "a\0b \udcff é")
    assert here.settle(store, end_of(ask, Kind.FAILED, error=error)) == [Answer.OK]
    record, _ = here.run(store.peek(ask.scope))
    assert record is not None
    assert record.error == Failure("Odd\\x00Type", "c\\udc80", "a\\x00b \\udcff é")
    decided = end_of(ask, Kind.FAILED, nonce=b"", new_nonce=b"n" * 16, actor="me", reason="\0", error=error)
    assert here.settle(store, decided) == [Answer.OK]


def test_a_large_result_travels_alone_and_comes_back(here: Lab) -> None:
    store = here.open()
    large = random.Random(1).randbytes(1 << 20)
    asks = [ask_for(f"k{number}") for number in range(3)]
    here.claim(store, *asks)
    ends = [end_of(ask, result=large if number == 1 else b"small") for number, ask in enumerate(asks)]
    assert here.settle(store, *ends) == [Answer.OK] * 3
    (verdict,) = here.claim(store, ask_for("k1"))
    assert isinstance(verdict, Replay)
    assert verdict.record.result == large


def test_more_items_than_one_statement_takes(here: Lab) -> None:
    store = here.open()
    asks = [ask_for(f"k{number}") for number in range(600)]
    assert all(isinstance(verdict, Won) for verdict in here.claim(store, *asks))
    assert here.run(store.renew([beat_of(ask) for ask in asks])) == [Answer.OK] * 600
    assert here.settle(store, *map(end_of, asks)) == [Answer.OK] * 600


def test_an_empty_batch_is_an_empty_answer(here: Lab) -> None:
    store = here.open()
    assert here.claim(store) == []
    assert here.settle(store) == []
    assert here.run(store.renew([])) == []


# ---------------------------------------------------------------------------------------------------- locks


def test_a_key_that_a_stranger_is_inserting_is_busy_and_holds_up_nobody(here: Lab) -> None:
    store = here.open(Settings(timeout=60))
    here.finish(store, "settled")
    with stranger(here.url) as session:
        session.execute(
            "insert into semel (scope, tenant, operation, key, state, nonce, attempts, token, policy, "
            "fingerprint_version, created, updated, lease_until) values (%s, 't', 'o', 'k', 'running', 'n', 1, 1, "
            "'retry', 1, now(), now(), now())",
            (scope_of("locked").hash,),
        )
        began = time.monotonic()
        (alone,) = here.claim(store, ask_for("locked"))
        assert alone == Busy(0.05, 0)
        assert time.monotonic() - began < 20
        verdicts = here.claim(store, ask_for("x1"), ask_for("locked"), ask_for("x2"), ask_for("settled"))
        assert [type(verdict) for verdict in verdicts] == [Won, Busy, Won, Replay]
        assert time.monotonic() - began < 20
        session.rollback()
    (verdict,) = here.claim(store, ask_for("locked"))
    assert isinstance(verdict, Won)


def test_a_locked_row_is_replayed_while_it_is_settled_and_busy_when_it_must_change(here: Lab) -> None:
    store = here.open()
    here.finish(store, "settled", result=b"r")
    here.begin(store, "lapsed", lease=0.0)
    here.begin(store, "lapsed2", lease=0.0)
    with stranger(here.url) as session:
        session.execute("select from semel for update")
        verdicts = here.claim(store, ask_for("settled"), ask_for("lapsed"), ask_for("lapsed2"))
        assert [type(verdict) for verdict in verdicts] == [Replay, Busy, Busy]
        (alone,) = here.claim(store, ask_for("lapsed"))
        assert alone == Busy(0.05, 0)
        session.rollback()


def test_a_locked_settle_waits_for_the_lock_and_its_company_does_not(here: Lab) -> None:
    store = here.open(Settings(timeout=20))
    asks = [here.begin(store, f"k{number}") for number in range(4)]
    session = stranger(here.url)
    session.execute("select from semel where scope = %s for update", (asks[1].scope.hash,))
    timer = threading.Timer(0.3, session.rollback)
    timer.start()
    try:
        assert here.settle(store, *map(end_of, asks)) == [Answer.OK] * 4
        record, _ = here.run(store.peek(asks[1].scope))
        assert record is not None
        assert record.state is State.DONE
    finally:
        timer.join()
        session.close()


def test_what_stays_locked_is_unavailable_in_time(here: Lab) -> None:
    store = here.open(Settings(timeout=60))
    first, second = here.begin(store, "k1"), here.begin(store, "k2")
    with stranger(here.url) as session:
        session.execute("select from semel where scope = %s for update", (first.scope.hash,))
        began = time.monotonic()
        with hurried(store, 2):
            answers = here.settle(store, end_of(first), end_of(second))
        assert isinstance(answers[0], StoreUnavailable)
        assert answers[1] is Answer.OK
        session.execute("select from semel where scope = %s for update", (second.scope.hash,))
        told: list[str] = []
        for act in (
            lambda: here.settle(store, end_of(first)),
            lambda: here.run(store.note(Note(first.scope, first.nonce, b"step"))),
            lambda: here.run(store.renew([beat_of(first)])),
            lambda: here.settle(store, end_of(second, Kind.FORGOTTEN, actor="me")),
        ):
            with hurried(store, 0.6), pytest.raises(StoreUnavailable) as caught:
                act()
            told.append(str(caught.value))
        assert time.monotonic() - began < 30
        # It gives up a tenth of a second early, to say why; who does not get the processor for longer says what is true too.
        assert {"locked" in text or "no answer in time" in text for text in told} == {True}
        assert any("locked" in text for text in told), told
        session.rollback()


def test_a_forget_that_a_live_run_refuses(here: Lab) -> None:
    store = here.open()
    ask = here.begin(store, "k")
    assert here.settle(store, end_of(ask, Kind.FORGOTTEN)) == [Answer.REFUSED]
    assert here.settle(store, end_of(ask_for("absent"), Kind.FORGOTTEN)) == [Answer.OK]


def test_claims_under_a_stricter_isolation_level_are_repeated_not_failed(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    name = database_of(here.url)
    postgres_server.execute(f"alter database {name} set default_transaction_isolation = 'serializable'")
    stores = [here.open() for _ in range(2)]

    async def race() -> list[Any]:
        found: list[Any] = []
        for number in range(20):
            asks = [[ask_for(f"k{number}-{part}") for part in range(5)] for _ in stores]
            claims = [store.claim(mine) for store, mine in zip(stores, asks, strict=True)]
            found += (
                await asyncio.gather(*claims) if here.colour == "async" else [await claim for claim in claims]
            )
        return found

    verdicts = here.run(race())
    for mine, theirs in zip(verdicts[::2], verdicts[1::2], strict=True):
        for pair in zip(mine, theirs, strict=True):
            assert {type(verdict) for verdict in pair} == {Won, Busy}
    facts = here.run(stores[0].facts())
    assert any("serializable" in warning for warning in facts.warnings)


RACER = """
    import asyncio, os, random, sys
    from semel.model import Answer, Ask, Kind, Settle, Won
    from semel.keys import make_scope
    from semel.store import Settings
    from semel.stores import postgres

    async def main(url, seed):
        store = postgres.open_url(url, Settings(timeout=20.0), "async")
        rng = random.Random(seed)

        async def batch(number):
            keys = rng.sample(range(60), 30)
            asks = [Ask(make_scope("semel", "t", "o", f"{number % 8}-{key}"), os.urandom(16), 0.05, 100.0) for key in keys]
            verdicts = await store.claim(asks)
            bad = [verdict for verdict in verdicts if isinstance(verdict, Exception)]
            won = [ask for ask, verdict in zip(asks, verdicts) if isinstance(verdict, Won)]
            rng.shuffle(won)
            kind = Kind.RELEASED if number % 3 else Kind.DONE
            answers = await store.settle([Settle(ask.scope, ask.nonce, kind, 100.0) for ask in won])
            bad += [answer for answer in answers if isinstance(answer, Exception)]
            return len(won), bad

        for number in range(25):
            for won, bad in await asyncio.gather(*(batch(number) for _ in range(4))):
                print(won, *map(repr, bad), flush=True)
        await store.aclose()

    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def test_overlapping_batches_of_several_processes_never_deadlock(
    postgres_server: services.PostgresServer,
) -> None:
    url = postgres_server.database(driver="asyncpg")
    command = [sys.executable, "-c", textwrap.dedent(RACER), url]
    racers = [
        subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for seed in range(3)
    ]
    won = 0
    for racer in racers:
        out, err = racer.communicate(timeout=100)
        assert racer.returncode == 0, err
        for line in out.splitlines():
            count, _, bad = line.partition(" ")
            won += int(count)
            assert not bad
    assert won > 300
    found = postgres_server.execute(
        f"select deadlocks from pg_stat_database where datname = '{database_of(url)}'"
    )
    assert found == [(0,)]


def test_many_threads_race_for_one_key_and_one_wins(postgres_server: services.PostgresServer) -> None:
    with lab(postgres_server, ("psycopg", "sync")) as here:
        store = here.open()
        for number in range(10):
            asks = [ask_for(f"k{number}") for _ in range(12)]
            with ThreadPoolExecutor(12) as threads:
                verdicts = [verdict for (verdict,) in threads.map(lambda ask: here.claim(store, ask), asks)]
            assert sum(isinstance(verdict, Won) for verdict in verdicts) == 1
            assert sum(isinstance(verdict, Busy) for verdict in verdicts) == 11


def test_a_lapsed_run_is_taken_over_by_one_of_many(here: Lab) -> None:
    store = here.open()
    keys = [f"k{number}" for number in range(20)]
    for key in keys:
        here.begin(store, key, lease=0.0)

    async def rush() -> list[list[Any]]:
        asks = [[ask_for(key) for key in random.sample(keys, len(keys))] for _ in range(4)]
        if here.colour == "async":
            return await asyncio.gather(*map(store.claim, asks))
        return [await store.claim(part) for part in asks]

    won = [verdict for part in here.run(rush()) for verdict in part if isinstance(verdict, Won)]
    assert len(won) == len(keys)
    assert {verdict.record.attempts for verdict in won} == {2}


# ---------------------------------------------------------------------------------------------------- purge


def test_purge_takes_what_is_over_in_bounded_bites(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    store = here.open()
    asks = [ask_for(f"k{number}") for number in range(30)]
    here.claim(store, *asks)
    here.settle(store, *[end_of(ask, retention=5.0) for ask in asks[:20]])
    here.begin(store, "hold", policy=Policy.HOLD)
    kept = here.begin(store, "kept")
    here.settle(store, end_of(kept, retention=1000.0))
    assert here.run(store.purge(100)) == 0
    store._skew = 200.0
    assert here.run(store.purge(7)) == 7
    assert here.run(store.purge(100)) == 23  # the rest of the settled, and the abandoned runs under retry
    assert here.run(store.purge(100)) == 0
    left = rows(postgres_server, here.url, "select key from semel order by key")
    assert left == [("hold",), ("kept",)]


def test_purge_leaves_locked_rows_alone_and_goes_on(here: Lab) -> None:
    store = here.open()
    first, second = here.finish(store, "k1"), here.finish(store, "k2")
    store._skew = 200.0
    with stranger(here.url) as session:
        session.execute("select from semel where scope = %s for update", (first.scope.hash,))
        assert here.run(store.purge(10)) == 1
        session.rollback()
    assert here.run(store.peek(second.scope))[0] is None
    assert here.run(store.purge(10)) == 1


def test_purge_of_many_rows_takes_several_statements(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    store = here.open()
    here.finish(store, "k")
    rows(
        postgres_server,
        here.url,
        "insert into semel (scope, tenant, operation, key, state, nonce, attempts, token, policy, "
        "fingerprint_version, created, updated, lease_until, expires) select sha256(n::text::bytea), 't', 'o', n::text,"
        " 'done', 'n', 1, 1, 'retry', 1, now(), now(), now(), now() from generate_series(1, 2500) n",
    )
    assert here.run(store.purge(2200)) == 2200
    assert here.run(store.purge(10_000)) == 300


def test_a_tombstone_loses_its_body_and_keeps_its_key(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    store = here.open()
    ask = here.begin(store, "k", labels={"a": "b"})
    here.settle(store, end_of(ask, result=b"secret", ref="r", retention=5.0, tombstone=100.0))
    store._skew = 10.0
    assert here.run(store.purge(10)) == 0
    assert rows(postgres_server, here.url, "select result, ref, labels, state from semel") == [
        (None, None, None, "done")
    ]
    store._skew = 200.0
    assert here.run(store.purge(10)) == 1


def test_the_audit_trail_goes_when_its_time_is_over(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    store = here.open()
    ask = here.begin(store, "k", lease=0.0, policy=Policy.HOLD)
    decided = end_of(ask, nonce=b"", new_nonce=b"n" * 16, actor="ann", reason="looked", retention=5.0)
    assert here.settle(store, decided) == [Answer.OK]
    forgotten = end_of(ask, Kind.FORGOTTEN, nonce=b"n" * 16, actor="bob", reason="gone", retention=50.0)
    assert here.settle(store, forgotten) == [Answer.OK]
    store._skew = 20.0
    here.run(store.purge(10))
    events = here.run(store.scan(Query(history=ask.scope))).events
    assert [(event.actor, event.kind, event.state) for event in events] == [
        ("ann", Kind.DONE, State.UNKNOWN),
        ("bob", Kind.FORGOTTEN, State.DONE),
    ]
    store._skew = 100.0
    assert here.run(store.scan(Query(history=ask.scope))).events == ()
    here.run(store.purge(10))
    assert rows(postgres_server, here.url, "select count(*) from semel_audit") == [(0,)]


# --------------------------------------------------------------------------------------- unreadable and scans


@pytest.mark.parametrize("damage", ["state = 'what'", "policy = 'what'", "labels = '{'"])
def test_an_unreadable_row_is_unknown_until_a_person_ends_it(
    here: Lab, postgres_server: services.PostgresServer, damage: str
) -> None:
    store = here.open()
    ask = here.finish(store, "k", result=b"r")
    rows(postgres_server, here.url, f"update semel set {damage}")
    (verdict,) = here.claim(store, ask_for("k"))
    assert verdict == Unknown(None, Policy.HOLD, unreadable=True)
    with pytest.raises(OutcomeUnknown, match="cannot be read") as caught:
        here.run(store.peek(ask.scope))
    assert caught.value.unreadable
    store._skew = 1e6
    assert here.run(store.purge(10)) == 0
    if "state" in damage:
        (shown,) = here.run(store.scan(Query())).records
        assert shown.state is State.UNKNOWN
        repair = end_of(
            ask, nonce=b"", new_nonce=b"n" * 16, repair=True, actor="me", reason="x", result=b"r2"
        )
        assert here.settle(store, repair) == [Answer.OK]
        (verdict,) = here.claim(store, ask_for("k"))
        assert isinstance(verdict, Replay)
        assert verdict.record.result == b"r2"


def test_an_unreadable_row_can_be_forgotten(here: Lab, postgres_server: services.PostgresServer) -> None:
    store = here.open()
    ask = here.finish(store, "k")
    rows(postgres_server, here.url, "update semel set state = 'what'")
    assert here.run(store.renew([beat_of(ask)])) == [Answer.OK]
    assert here.settle(store, end_of(ask, Kind.FORGOTTEN, actor="me", reason="y")) == [Answer.OK]
    (verdict,) = here.claim(store, ask_for("k"))
    assert isinstance(verdict, Won)


def test_a_scan_goes_through_pages_and_refuses_a_wrong_cursor(here: Lab) -> None:
    store = here.open()
    here.claim(store, *[ask_for(f"k{number}") for number in range(7)])
    seen: list[bytes] = []
    query = Query(limit=3)
    while True:
        page = here.run(store.scan(query))
        seen += [record.scope.hash for record in page.records if record.scope]
        if not page.cursor:
            break
        query = Query(limit=3, cursor=page.cursor)
    assert seen == sorted(scope_of(f"k{number}").hash for number in range(7))
    with pytest.raises(ConfigurationError, match="not a cursor"):
        here.run(store.scan(Query(cursor="zz")))
    with pytest.raises(ConfigurationError, match="at least 1"):
        here.run(store.scan(Query(limit=0)))
    assert here.run(store.scan(Query(tenant="nobody"))).now > 0


def test_the_indexes_serve_purge_scan_and_ref(here: Lab, postgres_server: services.PostgresServer) -> None:
    store = here.open()
    here.finish(store, "k", ref="r0")
    rows(
        postgres_server,
        here.url,
        "insert into semel (scope, tenant, operation, key, state, nonce, attempts, token, policy, fingerprint_version, "
        "created, updated, lease_until, expires, ref) select sha256(n::text::bytea), 't', 'o', n::text, 'done', 'n', 1, "
        "1, 'retry', 1, now(), now(), now(), now() + interval '1 day', 'r' || n from generate_series(1, 20000) n",
    )
    rows(postgres_server, here.url, "analyze semel")
    with psycopg.connect(plain(here.url), autocommit=True) as session:
        for name, args, index in (
            ("purge", (0.0, 100), "semel_expiry"),
            ("purge", (0.0, 100), "semel_open"),
            ("scan_ref", (0.0, ["done"], None, None, False, b"", 10, "r5"), "semel_ref"),
            ("scan", (0.0, ["running"], None, None, False, b"", 10), "semel_open"),
            ("scan", (0.0, ["failed"], "t", "o", False, b"", 10), "semel_attention"),
        ):
            sql = statements("semel")[name].encode()
            plan = psycopg.RawCursor(session).execute(b"explain " + sql, args).fetchall()
            assert any(index in line for (line,) in plan), (name, plan)
            assert not any("Seq Scan" in line for (line,) in plan), (name, plan)


# --------------------------------------------------------------------------------------------- note and facts


def test_steps_are_noted_by_the_owner_only(here: Lab) -> None:
    store = here.open()
    ask = here.begin(store, "k")
    assert here.run(store.note(Note(ask.scope, ask.nonce, b"one"))) is Answer.OK
    assert here.run(store.note(Note(ask.scope, ask.nonce, b"two"))) is Answer.OK
    assert here.run(store.note(Note(ask.scope, b"x" * 16, b"three"))) is Answer.LOST
    assert here.run(store.note(Note(scope_of("absent"), b"x" * 16, b"three"))) is Answer.GONE
    record, _ = here.run(store.peek(ask.scope))
    assert record is not None
    assert record.steps == b"onetwo"
    # a release that keeps its steps expires one retention after the last of them
    assert here.settle(store, end_of(ask, Kind.RELEASED, retention=50.0)) == [Answer.OK]
    released, _ = here.run(store.peek(ask.scope))
    assert released is not None
    assert released.expires == pytest.approx(record.noted + 50.0, abs=1e-5)


def test_facts_are_read_from_the_live_server(here: Lab, postgres_server: services.PostgresServer) -> None:
    store = here.open()
    facts = here.run(store.facts())
    assert facts.store == "postgresql"
    assert facts.version.startswith(tuple("123456789"))
    assert not facts.durable_writes
    assert any("fsync = on" in warning for warning in facts.warnings)
    assert facts.survives_failover
    name = database_of(here.url)
    postgres_server.execute(f"alter database {name} set synchronous_commit = 'off'")
    other = here.open()
    assert any("synchronous_commit = on" in warning for warning in here.run(other.facts()).warnings)


SAFE = {
    "server_version": "15.1",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "synchronous_standby_names": "",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "in_recovery": "false",
    "standbys": "0",
}


@pytest.mark.parametrize(
    "changes, durable, survives, words",
    [
        ({}, True, True, ()),
        ({"fsync": "off"}, False, True, ("fsync = on",)),
        ({"full_page_writes": "off"}, False, True, ("full_page_writes = on",)),
        ({"synchronous_commit": "off"}, False, True, ("synchronous_commit = on",)),
        ({"standbys": "1"}, True, False, ("synchronous_standby_names",)),
        ({"standbys": "1", "synchronous_standby_names": "*"}, True, True, ()),
        (
            {"standbys": "1", "synchronous_standby_names": "*", "synchronous_commit": "local"},
            True,
            False,
            ("synchronous_commit = on",),
        ),
        (
            {"standbys": "1", "synchronous_standby_names": "*", "synchronous_commit": "remote_write"},
            True,
            True,
            ("remote_write",),
        ),
        (
            {"standbys": "2", "standbys_not_waited_for": "1", "synchronous_standby_names": "*"},
            True,
            False,
            ("'FIRST 2 (*)'",),
        ),
        (
            {"standbys": "2", "standby_names": "a, b", "synchronous_standby_names": "any 1 (a,b)"},
            True,
            False,
            ("waits for 1 of 2 standbys",),
        ),
        ({"standbys": "1", "synchronous_standby_names": 'a, "b"'}, True, False, ("1 of 2",)),
        (
            {"standbys": "1", "standbys_not_seen": "1", "synchronous_standby_names": "*"},
            True,
            False,
            ("may not see",),
        ),
        ({"standbys": "2", "synchronous_standby_names": "2(*)"}, True, True, ()),
        ({"unlogged_tables": "semel, semel_audit"}, False, True, ("ALTER TABLE semel_audit SET LOGGED",)),
        ({"in_recovery": "true"}, True, True, ("read-only",)),
        ({"default_transaction_read_only": "on"}, True, True, ("read-only",)),
        ({"default_transaction_isolation": "serializable"}, True, True, ("serializable",)),
    ],
)
def test_facts_name_the_setting_to_change(
    changes: dict[str, str], durable: bool, survives: bool, words: tuple[str, ...]
) -> None:
    facts = facts_of({**SAFE, **changes}, pooled=False)
    assert (facts.durable_writes, facts.survives_failover) == (durable, survives)
    assert len(facts.warnings) == len(words)
    for word, warning in zip(words, facts.warnings, strict=True):
        assert word in warning


@pytest.mark.parametrize(
    "names, there, remedy",
    [
        ("", "walreceiver", 'FIRST 1 ("walreceiver")'),
        ("*", "walreceiver, walreceiver", "FIRST 2 (*)"),
        ("ANY 1 (a, b)", "a, b", 'FIRST 2 ("a", "b")'),
        ("a", "a, b", 'FIRST 2 ("a", "b")'),
        ('FIRST 1 ("a", c)', "a, b", 'FIRST 3 ("a", "c", "b")'),
        ("a", "a, it's", "FIRST 2 (*)"),
    ],
)
def test_facts_name_a_setting_that_waits_for_every_standby(names: str, there: str, remedy: str) -> None:
    seen = {
        "standbys": str(len(there.split(", "))),
        "standbys_not_waited_for": "1",
        "standby_names": there,
        "synchronous_standby_names": names,
    }
    (warning,) = facts_of({**SAFE, **seen}, pooled=False).warnings
    assert f"ALTER SYSTEM SET synchronous_standby_names = '{remedy}'" in warning


def test_facts_say_that_a_pooler_is_in_between() -> None:
    assert "poll" in facts_of(SAFE, pooled=True).warnings[0]


# ------------------------------------------------------------------------------------------------------ URLs


@pytest.mark.parametrize(
    "url, colour, words",
    [
        ("postgresql+psycopg2://h/d", "sync", "psycopg2"),
        ("postgresql+asyncpg://h/d", "sync", r"postgresql\+psycopg://"),
        ("postgresql://h:port/d", "sync", "port"),
        ("postgresql://h:99999/d", "async", "port"),
        ("postgresql://h/d?pol=5", "async", "pol"),
        ("postgresql://h/d?pool=0", "async", "pool"),
        ("postgresql://h/d?pool=many", "async", "pool"),
        ("postgresql://h/d?pgbouncer=maybe", "async", "pgbouncer"),
        ("postgresql://u:p#w@h/d", "async", "%23"),
    ],
)
def test_a_wrong_url_is_refused_at_once(url: str, colour: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        open_store(url, Settings(), colour)


@pytest.mark.parametrize("table", ["", "1abc", "Semel", "se mel", 'x"; drop table y', "a.b.c", "x" * 48, "é"])
def test_a_wrong_table_name_is_refused_at_once(table: str) -> None:
    with pytest.raises(ConfigurationError, match="table="):
        open_store("postgresql://h/d", Settings(table=table), "sync")


def test_acks_are_refused_with_the_setting_that_does_it_here() -> None:
    with pytest.raises(ConfigurationError, match="synchronous_standby_names"):
        open_store("postgresql://h/d", Settings(acks=1), "sync")


def test_a_plain_url_takes_the_driver_by_colour() -> None:
    assert open_store("postgresql://h/d", Settings(), "sync").colour == "sync"
    assert open_store("postgres://h/d", Settings(), "async").colour == "async"
    assert open_store("postgresql+psycopg://h/d", Settings(), "async").colour == "async"


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_a_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch, driver: str) -> None:
    monkeypatch.setitem(sys.modules, driver, None)
    for name in ("asyncpg", "psycopg"):
        monkeypatch.delitem(sys.modules, f"semel.stores.postgres.{name}", raising=False)
    with pytest.raises(ConfigurationError, match=r'pip install "semel\[postgres\]"') as caught:
        open_store(f"postgresql+{driver}://h/d", Settings(), "async")
    assert isinstance(caught.value.__cause__, ImportError)


def test_the_options_of_a_url_reach_the_server(here: Lab, postgres_server: services.PostgresServer) -> None:
    rows(postgres_server, here.url, "create schema app")
    store = here.open(options="?application_name=shop&search_path=app&pool=2&prepared=0&sslmode=disable")
    here.finish(store, "k")
    assert rows(postgres_server, here.url, "select count(*) from app.semel") == [(1,)]
    names = rows(postgres_server, here.url, "select application_name from pg_stat_activity")
    assert ("shop",) in names


def test_the_schema_is_printed_for_people_who_may_not_create(
    postgres_server: services.PostgresServer,
) -> None:
    ddl = postgres.schema_sql("app")
    with lab(postgres_server, ("psycopg", "sync")) as here:
        with psycopg.connect(plain(here.url)) as session:
            session.execute(ddl.encode())
        store = here.open(Settings(table="app", create=False))
        here.finish(store, "k")
