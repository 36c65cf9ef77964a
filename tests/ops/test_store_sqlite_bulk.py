"""Many items by one statement do what one after the other does, also when some of them are not as expected."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from semel.errors import CodecError, ConfigurationError, StoreUnavailable
from semel.keys import Scope
from semel.model import Answer, Ask, Busy, Failure, Kind, Policy, Renewal, Replay, Settle, Unknown, Won
from semel.runtime import run_sync
from semel.stores.posted import Posted
from semel.stores.rows import COLUMNS
from semel.stores.sqlite import SqliteStore, bulk
from semel.stores.sqlite.desk import Desk
from semel.stores.sqlite.writer import Job, _reply
from tests.ops.sqlite_lab import ask, end, hurried, opened, raw, scope

NOW = 1_700_000_000.0
KEYS = 40


@pytest.fixture(params=["statements of many rows", "an SQLite without UPDATE … FROM"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "statements of many rows":
        monkeypatch.setattr(bulk, "_SIZES", ())


@contextmanager
def at(store: SqliteStore, times: Callable[[], float]) -> Iterator[None]:
    store._records._now = times  # type: ignore[method-assign]  # the clock of this test
    yield


def random_ask(chance: random.Random, key: str) -> Ask:
    return ask(
        key,
        lease=chance.choice([0.05, 10.0]),
        retention=chance.choice([0.0, 60.0, float("inf")]),
        policy=chance.choice(list(Policy)),
        fingerprint=chance.choice([b"", bytes(32), b"\x01" * 32]),
        labels=chance.choice([None, {"scene": "é"}]),
        secret_id=chance.choice(["", "one"]),
    )


def random_end(chance: random.Random, owner: Ask) -> Settle:
    kind = chance.choice([Kind.DONE] * 6 + [Kind.FAILED, Kind.RELEASED, Kind.UNKNOWN])
    return end(
        owner,
        kind,
        nonce=chance.choice([owner.nonce] * 8 + [os.urandom(16)]),
        retention=chance.choice([0.0, 0.5, 60.0, float("inf")]),
        tombstone=chance.choice([0.0, 30.0]),
        result=chance.choice([b"", b"x", b"y" * 3000]),
        ref=chance.choice([None, "ord_1", "ord_é"]),
        marker=chance.choice(["", "too-large"]),
        policy=chance.choice([None, Policy.HOLD]),
        steps=chance.choice([None, b"", b"step"]),
        error=Failure("E", None, "m") if kind is Kind.FAILED else None,
    )


def rows(path: Path) -> list[Any]:
    return raw(path, f"SELECT {', '.join(COLUMNS)} FROM semel ORDER BY scope")


def shown(answers: Sequence[Any]) -> list[Any]:
    return [str(answer) for answer in answers]


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("seed", range(6))
def test_a_batch_leaves_what_its_items_leave_one_by_one(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    together, singly = opened(tmp_path / "together.db"), opened(tmp_path / "singly.db")
    owners: list[Ask] = []
    now = NOW
    for _ in range(12):
        now += chance.choice([0.0, 0.1, 20.0])
        with at(together, lambda now=now: now), at(singly, lambda now=now: now):  # type: ignore[misc]  # mypy knows no lambda with a default
            asks = [
                random_ask(chance, f"key-{chance.randrange(KEYS)}")
                for _ in range(chance.choice([3, 14, 30, 62, 90]))
            ]
            asks += chance.sample(asks, 2)  # the same claim again
            verdicts = run_sync(together.claim(asks))
            assert shown(verdicts) == shown([run_sync(singly.claim([one]))[0] for one in asks])
            owners += [one for one, verdict in zip(asks, verdicts, strict=True) if isinstance(verdict, Won)]
            ends = [random_end(chance, owner) for owner in chance.sample(owners, min(len(owners), 70))]
            answers = run_sync(together.settle(ends))
            assert shown(answers) == shown([run_sync(singly.settle([one]))[0] for one in ends])
        assert rows(tmp_path / "together.db") == rows(tmp_path / "singly.db")
    run_sync(together.aclose())
    run_sync(singly.aclose())


def test_a_batch_with_nonces_of_several_lengths_mixes_nothing_up(tmp_path: Path) -> None:
    store = opened(tmp_path / "semel.db")
    asks = [msgspec.structs.replace(ask(f"key-{n}"), nonce=os.urandom(15 + n % 3)) for n in range(64)]
    assert {type(verdict) for verdict in run_sync(store.claim(asks))} == {Won}
    ends = [end(one, result=one.nonce * (n % 4)) for n, one in enumerate(asks)]
    assert set(run_sync(store.settle(ends))) == {Answer.OK}
    wanted = {(one.scope.hash, one.nonce, one.nonce * (n % 4) or None) for n, one in enumerate(asks)}
    assert set(raw(tmp_path / "semel.db", "SELECT scope, nonce, result FROM semel")) == wanted
    run_sync(store.aclose())


@pytest.mark.parametrize("alike", [True, False])
def test_a_batch_keeps_each_rows_own_words(tmp_path: Path, alike: bool) -> None:
    store = opened(tmp_path / "semel.db")
    asks = [
        ask(f"key-{n} é", fingerprint=os.urandom(32) if n % 3 else b"", lease=10.0 + n * (not alike))
        for n in range(64)
    ]
    assert {type(verdict) for verdict in run_sync(store.claim(asks))} == {Won}
    ends = [
        end(one, result=os.urandom(n * 7 % 50), retention=60.0 + n * (not alike))
        for n, one in enumerate(asks)
    ]
    assert set(run_sync(store.settle(ends))) == {Answer.OK}
    for one, ended in zip(asks, ends, strict=True):
        record, now = run_sync(store.peek(one.scope))
        assert record is not None
        assert record.scope == one.scope
        assert (record.nonce, record.fingerprint, record.result) == (one.nonce, one.fingerprint, ended.result)
        assert abs(record.expires - now - ended.retention) < 30.0
    run_sync(store.aclose())


@contextmanager
def statements_of(store: SqliteStore) -> Iterator[list[str]]:
    seen: list[str] = []
    db = store._file._writing
    assert db is not None
    db.set_trace_callback(lambda sql: seen.append(sql.split()[0]))
    yield seen
    db.set_trace_callback(None)


def test_64_claims_and_their_settles_are_one_statement_each_and_each_is_a_transaction(tmp_path: Path) -> None:
    store = opened(tmp_path / "semel.db")
    run_sync(store.peek(scope()))
    asks = [ask(f"key-{number}") for number in range(64)]
    with statements_of(store) as seen:
        assert {type(verdict) for verdict in run_sync(store.claim(asks))} == {Won}
        assert set(run_sync(store.settle([end(one, result=b"x") for one in asks]))) == {Answer.OK}
    assert seen == ["INSERT", "UPDATE"]
    run_sync(store.aclose())


def test_a_key_taken_meanwhile_is_busy_and_the_others_of_its_statement_are_won(tmp_path: Path) -> None:
    store = opened(tmp_path / "semel.db")
    run_sync(store.claim([taken := ask("key-3")]))
    asks = [ask(f"key-{number}") for number in range(16)]
    job = Job(store._records.claim, asks, time.monotonic() + 9, None, store._records.claim_all, alike=True)
    verdicts = store._file.writer.commit(job)
    assert [type(verdict) for verdict in verdicts] == [Won] * 3 + [Busy] + [Won] * 12
    owners = {(one.scope.hash, one.nonce) for one in [*asks[:3], taken, *asks[4:]]}
    assert set(raw(tmp_path / "semel.db", "SELECT scope, nonce FROM semel")) == owners
    run_sync(store.aclose())


def test_a_statement_of_many_rows_waits_for_another_process(tmp_path: Path) -> None:
    store = opened(tmp_path / "semel.db")
    run_sync(store.peek(scope()))
    other = sqlite3.connect(tmp_path / "semel.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    with statements_of(store) as seen:
        ender = threading.Timer(0.05, other.execute, ["COMMIT"])
        ender.start()
        assert {type(verdict) for verdict in run_sync(store.claim([ask(f"key-{n}") for n in range(16)]))} == {
            Won
        }
    assert seen[-3:] == ["BEGIN", "INSERT", "COMMIT"]
    ender.join()
    other.close()
    run_sync(store.aclose())


def test_one_that_is_not_plainly_done_does_not_slow_the_others_down(tmp_path: Path) -> None:
    store = opened(tmp_path / "semel.db")
    asks = [ask(f"key-{number}") for number in range(64)]
    run_sync(store.claim(asks))
    ends = [end(one) for one in asks]
    ends[7] = end(asks[7], Kind.FAILED, error=Failure("ValueError"))
    with statements_of(store) as seen:
        assert run_sync(store.settle(ends)) == [Answer.OK] * 64
    assert seen == ["BEGIN", "UPDATE", "SELECT", "UPDATE", "COMMIT"]
    assert raw(tmp_path / "semel.db", "SELECT key FROM semel WHERE state = 'failed'") == [("key-7",)]
    run_sync(store.aclose())


def test_a_bad_item_among_many_fails_alone(tmp_path: Path) -> None:
    store = opened(tmp_path / "semel.db")
    asks = [ask(f"key-{number}", labels={"x": "\ud800"} if number == 5 else None) for number in range(20)]
    verdicts = run_sync(store.claim(asks))
    assert [type(verdict) for verdict in verdicts] == [Won] * 5 + [CodecError] + [Won] * 14
    ends = [end(one, ref="\ud800" if number == 9 else None) for number, one in enumerate(asks) if number != 5]
    answers = run_sync(store.settle(ends))
    assert [type(answer) for answer in answers].count(CodecError) == 1
    assert answers.count(Answer.OK) == 18
    run_sync(store.aclose())


def test_a_value_beyond_sqlites_limit_among_many_fails_alone(tmp_path: Path) -> None:
    store = opened(tmp_path / "semel.db")
    asks = [ask(f"key-{number}") for number in range(16)]
    run_sync(store.claim(asks))
    db = store._file._writing
    assert db is not None
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 50_000)
    answers = run_sync(store.settle([end(one, result=b"x" * (60_000 * (one is asks[3]))) for one in asks]))
    assert [answer for answer in answers if answer is not Answer.OK] == [answers[3]]
    run_sync(store.aclose())


def test_tasks_of_one_tick_share_a_look_and_a_damaged_row_disturbs_only_its_own(tmp_path: Path) -> None:
    path = tmp_path / "semel.db"
    store = opened(path, "async")

    async def main() -> None:
        done = [ask(f"done-{number}") for number in range(8)]
        await asyncio.gather(*(store.claim([one]) for one in done))
        await asyncio.gather(*(store.settle([end(one, result=b"x")]) for one in done))
        raw(path, "UPDATE semel SET marker = CAST(x'ff' AS TEXT) WHERE key = 'done-2'")
        raw(path, "UPDATE semel SET state = 'dreaming' WHERE key = 'done-3'")
        asks = [ask(f"done-{number}") for number in range(8)] + [ask("new"), ask("new")]
        verdicts = [answer[0] for answer in await asyncio.gather(*(store.claim([one]) for one in asks))]
        kinds = [Replay, Replay, Unknown, Unknown, Replay, Replay, Replay, Replay, Won, Busy]
        assert [type(verdict) for verdict in verdicts] == kinds
        raw(path, "DELETE FROM semel WHERE key = 'done-2'")
        verdicts = [answer[0] for answer in await asyncio.gather(*(store.claim([one]) for one in asks[3:]))]
        assert [type(verdict) for verdict in verdicts] == [*kinds[3:8], Won, Busy]
        await store.aclose()

    asyncio.run(main())


def test_a_crowd_of_tasks_is_cut_into_jobs_and_every_one_gets_its_own_answer(tmp_path: Path) -> None:
    store = opened(tmp_path / "semel.db", "async", timeout=20)

    async def main() -> None:
        asks = [ask(f"key-{number}") for number in range(300)]
        verdicts = await asyncio.gather(*(store.claim([one]) for one in asks))
        assert [answer[0].record.nonce for answer in verdicts if isinstance(answer[0], Won)] == [
            one.nonce for one in asks
        ]
        await asyncio.gather(*(store.settle([end(one, result=one.nonce)]) for one in asks))
        replays = await asyncio.gather(*(store.claim([ask(f"key-{number}")]) for number in range(300)))
        assert [answer[0].record.result for answer in replays if isinstance(answer[0], Replay)] == [
            one.nonce for one in asks
        ]
        await store.aclose()

    asyncio.run(main())


def test_a_result_too_large_for_the_disk_among_many_fails_alone(tmp_path: Path) -> None:
    path = tmp_path / "semel.db"
    store = opened(path)
    asks = [ask(f"key-{number}") for number in range(16)]
    run_sync(store.claim(asks))
    db = store._file._writing
    assert db is not None
    db.execute(f"PRAGMA max_page_count = {raw(path, 'PRAGMA page_count')[0][0] + 4}")
    answers = run_sync(store.settle([end(one, result=b"x" * (200_000 * (one is asks[3]))) for one in asks]))
    assert isinstance(answers[3], StoreUnavailable)
    assert answers.count(Answer.OK) == 15
    run_sync(store.aclose())


def test_a_dropped_table_is_named_to_every_one_of_many(tmp_path: Path) -> None:
    path = tmp_path / "semel.db"
    store = opened(path)
    run_sync(store.peek(scope()))
    raw(path, "DROP TABLE semel")
    with pytest.raises(ConfigurationError, match="lacks a part of semel's tables"):
        run_sync(store.claim([ask(f"key-{number}") for number in range(16)]))
    run_sync(store.aclose())


def test_a_dropped_table_is_named_to_a_task_that_peeks(tmp_path: Path) -> None:
    path = tmp_path / "semel.db"
    store = opened(path, "async")

    async def main() -> None:
        await _won(store, "key")
        raw(path, "DROP TABLE semel")
        with pytest.raises(ConfigurationError, match="lacks a part of semel's tables"):
            await store.peek(scope("key"))
        await store.aclose()

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------- the desk's trouble


def test_tasks_of_one_tick_are_all_told_what_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path / "semel.db", "async", timeout=20)
    busy = sqlite3.OperationalError("database is locked")
    busy.sqlite_errorcode = sqlite3.SQLITE_BUSY

    async def claims() -> list[Any]:
        return await asyncio.gather(*(store.claim([ask(f"{n}")]) for n in range(3)), return_exceptions=True)

    async def main() -> None:
        await store.peek(scope())
        for error, told in ((ValueError("ours"), ValueError), (busy, StoreUnavailable)):

            def broken(db: sqlite3.Connection, asks: Sequence[Ask], error: Exception = error) -> Any:
                raise error

            with monkeypatch.context() as patch, hurried(store, 0.2):
                patch.setattr(store._records, "look_all", broken)
                assert [type(answer) for answer in await claims()] == [told] * 3
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", _no_more_threads)
            answers = await claims()
            assert [str(answer) for answer in answers] == ["can't start new thread"] * 3
        assert [type(answer[0]) for answer in await claims()] == [Won] * 3
        await store.aclose()

    asyncio.run(main())


def test_a_look_that_met_a_busy_file_is_taken_again_and_answers_all_of_its_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path / "semel.db", "async")
    busy = sqlite3.OperationalError("database is locked")
    busy.sqlite_errorcode = sqlite3.SQLITE_BUSY
    look, in_the_way = store._records.look_all, [busy, busy]

    def slow(db: sqlite3.Connection, asks: Sequence[Ask]) -> Any:
        if in_the_way:
            raise in_the_way.pop()
        return look(db, asks)

    async def main() -> None:
        await store.settle([end((await _won(store, "done")), result=b"x")])
        monkeypatch.setattr(store._records, "look_all", slow)
        asks = [ask("done"), ask("new")]
        verdicts = [answer[0] for answer in await asyncio.gather(*(store.claim([one]) for one in asks))]
        assert [type(verdict) for verdict in verdicts] == [Replay, Won]
        await store.aclose()

    asyncio.run(main())
    assert not in_the_way


def test_a_peek_that_met_a_busy_file_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path / "semel.db", "async")
    busy = sqlite3.OperationalError("database is locked")
    busy.sqlite_errorcode = sqlite3.SQLITE_BUSY
    peek, in_the_way = store._records.peek, [busy]

    def slow(db: sqlite3.Connection, which: Scope) -> Any:
        if in_the_way:
            raise in_the_way.pop()
        return peek(db, which)

    async def main() -> None:
        await _won(store, "key")
        monkeypatch.setattr(store._records, "peek", slow)
        assert (await store.peek(scope("key")))[0] is not None
        await store.aclose()

    asyncio.run(main())
    assert not in_the_way


def test_loops_that_take_turns_have_a_desk_each(tmp_path: Path) -> None:
    store = opened(tmp_path / "semel.db", "async")
    with asyncio.Runner() as first, asyncio.Runner() as second:
        for number, runner in enumerate((first, second, first, second)):
            runner.run(_won(store, f"key-{number}"))
        assert len(store._desks) == 2
        first.run(store.aclose())
    assert raw(tmp_path / "semel.db", "SELECT count(*) FROM semel") == [(4,)]


async def _won(store: SqliteStore, key: str) -> Ask:
    await store.claim([mine := ask(key)])
    return mine


def test_who_stops_watching_leaves_the_others_watching(tmp_path: Path) -> None:
    file, rung = opened(tmp_path / "semel.db")._file, list[str]()
    first, second = (file.watch(scope().hash, partial(rung.append, name)) for name in ("first", "second"))
    first()
    first()
    file.wake([end(ask())])
    second()
    file.wake([end(ask())])
    assert rung == ["second"]


def _no_more_threads(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_loop_that_ends_while_a_look_waits_for_the_file_leaves_nobody_waiting(tmp_path: Path) -> None:
    store = opened(tmp_path / "semel.db", "async")
    desk = Desk(loop := asyncio.new_event_loop(), store._file, store._records, 1.0)
    waiting = [Posted(loop)]
    (read := loop.create_future()).cancel()
    desk._looked_later([ask()], waiting, 0.0, loop, read)
    assert isinstance(waiting[0]._error, StoreUnavailable)
    loop.close()


def test_an_answer_that_ends_the_program_leaves_nobody_unanswered() -> None:
    loop, told = asyncio.new_event_loop(), list[int]()

    def leaves() -> None:
        raise SystemExit(3)

    replies: deque[Callable[[], None]] = deque([partial(told.append, 1), leaves, partial(told.append, 2)])
    loop.call_soon(_reply, replies, loop)
    with pytest.raises(SystemExit):
        loop.run_forever()
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    assert told == [1, 2]


def test_a_glance_needs_no_writing_connection(tmp_path: Path) -> None:
    store = opened(tmp_path / "semel.db")
    run_sync(store.peek(scope()))
    with store._file.writer.lock:
        store._file.drop()
    assert store._file.glance(lambda db: db.execute("SELECT count(*) FROM semel").fetchall()) == [(0,)]
    run_sync(store.aclose())


def test_a_renewal_that_queues_behind_a_lock_gives_up_in_time(tmp_path: Path) -> None:
    store = opened(tmp_path / "semel.db", "async", timeout=20)

    async def main() -> None:
        await store.peek(scope())
        with (
            store._file.writer.lock,
            hurried(store, 0.2),
            pytest.raises(StoreUnavailable, match="stayed locked"),
        ):
            await store.renew([Renewal(scope(), b"", 1.0, 1.0)])
        await store.aclose()

    asyncio.run(main())


def test_a_store_that_was_never_used_is_forked_and_closed_without_a_trace(tmp_path: Path) -> None:
    store = opened(tmp_path / "semel.db")
    store._file.before_fork()
    store._file.after_fork_in_parent()
    run_sync(store.aclose())
    assert not any(tmp_path.iterdir())
