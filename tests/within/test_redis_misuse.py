"""R28: a pipeline that is emptied, executed or given to within() again while a run queues on it. Nothing of it is done unseen."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import redis

from semel import AsyncSemel, ConfigurationError, PreviousFailure, Semel, points
from semel.hooks import Contended
from semel.runtime import run_sync
from semel.testing import services
from semel.within.redis import PipelineEngine
from tests.within.lab import wait
from tests.within.test_redis import RedisLab, _first_node, run


@pytest.fixture(params=["sync", "async"])
def lab(request: pytest.FixtureRequest, redis_server: Any) -> RedisLab:
    return RedisLab(request.param, redis_server.url)


@pytest.fixture(autouse=True)
def _deaf_afterwards() -> Iterator[None]:
    yield
    points.listen(None)


@asynccontextmanager
async def entered(lab: RedisLab, block: Any) -> AsyncIterator[Any]:
    """A claim's or a pipeline's own block, in the lab's colour."""
    if lab.colour == "sync":
        with block as inside:
            yield inside
    else:
        async with block as inside:
            yield inside


async def empty(lab: RedisLab, pipe: Any, way: str, name: str) -> None:
    """Queue a command, and lose it in one of redis-py's ways."""
    if way == "with":
        async with entered(lab, pipe):
            pipe.set(name, 1)
        return
    pipe.set(name, 1)
    if way == "close" and lab.colour == "async":
        way = "aclose"
    await wait(getattr(pipe, way)())


async def is_the_callers_again(lab: RedisLab, pipe: Any) -> None:
    assert {"watch", "execute", "reset", "discard", "initialize"}.isdisjoint(vars(pipe))
    assert len(pipe) == 0
    name = lab.name("by the caller")
    async with entered(lab, pipe):
        await wait(pipe.watch(name))
        pipe.multi()
        pipe.set(name, 1)
        assert await wait(pipe.execute()) == [True]
    assert lab.plain.delete(name) == 1


async def state(once: Any, key: str) -> str | None:
    record = await wait(once.peek(key))
    return None if record is None else str(record.state)


WAYS = pytest.mark.parametrize("way", ["with", "reset", "discard", "close"])


@WAYS
def test_R28_a_function_that_empties_the_pipeline_is_refused(lab: RedisLab, way: str) -> None:
    """What it had queued was lost, and the key done."""

    async def body() -> None:
        once, pipe, name = lab.face(), lab.pipe(), lab.name("paid")

        async def pays() -> str:
            await empty(lab, pipe, way, name)
            return "ok"

        with pytest.raises(ConfigurationError, match="emptied during the run"):
            await wait(once.within(pipe).execute("k1", lab.fn(pays)))
        assert (await state(once, "k1"), lab.plain.exists(name)) == ("released", 0)
        await is_the_callers_again(lab, pipe)
        with pytest.raises(ConfigurationError, match="emptied during the run"):
            await wait(once.within(pipe).execute("k1", lab.fn(pays), on_error="replay"))
        with pytest.raises(PreviousFailure, match="emptied during the run"):
            await wait(once.within(pipe).execute("k1", lab.fn(pays)))

    run(lab, body())


@WAYS
def test_R28_a_claim_by_hand_whose_block_empties_the_pipeline_is_refused(lab: RedisLab, way: str) -> None:
    async def body() -> None:
        once, pipe, name = lab.face(), lab.pipe(), lab.name("paid")
        with pytest.raises(ConfigurationError, match="emptied during the run"):
            async with entered(lab, once.within(pipe).claim("k1")) as claim:
                await empty(lab, pipe, way, name)
                await wait(claim.complete("ok"))
        assert (await state(once, "k1"), lab.plain.exists(name)) == ("released", 0)
        await is_the_callers_again(lab, pipe)

    run(lab, body())


def test_R28_a_refusal_that_is_caught_leaves_queued_what_was_queued(lab: RedisLab) -> None:
    async def body() -> None:
        once, pipe, name = lab.face(), lab.pipe(), lab.name("paid")

        async def pays() -> str:
            with suppress(ConfigurationError):
                await empty(lab, pipe, "reset", name)
            return "ok"

        assert (await wait(once.within(pipe).execute("k1", lab.fn(pays)))).value == "ok"
        assert (await state(once, "k1"), lab.plain.get(name)) == ("done", "1")
        await is_the_callers_again(lab, pipe)

    run(lab, body())


