"""Keys that are most likely new are inserted without a look: the same record, the same verdicts, and nothing written for a
key that is there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from semel import AsyncSemel, StoreUnavailable
from semel.model import Answer, Ask, Busy, Kind, Replay, State, Won
from semel.store import Settings
from semel.stores.postgres import PostgresStore
from semel.stores.postgres.hunch import ENOUGH, Hunch
from semel.stores.postgres.sql import new_words, news_words, statements
from semel.stores.postgres.talk import Talk
from semel.stores.rows import COLUMNS
from semel.testing import services
from semel.testing.proxy import Proxy
from tests.ops.postgres_lab import IDS, KINDS, Lab, ask_for, database_of, end_of, lab, rows


@pytest.fixture(params=KINDS, ids=IDS)
def here(request: pytest.FixtureRequest, postgres_server: services.PostgresServer) -> Iterator[Lab]:
    with lab(postgres_server, request.param) as made:
        yield made


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all statements, in order."""
    names: list[str] = []
    run, post = Talk.run, Talk.post

    def run_seen(self: Talk, name: str, *args: Any, **options: Any) -> Any:
        names.append(name)
        return run(self, name, *args, **options)

    def post_seen(self: Talk, name: str, args: Any) -> Any:
        coroutine = post(self, name, args)
        if coroutine is not None:
            names.append(name)
        return coroutine

    monkeypatch.setattr(Talk, "run", run_seen)
    monkeypatch.setattr(Talk, "post", post_seen)
    return names


def sure(store: PostgresStore) -> PostgresStore:
    while not store._hunch.new:
        store._hunch.learn(new=ENOUGH)
    return store


def plain(url: str) -> str:
    return url.replace("+asyncpg", "").replace("+psycopg", "")


def batch_of(*keys: str, **options: Any) -> list[Ask]:
    return [ask_for(key, **options) for key in keys]


def test_new_keys_in_a_row_make_a_hunch_and_one_that_is_known_ends_it() -> None:
    hunch = Hunch()
    for _ in range(ENOUGH):
        assert not hunch.new
        hunch.learn(new=True)
    assert hunch.new
    hunch.learn(new=False)
    assert not hunch.new


def test_after_each_mistake_a_hunch_takes_longer_and_many_new_keys_in_a_row_make_good_for_all() -> None:
    def needed(hunch: Hunch) -> int:
        seen = 0
        while not hunch.new:
            hunch.learn(new=1)
            seen += 1
        return seen

    hunch = Hunch()
    took = []
    for _ in range(9):
        took.append(needed(hunch))
        hunch.learn(new=0)
    assert took == [16, 32, 64, 128, 256, 512, 1024, 32, 64]


def test_a_store_inserts_without_a_look_after_enough_new_keys(here: Lab, sent: list[str]) -> None:
    store = here.open()
    for at in range(ENOUGH + 2):
        here.finish(store, f"k{at}", result=b"r")
    assert [name for name in sent if name != "settle_done"] == ["claim_plain"] * ENOUGH + ["claim_new"] * 2
    sent.clear()
    for _ in range(2):
        (verdict,) = here.claim(store, ask_for("k0"))
        assert isinstance(verdict, Replay)
        assert verdict.record.result == b"r"
    assert sent == ["claim_new", "claim_plain", "claim_plain"]


def test_a_face_inserts_without_a_look_after_enough_new_keys(
    postgres_server: services.PostgresServer, sent: list[str]
) -> None:
    async def effect() -> str:
        return "done"

    async def main(url: str) -> None:
        async with AsyncSemel(url) as once:
            for at in range(ENOUGH + 2):
                await once.execute(f"k{at}", effect)
            claims = [name for name in sent if name != "settle_done"]
            assert claims == ["claim_plain"] * ENOUGH + ["claim_new"] * 2
            sent.clear()
            for _ in range(2):
                outcome = await once.execute("k5", effect)
                assert (outcome.value, outcome.replayed) == ("done", True)
            assert sent == ["claim_new", "claim_plain", "claim_plain"]

    with lab(postgres_server, KINDS[0]) as here:
        asyncio.run(main(here.url))


