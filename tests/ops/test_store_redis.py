"""The Redis store beyond the contract: trips, memory, lifetimes, what cannot be read, large results, the index."""

from __future__ import annotations

import asyncio
import math
import os
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from semel import model
from semel.errors import ConfigurationError, OutcomeUnknown, StoreUnavailable
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
from semel.runtime import run_sync
from semel.store import Query
from semel.stores.redis import RedisStore
from semel.stores.redis.record import Unreadable, answer, read_peek, read_record, verdict
from semel.testing import services
from tests.ops.redis_store_lab import (
    BOTH,
    Colour,
    all_keys,
    ask,
    client,
    drive,
    end,
    finish,
    opened,
    record_key,
    run,
    scope,
    sync_store,
    tombstone_key,
    win,
    word,
)

LARGE = b"x" * 100_000


@pytest.fixture
def server(redis_server: services.RedisServer) -> services.RedisServer:
    return redis_server.flush()


@pytest.fixture
def store(server: services.RedisServer) -> Iterator[RedisStore]:
    with sync_store(server) as store:
        yield store


def calls(server: services.RedisServer) -> dict[str, int]:
    return {
        name.removeprefix("cmdstat_"): stat["calls"] for name, stat in server.info("commandstats").items()
    }


# ------------------------------------------------------------------------------------------------ trips and size


@BOTH
def test_a_first_execution_is_two_script_calls_and_a_replay_one_that_writes_nothing(
    server: services.RedisServer, colour: Colour
) -> None:
    async def main() -> None:
        store = opened(server, colour)
        await finish(store, await win(store, "warm up"), result=b"body")
        server.command("CONFIG", "RESETSTAT")
        await finish(store, await win(store), result=b"body")
        first = calls(server)
        assert first.pop("evalsha") == 2
        assert "eval" not in first
        changes = server.info("persistence")["rdb_changes_since_last_save"]
        server.command("CONFIG", "RESETSTAT")
        for _ in range(3):
            (found,) = await store.claim([ask()])
            assert isinstance(found, Replay)
            assert found.record.result == b"body"
        replays = calls(server)
        assert replays["evalsha"] == 3
        assert set(replays) <= {
            "evalsha",
            "time",
            "get",
            "config|resetstat",
            "info",
            "hello",
            "client|setinfo",
        }
        assert server.info("persistence")["rdb_changes_since_last_save"] == changes
        await store.aclose()

    run(colour, main)


def test_a_batch_is_one_script_call_per_item_and_answers_in_order(server: services.RedisServer) -> None:
    with sync_store(server) as store:
        run_sync(store.peek(scope()))
        run_sync(win(store, "warm up"))
        server.command("CONFIG", "RESETSTAT")
        asks = [ask(f"key-{n}") for n in range(50)]
        assert all(isinstance(found, Won) for found in run_sync(store.claim(asks)))
        assert calls(server)["evalsha"] == 50


@pytest.mark.parametrize("size", [1024, 4096])
def test_a_record_takes_at_most_a_tenth_more_memory_than_a_plain_set_of_its_result(size: int) -> None:
    many = 4000

    def used(server: services.RedisServer) -> int:
        return int(server.info("memory")["used_memory"])

    with services.redis() as ours, services.redis() as theirs:
        with sync_store(ours) as store:
            run_sync(store.peek(scope()))  # scripts are loaded and connections made
            run_sync(finish(store, run_sync(win(store, "warm up"))))
            before, length = used(ours), len(record_key(store, scope()))
            for first in range(0, many, 500):
                asks = [ask(f"req-{n:08}", fingerprint=bytes(32)) for n in range(first, first + 500)]
                assert all(isinstance(found, Won) for found in run_sync(store.claim(asks)))
                ends = [end(owner, result=os.urandom(size), retention=86_400.0) for owner in asks]
                assert run_sync(store.settle(ends)) == [Answer.OK] * 500
            packed = used(ours) - before
        with client(theirs) as stranger:
            before = used(theirs)
            for n in range(many):
                stranger.set(f"{n:08}".encode().ljust(length, b"-"), os.urandom(size), px=86_400_000)
            plain = used(theirs) - before
    print(f"{packed / many:.0f} bytes a record, {plain / many:.0f} a plain SET: {packed / plain:.3f}")
    assert packed <= 1.1 * plain


# ----------------------------------------------------------------------------------------------------- lifetimes


