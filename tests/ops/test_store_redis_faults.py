"""The Redis store in trouble and on unusual servers: settings that eat records, replicas, restarts, ACLs, full memory."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis
import redis.asyncio

from semel.doctor.advice import advice_for
from semel.errors import CodecError, ConfigurationError, SemelWarning, StoreUnavailable
from semel.model import Answer, Kind, Note, Policy, Renewal, Replay, State, Won
from semel.runtime import run_sync
from semel.store import Query, Settings, adopt, open_store
from semel.stores import redis as module
from semel.stores.redis import RedisStore, open_url
from semel.testing import services
from semel.testing.proxy import RESP, Proxy
from semel.testing.services.redis import redis_program
from tests.ops.redis_store_lab import (
    BOTH,
    Colour,
    ask,
    client,
    end,
    finish,
    hurried,
    opened,
    record_key,
    run,
    scope,
    sync_store,
    win,
    word,
)

pytestmark = pytest.mark.services


# ---------------------------------------------------------------------------------------------------- opening it


@pytest.mark.parametrize(
    "url",
    ["redis://127.0.0.1:1/0", "valkey://127.0.0.1:1", "rediss://127.0.0.1:1", "valkeys://127.0.0.1:1",
     "unix:///tmp/none.sock", "redis+cluster://127.0.0.1:1", "redis+sentinel://127.0.0.1:1/service",
     "valkey+cluster://127.0.0.1:1", "redis://127.0.0.1:1/0?eviction=accept"],
)  # fmt: skip
@BOTH
def test_R29_nothing_is_connected_when_a_store_is_opened(url: str, colour: Colour) -> None:
    store = open_store(url, Settings(), colour)
    assert isinstance(store, RedisStore)
    assert store.colour == colour
    run(colour, store.aclose)


@pytest.mark.parametrize(
    "url, settings, told",
    [
        ("redis://127.0.0.1/0?eviction=maybe", Settings(), "eviction=accept"),
        ("redis://127.0.0.1/0?colour=blue", Settings(), "colour"),
        ("redis://127.0.0.1/zero", Settings(), "zero"),
        ("redis+sentinel://127.0.0.1", Settings(), "service"),
        ("redis+cluster://127.0.0.1/3", Settings(), "database"),
        ("redis://127.0.0.1", Settings(prefix="a{b}"), "prefix"),
        ("redis://127.0.0.1", Settings(prefix=""), "prefix"),
        ("redis://127.0.0.1", Settings(index=frozenset({"ref", "trace"})), "trace"),
        ("redis://127.0.0.1", Settings(acks=-1), "acks"),
    ],
)
def test_what_cannot_work_is_refused_when_the_store_is_opened(
    url: str, settings: Settings, told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        open_url(url, settings, "sync")


def test_a_missing_driver_is_told_with_the_extra_to_install() -> None:
    program = (
        "import sys; sys.modules['redis'] = None\n"
        "from semel.errors import ConfigurationError\n"
        "from semel.store import Settings, open_store\n"
        "try: open_store('redis://127.0.0.1', Settings(), 'sync')\n"
        "except ConfigurationError as error: print(error, isinstance(error.__cause__, ImportError))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "semel[redis]" in done.stdout
    assert done.stdout.strip().endswith("True")


def test_R30_a_client_handed_in_keeps_its_settings_and_is_never_closed() -> None:
    with services.redis(password="s3cret") as server:
        mine = redis.Redis(host=server.host, port=server.port, password="s3cret")
        store = adopt(mine, Settings(), "sync")
        assert isinstance(store, RedisStore)
        run_sync(finish(store, run_sync(win(store))))
        run_sync(store.aclose())
        assert mine.ping()
        mine.close()

        async def main() -> None:
            theirs = redis.asyncio.Redis(host=server.host, port=server.port, password="s3cret")
            store = module.adopt(theirs, Settings(), "async")
            (found,) = await store.claim([ask()])
            assert isinstance(found, Replay)
            await store.aclose()
            assert await theirs.ping()
            await theirs.aclose()

        asyncio.run(main())


def test_a_client_of_the_other_colour_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="async"):
        adopt(redis.Redis(), Settings(), "async")
    with pytest.raises(ConfigurationError, match="Redis"):
        module.adopt(object(), Settings(), "sync")


@BOTH
def test_an_unreachable_server_and_a_wrong_password_are_told_in_time(colour: Colour) -> None:
    with services.redis(password="right") as server:

        async def main() -> None:
            wrong = opened(f"redis://:wrong@{server.host}:{server.port}", colour, timeout=30)
            with pytest.raises(ConfigurationError, match="password"):
                await wrong.claim([ask()])
            await wrong.aclose()
            nobody = opened("redis://127.0.0.1:1", colour, timeout=0.5)
            begun = time.monotonic()
            for call in (
                nobody.claim([ask()]),
                nobody.settle([end(ask())]),
                nobody.peek(scope()),
                nobody.facts(),
            ):
                with pytest.raises(StoreUnavailable, match="reach") as raised:
                    await call
                assert raised.value.__cause__ is not None
            for other in (nobody.renew([]), nobody.scan(Query()), nobody.purge(1), nobody.counters()):
                with pytest.raises(StoreUnavailable):
                    await other
            with pytest.raises(StoreUnavailable):
                await nobody.note(Note(scope(), b"n" * 16, b"x"))
            assert time.monotonic() - begun < 9 * 0.5 + 15
            await nobody.aclose()

        run(colour, main)


# ----------------------------------------------------------------------------------------------- settings and facts


@BOTH
def test_a_server_that_evicts_records_is_refused_at_first_use_with_the_exact_remedy(colour: Colour) -> None:
    with services.redis(config={"maxmemory": "100mb", "maxmemory-policy": "volatile-lru"}) as server:

        async def main() -> None:
            store = opened(server, colour)
            for call in (
                store.claim([ask()]),
                store.settle([end(ask())]),
                store.renew([]),
                store.peek(scope()),
            ):
                with pytest.raises(ConfigurationError, match="CONFIG SET maxmemory-policy noeviction"):
                    await call
            facts = await store.facts()
            assert facts.evicts
            assert any("CONFIG SET maxmemory-policy noeviction" in warning for warning in facts.warnings)
            accepting = opened(f"{server.url}?eviction=accept", colour)
            await win(accepting)
            assert (await accepting.facts()).evicts
            server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
            await win(store, "another")
            assert not (await store.facts()).evicts
            await store.aclose()
            await accepting.aclose()

        run(colour, main)


def test_facts_tell_what_the_live_settings_mean() -> None:
    with services.redis() as server, sync_store(server) as store:
        facts = run_sync(store.facts())
        assert (facts.store, facts.durable_writes, facts.survives_failover, facts.evicts) == (
            "redis",
            False,
            True,
            False,
        )
        assert facts.version.count(".") == 2
        assert any("appendonly yes" in warning for warning in facts.warnings)
        server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        facts = run_sync(store.facts())
        assert not any("maxmemory" in warning for warning in facts.warnings)
        assert any("harmless until" in note for note in advice_for(facts))
        run_sync(win(store))  # no limit is set, so nothing is evicted
    with services.redis(appendonly="everysec") as server, sync_store(server) as store:
        facts = run_sync(store.facts())
        assert not facts.durable_writes
        assert any("CONFIG SET appendfsync always" in warning for warning in facts.warnings)
    with services.redis(appendonly="always") as server, sync_store(server) as store:
        facts = run_sync(store.facts())
        assert facts.durable_writes
        assert facts.warnings == ()
        assert facts.settings["appendfsync"] == "always"


def test_facts_of_valkey(valkey_server: services.RedisServer) -> None:
    with sync_store(valkey_server.url.replace("redis://", "valkey://")) as store:
        facts = run_sync(store.facts())
        assert facts.store == "valkey"
        assert facts.version


def test_a_user_who_may_not_ask_about_settings_is_served_and_warned() -> None:
    with services.redis(config={"maxmemory": "100mb", "maxmemory-policy": "volatile-lru"}) as server:
        rules = ("on", ">pw", "~{semel:*", "&{semel:*", "+@all", "-info", "-config")
        server.command("ACL", "SETUSER", "app", *rules)
        with sync_store(f"redis://app:pw@{server.host}:{server.port}") as store:
            with pytest.warns(SemelWarning, match="whether the server drops keys"):
                run_sync(finish(store, run_sync(win(store))))
            warnings = run_sync(store.facts()).warnings
            assert any("INFO" in warning for warning in warnings)
            assert any("CONFIG GET" in warning for warning in warnings)


class _Managed(services.RedisServer):
    """As providers do it: CONFIG goes by another name."""

    def argv(self) -> list[str]:
        return [*super().argv(), "--rename-command", "CONFIG", "no-config"]


def test_a_server_without_the_config_command_is_served_and_warned() -> None:
    managed = _Managed(program=redis_program())
    with managed.open() as server, sync_store(server) as store:
        run_sync(win(store))
        assert any("CONFIG GET" in warning for warning in run_sync(store.facts()).warnings)


def test_a_user_who_may_not_publish_still_settles() -> None:
    with services.redis() as server:
        server.command("ACL", "SETUSER", "app", "on", ">pw", "~{semel:*", "+@all", "-spublish")
        with sync_store(f"redis://app:pw@{server.host}:{server.port}") as store:
            run_sync(finish(store, run_sync(win(store))))
            assert isinstance(run_sync(store.claim([ask()]))[0], Replay)


def test_a_user_without_rights_to_our_keys_is_told_so() -> None:
    with services.redis() as server:
        server.command("ACL", "SETUSER", "app", "on", ">pw", "~other:*", "&*", "+@all")
        with (
            sync_store(f"redis://app:pw@{server.host}:{server.port}") as store,
            pytest.raises(ConfigurationError, match="ACL"),
        ):
            run_sync(store.claim([ask()]))


def test_a_user_without_a_command_that_a_script_needs_is_told_so() -> None:
    with services.redis() as server:
        server.command("ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-zadd")
        login = f"redis://app:pw@{server.host}:{server.port}"
        with sync_store(login) as store, pytest.raises(ConfigurationError, match="ACL"):
            run_sync(store.claim([ask()]))


def test_what_the_server_refuses_for_another_reason_is_told_and_changes_nothing() -> None:
    with services.redis(config={"proto-max-bulk-len": "1mb"}) as server, sync_store(server) as store:
        owner = run_sync(win(store))
        assert run_sync(store.note(Note(owner.scope, owner.nonce, b"x" * 700_000))) is Answer.OK
        with pytest.raises(CodecError, match="proto-max-bulk-len"):
            run_sync(store.note(Note(owner.scope, owner.nonce, b"y" * 700_000)))
        record, _ = run_sync(store.peek(owner.scope))
        assert record is not None
        assert record.steps == b"x" * 700_000


@BOTH
def test_a_large_replay_that_is_cut_off_fails_alone_in_its_batch(
    redis_server: services.RedisServer, colour: Colour
) -> None:
    redis_server.flush()
    with Proxy(redis_server.host, redis_server.port, framing=RESP) as proxy:

        async def main() -> None:
            store = opened(f"redis://{proxy.host}:{proxy.port}", colour, timeout=60)
            await finish(store, await win(store, "large"), result=b"x" * 100_000)
            asks = [ask("large"), ask("small")]
            for at in (2, 3):  # the second question about it, and that question asked again
                proxy.blackhole(match=lambda request: asks[0].nonce in request, at=at)
            begun = time.monotonic()
            with hurried(store, 1.5):
                large, small = await store.claim(asks)
            assert isinstance(large, StoreUnavailable)
            assert isinstance(small, Won)
            assert time.monotonic() - begun < 20
            await store.aclose()

        run(colour, main)


def test_a_server_before_7_is_refused_with_the_remedy() -> None:
    refused = pytest.raises(ConfigurationError, match=r"6\.2\.14.*Redis 7\.0")
    with (
        _answering(b"redis_version:6.2.14\r\n") as port,
        sync_store(f"redis://127.0.0.1:{port}") as store,
        refused,
    ):
        run_sync(store.claim([ask()]))


@contextmanager
def _answering(info: bytes) -> Iterator[int]:
    """Something that says INFO as an old server does; no old server runs here."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                while asked := peer.recv(4096):
                    reply = b"$%d\r\n%s\r\n" % (len(info), info) if b"INFO" in asked else b"+OK\r\n"
                    peer.sendall(reply)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