def test_R28_a_block_of_the_pipeline_around_within_is_as_before(lab: RedisLab) -> None:
    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()

        async def pays() -> None:
            pipe.set(lab.name("a"), 1)

        async with entered(lab, pipe):
            await wait(once.within(pipe).execute("k1", lab.fn(pays)))
            async with entered(lab, once.within(pipe).claim("k2")) as claim:
                pipe.set(lab.name("b"), 2)
                await wait(claim.complete())
        assert (lab.plain.get(lab.name("a")), lab.plain.get(lab.name("b"))) == ("1", "2")
        await is_the_callers_again(lab, pipe)

    run(lab, body())


def test_R28_a_claim_by_hand_queues_only_as_a_function_does(lab: RedisLab) -> None:
    """Executed by the caller, the commands were applied without the guard and without the settle."""

    async def body() -> None:
        once, pipe, name = lab.face(), lab.pipe(), lab.name("a")
        with pytest.raises(ConfigurationError, match="queue commands only"):
            async with entered(lab, once.within(pipe).claim("k1")):
                pipe.set(name, 1)
                await wait(pipe.execute())
        assert (await state(once, "k1"), lab.plain.exists(name)) == ("released", 0)
        await is_the_callers_again(lab, pipe)

    run(lab, body())


def test_R28_what_was_put_on_the_pipeline_itself_stays_there(lab: RedisLab) -> None:
    """Tracers wrap the methods of a client's pipelines one by one."""

    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()
        heard: list[str] = []

        def traced(name: str) -> Any:
            own = getattr(pipe, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                heard.append(name)
                return own(*args, **kwargs)

            setattr(pipe, name, call)
            return call

        put = {name: traced(name) for name in ("watch", "execute", "reset")}

        async def pays() -> str:
            pipe.incr(lab.name("n"))
            return "ok"

        assert (await wait(once.within(pipe).execute("k1", lab.fn(pays)))).value == "ok"
        assert heard.count("execute") == 1
        assert {name: vars(pipe)[name] for name in put} == put

    run(lab, body())


@pytest.mark.parametrize("command", ["DISCARD", b"exec", "MULTI"])
def test_R28_a_transaction_of_the_functions_own_on_the_pipeline_is_refused(
    lab: RedisLab, command: str | bytes
) -> None:
    """redis-py queues them as any command: the settle came after the end of the transaction, and was applied without it."""

    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()

        async def pays() -> str:
            pipe.set(lab.name("a"), 1)
            pipe.execute_command(command)
            return "ok"

        with pytest.raises(ConfigurationError, match="MULTI, EXEC or DISCARD was queued"):
            await wait(once.within(pipe).execute("k1", lab.fn(pays)))
        assert (await state(once, "k1"), lab.plain.exists(lab.name("a"))) == ("released", 0)
        await is_the_callers_again(lab, pipe)

    run(lab, body())


@pytest.mark.parametrize(
    "command",
    [
        ("SELECT", 1),
        ("select 1",),
        (b"SWAPDB", 0, 1),
        ("FLUSHDB",),
        ("FLUSHALL", "ASYNC"),
        ("RESET",),
        ("QUIT",),
        ("replicaof", "no", "one"),
    ],
    ids=lambda command: str(command[0]),
)
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_R28_a_command_that_takes_the_record_out_of_the_transaction_is_refused(
    command: tuple[str | bytes | int, ...], colour: str
) -> None:
    """The settle that follows in the EXEC would not find the record: with SELECT the commands were applied once for each try."""
    with services.redis() as server:  # of its own: it may be emptied
        lab = RedisLab(colour, server.url)

        async def body() -> None:
            once, pipe = lab.face(settle_timeout=1), lab.pipe()

            async def pays() -> str:
                pipe.execute_command(*command)
                pipe.incr(lab.name("a"))
                return "ok"

            with pytest.raises(ConfigurationError, match=r"was queued.*nothing was applied"):
                await wait(once.within(pipe).execute("k1", lab.fn(pays)))
            assert await state(once, "k1") == "released"
            for database in (0, 1):
                with redis.Redis(port=server.port, db=database) as there:
                    assert not there.exists(lab.name("a"))
            await is_the_callers_again(lab, pipe)

        run(lab, body())


def test_R28_a_WATCH_that_is_spelt_as_any_command_is_refused(lab: RedisLab) -> None:
    """From it on redis-py sends every command at once: they were applied although the function failed."""

    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()

        async def pays() -> str:
            await wait(pipe.execute_command("WATCH", "stock"))
            await wait(pipe.incr(lab.name("a")))
            raise ZeroDivisionError

        with pytest.raises(ConfigurationError, match="would not hold"):
            await wait(once.within(pipe).execute("k1", lab.fn(pays)))
        assert (await state(once, "k1"), lab.plain.exists(lab.name("a"))) == ("released", 0)
        await is_the_callers_again(lab, pipe)

    run(lab, body())


def test_R28_a_command_whose_name_is_no_text_is_a_known_failure(lab: RedisLab) -> None:
    """Its key was renewed for as long as the process lived, though nothing ran any more."""

    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()

        async def pays() -> None:
            pipe.incr(lab.name("a"))
            pipe.execute_command(b"\xff\xfe", 1)

        with pytest.raises(redis.ResponseError, match="unknown command"):
            await wait(once.within(pipe).execute("k1", lab.fn(pays)))
        assert (await state(once, "k1"), lab.plain.exists(lab.name("a"))) == ("released", 0)
        await is_the_callers_again(lab, pipe)

    run(lab, body())


def test_R28_an_outcome_that_cannot_be_sealed_is_a_known_failure(
    lab: RedisLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the one before: a layer of the face that raises must not leave a key that is renewed for ever."""

    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()

        async def pays() -> None:
            pipe.incr(lab.name("a"))

        async def broken(*_: Any) -> Any:
            raise ZeroDivisionError

        monkeypatch.setattr(PipelineEngine, "_sealed", broken)
        with pytest.raises(ZeroDivisionError):
            await wait(once.within(pipe).execute("k1", lab.fn(pays)))
        assert (await state(once, "k1"), lab.plain.exists(lab.name("a"))) == ("released", 0)
        await is_the_callers_again(lab, pipe)

    run(lab, body())


def test_R28_a_run_that_begins_while_another_ones_EXEC_is_on_its_way_is_refused(lab: RedisLab) -> None:
    """The EXEC emptied the pipeline: what the other one had queued was lost, and its key recorded as done."""

    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()
        told: list[str] = []

        async def pays(name: str) -> None:
            pipe.incr(lab.name(name))

        async def second() -> None:
            with pytest.raises(ConfigurationError, match="another run of within"):
                await wait(once.within(pipe).execute("k2", lab.fn(pays), "second"))
            told.append("refused")

        own = pipe.watch

        def watch(*names: Any) -> Any:
            # Before the server has answered: redis-py does not know of a WATCH yet.
            if told:
                return own(*names)
            if lab.colour == "sync":
                run_sync(second())
                return own(*names)

            async def both() -> Any:
                await second()
                return await own(*names)

            return both()

        pipe.watch = watch
        await wait(once.within(pipe).execute("k1", lab.fn(pays), "first"))
        assert told == ["refused"]
        assert (await state(once, "k1"), await state(once, "k2")) == ("done", None)
        assert [lab.plain.get(lab.name(name)) for name in ("first", "second")] == ["1", None]
        del pipe.watch
        await is_the_callers_again(lab, pipe)
        await wait(once.within(pipe).execute("k2", lab.fn(pays), "second"))
        assert lab.plain.get(lab.name("second")) == "1"

    run(lab, body())


# -------------------------------------------------------------------------------------------- runs in runs
INNER = pytest.mark.parametrize("inner", ["execute", "claim"])
OUTER = pytest.mark.parametrize("outer", ["execute", "claim"])


class Nest:
    """A run inside of a run, on one pipeline."""

    def __init__(self, lab: RedisLab, *, same: bool = False) -> None:
        self.lab, self.once, self.pipe = lab, lab.face(), lab.pipe()
        first = self.once.within(self.pipe)
        self.outside, self.inside = first, first if same else self.once.within(self.pipe)

    async def outer(self, way: str, act: Any) -> None:
        await self._run(way, self.outside, "out", act)

    async def inner(self, way: str) -> None:
        async def act() -> None:
            self.pipe.incr(self.lab.name("inner"))

        await self._run(way, self.inside, "in", act)

    async def _run(self, way: str, bound: Any, key: str, act: Any) -> None:
        if way == "execute":
            await wait(bound.execute(key, self.lab.fn(act)))
            return
        async with entered(self.lab, bound.claim(key)) as claim:
            await act()
            await wait(claim.complete())

    def counted(self, name: str) -> str | None:
        return self.lab.plain.get(self.lab.name(name))  # type: ignore[return-value]  # a sync client's


@INNER
@OUTER
@pytest.mark.parametrize("same", [False, True], ids=["two bindings", "one binding"])
def test_R28_a_run_inside_of_a_run_on_the_same_pipeline_is_refused(
    lab: RedisLab, outer: str, inner: str, *, same: bool
) -> None:
    async def body() -> None:
        nest = Nest(lab, same=same)

        async def work() -> None:
            nest.pipe.incr(lab.name("outer"))
            await nest.inner(inner)

        for _ in range(2):
            with pytest.raises(ConfigurationError, match="another run of within"):
                await nest.outer(outer, work)
            assert (await state(nest.once, "out"), await state(nest.once, "in")) == ("released", None)
        assert (nest.counted("outer"), nest.counted("inner")) == (None, None)
        await is_the_callers_again(lab, nest.pipe)

    run(lab, body())


@INNER
@OUTER
def test_R28_a_run_whose_inner_one_was_refused_may_go_on(lab: RedisLab, outer: str, inner: str) -> None:
    async def body() -> None:
        nest = Nest(lab, same=True)

        async def work() -> None:
            with pytest.raises(ConfigurationError, match="another run of within"):
                await nest.inner(inner)
            nest.pipe.incr(lab.name("outer"))
            with pytest.raises(ConfigurationError, match="emptied"):  # it is guarded as before
                await wait(nest.pipe.reset())

        await nest.outer(outer, work)
        assert (await state(nest.once, "out"), await state(nest.once, "in")) == ("done", None)
        assert (nest.counted("outer"), nest.counted("inner")) == ("1", None)
        await is_the_callers_again(lab, nest.pipe)
        await nest.inner(inner)
        assert (await state(nest.once, "in"), nest.counted("inner")) == ("done", "1")

    run(lab, body())


def test_R28_a_run_inside_of_a_run_may_have_a_pipeline_of_its_own(lab: RedisLab) -> None:
    async def body() -> None:
        nest = Nest(lab)
        nest.inside = nest.once.within(other := lab.pipe())

        async def work() -> None:
            nest.pipe.incr(lab.name("outer"))
            await nest._run("execute", nest.inside, "in", inner)

        async def inner() -> None:
            other.incr(lab.name("inner"))

        await nest.outer("execute", work)
        assert (nest.counted("outer"), nest.counted("inner")) == ("1", "1")
        assert (await state(nest.once, "out"), await state(nest.once, "in")) == ("done", "done")

    run(lab, body())


@pytest.mark.parametrize("verdicts", [False, True])
def test_R28_a_claim_by_hand_needs_an_empty_pipeline(lab: RedisLab, *, verdicts: bool) -> None:
    async def body() -> None:
        once, pipe, name = lab.face(), lab.pipe(), lab.name("before")
        pipe.incr(name)
        with pytest.raises(ConfigurationError, match="empty pipeline"):
            async with entered(lab, once.within(pipe).claim("k1", verdicts=verdicts)):
                pytest.fail("it was entered")
        assert (await state(once, "k1"), len(pipe), lab.plain.exists(name)) == (None, 1, 0)
        assert await wait(pipe.execute()) == [1]
        await is_the_callers_again(lab, pipe)

    run(lab, body())


def test_R28_who_waited_for_its_key_gives_it_back_when_the_pipeline_is_taken_by_then(
    redis_server: Any,
) -> None:
    lab = RedisLab("async", redis_server.url)

    async def body() -> None:
        held, waiting, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

        def heard(event: Any) -> None:
            if isinstance(event, Contended):
                waiting.set()

        other, once, pipe = lab.face(), lab.face(hooks=[heard]), lab.pipe()

        async def holds() -> None:
            held.set()
            await go_on.wait()
            raise ValueError("not now")

        async def takes() -> None:
            pipe.set(lab.name("a"), 1)
            go_on.set()
            with pytest.raises(ConfigurationError, match="another run of within"):
                await waiter

        holder = asyncio.ensure_future(other.execute("k1", holds))
        await held.wait()
        waiter = asyncio.ensure_future(
            once.within(pipe).execute("k1", lambda: pytest.fail("it ran"), wait=30)
        )
        await waiting.wait()
        await once.within(pipe).execute("k2", takes)
        with pytest.raises(ValueError, match="not now"):
            await holder
        assert lab.plain.get(lab.name("a")) == "1"
        assert (await other.execute("k1", lambda: "free", wait=30)).value == "free"
        await is_the_callers_again(lab, pipe)

    run(lab, body())


def test_R28_a_run_that_is_interrupted_when_it_begins_gives_the_pipeline_back(lab: RedisLab) -> None:
    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()

        def interrupt(name: str) -> None:
            if name == "claim.won":
                points.listen(None)
                raise KeyboardInterrupt

        points.listen(interrupt)
        with suppress(KeyboardInterrupt):
            await wait(once.within(pipe).execute("k1", lambda: pytest.fail("it ran")))
        await is_the_callers_again(lab, pipe)

    run(lab, body())


def test_R8_a_face_that_is_switched_off_gives_the_pipeline_back(lab: RedisLab) -> None:
    async def body() -> None:
        with pytest.warns(UserWarning, match="switched off"):
            once = lab.face(enabled=False)
        pipe = lab.pipe()

        async def work() -> None:
            pipe.set(lab.name("a"), 1)

        await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert lab.plain.get(lab.name("a")) == "1"
        await is_the_callers_again(lab, pipe)

    run(lab, body())


# ------------------------------------------------------------------------------------------------ clusters
def _two_slots(once: Any) -> tuple[str, str]:
    from redis.crc import key_slot

    here = once.tag("k1")
    elsewhere = next(f"{{{n}}}" for n in range(9) if key_slot(f"{{{n}}}".encode()) != key_slot(here.encode()))
    return here, elsewhere


@pytest.mark.parametrize("transaction", [True, False])
@pytest.mark.parametrize("way", ["with", "reset", "discard"])
def test_R28_a_clusters_pipeline_that_is_emptied_is_refused(
    redis_cluster: Any, way: str, *, transaction: bool
) -> None:
    from redis.cluster import RedisCluster

    once = Semel(redis_cluster.url, tenant=uuid.uuid4().hex, timeout=20)
    client: Any = RedisCluster.from_url(_first_node(redis_cluster.url))
    pipe = client.pipeline(transaction=transaction)
    here, elsewhere = _two_slots(once)

    def pays() -> None:
        if way == "with":
            with pipe:
                pipe.set(f"paid:{here}", 1)
        else:
            pipe.set(f"paid:{here}", 1)
            getattr(pipe, way)()

    def nested() -> None:
        pipe.set(f"paid:{here}", 1)
        once.within(pipe).execute("k2", lambda: pytest.fail("it ran"))

    for fn, why in ((pays, "emptied during the run"), (nested, "another run of within")):
        with pytest.raises(ConfigurationError, match=why):
            once.within(pipe).execute("k1", fn)
        record = once.peek("k1")
        assert record is not None
        assert (record.state, client.get(f"paid:{here}"), once.peek("k2")) == ("released", None, None)
        assert {"watch", "execute", "reset", "discard", "initialize"}.isdisjoint(vars(pipe))
        with pipe:
            pipe.set(f"mine:{elsewhere}", 1)
            assert len(pipe.execute()) == 1
    once.close()
    client.close()


@pytest.mark.parametrize("transaction", [True, False])
@pytest.mark.parametrize("way", ["with", "await", "reset", "discard"])
def test_R28_an_async_clusters_pipeline_that_is_emptied_is_refused(
    redis_cluster: Any, way: str, *, transaction: bool
) -> None:
    """`await pipe`, as in `await pipe.set(…)`, empties it as well."""
    from redis.asyncio.cluster import RedisCluster

    async def body() -> None:
        once = AsyncSemel(redis_cluster.url, tenant=uuid.uuid4().hex, timeout=20)
        client: Any = RedisCluster.from_url(_first_node(redis_cluster.url))
        pipe = client.pipeline(transaction=transaction)
        here, elsewhere = _two_slots(once)

        async def pays() -> None:
            queued = pipe.set(f"paid:{here}", 1)
            if way == "with":
                async with pipe:
                    pipe.set(f"paid:{here}", 1)
            else:
                await (queued if way == "await" else getattr(pipe, way)())

        async def nested() -> None:
            pipe.set(f"paid:{here}", 1)
            await once.within(pipe).execute("k2", lambda: pytest.fail("it ran"))

        for fn, why in ((pays, "emptied during the run"), (nested, "another run of within")):
            with pytest.raises(ConfigurationError, match=why):
                await once.within(pipe).execute("k1", fn)
            record = await once.peek("k1")
            assert record is not None
            assert (record.state, await client.get(f"paid:{here}")) == ("released", None)
            assert await once.peek("k2") is None
            assert {"watch", "execute", "reset", "discard", "initialize"}.isdisjoint(vars(pipe))
            async with pipe:
                pipe.set(f"mine:{elsewhere}", 1)
                assert len(await pipe.execute()) == 1
        await once.close()
        await client.aclose()

    asyncio.run(body())


@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_R28_a_WATCH_that_is_spelt_as_any_command_is_refused_by_a_clusters_pipeline(
    redis_cluster: Any, colour: str, *, caught: bool
) -> None:
    """There it is not the pipeline that sends it: every command after it was applied at once, although the function failed."""
    import redis.asyncio.cluster
    import redis.cluster

    async def body() -> None:
        sync = colour == "sync"
        face: Any = Semel if sync else AsyncSemel
        once = face(redis_cluster.url, tenant=uuid.uuid4().hex, timeout=20)
        kind: Any = redis.cluster.RedisCluster if sync else redis.asyncio.cluster.RedisCluster
        client = kind.from_url(_first_node(redis_cluster.url))
        pipe = client.pipeline(transaction=True)
        name = f"paid:{once.tag('k1')}"

        async def pays() -> str:
            try:
                await wait(pipe.execute_command("WATCH", name))
            except ConfigurationError:
                if not caught:
                    raise
            pipe.incr(name)
            return "ok"

        if caught:
            await wait(once.within(pipe).execute("k1", pays if not sync else lambda: run_sync(pays())))
        else:
            with pytest.raises(ConfigurationError, match="would not hold"):
                await wait(once.within(pipe).execute("k1", pays if not sync else lambda: run_sync(pays())))
        assert await state(once, "k1") == ("done" if caught else "released")
        assert await wait(client.get(name)) == (b"1" if caught else None)
        assert "_validate_watch" not in vars(pipe._execution_strategy)
        await wait(pipe.watch(name))
        await wait(pipe.unwatch())
        await wait(pipe.reset())
        await wait(once.close())
        await wait(client.close() if sync else client.aclose())

    (run_sync if colour == "sync" else asyncio.run)(body())


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("clustered", [True, False])
def test_R28_a_function_that_calls_multi_leaves_nothing_behind(
    request: pytest.FixtureRequest, colour: str, *, clustered: bool
) -> None:
    """redis-py refuses a second one as nested."""
    import redis.asyncio.cluster
    import redis.cluster

    url = request.getfixturevalue("redis_cluster" if clustered else "redis_server").url

    async def body() -> None:
        sync = colour == "sync"
        face: Any = Semel if sync else AsyncSemel
        once = face(url, tenant=uuid.uuid4().hex, timeout=20)
        where: Any = redis if sync else redis.asyncio
        client = (
            where.cluster.RedisCluster.from_url(_first_node(url)) if clustered else where.Redis.from_url(url)
        )
        pipe = client.pipeline(transaction=True)
        name = f"paid:{once.tag('k1')}"

        async def pays() -> None:
            pipe.multi()
            pipe.incr(name)

        async def fails() -> None:
            await pays()
            raise ZeroDivisionError

        def called(fn: Any) -> Any:
            return (lambda: run_sync(fn())) if sync else fn

        with pytest.raises(ZeroDivisionError):
            await wait(once.within(pipe).execute("k1", called(fails)))
        for _ in range(2):
            await wait(once.within(pipe).execute("k1", called(pays)))
        assert await wait(client.get(name)) == b"1"
        pipe.multi()
        pipe.get(name)
        assert await wait(pipe.execute()) == [b"1"]
        await wait(once.close())
        await wait(client.close() if sync else client.aclose())

    (run_sync if colour == "sync" else asyncio.run)(body())