def test_R18_only_what_may_never_end_has_no_lifetime(server: services.RedisServer) -> None:
    with sync_store(server, index=frozenset({"ref"})) as store, client(server) as stranger:
        ended = [kind for kind in Kind if kind not in {Kind.UNKNOWN, Kind.FORGOTTEN}]
        mortal = [scope(f"running {policy}") for policy in (Policy.RETRY,)] + [scope(kind) for kind in ended]
        run_sync(win(store, f"running {Policy.RETRY}"))
        for kind in ended:
            run_sync(
                finish(store, run_sync(win(store, kind)), kind, tombstone=5.0, ref=f"ref-{kind}", result=b"r")
            )
        run_sync(finish(store, run_sync(win(store, "said")), Kind.UNKNOWN))
        run_sync(store.settle([word(ask("said"), Kind.FAILED)]))
        mortal.append(scope("said"))
        immortal = [scope(key) for key in ("unknown", "hold", "probe", "for ever")]
        run_sync(finish(store, run_sync(win(store, "unknown")), Kind.UNKNOWN))
        for policy in (Policy.HOLD, Policy.PROBE):
            run_sync(win(store, policy, policy=policy))
        run_sync(finish(store, run_sync(win(store, "for ever")), retention=math.inf, tombstone=9.0))

        never = {record_key(store, where) for where in immortal}
        assert all(stranger.pttl(key) == -1 for key in never)
        # Besides: the index and the counters, at most three small keys for each of the 1,024 shards.
        bounded = {key for key in all_keys(stranger) if key.rpartition(b":")[2] in {b"o", b"f", b"c"}}
        lasting = {key for key in all_keys(stranger) if stranger.pttl(key) == -1}
        assert lasting == never | bounded
        for where in mortal:
            assert 0 < stranger.pttl(record_key(store, where)) <= 70_001, where


def test_R18_a_takeover_and_a_renewal_move_the_lifetime(
    store: RedisStore, server: services.RedisServer
) -> None:
    with client(server) as stranger:
        owner = run_sync(win(store, retention=5.0, lease=1.0))
        key = record_key(store, owner.scope)
        assert stranger.pttl(key) <= 6_001
        run_sync(store.renew([Renewal(owner.scope, owner.nonce, 10.0, 100.0)]))
        assert 100_000 < stranger.pttl(key) <= 110_001
        run_sync(store.renew([Renewal(owner.scope, owner.nonce, 10.0, math.inf)]))
        assert stranger.pttl(key) == -1
        store._skew = 11.0
        second = run_sync(win(store, retention=5.0, lease=1.0))
        assert 0 < stranger.pttl(key) <= 6_001
        store._skew = 13.0
        late = run_sync(win(store, policy=Policy.HOLD, takeover=second.nonce))
        assert stranger.pttl(key) == -1
        run_sync(finish(store, late, Kind.RELEASED, retention=50.0))
        assert 0 < stranger.pttl(key) <= 50_001


def test_R19_after_retention_only_a_small_tombstone_is_left(
    store: RedisStore, server: services.RedisServer
) -> None:
    with client(server) as stranger:
        owner = run_sync(win(store, labels={"a": "b"}))
        run_sync(finish(store, owner, result=b"x" * 5000, ref="ord_1", tombstone=100.0))
        stone = tombstone_key(store, owner.scope)
        assert 150_000 < stranger.pttl(stone) <= 160_001
        assert stranger.strlen(stone) < 200
        stranger.delete(record_key(store, owner.scope))  # as Redis does at the end of the retention
        (found,) = run_sync(store.claim([ask()]))
        assert isinstance(found, Expired)
        record, now = run_sync(store.peek(owner.scope))
        assert record is not None
        assert found.until == record.tombstone
        # The clock has not reached the end of the retention, yet an empty body must not be replayed.
        assert model.view(record, now) is State.EXPIRED
        assert (record.result, record.ref, record.labels, record.attempts) == (b"", None, None, 1)
        assert run_sync(store.renew([Renewal(owner.scope, owner.nonce, 1.0, 1.0)])) == [Answer.GONE]
        assert run_sync(store.note(Note(owner.scope, owner.nonce, b"late"))) is Answer.GONE
        assert run_sync(store.settle([end(owner)])) == [Answer.GONE]
        store._skew = 161.0
        run_sync(win(store))
        assert not stranger.exists(stone)


def test_R13_a_word_that_releases_a_failure_takes_its_tombstone_away(
    store: RedisStore, server: services.RedisServer
) -> None:
    owner = run_sync(win(store))
    run_sync(finish(store, owner, Kind.FAILED, tombstone=100.0))
    assert run_sync(store.settle([word(owner, Kind.RELEASED)])) == [Answer.OK]
    with client(server) as stranger:
        assert not stranger.exists(tombstone_key(store, owner.scope))


def test_a_retention_of_nothing_leaves_nothing(store: RedisStore, server: services.RedisServer) -> None:
    run_sync(finish(store, run_sync(win(store)), retention=0.0))
    with client(server) as stranger:
        assert stranger.pttl(record_key(store, scope())) in {-2, 0, 1}
    run_sync(win(store))


