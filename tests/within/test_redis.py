"""R28: the commands of a function and the settle of its record, in one guarded MULTI/EXEC."""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import ResponseError

from semel import (
    AsyncSemel,
    ConfigurationError,
    InProgress,
    LeaseLost,
    OutcomeUnknown,
    PreviousFailure,
    Semel,
    StoreUnavailable,
    current_run,
    points,
)
from semel.runtime import run_sync
from semel.testing import services
from semel.within.redis import PipelineEngine
from tests.within.lab import Promise, wait


class RedisLab:
    """A face and a client of one colour, with business keys of its own."""

    def __init__(self, colour: str, url: str) -> None:
        self.colour = colour
        self.url = url
        self.tenant = uuid.uuid4().hex
        self.plain = redis.Redis.from_url(url, decode_responses=True)
        self._faces: list[Any] = []
        self._clients: list[Any] = []

    def face(self, **settings: Any) -> Any:
        patient: dict[str, Any] = {"tenant": self.tenant, "timeout": 20}  # a busy machine is no broken store
        face = (Semel if self.colour == "sync" else AsyncSemel)(self.url, **(patient | settings))
        self._faces.append(face)
        return face

    def pipe(self, **settings: Any) -> Any:
        kind = redis.Redis if self.colour == "sync" else redis.asyncio.Redis
        client: Any = kind.from_url(self.url, **settings)
        self._clients.append(client)
        return client.pipeline(transaction=True)

    def name(self, text: str) -> str:
        return f"{self.tenant}:{text}"

    def fn(self, body: Any) -> Any:
        return body if self.colour == "async" else lambda *args: run_sync(body(*args))

    async def close(self) -> None:
        for face in self._faces:
            await wait(face.close())
        for client in self._clients:
            await wait(client.close() if self.colour == "sync" else client.aclose())
        self.plain.close()


@pytest.fixture(params=["sync", "async"])
def lab(request: pytest.FixtureRequest, redis_server: Any) -> RedisLab:
    return RedisLab(request.param, redis_server.url)


def run(lab: RedisLab, body: Any) -> None:
    async def closing() -> None:
        try:
            await body
        finally:
            await lab.close()

    (run_sync if lab.colour == "sync" else asyncio.run)(closing())


@pytest.mark.parametrize("decode", [False, True])
def test_R28_commands_and_settle_are_one_exec(lab: RedisLab, decode: bool) -> None:
    async def body() -> None:
        once = lab.face(encrypt={"a": os.urandom(32)}, namespace="shop")
        pipe = lab.pipe(decode_responses=decode)

        async def work() -> dict[str, int]:
            pipe.set(lab.name("balance"), 90)
            pipe.hset(lab.name("order"), mapping={"id": 1})
            current_run().set_ref("ord_1")
            assert not lab.plain.exists(lab.name("balance")), "nothing is sent before the end"
            return {"id": 1}

        outcome = await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert (outcome.value, outcome.replayed, outcome.ref) == ({"id": 1}, False, "ord_1")
        assert lab.plain.get(lab.name("balance")) == "90"
        assert (await wait(once.peek("k1"))).state == "done"
        lab.plain.delete(lab.name("balance"))
        again = await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert (again.value, again.replayed) == ({"id": 1}, True)
        assert not lab.plain.exists(lab.name("balance"))
        outside = await wait(once.execute("k1", lab.fn(work)))
        assert (outside.value, outside.replayed) == ({"id": 1}, True)

    run(lab, body())


def test_R28_the_functions_error_applies_nothing_and_follows_on_error(lab: RedisLab) -> None:
    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()

        async def work() -> None:
            pipe.set(lab.name("a"), 1)
            raise ValueError("no stock")

        with pytest.raises(ValueError, match="no stock"):
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert len(pipe) == 0
        with pytest.raises(ValueError, match="no stock"):
            await wait(once.within(pipe).execute("k1", lab.fn(work), on_error="replay"))
        with pytest.raises(PreviousFailure, match="no stock"):
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert not lab.plain.exists(lab.name("a"))

    run(lab, body())