# -------------------------------------------------------------------------------------------------------- replicas


@contextmanager
def _replicated() -> Iterator[tuple[services.RedisServer, services.RedisServer]]:
    with services.redis(config={"repl-diskless-sync-delay": 0}) as master:
        config = {"replicaof": f"{master.host} {master.port}"}
        with services.redis(config=config) as replica:
            deadline = time.monotonic() + 20
            while master.info("replication").get("slave0", {}).get("state") != "online":
                assert time.monotonic() < deadline, "the replica did not come up"
                time.sleep(0.01)
            yield master, replica


@BOTH
def test_acks_wait_for_replicas_and_a_short_count_is_unavailable_and_safe_by_nonce(colour: Colour) -> None:
    with _replicated() as (master, replica):

        async def main() -> None:
            store = opened(master, colour, acks=1, timeout=2.0)
            facts = await store.facts()
            assert facts.survives_failover
            assert facts.settings["connected-slaves"] == "1"
            owner = await win(store)
            with client(replica) as stranger:
                assert stranger.exists(
                    record_key(store, owner.scope)
                )  # it was there when the claim was answered
            assert await store.renew([Renewal(owner.scope, owner.nonce, 10.0, 60.0)]) == [Answer.OK]
            assert await store.note(Note(owner.scope, owner.nonce, b"step")) is Answer.OK
            await finish(store, owner, result=b"x" * 100_000)
            (found,) = await store.claim([ask()])
            assert isinstance(found, Replay)
            assert len(found.record.result) == 100_000

            replica.pause()
            late = ask("late")
            (short,) = await store.claim([late])
            assert isinstance(short, StoreUnavailable)
            assert "0 of the 1 replicas" in str(short)
            replica.resume()
            (again,) = await store.claim([late])  # the same nonce: it was granted already
            assert isinstance(again, Won)
            assert again.record.attempts == 1
            await store.aclose()

        run(colour, main)