def test_R20_a_token_grows_though_the_servers_clock_goes_back(store: RedisStore) -> None:
    store._skew = 1000.0
    (first,) = run_sync(store.claim([ask(lease=1.0)]))
    store._skew = 1002.0
    run_sync(store.claim([ask(lease=0.0)]))
    store._skew = 1001.5
    (found,) = run_sync(store.claim([ask(lease=0.0)]))
    assert isinstance(first, Won)
    assert isinstance(found, Busy | Won)
    tokens = [first.record.token]
    for back in (1100.0, 1050.0, 1090.0):
        store._skew = back
        owner = ask(lease=0.0)
        (found,) = run_sync(store.claim([owner]))
        assert isinstance(found, Won)
        tokens.append(found.record.token)
        run_sync(finish(store, owner, Kind.RELEASED, retention=1000.0))
    assert tokens == sorted(set(tokens))


# ------------------------------------------------------------------------------------------- what cannot be read

GARBAGE: dict[str, bytes] = {
    "empty": b"",
    "short": b"not a record",
    "foreign": b"{" + b"a" * 200,
    "another magic": b"\x5f\x01\x02\x00" + bytes(100),
    "a newer format": b"\x5e\x02\x02\x00" + bytes(100),
    "no such state": b"\x5e\x01\x09\x00" + bytes(100),
    "no such policy": b"\x5e\x01\x02\x03" + bytes(100),
    "a run without its times": b"\x5e\x01\x01\x00" + bytes(100),
    "cut off in the wide block": b"\x5e\x01\x02\x08" + bytes(60),
    "lengths beyond the end": b"\x5e\x01\x02\x00" + bytes(7) + b"\xff\xff" * 3 + bytes(60),
}


@pytest.mark.parametrize("raw", GARBAGE.values(), ids=GARBAGE)
def test_R15_an_unreadable_record_is_unknown_and_never_touched(
    store: RedisStore, server: services.RedisServer, raw: bytes
) -> None:
    owner = ask()
    with client(server) as stranger:
        key = record_key(store, owner.scope)
        stranger.set(key, raw)
        assert run_sync(store.claim([owner])) == [Unknown(None, Policy.HOLD, unreadable=True)]
        assert_unreadable(store, owner)
        assert stranger.get(key) == raw
        assert stranger.pttl(key) == -1


@pytest.mark.parametrize("raw", [b"", b"short", b"\x00" * 200, b"\x5e\x02" + bytes(200)])
def test_R15_bytes_that_are_no_record_are_told_apart_without_a_server(raw: bytes) -> None:
    with pytest.raises(Unreadable):
        read_record(raw, 0, None, bytes(32))


def assert_unreadable(store: RedisStore, owner: model.Ask) -> None:
    with pytest.raises(OutcomeUnknown, match="resolve") as raised:
        run_sync(store.peek(owner.scope))
    assert raised.value.unreadable
    with pytest.raises(OutcomeUnknown):
        run_sync(store.settle([end(owner)]))
    with pytest.raises(OutcomeUnknown):
        run_sync(store.note(Note(owner.scope, owner.nonce, b"step")))
    (renewed,) = run_sync(store.renew([Renewal(owner.scope, owner.nonce, 1.0, 1.0)]))
    assert isinstance(renewed, OutcomeUnknown)
    good, bad = run_sync(store.settle([end(ask("absent")), end(owner)]))
    assert good is Answer.GONE
    assert isinstance(bad, OutcomeUnknown)


def test_R15_another_programs_value_under_our_key_is_unknown_and_never_touched(
    store: RedisStore, server: services.RedisServer
) -> None:
    owner = ask()
    with client(server) as stranger:
        key = record_key(store, owner.scope)
        stranger.rpush(key, b"theirs")
        assert run_sync(store.claim([owner])) == [Unknown(None, Policy.HOLD, unreadable=True)]
        assert_unreadable(store, owner)
        assert stranger.lrange(key, 0, -1) == [b"theirs"]
        stranger.delete(key)
        stranger.rpush(tombstone_key(store, owner.scope), b"theirs")
        assert run_sync(store.claim([owner])) == [Unknown(None, Policy.HOLD, unreadable=True)]
        assert_unreadable(store, owner)


def test_R15_text_that_is_no_utf8_makes_a_record_unreadable(
    store: RedisStore, server: services.RedisServer
) -> None:
    owner = run_sync(win(store))
    run_sync(finish(store, owner, Kind.FAILED, ref="pointer"))
    with client(server) as stranger:
        key = record_key(store, owner.scope)
        raw = stranger.get(key)
        assert isinstance(raw, bytes)
        stranger.set(key, raw.replace(b"pointer", b"\xff" * 7))
    assert run_sync(store.claim([ask()])) == [Unknown(None, Policy.HOLD, unreadable=True)]
    with pytest.raises(OutcomeUnknown):
        run_sync(store.peek(owner.scope))
    assert run_sync(store.scan(Query())).records == []


