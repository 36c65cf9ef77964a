"""R28 when the server that answers the EXEC is not the one that holds the record: a failover of which one of them has not heard."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import redis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from semel import AsyncSemel, LeaseLost, Semel, StoreUnavailable, current_run, points
from semel.testing import services
from semel.testing.chaos.replicas import until
from semel.testing.proxy import RESP, Proxy
from semel.testing.services.topology import QUICK
from tests.within.lab import wait
from tests.within.test_redis import RedisLab, run
from tests.within.test_redis_moments import at, through


async def part_with(client: Any, sentinel: Any) -> None:
    for each in (client, *sentinel.sentinels):
        await wait(each.aclose() if hasattr(each, "aclose") else each.close())


@pytest.fixture
def left_behind(redis_server: services.RedisServer) -> Iterator[services.RedisServer]:
    """Knows what the master knows, and takes writes that nobody else will hear of: so does a master that was replaced."""
    with services.redis(config={"replica-read-only": "no"}) as server:
        server.command("REPLICAOF", "127.0.0.1", redis_server.port)
        yield server


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_R28_what_only_a_replaced_master_has_applied_is_not_recorded_as_done(
    redis_server: services.RedisServer, left_behind: services.RedisServer, colour: str
) -> None:
    lab = RedisLab(colour, redis_server.url)
    ran = []

    async def body() -> None:
        once = lab.face(settle_timeout=1, lease=2)
        lab.url = left_behind.url
        astray = lab.pipe()
        lab.url = redis_server.url
        right = lab.pipe()

        async def work(pipe: Any) -> str:
            ran.append(1)
            pipe.incr(lab.name("n"))
            assert redis_server.command("WAIT", 1, 20_000)
            return "done"

        with pytest.raises(StoreUnavailable, match=r"failover.*Call again"):
            await wait(once.within(astray).execute("k1", lab.fn(work), astray))
        assert (await wait(once.peek("k1"))).state == "running"
        assert left_behind.command("GET", lab.name("n")) == "1", "and not once for each try"
        again = await wait(once.within(right).execute("k1", lab.fn(work), right, wait=30))
        assert (again.value, again.replayed, len(ran)) == ("done", False, 2)
        assert lab.plain.get(lab.name("n")) == "1"

    run(lab, body())


@pytest.mark.parametrize("overtaken", [False, True], ids=["its answer is lost", "another owner made it"])
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_R28_what_a_new_master_has_applied_is_not_applied_again_for_a_store_that_was_left_behind(
    redis_server: services.RedisServer, left_behind: services.RedisServer, colour: str, overtaken: bool
) -> None:
    """The other way round: the store's connection leads to the master that was replaced, the pipeline's to the new one."""
    lab = RedisLab(colour, redis_server.url)
    promoted = left_behind

    async def body() -> None:
        once = lab.face(settle_timeout=1, lease=0.5 if overtaken else 30)
        lab.url = f"redis://127.0.0.1:{proxy.port}"
        pipe = lab.pipe(retry=None)

        def overtake() -> None:
            with (
                Semel(promoted.url, tenant=lab.tenant, timeout=20) as other,
                redis.Redis.from_url(promoted.url) as client,
            ):
                theirs = client.pipeline()
                other.within(theirs).execute("k1", lambda: theirs.incr(lab.name("n")) and "other", wait=30)

        async def work() -> str:
            pipe.incr(lab.name("n"))
            assert redis_server.command("WAIT", 1, 20_000)
            promoted.command("REPLICAOF", "NO", "ONE")
            if overtaken:
                taking = threading.Thread(target=overtake)
                taking.start()
                taking.join()
            else:
                proxy.swallow_reply(match=lambda request: request.endswith(b"\r\nEXEC\r\n"))
            return "done"

        with pytest.raises(StoreUnavailable, match=r"do not agree.*Call again"):
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert promoted.command("GET", lab.name("n")) == "1"

    with Proxy("127.0.0.1", promoted.port, framing=RESP) as proxy:
        run(lab, body())


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_R28_what_only_a_replaced_master_has_applied_is_not_told_as_done_when_its_answer_was_lost(
    redis_server: services.RedisServer, left_behind: services.RedisServer, colour: str
) -> None:
    """The pipeline has found the new master by then, where the record runs on; the store asks the old one, where it is done."""
    lab = RedisLab(colour, redis_server.url)
    promoted = left_behind

    async def body() -> None:
        once = lab.face(settle_timeout=1, lease=30)
        lab.url = f"redis://127.0.0.1:{proxy.port}"
        pipe = lab.pipe(retry=None)
        await wait(pipe.get("a connection to the old one").execute())

        async def work() -> str:
            pipe.incr(lab.name("n"))
            assert redis_server.command("WAIT", 1, 20_000)
            promoted.command("REPLICAOF", "NO", "ONE")
            proxy.target = ("127.0.0.1", promoted.port)
            proxy.swallow_reply(match=lambda request: request.endswith(b"\r\nEXEC\r\n"))
            return "done"

        with pytest.raises(StoreUnavailable, match=r"do not agree.*Call again"):
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert (lab.plain.get(lab.name("n")), promoted.command("GET", lab.name("n"))) == ("1", None)

    with Proxy("127.0.0.1", redis_server.port, framing=RESP) as proxy:
        run(lab, body())


@pytest.mark.parametrize("on_unknown", ["retry", "hold"])
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_R28_a_pipeline_of_another_sentinels_group_has_applied_nothing_and_keeps_no_key(
    redis_server: services.RedisServer, redis_sentinel: services.RedisSentinel, colour: str, on_unknown: str
) -> None:
    lab = RedisLab(colour, redis_server.url)
    sentinel: Any = (Sentinel if colour == "sync" else AsyncSentinel)(redis_sentinel.addresses)
    client = sentinel.master_for(redis_sentinel.service_name)

    async def body() -> None:
        once, pipe = lab.face(settle_timeout=0.5, lease=3600), client.pipeline()

        async def work() -> str:
            pipe.incr("n")
            return "done"

        with pytest.raises(StoreUnavailable, match=r"do not agree.*Nothing was applied. Call again"):
            await wait(once.within(pipe).execute("k1", lab.fn(work), on_unknown=on_unknown))
        assert (await wait(once.peek("k1"))).state == "released"
        with redis.Redis.from_url(redis_sentinel.master().url) as other:
            assert other.get("n") is None
        await part_with(client, sentinel)

    run(lab, body())


def test_R28_a_pipelines_pool_keeps_its_health_checks(redis_server: services.RedisServer) -> None:
    """A connection is back in its pool, and in the hands of the next run, before a run that was refused has ended."""

    async def body() -> None:
        async with AsyncSemel(redis_server.url, timeout=20) as once:
            client = redis.asyncio.Redis.from_url(redis_server.url, health_check_interval=30)

            async def one(number: int) -> None:
                pipe = client.pipeline()

                async def work() -> None:
                    pipe.execute_command(
                        "SET", "x", *([] if number % 2 else [1])
                    )  # without a value it is refused

                await asyncio.sleep(number * 0.0005)
                with suppress(redis.exceptions.ResponseError):
                    await once.within(pipe).execute(f"health-{number}", work)

            await asyncio.gather(*(one(number) for number in range(100)))
            lines: list[Any] = client.connection_pool._available_connections
            assert {line.health_check_interval for line in lines} == {30}
            await client.aclose()

    asyncio.run(body())


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_R28_a_pipeline_of_a_sentinels_client_leaves_the_master_that_was_replaced(colour: str) -> None:
    with services.redis_sentinel() as guarded:
        old = guarded.master()
        lab = RedisLab(colour, old.url)
        lab.url = guarded.url
        sentinel: Any = (Sentinel if colour == "sync" else AsyncSentinel)(guarded.addresses)
        client = sentinel.master_for(guarded.service_name)
        ran = []

        async def body() -> None:
            once, pipe = lab.face(settle_timeout=30, timeout=5, lease=60), client.pipeline()
            await wait(client.ping())  # connected to the old one

            async def work() -> str:
                ran.append(1)
                pipe.incr("n")
                assert old.command("WAIT", 1, 20_000)
                with old.paused():
                    if colour == "sync":
                        guarded.wait_failed_over(old)
                    else:
                        await asyncio.to_thread(guarded.wait_failed_over, old)
                    await wait(once.peek("another"))  # by now the face has left it
                return "done"

            assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).value == "done"
            assert (await wait(once.peek("k1"))).state == "done"
            with redis.Redis.from_url(guarded.master().url) as new:
                assert new.get("n") == b"1"
            assert len(ran) == 1
            await part_with(client, sentinel)

        run(lab, body())


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_R28_a_pipeline_leaves_a_replaced_master_that_never_heard_of_the_claim(
    redis_server: services.RedisServer, colour: str
) -> None:
    """One whose client knows an address only: behind it there is another server now, and its pool has a connection to the old one."""
    lab = RedisLab(colour, redis_server.url)

    async def body() -> None:
        once = lab.face()
        lab.url = f"redis://127.0.0.1:{proxy.port}"
        pipe = lab.pipe()
        await wait(pipe.get("a connection to the old one").execute())
        proxy.target = ("127.0.0.1", redis_server.port)

        async def work() -> str:
            pipe.incr(lab.name("n"))
            return "done"

        assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).value == "done"
        assert (lab.plain.get(lab.name("n")), old.command("GET", lab.name("n"))) == ("1", None)

    with services.redis() as old, Proxy("127.0.0.1", old.port, framing=RESP) as proxy:
        run(lab, body())


@pytest.mark.parametrize("ahead", ["the store", "the pipeline"])
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_R28_after_a_sentinels_failover_that_one_has_not_heard_of_nothing_is_wrong_with_the_settings(
    colour: str, ahead: str
) -> None:
    """The claim is made where the other one does not look."""
    with services.redis_sentinel() as guarded:
        old = guarded.master()
        lab = RedisLab(colour, old.url)
        sentinel: Any = (Sentinel if colour == "sync" else AsyncSentinel)(guarded.addresses)
        client = sentinel.master_for(guarded.service_name)

        async def body() -> None:
            lab.url = guarded.url if ahead == "the store" else old.url
            once, pipe = lab.face(settle_timeout=5 if ahead == "the store" else 0.5), client.pipeline()
            await wait(once.peek("any"))
            if ahead == "the store":
                await wait(client.ping())
            with old.paused():
                if colour == "sync":
                    guarded.wait_failed_over(old)
                else:
                    await asyncio.to_thread(guarded.wait_failed_over, old)
                if ahead == "the store":
                    with suppress(StoreUnavailable):
                        await wait(once.peek("another"))  # by now the face has left it

            async def work() -> str:
                pipe.incr("n")
                return "done"

            if ahead == "the pipeline":
                with pytest.raises(StoreUnavailable, match=r"do not agree.*Call again"):
                    await wait(once.within(pipe).execute("k1", lab.fn(work)))
            else:
                assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).value == "done"
            with redis.Redis.from_url(guarded.master().url) as new:
                assert new.get("n") == (b"1" if ahead == "the store" else None)
            await part_with(client, sentinel)

        run(lab, body())


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_R28_a_pipeline_of_a_sentinels_client_leaves_a_master_that_hangs(colour: str) -> None:
    """Since the WATCH: redis-py would send an UNWATCH to it, and dial it again for that, whatever the Sentinel says."""
    with services.redis_sentinel() as guarded, ExitStack() as until_the_end:
        old = guarded.master()
        lab = RedisLab(colour, old.url)
        lab.url = guarded.url
        quick = {"socket_timeout": 1, "socket_connect_timeout": 1, "retry": None}
        sentinel: Any = (Sentinel if colour == "sync" else AsyncSentinel)(guarded.addresses)
        client = sentinel.master_for(guarded.service_name, **quick)

        async def body() -> None:
            once, pipe = lab.face(settle_timeout=60, timeout=5, lease=120), client.pipeline()

            async def work() -> str:
                pipe.incr("n")
                assert old.command("WAIT", 1, 20_000)
                return "done"

            def hang() -> None:
                until_the_end.enter_context(old.paused())
                guarded.wait_failed_over(old)

            at("settle.sent", hang)
            assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).value == "done"
            with redis.Redis.from_url(guarded.master().url) as new:
                assert new.get("n") == b"1"
            assert (pipe.watching, pipe.connection) == (False, None)
            await part_with(client, sentinel)

        run(lab, body())


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_R28_a_pipeline_whose_server_went_silent_can_be_used_again(colour: str) -> None:
    with services.redis() as server, ExitStack() as silence:
        lab = RedisLab(colour, server.url)

        async def body() -> None:
            once = lab.face(settle_timeout=0.5, timeout=0.5, lease=2)
            pipe = lab.pipe(socket_timeout=0.2, socket_connect_timeout=0.2, retry=None)

            async def work() -> str:
                pipe.incr("n")
                return "done"

            at("settle.sent", lambda: silence.enter_context(server.paused()))
            with pytest.raises(StoreUnavailable, match="Call again with the same key"):
                await wait(once.within(pipe).execute("k1", lab.fn(work)))
            assert (pipe.watching, pipe.connection) == (False, None)
            silence.close()
            assert (await wait(once.within(pipe).execute("k1", lab.fn(work), wait=30))).value == "done"
            assert server.command("GET", "n") == "1"

        run(lab, body())


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_R28_an_unwatch_that_is_not_answered_leaves_the_pipeline_to_its_caller(
    redis_server: services.RedisServer, proxy: Proxy, colour: str
) -> None:
    lab = RedisLab(colour, redis_server.url)

    async def body() -> None:
        once, other = lab.face(lease=0.2), lab.face()
        lab.url = through(lab, proxy, redis_server)
        pipe = lab.pipe(socket_timeout=0.2, retry=None)

        async def second() -> str:
            return "second"

        async def work() -> None:
            pipe.incr(lab.name("n"))
            once._engine().heart.remove(current_run())
            assert (await wait(other.execute("k1", lab.fn(second), wait=30))).value == "second"
            unanswered.append(proxy.blackhole(match=lambda request: b"UNWATCH" in request))

        unanswered: list[Any] = []
        with pytest.raises(LeaseLost):
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert unanswered[0].fired.is_set()
        assert (pipe.watching, pipe.connection) == (False, None)
        pipe.incr(lab.name("n"))
        assert await wait(pipe.execute()) == [1]

    run(lab, body())


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_R28_a_connection_that_redis_py_replaces_in_silence_guards_nothing(
    redis_server: services.RedisServer, proxy: Proxy, colour: str
) -> None:
    """Its ping fails and it dials anew, between WATCH and EXEC; meanwhile another owner has made the effect."""
    lab = RedisLab(colour, redis_server.url)

    async def body() -> None:
        once = lab.face(lease=0.2)
        direct, lab.url = lab.url, through(lab, proxy, redis_server)
        retry = Retry(NoBackoff(), 3) if colour == "sync" else AsyncRetry(NoBackoff(), 3)
        pipe = lab.pipe(health_check_interval=0.001, retry=retry)
        lab.url = direct
        lines: list[Any] = []

        def overtake() -> None:
            with Semel(direct, tenant=lab.tenant, timeout=20) as other:
                assert other.execute("k1", lambda: "second", wait=30).value == "second"

        def pause() -> None:
            lines.append(pipe.connection)
            once._engine().heart.remove(current[0])
            taking = threading.Thread(target=overtake)  # this one may have a loop that runs
            taking.start()
            taking.join()
            proxy.cut()

        async def work() -> None:
            current.append(current_run())
            pipe.incr(lab.name("n"))

        current: list[Any] = []
        at("settle.sent", pause)
        with pytest.raises(LeaseLost):
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        points.listen(None)
        assert not lab.plain.exists(lab.name("n"))
        assert lines[0].health_check_interval == 0.001, "the pipeline's own again"

    run(lab, body())


@pytest.mark.parametrize("way", ["closed by another thread", "retried although the guard said no"])
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_R28_what_is_sent_on_another_connection_than_the_one_that_watches_is_not_sent(
    redis_server: services.RedisServer, colour: str, way: str
) -> None:
    """redis-py would dial anew without a word, and nothing guards what it sends then: another owner has made the effect meanwhile."""
    lab = RedisLab(colour, redis_server.url)
    kind: Any = Retry if colour == "sync" else AsyncRetry
    retry = kind(NoBackoff(), 3, supported_errors=(redis.RedisError, OSError))  # a WatchError is one

    async def body() -> None:
        once = lab.face(lease=0.2)
        pipe = lab.pipe(retry=retry)
        lines: list[Any] = []
        current: list[Any] = []

        def overtake() -> None:
            with (
                Semel(redis_server.url, tenant=lab.tenant, timeout=20) as other,
                redis.Redis.from_url(redis_server.url) as client,
            ):
                theirs = client.pipeline()
                other.within(theirs).execute("k1", lambda: theirs.incr(lab.name("n")) and "other", wait=30)

        def pause() -> None:
            line = pipe.connection
            lines.append(line)
            once._engine().heart.remove(current[0])
            taking = threading.Thread(target=overtake)
            taking.start()
            taking.join()
            if way.startswith("closed"):
                if colour == "sync":
                    pipe.connection_pool.disconnect()
                else:
                    line._writer.close()
                    line._reader = line._writer = None  # as its `disconnect`, which would have to be awaited

        async def work() -> str:
            current.append(current_run())
            pipe.incr(lab.name("n"))
            return "mine"

        at("settle.sent", pause)
        with pytest.raises(LeaseLost):
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        points.listen(None)
        assert lab.plain.get(lab.name("n")) == "1"
        assert (await wait(once.peek("k1"))).attempts == 2
        assert lines[0].retry.get_retries() == 3, "the pipeline's own again"
        assert "connect_check_health" not in vars(lines[0])
        pipe.incr(lab.name("n"))
        assert await wait(pipe.execute()) == [2]

    run(lab, body())


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_R28_a_replica_that_refuses_what_a_script_writes_has_applied_nothing(colour: str) -> None:
    """It queues a script and refuses what that writes, inside the EXEC: the key was made unknown, "the others were applied"."""
    with services.redis() as master, services.redis(config=QUICK) as replica:
        replica.command("REPLICAOF", master.host, master.port)
        until(lambda: replica.info("replication").get("master_link_status") == "up")
        lab, there = RedisLab(colour, master.url), RedisLab(colour, replica.url)

        async def body() -> None:
            once, pipe, name = lab.face(settle_timeout=5), there.pipe(), lab.name("paid")

            async def pays() -> str:
                master.command("WAIT", 1, 20_000)
                pipe.eval("return redis.call('INCR', KEYS[1])", 1, name)
                return "ok"

            with pytest.raises(redis.exceptions.ReadOnlyError) as told:
                await wait(once.within(pipe).execute("k1", lab.fn(pays)))
            assert "nothing was applied" in "".join(told.value.__notes__)
            record = await wait(once.peek("k1"))
            assert (record.state, lab.plain.exists(name)) == ("released", 0)
            await there.close()

        run(lab, body())


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_R28_a_master_that_is_made_a_replica_just_before_the_exec_has_applied_nothing(colour: str) -> None:
    """It refused what the script would write, and the settle, inside the EXEC."""
    with services.redis(config=QUICK) as server:
        lab, later = (
            RedisLab(colour, server.url),
            threading.Timer(0.5, server.command, ("REPLICAOF", "NO", "ONE")),
        )

        def demote(name: str) -> None:
            if name == "settle.sent":
                points.listen(None)
                server.command("REPLICAOF", "127.0.0.1", "1")
                later.start()

        async def body() -> None:
            once, pipe, name = lab.face(settle_timeout=20), lab.pipe(), lab.name("paid")

            async def pays() -> str:
                pipe.eval("return redis.call('INCR', KEYS[1])", 1, name)
                return "ok"

            points.listen(demote)
            with pytest.raises(redis.exceptions.ReadOnlyError):
                await wait(once.within(pipe).execute("k1", lab.fn(pays)))
            later.join()
            assert ((await wait(once.peek("k1"))).state, lab.plain.get(name)) == ("released", None)
            assert (await wait(once.within(pipe).execute("k1", lab.fn(pays)))).value == "ok"
            assert lab.plain.get(name) == "1"

        run(lab, body())