def test_replicas_without_acks_are_warned_of() -> None:
    with _replicated() as (master, _), sync_store(master) as store:
        facts = run_sync(store.facts())
        assert not facts.survives_failover
        assert any("acks=1" in warning for warning in facts.warnings)


# ----------------------------------------------------------------------------------------------------------- faults


@BOTH
def test_a_restart_between_claim_and_settle_ends_in_one_stored_outcome(colour: Colour) -> None:
    with services.redis(appendonly="always") as server:

        async def main() -> None:
            store = opened(server, colour, timeout=5.0)
            owner = await win(store)
            server.kill()
            server.start()
            await finish(store, owner, result=b"kept")
            (found,) = await store.claim([ask()])
            assert isinstance(found, Replay)
            assert found.record.result == b"kept"
            await store.aclose()

        run(colour, main)


@BOTH
def test_a_lost_reply_is_asked_for_again_with_the_same_nonce(
    redis_server: services.RedisServer, colour: Colour
) -> None:
    redis_server.flush()
    with Proxy(redis_server.host, redis_server.port, framing=RESP) as proxy:

        async def main() -> None:
            store = opened(f"redis://{proxy.host}:{proxy.port}", colour)
            await store.peek(scope())
            await finish(store, await win(store, "warm up"))
            owner = ask()
            proxy.swallow_reply(match=lambda request: b"EVALSHA" in request)
            (won,) = await store.claim([owner])
            assert isinstance(won, Won)
            assert won.record.attempts == 1
            proxy.swallow_reply(match=lambda request: b"EVALSHA" in request)
            await finish(store, owner, result=b"once")
            (found,) = await store.claim([ask()])
            assert isinstance(found, Replay)
            assert found.record.result == b"once"
            await store.aclose()

        run(colour, main)