def test_R15_a_torn_run_is_unreadable_to_its_own_owner(
    store: RedisStore, server: services.RedisServer
) -> None:
    owner = run_sync(win(store))
    with client(server) as stranger:
        stranger.append(record_key(store, owner.scope), b"torn")
    assert run_sync(store.claim([owner])) == [Unknown(None, Policy.HOLD, unreadable=True)]
    assert_unreadable(store, owner)


@pytest.mark.parametrize("kind", [Kind.DONE, Kind.FAILED, Kind.RELEASED])
def test_R15_a_persons_word_mends_an_unreadable_record(
    store: RedisStore, server: services.RedisServer, kind: Kind
) -> None:
    owner = ask()
    with client(server) as stranger:
        stranger.rpush(record_key(store, owner.scope), b"theirs")
        stranger.rpush(tombstone_key(store, owner.scope), b"theirs")
        assert run_sync(store.settle([word(owner, kind, result=b"mended", error=Failure("E"))])) == [
            Answer.OK
        ]
        assert not stranger.exists(tombstone_key(store, owner.scope))
    record, _ = run_sync(store.peek(owner.scope))
    assert record is not None
    assert (record.state, record.result, record.scope) == (State(kind.value), b"mended", owner.scope)
    assert (record.resolved, record.attempts) == (True, 0)
    (event,) = run_sync(store.scan(Query(history=owner.scope))).events
    assert (event.kind, event.state, event.actor) == (kind, State.UNKNOWN, "ada")
    (found,) = run_sync(store.claim([ask()]))
    assert isinstance(found, Won if kind is Kind.RELEASED else Replay)


def test_R15_an_owners_repair_mends_too_and_forget_removes(
    store: RedisStore, server: services.RedisServer
) -> None:
    owner = ask()
    with client(server) as stranger:
        stranger.set(record_key(store, owner.scope), b"garbage")
        assert run_sync(store.settle([end(owner, repair=True, result=b"mended")])) == [Answer.OK]
        (found,) = run_sync(store.claim([ask()]))
        assert isinstance(found, Replay)
        assert found.record.nonce == owner.nonce
        stranger.set(record_key(store, owner.scope), b"garbage")
        assert run_sync(store.settle([end(owner, Kind.FORGOTTEN, nonce=b"", actor="ada")])) == [Answer.OK]
        assert not stranger.exists(record_key(store, owner.scope))
    (event,) = run_sync(store.scan(Query(history=owner.scope))).events
    assert (event.kind, event.state, event.attempt) == (Kind.FORGOTTEN, State.UNKNOWN, 0)


def test_a_foreign_value_under_the_index_refuses_the_claim_and_writes_nothing(
    store: RedisStore, server: services.RedisServer
) -> None:
    owner = ask()
    with client(server) as stranger:
        stranger.set(store.tag(owner.scope).encode() + b":o", b"theirs")
        with pytest.raises(ConfigurationError, match="prefix"):
            run_sync(store.claim([owner]))
        (found,) = run_sync(store.renew([Renewal(owner.scope, owner.nonce, 1.0, 1.0)]))
        assert found is Answer.GONE
        refused, won = run_sync(store.claim([owner, ask("another")]))
        assert isinstance(refused, ConfigurationError)
        assert isinstance(won, Won)
        assert not stranger.exists(record_key(store, owner.scope))


def test_a_foreign_value_under_the_counters_refuses_the_settle_and_writes_nothing(
    store: RedisStore, server: services.RedisServer
) -> None:
    owner = run_sync(win(store))
    with client(server) as stranger:
        stranger.set(store.tag(owner.scope).encode() + b":c", b"theirs")
        with pytest.raises(ConfigurationError, match="prefix"):
            run_sync(store.settle([end(owner)]))
        with pytest.raises(ConfigurationError, match="prefix"):
            run_sync(store.counters())
        stranger.delete(store.tag(owner.scope).encode() + b":c")
    run_sync(finish(store, owner))


def test_a_foreign_value_under_the_trail_or_an_index_is_told_with_the_remedy(
    store: RedisStore, server: services.RedisServer
) -> None:
    owner = run_sync(win(store))
    with client(server) as stranger:
        stranger.set(store.tag(owner.scope).encode() + b":a:" + owner.scope.hash, b"theirs")
        stranger.set(store.tag(owner.scope).encode() + b":f", b"theirs")
        for query in (Query(history=owner.scope), Query()):
            with pytest.raises(ConfigurationError, match="prefix"):
                run_sync(store.scan(query))
        with pytest.raises(ConfigurationError, match="prefix"):
            run_sync(store.purge(10))


# ---------------------------------------------------------------------------------------------- arguments, echoes


@pytest.mark.parametrize(
    "wrong", [{"retention": -1.0}, {"retention": math.nan}, {"lease": -1.0}, {"lease": math.inf}]
)
def test_a_claim_with_an_impossible_span_is_refused_before_anything_is_written(
    store: RedisStore, server: services.RedisServer, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="negative or not a number"):
        run_sync(store.claim([ask(**wrong)]))
    refused, won = run_sync(store.claim([ask(**wrong), ask("another")]))
    assert isinstance(refused, ValueError)
    assert isinstance(won, Won)
    with client(server) as stranger:
        assert not stranger.exists(record_key(store, scope()))