def test_a_hunch_leaves_the_row_that_a_look_leaves(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    store = here.open()
    exact = [name for name in COLUMNS if name not in ("scope", "key", "nonce", "token", "created", "updated")]
    spans = ", ".join(f"{name} - created" if name in ("lease_until", "expires") else name for name in exact)

    def claimed(key: str, **options: Any) -> Any:
        ask = ask_for(key, **options)
        (verdict,) = here.claim(store, ask)
        assert isinstance(verdict, Won)
        record, _ = here.run(store.peek(ask.scope))
        assert record is not None
        assert record.nonce == ask.nonce
        assert verdict.record.token == record.token
        assert verdict.record.lease_until == pytest.approx(record.lease_until, abs=2e-6)
        (row,) = rows(postgres_server, here.url, f"select {spans} from semel where key = '{key}'")
        return row

    kinds: list[dict[str, Any]] = [
        {"fingerprint": b"f" * 32},
        {"retention": 50.0, "lease": 7.0},
        {"retention": 1e12},
    ]
    for number, options in enumerate(kinds):
        looked = claimed(f"looked{number}", **options)
        sure(store)
        assert claimed(f"guessed{number}", **options) == looked
        store._hunch.learn(new=False)


def test_a_wrong_hunch_changes_no_verdict(here: Lab) -> None:
    store = here.open()
    done = here.finish(store, "done", result=b"r")
    failed = here.begin(store, "failed")
    here.settle(store, end_of(failed, Kind.FAILED))
    running = here.begin(store, "running")
    lapsed = here.begin(store, "lapsed", lease=0.001)
    verdicts = []
    for ask in (done, failed, running, lapsed):
        (verdict,) = here.claim(sure(store), ask_for(ask.scope.key))
        verdicts.append(verdict)
    assert isinstance(verdicts[0], Replay)
    assert verdicts[0].record.result == b"r"
    assert isinstance(verdicts[1], Replay)
    assert verdicts[1].record.state is State.FAILED
    assert isinstance(verdicts[2], Busy)
    assert isinstance(verdicts[3], Won)
    assert verdicts[3].record.attempts == 2


def test_a_claim_that_is_sent_twice_is_won_by_the_same_asker(here: Lab) -> None:
    store = sure(here.open())
    ask = ask_for("k")
    for _ in range(2):  # as after an answer that was lost
        (verdict,) = here.claim(sure(store), ask)
        assert isinstance(verdict, Won)
        assert verdict.record.attempts == 1
    (verdict,) = here.claim(sure(store), ask_for("k"))
    assert isinstance(verdict, Busy)


@pytest.mark.parametrize("fault", ["reset_before", "swallow_reply"])
def test_a_lost_request_or_reply_of_a_hunch_is_not_seen(
    here: Lab, postgres_server: services.PostgresServer, fault: str, sent: list[str]
) -> None:
    with Proxy("127.0.0.1", postgres_server.port) as proxy:
        url = here.url.replace(f":{postgres_server.port}/", f":{proxy.port}/")
        store = sure(here.open(Settings(timeout=30), url=url))
        here.finish(store, "one")
        here.finish(store, "two")  # its statements are prepared by now
        sent.clear()
        rule = getattr(proxy, fault)(at=1)
        ask = here.begin(store, "k")
        assert rule.fired.is_set()
        assert sent[:2] == (["claim_new"] if fault == "reset_before" else ["claim_new", "claim_plain"])
        assert here.settle(store, end_of(ask, result=b"r")) == [Answer.OK]
        record, _ = here.run(store.peek(ask.scope))
        assert record is not None
        assert (record.attempts, record.result) == (1, b"r")


def test_a_wrong_hunch_writes_nothing(here: Lab) -> None:
    store = here.open()
    here.finish(store, "k", result=b"r")
    words = new_words(ask_for("k"), 0.0)
    assert words is not None
    sql = statements("semel")[words[0]]
    with psycopg.connect(plain(here.url)) as session:
        cursor = psycopg.RawCursor(session)
        explain = b"explain (analyze, wal, format json) " + sql.encode()
        plan = cursor.execute(explain, words[1]).fetchall()[0][0][0]["Plan"]
        assert (plan["WAL Records"], plan["WAL Bytes"]) == (0, 0)
        assert cursor.execute("select pg_current_xact_id_if_assigned()").fetchone() == (None,)


def test_a_key_that_is_being_changed_is_replayed_in_spite_of_a_hunch(here: Lab, sent: list[str]) -> None:
    """An insertion waits for whoever changes the row that it meets; a look does not, and shows what is committed."""
    store = here.open()
    done = here.finish(store, "k", result=b"r")
    with psycopg.connect(plain(here.url)) as session:
        session.execute("update semel set updated = now() where scope = %s", (done.scope.hash,))
        sent.clear()
        (verdict,) = here.claim(sure(store), ask_for("k"))
        assert isinstance(verdict, Replay)
        assert sent == ["claim_new", "claim_plain"]
        session.rollback()


def test_a_face_replays_a_key_that_is_being_changed_in_spite_of_a_hunch(
    postgres_server: services.PostgresServer, sent: list[str]
) -> None:
    async def effect() -> str:
        return "done"

    async def main(url: str) -> None:
        async with AsyncSemel(url) as once:
            for at in range(ENOUGH + 2):
                await once.execute(f"k{at}", effect)
            with psycopg.connect(plain(url)) as session:
                session.execute("update semel set updated = now()")
                sent.clear()
                outcome = await once.execute("k5", effect)
                session.rollback()
            assert (outcome.value, outcome.replayed) == ("done", True)
            assert sent == ["claim_new", "claim_plain"]

    with lab(postgres_server, KINDS[0]) as here:
        asyncio.run(main(here.url))


def test_a_wrong_hunch_on_the_last_free_link_goes_the_long_way(
    postgres_server: services.PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def effect() -> str:
        return "done"

    async def main(url: str) -> None:
        async with AsyncSemel(url) as once:
            for at in range(ENOUGH + 2):
                await once.execute(f"k{at}", effect)
            post = Talk.post

            def busy(self: Talk, name: str, args: Any) -> Any:
                return post(self, name, args) if name == "claim_new" else None

            monkeypatch.setattr(Talk, "post", busy)
            outcome = await once.execute("k5", effect)
            assert (outcome.value, outcome.replayed) == ("done", True)
            monkeypatch.setattr(Talk, "post", lambda *_: None)
            outcome = await once.execute("k5", effect)
            assert (outcome.value, outcome.replayed) == ("done", True)

    with lab(postgres_server, KINDS[0]) as here:
        asyncio.run(main(here.url))


def test_a_key_that_a_stranger_inserts_is_busy_in_spite_of_a_hunch(here: Lab) -> None:
    store = here.open()
    here.finish(store, "other")
    ask = ask_for("k")
    with psycopg.connect(plain(here.url)) as session:
        session.execute(
            "insert into semel (scope, tenant, operation, key, state, nonce, attempts, token, policy, fingerprint_version,"
            " created, updated, lease_until) values (%s, 't', 'o', 'k', 'running', 'n', 1, 1, 'retry', 1, now(), now(), now())",
            (ask.scope.hash,),
        )
        (verdict,) = here.claim(sure(store), ask)
        assert isinstance(verdict, Busy)
        session.rollback()
    (verdict,) = here.claim(sure(store), ask)
    assert isinstance(verdict, Won)


@pytest.mark.parametrize("number", [1, 3])
def test_outcomes_are_replayed_by_a_server_that_takes_no_writes_any_more(
    here: Lab, postgres_server: services.PostgresServer, number: int
) -> None:
    """As managed ones do when their disk is full."""
    store = here.open()
    keys = [f"k{at}" for at in range(number)]
    for key in keys:
        here.finish(store, key, result=b"r")
    name = database_of(here.url)
    postgres_server.execute(f"alter database {name} set default_transaction_read_only = on")
    postgres_server.execute(
        f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'"
    )
    sure(store)
    for _ in range(2):
        for verdict in here.claim(store, *batch_of(*keys)):
            assert isinstance(verdict, Replay)
        assert not store._hunch.new


def test_a_table_that_takes_no_writes_for_now_keeps_nobody_waiting(here: Lab) -> None:
    """As while an index is made. A new key is busy for so long, and outcomes are replayed."""
    store = here.open(Settings(timeout=3600))
    here.finish(store, "k", result=b"r")
    with psycopg.connect(plain(here.url)) as session:
        session.execute("lock table semel in share mode")
        for _ in range(2):
            (verdict,) = here.claim(store, ask_for("k"))
            assert isinstance(verdict, Replay)
            (verdict,) = here.claim(sure(store), ask_for("new"))
            assert isinstance(verdict, Busy)
            assert not store._hunch.new
            sure(store)
        session.rollback()


def test_a_batch_is_answered_though_its_table_takes_no_writes_for_now(here: Lab) -> None:
    """Its insertion gives up after 50 ms, and its outcomes are read."""
    store = here.open(Settings(timeout=3600))
    here.finish(store, "a", result=b"r")
    here.finish(store, "b", result=b"r")
    with psycopg.connect(plain(here.url)) as session:
        session.execute("lock table semel in share mode")
        for opinion in (True, False):
            for asks in (batch_of("a", "b"), [ask_for("a", labels={"scene": "x"}), ask_for("b")]):
                assert all(isinstance(each, Replay) for each in here.claim(store, *asks))
            if opinion:
                sure(store)
            first, new, second = here.claim(store, *batch_of("a", "new", "b"))
            assert isinstance(first, Replay)
            assert isinstance(second, Replay)
            assert isinstance(new, Busy)
        session.rollback()
    assert isinstance(here.claim(store, *batch_of("a", "new", "b"))[1], Won)


def test_a_server_that_takes_no_writes_is_asked_twice_about_a_batch_and_not_about_each_key(
    here: Lab, postgres_server: services.PostgresServer, sent: list[str]
) -> None:
    store = here.open()
    here.finish(store, "done", result=b"r")
    here.begin(store, "lapsed", lease=0.001)
    name = database_of(here.url)
    postgres_server.execute(f"alter database {name} set default_transaction_read_only = on")
    postgres_server.execute(
        f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'"
    )
    sent.clear()
    verdicts = here.claim(store, *batch_of("done", "lapsed", *(f"new{at}" for at in range(20))))
    assert isinstance(verdicts[0], Replay)
    for refused in verdicts[1:]:
        assert isinstance(refused, StoreUnavailable)
        assert "read-only" in str(refused)
    assert sent == ["claim_plain_many"] * 2
    with pytest.raises(StoreUnavailable, match="read-only"):
        here.claim(store, *batch_of("same", "same"))  # each in a statement of its own


def test_a_claim_without_an_answer_in_time_is_told_at_once_in_spite_of_a_hunch(
    here: Lab, postgres_server: services.PostgresServer, sent: list[str]
) -> None:
    """There is no time for a second statement, and whoever asks must hear that the first one may still be granted."""
    with Proxy("127.0.0.1", postgres_server.port) as proxy:
        url = here.url.replace(f":{postgres_server.port}/", f":{proxy.port}/")
        store = sure(here.open(Settings(timeout=0.5), url=url))
        for number, asks in enumerate((batch_of("k"), batch_of("a", "b"))):
            for at in range(3):  # its statement is prepared by then
                here.claim(sure(store), *batch_of(*(f"{number}-{at}-{ask.scope.key}" for ask in asks)))
            sent.clear()
            rule = proxy.stall(at=1)
            with pytest.raises(StoreUnavailable, match="no answer in time"):
                here.claim(store, *asks)
            assert rule.fired.is_set()
            assert len(sent) == 1
            proxy.release()


def test_what_a_signal_raises_ends_a_claim_in_spite_of_a_hunch() -> None:
    class TimeIsUp(Exception):
        pass

    async def struck() -> Any:
        raise TimeIsUp

    hunch = Hunch()
    with pytest.raises(TimeIsUp):
        asyncio.run(hunch.follow(struck()))


# ---------------------------------------------------------------------------------------------------- batches
def test_a_batch_is_inserted_without_a_look_after_enough_new_keys(here: Lab, sent: list[str]) -> None:
    store = here.open()
    for number in range(3):
        verdicts = here.claim(store, *batch_of(*(f"{number}-{at}" for at in range(ENOUGH))))
        assert all(isinstance(verdict, Won) for verdict in verdicts)
    assert sent == ["claim_plain_many", "claim_new_many", "claim_new_many"]
    sent.clear()
    for _ in range(2):
        known = here.claim(store, *batch_of("0-0", "new", "1-1"))
        assert [type(verdict) for verdict in known] == [Busy, Won if not sent[3:] else Busy, Busy]
        sent.append("|")
    assert sent == ["claim_new_many", "claim_plain_many", "|", "claim_plain_many", "|"]


def test_a_hunch_leaves_the_rows_of_a_batch_that_a_look_leaves(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    store = here.open()
    exact = [name for name in COLUMNS if name not in ("scope", "key", "nonce", "token", "created", "updated")]
    spans = ", ".join(f"{name} - created" if name in ("lease_until", "expires") else name for name in exact)

    def claimed(*keys: str) -> Any:
        asks = batch_of(*keys, fingerprint=b"f" * 32, lease=7.0, retention=50.0)
        asks[-1] = ask_for(keys[-1], retention=1e12)
        verdicts = here.claim(store, *asks)
        for ask, verdict in zip(asks, verdicts, strict=True):
            assert isinstance(verdict, Won)
            record, _ = here.run(store.peek(ask.scope))
            assert record is not None
            assert (record.nonce, record.token) == (ask.nonce, verdict.record.token)
            assert verdict.record.lease_until == pytest.approx(record.lease_until, abs=2e-6)
        found = dict(rows(postgres_server, here.url, f"select key, ({spans})::text from semel"))
        return [found[key] for key in keys]

    looked = claimed("a", "b", "c")
    sure(store)
    assert claimed("d", "e", "f") == looked


def test_a_wrong_hunch_about_a_batch_changes_no_verdict(here: Lab) -> None:
    store = here.open()
    here.finish(store, "done", result=b"r")
    here.settle(store, end_of(here.begin(store, "failed"), Kind.FAILED))
    here.begin(store, "running")
    here.begin(store, "lapsed", lease=0.001)
    keys = ("new", "done", "failed", "running", "lapsed", "newer")
    new, done, failed, running, lapsed, newer = here.claim(sure(store), *batch_of(*keys))
    assert isinstance(new, Won)
    assert isinstance(newer, Won)
    assert isinstance(done, Replay)
    assert done.record.result == b"r"
    assert isinstance(failed, Replay)
    assert failed.record.state is State.FAILED
    assert isinstance(running, Busy)
    assert isinstance(lapsed, Won)
    assert lapsed.record.attempts == 2


def test_a_batch_that_is_sent_twice_is_won_by_the_same_askers(here: Lab) -> None:
    store = here.open()
    asks = batch_of("a", "b", "c")
    for _ in range(2):  # as after an answer that was lost
        for verdict in here.claim(sure(store), *asks):
            assert isinstance(verdict, Won)
            assert verdict.record.attempts == 1
    assert all(isinstance(verdict, Busy) for verdict in here.claim(sure(store), *batch_of("a", "b", "c")))


@pytest.mark.parametrize("fault", ["reset_before", "swallow_reply"])
def test_a_lost_request_or_reply_of_a_batch_is_not_seen(
    here: Lab, postgres_server: services.PostgresServer, fault: str, sent: list[str]
) -> None:
    with Proxy("127.0.0.1", postgres_server.port) as proxy:
        url = here.url.replace(f":{postgres_server.port}/", f":{proxy.port}/")
        store = sure(here.open(Settings(timeout=30), url=url))
        here.claim(store, *batch_of("one", "two"))
        here.claim(store, *batch_of("three", "four"))  # the statement is prepared by now
        sent.clear()
        rule = getattr(proxy, fault)(at=1)
        asks = batch_of("a", "b", "c")
        verdicts = here.claim(store, *asks)
        assert rule.fired.is_set()
        known = ["claim_plain_many"] if fault == "swallow_reply" else []  # they are there, under these nonces
        assert sent[:2] == ["claim_new_many", *known]
        assert all(isinstance(verdict, Won) and verdict.record.attempts == 1 for verdict in verdicts)
        assert here.settle(store, *map(end_of, asks)) == [Answer.OK] * 3


def test_a_wrong_hunch_about_a_batch_writes_nothing(here: Lab) -> None:
    store = here.open()
    for key in ("a", "b"):
        here.finish(store, key, result=b"r")
    words = news_words(sorted(batch_of("a", "b"), key=lambda ask: ask.scope.hash), 0.0)
    assert words is not None
    sql = statements("semel")[words[0]]
    with psycopg.connect(plain(here.url)) as session:
        cursor = psycopg.RawCursor(session)
        explain = b"explain (analyze, wal, format json) " + sql.encode()
        plan = cursor.execute(explain, words[1]).fetchall()[0][0][0]["Plan"]
        assert (plan["WAL Records"], plan["WAL Bytes"]) == (0, 0)
        assert cursor.execute("select pg_current_xact_id_if_assigned()").fetchone() == (None,)


def test_a_batch_with_a_key_that_is_being_changed_is_answered_in_spite_of_a_hunch(
    here: Lab, sent: list[str]
) -> None:
    store = here.open()
    done = here.finish(store, "k", result=b"r")
    with psycopg.connect(plain(here.url)) as session:
        session.execute("update semel set updated = now() where scope = %s", (done.scope.hash,))
        sent.clear()
        replay, won = here.claim(sure(store), *batch_of("k", "new"))
        assert isinstance(replay, Replay)
        assert isinstance(won, Won)
        assert sent == ["claim_new_many", "claim_plain_many"]
        session.rollback()


def test_a_batch_with_an_ask_that_is_not_plain_is_looked_at(here: Lab, sent: list[str]) -> None:
    store = here.open()
    verdicts = here.claim(sure(store), ask_for("a"), ask_for("b", labels={"scene": "x"}))
    assert all(isinstance(verdict, Won) for verdict in verdicts)
    assert sent == ["claim_many"]
    sent.clear()
    assert all(isinstance(verdict, Won) for verdict in here.claim(store, *batch_of("c", "d")))
    assert sent == ["claim_new_many"]