@BOTH
def test_a_batch_on_a_dead_server_fails_item_by_item_in_time(colour: Colour) -> None:
    with services.redis() as server:

        async def main() -> None:
            store = opened(server, colour, timeout=60)
            owner = await win(store)
            server.kill()
            begun = time.monotonic()
            with hurried(store, 0.5):
                lost: list[object] = [*await store.claim([ask("a"), ask("b")])]
                lost += await store.settle([end(owner), end(owner)])
                assert [type(found) for found in lost] == [StoreUnavailable] * 4
                with pytest.raises(StoreUnavailable):
                    await store.note(Note(owner.scope, owner.nonce, b"step"))
            assert time.monotonic() - begun < 20
            await store.aclose()

        run(colour, main)


def test_full_memory_refuses_a_claim_and_leaves_nothing_half_written() -> None:
    with services.redis() as server, sync_store(server, timeout=1.0) as store:
        owner = run_sync(win(store))
        server.command("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            run_sync(store.claim([ask("another")]))
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            run_sync(store.settle([end(owner, Kind.FAILED)]))
        assert run_sync(store.peek(scope("another")))[0] is None
        record, _ = run_sync(store.peek(owner.scope))
        assert record is not None
        assert record.state is State.RUNNING
        assert [found.nonce for found in run_sync(store.scan(Query())).records] == [owner.nonce]
        server.command("CONFIG", "SET", "maxmemory", "0")
        run_sync(finish(store, owner))


@BOTH
def test_a_full_server_refuses_nobody_who_frees_its_memory(colour: Colour) -> None:
    with services.redis() as server:

        async def main() -> None:
            store = opened(server, colour)
            done, lost = await win(store, "done"), await win(store, "lost", policy=Policy.HOLD)
            mine = await win(store, "mine")
            await finish(store, done, result=b"x" * 500_000)
            await finish(store, lost, Kind.UNKNOWN)
            server.command("CONFIG", "SET", "maxmemory", "1")
            forget = end(done, Kind.FORGOTTEN, actor="ada", reason="full")
            assert await store.settle([forget]) == [Answer.OK]
            assert await store.settle([word(lost, Kind.RELEASED)]) == [Answer.OK]
            assert await store.settle([end(mine, Kind.RELEASED)]) == [Answer.OK]
            with pytest.raises(StoreUnavailable, match="maxmemory"):
                await store.claim([ask("done")])
            assert (await store.peek(done.scope))[0] is None
            released, _ = await store.peek(lost.scope)
            assert released is not None
            assert released.state is State.RELEASED
            for where, kind in ((done.scope, Kind.FORGOTTEN), (lost.scope, Kind.RELEASED)):
                (event,) = (await store.scan(Query(history=where))).events
                assert (event.actor, event.kind) == ("ada", kind)
            assert (await store.scan(Query())).records == []
            counted = await store.counters()
            assert (counted["forgotten"], counted["released"]) == (1, 2)
            await store.aclose()

        run(colour, main)


def test_a_record_that_cannot_be_forgotten_as_a_whole_stays(redis_server: services.RedisServer) -> None:
    redis_server.flush()
    with sync_store(redis_server) as store, client(redis_server) as stranger:
        owner = run_sync(win(store, policy=Policy.HOLD))
        run_sync(finish(store, owner, Kind.UNKNOWN))
        counters = store.tag(owner.scope) + ":c"
        assert stranger.delete(counters)
        stranger.set(counters, b"theirs")
        with pytest.raises(ConfigurationError, match="another program's data"):
            run_sync(store.settle([end(owner, Kind.FORGOTTEN)]))
        assert [record.nonce for record in run_sync(store.scan(Query())).records] == [owner.nonce]


def test_R29_a_forked_child_and_its_parent_use_the_store_side_by_side(
    redis_server: services.RedisServer,
) -> None:
    redis_server.flush()
    with sync_store(redis_server) as store:
        run_sync(win(store, "before"))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run_sync(finish(store, run_sync(win(store, "child"))))
                status = 0
            finally:
                os._exit(status)
        run_sync(finish(store, run_sync(win(store, "parent"))))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for key in ("child", "parent"):
            assert isinstance(run_sync(store.claim([ask(key)]))[0], Replay)


def test_a_cluster_serves_scans_purges_counters_and_batches(redis_cluster: services.RedisCluster) -> None:
    redis_cluster.flush()

    async def main() -> None:
        store = opened(redis_cluster.url, "async", index=frozenset({"ref"}), timeout=10.0)
        asks = [ask(f"key-{n}") for n in range(300)]
        assert all(isinstance(found, Won) for found in await store.claim(asks))
        ends = [
            end(owner, Kind.FAILED if n % 2 else Kind.DONE, ref=f"ord_{n}") for n, owner in enumerate(asks)
        ]
        assert await store.settle(ends) == [Answer.OK] * 300
        keys: list[str] = []
        cursor = ""
        while True:
            page = await store.scan(Query(limit=40, cursor=cursor))
            keys += [record.scope.key for record in page.records if record.scope]
            cursor = page.cursor
            if not cursor:
                break
        assert sorted(keys) == sorted(f"key-{n}" for n in range(1, 300, 2))
        (record,) = (await store.scan(Query(ref="ord_7"))).records
        assert record.ref == "ord_7"
        assert await store.counters() == {"done": 150, "failed": 150}
        await store.claim([ask(f"dying-{n}", lease=0.0, retention=0.001) for n in range(30)])
        assert sum([await store.purge(1000) for _ in range(2)]) <= 30
        assert await store.purge(1000) == 0
        facts = await store.facts()
        assert facts.settings["topology"] == "cluster"
        assert not facts.survives_failover
        await store.aclose()

    asyncio.run(main())


def test_R28_the_tag_keeps_a_callers_key_in_the_slot_of_the_record(
    redis_cluster: services.RedisCluster,
) -> None:
    with sync_store(redis_cluster.url) as store:
        for n in range(50):
            where = scope(f"key-{n}")
            slots = {
                redis_cluster.masters()[0].command("CLUSTER", "KEYSLOT", key)
                for key in (record_key(store, where), f"{store.tag(where)}:cart")
            }
            assert len(slots) == 1


def test_what_a_replica_acknowledged_survives_a_failover_of_sentinel() -> None:
    with services.redis_sentinel() as group, sync_store(group.url, acks=1, timeout=15.0) as store:
        owner = run_sync(win(store, policy=Policy.HOLD))
        old = group.master()
        old.kill()
        group.wait_failed_over(old)
        record, _ = run_sync(store.peek(owner.scope))
        assert record is not None
        assert record.nonce == owner.nonce