@pytest.mark.parametrize("wrong", [{"retention": -1.0}, {"tombstone": math.nan}, {"after": math.inf}])
def test_a_settle_with_an_impossible_span_is_refused_before_anything_is_written(
    store: RedisStore, wrong: dict[str, Any]
) -> None:
    owner = run_sync(win(store))
    with pytest.raises(ValueError, match="negative or not a number"):
        run_sync(store.settle([end(owner, **wrong)]))
    run_sync(finish(store, owner))
    (renewed,) = run_sync(store.renew([Renewal(owner.scope, owner.nonce, math.nan, 1.0)]))
    assert isinstance(renewed, ValueError)


def test_a_ref_beyond_64_kib_is_refused(store: RedisStore) -> None:
    owner = run_sync(win(store))
    (refused, _) = run_sync(store.settle([end(owner, ref="r" * 65_535), end(ask("absent"))]))
    assert isinstance(refused, ValueError)
    run_sync(finish(store, owner, ref="r" * 65_534))


def test_scripts_refuse_arguments_that_are_not_whole(store: RedisStore, server: services.RedisServer) -> None:
    from semel.stores.redis import record as scripts

    owner = ask()
    keys = [*store.settle_keys(end(owner, actor="ada"))]
    ending, _ = store.settle_args(end(owner, actor="ada"))
    attempts: list[tuple[Any, list[bytes], list[bytes]]] = [
        (scripts.CLAIM, keys[:4], [b"short"]),
        (scripts.CLAIM, keys[:4], [scripts.pack_ask(owner, 0.0) + b"more"]),
        (scripts.SETTLE, keys, [b"short", b""]),
        (scripts.SETTLE, keys, [ending]),
        (scripts.SETTLE, keys[:5], [ending, b""]),
        (
            scripts.RENEW,
            keys[:3],
            [scripts.pack_renewal(Renewal(owner.scope, owner.nonce, 1, 1), 0.0) + b"more"],
        ),
        (scripts.NOTE, keys[:2], [scripts.pack_note(Note(owner.scope, owner.nonce, b""), 0.0)]),
        (scripts.SWEEP, keys[:2], [b"9", b"1"]),
    ]
    with client(server) as stranger:
        for script, named, args in attempts:
            reply = stranger.register_script(script.source)
            with pytest.raises(Exception, match=r"semel: the .* is (malformed|too short)"):
                reply(keys=named, args=args)
        assert stranger.dbsize() == 0


def test_a_crossed_reply_is_refused_and_nothing_of_it_is_used() -> None:
    mine, other = ask(), ask("another")
    body = b"P" + b"somebody else's record"
    for reply in (other.scope.hash[:8] + mine.nonce + body, mine.scope.hash[:8] + other.nonce + body, b""):
        with pytest.raises(StoreUnavailable, match="crossed reply"):
            verdict(mine, reply)
    for reply in (other.scope.hash[:8] + mine.nonce + b"O", mine.scope.hash[:8] + other.nonce + b"O", b"O"):
        with pytest.raises(StoreUnavailable, match="crossed reply"):
            answer(mine.scope, mine.nonce, reply)
    with pytest.raises(StoreUnavailable, match="crossed reply"):
        read_peek(mine.scope, other.scope.hash[:8] + b"N" + struct.pack("<d", 1.0))


# -------------------------------------------------------------------------------------------------- large results


@BOTH
def test_large_results_come_back_one_by_one_and_in_batches(
    server: services.RedisServer, colour: Colour
) -> None:
    async def main() -> None:
        store = opened(server, colour)
        owner = await win(store, "large")
        await finish(store, owner, result=LARGE)
        (found,) = await store.claim([ask("large")])
        assert isinstance(found, Replay)
        assert found.record.result == LARGE
        record, _ = await store.peek(owner.scope)
        assert record == found.record
        first, second = await store.claim([ask("large"), ask("small")])
        assert isinstance(first, Replay)
        assert first.record.result == LARGE
        assert isinstance(second, Won)
        mismatch, again = await store.claim([ask("large", fingerprint=b"x" * 32), ask("large")])
        assert isinstance(mismatch, Replay)  # the first call had none
        assert isinstance(again, Replay)
        await store.aclose()

    run(colour, main)


@BOTH
def test_large_steps_of_an_unknown_run_come_back(server: services.RedisServer, colour: Colour) -> None:
    async def main() -> None:
        store = opened(server, colour)
        owner = await win(store, policy=Policy.HOLD)
        assert await store.note(Note(owner.scope, owner.nonce, LARGE)) is Answer.OK
        await finish(store, owner, Kind.UNKNOWN)
        (found,) = await store.claim([ask()])
        assert isinstance(found, Unknown)
        assert found.record is not None
        assert found.record.steps == LARGE
        page = await store.scan(Query())
        assert [record.steps for record in page.records] == [LARGE]
        await store.aclose()

    run(colour, main)