def test_R28_an_overtaken_owner_applies_nothing(lab: RedisLab) -> None:
    async def body() -> None:
        once, other, pipe = lab.face(), lab.face(), lab.pipe()

        async def work() -> None:
            pipe.set(lab.name("a"), "zombie")
            run = current_run()
            once._engine().heart.remove(run)  # a paused process: no renewals any more
            until = time.monotonic() + 30
            while True:
                try:
                    await wait(other.execute("k1", lab.fn(_second)))
                    break
                except InProgress:
                    assert time.monotonic() < until

        with pytest.raises(LeaseLost, match="none of its commands"):
            await wait(once.within(pipe).execute("k1", lab.fn(work), lease=0.05))
        assert not lab.plain.exists(lab.name("a"))
        # it counts the lease from when it heard of its claim: a little longer than the store did
        assert (await wait(once.execute("k1", lab.fn(_second), wait=30))).value == "second"

    run(lab, body())


async def _second() -> str:
    return "second"


def test_R28_a_takeover_between_guard_and_exec_aborts_it(lab: RedisLab) -> None:
    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()
        record = lab.plain

        async def work() -> None:
            pipe.set(lab.name("a"), "zombie")

        def interfere(name: str) -> None:
            if name == "settle.sent":
                points.listen(None)
                for key in record.scan_iter(
                    "*:r:*"
                ):  # the guarded record vanishes, as if it had been forgotten
                    record.delete(key)

        record.flushdb()
        points.listen(interfere)
        try:
            with pytest.raises(LeaseLost):
                await wait(once.within(pipe).execute("k1", lab.fn(work)))
        finally:
            points.listen(None)
        assert not lab.plain.exists(lab.name("a"))

    # keys of records are binary: this client must not decode them
    lab.plain.close()
    lab.plain = redis.Redis.from_url(lab.url)
    run(lab, body())


def test_R28_a_renewal_between_guard_and_exec_is_survived(lab: RedisLab) -> None:
    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()
        touched: list[bytes] = []

        async def work() -> str:
            pipe.set(lab.name("a"), "once")
            return "made"

        def renew(name: str) -> None:
            if name == "settle.sent" and not touched:
                for key in lab.plain.scan_iter("*:r:*"):
                    touched.append(key)
                    lab.plain.setrange(key, 0, lab.plain.getrange(key, 0, 0))

        lab.plain.flushdb()
        points.listen(renew)
        try:
            assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).value == "made"
        finally:
            points.listen(None)
        assert touched
        assert lab.plain.get(lab.name("a")) == b"once"

    lab.plain.close()
    lab.plain = redis.Redis.from_url(lab.url)
    run(lab, body())


def test_R28_heartbeats_that_are_quicker_than_the_exec_do_not_keep_it_from_ending(redis_server: Any) -> None:
    lab, lease = RedisLab("sync", redis_server.url), 0.15
    plain = redis.Redis.from_url(lab.url)
    renewed: list[bool] = []

    def slow(name: str) -> None:
        """A machine so slow that a heartbeat comes between the guard and the EXEC, whenever there are heartbeats."""
        if name == "settle.sent":
            (key,) = plain.scan_iter("*:r:*")
            # The first heartbeat comes for sure; of those after it none may come any more.
            before, until = plain.get(key), time.monotonic() + (10 * lease if renewed else 30)
            while plain.get(key) == before and time.monotonic() < until:
                time.sleep(0.002)
            renewed.append(plain.get(key) != before)

    async def body() -> None:
        plain.flushdb()
        once, pipe = lab.face(lease=lease, settle_timeout=10), lab.pipe()
        points.listen(slow)
        try:
            outcome = once.within(pipe).execute("k1", lambda: pipe.incr(lab.name("a")) and "made")
        finally:
            points.listen(None)
        assert outcome.value == "made"
        assert plain.get(lab.name("a")) == b"1"
        assert renewed[0]

    try:
        run(lab, body())
    finally:
        plain.close()
    assert len(renewed) <= 3  # one may have been on its way