def test_a_large_and_a_small_settle_of_one_key_in_one_batch_keep_their_order(
    server: services.RedisServer,
) -> None:
    async def main() -> None:
        store = opened(server, "async")
        for n in range(20):
            owner = await win(store, f"key-{n}", policy=Policy.HOLD)
            ends = [
                end(owner, Kind.UNKNOWN, result=LARGE),
                end(owner, result=b"small"),
                end(owner, Kind.FAILED),
            ]
            assert await store.settle(ends) == [Answer.OK, Answer.OK, Answer.REFUSED]
            (found,) = await store.claim([ask(f"key-{n}")])
            assert isinstance(found, Replay)
            assert found.record.result == b"small"
        await store.aclose()

    asyncio.run(main())


def test_a_renewal_and_a_note_do_not_rewrite_a_long_record(
    store: RedisStore, server: services.RedisServer
) -> None:
    owner = run_sync(win(store))
    assert run_sync(store.note(Note(owner.scope, owner.nonce, b"x" * (1 << 20)))) is Answer.OK
    server.command("CONFIG", "RESETSTAT")
    assert run_sync(store.renew([Renewal(owner.scope, owner.nonce, 20.0, 60.0)])) == [Answer.OK]
    assert run_sync(store.note(Note(owner.scope, owner.nonce, b"y"))) is Answer.OK
    assert not {"set", "get"} & set(calls(server))
    record, now = run_sync(store.peek(owner.scope))
    assert record is not None
    assert record.steps == b"x" * (1 << 20) + b"y"
    assert record.lease_until > now + 19


# -------------------------------------------------------------------------------------------------------- the index


def test_a_scan_goes_through_all_shards_in_pages_without_gap_or_repeat(
    store: RedisStore, server: services.RedisServer
) -> None:
    asks = [ask(f"key-{n}") for n in range(700)]
    run_sync(store.claim(asks))
    run_sync(store.settle([end(owner, Kind.FAILED) for owner in asks[:300]]))
    run_sync(store.settle([end(owner) for owner in asks[300:400]]))
    wanted = sorted(owner.scope.key for owner in asks[:300] + asks[400:])
    server.command("CONFIG", "RESETSTAT")
    keys, cursor = [], ""
    while True:
        page = run_sync(store.scan(Query(limit=97, cursor=cursor)))
        assert len(page.records) <= 97
        keys += [record.scope.key for record in page.records if record.scope]
        cursor = page.cursor
        if not cursor:
            break
    assert sorted(keys) == wanted
    assert not {"scan", "keys"} & set(calls(server))
    failed = run_sync(store.scan(Query(states=frozenset({State.FAILED}), limit=1000))).records
    assert {record.scope.key for record in failed if record.scope} == {
        owner.scope.key for owner in asks[:300]
    }


def test_a_page_ends_early_when_the_search_has_used_half_of_its_time(server: services.RedisServer) -> None:
    with sync_store(server, timeout=4.0) as filler:
        run_sync(filler.claim([ask(f"key-{n}") for n in range(300)]))
    with sync_store(server, timeout=0.05) as hasty:
        found, cursor, pages = 0, "", 0
        while not pages or cursor:
            try:
                page = run_sync(hasty.scan(Query(limit=1000, cursor=cursor)))
            except StoreUnavailable:
                continue  # a busy machine: not even one call fits into the time
            found, cursor, pages = found + len(page.records), page.cursor, pages + 1
    assert found == 300


def test_a_record_removed_by_hand_leaves_the_index_when_it_is_looked_for(
    store: RedisStore, server: services.RedisServer
) -> None:
    asks = [ask(f"key-{n}") for n in range(20)]
    run_sync(store.claim(asks))
    with client(server) as stranger:
        for owner in asks[:10]:
            stranger.delete(record_key(store, owner.scope))
        assert len(run_sync(store.scan(Query())).records) == 10
        left = sum(stranger.zcard(key) for key in all_keys(stranger, b"*:o"))
        assert left == 10


def test_the_index_does_not_grow_by_runs_that_died_and_failures_that_ended(
    store: RedisStore, server: services.RedisServer
) -> None:
    """All in one shard: what has ended by time goes with later claims and failures, without a purge."""
    same = [ask(scope=where) for where in _same_shard(store, 400)]
    for owner in same:
        dying = model.Ask(owner.scope, owner.nonce, 0.0, 0.001)
        assert isinstance(run_sync(store.claim([dying]))[0], Won)
        run_sync(store.settle([end(owner, Kind.FAILED, retention=0.001)]))
        run_sync(store.claim([dying]))
    with client(server) as stranger:
        tag = store.tag(same[0].scope).encode()
        assert stranger.zcard(tag + b":o") < 200
        assert stranger.zcard(tag + b":f") < 20


def _same_shard(store: RedisStore, many: int) -> list[Any]:
    found: list[Any] = []
    n = 0
    while len(found) < many:
        n += 1
        where = scope(f"key-{n}")
        if where.hash[1] == 7 and where.hash[0] & 3 == 1:
            found.append(where)
    return found


def test_purge_drops_ended_entries_up_to_its_limit(store: RedisStore, server: services.RedisServer) -> None:
    asks = [ask(f"key-{n}", lease=0.0, retention=0.001) for n in range(40)]
    run_sync(store.claim(asks))
    live = run_sync(win(store, "live"))
    with client(server) as stranger:
        entries = sum(stranger.zcard(key) for key in all_keys(stranger, b"*:o"))
        dropped = run_sync(store.purge(5))
        assert dropped <= 5
        for _ in range(40):
            dropped += run_sync(store.purge(5))
        assert dropped == entries - 1
        assert run_sync(store.purge(5)) == 0
        assert run_sync(store.purge(0)) == 0
        assert stranger.zscore(store.tag(live.scope).encode() + b":o", live.scope.hash) is not None


@pytest.mark.parametrize("kind", [Kind.DONE, Kind.UNKNOWN, Kind.FAILED])
def test_what_is_forgotten_leaves_the_index_of_refs(server: services.RedisServer, kind: Kind) -> None:
    with sync_store(server, index=frozenset({"ref"})) as indexed, client(server) as stranger:
        for name in ("one", "other"):
            run_sync(finish(indexed, run_sync(win(indexed, name)), kind, ref="ord_1", retention=math.inf))
        for name in ("one", "other"):
            (entries,) = {stranger.zcard(key) for key in stranger.keys("*:i:*")} or {0}
            assert entries >= 1
            run_sync(indexed.settle([model.Settle(ask(name).scope, b"", Kind.FORGOTTEN, 60.0)]))
        assert stranger.keys("*:i:*") == []


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("index", [frozenset(), frozenset({"ref"})], ids=["without", "with"])
def test_a_decision_ends_what_was_indexed_of_an_unknown_record(
    server: services.RedisServer, index: frozenset[str], renamed: bool
) -> None:
    with (
        sync_store(server, index=frozenset({"ref"})) as indexed,
        sync_store(server, index=index) as decider,
        client(server) as stranger,
    ):
        owner = run_sync(win(indexed, "one"))
        run_sync(finish(indexed, owner, Kind.UNKNOWN, ref="ord_1"))
        (entry,) = stranger.keys("*:i:*")
        assert stranger.pttl(entry) == -1
        word = model.Settle(owner.scope, b"", Kind.DONE, 60.0, ref="ord_2" if renamed else None)
        word = msgspec.structs.replace(word, new_nonce=os.urandom(16), actor="me")
        assert run_sync(decider.settle([word])) == [Answer.OK]
        lives = [stranger.pttl(name) for name in stranger.keys("*:i:*")]
        assert all(0 < life <= 60_001 for life in lives), lives
        found = [len(run_sync(indexed.scan(Query(ref=ref))).records) for ref in ("ord_1", "ord_2")]
        assert found == ([0, len(index)] if renamed else [1, 0])


def test_refs_are_found_only_where_they_are_indexed(store: RedisStore, server: services.RedisServer) -> None:
    with pytest.raises(ConfigurationError, match="index="):
        run_sync(store.scan(Query(ref="ord_1")))
    with sync_store(server, index=frozenset({"ref"})) as indexed, client(server) as stranger:
        for n in range(30):
            run_sync(finish(indexed, run_sync(win(indexed, f"key-{n}")), ref=f"ord_{n % 10}"))
        page = run_sync(indexed.scan(Query(ref="ord_3")))
        assert sorted(record.scope.key for record in page.records if record.scope) == [
            "key-13",
            "key-23",
            "key-3",
        ]
        assert all(0 < stranger.pttl(key) <= 60_001 for key in all_keys(stranger, b"*:i:*"))
        held = run_sync(win(indexed, "held"))
        run_sync(finish(indexed, held, Kind.UNKNOWN, ref="ord_h"))
        run_sync(finish(indexed, held, Kind.DONE))  # keeps its ref, and now it ends
        (record,) = run_sync(indexed.scan(Query(ref="ord_h"))).records
        assert record.state is State.DONE
        indexed._skew = 61.0
        assert run_sync(indexed.scan(Query(ref="ord_3"))).records == []