def test_R28_the_lease_is_renewed_while_the_pipelines_connection_is_away(
    redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an EXEC that was aborted, too: whoever took over meanwhile would run the function again."""
    lab = RedisLab("sync", redis_server.url)
    plain = redis.Redis.from_url(lab.url)
    real, tries = PipelineEngine._try, iter(("aborted", "away", "away"))
    renewed: list[bool] = []

    async def tried(self: Any, *given: Any) -> bool:
        now = next(tries, "well")
        if now == "away":
            raise redis.ConnectionError("the pipeline's connection is away")
        if now == "aborted":
            return False
        (key,) = plain.scan_iter("*:r:*")
        before, until = plain.get(key), time.monotonic() + 30
        while not renewed and plain.get(key) == before and time.monotonic() < until:
            time.sleep(0.002)
        renewed.append(plain.get(key) != before)
        return await real(self, *given)

    async def body() -> None:
        plain.flushdb()
        once, pipe = lab.face(lease=0.3, settle_timeout=30), lab.pipe()
        monkeypatch.setattr(PipelineEngine, "_try", tried)
        outcome = once.within(pipe).execute("k1", lambda: pipe.incr(lab.name("a")) and "made")
        assert (outcome.value, plain.get(lab.name("a"))) == ("made", b"1")

    try:
        run(lab, body())
    finally:
        plain.close()
    assert renewed[0]


def test_R28_an_error_inside_exec_makes_the_record_unknown(lab: RedisLab) -> None:
    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()
        lab.plain.set(lab.name("text"), "not a list")

        async def work() -> None:
            pipe.set(lab.name("a"), 1)
            pipe.lpush(lab.name("text"), 1)

        with pytest.raises(ResponseError, match="WRONGTYPE") as caught:
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert "semel: 1 of the commands" in "".join(caught.value.__notes__)
        assert "unknown" in "".join(caught.value.__notes__)
        assert lab.plain.get(lab.name("a")) == "1", "EXEC does not roll back"
        assert (await wait(once.peek("k1"))).state == "unknown"
        with pytest.raises(OutcomeUnknown):
            await wait(once.execute("k1", lab.fn(_second)))
        await wait(once.resolve("k1", value="looked up", actor="me"))
        assert (await wait(once.execute("k1", lab.fn(_second)))).value == "looked up"

    run(lab, body())


def test_R28_a_command_that_is_refused_while_queued_is_a_known_failure(lab: RedisLab) -> None:
    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()

        async def work() -> None:
            pipe.set(lab.name("a"), 1)
            pipe.execute_command("GET")  # too few arguments

        with pytest.raises(ResponseError, match=r"(?i)arguments"):
            await wait(once.within(pipe).execute("k1", lab.fn(work), on_error="replay"))
        assert not lab.plain.exists(lab.name("a"))
        with pytest.raises(PreviousFailure):
            await wait(once.execute("k1", lab.fn(_second)))

    run(lab, body())


def test_R4_what_nobody_has_awaited_applies_nothing_and_holds_its_key(lab: RedisLab) -> None:
    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()

        async def work() -> Any:
            pipe.set(lab.name("a"), 1)
            return Promise()

        with pytest.raises(ConfigurationError, match="returned a Promise that nobody has awaited"):
            await wait(once.within(pipe).execute("k1", lab.fn(work), on_error="release"))
        assert not lab.plain.exists(lab.name("a"))
        with pytest.raises(OutcomeUnknown, match="resolve"):
            await wait(once.execute("k1", lab.fn(_second)))

    run(lab, body())


def test_R28_a_claim_by_hand(lab: RedisLab) -> None:
    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()
        claim = once.within(pipe).claim("k1")
        await (wait(claim.__enter__()) if lab.colour == "sync" else claim.__aenter__())
        pipe.set(lab.name("a"), 1)
        await wait(claim.complete("by hand"))
        await wait(
            claim.__exit__(None, None, None) if lab.colour == "sync" else claim.__aexit__(None, None, None)
        )
        assert lab.plain.get(lab.name("a")) == "1"
        assert (await wait(once.execute("k1", lab.fn(_second)))).value == "by hand"

    run(lab, body())


def test_R28_a_lost_answer_is_looked_up_not_sent_again(lab: RedisLab, redis_server: Any) -> None:
    """The EXEC was applied and its reply lost: the second try finds its own `done`."""

    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()
        cut: list[int] = []

        async def work() -> str:
            pipe.incr(lab.name("n"))
            return "made"

        def lose(name: str) -> None:
            if name == "settle.stored" and not cut:
                cut.append(1)
                raise redis.exceptions.ConnectionError("the answer was lost")

        points.listen(lose)
        try:
            assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).value == "made"
        finally:
            points.listen(None)
        assert cut
        assert lab.plain.get(lab.name("n")) == "1"

    run(lab, body())


def _client(lab: RedisLab, url: str) -> Any:
    client: Any = (redis.Redis if lab.colour == "sync" else redis.asyncio.Redis).from_url(url)
    lab._clients.append(client)
    return client


def test_R28_refusals(lab: RedisLab, redis_server: Any) -> None:
    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()

        async def executes() -> None:
            pipe.set(lab.name("a"), 1)
            await wait(pipe.execute())

        with pytest.raises(ConfigurationError, match="queue commands only"):
            await wait(once.within(pipe).execute("k1", lab.fn(executes)))
        assert not lab.plain.exists(lab.name("a"))
        pipe.set(lab.name("before"), 1)
        with pytest.raises(ConfigurationError, match="empty pipeline"):
            await wait(once.within(pipe).execute("k1", lab.fn(_second)))
        await wait(pipe.reset())
        loose = _client(lab, lab.url).pipeline(transaction=False)
        with pytest.raises(ConfigurationError, match="transaction=True"):
            once.within(loose)
        wrong = (redis.asyncio.Redis if lab.colour == "sync" else redis.Redis).from_url(lab.url).pipeline()
        with pytest.raises(ConfigurationError, match=r"use (Async)?Semel"):
            once.within(wrong)
        kind = Semel if lab.colour == "sync" else AsyncSemel
        memory = kind("memory://")
        with pytest.raises(ConfigurationError, match="live in"):
            memory.within(pipe)
        elsewhere = _client(lab, lab.url.rpartition("/")[0] + "/9").pipeline()
        with pytest.raises(ConfigurationError, match="another Redis"):
            await wait(once.within(elsewhere).execute("k2", lab.fn(_second)))
        assert not (await wait(once.execute("k2", lab.fn(_second)))).replayed, "the key is free again"
        await wait(memory.close())

    run(lab, body())


def test_R28_a_pipeline_that_watches_is_refused(lab: RedisLab) -> None:
    """From WATCH on redis-py sends every command at once: a function that failed left its commands behind, and an optimistic
    lock of the caller was dropped, so that another one's write was lost."""

    async def body() -> None:
        once, pipe, x = lab.face(), lab.pipe(), lab.name("x")

        async def fails() -> None:
            await wait(pipe.set(x, 1))
            raise ValueError

        await wait(pipe.watch(x))
        with pytest.raises(ConfigurationError, match="would not hold"):
            await wait(once.within(pipe).execute("k1", lab.fn(fails)))
        await wait(pipe.reset())

        async def watches() -> None:
            await wait(pipe.watch(x))

        with pytest.raises(ConfigurationError, match="would not hold"):
            await wait(once.within(pipe).execute("k1", lab.fn(watches)))
        claim = once.within(pipe).claim("k1")
        await wait(claim.__enter__() if lab.colour == "sync" else claim.__aenter__())
        with pytest.raises(ConfigurationError, match="would not hold"):
            await wait(pipe.watch(x))
        pipe.set(x, 2)
        await wait(claim.complete())
        assert lab.plain.get(x) == "2"
        await wait(pipe.watch(x))  # the pipeline is the caller's again
        assert await wait(pipe.get(x)) == b"2"
        await wait(pipe.reset())

    run(lab, body())


def _first_node(url: str) -> str:
    return url.replace("redis+cluster", "redis").partition(",")[0]


def test_R28_a_cluster_needs_the_records_tag_in_every_key(redis_cluster: Any) -> None:
    from redis.cluster import RedisCluster
    from redis.exceptions import RedisError

    once = Semel(redis_cluster.url, tenant=uuid.uuid4().hex, timeout=20)
    client: Any = RedisCluster.from_url(_first_node(redis_cluster.url))
    tag = once.tag("k1")
    pipe = client.pipeline()

    def work() -> str:
        pipe.set(f"balance:{tag}", 90)
        pipe.hset(f"order:{tag}", mapping={"id": 1})
        return "made"

    assert not once.within(pipe).execute("k1", work).replayed
    assert once.within(pipe).execute("k1", work).replayed
    assert client.get(f"balance:{tag}") == b"90"

    def elsewhere() -> None:
        pipe.set("balance", 1)

    assert once.tag("k2") not in "balance"
    with pytest.raises(ConfigurationError, match=r"once\.tag\(key\)") as caught:
        once.within(pipe).execute("k2", elsewhere)
    assert isinstance(caught.value.__cause__, RedisError)
    record = once.peek("k2")
    assert record is not None
    assert record.state == "released", "nothing was applied: a known failure"
    once.close()
    client.close()


def test_R28_a_pipeline_of_one_node_is_told_that_the_record_is_on_another(redis_cluster: Any) -> None:
    from redis.exceptions import MovedError

    host, port = redis_cluster.addresses[0]
    with (
        Semel(redis_cluster.url, tenant=uuid.uuid4().hex, timeout=20) as once,
        redis.Redis(host=host, port=port) as client,
        pytest.raises(MovedError) as caught,
    ):
        for key in map(str, range(100)):  # a third of them is on this very node
            pipe = client.pipeline()
            once.within(pipe).execute(
                key, lambda pipe, tag: bool(pipe.set(f"{tag}:n", 1)), pipe, once.tag(key)
            )
    assert any("from a RedisCluster client" in note for note in caught.value.__notes__)


def test_R28_an_async_cluster(redis_cluster: Any) -> None:
    from redis.asyncio.cluster import RedisCluster

    async def body() -> None:
        once = AsyncSemel(redis_cluster.url, tenant=uuid.uuid4().hex, timeout=20)
        client: Any = RedisCluster.from_url(_first_node(redis_cluster.url))
        await client.initialize()
        tag = once.tag("k1")
        pipe = client.pipeline()

        async def work() -> str:
            pipe.set(f"balance:{tag}", 90)
            return "made"

        assert not (await once.within(pipe).execute("k1", work)).replayed
        assert (await once.within(pipe).execute("k1", work)).replayed
        assert await client.get(f"balance:{tag}") == b"90"
        await once.close()
        await client.aclose()

    asyncio.run(body())


@pytest.mark.parametrize("transaction", [True, False])
def test_R28_an_async_cluster_client_that_was_never_used_reads_its_map_in_the_callers_loop(
    redis_cluster: Any, transaction: bool
) -> None:
    from redis.asyncio.cluster import RedisCluster

    async def body() -> None:
        once = AsyncSemel(redis_cluster.url, tenant=uuid.uuid4().hex, timeout=20)
        client: Any = RedisCluster.from_url(_first_node(redis_cluster.url))
        first, second = (f"balance:{once.tag(key)}:{key}" for key in ("k1", "k2"))
        pipe = client.pipeline(transaction=transaction)

        async def work() -> str:
            pipe.set(first, 90)
            return "made"

        assert not (await once.within(pipe).execute("k1", work)).replayed
        async with once.within(pipe).claim("k2") as claim:
            pipe.set(second, 91)
            await claim.complete("made")
        assert [await client.get(name) for name in (first, second)] == [b"90", b"91"]
        await once.close()
        await client.aclose()

    asyncio.run(body())


def test_R28_a_cluster_that_cannot_be_reached_is_told_before_anything_runs(redis_cluster: Any) -> None:
    from redis.asyncio.cluster import RedisCluster

    async def body() -> None:
        once = AsyncSemel(redis_cluster.url, tenant=uuid.uuid4().hex, timeout=20)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            nobody = taken.getsockname()[1]
        client: Any = RedisCluster.from_url(f"redis://127.0.0.1:{nobody}")
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            await once.within(client.pipeline()).execute("k1", lambda: pytest.fail("it ran"))
        assert await once.peek("k1") is None
        await once.close()
        await client.aclose()

    asyncio.run(body())


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_R28_with_acks_what_no_replica_has_is_not_recorded_yet(colour: str) -> None:
    with services.redis() as server, services.redis() as replica:
        server.command("CONFIG", "SET", "repl-diskless-sync-delay", 0)
        replica.command("REPLICAOF", server.host, server.port)
        until = time.monotonic() + 30
        while not server.command("WAIT", 1, 100):
            assert time.monotonic() < until, "the replica did not come"
        lab = RedisLab(colour, server.url)

        async def body() -> None:
            patient, once = lab.face(acks=1, timeout=20), lab.face(acks=1, timeout=5, settle_timeout=1)
            pipe = lab.pipe()

            async def work(gone: bool) -> int:
                pipe.set(lab.name("balance"), 90)
                if gone:
                    replica.command("REPLICAOF", "NO", "ONE")
                return 7

            assert (await wait(patient.within(pipe).execute("with it", lab.fn(work), False))).value == 7
            with pytest.raises(StoreUnavailable) as raised:
                await wait(once.within(pipe).execute("without it", lab.fn(work), True))
            assert "replica" in str(raised.value.__cause__)
            assert lab.plain.get(lab.name("balance")) == "90", (
                "it is done, and the same call again will say so"
            )

        run(lab, body())