def test_counters_add_up_over_all_shards(store: RedisStore) -> None:
    for n in range(30):
        run_sync(finish(store, run_sync(win(store, f"done-{n}"))))
    run_sync(finish(store, run_sync(win(store, "f")), Kind.FAILED))
    run_sync(finish(store, run_sync(win(store, "r")), Kind.RELEASED))
    run_sync(finish(store, run_sync(win(store, "u")), Kind.UNKNOWN))
    run_sync(store.settle([end(ask("f"), Kind.FORGOTTEN, nonce=b"")]))
    run_sync(win(store, "t"))
    store._skew = 11.0
    run_sync(win(store, "t"))
    assert run_sync(store.counters()) == {
        "done": 30, "failed": 1, "released": 1, "unknown": 1, "forgotten": 1, "taken_over": 1
    }  # fmt: skip


def test_an_audit_trail_lives_as_long_as_its_youngest_line(
    store: RedisStore, server: services.RedisServer
) -> None:
    owner = run_sync(win(store))
    run_sync(finish(store, owner, Kind.UNKNOWN))
    key = store.tag(owner.scope).encode() + b":a:" + owner.scope.hash
    with client(server) as stranger:
        run_sync(store.settle([word(owner, Kind.FAILED, retention=100.0)]))
        assert 159_000 < stranger.pttl(key) <= 160_001
        run_sync(store.settle([end(owner, Kind.FORGOTTEN, nonce=b"", actor="bob", retention=10.0)]))
        assert 159_000 < stranger.pttl(key) <= 160_001
        run_sync(finish(store, run_sync(win(store)), Kind.UNKNOWN))
        run_sync(store.settle([word(owner, Kind.DONE, retention=math.inf)]))
        assert stranger.pttl(key) == -1
        run_sync(store.settle([end(owner, Kind.FORGOTTEN, nonce=b"", actor="bob", retention=10.0)]))
        assert stranger.pttl(key) == -1
    assert [event.actor for event in run_sync(store.scan(Query(history=owner.scope))).events] == [
        "ada",
        "bob",
    ] * 2


# ----------------------------------------------------------------------------------------------------- being woken


@BOTH
def test_a_settle_of_another_store_wakes_and_of_its_own_too(
    server: services.RedisServer, colour: Colour
) -> None:
    async def main() -> None:
        mine, other = opened(server, colour), opened(server, colour)
        for settler in (other, mine):
            owner = await win(settler, f"key of {settler is mine}")
            woken = threading.Event()
            unwatch = await mine.watch(owner.scope, woken.set)
            woken.clear()
            await finish(settler, owner)
            assert await asyncio.to_thread(woken.wait, 5) if colour == "async" else woken.wait(5)
            await unwatch()
            await unwatch()
        await mine.aclose()
        await other.aclose()

    run(colour, main)


def test_two_watchers_of_one_key_leave_one_by_one(store: RedisStore) -> None:
    owner = run_sync(win(store))
    first, second = threading.Event(), threading.Event()
    leave_first = run_sync(store.watch(owner.scope, first.set))
    leave_second = run_sync(store.watch(owner.scope, second.set))
    drive(leave_first())
    first.clear()
    second.clear()
    run_sync(finish(store, owner))
    assert second.wait(5)
    assert not first.is_set()
    drive(leave_second())


# --------------------------------------------------------------------------------------------------------- the rest


def test_verdicts_of_every_kind_come_through(store: RedisStore) -> None:
    owner = run_sync(win(store, fingerprint=b"1" * 32))
    (busy,) = run_sync(store.claim([ask()]))
    assert isinstance(busy, Busy)
    assert 9 < busy.retry_after <= 10
    assert run_sync(store.claim([ask(fingerprint=b"2" * 32)])) == [Mismatch()]
    run_sync(finish(store, owner, Kind.RELEASED, after=30.0))
    (delayed,) = run_sync(store.claim([ask()]))
    assert isinstance(delayed, Busy)
    assert delayed.delayed


def test_R28_the_tag_names_the_slot_of_the_record(store: RedisStore) -> None:
    where = scope()
    assert store.tag(where).startswith("{semel:")
    assert record_key(store, where).startswith(store.tag(where).encode())
    tags = {store.tag(scope(f"key-{n}")) for n in range(20_000)}
    assert len(tags) == 1024


def test_R28_a_settle_can_be_queued_in_a_callers_transaction(
    store: RedisStore, server: services.RedisServer
) -> None:
    from semel.stores.redis.record import SETTLE

    owner = run_sync(win(store))
    finished = end(owner, result=b"body")
    with client(server) as stranger, stranger.pipeline(transaction=True) as pipe:
        pipe.set(store.tag(owner.scope) + ":cart", b"paid")
        pipe.eval(
            SETTLE.source,
            len(store.settle_keys(finished)),
            *store.settle_keys(finished),
            *store.settle_args(finished),
        )
        replies = pipe.execute()
        assert store.settle_answer(finished, replies[-1]) is Answer.OK
        assert stranger.get(store.tag(owner.scope) + ":cart") == b"paid"
    (found,) = run_sync(store.claim([ask()]))
    assert isinstance(found, Replay)
